"""batch_update_ps.py under torchrun, its faults, and its formulas."""

import re
from typing import Any

import pytest

from benchmarks import batch_update_ps
from common.stats import Times
from harness.report import Case
from tests.process import Bench

SCRIPT = "benchmarks/batch_update_ps.py"
SHORT = ("--iters", "12", "--warmup-iters", "1", "--device", "cpu", "--straggler-timeout", "2")
smoke, faults = pytest.mark.smoke, pytest.mark.faults


@smoke
def test_fewer_gradients_than_trainers(bench: Bench) -> None:
    """Rank 1 needs 12 s longer to set up its first case. This does not count as a late gradient."""
    flags = ("--batch-update-size", "2", "--log-updates", "--straggler-timeout", "10")
    run = bench(SCRIPT, *SHORT, *flags, ranks=4, inject="slow-optimizer")
    assert [case.key["payload"] for case in run.report.cases] == ["module", "tensors"]
    for case in run.report.cases:
        assert case.check == "passed"
        assert [len(row) for row in case.samples_s["step"]] == [12] * 3
        log = case.metrics["log"]
        for update in log:
            assert 1 <= len(update["trainers"]) <= 2
            assert sorted(update["came_s"]) == update["came_s"]
            assert update["came_s"][-1] <= update["updated_s"]
        # 3 trainers with 20 checked steps, 1 of warm-up, 12 timed ones, and those before each block
        assert sum(len(update["trainers"]) for update in log) >= 3 * (20 + 1 + 12)
        assert f"log of {case.name}, {len(log)} of {len(log)} updates; seconds since " in run.out


@faults
def test_a_wrong_answer_of_the_server_fails_the_check(bench: Bench) -> None:
    run = bench(SCRIPT, *SHORT, "--payload", "module", ranks=3, inject="callee-errs", status=1)
    (case,) = run.report.cases
    assert re.search(r"failed: .*after 20 updates the parameters of trainer0 differ", case.check)
    assert "module  failed: " in run.out


@faults
def test_a_late_trainer_and_one_that_raises_fail_their_cases(bench: Bench) -> None:
    run = bench(SCRIPT, *SHORT, "--iters", "60", ranks=3, inject="late-call,failing-call", status=1)
    late = "TimeoutError: no reply within 2 s; gradients missing: trainer1 (rank 0)"
    raised = "MemoryError: injected: no room for the gradients (rank 1)"
    assert [case.check for case in run.report.cases] == [f"failed: {late}", f"failed: {raised}"]


@faults
def test_a_stopped_server_is_named(bench: Bench) -> None:
    """Its 150th call is after the check, which makes 40 calls from two trainers."""
    flags = ("--iters", "1000", "--timeout", "6", "--straggler-timeout", "60")
    run = bench(SCRIPT, *SHORT, *flags, ranks=3, inject="callee-stops", status=1)
    assert "HANG: no progress for 6 s" in run.err
    assert re.search(r"rank 2 on .*case 'module', .*does not answer", run.err), run.err
    waits = r"rank 0 on .*case 'module', step, (warm-up|block) \d+: waits"
    assert re.search(waits, run.err), run.err


def test_rates_by_hand() -> None:
    """Two blocks of two steps take max(1 + 1, 1.5 + 1.5) = 3 s and max(2 + 2, 1 + 1) = 4 s, each
    for 4 gradients. The median rate is (4 / 3 + 1) / 2 = 7 / 6."""
    steps = [[1.0, 1.0, 2.0, 2.0], [1.5, 1.5, 1.0, 1.0]]
    key = {"in_features": 9, "out_features": 10}
    case = Case(key=key, ranks=[0, 1], samples_s={"step": steps}, rounds=[2, 2])
    times = Times(case.samples_s, case.rounds, [[0.5] * 4, [0.75] * 4])
    updates = [{"trainers": who} for who in ([0, 1], [1, 0], [0, 1], [0, 1], [0, 1], [1], [0])]
    facts: list[dict[str, Any]] = [{"wrong": None, "sent": 6, "updates": updates} for _ in range(2)]
    batch_update_ps.derive(case, times, facts)
    m = case.metrics
    assert m["step_s"].value == 1.5  # of trainer 0
    assert m["latency_s"].value == m["latency_p95_s"] == 0.75
    assert m["gradients_per_s"].value == pytest.approx(7 / 6)
    assert m["gradients_per_update"] == pytest.approx(12 / 7)
    assert m["updates_per_s"].value == pytest.approx(7 / 6 / (12 / 7))
    assert m["mb_per_s"].value == pytest.approx(7 / 6 * 2 * 100 * 4 / 1e6)
    assert case.check == "passed"
    facts[1]["sent"] = 7
    batch_update_ps.derive(case, times, facts)
    assert case.check == "failed: the trainers sent 13 gradients, but the server's log contains 12"
