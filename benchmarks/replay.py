#!/usr/bin/env python3
"""Is the network slow, or the job? Replays the collectives of a recorded job without the job.

    back to back = each operation starts as soon as the previous one of its group is done
    with gaps    = no operation starts earlier than in the job: busy waits replace computing
    replayed     = time of an operation in a replay with gaps (without, if the recording has no
                   times), from its start until it is seen to be done; over NCCL between two CUDA
                   events. Mean over a step's calls, maximum over ranks, p50 over the replays
    alone        = the same operation with nothing else in flight
    busbw        = bytes / time * factor, as in collectives.py
    share        = calls * replayed, divided by the sum over all rows

A folder has a recording of each rank: a Kineto trace of torch.profiler (rank0_trace.json or .gz), a
dump of torch's flight recorder (nccl_trace_rank_0, a pickle, or JSON), or what record() of
examples/record_collectives.py writes (fr_0.json). Nothing in a file is executed.

    torchrun --nproc-per-node 4 benchmarks/replay.py trace/
    torchrun --nproc-per-node 8 benchmarks/replay.py trace/ --only dp --json report.jsonl

docs/replay.md explains how to record a job and how to read the table. Written for this project,
BSD-3-Clause.
"""

import argparse
import gzip
import hashlib
import io
import json
import math
import pickle
import pickletools
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import methodcaller
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cli  # first: it names a package that is missing

# isort: split
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from benchmarks.workloads import operations
from benchmarks.workloads.operations import Member, Operation
from benchmarks.workloads.room import check_room
from common.benchmark import Benchmark, Key
from common.environment import count_of
from common.groups import Group, Job, connect, gather, rendezvous, share
from common.report import Case, show_seconds
from common.stats import Times, median, percentiles, telling
from common.table import Columns, ends, metric, relative
from common.timing import STEP, Step, Workload

# The number of a rank in the name of a file: fr_0.json, nccl_trace_rank_0, rank0_trace.json.gz,
# rank-0.Apr_03.json.gz; 5 in nccl_trace_rank_node2_5, where the name of a host is in between
HOST = r"(?:\d*[A-Za-z].*|\d+(?:\.\d+){3})"
NAMED = rf"(?:fr|rank)(?:[_-]{HOST}[_-](?=\d+(?:\.[A-Za-z.]+)?$)|[_-]?)(\d+)"
RANK = re.compile(rf"{NAMED}|[_-](\d+)$")  # trace_5: a prefix of one's own
UNEVEN = "parts differ in size, and only the sum is recorded"
NO_ENTRIES = "a dump without operations; each backend has a recorder of its own"
LARGEST_FILE = 2**32  # bytes, uncompressed
MARKERS = ("coalesced", "wait", "init")  # entries that transfer nothing
# The recorders' names of types and, of gloo's operations in a profile, those of C++ -> torch's
DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16"}
DTYPES |= {"Long": "int64", "Int": "int32", "Char": "int8", "Byte": "uint8", "Bool": "uint8"}
DTYPES |= {"Float8_e4m3fn": "uint8", "Float8_e5m2": "uint8"}
CPP_DTYPES = {"float": "Float", "double": "Double", "c10::Half": "Half", "long int": "Long"}
CPP_DTYPES |= {"c10::BFloat16": "BFloat16", "int": "Int", "signed char": "Char", "bool": "Bool"}
CPP_DTYPES |= {"unsigned char": "Byte"}
# gather, scatter and sends are not replayed
REPLAYED = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce")
OPERATIONS = {name: operations.OPERATIONS[name] for name in REPLAYED}
OPERATIONS["barrier"] = Operation(
    call=lambda src, dst, at, **more: dist.barrier(at.group, **more),
    expected=lambda at: [],
    bus=lambda n: 0,
)
# The opcodes of a pickle of None, bool, int, float, str, bytes, list, tuple and dict, in each of
# pickle's protocols. All others make objects, call functions or ask for persistent ids.
PLAIN_OPCODES = {
    *("PROTO", "FRAME", "MARK", "STOP", "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"),
    *("GET", "BINGET", "LONG_BINGET", "NONE", "NEWTRUE", "NEWFALSE"),
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    *("LIST", "EMPTY_LIST", "APPEND", "APPENDS", "DICT", "EMPTY_DICT", "SETITEM", "SETITEMS"),
    *("TUPLE", "EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
}


def parse_args() -> argparse.Namespace:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    folder = cli.checked(str, bool, "a folder of recordings", "e.g. trace/")
    add("trace", type=folder, metavar="FOLDER", help="recordings, a file of each rank")
    only = "replay only these groups, e.g. dp for mesh_dp (default: all)"
    add("--only", type=cli.list_of(str), default=[], metavar="GROUP", help=only)
    gaps = "replay back to back only, e.g. a dump that covers minutes"
    add("--no-gaps", action="store_true", help=gaps)
    cli.add_common_flags(parser, min_iters=12, max_seconds=10)
    return parser.parse_args()


# -- kinds and collectives -------------------------------------------------------------------------


class Kind(NamedTuple):
    """Operations that share a row. size_bytes: the larger of what a rank sends and receives."""

    op: str
    group: str
    group_ranks: int
    dtype: str
    size_bytes: int

    def __str__(self) -> str:
        group = f"{self.op} {self.group}, {count_of(self.group_ranks, 'rank')}"
        return f"{group}, {self.dtype}, {self.size_bytes:,} bytes"

    def counts(self) -> tuple[int, int, int]:
        """Number of elements of a part, and of all that a rank sends and receives."""
        sends, receives = OPERATIONS[self.op].parts(self.group_ranks)
        part = self.size_bytes // itemsize(self.dtype) // max(sends, receives)
        return part, sends * part, receives * part


def itemsize(dtype: str) -> int:
    return getattr(torch, dtype).itemsize


@dataclass(frozen=True)
class Collective:
    """An operation of a rank, as recorded; those of several ranks are equal if they match."""

    kind: Kind
    team: tuple[str, tuple[int, ...]]  # name and ranks of its group
    seq: int  # its number in its group; 0 where the recording has none
    problem: str  # why it cannot be replayed
    begin_s: float = field(compare=False)  # since the steps began
    job_s: float = field(compare=False, default=0.0)  # 0 if not recorded


class Recording(NamedTuple):
    """The recording of a rank."""

    steps: int  # 0 if it does not mark steps: `time_s` is then that of all its operations
    time_s: float  # of the steps; 0 if it has no times
    calls: list[Collective]
    rank: int = 0


# -- recordings ------------------------------------------------------------------------------------


def find(folder: str, rank: int, world_size: int) -> tuple[Path, bool]:
    """The recording that this rank reads, and whether its name tells whose it is.

    The names of tensorboard_trace_handler have no rank: these files are taken in order of their
    names, and their contents tell the rank. Raises OSError or ValueError.
    """
    files = sorted(file for file in Path(folder).iterdir() if file.is_file())
    named: dict[int, list[Path]] = defaultdict(list)
    for file in files:
        if match := RANK.search(file.name):
            named[int(match[1] or match[2])].append(file)
    for of_rank, same in named.items():
        if len(same) > 1:
            pair = f"{same[0].name} and {same[1].name}"
            raise ValueError(f"{folder} has several recordings of rank {of_rank}: {pair}; keep one")
    unnamed = [file for file in files if file.name.endswith((".json", ".json.gz"))]
    count = len(named) or len(unnamed)
    if not count:
        expected = "expected a file of each rank, e.g. rank0_trace.json or nccl_trace_rank_0"
        raise ValueError(f"{folder} has no recordings; {expected}")
    if sorted(named or range(count)) != list(range(world_size)):
        whose = f"ranks {cli.cut(sorted(named))}" if named else count_of(count, "rank")
        has = f"{folder} has recordings of {whose}"
        raise ValueError(another_world(has, folder, count, world_size))
    return (named[rank][0], True) if named else (unnamed[rank], False)


def another_world(what: str, folder: str, recorded: int, world_size: int) -> str:
    launch = f"torchrun --nproc-per-node {recorded} {sys.argv[0]} {folder}"
    return f"{what}, and this job has {world_size}; e.g. {launch}"


def read(folder: str, rank: int, world_size: int) -> Recording:
    """A recording of the folder, on each rank another one.

    Raises OSError or ValueError, in one line, if there is none or if it is damaged.
    """
    path, is_named = find(folder, rank, world_size)
    try:
        content = decoded(path)
        if "traceEvents" in content:
            about = content.get("distributedInfo") or {}
            recording = kineto(content, about)
        else:
            about, recording = content, flight_recorder(content, world_size)
        check_times(recording)
        recorded_ranks = whole(about.get("world_size", world_size), "a job of", least=1)
        if not is_named and "rank" not in about:
            raise ValueError("a file without a rank in its name or content; e.g. rank0_trace.json")
        recorded_rank = whole(about.get("rank", rank), "rank")
    except OSError:
        raise
    except Exception as error:  # a damaged file raises anything
        got = str(error) if type(error) is ValueError else cli.describe(error)
        raise ValueError(f"{path}: expected the recording of a rank, got {got[:300]}") from None
    if recorded_ranks != world_size:
        is_of = f"{path} is of {count_of(recorded_ranks, 'rank')}"
        raise ValueError(another_world(is_of, folder, recorded_ranks, world_size))
    if is_named and recorded_rank != rank:
        raise ValueError(f"{path}: expected the recording of rank {rank}, got rank {recorded_rank}")
    return recording._replace(rank=recorded_rank)


def in_order(recordings: Sequence[Recording]) -> list[Recording]:
    """The recordings by rank. Raises ValueError if there is not one of each."""
    ordered = sorted(recordings, key=lambda recording: recording.rank)
    ranks = [recording.rank for recording in ordered]
    if ranks != list(range(len(ranks))):
        raise ValueError(f"expected a recording of each of {len(ranks)} ranks, got ranks {ranks}")
    return ordered


def decoded(path: Path) -> dict[str, Any]:
    """What a file holds: JSON or a pickle, compressed or not. Raises ValueError or OSError."""
    with open(path, "rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
    with gzip.open(path) if is_gzip else open(path, "rb") as file:
        data = file.read(LARGEST_FILE + 1)
    if len(data) > LARGEST_FILE:
        raise ValueError(f"more than {LARGEST_FILE:,} bytes")
    # Kineto may begin with a blank or a newline
    is_json = data[:64].lstrip()[:1] in (b"{", b"[")
    content = json.loads(data) if is_json else plain_pickle(data)
    if not isinstance(content, dict) or not content.keys() & {"traceEvents", "entries"}:
        if isinstance(content, dict) and "pg_config" in content:
            raise ValueError(NO_ENTRIES)
        raise ValueError("neither a Kineto trace nor a dump of the flight recorder")
    return content


class NoClasses(pickle.Unpickler):
    """Refuses what `plain_pickle` should have refused before."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise ValueError(f"a pickle that asks for {module}.{name}")


def plain_pickle(data: bytes) -> Any:
    """The value of a pickle that has only None, bool, int, float, str, bytes, list, tuple and dict.

    Its opcodes are read first, without executing them. Raises ValueError for any other opcode, and
    for a memo index beyond the length of the file, for which pickle would reserve memory.
    """
    for opcode, argument, position in pickletools.genops(data):
        if opcode.name not in PLAIN_OPCODES:
            raise ValueError(f"a pickle of other than plain data: {opcode.name} at byte {position}")
        if opcode.name.endswith("PUT") and int(argument or 0) not in range(len(data)):
            raise ValueError(f"a pickle with the memo index {argument} at byte {position}")
    return NoClasses(io.BytesIO(data)).load()


def whole(value: Any, what: str, least: int = 0) -> int:
    """A whole number of a recording. Raises ValueError for anything else."""
    if type(value) is not int or value < least:
        # not repr() of any value: in a pickle, lists of one list a hundred times are short
        got = repr(value)[:40] if isinstance(value, str | int | float) else type(value).__name__
        raise ValueError(f"{what} {got} instead of a whole number of {least} or more")
    return value


def collective(
    name: str,
    team: tuple[str, Sequence[int]],
    seq: int,
    dtype: str,
    sizes: Sequence[int],
    **job: Any,
) -> Collective:
    """An operation in torch's words, from what every format has.

    team: name and ranks of its group. sizes: elements sent and received. job: `begin_s` and `job_s`
    in seconds. Raises ValueError for values that no recorder writes.
    """
    group, ranks = str(team[0]), tuple(team[1])
    sent, received = (whole(size, "a size of") for size in sizes)
    if len({whole(rank, "a group with rank") for rank in ranks}) < len(ranks):
        raise ValueError(f"a group with the ranks {list(ranks)}")
    plain = DTYPES.get(dtype, "uint8")
    letters = name.replace("_", "").lower()  # all_gather is also _allgather_base
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
    return Collective(kind, (group, ranks), whole(seq, "the number"), problem, **job)


def check_times(recording: Recording) -> None:
    """Raises ValueError for impossible times. A step takes at least a microsecond."""
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
    """From record(), or a dump of torch, which marks no steps.

    In a dump the gaps are those between its operations. NCCL's dump has the ranks of its groups in
    `pg_config`; gloo's has them under another name, so that only those of the default group are
    known.
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
        everyone = range(world_size) if label == "default_pg" else ()
        team = (group if label in ("", "undefined") else label, ranks_of.get(group) or everyone)
        dtypes = [*entry["input_dtypes"], *entry["output_dtypes"], "Byte"]
        sizes = [elements(entry["input_sizes"]), elements(entry["output_sizes"])]
        begin_s = (created_ns - start_ns) / 1e9 if has_times else 0.0
        job_s = (entry.get("duration_ms") or 0) / 1e3
        seq = entry["collective_seq_id"]
        # on some ranks there is no input
        calls.append(collective(name, team, seq, dtypes[0], sizes, begin_s=begin_s, job_s=job_s))
    return Recording(steps, (end_ns - start_ns) / 1e9, calls)


def elements(shapes: list[list[int]]) -> int:
    """Number of elements of all tensors together."""
    return sum(math.prod(shape) for shape in shapes)


# -- Kineto ----------------------------------------------------------------------------------------


def kineto(content: dict[str, Any], about: dict[str, Any]) -> Recording:
    """From a trace of torch.profiler. about: its `distributedInfo`.

    The steps are those of the profiler (`ProfilerStep#N`) or of `--profile` of these scripts.
    """
    events = [event for event in content["traceEvents"] if event.get("ph") == "X"]
    events.sort(key=lambda event: event["ts"])
    configs = about.get("pg_config") or []
    ranks_of = {str(config.get("pg_name")): config["ranks"] for config in configs}
    steps = [event for event in events if is_step(event)]
    calls = over_nccl(events, ranks_of) or over_gloo(events, configs)
    if not calls:
        raise ValueError("a Kineto trace without collectives of NCCL or gloo")
    start_us = min(event["ts"] for event in steps) if steps else calls[0].begin_s * 1e6
    last = calls[-1].begin_s
    end_us = max(event["ts"] + event["dur"] for event in steps) if steps else last * 1e6
    within = []
    for call in calls:
        begin_us = call.begin_s * 1e6
        if start_us <= begin_us <= end_us:
            within.append(replace(call, begin_s=(begin_us - start_us) / 1e6))
    return Recording(len(steps), (end_us - start_us) / 1e6, within)


def is_step(event: dict[str, Any]) -> bool:
    """Whether an event is a step as the CPU saw it. The GPU's events have copies of them."""
    name = event["name"]
    is_named = name == STEP or name.startswith("ProfilerStep#")
    return is_named and event.get("cat") == "user_annotation"


def over_nccl(events: list[dict[str, Any]], ranks_of: dict[str, Any]) -> list[Collective]:
    """The calls of NCCL, whose arguments torch records, with the times of their kernels.

    `begin_s` is still on the clock of the trace. ranks_of: of each group, by its name.
    """
    comms = [event for event in events if "Collective name" in (event.get("args") or {})]
    kernels_s: dict[Any, float] = {}  # by the operation that launched the kernel
    for event in comms:
        if event.get("cat") == "kernel":
            kernels_s[event["args"].get("External id")] = event["dur"] / 1e6
    calls = []
    for event in comms:
        about = event["args"]
        name = about["Collective name"]
        if event.get("cat") != "cpu_op" or name in MARKERS:
            continue
        group = str(about.get("Process Group Name", about.get("Process Group ID", "")))
        label = about.get("Process Group Description") or ""
        team = (group if label in ("", "undefined") else label, ranks_in(about, group, ranks_of))
        sizes = [about["In msg nelems"], about["Out msg nelems"]]
        job_s = kernels_s.get(about.get("External id"), 0.0)
        times = {"begin_s": event["ts"] / 1e6, "job_s": job_s}
        call = collective(name, team, about.get("Seq") or 0, about["dtype"], sizes, **times)
        splits = [about.get(f"{side} split size") for side in ("In", "Out")]
        if not call.problem and any(map(is_uneven, splits)):
            call = replace(call, problem=UNEVEN)
        calls.append(call)
    return calls


def is_uneven(splits: Any) -> bool:
    """Whether the parts of an all-to-all differ: `[1, 2]`. An abbreviated list may differ, too."""
    return len({*re.findall(r"\d+|\.\.\.", str(splits or ""))}) > 1


def ranks_in(about: dict[str, Any], group: str, ranks_of: dict[str, Any]) -> Sequence[int]:
    """The ranks of an operation's group: torch abbreviates a long list in the operation itself."""
    text = about.get("Process Group Ranks") or ""
    if "..." not in text and (ranks := re.findall(r"\d+", text)):
        return [int(rank) for rank in ranks]
    if group in ranks_of:
        return list(ranks_of[group])
    start, stride = about.get("Global rank start", -1), about.get("Global rank stride", -1)
    count = about.get("Group size", 0)
    return range(start, start + count * stride, stride) if start >= 0 and stride > 0 else ()


def over_gloo(events: list[dict[str, Any]], configs: list[dict[str, Any]]) -> list[Collective]:
    """The calls of gloo, on the clock of the trace. configs: of all groups.

    `c10d::allreduce_` of the training thread has the order and the sizes; `gloo:all_reduce` of the
    thread that works on it has the type and the time. The profiler records no group, so that there
    must be only one, and sizes only if asked. Raises ValueError if sizes are missing.
    """
    only = configs[0] if len(configs) == 1 else {}
    team = (only.get("pg_desc") or "an unknown group", only.get("ranks", ()))
    work: dict[int, list[dict[str, Any]]] = defaultdict(list)  # by number of elements, newest first
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
        times = {"begin_s": event["ts"] / 1e6, "job_s": done["dur"] / 1e6}
        call = collective(name, team, 0, dtype, sizes, **times)
        splits = event["args"].get("Concrete Inputs", [])[3:5]
        if not call.problem and "alltoall" in name and any(map(is_uneven, splits)):
            call = replace(call, problem=UNEVEN)
        calls.append(call)
    return calls


def tensor_sizes(event: dict[str, Any]) -> list[int]:
    """Number of elements of each argument of an event, lists of tensors included."""
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
    """Elements that an operation of c10d sends and receives: its tensors are (output, input), or
    both in one. The profiler leaves out a list of lists, which has a tensor of each rank."""
    first, second = [*arguments, 0, 0][:2]
    if name == "barrier":  # its tensor only tells the device
        return 0, 0
    if not any(word in name for word in ("gather", "scatter", "alltoall")):
        return first, first
    return second or first * ranks, first or second * ranks


# -- what is replayed ------------------------------------------------------------------------------


class Plan(NamedTuple):
    """What is replayed: the calls of each rank, and their kinds."""

    steps: int
    time_s: float  # of the steps; 0: without gaps
    calls: list[list[Collective]]
    kinds: list[Kind]
    lines: list[str]  # what is not replayed, and what was not recorded


def choose(recordings: Sequence[Recording], only: Sequence[str] = (), gaps: bool = True) -> Plan:
    """The operations that all ranks of a group have recorded: any other one would hang."""
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
    lines.append(f"not replayed: {lost.total()} of {sum(map(len, asked))}")
    kinds = sorted({call.kind for calls in kept for call in calls})
    steps = max(1, *(recording.steps for recording in recordings))
    time_s = max(recording.time_s for recording in recordings)
    if not min(recording.steps for recording in recordings):
        steps, kept = 1, [since_first(calls) for calls in kept]
        time_s = max((call.begin_s for calls in kept for call in calls), default=0.0)
        lines.append("the recording marks no steps: `a step` is all of it")
    if not min(recording.time_s for recording in recordings):
        time_s = 0.0
        lines.append("the recording has no times: replayed without gaps")
    elif not any(call.job_s for calls in kept for call in calls):
        lines.append("the recording has no durations of operations: `job` is empty")
    return Plan(steps, time_s if gaps else 0.0, kept, kinds, lines)


def since_first(calls: list[Collective]) -> list[Collective]:
    """The calls of a rank with the first at 0. Ring buffers do not begin together."""
    return [replace(call, begin_s=call.begin_s - calls[0].begin_s) for call in calls]


def find_problems(calls_by_rank: list[list[Collective]]) -> dict[Collective, str]:
    """Why each operation cannot be replayed; "" if it can be.

    Ring buffers do not begin together. Coalesced operations share a number and may be equal, so
    each rank of the group must have an operation equally often, and all in the same order.
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
            problem = "not recorded alike on every rank of its group"
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
            problems[call] = f"in another order on rank {odd[0]} than on rank {members[0]}"
    return problems


# -- replay ----------------------------------------------------------------------------------------

Replay = dict[Kind, list[float]]  # seconds of each call


def play(calls: list[Collective], starts: dict[Any, Any], end_s: float = 0) -> Replay:
    """Start all operations, with the job's gaps if `end_s` is given.

    Returns the seconds of each from its start until it is done. The replay waits for an operation
    before it starts the next one of its group. starts: a function that starts an operation, by kind
    and team. end_s: seconds until the end of the steps.
    """
    seconds: Replay = defaultdict(list)
    under_way: dict[Any, tuple[Kind, float, Any]] = {}  # one for each team: its start, torch's work
    zero = time.perf_counter()

    def look(awaited: object = None) -> None:
        """Record the time of what is done, after waiting for the operation of the given team."""
        for team, (kind, begun, work) in list(under_way.items()):
            if team == awaited or work.is_completed():
                wait(work)
                seconds[kind].append(time.perf_counter() - begun)
                del under_way[team]

    for call in calls:
        look(call.team)
        while end_s and time.perf_counter() - zero < call.begin_s:
            look()
        begun = time.perf_counter()
        under_way[call.team] = (call.kind, begun, starts[call.kind, call.team]())
        look()
    for team in list(under_way):
        look(team)
    while time.perf_counter() - zero < end_s:
        pass
    return seconds


def play_on_streams(
    calls: list[Collective], starts: dict[Any, Any], streams: dict[Any, Any], end_s: float = 0
) -> Replay:
    """The same over NCCL, as in a job: operations are queued, and the host waits at the end.

    Each operation is timed by two events on a stream of its team. streams: by team.
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
            starts[call.kind, call.team]().wait()  # the stream waits, the host does not
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
    """Block the host until the work is done, on a device as well."""
    work.wait()
    if torch.cuda.is_initialized():  # only the stream has waited
        torch.cuda.current_stream().synchronize()


def build(plan: Plan, job: Job, key: Key, group: Group) -> Workload:
    """This rank's operations with the job's gaps and without, and one of each kind alone."""
    starts: dict[tuple[Kind, Any], Step] = {}
    mine = {(call.kind, call.team) for call in plan.calls[job.rank]}
    for team in sorted({call.team for calls in plan.calls for call in calls}):  # alike on all ranks
        _, ranks = team
        rendezvous(group)
        team_group: Any = dist.new_group(list(ranks), backend=job.backend)
        if job.rank in ranks:
            group.more.append(team_group)
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

    parts: dict[str, Step] = {"back to back": replay} if plan.time_s else {}
    for kind in plan.kinds:
        parts[str(kind)] = partial(one_of, kind)
    return Workload(partial(replay, end_s=plan.time_s), parts, returned=means)


def means(replays: list[Replay]) -> list[dict[Kind, float]]:
    """The mean seconds of each kind, in each replay."""
    rows = []
    for replay in replays:
        rows.append({kind: fmean(seconds) for kind, seconds in replay.items()})
    return rows


def prepared(kind: Kind, ranks: tuple[int, ...], group: Any, job: Job) -> Step:
    """A function that starts an operation, which has been checked once. It sums, and its root is
    the first rank of the group, since neither is recorded. Raises ValueError for wrong values."""
    operation = OPERATIONS[kind.op]
    part, to_send, to_receive = kind.counts()
    redop = "sum" if operation.reduces else "none"
    member = Member(group, sorted(ranks).index(job.rank), len(ranks), part, redop)
    zeros: Any = partial(torch.zeros, dtype=getattr(torch, kind.dtype), device=job.device)
    received = zeros(to_receive)
    in_place = operation.variants[0] == "in_place"
    sent = received if in_place else zeros(to_send)
    start = partial(operation.call, sent, received, member, async_op=True)
    if kind.op == "barrier" and "nccl" in job.backend:  # or torch warns that it guesses the device
        start = partial(start, device_ids=[job.device.index])
    operations.fill(sent, received, member)
    wait(start())
    if operations.count_wrong(operation, received, member):
        raise ValueError(f"{kind.op} of {kind.group} delivered wrong values")
    sent.zero_()
    received.zero_()
    return start


def derive(plan: Plan, case: Case, times: Times, facts: list[None]) -> None:
    """Fill in the metrics. Each iteration's time is the maximum over ranks.

    times.returned: the mean of each kind in each replay.
    """
    metrics = case.metrics
    timed = {"step": "back_to_back"}
    if plan.time_s:
        timed = {"step": "with_gaps", "back to back": "back_to_back"}
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
    """The row of a kind, but for its share."""
    calls = [call for row in plan.calls for call in row if call.kind == kind]
    by_rank = []  # of the ranks that have the kind, its mean in each replay
    for replays in times.returned:
        if kind in replays[0]:
            by_rank.append([replay[kind] for replay in replays])
    seconds = {"replayed": median(np.max(by_rank, axis=0)), "alone": times.median(str(kind))}
    job_s = [call.job_s for call in calls if call.job_s]
    if job_s:
        seconds["job"] = median(job_s)
    row: dict[str, Any] = kind._asdict()
    row["calls"] = len(calls) / len(by_rank) / plan.steps
    row["bus_factor"] = OPERATIONS[kind.op].bus(kind.group_ranks)
    bus_bytes = row["bus_factor"] * kind.size_bytes
    for name, estimate in seconds.items():
        row[f"{name}_s"] = estimate
        row[f"{name}_busbw_gb_per_s"] = bus_bytes / estimate / 1e9
    row["replayed_over_alone"] = telling(seconds["replayed"] / seconds["alone"])
    return row


COLUMNS: Columns = {  # GB/s: busbw
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
    "job\n(GB/s)": metric("job_busbw_gb_per_s"),
}


def answer(metrics: dict[str, Any]) -> str:
    """How much of the job's step is communication."""
    alone, job_s = metrics["back_to_back_s"], metrics.get("job_step_s")
    sentence = f"a step: {alone} back to back"
    if not job_s:
        return sentence
    part = (alone / job_s).text("%", 100, 0)
    of_job = f"{part} of the job's {show_seconds(job_s)}"
    return f"{sentence}, {of_job}; {metrics['with_gaps_s']} with its gaps"


def check_plan(plan: Plan, recordings: Sequence[Recording], bench: Benchmark) -> None:
    """Raises ValueError if this rank cannot replay the plan."""
    if not plan.kinds:
        recorded = {call.kind.group for recording in recordings for call in recording.calls}
        groups = cli.cut(sorted(recorded))
        none = f"no operation of the groups {groups} can be replayed"
        raise ValueError(f"{none}; {'; '.join(plan.lines)}")
    # a block has one untimed replay at its start and at least one timed replay
    if 2 * plan.time_s > bench.args.timeout:
        took = f"the recorded steps took {plan.time_s:g} s, as long as a replay with gaps takes"
        advice = f"record fewer steps, or use --no-gaps or --timeout {3 * plan.time_s:.0f}"
        raise ValueError(f"{took}; {advice}")
    needed_bytes = 0  # an operation of a team uses the same two tensors in every call
    for kind, _ in {(call.kind, call.team) for call in plan.calls[bench.job.rank]}:
        _, to_send, to_receive = kind.counts()
        needed_bytes += (to_send + to_receive) * itemsize(kind.dtype)
    advice = "the number of groups, by --only"
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
        recordings: list[Recording] = []  # of all ranks; a dry run may lack the folder
        if not args.dry_run or share(Path(args.trace).is_dir()):
            mine = bench.prepare("FOLDER", lambda: read(args.trace, job.rank, job.world_size))
            every = share(gather(mine))
            recordings = bench.prepare("FOLDER", lambda: in_order(every))
        # what is replayed, whichever file it is from
        content = repr([(of.steps, of.time_s, of.calls) for of in recordings])
        digest = hashlib.sha256(content.encode()).hexdigest()[:12]
        name = f"{args.trace}, groups {only}"
        key = {"only": only, "gaps": not args.no_gaps, "recording": digest}
        bench.announce({"A recorded job again": [(name, job.world_size, key)]})
        plan = choose(recordings, args.only, not args.no_gaps)
        bench.prepare("FOLDER", lambda: check_plan(plan, recordings, bench))
        bench.print(f"\n# {described(plan, digest, only)}")
        if case := bench.measure(key, name, partial(build, plan, job), partial(derive, plan)):
            rows = [
                Case(key=row, ranks=[], metrics=row, part=case.part)
                for row in case.metrics.get("operations", [])
            ]
            if case.failed:
                bench.print(f"# {case.check}")
            else:
                bench.print_table(COLUMNS, rows)
            bench.conclude(plan.lines if case.failed else [answer(case.metrics), *plan.lines], case)
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
