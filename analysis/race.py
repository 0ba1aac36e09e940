"""Several commands, run in rounds: which is the fastest, and how each compares with it.

ab.py decides by this file which command to drop, and report.py finds the same order again in the
reports of a folder.
"""

import math
from collections.abc import Callable, Sequence

from analysis.load import Run
from analysis.plan import Verdict
from analysis.verdicts import Comparison, Design, Result, persists

Compared = Callable[[str, str, int], Comparison]  # the first rounds of two commands, by their names


def design_of(verdict: Verdict, looks: Sequence[int], interleave: bool, commands: int) -> Design:
    """How runs of ab.py are compared. looks: numbers of rounds; commands: their number.

    Each look at each pair of commands has its part of the error rate: any of the pairs may count.
    """
    all_looks = len(looks) * math.comb(commands, 2)
    allow = verdict.allow_disturbed
    return Design(verdict.margin, True, interleave, looks[0], allow, looks=all_looks)


def sides(
    runs: Sequence[Run], base: Sequence[str], test: Sequence[str]
) -> tuple[list[Run], list[Run]]:
    """The runs of two lists of paths, in the order of the lists."""
    run_of = {run.path: run for run in runs}
    return [run_of[path] for path in base], [run_of[path] for path in test]


class Race:
    """Which of several commands is the fastest, as far as their rounds tell.

    Successive elimination (Even-Dar et al., J. Mach. Learn. Res. 7, 2006).
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.racing = list(names)
        self.rounds = dict.fromkeys(names, 0)  # how many each has run
        self.lost_to: dict[str, str] = {}  # who was dropped, and who was faster
        self.best = names[0]

    def look(self, rounds: int, result_of: Callable[[str, str, int], Result]) -> bool:
        """Drop those that are slower than the fastest. Whether there is no more to find out."""
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
    """Whether TEST is slower than BASE with confidence, by however little."""
    return result.enough and result.interval is not None and result.interval[0] > 1


def overall(comparison: Comparison) -> Result:
    """The geometric mean over the cases, or the only case."""
    return comparison.mean or comparison.cases[0]


def against_the_best(race: Race, compared: Compared) -> dict[str, Comparison]:
    """Each other command against the best one, the fastest first."""
    comparisons = {}
    for name, rounds in race.rounds.items():
        if name != race.best:
            comparisons[name] = compared(race.best, name, rounds)
    fastest_first = sorted(comparisons, key=lambda name: overall(comparisons[name]).ratio or 1)
    return {name: comparisons[name] for name in fastest_first}


def conclusions(race: Race, comparisons: dict[str, Comparison], margin: float) -> list[str]:
    """The race in one sentence, and a warning if rounds depend on each other."""
    results = {name: overall(comparison) for name, comparison in comparisons.items()}
    lines = [sentence(race, results, margin)]
    if persistent := persistent_of(comparisons):
        lines.append(
            f"warning: {', '.join(persistent)} against {race.best}: a level that persists over "
            "rounds; it is not in the interval, and such orders err more often than 5 %"
        )
    return lines


def persistent_of(comparisons: dict[str, Comparison]) -> list[str]:
    """The commands whose ratios of successive rounds depend on each other."""
    results = {name: overall(comparison) for name, comparison in comparisons.items()}
    return [name for name, result in results.items() if persists(result.pair_ratios)]


def is_clear(race: Race, results: dict[str, Result]) -> bool:
    """Whether each of the other commands was slower than the best one, or than another one."""
    return all(name in race.lost_to or is_slower(result) for name, result in results.items())


def sentence(race: Race, results: dict[str, Result], margin: float) -> str:
    """`best: X; Z is 1.12 (1.08 to 1.17) times slower`; of equals none is called the best."""
    head = "best" if is_clear(race, results) else "no clear best; smallest mean time"
    parts = [f"{head}: {race.best}"]
    for name, result in results.items():
        if result.interval is None:
            parts.append(f"{name} has no time to compare")
        elif is_slower(result):
            low, high = result.interval
            parts.append(f"{name} is {result.ratio:.3g} ({low:.3g} to {high:.3g}) times slower")
        elif result.verdict == "same":
            parts.append(f"{name} is the same within {100 * margin:g} %")
        elif name in race.lost_to:
            parts.append(f"{name} was slower than {race.lost_to[name]}")
        else:
            parts.append(f"{name} cannot be told apart from it")
    return "; ".join(parts)


def replay(looks: Sequence[int], rounds: dict[str, int], compared: Compared) -> tuple[Race, bool]:
    """The race again from the rounds that each command has run, and whether it was finished."""

    def result_of(base: str, test: str, count: int) -> Result:
        return overall(compared(base, test, count))

    race = Race(list(rounds))
    common = min(rounds.values())
    if common < looks[0]:  # nothing was decided yet
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
