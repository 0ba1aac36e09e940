"""x.py: the formulas and the answer, with numbers worked out by hand."""

from benchmarks import x
from common.stats import Estimate, Times
from harness.report import Case


def test_the_formulas_by_hand() -> None:
    """Six rounds of one iteration on 2 ranks. The slowest rank takes 3 s for both together, and
    2 s for the matmul."""
    seconds = {"step": [[3.0] * 6, [2.5] * 6], "matmul": [[1.0] * 6, [2.0] * 6]}
    times = Times(seconds, rounds=[1] * 6)  # [ranks, iterations] of each name
    case = Case(key={"size_bytes": 65536}, name="64K", ranks=[0, 1])
    x.derive(case, times, facts=[[1.0], [1.0]])
    assert case.check == "passed"
    assert case.metrics["step_s"] == Estimate(value=3, low=3, high=3)
    assert case.metrics["exposed_s"] == Estimate(value=1, low=1, high=1)
    assert x.answer([case]) == "exposed: 1.00 s (1.00 to 1.00) at 64K bytes"
    x.derive(case, times, facts=[[1.0], [0.0]])
    assert case.check == "failed: expected 1 on all ranks, got [[1.0], [0.0]]"
