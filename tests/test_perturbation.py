"""tests/perturbation.py runs, and prints a ratio for each step."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.smoke
def test_each_step_has_its_ratios(start: Callable[..., Any]) -> None:
    process = start("tests/perturbation.py", "--pairs", "2", "--device", "cpu")
    assert process.wait(120) == 0, process.err
    rows = process.out.splitlines()[4:]
    assert [row.split()[0] for row in rows] == [
        "all_reduce-64",
        "all_reduce-64K",
        "all_reduce-16M",
        "send-64K",
        "train",
        "train-long",
    ]
    for row in rows:
        assert row.count("(no interval)") == 2  # of two pairs
