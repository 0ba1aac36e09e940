"""readers/isolated.py: times of collectives between measured sizes."""

import pytest

from common.stats import Estimate
from readers.isolated import interpolate


def test_interpolation_between_measured_sizes() -> None:
    """A quarter of the way from 1 KiB to 2 KiB is 10 + 10 / 4, and likewise for the ends."""
    times = {1024: Estimate(10, 9, 11), 2048: Estimate(20, 18, 25), 8192: Estimate(50)}
    assert interpolate(times, 1280) == Estimate(12.5, 11.25, 14.5)
    assert interpolate(times, 2048) == times[2048]
    # halfway between 2 and 8 KiB, one of which has no interval
    assert interpolate(times, 5120) == Estimate(35)


def test_nothing_is_extrapolated() -> None:
    times = {2**10: Estimate(1), 2**12: Estimate(2), 2**16: Estimate(3)}
    assert interpolate(times, 2**11).value == pytest.approx(1 + 1 / 3)  # a factor of 4
    rounded = {65_532: Estimate(1), 262_140: Estimate(4)}  # 4.0002: multiples of 3 ranks
    assert interpolate(rounded, 65_532 * 2).value == pytest.approx(2, rel=1e-3)
    for size, words in (
        (1023, "1023 bytes are outside the measured range, 1K to 64K"),
        (2**17, "128K bytes are outside the measured range, 1K to 64K"),
        (2**13, "8,192 bytes are between the measured 4,096 and 65,536, which are more than a "),
    ):
        with pytest.raises(ValueError, match=f"^{words}"):
            interpolate(times, size)
    with pytest.raises(ValueError, match="no size is measured"):
        interpolate({}, size)
