"""Links between ranks: what a pair measures, who meets whom, and which are slow."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from common import patterns
from common.benchmark import Benchmark, Workload
from common.dist import Group, Job
from common.gpus import cuda_graph
from common.outliers import MARGIN, Costs, Findings, accuse
from common.report import Case
from common.stats import Times
from common.timing import Step

Key = dict[str, Any]
Pair = tuple[int, int]  # of members: ranks or nodes
Link = Sequence[Any]  # a, b, latency in us, a -> b, b -> a, both in GB/s

# what is measured: where a Link has it (of a -> b, of b -> a), unit, whether less is better
KINDS = {
    "latency": ((2, 2), "us", True),
    "bandwidth, row sends to column": ((3, 4), "GB/s", False),
    "bidirectional bandwidth": ((5, 5), "GB/s", False),
}


class Messages(NamedTuple):
    """Bytes of a message, of one whose latency counts, and how many of them are in a sample."""

    size: int
    latency_size: int
    calls: int


def rounds_of(n: int) -> list[list[Pair]]:
    """A tournament of n by the circle method: in n - 1 + n % 2 rounds all meet once."""
    last, rounds = n - 1 + n % 2, []
    for number in range(last):
        # one seat stays, the others move on; of an odd number one has nobody to meet
        seats = [0, *((place - number) % last + 1 for place in range(last))]
        pairs = [sorted((seats[i], seats[last - i])) for i in range((last + 1) // 2)]
        rounds.append([(a, b) for a, b in pairs if b < n])
    return rounds


def measure_round(
    bench: Benchmark, key: Key, pairs: list[Pair], members: list[list[int]], messages: Messages
) -> list[Link]:
    """A case in which the pairs of members meet. Its links, on rank 0."""
    meetings = [list(zip(members[a], members[b], strict=True)) for a, b in pairs]
    work = partial(build, meetings, messages, bench.job)
    made = partial(derive, pairs, meetings, messages)
    case = bench.measure(key, work, made, sorted(np.ravel(meetings).tolist()))
    if case and case.failed:
        bench.print(f"# round {key['round']}: {case.check}")
    return case.metrics.get("links", []) if case else []


def build(
    meetings: list[list[Pair]], messages: Messages, job: Job, key: Key, group: Group
) -> Workload:
    """This rank's part in a round. meetings: of ranks, for each pair of members."""
    a, b = next(pair for pairs in meetings for pair in pairs if job.rank in pair)
    first, peer = job.rank == a, a + b - job.rank
    big, into = torch.empty(2, messages.size, dtype=torch.uint8, device=job.device)
    patterns.fill(big, patterns.tile(job.rank))
    small, word = torch.zeros(2, messages.latency_size, dtype=torch.uint8, device=job.device)
    to_peer = partial(dist.P2POp, group=group.test, group_peer=group.ranks.index(peer))
    out, come = to_peer(dist.isend, big), to_peer(dist.irecv, into)
    ping, pong = to_peer(dist.isend, small), to_peer(dist.irecv, word)

    def batches(*some: list[dist.P2POp]) -> Step:
        """One after the other; on CUDA one graph, or launching would take longer than the link."""

        def step() -> None:
            for batch in some:
                for work in dist.batch_isend_irecv(batch):
                    work.wait()

        return cuda_graph(step, job.device) if job.device.type == "cuda" else step

    n = messages.calls
    send, receive = ([out] * n, [pong]), ([come] * n, [ping])
    both = batches(*[[out, come]] * n)
    parts = {  # made in this order, since a graph is run once when it is made: the peer must answer
        "there": batches(*(send if first else receive)),
        "back": batches(*(receive if first else send)),
        "latency": batches(*([[ping], [pong]] if first else [[pong], [ping]]) * n),
    }

    def wrong() -> int:
        patterns.blank(into)
        dist.barrier(group.control)
        both()
        return patterns.count_wrong(into, patterns.tile(peer))

    return Workload(both, parts, facts=wrong)


def derive(
    pairs: Sequence[Pair],
    meetings: list[list[Pair]],
    messages: Messages,
    case: Case,
    times: Times,
    facts: list[int],
) -> None:
    """The links of a round. Of a sample the slower rank counts, of the samples the fastest."""
    case.metrics["links"] = links = list[Link]()
    for (a, b), ranks in zip(pairs, meetings, strict=True):
        latency, rates = 0.0, np.zeros(3)
        for pair in ranks:  # of two nodes those that meet at the same time
            rows = [case.ranks.index(rank) for rank in pair]
            there, back, both, ping = (
                float(times.each(name)[rows].max(axis=0).min())
                for name in ("there", "back", "step", "latency")
            )
            latency = max(latency, ping / messages.calls / 2 * 1e6)
            rates += messages.size * messages.calls / np.array([there, back, both / 2]) / 1e9
        links.append([a, b, *(float(f"{x:.4g}") for x in (latency, *rates))])
    wrong = [rank for rank, count in zip(case.ranks, facts, strict=True) if count]
    case.check = f"failed: wrong data came to rank {wrong[0]}" if wrong else "passed"


def directed(links: Sequence[Link], kind: str) -> dict[Pair, float]:
    """(sender, receiver) -> value; once where there is no direction."""
    there, back = KINDS[kind][0]
    found: dict[Pair, float] = {(link[0], link[1]): link[there] for link in links}
    return found | ({(link[1], link[0]): link[back] for link in links} if back != there else {})


def slow_links(
    links: Sequence[Link], node_of: list[int], by: str, sigmas: float, margin: float = MARGIN
) -> Findings:
    """Nodes, ranks and links that are slower than their like. node_of: the node of each member."""
    found: Findings = {}
    levels = {"node": node_of} | ({"rank": list(range(len(node_of)))} if by == "rank" else {})
    for kind, (_, _, less) in KINDS.items():
        for place in ("within nodes", "between nodes"):
            costs: Costs = {
                pair: value if less else 1 / value
                for pair, value in directed(links, kind).items()
                if (node_of[pair[0]] == node_of[pair[1]]) == (place == "within nodes")
            }
            what = f"{kind.partition(',')[0]} {place}"
            found |= accuse(costs, levels, "link", what, sigmas, margin)
    return found
