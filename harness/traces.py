"""What analysis/trace.py and benchmarks/replay.py both find in traces of torch.profiler: steps, the
rank in a file's name, and numbers. Requires only the standard library.
"""

import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

STEP = "step"  # the name of the ranges that --profile marks, as in common/timing.py
MARK = "ProfilerStep#"  # the profiler's own ranges, by prof.step()
RANGES = ("user_annotation", "cpu_op")  # categories of ranges marked by record_function
LOST = 0.5  # a last step with at most this share of the work of any other step is incomplete
LOST_OF_TWO = 0.1  # the same for the second of two steps

# The rank in the name of a file: fr_0.json, nccl_trace_rank_0, rank0_trace.json.gz, a-rank[5].json,
# rank-0.Apr_03.json.gz; also after the name of a host, as in nccl_trace_rank_node2_5
HOST = r"(?:\d*[A-Za-z].*|\d+(?:\.\d+){3})"
NAMED = re.compile(
    rf"(?:(?<![a-z])fr|(?<!local)(?<!local[_-])rank)"
    rf"(?:[_-]{HOST}[_-](?=\d+(?:\.[a-z.]+)?$)|[\[/_-]?)(\d+)",
    re.IGNORECASE,
)
# At the end of other names: trace_5, 1757-TP-2.trace.json.gz, 3.json; not the process id in
# vm_4711.pt.trace.json, nor the number of a step
LAST = re.compile(r"(?:^|(?<!step)(?<!iter)(?<!iteration)(?<!epoch)[_-])(\d+)$", re.IGNORECASE)
ENDINGS = re.compile(r"(\.trace)?\.json(\.gz)?$|\.pickle$|\.pkl$")


def rank_in_name(path: str | Path) -> int | None:
    """Return the rank that the name of a file contains; None if there is none."""
    name = Path(path).name
    if found := NAMED.search(name):
        return int(found[1])
    found = None if ".pt.trace." in name else LAST.search(ENDINGS.sub("", name))
    return int(found[1]) if found else None


def as_number(value: Any) -> float | None:
    """Return a finite number, also one that is written as text; None for anything else."""
    if type(value) is str:
        try:
            value = float(value)
        except ValueError:
            return None
        value = int(value) if value.is_integer() else value
    return value if type(value) in (int, float) and math.isfinite(value) else None


def events_of(document: Any) -> list[Any] | None:
    """Return the events of a trace, which may be a bare list of them; None for other JSON."""
    events = document.get("traceEvents") if isinstance(document, dict) else document
    return events if isinstance(events, list) and (events or document != events) else None


class Range(NamedTuple):
    """A range of the host that may be a step. Times are in microseconds."""

    start: float
    end: float
    name: str
    thread: Any


def is_step(name: str, category: str) -> bool:
    """Whether an event may be a step. The copies of steps for the GPU have another category."""
    return category in RANGES and (name == STEP or name.startswith(MARK))


def outermost(ranges: Iterable[Range]) -> list[Range]:
    """Return the ranges that are not within another one, in order."""
    kept = list[Range]()
    for one in sorted(ranges, key=lambda one: (one.start, -one.end)):
        if not kept or one.end > kept[-1].end:
            kept.append(one)
    return kept


def find_steps(ranges: Iterable[Range], work: Sequence[float]) -> tuple[list[Range], Range | None]:
    """Return the steps in order, and the last one if it is incomplete.

    Steps are the ranges of the profiler, or, without these, those named `step`. A range within
    another one is a part of that step. If ranges of several threads overlap, the thread with the
    longest ranges counts. The last step is incomplete if the end of the trace has lost its work.

    work: times, sorted, at which the host started kernels or operators.
    """
    every = set(ranges)
    marks = [one for one in every if one.name.startswith(MARK)] or list(every)
    steps = outermost(marks)
    if any(following.start < one.end for one, following in pairwise(steps)):
        threads = [
            outermost(one for one in marks if one.thread == thread)
            for thread in dict.fromkeys(step.thread for step in steps)
        ]
        steps = max(threads, key=lambda of: sum(one.end - one.start for one in of))
    counts = [bisect_left(work, one.end) - bisect_left(work, one.start) for one in steps]
    least = min(counts[:-1], default=0)
    if least and counts[-1] <= least * (LOST if len(steps) > 2 else LOST_OF_TWO):
        return steps[:-1], steps[-1]
    return steps, None
