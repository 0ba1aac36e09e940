#!/usr/bin/env python3
"""How fast is each collective, at each size, and are its results right? nccl-tests for torch.

Timed are calls of torch.distributed on buffers that are there: blocks of -n calls, the clock read
around a block. Not timed: making buffers, the data check, the first call (it connects).

    time    = a block's time / its calls; -a of the ranks' (default max); median of the blocks
    algbw   = size / time                     GB/s of 10^9 bytes
    busbw   = algbw * factor                  2(n-1)/n for all_reduce; (n-1)/n for all_gather,
              reduce_scatter, all_to_all, gather, scatter; 1 for broadcast, reduce, sendrecv
    size    = the larger of what a rank sends and receives, in bytes; count = elements it brings
    #wrong  = values that differ from what rank and position say; must be 0
    in-place: input and output share memory. torch has all_reduce, broadcast and reduce in place
              only; their out-of-place time includes the copy from input to output

    torchrun --nproc-per-node 2 benchmarks/collectives.py -b 4 -e 64M -f 2
    torchrun --nproc-per-node 8 benchmarks/collectives.py --collective all -e 1G --json report.json
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        benchmarks/collectives.py -b 1G -e 1G --groups cross --limit 50

Flags, table and formulas are those of NVIDIA's nccl-tests; written anew. BSD-3-Clause.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import bandwidth, cli
from common.partition import NAMED, parse_groups

DTYPES = {
    **{"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8},
    **{"int8": 1, "uint8": 1, "int32": 4, "int64": 8},
}  # bytes of an element
ALIASES = {"float": "float32", "half": "float16", "double": "float64", "bf16": "bfloat16"}
REDOPS = ("sum", "avg", "min", "max", "prod")
AVERAGES = {"0": "rank0", "1": "avg", "2": "min", "3": "max"}  # -a, as nccl-tests numbers them


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = cli.Parser(description=__doc__)
    add = parser.add_argument
    size = cli.as_type(bandwidth.parse_size)
    collectives = cli.names(bandwidth.COLLECTIVES)
    add(
        "--collective",
        type=collectives,
        default=["all_reduce"],
        metavar="NAME",
        help=f"`all` or a list of {', '.join(bandwidth.COLLECTIVES)} (default: all_reduce)",
    )
    group = parser.add_argument_group("scan")
    add = group.add_argument
    add("-b", "--minbytes", type=size, default=8, metavar="SIZE", help="(default: 8)")
    add("-e", "--maxbytes", type=size, metavar="SIZE", help="(default: 64M, on CUDA 1G)")
    add("-i", "--stepbytes", type=size, metavar="SIZE", help="add this from size to size, or")
    add("-f", "--stepfactor", type=float, metavar="F", help="multiply by this (default: 2)")
    add(
        "-d",
        "--datatype",
        type=cli.names(tuple(DTYPES), ALIASES),
        default=["float32"],
        metavar="TYPE",
        help=f"`all` or a list of {', '.join(DTYPES)} (default: float32)",
    )
    add(
        "-o",
        "--op",
        type=cli.names(REDOPS),
        default=["sum"],
        metavar="REDOP",
        help=f"the reduction: `all` or a list of {', '.join(REDOPS)} (default: sum)",
    )
    add("-r", "--root", type=cli.whole_number, default=0, metavar="R", help="(default: 0)")
    add(
        "--groups",
        type=cli.as_type(parse_groups),
        default="world",
        metavar="G",
        help=f"{', '.join(NAMED)} (rank i of every node), or ranks as 0,1/2,3: all groups at "
        "once, a root is a rank within its group (default: world)",
    )
    group = parser.add_argument_group("measurement")
    add = group.add_argument
    add("-n", "--iters", type=cli.positive_int, default=20, metavar="N", help="a block (20)")
    add("-w", "--warmup-iters", type=cli.whole_number, default=5, metavar="N", help="(default: 5)")
    add(
        "--max-seconds",
        type=cli.positive_float,
        default=0.3,
        metavar="S",
        help="blocks a size: up to 12, or until so long is spent (default: 0.3)",
    )
    add("-c", "--check", type=cli.whole_number, default=1, metavar="N", help="check N calls (1)")
    add("-z", "--blocking", choices=("0", "1"), default="0", help="wait for each call on the host")
    add("--in-flight", type=cli.positive_int, metavar="N", help="async_op, N calls at a time")
    add("--coalesce", type=cli.positive_int, metavar="N", help="N calls taken as one")
    add("-G", "--cudagraph", type=cli.whole_number, default=0, metavar="N", help="N replays")
    add(
        "-a",
        "--average",
        type=lambda text: AVERAGES.get(text, text),
        choices=tuple(AVERAGES.values()),
        default="max",
        help="across ranks; 0 to 3 stand for them (default: max)",
    )
    add("--per-iteration", action="store_true", help="read the clock at every call: adds columns")
    add("--cache-warm", action="store_true", help="one buffer, instead of more than the cache")
    add("--skew", action="store_true", help="who comes late: splits time into wait and transfer")
    add(
        "--limit", type=cli.positive_float, metavar="GB/s", help="of the link: prints busbw over it"
    )
    add(
        "--min-busbw",
        type=cli.positive_float,
        metavar="GB/s",
        help="fail where the top quarter of sizes has less than 0.9 of it on average",
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: auto)")
    add("--distributed-backend", choices=cli.BACKENDS, help="(default: nccl on CUDA, CPU gloo)")
    cli.add_report_flags(
        parser, json=("-J", "--json", "--output-file"), timeout=("-T", "--timeout")
    )
    return check_flags(parser.parse_args(argv))


def check_flags(args: argparse.Namespace) -> argparse.Namespace:
    """Refuse what needs no torch to be seen as wrong."""
    modes = {
        "-z 1": args.blocking == "1",
        "--in-flight": args.in_flight,
        "--coalesce": args.coalesce,
        "-G": args.cudagraph,
    }
    given = [flag for flag, value in modes.items() if value]
    if len(given) > 1:
        cli.refuse(f"{given[0]} and {given[1]} are two ways to make calls; give one of them")
    if args.per_iteration and given and given[0] != "-z 1":
        cli.refuse(f"--per-iteration has no effect with {given[0]}: its calls have no time each")
    if args.stepbytes is not None and args.stepfactor is not None:
        cli.refuse("-i adds and -f multiplies; give one of them")
    redops = set(args.collective) & set(bandwidth.REDUCING)
    if not redops and args.op != ["sum"]:
        cli.refuse(f"-o has no effect on {', '.join(args.collective)}")
    if not set(args.collective) & {*bandwidth.ROOTED, *bandwidth.OBJECTS} and args.root:
        cli.refuse(f"-r has no effect on {', '.join(args.collective)}")
    return args


if __name__ == "__main__":
    ARGS = parse_args()  # before the imports below, so that --help need not wait for them

import functools
import itertools
import math
from collections import defaultdict
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from common.collective_case import (
    LACKING,
    Scan,
    case_key,
    derive,
    lacking,
    run_case,
    scans,
    sized,
)
from common.dist import choose_device, world_from_environment
from common.memory import available_bytes, cache_bytes
from common.partition import Partition, partition
from common.results import Case
from common.scan_table import PREFIXES, ScanTable
from common.sweep import Sweep, check_report_flags

Key = dict[str, Any]


# -- what cannot run -------------------------------------------------------------------------------


def check_args(args: argparse.Namespace) -> tuple[torch.device, str]:
    """Fill in the defaults that depend on the device; refuse what cannot run."""
    try:
        device, backend = choose_device(args.device, args.distributed_backend)
        world_size, local_world_size = world_from_environment()[1::2]
        args.maxbytes = args.maxbytes or max(
            args.minbytes, 2**26 if device.type == "cpu" else 2**30
        )
        args.sizes = bandwidth.scan(args.minbytes, args.maxbytes, args.stepbytes, args.stepfactor)
        if args.groups not in ("node", "cross"):  # which are known when the job runs
            check_root(args, partition(args.groups, [0] * world_size))
    except ValueError as error:
        cli.refuse(str(error))
    largest = max(args.datatype, key=lambda name: DTYPES[name])
    if args.minbytes < DTYPES[largest]:
        cli.refuse(
            f"-b {args.minbytes} is less than one {largest} element; try -b {DTYPES[largest]}"
        )
    if device.type == "cpu" and (args.blocking == "1" or args.cudagraph):
        flag = "-G" if args.cudagraph else "-z 1"
        cli.refuse(f"{flag} has no effect on the CPU, where calls block; leave it out")
    needed = memory_needed(args, device, world_size)
    needed *= local_world_size if device.type == "cpu" else 1
    available = available_bytes(device)
    if needed > available:
        whose = "the ranks of this host" if device.type == "cpu" else "each rank"
        fitting = bandwidth.show_size(smaller(args, needed, available))
        cli.refuse(
            f"-e {bandwidth.show_size(args.maxbytes)} needs {needed:,} bytes of memory for the "
            f"buffers of {whose}, and {available:,} are free; try -e {fitting}"
        )
    check_report_flags(args, "collectives")
    return device, backend


def check_root(args: argparse.Namespace, groups: Partition) -> None:
    """Raise ValueError where the root is in no group."""
    for label, ranks in groups:
        if args.root >= len(ranks):
            raise ValueError(
                f"-r {args.root} is outside group `{label}` of {len(ranks)} ranks; "
                f"a root is a rank within its group, e.g. -r {len(ranks) - 1}"
            )


def memory_needed(args: argparse.Namespace, device: torch.device, world_size: int) -> int:
    """Bytes that a rank's buffers take at the largest size: two variants, each input and output."""
    width = args.in_flight or args.coalesce or 1
    cold = 0 if args.cache_warm else 2 * cache_bytes(device)
    tensors = 3 * max(cold, width * args.maxbytes)
    objects = set(args.collective) & set(bandwidth.OBJECTS)
    pickled = max(cold, args.maxbytes) + 4 * args.maxbytes if objects else 0
    return max(tensors, pickled)


def smaller(args: argparse.Namespace, needed: int, available: int) -> int:
    """A size whose buffers fit: the next power of two under the share that does."""
    fits = max(args.maxbytes * available // needed // 2, 1)
    return max(args.minbytes, 2 ** int(math.log2(fits)))


# -- tables ----------------------------------------------------------------------------------------


def row_set(key: Key) -> str:
    """What one table is about."""
    ranks = f"{key['group_ranks']} rank{'' if key['group_ranks'] == 1 else 's'}"
    parts = [key[name] for name in ("collective", "dtype", "redop") if key[name] != "none"]
    return f"{' '.join(parts)}, {key['group']} ({ranks})"


def row(case: Case, table: ScanTable) -> str:
    """A case's line: its numbers, or why it has none."""
    if case["metrics"]:
        return table.row(case)
    return table.absent(case, case["check"].removeprefix("skipped: "))


def rates(cases: list[Case]) -> list[tuple[int, float]]:
    """(size, busbw) of both variants of all cases."""
    found = []
    for case in cases:
        names = [f"{prefix}_busbw_gb_per_s" for prefix in PREFIXES]
        found += [(case["key"]["size_bytes"], case["metrics"].get(name)) for name in names]
    return [pair for pair in found if pair[1] is not None]


def print_footer(keys: list[Key], sweep: Sweep) -> None:
    """A line for each table, then those that nccl-tests ends with."""
    lines, everything, wrong = ["#"], [], 0
    for title, group in itertools.groupby(keys, key=row_set):
        cases = [case for case in map(sweep.find_any, group) if case is not None]
        pairs = rates(cases)
        everything += [rate for _, rate in pairs]
        wrong += sum(case["metrics"].get(f"{p}_wrong", 0) for case in cases for p in PREFIXES)
        if pairs:
            lines.append(
                f"# {title}: average busbw {bandwidth.mean([rate for _, rate in pairs]):.4g} GB/s, "
                f"over the top quarter of sizes {top_busbw(cases):.4g} GB/s"
            )
    lines.append(f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}")
    lines.append(f"# Avg bus bandwidth    : {bandwidth.mean(everything):g}")
    sweep.say("\n".join([*lines, "#"]))


def top_busbw(cases: list[Case]) -> float:
    return bandwidth.mean(bandwidth.top_quarter(rates(cases)))


def too_slow(keys: list[Key], args: argparse.Namespace, sweep: Sweep) -> str | None:
    """The first table whose large sizes are under 0.9 of --min-busbw; on rank 0."""
    for title, group in itertools.groupby(keys, key=row_set):
        cases = [case for case in map(sweep.find_any, group) if case is not None]
        if args.min_busbw and rates(cases) and top_busbw(cases) < 0.9 * args.min_busbw:
            return (
                f"{title}: busbw over the top quarter of sizes is {top_busbw(cases):.4g} GB/s, "
                f"under 0.9 of --min-busbw {args.min_busbw:g}"
            )
    return None


# -- the scan --------------------------------------------------------------------------------------


def measure(
    scan: Scan,
    size: int,
    keys: list[Key],
    groups: Partition,
    args: argparse.Namespace,
    sweep: Sweep,
) -> str | None:
    """Measure one size on all groups at once; why this scan cannot be measured at all, or None.

    On rank 0 the cases are in the report then.
    """
    label = f"{scan} {bandwidth.show_size(size)}"
    sets = [ranks for _, ranks in groups]
    work = functools.partial(run_case, scan, size, args, sweep)
    outcome = sweep.attempt(label, sets, work, keep_groups=True)
    if outcome is None:
        return None
    facts, _, error = outcome
    # what all ranks refuse alike, in such words, is not there; anything else is a failure
    if error and "(rank " not in error and LACKING.search(error):
        return error
    of_each = iter(facts)
    for key, ranks in zip(keys, sets, strict=True):
        save = key is keys[-1]  # once for all groups: there may be thousands
        if error:
            sweep.keep(key, label, ranks, None, {}, f"failed: {error}", save)
        else:
            mine = list(itertools.islice(of_each, len(ranks)))
            sweep.keep(key, label, ranks, *derive(key, args, ranks, mine), save)
    return None


def run_scan(
    scan: Scan,
    sizes: list[int],
    groups: Partition,
    args: argparse.Namespace,
    sweep: Sweep,
) -> None:
    """Measure what the report lacks of one operation; print its tables, a single one row by row."""
    absent = lacking(scan, args, len(groups[0][1]), sweep.ctx.backend)
    table = ScanTable(args.per_iteration, bool(args.limit), args.skew)
    columns = [keys_of(scan, sizes, group, args, sweep) for group in groups]
    stream = len(groups) == 1
    if stream:
        sweep.say(f"#\n# {row_set(columns[0][0])}\n{table.header()}")
    told = False
    for i, size in enumerate(sizes):
        keys = [column[i] for column in columns]
        known = sweep.share([sweep.find(key) is not None for key in keys])
        if not all(known) and not absent:
            absent = sweep.share(measure(scan, size, keys, groups, args, sweep))
        if sweep.report is None:
            continue
        for key, (_, ranks) in zip(keys, groups, strict=True):
            if absent and sweep.find(key) is None:
                check = f"skipped: n/a: {absent}"
                sweep.keep(key, str(scan), ranks, None, {}, check, key is keys[-1])
        case = sweep.find_any(keys[0])
        if stream and case and not (told and not case["metrics"]):
            sweep.say(row(case, table))
            told = not case["metrics"] and case["check"].startswith("skipped")
    if not stream:
        print_tables(columns, table, sweep)


def print_tables(columns: list[list[Key]], table: ScanTable, sweep: Sweep) -> None:
    """The tables of groups that were measured at once."""
    for column in columns:
        cases = [case for case in map(sweep.find_any, column) if case is not None]
        lines = list(dict.fromkeys(row(case, table) for case in cases))
        sweep.say("\n".join([f"#\n# {row_set(column[0])}", table.header(), *lines]))


def keys_of(
    scan: Scan,
    sizes: list[int],
    group: tuple[str, tuple[int, ...]],
    args: argparse.Namespace,
    sweep: Sweep,
) -> list[Key]:
    label, ranks = group
    return [case_key(scan, size, label, len(ranks), args, sweep) for size in sizes]


def main(args: argparse.Namespace) -> int:
    device, backend = check_args(args)
    with Sweep("collectives", args, device, backend) as sweep:
        groups: Partition = []
        try:
            groups = partition(args.groups, sweep.nodes())
            check_root(args, groups)
        except ValueError as error:
            sweep.refuse(str(error))
        ranks = len(groups[0][1])
        plan = {}
        for scan in scans(args):
            asked = args.sizes if scan.collective != "barrier" else [0]
            plan[scan] = list(dict.fromkeys(sized(scan, size, ranks)[0] for size in asked))
        keys = [
            key
            for scan, sizes in plan.items()
            for group in groups
            for key in keys_of(scan, sizes, group, args, sweep)
        ]
        sweep.plan(keys, summary=functools.partial(print_footer, keys, sweep))
        args.memory = defaultdict(dict)  # of each variant, kept from case to case
        for scan, sizes in plan.items():
            run_scan(scan, sizes, groups, args, sweep)
        slow = too_slow(keys, args, sweep) if sweep.report else None
        if slow:
            sweep.fail(slow)
    return sweep.status


if __name__ == "__main__":
    sys.exit(record(main)(ARGS))
