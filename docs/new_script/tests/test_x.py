"""x.py under torchrun: a report, and a wrong sum."""

import pytest

from tests.process import Bench

SCRIPT = "benchmarks/x.py"
SHORT = ("--iters", "6", "--warmup-iters", "1")


@pytest.mark.smoke
def test_a_report_with_a_failed_case(bench: Bench) -> None:
    run = bench(SCRIPT, "--sizes", "2,64K", *SHORT, ranks=2, status=1)
    too_small, measured = run.report.cases
    assert too_small.check.startswith("failed: ValueError: 2 bytes are too few for a float32")
    assert measured.check == "passed"
    assert measured.key["size_bytes"] == 65536
    assert "# exposed: " in run.out


@pytest.mark.faults
def test_a_wrong_sum_is_detected(bench: Bench) -> None:
    """Rank 1 changes the last value."""
    run = bench(SCRIPT, "--sizes", "64K", *SHORT, ranks=2, inject="wrong-sum", status=1)
    assert run.report.cases[0].check.startswith("failed: expected 1 on all ranks, got ")
