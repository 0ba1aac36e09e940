#!/usr/bin/env python3
"""Which link, rank or node is the bad one? Latency and bandwidth between every pair of ranks.

All pairs meet once, in the rounds of a tournament. The pairs of a round meet at the same time, or
one after the other (--serial).

    latency         = time of a ping-pong of --latency-size bytes / 2
    a -> b          = size * n / (time of n sends and b's word that all have come)
    bidirectional   = 2 * size * n / time of n exchanges
    The fastest sample counts: what disturbs a link only adds time. It has no interval, so +-% is
    that of the median sample: how steady the link is.
    slow            = costs 10 % and --sigmas median absolute deviations more than its like
    a group holds   = the bandwidth of its worst link; the largest group that holds the median
                      link's, less 10 %: exact up to 12 nodes (of one node: ranks), then greedy
    --by node       = rank i of one node with rank i of the other, all at once; bandwidths added
    The calls that are measured are in benchmarks/workloads/links.py.

    torchrun --nproc-per-node 4 benchmarks/p2p_matrix.py
    torchrun --nproc-per-node 8 benchmarks/p2p_matrix.py --plot links.png --json p2p.jsonl
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        benchmarks/p2p_matrix.py --by node --json nodes.jsonl

Written for this project. BSD-3-Clause.
"""

import argparse
import itertools
import os
import sys
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cli  # first: it names a package that is missing

# isort: split
import numpy as np
import torch
from torch.distributed.elastic.multiprocessing.errors import record

from benchmarks.workloads.links import (
    KINDS,
    Link,
    Messages,
    Pair,
    directed,
    links_of,
    round_of,
    rounds_of,
    slow_links,
)
from benchmarks.workloads.outliers import MARGIN, SIGMAS, sentences
from benchmarks.workloads.ranks import partition
from common.benchmark import Benchmark, Key, folded
from common.environment import count_of, node_of_each
from common.table import percent

LARGEST_MATRIX = 32  # members; of more only the worst links are printed
WORST = 20
FEW_LINKS = 3  # of fewer no median says which one is slow
EXACT = 12  # nodes or ranks of which all groups are looked at
UNSURE = 0.5  # an interval that reaches farther from the median sample, as a share of it
PLOTS = (".png", ".svg", ".pdf")
PLOT = "a file that ends in .png, .svg or .pdf"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    size = cli.positive_size
    add("--size", type=size, metavar="SIZE", help="of messages (default: 1M, on CUDA 256M)")
    add("--latency-size", type=size, default=8, metavar="SIZE", help="of a ping-pong (default: 8)")
    few = cli.By(cuda=10, cpu=1)
    calls = f"calls per sample (default: {few})"
    add("-n", "--calls", type=cli.positive_int, default=few, metavar="N", help=calls)
    add("--by", choices=("rank", "node"), default="rank", help="(default: rank)")
    add("--serial", action="store_true", help="one pair at a time")
    limit = "threshold (default: 5)"
    add("--sigmas", type=cli.positive_float, default=SIGMAS, metavar="S", help=limit)
    drawn = cli.checked(str, lambda path: Path(path).suffix in PLOTS, PLOT, "e.g. links.png")
    add("--plot", type=drawn, metavar="PATH", help=f"draw a heat map: {PLOT}; needs matplotlib")
    cli.add_common_flags(parser, min_iters=6, max_seconds=1)
    args = parser.parse_args(argv)
    # gloo sends no CUDA tensors
    args.moved_to_cpu = args.backend == "gloo" and cli.on_cuda(args.device)
    if args.moved_to_cpu:
        args.device = "cpu"
    return args


def rates_between(links: list[Link], owner: list[int]) -> dict[Pair, float]:
    """The worst bandwidth between each two owners (nodes or ranks), in either direction. owner: of
    each member."""
    rates: dict[Pair, float] = {}
    for link in links:
        a, b = sorted((owner[link.a], owner[link.b]))
        if a != b:
            rate = min(link.a_to_b, link.b_to_a)
            rates[a, b] = min(rate, rates.get((a, b), rate))
    return rates


def held(group: Sequence[int], rates: dict[Pair, float]) -> float:
    """The bandwidth of the worst link of a group; 0 where one was not measured."""
    return min(rates.get(pair, 0.0) for pair in itertools.combinations(group, 2))


def good_group(count: int, rates: dict[Pair, float], least: float) -> list[int]:
    """The largest group of 0 to count - 1 that holds `least`; of several the one that holds most.

    Of more than EXACT it may be too small: while a link is under `least`, one end of the worst link
    goes, the one that has more such links.
    """
    group = list(range(count))
    if count <= EXACT:
        for size in range(count, 2, -1):
            groups = itertools.combinations(group, size)
            best = max(groups, key=lambda members: held(members, rates))
            if held(best, rates) >= least:
                return list(best)
        fastest: Pair = max(rates, key=lambda pair: rates[pair])
        return list(fastest)
    while len(group) > 2 and held(group, rates) < least:
        pairs = list(itertools.combinations(group, 2))
        under = [pair for pair in pairs if rates.get(pair, 0.0) < least]
        worst = min(under, key=lambda pair: rates.get(pair, 0.0))
        group.remove(max(worst, key=lambda member: sum(member in pair for pair in under)))
    return group


def leave_out(links: list[Link], node_of_member: list[int]) -> str | None:
    """`without node 3: 7 nodes hold 380 GB/s, all 8 hold 94 GB/s`; None for two nodes or ranks."""
    name, owner = "node", node_of_member
    if max(node_of_member) == 0:
        name, owner = "rank", list(range(len(node_of_member)))
    count, rates = max(owner) + 1, rates_between(links, owner)
    if count < 3 or not rates:
        return None
    group = good_group(count, rates, median(rates.values()) / (1 + MARGIN))
    rate = f"hold {held(group, rates):.4g} GB/s"
    if len(group) == count:
        return f"all {count} {name}s {rate}"
    left = cli.cut([f"{name} {n}" for n in range(count) if n not in group])
    of_all = held(range(count), rates)
    return f"without {left}: {len(group)} {name}s {rate}, all {count} hold {of_all:.4g} GB/s"


def tables(links: list[Link], n: int, by: str, room: int | None) -> str:
    """The matrices of n members; if there are more than fit in `room` letters, the worst links."""
    lines = []
    fits = n <= LARGEST_MATRIX and (room is None or 5 + 9 * n <= room)
    matrices = [(f"{k} ({q.unit})", q.less_is_better, directed(links, k)) for k, q in KINDS.items()]
    spreads = {}
    for link in links:
        if link.spread is not None:
            spreads[link.a, link.b] = link.spread * 100 if link.spread < 1 else np.inf
    matrices.append(("+-% of the median sample", True, spreads))
    for title, less_is_better, values in matrices:
        lines.append(f"\n{title}, by {by}\n")
        if fits:
            lines += matrix_lines(matrix_of(values, n))
            continue
        ranked = sorted(values, key=lambda pair: values[pair], reverse=less_is_better)
        worst = ranked[:WORST]
        lines.append(f"worst {len(worst)} of {len(values)} links:")
        for a, b in worst:
            lines.append(f"  {a:>5} -> {b:<5} {shown(values[a, b])}")
    return "\n".join(lines)


def matrix_of(values: dict[Pair, float], n: int) -> np.ndarray:
    """A row for each sender, a column for each receiver; nan where nothing was measured.

    Without a direction both halves agree.
    """
    matrix = np.full((n, n), np.nan)
    for (a, b), value in values.items():
        matrix[a, b] = value
        if (b, a) not in values:
            matrix[b, a] = value
    return matrix


def shown(value: float) -> str:
    """A number of a link; infinite is an interval of more than 100 %."""
    if np.isnan(value):
        return "-"
    return f"{value:.4g}" if np.isfinite(value) else ">100"


def matrix_lines(matrix: np.ndarray) -> list[str]:
    lines = [" " * 5 + "".join(f"{b:>9}" for b in range(len(matrix)))]
    for a, row in enumerate(matrix):
        line = f"{a:>4} "
        for value in row:
            line += f"{shown(value):>9}"
        lines.append(line)
    return lines


def answer(links: list[Link], node_of_member: list[int], by: str, sigmas: float) -> list[str]:
    """Who is slow, and the range of the links. node_of_member: the node of each rank or node."""
    lines = sentences(slow_links(links, node_of_member, by, sigmas))
    spreads = [link.spread for link in links if link.spread is not None]
    unsure = len(spreads) < len(links) or max(spreads) > UNSURE
    if unsure:
        lines = [f"maybe {line}" for line in lines]
    if len(links) < FEW_LINKS:
        lines = [f"with {count_of(len(links), 'link')} nobody can tell what is slow"]
    lines = lines or ["no link, rank or node is slow beyond noise"]
    latencies = [link.latency_us for link in links]
    rates = [rate for link in links for rate in (link.a_to_b, link.b_to_a)]
    latency = f"latency {min(latencies):.4g} to {max(latencies):.4g} us"
    bandwidth = f"bandwidth {min(rates):.4g} to {max(rates):.4g} GB/s"
    steady = "no interval"
    if len(spreads) == len(links):
        steady = f"{percent(median(spreads))}, {percent(max(spreads))} at most"
    if unsure:
        steady += "; raise --max-seconds"
    lines.append(f"{latency}, {bandwidth} (the median sample of a link: {steady})")
    group = leave_out(links, node_of_member)
    return [*lines, group] if group else lines


def draw(links: list[Link], members: int, path: str) -> None:
    """A heat map of each matrix; yellow is good. Only this needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.2), layout="constrained")
    ticks = range(0, members, 1 + members // 16)
    for ax, (kind, quantity) in zip(figure.subplots(1, len(KINDS)), KINDS.items(), strict=True):
        matrix = matrix_of(directed(links, kind), members)
        image = ax.imshow(matrix, cmap="viridis_r" if quantity.less_is_better else "viridis")
        ax.set(title=f"{kind} ({quantity.unit})", xlabel="receives", ylabel="sends")
        ax.set(xticks=ticks, yticks=ticks)
        figure.colorbar(image, ax=ax, shrink=0.7)
    figure.savefig(path, dpi=150)


def messages_of(args: argparse.Namespace, device: torch.device) -> Messages:
    size = args.size or (2**28 if device.type == "cuda" else 2**20)
    return Messages(size, args.latency_size, args.calls)


def plan(
    args: argparse.Namespace, messages: Messages, members: int
) -> list[tuple[str, list[Pair], Key]]:
    """Each round: its name, the pairs of members that meet in it, and its key."""
    rounds = rounds_of(members)
    if args.serial:
        rounds = [[pair] for pairs in rounds for pair in pairs]
    fixed = {
        "size": messages.size,
        "latency_size": messages.latency_size,
        "calls": messages.calls,
        "by": args.by,
        "serial": args.serial,
        # the ranks do not say who meets: 3 nodes of 4 have as many rounds as 4 nodes of 3
        "rounds": len(rounds),
        "members": members,
    }
    return [(f"round {n}", pairs, {"round": n} | fixed) for n, pairs in enumerate(rounds, 1)]


def settings(args: argparse.Namespace, messages: Messages) -> str:
    """What all rounds share, in words."""
    how = "one pair at a time" if args.serial else "the pairs of a round at once"
    size, latency_size = cli.show_size(messages.size), cli.show_size(messages.latency_size)
    return f"{how}; messages of {size} bytes (latency: {latency_size}), {messages.calls} a sample"


def members_of(by: str, nodes: list[int]) -> list[list[int]]:
    """The ranks of each rank or node, as --by says. Raises ValueError. nodes: of each rank."""
    members = partition(by, nodes)
    if len(members) < 2:
        raise ValueError(f"a link needs two {by}s, and there is 1; e.g. --nproc-per-node 2")
    return members


def check_plot(path: str) -> None:
    """Raises ValueError where no heat map could be written, before anything is measured."""
    if find_spec("matplotlib") is None:
        raise ValueError("it needs matplotlib, which is not installed; try pip install matplotlib")
    if Path(path).is_dir():
        raise ValueError(f"expected {PLOT}, and this is a folder")
    folder = Path(path).parent
    if not os.access(folder, os.W_OK):
        raise ValueError(f"expected a folder that can be written, got {folder}")


def main() -> int:
    args = parse_args()
    with Benchmark("p2p_matrix", args) as bench:
        job, nodes = bench.job, node_of_each(bench.report.environment)
        if args.moved_to_cpu:
            bench.print("# gloo sends no CUDA tensors: these are the links of the CPU")
        if args.plot:  # rank 0 writes it
            check = partial(check_plot, args.plot) if job.rank == 0 else lambda: None
            bench.prepare(f"--plot {args.plot}", check)
        members = bench.prepare(f"--by {args.by}", lambda: members_of(args.by, nodes))
        messages = messages_of(args, job.device)
        rounds = plan(args, messages, len(members))
        title = f"{len(rounds)} rounds, {settings(args, messages)}"
        planned = [(name, 2 * len(pairs) * len(members[0]), key) for name, pairs, key in rounds]
        bench.announce({title: planned})
        bench.print("\n" + folded(title, bench.room))
        links: list[Link] = []  # on rank 0
        for name, pairs, key in rounds:
            ranks, build, derive = round_of(pairs, members, messages, job)
            case = bench.measure(key, name, build, derive, ranks=ranks)
            if case and case.failed:
                bench.print(f"# {name}: {case.check}")
            links += links_of(case) if case else []
        if links:
            bench.print(tables(links, len(members), args.by, bench.room))
            node_of_member = [nodes[ranks[0]] for ranks in members]
            bench.conclude(answer(links, node_of_member, args.by, args.sigmas))
            if args.plot:
                try:
                    draw(links, len(members), args.plot)
                except (ImportError, OSError, ValueError) as error:
                    bench.fail(f"--plot {args.plot}: {error}")
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
