"""analysis/compare.py: verdicts, printed lines, and when a gate passes."""

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.compare import cells, outcome_of, show, verdict_text
from analysis.runs.load import Run, load
from analysis.runs.verdicts import Comparison, Design, Result, compare, judge_all, sign_flip_test
from tests.pure.reports import case, run, runs, start, write


def compared(folder: Path, base: list[float], test: list[float], **design: Any) -> Comparison:
    paths = runs(folder / "a", base), runs(folder / "b", test)
    return compare(load([paths[0]]), load([paths[1]]), Design(**design))


def exp(*logs: float) -> list[float]:
    return [math.exp(x) for x in logs]


def test_the_example_of_the_page_by_hand(tmp_path: Path) -> None:
    (found,) = compared(tmp_path, exp(-0.01, 0.01), exp(0.09, 0.11)).cases
    assert found.ratio == pytest.approx(math.exp(0.1))
    # the error is 0.014142, t(2) = 4.3027 at 97.5%, half the interval 0.06085
    assert found.interval == pytest.approx(tuple(exp(0.1 - 0.06085, 0.1 + 0.06085)), rel=1e-4)
    # t = 0.1 / 0.014142 = 7.071; two-sided for 2 degrees of freedom: 1 - t / sqrt(t^2 + 2)
    assert found.p == pytest.approx(0.01942, abs=2e-5)
    # z = 1.2816 at 90%: c = 4.3027 + 1.2816 * sqrt(1 + (c^2 + 18.513) / 4) has c = 13.43
    assert found.smallest_change == pytest.approx(math.exp(13.43 * 0.014142) - 1, rel=1e-3)


def test_welch_by_hand(tmp_path: Path) -> None:
    for base, test, half in (
        # Welch: s = 0.09 / 3, t = 0.05 / 5; (s + t)^2 / (s^2 / 2 + t^2 / 4) = 3.368 degrees of
        # freedom, so 2.9943 * sqrt(0.04); one variance for both would say 2.447 * 0.1838
        ([-0.3, 0, 0.3], [0.02**0.5 * i for i in (-2, -1, 0, 1, 2)], 0.59886),
        # as many runs, but only one side scatters: 2 degrees of freedom, 4.3027 * sqrt(0.03)
        ([-0.3, 0, 0.3], [0.1, 0.1, 0.1], 0.74525),
        # the scatter of a single run is unknown: 4.3027 * sqrt(0.09 * (1 / 3 + 1))
        ([-0.3, 0, 0.3], [0.1], 1.49050),
    ):
        (found,) = compared(tmp_path / str(half), exp(*base), exp(*test)).cases
        middle = sum(test) / len(test) - sum(base) / len(base)
        assert found.interval == pytest.approx(tuple(exp(middle - half, middle + half)), rel=2e-4)


def test_pairs_cancel_a_drift(tmp_path: Path) -> None:
    base = [1.0, 1.2, 1.5, 1.9]
    test = [time * (1.05 + 0.001 * (-1) ** i) for i, time in enumerate(base)]
    (alone,) = compared(tmp_path, base, test).cases
    (paired,) = compared(tmp_path, base, test, paired=True).cases
    assert (alone.verdict, paired.verdict) == ("undecided", "slower")
    assert paired.pair_ratios == pytest.approx([1.051, 1.049, 1.051, 1.049])
    with pytest.raises(ValueError, match="same number of runs on both sides, got 4 and 1"):
        compared(tmp_path / "c", base, [1.0], paired=True)


def test_the_time_of_a_run_is_made_of_its_blocks(tmp_path: Path) -> None:
    """Of interleaved runs, two additional blocks of TEST do not count."""
    for base, test, blocks, ratio in (
        # the geometric mean of 1.05, 1.10 and 1.463, each twice
        ([0.040, 0.060, 0.041], [0.042, 0.066, 0.060], 6, (1.05 * 1.1 * 60 / 41) ** (1 / 3)),
        # with 5 blocks, or if one took 0 s, the median of a run counts: 41 and 60 ms; 41 ms
        ([0.040, 0.060, 0.041], [0.042, 0.066, 0.060], 5, 60 / 41),
        ([0.000, 0.060, 0.041], [0.070, 0.066, 0.050], 6, (70 * 66 * 50) ** (1 / 3) / 41),
    ):
        loaded: list[list[Run]] = []
        for times, more in ((base, []), (test, [9.0] * 6)):
            each = [time for time in (times * 2)[:blocks] for _ in range(3)]
            for samples in (each, each + more):
                line = case("x", samples, rounds=[3] * (len(samples) // 3))
                loaded.append(load([write(tmp_path / f"{len(loaded)}.jsonl", line)]))
        a, _, b, longer = loaded
        for design in (Design(), Design(paired=True), Design(paired=True, interleaved=True)):
            (found,) = compare(a, b, design).cases
            assert found.ratio == pytest.approx(ratio)
        (found,) = compare(a, longer, design).cases
        assert found.ratio == pytest.approx(ratio)


def test_false_discoveries_by_hand() -> None:
    """Of ten cases, five differ by 1.7 to 4 standard errors and have p <= 0.05.
    Benjamini and Hochberg at 5%: 0.0187 > 0.05 * 2 / 10, so only the first is significant."""
    scatter = [-0.01, 0.01, -0.01, 0.01, -0.01, 0.01]
    cases = []
    for shift in (0.03, 0.016, *[0.014] * 3, *[0.001] * 5):
        cases.append(Result("x", {}, base_s=[1.0] * 6, test_s=exp(*[shift + x for x in scatter])))
    judge_all(cases, Design(margin=0.001, paired=True))
    assert [result.verdict for result in cases[:5]] == ["slower"] + ["undecided"] * 4
    p = [result.p or 0 for result in cases]
    assert p[0] < 0.005 < 0.01 < p[1] < p[2] < 0.05


def test_the_sign_flip_test_by_hand() -> None:
    """Of the 64 choices of signs of 1 to 6, 2 have a sum of +-21, and 4 one of +-19 or more."""
    assert sign_flip_test(np.arange(1.0, 7)) == 2 / 64
    assert sign_flip_test(np.array([-1.0, 2, 3, 4, 5, 6])) == 4 / 64
    assert sign_flip_test(np.ones(7)) == 2 / 128
    assert sign_flip_test(np.array([-1.0, 1] * 3)) == 1  # the mean is 0
    assert sign_flip_test(np.ones(40)) == pytest.approx(1 / 8193)  # no random choice is as far
    assert sign_flip_test(np.ones(40) * [*[1] * 28, *[-1] * 12]) == pytest.approx(0.0166, abs=0.004)
    for logs, interleaved, verdict in (
        ([0.08, 0.09, 0.1, 0.11, 0.12, 0.1], False, "slower"),
        ([-0.08, -0.09, -0.1, -0.11, -0.12, -0.1], False, "faster"),
        # one sign differs: t = 5.0, p = 0.004, but 4 of 64 choices of signs are as far out
        ([-0.001, 0.09, 0.1, 0.11, 0.12, 0.1], False, "undecided"),
        ([-0.001, 0.09, 0.1, 0.11, 0.12, 0.1], True, "slower"),  # blocks alternated
        ([0.08, 0.09, 0.1, 0.11, 0.12], False, "slower [5 pairs]"),
        ([0.001, -0.001, 0.002], False, "same [3 pairs]"),
    ):
        result = Result("x", {}, base_s=[1.0] * len(logs), test_s=exp(*logs))
        judge_all([result], Design(paired=True, interleaved=interleaved))
        assert verdict_text(result) == verdict
        assert cells(result)[1] == "1.000 s"  # also with an empty key
        if verdict == "undecided":
            why = "the interval excludes 1, but a sign-flip test of the pairs does not (p = 0.062)"
            assert result.reason == why


def test_runs_needed_by_hand(tmp_path: Path) -> None:
    """Runs differ by s = 0.02: the smallest n with t(2n - 2) * s * sqrt(2 / n) <= ln 1.02."""
    side = exp(-0.02, 0, 0.02)
    comparison = compared(tmp_path, side, side)
    # t(18) = 2.101: 0.01879 <= 0.0198; n = 9: 0.01999
    assert comparison.cases[0].runs_needed == 10
    line = "# 10 runs per side narrow the intervals to +-2% about half of the time, and give a"
    assert f"{line} verdict less often; 30 give one in about 9 of 10 compar" in show(comparison)
    # pairs with ratios that differ as much: t(n - 1) * s / sqrt(n) is 0.0185 for 7, 0.0210 for 6
    (paired,) = compared(tmp_path / "p", [1.0] * 3, side, paired=True).cases
    assert paired.runs_needed == 7


def test_geometric_mean_by_hand(tmp_path: Path) -> None:
    for side, factor in (("a", 1.0), ("b", 1.1)):
        lines = [case("x", [factor]), case("y", [2 * factor * factor])]
        write(tmp_path / f"{side}.jsonl", *lines)
    base, test = (load([str(tmp_path / f"{side}.jsonl")]) for side in "ab")
    mean = compare(base, test, Design()).mean
    assert mean is not None
    assert mean.ratio == pytest.approx(1.1**1.5)


def test_a_warning_if_one_side_ran_before_the_other(tmp_path: Path) -> None:
    base = runs(tmp_path / "a", [1.0, 1.1, 1.0])  # started at 0, 1 and 2 h
    test = tmp_path / "b"
    for hour in (4, 5, 6):
        write(test / f"{hour}.jsonl", case("no ddp", [1.0]), started_at=start(hour))
    words = ("compare.py", base, "--test", str(test))
    late = "# warning: all runs of one side started before all of the other: the ratio includes"
    for swapped in (words, ("compare.py", str(test), "--test", base)):
        assert late in run(*swapped).stdout
    assert late not in run(*words, "--paired").stdout
    write(test / "6.jsonl", case("no ddp"), started_at=start(1))
    assert "# warning" not in run(*words).stdout


def test_environment_and_hardware(tmp_path: Path) -> None:
    for side, torch, device, watts in (("a", "2.14", "H100", "700"), ("b", "2.15", "A100", "400")):
        gpus = [[{"index": "0", "power.limit": watts, "temperature.gpu": watts}]]
        same = {"variables": {"OMP_NUM_THREADS": "1"}}
        about = {"torch": torch, "devices": [device], "gpus": gpus} | same
        write(tmp_path / f"{side}.jsonl", case("x"), environment=about)
    done = run("compare.py", str(tmp_path / "a.jsonl"), "--test", str(tmp_path / "b.jsonl"))
    assert re.findall(r"# (.*) in BASE, (.*) in TEST", done.stdout) == [
        ("THE HARDWARE DIFFERS: devices: H100", "A100"),
        ("THE HARDWARE DIFFERS: GPU power.limit: 700", "400"),
        ("environment: torch: 2.14", "2.15"),
    ]


FAILED = case("x", check="failed: out of memory", samples_s={}, rounds=[])
BARE = case("a probe", samples_s={}, rounds=[], metrics={})  # as node_check.py writes it


def test_a_gate_without_enough_evidence_does_not_pass(tmp_path: Path) -> None:
    """A case without a number on both sides needs no verdict."""
    for base, test, verdict, status, outcome in (
        ([1, 1.001, 0.999, 1], [1, 1.001, 0.999, 1], "same", 0, "pass"),
        ([1.1, 1.11, 1.09, 1.1], [1, 1.01, 0.99, 1], "faster", 0, "pass"),
        ([1, 1.01, 0.99, 1], [1.1, 1.11, 1.09, 1.1], "slower", 1, "failed (1 slower)"),
        ([1], [3], "undecided", 4, "no verdict (1 undecided)"),
        ([1, 1.3, 0.8], [1.1, 1.4, 0.9], "undecided", 4, "no verdict (1 undecided)"),
    ):
        sides = [tmp_path / verdict / side for side in "ab"]
        for folder, times in zip(sides, (base, test), strict=True):
            for i, seconds in enumerate(times):
                write(folder / f"{i}.jsonl", case("x", [seconds]), BARE)
        words = ("compare.py", str(sides[0]), "--test", str(sides[1]))
        assert run(*words).returncode == 0  # without a gate
        done = run(*words, "--fail-on", "slower")
        assert done.returncode == status
        assert f"\n# 1 {verdict}\n" in done.stdout
        assert done.stdout.endswith(f"\n# --fail-on slower: {outcome}\n")
        assert "a probe" not in done.stdout
        assert (done.stdout.count(outcome), done.stderr) == (1, "")  # printed once


def test_a_gate_counts_each_case_once() -> None:
    """The mean is not a case, but it may be slower although no single case is significantly so."""
    for verdicts, mean, outcome in (
        (["slower"] * 6, "slower", ("failed", "6 slower")),
        (["slower", "faster", "missing"], "same", ("failed", "1 slower, 1 missing")),
        (["undecided", "same"], "slower", ("failed", "the mean is slower")),
        (["undecided", "same"], "undecided", ("no verdict", "1 undecided")),
    ):
        cases = [Result("x", {"n": n}, "", verdict) for n, verdict in enumerate(verdicts)]
        comparison = Comparison(cases, Result("x", {}, "", mean), [], [], [], [], Design())
        assert outcome_of(comparison, ["slower", "missing"]) == outcome


def test_cases_that_cannot_be_compared_are_named(tmp_path: Path) -> None:
    mended = case("mended")
    failed = FAILED | {"key": mended["key"], "name": "mended"}
    base = write(tmp_path / "a.jsonl", case("x"), case("z"), failed)
    test = write(tmp_path / "b.jsonl", FAILED, mended, case("late"))
    comparison = compare(load([base]), load([test]), Design())
    verdicts = {result.label: result.verdict for result in comparison.cases}
    assert verdicts == {"x": "failed", "z": "missing", "mended": "new", "late": "new"}
    assert comparison.cases[0].reason == "TEST: no time in 1 of 1 runs: failed: out of memory"
    done = run("compare.py", base, "--test", test, "--fail-on", "slower")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.endswith("\n# --fail-on slower: failed (1 failed)\n")
    test = write(tmp_path / "c.jsonl", mended, case("late"))  # new cases do not count
    outcomes = ("slower", 4, "no verdict (2 missing)"), ("missing", 1, "failed (2 missing)")
    for fail_on, status, words in outcomes:
        done = run("compare.py", base, "--test", test, "--fail-on", fail_on)
        assert done.returncode == status
        assert done.stdout.endswith(f"\n# --fail-on {fail_on}: {words}\n")
    bare = [write(tmp_path / f"{side}.jsonl", BARE) for side in "cd"]
    assert "has a time or a metric" in run("compare.py", bare[0], "--test", bare[1]).stderr


def test_unmatched_cases_suggest_the_flag_that_joins_them(tmp_path: Path) -> None:
    sides = []
    for size, hook in ((25, "none"), (100, "bf16")):
        key = {"model": "resnet18", "bucket_size_mb": size, "comm_hook": hook}
        sides.append(write(tmp_path / f"{size}.jsonl", case("1M/2G", key=key), case("no ddp")))
    words = ("compare.py", sides[0], "--test", sides[1])
    flag = ("--ignore-key", "bucket_size_mb,comm_hook")
    assert f"have different keys; {' '.join(flag)} joins them\n" in run(*words).stdout
    assert "2 undecided" in run(*words, *flag).stdout
    for other, told in ((1.0, "1.0"), (True, "True"), ("1", '"1"')):
        sides = []
        for value in (1, other):
            path = tmp_path / f"{type(value).__name__}.jsonl"
            sides.append(write(path, case("x", key={"n": value})))
        shown = run("compare.py", sides[0], "--test", sides[1]).stderr
        line = f"the keys differ in n (1 in BASE, {told} in TEST); --ignore-key n joins these cases"
        assert f"{line}\n" in shown


def test_pytorchs_ddp_benchmark_is_compared_with_ddp_sweep(tmp_path: Path) -> None:
    """PyTorch's script sets no precision, like `--dtype default`. fp32 differs from that."""
    results = [{"ranks": [0], "measurements": [0.2]}, {"ranks": [0, 1], "measurements": [0.3] * 2}]
    entry = {"model": "resnet18", "batch_size": 8, "result": results}
    about = {"distributed_backend": "gloo", "bucket_size": 25, "benchmark_results": [entry]}
    old, new = tmp_path / "old.json", tmp_path / "new.jsonl"
    old.write_text(json.dumps({"pytorch_version": "1.4.0", "cuda_version": "10.1"} | about))
    key: dict[str, Any] = {"model": "resnet18", "batch_size": 8, "image_size": 224, "ranks": 2}
    key |= {"world_size": 2, "ddp": True, "device": "cuda", "backend": "gloo", "breakdown": True}
    key |= {"bucket_size_mb": 25.0, "comm_hook": "none", "global_batch": None}
    key |= {"find_unused_parameters": False, "gradient_as_bucket_view": False}
    key |= {"static_graph": False, "accumulate": 1, "a later field": True}
    words = ("compare.py", str(old), "--test", str(new))
    write(new, case("1M/2G", key=key | {"dtype": "default"}))
    done = run(*words)
    assert re.search("2 ranks +300.0 ms +100.0 ms", done.stdout), done.stdout + done.stderr
    assert f"# warning: {old}: PyTorch's script waits for the device in" in done.stdout
    write(new, case("1M/2G", key=key | {"dtype": "default", "bucket_size_mb": "default"}))
    # DDP chose the buckets. The first case of BASE, without DDP, is not the most similar one.
    told = "differ in bucket_size_mb (25.0 in BASE, default in TEST); --ignore-key bucket_size_mb"
    assert told in run(*words).stderr
    write(new, case("1M/2G", key=key | {"dtype": "fp32"}))
    assert "no case is on both sides" in run(*words).stderr
    done = run(*words, "--ignore-key", "dtype")
    assert "# environment: key.dtype: default in BASE, fp32 in TEST" in done.stdout


@pytest.mark.parametrize("is_pytorch", [False, True])
def test_rounded_samples_widen_the_interval(tmp_path: Path, is_pytorch: bool) -> None:
    """0.33 and 0.34 s are 1.0303 apart, and each may be off by 0.005: 1.5152% and 1.4706%. The
    interval without any scatter is 1.0303 * (1 - 0.015152) * (1 - 0.014706) = 0.9998 to 1.062."""
    for side, number in itertools.product((0, 1), range(3)):
        path, times = tmp_path / f"{side}{number}.json", [0.33 + 0.01 * side] * 20
        if is_pytorch:
            result = [{"ranks": [0], "measurements": times}]
            entry = {"model": "resnet18", "batch_size": 8, "result": result}
            about = {"distributed_backend": "gloo", "bucket_size": 25, "cuda_version": str(path)}
            path.write_text(json.dumps(about | {"benchmark_results": [entry]}))
        else:
            write(path, case("no ddp", times), case("another", times))
    done = run("compare.py", f"{tmp_path}/0*.json", "--test", f"{tmp_path}/1*.json")
    for name in ("no ddp +330.0 ms +340.0 ms", *(("geometric .*",) if not is_pytorch else ())):
        row = rf"^{name} +1.03x slower +0.9998 to 1.062 +undecided"
        assert re.search(row, done.stdout, re.MULTILINE), done.stdout
    assert "undecided: numbers are so coarse that they may be off by 1.5%" in done.stdout


def test_no_control_sequence_of_a_report_reaches_the_terminal(tmp_path: Path) -> None:
    bad = "\x1b[31m<b>|`x`\n"
    for side, check in (("a", "passed"), ("b", f"failed: {bad}")):
        about = {"environment": {"torch": bad + check, bad: bad + check}, "benchmark": bad}
        write(tmp_path / f"{side}.jsonl", case(bad, check=check), case("x"), **about)
    done = run("compare.py", str(tmp_path / "a.jsonl"), "--test", str(tmp_path / "b.jsonl"))
    assert (done.returncode, done.stdout.count("\x1b")) == (0, 0), done.stderr


def test_outlying_runs_are_named(tmp_path: Path) -> None:
    """Of 12 nights at 100 ms, 2% apart, two took 150 and 60 ms. At least five runs are needed."""
    times = [0.1, 0.102, 0.1, 0.098, 0.15, 0.101, 0.1, 0.099, 0.06, 0.1, 0.1, 0.102]
    for number, seconds in enumerate(times):
        write(tmp_path / "nights" / f"{number:02}.jsonl", case("x", [seconds] * 6))
    today = write(tmp_path / "today.jsonl", case("x", [0.13] * 6))
    nights = str(tmp_path / "nights")
    shown = run("compare.py", nights, "--test", today).stdout
    assert f"outliers among the runs of BASE: {nights}/04.jsonl (1.50 times the median), " in shown
    assert f"{nights}/08.jsonl (0.60 times the median); they count, and widen the" in shown
    for number in range(12):  # another benchmark ran before each; its runs are not mixed in
        path = tmp_path / "nights" / f"other{number}.jsonl"
        write(path, case("x", [0.1] * 6), benchmark="other", started_at="2025-01-01T00:00:00+00:00")
    shown = run("compare.py", nights, "--test", today).stdout
    assert f"outliers among the runs of BASE: {nights}/04.jsonl (1.50 times the median), " in shown
    few = [f"{nights}/{number:02}.jsonl" for number in (0, 1, 2, 4)]
    assert "outliers" not in run("compare.py", *few, "--test", today).stdout
