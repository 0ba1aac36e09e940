"""Messages between pairs of ranks: who meets when, bandwidths, and which link is slow."""

from collections.abc import Callable

import pytest

from benchmarks.workloads import links
from benchmarks.workloads.links import Link
from benchmarks.workloads.outliers import sentences
from common.report import Case
from common.stats import Times


@pytest.mark.parametrize("n", [2, 3, 8, 31])
def test_each_pair_once_and_nobody_twice_in_a_round(n: int) -> None:
    rounds = links.rounds_of(n)
    seen = [pair for pairs in rounds for pair in pairs]
    assert len(seen) == len(set(seen)) == n * (n - 1) // 2
    assert all(0 <= a < b < n for a, b in seen)
    assert all(len({m for pair in pairs for m in pair}) == n - n % 2 for pairs in rounds)


def test_links_of_a_round() -> None:
    """1 MB, 2 messages a sample, the slower rank counts: 4 ms there is 0.5 GB/s, 2 ms back 1 GB/s;
    both ways in 8 ms is 2 * 2 MB / 8 ms. Of the four times the median sample back is known least:
    4 ms, 2 to 9 ms."""
    back = [[0.003, 0.009, 0.0035, 0.006, 0.002, 0.0045], [0.001] * 6]
    rows = {name: [[0.004] * 6, [0.003] * 6] for name in ("there", "latency")}
    rows |= {"step": [[0.008] * 6] * 2, "back": back}
    case, times = Case(key={}, ranks=[0, 5], samples_s=rows), Times(rows, [6])
    messages = links.Messages(1_000_000, 8, 2)
    links.derive({(0, 1): [(0, 5)]}, messages, case, times, [0, 0])
    [link] = links.links_of(case)
    assert link[:6] == (0, 1, 1000.0, 0.5, 1.0, 0.5)
    assert link.spread == pytest.approx(1.25)
    assert case.check == "passed"
    links.derive({(0, 1): [(0, 5)]}, messages, case, times, [0, 3])
    assert case.check == "failed: wrong data came to rank 5"


@pytest.mark.parametrize(
    ("is_slow", "ranks_of_node", "names"),
    [
        (lambda a, b: (a, b) == (2, 5), 8, ["slow link 2 -> 5"]),
        (lambda a, b: 3 in (a, b) or (a, b) == (0, 1), 8, ["slow rank 3", "slow link 0 -> 1"]),
        # a slow node is named before its ranks
        (lambda a, b: (a // 2 == 1) != (b // 2 == 1), 2, ["slow node 1"]),
    ],
)
def test_a_slow_link_is_no_slow_rank_and_the_other_way_round(
    is_slow: Callable[[int, int], bool], ranks_of_node: int, names: list[str]
) -> None:
    """Latencies of about 10 us, or 30 us; bandwidths all alike."""
    matrix = []
    for a in range(8):
        for b in range(a + 1, 8):
            latency_us = 30.0 if is_slow(a, b) else 10 + (a * 7 + b * 3) % 5 / 10
            matrix.append(Link(a, b, latency_us, 5, 5, 9))
    nodes = [rank // ranks_of_node for rank in range(8)]
    lines = sentences(links.slow_links(matrix, nodes, "rank", 5))
    assert [line.partition(":")[0] for line in lines] == names
