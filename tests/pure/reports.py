"""Reports for the tests of analysis/: written here, by hand or by a small command."""

import contextlib
import gc
import io
import json
import random
import runpy
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    head = {
        "schema": "torchrun-bench/3",
        "benchmark": "ddp_sweep",
        "argv": ["benchmarks/ddp_sweep.py", "--json", str(path)],
        "started_at": "2026-01-01T00:00:00+00:00",
        "environment": {"torch": "2.15.0", "world_size": 2, "devices": ["a CPU"], "hosts": ["vm"]},
    }
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


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


def run(script: str, *words: str) -> Done:
    """A script of analysis/ as its user runs it, but in this process, which has its imports."""
    path, old = str(ROOT / "analysis" / script), sys.argv
    changed = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in changed}
    out, err = io.StringIO(), io.StringIO()
    status: Any = 0
    try:
        sys.argv = [path, *words]
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        status = end.code
    finally:
        sys.argv = old
        gc.enable()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return Done(status, out.getvalue(), err.getvalue())
