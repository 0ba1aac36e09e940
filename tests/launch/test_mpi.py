"""launch/mpi_env.sh under Debian's Open MPI and MPICH: on this host, and on two of the lab's nodes
that ssh reaches. tests/pure/test_mpi_env.py has the launchers that Debian does not.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from common.report import load
from tests.launch.lab import PATH, Lab, need, until

pytestmark = [pytest.mark.launch, pytest.mark.timeout(300)]

SCRIPT = "benchmarks/collectives.py"  # it imports least
SMALL = "--collective all_reduce,broadcast -b 64 -e 64 --cache-warm --device cpu --iters 6"
LONG = "-b 64 -e 8K --cache-warm --device cpu --target-ci 0.01% --max-seconds 1"

OPEN, MPICH = "mpirun.openmpi", "mpirun.mpich"
AS_ROOT = ["--allow-run-as-root", "--bind-to", "none"]  # Open MPI's own choice is a core a rank
ON_ONE_HOST = {OPEN: [*AS_ROOT, "--oversubscribe"], MPICH: []}
SHOW = 'echo "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT"'

SSHD = """
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
"""
AGENT = """#!/bin/sh
exec ssh -i {folder}/key -o BatchMode=yes -o LogLevel=ERROR \
    -o UserKnownHostsFile=/dev/null -o StrictHostKeyChecking=no "$@"
"""


@pytest.fixture
def mpirun(checkout: Path, tmp_path: Path) -> Iterator[Callable[..., psutil.Popen]]:
    """mpirun(launcher, ranks, *words): its output goes to tmp_path/out and tmp_path/err."""
    started = []

    def start(launcher: str, ranks: int, *words: str) -> psutil.Popen:
        need(launcher)
        command = [launcher, *ON_ONE_HOST[launcher], "-n", str(ranks), *words]
        left_out = ("SLURM_", "OMPI_", "PMI", "MASTER_")
        env = {k: v for k, v in os.environ.items() if not k.startswith(left_out)}
        with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
            process = psutil.Popen(
                command,
                cwd=checkout,
                env=env | {"PATH": PATH, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )
        started.append(process)
        return process

    yield start
    for process in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            for left in [*process.children(recursive=True), process]:
                left.kill()


def ranks_of(process: psutil.Process) -> dict[int, psutil.Process]:
    """The processes of the script below a launcher, by rank."""
    ranks = {}
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if SCRIPT in child.cmdline()[1:2]:
                ranks[int(child.environ()["RANK"])] = child
    return ranks


@pytest.mark.parametrize("launcher", [OPEN, MPICH])
def test_one_host(mpirun: Callable[..., psutil.Popen], tmp_path: Path, launcher: str) -> None:
    ranks = 4
    process = mpirun(launcher, ranks, "bash", "launch/mpi_env.sh", "bash", "-c", SHOW)
    assert process.wait(60) == 0, (tmp_path / "err").read_text()
    rows = sorted(line.split() for line in (tmp_path / "out").read_text().splitlines())
    port = rows[0][-1]
    assert rows == [
        [str(r), str(r), str(ranks), str(ranks), "127.0.0.1", port] for r in range(ranks)
    ]


def test_without_the_wrapper(mpirun: Callable[..., psutil.Popen], tmp_path: Path) -> None:
    process = mpirun(OPEN, 2, sys.executable, SCRIPT, "--device", "cpu")
    assert process.wait(120) == 2
    said = (tmp_path / "err").read_text()
    assert said.count("OMPI_COMM_WORLD_SIZE says 2 tasks, but each would run by itself") == 1
    assert "launch/mpi_env.sh (mpirun, flux)" in said


@pytest.mark.parametrize(
    ("launcher", "what", "want", "status"),
    [
        (MPICH, "killed rank", r"mpi_env.sh: rank 1 on \S+: SIGKILL", 9),
        # it ends its ranks by SIGTERM
        (OPEN, "Ctrl-C", r"SIG(INT|TERM): \d cases? .*go on with --resume", 1),
    ],
)
def test_how_it_ends(
    mpirun: Callable[..., psutil.Popen],
    tmp_path: Path,
    launcher: str,
    what: str,
    want: str,
    status: int,
) -> None:
    """At once, and with the cases that were finished."""
    report = tmp_path / "a report.jsonl"
    words = [sys.executable, SCRIPT, *LONG.split(), "--json", str(report)]
    process = mpirun(launcher, 2, "bash", "launch/mpi_env.sh", *words)

    def said() -> str:
        return (tmp_path / "out").read_text() + (tmp_path / "err").read_text()

    def it_measures() -> bool:
        assert process.is_running(), said()
        return report.exists() and report.read_text().count("\n") > 1

    until(it_measures, 120, said)
    ranks = ranks_of(process)
    assert ranks.keys() == {0, 1}
    if what == "Ctrl-C":
        process.send_signal(signal.SIGINT)
    else:
        ranks[1].kill()
    assert process.wait(30) == status, said()
    assert re.search(want, said()), said()
    until(lambda: not any(rank.is_running() for rank in ranks.values()), 20, said)
    assert load(str(report)).status == "interrupted"


# -- two hosts -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def agent(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What mpirun reaches the lab's nodes with: ssh, and an sshd on each of them."""
    need(OPEN, MPICH, "sshd", "ssh", "ssh-keygen")
    folder = tmp_path_factory.mktemp("agent")
    keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key")]
    subprocess.run(keygen, check=True, timeout=30)
    (folder / "sshd_config").write_text(SSHD.format(folder=folder))
    (folder / "agent").write_text(AGENT.format(folder=folder))
    (folder / "agent").chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)  # where sshd's unprivileged part is confined
    sshd = shutil.which("sshd", path=PATH)
    for node in (1, 2):
        log = folder / f"sshd-{node}.log"
        done = lab.run(node, str(sshd), "-E", str(log), "-f", f"{folder}/sshd_config")
        assert done.returncode == 0, log.read_text()
    yield folder / "agent"
    for node in (1, 2):  # others look at what runs there
        for pid in lab.processes(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)


def on_two_hosts(launcher: str, agent: Path, ranks: int) -> list[str]:
    """mpirun's words for so many ranks on each of two nodes."""
    if launcher == MPICH:
        reach = ["-launcher", "ssh", "-launcher-exec", str(agent)]
        return [MPICH, *reach, "-hosts", "node1,node2", "-ppn", str(ranks), "-n", str(2 * ranks)]
    reach = [*AS_ROOT, "--mca", "plm_rsh_agent", str(agent)]
    hosts = f"node1:{ranks},node2:{ranks}"
    return [OPEN, *reach, "--host", hosts, "--map-by", f"ppr:{ranks}:node"]


@pytest.mark.parametrize(("launcher", "names"), [(OPEN, "debian"), (MPICH, "plain")])
def test_two_hosts(
    lab: Lab, agent: Path, checkout: Path, tmp_path: Path, launcher: str, names: str
) -> None:
    """Ranks meet on mpirun's own host without a word from the user."""
    lab.names(names)
    report = tmp_path / "a report.jsonl"
    wrapped = ["bash", "launch/mpi_env.sh", sys.executable, SCRIPT, *SMALL.split()]
    words = [*on_two_hosts(launcher, agent, 1), *wrapped, "--json", str(report)]
    done = lab.run(1, *words, cwd=checkout)
    lab.names("plain")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# 2 ranks on 2 nodes" in done.stdout
    assert re.findall(r"# rank (\d): (\w+),", done.stdout) == [("0", "node1"), ("1", "node2")]
    assert [case.check for case in load(str(report)).cases] == ["passed", "passed"]


@pytest.mark.parametrize("launcher", [OPEN, MPICH])
def test_ranks_follow_the_hosts(lab: Lab, agent: Path, checkout: Path, launcher: str) -> None:
    words = ["bash", "launch/mpi_env.sh", "bash", "-c", f"{SHOW}; hostname"]
    done = lab.run(1, *on_two_hosts(launcher, agent, 2), *words, cwd=checkout)
    assert done.returncode == 0, done.stderr
    assert len(set(re.findall(r"(\S+ \d{5})$", done.stdout, re.M))) == 1  # address and port
    assert done.stdout.count("node2") == 2


@pytest.mark.parametrize("launcher", [OPEN, MPICH])
def test_mpirun_elsewhere(lab: Lab, agent: Path, checkout: Path, launcher: str) -> None:
    """mpirun on a third host is not where rank 0 is; --map-by node spreads ranks."""
    command = on_two_hosts(launcher, agent, 1)
    wrapped = ["bash", "launch/mpi_env.sh", "bash", "-c", SHOW]
    done = lab.run(3, *command, *wrapped, cwd=checkout)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "on node1 does not know where rank 0 is; set MASTER_ADDR, e.g. mpirun" in done.stderr
    given = ["-genv", "MASTER_ADDR", "node1"] if launcher == MPICH else ["-x", "MASTER_ADDR=node1"]
    done = lab.run(3, command[0], *given, *command[1:], *wrapped, cwd=checkout)
    assert done.returncode == 0, done.stderr
    assert len(set(re.findall(r" node1 \d{5}$", done.stdout, re.M))) == 1
