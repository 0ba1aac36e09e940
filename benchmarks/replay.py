#!/usr/bin/env python3
"""Is the network slow, or the job? The collectives of a recorded job again, without the job.

    back to back = each operation as soon as the one before it in its group is done
    with gaps    = none earlier than in the job: busy waits take the place of computing
    replayed     = an operation within the latter, from its start until it is seen to be done: mean
                   of a step's calls, p50 of 12 replays; the slowest rank counts
    alone        = the same operation with nothing else under way
    busbw        = bytes / time * factor, as in collectives.py; bytes: the larger of what a rank
                   sends and receives
    share        = calls * replayed, of the sum over all rows

Paste this into the job; all ranks call it after its last `steps` steps. started_ns: time.time_ns()
before them. The recorder keeps 2,000 operations, or TORCH_FR_BUFFER_SIZE. On NCCL it is
_dump_nccl_trace_json.

    def record(folder, started_ns, steps):
        trace = json.loads(torch._C._distributed_c10d._dump_fr_trace_json())
        trace |= {"started_ns": started_ns, "ended_ns": time.time_ns(), "steps": steps}
        trace |= {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
        groups = dist.distributed_c10d._world.pg_map
        trace["groups"] = {g.group_name: dist.get_process_group_ranks(g) for g in groups}
        Path(folder, f"fr_{dist.get_rank()}.json").write_text(json.dumps(trace))

    torchrun --nproc-per-node 4 benchmarks/replay.py trace/
    torchrun --nproc-per-node 8 benchmarks/replay.py kineto_traces/ --only dp
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        benchmarks/replay.py trace/ --scale-size 0.5 --json report.jsonl

It reads such files, Kineto traces and NCCL's pickled dumps, one a rank. Written for this project.
BSD-3-Clause. docs/replay.md shows how to read the table.
"""

import argparse
import gzip
import hashlib
import io
import itertools
import json
import math
import os
import pickle
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cli
from common.benchmark import Benchmark, Workload
from common.dist import FOREVER, Group, Job, gather, peers, share
from common.memory import too_much
from common.report import Case
from common.stats import median_interval, percentiles
from common.table import Columns, half_width, metric, render
from common.timing import Step

Ranks = tuple[int, ...]

N = 0
# times what a rank brings it sends and receives (N: a part for each rank); busbw / algbw; the call.
# Not recorded, and so chosen: the reduction (a sum) and the root (the group's first rank).
# fmt: off
OPERATIONS: dict[str, tuple[int, int, Callable[[int], float], Callable[..., Any]]] = {
    "all_reduce": (1, 1, lambda n: 2 * (n - 1) / n, lambda d, s, **on: dist.all_reduce(s, **on)),
    "all_gather": (1, N, lambda n: (n - 1) / n, dist.all_gather_into_tensor),
    "reduce_scatter": (N, 1, lambda n: (n - 1) / n, dist.reduce_scatter_tensor),
    "all_to_all": (N, N, lambda n: (n - 1) / n, dist.all_to_all_single),
    "broadcast": (1, 1, lambda n: 1, lambda d, s, **on: dist.broadcast(s, group_src=0, **on)),
    "reduce": (1, 1, lambda n: 1, lambda d, s, **on: dist.reduce(s, group_dst=0, **on)),
    "barrier": (1, 1, lambda n: 0, lambda d, s, **on: dist.barrier(**on)),
}
# fmt: on
MARKERS = ("coalesced", "wait", "init")  # entries that move nothing
DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16"}
DTYPES |= {"Long": "int64", "Int": "int32", "Char": "int8", "Byte": "uint8", "Bool": "uint8"}
FILE = re.compile(r"(?:fr|rank)[_-]?(\d+)")  # fr_0.json, nccl_trace_rank_0, rank-0.json.gz
LARGEST_FILE, MOST_OPS = 2**32, 20_000
ARENA = 2**28  # bytes that the operations walk through: more than caches hold
PLAYS = 12  # that time single operations


def parse_args() -> argparse.Namespace:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("trace", metavar="FOLDER", help="the recordings: fr_0.json or rank0...json for each rank")
    only = "the operations of these groups, e.g. dp for mesh_dp (default: all)"
    add("--only", type=cli.list_of(str), metavar="GROUP", help=only)
    scale = "times the recorded sizes (default: 1)"
    add("--scale-size", type=cli.positive_float, default=1.0, metavar="F", help=scale)
    cli.add_common_flags(parser, min_iters=12, max_seconds=10)
    return parser.parse_args()


# -- what a recording holds ------------------------------------------------------------------------


class Kind(NamedTuple):
    """Operations that share a row. size_bytes: the larger of what a rank sends and receives."""

    op: str
    group: str
    group_ranks: int
    dtype: str
    size_bytes: int


@dataclass(frozen=True)
class Op:
    """An operation of a rank. count: elements that it brings. why: the reason not to replay it."""

    name: str
    group: str
    ranks: Ranks
    seq: int
    dtype: str
    begin_s: float
    job_s: float | None = None
    blocking: bool = False
    count: int = 0
    why: str = ""

    def elements(self) -> tuple[int, int]:
        """Sent and received."""
        sends, receives, *_ = OPERATIONS[self.name]
        return self.count * (sends or len(self.ranks)), self.count * (receives or len(self.ranks))

    @property
    def kind(self) -> Kind:
        size_bytes = max(self.elements()) * getattr(torch, self.dtype).itemsize
        return Kind(self.name, self.group, len(self.ranks), self.dtype, size_bytes)

    @property
    def place_bytes(self) -> int:
        """Of input and output together, up to a multiple of 64."""
        return -(-sum(self.elements()) * getattr(torch, self.dtype).itemsize // 64) * 64


class Recording(NamedTuple):
    """Of one rank. time_s: of all its steps."""

    world_size: int
    steps: int
    time_s: float
    ops: list[Op]


class NoClasses(pickle.Unpickler):
    """For dicts, lists, strings and numbers: whatever else a pickle asks for could run code."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise ValueError(f"it asks for the class {module}.{name}, and a recording has none")


def read(path: Path) -> Recording:
    """A rank's file. Raises ValueError, in one line."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            data = file.read(LARGEST_FILE + 1)
        if len(data) > LARGEST_FILE:
            raise ValueError("it has over 4 GiB; record fewer steps")
        is_json = data[:64].lstrip()[:1] == b"{"
        content = json.loads(data) if is_json else NoClasses(io.BytesIO(data)).load()
        return kineto(content) if "traceEvents" in content else flight_recorder(content)
    except Exception as error:  # a damaged pickle raises anything
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise ValueError(f"{path}: expected a rank's recording, got {kind}{error}") from None


def flight_recorder(content: dict[str, Any]) -> Recording:
    """From record(), or NCCL's own dump, which has the ranks of its groups in pg_config."""
    groups = content.get("groups") or {
        name: json.loads(config["ranks"]) for name, config in content["pg_config"].items()
    }
    entries = content.get("entries", [])
    created = [whole(e["time_created_ns"]) for e in entries] or [0]
    start = whole(content.get("started_ns", min(created)))
    end = whole(content.get("ended_ns", max(created)))
    ops = []
    for e in entries:
        name = e["profiling_name"].rpartition(":")[2].partition(" ")[0]  # of `nccl:send 0->1`
        if e["time_created_ns"] < start or name in MARKERS:
            continue
        group, label = e["process_group"]
        ranks = tuple(map(whole, groups.get(group, ())))
        dtype = [*e["input_dtypes"], *e["output_dtypes"], "Byte"][0]  # some ranks have no input
        begin_s, ms = (e["time_created_ns"] - start) / 1e9, e.get("duration_ms")
        label = group if label in ("", "undefined") else label
        op = Op(name, label, ranks, whole(e["collective_seq_id"]), dtype, begin_s, ms and ms / 1e3)
        shapes = e["input_sizes"], e["output_sizes"]
        ops.append(known(op, *(sum(math.prod(map(whole, s)) for s in some) for some in shapes)))
    world_size = content.get("world_size", max(map(len, groups.values()), default=0))
    steps = max(1, whole(content.get("steps", 1)))
    return Recording(whole(world_size), steps, (end - start) / 1e9, ops)


def kineto(content: dict[str, Any]) -> Recording:
    """From torch.profiler: operations by record_param_comms, their times from NCCL's kernels."""
    info = content["distributedInfo"]
    groups = {group["pg_name"]: group.get("ranks", []) for group in info.get("pg_config", [])}
    events = [e for e in content["traceEvents"] if e.get("ph") == "X"]
    calls = [e for e in events if "Collective name" in e.get("args", {})]
    marks = [e for e in events if "ProfilerStep#" in e["name"]]
    marks = [e for e in marks if e["cat"] == "user_annotation"]  # the GPU has copies
    start = min((e["ts"] for e in marks or calls), default=0)
    end = max((e["ts"] + e["dur"] for e in marks or calls), default=0)
    job_s = {e["args"]["External id"]: e["dur"] / 1e6 for e in calls if e.get("cat") == "kernel"}
    ops = []
    for e in sorted(calls, key=lambda e: e["ts"]):
        a, name = e["args"], e["args"]["Collective name"]
        comms = e["name"] == "record_param_comms" and name not in MARKERS
        if not comms or not start <= e["ts"] <= end:
            continue
        group, ranks = a.get("Process Group Name", ""), a.get("Process Group Ranks", "[]")
        members = groups.get(group, []) if "..." in ranks else json.loads(ranks)
        label, seq = a.get("Process Group Description") or group, whole(a.get("Seq", 0))
        blocking = str(a.get("Is asynchronized op", True)).lower() == "false"
        begin_s, took_s = (e["ts"] - start) / 1e6, job_s.get(a["External id"])
        op = Op(name, label, tuple(map(whole, members)), seq, a["dtype"], begin_s, took_s, blocking)
        ops.append(known(op, whole(a["In msg nelems"]), whole(a["Out msg nelems"])))
    return Recording(whole(info["world_size"]), len(marks) or 1, (end - start) / 1e6, ops)


def known(op: Op, sent: int, received: int) -> Op:
    """Under torch's own name, as all_gather for _allgather_base, or why it cannot be replayed."""
    word = op.name.replace("_", "").lower()
    names = [name for name in OPERATIONS if word.startswith(name.replace("_", ""))]
    dtype = "uint8" if op.dtype.startswith("Float8") else DTYPES.get(op.dtype)
    if not names or dtype is None:
        return replace(op, why=f"this {'dtype' if names else 'operation'} is not known")
    if not op.ranks:
        return replace(op, why="the ranks of its group are not recorded")
    op = replace(op, name=max(names, key=len), dtype=dtype, count=1)
    op = replace(op, count=max(sent // op.elements()[0], received // op.elements()[1]))
    even = op.elements() == (sent, received)
    return op if even else replace(op, why="parts differ in size, and only the sum is recorded")


def whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{str(value)[:40]!r} where a whole number from 0 on belongs")
    return value


# -- what can be replayed --------------------------------------------------------------------------


class Plan(NamedTuple):
    """What all ranks know of the recording. lines: the last ones of the output."""

    steps: int
    step_s: float
    groups: list[tuple[str, Ranks]]
    kinds: list[Kind]
    lines: list[str]
    digest: str


def match(rows: Sequence[Sequence[Op]]) -> list[list[Op]]:
    """Each rank's operations, with a reason where not all ranks of the group recorded the same.

    One that a rank lacks would hang: ring buffers do not begin together.
    """
    calls: dict[Any, list[tuple[int, int]]] = defaultdict(list)
    for rank, ops in enumerate(rows):
        times: Counter[Any] = Counter()
        for i, op in enumerate(ops):
            call = op.group, op.ranks, op.seq
            calls[call, times[call]].append((rank, i))  # coalesced operations share a number
            times[call] += 1
    done = [list(ops) for ops in rows]
    for ((_, ranks, _), _), places in calls.items():
        ops = [rows[rank][i] for rank, i in places]
        why = next((op.why for op in ops if op.why), "")
        if not why and [rank for rank, _ in places] != sorted(ranks):
            why = "not recorded on every rank of its group"
        elif not why and len({(op.name, op.count, op.dtype) for op in ops}) > 1:
            why = "its ranks recorded different calls"
        for rank, i in places:
            done[rank][i] = replace(rows[rank][i], why=why)
    return done


def make_plan(
    found: Sequence[Recording], only: Sequence[str] = (), scale: float = 1.0
) -> tuple[Plan, list[list[Op]]]:
    """And each rank's operations. Raises ValueError where `only` names no group."""
    labels = sorted({op.group for each in found for op in each.ops})
    chosen = {x for x in labels if not only or {x, x.removeprefix("mesh_")} & {*only}}
    if only and not chosen:
        raise ValueError(f"--only: expected some of {', '.join(labels)}, got {', '.join(only)}")
    rows = match([[op for op in each.ops if op.group in chosen] for each in found])
    every = list(itertools.chain(*rows))
    lost = Counter(f"{op.name} of {op.group}: {op.why}" for op in every if op.why)
    lines = [f"# {count} x {text}" for text, count in lost.items()]
    lines.append(f"# not replayed: {lost.total()} of {len(every)}")
    rows = [[op for op in ops if not op.why] for ops in rows]
    if scale != 1:  # the job's times were those of other sizes
        for ops in rows:
            ops[:] = [replace(op, count=math.ceil(op.count * scale), job_s=None) for op in ops]
    steps, left = max(each.steps for each in found), list(itertools.chain(*rows))
    step_s = max(each.time_s for each in found) / steps
    groups, kinds = sorted({(op.group, op.ranks) for op in left}), sorted({op.kind for op in left})
    digest = hashlib.sha256(repr(found).encode()).hexdigest()[:12]
    return Plan(steps, step_s, groups, kinds, lines, digest), rows


def read_own(folder: str, rank: int, world_size: int) -> Recording:
    files = {FILE.search(path.name): path for path in Path(folder).iterdir()}
    own = [path for found, path in files.items() if found and int(found[1]) == rank]
    if not own:
        raise ValueError(f"{folder} has no recording of rank {rank}, e.g. fr_{rank}.json")
    recording = read(own[0])
    if len(recording.ops) > MOST_OPS:
        raise ValueError(f"{own[0]} has over {MOST_OPS:,} operations; record fewer steps")
    if (size := recording.world_size) != world_size:
        raise ValueError(
            f"{folder} was recorded on {size} ranks, and this job has {world_size}; e.g. "
            f"torchrun --nproc-per-node {size} benchmarks/replay.py {folder}"
        )
    return recording


def load(args: argparse.Namespace, job: Job) -> tuple[str | None, Any, list[Op]]:
    """Why this cannot be replayed here, or the plan and this rank's operations. On all ranks."""
    problem, mine, plan = None, None, None
    rows: list[list[Op]] = [[]] * job.world_size
    try:
        mine = read_own(args.trace, job.rank, job.world_size)
    except (OSError, ValueError) as error:
        problem = str(error)
    if given := gather((problem, mine)):
        problem = next((text for text, _ in given if text), None)
    if given and not problem:
        try:
            found = [recording for _, recording in given]
            plan, rows = make_plan(found, args.only or (), args.scale_size)
        except ValueError as error:
            problem = str(error)
    part: list[Any] = [None]
    with peers():
        dist.scatter_object_list(part, rows if job.rank == 0 else None)
    tight = gather(too_much(arena_bytes(part[0]), job, "--scale-size")) or []
    return *share((problem or next(filter(None, tight), None), plan)), part[0]


# -- the replay ------------------------------------------------------------------------------------


def arena_bytes(ops: Sequence[Op]) -> int:
    needs = [op.place_bytes for op in ops]
    return min(sum(needs), max([ARENA, *needs]))


def play(ops: Sequence[Op], calls: Sequence[Step], until_s: float = 0.0) -> list[float]:
    """Make all calls, with the job's gaps if its end is given. Seconds of each until seen done.

    One is waited for where the next of its group starts; at once if the job is known to have done.
    """
    begun, ended = [0.0] * len(ops), [0.0] * len(ops)
    under_way: dict[Any, tuple[int, Any]] = {}  # by group
    start = time.perf_counter()

    def look() -> None:
        for i, work in under_way.values():
            if not ended[i] and work.is_completed():
                ended[i] = time.perf_counter()

    def finish(group: Any) -> None:
        if group in under_way:
            i, work = under_way.pop(group)
            wait(work)
            ended[i] = ended[i] or time.perf_counter()

    for i, op in enumerate(ops):
        finish((op.group, op.ranks))
        while until_s and time.perf_counter() - start < op.begin_s:
            look()
        begun[i] = time.perf_counter()
        under_way[op.group, op.ranks] = i, calls[i]()
        if op.blocking:
            finish((op.group, op.ranks))
        look()
    for group in list(under_way):
        finish(group)
    while time.perf_counter() - start < until_s:
        pass
    return [end - begin for begin, end in zip(begun, ended, strict=True)]


def wait(work: Any) -> None:
    work.wait()
    if torch.cuda.is_initialized():  # there only the stream has waited
        torch.cuda.current_stream().synchronize()


def build(ops: Sequence[Op], plan: Plan, job: Job, group: Group) -> Workload:
    """This rank's recorded steps, with gaps and without, and one call of each kind alone."""
    made = {}
    for name, ranks in plan.groups:
        new: Any = dist.new_group(list(ranks), backend=job.backend, timeout=FOREVER)
        if job.rank in ranks:
            made[name, ranks] = new
            group.more.append(new)
            dist.all_reduce(torch.ones(1, device=job.device), group=new)  # NCCL connects here
    memory = torch.empty(arena_bytes(ops), dtype=torch.uint8, device=job.device).fill_(0)
    calls: list[Step] = []
    alone: dict[Kind, dict[Ranks, list[Step]]] = defaultdict(lambda: defaultdict(list))
    at = 0
    for op in ops:  # their buffers are successive places of the memory
        at = at if at + op.place_bytes <= len(memory) else 0
        place = memory[at : at + op.place_bytes].view(getattr(torch, op.dtype))
        sent, received = op.elements()
        call = partial(OPERATIONS[op.name][3], place[sent : sent + received], place[:sent])
        calls.append(partial(call, group=made[op.group, op.ranks], async_op=True))
        alone[op.kind][op.ranks].append(calls[-1])
        at += op.place_bytes

    def one_of(kind: Kind) -> Step:
        turns = [itertools.cycle(alone[kind][ranks]) for ranks in sorted(alone[kind])]

        def step() -> None:
            for turn in turns:
                wait(next(turn)())

        return step

    end_s = plan.step_s * plan.steps
    with_gaps, back_to_back = partial(play, ops, calls, end_s), partial(play, ops, calls)

    def facts() -> dict[str, Any]:
        some: dict[Kind, dict[str, Any]] = {}
        for kind in {op.kind for op in ops}:
            mine = [op.job_s for op in ops if op.kind == kind]
            some[kind] = {"calls": len(mine) / plan.steps, "job": mine, "times": []}
        for _ in range(PLAYS):
            dist.barrier(group.control)
            seconds = with_gaps()
            for kind, row in some.items():
                those = [s for op, s in zip(ops, seconds, strict=True) if op.kind == kind]
                row["times"].append(float(np.mean(those)))
        since_ns = time.time_ns()
        back_to_back()
        return {"kinds": some, "unseen": unseen(ops, since_ns, made, job.backend)}

    steps = {"with gaps": with_gaps, "back to back": back_to_back}
    return Workload(steps | {str(kind): one_of(kind) for kind in plan.kinds}, facts=facts)


def unseen(ops: Sequence[Op], since_ns: int, groups: dict[Any, Any], backend: str) -> str:
    """What torch's flight recorder should have seen of a replay, and has not."""
    c10d: Any = torch._C._distributed_c10d
    dump = c10d._dump_nccl_trace_json if backend == "nccl" else c10d._dump_fr_trace_json
    names = {pg.group_name: ranks for (_, ranks), pg in groups.items()}
    seen = flight_recorder(json.loads(dump()) | {"groups": names, "started_ns": since_ns})
    wanted: Counter[Any] = Counter()
    for op in ops:
        name, count = op.name, op.count
        if name == "reduce_scatter" and backend == "gloo":  # it has this one as an all_reduce
            name, count = "all_reduce", op.elements()[0]
        wanted[name, count, op.dtype, op.ranks] += name != "barrier"
    wanted -= Counter((op.name, op.count, op.dtype, op.ranks) for op in seen.ops)
    return ", ".join(f"{times} x {what}" for what, times in wanted.items())


def derive(plan: Plan, case: Case, facts: list[dict[str, Any]]) -> None:
    """Of each replay the slowest rank counts. metrics["operations"] has the rows of the table."""
    m, slowest = case.metrics, {k: np.array(v).max(axis=0) for k, v in case.samples_s.items()}
    for name in ("with gaps", "back to back"):
        step, prefix = slowest[name] / plan.steps, name.replace(" ", "_")
        m |= percentiles(step, prefix) | {f"{prefix}_ci95_s": median_interval(step)}
    m |= {"job_step_s": plan.step_s, "step_bytes": 0, "operations": []}
    for kind in plan.kinds:
        rows = [fact["kinds"][kind] for fact in facts if kind in fact["kinds"]]
        times, calls = (
            np.max([r["times"] for r in rows], axis=0),
            np.mean([r["calls"] for r in rows]),
        )
        job = [seconds for r in rows for seconds in r["job"] if seconds is not None]
        p50 = {"replayed": np.median(times), "alone": np.median(slowest[str(kind)])}
        p50 |= {"job": np.median(job)} if job else {}
        row = kind._asdict() | {"calls": float(calls), "replayed_ci95_s": median_interval(times)}
        row["replayed_over_alone"] = float(p50["replayed"] / p50["alone"])
        for name, seconds in p50.items():
            bus = OPERATIONS[kind.op][2](kind.group_ranks) * kind.size_bytes / seconds / 1e9
            row |= {f"{name}_p50_s": float(seconds), f"{name}_busbw_gb_per_s": float(bus)}
        m["operations"].append(row)
        m["step_bytes"] += row["calls"] * kind.size_bytes
    total = sum(row["calls"] * row["replayed_p50_s"] for row in m["operations"])
    for row in m["operations"]:
        row["share"] = row["calls"] * row["replayed_p50_s"] / total
    lacks = [f"rank {i} lacks {fact['unseen']}" for i, fact in enumerate(facts) if fact["unseen"]]
    case.check = f"failed: the flight recorder of {lacks[0]}" if lacks else "passed"


COLUMNS: Columns = {  # GB/s: busbw
    "op": lambda row: row.key["op"],
    "group": lambda row: row.key["group"],
    "bytes": lambda row: cli.show_size(row.key["size_bytes"]),
    "calls": metric("calls", digits=1),
    "job\n(ms)": metric("job_p50_s", 1e3, 3),
    "job\n(GB/s)": metric("job_busbw_gb_per_s"),
    "replayed\n(ms)": metric("replayed_p50_s", 1e3, 3),
    "95% ci\n+-(ms)": half_width("replayed_ci95_s", 1e3, 3),
    "replayed\n(GB/s)": metric("replayed_busbw_gb_per_s"),
    "alone\n(ms)": metric("alone_p50_s", 1e3, 3),
    "alone\n(GB/s)": metric("alone_busbw_gb_per_s"),
    "replayed\n/ alone": metric("replayed_over_alone"),
    "share\n(%)": metric("share", 100, 0),
}


def output(m: dict[str, Any]) -> str:
    rows = [Case({n: r[n] for n in Kind._fields}, [], metrics=r) for r in m["operations"]]
    names = ("back_to_back_p50_s", "with_gaps_p50_s", "job_step_s")
    bare, here, job = (f"{m[name] * 1e3:.1f} ms" for name in names)
    text = f"# a step: {bare} back to back, {here} with the job's gaps; the job took {job}"
    return f"{render(COLUMNS, rows)}\n\n{text}"


def main() -> int:
    args = parse_args()
    os.environ["TORCH_FR_BUFFER_SIZE"] = str(2 * MOST_OPS)  # `unseen` looks back at a replay
    with Benchmark("replay", args) as bench:
        job = bench.job
        problem, plan, ops = load(args, job)
        if problem:
            bench.refuse(problem)
        groups: dict[str, list[int]] = defaultdict(list)
        for name, ranks in plan.groups:
            groups[name].append(len(ranks))
        text = ", ".join(f"{name} ({len(some)} x {some[0]})" for name, some in groups.items())
        number = len(ops) / plan.steps
        bench.print(
            f"\n# {number:g} operations a rank a step, {plan.steps} steps; groups: {text}\n"
        )
        key = {"recording": plan.digest, "only": ",".join(args.only or ["all"])}
        key |= {"scale_size": args.scale_size, "world_size": job.world_size}
        key |= {"device": job.device.type, "backend": job.backend}
        if plan.kinds:
            case = bench.measure(key, partial(build, ops, plan, job), partial(derive, plan))
            if case:
                bench.print(f"# {case.check}" if case.failed else output(case.metrics))
        elif job.rank == 0:
            bench.fail(f"{args.trace}: nothing of it can be replayed")
        bench.print("\n".join(plan.lines))
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
