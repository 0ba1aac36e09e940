"""What a report keeps of many samples, and that its readers take it for the whole."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from analysis.load import load
from common import stats as samples
from common.benchmark import Benchmark, RankResult
from common.observe.hints import timed_s
from common.report import Case, Report
from common.report import load as load_report
from common.stats import Times
from common.timing import RankTimes
from tests import scale_case


def made_up(ranks: int = 8, iterations: int = 100) -> dict[str, Any]:
    """[ranks, iterations] of two steps; rank 2 is the slowest in nearly all iterations."""
    rng = np.random.default_rng(0)
    step = rng.lognormal(-5, 0.1, (ranks, iterations)).round(9)
    step[2] = (step[2] * 1.5).round(9)
    return {"step": step, "compute": (step / 2).round(9)}


def kept(aligned: bool, seconds: dict[str, Any]) -> Case:
    case = Case(key={"n": 1}, ranks=list(range(8)), rounds=[50, 50], aligned=aligned)
    samples.keep_samples(case, seconds)
    return case


def in_report(path: Path, case: Case) -> str:
    report = Report("ddp_sweep", {}, str(path))
    report.start()
    report.add(case)
    report.finish("complete")
    return str(path)


def test_a_case_up_to_the_limit_is_written_whole(tmp_path: Path) -> None:
    seconds = made_up()
    case = kept(True, seconds)
    assert case.samples_s == {name: rows.tolist() for name, rows in seconds.items()}
    path = in_report(tmp_path / "r.jsonl", case)
    line = json.loads(Path(path).read_text().splitlines()[1])
    fields = ["key", "name", "table", "ranks", "samples_s", "rounds", "stop", "metrics", "check"]
    assert list(line) == fields


@pytest.mark.parametrize("aligned", [True, False])
def test_a_larger_case_keeps_what_its_readers_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aligned: bool
) -> None:
    seconds = made_up()
    whole = in_report(tmp_path / "whole.jsonl", kept(aligned, seconds))
    monkeypatch.setattr(samples, "LIMIT", 1599)  # of 8 * 100 * 2
    case = kept(aligned, seconds)
    bounded = in_report(tmp_path / "bounded.jsonl", case)
    [from_file] = load_report(bounded).cases
    assert from_file == case
    assert from_file.bounded
    slowest = seconds["step"].max(axis=0) if aligned else seconds["step"][2]
    assert from_file.samples_s["step"] == [slowest.tolist()]
    for measure in (None, "compute"):
        [row] = load([whole], measure)[0].rows.values()
        [other] = load([bounded], measure)[0].rows.values()
        assert (row.times_s, row.time_s, row.rounds) == (other.times_s, other.time_s, other.rounds)
        assert len(other.times_s) == 100


def test_resume_takes_a_bounded_case_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "LIMIT", 600)
    case = kept(True, made_up())
    path = in_report(tmp_path / "r.jsonl", case)
    resumed = Report("ddp_sweep", {}, path)
    resumed.start(resume=True)
    assert resumed.find({"n": 1}) == case


def test_metrics_are_of_all_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "LIMIT", 600)
    seconds = made_up()
    by_rank = []
    for rank in range(8):
        of_rank = {name: rows[rank].tolist() for name, rows in seconds.items()}
        by_rank.append(RankTimes(samples.rounded(of_rank), [50, 50], "iters"))
    case = Case(key={}, ranks=list(range(8)))
    shapes = []

    def derive(case: Case, times: Times, facts: list[Any]) -> None:
        shapes.append(times.each("compute").shape)
        assert np.array_equal(times.slowest(), seconds["step"].max(axis=0))

    bench: Any = SimpleNamespace()
    Benchmark.complete(bench, case, derive, [RankResult(times, None, []) for times in by_rank])
    assert shapes == [(8, 100)]
    assert np.shape(case.samples_s["step"]) == (1, 100)
    slowest = [rows.max(axis=0).sum() for rows in seconds.values()]
    assert timed_s(case) == pytest.approx(sum(slowest))


def test_rank_0_completes_a_case_of_many_ranks() -> None:
    cost = scale_case.cost_of_case(256, 600)  # 460,800 samples
    assert cost.gathered_bytes < 9 * 460_800
    assert cost.report_bytes < 16 * samples.LIMIT
