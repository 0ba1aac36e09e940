#!/usr/bin/env python3
"""How fast is each collective, at each size, and are its results right? nccl-tests for torch.

    time    = the median sample; the slowest rank counts in each sample. A sample is one call on the
              CPU, the mean of up to 20 calls on CUDA; with -n N it is the mean of N calls
    algbw   = size / time, in GB/s of 10^9 bytes
    busbw   = algbw * 2(n-1)/n for all_reduce; * (n-1)/n for all_gather, reduce_scatter,
              all_to_all, gather and scatter; * 1 for the others; among n ranks
    size    = the larger of what a rank sends and receives, in bytes; count = elements of a part
    #wrong  = values that differ from what rank and position say; must be 0
    i_...   = with -I 1, of the samples: least, largest, 99th percentile (nearest rank), and the
              standard deviation in percent of the mean
    +-%     = how far the 95 % interval of the time reaches, the wider one of the two variants
    --beside: `both` = the collective and another one at the same time, each in its own group; both
              / longer = that time over the longer of the two alone: 1 if neither slows the other

    torchrun --nproc-per-node 2 benchmarks/collectives.py -b 4 -e 64M -f 2
    torchrun --nproc-per-node 8 benchmarks/collectives.py --collective all -e 1G --json report.jsonl
    torchrun --nproc-per-node 8 benchmarks/collectives.py -b 1G -e 1G --limit 450 --min-busbw 400
    torchrun --nproc-per-node 2 benchmarks/collectives.py -b 1M -e 4M --beside all_to_all:1M

The flags, the table and the formulas are those of NVIDIA's nccl-tests (-I: README.md and
src/util.cu of version 2.19.6, a0b82b2); the code was written anew.
The calls are in benchmarks/workloads/operations.py. BSD-3-Clause.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cli  # first: it names a package that is missing

# isort: split
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

from benchmarks.workloads import operations, start_up
from benchmarks.workloads.cuda_graphs import cuda_graph
from benchmarks.workloads.operations import OPERATIONS, REDOPS, VARIANTS, Member
from benchmarks.workloads.ranks import partition
from benchmarks.workloads.room import check_room
from common.benchmark import Answer, Benchmark, Key, Planned
from common.environment import count_of, node_of_each
from common.groups import Group, Job, connect, rendezvous
from common.report import UNCHECKED, Case, Estimate
from common.stats import Disturbed, Samples, Times, median
from common.table import Columns, Table, ends, metric, relative
from common.timing import Step, Workload

Groups = list[list[int]]  # the ranks of each
TYPES = ("float32", "float16", "bfloat16", "float64", "int8", "uint8", "int32", "int64")
ALIASES = {"float": "float32", "half": "float16", "double": "float64"}  # nccl-tests' names
MOST_SIZES = 10_000  # of a table
MOST_CALLS = 20  # in a sample on CUDA, without -n
SAMPLE_BYTES = 2**32  # a sample of large sizes has fewer
UNSURE = 0.5  # an interval that reaches farther from the time, as a share of it
GONE = {  # flags of nccl-tests, and what replaces them
    **dict.fromkeys(("-g", "--ngpus", "-t", "--nthreads"), "each GPU has its own process"),
    **dict.fromkeys(("-a", "--average"), "the maximum over ranks counts; --json keeps all"),
    **dict.fromkeys(("-u", "--unalign"), "every buffer begins at a multiple of 64 elements"),
    **dict.fromkeys(("-z", "--blocking"), "CUDA_LAUNCH_BLOCKING=1 waits for each call"),
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = cli.Parser(__doc__, GONE)
    add = parser.add_argument
    size, positive_size, count = cli.size, cli.positive_size, cli.number(int, 0)
    collectives = cli.list_of(str, tuple(OPERATIONS))
    types = cli.list_of(lambda name: ALIASES.get(name, name), TYPES)
    redops = cli.list_of(str, tuple(REDOPS))
    names = f"`all` or a list of {', '.join(OPERATIONS)} (default: all_reduce)"
    add("--collective", type=collectives, default=["all_reduce"], metavar="NAME", help=names)
    add("-b", "--minbytes", type=size, default=8, metavar="SIZE", help="smallest (default: 8)")
    largest = cli.By(cuda=2**30, cpu=2**26)
    most = "largest (default: 1G on CUDA, 64M on the CPU)"
    add("-e", "--maxbytes", type=positive_size, default=largest, metavar="SIZE", help=most)
    step = parser.add_mutually_exclusive_group().add_argument
    step("-i", "--stepbytes", type=positive_size, metavar="SIZE", help="increment of the size, or")
    factor = cli.number(float, 1, above=True)
    step("-f", "--stepfactor", type=factor, default=2.0, metavar="F", help="factor (default: 2)")
    calls = "calls per sample (default: 1 on the CPU and with -I; on CUDA 20, up to 4 GiB together)"
    add("-n", "--calls", type=cli.positive_int, metavar="N", help=calls)
    add("-d", "--datatype", type=types, default=["float32"], metavar="TYPE", help=", ".join(TYPES))
    add("-o", "--op", type=redops, default=["sum"], metavar="OP", help=", ".join(REDOPS))
    add("-r", "--root", type=count, default=0, metavar="R", help="a rank of the group (default: 0)")
    add("-c", "--check", type=count, default=1, metavar="N", help="samples to check (default: 1)")
    add("-G", "--cudagraph", type=count, default=0, metavar="N", help="replay a CUDA graph N times")
    single = "1: print minimum, maximum, p99 and spread of the samples (default: 0)"
    add("-I", "--per-iter-timing", type=int, choices=(0, 1), default=0, help=single)
    add("--cache-warm", action="store_true", help="reuse one buffer")
    add("--groups", default="world", metavar="G", help="world, node, cross, or ranks as 0,1/2-3")
    limit = "link speed; prints busbw as a percentage of it"
    add("--limit", type=cli.positive_float, metavar="GB/s", help=limit)
    least = "fail if the largest busbw is below 0.9 of this"
    add("--min-busbw", type=cli.positive_float, default=0, metavar="GB/s", help=least)
    beside = "also time each size while this one runs in a second group, e.g. all_to_all:4M "
    beside += "(default size: the same)"
    add("--beside", type=other_collective, metavar="NAME[:SIZE]", help=beside)
    cli.add_common_flags(parser, min_iters=12, max_seconds=1)
    args = parser.parse_args(argv)
    if args.beside:
        check_beside(args, parser)
    if args.maxbytes < args.minbytes:
        got = f"-b {args.minbytes} and -e {args.maxbytes}"
        parser.error(f"expected -e from -b on, got {got}; e.g. -b 8 -e 64M")
    sizes = scan(args.minbytes, args.maxbytes, args.stepbytes, args.stepfactor)
    if len(sizes) > MOST_SIZES:
        flag = "-i" if args.stepbytes else "-f"
        parser.error(f"{flag}: over {MOST_SIZES:,} sizes; expected larger steps, e.g. -f 2")
    if args.cudagraph and not cli.on_cuda(args.device):
        parser.error("-G replays CUDA graphs, and this run is on the CPU; leave it out")
    if args.cudagraph and args.per_iter_timing:
        parser.error("-I shows single calls, which -G does not time; leave one of them out")
    return args


def other_collective(text: str) -> tuple[str, int]:
    """The type of --beside: a collective and its size in bytes, 0 for that of the case."""
    name, colon, size = text.partition(":")
    names = [name for name in OPERATIONS if name != "sendrecv"]
    if name not in names:
        cli.wrong(f"one of {', '.join(names)}", repr(text), "e.g. all_to_all or all_to_all:4M")
    return name, cli.positive_size(size) if colon else 0


def check_beside(args: argparse.Namespace, parser: cli.Parser) -> None:
    """Refuse flags that do not go with --beside."""
    without = {"-G": args.cudagraph, "-I": args.per_iter_timing, "--limit": args.limit}
    for flag, value in (without | {"--min-busbw": args.min_busbw}).items():
        if value:
            parser.error(f"{flag} cannot be used with --beside, which compares times")
    if "sendrecv" in args.collective:
        expected = "expected collectives that torch can start without waiting"
        parser.error(f"--beside: {expected}, got sendrecv; e.g. --collective all_reduce")


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
    """Rounded up: so many elements later the next buffer may begin."""
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
    """What a rank measures in a case: calls on successive buffers, out of place and in place. With
    -G a step is the replay of a graph of as many calls as a sample has else."""
    operation = OPERATIONS[key["collective"]]
    rank, n, part, calls = dist.get_rank(group.test), key["group_ranks"], key["count"], key["calls"]
    member = Member(group.test, rank, n, part, key["redop"], max(0, key["root"]))
    torch.cuda.empty_cache()  # NCCL has no use for what torch keeps of smaller sizes
    sent, received = (parts * part for parts in operation.parts(n))
    dtype, cold = getattr(torch, key["dtype"]), key["caches"] == "cold"
    buffers = make_buffers(sent, received, rank, dtype, job.device, cold)
    steps: dict[str, Step] = {}
    for variant in operation.variants:  # in this order on all ranks: a graph is run when it is made
        steps[variant] = step_of(key, member, buffers[variant])

    def facts() -> dict[str, Any]:
        """The wrong values of each variant, and what the first case tells of the start."""
        found: dict[str, Any] = {"start_up": start_up.start_up_of(job, group)}
        for variant in operation.variants:
            found[variant] = 0
            for _ in range(args.check):
                found[variant] += check(key, member, buffers[variant][:calls], group)
        return found

    step = steps.pop(operation.variants[0])
    return Workload(step, steps, calls=key["cudagraph"] or calls, facts=facts, launches=True)


def step_of(key: Key, member: Member, buffers: Buffers) -> Step:
    """A call on the next buffers; with -G a graph of as many calls as there are in a sample."""
    call = partial(OPERATIONS[key["collective"]].call, at=member)
    call_next = in_turn(call, buffers)
    if not key["cudagraph"]:
        return call_next
    return cuda_graph(partial(repeat, call_next, key["calls"]), buffers[0][0].device)


def repeat(call: Step, times: int) -> None:
    for _ in range(times):
        call()


def check(key: Key, member: Member, checked: Buffers, group: Group) -> int:
    """Wrong values after a sample of calls like the timed ones, each on buffers of its own."""
    step = step_of(key | {"calls": len(checked)}, member, checked)
    for src, dst in checked:
        operations.fill(src, dst, member)
    dist.barrier(group.control)
    repeat(step, 1 if key["cudagraph"] else len(checked))
    operation = OPERATIONS[key["collective"]]
    return sum(operations.count_wrong(operation, dst, member) for _, dst in checked)


def build_beside(
    job: Job, args: argparse.Namespace, groups: Groups, key: Key, group: Group
) -> Workload:
    """The collective and the one of --beside, each alone, and both at the same time.

    Each has a group and a buffer of its own, over the same ranks. On CUDA each has a stream, and
    the current stream waits for both.
    """
    n, dtype = key["group_ranks"], getattr(torch, key["dtype"])
    rendezvous(group)
    second: Any = dist.new_subgroups_by_enumeration(groups, backend=job.backend)[0]
    group.more.append(second)
    connect(second, job)
    sides = {"alone": (key["collective"], group.test, key["count"])}
    sides["beside"] = (key["beside"], second, key["beside_count"])
    members: dict[str, Member] = {}
    buffers: dict[str, tuple[Tensor, Tensor]] = {}
    starts: dict[str, Step] = {}
    for side, (name, of_side, part) in sides.items():
        operation, rank = OPERATIONS[name], dist.get_rank(of_side)
        redop = key["redop"] if side == "alone" else "sum"
        root = args.root if operation.has_root else 0
        members[side] = Member(of_side, rank, n, part, redop if operation.reduces else "none", root)
        sent, received = (parts * part for parts in operation.parts(n))
        of_variants = make_buffers(sent, received, rank, dtype, job.device, cold=False)
        buffers[side] = of_variants[operation.variants[0]][0]
        src, dst = buffers[side]
        starts[side] = partial(operation.call, src, dst, members[side], async_op=True)
    parts = {side: partial(at_the_same_time, [start]) for side, start in starts.items()}
    both: Step = partial(at_the_same_time, list(starts.values()))
    if job.device.type == "cuda":
        streams = [torch.cuda.Stream(job.device) for _ in starts]
        both = partial(on_streams, streams, list(starts.values()))

    def facts() -> dict[str, Any]:
        """The wrong values of both after they ran at the same time."""
        wrong = 0
        for _ in range(args.check):
            for side, member in members.items():
                operations.fill(*buffers[side], member)
            dist.barrier(group.control)
            both()
            for side, (name, _, _) in sides.items():
                _, dst = buffers[side]
                wrong += operations.count_wrong(OPERATIONS[name], dst, members[side])
        return {"wrong": wrong, "start_up": start_up.start_up_of(job, group)}

    return Workload(both, parts, list(parts), calls=key["calls"], facts=facts, launches=True)


def at_the_same_time(starts: Sequence[Callable[[], Any]]) -> None:
    """Start all operations, then wait for each: on CUDA the current stream waits, not the host."""
    for work in [start() for start in starts]:
        work.wait()


def on_streams(streams: Sequence[torch.cuda.Stream], starts: Sequence[Callable[[], Any]]) -> None:
    """Start each operation on a stream of its own, and let the current stream wait for all."""
    current = torch.cuda.current_stream()
    for stream, start in zip(streams, starts, strict=True):
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            start().wait()
    for stream in streams:
        current.wait_stream(stream)


def derive_beside(
    args: argparse.Namespace, case: Case, times: Times, facts: list[dict[str, Any]]
) -> None:
    """Fill in the times of both sides alone and of both together, and the ratio of these."""
    metrics = case.metrics
    by_rank = start_up.seconds_by_name([fact["start_up"] for fact in facts])
    metrics |= {"wrong": 0, "start_up_by_rank": by_rank, **start_up.in_all(by_rank)}
    for side in ("alone", "beside"):
        metrics[f"{side}_time_s"] = times.mean(side)
    longer = max(("alone", "beside"), key=lambda side: metrics[f"{side}_time_s"].value)
    metrics["both_time_s"] = times.mean()
    metrics["longer"] = case.key["collective" if longer == "alone" else "beside"]
    metrics["longer_time_s"] = metrics[f"{longer}_time_s"]
    metrics["both_over_longer"] = 1 / times.ratio(longer)
    alone_s = metrics["alone_time_s"].value + metrics["beside_time_s"].value
    metrics["in_turn_over_longer"] = alone_s / metrics["longer_time_s"].value
    case.check = "passed" if args.check else "skipped: -c 0"
    if args.check:
        metrics["wrong"] = sum(fact["wrong"] for fact in facts)
    if metrics["wrong"]:
        case.check = f"failed: {metrics['wrong']} wrong values"


def derive(
    args: argparse.Namespace, groups: Groups, case: Case, times: Times, facts: list[dict[str, Any]]
) -> None:
    """Times and bandwidths of both variants. The slowest group counts, if there are several."""
    key, metrics = case.key, case.metrics
    operation = OPERATIONS[key["collective"]]
    calls_of_step = key["calls"] if key["cudagraph"] else 1
    by_rank = start_up.seconds_by_name([fact["start_up"] for fact in facts])
    metrics |= {"wrong": 0, "start_up_by_rank": by_rank, **start_up.in_all(by_rank)}
    for number, variant in enumerate(operation.variants):
        seconds = times.each(variant if number else "step") / calls_of_step  # [ranks, iterations]
        by_group = [seconds[[case.ranks.index(rank) for rank in ranks]] for ranks in groups]
        slowest = [of_group.max(axis=0) for of_group in by_group]
        group_times = [median(samples) for samples in slowest]
        worst = max(range(len(groups)), key=lambda group: group_times[group].value)
        algbw = key["size_bytes"] / group_times[worst] / 1e9
        metrics[f"{variant}_time_s"] = group_times[worst]
        metrics[f"{variant}_group_times_s"] = group_times
        metrics[f"{variant}_algbw_gb_per_s"] = algbw
        metrics[f"{variant}_busbw_gb_per_s"] = algbw * operation.bus(key["group_ranks"])
        for name, value in spread_of(slowest[worst]).items():
            metrics[f"{variant}_{name}"] = value
        if args.check:
            metrics[f"{variant}_wrong"] = sum(fact[variant] for fact in facts)
            metrics["wrong"] += metrics[f"{variant}_wrong"]
    if args.limit:
        metrics["efficiency"] = best(case, "busbw_gb_per_s") / args.limit
    case.check = "passed" if args.check else UNCHECKED
    if metrics["wrong"]:
        case.check = f"failed: {metrics['wrong']} wrong values"


def spread_of(samples: Samples) -> dict[str, float]:
    """What -I shows of samples [n] in seconds."""
    ordered = np.sort(samples)
    nearest = ordered[math.ceil(0.99 * len(ordered)) - 1]
    cv = samples.std() / samples.mean()
    return {"min_s": ordered[0], "max_s": ordered[-1], "p99_s": float(nearest), "cv": float(cv)}


# -- what is printed -------------------------------------------------------------------------------


def best(case: Case, name: str) -> Estimate:
    """The better variant's time, or its rate."""
    both = [case.metrics[f"{variant}_{name}"] for variant in measured_variants(case)]
    both.sort(key=lambda estimate: estimate.value)
    return both[0] if name == "time_s" else both[-1]


def measured_variants(case: Case) -> list[str]:
    return [variant for variant in VARIANTS if f"{variant}_time_s" in case.metrics]


class ScanTable(Table):
    """As nccl-tests lays it out, since other tools read that. Our own column comes last."""

    def __init__(self, per_iter_timing: bool = False) -> None:
        super().__init__({})
        self.per_iter_timing = per_iter_timing

    def header(self) -> str:
        names = "     time   algbw   busbw #wrong"
        units = "     (us)  (GB/s)  (GB/s)       "
        if self.per_iter_timing:
            names += "    i_min    i_max    i_p99    i_cv%"
            units += " " * 36
        places = f"{'out-of-place':^{len(names)}}{'in-place':^{len(names)}}"
        return f"""\
#{"":47}{places.rstrip()}
#       size        count     type  redop   root{names}{names}    +-%
#        (B)   (elements){"":23}{units}{units} (time)"""

    def row(self, case: Case) -> str:
        self.cases.append(case)
        line = "{size_bytes:>12} {count:>12} {dtype:>8} {redop:>6} {root:>6}".format(**case.key)
        if "wrong" in case.metrics:  # it was measured
            for variant in VARIANTS:
                line += cells_of(case, variant, self.per_iter_timing)
            line += f" {uncertainty(case)}"
        if case.failed:
            line += f"  {case.check}"
        if "efficiency" in case.metrics:
            line += f"  {case.metrics['efficiency'].value:.0%} of the limit"
        if case.key["caches"] == "warm":
            line += "  warm caches"
        return f"{self.header()}\n{line}" if len(self.cases) == 1 else line


def cells_of(case: Case, variant: str, per_iter_timing: bool) -> str:
    """The columns of a variant."""
    metrics = case.metrics
    if f"{variant}_time_s" not in metrics:
        return f" {'N/A':>8} {'N/A':>7} {'N/A':>7} {'N/A':>6}" + f"{'N/A':>9}" * 4 * per_iter_timing
    time_us = metrics[f"{variant}_time_s"].value * 1e6
    algbw = metrics[f"{variant}_algbw_gb_per_s"].value
    busbw = metrics[f"{variant}_busbw_gb_per_s"].value
    wrong = metrics.get(f"{variant}_wrong", "N/A")
    cells = f" {time_us:>8.2f} {algbw:>7.2f} {busbw:>7.2f} {wrong:>6}"
    if per_iter_timing:
        for name in ("min_s", "max_s", "p99_s"):
            cells += f" {metrics[f'{variant}_{name}'] * 1e6:>8.2f}"
        cells += f" {metrics[f'{variant}_cv'] * 100:>8.2f}"
    return cells


def uncertainty(case: Case) -> str:
    """How far the interval of the time reaches from it, in the variant where it is wider. A word
    where the case had too little time to know better."""
    widths = [case.metrics[f"{variant}_time_s"].relative for variant in measured_variants(case)]
    width = math.inf if None in widths else max(widths)
    cell = "-" if width == math.inf else f"{width:.1%}" if width < 1 else ">100%"
    short = case.stop == "max-seconds" and width > UNSURE
    return f"{cell:>6}" + ("  unsure: raise --max-seconds" if short else "")


def footer(tables: dict[str, list[Case]], min_busbw: float, bench: Benchmark) -> None:
    """The lines that nccl-tests ends with, which other tools read. Fails the run where the largest
    bus bandwidth of a table is too small."""
    wrong = 0
    all_rates: list[float] = []
    for cases in tables.values():
        wrong += sum(case.metrics.get("wrong", 0) for case in cases)
        rates: list[float] = []
        for case in cases:
            busbw = [case.metrics[f"{name}_busbw_gb_per_s"] for name in measured_variants(case)]
            rates += [rate.value for rate in busbw if rate.value]  # a rank alone has 0
        if rates and max(rates) < 0.9 * min_busbw:
            fastest = f"{kind_of(cases[0].key)}: busbw is {max(rates):.4g} GB/s at most"
            bench.fail(f"{fastest}, under 0.9 of --min-busbw {min_busbw:g}")
        all_rates += rates
    mean = np.mean(all_rates) if all_rates else 0
    bench.print(f"#\n# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}")
    bench.print(f"# Avg bus bandwidth    : {mean:g}\n#")


COLUMNS_BESIDE: Columns = {
    "size": lambda case: cli.show_size(case.key["size_bytes"]),
    "both\ngmean (us)": metric("both_time_s", 1e6),
    "95% ci": relative("both_time_s"),
    "alone\ngmean (us)": metric("alone_time_s", 1e6),
    "other alone\ngmean (us)": metric("beside_time_s", 1e6),
    "both /\nlonger": metric("both_over_longer"),
    "95% ci\n(ratio)": ends("both_over_longer"),
    "in turn /\nlonger": metric("in_turn_over_longer"),
    "other\nsize": lambda case: cli.show_size(case.key["beside_bytes"]),
    "alone\n95% ci": relative("alone_time_s"),
    "other\n95% ci": relative("beside_time_s"),
    "#wrong": lambda case: str(case.metrics.get("wrong", "-")),
}


def answer_beside(cases: list[Case]) -> str:
    """What running at the same time costs, at the largest size.

    `all_reduce of 4M bytes beside all_to_all of 4M: both at the same time take 1.62 times (1.50 to
    1.70) as long as all_reduce alone; one after the other, 1.80 times`
    """
    case = max(cases, key=lambda case: int(case.key["size_bytes"]))
    key, ratio = case.key, case.metrics["both_over_longer"]
    sizes = [cli.show_size(key[name]) for name in ("size_bytes", "beside_bytes")]
    pair = f"{key['collective']} of {sizes[0]} bytes beside {key['beside']} of {sizes[1]}"
    cost = f"both at the same time take {ratio.times()} as long as {case.metrics['longer']} alone"
    if ratio.relative is None:
        cost = f"how much both slow each other down cannot be told: {ratio.times()} as long as "
        cost += f"{case.metrics['longer']} alone"
    elif ratio.may_be(1):
        cost = f"no significant slowdown, {ratio.times()} as long as {case.metrics['longer']} alone"
    return f"{pair}: {cost}; one after the other, {case.metrics['in_turn_over_longer']:.2f} times"


def answer(limit: float | None, cases: list[Case]) -> str:
    """The largest bus bandwidth, where half of it is reached, and the smallest time.

    `all_reduce float32 sum: at most 0.796 GB/s (0.780 to 0.810) bus bandwidth, at 2M bytes; about
    half of it from 64K on; 8 bytes take 583 us (560 to 601)`
    """
    name = kind_of(cases[0].key)
    rows = sorted(cases, key=lambda case: int(case.key["size_bytes"]))
    rates = [best(case, "busbw_gb_per_s") for case in rows]
    sizes = [cli.show_size(case.key["size_bytes"]) for case in rows]
    shortest = f"{sizes[0]} bytes take {best(rows[0], 'time_s')}"
    peak = max(rates, key=lambda rate: rate.value)
    if not peak.value:
        return f"{name}: {shortest}; one rank alone has no bus bandwidth"
    at = rates.index(peak)
    rate = f"{peak.text('GB/s')} bus bandwidth"
    # on GPUs the switch may add up: then a rank sends less than the formula says
    if limit and rows[0].key["device"] == "cpu" and peak.above(limit):
        return Disturbed(f"{name}: {rate} at {sizes[at]} bytes, over --limit {limit:g}")
    if len(rows) == 1:
        return f"{name}: {shortest}, {rate}"
    where = f"at {sizes[at]} bytes"
    if peak is rates[-1]:
        where += ", the largest size"
    alike = [size for size, other in zip(sizes, rates, strict=True) if other.overlaps(peak)]
    alike.remove(sizes[at])
    if alike:
        where += f" (cannot be told apart: {cli.cut(alike, 3)})"
    under_half = [n for n, other in enumerate(rates) if other.value < peak.value / 2]
    half = sizes[max(under_half, default=-1) + 1 :]
    since = f"from {half[0]} on" if half else "not at the largest size"
    return f"{name}: at most {rate}, {where}; about half of it {since}; {shortest}"


# -- what is going to be measured ------------------------------------------------------------------


def scan(low: int, high: int, step: int | None, factor: float) -> list[int]:
    """Sizes from `low` to `high`. Each is `step` bytes more than the last, or `factor` times it.

    More than MOST_SIZES are cut off after the first one too many.
    """
    sizes: list[int] = []
    size = max(1, low)
    while size <= high and len(sizes) <= MOST_SIZES:
        sizes.append(size)
        size = size + step if step else max(size + 1, int(min(size * factor, high + 1)))
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
    one_buffer = args.cache_warm or args.cudagraph or args.beside
    most_calls = args.calls or (1 if device == "cpu" or args.per_iter_timing else MOST_CALLS)
    most_bytes = math.inf if args.calls else SAMPLE_BYTES
    sizes = scan(args.minbytes, args.maxbytes, args.stepbytes, args.stepfactor)
    tables: dict[str, list[Planned]] = {}
    for name, dtype, redop in itertools.product(args.collective, args.datatype, args.op):
        operation = OPERATIONS[name]
        table: Key = {
            "collective": name,
            "dtype": dtype,
            "redop": redop if operation.reduces else "none",
            "root": args.root if operation.has_root else -1,
            "cudagraph": args.cudagraph,
            "groups": args.groups,
            "caches": "warm" if one_buffer else "cold",
            "group_ranks": ranks,
        }
        unit = getattr(torch, dtype).itemsize * max(operation.parts(ranks))  # bytes of a count
        cases: list[Planned] = []
        for count in dict.fromkeys(max(1, size // unit) for size in sizes):
            size = count * unit  # a size that is no multiple is cut
            calls = max(1, int(min(most_calls, most_bytes // size)))
            key = table | {"size_bytes": size, "count": count, "calls": calls}
            name_of_case = f"{kind_of(table)}, {size} bytes"
            if args.beside:
                key |= beside_of(args, ranks, size, dtype)
                name_of_case += f" beside {key['beside']}, {key['beside_bytes']} bytes"
            cases.append((name_of_case, ranks * len(groups), key))
        how = f"at most {count_of(most_calls, 'call')} a sample"
        how += f", {args.cudagraph} replays of a graph (-G)" if args.cudagraph else ""
        how += ", one buffer" if one_buffer else ", cold buffers"
        how += f"; beside {args.beside[0]}" if args.beside else ""
        # an operation that does not reduce has the same title for each --op
        tables[f"# {kind_of(table)}, {args.groups} ({count_of(ranks, 'rank')}); {how}"] = cases
    return tables


def beside_of(args: argparse.Namespace, ranks: int, size: int, dtype: str) -> Key:
    """What the key of a case has of --beside. size: bytes of the other collective."""
    name, own_size = args.beside
    unit = getattr(torch, dtype).itemsize * max(OPERATIONS[name].parts(ranks))
    count = max(1, (own_size or size) // unit)
    return {"beside": name, "beside_bytes": count * unit, "beside_count": count}


def check_root(args: argparse.Namespace, ranks: int) -> None:
    """ranks: of a group. Raises ValueError."""
    names = [*args.collective, *(args.beside or ())[:1]]
    rooted = [name for name in names if OPERATIONS[name].has_root]
    if rooted and args.root >= ranks:
        within = f"a rank within its group, 0 to {ranks - 1}"
        raise ValueError(f"{rooted[0]} expected {within}, got {args.root}; e.g. --root 0")


def main() -> int:
    args = parse_args()
    with Benchmark("collectives", args) as bench:
        job, environment = bench.job, bench.report.environment
        nodes = node_of_each(environment)
        groups = bench.prepare("--groups", lambda: partition(args.groups, nodes))
        bench.prepare("--root", lambda: check_root(args, len(groups[0])))
        _, size = args.beside or (None, 0)  # 0: as the collective under test
        needed = args.maxbytes + ((size or args.maxbytes) if args.beside else 0)
        bench.prepare("-e", lambda: check_room(2 * needed, job, environment, "-e"))
        tables = plan(args, job.device.type, groups)
        reasons = {title: why_not_measured(cases[0][2], job) for title, cases in tables.items()}
        bench.announce({title: cases for title, cases in tables.items() if not reasons[title]})
        members = sorted(itertools.chain(*groups))
        make, fill_in = partial(build, job, args), partial(derive, args, groups)
        if args.beside:
            make, fill_in = partial(build_beside, job, args, groups), partial(derive_beside, args)
        measured: dict[str, list[Case]] = {}
        answer_of_table: Answer = answer_beside if args.beside else partial(answer, args.limit)
        for title, cases in tables.items():
            columns: Columns = {}
            printed: Table = ScanTable(bool(args.per_iter_timing))
            if args.beside:
                columns = COLUMNS_BESIDE
                printed = Table(columns)
            with bench.begin_table(title, columns, answer_of_table, printed) as table:
                measured[title] = table.cases
                if reasons[title]:
                    bench.print(f"# n/a: {reasons[title]}")
                    continue
                for name, _, key in cases:
                    bench.measure(key, name, make, fill_in, ranks=members, teams=groups)
        if not args.beside:
            footer(measured, args.min_busbw, bench)
        for case in bench.report.cases:
            if "group_s" in case.metrics:  # the one that has made the groups
                by_rank = case.metrics["start_up_by_rank"]
                bench.conclude([start_up.sentence(by_rank, members, environment)], case)
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
