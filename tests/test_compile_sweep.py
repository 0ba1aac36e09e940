"""compile_sweep.py as its user runs it, its faults, and its numbers by hand."""

import gzip
import json
import re
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks import compile_sweep
from common.report import Case, Estimate
from common.stats import Times
from common.workloads.decoder import DECODERS, flops_per_token
from common.workloads.reference import Reference

SCRIPT = "benchmarks/compile_sweep.py"
SHORT = ("--iters", "6", "--warmup-iters", "1")
smoke, faults = pytest.mark.smoke, pytest.mark.faults

# stands in for github.com/pytorch/benchmark, which has no package to install
TORCHBENCHMARK = '''
import functools
import torch
from torch import nn
from torch.nn import functional

class BertLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.drop = nn.Linear(4, 4), nn.Dropout(0.9)

    def forward(self, x):
        return x + self.drop(self.layer(x).tanh())

class BertEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.ModuleList(BertLayer() for _ in range(3))

    def forward(self, x):
        for layer in self.layer:
            x = layer(x)
        return x

class BertLMPredictionHead(nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.transform, self.decoder = nn.Linear(4, 4), nn.Linear(4, 9)
        self.decoder.weight = embedding.weight

    def forward(self, x):
        return self.decoder(self.transform(x).tanh())

class Bert(nn.Module):
    """Has its layers and tied weights where hf_Bert has them. Its graph breaks once, and is
    compiled again for every longer input."""

    def __init__(self):
        super().__init__()
        self.embeddings, self.encoder = nn.Embedding(9, 4), BertEncoder()
        self.cls, self.calls = BertLMPredictionHead(self.embeddings), 0

    def forward(self, input_ids):
        y = self.encoder(self.embeddings(input_ids))
        torch._dynamo.graph_break()
        self.calls += 1
        logits = self.cls(y)
        loss = functional.cross_entropy(logits.flatten(0, 1), input_ids.flatten())
        return {"calls": self.calls, "loss": loss, "logits": logits}

class T5Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.dropout = 0.5  # of a function, as in hf_T5: there is no module to turn off

    def forward(self, x, states):
        weights = (self.q(x) @ self.k(states).mT).softmax(-1)
        return functional.dropout(weights, self.dropout, self.training) @ self.v(states)

class T5Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.wo = T5Attention(), nn.Linear(4, 4)

    def forward(self, x, states):
        return x + self.wo(self.attention(x, states).relu())

class T5Stack(nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.embed_tokens, self.block = embedding, nn.ModuleList(T5Block() for _ in range(2))

    def forward(self, input_ids, states=None):
        x = self.embed_tokens(input_ids)
        for block in self.block:
            x = block(x, x if states is None else states)
        return x

class T5(nn.Module):
    """One embedding is used by both stacks, and is the head's weight."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Embedding(9, 4)
        self.encoder, self.decoder = T5Stack(self.shared), T5Stack(self.shared)
        self.lm_head = nn.Linear(4, 9, bias=False)
        self.lm_head.weight = self.shared.weight

    def forward(self, input_ids):
        logits = self.lm_head(self.decoder(input_ids, self.encoder(input_ids)))
        loss = functional.cross_entropy(logits.flatten(0, 1), input_ids.flatten())
        return {"loss": loss, "logits": logits}

class Drawing(T5):
    """Draws random numbers that no attribute turns off."""

    def forward(self, input_ids):
        return {"loss": super().forward(input_ids)["loss"] * (1 + torch.rand(()))}

class Benchmark:
    def __init__(self, model, test, device, batch_size=None):
        self.model, self.batch_size = model, batch_size or 6

    def get_module(self):
        return self.model(), {"input_ids": torch.arange(5).repeat(self.batch_size, 1)}

MODELS = {"hf_Bert": Bert, "hf_T5": T5, "drawing": Drawing}

def load_model_by_name(name):
    return functools.partial(Benchmark, MODELS[name]) if name in MODELS else None
'''


@pytest.fixture
def torchbenchmark(tmp_path: Path) -> str:
    """A folder for PYTHONPATH in which the stand-in can be imported."""
    package = tmp_path / "torchbenchmark"
    package.mkdir()
    (package / "__init__.py").write_text(TORCHBENCHMARK)
    return str(tmp_path)


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
    assert f"\n{title}, activations kept\n" in run.out


@smoke
def test_a_decoder_on_three_ranks_recomputed_and_in_one_unit(bench: Callable[..., Any]) -> None:
    flags = ("--models", "decoder-tiny", "--batch-size", "2", "--strategies", "all")
    more = ("--backends", "eager", "--dtype", "bf16", "--fsdp-checkpoint", "--no-fsdp-wrap")
    run = bench(SCRIPT, *flags, *more, *SHORT, ranks=3)
    assert run.status == 0, run.err + run.out
    assert [len(case.ranks) for case in run.report.cases] == [1, 3, 3, 3]
    assert {case.check for case in run.report.cases} == {"passed"}
    m = run.report.cases[0].metrics
    flops = 2 * 128 * flops_per_token(DECODERS["decoder-tiny"])
    assert m["tflops"].value * m["step_s"].value == pytest.approx(flops / 1e12)
    assert "mfu" not in m  # nobody knows the peak of a CPU
    assert {case.metrics["recomputed_layers"] for case in run.report.cases} == {8}
    assert {case.metrics["fsdp_units"] for case in run.report.cases} == {0}
    assert "bf16, FSDP in one unit, activations recomputed" in run.out


@smoke
def test_what_it_writes_for_other_tools(
    bench: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ("--ddp", "--dynamo", "print,aot_eager", "--profile", "new/t", "--verbose")
    run = bench(SCRIPT, *flags, "--torchviz", *SHORT, ranks=2)
    assert run.status == 0, run.err
    assert "# graph of the backend print\ngraph():" in run.out
    assert "Layer(in_features=10, out_features=1000, bias=True)" in run.out
    for case in run.report.cases:
        content = gzip.decompress(Path(case.metrics["traces"]["0"]["file"]).read_bytes())
        trace = json.loads(content)["traceEvents"]
        ranges = [event["name"] for event in trace if event.get("cat") == "user_annotation"]
        for name, count in (("forward", 12), ("backward", 12), ("Optimizer.step#SGD.step", 6)):
            assert ranges.count(name) == count
    cases = [f"toy-small-default-ddp-{backend}" for backend in ("aot_eager", "print")]
    drawn = sorted(path.name for path in Path().glob("torchviz-*"))
    assert drawn == [f"torchviz-{case}-0.dot" for case in cases]
    compiled, printed = (Path(name).read_text() for name in drawn)
    assert "head.weight" in printed
    assert "CompiledFunctionBackward" in compiled  # what is run, not the model as it was written
    assert "CompiledFunctionBackward" not in printed


@smoke
def test_a_model_of_torchbenchmark(bench: Callable[..., Any], torchbenchmark: str) -> None:
    """Its layers are wrapped and recomputed as the key says, with its own batch size."""
    flags = ("--torchbench-model", "hf_Bert", "--strategies", "all", "--dynamo", "aot_eager")
    run = bench(SCRIPT, *flags, "--fsdp-checkpoint", *SHORT, ranks=2, PYTHONPATH=torchbenchmark)
    assert run.status == 0, run.err
    for case, wrapped in zip(run.report.cases, (0, 0, 3, 3), strict=True):
        m = case.metrics
        assert case.check == "passed"
        assert case.key["fsdp_wrap"] == (wrapped > 0)
        assert (m["fsdp_units"], m["recomputed_layers"]) == (wrapped, 3)
        assert m["graph_breaks"] >= 1
        assert m["graphs"] >= 2
        assert m["recompiles"] >= 1
        assert (case.key["batch_size"], m["batch_size"]) == (None, 6)
        assert m["samples_per_s"].value == pytest.approx(6 * len(case.ranks) / m["step_s"].value)
    assert "hf_Bert, the model's own batch size, torch's default precision, " in run.out


@smoke
def test_functional_dropout_and_tied_weights(
    bench: Callable[..., Any], torchbenchmark: str
) -> None:
    """As in hf_T5, whose units are the blocks of both stacks."""
    flags = ("--torchbench-model", "hf_T5", "--strategies", "all", "--backends", "eager")
    run = bench(SCRIPT, *flags, *SHORT, ranks=2, PYTHONPATH=torchbenchmark)
    assert run.status == 0, run.err
    assert [case.check for case in run.report.cases] == ["passed"] * 4
    assert [case.metrics["fsdp_units"] for case in run.report.cases] == [0, 0, 4, 4]


@smoke
def test_tied_units_are_refused(bench: Callable[..., Any], torchbenchmark: str) -> None:
    """Before anything is timed; the units that the line names work."""
    flags = (
        "--torchbench-model",
        "hf_Bert",
        "--strategies",
        "ddp,fsdp1,fsdp2",
        "--dynamo",
        "eager",
    )
    units = "BertLayer,BertLMPredictionHead"
    run = bench(SCRIPT, *flags, "--fsdp-units", units, *SHORT, ranks=2, PYTHONPATH=torchbenchmark)
    tied = "got BertLMPredictionHead, whose cls.decoder.weight is embeddings.weight, too"
    assert f"{tied}; try --fsdp-units BertLayer\n" in run.err
    assert run.report is None or not run.report.cases
    run = bench(
        SCRIPT, *flags, "--fsdp-units", "BertLayer", *SHORT, ranks=2, PYTHONPATH=torchbenchmark
    )
    assert [case.check for case in run.report.cases] == ["passed"] * 3


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
    run = bench(SCRIPT, "--strategies", "ddp,fsdp2", *SHORT, ranks=2, inject="compiler-fails")
    assert run.status == 1
    checks = [case.check for case in run.report.cases]
    assert checks[0] == checks[2] == "passed"
    for check in (checks[1], checks[3]):
        assert "No working C++ compiler" in check
        assert check.endswith("(rank 1)")


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--models", "decoder-10k"), "got 'decoder-10k'; did you mean decoder-10m"),
        (("--backends", "eager,inducter"), "got 'inducter'; did you mean inductor?"),
        (("--strategies", "dpp"), "got 'dpp'; did you mean ddp"),
        (("--ddp", "--fsdp"), "argument --fsdp: not allowed with argument --ddp"),
        (("--device", "cpu", "--dtype", "fp32,tf32"), "tf32 and cudagraphs need CUDA; try"),
        (("--dtype", "fp16"), "expected some of default, fp32, tf32, bf16"),
        (("--torchbench-model", "hf_Bert"), "needs the package torchbenchmark: docs/compile_sweep"),
        (("--profile", ""), "expected a folder, got ''; e.g. traces"),
        (("--backends", "relu_compile_error_TESTING_ONLY"), "expected some of eager, dynamo_eager"),
    ],
)
def test_a_mistake_is_one_line(
    flags: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        compile_sweep.parse_args(list(flags))
    assert caught.value.code == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert line in said


def test_flags_of_the_program_it_replaces() -> None:
    args = compile_sweep.parse_args(
        ["--toy_model", "--fsdp", "--dynamo=inductor", "--repeat=10", "--batch_size=3"]
    )
    assert (args.models, args.strategies, args.backends) == (["toy"], ["fsdp1"], ["inductor"])
    assert (args.iters, args.batch_size) == (10, 3)
    usual = compile_sweep.parse_args(["--device", "cpu"])
    assert (usual.models, usual.strategies) == (["toy-small"], ["none", "ddp", "fsdp2"])
    assert usual.backends == ["eager", "inductor"]
    assert usual.batch_size == 4
    assert usual.iters is None


def derived(step_s: float, eager_s: float | None, *checks: str) -> dict[str, Any]:
    """The metrics of two ranks, of which the second one is faster, in 12 rounds; and the check."""
    samples = {"step": [[step_s] * 12, [step_s / 2] * 12]}
    # the optimizer takes 5 ms; one step of twelve takes 12 ms longer
    samples["forward+backward"] = [[step_s - 0.005] * 11 + [step_s + 0.007]] * 2
    if eager_s:
        samples["eager"] = [[eager_s] * 12, [eager_s / 3] * 12]
    found = {"first_step_s": 3.9, "first_steps_s": 4.06, "start_s": 1.0}
    facts = [
        {"max": found, "check": check, "batch_size": 8, "device_flops": peak}
        for check, peak in zip(checks, (2e12, 1e12), strict=True)
    ]
    case = Case(key={"model": "decoder-10m"}, ranks=[0, 1], samples_s=samples, rounds=[1] * 12)
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
    # of 256 tokens each: 6 FLOPs a weight of a matrix product, and attention's two products
    flops = 8 * 256 * (6 * (8 * 12 * 320**2 + 256 * 320) + 12 * 8 * 320 * 256)
    assert m["tflops"].value == pytest.approx(flops / 0.015 / 1e12)
    assert m["mfu"].value == pytest.approx(2 * flops / 0.015 / 3e12)  # of both ranks, over peaks
    assert m["check"] == "passed"
    m = derived(0.030, 0.020, "skipped: x", "failed: y")
    assert "payback_steps" not in m  # it never pays
    assert m["check"] == "failed: y"
    m = derived(0.020, None, "skipped: x", "passed")
    assert {"vs_eager", "payback_steps"}.isdisjoint(m)
    assert m["check"] == "skipped: x"


def test_the_answer() -> None:
    def answer(*ends: float, **metrics: Any) -> list[str]:
        key, metrics = {"model": "m", "dtype": "fp32"}, metrics
        metrics |= {"vs_eager": Estimate(*ends)} if ends else {}
        return compile_sweep.answer(
            [Case(key=key, ranks=[0], name="ddp inductor", metrics=metrics)]
        )

    assert answer() == []  # eager itself
    whole = "m, fp32: whole steps of ddp inductor are "
    assert answer(2, 1.5, 2.75, payback_steps=Estimate(1234, 900, 2000)) == [
        f"{whole}2.00 times (1.50 to 2.75) as fast as eager ones; "
        "compiling pays after 1,234 steps (900 to 2,000)"
    ]
    assert answer(2, 1.5, 2.75) == [f"{whole}2.00 times (1.50 to 2.75) as fast as eager ones"]
    assert answer(0.5, 0.4, 0.6) == [
        f"{whole}0.50 times (0.40 to 0.60) as fast as eager ones; compiling does not pay"
    ]
    alike = "m, fp32: ddp inductor and eager cannot be told apart: "
    assert answer(1.11, 0.9, 1.38) == [f"{alike}1.11 times (0.90 to 1.38) as fast"]
    assert answer(2) == [f"{alike}2.00 times (no interval) as fast"]


def test_the_plan_has_complete_keys() -> None:
    args = compile_sweep.parse_args(["--device", "cpu", "--dtype", "fp32,bf16"])
    job: Any = Namespace(world_size=4, device=torch.device("cpu"))
    tables = compile_sweep.plan(args, job)
    assert [title.split(", ")[2] for title in tables] == ["fp32", "bf16"]
    cases = [case for table in tables.values() for case in table]
    names = ["none eager", "none inductor", "ddp eager", "ddp inductor"]
    assert [name for name, _, _ in cases[:4]] == names
    assert [ranks for _, ranks, _ in cases[:4]] == [1, 1, 4, 4]
    assert len({str(key) for _, _, key in cases}) == len(cases) == 12
    assert len({tuple(key) for _, _, key in cases}) == 1


def test_one_process_alone() -> None:
    """What a rank's losses are compared with, and why there may be nothing."""
    cpu = torch.device("cpu")
    found = compile_sweep.train_alone_on("toy-small", 4, "fp32", 10, cpu)
    assert isinstance(found, Reference)
    assert [len(row) for row in found.losses] == [8] * 3  # ranks 8 and 9 share those of 0 and 1
    means = [sum(row) / 8 for row in found.losses]
    assert means[0] - means[2] > compile_sweep.TOLERANCES["fp32"] * means[0]
    text = compile_sweep.train_alone_on("unheard-of", 4, "fp32", 1, cpu)
    assert text == "one process alone fails: ModuleNotFoundError: No module named 'torchbenchmark'"


def test_a_model_that_draws_random_numbers_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("torchbenchmark")
    exec(TORCHBENCHMARK, vars(package))
    monkeypatch.setitem(sys.modules, "torchbenchmark", package)
    cpu = torch.device("cpu")
    why = compile_sweep.train_alone_on("drawing", None, "default", 2, cpu)
    pattern = "the model draws random numbers: one process gets the losses [0-9.]+ and [0-9.]+ for"
    assert isinstance(why, str)
    assert re.match(pattern, why)
    key = {"dtype": "default", "compiler": "eager"}
    assert compile_sweep.check(key, 0, [], why, 0) == f"skipped: {why}"
    found = compile_sweep.train_alone_on("hf_T5", None, "default", 2, cpu)
    assert isinstance(found, Reference)


def test_dropout_of_every_kind_is_off() -> None:
    attention = nn.MultiheadAttention(4, 2, dropout=0.5)
    lstm = nn.LSTM(4, 4, num_layers=2, dropout=0.5)
    noise, alpha = nn.Dropout2d(0.5), nn.AlphaDropout(0.5)
    model: Any = model_of(attention=attention, lstm=lstm, noise=noise, alpha=alpha)
    model.drop_prob, model.p = 0.5, 2.0
    compile_sweep.turn_off_dropout(model)
    off: list[Any] = [attention.dropout, lstm.dropout, noise.p, alpha.p, model.drop_prob]
    assert off == [0.0] * 5
    assert model.p == 2.0  # of another meaning


def tied_model() -> nn.Module:
    """A list of two layers and a head; the second layer has the head's weight."""
    stack = layers(2)
    head = nn.Linear(4, 4)
    stack[1].weight = head.weight
    return model_of(stack=stack, head=head)


def test_tied_weights_are_named_with_what_to_do() -> None:
    model = tied_model()
    start = "FSDP expects units with weights of their own, got "
    tied = "Layer, whose stack.1.weight is head.weight, too"
    with pytest.raises(ValueError, match=f"^{start}{tied}; try --no-fsdp-wrap$"):
        compile_sweep.prepare_units(model, {"fsdp_wrap": True, "fsdp_units": None})
    key = {"fsdp_wrap": False, "fsdp_checkpoint": True, "fsdp_units": None}
    assert compile_sweep.prepare_units(tied_model(), key) == []  # recomputing them is fine
    stack = layers(2)  # a unit that has two names shares with nobody
    compile_sweep.refuse_tied_units(model_of(stack=stack, again=stack), [*stack])


def layers(count: int) -> nn.ModuleList:
    return nn.ModuleList(compile_sweep.Layer(4, 4) for _ in range(count))


def model_of(**parts: nn.Module) -> nn.Module:
    model = nn.Module()
    for name, part in parts.items():
        model.add_module(name, part)
    return model


def test_units_are_the_layers_of_the_longest_list() -> None:
    """And of its class elsewhere, as the decoder's of a T5; lists of unlike layers do not count."""
    mixed = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())
    encoder, decoder = layers(3), layers(2)
    model = model_of(encoder=encoder, decoder=decoder, mixed=mixed, head=nn.Linear(4, 4))
    units = compile_sweep.find_units(model, [])
    assert {id(unit) for unit in units} == {id(layer) for layer in [*encoder, *decoder]}
    named = compile_sweep.find_units(model, ["Linear"])
    assert [type(unit) for unit in named] == [nn.Linear] * 3


def test_inner_units_come_first() -> None:
    inside = layers(1)
    outer = model_of(inside=inside)
    units = compile_sweep.find_units(model_of(outer=outer), ["Module", "Layer"])
    assert units == [inside[0], outer]


@pytest.mark.parametrize(
    ("classes", "line"),
    [
        ([], "the model has no list of layers; try --fsdp-units CLASS or --no-fsdp-wrap"),
        (["Liner"], "of Layer, Linear, ModuleList, ReLU, Sequential, got Liner"),
    ],
)
def test_a_model_without_such_layers(classes: list[str], line: str) -> None:
    model = model_of(one=layers(1), pair=nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    with pytest.raises(ValueError, match=re.escape(line)):
        compile_sweep.find_units(model, classes)


def key_of(*flags: str, strategy: str = "ddp", compiler: str = "inductor") -> dict[str, Any]:
    args = compile_sweep.parse_args(["--device", "cpu", *flags])
    return compile_sweep.key_of(args, strategy, compiler)


def test_a_key_claims_what_is_done() -> None:
    flags = ("--fsdp-units", "Layer,Linear", "--dynamo-no-optimize-ddp")
    ddp, fsdp2 = key_of(*flags), key_of(*flags, strategy="fsdp2")
    assert (ddp["fsdp_wrap"], ddp["fsdp_units"]) == (False, None)
    assert ddp["dynamo_no_optimize_ddp"]
    assert (fsdp2["fsdp_wrap"], fsdp2["fsdp_units"]) == (True, "Layer,Linear")
    assert not fsdp2["dynamo_no_optimize_ddp"]
    assert not key_of(*flags, compiler="eager")["dynamo_no_optimize_ddp"]
    recomputed = key_of(*flags, "--fsdp-checkpoint", "--no-fsdp-wrap", strategy="none")
    assert (recomputed["fsdp_units"], recomputed["fsdp_wrap"]) == ("Layer,Linear", False)


def test_what_was_not_compiled_fails() -> None:
    losses, wanted = [torch.tensor(1.0)] * 3, "nothing to compare with"
    key = {"dtype": "fp32", "compiler": "inductor"}
    assert compile_sweep.check(key, 0, losses, wanted, 1) == "skipped: nothing to compare with"
    failed = compile_sweep.check(key, 0, losses, wanted, 0)
    assert failed == "failed: inductor compiled nothing: dynamo has made no graph of the model"
    eager = key | {"compiler": "eager"}
    assert compile_sweep.check(eager, 0, losses, wanted, 0).startswith("skipped: ")


def test_a_backend_that_cannot_compile_here() -> None:
    """As tvm without its package: one line, before the first case."""

    def no_package(graph: Any, inputs: Any) -> Any:
        raise ModuleNotFoundError("No module named 'tvm'")

    torch._dynamo.register_backend(no_package, name="no_package")
    jobs: list[Any] = [Namespace(rank=rank, device=torch.device("cpu")) for rank in (0, 1)]
    first, second = jobs
    reason = "no_package cannot compile x * x here: ModuleNotFoundError: No module named 'tvm'"
    with pytest.raises(ValueError, match=re.escape(reason)):
        compile_sweep.start("no_package", first)
    assert compile_sweep.start("no_package", second) == 0  # its cases fail, and say why


def test_the_tenth_backend_is_started_as_the_first_one() -> None:
    """Dynamo compiles a function for eight backends, then no more."""
    started: list[int] = []
    for number in range(10):

        def compiler(graph: Any, inputs: Any, number: int = number) -> Any:
            started.append(number)
            return graph.forward

        torch._dynamo.register_backend(compiler, name=f"backend_{number}")
        job: Any = Namespace(rank=0, device=torch.device("cpu"))
        compile_sweep.start(f"backend_{number}", job)
    assert started == list(range(10))
