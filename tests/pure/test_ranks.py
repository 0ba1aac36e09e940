"""The node of each rank, and the groups of --groups."""

import re
from typing import Any

from benchmarks.workloads.ranks import partition
from harness.environment import node_of_each
from tests.pure.reports import refused


def rows_of(*nodes: tuple[str, int]) -> dict[str, Any]:
    return {"ranks": [{"host": host, "local_rank": rank} for host, rank in nodes]}


def test_nodes() -> None:
    assert node_of_each(rows_of(("a", 0), ("a", 1), ("b", 0), ("b", 1))) == [0, 0, 1, 1]
    assert node_of_each(rows_of(("a", 0), ("b", 0), ("a", 1), ("b", 1))) == [0, 1, 0, 1]
    assert node_of_each(rows_of(("a", 0), ("a", 1), ("a", 0), ("a", 1))) == [0, 0, 1, 1]


def test_partition() -> None:
    nodes = [0, 0, 1, 1]
    assert partition("world", nodes) == [[0, 1, 2, 3]]
    assert partition("node", nodes) == [[0, 1], [2, 3]]
    assert partition("cross", nodes) == [[0, 2], [1, 3]]
    assert partition("3,0/1-2", nodes) == [[0, 3], [1, 2]]
    assert partition("world", [0, 0, 1]) == [[0, 1, 2]]
    # an invalid rank after a valid group; a range that would not fit into memory
    odd = ("0,1/x", "0,1/2,9", "0-9999999999")
    for spec in ("0,1/1,2", "0/1,2", "0,4", "1-0", "x", "", "nodes", *odd):
        told = "disjoint groups of one size among ranks 0 to 3"
        assert told in refused(partition, spec, nodes)
    for spec in ("node", "cross"):
        assert re.search(r"got \w+ on 2 nodes", refused(partition, spec, [0, 0, 1]))
