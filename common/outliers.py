"""Who is slower than the others of its kind: nodes before ranks, ranks before links."""

from collections.abc import Mapping, Sequence
from statistics import median, median_low
from typing import Any, NamedTuple

Members = tuple[int, ...]  # of a level: one rank, or the two of a link
Costs = dict[Members, float]  # seconds of a rank, or of a link of two
Hosts = Mapping[str, Sequence[str]]  # level -> the host of each of its members

SIGMAS = 5.0
MARGIN = 0.10  # slower by less is not reported, however quiet the machine
MAD_TO_SIGMA = 1.4826  # a median absolute deviation is a standard one, where noise is normal


class Who(NamedTuple):
    """Who is slow: a node, a rail, a rank or a link. Several suspects where nobody can tell."""

    level: str
    suspects: tuple[Members, ...]

    def name(self, hosts: Hosts | None = None) -> str:
        """`link 2 -> 5`, or `link 2 on a -> 5 on b` where the hosts of its level are known."""
        places = (hosts or {}).get(self.level)
        names = []
        for members in self.suspects:
            each = [f"{n} on {places[n]}" if places else str(n) for n in members]
            names.append(f"{self.level} {' -> '.join(each)}")
        return " or ".join(names)


Findings = dict[tuple[Who, str], str]  # who, and at what -> by how much


def outliers(
    costs: dict[Any, float], sigmas: float, margin: float = MARGIN
) -> dict[Any, tuple[float, float]]:
    """What costs more than the median by `sigmas` deviations and `margin` -> factor, deviations.

    The median absolute deviation, scaled: the few that are slow move neither (Hampel 1974).
    """
    if len(costs) < 3:
        return {}
    middle = median(costs.values())
    deviation = MAD_TO_SIGMA * median(abs(cost - middle) for cost in costs.values())
    deviation = max(deviation, middle / 1000, 1e-300)  # of few, those in the middle may be alike
    far = {name: (cost - middle) / deviation for name, cost in costs.items()}
    slow = [n for n, cost in costs.items() if cost > middle * (1 + margin) and far[n] > sigmas]
    return {n: (costs[n] / middle, far[n]) for n in sorted(slow, key=lambda n: -costs[n])}


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

    Level by level, then the items: what a slow node explains is not repeated for its ranks, nor
    what a rank explains for its links. levels: the owner of each member. of_two: compare two, too.
    """
    found: Findings = {}
    for level, owner in [*levels.items(), (item, [])]:
        of = medians(costs, owner) if owner else costs
        if of_two and len(of) == 2:
            fast, slow = sorted(of, key=lambda members: of[members])
            if of[slow] > of[fast] * (1 + margin):
                who = Who(level, (slow, fast))  # a second run may say otherwise
                how = f"{of[slow] / of[fast]:.2f}x the other's"
                return found | {(who, what): f"{how}, and of two nobody can tell which is at fault"}
        far = outliers(of, sigmas, margin)
        for members, (factor, deviations) in far.items():
            how = f"{factor:.2f}x the median's time, {deviations:.0f} sigmas"
            found[Who(level, (members,)), what] = how
        if owner:
            costs = {m: c for m, c in costs.items() if not {(owner[i],) for i in m} & {*far}}
    return found


def medians(costs: Costs, owner: list[int]) -> Costs:
    """The median cost of each owner; a cost counts for the owners of all its members."""
    # of an even number of ranks the lower median: one slow rank of two makes no slow node
    middle = median if any(len(members) > 1 for members in costs) else median_low
    found: dict[int, list[float]] = {}
    for members, cost in costs.items():
        for number in {owner[member] for member in members}:
            found.setdefault(number, []).append(cost)
    return {(number,): middle(some) for number, some in found.items()}


def sentences(findings: Findings, hosts: Hosts | None = None) -> list[str]:
    return [f"slow {who.name(hosts)}: {what} {how}" for (who, what), how in findings.items()]
