"""compile_sweep.py as its user runs it, its faults, and its numbers by hand."""

import gzip
import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import compile_sweep
from benchmarks.workloads.reference import Reference
from common.report import Case, Estimate
from common.stats import Times

SCRIPT = "benchmarks/compile_sweep.py"
CPU = torch.device("cpu")
smoke, faults = pytest.mark.smoke, pytest.mark.faults


@smoke
def test_ones_own_model_by_every_strategy(bench: Callable[..., Any]) -> None:
    flags = ("--model", "tests.own_models:gpt", "--strategies", "all", "--iters", "2", "-w", "1")
    run = bench(SCRIPT, *flags, "--dynamo", "eager,aot_eager", ranks=2)
    assert run.status == 0, run.err
    cases = {(c.key["strategy"], c.key["compiler"]): c for c in run.report.cases}
    assert list(cases) == [(s, b) for s in compile_sweep.STRATEGIES for b in ("eager", "aot_eager")]
    for (strategy, backend), case in cases.items():
        m, ranks = case.metrics, 1 if strategy == "none" else 2
        assert case.check == "passed"
        assert [len(rows) for rows in case.samples_s["forward+backward"]] == [2] * ranks
        assert m["samples_per_s"].value == pytest.approx(6 * ranks / m["step_s"].value)
        assert m["fsdp_units"] == (3 if strategy.startswith("fsdp") else 0)
        compiled = backend == "aot_eager"
        assert (m["graphs"] > 0) == (m["start_s"] > 0) == ("vs_eager" in m) == compiled
        assert m["recompiles"] == 0
        assert f"{strategy} {backend}" in run.out.split("Cost: ")[1]
    assert cases["none", "aot_eager"].metrics["graph_breaks"] == 0


@smoke
def test_a_decoder_on_three_ranks_in_one_unit_with_a_trace(
    bench: Callable[..., Any], tmp_path: Path
) -> None:
    flags = ("--models", "decoder-nano", "--batch-size", "2", "--strategies", "ddp,fsdp2")
    more = ("--backends", "eager", "--dtype", "bf16", "--no-fsdp-wrap", "--iters", "1")
    trace = ("--profile", str(tmp_path), "--profile-ranks", "0")
    run = bench(SCRIPT, *flags, *more, *trace, ranks=3)
    assert run.status == 0, run.err + run.out
    assert "bf16, FSDP in one unit" in run.out
    for case in run.report.cases:
        assert (case.check, len(case.ranks), case.metrics["fsdp_units"]) == ("passed", 3, 0)
    file = run.report.cases[0].metrics["traces"]["0"]["file"]
    events = json.loads(gzip.decompress(Path(file).read_bytes()))["traceEvents"]
    ranges = {event["name"] for event in events if event.get("cat") == "user_annotation"}
    assert {"forward", "backward", "Optimizer.step#SGD.step"} <= ranges


@smoke
def test_caches_are_cold_under_plain_python(bench: Callable[..., Any], tmp_path: Path) -> None:
    warm = tmp_path / "warm"
    flags = ("--strategies", "ddp", "--backends", "inductor", "--iters", "1")
    run = bench(SCRIPT, *flags, ranks=0, TORCHINDUCTOR_CACHE_DIR=str(warm))
    assert run.status == 0, run.err
    assert [(c.check, len(c.ranks)) for c in run.report.cases] == [("passed", 1)]
    assert list(warm.rglob("*.so")) == []


@faults
def test_gradients_that_are_not_averaged(bench: Callable[..., Any]) -> None:
    flags = ("--strategies", "all", "--backends", "eager", "--iters", "1")
    run = bench(SCRIPT, *flags, ranks=2, inject="unaveraged-gradients")
    assert run.status == 1
    none, *others = run.report.cases
    assert none.check == "passed"
    for case in others:
        assert case.check.startswith("failed: the loss of rank 0 in step 2 is "), case.check


@faults
def test_a_compiler_that_fails_on_one_rank(bench: Callable[..., Any]) -> None:
    run = bench(SCRIPT, "--strategies", "ddp", ranks=2, inject="compiler-fails")
    assert run.status == 1  # torchrun's, for the scripts' 2
    said = "inductor cannot compile x * x on rank 1: InvalidCxxCompiler: No working C++ compiler"
    assert said in run.err


def test_numbers_by_hand() -> None:
    """12 rounds of two ranks with a batch of 8. The slower rank takes 20 ms eager and 15 ms
    compiled, of which 5 ms are the optimizer's; one step without it takes 22 ms in place of 10."""
    samples = {"step": [[0.015] * 12, [0.007] * 12], "eager": [[0.020] * 12, [0.007] * 12]}
    samples["forward+backward"] = [[0.010] * 11 + [0.022]] * 2
    costs = {"first_steps_s": 4.06, "start_s": 1.0}
    case = Case(key={"batch_size": 8}, ranks=[0, 1])
    facts = [(costs, "skipped: x"), (costs | {"start_s": 0.5}, "failed: y")]
    compile_sweep.derive(case, Times(samples, [1] * 12), facts)
    m = case.metrics
    assert m["samples_per_s"].value == pytest.approx(16 / 0.015)
    assert m["forward_backward_s"].value == pytest.approx(0.010)
    assert m["forward_backward_mean_s"] == pytest.approx(0.011)  # (11 * 10 + 22) / 12 ms
    assert m["vs_eager"].value == pytest.approx(20 / 15)
    assert m["payback_steps"].value == pytest.approx((1.0 + 4.06 - 3 * 0.02) / 0.005)  # 1000
    assert case.check == "failed: y"


def test_the_answer() -> None:
    def of(**metrics: Any) -> Case:
        key = {"model": "m", "dtype": "fp32"}
        return Case(key=key, ranks=[0], name="x", metrics=metrics)

    pays = of(vs_eager=Estimate(2, 1.5, 2.75), payback_steps=Estimate(1234, 900, 2000))
    cases = [of(), pays, of(vs_eager=Estimate(0.5, 0.4, 0.6)), of(vs_eager=Estimate(2))]
    assert compile_sweep.answer(cases) == [
        "m, fp32: whole steps of x are 2.00 times (1.50 to 2.75) as fast as eager ones; "
        "compiling pays after 1,234 steps (900 to 2,000)",
        "m, fp32: whole steps of x are 0.50 times (0.40 to 0.60) as fast as eager ones; "
        "compiling does not pay",
        "m, fp32: x and eager cannot be told apart: 2.00 times (no interval) as fast",
    ]


def test_one_process_alone() -> None:
    """What a rank's losses are compared with, and why there may be nothing."""
    model, batches = compile_sweep.create("toy-small", 4, 8, CPU)
    reference = compile_sweep.reference_of(model, batches, "fp32", 10)
    assert isinstance(reference, Reference)
    assert [len(row) for row in reference.losses] == [8] * 3  # ranks 8 and 9 share those of 0 and 1
    means = [sum(row) / 8 for row in reference.losses]
    assert means[0] - means[2] > compile_sweep.TOLERANCES["fp32"] * means[0]
    key = {"dtype": "fp32", "compiler": "inductor"}
    losses = [row[1] for row in reference.losses]  # of rank 9
    assert compile_sweep.check(key, 9, losses, reference, 1) == "passed"
    uncompiled = compile_sweep.check(key, 9, losses, reference, 0)
    assert uncompiled == "failed: inductor compiled nothing: dynamo has made no graph of the model"
    losses[2] *= 1.01
    failed = compile_sweep.check(key, 9, losses, reference, 1)
    assert failed.startswith("failed: the loss of rank 9 in step 3 is ")
    model, batches = compile_sweep.create("tests.own_models:noisy", 0, 2, CPU)
    why = compile_sweep.reference_of(model, batches, "fp32", 2)
    assert why == "the model draws random numbers, such as those of dropout"


def test_units_are_the_layers_of_lists_inner_ones_first() -> None:
    """The list of a T5, the dict of torchtitan; not a dict of unlike parts, as nanoGPT has."""
    inner = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    layers = nn.ModuleDict({"0": nn.Sequential(inner), "1": nn.Sequential()})
    one = nn.ModuleList([nn.Linear(4, 4)])
    parts = nn.ModuleDict({"wte": nn.Embedding(4, 4), "h": layers})
    units = compile_sweep.layers_of(nn.Sequential(parts, one))
    assert {id(unit) for unit in units} == {id(x) for x in [*inner, *layers.values()]}
    assert units.index(inner[0]) < units.index(layers["0"])


def test_the_tenth_backend_is_started_as_the_first_one() -> None:
    """Dynamo compiles a function for eight backends, then no more."""
    started: list[Any] = []

    def compiler(graph: Any, inputs: Any) -> Any:
        started.append(graph)
        return graph.forward

    job: Any = Namespace(rank=0, device=CPU)
    for number in range(10):
        torch._dynamo.register_backend(compiler, name=f"backend_{number}")
        compile_sweep.start(f"backend_{number}", job)
    assert len(started) == 10
