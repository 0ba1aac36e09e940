"""Both sbatch wrappers under a real Slurm: what they start, and how it ends.

The path of the checkout has a space. With `ALL_FAULTS=1` each fault is tried with both wrappers,
and `-rP` prints the seconds that docs/reliability.md quotes.
"""

import json
import os
import re
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.launch.lab import LONG, SCRIPT, SMALL, Lab, until

pytestmark = pytest.mark.launch

TORCHRUN, SRUN = "slurm_torchrun.sbatch", "slurm_srun.sbatch"
CYCLIC = "srun -mcyclic bash launch/slurm_env.sh true"


@dataclass
class Job:
    lab: Lab
    folder: Path
    report: Path
    number: str

    @property
    def text(self) -> str:
        """The output of the job. Each node has a separate file, because srun may lose a node."""
        files = [self.folder / "job.out", *sorted(self.folder.glob("*.err"))]
        return "".join(f"-- {f.name}\n{f.read_text()}" for f in files if f.exists())

    def lines(self) -> list[str]:
        """The complete lines of the report, as the nodes see it."""
        path = Path(f"/proc/{self.lab.first[0]}/root{self.report}")
        text = path.read_text() if path.exists() else ""
        return text.splitlines()[: text.count("\n")]

    def until_a_case(self) -> list[str]:
        until(lambda: len(self.lines()) > 1, lambda: self.text)  # the first line has no case
        return self.lines()

    def end(self) -> str:
        return self.lab.until_over(self.number, lambda: self.text)


@pytest.fixture
def submit(lab: Lab, checkout: Path, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """submit(wrapper, flags, script=..., ranks=1, report=..., **variables) -> Job on two nodes."""
    jobs = []

    def begin(
        wrapper: str,
        flags: str,
        script: str = SCRIPT,
        ranks: int = 1,
        report: Path = tmp_path / "a report.jsonl",
        **variables: str,
    ) -> Job:
        options = ["-N2", f"--ntasks-per-node={ranks}", f"--output={tmp_path}/job.out"]
        words = [f"launch/{wrapper}", script, *shlex.split(flags), "--json", str(report)]
        variables |= {"SLURM_STDERRMODE": f"{tmp_path}/%N.err"}
        jobs.append(lab.sbatch(*options, "--no-requeue", *words, cwd=checkout, **variables))
        return Job(lab, tmp_path, report, jobs[-1])

    yield begin
    lab.run(0, "scancel", *jobs)
    lab.names("plain")
    lab.heal()


@pytest.mark.parametrize(
    ("wrapper", "ranks", "names"),
    [(TORCHRUN, 1, "loopfqdn"), (SRUN, 2, "debian"), (SRUN, 1, "none")],
)
def test_ranks_follow_the_nodes(
    lab: Lab, submit: Callable[..., Job], wrapper: str, ranks: int, names: str
) -> None:
    """Also if a node's own name has a loopback address, and if no node knows any name."""
    lab.names(names)
    job = submit(wrapper, SMALL, ranks=ranks)
    assert job.end() == "COMPLETED", job.text
    first, *cases, last = (json.loads(line) for line in job.lines())
    assert last["status"] == "complete"
    assert [case["check"] for case in cases] == ["passed", "passed"]
    wanted = [(str(rank), f"node{rank // ranks + 1}") for rank in range(2 * ranks)]
    assert re.findall(r"# rank (\d+): (\w+),", job.text) == wanted
    networks = [rank["network"] for rank in first["environment"]["ranks"]]
    assert all(network.startswith("eth0 ") for network in networks), networks


@pytest.mark.parametrize(
    ("allocation", "command", "want"),
    [
        ("", f"launch/{SRUN} {SCRIPT}", "not running in a Slurm job; e.g. sbatch -N 2"),
        ("-N2", f"launch/{SRUN} {SCRIPT}", "unknown number of ranks per node; use sbatch --gpus"),
        ("-N2 --ntasks-per-node 2", f"launch/{SRUN} x.py", "no script x.py in /"),
        ("-N1", "bash launch/slurm_env.sh true", "not running in a Slurm step; start it with srun"),
        ("-N2 -n3", "srun -mblock bash launch/slurm_env.sh true", "expected the same number of"),
        ("-N2 --ntasks-per-node 2", CYCLIC, "use srun --distribution=block"),
    ],
)
def test_a_mistake_is_reported_in_one_line(
    lab: Lab, checkout: Path, allocation: str, command: str, want: str
) -> None:
    salloc = ["salloc", *allocation.split()] if allocation else []
    done = lab.run(0, *salloc, *command.split(), cwd=checkout)
    assert done.returncode == 2, done.stderr
    said = re.findall(r"^slurm_\S+: error: .*", done.stderr, re.M)
    assert want in said[0]
    assert len(said) == 1 or "srun" in command  # each task of a step prints it


def test_a_suite_is_requeued_and_resumes(lab: Lab, checkout: Path, tmp_path: Path) -> None:
    """Slurm's warning before the time limit ends the ranks. The job is requeued and resumes."""
    out = tmp_path / "a suite"
    options = ["-N2", "--ntasks-per-node=1", f"--output={tmp_path}/job.out"]
    suite = ["launch/suite.sh", "--out", str(out), f"collectives {LONG}"]
    number = lab.sbatch(*options, *suite, cwd=checkout)
    job = Job(lab, tmp_path, out / "collectives.jsonl", number)
    before = job.until_a_case()
    lab.run(0, "scancel", "--batch", "--signal=USR1", number)
    until(lambda: lab.state(number) == "PENDING", lambda: job.text)
    assert "the time limit is near: ending the ranks" in job.text
    assert re.search(r"SIGTERM: ended after \d cases?, saved in .*; use --resume", job.text)
    assert "requeued, 1 of at most 3 times" in job.text
    assert "suite.sh: interrupted; " in job.text
    assert not (out / "report.html").exists()
    # by default in 2 minutes; within the same second the nodes would confuse it with the old job
    lab.run(0, "scontrol", "update", f"jobid={number}", "StartTime=now+3")
    assert job.end() == "COMPLETED", job.text
    assert job.lines()[: len(before)] == before
    assert "# suite.sh: status 0" in job.text
    assert (out / "report.html").exists()


@pytest.mark.parametrize(
    ("status", "flags", "state", "want"),
    [
        (1, "--resume", "FAILED", "not requeued: already requeued 0 times; MAX_REQUEUES=0"),
        (1, "", "FAILED", "not requeued: without --resume the job would start over"),
        (0, "--resume", "COMPLETED", ""),  # it ended at that moment
    ],
)
def test_not_requeued(
    submit: Callable[..., Job], tmp_path: Path, status: int, flags: str, state: str, want: str
) -> None:
    end = f"signal.signal(15, lambda *_: sys.exit({status})); print('ready', flush=True)"
    (tmp_path / "any.py").write_text(f"import signal, sys, time\n{end}\ntime.sleep(60)\n")
    job = submit(SRUN, flags, script=str(tmp_path / "any.py"), MAX_REQUEUES="0")
    until(lambda: job.text.count("ready") == 2, lambda: job.text)
    job.lab.run(0, "scancel", "--batch", "--signal=USR1", job.number)
    assert job.end() == state, job.text
    assert want in job.text
    assert want or "requeued" not in job.text


def test_runs_of_one_name_do_not_overlap(lab: Lab, checkout: Path, tmp_path: Path) -> None:
    """More nodes than a job needs. A job that finds the folder of another one fails."""
    lines = ["import os, time", "os.mkdir('running')", "time.sleep(2)", "os.rmdir('running')", ""]
    (tmp_path / "any.py").write_text("\n".join(lines))
    options = ["-N1", "--ntasks-per-node=1", "--dependency=singleton", f"--chdir={tmp_path}"]
    options += ["--output=%j.out"]
    script = [str(checkout / "launch" / SRUN), "any.py"]
    jobs = [lab.sbatch(*options, *script, cwd=tmp_path) for _ in range(3)]

    def explain() -> str:
        return "".join(path.read_text() for path in tmp_path.glob("*.out"))

    assert [lab.until_over(job, explain) for job in jobs] == ["COMPLETED"] * 3, explain()


# -- faults ----------------------------------------------------------------------------------------


def fill_disk(lab: Lab) -> None:
    lab.run(1, "dd", "if=/dev/zero", f"of={lab.disk}/full", "bs=4K")


KILLED = r"node2: task 1: Killed|host +: node2\n +rank +: 1 .*\n +exitcode +: -9"
SILENT = r"rank 1 on node2, case '.*(stopped, dead or unreachable)"
FAULTS: dict[str, tuple[Callable[[Lab], object], str]] = {  # what happens, and the message
    "killed rank": (lambda lab: lab.ranks(2)[1].kill(), KILLED),
    "killed agent": (lambda lab: lab.ranks(2)[1].parent().kill(), KILLED),
    "stopped rank": (lambda lab: lab.ranks(2)[1].suspend(), SILENT),
    # noticed when rank 1 is needed next: by the connection of gloo or by the watchdog
    "power cut": (lambda lab: lab.power_cut(2), rf"rank 0 lost a peer: .*10\.77\.0\.2|{SILENT}"),
    "first node's power cut": (lambda lab: lab.power_cut(1), r"rank 1 (on node2.*store|lost a)"),
    "link cut": (lambda lab: lab.link_down(2), SILENT),
    "dropped packets": (lambda lab: lab.drop(2, 1), SILENT),
    "scancel": (lambda lab: lab.run(0, "scancel", "-n", "torchrun-bench"), r"SIGTERM: \d+ cases?"),
    "full disk": (fill_disk, r"\.jsonl: No space left on device; the cases before this one"),
}
FAST = [("killed rank", TORCHRUN), ("power cut", SRUN), ("dropped packets", SRUN)]
ALL = [(name, wrapper) for name in FAULTS for wrapper in (TORCHRUN, SRUN)]
ALL.remove(("killed agent", SRUN))  # srun has no agent


@pytest.mark.parametrize(("name", "wrapper"), ALL if os.environ.get("ALL_FAULTS") else FAST)
def test_a_fault_ends_the_job(
    lab: Lab, submit: Callable[..., Job], tmp_path: Path, name: str, wrapper: str
) -> None:
    """A line names the lost rank, about --timeout later. All processes end; cases are kept."""
    strike, says = FAULTS[name]
    timeout = 10  # seconds; on a busy machine a rank may start 5 s after the others
    report = (lab.disk if name == "full disk" else tmp_path) / f"a report of {wrapper}.jsonl"
    flags = f"{LONG} --resume --timeout {timeout}"
    job = submit(wrapper, flags, GIVE_UP_S="10", report=report)
    before = job.until_a_case()
    begun = time.monotonic()
    strike(lab)
    until(lambda: re.search(says, job.text), lambda: job.text)
    said = time.monotonic() - begun
    left = [node for node in (1, 2) if node in lab.started]
    until(lambda: not any(lab.processes(node) for node in left), lambda: job.text)
    print(f"{name}, {wrapper}: said, gone after {said:.1f}, {time.monotonic() - begun:.1f} s")
    after = job.lines()
    assert after[: len(before)] == before
    assert '"status"' not in after[-1]
    if "power" not in name and "link" not in name:  # Slurm takes long for a lost node
        assert job.end() == ("CANCELLED" if name == "scancel" else "FAILED")
    lab.run(1, "rm", "-f", f"{lab.disk}/full")
