"""benchmarks/workloads/training.py compared with numbers worked out by hand."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import ArrayLike

from benchmarks.workloads import training
from common.stats import Estimate, Times
from harness.report import Case


@pytest.mark.parametrize(
    ("seconds", "late", "wait"),
    [
        ([3, 7], [1], 4),  # the slowest minus the second slowest
        ([3, 7, 5], [1], 2),
        # two of 5 are late by 100 ms; one by 100 and one by 98; one by 100 and one by 40
        ([0.3, 0.4, 0.3, 0.4, 0.3], [1, 3], 0.1),
        ([0.3, 0.4, 0.3, 0.398, 0.3], [1, 3], 0.1),
        ([0.3, 0.4, 0.3, 0.34, 0.3], [1], 0.06),
        ([0.44, 0.42, 0.3, 0.3, 0.3], [0, 1], 0.14),  # 20 ms are not more than 20 ms
        ([0.44, 0.419, 0.3, 0.3, 0.3], [0], 0.021),  # mending rank 0 alone gains more than 20 ms
        ([7, 7, 3], None, 0),  # at most half of the ranks are late
        ([3, 3, 3], None, 0),
        ([3], None, 0),
    ],
)
def test_late_ranks(seconds: list[float], late: list[int] | None, wait: float) -> None:
    """Named if the others wait longer than 20 ms."""
    found = training.late_ranks([[x] * 9 for x in seconds], [1] * 9, 0.0200001)
    if late is None:
        assert found is None
        return
    assert found is not None
    assert found[0] == late
    assert (found[1].low, found[1].value, found[1].high) == pytest.approx((wait,) * 3)


@pytest.mark.parametrize(
    ("late_ms", "named", "wait_s"),
    [({1: 100, 3: 100}, [1, 3], 0.1), ({1: 100, 3: 98}, [1, 3], 0.1), ({1: 100, 3: 40}, [1], 0.06)],
)
def test_late_ranks_and_noise(late_ms: dict[int, float], named: list[int], wait_s: float) -> None:
    """5 ranks compute for 300 ms with a standard deviation of 1%, 12 rounds of 3 iterations."""
    for seed in range(20):
        samples = np.random.default_rng(seed).normal(0.3, 0.003, (5, 36))
        for rank, ms in late_ms.items():
            samples[rank] += ms / 1000
        step = samples.max(axis=0, keepdims=True) + 0.1
        times = Times({"step": step, "local": samples}, [3] * 12)
        metrics = training.breakdown(times, "local")
        assert metrics["late_ranks"] == named
        assert metrics["late_wait_s"].value == pytest.approx(wait_s, abs=0.005)


def test_a_noisy_rank_is_not_named_with_a_late_one() -> None:
    """Rank 1 of 4 takes 1.5 times as long, and all vary by 30%: it is often too uncertain how long
    the others wait for it, but no other rank is late."""
    for seed in range(40):
        samples = np.exp(np.random.default_rng(seed).normal(size=(4, 36)) * 0.3)
        samples[1] *= 1.5
        times = Times({"step": samples.max(axis=0, keepdims=True), "local": samples}, [3] * 12)
        assert training.breakdown(times, "local").get("late_ranks") in (None, [1])


def test_late_ranks_in_words() -> None:
    case = Case(key={}, ranks=[4, 5, 6, 7], metrics={"step_s": Estimate(0.5)})
    assert (training.slowest_ranks(case), training.late_text(case)) == ("-", None)
    case.metrics |= {"late_ranks": [1, 3], "late_wait_s": Estimate(0.1, 0.09, 0.11)}
    assert training.slowest_ranks(case) == "5,7"
    wait = "make the other ranks wait 100 ms (90 to 110) of 500 ms"
    assert training.late_text(case) == f"rank 5, rank 7 {wait}"
    names = [f"rank {rank} on vm" for rank in range(8)]
    case.metrics["late_ranks"] = [1, 2, 3]
    shown = training.late_text(case, names)
    assert shown == f"rank 5 on vm, rank 6 on vm, rank 7 on vm {wait}".replace("ranks", "rank")


@pytest.mark.parametrize(
    ("compute", "late_s", "named"),
    [
        ([[4.0] * 9, [3.0] * 9, [2.0] * 9], 1.5, [0]),  # above the median of 3 and 2; waits 1 s
        ([[4.0] * 9, [3.75] * 9], 0.25, None),  # not more than 5% of the step
        ([[4.0] * 9, [3.0, 5.0, 3.0] * 3], 1, None),  # 1 / 3 s, but -0.4 to 1.1
        ([[4.0] * 9], None, None),  # no other rank
    ],
)
def test_a_late_rank_is_named(compute: Any, late_s: float | None, named: list[int] | None) -> None:
    """A step takes 5 s."""
    metrics = breakdown_of([[5.0] * 9] * len(compute), compute, [[1.0] * 9] * len(compute))
    assert metrics.get("late_s", Estimate(0)).value == (late_s or 0)
    assert ("late_s" in metrics, metrics.get("late_ranks")) == (late_s is not None, named)


def swinging(value: float) -> list[float]:
    """6 rounds of one iteration whose logarithms are 0.1 above and below that of the value."""
    return [value * float(np.exp(0.1 * (-1) ** i)) for i in range(6)]


def test_training_metrics() -> None:
    times = Times({"step": [[1, 2, 3], [2, 1, 5]]}, [1] * 3)  # the slowest rank: 2, 2, 5
    metrics = training.training_metrics(times, 8)
    assert (metrics["step_s"], metrics["samples_per_s"]) == (Estimate(2), Estimate(4))
    assert (metrics["step_p50_s"], metrics["step_p75_s"]) == (Estimate(2), 3.5)


def breakdown_of(step: ArrayLike, compute: ArrayLike, send: ArrayLike) -> dict[str, Any]:
    samples_s = {"step": step, "compute": compute, "send": send}
    times = Times(samples_s, [1] * np.asarray(step).shape[1])
    return training.breakdown(times, "compute", "send")


def test_a_late_rank_cancels_out_of_exposed_and_shows_as_late() -> None:
    """Rank 1 computes for 4 s instead of 3 s. The step waits for it and communicates for 1 s."""
    metrics = breakdown_of([[5.0] * 9] * 2, [[3.0] * 9, [4.0] * 9], [[1.0] * 9, [2.0] * 9])
    exposed = metrics["exposed_s"]
    assert (exposed.value, exposed.low, exposed.high) == pytest.approx((1, 1, 1))
    assert metrics["overlap"].value == pytest.approx(0.5)
    assert metrics["late_s"].value == 1
    assert (metrics["late_ranks"], metrics["late_wait_s"]) == ([1], Estimate(1, 1, 1))


@pytest.mark.parametrize(
    ("step", "alone", "overlap", "half"),
    [
        # 0.1 above and below, in 6 rounds: t * s / sqrt(6) = 2.571 * 0.1095 / 2.449 = 0.115
        (swinging(3.0), [4.0] * 6, 0.5, 0.75 * 0.115),  # 1 - (3 - 1) / 4; half is 3 / 4 of that
        (swinging(3.0), [2.0] * 6, 0, 1.5 * 0.115),
        (swinging(3.0), [1.0] * 6, -1, 3 * 0.115),
        (swinging(1.1), [0.5] * 6, 0.8, 2.2 * 0.115),  # exposed may be 0
        ([3.0] * 6, swinging(4.0), 0.5, 0.5 * 0.115),  # exposed / alone = 0.5 swings as alone does
        (swinging(2.0), swinging(1.0), 0, 1 * 0.115),  # (2 * 0.1 - 1 * 0) / 1 - 1 * 0.1
        (swinging(9.0), [1.0] * 6, -7, None),  # more than 100 points: 9 * 0.115
        ([2.0, 4.0], [0.5] * 2, -3, None),  # too few rounds
        (swinging(3.0), [0.0] * 6, None, None),
    ],
)
def test_overlap_has_an_interval(
    step: Any, alone: Any, overlap: float | None, half: float | None
) -> None:
    """Local compute takes 1 s."""
    found = breakdown_of([step], [[1.0] * len(step)], [alone])["overlap"]
    if overlap is None:
        assert found is None
        return
    assert found.value == pytest.approx(overlap, abs=1e-9)
    if half is None:
        assert (found.low, found.high) == (None, None)
    else:
        ends = (overlap - half, overlap + half)
        assert (found.low, found.high) == pytest.approx(ends, abs=1e-3 * half + 1e-3)


def test_a_difference_keeps_its_interval() -> None:
    """The blocks of 6 rounds have medians of 2 and -1: 0.5, s = 1.643, t s / sqrt(6) = 1.725."""
    found = training.mean_of_differences([2, 2, 9, -1, -1, -9] * 3, [3] * 6)
    assert (found.value, found.low, found.high) == pytest.approx((0.5, -1.225, 2.225), rel=3e-3)
    assert training.mean_of_differences([2.0, -1.0], [1, 1]) == Estimate(0.5)
