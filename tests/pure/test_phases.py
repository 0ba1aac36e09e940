"""common/workloads/phases.py by hand: which steps count, and what is made of their durations."""

from typing import Any

import pytest
import torch

from common.report import Estimate
from common.table import render
from common.workloads.phases import Phases, own_pace, phase_table, summaries, summary


def test_durations_by_step_and_phase() -> None:
    phases = Phases(torch.device("cpu"))
    phases.begin()
    phases.add("forward", 1.0, 3.0)
    phases.add("backward", 3.0, 4.0)
    phases.add("forward", 4.0, 6.0)  # a second one
    phases.add("whole", 1.0, 6.0)
    first = phases.step
    phases.begin()
    phases.add("forward", 10.0, 10.5)
    assert phases.durations([first, phases.step]) == [
        {"forward": [2.0, 2.0], "backward": [1.0], "whole": [5.0]},
        {"forward": [0.5]},
    ]


def test_marks_follow_each_other() -> None:
    phases = Phases(torch.device("cpu"))
    phases.begin()
    start = phases.last
    phases.mark("first")
    phases.mark("second")
    phases.add("both", start, phases.last)
    (step,) = phases.durations([phases.step])
    assert step["both"] == pytest.approx([step["first"][0] + step["second"][0]])
    assert 0 < step["both"][0] < 1


def test_summary() -> None:
    # mean 3, squares 4 + 1 + 0 + 9 = 14 over n - 1 = 3; the 75th percentile lies a quarter of
    # the way from 3 to 6
    found = summary([1, 2, 3, 6])
    assert (found["count"], found["min_s"], found["max_s"], found["mean_s"]) == (4, 1, 6, 3)
    assert found["variance_s2"] == pytest.approx(14 / 3)
    assert found["stdev_s"] == pytest.approx((14 / 3) ** 0.5)
    assert (found["p50_s"], found["p75_s"]) == (2.5, 3.75)
    one = summary([0.25])
    assert (one["variance_s2"], one["stdev_s"], one["p95_s"]) == (0, 0, 0.25)


def shown(found: list[tuple[str, dict[str, Any]]], each_worker: bool = True) -> list[list[str]]:
    """The rows of the table, without its heads."""
    lines = render(*phase_table("servers", found, each_worker)).splitlines()
    heads = "servers phase count p50 p95 mean stdev min max p75 p90 variance"
    assert lines[0].split() == heads.split(" ")
    return [line.split() for line in lines[3:]]


def test_summaries_and_their_table() -> None:
    found = summaries({"server0": {"batch": [0.001]}, "server1": {"batch": [0.003, 0.005]}})
    assert list(found) == ["server0", "server1", "all"]
    assert found["all"]["batch"]["mean_s"] == pytest.approx(0.003)
    rows = shown([("rpc", found)])
    assert rows[0][:5] == ["rpc", "batch", "server0", "1", "1.000"]
    # of 1, 3 and 5 ms: mean 3, variance 8 / 2
    assert rows[2][:4] == ["batch", "all", "3", "3.000"]
    assert rows[2][5:9] == ["3.000", "2.000", "1.000", "5.000"]
    assert rows[2][-1] == "4.000"
    assert [row[:4] for row in shown([("rpc", found)], False)] == [["rpc", "batch", "3", "3.000"]]


def test_a_worker_without_durations_and_many_workers() -> None:
    found = summaries({"server0": {"batch": [1.0]}, "server1": {}})
    assert found["server1"] == {}
    assert [row[:-10] for row in shown([("a", found), ("b", found)])] == [
        ["a", "batch", "server0"],
        ["batch", "all"],
        ["b", "batch", "server0"],
        ["batch", "all"],
    ]
    alone = summaries({"server0": {"batch": [1.0]}})
    assert len(shown([("a", alone)])) == 1
    many = summaries({f"trainer{i}": {"batch": [1.0]} for i in range(11)})
    workers = [row[-11] for row in shown([("a", many)])]
    assert workers == [*(f"trainer{i}" for i in range(8)), "all"]


def test_workers_at_their_own_pace() -> None:
    """Blocks of one step: max(1, 2), ..., 5 of 2 s and one of 4 s: 12 samples in 14 s."""
    metrics, rate = own_pace([[1.0] * 5 + [4.0], [2.0] * 6], [1] * 6, "step")
    assert metrics["step_s"] == Estimate(2.0, 2.0, 2.0)
    assert metrics["step_slowest"] == 1
    assert metrics["step_p95_s"] == pytest.approx(3.25)  # the other worker's
    assert rate == Estimate(12 / 14, 0.5, 1.0)
