"""Measure links between pairs of ranks: which pairs meet in a round, and which links are slow."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from statistics import median as middle_of
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.workloads import patterns
from benchmarks.workloads.cuda_graphs import cuda_graph
from benchmarks.workloads.outliers import (
    MARGIN,
    Costs,
    Crowd,
    Findings,
    find_slow,
    most_crowded,
)
from common.groups import Group, Job
from common.stats import Times, by_round, median, significant
from common.timing import Step, Workload
from harness.benchmark import Build, Derive, Key
from harness.report import Case

# Minimum duration of a sample of consecutive messages. A token bucket, such as that of tbf or of a
# cloud provider, lets a burst of some MB pass at full speed; a shorter sample would measure only
# the burst.
SUSTAINED_S = 0.05
SUSTAINED_SIZE = 2**22  # minimum size of a message in bytes
MAX_MESSAGES = 512  # per sample
SMALLEST_SIZE = 2**16  # bytes, to which messages shrink at most

Pair = tuple[int, int]  # two members, i.e. ranks or nodes
Meetings = dict[Pair, list[Pair]]  # a pair of members -> the pairs of their ranks


class Link(NamedTuple):
    """The measured properties of the link between members a and b.

    In a report, each link is a list of the first six fields. The last two are lists of their own,
    with an entry for each link of the round.
    """

    a: int
    b: int
    latency_us: float
    a_to_b: float | None  # GB/s; None if each direction was not measured separately
    b_to_a: float | None  # GB/s
    both: float  # GB/s, sum of both directions at the same time
    # Half-width of the 95% interval of the median sample, as a fraction of the median. The largest
    # of the four times counts. None if there are too few samples.
    spread: float | None = None
    # Difference between the two halves of the rounds, as a fraction of the shorter time. The
    # largest of the bandwidths' times counts. None with fewer than two rounds.
    drift: float | None = None


class Quantity(NamedTuple):
    """A property of a link. a_to_b, b_to_a: the field of Link for each direction."""

    unit: str
    less_is_better: bool
    a_to_b: str
    b_to_a: str  # equal to a_to_b if the property has no direction


KINDS = {
    "latency": Quantity("us", True, "latency_us", "latency_us"),
    "bandwidth, row sends to column": Quantity("GB/s", False, "a_to_b", "b_to_a"),
    "bidirectional bandwidth": Quantity("GB/s", False, "both", "both"),
}


class Messages(NamedTuple):
    """The messages of a pair.

    size: bytes per message.
    latency_size: bytes per message of a ping-pong.
    calls: consecutive messages per sample; None for as many as take SUSTAINED_S.
    ping_pongs: per sample.
    each_way: whether each direction is also measured separately.
    limit_s: the messages of a slow link shrink until one takes at most this long; None to keep
    their size.
    """

    size: int
    latency_size: int
    calls: int | None = None
    ping_pongs: int = 1
    each_way: bool = True
    limit_s: float | None = None


def crowd_of(job: Job, environment: dict[str, Any]) -> Crowd | None:
    """The host with the most ranks per core, if ranks share cores. All ranks call it."""
    cores = job.gather(os.sched_getaffinity(0))
    hosts = [row["host"] for row in environment["ranks"]]
    is_cpu = job.device.type == "cpu"
    return job.broadcast(most_crowded(hosts, cores) if cores and is_cpu else None)


def rounds_of(n: int) -> list[list[Pair]]:
    """Schedule a round-robin tournament by the circle method: each pair of n members meets once,
    within n - 1 rounds, or n rounds if n is odd."""
    rounds = []
    last = n - 1 + n % 2  # the last seat; if n is odd, it is empty, and the member opposite rests
    for number in range(last):
        # the member in the first seat stays, and all others rotate
        seats = [0, *((place - number) % last + 1 for place in range(last))]
        pairs = list[Pair]()
        for i in range((last + 1) // 2):
            a, b = sorted((seats[i], seats[last - i]))
            if b < n:
                pairs.append((a, b))
        rounds.append(pairs)
    return rounds


def round_of(
    pairs: list[Pair], members: list[list[int]], messages: Messages, job: Job
) -> tuple[list[int], Build, Derive]:
    """The ranks of the case in which these pairs of members meet, and how to measure it."""
    meetings = {(a, b): list(zip(members[a], members[b], strict=True)) for a, b in pairs}
    ranks = sorted(rank for a, b in pairs for rank in members[a] + members[b])
    return ranks, partial(build, meetings, messages, job), partial(derive, meetings, messages)


def links_of(case: Case) -> list[Link]:
    """The links that a case has measured."""
    links = [Link(*row) for row in case.metrics.get("links", [])]
    if not links:
        return []
    more = zip(links, case.metrics["links_spread"], case.metrics["links_drift"], strict=True)
    return [link._replace(spread=spread, drift=drift) for link, spread, drift in more]


def build(meetings: Meetings, messages: Messages, job: Job, key: Key, group: Group) -> Workload:
    """Exchange messages with the peer of this rank in a round."""
    a, b = next(pair for pairs in meetings.values() for pair in pairs if job.rank in pair)
    first, peer = job.rank == a, a + b - job.rank
    buffers = torch.empty(2, messages.size, dtype=torch.uint8, device=job.device)
    small, word = torch.zeros(2, messages.latency_size, dtype=torch.uint8, device=job.device)
    number = group.ranks.index(peer)
    with_peer = partial(dist.P2POp, group=group.workload, group_peer=number)
    ping, pong = with_peer(dist.isend, small), with_peer(dist.irecv, word)
    cuda = job.device.type == "cuda"

    def sequence(batches: list[list[dist.P2POp]]) -> Step:
        """A step that runs the batches in order. On CUDA it is one graph: launching each batch
        would take longer than transferring it."""

        def step() -> None:
            for batch in batches:
                for work in dist.batch_isend_irecv(batch):
                    work.wait()

        return cuda_graph(step, job.device) if cuda else step

    def messages_of(size: int) -> tuple[dist.P2POp, dist.P2POp, torch.Tensor]:
        """How to send and to receive a message of this size, and where it arrives."""
        big, received = buffers[:, :size]
        patterns.fill(big, patterns.tile(job.rank))
        return with_peer(dist.isend, big), with_peer(dist.irecv, received), received

    def exchange(n: int) -> float:
        """Exchange n messages and return the elapsed seconds."""
        start = perf_counter()
        for _ in range(n):
            for work in dist.batch_isend_irecv([send, receive]):
                work.wait()
        if cuda:
            torch.cuda.synchronize(job.device)
        return perf_counter() - start

    def agree(n: int) -> int:
        """Return the n of the pair's first rank on both ranks."""
        agreed = torch.tensor([n])
        if first:
            dist.send(agreed, group=group.control, group_dst=number)
        else:
            dist.recv(agreed, group=group.control, group_src=number)
        return int(agreed)

    send, receive, received = messages_of(messages.size)
    exchange(1)  # connects, and uses up the burst that a token bucket allows
    if messages.limit_s:
        size = agree(size_within(messages.limit_s, exchange(1), messages.size))
        send, receive, received = messages_of(size)
    n = messages.calls or calls_that_last(exchange, agree)
    send_all = [[send]] * n + [[pong]]  # the reply confirms that all messages have arrived
    receive_all = [[receive]] * n + [[ping]]
    ping_pong = [[ping], [pong]] if first else [[pong], [ping]]
    # same order on both ranks: a graph runs once when it is created, and needs the peer for that
    both = sequence([[send, receive]] * n)
    parts: dict[str, Step | None] = {}
    if messages.each_way:
        parts["there"] = sequence(send_all if first else receive_all)
        parts["back"] = sequence(receive_all if first else send_all)
    parts["latency"] = sequence(ping_pong * messages.ping_pongs)

    def facts() -> tuple[int, int]:
        """Number of wrong bytes in the last message, and number of bytes per sample."""
        patterns.blank(received)
        dist.barrier(group.control)
        both()
        return patterns.count_wrong(received, patterns.tile(peer)), n * len(received)

    return Workload(both, parts, facts=facts)


def calls_that_last(exchange: Callable[[int], float], agree: Callable[[int], int]) -> int:
    """Return the number of messages that take at least SUSTAINED_S, up to MAX_MESSAGES. exchange,
    agree: see `build`."""
    n = 1
    while True:
        seconds = max(exchange(n), 1e-9)
        wanted = min(MAX_MESSAGES, max(n, ceil(1.2 * n * SUSTAINED_S / seconds)))
        is_enough = seconds >= SUSTAINED_S or n == MAX_MESSAGES
        n, before = agree(n if is_enough else max(wanted, n + 1)), n
        if n == before:
            return n


def size_within(limit_s: float, message_s: float, size: int) -> int:
    """The size of messages that take at most limit_s. message_s: the time of one of `size` bytes.

    A disturbed message makes it too small; samples then have more messages.
    """
    return max(min(size, SMALLEST_SIZE), min(size, int(size * limit_s / max(message_s, 1e-9))))


def derive(
    meetings: Meetings, messages: Messages, case: Case, times: Times, facts: list[tuple[int, int]]
) -> None:
    """Store the links of a round, and check the data that was received."""
    rows: list[list[Any]] = []
    spreads: list[float | None] = []
    drifts: list[float | None] = []
    for (a, b), ranks in meetings.items():
        sent = [facts[case.ranks.index(first)][1] for first, _ in ranks]
        link = link_of(a, b, ranks, sent, messages.ping_pongs, case, times)
        values = (link.latency_us, link.a_to_b, link.b_to_a, link.both)
        shown = [None if value is None else float(f"{value:.4g}") for value in values]
        rows.append([a, b, *shown])
        spreads.append(link.spread)
        drifts.append(link.drift)
    case.metrics |= {"links": rows, "links_spread": spreads, "links_drift": drifts}
    wrong = [rank for rank, (count, _) in zip(case.ranks, facts, strict=True) if count]
    if wrong:
        case.check = f"failed: rank {wrong[0]} received wrong data"
        case.metrics["failed_rank"] = wrong[0]


def link_of(
    a: int,
    b: int,
    ranks: list[Pair],
    sent: list[int],
    ping_pongs: int,
    case: Case,
    times: Times,
) -> Link:
    """Compute the properties of the link between members a and b. ranks: the pairs of ranks that
    met; several if the members are nodes. sent: the bytes per sample of each pair.

    Each sample's time is that of the slower rank of the pair. The latency is that of the fastest
    sample. A bandwidth is computed from the slowest block, so that it is sustained and not a peak.
    The pairs of two nodes run concurrently: their bandwidths are added, and the largest latency
    counts.
    """
    latency_us = 0.0
    rates = {name: 0.0 for name in ("there", "back", "step") if name in times}
    spreads: list[float | None] = []
    drifts: list[float | None] = []
    for pair, size in zip(ranks, sent, strict=True):
        rows = [case.ranks.index(rank) for rank in pair]
        slower_rank = {name: times.each(name)[rows].max(axis=0) for name in (*rates, "latency")}
        spreads += [median(samples).relative for samples in slower_rank.values()]
        fastest_s = float(slower_rank["latency"].min())
        latency_us = max(latency_us, fastest_s / ping_pongs / 2 * 1e6)
        for name in rates:
            blocks_s = [float(block.mean()) for block in by_round(slower_rank[name], case.rounds)]
            ways = 2 if name == "step" else 1
            rates[name] += ways * size / max(blocks_s) / 1e9
            drifts.append(drift_of(blocks_s, max))
    return Link(
        a,
        b,
        latency_us,
        rates.get("there"),
        rates.get("back"),
        rates["step"],
        widest(spreads),
        widest(drifts),
    )


def widest(values: Sequence[float | None]) -> float | None:
    """The largest value; None if any value is unknown, since it may be larger."""
    known = [value for value in values if value is not None]
    return max(known) if known and len(known) == len(values) else None


def drift_of(
    blocks_s: Sequence[float], summarize: Callable[[Sequence[float]], float]
) -> float | None:
    """Difference between the two halves of the rounds, as a fraction of the shorter time. Of an odd
    number of rounds, the middle one belongs to either half, whichever makes the difference larger.

    blocks_s: a time per round. summarize: reduces the times of several rounds to the one that is
    judged. None with fewer than two rounds.
    """
    if len(blocks_s) < 2:
        return None
    drifts: list[float] = []
    for half in {len(blocks_s) // 2, -(-len(blocks_s) // 2)}:
        short, long = sorted((summarize(blocks_s[:half]), summarize(blocks_s[half:])))
        if short <= 0:
            return None
        drifts.append(long / short - 1)
    return max(drifts)


def directed(links: Sequence[Link], kind: str) -> dict[Pair, float]:
    """(sender, receiver) -> value. Properties without a direction have an entry for (a, b) only.
    Links for which the property was not measured are left out."""
    quantity = KINDS[kind]
    values = {(link.a, link.b): getattr(link, quantity.a_to_b) for link in links}
    if quantity.a_to_b != quantity.b_to_a:
        values |= {(link.b, link.a): getattr(link, quantity.b_to_a) for link in links}
    return {pair: value for pair, value in values.items() if value is not None}


def slow_links(
    links: Sequence[Link],
    node_of: list[int],
    by: str,
    sigmas: float,
    margin: float = MARGIN,
    of_two: bool = False,
) -> Findings:
    """Find the nodes, ranks and links that are slower than their peers.

    node_of: the node of each member. of_two: see `find_slow`.

    The deviation is at least that of a typical link: half of `spread`, since a 95% interval extends
    to two standard deviations. A link with too few samples for an interval counts with its `drift`
    instead: the median difference between two halves is 1.35 standard deviations of the whole.
    """
    findings: Findings = {}
    levels = {"node": node_of}
    if by == "rank":
        levels["rank"] = list(range(len(node_of)))
    deviations = [link.drift if link.spread is None else link.spread / 2 for link in links]
    known = [deviation for deviation in deviations if deviation is not None]
    noise = middle_of(known) if known else 0.0
    for kind, quantity in KINDS.items():
        within, between = Costs(), Costs()
        for (a, b), value in directed(links, kind).items():
            costs = within if node_of[a] == node_of[b] else between
            costs[a, b] = value if quantity.less_is_better else 1 / value
        name = kind.partition(",")[0]
        show = partial(show_cost, quantity)
        for where, costs in (("within", within), ("between", between)):
            what = f"{name} {where} nodes"
            findings |= find_slow(costs, levels, "link", what, sigmas, margin, of_two, noise, show)
    return findings


def show_cost(quantity: Quantity, cost: float) -> str:
    """Format a latency, `60.00 us`, or the bandwidth whose inverse is the cost, `94.00 GB/s`."""
    return f"{significant(cost if quantity.less_is_better else 1 / cost)} {quantity.unit}"
