"""Read Kineto traces, as written by torch.profiler: activities, steps and collectives.

To save memory, a trace is parsed event by event: only its text and the selected events are kept,
never a tree of all events. Times are in microseconds, as in the file.
"""

import json
import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from analysis.show import clean
from analysis.traces.collective import (
    Collective,
    collective_of_gloo,
    collective_of_kernel,
    is_annotation,
    is_communication,
)
from harness.cli import cut
from readers import files
from readers.traces import (
    LAUNCHES,
    MARK,
    NEAR_US,
    OPERATORS,
    RANGES,
    Range,
    as_number,
    events_of,
    find_steps,
    is_step,
    rank_in_name,
)

COPIES = ("gpu_memcpy", "gpu_memset")
ON_GPU = ("kernel", *COPIES)
# Categories of events on the host. All other categories belong to other accelerators.
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
OVERRUN_US = 1e3  # an event is cut if it runs past the next one on its stream by more than this
OVERRUN = 10  # and by more than this times the median of its kernel; in healthy traces: 3.7 us
TICK = 2000  # events between two updates of the progress bar

Event = Mapping[str, Any]
Span = tuple[float, float]  # start and end, in microseconds


class Activity(NamedTuple):
    """A computation or communication from start to end, in microseconds."""

    start: float
    end: float
    kind: str  # computing or communication
    place: str  # the CPU thread or the GPU stream
    launched: float  # time at which the host launched it
    name: str = ""
    collective: Collective | None = None


class Step(NamedTuple):
    """A training step. Times are in microseconds."""

    name: str
    start: float
    end: float
    calls: list[Activity]  # the communication that the host launched in this step, in order


class Trace(NamedTuple):
    """A trace of one rank."""

    path: str
    rank: int | None  # None if neither the trace nor the file name contains it, until `by_rank`
    on_gpu: bool
    activities: list[Activity]
    steps: list[Step]
    groups: list[tuple[int, ...]]  # ranks of the process groups of the job; () for all ranks
    host: str = ""
    remarks: Sequence[str] = ()  # about events and steps that were left out
    numbered: bool = False  # whether the rank is only the position of the file

    @property
    def label(self) -> str:
        """The rank and its host, or the file if nothing contains its rank."""
        if self.numbered:
            return f"the rank of {clean('/'.join(Path(self.path).parts[-2:]), 100)}"
        return f"rank {self.rank} on {clean(self.host, 60)}" if self.host else f"rank {self.rank}"

    def spans(self, kind: str) -> list[Span]:
        return [(one.start, one.end) for one in self.activities if one.kind == kind]


class NotATrace(ValueError):
    """The file is JSON, but not a trace. A folder of traces may contain such files."""


def read(path: str, tick: Callable[[float], None] = lambda share: None) -> Trace:
    """The trace in a .json or .json.gz file.

    tick: called regularly with the fraction of the file that has been read. Raises various
    exceptions if the file is not the trace of a single rank.
    """
    if Path(path).suffix in (".pftrace", ".perfetto-trace"):
        raise ValueError("a Perfetto trace; export .json instead")
    data = files.read(path)
    # Kineto does not escape names: they may contain control characters and truncated UTF-8
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

    Raises ValueError if the text is not JSON, NotATrace if it has no list of events, and TypeError
    if an entry of the list is not an event.
    """
    count, number = text.count('"ph"'), 0

    def drop_event(entry: dict[str, Any]) -> dict[str, Any] | None:
        """Called by the decoder with each object, so that no tree of all events is built."""
        nonlocal number
        if "ph" not in entry:
            return entry
        if entry["ph"] == "X":
            each(entry)
        number += 1
        if number % TICK == 0:
            tick(number / count)
        return None

    document = json.JSONDecoder(strict=False, object_hook=drop_event).decode(text)
    events = events_of(document)
    others = [event for event in events or () if event is not None]
    if events is None or (others and events is document):
        raise NotATrace("JSON without traceEvents")
    if others:
        raise TypeError("traceEvents has an entry without ph")
    return (document if isinstance(document, dict) else {}) | {"traceEvents": []}


class Kernel(NamedTuple):
    """An event of the GPU that is not yet matched with its launch on the host."""

    start: float
    end: float
    kind: str
    stream: str
    name: str
    correlation: Any
    in_graph: bool  # kernels of a CUDA graph may overlap: branches, programmatic dependent launch
    collective: Collective | None


class Events:
    """The events of a trace from which its activities and steps are computed."""

    def __init__(self) -> None:
        self.categories = set[str]()
        self.kernels: list[Kernel] = []
        self.annotated: list[Kernel] = []  # ranges of collectives on the GPU
        self.on_host: list[Kernel] = []  # the same on the host, by thread
        self.gloo: list[Activity] = []
        # correlation id -> time of the call on the host, and its thread
        self.launches: dict[Any, tuple[float, str]] = {}
        self.operators = defaultdict[str, list[Span]](list)  # by thread
        self.calls = defaultdict[str, list[Span]](list)  # calls of collectives, by thread
        self.steps: list[Range] = []
        self.devices, self.processes = set[tuple[Any, Any]](), set[Any]()
        self.impossible: list[tuple[str, Any]] = []  # (name, duration) of impossible events
        self.names: dict[str, str] = {}  # one copy of each name, to save memory
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
        if category == "gpu_user_annotation" and is_annotation(name):
            if span := self.span_of(event, name):
                self.add_kernel(category, name, span, event, args)
            return
        if category in ("cpu_op", "cuda_runtime"):
            self.processes.add(event.get("pid"))
        if category.startswith(LAUNCHES):
            launched = as_number(event.get("ts"))
            if "correlation" in args and launched is not None:
                thread = self.intern(f"thread {event.get('tid')}")
                self.launches[args["correlation"]] = launched, thread
        elif category in RANGES:
            self.of_nccl = self.of_nccl or name.startswith("nccl:")
            if is_annotation(name) and (span := self.span_of(event, name)):
                self.add_kernel(category, name, span, event, args)
                return
            kind = kind_of_range(name, category)
            if kind and (span := self.span_of(event, name)):
                self.add_range(kind, name, span, event, args)

    def span_of(self, event: Event, name: str) -> Span | None:
        """Start and end of an event; None if they are impossible, which a remark will report."""
        start, length = as_number(event.get("ts")), as_number(event.get("dur"))
        if start is not None and length is not None and length >= 0:
            return start, start + length
        self.impossible.append((name, event.get("ts" if start is None else "dur")))
        return None

    def add_kernel(
        self, category: str, name: str, span: Span, event: Event, args: Mapping[str, Any]
    ) -> None:
        collective = None
        if category == "gpu_memcpy" and "PtoP" in name:
            kind, collective = "communication", Collective("copy between GPUs")
        elif category in COPIES:
            kind = "copy"
        elif category == "kernel" and "Collective name" not in args and not is_communication(name):
            kind = "computing"
        else:
            kind, collective = "communication", collective_of_kernel(name, args)
        place = "thread" if category in RANGES else "stream"
        stream = self.intern(f"{place} {event['tid']}")
        launch, in_graph = args.get("correlation"), bool(args.get("graph node id"))
        kernel = Kernel(*span, kind, stream, self.intern(name), launch, in_graph, collective)
        if category in RANGES:
            self.on_host.append(kernel)
        else:
            on_gpu = category == "gpu_user_annotation"
            (self.annotated if on_gpu else self.kernels).append(kernel)

    def add_range(
        self, kind: str, name: str, span: Span, event: Event, args: Mapping[str, Any]
    ) -> None:
        thread = self.intern(f"thread {event['tid']}")
        if kind == "step":
            self.steps.append(Range(*span, name, thread))
        elif kind == "operator":
            self.operators[thread].append(span)
        else:
            self.calls[thread].append(span)
        if kind == "communication":
            collective = collective_of_gloo(name, args)
            self.gloo.append(Activity(*span, kind, thread, span[0], self.intern(name), collective))

    def intern(self, text: str) -> str:
        return self.names.setdefault(text, text)

    def trace(self, path: str, about: Mapping[str, Any]) -> Trace:
        """The trace made of these events.

        Raises ValueError if they belong to several ranks, or if there is neither a kernel nor an
        operator among them.
        """
        self.check()
        remarks = self.leave_out_copies()
        kernels, damaged = cut_overruns(self.kernels)
        remarks += damaged
        if self.impossible:
            durations = ", ".join(str(length) for _, length in self.impossible[:3])
            name = clean(self.impossible[0][0], 60)
            count = len(self.impossible)
            what = f"left out {count} event{'s' * (count > 1)} with an impossible duration"
            remarks.append(f"{what} ({durations}): {name}")
        activities = self.gloo
        if self.annotated:
            kernels = by_copy_engine(kernels, self.annotated, self.on_stream)
        else:
            kernels = by_copy_engine(kernels, self.on_host, self.at_launch)
        for one in kernels:
            if one.kind != "copy":
                launched, _ = self.launches.get(one.correlation, (one.start, ""))
                span = (one.start, one.end, one.kind, one.stream, launched)
                activities.append(Activity(*span, one.name, one.collective))
        on_gpu = any(one.place.startswith("stream") for one in activities)
        work = [one.launched for one in activities]
        if not on_gpu:
            # An operator does not compute while it calls a collective or waits for one, and an
            # operator within a collective is part of the collective.
            for place, spans in self.operators.items():
                work += [start for start, _ in spans]
                for start, end in union(spans, self.calls[place]):
                    activities.append(Activity(start, end, "computing", place, start))
        marks, lost = find_steps(self.steps, sorted(work))
        steps = steps_of(marks, lost, activities, on_gpu)
        if not steps:
            there = f", but {', '.join(sorted(self.categories))}" if self.categories else ""
            raise ValueError(f"no kernels and no operators{clean(there)}")
        if lost:
            what = "kernels" if on_gpu else "operators"
            name = clean(lost.name, 60)
            remarks.append(f"left out the last step, {name}: the trace has lost its {what}")
        job = about.get("distributedInfo") or {}
        groups = [tuple(group.get("ranks") or ()) for group in job.get("pg_config") or ()]
        host = str(about.get("host_name") or "")
        rank = int(job["rank"]) if "rank" in job else rank_in_name(path)
        return Trace(path, rank, on_gpu, activities, steps, groups, host, remarks)

    def on_stream(self, one: Kernel) -> tuple[str, float, float]:
        """The stream of a kernel, its start and end."""
        return one.stream, one.start, one.end

    def at_launch(self, one: Kernel) -> tuple[str, float, float]:
        """The thread that launched a kernel, and the time of the launch, twice."""
        launched, thread = self.launches.get(one.correlation, (one.start, ""))
        return thread, launched, launched

    def leave_out_copies(self) -> list[str]:
        """Leave out kernels and calls that are in the file twice. Returns a remark on them."""
        before = len(self.kernels) + len(self.gloo)
        same_kernel = {(one.start, one.end, one.stream, one.name): one for one in self.kernels}
        same_call = {(one.start, one.end, one.place, one.name): one for one in self.gloo}
        self.kernels, self.gloo = list(same_kernel.values()), list(same_call.values())
        count = before - len(self.kernels) - len(self.gloo)
        events = "1 event" if count == 1 else f"{count:,} events"
        return [f"left out {events} that the file contains twice"] if count else []

    def check(self) -> None:
        """Raise ValueError for events of several ranks, or of an unsupported device."""
        if len(self.devices) > 1 or len(self.processes) > 1:
            pids = sorted(str(pid) for pid in self.processes)
            what = f"kernels of {len(self.devices)} devices"
            if len(self.processes) > 1:
                what = f"events of {len(pids)} processes ({', '.join(pids[:4])})"
            raise ValueError(f"{what} in one file; expected a separate file for each rank")
        if self.categories & {*ON_GPU}:
            return
        if self.categories & {"cuda_runtime", "cuda_driver"} or self.of_nccl:
            raise ValueError("a trace of a GPU without kernels: add ProfilerActivity.CUDA")
        if others := sorted(self.categories - ON_HOST - OF_CUDA):
            known = "kernels of CUDA, ROCm and XPU and operators of the CPU are supported"
            raise ValueError(f"unsupported events ({clean(', '.join(others))}); only {known}")


def kind_of_range(name: str, category: str) -> str:
    """The kind of a range on the host: communication, operator, call of a collective, or step."""
    if name.startswith("gloo:"):
        return "communication"
    if is_step(name, category):
        return "step"
    if category != "cpu_op":
        return ""
    if name.startswith(OPERATORS):
        return "operator"
    return "call" if "c10d" in name else ""


def by_copy_engine(
    kernels: Sequence[Kernel],
    annotated: Sequence[Kernel],
    place_of: Callable[[Kernel], tuple[str, float, float]],
) -> list[Kernel]:
    """Count copies as communication if they lie within a collective's range, as the copy engine
    performs some collectives: those of symmetric memory, NCCL without SMs, SDMA.

    All copies in a range without a kernel become one call, from the first start to the last end.
    annotated: the ranges, on streams or on threads of the host. place_of: the stream or thread of a
    kernel, and the times that must lie within a range of it.
    """
    ranges = defaultdict[str, list[Kernel]](list)
    for one in sorted(annotated, key=lambda one: (one.start, -one.end)):
        if not ranges[one.stream] or one.end > ranges[one.stream][-1].end:
            ranges[one.stream].append(one)
    starts = {stream: [one.start for one in of] for stream, of in ranges.items()}
    inside = defaultdict[tuple[str, int], list[Kernel]](list)
    others = list[Kernel]()
    for one in kernels:
        place, start, end = place_of(one)
        number = bisect_right(starts.get(place, ()), start + NEAR_US) - 1
        if number >= 0 and end <= ranges[place][number].end + NEAR_US:
            inside[place, number].append(one)
        else:
            others.append(one)
    for (place, number), of in inside.items():
        copies = [one for one in of if one.kind == "copy"]
        others += [one for one in of if one.kind != "copy"]
        if len(copies) == len(of):
            first, end = min(copies, key=lambda one: one.start), max(one.end for one in copies)
            called = ranges[place][number].collective
            others.append(first._replace(end=end, kind="communication", collective=called))
        else:
            others += [one._replace(kind="communication") for one in copies]
    return others


def cut_overruns(kernels: Sequence[Kernel]) -> tuple[list[Kernel], list[str]]:
    """Correct the impossible events of the GPU. Returns the events, and a remark on those that were
    changed.

    A stream runs one kernel after the other, so an event that runs far past the start of the next
    one is damaged. It is cut there, or after the median duration of its kernel if it is still
    implausibly long. It is left out if the trace contains no other call of the kernel, because then
    its duration is unknown. Events of CUDA graphs may overlap, and are left unchanged.
    """
    streams = defaultdict[str, list[int]](list)
    for number in sorted(range(len(kernels)), key=lambda number: kernels[number].start):
        if not kernels[number].in_graph:
            streams[kernels[number].stream].append(number)
    ends = [one.end for one in kernels]  # the latest possible end of each event
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
    what = f"{count} past the next one on the same stream, by up to {longest:.4g} ms"
    return result, [f"{what}; cut: {names}"]


def union(spans: Iterable[Span], without: Iterable[Span] = ()) -> list[Span]:
    """The spans in which at least one of `spans` and none of `without` runs: sorted, disjoint."""
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
    """How much of a time range is covered by sorted disjoint spans, by bisection."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = spans
        self.starts = [start for start, _ in spans]
        self.before = [0.0, *accumulate(end - start for start, end in spans)]

    def until(self, time: float) -> float:
        """Microseconds covered before a time."""
        number = bisect_right(self.starts, time)
        if not number:
            return 0.0
        start, end = self.spans[number - 1]
        return self.before[number - 1] + min(time, end) - start

    def within(self, start: float, end: float) -> float:
        return self.until(end) - self.until(start)

    def cut(self, start: float, end: float) -> Iterator[Span]:
        """The parts of the spans that lie between start and end."""
        for number in range(max(0, bisect_right(self.starts, start) - 1), len(self.spans)):
            begin, stop = self.spans[number]
            if begin >= end:
                return
            if stop > start:
                yield max(begin, start), min(stop, end)


def steps_of(
    marks: Sequence[Range], lost: Range | None, activities: Sequence[Activity], on_gpu: bool
) -> list[Step]:
    """The steps, or the whole trace as one step if it does not mark any.

    On a GPU, a step lasts from the first start to the last end of the kernels that the host
    launched in it. A step of the profiler lasts until the next one starts. lost: an incomplete
    last step, which is left out, but ends the previous one.
    """
    ordered = sorted(activities, key=lambda one: one.launched)
    launched = [one.launched for one in ordered]
    steps: list[Step] = []
    whole = Range(-math.inf, math.inf, "all", "")
    position = 0  # in the trace
    before = None
    for mark in [*marks, *([lost] if lost else [])] or [whole]:
        own = ordered[bisect_left(launched, mark.start) : bisect_left(launched, mark.end)]
        start, end, name = mark.start, mark.end, mark.name
        if not name.startswith(MARK) and mark is not whole:
            name = f"step {position}"
        position += 1
        if on_gpu or mark is whole:
            if not own:
                continue
            start, end = min(one.start for one in own), max(one.end for one in own)
            if before and follows(mark.name, before.name):
                steps[-1] = steps[-1]._replace(end=start)
        if start < end:
            before = mark
            calls = [one for one in own if one.kind == "communication"]
            steps.append(Step(name, start, end, sorted(calls, key=lambda one: one.start)))
    return steps[:-1] if lost and before is lost else steps


def follows(name: str, before: str) -> bool:
    """Whether a step of the profiler directly follows another one, so that none is missing."""
    numbers = [one.removeprefix(MARK) for one in (before, name) if one.startswith(MARK)]
    if len(numbers) < 2 or not all(one.isdecimal() for one in numbers):
        return len(numbers) == 2
    return int(numbers[1]) == int(numbers[0]) + 1
