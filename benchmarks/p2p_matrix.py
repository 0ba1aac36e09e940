#!/usr/bin/env python3
"""Which link, rank or node is the bad one? Latency and bandwidth between every pair of ranks.

All pairs meet once, in the rounds of a tournament: the disjoint pairs of a round at once, or one
pair at a time with --serial. Not timed: connecting, making buffers, the check of the data.

    latency         = time of a ping-pong of --latency-size bytes / 2
    a -> b          = size * n / (time of n sends and b's word that all have come)
    bidirectional   = 2 * size * n / time of n exchanges
    Of the samples the fastest counts: what disturbs a link only adds time.
    slow            = above the median of its like (links within nodes, links between nodes) by
                      --sigmas median absolute deviations, and by 10 %; factor = how many times
    --by node       = rank i of one node with rank i of the other, all i at once; bandwidths
                      added, the largest latency

    torchrun --nproc-per-node 4 benchmarks/p2p_matrix.py
    torchrun --nproc-per-node 8 benchmarks/p2p_matrix.py --plot links.png --json p2p.jsonl
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        benchmarks/p2p_matrix.py --by node --json nodes.jsonl

Written for this project. BSD-3-Clause. docs/p2p_matrix.md shows how to read the output.
"""

import argparse
import sys
from pathlib import Path
from statistics import median

import torch
from torch.distributed.elastic.multiprocessing.errors import record

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cli
from common.benchmark import Benchmark
from common.dist import node_of_each, partition
from common.links import KINDS, Link, Messages, directed, measure_round, rounds_of, slow_links
from common.memory import too_much
from common.outliers import SIGMAS, sentences

LARGEST_MATRIX = 32  # members; above, the worst links and the medians of nodes are printed
WORST = 20


def parse_args() -> argparse.Namespace:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("--size", type=cli.size, metavar="SIZE", help="(default: 1M, on CUDA 256M)")
    add("--latency-size", type=cli.size, default=8, metavar="SIZE", help="(default: 8)")
    add("-n", "--calls", type=cli.positive_int, default=10, metavar="N", help="in a sample (10)")
    add("--by", choices=("rank", "node"), default="rank", help="(default: rank)")
    add("--serial", action="store_true", help="one pair at a time, instead of a round's at once")
    add("--sigmas", type=cli.positive_float, default=SIGMAS, metavar="S", help="(default: 5)")
    add("--plot", metavar="PATH", help="draw a heat map: .png, .svg or .pdf; needs matplotlib")
    cli.add_common_flags(parser, min_iters=6, max_seconds=0.5)
    return parser.parse_args()


# -- what is printed -------------------------------------------------------------------------------


def tables(links: list[Link], node_of: list[int], by: str) -> str:
    """The matrices; of many members the worst links and each node's median."""
    n, lines = len(node_of), []
    for kind, (_, unit, less) in KINDS.items():
        lines.append(f"\n{kind} ({unit}), by {by}\n")
        values = directed(links, kind)
        if n <= LARGEST_MATRIX:
            full = {pair[::-1]: value for pair, value in values.items()} | values
            lines.append(" " * 5 + "".join(f"{b:>9}" for b in range(n)))
            for a in range(n):
                row = (f"{full[a, b]:>9.4g}" if (a, b) in full else f"{'-':>9}" for b in range(n))
                lines.append(f"{a:>4} {''.join(row)}")
            continue
        worst = sorted(values, key=lambda pair: values[pair] * (-1 if less else 1))[:WORST]
        lines.append(f"worst {WORST} of {len(values)} links:")
        lines += [f"  {a:>5} -> {b:<5} {values[a, b]:.4g}" for a, b in worst]
        lines.append("median of each node's links, within it and to others:")
        for node in sorted(set(node_of)):
            parts: dict[bool, list[float]] = {True: [], False: []}
            for (a, b), value in values.items():
                if node in (node_of[a], node_of[b]):
                    parts[node_of[a] == node_of[b]].append(value)
            cells = (f"{median(some):.4g}" if some else "-" for some in parts.values())
            lines.append(f"  node {node:<5} {'  '.join(cells)}")
    return "\n".join(lines)


# -- the run ---------------------------------------------------------------------------------------


def main() -> int:
    args = parse_args()
    moved = args.backend == "gloo" and args.device != "cpu" and torch.cuda.is_available()
    args.device = "cpu" if moved else args.device
    with Benchmark("p2p_matrix", args) as bench:
        job, nodes = bench.job, node_of_each(bench.share(bench.report.environment))
        links: list[Link] = []
        if moved:
            bench.print("# gloo sends no CUDA tensors: these are the links of the CPU")
        args.size = args.size or (2**28 if job.device.type == "cuda" else 2**20)
        try:
            members = partition(args.by, nodes)
        except ValueError as error:
            bench.refuse(f"--by {args.by}: {error}")
        n = len(members)
        few = f"a link needs two {args.by}s, and there is 1; e.g. torchrun --nproc-per-node 2"
        if text := bench.share(few if n < 2 else too_much(2 * args.size, job, "--size")):
            bench.refuse(text)
        rounds = rounds_of(n)
        if args.serial:
            rounds = [[pair] for pairs in rounds for pair in pairs]
        names = ("size", "latency_size", "calls", "by", "serial")
        fixed = {"rounds": len(rounds)} | {name: getattr(args, name) for name in names}
        fixed |= {"world_size": job.world_size, "device": job.device.type, "backend": job.backend}
        how = "one pair at a time" if args.serial else "the pairs of a round at once"
        bench.print(f"\n# {len(rounds)} rounds, {how}")
        messages = Messages(args.size, args.latency_size, args.calls)
        for number, pairs in enumerate(rounds, 1):
            key = {"round": number} | fixed
            links += measure_round(bench, key, pairs, members, messages)
        if links:
            node_of = [nodes[ranks[0]] for ranks in members]
            slow = slow_links(links, node_of, args.by, args.sigmas)
            lines = sentences(slow) or ["no link, rank or node is slow beyond noise"]
            bench.print(tables(links, node_of, args.by))
            bench.print("\n" + "\n".join(f"# {line}" for line in lines))
        if args.plot and links:
            try:  # what draws is no part of measuring
                from analysis.report import link_heatmap

                link_heatmap(bench.report, args.plot)
            except (ImportError, OSError, ValueError) as error:
                bench.fail(f"--plot {args.plot}: {error}")
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
