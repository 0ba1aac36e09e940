#!/usr/bin/env python3
"""How fast is each collective, at each size, and are its results right? nccl-tests for torch.

    time    = a sample of n calls (-n) / n; over the ranks the maximum; the median sample
    algbw   = size / time, in GB/s of 10^9 bytes
    busbw   = algbw * 2(n-1)/n for all_reduce; * (n-1)/n for all_gather, reduce_scatter,
              all_to_all, gather and scatter; * 1 for the others; among n ranks
    size    = the larger of what a rank sends and receives, in bytes; count = elements of a part
    #wrong  = values that differ from what rank and position say; must be 0
    +-%     = how far the 95 % interval of the time reaches, the wider one of the two variants

    torchrun --nproc-per-node 2 benchmarks/collectives.py -b 4 -e 64M -f 2
    torchrun --nproc-per-node 8 benchmarks/collectives.py --collective all -e 1G --json report.jsonl
    torchrun --nproc-per-node 8 benchmarks/collectives.py -b 1G -e 1G --limit 450 --min-busbw 400

The flags, the table and the formulas are those of NVIDIA's nccl-tests; the code was written anew.
The calls are in common/workloads/operations.py. BSD-3-Clause.
"""

import argparse
import itertools
import sys
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cli
from common.benchmark import Benchmark, Key, Planned
from common.environment import count_of, node_of_each
from common.groups import Group, Job
from common.report import Case, Estimate
from common.stats import Times, median
from common.table import Table
from common.timing import Step, Workload, cuda_graph, time_block
from common.workloads import operations
from common.workloads.operations import OPERATIONS, REDOPS, VARIANTS, Member
from common.workloads.ranks import partition
from common.workloads.room import too_much

Groups = list[list[int]]  # the ranks of each
TYPES = ("float32", "float16", "bfloat16", "float64", "int8", "uint8", "int32", "int64")
ALIASES = {"float": "float32", "half": "float16", "double": "float64"}  # nccl-tests' names
MOST_CALLS = 20  # in a sample, if -n does not say how many
SAMPLE_S = 1e-3  # without -n a sample has no more calls than take so long
SAMPLE_BYTES = {"cpu": 2**22, "cuda": 2**32}  # a sample of large sizes has fewer calls than -n
LARGEST_SIZE = {"cpu": 2**26, "cuda": 2**30}  # -e by default
MAX_SIZES = 10_000  # of a table


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    size, positive_size, count = cli.size, cli.positive_size, cli.number(int, 0)
    collectives = cli.list_of(str, tuple(OPERATIONS))
    types = cli.list_of(lambda name: ALIASES.get(name, name), TYPES)
    redops = cli.list_of(str, tuple(REDOPS))
    names = f"`all` or a list of {', '.join(OPERATIONS)} (default: all_reduce)"
    add("--collective", type=collectives, default=["all_reduce"], metavar="NAME", help=names)
    add("-b", "--minbytes", type=size, default=8, metavar="SIZE", help="e.g. 64K (default: 8)")
    add("-e", "--maxbytes", type=positive_size, metavar="SIZE", help="(default: 64M, on CUDA 1G)")
    step = parser.add_mutually_exclusive_group().add_argument
    step("-i", "--stepbytes", type=positive_size, metavar="SIZE", help="to each size add this, or")
    factor = cli.number(float, 1, above=True)
    step("-f", "--stepfactor", type=factor, default=2.0, metavar="F", help="multiply (default: 2)")
    calls = "in a sample (default: as many as take 1 ms, 20 at most)"
    add("-n", "--calls", type=cli.positive_int, metavar="N", help=calls)
    add("-d", "--datatype", type=types, default=["float32"], metavar="TYPE", help=", ".join(TYPES))
    add("-o", "--op", type=redops, default=["sum"], metavar="OP", help=", ".join(REDOPS))
    add("-r", "--root", type=count, default=0, metavar="R", help="a rank in its group (default: 0)")
    add("-c", "--check", type=count, default=1, metavar="N", help="check N samples (default: 1)")
    add("-G", "--cudagraph", type=count, default=0, metavar="N", help="time N replays of a graph")
    add("--cache-warm", action="store_true", help="one buffer instead of many")
    add("--groups", default="world", metavar="G", help="world, node, cross, or ranks as 0,1/2-3")
    limit = "the speed of the link: adds busbw in percent of it"
    add("--limit", type=cli.positive_float, metavar="GB/s", help=limit)
    least = "fail if busbw at large sizes is under 0.9 of this"
    add("--min-busbw", type=cli.positive_float, metavar="GB/s", help=least)
    cli.add_common_flags(parser, min_iters=12, max_seconds=0.2)
    args = parser.parse_args(argv)
    if args.maxbytes and args.maxbytes < args.minbytes:
        got = f"-b {args.minbytes} and -e {args.maxbytes}"
        parser.error(f"expected -e from -b on, got {got}; e.g. -b 8 -e 64M")
    if args.cudagraph and not cli.on_cuda(args.device):
        parser.error("-G replays CUDA graphs, and this run is on the CPU; leave it out")
    if len(sizes_of(args)) > MAX_SIZES:
        parser.error(f"-b to -e are over {MAX_SIZES:,} sizes; expected fewer, e.g. -f 2")
    return args


# [core]
Buffers = list[tuple[Tensor, Tensor]]  # input and output of successive calls
COLD_BYTES = 2**28  # calls walk through so much memory: more than caches hold
MOST_BUFFERS = 4096  # that calls walk through
ALIGNMENT = 64  # elements: every buffer begins at a multiple of it


@lru_cache(maxsize=1)
def cold_memory(device: torch.device) -> Tensor:
    """The memory of cold buffers, [COLD_BYTES]. It serves all cases: the system takes longer to
    find and clear so much than many cases have."""
    return torch.empty(COLD_BYTES, dtype=torch.uint8, device=device)


def make_buffers(
    sent: int, received: int, rank: int, dtype: torch.dtype, device: torch.device, cold: bool
) -> dict[str, Buffers]:
    """Inputs and outputs, out of place and in place. Cold ones are spread over COLD_BYTES, else
    there is one of each. sent, received: elements. In place the smaller of the two is this rank's
    part of the larger one."""
    second = aligned(sent)  # where the output begins
    needed = second + received
    memory = cold_memory(device).view(dtype) if cold else torch.empty(0)
    stride = max(aligned(needed), len(memory) // MOST_BUFFERS // ALIGNMENT * ALIGNMENT)
    if stride > len(memory):
        memory = torch.empty(stride, dtype=dtype, device=device)
    rows = len(memory) // stride
    block = memory[: rows * stride].view(rows, stride)
    block[:, :needed].fill_(1)
    src = block[:, :sent]
    dst = block[:, second : second + received]
    part = min(sent, received)
    larger = block[:, : max(sent, received)]
    my_part = larger[:, rank * part : (rank + 1) * part]
    src_in_place = my_part if sent < received else larger
    dst_in_place = my_part if sent > received else larger
    return {"out_of_place": pairs(src, dst), "in_place": pairs(src_in_place, dst_in_place)}


def aligned(elements: int) -> int:
    """As many, rounded up."""
    return -(-elements // ALIGNMENT) * ALIGNMENT


def pairs(src: Tensor, dst: Tensor) -> Buffers:
    """The rows of both, [rows, elements]. To cut them one by one takes longer than a small case."""
    return list(zip(src.unbind(), dst.unbind(), strict=True))


def in_turn(call: Callable[[Tensor, Tensor], object], buffers: Buffers) -> Callable[[], object]:
    """A call on the first buffers, then on the next ones, and so on."""
    turns = itertools.cycle(buffers)

    def call_next() -> object:
        src, dst = next(turns)
        return call(src, dst)

    return call_next


# [/core]


def why_not_measured(key: Key, job: Job) -> str | None:
    """Why a case cannot be measured, as far as is known without a try; None where it can be."""
    to_itself_or_cuda = key["group_ranks"] == 1 or job.device.type == "cuda"
    if key["collective"] == "sendrecv" and job.backend == "gloo" and to_itself_or_cuda:
        return "gloo sends neither to itself nor from CUDA"
    if key["redop"] == "avg" and not getattr(torch, key["dtype"]).is_floating_point:
        return "averages of integers are not defined"
    return None


def build(job: Job, args: argparse.Namespace, key: Key, group: Group) -> Workload:
    """What a rank measures in a case: calls on successive buffers, out of place and in place.

    With -n and in a graph a sample has the calls of the key; else these are the most that it has.
    """
    operation = OPERATIONS[key["collective"]]
    rank, n, part = dist.get_rank(group.test), key["group_ranks"], key["count"]
    member = Member(group.test, rank, n, part, key["redop"], max(0, key["root"]))
    torch.cuda.empty_cache()  # NCCL has no use for what torch keeps of smaller sizes
    sent, received = (parts * part for parts in operation.parts(n))
    dtype, cold = getattr(torch, key["dtype"]), key["caches"] == "cold"
    buffers = make_buffers(sent, received, rank, dtype, job.device, cold)
    steps: dict[str, Step] = {}
    for variant in operation.variants:  # in this order on all ranks: a graph is run when it is made
        steps[variant] = step_of(key, member, buffers[variant], key["calls"])
    profiled: dict[str, Step] = {}
    if key["cudagraph"]:  # most calls do nothing: a trace has whole graphs
        for variant, call in steps.items():
            profiled[f"{variant}, a graph"] = partial(repeat, call, key["calls"])
    step = steps.pop(operation.variants[0])
    calls = key["calls"]
    if calls > 1 and not (key["exact_calls"] or key["cudagraph"]):
        calls = calls_of_a_sample(step, calls, job.device, group)

    def facts() -> dict[str, int]:
        """The calls of a sample, and the wrong values of each variant."""
        counts = {"calls": calls}
        for variant in operation.variants:
            checked = buffers[variant][:calls]
            counts[variant] = 0
            for _ in range(args.check):
                counts[variant] += check(key, member, checked, group)
        return counts

    timed = calls * max(1, key["cudagraph"])
    return Workload(step, steps, calls=timed, facts=facts, launches=True, profiled=profiled)


def step_of(key: Key, member: Member, buffers: Buffers, calls_in_graph: int) -> Step:
    """A call on the next buffers. With -G every so many calls replay a graph of as many calls, and
    the other ones do nothing."""
    call = partial(OPERATIONS[key["collective"]].call, at=member)
    call_next = in_turn(call, buffers)
    if not key["cudagraph"]:
        return call_next
    device = buffers[0][0].device
    replay = cuda_graph(partial(repeat, call_next, calls_in_graph), device)
    counter = itertools.count(1)
    return lambda: replay() if next(counter) % calls_in_graph == 0 else None


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


def check(key: Key, member: Member, checked: Buffers, group: Group) -> int:
    """Wrong values after a sample of calls like the timed ones, each on buffers of its own."""
    step = step_of(key, member, checked, len(checked))
    for src, dst in checked:
        operations.fill(src, dst, member)
    dist.barrier(group.control)
    repeat(step, len(checked))
    operation = OPERATIONS[key["collective"]]
    return sum(operations.count_wrong(operation, dst, member) for _, dst in checked)


def derive(
    args: argparse.Namespace, groups: Groups, case: Case, times: Times, facts: list[dict[str, int]]
) -> None:
    """Times and bandwidths of both variants. The slowest group counts, if there are several."""
    key, metrics = case.key, case.metrics
    operation = OPERATIONS[key["collective"]]
    metrics |= {"wrong": 0, "calls": facts[0]["calls"]}
    for number, variant in enumerate(operation.variants):
        by_rank = times.each(variant if number else "step")
        group_times: list[Estimate] = []
        for ranks in groups:
            rows = [case.ranks.index(rank) for rank in ranks]
            group_times.append(median(by_rank[rows].max(axis=0)))
        time = max(group_times, key=lambda estimate: estimate.value)
        algbw = key["size_bytes"] / time / 1e9
        metrics[f"{variant}_time_s"] = time
        metrics[f"{variant}_group_times_s"] = group_times
        metrics[f"{variant}_algbw_gb_per_s"] = algbw
        metrics[f"{variant}_busbw_gb_per_s"] = algbw * operation.bus(key["group_ranks"])
        if args.check:
            metrics[f"{variant}_wrong"] = sum(fact[variant] for fact in facts)
            metrics["wrong"] += metrics[f"{variant}_wrong"]
    if args.limit:
        metrics["efficiency"] = best_variant(case).busbw / args.limit
    case.check = "passed" if args.check else "skipped: -c 0"
    if metrics["wrong"]:
        case.check = f"failed: {metrics['wrong']} wrong values"


# -- what is printed -------------------------------------------------------------------------------


class Best(NamedTuple):
    """The better variant of a case."""

    size_bytes: int
    time: Estimate  # seconds
    busbw: Estimate  # GB/s; 0 in a group of one rank


def best_variant(case: Case) -> Best:
    measured = [name for name in VARIANTS if f"{name}_time_s" in case.metrics]
    times = [case.metrics[f"{name}_time_s"] for name in measured]
    rates = [case.metrics[f"{name}_busbw_gb_per_s"] for name in measured]
    size_bytes = case.key["size_bytes"]
    return Best(size_bytes, min(times, key=value_of), max(rates, key=value_of))


def value_of(estimate: Estimate) -> float:
    return estimate.value


class ScanTable(Table):
    """As nccl-tests lays it out, since other tools read that. Our own column comes last."""

    HEADER = f"""\
#{"":59}out-of-place{"":20}in-place
#       size        count     type  redop   root{"     time   algbw   busbw #wrong" * 2}    +-%
#        (B)   (elements){"":23}{"     (us)  (GB/s)  (GB/s)       " * 2} (time)"""

    def row(self, case: Case) -> str:
        self.cases.append(case)
        line = "{size_bytes:>12} {count:>12} {dtype:>8} {redop:>6} {root:>6}".format(**case.key)
        if "wrong" in case.metrics:  # it was measured
            line += cells_of(case, "out_of_place") + cells_of(case, "in_place")
            line += f" {uncertainty(case):>6}"
        if case.failed:
            line += f"  {case.check}"
        if "efficiency" in case.metrics:
            line += f"  {case.metrics['efficiency'].value:.0%} of the limit"
        if case.key["caches"] == "warm":
            line += "  warm caches"
        return f"{self.HEADER}\n{line}" if len(self.cases) == 1 else line


def cells_of(case: Case, variant: str) -> str:
    """The four columns of a variant."""
    metrics = case.metrics
    if f"{variant}_time_s" not in metrics:
        return f" {'N/A':>8} {'N/A':>7} {'N/A':>7} {'N/A':>6}"
    time_us = metrics[f"{variant}_time_s"].value * 1e6
    algbw = metrics[f"{variant}_algbw_gb_per_s"].value
    busbw = metrics[f"{variant}_busbw_gb_per_s"].value
    return (
        f" {time_us:>8.2f} {algbw:>7.2f} {busbw:>7.2f} {metrics.get(f'{variant}_wrong', 'N/A'):>6}"
    )


def uncertainty(case: Case) -> str:
    """How far the interval of the time reaches from it, in the variant where it is wider."""
    widths = []
    for variant in VARIANTS:
        if f"{variant}_time_s" in case.metrics:
            widths.append(case.metrics[f"{variant}_time_s"].relative)
    if None in widths:
        return "-"
    return f"{max(widths):.1%}" if max(widths) < 1 else ">100%"


def top_quarter(rates: list[Estimate]) -> Estimate:
    """The mean of the last quarter, rounded up. Its interval holds if all of theirs do."""
    top = rates[-len(rates) // 4 :]
    value = float(np.mean([rate.value for rate in top]))
    if any(rate.relative is None for rate in top):
        return Estimate(value)
    lows, highs = [rate.low or 0 for rate in top], [rate.high or 0 for rate in top]
    return Estimate(value, float(np.mean(lows)), float(np.mean(highs)))


def footer(tables: dict[str, list[Case]], min_busbw: float | None, bench: Benchmark) -> None:
    """A line for each table. Then the lines that nccl-tests ends with, which other tools read."""
    all_rates: list[Estimate] = []
    wrong = 0
    bench.print("#")
    for title, cases in tables.items():
        wrong += sum(case.metrics.get("wrong", 0) for case in cases)
        tops = []
        for variant in VARIANTS:
            measured = (case.metrics.get(f"{variant}_busbw_gb_per_s") for case in cases)
            rates = [rate for rate in measured if rate and rate.value]  # a rank alone has 0
            all_rates += rates
            tops += [top_quarter(rates)] if rates else []
        if not tops:
            continue
        top = max(tops, key=value_of)
        about = title.partition(";")[0]
        line = f"{about}: busbw over the top quarter of the sizes {top.text('GB/s')}"
        bench.print(line)
        if min_busbw and top.value < 0.9 * min_busbw:
            bench.fail(f"{line.removeprefix('# ')}, under 0.9 of --min-busbw {min_busbw:g}")
    mean = np.mean([rate.value for rate in all_rates]) if all_rates else 0
    bench.print(f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}")
    bench.print(f"# Avg bus bandwidth    : {mean:g}\n#")


def answer(cases: list[Case]) -> str:
    """The largest bus bandwidth, where half of it is reached, and the smallest time.

    `all_reduce float32 sum: at most 0.796 GB/s (0.780 to 0.810) bus bandwidth, at 2M bytes; about
    half of it from 64K on; 8 bytes take 583 us (560 to 601)`
    """
    name = kind_of(cases[0].key)
    rows = sorted(map(best_variant, cases), key=lambda row: row.size_bytes)
    smallest, largest = rows[0], rows[-1]
    shortest = f"{cli.show_size(smallest.size_bytes)} bytes take {smallest.time}"
    peak = max(rows, key=lambda row: row.busbw.value)
    if not peak.busbw.value:
        return f"{name}: {shortest}; one rank alone has no bus bandwidth"
    rate = f"{peak.busbw.text('GB/s')} bus bandwidth"
    if len(rows) == 1:
        return f"{name}: {shortest}, {rate}"
    where = f"at {cli.show_size(peak.size_bytes)} bytes"
    if peak is largest:
        where += ", the largest size"
    alike = [row for row in rows if row is not peak and row.busbw.overlaps(peak.busbw)]
    if alike:
        sizes = cli.cut([cli.show_size(row.size_bytes) for row in alike], 3)
        where += f" (cannot be told apart: {sizes})"
    under_half = [n for n, row in enumerate(rows) if row.busbw.value < peak.busbw.value / 2]
    half = rows[max(under_half, default=-1) + 1 :]
    since = f"from {cli.show_size(half[0].size_bytes)} on" if half else "not at the largest size"
    return f"{name}: at most {rate}, {where}; about half of it {since}; {shortest}"


# -- what is going to be measured ------------------------------------------------------------------


def sizes_of(args: argparse.Namespace) -> list[int]:
    device = "cuda" if cli.on_cuda(args.device) else "cpu"
    high = args.maxbytes or max(args.minbytes, LARGEST_SIZE[device])
    return scan(args.minbytes, high, args.stepbytes, args.stepfactor)


def scan(low: int, high: int, step: int | None, factor: float) -> list[int]:
    """Sizes from `low` to `high`, MAX_SIZES and one at most. Each is `step` bytes more than the
    last, or `factor` times it."""
    sizes: list[int] = []
    size = max(1, low)
    while size <= high and len(sizes) <= MAX_SIZES:
        sizes.append(size)
        if step:
            size += step
        else:
            product = min(size * factor, high + 1)  # int() of infinity would raise
            size = max(size + 1, int(product))
    return sizes


def kind_of(key: Key) -> str:
    """`all_reduce float32 sum`, `all_gather float32`"""
    words = [key["collective"], key["dtype"]]
    if OPERATIONS[key["collective"]].reduces:
        words.append(key["redop"])
    return " ".join(words)


def plan(args: argparse.Namespace, device: str, groups: Groups) -> dict[str, list[Planned]]:
    """The title and the cases of each table."""
    ranks = len(groups[0])
    one_buffer = args.cache_warm or args.cudagraph
    fixed = {
        "cudagraph": args.cudagraph,
        "groups": args.groups,
        "caches": "warm" if one_buffer else "cold",
        "group_ranks": ranks,
        "exact_calls": bool(args.calls),  # else by time, up to the key's calls
    }
    tables: dict[str, list[Planned]] = {}
    for name, dtype, redop in itertools.product(args.collective, args.datatype, args.op):
        operation = OPERATIONS[name]
        table: Key = {
            "collective": name,
            "dtype": dtype,
            "redop": redop if operation.reduces else "none",
            "root": args.root if operation.has_root else -1,
        }
        kind = kind_of(table)
        unit = getattr(torch, dtype).itemsize * max(operation.parts(ranks))
        cases: list[Planned] = []
        for row in sizes_and_calls(sizes_of(args), unit, args.calls or MOST_CALLS, device):
            case_name = f"{kind}, {row['size_bytes']} bytes"
            cases.append((case_name, ranks * len(groups), table | row | fixed))
        title = f"# {kind}, {args.groups} ({count_of(ranks, 'rank')}); {settings(args)}"
        tables[title] = cases  # an operation that does not reduce has the same one for each --op
    return tables


def sizes_and_calls(sizes: list[int], unit: int, most_calls: int, device: str) -> list[Key]:
    """The part of the key that differs from row to row.

    unit: bytes by which the size grows with each element. A size that is no multiple is cut, and
    what becomes the same by that is measured once.
    """
    counts = dict.fromkeys(max(1, size // unit) for size in sizes)
    rows: list[Key] = []
    for count in counts:
        size = count * unit
        calls = max(1, min(most_calls, SAMPLE_BYTES[device] // size))
        rows.append({"size_bytes": size, "count": count, "calls": calls})
    return rows


def settings(args: argparse.Namespace) -> str:
    """What all rows of all tables share, in words."""
    calls = f"at most {args.calls or MOST_CALLS} calls a sample"
    if args.cudagraph:
        return f"{calls}, {args.cudagraph} replays of a graph (-G), one buffer"
    return f"{calls}, {'one buffer' if args.cache_warm else 'cold buffers'}"


def check_root(args: argparse.Namespace, ranks: int) -> None:
    """ranks: of a group. Raises ValueError."""
    rooted = [name for name in args.collective if OPERATIONS[name].has_root]
    if rooted and args.root >= ranks:
        within = f"a rank within its group, 0 to {ranks - 1}"
        raise ValueError(f"{rooted[0]} expected {within}, got {args.root}; e.g. --root 0")


def check_room(bench: Benchmark, largest: int) -> None:
    """Raises ValueError where the buffers of the largest size find no room."""
    if problem := too_much(2 * largest, bench.job, bench.report.environment, "-e"):
        raise ValueError(problem)


def main() -> int:
    args = parse_args()
    with Benchmark("collectives", args) as bench:
        job, nodes = bench.job, node_of_each(bench.report.environment)
        groups = bench.prepare("--groups", lambda: partition(args.groups, nodes))
        bench.prepare("--root", lambda: check_root(args, len(groups[0])))
        bench.prepare("-e", lambda: check_room(bench, sizes_of(args)[-1]))
        tables = plan(args, job.device.type, groups)
        reasons = {title: why_not_measured(cases[0][2], job) for title, cases in tables.items()}
        bench.announce({title: cases for title, cases in tables.items() if not reasons[title]})
        members = sorted(itertools.chain(*groups))
        make, fill_in = partial(build, job, args), partial(derive, args, groups)
        measured: dict[str, list[Case]] = {}
        for title, cases in tables.items():
            with bench.begin_table(title, {}, answer, ScanTable({})) as table:
                measured[title] = table.cases
                if reasons[title]:
                    bench.print(f"# n/a: {reasons[title]}")
                    continue
                for name, _, key in cases:
                    bench.measure(key, name, make, fill_in, ranks=members, teams=groups)
        footer(measured, args.min_busbw, bench)
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
