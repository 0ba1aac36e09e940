#!/usr/bin/env python3
"""Which link, rank or node is slow? Latency and bandwidth between every pair of ranks.

Every pair is measured once, in the rounds of a round-robin tournament. The pairs of a round
exchange messages at the same time, or one pair after the other with --serial.

    latency         = time of a ping-pong of --latency-size bytes / 2. The fastest sample counts,
                      since disturbances only add time
    a -> b          = size * n / (time of n messages from a to b and one reply)
    bidirectional   = 2 * size * n / time of n exchanges
    n               = number of consecutive messages per sample: by default, as many as take 50 ms.
                      The slowest block counts, because it shows the sustained bandwidth; a switch
                      may allow short bursts above it
    +-%             = distance from the median sample to the farther end of its 95% interval: how
                      steady the link is
    slow            = takes longer than the median of its peers by 10% and by --sigmas robust
                      standard deviations (1.4826 times the median absolute deviation). If other
                      processes use more than a tenth of the cores, or if their CPU use is unknown
                      (ab.py --interleave, --resume), only a factor of more than 5 is reported.
                      If ranks share cores, only a factor of more than 5 * ranks / cores, in two
                      measurements, among at least 6 links, ranks or nodes
    group           = a set of nodes (or of ranks on a single node); it sustains the bandwidth of
                      its slowest link. The last line reports the largest group whose bandwidth is
                      within 10% of that of the median link. The search is exact for up to 12 nodes
                      (12 ranks on a single node), and greedy beyond
    --by node       = rank i of one node exchanges messages with rank i of the other, for all i at
                      the same time; their bandwidths are added

The calls that are timed are in benchmarks/workloads/links.py.

    torchrun --nproc-per-node 4 benchmarks/p2p_matrix.py
    torchrun --nproc-per-node 8 benchmarks/p2p_matrix.py --plot links.png --json p2p.jsonl
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        benchmarks/p2p_matrix.py --by node --json nodes.jsonl

Written for this project. BSD-3-Clause.
"""

import argparse
import itertools
import sys
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import cli, exits

exits.report_missing_packages()

import numpy as np
import torch
from torch.distributed.elastic.multiprocessing.errors import record

from benchmarks.workloads import network
from benchmarks.workloads.links import (
    KINDS,
    SUSTAINED_SIZE,
    Link,
    Messages,
    Pair,
    crowd_of,
    directed,
    links_of,
    round_of,
    rounds_of,
    slow_links,
)
from benchmarks.workloads.outliers import (
    MARGIN,
    SIGMAS,
    Component,
    Crowd,
    Findings,
    Names,
    beyond,
    in_both,
    sentences,
)
from benchmarks.workloads.ranks import partition
from common.stats import significant
from common.table import percent
from harness.benchmark import LOAD_UNKNOWN, Benchmark, Key, Planned, flag_for_more, folded
from harness.cpu_load import Others
from harness.environment import count_of, node_names, node_of_each, rank_names
from harness.report import Case
from readers import files

LARGEST_MATRIX = 32  # members; with more, only the worst links are printed
WORST = 20  # number of links that are printed then
FEW_LINKS = 3  # with fewer links it is impossible to tell which one is slow
EXACT = 12  # up to this number of nodes or ranks, all groups are examined
UNSURE = 0.5  # half-width of an interval, as a fraction of the median, beyond which it is too wide
NOT_JUDGED = "no verdict on slow links, ranks or nodes"
PLOTS = (".png", ".svg", ".pdf")
PLOT = "a file that ends in .png, .svg or .pdf"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    size = cli.positive_size
    add(
        "--size",
        type=size,
        metavar="SIZE",
        help="message size for bandwidth (default: 4M; 256M on CUDA)",
    )
    add(
        "--latency-size",
        type=size,
        default=8,
        metavar="SIZE",
        help="message size for latency (default: 8)",
    )
    add(
        "-n",
        "--calls",
        type=cli.positive_int,
        metavar="N",
        help="messages per sample, and ping-pongs (default: as many messages as take 50 ms)",
    )
    add(
        "--by",
        choices=("rank", "node"),
        default="rank",
        help="measure links between ranks or between nodes (default: rank)",
    )
    add("--serial", action="store_true", help="measure one pair at a time")
    add(
        "--sigmas",
        type=cli.positive_float,
        default=SIGMAS,
        metavar="S",
        help="robust standard deviations above the median that count as slow (default: 5)",
    )
    plot = cli.checked(str, lambda path: Path(path).suffix in PLOTS, PLOT, "e.g. links.png")
    add("--plot", type=plot, metavar="PATH", help=f"draw heat maps: {PLOT}; requires matplotlib")
    network.add_flag(parser)
    cli.add_common_flags(parser, min_iters=6, max_seconds=2)
    args = parser.parse_args(argv)
    # gloo does not send CUDA tensors
    args.moved_to_cpu = args.backend == "gloo" and cli.on_cuda(args.device)
    if args.moved_to_cpu:
        args.device = "cpu"
    return args


# -- rounds ----------------------------------------------------------------------------------------


def messages_of(args: argparse.Namespace, device: torch.device) -> Messages:
    cuda = device.type == "cuda"
    size = args.size or (2**28 if cuda else SUSTAINED_SIZE)
    ping_pongs = args.calls or (10 if cuda else 1)
    return Messages(size, args.latency_size, args.calls, ping_pongs)


def members_of(by: str, nodes: list[int]) -> list[list[int]]:
    """The ranks of each member, i.e. of each rank or node, depending on --by. nodes: the node of
    each rank. Raises ValueError if there is only one member."""
    members = partition(by, nodes)
    if len(members) < 2:
        raise ValueError(
            f"at least two {by}s are required, got 1; e.g. torchrun --nproc-per-node 2"
        )
    return members


def plan(
    args: argparse.Namespace, messages: Messages, members: int
) -> list[tuple[str, list[Pair], Key]]:
    """The name, the pairs of members and the key of each round."""
    rounds = rounds_of(members)
    if args.serial:
        rounds = [[pair] for pairs in rounds for pair in pairs]
    fixed = {
        "size": messages.size,
        "latency_size": messages.latency_size,
        "calls": messages.calls,
        "by": args.by,
        "serial": args.serial,
        # the ranks do not identify the pairs: 3 nodes of 4 and 4 nodes of 3 have the same number
        "rounds": len(rounds),
        "members": members,
    }
    return [(f"round {n}", pairs, {"round": n} | fixed) for n, pairs in enumerate(rounds, 1)]


def settings(args: argparse.Namespace, messages: Messages) -> str:
    """The settings that all rounds share, in words."""
    how = "one pair at a time" if args.serial else "all pairs of a round at the same time"
    size, latency_size = cli.show_size(messages.size), cli.show_size(messages.latency_size)
    n = f"{messages.calls} per sample" if messages.calls else "for 50 ms per sample"
    return f"{how}; messages of {size} bytes (latency: {latency_size}), {n}"


# -- slow links, and the group without them --------------------------------------------------------


def slow_components(
    links: list[Link], node_of_member: list[int], by: str, sigmas: float
) -> Findings:
    """The slow links, ranks and nodes; none with few links."""
    return slow_links(links, node_of_member, by, sigmas) if len(links) >= FEW_LINKS else {}


def doubt_of(others: Others | None, is_load_known: bool) -> str:
    """Why a small difference is no evidence; "" if it is evidence.

    others: the CPU use of other processes, if it was high. is_load_known: False for links of an
    earlier run, and while ab.py alternates between commands.
    """
    if not is_load_known:
        return LOAD_UNKNOWN
    return f"other processes used {others.busy:.1f} of {others.cores} cores" if others else ""


def highlighted(findings: Findings, node_of_member: list[int]) -> list[dict[str, Any]]:
    """The findings as analysis/report.py outlines them in its heat maps: the two members of a slow
    link, or the members whose links are all slow."""
    rows: list[dict[str, Any]] = []
    for component, what in findings:
        for members in component.suspects:
            if component.level == "link":
                rows.append({"what": what, "link": list(members)})
                continue
            owner = node_of_member if component.level == "node" else range(len(node_of_member))
            rows.append({"what": what, "members": [m for m, x in enumerate(owner) if x in members]})
    return rows


def rates_between(links: list[Link], owner: list[int]) -> dict[Pair, float]:
    """The lowest bandwidth between two nodes (or ranks), in either direction. owner: the node (or
    rank) of each member."""
    rates: dict[Pair, float] = {}
    for link in links:
        a, b = sorted((owner[link.a], owner[link.b]))
        if a != b and link.a_to_b is not None and link.b_to_a is not None:
            rate = min(link.a_to_b, link.b_to_a)
            rates[a, b] = min(rate, rates.get((a, b), rate))
    return rates


def group_bandwidth(group: Sequence[int], rates: dict[Pair, float]) -> float:
    """The bandwidth of the slowest link of a group; 0 if a link was not measured."""
    return min(rates.get(pair, 0.0) for pair in itertools.combinations(group, 2))


def largest_group(count: int, rates: dict[Pair, float], least: float) -> list[int]:
    """The largest group of the owners 0 to count - 1 that sustains the bandwidth `least`. Of
    several such groups, the fastest one.

    Beyond EXACT owners the search is greedy, so the group may be too small: as long as a link is
    below `least`, it removes the end of the slowest link that has more such links.
    """
    group = list(range(count))
    if count <= EXACT:
        for size in range(count, 2, -1):
            groups = itertools.combinations(group, size)
            best = max(groups, key=lambda members: group_bandwidth(members, rates))
            if group_bandwidth(best, rates) >= least:
                return list(best)
        fastest: Pair = max(rates, key=lambda pair: rates[pair])
        return list(fastest)
    while len(group) > 2 and group_bandwidth(group, rates) < least:
        pairs = list(itertools.combinations(group, 2))
        below = [pair for pair in pairs if rates.get(pair, 0.0) < least]
        worst = min(below, key=lambda pair: rates.get(pair, 0.0))
        group.remove(max(worst, key=lambda member: sum(member in pair for pair in below)))
    return group


def leave_out(
    links: list[Link], node_of_member: list[int], names: Names, findings: Findings
) -> str | None:
    """`without node3: 7 nodes sustain 380.0 GB/s, all 8 nodes sustain 94.00 GB/s`; None for a
    single pair of nodes or ranks.

    Only nodes or ranks in the findings are left out, either by themselves or as an end of a link.
    """
    level, owner = "node", node_of_member
    if max(node_of_member) == 0:
        level, owner = "rank", list(range(len(node_of_member)))
    count, rates = max(owner) + 1, rates_between(links, owner)
    if count < 3 or not rates:
        return None
    suspects = set()
    for component, _ in findings:
        for members in component.suspects:
            is_owner = component.level == level
            suspects |= set(members) if is_owner else {owner[member] for member in members}
    group = largest_group(count, rates, median(rates.values()) / (1 + MARGIN))
    left = [number for number in range(count) if number not in group]

    def sustained_by(members: Sequence[int]) -> str:
        rate = significant(group_bandwidth(members, rates))
        return f"{len(members)} {level}s sustain {rate} GB/s"

    of_all = f"all {sustained_by(range(count))}"
    if not left or not suspects.issuperset(left):
        return of_all
    without = cli.cut([names[level][number] for number in left])
    return f"without {without}: {sustained_by(group)}, {of_all}"


# -- tables and heat maps --------------------------------------------------------------------------


def tables(links: list[Link], names: Sequence[str], by: str, room: int | None) -> str:
    """The matrices. If they do not fit into `room` characters, the worst links instead.

    names: the name of each member. The heading of a column is the name of a node, or the number of
    a rank.
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
            lines.append(f"  {names[a]} -> {names[b]}  {formatted(values[a, b])}")
    if fits and by == "rank" and (places := ranks_of_nodes(names)):
        lines.append(f"\n{places}")
    return "\n".join(lines)


def ranks_of_nodes(names: Sequence[str]) -> str:
    """`ranks 0 to 7 on node1, 8 to 15 on node2`; "" for a single node. names: `rank 0 on node1`."""
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
    """A row for each sender, a column for each receiver; nan if a link was not measured. Without a
    direction the matrix is symmetric."""
    matrix = np.full((n, n), np.nan)
    for (a, b), value in values.items():
        matrix[a, b] = value
        if (b, a) not in values:
            matrix[b, a] = value
    return matrix


def matrix_lines(matrix: np.ndarray, heads: Sequence[str], width: int) -> list[str]:
    """A line for each sender. heads: of the rows and columns. width: of a column, in characters."""
    first = max(4, *map(len, heads))
    lines = [" " * (first + 1) + "".join(f"{head:>{width}}" for head in heads)]
    for head, row in zip(heads, matrix, strict=True):
        lines.append(f"{head:>{first}} " + "".join(f"{formatted(value):>{width}}" for value in row))
    return lines


def formatted(value: float) -> str:
    """A value of a link, with four significant digits. Infinity is an interval over 100%."""
    if np.isnan(value):
        return "-"
    return significant(value) if np.isfinite(value) else ">100"


def check_plot(path: str) -> None:
    """Raises ValueError before the measurement if matplotlib is missing, or if the heat maps would
    replace a file of another program."""
    if find_spec("matplotlib") is None:
        raise ValueError("requires matplotlib, which is not installed; try pip install matplotlib")
    files.refuse_foreign(path)


def draw(links: list[Link], members: int, path: str) -> None:
    """Draw a heat map of each matrix; yellow is good. Only this function requires matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.2), layout="constrained")
    ticks = range(0, members, 1 + members // 16)
    for ax, (kind, quantity) in zip(figure.subplots(1, len(KINDS)), KINDS.items(), strict=True):
        matrix = matrix_of(directed(links, kind), members)
        image = ax.imshow(matrix, cmap="viridis_r" if quantity.less_is_better else "viridis")
        ax.set(title=f"{kind} ({quantity.unit})", xlabel="receiver", ylabel="sender")
        ax.set(xticks=ticks, yticks=ticks)
        figure.colorbar(image, ax=ax, shrink=0.7)
    writer = "Software" if path.endswith(".png") else "Creator"  # metadata key of the file format
    figure.savefig(path, dpi=150, metadata={writer: files.GENERATOR})


# -- the answer ------------------------------------------------------------------------------------


def is_unsteady(link: Link, limit: float = UNSURE) -> bool:
    """Whether the times of a link are too uncertain to judge the link by itself. limit: of the
    drift of a link with too few samples for an interval."""
    if link.spread is None:
        return link.drift is None or link.drift > limit
    return max(link.spread, link.drift or 0.0) > UNSURE


def are_unsteady(links: Sequence[Link], limit: float = UNSURE) -> bool:
    """Whether most of these links are unsteady. The others show how a typical link scatters."""
    return 2 * sum(is_unsteady(link, limit) for link in links) > len(links)


def links_of_component(
    links: Sequence[Link], node_of_member: list[int], component: Component
) -> list[Link]:
    """The links of a node or a rank, or the link itself; of both suspects if there are two."""
    chosen = []
    for link in links:
        ends = {link.a, link.b}
        owners = {node_of_member[end] for end in ends} if component.level == "node" else ends
        for members in component.suspects:
            if owners >= set(members):
                chosen.append(link)
                break
    return chosen


def range_of(values: Sequence[float]) -> str:
    """`20.5 to 60`; one number if both ends are printed alike."""
    ends = dict.fromkeys(significant(end) for end in (min(values), max(values)))
    return " to ".join(ends)


def answer(
    links: list[Link],
    node_of_member: list[int],
    found: Findings,
    names: Names,
    more: str,
    doubt: str = "",
    crowd: Crowd | None = None,
) -> list[str]:
    """The slow components, the ranges over all links, and the group without slow members.

    node_of_member: the node of each member. found: the slow components. names: of nodes, of ranks
    and of the ends of links. more: the flag for more samples. doubt: see `doubt_of`. crowd: a host
    where ranks share cores.
    """
    lines = [
        f"possibly {line}"
        if are_unsteady(links_of_component(links, node_of_member, one), MARGIN)
        else line
        for (one, _), line in zip(found, sentences(found, names), strict=True)
    ]
    spreads = [link.spread for link in links if link.spread is not None]
    unsteady, unsure = [*filter(is_unsteady, links)], are_unsteady(links)
    if len(links) < FEW_LINKS:
        few = count_of(len(links), "link")
        lines = [f"with {few} it is impossible to tell which link, rank or node is slow"]
    elif not lines and crowd:
        lines = [f"it cannot be told which link, rank or node is slow: {crowd.text}"]
    elif not lines and (doubt or unsure):
        lines = [f"{NOT_JUDGED}: {doubt or f'the links are too unsteady; try {more}'}"]
    elif not lines and unsteady:
        count = f"{len(unsteady)} of {count_of(len(links), 'link')}"
        lines = [
            f"no link, rank or node is significantly slower; too unsteady to be judged: {count}"
        ]
    lines = lines or ["no link, rank or node is significantly slower than its peers"]
    latencies = [link.latency_us for link in links]
    rates = [rate for link in links for rate in (link.a_to_b, link.b_to_a) if rate is not None]
    latency = f"latency {range_of(latencies)} us"
    bandwidth = f"bandwidth {range_of(rates)} GB/s"
    steady = "no interval"
    if spreads:
        steady = f"median {percent(median(spreads))}, maximum {percent(max(spreads))}"
        if missing := len(links) - len(spreads):
            steady += f", {count_of(missing, 'link')} without an interval"
    if unsteady and not (doubt or crowd):  # whose remedy is another one
        steady += f"; try {more}"
    lines.append(f"{latency}, {bandwidth} (uncertainty of a link: {steady})")
    group = leave_out(links, node_of_member, names, found)
    return [*lines, group] if group else lines


def measure(
    bench: Benchmark,
    rounds: Sequence[tuple[str, list[Pair], Key]],
    members: list[list[int]],
    messages: Messages,
) -> tuple[list[Link], dict[str, Case]]:
    """Measure the rounds. Returns the links, and a case for each start of a run that measured some;
    both on rank 0."""
    links: list[Link] = []
    runs: dict[str, Case] = {}
    for name, pairs, key in rounds:
        ranks, build, derive = round_of(pairs, members, messages, bench.job)
        case = bench.measure(key, name, build, derive, ranks=ranks)
        if case and case.failed:
            bench.print(f"# {name}: {case.check}")
        links += links_of(case) if case else []
        if case and not case.failed:
            runs[case.measured_at] = case
    return links, runs


def main() -> int:
    args = parse_args()
    with Benchmark("p2p_matrix", args, observers=[network.Network]) as bench:
        job, nodes = bench.job, node_of_each(bench.report.environment)
        if args.moved_to_cpu:
            bench.print("# gloo does not send CUDA tensors: measuring links between CPUs")
        if args.plot:  # rank 0 writes it
            check = partial(check_plot, args.plot) if job.rank == 0 else lambda: None
            bench.prepare(f"--plot {args.plot}", check)
        members = bench.prepare(f"--by {args.by}", lambda: members_of(args.by, nodes))
        messages = messages_of(args, job.device)
        rounds = plan(args, messages, len(members))
        title = f"{count_of(len(rounds), 'round')}, {settings(args, messages)}"
        size = 2 * len(members[0])
        planned = [Planned(name, size * len(pairs), key) for name, pairs, key in rounds]
        bench.announce({title: planned})
        bench.print("\n" + folded(title, bench.max_width))
        links, runs = measure(bench, rounds, members, messages)
        node_of_member = [nodes[ranks[0]] for ranks in members]
        rule = (node_of_member, args.by, args.sigmas)
        crowd = crowd_of(job, bench.report.environment)
        found = beyond(slow_components(links, *rule), crowd)
        if job.broadcast(bool(crowd and found)):  # named only if it is slow twice
            names_of_found = cli.cut([component.name() for component, _ in found], 3)
            bench.print(f"\n# all rounds again, for {names_of_found}")
            again = [(f"{name}, again", pairs, key | {"again": 1}) for name, pairs, key in rounds]
            second, more_runs = measure(bench, again, members, messages)
            found, runs = (
                in_both(found, beyond(slow_components(second, *rule), crowd)),
                runs | more_runs,
            )
        problem = network.unexpected(bench, args.expect_network)
        if problem and bench.is_first:
            bench.fail(problem)
        others = bench.disturbed()
        if links:
            environment = bench.report.environment
            of_nodes, of_ranks = node_names(environment), rank_names(environment)
            of_members = of_nodes if args.by == "node" else of_ranks
            names = {"node": of_nodes, "rank": of_ranks, "link": of_members}
            bench.print(tables(links, of_members, args.by, bench.max_width))
            if len(runs) > 1:  # a median over all links would mix two runs
                times = cli.cut([case.measured for case in runs.values()])
                why = f"the rounds were measured at different times, {times}"
                bench.conclude([f"{NOT_JUDGED}: {why}"])
            else:
                [measured] = runs.values()
                is_load_known = bench.records_load and not bench.report.is_earlier(measured)
                doubt = doubt_of(others, is_load_known)
                if doubt:
                    found = {finding: how for finding, how in found.items() if how.is_far}
                more = flag_for_more([measured], args)
                lines = answer(links, node_of_member, found, names, more, doubt, crowd)
                bench.conclude(lines, measured)
                bench.last_line["slow"] = highlighted(found, node_of_member)
            if args.plot:
                try:
                    draw(links, len(members), args.plot)
                except (ImportError, OSError, ValueError) as error:
                    bench.fail(f"--plot {args.plot}: {error}")
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
