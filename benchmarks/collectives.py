#!/usr/bin/env python3
"""How fast is each collective, at each size, and are its results right? nccl-tests for torch.

    time    = a sample of -n calls / n; -a of the ranks' (default max); median of the samples
    algbw   = size / time, in GB/s of 10^9 bytes;     busbw = algbw * its factor below
    size    = the larger of what a rank sends and receives, in bytes; count = elements it brings
    #wrong  = values that differ from what rank and position say; must be 0

    torchrun --nproc-per-node 2 benchmarks/collectives.py -b 4 -e 64M -f 2
    torchrun --nproc-per-node 8 benchmarks/collectives.py --collective all -e 1G --json report.jsonl
    torchrun --nproc-per-node 8 benchmarks/collectives.py -b 1G -e 1G --limit 450 --min-busbw 400

Flags, table and formulas are those of NVIDIA's nccl-tests; written anew. BSD-3-Clause.
"""

import argparse
import hashlib
import itertools
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cli, gpus, memory, patterns
from common.benchmark import Benchmark, Workload
from common.dist import Group, Job, share
from common.ranks import node_of_each, partition
from common.report import Case
from common.stats import Times
from common.table import Table
from common.timing import Step

Key = dict[str, Any]
TYPES = ("float32", "float16", "bfloat16", "float64", "int8", "uint8", "int32", "int64")
ALIASES = {"float": "float32", "half": "float16", "double": "float64"}  # nccl-tests' names
OPS = dist.ReduceOp
REDOPS = {"sum": OPS.SUM, "avg": OPS.AVG, "min": OPS.MIN, "max": OPS.MAX, "prod": OPS.PRODUCT}
ACROSS: dict[str, Any] = {"rank0": lambda rows, axis: rows[0], "avg": np.mean, "min": np.min}
ACROSS |= {"max": np.max, "0": ACROSS["rank0"], "1": np.mean, "2": np.min, "3": np.max}
COLD = 2**28  # bytes that calls walk through: more than caches hold
SAMPLE_BYTES = {"cpu": 2**22, "cuda": 2**32}  # a sample of large sizes has fewer calls than -n
VARIANTS = ("out_of_place", "in_place")
MAX_SIZES = 10_000  # of a table
N = 0


class Place(NamedTuple):
    """A rank's part in an operation. rank and root: within the group of n ranks."""

    group: dist.ProcessGroup
    rank: int
    n: int
    root: int
    op: Any  # of a reduction, or None
    elements: int  # that a rank brings
    matrix: list[list[int]]  # elements that go from rank (row) to rank (column)
    splits: tuple[Any, Any]  # of --matrix: what comes from each rank, what goes to each


class Operation(NamedTuple):
    sends: int  # times its elements; N: a part for each rank
    receives: int
    bus: Callable[[int], float]  # busbw / algbw of n ranks: nccl-tests' doc/PERFORMANCE.md
    variants: tuple[str, ...]  # the first one is torch's own
    options: str  # -o for a reduction, -r for a root
    call: Callable[[Tensor, Tensor, Place], object]  # input, output
    # what must have come, in this order: from a rank, or None: reduced; first position; elements
    expected: Callable[[Place], list[tuple[int | None, int, int]]]


def copied(src: Tensor, dst: Tensor, brings: bool = True) -> Tensor:
    """dst: what torch has in place only includes this copy out of place."""
    return dst if src is dst or not brings else dst.copy_(src)


def parts(whole: Tensor, at: Place) -> list[Tensor] | None:
    """One for each rank, on the root alone."""
    return list(whole.chunk(at.n)) if at.rank == at.root else None


def ring(src: Tensor, dst: Tensor, at: Place) -> None:
    """To the next rank, from the one before."""
    send = dist.P2POp(dist.isend, src, group=at.group, group_peer=(at.rank + 1) % at.n)
    recv = dist.P2POp(dist.irecv, dst, group=at.group, group_peer=(at.rank - 1) % at.n)
    for work in dist.batch_isend_irecv([send, recv]):
        work.wait()


# fmt: off
OPERATIONS = {
    "all_reduce": Operation(1, 1, lambda n: 2 * (n - 1) / n, VARIANTS[::-1], "-o",
        lambda s, d, at: dist.all_reduce(copied(s, d), at.op, at.group),
        lambda at: [(None, 0, at.elements)]),
    "all_gather": Operation(1, N, lambda n: (n - 1) / n, VARIANTS, "",
        lambda s, d, at: dist.all_gather_into_tensor(d, s, at.group),
        lambda at: [(rank, 0, at.elements) for rank in range(at.n)]),
    "reduce_scatter": Operation(N, 1, lambda n: (n - 1) / n, VARIANTS, "-o",
        lambda s, d, at: dist.reduce_scatter_tensor(d, s, at.op, at.group),
        lambda at: [(None, at.rank * at.elements, at.elements)]),
    "all_to_all": Operation(N, N, lambda n: (n - 1) / n, VARIANTS[:1], "",
        lambda s, d, at: dist.all_to_all_single(d, s, *at.splits, group=at.group),
        lambda at: [(s, sum(row[: at.rank]), row[at.rank]) for s, row in enumerate(at.matrix)]),
    "broadcast": Operation(1, 1, lambda n: 1.0, VARIANTS[::-1], "-r",
        lambda s, d, at: dist.broadcast(
            copied(s, d, at.rank == at.root), group=at.group, group_src=at.root),
        lambda at: [(at.root, 0, at.elements)]),
    "reduce": Operation(1, 1, lambda n: 1.0, VARIANTS[::-1], "-o -r",
        lambda s, d, at: dist.reduce(copied(s, d), op=at.op, group=at.group, group_dst=at.root),
        lambda at: [(None, 0, at.elements)] if at.rank == at.root else []),
    "gather": Operation(1, N, lambda n: (n - 1) / n, VARIANTS, "-r",
        lambda s, d, at: dist.gather(s, parts(d, at), group=at.group, group_dst=at.root),
        lambda at: [(rank, 0, at.elements) for rank in range(at.n) if at.rank == at.root]),
    "scatter": Operation(N, 1, lambda n: (n - 1) / n, VARIANTS, "-r",
        lambda s, d, at: dist.scatter(d, parts(s, at), group=at.group, group_src=at.root),
        lambda at: [(at.root, at.rank * at.elements, at.elements)]),
    "sendrecv": Operation(1, 1, lambda n: 1.0, VARIANTS[:1], "", ring,
        lambda at: [((at.rank - 1) % at.n, 0, at.elements)]),
    "barrier": Operation(1, 1, lambda n: 0.0, VARIANTS[:1], "",
        lambda s, d, at: dist.barrier(at.group, device_ids=[s.get_device()] if s.is_cuda else None),
        lambda at: []),
}
# fmt: on


def lacking(key: Key) -> str | None:
    """Why this cannot be measured, as is known without a try; None where it can."""
    name, alone = key["collective"], key["group_ranks"] == 1 or key["device"] == "cuda"
    if name == "sendrecv" and key["backend"] == "gloo" and alone:
        return "gloo sends neither to itself nor from CUDA"
    if key["redop"] == "avg" and not getattr(torch, key["dtype"]).is_floating_point:
        return "an average of whole numbers is none"
    return "it is not captured" if name == "barrier" and key["cudagraph"] else None


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = cli.Parser(__doc__)
    add, size, whole, rate = parser.add_argument, cli.size, cli.number(int, 0), cli.positive_float
    names, redops = cli.list_of(str, tuple(OPERATIONS)), cli.list_of(str, tuple(REDOPS))
    types = cli.list_of(lambda name: ALIASES.get(name, name), TYPES)
    text = f"`all` or a list of {', '.join(OPERATIONS)} (default: all_reduce)"
    add("--collective", type=names, metavar="NAME", help=text)
    add("-b", "--minbytes", type=size, default=8, metavar="SIZE", help="(default: 8)")
    above_0 = cli.positive_size
    add("-e", "--maxbytes", type=above_0, metavar="SIZE", help="(default: 64M, on CUDA 1G)")
    step = parser.add_mutually_exclusive_group().add_argument
    step("-i", "--stepbytes", type=above_0, metavar="SIZE", help="add this from size to size, or")
    factor = cli.number(float, 1, above=True)
    step("-f", "--stepfactor", type=factor, default=2.0, metavar="F", help="multiply (default: 2)")
    add("-n", "--calls", type=cli.positive_int, default=20, metavar="N", help="in a sample (20)")
    add("-d", "--datatype", type=types, default=["float32"], metavar="TYPE", help=", ".join(TYPES))
    add("-o", "--op", type=redops, default=["sum"], metavar="OP", help=", ".join(REDOPS))
    add("-r", "--root", type=whole, default=0, metavar="R", help="a rank in its group (default: 0)")
    add("-c", "--check", type=whole, default=1, metavar="N", help="check N samples (default: 1)")
    add("-G", "--cudagraph", type=whole, default=0, metavar="N", help="time N replays of a graph")
    add("-a", "--average", choices=ACROSS, default="max", help="across ranks (default: max)")
    add("-z", "--blocking", choices="01", default="0", help="1: wait for each call on the host")
    add("--cache-warm", action="store_true", help="one buffer instead of many")
    add("--groups", default="world", metavar="G", help="world, node, cross, or ranks as 0,1/2-3")
    text = "all_to_all: bytes from rank (row) to rank (column), instead of -b to -f"
    add("--matrix", metavar="FILE", help=text)
    add("--limit", type=rate, metavar="GB/s", help="of the link: adds busbw in percent of it")
    add("--min-busbw", type=rate, metavar="GB/s", help="fail below 0.9 of it at large sizes")
    cli.add_common_flags(parser, min_iters=12, max_seconds=0.3)
    args = parser.parse_args(argv)
    if args.matrix == "":
        parser.error("--matrix: expected a file, got ''; e.g. --matrix matrix.txt")
    if args.matrix and args.collective not in (None, ["all_to_all"]):
        parser.error("--matrix is for all_to_all alone; leave out --collective")
    if args.maxbytes and args.maxbytes < args.minbytes:
        got = f"-b {args.minbytes} and -e {args.maxbytes}"
        parser.error(f"expected -e from -b on, got {got}; e.g. -b 8 -e 64M")
    if args.cudagraph and args.blocking == "1":
        parser.error("-G replays a graph of calls, and -z 1 waits for each call; give one of them")
    args.collective = args.collective or ["all_reduce"]
    return args


def read_matrix(path: str, n: int) -> Any:
    """n rows of n bytes, between blanks or commas, down to multiples of 16 as in nccl-tests."""
    rows = np.loadtxt(Path(path).read_text().replace(",", " ").splitlines(), ndmin=2)
    if rows.shape != (n, n) or not ((rows >= 0) & (rows < 2**50)).all() or rows.max() < 16:
        raise ValueError(f"expected {n} rows of {n} sizes in bytes, one a rank, not all under 16")
    return (rows // 16 * 16).astype(int).tolist()


def scan(low: int, high: int, step: int | None, factor: float) -> list[int]:
    """Sizes from `low` to `high`, each `step` bytes more than the last or `factor` times it.

    Raises ValueError for more than MAX_SIZES.
    """
    sizes, size = list[int](), max(1, low)
    while size <= high:
        if len(sizes) == MAX_SIZES:
            how = f"-i {step}" if step else f"-f {factor:.10g}"
            scanned = f"{cli.show_size(low)} to {cli.show_size(high)} by {how}"
            raise ValueError(f"{scanned} are over {MAX_SIZES:,} sizes; expected fewer, e.g. -f 2")
        sizes.append(size)
        size = size + step if step else max(size + 1, int(min(size * factor, high + 1)))
    return sizes


def plan(args: argparse.Namespace, place: Key, ranks: int) -> dict[str, list[Key]]:
    """The title and the keys of each table. place: device, backend and world size."""
    sizes = scan(args.minbytes, args.maxbytes, args.stepbytes, args.stepfactor)
    fixed = {n: getattr(args, n) for n in ("blocking", "cudagraph", "average", "groups")}
    fixed |= {"caches": "warm" if args.cache_warm or args.cudagraph else "cold"}
    fixed |= {"matrix": digest_of(args.matrix), "group_ranks": ranks}
    fixed |= place
    tables = dict[str, list[Key]]()
    for name, dtype, redop in itertools.product(args.collective, args.datatype, args.op):
        op, unit = OPERATIONS[name], getattr(torch, dtype).itemsize
        unit *= ranks if N in (op.sends, op.receives) and not args.matrix else 1
        counts = list(dict.fromkeys(max(1, size // unit) for size in sizes))
        if name == "barrier":
            dtype, counts = "none", [0]
        redop = redop if "-o" in op.options else "none"
        root = args.root if "-r" in op.options else -1
        this = {"collective": name, "dtype": dtype, "redop": redop, "root": root}
        title = f"# {name} {dtype} {redop}".replace(" none", "")
        keys = list[Key]()
        for count in counts:
            size = count * unit
            calls = max(1, min(args.calls, SAMPLE_BYTES[place["device"]] // max(1, size)))
            keys.append(this | {"size_bytes": size, "count": count, "calls": calls} | fixed)
        tables[f"{title}, {args.groups} ({ranks} rank{'s' * (ranks > 1)})"] = keys
    return tables


def digest_of(matrix: list[list[int]]) -> str | bool:
    """Which --matrix it is; False, as in older reports, where there is none."""
    return hashlib.sha256(repr(matrix).encode()).hexdigest()[:12] if matrix else False


def settings(args: argparse.Namespace) -> str:
    """What all rows of all tables share, in words."""
    words = [f"-a {args.average}"]
    if args.blocking == "1":
        words.append("each call waited for (-z 1)")
    if args.cudagraph:
        words.append(f"{args.cudagraph} replays of a graph (-G)")
    if args.matrix:
        words.append(f"matrix {digest_of(args.matrix)}")
    buffers = "one buffer" if args.cache_warm or args.cudagraph else "cold buffers"
    return ", ".join([f"at most {args.calls} calls a sample", *words, buffers])


def build(args: argparse.Namespace, job: Job, key: Key, group: Group) -> Workload:
    """What a rank measures in a case: calls on successive buffers, out of place and in place."""
    op, device, redop = OPERATIONS[key["collective"]], job.device, key["redop"]
    dtype = getattr(torch, key["dtype"], torch.uint8)  # a barrier has none
    rank, n, count = dist.get_rank(group.test), key["group_ranks"], key["count"]
    matrix = [[size // dtype.itemsize for size in row] for row in args.matrix] or [[count] * n] * n
    splits = ([row[rank] for row in matrix], matrix[rank]) if args.matrix else (None, None)
    at = Place(group.test, rank, n, max(0, key["root"]), REDOPS.get(redop), count, matrix, splits)
    send = count if op.sends else sum(matrix[rank])
    recv = count if op.receives else sum(row[rank] for row in matrix)
    need = -(-max(send + recv, 2 * count, 1) // 64) * 64  # of a buffer, on all ranks alike
    length = COLD // dtype.itemsize * (key["caches"] == "cold")
    stride = max(need, length // 4096 // 64 * 64)  # 4096 buffers at most
    torch.cuda.empty_cache()  # NCCL has no use for what torch keeps of smaller sizes
    block = torch.ones(max(1, length // stride), stride, dtype=dtype, device=device)
    whole = [row[: max(send, recv)] for row in block]
    own = slice(rank * count, (rank + 1) * count)
    buffers = {
        "out_of_place": [(row[:send], row[send : send + recv]) for row in block],
        "in_place": [(w[own] if send < recv else w, w[own] if send > recv else w) for w in whole],
    }
    calls = {v: [partial(op.call, *pair, at) for pair in buffers[v]] for v in op.variants}
    number = key["calls"]

    def step_of(calls: list[Any], n: int) -> Step:
        """A call on the next buffers; with -G each n-th replays a graph of n calls, others none."""
        feed, counter = itertools.cycle(calls), itertools.count(1)
        if key["cudagraph"]:
            replay = gpus.cuda_graph(lambda: [next(feed)() for _ in range(n)], device)
            return lambda: replay() if next(counter) % n == 0 else None
        if key["blocking"] == "1" and device.type == "cuda":
            return lambda: [call() for call in (next(feed), torch.cuda.synchronize)]
        return lambda: next(feed)()

    def wrong(variant: str) -> int:
        """How many values are, after calls like the timed ones, each on buffers of its own."""
        some, near = buffers[variant][:number], patterns.tolerance(redop, dtype)
        step = step_of(calls[variant][:number], len(some))
        for src, dst in some:
            patterns.blank(dst)
            patterns.fill(src, patterns.tile(rank, redop, n))
        dist.barrier(group.control)
        if key["collective"] == "barrier":  # all count themselves before it, and one comes late
            time.sleep(0.02 if rank == n - 1 else 0)
            job.store.add(name := f"barrier/{group.test.group_name}", 1)
            step()
            return -job.store.add(name, 0) % n  # who was not waited for
        for _ in some:
            step()
        found = 0
        for _, dst in some:
            for sender, start, length in op.expected(at):
                got, dst = dst[:length], dst[length:]
                found += patterns.count_wrong(got, patterns.tile(sender, redop, n), start, near)
        return found

    def facts() -> dict[str, int]:
        """Calls in a sample, and the wrong values of each variant."""
        found = {variant: sum(wrong(variant) for _ in range(args.check)) for variant in calls}
        return {"calls": number} | found

    first, *others = op.variants
    return Workload(
        step_of(calls[first], number),
        {variant: step_of(calls[variant], number) for variant in others},
        calls=number * max(1, key["cudagraph"]),
        facts=facts,
        # with these the host waits
        launches=key["blocking"] != "1" and key["collective"] != "barrier",
    )


def derive(
    args: argparse.Namespace, groups: list[list[int]], case: Case, times: Times, facts: list[Any]
) -> None:
    """Times and bandwidths of both variants; of several groups the slowest one counts."""
    key, m = case.key, case.metrics
    variants = OPERATIONS[key["collective"]].variants
    checked = variants if args.check else ()
    wrong = {f"{v}_wrong": sum(fact[v] for fact in facts) for v in checked}
    m |= wrong | {"wrong": sum(wrong.values()), "calls": facts[0]["calls"]}
    across = ACROSS[args.average]
    for v in variants:
        rows = times.each("step" if v == variants[0] else v)
        of_groups = [rows[[case.ranks.index(rank) for rank in ranks]] for ranks in groups]
        group_times = [float(np.median(across(of_group, axis=0))) for of_group in of_groups]
        algbw = key["size_bytes"] / max(group_times) / 1e9
        busbw = algbw * OPERATIONS[key["collective"]].bus(key["group_ranks"])
        m |= {f"{v}_time_s": max(group_times), f"{v}_group_times_s": group_times}
        m |= {f"{v}_algbw_gb_per_s": algbw, f"{v}_busbw_gb_per_s": busbw}
        if args.limit:
            m["efficiency"] = max(m.get("efficiency", 0), busbw / args.limit)
    case.check = "passed" if args.check else "skipped: -c 0"
    case.check = f"failed: {m['wrong']} wrong values" if m["wrong"] else case.check


class ScanTable(Table):
    """As nccl-tests lays it out, since other tools read that."""

    HEADER = f"""\
#{"":59}out-of-place{"":20}in-place
#       size        count     type  redop   root{"     time   algbw   busbw #wrong" * 2}
#        (B)   (elements){"":23}{"     (us)  (GB/s)  (GB/s)       " * 2}"""

    def row(self, case: Case) -> str:
        m = case.metrics
        line = "{size_bytes:>12} {count:>12} {dtype:>8} {redop:>6} {root:>6}".format(**case.key)
        for v in VARIANTS if m else ():
            algbw, busbw = (m.get(f"{v}_{x}_gb_per_s", np.nan) for x in ("algbw", "busbw"))
            line += f" {m.get(f'{v}_time_s', np.nan) * 1e6:>8.2f} {algbw:>7.2f} {busbw:>7.2f}"
            line += f" {m.get(f'{v}_wrong', 'N/A'):>6}"
        line = line.replace("nan", "N/A") + (f"  {case.check}" if case.failed else "")
        line += f"  {m['efficiency']:.0%} of the limit" if "efficiency" in m else ""
        return line + ("  warm caches" if case.key["caches"] == "warm" else "")


def footer(tables: dict[str, list[Key]], wanted: float | None, bench: Benchmark) -> None:
    """A line for each table, then those that nccl-tests ends with, which other tools read."""
    every: list[float] = []
    bench.print("#")
    for title, keys in tables.items():
        found = [case.metrics for case in bench.report.cases if case.key in keys]
        names = [f"{v}_busbw_gb_per_s" for v in VARIANTS]
        rates = [[m[name] for m in found if m.get(name)] for name in names]
        every += itertools.chain(*rates)
        if any(rates):
            top = max(float(np.mean(some[-len(some) // 4 :])) for some in rates if some)
            bench.print(text := f"{title}: busbw over the top quarter of the sizes {top:.4g} GB/s")
            if wanted and top < 0.9 * wanted:
                bench.fail(f"{text[2:]}, under 0.9 of --min-busbw {wanted:g}")
    wrong = sum(case.metrics.get("wrong", 0) for case in bench.report.cases)
    bench.print(f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}")
    bench.print(f"# Avg bus bandwidth    : {np.mean(every) if every else 0:g}\n#")


def main() -> int:
    args = parse_args()
    with Benchmark("collectives", args) as bench:
        job, largest = bench.job, 2**30 if bench.job.device.type == "cuda" else 2**26
        args.maxbytes = max(args.minbytes, args.maxbytes or largest)
        try:
            groups = partition(args.groups, node_of_each(bench.report.environment))
            ranks, members = len(groups[0]), sorted(itertools.chain(*groups))
            args.matrix = read_matrix(args.matrix, ranks) if args.matrix else []
        except (OSError, ValueError) as error:
            bench.refuse(f"--groups or --matrix: {error}")
        if args.matrix:  # the rank with the most to send or receive
            most = max(int(np.sum(args.matrix, axis).max()) for axis in (0, 1))
            args.collective, args.minbytes, args.maxbytes = ["all_to_all"], most, most
        rooted = [name for name in args.collective if "-r" in OPERATIONS[name].options]
        if rooted and args.root >= ranks:
            within = f"a rank within its group, 0 to {ranks - 1}"
            bench.refuse(f"--root: {rooted[0]} expected {within}, got {args.root}; e.g. --root 0")
        if args.cudagraph and job.device.type != "cuda":
            bench.refuse("-G replays CUDA graphs, and this run is on the CPU; leave it out")
        if text := share(memory.too_much(2 * args.maxbytes, job, "-e")):
            bench.refuse(text)
        try:
            tables, made = plan(args, bench.place, ranks), partial(derive, args, groups)
        except ValueError as error:
            bench.refuse(str(error))
        for title, keys in tables.items():
            bench.begin_table(f"{title}; {settings(args)}", {})
            bench.table, reason = ScanTable({}), lacking(keys[0])
            bench.print(f"# n/a: {reason}" if reason else ScanTable.HEADER)
            for key in keys if not reason else ():
                bench.measure(key, partial(build, args, job), made, members, groups)
        footer(tables, args.min_busbw, bench)
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
