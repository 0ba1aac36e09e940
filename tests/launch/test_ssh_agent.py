"""launch/ssh_agent.py: nothing that it started survives the one who watches."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import ROOT, alive, children, environment, free_port

AGENT = str(ROOT / "launch" / "ssh_agent.py")
# with shorter patience
HURRIED = (
    "import runpy, sys; agent = runpy.run_path(sys.argv[1]); main = agent['main']; "
    "main.__globals__.update(SILENCE_S=1.0, TERM_S=1.0, UNREACHABLE_S=1.0, START_S=1.0); "
    "sys.exit(main('127.0.0.1', int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]))"
)
# a launcher and its rank, which has a session of its own, as torchrun's ranks have
NICE = "trap 'kill $!; exit 5' TERM; setsid sleep 300 & wait"
STUBBORN = "trap '' TERM; setsid bash -c 'while :; do sleep 1; done' & wait"


@contextlib.contextmanager
def agent(
    *command: str,
    rank: int = 0,
    port: int | None = None,
    hurried: bool = False,
    variables: dict[str, str] | None = None,
) -> Iterator["subprocess.Popen[str]"]:
    numbers = [str(port or free_port()), str(rank)]
    start = ["-c", HURRIED, AGENT] if hurried else [AGENT, "127.0.0.1"]
    with subprocess.Popen(
        [sys.executable, *start, *numbers, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment() | (variables or {}),
    ) as process:
        try:
            yield process
        finally:
            for pid in [process.pid, *children(process.pid)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def family(process: "subprocess.Popen[str]", count: int) -> list[int]:
    """What the agent has started, once it is so many."""
    limit = time.monotonic() + 30
    while len(children(process.pid)) < count:
        assert time.monotonic() < limit
        time.sleep(0.05)
    return children(process.pid)


def test_status_and_variables() -> None:
    text = "echo $NCCL_SOCKET_IFNAME $GLOO_SOCKET_IFNAME $TP_SOCKET_IFNAME; cat; exit 7"
    with agent("sh", "-c", text) as process:
        assert process.wait(30) == 7
        assert process.stdout is not None
        assert process.stdout.read() == "=lo lo lo\n"
    with agent("sh", "-c", "kill -9 $$") as process:
        assert process.wait(30) == 128 + signal.SIGKILL


def test_a_variable_that_is_set_stays() -> None:
    show = "echo $NCCL_SOCKET_IFNAME $GLOO_SOCKET_IFNAME"
    with agent("sh", "-c", show, variables={"GLOO_SOCKET_IFNAME": "mine"}) as process:
        assert process.stdout is not None
        assert process.stdout.read() == "=lo mine\n"


def test_the_end_of_stdin_ends_all() -> None:
    with agent("bash", "-c", NICE) as process:
        started = family(process, 2)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(15) == 5  # SIGTERM first: the launcher had its say
        assert not any(map(alive, started))


def test_silence_ends_all_and_the_stubborn_are_killed() -> None:
    with agent("bash", "-c", STUBBORN, hurried=True) as process:
        started = family(process, 3)
        time.sleep(1.5)
        assert process.poll() is None  # it has never heard anything: a command pasted by hand
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(15) == 128 + signal.SIGKILL
        assert not any(map(alive, started))


def test_a_killed_launcher_leaves_no_orphans() -> None:
    with agent("bash", "-c", NICE) as process:
        launcher, rank = family(process, 2)
        os.kill(launcher, signal.SIGKILL)
        assert process.wait(15) == 128 + signal.SIGKILL
        assert not alive(rank)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_all(number: signal.Signals) -> None:
    with agent("bash", "-c", NICE) as process:
        started = family(process, 2)
        process.send_signal(number)
        assert process.wait(15) == 5
        assert not any(map(alive, started))


def test_a_killed_agent_takes_the_launcher_along() -> None:
    with agent("bash", "-c", NICE) as process:
        started = family(process, 2)
        process.kill()
        process.wait(15)
        limit = time.monotonic() + 15
        while any(map(alive, started)):
            assert time.monotonic() < limit
            time.sleep(0.05)


def test_a_first_host_that_does_not_listen(tmp_path: Path) -> None:
    with agent("touch", str(tmp_path / "started"), rank=1, hurried=True) as process:
        assert process.wait(30) == 1
        assert process.stderr is not None
        line = process.stderr.read()
    assert line.startswith("cannot reach the first host at 127.0.0.1 port ")
    assert "Connection refused" in line
    assert line.count("\n") == 1
    assert not (tmp_path / "started").exists()
