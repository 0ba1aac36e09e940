"""compile_sweep.py as its user runs it, its faults, and its numbers by hand."""

import gzip
import json
import re
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks import compile_sweep
from common.report import Case, Estimate
from common.stats import Times
from common.workloads.reference import Reference

SCRIPT = "benchmarks/compile_sweep.py"
SHORT = ("--iters", "6", "--warmup-iters", "1")
CPU = torch.device("cpu")
smoke, faults = pytest.mark.smoke, pytest.mark.faults


@smoke
def test_every_strategy_eager_and_compiled(bench: Callable[..., Any]) -> None:
    flags = ("--strategies", "all", "--backends", "eager,aot_eager", *SHORT)
    run = bench(SCRIPT, *flags, ranks=2)
    assert run.status == 0, run.err
    cases = {(c.key["strategy"], c.key["compiler"]): c for c in run.report.cases}
    assert list(cases) == [(s, b) for s in compile_sweep.STRATEGIES for b in ("eager", "aot_eager")]
    assert {case.check for case in cases.values()} == {"passed"}
    for (strategy, backend), case in cases.items():
        m, p50 = case.metrics, case.metrics["step_s"].value
        ranks = 1 if strategy == "none" else 2
        assert [len(rows) for rows in case.samples_s["step"]] == [6] * ranks
        assert [len(rows) for rows in case.samples_s["forward+backward"]] == [6] * ranks
        assert m["fsdp_units"] == (11 if case.key["fsdp_wrap"] else 0)
        assert case.key["fsdp_wrap"] == strategy.startswith("fsdp")
        assert m["samples_per_s"].value == pytest.approx(4 * ranks / p50)
        assert m["memory_gib"] > 0
        assert (m["graphs"] > 0) == (m["start_s"] > 0) == (backend == "aot_eager")
        assert m["recompiles"] == 0
        assert ("eager" in case.samples_s) == ("vs_eager" in m) == (backend == "aot_eager")
        if backend == "aot_eager":  # a round has one step, so a ratio of its own
            step, eager = (np.max(case.samples_s[name], axis=0) for name in ("step", "eager"))
            assert m["vs_eager"].value == pytest.approx(np.median(eager / step))
        assert f"{strategy} {backend}" in run.out.split("Cost: ")[1]
    assert cases["none", "aot_eager"].metrics["graph_breaks"] == 0
    title = "toy-small, batch size 4, torch's default precision, FSDP wraps each layer"
    assert f"\n{title}\n" in run.out


@smoke
def test_a_decoder_on_three_ranks_in_one_unit_with_a_trace(
    bench: Callable[..., Any], tmp_path: Path
) -> None:
    flags = ("--models", "decoder-tiny", "--batch-size", "2", "--strategies", "all")
    more = ("--backends", "eager", "--dtype", "bf16", "--no-fsdp-wrap", "--profile", str(tmp_path))
    run = bench(SCRIPT, *flags, *more, *SHORT, ranks=3)
    assert run.status == 0, run.err + run.out
    assert [len(case.ranks) for case in run.report.cases] == [1, 3, 3, 3]
    assert {case.check for case in run.report.cases} == {"passed"}
    assert {case.metrics["fsdp_units"] for case in run.report.cases} == {0}
    assert "bf16, FSDP in one unit" in run.out
    case = run.report.cases[1]
    content = gzip.decompress(Path(case.metrics["traces"]["0"]["file"]).read_bytes())
    events = json.loads(content)["traceEvents"]
    ranges = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    # 5 steps and one before them, with the optimizer and without it
    for name, count in (("forward", 12), ("backward", 12), ("Optimizer.step#SGD.step", 6)):
        assert ranges.count(name) == count


@smoke
def test_ones_own_model(bench: Callable[..., Any]) -> None:
    flags = ("--model", "tests.own_models:gpt", "--strategies", "all", "--dynamo", "aot_eager")
    run = bench(SCRIPT, *flags, *SHORT, ranks=2)
    assert run.status == 0, run.err
    assert [case.check for case in run.report.cases] == ["passed"] * 4
    assert [case.metrics["fsdp_units"] for case in run.report.cases] == [0, 0, 3, 3]
    for case in run.report.cases:
        m = case.metrics
        assert case.key["batch_size"] == 6
        assert m["samples_per_s"].value == pytest.approx(6 * len(case.ranks) / m["step_s"].value)
    assert "\ntests.own_models:gpt, batch size 6, torch's default precision, " in run.out


@smoke
def test_caches_are_cold_under_plain_python(bench: Callable[..., Any], tmp_path: Path) -> None:
    warm = tmp_path / "warm"
    flags = ("--strategies", "ddp", "--backends", "inductor", *SHORT)
    run = bench(SCRIPT, *flags, ranks=0, TORCHINDUCTOR_CACHE_DIR=str(warm))
    assert run.status == 0, run.err
    assert [(c.check, len(c.ranks)) for c in run.report.cases] == [("passed", 1)]
    assert list(warm.rglob("*.so")) == []


@faults
def test_gradients_that_are_not_averaged(bench: Callable[..., Any]) -> None:
    flags = ("--strategies", "all", "--backends", "eager", *SHORT)
    run = bench(SCRIPT, *flags, ranks=2, inject="unaveraged-gradients")
    assert run.status == 1
    none, *others = run.report.cases
    assert none.check == "passed"
    for case in others:
        assert case.check.startswith("failed: the loss of rank 0 in step 2 is "), case.check


@faults
def test_a_compiler_that_fails_on_one_rank(bench: Callable[..., Any]) -> None:
    run = bench(SCRIPT, "--strategies", "ddp", *SHORT, ranks=2, inject="compiler-fails")
    assert run.status == 1  # torchrun's, for the scripts' 2
    said = "inductor cannot compile x * x on rank 1: InvalidCxxCompiler: No working C++ compiler"
    assert said in run.err


def test_flags_of_the_program_it_replaces() -> None:
    flags = ["--toy_model", "--fsdp", "--dynamo=inductor", "--repeat=10", "--batch_size=3"]
    args = compile_sweep.parse_args(flags)
    assert (args.models, args.strategies, args.backends) == (["toy"], ["fsdp1"], ["inductor"])
    assert (args.iters, args.batch_size) == (10, 3)
    usual = compile_sweep.parse_args(["--device", "cpu"])
    assert (usual.models, usual.strategies) == (["toy-small"], ["none", "ddp", "fsdp2"])
    assert (usual.backends, usual.batch_size, usual.iters) == (["eager", "inductor"], 4, None)


def derived(step_s: float, eager_s: float | None, *checks: str) -> dict[str, Any]:
    """The metrics of two ranks, of which the second one is faster, in 12 rounds; and the check."""
    samples = {"step": [[step_s] * 12, [step_s / 2] * 12]}
    # the optimizer takes 5 ms; one step of twelve takes 12 ms longer
    samples["forward+backward"] = [[step_s - 0.005] * 11 + [step_s + 0.007]] * 2
    if eager_s:
        samples["eager"] = [[eager_s] * 12, [eager_s / 3] * 12]
    costs = {"first_step_s": 3.9, "first_steps_s": 4.06, "start_s": 1.0}
    key = {"model": "decoder-10m", "batch_size": 8}
    case = Case(key=key, ranks=[0, 1], samples_s=samples, rounds=[1] * 12)
    facts = [(costs, checks[0]), (costs | {"start_s": 0.5}, checks[1])]
    compile_sweep.derive(case, Times(samples, case.rounds), facts)
    return case.metrics | {"check": case.check}


def test_numbers_by_hand() -> None:
    """Two ranks, a batch of 8: the slower one takes 20 ms eager and 15 ms compiled."""
    m = derived(0.015, 0.020, "passed", "passed")
    assert m["samples_per_s"].value == pytest.approx(16 / 0.015)
    assert m["step_mean_s"] == pytest.approx(0.015)
    assert m["forward_backward_s"].value == pytest.approx(0.010)
    assert m["forward_backward_mean_s"] == pytest.approx(0.011)  # (11 * 10 + 22) / 12 ms
    assert m["vs_eager"].value == pytest.approx(20 / 15)
    assert m["payback_steps"].value == pytest.approx((1.0 + 4.06 - 3 * 0.02) / 0.005)  # 1000
    assert m["check"] == "passed"
    m = derived(0.030, 0.020, "skipped: x", "failed: y")
    assert "payback_steps" not in m  # it never pays
    assert m["check"] == "failed: y"
    m = derived(0.020, None, "skipped: x", "passed")
    assert {"vs_eager", "payback_steps"}.isdisjoint(m)
    assert m["check"] == "skipped: x"


WHOLE = "m, fp32: whole steps of ddp inductor are "
ALIKE = "m, fp32: ddp inductor and eager cannot be told apart: "


@pytest.mark.parametrize(
    ("metrics", "sentence"),
    [
        (
            {"vs_eager": Estimate(2, 1.5, 2.75)},
            f"{WHOLE}2.00 times (1.50 to 2.75) as fast as eager",
        ),
        (
            {"vs_eager": Estimate(2, 1.5, 2.75), "payback_steps": Estimate(1234, 900, 2000)},
            f"{WHOLE}2.00 times (1.50 to 2.75) as fast as eager ones; "
            "compiling pays after 1,234 steps (900 to 2,000)",
        ),
        (
            {"vs_eager": Estimate(0.5, 0.4, 0.6)},
            f"{WHOLE}0.50 times (0.40 to 0.60) as fast as eager ones; compiling does not pay",
        ),
        ({"vs_eager": Estimate(1.1, 0.9, 1.4)}, f"{ALIKE}1.10 times (0.90 to 1.40) as fast"),
        ({"vs_eager": Estimate(2)}, f"{ALIKE}2.00 times (no interval) as fast"),
    ],
)
def test_the_answer(metrics: dict[str, Any], sentence: str) -> None:
    key = {"model": "m", "dtype": "fp32"}
    compiled = Case(key=key, ranks=[0], name="ddp inductor", metrics=metrics)
    eager = Case(key=key, ranks=[0], name="ddp eager")
    (said,) = compile_sweep.answer([eager, compiled])
    assert said.removesuffix(" ones") == sentence


def test_the_plan_has_complete_keys_that_claim_what_is_done() -> None:
    flags = ["--device", "cpu", "--dtype", "fp32,bf16", "--models", "toy-small,a.b:c"]
    args = compile_sweep.parse_args([*flags, "--dynamo-no-optimize-ddp"])
    job: Any = Namespace(world_size=4, device=CPU)
    tables = compile_sweep.plan(args, job, {"a.b:c": 7})
    assert [title.split(", ")[:3] for title in tables] == [
        [model, f"batch size {size}", dtype]
        for model, size in (("toy-small", 4), ("a.b:c", 7))
        for dtype in ("fp32", "bf16")
    ]
    cases = [case for table in tables.values() for case in table]
    names = ["none eager", "none inductor", "ddp eager", "ddp inductor"]
    assert [name for name, _, _ in cases[:4]] == names
    assert [ranks for _, ranks, _ in cases[:4]] == [1, 1, 4, 4]
    assert [key["batch_size"] for _, _, key in cases] == [4] * 12 + [7] * 12
    assert len({str(key) for _, _, key in cases}) == len(cases) == 24
    assert len({tuple(key) for _, _, key in cases}) == 1
    for _, _, key in cases:
        assert key["fsdp_wrap"] == (key["strategy"] == "fsdp2")
        split = key["strategy"] == "ddp" and key["compiler"] == "inductor"
        assert key["dynamo_no_optimize_ddp"] == split


def test_one_process_alone() -> None:
    """What a rank's losses are compared with, and why there may be nothing."""
    model, batches = compile_sweep.create("toy-small", 4, 8, CPU)
    before = [weight.detach().clone() for weight in model.parameters()]
    reference = compile_sweep.reference_of(model, batches, "fp32", 10)
    assert isinstance(reference, Reference)
    assert all(map(torch.equal, model.parameters(), before))
    assert [len(row) for row in reference.losses] == [8] * 3  # ranks 8 and 9 share those of 0 and 1
    means = [sum(row) / 8 for row in reference.losses]
    assert means[0] - means[2] > compile_sweep.TOLERANCES["fp32"] * means[0]
    key = {"dtype": "fp32", "compiler": "eager"}
    of_rank_9 = [row[1] for row in reference.losses]
    assert compile_sweep.check(key, 9, of_rank_9, reference, 0) == "passed"
    of_rank_9[2] *= 1.01
    failed = compile_sweep.check(key, 9, of_rank_9, reference, 0)
    assert failed.startswith("failed: the loss of rank 9 in step 3 is ")
    model, batches = compile_sweep.create("tests.own_models:noisy", 0, 2, CPU)
    why = compile_sweep.reference_of(model, batches, "fp32", 2)
    assert why == "the model draws random numbers, such as those of dropout"


def test_what_was_not_compiled_fails() -> None:
    key = {"dtype": "fp32", "compiler": "inductor"}
    assert compile_sweep.check(key, 0, [], "nothing", 1) == "skipped: nothing"
    failed = compile_sweep.check(key, 0, [], "nothing", 0)
    assert failed == "failed: inductor compiled nothing: dynamo has made no graph of the model"
    assert compile_sweep.check(key | {"compiler": "eager"}, 0, [], "nothing", 0) != failed


def model_of(**parts: nn.Module) -> nn.Module:
    model = nn.Module()
    for name, part in parts.items():
        model.add_module(name, part)
    return model


def test_units_are_the_layers_of_lists_inner_ones_first() -> None:
    """Both stacks of a T5, the dict of torchtitan; not a dict of unlike parts, as nanoGPT has."""
    encoder = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    inner = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    decoder = nn.ModuleDict({"0": model_of(inner=inner), "1": model_of()})
    parts = nn.ModuleDict({"wte": nn.Embedding(4, 4), "h": encoder})
    one = nn.ModuleList([nn.Linear(4, 4)])
    units = compile_sweep.layers_of(model_of(parts=parts, decoder=decoder, one=one))
    assert {id(unit) for unit in units} == {id(x) for x in [*encoder, *inner, *decoder.values()]}
    assert units.index(inner[0]) < units.index(decoder["0"])


def test_a_backend_that_cannot_compile_here() -> None:
    """As tvm without its package: one line, before the first case."""

    def no_package(graph: Any, inputs: Any) -> Any:
        raise ModuleNotFoundError("No module named 'tvm'")

    torch._dynamo.register_backend(no_package, name="no_package")
    reason = "no_package cannot compile x * x on rank 1: ModuleNotFoundError: No module named 'tvm'"
    job: Any = Namespace(rank=1, device=CPU)
    with pytest.raises(ValueError, match=re.escape(reason)):
        compile_sweep.start("no_package", job)


def test_the_tenth_backend_is_started_as_the_first_one() -> None:
    """Dynamo compiles a function for eight backends, then no more."""
    started: list[int] = []
    for number in range(10):

        def compiler(graph: Any, inputs: Any, number: int = number) -> Any:
            started.append(number)
            return graph.forward

        torch._dynamo.register_backend(compiler, name=f"backend_{number}")
        job: Any = Namespace(rank=0, device=CPU)
        compile_sweep.start(f"backend_{number}", job)
    assert started == list(range(10))
