"""benchmarks/workloads/outliers.py: ranks, nodes and links that are slower than their peers."""

from typing import Any

import pytest

from benchmarks.workloads import outliers as slow
from benchmarks.workloads.outliers import Component, Costs, Crowd, find_slow

NODES = {"node": [0, 0, 1, 1, 2, 2]}
ONE_NODE, TWO_NODES = {"node": [0, 0]}, {"node": [0, 0, 0, 1, 1, 1]}


def test_outliers() -> None:
    """The median is 10, the deviations are 0, 1, 1, 1, 10. Their median 1 is scaled to 1.4826."""
    costs = dict(enumerate([10.0, 9, 11, 9, 20]))
    [(name, (factor, sigmas))] = slow.outliers(costs, 5).items()
    assert (name, factor) == (4, 2.0)
    assert sigmas == pytest.approx(10 / 1.4826)
    assert slow.outliers(costs, 7) == {}


def test_the_scatter_has_a_floor() -> None:
    """Two of three costs are equal by chance: with their deviation of 0.001, 1.2 is 135 sigmas off.
    If costs are known to 10%, it is 2 sigmas: (1.2 - 1.001) / 0.1001."""
    costs = {0: 1.0, 1: 1.001, 2: 1.2}
    assert slow.outliers(costs, 5)[2][1] > 100
    assert slow.outliers(costs, 5, noise=0.1) == {}
    assert slow.outliers(costs | {2: 1.6}, 5, noise=0.1)[2][1] == pytest.approx(0.599 / 0.1001)


@pytest.mark.parametrize(
    ("costs", "levels", "options", "names"),
    [
        # median 1.01; deviations .01 .99 0 .01 0 0 with median .005; node 0 is not slow
        ([1.0, 2.0, 1.01, 1.02, 1.01, 1.01], NODES, {}, ["rank 1"]),
        ([1, 1.09, 1, 1, 1, 1], NODES, {}, []),  # within the margin
        ([1, 0.5, 1, 1, 1, 1], NODES, {}, []),  # a fast rank
        ([1, 1.2, 0.8, 1.4, 0.6, 1.5], NODES, {}, []),  # the spread is as wide as the difference
        ([1, 1.3, 1, 1, 1, 1], {}, {"margin": 0.4}, []),
        ([1, 1.3, 1, 1, 1, 1], {}, {"margin": 0.2}, ["rank 1"]),
        # a slow node explains its ranks, and no rank of another node
        ([1.0, 1.0, 2.0, 2.1, 1.01, 3.0], NODES, {}, ["node 1", "rank 5"]),
        # with two, either may be at fault; the slower one is named first
        ([1.0, 3.0], ONE_NODE, {"of_two": True}, ["rank 1 or rank 0"]),
        ([1.0, 3.0], ONE_NODE, {}, []),
        ([1.0, 1.3], {}, {"margin": 0.4, "of_two": True}, []),
        ([1, 1.1, 1, 2, 2.1, 2], TWO_NODES, {"of_two": True}, ["node 1 or node 0"]),
        # steps below the resolution of the clock
        ([0.0, 0.0, 0.0, 1e-9], {}, {}, []),
        ([0.0, 1e-9], {}, {"of_two": True}, []),
    ],
)
def test_slow_ranks_and_nodes(costs: Any, levels: Any, options: Any, names: list[str]) -> None:
    by_rank: Costs = {(rank,): float(cost) for rank, cost in enumerate(costs)}
    found = find_slow(by_rank, levels, "rank", "x", **options)
    assert [component.name() for component, _ in found] == names


def test_where_ranks_share_cores() -> None:
    """Host b has 3 ranks on 2 cores. Ranks that are bound to a core each do not share it."""
    crowd = slow.most_crowded(["a", "a", "b", "b", "b"], [[0], [1], [0, 1], [0, 1], [0, 1]])
    assert crowd == Crowd("b", 3, 2)
    assert (crowd.factor, crowd.text) == (7.5, "3 ranks share 2 cores of b")
    assert slow.most_crowded(["a", "a"], [[0, 1], [0, 1]]) is None


@pytest.mark.parametrize(
    ("factor", "peers", "named"), [(7.4, 6, 0), (7.6, 6, 1), (7.6, 5, 0), (50.0, 2, 0)]
)
def test_what_a_crowd_does_not_explain(factor: float, peers: int, named: int) -> None:
    """Over 5 * 3 / 2 times as slow, among at least 6."""
    costs: Costs = {(rank,): factor if rank == 0 else 1.0 for rank in range(peers)}
    found = find_slow(costs, {}, "rank", "x", of_two=True)
    assert len(found) == 1
    assert len(slow.beyond(found, Crowd("vm", 3, 2))) == named
    assert slow.beyond(found, None) == found


def test_sentences() -> None:
    """0.99 / (1.4826 * 0.005) are 134 sigmas."""
    costs: Costs = {(0,): 1.0, (1,): 2.0, (2,): 1.01, (3,): 1.02, (4,): 1.01, (5,): 1.01}
    found = find_slow(costs, NODES, "rank", "a product")
    parts = "2.00 s against 1.01 s"
    told = f"slow rank 1: a product 1.98x the median time ({parts}), 134 sigmas"
    assert slow.sentences(found) == [told]
    two = find_slow({(0,): 1.0, (1,): 3.0}, {}, "rank", "x", of_two=True)
    told = "x 3.00x the time of the other (3.00 s against 1.00 s); with two it is impossible to "
    assert told in slow.sentences(two)[0]


def test_names() -> None:
    ranks = ["rank 0 on a", "rank 1 on b"]
    names = {"node": ["a", "b"], "rank": ranks, "link": ranks}
    assert Component("node", ((1,),)).name(names) == "b"
    assert Component("node", ((1,), (0,))).name(names) == "b or a"
    assert Component("rank", ((1,),)).name(names) == "rank 1 on b"
    assert Component("link", ((0, 1),)).name(names) == "link rank 0 on a -> rank 1 on b"
    assert Component("rail", ((3,),)).name(names) == "rail 3"
    assert Component("node", ((1,),)).name() == "node 1"
