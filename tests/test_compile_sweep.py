"""compile_sweep.py under torchrun, its faults, and its arithmetic."""

import contextlib
import gzip
import json
import os
import re
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from benchmarks import compile_sweep
from benchmarks.workloads import own_model
from benchmarks.workloads.reference import Reference
from common.stats import Estimate, Times
from harness.report import Case
from tests import own_models
from tests.process import ROOT, Bench

SCRIPT = "benchmarks/compile_sweep.py"
ONE_STEP = ("--iters", "1", "-w", "1")
OWN = ("--model", "tests.own_models:gpt")
MODELS = ROOT / "docs" / "models"
CPU = torch.device("cpu")
smoke, faults = pytest.mark.smoke, pytest.mark.faults


@smoke
def test_ones_own_model_by_every_strategy(bench: Bench) -> None:
    flags = ("--strategies", "all", "--iters", "2", "-w", "1", "--dynamo", "eager,aot_eager")
    run = bench(SCRIPT, *OWN, *flags)
    cases = {(c.key["strategy"], c.key["compiler"]): c for c in run.report.cases}
    assert list(cases) == [(s, b) for s in compile_sweep.STRATEGIES for b in ("eager", "aot_eager")]
    for (strategy, backend), case in cases.items():
        m, ranks = case.metrics, 1 if strategy == "none" else 2
        assert case.check == "passed"
        assert [len(rows) for rows in case.samples_s["forward+backward"]] == [2] * ranks
        assert m["fsdp_units"] == (3 if strategy.startswith("fsdp") else 0)
        compiled = backend == "aot_eager"
        assert (m["graphs"] > 0) == (m["start_s"] > 0) == ("vs_eager" in m) == compiled
        assert m["recompiles"] == 0
        assert f"{strategy} {backend}" in run.out.split("Cost: ")[1]
    assert cases["none", "aot_eager"].metrics["graph_breaks"] == 0


@smoke
def test_interleaved_strategies(bench: Bench) -> None:
    """A replica of a user's model per strategy. A resumed run prints the report's rows."""
    flags = "--interleave --strategies ddp,fsdp2 --backends eager,aot_eager --iters 12 -w 1"
    run = bench(SCRIPT, *OWN, *flags.split())
    (case,) = run.report.cases
    labels = ["ddp eager", "ddp aot_eager", "fsdp2 eager", "fsdp2 aot_eager"]
    assert (case.check, case.key["settings"]) == ("passed", ", ".join(labels))
    assert list(case.samples_s) == ["step", *labels[1:]]
    found = [(row.name, row.metrics["fsdp_units"]) for row in compile_sweep.rows_of(case)]
    assert found == [*zip(labels, [0, 0, 3, 3], strict=True)]
    graphs = [row.metrics["graphs"] > 0 for row in compile_sweep.rows_of(case)]
    assert graphs == [False, True] * 2
    *sentences, fastest = run.report.end["answer"]
    for label, sentence in zip(labels[1:], sentences, strict=True):
        assert sentence.startswith(f"tests.own_models:gpt, torch's default precision: {label} ")
    assert "fastest" in fastest
    again = bench(SCRIPT, *OWN, *flags.split(), "--resume")
    assert set(labels) <= set(re.findall(r"^(\w+ \w+)  ", again.out, re.MULTILINE))
    assert re.search(rf"^# {case.name}: measured 20.* UTC on ", again.out, re.MULTILINE)


TINY_BERT = "num_hidden_layers=3, hidden_size=32, num_attention_heads=4, intermediate_size=64, "
TINY_T5 = "num_layers=2, d_model=32, d_kv=8, d_ff=64, num_heads=4, "


@smoke
@pytest.mark.parametrize(("model", "backend"), [("bert", "aot_eager"), ("t5", "eager")])
def test_models_of_transformers(model: str, backend: str, bench: Bench, here: Path) -> None:
    """docs/models/hf.py, but smaller. The source program wraps BertLayer and T5Block."""
    if not os.environ.get("CI"):
        pytest.importorskip("transformers")
    text = (MODELS / "hf.py").read_text().replace("(4, 512)", "(2, 16)")
    text = text.replace("BertConfig(", f"BertConfig(vocab_size=64, {TINY_BERT}")
    (here / "hf.py").write_text(text.replace("T5Config(", f"T5Config(vocab_size=64, {TINY_T5}"))
    # T5 has 2 layers in its encoder and 2 in its decoder
    wrapped, layers = {"bert": ("BertLayer", 3), "t5": ("T5Block", 4)}[model]
    flags = ("--model", f"hf:{model}", "--strategies", "ddp,fsdp1,fsdp2", "--backends", backend)
    wrap = ("--fsdp-wrap-classes", wrapped, "--fsdp-checkpoint")
    run = bench(SCRIPT, *flags, *wrap, *ONE_STEP)
    found = [(case.check, case.metrics["fsdp_units"]) for case in run.report.cases]
    assert found == [("passed", units) for units in (0, layers, layers)]


@smoke
def test_the_gpt_2_of_the_page(bench: Bench, here: Path) -> None:
    """With both scripts and small parameters. DDP and FSDP2 are compared."""
    if not os.environ.get("CI"):
        pytest.importorskip("transformers")
    page = (ROOT / "docs" / "own_model.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (block,) = [block for block in blocks if "  # mine.py" in block.partition("\n")[0]]
    (here / "mine.py").write_text(block)
    model = ("--model", "mine:gpt2?batch=2&layers=1&width=48&length=16")
    run = bench("benchmarks/ddp_sweep.py", *model, "--world-sizes", "2", "--iters", "1")
    assert [case.check for case in run.report.cases] == ["passed"] * 2
    assert {case.key["batch_size"] for case in run.report.cases} == {2}
    assert "tokens_per_s" in run.report.cases[1].metrics
    flags = ("--interleave", "--strategies", "ddp,fsdp2", "--backends", "eager", "--iters", "1")
    run = bench(SCRIPT, *model, *flags)
    (case,) = run.report.cases
    assert case.check == "passed"
    assert re.search(r"samples/s +tokens/s", run.out)
    assert "fsdp2 eager tokens_per_s" in case.metrics


@smoke
def test_models_whose_forward_is_defined_in_torch(bench: Bench, here: Path) -> None:
    """The model of the README, and one with FSDP units. Dynamo skips such a forward inside DDP and
    FSDP."""
    block = (ROOT / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    (here / "mine.py").write_text(block)
    models = ("--models", "mine:mlp?batch=2&width=8,tests.own_models:everything")
    flags = ("--strategies", "ddp,fsdp1,fsdp2", "--backends", "eager,aot_eager")
    run = bench(SCRIPT, *models, *flags, *ONE_STEP)
    assert [case.check for case in run.report.cases] == ["passed"] * 12
    assert [case.metrics["graphs"] > 0 for case in run.report.cases] == [False, True] * 6
    skips = "inside DDP and FSDP, torch.compile skips the forward of"
    assert run.out.count(f"# ddp aot_eager: {skips} Sequential; ") == 2
    assert run.out.count(skips) == 6
    assert f"# fsdp2 aot_eager: {skips} Linear, Sequential; " in run.out


STAND_IN = """
from tests.own_models import gpt

class Model:
    def __init__(self, test, device):
        self.device = device
        assert test == "train"

    def get_module(self):
        model, inputs, _ = gpt(self.device)
        model.register_forward_hook(lambda module, given, output: output.logits)
        return model, list(inputs)
"""


@smoke
def test_a_model_of_torchbench(bench: Bench, here: Path) -> None:
    """docs/models/tb.py, with a stand-in that has the interface of torchbench."""
    package = here / "torchbenchmark" / "models" / "hf_Tiny"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(STAND_IN)
    shutil.copy(MODELS / "tb.py", here)
    flags = "--model tb:hf_Tiny --fsdp --fsdp-wrap --backends eager --iters 1"
    run = bench(SCRIPT, *flags.split())
    (case,) = run.report.cases
    assert (case.check, case.key["batch_size"], case.metrics["fsdp_units"]) == ("passed", 6, 3)


@smoke
def test_graphs_as_the_source_printed_them(bench: Bench, here: Path) -> None:
    """TORCH_LOGS instead of `--dynamo print`: the graph, and its parts at the buckets of DDP."""
    flags = ("--ddp", "--dynamo", "aot_eager", "--iters", "1", "--profile")
    run = bench(SCRIPT, *flags, cold=True, TORCH_LOGS="graph_code,ddp_graphs")
    assert "submod_0" in run.err
    assert "submod_1" in run.err
    assert len(list((here / "traces").glob("*.json.gz"))) > 0  # --profile without a folder


@smoke
def test_the_graph_of_autograd_by_torchviz(bench: Bench, here: Path) -> None:
    shutil.copy(MODELS / "drawn.py", here)
    (here / "hf.py").write_text("from tests.own_models import gpt as bert\n")
    flags = ("--model", "drawn:bert", "--ddp", "--backends", "eager", "--iters", "1")
    bench(SCRIPT, *flags)
    assert "layers.2.down.weight" in (here / "bert.dot").read_text()


@smoke
def test_a_decoder_on_three_ranks_in_one_unit_with_a_trace(bench: Bench, tmp_path: Path) -> None:
    flags = "--models decoder-nano --batch-size 2 --strategies ddp,fsdp2 --backends eager --iters 1"
    more = f"--dtype bf16 --no-fsdp-wrap --profile-ranks 0 --profile {tmp_path}"
    run = bench(SCRIPT, *flags.split(), *more.split(), ranks=3)
    assert "bf16, FSDP in one unit" in run.out
    for case in run.report.cases:
        assert (case.check, len(case.ranks), case.metrics["fsdp_units"]) == ("passed", 3, 0)
    file = run.report.cases[0].metrics["traces"]["0"]["file"]
    events = json.loads(gzip.decompress(Path(file).read_bytes()))["traceEvents"]
    ranges = {event["name"] for event in events if event.get("cat") == "user_annotation"}
    assert {"forward", "backward", "Optimizer.step#SGD.step"} <= ranges


@smoke
def test_caches_are_cold_under_plain_python(bench: Bench, tmp_path: Path) -> None:
    warm = tmp_path / "warm"
    flags = ("--strategies", "ddp", "--backends", "inductor", "--iters", "1")
    run = bench(SCRIPT, *flags, ranks=0, TORCHINDUCTOR_CACHE_DIR=str(warm))
    assert [(c.check, len(c.ranks)) for c in run.report.cases] == [("passed", 1)]
    assert list(warm.rglob("*.so")) == []


@faults
def test_gradients_that_are_not_averaged(bench: Bench) -> None:
    flags = ("--strategies", "all", "--backends", "eager", "--iters", "1")
    run = bench(SCRIPT, *flags, ranks=2, inject="unaveraged-gradients", status=1)
    none, *checks = [case.check for case in run.report.cases]
    assert none == "passed"
    assert {check[:40] for check in checks} == {"failed: the loss of rank 0 in step 2 is "}


@faults
def test_a_compiler_that_fails_on_one_rank(bench: Bench) -> None:
    run = bench(SCRIPT, "--strategies", "ddp", inject="compiler-fails", status=1)
    said = "inductor cannot compile x * x on rank 1: InvalidCxxCompiler: No working C++ compiler"
    assert said in run.err


def test_numbers_by_hand() -> None:
    """12 rounds of two ranks with a batch of 8. The slower rank takes 20 ms eager and 15 ms
    compiled, including 5 ms for the optimizer. One step without it takes 22 ms instead of 10 ms."""
    samples = {"step": [[0.015] * 12, [0.007] * 12], "eager": [[0.020] * 12, [0.007] * 12]}
    samples["forward+backward"] = [[0.010] * 11 + [0.022]] * 2
    costs = {"first_steps_s": 4.06, "start_s": 1.0}
    key = {"batch_size": 8, "strategy": "ddp", "compiler": "inductor"}
    case = Case(key=key, ranks=[0, 1])
    facts = [[(costs, "skipped: x")], [(costs | {"start_s": 0.5}, "failed: y")]]
    compile_sweep.derive(case, Times(samples, [1] * 12), facts)
    m = case.metrics
    assert m["samples_per_s"].value == pytest.approx(16 / 0.015)
    # the geometric mean of 10 ms, eleven times, and 22 ms
    assert m["forward_backward_s"].value == pytest.approx(0.010 * 2.2 ** (1 / 12))
    assert m["forward_backward_mean_s"] == pytest.approx(0.011)  # (11 * 10 + 22) / 12 ms
    assert m["vs_eager"].value == pytest.approx(20 / 15)
    assert m["compiling_s"] == pytest.approx(1.0 + 4.06 - 3 * 0.02)
    assert m["gain_s"].value == pytest.approx(0.005)
    assert m["payback_steps"].value == pytest.approx(1000)  # their quotient
    assert case.check == "failed: y"


def test_the_answer() -> None:
    def of(**metrics: Any) -> Case:
        key = {"model": "m", "dtype": "fp32", "device": "cpu"}
        steps = {"step_s": Estimate(0.02, 0.01, 0.03)}
        return Case(key=key, ranks=[0], name="x", metrics=steps | metrics)

    pays = of(vs_eager=Estimate(2, 1.5, 2.75), payback_steps=Estimate(1234, 900, 2000))
    cases = [of(), pays, of(vs_eager=Estimate(0.5, 0.4, 0.6)), of(vs_eager=Estimate(2))]
    assert compile_sweep.answer(cases) == [
        "m, fp32: whole steps of x are 2.00 times (1.50 to 2.75) as fast as eager ones; "
        "compiling pays off after 1,234 steps (900 to 2,000)",
        "m, fp32: whole steps of x are 0.50 times (0.40 to 0.60) as fast as eager ones; "
        "compiling does not pay off",
        "m, fp32: x and eager cannot be compared, because their ratio has no interval",
        "m, fp32: a step takes "
        + ", ".join(["20.0 ms (10.0 to 30.0) with x"] * 4)
        + "; these were timed one after the other, so they are not ranked; --interleave compares "
        "them",
    ]
    assert compile_sweep.answer([of()]) == []
    # 10 / 20 ms on average: compiling may not pay off
    pays.samples_s |= {"step": [[0.01] * 3 + [0.05]], "eager": [[0.01] * 4]}
    assert compile_sweep.answer([pays]) == [
        "m, fp32: whole steps of x are 2.00 times (1.50 to 2.75) as fast as eager ones by medians, "
        "and 0.50 times by means"
    ]


COSTS = {"start_s": 0.5, "first_step_s": 2.0, "memory_gib": 1.0, "fsdp_units": 0, "graphs": 0}
COSTS |= {"tokens": 64}


def interleaved(ddp: list[float], fsdp2: list[float], *checks: str) -> Case:
    """A case of one rank with the seconds of each setting in each round, and their checks."""
    key: Any = {"model": "m", "dtype": "fp32", "batch_size": 8, "fsdp_wrap": False, "device": "cpu"}
    case = Case(key=key | {"settings": "ddp eager, fsdp2 eager"}, ranks=[0], name="both")
    times = Times({"step": [ddp], "fsdp2 eager": [fsdp2]}, [1] * len(ddp))
    compile_sweep.derive(case, times, [[(COSTS, check) for check in checks]])
    return case


def test_interleaved_settings_by_hand() -> None:
    """Steps take 20 ms under DDP and 25 ms under FSDP2, and twice as long in every other round. The
    ratio of each round is 0.8."""
    case = interleaved([0.02, 0.04] * 6, [0.025, 0.05] * 6, "passed", "passed")
    m = case.metrics
    assert m["fsdp2 eager speed"].value == pytest.approx(0.8)
    assert m["fsdp2 eager speed"].low == pytest.approx(0.8)  # the same in all rounds
    assert m["step_s"].value == pytest.approx(0.02 * 2**0.5)
    assert m["fsdp2 eager step_s"].value == pytest.approx(0.025 * 2**0.5)
    assert m["fsdp2 eager samples_per_s"].value == pytest.approx(8 / (0.025 * 2**0.5))
    assert m["fsdp2 eager tokens_per_s"].value == pytest.approx(64 / (0.025 * 2**0.5))
    first, second = compile_sweep.rows_of(case)
    assert (first.name, second.name) == ("ddp eager", "fsdp2 eager")
    assert first.metrics["step_s"] == m["step_s"]
    assert second.metrics["step_s"] == m["fsdp2 eager step_s"]
    assert "memory_gib" not in first.metrics | second.metrics  # it would be that of both replicas
    told = "m, fp32: fsdp2 eager is 0.80 times (0.80 to 0.80) as fast as ddp eager"
    assert compile_sweep.answer([first, second]) == [told]


def test_a_replica_that_fails_its_check_is_named() -> None:
    case = interleaved([0.1] * 6, [0.1] * 6, "skipped: x", "failed: y")
    assert case.check == "failed: fsdp2 eager: y"
    assert compile_sweep.rows_of(case) == [case]


def test_the_plan_of_an_interleaved_case() -> None:
    flags = "--device cpu --interleave --backends eager,aot_eager --fsdp-wrap-classes Block"
    args = compile_sweep.parse_args(flags.split())
    assert args.strategies == ["ddp", "fsdp2"]  # without `none`, which uses one rank
    job: Any = Namespace(world_size=2, device=CPU)
    (((name, ranks, key),),) = compile_sweep.plan(args, job, {}).values()
    labels = "ddp eager, ddp aot_eager, fsdp2 eager, fsdp2 aot_eager"
    assert (name, ranks, key["settings"]) == (labels, 2, labels)
    assert (key["strategy"], key["compiler"], key["fsdp_wrap"]) == (None, None, True)
    of_ddp, *_, of_fsdp2 = compile_sweep.settings_of(key)
    assert compile_sweep.key_of_setting(key, of_ddp)["fsdp_wrap"] is False
    assert compile_sweep.key_of_setting(key, of_ddp)["fsdp_wrap_classes"] == ""
    assert compile_sweep.key_of_setting(key, of_fsdp2)["fsdp_wrap_classes"] == "Block"


@pytest.mark.parametrize(
    ("units", "layers", "flags", "words"),
    [
        (None, None, "", "FSDP wraps the layers in ModuleLists"),
        (None, 12, "", "FSDP wraps 12 layers"),
        (None, 0, "", "FSDP in one unit"),
        (3, None, "", "FSDP wraps 3 modules of fsdp_units"),
        (0, None, "", "FSDP in one unit"),
        (3, 12, "--fsdp-wrap-classes Block", "FSDP wraps Block"),
        (3, 12, "--no-fsdp-wrap", "FSDP in one unit"),
    ],
)
def test_fsdp_in_the_title(units: int | None, layers: int | None, flags: str, words: str) -> None:
    """A user's model may name its FSDP units."""
    args = compile_sweep.parse_args(["--model", "a:b", "--device", "cpu", *flags.split()])
    trial = own_model.Trial(6, [], units, layers=layers)
    title = compile_sweep.title_of(args, "a:b", trial, "fp32", CPU)
    assert title == f"a:b, batch size 6, fp32, {words}"


FP32 = {"dtype": "fp32"}


def first_of(ranks: int) -> Any:
    """A group of this many ranks, on the first of them."""
    return Mock(ranks=range(ranks), broadcast=lambda value: value)


def test_one_process_alone() -> None:
    """The reference for the losses of a rank, or the reason why there is none."""
    made = compile_sweep.create("toy-small", 4, 8, CPU)
    reference = compile_sweep.reference_of(made, FP32, 0, first_of(10))
    assert isinstance(reference, Reference)
    assert [len(row) for row in reference.losses] == [8] * 3  # ranks 8 and 9 use those of 0 and 1
    means = [sum(row) / 8 for row in reference.losses]
    assert means[0] - means[2] > compile_sweep.TOLERANCES["fp32"] * means[0]
    key = {"dtype": "fp32", "compiler": "inductor"}
    losses = [row[1] for row in reference.losses]  # of rank 9
    assert compile_sweep.check(key, 9, losses, reference, 1) == "passed"
    uncompiled = compile_sweep.check(key, 9, losses, reference, 0)
    assert uncompiled == "failed: inductor compiled nothing: dynamo captured no graph of the model"
    losses[2] *= 1.01
    failed = compile_sweep.check(key, 9, losses, reference, 1)
    assert failed.startswith("failed: the loss of rank 9 in step 3 is ")
    for name in ("noisy", "centered"):
        made = compile_sweep.create(f"tests.own_models:{name}", 0, 2, CPU)
        why = compile_sweep.reference_of(made, FP32, 0, first_of(2))
        assert why == (
            "the loss of one batch changes between two calls, through dropout or a buffer that "
            "forward updates, for example"
        )


def test_optimizer_and_units_of_a_users_model() -> None:
    """The reference trains with the optimizer of the function. The loss is the sum of 3 outputs of
    4 weights for inputs of ones: each weight has a gradient of 3, so a step of SGD at lr 0.5
    reduces the loss by 0.5 * 3 * 3 * 4. Inner units come first."""
    made = compile_sweep.create("tests.own_models:everything", 0, 1, CPU)
    reference = compile_sweep.reference_of(made, FP32, 0, first_of(1))
    assert isinstance(reference, Reference)
    first, second, _ = (row[0] for row in reference.losses)
    assert first - second == pytest.approx(0.5 * 3 * 3 * 4)
    key = {"fsdp_wrap": True, "fsdp_checkpoint": False, "fsdp_wrap_classes": ""}
    inner, outer = compile_sweep.choose_layers(made.model, key, made.units)
    assert (type(outer), type(inner)) == (nn.Sequential, nn.Linear)


@pytest.mark.parametrize(("backend", "mean"), [("gloo", 1.0), ("gloo", 2.0), ("nccl", None)])
def test_fsdp2_divides_a_sum_where_gloo_does_not_average(
    backend: str, mean: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On 2 ranks, AVG of ones is 1, or 2 if it sums. NCCL is not asked."""
    asked = Mock(side_effect=lambda output, ones, op, group: output.fill_(mean))
    for name in ("reduce_scatter_single", "reduce_scatter_tensor"):  # of newer and older torch
        monkeypatch.setattr(compile_sweep.dist, name, asked, raising=False)
    monkeypatch.setattr(compile_sweep.dist, "get_backend", Mock(return_value=backend))
    monkeypatch.setattr(compile_sweep.dist, "get_world_size", Mock(return_value=2))
    monkeypatch.setattr(compile_sweep.fsdp, "fully_shard", Mock())
    model, unit = Mock(), Mock()
    compile_sweep.wrap(model, "fsdp2", Mock(), [unit], bf16=False)
    calls = [module.set_force_sum_reduction_for_comms.call_count for module in (model, unit)]
    assert calls == ([1, 1] if mean == 2 else [0, 0])
    assert asked.call_count == (backend == "gloo")
    monkeypatch.setattr(compile_sweep.fsdp, "FSDPModule", object)  # as in torch 2.6
    with pytest.raises(ValueError, match="newer torch") if mean == 2 else contextlib.nullcontext():
        compile_sweep.wrap(model, "fsdp2", Mock(), [unit], bf16=False)


def test_units_are_the_layers_in_lists_inner_layers_first() -> None:
    """Lists as in T5, dicts as in torchtitan and Sequential as in timm, but not dicts of different
    parts as in nanoGPT, nor the plain layers within a block."""
    inner = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    layers = nn.ModuleDict({"0": nn.Sequential(inner), "1": nn.Sequential()})
    one = nn.ModuleList([nn.Linear(4, 4)])
    parts = nn.ModuleDict({"wte": nn.Embedding(4, 4), "h": layers})
    units = compile_sweep.layers_of(nn.Sequential(parts, one))
    assert {id(unit) for unit in units} == {id(x) for x in [*inner, *layers.values()]}
    assert units.index(inner[0]) < units.index(layers["0"])
    blocks = [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(3)]
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(*blocks))
    assert compile_sweep.layers_of(model) == blocks[::-1]
    assert compile_sweep.layers_of(nn.Sequential(model, nn.ModuleList(blocks[:2]))) == blocks[1::-1]


def test_which_layers_fsdp_wraps_or_checkpoints() -> None:
    model = own_models.GPT()
    key = {"fsdp_wrap": True, "fsdp_wrap_classes": "", "fsdp_checkpoint": False}

    def chosen(model: nn.Module = model, **changes: Any) -> set[str]:
        return {type(layer).__name__ for layer in compile_sweep.choose_layers(model, key | changes)}

    assert chosen() == {"Block"}
    assert chosen(fsdp_wrap_classes="Linear,LayerNorm") == {"Linear", "LayerNorm"}
    assert chosen(fsdp_wrap=False) == set()
    assert chosen(fsdp_wrap=False, fsdp_checkpoint=True) == {"Block"}  # in one unit
    with pytest.raises(ValueError, match="has no module 'Blok'; did you mean Block"):
        chosen(fsdp_wrap_classes="Blok")
    with pytest.raises(ValueError, match="the model has no layers in ModuleLists"):
        chosen(nn.Sequential(nn.Linear(2, 2)), fsdp_checkpoint=True)


def test_checkpointed_layers_run_twice_and_have_the_same_gradients() -> None:
    """Three blocks run three times without checkpoints and six times with them."""
    gradients = []
    for runs, with_checkpoints in ((3, False), (6, True)):
        torch.manual_seed(0)
        model, inputs, loss = own_models.gpt(CPU)
        layers, counted = compile_sweep.layers_of(model), Mock(return_value=None)
        for layer in layers:
            layer.norm.register_forward_hook(counted)  # type: ignore[union-attr, operator]
        if with_checkpoints:
            assert compile_sweep.recompute(model, layers) == compile_sweep.layers_of(model)
        loss(model(*inputs)).backward()
        assert counted.call_count == runs
        gradients.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize(
    ("flags", "strategies", "wrap"),
    [
        ("", ["none", "ddp", "fsdp2"], True),
        ("--fsdp", ["fsdp1"], False),  # as in the source program
        ("--fsdp --fsdp_wrap", ["fsdp1"], True),
        ("--fsdp --fsdp-wrap-classes BertLayer", ["fsdp1"], True),
        ("--strategies fsdp1", ["fsdp1"], True),
        ("--strategies fsdp1 --no-fsdp-wrap", ["fsdp1"], False),
    ],
)
def test_what_fsdp_means(flags: str, strategies: list[str], wrap: bool) -> None:
    args = compile_sweep.parse_args(["--device", "cpu", *flags.split()])
    assert (args.strategies, args.fsdp_wrap) == (strategies, wrap)
    job: Any = Namespace(world_size=2, device=CPU)
    (cases,) = compile_sweep.plan(args, job, {}).values()
    assert {key["strategy"]: key["fsdp_wrap"] for _, _, key in cases} == {
        strategy: wrap and strategy.startswith("fsdp") for strategy in strategies
    }


def test_more_than_eight_backends_are_started() -> None:
    """Dynamo compiles a function for at most eight backends."""
    compiler = Mock(side_effect=lambda graph, inputs: graph.forward)
    job: Any = Namespace(rank=0, device=CPU)
    for number in range(10):
        torch._dynamo.register_backend(compiler, name=f"backend_{number}")
        compile_sweep.start(f"backend_{number}", job)
    assert compiler.call_count == 10
