"""launch/ssh_torchrun.sh on two nodes."""

import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.report import load
from tests.launch.lab import LONG, SCRIPT, Lab
from tests.process import Process

pytestmark = pytest.mark.launch

HOSTS = "node1 slots=1\nnode2 slots=1  # next to the window\n"
# It replaces python with torchrun, and writes to files next to itself what happens on each host.
PYTHON = """#!/bin/sh
trap 'echo SIGTERM >>"$0.$(hostname)"; kill $!; exit 1' TERM
echo started >"$0.$(hostname)"
case "$*" in *--node-rank=1*) if [ -e "$0.fails" ]; then exit 3; fi ;; esac
sleep 60 & wait
"""


@pytest.fixture
def start(lab: Lab, checkout: Path, tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """start(hosts, script, *flags, **variables) -> Process: the launcher on node1.

    PYTHON is the replacement unless given. `process.tree()[1]` is the launcher itself.
    """
    started = []
    python = tmp_path / "a python"
    python.write_text(PYTHON)
    python.chmod(0o755)

    def begin(hosts: str, *words: str, **variables: str) -> Process:
        (tmp_path / "hosts").write_text(hosts)
        given = {"PYTHON": str(python), "SSH_ARGS": f"-F {lab.ssh_conf}"} | variables
        env = ["env", "-C", str(checkout), *(f"{name}={value}" for name, value in given.items())]
        command = [*lab.enter(1), *env, "launch/ssh_torchrun.sh", f"{tmp_path}/hosts", *words]
        started.append(Process([command], tmp_path, [lab.env]))
        return started[-1]

    yield begin
    for process in started:
        process.stop()


def test_a_run_that_is_ended(start: Callable[..., Process], lab: Lab, tmp_path: Path) -> None:
    """Two hosts are two nodes. A variable reaches both, and SIGTERM reaches the ranks."""
    path = tmp_path / "a report.jsonl"
    words = [SCRIPT, *LONG.split(), "--json", str(path)]
    process = start(HOSTS, *words, PYTHON=sys.executable, GLOO_X="a 'b'")
    process.until(lambda: path.exists() and path.read_text().count("\n") > 1)
    process.tree()[1].send_signal(signal.SIGTERM)
    assert process.wait() == 143
    assert "[node1] # 2 ranks on 2 nodes" in process.out
    assert {line[:7] for line in process.out.splitlines()} == {"[node1]"}
    assert "ssh_torchrun.sh: SIGTERM: ending the ranks on all hosts" in process.err
    assert re.search(r"\[node1\] SIGTERM: ended after \d cases?, saved in", process.err)
    report = load(str(path))
    assert (report.status, report.environment["variables"]["GLOO_X"]) == ("interrupted", "a 'b'")
    assert {case.check for case in report.cases} == {"passed"}
    process.until(lambda: not lab.processes(1) + lab.processes(2))


@pytest.mark.parametrize("what", ["a killed launcher", "a host that fails"])
def test_the_other_hosts_end_too(start: Callable[..., Process], tmp_path: Path, what: str) -> None:
    logs = [tmp_path / f"a python.node{node}" for node in (1, 2)]
    if what == "a host that fails":
        (tmp_path / "a python.fails").touch()
    process = start(HOSTS, SCRIPT)
    process.until(lambda: all(path.exists() and path.read_text() for path in logs))
    if what == "a killed launcher":
        process.tree()[1].kill()
        ended = logs
    else:
        assert process.wait() == 3
        assert "ssh_torchrun.sh: node2: status 3\n" in process.err
        ended = logs[:1]
    process.until(lambda: {path.read_text() for path in ended} == {"started\nSIGTERM\n"})


@pytest.mark.parametrize(
    ("hosts", "script", "status", "want"),
    [
        ("node9 slots=1\n", SCRIPT, 255, "node9: status 255 (an error of ssh, such as no con"),
        ("# none\n", SCRIPT, 2, "lists no hosts; expected lines such as: node1 slots=8"),
        ("node1 slots=1\n", "x.py", 2, "no script 'x.py' in "),
    ],
)
def test_a_mistake_is_reported(
    start: Callable[..., Process], hosts: str, script: str, status: int, want: str
) -> None:
    process = start(hosts, script)
    assert process.wait() == status, process.err
    assert want in process.err
    assert status == 255 or process.err.count("\n") == 1
