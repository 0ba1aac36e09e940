"""ddp_sweep.py as its user runs it, and its arithmetic by hand."""

from collections.abc import Callable
from typing import Any

import pytest

SCRIPT = "benchmarks/ddp_sweep.py"
SMALL = ("--model", "mobilenet_v3_small", "--image-size", "32", "--batch-size", "2")
SHORT = (*SMALL, "--iters", "6", "--warmup-iters", "1")


@pytest.mark.smoke
def test_two_ranks(bench: Callable[..., Any]) -> None:
    run = bench(SCRIPT, *SHORT, ranks=2)
    assert run.status == 0, run.err
    assert [case.key["label"] for case in run.report.cases] == ["no ddp", "1M/1G", "1M/2G"]
    assert run.report.status == "complete"
    last = run.report.cases[-1]
    assert last.check == "passed"
    assert list(last.samples_s) == ["step", "local compute", "alone"]
    assert [len(rows) for rows in last.samples_s["step"]] == [6, 6]
    assert "1M/2G" in run.out
