"""Each script once, in its shortest form: what .ci/run starts on the oldest torch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

TIMES = ("--iters", "6", "--warmup-iters", "1")
COMMANDS: dict[str, tuple[int, tuple[str, ...]]] = {
    "ddp_sweep": (2, ("--model", "mobilenet_v3_small", "--image-size", "32", *TIMES)),
    "compile_sweep": (2, ("--strategies", "all", "--backends", "eager,inductor", *TIMES)),
    "calibrate": (2, ("--modes", "barrier,resolution", "--seconds", "1")),
}


@pytest.mark.oldest
@pytest.mark.parametrize("script", sorted(p.stem for p in (ROOT / "benchmarks").glob("*.py")))
def test_once(script: str, bench: Callable[..., Any]) -> None:
    ranks, flags = COMMANDS[script]
    run = bench(f"benchmarks/{script}.py", *flags, ranks=ranks)
    assert run.status == 0, run.err
    assert run.report.status == "complete"
    assert Path(run.path).name == "report.jsonl"
