"""The sentences that end a run, worked out by hand."""

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from common.answers import Estimate, digits_of, fastest, median_of, series, show_seconds
from common.old import Benchmark
from common.report import Case
from common.stats import Interval

Answer = Callable[[list[Case]], list[str]]


def timed(key: dict[str, Any], ms: float, ci: Interval | None = None, **metrics: Any) -> Case:
    """A case whose step takes so many milliseconds."""
    ends = [end / 1e3 for end in ci] if ci else None
    step: dict[str, Any] = {"step_time_p50_s": ms / 1e3, "step_time_ci95_s": ends}
    return Case(key=key, ranks=[0], metrics=step | metrics)


# -- what they share -------------------------------------------------------------------------------


def test_a_ratio_has_the_ends_of_two_intervals() -> None:
    """From 18 / 12 to 22 / 8."""
    ratio = Estimate(20, (18, 22)).over(Estimate(10, (8, 12)))
    assert ratio == (2, (1.5, 2.75))
    assert ratio.times() == "2.00 times (1.50 to 2.75)"
    assert not ratio.may_be(1)
    assert Estimate(20, None).over(Estimate(10, (8, 12))).times() == "2.00 times (no interval)"
    assert not Estimate(20, None).may_be(20)
    assert Estimate(4, (2, 5)).inverse() == (0.25, (0.2, 0.5))
    assert Estimate(4, (2, 5)).scaled(2) == (8, (4, 10))
    assert Estimate(4, (-2, 5)).scaled(2).may_be(0)


def test_numbers_have_three_digits_and_a_unit() -> None:
    assert [digits_of(value) for value in (1240, 124, 12.4, 1.24, 0.124, 0)] == [0, 0, 1, 2, 3, 5]
    times = (3.0, 0.0761, 2.5e-5, 3e-8)
    assert [show_seconds(s) for s in times] == ["3.00 s", "76.1 ms", "25.0 us", "0.0300 us"]
    assert str(Estimate(0.0761, (0.07, 0.0805))) == "76.1 ms (70.0 to 80.5)"
    assert Estimate(0.002, (0.001, 0.0034)).beside(0.0761) == "2.0 (1.0 to 3.4)"
    assert Estimate(0.002, (-0.001, 0.0034)).beside(0.0761) == "2.0 (-1.0 to 3.4: maybe none)"


def test_the_interval_of_a_median() -> None:
    """Where only the farther end is known, it counts on both sides."""
    assert median_of(timed({}, 10, (9, 12))) == (0.01, (0.009, 0.012))
    far = Case(key={}, ranks=[0], metrics={"epoch_time_p50_s": 2.0, "epoch_time_ci95_rel": 0.25})
    assert median_of(far, "epoch_time") == (2.0, (1.5, 2.5))
    far.metrics["epoch_time_ci95_rel"] = 1.5
    assert median_of(far, "epoch_time") == (2.0, None)
    assert median_of(Case(key={}, ranks=[0])) is None


def test_series_are_named_by_what_differs() -> None:
    keys = [
        {"model": "a", "batch": 8, "mode": "x"},
        {"model": "b", "batch": 8, "mode": "x"},
        {"model": "b", "batch": 8, "mode": "y"},
    ]
    cases = [Case(key=key, ranks=[0]) for key in keys]
    assert series(cases, ("mode",)) == {"a: ": cases[:1], "b: ": cases[1:]}
    assert series(cases, ("mode", "model")) == {"": cases}
    cases[0].key["batch"] = 4
    assert [*series(cases, ("mode", "model"))] == ["batch 4: ", "batch 8: "]
    assert series([], ()) == {}


def test_the_fastest() -> None:
    """At worst 0.111 / 0.101 = 1.10, at best 0.113 / 0.099 = 1.14."""
    times = {
        "slow": Estimate(0.150, (0.140, 0.160)),
        "b": Estimate(0.112, (0.111, 0.113)),
        "a": Estimate(0.100, (0.099, 0.101)),
    }
    assert fastest(times) == "a is 1.12 times (1.10 to 1.14) as fast as b, the next"
    times["b"] = Estimate(0.112, (0.101, 0.113))
    assert fastest(times) == "a and b cannot be told apart"
    times["b"] = Estimate(0.112, None)
    assert fastest(times) == "a is 1.12 times (no interval) as fast as b, the next"
    assert fastest({"a": times["a"]}) == "a takes 100 ms (99 to 101)"


# -- each script -----------------------------------------------------------------------------------


def test_an_answer_is_printed_and_kept() -> None:
    """Benchmark hands the cases over that did not fail, and prints `# ` before each sentence."""
    printed: list[str] = []
    failed = Case(key={"n": 2}, ranks=[0], check="failed: why")
    passed = [Case(key={"n": 1}, ranks=[0]), Case(key={"n": 3}, ranks=[0], check="skipped: why")]
    bench: Any = Namespace(report=Namespace(cases=[*passed, failed]), print=printed.append)
    bench.answer = lambda cases: [str(case.key["n"]) for case in cases]
    assert Benchmark.print_answer(bench) == ["1", "3"]
    assert printed == ["", "# 1", "# 3"]
    bench.answer = lambda cases: []
    assert Benchmark.print_answer(bench) == []
    assert len(printed) == 3
