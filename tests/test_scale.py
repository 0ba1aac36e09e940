"""tests/scale.py measures what the harness costs as the number of ranks grows."""

import re

import pytest

from tests.process import Start
from tests.scale import row_of


def test_a_row_by_hand() -> None:
    """Medians of the rounds, and ratios to a bare new_group."""
    seconds = {"new_group": [0.1, 0.1, 0.2], "first case": [0.2, 0.225, 0.9], "join": [3.0]}
    seconds |= {"next case": [0.05], "nothing timed": [0.03, 0.02]}
    row = list(row_of(64, seconds).values())
    assert row == ["64", "100", "225", "2.25", "50", "0.50", "25", "0.25", "3.0"]


@pytest.mark.smoke
def test_scale_measures_forked_ranks(start: Start) -> None:
    run = start("tests/scale.py", "1", "3", ranks=0)
    assert run.wait(60) == 0, run.err
    rows = re.findall(r"^\| (\d+) +((?:\| +[\d.]+ +)+)\|$", run.out, re.MULTILINE)
    assert [ranks for ranks, _ in rows] == ["1", "3"]
    assert all(len(cells.split("|")) == 9 for _, cells in rows)
