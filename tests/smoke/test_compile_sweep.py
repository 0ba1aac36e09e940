"""compile_sweep through the real torchrun on gloo, and its report."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, load, run, torchrun

from common import results

SCRIPT = str(ROOT / "benchmarks" / "compile_sweep.py")
LONG = pytest.mark.timeout(600)  # compiling is slow where the machine is busy
SHORT = ["--device", "cpu", "--iters", "6", "--warmup-iters", "1"]
DECODER = ["--models", "decoder-10m", "--layers", "2", "--width", "32", "--heads", "2"]
DECODER += ["--sequence-length", "16", "--batch-size", "2"]


def by_name(report: dict[str, Any]) -> dict[str, Any]:
    return {
        f"{case['key']['strategy']} {case['key']['compile_backend']}": case
        for case in report["cases"]
    }


@LONG
def test_every_strategy_on_two_ranks(tmp_path: Path) -> None:
    """Eager and compiled, and profiled."""
    path = tmp_path / "a report.json"
    options = ["--strategies", "all", "--backends", "aot_eager,eager", "--json", str(path)]
    options += ["--profile", "--trace-file", "t-{case}-{rank}.json"]
    done = run([*torchrun(2), SCRIPT, *SHORT, *options], timeout=580, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = results.load(str(path))
    assert report["status"] == "complete"
    cases = by_name(report)
    strategies = ("none", "ddp", "fsdp1", "fsdp2")
    assert list(cases) == [f"{s} {b}" for s in strategies for b in ("eager", "aot_eager")]
    for name, case in cases.items():
        strategy, backend = name.split()
        assert case["check"] == "passed", name
        metrics = case["metrics"]
        ranks = 1 if strategy == "none" else 2
        assert [len(row) for row in case["samples_s"]] == [6] * ranks
        assert metrics["flops_per_step"] > 0
        assert "mfu" not in metrics
        assert len(metrics["profile"]) == ranks
        assert (metrics["graphs"] > 0) == (backend != "eager")
        assert ("vs_eager" in metrics) == (backend != "eager")
        assert ("vs_none" in metrics) == (strategy != "none")
        assert name in done.stdout
    assert cases["ddp aot_eager"]["metrics"]["graph_breaks"]
    traces = sorted(trace.name for trace in tmp_path.glob("t-*.json"))
    assert len(traces) == 2 + 3 * 2 * 2
    names = {
        event.get("name")
        for event in json.loads((tmp_path / traces[-1]).read_text())["traceEvents"]
    }
    assert {"Forward", "Backward", "Optimizer"} <= names
    for text in ("Cost: toy-small", "Profile: toy-small", "graph break, ddp aot_eager"):
        assert text in done.stdout


@LONG
def test_three_ranks_in_bf16(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    options = ["--strategies", "ddp,fsdp2", "--backends", "eager,aot_eager", "--dtype", "bf16"]
    command = [*torchrun(3), SCRIPT, *SHORT, *DECODER, *options, "--json", str(path)]
    command += ["--fsdp-checkpoint", "--dynamo-no-optimize-ddp", "--no-optimizer"]
    done = run(command, timeout=580, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = load(path)
    assert {case["check"] for case in report["cases"]} == {"passed"}
    assert {len(case["ranks"]) for case in report["cases"]} == {3}
    case = report["cases"][0]
    tokens = 3 * 2 * 16 / case["metrics"]["step_time_p50_s"]
    assert case["metrics"]["tokens_per_s"] == pytest.approx(tokens)
    assert "tokens/s" in done.stdout


@LONG
def test_inductor_in_a_world_of_one(tmp_path: Path) -> None:
    """Cold caches leave nothing behind; `print` prints; a backend that is not there fails alone."""
    path = tmp_path / "r.json"
    folder = tmp_path / "temporary"
    folder.mkdir()
    options = ["--strategies", "fsdp2", "--backends", "inductor,tvm,print,eager"]
    command = ["env", f"TMPDIR={folder}", sys.executable, SCRIPT, *SHORT, *DECODER, *options]
    done = run([*command, "--json", str(path)], timeout=580, cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    cases = by_name(load(path))
    assert len(cases) == 4
    for name, case in cases.items():
        missing = "failed: CompileError: ModuleNotFoundError: No module named 'tvm'; install it"
        assert case["check"].startswith(missing if name.endswith("tvm") else "passed"), name
    inductor = cases["fsdp2 inductor"]["metrics"]
    assert inductor["first_step_s"] > cases["fsdp2 eager"]["metrics"]["first_step_s"]
    assert inductor["start_s"] > 0
    assert "# graph of the backend print" in done.stdout
    assert "scaled_dot_product_attention" in done.stdout
    assert not list(folder.glob("compile_sweep-*"))
    again = run([*command, "--json", str(path), "--resume"], timeout=580, cwd=tmp_path)
    assert again.returncode == 1
    assert {k: v for k, v in by_name(load(path)).items() if "tvm" not in k} == {
        k: v for k, v in cases.items() if "tvm" not in k
    }
