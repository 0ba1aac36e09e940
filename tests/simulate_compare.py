"""How often does compare.py err? Simulated runs whose true ratio is known, through compare().

    python tests/simulate_compare.py            all tables of docs/compare.md, some minutes
    python tests/simulate_compare.py quick      fewer comparisons, half a minute
    python tests/simulate_compare.py races      one part: comparisons, controls or races

A run's iterations are AR(1) noise about a level of its own; levels differ from run to run. Prints
the coverage of the intervals (95 % is right), how often runs that are alike are called different,
and how often runs that are 5 and 10 % slower are found; what a control run (ab.py without --b) is
worth; how often race.py drops the best arm. Seeded: the same numbers every time.
"""

import sys
from collections.abc import Sequence
from functools import cache, partial
from math import log
from pathlib import Path

import numpy as np
import tabulate
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.commands import planned_looks
from analysis.load import Row, Run
from analysis.race import Race, design_of, is_slower, results_against, run_race
from analysis.verdicts import Comparison, Design, Result, compare, estimate

ITERATIONS, BLOCKS = 48, 24
SCATTER, NOISE, CORRELATION = 0.03, 0.05, 0.5  # of runs; of iterations, and of neighbours
Times = NDArray[np.float64]  # [cases, runs, iterations], of a true time of 1


def simulate(
    cases: int,
    runs: int,
    rng: np.random.Generator,
    scatter: float = SCATTER,
    noise: float = NOISE,
    correlation: float = CORRELATION,
) -> Times:
    x = rng.normal(0, 1, (cases, runs, ITERATIONS))
    for i in range(1, ITERATIONS):  # a stationary AR(1) process
        x[..., i] = correlation * x[..., i - 1] + np.sqrt(1 - correlation**2) * x[..., i]
    return np.asarray(np.exp(rng.normal(0, scatter, (cases, runs, 1)) + noise * x))


def as_runs(times: Times, name: str) -> list[Run]:
    found = []
    rounds = [ITERATIONS // BLOCKS] * BLOCKS
    for j in range(times.shape[1]):
        medians = np.median(times[:, j], axis=1).tolist()
        rows = {
            str(i): Row(
                {"case": i}, [], {}, rounds, measure="step", time_s=m, times_s=own, name=str(i)
            )
            for i, (m, own) in enumerate(zip(medians, times[:, j], strict=True))
        }
        run = Run("simulated", {}, started_at=f"{j:04}", status="complete", rows=rows)
        run.label = f"{name} {j}"
        found.append(run)
    return found


def compared(base: Times, test: Times, design: Design) -> Comparison:
    return compare(as_runs(base, "base"), as_runs(test, "test"), design)


def coverage(found: Comparison, ratio: float) -> float:
    """Of the intervals those that hold the truth, in %."""
    held = [case.interval[0] <= ratio <= case.interval[1] for case in found.cases if case.interval]
    return 100 * float(np.mean(held))


def print_coverage(cases: int, rng: np.random.Generator) -> list[float]:
    """TEST is truly 5 % slower."""
    scenarios = {
        "independent iterations": {"correlation": 0.0},
        "correlated iterations (AR(1), 0.9)": {"correlation": 0.9},
        "runs alike, correlated iterations": {"correlation": 0.9, "scatter": 0.0},
        "runs differ by 10 %": {"scatter": 0.1},
    }
    sizes = ((2, 2), (3, 3), (6, 6), (10, 10), (3, 6), (1, 5))
    rows, every = [], []
    for name, options in scenarios.items():
        held = []
        for m, n in sizes:
            base = simulate(cases, m, rng, **options)
            test = 1.05 * simulate(cases, n, rng, **options)
            held.append(coverage(compared(base, test, Design()), 1.05))
        rows.append([name, *held])
        every += held
    heads = [f"{m}" if m == n else f"{m} and {n}" for m, n in sizes]
    print("Intervals that hold the truth, in %, by runs a side\n")
    print(tabulate.tabulate(rows, ["", *heads], "github", floatfmt=".1f"), "\n")
    return every


def print_drift(cases: int, rng: np.random.Generator) -> list[float]:
    """The machine drifts, a random walk of 3 % a run, while the sides take turns: AB BA AB.

    Interleaved: it drifts from block to block, and both runs of a pair see that.
    """
    rows, every = [], []
    for runs in (4, 6, 10):
        drift = np.cumsum(rng.normal(0, 0.03, (cases, 2 * runs, 1)), axis=1)
        first = np.arange(runs) % 2  # whether TEST goes first in the pair
        base, test = (
            simulate(cases, runs, rng, scatter=0.01) * np.exp(drift[:, 2 * np.arange(runs) + order])
            for order in (first, 1 - first)
        )
        slow = np.repeat(rng.exponential(0.1, (cases, runs, BLOCKS)), ITERATIONS // BLOCKS, axis=2)
        near = np.repeat(rng.normal(0, 0.01, (cases, runs, BLOCKS)), ITERATIONS // BLOCKS, axis=2)
        turns = [simulate(cases, runs, rng, scatter=0.01) * np.exp(slow + near * i) for i in (0, 1)]
        plans: tuple[tuple[str, Times, Times, Design], ...] = (
            ("one run after the other", base, test, Design()),
            ("--paired", base, test, Design(paired=True)),
            ("--interleaved", turns[0], turns[1], Design(paired=True, interleaved=True)),
        )
        for name, a, b, design in plans:
            found = compared(a, 1.05 * b, design)
            held = coverage(found, 1.05)
            rows.append([runs, name, held, half_width(found)])
            every += [held] if design.paired else []
    print("A machine that drifts, runs a side\n")
    heads = ["runs", "how", "hold the truth (%)", "half width (%)"]
    print(tabulate.tabulate(rows, heads, "github", floatfmt=".1f"), "\n")
    return every


def print_verdicts(campaigns: int, rng: np.random.Generator) -> list[float]:
    """Campaigns of 6 cases each: all alike (A/A), or all 5 or 10 % slower."""
    rows, false_alarms = [], []
    for scatter in (0.01, 0.02, 0.03, 0.05):
        for runs in (3, 6, 10):
            shares = []
            for ratio in (1.0, 1.05, 1.10):
                cells = []
                for _ in range(campaigns):
                    base, test = (simulate(6, runs, rng, scatter, 0.02) for _ in range(2))
                    cells += [case.verdict for case in compared(base, ratio * test, Design()).cases]
                slower = 100 * cells.count("slower") / len(cells)
                alarms = slower + 100 * cells.count("faster") / len(cells)
                shares.append(alarms if ratio == 1.0 else slower)
            false_alarms.append(shares[0])
            rows.append([f"{100 * scatter:g} %", runs, *shares])
    print("Shares of cases, in %; --margin 2%\n")
    heads = ["runs differ by", "runs a side", "A/A: called", "5 %: slower", "10 %: slower"]
    print(tabulate.tabulate(rows, heads, "github", floatfmt=".1f"))
    return false_alarms


def half_width(found: Comparison) -> float:
    """The median half width of the intervals, in %."""
    widths = [log(c.interval[1] / c.interval[0]) / 2 for c in found.cases if c.interval]
    return 100 * float(np.median(widths))


def print_smallest_change(cases: int, rng: np.random.Generator) -> list[float]:
    """A control says which change so many pairs show. Is just that change shown in 90 %?"""
    rows, every = [], []
    for runs in (3, 6, 10, 20):
        first, second = (simulate(cases, runs, rng) for _ in range(2))
        control = compared(first, second, Design(paired=True))
        changes = np.array([case.smallest_change for case in control.cases], dtype=float)
        factors = 1 + changes[:, None, None]
        base, test = (simulate(cases, runs, rng) for _ in range(2))
        found = compared(base, factors * test, Design(paired=True))
        shown = [100.0 * is_slower(case) for case in found.cases]
        every.append(float(np.mean(shown)))
        rows.append([runs, 100 * float(np.median(changes)), every[-1]])
    print("Runs differ by 3 %: the smallest change of a control, and how often it is shown\n")
    heads = ["pairs", "smallest change (%)", "shown (%)"]
    print(tabulate.tabulate(rows, heads, "github", floatfmt=".1f"), "\n")
    return every


def print_control(cases: int, rng: np.random.Generator) -> list[float]:
    """Few runs with the noise of a control of 6 runs a side; some scatter more or less than it.

    Returns the coverage where they scatter alike.
    """
    rows, alike = [], []
    for scatter in (0.015, 0.03, 0.06):
        for runs in (1, 2, 3, 6):
            first, second = (simulate(cases, 6, rng) for _ in range(2))
            control = compared(first, second, Design())
            base, test = (simulate(cases, runs, rng, scatter) for _ in range(2))
            base_runs, test_runs = as_runs(base, "base"), as_runs(1.05 * test, "test")
            found = compare(base_runs, test_runs, Design(), control)
            without = compare(base_runs, test_runs, Design())
            used = [100.0 * ("the control is not used" not in c.reason) for c in found.cases]
            row: list[object] = [f"{100 * scatter:g} %", runs, float(np.mean(used))]
            row += [coverage(found, 1.05), half_width(found)]
            row.append(half_width(without) if runs > 1 else None)
            rows.append(row)
            if scatter == SCATTER:
                alike.append(coverage(found, 1.05))
    print("With --control of 6 runs a side, whose runs differ by 3 %\n")
    heads = ["runs differ by", "runs a side", "control used (%)", "hold the truth (%)"]
    heads += ["half width (%)", "without control (%)"]
    print(tabulate.tabulate(rows, heads, "github", floatfmt=".1f"), "\n")
    return alike


RACES = {
    "4 arms, one 10 % slower": (1.0, 1.0, 1.0, 1.1),
    "4 arms, 2 % apart": (1.0, 1.02, 1.04, 1.06),
    "4 arms, alike": (1.0, 1.0, 1.0, 1.0),
    "8 arms, up to 20 % slower": (1.0, 1.01, 1.02, 1.05, 1.05, 1.1, 1.1, 1.2),
}
MOST_RUNS = 24  # of an arm


def simulate_races(ratios: Sequence[float], races: int, rng: np.random.Generator) -> list[Race]:
    """Races of arms with these true times. Each race is a case of the comparisons."""
    looks = planned_looks(6, MOST_RUNS)
    drift = np.exp(np.cumsum(rng.normal(0, 0.03, (races, MOST_RUNS, 1)), axis=1))
    times = {}  # of each arm: [races, runs]
    for number, ratio in enumerate(ratios):
        iterations = ratio * drift * simulate(races, MOST_RUNS, rng)
        times[f"arm {number}"] = np.median(iterations, axis=2)
    design = design_of(list(times), looks, 0.02, False)

    @cache
    def results(base: str, test: str, rounds: int) -> list[Result]:
        by_race = (times[test] / times[base])[:, :rounds].tolist()
        cases = [Result("simulated", {"race": i}, pair_ratios=r) for i, r in enumerate(by_race)]
        estimate(cases, design)
        return cases

    def result_of(race: int, base: str, test: str, rounds: int) -> Result:
        return results(base, test, rounds)[race]

    done = []
    for number in range(races):
        of_race = partial(result_of, number)
        race = run_race(list(times), looks, lambda racing, rounds: None, of_race)
        against = results_against(race, race.best, of_race)
        lost = {name: race.best for name, result in against.items() if is_slower(result)}
        race.dropped |= lost
        done.append(race)
    return done


def print_races(races: int, rng: np.random.Generator) -> list[float]:
    """Returns how often an arm is called slower although none is faster, in % of the races."""
    rows, errors = [], []
    for name, ratios in RACES.items():
        done = simulate_races(ratios, races, rng)
        best = {f"arm {i}" for i, ratio in enumerate(ratios) if ratio == min(ratios)}
        slowest = f"arm {len(ratios) - 1}"
        wrong = 100 * np.mean([bool(best & race.dropped.keys()) for race in done])
        named = 100 * np.mean([race.best in best for race in done])
        found = 100 * np.mean([slowest in race.dropped for race in done])
        runs = float(np.mean([sum(race.rounds.values()) for race in done]))
        most = MOST_RUNS * len(ratios)
        errors.append(float(wrong))
        rows.append([name, wrong, named, found, runs, most, 100 * (1 - runs / most)])
    print(f"{races} races each; runs differ by 3 %, and the machine drifts by 3 % a round\n")
    heads = ["arms", "best called slower (%)", "a best one named (%)", "last one dropped (%)"]
    heads += ["runs", "all to the end", "saved (%)"]
    print(tabulate.tabulate(rows, heads, "github", floatfmt=".1f"), "\n")
    return errors


def check_comparisons(quick: bool) -> bool:
    """Tables of intervals and verdicts. Returns whether the numbers are as they should be."""
    rng = np.random.default_rng(2024)
    held = print_coverage(400 if quick else 3000, rng) + print_drift(400 if quick else 2000, rng)
    alarms = print_verdicts(20 if quick else 200, rng)
    low, high = (90.0, 99.5) if quick else (93.0, 97.0)
    print(f"\n# coverage {min(held):.1f} to {max(held):.1f} %; A/A at most {max(alarms):.1f} %\n")
    return low <= min(held) and max(held) <= high and max(alarms) <= 5


def check_controls(quick: bool) -> bool:
    """Tables of what a control is worth."""
    rng = np.random.default_rng(2025)
    shown = print_smallest_change(400 if quick else 3000, rng)
    held = print_control(400 if quick else 3000, rng)
    print(f"# the smallest change is shown in {min(shown):.1f} to {max(shown):.1f} %")
    print(f"# with a control that is right the coverage is {min(held):.1f} to {max(held):.1f} %\n")
    return min(shown) > 85 and min(held) > (90 if quick else 93)


def check_races(quick: bool) -> bool:
    """The table of races."""
    slower = print_races(100 if quick else 2000, np.random.default_rng(2026))
    print(f"# the best arm is called slower in at most {max(slower):.1f} % of the races")
    return max(slower) <= 5


def main() -> int:
    parts = {"comparisons": check_comparisons, "controls": check_controls, "races": check_races}
    words = sys.argv[1:]
    names = [name for name in parts if name in words] or list(parts)
    results = [parts[name]("quick" in words) for name in names]
    return int(not all(results))


if __name__ == "__main__":
    sys.exit(main())
