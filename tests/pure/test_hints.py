"""harness/observe/hints.py: the lines around the tables."""

import shlex
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from benchmarks.workloads.settings import SettingsTable, split_case
from common.stats import Estimate
from harness.benchmark import report_lines
from harness.cpu_load import Others
from harness.exits import ROOT
from harness.observe.hints import Hints, crowded_text, hints, modes, two_modes
from harness.report import Case, load
from tests.pure.reports import case as line
from tests.pure.reports import write

SURE, WIDE, NONE = Estimate(1, 0.95, 1.05), Estimate(1, 0.9, 1.2), Estimate(1)


def case(name: str = "a", samples: list[float] | None = None, **metrics: Any) -> Case:
    step = {"step": [samples or [0.1] * 30]}
    return Case(key={"name": name}, name=name, ranks=[0], samples_s=step, metrics=metrics)


def said(
    *cases: Case, busy: str = "", crowded: str = "", is_load_known: bool = True, **flags: Any
) -> list[str]:
    """The hints of a run with these cases."""
    given = {"iters": None, "min_iters": 20, "max_seconds": 5} | flags
    return hints(cases, SimpleNamespace(**given), busy, crowded, is_load_known)


def test_which_intervals_count() -> None:
    """Not that of a difference that includes 0, nor that of a rate, which follows from a time."""
    for metrics, is_counted in (
        ({"step_s": NONE, "late_s": SURE}, True),
        ({"step_s": SURE, "late_s": WIDE}, True),
        ({"step_s": SURE, "exposed_s": Estimate(0.1, -1, 1), "samples_per_s": NONE}, False),
        ({"samples_per_s": 1.0}, False),
    ):
        lines = said(case(step_s=SURE), case(**metrics))
        assert [" in 1 of 2 cases; " in line for line in lines] == [True] * is_counted


OTHERS = "other processes used 1.0 of 2 cores of vm"
CROWDED = "4 ranks share 2 cores of vm"
FEW = case(samples=[2.0] * 6, step_s=NONE)
SWING = case(samples=[0.125, 0.25] * 20, step_s=WIDE)
GROWING = case(samples=[0.1 + 0.01 * i for i in range(30)], step_s=NONE)  # they count as few
UNKNOWN = "CPU use by other processes was not measured here"
UNMEASURED = {"is_load_known": False}


def test_one_line_names_the_cause_and_then_the_remedy() -> None:
    for one, given, cause, remedy in (
        # 12 s of samples, about 30 s with 1.5 untimed iterations per block: more than that
        (FEW, {}, "few samples, down to 6 per case", "try --max-seconds 48"),
        (FEW, {"iters": 6}, "few samples, down to 6 per case", "try --iters 12"),
        (SWING, {}, "no cause found", "try --max-seconds 30"),
        (
            FEW,
            {"busy": OTHERS, "crowded": CROWDED},
            f"{CROWDED} and {OTHERS}",
            "ranks, and wait until the other processes end",
        ),
        (FEW, {"busy": OTHERS}, OTHERS, "compare with analysis/ab.py --interleave"),
        (GROWING, {}, "samples of 1 case drift, and so count as fewer", "try --max-seconds 30"),
        # while two commands are interleaved, no rank measures the load
        (SWING, UNMEASURED, f"no cause found; {UNKNOWN}", "try --max-seconds 30"),
        (FEW, UNMEASURED, f"few samples, down to 6 per case; {UNKNOWN}", "try --max-seconds 48"),
    ):
        (line,) = said(case("sure", step_s=SURE), one, **given)
        assert line.startswith("95% intervals missing (-) or wider than +-10% in 1 of 2 cases; ")
        prefix = "" if cause.startswith("no cause found") else "possible cause: "
        assert f"; {prefix}{cause}; " in line
        assert line.endswith(remedy)


def test_lines_below_a_row() -> None:
    split = [0.3e-3, 0.32e-3, 0.31e-3, 3.6e-3] * 8
    bound = case(samples=split, launch_share={"step": 0.97, "local": 0.2})
    expected = ["launch-bound 97%", "two modes: 310 us (75%), 3.60 ms (25%)"]
    observer = Hints.__new__(Hints)
    observer.bench = Mock(table=None)
    assert observer.row(bound, []) == expected
    assert observer.row(case(launch_share={"step": 0.9}), []) == []
    # a row for each setting, with its own steps
    two = case(samples=split)
    two.metrics |= {"b step_s": Estimate(0.1), "b samples_per_s": Estimate(80)}
    two.samples_s["b"] = [[0.1] * 3 + [0.3]]
    observer.bench = Mock(table=SettingsTable({}, partial(split_case, labels=["a", "b"]), "ab"))
    assert observer.row(two, []) == [
        "a: two modes: 310 us (75%), 3.60 ms (25%)",
        "b: on average a step takes 1.50 times this long; over all iterations 53.33 samples/s",
    ]
    observer.bench = Mock(table=None)
    bound.check = "failed: the row shows no times"
    assert observer.row(bound, []) == []
    rows = [{"host": host} for host in ("a", "a", "b", "b", "b")]
    nodes = [0, 0, 1, 1, 1]
    assert crowded_text(rows, [Others(0, 2), Others(0, 4)], nodes) == ""
    assert crowded_text(rows, [Others(0, 2), Others(0, 2)], nodes) == "3 ranks share 2 cores of b"


def test_the_last_lines_suggest_the_next_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the working directory has been removed."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    old = write(tmp_path / "old 1", line("no ddp"), line("1M/2R"))
    new = load(write(tmp_path / "new", line("1M/2R"), line("other")))
    report, before = report_lines(new, "/r 1", old)
    page = ["python", f"{ROOT}/analysis/report.py", "/r 1", "-o", "page.html"]
    assert report == f"report /r 1; {shlex.join(page)}"
    compare = shlex.join(["python", f"{ROOT}/analysis/compare.py", old, "--test", "/r 1"])
    assert before == f"previous report {old}; to compare: {compare}"
    others = [(new.cases[1:], "ddp_sweep"), ([], "ddp_sweep"), (new.cases, "collectives")]
    for new.cases, new.benchmark in others:  # compare.py would find no common case
        assert report_lines(new, "/r 1", old)[1] == f"previous report {old}"


def test_two_modes_and_their_shares() -> None:
    """7 calls take 0.3 ms and 3 take 3.6 ms, like all-reduces over gloo."""
    calls = [0.29e-3, 3.6e-3, 0.3e-3, 3.7e-3, 0.31e-3, 0.3e-3, 3.5e-3, 0.3e-3, 0.3e-3, 0.3e-3] * 2
    fast, slow = modes(calls)
    assert [*fast, *slow] == pytest.approx([0.3e-3, 0.7, 3.6e-3, 0.3])
    assert modes([1.0] * 20 + [1.9] * 20) == []  # less than a factor of 2
    assert modes([1.0] * 100 + [9.0] * 5) == []  # less than a tenth of the calls
    assert modes([1.0] * 6 + [9.0] * 4) == []  # fewer than 5
    assert modes([1.0] * 20 + [3.0] * 6 + [9.0] * 20) == []  # no valley between them
    # 3 of 4 steps take 10 ms, the others 50 ms: 8 samples in 20 ms on average are 400 samples/s, a
    # rate at which no step trained, and neither is 8 / 15 ms.
    step_s = [0.01, 0.01, 0.05, 0.01] * 10
    begin = two_modes(case(samples=step_s))[0]
    assert begin.startswith("two modes: 10")
    both = case(samples=step_s, step_s=Estimate(0.015), samples_per_s=Estimate(8 / 0.015))
    assert two_modes(both) == [f"{begin}; over all iterations 400.0 samples/s"]


def test_a_rank_that_is_late_at_the_end_of_every_second_step() -> None:
    """Rank 1 takes 107 ms in one step, and in the next one 11 ms, in which rank 0 waits for it. The
    maximum is 107 and 112 ms; on average rank 1 takes 59 ms: 64 samples in 59 ms are 1,085 / s."""
    late = case(step_s=Estimate(0.1095), samples_per_s=Estimate(64 / 0.1095, 560, 600))
    late.samples_s["step"] = [[0.004, 0.112] * 10, [0.107, 0.011] * 10]
    (line,) = two_modes(late)
    assert (
        line == "on average a step takes 0.54 times this long; over all iterations 1,085 samples/s"
    )


def test_a_rate_of_steps_that_stall() -> None:
    """8 samples in a mean of 20 ms: three modes of 10, 20 and 30 ms, or 1 of 15 steps stalls."""
    stalls = ([0.01] * 14 + [0.16]) * 4
    for step_s, low, expected in (
        ([0.01, 0.02, 0.03, 0.01, 0.03] * 6, 700, "2.00 times this long; over all iterations 400"),
        (stalls, 790, "2.00 times this long; over all iterations 400.0"),
        (stalls, 390, None),  # the interval already says so
        (([0.01] * 14 + [0.016]) * 4, 790, None),  # 4% longer
    ):
        rate = Estimate(8 / 0.01, low, 810)
        found = two_modes(case(samples=step_s, step_s=Estimate(0.01), samples_per_s=rate))
        assert (expected in found[0]) if expected else not found
