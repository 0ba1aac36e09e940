"""launch/mpi_env.sh under Debian's Open MPI and MPICH, on nodes that are reached by ssh.

tests/pure/test_mpi_env.py has the launchers that Debian lacks.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.report import load
from tests.launch.lab import SCRIPT, SMALL, Lab, need, until

pytestmark = pytest.mark.launch

OPEN, MPICH = "mpirun.openmpi", "mpirun.mpich"
BOTH = pytest.mark.parametrize("launcher", [OPEN, MPICH])
SHOW = 'echo "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT"'


def mpirun(
    lab: Lab, node: int, launcher: str, place: list[str], *command: str, cwd: Path
) -> subprocess.CompletedProcess[str]:
    """Start mpirun on a node, with launch/mpi_env.sh and a command."""
    need(launcher)
    ssh = f"ssh -F {lab.ssh_conf}"
    reach = {"OMPI_MCA_plm_rsh_agent": ssh, "HYDRA_LAUNCHER": "ssh"}
    reach["HYDRA_LAUNCHER_EXTRA_ARGS"] = ssh.removeprefix("ssh ")
    # by default Open MPI binds each rank to a core, and there are 2 cores
    as_root = ["--allow-run-as-root", "--bind-to", "none"] if launcher == OPEN else []
    words = [launcher, *as_root, *place, "bash", "launch/mpi_env.sh", *command]
    return lab.run(node, *words, cwd=cwd, **reach)


def two_hosts(launcher: str, ranks: int) -> list[str]:
    """The options for `ranks` on each of two nodes."""
    if launcher == MPICH:
        return ["-hosts", "node1,node2", "-ppn", str(ranks), "-n", str(2 * ranks)]
    return ["--host", f"node1:{ranks},node2:{ranks}", "--map-by", f"ppr:{ranks}:node"]


@BOTH
def test_one_host(lab: Lab, checkout: Path, launcher: str) -> None:
    place = ["-n", "4", *(["--oversubscribe"] if launcher == OPEN else [])]
    done = mpirun(lab, 1, launcher, place, "bash", "-c", SHOW, cwd=checkout)
    assert done.returncode == 0, done.stderr
    rows = sorted(line.split() for line in done.stdout.splitlines())
    port = rows[0][-1]
    assert rows == [[str(rank), str(rank), "4", "4", "127.0.0.1", port] for rank in range(4)]


@pytest.mark.parametrize(("launcher", "names"), [(OPEN, "debian"), (MPICH, "plain")])
def test_two_hosts(lab: Lab, checkout: Path, tmp_path: Path, launcher: str, names: str) -> None:
    """The ranks find each other through mpirun's own host, without a setting of the user."""
    lab.names(names)
    report = tmp_path / "a report.jsonl"
    command = [sys.executable, SCRIPT, *SMALL.split(), "--json", str(report)]
    done = mpirun(lab, 1, launcher, two_hosts(launcher, 1), *command, cwd=checkout)
    lab.names("plain")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"# rank (\d): (\w+),", done.stdout) == [("0", "node1"), ("1", "node2")]
    assert [case.check for case in load(str(report)).cases] == ["passed", "passed"]


@BOTH
def test_mpirun_on_a_third_host(lab: Lab, checkout: Path, launcher: str) -> None:
    """If mpirun is on a third host, its host is not that of rank 0."""
    place, show = two_hosts(launcher, 2), ["bash", "-c", f"{SHOW}; hostname"]
    done = mpirun(lab, 3, launcher, place, *show, cwd=checkout)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "on node1 cannot determine the host of rank 0; set MASTER_ADDR, e.g. mp" in done.stderr
    given = ["-genv", "MASTER_ADDR", "node1"] if launcher == MPICH else ["-x", "MASTER_ADDR=node1"]
    done = mpirun(lab, 3, launcher, [*given, *place], *show, cwd=checkout)
    assert done.returncode == 0, done.stderr
    assert len(set(re.findall(r" node1 \d{5}$", done.stdout, re.M))) == 1
    assert done.stdout.count("node2\n") == 2


@pytest.mark.parametrize(
    ("launcher", "what", "want", "status"),
    [
        (MPICH, '[ "$RANK" = 0 ] || kill -KILL $$', "mpi_env.sh: rank 1 on node1: SIGKILL", 9),
        # Ctrl-C. Open MPI sends its ranks SIGTERM and, soon after, SIGKILL: on a busy machine
        # before a rank has handled the first one, so a rank cannot be expected to tell
        (OPEN, '[ "$RANK" = 1 ] || { sleep 1; kill -INT $(ps -o ppid= $PPID); }', "", 1),
    ],
)
def test_all_ranks_end_with_one(
    lab: Lab, checkout: Path, launcher: str, what: str, want: str, status: int
) -> None:
    """When one rank ends, all end at once."""
    command = ["bash", "-c", f"{what}; sleep 300"]
    done = mpirun(lab, 1, launcher, ["-n", "2"], *command, cwd=checkout)
    assert done.returncode == status, done.stdout + done.stderr
    assert want in done.stdout + done.stderr
    until(lambda: not lab.processes(1), lambda: str(lab.processes(1)))


STOPS = """
import os, signal, torch

calls = 0

def loss(y):
    global calls
    calls += 1
    if calls == 20 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    return y.sum()

def make(device):
    return torch.nn.Linear(4, 4), torch.ones(2, 4), loss
"""


@pytest.mark.parametrize(("launcher", "status"), [(OPEN, 3), (MPICH, 9)])
def test_a_rank_that_stops_is_killed(lab: Lab, checkout: Path, launcher: str, status: int) -> None:
    (checkout / "stops.py").write_text(STOPS)
    flags = ("--model", "stops:make", "--world-sizes", "2", "--timeout", "20")
    command = [sys.executable, "benchmarks/ddp_sweep.py", *flags]
    done = mpirun(lab, 1, launcher, ["-n", "2"], *command, cwd=checkout)
    assert done.returncode == status, done.stdout + done.stderr
    assert "mpi_env.sh: rank 1 on node1: ended because it hung\n" in done.stdout + done.stderr
    until(lambda: not lab.processes(1), lambda: str(lab.processes(1)))
