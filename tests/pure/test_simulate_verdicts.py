"""A quick version of tests/simulate_verdicts.py, whose table is in docs/compare.md."""

import json
from typing import Any

import pytest

from tests.measure_verdicts import summary, upper_bound
from tests.process import ROOT
from tests.simulate_verdicts import by_ab, by_compare, share, under_load

LIMITS = {  # number of simulations, lower and upper limit of the rate
    "the interval contains the true ratio, if TEST varies 3 times as much | 95%": (100, 0.85, 1),
    "equal programs are called different | at most 5%": (100, 0, 0.12),
    "equal programs are called different, if all of BASE runs first on a drifting machine | none": (
        100,
        0.06,
        1,
    ),
    "false discoveries among all discoveries, 24 cases | at most 5%": (8, 0, 0.15),
    "4 equal commands: one is called slower | at most 5%": (6, 0, 0.17),
    "one of 4 is 10% slower, and is dropped | none": (4, 1, 1),
}


@pytest.mark.parametrize("name", LIMITS)
def test_error_rates(name: str) -> None:
    count, least, most = LIMITS[name]
    assert least <= share(name, count) <= most


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


def test_measuring_has_the_measured_verdicts() -> None:
    lines = (ROOT / "tests" / "measured_verdicts.jsonl").read_text().splitlines()
    assert summary([json.loads(line) for line in lines]) in (ROOT / "docs/measuring.md").read_text()


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
        *(["period:2", "0%", "1"], ["period:10", "0%", "2"], ["all periods", "0%", "3"]),
    ]
