"""common/stats.py against numbers worked by hand. tests/simulate_intervals.py says how often
intervals hold."""

from typing import Any

import numpy as np
import pytest

from common import stats
from common.report import Estimate

SWING = [1, 16, 2, 15, 3, 14, 4, 13, 5, 12, 6, 11, 7, 10, 8, 9]


def test_percentiles_and_p99_from_100_samples_on() -> None:
    assert stats.percentiles([4, 1, 3, 2, 5], "step") == pytest.approx(
        {"step_p50_s": 3, "step_p75_s": 4, "step_p90_s": 4.6, "step_p95_s": 4.8}
    )
    assert "step_p99_s" not in stats.percentiles(range(99), "step")
    assert stats.percentiles(range(101), "step")["step_p99_s"] == 99


def test_autocorrelation_time() -> None:
    for independent in ([1, 2, 3], [5.0] * 50, [1, -1] * 50):  # too few; alike; 1 at least
        assert stats.autocorrelation_time(independent) == 1
    # x = -1.5 -0.5 0.5 1.5, sum of squares 5: lag 0 pairs (5 + 1.25) / 5 = 1.25, and the loop ends
    # at lag n // 2 - 1 = 1, so tau = -1 + 2 * 1.25
    assert stats.autocorrelation_time([1, 2, 3, 4]) == pytest.approx(1.5)


def test_the_interval_of_a_median() -> None:
    """n = 16 that swing: 8 - 1.96 * 4 / 2 = 4.08, the 4th and the 13th of the sorted ones."""
    assert stats.median(SWING) == Estimate(8.5, 4, 13)
    assert stats.median_interval(SWING, 0.5) == (7, 10)  # 8 - 0.674 * 2 = 6.65
    assert stats.median_interval([1, 2, 3, 4, 5]) is None


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


TENTH = 0.1 * 6**0.5 / 5**0.5  # the standard deviation of 0.1, -0.1, 0.1, ..., 6 values
HALF = 2.5706 * TENTH / 6**0.5  # t(5) at 97.5 %; half an interval of logarithms: 0.11496


def swinging(value: float) -> list[float]:
    """6 rounds of one iteration whose logarithms are 0.1 above and below that of the value."""
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
    # the part is steady: to first order the difference scatters by 2 times the logarithms
    difference = times.beyond("part")
    ends = [1, 1 - 2 * HALF, 1 + 2 * HALF]
    assert [difference.value, difference.low, difference.high] == pytest.approx(ends, rel=1e-3)


def test_what_is_divided_is_what_is_shown() -> None:
    """With few rounds medians, with more the geometric means of block medians."""
    rng = np.random.default_rng(3)
    for rounds in ([3], [1, 2], [1] * 5, [2] * 6, [1] * 40, [3] * 20 + [1]):
        drift = np.linspace(1, 1.5, sum(rounds))
        step, part = (rng.lognormal(size=sum(rounds)) * drift for _ in range(2))
        times = of_two(step, part, rounds)
        quotient = times.mean("part").value / times.mean().value
        assert times.ratio("part").value == pytest.approx(quotient)
        assert times.beyond("part").value == pytest.approx(
            times.mean().value - times.mean("part").value
        )
        assert (times.ratio("part").low is None) >= (len(rounds) < 6)


def test_a_block_counts_by_its_median_and_a_drift_cancels() -> None:
    """Six rounds of 3; the machine doubles its time with each of them. An outlier counts for
    nothing: 1, 1, 9 is 1."""
    level = np.repeat(2.0 ** np.arange(6), 3)
    times = of_two(level * ([3, 3, 1] * 6), level * ([1, 1, 9] * 6), [3] * 6)
    ratio = times.ratio("part")
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((1 / 3, 1 / 3, 1 / 3))
    assert times.mean().value == pytest.approx(3 * 2**2.5)
    assert times.mean().low is None  # 2.57 * ln 2 * 1.871 / sqrt(6) is 1.36: beyond a factor of 3


def test_a_part_that_does_nothing_leaves_the_step() -> None:
    """As beside a checkpoint that blocks."""
    times = of_two(swinging(2.0), [0.0] * 6, [1] * 6)
    assert times.beyond("part") == times.mean()
    assert times.mean("part") == Estimate(0, 0, 0)


def test_an_interval_beyond_a_factor_of_3_is_none() -> None:
    """Of a time; a difference keeps it."""
    for low, high, says in ((2.1, 17.9, True), (1.9, 7, False), (5, 18.1, False)):
        told = stats.telling(Estimate(6, low, high))
        assert told == (Estimate(6, low, high) if says else Estimate(6))
    wide = [1.0, 300.0, 100.0] * 4
    assert stats.median_difference(wide) == Estimate(100, 1, 300)
    assert stats.median(wide) == Estimate(100)


def test_two_modes_are_told_with_their_shares() -> None:
    """7 calls of 0.3 ms for each 3 of 3.6 ms, as all-reduces over gloo have them."""
    calls = [0.29e-3, 3.6e-3, 0.3e-3, 3.7e-3, 0.31e-3, 0.3e-3, 3.5e-3, 0.3e-3, 0.3e-3, 0.3e-3] * 2
    fast, slow = stats.modes(calls) or (None, None)
    assert [*(fast or ()), *(slow or ())] == pytest.approx([0.3e-3, 0.7, 3.6e-3, 0.3])
    assert stats.modes([1.0] * 20 + [1.9] * 20) is None  # under a factor of 2
    assert stats.modes([1.0] * 100 + [9.0] * 5) is None  # under a tenth
    assert stats.modes([1.0] * 6 + [9.0] * 4) is None  # fewer than 5
    assert stats.modes([1.0] * 20 + [3.0] * 6 + [9.0] * 20) is None  # no valley between them


def test_windows_are_alike_if_no_order_is_told() -> None:
    assert not stats.alike([1, 2, 3, 4], [5, 6, 7, 8])
    assert not stats.alike([4, 6, 7, 8], [1, 2, 3, 5])  # 15 of 16 pairs; 14.8 is the limit
    assert stats.alike([1, 2, 5, 6], [3, 4, 7, 8])


def test_interpolation_between_measured_sizes() -> None:
    """A quarter of the way from 1 KiB to 2 KiB: 10 + 10 / 4, and the ends likewise."""
    times = {1024: Estimate(10, 9, 11), 2048: Estimate(20, 18, 25), 8192: Estimate(50)}
    assert stats.interpolate(times, 1280) == Estimate(12.5, 11.25, 14.5)
    assert stats.interpolate(times, 2048) == times[2048]
    # halfway between 2 and 8 KiB, of which one has no interval
    assert stats.interpolate(times, 5120) == Estimate(35)


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (1023, "1023 bytes are outside of the measured sizes, 1K to 64K"),
        (2**17, "128K bytes are outside of the measured sizes, 1K to 64K"),
        (2**13, "8K bytes are between the measured sizes 4K and 64K, which are more than a "),
    ],
)
def test_nothing_is_extrapolated(size: int, words: str) -> None:
    times = {2**10: Estimate(1), 2**12: Estimate(2), 2**16: Estimate(3)}
    assert stats.interpolate(times, 2**11).value == pytest.approx(1 + 1 / 3)  # a factor of 4
    with pytest.raises(ValueError, match=f"^{words}"):
        stats.interpolate(times, size)
    with pytest.raises(ValueError, match="no size is measured"):
        stats.interpolate({}, size)
