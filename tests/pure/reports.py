"""Reports for the tests of analysis/: written here, by hand or by a small command."""

import gc
import io
import json
import random
import runpy
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def estimate(value: Any, low: Any = None, high: Any = None) -> dict[str, Any]:
    """An estimated metric, as a report has it."""
    return {"value": value, "low": low, "high": high}


def case(name: str, times: Sequence[Any] = (0.1,), **changes: Any) -> dict[str, Any]:
    """A case of one rank whose step took these seconds."""
    line = {
        "key": {"setting": name, "model": "resnet18", "batch_size": 8},
        "name": name,
        "table": "resnet18, batch size 8",
        "ranks": [0],
        "samples_s": {"step": [list(times)]},
        "rounds": [len(times)],
        "stop": "iters",
        "metrics": {"step_s": estimate(sorted(times)[len(times) // 2])},
        "check": "passed",
    }
    return line | changes


def write(path: Path, *cases: dict[str, Any], **changes: Any) -> str:
    """A complete report of ddp_sweep at `path`; `changes` of its first line, or its status."""
    status = changes.pop("status", "complete")
    about = {"torch": "2.15.0", "world_size": 2, "devices": ["a CPU"], "hosts": ["vm"]}
    head = {"schema": "torchrun-bench/3", "benchmark": "ddp_sweep", "environment": about}
    head |= {"argv": ["benchmarks/ddp_sweep.py"], "started_at": "2026-01-01T00:00:00+00:00"}
    lines = [head | changes, *cases]
    if status:
        lines.append({"status": status, "finished_at": "2026-01-01T00:01:00+00:00"})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def runs(folder: Path, times: Sequence[float], name: str = "no ddp", **changes: Any) -> str:
    """A folder of reports, one a time in seconds, started an hour apart."""
    for i, seconds in enumerate(times):
        start = {"started_at": f"2026-01-01T{i:02}:00:00+00:00"}
        write(folder / f"{i:02}.jsonl", case(name, [seconds] * 5), **(start | changes))
    return str(folder)


def alike(count: int, seconds: float, seed: int, scatter: float = 0.01) -> list[float]:
    """Times of runs that differ by a standard deviation of `scatter`."""
    rng = random.Random(seed)
    return [seconds * (1 + rng.gauss(0, scatter)) for _ in range(count)]


def run(script: str, *words: str) -> CompletedProcess[str]:
    """A script of analysis/ as its user runs it, but in this process, which has its imports."""
    path = str(ROOT / "analysis" / script)
    out, err = io.StringIO(), io.StringIO()
    status: Any = 0
    try:
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.setattr(sys, "argv", [path, *words])
            runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        status = end.code
    finally:
        gc.enable()  # compare.py has disabled it
    return CompletedProcess([path, *words], status, out.getvalue(), err.getvalue())
