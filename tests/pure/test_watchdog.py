"""common/watchdog.py: what a roll call says of few ranks and of many; what it does to a process."""

import os
import signal
import subprocess
import sys
from typing import Any
from unittest.mock import Mock

import pytest

from common import watchdog
from common.watchdog import LATE, SILENT, WAITS, Watchdog, fates, ranks_by_fate
from tests.process import ROOT


def state(rank: int, phase: int = 3, newest: Any = ("g", 7)) -> dict[str, Any]:
    return {"where": f"rank {rank}", "order": [1, phase], "newest": newest}


def test_a_rank_has_a_line_and_many_of_one_fate_are_counted() -> None:
    """Rank 1 is silent, 2 is in an earlier phase, 3 in an earlier collective, 4 in no case."""
    states = [state(0), state(1, newest=None), state(2, phase=2), state(3, newest=("g", 6))]
    states += [state(4, phase=0), *(state(rank) for rank in range(5, 1024))]
    lines = fates(ranks_by_fate(states))
    assert lines[:3] == [f"rank 1: {SILENT}", f"rank 2: {LATE}", f"rank 3: {LATE}"]
    assert lines[3:6] == [f"rank 0: {WAITS}", f"rank 4: {WAITS}", f"rank 5: {WAITS}"]
    assert lines[18:] == [f"rank 18: {WAITS}", f"and 1,005 more ranks: {WAITS}"]


class Written:
    """A watchdog that keeps the names of what is set on it, in order."""

    case = 1

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__.setdefault("names", []).append(name)
        self.__dict__[name] = value


def test_the_group_of_a_case_is_let_go_before_the_number_changes() -> None:
    """Else the watching thread could take it for a group of the next case, and abort it."""
    written: Any = Written()
    Watchdog.begin(written, "a case", member=False)
    assert written.names.index("group") < written.names.index("case")
    assert written.order == -1  # and 0 with its phase: nobody waits for a rank outside the case


def test_each_phase_winds_up_the_last_resort(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends a process whose threads all wait for Python's lock, and so cannot look themselves."""
    monkeypatch.setattr(watchdog, "faulthandler", wind_up := Mock())
    of_rank_3: Any = Mock(timeout_s=100.0, order=0, case=1, label="a case", job=Mock(rank=3))
    Watchdog.phase(of_rank_3, "step, block 1")
    # after torch's and our own time limits
    wind_up.dump_traceback_later.assert_called_once_with(170.0, exit=True)


def test_a_stopped_process_prints_its_stacks_and_is_killed() -> None:
    """SIGUSR2 alone would wait until somebody lets it go on."""
    code = "import faulthandler, signal, os; faulthandler.register(signal.SIGUSR2); "
    code += "os.kill(os.getpid(), signal.SIGSTOP); input()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, text=True, stdin=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        os.waitpid(process.pid, os.WUNTRACED)
        watchdog.print_stacks_and_kill(process.pid)
        _, stacks = process.communicate(timeout=20)
    assert process.returncode == -signal.SIGKILL
    assert 'File "<string>"' in stacks


RANK = """
import os, signal, time
from unittest.mock import Mock
from common.watchdog import Watchdog
signal.signal(signal.SIGHUP, signal.SIG_IGN)
Watchdog._end_on_signals(Mock(report=Mock(path=None, cases=[]), job=Mock(rank=0)))
os.kill(os.getpid(), signal.SIGHUP)
os.kill(os.getppid(), signal.SIGKILL)
time.sleep(60)
print("outlives it")
"""
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


def test_under_nohup_a_rank_outlives_its_terminal_but_not_its_launcher() -> None:
    """nohup ignores SIGHUP. Then the rank kills the launcher, and both have ended when stdout and
    stderr are closed."""
    command = [sys.executable, "-c", LAUNCHER, RANK]
    own = os.environ | {"TORCHELASTIC_RUN_ID": "a run"}
    done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, timeout=50)
    assert done.returncode == -signal.SIGKILL
    assert (done.stdout, done.stderr) == ("", "SIGTERM: 0 cases are measured\n")
