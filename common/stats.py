"""Statistics of repeated timings. docs/measuring.md states their formulas."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Interval = tuple[float, float]
Samples = NDArray[np.float64]
BATCHES = 6  # consecutive batches of samples, for the interval of a median
MAX_BATCH_DEVIATION = 0.9  # of the batches' mean signs, each -1 to 1: their standard deviation
MIN_ROUNDS = 6  # fewer give no interval of a ratio or a difference
MAX_FACTOR = 3.0  # maximum factor between a time, rate or ratio and the ends of its interval
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}  # units of time, in seconds


@dataclass(frozen=True)
class Estimate:
    """A number with its 95% confidence interval, whose ends are None if there are too few samples
    or if they drift. In a report it is a JSON object with these three entries."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def relative(self) -> float | None:
        """Return the distance to the farther end as a fraction of the value; None without ends."""
        if self.low is None or self.high is None:
            return None
        return max(self.high - self.value, self.value - self.low) / max(abs(self.value), 1e-12)

    def may_be(self, value: float) -> bool:
        """Whether the interval contains the value. True without an interval."""
        return self.low is None or self.high is None or self.low <= value <= self.high

    def above(self, bound: float) -> bool:
        """Whether the whole interval lies above the bound. False without an interval."""
        return self.low is not None and self.low > bound

    def __truediv__(self, other: "Estimate | float") -> "Estimate":
        """Divide by a positive number. The interval is the widest one that the ends of both allow,
        so it contains the true quotient with a probability of at least 90% (Bonferroni)."""
        if not isinstance(other, Estimate):
            other = Estimate(other, other, other)
        value = self.value / other.value
        if self.low is None or self.high is None or not other.low or not other.high:
            return Estimate(value)
        ends = [
            end / divisor for end in (self.low, self.high) for divisor in (other.low, other.high)
        ]
        return Estimate(value, min(ends), max(ends))

    def __rtruediv__(self, amount: float) -> "Estimate":
        """A rate: an amount divided by a positive time."""
        return Estimate(amount, amount, amount) / self

    def __mul__(self, factor: float) -> "Estimate":
        """Multiply by a positive number."""
        if self.low is None or self.high is None:
            return Estimate(self.value * factor)
        return Estimate(self.value * factor, self.low * factor, self.high * factor)

    def __rsub__(self, whole: float) -> "Estimate":
        """Subtract from a number, as in `1 - overlap`."""
        if self.low is None or self.high is None:
            return Estimate(whole - self.value)
        return Estimate(whole - self.value, whole - self.high, whole - self.low)

    def text(self, unit: str = "", scale: float = 1, digits: int | None = None) -> str:
        """Format the number times `scale`: `1.24 GB/s (1.10 to 1.39)`, or if the unit starts with
        `%` or `x`, `12% (10 to 15)`. digits: decimals; by default three significant digits."""
        digits = digits_of(self.value * scale) if digits is None else digits
        number = f"{self.value * scale:z,.{digits}f}"
        if unit:
            number += unit if unit.startswith(("%", "x")) else f" {unit}"
        if self.low is None or self.high is None:
            return f"{number} (no interval)"
        return f"{number} ({self.low * scale:z,.{digits}f} to {self.high * scale:z,.{digits}f})"

    def as_factor(self, most: float = math.inf, bound: str = "", unit: str = "times") -> str:
        """Format a factor: `1.24 times (1.10 to 1.39)`, with more decimals if rounding would make
        an interval that excludes 1 seem to contain it. most, bound: its upper bound, and what that
        is. If the interval exceeds it: `1.73 times (1.38 to 2, the number of ranks)`."""
        if self.low is None or self.high is None:
            return self.text(unit, digits=2)
        if self.high > most:
            end = f"{most:g}" if self.value <= most else f"{self.high:.2f}; at most {most:g}"
            return f"{self.value:.2f} times ({self.low:.2f} to {end}, {bound})"
        low, high, digits = self.low, self.high, 2
        while digits < 5 and not self.may_be(1) and 1 in (round(low, digits), round(high, digits)):
            digits += 1
        return self.text(unit, digits=digits)

    def __str__(self) -> str:
        """For a time in seconds: `76.1 ms (70.2 to 80.0)`."""
        unit = unit_of(self.value)
        return self.text(unit, 1 / UNITS[unit])

    def part_of(self, whole: float) -> str:
        """Format a part of a time in seconds, with the unit and decimals of the whole: `16.2 ms
        (11.3 to 22.0)`, or `nothing measurable (-1.0 to 2.0 ms)` if it may be 0."""
        unit = unit_of(whole)
        digits = digits_of(whole / UNITS[unit])
        if (self.value if self.low is None else self.low) > 0:
            return self.text(unit, 1 / UNITS[unit], digits)
        if self.low is None or self.high is None:
            return "nothing measurable (no interval)"
        low, high = (f"{end / UNITS[unit]:z,.{digits}f}" for end in (self.low, self.high))
        return f"nothing measurable ({low} to {high} {unit})"


def digits_of(value: float) -> int:
    """Return the decimals for three significant digits: 124, 12.4, 1.24, 0.124. At most 5."""
    digits = 0
    while digits < 5 and abs(value) < 10 ** (2 - digits):
        digits += 1
    return digits


def significant(value: float, digits: int = 4) -> str:
    """Format with significant digits, including trailing zeros: `193.0`, `12,346`. Numbers below
    1e-4 or from 1e15 on have an exponent, and 0 is `0`."""
    if not value:
        return "0"
    if not 1e-4 <= abs(value) < 1e15:
        return f"{value:#.{digits}g}"
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])  # after rounding: 1 for 9.9996
    return f"{value:,.{max(0, digits - 1 - exponent)}f}"


def unit_of(seconds: float) -> str:
    """Return the largest unit in which a time is at least 1; microseconds for shorter times."""
    return next((unit for unit, length in UNITS.items() if abs(seconds) >= length), "us")


def show_seconds(seconds: float) -> str:
    """Format a time: `76.1 ms`."""
    unit = unit_of(seconds)
    scaled = seconds / UNITS[unit]
    return f"{scaled:.{digits_of(scaled)}f} {unit}"


def autocorrelation_time(samples: ArrayLike) -> float:
    """Return how many consecutive samples [n] say as much as one independent sample, at least 1:
    1 + 2 * the sum of the autocorrelations, up to the first pair of successive lags with a sum of 0
    or less (Geyer 1992, Statistical Science 7:473)."""
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
    k = round(n/2 - h), and h is the larger of these two (docs/evidence.md has the coverage):

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
    """Return half the width of a median's interval, in samples: z sqrt(n tau) / 2. signs: [n], of
    the samples about their median. tau: their autocorrelation time."""
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
    """Return the two-sided quantile of Student's t (Abramowitz and Stegun 26.7.5). With 5 degrees
    of freedom the error is 0.2% at 95% and 1% at 99.5%; with more it is smaller."""
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def median(samples: ArrayLike) -> Estimate:
    """Return the median of times [n] in order of measurement, with its 95% interval."""
    low, high = median_interval(samples) or (None, None)
    return drop_wide_interval(Estimate(float(np.median(np.asarray(samples))), low, high))


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


def iteration_times(samples: ArrayLike, aligned: bool) -> Samples:
    """Return the time of each iteration on its slowest rank, [n]. If ranks do not wait for each
    other (not aligned), iterations are not common to them: then all times are those of the rank
    with the largest median. samples: seconds [ranks, n]."""
    x = np.asarray(samples, dtype=np.float64)
    if aligned:
        return np.max(x, axis=0)
    slowest = np.median(x, axis=1).argmax()
    return np.asarray(x[slowest])


def mean_time(samples: ArrayLike) -> float:
    """Return the mean time of an iteration: that of the rank with the largest mean. A rank that is
    late at the end of an iteration makes the others wait in the next one; the mean of the maximum
    over ranks would count this twice. samples: seconds [ranks, n]; a case that kept only those of
    the slowest rank in each iteration has one row."""
    return float(np.mean(np.asarray(samples, dtype=np.float64), axis=1).max())


def by_round(samples: ArrayLike, rounds: Sequence[int]) -> list[Samples]:
    """Split samples [n] by round. rounds: iterations of each round, n in total."""
    return np.split(np.asarray(samples, dtype=np.float64), np.cumsum(rounds)[:-1])


def block_medians(samples: ArrayLike, rounds: Sequence[int]) -> Samples | None:
    """Return the median of each round's block, [rounds]; None with too few rounds for an interval,
    or if a median is 0. samples: [n]; rounds: iterations of each round, n in total."""
    if len(rounds) < MIN_ROUNDS:
        return None
    if len(set(rounds)) == 1:  # much faster
        medians = np.median(np.asarray(samples, np.float64).reshape(len(rounds), -1), axis=1)
    else:
        medians = np.array([np.median(block) for block in by_round(samples, rounds)])
    return medians if medians.min() > 0 else None


def mean_of_blocks(samples: ArrayLike, rounds: Sequence[int]) -> float:
    """Return the geometric mean over rounds of block medians; with fewer than MIN_ROUNDS rounds the
    median. For two steps timed in the same rounds, the quotient of these times is the geometric
    mean of the rounds' ratios, so a gradual slowdown cancels out (tests/simulate_ratios.py).
    samples: seconds [n]; rounds: iterations of each round, n in total."""
    medians = block_medians(samples, rounds)
    if medians is None:
        return float(np.median(np.asarray(samples)))
    first = medians[0]  # as the unit, so that the mean of equal blocks is exact
    return float(first * np.exp(np.log(medians / first).mean()))


def mean_half_width(values: Samples, confidence: float = 0.95) -> float:
    """Return half the width of the interval of the mean of values [n] of rounds, n >= MIN_ROUNDS:
    t s sqrt(tau / n) with Student's t and the standard deviation s. Up to 8 values count as
    independent (tau = 1). For more, tau is their autocorrelation time (Geyer 1992)."""
    n = len(values)
    tau = autocorrelation_time(values) if n > 8 else 1.0
    return student_t(confidence, n - 1) * float(np.std(values, ddof=1)) * float(np.sqrt(tau / n))


@dataclass(eq=False)
class Times:
    """The times of a case in seconds, by name: "step" and the parts timed with it. They are those
    of one rank, or after `merge` those of all ranks."""

    samples_s: Mapping[str, ArrayLike]  # [ranks, n] of each name
    rounds: Sequence[int]  # iterations of each round, n in total
    returned: Sequence[Any] = ()  # of each rank: Workload.returned
    stop: str = ""  # the rule that ended the case: iters, rounds, target-ci or max-seconds
    aligned: bool = True  # False if ranks do not wait for each other within an iteration
    # On CUDA: the host's launch time over the device's time, by name. It is at most 1: a host that
    # never gets ahead launches for as long as the device is busy or waits.
    launch_share: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of_rank(
        cls,
        samples_s: Mapping[str, Sequence[float]],
        rounds: Sequence[int],
        stop: str = "",
        launching_s: Mapping[str, float] | None = None,
        returned: Any = None,
        aligned: bool = True,
    ) -> "Times":
        """Return the times of one rank, rounded to nanoseconds. samples_s: [n] of each name.
        launching_s: the host's time to launch them, which comes from another clock."""
        rows = {name: np.asarray([x], dtype=np.float64).round(9) for name, x in samples_s.items()}
        shares = {
            name: min(1.0, round(float(seconds / rows[name].sum()), 3))
            for name, seconds in (launching_s or {}).items()
        }
        return cls(rows, rounds, [returned], stop=stop, aligned=aligned, launch_share=shares)

    @classmethod
    def merge(cls, by_rank: Sequence["Times"]) -> "Times":
        """Return the times of all ranks. A step that some ranks did not time has fewer rows."""
        first = by_rank[0]
        rows: dict[str, list[Samples]] = {}
        shares: dict[str, float] = {}
        for times in by_rank:
            for name in times.samples_s:
                rows.setdefault(name, []).append(times.each(name))
            for name, share in times.launch_share.items():
                shares[name] = max(share, shares.get(name, 0.0))
        samples_s = {name: np.concatenate(parts) for name, parts in rows.items()}
        returned = [value for times in by_rank for value in times.returned]
        return replace(first, samples_s=samples_s, returned=returned, launch_share=shares)

    def each(self, name: str = "step") -> Samples:
        """Return the times of all ranks, [ranks, n]. Raises KeyError for an unknown name."""
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
        batches of rounds if it is wider. With fewer than 6 rounds it is the median's."""
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
        """Return the same times with another "step", to which differences and ratios refer."""
        return Times({**self.samples_s, "step": self.samples_s[name]}, self.rounds)

    def ratio(self, part: str, step: str = "step", confidence: float = 0.95) -> Estimate:
        """Return `mean` of the part / `mean` of the step, with the interval of the rounds' ratios;
        without one with fewer than 6 rounds."""
        a, b = self.slowest(part), self.slowest(step)
        value = mean_of_blocks(a, self.rounds) / mean_of_blocks(b, self.rounds)
        both = block_medians(a, self.rounds), block_medians(b, self.rounds)
        if both[0] is None or both[1] is None:
            return Estimate(value)
        reach = float(np.exp(mean_half_width(np.log(both[0] / both[1]), confidence)))
        return drop_wide_interval(Estimate(value, value / reach, value * reach))

    def excess_over(self, part: str) -> Estimate:
        """Return the `mean` of the step - that of the part, both of the slowest rank, so that a
        late rank cancels out. The interval is over rounds: to first order (delta method), a round
        contributes step * log(its block of the step) - part * log(its block of the part). There is
        none with fewer than 6 rounds."""
        a, b = self.slowest(), self.slowest(part)
        if not b.any():  # a part that does nothing, such as steps during a save that blocks
            return self.mean()
        step, other = (mean_of_blocks(x, self.rounds) for x in (a, b))
        both = block_medians(a, self.rounds), block_medians(b, self.rounds)
        if both[0] is None or both[1] is None:
            return Estimate(step - other)
        half = mean_half_width(step * np.log(both[0]) - other * np.log(both[1]))
        return Estimate(step - other, step - other - half, step - other + half)
