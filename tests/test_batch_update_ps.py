"""batch_update_ps.py as its user runs it, its faults, its formulas by hand."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import batch_update_ps
from common.report import Case

SCRIPT = "benchmarks/batch_update_ps.py"
SHORT = ("--iters", "20", "--warmup-iters", "1", "--device", "cpu")
# two cases of at least 3 s each: the second one is measured once the first is in the report
LONG = ("--device", "cpu", "--max-seconds", "3", "--target-ci", "0.0001%")
smoke, faults = pytest.mark.smoke, pytest.mark.faults


def cases_in(path: Path) -> int:
    return len(path.read_text().splitlines()) - 1 if path.exists() else 0


@smoke
@pytest.mark.parametrize(("ranks", "size"), [(4, 3), (7, 5)])
def test_any_number_of_trainers(bench: Callable[..., Any], ranks: int, size: int) -> None:
    run = bench(SCRIPT, *SHORT, "--batch-update-size", str(size), ranks=ranks)
    assert run.status == 0, run.err
    assert [case.key["payload"] for case in run.report.cases] == ["module", "tensors"]
    for case in run.report.cases:
        assert case.check == "passed"
        assert [len(row) for row in case.samples_s["step"]] == [20] * (ranks - 1)
        m = case.metrics
        assert 1 <= m["gradients_per_update"] <= size
        assert size < ranks - 1 or m["gradients_per_update"] == size  # all trainers
        assert m["updates_per_s"] == pytest.approx(m["gradients_per_s"] / m["gradients_per_update"])
        assert m["latency_p50_s"] > 0
        assert f"{m['updates_per_s']:.1f}" in run.out


@faults
def test_a_wrong_answer_of_the_server_fails_the_check(bench: Callable[..., Any]) -> None:
    run = bench(SCRIPT, *SHORT, ranks=3, inject="wrong-reply")
    assert run.status == 1
    for case in run.report.cases:
        assert re.search(r"failed: .*after 20 updates the parameters of trainer0 are", case.check)
    assert "module  failed: " in run.out


@faults
def test_who_is_missing_is_named_and_the_run_goes_on(bench: Callable[..., Any]) -> None:
    flags = (*SHORT, "--iters", "60", "--straggler-timeout", "2")
    run = bench(SCRIPT, *flags, ranks=4, inject="slow-trainer")
    assert run.status == 1
    first, second = run.report.cases
    late = r"failed: TimeoutError: trainer[02] waited 2 s for an update .*missing: trainer1 "
    assert re.match(late, first.check), first.check
    assert second.check == "passed"


@faults
def test_a_trainer_that_raises_fails_its_case_alone(bench: Callable[..., Any]) -> None:
    flags = (*SHORT, "--iters", "60", "--straggler-timeout", "2")
    run = bench(SCRIPT, *flags, ranks=4, inject="trainer-raises")
    assert run.status == 1
    first, second = run.report.cases
    assert first.check == "failed: MemoryError: injected: no room for the gradients (rank 1)"
    assert second.check == "passed"


@faults
@pytest.mark.parametrize("rank", [1, 3])  # a trainer, the server
def test_a_killed_rank_is_named(start: Callable[..., Any], tmp_path: Path, rank: int) -> None:
    path = tmp_path / "report.jsonl"
    process = start(SCRIPT, *LONG, "--timeout", "20", "--json", str(path), ranks=4)
    process.until(lambda: cases_in(path), 150)
    there = process.tree()
    process.ranks()[rank].kill()
    assert process.wait(40) != 0
    assert re.search(rf"rank +: {rank} .*\n.*exitcode +: -9 ", process.err), process.err
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in there)
    assert cases_in(path) == 1  # what was measured is kept


@faults
def test_a_stopped_server_is_named(bench: Callable[..., Any]) -> None:
    """150 calls come after the check, 40, and the warm-up, 10 of two trainers."""
    run = bench(SCRIPT, *LONG, "--timeout", "20", ranks=3, inject="callee-stops")
    assert run.status != 0
    assert "HANG: no progress for 20 s" in run.err
    assert re.search(r"rank 2 on .*case 'module .*: does not answer", run.err), run.err
    assert re.search(r"rank 0 on .*case 'module .*step, block \d+: waits", run.err), run.err


def test_rates_by_hand() -> None:
    """Blocks of two steps: max(1 + 1, 1.5 + 1.5) + max(2 + 2, 1 + 1) = 7 s for 8 gradients."""
    key = {"in_features": 9, "out_features": 10}
    steps = [[1.0, 1.0, 2.0, 2.0], [1.5, 1.5, 1.0, 1.0]]
    case = Case(key, [0, 1], {"step": steps}, [2, 2])
    # each block has an untimed step before it
    latencies = [[9.0, 0.5, 0.5, 9.0, 0.5, 0.5], [9.0, 0.75, 0.75, 9.0, 0.75, 0.75]]
    updates = [2, 2, 2, 2, 2, 1, 1]
    facts: list[dict[str, Any]] = [
        {"wrong": None, "latencies": each, "updates": updates} for each in latencies
    ]
    batch_update_ps.derive(case, facts)
    m = case.metrics
    assert m["step_time_p50_s"] == 1.5  # trainer 0's
    assert m["latency_p50_s"] == m["latency_p95_s"] == 0.75
    assert m["gradients_per_s"] == pytest.approx(8 / 7)
    assert m["gradients_per_update"] == pytest.approx(12 / 7)
    assert m["updates_per_s"] == pytest.approx(8 / 12)
    assert m["mb_per_s"] == pytest.approx(8 / 7 * 2 * 100 * 4 / 1e6)
    assert m["updates_per_s_ci95"] is None  # of two blocks
    assert case.check == "passed"
    facts[1]["latencies"] = [9.0, *latencies[1]]
    batch_update_ps.derive(case, facts)
    assert case.check == "failed: the trainers sent 13 gradients, the server's log has 12"
