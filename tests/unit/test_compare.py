"""compare.py: what is joined, what is said of it, and how often that is wrong."""

import copy
import importlib
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import ROOT, alive, children, launch, load_script, run
from lab import wait_until

from common import runs as reports
from common.compare import Comparison, compare
from common.runs import TORCH_DDP, Run, RunCase, find_reports, load_run
from common.text import markdown, printable

SCRIPT = str(ROOT / "benchmarks" / "compare.py")
ENVIRONMENT: dict[str, Any] = {
    "torch": "2.14.0",
    "world_size": 2,
    "devices": ["H100"],
    "cpus": ["EPYC"],
    "threads_per_rank": [1],
    "ranks": [{"rank": 0, "cores": 8}, {"rank": 1, "cores": 8}],
    "variables": {"NCCL_ALGO": "Ring"},
    "differences": [],
}
SPREAD = [1.0, 0.98, 1.02, 1.0, 0.99, 1.01, 1.0]  # iterations about their median


def case(name: str, median_s: float = 0.1, **changes: Any) -> dict[str, Any]:
    """A case of two ranks, of which the second is the slower."""
    slower = [median_s * x for x in SPREAD]
    return {
        "key": {"model": name},
        "label": name,
        "ranks": [0, 1],
        "samples_s": [[x * 0.9 for x in slower], slower],
        "stop": {},
        "metrics": {},
        "check": "passed",
    } | changes


def report(*cases: dict[str, Any], day: int = 1, **changes: Any) -> dict[str, Any]:
    return {
        "schema": "torchrun-bench/1",
        "benchmark": "ddp_sweep",
        "status": "complete",
        "argv": [],
        "started_at": f"2025-01-{day:02}T00:00:00+00:00",
        "environment": copy.deepcopy(ENVIRONMENT),
        "cases": list(cases),
    } | changes


def write(path: Path, document: Any) -> str:
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return str(path)


def runs(tmp_path: Path, side: str, times: Sequence[Sequence[float]]) -> list[str]:
    """A report for each row of times; its cases are a, b, c, ... in that order."""
    return [
        write(
            tmp_path / f"{side}{i}.json",
            report(*(case("abcdefgh"[j], time) for j, time in enumerate(row)), day=i + 1),
        )
        for i, row in enumerate(times)
    ]


def loaded(paths: Sequence[str]) -> list[Run]:
    return [load_run(path) for path in paths]


def compared(
    tmp_path: Path, base: Sequence[float], test: Sequence[float], **options: Any
) -> Comparison:
    """Runs of one case."""
    sides = [
        loaded(runs(tmp_path, side, [[time] for time in times]))
        for side, times in (("base", base), ("test", test))
    ]
    return compare(*sides, **options)


def main(*words: str) -> int:
    script: Any = load_script("compare")
    status: int = script.main(script.parse_args(list(words)))
    return status


# -- the verdict on one case -----------------------------------------------------------------------


def taking_turns(number: int, ratio: float, blocks: int = 24) -> list[Run]:
    """A pair of runs with two iterations a block, on a machine that is slow for half of the time.

    Neighbouring blocks mostly see the same speed; how many are slow differs from pair to pair.
    """
    random = np.random.default_rng(number)
    slow = np.repeat(random.random(blocks // 3) < random.uniform(0.2, 0.8), 3)
    runs = []
    for scale in (1.0, ratio):
        late = slow ^ (random.random(blocks) < 0.05)
        times = 0.05 * scale * np.where(late, 1.5, 1.0) * random.lognormal(0, 0.02, blocks)
        times = np.repeat(times, 2) * random.lognormal(0, 0.01, 2 * blocks)
        one = RunCase(
            {}, "case", "samples", float(np.median(times)), times, "passed", (2,) * blocks
        )
        runs.append(Run("", "fake", "complete", {}, "", {"{}": one}, f"{number} {scale}"))
    return runs


def test_runs_that_took_turns_are_compared_block_by_block() -> None:
    def verdicts(ratio: float, interleaved: bool) -> list[tuple[str, bool]]:
        found = []
        for campaign in range(100):
            pairs = [taking_turns(10 * campaign + i, ratio) for i in range(4)]
            base, test = zip(*pairs, strict=True)
            (one,) = compare(base, test, paired=True, interleaved=interleaved).cases
            assert one.ci95 is not None
            assert one.ratio == pytest.approx(np.exp(np.log(one.pair_ratios).mean()))
            found.append((one.verdict, one.ci95[0] <= ratio <= one.ci95[1]))
        return found

    by_block, by_median = verdicts(1.05, True), verdicts(1.05, False)
    assert sum(verdict == "slower" for verdict, _ in by_block) >= 95
    assert sum(verdict == "slower" for verdict, _ in by_median) <= 75
    assert sum(inside for _, inside in by_block) >= 90
    alike = verdicts(1.0, True)
    assert sum(verdict in ("slower", "faster") for verdict, _ in alike) <= 5


def test_few_or_unknown_blocks_leave_the_medians() -> None:
    (base, test) = taking_turns(1, 1.1)
    (a,), (b,) = base.cases.values(), test.cases.values()
    for rounds in [(), (12,) * 4]:
        few = replace(test, cases={"{}": replace(b, rounds=rounds)})
        (one,) = compare([base], [few], paired=True, interleaved=True).cases
        assert one.pair_ratios == pytest.approx([b.value_s / a.value_s])
    (one,) = compare([base], [test], paired=True, interleaved=True).cases
    assert one.pair_ratios != pytest.approx([b.value_s / a.value_s])


def test_the_blocks_of_a_report(tmp_path: Path) -> None:
    for rounds, wanted in [([3, 4], (3, 4)), ([3, 3], ()), ("x", ()), ([7, 0], ()), (None, ())]:
        path = tmp_path / "report.json"
        path.write_text(json.dumps(report(case("a", rounds=rounds))))
        (found,) = load_run(str(path)).cases.values()
        assert found.rounds == wanted


@pytest.mark.parametrize(
    ("base", "test", "verdict"),
    [
        ([1.00, 1.01, 0.99], [1.10, 1.11, 1.09], "slower"),
        ([1.10, 1.11, 1.09], [1.00, 1.01, 0.99], "faster"),
        ([1.00, 1.001, 0.999], [1.005, 1.006, 1.004], "same"),
        ([1.00, 1.05, 0.95], [1.04, 1.09, 0.99], "undecided"),
        # certainly slower, but perhaps by less than the margin: 1.017 to 1.021
        ([1.000, 1.001, 0.999], [1.0185, 1.0195, 1.019], "undecided"),
        ([1.0], [2.0], "undecided"),
        ([1.00, 1.01, 0.99], [1.2], "slower"),
    ],
)
def test_verdict(tmp_path: Path, base: list[float], test: list[float], verdict: str) -> None:
    (found,) = compared(tmp_path, base, test).cases
    assert found.verdict == verdict
    assert (found.reason == "") == (verdict != "undecided")


def test_interval_by_hand(tmp_path: Path) -> None:
    """Logs -0.01, 0.01 and 0.09, 0.11: difference 0.1, error 0.01 * sqrt(2), t(2) = 4.3027."""
    times = [[math.exp(x) for x in side] for side in ((-0.01, 0.01), (0.09, 0.11))]
    (found,) = compared(tmp_path, *times).cases
    assert found.ratio == pytest.approx(math.exp(0.1))
    half = 4.302653 * 0.01 * math.sqrt(2)
    assert found.ci95 == pytest.approx((math.exp(0.1 - half), math.exp(0.1 + half)))
    assert found.base_s == pytest.approx(times[0])


def test_the_margin_decides(tmp_path: Path) -> None:
    times = ([1.000, 1.001, 0.999], [1.030, 1.031, 1.029])
    assert compared(tmp_path, *times, margin=0.02).cases[0].verdict == "slower"
    assert compared(tmp_path, *times, margin=0.05).cases[0].verdict == "same"
    assert compared(tmp_path, *times, margin=0.031).cases[0].verdict == "undecided"


def test_one_run_a_side_is_never_enough_by_itself(tmp_path: Path) -> None:
    found = compared(tmp_path, [1.0], [3.0])
    assert found.cases[0].verdict == "undecided"
    assert "one run a side" in found.cases[0].reason
    assert found.cases[0].ci95 is None
    low, high = found.cases[0].within_run_ci95 or (0, 0)
    assert 2.5 < low < 3 < high < 3.5
    single = compared(tmp_path, [1.0], [3.0], single_run=True)
    assert single.cases[0].verdict == "slower"
    assert single.cases[0].ci95 == (low, high)
    equal = compared(tmp_path, [1.0], [1.0], single_run=True, margin=0.1)
    assert equal.cases[0].verdict == "same"


def test_within_run_interval_by_hand(tmp_path: Path) -> None:
    """7 samples: the median's interval is from the 1st to the 7th, 0.98 to 1.02 of it."""
    (found,) = compared(tmp_path, [1.0], [2.0]).cases
    low, high = (
        math.hypot(math.log(0.98), math.log(1.02)),
        math.hypot(math.log(1.02), math.log(0.98)),
    )
    assert found.within_run_ci95 == pytest.approx((2 * math.exp(-low), 2 * math.exp(high)))


def test_pairs_cancel_a_drift(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, test = [1.0, 1.3, 0.8, 1.1], [1.051, 1.366, 0.839, 1.156]
    assert compared(tmp_path, base, test).cases[0].verdict == "undecided"
    assert compared(tmp_path, base, test, paired=True).cases[0].verdict == "slower"
    paths = runs(tmp_path, "p", [[time] for time in base]), runs(tmp_path, "q", [[t] for t in test])
    assert main(*paths[0], "--test", *reversed(paths[1]), "--paired", "--fail-on", "slower") == 1
    assert "the pair of runs is the unit" in capsys.readouterr().out
    with pytest.raises(ValueError, match="pairs need as many runs a side, got 4 and 3"):
        compared(tmp_path, base, test[:3], paired=True)


def test_looking_more_often_needs_more_evidence(tmp_path: Path) -> None:
    times = ([1.00, 1.01, 0.99], [1.04, 1.05, 1.03])
    once, often = (compared(tmp_path, *times, looks=looks).cases[0] for looks in (1, 20))
    assert once.verdict == "slower"
    assert often.verdict == "undecided"
    assert often.ci95 is not None
    assert once.ci95 is not None
    assert often.ci95[0] < once.ci95[0]


def test_one_surprise_among_many_cases_is_none(tmp_path: Path) -> None:
    """p is about 0.02: enough alone, not as the smallest of 8 (Benjamini-Hochberg: 0.05 / 9)."""
    base = [[1.0 + 0.01 * i] * 8 for i in (0, 1, 2)]
    test = [[1.055, *row[1:]] for row in base]
    test[1][0], test[2][0] = 1.04, 1.07
    many = compare(loaded(runs(tmp_path, "b", base)), loaded(runs(tmp_path, "t", test)))
    assert many.cases[0].p == pytest.approx(0.02, abs=0.01)
    assert many.cases[0].verdict == "undecided"
    assert "one of 9 comparisons" in many.cases[0].reason
    alone = compared(tmp_path, [row[0] for row in base], [row[0] for row in test])
    assert alone.cases[0].verdict == "slower"


def test_geometric_mean_by_hand(tmp_path: Path) -> None:
    """Cases 2 and 8 times slower: 4 times. The interval is over the runs' own means."""
    base = loaded(runs(tmp_path, "b", [[1.0, 1.0], [1.1, 1.1], [0.9, 0.9]]))
    test = loaded(runs(tmp_path, "t", [[2.0, 8.0], [2.2, 8.8], [1.8, 7.2]]))
    found = compare(base, test)
    assert found.mean is not None
    assert found.mean.ratio == pytest.approx(4)
    assert found.mean.verdict == "slower"
    one = compared(tmp_path, [1.0, 1.1, 0.9], [4.0, 4.4, 3.6]).cases[0]
    assert found.mean.ci95 == pytest.approx(one.ci95)


def test_several_benchmarks_at_once(tmp_path: Path) -> None:
    sides = []
    for side, scale in (("b", 1.0), ("t", 1.5)):
        times = [[scale, 2 * scale], [1.01 * scale, 2.02 * scale]]
        mine = loaded(runs(tmp_path, side, times))
        other = [replace(run, benchmark="collectives") for run in mine]
        sides.append([*mine, *other])
        extra = compare([*sides[0], replace(mine[0], benchmark="p2p_matrix")], mine)
        assert extra.mean is not None  # over ddp_sweep, the only one on both sides
    found = compare(*sides)
    assert [c.label for c in found.cases] == [
        f"{name} {c}" for name in ("ddp_sweep", "collectives") for c in "ab"
    ]
    assert {c.verdict for c in found.cases} == {"slower"}
    assert found.mean is None


def test_runs_needed(tmp_path: Path) -> None:
    """Runs that scatter by 5 % (one standard deviation) need about 2 * (1.96 * 5 / 2)^2 = 48."""
    (found,) = compared(tmp_path, [1.0, 1.05, 0.95], [1.0, 1.05, 0.95]).cases
    assert 45 < (found.runs_needed or 0) < 55


# -- what is joined --------------------------------------------------------------------------------


def test_cases_are_joined_by_key_and_the_rest_is_listed(tmp_path: Path) -> None:
    base = report(case("a"), case("b", 0.2), case("old", 0.3), case("broken", 0.4))
    bad = case("broken", 0.1, check="failed: replicas differ")
    test = report(bad, case("new", 0.5), case("b", 0.2), case("a", 0.1))
    found = compare(*([load_run(write(tmp_path / "r", doc))] for doc in (base, test)))
    assert [(c.label, round(c.ratio, 6)) for c in found.cases] == [("a", 1), ("b", 1)]
    assert [c.label for c in found.only_base] == ["old"]
    assert [c.label for c in found.only_test] == ["new"]
    (failed,) = found.not_compared
    assert failed.label == "broken"
    assert failed.reason == "TEST: failed: replicas differ"


def test_a_run_that_failed_is_said_and_not_counted(tmp_path: Path) -> None:
    test = runs(tmp_path, "t", [[1.1], [1.11], [1.09]])
    document = report(case("a", 1.0, check="failed: out of memory"), day=4)
    test.append(write(tmp_path / "failed.json", document))
    base = loaded(runs(tmp_path, "b", [[1.0], [1.01], [0.99]]))
    (found,) = compare(base, loaded(test)).cases
    assert found.verdict == "slower"
    assert len(found.test_s) == 3
    assert found.reason == "TEST: 1 of 4 runs: failed: out of memory"


def test_runs_that_lack_a_case_are_said(tmp_path: Path) -> None:
    base = loaded(runs(tmp_path, "b", [[1.0, 1.0], [1.01, 1.01], [0.99]]))
    test = loaded(runs(tmp_path, "t", [[1.1, 1.1], [1.11, 1.11], [1.09, 1.09]]))
    found = compare(base, test)
    assert [len(c.base_s) for c in found.cases] == [3, 2]
    assert [c.reason for c in found.cases] == ["", "BASE: 1 of 3 runs lack it"]
    paired = compare(base, test, paired=True)
    assert [len(c.test_s) for c in paired.cases] == [3, 2]
    assert found.mean is None  # only one case is in every run


def test_the_slowest_rank_counts(tmp_path: Path) -> None:
    rows = [[1.0, 5.0, 1.0], [2.0, 2.0, 2.0]]
    document = report(case("a", samples_s=rows))
    (found,) = load_run(write(tmp_path / "r", document)).cases.values()
    assert found.value_s == 2.0
    assert list(found.times_s if found.times_s is not None else []) == [2, 5, 2]


def test_callers_that_go_their_own_way(tmp_path: Path) -> None:
    rows = [[1.0, 5.0, 1.0], [2.0, 2.0, 2.0]]
    document = report(case("a", samples_s=rows), benchmark="rpc_latency")
    (found,) = load_run(write(tmp_path / "r", document)).cases.values()
    assert found.value_s == 2.0
    assert list(found.times_s if found.times_s is not None else []) == [2, 2, 2]


@pytest.mark.parametrize(
    ("metrics", "measure", "value"),
    [
        ({"a_time_s": 3.0, "x_p50_s": 2.0}, "x_p50_s", 2.0),
        ({"busbw_gb_per_s": 4.0, "a_time_s": 3.0}, "a_time_s", 3.0),
        ({"rate": 4.0}, "1 / rate", 0.25),
        ({"updates_per_s": 8.0}, "1 / updates_per_s", 0.125),
        ({"memory_gib": 1.0}, "", None),
        ({"x_p50_s": 0.0}, "", None),
        ({"x_p50_s": "1"}, "", None),
        ({}, "", None),
    ],
)
def test_a_case_without_samples_has_its_metric(
    tmp_path: Path, metrics: dict[str, Any], measure: str, value: float | None
) -> None:
    document = report(case("a", samples_s=[], metrics=metrics))
    (found,) = load_run(write(tmp_path / "r", document)).cases.values()
    assert (found.measure, found.value_s) == (measure, value)
    assert found.times_s is None


def test_measure(tmp_path: Path) -> None:
    other = {"local compute": [[3.0], [4.0]]}
    document = report(case("a", other_samples_s=other, metrics={"first_iteration_s": 7.0}))
    path = write(tmp_path / "r", document)
    for name, value in (("local compute", 4.0), ("first_iteration_s", 7.0)):
        (found,) = load_run(path, name).cases.values()
        assert (found.measure, found.value_s) == (name, value)
    with pytest.raises(
        ValueError, match=r"no case has the time 'local comput'; did you mean local compute"
    ):
        load_run(path, "local comput")


def test_links_are_cases_of_their_own() -> None:
    path = ROOT / "docs" / "results" / "p2p_matrix_cpu_4ranks.json"
    links = load_run(str(path)).cases.values()
    assert len(links) == 6 * 4  # pairs, kinds
    found = {c.label: c.value_s for c in links}
    last = json.loads(path.read_text())["cases"][-1]["metrics"]["links"][-1]
    assert last[:2] == [2, 3]
    assert found["2 - 3 latency"] == pytest.approx(last[2] * 1e-6)
    assert found["2 -> 3, 1 GB"] == pytest.approx(1 / last[3])
    assert found["3 -> 2, 1 GB"] == pytest.approx(1 / last[4])


@pytest.mark.parametrize(
    "path", sorted((ROOT / "docs" / "results").glob("*.json")), ids=lambda path: path.stem
)
def test_every_benchmark_can_be_compared(path: Path) -> None:
    one = load_run(str(path))
    cases = {
        name: c if c.value_s is None else replace(c, value_s=c.value_s * 1.5)
        for name, c in one.cases.items()
    }
    other = replace(one, cases=cases, digest="other")
    found = compare([one, one, one], [other, other, other])
    assert found.cases
    assert {c.verdict for c in found.cases} == {"slower"}
    assert len({c.label for c in found.cases}) == len(found.cases)
    assert not found.only_base
    assert len(found.not_compared) <= 1


def test_no_common_case_says_why(tmp_path: Path) -> None:
    a = load_run(write(tmp_path / "a", report(case("a"))))
    b = load_run(write(tmp_path / "b", report(case("b"))))
    empty = load_run(write(tmp_path / "e", report()))
    for test, message in (
        (b, r"the first ones differ in model \(a, b\)"),
        (replace(a, benchmark="collectives"), "BASE has reports of ddp_sweep, TEST of collectives"),
        (empty, "the reports of TEST have none"),
    ):
        with pytest.raises(ValueError, match=f"^no case is on both sides: .*{message}"):
            compare([a], [test])


def test_cases_that_differ_in_an_ignored_field_are_joined(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A hook against another, say, which is a field of the key."""
    for folder, hook, time in (("base", "none", 1.0), ("test", "bf16", 1.2)):
        (tmp_path / folder).mkdir()
        key = {"model": "a", "comm_hook": hook}
        for day in range(1, 4):
            written = case("a", time + day / 1e3) | {"key": key}
            write(tmp_path / folder / f"{day}.json", report(written, day=day))
        write(tmp_path / folder / "campaign.json", "{}")  # ab.py's; no report
    sides = [str(tmp_path / "base"), "--test", str(tmp_path / "test")]
    with pytest.raises(SystemExit, match="2"):
        main(*sides)
    assert "differ in comm_hook (none, bf16)" in capsys.readouterr().err
    assert main(*sides, "--ignore-key", "comm_hook", "--fail-on", "slower") == 1
    assert "1.20x slower" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main(*sides, "--ignore-key", "com_hook")
    assert "no 'com_hook' in their keys; did you mean comm_hook?" in capsys.readouterr().err
    two = report(case("a"), case("b"))
    with pytest.raises(ValueError, match=r"several cases differ in model alone, e\.g\. b"):
        load_run(write(tmp_path / "two.json", two), ignore=["model"])


def test_like_labels_are_told_apart(tmp_path: Path) -> None:
    cases = [case("a", key={"model": "a", "batch": n}, label="same") for n in (1, 2)]
    one = load_run(write(tmp_path / "r", report(*cases)))
    assert [c.label for c in compare([one], [one]).cases] == ["same, batch 1", "same, batch 2"]


# -- PyTorch's own report --------------------------------------------------------------------------


def torch_report(scale: float = 1.0) -> dict[str, Any]:
    times = [scale * x for x in (1.0, 5.0, 1.0, 2.0, 2.0, 2.0)]  # of rank 0, then of rank 1
    results = [
        {"ranks": [0], "measurements": [scale, scale, 3 * scale]},
        {"ranks": [0], "measurements": [2 * scale]},
        {"ranks": [0, 1], "measurements": times},
    ]
    return {
        "pytorch_version": "1.12",
        "cuda_version": "11.3",
        "distributed_backend": "nccl",
        "bucket_size": 25,
        "benchmark_results": [{"model": "resnet50", "batch_size": 32, "result": results}],
    }


def test_pytorchs_report(tmp_path: Path) -> None:
    base, test = (load_run(write(tmp_path / "r", torch_report(scale))) for scale in (1.0, 1.1))
    assert base.benchmark == TORCH_DDP
    assert [(c.label, c.value_s) for c in base.cases.values()] == [
        ("resnet50 no ddp, batch size 32", 1.0),
        ("resnet50 1 rank, batch size 32", 2.0),
        ("resnet50 2 ranks, batch size 32", 2.0),  # of max(1, 2), max(5, 2), max(1, 2)
    ]
    assert [round(c.ratio, 6) for c in compare([base], [test]).cases] == [1.1, 1.1, 1.1]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["benchmark_results"], {}),
        (["benchmark_results", 0], 1),
        (["benchmark_results", 0, "result"], None),
        (["benchmark_results", 0, "result", 0], []),
        (["benchmark_results", 0, "result", 0, "ranks"], ["0"]),
        (["benchmark_results", 0, "result", 0, "ranks"], []),
        (["benchmark_results", 0, "result", 0, "measurements"], [-1.0]),
        (["benchmark_results", 0, "result", 0, "measurements"], ["1"]),
        (["benchmark_results", 0, "result", 2, "measurements"], [1.0, 2.0, 3.0]),
    ],
)
def test_pytorchs_report_damaged(tmp_path: Path, path: list[Any], value: Any) -> None:
    document = torch_report()
    place: Any = document
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    with pytest.raises(
        ValueError, match=r"r, which is not a report of PyTorch's DDP benchmark: at"
    ):
        load_run(write(tmp_path / "r", document))


# -- environments ----------------------------------------------------------------------------------


def test_differences_of_the_environment(tmp_path: Path) -> None:
    base, test = report(case("a")), report(case("a", 0.2))
    test["environment"] |= {"torch": "2.15.0", "devices": ["A100"]}
    test["environment"]["variables"] = {"NCCL_ALGO": "Tree", "NCCL_PROTO": "LL"}
    test["environment"]["ranks"][1]["cores"] = 4
    one, other = (load_run(write(tmp_path / "r", doc)) for doc in (base, test))
    found = {d.field: (d.base, d.test, d.hardware) for d in compare([one], [other]).differences}
    assert found == {
        "devices": (("H100",), ("A100",), True),
        "cores": (("8",), ("8, 4",), True),
        "torch": (("2.14.0",), ("2.15.0",), False),
        "variables.NCCL_ALGO": (("Ring",), ("Tree",), False),
        "variables.NCCL_PROTO": (("unset",), ("LL",), False),
    }
    assert list(found)[:2] == ["devices", "cores"]  # hardware first
    warnings = compare([one, other], [other, replace(one, status="running")]).warnings
    text = "\n".join(warnings)
    assert "the runs of BASE differ among themselves in torch, devices" in text
    assert "is not complete: its status is running" in text
    assert "hold the same run" in text


# -- the script ------------------------------------------------------------------------------------


SLOWER = ([[1.0, 1.0], [1.01, 1.01], [0.99, 0.99]], [[1.1, 1.0], [1.11, 1.01], [1.09, 0.99]])


def test_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, test = runs(tmp_path, "b", SLOWER[0]), runs(tmp_path, "t", SLOWER[1])
    document = json.loads(Path(test[0]).read_text())
    document["environment"]["devices"] = ["A100"]
    write(Path(test[0]), document)
    assert main(*base, "--test", *test) == 0
    out = capsys.readouterr().out
    assert "# WARNING: THE HARDWARE DIFFERS" in out
    assert "devices: H100 in BASE, A100 | H100 in TEST" in out
    assert re.search(r"^a +1 s +1.1 s +1.10x slower +1.07\d to 1.12\d +slower$", out, re.M)
    assert re.search(r"^b +1 s +1 s +1.00x +0.97\d to 1.02\d +undecided$", out, re.M)
    assert re.search(r"^geometric mean of 2 cases +1.05x slower", out, re.M)
    assert "# 1 slower, 1 undecided" in out
    assert re.search(r"about \d+ runs a side would narrow the intervals to \+-2 %", out)


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, test = runs(tmp_path, "b", SLOWER[0]), runs(tmp_path, "t", SLOWER[1])
    assert main(*base, "--test", *test, "--format", "json", "--margin", "5%") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["margin"] == 0.05
    assert [(c["key"], c["verdict"]) for c in found["cases"]] == [
        ({"model": "a"}, "slower"),
        ({"model": "b"}, "same"),
    ]
    assert found["cases"][0]["ratio"] == pytest.approx(1.1, rel=1e-4)
    low, high = found["cases"][0]["ci95"]
    assert low < 1.1 < high
    assert found["base"] == base


@pytest.mark.parametrize(
    ("flag", "status"),
    [("slower", 1), ("faster", 0), ("undecided", 1), ("faster,slower", 1), ("missing", 0)],
)
def test_fail_on(
    tmp_path: Path, flag: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    base, test = runs(tmp_path, "b", SLOWER[0]), runs(tmp_path, "t", SLOWER[1])
    assert main(*base, "--test", *test, "--fail-on", flag) == status
    err = capsys.readouterr().err
    assert ("compare.py: failed: " in err) == (status == 1)
    assert ("some cases are undecided" in err) == (status == 0)
    assert main(*test[:1], "--test", *base[:1], "--fail-on", "slower") == 0  # one run a side
    assert "some cases are undecided" in capsys.readouterr().err


def test_fail_on_missing(tmp_path: Path) -> None:
    base, test = runs(tmp_path, "b", SLOWER[0]), runs(tmp_path, "t", [[1.0], [1.01], [0.99]])
    assert main(*base, "--test", *test, "--fail-on", "missing") == 1
    assert main(*test, "--test", *base, "--fail-on", "missing") == 0


@pytest.mark.parametrize(
    ("base_s", "test_s", "status"), [(0.1, None, 1), (None, 0.1, 0), (None, None, 1)]
)
def test_missing_is_what_test_has_no_time_of(
    tmp_path: Path, base_s: float | None, test_s: float | None, status: int
) -> None:
    paths = []
    for side, time in (("base", base_s), ("test", test_s)):
        failed = {"check": "failed: no memory", "samples_s": []}
        second = case("b") | failed if time is None else case("b", time)
        paths.append(write(tmp_path / f"{side}.json", report(case("a"), second, argv=[side])))
    assert main(paths[0], "--test", paths[1], "--fail-on", "missing") == status


def test_whoever_reads_large_reports_ends_with_compare(tmp_path: Path) -> None:
    """By Ctrl-C and by SIGKILL, in the middle: the pipe that stands for the first never ends."""
    large = [
        write(
            tmp_path / f"{name}.json", json.dumps(report(case("a"))).ljust(reports.LARGE_BYTES + 1)
        )
        for name in ("one", "two")
    ]
    os.mkfifo(tmp_path / "pipe")
    for number in (signal.SIGINT, signal.SIGKILL):
        command = [sys.executable, SCRIPT, str(tmp_path / "pipe"), large[0], "--test", large[1]]
        with launch(command) as started:
            wait_until(lambda pid=started.process.pid: len(children(pid)) == 2, 60)  # type: ignore[misc]
            readers = children(started.process.pid)
            started.process.send_signal(number)
            assert started.wait(20) == -number
            wait_until(lambda pids=readers: not any(map(alive, pids)), 20)  # type: ignore[misc]


def test_folders_patterns_and_links(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for side in ("old [1]", "new"):
        (tmp_path / side).mkdir()
    base, test = (
        runs(tmp_path / folder, "r", SLOWER[i]) for i, folder in enumerate(("old [1]", "new"))
    )
    assert find_reports([str(tmp_path / "old [1]")]) == base
    assert find_reports([str(tmp_path / "new" / "r*.json")]) == test
    assert find_reports([*test, str(tmp_path / "new")]) == test
    (tmp_path / "link.json").symlink_to(base[0])
    os.link(base[0], tmp_path / "hard.json")
    for other in ("link.json", "hard.json", "old [1]/../old [1]/r0.json"):
        with pytest.raises(SystemExit, match="2"):
            main(*base, "--test", str(tmp_path / other))
        assert "is the same file as" in capsys.readouterr().err


def test_a_copy_is_no_evidence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, test = runs(tmp_path, "b", SLOWER[0]), runs(tmp_path, "t", SLOWER[1])
    copied = tmp_path / "copy.json"
    copied.write_text(Path(base[0]).read_text() + "\n")
    assert main(*base, str(copied), "--test", *test) == 0
    captured = capsys.readouterr()
    assert f"{copied} is left out: it holds the same run as {base[0]}" in captured.err
    assert "3 of BASE, 3 of TEST" in captured.out
    assert main(base[0], "--test", str(copied)) == 0
    assert "hold the same run" in capsys.readouterr().out


REPORT = json.dumps(report(case("a")))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "which is not JSON (it is empty)"),
        (REPORT[:-20], "which is not JSON ("),
        ("[]", "which is not a torchrun-bench report: at $: expected an object"),
        ('{"cases": []}', "which is not a torchrun-bench report: at schema: "),
        (REPORT.replace("bench/1", "bench/2"), "update torchrun-bench, e.g. git pull"),
        (REPORT.replace("0.1,", "NaN,"), "which is not JSON (NaN is not a number in JSON)"),
        (REPORT.replace("0.1,", "-0.1,"), "samples_s: expected seconds"),
        (REPORT.replace("0.1,", "1e999,"), "samples_s: expected seconds"),
        (REPORT.replace("0.1,", "true,"), "samples_s: expected seconds"),
        (json.dumps(report(case("a"), case("a"))), 'two cases of the key {"model": "a"}'),
        (json.dumps(report(case("\x1b]0;x\x07", check="\x1b[2J"))), "or skipped: ..., got"),
    ],
)
@pytest.mark.parametrize("side", ["base", "test"])
def test_bad_reports(
    tmp_path: Path, content: str, message: str, side: str, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = write(tmp_path / "good.json", report(case("a"))), tmp_path / "b\x1bd.json"
    bad.write_text(content)
    with pytest.raises(SystemExit, match="2"):
        main(*((str(bad), "--test", good) if side == "base" else (good, "--test", str(bad))))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert "b\\x1bd.json" in captured.err
    assert "\x1b" not in captured.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["missing.json", "--test", "good.json"], "missing.json: No such file or directory"),
        (["empty", "--test", "good.json"], "there is no *.json in the folder empty"),
        (["x*.json", "--test", "good.json"], "no file matches x*.json"),
        (["/dev/null", "--test", "good.json"], "/dev/null, which is not a file"),
        (["good.json"], "expected --test and the reports to compare with BASE"),
        (["--test", "good.json"], "expected reports before --test, got none"),
        ([], "expected reports before --test, got none"),
        (["a", "--test", "b", "--margin", "200%"], "less than 100%"),
        (["a", "--test", "b", "--margin", "0"], "expected more than 0"),
        (["a", "--test", "b", "--fail-on", "slow"], "unknown 'slow'; did you mean slower?"),
        (["a", "--test", "b", "--format", "html"], "invalid choice: 'html'"),
        (["a", "--test", "b", "--histroy", "c"], "unknown argument '--histroy'; did you mean"),
        (["a", "--test", "b", "--single-run", "--paired"], "no effect with --paired"),
        (["a", "--test", "b", "--single-run", "--interleaved"], "no effect with --interleaved"),
        (["--history", "h", "--interleaved"], "--interleaved has no effect with --history"),
        (["--history", "h", "--test", "b"], "--test has no effect with --history"),
        (["--history", "missing"], "--history missing: expected a folder of reports"),
        (["x" * 300, "--test", "good.json"], "x: File name too long"),
        (["--history", "x" * 300], "x: expected a folder of reports"),
        (["--history", "empty"], "there is no report in it that can be used"),
        (["good.json", "--test", "big.json", "--max-size", "1K"], "has 0.00205 MB, over"),
        (["good.json", "--test", "other.json"], "no case is on both sides"),
        (["good.json", "second.json", "--test", "third.json", "--single-run"], "2 and 1 runs"),
        (["good.json", "--test", "second.json", "--measure", "x"], "no case has the time 'x'"),
    ],
)
def test_refused(
    tmp_path: Path,
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for i, name in enumerate(("good", "second", "third")):
        write(tmp_path / f"{name}.json", report(case("a", 1 + i)))
    write(tmp_path / "other.json", report(case("z")))
    write(tmp_path / "big.json", json.dumps(report(case("a"))).ljust(2048))
    with pytest.raises(SystemExit, match="2"):
        main(*words)
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


HOSTILE = "\x1b[31m<script>alert(1)</script>|`x`\n\r\x9b\u202e\u2028\ud800*b*[l](u)\x00"


def hostile(document: Any) -> Any:
    """Every string that a report is free to choose, and every name, with HOSTILE in it."""
    if isinstance(document, dict):
        return {name + HOSTILE: hostile(value) for name, value in document.items()}
    if isinstance(document, list):
        return [hostile(item) for item in document]
    return document + HOSTILE if isinstance(document, str) else document


@pytest.mark.parametrize("form", ["table", "markdown", "json", "history", "history markdown"])
def test_nothing_of_a_report_reaches_the_terminal(
    tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = []
    for i in range(12):
        time_s = 1 + i // 6 + i / 100
        cases = [
            case("x", time_s, label="x" + HOSTILE, key={"k" + HOSTILE: HOSTILE}),
            case("y", time_s, label="x" + HOSTILE, key={"k" + HOSTILE: "other" + HOSTILE}),
            case("z", key={"z": HOSTILE}, label=HOSTILE, check=f"failed: {HOSTILE}"),
            case(f"{i % 3}", label=HOSTILE),
        ]
        document = report(*cases, day=i + 1, benchmark="bench" + HOSTILE)
        document["environment"] = hostile(ENVIRONMENT) | {
            "devices": [HOSTILE],
            "topologies": [HOSTILE + str(i // 6)],
            "variables": {HOSTILE: str(i)},
            "torch": HOSTILE + str(i),
        }
        paths.append(write(tmp_path / f"{i}.json", document))
    words = [*paths[:6], "--test", *paths[6:], "--format", form.rpartition(" ")[2]]
    if form.startswith("history"):
        words = ["--history", str(tmp_path), *(["--format", "markdown"] if " " in form else [])]
    assert main(*words) == 0
    out = capsys.readouterr().out
    assert "script" in out
    allowed = {"\n"}
    assert all(c.isprintable() or c in allowed for c in out)
    if form.endswith("markdown"):
        assert not re.search(r"(?<!\\)[<`\[]", out)
        tables = re.findall(r"(?:^\|.*\n)+", out, re.M)
        assert len(tables) == (2 if form.startswith("history") else 1)
        for table in tables:  # as many cells in every row
            cells = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
            assert len(cells) == 1
    if form == "json":
        json.loads(out)


def test_text() -> None:
    assert printable("a\x1b[1mb\u202ec\nd\té") == "a\\x1b[1mb\\u202ec\\nd\\té"
    assert printable("x" * 200, 10) == "xxxxxxx..."
    assert markdown("a|b`c`<d>\\ it's; 1") == "a&#124;b&#96;c&#96;&#60;d&#62;&#92; it's; 1"


# -- as a program ----------------------------------------------------------------------------------


def test_neither_torch_nor_scipy_nor_matplotlib_is_imported(tmp_path: Path) -> None:
    base, test = runs(tmp_path, "b", SLOWER[0]), runs(tmp_path, "t", SLOWER[1])
    for words in ([*base, "--test", *test], ["--history", str(tmp_path)]):
        done = run([sys.executable, "-X", "importtime", SCRIPT, *words], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        imported = {line.split("|")[-1].strip().split(".")[0] for line in done.stderr.splitlines()}
        assert "numpy" in imported  # so that this list is one of modules
        assert not imported & {"torch", "torchvision", "scipy", "matplotlib", "jinja2", "pandas"}


def test_a_full_disk_and_a_closed_pipe(tmp_path: Path) -> None:
    base, test = runs(tmp_path, "b", SLOWER[0]), runs(tmp_path, "t", SLOWER[1])
    command = [sys.executable, SCRIPT, *base, "--test", *test]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "compare.py: error: cannot print: No space left on device\n"
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    document = report(case("é", 1.0))
    paths = [write(tmp_path / f"é{i}.json", document | {"started_at": str(i)}) for i in (1, 2)]
    done = subprocess.run(
        [sys.executable, SCRIPT, paths[0], "--test", paths[1]],
        capture_output=True,
        text=True,
        timeout=60,
        env=ascii_only,
    )
    assert done.returncode == 0, done.stderr
    assert "\\xe9" in done.stdout


def test_large_reports_fit_into_memory() -> None:
    done = run([sys.executable, str(ROOT / "tests" / "unit" / "large_reports.py")], timeout=250)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    assert measured["cases"] == 1000
    assert measured["peak_mib"] < 1024


# -- how often it is wrong -------------------------------------------------------------------------

simulation: Any = importlib.import_module("unit.simulate_compare")


@pytest.mark.parametrize("name", list(simulation.SCENARIOS)[:6])
def test_coverage_on_simulated_runs(name: str) -> None:
    """93 to 97 % of the intervals hold the truth; 3,000 of them are within 1.3 % of their rate."""
    rng = np.random.default_rng(7)
    for size in (2, 3, 6):
        found = simulation.comparison(
            simulation.SCENARIOS[name], 3000, (size, size), rng, ratio=1.05
        )
        assert 0.93 < simulation.coverage(found, 1.05) < 0.97


def test_a_wrong_interval_would_be_noticed() -> None:
    """Treating iterations as evidence, as --single-run does, covers far less where runs differ."""
    scenario = simulation.SCENARIOS["independent iterations"]
    rng = np.random.default_rng(7)
    found = simulation.comparison(scenario, 500, (1, 1), rng, single_run=True)
    assert simulation.coverage(found) < 0.8
    alike = scenario | {"scatter": 0.0}
    found = simulation.comparison(alike, 1500, (1, 1), rng, single_run=True)
    assert 0.93 < simulation.coverage(found) < 0.995


def test_equal_runs_are_rarely_called_different_and_slower_ones_are_found() -> None:
    rng = np.random.default_rng(7)
    alike = simulation.verdicts(0.03, 4, [1.0] * 6, 150, rng)
    assert np.mean(abs(alike) == 1) < 0.05
    slower = simulation.verdicts(0.01, 4, [1.05] * 6, 50, rng)
    assert np.mean(slower == 1) > 0.9


def test_large_reports_are_read_two_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = []
    for day in range(1, 5):
        paths.append(str(tmp_path / f"{day}.json"))
        Path(paths[-1]).write_text(json.dumps(report(case("a", 0.1 * day), day=day)))
    one_by_one = reports.load_runs(paths)
    readers: list[int] = []
    pool = reports.ProcessPoolExecutor
    monkeypatch.setattr(
        reports,
        "ProcessPoolExecutor",
        lambda n, *args, **more: readers.append(n) or pool(n, *args, **more),
    )
    monkeypatch.setattr(reports, "LARGE_BYTES", 10)
    together = reports.load_runs(paths)
    assert readers == [2]
    assert [run.digest for run in together] == [run.digest for run in one_by_one]
    assert [run.path for run in together] == paths
    Path(paths[2]).write_text('{"half": ')
    with pytest.raises(ValueError, match=r"3\.json"):
        reports.load_runs(paths)
    monkeypatch.setattr(
        reports, "read_json", lambda path, limit: os.kill(os.getpid(), signal.SIGKILL)
    )
    with pytest.raises(
        ValueError, match=r"1\.json, or a report after it: the process that read it"
    ):
        reports.load_runs(paths)
