"""Which ranks work together: the whole job, each node, the same place of every node, or a list."""

from collections import Counter
from collections.abc import Sequence
from typing import Final

NAMED: Final = ("world", "node", "cross")

MAX_RANKS: Final = 10**6

Partition = list[tuple[str, tuple[int, ...]]]  # label and ranks of each group; no rank is in two


def parse_groups(text: str) -> str | list[tuple[int, ...]]:
    """`world`, `node`, `cross`, or groups of ranks: `0,1/2,3`, `0-3/4-7`.

    Raises ValueError for anything else, and where a rank is named twice.
    """
    if text in NAMED:
        return text
    groups = []
    for part in text.split("/"):
        ranks: list[int] = []
        for word in part.split(","):
            low, dash, high = word.strip().partition("-")
            last = high if dash else low
            if not (low.isdigit() and last.isdigit() and int(low) <= int(last) < MAX_RANKS):
                raise ValueError(
                    f"expected {', '.join(NAMED)} or groups of ranks like 0,1/2,3 or 0-3/4-7, "
                    f"got '{text}'"
                )
            ranks += range(int(low), int(last) + 1)
        groups.append(tuple(sorted(ranks)))
    counts = Counter(rank for group in groups for rank in group)
    twice = next((rank for rank, count in counts.items() if count > 1), None)
    if twice is not None:
        raise ValueError(
            f"rank {twice} is named twice in '{text}'; the groups run at the same time"
        )
    return groups


def partition(spec: str | list[tuple[int, ...]], nodes: list[int]) -> Partition:
    """The groups, given the node of each rank.

    Raises ValueError where a rank does not exist, or where `cross` has no two nodes of one size.
    """
    world = len(nodes)
    if isinstance(spec, list):
        for rank in (rank for group in spec for rank in group):
            if rank >= world:
                raise ValueError(
                    f"--groups names rank {rank}, and there are ranks 0 to {world - 1}"
                )
        return [(f"ranks {_runs(group)}", group) for group in spec]
    if spec == "world":
        return [("world", tuple(range(world)))]
    members = ranks_by_node(nodes)
    if spec == "node":
        return [(f"node {i}", ranks) for i, ranks in enumerate(members)]
    sizes = sorted({len(ranks) for ranks in members})
    if len(members) < 2 or len(sizes) > 1:
        raise ValueError(
            "--groups cross needs at least two nodes with as many ranks each, and there "
            f"{'is 1 node' if len(members) < 2 else f'are nodes of {sizes} ranks'}"
        )
    return [(f"cross {i}", ranks) for i, ranks in enumerate(zip(*members, strict=True))]


def ranks_by_node(nodes: Sequence[int]) -> list[tuple[int, ...]]:
    """The ranks of each node, given the node of each rank; nodes in the order of their ranks."""
    found: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        found.setdefault(node, []).append(rank)
    return [tuple(ranks) for ranks in found.values()]


def _runs(ranks: tuple[int, ...]) -> str:
    contiguous = len(ranks) > 2 and ranks == tuple(range(ranks[0], ranks[-1] + 1))
    return f"{ranks[0]}-{ranks[-1]}" if contiguous else ",".join(map(str, ranks))
