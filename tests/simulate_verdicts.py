"""Simulate the error rates of compare.py and ab.py.

    python tests/simulate_verdicts.py            the numbers of docs/evidence.md, some minutes
    python tests/simulate_verdicts.py nights     a stored baseline: 14 nights against one
    python tests/simulate_verdicts.py load       that of docs/evidence.md, under load
    python tests/simulate_verdicts.py load 7     the same, with runs that differ by 7%

The times of runs are simulated, and are given to the functions that the scripts use. The logarithm
of a run's time is the level of the machine plus noise of 3%. A drifting level has a standard
deviation of 3% as well, and an autocorrelation of 0.8 from run to run.

A baseline has one run in each of 14 nights, which differ by 3%; runs of a night differ by 0.3%. The
level of a night is that of all cases, or each case has its own.

Under load, a run of one second takes 1 + s times as long if other processes use the share s of the
cores during the run. Runs differ by 1% unless a number is given, and the load is known to 1% of the
cores.
"""

import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.ab import lost_pairs, order_of
from analysis.compare import outcome_of
from analysis.runs.load import Row, Run
from analysis.runs.verdicts import Comparison, Design, Result, compare, judge_all

NOISE, RHO = 0.03, 0.8
SCATTER = 0.01  # of the times of runs under load, as a standard deviation of their logarithms
Logs = NDArray[np.float64]
Rng = np.random.Generator


def show(*cells: float | str) -> None:
    """Print a row of a table in which numbers are shares."""
    texts = [cell if isinstance(cell, str) else f"{cell:.1%}" for cell in cells]
    print(f"| {' | '.join(texts)} |", flush=True)


def show_head(*heads: str) -> None:
    show(*heads)
    show(*["---"] * len(heads))


def level(rng: Rng, runs: int) -> Logs:
    """The logarithms of a drifting level."""
    x = rng.normal(size=runs)
    for i in range(1, runs):
        x[i] = RHO * x[i - 1] + np.sqrt(1 - RHO**2) * x[i]
    return NOISE * x


def noise(rng: Rng, runs: int, scale: float = 1) -> Logs:
    return NOISE * scale * rng.normal(size=runs)


def judged(base: Logs, test: Logs, paired: bool = False, margin: float = 0.02) -> Result:
    result = Result("", {}, base_s=np.exp(base).tolist(), test_s=np.exp(test).tolist())
    judge_all([result], Design(margin, paired))
    return result


def equal(rng: Rng, runs: int = 6, scale: float = 1, margin: float = 0.02) -> Result:
    """Equal programs. scale: of the noise of TEST."""
    return judged(noise(rng, runs), noise(rng, runs, scale), margin=margin)


def holds(result: Result) -> bool:
    """Whether the interval contains the true ratio, 1."""
    low, high = result.interval or (0, 0)
    return low <= 1 <= high


def is_called(result: Result) -> bool:
    return result.verdict in ("slower", "faster")


def drifting(rng: Rng, in_turn: bool) -> Result:
    """Equal programs on a drifting machine. in_turn: they alternate (A B, B A, A B, ...); otherwise
    all runs of BASE precede those of TEST."""
    runs = level(rng, 12) + noise(rng, 12)
    if not in_turn:
        return judged(runs[:6], runs[6:])
    return judged(runs[[0, 3, 4, 7, 8, 11]], runs[[1, 2, 5, 6, 9, 10]], paired=True)


def a_false_call_among_24(rng: Rng) -> float:
    """The share of false discoveries among all discoveries, if 6 of 24 cases are 10% slower."""
    cases = []
    for number in range(24):
        base, test = noise(rng, 6), noise(rng, 6) + (0.1 if number < 6 else 0)
        times = {"base_s": np.exp(base).tolist(), "test_s": np.exp(test).tolist()}
        cases.append(Result("", {"n": number}, **times))
    judge_all(cases, Design())
    called = [case.key["n"] >= 6 for case in cases if is_called(case)]
    return float(np.mean(called)) if called else 0.0


def decides(rng: Rng, factor: int) -> bool:
    """Whether `factor` times the runs needed for the interval decide, with a margin of 5%."""
    three = np.array([-NOISE, 0, NOISE])
    runs_needed = judged(three, three, margin=0.05).runs_needed or 0
    return equal(rng, factor * runs_needed, margin=0.05).verdict != "undecided"


def shows_smallest_change(rng: Rng) -> bool:
    """Whether the smallest change that 6 pairs of equal programs report is found by 6 more."""
    change = judged(np.zeros(6), noise(rng, 6), paired=True).smallest_change or 0
    return is_called(judged(np.zeros(6), np.log1p(change) + noise(rng, 6), paired=True, margin=0))


# what is simulated | nominal rate -> one simulation
CASES: dict[str, Callable[[Rng], float]] = {
    "the interval contains the true ratio | 95%": lambda rng: holds(equal(rng)),
    "the interval contains the true ratio, if TEST varies 3 times as much | 95%": (
        lambda rng: holds(equal(rng, scale=3))
    ),
    "the interval contains the true ratio, if runs alternate on a drifting machine | 95%": (
        lambda rng: holds(drifting(rng, True))
    ),
    "equal programs are called different | at most 5%": lambda rng: is_called(equal(rng)),
    "equal programs are called different, if all of BASE runs first on a drifting machine | none": (
        lambda rng: is_called(drifting(rng, False))
    ),
    "false discoveries among all discoveries, 24 cases | at most 5%": a_false_call_among_24,
    "6 pairs detect the smallest change | 9 of 10": shows_smallest_change,
    "the runs needed for the interval decide | none": lambda rng: decides(rng, 1),
    "three times as many runs, as recommended, decide | 9 of 10": lambda rng: decides(rng, 3),
}


# -- a stored baseline -----------------------------------------------------------------------------

NIGHTS, WITHIN = 14, 0.003


def run_at(start: datetime | None, times_s: Sequence[float], name: str) -> Run:
    """A run with one case for each time. start: None for a log."""
    run = Run("work", {"hosts": ["vm"]}, name, started_at=start.isoformat() if start else "")
    run.status, run.label, run.loads = "complete", name, [(0.0, 2)]
    for number, time_s in enumerate(times_s):
        row = Row(key={"n": number}, name=f"x{number}", ranks=[0], measure="step", time_s=time_s)
        row.times_s = [time_s]
        run.rows[f'{{"n": {number}}}'] = row
    return run


def against_nights(
    rng: Rng, runs: int, cases: int = 1, change: float = 0, is_log: bool = False, own: bool = True
) -> Comparison:
    """14 nights against `runs` runs of one night, in which the first case takes 1 + change times as
    long. own: each case has its own level in a night, instead of one for all."""
    sides: list[list[Run]] = [[], []]
    for night in range(NIGHTS + 1):
        side = sides[night == NIGHTS]
        levels = NOISE * rng.normal(size=cases) if own else NOISE * rng.normal() * np.ones(cases)
        levels[0] += np.log1p(change) * (night == NIGHTS)
        for number in range(runs if night == NIGHTS else 1):
            start = datetime(2026, 1, 1, 3, 5 * number, tzinfo=UTC) + timedelta(days=night)
            logs = levels + WITHIN * rng.normal(size=cases)
            name = f"{night}-{number}"
            side.append(run_at(None if is_log else start, np.exp(logs).tolist(), name))
    return compare(sides[0], sides[1], Design())


def fails(comparison: Comparison) -> bool:
    """Whether the gate of `--fail-on slower,faster` fails."""
    return outcome_of(comparison, ["slower", "faster"])[0] == "failed"


def show_nights(count: int = 1000) -> None:
    """Print the numbers of docs/evidence.md."""
    head = "gates that fail: no change"
    show_head("runs tonight", "cases", head, "one case 5%", "10%", "20% slower")
    for runs, (cases, own) in product((1, 2, 3), ((1, True), (25, True), (25, False))):
        rng = np.random.default_rng(0)
        shares = []
        for change in (0, 0.05, 0.1, 0.2):
            times = count if change == 0 else count // 4
            given = (rng, runs, cases, change, False, own)
            shares.append(sum(fails(against_nights(*given)) for _ in range(times)) / times)
        show(str(runs), f"{cases}{'' if own else ', which share the level of the night'}", *shares)


# -- disturbances that no load shows ---------------------------------------------------------------

SLOWER = 0.05  # by how much disturbed runs are slower
# Name -> slow runs, and after how many runs they come again
DISTURBANCES = {"every 3rd run": (1, 3), "2 of 4 runs": (2, 4)}


def pairs_under(
    rng: Rng, name: str, change: float, pairs: int = 6, order: Callable[..., list[str]] = order_of
) -> Result:
    """Pairs of ab.py under a disturbance that no load shows. Runs differ by SCATTER."""
    slow, period = DISTURBANCES[name]
    seed, start = int(rng.integers(2**32)), int(rng.integers(period))
    logs: dict[str, list[float]] = {"a": [], "b": []}
    for number, side in enumerate(side for n in range(pairs) for side in order(n + 1, seed)):
        more = SLOWER if (number + start) % period < slow else 0.0
        logs[side].append(more + SCATTER * float(rng.normal()))
    return judged(np.array(logs["a"]), np.array(logs["b"]) + np.log1p(change), paired=True)


# -- under load ------------------------------------------------------------------------------------

CORES, GAP_S, RUNS = 2, 0.3, 6
# Condition -> seconds during which the other process runs, seconds during which it pauses, and the
# share of the cores that it uses while it runs
LOADS = {
    "idle": (1.0, 0.0, 0.0),
    "a busy loop throughout": (1.0, 0.0, 0.5),
    **{f"a busy loop every {s} s": (s / 2, s / 2, 0.5) for s in (2, 10, 30, 60, 120)},
    **{f"{p}% of the cores": (1.0, 0.0, p / 100) for p in (5, 10, 15, 30)},
}


def load_between(condition: str, begin_s: float, end_s: float) -> float:
    """The mean share of the cores that the other process uses."""
    on, off, share = LOADS[condition]

    def on_until(at_s: float) -> float:
        whole, rest = divmod(at_s, on + off)
        return whole * on + min(rest, on)

    return share * (on_until(end_s) - on_until(begin_s)) / (end_s - begin_s)


def run_of(
    rng: Rng, condition: str, begin_s: float, change: float, scatter: float
) -> tuple[Run, float]:
    """A run and the time of its end. A longer run overlaps more with the other process."""
    alone_s = (1 + change) * float(np.exp(scatter * rng.normal()))
    time_s = alone_s
    for _ in range(3):
        time_s = alone_s * (1 + load_between(condition, begin_s, begin_s + time_s))
    load = load_between(condition, begin_s, begin_s + time_s) + 0.01 * rng.normal()
    run = Run("work", {"hosts": ["vm"]}, started_at=str(begin_s), status="complete")
    run.label, run.loads = str(begin_s), [(max(0.0, load) * CORES, CORES)]
    row = Row(key={"n": 1}, name="x", ranks=[0], measure="step", time_s=time_s, times_s=[time_s])
    run.rows = {"{}": row}
    return run, begin_s + time_s + GAP_S


def by_ab(rng: Rng, condition: str, change: float, scatter: float = SCATTER) -> Comparison:
    """Like ab.py --runs 6: pairs in random order, up to 12 of them."""
    seed, now_s = int(rng.integers(2**32)), float(rng.uniform(0, 1000))
    runs: dict[str, list[Run]] = {"a": [], "b": []}
    design = Design(paired=True, runs=RUNS)
    rounds, needed = 0, RUNS
    while rounds < needed:
        rounds += 1
        for name in order_of(rounds, seed):
            run, now_s = run_of(rng, condition, now_s, change if name == "b" else 0.0, scatter)
            runs[name].append(run)
        comparison = compare(runs["a"], runs["b"], design) if rounds >= RUNS else None
        if comparison:
            needed = min(2 * RUNS, RUNS + lost_pairs(comparison))
    assert comparison
    return comparison


def by_compare(rng: Rng, condition: str, change: float, scatter: float = SCATTER) -> Comparison:
    """Like compare.py with a stored baseline: six runs a side at different times."""
    sides = []
    for slower in (0.0, change):
        side, now_s = list[Run](), float(rng.uniform(0, 1000))
        for _ in range(RUNS):
            run, now_s = run_of(rng, condition, now_s, slower, scatter)
            side.append(run)
        sides.append(side)
    return compare(sides[0], sides[1], Design())


def under_load(
    how: Callable[[Rng, str, float, float], Comparison],
    condition: str,
    change: float,
    count: int,
    scatter: float = SCATTER,
) -> tuple[float, float, float]:
    """The shares of comparisons with a wrong verdict, with no verdict, and that find the change."""
    rng = np.random.default_rng(0)
    verdicts = [how(rng, condition, change, scatter).cases[0].verdict for _ in range(count)]
    wrong = ("slower", "faster") if change == 0 else ("faster", "same")
    kinds = (wrong, ("undecided", "not compared"), ("slower",))
    of_wrong, none, slower = (sum(map(verdicts.count, kind)) / count for kind in kinds)
    return of_wrong, none, slower


def show_under_load(scatter: float, count: int = 1000) -> None:
    """Print the numbers of docs/evidence.md."""
    finds = ("finds 3%", "10%", "30%")
    show_head(
        *("condition", "ab.py: wrong", "at most", "no verdict", *finds),
        *("compare.py: wrong", "no verdict", "finds 30%"),
    )
    few = count // 3
    for condition in LOADS:
        wrong, none, _ = under_load(by_ab, condition, 0, count, scatter)
        most = stats.beta.ppf(0.95, round(wrong * count) + 1, count - round(wrong * count))
        found = [under_load(by_ab, condition, x, few, scatter)[2] for x in (0.03, 0.1, 0.3)]
        stored = under_load(by_compare, condition, 0, count, scatter)[:2]
        late = under_load(by_compare, condition, 0.3, few, scatter)[2]
        show(condition, wrong, most, none, *found, *stored, late)


def share(name: str, count: int) -> float:
    """The mean over `count` simulations."""
    rng = np.random.default_rng(0)
    return float(np.mean([CASES[name](rng) for _ in range(count)]))


if __name__ == "__main__":
    what, *given = sys.argv[1:] or ["cases"]
    if what == "load":
        show_under_load(float(given[0]) / 100 if given else SCATTER)
    elif what == "nights":
        show_nights()
    else:
        for name in CASES:
            show(name, share(name, 1000))
