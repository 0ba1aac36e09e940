"""Kineto traces for the tests of analysis/trace.py."""

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
    """A kernel, and the host call 10 us earlier. Times are in microseconds."""
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
    """A kernel of NCCL on ranks 0 and 1, with the arguments that torch adds."""
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
    """Write a file for each rank and return the paths. hosts: the host name of each rank."""
    paths = []
    named = [{"host_name": host} for host in hosts] or [{}] * len(ranks)
    for rank, (events, host) in enumerate(zip(ranks, named, strict=True)):
        about = {"rank": rank, "world_size": len(ranks)}
        paths.append(save(folder / f"{rank}.json", events, distributedInfo=about, **host))
    return paths


def table(*words: str) -> list[list[str]]:
    """The output of trace.py: the cells of each line, split at two or more blanks."""
    done = run("trace.py", *words)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line and not line.startswith("--")]
    return [re.split(r"\s{2,}", line.strip()) for line in lines]


def remarks(*words: str) -> list[str]:
    """The comment lines below the tables."""
    return [row[0] for row in table(*words) if row[0].startswith("#")]


def mean(path: str) -> dict[str, str]:
    """The columns of the mean step of a trace by name."""
    header, row, *_ = table(path)
    return dict(zip(header, row, strict=True))


def refusal(*words: str) -> str:
    """The line with which the command refuses its files."""
    done = run("trace.py", *words)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    return line
