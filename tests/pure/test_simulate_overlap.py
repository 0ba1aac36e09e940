"""A quick version of tests/simulate_overlap.py: intervals of an overlap have the nominal coverage,
its mean is the true overlap, and a cause is named for an overlap that is truly negative."""

import pytest

from tests.simulate_overlap import OVERLAPS, judged


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_intervals_of_an_overlap(overlap: float) -> None:
    """A block differs by 2%, so that an estimate from 12 rounds has a standard deviation of 5
    points. The limits are 3 standard deviations of 400 runs: 0.22 * 3 / sqrt(400) = 3.3 points of
    coverage, and 5 * 3 / sqrt(400) = 0.75 points of the mean."""
    found = judged(overlap, 12, 0.02, 400)
    assert found.contained == pytest.approx(0.95, abs=0.033)
    assert found.mean == pytest.approx(overlap, abs=0.0075)
    assert found.dropped == 0
    # at most half of the 5% are on this side, plus 3 standard deviations
    assert found.negative >= 0.8 if overlap < 0 else found.negative <= 0.05
