"""What breaks in a cluster, on a real Slurm: who is named how soon, and whether all of it ends.

Every fault comes while a case is measured and others are in the report. Then within --timeout
and 10 s somebody says who is lost, where and in which case; within another 30 s no process is left
on any node; and the report holds every case that was finished.
"""

import contextlib
import dataclasses
import json
import os
import re
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, TINY, load, slow
from lab import Lab, wait_until, why_not

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.timeout(900),
]

TORCHRUN, SRUN = "slurm_torchrun.sbatch", "slurm_srun.sbatch"
TIMEOUT = 10  # of the benchmarks, in s
NAMED, GONE = 10, 30  # the limits: beyond the timeout, and beyond that

# two cases at once, and one that takes long
SWEEP = f"tests/faults/driver.py {shlex.join(TINY)} --target-ci 0.01% --max-seconds 300"
COLLECTIVES = "benchmarks/collectives.py -b 64K -e 2M -i 64K -n 400 -w 1 --cache-warm"
RPC = "benchmarks/rpc_latency.py --sizes 4,8,16,32,64,128,256,512 --ops rpc_sync --rpc-threads 2,3"
RPC += " --target-ci 0.01% --max-seconds 4"
SERVERS = "benchmarks/parameter_server.py --num-embeddings 32 --embedding-dim 16 --dense-layers 3"
SERVERS += " --dense-size 16 --classes 8 --sample-count 20 --batch-size 4 --bucket-size 0.001"
SERVERS += " --routes rpc --target-ci 0.01% --max-seconds 6"


# what is said
IN_CASE = r"in case '[^']+', phase '[^']*'"
SILENT = r"does not answer \(stopped, dead or out of reach\); last seen " + IN_CASE
RANK_0, RANK_1 = f"rank 0 on node1 {SILENT}", f"rank 1 on node2 {SILENT}"
DEAD = f"rank 3 on node2 (died {IN_CASE}|{SILENT})"  # another rank of its node may have seen it die
STORE = r"\[rank 1 node2\].*the rendezvous store of (rank 0|torchrun's agent) at \S+ "
STORE += f"(is gone|is out of reach|does not answer); this rank was {IN_CASE}"


@dataclasses.dataclass(frozen=True)
class Fault:
    """What befalls node1 and node2, which run a script; rank 0 is on node1, the last one on node2.

    says: expressions to be found in what the nodes print. known: rank 0 lives, and its report has
    the first of them. cases: in the report when it happens. lost: the node that is dead then.
    """

    script: str
    does: Callable[[Lab], object]
    says: tuple[str, ...]
    known: bool = True
    ranks: int = 1
    cases: int = 1
    lost: int = 0
    timeout: int = TIMEOUT


def stop(lab: Lab, node: int, rank: int) -> None:
    os.kill(lab.ranks(node)[rank], signal.SIGSTOP)


BOTH = (RANK_1, STORE)  # of the network: each side ends by itself
FAULTS = {
    "rank killed": Fault(SWEEP, lambda lab: lab.kill_rank(2, 3), (DEAD,), ranks=2, cases=3),
    "rank stopped": Fault(SWEEP, lambda lab: stop(lab, 2, 1), (RANK_1,), cases=2),
    "rank 0 killed": Fault(
        SWEEP, lambda lab: lab.kill_rank(1, 0), (f"{RANK_0}|{STORE}",), known=False, cases=2
    ),
    "rank 0 stopped": Fault(
        SWEEP, lambda lab: stop(lab, 1, 0), (f"{RANK_0}|{STORE}",), known=False, cases=2
    ),
    "node killed": Fault(SWEEP, lambda lab: lab.power_cut(2), (RANK_1,), cases=2, lost=2),
    "first node killed": Fault(
        SWEEP, lambda lab: lab.power_cut(1), (STORE,), known=False, cases=2, lost=1
    ),
    "link down, sweep": Fault(SWEEP, lambda lab: lab.link_down(2), BOTH, cases=2),
    "link down, collectives": Fault(COLLECTIVES, lambda lab: lab.link_down(2), BOTH),
    "link down, RPC": Fault(RPC, lambda lab: lab.link_down(2), BOTH),
    "link of the first node down": Fault(SWEEP, lambda lab: lab.link_down(1), BOTH, cases=2),
    "packets lost, sweep": Fault(SWEEP, lambda lab: lab.drop(2, 1), BOTH, cases=2),
    "packets lost, collectives": Fault(COLLECTIVES, lambda lab: lab.drop(2, 1), BOTH),
    "packets lost, RPC": Fault(RPC, lambda lab: lab.drop(2, 1), BOTH),
    "packets lost, parameter server": Fault(
        SERVERS, lambda lab: lab.drop(2, 1), (f"rank 2 on node2 {SILENT}",), ranks=2, timeout=20
    ),
}
FAST = {  # a launcher each; SLOW_TESTS=1 runs all by both
    ("rank killed", TORCHRUN),
    ("rank stopped", SRUN),
    ("node killed", TORCHRUN),
    ("link down, collectives", SRUN),
    ("packets lost, RPC", TORCHRUN),
}
TRIED = [
    pytest.param(
        name,
        wrapper,
        id=f"{name}, {wrapper.split('_')[1].split('.')[0]}",
        marks=[] if (name, wrapper) in FAST else slow,
    )
    for name in FAULTS
    for wrapper in (TORCHRUN, SRUN)
]


@dataclasses.dataclass
class Run:
    """A job on node1 and node2, and its fault at the time `begun`."""

    lab: Lab
    fault: Fault
    wrapper: str
    folder: Path
    requeue: bool = False
    job: str = ""
    before: dict[str, Any] = dataclasses.field(default_factory=dict)
    begun: float = 0.0
    named: dict[str, float] = dataclasses.field(default_factory=dict)  # s until each word was said
    gone: dict[int, float] = dataclasses.field(default_factory=dict)  # s until each node was empty

    @property
    def path(self) -> Path:
        return self.folder / "report.json"

    def text(self) -> str:
        files = [self.folder / "job.out", *sorted(self.folder.glob("*.err"))]
        return "".join(
            f"-- {path.name}\n{path.read_text(errors='replace')}" for path in files if path.exists()
        )

    def start(self) -> None:
        """Until it is in the middle. Each node writes its stderr itself: srun may not hear it."""
        job = ["--nodelist=node1,node2", f"--output={self.folder}/job.out"]
        job += ["--requeue" if self.requeue else "--no-requeue"]
        job += [f"--export=ALL,SLURM_STDERRMODE={self.folder}/%N.err", f"launch/{self.wrapper}"]
        job += ["--nproc-per-node", str(self.fault.ranks), *shlex.split(self.fault.script)]
        job += ["--device", "cpu", "--timeout", str(self.fault.timeout), "--json", str(self.path)]
        self.job = self.lab.sbatch(job, cwd=ROOT)
        for _ in range(60):
            with contextlib.suppress(AssertionError):
                wait_until(self.in_the_middle, 5)
                break
            assert self.lab.job(self.job)["JobState"] in ("PENDING", "RUNNING"), self.text()
        time.sleep(2)  # the next case has begun
        self.before = load(self.path)

    def in_the_middle(self) -> bool:
        return self.path.exists() and len(load(self.path)["cases"]) >= self.fault.cases

    def strike(self) -> None:
        self.begun = time.monotonic()
        self.fault.does(self.lab)

    def watch(self) -> None:
        """Until no process is left, or the time is over; says when what happened."""
        living = {1, 2} - {self.fault.lost}
        limit = self.fault.timeout + NAMED + GONE
        while (seconds := time.monotonic() - self.begun) < limit:
            text = self.text()
            for pattern in self.fault.says:
                if re.search(pattern, text):
                    self.named.setdefault(pattern, seconds)
            for node in living - self.gone.keys():
                if not self.lab.processes(node):
                    self.gone[node] = time.monotonic() - self.begun
            if len(self.named) == len(self.fault.says) and self.gone.keys() == living:
                break
            time.sleep(0.1)

    def mend(self) -> None:
        for node in (1, 2):
            self.lab.restart(node) if self.fault.lost == node else self.lab.heal(node)

    def heal(self) -> None:
        self.lab.run(0, ["scancel", self.job])
        self.mend()
        wait_until(lambda: not self.lab.processes(1) and not self.lab.processes(2), 120, self.text)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(tmp_path_factory.mktemp("lab"), 3) as lab:
        yield lab


@pytest.mark.parametrize(("name", "wrapper"), TRIED)
def test_a_fault(lab: Lab, tmp_path: Path, name: str, wrapper: str) -> None:
    run = Run(lab, FAULTS[name], wrapper, tmp_path)
    try:
        run.start()
        run.strike()
        run.watch()
    finally:
        run.heal()
    text = run.text()
    said = ", ".join(f"{seconds:.1f}" for seconds in run.named.values())
    gone = ", ".join(f"{seconds:.1f} (node{node})" for node, seconds in sorted(run.gone.items()))
    figures = f"{name}, {wrapper}: said after {said} s; all gone after {gone} s"
    print(f"{figures}\n{load(run.path).get('reason')}\n{text}")  # shown by pytest -rP
    assert len(run.named) == len(run.fault.says), figures
    named = max(run.named.values())
    assert named <= run.fault.timeout + NAMED, figures
    assert run.gone.keys() == {1, 2} - {run.fault.lost}, figures
    assert max(run.gone.values()) <= named + GONE, figures
    report = load(run.path)
    assert report["cases"][: len(run.before["cases"])] == run.before["cases"]
    assert {case["check"] for case in report["cases"]} == {"passed"}
    if run.fault.known:
        assert report["status"] in ("failed", "interrupted")
        assert re.search(run.fault.says[0], report["reason"])
    else:  # nobody was left to write it, unless Slurm's SIGCONT woke rank 0
        assert report["status"] in ("running", "interrupted")


@slow
@pytest.mark.parametrize("name", ["node killed", "packets lost, sweep"])
def test_requeued_and_resumed(lab: Lab, tmp_path: Path, name: str) -> None:
    """By Slurm, once it takes the node for dead; by the wrapper, where it never does."""
    run = Run(lab, FAULTS[name], TORCHRUN, tmp_path, requeue=True)
    try:
        run.start()
        run.strike()
        lab.wait_for_state(run.job, "PENDING", timeout=120)
    except BaseException:
        lab.run(0, ["scancel", run.job])
        raise
    finally:
        run.mend()

    def idle() -> bool:
        return set(lab.run(0, ["sinfo", "-h", "-N", "-o", "%T"]).stdout.split()) == {"idle"}

    # Slurm waits 2 minutes; too early the nodes take it for the job that was stopped
    wait_until(idle, 120, run.text)
    lab.run(0, ["scontrol", "update", f"jobid={run.job}", "StartTime=now+5"])
    assert lab.wait_for_end(run.job, 300) == "COMPLETED", run.text()
    report = load(run.path)
    assert report["status"] == "complete", run.text()
    assert report["cases"][:2] == run.before["cases"]  # not measured again
    assert len(report["cases"]) == 3
    given_up = "srun still waits for others: given up" in run.text()
    assert given_up == (name != "node killed"), run.text()


# -- slow nodes and a full disk --------------------------------------------------------------------


def submit(lab: Lab, path: Path, nodes: int, script: str) -> str:
    """Run a script on so many nodes, with one rank each; the job's number."""
    command = [f"launch/{SRUN}", "--nproc-per-node=1", *shlex.split(script), "--device=cpu"]
    output = f"--output={path.with_suffix('.out')}"
    return lab.sbatch([f"-N{nodes}", output, *command, f"--json={path}"], cwd=ROOT)


def complete(lab: Lab, job: str, path: Path) -> tuple[dict[str, Any], str]:
    """The report at the end of a job, and what it printed."""
    state, text = lab.wait_for_end(job, 300), path.with_suffix(".out").read_text()
    assert state == "COMPLETED", text
    return load(path), text


def test_a_slow_link_is_named(lab: Lab, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    script = "benchmarks/p2p_matrix.py --size=256K -n2 -w1 --blocks=3"
    lab.slow_link(2, "20mbit")
    try:
        _, text = complete(lab, submit(lab, path, 3, script), path)
    finally:
        lab.heal(2)
    assert re.search(r"# slow node 1 \(node2\): bandwidth \d+\.\d+x slower", text), text
    assert not re.search(r"# slow \w+ [02] \(node[13]\): (bandwidth|bidirectional)", text), text


def test_a_slow_node_is_named(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    with Lab(tmp_path / "lab", 2) as lab:
        job = submit(lab, path, 2, f"benchmarks/ddp_sweep.py {shlex.join(TINY)} --iters=10")
        wait_until(lambda: path.exists() and load(path)["cases"], 300)  # that of node1 alone
        try:
            lab.slow_cpu(2, 0.04)
        except RuntimeError as error:
            pytest.skip(str(error))
        report, text = complete(lab, job, path)
    metrics = report["cases"][-1]["metrics"]
    assert (metrics["straggler_rank"], metrics["straggler_host"]) == (1, "node2"), text
    assert metrics["straggler_factor"] > 1.5, text
    assert f" 1 (node2) {metrics['straggler_factor']:.2f}x " in text


def test_a_full_shared_disk(lab: Lab, tmp_path: Path) -> None:
    """The report stays as it was before; the run goes on, says so, and fails at its end."""
    path = lab.disk / "report.json"
    output = tmp_path / "job.out"
    script = [*shlex.split(SWEEP)[:-1], "6", "--device=cpu", f"--json={path}"]
    wrapper = [f"launch/{SRUN}", "--nproc-per-node=1"]
    job = lab.sbatch(["-N2", "--no-requeue", f"--output={output}", *wrapper, *script], cwd=ROOT)

    def there() -> dict[str, Any]:
        done = lab.run(1, ["cat", str(path)])
        report: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {"cases": []}
        return report

    wait_until(lambda: len(there()["cases"]) == 2, 300, output.read_text)
    before = there()
    lab.run(1, ["dd", "if=/dev/zero", f"of={lab.disk}/full", "bs=4K"])
    try:
        assert lab.wait_for_end(job, 300) == "FAILED", output.read_text()
        text = output.read_text()
        assert there() == before, text
    finally:
        lab.run(1, ["rm", f"{lab.disk}/full"])
    assert before["status"] == "running"
    said = f"error: cannot write {path}: No space left on device; its previous version is intact"
    assert said in text
    assert "Traceback" not in text
    assert re.search(r"^2M/1G .*\n(.*\n)*Why:(.*\n)*2M/1G ", text, re.MULTILINE), text
