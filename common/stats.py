"""Statistics of repeated timings, by numpy. docs/measuring.md derives each."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from common.cli import cut, show_size
from common.report import Case, Estimate, Report

Interval = tuple[float, float]
Samples = NDArray[np.float64]
BATCHES = 6  # in time, for the interval of a median
SIZES_APART = 4.0  # greatest ratio of two successive sizes between which `interpolate` works
DISAGREE = 0.9  # standard deviation of the batches' mean signs, which are -1 to 1
MIN_ROUNDS = 6  # fewer give no interval of a ratio or a difference
WIDEST = 3.0  # an interval of a time, rate or ratio that reaches farther says nothing
MODES_APART = 2.0  # the slow mode takes so many times as long, at least
FEWEST_OF_MODE = 5  # samples


def percentiles(samples: ArrayLike, prefix: str) -> dict[str, float]:
    """`{prefix}_p50_s`, p75, p90 and p95 of samples [n] in seconds; p99 from 100 samples on."""
    x = np.asarray(samples, dtype=np.float64)
    wanted = [50, 75, 90, 95]
    if len(x) >= 100:
        wanted.append(99)
    return {f"{prefix}_p{q}_s": float(np.percentile(x, q)) for q in wanted}


def autocorrelation_time(samples: ArrayLike) -> float:
    """Samples [n] are correlated: so many in a row tell as much as one independent sample.

    At least 1. It is 1 + 2 * the sum of the autocorrelations, as long as the sums of successive
    pairs stay positive (Geyer 1992).
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
    """The confidence interval of the median of samples [n] in the order of time; None for too few
    (under 6 at 95 %), if they drift, or if their batches disagree.

    It goes from the k-th smallest sample to the k-th largest, k = round(n/2 - h), where h is the
    larger one of two (docs/measuring.md says how often that holds):
    z sqrt(n tau) / 2: tau is the autocorrelation time of the signs about the median (Campbell and
    Gardner 1988, BMJ 296:1454; Sen 1968).
    The batches disagree if s is above DISAGREE, from 12 samples on: nearly every one of them is on
    one side of the median, so that the samples tell little about the next ones.
    t s n / (2 sqrt(6)), from 18 samples on: s is the standard deviation over 6 batches in time of
    their mean sign (Schmeiser 1982, Operations Research 30:556; Woodruff 1952, JASA 47:635).
    """
    x = np.asarray(samples, dtype=np.float64)
    n = len(x)
    signs = np.sign(x - np.median(x)) if n else x
    half = half_by_signs(signs, autocorrelation_time(signs), confidence)
    if n >= 2 * BATCHES:
        means = [np.mean(batch) for batch in np.array_split(signs, BATCHES)]
        deviation = float(np.std(means, ddof=1))
        if deviation > DISAGREE:
            return None
        if n >= 3 * BATCHES:
            spread = deviation * n / np.sqrt(BATCHES)
            half = max(half, student(confidence, BATCHES - 1) * spread / 2)
    return between(x, half)


def interval_of_rounds(values: ArrayLike, confidence: float = 0.95) -> Interval | None:
    """The same for values [n] of which each round gives one. Rounds hardly depend on each other,
    and up to 8 of them are too few to tell: they count as independent. Batches play no part."""
    x = np.asarray(values, dtype=np.float64)
    signs = np.sign(x - np.median(x)) if len(x) else x
    tau = autocorrelation_time(signs) if len(x) > 8 else 1.0
    return between(x, half_by_signs(signs, tau, confidence))


def half_by_signs(signs: NDArray[np.float64], tau: float, confidence: float) -> float:
    """Half the width of a median's interval, in samples."""
    return float(NormalDist().inv_cdf(0.5 + confidence / 2) * np.sqrt(len(signs) * tau) / 2)


def between(samples: NDArray[np.float64], half: float) -> Interval | None:
    """The samples that are `half` below the middle and above it, in order of size."""
    n = len(samples)
    low = round(n / 2 - half)  # counted from 1; its mirror image is n + 1 - low
    if low < 1:
        return None
    x = np.sort(samples)
    return float(x[low - 1]), float(x[n - low])


def student(confidence: float, freedom: int) -> float:
    """The two-sided quantile of Student's t: for 5 degrees of freedom within 0.2 % at 95 %, and 1 %
    at 99.5 %; for more within less. Abramowitz and Stegun 26.7.5."""
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def median(samples: ArrayLike) -> Estimate:
    """The median of times [n] in the order in which they were measured, with its 95 % interval."""
    return telling(median_difference(samples))


def median_difference(samples: ArrayLike) -> Estimate:
    """The same of differences of times, which keep their interval however wide it is."""
    low, high = median_interval(samples) or (None, None)
    return Estimate(float(np.median(np.asarray(samples))), low, high)


def telling(estimate: Estimate) -> Estimate:
    """A time, rate or ratio without its interval if that says nothing: if it reaches to more than
    WIDEST times the value, or to less than a WIDEST-th of it."""
    if estimate.low is None or estimate.high is None:
        return estimate
    says = WIDEST * estimate.low >= estimate.value and estimate.high <= WIDEST * estimate.value
    return estimate if says else Estimate(estimate.value)


def alike(a: ArrayLike, b: ArrayLike) -> bool:
    """Whether samples [n] and [m] may come from one distribution, by their rank sum at 5 % (Mann
    and Whitney 1947)."""
    x, y = np.asarray(a, dtype=np.float64)[:, None], np.asarray(b, dtype=np.float64)
    wins = np.sum(x < y) + np.sum(x == y) / 2
    pairs = len(x) * len(y)
    deviation = np.sqrt(pairs * (len(x) + len(y) + 1) / 12)
    return bool(abs(wins - pairs / 2) <= NormalDist().inv_cdf(0.975) * deviation)


class Mode(NamedTuple):
    """One of two modes: the median of its samples, and their share of all."""

    time_s: float
    share: float


def modes(samples: ArrayLike) -> tuple[Mode, Mode] | None:
    """The fast and the slow mode of times [n]; None where there is one mode.

    The logarithms are cut where the variance between the two sides is largest (Otsu 1979), with a
    tenth of the samples or more on each side. The sides are modes if their medians are a factor of
    MODES_APART from each other, and few samples are in the middle third between them. A single mode
    has no such valley, however wide or skewed it is.
    """
    x = np.sort(np.log(np.maximum(samples, 1e-9)))
    n = len(x)
    least = max(FEWEST_OF_MODE, -(-n // 10))
    if n < 2 * least:
        return None
    cuts = np.arange(least, n - least + 1)  # how many samples are on the fast side
    sums = np.cumsum(x)[cuts - 1]
    means_apart = (x.sum() - sums) / (n - cuts) - sums / cuts
    cut = int(cuts[np.argmax(cuts * (n - cuts) * means_apart**2)])
    fast, slow = float(np.median(x[:cut])), float(np.median(x[cut:]))
    third = (slow - fast) / 3
    if 3 * third < np.log(MODES_APART):
        return None

    def near(center: float) -> int:
        return int(np.sum(np.abs(x - center) <= third / 2))

    if min(near(fast), near(slow)) < FEWEST_OF_MODE + 3 * near((fast + slow) / 2):
        return None
    return Mode(float(np.exp(fast)), cut / n), Mode(float(np.exp(slow)), 1 - cut / n)


def time_of_iterations(samples: ArrayLike, aligned: bool) -> NDArray[np.float64]:
    """The seconds of each iteration, [iterations]: the slowest rank counts. samples: [ranks, n].

    Ranks that go at their own pace (not aligned) have no common iterations. There all times are
    those of one rank: the one with the largest median.
    """
    x = np.asarray(samples, dtype=np.float64)
    if aligned:
        return np.max(x, axis=0)
    slowest = np.median(x, axis=1).argmax()
    return np.asarray(x[slowest])


def in_rounds(samples: ArrayLike, rounds: Sequence[int]) -> list[NDArray[np.float64]]:
    """Samples [n], split into those of each round. rounds: iterations of each, n in all."""
    return np.split(np.asarray(samples, dtype=np.float64), np.cumsum(rounds)[:-1])


def block_medians(samples: ArrayLike, rounds: Sequence[int]) -> Samples | None:
    """The median of each round's block, [rounds]; None if they are too few for an interval, or if
    one of them is 0. samples: [n]; rounds: iterations of each round, n in all."""
    if len(rounds) < MIN_ROUNDS:
        return None
    medians = np.array([np.median(block) for block in in_rounds(samples, rounds)])
    return medians if medians.min() > 0 else None


def time_of_rounds(samples: ArrayLike, rounds: Sequence[int]) -> float:
    """The geometric mean over rounds of block medians; under MIN_ROUNDS rounds the median.

    Of two steps that were timed in the same rounds, the quotient of these times is the geometric
    mean of the rounds' ratios: a drift of the machine cancels. tests/simulate_ratios.py compares
    this with medians. samples: seconds [n]; rounds: iterations of each round, n in all.
    """
    medians = block_medians(samples, rounds)
    if medians is None:
        return float(np.median(np.asarray(samples)))
    first = medians[0]  # as the unit: then equal blocks have exactly their own mean
    return float(first * np.exp(np.log(medians / first).mean()))


def half_of_mean(values: Samples, confidence: float = 0.95) -> float:
    """Half the width of the interval of the mean of values [n], n >= MIN_ROUNDS, of which each
    round gives one: Student's t. Up to 8 values count as independent; of more, the autocorrelation
    time says how much they depend on each other."""
    n = len(values)
    tau = autocorrelation_time(values) if n > 8 else 1.0
    return student(confidence, n - 1) * float(np.std(values, ddof=1)) * float(np.sqrt(tau / n))


class Times:
    """The seconds of a case by name: "step", which it is about, and the parts timed with it.

    An unknown name raises a KeyError that lists the known ones.
    """

    def __init__(
        self,
        samples_s: Mapping[str, ArrayLike],
        rounds: Sequence[int],
        returned: Sequence[Any] = (),
    ) -> None:
        """samples_s: [ranks, n] of each name. rounds: iterations of each round, n in all."""
        self.samples_s, self.rounds = samples_s, rounds
        self.returned = returned  # an entry for each rank: see Workload.returned

    def each(self, name: str = "step") -> NDArray[np.float64]:
        """The seconds of each rank, [ranks, n]."""
        if name not in self.samples_s:
            raise KeyError(f"{name!r} was not timed; these were: {', '.join(self.samples_s)}")
        return np.asarray(self.samples_s[name], dtype=np.float64)

    def slowest(self, name: str = "step") -> NDArray[np.float64]:
        """The seconds of the slowest rank in each iteration, [n]."""
        return np.max(self.each(name), axis=0)

    def __contains__(self, name: str) -> bool:
        return name in self.samples_s

    def median(self, name: str = "step") -> Estimate:
        """The median over the iterations of the slowest rank's seconds."""
        return median(self.slowest(name))

    def mean(self, name: str = "step") -> Estimate:
        """The slowest rank's seconds: `time_of_rounds`, which ratios and differences are made of.

        Its interval is that of the mean over rounds, or the wider one by the means of six batches
        of rounds; under 6 rounds that of the median.
        """
        value = time_of_rounds(self.slowest(name), self.rounds)
        medians = block_medians(self.slowest(name), self.rounds)
        if medians is None:
            return self.median(name)
        logs = np.log(medians)
        half = half_of_mean(logs)
        if len(logs) >= 3 * BATCHES:
            means = np.array([np.mean(batch) for batch in np.array_split(logs, BATCHES)])
            half = max(half, half_of_mean(means))
        return telling(Estimate(value, value * float(np.exp(-half)), value * float(np.exp(half))))

    def about(self, name: str) -> "Times":
        """The same times, about another step."""
        return Times({**self.samples_s, "step": self.samples_s[name]}, self.rounds)

    def ratio(self, part: str, step: str = "step", confidence: float = 0.95) -> Estimate:
        """`mean` of the part / `mean` of the step; its interval is over the rounds' ratios.

        There is no interval under 6 rounds.
        """
        a, b = self.slowest(part), self.slowest(step)
        value = time_of_rounds(a, self.rounds) / time_of_rounds(b, self.rounds)
        both = block_medians(a, self.rounds), block_medians(b, self.rounds)
        if both[0] is None or both[1] is None:
            return Estimate(value)
        reach = float(np.exp(half_of_mean(np.log(both[0] / both[1]), confidence)))
        return telling(Estimate(value, value / reach, value * reach))

    def beyond(self, part: str) -> Estimate:
        """How much longer the step takes than the part: the difference of their `mean`s.

        The slowest rank counts on both sides, so that a late rank cancels out. The 95 % interval is
        over rounds: a round's share in the difference is, to first order, step * log(its block of
        the step) - part * log(its block of the part). There is no interval under 6 rounds.
        """
        a, b = self.slowest(), self.slowest(part)
        if not b.any():  # a part that does nothing, such as steps beside a save that blocks
            return self.mean()
        step, other = (time_of_rounds(x, self.rounds) for x in (a, b))
        both = block_medians(a, self.rounds), block_medians(b, self.rounds)
        if both[0] is None or both[1] is None:
            return Estimate(step - other)
        half = half_of_mean(step * np.log(both[0]) - other * np.log(both[1]))
        return Estimate(step - other, step - other - half, step - other + half)


def straggler(samples: ArrayLike, margin: float = 0.05) -> tuple[int, float] | None:
    """(row, factor) of the rank that is slower than the others beyond noise. samples: [ranks, n].

    Give it local compute: in a synchronised step all ranks look equally slow. The median of
    x[rank] / median(x[others]) must lie above 1 + margin with 95 % confidence, shared among the
    ranks (Bonferroni). If the number of others is even, their upper median counts: with a lower
    value, a single fast rank would make the others look slow.
    """
    x = np.asarray(samples, dtype=np.float64)
    if len(x) < 2 or x.shape[1] == 0:
        return None
    # The upper median of the others, without sorting them for each rank: it is the value at
    # `middle` of all ranks, or the next one where the rank itself is at or below that value.
    middle, ordered = (len(x) - 1) // 2, np.sort(x, axis=0)
    median_of_others = np.where(x <= ordered[middle], ordered[middle + 1], ordered[middle])
    ratios = x / median_of_others
    factors = np.median(ratios, axis=1)
    for row in np.argsort(-factors, kind="stable"):  # the slowest first
        if factors[row] <= 1 + margin:  # its interval begins below the factor
            return None
        signs = np.sign(ratios[row] - factors[row])
        half = half_by_signs(signs, autocorrelation_time(signs), 1 - 0.05 / len(x))
        interval = between(ratios[row], half)
        if interval and interval[0] > 1 + margin:
            return int(row), float(factors[row])
    return None


def training_metrics(times: Times, samples_per_step: float) -> dict[str, Any]:
    """The metrics of a training step. The slowest rank counts in each iteration.

    step_s is `Times.mean`, which ratios are made of; step_p50_s is the median over iterations.
    samples_per_step: how many samples all ranks together train on in a step.
    """
    slowest = times.slowest()
    metrics: dict[str, Any] = {"step_s": times.mean()}
    metrics |= percentiles(slowest, "step")
    metrics["step_p50_s"] = times.median()
    metrics["step_mean_s"] = float(slowest.mean())
    metrics["samples_per_s"] = samples_per_step / metrics["step_s"]
    return metrics


def breakdown(times: Times, local: str, alone: str | None = None) -> dict[str, Any]:
    """Where a data-parallel training step's time goes: docs/measuring.md.

    local: the name of the part that is the step without communication. alone: the name of the part
    that is the communication by itself, if it was timed.
    exposed = step - local compute, the slowest rank on both sides: a late rank cancels out.
    overlap = 1 - exposed / alone; None if exposed may be 0, and if it exceeds alone: computing and
    communicating then slow each other down, and no share of communication is hidden.
    late = local compute of the slowest rank - of the median rank, in each iteration.
    """
    by_rank = times.each(local)
    exposed = times.beyond(local)
    metrics: dict[str, Any] = {
        "local_compute_s": times.mean(local),
        "exposed_s": exposed,
        "late_s": median_difference(times.slowest(local) - np.median(by_rank, axis=0)),
    }
    if alone is not None:
        metrics["communication_s"] = times.mean(alone)
        can_be = not exposed.may_be(0) and 0 < exposed.value <= metrics["communication_s"].value
        metrics["overlap"] = 1 - exposed / metrics["communication_s"] if can_be else None
    if slow := straggler(by_rank):
        metrics["straggler_rank"], metrics["straggler_factor"] = slow
    return metrics


def compare_settings(times: Times, labels: list[str]) -> dict[str, Any]:
    """The ratios of settings that were timed in turns. The first one is the step.

    speed: how many times as fast as the first one a setting is. lead_of_fastest: how many times as
    fast as this setting the one with the shortest step is.
    """
    steps = {label: "step" if label == labels[0] else label for label in labels}
    best = min(labels, key=lambda label: times.mean(steps[label]).value)
    confidence = simultaneous(len(labels))
    metrics = {}
    for label, step in steps.items():
        if label != labels[0]:
            metrics[f"{label} speed"] = times.ratio("step", step, confidence)
        if label != best:
            metrics[f"{label} lead_of_fastest"] = times.ratio(step, steps[best], confidence)
    return metrics


def interpolate(times: Mapping[int, Estimate], size: float) -> Estimate:
    """The time at `size`, between the two nearest measured sizes, with its interval.

    times: seconds by size in bytes, all sizes above 0. Between two sizes the time is linear in the
    size, as in the model latency + size / bandwidth (Hockney 1994, Parallel Computing 20:389), and
    so are the ends of the interval. There is no interval if one of the two times has none.

    Raises ValueError if `size` is outside of the measured sizes: nothing is extrapolated. Also if
    the two sizes differ by more than a factor of SIZES_APART: libraries switch between protocols
    and algorithms there, and the time is no straight line.
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
    if above > SIZES_APART * below:
        ends = f"{show_size(below)} and {show_size(above)}"
        limit = f"more than a factor of {SIZES_APART:g} apart"
        raise ValueError(f"{wanted} are between the measured sizes {ends}, which are {limit}")
    a, b = times[below], times[above]
    share = (size - below) / (above - below)
    value = a.value + share * (b.value - a.value)
    if a.low is None or a.high is None or b.low is None or b.high is None:
        return Estimate(value)
    return Estimate(value, a.low + share * (b.low - a.low), a.high + share * (b.high - a.high))


Layout = tuple[int, ...]  # number of ranks of a group on each of its hosts, the largest first
TimesBySize = dict[int, Estimate]  # seconds, by size in bytes
# What `collective_times` returns: the times by collective, layout and dtype
Alone = Mapping[tuple[str, Layout, str], TimesBySize]


def total(estimates: Sequence[Estimate]) -> Estimate:
    """The sum. Its ends are the sums of the ends, so its interval holds if all intervals do."""
    value = math.fsum(one.value for one in estimates)
    ends = [
        (one.low, one.high) for one in estimates if one.low is not None and one.high is not None
    ]
    if len(ends) < len(estimates):
        return Estimate(value)
    return Estimate(value, math.fsum(low for low, _ in ends), math.fsum(high for _, high in ends))


def time_alone(
    alone: Alone, collective: str, layout: Layout, dtype: str, size: float
) -> tuple[Estimate, str]:
    """The time of a collective of `size` bytes by itself, and the dtype with which it was measured:
    `dtype` if there is one, else another one.

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
    """`16 ranks of 2 hosts (8 each)`"""
    ranks = f"{sum(layout)} ranks" if sum(layout) > 1 else "1 rank"
    if len(layout) == 1:
        return f"{ranks} of one host"
    each = f"{layout[0]} each" if len(set(layout)) == 1 else " + ".join(map(str, layout))
    return f"{ranks} of {len(layout)} hosts ({each})"


def collective_times(report: Report) -> dict[tuple[str, Layout, str], TimesBySize]:
    """What collectives.py has measured, for `time_alone`: by collective, layout and dtype.

    A time is that of the faster variant (in place or out of place); of several reductions the first
    one in the report counts. Cases that failed are left out. Raises ValueError if the report is
    another script's.
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
    """The layout of the first group of a case of collectives.py. hosts: of each rank of the job."""
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
    """The layout of a group. hosts: of each of its ranks."""
    return tuple(sorted(Counter(hosts).values(), reverse=True))


class Disturbed(str):
    """A sentence about a number that cannot be. Benchmark adds who took the cores meanwhile."""


def simultaneous(count: int) -> float:
    """The confidence of each ratio between `count` steps that were timed in turns, such that all
    ratios to one step hold together with 95 %: 1 - 0.05 / (count - 1) (Bonferroni).

    This also covers `fastest`. A step can be called the fastest wrongly only if it wins against the
    one that really is, and there are count - 1 such pairs.
    """
    return 1 - 0.05 / (count - 1)


def fastest(name: str, leads: Mapping[str, Estimate]) -> str:
    """Whether a setting is the fastest one: it has to win against every other one.

    leads: how many times as fast as each other setting it is, all 1 or more, with intervals of
    confidence `simultaneous`.
    """
    alike = {other: lead for other, lead in leads.items() if lead.may_be(1)}
    if alike:
        several = cut([f"{other}: {lead.times()}" for other, lead in alike.items()], 3)
        return f"no setting is the fastest, {name} does not differ significantly from {several}"
    following = min(leads, key=lambda other: leads[other].value)
    words = f"{leads[following].times()} as fast as {following}, the next"
    return f"{name} is the fastest of {len(leads) + 1} settings, {words}"


def side_by_side(estimates: Mapping[str, Estimate], unit: str = "") -> str:
    """`10.0 ms (9.0 to 11.0) by a, 12.0 ms (11.0 to 13.0) by b`: estimates by the names of cases
    that were timed one after the other, so no order is told. unit: of a number that is no time."""
    shown = []
    for name, estimate in estimates.items():
        shown.append(f"{estimate.text(unit) if unit else estimate} by {name}")
    advice = "; timed one after the other, analysis/ab.py takes turns" if len(shown) > 1 else ""
    return ", ".join(shown) + advice


# -- how samples reach rank 0, and what a report keeps of them -------------------------------------

LIMIT = 2**18  # a case of more samples is not written whole: its line would have megabytes


def rounded(samples_s: Mapping[str, Sequence[float]]) -> dict[str, Samples]:
    """The seconds of each step, [iterations], rounded to the nanosecond.

    Each rank does this for itself. Rank 0 then gathers arrays: they take fewer bytes and less time
    than lists.
    """
    arrays = {}
    for step, seconds in samples_s.items():
        arrays[step] = np.array([round(second, 9) for second in seconds], dtype=np.float64)
    return arrays


def stacked(by_rank: Sequence[Mapping[str, Samples]]) -> dict[str, Samples]:
    """The samples of all ranks that timed a step, [ranks, iterations] of each.

    by_rank: [iterations] of each step that the rank has timed.
    """
    samples_s = {}
    for step in dict.fromkeys(step for samples in by_rank for step in samples):
        samples_s[step] = np.stack([samples[step] for samples in by_rank if step in samples])
    return samples_s


def keep_samples(case: Case, samples_s: Mapping[str, Samples]) -> None:
    """Put the samples into the case: all of them, or above LIMIT the slowest rank's in each
    iteration. Readers that take the slowest of a case's rows find the same in both.

    samples_s: [ranks, iterations] of each step, all of one shape. case.aligned must be right.
    """
    case.bounded = sum(samples.size for samples in samples_s.values()) > LIMIT
    for step, samples in samples_s.items():
        kept = [time_of_iterations(samples, case.aligned)] if case.bounded else samples
        case.samples_s[step] = np.asarray(kept).tolist()
