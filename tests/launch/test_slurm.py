"""Both sbatch wrappers on a real Slurm of three nodes: what they start, and how it ends.

The jobs run from a checkout whose path holds a space. `ALL_FAULTS=1` plays each fault by both
wrappers, and `-rP` prints the seconds: docs/reliability.md quotes them.
"""

import json
import os
import re
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.launch.lab import OVER, Lab, until

pytestmark = [pytest.mark.launch, pytest.mark.timeout(400)]

TORCHRUN, SRUN = "slurm_torchrun.sbatch", "slurm_srun.sbatch"
SCRIPT = "benchmarks/collectives.py"  # it imports least
SMALL = "--collective all_reduce,broadcast -b 64 -e 64 --cache-warm --device cpu"
# 8 cases of 2 s each: a fault comes while the third one is measured
LONG = "-b 64 -e 8K --cache-warm --device cpu --target-ci 0.01% --max-seconds 2"


@dataclass
class Job:
    lab: Lab
    folder: Path
    report: Path
    number: str

    @property
    def text(self) -> str:
        """What the job printed; of each node apart, since srun may not hear of one."""
        files = [self.folder / "job.out", *sorted(self.folder.glob("*.err"))]
        return "".join(f"-- {f.name}\n{f.read_text()}" for f in files if f.exists())

    def lines(self) -> list[str]:
        """The whole lines of the report, as the nodes see it."""
        text = self.lab.run(0, "cat", str(self.report)).stdout
        return text.splitlines()[: text.count("\n")]

    def until_cases(self, count: int) -> list[str]:
        def there() -> bool:
            if self.lab.state(self.number) in OVER:
                pytest.fail(f"the job has ended\n{self.text}")
            return len(self.lines()) > count  # the first line is the run

        until(there, 120, lambda: self.text)
        return self.lines()

    def end(self, seconds: float = 120) -> str:
        return self.lab.until_over(self.number, seconds, lambda: self.text)


@pytest.fixture
def submit(lab: Lab, checkout: Path, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """submit(wrapper, flags, nodes=2, ranks=1, **variables) -> Job; `ranks` of a node."""
    jobs = []

    def begin(
        wrapper: str,
        flags: str,
        *options: str,
        script: str = SCRIPT,
        nodes: int = 2,
        ranks: int = 1,
        report: Path = tmp_path / "a report.jsonl",
        **variables: str,
    ) -> Job:
        files = [f"--output={tmp_path}/job.out", "--no-requeue", *options]
        size = [f"-N{nodes}", f"--ntasks-per-node={ranks}"]
        words = [*shlex.split(flags), "--json", str(report)]
        variables |= {"SLURM_STDERRMODE": f"{tmp_path}/%N.err"}
        command = [*size, *files, f"launch/{wrapper}", script, *words]
        jobs.append(lab.sbatch(*command, cwd=checkout, **variables))
        return Job(lab, tmp_path, report, jobs[-1])

    yield begin
    lab.run(0, "scancel", *jobs)
    lab.names("plain")
    lab.heal()


@pytest.mark.parametrize(
    ("wrapper", "nodes", "ranks", "names"),
    [(TORCHRUN, 3, 1, "loopfqdn"), (SRUN, 2, 2, "debian"), (TORCHRUN, 2, 1, "none")],
)
def test_ranks_follow_the_nodes(
    lab: Lab, submit: Callable[..., Job], wrapper: str, nodes: int, ranks: int, names: str
) -> None:
    """Where a node's own name leads to its loopback, too, and where no name is known."""
    lab.names(names)
    job = submit(wrapper, f"{SMALL} --iters 6", nodes=nodes, ranks=ranks)
    assert job.end() == "COMPLETED", job.text
    first, *cases, last = (json.loads(line) for line in job.lines())
    assert last["status"] == "complete"
    assert [case["check"] for case in cases] == ["passed", "passed"]
    wanted = [(rank, f"node{rank // ranks + 1}") for rank in range(nodes * ranks)]
    found = re.findall(r"# rank (\d+): (\w+),", job.text)
    assert [(int(rank), host) for rank, host in found] == wanted
    assert f"{nodes * ranks} ranks on {nodes} nodes" in job.text
    networks = [rank["network"] for rank in first["environment"]["ranks"]]
    assert all(network.startswith("eth0 ") for network in networks), networks


# -- before anything starts ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("allocation", "command", "want"),
    [
        ("", f"launch/{SRUN} {SCRIPT}", "this is no Slurm job; e.g. sbatch -N 2"),
        ("-N2", f"launch/{SRUN} {SCRIPT}", "how many ranks a node? Give sbatch --gpus-per-node"),
        ("-N2 --ntasks-per-node 2", f"launch/{TORCHRUN}", "expected a script and its flags, e.g."),
        ("-N2 --ntasks-per-node 2", f"launch/{SRUN} x.py", "no script x.py in /"),
        ("-N1", "bash launch/slurm_env.sh true", "this is no Slurm step; start it with srun"),
        ("-N1", "srun bash launch/slurm_env.sh", "expected a command, e.g. python3"),
        ("-N2 -n3", "srun -mblock bash launch/slurm_env.sh true", "expected as many tasks on each"),
        (
            "-N2 --ntasks-per-node 2",
            "srun -mcyclic bash launch/slurm_env.sh true",
            "give srun --distribution=blo",
        ),
        ("-N2", f"srun python3 {SCRIPT}", "SLURM_STEP_NUM_TASKS says 2 tasks, but each would run"),
    ],
)
def test_a_mistake_is_one_line(
    lab: Lab, checkout: Path, allocation: str, command: str, want: str
) -> None:
    salloc = ["salloc", *allocation.split()] if allocation else []
    done = lab.run(0, *salloc, *command.split(), cwd=checkout)
    said = [line for line in done.stderr.splitlines() if ": error: " in line]
    said = [line for line in said if not line.startswith(("srun:", "salloc:"))]
    assert done.returncode == 2, done.stderr
    assert want in said[0]
    assert len(said) == 1 or "slurm_env" in command  # each task of a step says it


def test_dry_run(lab: Lab, checkout: Path) -> None:
    command = ["salloc", "-N3", "--ntasks-per-node=4", f"{checkout}/launch/{TORCHRUN}", SCRIPT]
    variables = {"DRY_RUN": "1", "SRUN_ARGS": "--container-image=my/image"}
    done = lab.run(0, *command, "--json", "a report.jsonl", cwd=checkout, **variables)
    assert done.returncode == 0, done.stderr
    assert shlex.split(done.stdout) == [
        *("srun", "--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--distribution=block"),
        *("--kill-on-bad-exit=1", "--container-image=my/image", "--cpu-bind=none", "bash"),
        *(f"{checkout}/launch/slurm_env.sh", "torchrun", "--nproc-per-node=4", SCRIPT),
        *("--json", "a report.jsonl"),
    ]


# -- requeue ---------------------------------------------------------------------------------------


def test_a_suite_is_requeued_and_goes_on(lab: Lab, checkout: Path, tmp_path: Path) -> None:
    """Slurm's warning before the time limit ends the ranks; the job comes again, and goes on."""
    out = tmp_path / "a suite"
    scripts = [f"collectives {LONG} -e 512", "p2p_matrix --device cpu --iters 6"]
    options = ["-N2", "--ntasks-per-node=1", f"--output={tmp_path}/job.out"]
    number = lab.sbatch(*options, "launch/suite.sh", "--out", str(out), *scripts, cwd=checkout)
    job = Job(lab, tmp_path, out / "collectives.jsonl", number)
    before = job.until_cases(2)
    lab.run(0, "scancel", "--batch", "--signal=USR1", number)
    until(lambda: lab.state(number) == "PENDING", 60, lambda: job.text)
    assert "the time is nearly up: ending the ranks" in job.text
    assert re.search(r"SIGTERM: \d cases? .* measured and in .*; go on with --resume", job.text)
    assert "requeued, 1 of at most 3 times" in job.text
    assert "suite.sh: interrupted; " in job.text
    assert "suite.sh: p2p_matrix" not in job.text
    # Slurm waits for 2 minutes; within the same second the nodes take it for the stopped job
    lab.run(0, "scontrol", "update", f"jobid={number}", "StartTime=now+3")
    assert job.end() == "COMPLETED", job.text
    assert job.lines()[: len(before)] == before
    assert "# suite.sh: status 0" in job.text
    page = lab.run(0, "cat", str(out / "report.html")).stdout
    assert re.search("<title>.*collectives, p2p_matrix", page)


@pytest.mark.parametrize(
    ("script", "flags", "state", "want"),
    [
        ("sys.exit(1)", "--resume", "FAILED", "not requeued: 0 times before; MAX_REQUEUES=0"),
        ("sys.exit(1)", "", "FAILED", "not requeued: without --resume it would begin anew"),
        ("sys.exit(0)", "--resume", "COMPLETED", ""),  # it had just ended
    ],
)
def test_not_requeued(
    submit: Callable[..., Job], tmp_path: Path, script: str, flags: str, state: str, want: str
) -> None:
    end = f"signal.signal(15, lambda *_: {script}); print('ready', flush=True); time.sleep(60)"
    (tmp_path / "any.py").write_text(f"import signal, sys, time\n{end}\n")
    job = submit(SRUN, flags, script=str(tmp_path / "any.py"), MAX_REQUEUES="0")
    until(lambda: job.text.count("ready") == 2, 30, lambda: job.text)
    job.lab.run(0, "scancel", "--batch", "--signal=USR1", job.number)
    assert job.end() == state, job.text
    assert want in job.text
    assert want or "requeued" not in job.text


# -- faults ----------------------------------------------------------------------------------------


def signal_rank(lab: Lab, number: int) -> None:
    os.kill(lab.ranks(2)[1], number)


def kill_agent(lab: Lab) -> None:
    psutil.Process(lab.ranks(2)[1]).parent().kill()


def fill_disk(lab: Lab) -> None:
    lab.run(1, "dd", "if=/dev/zero", f"of={lab.disk}/full", "bs=4K")


SILENT = r"rank 1 on node2, case '.*(stopped, dead or out of reach)"
FAULTS: dict[str, tuple[Callable[[Lab], object], str]] = {  # what happens, what is said
    "killed rank": (lambda lab: signal_rank(lab, signal.SIGKILL), r"node2: task 1: Killed"),
    "killed agent": (kill_agent, r"node2: task 1: Killed"),
    "stopped rank": (lambda lab: signal_rank(lab, signal.SIGSTOP), SILENT),
    # found where rank 1 is called next: by gloo's connection, or by the roll call
    "power cut": (lambda lab: lab.power_cut(2), rf"rank 0 lost a peer: .*10\.77\.0\.2|{SILENT}"),
    "first node's power cut": (lambda lab: lab.power_cut(1), r"rank 1 (on node2.*store|lost a)"),
    "link cut": (lambda lab: lab.link_down(2), SILENT),
    "dropped packets": (lambda lab: lab.drop(2, 1), SILENT),
    "scancel": (lambda lab: lab.run(0, "scancel", "-n", "torchrun-bench"), r"SIGTERM: \d+ cases"),
    "full disk": (fill_disk, r"\.jsonl: No space left on device; it holds the cases before"),
}
FAST = [("killed rank", TORCHRUN), ("power cut", SRUN), ("scancel", SRUN)]
FAST += [("dropped packets", SRUN)]
ALL = [(name, wrapper) for name in FAULTS for wrapper in (TORCHRUN, SRUN)]
ALL.remove(("killed agent", SRUN))  # it has none


@pytest.mark.parametrize(("name", "wrapper"), ALL if os.environ.get("ALL_FAULTS") else FAST)
def test_a_fault_ends_the_job(
    lab: Lab, submit: Callable[..., Job], tmp_path: Path, name: str, wrapper: str
) -> None:
    """Who is lost is said within --timeout + 10 s, all processes end, finished cases are kept."""
    strike, says = FAULTS[name]
    if (name, wrapper) == ("killed rank", TORCHRUN):
        says = r"host +: node2\n +rank +: 1 .*\n +exitcode +: -9"
    timeout = 10  # seconds; on a full machine a rank may start 5 after the others
    place = {"report": lab.disk / f"{wrapper}.jsonl"} if name == "full disk" else {}
    job = submit(wrapper, f"{LONG} --resume --timeout {timeout}", GIVE_UP_S="10", **place)
    before = job.until_cases(2)
    begun, named, gone = time.monotonic(), 0.0, dict[int, float]()
    strike(lab)
    left = {node for node in (1, 2) if node in lab.started}
    while not named or gone.keys() != left:
        seconds = time.monotonic() - begun
        assert seconds < timeout * 1.5 + 60, f"{name}: named {named}, gone {gone}\n{job.text}"
        if not named and re.search(says, job.text):
            named = seconds
        for node in left - gone.keys():
            if not lab.processes(node):
                gone[node] = seconds
        time.sleep(0.1)
    print(f"{name}, {wrapper}: said after {named:.1f} s, all gone after {max(gone.values()):.1f} s")
    assert named < timeout + 10
    after = job.lines()
    assert after[: len(before)] == before
    assert '"status"' not in after[-1]
    if name == "scancel":
        assert job.end() == "CANCELLED"
    elif "power" not in name and "link" not in name:  # Slurm takes its time with a lost node
        assert job.end() == "FAILED"
    print(job.text)
    lab.run(1, "rm", "-f", f"{lab.disk}/full")
