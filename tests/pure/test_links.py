"""Messages between pairs of ranks: who meets when, bandwidths, and which link is slow."""

from typing import Any

import pytest

from common.report import Case
from common.stats import Times
from common.workloads import links, outliers


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 31, 64])
def test_each_pair_once_and_nobody_twice_in_a_round(n: int) -> None:
    rounds = links.rounds_of(n)
    seen = [pair for pairs in rounds for pair in pairs]
    assert len(seen) == len(set(seen)) == n * (n - 1) // 2
    assert all(0 <= a < b < n for a, b in seen)
    assert all(len({m for pair in pairs for m in pair}) == n - n % 2 for pairs in rounds)


def test_links_of_a_round() -> None:
    """1 MB, 2 messages a sample: 2 ms there is 1 GB/s; both ways in 8 ms is 2 * 2 MB / 8 ms."""
    messages = links.Messages(1_000_000, 8, 2)
    rows = {"step": [[0.006, 0.009], [0.008, 0.010]], "there": [[0.002, 0.004], [0.001, 0.005]]}
    rows |= {"back": [[0.004], [0.004]], "latency": [[2e-5], [4e-5]]}
    case = Case(key={}, ranks=[0, 5], samples_s=rows)
    times = Times(rows, [2])
    links.derive({(0, 1): [(0, 5)]}, messages, case, times, [0, 0])
    assert case.metrics["links"] == [[0, 1, 10.0, 1.0, 0.5, 0.5]]
    assert links.links_of(case) == [links.Link(0, 1, 10.0, 1.0, 0.5, 0.5, None)]
    links.derive({(0, 1): [(0, 5)]}, messages, case, times, [0, 3])
    assert case.check == "failed: wrong data came to rank 5"


def test_how_steady_a_link_is() -> None:
    """Of the four times the one whose median sample is known least: 4 ms, 2 to 9 ms."""
    steady = [[0.004] * 6] * 2
    rows = dict.fromkeys(("step", "there", "latency"), steady)
    rows["back"] = [[0.003, 0.009, 0.0035, 0.006, 0.002, 0.0045], [0.001] * 6]
    case = Case(key={}, ranks=[0, 5], samples_s=rows)
    links.derive({(0, 1): [(0, 5)]}, links.Messages(8, 8, 1), case, Times(rows, [6]), [0, 0])
    (link,) = links.links_of(case)
    assert link.spread == pytest.approx(1.25)


def matrix(n: int, slow: dict[tuple[int, int], float]) -> list[Any]:
    """Latencies of about 10 us; bandwidths all alike."""
    pairs = [(a, b) for a in range(n) for b in range(a + 1, n)]
    return [
        links.Link(a, b, 10 * slow.get((a, b), 1 + (a * 7 + b * 3) % 5 / 100), 5, 5, 9)
        for a, b in pairs
    ]


def slow_lines(*matrix_nodes_by_sigmas: Any) -> list[str]:
    return outliers.sentences(links.slow_links(*matrix_nodes_by_sigmas))


def test_a_slow_link_is_no_slow_rank_and_the_other_way_round() -> None:
    one = slow_lines(matrix(8, {(2, 5): 3.0}), [0] * 8, "rank", 5)
    assert [line.partition(":")[0] for line in one] == ["slow link 2 -> 5"]
    of_rank = {(min(3, r), max(3, r)): 2.0 for r in range(8) if r != 3}
    some = slow_lines(matrix(8, of_rank | {(0, 1): 4.0}), [0] * 8, "rank", 5)
    assert [line.partition(":")[0] for line in some] == ["slow rank 3", "slow link 0 -> 1"]
    assert "within nodes 1.9" in some[0] or "within nodes 2.0" in some[0]


def test_a_slow_node_is_named_before_its_ranks() -> None:
    nodes = [rank // 2 for rank in range(8)]
    slow = {
        (a, b): 2.0 for a in range(8) for b in range(a + 1, 8) if (a // 2 == 1) != (b // 2 == 1)
    }
    lines = slow_lines(matrix(8, slow), nodes, "rank", 5)
    assert [line.partition(":")[0] for line in lines] == ["slow node 1"]
    assert "between nodes" in lines[0]
