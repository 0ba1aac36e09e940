"""Traces of a case, by torch.profiler: `--profile DIR`. docs/profile.md describes the files.

After a case is timed, its ranks run a few more iterations of each step. Some of the ranks profile
them. A summary of each trace says when communication and computing ran in a step.
"""

import gzip
import hashlib
import json
import math
import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.profiler import profile, record_function

from common.groups import Group, Job
from common.report import Case
from common.timing import STEP, Step, time_block

ITERATIONS = 5
DEVIATION = 0.1  # the line of a trace says so where the profiler changes the step by more
MOST_LINES = 4  # of a case; the report has the summaries of all ranks
LONGEST_NAME = 120  # letters of a file's name that describe the case

# Kineto writes to stderr when it starts and ends, and where there is no GPU. 99 lets nothing pass.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

# On the CPU: PyTorch's operators, and what torch.compile has made of them.
OPERATORS = ("aten::", "mkldnn::", "Torch-Compiled Region", "## Call CompiledFxGraph")

Event = Mapping[str, Any]  # an entry of a trace's traceEvents
Span = tuple[float, float]  # start and end, in microseconds


# -- which ranks, which files ----------------------------------------------------------------------


def problem_with(folder: str, asked: Collection[int] | None, world_size: int) -> str | None:
    """Make the folder. Returns why this rank cannot write into it, or which of the ranks asked for
    the job does not have; None where all is well."""
    if asked and max(asked) >= world_size:
        known = f"expected ranks from 0 to {world_size - 1}"
        return f"--profile-ranks: {known}, got {max(asked)}; e.g. 0"
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return f"--profile {folder}: cannot write into it: {error.strerror}; e.g. --profile traces"
    return None


def name_of_case(benchmark: str, key: Mapping[str, Any]) -> str:
    """The name of a case's files: words for the reader, and a digest that makes it unique.

    Another key has another name, also where letters that are not safe in a file's name are gone.
    """
    told = [str(value) for value in key.values() if not isinstance(value, bool | None)]
    words = re.sub(r"[^A-Za-z0-9._]+", "-", " ".join([benchmark, *told]))
    text = json.dumps(key, sort_keys=True)
    digest = hashlib.sha256(f"{benchmark} {text}".encode()).hexdigest()[:8]
    return f"{words[:LONGEST_NAME].strip('-.')}-{digest}"


def choose_ranks(
    ranks: Sequence[int],
    nodes: Sequence[int],
    medians_s: Sequence[float],
    asked: Collection[int] | None,
) -> set[int]:
    """The ranks of a case that profile: those asked for, or the first of each node and the slowest.

    ranks: of the case. nodes: the node of each rank of the job. medians_s: the median step of each
    of `ranks`, in seconds.
    """
    if asked is not None:
        return set(ranks) & set(asked)
    first_of_node: dict[int, int] = {}
    for rank in ranks:
        first_of_node.setdefault(nodes[rank], rank)
    slowest = ranks[int(np.argmax(medians_s))]
    return {*first_of_node.values(), slowest}


def gather_medians(samples_s: Sequence[float], group: Group) -> list[float]:
    """The median of each rank's samples, in seconds, in the order of the group's ranks."""
    mine = torch.tensor([median(samples_s)], dtype=torch.float64)
    every = [torch.empty_like(mine) for _ in group.ranks]
    dist.all_gather(every, mine, group=group.control)
    return [float(value) for value in every]


# -- the iterations --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tracer:
    """What `--profile` does after each case, on every rank of the case."""

    folder: Path
    asked: Collection[int] | None  # the ranks of --profile-ranks; None without that flag
    benchmark: str
    job: Job
    nodes: Sequence[int]  # of each rank of the job
    announce: Callable[..., None]  # Watchdog.phase: tells the watchdog what comes next

    def trace(
        self,
        key: Mapping[str, Any],
        steps: Mapping[str, Step],
        samples_s: Sequence[float],
        longest_block_s: float,
        group: Group,
    ) -> dict[str, Any] | None:
        """Run the steps, and write a trace where this rank is one of those that profile.

        samples_s: this rank's seconds of the case's step. longest_block_s: what all iterations of
        a step may take. Returns the summary of the trace, with the file's name and the seconds of
        the first step. `lost` says what kept the trace from being written, such as a full disk.
        Returns None on a rank that writes no trace.
        """
        medians_s = gather_medians(samples_s, group)
        iters = max(1, min(ITERATIONS, int(longest_block_s / max(medians_s))))
        chosen = choose_ranks(group.ranks, self.nodes, medians_s, self.asked)
        if not chosen:
            return None
        if self.job.rank not in chosen:
            self.run(steps, iters, group)
            return None
        with profile(acc_events=True) as profiler:  # without it torch 2.11 warns of a second cycle
            seconds = self.run(steps, iters, group)
        first = next(iter(steps))
        name = name_of_case(self.benchmark, key)
        file = self.folder / f"{name}-rank{self.job.rank}.json.gz"
        summary: dict[str, Any] = {"file": str(file)}
        if first == STEP:  # a checkpoint's step is only a part of what is profiled
            summary["slowdown"] = round(seconds[first] / median(samples_s), 3)
        self.announce(f"writes {file}", 0)
        return summary | write(profiler, file, first)

    def run(self, steps: Mapping[str, Step], iters: int, group: Group) -> dict[str, float]:
        """Run each step `iters` times, each in a range of its name. Seconds of one, by name."""
        seconds: dict[str, float] = {}
        for name, step in steps.items():

            def in_range(name: str = name, step: Step = step) -> None:
                with record_function(name):
                    step()

            self.announce(f"{name}, for the trace")
            dist.barrier(group.control)
            step()  # without a range: the first one under the profiler is slower
            times_s, _ = time_block(in_range, iters, self.job.device)
            seconds[name] = median(times_s)
        return seconds


def write(profiler: profile, file: Path, step: str) -> dict[str, Any]:
    """Write the trace. Returns the shares of the step, or what was `lost`."""
    try:
        file.unlink(missing_ok=True)
        profiler.export_chrome_trace(str(file))
        with gzip.open(file, "rt") as lines:
            return shares(json.load(lines)["traceEvents"], step)
    except (OSError, EOFError, ValueError) as error:
        with suppress(OSError):
            file.unlink(missing_ok=True)
        return {"lost": getattr(error, "strerror", None) or str(error)}


# -- the summary of a trace ------------------------------------------------------------------------


def shares(events: Iterable[Event], step: str) -> dict[str, float]:
    """The shares of the step's time in which communication and computing run, alone and together.

    events: of a trace of Kineto. On CUDA the kernels run: NCCL's communicate, the others compute,
    and the step lasts from the first start of a kernel of it to the last end. On the CPU the
    operations of gloo communicate and operators of PyTorch compute. Without any communication, or
    any range of the step, there are no shares of it: RPC is not recorded.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    communication, computing = find_communication(complete), find_computing(complete)
    window = find_window(complete, step)
    length = total(window)
    if not length:
        return {}
    communication = overlap(communication, window)
    computing = overlap(computing, window)
    both = total(overlap(communication, computing)) / length
    computing_alone = total(computing) / length - both
    summary = {"computing_alone": round(computing_alone, 4)}
    if communication:
        summary["communication_alone"] = round(total(communication) / length - both, 4)
        summary["both"] = round(both, 4)
    return summary


def find_communication(events: Iterable[Event]) -> list[Span]:
    """When NCCL's kernels run, and operations of gloo, which has a name in the trace for them."""
    spans = []
    for event in events:
        by_nccl = event["cat"] == "kernel" and "nccl" in event["name"].lower()
        if by_nccl or event["name"].startswith("gloo:"):
            spans.append(span_of(event))
    return merged(spans)


def find_computing(events: Iterable[Event]) -> list[Span]:
    """When kernels other than NCCL's run. Where there are none at all, when operators do.

    An operator may call a collective or wait for one, as DTensor's do: that is no computing. Nor is
    an operator within a collective, as gloo's sparse all-reduce has them.
    """
    kernels, on_gpu = [], False
    operators = defaultdict[Any, list[Span]](list)  # by thread
    calls = defaultdict[Any, list[Span]](list)  # of collectives
    for event in events:
        name, thread = event["name"], event.get("tid")
        if event["cat"] == "kernel":
            on_gpu = True
            if "nccl" not in name.lower():
                kernels.append(span_of(event))
        elif event["cat"] == "cpu_op" and name.startswith(OPERATORS):
            operators[thread].append(span_of(event))
        elif name.startswith("gloo:") or (event["cat"] == "cpu_op" and "c10d" in name):
            calls[thread].append(span_of(event))
    if on_gpu:
        return merged(kernels)
    spans = []
    for thread, of_thread in operators.items():
        spans += overlap(merged(of_thread), gaps(merged(calls[thread])))
    return merged(spans)


def find_window(events: Iterable[Event], step: str) -> list[Span]:
    """When the step runs: the GPU's time from its first kernel to its last one, or its ranges."""
    ranges = defaultdict[str, list[Span]](list)
    for event in events:
        if event["name"] == step:
            ranges[event["cat"]].append(span_of(event))
    on_gpu = ranges["gpu_user_annotation"]
    if on_gpu:
        return [(min(start for start, _ in on_gpu), max(end for _, end in on_gpu))]
    return merged(ranges["user_annotation"])


def span_of(event: Event) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same time as spans that are sorted and do not touch."""
    apart: list[Span] = []
    for start, end in sorted(spans):
        if apart and start <= apart[-1][1]:
            apart[-1] = (apart[-1][0], max(apart[-1][1], end))
        else:
            apart.append((start, end))
    return apart


def gaps(spans: Sequence[Span]) -> list[Span]:
    """The time outside of merged spans."""
    edges = [edge for span in spans for edge in span]
    edges = [-math.inf, *edges, math.inf]
    return list(zip(edges[::2], edges[1::2], strict=True))


def overlap(first: Sequence[Span], second: Sequence[Span]) -> list[Span]:
    """The time that is in both, each of merged spans."""
    common: list[Span] = []
    i = j = 0
    while i < len(first) and j < len(second):
        start = max(first[i][0], second[j][0])
        end = min(first[i][1], second[j][1])
        if start < end:
            common.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return common


def total(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)


# -- what is printed -------------------------------------------------------------------------------


def trace_lines(case: Case) -> list[str]:
    """A line for each trace of the case, with its summary: the first MOST_LINES."""
    traces = case.metrics.get("traces", {})
    return [f"# trace of rank {rank}: {describe(traces[rank])}" for rank in [*traces][:MOST_LINES]]


def describe(summary: Mapping[str, Any]) -> str:
    """The summary of a trace in one line."""
    if "lost" in summary:
        return f"lost: {summary['lost']}: {summary['file']}"
    words = "no range of the step was recorded"
    if "communication_alone" in summary:
        alone, both = summary["communication_alone"], summary["both"]
        computing = summary["computing_alone"]
        words = f"communication alone {alone:.0%}, with computing {both:.0%}, "
        words += f"computing alone {computing:.0%} of the step"
    elif "computing_alone" in summary:
        computing = summary["computing_alone"]
        words = f"computing {computing:.0%} of the step, no communication was recorded"
    slowdown = summary.get("slowdown", 1.0)
    if abs(slowdown - 1) > DEVIATION:
        words += f"; under the profiler it took {slowdown:.2f} times as long"
    return f"{words}; {summary['file']}"
