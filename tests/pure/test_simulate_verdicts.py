"""tests/simulate_verdicts.py with few simulations and wide limits; its table is docs/compare.md's."""

import pytest

from tests.simulate_verdicts import CASES, share


@pytest.mark.parametrize(
    ("name", "count", "least", "most"),
    [
        ("the interval holds, 6 runs a side", 200, 0.9, 1),
        ("the same, TEST scatters 3 times as much", 200, 0.88, 1),
        ("equal programs are called different", 200, 0, 0.1),
        ("the same, all of BASE first, on a machine that drifts", 100, 0.06, 1),
        ("false calls of all calls, 24 cases", 40, 0, 0.12),
        ("4 equal commands: the best one was called slower", 40, 0, 0.1),
        ("one of 4 is 10 % slower, and is dropped", 20, 0.9, 1),
    ],
)
def test_errors_are_as_rare_as_promised(name: str, count: int, least: float, most: float) -> None:
    assert least <= share(name, count) <= most


def test_the_page_names_what_is_simulated() -> None:
    from tests.process import ROOT

    page = (ROOT / "docs" / "compare.md").read_text()
    for name, (promised, _) in CASES.items():
        assert f"| {name} | {promised} |" in page
