"""Kineto traces, as torch.profiler writes them: what runs when, the steps, and the collectives.

A trace is read event by event, so that memory holds its text and what is kept of it, and no tree
of all events. Times are in microseconds, as in the file.
"""

import gzip
import json
import math
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from analysis.collective import (
    Collective,
    collective_of_gloo,
    collective_of_kernel,
    is_communication,
)
from analysis.show import clean, is_number
from common.cli import cut

COPIES = ("gpu_memcpy", "gpu_memset")
ON_GPU = ("kernel", *COPIES)
# What the profiler records of the host. Everything else is an event of another accelerator.
ON_HOST = {
    "cpu_op",
    "user_annotation",
    "python_function",
    "cpu_instant_event",
    "overhead",
    "external_correlation",
    "Trace",
    "fwdbwd",
    "async_cpu_to_gpu",
    "ac2g",
}
OF_CUDA = {
    "cuda_runtime",
    "cuda_driver",
    "cuda_sync",
    "cuda_event",
    "cuda_profiler_range",
    "gpu_user_annotation",
}
# On the CPU: PyTorch's operators, and what torch.compile has made of them.
OPERATORS = ("aten::", "mkldnn::", "Torch-Compiled Region", "## Call CompiledFxGraph")
RANGES = ("user_annotation", "cpu_op")  # categories of ranges that record_function marks
OVERRUN_US = 1e3  # beyond the next event of its stream an event is cut, if it is also
OVERRUN = 10  # times as long as that kernel's median; longest seen in healthy traces: 3.7 us
WHITESPACE = re.compile(r"[ \t\n\r]*")
TICK = 2000  # events between two updates of the progress bar

Event = Mapping[str, Any]
Span = tuple[float, float]  # start and end, in microseconds


class Activity(NamedTuple):
    """What runs from start to end, in microseconds."""

    start: float
    end: float
    kind: str  # computing or communication
    place: str  # the thread of the CPU or the stream of the GPU
    launched: float  # when the host launched it
    name: str = ""
    collective: Collective | None = None


class Step(NamedTuple):
    name: str
    start: float
    end: float
    calls: list[Activity]  # the communication that the host launched in it, in order


class Trace(NamedTuple):
    """A trace of one rank."""

    path: str
    rank: int | None  # None if neither the trace nor the file's name says it
    on_gpu: bool
    activities: list[Activity]
    steps: list[Step]
    groups: list[tuple[int, ...]]  # the ranks of the job's process groups; () for all ranks
    host: str = ""
    remarks: Sequence[str] = ()  # lines about events that cannot be

    def spans(self, kind: str) -> list[Span]:
        return [(one.start, one.end) for one in self.activities if one.kind == kind]


class NoTrace(ValueError):
    """JSON, but no trace: a folder of traces may hold other files."""


def read(path: str, tick: Callable[[float], None] = lambda share: None) -> Trace:
    """The trace in a file, .json or .json.gz.

    tick: called now and then with the share of the file that has been read. Raises an error of any
    kind if the file is no trace of one rank.
    """
    if Path(path).suffix in (".pftrace", ".perfetto-trace"):
        raise ValueError("a Perfetto trace; export .json instead")
    data = Path(path).read_bytes()
    if data.startswith(b"\x1f\x8b"):
        data = gzip.decompress(data)
    # Kineto copies names as they are: they may hold control characters and half a letter
    text = data.decode(errors="replace")
    del data
    events = Events()
    about = parse(text, events.add, tick)
    del text
    return events.trace(path, about)


def parse(
    text: str, each: Callable[[Event], None], tick: Callable[[float], None]
) -> dict[str, Any]:
    """Call `each` with each complete event of a trace. Returns the other entries of the file.

    Raises ValueError if it is not JSON, NoTrace if it has no events.
    """
    decode = json.JSONDecoder(strict=False).raw_decode

    def skip(at: int) -> int:
        return WHITESPACE.match(text, at).end()  # type: ignore[union-attr]

    def expect(letters: str, at: int) -> str:
        if text[at : at + 1] not in letters or at >= len(text):
            raise json.JSONDecodeError(f"Expecting {' or '.join(letters)}", text, at)
        return text[at]

    def event_by_event(at: int) -> int:
        """From the `[` of a list of events to behind its `]`."""
        at = skip(at + 1)
        if text[at : at + 1] == "]":
            return at + 1
        number = 0
        while True:
            event, at = decode(text, at)
            if event["ph"] == "X":
                each(event)
            number += 1
            if number % TICK == 0:
                tick(at / len(text))
            at = skip(at)
            if expect(",]", at) == "]":
                return at + 1
            at = skip(at + 1)

    at = skip(0)
    if text[at : at + 1] != "{":
        decode(text, at)
        raise NoTrace("JSON without traceEvents")
    entries: dict[str, Any] = {}
    at = skip(at + 1)
    while expect('"}', at) != "}":
        name, at = decode(text, at)
        at = skip(at)
        expect(":", at)
        at = skip(at + 1)
        if name == "traceEvents" and text[at : at + 1] == "[":
            entries[name], at = [], event_by_event(at)
        else:
            entries[name], at = decode(text, at)
        at = skip(at)
        if expect(",}", at) == ",":
            at = skip(at + 1)
            expect('"', at)
    if skip(at + 1) != len(text):
        raise json.JSONDecodeError("Extra data", text, at + 1)
    if not isinstance(entries.get("traceEvents"), list):
        raise NoTrace("JSON without traceEvents")
    return entries


class Kernel(NamedTuple):
    """An event of the GPU, until it is known when the host launched it."""

    start: float
    end: float
    kind: str
    stream: str
    name: str
    correlation: Any
    in_graph: bool  # kernels of a CUDA graph overlap: branches, programmatic dependent launch
    collective: Collective | None


class Events:
    """What counts among the events of a trace."""

    def __init__(self) -> None:
        self.categories = set[str]()
        self.kernels: list[Kernel] = []
        self.gloo: list[Activity] = []
        self.launches: dict[Any, float] = {}  # time of the host's call, by its correlation
        self.operators = defaultdict[str, list[Span]](list)  # by thread
        self.calls = defaultdict[str, list[Span]](list)  # of collectives, by thread
        self.steps: list[tuple[float, float, str]] = []
        self.devices, self.processes = set[tuple[Any, Any]](), set[Any]()
        self.impossible: list[tuple[str, Any]] = []  # names of events, and their durations
        self.names: dict[str, str] = {}  # each name once
        self.of_nccl = False

    def add(self, event: Event) -> None:
        category, name = str(event["cat"]), str(event["name"])
        self.categories.add(category)
        args = event.get("args") or {}
        if category in ON_GPU:
            device = args.get("device", event.get("pid"))
            self.devices.add((event.get("pid"), device))
            if span := self.span_of(event, name):
                self.add_kernel(category, name, span, event, args)
            return
        if category in ("cpu_op", "cuda_runtime"):
            self.processes.add(event.get("pid"))
        if category.startswith(("cuda_", "xpu_", "hip_")):
            if "correlation" in args:
                self.launches[args["correlation"]] = event["ts"]
        elif category in RANGES:
            self.of_nccl = self.of_nccl or name.startswith("nccl:")
            kind = kind_of_range(name, category)
            if kind and (span := self.span_of(event, name)):
                self.add_range(kind, name, span, event, args)

    def span_of(self, event: Event, name: str) -> Span | None:
        """From start to end; None if that cannot be, which a line then says."""
        start, length = event.get("ts"), event.get("dur")
        if is_number(start) and is_number(length) and length >= 0:
            return start, start + length
        self.impossible.append((name, length if is_number(start) else start))
        return None

    def add_kernel(
        self, category: str, name: str, span: Span, event: Event, args: Mapping[str, Any]
    ) -> None:
        collective = None
        if category == "kernel":
            communicates = "Collective name" in args or is_communication(name)
            kind = "communication" if communicates else "computing"
            collective = collective_of_kernel(name, args) if communicates else None
        else:
            kind = "communication" if category == "gpu_memcpy" and "PtoP" in name else "copy"
            collective = Collective("copy between GPUs") if kind == "communication" else None
        stream = self.once(f"stream {event['tid']}")
        launch, in_graph = args.get("correlation"), bool(args.get("graph node id"))
        kernel = Kernel(*span, kind, stream, self.once(name), launch, in_graph, collective)
        self.kernels.append(kernel)

    def add_range(
        self, kind: str, name: str, span: Span, event: Event, args: Mapping[str, Any]
    ) -> None:
        thread = self.once(f"thread {event['tid']}")
        if kind == "step":
            self.steps.append((*span, name))
        elif kind == "operator":
            self.operators[thread].append(span)
        else:
            self.calls[thread].append(span)
        if kind == "communication":
            collective = collective_of_gloo(name, args)
            self.gloo.append(Activity(*span, kind, thread, span[0], self.once(name), collective))

    def once(self, text: str) -> str:
        return self.names.setdefault(text, text)

    def trace(self, path: str, about: Mapping[str, Any]) -> Trace:
        """What the events tell. Raises ValueError if they are not those of one rank, or if nothing
        counts among them."""
        self.check()
        kernels, remarks = cut_impossible(self.kernels)
        if self.impossible:
            durations = ", ".join(str(length) for _, length in self.impossible[:3])
            name = clean(self.impossible[0][0], 60)
            count = len(self.impossible)
            what = f"left out {count} event{'s' * (count > 1)} without a possible duration"
            remarks.append(f"{what} ({durations}): {name}")
        activities = self.gloo
        for one in kernels:
            if one.kind != "copy":
                launched = self.launches.get(one.correlation, one.start)
                span = (one.start, one.end, one.kind, one.stream, launched)
                activities.append(Activity(*span, one.name, one.collective))
        on_gpu = any(one.place.startswith("stream") for one in activities)
        if not on_gpu:
            # An operator that calls a collective or waits for one does not compute meanwhile, and
            # an operator within a collective is part of it.
            for place, spans in self.operators.items():
                for start, end in union(spans, self.calls[place]):
                    activities.append(Activity(start, end, "computing", place, start))
        steps = find_steps(self.steps, activities, on_gpu)
        if not steps:
            there = f", but {', '.join(sorted(self.categories))}" if self.categories else ""
            raise ValueError(f"no kernels and no operators{clean(there)}")
        job = about.get("distributedInfo") or {}
        groups = [tuple(group.get("ranks") or ()) for group in job.get("pg_config") or ()]
        host = str(about.get("host_name") or "")
        return Trace(path, rank_of(path, job), on_gpu, activities, steps, groups, host, remarks)

    def check(self) -> None:
        """Raises ValueError if these are the events of several ranks, or of a device that this
        cannot read."""
        if len(self.devices) > 1 or len(self.processes) > 1:
            pids = sorted(str(pid) for pid in self.processes)
            what = f"kernels of {len(self.devices)} devices"
            if len(self.processes) > 1:
                what = f"events of {len(pids)} processes ({', '.join(pids[:4])})"
            raise ValueError(
                f"{what} in one file: give a file for each rank instead of a merged one"
            )
        if self.categories & {*ON_GPU}:
            return
        if self.categories & {"cuda_runtime", "cuda_driver"} or self.of_nccl:
            raise ValueError("a GPU's without kernels: profile ProfilerActivity.CUDA, too")
        if others := sorted(self.categories - ON_HOST - OF_CUDA):
            known = "only kernels of CUDA, ROCm and XPU and operators of the CPU can be read"
            raise ValueError(f"events of another kind ({clean(', '.join(others))}): {known}")


def rank_of(path: str, job: Mapping[str, Any]) -> int | None:
    """The rank that the trace, or else its file's name, says."""
    if "rank" in job:
        return int(job["rank"])
    in_name = re.search(r"rank[-_]?(\d+)", Path(path).name)
    return int(in_name[1]) if in_name else None


def kind_of_range(name: str, category: str) -> str:
    """What a range of the host is: communication, an operator, a call of a collective, a step."""
    if name.startswith("gloo:"):
        return "communication"
    if name == "step" or name.startswith("ProfilerStep#"):
        return "step"
    if category != "cpu_op":
        return ""
    if name.startswith(OPERATORS):
        return "operator"
    return "call" if "c10d" in name else ""


def cut_impossible(kernels: Sequence[Kernel]) -> tuple[list[Kernel], list[str]]:
    """The events of the GPU, and a line about those that were changed.

    A stream runs one kernel after the other, so an event that runs far past the start of the next
    one is damaged. It ends there, or after that kernel's median if even that is implausibly long.
    Without other calls of that kernel nothing is known of its duration, and it is left out. In a
    CUDA graph events overlap, and are left alone.
    """
    streams = defaultdict[str, list[int]](list)
    for number in sorted(range(len(kernels)), key=lambda number: kernels[number].start):
        if not kernels[number].in_graph:
            streams[kernels[number].stream].append(number)
    ends = [one.end for one in kernels]  # the latest that is possible
    for numbers in streams.values():
        for number, following in pairwise(numbers):
            ends[number] = min(ends[number], kernels[following].start)
    lengths = defaultdict[str, list[float]](list)
    for one, end in zip(kernels, ends, strict=True):
        lengths[one.name].append(end - one.start)
    typical = {name: median(of_name) for name, of_name in lengths.items()}
    result, damaged = list[Kernel](), list[Kernel]()
    for one, end in zip(kernels, ends, strict=True):
        usual = typical[one.name]
        if one.end - end <= max(OVERRUN_US, OVERRUN * usual):
            result.append(one)
            continue
        damaged.append(one)
        if len(lengths[one.name]) > 1:
            end = end if end - one.start <= OVERRUN * usual else one.start + usual
            result.append(one._replace(end=end))
    if not damaged:
        return result, []
    longest = max(one.end - one.start for one in damaged) / 1e3
    names = cut([clean(one.name, 60) for one in damaged], 3)
    count = "1 event runs" if len(damaged) == 1 else f"{len(damaged)} events run"
    what = f"{count} past the next one on the same stream, for up to {longest:.4g} ms"
    return result, [f"{what}: cut: {names}"]


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


class Cover:
    """How much of a time disjoint spans, in order, cover. Bisects: a trace has many steps."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = spans
        self.starts = [start for start, _ in spans]
        self.before = [0.0, *accumulate(end - start for start, end in spans)]

    def until(self, time: float) -> float:
        """Microseconds that the spans cover before a time."""
        number = bisect_right(self.starts, time)
        if not number:
            return 0.0
        start, end = self.spans[number - 1]
        return self.before[number - 1] + min(time, end) - start

    def within(self, start: float, end: float) -> float:
        return self.until(end) - self.until(start)

    def cut(self, start: float, end: float) -> Iterator[Span]:
        """The parts of the spans from start to end."""
        for number in range(max(0, bisect_right(self.starts, start) - 1), len(self.spans)):
            begin, stop = self.spans[number]
            if begin >= end:
                return
            if stop > start:
                yield max(begin, start), min(stop, end)


def find_steps(
    ranges: Sequence[tuple[float, float, str]], activities: Sequence[Activity], on_gpu: bool
) -> list[Step]:
    """The profiler's steps, or the ranges `step`; or else the whole trace.

    On a GPU a step lasts from the start of the first kernel that the host launched in it to the
    end of the last one. A step of the profiler lasts until the next one starts.
    """
    spans = sorted(ranges)
    marks = [span for span in spans if span[2] != "step"]
    follow_each_other = bool(marks)
    if not marks:
        marks = [(start, end, f"step {number}") for number, (start, end, _) in enumerate(spans)]
    ordered = sorted(activities, key=lambda one: one.launched)
    launched = [one.launched for one in ordered]
    steps: list[Step] = []
    for start, end, name in marks or [(-math.inf, math.inf, "all")]:
        own = ordered[bisect_left(launched, start) : bisect_left(launched, end)]
        if on_gpu or not marks:
            if not own:
                continue
            start, end = min(one.start for one in own), max(one.end for one in own)
            if steps and follow_each_other:
                steps[-1] = steps[-1]._replace(end=start)
        if start < end:
            calls = [one for one in own if one.kind == "communication"]
            steps.append(Step(name, start, end, sorted(calls, key=lambda one: one.start)))
    return steps
