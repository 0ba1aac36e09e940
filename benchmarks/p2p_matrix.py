#!/usr/bin/env python3
"""Which link, rank or node is the bad one? Latency and bandwidth between every pair of ranks.

All pairs meet once, in the rounds of a tournament. The pairs of a round meet at the same time, or
one after the other (--serial).

    latency         = time of a ping-pong of --latency-size bytes / 2
    a -> b          = size * n / (time of n sends and b's word that all have come)
    bidirectional   = 2 * size * n / time of n exchanges
    The fastest sample counts: what disturbs a link only adds time.
    slow            = costs 10 % and --sigmas median absolute deviations more than its like
    --by node       = rank i of one node with rank i of the other, all at once; bandwidths added
    The calls that are measured are in common/workloads/links.py.

    torchrun --nproc-per-node 4 benchmarks/p2p_matrix.py
    torchrun --nproc-per-node 8 benchmarks/p2p_matrix.py --plot links.png --json p2p.jsonl
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        benchmarks/p2p_matrix.py --by node --json nodes.jsonl

Written for this project. BSD-3-Clause.
"""

import argparse
import os
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch.distributed.elastic.multiprocessing.errors import record

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cli
from common.answers import series
from common.environment import count_of, node_of_each
from common.groups import share
from common.old import Benchmark
from common.report import Case
from common.workloads.links import (
    KINDS,
    Key,
    Link,
    Messages,
    Pair,
    directed,
    links_of,
    measure_round,
    rounds_of,
    slow_links,
)
from common.workloads.outliers import SIGMAS, sentences
from common.workloads.ranks import partition

LARGEST_MATRIX = 32  # members; of more only the worst links are printed
WORST = 20
FEW_LINKS = 3  # of fewer no median says which one is slow
PLOTS = (".png", ".svg", ".pdf")
PLOT = "a file that ends in .png, .svg or .pdf"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    size = cli.positive_size
    add("--size", type=size, metavar="SIZE", help="(default: 1M, on CUDA 256M)")
    add("--latency-size", type=size, default=8, metavar="SIZE", help="(default: 8)")
    calls = "in a sample (default: 10)"
    add("-n", "--calls", type=cli.positive_int, default=10, metavar="N", help=calls)
    add("--by", choices=("rank", "node"), default="rank", help="(default: rank)")
    add("--serial", action="store_true", help="one pair at a time, instead of a round's at once")
    add("--sigmas", type=cli.positive_float, default=SIGMAS, metavar="S", help="(default: 5)")
    drawn = cli.checked(str, lambda path: Path(path).suffix in PLOTS, PLOT, "e.g. links.png")
    add("--plot", type=drawn, metavar="PATH", help=f"draw a heat map: {PLOT}; needs matplotlib")
    cli.add_common_flags(parser, min_iters=6, max_seconds=0.5)
    args = parser.parse_args(argv)
    wants_cuda = args.device != "cpu" and torch.cuda.is_available()
    args.moved_to_cpu = args.backend == "gloo" and wants_cuda  # gloo sends no CUDA tensors
    if args.moved_to_cpu:
        args.device = "cpu"
    return args


def tables(links: list[Link], n: int, by: str) -> str:
    """The matrices of n members; if there are many, the worst links."""
    lines = []
    for kind, quantity in KINDS.items():
        lines.append(f"\n{kind} ({quantity.unit}), by {by}\n")
        values = directed(links, kind)
        if n <= LARGEST_MATRIX:
            lines += matrix_lines(matrix_of(values, n))
            continue
        ranked = sorted(values, key=lambda pair: values[pair], reverse=quantity.less_is_better)
        worst = ranked[:WORST]
        lines.append(f"worst {len(worst)} of {len(values)} links:")
        for a, b in worst:
            lines.append(f"  {a:>5} -> {b:<5} {values[a, b]:.4g}")
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


def matrix_lines(matrix: np.ndarray) -> list[str]:
    lines = [" " * 5 + "".join(f"{b:>9}" for b in range(len(matrix)))]
    for a, row in enumerate(matrix):
        line = f"{a:>4} "
        for value in row:
            line += f"{'-':>9}" if np.isnan(value) else f"{value:>9.4g}"
        lines.append(line)
    return lines


def answer(node_of_member: list[int], by: str, sigmas: float, cases: list[Case]) -> list[str]:
    """Who is slow, and the range of the links. node_of_member: the node of each rank or node."""
    members = len(node_of_member)
    among_these = []
    for case in cases:  # a resumed report may also have the rounds of others
        if case.key["by"] == by and case.key.get("members", members) == members:
            among_these.append(case)
    lines: list[str] = []
    for name, rounds in series(among_these, ("round",)).items():
        links = [link for case in rounds for link in links_of(case)]
        if not links:
            continue
        slow = sentences(slow_links(links, node_of_member, by, sigmas))
        if len(links) < FEW_LINKS:
            slow = [f"with {count_of(len(links), 'link')} nobody can tell what is slow"]
        healthy = "no link, rank or node is slow beyond noise"
        lines += [name + line for line in slow or [healthy]]
        latencies = [link.latency_us for link in links]
        rates = [rate for link in links for rate in (link.a_to_b, link.b_to_a)]
        latency = f"{min(latencies):.4g} to {max(latencies):.4g} us"
        lines.append(
            f"{name}latency {latency}, bandwidth {min(rates):.4g} to {max(rates):.4g} GB/s"
        )
    return lines


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
) -> list[tuple[Key, list[Pair]]]:
    """The key of each round, and the pairs of members that meet in it."""
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
    return [({"round": number} | fixed, pairs) for number, pairs in enumerate(rounds, 1)]


def settings(args: argparse.Namespace, messages: Messages) -> str:
    """What all rounds share, in words."""
    how = "one pair at a time" if args.serial else "the pairs of a round at once"
    size, latency_size = cli.show_size(messages.size), cli.show_size(messages.latency_size)
    return f"{how}; messages of {size} bytes (latency: {latency_size}), {messages.calls} a sample"


def members_of(args: argparse.Namespace, nodes: list[int]) -> list[list[int]]:
    """The ranks of each rank or node, as --by says. Raises ValueError. nodes: of each rank."""
    try:
        members = partition(args.by, nodes)
    except ValueError as error:
        raise ValueError(f"--by {args.by}: {error}") from error
    if len(members) < 2:
        raise ValueError(f"a link needs two {args.by}s, and there is 1; e.g. --nproc-per-node 2")
    return members


def why_no_plot(path: str) -> str | None:
    """Why no heat map could be written, as is known before anything is measured; else None."""
    if find_spec("matplotlib") is None:
        return "it needs matplotlib, which is not installed; try pip install matplotlib"
    if Path(path).is_dir():
        return f"expected {PLOT}, and this is a folder"
    folder = Path(path).parent
    if not os.access(folder, os.W_OK):
        return f"expected a folder that can be written, got {folder}"
    return None


def main() -> int:
    args = parse_args()
    with Benchmark("p2p_matrix", args) as bench:
        job, nodes = bench.job, node_of_each(bench.report.environment)
        if args.moved_to_cpu:
            bench.print("# gloo sends no CUDA tensors: these are the links of the CPU")
        if args.plot and (problem := share(why_no_plot(args.plot) if job.rank == 0 else None)):
            bench.refuse(f"--plot {args.plot}: {problem}")
        try:
            members = members_of(args, nodes)
        except ValueError as error:
            bench.refuse(str(error))
        messages = messages_of(args, job.device)
        rounds = plan(args, messages, len(members))
        bench.announce([key for key, _ in rounds])
        bench.print(f"\n# {len(rounds)} rounds, {settings(args, messages)}")
        node_of_member = [nodes[ranks[0]] for ranks in members]
        bench.answer = partial(answer, node_of_member, args.by, args.sigmas)
        links = list[Link]()  # on rank 0
        for key, pairs in rounds:
            links += measure_round(bench, key, pairs, members, messages)
        if links:
            bench.print(tables(links, len(members), args.by))
            if args.plot:
                try:
                    draw(links, len(members), args.plot)
                except (ImportError, OSError, ValueError) as error:
                    bench.fail(f"--plot {args.plot}: {error}")
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
