"""The lines around the tables, by hand."""

import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from common.cli import ROOT
from common.environment import Others
from common.remarks import (
    Conditions,
    Pace,
    crowded_text,
    drifts,
    duration,
    hints,
    planned_lines,
    report_lines,
    with_wide_interval,
    without_interval,
)
from common.report import Case
from common.timing import StopRule

QUIET = Conditions(
    iters=None,
    min_iters=20,
    max_seconds=5,
    others="",
    crowded="",
)


def case(samples: list[float] | None = None, **metrics: Any) -> Case:
    return Case(
        key={"name": "a"}, ranks=[0], samples_s={"step": [samples or [0.1] * 30]}, metrics=metrics
    )


def with_conditions(**changes: Any) -> Conditions:
    return Conditions(**vars(QUIET) | changes)


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


def test_the_longest_time_of_a_case() -> None:
    """A quarter of the budget to warm up, 1.25 of it where an interval is awaited."""
    assert StopRule(max_seconds=12).longest_s == 3 + 15
    assert StopRule(max_seconds=12, full_warmup=True).longest_s == 15
    assert StopRule(max_seconds=12, patience=1).longest_s == 3 + 12
    assert StopRule(iters=10).longest_s is None
    assert StopRule(rounds=24).longest_s is None


def test_a_plan_has_a_line_for_each_case() -> None:
    keys = [{"model": "a", "ranks": 1, "hook": None}, {"model": "a", "ranks": 2, "hook": "bf16"}]
    assert planned_lines(keys).splitlines() == [
        "",
        "# a 1",
        "# a 2 bf16",
        "# 2 cases, nothing was measured",
    ]
    assert planned_lines([]) == "\n# 0 cases, nothing was measured"


def test_how_long_still() -> None:
    """Cases that begin at 100 s, 120 s and 160 s; two are over, after 30 s on average."""
    pace = Pace(12, 95)
    pace.begin(100)
    assert Pace(12).text(101) == "case 1 of 12"
    assert pace.text(101) == "case 1 of 12, 95 s at most"
    pace.end(120)
    pace.begin(120)
    pace.end(160)
    pace.begin(160)
    assert pace.text(170) == "case 3 of 12, about 5 min left"  # 9 cases, and 20 s of this one
    pace.cases = 3
    assert pace.text(170) == "case 3 of 3, about 20 s left"
    assert pace.text(250) == "case 3 of 3, about 1.0 s left"
    pace.cases = 0  # nothing was announced
    assert pace.text(170) == "case 3"


def test_which_intervals_are_doubtful() -> None:
    none = case(step_time_ci95_s=None, step_time_ci95_rel=None, exposed_ci95_s=(1, 2))
    wide = case(step_time_ci95_s=(1, 2), step_time_ci95_rel=0.11)
    full = case(step_time_ci95_s=(1, 2), step_time_ci95_rel=0.1)
    bare = case(samples_per_s=1.0)  # nothing of which an interval is shown
    assert without_interval(none) == with_wide_interval(wide) == {"step time"}
    assert without_interval(wide) == without_interval(full) == without_interval(bare) == set()
    assert with_wide_interval(none) == with_wide_interval(full) == set()
    assert hints([full, bare], QUIET) == []
    first, _ = hints([full, none, wide, bare], QUIET)
    assert first == (
        "95 % interval of step time: missing (-) in 1, wider than +-10% in 1 of 4 cases"
    )


def test_few_samples_get_more_time() -> None:
    few = case([2.0] * 6, step_time_ci95_rel=None, exposed_communication_ci95_s=None)
    first, cause = hints([few], QUIET)
    assert "interval of exposed communication, step time: missing" in first
    # 12 s of samples, with the untimed iterations up to 24 s: twice that
    assert cause == "  few samples, 6 in one of them: --max-seconds 48"
    (_, cause) = hints([few], with_conditions(max_seconds=20))
    assert cause.endswith("--max-seconds 80")
    (_, cause) = hints([few], with_conditions(iters=6))
    assert cause.endswith("--iters 12")


def test_each_cause_that_is_seen_has_a_line_and_what_helps() -> None:
    wide = case([0.125, 0.25] * 20, step_time_ci95_rel=0.2)
    others = "other programs take 1.0 of 2 cores of vm"
    crowded = "4 ranks share 2 cores of vm"
    _, *causes = hints([wide], with_conditions(others=others, crowded=crowded))
    assert causes == [
        f"  {crowded}: start fewer ranks",
        f"  {others}: wait for their end, or compare by analysis/ab.py --interleave",
    ]
    _, cause = hints([wide], QUIET)
    assert cause == "  no cause is seen; what helps often: --max-seconds 30"


def test_samples_that_drift_are_said_to() -> None:
    """30 samples that grow all the time tell as much as a few."""
    growing = case([0.1 + 0.01 * i for i in range(30)], step_time_ci95_rel=None)
    assert drifts(growing)
    assert not drifts(case([0.1, 0.2] * 15))
    assert not drifts(case([0.1, 0.2]))
    _, cause = hints([growing], QUIET)
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
