"""Kineto traces for the tests of analysis/trace.py."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.pure import reports

GEMM = "sm90_xmma_gemm_f32f32"
Events = list[dict[str, Any]]


def event(
    cat: str, name: str, start: float, length: float, tid: int = 100, pid: int = 100, **args: Any
) -> dict[str, Any]:
    """An event. Times are in microseconds. args: `Group_size` for the entry `Group size`."""
    about = {word.replace("_", " "): value for word, value in args.items()}
    where = {"ph": "X", "pid": pid, "tid": tid, "ts": start, "dur": length}
    return where | {"cat": cat, "name": name, "args": about}


def kernel(
    name: str,
    start: float,
    length: float,
    stream: int = 7,
    device: int = 0,
    *,
    launch: float | None = None,
    cat: str = "kernel",
    **args: Any,
) -> Events:
    """A kernel, and the host call that launches it, by default 10 us earlier."""
    at = start - 10 if launch is None else launch
    own = {"device": device, "stream": stream, "correlation": round(start * 100) + stream}
    return [
        event("cuda_runtime", "cudaLaunchKernel", at, 1, correlation=own["correlation"]),
        event(cat, name, start, length, stream, device, **(own | args)),
    ]


def about_call(name: str, sent: int = 0, group: str = "dp", **args: Any) -> dict[str, Any]:
    """The arguments that torch adds to a collective of ranks 0 and 1. sent: elements."""
    about: dict[str, Any] = {
        "Collective name": name,
        "In msg nelems": sent,
        "Out msg nelems": sent,
        "Group size": 2,
        "dtype": "Float",
        "Process Group Name": "0",
        "Process Group Description": group,
        "Process Group Ranks": "[0, 1]",
    }
    return about | args


def collective(
    name: str, start: float, length: float, sent: int = 0, group: str = "dp", **args: Any
) -> Events:
    """A kernel of NCCL with these arguments."""
    about = about_call(name, sent, group, **args)
    return kernel("ncclDevKernel", start, length, 20, 0, **about)


def step(number: int, start: float, length: float) -> Events:
    return [event("user_annotation", f"ProfilerStep#{number}", start, length)]


def save(path: Path, events: Iterable[dict[str, Any]], **more: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(" \n" + json.dumps({"traceEvents": list(events)} | more))
    return str(path)


def save_ranks(folder: Path, *ranks: Events, hosts: Iterable[str] = (), **info: Any) -> list[str]:
    """Write a file for each rank and return the paths. hosts: the host name of each rank. info:
    more of what torch knows about the job."""
    paths = []
    named = [{"host_name": host} for host in hosts] or [{}] * len(ranks)
    for rank, (events, host) in enumerate(zip(ranks, named, strict=True)):
        about = {"rank": rank, "world_size": len(ranks)} | info
        paths.append(save(folder / f"{rank}.json", events, distributedInfo=about, **host))
    return paths


def table(*words: str) -> list[list[str]]:
    """The output of trace.py: the cells of each line, split at two or more blanks."""
    done = reports.run("trace.py", *words)
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
    return reports.refusal("trace.py", *words)
