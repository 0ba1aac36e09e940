#!/usr/bin/env python3
"""How fast is each collective, at each size, and are its results right? nccl-tests for torch.

    time    = a sample of n calls (-n) / n; over the ranks the maximum (-a); the median sample
    algbw   = size / time, in GB/s of 10^9 bytes;     busbw = algbw * its factor below
    size    = the larger of what a rank sends and receives, in bytes; count = elements it brings
    #wrong  = values that differ from what rank and position say; must be 0

    torchrun --nproc-per-node 2 benchmarks/collectives.py -b 4 -e 64M -f 2
    torchrun --nproc-per-node 8 benchmarks/collectives.py --collective all -e 1G --json report.jsonl
    torchrun --nproc-per-node 8 benchmarks/collectives.py -b 1G -e 1G --limit 450 --min-busbw 400
    torchrun --nproc-per-node 8 benchmarks/collectives.py --collective all_to_all --skew 0,0.5,1

The flags, the table and the formulas are those of NVIDIA's nccl-tests; the code was written anew.
BSD-3-Clause.
"""

import argparse
import hashlib
import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cli
from common.answers import series, show_seconds
from common.environment import node_of_each
from common.groups import Group, Job, share
from common.old import Benchmark, Workload
from common.report import Case
from common.stats import Times
from common.table import Table
from common.timing import Step, cuda_graph, time_block
from common.workloads import patterns, peaks
from common.workloads.ranks import partition
from common.workloads.room import too_much

# torch 2.14 warns of the older names in each call
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

Key = dict[str, Any]
Matrix = list[list[int]]  # what goes from each rank (row) to each rank (column)
Buffers = list[tuple[Tensor, Tensor]]  # input and output of successive calls
TYPES = ("float32", "float16", "bfloat16", "float64", "int8", "uint8", "int32", "int64")
ALIASES = {"float": "float32", "half": "float16", "double": "float64"}  # nccl-tests' names
OPS = dist.ReduceOp
REDOPS = {"sum": OPS.SUM, "avg": OPS.AVG, "min": OPS.MIN, "max": OPS.MAX, "prod": OPS.PRODUCT}
ACROSS: dict[str, Any] = {  # the numbers are nccl-tests' names
    "rank0": lambda rows, axis: rows[0],
    "avg": np.mean,
    "min": np.min,
    "max": np.max,
    "0": lambda rows, axis: rows[0],
    "1": np.mean,
    "2": np.min,
    "3": np.max,
}
COLD_BYTES = 2**28  # calls walk through so much memory: more than caches hold
LARGEST_BLOCK = 4096  # buffers that calls walk through at most
ALIGNMENT = 64  # elements: every buffer begins at a multiple of it
MOST_CALLS = 20  # in a sample, if -n does not say how many
SAMPLE_S = 1e-3  # without -n a sample has no more calls than take so long
SAMPLE_BYTES = {"cpu": 2**22, "cuda": 2**32}  # a sample of large sizes has fewer calls than -n
LARGEST_SIZE = {"cpu": 2**26, "cuda": 2**30}  # -e by default
LATE_S = 0.02  # one rank comes so late to the barrier that is checked
VARIANTS = ("out_of_place", "in_place")
IN_PLACE_FIRST = ("in_place", "out_of_place")
OUT_OF_PLACE = ("out_of_place",)
MAX_SIZES = 10_000  # of a table
PIECE = 16  # bytes: what --skew sends from rank to rank is a multiple of it
SEED = 40  # of the order in which --skew makes the ranks popular
# These move data between all ranks, so that a link's speed bounds busbw. The last one sends a part
# straight to each other rank; the others may gather within the nodes first.
BETWEEN_ALL = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
N = 0  # in OPERATIONS: a part for each of the n ranks


class Place(NamedTuple):
    """A rank's part in an operation. rank and root: within the group of n ranks."""

    group: dist.ProcessGroup
    rank: int
    n: int
    root: int
    op: Any  # of a reduction, or None
    elements: int  # that a rank brings
    matrix: Matrix  # in elements
    splits: tuple[Any, Any]  # with a matrix: what comes from each rank, what goes to each
    counts: Tensor | None  # with --counts: what goes to each rank, to be sent before the data

    @property
    def is_root(self) -> bool:
        return self.rank == self.root


class Piece(NamedTuple):
    """Values that must have come, one after the other."""

    sender: int | None  # None for a reduction
    first: int  # the position of the first value in what the sender brought
    length: int


class Operation(NamedTuple):
    call: Callable[[Tensor, Tensor, Place], object]  # input, output
    expected: Callable[[Place], list[Piece]]  # in the order of the output
    bus: Callable[[int], float]  # busbw / algbw of n ranks: nccl-tests' doc/PERFORMANCE.md
    sends: int = 1  # 1: as many elements as a rank brings. N: a part for each rank
    receives: int = 1
    variants: tuple[str, ...] = VARIANTS  # the first one is torch's own
    options: str = ""  # -o for a reduction, -r for a root


# -- calls -----------------------------------------------------------------------------------------


def copied(src: Tensor, dst: Tensor, brings: bool = True) -> Tensor:
    """dst, with the input of a rank that brings one. torch has some operations in place only: out
    of place they include this copy."""
    if src is dst or not brings:
        return dst
    return dst.copy_(src)


def parts(buffer: Tensor, at: Place) -> list[Tensor] | None:
    """A part for each rank; only the root has them."""
    if not at.is_root:
        return None
    return list(buffer.chunk(at.n))


def ring(src: Tensor, dst: Tensor, at: Place) -> None:
    """Send to the next rank, receive from the one before."""
    following = (at.rank + 1) % at.n
    before = (at.rank - 1) % at.n
    send = dist.P2POp(dist.isend, src, group=at.group, group_peer=following)
    recv = dist.P2POp(dist.irecv, dst, group=at.group, group_peer=before)
    for work in dist.batch_isend_irecv([send, recv]):
        work.wait()


def all_to_all(src: Tensor, dst: Tensor, at: Place) -> None:
    """With --counts each rank first says how many elements it sends, as a router of experts does,
    and the host waits for those numbers."""
    comes, goes = at.splits
    if at.counts is not None:
        incoming = torch.empty_like(at.counts)
        dist.all_to_all_single(incoming, at.counts, group=at.group)
        comes = incoming.tolist()
    dist.all_to_all_single(dst, src, comes, goes, group=at.group)


def broadcast(src: Tensor, dst: Tensor, at: Place) -> None:
    buffer = copied(src, dst, at.is_root)
    dist.broadcast(buffer, group=at.group, group_src=at.root)


def barrier(src: Tensor, dst: Tensor, at: Place) -> None:
    devices = [src.get_device()] if src.is_cuda else None
    dist.barrier(at.group, device_ids=devices)


# -- what must have come ---------------------------------------------------------------------------


def the_reduction(at: Place) -> list[Piece]:
    return [Piece(None, 0, at.elements)]


def my_part_of_the_reduction(at: Place) -> list[Piece]:
    return [Piece(None, at.rank * at.elements, at.elements)]


def what_each_brings(at: Place) -> list[Piece]:
    return [Piece(rank, 0, at.elements) for rank in range(at.n)]


def my_part_of_each(at: Place) -> list[Piece]:
    pieces = []
    for sender, row in enumerate(at.matrix):
        first = sum(row[: at.rank])
        pieces.append(Piece(sender, first, row[at.rank]))
    return pieces


# -- busbw / algbw ---------------------------------------------------------------------------------


def without_my_part(n: int) -> float:
    """A rank has one of the n parts already."""
    return (n - 1) / n


def as_it_is(n: int) -> float:
    return 1.0


OPERATIONS = {
    "all_reduce": Operation(
        call=lambda src, dst, at: dist.all_reduce(copied(src, dst), at.op, at.group),
        expected=the_reduction,
        bus=lambda n: 2 * without_my_part(n),
        variants=IN_PLACE_FIRST,
        options="-o",
    ),
    "all_gather": Operation(
        call=lambda src, dst, at: all_gather(dst, src, at.group),
        expected=what_each_brings,
        bus=without_my_part,
        receives=N,
    ),
    "reduce_scatter": Operation(
        call=lambda src, dst, at: reduce_scatter(dst, src, at.op, at.group),
        expected=my_part_of_the_reduction,
        bus=without_my_part,
        sends=N,
        options="-o",
    ),
    "all_to_all": Operation(
        call=all_to_all,
        expected=my_part_of_each,
        bus=without_my_part,
        sends=N,
        receives=N,
        variants=OUT_OF_PLACE,
    ),
    "broadcast": Operation(
        call=broadcast,
        expected=lambda at: [Piece(at.root, 0, at.elements)],
        bus=as_it_is,
        variants=IN_PLACE_FIRST,
        options="-r",
    ),
    "reduce": Operation(
        call=lambda src, dst, at: dist.reduce(
            copied(src, dst), op=at.op, group=at.group, group_dst=at.root
        ),
        expected=lambda at: the_reduction(at) if at.is_root else [],
        bus=as_it_is,
        variants=IN_PLACE_FIRST,
        options="-o -r",
    ),
    "gather": Operation(
        call=lambda src, dst, at: dist.gather(
            src, parts(dst, at), group=at.group, group_dst=at.root
        ),
        expected=lambda at: what_each_brings(at) if at.is_root else [],
        bus=without_my_part,
        receives=N,
        options="-r",
    ),
    "scatter": Operation(
        call=lambda src, dst, at: dist.scatter(
            dst, parts(src, at), group=at.group, group_src=at.root
        ),
        expected=lambda at: [Piece(at.root, at.rank * at.elements, at.elements)],
        bus=without_my_part,
        sends=N,
        options="-r",
    ),
    "sendrecv": Operation(
        call=ring,
        expected=lambda at: [Piece((at.rank - 1) % at.n, 0, at.elements)],
        bus=as_it_is,
        variants=OUT_OF_PLACE,
    ),
    "barrier": Operation(
        call=barrier,
        expected=lambda at: [],
        bus=lambda n: 0.0,
        variants=OUT_OF_PLACE,
    ),
}


def why_not_measured(key: Key) -> str | None:
    """Why a case cannot be measured, as far as is known without a try; None where it can be."""
    name = key["collective"]
    to_itself_or_cuda = key["group_ranks"] == 1 or key["device"] == "cuda"
    if name == "sendrecv" and key["backend"] == "gloo" and to_itself_or_cuda:
        return "gloo sends neither to itself nor from CUDA"
    if key["redop"] == "avg" and not getattr(torch, key["dtype"]).is_floating_point:
        return "an average of whole numbers is none"
    if name == "barrier" and key["cudagraph"]:
        return "it is not captured"
    return None


def contradiction(args: argparse.Namespace) -> str | None:
    """The mistake in flags that do not fit together, if there is one."""
    if args.matrix == "":
        return "--matrix: expected a file, got ''; e.g. --matrix matrix.txt"
    for flag in ("matrix", "skew"):
        if getattr(args, flag) and args.collective not in (None, ["all_to_all"]):
            return f"--{flag} is for all_to_all alone; leave out --collective"
    if args.maxbytes and args.maxbytes < args.minbytes:
        got = f"-b {args.minbytes} and -e {args.maxbytes}"
        return f"expected -e from -b on, got {got}; e.g. -b 8 -e 64M"
    if args.cudagraph and args.blocking == "1":
        return "-G replays a graph of calls, and -z 1 waits for each call; give one of them"
    if args.counts and not (args.matrix or args.skew):
        return "--counts expected --matrix or --skew, e.g. --skew 1 --counts"
    if args.counts and args.cudagraph:
        return "--counts makes the host wait, which a graph (-G) cannot; leave out one of them"
    return None


def terms_to_bytes(text: str) -> int:
    """`1M+2` -> 1048578; -1 if a term is no size."""
    terms = [cli.to_bytes(term) for term in text.split("+")]
    return sum(terms) if min(terms) >= 0 else -1


EXAMPLE = "e.g. 8, 64K, 4M, 1G or 1M+2"
size_of_terms = cli.checked(terms_to_bytes, lambda n: n >= 0, "a size in bytes", EXAMPLE)
positive_size_of_terms = cli.checked(terms_to_bytes, lambda n: n > 0, "a size above 0", EXAMPLE)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    above_0, rate, count = positive_size_of_terms, cli.positive_float, cli.number(int, 0)
    names = cli.list_of(str, tuple(OPERATIONS))
    text = f"`all` or a list of {', '.join(OPERATIONS)} (default: all_reduce)"
    add("--collective", type=names, metavar="NAME", help=text)
    text = "e.g. 64K, or 1M+2 (default: 8)"
    add("-b", "--minbytes", type=size_of_terms, default=8, metavar="SIZE", help=text)
    add("-e", "--maxbytes", type=above_0, metavar="SIZE", help="(default: 64M, on CUDA 1G)")
    step = parser.add_mutually_exclusive_group().add_argument
    text = "from size to size, add this, or"
    step("-i", "--stepbytes", type=above_0, metavar="SIZE", help=text)
    factor = cli.number(float, 1, above=True)
    step("-f", "--stepfactor", type=factor, default=2.0, metavar="F", help="multiply (default: 2)")
    text = "in a sample (default: as many as take 1 ms, 20 at most)"
    add("-n", "--calls", type=cli.positive_int, metavar="N", help=text)
    types = cli.list_of(lambda name: ALIASES.get(name, name), TYPES)
    add("-d", "--datatype", type=types, default=["float32"], metavar="TYPE", help=", ".join(TYPES))
    redops = cli.list_of(str, tuple(REDOPS))
    add("-o", "--op", type=redops, default=["sum"], metavar="OP", help=", ".join(REDOPS))
    add("-r", "--root", type=count, default=0, metavar="R", help="a rank in its group (default: 0)")
    add("-c", "--check", type=count, default=1, metavar="N", help="check N samples (default: 1)")
    add("-G", "--cudagraph", type=count, default=0, metavar="N", help="time N replays of a graph")
    add("-a", "--average", choices=ACROSS, default="max", help="across ranks (default: max)")
    add("-z", "--blocking", choices="01", default="0", help="1: wait for each call on the host")
    add("-u", "--unalign", type=count, default=0, metavar="N", help="shift buffers by N elements")
    add("--cache-warm", action="store_true", help="one buffer instead of many")
    add("--groups", default="world", metavar="G", help="world, node, cross, or ranks as 0,1/2-3")
    text = "all_to_all: bytes from rank (row) to rank (column), instead of -b to -f"
    matrix = parser.add_mutually_exclusive_group().add_argument
    matrix("--matrix", metavar="FILE", help=text)
    text = "all_to_all: Zipf's alpha of how popular the ranks are, e.g. 0,0.5,1; 0: all alike"
    alphas = cli.list_of(cli.number(float, 0))
    matrix("--skew", type=alphas, default=[], metavar="ALPHA", help=text)
    text = "with --matrix or --skew: the ranks tell each other before each call how much comes"
    add("--counts", action="store_true", help=text)
    text = "the speed of the link: adds busbw in percent of it"
    add("--limit", type=rate, metavar="GB/s", help=text)
    add("--expected", action="store_true", help="adds the time that NCCL itself expects of a call")
    text = "fail if busbw at large sizes is under 0.9 of this"
    add("--min-busbw", type=rate, metavar="GB/s", help=text)
    backends = "gloo, nccl, ucc or mpi; several are measured in turn, e.g. gloo,ucc"
    cli.add_common_flags(
        parser, min_iters=12, max_seconds=0.2, backends=backends, backend=cli.several_backends
    )
    args = parser.parse_args(argv)
    if problem := contradiction(args):
        parser.error(problem)
    return args


# -- what is going to be measured ------------------------------------------------------------------


def read_matrix(path: str, n: int) -> Matrix:
    """The n rows of n sizes in bytes of --matrix, between blanks or commas.

    Each is cut to a multiple of 16, as in nccl-tests. Raises ValueError and OSError.
    """
    lines = Path(path).read_text().replace(",", " ").splitlines()
    sizes = np.loadtxt(lines, ndmin=2)
    possible = (sizes >= 0) & (sizes < 2**50)  # nan is neither
    if sizes.shape != (n, n) or not possible.all() or sizes.max() < 16:
        raise ValueError(f"expected {n} rows of {n} sizes in bytes, one a rank, not all under 16")
    return (sizes // 16 * 16).astype(int).tolist()


def digest_of(matrix: Matrix) -> str | bool:
    """Which --matrix it is; False, as in older reports, where there is none."""
    if not matrix:
        return False
    text = repr(matrix)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def popularity(n: int, alpha: float) -> np.ndarray:
    """The part of all data that goes to each of n ranks: the i-th most popular one gets i**-alpha
    of what the first one gets (Zipf). A seed says who is how popular. [n], adds up to 1."""
    order = np.random.default_rng(SEED).permutation(n)
    weights = (1.0 + order) ** -alpha
    return weights / weights.sum()


def skewed_row(pieces: int, n: int, alpha: float) -> list[int]:
    """How many of its pieces a rank sends to each of n ranks. All ranks send alike."""
    bounds = np.cumsum(popularity(n, alpha)) * pieces
    whole_bounds = np.rint(bounds).astype(int)
    return np.diff(whole_bounds, prepend=0).tolist()


def names_of(args: argparse.Namespace) -> list[str]:
    """The collectives that are asked for."""
    if args.matrix or args.skew:
        return ["all_to_all"]
    return args.collective or ["all_reduce"]


def range_of(args: argparse.Namespace, matrix: Matrix, device: str) -> tuple[int, int]:
    """The smallest and the largest size in bytes. device: its type."""
    if matrix:  # the size is that of the rank with the most to send or to receive
        received = np.sum(matrix, axis=0)
        sent = np.sum(matrix, axis=1)
        most = int(max(received.max(), sent.max()))
        return most, most
    return args.minbytes, max(args.minbytes, args.maxbytes or LARGEST_SIZE[device])


def scan(low: int, high: int, step: int | None, factor: float) -> list[int]:
    """Sizes from `low` to `high`. Each is `step` bytes more than the last, or `factor` times it.

    Raises ValueError for more than MAX_SIZES.
    """
    sizes, size = list[int](), max(1, low)
    while size <= high:
        if len(sizes) == MAX_SIZES:
            how = f"-i {step}" if step else f"-f {factor:.10g}"
            scanned = f"{cli.show_size(low)} to {cli.show_size(high)} by {how}"
            raise ValueError(f"{scanned} are over {MAX_SIZES:,} sizes; expected fewer, e.g. -f 2")
        sizes.append(size)
        if step:
            size += step
        else:
            product = min(size * factor, high + 1)  # int() of infinity would raise
            size = max(size + 1, int(product))
    return sizes


def plan(args: argparse.Namespace, matrix: Matrix, place: Key, ranks: int) -> dict[str, list[Key]]:
    """The title and the keys of each table. place: device, backend and world size. ranks: of a
    group. Raises ValueError for too many sizes."""
    low, high = range_of(args, matrix, place["device"])
    sizes = scan(low, high, args.stepbytes, args.stepfactor)
    one_buffer = args.cache_warm or args.cudagraph
    fixed = {
        "blocking": args.blocking,
        "cudagraph": args.cudagraph,
        "average": args.average,
        "groups": args.groups,
        "caches": "warm" if one_buffer else "cold",
        "matrix": digest_of(matrix),
        "group_ranks": ranks,
        **place,
    }
    # older reports do not have these
    fixed |= {"unalign": args.unalign} if args.unalign else {}
    fixed |= {"counts": True} if args.counts else {}
    fixed |= {"exact_calls": True} if args.calls else {}  # else by time, up to the key's calls
    most_calls = args.calls or MOST_CALLS
    tables = dict[str, list[Key]]()
    backends = cli.backends_of(place["backend"])
    lists = (names_of(args), args.datatype, args.op, backends)
    for name, dtype, redop, backend in itertools.product(*lists):
        operation = OPERATIONS[name]
        has_data = name != "barrier"
        table = {
            "collective": name,
            "dtype": dtype if has_data else "none",
            "redop": redop if "-o" in operation.options else "none",
            "root": args.root if "-r" in operation.options else -1,
        }
        unit = getattr(torch, dtype).itemsize
        if N in (operation.sends, operation.receives) and not matrix:
            unit *= ranks
        title = f"# {name} {table['dtype']} {table['redop']}".replace(" none", "")
        noun = "ranks" if ranks > 1 else "rank"
        title = f"{title}, {args.groups} ({ranks} {noun})"
        if len(backends) > 1:
            title += f", {backend}"
        fixed["backend"] = backend
        for alpha in args.skew:
            rows = skewed_sizes(sizes, dtype, ranks, alpha, most_calls, place)
            tables[f"{title}, skew {alpha:g}"] = [table | fixed | row for row in rows]
        if not args.skew:
            rows = sizes_and_calls(sizes if has_data else [], unit, most_calls, place)
            tables[title] = [table | row | fixed for row in rows]
    return tables


def skewed_sizes(
    sizes: list[int], dtype: str, n: int, alpha: float, most_calls: int, place: Key
) -> list[Key]:
    """The part of the key that differs from row to row with --skew.

    A size is what each rank sends, cut to a multiple of n pieces. In the key, size_bytes is what
    the most popular rank receives, and count the elements that each rank sends.
    """
    rows = list[Key]()
    pieces_to_each = dict.fromkeys(max(1, size // (PIECE * n)) for size in sizes)
    for pieces in pieces_to_each:
        row = skewed_row(pieces * n, n, alpha)
        most_received = max(row) * n * PIECE
        [key] = sizes_and_calls([most_received], 1, most_calls, place)
        key["count"] = pieces * n * PIECE // getattr(torch, dtype).itemsize
        key["skew"] = alpha
        key["matrix"] = digest_of([row])
        rows.append(key)
    return rows


def sizes_and_calls(sizes: list[int], unit: int, most_calls: int, place: Key) -> list[Key]:
    """The part of the key that differs from row to row. No sizes: one row without any data.

    unit: bytes by which the size grows with each element. A size that is no multiple is cut, and
    what becomes the same by that is measured once.
    """
    counts = dict.fromkeys(max(1, size // unit) for size in sizes)
    rows = list[Key]()
    for count in counts or [0]:
        size = count * unit
        affordable = SAMPLE_BYTES[place["device"]] // max(1, size)
        calls = max(1, min(most_calls, affordable))
        rows.append({"size_bytes": size, "count": count, "calls": calls})
    return rows


def settings(args: argparse.Namespace, matrix: Matrix) -> str:
    """What all rows of all tables share, in words."""
    words = [f"at most {args.calls or MOST_CALLS} calls a sample", f"-a {args.average}"]
    if args.blocking == "1":
        words.append("each call waited for (-z 1)")
    if args.cudagraph:
        words.append(f"{args.cudagraph} replays of a graph (-G)")
    if matrix:
        words.append(f"matrix {digest_of(matrix)}")
    if args.counts:
        words.append("with the exchange of counts")
    if args.unalign:
        words.append(f"shifted by {args.unalign} elements (-u)")
    words.append("one buffer" if args.cache_warm or args.cudagraph else "cold buffers")
    return ", ".join(words)


# -- measure ---------------------------------------------------------------------------------------


def expected_s(
    call: Callable[[], object], group: dist.ProcessGroup, device: torch.device
) -> float | None:
    """The seconds that the group's backend itself expects the collectives in `call` to take. It
    does not run them. None where it cannot say: only NCCL can.

    Private; seen to work with torch 2.11, 2.14 and 2.15.
    """
    try:
        with dist._time_estimator(group, device) as estimator:  # type: ignore[attr-defined]
            call()
    except (AttributeError, NotImplementedError):
        return None
    time_us = estimator.estimated_time
    return None if time_us is None else time_us / 1e6


def build(job: Job, matrix: Matrix, args: argparse.Namespace, key: Key, group: Group) -> Workload:
    """What a rank measures in a case: calls on successive buffers, out of place and in place.

    matrix: of --matrix, in bytes. With -n a sample has the calls of the key; without it these are
    the most that it may have.
    """
    operation = OPERATIONS[key["collective"]]
    at = place_of(key, matrix, group, job.device)
    torch.cuda.empty_cache()  # NCCL has no use for what torch keeps of smaller sizes
    buffers = make_buffers(key, at, job.device)
    steps = dict[str, Step]()
    for variant in operation.variants:  # in this order on all ranks: a graph is run when it is made
        steps[variant] = step_of(key, at, buffers[variant], key["calls"])
    profiled = dict[str, Step]()
    if key["cudagraph"]:  # most calls do nothing: a trace has whole graphs
        for variant, call in steps.items():
            profiled[f"{variant}, a graph"] = partial(repeat, call, key["calls"])
    step = steps.pop(operation.variants[0])
    calls = key["calls"]
    exact = "exact_calls" in key or key["cudagraph"]  # a graph has as many as were captured
    if calls > 1 and not exact:
        calls = calls_of_a_sample(step, calls, job.device, group)
    expected = None
    if args.expected and not key["cudagraph"]:
        expected = expected_s(step, group.test, job.device)

    def facts() -> dict[str, Any]:
        """Calls in a sample, the expected time, and the wrong values of each variant."""
        counts: dict[str, Any] = {"calls": calls, "expected_s": expected}
        for variant in operation.variants:
            checked = buffers[variant][:calls]
            counts[variant] = 0
            for _ in range(args.check):
                counts[variant] += count_wrong(key, at, checked, job, group)
        return counts

    host_waits = key["blocking"] == "1" or key["collective"] == "barrier" or "counts" in key
    return Workload(
        step,
        steps,
        calls=calls * max(1, key["cudagraph"]),
        facts=facts,
        launches=not host_waits,
        profiled=profiled,
    )


def repeat(call: Step, times: int) -> None:
    for _ in range(times):
        call()


def calls_of_a_sample(step: Step, most: int, device: torch.device, group: Group) -> int:
    """As many calls as take SAMPLE_S on the slowest rank, `most` at most; the same on all ranks."""
    time_block(step, 1, device)  # untimed: it finds connections and caches as the timed calls will
    times, _ = time_block(step, 3, device)
    slowest = torch.tensor(min(times), dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group.control)
    calls = round(SAMPLE_S / slowest.item())
    return max(1, min(most, calls))


def dtype_of(key: Key) -> torch.dtype:
    return getattr(torch, key["dtype"], torch.uint8)  # a barrier has none


def place_of(key: Key, matrix: Matrix, group: Group, device: torch.device) -> Place:
    """What this rank has to know for its calls. matrix: of --matrix, in bytes."""
    rank = dist.get_rank(group.test)
    n = key["group_ranks"]
    elements = elements_of(key, matrix)
    splits: tuple[Any, Any] = (None, None)
    counts = None
    if matrix or "skew" in key:
        comes = [row[rank] for row in elements]
        goes = elements[rank]
        splits = (comes, goes)
        if "counts" in key:
            counts = torch.tensor(goes, device=device)
    root = max(0, key["root"])
    op = REDOPS.get(key["redop"])
    return Place(group.test, rank, n, root, op, key["count"], elements, splits, counts)


def elements_of(key: Key, matrix: Matrix) -> Matrix:
    """How many elements go from each rank to each rank. matrix: of --matrix, in bytes."""
    n = key["group_ranks"]
    count = key["count"]
    itemsize = dtype_of(key).itemsize
    if "skew" in key:
        row = skewed_row(count * itemsize // PIECE, n, key["skew"])
        return [[pieces * PIECE // itemsize for pieces in row]] * n
    if matrix:
        return (np.array(matrix) // itemsize).tolist()
    return [[count] * n] * n


@lru_cache(maxsize=1)
def cold_memory(device: torch.device) -> Tensor:
    """The memory of cold buffers, [COLD_BYTES]. It serves all cases: the system takes longer to
    find and clear so much than many cases have."""
    return torch.empty(COLD_BYTES, dtype=torch.uint8, device=device)


def make_buffers(key: Key, at: Place, device: torch.device) -> dict[str, Buffers]:
    """Inputs and outputs for each variant. Cold ones are spread over COLD_BYTES."""
    operation = OPERATIONS[key["collective"]]
    dtype = dtype_of(key)
    count = key["count"]
    sent = count if operation.sends else sum(at.matrix[at.rank])
    received = count if operation.receives else sum(row[at.rank] for row in at.matrix)
    second = aligned(sent)  # where the output begins
    shift = key.get("unalign", 0)
    needed = shift + max(second + received, 2 * count, 1)
    stride = aligned(needed)
    length = 0
    if key["caches"] == "cold":
        length = COLD_BYTES // dtype.itemsize
        stride = max(stride, length // LARGEST_BLOCK // ALIGNMENT * ALIGNMENT)
    rows = max(1, length // stride)
    if rows * stride <= length:
        memory_of_dtype = cold_memory(device).view(dtype)
        block = memory_of_dtype[: rows * stride].view(rows, stride)
    else:
        block = torch.empty(rows, stride, dtype=dtype, device=device)
    block[:, :needed].fill_(1)
    block = block[:, shift:]
    src = block[:, :sent]
    dst = block[:, second : second + received]
    larger = block[:, : max(sent, received)]
    my_part = larger[:, at.rank * count : (at.rank + 1) * count]
    src_in_place = my_part if sent < received else larger
    dst_in_place = my_part if sent > received else larger
    return {"out_of_place": cut(src, dst), "in_place": cut(src_in_place, dst_in_place)}


def aligned(elements: int) -> int:
    """As many, rounded up."""
    return -(-elements // ALIGNMENT) * ALIGNMENT


def cut(src: Tensor, dst: Tensor) -> Buffers:
    """The rows of both, [rows, elements]. To cut them one by one takes longer than a small case."""
    return list(zip(src.unbind(), dst.unbind(), strict=True))


def step_of(key: Key, at: Place, buffers: Buffers, calls_in_graph: int) -> Step:
    """A call on the next buffers. With -G every so many calls replay a graph of as many calls, and
    the other ones do nothing."""
    call = OPERATIONS[key["collective"]].call
    turns = itertools.cycle(buffers)
    device = buffers[0][0].device

    def call_next() -> object:
        src, dst = next(turns)
        return call(src, dst, at)

    def call_and_wait() -> None:
        call_next()
        torch.cuda.synchronize()

    if key["cudagraph"]:
        replay = cuda_graph(lambda: [call_next() for _ in range(calls_in_graph)], device)
        counter = itertools.count(1)
        return lambda: replay() if next(counter) % calls_in_graph == 0 else None
    if key["blocking"] == "1" and device.type == "cuda":
        return call_and_wait
    return call_next


def count_wrong(key: Key, at: Place, checked: Buffers, job: Job, group: Group) -> int:
    """How many values are wrong after a sample of calls like the timed ones, each on buffers of
    its own. For a barrier: how many ranks were not waited for."""
    step = step_of(key, at, checked, len(checked))
    if key["collective"] == "barrier":
        dist.barrier(group.control)
        return count_missed(step, at, job)
    redop = key["redop"]
    for src, dst in checked:
        patterns.blank(dst)
        patterns.fill(src, patterns.tile(at.rank, redop, at.n))
    dist.barrier(group.control)
    for _ in checked:
        step()
    pieces = OPERATIONS[key["collective"]].expected(at)
    tolerance = patterns.tolerance(redop, dtype_of(key))
    wrong = 0
    for _, dst in checked:
        begin = 0
        for piece in pieces:
            values = dst[begin : begin + piece.length]
            period = patterns.tile(piece.sender, redop, at.n)
            wrong += patterns.count_wrong(values, period, piece.first, tolerance)
            begin += piece.length
    return wrong


def count_missed(step: Step, at: Place, job: Job) -> int:
    """How many ranks had not come yet when this one left the barrier. Each counts itself before
    it, and one comes late."""
    time.sleep(LATE_S if at.rank == at.n - 1 else 0)
    counter = f"barrier/{at.group.group_name}"
    job.store.add(counter, 1)
    step()
    return -job.store.add(counter, 0) % at.n


class Layout(NamedTuple):
    """Where the ranks of the groups are, and what their links carry."""

    groups: list[list[int]]
    nodes: int  # that a group is spread over, evenly; 0 if it is spread unevenly
    limit: float | None  # GB/s of a link, if it is known
    limit_name: str


def nodes_of_a_group(groups: list[list[int]], node_of: list[int]) -> int:
    """How many nodes each of the groups is spread over, with as many ranks on each; 0 if not so.
    node_of: the node of each rank."""
    shapes = set()
    for group in groups:
        ranks_by_node = Counter(node_of[rank] for rank in group)
        shapes.add((len(ranks_by_node), *set(ranks_by_node.values())))
    nodes, *ranks_of_a_node = shapes.pop()
    return nodes if not shapes and len(ranks_of_a_node) == 1 else 0


def network_share(collective: str, n: int, k: int) -> float | None:
    """What a rank sends over the network, as a share of busbw, for n ranks on k nodes.

    None on one node, and for collectives that do not move data between all ranks. Each rank has
    n/k ranks on its node. In an all_to_all it sends a part to each rank of the other nodes, so
    (n - n/k) / (n - 1). The others send least if they go within the nodes first: (k - 1) / (n - 1),
    derived in https://github.com/stas00/ml-engineering, network/README.md. Over a ring of all ranks
    they send k/n of busbw.
    """
    if k < 2 or collective not in BETWEEN_ALL:
        return None
    parts_sent = n - n // k if collective == "all_to_all" else k - 1
    return parts_sent / (n - 1)


def may_reach_limit(key: Key) -> bool:
    """Whether the speed of a link bounds a case's busbw, as far as is known without --limit."""
    return key["collective"] in BETWEEN_ALL and "nccl" in key["backend"]


def derive(
    args: argparse.Namespace, layout: Layout, case: Case, times: Times, facts: list[Any]
) -> None:
    """Times and bandwidths of both variants. The slowest group counts, if there are several."""
    key = case.key
    metrics = case.metrics
    operation = OPERATIONS[key["collective"]]
    wrong = 0
    if args.check:
        for variant in operation.variants:
            metrics[f"{variant}_wrong"] = sum(fact[variant] for fact in facts)
            wrong += metrics[f"{variant}_wrong"]
    metrics |= {"wrong": wrong, "calls": facts[0]["calls"]}
    if facts[0].get("expected_s"):
        metrics["expected_time_s"] = facts[0]["expected_s"]
    across = ACROSS[key["average"]]
    for variant in operation.variants:
        by_rank = times.each("step" if variant == operation.variants[0] else variant)
        group_times = list[float]()
        for ranks in layout.groups:
            rows = [case.ranks.index(rank) for rank in ranks]
            samples = across(by_rank[rows], axis=0)
            group_times.append(float(np.median(samples)))
        algbw = key["size_bytes"] / max(group_times) / 1e9
        busbw = algbw * operation.bus(key["group_ranks"])
        metrics[f"{variant}_time_s"] = max(group_times)
        metrics[f"{variant}_group_times_s"] = group_times
        metrics[f"{variant}_algbw_gb_per_s"] = algbw
        metrics[f"{variant}_busbw_gb_per_s"] = busbw
        if layout.limit and (args.limit or may_reach_limit(key)):
            efficiency = busbw / layout.limit
            metrics["efficiency"] = max(metrics.get("efficiency", 0), efficiency)
            metrics["limit"] = layout.limit_name
    if "skew" in key:
        mean_bytes = key["count"] * dtype_of(key).itemsize  # all send as much
        metrics["max_over_mean_received"] = key["size_bytes"] / mean_bytes
    case.check = "passed" if args.check else "skipped: -c 0"
    if wrong:
        case.check = f"failed: {wrong} wrong values"


class ScanTable(Table):
    """As nccl-tests lays it out, since other tools read that."""

    HEADER = f"""\
#{"":59}out-of-place{"":20}in-place
#       size        count     type  redop   root{"     time   algbw   busbw #wrong" * 2}
#        (B)   (elements){"":23}{"     (us)  (GB/s)  (GB/s)       " * 2}"""

    def row(self, case: Case) -> str:
        metrics = case.metrics
        line = "{size_bytes:>12} {count:>12} {dtype:>8} {redop:>6} {root:>6}".format(**case.key)
        for variant in VARIANTS if metrics else ():
            time_us = metrics.get(f"{variant}_time_s", np.nan) * 1e6
            algbw = metrics.get(f"{variant}_algbw_gb_per_s", np.nan)
            busbw = metrics.get(f"{variant}_busbw_gb_per_s", np.nan)
            wrong = metrics.get(f"{variant}_wrong", "N/A")
            line += f" {time_us:>8.2f} {algbw:>7.2f} {busbw:>7.2f} {wrong:>6}"
        line = line.replace("nan", "N/A")
        if case.failed:
            line += f"  {case.check}"
        if "efficiency" in metrics:
            line += f"  {metrics['efficiency']:.0%} of {metrics.get('limit', 'the limit')}"
        if "expected_time_s" in metrics:
            line += f"  expected {metrics['expected_time_s'] * 1e6:.2f} us"
        if "max_over_mean_received" in metrics:
            line += f"  max/mean received {metrics['max_over_mean_received']:.2f}"
        if case.key["caches"] == "warm":
            line += "  warm caches"
        return line


def busbw_by_variant(cases: list[Case]) -> list[list[float]]:
    """What was measured of each variant, from the smallest size to the largest."""
    rates = list[list[float]]()
    for variant in VARIANTS:
        values = (case.metrics.get(f"{variant}_busbw_gb_per_s") for case in cases)
        rates.append([value for value in values if value])  # a barrier's is 0
    return rates


def top_quarter(rates: list[float]) -> float:
    """The mean of the last quarter, rounded up."""
    return float(np.mean(rates[-len(rates) // 4 :]))


def network_line(key: Key, busbw: float, nodes: int) -> str | None:
    """What a rank sends over the network, if that can be said. key: of a case with that busbw."""
    share_of_busbw = network_share(key["collective"], key["group_ranks"], nodes)
    if share_of_busbw is None or key["matrix"]:
        return None
    n = key["group_ranks"]
    formula, assumption = "(k-1)/(n-1)", "; over a ring more"
    if key["collective"] == "all_to_all":
        formula, assumption = "(n-n/k)/(n-1)", ""
    rate = f"{busbw * share_of_busbw:.4g} GB/s = busbw {formula}"
    return f"#   per rank over the network: {rate}, k = {nodes} nodes, n = {n} ranks{assumption}"


def footer(
    tables: dict[str, list[Key]], min_busbw: float | None, nodes: int, bench: Benchmark
) -> None:
    """A line for each table. Then the lines that nccl-tests ends with, which other tools read."""
    all_rates: list[float] = []
    bench.print("#")
    for title, keys in tables.items():
        rates = busbw_by_variant([case for case in bench.report.cases if case.key in keys])
        measured = [values for values in rates if values]
        if not measured:
            continue
        all_rates += itertools.chain(*measured)
        top = max(top_quarter(values) for values in measured)
        line = f"{title}: busbw over the top quarter of the sizes {top:.4g} GB/s"
        bench.print(line)
        if line_of_network := network_line(keys[0], top, nodes):
            bench.print(line_of_network)
        if min_busbw and top < 0.9 * min_busbw:
            bench.fail(f"{line.removeprefix('# ')}, under 0.9 of --min-busbw {min_busbw:g}")
    wrong = sum(case.metrics.get("wrong", 0) for case in bench.report.cases)
    mean = np.mean(all_rates) if all_rates else 0
    bench.print(f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}")
    bench.print(f"# Avg bus bandwidth    : {mean:g}\n#")


class Best(NamedTuple):
    """The better variant of a case."""

    size_bytes: int
    time_s: float
    busbw: float  # GB/s; 0 of a barrier, and in a group of one rank


def answer(cases: list[Case]) -> list[str]:
    """For each table its largest bus bandwidth, where half of it is reached, the smallest time."""
    sentences: list[str] = []
    for same in series(cases, ("size_bytes", "count", "calls", "matrix")).values():
        key = same[0].key
        name = f"{key['collective']} {key['dtype']} {key['redop']}".replace(" none", "")
        if "skew" in key:
            name += f", skew {key['skew']:g}"
        rows = [best_variant(case) for case in same if "wrong" in case.metrics]
        if rows:
            sentences.append(bandwidth_sentence(name, sorted(rows)))
    return sentences


def best_variant(case: Case) -> Best:
    measured = [name for name in VARIANTS if f"{name}_time_s" in case.metrics]
    time_s = min(case.metrics[f"{name}_time_s"] for name in measured)
    busbw = max(case.metrics[f"{name}_busbw_gb_per_s"] for name in measured)
    return Best(case.key["size_bytes"], time_s, busbw)


def bandwidth_sentence(name: str, rows: list[Best]) -> str:
    """`all_reduce: at most 0.796 GB/s bus bandwidth, at 2M bytes; half of it from 64K on; 8 bytes
    take 583 us`. rows: by size, at least one."""
    smallest, largest = rows[0], rows[-1]
    if not largest.size_bytes:
        return f"{name} takes {show_seconds(smallest.time_s)}"
    shortest = f"{cli.show_size(smallest.size_bytes)} bytes take {show_seconds(smallest.time_s)}"
    peak = max(rows, key=lambda row: row.busbw)
    if not peak.busbw:
        return f"{name}: {shortest}; one rank alone has no bus bandwidth"
    if len(rows) == 1:
        return f"{name}: {shortest}, {peak.busbw:.3g} GB/s bus bandwidth"
    where = f"at {cli.show_size(peak.size_bytes)} bytes"
    if peak is largest:
        where += ", the largest size"
    under_half = [number for number, row in enumerate(rows) if row.busbw < peak.busbw / 2]
    half = rows[max(under_half, default=-1) + 1 :]
    since = f"from {cli.show_size(half[0].size_bytes)} on" if half else "not at the largest size"
    most = f"{name}: at most {peak.busbw:.3g} GB/s bus bandwidth, {where}"
    return f"{most}; half of it {since}; {shortest}"


def why_refused(
    args: argparse.Namespace, matrix: Matrix, bench: Benchmark, ranks: int
) -> str | None:
    """The mistake in the flags that only the running job shows, if there is one. ranks: of a group.

    All ranks call it.
    """
    rooted = [name for name in names_of(args) if "-r" in OPERATIONS[name].options]
    if rooted and args.root >= ranks:
        within = f"a rank within its group, 0 to {ranks - 1}"
        return f"--root: {rooted[0]} expected {within}, got {args.root}; e.g. --root 0"
    device = bench.job.device.type
    if args.cudagraph and device != "cuda":
        return "-G replays CUDA graphs, and this run is on the CPU; leave it out"
    _, largest = range_of(args, matrix, device)
    if args.skew:  # what the most popular rank receives, if all send as much as -e says
        largest = int(largest * ranks * popularity(ranks, max(args.skew)).max())
    return share(too_much(2 * largest, bench.job, bench.report.environment, "-e"))


def layout_of(groups: list[list[int]], environment: dict[str, Any], limit: float | None) -> Layout:
    """limit: --limit; without it the speed of the node's links counts, if that is known."""
    nodes = nodes_of_a_group(groups, node_of_each(environment))
    if limit or nodes != 1:
        return Layout(groups, nodes, limit, "the limit")
    link = peaks.find_link(environment, len(groups[0]))
    if not link:
        return Layout(groups, nodes, None, "")
    return Layout(groups, nodes, link.gb_per_s, f"{link.kind}'s {link.gb_per_s:g} GB/s")


def main() -> int:
    args = parse_args()
    with Benchmark("collectives", args, answer=answer) as bench:
        job, matrix = bench.job, Matrix()
        try:
            groups = partition(args.groups, node_of_each(bench.report.environment))
            ranks = len(groups[0])
            if args.matrix:
                matrix = read_matrix(args.matrix, ranks)
        except (OSError, ValueError) as error:
            bench.refuse(f"--groups or --matrix: {error}")
        if problem := why_refused(args, matrix, bench, ranks):
            bench.refuse(problem)
        try:
            tables = plan(args, matrix, bench.place, ranks)
        except ValueError as error:
            bench.refuse(str(error))
        measured = [keys for keys in tables.values() if not why_not_measured(keys[0])]
        bench.announce(list(itertools.chain(*measured)))
        members = sorted(itertools.chain(*groups))
        prepare = partial(build, job, matrix, args)
        layout = layout_of(groups, bench.report.environment, args.limit)
        conclude = partial(derive, args, layout)
        for title, keys in tables.items():
            bench.begin_table(f"{title}; {settings(args, matrix)}", {})
            bench.table = ScanTable({})
            if reason := why_not_measured(keys[0]):
                bench.print(f"# n/a: {reason}")
                continue
            bench.print(ScanTable.HEADER)
            for key in keys:
                bench.measure(key, prepare, conclude, members, groups)
        footer(tables, args.min_busbw, layout.nodes, bench)
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
