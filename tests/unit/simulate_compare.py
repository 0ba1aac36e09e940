"""compare.py on simulated runs whose true ratio is known: coverage, false calls, power.

    python tests/unit/simulate_compare.py              the tables of docs/numbers.md; 10 minutes
    python tests/unit/simulate_compare.py power        one of coverage, single-run, drift, power,
                                                       history

test_compare.py asserts the first of them, with fewer comparisons.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common.compare import Comparison, compare
from common.history import study
from common.runs import Run, RunCase

ITERATIONS = 50
# What a run's iterations, and its level, are made of; in relative times. `scatter`: how much runs
# differ, `noise` and `ar`: the iterations and the correlation of neighbours.
Scenario = dict[str, float]
NORMAL: Scenario = {"scatter": 0.03, "noise": 0.05, "ar": 0.0}
SCENARIOS: dict[str, Scenario] = {
    "independent iterations": NORMAL,
    "correlated iterations (AR(1), 0.9)": NORMAL | {"ar": 0.9},
    "drift within runs (10 % of a run's time)": NORMAL | {"ar": 0.5, "drift": 0.1},
    "outliers: 5 % of iterations, +50 %": NORMAL | {"ar": 0.5, "outliers": 0.05},
    "two modes, +20 %, switching every 10 iterations": NORMAL | {"ar": 0.5, "modes": 0.2},
    "iterations only, runs alike": NORMAL | {"scatter": 0.0, "ar": 0.9},
    "outliers: 5 % of runs, +15 %": NORMAL | {"ar": 0.5, "run_outliers": 0.05},
    "two modes of runs, +10 %, 30 % of them": NORMAL | {"ar": 0.5, "run_modes": 0.1},
    "TEST scatters twice as much": NORMAL | {"ar": 0.5, "uneven": 2.0},
    "TEST scatters 3 times as much": NORMAL | {"ar": 0.5, "uneven": 3.0},
}


def simulate(
    scenario: Scenario, cases: int, runs: int, rng: np.random.Generator, test: bool = False
) -> NDArray[np.float64]:
    """Times in seconds, [cases, runs, iterations], of a true time of 1."""
    get = scenario.get
    scatter = scenario["scatter"] * (get("uneven", 1.0) if test else 1.0)
    level = rng.normal(0, scatter, (cases, runs, 1)) if scatter else np.zeros((cases, runs, 1))
    if "run_outliers" in scenario:
        level += log(1.15) * (rng.random(level.shape) < scenario["run_outliers"])
    if "run_modes" in scenario:
        level += np.log1p(scenario["run_modes"]) * (rng.random(level.shape) < 0.3)
    shape = (cases, runs, ITERATIONS)
    noise = rng.normal(0, 1, shape)
    for i in range(1, ITERATIONS):  # a stationary AR(1) process
        noise[..., i] = scenario["ar"] * noise[..., i - 1] + (
            np.sqrt(1 - scenario["ar"] ** 2) * noise[..., i]
        )
    x = level + scenario["noise"] * noise
    if "drift" in scenario:
        x += rng.normal(0, scenario["drift"], (cases, runs, 1)) * np.linspace(0, 1, ITERATIONS)
    if "outliers" in scenario:
        x += log(1.5) * (rng.random(shape) < scenario["outliers"])
    if "modes" in scenario:
        switches = rng.random(shape) < 0.1
        switches[..., 0] = rng.random(shape[:2]) < 0.5
        x += np.log1p(scenario["modes"]) * (np.cumsum(switches, axis=-1) % 2)
    return np.exp(x)


def as_runs(times: NDArray[np.float64], ratio: float = 1.0, name: str = "run") -> list[Run]:
    """[cases, runs, iterations] as runs with those cases."""
    medians = np.median(times, axis=2) * ratio
    made = []
    for j in range(times.shape[1]):
        cases = {}
        for i, own in enumerate(times[:, j] * ratio):
            case = RunCase({"i": i}, f"case {i}", "samples", float(medians[i, j]), own, "passed")
            cases[f'{{"i": {i}}}'] = case
        made.append(Run(f"{name} {j}", "simulated", "complete", {}, "", cases, f"{name} {j}"))
    return made


def comparison(
    scenario: Scenario,
    cases: int,
    sizes: tuple[int, int],
    rng: np.random.Generator,
    ratio: float = 1.0,
    **options: Any,
) -> Comparison:
    base = as_runs(simulate(scenario, cases, sizes[0], rng), name="base")
    test = as_runs(simulate(scenario, cases, sizes[1], rng, test=True), ratio, "test")
    return compare(base, test, **options)


def coverage(found: Comparison, ratio: float = 1.0) -> float:
    """How many of the intervals hold the true ratio; a case without one does not count."""
    intervals = [case.ci95 for case in found.cases if case.ci95]
    return float(np.mean([low <= ratio <= high for low, high in intervals]))


def bootstrap_coverage(
    scenario: Scenario, cases: int, runs: int, rng: np.random.Generator, draws: int = 400
) -> float:
    """Of the hierarchical bootstrap: runs drawn anew, then the iterations of each."""
    held = 0
    for _ in range(cases):
        logs = []
        for times in (simulate(scenario, 1, runs, rng)[0], simulate(scenario, 1, runs, rng)[0]):
            chosen = rng.integers(0, runs, (draws, runs, 1))
            within = rng.integers(0, ITERATIONS, (draws, runs, ITERATIONS))
            logs.append(np.log(np.median(times[chosen, within], axis=2)).mean(axis=1))
        low, high = np.quantile(logs[1] - logs[0], (0.025, 0.975))
        held += bool(low <= 0 <= high)
    return held / cases


def row(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def print_coverage(cases: int, rng: np.random.Generator) -> None:
    sizes = ((2, 2), (3, 3), (4, 4), (6, 6), (10, 10), (3, 6), (1, 5))
    print(row(["runs a side", *(f"{m}" if m == n else f"{m} and {n}" for m, n in sizes)]))
    print(row(["---"] * (len(sizes) + 1)))
    for name, scenario in SCENARIOS.items():
        cells = []
        for size in sizes:
            found = comparison(scenario, cases, size, rng, 1.05)
            cells.append(f"{100 * coverage(found, 1.05):.1f}")
        print(row([name, *cells]), flush=True)
    cells = [
        f"{100 * bootstrap_coverage(NORMAL, cases // 8, m, rng):.1f}" if m == n else "-"
        for m, n in sizes
    ]
    print(row(["hierarchical bootstrap, independent iterations", *cells]), flush=True)


def print_single_run(cases: int, rng: np.random.Generator) -> None:
    """One run a side that differ in nothing but their iterations, and that differ as runs do."""
    for name in ("independent iterations", "correlated iterations (AR(1), 0.9)"):
        for scatter in (0.0, 0.03):
            scenario = SCENARIOS[name] | {"scatter": scatter}
            found = comparison(scenario, cases, (1, 1), rng, single_run=True)
            print(
                f"--single-run, {name}, scatter {scatter}: {100 * coverage(found):.1f}", flush=True
            )


def print_drift(cases: int, rng: np.random.Generator) -> None:
    """A drift over the campaign, with the runs of both sides in pairs: AB BA AB ..."""
    for runs in (2, 4, 6, 10):
        drift = np.cumsum(rng.normal(0, 0.03, (cases, 2 * runs, 1)), axis=1)
        first = np.arange(runs) % 2  # whether TEST goes first in the pair
        base, test = (
            simulate(NORMAL, cases, runs, rng) * np.exp(drift[:, 2 * np.arange(runs) + order])
            for order in (first, 1 - first)
        )
        for paired in (False, True):
            found = compare(as_runs(base), as_runs(test, 1.05, "test"), paired=paired)
            widths = [np.log(c.ci95[1] / c.ci95[0]) / 2 for c in found.cases if c.ci95]
            print(
                f"drift over the campaign, {runs} runs, paired {paired}: coverage "
                f"{100 * coverage(found, 1.05):.1f}, half width {100 * np.median(widths):.1f} %"
            )


def verdicts(
    scatter: float, runs: int, ratios: Sequence[float], campaigns: int, rng: np.random.Generator
) -> NDArray[np.float64]:
    """[campaigns, cases]: -1 faster, 1 slower, 2 same, 0 undecided; the cases of one campaign."""
    scenario = NORMAL | {"scatter": scatter, "ar": 0.5, "noise": 0.02}
    codes = {"slower": 1, "faster": -1, "same": 2, "undecided": 0}
    found = []
    for _ in range(campaigns):
        base = simulate(scenario, len(ratios), runs, rng)
        test = simulate(scenario, len(ratios), runs, rng) * np.reshape(ratios, (-1, 1, 1))
        cases = compare(as_runs(base), as_runs(test, name="test")).cases
        found.append([codes[case.verdict] for case in cases])
    return np.array(found)


def print_power(campaigns: int, rng: np.random.Generator) -> None:
    """Campaigns of 6 cases as the CPU's default sweep has: all alike, or all 5 % slower."""
    print(row(["runs differ by", "runs a side", "A/A: called", "5 %: slower", "3 %", "A/A: same"]))
    print(row(["---"] * 6))
    for scatter in (0.01, 0.02, 0.03, 0.05):
        for runs in (2, 3, 4, 6, 10, 20):
            alike = verdicts(scatter, runs, [1.0] * 6, campaigns, rng)
            five, three = (
                verdicts(scatter, runs, [ratio] * 6, campaigns, rng) for ratio in (1.05, 1.03)
            )
            cells = [np.mean(abs(alike) == 1), np.mean(five == 1), np.mean(three == 1)]
            shown = [f"{100 * float(cell):.1f} %" for cell in [*cells, np.mean(alike == 2)]]
            print(row([f"{100 * scatter:g} %", runs, *shown]), flush=True)


def print_history(campaigns: int, rng: np.random.Generator) -> None:
    """Series of 6 cases: without a change, and 5 % slower from the middle or in the newest run."""
    print(
        row(["runs differ by", "runs", "A/A: changes", "5 % found", "A/A: newest", "5 % flagged"])
    )
    print(row(["---"] * 6))
    for scatter in (0.01, 0.02, 0.03):
        for runs in (8, 12, 20, 40):
            cells = []
            for start, flagged in ((runs, False), (runs // 2, False), (runs, True), (-1, True)):
                counted = 0
                for i in range(campaigns):
                    times = simulate(NORMAL | {"scatter": scatter, "noise": 0.02}, 6, runs, rng)
                    times[:, start:] *= 1.05
                    dated = [
                        replace(run, started_at=f"2025-01-01T00:00:{j:02}")
                        for j, run in enumerate(as_runs(times))
                    ]
                    series = study(dated, [], 0.02, seed=i).series
                    counted += sum(
                        s.newest is not None and s.newest.verdict in ("slower", "faster")
                        if flagged
                        else bool(s.changes)
                        for s in series
                    )
                cells.append(f"{100 * counted / campaigns / 6:.1f} %")
            print(row([f"{100 * scatter:g} %", runs, *cells]), flush=True)


PARTS = {
    "coverage": lambda rng: print_coverage(6000, rng),
    "single-run": lambda rng: print_single_run(2000, rng),
    "drift": lambda rng: print_drift(2000, rng),
    "power": lambda rng: print_power(300, rng),
    "history": lambda rng: print_history(60, rng),
}

if __name__ == "__main__":
    for chosen in sys.argv[1:] or PARTS:
        PARTS[chosen](np.random.default_rng(2024))
