"""harness/observe/progress.py: lines on cases that are built slowly, and the line of a terminal."""

import os
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


def test_case_and_time_left(written: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """2 of 6 cases took 60 s. The third has taken 10 s, so 4 * 30 - 10 s are left."""
    clock = 100.0
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock))
    bench: Any = SimpleNamespace(is_first=True, measured=[0], case_count=6)
    observer = Progress(bench)
    observer.begin("a", True)
    clock, bench.measured = 160.0, [0, 1, 2]
    observer.begin("fsdp2 inductor", True)
    observer.what, clock = "setup", 170.0
    observer.write()
    assert written == ["# case 3 of 6: fsdp2 inductor: setup, 10 s; about 2 min left"]
    clock = 310.0  # 150 s: 3 cases took 210 s so far, and 3 more take as long
    observer.write()
    assert written[1:] == ["# case 3 of 6: fsdp2 inductor: setup, 2 min; about 4 min left"]


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
def test_timers_of_phases(phase: str, is_first: bool, runs: bool, written: list[str]) -> None:
    bench: Any = SimpleNamespace(is_first=is_first, measured=[0], case_count=1)
    before = threading.active_count()
    observer = Progress(bench)
    observer.begin("a", True)
    observer.phase("setup", 1)
    observer.phase(phase, 1)
    assert (observer.timer is not None) == runs
    observer.stop()
    if timer := next((t for t in threading.enumerate() if isinstance(t, threading.Timer)), None):
        timer.join(500)
    assert threading.active_count() == before


def test_a_slow_build_is_told_again(written: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert again.wait(500)
    observer.phase("step, block 1", 1)
    assert written[0].startswith("# case 1 of 1: a: setup, ")


def test_the_line_of_a_terminal_ticks_while_a_case_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written anew in each phase and while a case is built, and deleted before a row."""
    ticked, texts = threading.Event(), list[str]()

    def write(text: str, end: str) -> None:
        texts.append(text.replace("\r\x1b[K", "<", 1) + end)
        if len(texts) == 3:
            ticked.set()

    monkeypatch.setattr(progress, "write_stderr", write)
    monkeypatch.setattr(progress, "duration", lambda seconds: "0.0 s")
    monkeypatch.setattr(progress, "TICK_S", 0.01)
    monkeypatch.setattr("os.get_terminal_size", lambda number: os.terminal_size((38, 24)))
    monkeypatch.setattr("sys.stderr", SimpleNamespace(isatty=lambda: True, fileno=lambda: 2))
    observer = Progress(SimpleNamespace(is_first=True, measured=[0], case_count=1))  # type: ignore
    observer.begin("a", True)
    for after, line in (("step, block 1", "<case 1 of 1: a: step, block 1, 0.0 s"), ("", "<")):
        ticked.clear()
        texts.clear()
        observer.phase("step 1 (the first one compiles)", 1)
        assert ticked.wait(500)
        observer.phase(after, 1)
        assert observer.timer is None
        assert set(texts[:-1]) == {"<case 1 of 1: a: step 1 (the fi, 0.0 s"}
        assert texts[-1] == line
        before = len(texts)
        observer.tick()  # of a timer that had begun
        assert len(texts) == before
