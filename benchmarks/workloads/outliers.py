"""Find the nodes, ranks and links that are slower than their peers."""

from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import median, median_low
from typing import Any, NamedTuple

from common.stats import show_seconds

Members = tuple[int, ...]  # numbers within a level: one rank, or both ends of a link
Costs = dict[Members, float]  # seconds of a rank or of a link; for a bandwidth, its inverse
Names = Mapping[str, Sequence[str]]  # level -> the name of each of its members

SIGMAS = 5.0
MARGIN = 0.10  # a smaller slowdown is not reported, however quiet the machine is
FAR = 5.0  # a slowdown by more than this factor cannot be explained by the load of other processes
MAD_TO_SIGMA = 1.4826  # median absolute deviation -> standard deviation of normal noise
MIN_PEERS = 6  # components of a kind, itself included, to name one where ranks share cores


class Component(NamedTuple):
    """A node, rail, rank or link. suspects: its members; two entries if one of two components is
    slow and it is impossible to tell which one."""

    level: str
    suspects: tuple[Members, ...]

    def name(self, names: Names | None = None) -> str:
        """`link 2 -> 5`. With the names of its level: `node3`, `rank 2 on node1`, or
        `link rank 2 on node1 -> rank 5 on node3`."""
        known = (names or {}).get(self.level)
        shown = []
        for members in self.suspects:
            ends = " -> ".join(known[member] if known else str(member) for member in members)
            prefix = "" if known and len(members) == 1 else f"{self.level} "
            shown.append(prefix + ends)
        return " or ".join(shown)


class Slowness(NamedTuple):
    """How slow a component is. factor: its cost divided by the median of its peers, or by the cost
    of its only peer; None if it misses an absolute limit that the user has set. peers: the number
    of components that were compared, itself included."""

    factor: float | None
    description: str
    peers: int = 0

    @property
    def is_far(self) -> bool:
        """Whether the load of other processes cannot explain it."""
        return self.factor is not None and self.factor > FAR


Findings = dict[tuple[Component, str], Slowness]  # a slow component and the quantity -> how slow


class Crowd(NamedTuple):
    """A host with more ranks than cores. Its scheduler makes ranks and links differ."""

    host: str
    ranks: int
    cores: int

    @property
    def factor(self) -> float:
        """The slowdown that the scheduler may cause."""
        return FAR * self.ranks / self.cores

    @property
    def text(self) -> str:
        """`3 ranks share 2 cores of vm`"""
        return f"{self.ranks} ranks share {self.cores} core{'s' * (self.cores > 1)} of {self.host}"

    def may_explain(self, found: Slowness) -> bool:
        """Whether the scheduler may be the cause. It is not the cause of a missed limit."""
        if found.factor is None:
            return False
        return found.factor <= self.factor or found.peers < MIN_PEERS


def most_crowded(hosts: Sequence[str], cores: Sequence[Collection[int]]) -> Crowd | None:
    """The host with the most ranks per core; None if none has more ranks than cores.

    hosts, cores: the host of each rank, and the numbers of the cores that the rank may use.
    """
    crowds = []
    for host in dict.fromkeys(hosts):
        of_ranks = [mine for name, mine in zip(hosts, cores, strict=True) if name == host]
        crowds.append(Crowd(host, len(of_ranks), len(set().union(*of_ranks))))
    worst = max(crowds, key=lambda crowd: crowd.factor)
    return worst if worst.ranks > worst.cores else None


def beyond(findings: Findings, crowd: Crowd | None) -> Findings:
    """The findings that a crowd does not explain."""
    return {
        key: found for key, found in findings.items() if not (crowd and crowd.may_explain(found))
    }


def in_both(first: Findings, second: Findings) -> Findings:
    """The findings that two measurements share, with the smaller factor, in the second's order."""
    return {
        finding: min(first[finding], found, key=lambda slowness: slowness.factor or 0.0)
        for finding, found in second.items()
        if finding in first
    }


def outliers(
    costs: dict[Any, float], sigmas: float, margin: float = MARGIN, noise: float = 0.0
) -> dict[Any, tuple[float, float]]:
    """Find the costs that exceed the median by `sigmas` deviations and by `margin`.

    The deviation is the scaled median absolute deviation: a few outliers move neither it nor the
    median (Hampel 1974). With few costs it may be far too small by chance, so it is at least
    `noise` (the standard deviation of a cost, as a fraction of it) times the median.

    Returns the factor and the number of deviations of each, in descending order of cost.
    """
    if len(costs) < 3:
        return {}
    middle = median(costs.values())
    if middle <= 0:  # most costs are below the resolution of the clock: there is no factor
        return {}
    deviation = MAD_TO_SIGMA * median(abs(cost - middle) for cost in costs.values())
    deviation = max(deviation, middle * max(noise, 1e-3))
    slow = {}
    for name, cost in sorted(costs.items(), key=lambda item: -item[1]):
        deviations = (cost - middle) / deviation
        if cost > middle * (1 + margin) and deviations > sigmas:
            slow[name] = (cost / middle, deviations)
    return slow


def find_slow(
    costs: Costs,
    levels: dict[str, list[int]],
    item: str,
    quantity: str,
    sigmas: float = SIGMAS,
    margin: float = MARGIN,
    of_two: bool = False,
    noise: float = 0.0,
    show: Callable[[float], str] = show_seconds,
) -> Findings:
    """Find the components that cost more than their peers.

    Levels are examined in order, and the items last: the ranks of a slow node are not reported in
    addition to the node, nor the links of a slow rank in addition to the rank.

    levels: the owner of each member, e.g. the node of each rank. item: the level of `costs`.
    quantity: what the costs measure, in words. of_two: whether to compare two components, too.
    noise: see `outliers`. show: formats a cost.
    """
    findings: Findings = {}
    for level, owner in [*levels.items(), (item, [])]:
        level_costs = medians(costs, owner) if owner else costs
        if of_two and len(level_costs) == 2:
            pair = slower_of_two(level_costs, level, quantity, margin, show)
            if pair:
                return findings | pair
        slow = outliers(level_costs, sigmas, margin, noise)
        for members, (factor, deviations) in slow.items():
            cost = level_costs[members]
            parts = f"{show(cost)} against {show(cost / factor)}"
            text = f"{factor:.2f}x the median time ({parts}), {deviations:.0f} sigmas"
            findings[Component(level, (members,)), quantity] = Slowness(
                factor, text, len(level_costs)
            )
        if owner:
            costs = unexplained(costs, owner, slow)
    return findings


def slower_of_two(
    costs: Costs, level: str, quantity: str, margin: float, show: Callable[[float], str]
) -> Findings:
    """Report both components as suspects if their costs differ by more than the margin: without a
    third one, either may be the abnormal one."""
    fast, slow = sorted(costs, key=lambda members: costs[members])
    if costs[fast] <= 0 or costs[slow] <= costs[fast] * (1 + margin):
        return {}
    # slower one first: a repeated measurement must find the same order
    component = Component(level, (slow, fast))
    factor = costs[slow] / costs[fast]
    text = f"{factor:.2f}x the time of the other ({show(costs[slow])} against {show(costs[fast])})"
    text += "; with two it is impossible to tell which one is at fault"
    return {(component, quantity): Slowness(factor, text, len(costs))}


def unexplained(costs: Costs, owner: list[int], slow: Collection[Members]) -> Costs:
    """Return the costs without those of members whose owner is slow."""
    return {
        members: cost
        for members, cost in costs.items()
        if not any((owner[member],) in slow for member in members)
    }


def medians(costs: Costs, owner: list[int]) -> Costs:
    """The median cost of each owner. The cost of a link counts for the owners of both ends."""
    # The lower median of an even number: one slow rank of two does not make a node slow, nor does
    # one slow link of two. With directed links, however, a node that only sends slowly is slow in
    # half of its costs, and each of its peers in fewer than half: there, the mean of the two middle
    # costs separates them.
    is_directed = any(members[::-1] in costs for members in costs if len(members) > 1)
    middle = median if is_directed else median_low
    costs_of: dict[int, list[float]] = {}
    for members, cost in costs.items():
        for number in {owner[member] for member in members}:
            costs_of.setdefault(number, []).append(cost)
    return {(number,): middle(values) for number, values in costs_of.items()}


def sentences(findings: Findings, names: Names | None = None) -> list[str]:
    """`slow rank 1 on vm: copy 2.03x the median time (3.32 ms against 1.63 ms), 16 sigmas`"""
    return [
        f"slow {component.name(names)}: {quantity} {found.description}"
        for (component, quantity), found in findings.items()
    ]
