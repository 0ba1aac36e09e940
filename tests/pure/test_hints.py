"""The lines around the tables, by hand: common/observe/hints.py, progress.py."""

import os
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from common.benchmark import report_lines
from common.cli import ROOT, duration
from common.environment import Others
from common.observe.hints import (
    Hints,
    crowded_text,
    drifts,
    hints,
    launch_bound,
    two_modes,
    with_wide_interval,
    without_interval,
)
from common.observe.progress import Pace, Progress
from common.report import Case, Estimate

FLAGS = SimpleNamespace(iters=None, min_iters=20, max_seconds=5)
SURE, WIDE, NONE = Estimate(1, 0.95, 1.05), Estimate(1, 0.9, 1.2), Estimate(1)


def case(samples: list[float] | None = None, **metrics: Any) -> Case:
    step = {"step": [samples or [0.1] * 30]}
    return Case(key={"name": "a"}, ranks=[0], samples_s=step, metrics=metrics)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.9, "9.9 s"),
        (9.96, "10 s"),
        (99, "99 s"),
        (100, "2 min"),
        (5_400, "90 min"),
        (7_500, "2 h 05 min"),
    ],
)
def test_a_duration_in_words(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_how_long_still() -> None:
    """Cases that begin at 100 s, 120 s and 160 s; two are over, after 30 s on average."""
    pace = Pace(12)
    pace.begin(100)
    assert pace.text(101) == "case 1 of 12"
    pace.begin(120)
    pace.begin(160)
    assert pace.text(170) == "case 3 of 12, about 5 min left"  # 9 cases, and 20 s of this one
    pace.cases = 3
    assert pace.text(170) == "case 3 of 3, about 20 s left"
    assert pace.text(250) == "case 3 of 3, about 1.0 s left"
    pace.cases = 0  # nothing was announced
    assert pace.text(170) == "case 3"


def test_the_line_counts_measured_cases_alone() -> None:
    """RPC starts before the first case and ends after the last: it is none."""
    bench: Any = SimpleNamespace(is_first=False, measured=[], case_count=2)
    progress, line = Progress(bench), Mock(ncols=80)
    progress.line = line
    for label, what in (("RPC", "start"), ("a", "step"), ("RPC", "end")):
        bench.watchdog = SimpleNamespace(label=label)
        bench.measured += [{}] if label == "a" else []
        progress.phase(what)
    shown = [call.args[0] for call in line.set_description_str.call_args_list]
    assert shown == [f"case 1 of 2: {text}" for text in ("RPC: start", "a: step", "RPC: end")]


def test_which_intervals_are_doubtful() -> None:
    """A difference that may be 0 is as small as it can be told."""
    none = case(step_s=NONE, exposed_s=SURE, samples_per_s=NONE)
    wide = case(step_s=WIDE)
    full = case(step_s=SURE, exposed_s=Estimate(0.1, -1, 1))
    bare = case(samples_per_s=1.0)  # nothing that is estimated
    assert without_interval(none) == with_wide_interval(wide) == {"step"}
    assert without_interval(wide) == without_interval(full) == without_interval(bare) == set()
    assert with_wide_interval(none) == with_wide_interval(full) == set()
    assert hints([full, bare], FLAGS, "", "") == []
    first, _ = hints([full, none, wide, bare], FLAGS, "", "")
    assert first == "95 % interval of step: missing (-) in 1, wider than +-10% in 1 of 4 cases"


def test_few_samples_get_more_time() -> None:
    few = case([2.0] * 6, step_s=NONE, exposed_s=NONE)

    def cause(**flags: Any) -> str:
        given = SimpleNamespace(**vars(FLAGS) | flags)
        first, line = hints([few], given, "", "")
        assert "interval of exposed, step: missing" in first
        return line

    # 12 s of samples, with the untimed iterations up to 24 s: twice that
    assert cause() == "  few samples, 6 in one of them: --max-seconds 48"
    assert cause(max_seconds=20).endswith("--max-seconds 80")
    assert cause(iters=6).endswith("--iters 12")


def test_each_cause_that_is_seen_has_a_line_and_what_helps() -> None:
    wide = case([0.125, 0.25] * 20, step_s=WIDE)
    others = "other programs take 1.0 of 2 cores of vm"
    crowded = "4 ranks share 2 cores of vm"
    _, *causes = hints([wide], FLAGS, others, crowded)
    assert causes == [
        f"  {crowded}: start fewer ranks",
        f"  {others}: wait for their end, or compare by analysis/ab.py --interleave",
    ]
    _, cause = hints([wide], FLAGS, "", "")
    assert cause == "  no cause is seen; what helps often: --max-seconds 30"


def test_a_launch_bound_case_has_a_line() -> None:
    bound = case(launch_share={"step": 0.97, "local": 0.2})
    assert launch_bound(bound) == 0.97
    assert launch_bound(case(launch_share={"step": 0.9})) is None
    assert launch_bound(case()) is None
    assert Hints.row(Hints.__new__(Hints), bound, []) == ["launch-bound 97%"]


def test_a_case_of_two_modes_has_a_line() -> None:
    split = case([0.3e-3, 0.32e-3, 0.31e-3, 3.6e-3] * 8)
    assert Hints.row(Hints.__new__(Hints), split, []) == ["two modes: 310 us (75%), 3.60 ms (25%)"]
    split.check = "failed: why"
    assert two_modes(split) == two_modes(case()) == []


def test_samples_that_drift_are_said_to() -> None:
    """30 samples that grow all the time tell as much as a few."""
    growing = case([0.1 + 0.01 * i for i in range(30)], step_s=NONE)
    assert drifts(growing)
    assert not drifts(case([0.1, 0.2] * 15))
    assert not drifts(case([0.1, 0.2]))
    _, cause = hints([growing], FLAGS, "", "")
    assert cause.startswith("  the samples of 1 drift, so they count as fewer: --max-seconds ")


def test_more_ranks_than_cores_are_counted_by_node() -> None:
    rows = [{"host": host} for host in ("a", "a", "b", "b", "b")]
    nodes = [0, 0, 1, 1, 1]
    assert crowded_text(rows, [Others(0, 2), Others(0, 4)], nodes) == ""
    assert crowded_text(rows, [Others(0, 2), Others(0, 2)], nodes) == "3 ranks share 2 cores of b"


def test_the_last_lines_have_the_next_commands(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert report_lines(None, None) == report_lines("-", None) == []
    report, before = report_lines("a b.jsonl", os.path.realpath("a b.jsonl.bak"))
    what, _, command = report.partition("; ")
    python, script, *words = shlex.split(command)
    assert (what, python, Path(script).name) == ("report a b.jsonl", "python", "report.py")
    assert words == ["a b.jsonl", "-o", "page.html"]
    what, _, command = before.partition("; ")
    python, script, *words = shlex.split(command)
    assert (what, python, Path(script).name) == ("before a b.jsonl.bak", "python", "compare.py")
    assert words == ["a b.jsonl.bak", "--test", "a b.jsonl"]


def test_where_the_report_is_if_the_current_folder_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    report, before = report_lines("/reports/r.jsonl", "/reports/r.jsonl.bak")
    script = ROOT / "analysis" / "report.py"
    command = shlex.join(["python", str(script), "/reports/r.jsonl", "-o", "page.html"])
    assert report == f"report /reports/r.jsonl; {command}"
    assert before.startswith("before /reports/r.jsonl.bak; ")
