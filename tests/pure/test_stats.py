"""common/stats.py against numbers worked by hand."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import ArrayLike

from common import stats
from common.report import Estimate


def test_percentiles_and_p99_from_100_samples_on() -> None:
    assert stats.percentiles([4, 1, 3, 2, 5], "step") == pytest.approx(
        {"step_p50_s": 3, "step_p75_s": 4, "step_p90_s": 4.6, "step_p95_s": 4.8}
    )
    assert "step_p99_s" not in stats.percentiles(range(99), "step")
    assert stats.percentiles(range(101), "step")["step_p99_s"] == 99
    assert "step_p99_s" in stats.percentiles(range(100), "step")


def test_autocorrelation_time() -> None:
    assert stats.autocorrelation_time([1, 2, 3]) == 1  # too few
    assert stats.autocorrelation_time([5.0] * 50) == 1  # no variance
    assert stats.autocorrelation_time([1, -1] * 50) == 1  # swings: at least 1
    # blocks of ten alike: tau of repeated independent values is about the length of a block
    rng = np.random.default_rng(0)
    blocks = np.repeat(rng.normal(size=400), 10)
    assert 8 < stats.autocorrelation_time(blocks) < 12
    # by hand, x = -1.5 -0.5 0.5 1.5, sum of squares 5: lag 0 pairs (5 + 1.25) / 5 = 1.25, and the
    # loop ends at lag n // 2 - 1 = 1, so tau = -1 + 2 * 1.25
    assert stats.autocorrelation_time([1, 2, 3, 4]) == pytest.approx(1.5)


def test_median_interval() -> None:
    assert stats.median_interval([]) is None
    assert stats.median_interval([1, 2, 3, 4, 5]) is None
    # n = 16 that swing: 8 - 1.96 * 4 / 2 = 4.08, the 4th and the 13th of the sorted ones
    swing = [1, 16, 2, 15, 3, 14, 4, 13, 5, 12, 6, 11, 7, 10, 8, 9]
    assert stats.median_interval(swing) == (4, 13)
    low, high = stats.median_interval(swing, 0.5) or (0, 0)  # 8 - 0.674 * 2 = 6.65
    assert (low, high) == (7, 10)


def test_the_level_of_a_batch_widens_the_interval() -> None:
    """24 samples in 6 batches: their mean signs are 1, -1, 1, -1, 0, 0, whose standard deviation is
    0.894. With t = 2.57 that is 2.57 * 0.894 * 24 / sqrt(6) / 2 = 11.27, and 12 - 11.27 is the
    first one. In a swing of samples it is 12 - 1.96 * sqrt(24) / 2, the 7th."""
    assert stats.student(0.95, 5) == pytest.approx(2.571, rel=0.002)
    up, down, both = [13.0, 14, 15, 16], [1.0, 2, 3, 4], [0.0, 17, -1, 18]
    samples = [*up, *down, *up, *down, *both, *both]
    assert stats.median_interval(samples) == (-1, 18)
    swing = [float(x * (-1) ** x) for x in range(24)]
    assert stats.median_interval(swing) == (sorted(swing)[6], sorted(swing)[17])


def test_six_rounds_always_have_an_interval() -> None:
    """Up to 8 values, each of a round, count as independent; more show whether they are."""
    assert stats.interval_of_rounds([1, 1, 1, 2, 2, 2]) == (1, 2)
    assert stats.interval_of_rounds([1, 2, 3, 4, 5]) is None
    assert stats.interval_of_rounds([1.0] * 5 + [2.0] * 5) is None


def test_how_far_an_interval_reaches() -> None:
    assert stats.median([1, 2]).relative is None
    swing = [1, 16, 2, 15, 3, 14, 4, 13, 5, 12, 6, 11, 7, 10, 8, 9]
    assert stats.median(swing).relative == pytest.approx(4.5 / 8.5)
    # the interval is 1 to 3 and the median 1.5: its farther end is 1.5 above, half its width is 1
    assert stats.median([1, 3, 1, 2, 1, 2]) == Estimate(1.5, 1, 3)


def test_difference_within_rounds_takes_a_drift_off() -> None:
    # three rounds of 2, 2 and 1 iterations; the machine is 10 s slower in the last one
    a = [3, 5, 4, 6, 17]
    b = [1, 3, 3, 3, 12]
    assert stats.difference(a, b, [2, 2, 1]) == Estimate(2)  # of 2, 2, 5
    # 1, 2 and 1 s in the rounds: over all samples the medians are 5 and 3, 2 s apart
    assert stats.difference([1, 1, 5, 5, 6], [0, 0, 3, 3, 5], [2, 2, 1]).value == 1
    assert stats.difference([2.0] * 8, [1.0] * 8, [1] * 8) == Estimate(1, 1, 1)


def test_straggler() -> None:
    rng = np.random.default_rng(2)
    alike = rng.normal(1, 0.01, size=(4, 50))
    assert stats.straggler(alike) is None
    slow = alike.copy()
    slow[2] *= 1.5
    row, factor = stats.straggler(slow) or (None, 0)
    assert row == 2
    assert factor == pytest.approx(1.5, rel=0.02)
    assert stats.straggler(alike[:1]) is None
    assert stats.straggler(np.empty((3, 0))) is None
    # one fast rank of three makes no other one slow: the upper median of the others counts
    fast = alike[:3].copy()
    fast[0] *= 0.5
    assert stats.straggler(fast) is None
    # of an even number of others the upper median: 3 over 2, not over 1.5
    assert stats.straggler(np.outer([3.0, 1.0, 2.0], np.ones(20))) == (0, 1.5)
    # over the margin, but not surely so: half of the iterations lie below it
    unsure = np.ones((2, 40))
    unsure[1] = [1.0, 1.2] * 20
    assert stats.straggler(unsure) is None
    # surely slower, and 11 % slower in the median, but not surely by more than the margin of 5 %
    unsure[1] = [1.02, 1.2] * 20
    assert stats.straggler(unsure) is None
    row, factor = stats.straggler(unsure, margin=0.01) or (None, 0)
    assert row == 1
    assert factor == pytest.approx(1.11)
    # within the margin of 5 %
    near = alike.copy()
    near[1] *= 1.03
    assert stats.straggler(near) is None


def test_training_metrics() -> None:
    times = stats.Times({"step": [[1, 2, 3], [2, 1, 5]]}, [1] * 3)  # the slowest: 2, 2, 5
    metrics = stats.training_metrics(times, 8)
    assert (metrics["step_s"], metrics["samples_per_s"]) == (Estimate(2), Estimate(4))
    assert metrics["step_p75_s"] == 3.5
    assert "step_p50_s" not in metrics


def breakdown(
    step: ArrayLike, compute: ArrayLike, send: ArrayLike | None, rounds: list[int]
) -> dict[str, Any]:
    samples_s = {"step": step, "compute": compute} | ({} if send is None else {"send": send})
    times = stats.Times(samples_s, rounds)
    return stats.breakdown(times, "compute", None if send is None else "send")


def test_a_late_rank_cancels_out_of_exposed_and_shows_as_late() -> None:
    # rank 1 computes for 4 s instead of 3 s; the step waits for it and communicates for 1 s
    step, local = [[5.0] * 9, [5.0] * 9], [[3.0] * 9, [4.0] * 9]
    m = breakdown(step, local, [[1.0] * 9, [2.0] * 9], [1] * 9)
    assert m["exposed_s"] == Estimate(1, 1, 1)
    assert m["overlap"].value == 0.5
    assert m["late_s"].value == 0.5  # above the median of 3 and 4
    assert (m["straggler_rank"], m["straggler_factor"]) == (1, pytest.approx(4 / 3))
    alone = breakdown(step[:1], local[:1], None, [1] * 9)
    assert "overlap" not in alone
    assert alone["late_s"].value == 0
    free = breakdown(step, local, [[0.0] * 9] * 2, [1] * 9)
    assert free["overlap"] is None


def test_there_is_no_overlap_where_exposed_may_be_nothing() -> None:
    # exposed is 1 or 3 s, then -1 or 3 s, of 0.5 s alone: the 1 - 3 / 0.5 = -500 % are noise
    local, alone = [[1.0] * 8], [[0.5] * 8]
    surely = breakdown([[2.0, 4.0] * 4], local, alone, [1] * 8)
    assert surely["exposed_s"] == Estimate(2, 1, 3)
    assert surely["overlap"].value == pytest.approx(1 - 2 / 0.5)
    noise = breakdown([[0.0, 4.0] * 4], local, alone, [1] * 8)
    assert (noise["exposed_s"].low, noise["exposed_s"].high) == (-1, 3)
    assert noise["overlap"] is None
    few = breakdown([[2.0, 4.0]], [[1.0] * 2], [[0.5] * 2], [1] * 2)
    assert few["exposed_s"].relative is None
    assert few["overlap"] is None


def test_the_fastest() -> None:
    """At worst 0.111 / 0.101 = 1.10, at best 0.113 / 0.099 = 1.14."""
    times = {
        "slow": Estimate(0.150, 0.140, 0.160),
        "b": Estimate(0.112, 0.111, 0.113),
        "a": Estimate(0.100, 0.099, 0.101),
    }
    assert stats.fastest(times) == "a is 1.12 times (1.10 to 1.14) as fast as b, the next"
    times["b"] = Estimate(0.112, 0.101, 0.113)
    assert stats.fastest(times) == "a and b cannot be told apart"
    times["b"] = Estimate(0.112)  # without an interval nothing is sure
    assert stats.fastest(times) == "a and b cannot be told apart"
    assert stats.fastest({"a": times["a"]}) == "a takes 100 ms (99 to 101)"


def test_two_modes_are_told_with_their_shares() -> None:
    """7 calls of 0.3 ms for each 3 of 3.6 ms, as all-reduces over gloo have them."""
    calls = [0.29e-3, 3.6e-3, 0.3e-3, 3.7e-3, 0.31e-3, 0.3e-3, 3.5e-3, 0.3e-3, 0.3e-3, 0.3e-3] * 2
    modes = stats.modes(calls)
    assert modes
    (fast_s, often), (slow_s, rarely) = modes
    assert [fast_s, often, slow_s, rarely] == pytest.approx([0.3e-3, 0.7, 3.6e-3, 0.3])
    assert stats.modes([1.0] * 20 + [1.9] * 20) is None  # under a factor of 2
    assert stats.modes([1.0] * 100 + [9.0] * 5) is None  # under a tenth
    assert stats.modes([1.0] * 6 + [9.0] * 4) is None  # fewer than 5
    assert stats.modes([1.0] * 20 + [3.0] * 6 + [9.0] * 20) is None  # no valley between them
    assert stats.modes([0.0] * 9) is None


@pytest.mark.parametrize("n", [12, 24, 100])
def test_a_wide_or_skewed_mode_is_one(n: int) -> None:
    """At most 2 % of 500 series each, of noise that is as wide as any that was seen."""
    rng = np.random.default_rng(n)
    noises: list[Callable[[], Any]] = [
        lambda: np.exp(rng.normal(size=n)),
        lambda: 1 + rng.exponential(3, size=n),
        lambda: 1 + rng.pareto(1, size=n),
    ]
    for noise in noises:
        assert sum(stats.modes(noise()) is not None for _ in range(500)) <= 10


def test_windows_are_alike_if_no_order_is_told() -> None:
    """All of 4 below all of 4 happens once in 70 orders."""
    assert not stats.alike([1, 2, 3, 4], [5, 6, 7, 8])
    assert not stats.alike([5, 6, 7, 8], [1, 2, 3, 4])
    assert stats.alike([1, 2, 3, 5], [4, 6, 7, 8]) is False  # 15 of 16 pairs; 14.8 is the limit
    assert stats.alike([1, 2, 5, 6], [3, 4, 7, 8])
    assert stats.alike([1, 1, 1], [1, 1])
