"""Arithmetic on sets of time intervals: union, intersection, difference. Pure."""

from collections.abc import Iterable

Interval = tuple[float, float]  # start, end; start <= end


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as disjoint intervals in order; those that touch become one."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def intersection(a: Iterable[Interval], b: Iterable[Interval]) -> list[Interval]:
    """The points in both, as disjoint intervals in order."""
    left, right = union(a), union(b)
    both: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            both.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return both


def difference(a: Iterable[Interval], b: Iterable[Interval]) -> list[Interval]:
    """The points in a and not in b, as disjoint intervals in order."""
    holes = union(b)
    if not holes:
        return union(a)
    edges = [-float("inf"), *(edge for hole in holes for edge in hole), float("inf")]
    return intersection(a, list(zip(edges[::2], edges[1::2], strict=True)))


def length(intervals: Iterable[Interval]) -> float:
    """How much the intervals cover, what several of them cover counted once."""
    return sum(end - start for start, end in union(intervals))
