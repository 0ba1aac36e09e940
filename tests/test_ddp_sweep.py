"""ddp_sweep.py as its user runs it. What the core promises is in test_faults.py."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks import ddp_sweep
from common.report import Case, Estimate
from common.stats import Disturbed, Times
from tests.process import ROOT

SCRIPT = "benchmarks/ddp_sweep.py"
SMALL = ("--model", "mobilenet_v3_small", "--image-size", "32", "--batch-size", "2")
SHORT = (*SMALL, "--iters", "6", "--warmup-iters", "1")
smoke = pytest.mark.smoke


@smoke
def test_two_ranks(bench: Callable[..., Any]) -> None:
    run = bench(SCRIPT, *SHORT, ranks=2)
    assert run.status == 0, run.err
    assert [case.name for case in run.report.cases] == ["no ddp", "1M/1G", "1M/2G"]
    assert run.report.status == "complete"
    last = run.report.cases[-1]
    assert last.check == "passed"
    assert list(last.samples_s) == ["step", "local compute", "alone", "no ddp"]
    assert [len(rows) for rows in last.samples_s["step"]] == [6, 6]
    assert [len(rows) for rows in last.samples_s["no ddp"]] == [6]  # the first rank alone
    p50 = last.metrics["step_s"].value
    row = next(line for line in run.out.splitlines() if line.startswith("1M/2G"))
    assert float(row.split()[2]) == pytest.approx(p50, rel=0.06)
    assert f" {2 / p50:.1f} " in row  # ex/sec/dev: the batch of a rank
    assert last.metrics["samples_per_s"].value == pytest.approx(2 * 2 / p50)
    step = np.max(last.samples_s["step"], axis=0)
    in_turns = np.median(last.samples_s["no ddp"][0] / step)
    assert last.metrics["efficiency"].value == pytest.approx(in_turns)


@smoke
def test_five_ranks_from_a_path_with_a_space(bench: Callable[..., Any], tmp_path: Path) -> None:
    copy = tmp_path / "a checkout"
    for folder in ("benchmarks", "common"):
        shutil.copytree(ROOT / folder, copy / folder)
    run = bench(str(copy / SCRIPT), *SHORT, "--no-breakdown", ranks=5)
    assert run.status == 0, run.err
    names = [case.name for case in run.report.cases]
    assert names == ["no ddp", "1M/1G", "1M/2G", "1M/4G", "1M/5G"]
    assert {case.check for case in run.report.cases} == {"passed"}


@smoke
def test_hooks_and_dtypes(bench: Callable[..., Any]) -> None:
    hooks = ["none", "allreduce", "fp16", "bf16"]
    flags = ("--comm-hook", ",".join(hooks), "--bucket-size", "1", "--dtype", "bf16")
    run = bench(SCRIPT, *SMALL, *flags, "--iters", "2", "--world-sizes", "2", ranks=2)
    assert run.status == 0, run.err
    cases = run.report.cases[1:]
    assert [case.key["comm_hook"] for case in cases] == hooks
    for case in cases:
        assert case.check == "passed"
        assert case.metrics["communication_s"].value > 0


@smoke
def test_strong_scaling(bench: Callable[..., Any]) -> None:
    """Three ranks do not divide 8; on two the part `no ddp` steps the whole batch."""
    flags = ("--model", "mobilenet_v3_small", "--image-size", "32", "--global-batch", "8")
    refused = bench(SCRIPT, *flags, ranks=3, json=False)
    line = "--global-batch 8 is no multiple of 3; try --world-sizes 1,2\n"
    assert f"error: {line}" in refused.err
    run = bench(SCRIPT, *flags, "--iters", "6", "-w", "1", "--world-sizes", "1,2", ranks=3)
    assert run.status == 0, run.err
    assert "\nmobilenet_v3_small, global batch 8 (strong scaling), 32 px, " in run.out
    assert [case.name for case in run.report.cases] == ["1M/1G", "1M/2G"]
    assert [case.key["batch_size"] for case in run.report.cases] == [8, 4]
    m, samples = run.report.cases[1].metrics, run.report.cases[1].samples_s
    assert m["samples_per_s"].value == pytest.approx(8 / m["step_s"].value)
    ratio = np.median(samples["no ddp"][0] / np.max(samples["step"], axis=0))
    assert m["efficiency"].value == pytest.approx(ratio / 2)


@smoke
def test_ones_own_model_of_the_working_folder(
    bench: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("from tests.own_models import gpt, idle\n")
    monkeypatch.chdir(tmp_path)
    for name, flags, batch in (("gpt", (), 6), ("idle", ("--find-unused-parameters",), 3)):
        more = ("--iters", "6", "--world-sizes", "2", *flags)
        run = bench(str(ROOT / SCRIPT), "--model", f"mine:{name}", *more, ranks=2)
        assert run.status == 0, run.err
        assert f"\nmine:{name}, batch size {batch} a rank (weak scaling), torch's" in run.out
        _, case = run.report.cases
        m = case.metrics
        assert case.check == "passed"
        assert (case.key["batch_size"], case.key["image_size"]) == (batch, None)
        assert m["samples_per_s"].value == pytest.approx(2 * batch / m["step_s"].value)
        assert {"efficiency", "exposed_s", "communication_s", "late_s", "memory_gib"} <= m.keys()


@smoke
@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--world-sizes", "4"), "--world-sizes 4 is more than 1 rank; e.g. --world-sizes 1"),
        (("--model", "nowhere:gpt"), "cannot import nowhere: No module named 'nowhere'; e.g. my"),
        (
            ("--model", "tests.own_models:gtp"),
            "own_models.py has no function 'gtp'; did you mean gpt",
        ),
        (("--model", "tests.own_models:model_alone"), "a tuple of tensors, a function; got Linear"),
        (("--model", "tests.own_models:vector"), "expected a loss that is a scalar, got [3, 4]"),
        (("--model", "tests.own_models:idle"), "1.weight gets no gradient; try --find-unused-"),
    ],
)
def test_a_mistake_that_the_running_job_shows(
    bench: Callable[..., Any], flags: tuple[str, ...], line: str
) -> None:
    run = bench(SCRIPT, *flags, ranks=0, json=False)
    assert run.status == 2
    (said,) = run.err.splitlines()
    assert said.startswith("ddp_sweep.py: error: --")
    assert line in said


@smoke
def test_hooks_average_gradients(start: Callable[..., Any]) -> None:
    """fp16 rounds to 11 bits and bf16 to 8, both what a rank brings and the sum."""
    process = start("tests/average_by_hooks.py", ranks=2)
    assert process.wait(200) == 0, process.err
    errors = dict(line.split() for line in process.out.splitlines())
    limits = {"none": 1e-5, "allreduce": 1e-5, "fp16": 2**-9, "bf16": 2**-6}
    assert errors.keys() == limits.keys()
    for hook, limit in limits.items():
        assert float(errors[hook]) <= limit


def test_labels_and_sets_of_ranks() -> None:
    names = [ddp_sweep.name_of(size, 8) for size in (1, 8, 16, 12)]
    assert names == ["1M/1G", "1M/8G", "2M/8G (16)", "2M/12G in all"]
    assert ddp_sweep.sizes_of(None, 1, 1) == [1]
    assert ddp_sweep.sizes_of(None, 5, 5) == [1, 2, 4, 5]
    assert ddp_sweep.sizes_of(None, 24, 8) == [1, 2, 4, 8, 16, 24]
    assert ddp_sweep.sizes_of(["nodes"], 48, 8) == [8, 16, 24, 32, 40, 48]
    assert ddp_sweep.sizes_of([2, "nodes"], 20, 8) == [2, 8, 16, 20]
    assert ddp_sweep.sizes_of(["nodes"], 5, 5) == [5]
    assert ddp_sweep.sizes_of([4, 2], 8, 8) == [2, 4]


def plan_of(*flags: str, ranks: int = 4) -> dict[str, Any]:
    args = ddp_sweep.parse_args(["--device", "cpu", "--model", "resnet18", *flags])
    job: Any = SimpleNamespace(world_size=ranks, local_world_size=ranks, device=torch.device("cpu"))
    sizes = ddp_sweep.sizes_of(args.world_sizes, ranks, ranks)
    return ddp_sweep.plan(args, job, sizes, {})


@pytest.mark.parametrize(
    ("flags", "end"),
    [
        ((), "torch's default precision, buckets of 25 MB"),
        (("--dtype", "fp32", "--bucket-size", "1,2"), "fp32"),
        (("--comm-hook", "bf16", "--bucket-size", "100"), "100 MB, hook bf16"),
        (("--comm-hook", "bf16,none"), "buckets of 25 MB"),
        (("--static-graph", "--gradient-as-bucket-view"), "gradient as bucket view, static graph"),
    ],
)
def test_the_title_has_what_all_cases_share(flags: tuple[str, ...], end: str) -> None:
    (title,) = plan_of(*flags)
    assert title.startswith("resnet18, batch size 8 a rank (weak scaling), 64 px, ")
    assert title.endswith(end)


def test_the_metrics_of_a_case_by_hand() -> None:
    """6 rounds of a sample. The slowest rank's step takes 10 ms, its local compute 8 ms; the first
    rank alone takes 6 ms."""
    rows = {
        "step": [[0.010] * 6, [0.009] * 6],
        "local compute": [[0.004] * 6, [0.008] * 6],
        "alone": [[0.004] * 6, [0.003] * 6],
        "no ddp": [[0.006] * 6],
    }
    key = {"batch_size": 5, "global_batch": None}
    case = Case(key=key, ranks=[0, 1], samples_s=rows, rounds=[1] * 6)
    facts = [("abc", {"memory_gib": gib}) for gib in (0.5, 0.75)]
    ddp_sweep.derive(case, Times(rows, case.rounds), facts)
    metrics = case.metrics
    assert case.check == "passed"
    values = {name: number.value for name, number in metrics.items() if hasattr(number, "value")}
    assert values == {
        "step_s": pytest.approx(0.010),
        "samples_per_s": pytest.approx(2 * 5 / 0.010),
        "efficiency": pytest.approx(0.6),
        "local_compute_s": pytest.approx(0.008),
        "exposed_s": pytest.approx(0.002),
        "communication_s": pytest.approx(0.004),
        "overlap": pytest.approx(0.5),  # 2 of 4 ms
        "late_s": pytest.approx(0.002),  # 8 ms, and 6 ms between the two ranks
    }
    assert metrics["memory_gib"] == 0.75
    assert metrics["step_cv"] == 0
    strong = Case(key=key | {"global_batch": 10}, ranks=[0, 1], samples_s=rows, rounds=[1] * 6)
    ddp_sweep.derive(strong, Times(rows, case.rounds), facts)
    assert strong.metrics["efficiency"].value == pytest.approx(0.3)

    different: list[Any] = [(digest, {}) for digest in ("abc", "abd")]
    alone = Case(key=key, ranks=[0, 1], samples_s={"step": rows["step"]}, rounds=[1] * 6)
    ddp_sweep.derive(alone, Times(alone.samples_s, alone.rounds), different)
    assert alone.check.startswith("failed: ")
    assert {"efficiency", "exposed_s"}.isdisjoint(alone.metrics)


def test_local_compute_sends_nothing_and_moves_no_parameter() -> None:
    """The gradients of a step go through DDP's hook; those of local compute do not."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ddp = DistributedDataParallel(nn.Linear(3, 5))
    averaged: list[int] = []

    def count(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        averaged.append(bucket.index())
        return allreduce_hook(ddp.process_group, bucket)

    ddp.register_comm_hook(None, count)
    batch = (torch.ones(2, 3),), torch.sum
    before = ddp.module.weight.clone()
    ddp_sweep.local_step(ddp, batch, "fp32")()
    assert averaged == []
    assert torch.equal(ddp.module.weight, before)
    ddp_sweep.training_step(ddp, batch, 1e-3, "fp32")()
    assert averaged == [0]
    assert not torch.equal(ddp.module.weight, before)
    dist.destroy_process_group()


def test_the_plan_has_complete_keys_that_differ() -> None:
    flags = ("--dtype", "fp32,bf16", "--bucket-size", "1,25", "--world-sizes", "2")
    tables = plan_of(*flags)
    assert [title.rpartition(", ")[2] for title in tables] == ["fp32", "bf16"]
    for cases in tables.values():
        names = [(name, ranks, key["bucket_size_mb"]) for name, ranks, key in cases]
        assert names == [("no ddp", 1, None), ("1M/2G 1MB", 2, 1.0), ("1M/2G 25MB", 2, 25.0)]
    (cases,) = plan_of("--comm-hook", "none,bf16", "--bucket-size", "1,2").values()
    keys = [json.dumps({"ranks": ranks, **key}) for _, ranks, key in cases]
    assert len(set(keys)) == len(keys) == 1 + 3 * 4
    assert len({tuple(key) for _, _, key in cases}) == 1


def test_a_batch_that_does_not_fit() -> None:
    def step() -> None:
        raise torch.OutOfMemoryError("planted")

    assert not ddp_sweep.fits(step)
    assert ddp_sweep.fits(lambda: None)


def case_of(ranks: int, ms: Estimate, name: str = "25MB", **metrics: Any) -> Case:
    key = {"model": "m", "dtype": "fp32", "ddp": bool(metrics), "global_batch": None}
    metrics["step_s"] = ms * 1e-3
    return Case(key=key, ranks=list(range(ranks)), name=name, metrics=metrics)


def test_the_answer() -> None:
    """2 * 0.625 = 1.25 times as fast."""
    alone = case_of(1, Estimate(50, 49, 52))
    assert ddp_sweep.answer([alone]) == "m, fp32: a step of one rank takes 50.0 ms (49.0 to 52.0)"
    exposed = Estimate(0.0162, 0.011, 0.022)
    two = case_of(2, Estimate(80, 76, 84), efficiency=Estimate(0.625, 0.6, 0.7), exposed_s=exposed)
    assert ddp_sweep.answer([alone, two]) == (
        "m, fp32: DDP on 2 ranks trains 1.25 times (1.20 to 1.40) as fast as one rank alone; "
        "DDP adds 16.2 ms (11.0 to 22.0) to a step, which takes 80.0 ms"
    )
    impossible = case_of(2, Estimate(80, 76, 84), efficiency=Estimate(1.2, 1.1, 1.3))
    said = ddp_sweep.answer([alone, impossible, two])
    assert isinstance(said, Disturbed)
    assert (
        said == "m, fp32: DDP on 2 ranks trains 2.40 times (2.20 to 2.60) as fast as one rank alone"
    )
    impossible.key["global_batch"] = 4  # the smaller batches may fit into caches
    assert not isinstance(ddp_sweep.answer([impossible]), Disturbed)
    longer = case_of(2, Estimate(80, 76, 84), exposed_s=Estimate(0.12, 0.1, 0.13))
    assert isinstance(ddp_sweep.answer([longer]), Disturbed)
    unsure = case_of(
        2, Estimate(80, 76, 84), efficiency=Estimate(0.55, 0.45, 0.7), exposed_s=Estimate(0.01)
    )
    assert ddp_sweep.answer([alone, unsure]) == (
        "m, fp32: DDP on 2 ranks and one rank alone cannot be told apart: "
        "1.10 times (0.90 to 1.40); DDP adds 10.0 ms (no interval) to a step, which takes 80.0 ms"
    )
    other = case_of(2, Estimate(100, 99, 101), name="1MB")
    other.key["ddp"] = True
    assert ddp_sweep.answer([alone, other]) == (
        "m, fp32: DDP on 2 ranks takes 100 ms (99 to 101) a step"
    )
    assert ddp_sweep.answer([alone, other, two]) == ddp_sweep.answer([alone, two])
