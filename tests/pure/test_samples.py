"""A report keeps part of many samples, and its readers get the same results as from all."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from analysis.runs.load import load
from common.stats import Times
from harness import benchmark
from harness.benchmark import Benchmark, RankResult, timed_s
from harness.report import Case, Report
from tests import scale_case

RANKS, ITERATIONS = 8, 100


# [ranks, iterations] of two steps; rank 2 is the slowest in nearly all iterations
STEP = np.random.default_rng(0).lognormal(-5, 0.1, (RANKS, ITERATIONS))
STEP[2] *= 1.5
SECONDS: dict[str, Any] = {"step": STEP.round(9), "compute": (STEP / 2).round(9)}


def reported(path: Path, aligned: bool) -> tuple[str, Case]:
    """A report of one case, and the case."""
    case = Case(key={"n": 1}, ranks=list(range(RANKS)), rounds=[50, 50], aligned=aligned)
    case.samples_s, case.bounded = benchmark.kept_samples(Times(SECONDS, [50, 50], aligned=aligned))
    report = Report("ddp_sweep", {}, str(path))
    report.start()
    report.add(case)
    report.finish("complete")
    return str(path), case


@pytest.mark.parametrize("aligned", [True, False])
def test_samples_that_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aligned: bool
) -> None:
    whole, case = reported(tmp_path / "whole.jsonl", aligned)
    assert case.samples_s == {name: rows.tolist() for name, rows in SECONDS.items()}
    monkeypatch.setattr(benchmark, "LIMIT", 2 * RANKS * ITERATIONS - 1)
    bounded, case = reported(tmp_path / "bounded.jsonl", aligned)
    resumed = Report("ddp_sweep", {}, bounded)
    resumed.start(resume=True)
    assert resumed.find({"n": 1}) == case
    slowest = SECONDS["step"].max(axis=0) if aligned else SECONDS["step"][2]
    assert case.samples_s["step"] == [slowest.tolist()]
    for measure in (None, "compute"):
        [row] = load([whole], measure)[0].rows.values()
        [other] = load([bounded], measure)[0].rows.values()
        assert (row.times_s, row.time_s, row.rounds) == (other.times_s, other.time_s, other.rounds)
        assert len(other.times_s) == ITERATIONS


def test_metrics_are_computed_from_all_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "LIMIT", 600)
    slowest = SECONDS["step"].max(axis=0)
    results = []
    for rank in range(RANKS):
        of_rank = {name: rows[rank].tolist() for name, rows in SECONDS.items()}
        results.append(RankResult(Times.of_rank(of_rank, [50, 50], "iters"), None, []))
    case = Case(key={}, ranks=list(range(RANKS)))

    def derive(case: Case, times: Times, facts: list[Any]) -> None:
        case.metrics["ranks"] = len(times.each("compute"))
        assert np.array_equal(times.slowest(), slowest)

    bench: Any = SimpleNamespace()
    Benchmark.complete(bench, case, derive, results)
    assert (case.metrics["ranks"], len(case.samples_s["step"])) == (RANKS, 1)
    assert timed_s(case) == pytest.approx(1.5 * slowest.sum())


def test_rank_0_completes_a_case_of_many_ranks() -> None:
    cost = scale_case.cost_of_case(256, 600)  # 460,800 samples
    assert cost.gathered_bytes < 9 * 460_800
    assert cost.report_bytes < 16 * benchmark.LIMIT
