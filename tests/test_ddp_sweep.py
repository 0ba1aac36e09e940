"""ddp_sweep.py under torchrun. test_faults.py tests the promises of common/."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from benchmarks import ddp_sweep
from benchmarks.workloads.check import NOT_FINITE
from common.stats import Estimate, Times
from harness.benchmark import Implausible
from harness.report import Case
from tests.process import ROOT, Bench, copy_of_scripts
from tests.test_sources import table

SCRIPT = "benchmarks/ddp_sweep.py"
SHORT = ("--iters", "2", "--warmup-iters", "1")
TWELVE = ("--iters", "12", "--warmup-iters", "1")
GPT = ("--model", "tests.own_models:gpt", "--world-sizes", "2")
SMALL = (*SHORT, "--model", "mobilenet_v3_small", "--image-size", "32")
smoke = pytest.mark.smoke


def efficiencies(text: str) -> int:
    """The number of rows with an efficiency, which conftest.py checks."""
    rows = table(text, "efficiency (%)", "one rank gmean (ms)", "step gmean (ms)")
    return sum(row["efficiency (%)"] != "-" for row in rows)


OWN_HOOKS = """
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

def plain(state, bucket): return allreduce_hook(state, bucket)

def make(group, rank=1):
    assert rank == 4
    return group, plain
"""


@smoke
def test_two_ranks_with_and_without_hooks(bench: Bench, here: Path) -> None:
    """Of one's own hooks, one has the group as its state, and one is made with a parameter."""
    (here / "hooks.py").write_text(OWN_HOOKS)
    hooks = ["none", "hooks:plain", "hooks:make?rank=4", "bf16"]
    flags = ("--comm-hook", ",".join(hooks), "--dtype", "bf16", "--bucket-size", "1")
    run = bench(SCRIPT, *SMALL, *flags, "--batch-size", "2", "--world-sizes", "2", ranks=2)
    assert [case.key["comm_hook"] for case in run.report.cases] == [None, *hooks]
    assert {case.check for case in run.report.cases} == {"passed"}
    last = run.report.cases[-1]
    assert list(last.samples_s) == ["step", "local compute", "alone", "no ddp"]
    assert [len(rows) for rows in last.samples_s["no ddp"]] == [2]  # the first rank alone
    *_, row = table(run.out, "p50 sec/iter")
    p50 = last.metrics["step_s"].value  # a median, because of 2 rounds
    assert float(row["p50 sec/iter"]) == pytest.approx(p50, rel=0.06)
    assert row["p50 ex/sec/dev"] == f"{2 / p50:.1f}"  # the batch of a rank
    assert efficiencies(run.out) == len(hooks)
    # the breakdown comes before percentiles and rates
    assert run.out.index("efficiency") < run.out.index("Percentiles and rates: mobilenet")


@smoke
def test_odd_numbers_of_ranks_and_ones_own_model(bench: Bench, here: Path) -> None:
    """The path of the checkout has a space, and the model is in the working directory."""
    copy = copy_of_scripts(here / "a checkout")
    shutil.copy(ROOT / "tests" / "own_models.py", here / "mine.py")
    flags = ("--model", "mine:idle", "--find-unused-parameters", "--world-sizes", "1,3,5")
    run = bench(str(copy / SCRIPT), *SHORT, *flags, ranks=5)
    assert "\nmine:idle, batch size 3 per rank (weak scaling), torch's" in run.out
    assert run.checks == dict.fromkeys(["no ddp", "1M/1R", "1M/3R", "1M/5R"], "passed")


ONE_RANK_DIFFERS = """
import os, sys, torch

def rank():
    return int(os.environ["RANK"])

def batch(device):
    return torch.nn.Linear(4, 1), (torch.ones(3 + 997 * rank(), 4),), torch.sum

def leaves(device):
    sys.exit(0) if rank() == 1 else None
    return batch(device)
"""


@smoke
@pytest.mark.parametrize(
    ("function", "line"),
    [
        ("batch", "expected the same number of samples on all ranks, got 3 on rank 0 and 1000"),
        ("leaves", "differs:leaves: SystemExit: 0 (differs.py:11)"),
    ],
)
def test_a_model_that_differs_on_a_rank(bench: Bench, here: Path, function: str, line: str) -> None:
    (here / "differs.py").write_text(ONE_RANK_DIFFERS)
    run = bench(SCRIPT, *SHORT, "--model", f"differs:{function}", status=1)
    assert "exitcode  : 2 " in run.err
    assert line in run.reason
    assert not run.path.exists()


ODD = """
import sys
from dataclasses import dataclass

import torch
from torch import nn

calls = 0

@dataclass
class Graph:
    x: torch.Tensor
    edges: torch.Tensor

class Data:  # as in PyG: no dataclass
    def __init__(self, device): self.x = torch.ones(10, 4, device=device)

class Takes(nn.Linear):
    def forward(self, batch):
        return super().forward(batch if isinstance(batch, torch.Tensor) else batch.x)

class Unused(Takes):
    def __init__(self):
        super().__init__(4, 1)
        self.unused = nn.Parameter(torch.zeros(4))

def leave(y):
    global calls
    calls += 1
    sys.exit(0) if calls > 8 else None  # not in the trial and the first steps
    return y.sum()

def fails(device): raise ValueError("no data")
def graph(device): return Unused(), Graph(torch.ones(10, 4), torch.ones(2, 30)), torch.sum
def leaves(device): return nn.Linear(4, 1), torch.ones(5, 4), leave
def sparse(device):
    return nn.EmbeddingBag(8, 4, sparse=True), torch.zeros(5, 3, dtype=torch.long), torch.sum
def data(device):
    return {"model": Takes(4, 1), "args": (Data(device),), "loss": torch.sum, "samples": 2}
def jagged(device):
    parts = [torch.ones(2, 4), torch.ones(5, 4), torch.ones(1, 4)]
    batch = torch.nested.nested_tensor(parts, layout=torch.jagged)
    return Takes(4, 1), batch, lambda y: y.values().sum()
"""


@smoke
def test_odd_models(bench: Bench, here: Path) -> None:
    """A model that is refused or leaves does not end the measurement of the others. A graph has no
    known number of samples, so it has no rates."""
    (here / "odd.py").write_text(ODD)
    names = ",".join(f"odd:{name}" for name in ("fails", "leaves", "sparse", "graph"))
    run = bench(SCRIPT, *SHORT, "--models", names, "--world-sizes", "2", "--static-graph", status=1)
    assert "error: --model odd:fails: ValueError: no data (odd.py:33)\n" in run.err
    starts = {
        "odd:leaves": "failed: SystemExit: 0 (odd.py:30) (rank ",
        "odd:sparse": "failed: ValueError: the gradient of ",
        "odd:graph": "passed",
    }
    for case in run.report.cases:
        assert case.check.startswith(starts[case.key["model"]])
    sparse, _, graph = run.report.cases[-3:]
    assert "is sparse, which the default optimizer, SGD with weight decay, does" in sparse.check
    assert graph.key["batch_size"] is None
    assert "step_s" in graph.metrics
    assert "samples_per_s" not in graph.metrics
    assert "odd:graph, batch size unknown per rank (weak scaling), " in run.out
    models = " or ".join(f"--model odd:{name}" for name in ("leaves", "sparse", "graph"))
    assert f"# to measure a model in a process of its own: {models}\n" in run.out


@smoke
def test_batches_of_objects_and_a_defect_of_torch(bench: Bench, here: Path) -> None:
    """DDP passes objects like PyG's Data, and jagged tensors. Without accumulation, a static graph
    passes, too; with it, torch fails."""
    (here / "odd.py").write_text(ODD)
    options = "none,gradient_as_bucket_view,static_graph"
    flags = ("--models", "odd:data,odd:jagged", "--world-sizes", "2", "--accumulate", "2")
    run = bench(SCRIPT, *SHORT, *flags, "--ddp-options", options, "--no-breakdown", status=1)
    assert [case.key["batch_size"] for case in run.report.cases] == [2] * 4 + [3] * 4
    names = ["no ddp", *(f"1M/2R {option}" for option in options.split(","))]
    assert [case.name for case in run.report.cases] == names * 2
    defect = "fails with --static-graph and --accumulate above 1 (github.com/py"
    for case in run.report.cases:
        assert (defect if case.key["static_graph"] else "passed") in case.check


@smoke
def test_strong_scaling(bench: Bench) -> None:
    """The first rank alone trains the global batch, with an optimizer of its own: that of the DDP
    replica may communicate, and would wait for the other rank."""
    flags = (*SMALL, "--global-batch", "8", "--timeout", "60")
    run = bench(SCRIPT, *flags, ranks=2, inject="optimizer-communicates")
    assert "\nmobilenet_v3_small, global batch 8 (strong scaling), 32 px, " in run.out
    cases = run.report.cases
    assert [(case.name, case.key["batch_size"]) for case in cases] == [("1M/1R", 8), ("1M/2R", 4)]
    assert efficiencies(run.out) == 1


def test_a_step_averages_once_and_local_compute_never() -> None:
    """Three passes over the same batch have the gradient of one, also without averages."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        real = default_hooks.allreduce_hook
        hook = create_autospec(real, side_effect=real)
        for model, average, hooked in (
            (nn.Linear(4, 1), True, 0),
            (DistributedDataParallel(nn.Linear(4, 1)), True, 1),
            (DistributedDataParallel(nn.Linear(4, 1)), False, 1),
        ):
            if isinstance(model, DistributedDataParallel):
                model.register_comm_hook(None, hook)
            batch: ddp_sweep.Batch = ((torch.full((2, 4), 5.0),), {}, torch.sum)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            ddp_sweep.training_step(model, batch, optimizer, "fp32", 3, average)()
            gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
            assert torch.cat(gradients).tolist() == [10, 10, 10, 10, 2]
            assert hook.call_count == hooked
    finally:
        dist.destroy_process_group()


def test_labels_and_sets_of_ranks() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    names = [ddp_sweep.name_of(size, 8, cuda) for size in (1, 8, 16, 12)]
    assert names == ["1M/1G", "1M/8G", "2M/8G (16)", "2M/12G in all"]
    names = [ddp_sweep.name_of(size, 8, cpu) for size in (8, 16, 12)]
    assert names == ["1M/8R", "2M/8R (16)", "2M/12R in all"]
    assert ddp_sweep.sizes_of(None, 5, 5) == [1, 2, 4, 5]
    assert ddp_sweep.sizes_of(None, 24, 8) == [1, 2, 4, 8, 16, 24]
    assert ddp_sweep.sizes_of([2, "nodes"], 20, 8) == [2, 8, 16, 20]
    args: Any = SimpleNamespace(global_batch=8)
    line = "--global-batch 8 is not divisible by 3 ranks; try --world-sizes 1,2"
    assert ddp_sweep.invalid_sizes(args, 3, [1, 2, 3]) == line


def test_the_metrics_of_a_case_by_hand() -> None:
    """6 rounds of one sample. On the slowest rank a step takes 10 ms and local compute 8 ms. The
    first rank alone takes 6 ms."""
    rows = {
        "step": [[0.010] * 6, [0.009] * 6],
        "local compute": [[0.004] * 6, [0.008] * 6],
        "alone": [[0.004] * 6, [0.003] * 6],
        "no ddp": [[0.006] * 6],
    }
    key = {"ddp": True, "bucket_size_mb": 25.0, "comm_hook": "none"}
    key |= {"batch_size": 5, "global_batch": None, "accumulate": 1}
    case = Case(key=key, ranks=[0, 1])
    facts = [ddp_sweep.Facts("abc", "g", {"memory_gib": gib}, 35) for gib in (0.5, 0.75)]
    ddp_sweep.derive(case, Times(rows, [1] * 6), facts)
    values = {name: getattr(number, "value", number) for name, number in case.metrics.items()}
    expected = {
        "step_s": 0.010,
        "step_cv": 0,
        "samples_per_s": 2 * 5 / 0.010,
        "tokens_per_s": 2 * 35 / 0.010,
        "sample_s": 0.001,
        "efficiency": 0.6,
        "local_compute_s": 0.008,
        "exposed_s": 0.002,
        "communication_s": 0.004,
        "overlap": 0.5,  # 2 of 4 ms
        "late_s": 0.004,  # 8 ms - 4 ms
        "late_wait_s": 0.004,
        "memory_gib": 0.75,
    }
    assert {name: values[name] for name in expected} == pytest.approx(expected)
    assert case.check == "passed"
    case.key["global_batch"] = 10
    case.key["accumulate"] = 4
    facts[1] = facts[1]._replace(parameters="abd")
    ddp_sweep.derive(case, Times(rows, [1] * 6), facts)
    assert case.metrics["efficiency"].value == pytest.approx(0.3)
    assert case.metrics["samples_per_s"].value == pytest.approx(4 * 2 * 5 / 0.010)
    assert case.metrics["tokens_per_s"].value == pytest.approx(4 * 2 * 35 / 0.010)
    assert case.check == "failed: after the steps the parameters of rank 1 differ from rank 0's"


@pytest.mark.parametrize(
    ("digests", "verdict"),
    [
        ([("a", "g"), ("a", "g")], "passed"),
        ([("a", "g"), ("a", "h")], "failed: after the steps the gradients of rank 1 differ from r"),
        ([("a", "g"), ("a", NOT_FINITE)], "failed: gradients of rank 1 are not finite"),
        ([("a", NOT_FINITE)] * 2, "skipped: the gradients of all ranks are not finite"),
        ([(NOT_FINITE, "g")] * 2, "skipped: the parameters of all ranks are not finite"),
    ],
)
def test_a_diverging_loss_is_not_a_failure(digests: list[tuple[str, str]], verdict: str) -> None:
    facts = [ddp_sweep.Facts(*pair, {}, 0) for pair in digests]
    assert ddp_sweep.check(facts, [0, 1]).startswith(verdict)


@smoke
def test_batches_of_tokens_and_a_loss_that_diverges(bench: Bench) -> None:
    """Two sizes of a model, given by its parameter. A sample has 3 tokens. Losses that are a sum or
    infinite are measured as well."""
    own = "tests.own_models"
    models = f"{own}:batch_of_transformers?batch=2,{own}:batch_of_transformers?batch=4"
    flags = ("--models", f"{models},{own}:everything,{own}:diverges", "--world-sizes", "2")
    run = bench(SCRIPT, *SHORT, *flags, "--accumulate", "3")
    of_two = [case for case in run.report.cases if len(case.ranks) == 2]
    assert [case.key["batch_size"] for case in of_two] == [2, 4, 3, 3]
    assert [case.check for case in of_two[:3]] == ["passed"] * 3
    assert of_two[3].check.startswith("skipped: the ")
    tokens, step = of_two[1].metrics["tokens_per_s"], of_two[1].metrics["step_s"]
    assert tokens.value == pytest.approx(3 * 2 * 4 * 3 / step.value)
    assert "tokens_per_s" not in of_two[2].metrics
    assert run.out.count("tokens/s") == 2  # in the tables of two models
    assert "batch size 4 per rank (weak scaling), torch's" in run.out
    assert ", 3 batches accumulated" in run.out


@smoke
def test_interleaved_settings(bench: Bench) -> None:
    """Four settings in one case. Each has a printed ratio to the first one."""
    swept = ("--interleave", "--bucket-size", "25,0.001", "--comm-hook", "none,bf16")
    run = bench(SCRIPT, *TWELVE, *GPT, *swept)
    no_ddp, case = run.report.cases
    labels = ["25MB none", "25MB bf16", "0.001MB none", "0.001MB bf16"]
    assert (case.check, case.key["settings"]) == ("passed", ", ".join(labels))
    assert list(case.samples_s) == ["step", *labels[1:], "local compute", "no ddp"]
    assert {len(rows[0]) for rows in case.samples_s.values()} == {12}
    assert "settings" not in no_ddp.key
    assert efficiencies(run.out) == 4
    rows = table(run.out, "vs first", "simult. 95% ci")[1:]
    assert [row[""] for row in rows] == [f"1M/2R {label}" for label in labels]
    assert [row["vs first"] == "-" for row in rows] == [True, False, False, False]
    begin = "tests.own_models:gpt, torch's default precision"
    starts = [f"{begin}, buckets of 25 MiB: DDP on 2 ranks "]
    settings = ("25 MiB with bf16", "0.001 MiB", "0.001 MiB with bf16")
    starts += [f"{begin}, 2 ranks: {setting} " for setting in settings]
    for sentence, start in zip(run.report.end["answer"], starts, strict=False):
        assert sentence.startswith(start)
    assert "the fastest" in run.report.end["answer"][4]


@smoke
def test_interleaved_dtypes_and_options(bench: Bench) -> None:
    """A parameter without a gradient requires one of two options."""
    options = "static_graph,find_unused_parameters+gradient_as_bucket_view"
    flags = ("--model", "tests.own_models:idle", "--world-sizes", "2", "--interleave")
    run = bench(SCRIPT, *SHORT, *flags, "--dtype", "fp32,bf16", "--ddp-options", options)
    *alone, case = run.report.cases
    dtypes = {"no ddp fp32": "fp32", "no ddp bf16": "bf16"}
    assert {c.name: c.key["dtype"] for c in alone} == dtypes
    assert case.check == "passed"
    labels = [f"default none {x} {y}" for x in ("fp32", "bf16") for y in options.split(",")]
    assert list(case.samples_s) == ["step", *labels[1:]]
    assert "# no breakdown: local compute and one rank differ between dtypes\n" in run.out


@smoke
def test_settings_that_do_not_fit_into_memory_are_a_failed_row(bench: Bench) -> None:
    """The second replica does not fit on rank 1."""
    flags = (*GPT[:2], "--comm-hook", "none,fp16", "--interleave", "--no-breakdown")
    run = bench(SCRIPT, *SHORT, *flags, inject="twin-raises", status=1)
    failed = "failed: OutOfMemoryError: injected: no memory for a twin (rank 1)"
    assert [case.check for case in run.report.cases] == ["passed", "passed", failed]
    assert f"\n1M/2R  {failed}" in re.sub(" +  failed", "  failed", run.out)
    assert [row["vs first"] == "-" for row in table(run.out, "vs first")[:3]] == [True, True, False]


@smoke
def test_powersgd_over_gloo(bench: Bench) -> None:
    """It trains with one bucket. With several buckets torch's hook would hang, so the case fails
    and suggests a size: 16 x 32 + 3 x 1,104 parameters are 15 KiB."""
    flags = (*GPT, "--comm-hook", "powersgd", "--bucket-size", "25,0.001")
    run = bench(SCRIPT, *SHORT, *flags, status=1)
    _, one, several = run.report.cases
    assert one.check == "passed"
    assert list(one.samples_s) == ["step", "local compute", "no ddp"]
    assert "overlap" not in one.metrics
    assert several.check.startswith("failed: ValueError: the powersgd hook hangs over gloo with ")
    assert "take 0.0146 MiB; try --bucket-size 1" in several.check


@pytest.mark.faults
@pytest.mark.parametrize(
    ("fault", "hooks", "reason"),
    [
        ("stops-averaging", "bf16", "after the steps the gradients of rank 1 differ from rank 0's"),
        (
            "stops-averaging",
            "none,bf16 --interleave",
            "default bf16: after the steps the gradients ",
        ),
        ("adds-instead", "bf16", "the gradient of embedding.weight differs from the mean over ran"),
    ],
)
def test_hooks_that_do_not_average(bench: Bench, fault: str, hooks: str, reason: str) -> None:
    """One stops to average in a timed block: the weights do not change, because the learning rate
    is 0, so gradients are compared. Of interleaved settings the one with the hook is named."""
    run = bench(SCRIPT, *TWELVE, *GPT, "--comm-hook", *hooks.split(), inject=fault, status=1)
    _, case = run.report.cases
    assert case.check.startswith(f"failed: {reason}")


def answer_of(
    efficiency: Estimate, exposed: Estimate, global_batch: int | None = None, **late: Any
) -> Any:
    """The sentence about 2 ranks whose step takes 80 ms. late: metrics of late ranks."""
    key = {"model": "m", "dtype": "fp32", "ddp": True, "global_batch": global_batch}
    key |= {"device": "cpu", "bucket_size_mb": 25.0, "comm_hook": "none"}
    metrics = {"step_s": Estimate(0.08, 0.076, 0.084), "efficiency": efficiency}
    case = Case(key=key, ranks=[0, 1], metrics=metrics | {"exposed_s": exposed} | late)
    [sentence] = ddp_sweep.answer([case], ["rank 0 on a", "rank 1 on b"])
    return sentence


def test_the_answer() -> None:
    """2 * 0.625 = 1.25 times as fast."""
    faster, exposed = Estimate(0.625, 0.6, 0.7), Estimate(0.0162, 0.011, 0.022)
    assert answer_of(faster, exposed) == (
        "m, fp32, buckets of 25 MiB: DDP on 2 ranks trains 1.25 times (1.20 to 1.40) as fast as "
        "one rank alone; DDP adds 16.2 ms (11.0 to 22.0) to a step, which takes 80.0 ms"
    )
    assert answer_of(Estimate(0.55, 0.45, 0.7), Estimate(0.01)) == (
        "m, fp32, buckets of 25 MiB: DDP on 2 ranks and one rank alone do not differ "
        "significantly: 1.10 times (0.90 to 1.40) as fast; DDP adds 10.0 ms (no interval) to a "
        "step, which takes 80.0 ms"
    )
    assert answer_of(Estimate(0.55), Estimate(0.01)).startswith(
        "m, fp32, buckets of 25 MiB: DDP on 2 ranks and one rank alone cannot be compared, because "
        "their ratio has no interval; DDP adds 10.0 ms (no interval) to a step"
    )
    # a late rank, not DDP, is why 2 ranks do not train much faster than one
    wait = Estimate(0.04, 0.039, 0.041)
    assert (
        "2 ranks train 1.25 times (1.20 to 1.40) as fast as one rank alone; "
        "rank 1 on b makes the other rank wait 40.0 ms (39.0 to 41.0) of 80.0 ms; DDP adds "
    ) in answer_of(faster, exposed, late_ranks=[1], late_wait_s=wait)
    # an arithmetic mean may exceed the geometric one of the step
    longer = answer_of(faster, exposed, late_ranks=[1], late_wait_s=wait * 2.1)
    assert (
        "rank 1 on b makes the other rank wait for nearly all of a step of 80.0 ms; DDP" in longer
    )
    # more than twice as fast, or exposed longer than the step
    assert isinstance(answer_of(Estimate(1.2, 1.1, 1.3), exposed), Implausible)
    assert isinstance(answer_of(Estimate(0.5), Estimate(0.12, 0.1, 0.13)), Implausible)
    # smaller batches may fit into caches
    assert not isinstance(answer_of(Estimate(1.2, 1.1, 1.3), exposed, 4), Implausible)
