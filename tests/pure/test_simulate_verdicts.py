"""tests/simulate_verdicts.py, few simulations, wide limits; docs/compare.md has its table."""

import pytest

from tests.process import ROOT
from tests.simulate_verdicts import CASES, share


@pytest.mark.parametrize(
    ("name", "count", "least", "most"),
    [
        ("the interval holds, 6 runs a side", 200, 0.9, 1),
        ("the same, TEST scatters 3 times as much", 200, 0.88, 1),
        ("equal programs are called different", 200, 0, 0.1),
        ("the same, all of BASE first, on a machine that drifts", 100, 0.06, 1),
        ("false calls of all calls, 24 cases", 20, 0, 0.15),
        ("4 equal commands: the best one was called slower", 20, 0, 0.15),
        ("one of 4 is 10 % slower, and is dropped", 10, 0.9, 1),
    ],
)
def test_errors_are_as_rare_as_promised(name: str, count: int, least: float, most: float) -> None:
    assert least <= share(name, count) <= most


def test_the_page_names_what_is_simulated() -> None:
    page = (ROOT / "docs" / "compare.md").read_text()
    for name, (promised, _) in CASES.items():
        assert f"| {name} | {promised} |" in page
