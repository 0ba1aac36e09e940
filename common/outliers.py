"""Who is slower than the others of its kind: nodes before ranks, ranks before links."""

import re
from statistics import median, median_low
from typing import Any

Costs = dict[tuple[int, ...], float]  # of members: seconds of a rank, or of a link of two
# who, and words with places for two numbers -> times the median's cost, deviations above it
Findings = dict[tuple[str, str], tuple[float, float]]

SIGMAS = 5.0
MARGIN = 0.10  # slower by less is not reported, however quiet the machine
BY = " {:.2f}x the median's time, {:.0f} sigmas"
MAD_TO_SIGMA = 1.4826  # a median absolute deviation is a standard one, where noise is normal


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
    """`node 1`, `rank 3`, `link 2 -> 5` that cost more than their like, each with words on `what`.

    Level by level, then the items: what a slow node explains is not repeated for its ranks, nor
    what a rank explains for its links. levels: the owner of each member. of_two: compare two, too.
    """
    found: Findings = {}
    for level, owner in [*levels.items(), (item, [])]:
        of = medians(costs, owner) if owner else costs
        if of_two and len(of) == 2 and max(of.values()) > min(of.values()) * (1 + margin):
            slower = sorted(of, key=lambda member: -of[member])  # a second run may say otherwise
            who = " or ".join(f"{level} {name(member)}" for member in slower)
            words = f"{what} {{:.2f}}x the other's, and of two nobody can tell which is at fault"
            return found | {(who, words): (max(of.values()) / min(of.values()), 0)}
        slow = outliers(of, sigmas, margin)
        found |= {(f"{level} {name(member)}", what + BY): by for member, by in slow.items()}
        if owner:
            costs = {m: c for m, c in costs.items() if not {(owner[i],) for i in m} & {*slow}}
    return found


def judge(
    values: dict[int, dict[str, Any]],
    item: str,
    levels: dict[str, list[int]],
    kinds: list[str],
    limits: dict[str, float],
    sigmas: float = SIGMAS,
    margin: float = MARGIN,
) -> Findings:
    """Who takes longer than the others of its kind, or has a rate below a limit.

    values: the metrics of each rank, node, ...: what `item` says. kinds: of each. limits: by the
    ends of the names of rates. See also `accuse`.
    """
    found: Findings = {}
    for metric in dict.fromkeys(metric for metrics in values.values() for metric in metrics):
        what = metric.replace("_", " ")
        of = {number: metrics[metric] for number, metrics in values.items() if metric in metrics}
        for limit in [limit for end, limit in limits.items() if metric.endswith(end)]:
            low = {number: (value, limit) for number, value in of.items() if value < limit}
            words = f"{what} {{:.3g}}, under {{:.3g}}"
            found |= {(f"{item} {number}", words): by for number, by in low.items()}
        if metric.endswith("_s") and not metric.endswith("_per_s"):
            what = what.removesuffix(" s")
            for kind in dict.fromkeys(kinds):
                costs: Costs = {(n,): value for n, value in of.items() if kinds[n] == kind}
                found |= accuse(costs, levels, item, what, sigmas, margin, of_two=True)
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


def name(members: tuple[int, ...]) -> str:
    return " -> ".join(map(str, members))


def sentences(findings: Findings) -> list[str]:
    return [f"slow {who}: {words.format(*by)}" for (who, words), by in findings.items()]


def on_hosts(text: str, environment: dict[str, Any]) -> str:
    """`rank 1 on node2` for `rank 1`, and so for links and nodes."""
    hosts = {"node": environment["hosts"]}
    ranks = [row["host"] for row in environment["ranks"]]
    number = r"(rank|node|link|->) (\d+)"
    return re.sub(number, lambda m: f"{m[0]} on {hosts.get(m[1], ranks)[int(m[2])]}", text)
