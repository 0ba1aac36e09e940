"""Statistics of repeated timings: pure numpy, no process group."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, lgamma, log, log1p, sqrt
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
    # The upper median of the others, without sorting them anew for each rank: it is the value at
    # `middle` of all, or, where the rank's own is at or below that, the next one.
    middle = (ranks - 1) // 2
    in_order = np.sort(x, axis=0)
    ratios = x / np.where(x <= in_order[middle], in_order[middle + 1], in_order[middle])
    factors = np.median(ratios, axis=1)
    found = None
    for row in np.flatnonzero(factors > 1 + margin).tolist():  # the interval holds the median
        interval = median_interval(ratios[row], confidence=1 - 0.05 / ranks)
        if interval is None or interval.low <= 1 + margin:
            continue
        if found is None or factors[row] > found.factor:
            found = Straggler(row, float(factors[row]))
    return found


# -- comparing runs --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """A difference of means with what its interval needs. `df`: degrees of freedom."""

    value: float
    error: float  # standard error
    df: float

    def interval(self, confidence: float = 0.95) -> Interval:
        half = t_quantile(self.df, confidence) * self.error
        return Interval(self.value - half, self.value + half)

    @property
    def p(self) -> float:
        """Two-sided p-value of no difference."""
        if self.error == 0:
            return float(self.value == 0)
        return t_tail(abs(self.value) / self.error, self.df)


def difference_of_means(a: ArrayLike, b: ArrayLike) -> Estimate | None:
    """mean(b) - mean(a), both of a few independent values; None with one of each.

    Student's t with one variance for both sides (exact for few normal values that scatter alike,
    and with equally many a side near enough where they do not). With unequal numbers a side
    that assumption is not safe: there Welch's t (Biometrika 34, 1947) replaces it where that is
    wider. A side of one value has no scatter of its own: the other side's counts for it.
    a: [m], b: [n].
    """
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    m, n = len(x), len(y)
    if m + n < 3:
        return None
    value = float(y.mean() - x.mean())
    squares = [float(np.square(v - v.mean()).sum()) for v in (x, y)]
    pooled = Estimate(value, sqrt(sum(squares) / (m + n - 2) * (1 / m + 1 / n)), m + n - 2)
    if m == n or min(m, n) == 1:
        return pooled
    shares = [squares[0] / (m - 1) / m, squares[1] / (n - 1) / n]
    if sum(shares) == 0:
        return pooled
    df = sum(shares) ** 2 / (shares[0] ** 2 / (m - 1) + shares[1] ** 2 / (n - 1))
    welch = Estimate(value, sqrt(sum(shares)), df)
    return max(pooled, welch, key=lambda estimate: estimate.interval().half_width)


def mean_of(values: ArrayLike) -> Estimate | None:
    """The mean of a few independent values, by Student's t; None with one. values: [n]."""
    x = np.asarray(values, dtype=np.float64)
    if len(x) < 2:
        return None
    return Estimate(float(x.mean()), float(x.std(ddof=1)) / sqrt(len(x)), len(x) - 1)


def shift(a: ArrayLike, b: ArrayLike) -> tuple[float, Interval | None]:
    """By how much b lies over a, with its 95 % interval: one outlier moves it little.

    The median of all differences, and two of the sorted ones, by the normal approximation of the
    Mann-Whitney statistic (Hodges and Lehmann 1963, Ann. Math. Statist. 34; Moses 1965). The
    interval is None where there are too few. a: [m], b: [n].
    """
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    m, n = len(x), len(y)
    ordered = np.sort(np.subtract.outer(y, x).ravel())
    low = round(m * n / 2 - 1.96 * sqrt(m * n * (m + n + 1) / 12))  # 1-based
    interval = Interval(float(ordered[low - 1]), float(ordered[m * n - low])) if low >= 1 else None
    return float(np.median(ordered)), interval


def t_tail(t: float, df: float) -> float:
    """P(|T| >= t) of Student's t with `df` degrees of freedom; t >= 0.

    The regularised incomplete beta function I(df / (df + t^2); df / 2, 1 / 2), Abramowitz and
    Stegun 26.7.1.
    """
    x = df / (df + t * t)
    # the fraction converges fast up to about the mean; beyond it the mirror image does
    if x < (df / 2 + 1) / (df / 2 + 2.5):
        return _beta(x, df / 2, 0.5)
    return 1 - _beta(t * t / (df + t * t), 0.5, df / 2)


def _beta(x: float, a: float, b: float) -> float:
    """I(x; a, b) by its continued fraction (Abramowitz and Stegun 26.5.8), forwards (Lentz)."""
    if x <= 0:
        return 0.0
    front = exp(a * log(x) + b * log1p(-x) + lgamma(a + b) - lgamma(a) - lgamma(b)) / a
    c, d, fraction = inf, 1.0, 1.0
    for step in range(1, 10_000):
        m = step // 2
        if step % 2:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        c = 1 + term / c
        d = 1 / (1 + term * d)
        fraction *= c * d
        if abs(c * d - 1) < 1e-14:
            break
    return front * fraction


@functools.lru_cache(maxsize=4096)
def t_quantile(df: float, confidence: float = 0.95) -> float:
    """The t that |T| exceeds with probability 1 - confidence, by bisection.

    From 200 degrees of freedom on by Abramowitz and Stegun 26.7.5, to six digits.
    """
    if df >= 200:
        z = NormalDist().inv_cdf((1 + confidence) / 2)
        return z + (z**3 + z) / (4 * df) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)
    low, high = 0.0, 2.0
    while t_tail(high, df) > 1 - confidence:
        high *= 2
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if t_tail(middle, df) > 1 - confidence:
            low = middle
        else:
            high = middle
    return high


def discoveries(p_values: ArrayLike, rate: float = 0.05) -> NDArray[np.bool_]:
    """Which of many tests count, so that of those at most `rate` are false on average.

    Benjamini and Hochberg, J. R. Statist. Soc. B 57, 1995. p_values: [n].
    """
    p = np.asarray(p_values, np.float64)
    order = np.argsort(p)
    passed = p[order] <= rate * np.arange(1, len(p) + 1) / max(1, len(p))
    count = int(np.max(np.flatnonzero(passed), initial=-1)) + 1
    found = np.zeros(len(p), dtype=bool)
    found[order[:count]] = True
    return found
