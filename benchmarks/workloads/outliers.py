"""Nodes, ranks and links that are slower than their peers, in this order."""

from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import median, median_low
from typing import Any, NamedTuple

from common.report import show_seconds

Members = tuple[int, ...]  # of a level: one rank, or the two of a link
Costs = dict[Members, float]  # seconds of a rank, or of a link of two
Names = Mapping[str, Sequence[str]]  # level -> the name of each of its members

SIGMAS = 5.0
MARGIN = 0.10  # slower by less is not reported, however quiet the machine
FAR = 5.0  # times as slow as its peers: no load of other processes explains it
MAD_TO_SIGMA = 1.4826  # times a median absolute deviation: a standard one, if noise is normal


class Who(NamedTuple):
    """A node, a rail, a rank or a link that is slow. Two suspects if one of two is slow, and it is
    impossible to tell which one."""

    level: str
    suspects: tuple[Members, ...]

    def name(self, names: Names | None = None) -> str:
        """`link 2 -> 5`; with the names of its level `node3`, `rank 2 on node1` or
        `link rank 2 on node1 -> rank 5 on node3`."""
        known = (names or {}).get(self.level)
        shown = []
        for members in self.suspects:
            ends = " -> ".join(known[member] if known else str(member) for member in members)
            prefix = "" if known and len(members) == 1 else f"{self.level} "
            shown.append(prefix + ends)
        return " or ".join(shown)


class Slowness(NamedTuple):
    """factor: times the median of its peers, or of the only other one; None if it misses a limit
    that the user has set. how: the same in words."""

    factor: float | None
    how: str

    @property
    def is_far(self) -> bool:
        """Whether it is too large for any load of the machine to explain."""
        return self.factor is not None and self.factor > FAR


Findings = dict[tuple[Who, str], Slowness]  # what is slow, and at what


def outliers(
    costs: dict[Any, float], sigmas: float, margin: float = MARGIN, noise: float = 0.0
) -> dict[Any, tuple[float, float]]:
    """What costs more than the median by `sigmas` deviations and by `margin`. The most costly comes
    first, with its factor and its deviations.

    The deviation is the median absolute one, scaled. The few that are slow move neither it nor the
    median (Hampel 1974). Of a few costs it may be far too small by chance, so it is at least
    `noise` of the median: the standard deviation of one cost, as a share.
    """
    if len(costs) < 3:
        return {}
    middle = median(costs.values())
    if middle <= 0:  # no time of most: nothing is a multiple of it
        return {}
    deviation = MAD_TO_SIGMA * median(abs(cost - middle) for cost in costs.values())
    deviation = max(deviation, middle * max(noise, 1e-3))
    slow = {}
    for name, cost in sorted(costs.items(), key=lambda item: -item[1]):
        deviations = (cost - middle) / deviation
        if cost > middle * (1 + margin) and deviations > sigmas:
            slow[name] = (cost / middle, deviations)
    return slow


def accuse(
    costs: Costs,
    levels: dict[str, list[int]],
    item: str,
    what: str,
    sigmas: float = SIGMAS,
    margin: float = MARGIN,
    of_two: bool = False,
    noise: float = 0.0,
    show: Callable[[float], str] = show_seconds,
) -> Findings:
    """The nodes, ranks and links that cost more than their peers, each at `what`.

    Level by level, then the items: what a slow node explains is not repeated for its ranks, and
    what a slow rank explains is not repeated for its links. levels: the owner of each member.
    of_two: if there are only two, compare them, too. noise: as in `outliers`. show: a cost as text.
    """
    findings: Findings = {}
    for level, owner in [*levels.items(), (item, [])]:
        level_costs = medians(costs, owner) if owner else costs
        if of_two and len(level_costs) == 2:
            pair = slower_of_two(level_costs, level, what, margin, show)
            if pair:
                return findings | pair
        slow = outliers(level_costs, sigmas, margin, noise)
        for members, (factor, deviations) in slow.items():
            cost = level_costs[members]
            parts = f"{show(cost)} against {show(cost / factor)}"
            how = f"{factor:.2f}x the median's time ({parts}), {deviations:.0f} sigmas"
            findings[Who(level, (members,)), what] = Slowness(factor, how)
        if owner:
            costs = unexplained(costs, owner, slow)
    return findings


def slower_of_two(
    costs: Costs, level: str, what: str, margin: float, show: Callable[[float], str]
) -> Findings:
    """Both are suspects if one is slower by the margin: no median says which one is at fault."""
    fast, slow = sorted(costs, key=lambda members: costs[members])
    if costs[fast] <= 0 or costs[slow] <= costs[fast] * (1 + margin):
        return {}
    who = Who(level, (slow, fast))  # in this order: a second run may say otherwise
    factor = costs[slow] / costs[fast]
    how = f"{factor:.2f}x the other's time ({show(costs[slow])} against {show(costs[fast])})"
    how += "; with two it is impossible to tell which one is at fault"
    return {(who, what): Slowness(factor, how)}


def unexplained(costs: Costs, owner: list[int], slow: Collection[Members]) -> Costs:
    """The costs of which no member has a slow owner."""
    left = Costs()
    for members, cost in costs.items():
        owners = {(owner[member],) for member in members}
        if owners.isdisjoint(slow):
            left[members] = cost
    return left


def medians(costs: Costs, owner: list[int]) -> Costs:
    """The median cost of each owner; a cost counts for the owners of all its members."""
    # Of an even number the lower median: one slow rank of two makes no slow node, nor does one slow
    # link of two. But if links have directions, a node that only sends slowly is slow in half of
    # its costs, and each of its peers in fewer: the mean of the middle two tells them apart.
    is_directed = any(members[::-1] in costs for members in costs if len(members) > 1)
    middle = median if is_directed else median_low
    costs_of: dict[int, list[float]] = {}
    for members, cost in costs.items():
        for number in {owner[member] for member in members}:
            costs_of.setdefault(number, []).append(cost)
    return {(number,): middle(values) for number, values in costs_of.items()}


def sentences(findings: Findings, names: Names | None = None) -> list[str]:
    return [
        f"slow {who.name(names)}: {what} {found.how}" for (who, what), found in findings.items()
    ]
