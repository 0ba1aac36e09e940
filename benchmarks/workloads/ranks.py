"""Divide the ranks of a job into groups, as `--groups` and `--by` specify."""

from itertools import zip_longest


def ranks_by_node(nodes: list[int]) -> list[list[int]]:
    """Return the ranks of each node. nodes: the node of each rank."""
    members: list[list[int]] = [[] for _ in range(max(nodes) + 1)]
    for rank, node in enumerate(nodes):
        members[node].append(rank)
    return members


def partition(spec: str, nodes: list[int]) -> list[list[int]]:
    """Return disjoint groups of ranks, all of the same size. Otherwise raise ValueError.

    spec: `world`, `rank` (each rank by itself), `node`, `cross` (the first ranks of all nodes, the
    second ranks of all nodes, ...), or ranks such as `0,1/2,3` and `0-3/4-7`.
    """
    world = list(range(len(nodes)))

    def span(word: str) -> range:
        first, _, last = word.partition("-")
        if int(last or first) not in world:  # checked first: 0-9999999999 would exhaust the memory
            raise ValueError
        return range(int(first), int(last or first) + 1)

    members = ranks_by_node(nodes)
    named: dict[str, list[list[int]]] = {
        "world": [world],
        "rank": [[rank] for rank in world],
        "node": members,
        "cross": [list(ranks) for ranks in zip_longest(*members)],  # None where a node is smaller
    }
    groups = named.get(spec, [])
    try:
        for part in spec.split("/") if spec not in named else []:
            groups.append(sorted(rank for word in part.split(",") for rank in span(word)))
    except ValueError:  # not a rank of this job
        groups = []
    ranks = [rank for group in groups for rank in group]
    one_size = len({len(group) for group in groups}) == 1
    disjoint = len(set(ranks)) == len(ranks)
    if not ranks or not one_size or not disjoint or not set(ranks) <= set(world):
        what = f"world, node, cross or disjoint groups of one size among ranks 0 to {world[-1]}"
        got = f"got {spec} on {len(members)} nodes"
        raise ValueError(f"expected {what}, e.g. 0,1/2,3 or 0-3/4-7, {got}")
    return groups
