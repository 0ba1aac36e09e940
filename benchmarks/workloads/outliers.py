"""Who is slower than the others of its kind: nodes before ranks, ranks before links."""

from collections.abc import Collection, Mapping, Sequence
from statistics import median, median_low
from typing import Any, NamedTuple

Members = tuple[int, ...]  # of a level: one rank, or the two of a link
Costs = dict[Members, float]  # seconds of a rank, or of a link of two
Hosts = Mapping[str, Sequence[str]]  # level -> the host of each of its members

SIGMAS = 5.0
MARGIN = 0.10  # slower by less is not reported, however quiet the machine
MAD_TO_SIGMA = 1.4826  # times a median absolute deviation: a standard one, if noise is normal


class Who(NamedTuple):
    """Who is slow: a node, a rail, a rank or a link. Two suspects where nobody can tell."""

    level: str
    suspects: tuple[Members, ...]

    def name(self, hosts: Hosts | None = None) -> str:
        """`link 2 -> 5`, or `link 2 on a -> 5 on b` where the hosts of its level are known."""
        places = (hosts or {}).get(self.level)
        names = []
        for members in self.suspects:
            ends = [
                f"{member} on {places[member]}" if places else str(member) for member in members
            ]
            names.append(f"{self.level} {' -> '.join(ends)}")
        return " or ".join(names)


Findings = dict[tuple[Who, str], str]  # who, and at what -> by how much


def outliers(
    costs: dict[Any, float], sigmas: float, margin: float = MARGIN
) -> dict[Any, tuple[float, float]]:
    """What costs more than the median by `sigmas` deviations and by `margin`. The most costly comes
    first, with its factor and its deviations.

    The deviation is the median absolute one, scaled. The few that are slow move neither it nor the
    median (Hampel 1974).
    """
    if len(costs) < 3:
        return {}
    middle = median(costs.values())
    if middle <= 0:  # no time of most: nothing is a multiple of it
        return {}
    deviation = MAD_TO_SIGMA * median(abs(cost - middle) for cost in costs.values())
    # of a few costs those in the middle may be alike
    deviation = max(deviation, middle / 1000)
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
) -> Findings:
    """The nodes, ranks and links that cost more than their like, each at `what`.

    Level by level, then the items: what a slow node explains is not repeated for its ranks, and
    what a slow rank explains is not repeated for its links. levels: the owner of each member.
    of_two: where there are only two, compare them, too.
    """
    findings: Findings = {}
    for level, owner in [*levels.items(), (item, [])]:
        level_costs = medians(costs, owner) if owner else costs
        if of_two and len(level_costs) == 2:
            pair = slower_of_two(level_costs, level, what, margin)
            if pair:
                return findings | pair
        slow = outliers(level_costs, sigmas, margin)
        for members, (factor, deviations) in slow.items():
            how = f"{factor:.2f}x the median's time, {deviations:.0f} sigmas"
            findings[Who(level, (members,)), what] = how
        if owner:
            costs = unexplained(costs, owner, slow)
    return findings


def slower_of_two(costs: Costs, level: str, what: str, margin: float) -> Findings:
    """Both are suspects if one is slower by the margin: no median says which one is at fault."""
    fast, slow = sorted(costs, key=lambda members: costs[members])
    if costs[fast] <= 0 or costs[slow] <= costs[fast] * (1 + margin):
        return {}
    who = Who(level, (slow, fast))  # in this order: a second run may say otherwise
    factor = f"{costs[slow] / costs[fast]:.2f}x the other's"
    return {(who, what): f"{factor}, and of two nobody can tell which is at fault"}


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
    # of an even number of ranks the lower median: one slow rank of two makes no slow node
    middle = median if any(len(members) > 1 for members in costs) else median_low
    costs_of: dict[int, list[float]] = {}
    for members, cost in costs.items():
        for number in {owner[member] for member in members}:
            costs_of.setdefault(number, []).append(cost)
    return {(number,): middle(values) for number, values in costs_of.items()}


def sentences(findings: Findings, hosts: Hosts | None = None) -> list[str]:
    return [f"slow {who.name(hosts)}: {what} {how}" for (who, what), how in findings.items()]
