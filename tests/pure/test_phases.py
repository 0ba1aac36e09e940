"""benchmarks/workloads/phases.py: statistics of the durations of steps and phases."""

from typing import Any

import pytest
import torch

from benchmarks.workloads import phases as of_phases
from benchmarks.workloads.phases import Phases
from common.stats import Estimate
from common.table import render
from harness.report import Case


def test_durations_by_step_and_phase() -> None:
    phases = Phases(torch.device("cpu"))
    phases.begin()
    phases.add("forward", 1.0, 3.0)
    phases.add("forward", 4.0, 6.0)  # a second time
    phases.add("whole", 1.0, 6.0)
    first = phases.step
    phases.begin()
    start = phases.last
    phases.mark("a")
    phases.mark("b")  # since the previous mark
    phases.add("both", start, phases.last)
    before, step = phases.durations([first, phases.step])
    assert before == {"forward": [2.0, 2.0], "whole": [5.0]}
    assert step["both"] == pytest.approx([step["a"][0] + step["b"][0]])


def test_summary() -> None:
    """The mean is 3, the variance (4 + 1 + 0 + 9) / (n - 1) = 14 / 3, and the 75th percentile a
    quarter of the way from 3 to 6."""
    found = of_phases.summary([1, 2, 3, 6])
    assert (found["count"], found["min_s"], found["max_s"], found["mean_s"]) == (4, 1, 6, 3)
    assert found["variance_s2"] == pytest.approx(14 / 3)
    assert found["stdev_s"] == pytest.approx((14 / 3) ** 0.5)
    assert (found["p50_s"], found["p75_s"]) == (2.5, 3.75)
    assert of_phases.summary([0.25])["stdev_s"] == 0


def shown(most: int | None, **workers: dict[str, Any]) -> tuple[list[str], list[list[str]], str]:
    """Headers, rows, and the text about rows that were left out."""
    case = Case(
        key={}, ranks=[], name="rpc", metrics={"servers": of_phases.summaries(workers)}, hosts=["a"]
    )
    columns, rows, left_out = of_phases.phase_table("servers", [case], most)
    assert [row.hosts for row in rows] == [["a"]] * len(rows)
    names = [header.split("\n")[0] for header in columns]
    return names, [line.split() for line in render(columns, rows).splitlines()[3:]], left_out


def test_the_table() -> None:
    """1, 3 and 5 ms have mean 3 and variance 8 / 2. The statistics of the source come first."""
    servers = {"server0": {"batch": [0.001]}, "server1": {"batch": [0.003, 0.005]}}
    names, rows, left_out = shown(None, **servers)
    assert names[:8] == ["servers", "phase", "", "mean", "stdev", "variance", "min", "max"]
    assert names[8:] == ["p50", "p75", "p90", "p95", "count"]
    assert rows[0][:6] == ["rpc", "batch", "server0", "1.000", "0.000", "0.000"]
    assert rows[2][:7] == ["batch", "all", "3.000", "2.000", "4.000", "1.000", "5.000"]
    assert rows[2][7:] == ["3.000", "4.000", "4.600", "4.800", "3"]
    assert left_out == ""


def test_rows_of_workers() -> None:
    """`all` is omitted for a single worker. Workers beyond the limit are counted."""
    assert [row[2] for row in shown(8, server0={"batch": [1.0]})[1]] == ["server0"]
    _, rows, _ = shown(None, server0={"batch": [1.0]}, server1={})
    assert [row[-11] for row in rows] == ["server0", "all"]
    many = {f"trainer{i}": {"batch": [1.0]} for i in range(11)}
    _, rows, left_out = shown(8, **many)
    assert [row[-11] for row in rows] == [*(f"trainer{i}" for i in range(8)), "all"]
    assert left_out == "3 servers"
    _, rows, left_out = shown(None, **many)
    assert (len(rows), left_out) == (12, "")


def test_workers_that_do_not_wait_for_each_other() -> None:
    """In blocks of one step the slower worker takes 2 s five times and 4 s once. Five blocks have 2
    samples in 2 s, and one has 2 samples in 4 s."""
    metrics, rate = of_phases.unaligned_metrics([[1.0] * 5 + [4.0], [2.0] * 6], [1] * 6, "step")
    assert metrics["step_s"] == Estimate(2.0, 2.0, 2.0)
    assert metrics["step_slowest"] == 1
    assert metrics["step_p95_s"] == pytest.approx(3.25)  # of the other worker
    assert rate == Estimate(1.0, 0.5, 1.0)


def test_a_rate_is_within_its_interval() -> None:
    """One block takes 100 s and the other 39 take 1 s. The mean rate, 40 samples in 139 s, would be
    outside the interval of the median, 1 to 1."""
    _, rate = of_phases.unaligned_metrics([[1.0] * 39 + [100.0]], [1] * 40, "call")
    assert rate == Estimate(1.0, 1.0, 1.0)


def test_six_rounds_always_have_an_interval() -> None:
    """Up to 8 rounds count as independent. With more, their autocorrelation is estimated."""
    assert of_phases.interval_of_rounds([1, 1, 1, 2, 2, 2]) == (1, 2)
    assert of_phases.interval_of_rounds([1, 2, 3, 4, 5]) is None
    assert of_phases.interval_of_rounds([1.0] * 5 + [2.0] * 5) is None
