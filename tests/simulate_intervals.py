"""Simulate the coverage of the 95% intervals, and how often a healthy rank is named.

    python tests/simulate_intervals.py          the numbers of docs/evidence.md, a minute

The series have a known median, and are given to the functions that the scripts use.

independent   lognormal samples
AR .6         lognormal samples whose logarithms have an autocorrelation of 0.6 at lag 1
levels        a third of the variance is that of blocks, the rest that of samples; consecutive
              blocks are correlated by 0.2
AR .9         autocorrelation of 0.9, about the strongest in practice
phases        two levels that differ by 20% and last for 30 samples on average
visits        one of 8 sizes that vary by 2 to 50%; after 150 samples of each, the widths of their
              intervals divide 600 more, and 600 again, as in collectives.py with --total-seconds
difference    difference of two steps in 12 rounds of 2; the machine drifts by 30% during the run
ratio         their ratio
late          8 ranks of 24 iterations each, with an autocorrelation of 0.6
outlier       8 ranks with one number each, judged as in node_check.py, with a spread of 2%
two modes     300 times of one mode, whose logarithm has a standard deviation of 1, or of two modes
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import collectives
from benchmarks.workloads.outliers import SIGMAS, outliers
from benchmarks.workloads.training import breakdown
from common.stats import Estimate, Times, median
from harness.observe.hints import modes

SPREAD = 0.1  # standard deviation of the logarithm of a sample
Rng = np.random.Generator
Series = NDArray[np.float64]


def correlated(n: int, rho: float, rng: Rng) -> Series:
    """n normal values of variance 1 with autocorrelation rho at lag 1."""
    x = rng.normal(size=n)
    for i in range(1, n):
        x[i] = rho * x[i - 1] + np.sqrt(1 - rho**2) * x[i]
    return x


def levels(blocks: int, size: int, rng: Rng) -> Series:
    of_blocks = np.repeat(correlated(blocks, 0.2, rng), size)
    return of_blocks * np.sqrt(1 / 3) + rng.normal(size=blocks * size) * np.sqrt(2 / 3)


def phases(n: int, rng: Rng) -> Series:
    """Two levels that differ by 20% and last for 30 samples on average, with noise of 1%."""
    x, at, is_slow = rng.normal(size=n) * 0.01, 0, rng.random() < 0.5
    while at < n:
        length = max(1, int(rng.exponential(30)))
        x[at : at + length] += np.log(1.2) / 2 * (1 if is_slow else -1)
        at, is_slow = at + length, not is_slow
    return x / SPREAD


def of_median(make: Callable[[Rng], Series], rng: Rng) -> Estimate:
    return median(np.exp(make(rng) * SPREAD))


def of_visits(rho: float, rng: Rng) -> Estimate:
    spreads = np.geomspace(0.02, 0.5, 8)
    sizes = [np.exp(correlated(150, rho, rng) * spread) for spread in spreads]
    for _ in range(2):
        widths = [estimate.relative for estimate in map(median, sizes)]
        wide = [collectives.NO_INTERVAL if width is None else width for width in widths]
        more = map(int, collectives.divide(600, wide, [len(size) for size in sizes]))
        new = [np.exp(correlated(n, rho, rng) * s) for n, s in zip(more, spreads, strict=True)]
        sizes = [np.concatenate(pair) for pair in zip(sizes, new, strict=True)]
    return median(sizes[int(rng.integers(8))])


def of_two_steps(what: Callable[[Times, str], Estimate], rng: Rng) -> Estimate:
    """A step of 2 s and a part of 1 s in 12 rounds of 2, on a machine that slows down by 30%.

    In the middle of the run, it is 15% slower than at first.
    """
    drift = np.linspace(1, 1.3, 24)
    step, part = (np.exp(rng.normal(size=24) * SPREAD) * drift for _ in range(2))
    return what(Times({"step": [2 * step], "part": [part]}, [2] * 12), "part")


# name -> true value, threshold of the test of the coverage, function for an estimate
CASES: dict[str, tuple[float, float, Callable[[Rng], Estimate]]] = {
    "independent, 24": (1.0, 0.94, partial(of_median, partial(correlated, 24, 0.0))),
    "AR .3, 28": (1.0, 0.94, partial(of_median, partial(correlated, 28, 0.3))),
    "AR .6, 24": (1.0, 0.93, partial(of_median, partial(correlated, 24, 0.6))),
    "AR .6, 48": (1.0, 0.93, partial(of_median, partial(correlated, 48, 0.6))),
    "AR .8, 48": (1.0, 0.90, partial(of_median, partial(correlated, 48, 0.8))),
    "levels, 12 x 12": (1.0, 0.92, partial(of_median, partial(levels, 12, 12))),
    **{
        f"AR .9, {n}": (1.0, low, partial(of_median, partial(correlated, n, 0.9)))
        for n, low in ((12, 0.45), (24, 0.7), (60, 0.8), (150, 0.9))
    },
    "visits, AR .9": (1.0, 0.9, partial(of_visits, 0.9)),
    **{
        f"phases, {n}": (1.0, low, partial(of_median, partial(phases, n)))
        for n, low in ((12, 0.1), (24, 0.2), (60, 0.4), (240, 0.7))
    },
    "difference": (1.15, 0.94, partial(of_two_steps, Times.excess_over)),
    "ratio": (0.5, 0.94, partial(of_two_steps, Times.ratio)),
}


def coverage(name: str, series: int) -> tuple[float, float]:
    """The share of the reported intervals that contain the true value, and the share of series for
    which an interval is reported."""
    true, _, make = CASES[name]
    rng = np.random.default_rng(0)
    estimates = [make(rng) for _ in range(series)]
    shown = [estimate for estimate in estimates if estimate.relative is not None]
    hits = sum(estimate.may_be(true) for estimate in shown)
    return hits / max(1, len(shown)), len(shown) / series


def names_late(factor: float, rng: Rng) -> bool:
    """Whether late ranks are named, in 12 rounds of 2 iterations. Ranks 2 and 5 of 8 take `factor`
    times as long as the others. If this is more than 1, only both of them together count."""
    ranks = np.exp(np.array([correlated(24, 0.6, rng) for _ in range(8)]) * SPREAD)
    ranks[[2, 5]] *= factor
    times = Times({"step": ranks.max(axis=0, keepdims=True), "local": ranks}, [2] * 12)
    found = breakdown(times, "local").get("late_ranks")
    return found is not None and (factor == 1 or found == [2, 5])


def names_outlier(factor: float, rng: Rng) -> bool:
    """Whether an outlier is named, as in `names_late`, of a single slow rank."""
    costs = dict(enumerate(np.exp(rng.normal(size=8) * 0.02).tolist()))
    costs[2] *= factor
    found = list(outliers(costs, SIGMAS))
    return found == [2] or (factor == 1 and bool(found))


def reports_two_modes(factor: float, rng: Rng) -> bool:
    """Whether two modes are reported. 3 of 10 calls take `factor` times as long as the rest."""
    calls = np.exp(rng.normal(size=300) * (1.0 if factor == 1 else 0.25))
    calls[rng.random(300) < 0.3] *= factor
    return bool(modes(calls))


# name -> function, how many times as long the slow rank or call takes (1: none is slow), threshold
# of the test: an upper limit of the rate if none is slow, otherwise a lower limit
VERDICTS: dict[str, tuple[Any, float, float]] = {
    "late, healthy": (names_late, 1.0, 0.05),
    "late, 2 of 8 30% slow": (names_late, 1.3, 0.85),
    "outlier, healthy": (names_outlier, 1.0, 0.01),
    "outlier, 20% slow": (names_outlier, 1.2, 0.9),
    "two modes of one": (reports_two_modes, 1.0, 0.02),
    "two modes, 10 times": (reports_two_modes, 10.0, 0.9),
}


def frequency(name: str, series: int) -> float:
    """The rate of a verdict."""
    is_given, factor, _ = VERDICTS[name]
    rng = np.random.default_rng(0)
    return sum(is_given(factor, rng) for _ in range(series)) / series


def main() -> None:
    print(f"{'series':18} {'covered':>7} {'threshold':>9} {'shown':>7}")
    for name, (_, threshold, _) in CASES.items():
        covered, shown = coverage(name, 4000)
        print(f"{name:18} {covered:7.1%} {threshold:9.0%} {shown:7.1%}")
    print(f"\n{'verdict':22} {'given':>7} {'threshold':>9}")
    for name, (_, factor, threshold) in VERDICTS.items():
        limit = "<=" if factor == 1 else ">="
        print(f"{name:22} {frequency(name, 2000):7.1%} {limit:>4} {threshold:4.0%}")


if __name__ == "__main__":
    main()
