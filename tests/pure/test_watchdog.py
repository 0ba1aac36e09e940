"""harness/observe/watchdog.py: the roll call of few and many ranks, timers, signals and kills."""

import os
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest

from harness.observe import watchdog
from harness.observe.watchdog import LATE, SILENT, WAITS, Watchdog
from tests.process import ROOT


def state(rank: int, phase: int = 3, last: Any = ("g", 7)) -> dict[str, Any]:
    return {"where": f"rank {rank}", "order": [1, phase], "last": last}


def test_ranks_have_lines_and_many_with_the_same_state_are_counted() -> None:
    """Rank 1 is silent, 2 is in an earlier phase, 3 in an earlier collective, 4 in no case."""
    states = [state(0), state(1, last=None), state(2, phase=2), state(3, last=("g", 6))]
    states += [state(4, phase=0), *(state(rank) for rank in range(5, 1024))]
    lines = watchdog.lines_by_state(watchdog.ranks_by_state(states))
    assert lines[:3] == [f"rank 1: {SILENT}", f"rank 2: {LATE}", f"rank 3: {LATE}"]
    assert lines[3:6] == [f"rank 0: {WAITS}", f"rank 4: {WAITS}", f"rank 5: {WAITS}"]
    assert lines[18:] == [f"rank 18: {WAITS}", f"and 1,005 more: {WAITS}"]


def test_without_gloos_recorder_the_last_call_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some versions of torch lack it. All ranks give the same answer, and phases decide."""
    monkeypatch.setattr(watchdog, "recorded_collectives", list)
    assert watchdog.last_collective() == ("none", 0, "unknown: this torch has no record")
    assert (
        len(watchdog.ranks_by_state([state(0, last=("none", 0)), state(1, 2, ("none", 0))])[LATE])
        == 1
    )


class Written:
    """A watchdog that records the order in which its attributes are set."""

    case = 1

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__.setdefault("names", []).append(name)
        self.__dict__[name] = value


def test_the_group_of_a_case_is_released_before_the_number_changes() -> None:
    """Otherwise the watching thread could abort it as a group of the next case."""
    written: Any = Written()
    Watchdog.begin(written, "a case", member=False)
    assert written.names.index("group") < written.names.index("case")
    assert written.order == -1  # 0 in its phase: no rank waits for it


def test_each_phase_starts_the_timer_of_faulthandler(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends a process in which all threads wait for the GIL, so that none of them can check."""
    monkeypatch.setattr(watchdog, "faulthandler", wind_up := Mock())
    of_rank_3: Any = Mock(timeout_s=100.0, order=0, case=1, label="a case", answers=0)
    of_rank_3.job.rank = 3
    Watchdog.phase(of_rank_3, "step, block 1", ahead=1)
    # after the time limits of torch and of the watchdog
    wind_up.dump_traceback_later.assert_called_once_with(170.0, exit=True)


def test_progress_of_other_ranks_restarts_the_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """In four polls of the store the counter changes twice, so the timer is started twice."""
    monkeypatch.setattr(watchdog, "faulthandler", timer := Mock())
    waiting: Any = Mock(timeout_s=100.0, answers=0)
    waiting.stopped.wait.side_effect = [False, False, False, False, True]
    waiting.watched.add.side_effect = [7, 7, 8, 8]
    waiting.watched.check.return_value = False
    Watchdog._watch(waiting)
    assert timer.dump_traceback_later.call_args_list == [call(170.0, exit=True)] * 2


def test_a_stopped_process_prints_its_stacks_and_is_killed() -> None:
    """A stopped process handles SIGUSR2 only after SIGCONT."""
    code = "import faulthandler, signal, os; faulthandler.register(signal.SIGUSR2); "
    code += "os.kill(os.getpid(), signal.SIGSTOP); input()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, text=True, stdin=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        os.waitpid(process.pid, os.WUNTRACED)
        watchdog.print_stacks_and_kill(process.pid)
        _, stacks = process.communicate(timeout=500)
    assert process.returncode == -signal.SIGKILL
    assert 'File "<string>"' in stacks


WRAPPED = """
import os, subprocess, sys
variables = os.environ | {"RANK": "0", "TORCHELASTIC_RUN_ID": "a run"}
command = [sys.executable, "-c", "print(flush=True); input()"]
direct = subprocess.Popen(command, stdin=0, stdout=subprocess.PIPE)
# a shell gives background commands /dev/null as stdin: pass its own explicitly, so that they wait
wrapped = ["sh", "-c", 'exec 3<&0; "$@" <&3 & echo $!; wait', "sh", *command]
wrapper = subprocess.Popen(wrapped, stdin=0, stdout=subprocess.PIPE, env=variables)
print(direct.pid, wrapper.pid, int(wrapper.stdout.readline()), flush=True)
input()
"""


@pytest.mark.parametrize("variable", ["RANK", "TORCHELASTIC_RUN_ID"])
def test_siblings_have_the_same_launcher(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    """Children of the launcher and of a wrapper are siblings; forged PIDs are not."""
    for name in ("RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    command, pipe = [sys.executable, "-c", WRAPPED], subprocess.PIPE
    with subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe) as launcher:
        assert launcher.stdout
        direct, wrapper, behind = map(int, launcher.stdout.readline().split())
        monkeypatch.setenv(variable, "0")  # this process is a rank
        assert {watchdog.launcher_of(pid) for pid in (direct, wrapper, behind)} == {launcher.pid}
        rank: Any = Mock(launcher=launcher.pid)
        others = (launcher.pid, os.getpid(), 1, 0, -1, 2**70, str(direct), None, [direct])
        assert [Watchdog._is_sibling(rank, pid) for pid in (direct, behind)] == [True, True]
        assert not [pid for pid in others if Watchdog._is_sibling(rank, pid)]
        assert not Watchdog._is_sibling(Mock(launcher=None), 1)
        launcher.kill()


def test_a_forged_state_has_no_effect(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """States name the parent of this process, a foreign folder, and another host."""
    of_rank_1, foreign = tmp_path / "attempt_0" / "1" / "error.json", tmp_path / "error.json"
    of_rank_1.parent.mkdir(parents=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "attempt_0" / "0" / "error.json"))
    monkeypatch.setattr(watchdog, "launcher_of", {11: 10, 12: 10, 99: 1}.get)
    monkeypatch.setattr(watchdog, "print_stacks_and_kill", kill := Mock())
    host = {"host": socket.gethostname()}
    states = [host | {"pid": 99, "folder": "1"}]
    states += [host | {"pid": 11, "folder": path} for path in ("../..", str(tmp_path), "", None)]
    states += [{"host": "elsewhere", "pid": 12, "folder": "1"}]
    rank: Any = Mock(launcher=10)
    rank._is_sibling = partial(Watchdog._is_sibling, rank)
    Watchdog._kill_silent(rank, states, "HANG")
    assert kill.call_args_list == [call(11)] * 4
    assert not of_rank_1.exists()
    assert not foreign.exists()
    Watchdog._kill_silent(rank, [host | {"pid": 12, "folder": "1"}], "HANG: it")
    assert "HANG: it" in of_rank_1.read_text()
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")  # not started by torchrun
    Watchdog._kill_silent(rank, [host | {"pid": 12, "folder": ""}], "HANG")
    assert kill.call_args_list[-1] == call(12)


HANDLED = """
import os, signal, time
from unittest.mock import Mock
from harness.observe.watchdog import Watchdog
{}
Watchdog._end_on_signals(Mock(report=Mock(path=None, cases=[]), job=Mock(rank=0)))
{}
time.sleep(60)
print("outlives it")
"""
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


def ended(*code: str, **variables: str) -> tuple[int, str, str]:
    """The status, stdout and stderr of a Python program."""
    command, env = [sys.executable, "-c", *code], os.environ | variables
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500)
    return done.returncode, done.stdout, done.stderr


def test_under_nohup_a_rank_outlives_its_terminal_but_not_its_launcher() -> None:
    """SIGHUP is ignored, as under nohup. Then the rank kills the launcher."""
    kills = "os.kill(os.getpid(), signal.SIGHUP); os.kill(os.getppid(), signal.SIGKILL)"
    rank = HANDLED.format("signal.signal(signal.SIGHUP, signal.SIG_IGN)", kills)
    # both have ended when stdout and stderr are closed
    done = ended(LAUNCHER, rank, TORCHELASTIC_RUN_ID="a run")
    assert done == (-signal.SIGKILL, "", "SIGTERM: ended after 0 cases\n")


def test_the_lower_of_two_simultaneous_signals_is_named() -> None:
    """Both are pending, as after a second Ctrl-C. The kernel runs the handler of SIGTERM first."""
    blocks = (
        "both = {signal.SIGINT, signal.SIGTERM}; signal.pthread_sigmask(signal.SIG_BLOCK, both)"
    )
    kills = "[os.kill(os.getpid(), number) for number in both]; "
    both = HANDLED.format(blocks, kills + "signal.pthread_sigmask(signal.SIG_UNBLOCK, both)")
    assert ended(both) == (128 + signal.SIGINT, "", "SIGINT: ended after 0 cases\n")


def test_a_node_without_network_reports_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """With --timeout 30 and polls of 0.5 s, 41 without an answer end the run."""
    end = Mock(side_effect=SystemExit)
    monkeypatch.setattr(watchdog, "exit_now", end)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(watchdog.faulthandler, "dump_traceback", lambda all_threads: None)
    rank: Any = Mock(timeout_s=30, poll_s=0.5, answers=7, where="rank 2 on b, case 'x', step")
    looks: list[int] = []

    def wait(seconds: float) -> bool:
        looks.append(len(looks))
        if len(looks) == 40:  # just in time
            rank.answers += 1
        return False

    rank.stopped.wait = wait
    with pytest.raises(SystemExit):
        Watchdog._check_store(rank)
    assert len(looks) == 40 + 41
    status, reason = end.call_args.args
    assert status == 3
    assert reason == (
        f"HANG: {socket.gethostname()} has lost the other ranks: the rendezvous store, served by "
        "torchrun's agent, has not answered for 41 s; rank 2 on b, case 'x', step"
    )
    rank.stopped.wait = lambda seconds: True  # the run is over
    Watchdog._check_store(rank)
    assert end.call_count == 1
