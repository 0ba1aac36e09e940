"""launch/ssh_torchrun.sh over a real sshd on nodes that are apart."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from harness import ROOT, SWEEP, TINY, Launch, children, launch, load
from lab import Lab, search_path, wait_until, why_not

SSHD = shutil.which("sshd", path=search_path())
if SSHD is None or shutil.which("ssh") is None:
    MISSING: str | None = "needs sshd: apt-get install --no-install-recommends openssh-server"
else:
    MISSING = why_not(slurm=False)
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

WRAPPER = str(ROOT / "launch" / "ssh_torchrun.sh")
SSHD_CONFIG = """
Port 22
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
StrictModes no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
PidFile none
"""


class Hosts:
    """Three nodes with an sshd each, and a key that opens them. Nobody's ~/.ssh is looked at."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.keys = lab.folder / "ssh"
        self.keys.mkdir()
        for name in ("host_key", "key"):
            keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.keys / name)]
            subprocess.run(keygen, check=True, timeout=30)
        (self.keys / "config").write_text(SSHD_CONFIG.format(folder=self.keys))
        for node in lab.nodes:
            self.start(node)

    def start(self, node: int) -> None:
        done = self.lab.run(node, [str(SSHD), "-f", f"{self.keys}/config"])
        assert done.returncode == 0, done.stderr

    def command(self, node: int, *words: str, cwd: Path) -> list[str]:
        """ssh_torchrun.sh on a node, in a folder that has a host file `hosts`."""
        options = [
            f"IdentityFile={self.keys}/key",
            "IdentityAgent=none",
            f"UserKnownHostsFile={self.keys}/known_hosts",
            "StrictHostKeyChecking=accept-new",
        ]
        given = [word for option in options for word in ("--ssh-option", option)]
        variables = ["env", f"HOME={self.keys}", f"VIRTUAL_ENV={sys.prefix}"]
        return self.lab.command(node, [*variables, WRAPPER, *given, *words], cwd)

    def wrapper(self) -> int:
        """The pid of the one that runs, and not of a shell that it started."""
        found = {
            pid
            for node in (0, *self.lab.nodes)
            for pid, words in self.lab.processes(node).items()
            if words[:2] == ["bash", WRAPPER]
        }
        (first,) = found - {child for pid in found for child in children(pid)}
        return first

    def left(self) -> list[list[str]]:
        """What runs on the nodes, but for the lab's own."""
        found = [self.lab.processes(node) for node in (0, *self.lab.nodes)]
        return [words for node in found for words in node.values() if words[0] != "unshare"]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    Path("/run/sshd").mkdir(exist_ok=True)  # where an sshd puts itself while it knows nobody
    # Debian's own /etc/hosts: a node's own name is 127.0.1.1
    with Lab(tmp_path_factory.mktemp("lab"), nodes=3, slurm=False, hosts="debian") as lab:
        yield Hosts(lab)


@pytest.fixture(autouse=True)
def nothing_stays(hosts: Hosts) -> Iterator[None]:
    yield
    wait_until(lambda: not hosts.left(), 10, lambda: str(hosts.left()))


def test_two_hosts(hosts: Hosts, tmp_path: Path) -> None:
    """In the order of the host file; words that a shell would take apart."""
    folder = tmp_path / "it's a $(touch pwned) folder"
    folder.mkdir()
    # neither the order of the addresses nor that of the names
    (folder / "hosts").write_text("10.77.0.3 slots=2  # the first\n10.77.0.2 slots=2\n")
    script = [SWEEP, *TINY, "--device", "cpu", "--iters", "3", "--json", 'a "$HOME" b.json']
    with launch(hosts.command(0, "hosts", *script, cwd=folder)) as started:
        assert started.wait(200) == 0, started.output()
    report = load(folder / 'a "$HOME" b.json')
    assert report["status"] == "complete"
    ranks = report["environment"]["ranks"]
    assert [row["host"] for row in ranks] == ["node3", "node3", "node2", "node2"]
    assert report["environment"]["variables"]["GLOO_SOCKET_IFNAME"] == "eth0"
    assert report["environment"]["variables"]["NCCL_SOCKET_IFNAME"] == "=eth0"
    assert report["environment"]["variables"]["OMP_NUM_THREADS"] == "1"
    assert [case["check"] for case in report["cases"]] == ["passed"] * 4
    table = "".join(started.stdout)
    assert "[10.77.0.3] # 4 ranks on 2 nodes, started by torchrun\n" in table
    assert all(line.startswith("[10.77.0.3] ") for line in started.stdout)
    assert not list(folder.glob("pwned"))


def test_three_hosts_from_the_first_one(hosts: Hosts, tmp_path: Path) -> None:
    """ssh reaches the first host over the loopback: that address is not for the others."""
    (tmp_path / "hosts").write_text("node1\nnode2\nnode3\n")
    script = [SWEEP, *TINY, "--device", "cpu", "--iters", "3", "--world-sizes", "3"]
    command = hosts.command(1, "hosts", *script, "--json", "report.json", cwd=tmp_path)
    with launch(command) as started:
        assert started.wait(200) == 0, started.output()
    ranks = load(tmp_path / "report.json")["environment"]["ranks"]
    assert [row["host"] for row in ranks] == ["node1", "node2", "node3"]


@contextlib.contextmanager
def covered(lab: Lab, node: int, path: Path, cover: Path) -> Iterator[None]:
    """One node alone sees another file at a path."""
    mounted = lab.run(node, ["mount", "--bind", str(cover), str(path)])
    assert mounted.returncode == 0, mounted.stderr
    yield
    lab.run(node, ["umount", str(path)])


def test_a_line_for_each_bad_host(hosts: Hosts, tmp_path: Path) -> None:
    other = tmp_path / "stats.py"
    other.write_text("another\n")
    version = Path(torch.__file__).parent / "version.py"
    fake = tmp_path / "version.py"
    fake.write_text(version.read_text() + "\n__version__ = '1.2.3'\n")
    (tmp_path / "hosts").write_text("node1\nnode2\nnode3\n10.77.0.99\n10.77.0.1\n")
    with (
        covered(hosts.lab, 2, ROOT / "common" / "stats.py", other),
        covered(hosts.lab, 3, version, fake),
        launch(hosts.command(0, "hosts", SWEEP, cwd=tmp_path)) as started,
    ):
        assert started.wait(100) == 1
    lines = {line.split(": ")[1]: line.split(": ", 2)[2] for line in started.stderr}
    assert list(lines) == ["node2", "node3", "10.77.0.99", "10.77.0.1"], started.output()
    assert lines["node2"] == f"not the same checkout in {ROOT}: common/stats.py differ\n"
    assert lines["node3"].startswith(f"torch 1.2.3, and most hosts have {torch.__version__}; ")
    assert lines["10.77.0.99"].startswith("ssh cannot get in (ssh: connect to host 10.77.0.99 ")
    assert lines["10.77.0.1"] == "the same machine as node1\n"
    assert started.stdout == []


FAILING = """
import os, signal, sys, time
def last_words(number, frame):
    print("last words of rank", os.environ["RANK"], flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, last_words)
print("rank", os.environ["RANK"], flush=True)
if os.environ["RANK"] == "1":
    sys.exit("a reason")
time.sleep(500)
"""
WAITING = FAILING.replace('== "1"', '== "none"')


@contextlib.contextmanager
def two_ranks(hosts: Hosts, folder: Path, script: str) -> Iterator[Launch]:
    """A script on two hosts, once both of its ranks run."""
    (folder / "hosts").write_text("node1\nnode2\n")
    (folder / "script.py").write_text(script)
    with launch(hosts.command(0, "hosts", "script.py", cwd=folder)) as started:
        started.wait_for("[node1] rank 0", 150)
        started.wait_for("[node2] rank 1", 150)
        yield started


def test_one_fails_and_all_end(hosts: Hosts, tmp_path: Path) -> None:
    with two_ranks(hosts, tmp_path, FAILING) as started:
        assert started.wait(150) == 1
    assert "[node2] a reason\n" in started.stderr
    said = [line for line in started.stderr if line.startswith("ssh_torchrun.sh: ")]
    assert said == ["ssh_torchrun.sh: node2: ended with status 1; the others have 10 s to end\n"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all(hosts: Hosts, tmp_path: Path, number: signal.Signals) -> None:
    with two_ranks(hosts, tmp_path, WAITING) as started:
        wrapper = hosts.wrapper()
        if number == signal.SIGINT:  # as a terminal does: all of its processes have it
            for pid in hosts.lab.processes(0):
                if os.getpgid(pid) == os.getpgid(wrapper):
                    os.kill(pid, number)
        else:
            os.kill(wrapper, number)
        assert started.wait(90) == 128 + number
    said = [line for line in started.stderr if line.startswith("ssh_torchrun.sh: ")]
    end = f"ssh_torchrun.sh: {number.name}: ending all hosts; once more to leave them to it\n"
    assert said[0] == end
    assert "[node1] last words of rank 0\n" in started.stdout
    assert "[node2] last words of rank 1\n" in started.stdout


def test_a_killed_wrapper_leaves_no_process(hosts: Hosts, tmp_path: Path) -> None:
    with two_ranks(hosts, tmp_path, WAITING) as started:
        os.kill(hosts.wrapper(), signal.SIGKILL)
        assert started.wait(60) != 0
    wait_until(lambda: not hosts.left(), 30, lambda: str(hosts.left()))


def test_a_host_that_loses_power(hosts: Hosts, tmp_path: Path) -> None:
    """Last: the host has to be started again."""
    with two_ranks(hosts, tmp_path, WAITING) as started:
        hosts.lab.power_cut(2)
        try:
            assert started.wait(150) == 255
        finally:
            hosts.lab.restart(2)
            hosts.start(2)
    assert "node2: its connection broke" in "".join(started.stderr)
