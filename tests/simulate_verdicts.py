"""How often do compare.py and ab.py err? Simulated runs, by the functions that the scripts use.

    python tests/simulate_verdicts.py            the table of docs/compare.md, some minutes

The logarithm of a run's time is the machine's level and noise of 3 %. A level that drifts is
correlated from run to run, by 0.8 unless said otherwise, and has 3 % as well.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.ab import Race, planned_looks
from analysis.verdicts import Design, Result, judge_all, persists

NOISE = 0.03
Logs = NDArray[np.float64]
Rng = np.random.Generator


def level(rng: Rng, runs: int, rho: float = 0.8) -> Logs:
    """The logarithms of a level that drifts."""
    x = rng.normal(size=runs)
    for i in range(1, runs):
        x[i] = rho * x[i - 1] + np.sqrt(1 - rho**2) * x[i]
    return NOISE * x


def noise(rng: Rng, runs: int, scale: float = 1) -> Logs:
    return NOISE * scale * rng.normal(size=runs)


def judged(base: Logs, test: Logs, paired: bool = False, margin: float = 0.02) -> Result:
    pairs = np.exp(test - base).tolist() if paired else []
    base_s, test_s = np.exp(base).tolist(), np.exp(test).tolist()
    result = Result("", {}, base_s=base_s, test_s=test_s, pair_ratios=pairs)
    judge_all([result], Design(margin, paired))
    return result


def holds(result: Result, change: float = 0) -> bool:
    assert result.interval is not None
    return bool(result.interval[0] <= np.exp(change) <= result.interval[1])


def is_called(result: Result) -> bool:
    return result.verdict in ("slower", "faster")


# -- compare.py: each function simulates one comparison --------------------------------------------


def of_runs(runs: int, scale: float = 1) -> Callable[[Rng], bool]:
    """Whether the interval holds a change of 10 %. scale: of the noise of TEST."""
    return lambda rng: holds(judged(noise(rng, runs), 0.1 + noise(rng, runs, scale)), 0.1)


def in_turn(rng: Rng) -> bool:
    """A B, B A, A B on a machine that drifts, in pairs."""
    runs = level(rng, 12) + noise(rng, 12)
    base, test = runs[[0, 3, 4, 7, 8, 11]], runs[[1, 2, 5, 6, 9, 10]]
    return holds(judged(base, test, paired=True))


def one_after_the_other(rng: Rng) -> bool:
    runs = level(rng, 12) + noise(rng, 12)
    return is_called(judged(runs[:6], runs[6:]))


def equal_programs(rng: Rng) -> bool:
    return is_called(judged(noise(rng, 6), noise(rng, 6)))


def a_false_call_among_24(rng: Rng) -> float:
    """The share of calls that are false, where 6 of 24 cases are 10 % slower."""
    cases = []
    for number in range(24):
        change = 0.1 if number < 6 else 0.0
        base, test = np.exp(noise(rng, 6)).tolist(), np.exp(change + noise(rng, 6)).tolist()
        cases.append(Result("", {"n": number}, base_s=base, test_s=test))
    judge_all(cases, Design())
    called = [case.key["n"] >= 6 for case in cases if is_called(case)]
    return float(np.mean(called)) if called else 0.0


def recommended(times: int, decides: bool) -> Callable[[Rng], bool]:
    """Whether so many times the recommended runs decide on equal programs with a margin of 5 %, or
    else narrow the interval to it."""
    three = np.array([-NOISE, 0, NOISE])
    runs = (judged(three, three, margin=0.05).runs_needed or 0) * times

    def simulate(rng: Rng) -> bool:
        result = judged(noise(rng, runs), noise(rng, runs), margin=0.05)
        assert result.interval is not None
        low, high = result.interval
        is_narrow = bool(np.sqrt(high / low) <= 1.05)
        return result.verdict != "undecided" if decides else is_narrow

    return simulate


def smallest_change(rng: Rng) -> bool:
    """Whether the change that 6 pairs of equal programs name is shown by 6 more pairs."""
    change = judged(np.zeros(6), noise(rng, 6), paired=True).smallest_change or 0
    return not holds(judged(np.zeros(6), np.log1p(change) + noise(rng, 6), paired=True))


# -- ab.py with several commands -------------------------------------------------------------------


class Raced(NamedTuple):
    best_lost: bool  # an error
    slow_lost: bool
    warned: bool


def race(rng: Rng, changes: list[float], rho: float | None = None) -> Raced:
    """changes: how much slower each command is. rho: of a level that each command keeps."""
    looks = planned_looks(6, 24)
    drift = level(rng, 24)
    runs = [change + drift + noise(rng, 24) for change in changes]
    if rho is not None:
        runs = [logs + level(rng, 24, rho) for logs in runs]
    design = Design(paired=True, looks=6 * len(looks))

    def result_of(base: str, test: str, rounds: int) -> Result:
        pairs = np.exp(runs[int(test)] - runs[int(base)])[:rounds]
        result = Result("", {}, pair_ratios=pairs.tolist())
        judge_all([result], design)
        return result

    state = Race([str(number) for number in range(len(changes))])
    for rounds in looks:
        if state.look(rounds, result_of):
            break
    warned = False
    for name, rounds in state.rounds.items():
        if name != state.best:
            warned |= persists(result_of(state.best, name, rounds).pair_ratios)
    best = {str(i) for i, change in enumerate(changes) if change == 0}
    return Raced(bool(best & state.lost_to.keys()), "3" in state.lost_to, warned)


ALIKE, ONE_SLOW = [0.0] * 4, [0.0, 0.0, 0.0, 0.1]
# what is simulated -> what is promised, and one simulation
CASES: dict[str, tuple[str, Callable[[Rng], float]]] = {
    "the interval holds, 2 runs a side": ("95 %", of_runs(2)),
    "the interval holds, 6 runs a side": ("95 %", of_runs(6)),
    "the same, TEST scatters 3 times as much": ("95 %", of_runs(6, 3)),
    "the same, in turn on a machine that drifts": ("95 %", in_turn),
    "equal programs are called different": ("at most 5 %", equal_programs),
    "the same, all of BASE first, on a machine that drifts": ("a warning", one_after_the_other),
    "false calls of all calls, 24 cases": ("at most 5 %", a_false_call_among_24),
    "the runs that the last line names narrow the interval": ("half", recommended(1, False)),
    "three times as many decide on equal programs": ("9 of 10", recommended(3, True)),
    "6 pairs show the smallest change": ("9 of 10", smallest_change),
    "4 equal commands: the best one was called slower": (
        "at most 5 %",
        lambda rng: race(rng, ALIKE).best_lost,
    ),
    "one of 4 is 10 % slower, and is dropped": (
        "",
        lambda rng: race(rng, ONE_SLOW).slow_lost,
    ),
    "4 equal commands: a level is said to persist": ("", lambda rng: race(rng, ALIKE).warned),
    "each keeps a level, r = 0.5: the best was called slower": (
        "a warning",
        lambda rng: race(rng, ALIKE, 0.5).best_lost,
    ),
    "the same, r = 0.8": ("a warning", lambda rng: race(rng, ALIKE, 0.8).best_lost),
    "the same, r = 0.8: warned": ("", lambda rng: race(rng, ALIKE, 0.8).warned),
}


def share(name: str, count: int, seed: int = 0) -> float:
    """The mean over so many simulations."""
    rng = np.random.default_rng(seed)
    _, simulate = CASES[name]
    return float(np.mean([simulate(rng) for _ in range(count)]))


def main() -> None:
    for name, (promised, _) in CASES.items():
        print(f"| {name} | {promised} | {share(name, 1000):.1%} |", flush=True)


if __name__ == "__main__":
    main()
