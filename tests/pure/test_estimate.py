"""Estimate of harness/report.py: arithmetic, intervals and wording."""

import json
from pathlib import Path

from common.stats import Estimate, significant
from harness.report import Case, Report, load


def test_arithmetic_of_intervals() -> None:
    assert Estimate(20, 18, 22) / Estimate(10, 8, 12) == Estimate(2, 1.5, 2.75)
    assert Estimate(4, -2, 8) / Estimate(2, 1, 4) == Estimate(2, -2, 8)
    assert 20 / Estimate(10, 8, 16) == Estimate(2, 1.25, 2.5)
    assert Estimate(20, 18, 22) * 2 == Estimate(40, 36, 44)
    assert 1 - Estimate(0.25, 0.125, 0.5) == Estimate(0.75, 0.5, 0.875)
    assert Estimate(20) / Estimate(10, 8, 12) == Estimate(20, 18, 22) / Estimate(10) == Estimate(2)
    # Without an interval any value is possible, so nothing is stated as certain.
    number, unknown = Estimate(2, 1, 4), Estimate(2)
    assert (number.relative, unknown.relative) == (1, None)
    assert number.may_be(1)
    assert not number.may_be(0.99)
    assert unknown.may_be(100)
    assert number.above(0.9)
    assert not number.above(1)
    assert not unknown.above(1)


def test_wording() -> None:
    for words, expected in (
        (str(Estimate(0.0761, 0.07, 0.0805)), "76.1 ms (70.0 to 80.5)"),
        (str(Estimate(2.5e-6, 2e-6, 3e-6)), "2.50 us (2.00 to 3.00)"),
        (Estimate(1.24, 1.1, 1.39).text("GB/s"), "1.24 GB/s (1.10 to 1.39)"),
        (Estimate(0.123, 0.1, 0.15).text("%", 100, 0), "12% (10 to 15)"),
        (Estimate(0.123).text("%", 100), "12.3% (no interval)"),
        (Estimate(-0.3, -0.62, -0.004).text("%", 100, 0), "-30% (-62 to 0)"),
        (Estimate(1.123, 1.08, 1.171).as_factor(unit="x slower"), "1.12x slower (1.08 to 1.17)"),
        (Estimate(1.004, 1.002, 1.006).as_factor(unit="x"), "1.004x (1.002 to 1.006)"),
        (Estimate(2).as_factor(most=1), "2.00 times (no interval)"),
        (Estimate(0.002, 0.001, 0.0034).part_of(0.0761), "2.0 ms (1.0 to 3.4)"),
        (Estimate(0.002, -0.001, 0.0034).part_of(0.0761), "nothing measurable (-1.0 to 3.4 ms)"),
        (Estimate(0.002).part_of(0.0761), "2.0 ms (no interval)"),
        (Estimate(-0.002).part_of(0.0761), "nothing measurable (no interval)"),
        # two ranks are at most 2 times as fast as one
        (Estimate(1.73, 1.38, 2.2).as_factor(2, "ranks"), "1.73 times (1.38 to 2, ranks)"),
        (
            Estimate(2.1, 2, 2.2).as_factor(2, "ranks"),
            "2.10 times (2.00 to 2.20; at most 2, ranks)",
        ),
        (Estimate(1.9, 1.7, 2.0).as_factor(2, "ranks"), "1.90 times (1.70 to 2.00)"),
    ):
        assert words == expected
    numbers = (193, -28.9, 0.02, 9.9996, 1234.4, 12345.6, 0, 5.2e-5)
    words = "193.0 -28.90 0.02000 10.00 1,234 12,346 0 5.200e-05"
    assert " ".join(map(significant, numbers)) == words
    assert [significant(value, 2) for value in (1.5, 2, 10, 120)] == ["1.5", "2.0", "10", "120"]


def test_a_report_keeps_an_estimate_at_any_depth(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    metrics = {"step_s": Estimate(1.5, 1, 2), "links": [{"gbps": Estimate(3.0)}], "n": 3}
    report = Report("x", {}, str(path))
    report.start()
    report.add(Case(key={"n": 1}, ranks=[0], metrics=metrics))
    line = json.loads(path.read_text().splitlines()[1])
    assert line["metrics"]["step_s"] == {"value": 1.5, "low": 1, "high": 2}
    assert load(str(path)).cases[0].metrics == metrics
