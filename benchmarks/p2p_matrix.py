#!/usr/bin/env python3
"""Which link, rank or node is the bad one? Latency and bandwidth between every pair of ranks.

All pairs meet once, in the rounds of a tournament: the disjoint pairs of a round at once, or one
pair at a time with --serial. Not timed: connecting, making buffers, the data check.

    latency         = time of a ping-pong of --latency-size bytes / 2
    a -> b          = size * n / (time of n sends and b's word that all have come)
    bidirectional   = 2 * size * n / (time of n exchanges, the slower of both ranks)
    Of the --blocks the fastest counts: what disturbs a link only adds time.
    slow            = above the median of its like (links within nodes, links between nodes) by
                      --sigmas median absolute deviations, and by 10 %; factor = how many times
    --by node       = rank i of one node with rank i of the other, all i at once; bandwidths
                      added, the largest latency

    torchrun --nproc-per-node 4 benchmarks/p2p_matrix.py
    torchrun --nproc-per-node 8 benchmarks/p2p_matrix.py --size 64M --plot links.png --json p2p.json
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        benchmarks/p2p_matrix.py --by node --json nodes.json

Written for this project. BSD-3-Clause.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import bandwidth, cli

SAMPLES_UP_TO = 32  # members; above, the report keeps the fastest blocks alone


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = cli.Parser(description=__doc__)
    add = parser.add_argument
    size = cli.as_type(bandwidth.parse_size)
    add("--size", type=size, default=2**20, metavar="SIZE", help="for bandwidth (default: 1M)")
    add("--latency-size", type=size, default=8, metavar="SIZE", help="(default: 8)")
    add("--by", choices=("rank", "node"), default="rank", help="(default: rank)")
    add("--serial", action="store_true", help="one pair at a time, instead of a round's at once")
    add("-n", "--iters", type=cli.positive_int, default=10, metavar="N", help="a block (10)")
    add("-w", "--warmup-iters", type=cli.positive_int, default=2, metavar="N", help="(default: 2)")
    add("--blocks", type=cli.positive_int, default=5, metavar="N", help="the fastest counts (5)")
    add("--sigmas", type=cli.positive_float, default=5.0, metavar="S", help="(default: 5)")
    add("--plot", metavar="PNG", help="write a heat map here")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: auto)")
    add("--distributed-backend", choices=cli.BACKENDS, help="(default: nccl on CUDA, CPU gloo)")
    cli.add_report_flags(
        parser, json=("-J", "--json", "--output-file"), timeout=("-T", "--timeout")
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    ARGS = parse_args()  # before the imports below, so that --help need not wait for them

import importlib.util
import os
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from common import links, patterns
from common.dist import CaseGroup, choose_device, world_from_environment
from common.link_report import all_links, plot, tables, verdicts
from common.links import Pair
from common.memory import available_bytes
from common.partition import ranks_by_node
from common.sweep import Outcome, Sweep, check_report_flags
from common.timing import Measurement

Members = list[tuple[int, ...]]  # of each rank or node that meets others: its ranks

# -- one pair --------------------------------------------------------------------------------------


def exchange(
    group: dist.ProcessGroup | None, peer: int, send: Any, recv: Any
) -> Callable[[], None]:
    """What sends and receives these buffers once, and waits; either may be None.

    In one batch, for which nccl takes the group's own communicator instead of one a pair.
    """
    ops = [dist.P2POp(dist.isend, send, group=group, group_peer=peer)] if send is not None else []
    if recv is not None:
        ops.append(dist.P2POp(dist.irecv, recv, group=group, group_peer=peer))

    def call() -> None:
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    return call


def sequences(
    group: dist.ProcessGroup | None, me: int, peer: int, args: argparse.Namespace, device: Any
) -> tuple[dict[str, list[Callable[[], None]]], torch.Tensor]:
    """For each phase the calls of one iteration on this rank, and of the end; where data comes."""
    big = torch.empty(args.size, dtype=torch.uint8, device=device)
    patterns.fill(big, patterns.tile(me, None, 1, torch.uint8))
    into = torch.empty_like(big)
    small, word = torch.zeros(2, max(1, args.latency_size), dtype=torch.uint8, device=device)
    there, back = exchange(group, peer, small, None), exchange(group, peer, None, word)
    out, come = exchange(group, peer, big, None), exchange(group, peer, None, into)
    both = exchange(group, peer, big, into)
    first = me < peer

    def ping() -> None:
        there() if first else back()
        back() if first else there()

    return (
        {
            "latency": [ping, lambda: None],
            "a -> b": [out, back] if first else [come, there],
            "b -> a": [come, there] if first else [out, back],
            "both": [both, lambda: None],
        },
        into,
    )


def run_round(
    pairs: list[Pair],
    members: Members,
    args: argparse.Namespace,
    device: torch.device,
    group: CaseGroup,
    progress: Callable[[str], None],
) -> Outcome:
    """Time this rank's pair of a round. Facts: its peer, and for each phase seconds a block."""
    me = dist.get_rank(group.test)
    token = torch.zeros(1, device=device)
    dist.all_reduce(token, group=group.test)  # connects all ranks, which a batch does not
    facts: dict[str, Any] = {}
    for slot in [[pair] for pair in pairs] if args.serial else [pairs]:
        met = [zip(members[a], members[b], strict=True) for a, b in slot]
        peers = {r: s for ranks in met for pair in ranks for r, s in (pair, pair[::-1])}
        peer = peers.get(me)
        calls = None
        if peer is not None:
            calls, into = sequences(group.test, me, peer, args, device)
            facts = {"peer": peer, "times": {name: [] for name in calls}}
        for name in ("latency", "a -> b", "b -> a", "both"):
            for block in range(args.blocks):
                progress(f"{slot[0]} ..., {name}, block {block + 1}")
                if calls is not None and block == 0:
                    _block(calls[name], args.warmup_iters, device)
                dist.barrier(group.together)
                if calls is not None:
                    facts["times"][name].append(_block(calls[name], args.iters, device))
        if calls is not None and peer is not None:
            progress("data check")
            patterns.blank(into)
            calls["both"][0]()
            facts["wrong"] = patterns.count_wrong(into, patterns.tile(peer, None, 1, torch.uint8))
    return Outcome(facts)


def _block(calls: list[Callable[[], None]], n: int, device: torch.device) -> float:
    """Seconds per iteration, the end included."""
    step, end = calls
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = perf_counter()
    for _ in range(n):
        step()
    end()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (perf_counter() - start) / n


# -- what rank 0 makes of it -----------------------------------------------------------------------


def derive(
    pairs: list[Pair], members: Members, args: argparse.Namespace, facts: list[Any]
) -> tuple[list[int], Any, dict[str, Any], str]:
    """A round's ranks, samples, links, and the verdict on its data. facts: of every rank."""
    found, ranks = [], []
    for a, b in pairs:
        latency, rates = 0.0, [0.0, 0.0, 0.0]
        for r, s in zip(members[a], members[b], strict=True):
            ranks += [r, s]
            mine, theirs = facts[r]["times"], facts[s]["times"]
            first, second = (mine, theirs) if r < s else (theirs, mine)
            latency = max(latency, min(first["latency"]) / 2)
            there, back = min(first["a -> b"]), min(second["b -> a"])  # the sender's clock
            if r > s:
                there, back = back, there
            both = min(map(max, zip(mine["both"], theirs["both"], strict=True)))
            for i, seconds in enumerate((there, back, both / 2)):
                rates[i] += args.size / seconds / 1e9
        found.append([a, b, *(float(f"{x:.4g}") for x in (latency * 1e6, *rates))])
    wrong = [rank for rank in ranks if facts[rank]["wrong"]]
    samples = None
    if len(members) <= SAMPLES_UP_TO:  # for each rank in a pair
        phases = ("latency", "a -> b", "b -> a", "both")
        rows = {name: np.array([facts[rank]["times"][name] for rank in ranks]) for name in phases}
        stop = {"rule": "blocks", "iterations": args.blocks * args.iters, "ci95_rel": None}
        samples = Measurement(rows, {}, [args.blocks], {}, stop)
    check = f"failed: wrong data came to rank {wrong[0]}" if wrong else "passed"
    return ranks, samples, {"links": found}, check


# -- the run ---------------------------------------------------------------------------------------


def check_args(args: argparse.Namespace) -> tuple[torch.device, str]:
    """Refuse what cannot run."""
    try:
        device, backend = choose_device(args.device, args.distributed_backend)
        world_size, local_world_size = world_from_environment()[1::2]
    except ValueError as error:
        cli.refuse(str(error))
    if world_size < 2:
        cli.refuse(
            "a link needs two ranks, and this is 1; "
            "start them: torchrun --nproc-per-node 2 benchmarks/p2p_matrix.py"
        )
    if args.size < 1 or args.latency_size < 1:
        cli.refuse("--size and --latency-size must be at least 1 byte; e.g. --size 1M")
    needed = 2 * args.size * (local_world_size if device.type == "cpu" else 1)
    available = available_bytes(device)
    if needed > available:
        cli.refuse(
            f"--size {bandwidth.show_size(args.size)} needs {needed:,} bytes of memory for two "
            f"buffers a rank, and {available:,} are free; give a smaller --size"
        )
    if args.plot is not None:
        folder = Path(args.plot).resolve().parent
        if not args.plot or Path(args.plot).is_dir() or not args.plot.lower().endswith(".png"):
            cli.refuse(f"--plot needs a file, e.g. --plot links.png, got '{args.plot}'")
        if not os.access(folder, os.W_OK):
            cli.refuse(f"--plot {args.plot}: cannot write in {folder}; make it first")
        if importlib.util.find_spec("matplotlib") is None:
            cli.refuse("--plot needs matplotlib; pip install matplotlib, or leave --plot out")
    check_report_flags(args, "p2p_matrix")
    return device, backend


def members_of(by: str, nodes: list[int]) -> Members:
    """The ranks of each member. Raises ValueError where nodes cannot meet."""
    if by == "rank":
        return [(rank,) for rank in range(len(nodes))]
    found = ranks_by_node(nodes)
    if len(found) < 2 or len({len(ranks) for ranks in found}) > 1:
        raise ValueError(
            "--by node needs at least two nodes with as many ranks each, and they have "
            f"{', '.join(str(len(ranks)) for ranks in found[:8])}; try --by rank"
        )
    return found


def main(args: argparse.Namespace) -> int:
    device, backend = check_args(args)
    with Sweep("p2p_matrix", args, device, backend) as sweep:
        nodes, members = sweep.nodes(), []
        try:
            members = members_of(args.by, nodes)
        except ValueError as error:
            sweep.refuse(str(error))
        nodes_of = [nodes[ranks[0]] for ranks in members]
        flags = ("size", "latency_size", "by", "serial", "iters", "blocks")
        rounds = links.round_count(len(members))
        keys = [
            {"round": i + 1, "rounds": rounds, "world_size": len(nodes)}
            | {name: getattr(args, name) for name in flags}
            | {"device": device.type, "backend": sweep.ctx.backend}
            for i in range(rounds)
        ]

        def summary() -> None:
            cases = [case for case in map(sweep.find_any, keys) if case is not None]
            found = all_links(cases)
            if not found:
                return
            hosts = [sweep.host_of(ranks[0]) for ranks in members]
            lines = verdicts(found, nodes_of, args, hosts) or [
                "no link, rank or node is slow beyond noise"
            ]
            sweep.say(tables(found, nodes_of, args))
            sweep.say("\n" + "\n".join(f"# {line}" for line in lines))
            if args.plot:
                plot(
                    found, len(members), args, f"{len(nodes)} ranks, {backend}, {args.size:,} bytes"
                )

        known = sweep.plan(keys, summary)
        how = "one pair at a time" if args.serial else "the pairs of a round at once"
        sweep.say(f"#\n# {rounds} rounds, {how}")
        everyone = tuple(range(len(nodes)))
        for i, (key, done) in enumerate(zip(keys, known, strict=True)):
            if done:
                continue
            pairs = links.pairs_of(len(members), i)  # all rounds at once would be every link
            label = f"round {i + 1} of {rounds}"

            def work(group: CaseGroup, pairs: list[Pair] = pairs) -> Outcome:
                return run_round(pairs, members, args, device, group, sweep.watch.phase)

            outcome = sweep.attempt(label, [everyone], work, keep_groups=True)
            if outcome is None:
                continue
            facts, _, error = outcome
            if error:
                ranks = sorted(rank for pair in pairs for m in pair for rank in members[m])
                sweep.keep(key, label, tuple(ranks), None, {}, f"failed: {error}")
                sweep.say(f"# {label}: failed: {error}")
            else:
                ranks, samples, metrics, check = derive(pairs, members, args, facts)
                sweep.keep(key, label, tuple(ranks), samples, metrics, check)
    return sweep.status


if __name__ == "__main__":
    sys.exit(record(main)(ARGS))
