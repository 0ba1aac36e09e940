"""compile_sweep.py as its user runs it, its faults, and its numbers by hand."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import compile_sweep
from common.decoder import DECODERS, flops_per_token
from common.report import Case
from common.stats import Times
from common.training import Reference

SCRIPT = "benchmarks/compile_sweep.py"
SHORT = ("--iters", "6", "--warmup-iters", "1")
smoke, faults = pytest.mark.smoke, pytest.mark.faults

# stands in for github.com/pytorch/benchmark, which has no package to install
TORCHBENCHMARK = '''
import torch

class Model(torch.nn.Module):
    """Breaks its graph once, and is compiled again for every longer input."""

    def __init__(self):
        super().__init__()
        self.layer, self.drop, self.calls = torch.nn.Linear(4, 4), torch.nn.Dropout(0.9), 0

    def forward(self, x):
        y = self.layer(x)
        torch._dynamo.graph_break()
        self.calls += 1
        return {"calls": self.calls, "loss": self.drop(y).square().mean()}

class Benchmark:
    def __init__(self, test, device, batch_size):
        self.size = batch_size

    def get_module(self):
        return Model(), {"x": torch.ones(self.size, 4)}

def load_model_by_name(name):
    return Benchmark
'''


@smoke
def test_every_strategy_eager_and_compiled(bench: Callable[..., Any]) -> None:
    flags = ("--strategies", "all", "--backends", "aot_eager,eager", *SHORT)
    run = bench(SCRIPT, *flags, ranks=2)
    assert run.status == 0, run.err
    cases = {(c.key["strategy"], c.key["compiler"]): c for c in run.report.cases}
    assert list(cases) == [(s, b) for s in compile_sweep.STRATEGIES for b in ("eager", "aot_eager")]
    assert {case.check for case in cases.values()} == {"passed"}
    for (strategy, backend), case in cases.items():
        m, p50 = case.metrics, case.metrics["step_time_p50_s"]
        ranks = 1 if strategy == "none" else 2
        assert [len(rows) for rows in case.samples_s["step"]] == [6] * ranks
        assert m["samples_per_s"] == pytest.approx(4 * ranks / p50)
        assert m["memory_gib"] > 0
        assert (m["graphs"] > 0) == (m["start_s"] > 0) == (backend == "aot_eager")
        assert m["recompiles"] == 0
        none = cases["none", backend].metrics["step_time_p50_s"]
        assert m.get("vs_none", 1) == pytest.approx(none / p50)
        if backend == "aot_eager":
            eager = cases[strategy, "eager"].metrics
            assert m["vs_eager"] == pytest.approx(eager["step_time_p50_s"] / p50)
        assert f"{strategy} {backend}" in run.out.split("Cost: ")[1]
    assert cases["none", "aot_eager"].metrics["graph_breaks"] == 0


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
    assert m["tflops"] * m["step_time_p50_s"] == pytest.approx(flops / 1e12)
    assert "mfu" not in m  # nobody knows the peak of a CPU


@smoke
def test_what_it_writes_for_other_tools(
    bench: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ("--ddp", "--dynamo", "print", "--profile", "--verbose", "--torchviz", *SHORT)
    run = bench(SCRIPT, *flags, "--trace-file", "new/t.json", ranks=2)
    assert run.status == 0, run.err
    assert "# graph of the backend print\ngraph():" in run.out
    assert "Layer(in_features=10, out_features=1000, bias=True)" in run.out
    names = sorted(path.name for path in Path("new").iterdir())
    assert names == [f"t-toy-small-fp32-ddp-print-{rank}.json" for rank in (0, 1)]
    events = [
        event["name"] for event in json.loads(Path("new", names[1]).read_text())["traceEvents"]
    ]
    assert events.count("Optimizer.step#SGD.step") == 5
    assert "head.weight" in Path("torchviz-toy-small-fp32-ddp-print-0.dot").read_text()


@smoke
def test_a_model_of_torchbenchmark(bench: Callable[..., Any], tmp_path: Path) -> None:
    package = tmp_path / "torchbenchmark"
    package.mkdir()
    (package / "__init__.py").write_text(TORCHBENCHMARK)
    flags = ("--torchbench-model", "stand_in", "--strategies", "none,ddp", "--dynamo", "aot_eager")
    run = bench(SCRIPT, *flags, *SHORT, ranks=2, PYTHONPATH=str(tmp_path))
    assert run.status == 0, run.err
    alone, ddp = run.report.cases
    assert (alone.check, ddp.check) == ("passed", "passed")
    assert alone.metrics["graph_breaks"] >= 1
    assert alone.metrics["graphs"] >= 2
    assert alone.metrics["recompiles"] >= 1
    assert alone.metrics["samples_per_s"] == pytest.approx(4 / alone.metrics["step_time_p50_s"])


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
        (("--dtype", "fp16"), "expected some of fp32, tf32, bf16"),
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
    assert usual.iters is None


def case_of(backend: str, step_s: float, first_s: float, start_s: float, checks: Any) -> Any:
    key = {"model": "decoder-10m", "dtype": "fp32", "strategy": "ddp", "compiler": backend}
    samples = {"step": [[step_s] * 12, [step_s / 2] * 12]}
    found = {"first_step_s": first_s, "first_steps_s": first_s, "start_s": start_s}
    facts = [
        {"max": found, "check": check, "peak": peak}
        for check, peak in zip(checks, (2e12, 1e12), strict=True)
    ]
    return Case(key | {"batch_size": 8}, [0, 1], samples, [12]), facts


def test_numbers_by_hand() -> None:
    """Two ranks, a batch of 8: the slower one takes 20 ms eager and 15 ms compiled."""
    cases: dict[Any, Case] = {}
    eager, facts = case_of("eager", 0.020, 0.1, 0.0, ["passed", "passed"])
    compile_sweep.derive(cases, eager, Times(eager.samples_s, eager.rounds), facts)
    cases["ddp", "eager"] = eager
    case, facts = case_of("inductor", 0.015, 4.1, 1.0, ["passed", "passed"])
    compile_sweep.derive(cases, case, Times(case.samples_s, case.rounds), facts)
    m = case.metrics
    assert m["samples_per_s"] == pytest.approx(16 / 0.015)
    assert m["vs_eager"] == pytest.approx(4 / 3)
    assert m["payback_steps"] == math.ceil((1.0 + 4.1 - 0.1) / 0.005)  # 1000
    # of 256 tokens each: 6 FLOPs a weight of a matrix product, and attention's two products
    flops = 8 * 256 * (6 * (8 * 12 * 320**2 + 256 * 320) + 12 * 8 * 320 * 256)
    assert m["tflops"] == pytest.approx(flops / 0.015 / 1e12)
    assert m["mfu"] == pytest.approx(2 * flops / 0.015 / 3e12)  # of both ranks, over both peaks
    assert "vs_none" not in m
    assert case.check == "passed"

    case, facts = case_of("inductor", 0.030, 4.1, 1.0, ["skipped: x", "failed: y"])
    compile_sweep.derive(cases, case, Times(case.samples_s, case.rounds), facts)
    assert "payback_steps" not in case.metrics  # it never pays
    assert case.check == "failed: y"


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
