"""benchmarks/workloads/training.py compared with numbers worked out by hand."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import ArrayLike

from benchmarks.workloads import training
from common.stats import Estimate, Times


@pytest.mark.parametrize(
    ("seconds", "late", "wait"),
    [
        ([3, 7], [1], 4),  # the slowest minus the second slowest
        ([3, 7, 5], [1], 2),
        ([7, 6.5, 3, 3, 3], [0, 1], 4),  # alone, rank 0 makes the others wait 0.5 s of these 4
        ([3, 6.5, 3, 7, 3], [1, 3], 4),
        ([7, 5, 3, 3], [0], 2),  # 2 of 4 s
        ([7, 7, 3], [0], 0),  # at most half of the ranks are late
        ([3, 3, 3], [0], 0),
    ],
)
def test_late_ranks(seconds: list[float], late: list[int], wait: float) -> None:
    assert training.late_ranks([[x] * 9 for x in seconds], [1] * 9) == (
        late,
        Estimate(wait, wait, wait),
    )


@pytest.mark.parametrize(
    ("compute", "late_s", "named"),
    [
        ([[4.0] * 9, [3.0] * 9, [2.0] * 9], 1.5, [0]),  # above the median of 3 and 2; waits 1 s
        ([[4.0] * 9, [3.75] * 9], 0.25, None),  # not more than 5% of the step
        ([[4.0] * 9, [3.0, 5.0, 3.0] * 3], 1, None),  # 1 / 3 s, but -0.4 to 1.1
        ([[4.0] * 9], None, None),  # no other rank
    ],
)
def test_a_late_rank_is_named_if_the_wait_is_significant(
    compute: list[list[float]], late_s: float | None, named: list[int] | None
) -> None:
    """A step takes 5 s."""
    metrics = breakdown_of([[5.0] * 9] * len(compute), compute, [[1.0] * 9] * len(compute))
    assert metrics.get("late_s", Estimate(0)).value == (late_s or 0)
    assert ("late_s" in metrics, metrics.get("late_ranks")) == (late_s is not None, named)


def swinging(value: float) -> list[float]:
    """6 rounds of one iteration whose logarithms are 0.1 above and below that of the value."""
    return [value * float(np.exp(0.1 * (-1) ** i)) for i in range(6)]


ONES = [1.0] * 40


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([ONES, ONES, [1.5] * 40, ONES], (2, 1.5)),
        ([ONES, ONES, [1.03] * 40, ONES], None),  # within the margin of 5%
        # one fast rank of three does not make another slow: the upper median of the others counts
        ([[0.5] * 40, ONES, [1.01] * 40], None),
        ([[3.0] * 40, ONES, [2.0] * 40], (0, 1.5)),  # 3 over 2, not over 1.5
        # 10 or 11% slower in the median, but not significantly above the margin
        ([ONES, [1.0, 1.2] * 20], None),
        ([ONES, [1.02, 1.2] * 20], None),
        ([[1.0, 9.0]], None),
        (np.empty((3, 0)), None),
    ],
)
def test_straggler(samples: ArrayLike, expected: tuple[int, float] | None) -> None:
    assert training.straggler(samples) == expected


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
    assert (metrics["straggler_rank"], metrics["straggler_factor"]) == (1, pytest.approx(4 / 3))


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
def test_overlap_has_an_interval_over_rounds(
    step: list[float], alone: list[float], overlap: float | None, half: float | None
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
