"""Links between ranks: what a pair measures, which pairs meet when, and which links are slow."""

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
from benchmarks.workloads.outliers import MARGIN, Costs, Findings, accuse
from common.benchmark import Build, Derive, Key
from common.groups import Group, Job
from common.report import Case
from common.stats import Times, in_rounds, median
from common.timing import Step, Workload

# A sample of messages back to back takes at least so long: a token bucket, such as tbf's or a
# cloud's, lets a burst of some MB pass at full speed, and a shorter sample would show nothing else.
SUSTAINED_S = 0.05
SUSTAINED_SIZE = 2**22  # bytes of a message, at least
MOST_MESSAGES = 512  # in a sample

Pair = tuple[int, int]  # of members: ranks or nodes
Meetings = dict[Pair, list[Pair]]  # of two members -> which of their ranks meet


class Link(NamedTuple):
    """What two members have measured. A report has the first six as a list, in this order, and the
    other two in lists of their own, for all links of a round."""

    a: int
    b: int
    latency_us: float
    a_to_b: float | None  # GB/s, as the next two; None if only both directions were measured
    b_to_a: float | None
    both: float  # directions at the same time, added
    # How far the 95 % interval of the median sample reaches from it, as a share, where this is
    # widest among the four times. None for too few samples.
    spread: float | None = None
    # How much longer the bandwidths' times of one half of the rounds are than those of the other,
    # as a share, where this is most; None for fewer than two rounds.
    drift: float | None = None


class Quantity(NamedTuple):
    """What a link has of one kind. For a direction: a name of Link's fields."""

    unit: str
    less_is_better: bool
    a_to_b: str
    b_to_a: str  # the same field if there is no direction


KINDS = {
    "latency": Quantity("us", True, "latency_us", "latency_us"),
    "bandwidth, row sends to column": Quantity("GB/s", False, "a_to_b", "b_to_a"),
    "bidirectional bandwidth": Quantity("GB/s", False, "both", "both"),
}


class Messages(NamedTuple):
    """What a pair sends.

    size: bytes of a message. latency_size: bytes of one whose latency counts. calls: messages of a
    sample, back to back; None for as many as take SUSTAINED_S. ping_pongs: of a sample. each_way:
    whether each direction is measured alone, too.
    """

    size: int
    latency_size: int
    calls: int | None = None
    ping_pongs: int = 1
    each_way: bool = True


def rounds_of(n: int) -> list[list[Pair]]:
    """A tournament of n by the circle method: all meet once in n - 1 + n % 2 rounds."""
    rounds = []
    last = n - 1 + n % 2  # the last seat; if n is odd, the member that meets seat n rests
    for number in range(last):
        # the member in the first seat stays there, and the others move on
        seats = [0]
        for place in range(last):
            seats.append((place - number) % last + 1)
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
    """A case in which the pairs of members meet: its ranks, and what measures it."""
    meetings = {(a, b): list(zip(members[a], members[b], strict=True)) for a, b in pairs}
    ranks = sorted(rank for a, b in pairs for rank in members[a] + members[b])
    return ranks, partial(build, meetings, messages, job), partial(derive, meetings, messages)


def links_of(case: Case) -> list[Link]:
    """The links that a round has measured."""
    links = [Link(*row) for row in case.metrics.get("links", [])]
    if not links:
        return []
    more = zip(links, case.metrics["links_spread"], case.metrics["links_drift"], strict=True)
    return [link._replace(spread=spread, drift=drift) for link, spread, drift in more]


def build(meetings: Meetings, messages: Messages, job: Job, key: Key, group: Group) -> Workload:
    """This rank's part in a round."""
    a, b = next(pair for pairs in meetings.values() for pair in pairs if job.rank in pair)
    first, peer = job.rank == a, a + b - job.rank
    big, received = torch.empty(2, messages.size, dtype=torch.uint8, device=job.device)
    patterns.fill(big, patterns.tile(job.rank))
    small, word = torch.zeros(2, messages.latency_size, dtype=torch.uint8, device=job.device)
    number = group.ranks.index(peer)
    with_peer = partial(dist.P2POp, group=group.test, group_peer=number)
    send, receive = with_peer(dist.isend, big), with_peer(dist.irecv, received)
    ping, pong = with_peer(dist.isend, small), with_peer(dist.irecv, word)
    cuda = job.device.type == "cuda"

    def in_turn(batches: list[list[dist.P2POp]]) -> Step:
        """One after the other; on CUDA one graph, or launching would take longer than the link."""

        def step() -> None:
            for batch in batches:
                for work in dist.batch_isend_irecv(batch):
                    work.wait()

        return cuda_graph(step, job.device) if cuda else step

    def exchange(n: int) -> float:
        """Exchange n messages. Returns the seconds."""
        start = perf_counter()
        for _ in range(n):
            for work in dist.batch_isend_irecv([send, receive]):
                work.wait()
        if cuda:
            torch.cuda.synchronize(job.device)
        return perf_counter() - start

    def decide(n: int) -> int:
        """The number of the pair's first rank, on both."""
        told = torch.tensor([n])
        if first:
            dist.send(told, group=group.control, group_dst=number)
        else:
            dist.recv(told, group=group.control, group_src=number)
        return int(told)

    n = messages.calls or calls_that_last(exchange, decide)
    send_all = [[send]] * n + [[pong]]  # the peer's word says that all have come
    receive_all = [[receive]] * n + [[ping]]
    ping_pong = [[ping], [pong]] if first else [[pong], [ping]]
    # made in this order, since a graph is run once when it is made: the peer must answer
    both = in_turn([[send, receive]] * n)
    parts: dict[str, Step | None] = {}
    if messages.each_way:
        parts["there"] = in_turn(send_all if first else receive_all)
        parts["back"] = in_turn(receive_all if first else send_all)
    parts["latency"] = in_turn(ping_pong * messages.ping_pongs)

    def facts() -> tuple[int, int]:
        """How many bytes of the last message are wrong; how many messages a sample had."""
        patterns.blank(received)
        dist.barrier(group.control)
        both()
        return patterns.count_wrong(received, patterns.tile(peer)), n

    return Workload(both, parts, facts=facts)


def calls_that_last(exchange: Callable[[int], float], decide: Callable[[int], int]) -> int:
    """The number of messages that take at least SUSTAINED_S, up to MOST_MESSAGES.

    exchange: exchanges messages and returns the seconds. decide: makes the number of the pair's
    first rank that of both.
    """
    exchange(1)  # connects, and uses up what a token bucket has saved
    n = 1
    while True:
        seconds = max(exchange(n), 1e-9)
        wanted = min(MOST_MESSAGES, max(n, ceil(1.2 * n * SUSTAINED_S / seconds)))
        is_enough = seconds >= SUSTAINED_S or n == MOST_MESSAGES
        n, before = decide(n if is_enough else max(wanted, n + 1)), n
        if n == before:
            return n


def derive(
    meetings: Meetings, messages: Messages, case: Case, times: Times, facts: list[tuple[int, int]]
) -> None:
    """The links of a round, and whether all data came as it was sent."""
    rows: list[list[Any]] = []
    spreads: list[float | None] = []
    drifts: list[float | None] = []
    for (a, b), ranks in meetings.items():
        calls = [facts[case.ranks.index(first)][1] for first, _ in ranks]
        link = link_of(a, b, ranks, calls, messages, case, times)
        values = (link.latency_us, link.a_to_b, link.b_to_a, link.both)
        shown = [None if value is None else float(f"{value:.4g}") for value in values]
        rows.append([a, b, *shown])
        spreads.append(link.spread)
        drifts.append(link.drift)
    case.metrics |= {"links": rows, "links_spread": spreads, "links_drift": drifts}
    wrong = [rank for rank, (count, _) in zip(case.ranks, facts, strict=True) if count]
    if wrong:
        case.check = f"failed: wrong data came to rank {wrong[0]}"
        case.metrics["failed_rank"] = wrong[0]


def link_of(
    a: int,
    b: int,
    ranks: list[Pair],
    calls: list[int],
    messages: Messages,
    case: Case,
    times: Times,
) -> Link:
    """The link of two members. ranks: their pairs, several if the members are nodes. calls: the
    messages that each pair had in a sample.

    The slower rank of a pair counts in each sample. Of the latency the fastest sample counts, of
    the bandwidths the slowest block's mean: what a link holds, not what it reaches for a moment.
    Pairs of two nodes meet at the same time: the largest latency counts, and their bandwidths add
    up.
    """
    latency_us = 0.0
    rates = {name: 0.0 for name in ("there", "back", "step") if name in times}
    spreads: list[float | None] = []
    drifts: list[float | None] = []
    for pair, n in zip(ranks, calls, strict=True):
        rows = [case.ranks.index(rank) for rank in pair]
        slower_rank = {name: times.each(name)[rows].max(axis=0) for name in (*rates, "latency")}
        spreads += [median(samples).relative for samples in slower_rank.values()]
        fastest_s = float(slower_rank["latency"].min())
        latency_us = max(latency_us, fastest_s / messages.ping_pongs / 2 * 1e6)
        for name in rates:
            blocks_s = [float(block.mean()) for block in in_rounds(slower_rank[name], case.rounds)]
            ways = 2 if name == "step" else 1
            rates[name] += ways * n * messages.size / max(blocks_s) / 1e9
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
    """The largest; None if one is None, which may be larger."""
    known = [value for value in values if value is not None]
    return max(known) if known and len(known) == len(values) else None


def drift_of(blocks_s: Sequence[float], judged: Callable[[Sequence[float]], float]) -> float | None:
    """How much longer one half of the rounds takes than the other, as a share.

    blocks_s: a time of each round. judged: what the verdict makes of several of them. None for
    fewer than two rounds.
    """
    half = len(blocks_s) // 2
    if not half:
        return None
    short, long = sorted((judged(blocks_s[:half]), judged(blocks_s[-half:])))
    return long / short - 1 if short > 0 else None


def directed(links: Sequence[Link], kind: str) -> dict[Pair, float]:
    """(sender, receiver) -> value; only (a, b) if there is no direction. Links that have not
    measured it are left out."""
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
    """Nodes, ranks and links that are slower than their peers. node_of: the node of each member.
    of_two: as in `accuse`.

    The scatter of the links is at least what the samples of a link scatter: half of `spread`, the
    interval of which reaches two standard deviations.
    """
    findings: Findings = {}
    levels = {"node": node_of}
    if by == "rank":
        levels["rank"] = list(range(len(node_of)))
    spreads = [link.spread for link in links if link.spread is not None]
    noise = middle_of(spreads) / 2 if spreads else 0.0
    for kind, quantity in KINDS.items():
        within, between = Costs(), Costs()
        for (a, b), value in directed(links, kind).items():
            costs = within if node_of[a] == node_of[b] else between
            costs[a, b] = value if quantity.less_is_better else 1 / value
        name = kind.partition(",")[0]
        show = partial(show_cost, quantity)
        for where, costs in (("within", within), ("between", between)):
            what = f"{name} {where} nodes"
            findings |= accuse(costs, levels, "link", what, sigmas, margin, of_two, noise, show)
    return findings


def show_cost(quantity: Quantity, cost: float) -> str:
    """`60 us`, or the rate of which the cost is the inverse: `94 GB/s`."""
    return f"{cost if quantity.less_is_better else 1 / cost:.4g} {quantity.unit}"
