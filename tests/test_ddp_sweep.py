"""ddp_sweep.py as its user runs it. What the core promises is in test_faults.py."""

import gc
import json
import math
import shlex
import shutil
import weakref
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
from common.stats import Times
from tests.process import ROOT

SCRIPT = "benchmarks/ddp_sweep.py"
SMALL = ("--model", "mobilenet_v3_small", "--image-size", "32", "--batch-size", "2")
SHORT = (*SMALL, "--iters", "6", "--warmup-iters", "1")
smoke = pytest.mark.smoke


@smoke
def test_two_ranks_then_resume(bench: Callable[..., Any]) -> None:
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
    assert f"{p50:.4f}" in row
    assert f"{2 / p50:.1f}" in row  # ex/sec/dev: the batch of a rank
    assert last.metrics["samples_per_s"].value == pytest.approx(2 * 2 / p50)
    step = np.max(last.samples_s["step"], axis=0)
    in_turns = np.median(last.samples_s["no ddp"][0] / step)
    assert last.metrics["efficiency"].value == pytest.approx(in_turns)
    variables = run.report.environment["variables"]
    assert variables["OMP_NUM_THREADS"] == "1"
    # what the script sets itself is not the user's
    assert {"GLOO_SOCKET_IFNAME", "TORCH_NCCL_ASYNC_ERROR_HANDLING"}.isdisjoint(variables)
    path = shlex.quote(str(ROOT / SCRIPT))
    assert f"# command: {path} --model mobilenet_v3_small --image-size 32" in run.out

    lines = run.path.read_text().splitlines()
    again = bench(SCRIPT, *SHORT, "--resume", ranks=2)
    assert again.status == 0, again.err
    assert row in again.out  # shown from the report
    assert again.path.read_text().splitlines()[:-1] == lines  # and a second last line


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
    hooks = "none,allreduce,fp16,bf16,powersgd"
    flags = ("--comm-hook", hooks, "--bucket-size", "1", "--dtype", "bf16")
    run = bench(SCRIPT, *SMALL, *flags, "--iters", "2", "--world-sizes", "2", ranks=2)
    cases = {case.key["comm_hook"]: case for case in run.report.cases}
    for hook in ("none", "allreduce", "fp16", "bf16"):
        assert cases[hook].check == "passed"
        assert cases[hook].metrics["communication_s"].value > 0
    assert "deadlocks gloo" in cases["powersgd"].check
    assert run.status != 0


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


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--modle", "resnet50"), "unknown argument '--modle'; did you mean --model"),
        (("--model", "resnet5"), "unknown model 'resnet5'; did you mean resnet50"),
        (("--model", "fcn_resnet50"), "unknown model 'fcn_resnet50'"),  # no classifier
        (("--bucket-size", "25,x"), "--bucket-size: expected a number above 0, got 'x'"),
        (("--comm-hook", "bf61"), "got 'bf61'; did you mean bf16?"),
        (("--world-sizes", "2,node"), "--world-sizes: expected a whole number of at least 1"),
        (("--model", "inception_v3", "--image-size", "224"), "--image-size 299 or more, got 224"),
    ],
)
def test_a_mistake_is_one_line(
    flags: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        ddp_sweep.parse_args(list(flags))
    assert caught.value.code == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert line in said


@smoke
@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--world-sizes", "4"), "--world-sizes 4 is more than the 1 ranks"),
        (("--json", __file__), "--json: it would replace"),
        (("--backend", "smoke"), "--backend smoke: this torch was built without it"),
    ],
)
def test_a_mistake_that_the_running_job_shows(
    bench: Callable[..., Any], flags: tuple[str, ...], line: str
) -> None:
    before = Path(__file__).read_bytes()
    run = bench(SCRIPT, *SHORT, *flags, ranks=0, json=False)
    assert run.status == 2
    (said,) = run.err.splitlines()
    assert said.startswith("ddp_sweep.py: error: ")
    assert line in said
    assert Path(__file__).read_bytes() == before


def test_labels_and_sets_of_ranks() -> None:
    assert ddp_sweep.world_sizes(1, 1) == [1]
    assert ddp_sweep.world_sizes(5, 5) == [1, 2, 4, 5]
    assert ddp_sweep.world_sizes(24, 8) == [1, 2, 4, 8, 16, 24]
    names = [ddp_sweep.name_of(size, 8) for size in (1, 8, 16, 12)]
    assert names == ["1M/1G", "1M/8G", "2M/8G (16)", "2M/12G in all"]


def test_every_number_of_nodes_by_a_word() -> None:
    assert ddp_sweep.chosen_sizes(None, 24, 8) == [1, 2, 4, 8, 16, 24]
    assert ddp_sweep.chosen_sizes(["nodes"], 48, 8) == [8, 16, 24, 32, 40, 48]
    assert ddp_sweep.chosen_sizes([2, "nodes"], 20, 8) == [2, 8, 16, 20]
    assert ddp_sweep.chosen_sizes(["nodes"], 5, 5) == [5]
    assert ddp_sweep.chosen_sizes([4, 2], 8, 8) == [2, 4]


def test_the_title_has_what_all_cases_share() -> None:
    def title(*flags: str) -> str:
        args = ddp_sweep.parse_args(["--device", "cpu", *flags])
        return ddp_sweep.title_of("resnet18", args.dtype[0], args, torch.device("cpu"))

    start = "resnet18, batch size 8, 64 px, "
    assert title() == start + "torch's default precision, buckets of 25 MB"
    assert title("--dtype", "fp32", "--bucket-size", "1,2") == start + "fp32"
    assert title("--comm-hook", "bf16", "--bucket-size", "100").endswith("100 MB, hook bf16")
    assert title("--comm-hook", "bf16,none").endswith("25 MB")
    flags = ("--channels-last", "--static-graph", "--gradient-as-bucket-view")
    assert title(*flags).endswith("25 MB, channels last, gradient as bucket view, static graph")


def test_the_metrics_of_a_case_by_hand() -> None:
    """6 rounds of a sample. The slowest rank's step takes 10 ms, its local compute 8 ms; the first
    rank alone takes 6 ms."""
    rows = {
        "step": [[0.010] * 6, [0.009] * 6],
        "local compute": [[0.004] * 6, [0.008] * 6],
        "alone": [[0.004] * 6, [0.003] * 6],
        "no ddp": [[0.006] * 6],
    }
    key = {"batch_size": 5}
    case = Case(key=key, ranks=[0, 1], samples_s=rows, rounds=[1] * 6)
    facts = [ddp_sweep.Facts("abc", {"memory_gib": gib}) for gib in (0.5, 0.75)]
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

    different = [ddp_sweep.Facts(digest, {}) for digest in ("abc", "abd")]
    alone = Case(key=key, ranks=[0, 1], samples_s={"step": rows["step"]}, rounds=[1] * 6)
    ddp_sweep.derive(alone, Times(alone.samples_s, alone.rounds), different)
    assert alone.check.startswith("failed: ")
    assert {"efficiency", "exposed_s"}.isdisjoint(alone.metrics)


def test_a_hook_that_waits_is_refused_over_gloo_and_none_keeps_the_model() -> None:
    """The garbage collector sees no cycle through DDP's C++ part."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ddp = DistributedDataParallel(nn.Linear(3, 5))
    with pytest.raises(ValueError, match="hook powersgd deadlocks gloo"):
        ddp_sweep.register_hook("powersgd", ddp)
    assert ddp_sweep.register_hook("fp16", ddp)
    ddp(torch.ones(2, 3)).sum().backward()
    weight = weakref.ref(ddp.module.weight)
    del ddp
    gc.collect()
    assert weight() is None
    dist.destroy_process_group()


def test_local_compute_sends_nothing_and_moves_no_parameter() -> None:
    """The gradients of a step go through DDP's hook; those of local compute do not."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ddp = DistributedDataParallel(nn.Linear(3, 5))
    averaged: list[int] = []

    def count(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        averaged.append(bucket.index())
        return allreduce_hook(ddp.process_group, bucket)

    ddp.register_comm_hook(None, count)
    images, targets = torch.ones(2, 3), torch.tensor([0, 4])
    before = ddp.module.weight.clone()
    ddp_sweep.local_step(ddp, images, targets, "fp32")()
    assert averaged == []
    assert torch.equal(ddp.module.weight, before)
    ddp_sweep.training_step(ddp, images, targets, 1e-3, "fp32")()
    assert averaged == [0]
    assert not torch.equal(ddp.module.weight, before)
    dist.destroy_process_group()


def plan_of(*flags: str, ranks: int = 4) -> dict[str, Any]:
    args = ddp_sweep.parse_args(["--device", "cpu", "--model", "resnet18", *flags])
    job: Any = SimpleNamespace(world_size=ranks, local_world_size=ranks, device=torch.device("cpu"))
    return ddp_sweep.plan(args, job)


def test_the_plan_begins_each_table_without_ddp() -> None:
    flags = ("--dtype", "fp32,bf16", "--bucket-size", "1,25", "--world-sizes", "2")
    tables = plan_of(*flags)
    assert list(tables) == [f"resnet18, batch size 8, 64 px, {dtype}" for dtype in ("fp32", "bf16")]
    for cases in tables.values():
        names = [(name, ranks, key["bucket_size_mb"]) for name, ranks, key in cases]
        assert names == [("no ddp", 1, None), ("1M/2G 1MB", 2, 1.0), ("1M/2G 25MB", 2, 25.0)]


def test_keys_are_complete_and_differ() -> None:
    (cases,) = plan_of("--comm-hook", "none,bf16", "--bucket-size", "1,2").values()
    keys = [json.dumps({"ranks": ranks, **key}) for _, ranks, key in cases]
    assert len(set(keys)) == len(keys) == 1 + 3 * 4
    assert len({tuple(key) for _, _, key in cases}) == 1
    assert {key["breakdown"] for _, _, key in cases} == {True}
    (cases,) = plan_of("--no-breakdown").values()
    assert {key["breakdown"] for _, _, key in cases} == {False}


def case_of(ranks: int, ms: Estimate, **metrics: Any) -> Case:
    key = {"model": "m", "dtype": "fp32", "ddp": bool(metrics), "comm_hook": "none"}
    key |= {"bucket_size_mb": metrics.pop("mb", 25)}
    return Case(key=key, ranks=list(range(ranks)), metrics={"step_s": ms * 1e-3, **metrics})


def test_the_answer() -> None:
    """2 * 0.625 = 1.25 times as fast."""
    alone = case_of(1, Estimate(50, 49, 52))
    assert ddp_sweep.answer([alone]) == ["m, fp32: a step of one rank takes 50.0 ms (49.0 to 52.0)"]
    exposed = Estimate(0.0162, 0.011, 0.022)
    two = case_of(2, Estimate(80, 76, 84), efficiency=Estimate(0.625, 0.6, 0.7), exposed_s=exposed)
    assert ddp_sweep.answer([alone, two]) == [
        "m, fp32: DDP on 2 ranks trains 1.25 times (1.20 to 1.40) as fast as one rank alone; "
        "DDP adds 16.2 ms (11.0 to 22.0) to a step, which takes 80.0 ms"
    ]
    unsure = case_of(
        2, Estimate(80, 76, 84), efficiency=Estimate(0.55, 0.45, 0.7), exposed_s=Estimate(0.01)
    )
    assert ddp_sweep.answer([alone, unsure]) == [
        "m, fp32: DDP on 2 ranks and one rank alone cannot be told apart: "
        "1.10 times (0.90 to 1.40); DDP adds 10.0 ms (no interval) to a step, which takes 80.0 ms"
    ]
    other = case_of(2, Estimate(100, 99, 101), mb=1)
    other.key["ddp"] = True
    assert ddp_sweep.answer([alone, other]) == [
        "m, fp32: DDP on 2 ranks takes 100 ms (99 to 101) a step"
    ]
    assert ddp_sweep.answer([alone, other, two])[1] == (
        "m, fp32: hook none with 25 MB is 1.25 times (1.18 to 1.33) as fast as hook none with 1 MB"
    )


def test_auxiliary_heads_are_in_the_loss() -> None:
    targets = torch.tensor([0, 1])
    heads = [torch.tensor([[2.0, 0.0], [0.0, 2.0]]), torch.zeros(2, 2), torch.zeros(2, 2)]
    plain = math.log(1 + math.exp(-2))  # of a logit of 2 for the right class of two
    assert ddp_sweep.loss_of(heads[0], targets).item() == pytest.approx(plain)
    loss = ddp_sweep.loss_of(tuple(heads), targets).item()
    assert loss == pytest.approx(plain + 2 * 0.3 * math.log(2))


@smoke
def test_a_model_with_auxiliary_heads(bench: Callable[..., Any]) -> None:
    small = ("--model", "googlenet", "--image-size", "64", "--batch-size", "2")
    run = bench(SCRIPT, *small, "--iters", "1", "-w", "1", "--world-sizes", "2", ranks=2)
    assert run.status == 0, run.err
    assert {case.check for case in run.report.cases} == {"passed"}
