"""Links between ranks or nodes: who meets whom in which round, and which link is slow. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

Pair = tuple[int, int]

# a median absolute deviation times this is a standard deviation, where noise is normal
MAD_TO_SIGMA: Final = 1.4826
MARGIN: Final = 0.10  # slower by less is not reported, however quiet the machine


def round_count(n: int) -> int:
    """How many rounds a round-robin tournament of n has: n - 1; n for an odd n; 0 under 2."""
    return 0 if n < 2 else n - 1 + n % 2


def pairs_of(n: int, number: int) -> list[Pair]:
    """The pairs of one round, from 0, of a tournament of n: each pair of all meets once in it.

    Nobody is in two pairs of a round; of an odd n one in turn has nobody to meet. The circle
    method: one seat stays, the others move on by one place a round.
    """
    last = round_count(n)  # of an odd number nobody has this seat

    def seat(place: int) -> int:
        return 0 if place == 0 else (place - 1 - number) % last + 1

    found = []
    for place in range((last + 1) // 2):
        one, other = seat(place), seat(last - place)
        if max(one, other) < n:
            found.append((min(one, other), max(one, other)))
    return found


def rounds(n: int) -> list[list[Pair]]:
    """All rounds at once: every pair of n, so for small n only."""
    return [pairs_of(n, number) for number in range(round_count(n))]


@dataclass(frozen=True)
class Outlier:
    """Something slower than its like: `factor` times the median, `sigmas` deviations above it."""

    name: tuple[int, ...]
    factor: float
    sigmas: float


def outliers(
    costs: Sequence[tuple[tuple[int, ...], float]], sigmas: float
) -> tuple[list[Outlier], float]:
    """What costs more than the median by `sigmas` deviations and MARGIN; and the median.

    costs: (name, seconds or seconds per byte). The deviation is the median absolute one, scaled:
    neither it nor the median moves with the few that are slow (Hampel 1974, "The influence curve
    and its role in robust estimation"). Under 3 there is nothing to compare with.
    """
    if len(costs) < 3:
        return [], median([cost for _, cost in costs]) if costs else 0.0
    middle = median([cost for _, cost in costs])
    deviation = MAD_TO_SIGMA * median([abs(cost - middle) for _, cost in costs])
    found = []
    for name, cost in costs:
        if cost <= middle * (1 + MARGIN) or cost - middle <= sigmas * deviation:
            continue
        far = (cost - middle) / deviation if deviation > 0 else float("inf")
        found.append(Outlier(name, cost / middle, far))
    return sorted(found, key=lambda outlier: -outlier.factor), middle


def slow_members(costs: Sequence[tuple[Pair, float]], sigmas: float) -> list[Outlier]:
    """The ranks or nodes whose links' median is an outlier among all members' medians."""
    of: dict[int, list[float]] = {}
    for pair, cost in costs:
        for member in pair:
            of.setdefault(member, []).append(cost)
    medians = [((member,), median(values)) for member, values in sorted(of.items())]
    return outliers(medians, sigmas)[0]


def slow_links(
    costs: Sequence[tuple[Pair, float]], members: Sequence[Outlier], sigmas: float
) -> list[Outlier]:
    """The links that are outliers, less those of members that are slow as a whole."""
    named = {member.name[0] for member in members}
    found, _ = outliers(costs, sigmas)
    return [outlier for outlier in found if not named & set(outlier.name)]
