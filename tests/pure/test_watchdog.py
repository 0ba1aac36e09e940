"""common/watchdog.py: what a roll call says of few ranks and of many; what it does to a process."""

import os
import signal
import subprocess
import sys
from typing import Any
from unittest.mock import Mock

import pytest

from common.watchdog import (
    LATE,
    SILENT,
    WAITS,
    Watchdog,
    fates,
    print_stacks_and_kill,
    ranks_by_fate,
)
from tests.process import ROOT


def state(rank: int, phase: int = 3, newest: Any = ("g", 7)) -> dict[str, Any]:
    return {"where": f"rank {rank}", "order": [1, phase], "newest": newest}


def test_few_ranks_have_a_line_each() -> None:
    states = [state(0), state(1, newest=None), state(2, phase=2), state(3, newest=("g", 6))]
    outside = state(4, phase=0)
    assert fates(ranks_by_fate([*states, outside])) == [
        f"rank 1: {SILENT}",
        f"rank 2: {LATE}",
        f"rank 3: {LATE}",
        f"rank 0: {WAITS}",
        f"rank 4: {WAITS}",
    ]


def test_many_ranks_are_counted() -> None:
    states = [state(rank) for rank in range(1024)]
    for rank in (7, 8):
        states[rank]["newest"] = None
    for rank in range(100, 120):
        states[rank]["order"] = [1, 2]
    lines = fates(ranks_by_fate(states))
    assert lines[:3] == [f"rank 7: {SILENT}", f"rank 8: {SILENT}", f"rank 100: {LATE}"]
    assert lines[17:20] == [
        f"rank 115: {LATE}",
        f"and 4 more ranks: {LATE}",
        f"rank 0: {WAITS}",
    ]
    assert lines[-2:] == [f"rank 17: {WAITS}", f"and 986 more ranks: {WAITS}"]


class Written:
    """A watchdog that keeps what is set on it, and in which order."""

    written: list[tuple[str, Any]]

    def __init__(self) -> None:
        self.__dict__ |= {"case": 1, "order": 5, "written": []}

    def __setattr__(self, name: str, value: Any) -> None:
        self.written.append((name, value))
        self.__dict__[name] = value


def test_the_group_of_a_case_is_let_go_before_the_number_changes() -> None:
    """Else the watching thread could take it for a group of the next case, and abort it."""
    watchdog: Any = Written()
    Watchdog.begin(watchdog, "a case")
    assert watchdog.written.index(("group", None)) < watchdog.written.index(("case", 2))
    assert watchdog.order == 0
    Watchdog.begin(watchdog, "another one", member=False)
    assert watchdog.order == -1  # and 0 with its phase: nobody waits for it


def test_each_phase_winds_up_the_last_resort(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends a process whose threads all wait for Python's lock, and so cannot look themselves."""
    armed: list[tuple[float, bool]] = []
    wind_up: Any = Mock(dump_traceback_later=lambda s, exit: armed.append((s, exit)))
    monkeypatch.setattr("common.watchdog.faulthandler", wind_up)
    watchdog: Any = Mock(timeout_s=100.0, order=0, case=1, label="a case", job=Mock(rank=3))
    Watchdog.phase(watchdog, "step, block 1")
    Watchdog.phase(watchdog, "step, block 2")
    assert armed == [(170.0, True)] * 2  # after torch's and our own time limits


def test_a_stopped_process_prints_its_stacks_and_is_killed() -> None:
    """SIGUSR2 alone would wait until somebody lets it go on."""
    code = "import faulthandler, signal, os; faulthandler.register(signal.SIGUSR2); "
    code += "print('ready', flush=True); os.kill(os.getpid(), signal.SIGSTOP); input()"
    command = [sys.executable, "-c", code]
    pipes: dict[str, Any] = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        os.waitpid(process.pid, os.WUNTRACED)
        print_stacks_and_kill(process.pid)
        _, stacks = process.communicate(timeout=20)
    assert process.returncode == -signal.SIGKILL
    assert 'File "<string>"' in stacks


UNDER_NOHUP = """
import os, signal, time
from unittest.mock import Mock
from common.watchdog import Watchdog
run = Mock(report=Mock(path=None, cases=[]), job=Mock(rank=0))
for handler in (signal.SIG_IGN, signal.SIG_DFL):
    signal.signal(signal.SIGHUP, handler)
    Watchdog._end_on_signals(run)
    os.kill(os.getpid(), signal.SIGHUP)
    time.sleep(1)
    print("goes on", flush=True)
time.sleep(60)
"""


def test_under_nohup_a_run_outlives_its_terminal() -> None:
    """nohup ignores SIGHUP. Without it the signal ends the run in order."""
    command = [sys.executable, "-c", UNDER_NOHUP]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "goes on\n", done.stderr
    assert done.stderr == "SIGHUP: 0 cases are measured\n"
    assert done.returncode == 128 + signal.SIGHUP


RANK = """
import os, signal, time
from unittest.mock import Mock
from common.watchdog import Watchdog
Watchdog._end_on_signals(Mock(report=Mock(path=None, cases=[]), job=Mock(rank=0)))
os.kill(os.getppid(), signal.SIGKILL)
time.sleep(60)
print("outlives it")
"""
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


def test_a_rank_ends_with_its_launcher_however_that_ends() -> None:
    """The rank kills the launcher. Its stdout and stderr are closed when both have ended."""
    command = [sys.executable, "-c", LAUNCHER, RANK]
    own = os.environ | {"TORCHELASTIC_RUN_ID": "a run"}
    done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, timeout=50)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == ""
    assert done.stderr == "SIGTERM: 0 cases are measured\n"
