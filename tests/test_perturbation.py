"""tests/perturbation.py runs, and prints a ratio for each step."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.perturbation import FIRST, KINDS


@pytest.mark.smoke
def test_each_step_has_its_ratios(start: Callable[..., Any]) -> None:
    kinds = ",".join([*KINDS, FIRST])
    flags = ("--device", "cpu", "--seconds", "0.02", "--pairs", "1", "--kinds", kinds)
    process = start("tests/perturbation.py", *flags)
    assert process.wait(120) == 0, process.err
    first, *lines = process.out.splitlines()
    assert float(first.removeprefix("first / last ")) > 0
    rows = [line.split() for line in lines[5:]]
    assert [row[0] for row in rows] == [kind for kind, (_, sizes) in KINDS.items() for _ in sizes]
    for row in rows:
        assert row.count("(no") == 2  # of one pair there is no interval
