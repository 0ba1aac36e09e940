"""tests/simulate_ratios.py, few simulations, wide limits: geometric means over rounds hold, and are
narrower than medians beside a neighbour that comes and goes."""

import pytest

from tests.simulate_ratios import WORLDS, judged


@pytest.mark.parametrize("world", WORLDS)
def test_the_interval_of_a_ratio_holds(world: str) -> None:
    holds, _ = judged("geometric means", world, 12, 4, 150)
    assert holds >= 0.87


def test_a_neighbour_that_comes_and_goes_widens_medians_more() -> None:
    widths = [judged(name, "neighbour, 3", 12, 4, 60)[1] for name in ("geometric means", "medians")]
    assert widths[0] < 0.7 * widths[1]
