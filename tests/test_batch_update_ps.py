"""batch_update_ps.py as its user runs it, its faults, its formulas by hand."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import batch_update_ps
from common.report import Case
from common.stats import Times

SCRIPT = "benchmarks/batch_update_ps.py"
SHORT = ("--iters", "20", "--warmup-iters", "1", "--device", "cpu")
smoke, faults = pytest.mark.smoke, pytest.mark.faults


@smoke
def test_fewer_gradients_than_trainers(bench: Callable[..., Any]) -> None:
    run = bench(SCRIPT, *SHORT, "--batch-update-size", "2", ranks=4)
    assert run.status == 0, run.err
    assert [case.key["payload"] for case in run.report.cases] == ["module", "tensors"]
    for case in run.report.cases:
        assert case.check == "passed"
        assert [len(row) for row in case.samples_s["step"]] == [20] * 3
        m = case.metrics
        assert 1 <= m["gradients_per_update"] <= 2
        assert m["updates_per_s"] == pytest.approx(m["gradients_per_s"] / m["gradients_per_update"])
        assert m["latency_p50_s"] > 0
        assert f"{m['updates_per_s']:.1f}" in run.out


@faults
def test_a_wrong_answer_of_the_server_fails_the_check(bench: Callable[..., Any]) -> None:
    run = bench(SCRIPT, *SHORT, ranks=3, inject="callee-errs")
    assert run.status == 1
    for case in run.report.cases:
        assert re.search(r"failed: .*after 20 updates the parameters of trainer0 are", case.check)
    assert "module  failed: " in run.out


@faults
def test_a_late_trainer_and_one_that_raises_fail_their_cases(bench: Callable[..., Any]) -> None:
    flags = (*SHORT, "--iters", "60", "--straggler-timeout", "2")
    run = bench(SCRIPT, *flags, ranks=3, inject="trainer-falters")
    assert run.status == 1
    late = "TimeoutError: waited 2 s (--straggler-timeout); missing: trainer1 (rank 0)"
    raised = "MemoryError: injected: no room for the gradients (rank 1)"
    assert [case.check for case in run.report.cases] == [f"failed: {late}", f"failed: {raised}"]


@faults
def test_a_stopped_server_is_named(bench: Callable[..., Any]) -> None:
    """150 calls come after the check, 40, and the warm-up, 10 of two trainers."""
    flags = ("--device", "cpu", "--max-seconds", "3", "--target-ci", "0.0001%", "--timeout", "8")
    run = bench(SCRIPT, *flags, ranks=3, inject="callee-stops")
    assert run.status != 0
    assert "HANG: no progress for 8 s" in run.err
    assert re.search(r"rank 2 on .*case 'module .*: does not answer", run.err), run.err
    assert re.search(r"rank 0 on .*case 'module .*step, block \d+: waits", run.err), run.err


def test_rates_by_hand() -> None:
    """Blocks of two steps: max(1 + 1, 1.5 + 1.5) + max(2 + 2, 1 + 1) = 7 s for 8 gradients."""
    key = {"in_features": 9, "out_features": 10}
    steps = [[1.0, 1.0, 2.0, 2.0], [1.5, 1.5, 1.0, 1.0]]
    case = Case(key, [0, 1], {"step": steps}, [2, 2])
    latencies = [[0.5] * 4, [0.75] * 4]
    times = Times(case.samples_s, case.rounds, latencies)
    updates = [2, 2, 2, 2, 2, 1, 1]
    # each block has an untimed step before it
    facts = [{"wrong": None, "sent": 6, "updates": updates} for _ in range(2)]
    batch_update_ps.derive(case, times, facts)
    m = case.metrics
    assert m["step_time_p50_s"] == 1.5  # trainer 0's
    assert m["latency_p50_s"] == m["latency_p95_s"] == 0.75
    assert m["gradients_per_s"] == pytest.approx(8 / 7)
    assert m["gradients_per_update"] == pytest.approx(12 / 7)
    assert m["updates_per_s"] == pytest.approx(8 / 12)
    assert m["mb_per_s"] == pytest.approx(8 / 7 * 2 * 100 * 4 / 1e6)
    assert m["updates_per_s_ci95"] is None  # of two blocks
    assert case.check == "passed"
    facts[1]["sent"] = 7
    batch_update_ps.derive(case, times, facts)
    assert case.check == "failed: the trainers sent 13 gradients, the server's log has 12"
