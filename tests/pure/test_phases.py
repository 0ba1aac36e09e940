"""benchmarks/workloads/phases.py by hand: what is made of the durations of steps."""

from typing import Any

import pytest
import torch

from benchmarks.workloads.phases import Phases, own_pace, phase_table, summaries, summary
from common.report import Estimate
from common.table import render


def test_durations_by_step_and_phase() -> None:
    phases = Phases(torch.device("cpu"))
    phases.begin()
    phases.add("forward", 1.0, 3.0)
    phases.add("forward", 4.0, 6.0)  # a second one
    phases.add("whole", 1.0, 6.0)
    first = phases.step
    phases.begin()
    start = phases.last
    phases.mark("a")
    phases.mark("b")  # since the mark before
    phases.add("both", start, phases.last)
    before, step = phases.durations([first, phases.step])
    assert before == {"forward": [2.0, 2.0], "whole": [5.0]}
    assert step["both"] == pytest.approx([step["a"][0] + step["b"][0]])


def test_summary() -> None:
    """Mean 3, squares 4 + 1 + 0 + 9 = 14 over n - 1 = 3; the 75th percentile lies a quarter of the
    way from 3 to 6."""
    found = summary([1, 2, 3, 6])
    assert (found["count"], found["min_s"], found["max_s"], found["mean_s"]) == (4, 1, 6, 3)
    assert found["variance_s2"] == pytest.approx(14 / 3)
    assert found["stdev_s"] == pytest.approx((14 / 3) ** 0.5)
    assert (found["p50_s"], found["p75_s"]) == (2.5, 3.75)
    assert summary([0.25])["stdev_s"] == 0


def shown(each_worker: bool, **workers: dict[str, Any]) -> list[list[str]]:
    """The rows of the table, without its heads."""
    table = render(*phase_table("servers", [("rpc", summaries(workers))], each_worker))
    return [line.split() for line in table.splitlines()[3:]]


def test_the_table() -> None:
    """Of 1, 3 and 5 ms: mean 3, variance 8 / 2."""
    servers = {"server0": {"batch": [0.001]}, "server1": {"batch": [0.003, 0.005]}}
    rows = shown(True, **servers)
    assert rows[0][:5] == ["rpc", "batch", "server0", "1", "1.000"]
    both = ["batch", "all", "3", "3.000", "4.800", "3.000", "2.000", "1.000", "5.000"]
    assert rows[2][:9] == both
    assert rows[2][-1] == "4.000"
    assert [row[:4] for row in shown(False, **servers)] == [["rpc", "batch", "3", "3.000"]]


def test_which_workers_have_a_row() -> None:
    """`all` would repeat a single worker; of many the first 8 are shown."""
    assert [row[2] for row in shown(True, server0={"batch": [1.0]})] == ["server0"]
    without = shown(True, server0={"batch": [1.0]}, server1={})
    assert [row[-11] for row in without] == ["server0", "all"]
    many = shown(True, **{f"trainer{i}": {"batch": [1.0]} for i in range(11)})
    assert [row[-11] for row in many] == [*(f"trainer{i}" for i in range(8)), "all"]


def test_workers_at_their_own_pace() -> None:
    """Blocks of one step: max(1, 2), ..., 5 of 2 s and one of 4 s: 12 samples in 14 s."""
    metrics, rate = own_pace([[1.0] * 5 + [4.0], [2.0] * 6], [1] * 6, "step")
    assert metrics["step_s"] == Estimate(2.0, 2.0, 2.0)
    assert metrics["step_slowest"] == 1
    assert metrics["step_p95_s"] == pytest.approx(3.25)  # the other worker's
    assert rate == Estimate(12 / 14, 0.5, 1.0)
