"""A quick version of tests/simulate_ratios.py: intervals of geometric means over rounds have the
nominal coverage, and are narrower than those of medians on a machine with varying load."""

import pytest

from tests.simulate_ratios import CONDITIONS, judged


@pytest.mark.parametrize("condition", CONDITIONS)
def test_coverage_of_the_interval_of_a_ratio(condition: str) -> None:
    holds, _ = judged("geometric means", condition, 12, 4, 150)
    assert holds >= 0.87


def test_varying_load_widens_medians_more() -> None:
    widths = [judged(name, "neighbor, 3", 12, 4, 60)[1] for name in ("geometric means", "medians")]
    assert widths[0] < 0.7 * widths[1]
