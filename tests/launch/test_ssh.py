"""ssh_torchrun.sh with a real sshd on loopback, which stands for two hosts."""

import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from common.report import load
from tests.launch.lab import PATH, need, until

pytestmark = [pytest.mark.launch, pytest.mark.timeout(300)]

SCRIPT = "benchmarks/collectives.py"  # it imports least
SMALL = "--collective all_reduce,broadcast -b 64 -e 64 --cache-warm --device cpu"
LONG = "-b 64 -e 8K --cache-warm --device cpu --target-ci 0.01% --max-seconds 1"

SSHD = """
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
"""
SSH = """
Host node1 node2
    HostName 127.0.0.1
    Port {port}
    IdentityFile {folder}/key
    UserKnownHostsFile {folder}/known_hosts
    StrictHostKeyChecking accept-new
    LogLevel ERROR
"""


@dataclass
class Ssh:
    folder: Path
    port: int
    checkout: Path
    started: list[psutil.Popen] = field(default_factory=list)

    def start(self, *words: str, **variables: str) -> psutil.Popen:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("MASTER_", "SLURM_"))}
        env |= {"PYTHON": sys.executable, "SSH_ARGS": f"-F {self.folder}/config", "PATH": PATH}
        env |= {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
        process = psutil.Popen(
            ["launch/ssh_torchrun.sh", *words],
            cwd=self.checkout,
            env=env | variables,
            stdin=subprocess.DEVNULL,
            stdout=(self.folder / "out").open("w"),
            stderr=(self.folder / "err").open("w"),
        )
        self.started.append(process)
        return process

    def hosts(self, text: str = "node1 slots=1\nnode2 slots=1  # next to the window\n") -> str:
        (self.folder / "hosts").write_text(text)
        return f"{self.folder}/hosts"

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text()

    def ranks(self) -> dict[int, psutil.Process]:
        """The ranks that run in this checkout, wherever they have come to hang."""
        found = {}
        for process in psutil.process_iter(["cwd", "cmdline", "environ"]):
            words, env = process.info["cmdline"] or [], process.info["environ"] or {}
            ours = process.info["cwd"] == str(self.checkout) and SCRIPT in words[1:3]
            if ours and "RANK" in env:
                found[int(env["RANK"])] = process
        return found

    def until_it_measures(self, report: Path) -> None:
        """Both ranks run, and a case is in the report."""

        def there() -> bool:
            return report.exists() and report.read_text().count("\n") > 1

        until(lambda: there() and len(self.ranks()) == 2, 180, lambda: self.out + self.err)

    def until_gone(self) -> None:
        until(lambda: not self.ranks(), 60, lambda: f"left: {self.ranks()}\n{self.err}")

    def stop(self) -> None:
        """End what a failed test has left."""
        left = [p for start in self.started if start.is_running() for p in start.children(True)]
        for process in [*self.started, *left, *self.ranks().values()]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def ssh(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ssh]:
    need("sshd", "ssh", "ssh-keygen")
    folder = tmp_path_factory.mktemp("ssh")
    for name in ("host_key", "key"):
        keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(keygen, check=True, timeout=30)
    port = free_port()
    (folder / "sshd_config").write_text(SSHD.format(port=port, folder=folder))
    (folder / "config").write_text(SSH.format(port=port, folder=folder))
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where sshd's unprivileged part is confined
    sshd = shutil.which("sshd", path=PATH)
    command = [str(sshd), "-D", "-E", f"{folder}/log", "-f", f"{folder}/sshd_config"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    probe = ["ssh", "-F", str(folder / "config"), "-o", "BatchMode=yes", "node1", "true"]
    try:
        until(
            lambda: subprocess.run(probe, capture_output=True, timeout=20).returncode == 0,
            20,
            lambda: (folder / "log").read_text(),
        )
        ssh = Ssh(folder, port, checkout)
        yield ssh
        ssh.stop()
    finally:
        process.terminate()
        process.wait(10)


def test_two_hosts(ssh: Ssh, tmp_path: Path) -> None:
    report = tmp_path / "a report.jsonl"
    words = [*SMALL.split(), "--iters", "6"]
    process = ssh.start(ssh.hosts(), SCRIPT, *words, "--json", str(report), GLOO_X="a 'b'")
    assert process.wait(180) == 0, ssh.out + ssh.err
    done = load(str(report))
    assert done.status == "complete"
    assert [case.check for case in done.cases] == ["passed", "passed"]
    assert "[node1] # 2 ranks on 2 nodes" in ssh.out
    assert {line[:7] for line in ssh.out.splitlines()} == {"[node1]"}
    assert done.environment["variables"]["GLOO_X"] == "a 'b'"


@pytest.mark.parametrize("what", ["killed rank", "SIGTERM", "killed launcher"])
def test_all_end_when_one_ends(ssh: Ssh, tmp_path: Path, what: str) -> None:
    report = tmp_path / "report.jsonl"
    process = ssh.start(ssh.hosts(), SCRIPT, *LONG.split(), "--json", str(report))
    ssh.until_it_measures(report)
    act: dict[str, Callable[[], object]] = {
        "killed rank": lambda: ssh.ranks()[1].kill(),
        "SIGTERM": lambda: process.send_signal(signal.SIGTERM),
        "killed launcher": process.kill,
    }
    act[what]()
    status = process.wait(60)
    ssh.until_gone()
    assert load(str(report)).status == "interrupted"
    if what == "killed rank":
        assert status == 1
        assert re.search(r"\[node2\] .*exitcode  : -9", ssh.err)
        assert "ssh_torchrun.sh: node2: status 1" in ssh.err
    if what == "SIGTERM":
        assert status == 143
        assert "ssh_torchrun.sh: SIGTERM: ending the ranks on all hosts" in ssh.err
        assert re.search(r"\[node1\] SIGTERM: \d cases? (is|are) measured and in", ssh.err)


@pytest.mark.parametrize(
    ("hosts", "script", "status", "want"),
    [
        ("node1 slots=1\nnode3 slots=1\n", SCRIPT, 255, "node3: status 255 (255: no connection)"),
        ("node1 slots=1\nnode2 8\n", SCRIPT, 2, "hosts:2: expected a host and its ranks, e.g."),
        ("# none\n", SCRIPT, 2, "names no host; expected lines like: node1 slots=8"),
        ("node1 slots=1\n", "x.py", 2, "no script 'x.py' here, e.g. benchmarks/ddp_sweep.py"),
    ],
)
def test_a_mistake(ssh: Ssh, hosts: str, script: str, status: int, want: str) -> None:
    process = ssh.start(ssh.hosts(hosts), script, *LONG.split())
    assert process.wait(60) == status, ssh.err
    assert want in ssh.err
    assert status == 255 or ssh.err.count("\n") == 1
    ssh.until_gone()


def test_dry_run(ssh: Ssh) -> None:
    process = ssh.start(ssh.hosts(), SCRIPT, "--json", "a b.jsonl", DRY_RUN="1", MASTER_PORT="7")
    assert process.wait(20) == 0
    words = [shlex.split(line) for line in ssh.out.splitlines()]
    assert [line[0] for line in words] == ["[node1]", "[node2]"]
    assert words[1][-9:] == [
        *("torch.distributed.run", "--nnodes=2", "--node-rank=1", "--nproc-per-node=1"),
        *("--master-addr=127.0.0.1", "--master-port=7", SCRIPT, "--json", "a b.jsonl"),
    ]
