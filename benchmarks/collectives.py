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
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cli, patterns
from common.benchmark import Benchmark, Workload
from common.dist import Group, Job, node_of_each, partition
from common.memory import too_much
from common.report import Case
from common.table import Table
from common.timing import Step, agree, cuda_graph, time_block

Key = dict[str, Any]
Buffers = list[tuple[Tensor, Tensor]]  # input and output of successive calls
Piece = tuple[int | None, int, int]  # sent by a rank, or None: reduced; first position; elements

TYPES = ("float32", "float16", "bfloat16", "float64", "int8", "uint8", "int32", "int64")
ALIASES = {"float": "float32", "half": "float16", "double": "float64"}  # nccl-tests' names
OPS = dist.ReduceOp
REDOPS = {"sum": OPS.SUM, "avg": OPS.AVG, "min": OPS.MIN, "max": OPS.MAX, "prod": OPS.PRODUCT}
ACROSS: dict[str, Any] = {"rank0": lambda rows, axis: rows[0], "avg": np.mean, "min": np.min}
ACROSS |= {"max": np.max, "0": ACROSS["rank0"], "1": np.mean, "2": np.min, "3": np.max}
VARIANTS = ("out_of_place", "in_place")
SPREAD = 4  # times the last-level cache: what buffers cover, so that calls find none in it
MAX_BUFFERS = 4096  # that calls rotate through
SAMPLE_S = 0.01  # a sample of long calls has fewer of them than -n


# -- the operations --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A rank's part in an operation. Ranks and root are those within the group."""

    group: dist.ProcessGroup
    rank: int
    ranks: int
    root: int
    redop: str
    count: int  # elements that a rank brings
    matrix: list[list[int]]  # elements that go from rank (row) to rank (column)
    splits: tuple[Any, Any]  # of --matrix: what comes from each rank, what goes to each; or None


@dataclass(frozen=True)
class Operation:
    sends: int  # times `count` elements; N: a part for each rank
    receives: int
    bus: Callable[[int], float]  # busbw / algbw of n ranks: nccl-tests' doc/PERFORMANCE.md
    variants: tuple[str, ...]  # the first one is torch's own
    options: str  # -o for a reduction, -r for a root
    call: Callable[[Tensor, Tensor, Place], object]  # input, output
    expected: Callable[[Place], list[Piece]]  # what must have come to a rank


def copied(src: Tensor, dst: Tensor, brings: bool = True) -> Tensor:
    """dst; out of place with what src holds."""
    return dst if src is dst or not brings else dst.copy_(src)


def parts(whole: Tensor, at: Place) -> list[Tensor] | None:
    """One for each rank, on the root alone."""
    return list(whole.chunk(at.ranks)) if at.rank == at.root else None


def ring(src: Tensor, dst: Tensor, at: Place) -> None:
    """To the next rank, from the one before."""
    send = dist.P2POp(dist.isend, src, group=at.group, group_peer=(at.rank + 1) % at.ranks)
    recv = dist.P2POp(dist.irecv, dst, group=at.group, group_peer=(at.rank - 1) % at.ranks)
    for work in dist.batch_isend_irecv([send, recv]):
        work.wait()


N = 0
# fmt: off
OPERATIONS = {
    "all_reduce": Operation(1, 1, lambda n: 2 * (n - 1) / n, VARIANTS[::-1], "-o",
        lambda s, d, at: dist.all_reduce(copied(s, d), REDOPS[at.redop], at.group),
        lambda at: [(None, 0, at.count)]),
    "all_gather": Operation(1, N, lambda n: (n - 1) / n, VARIANTS, "",
        lambda s, d, at: dist.all_gather_into_tensor(d, s, at.group),
        lambda at: [(rank, 0, at.count) for rank in range(at.ranks)]),
    "reduce_scatter": Operation(N, 1, lambda n: (n - 1) / n, VARIANTS, "-o",
        lambda s, d, at: dist.reduce_scatter_tensor(d, s, REDOPS[at.redop], at.group),
        lambda at: [(None, at.rank * at.count, at.count)]),
    "all_to_all": Operation(N, N, lambda n: (n - 1) / n, VARIANTS[:1], "",
        lambda s, d, at: dist.all_to_all_single(d, s, *at.splits, group=at.group),
        lambda at: [(s, sum(row[: at.rank]), row[at.rank]) for s, row in enumerate(at.matrix)]),
    "broadcast": Operation(1, 1, lambda n: 1.0, VARIANTS[::-1], "-r",
        lambda s, d, at: dist.broadcast(
            copied(s, d, at.rank == at.root), group=at.group, group_src=at.root),
        lambda at: [(at.root, 0, at.count)]),
    "reduce": Operation(1, 1, lambda n: 1.0, VARIANTS[::-1], "-o -r",
        lambda s, d, at: dist.reduce(
            copied(s, d), op=REDOPS[at.redop], group=at.group, group_dst=at.root),
        lambda at: [(None, 0, at.count)] if at.rank == at.root else []),
    "gather": Operation(1, N, lambda n: (n - 1) / n, VARIANTS, "-r",
        lambda s, d, at: dist.gather(s, parts(d, at), group=at.group, group_dst=at.root),
        lambda at: [(rank, 0, at.count) for rank in range(at.ranks) if at.rank == at.root]),
    "scatter": Operation(N, 1, lambda n: (n - 1) / n, VARIANTS, "-r",
        lambda s, d, at: dist.scatter(d, parts(s, at), group=at.group, group_src=at.root),
        lambda at: [(at.root, at.rank * at.count, at.count)]),
    "sendrecv": Operation(1, 1, lambda n: 1.0, VARIANTS[:1], "", ring,
        lambda at: [((at.rank - 1) % at.ranks, 0, at.count)]),
    "barrier": Operation(1, 1, lambda n: 0.0, VARIANTS[:1], "",
        lambda s, d, at: dist.barrier(at.group, device_ids=[s.get_device()] if s.is_cuda else None),
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
    add, size, whole = parser.add_argument, cli.size, cli.number(int, 0)
    names, redops = cli.list_of(str, tuple(OPERATIONS)), cli.list_of(str, tuple(REDOPS))
    types = cli.list_of(lambda name: ALIASES.get(name, name), TYPES)
    text = f"`all` or a list of {', '.join(OPERATIONS)} (default: all_reduce)"
    add("--collective", type=names, default=["all_reduce"], metavar="NAME", help=text)
    add("-b", "--minbytes", type=size, default=8, metavar="SIZE", help="(default: 8)")
    add("-e", "--maxbytes", type=size, metavar="SIZE", help="(default: 64M, on CUDA 1G)")
    add("-i", "--stepbytes", type=size, metavar="SIZE", help="add this from size to size, or")
    more = cli.number(float, 1, above=True)
    add("-f", "--stepfactor", type=more, default=2.0, metavar="F", help="multiply (default: 2)")
    text = "in a sample, as nccl-tests' --iters; of long calls fewer (default: 20)"
    add("-n", "--calls", type=cli.positive_int, default=20, metavar="N", help=text)
    add("-d", "--datatype", type=types, default=["float32"], metavar="TYPE", help=", ".join(TYPES))
    add("-o", "--op", type=redops, default=["sum"], metavar="OP", help=", ".join(REDOPS))
    text = "a rank within its group (default: 0)"
    add("-r", "--root", type=whole, default=0, metavar="R", help=text)
    text = "check N samples, 0 for none (default: 1)"
    add("-c", "--check", type=whole, default=1, metavar="N", help=text)
    text = "a sample: N replays of a graph of calls"
    add("-G", "--cudagraph", type=whole, default=0, metavar="N", help=text)
    add("-a", "--average", choices=ACROSS, default="max", help="across ranks (default: max)")
    add("-z", "--blocking", choices="01", default="0", help="1: wait for each call on the host")
    add("--cache-warm", action="store_true", help="one buffer instead of many")
    text = "at the same time: world, node, cross (rank i of each node), or ranks as 0,1/2-3"
    add("--groups", default="world", metavar="G", help=text)
    text = "all_to_all: bytes from rank (row) to rank (column), as nccl-tests' alltoallv reads it"
    add("--matrix", type=read_matrix, metavar="FILE", help=text)
    text = "of the link: adds busbw in percent of it"
    add("--limit", type=cli.positive_float, metavar="GB/s", help=text)
    text = "fail where the top quarter of the sizes has less than 0.9 of it"
    add("--min-busbw", type=cli.positive_float, metavar="GB/s", help=text)
    cli.add_common_flags(parser, min_iters=12, max_seconds=0.3)
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


def plan(args: argparse.Namespace, job: Job, ranks: int) -> dict[str, list[Key]]:
    """The title and the keys of each table."""
    sizes = scan(args.minbytes, args.maxbytes, args.stepbytes, args.stepfactor)
    fixed = {name: getattr(args, name) for name in ("calls", "blocking", "cudagraph", "average")}
    fixed |= {"caches": "warm" if args.cache_warm or args.cudagraph else "cold"}
    fixed |= {"groups": args.groups, "group_ranks": ranks, "matrix": bool(args.matrix)}
    fixed |= {"device": job.device.type, "backend": job.backend}
    tables = {}
    for name, dtype, redop in itertools.product(args.collective, args.datatype, args.op):
        op = OPERATIONS[name]
        this = {"collective": name, "dtype": dtype if name != "barrier" else "none"}
        this |= {"redop": redop if "-o" in op.options else "none"}
        this |= {"root": args.root if "-r" in op.options else -1}
        unit = getattr(torch, dtype).itemsize
        unit *= ranks if N in (op.sends, op.receives) and not args.matrix else 1
        counts = dict.fromkeys(max(1, size // unit) for size in sizes)
        what = f"# {name} {this['dtype']} {this['redop']}".replace(" none", "")
        tables[f"{what}, {args.groups} ({ranks} rank{'s' * (ranks > 1)})"] = [
            this | {"size_bytes": count * unit, "count": count} | fixed
            for count in (counts if name != "barrier" else [0])
        ]
    return tables


# -- one size --------------------------------------------------------------------------------------


def build(key: Key, args: argparse.Namespace, job: Job, group: Group) -> Workload:
    """What a rank measures in a case: calls on successive buffers, out of place and in place."""
    op, device = OPERATIONS[key["collective"]], job.device
    dtype = getattr(torch, key["dtype"], torch.uint8)  # a barrier has none
    rank, ranks, count = dist.get_rank(group.test), key["group_ranks"], key["count"]
    splits: tuple[Any, Any] = (None, None)
    matrix = [[count] * ranks] * ranks
    if args.matrix:
        matrix = [[size // dtype.itemsize for size in row] for row in args.matrix]
        splits = [row[rank] for row in matrix], matrix[rank]
    at = Place(group.test, rank, ranks, max(0, key["root"]), key["redop"], count, matrix, splits)
    length = SPREAD * cache_bytes(device) // dtype.itemsize if key["caches"] == "cold" else 0
    places = buffers(op, at, length, dtype, device)
    calls = {v: [partial(op.call, *pair, at) for pair in places[v]] for v in op.variants}
    seconds = max(min(time_block(some[0], 2, device)[0]) for some in calls.values())
    n = agree(max(1, min(args.calls, int(SAMPLE_S / max(seconds, 1e-9)))), group)

    def wrong(variant: str) -> int:
        """How many values are, after calls like the timed ones, each on buffers of its own."""
        some = places[variant][:n]
        step = step_of(calls[variant][: len(some)], len(some), args, device)
        redop = at.redop if "-o" in op.options else None
        for src, dst in some:
            patterns.blank(dst)
            patterns.fill(src, patterns.tile(rank, redop, ranks))
        dist.barrier(group.control)
        if key["collective"] == "barrier":  # all count themselves before it, and one comes late
            time.sleep(0.02 if rank == ranks - 1 else 0)
            name = f"barrier/{group.test.group_name}"
            job.store.add(name, 1)
            step()
            return -job.store.add(name, 0) % ranks  # who was not waited for
        for _ in some:
            step()
        return sum(count_wrong(dst, op.expected(at), redop, ranks) for _, dst in some)

    def facts() -> dict[str, Any]:
        return {"calls": n} | {v: sum(wrong(v) for _ in range(args.check)) for v in op.variants}

    steps = {v: step_of(calls[v], n, args, device) for v in op.variants}
    return Workload(steps, n * max(1, args.cudagraph), facts)


def buffers(
    op: Operation, at: Place, length: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Buffers]:
    """Of each variant as many as `length` elements hold, spread over them, but at least one."""
    send, recv = (at.count * (part or at.ranks) for part in (op.sends, op.receives))
    need = send + recv
    if at.splits[0]:
        recv, send = map(sum, at.splits)
        need = 2 * at.count  # at least send + recv: all ranks have as many buffers
    need = max(64, -(-need // 64) * 64)
    number = max(1, min(length // need, MAX_BUFFERS))
    row = max(need, length // number // 64 * 64)
    memory = torch.ones(number, row, dtype=dtype, device=device)
    whole = [m[: max(send, recv)] for m in memory]
    mine = slice(at.rank * at.count, (at.rank + 1) * at.count)
    return {
        "out_of_place": [(m[:send], m[send : send + recv]) for m in memory],
        "in_place": [(w[mine] if send < recv else w, w[mine] if send > recv else w) for w in whole],
    }


def cache_bytes(device: torch.device) -> int:
    """The last-level cache: L2 on CUDA, on the CPU as Linux tells, or else 32 MiB."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    return max((cli.size(path.read_text().strip()) for path in sizes), default=2**25)


def step_of(calls: Sequence[Step], n: int, args: argparse.Namespace, device: torch.device) -> Step:
    """A call on the next buffers; with -G each n-th replays a graph of n calls, the others none."""
    feed, number = itertools.cycle(calls), itertools.count(1)
    if args.cudagraph:
        replay = cuda_graph(lambda: [next(feed)() for _ in range(n)], device)
        return lambda: replay() if next(number) % n == 0 else None
    if args.blocking == "1" and device.type == "cuda":
        wait: Step = torch.cuda.synchronize
        return lambda: (next(feed)(), wait())
    return lambda: next(feed)()


def count_wrong(got: Tensor, pieces: list[Piece], redop: str | None, ranks: int) -> int:
    """How many values of an output are not those that must have come to this rank."""
    wrong, near = 0, patterns.tolerance(redop, got.dtype)
    parts = got.split([length for *_, length in pieces]) if pieces else ()
    for (sender, start, _), part in zip(pieces, parts, strict=True):
        want = patterns.reduced_tile(redop, ranks) if sender is None else patterns.tile(sender)
        wrong += patterns.count_wrong(part, want, start, near)
    return wrong


# -- what rank 0 makes of it -----------------------------------------------------------------------


def derive(args: argparse.Namespace, groups: list[list[int]], case: Case, facts: Any) -> None:
    """Times and bandwidths of both variants; of several groups the slowest one counts."""
    key, m = case.key, case.metrics
    m |= {"calls": facts[0]["calls"], "wrong": 0}
    for v, rows in case.samples_s.items():
        of_groups = [[rows[case.ranks.index(rank)] for rank in ranks] for ranks in groups]
        times = [float(np.median(ACROSS[args.average](some, axis=0))) for some in of_groups]
        m[f"{v}_time_s"] = max(times)
        if len(groups) > 1:
            m[f"{v}_group_times_s"] = times
        if key["size_bytes"]:
            algbw = key["size_bytes"] / max(times) / 1e9
            busbw = algbw * OPERATIONS[key["collective"]].bus(key["group_ranks"])
            m |= {f"{v}_algbw_gb_per_s": algbw, f"{v}_busbw_gb_per_s": busbw}
            if args.limit:
                m["efficiency"] = max(m.get("efficiency", 0), busbw / args.limit)
        if args.check:
            m[f"{v}_wrong"] = sum(fact[v] for fact in facts)
            m["wrong"] += m[f"{v}_wrong"]
    case.check = "passed" if args.check else "skipped: -c 0"
    case.check = f"failed: {m['wrong']} wrong values" if m["wrong"] else case.check


HEADER = f"""\
#{"":59}out-of-place{"":20}in-place
#       size        count     type  redop   root{"     time   algbw   busbw #wrong" * 2}
#        (B)   (elements){"":23}{"     (us)  (GB/s)  (GB/s)       " * 2}"""


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
        return line + ("  warm caches" if case.key["caches"] == "warm" else "")


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


def problem(args: argparse.Namespace, job: Job, ranks: int) -> str | None:
    """Which flag does not fit the job; on this rank."""
    if args.maxbytes < args.minbytes:
        return f"expected -e at or above -b, got -b {args.minbytes} -e {args.maxbytes}"
    if args.root >= ranks:
        return f"-r {args.root}: a root is a rank within its group of {ranks}; e.g. -r {ranks - 1}"
    if args.matrix and (len(args.matrix) != ranks or not any(map(any, args.matrix))):
        return f"--matrix: expected {ranks} rows, one a rank, not all 0; got {len(args.matrix)}"
    if args.cudagraph and job.device.type != "cuda":
        return "-G captures CUDA graphs, and this is the CPU; leave it out"
    return too_much(max(2 * args.maxbytes, SPREAD * cache_bytes(job.device)), job, "-e")


def main() -> int:
    args = parse_args()
    with Benchmark("collectives", args) as bench:
        job, tables = bench.job, dict[str, list[Case]]()
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
        ranks, members = len(groups[0]), sorted(itertools.chain(*groups))
        if text := bench.share(problem(args, job, ranks)):
            bench.refuse(text)
        for title, keys in plan(args, job, ranks).items():
            bench.begin_table(title, {})
            if reason := lacking(keys[0], job):
                bench.print(f"# n/a: {reason}")
                continue
            bench.table = ScanTable({})
            bench.print(HEADER)
            for key in keys:
                work, made = partial(build, key, args, job), partial(derive, args, groups)
                if case := bench.measure(key, work, made, members, groups):
                    tables.setdefault(title, []).append(case)
        footer(tables, args.min_busbw, bench)
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
