"""Groups of ranks."""

import pytest

from common.partition import parse_groups, partition


def test_parse() -> None:
    assert parse_groups("node") == "node"
    assert parse_groups("0,1/2,3") == [(0, 1), (2, 3)]
    assert parse_groups("0-3/7,5") == [(0, 1, 2, 3), (5, 7)]


@pytest.mark.parametrize("text", ["", "nodes", "0,,1", "3-1", "0-", "a/b", "-1", "0-99999999999"])
def test_parse_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="expected world, node, cross or groups"):
        parse_groups(text)


@pytest.mark.parametrize("text", ["0,0", "0,1/1,2", "0-3/3"])
def test_a_rank_twice(text: str) -> None:
    with pytest.raises(ValueError, match="named twice"):
        parse_groups(text)


def test_named_groups() -> None:
    nodes = [0, 0, 1, 1, 2, 2]
    assert partition("world", nodes) == [("world", (0, 1, 2, 3, 4, 5))]
    assert partition("node", nodes) == [("node 0", (0, 1)), ("node 1", (2, 3)), ("node 2", (4, 5))]
    assert partition("cross", nodes) == [("cross 0", (0, 2, 4)), ("cross 1", (1, 3, 5))]
    # ranks of a node need not be neighbours
    assert partition("node", [0, 1, 0, 1]) == [("node 0", (0, 2)), ("node 1", (1, 3))]


def test_explicit_groups() -> None:
    assert partition([(0, 1, 2), (4,)], [0] * 5) == [("ranks 0-2", (0, 1, 2)), ("ranks 4", (4,))]
    with pytest.raises(ValueError, match="names rank 5, and there are ranks 0 to 4"):
        partition([(5,)], [0] * 5)


@pytest.mark.parametrize("nodes", [[0, 0], [0, 0, 1]])
def test_cross_needs_nodes_alike(nodes: list[int]) -> None:
    with pytest.raises(ValueError, match="--groups cross needs at least two nodes"):
        partition("cross", nodes)
