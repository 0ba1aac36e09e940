"""common/stats.py compared with numbers worked out by hand. tests/simulate_intervals.py simulates
the coverage of intervals."""

from typing import Any

import numpy as np
import pytest

from benchmarks.workloads.percentiles import percentiles
from common import stats
from common.stats import Estimate

SWING = [1, 16, 2, 15, 3, 14, 4, 13, 5, 12, 6, 11, 7, 10, 8, 9]


def test_percentiles_and_p99_from_100_samples_on() -> None:
    assert percentiles([4, 1, 3, 2, 5], "step") == pytest.approx(
        {"step_p50_s": 3, "step_p75_s": 4, "step_p90_s": 4.6, "step_p95_s": 4.8}
    )
    assert "step_p99_s" not in percentiles(range(99), "step")
    assert percentiles(range(101), "step")["step_p99_s"] == 99


def test_autocorrelation_time() -> None:
    for independent in ([1, 2, 3], [5.0] * 50, [1, -1] * 50):  # too few; equal; at least 1
        assert stats.autocorrelation_time(independent) == 1
    # x = -1.5 -0.5 0.5 1.5 with sum of squares 5: lags 0 and 1 have (5 + 1.25) / 5 = 1.25, and the
    # loop ends at lag n // 2 - 1 = 1, so tau = -1 + 2 * 1.25
    assert stats.autocorrelation_time([1, 2, 3, 4]) == pytest.approx(1.5)


def test_the_interval_of_a_median() -> None:
    """n = 16 alternating samples: 8 - 1.96 * 4 / 2 = 4.08, so the 4th and 13th sorted values."""
    assert stats.median(SWING) == Estimate(8.5, 4, 13)
    assert stats.median_interval(SWING, 0.5) == (7, 10)  # 8 - 0.674 * 2 = 6.65
    assert stats.median_interval([1, 2, 3, 4, 5]) is None


def test_different_levels_of_batches_widen_the_interval() -> None:
    """24 samples in 6 batches have mean signs of 1, -1, 1, -1, 0, 0 with a standard deviation of
    0.894. With t = 2.57 the half-width is 2.57 * 0.894 * 24 / sqrt(6) / 2 = 11.27, so the interval
    begins at the first value (12 - 11.27). For alternating samples it begins at the 7th,
    12 - 1.96 * sqrt(24) / 2."""
    assert stats.student_t(0.95, 5) == pytest.approx(2.571, rel=0.002)
    up, down, both = [13.0, 14, 15, 16], [1.0, 2, 3, 4], [0.0, 17, -1, 18]
    samples = [*up, *down, *up, *down, *both, *both]
    assert stats.median_interval(samples) == (-1, 18)
    swing = [float(x * (-1) ** x) for x in range(24)]
    assert stats.median_interval(swing) == (sorted(swing)[6], sorted(swing)[17])


TENTH = 0.1 * 6**0.5 / 5**0.5  # the standard deviation of 0.1, -0.1, 0.1, ..., 6 values
HALF = 2.5706 * TENTH / 6**0.5  # t(5) at 97.5%; half an interval of logarithms: 0.11496


def swinging(value: float) -> list[float]:
    """6 rounds of one iteration, alternately 0.1 above and below the value on a log scale."""
    return [value * float(np.exp(0.1 * (-1) ** i)) for i in range(6)]


def of_two(step: Any, part: Any, rounds: list[int]) -> stats.Times:
    return stats.Times({"step": [step], "part": [part]}, rounds)


def test_times_ratios_and_differences_over_rounds_by_hand() -> None:
    times = of_two(swinging(2.0), [1.0] * 6, [1] * 6)
    mean, ratio = times.mean(), times.ratio("part")
    assert (mean.value, ratio.value) == pytest.approx((2, 0.5))
    for estimate in (mean, ratio):
        ends = [estimate.value * np.exp(-HALF), estimate.value * np.exp(HALF)]
        assert [estimate.low, estimate.high] == pytest.approx(ends, rel=1e-3)
    # the part is constant: to first order the difference scatters by 2 times the logarithms
    difference = times.excess_over("part")
    ends = [1, 1 - 2 * HALF, 1 + 2 * HALF]
    assert [difference.value, difference.low, difference.high] == pytest.approx(ends, rel=1e-3)


def test_ratios_are_quotients_of_the_printed_times() -> None:
    """These are medians with few rounds, and geometric means of block medians with more."""
    rng = np.random.default_rng(3)
    for rounds in ([3], [1, 2], [1] * 5, [2] * 6, [1] * 40, [3] * 20 + [1]):
        drift = np.linspace(1, 1.5, sum(rounds))
        step, part = (rng.lognormal(size=sum(rounds)) * drift for _ in range(2))
        times = of_two(step, part, rounds)
        quotient = times.mean("part").value / times.mean().value
        assert times.ratio("part").value == pytest.approx(quotient)
        assert times.excess_over("part").value == pytest.approx(
            times.mean().value - times.mean("part").value
        )
        assert (times.ratio("part").low is None) >= (len(rounds) < 6)


def test_a_block_counts_by_its_median_and_a_drift_cancels() -> None:
    """Six rounds of 3 samples, each of which takes twice as long as the previous one. An outlier
    does not count: the median of 1, 1, 9 is 1."""
    level = np.repeat(2.0 ** np.arange(6), 3)
    times = of_two(level * ([3, 3, 1] * 6), level * ([1, 1, 9] * 6), [3] * 6)
    ratio = times.ratio("part")
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((1 / 3, 1 / 3, 1 / 3))
    assert times.mean().value == pytest.approx(3 * 2**2.5)
    assert times.mean().low is None  # 2.57 * ln 2 * 1.871 / sqrt(6) is 1.36: beyond a factor of 3


def test_a_part_of_zero_seconds() -> None:
    """Such as while a checkpoint blocks."""
    times = of_two(swinging(2.0), [0.0] * 6, [1] * 6)
    assert times.excess_over("part") == times.mean()
    assert times.mean("part") == Estimate(0, 0, 0)


def test_an_interval_beyond_a_factor_of_3_is_omitted() -> None:
    """This applies to times, not to differences."""
    for low, high, says in ((2.1, 17.9, True), (1.9, 7, False), (5, 18.1, False)):
        told = stats.drop_wide_interval(Estimate(6, low, high))
        assert told == (Estimate(6, low, high) if says else Estimate(6))
    assert stats.median([1.0, 300.0, 100.0] * 4) == Estimate(100)


def test_windows_agree_if_neither_is_significantly_lower() -> None:
    assert not stats.same_distribution([1, 2, 3, 4], [5, 6, 7, 8])
    # 15 of 16 pairs; 14.8 is the limit
    assert not stats.same_distribution([4, 6, 7, 8], [1, 2, 3, 5])
    assert stats.same_distribution([1, 2, 5, 6], [3, 4, 7, 8])
