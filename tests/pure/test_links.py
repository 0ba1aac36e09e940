"""benchmarks/workloads/links.py: schedule of pairs, bandwidths, and which link is slow."""

from typing import Any

import pytest

from benchmarks.workloads import links
from benchmarks.workloads.links import Link
from benchmarks.workloads.outliers import sentences
from common.stats import Times
from harness.report import Case


@pytest.mark.parametrize("n", [2, 3, 8, 31])
def test_each_pair_occurs_once_and_each_rank_once_per_round(n: int) -> None:
    rounds = links.rounds_of(n)
    seen = [pair for pairs in rounds for pair in pairs]
    assert len(seen) == len(set(seen)) == n * (n - 1) // 2
    assert all(0 <= a < b < n for a, b in seen)
    assert all(len({m for pair in pairs for m in pair}) == n - n % 2 for pairs in rounds)


def test_links_of_a_round() -> None:
    """Messages of 1 MB, 2 per sample, in two rounds of 3 samples. The slower rank counts.

    There: 4 ms per sample are 0.5 GB/s. Back: the slowest block has a mean of 5 ms (3, 9 and 3 ms),
    which is 0.4 GB/s, although the fastest sample takes 2 ms. Both directions in 8 ms are
    2 * 2 MB / 8 ms. A round trip takes 2 ms. The spread is that of the way back, whose median of
    3.75 ms has the widest interval, 2 to 9 ms. The drift is that of its blocks, 5 and 4 ms.
    """
    back = [[0.003, 0.009, 0.003, 0.0055, 0.002, 0.0045], [0.001] * 6]
    latency = [[0.002] * 6, [0.001] * 6]
    rows = {"there": [[0.004] * 6, [0.003] * 6], "latency": latency}
    rows |= {"step": [[0.008] * 6] * 2, "back": back}
    case, times = Case(key={}, ranks=[0, 5], samples_s=rows, rounds=[3, 3]), Times(rows, [3, 3])
    messages = links.Messages(1_000_000, 8)
    links.derive({(0, 1): [(0, 5)]}, messages, case, times, [(0, 2_000_000)] * 2)
    [link] = links.links_of(case)
    assert link[:6] == (0, 1, 1000.0, 0.5, 0.4, 0.5)
    assert link.spread == pytest.approx((9 - 3.75) / 3.75)
    assert link.drift == pytest.approx(0.25)
    assert case.check == "passed"
    links.derive({(0, 1): [(0, 5)]}, messages, case, times, [(0, 2_000_000), (3, 2_000_000)])
    assert case.check == "failed: rank 5 received wrong data"
    del rows["there"], rows["back"]
    links.derive({(0, 1): [(0, 5)]}, messages, case, Times(rows, [3, 3]), [(0, 2_000_000)] * 2)
    [link] = links.links_of(case)
    assert link[:6] == (0, 1, 1000.0, None, None, 0.5)  # both directions at once only


@pytest.mark.parametrize(
    ("message_s", "n"),
    [(0.3, 1), (0.06, 1), (0.002, 30), (1e-9, links.MAX_MESSAGES)],  # 1.2 * 50 / 2
)
def test_messages_per_sample(message_s: float, n: int) -> None:
    """As many messages as take 50 ms. The other rank of the pair uses the same number."""
    agreed: list[int] = []

    def agree(number: int) -> int:
        agreed.append(number)
        return number

    assert links.calls_that_last(lambda calls: calls * message_s, agree) == n
    answers = iter(agreed)
    assert links.calls_that_last(lambda calls: 1.0, lambda number: next(answers)) == n


def test_messages_of_slow_links_shrink() -> None:
    """So that one takes at most 50 ms, but to no less than 64 KiB."""
    sizes = {0.04: 2**22, 0.8: 2**18, 60.0: 2**16}  # 4 MiB * 50 / 800
    assert {s: links.size_within(0.05, s, 2**22) for s in sizes} == sizes
    assert links.size_within(0.05, 60.0, 1000) == 1000  # smaller than the minimum


@pytest.mark.parametrize(
    ("is_slow", "ranks_of_node", "names"),
    [
        (lambda a, b: (a, b) == (2, 5), 8, ["slow link 2 -> 5"]),
        (lambda a, b: 3 in (a, b) or (a, b) == (0, 1), 8, ["slow rank 3", "slow link 0 -> 1"]),
        # a slow node is named instead of its ranks
        (lambda a, b: (a // 2 == 1) != (b // 2 == 1), 2, ["slow node 1"]),
    ],
)
def test_slow_links_ranks_and_nodes(is_slow: Any, ranks_of_node: int, names: list[str]) -> None:
    """Latencies are about 10 us, or 30 us if slow. All bandwidths are equal."""
    matrix = []
    for a in range(8):
        for b in range(a + 1, 8):
            latency_us = 30.0 if is_slow(a, b) else 10 + (a * 7 + b * 3) % 5 / 10
            matrix.append(Link(a, b, latency_us, 5, 5, 9))
    nodes = [rank // ranks_of_node for rank in range(8)]
    lines = sentences(links.slow_links(matrix, nodes, "rank", 5))
    assert [line.partition(":")[0] for line in lines] == names


@pytest.mark.parametrize(("slow_gb_s", "names"), [(1.453, []), (0.5, ["slow rank 3"])])
def test_links_without_an_interval(slow_gb_s: float, names: list[str]) -> None:
    """Three medians agree within 2% by chance, but the halves of the run differ by 12%."""
    measured = [
        (0, 1, 2.370, 2.058, 0.141),
        (0, 2, 2.016, 1.983, 0.046),
        (0, 3, slow_gb_s * 1.178, slow_gb_s, 0.247),
        (1, 2, 2.047, 2.017, 0.089),
        (1, 3, slow_gb_s * 1.153, slow_gb_s * 1.255, 0.153),
        (2, 3, slow_gb_s * 1.387, slow_gb_s * 1.492, 0.103),
    ]
    rows = [Link(a, b, 100, there, back, 2.0, None, drift) for a, b, there, back, drift in measured]
    lines = sentences(links.slow_links(rows, [0] * 4, "rank", 5))
    assert [line.partition(":")[0] for line in lines] == names


def test_of_two_links_either_may_be_slow() -> None:
    rows = [Link(0, 2, 80, None, None, 4.0, 0.1), Link(1, 3, 80, None, None, 0.04, 0.1)]
    assert links.slow_links(rows, [0, 0, 1, 1], "rank", 5, margin=2.0) == {}
    [(component, what)] = links.slow_links(rows, [0, 0, 1, 1], "rank", 5, margin=2.0, of_two=True)
    assert component.name() == "link 1 -> 3 or link 0 -> 2"
    assert what == "bidirectional bandwidth between nodes"


@pytest.mark.parametrize("both_at_once", [True, False])
def test_the_slow_one_of_three_nodes_is_named(both_at_once: bool) -> None:
    """Node 1 sends at 0.01 GB/s, the others at 1: two of three links, or of six, are slow."""
    matrix = []
    for a, b in ((1, 2), (0, 2), (0, 1)):
        rates = [0.01 if sender == 1 else 1.0 for sender in (a, b)]
        both = 2 * min(rates)
        there, back = (None, None) if both_at_once else rates
        matrix.append(Link(a, b, 80, there, back, both if both_at_once else 2.0, 0.1))
    found = links.slow_links(matrix, [0, 1, 2], "rank", 5, margin=2.0)
    assert [component.name() for component, _ in found] == ["node 1"]
