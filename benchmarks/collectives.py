#!/usr/bin/env python3
"""How fast is each collective, at each size, and are its results right? nccl-tests for torch.

    time    = a sample of -n calls / n; -a of the ranks' (default max); median of the samples
    algbw   = size / time, in GB/s of 10^9 bytes;     busbw = algbw * factor
    factor  = 2(n-1)/n for all_reduce; (n-1)/n for all_gather, reduce_scatter, all_to_all, gather
              and scatter; 1 for broadcast, reduce and sendrecv (a ring)
    size    = the larger of what a rank sends and receives, in bytes; count = elements it brings
    #wrong  = values that differ from what rank and position say; must be 0
    in-place: input and output share memory. torch has all_reduce, broadcast and reduce in place
              only; their out-of-place time includes the copy from input to output

    torchrun --nproc-per-node 2 benchmarks/collectives.py -b 4 -e 64M -f 2
    torchrun --nproc-per-node 8 benchmarks/collectives.py --collective all -e 1G --json report.jsonl
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        benchmarks/collectives.py -b 1G -e 1G --groups cross --limit 50

Flags, table and formulas are those of NVIDIA's nccl-tests; written anew. BSD-3-Clause.
docs/collectives.md shows how to read the table.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cli, patterns
from common.benchmark import Benchmark, Workload
from common.dist import Group, Job
from common.environment import node_of_each, partition
from common.memory import too_much
from common.report import Case
from common.table import Table
from common.timing import agree, cuda_graph, time_block

Key = dict[str, Any]
Call = Callable[[], object]
Buffers = list[tuple[torch.Tensor, torch.Tensor]]  # input and output of successive calls
Piece = tuple[int | None, int, int]  # sent by a rank, or None: reduced; first position; elements

TYPES = ("float32", "float16", "bfloat16", "float64", "int8", "uint8", "int32", "int64")
ALIASES = {"float": "float32", "half": "float16", "double": "float64"}  # nccl-tests' names
OPS = dist.ReduceOp
REDOPS = {"sum": OPS.SUM, "avg": OPS.AVG, "min": OPS.MIN, "max": OPS.MAX, "prod": OPS.PRODUCT}
ACROSS: dict[str, Any] = {"rank0": lambda rows, axis: rows[0], "avg": np.mean, "min": np.min}
ACROSS |= {"max": np.max, "0": ACROSS["rank0"], "1": np.mean, "2": np.min, "3": np.max}
VARIANTS = ("out_of_place", "in_place")
MAX_BUFFERS = 4096  # that calls rotate through
SAMPLE_S = 0.01  # a sample of long calls has fewer of them than -n


# -- the operations --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A rank's part in an operation. Ranks and root are those within the group."""

    group: Group
    rank: int
    ranks: int
    root: int
    redop: str
    dtype: torch.dtype
    count: int  # elements that a rank brings
    matrix: list[list[int]]  # elements that go from rank (row) to rank (column)
    splits: tuple[Any, Any]  # of --matrix: what comes from each rank, what goes to each; or None

    def parts(self, whole: torch.Tensor) -> list[torch.Tensor] | None:
        return list(whole.chunk(self.ranks)) if self.rank == self.root else None


def copied(src: torch.Tensor, dst: torch.Tensor, brings: bool = True) -> torch.Tensor:
    """dst; out of place with what src holds."""
    return dst if src is dst or not brings else dst.copy_(src)


def ring(src: torch.Tensor, dst: torch.Tensor, at: Place) -> None:
    """To the next rank, from the one before."""
    to, source = (at.rank + 1) % at.ranks, (at.rank - 1) % at.ranks
    send = dist.P2POp(dist.isend, src, group=at.group.test, group_peer=to)
    recv = dist.P2POp(dist.irecv, dst, group=at.group.test, group_peer=source)
    for work in dist.batch_isend_irecv([send, recv]):
        work.wait()


@dataclass(frozen=True)
class Operation:
    sends: int  # times `count` elements; N: a part for each rank
    receives: int
    bus: Callable[[int], float]  # busbw / algbw of n ranks: nccl-tests' doc/PERFORMANCE.md
    variants: tuple[str, ...]  # the first one is torch's own
    options: str  # -o for a reduction, -r for a root
    call: Callable[[torch.Tensor, torch.Tensor, Place], object]  # input, output
    expected: Callable[[Place], list[Piece]]  # what must have come to a rank


N = 0
# fmt: off
OPERATIONS = {
    "all_reduce": Operation(1, 1, lambda n: 2 * (n - 1) / n, VARIANTS[::-1], "-o",
        lambda s, d, at: dist.all_reduce(copied(s, d), REDOPS[at.redop], at.group.test),
        lambda at: [(None, 0, at.count)]),
    "all_gather": Operation(1, N, lambda n: (n - 1) / n, VARIANTS, "",
        lambda s, d, at: dist.all_gather_into_tensor(d, s, at.group.test),
        lambda at: [(rank, 0, at.count) for rank in range(at.ranks)]),
    "reduce_scatter": Operation(N, 1, lambda n: (n - 1) / n, VARIANTS, "-o",
        lambda s, d, at: dist.reduce_scatter_tensor(d, s, REDOPS[at.redop], at.group.test),
        lambda at: [(None, at.rank * at.count, at.count)]),
    "all_to_all": Operation(N, N, lambda n: (n - 1) / n, VARIANTS[:1], "",
        lambda s, d, at: dist.all_to_all_single(d, s, *at.splits, group=at.group.test),
        lambda at: [(s, sum(row[: at.rank]), row[at.rank]) for s, row in enumerate(at.matrix)]),
    "broadcast": Operation(1, 1, lambda n: 1.0, VARIANTS[::-1], "-r",
        lambda s, d, at: dist.broadcast(
            copied(s, d, at.rank == at.root), group=at.group.test, group_src=at.root),
        lambda at: [(at.root, 0, at.count)]),
    "reduce": Operation(1, 1, lambda n: 1.0, VARIANTS[::-1], "-o -r",
        lambda s, d, at: dist.reduce(
            copied(s, d), op=REDOPS[at.redop], group=at.group.test, group_dst=at.root),
        lambda at: [(None, 0, at.count)] if at.rank == at.root else []),
    "gather": Operation(1, N, lambda n: (n - 1) / n, VARIANTS, "-r",
        lambda s, d, at: dist.gather(s, at.parts(d), group=at.group.test, group_dst=at.root),
        lambda at: [(rank, 0, at.count) for rank in range(at.ranks) if at.rank == at.root]),
    "scatter": Operation(N, 1, lambda n: (n - 1) / n, VARIANTS, "-r",
        lambda s, d, at: dist.scatter(d, at.parts(s), group=at.group.test, group_src=at.root),
        lambda at: [(at.root, at.rank * at.count, at.count)]),
    "sendrecv": Operation(1, 1, lambda n: 1.0, VARIANTS[:1], "", ring,
        lambda at: [((at.rank - 1) % at.ranks, 0, at.count)]),
    "barrier": Operation(1, 1, lambda n: 0.0, VARIANTS[:1], "",
        lambda s, d, at: dist.barrier(
            at.group.test, device_ids=[s.get_device()] if s.is_cuda else None),
        lambda at: []),
}
# fmt: on


def lacking(key: Key, job: Job) -> str | None:
    """Why this cannot be measured, as is known without a try; None where it can."""
    alone = job.backend == "gloo" and (key["group_ranks"] == 1 or job.device.type == "cuda")
    if key["collective"] == "sendrecv" and alone:
        return "gloo sends neither to itself nor from CUDA"
    if key["redop"] == "avg" and not getattr(torch, key["dtype"]).is_floating_point:
        return "an average of whole numbers is none"
    return "it is not captured" if key["collective"] == "barrier" and key["cudagraph"] else None


# -- flags and sizes -------------------------------------------------------------------------------


def parse_args() -> argparse.Namespace:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    ops = f"`all` or a list of {', '.join(OPERATIONS)} (default: all_reduce)"
    groups = "at the same time: world, node, cross (rank i of each node), or ranks as 0,1/2-3"
    matrix = "all_to_all: bytes from rank (row) to rank (column), as nccl-tests' alltoallv reads it"
    slow = "fail where the top quarter of the sizes has less than 0.9 of it"
    # fmt: off
    for flags, kind, default, unit, text in (
        ("--collective", cli.list_of(str, tuple(OPERATIONS)), ["all_reduce"], "NAME", ops),
        ("-b --minbytes", cli.size, 8, "SIZE", "(default: 8)"),
        ("-e --maxbytes", cli.size, None, "SIZE", "(default: 64M, on CUDA 1G)"),
        ("-i --stepbytes", cli.size, None, "SIZE", "add this from size to size, or"),
        ("-f --stepfactor", cli.number(float, 1, above=True), 2.0, "F", "multiply (default: 2)"),
        ("-n --calls", cli.positive_int, 20, "N",
         "in a sample, as nccl-tests' --iters; of long calls fewer (default: 20)"),
        ("-d --datatype", cli.list_of(lambda name: ALIASES.get(name, name), TYPES), ["float32"],
         "TYPE", ", ".join(TYPES)),
        ("-o --op", cli.list_of(str, tuple(REDOPS)), ["sum"], "OP", ", ".join(REDOPS)),
        ("-r --root", cli.number(int, 0), 0, "R", "a rank within its group (default: 0)"),
        ("-c --check", cli.number(int, 0), 1, "N", "check N samples, 0 for none (default: 1)"),
        ("-G --cudagraph", cli.number(int, 0), 0, "N", "a sample: N replays of a graph of calls"),
        ("--groups", str, "world", "G", groups),
        ("--matrix", read_matrix, None, "FILE", matrix),
        ("--limit", cli.positive_float, None, "GB/s", "of the link: adds busbw in percent of it"),
        ("--min-busbw", cli.positive_float, None, "GB/s", slow),
    ):
        add(*flags.split(), type=kind, default=default, metavar=unit, help=text)
    # fmt: on
    add("-a", "--average", choices=ACROSS, default="max", help="across ranks (default: max)")
    add("-z", "--blocking", choices="01", default="0", help="1: wait for each call on the host")
    add("--cache-warm", action="store_true", help="one buffer instead of many")
    cli.add_common_flags(parser, min_iters=12, max_seconds=0.3)
    add("-w", dest="warmup_iters", type=cli.number(int, 0), help="as --warmup-iters")
    add("-J", "--output-file", dest="json", help="as --json")
    add("-T", dest="timeout", type=cli.positive_float, help="as --timeout")
    args = parser.parse_args()
    args.collective = ["all_to_all"] if args.matrix else args.collective
    return args


def read_matrix(path: str) -> Any:
    """Rows of bytes, between blanks or commas, down to multiples of 16 as in nccl-tests."""
    try:
        lines = Path(path).read_text().replace(",", " ").splitlines()
        rows = np.array([line.split() for line in lines if line.strip()], dtype=float)
        if rows.shape != (len(rows), len(rows)) or not ((rows >= 0) & (rows < 2**50)).all():
            raise ValueError("not square, or not bytes")
    except (OSError, ValueError) as error:
        cli.wrong("rows of as many bytes as rows", f"{path}: {error}", "e.g. `0 4096` and `4096 0`")
    return (rows // 16 * 16).astype(int).tolist()


def scan(low: int, high: int, step: int | None, factor: float) -> list[int]:
    """Sizes from `low` to `high`, each `step` bytes more than the last or `factor` times it."""
    sizes, following = [], max(1, low)
    while following <= high:
        sizes.append(following)
        following += step or max(1, int(following * factor) - following)
    return sizes


# -- one size --------------------------------------------------------------------------------------


def build(key: Key, args: argparse.Namespace, job: Job, group: Group) -> Workload:
    """What a rank measures in a case: calls on successive buffers, out of place and in place."""
    op, device = OPERATIONS[key["collective"]], job.device
    dtype = getattr(torch, key["dtype"], torch.uint8)
    rank, ranks = dist.get_rank(group.test), key["group_ranks"]
    splits: tuple[Any, Any] = (None, None)
    matrix = [[key["count"]] * ranks] * ranks
    if args.matrix:
        matrix = [[size // dtype.itemsize for size in row] for row in args.matrix]
        splits = [row[rank] for row in matrix], matrix[rank]
    root, redop = max(0, key["root"]), key["redop"]
    at = Place(group, rank, ranks, root, redop, dtype, key["count"], matrix, splits)
    places = {v: buffers(op, at, v, key["caches"] == "cold", device) for v in op.variants}
    calls = {v: [partial(op.call, *pair, at) for pair in places[v]] for v in places}
    seconds = max(min(time_block(some[0], 2, device)[0]) for some in calls.values())
    n = agree(max(1, min(args.calls, int(SAMPLE_S / max(seconds, 1e-9)))), group)

    def wrong(variant: str) -> int:
        m = min(n, len(calls[variant]))  # each on buffers of its own
        step = step_of(calls[variant][:m], m, args, device)  # like the one that is timed
        if key["collective"] == "barrier":
            return barrier_wrong(step, at, job)
        return count_wrong(op, at, places[variant][:m], step)

    def facts() -> dict[str, Any]:
        return {"calls": n} | {v: sum(wrong(v) for _ in range(args.check)) for v in calls}

    steps = {v: step_of(some, n, args, device) for v, some in calls.items()}
    return Workload(steps, n * max(1, args.cudagraph), facts)


def buffers(op: Operation, at: Place, variant: str, cold: bool, device: torch.device) -> Buffers:
    """Spread over twice the last-level cache, so that a call does not find its own in it."""
    send, recv = (at.count * (part or at.ranks) for part in (op.sends, op.receives))
    if at.splits[0]:
        recv, send = map(sum, at.splits)
    need = max(send, recv) if variant == "in_place" else send + recv
    most = 2 * at.count if at.splits[0] else need  # all ranks have as many buffers
    step = max(64, -(-most // 64) * 64)
    length = max(step, 2 * cache_bytes(device) // at.dtype.itemsize if cold else 0)
    memory = torch.ones(length, dtype=at.dtype, device=device)  # drives other data out of the cache
    number = min(length // step, MAX_BUFFERS)
    apart = length // number // 64 * 64
    some = [memory[k * apart : k * apart + need] for k in range(number)]
    if variant != "in_place":
        return [(m[:send], m[send:]) for m in some]
    mine = slice(at.rank * at.count, (at.rank + 1) * at.count)
    return [(m[mine] if send < recv else m, m[mine] if send > recv else m) for m in some]


def cache_bytes(device: torch.device) -> int:
    """The last-level cache: L2 on CUDA, on the CPU as Linux tells, or else 32 MiB."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    return max((cli.size(path.read_text().strip()) for path in sizes), default=2**25)


def step_of(calls: Sequence[Call], n: int, args: argparse.Namespace, device: torch.device) -> Call:
    """A call on the next buffers; with -G each n-th replays a graph of n calls, the others none."""
    feed, count = itertools.cycle(calls), itertools.count(1)
    if args.cudagraph:
        replay = cuda_graph(lambda: [next(feed)() for _ in range(n)], device)
        return lambda: replay() if next(count) % n == 0 else None

    waits = args.blocking == "1" and device.type == "cuda"
    wait: Call = torch.cuda.synchronize if waits else lambda: None
    return lambda: (next(feed)(), wait())


def count_wrong(op: Operation, at: Place, places: Buffers, step: Call) -> int:
    """Make a call on each, on fresh data; how many values of this rank's outputs are wrong then."""
    redop, pieces, wrong = at.redop if "-o" in op.options else None, op.expected(at), 0
    for src, dst in places:
        patterns.blank(dst)
        patterns.fill(src, patterns.tile(at.rank, redop, at.ranks))
    dist.barrier(at.group.control)
    for _ in places:
        step()
    near = patterns.tolerance(redop, at.dtype)
    for _, dst in places if pieces else []:
        parts = dst.split([length for _, _, length in pieces])
        for (by, start, _), part in zip(pieces, parts, strict=True):
            values = patterns.reduced_tile(redop, at.ranks) if by is None else patterns.tile(by)
            wrong += patterns.count_wrong(part, values, start, near)
    return wrong


def barrier_wrong(step: Call, at: Place, job: Job) -> int:
    """How many ranks a barrier did not wait for: all count themselves before it, one comes late."""
    name = f"barrier/{at.group.test.group_name}"
    time.sleep(0.02 if at.rank == at.ranks - 1 else 0)
    job.store.add(name, 1)
    step()
    return -job.store.add(name, 0) % at.ranks


# -- what rank 0 makes of it -----------------------------------------------------------------------


def derive(args: argparse.Namespace, groups: list[list[int]], case: Case, facts: Any) -> None:
    """Times and bandwidths of both variants; of several groups the slowest one counts."""
    key, m = case.key, case.metrics
    m |= {"calls": facts[0]["calls"], "wrong": 0}
    for v, rows in case.samples_s.items():
        of_groups = [[rows[case.ranks.index(rank)] for rank in ranks] for ranks in groups]
        times = [float(np.median(ACROSS[args.average](some, axis=0))) for some in of_groups]
        m[f"{v}_time_s"] = max(times)
        if key["size_bytes"]:
            algbw = key["size_bytes"] / max(times) / 1e9
            busbw = algbw * OPERATIONS[key["collective"]].bus(key["group_ranks"])
            m |= {f"{v}_algbw_gb_per_s": algbw, f"{v}_busbw_gb_per_s": busbw}
            if args.limit:
                m["efficiency"] = max(m.get("efficiency", 0), busbw / args.limit)
        if len(groups) > 1:
            m[f"{v}_group_times_s"] = times
        if args.check:
            m[f"{v}_wrong"] = sum(fact[v] for fact in facts)
            m["wrong"] += m[f"{v}_wrong"]
    case.check = "passed" if args.check else "skipped: -c 0"
    case.check = f"failed: {m['wrong']} wrong values" if m["wrong"] else case.check


class ScanTable(Table):
    """As nccl-tests lays it out, since other tools read that."""

    def row(self, case: Case) -> str:
        names, m = ("size_bytes", "count", "dtype", "redop", "root"), case.metrics
        size, count, dtype, redop, root = (case.key[name] for name in names)
        line = f"{size:>12} {count:>12} {dtype:>8} {redop:>6} {root:>6}"
        for v in VARIANTS if m else ():
            us = m.get(f"{v}_time_s", np.nan) * 1e6
            algbw, busbw = (m.get(f"{v}_{x}_gb_per_s", np.nan) for x in ("algbw", "busbw"))
            line += f" {us:>8.{2 if us < 1e5 else 0}f} {algbw:>7.2f} {busbw:>7.2f}"
            line += f" {m.get(f'{v}_wrong', 'N/A'):>6}"
        line = line.replace("nan", "N/A") + (f"  {case.check}" if case.failed else "")
        line += f"  {m['efficiency']:.0%} of the limit" if "efficiency" in m else ""
        line += "  warm caches" if case.key["caches"] == "warm" else ""
        self.rows += 1
        fixed = f"#{'size':>11} {'count':>12} {'type':>8} {'redop':>6} {'root':>6}"
        header = f"#{'':59}out-of-place{'':20}in-place\n{fixed}"
        header += "     time   algbw   busbw #wrong" * 2 + f"\n#{'(B)':>11} {'(elements)':>12}"
        header += " " * 23 + "     (us)  (GB/s)  (GB/s)       " * 2 + "\n"
        return (header if self.rows == 1 else "") + line


def footer(tables: dict[str, list[Case]], wanted: float | None, bench: Benchmark) -> None:
    """A line for each table, then those that nccl-tests ends with, which other tools read."""
    every: list[float] = []
    bench.print("#")
    for title, cases in tables.items():
        names = [f"{v}_busbw_gb_per_s" for v in VARIANTS]
        rates = [[case.metrics[name] for case in cases if name in case.metrics] for name in names]
        every += [rate for some in rates for rate in some]
        tops = [float(np.mean(some[-len(some) // 4 :])) for some in rates if some]
        if tops:
            text = f"busbw over the top quarter of the sizes {max(tops):.4g} GB/s"
            bench.print(f"{title}: {text}")
            if wanted and max(tops) < 0.9 * wanted:
                bench.fail(f"{title[2:]}: {text}, under 0.9 of --min-busbw {wanted:g}")
    wrong = sum(case.metrics.get("wrong", 0) for cases in tables.values() for case in cases)
    bench.print(f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}")
    bench.print(f"# Avg bus bandwidth    : {np.mean(every) if every else 0:g}\n#")


def plan(args: argparse.Namespace, job: Job, ranks: int) -> dict[str, list[Key]]:
    """The title and the keys of each table."""
    fixed = {name: getattr(args, name) for name in ("calls", "blocking", "cudagraph", "average")}
    fixed |= {"caches": "warm" if args.cache_warm or args.cudagraph else "cold"}
    fixed |= {"groups": args.groups, "group_ranks": ranks, "matrix": bool(args.matrix)}
    fixed |= {"device": job.device.type, "backend": job.backend}
    tables = {}
    for name in args.collective:
        op, types = OPERATIONS[name], ["none"] if name == "barrier" else args.datatype
        redops = args.op if "-o" in op.options else ["none"]
        for dtype, redop in itertools.product(types, redops):
            element = getattr(torch, dtype, torch.uint8).itemsize
            unit = element * (ranks if N in (op.sends, op.receives) and not args.matrix else 1)
            counts = dict.fromkeys(max(1, size // unit) for size in args.sizes)
            this = {"collective": name, "dtype": dtype, "redop": redop}
            this["root"] = args.root if "-r" in op.options else -1
            what = f"# {name} {dtype} {redop}".replace(" none", "")
            title = f"{what}, {args.groups} ({ranks} rank{'s' * (ranks > 1)})"
            tables[title] = [
                this | {"size_bytes": n * unit, "count": n} | fixed
                for n in (counts if name != "barrier" else [0])
            ]
    return tables


def problem(args: argparse.Namespace, job: Job, ranks: int) -> str | None:
    """Which flag does not fit the job; on this rank."""
    if not 0 <= args.maxbytes - args.minbytes <= 1e5 * (args.stepbytes or args.maxbytes):
        return "expected -e at or above -b, and at most 100,000 steps of -i between them"
    if args.root >= ranks:
        return f"-r {args.root}: a root is a rank within its group of {ranks}; e.g. -r {ranks - 1}"
    if args.matrix and (len(args.matrix) != ranks or not any(map(any, args.matrix))):
        return (
            f"--matrix: expected {ranks} rows, one a rank, and bytes; got {len(args.matrix)} rows"
        )
    if args.cudagraph and job.device.type != "cuda":
        return "-G captures CUDA graphs, and this is the CPU; leave it out"
    # two variants, one of which has its input in its output
    return too_much(3 * max(args.maxbytes, 2 * cache_bytes(job.device)), job, "-e")


def main() -> int:
    args = parse_args()
    with Benchmark("collectives", args) as bench:
        job, tables = bench.job, {}
        largest = 2**30 if job.device.type == "cuda" else 2**26
        args.maxbytes = args.maxbytes or max(args.minbytes, largest)
        if args.matrix:  # the rank with the most to send or receive
            lines = (*args.matrix, *zip(*args.matrix, strict=True))
            args.minbytes = args.maxbytes = max(map(sum, lines))
        try:
            nodes = node_of_each(bench.share(bench.report.environment))
            groups = partition(args.groups, nodes)
        except ValueError as error:
            bench.refuse(f"--groups: {error}")
        ranks = len(groups[0])
        if text := bench.share(problem(args, job, ranks)):
            bench.refuse(text)
        args.sizes = scan(args.minbytes, args.maxbytes, args.stepbytes, args.stepfactor)
        for title, keys in plan(args, job, ranks).items():
            bench.begin_table(title, {})
            if reason := lacking(keys[0], job):
                bench.print(f"# n/a: {reason}")
                continue
            bench.table, members = ScanTable({}), sorted(itertools.chain(*groups))
            made = partial(derive, args, groups)
            work = [(key, partial(build, key, args, job), made, members, groups) for key in keys]
            tables[title] = [case for case in itertools.starmap(bench.measure, work) if case]
        footer(tables, args.min_busbw, bench)
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
