"""tests/perturbation.py runs, and prints a ratio for each step."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.perturbation import KINDS

SHORT = ("--device", "cpu", "--seconds", "0.02")


@pytest.mark.smoke
def test_each_step_has_its_ratios(start: Callable[..., Any]) -> None:
    process = start("tests/perturbation.py", "--pairs", "1", "--kinds", ",".join(KINDS), *SHORT)
    assert process.wait(120) == 0, process.err
    rows = process.out.splitlines()[5:]
    steps = [name for of_kind in KINDS.values() for name in of_kind]
    assert [row.partition("  ")[0] for row in rows] == steps
    for row in rows:
        assert row.count("(no interval)") == 2  # of one pair


@pytest.mark.smoke
def test_the_first_case_of_a_process_against_its_last(start: Callable[..., Any]) -> None:
    process = start("tests/perturbation.py", "--kinds", "first", *SHORT)
    assert process.wait(120) == 0, process.err
    assert float(process.out.removeprefix("first / last ")) > 0
