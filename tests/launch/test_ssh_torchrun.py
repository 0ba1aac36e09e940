"""launch/ssh_torchrun.sh without a network: what it refuses, and what reaches the other end.

Its ssh is a stub that does what sshd does: one line, to a shell, at the other end.
"""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ROOT, environment

WRAPPER = str(ROOT / "launch" / "ssh_torchrun.sh")
SSH = """#!/bin/bash
printf '%s\\n' "$@" >>"$STUB_LOG"
while [ "$1" != -- ]; do shift; done
host=$2; shift 2
case $host in
    away) echo "ssh: connect to host away port 22: No route to host" >&2; exit 255 ;;
    mute) exit 0 ;;
    near) export SSH_CONNECTION="127.0.0.1 9 127.0.1.1 22" ;;
    *) export SSH_CONNECTION="10.9.0.1 9 10.9.0.2 22" ;;
esac
echo "a login shell's greeting"
exec "${STUB_SHELL:-sh}" -c "$*"
"""


class Stub:
    """The wrapper with a stub for ssh, in a folder with a space in its name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "a folder"
        (self.folder / "bin").mkdir(parents=True)
        (self.folder / "bin" / "ssh").write_text(SSH)
        (self.folder / "bin" / "ssh").chmod(0o755)
        self.log = self.folder / "log"
        self.hosts("near")

    def hosts(self, text: str) -> None:
        (self.folder / "hosts").write_text(text)

    def variables(self) -> dict[str, str]:
        path = f"{self.folder}/bin:{os.environ['PATH']}"
        return {"PATH": path, "STUB_LOG": str(self.log), "VIRTUAL_ENV": sys.prefix}

    def run(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [WRAPPER, *words],
            capture_output=True,
            text=True,
            timeout=100,
            cwd=self.folder,
            env=environment() | self.variables() | variables,
        )


@pytest.fixture
def stub(tmp_path: Path) -> Stub:
    return Stub(tmp_path)


SWEEP = str(ROOT / "benchmarks" / "ddp_sweep.py")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "expected HOSTFILE SCRIPT"),
        (["hosts"], "expected a SCRIPT after HOSTFILE 'hosts'"),
        (["hosts", "absent.py"], "no script 'absent.py' here"),
        (["absent", SWEEP], "cannot read a host file 'absent'"),
        (["--nproc", "2", "hosts", SWEEP], "unknown option '--nproc'"),
        (["--nproc-per-node"], "--nproc-per-node needs a value"),
        (["--nproc-per-node=", "hosts", SWEEP], "--nproc-per-node needs a value"),
        (["--nproc-per-node", "0", "hosts", SWEEP], "a number from 1 on, e.g. 8, got '0'"),
        (["--port", "65536", "hosts", SWEEP], "--port expects a number from 1 to 65535"),
        (["--port", "x", "hosts", SWEEP], "--port expects a number from 1 to 65535"),
        (["--ssh-option", "Port", "hosts", SWEEP], "e.g. Port=2222, got 'Port'"),
        (["--env", "A B", "hosts", SWEEP], "expects the name of a variable"),
        (["--env", "NOT_THERE", "hosts", SWEEP], "--env NOT_THERE: there is no such variable"),
        (["--first-address", "-oProxy", "hosts", SWEEP], "--first-address expects an address"),
        (["--dry-run=no", "hosts", SWEEP], "--dry-run takes no value"),
        (["--venv", "/absent", "hosts", SWEEP], "near: cannot run /absent/bin/python there"),
    ],
)
def test_one_line_for_a_mistake(stub: Stub, words: list[str], line: str) -> None:
    done = stub.run(*words)
    assert done.returncode == (1 if "near" in line else 2)
    assert line in done.stderr
    assert done.stderr.startswith("ssh_torchrun.sh: ")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "hosts names no host"),
        ("# none\n\n", "hosts names no host"),
        ("a\nb\na\n", "hosts:3: a is there already, in line 1"),
        ("a slot=8\n", "hosts:1: expected 'a' or 'a slots=N', got 'a slot=8'"),
        ("\na slots=0\n", "hosts:2: expected 'a' or 'a slots=N'"),
        ("a slots=8 slots=8\n", "hosts:1: expected 'a' or 'a slots=N'"),
        ("-oProxyCommand=x\n", "hosts:1: expected a host"),
        ("a;b\n", "hosts:1: expected a host"),
        ("a$(b)", "hosts:1: expected a host"),
        ("a slots=2", "--nproc-per-node has no effect"),
    ],
)
def test_one_line_for_a_bad_hostfile(stub: Stub, text: str, line: str) -> None:
    stub.hosts(text)
    done = stub.run("--nproc-per-node", "2", "hosts", SWEEP)
    assert done.returncode == 2
    assert line in done.stderr
    assert done.stderr.count("\n") == 1
    assert not stub.log.exists()  # nobody was asked


def test_help(stub: Stub) -> None:
    done = stub.run("--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: ")


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_hostile_words_arrive_as_they_are(stub: Stub, shell: str) -> None:
    script = stub.folder / "it's $(touch pwned) a script.py"
    script.write_text("import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))")
    words = ["a b", "", "it's", '"$HOME"', "$(touch pwned)", "`touch pwned`", "*"]
    words += ["a\nb", "\\", "é", "-x", "--nnodes", "!", "~", "a;b", "&&", "#"]
    stub.hosts("near slots=1   # comment\r\n")
    variables = {"NCCL_DEBUG": "it's $(touch pwned)", "SECRET": "1", "OWN": "a  b"}
    done = stub.run("--env", "OWN", "hosts", script.name, *words, STUB_SHELL=shell, **variables)
    assert done.returncode == 0, done.stderr
    lines = [line.removeprefix("[near] ") for line in done.stdout.splitlines()]
    assert lines[0] == "a login shell's greeting"
    got, found = json.loads(lines[1])
    assert got == words
    assert found["NCCL_DEBUG"] == "it's $(touch pwned)"
    assert found["OWN"] == "a  b"
    assert found["NCCL_SOCKET_IFNAME"] == "=lo"
    assert found["GLOO_SOCKET_IFNAME"] == "lo"
    assert not list(stub.folder.glob("pwned"))


def test_dry_run(stub: Stub) -> None:
    stub.hosts("one slots=3\n")
    options = ["--ssh-option", "Port=2222", "--port", "29433", "--dry-run"]
    done = stub.run(*options, "hosts", SWEEP, "--json", "a b.json", NCCL_DEBUG="INFO")
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    assert words[:4] == ["ssh", "-T", "-o", "Port=2222"]
    assert words[-2] == "one"
    inner = shlex.split(words[-1])
    assert inner[:5] == ["cd", str(stub.folder), "&&", "exec", "env"]
    assert "NCCL_DEBUG=INFO" in inner
    at = inner.index("torch.distributed.run")
    assert inner[at + 1 :] == [
        *("--nnodes", "1", "--node-rank", "0", "--nproc-per-node", "3"),
        *("--master-addr", "127.0.0.1", "--master-port", "29433", SWEEP, "--json", "a b.json"),
    ]


def test_a_line_for_each_bad_host(stub: Stub) -> None:
    stub.hosts("near\naway\nmute\nother\n")
    done = stub.run("hosts", SWEEP)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "ssh_torchrun.sh: away: ssh cannot get in (ssh: connect to host away port 22: No route "
        "to host); try: ssh away true",
        "ssh_torchrun.sh: mute: the check ended with status 0: ",
        "ssh_torchrun.sh: other: the same machine as near",
    ]


def test_output_that_cannot_be_written_is_a_failure(stub: Stub) -> None:
    (stub.folder / "script.py").write_text("print('words')")
    stub.hosts("near slots=1")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [WRAPPER, "hosts", "script.py"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=100,
            cwd=stub.folder,
            env=environment() | stub.variables(),
        )
    assert done.returncode != 0
    assert "near: ended with status" in done.stderr
