#!/usr/bin/env python3
"""Where does the time of a step go? From Kineto traces, as torch.profiler writes them.

    python analysis/trace.py traces/CASE-rank*.json.gz
    python analysis/trace.py profile_traces/iteration_10/rank*_trace.json -o step.png

computing      a kernel of the GPU runs; in a trace without kernels, an operator on the CPU
communication  a kernel of NCCL runs, or an operation of gloo
exposed        communication runs, and nothing computes
both           communication and computing run at once
idle           neither runs: the GPU copies or waits for the host, or Python runs

Traces of several ranks of a job show which rank the others wait for. See docs/profile.md.
"""

import gzip
import json
import math
import re
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.show import clean, put, show_table
from common import cli

EXPECTED = "expected a trace of torch.profiler, e.g. by export_chrome_trace('rank0.json.gz')"
COLORS = {"computing": "#1f83c4", "communication": "#d55e00"}
COLUMNS = ("computing", "communication", "exposed", "both", "idle")
COMMUNICATION = re.compile(
    "nccl|rccl|nvshmem|deep_ep|_shot_all_reduce|multimem|cross_device_reduce"
)
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
# On the CPU: PyTorch's operators, and what torch.compile has made of them.
OPERATORS = ("aten::", "mkldnn::", "Torch-Compiled Region", "## Call CompiledFxGraph")
# Collectives that no rank ends before the last one begins
TOGETHER = re.compile("all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|barrier")
NUMBERS = range(2, 20)  # columns of tables
PICTURES = (".png", ".svg", ".pdf")

Event = Mapping[str, Any]  # a complete event of a trace
Span = tuple[float, float]  # start and end, in microseconds


class Activity(NamedTuple):
    """What runs from start to end, in microseconds."""

    start: float
    end: float
    kind: str  # computing or communication
    place: str  # the thread of the CPU or the stream of the GPU
    launched: float  # when the host launched it
    name: str = ""
    group: str = ""  # of a collective, if the trace names it
    ranks: str = ""  # of that group, `[0, 1]`


class Step(NamedTuple):
    name: str
    start: float
    end: float
    calls: list[Activity]  # the collectives that the host launched in it, in order


Call = tuple[str, Activity]  # the name of a step, and a collective in it


class Trace(NamedTuple):
    rank: int
    activities: list[Activity]
    steps: list[Step]
    groups: list[set[int]]  # the ranks of the job's process groups; empty for all ranks

    def spans(self, kind: str) -> list[Span]:
        return [(one.start, one.end) for one in self.activities if one.kind == kind]


def read(path: str, number: int) -> Trace:
    """number: the rank, if neither the trace nor the file's name has it. Raises an error of any
    kind if the file is no trace."""
    data = Path(path).read_bytes()
    if data.startswith(b"\x1f\x8b"):
        data = gzip.decompress(data)
    # Kineto copies names as they are: they may hold control characters and half a letter
    content = json.loads(data.decode(errors="replace"), strict=False)
    if not isinstance(content, dict) or "traceEvents" not in content:
        raise ValueError("JSON without traceEvents")
    events = [event for event in content["traceEvents"] if event.get("ph") == "X"]
    categories = {str(event["cat"]) for event in events}
    on_host = "cuda_runtime" in categories or any(e["name"].startswith("nccl:") for e in events)
    if on_host and not categories & {*ON_GPU}:
        raise ValueError("a GPU's without kernels: profile ProfilerActivity.CUDA, too")
    activities = find_activities(events)
    steps = find_steps(events, activities)
    if not steps:
        raise ValueError(f"no kernels and no operators, but {', '.join(sorted(categories))}")
    about = content.get("distributedInfo") or {}
    in_name = re.search(r"rank[-_]?(\d+)", Path(path).name)
    rank = int(about["rank"] if "rank" in about else in_name[1] if in_name else number)
    groups = [set(group.get("ranks") or ()) for group in about.get("pg_config") or ()]
    return Trace(rank, activities, steps, groups)


def kind_of(event: Event) -> str:
    """Computing or communication; on the CPU also operators, and calls of collectives."""
    name, category = event["name"], event["cat"]
    if name.startswith("gloo:"):
        return "communication"
    if category == "kernel":
        is_collective = COMMUNICATION.search(name.lower()) or "Collective name" in event["args"]
        return "communication" if is_collective else "computing"
    if category == "gpu_memcpy" and "PtoP" in name:  # from one GPU to another one
        return "communication"
    if category == "cpu_op" and name.startswith(OPERATORS):
        return "operator"
    return "call" if category == "cpu_op" and "c10d" in name else ""


def find_activities(events: Sequence[Event]) -> list[Activity]:
    """What counts. On the CPU, an operator that calls a collective or waits for one does not
    compute meanwhile, and an operator within a collective is part of it."""
    launches: dict[Any, float] = {}
    for event in events:
        if event["cat"] not in ON_GPU and "correlation" in event.get("args", {}):
            launches[event["args"]["correlation"]] = event["ts"]
    activities: list[Activity] = []
    operators = defaultdict[str, list[Span]](list)  # by thread
    calls = defaultdict[str, list[Span]](list)
    for event in events:
        kind, args = kind_of(event), event.get("args", {})
        span: Span = (event["ts"], event["ts"] + event["dur"])
        place = f"{'stream' if event['cat'] in ON_GPU else 'thread'} {event['tid']}"
        if kind == "operator":
            operators[place].append(span)
        elif kind in ("call", "communication"):
            calls[place].append(span)
        if kind in COLORS:
            launched = launches.get(args.get("correlation"), span[0])
            group = args.get("Process Group Description", "undefined")
            if group == "undefined":
                group = args.get("Process Group Name", "")
            name = args.get("Collective name") or event["name"].partition("(")[0]
            words = [str(word) for word in (name, group, args.get("Process Group Ranks", ""))]
            activities.append(Activity(*span, kind, place, launched, *words))
    if any(one.place.startswith("stream") for one in activities):
        return activities
    for place, spans in operators.items():
        for start, end in union(spans, calls[place]):
            activities.append(Activity(start, end, "computing", place, start))
    return activities


def union(spans: Iterable[Span], without: Iterable[Span] = ()) -> list[Span]:
    """The times in which at least one of `spans` runs and none of `without`: in order, disjoint."""
    edges = []
    for start, end in spans:
        edges += [(start, 1, 0), (end, -1, 0)]
    for start, end in without:
        edges += [(start, 0, 1), (end, 0, -1)]
    times: list[Span] = []
    running, blocked, since = 0, 0, 0.0
    for time, change, block in sorted(edges):
        if running and not blocked and since < time:
            begin = times.pop()[0] if times and times[-1][1] == since else since
            times.append((begin, time))
        running, blocked, since = running + change, blocked + block, time
    return times


def find_steps(events: Sequence[Event], activities: Sequence[Activity]) -> list[Step]:
    """The profiler's steps, or the ranges `step`; or else the whole trace.

    On a GPU a step lasts from the start of the first kernel that the host launched in it to the
    end of the last one. A step of the profiler lasts until the next one starts.
    """
    ranges = [event for event in events if event["cat"] in ("user_annotation", "cpu_op")]
    spans = sorted((event["ts"], event["ts"] + event["dur"], event["name"]) for event in ranges)
    marks = [span for span in spans if span[2].startswith("ProfilerStep#")]
    follow_each_other = bool(marks)
    if not marks:
        found = [span for span in spans if span[2] == "step"]
        marks = [(start, end, f"step {number}") for number, (start, end, _) in enumerate(found)]
    on_gpu = any(one.place.startswith("stream") for one in activities)
    steps: list[Step] = []
    for start, end, name in marks or [(-math.inf, math.inf, "all")]:
        own = sorted(one for one in activities if start <= one.launched < end)
        if on_gpu or not marks:
            if not own:
                continue
            start, end = own[0].start, max(one.end for one in own)
            if steps and follow_each_other:
                steps[-1] = steps[-1]._replace(end=start)
        if start < end:
            calls = [one for one in own if one.kind == "communication"]
            steps.append(Step(name, start, end, calls))
    return steps


def shares_of(
    computing: list[Span], communication: list[Span], steps: Sequence[Step]
) -> list[list[float]]:
    """Rows of milliseconds, of the mean step and then of each step: its length, and COLUMNS."""
    computing, communication = union(computing), union(communication)
    either = union(computing + communication)
    rows = []
    for step in steps:
        length = step.end - step.start
        computes, communicates = within(computing, step), within(communication, step)
        busy = within(either, step)
        exposed, both = busy - computes, computes + communicates - busy
        times = (length, computes, communicates, exposed, both, length - busy)
        rows.append([max(0, time) / 1e3 for time in times])  # a difference may be just below 0
    mean = [fmean(times) for times in zip(*rows, strict=True)]
    return [mean, *rows]


def within(spans: Iterable[Span], step: Step) -> float:
    """How long disjoint spans run in a step."""
    return sum(max(0, min(end, step.end) - max(start, step.start)) for start, end in spans)


def show_shares(traces: Iterable[Trace]) -> None:
    """A table: the mean step of each rank, and each of its steps."""
    rows = []
    for trace in traces:
        times = shares_of(trace.spans("computing"), trace.spans("communication"), trace.steps)
        names = [f"mean of {len(trace.steps)}", *[step.name for step in trace.steps]]
        for name, (ms, *parts) in zip(names, times, strict=True):
            shares = [f"{100 * part / ms if ms else 0:.1f}" for part in parts]
            rows.append([trace.rank, name, f"{ms:.3f}", *shares])
    header = ["rank", "step", "ms", *[f"{column} (%)" for column in COLUMNS]]
    put(show_table(header, rows, NUMBERS) + "\n")


def show_collectives(traces: Mapping[int, Trace]) -> None:
    """A row for each process group of each rank, and the rank that comes last most often."""
    rows = []
    last, matched = Counter[int](), Counter[int]()
    groups = [group for trace in traces.values() for group in trace.groups if len(group) > 1]
    have_all = all(traces.keys() <= group for group in groups)
    of_group = defaultdict[Any, dict[int, list[Call]]](lambda: defaultdict(list))
    for rank, trace in traces.items():
        for step in trace.steps:
            for one in step.calls:
                of_group[one.group, one.ranks][rank].append((step.name, one))
    for (group, ranks), of_rank in sorted(of_group.items()):
        waits = find_waits(of_rank) if ranks or have_all else {}
        for rank, calls in of_rank.items():
            trace, own = traces[rank], waits.get(rank, [])
            spans = [(one.start, one.end) for _, one in calls]
            mean, *steps = shares_of(trace.spans("computing"), spans, trace.steps)
            _, _, whole, exposed, *_ = mean
            numbers = (len(calls) / len(steps), whole, exposed, sum(own) / len(steps))
            cells = [f"{number:.5g}" for number in numbers]
            cells.append(f"{own.count(0)} of {len(own)}" if own else "-")
            rows.append([group or "not named", ranks, rank, *cells])
            last[rank] += own.count(0)
            matched[rank] += len(own)
    header = ["group", "ranks", "rank", "calls a step", "ms", "exposed (ms)", "waits (ms)", "last"]
    if rows:
        put(show_table(header, rows, NUMBERS) + "\n")
    rank = max(last, key=lambda rank: last[rank], default=0)
    if last[rank]:
        put(f"# rank {rank} comes last most often, to {last[rank]} of {matched[rank]} collectives")


def find_waits(of_rank: Mapping[int, Sequence[Call]]) -> dict[int, list[float]]:
    """The milliseconds that each rank waits in those collectives of a group that all ranks have:
    they end together, so the one that is shortest came last. No clock is shared between nodes."""
    lengths = defaultdict[Any, dict[int, float]](dict)  # of each collective, by rank
    for rank, calls in of_rank.items():
        counts = Counter[tuple[str, str]]()
        for step, one in calls:
            if TOGETHER.search(one.name.lower()):
                counts[step, one.name] += 1
                call = (step, one.name, counts[step, one.name])
                lengths[call][rank] = (one.end - one.start) / 1e3
    waits = defaultdict[int, list[float]](list)
    for of_call in lengths.values():
        if len(of_call) == len(of_rank) > 1:
            for rank, length in of_call.items():
                waits[rank].append(length - min(of_call.values()))
    return waits


def draw(traces: Mapping[int, Trace], path: str) -> None:
    """The step of median length: a row for each thread or stream, a colour for each kind."""
    from matplotlib.figure import Figure  # only here: a table needs none

    steps = next(iter(traces.values())).steps
    median = sorted(steps, key=lambda step: step.end - step.start)[len(steps) // 2]
    number = steps.index(median)
    bars = defaultdict[str, dict[str, list[Span]]](lambda: defaultdict(list))
    for rank, trace in traces.items():
        step = trace.steps[min(number, len(trace.steps) - 1)]
        for one in sorted(trace.activities, key=lambda one: one.kind != "computing"):
            start, end = max(one.start, step.start), min(one.end, step.end)
            if start < end:
                bar = ((start - step.start) / 1e3, (end - start) / 1e3)
                bars[f"rank {rank}, {one.place}"][one.kind].append(bar)
    figure = Figure(figsize=(9, 1.2 + 0.4 * len(bars)), layout="constrained")
    axes = figure.add_subplot(xlabel="ms")
    axes.set_title(clean(median.name), loc="left")
    for kind, color in COLORS.items():
        for row, place in enumerate(bars):
            axes.broken_barh(bars[place][kind], (row - 0.35, 0.7), facecolors=color)
        axes.plot([], [], color=color, linewidth=6, label=kind)
    axes.set_yticks(range(len(bars)), bars)
    axes.invert_yaxis()
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
    figure.savefig(path, dpi=150)


def main() -> int:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("trace", nargs="+", metavar="TRACE", help="a file of each rank of a job, .json or .json.gz")
    suffixes = "a file that ends in .png, .svg or .pdf"
    drawn = cli.checked(str, lambda path: Path(path).suffix in PICTURES, suffixes, "e.g. step.png")
    add("-o", "--output", type=drawn, metavar="PICTURE", help=f"draw the median step: {suffixes}")
    args = parser.parse_args()
    traces: dict[int, Trace] = {}
    for number, path in enumerate(args.trace):
        try:
            trace = read(path, number)
        except (OSError, EOFError, zlib.error, RecursionError, ValueError) as error:
            parser.error(f"{path}: {EXPECTED}, got {error}")
        except (AttributeError, KeyError, TypeError) as error:
            parser.error(f"{path}: {EXPECTED}, got other events: {cli.describe(error)}")
        if trace.rank in traces:
            parser.error(f"{path}: expected a trace of each rank, got another one of {trace.rank}")
        traces[trace.rank] = trace
    traces = dict(sorted(traces.items()))
    show_shares(traces.values())
    show_collectives(traces)
    if args.output:
        try:
            draw(traces, args.output)
        except OSError as error:
            parser.error(cli.describe(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
