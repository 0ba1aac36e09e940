"""Who is slower than the like: common/workloads/outliers.py, worked out by hand."""

from typing import Any

import pytest

from common.workloads import outliers
from common.workloads.outliers import Who, accuse, sentences

NODES = [0, 0, 1, 1, 2, 2]


def costs(*values: float) -> dict[tuple[int, ...], float]:
    return {(rank,): value for rank, value in enumerate(values)}


def names(found: Any) -> list[str]:
    return [who.name() for who, _ in found]


def test_outliers() -> None:
    """Median 10, deviations 0 1 1 1 10: the median one is 1, scaled 1.4826."""
    costs = dict(enumerate([10.0, 9, 11, 9, 20]))
    [(name, (factor, sigmas))] = outliers.outliers(costs, 5).items()
    assert (name, factor) == (4, 2.0)
    assert sigmas == pytest.approx(10 / 1.4826)
    assert outliers.outliers(costs, 7) == {}
    for quiet in ([10, 10, 10, 1], [10, 10, 10, 10.9], [10, 90], [], [10, 12, 8, 14, 6, 15]):
        assert outliers.outliers(dict(enumerate(map(float, quiet))), 5) == {}


def test_nothing_is_a_multiple_of_no_time() -> None:
    """Steps under the clock's resolution may take 0 s on most ranks."""
    assert outliers.outliers({0: 0.0, 1: 0.0, 2: 0.0, 3: 1e-9}, 5) == {}
    assert accuse(costs(0.0, 1e-9), {}, "rank", "x", of_two=True) == {}


def test_one_slow_rank() -> None:
    """Median 1.01; the deviations .01 .99 0 .01 0 0 have the median .005. Node 0 is not slow."""
    found = accuse(costs(1.0, 2.0, 1.01, 1.02, 1.01, 1.01), {"node": NODES}, "rank", "a product")
    [(who, words)] = found
    assert who == Who("rank", ((1,),))
    assert found[who, words] == "1.98x the median's time, 134 sigmas"  # 0.99 / (1.4826 * 0.005)
    assert sentences(found) == ["slow rank 1: a product 1.98x the median's time, 134 sigmas"]


def test_a_slow_node_explains_its_ranks() -> None:
    """Lower medians of the nodes: 1.0, 2.0, 1.01. Rank 5, of another node, is named for itself."""
    found = accuse(costs(1.0, 1.0, 2.0, 2.1, 1.01, 1.01), {"node": NODES}, "rank", "x")
    assert names(found) == ["node 1"]
    nodes = [rank // 4 for rank in range(12)]
    slow = [1.0, 1.01, 1.0, 1.02, 2.0, 2.1, 2.0, 2.1, 1.0, 1.01, 1.02, 3.0]
    assert names(accuse(costs(*slow), {"node": nodes}, "rank", "x")) == ["node 1", "rank 11"]


def test_what_is_not_slow() -> None:
    """Within the margin; the fast one; a spread as wide as the difference."""
    for values in ((1, 1.09, 1, 1, 1, 1), (1, 0.5, 1, 1, 1, 1), (1, 1.2, 0.8, 1.4, 0.6, 1.5)):
        assert accuse(costs(*values), {"node": NODES}, "rank", "x") == {}
    slower = costs(1, 1.3, 1, 1, 1, 1)
    assert accuse(slower, {}, "rank", "x", margin=0.4) == {}
    assert names(accuse(slower, {}, "rank", "x", margin=0.2)) == ["rank 1"]


def test_of_two_nobody_knows_which() -> None:
    found = accuse(costs(1.0, 3.0), {"node": [0, 0]}, "rank", "x", of_two=True)
    assert names(found) == ["rank 1 or rank 0"]  # the slower first: it must be so twice
    assert "x 3.00x the other's" in sentences(found)[0]
    assert accuse(costs(1.0, 3.0), {"node": [0, 0]}, "rank", "x") == {}
    assert accuse(costs(1.0, 1.3), {}, "rank", "x", margin=0.4, of_two=True) == {}
    nodes = [0, 0, 0, 1, 1, 1]  # two nodes, one of them slow throughout
    found = accuse(costs(1, 1.1, 1, 2, 2.1, 2), {"node": nodes}, "rank", "x", of_two=True)
    assert names(found) == ["node 1 or node 0"]
