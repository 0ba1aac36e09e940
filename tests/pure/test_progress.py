"""harness/observe/progress.py: lines on cases that are built slowly, and the line of a terminal."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from harness.observe import progress
from harness.observe.progress import Progress


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(progress, "write_stderr", lines.append)
    monkeypatch.setattr("sys.stderr", SimpleNamespace(isatty=lambda: False))
    return lines


def test_the_line_has_the_case_and_the_time_left(
    written: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 of 6 cases took 60 s. The third has taken 10 s, so 4 * 30 - 10 s are left."""
    clock = 100.0
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock))
    bench: Any = SimpleNamespace(is_first=True, measured=[0], case_count=6)
    observer = Progress(bench)
    observer.begin("a", True)
    clock, bench.measured = 160.0, [0, 1, 2]
    observer.begin("fsdp2 inductor", True)
    observer.what, clock = "setup", 170.0
    observer.tell()
    assert written == ["# case 3 of 6: fsdp2 inductor: setup, 10 s; about 2 min left"]
    clock = 300.0  # longer than all that was expected to be left
    observer.tell()
    assert written[1:] == ["# case 3 of 6: fsdp2 inductor: setup, 2 min"]


@pytest.mark.parametrize(
    ("phase", "is_first", "runs"),
    [
        ("setup", True, True),
        ("setup", False, False),  # a rank other than 0
        ("ddp inductor, step 1 (the first one compiles)", True, True),
        ("step, warm-up 1", True, True),
        ("step, warm-up 2", True, False),
        ("step, block 1", True, False),
        ("step 1", True, False),  # of checkpoint_sweep.py, which times it
        ("waiting for all ranks", True, False),
    ],
)
def test_no_timer_runs_in_timed_phases(
    phase: str, is_first: bool, runs: bool, written: list[str]
) -> None:
    bench: Any = SimpleNamespace(is_first=is_first, measured=[0], case_count=1)
    before = threading.active_count()
    observer = Progress(bench)
    observer.begin("a", True)
    observer.phase("setup", 1)
    observer.phase(phase, 1)
    assert (observer.timer is not None) == runs
    observer.stop()
    if timer := next((t for t in threading.enumerate() if isinstance(t, threading.Timer)), None):
        timer.join(5)
    assert threading.active_count() == before


def test_a_slow_build_is_reported_again(
    written: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "FIRST_S", 0.01)
    monkeypatch.setattr(progress, "NEXT_S", 0.01)
    again = threading.Event()

    def write(line: str) -> None:
        written.append(line)
        if len(written) == 3:
            again.set()

    monkeypatch.setattr(progress, "write_stderr", write)
    observer = Progress(SimpleNamespace(is_first=True, measured=[0], case_count=1))  # type: ignore
    observer.begin("a", True)
    observer.phase("setup", 1)
    assert again.wait(60)
    observer.phase("step, block 1", 1)
    assert written[0].startswith("# case 1 of 1: a: setup, ")


def test_the_line_of_a_terminal_ticks_while_a_case_is_built(
    written: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """tqdm writes it anew, with the elapsed time; not in timed phases or when a row is printed."""
    ticks = []
    ticked = threading.Event()

    def refresh() -> None:
        ticks.append(observer.what)
        if len(ticks) == 3:
            ticked.set()

    monkeypatch.setattr(progress, "TICK_S", 0.01)
    observer = Progress(SimpleNamespace(is_first=True, measured=[0], case_count=1))  # type: ignore
    done = lambda *words, **named: None  # noqa: E731
    line = {"refresh": refresh, "update": done, "set_description_str": done, "clear": done}
    observer.line = SimpleNamespace(**line, ncols=80)  # type: ignore
    observer.begin("a", True)
    for after in ("step, block 1", ""):
        ticked.clear()
        ticks.clear()
        observer.phase("step 1 (the first one compiles)", 1)
        assert ticked.wait(600)
        observer.phase(after, 1)
        assert observer.timer is None
        before = len(ticks)
        observer.tick()  # of a timer that had begun
        assert (len(ticks), set(ticks)) == (before, {"step 1 (the first one compiles)"})
    assert written == []
