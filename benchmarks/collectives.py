#!/usr/bin/env python3
"""How fast is each collective at each size, and are its results correct? nccl-tests for torch.

    time    = median sample, where the time of a sample is the maximum over ranks. A sample is one
              call on the CPU, the mean of up to 20 calls on CUDA, and with -n N the mean of N calls
    algbw   = size / time, in GB/s of 10^9 bytes
    busbw   = algbw * factor. The factor for n ranks is 2(n-1)/n for all_reduce; (n-1)/n for
              all_gather, reduce_scatter, all_to_all, gather and scatter; and 1 otherwise
    size    = bytes that a rank sends or receives, whichever is larger; count = elements per part
    #wrong  = number of values that differ from the expected ones; must be 0
    i_...   = with -I 1, the minimum, maximum and 99th percentile (nearest rank) of the samples, and
              their standard deviation in percent of the mean
    +-%     = distance from the time to the farther end of its 95% interval, for the variant with
              the wider interval
    --beside  measures two collectives at the same time, each in its own group. both / longer is
              the slowdown of the pair, relative to the longer one alone: 1 if they are independent.
              serial / longer is this ratio if they run one after the other

    torchrun --nproc-per-node 2 benchmarks/collectives.py -b 4 -e 64M -f 2
    torchrun --nproc-per-node 8 benchmarks/collectives.py --collective all -e 1G --json report.jsonl
    torchrun --nproc-per-node 8 benchmarks/collectives.py -b 1G -e 1G --limit 450 --min-busbw 400
    torchrun --nproc-per-node 2 benchmarks/collectives.py -b 1M -e 4M --beside all_to_all:1M

The table, the formulas and most of the flags are those of NVIDIA's nccl-tests (-I: README.md and
src/util.cu of version 2.19.6, a0b82b2); the code is new. The calls are in
benchmarks/workloads/operations.py. BSD-3-Clause.
"""

import argparse
import itertools
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import cli, exits

exits.report_missing_packages()

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

from benchmarks.workloads import network, operations, start_up
from benchmarks.workloads.cuda_graphs import cuda_graph
from benchmarks.workloads.operations import OPERATIONS, REDOPS, VARIANTS, Member
from benchmarks.workloads.ranks import partition
from benchmarks.workloads.room import check_room
from common.groups import Group, Job, barrier_before_new_group, connect, silenced
from common.stats import MIN_ROUNDS, Estimate, Samples, Times, median
from common.table import Columns, Table, ends, metric, relative
from common.timing import Collected, Step, Workload
from harness.benchmark import Answer, Benchmark, Implausible, Key, Planned, Sentence
from harness.environment import count_of, node_of_each
from harness.report import UNCHECKED, Case

Groups = list[list[int]]  # the ranks of each group
TYPES = ("float32", "float16", "bfloat16", "float64", "int8", "uint8", "int32", "int64")
ALIASES = {"float": "float32", "half": "float16", "double": "float64"}  # nccl-tests' names
MAX_SIZES = 10_000  # per table
EARLY = 1 / 4  # size of the first blocks of a case, as a fraction of the others
MIN_VISIT_S = 0.05  # with --total-seconds; shorter visits consist of overhead
TIMED = 0.7  # share of a size's first visit for the timing; the rest is for warming up and checking
TIMED_AGAIN = 0.9  # of a later visit
NO_INTERVAL = 1.0  # relative width that a time without an interval counts as
MAX_CALLS = 20  # per sample on CUDA, without -n
SAMPLE_BYTES = 2**32  # limit on the bytes of a sample, without -n
UNSURE = 0.5  # half-width of an interval, as a fraction of the time, beyond which it is too wide
UNALIGNED = "buffers are always aligned; for unaligned sizes use e.g. "
UNALIGNED += "-b 1048576 -e 1048592 -i 2 -d half"
GONE = {  # flags of nccl-tests that are not available -> what to use instead
    **dict.fromkeys(("-g", "--ngpus", "-t", "--nthreads"), "each GPU has its own process"),
    **dict.fromkeys(("-a", "--average"), "the maximum over ranks is printed; --json has all times"),
    **dict.fromkeys(("-u", "--unalign"), UNALIGNED),
    **dict.fromkeys(("-z", "--blocking"), "CUDA_LAUNCH_BLOCKING=1 waits for each call"),
    **{name: f"did you mean --collective {name}?" for name in OPERATIONS},  # its programs' names
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = cli.Parser(__doc__, GONE)
    add = parser.add_argument
    size, positive_size, count = cli.size, cli.positive_size, cli.number(int, 0)
    collectives = cli.list_of(str, tuple(OPERATIONS))
    types = cli.list_of(lambda name: ALIASES.get(name, name), TYPES)
    redops = cli.list_of(str, tuple(REDOPS))
    add(
        "--collective",
        type=collectives,
        default=["all_reduce"],
        metavar="NAME",
        help=f"`all` or a list of {', '.join(OPERATIONS)} (default: all_reduce)",
    )
    add("-b", "--minbytes", type=size, default=8, metavar="SIZE", help="smallest size (default: 8)")
    largest = cli.PerDevice(cuda=2**30, cpu=2**26)
    add(
        "-e",
        "--maxbytes",
        type=positive_size,
        default=largest,
        metavar="SIZE",
        help="largest size (default: 1G on CUDA, 64M on the CPU)",
    )
    step = parser.add_mutually_exclusive_group().add_argument
    step("-i", "--stepbytes", type=positive_size, metavar="SIZE", help="increment between sizes")
    step(
        "-f",
        "--stepfactor",
        type=cli.number(float, 1, above=True),
        default=2.0,
        metavar="F",
        help="factor between sizes (default: 2)",
    )
    add(
        "-n",
        "--calls",
        type=cli.positive_int,
        metavar="N",
        help="calls per sample (default: 1 on the CPU and with -I; on CUDA 20, up to 4 GiB in "
        "total)",
    )
    add(
        "-d",
        "--datatype",
        type=types,
        default=["float32"],
        metavar="TYPE",
        help=f"list of {', '.join(TYPES)} (default: float32)",
    )
    add(
        "-o",
        "--op",
        type=redops,
        default=["sum"],
        metavar="OP",
        help=f"list of {', '.join(REDOPS)} (default: sum)",
    )
    add(
        "-r",
        "--root",
        type=count,
        default=0,
        metavar="R",
        help="root rank within the group (default: 0)",
    )
    add(
        "-c",
        "--check",
        type=count,
        default=1,
        metavar="N",
        help="number of samples to check (default: 1)",
    )
    add(
        "-G",
        "--cudagraph",
        type=count,
        default=0,
        metavar="N",
        help="capture the calls of a sample in a CUDA graph, and replay it N times per sample",
    )
    add(
        "-I",
        "--per-iter-timing",
        type=count,
        choices=(0, 1),
        default=0,
        help="1: print minimum, maximum, p99 and coefficient of variation of the samples "
        "(default: 0)",
    )
    add("--cache-warm", action="store_true", help="use the same buffer in all calls")
    add(
        "--groups",
        default="world",
        metavar="G",
        help="world, node, cross, or lists of ranks such as 0,1/2-3 (default: world)",
    )
    add(
        "--limit",
        type=cli.positive_float,
        metavar="GB/s",
        help="link speed; busbw is also printed as a percentage of it",
    )
    add(
        "--min-busbw",
        type=cli.positive_float,
        default=0,
        metavar="GB/s",
        help="fail if the largest busbw is below 90%% of this",
    )
    add(
        "--beside",
        type=other_collective,
        metavar="NAME[:SIZE]",
        help="also time each size while this collective runs in a second group, e.g. "
        "all_to_all:4M (default size: the same)",
    )
    add(
        "--total-seconds",
        type=cli.positive_float,
        metavar="S",
        help="time for all sizes of a table: all of them share half of it, and those with the "
        "widest intervals share the rest (default: --max-seconds for each)",
    )
    network.add_flag(parser)
    cli.add_common_flags(parser, min_iters=12, max_seconds=1)
    args = parser.parse_args(argv)
    if args.beside:
        check_beside(args, parser)
    if args.maxbytes < args.minbytes:
        got = f"got -b {args.minbytes} -e {args.maxbytes}"
        parser.error(f"-e must not be smaller than -b: {got}; e.g. -b 8 -e 64M")
    if len(scan(args.minbytes, args.maxbytes, args.stepbytes, args.stepfactor)) > MAX_SIZES:
        flag = "-i" if args.stepbytes else "-f"
        parser.error(f"{flag}: more than {MAX_SIZES:,} sizes; use larger steps, e.g. -f 2")
    if args.cudagraph and not cli.on_cuda(args.device):
        parser.error("-G requires CUDA, but this run is on the CPU; leave it out")
    if args.cudagraph and args.per_iter_timing:
        parser.error("-I cannot be used with -G, which does not time single calls")
    return args


def other_collective(text: str) -> tuple[str, int]:
    """The type of --beside: a collective and its size in bytes; 0 for the size of the case."""
    name, colon, size = text.partition(":")
    names = [name for name in OPERATIONS if name != "sendrecv"]
    if name not in names:
        cli.raise_invalid(
            f"one of {', '.join(names)}", repr(text), "e.g. all_to_all or all_to_all:4M"
        )
    return name, cli.positive_size(size) if colon else 0


def check_beside(args: argparse.Namespace, parser: cli.Parser) -> None:
    """Refuse flags that cannot be combined with --beside."""
    without = {"-G": args.cudagraph, "-I": args.per_iter_timing, "--limit": args.limit}
    without |= {"--min-busbw": args.min_busbw, "--total-seconds": args.total_seconds}
    for flag, value in without.items():
        if value:
            parser.error(f"{flag} cannot be used with --beside; leave one of them out")
    if "sendrecv" in args.collective:
        expected = "expected collectives that torch can start asynchronously"
        parser.error(f"--beside: {expected}, got sendrecv; e.g. --collective all_reduce")


# -- cases -----------------------------------------------------------------------------------------


def scan(low: int, high: int, step: int | None, factor: float) -> list[int]:
    """Sizes from `low` to `high`. Each is `step` bytes larger than the previous one, or `factor`
    times as large. At most MAX_SIZES + 1 are returned."""
    sizes: list[int] = []
    size = max(1, low)
    while size <= high and len(sizes) <= MAX_SIZES:
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
    """The cases of each table, by its title."""
    ranks = len(groups[0])
    one_buffer = args.cache_warm or args.cudagraph or args.beside
    max_calls = args.calls or (1 if device == "cpu" or args.per_iter_timing else MAX_CALLS)
    max_bytes = math.inf if args.calls else SAMPLE_BYTES
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
        itemsize = getattr(torch, dtype).itemsize
        unit = itemsize * max(operation.parts(ranks))  # bytes per element of a part
        cases: list[Planned] = []
        for count in dict.fromkeys(max(1, size // unit) for size in sizes):
            size = count * unit  # rounded down to a size that the ranks can share evenly
            calls = max(1, int(min(max_calls, max_bytes // size)))
            key = table | {"size_bytes": size, "count": count, "calls": calls}
            name_of_case = f"{kind_of(table)}, {size} bytes"
            if args.beside:
                other, own_size = args.beside
                unit_of_other = itemsize * max(OPERATIONS[other].parts(ranks))
                its_count = max(1, (own_size or size) // unit_of_other)
                its_size = its_count * unit_of_other
                key |= {"beside": other, "beside_bytes": its_size, "beside_count": its_count}
                name_of_case += f" beside {other}, {its_size} bytes"
            cases.append(Planned(name_of_case, ranks * len(groups), key))
        how = f"at most {count_of(max_calls, 'call')} per sample"
        how += f", {args.cudagraph} replays of a graph (-G)" if args.cudagraph else ""
        how += ", one buffer" if one_buffer else ", cold buffers"
        how += f"; beside {args.beside[0]}" if args.beside else ""
        # without a reduction the title is the same for each --op, so there is only one table
        tables[f"# {kind_of(table)}, {args.groups} ({count_of(ranks, 'rank')}); {how}"] = cases
    return tables


def check_root(args: argparse.Namespace, ranks: int) -> None:
    """Raises ValueError if --root is not a rank of a group of this size."""
    names = [*args.collective, *(args.beside or ())[:1]]
    rooted = [name for name in names if OPERATIONS[name].has_root]
    if rooted and args.root >= ranks:
        expected = f"{rooted[0]} requires a rank of its group, 0 to {ranks - 1}"
        raise ValueError(f"{expected}, got {args.root}; e.g. --root 0")


def unsupported(key: Key, job: Job) -> str | None:
    """Why a case is known to fail without trying it; None if it may succeed."""
    to_itself_or_cuda = key["group_ranks"] == 1 or job.device.type == "cuda"
    if key["collective"] == "sendrecv" and job.backend == "gloo" and to_itself_or_cuda:
        return "gloo cannot send to the same rank or from CUDA memory"
    if key["redop"] == "avg" and not getattr(torch, key["dtype"]).is_floating_point:
        return "averages of integers are not defined"
    return None


# -- one collective --------------------------------------------------------------------------------


# [core]
Buffers = list[tuple[Tensor, Tensor]]  # input and output of consecutive calls
COLD_BYTES = 2**28  # memory over which consecutive calls cycle: larger than the caches
MAX_BUFFERS = 4096  # limit on the number of buffers in it
ALIGNMENT = 64  # in elements: every buffer begins at a multiple of it


@lru_cache(maxsize=1)
def cold_memory(device: torch.device) -> Tensor:
    """The memory of all cold buffers, [COLD_BYTES]. All cases share it, because allocating and
    clearing it takes longer than measuring a small case."""
    return torch.empty(COLD_BYTES, dtype=torch.uint8, device=device)


def make_buffers(
    sent: int, received: int, rank: int, dtype: torch.dtype, device: torch.device, cold: bool
) -> dict[str, Buffers]:
    """Inputs and outputs, both out of place and in place.

    In place, the smaller one of input and output is the part of this rank within the larger one.

    sent, received: number of elements. cold: whether to spread several buffers over COLD_BYTES;
    otherwise there is one of each.
    """
    second = aligned(sent)  # where the output begins
    needed = second + received
    memory = cold_memory(device).view(dtype) if cold else torch.empty(0)
    stride = max(aligned(needed), len(memory) // MAX_BUFFERS // ALIGNMENT * ALIGNMENT)
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
    """Round up to a multiple of ALIGNMENT."""
    return -(-elements // ALIGNMENT) * ALIGNMENT


def pairs(src: Tensor, dst: Tensor) -> Buffers:
    """The rows of both, [rows, elements]. Indexing them one by one would take longer than a small
    case."""
    return list(zip(src.unbind(), dst.unbind(), strict=True))


def cycling(call: Callable[[Tensor, Tensor], object], buffers: Buffers) -> Callable[[], object]:
    """A function that calls `call` with the next buffers each time, cyclically."""
    endless = itertools.cycle(buffers)

    def call_next() -> object:
        src, dst = next(endless)
        return call(src, dst)

    return call_next


# [/core]


@dataclass
class Visit:
    """What a rank has measured of a size, for later visits."""

    collected: Collected = field(default_factory=Collected)
    facts: dict[str, Any] = field(default_factory=dict)


def build(
    job: Job, args: argparse.Namespace, visits: dict[int, Visit], key: Key, group: Group
) -> Workload:
    """Call the collective on consecutive buffers, out of place and in place. With -G, a step is the
    replay of a graph that contains the calls of a sample. visits: by size, filled by this one."""
    visit = visits.setdefault(key["size_bytes"], Visit())
    operation = OPERATIONS[key["collective"]]
    rank, n = dist.get_rank(group.workload), key["group_ranks"]
    part, calls = key["count"], key["calls"]
    member = Member(group.workload, rank, n, part, key["redop"], max(0, key["root"]))
    torch.cuda.empty_cache()  # NCCL cannot use the memory that torch has cached for smaller sizes
    sent, received = (parts * part for parts in operation.parts(n))
    dtype, cold = getattr(torch, key["dtype"]), key["caches"] == "cold"
    buffers = make_buffers(sent, received, rank, dtype, job.device, cold)
    steps: dict[str, Step] = {}
    for variant in operation.variants:  # same order on all ranks: capturing a graph also runs it
        steps[variant] = step_of(key, member, buffers[variant])

    def facts() -> dict[str, Any]:
        """Number of wrong values in each variant, and the start-up times of the first case."""
        found = visit.facts
        if found:
            return found
        found["start_up"] = start_up.start_up_of(job, group)
        for variant in operation.variants:
            found[variant] = 0
            for _ in range(args.check):
                found[variant] += check(key, member, buffers[variant][:calls], group)
        return found

    step = steps.pop(operation.variants[0])
    return Workload(
        step,
        steps,
        calls_per_sample=key["cudagraph"] or calls,
        facts=facts,
        launches=True,
        collected=visit.collected,
    )


def step_of(key: Key, member: Member, buffers: Buffers) -> Step:
    """A call on the next buffers. With -G, a graph with the calls of a sample."""
    call = partial(OPERATIONS[key["collective"]].call, at=member)
    call_next = cycling(call, buffers)
    if not key["cudagraph"]:
        return call_next
    return cuda_graph(partial(repeat, call_next, key["calls"]), buffers[0][0].device)


def repeat(call: Step, times: int) -> None:
    for _ in range(times):
        call()


def check(key: Key, member: Member, checked: Buffers, group: Group) -> int:
    """Repeat the calls of a sample, each on a separate buffer, and count the wrong values."""
    step = step_of(key | {"calls": len(checked)}, member, checked)
    for src, dst in checked:
        operations.fill(src, dst, member)
    dist.barrier(group.control)
    repeat(step, 1 if key["cudagraph"] else len(checked))
    operation = OPERATIONS[key["collective"]]
    return sum(operations.count_wrong(operation, dst, member) for _, dst in checked)


def derive(
    args: argparse.Namespace, groups: Groups, case: Case, times: Times, facts: list[dict[str, Any]]
) -> None:
    """Times and bandwidths of both variants. With several groups, those of the slowest one."""
    key, metrics = case.key, case.metrics
    operation = OPERATIONS[key["collective"]]
    calls_per_step = key["calls"] if key["cudagraph"] else 1
    metrics |= {"wrong": 0, **start_up_metrics(facts)}
    for number, variant in enumerate(operation.variants):
        seconds = times.each(variant if number else "step") / calls_per_step  # [ranks, iterations]
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
    case.check = verdict_on(metrics["wrong"], args)


def start_up_metrics(facts: list[dict[str, Any]]) -> dict[str, Any]:
    by_rank = start_up.seconds_by_name([fact["start_up"] for fact in facts])
    return {"start_up_by_rank": by_rank, **start_up.overall(by_rank)}


def verdict_on(wrong: int, args: argparse.Namespace) -> str:
    if wrong:
        return f"failed: {wrong} wrong values"
    return "passed" if args.check else UNCHECKED


def spread_of(samples: Samples) -> dict[str, float]:
    """The statistics that -I prints. samples: in seconds, [n]."""
    ordered = np.sort(samples)
    nearest = ordered[math.ceil(0.99 * len(ordered)) - 1]
    cv = samples.std() / samples.mean()
    return {"min_s": ordered[0], "max_s": ordered[-1], "p99_s": float(nearest), "cv": float(cv)}


# -- two collectives at the same time: --beside ----------------------------------------------------


def build_beside(
    job: Job, args: argparse.Namespace, groups: Groups, key: Key, group: Group
) -> Workload:
    """Run the collective and that of --beside, each alone and both at the same time.

    Each has its own group over the same ranks, its own buffer and, on CUDA, its own stream. The
    current stream waits for both.
    """
    n, dtype = key["group_ranks"], getattr(torch, key["dtype"])
    barrier_before_new_group(group)
    with silenced(job.backend):
        second: Any = dist.new_subgroups_by_enumeration(groups, backend=job.backend)[0]
    group.extra.append(second)
    connect(second, job)
    sides = {"alone": (key["collective"], group.workload, key["count"])}
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
    parts = {side: partial(run_concurrently, [start]) for side, start in starts.items()}
    both: Step = partial(run_concurrently, list(starts.values()))
    if job.device.type == "cuda":
        streams = [torch.cuda.Stream(job.device) for _ in starts]
        both = partial(run_on_streams, streams, list(starts.values()))

    def facts() -> dict[str, Any]:
        """Number of wrong values of both, after they ran at the same time."""
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

    return Workload(
        both, parts, list(parts), calls_per_sample=key["calls"], facts=facts, launches=True
    )


def run_concurrently(starts: Sequence[Callable[[], Any]]) -> None:
    """Start all operations, then wait for each. On CUDA the current stream waits, not the host."""
    for work in [start() for start in starts]:
        work.wait()


def run_on_streams(
    streams: Sequence[torch.cuda.Stream], starts: Sequence[Callable[[], Any]]
) -> None:
    """Start each operation on its own stream, and let the current stream wait for all of them."""
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
    """Times of both collectives alone and together, and the ratio of together to the longer one."""
    metrics = case.metrics
    metrics |= {"wrong": 0, **start_up_metrics(facts)}
    for side in ("alone", "beside"):
        metrics[f"{side}_time_s"] = times.mean(side)
    longer = max(("alone", "beside"), key=lambda side: metrics[f"{side}_time_s"].value)
    metrics["both_time_s"] = times.mean()
    metrics["longer"] = case.key["collective" if longer == "alone" else "beside"]
    metrics["longer_time_s"] = metrics[f"{longer}_time_s"]
    metrics["both_over_longer"] = 1 / times.ratio(longer)
    alone_s = metrics["alone_time_s"].value + metrics["beside_time_s"].value
    metrics["in_turn_over_longer"] = alone_s / metrics["longer_time_s"].value
    if args.check:
        metrics["wrong"] = sum(fact["wrong"] for fact in facts)
    case.check = verdict_on(metrics["wrong"], args)


# -- tables ----------------------------------------------------------------------------------------


def best(case: Case, name: str) -> Estimate:
    """The shorter time, or the higher rate, of the two variants."""
    both = [case.metrics[f"{variant}_{name}"] for variant in measured_variants(case)]
    both.sort(key=lambda estimate: estimate.value)
    return both[0] if name == "time_s" else both[-1]


def measured_variants(case: Case) -> list[str]:
    return [variant for variant in VARIANTS if f"{variant}_time_s" in case.metrics]


class ScanTable(Table):
    """The table of nccl-tests, in a layout that other tools parse. The interval is in an additional
    column at the end."""

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
        above = [] if self.cases else [self.header()]
        self.cases = [other for other in self.cases if other.key != case.key] + [case]
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
        return "\n".join([*above, line])


def cells_of(case: Case, variant: str, per_iter_timing: bool) -> str:
    """The columns of one variant."""
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


def width_of(case: Case) -> float | None:
    """The relative half-width of the wider interval of the two variants; None without one."""
    widths = [case.metrics[f"{variant}_time_s"].relative for variant in measured_variants(case)]
    return None if None in widths else max(widths, default=None)


def uncertainty(case: Case) -> str:
    """The half-width of the interval of the time, for the variant with the wider one. Adds a remark
    if the interval is too wide because the case ran out of time."""
    width = width_of(case)
    cell = "-" if width is None else f"{width:.1%}" if width < 1 else ">100%"
    short = case.stop == "max-seconds" and (width is None or width > UNSURE)
    return f"{cell:>6}" + ("  imprecise" if short else "")


def footer(tables: dict[str, list[Case]], min_busbw: float, bench: Benchmark) -> None:
    """Print the last lines of nccl-tests, which other tools parse. Fails the run if the largest bus
    bandwidth of a table is below 90% of --min-busbw.

    In a resumed report, the average is that of the cases that were measured last.
    """
    wrong = 0
    rates_of_run: dict[str, list[float]] = {}  # by the start of the run
    for cases in tables.values():
        wrong += sum(case.metrics.get("wrong", 0) for case in cases)
        rates: list[float] = []
        for case in cases:
            busbw = [case.metrics[f"{name}_busbw_gb_per_s"] for name in measured_variants(case)]
            of_case = [rate.value for rate in busbw if rate.value]  # it is 0 for a single rank
            if of_case:
                rates_of_run.setdefault(case.measured_at, []).extend(of_case)
            rates += of_case
        if rates and max(rates) < 0.9 * min_busbw:
            fastest = f"{kind_of(cases[0].key)}: the largest busbw, {max(rates):.4g} GB/s"
            bench.fail(f"{fastest}, is below 90% of --min-busbw {min_busbw:g}")
    mean = np.mean(rates_of_run[max(rates_of_run)]) if rates_of_run else 0
    bench.print(f"#\n# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}")
    bench.print(f"# Avg bus bandwidth    : {mean:g}\n#")
    if len(rates_of_run) > 1:
        bench.print("# The average leaves out the rows that were measured earlier.")


COLUMNS_BESIDE: Columns = {
    "size": lambda case: cli.show_size(case.key["size_bytes"]),
    "both\ngmean (us)": metric("both_time_s", 1e6),
    "95% ci": relative("both_time_s"),
    "alone\ngmean (us)": metric("alone_time_s", 1e6),
    "other alone\ngmean (us)": metric("beside_time_s", 1e6),
    "both /\nlonger": metric("both_over_longer"),
    "95% ci\n(ratio)": ends("both_over_longer"),
    "serial /\nlonger": metric("in_turn_over_longer"),
    "other\nsize": lambda case: cli.show_size(case.key["beside_bytes"]),
    "alone\n95% ci": relative("alone_time_s"),
    "other\n95% ci": relative("beside_time_s"),
    "#wrong": lambda case: str(case.metrics.get("wrong", "-")),
}


# -- the answer ------------------------------------------------------------------------------------


def answer(limit: float | None, cases: list[Case]) -> Sentence:
    """The largest bus bandwidth, the size from which half of it is reached, and the shortest time.

    `all_reduce float32 sum: peak bus bandwidth 0.796 GB/s (0.780 to 0.810) at 2M bytes; half of the
    peak from 64K bytes on; 8 bytes take 583 us (560 to 601)`
    """
    name = kind_of(cases[0].key)
    rows = sorted(cases, key=lambda case: int(case.key["size_bytes"]))
    rates = [best(case, "busbw_gb_per_s") for case in rows]
    sizes = [cli.show_size(case.key["size_bytes"]) for case in rows]
    shortest = f"{sizes[0]} bytes take {best(rows[0], 'time_s')}"
    peak = max(rates, key=lambda rate: rate.value)
    if not peak.value:
        return f"{name}: {shortest}; a single rank has no bus bandwidth"
    at = rates.index(peak)
    bandwidth = f"bus bandwidth {peak.text('GB/s')}"
    # not on GPUs: with NVLS the switch computes sums, so a rank sends less than the formula assumes
    if limit and rows[0].key["device"] == "cpu" and peak.above(limit):
        return Implausible(f"{name}: {bandwidth} at {sizes[at]} bytes exceeds --limit {limit:g}")
    if len(rows) == 1:
        return f"{name}: {shortest}, {bandwidth}"
    where = f"at {sizes[at]} bytes"
    if peak is rates[-1]:
        where += ", the largest size"
    pairs = zip(sizes, rates, strict=True)
    known = [(size, x.high) for size, x in pairs if x is not peak and x.high is not None]
    alike = [size for size, high in known if peak.low is not None and peak.low <= high]
    if alike:
        where += f" (no significant difference from {cli.cut(alike, 3)})"
    below_half = [n for n, other in enumerate(rates) if other.value < peak.value / 2]
    half = sizes[max(below_half, default=-1) + 1 :]
    since = f"from {half[0]} bytes on" if half else "is not reached at the largest size"
    return f"{name}: peak {bandwidth} {where}; half of the peak {since}; {shortest}"


def answer_beside(cases: list[Case]) -> str:
    """The cost of running both collectives at the same time, for the largest size.

    `all_reduce of 4M bytes and all_to_all of 4M: at the same time they take 1.62 times (1.50 to
    1.70) as long as all_reduce alone; one after the other, 1.80 times`
    """
    case = max(cases, key=lambda case: int(case.key["size_bytes"]))
    key, ratio = case.key, case.metrics["both_over_longer"]
    sizes = [cli.show_size(key[name]) for name in ("size_bytes", "beside_bytes")]
    pair = f"{key['collective']} of {sizes[0]} bytes and {key['beside']} of {sizes[1]}"
    cost = f"{ratio.as_factor()} as long as {case.metrics['longer']} alone"
    if ratio.relative is None:
        cost = f"no verdict on how much they slow each other down: {cost}"
    elif ratio.may_be(1):
        cost = f"no significant slowdown if both run at the same time: {cost}"
    else:
        cost = f"at the same time they take {cost}"
    return f"{pair}: {cost}; one after the other, {case.metrics['in_turn_over_longer']:.2f} times"


def divide(rest_s: float, widths: Sequence[float], spent_s: Sequence[float]) -> list[float]:
    """Divide the rest of the time among sizes, so that the sum of their widths becomes smallest.

    A width falls with the square root of the time t, as c / sqrt(t). The sum is smallest if all t
    are proportional to c^(2/3). A size that has had more than that gets nothing. widths: of the
    intervals after spent_s, both [sizes]; 0 if the size needs no more time.
    """
    needs = [(width**2 * spent) ** (1 / 3) for width, spent in zip(widths, spent_s, strict=True)]
    total_s, chosen = [0.0] * len(needs), [n for n, need in enumerate(needs) if need]
    while chosen:
        unit = (rest_s + sum(spent_s[n] for n in chosen)) / sum(needs[n] for n in chosen)
        total_s = [unit * need for need in needs]
        kept = [n for n in chosen if total_s[n] > spent_s[n]]
        if kept == chosen:
            break
        chosen = kept
    return [total_s[n] - spent_s[n] if n in chosen else 0.0 for n in range(len(needs))]


def measure(
    bench: Benchmark,
    args: argparse.Namespace,
    cases: Sequence[Planned],
    groups: Groups,
    members: Sequence[int],
) -> None:
    """Measure the cases of a table. With --total-seconds, they share half of this time, and each of
    the last two quarters is divided by the widths of their intervals so far. Their rows are printed
    at the end."""
    visits: dict[int, Visit] = {}
    make, fill_in = partial(build, bench.job, args, visits), partial(derive, args, groups)
    if args.beside:
        make, fill_in = partial(build_beside, bench.job, args, groups), partial(derive_beside, args)
    # a case with a narrow interval ends after its first six blocks
    rule = bench.rule if args.iters or args.beside else replace(bench.rule, early=EARLY)

    def visit(planned: Planned, seconds: float | None = None) -> Case | None:
        limited = rule
        if seconds:
            seconds = min(seconds, args.max_seconds)
            limited = replace(
                rule, max_seconds=seconds, patience=1, planned_rounds=MIN_ROUNDS, early=1.0
            )
        return bench.measure(
            planned.key,
            planned.name,
            make,
            fill_in,
            ranks=members,
            subgroups=groups,
            rule=limited,
            shown=not seconds,
        )

    if not args.total_seconds:
        for planned in cases:
            visit(planned)
        return

    def width_if_wide(case: Case | None) -> float:
        """The width of a case that may be measured again, otherwise 0."""
        if not case or case.failed or bench.report.is_earlier(case):
            return 0.0
        width = width_of(case)
        return NO_INTERVAL if width is None else width if width > rule.target_ci else 0.0

    share, begun = bench.job.broadcast, time.monotonic()
    widths, spent_s = [0.0] * len(cases), [0.0] * len(cases)  # valid on rank 0
    for number, planned in enumerate(cases):
        start = time.monotonic()
        share_s = (begun + args.total_seconds / 2 - start) / (len(cases) - number)
        widths[number] = width_if_wide(visit(planned, share(max(TIMED * share_s, MIN_VISIT_S))))
        spent_s[number] = time.monotonic() - start
    for part in (0.75, 1.0):
        end = begun + part * args.total_seconds
        shares = share(divide(max(0.0, end - time.monotonic()), widths, spent_s))
        for number, planned in enumerate(cases):
            start = time.monotonic()
            left = max(0.0, end - start) / (sum(shares[number:]) or 1)
            seconds = share(TIMED_AGAIN * shares[number] * left)
            if seconds >= MIN_VISIT_S:
                widths[number] = width_if_wide(visit(planned, seconds))
                spent_s[number] += time.monotonic() - start
    bench.show_measured()


def main() -> int:
    args = parse_args()
    with Benchmark("collectives", args, observers=[network.Network]) as bench:
        job, environment = bench.job, bench.report.environment
        nodes = node_of_each(environment)
        groups = bench.prepare("--groups", lambda: partition(args.groups, nodes))
        bench.prepare("--root", lambda: check_root(args, len(groups[0])))
        _, size = args.beside or (None, 0)  # 0: that of the collective under test
        needed = args.maxbytes + ((size or args.maxbytes) if args.beside else 0)
        bench.prepare("-e", lambda: check_room(2 * needed, job, environment, "-e"))
        tables = plan(args, job.device.type, groups)
        reasons = {title: unsupported(cases[0].key, job) for title, cases in tables.items()}
        bench.announce({title: cases for title, cases in tables.items() if not reasons[title]})
        members = sorted(itertools.chain(*groups))
        measured: dict[str, list[Case]] = {}
        answer_of_table: Answer = answer_beside if args.beside else partial(answer, args.limit)
        for title, cases in tables.items():
            columns: Columns = {}
            printed: Table = ScanTable(bool(args.per_iter_timing))
            if args.beside:
                columns = COLUMNS_BESIDE
                printed = Table(columns)
            with bench.begin_table(title, columns, answer_of_table, printed) as table:
                if reasons[title]:
                    bench.print(f"# n/a: {reasons[title]}")
                    continue
                measure(bench, args, cases, groups, members)
            measured[title] = table.cases
        problem = network.unexpected(bench, args.expect_network)
        if problem and bench.is_first:
            bench.fail(problem)
        if not args.beside:
            footer(measured, args.min_busbw, bench)
        for case in bench.report.cases:
            if "group_s" in case.metrics:  # the case that created the groups
                by_rank = case.metrics["start_up_by_rank"]
                bench.conclude([start_up.sentence(by_rank, members, environment)], case)
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
