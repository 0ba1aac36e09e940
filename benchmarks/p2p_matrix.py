#!/usr/bin/env python3
"""Which link, rank or node is slow? Latency and bandwidth between every pair of ranks.

All pairs meet once, in the rounds of a tournament. The pairs of a round meet at the same time, or
one after the other (--serial).

    latency         = time of a ping-pong of --latency-size bytes / 2; the fastest sample counts,
                      since disturbances only add time
    a -> b          = size * n / (time of n sends and b's word that all have come)
    bidirectional   = 2 * size * n / time of n exchanges
    n               = messages of a sample, back to back: as many as take 50 ms. The slowest block
                      counts: what the link holds, after any burst that a switch lets pass
    +-%             = the 95 % interval of the median sample: how steady the link is
    slow            = costs 10 % and --sigmas median absolute deviations more than its peers; while
                      other processes use over a tenth of the cores, or if it is not known what they
                      use (ab.py --interleave, --resume), more than 5 times as much
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
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cli  # first: it names a package that is missing

# isort: split
import numpy as np
import torch
from torch.distributed.elastic.multiprocessing.errors import record

from benchmarks.workloads.links import (
    KINDS,
    SUSTAINED_SIZE,
    Link,
    Messages,
    Pair,
    directed,
    links_of,
    round_of,
    rounds_of,
    slow_links,
)
from benchmarks.workloads.outliers import MARGIN, SIGMAS, Findings, Names, sentences
from benchmarks.workloads.ranks import partition
from common.benchmark import LOAD_UNKNOWN, Benchmark, Key, folded
from common.cpu_load import Others
from common.environment import count_of, node_names, node_of_each, rank_names
from common.report import Case
from common.table import percent

LARGEST_MATRIX = 32  # members; of more only the worst links are printed
WORST = 20
FEW_LINKS = 3  # with fewer it is impossible to tell which one is slow
EXACT = 12  # nodes or ranks of which all groups are examined
UNSURE = 0.5  # an interval that reaches farther from the median sample, as a share of it
PLOTS = (".png", ".svg", ".pdf")
PLOT = "a file that ends in .png, .svg or .pdf"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    size = cli.positive_size
    add("--size", type=size, metavar="SIZE", help="of messages (default: 4M, on CUDA 256M)")
    add("--latency-size", type=size, default=8, metavar="SIZE", help="of a ping-pong (default: 8)")
    calls = "messages per sample, and ping-pongs (default: as many messages as take 50 ms)"
    add("-n", "--calls", type=cli.positive_int, metavar="N", help=calls)
    add("--by", choices=("rank", "node"), default="rank", help="(default: rank)")
    add("--serial", action="store_true", help="one pair at a time")
    limit = "threshold (default: 5)"
    add("--sigmas", type=cli.positive_float, default=SIGMAS, metavar="S", help=limit)
    drawn = cli.checked(str, lambda path: Path(path).suffix in PLOTS, PLOT, "e.g. links.png")
    add("--plot", type=drawn, metavar="PATH", help=f"draw a heat map: {PLOT}; needs matplotlib")
    cli.add_common_flags(parser, min_iters=6, max_seconds=2)
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
        if a != b and link.a_to_b is not None and link.b_to_a is not None:
            rate = min(link.a_to_b, link.b_to_a)
            rates[a, b] = min(rate, rates.get((a, b), rate))
    return rates


def held(group: Sequence[int], rates: dict[Pair, float]) -> float:
    """The bandwidth of the worst link of a group; 0 if one was not measured."""
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


def leave_out(
    links: list[Link], node_of_member: list[int], names: Names, findings: Findings
) -> str | None:
    """`without node3: 7 nodes hold 380 GB/s, all 8 hold 94 GB/s`; None for two nodes or ranks.

    A node or rank is left out only if it is in the findings, by itself or as an end of a slow link.
    """
    level, owner = "node", node_of_member
    if max(node_of_member) == 0:
        level, owner = "rank", list(range(len(node_of_member)))
    count, rates = max(owner) + 1, rates_between(links, owner)
    if count < 3 or not rates:
        return None
    named = set()
    for who, _ in findings:
        for members in who.suspects:
            named |= set(members) if who.level == level else {owner[member] for member in members}
    group = good_group(count, rates, median(rates.values()) / (1 + MARGIN))
    left = [number for number in range(count) if number not in group]
    of_all = f"all {count} {level}s hold {held(range(count), rates):.4g} GB/s"
    if not left or not named.issuperset(left):
        return of_all
    without = cli.cut([names[level][number] for number in left])
    return f"without {without}: {len(group)} {level}s hold {held(group, rates):.4g} GB/s, {of_all}"


def tables(links: list[Link], names: Sequence[str], by: str, room: int | None) -> str:
    """The matrices; if there are more members than fit into `room` characters, the worst links.

    names: of the members. A column has the name of a node, or the number of a rank.
    """
    lines = []
    n = len(names)
    heads = list(names) if by == "node" else [str(rank) for rank in range(n)]
    width = max(9, *(len(head) + 1 for head in heads))
    fits = n <= LARGEST_MATRIX and (room is None or width * (n + 1) <= room)
    matrices = [(f"{k} ({q.unit})", q.less_is_better, directed(links, k)) for k, q in KINDS.items()]
    spreads = {}
    for link in links:
        if link.spread is not None:
            spreads[link.a, link.b] = link.spread * 100 if link.spread < 1 else np.inf
    matrices.append(("+-% of the median sample", True, spreads))
    for title, less_is_better, values in matrices:
        lines.append(f"\n{title}, by {by}\n")
        if fits:
            lines += matrix_lines(matrix_of(values, n), heads, width)
            continue
        ranked = sorted(values, key=lambda pair: values[pair], reverse=less_is_better)
        worst = ranked[:WORST]
        lines.append(f"worst {len(worst)} of {len(values)} links:")
        for a, b in worst:
            lines.append(f"  {names[a]} -> {names[b]}  {shown(values[a, b])}")
    if fits and by == "rank" and (places := ranks_of_nodes(names)):
        lines.append(f"\n{places}")
    return "\n".join(lines)


def ranks_of_nodes(names: Sequence[str]) -> str:
    """`ranks 0 to 7 on node1, 8 to 15 on node2`; empty for one node. names: `rank 0 on node1`."""
    of_node: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        of_node.setdefault(name.partition(" on ")[2], []).append(rank)
    if len(of_node) < 2:
        return ""
    places = [
        f"{ranks[0]} to {ranks[-1]} on {node}"
        if len(ranks) > 1 and ranks[-1] - ranks[0] == len(ranks) - 1
        else f"{', '.join(map(str, ranks))} on {node}"
        for node, ranks in of_node.items()
    ]
    return f"ranks {', '.join(places)}"


def matrix_of(values: dict[Pair, float], n: int) -> np.ndarray:
    """A row for each sender, a column for each receiver; nan if nothing was measured.

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


def matrix_lines(matrix: np.ndarray, heads: Sequence[str], width: int) -> list[str]:
    """A line for each sender. heads: of rows and columns, in columns of `width` characters."""
    first = max(4, *map(len, heads))
    lines = [" " * (first + 1) + "".join(f"{head:>{width}}" for head in heads)]
    for head, row in zip(heads, matrix, strict=True):
        lines.append(f"{head:>{first}} " + "".join(f"{shown(value):>{width}}" for value in row))
    return lines


def named(
    links: list[Link], node_of_member: list[int], by: str, sigmas: float, is_doubtful: bool
) -> Findings:
    """What is slow, as far as it can be told: see `answer`. is_doubtful: only what is far off."""
    if len(links) < FEW_LINKS:
        return {}
    found = slow_links(links, node_of_member, by, sigmas)
    if is_doubtful:
        found = {finding: slowness for finding, slowness in found.items() if slowness.is_far}
    return found


def doubt_of(others: Others | None, is_load_known: bool) -> str:
    """Why a small difference is no evidence; "" if it is. others: what other processes used, if it
    was much. is_load_known: False for links of an earlier run, and where commands take turns."""
    if not is_load_known:
        return LOAD_UNKNOWN
    return f"other processes used {others.busy:.1f} of {others.cores} cores" if others else ""


def outlined(findings: Findings, node_of_member: list[int]) -> list[dict[str, Any]]:
    """What report.py outlines: at what it is slow, and the two members of a link, or the members of
    which all links are slow."""
    rows: list[dict[str, Any]] = []
    for who, what in findings:
        for members in who.suspects:
            if who.level == "link":
                rows.append({"what": what, "link": list(members)})
                continue
            owner = node_of_member if who.level == "node" else range(len(node_of_member))
            rows.append({"what": what, "members": [m for m, x in enumerate(owner) if x in members]})
    return rows


def answer(
    links: list[Link],
    node_of_member: list[int],
    by: str,
    sigmas: float,
    names: Names,
    doubt: str = "",
) -> list[str]:
    """What is slow, and the range of the links.

    node_of_member: the node of each rank or node. names: of nodes, ranks and the members of links.
    doubt: what other processes used, if it was much, or that this is not known: then only what is
    far off is named.
    """
    found = named(links, node_of_member, by, sigmas, bool(doubt))
    lines = sentences(found, names)
    spreads = [link.spread for link in links if link.spread is not None]
    unsure = len(spreads) < len(links) or max(spreads) > UNSURE
    if unsure:
        lines = [f"maybe {line}" for line in lines]
    if len(links) < FEW_LINKS:
        few = count_of(len(links), "link")
        lines = [f"with {few} it is impossible to tell which link, rank or node is slow"]
    elif not lines and (doubt or unsure):
        why = doubt or "the links are too unsteady; raise --max-seconds"
        lines = [f"cannot be told if a link, rank or node is slow: {why}"]
    lines = lines or ["no link, rank or node is slow beyond noise"]
    latencies = [link.latency_us for link in links]
    rates = [rate for link in links for rate in (link.a_to_b, link.b_to_a) if rate is not None]
    latency = f"latency {min(latencies):.4g} to {max(latencies):.4g} us"
    bandwidth = f"bandwidth {min(rates):.4g} to {max(rates):.4g} GB/s"
    steady = "no interval"
    if len(spreads) == len(links):
        steady = f"{percent(median(spreads))}, {percent(max(spreads))} at most"
    if unsure:
        steady += "; raise --max-seconds"
    lines.append(f"{latency}, {bandwidth} (the median sample of a link: {steady})")
    group = leave_out(links, node_of_member, names, found)
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
    writer = "Software" if path.endswith(".png") else "Creator"  # the name of the entry, by format
    figure.savefig(path, dpi=150, metadata={writer: cli.GENERATOR})


def messages_of(args: argparse.Namespace, device: torch.device) -> Messages:
    cuda = device.type == "cuda"
    size = args.size or (2**28 if cuda else SUSTAINED_SIZE)
    ping_pongs = args.calls or (10 if cuda else 1)
    return Messages(size, args.latency_size, args.calls, ping_pongs)


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
    n = f"{messages.calls} per sample" if messages.calls else "for 50 ms per sample"
    return f"{how}; messages of {size} bytes (latency: {latency_size}), {n}"


def members_of(by: str, nodes: list[int]) -> list[list[int]]:
    """The ranks of each rank or node, as --by says. Raises ValueError. nodes: of each rank."""
    members = partition(by, nodes)
    if len(members) < 2:
        raise ValueError(f"a link needs two {by}s, and there is 1; e.g. --nproc-per-node 2")
    return members


def check_plot(path: str) -> None:
    """Raises ValueError if no heat map could be written, or if it would replace a file that is not
    one, before anything is measured."""
    if find_spec("matplotlib") is None:
        raise ValueError("it needs matplotlib, which is not installed; try pip install matplotlib")
    if Path(path).is_dir():
        raise ValueError(f"expected {PLOT}, and this is a folder")
    folder = Path(path).parent
    if not os.access(folder, os.W_OK):
        raise ValueError(f"expected a folder that can be written, got {folder}")
    cli.refuse_foreign(path)


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
        parts: dict[int | None, Case] = {}  # of the report: a case that was measured then
        for name, pairs, key in rounds:
            ranks, build, derive = round_of(pairs, members, messages, job)
            case = bench.measure(key, name, build, derive, ranks=ranks)
            if case and case.failed:
                bench.print(f"# {name}: {case.check}")
            links += links_of(case) if case else []
            if case and not case.failed:
                parts[case.part] = case
        others = bench.disturbed()
        if links:
            environment = bench.report.environment
            of_nodes, of_ranks = node_names(environment), rank_names(environment)
            of_members = of_nodes if args.by == "node" else of_ranks
            names = {"node": of_nodes, "rank": of_ranks, "link": of_members}
            bench.print(tables(links, of_members, args.by, bench.room))
            node_of_member = [nodes[ranks[0]] for ranks in members]
            if len(parts) > 1:  # the median over links would mix two states of the machine
                times = cli.cut([bench.mark(case) or "now" for case in parts.values()])
                bench.conclude([f"no link is judged: the rounds were measured {times}"])
            else:
                [measured] = parts.values()
                doubt = doubt_of(others, bench.records_load and not bench.mark(measured))
                lines = answer(links, node_of_member, args.by, args.sigmas, names, doubt)
                bench.conclude(lines, measured)
                found = named(links, node_of_member, args.by, args.sigmas, bool(doubt))
                bench.last_line["slow"] = outlined(found, node_of_member)
            if args.plot:
                try:
                    draw(links, len(members), args.plot)
                except (ImportError, OSError, ValueError) as error:
                    bench.fail(f"--plot {args.plot}: {error}")
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
