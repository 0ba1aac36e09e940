"""analysis/compare.py: verdicts by hand-worked numbers, what it prints, and how it says no."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from analysis.compare import outcome_of, show
from analysis.load import load
from analysis.verdicts import Comparison, Design, Result, compare, judge, judge_all
from tests.pure.reports import alike, case, run, runs, write


def judged(base: Path | str, test: Path | str, **design: Any) -> Comparison:
    return compare(load([str(base)]), load([str(test)]), Design(**design))


def compared(folder: Path, base: list[float], test: list[float], **design: Any) -> Comparison:
    return judged(runs(folder / "base", base), runs(folder / "test", test), **design)


@pytest.mark.parametrize(
    ("base", "test", "verdict"),
    [
        ([1.00, 1.01, 0.99, 1.0], [1.10, 1.11, 1.09, 1.1], "slower"),
        ([1.10, 1.11, 1.09, 1.1], [1.00, 1.01, 0.99, 1.0], "faster"),
        ([1.000, 1.001, 0.999, 1.0], [1.000, 1.001, 0.999, 1.0], "same"),
        ([1.0, 1.3, 0.8], [1.1, 1.4, 0.9], "undecided"),
        ([1.0], [3.0], "undecided"),
    ],
)
def test_verdict(tmp_path: Path, base: list[float], test: list[float], verdict: str) -> None:
    (found,) = compared(tmp_path, base, test).cases
    assert found.verdict == verdict


def test_interval_by_hand(tmp_path: Path) -> None:
    # logs -0.01, 0.01 and 0.09, 0.11: s = 0.01414, t(2) = 4.303, half = t * s = 0.06085
    base, test = ([math.exp(x) for x in side] for side in ((-0.01, 0.01), (0.09, 0.11)))
    (found,) = compared(tmp_path, base, test).cases
    assert found.ratio == pytest.approx(math.exp(0.1))
    assert found.interval == pytest.approx(
        (math.exp(0.1 - 0.06085), math.exp(0.1 + 0.06085)), rel=1e-4
    )
    # t = 0.1 / 0.01414 = 7.071; two-sided for 2 degrees of freedom: 1 - t / sqrt(t^2 + 2) = 0.01942
    assert found.p == pytest.approx(0.01942, abs=2e-5)


@pytest.mark.parametrize(
    ("base", "test", "half"),
    [
        # Welch: s = 0.09 / 3, t = 0.05 / 5; (s + t)^2 / (s^2 / 2 + t^2 / 4) = 3.368 degrees of
        # freedom, so 2.9943 * sqrt(0.04); one variance for both would say 2.447 * 0.1838
        ([-0.3, 0, 0.3], [0.02**0.5 * i for i in (-2, -1, 0, 1, 2)], 0.59886),
        # the same number of runs, but one side alone scatters: 2 degrees, 4.3027 * sqrt(0.03)
        ([-0.3, 0, 0.3], [0.1, 0.1, 0.1], 0.74525),
        # one run has no scatter of its own: 4.3027 * sqrt(0.09 * (1 / 3 + 1))
        ([-0.3, 0, 0.3], [0.1], 1.49050),
    ],
)
def test_welch_by_hand(tmp_path: Path, base: list[float], test: list[float], half: float) -> None:
    sides = ([math.exp(x) for x in side] for side in (base, test))
    (found,) = compared(tmp_path, *sides).cases
    assert found.interval is not None
    assert math.log(found.interval[1] / (found.ratio or 0)) == pytest.approx(half, rel=2e-4)
    assert math.log((found.ratio or 0) / found.interval[0]) == pytest.approx(half, rel=2e-4)


def test_pairs_cancel_a_drift(tmp_path: Path) -> None:
    base = [1.0, 1.2, 1.5, 1.9]
    test = [time * (1.05 + 0.001 * (-1) ** i) for i, time in enumerate(base)]
    (alone,) = compared(tmp_path / "a", base, test).cases
    (paired,) = compared(tmp_path / "b", base, test, paired=True).cases
    assert (alone.verdict, paired.verdict) == ("undecided", "slower")
    assert paired.pair_ratios == pytest.approx([1.051, 1.049, 1.051, 1.049])
    with pytest.raises(ValueError, match="pairs need as many runs a side, got 4 and 3"):
        compared(tmp_path / "c", base, test[:3], paired=True)


@pytest.mark.parametrize(
    ("base", "test", "blocks", "ratio"),
    [
        # 1.05, 1.10 and 1.46 twice, so 1.10
        ([0.040, 0.060, 0.041], [0.042, 0.066, 0.060], 6, 1.10),
        # of 5 blocks, or with one of 0 s, the runs' medians count: 41 and 60 ms, 41 and 66
        ([0.040, 0.060, 0.041], [0.042, 0.066, 0.060], 5, 60 / 41),
        ([0.000, 0.060, 0.041], [0.070, 0.066, 0.050], 6, 66 / 41),
    ],
)
def test_runs_that_took_turns_are_compared_block_by_block(
    tmp_path: Path, base: list[float], test: list[float], blocks: int, ratio: float
) -> None:
    for side, times in (("a", base), ("b", test)):
        for i in range(2):
            each = [t for t in (times * 2)[:blocks] for _ in range(3)]
            line = case("x", each, rounds=[3] * blocks)
            write(tmp_path / side / f"{i}.jsonl", line, started_at=f"2026-01-01T0{i}:00:00")
    a, b = tmp_path / "a", tmp_path / "b"
    (found,) = judged(a, b, paired=True, interleaved=True).cases
    assert found.pair_ratios == pytest.approx([ratio, ratio])
    (medians,) = judged(a, b, paired=True).cases
    assert medians.pair_ratios == pytest.approx([sorted(test)[1] / sorted(base)[1]] * 2)


def test_false_discoveries_by_hand() -> None:
    """Of ten cases that differ by 1.7 to 4 standard errors; p is at most 0.05 in five of them.

    Benjamini and Hochberg at 5 %: 0.0187 > 0.05 * 2 / 10, so only the first one counts.
    """
    scatter = [-0.01, 0.01, -0.01, 0.01, -0.01, 0.01]
    shifts = [0.03, 0.016, *[0.014] * 3, *[0.001] * 5]
    cases = []
    for shift in shifts:
        ratios = [math.exp(shift + x) for x in scatter]
        cases.append(Result("x", {}, pair_ratios=ratios))
    judge_all(cases, Design(margin=0.001, paired=True))
    p = [case.p or 0 for case in cases]
    assert [case.verdict for case in cases[:5]] == ["slower"] + ["undecided"] * 4
    assert p[0] < 0.005 < 0.01 < p[1] < p[2] < 0.05


def test_looking_more_often_needs_more_evidence(tmp_path: Path) -> None:
    base, test = [1.0, 1.01, 0.99, 1.0], [1.03, 1.04, 1.02, 1.03]
    widths = []
    for looks in (1, 5):
        (found,) = compared(tmp_path, base, test, looks=looks).cases
        assert found.interval is not None
        widths.append(math.log(found.interval[1] / found.interval[0]))
    # t of 6 degrees of freedom at 99 % against 95 %
    assert widths[1] / widths[0] == pytest.approx(3.707 / 2.447, rel=1e-3)


def test_runs_needed_by_hand(tmp_path: Path) -> None:
    # runs differ by s = 0.02 about: smallest n with t(2n - 2) * s * sqrt(2 / n) <= ln 1.02
    logs = [-0.02, 0.0, 0.02]
    side = [math.exp(x) for x in logs]
    (found,) = compared(tmp_path, side, side).cases
    assert found.runs_needed == 10  # t(18) = 2.101: 0.01879 <= 0.0198; n = 9: 0.01999
    # pairs whose ratios differ by as much: t(n - 1) * s / sqrt(n), 0.0185 of 7 and 0.0210 of 6
    (paired,) = compared(tmp_path / "pairs", [1.0, 1.0, 1.0], side, paired=True).cases
    assert paired.runs_needed == 7
    # two looks share the error: t(n - 1) at 97.5 % is 2.841 and 2.752, so 0.0201 of 8, 0.0183 of 9
    (twice,) = compared(tmp_path / "l", [1.0, 1.0, 1.0], side, paired=True, looks=2).cases
    assert twice.runs_needed == 9


def test_smallest_change_by_hand(tmp_path: Path) -> None:
    # logs -0.01, 0.01 and 0.09, 0.11: the error is 0.014142, t(2) = 4.3027 at 97.5 %, z = 1.2816 at
    # 90 %. c = 4.3027 + 1.2816 * sqrt(1 + (c^2 + 18.513) / 4): c = 13.43, and exp(c * error) - 1
    base, test = ([math.exp(x) for x in side] for side in ((-0.01, 0.01), (0.09, 0.11)))
    (found,) = compared(tmp_path, base, test).cases
    assert found.smallest_change == pytest.approx(math.exp(13.43 * 0.014142) - 1, rel=1e-3)


def test_one_side_after_the_other_is_a_warning(tmp_path: Path) -> None:
    base = runs(tmp_path / "a", [1.0, 1.1, 1.0])
    for number, hour in enumerate((4, 5, 6)):
        start = f"2026-01-01T{hour:02}:00:00+00:00"
        write(tmp_path / "b" / f"{number}.jsonl", case("no ddp", [1.0] * 5), started_at=start)
    words = ("compare.py", base, "--test", str(tmp_path / "b"))
    warning = "# warning: all runs of one side started before all of the other: what changed"
    assert warning in run(*words).stdout
    assert warning in run("compare.py", words[-1], "--test", base).stdout
    assert "# warning" not in run(*words, "--paired").stdout
    write(tmp_path / "b" / "0.jsonl", case("no ddp"), started_at="2026-01-01T01:30:00+00:00")
    assert "# warning" not in run(*words).stdout


def test_runs_that_others_have_disturbed_are_a_warning(tmp_path: Path) -> None:
    for side, busy in (("a", 0.1), ("b", 1.9)):
        path = tmp_path / f"{side}.jsonl"
        write(path, case("x"), status=None)
        end = {"status": "complete", "others": [[0.0, 2], [busy, 2]]}
        path.write_text(f"{path.read_text()}{json.dumps(end)}\n")
    done = run("compare.py", str(tmp_path / "a.jsonl"), "--test", str(tmp_path / "b.jsonl"))
    assert "# warning: 2 runs: other programs used up to 1.9 of 2 cores in 1 of them" in done.stdout


def test_how_many_runs_would_decide(tmp_path: Path) -> None:
    comparison = compared(tmp_path, [1.0, 1.02, 0.98], [1.0, 1.02, 0.98])
    (found,) = comparison.cases
    assert found.verdict == "undecided"
    line = f"{found.runs_needed} runs a side have an even chance to narrow the intervals to +-2 %"
    assert f"# {line}; {3 * (found.runs_needed or 0)} decide" in show(comparison, "table")


def test_why_a_change_is_undecided() -> None:
    def why(ratio: float, low: float, high: float) -> str:
        result = Result("x", {}, ratio=ratio, interval=(low, high))
        return judge(result, False, 0.02)[1]

    assert why(1.05, 0.9, 1.2) == "the interval is too wide"
    assert why(1.015, 1.005, 1.03) == "a change, but not certain to be beyond the margin"
    assert why(1.05, 1.001, 1.1).startswith("beyond the margin, but of so many cases one may be")


def test_geometric_mean_by_hand(tmp_path: Path) -> None:
    for side, factor in (("a", 1.0), ("b", 1.1)):
        for i in range(3):
            lines = [case("x", [factor * (1 + i / 1000)]), case("y", [2 * factor * factor])]
            write(tmp_path / side / f"{i}.jsonl", *lines, started_at=f"2026-01-01T0{i}:00:00")
    mean = judged(tmp_path / "a", tmp_path / "b").mean
    assert mean is not None
    assert mean.ratio == pytest.approx(1.1**1.5)
    assert mean.label == "geometric mean of 2 cases"


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    failed = case("x", check="failed: out of memory", samples_s={}, rounds=[])
    never, mended, late = (
        {**failed, "key": {"setting": name}, "name": name} for name in ("never", "mended", "late")
    )
    write(tmp_path / "base.jsonl", case("x"), case("y"), case("z"), never, mended)
    mended = case("mended", key=mended["key"])
    write(tmp_path / "test.jsonl", failed, case("y"), case("new"), never, mended, late)
    found = judged(tmp_path / "base.jsonl", tmp_path / "test.jsonl")
    reasons = {c.label: c.reason for c in found.cases}
    assert reasons["x"] == "TEST: no time in 1 of 1 runs: failed: out of memory"
    assert {c.label: c.verdict for c in found.cases} == {
        **{"y": "undecided", "x": "missing", "z": "missing", "never": "missing"},
        **{"mended": "new", "new": "new", "late": "new"},
    }
    done = run(
        *("compare.py", str(tmp_path / "base.jsonl"), "--test", str(tmp_path / "test.jsonl")),
        *("--fail-on", "missing"),
    )
    assert done.returncode == 1
    assert "failed: 3 missing (--fail-on)" in done.stderr


def test_environment_and_hardware(tmp_path: Path) -> None:
    def environment(device: str, torch: str, watts: str) -> dict[str, Any]:
        gpus = [[{"index": "0", "power.limit": watts, "temperature.gpu": watts}]]
        variables = {"OMP_NUM_THREADS": "1"}
        return {"devices": [device], "torch": torch, "variables": variables, "gpus": gpus}

    base = runs(tmp_path / "a", [1.0, 1.0], environment=environment("H100", "2.14", "700 W"))
    test = runs(tmp_path / "b", [1.0, 1.0], environment=environment("A100", "2.15", "400 W"))
    done = run("compare.py", base, "--test", test)
    assert "# THE HARDWARE DIFFERS: devices: H100 in BASE, A100 in TEST" in done.stdout
    assert "# THE HARDWARE DIFFERS: GPU power.limit: 700 W in BASE, 400 W in TEST" in done.stdout
    assert "temperature" not in done.stdout
    assert "# environment: torch: 2.14 in BASE, 2.15 in TEST" in done.stdout
    assert "OMP_NUM_THREADS" not in done.stdout


@pytest.mark.parametrize(
    ("base", "test", "status", "said"),
    [
        ([0.1, 0.1, 0.1], [0.1, 0.1, 0.1], 0, "pass"),
        ([0.1, 0.1, 0.1], [0.2, 0.2, 0.2], 1, "failed (1 slower)"),
        ([0.1, 0.2, 0.1], [0.2, 0.1, 0.1], 4, "no verdict (1 undecided)"),
        ([0.1], [0.1], 4, "no verdict (1 undecided)"),
    ],
)
def test_a_gate_that_could_not_look_has_not_passed(
    tmp_path: Path, base: list[float], test: list[float], status: int, said: str
) -> None:
    words = [runs(tmp_path / "a", base), "--test", runs(tmp_path / "b", test)]
    assert run("compare.py", *words).returncode == 0  # nothing was asked for
    done = run("compare.py", *words, "--fail-on", "slower")
    assert done.returncode == status
    assert done.stdout.endswith(f"\n# --fail-on slower: {said}\n")
    assert done.stderr.count("\n") == (status > 0)
    markdown = run("compare.py", *words, "--fail-on", "slower", "--format", "markdown").stdout
    assert markdown.endswith(f"\n- --fail-on slower: {said}\n")
    document = run("compare.py", *words, "--fail-on", "slower", "--format", "json").stdout
    assert json.loads(document)["outcome"] == said.split(" (")[0]


def test_a_gate_counts_each_case_once() -> None:
    """The mean is no case; but it may be slower where no case is with confidence."""
    design = Design()
    for verdicts, mean, outcome in (
        (["slower"] * 6, "slower", ("failed", "6 slower")),
        (["slower", "faster", "missing"], "same", ("failed", "1 slower, 1 missing")),
        (["undecided", "same"], "slower", ("failed", "the mean is slower")),
        (["undecided", "same"], "undecided", ("no verdict", "1 undecided")),
    ):
        cases = [Result("x", {"n": n}, "", verdict) for n, verdict in enumerate(verdicts)]
        comparison = Comparison(cases, Result("x", {}, "", mean), [], [], [], [], design)
        assert outcome_of(comparison, ["slower", "missing"]) == outcome


def test_a_case_without_a_number_needs_no_verdict(tmp_path: Path) -> None:
    """As node_check.py writes one for each probe. So a folder of several scripts can pass."""
    bare = case("a probe", samples_s={}, rounds=[], metrics={})
    sides = []
    for side in "ab":
        for number, seconds in enumerate((1.0, 1.001, 1.002, 1.0)):
            write(tmp_path / side / f"{number}.jsonl", case("x", [seconds] * 5), bare)
        sides.append(str(tmp_path / side))
    words = (sides[0], "--test", sides[1], "--fail-on", "slower")
    done = run("compare.py", *words)
    assert (done.returncode, "a probe" in done.stdout) == (0, False), done.stdout
    failed = bare | {"check": "failed: why"}
    write(tmp_path / "b" / "0.jsonl", case("x", [1.0] * 5), failed)
    done = run("compare.py", *words)
    assert done.returncode == 4
    assert "a probe" in done.stdout
    alone = [write(tmp_path / f"{side}.jsonl", bare) for side in "cd"]
    done = run("compare.py", alone[0], "--test", alone[1])
    assert (done.returncode, "no case has a time or a metric" in done.stderr) == (2, True)


def test_a_missing_case_is_no_verdict(tmp_path: Path) -> None:
    for i in range(3):
        start = {"started_at": f"2026-01-01T0{i}:00:00"}
        write(tmp_path / "a" / f"{i}.jsonl", case("x"), case("y"), **start)
        write(tmp_path / "b" / f"{i}.jsonl", case("x"), case("z"), **start)
    words = (str(tmp_path / "a"), "--test", str(tmp_path / "b"), "--fail-on")
    done = run("compare.py", *words, "slower")
    assert done.returncode == 4
    assert "no verdict: 1 missing (--fail-on)" in done.stderr  # what is new has nothing to pass
    assert run("compare.py", *words, "missing").returncode == 1


def test_history_compares_the_newest_run(tmp_path: Path) -> None:
    folder = runs(tmp_path, [*alike(8, 0.1, 3), 0.12])
    done = run("compare.py", "--history", folder)
    assert done.returncode == 0, done.stderr
    assert "8 of BASE, 1 of TEST" in done.stdout
    assert "slower" in done.stdout


def test_refusals(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", case("x"))
    other = write(tmp_path / "b.jsonl", case("x"), benchmark="collectives")
    no_cases = write(tmp_path / "c.jsonl")
    for words, message in (
        ([a], "expected reports of two sides, or a history; e.g."),
        ([a, "--test", a], "is the same file as"),
        ([a, "--test", other], "BASE has e.g. ddp_sweep {"),
        ([a, "--test", no_cases], "TEST none"),
        ([a, "--test", other, "--margin", "200%"], "expected a share between 0 and 1"),
        ([a, "--tset", other], "did you mean --test"),
        (["--history", str(tmp_path), "--test", a], "or a history"),
        (["--history", str(tmp_path), "--paired"], "a history has no pairs"),
        ([a, "--test", other, "--measure", ""], "--measure: expected a name, got ''"),
        ([a, "--test", other, "--ignore-key", "modle"], "no case has a field 'modle' to ignore; "),
    ):
        done = run("compare.py", *words)
        assert done.returncode == 2, words
        assert message in done.stderr, words
        assert done.stderr.count("\n") == 1, done.stderr
        assert done.stdout == ""


def test_pytorchs_ddp_benchmark_meets_ddp_sweep(tmp_path: Path) -> None:
    """It sets no precision: `--dtype default` is the same, fp32 is said to differ."""
    results = [{"ranks": [0], "measurements": [0.1] * 3}, {"ranks": [0], "measurements": [0.2] * 3}]
    results.append({"ranks": [0, 1], "measurements": [0.3] * 6})
    entry = {"model": "resnet18", "batch_size": 8, "result": results}
    about = {"distributed_backend": "gloo", "bucket_size": 25, "benchmark_results": [entry]}
    old = tmp_path / "old.json"
    old.write_text(json.dumps({"pytorch_version": "1.4.0", "cuda_version": "10.1"} | about))
    new = tmp_path / "new.jsonl"
    for dtype in ("default", "fp32"):
        write(new, *[ddp_case(ranks, is_wrapped, dtype) for ranks, is_wrapped in SETTINGS])
        done = run("compare.py", str(old), "--test", str(new))
        if dtype == "default":
            for words in ("no ddp +100 ms", "1 rank +200 ms", "2 ranks +300 ms"):
                assert re.search(words, done.stdout), done.stdout
            assert f"# warning: {old}: PyTorch's script waits for the device in" in done.stdout
        else:
            assert "no case is on both sides" in done.stderr
            done = run("compare.py", str(old), "--test", str(new), "--ignore-key", "dtype")
            assert "# environment: key.dtype: default in BASE, fp32 in TEST" in done.stdout


SETTINGS = ((1, False), (1, True), (2, True))


def ddp_case(ranks: int, is_wrapped: bool, dtype: str) -> dict[str, Any]:
    """A case of ddp_sweep.py, with all fields of its key."""
    key: dict[str, Any] = {"model": "resnet18", "batch_size": 8, "dtype": dtype, "image_size": 224}
    key |= {"world_size": 2, "ranks": ranks, "ddp": is_wrapped, "device": "cuda", "backend": "gloo"}
    key |= {"bucket_size_mb": 25.0, "comm_hook": "none"} if is_wrapped else {}
    key = {"bucket_size_mb": None, "comm_hook": None, "breakdown": True} | key
    key |= dict.fromkeys(("gradient_as_bucket_view", "static_graph"), False)
    key |= {"find_unused_parameters": False, "global_batch": None}
    name = f"1M/{ranks}G" if is_wrapped else "no ddp"
    rows = [[0.1, 0.1]] * ranks
    return case(name, key=key, ranks=list(range(ranks)), samples_s={"step": rows})


def test_nothing_of_a_report_reaches_the_terminal(tmp_path: Path) -> None:
    bad = "\x1b[31m<b>|`x`\n"
    for side in ("a", "b"):
        line = case(bad, check=f"failed: {bad}" if side == "b" else "passed")
        environment = {"torch": bad + side, bad: bad + side}
        write(tmp_path / f"{side}.jsonl", line, case("x"), benchmark=bad, environment=environment)
    words = (str(tmp_path / "a.jsonl"), "--test", str(tmp_path / "b.jsonl"))
    for style in ("table", "markdown"):
        done = run("compare.py", *words, "--format", style)
        assert done.returncode == 0, done.stderr
        assert "\x1b" not in done.stdout
    assert "<b>" not in done.stdout
