"""Kineto traces for the tests of analysis/trace.py, written by hand."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.pure.reports import run

GEMM = "sm90_xmma_gemm_f32f32"
Events = list[dict[str, Any]]


def kernel(
    name: str, start: float, length: float, stream: int = 7, device: int = 0, **args: Any
) -> Events:
    """A kernel, and the host's call 10 us before. Times in microseconds."""
    number = round(start * 100) + stream
    span = {"ph": "X", "ts": start - 10, "dur": 1}
    own = {"device": device, "stream": stream, "correlation": number} | args
    return [
        span
        | {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 100, "tid": 100}
        | {"args": {"correlation": number}},
        span
        | {"cat": "kernel", "name": name, "pid": device, "tid": stream, "args": own}
        | {"ts": start, "dur": length},
    ]


def collective(
    name: str, start: float, length: float, nelems: int = 0, group: str = "dp", **args: Any
) -> Events:
    """A kernel of NCCL of the ranks 0 and 1, with what torch says of it."""
    about: dict[str, Any] = {
        "Collective name": name,
        "In msg nelems": nelems,
        "Out msg nelems": nelems,
        "Group size": 2,
        "dtype": "Float",
        "Process Group Name": "0",
        "Process Group Description": group,
        "Process Group Ranks": "[0, 1]",
    }
    return kernel("ncclDevKernel", start, length, 20, 0, **(about | args))


def step(number: int, start: float, length: float) -> Events:
    about = {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{number}"}
    return [about | {"pid": 100, "tid": 100, "ts": start, "dur": length, "args": {}}]


def save(path: Path, events: Iterable[dict[str, Any]], **more: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(" \n" + json.dumps({"traceEvents": list(events)} | more))
    return str(path)


def save_ranks(folder: Path, *ranks: Events, hosts: Iterable[str] = ()) -> list[str]:
    """A file for each rank. hosts: of each."""
    paths = []
    named = [{"host_name": host} for host in hosts] or [{}] * len(ranks)
    for rank, (events, host) in enumerate(zip(ranks, named, strict=True)):
        about = {"rank": rank, "world_size": len(ranks)}
        paths.append(save(folder / f"{rank}.json", events, distributedInfo=about, **host))
    return paths


def table(*words: str) -> list[list[str]]:
    """What the command prints: the cells of each line, split where two blanks or more stand."""
    done = run("trace.py", *words)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line and not line.startswith("--")]
    return [re.split(r"\s{2,}", line.strip()) for line in lines]


def remarks(*words: str) -> list[str]:
    """The lines below the tables."""
    return [row[0] for row in table(*words) if row[0].startswith("#")]


def mean(path: str) -> dict[str, str]:
    """The mean step of a trace: its columns by name."""
    header, row, *_ = table(path)
    return dict(zip(header, row, strict=True))


def refusal(*words: str) -> str:
    """The one line in which the command refuses its files."""
    done = run("trace.py", *words)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    return line
