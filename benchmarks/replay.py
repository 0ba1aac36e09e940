#!/usr/bin/env python3
"""Is the network slow, or the job? The collectives of a recorded job again, without the job.

    back to back = each operation as soon as the one before it in its group is done
    with gaps    = none earlier than in the job: busy waits take the place of computing
    replayed     = an operation within the latter, from its start until it is seen to be done: mean
                   of a step's calls, p50 of the replays; the slowest rank counts
    alone        = the same operation with nothing else under way
    busbw        = bytes / time * factor, as in collectives.py; bytes: the larger of what a rank
                   sends and receives
    share        = calls * replayed, of the sum over all rows

Paste this into the job; all ranks call it after its last `steps` steps, which began at started_ns,
time.time_ns(). TORCH_FR_BUFFER_SIZE operations are kept (2,000). On NCCL: _dump_nccl_trace_json.

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
import json
import math
import pickle
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cli
from common.benchmark import Benchmark, Workload
from common.dist import FOREVER, Group, Job, gather, share
from common.memory import too_much
from common.report import Case
from common.stats import median_interval, percentiles
from common.table import Columns, half_width, metric, render
from common.timing import Step

Team = tuple[str, tuple[int, ...]]  # a group: its name, which disjoint ones share, and its ranks

N = 0
# parts that a rank sends and receives (N: one for each rank); busbw / algbw; the call.
# Not recorded, and so chosen: the reduction (a sum) and the root (the group's first rank).
# fmt: off
OPERATIONS: dict[str, tuple[int, int, Callable[[int], float], Callable[..., Any]]] = {
    "all_reduce": (1, 1, lambda n: 2 * (n - 1) / n, lambda d, s, **on: dist.all_reduce(d, **on)),
    "all_gather": (1, N, lambda n: (n - 1) / n, dist.all_gather_into_tensor),
    "reduce_scatter": (N, 1, lambda n: (n - 1) / n, dist.reduce_scatter_tensor),
    "all_to_all": (N, N, lambda n: (n - 1) / n, dist.all_to_all_single),
    "broadcast": (1, 1, lambda n: 1, lambda d, s, **on: dist.broadcast(d, group_src=0, **on)),
    "reduce": (1, 1, lambda n: 1, lambda d, s, **on: dist.reduce(d, group_dst=0, **on)),
    "barrier": (1, 1, lambda n: 0, lambda d, s, **on: dist.barrier(**on)),
}
# fmt: on
MARKERS = ("coalesced", "wait", "init")  # entries that move nothing
DTYPES = {"Float": torch.float32, "Double": torch.float64, "Half": torch.float16}
DTYPES |= {"BFloat16": torch.bfloat16, "Long": torch.int64, "Int": torch.int32, "Char": torch.int8}
DTYPES |= dict.fromkeys(("Byte", "Bool", "Float8_e4m3fn", "Float8_e5m2"), torch.uint8)
FILE = re.compile(r"(?:fr|rank)[_-]?(\d+)")  # fr_0.json, nccl_trace_rank_0, rank-0.json.gz


def parse_args() -> argparse.Namespace:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("trace", metavar="FOLDER", help="the recordings: fr_0.json or rank0...json for each rank")
    only = "the operations of these groups, e.g. dp for mesh_dp (default: all)"
    add("--only", type=cli.list_of(str), default=[], metavar="GROUP", help=only)
    scale = "times the recorded sizes (default: 1)"
    add("--scale-size", type=cli.positive_float, default=1.0, metavar="F", help=scale)
    cli.add_common_flags(parser, min_iters=12, max_seconds=10)
    return parser.parse_args()


class Kind(NamedTuple):
    """Operations that share a row. size_bytes: the larger of what a rank sends and receives."""

    op: str
    group: str
    group_ranks: int
    dtype: str
    size_bytes: int


@dataclass(frozen=True)
class Collective:
    """An operation of a rank, as recorded; equal ones of several ranks are one.

    sent, received: elements. begin_s: since the recorded steps began. job_s: 0 if not recorded.
    """

    name: str
    group: str
    ranks: tuple[int, ...]
    seq: int
    dtype: str
    sent: int
    received: int
    begin_s: float = field(default=0.0, compare=False)
    job_s: float = field(default=0.0, compare=False)
    blocking: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        for value in (self.seq, self.sent, self.received, *self.ranks):
            if type(value) is not int or value < 0:
                raise ValueError(f"{str(value)[:40]!r} where a whole number from 0 on belongs")

    @cached_property
    def op(self) -> str:
        """torch's word, as all_gather for _allgather_base."""
        plain = self.name.replace("_", "").lower()
        known = [op for op in OPERATIONS if plain.startswith(op.replace("_", ""))]
        return max(known, key=len, default=self.name)

    @property
    def team(self) -> Team:
        return self.group, self.ranks

    @property
    def parts(self) -> tuple[int, int]:
        """Of what it sends and receives."""
        sends, receives, *_ = OPERATIONS[self.op]
        return sends or len(self.ranks), receives or len(self.ranks)

    @cached_property
    def kind(self) -> Kind:
        dtype, size = DTYPES[self.dtype], max(self.sent, self.received)
        name = str(dtype).removeprefix("torch.")
        return Kind(self.op, self.group, len(self.ranks), name, size * dtype.itemsize)

    @property
    def why_not(self) -> str:
        """The reason not to replay it, whatever the other ranks have; empty if there is none."""
        if self.op not in OPERATIONS or self.dtype not in DTYPES:
            return f"this {'dtype' if self.op in OPERATIONS else 'operation'} is not known"
        if not self.ranks:
            return "the ranks of its group are not recorded"
        sends, receives = self.parts
        even = self.sent % sends == 0 and self.sent * receives == self.received * sends
        return "" if even else "parts differ in size, and only the sum is recorded"


class Recording(NamedTuple):
    """Of one rank. time_s: of all its steps."""

    steps: int
    time_s: float
    calls: list[Collective]


# -- the replay ------------------------------------------------------------------------------------


def play(calls: Sequence[Collective], starts: Sequence[Step], end_s: float = 0.0) -> list[float]:
    """Start all operations, with the job's gaps if its end is given. Seconds of each until done.

    One is waited for where the next of its group starts; at once if the job is known to have done.
    """
    seconds, under_way = [0.0] * len(calls), dict[Team, tuple[int, float, Any]]()
    zero = time.perf_counter()

    def look(awaited: Team | None = None) -> None:
        for team, (i, begun, work) in list(under_way.items()):
            if team == awaited or work.is_completed():
                wait(work)
                seconds[i] = time.perf_counter() - begun
                del under_way[team]

    for i, call in enumerate(calls):
        look(call.team)
        while end_s and time.perf_counter() - zero < call.begin_s:
            look()
        under_way[call.team] = i, time.perf_counter(), starts[i]()
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


def build(found: Sequence[Recording], kinds: list[Kind], job: Job, group: Group) -> Workload:
    """This rank's operations with the job's gaps and without, and one of each kind alone."""
    _, time_s, calls = found[job.rank]
    groups, starts = dict[Team, Any](), dict[tuple[Kind, Team], Step]()
    for name, ranks in sorted({call.team for each in found for call in each.calls}):
        new: Any = dist.new_group(list(ranks), backend=job.backend, timeout=FOREVER)
        if job.rank in ranks:
            groups[name, ranks] = new
            group.more.append(new)
    for kind, call in sorted({(call.kind, call.team): call for call in calls}.items()):
        starts[kind] = tried(call, groups[call.team], job)
    each = [starts[call.kind, call.team] for call in calls]
    replays: list[list[float]] = []

    def alone(kind: Kind) -> None:
        for (other, _), start in starts.items():
            if kind == other:
                wait(start())

    steps: dict[str, Step] = {
        "with gaps": lambda: replays.append(play(calls, each, time_s)),
        "back to back": partial(play, calls, each),
    }
    return Workload(
        steps | {str(kind): partial(alone, kind) for kind in kinds}, facts=lambda: np.array(replays)
    )


def tried(call: Collective, group: Any, job: Job) -> Step:
    """What starts an operation. Raises ValueError where not what was sent arrives."""
    options: Any = {"dtype": DTYPES[call.dtype], "device": job.device}
    received, sent = (torch.zeros(n, **options) for n in (call.received, call.sent))
    start = partial(OPERATIONS[call.op][3], received, sent, group=group, async_op=True)
    first = job.rank == min(call.ranks)  # it sends ones, the others zeros
    sent.fill_(first)
    received.fill_(first)
    wait(start())
    want = torch.zeros_like(received)
    want[: call.received // call.parts[1]] = 1
    if not torch.equal(received, want) and (first or call.op != "reduce"):
        raise ValueError(f"{call.op} of {call.group} brought wrong values")
    sent.zero_()
    received.zero_()
    return start


# -- what comes out of it --------------------------------------------------------------------------


def derive(found: Sequence[Recording], kinds: list[Kind], case: Case, replays: list[Any]) -> None:
    """Of each iteration the slowest rank counts. replays: of each rank [replays, operations]."""
    m, steps = case.metrics, found[0].steps
    slowest = {name: np.max(rows, axis=0) for name, rows in case.samples_s.items()}
    for name in ("with gaps", "back to back"):
        prefix, step = name.replace(" ", "_"), slowest[name] / steps
        m |= percentiles(step, prefix) | {f"{prefix}_ci95_s": median_interval(step)}
    rows = []
    for kind in kinds:
        means, job = [], []
        for recording, seconds in zip(found, replays, strict=True):
            mine = [i for i, call in enumerate(recording.calls) if call.kind == kind]
            job += [recording.calls[i].job_s for i in mine]
            if mine:
                means.append(seconds[:, mine].mean(axis=1))
        replayed = np.max(means, axis=0)[-sum(case.rounds) :]  # without those of the warm-up
        row = kind._asdict() | {"calls": len(job) / len(means) / steps}
        row["replayed_ci95_s"] = median_interval(replayed)
        times = {"replayed": replayed, "alone": slowest[str(kind)], "job": [s for s in job if s]}
        for name, some in times.items():
            if len(some):
                p50, factor = float(np.median(some)), OPERATIONS[kind.op][2](kind.group_ranks)
                row[f"{name}_p50_s"] = p50
                row[f"{name}_busbw_gb_per_s"] = factor * kind.size_bytes / p50 / 1e9
        row["replayed_over_alone"] = row["replayed_p50_s"] / row["alone_p50_s"]
        rows.append(row)
    total = sum(row["calls"] * row["replayed_p50_s"] for row in rows)
    for row in rows:
        row["share"] = row["calls"] * row["replayed_p50_s"] / total
    m["step_bytes"] = sum(row["calls"] * row["size_bytes"] for row in rows)
    m |= {"job_step_s": found[0].time_s / steps, "operations": rows}


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
    return f"\n{render(COLUMNS, rows)}\n\n{text}"


# -- recordings ------------------------------------------------------------------------------------


def flight_recorder(content: dict[str, Any]) -> Recording:
    """From record(), or NCCL's own dump, which has the ranks of its groups in pg_config."""
    groups = content.get("groups") or {
        name: json.loads(config["ranks"]) for name, config in content["pg_config"].items()
    }
    entries = content.get("entries", [])
    created = [e["time_created_ns"] for e in entries] or [0]
    start, end = content.get("started_ns", min(created)), content.get("ended_ns", max(created))
    calls = []
    for e in entries:
        name = e["profiling_name"].rpartition(":")[2].partition(" ")[0]  # of `nccl:send 0->1`
        if e["time_created_ns"] >= start and name not in MARKERS:
            group, label = e["process_group"]
            team = group if label in ("", "undefined") else label, tuple(groups.get(group, ()))
            dtype = [*e["input_dtypes"], *e["output_dtypes"], "Byte"][0]  # some ranks have no input
            sent, received = (sum(map(math.prod, e[f"{way}_sizes"])) for way in ("input", "output"))
            what = *team, e["collective_seq_id"], dtype, sent, received
            times = (e["time_created_ns"] - start) / 1e9, e.get("duration_ms", 0) / 1e3
            calls.append(Collective(name, *what, *times))
    return Recording(content.get("steps", 1), (end - start) / 1e9, calls)


def kineto(content: dict[str, Any]) -> Recording:
    """From torch.profiler: operations by record_param_comms, their times from NCCL's kernels."""
    known = content["distributedInfo"].get("pg_config", [])
    groups = {group["pg_name"]: group.get("ranks", []) for group in known}
    events = [e for e in content["traceEvents"] if e.get("ph") == "X"]
    comms = [e for e in events if "Collective name" in e.get("args", {})]
    marks = [e for e in events if "ProfilerStep#" in e["name"]]
    marks = [e for e in marks if e["cat"] == "user_annotation"]  # the GPU has copies
    start = min((e["ts"] for e in marks or comms), default=0)
    end = max((e["ts"] + e["dur"] for e in marks or comms), default=0)
    job_s = {e["args"]["External id"]: e["dur"] / 1e6 for e in comms if e.get("cat") == "kernel"}
    calls = []
    for e in sorted(comms, key=lambda e: e["ts"]):
        a, name = e["args"], e["args"]["Collective name"]
        recorded = e["name"] == "record_param_comms" and name not in MARKERS
        if recorded and start <= e["ts"] <= end:
            group, text = a.get("Process Group Name", ""), a.get("Process Group Ranks", "[]")
            ranks = groups.get(group, []) if "..." in text else json.loads(text)
            team = a.get("Process Group Description") or group, tuple(ranks)
            sizes = a["dtype"], a["In msg nelems"], a["Out msg nelems"]
            blocking = str(a.get("Is asynchronized op", True)).lower() == "false"
            times = (e["ts"] - start) / 1e6, job_s.get(a["External id"], 0.0)
            calls.append(Collective(name, *team, a.get("Seq", 0), *sizes, *times, blocking))
    return Recording(len(marks) or 1, (end - start) / 1e6, calls)


class NoClasses(pickle.Unpickler):
    """For dicts, lists, strings and numbers: whatever else a pickle asks for could run code."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise ValueError(f"it asks for the class {module}.{name}, and a recording has none")


def read(path: Path) -> Recording:
    """A rank's file. Raises ValueError, in one line."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        is_json = data[:64].lstrip().startswith(b"{")
        content = json.loads(data) if is_json else NoClasses(io.BytesIO(data)).load()
        return kineto(content) if "traceEvents" in content else flight_recorder(content)
    except Exception as error:  # a damaged pickle raises anything
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise ValueError(f"{path}: expected a rank's recording, got {kind}{error}") from None


def read_all(folder: str, job: Job) -> list[Recording]:
    """Each rank reads its file; all get all of them. Raises ValueError, on all ranks alike."""
    mine: Recording | str
    try:
        found = {FILE.search(path.name): path for path in Path(folder).iterdir()}
        files = {int(match[1]): path for match, path in found.items() if match}
        if sorted(files) != list(range(job.world_size)):
            ranks, last = ", ".join(map(str, sorted(files))), max(files, default=0)
            raise ValueError(
                f"{folder} has recordings of ranks {ranks}, and this job has {job.world_size}; "
                f"e.g. torchrun --nproc-per-node {last + 1} benchmarks/replay.py {folder}"
            )
        mine = read(files[job.rank])
    except (OSError, ValueError) as error:
        mine = str(error)
    recordings = share(gather(mine))
    for each in recordings:
        if isinstance(each, str):
            raise ValueError(each)
    return recordings


def replayable(
    found: Sequence[Recording], only: Sequence[str] = (), scale: float = 1.0
) -> tuple[list[Recording], list[str]]:
    """What all ranks of a group have recorded, and lines on the rest. Raises ValueError.

    What one of them lacks would hang: ring buffers do not begin together.
    """
    wanted = {name for word in only for name in (word, f"mesh_{word}")}
    rows = [[c for c in each.calls if not only or c.group in wanted] for each in found]
    # coalesced operations share a number, and may be equal: all ranks must have as many
    counts = Counter((rank, call) for rank, row in enumerate(rows) for call in row)
    why = {call: call.why_not for _, call in counts}
    for call in why:
        if not why[call] and len({counts[rank, call] for rank in call.ranks}) > 1:
            why[call] = "not recorded alike on every rank of its group"
    lost = Counter(f"{c.op} of {c.group}: {why[c]}" for row in rows for c in row if why[c])
    lines = [f"# {count} x {text}" for text, count in lost.items()]
    lines.append(f"# not replayed: {lost.total()} of {sum(map(len, rows))}")
    if lost.total() == sum(map(len, rows)):
        names = ", ".join(sorted({call.group for each in found for call in each.calls}))
        raise ValueError(f"nothing is left to replay of the groups {names}; {'; '.join(lines)}")
    steps, time_s = max(1, *(each.steps for each in found)), max(each.time_s for each in found)
    kept = [[scaled(call, scale) for call in row if not why[call]] for row in rows]
    return [Recording(steps, time_s, row) for row in kept], lines


def scaled(call: Collective, scale: float) -> Collective:
    """The job's time is that of the recorded size alone."""
    (sends, receives), job_s = call.parts, call.job_s if scale == 1 else 0.0
    part = math.ceil(call.sent // sends * scale)
    return replace(call, sent=part * sends, received=part * receives, job_s=job_s)


# -- the run ---------------------------------------------------------------------------------------


def main() -> int:
    args = parse_args()
    with Benchmark("replay", args) as bench:
        job = bench.job
        try:
            recorded = read_all(args.trace, job)
            found, lines = replayable(recorded, args.only, args.scale_size)
        except ValueError as error:
            bench.refuse(str(error))
        own = {(call.kind, call.team): call for call in found[job.rank].calls}.values()
        needed = sum((c.sent + c.received) * DTYPES[c.dtype].itemsize for c in own)
        tight = share(gather(too_much(needed, job, "--scale-size")))
        if any(tight):
            bench.refuse(next(filter(None, tight)))
        kinds = sorted({call.kind for each in found for call in each.calls})
        digest = hashlib.sha256(repr(recorded).encode()).hexdigest()[:12]
        key: dict[str, Any] = {"recording": digest, "only": ",".join(args.only) or "all"}
        key |= {"scale_size": args.scale_size, "world_size": job.world_size}
        key |= {"device": job.device.type, "backend": job.backend}
        measured = partial(build, found, kinds, job), partial(derive, found, kinds)
        if case := bench.measure(key, *measured):
            bench.print(f"# {case.check}" if case.failed else output(case.metrics))
        bench.print("\n".join(lines))
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
