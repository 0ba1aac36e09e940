"""The race of several commands that are run in rounds: which is the fastest?

ab.py uses it to decide which command to drop. report.py repeats it with the reports in a folder.
"""

import math
from collections.abc import Callable, Sequence

from analysis.runs.load import Run
from analysis.runs.plan import Verdict
from analysis.runs.verdicts import Comparison, Design, Result, is_autocorrelated

Compared = Callable[[str, str, int], Comparison]  # names of two commands, number of rounds


def design_of(verdict: Verdict, looks: Sequence[int], interleave: bool, commands: int) -> Design:
    """How runs of ab.py are compared. looks: numbers of rounds. commands: number of commands.

    Every look at every pair of commands gets an equal share of the error rate.
    """
    all_looks = len(looks) * math.comb(commands, 2)
    allow = verdict.allow_disturbed
    return Design(verdict.margin, True, interleave, looks[0], allow, looks=all_looks)


def sides(
    runs: Sequence[Run], base: Sequence[str], test: Sequence[str]
) -> tuple[list[Run], list[Run]]:
    """The runs of two lists of paths, in the order of these lists."""
    run_of = {run.path: run for run in runs}
    return [run_of[path] for path in base], [run_of[path] for path in test]


class Race:
    """Find the fastest of several commands by successive elimination.

    Source: Even-Dar et al., J. Mach. Learn. Res. 7, 2006.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.racing = list(names)
        self.rounds = dict.fromkeys(names, 0)  # number of rounds of each command
        self.lost_to: dict[str, str] = {}  # dropped command -> the faster command
        self.best = names[0]

    def look(self, rounds: int, result_of: Callable[[str, str, int], Result]) -> bool:
        """Drop the commands that are slower than the fastest one. Returns whether the race has
        ended: one command is left, or the others are the same within the margin.

        rounds: number of rounds that have been run. result_of: compares two commands over this
        number of rounds.
        """
        self.rounds |= dict.fromkeys(self.racing, rounds)
        self.best = self.racing[0]
        for rival in self.racing[1:]:
            ratio = result_of(self.best, rival, rounds).ratio
            if ratio is not None and ratio < 1:
                self.best = rival
        rivals = [name for name in self.racing if name != self.best]
        results = {name: result_of(self.best, name, rounds) for name in rivals}
        slower = [name for name in rivals if is_slower(results[name])]
        self.lost_to |= dict.fromkeys(slower, self.best)
        self.racing = [name for name in self.racing if name not in slower]
        return all(results[name].verdict == "same" for name in self.racing if name != self.best)


def is_slower(result: Result) -> bool:
    """Whether TEST is significantly slower than BASE, by any amount."""
    return result.enough and result.interval is not None and result.interval[0] > 1


def overall(comparison: Comparison) -> Result:
    """The geometric mean over the cases, or the only case."""
    return comparison.mean or comparison.cases[0]


def against_the_best(race: Race, compared: Compared) -> dict[str, Comparison]:
    """Compare each other command with the best one. The fastest comes first."""
    comparisons = {}
    for name, rounds in race.rounds.items():
        if name != race.best:
            comparisons[name] = compared(race.best, name, rounds)
    fastest_first = sorted(comparisons, key=lambda name: overall(comparisons[name]).ratio or 1)
    return {name: comparisons[name] for name in fastest_first}


def conclusions(race: Race, comparisons: dict[str, Comparison], margin: float) -> list[str]:
    """The result of the race in one sentence, and a warning if rounds are not independent."""
    results = {name: overall(comparison) for name, comparison in comparisons.items()}
    lines = [sentence(race, results, margin)]
    if persistent := persistent_of(comparisons):
        lines.append(
            f"warning: {', '.join(persistent)} against {race.best}: the ratio is correlated from "
            "round to round, which the interval ignores; such rankings are wrong in more than 5% "
            "of cases"
        )
    return lines


def persistent_of(comparisons: dict[str, Comparison]) -> list[str]:
    """The commands whose ratios are correlated from round to round."""
    results = {name: overall(comparison) for name, comparison in comparisons.items()}
    return [name for name, result in results.items() if is_autocorrelated(result.pair_ratios)]


def is_clear(race: Race, results: dict[str, Result]) -> bool:
    """Whether every other command was significantly slower than the best command or another one."""
    return all(name in race.lost_to or is_slower(result) for name, result in results.items())


def sentence(race: Race, results: dict[str, Result], margin: float) -> str:
    """`best: X; Z is 1.12x slower (1.08 to 1.17)`, or `no clear best` if another command may be
    equally fast."""
    head = "best" if is_clear(race, results) else "no clear best; smallest mean time"
    parts = [f"{head}: {race.best}"]
    for name, result in results.items():
        factor = result.factor
        if factor is None:
            parts.append(f"{name} has no time to compare")
        elif is_slower(result):
            parts.append(f"{name} is {factor.as_factor(unit='x slower')}")
        elif result.verdict == "same":
            parts.append(f"{name} is the same within {100 * margin:g}%")
        elif name in race.lost_to:
            parts.append(f"{name} was slower than {race.lost_to[name]}")
        else:
            parts.append(f"{name} does not differ significantly: {factor.as_factor()}")
    caveats = dict.fromkeys(caveat for result in results.values() for caveat in result.caveats)
    return "; ".join(parts) + (f" [{', '.join(caveats)}]" if caveats else "")


def replay(looks: Sequence[int], rounds: dict[str, int], compared: Compared) -> tuple[Race, bool]:
    """Repeat the race with the rounds that each command has run. Returns whether it had ended."""

    def result_of(base: str, test: str, count: int) -> Result:
        return overall(compared(base, test, count))

    race = Race(list(rounds))
    common = min(rounds.values())
    if common < looks[0]:  # before the first look
        first, *others = rounds
        ratios = {name: result_of(first, name, common).ratio or 1 for name in others} | {first: 1}
        race.rounds, race.best = dict.fromkeys(rounds, common), min(ratios, key=ratios.__getitem__)
        return race, False
    for count in looks:
        if min(rounds[name] for name in race.racing) < count:
            return race, False
        if race.look(count, result_of):
            return race, True
    return race, True
