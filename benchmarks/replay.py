#!/usr/bin/env python3
"""Is the network slow, or the job? The collectives of a recorded job again, without the job.

    back to back = each operation as soon as the one before it in its group is done
    with gaps    = none earlier than in the job: busy waits take the place of computing
    replayed     = an operation within the latter, from its start until it is seen to be done: mean
                   of a step's calls, p50 of the replays; the slowest rank counts
    alone        = the same operation with nothing else under way
    busbw        = bytes / time * factor, as in collectives.py
    share        = calls * replayed, of the sum over all rows

To record a job, paste record() of examples/record_collectives.py into it; all ranks call it after
their last steps.

    torchrun --nproc-per-node 4 benchmarks/replay.py trace/
    torchrun --nproc-per-node 8 benchmarks/replay.py kineto_traces/ --only dp
    torchrun --nproc-per-node 4 benchmarks/replay.py trace/ --scale-size 0.5 --json report.jsonl

It reads such files, Kineto traces and NCCL's pickled dumps, one a rank. Written for this project,
BSD-3-Clause. docs/replay.md shows how to read the table.
"""

import argparse
import gzip
import hashlib
import io
import json
import math
import pickle
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cli
from common.benchmark import Benchmark, Key, Workload
from common.dist import FOREVER, Group, Job, gather, share
from common.memory import too_much
from common.report import Case
from common.stats import Times, median_interval, percentiles
from common.table import Columns, interval_ends, metric, render
from common.timing import Step

N = 0
# parts that a rank sends and receives (N: one for each rank); busbw / algbw; the call.
# Not recorded, and so chosen: the reduction (a sum) and the root (the group's first rank).
OPERATIONS: dict[str, tuple[int, int, Callable[[int], float], Callable[..., Any]]] = {
    "all_reduce": (1, 1, lambda n: 2 * (n - 1) / n, lambda d, s, **on: dist.all_reduce(d, **on)),
    "all_gather": (1, N, lambda n: (n - 1) / n, dist.all_gather_into_tensor),
    "reduce_scatter": (N, 1, lambda n: (n - 1) / n, dist.reduce_scatter_tensor),
    "all_to_all": (N, N, lambda n: (n - 1) / n, dist.all_to_all_single),
    "broadcast": (1, 1, lambda n: 1, lambda d, s, **on: dist.broadcast(d, group_src=0, **on)),
    "reduce": (1, 1, lambda n: 1, lambda d, s, **on: dist.reduce(d, group_dst=0, **on)),
    "barrier": (1, 1, lambda n: 0, lambda d, s, **on: dist.barrier(**on)),
}
FILE = re.compile(r"(?:fr|rank)[_-]?(\d+)")  # fr_0.json, nccl_trace_rank_0, rank-0.json.gz
MARKERS = ("coalesced", "wait", "init")  # entries that move nothing
DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16"}
DTYPES |= {"Long": "int64", "Int": "int32", "Char": "int8", "Byte": "uint8", "Bool": "uint8"}
DTYPES |= {"Float8_e4m3fn": "uint8", "Float8_e5m2": "uint8"}


def parse_args() -> argparse.Namespace:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("trace", metavar="FOLDER", help="the recordings: fr_0.json or rank0...json for each rank")
    only = "the operations of these groups, e.g. dp for mesh_dp (default: all)"
    add("--only", type=cli.list_of(str), default=[], metavar="GROUP", help=only)
    scale = "times the recorded sizes (default: 1)"
    add("--scale-size", type=cli.positive_float, default=1.0, metavar="F", help=scale)
    cli.add_common_flags(parser, min_iters=12, max_seconds=10)
    args = parser.parse_args()
    if not args.trace:
        parser.error("expected a folder of recordings, got ''; e.g. trace/")
    return args


class Kind(NamedTuple):
    """Operations that share a row. size_bytes: the larger of what a rank sends and receives."""

    op: str
    group: str
    group_ranks: int
    dtype: str
    size_bytes: int

    @property
    def counts(self) -> tuple[int, int, int]:
        """Elements of a part, and of all that a rank sends and receives."""
        sends, receives = (n or self.group_ranks for n in OPERATIONS[self.op][:2])
        part = self.size_bytes // getattr(torch, self.dtype).itemsize // max(sends, receives)
        return part, sends * part, receives * part


@dataclass(frozen=True)
class Collective:
    """An operation of a rank, as recorded; equal ones of several ranks are one.

    team: name and ranks of its group. begin_s: since the steps began. job_s: 0 if not recorded.
    blocking: the job waited for it at once.
    """

    kind: Kind
    team: tuple[str, tuple[int, ...]]
    seq: int
    problem: str  # why it cannot be replayed
    begin_s: float = field(compare=False)
    job_s: float = field(compare=False, default=0.0)
    blocking: bool = field(compare=False, default=False)


Recording = tuple[int, float, list[Collective]]  # of a rank: steps, their seconds, its calls
Replay = dict[Kind, list[float]]  # seconds of each call


class Plan(NamedTuple):
    """What is replayed: the calls of each rank, and their kinds. lines: on the rest."""

    steps: int
    time_s: float
    calls: list[list[Collective]]
    kinds: list[Kind]
    lines: list[str]


def play(calls: list[Collective], starts: dict[Any, Any], end_s: float = 0) -> Replay:
    """Start all operations, with the job's gaps if its end is given. Seconds of each until done.

    One is waited for where the next of its group starts; at once if the job is known to have done.
    """
    seconds, under_way = defaultdict[Kind, list[float]](list), dict[Any, Any]()
    zero = time.perf_counter()

    def look(awaited: object = None) -> None:
        for team, (kind, begun, work) in list(under_way.items()):
            if team == awaited or work.is_completed():
                wait(work)
                seconds[kind].append(time.perf_counter() - begun)
                del under_way[team]

    for call in calls:
        look(call.team)
        while end_s and time.perf_counter() - zero < call.begin_s:
            look()
        under_way[call.team] = call.kind, time.perf_counter(), starts[call.kind, call.team]()
        look(call.team if call.blocking else None)
    for team in list(under_way):
        look(team)
    while time.perf_counter() - zero < end_s:
        pass
    return seconds


def wait(work: Any) -> None:
    work.wait()
    if torch.cuda.is_initialized():  # there only the stream has waited
        torch.cuda.current_stream().synchronize()


def build(plan: Plan, job: Job, key: Key, group: Group) -> Workload:
    """This rank's operations with the job's gaps and without, and one of each kind alone."""
    calls = plan.calls[job.rank]
    teams = sorted({call.team for row in plan.calls for call in row})
    connect: Any = partial(dist.new_group, backend=job.backend, timeout=FOREVER)
    groups = {team: connect(list(team[1])) for team in teams}
    group.more.extend(groups[team] for team in teams if job.rank in team[1])
    own = sorted({(call.kind, call.team) for call in calls})
    starts = {(kind, team): tried(kind, team[1], groups[team], job) for kind, team in own}

    def alone(those: list[Step]) -> None:
        for start in those:
            wait(start())

    def means(replays: list[Replay]) -> list[dict[Kind, float]]:
        """The mean seconds of each kind, in each replay."""
        return [{kind: fmean(times) for kind, times in replay.items()} for replay in replays]

    parts: dict[str, Step] = {"back to back": lambda: play(calls, starts)}
    for kind in plan.kinds:
        parts[str(kind)] = partial(alone, [starts[key] for key in own if key[0] == kind])
    return Workload(lambda: play(calls, starts, plan.time_s), parts, returned=means)


def tried(kind: Kind, ranks: tuple[int, ...], group: Any, job: Job) -> Step:
    """What starts an operation. Raises ValueError where not what was sent arrives."""
    part, *counts = kind.counts
    dtype, first = getattr(torch, kind.dtype), job.rank == min(ranks)
    # the first rank sends ones, the others zeros
    sent, received = (torch.full((n,), first, dtype=dtype, device=job.device) for n in counts)
    start = partial(OPERATIONS[kind.op][3], received, sent, group=group, async_op=True)
    wait(start())
    want = torch.zeros_like(received)
    want[:part] = 1
    if not torch.equal(received, want) and (first or kind.op != "reduce"):
        raise ValueError(f"{kind.op} of {kind.group} brought wrong values")
    sent.zero_()
    received.zero_()
    return start


def derive(plan: Plan, case: Case, times: Times, facts: list[None]) -> None:
    """The slowest rank counts in each iteration. times.returned: a kind's mean in each replay."""
    m, rows, replays = case.metrics, list[dict[str, Any]](), times.returned
    for name, prefix in (("step", "with_gaps"), ("back to back", "back_to_back")):
        step = times.slowest(name) / plan.steps
        m |= percentiles(step, prefix) | {f"{prefix}_ci95_s": median_interval(step)}
    for kind in plan.kinds:
        calls = [call for row in plan.calls for call in row if call.kind == kind]
        each = [[replay[kind] for replay in mine] for mine in replays if kind in mine[0]]
        took = {
            "replayed": np.max(each, axis=0),
            "alone": times.slowest(str(kind)),
            "job": np.array([call.job_s for call in calls if call.job_s]),
        }
        row = kind._asdict() | {"calls": len(calls) / len(each) / plan.steps}
        row["replayed_ci95_s"] = median_interval(took["replayed"])
        for name in (name for name in took if len(took[name])):
            p50, factor = float(np.median(took[name])), OPERATIONS[kind.op][2](kind.group_ranks)
            row[f"{name}_p50_s"] = p50
            row[f"{name}_busbw_gb_per_s"] = factor * kind.size_bytes / p50 / 1e9
        row["replayed_over_alone"] = row["replayed_p50_s"] / row["alone_p50_s"]
        rows.append(row)
    total = sum(row["calls"] * row["replayed_p50_s"] for row in rows)
    for row in rows:
        row["share"] = row["calls"] * row["replayed_p50_s"] / total
    m["step_bytes"] = sum(row["calls"] * row["size_bytes"] for row in rows)
    m |= {"job_step_s": plan.time_s / plan.steps, "operations": rows}


COLUMNS: Columns = {  # GB/s: busbw
    "op": lambda row: row.key["op"],
    "group": lambda row: row.key["group"],
    "bytes": lambda row: cli.show_size(row.key["size_bytes"]),
    "calls": metric("calls", digits=1),
    "job\n(ms)": metric("job_p50_s", 1e3, 3),
    "job\n(GB/s)": metric("job_busbw_gb_per_s"),
    "replayed\n(ms)": metric("replayed_p50_s", 1e3, 3),
    "95% ci\n(ms)": interval_ends("replayed_ci95_s", 1e3, 3),
    "replayed\n(GB/s)": metric("replayed_busbw_gb_per_s"),
    "alone\n(ms)": metric("alone_p50_s", 1e3, 3),
    "alone\n(GB/s)": metric("alone_busbw_gb_per_s"),
    "replayed\n/ alone": metric("replayed_over_alone"),
    "share\n(%)": metric("share", 100, 0),
}


def output(m: dict[str, Any]) -> str:
    rows = [Case(row, [], metrics=row) for row in m["operations"]]
    names = ("back_to_back_p50_s", "with_gaps_p50_s", "job_step_s")
    bare, here, job = (f"{m[name] * 1e3:.1f} ms" for name in names)
    text = f"# a step: {bare} back to back, {here} with the job's gaps; the job took {job}"
    return f"\n{render(COLUMNS, rows)}\n\n{text}"


# -- recordings: a function a format ---------------------------------------------------------------


def collective(
    name: str, team: Any, seq: int, dtype: str, sizes: Sequence[int], *job: Any
) -> Collective:
    """What every format has, in torch's words. sizes: elements sent and received."""
    group, ranks, letters = team[0], tuple(team[1]), name.replace("_", "").lower()
    for value in (seq, *sizes, *ranks):
        if type(value) is not int or value < 0:
            raise ValueError(f"{str(value)[:40]!r} where a whole number from 0 on belongs")
    # all_gather is also _allgather_base
    op = next((op for op in OPERATIONS if letters.startswith(op.replace("_", ""))), name)
    plain = DTYPES.get(dtype, "uint8")
    kind = Kind(op, group, len(ranks), plain, max(sizes) * getattr(torch, plain).itemsize)
    problem = ""
    if op not in OPERATIONS or dtype not in DTYPES:
        problem = f"this {'dtype' if op in OPERATIONS else 'operation'} is not known"
    elif not ranks:
        problem = "the ranks of its group are not recorded"
    elif kind.counts[1:] != sizes:
        problem = "parts differ in size, and only the sum is recorded"
    return Collective(kind, (group, ranks), seq, problem, *job)


def flight_recorder(content: dict[str, Any]) -> Recording:
    """From record(), or NCCL's own dump, which has the ranks of its groups in pg_config."""
    groups = content.get("groups") or {
        name: json.loads(config["ranks"]) for name, config in content["pg_config"].items()
    }
    created = [e["time_created_ns"] for e in content["entries"]]
    start, end = content.get("started_ns", min(created)), content.get("ended_ns", max(created))
    calls = []
    for e in content["entries"]:
        name = e["profiling_name"].rpartition(":")[2].partition(" ")[0]  # of `nccl:send 0->1`
        if e["time_created_ns"] >= start and name not in MARKERS:
            group, label = map(str, e["process_group"])
            team = group if label in ("", "undefined") else label, groups.get(group, ())
            dtype = [*e["input_dtypes"], *e["output_dtypes"], "Byte"][0]  # some ranks have no input
            sizes = tuple(sum(map(math.prod, e[way])) for way in ("input_sizes", "output_sizes"))
            job = (e["time_created_ns"] - start) / 1e9, e.get("duration_ms", 0) / 1e3
            calls.append(collective(name, team, e["collective_seq_id"], dtype, sizes, *job))
    return int(content.get("steps", 1)), (end - start) / 1e9, calls


def kineto(content: dict[str, Any]) -> Recording:
    """From torch.profiler: operations by record_param_comms, their times from NCCL's kernels."""
    groups = {g["pg_name"]: g["ranks"] for g in content["distributedInfo"]["pg_config"]}
    events = [e for e in content["traceEvents"] if e.get("ph") == "X"]
    comms = [e for e in events if "Collective name" in e.get("args", {})]
    steps = [e for e in events if e["name"].startswith("ProfilerStep#")]
    steps = [e for e in steps if e["cat"] == "user_annotation"]  # the GPU has copies
    start = min(e["ts"] for e in steps or comms)
    end = max(e["ts"] + e["dur"] for e in steps or comms)
    kernels = {e["args"]["External id"]: e["dur"] / 1e6 for e in comms if e["cat"] == "kernel"}
    calls = []
    for e in sorted(comms, key=lambda e: e["ts"]):
        a, name = e["args"], e["args"]["Collective name"]
        if e["cat"] == "cpu_op" and name not in MARKERS and start <= e["ts"] <= end:
            group = a["Process Group Name"]
            team = a.get("Process Group Description") or group, groups.get(group, ())
            sizes = a["In msg nelems"], a["Out msg nelems"]
            blocking = str(a.get("Is asynchronized op", True)).lower() == "false"
            job = (e["ts"] - start) / 1e6, kernels.get(a["External id"], 0.0), blocking
            calls.append(collective(name, team, a.get("Seq", 0), a["dtype"], sizes, *job))
    return len(steps) or 1, (end - start) / 1e6, calls


class NoClasses(pickle.Unpickler):
    """For dicts, lists, strings and numbers: whatever else a pickle asks for could run code."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise ValueError(f"it asks for the class {module}.{name}, and a recording has none")


def read(folder: str, rank: int, world_size: int) -> Recording | str:
    """A rank's recording, or in one line what is wrong with it."""
    path = Path(folder)
    try:
        names = [(FILE.search(file.name), file) for file in path.iterdir()]
        files = sorted((int(match[1]), file) for match, file in names if match)
        if not files:
            return (
                f"{folder} has no recordings; expected one of each rank, e.g. fr_0.json, as "
                "examples/record_collectives.py writes them"
            )
        if (ranks := [number for number, _ in files]) != list(range(world_size)):
            return (
                f"{folder} has recordings of ranks {ranks}, and this job has {world_size}; "
                f"e.g. torchrun --nproc-per-node {max(ranks) + 1} {sys.argv[0]} {folder}"
            )
        path = files[rank][1]
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        content = json.loads(data) if data[:1] == b"{" else NoClasses(io.BytesIO(data)).load()
        recording = (kineto if "traceEvents" in content else flight_recorder)(content)
        _, time_s, calls = recording
        last_s = max((call.begin_s for call in calls), default=0.0)
        if not 0 <= last_s <= time_s < math.inf:
            raise ValueError(f"steps that took {time_s:g} s, and an operation after {last_s:g} s")
        return recording
    except Exception as error:  # a damaged pickle raises anything
        return f"{path}: expected a rank's recording, got {type(error).__name__}: {error}"


def choose(found: Sequence[Recording], only: Sequence[str] = (), scale: float = 1.0) -> Plan:
    """What all ranks of a group have recorded: what one of them lacks would hang."""
    steps, times, recorded = zip(*found, strict=True)
    wanted = {name for word in only for name in (word, f"mesh_{word}")}
    rows = [[call for call in row if not only or call.kind.group in wanted] for row in recorded]
    # ring buffers do not begin together; coalesced operations share a number, and may be equal
    counts = Counter((rank, call) for rank, row in enumerate(rows) for call in row)
    why = {call: call.problem for _, call in counts}
    for call in why:
        if not why[call] and len({counts[rank, call] for rank in call.team[1]}) > 1:
            why[call] = "not recorded alike on every rank of its group"
    lost = Counter(f"{c.kind.op} of {c.team[0]}: {why[c]}" for r in rows for c in r if why[c])
    lines = [f"# {count} x {text}" for text, count in lost.items()]
    lines.append(f"# not replayed: {lost.total()} of {sum(map(len, rows))}")

    def scaled(call: Collective) -> Collective:
        part = call.kind.counts[0]
        size_bytes = call.kind.size_bytes * math.ceil(part * scale) // max(1, part)
        # the job's time is that of the recorded size
        return replace(call, kind=call.kind._replace(size_bytes=size_bytes), job_s=0.0)

    calls = [[c if scale == 1 else scaled(c) for c in row if not why[c]] for row in rows]
    kinds = sorted({call.kind for row in calls for call in row})
    return Plan(max(1, *steps), max(times), calls, kinds, lines)


def title(plan: Plan, key: dict[str, Any]) -> str:
    """What is replayed, of which recording."""
    steps = f"{plan.steps} step{'s' * (plan.steps > 1)} in {plan.time_s * 1e3:.1f} ms"
    groups = "all groups" if key["only"] == "all" else f"--only {key['only']}"
    return f"# recording {key['recording']}: {steps}; {groups}, sizes x {key['scale_size']:g}"


def main() -> int:
    args = parse_args()
    with Benchmark("replay", args) as bench:
        job = bench.job
        found = share(gather(read(args.trace, job.rank, job.world_size)))
        for problem in (each for each in found if isinstance(each, str)):
            bench.refuse(problem)
        plan = choose(found, args.only, args.scale_size)
        if not any(plan.calls):
            groups = ", ".join(sorted({c.team[0] for _, _, calls in found for c in calls}))
            bench.refuse(f"nothing is left of the groups {groups}; {'; '.join(plan.lines)}")
        # one replay starts a block untimed, so a block is two of them at least
        if 2 * plan.time_s > args.timeout:
            took = f"the recorded steps took {plan.time_s:g} s, and a replay takes as long"
            bench.refuse(f"{took}; record fewer, or give --timeout {3 * plan.time_s:.0f}")
        own = {(call.kind, call.team) for call in plan.calls[job.rank]}
        needed = sum(sum(kind.counts[1:]) * getattr(torch, kind.dtype).itemsize for kind, _ in own)
        for problem in filter(None, share(gather(too_much(needed, job, "--scale-size")))):
            bench.refuse(problem)
        digest = hashlib.sha256(repr(found).encode()).hexdigest()[:12]
        key = dict(recording=digest, only=",".join(args.only) or "all", scale_size=args.scale_size)
        bench.print(f"\n{title(plan, key)}")
        if case := bench.measure(key, partial(build, plan, job), partial(derive, plan)):
            bench.print(f"# {case.check}" if case.failed else output(case.metrics))
        bench.print("\n".join(plan.lines))
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
