"""Links between ranks: what a pair measures, who meets whom, and which are slow."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.workloads import patterns
from benchmarks.workloads.outliers import MARGIN, Costs, Findings, accuse
from common.benchmark import Build, Derive, Key
from common.groups import Group, Job
from common.report import Case
from common.stats import Times, median
from common.timing import Step, Workload, cuda_graph

Pair = tuple[int, int]  # of members: ranks or nodes
Meetings = dict[Pair, list[Pair]]  # of two members -> which of their ranks meet


class Link(NamedTuple):
    """What two members have measured. A report has it as a list, in this order, but for `spread`:
    that is in another list, for all links of a round."""

    a: int
    b: int
    latency_us: float
    a_to_b: float  # GB/s, as the next two
    b_to_a: float
    both: float  # directions at the same time, added
    # How far the 95 % interval of the median sample reaches from it, as a share, where this is
    # widest among the four times. None for too few samples. The fastest sample has no interval.
    spread: float | None = None


class Quantity(NamedTuple):
    """What a link has of one kind. For a direction: a name of Link's fields."""

    unit: str
    less_is_better: bool
    a_to_b: str
    b_to_a: str  # the same field where there is no direction


KINDS = {
    "latency": Quantity("us", True, "latency_us", "latency_us"),
    "bandwidth, row sends to column": Quantity("GB/s", False, "a_to_b", "b_to_a"),
    "bidirectional bandwidth": Quantity("GB/s", False, "both", "both"),
}


class Messages(NamedTuple):
    """size: bytes of a message. latency_size: of one whose latency counts. calls: in a sample."""

    size: int
    latency_size: int
    calls: int


def rounds_of(n: int) -> list[list[Pair]]:
    """A tournament of n by the circle method: all meet once in n - 1 + n % 2 rounds."""
    rounds = []
    last = n - 1 + n % 2  # the last seat; if n is odd, whoever meets the one in seat n rests
    for number in range(last):
        # whoever sits in the first seat stays there, and the others move on
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
    rows, spreads = case.metrics.get("links", []), case.metrics.get("links_spread", [])
    return [Link(*row)._replace(spread=s) for row, s in zip(rows, spreads, strict=True)]


def build(meetings: Meetings, messages: Messages, job: Job, key: Key, group: Group) -> Workload:
    """This rank's part in a round."""
    a, b = next(pair for pairs in meetings.values() for pair in pairs if job.rank in pair)
    first, peer = job.rank == a, a + b - job.rank
    big, received = torch.empty(2, messages.size, dtype=torch.uint8, device=job.device)
    patterns.fill(big, patterns.tile(job.rank))
    small, word = torch.zeros(2, messages.latency_size, dtype=torch.uint8, device=job.device)
    with_peer = partial(dist.P2POp, group=group.test, group_peer=group.ranks.index(peer))
    send, receive = with_peer(dist.isend, big), with_peer(dist.irecv, received)
    ping, pong = with_peer(dist.isend, small), with_peer(dist.irecv, word)

    def in_turn(batches: list[list[dist.P2POp]]) -> Step:
        """One after the other; on CUDA one graph, or launching would take longer than the link."""

        def step() -> None:
            for batch in batches:
                for work in dist.batch_isend_irecv(batch):
                    work.wait()

        return cuda_graph(step, job.device) if job.device.type == "cuda" else step

    n = messages.calls
    send_all = [[send]] * n + [[pong]]  # the peer's word says that all have come
    receive_all = [[receive]] * n + [[ping]]
    ping_pong = [[ping], [pong]] if first else [[pong], [ping]]
    # made in this order, since a graph is run once when it is made: the peer must answer
    both = in_turn([[send, receive]] * n)
    parts = {
        "there": in_turn(send_all if first else receive_all),
        "back": in_turn(receive_all if first else send_all),
        "latency": in_turn(ping_pong * n),
    }

    def wrong() -> int:
        """How many bytes are, of the last message that came."""
        patterns.blank(received)
        dist.barrier(group.control)
        both()
        return patterns.count_wrong(received, patterns.tile(peer))

    return Workload(both, parts, facts=wrong)


def derive(
    meetings: Meetings, messages: Messages, case: Case, times: Times, facts: list[int]
) -> None:
    """The links of a round, and whether all data came as it was sent."""
    rows: list[list[Any]] = []
    spreads: list[float | None] = []
    for (a, b), ranks in meetings.items():
        link = link_of(a, b, ranks, messages, case, times)
        values = (link.latency_us, link.a_to_b, link.b_to_a, link.both)
        rows.append([a, b, *(float(f"{value:.4g}") for value in values)])
        spreads.append(link.spread)
    case.metrics |= {"links": rows, "links_spread": spreads}
    wrong = [rank for rank, count in zip(case.ranks, facts, strict=True) if count]
    if wrong:
        case.check = f"failed: wrong data came to rank {wrong[0]}"
        case.metrics["failed_rank"] = wrong[0]


def link_of(
    a: int, b: int, ranks: list[Pair], messages: Messages, case: Case, times: Times
) -> Link:
    """The link of two members. ranks: their pairs, several if the members are nodes.

    The slower rank of a pair counts in each sample, and the fastest sample counts. Pairs of two
    nodes meet at the same time: the largest latency counts, and their bandwidths add up.
    """
    latency_us = a_to_b = b_to_a = both = 0.0
    spreads: list[float | None] = []
    bytes_sent = messages.size * messages.calls
    for pair in ranks:
        rows = [case.ranks.index(rank) for rank in pair]
        fastest = {}
        for name in ("there", "back", "step", "latency"):
            slower_rank = times.each(name)[rows].max(axis=0)
            fastest[name] = float(slower_rank.min())
            spreads.append(median(slower_rank).relative)
        latency_us = max(latency_us, fastest["latency"] / messages.calls / 2 * 1e6)
        a_to_b += bytes_sent / fastest["there"] / 1e9
        b_to_a += bytes_sent / fastest["back"] / 1e9
        both += bytes_sent / (fastest["step"] / 2) / 1e9
    known = [spread for spread in spreads if spread is not None]
    spread = max(known) if len(known) == len(spreads) else None
    return Link(a, b, latency_us, a_to_b, b_to_a, both, spread)


def directed(links: Sequence[Link], kind: str) -> dict[Pair, float]:
    """(sender, receiver) -> value; only (a, b) where there is no direction."""
    quantity = KINDS[kind]
    values = {(link.a, link.b): getattr(link, quantity.a_to_b) for link in links}
    if quantity.a_to_b != quantity.b_to_a:
        values |= {(link.b, link.a): getattr(link, quantity.b_to_a) for link in links}
    return values


def slow_links(
    links: Sequence[Link], node_of: list[int], by: str, sigmas: float, margin: float = MARGIN
) -> Findings:
    """Nodes, ranks and links that are slower than their like. node_of: the node of each member."""
    findings: Findings = {}
    levels = {"node": node_of}
    if by == "rank":
        levels["rank"] = list(range(len(node_of)))
    for kind, quantity in KINDS.items():
        within, between = Costs(), Costs()
        for (a, b), value in directed(links, kind).items():
            costs = within if node_of[a] == node_of[b] else between
            costs[a, b] = value if quantity.less_is_better else 1 / value
        name = kind.partition(",")[0]
        findings |= accuse(within, levels, "link", f"{name} within nodes", sigmas, margin)
        findings |= accuse(between, levels, "link", f"{name} between nodes", sigmas, margin)
    return findings
