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
    run = bench(SCRIPT, *SHORT, "--batch-update-size", "2", "--log-updates", ranks=4)
    assert run.status == 0, run.err
    assert [case.key["payload"] for case in run.report.cases] == ["module", "tensors"]
    for case in run.report.cases:
        assert case.check == "passed"
        assert [len(row) for row in case.samples_s["step"]] == [20] * 3
        m = case.metrics
        assert 1 <= m["gradients_per_update"] <= 2
        rate = m["updates_per_s"].value
        assert rate == pytest.approx(m["gradients_per_s"].value / m["gradients_per_update"])
        assert m["latency_s"].value > 0
        assert f"{rate:.1f}" in run.out
        assert m["updates"] == len(m["log"])
        for update in m["log"]:
            assert 1 <= len(update["trainers"]) <= 2
            assert sorted(update["came_s"]) == update["came_s"]
            assert update["came_s"][-1] <= update["updated_s"]
        # 3 trainers: 20 checked steps, 1 of warm-up, 20 timed ones and one before each of 12 blocks
        assert sum(len(update["trainers"]) for update in m["log"]) >= 3 * (20 + 1 + 20)
        assert batch_update_ps.log_of(case) in run.out


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
    late = "TimeoutError: waited 2 s; missing: trainer1 (rank 0)"
    raised = "MemoryError: injected: no room for the gradients (rank 1)"
    assert [case.check for case in run.report.cases] == [f"failed: {late}", f"failed: {raised}"]


@faults
def test_nobody_waits_for_the_start_of_another_one(bench: Callable[..., Any]) -> None:
    """Rank 1 sets its first case up 4 s longer, as on a busy machine: no gradient is late."""
    run = bench(SCRIPT, *SHORT, "--straggler-timeout", "2", ranks=3, inject="slow-optimizer")
    assert [case.check for case in run.report.cases] == ["passed", "passed"]
    assert run.status == 0, run.err


@faults
def test_a_stopped_server_is_named(bench: Callable[..., Any]) -> None:
    """Its 150th call comes after the check, which makes 40 of two trainers."""
    flags = ("--device", "cpu", "--max-seconds", "3", "--target-ci", "0.0001%", "--timeout", "8")
    run = bench(SCRIPT, *flags, "--straggler-timeout", "60", ranks=3, inject="callee-stops")
    assert run.status != 0
    assert "HANG: no progress for 8 s" in run.err
    assert re.search(r"rank 2 on .*case 'module', .*does not answer", run.err), run.err
    assert re.search(r"rank 0 on .*case 'module', step, (warm-up|block) \d+: waits", run.err), (
        run.err
    )


def test_the_log_as_lines() -> None:
    """Who came when, and each update; numbered from the first one, of which the report has none."""
    log = [
        {"trainers": [2, 0], "came_s": [0.25, 0.5], "updated_s": 0.75},
        {"trainers": [1], "came_s": [1.5], "updated_s": 2.0},
    ]
    key = {"payload": "tensors", "batch_update_size": 2}
    case = Case(key=key, ranks=[0, 1, 2], metrics={"log": log, "updates": 12})
    assert batch_update_ps.log_of(case).splitlines() == [
        "log of tensors, 2 of 12 updates; seconds of the server",
        "    0.250000  got trainer2, 1 of 2",
        "    0.500000  got trainer0, 2 of 2",
        "    0.750000  update 11: the model is new",
        "    1.500000  got trainer1, 1 of 2",
        "    2.000000  update 12: the model is new",
    ]


def test_rates_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of two steps: max(1 + 1, 1.5 + 1.5) + max(2 + 2, 1 + 1) = 7 s for 8 gradients."""
    key = {"in_features": 9, "out_features": 10}
    steps = [[1.0, 1.0, 2.0, 2.0], [1.5, 1.5, 1.0, 1.0]]
    case = Case(key=key, ranks=[0, 1], samples_s={"step": steps}, rounds=[2, 2])
    times = Times(case.samples_s, case.rounds, [[0.5] * 4, [0.75] * 4])
    members = [[0, 1], [1, 0], [0, 1], [0, 1], [0, 1], [1], [0]]
    updates = [{"trainers": who, "came_s": [0.5] * len(who), "updated_s": 1.0} for who in members]
    facts: list[dict[str, Any]] = [{"wrong": None, "sent": 6, "updates": updates} for _ in range(2)]
    batch_update_ps.derive(case, times, facts)
    m = case.metrics
    assert m["step_s"].value == 1.5  # trainer 0's
    assert m["latency_s"].value == m["latency_p95_s"] == 0.75
    assert m["gradients_per_s"].value == pytest.approx(8 / 7)
    assert m["gradients_per_update"] == pytest.approx(12 / 7)
    assert m["updates_per_s"].value == pytest.approx(8 / 12)
    assert m["mb_per_s"].value == pytest.approx(8 / 7 * 2 * 100 * 4 / 1e6)
    assert m["updates_per_s"].low is None  # of two blocks
    assert case.check == "passed"
    assert (m["updates"], m["log"]) == (7, updates)
    monkeypatch.setattr(batch_update_ps, "LOGGED", 3)  # the report keeps the newest ones
    batch_update_ps.derive(case, times, facts)
    assert (m["updates"], m["log"]) == (7, updates[4:])
    facts[1]["sent"] = 7
    batch_update_ps.derive(case, times, facts)
    assert case.check == "failed: the trainers sent 13 gradients, the server's log has 12"
