"""Which ranks belong together: the nodes of a job, and its parts by a word of the command line."""

from itertools import zip_longest


def partition(spec: str, nodes: list[int]) -> list[list[int]]:
    """Groups of ranks, of one size and disjoint. nodes: of each rank.

    `world`, `rank` (each by itself), `node`, `cross` (the first ranks of all nodes, the second
    ones, ...), or ranks as `0,1/2,3` and `0-3/4-7`. Raises ValueError.
    """
    everyone = list(range(len(nodes)))

    def span(word: str) -> range:
        first, _, last = word.partition("-")
        if int(last or first) not in everyone:  # before a range of as many numbers is made
            raise ValueError
        return range(int(first), int(last or first) + 1)

    members: list[list[int]] = [[] for _ in range(max(nodes) + 1)]
    for rank, node in enumerate(nodes):
        members[node].append(rank)
    named: dict[str, list[list[int]]] = {
        "world": [everyone],
        "rank": [[rank] for rank in everyone],
        "node": members,
        "cross": [list(ranks) for ranks in zip_longest(*members)],  # uneven nodes: with None
    }
    groups = named.get(spec, [])
    try:
        for part in spec.split("/") if spec not in named else []:
            groups.append(sorted(rank for word in part.split(",") for rank in span(word)))
    except ValueError:  # a word that is no rank
        groups = []
    ranks = [rank for group in groups for rank in group]
    one_size = len({len(group) for group in groups}) == 1
    disjoint = len(set(ranks)) == len(ranks)
    if not ranks or not one_size or not disjoint or not set(ranks) <= set(everyone):
        what = f"world, node, cross or disjoint groups of one size among ranks 0 to {everyone[-1]}"
        got = f"got {spec} on {len(members)} nodes"
        raise ValueError(f"expected {what}, e.g. 0,1/2,3 or 0-3/4-7, {got}")
    return groups
