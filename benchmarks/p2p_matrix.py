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
import itertools
import sys
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cli, patterns
from common.benchmark import Benchmark, Workload
from common.dist import Group, Job
from common.environment import node_of_each, partition
from common.memory import too_much
from common.report import Case
from common.timing import Step, cuda_graph

Pair = tuple[int, int]  # of members: ranks or nodes
Link = tuple[Any, ...]  # a, b, latency in us, a -> b, b -> a, both in GB/s

# what is measured: where a Link has it (of a -> b, of b -> a), unit, whether less is better
KINDS = {
    "latency": ((2, 2), "us", True),
    "bandwidth, row sends to column": ((3, 4), "GB/s", False),
    "bidirectional bandwidth": ((5, 5), "GB/s", False),
}
MARGIN = 0.10  # slower by less is not reported, however quiet the machine
MAD_TO_SIGMA = 1.4826  # a median absolute deviation is a standard one, where noise is normal
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
    add("--sigmas", type=cli.positive_float, default=5.0, metavar="S", help="(default: 5)")
    add("--plot", metavar="PATH", help="draw a heat map: .png, .svg or .pdf; needs matplotlib")
    cli.add_common_flags(parser, min_iters=6, max_seconds=0.5)
    return parser.parse_args()


# -- one pair --------------------------------------------------------------------------------------


def build(
    meetings: dict[int, tuple[int, bool]], args: argparse.Namespace, job: Job, group: Group
) -> Workload:
    """This rank's part in a round. meetings: of each rank its peer, and whether it is the first."""
    peer, first = meetings[job.rank]
    big = torch.empty(args.size, dtype=torch.uint8, device=job.device)
    patterns.fill(big, patterns.tile(job.rank))
    into = torch.empty_like(big)
    small, word = torch.zeros(2, max(1, args.latency_size), dtype=torch.uint8, device=job.device)
    to_peer = partial(dist.P2POp, group=group.test, group_peer=group.ranks.index(peer))
    out, come = to_peer(dist.isend, big), to_peer(dist.irecv, into)
    ping, pong = to_peer(dist.isend, small), to_peer(dist.irecv, word)

    def batches(*some: list[dist.P2POp]) -> Step:
        """One after the other. Each is one kernel of NCCL, and all are one graph on CUDA, since
        the host takes longer to launch a call than the link to carry it."""

        def step() -> None:
            for batch in some:
                for work in dist.batch_isend_irecv(batch):
                    work.wait()

        return cuda_graph(step, job.device) if job.device.type == "cuda" else step

    n = args.calls
    send, receive = batches([out] * n, [pong]), batches([come] * n, [ping])
    steps = {
        "both": batches(*[[out, come]] * n),
        "there": send if first else receive,
        "back": receive if first else send,
        "latency": batches(*([[ping], [pong]] if first else [[pong], [ping]]) * n),
    }

    def wrong() -> int:
        patterns.blank(into)
        dist.barrier(group.control)
        steps["both"]()
        return patterns.count_wrong(into, patterns.tile(peer))

    return Workload(steps, facts=wrong)


def derive(
    pairs: list[Pair], members: list[list[int]], args: argparse.Namespace, case: Case, facts: Any
) -> None:
    """The links of a round. Of a sample the slower rank counts, of the samples the fastest."""
    links: list[Link] = []
    for a, b in pairs:
        slowest, rates = 0.0, np.zeros(3)
        for pair in zip(members[a], members[b], strict=True):
            rows = [case.ranks.index(rank) for rank in pair]
            seconds = {
                step: float(np.max([samples[row] for row in rows], axis=0).min()) / args.calls
                for step, samples in case.samples_s.items()
            }
            slowest = max(slowest, seconds["latency"] / 2)
            times = [seconds["there"], seconds["back"], seconds["both"] / 2]
            rates += args.size / np.array(times) / 1e9
        links.append((a, b, *(float(f"{x:.4g}") for x in (slowest * 1e6, *rates))))
    case.metrics["links"] = links
    wrong = [rank for rank, count in zip(case.ranks, facts, strict=True) if count]
    case.check = f"failed: wrong data came to rank {wrong[0]}" if wrong else "passed"


def pairs_of(n: int, number: int) -> list[Pair]:
    """The pairs of one round, from 0, of a tournament of n: in n - 1 + n % 2 rounds all meet once.

    The circle method: one seat stays, the others move on by one place a round. Of an odd number
    one in turn has nobody to meet.
    """
    last = n - 1 + n % 2
    seats = [0, *((place - number) % last + 1 for place in range(last))]
    pairs = ((seats[i], seats[last - i]) for i in range((last + 1) // 2))
    return [(min(pair), max(pair)) for pair in pairs if max(pair) < n]


# -- who is slow -----------------------------------------------------------------------------------


def directed(links: list[Link], kind: str) -> dict[Pair, float]:
    """(sender, receiver) -> value; once where there is no direction."""
    there, back = KINDS[kind][0]
    found: dict[Pair, float] = {(link[0], link[1]): link[there] for link in links}
    return found | ({(link[1], link[0]): link[back] for link in links} if back != there else {})


def outliers(costs: dict[Any, float], sigmas: float) -> dict[Any, tuple[float, float]]:
    """What costs more than the median by `sigmas` deviations and MARGIN -> factor, deviations.

    The deviation is the median absolute one, scaled: the few that are slow move neither (Hampel
    1974, "The influence curve and its role in robust estimation"). Under 3 nothing is compared.
    """
    if len(costs) < 3:
        return {}
    middle = median(costs.values())
    deviation = MAD_TO_SIGMA * median(abs(cost - middle) for cost in costs.values())
    far = {name: (cost - middle) / max(deviation, 1e-300) for name, cost in costs.items()}
    slow = [n for n, cost in costs.items() if cost > middle * (1 + MARGIN) and far[n] > sigmas]
    return {n: (costs[n] / middle, far[n]) for n in sorted(slow, key=lambda n: -costs[n])}


def verdicts(links: list[Link], node_of: list[int], by: str, sigmas: float) -> list[str]:
    """A line for each node, rank and link that is slower than its like.

    A node is named before its ranks, a rank before its links: what they explain is not repeated.
    node_of: the node of each member.
    """
    lines = []
    levels = {"node": node_of} | ({"rank": list(range(len(node_of)))} if by == "rank" else {})
    for kind, place in itertools.product(KINDS, ("within nodes", "between nodes")):
        costs = {
            (a, b): value if KINDS[kind][2] else 1 / value
            for (a, b), value in directed(links, kind).items()
            if (node_of[a] == node_of[b]) == (place == "within nodes")
        }
        words = f"{kind.partition(',')[0]} {{:.2f}}x the median's time {place}, {{:.0f}} sigmas"
        for level, owner in levels.items():
            of: dict[int, list[float]] = {}
            for (a, b), cost in costs.items():
                for member in {owner[a], owner[b]}:
                    of.setdefault(member, []).append(cost)
            slow = outliers({member: median(some) for member, some in of.items()}, sigmas)
            lines += [f"slow {level} {name}: {words.format(*far)}" for name, far in slow.items()]
            costs = {p: c for p, c in costs.items() if not {owner[p[0]], owner[p[1]]} & {*slow}}
        for (a, b), far in outliers(costs, sigmas).items():
            lines.append(f"slow link {a} -> {b}: {words.format(*far)}")
    return lines


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


def main() -> int:
    args = parse_args()
    moved = args.backend == "gloo" and args.device != "cpu" and torch.cuda.is_available()
    args.device = "cpu" if moved else args.device
    with Benchmark("p2p_matrix", args) as bench:
        job, nodes = bench.job, node_of_each(bench.share(bench.report.environment))
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
        rounds = [pairs_of(n, number) for number in range(n - 1 + n % 2)]
        if args.serial:
            rounds = [[pair] for pairs in rounds for pair in pairs]
        names = ("size", "latency_size", "calls", "by", "serial")
        fixed = {"rounds": len(rounds)} | {name: getattr(args, name) for name in names}
        fixed |= {"world_size": job.world_size, "device": job.device.type, "backend": job.backend}
        how = "one pair at a time" if args.serial else "the pairs of a round at once"
        bench.print(f"\n# {len(rounds)} rounds, {how}")
        links: list[Link] = []
        for number, pairs in enumerate(rounds, 1):
            meetings: dict[int, tuple[int, bool]] = {}
            for a, b in pairs:
                for r, s in zip(members[a], members[b], strict=True):
                    meetings |= {r: (s, True), s: (r, False)}
            work = partial(build, meetings, args, job)
            made = partial(derive, pairs, members, args)
            case = bench.measure({"round": number} | fixed, work, made, sorted(meetings))
            if case and case.failed:
                bench.print(f"# round {number}: {case.check}")
            links += case.metrics.get("links", []) if case else []
        if links:
            node_of = [nodes[ranks[0]] for ranks in members]
            slow = verdicts(links, node_of, args.by, args.sigmas)
            lines = slow or ["no link, rank or node is slow beyond noise"]
            bench.print(tables(links, node_of, args.by))
            bench.print("\n" + "\n".join(f"# {line}" for line in lines))
        if links and args.plot:
            try:  # what draws is no part of measuring
                from analysis.report import link_heatmap

                link_heatmap(bench.report, args.plot)
            except (ImportError, OSError, ValueError) as error:
                bench.fail(f"--plot {args.plot}: {error}")
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
