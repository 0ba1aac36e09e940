"""ddp_sweep through the real torchrun on gloo, and its report."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, SWEEP, TINY, load, run, torchrun

from common import results


def keys(report: dict[str, Any]) -> list[tuple[str, str]]:
    return [(case["key"]["model"], case["key"]["label"]) for case in report["cases"]]


@pytest.mark.parametrize(
    ("world_size", "labels"),
    [
        (2, ["no ddp", "1M/1G", "1M/2G"]),
        (3, ["no ddp", "1M/1G", "1M/2G", "1M/3G"]),
    ],
)
def test_sweep(tmp_path: Path, world_size: int, labels: list[str]) -> None:
    path = tmp_path / "a report.json"
    options = ["--iters", "8", "--device", "cpu", "--json", str(path)]
    done = run([*torchrun(world_size), SWEEP, *TINY, *options], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = results.load(str(path))
    assert report["status"] == "complete"
    assert [label for _, label in keys(report)] == labels
    for case in report["cases"]:
        ranks = max(1, case["key"]["world_size"])
        assert case["check"] == "passed"
        assert case["ranks"] == list(range(ranks))
        assert [len(row) for row in case["samples_s"]] == [8] * ranks
        assert case["stop"]["rule"] == "iters"
        for rows in case["other_samples_s"].values():
            assert [len(row) for row in rows] == [8] * ranks
    world = report["cases"][-1]
    assert list(world["other_samples_s"]) == ["local compute", "communication"]
    assert {"overlap", "exposed_communication_s", "efficiency", "memory_gib"} <= set(
        world["metrics"]
    )
    for label in labels:
        assert sum(line.startswith(label) for line in done.stdout.splitlines()) == 2, done.stdout
    # the keys of PyTorch's own benchmark
    assert report["benchmark_results"][0]["model"] == "mobilenet_v3_small"
    result = report["benchmark_results"][0]["result"]
    assert [len(entry["measurements"]) for entry in result] == [8] * len(labels)
    assert report["bucket_size"] == 25


def test_world_of_one_without_torchrun_and_every_option(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    options = ["--iters", "6", "--json", str(path), "--comm_hook", "none,fp16,bf16,noop"]
    options += ["--dtype", "fp32,bf16", "--bucket_size", "1", "--channels-last"]
    options += ["--gradient-as-bucket-view", "--static-graph", "--device=cpu"]
    done = run([sys.executable, SWEEP, *TINY, *options], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = load(path)
    assert len(report["cases"]) == 2 * (1 + 4)
    noop = [case for case in report["cases"] if case["key"]["comm_hook"] == "noop"]
    assert {case["check"] for case in noop} == {"skipped: the noop hook does not average gradients"}


def test_options_on_two_ranks(tmp_path: Path) -> None:
    """The steps without sync must not disturb DDP under any of its options."""
    path = tmp_path / "report.json"
    options = ["--iters", "6", "--json", str(path), "--world-sizes", "2", "--bucket-size", "1"]
    options += ["--comm-hook", "none,bf16", "--dtype", "fp32,fp16", "--device", "cpu"]
    options += ["--gradient-as-bucket-view", "--static-graph"]
    bind = ["--bind-cores"] if len(os.sched_getaffinity(0)) >= 2 else []
    done = run([*torchrun(2), SWEEP, *TINY, *options, *bind])
    assert done.returncode == 0, done.stdout + done.stderr
    report = load(path)
    assert [case["check"] for case in report["cases"]] == ["passed"] * 6
    if bind:
        share = len(os.sched_getaffinity(0)) // 2
        assert [row["cores"] for row in report["environment"]["ranks"]] == [share] * 2
        assert all(case["key"]["bind_cores"] for case in report["cases"])


def test_a_hook_that_gloo_cannot_do_fails_its_cases_and_the_sweep_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    options = ["--iters", "6", "--json", str(path), "--comm-hook", "powersgd,fp16"]
    done = run([*torchrun(2), SWEEP, *TINY, *options, "--device", "cpu", "--world-sizes", "2"])
    assert done.returncode == 1
    report = load(path)
    assert report["status"] == "failed"
    checks = {case["key"]["comm_hook"]: case["check"] for case in report["cases"]}
    assert "48478" in checks["powersgd"]
    assert checks["fp16"] == "passed"
    assert "failed: " in done.stdout


def test_resume_measures_only_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    options = ["--iters", "6", "--no-breakdown", "--device", "cpu", "--json", str(path)]
    command = [*torchrun(2), SWEEP, *TINY, *options]
    first = run([*command, "--world-sizes", "1"])
    assert first.returncode == 0, first.stderr
    before = {case["key"]["label"]: case for case in load(path)["cases"]}
    second = run([*command, "--resume"])
    assert second.returncode == 0, second.stderr
    after = {case["key"]["label"]: case for case in load(path)["cases"]}
    assert list(before) == ["no ddp", "1M/1G"]
    assert list(after) == ["no ddp", "1M/1G", "1M/2G"]
    assert {label: after[label] for label in before} == before
    # without --resume the report starts anew, and the old one is kept
    third = run([*command, "--world-sizes", "1"])
    assert third.returncode == 0, third.stderr
    assert len(load(path)["cases"]) == 2
    assert len(load(tmp_path / "report.json.bak")["cases"]) == 3


def test_calibrate(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    script = str(ROOT / "benchmarks" / "calibrate.py")
    options = ["--device", "cpu", "--rounds", "6", "--seconds", "0.5", "--json", str(path)]
    done = run([*torchrun(2), script, *options])
    assert done.returncode == 0, done.stderr
    metrics = {case["key"]["mode"]: case["metrics"] for case in results.load(str(path))["cases"]}
    assert list(metrics) == [
        *("clock", "barrier", "perturbation", "resolution", "all_reduce", "metadata"),
    ]
    assert metrics["clock"]["smallest_step_s"] > 0
    assert metrics["perturbation"]["ratio"] > 0
    assert metrics["all_reduce"]["ratio"] > 0
    assert metrics["metadata"]["seconds_p50_s"] > 0
