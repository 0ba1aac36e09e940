"""Statistics of repeated timings. docs/measuring.md states their formulas."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from harness.cli import show_size
from harness.report import Case, Estimate, Report

Interval = tuple[float, float]
Samples = NDArray[np.float64]
BATCHES = 6  # consecutive batches of samples, for the interval of a median
MAX_SIZE_RATIO = 4.0  # maximum ratio of two sizes between which `interpolate` interpolates
MAX_BATCH_DEVIATION = 0.9  # of the batches' mean signs, each -1 to 1: their standard deviation
MIN_ROUNDS = 6  # fewer give no interval of a ratio or a difference
MAX_FACTOR = 3.0  # maximum factor between a time, rate or ratio and the ends of its interval
MIN_MODE_RATIO = 2.0  # minimum ratio of the slow mode's time to that of the fast mode
MIN_MODE_SAMPLES = 5  # of each mode


def percentiles(samples: ArrayLike, prefix: str) -> dict[str, float]:
    """Return `{prefix}_p50_s`, p75, p90, p95 and, from 100 samples on, p99 of samples [n], in
    seconds."""
    x = np.asarray(samples, dtype=np.float64)
    wanted = [50, 75, 90, 95, *([99] if len(x) >= 100 else [])]
    return {f"{prefix}_p{q}_s": float(np.percentile(x, q)) for q in wanted}


def autocorrelation_time(samples: ArrayLike) -> float:
    """Return the number of consecutive samples that carry as much information as one independent
    sample, at least 1. samples: [n].

    It is 1 + 2 * the sum of the autocorrelations, up to the first pair of successive lags with a
    sum of 0 or less (Geyer 1992, Statistical Science 7:473).
    """
    x = np.asarray(samples, dtype=np.float64)
    n = len(x)
    if n < 4 or np.ptp(x) == 0:
        return 1.0
    x = x - x.mean()
    tau = -1.0
    for lag in range(0, n // 2 - 1, 2):
        pair = float(x[: n - lag] @ x[lag:] + x[: n - lag - 1] @ x[lag + 1 :]) / float(x @ x)
        if pair <= 0:
            break
        tau += 2 * pair
    return max(1.0, tau)


def median_interval(samples: ArrayLike, confidence: float = 0.95) -> Interval | None:
    """Return the confidence interval of the median of samples [n] in order of time.

    None if there are too few samples (under 6 at 95%), if they drift, or if their batches
    disagree. The interval reaches from the k-th smallest to the k-th largest sample, where
    k = round(n/2 - h), and h is the larger of these two (docs/measuring.md has the coverage):

    - z sqrt(n tau) / 2, where tau is the autocorrelation time of the signs about the median
      (Campbell and Gardner 1988, BMJ 296:1454; Sen 1968);
    - from 18 samples on, t s n / (2 sqrt(6)), where s is the standard deviation over 6 consecutive
      batches of their mean sign (Schmeiser 1982, Operations Research 30:556; Woodruff 1952, JASA
      47:635).

    Batches disagree, from 12 samples on, if s exceeds MAX_BATCH_DEVIATION: nearly all of them are
    on one side of the median, so that the samples predict little about later ones.
    """
    x = np.asarray(samples, dtype=np.float64)
    n = len(x)
    signs = np.sign(x - np.median(x)) if n else x
    half = median_half_width(signs, autocorrelation_time(signs), confidence)
    if n >= 2 * BATCHES:
        means = [np.mean(batch) for batch in np.array_split(signs, BATCHES)]
        deviation = float(np.std(means, ddof=1))
        if deviation > MAX_BATCH_DEVIATION:
            return None
        if n >= 3 * BATCHES:
            spread = deviation * n / np.sqrt(BATCHES)
            half = max(half, student_t(confidence, BATCHES - 1) * spread / 2)
    return interval_around_middle(x, half)


def median_half_width(signs: Samples, tau: float, confidence: float) -> float:
    """Return half the width of a median's interval, in samples: z sqrt(n tau) / 2.

    signs: [n] of the samples about their median, -1 to 1. tau: their autocorrelation time.
    """
    return float(NormalDist().inv_cdf(0.5 + confidence / 2) * np.sqrt(len(signs) * tau) / 2)


def interval_around_middle(samples: Samples, half: float) -> Interval | None:
    """Return the two samples of [n] that are `half` places below and above the middle, in order of
    size; None if there are too few."""
    n = len(samples)
    low = round(n / 2 - half)  # counted from 1; its mirror image is n + 1 - low
    if low < 1:
        return None
    x = np.sort(samples)
    return float(x[low - 1]), float(x[n - low])


def student_t(confidence: float, freedom: int) -> float:
    """Return the two-sided quantile of Student's t (Abramowitz and Stegun 26.7.5).

    With 5 degrees of freedom the error is 0.2% at 95% and 1% at 99.5%; with more it is smaller.
    """
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def median(samples: ArrayLike) -> Estimate:
    """Return the median of times [n] in order of measurement, with its 95% interval."""
    return drop_wide_interval(median_of_differences(samples))


def median_of_differences(samples: ArrayLike) -> Estimate:
    """Return the same for differences of times, which keep their interval however wide it is."""
    low, high = median_interval(samples) or (None, None)
    return Estimate(float(np.median(np.asarray(samples))), low, high)


def drop_wide_interval(estimate: Estimate) -> Estimate:
    """Return a time, rate or ratio. Its interval is dropped as uninformative if an end differs from
    the value by more than a factor of MAX_FACTOR."""
    if estimate.low is None or estimate.high is None:
        return estimate
    low, high = estimate.value / MAX_FACTOR, estimate.value * MAX_FACTOR
    return estimate if low <= estimate.low and estimate.high <= high else Estimate(estimate.value)


def same_distribution(a: ArrayLike, b: ArrayLike) -> bool:
    """Whether samples [n] and [m] may come from the same distribution: the rank-sum test at 5%
    (Mann and Whitney 1947, Annals of Mathematical Statistics 18:50)."""
    x, y = np.asarray(a, dtype=np.float64)[:, None], np.asarray(b, dtype=np.float64)
    wins = np.sum(x < y) + np.sum(x == y) / 2
    pairs = len(x) * len(y)
    deviation = np.sqrt(pairs * (len(x) + len(y) + 1) / 12)
    return bool(abs(wins - pairs / 2) <= NormalDist().inv_cdf(0.975) * deviation)


def modes(samples: ArrayLike) -> list[tuple[float, float]]:
    """Return the fast and the slow mode of times [n] in seconds, each as the median of its samples
    and their share of all samples. Return [] if there is a single mode.

    The logarithms are split where the variance between the two sides is largest (Otsu 1979, IEEE
    Trans. SMC 9:62), with at least a tenth of the samples on each side. The sides are modes if
    their medians differ by a factor of MIN_MODE_RATIO or more and few samples are in the middle
    third between them. A single mode has no such valley, however wide or skewed it is.
    """
    x = np.sort(np.log(np.maximum(samples, 1e-9)))
    n = len(x)
    least = max(MIN_MODE_SAMPLES, -(-n // 10))
    if n < 2 * least:
        return []
    cuts = np.arange(least, n - least + 1)  # number of samples on the fast side
    sums = np.cumsum(x)[cuts - 1]
    means_apart = (x.sum() - sums) / (n - cuts) - sums / cuts
    cut = int(cuts[np.argmax(cuts * (n - cuts) * means_apart**2)])
    fast, slow = float(np.median(x[:cut])), float(np.median(x[cut:]))
    third = (slow - fast) / 3
    if 3 * third < np.log(MIN_MODE_RATIO):
        return []

    def near(center: float) -> int:
        return int(np.sum(np.abs(x - center) <= third / 2))

    if min(near(fast), near(slow)) < MIN_MODE_SAMPLES + 3 * near((fast + slow) / 2):
        return []
    return [(float(np.exp(fast)), cut / n), (float(np.exp(slow)), 1 - cut / n)]


def iteration_times(samples: ArrayLike, aligned: bool) -> Samples:
    """Return the time of each iteration on its slowest rank, [n]. samples: seconds [ranks, n].

    Ranks that do not wait for each other (not aligned) have no common iterations. Then all times
    are those of the rank with the largest median.
    """
    x = np.asarray(samples, dtype=np.float64)
    if aligned:
        return np.max(x, axis=0)
    slowest = np.median(x, axis=1).argmax()
    return np.asarray(x[slowest])


def by_round(samples: ArrayLike, rounds: Sequence[int]) -> list[Samples]:
    """Split samples [n] by round. rounds: iterations of each round, n in total."""
    return np.split(np.asarray(samples, dtype=np.float64), np.cumsum(rounds)[:-1])


def block_medians(samples: ArrayLike, rounds: Sequence[int]) -> Samples | None:
    """Return the median of each round's block, [rounds]; None with too few rounds for an interval,
    or if a median is 0. samples: [n]; rounds: iterations of each round, n in total."""
    if len(rounds) < MIN_ROUNDS:
        return None
    medians = np.array([np.median(block) for block in by_round(samples, rounds)])
    return medians if medians.min() > 0 else None


def mean_of_blocks(samples: ArrayLike, rounds: Sequence[int]) -> float:
    """Return the geometric mean over rounds of block medians; with fewer than MIN_ROUNDS rounds the
    median.

    For two steps timed in the same rounds, the quotient of these times is the geometric mean of the
    rounds' ratios, so a gradual slowdown cancels out. tests/simulate_ratios.py compares this with
    medians. samples: seconds [n]; rounds: iterations of each round, n in total.
    """
    medians = block_medians(samples, rounds)
    if medians is None:
        return float(np.median(np.asarray(samples)))
    first = medians[0]  # as the unit, so that the mean of equal blocks is exact
    return float(first * np.exp(np.log(medians / first).mean()))


def mean_half_width(values: Samples, confidence: float = 0.95) -> float:
    """Return half the width of the interval of the mean of values [n], in their unit. There is one
    value per round, and n >= MIN_ROUNDS.

    It is t s sqrt(tau / n) with Student's t and the standard deviation s. Up to 8 values count as
    independent (tau = 1). For more, tau is their autocorrelation time (Geyer 1992).
    """
    n = len(values)
    tau = autocorrelation_time(values) if n > 8 else 1.0
    return student_t(confidence, n - 1) * float(np.std(values, ddof=1)) * float(np.sqrt(tau / n))


class Times:
    """The times of a case in seconds, by name: "step" and the parts timed with it.

    An unknown name raises a KeyError that lists the known names.
    """

    def __init__(
        self,
        samples_s: Mapping[str, ArrayLike],
        rounds: Sequence[int],
        returned: Sequence[Any] = (),
    ) -> None:
        """samples_s: [ranks, n] of each name. rounds: iterations of each round, n in total."""
        self.samples_s, self.rounds = samples_s, rounds
        self.returned = returned  # an entry per rank: see Workload.returned

    def each(self, name: str = "step") -> Samples:
        """Return the times of all ranks, [ranks, n]."""
        if name not in self.samples_s:
            raise KeyError(f"{name!r} was not timed; these were: {', '.join(self.samples_s)}")
        return np.asarray(self.samples_s[name], dtype=np.float64)

    def slowest(self, name: str = "step") -> Samples:
        """Return the time of each iteration on its slowest rank, [n]."""
        return np.max(self.each(name), axis=0)

    def __contains__(self, name: str) -> bool:
        return name in self.samples_s

    def median(self, name: str = "step") -> Estimate:
        """Return the median over iterations of the slowest rank's time."""
        return median(self.slowest(name))

    def mean(self, name: str = "step") -> Estimate:
        """Return `mean_of_blocks` of the slowest rank, on which ratios and differences are based.

        Its interval is that of the mean over rounds, or from 18 rounds on that of the means of six
        batches of rounds if it is wider. With fewer than 6 rounds it is the median's.
        """
        slowest = self.slowest(name)
        value, medians = mean_of_blocks(slowest, self.rounds), block_medians(slowest, self.rounds)
        if medians is None:
            return median(slowest)
        logs = np.log(medians)
        half = mean_half_width(logs)
        if len(logs) >= 3 * BATCHES:
            means = np.array([np.mean(batch) for batch in np.array_split(logs, BATCHES)])
            half = max(half, mean_half_width(means))
        low, high = value * float(np.exp(-half)), value * float(np.exp(half))
        return drop_wide_interval(Estimate(value, low, high))

    def relative_to(self, name: str) -> "Times":
        """Return the same times with another step as "step", to which differences and ratios then
        refer."""
        return Times({**self.samples_s, "step": self.samples_s[name]}, self.rounds)

    def ratio(self, part: str, step: str = "step", confidence: float = 0.95) -> Estimate:
        """Return `mean` of the part / `mean` of the step, with the interval of the rounds' ratios.

        There is no interval with fewer than 6 rounds.
        """
        a, b = self.slowest(part), self.slowest(step)
        value = mean_of_blocks(a, self.rounds) / mean_of_blocks(b, self.rounds)
        both = block_medians(a, self.rounds), block_medians(b, self.rounds)
        if both[0] is None or both[1] is None:
            return Estimate(value)
        reach = float(np.exp(mean_half_width(np.log(both[0] / both[1]), confidence)))
        return drop_wide_interval(Estimate(value, value / reach, value * reach))

    def excess_over(self, part: str) -> Estimate:
        """Return the difference between the `mean` of the step and that of the part.

        Both are those of the slowest rank, so that a late rank cancels out. The 95% interval is
        over rounds: to first order (delta method), a round contributes step * log(its block of the
        step) - part * log(its block of the part). There is no interval with fewer than 6 rounds.
        """
        a, b = self.slowest(), self.slowest(part)
        if not b.any():  # a part that does nothing, such as steps during a save that blocks
            return self.mean()
        step, other = (mean_of_blocks(x, self.rounds) for x in (a, b))
        both = block_medians(a, self.rounds), block_medians(b, self.rounds)
        if both[0] is None or both[1] is None:
            return Estimate(step - other)
        half = mean_half_width(step * np.log(both[0]) - other * np.log(both[1]))
        return Estimate(step - other, step - other - half, step - other + half)


def interpolate(times: Mapping[int, Estimate], size: float) -> Estimate:
    """Interpolate the time at `size`, with its interval, between the two nearest measured sizes.

    The time is linear in the size, as in the model latency + size / bandwidth (Hockney 1994,
    Parallel Computing 20:389), and so are the ends of the interval. There is no interval if one of
    the two times has none. times: seconds by size in bytes, all sizes above 0.

    Raises ValueError if `size` is outside of the measured sizes, because times are not
    extrapolated. It also raises if the two sizes differ by more than a factor of MAX_SIZE_RATIO:
    libraries switch between protocols and algorithms, and the time is not linear over such a range.
    """
    if size in times:
        return times[int(size)]
    below = max((measured for measured in times if measured < size), default=None)
    above = min((measured for measured in times if measured > size), default=None)
    wanted = f"{show_size(size)} bytes"
    if below is None or above is None:
        if not times:
            raise ValueError(f"no size is measured, and {wanted} are needed")
        ends = f"{show_size(min(times))} to {show_size(max(times))}"
        raise ValueError(f"{wanted} are outside of the measured sizes, {ends}")
    if above > MAX_SIZE_RATIO * below:
        ends = f"{show_size(below)} and {show_size(above)}"
        limit = f"more than a factor of {MAX_SIZE_RATIO:g} apart"
        raise ValueError(f"{wanted} are between the measured sizes {ends}, which are {limit}")
    a, b = times[below], times[above]
    weight = (size - below) / (above - below)
    return total([a * (1 - weight), b * weight])


Layout = tuple[int, ...]  # number of ranks of a group on each of its hosts, the largest first
TimesBySize = dict[int, Estimate]  # seconds, by size in bytes
IsolatedTimes = Mapping[tuple[str, Layout, str], TimesBySize]  # by collective, layout and dtype


def total(estimates: Sequence[Estimate]) -> Estimate:
    """Return the sum of n estimates. The ends of its interval are the sums of the ends, so it
    contains the true sum if all n intervals contain the true values: with a probability of at least
    1 - 0.05 n (Bonferroni)."""
    value = math.fsum(one.value for one in estimates)
    lows = [one.low for one in estimates if one.low is not None]
    highs = [one.high for one in estimates if one.high is not None]
    if len(lows) < len(estimates) or len(highs) < len(estimates):
        return Estimate(value)
    return Estimate(value, math.fsum(lows), math.fsum(highs))


def isolated_time(
    alone: IsolatedTimes, collective: str, layout: Layout, dtype: str, size: float
) -> tuple[Estimate, str]:
    """Return the time of a collective of `size` bytes by itself, and the dtype with which it was
    measured: `dtype` if available, otherwise another one.

    Raises ValueError with the reason if it was not measured on this layout, or not around this size
    (`interpolate`).
    """
    fit = {
        of: times for (name, at, of), times in alone.items() if (name, at) == (collective, layout)
    }
    there = sorted({at for name, at, _ in alone if name == collective})
    if not there:
        raise ValueError("it was not measured")
    if not fit:
        others = " and ".join(map(show_layout, there))
        raise ValueError(f"it was measured on {others}, not on {show_layout(layout)}")
    measured = dtype if dtype in fit else next(iter(fit))
    return interpolate(fit[measured], size), measured


def show_layout(layout: Layout) -> str:
    """Format a layout: `16 ranks of 2 hosts (8 each)`."""
    ranks = f"{sum(layout)} ranks" if sum(layout) > 1 else "1 rank"
    if len(layout) == 1:
        return f"{ranks} of one host"
    each = f"{layout[0]} each" if len(set(layout)) == 1 else " + ".join(map(str, layout))
    return f"{ranks} of {len(layout)} hosts ({each})"


def collective_times(report: Report) -> dict[tuple[str, Layout, str], TimesBySize]:
    """Return the times in a report of collectives.py by collective, layout and dtype.

    A time is that of the faster variant (in place or out of place). If several reduction operators
    were measured, the first one in the report counts. Failed cases are excluded. Raises ValueError
    for a report of another script.
    """
    if report.benchmark != "collectives":
        raise ValueError(f"expected a report of collectives.py, got one of {report.benchmark}.py")
    hosts = {row["rank"]: row["host"] for row in report.environment.get("ranks") or ()}
    found: dict[tuple[str, Layout, str], TimesBySize] = {}
    for case in report.cases:
        names = [f"{variant}_time_s" for variant in ("out_of_place", "in_place")]
        times = [case.metrics[name] for name in names if name in case.metrics]
        if not case.failed and times:
            kind = (case.key["collective"], layout_of_case(case, hosts), case.key["dtype"])
            by_size = found.setdefault(kind, {})
            by_size.setdefault(case.key["size_bytes"], min(times, key=lambda time: time.value))
    return found


def layout_of_case(case: Case, hosts: Mapping[int, str]) -> Layout:
    """Return the layout of the first group of a case of collectives.py. hosts: by rank."""
    spec, count = case.key["groups"], case.key["group_ranks"]
    if spec in ("node", "rank"):
        return (count,)
    if spec == "cross":
        return (1,) * count
    members: Sequence[int] = case.ranks
    if spec != "world":  # `0-3/4,5,6,7`
        words = [word.partition("-") for word in spec.split("/")[0].split(",")]
        ranges = [range(int(first), int(last or first) + 1) for first, _, last in words]
        members = [rank for part in ranges for rank in part]
    return layout_of(hosts.get(rank) for rank in members)


def layout_of(hosts: Iterable[Any]) -> Layout:
    """Return the layout of a group. hosts: of each of its ranks."""
    return tuple(sorted(Counter(hosts).values(), reverse=True))


class Implausible(str):
    """A sentence about an impossible number. `Benchmark` prints it with the CPU use by other
    processes as the possible cause."""


# -- samples on their way to rank 0 and into the report --------------------------------------------

LIMIT = 2**18  # samples of a case in a report, which limits its line to a few MB


def rounded(samples_s: Mapping[str, Sequence[float]]) -> dict[str, Samples]:
    """Round the times of each step, [iterations], to nanoseconds, and return them as arrays, which
    are smaller and faster to gather than lists."""
    return {step: np.asarray(x, dtype=np.float64).round(9) for step, x in samples_s.items()}


def stacked(by_rank: Sequence[Mapping[str, Samples]]) -> dict[str, Samples]:
    """Return the samples of each step from all ranks that timed it, [ranks, iterations].

    by_rank: [iterations] of each step that the rank has timed.
    """
    steps = dict.fromkeys(step for samples in by_rank for step in samples)
    return {step: np.stack([of[step] for of in by_rank if step in of]) for step in steps}


def keep_samples(case: Case, samples_s: Mapping[str, Samples]) -> None:
    """Store the samples in the case: all of them, or above LIMIT those of the slowest rank in each
    iteration. The maximum over a case's rows is the same either way.

    samples_s: [ranks, iterations] of each step, all of one shape. case.aligned must be set.
    """
    case.bounded = sum(samples.size for samples in samples_s.values()) > LIMIT
    for step, samples in samples_s.items():
        kept = [iteration_times(samples, case.aligned)] if case.bounded else samples
        case.samples_s[step] = np.asarray(kept).tolist()
