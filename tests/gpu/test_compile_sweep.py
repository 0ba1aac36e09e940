"""compile_sweep on a machine with CUDA: inductor and Triton, NCCL, MFU, CUDA graphs."""

from pathlib import Path

import pytest
import torch
from harness import ROOT, load, run, torchrun

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
SCRIPT = str(ROOT / "benchmarks" / "compile_sweep.py")
DECODER = ["--models", "decoder-10m", "--batch-size", "4", "--sequence-length", "128"]


def test_every_strategy_compiled(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    options = ["--strategies", "all", "--backends", "eager,inductor", "--dtype", "fp32,bf16"]
    options += ["--iters", "12", "--json", str(path), "--profile"]
    options += ["--memory-snapshot", "memory-{case}-{rank}.pickle"]
    ranks = max(1, torch.cuda.device_count())
    command = [*torchrun(ranks), SCRIPT, *DECODER, *options]
    done = run(command, timeout=290, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    cases = load(path)["cases"]
    assert [case["check"] for case in cases] == ["passed"] * 16
    assert all(case["metrics"]["memory_gib"] > 0 for case in cases)
    assert all(0 < case["metrics"].get("mfu", 0.5) < 1.2 for case in cases)
    assert len(list(tmp_path.glob("memory-*.pickle"))) == 4 + 12 * ranks


def test_cudagraphs(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    options = ["--strategies", "none", "--backends", "eager,cudagraphs", "--iters", "12"]
    done = run([*torchrun(1), SCRIPT, *DECODER, *options, "--json", str(path)], timeout=290)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {case["check"] for case in load(path)["cases"]} == {"passed"}
