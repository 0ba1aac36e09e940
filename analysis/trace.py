#!/usr/bin/env python3
"""Where does the time of a step go? From Kineto traces, as torch.profiler writes them.

    python analysis/trace.py traces/CASE-rank*.json.gz
    python analysis/trace.py profile_traces/iteration_10/rank*_trace.json -o step.png

computing      a kernel of the GPU runs; in a trace without kernels, an operator on the CPU
communication  a kernel of NCCL runs, or an operation of gloo
exposed        communication runs, and nothing computes
both           communication and computing run at once
copies         only copies and memsets of the GPU run
idle           none of these runs: the GPU waits for the host, or Python runs

Traces of several ranks of a job show which rank the others wait for. See docs/profile.md.
"""

import gzip
import json
import math
import re
import sys
import zlib
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


from analysis.show import check_output, clean, is_number, put, show_table
from common import cli

EXPECTED = "expected a trace of torch.profiler, e.g. by export_chrome_trace('rank0.json.gz')"
COLORS = {"computing": "#1f83c4", "communication": "#d55e00", "copies": "#8a7a00"}
COLUMNS = ("computing", "communication", "exposed", "both", "copies", "idle")
COMMUNICATION = re.compile(
    "nccl|rccl|nvshmem|deep_ep|_shot_all_reduce|multimem|cross_device_reduce"
)
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
# On the CPU: PyTorch's operators, and what torch.compile has made of them.
OPERATORS = ("aten::", "mkldnn::", "Torch-Compiled Region", "## Call CompiledFxGraph")
# Collectives that no rank ends before the last one begins
TOGETHER = re.compile("all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|barrier")
NUMBERS = range(2, 20)  # columns of tables

Event = Mapping[str, Any]  # a complete event of a trace
Span = tuple[float, float]  # start and end, in microseconds


class Activity(NamedTuple):
    """What runs from start to end, in microseconds."""

    start: float
    end: float
    kind: str  # computing, communication or copies
    place: str  # the thread of the CPU or the stream of the GPU
    launched: float  # when the host launched it
    name: str = ""
    group: str = ""  # of a collective, if the trace names it
    ranks: str = ""  # of that group, `[0, 1]`


class Step(NamedTuple):
    name: str
    start: float
    end: float
    on_host: Span  # when the host launched it


Call = tuple[Step, Activity]  # a collective in its step


class Trace(NamedTuple):
    rank: int
    activities: list[Activity]
    steps: list[Step]
    groups: list[set[int]]  # the ranks of the job's process groups; empty for all ranks

    def spans(self, kind: str) -> list[Span]:
        return [activity[:2] for activity in self.activities if activity.kind == kind]

    def calls(self) -> list[Call]:
        """The collectives that the host launched in a step, in the order of their starts."""
        found = sorted(activity for activity in self.activities if activity.kind == "communication")
        steps = [(step, *step.on_host) for step in self.steps]
        return [(s, one) for s, begin, end in steps for one in found if begin <= one.launched < end]


def read(path: str, number: int, asked: str | None) -> Trace:
    """number: the rank, if neither the trace nor the file's name has it. asked: the name of the
    ranges that are steps. Raises an error of any kind if the file is no trace."""
    data = Path(path).read_bytes()
    if data.startswith(b"\x1f\x8b"):
        data = gzip.decompress(data)
    # Kineto copies names as they are: they may hold control characters and half a letter
    content = json.loads(data.decode(errors="replace"), strict=False)
    if not isinstance(content, dict) or "traceEvents" not in content:
        raise ValueError("JSON without traceEvents")
    events = [event for event in content["traceEvents"] if event.get("ph") == "X"]
    events = [e for e in events if is_number(e["ts"]) and is_number(e["dur"]) and e["dur"] >= 0]
    categories = {str(event["cat"]) for event in events}
    if not categories & {"cpu_op", "user_annotation", *ON_GPU}:
        program = "an older PyTorch" if "Kernel" in categories else "another program"
        raise ValueError(f"a trace of {program}, with events {', '.join(sorted(categories))}")
    on_host = "cuda_runtime" in categories or any(e["name"].startswith("nccl:") for e in events)
    if on_host and not categories & {*ON_GPU}:
        raise ValueError("a GPU's without kernels: profile ProfilerActivity.CUDA, too")
    activities = find_activities(events)
    steps = find_steps(events, activities, asked)
    if not steps:
        raise ValueError("a trace without kernels, copies and operators")
    about = content.get("distributedInfo") or {}
    in_name = re.search(r"rank[-_]?(\d+)", Path(path).name)
    rank = int(about["rank"] if "rank" in about else in_name[1] if in_name else number)
    groups = [set(group.get("ranks") or ()) for group in about.get("pg_config") or ()]
    return Trace(rank, activities, steps, groups)


def kind_of(event: Event) -> str:
    """Computing, communication, copies; on the CPU also operators, and calls of collectives."""
    name, category = event["name"], event["cat"]
    if name.startswith("gloo:"):
        return "communication"
    if category == "kernel":
        is_collective = COMMUNICATION.search(name.lower()) or "Collective name" in event["args"]
        return "communication" if is_collective else "computing"
    if category in ON_GPU:
        return "communication" if "PtoP" in name else "copies"  # from one GPU to another one
    if category == "cpu_op" and name.startswith(OPERATORS):
        return "operator"
    return "call" if category == "cpu_op" and "c10d" in name else ""


def find_activities(events: list[Event]) -> list[Activity]:
    """What counts. On the CPU, an operator that calls a collective or waits for one does not
    compute meanwhile, and an operator within a collective is part of it."""
    launches, found = dict[Any, float](), list[Activity]()
    on_cpu = defaultdict[str, Any](lambda: defaultdict(list))  # spans by thread and kind
    for event in events:
        if event["cat"] not in ON_GPU and "correlation" in event.get("args", {}):
            launches[event["args"]["correlation"]] = event["ts"]
    for event in events:
        kind, args = kind_of(event), event.get("args", {})
        start: float = event["ts"]
        end = start + event["dur"]
        place = f"{'stream' if event['cat'] in ON_GPU else 'thread'} {event['tid']}"
        if event["cat"] not in ON_GPU:
            on_cpu[place][kind].append((start, end))
        if kind in COLORS:
            launched = launches.get(args.get("correlation"), start)
            group = args.get("Process Group Description", "undefined")
            if group == "undefined":
                group = args.get("Process Group Name", "")
            name = args.get("Collective name") or event["name"].partition("(")[0]
            words = [str(word) for word in (name, group, args.get("Process Group Ranks", ""))]
            found.append(Activity(start, end, kind, place, launched, *words))
    if any(activity.place.startswith("stream") for activity in found):
        return found
    for place, spans in on_cpu.items():
        for start, end, kinds in pieces_of(spans):
            if kinds - {""} == {"operator"}:
                found.append(Activity(start, end, "computing", place, start))
    return found


def find_steps(events: list[Event], found: list[Activity], asked: str | None) -> list[Step]:
    """The ranges asked for, the profiler's steps, or the ranges `step`; or else the whole trace.

    On a GPU a step lasts from the start of the first kernel that the host launched in it to the
    end of the last one. A step of the profiler lasts until the next one starts.
    """
    ranges = [event for event in events if event["cat"] in ("user_annotation", "cpu_op")]
    names = Counter(event["name"] for event in ranges if event["cat"] == "user_annotation")
    marks: list[Event] = []
    for word in [asked] if asked else ["ProfilerStep", "step"]:
        pattern = re.compile(re.escape(word) + r"(#\d+)?")
        marks = marks or [event for event in ranges if pattern.fullmatch(event["name"])]
    if asked and not marks:
        known = ", ".join(clean(name, 40) for name, _ in names.most_common(8))
        raise ValueError(f"no range {asked}; its ranges are {known}")
    on_gpu = sorted((a.launched, a.start, a.end) for a in found if "stream" in a.place)
    steps: list[Step] = []
    for number, mark in enumerate(sorted(marks, key=lambda mark: mark["ts"])):
        start, end = on_host = mark["ts"], mark["ts"] + mark["dur"]
        own = on_gpu[bisect_left(on_gpu, (start,)) : bisect_left(on_gpu, (end,))]
        if own:
            start, end = min(first for _, first, _ in own), max(last for *_, last in own)
            if steps and mark["name"].startswith("ProfilerStep#"):
                steps[-1] = steps[-1]._replace(end=start)
        name = mark["name"] if names[mark["name"]] == 1 else f"{mark['name']} {number}"
        if start < end and (own or not on_gpu):
            steps.append(Step(name, start, end, on_host))
    if found and not steps:
        start, end = min(a.start for a in found), max(a.end for a in found)
        steps = [Step("all", start, end, (-math.inf, math.inf))]
    return steps


def pieces_of(spans: Mapping[str, Iterable[Span]]) -> list[tuple[float, float, set[str]]]:
    """The time, cut wherever another set of kinds begins to run: start, end, kinds."""
    edges = []
    for kind, of_kind in spans.items():
        for start, end in of_kind:
            edges += [(start, 1, kind), (end, -1, kind)]
    pieces: list[tuple[float, float, set[str]]] = []
    running, before = Counter[str](), math.inf
    for time, change, kind in sorted(edges):
        kinds = set(+running)
        if pieces and pieces[-1][2] == kinds:
            pieces[-1] = (pieces[-1][0], time, kinds)
        elif before < time:
            pieces.append((before, time, kinds))
        running[kind] += change
        before = time
    return pieces


def times_of(spans: Mapping[str, list[Span]], steps: list[Step]) -> list[dict[str, float]]:
    """The milliseconds of a step, and of each column of the table: the mean, then each step."""
    pieces = pieces_of(spans)
    ends = [end for _, end, _ in pieces]
    of_steps = []
    for step in steps:
        times = dict.fromkeys(COLUMNS, 0.0)
        times["ms"] = times["idle"] = (step.end - step.start) / 1e3
        for start, end, kinds in pieces[bisect_right(ends, step.start) :]:
            if start >= step.end:
                break
            length = (min(end, step.end) - max(start, step.start)) / 1e3
            names = kinds - {"copies"} or kinds
            if "communication" in kinds:
                names = names | {"both" if "computing" in kinds else "exposed"}
            for name in names:
                times[name] += length
            times["idle"] -= length if kinds else 0
        of_steps.append(times)
    mean = {name: fmean(times[name] for times in of_steps) for name in ("ms", *COLUMNS)}
    return [mean, *of_steps]


def show_shares(traces: Iterable[Trace]) -> None:
    """A table of the ranks, and one of their steps."""
    ranks, steps = list[list[Any]](), list[list[Any]]()
    for trace in traces:
        found = times_of({kind: trace.spans(kind) for kind in COLORS}, trace.steps)
        names = [f"mean of {len(trace.steps)}", *[step.name for step in trace.steps]]
        for name, times in zip(names, found, strict=True):
            shares = [f"{max(0, 100 * times[column] / times['ms']):.1f}" for column in COLUMNS]
            rows = ranks if times is found[0] else steps
            rows.append([trace.rank, name, f"{times['ms']:.3f}", *shares])
    header = ["rank", "step", "ms", *[f"{column} (%)" for column in COLUMNS]]
    for rows in [ranks, steps] if len(steps) > len(ranks) else [steps]:
        put(show_table(header, rows, NUMBERS, "plain") + "\n")


def show_collectives(traces: Mapping[int, Trace]) -> None:
    """A row for each process group of each rank, and the rank that comes last most often."""
    rows, last, matched = [], Counter[int](), Counter[int]()
    groups = [group for trace in traces.values() for group in trace.groups if len(group) > 1]
    of_group = defaultdict[Any, dict[int, list[Call]]](lambda: defaultdict(list))
    for rank, trace in traces.items():
        for step, one in trace.calls():
            of_group[one.group, one.ranks][rank].append((step, one))
    for (group, ranks), of_rank in sorted(of_group.items()):
        is_clear = ranks or all(traces.keys() <= group for group in groups)
        waits = find_waits(of_rank if is_clear else {})
        for rank, calls in of_rank.items():
            trace, steps = traces[rank], len(traces[rank].steps)
            spans = {"communication": [(one.start, one.end) for _, one in calls]}
            mean = times_of(spans | {"computing": trace.spans("computing")}, trace.steps)[0]
            own = waits[rank]
            numbers = (len(calls) / steps, mean["communication"], mean["exposed"], sum(own) / steps)
            cells = [f"{number:.5g}" for number in numbers]
            cells.append(f"{own.count(0)} of {len(own)}" if own else "-")
            rows.append([group or "not named", ranks, rank, *cells])
            last[rank] += own.count(0)
            matched[rank] += len(own)
    header = ["group", "ranks", "rank", "calls a step", "ms", "exposed (ms)", "waits (ms)", "last"]
    if rows:
        put(show_table(header, rows, NUMBERS, "plain") + "\n")
    rank = max(last, key=lambda rank: last[rank], default=0)
    if last[rank]:
        put(f"# rank {rank} comes last most often, to {last[rank]} of {matched[rank]} collectives")


def find_waits(of_rank: Mapping[int, list[Call]]) -> dict[int, list[float]]:
    """The milliseconds that each rank waits in the collectives of a group that could be matched:
    they end together, so the one that is shortest came last. No clock is shared between nodes."""
    lengths = defaultdict[Any, dict[int, list[float]]](lambda: defaultdict(list))
    for rank, calls in of_rank.items():
        for step, one in calls:
            if TOGETHER.search(one.name.lower()):
                lengths[step.name, one.name][rank].append((one.end - one.start) / 1e3)
    waits = defaultdict[int, list[float]](list)
    for of_name in lengths.values():
        counts = {len(of_one) for of_one in of_name.values()}
        if len(of_name) > 1 and len(counts) == 1:
            for together in zip(*of_name.values(), strict=True):
                for rank, length in zip(of_name, together, strict=True):
                    waits[rank].append(length - min(together))
    return waits


def draw(traces: Mapping[int, Trace], path: str) -> None:
    """The step of median length: a row for each thread or stream, a colour for each kind."""
    from matplotlib.figure import Figure  # only here: a table needs none

    steps = next(iter(traces.values())).steps
    number = sorted((step.end - step.start, i) for i, step in enumerate(steps))[len(steps) // 2][1]
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
    axes.set_title(clean(steps[number].name), loc="left")
    for kind, color in COLORS.items():
        for row, place in enumerate(bars):
            axes.broken_barh(bars[place][kind], (row - 0.35, 0.7), facecolors=color)
        axes.plot([], [], color=color, linewidth=6, label=kind)
    axes.set_yticks(range(len(bars)), bars)
    axes.invert_yaxis()
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False)
    figure.savefig(path, dpi=150)


def main() -> int:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("trace", nargs="+", metavar="TRACE", help="a file of each rank of a job, .json or .json.gz")
    add("-o", "--output", metavar="PICTURE", help="draw the median step: .png, .svg or .pdf")
    steps = "the ranges that are steps (default: ProfilerStep#N, step, or else the whole trace)"
    add("--step", metavar="NAME", help=steps)
    args = parser.parse_args()
    traces: dict[int, Trace] = {}
    for number, path in enumerate(args.trace):
        try:
            trace = read(path, number, args.step)
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
    try:
        if args.output:
            check_output(args.output, (".png", ".svg", ".pdf"), args.trace)
            draw(traces, args.output)
    except (OSError, ValueError) as error:
        parser.error(cli.describe(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
