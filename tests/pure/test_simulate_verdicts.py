"""A quick version of tests/simulate_verdicts.py, whose tables are in docs/evidence.md."""

import json
from typing import Any

import numpy as np
import pytest

from tests.measure_verdicts import summary, upper_bound
from tests.process import ROOT
from tests.simulate_verdicts import (
    against_nights,
    by_ab,
    by_compare,
    fails,
    is_called,
    pairs_under,
    share,
    under_load,
)

LIMITS = {  # number of simulations, lower and upper limit of the rate
    "the interval contains the true ratio, if TEST varies 3 times as much | 95%": (100, 0.85, 1),
    "equal programs are called different | at most 5%": (100, 0, 0.12),
    "equal programs are called different, if all of BASE runs first on a drifting machine | none": (
        100,
        0.06,
        1,
    ),
    "false discoveries among all discoveries, 24 cases | at most 5%": (8, 0, 0.15),
}


@pytest.mark.parametrize("name", LIMITS)
def test_error_rates(name: str) -> None:
    count, least, most = LIMITS[name]
    assert least <= share(name, count) <= most


@pytest.mark.parametrize("name", ["every 3rd run", "2 of 4 runs"])
def test_periodic_disturbances(name: str) -> None:
    """At most 6% of the verdicts on equal programs are wrong, and 20% are found. With the order
    A B, B A, A B, ... two slow runs of four make a difference in half of the comparisons."""

    def called(change: float, **more: Any) -> float:
        rng = np.random.default_rng(0)
        return float(
            np.mean([is_called(pairs_under(rng, name, change, **more)) for _ in range(200)])
        )

    assert called(0.0) <= 0.06
    assert called(0.2) >= 0.98
    if name == "2 of 4 runs":
        assert called(0.0, order=lambda n, seed: ["a", "b"] if n % 2 else ["b", "a"]) >= 0.4


@pytest.mark.parametrize("how", [by_ab, by_compare])
def test_equal_programs_under_load_are_not_called_different(how: Any) -> None:
    for condition in ("a busy loop throughout", "a busy loop every 10 s"):
        assert under_load(how, condition, 0, 15)[0] <= 0.2


def test_steady_load_and_pairs() -> None:
    condition = "30% of the cores"
    assert under_load(by_ab, condition, 0.1, 6)[2] == 1
    assert under_load(by_compare, condition, 0.1, 6)[1] == 1


def test_bound_of_wrong_verdicts() -> None:
    assert upper_bound(0, 100) == pytest.approx(1 - 0.05**0.01)  # 1 - p^n = 95%
    assert upper_bound(3, 3) == 1


def test_the_page_has_the_measured_verdicts() -> None:
    """Some rows of the table."""
    lines = (ROOT / "tests" / "measured_verdicts.jsonl").read_text().splitlines()
    rows = summary([json.loads(line) for line in lines]).splitlines()
    page = (ROOT / "docs" / "evidence.md").read_text()
    table = page[page.index(rows[0]) :].partition("\n\n")[0].splitlines()
    assert len(table) > 8
    assert [row for row in table if row not in rows] == []


def test_a_verdict_that_misses_a_planted_change_is_wrong() -> None:
    line = {"condition": "idle", "change": 10.0, "load": 0.0, "ab": "slower", "compare": "same"}
    cells = summary([line]).splitlines()[-1].split("|")
    assert [cell.strip() for cell in cells[5:13]] == [
        *("0.0%", "95.0%", "0.0%", "100.0%"),
        *("100.0%", "100.0%", "0.0%", "0.0%"),
    ]


def test_all_periods_together_are_a_row() -> None:
    line = {"change": 0.0, "load": 0.5, "ab": "same", "compare": "undecided"}
    lines = [line | {"condition": f"period:{period}"} for period in (10, 2, 10)]
    rows = [row.split("|")[1:4] for row in summary(lines).splitlines()[2:]]
    assert [[cell.strip() for cell in row] for row in rows] == [
        *(["period:2", "0%", "1"], ["period:10", "0%", "2"], ["all periods", "0%", "3"])
    ]


@pytest.mark.parametrize("is_log", [False, True])
def test_one_night_against_a_baseline_of_nights(is_log: bool) -> None:
    """Three runs of a night that differs from others by 3%: as independent runs, more than half of
    equal programs would be called different."""
    rng = np.random.default_rng(0)
    equal = [fails(against_nights(rng, 3, 1, 0, is_log)) for _ in range(100)]
    slower = [fails(against_nights(rng, 3, 1, 0.2, is_log)) for _ in range(20)]
    assert np.mean(equal) <= 0.1
    assert np.mean(slower) >= 0.9
