#!/usr/bin/env python3
"""Is the network slow, or the job? The collectives of a recorded job again, without the job.

    back to back = each operation starts as soon as the one before it in its group is done
    with gaps    = none starts earlier than in the job: busy waits take the place of computing
    replayed     = an operation in a replay with gaps, from its start until it is seen to be done,
                   over NCCL between two CUDA events: the mean of a step's calls on the slowest
                   rank, p50 of the replays
    alone        = the same operation with nothing else under way
    busbw        = bytes / time * factor, as in collectives.py
    share        = calls * replayed, of the sum over all rows

To record a job, paste record() of examples/record_collectives.py into it; all ranks call it after
their last steps.

    torchrun --nproc-per-node 4 benchmarks/replay.py trace/
    torchrun --nproc-per-node 8 benchmarks/replay.py trace/ --only dp --json report.jsonl

docs/replay.md says how to read the table. Written for this project, BSD-3-Clause.
"""

import argparse
import hashlib
import json
import math
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import methodcaller
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.workloads import operations
from benchmarks.workloads.operations import Member, Operation
from benchmarks.workloads.room import check_room
from common import cli
from common.benchmark import Benchmark, Key
from common.environment import count_of
from common.groups import Group, Job, connect, gather, rendezvous, share
from common.report import Case, show_seconds
from common.stats import Times, median, percentiles
from common.table import Columns, ends, metric, relative
from common.timing import Step, Workload

MARKERS = ("coalesced", "wait", "init")  # entries of the flight recorder that move nothing
DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16"}
DTYPES |= {"Long": "int64", "Int": "int32", "Char": "int8", "Byte": "uint8", "Bool": "uint8"}
DTYPES |= {"Float8_e4m3fn": "uint8", "Float8_e5m2": "uint8"}  # the recorder's names -> torch's
# gather, scatter and sends are not replayed
REPLAYED = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce")
OPERATIONS = {name: operations.OPERATIONS[name] for name in REPLAYED}
OPERATIONS["barrier"] = Operation(
    call=lambda src, dst, at, **more: dist.barrier(at.group, **more),
    expected=lambda at: [],
    bus=lambda n: 0,
)


def parse_args() -> argparse.Namespace:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    folder = cli.checked(str, bool, "a folder of recordings", "e.g. trace/")
    add("trace", type=folder, metavar="FOLDER", help="has fr_0.json, fr_1.json, ... of the ranks")
    only = "replay only these groups, e.g. dp for mesh_dp (default: all)"
    add("--only", type=cli.list_of(str), default=[], metavar="GROUP", help=only)
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
        """Elements of a part, and of all that a rank sends and receives."""
        sends, receives = OPERATIONS[self.op].parts(self.group_ranks)
        part = self.size_bytes // itemsize(self.dtype) // max(sends, receives)
        return part, sends * part, receives * part


def itemsize(dtype: str) -> int:
    return getattr(torch, dtype).itemsize


@dataclass(frozen=True)
class Collective:
    """An operation of a rank, as recorded; equal ones of several ranks are one."""

    kind: Kind
    team: tuple[str, tuple[int, ...]]  # name and ranks of its group
    seq: int
    problem: str  # why it cannot be replayed
    begin_s: float = field(compare=False)  # since the steps began
    job_s: float = field(compare=False, default=0.0)  # 0 if not recorded


class Recording(NamedTuple):
    """What was recorded of a rank."""

    steps: int
    time_s: float  # of the steps
    calls: list[Collective]


# -- recordings ------------------------------------------------------------------------------------


def read(folder: str, rank: int, world_size: int) -> Recording:
    """A rank's recording. Raises OSError or ValueError if there is none that can be read."""
    path = Path(folder, f"fr_{rank}.json")
    data = path.read_bytes()
    try:
        content = json.loads(data)
        recorded_ranks = content["world_size"]
        recording = parse(content)
    except Exception as error:  # a damaged file raises anything
        expected = "expected what record() of examples/record_collectives.py writes"
        raise ValueError(f"{path}: {expected}, got {cli.describe(error)}") from None
    if recorded_ranks != world_size:
        launch = f"torchrun --nproc-per-node {recorded_ranks} {sys.argv[0]} {folder}"
        has = f"{path} is of {count_of(recorded_ranks, 'rank')}, and this job has {world_size}"
        raise ValueError(f"{has}; e.g. {launch}")
    return recording


def parse(content: dict[str, Any]) -> Recording:
    """The entries of torch's flight recorder between the start and the end of the steps."""
    start_ns, end_ns = content["started_ns"], content["ended_ns"]
    calls = []
    for entry in content["entries"]:
        name = entry["profiling_name"].rpartition(":")[2].partition(" ")[0]  # of `nccl:send 0->1`
        if entry["time_created_ns"] >= start_ns and name not in MARKERS:
            begin_s = (entry["time_created_ns"] - start_ns) / 1e9
            calls.append(collective(name, entry, content["groups"], begin_s))
    return Recording(content["steps"], (end_ns - start_ns) / 1e9, calls)


def collective(
    name: str, entry: dict[str, Any], ranks_of: dict[str, list[int]], begin_s: float
) -> Collective:
    """An entry of the recorder. ranks_of: the ranks of each group, by the group's name."""
    group, label = map(str, entry["process_group"])
    ranks = tuple(ranks_of.get(group, ()))
    if label not in ("", "undefined"):
        group = label
    # on some ranks there is no input
    dtype = [*entry["input_dtypes"], *entry["output_dtypes"], "Byte"][0]
    plain = DTYPES.get(dtype, "uint8")
    sent = sum(math.prod(shape) for shape in entry["input_sizes"])
    received = sum(math.prod(shape) for shape in entry["output_sizes"])
    letters = name.replace("_", "").lower()  # all_gather is also _allgather_base
    known = [op for op in OPERATIONS if letters.startswith(op.replace("_", ""))]
    kind = Kind((*known, name)[0], group, len(ranks), plain, max(sent, received) * itemsize(plain))
    problem = ""
    if not known:
        problem = "this operation is not known"
    elif dtype not in DTYPES:
        problem = "this dtype is not known"
    elif not ranks:
        problem = "the ranks of its group are not recorded"
    elif kind.counts()[1:] != (sent, received):
        problem = "parts differ in size, and only the sum is recorded"
    job_s = entry.get("duration_ms", 0) / 1e3
    return Collective(kind, (group, ranks), entry["collective_seq_id"], problem, begin_s, job_s)


# -- what is replayed ------------------------------------------------------------------------------


class Plan(NamedTuple):
    """What is replayed: the calls of each rank, and their kinds. lines: on the rest."""

    steps: int
    time_s: float
    calls: list[list[Collective]]
    kinds: list[Kind]
    lines: list[str]


def choose(recordings: Sequence[Recording], only: Sequence[str] = ()) -> Plan:
    """What all ranks of a group have recorded: what one of them lacks would hang."""
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
    return Plan(steps, time_s, kept, kinds, lines)


def find_problems(calls_by_rank: list[list[Collective]]) -> dict[Collective, str]:
    """Why each operation cannot be replayed; nothing where it can be.

    Ring buffers do not begin together. Coalesced operations share a number, and may be equal: so
    each rank of the group must have an operation equally often.
    """
    counts: Counter[tuple[int, Collective]] = Counter()
    for rank, calls in enumerate(calls_by_rank):
        counts.update((rank, call) for call in calls)
    problems: dict[Collective, str] = {}
    for _, call in counts:
        _, members = call.team
        times_recorded = {counts[rank, call] for rank in members}
        problems[call] = call.problem
        if not call.problem and len(times_recorded) > 1:
            problems[call] = "not recorded alike on every rank of its group"
    return problems


# -- replay ----------------------------------------------------------------------------------------

Replay = dict[Kind, list[float]]  # seconds of each call


def play(calls: list[Collective], starts: dict[Any, Any], end_s: float = 0) -> Replay:
    """Start all operations, with the job's gaps if its end is given. Seconds of each until done.

    An operation is waited for where the next one of its group starts. starts: what starts an
    operation, by kind and team.
    """
    seconds: Replay = defaultdict(list)
    under_way: dict[Any, tuple[Kind, float, Any]] = {}  # one in each team: its start, torch's work
    zero = time.perf_counter()

    def look(awaited: object = None) -> None:
        """Take the time of what is done. Wait for the operation of one team, if one is given."""
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
    """The same over NCCL, as a job does it: operations are queued, and the host waits at the end.

    Two events on a stream of its team take the time of each operation. streams: by team.
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
    """Let the host wait, also for a device."""
    work.wait()
    if torch.cuda.is_initialized():  # there only the stream has waited
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

    parts: dict[str, Step] = {"back to back": replay}
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
    """What starts an operation, which was called once as a check. It sums, and its root is the
    group's first rank, since neither is recorded. Raises ValueError if wrong values arrive."""
    operation = OPERATIONS[kind.op]
    part, to_send, to_receive = kind.counts()
    redop = "sum" if operation.reduces else "none"
    member = Member(group, sorted(ranks).index(job.rank), len(ranks), part, redop)
    zeros: Any = partial(torch.zeros, dtype=getattr(torch, kind.dtype), device=job.device)
    received = zeros(to_receive)
    in_place = operation.variants[0] == "in_place"
    sent = received if in_place else zeros(to_send)
    start = partial(operation.call, sent, received, member, async_op=True)
    operations.fill(sent, received, member)
    wait(start())
    if operations.count_wrong(operation, received, member):
        raise ValueError(f"{kind.op} of {kind.group} brought wrong values")
    sent.zero_()
    received.zero_()
    return start


def derive(plan: Plan, case: Case, times: Times, facts: list[None]) -> None:
    """The slowest rank counts in each iteration. times.returned: a kind's mean in each replay."""
    metrics = case.metrics
    for name, prefix in (("step", "with_gaps"), ("back to back", "back_to_back")):
        step = times.slowest(name) / plan.steps
        metrics[f"{prefix}_s"] = median(step)
        metrics |= percentiles(step, prefix)
        del metrics[f"{prefix}_p50_s"]
    rows = [row_of(kind, plan, times) for kind in plan.kinds]
    total_s = sum(row["calls"] * row["replayed_s"].value for row in rows)
    for row in rows:
        row["share"] = row["replayed_s"] * row["calls"] / total_s
    metrics["step_bytes"] = sum(row["calls"] * row["size_bytes"] for row in rows)
    metrics["job_step_s"] = plan.time_s / plan.steps
    metrics["operations"] = rows


def row_of(kind: Kind, plan: Plan, times: Times) -> dict[str, Any]:
    """What a row of the table says of a kind; all but its share."""
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
    bus_bytes = OPERATIONS[kind.op].bus(kind.group_ranks) * kind.size_bytes
    for name, estimate in seconds.items():
        row[f"{name}_s"] = estimate
        row[f"{name}_busbw_gb_per_s"] = bus_bytes / estimate / 1e9
    row["replayed_over_alone"] = seconds["replayed"] / seconds["alone"]
    return row


COLUMNS: Columns = {  # GB/s: busbw
    "op": lambda row: row.key["op"],
    "group": lambda row: row.key["group"],
    "bytes": lambda row: cli.show_size(row.key["size_bytes"]),
    "replayed\n(ms)": metric("replayed_s", 1e3, 3),
    "95% ci\n(ms)": ends("replayed_s", 1e3, 3),
    "replayed\n/ alone": metric("replayed_over_alone"),
    "95% ci\n(ratio)": relative("replayed_over_alone"),
    "calls": metric("calls", digits=1),
    "share\n(%)": metric("share", 100, 0),
    "replayed\n(GB/s)": metric("replayed_busbw_gb_per_s"),
    "alone\n(ms)": metric("alone_s", 1e3, 3),
    "95% ci": relative("alone_s"),
    "alone\n(GB/s)": metric("alone_busbw_gb_per_s"),
    "job\n(ms)": metric("job_s", 1e3, 3),
    "job\n(GB/s)": metric("job_busbw_gb_per_s"),
}


def answer(metrics: dict[str, Any]) -> str:
    """How much of the job's step its communication takes."""
    alone, job_s = metrics["back_to_back_s"], metrics["job_step_s"]
    sentence = f"a step: {alone} back to back"
    if job_s:
        part = (alone / job_s).text("%", 100, 0)
        sentence += f", {part} of the job's {show_seconds(job_s)}"
    return f"{sentence}; {metrics['with_gaps_s']} with its gaps"


def check_plan(plan: Plan, recordings: Sequence[Recording], bench: Benchmark) -> None:
    """Raises ValueError if this rank cannot replay the plan."""
    if not plan.kinds:
        recorded = {call.kind.group for recording in recordings for call in recording.calls}
        groups = ", ".join(sorted(recorded))
        raise ValueError(f"nothing is left of the groups {groups}; {'; '.join(plan.lines)}")
    # one replay starts a block untimed, so a block is two of them at least
    if 2 * plan.time_s > bench.args.timeout:
        took = f"the recorded steps took {plan.time_s:g} s, and a replay takes as long"
        raise ValueError(f"{took}; record fewer, or give --timeout {3 * plan.time_s:.0f}")
    needed_bytes = 0  # an operation of a team uses the same two tensors in every call
    for kind, _ in {(call.kind, call.team) for call in plan.calls[bench.job.rank]}:
        _, to_send, to_receive = kind.counts()
        needed_bytes += (to_send + to_receive) * itemsize(kind.dtype)
    advice = "the number of groups, by --only"
    check_room(needed_bytes, bench.job, bench.report.environment, advice)


def main() -> int:
    args = parse_args()
    only = ",".join(args.only) or "all"
    with Benchmark("replay", args) as bench:
        job = bench.job
        recordings: list[Recording] = []  # of all ranks; a dry run does without
        if not args.dry_run or share(Path(args.trace).is_dir()):
            mine = bench.prepare("FOLDER", lambda: read(args.trace, job.rank, job.world_size))
            recordings = share(gather(mine))
        content = repr([tuple(recording) for recording in recordings])
        digest = hashlib.sha256(content.encode()).hexdigest()[:12]
        name, key = f"{args.trace}, groups {only}", {"only": only, "recording": digest}
        bench.announce({"A recorded job again": [(name, job.world_size, key)]})
        plan = choose(recordings, args.only)
        bench.prepare("FOLDER", lambda: check_plan(plan, recordings, bench))
        steps = f"{count_of(plan.steps, 'step')} in {plan.time_s * 1e3:.1f} ms"
        groups = f"--only {only}" if args.only else "all groups"
        bench.print(f"\n# recording {digest}: {steps}; {groups}")
        if case := bench.measure(key, name, partial(build, plan, job), partial(derive, plan)):
            rows = [
                Case(key=row, ranks=[], metrics=row) for row in case.metrics.get("operations", [])
            ]
            if case.failed:
                bench.print(f"# {case.check}")
            else:
                bench.print_table(COLUMNS, rows)
            bench.conclude(plan.lines if case.failed else [answer(case.metrics), *plan.lines])
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
