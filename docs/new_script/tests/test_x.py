"""x.py under torchrun: a report, and a wrong sum."""

from collections.abc import Callable
from typing import Any

import pytest

SCRIPT = "benchmarks/x.py"
SHORT = ("--iters", "6", "--warmup-iters", "1")


@pytest.mark.smoke
def test_a_report_with_a_failed_case(bench: Callable[..., Any]) -> None:
    run = bench(SCRIPT, "--sizes", "2,64K", *SHORT, ranks=2)
    assert run.status == 1, run.err
    too_small, measured = run.report.cases
    assert too_small.check.startswith("failed: ValueError: 2 bytes are too few for a float32")
    assert measured.check == "passed"
    assert measured.key["size_bytes"] == 65536
    assert "# exposed: " in run.out


@pytest.mark.faults
def test_a_wrong_sum_is_detected(bench: Callable[..., Any]) -> None:
    """Rank 1 changes the last value."""
    run = bench(SCRIPT, "--sizes", "64K", *SHORT, ranks=2, inject="wrong-sum")
    assert run.status == 1, run.err
    assert run.report.cases[0].check.startswith("failed: expected 1 on all ranks, got ")
