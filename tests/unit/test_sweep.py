"""common/sweep.py in a world of one: work on every rank, and cases that lose ranks."""

import argparse
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from common import sweep as sweep_module
from common.dist import CaseGroup, PeerLost, RankContext
from common.results import Report
from common.sweep import Outcome, Sweep, describe


class Stopped(Exception):
    """The process would have ended here."""


class Watch:
    """In the place of the watchdog: keeps the phases, and ends the report but not the process."""

    def __init__(self, on_end: Callable[[str, str], None]) -> None:
        self.on_end = on_end
        self.entered: list[tuple[str, tuple[int, ...], str]] = []

    def enter(self, case: str, order: tuple[int, ...], phase: str) -> None:
        self.entered.append((case, order, phase))

    def guard(self, group: Any) -> Any:
        return threading.Lock()  # a context that does nothing

    def lost_peer(self, error: BaseException) -> None:
        self.on_end("failed", str(error))
        raise Stopped(str(error))


@pytest.fixture
def sweep(world: RankContext, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    monkeypatch.setattr(sweep_module, "init", lambda *args: world)
    args = argparse.Namespace(timeout=60.0, json=None, resume=False)
    made = Sweep("test", args, torch.device("cpu"), "gloo")
    made.watch = Watch(made._on_end)  # type: ignore[assignment]
    made.report = Report(None, "test", {}, lambda cases: {})
    made._progress = sweep_module.Progress(False)
    return made


def test_everywhere(sweep: Sweep) -> None:
    seen: list[int] = []
    assert sweep.everywhere("start", lambda: seen.append(1)) is None
    assert seen == [1]

    def fail() -> None:
        raise RuntimeError("no device\nand more")

    assert sweep.everywhere("start", fail) == "RuntimeError: no device"
    names = [case for case, _, _ in sweep.watch.entered]  # type: ignore[attr-defined]
    assert names == ["start", "after start"] * 2


def test_everywhere_without_a_peer(sweep: Sweep) -> None:
    def lose() -> None:
        raise PeerLost("Connection closed by peer")

    with pytest.raises(Stopped, match="closed by peer"):
        sweep.everywhere("start", lose)


def test_the_last_attempt_says_whether_it_failed(sweep: Sweep) -> None:
    def fail(group: CaseGroup) -> Outcome:
        raise ValueError("wrong")

    sweep.attempt("one", [(0,)], fail)
    assert sweep.last_failed
    sweep.attempt("two", [(0,)], lambda group: Outcome({}))
    assert not sweep.last_failed


def test_a_case_that_is_broken_is_not_tried(sweep: Sweep) -> None:
    def never(group: CaseGroup) -> Outcome:
        raise AssertionError

    case = sweep.case({"a": 1}, "a", (0,), never, lambda m, f: ({}, "passed"), broken="no ibv")
    assert case is not None
    assert case["check"] == "failed: no ibv"


def test_what_is_left_of_a_case_is_kept_before_the_job_ends(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(value: Any) -> None:
        raise PeerLost("Connection closed by peer")

    monkeypatch.setattr(sweep_module, "gather_json", lose)
    with pytest.raises(Stopped):
        sweep.case(
            {"a": 1},
            "a",
            (0,),
            lambda group: Outcome({"updates": 7}),
            lambda measured, facts: ({}, "passed"),
            salvage=lambda mine: (mine.facts, "failed: rank 1 died"),
        )
    assert sweep.report is not None
    (case,) = sweep.report.cases
    assert case["metrics"] == {"updates": 7}
    assert case["check"] == "failed: rank 1 died"
    assert sweep.report.finished


def test_without_salvage_nothing_is_kept(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(value: Any) -> None:
        raise PeerLost("Connection closed by peer")

    monkeypatch.setattr(sweep_module, "gather_json", lose)
    with pytest.raises(Stopped):
        sweep.case({"a": 2}, "a", (0,), lambda group: Outcome({}), lambda m, f: ({}, "passed"))
    assert sweep.report is not None
    assert sweep.report.cases == []


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("wrong\nTraceback", "ValueError: wrong"),
        ("", "ValueError: no message"),
        (
            "ValueError: On WorkerInfo(id=1, name=server0):\nValueError('wrong')\nTraceback",
            "ValueError('wrong') (on server0)",
        ),
        ("On WorkerInfo(id=1, name=server0):", "ValueError: On WorkerInfo(id=1, name=server0):"),
    ],
)
def test_an_error_in_one_line(message: str, line: str) -> None:
    assert describe(ValueError(message)) == line
