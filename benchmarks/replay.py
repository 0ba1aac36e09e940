#!/usr/bin/env python3
"""Is the network slow, or the job? Replays the collectives of a recorded job, without the job.

    back to back = each operation starts as soon as the previous one of its group has finished
    with gaps    = no operation starts earlier than in the job; busy waits replace the computation
    replayed     = time of an operation in a replay back to back, from its start until its end is
                   observed; over NCCL, between two CUDA events. It is the mean over the calls on
                   the slowest rank, and then the median over the replays
    job          = the same mean in the job, in which ranks may also wait for late ranks
    waits        = the part of it in which that rank waits: its calls minus the shortest of any rank
    alone        = time of the same operation with nothing else in flight
    busbw        = bytes / time * factor, as in collectives.py
    share        = calls * replayed, divided by its sum over all rows

The folder must contain one recording per rank: a Kineto trace of torch.profiler
(rank0_trace.json, possibly compressed), a dump of torch's flight recorder (nccl_trace_rank_0: a
pickle or JSON), or the output of record() in examples/record_collectives.py (fr_0.json). No code
in a recording is executed.

    torchrun --nproc-per-node 4 benchmarks/replay.py trace/
    torchrun --nproc-per-node 8 benchmarks/replay.py trace/ --only dp --json report.jsonl

docs/replay.md explains how to record a job and how to read the table. Written for this project,
BSD-3-Clause.
"""

import argparse
import hashlib
import json
import math
import re
import shlex
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import methodcaller
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import cli, exits

exits.report_missing_packages()

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from benchmarks.workloads import operations
from benchmarks.workloads.operations import Member, Operation
from benchmarks.workloads.percentiles import percentiles
from benchmarks.workloads.room import check_room
from common.groups import Group, Job, barrier_before_new_group, connect, silenced
from common.stats import Estimate, Times, drop_wide_interval, median, show_seconds
from common.table import Columns, ends, metric, relative
from common.timing import Step, Workload
from harness.benchmark import Benchmark, Key, Planned
from harness.environment import count_of
from harness.report import Case
from readers import files
from readers.traces import (
    LAUNCHES,
    OPERATORS,
    Range,
    as_number,
    events_of,
    find_steps,
    is_step,
    rank_in_name,
)

UNEVEN = "parts differ in size, and only the sum is recorded"
LATE = 0.05  # share of the job's step: longer waits for late ranks are named
NO_ENTRIES = "a dump without operations; each backend has its own recorder"
MARKERS = ("coalesced", "wait", "init")  # entries that do not transfer data
# Names of types in recordings -> torch's. In a profile, gloo's operations have the names of C++
DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16"}
DTYPES |= {"Long": "int64", "Int": "int32", "Char": "int8", "Byte": "uint8", "Bool": "uint8"}
DTYPES |= {"Float8_e4m3fn": "uint8", "Float8_e5m2": "uint8"}
CPP_DTYPES = {"float": "Float", "double": "Double", "c10::Half": "Half", "long int": "Long"}
CPP_DTYPES |= {"c10::BFloat16": "BFloat16", "int": "Int", "signed char": "Char", "bool": "Bool"}
CPP_DTYPES |= {"unsigned char": "Byte"}
# gather, scatter and sends are counted, but not replayed
REPLAYED = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce")
OPERATIONS = {name: operations.OPERATIONS[name] for name in REPLAYED}
# In these, no rank can finish before the last rank has started
SYNCHRONIZING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
OPERATIONS["barrier"] = Operation(
    call=lambda src, dst, at, **more: dist.barrier(at.group, **more),
    expected=lambda at: [],
    bus=lambda n: 0,
)


def parse_args() -> argparse.Namespace:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    folder = cli.checked(str, bool, "a folder of recordings", "e.g. trace/")
    add("trace", type=folder, metavar="FOLDER", help="folder with one recording per rank")
    add(
        "--only",
        type=cli.list_of(str),
        default=[],
        metavar="GROUP",
        help="replay only these groups, e.g. dp for mesh_dp (default: all)",
    )
    add(
        "--no-gaps",
        action="store_true",
        help="replay back to back only, e.g. if the recording covers minutes",
    )
    cli.add_common_flags(parser, min_iters=12, max_seconds=10)
    return parser.parse_args()


# -- kinds and collectives -------------------------------------------------------------------------


class Kind(NamedTuple):
    """Operations that share a row of the table. size_bytes: bytes that a rank sends or receives,
    whichever is larger."""

    op: str
    group: str
    group_ranks: int
    dtype: str
    size_bytes: int

    def __str__(self) -> str:
        group = f"{self.op} {self.group}, {count_of(self.group_ranks, 'rank')}"
        return f"{group}, {self.dtype}, {self.size_bytes:,} bytes"

    def counts(self) -> tuple[int, int, int]:
        """Number of elements of a part, of the input and of the output of a rank."""
        sends, receives = OPERATIONS[self.op].parts(self.group_ranks)
        part = self.size_bytes // itemsize(self.dtype) // max(sends, receives)
        return part, sends * part, receives * part


def itemsize(dtype: str) -> int:
    return getattr(torch, dtype).itemsize


@dataclass(frozen=True)
class Collective:
    """An operation that a rank has recorded. Matching operations of several ranks are equal."""

    kind: Kind
    team: tuple[str, tuple[int, ...]]  # name and ranks of its process group
    seq: int  # its sequence number within the group; 0 if not recorded
    problem: str  # why it cannot be replayed; "" if it can
    begin_s: float = field(compare=False)  # since the beginning of the steps
    job_s: float = field(compare=False, default=0.0)  # its time in the job; 0 if not recorded


class Recording(NamedTuple):
    """The recording of a rank."""

    steps: int  # number of steps; 0 if the recording does not mark them
    time_s: float  # of all steps, or of the whole recording; 0 if it has no times
    calls: list[Collective]
    rank: int = 0


# -- recordings ------------------------------------------------------------------------------------


def find(folder: str, rank: int, world_size: int) -> tuple[Path, bool]:
    """The recording that this rank reads, and whether its name contains the rank.

    Names by tensorboard_trace_handler do not contain it: these files are distributed in the natural
    order of their names, and the rank is read from the file. Raises OSError or ValueError.
    """
    inside = [path for path in files.files_of(folder) if not files.kind_of(path)]
    files.check_total(folder, inside)
    named: dict[int, list[Path]] = defaultdict(list)
    for file in inside:
        if (found := rank_in_name(file)) is not None:
            named[found].append(file)
    for of_rank, same in named.items():
        if len(same) > 1:
            pair = f"{same[0].name} and {same[1].name}"
            raise ValueError(f"{folder} has several recordings of rank {of_rank}: {pair}; keep one")
    unnamed = [file for file in inside if file.name.endswith((".json", ".json.gz"))]
    count = len(named) or len(unnamed)
    if not count:
        expected = "expected a file of each rank, e.g. rank0_trace.json or nccl_trace_rank_0"
        raise ValueError(f"{folder} has no recordings; {expected}")
    if sorted(named or range(count)) != list(range(world_size)):
        whose = f"ranks {cli.cut(sorted(named))}" if named else count_of(count, "rank")
        has = f"{folder} has recordings of {whose}"
        raise ValueError(other_world_size(has, folder, count, world_size))
    return (named[rank][0], True) if named else (unnamed[rank], False)


def other_world_size(what: str, folder: str, recorded: int, world_size: int) -> str:
    script = shlex.join(exits.words_of(sys.argv[0]))
    launch = f"torchrun --nproc-per-node {recorded} {script} {folder}"
    return f"{what}, and this job has {world_size}; e.g. {launch}"


def read(folder: str, rank: int, world_size: int) -> Recording:
    """Read one recording of the folder, a different one on each rank.

    Raises OSError or ValueError, with one line, if the recording is missing or damaged.
    """
    path, is_named = find(folder, rank, world_size)
    try:
        content = decoded(path)
        if (events := events_of(content)) is not None:
            about = content.get("distributedInfo") or {} if isinstance(content, dict) else {}
            recording = kineto(events, about)
        else:
            about, recording = content, flight_recorder(content, world_size)
        check_times(recording)
        recorded_ranks = whole(about.get("world_size", world_size), "world_size", least=1)
        if not is_named and "rank" not in about:
            raise ValueError("a file without a rank in its name or content; e.g. rank0_trace.json")
        recorded_rank = whole(about.get("rank", rank), "rank")
    except OSError:
        raise
    except Exception as error:  # a damaged file may raise anything
        got = str(error) if type(error) is ValueError else exits.describe(error)
        raise ValueError(f"{path}: expected the recording of a rank, got {got[:300]}") from None
    if recorded_ranks != world_size:
        is_of = f"{path} is from a job of {count_of(recorded_ranks, 'rank')}"
        raise ValueError(other_world_size(is_of, folder, recorded_ranks, world_size))
    if is_named and recorded_rank != rank:
        raise ValueError(f"{path}: expected the recording of rank {rank}, got rank {recorded_rank}")
    return recording._replace(rank=recorded_rank)


def in_order(recordings: Sequence[Recording]) -> list[Recording]:
    """Sort the recordings by rank. Raises ValueError if there is not exactly one per rank, or if
    they have different numbers of steps."""
    ordered = sorted(recordings, key=lambda recording: recording.rank)
    ranks = [recording.rank for recording in ordered]
    if ranks != list(range(len(ranks))):
        raise ValueError(f"expected a recording of each of {len(ranks)} ranks, got ranks {ranks}")
    counts = {recording.steps: recording.rank for recording in reversed(ordered)}
    if len(counts) > 1:
        each = ", ".join(f"rank {rank} has {count}" for count, rank in sorted(counts.items()))
        raise ValueError(f"expected the same number of steps in all recordings; {each}")
    return ordered


def decoded(path: Path) -> Any:
    """Read a file with JSON or a pickle, possibly compressed. Raises ValueError or OSError."""
    data = files.read(path)
    # Kineto may write white space first
    is_json = data[:64].lstrip().startswith((b"{", b"["))
    content = json.loads(data) if is_json else files.plain_pickle(bytes(data))
    if events_of(content) is not None:
        return content
    if not isinstance(content, dict) or "entries" not in content:
        if isinstance(content, dict) and "pg_config" in content:
            raise ValueError(NO_ENTRIES)
        raise ValueError("neither a Kineto trace nor a dump of the flight recorder")
    return content


def whole(value: Any, what: str, least: int = 0) -> int:
    """Check an integer of a recording. Raises ValueError if it is anything else."""
    if type(value) is not int or value < least:
        # no repr() of lists: a few bytes of a pickle can nest one list a hundred times
        got = repr(value)[:40] if isinstance(value, str | int | float) else type(value).__name__
        raise ValueError(f"{what} {got} instead of a whole number of {least} or more")
    return value


def collective(
    name: str,
    team: tuple[str, Sequence[int]],
    seq: Any,
    dtype: str,
    sizes: Sequence[Any],
    **job: Any,
) -> Collective:
    """Build a Collective from the values that all formats provide.

    team: name and ranks of the process group. sizes: number of elements sent and received.
    job: `begin_s` and `job_s`, in seconds. Raises ValueError for values that no recorder writes.
    """
    group, ranks = str(team[0]), tuple(team[1])
    sent, received = (whole(size, "size") for size in sizes)
    if len({whole(rank, "rank of a group") for rank in ranks}) < len(ranks):
        raise ValueError(f"a group with the ranks {list(ranks)}")
    plain = DTYPES.get(dtype, "uint8")
    letters = name.replace("_", "").lower()  # all_gather is also recorded as _allgather_base
    known = [op for op in OPERATIONS if letters.startswith(op.replace("_", ""))]
    if "sparse" in letters:
        known = []
    kind = Kind((*known, name)[0], group, len(ranks), plain, max(sent, received) * itemsize(plain))
    problem = ""
    if not known:
        problem = "this operation is not replayed"
    elif dtype not in DTYPES:
        problem = "this dtype is not known"
    elif not ranks:
        problem = "the ranks of its group are not recorded"
    elif kind.counts()[1:] != (sent, received):
        problem = UNEVEN
    return Collective(kind, (group, ranks), whole(seq, "sequence number"), problem, **job)


def name_of_group(name: str, description: str) -> str:
    """The description, such as mesh_dp, or the name, a number, if there is none."""
    return name if description in ("", "undefined") else description


def check_times(recording: Recording) -> None:
    """Raises ValueError for impossible times. A step is assumed to take at least a microsecond."""
    steps, time_s, calls = recording.steps, recording.time_s, recording.calls
    if not 0 <= time_s < math.inf or (steps and time_s / steps < 1e-6):
        raise ValueError(f"{steps:,} steps in {time_s:g} s")
    for call in calls:
        if not 0 <= call.begin_s <= time_s:
            raise ValueError(f"an operation after {call.begin_s:g} s of steps of {time_s:g} s")
        if not 0 <= call.job_s < math.inf:
            raise ValueError(f"an operation that took {call.job_s:g} s")


# -- the flight recorder ---------------------------------------------------------------------------


def flight_recorder(content: dict[str, Any], world_size: int) -> Recording:
    """Convert the output of record(), or a dump of torch, which does not mark steps.

    The gaps of a dump are those between its operations. NCCL's dump contains the ranks of its
    groups in `pg_config`. In gloo's dump these have other names, so only the ranks of the default
    group are known.
    """
    entries = content["entries"]
    if not entries and "started_ns" not in content:
        raise ValueError(NO_ENTRIES)
    ranks_of: dict[str, Any] = content.get("groups") or {}
    for name, config in {} if ranks_of else (content.get("pg_config") or {}).items():
        ranks_of[name] = json.loads(config.get("ranks") or "[]")
    created = [entry.get("time_created_ns") or 0 for entry in entries]
    start_ns, end_ns, steps = min(created, default=1), max(created, default=1), 0
    has_times = start_ns > 0
    if "started_ns" in content:
        start_ns, end_ns = content["started_ns"], content["ended_ns"]
        steps = whole(content["steps"], "steps", least=1)
    if not has_times:
        start_ns = end_ns = 0
    calls = []
    for entry, created_ns in zip(entries, created, strict=True):
        name = entry["profiling_name"].rpartition(":")[2].partition(" ")[0]  # of `nccl:send 0->1`
        if name in MARKERS or (has_times and created_ns < start_ns):
            continue
        group, label = map(str, entry["process_group"])
        world = range(world_size) if label == "default_pg" else ()
        team = (name_of_group(group, label), ranks_of.get(group) or world)
        dtypes = [*entry["input_dtypes"], *entry["output_dtypes"], "Byte"]
        sizes = [elements(entry["input_sizes"]), elements(entry["output_sizes"])]
        begin_s = (created_ns - start_ns) / 1e9 if has_times else 0.0
        job_s = (entry.get("duration_ms") or 0) / 1e3
        seq = entry["collective_seq_id"]
        # dtypes[0]: some ranks have no input
        calls.append(collective(name, team, seq, dtypes[0], sizes, begin_s=begin_s, job_s=job_s))
    return Recording(steps, (end_ns - start_ns) / 1e9, calls)


def elements(shapes: list[list[int]]) -> int:
    """Total number of elements of all tensors."""
    return sum(math.prod(shape) for shape in shapes)


# -- Kineto ----------------------------------------------------------------------------------------


def kineto(every: list[Any], about: dict[str, Any]) -> Recording:
    """Convert the events of a trace of torch.profiler. about: its `distributedInfo`.

    Steps are marked by the profiler (`ProfilerStep#N`) or by `--profile` of these scripts.
    """
    events = complete(every)
    configs = about.get("pg_config") or []
    ranks_of = {str(config.get("pg_name")): config["ranks"] for config in configs}
    steps, _ = find_steps(
        [
            Range(event["ts"], event["ts"] + duration_us(event), event["name"], event.get("tid"))
            for event in events
            if is_step(event["name"], event.get("cat", ""))
        ],
        work_of(events),
    )
    calls = over_nccl(events, ranks_of) or over_gloo(events, configs)
    if not calls:
        raise ValueError("a Kineto trace without collectives of NCCL or gloo")
    start_us = steps[0].start if steps else calls[0].begin_s * 1e6
    end_us = steps[-1].end if steps else calls[-1].begin_s * 1e6
    within = []
    for call in calls:
        begin_us = call.begin_s * 1e6
        if start_us <= begin_us <= end_us:
            within.append(replace(call, begin_s=(begin_us - start_us) / 1e6))
    return Recording(len(steps), (end_us - start_us) / 1e6, within)


def complete(every: list[Any]) -> list[dict[str, Any]]:
    """The complete events of a trace in the order of their times, each of them once."""
    found: dict[Any, dict[str, Any]] = {}
    for event in every:
        if event.get("ph") == "X":
            start_us = as_number(event.get("ts"))
            if start_us is None:
                raise ValueError(f"an event at the time {str(event.get('ts'))[:40]}")
            number = (event.get("args") or {}).get("External id")
            same = map(str, [number, *map(event.get, ("dur", "name", "cat", "tid"))])
            found[(start_us, *same)] = event | {"ts": start_us}
    return sorted(found.values(), key=lambda event: event["ts"])


def duration_us(event: dict[str, Any]) -> float:
    """The duration of an event. Raises ValueError if it is not a number."""
    duration = as_number(event.get("dur"))
    if duration is None:
        raise ValueError(f"an event that takes {str(event.get('dur'))[:40]} us")
    return duration


def work_of(events: list[dict[str, Any]]) -> list[float]:
    """When the host started the kernels of a trace, or its operators if there are none, sorted."""
    launched: dict[Any, float] = {}
    kernels, operators = [], []
    for event in events:
        correlation, category = (event.get("args") or {}).get("correlation"), event.get("cat")
        if category == "kernel":
            kernels.append((correlation, event["ts"]))
        elif str(category).startswith(LAUNCHES):
            launched[correlation] = event["ts"]
        elif event["name"].startswith((*OPERATORS, "gloo:")):
            operators.append(event["ts"])
    return sorted([launched.get(number, start) for number, start in kernels] or operators)


def over_nccl(events: list[dict[str, Any]], ranks_of: dict[str, Any]) -> list[Collective]:
    """The calls of NCCL: torch records their arguments, and the kernels contain their times.

    `begin_s` is still on the clock of the trace. ranks_of: name of a group -> its ranks.
    """
    comms = [event for event in events if "Collective name" in (event.get("args") or {})]
    kernels_s: dict[Any, float] = {}  # operation that launched the kernel -> duration
    for event in comms:
        if event.get("cat") == "kernel":
            kernels_s[event["args"].get("External id")] = duration_us(event) / 1e6
    calls = []
    for event in comms:
        about = event["args"]
        name = about["Collective name"]
        if event.get("cat") != "cpu_op" or name in MARKERS:
            continue
        group = str(about.get("Process Group Name", about.get("Process Group ID", "")))
        label = about.get("Process Group Description") or ""
        team = (name_of_group(group, label), ranks_in(about, group, ranks_of))
        sizes = [as_number(about[f"{side} msg nelems"]) for side in ("In", "Out")]
        job_s = kernels_s.get(about.get("External id"), 0.0)
        times = {"begin_s": event["ts"] / 1e6, "job_s": job_s}
        seq = as_number(about.get("Seq") or 0)
        call = collective(name, team, seq, about["dtype"], sizes, **times)
        splits = [about.get(f"{side} split size") for side in ("In", "Out")]
        if not call.problem and any(map(is_uneven, splits)):
            call = replace(call, problem=UNEVEN)
        calls.append(call)
    return calls


def is_uneven(splits: Any) -> bool:
    """Whether the parts of an all-to-all may differ: `[1, 2]`, or a list that is abbreviated."""
    return len({*re.findall(r"\d+|\.\.\.", str(splits or ""))}) > 1


def ranks_in(about: dict[str, Any], group: str, ranks_of: dict[str, Any]) -> Sequence[int]:
    """The ranks of an operation's group. In the operation itself, torch abbreviates a long list."""
    text = about.get("Process Group Ranks") or ""
    if "..." not in text and (ranks := re.findall(r"\d+", text)):
        return [int(rank) for rank in ranks]
    if group in ranks_of:
        return list(ranks_of[group])
    start, stride = about.get("Global rank start", -1), about.get("Global rank stride", -1)
    count = about.get("Group size", 0)
    return range(start, start + count * stride, stride) if start >= 0 and stride > 0 else ()


def over_gloo(events: list[dict[str, Any]], configs: list[dict[str, Any]]) -> list[Collective]:
    """The calls of gloo, on the clock of the trace. configs: of all process groups.

    `c10d::allreduce_` in the training thread provides the order and the sizes; `gloo:all_reduce` in
    the worker thread provides the dtype and the time. The profiler does not record the group, so
    the job must have only one. Raises ValueError if sizes are missing: they are optional.
    """
    only = configs[0] if len(configs) == 1 else {}
    team = (only.get("pg_desc") or "an unknown group", only.get("ranks", ()))
    work: dict[int, list[dict[str, Any]]] = defaultdict(list)  # by size, most recent event first
    for event in reversed(events):
        if event["name"].startswith("gloo:"):
            work[sum(tensor_sizes(event))].append(event)
    calls = []
    for event in events:
        if not event["name"].startswith("c10d::") or event.get("cat") != "cpu_op":
            continue
        name = event["name"].removeprefix("c10d::").strip("_")
        sizes = sent_and_received(name, tensor_sizes(event), max(1, len(team[1])))
        same_size = work[sizes[0]]
        while same_size and same_size[-1]["ts"] < event["ts"]:
            same_size.pop()
        done: dict[str, Any] = same_size.pop() if same_size else {"args": {}, "dur": 0.0}
        types = [kind for by in (event, done) for kind in by["args"].get("Input type", [])]
        dtype = next((CPP_DTYPES[kind] for kind in types if kind in CPP_DTYPES), "Byte")
        times = {"begin_s": event["ts"] / 1e6, "job_s": duration_us(done) / 1e6}
        call = collective(name, team, 0, dtype, sizes, **times)
        splits = event["args"].get("Concrete Inputs", [])[3:5]
        if not call.problem and "alltoall" in name and any(map(is_uneven, splits)):
            call = replace(call, problem=UNEVEN)
        calls.append(call)
    return calls


def tensor_sizes(event: dict[str, Any]) -> list[int]:
    """Number of elements of each argument of an event, including lists of tensors."""
    about = event.get("args") or {}
    if "Input Dims" not in about and not event["name"].endswith("barrier"):
        advice = "over gloo set record_shapes=True, over NCCL use a newer torch"
        raise ValueError(f"a Kineto trace without the sizes of collectives; {advice}")

    def count(dims: list[Any]) -> int:
        if dims and isinstance(dims[0], int):
            return math.prod(dims)
        return sum(map(count, dims))

    return [count(dims) for dims in about.get("Input Dims", [])]


def sent_and_received(name: str, arguments: list[int], ranks: int) -> tuple[int, int]:
    """Number of elements that an operation of c10d sends and receives.

    Its arguments are (output, input), or one tensor for both. The profiler omits an argument
    that is a list of lists; it contains a tensor for each rank.
    """
    first, second = [*arguments, 0, 0][:2]
    if name == "barrier":  # its tensor only specifies the device
        return 0, 0
    if not any(word in name for word in ("gather", "scatter", "alltoall")):
        return first, first
    return second or first * ranks, first or second * ranks


# -- what is replayed ------------------------------------------------------------------------------


class Plan(NamedTuple):
    """The operations to replay.

    steps: number of steps. time_s: duration of all steps; 0 for a replay without gaps.
    calls: of each rank. lines: what is not replayed, and what was not recorded, in words.
    """

    steps: int
    time_s: float
    calls: list[list[Collective]]
    kinds: list[Kind]
    lines: list[str]


def choose(recordings: Sequence[Recording], only: Sequence[str] = (), gaps: bool = True) -> Plan:
    """Select the operations that all ranks of a group have recorded; any other would hang."""
    groups = {*only, *(f"mesh_{name}" for name in only)}
    asked: list[list[Collective]] = []  # of each rank
    for recording in recordings:
        asked.append([call for call in recording.calls if not only or call.kind.group in groups])
    problems = find_problems(asked)
    kept: list[list[Collective]] = []
    lost: Counter[str] = Counter()
    for calls in asked:
        kept.append([call for call in calls if not problems[call]])
        for call in calls:
            if problems[call]:
                lost[f"{call.kind.op} of {call.kind.group}: {problems[call]}"] += 1
    lines = [f"{count} x {text}" for text, count in lost.items()]
    lines.append(f"not replayed: {lost.total()} of {sum(map(len, asked))} operations")
    kinds = sorted({call.kind for calls in kept for call in calls})
    steps = max(1, recordings[0].steps)  # the same on all ranks
    time_s = max(recording.time_s for recording in recordings)
    if not recordings[0].steps:
        kept = [since_first(calls) for calls in kept]
        time_s = max((call.begin_s for calls in kept for call in calls), default=0.0)
        lines.append("the recording does not mark steps: `a step` is the whole recording")
    if not min(recording.time_s for recording in recordings):
        time_s = 0.0
        lines.append("the recording has no times: replayed without gaps")
    elif not any(call.job_s for calls in kept for call in calls):
        lines.append("the recording has no durations of operations: `job` is empty")
    return Plan(steps, time_s if gaps else 0.0, kept, kinds, lines)


def since_first(calls: list[Collective]) -> list[Collective]:
    """Let the first call of a rank begin at 0: ring buffers do not begin at the same time."""
    return [replace(call, begin_s=call.begin_s - calls[0].begin_s) for call in calls]


def find_problems(calls_by_rank: list[list[Collective]]) -> dict[Collective, str]:
    """Why each operation cannot be replayed; "" if it can.

    Each rank of the group must have recorded an operation equally often, and all in the same order:
    ring buffers begin at different times, and coalesced operations share a sequence number and may
    be equal.
    """
    counts: Counter[tuple[int, Collective]] = Counter()
    for rank, calls in enumerate(calls_by_rank):
        counts.update((rank, call) for call in calls)
    problems: dict[Collective, str] = {}
    for rank, call in counts:
        _, members = call.team
        times_recorded = {counts[member, call] for member in members}
        problem = call.problem or problems.get(call, "")
        if not problem and rank not in members:
            problem = f"recorded by rank {rank}, which is not in its group"
        elif not problem and len(times_recorded) > 1:
            problem = "not recorded equally often on all ranks of its group"
        problems[call] = problem
    orders: dict[Any, dict[int, list[Collective]]] = defaultdict(lambda: defaultdict(list))
    for rank, calls in enumerate(calls_by_rank):
        for call in calls:
            if not problems[call]:
                orders[call.team][rank].append(call)
    for (_, members), order in orders.items():
        first = order[members[0]]
        odd = [rank for rank in members if order[rank] != first]
        for call in first if odd else ():
            problems[call] = f"in a different order on rank {odd[0]} than on rank {members[0]}"
    return problems


# -- replay ----------------------------------------------------------------------------------------

Replay = dict[Kind, list[float]]  # seconds of each call


def play(calls: list[Collective], starts: dict[Any, Any], end_s: float = 0) -> Replay:
    """Start all operations, with the job's gaps if `end_s` is given.

    Before starting an operation, wait for the previous one of its group. Returns the seconds of
    each operation from its start until its end is observed.

    starts: (kind, team) -> a function that starts an operation. end_s: duration of the steps.
    """
    seconds: Replay = defaultdict(list)
    in_flight: dict[Any, tuple[Kind, float, Any]] = {}  # team -> kind, start and Work
    zero = time.perf_counter()

    def poll(awaited: object = None) -> None:
        """Record the times of finished operations, after waiting for that of the given team."""
        for team, (kind, begun, work) in list(in_flight.items()):
            if team == awaited or work.is_completed():
                wait(work)
                seconds[kind].append(time.perf_counter() - begun)
                del in_flight[team]

    for call in calls:
        poll(call.team)
        while end_s and time.perf_counter() - zero < call.begin_s:
            poll()
        begun = time.perf_counter()
        in_flight[call.team] = (call.kind, begun, starts[call.kind, call.team]())
        poll()
    for team in list(in_flight):
        poll(team)
    while time.perf_counter() - zero < end_s:
        pass
    return seconds


def play_on_streams(
    calls: list[Collective], starts: dict[Any, Any], streams: dict[Any, Any], end_s: float = 0
) -> Replay:
    """The same over NCCL. As in a job, operations are queued, and the host waits only at the end.

    Each operation is timed by two events on the stream of its team. streams: by team.
    """
    events: list[tuple[Kind, torch.cuda.Event, torch.cuda.Event]] = []
    caller = torch.cuda.current_stream()
    zero = time.perf_counter()
    for call in calls:
        while end_s and time.perf_counter() - zero < call.begin_s:
            pass
        stream = streams[call.team]
        stream.wait_stream(caller)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            begin.record()
            starts[call.kind, call.team]().wait()  # blocks the stream, not the host
            end.record()
        events.append((call.kind, begin, end))
    while time.perf_counter() - zero < end_s:
        pass
    for stream in streams.values():
        caller.wait_stream(stream)
    caller.synchronize()
    seconds: Replay = defaultdict(list)
    for kind, begin, end in events:
        seconds[kind].append(begin.elapsed_time(end) / 1e3)
    return seconds


def wait(work: Any) -> None:
    """Block the host until the operation has finished, also on a device."""
    work.wait()
    if torch.cuda.is_initialized():  # until here only the stream waits
        torch.cuda.current_stream().synchronize()


def build(plan: Plan, job: Job, key: Key, group: Group) -> Workload:
    """Replay the operations of this rank back to back and with gaps, and each kind alone."""
    starts: dict[tuple[Kind, Any], Step] = {}
    mine = {(call.kind, call.team) for call in plan.calls[job.rank]}
    for team in sorted({call.team for calls in plan.calls for call in calls}):  # same on all ranks
        _, ranks = team
        barrier_before_new_group(group)
        with silenced(job.backend):
            team_group: Any = dist.new_group(list(ranks), backend=job.backend)
        if job.rank in ranks:
            group.extra.append(team_group)
            connect(team_group, job)
        for kind in sorted(kind for kind, its_team in mine if its_team == team):
            starts[kind, team] = prepared(kind, ranks, team_group, job)

    replay = partial(play, plan.calls[job.rank], starts)
    wait_alone: Callable[[Any], None] = wait
    if job.device.type == "cuda" and "nccl" in job.backend:
        streams = {team: torch.cuda.Stream(job.device) for _, team in mine}
        replay = partial(play_on_streams, plan.calls[job.rank], starts, streams)
        wait_alone = methodcaller("wait")

    def one_of(kind: Kind) -> None:
        for (other, _), start in starts.items():
            if other == kind:
                wait_alone(start())

    parts: dict[str, Step] = {}
    if plan.time_s:
        parts["with gaps"] = partial(replay, end_s=plan.time_s)
    for kind in plan.kinds:
        parts[str(kind)] = partial(one_of, kind)
    return Workload(replay, parts, returned=means)


def means(replays: list[Replay]) -> list[dict[Kind, float]]:
    """The mean time of each kind in each replay, in seconds."""
    rows = []
    for replay in replays:
        rows.append({kind: fmean(seconds) for kind, seconds in replay.items()})
    return rows


def prepared(kind: Kind, ranks: tuple[int, ...], group: Any, job: Job) -> Step:
    """A function that starts an operation, whose result has been checked once.

    Reductions are sums, and the root is the first rank of the group: recordings contain neither.
    Raises ValueError if the result is wrong.
    """
    operation = OPERATIONS[kind.op]
    part, to_send, to_receive = kind.counts()
    redop = "sum" if operation.reduces else "none"
    member = Member(group, sorted(ranks).index(job.rank), len(ranks), part, redop)
    zeros: Any = partial(torch.zeros, dtype=getattr(torch, kind.dtype), device=job.device)
    received = zeros(to_receive)
    in_place = operation.variants[0] == "in_place"
    sent = received if in_place else zeros(to_send)
    start = partial(operation.call, sent, received, member, async_op=True)
    if kind.op == "barrier" and "nccl" in job.backend:  # avoids a warning about a guessed device
        start = partial(start, device_ids=[job.device.index])
    operations.fill(sent, received, member)
    wait(start())
    if operations.count_wrong(operation, received, member):
        raise ValueError(f"{kind.op} of {kind.group} delivered wrong values")
    sent.zero_()
    received.zero_()
    return start


def derive(plan: Plan, case: Case, times: Times, facts: list[None]) -> None:
    """Compute the metrics. The time of an iteration is the maximum over ranks.

    times.returned: the mean time of each kind, for each rank and replay.
    """
    metrics = case.metrics
    timed = {"step": "back_to_back"}
    if plan.time_s:
        timed["with gaps"] = "with_gaps"
        metrics["job_step_s"] = plan.time_s / plan.steps
    for name, prefix in timed.items():
        step = times.slowest(name) / plan.steps
        metrics[f"{prefix}_s"] = median(step)
        metrics |= percentiles(step, prefix)
        del metrics[f"{prefix}_p50_s"]
    rows = [row_of(kind, plan, times) for kind in plan.kinds]
    total_s = sum(row["calls"] * row["replayed_s"].value for row in rows)
    for row in rows:
        row["share"] = row["replayed_s"] * row["calls"] / total_s
    metrics["step_bytes"] = sum(row["calls"] * row["size_bytes"] for row in rows)
    metrics["operations"] = rows


def row_of(kind: Kind, plan: Plan, times: Times) -> dict[str, Any]:
    """The row of a kind, without its share."""
    calls = [[call for call in row if call.kind == kind] for row in plan.calls]
    by_rank = []  # for each rank that has the kind, its mean time in each replay
    for replays in times.returned:
        if kind in replays[0]:
            by_rank.append([replay[kind] for replay in replays])
    seconds = {"replayed": median(np.max(by_rank, axis=0)), "alone": times.median(str(kind))}
    job_s = [fmean(call.job_s for call in row) for row in calls if any(call.job_s for call in row)]
    if job_s:
        seconds["job"] = Estimate(max(job_s))
    row: dict[str, Any] = kind._asdict()
    if job_s and kind.op in SYNCHRONIZING:
        row["job_waits_s"] = waits_in_job(calls)
    row["calls"] = sum(map(len, calls)) / len(by_rank) / plan.steps
    row["bus_factor"] = OPERATIONS[kind.op].bus(kind.group_ranks)
    bus_bytes = row["bus_factor"] * kind.size_bytes
    for name, estimate in seconds.items():
        row[f"{name}_s"] = estimate
        row[f"{name}_busbw_gb_per_s"] = bus_bytes / estimate / 1e9
    row["replayed_over_alone"] = drop_wide_interval(seconds["replayed"] / seconds["alone"])
    return row


def waits_in_job(calls: Sequence[Sequence[Collective]]) -> float:
    """How long the slowest rank of the job waited for late ranks in an operation: the mean over its
    calls of their time minus the shortest time of any rank. calls: of each rank, in order."""
    numbered: list[dict[Any, float]] = []  # by rank: team and number of the call -> seconds
    for of_rank in calls:
        counts: Counter[Any] = Counter()
        numbered.append({})
        for call in of_rank:
            counts[call.team] += 1
            numbered[-1][call.team, counts[call.team]] = call.job_s
    slowest = max(numbered, key=lambda of_rank: fmean(of_rank.values()) if of_rank else 0)
    return fmean(
        job_s - min(of_rank[name] for of_rank in numbered if name in of_rank)
        for name, job_s in slowest.items()
    )


COLUMNS: Columns = {  # GB/s are busbw
    "op": lambda row: row.key["op"],
    "group": lambda row: row.key["group"],
    "bytes": lambda row: cli.show_size(row.key["size_bytes"]),
    "replayed\n(ms)": metric("replayed_s", 1e3, 3),
    "95% ci\n(ms)": ends("replayed_s", 1e3, 3),
    "alone\n(ms)": metric("alone_s", 1e3, 3),
    "95% ci\n(alone)": relative("alone_s"),
    "replayed\n/ alone": metric("replayed_over_alone"),
    "95% ci\n(ratio)": relative("replayed_over_alone"),
    "calls": metric("calls", digits=1),
    "share\n(%)": metric("share", 100, 0),
    "replayed\n(GB/s)": metric("replayed_busbw_gb_per_s"),
    "alone\n(GB/s)": metric("alone_busbw_gb_per_s"),
    "busbw\nfactor": metric("bus_factor", digits=4),
    "job\n(ms)": metric("job_s", 1e3, 3),
    "waits\n(ms)": metric("job_waits_s", 1e3, 3),
    "job\n(GB/s)": metric("job_busbw_gb_per_s"),
}


def answers(metrics: dict[str, Any]) -> list[str]:
    return [answer(metrics), *late_ranks(metrics)]


def answer(metrics: dict[str, Any]) -> str:
    """The fraction of the job's step that is communication.

    `the communication of a step takes 5.09 ms (4.29 to 6.42) back to back, 31% (26 to 39) of the
    job's step of 16.3 ms; with the job's gaps, a step takes 16.3 ms (16.3 to 16.3)`
    """
    alone, job_s = metrics["back_to_back_s"], metrics.get("job_step_s")
    sentence = f"the communication of a step takes {alone} back to back"
    if not job_s:
        return sentence
    part = (alone / job_s).text("%", 100, 0)
    of_job = f"{part} of the job's step of {show_seconds(job_s)}"
    return f"{sentence}, {of_job}; with the job's gaps, a step takes {metrics['with_gaps_s']}"


def late_ranks(metrics: dict[str, Any]) -> list[str]:
    """The operation in which ranks waited longest for late ranks in the job, if that took more than
    LATE of a step; in words."""
    rows = [row for row in metrics["operations"] if "job_waits_s" in row]
    row = max(rows, key=lambda row: row["calls"] * row["job_waits_s"], default=None)
    if not row or row["calls"] * row["job_waits_s"] <= LATE * metrics.get("job_step_s", math.inf):
        return []
    name = f"{row['op']} of {row['group']}, {row['size_bytes']:,} bytes"
    took, waits = show_seconds(row["job_s"].value), show_seconds(row["job_waits_s"])
    what = f"takes {took} on the slowest rank, which waits {waits} of it for late ranks"
    return [f"in the job, {name}, {what}"]


def check_plan(plan: Plan, recordings: Sequence[Recording], bench: Benchmark) -> None:
    """Raises ValueError if this rank cannot replay the plan."""
    if not plan.kinds:
        recorded = {call.kind.group for recording in recordings for call in recording.calls}
        groups = cli.cut(sorted(recorded))
        none = f"no operation of the groups {groups} can be replayed"
        raise ValueError(f"{none}; {'; '.join(plan.lines)}")
    # a block has one untimed replay at its start and at least one timed replay
    if 2 * plan.time_s > bench.args.timeout:
        took = f"a replay with gaps takes as long as the recorded steps, {plan.time_s:g} s"
        advice = f"record fewer steps, or use --no-gaps or --timeout {3 * plan.time_s:.0f}"
        raise ValueError(f"{took}; {advice}")
    needed_bytes = 0  # all calls of a kind and team share two tensors
    for kind, _ in {(call.kind, call.team) for call in plan.calls[bench.job.rank]}:
        _, to_send, to_receive = kind.counts()
        needed_bytes += (to_send + to_receive) * itemsize(kind.dtype)
    advice = "the number of groups with --only"
    check_room(needed_bytes, bench.job, bench.report.environment, advice)


def described(plan: Plan, digest: str, only: str) -> str:
    """`recording fb99156b9905: 3 steps in 48.8 ms; all groups`"""
    steps = count_of(plan.steps, "step")
    how = f" in {plan.time_s * 1e3:.1f} ms" if plan.time_s else " without gaps"
    groups = "all groups" if only == "all" else f"--only {only}"
    return f"recording {digest}: {steps}{how}; {groups}"


def main() -> int:
    args = parse_args()
    only = ",".join(args.only) or "all"
    with Benchmark("replay", args) as bench:
        job = bench.job
        recordings: list[Recording] = []  # of all ranks; for a dry run the folder may be missing
        if not args.dry_run or job.broadcast(Path(args.trace).is_dir()):
            mine = bench.prepare("FOLDER", lambda: read(args.trace, job.rank, job.world_size))
            gathered = job.broadcast(job.gather(mine))
            recordings = bench.prepare("FOLDER", lambda: in_order(gathered))
        # identifies the operations, whatever format they were recorded in
        content = repr([(of.steps, of.time_s, of.calls) for of in recordings])
        digest = hashlib.sha256(content.encode()).hexdigest()[:12]
        name = f"{args.trace}, groups {only}"
        key = {"only": only, "gaps": not args.no_gaps, "recording": digest}
        bench.announce({"Replay of a recorded job": [Planned(name, job.world_size, key)]})
        plan = choose(recordings, args.only, not args.no_gaps)
        bench.prepare("FOLDER", lambda: check_plan(plan, recordings, bench))
        bench.print(f"\n# {described(plan, digest, only)}")
        if case := bench.measure(key, name, partial(build, plan, job), partial(derive, plan)):
            rows = [
                replace(case, key=row, metrics=row) for row in case.metrics.get("operations", [])
            ]
            if case.failed:
                bench.print(f"# {case.check}")
            else:
                bench.print_table(COLUMNS, rows)
            bench.conclude(plan.lines if case.failed else answers(case.metrics) + plan.lines, case)
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
