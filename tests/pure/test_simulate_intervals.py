"""A quick version of tests/simulate_intervals.py: intervals have the expected coverage."""

import pytest

from tests import simulate_intervals


@pytest.mark.parametrize("name", simulate_intervals.CASES)
def test_coverage(name: str) -> None:
    """With 300 series a coverage of 0.93 is known to about 0.03."""
    covered, shown = simulate_intervals.coverage(name, 300)
    assert covered >= simulate_intervals.CASES[name][1] - 0.03
    assert shown >= (0.5 if name.startswith("AR .9") else 0.8)


@pytest.mark.parametrize("name", simulate_intervals.VERDICTS)
def test_error_rates_of_verdicts(name: str) -> None:
    _, factor, threshold = simulate_intervals.VERDICTS[name]
    rate = simulate_intervals.frequency(name, 100)
    assert rate <= threshold + 0.02 if factor == 1 else rate >= threshold - 0.05
