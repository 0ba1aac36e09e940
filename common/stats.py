"""Statistics of repeated timings: pure numpy, no process group."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

PERCENTILES = (50, 75, 90, 95)


@dataclass(frozen=True)
class Interval:
    """A confidence interval; same unit as what it was computed from."""

    low: float
    high: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


def autocorrelation_time(samples: ArrayLike) -> float:
    """How many successive samples are worth one independent one, at least 1.

    That is 1 + 2 * sum of the autocorrelations, summed as long as successive pairs stay
    positive (Geyer 1992, "Practical Markov Chain Monte Carlo", the initial positive sequence).
    Samples that swing (negative correlation) count as independent. samples: [n].
    """
    x = np.asarray(samples, dtype=np.float64)
    n = len(x)
    if n < 4 or np.ptp(x) == 0:
        return 1.0
    x = x - x.mean()
    power = float(x @ x)
    tau = -1.0
    for lag in range(0, n // 2 - 1, 2):
        pair = float(x[: n - lag] @ x[lag:] + x[: n - lag - 1] @ x[lag + 1 :]) / power
        if pair <= 0:
            break
        tau += 2 * pair
    return max(1.0, tau)


def median_interval(samples: ArrayLike, confidence: float = 0.95) -> Interval | None:
    """Confidence interval of the median, between two of the sorted samples. samples: [n].

    Their positions are n/2 +- z * sqrt(n)/2 (Campbell and Gardner 1988, BMJ 296:1454): no
    assumption on the distribution. Iterations of one run are not independent, so sqrt(n) is
    widened by sqrt(tau), tau being the autocorrelation time of the samples' signs about the
    median (Sen 1968, "Asymptotic normality of sample quantiles for m-dependent processes").

    Returns None when there are too few samples for the confidence asked for (under 6 at 95 %).
    """
    x = np.asarray(samples, dtype=np.float64)
    n = len(x)
    if n == 0:
        return None
    tau = autocorrelation_time(np.sign(x - np.median(x)))
    half = NormalDist().inv_cdf(0.5 + confidence / 2) * np.sqrt(n * tau) / 2
    low = round(n / 2 - half)  # 1-based; its mirror image is n + 1 - low
    if low < 1:
        return None
    ordered = np.sort(x)
    return Interval(float(ordered[low - 1]), float(ordered[n - low]))


def relative_ci95(samples: ArrayLike) -> float | None:
    """Half the width of the median's 95 % interval over the median; None if there is none."""
    interval = median_interval(samples)
    return None if interval is None else interval.half_width / float(np.median(np.asarray(samples)))


def difference(a: ArrayLike, b: ArrayLike, rounds: Sequence[int]) -> tuple[float, Interval | None]:
    """How much longer `a` takes than `b`, both timed in the same rounds; with its 95 % interval.

    The median over the rounds of median(a) - median(b) within the round, so that a drift of the
    machine cancels. a, b: [n]; rounds: the iterations of each round, n in all. The interval is
    None under 6 rounds.
    """
    ends = np.cumsum(rounds)[:-1]
    pairs = zip(np.split(np.asarray(a), ends), np.split(np.asarray(b), ends), strict=True)
    differences = [float(np.median(x) - np.median(y)) for x, y in pairs]
    return float(np.median(differences)), median_interval(differences)


def percentiles(samples: ArrayLike) -> dict[str, float]:
    """`{"p50": .., "p75": .., "p90": .., "p95": ..}`, and p99 from 100 samples on."""
    x = np.asarray(samples, dtype=np.float64)
    wanted = PERCENTILES + ((99,) if len(x) >= 100 else ())
    return {f"p{q}": float(np.percentile(x, q)) for q in wanted}


@dataclass(frozen=True)
class Straggler:
    """The slowest of several ranks: its row, and how many times slower than the others."""

    row: int
    factor: float


def find_straggler(samples: ArrayLike, margin: float = 0.05) -> Straggler | None:
    """The rank that computes slower than the others beyond noise, or None. samples: [ranks, n].

    Feed it times without synchronisation between the ranks (local compute): in a synchronised
    step all ranks look equally slow. Rank r is called a straggler when the median over the
    iterations of x[r] / median(x[others]) is above 1 + margin with 95 % confidence, shared
    among the ranks (Bonferroni). The slowest such rank is returned. Of an even number of others
    the upper median counts, so that a fast rank makes no other a straggler.
    """
    x: NDArray[np.float64] = np.asarray(samples, dtype=np.float64)
    ranks = len(x)
    if ranks < 2 or x.shape[1] == 0:
        return None
    found = None
    for row in range(ranks):
        others = np.sort(np.delete(x, row, axis=0), axis=0)
        ratio = x[row] / others[(ranks - 1) // 2]
        interval = median_interval(ratio, confidence=1 - 0.05 / ranks)
        factor = float(np.median(ratio))
        if interval is None or interval.low <= 1 + margin:
            continue
        if found is None or factor > found.factor:
            found = Straggler(row, factor)
    return found
