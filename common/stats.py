"""Statistics of repeated timings, by numpy. docs/measuring.md derives each."""

from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

Interval = tuple[float, float]


def percentiles(samples: ArrayLike, prefix: str) -> dict[str, float]:
    """`{prefix}_p50_s`, p75, p90 and p95 of samples [n] in seconds; p99 from 100 samples on."""
    x = np.asarray(samples, dtype=np.float64)
    wanted = (50, 75, 90, 95) + ((99,) if len(x) >= 100 else ())
    return {f"{prefix}_p{q}_s": float(np.percentile(x, q)) for q in wanted}


def autocorrelation_time(samples: ArrayLike) -> float:
    """How many successive samples [n] are worth one independent one, at least 1: 1 + 2 * the sum of
    the autocorrelations while successive pairs stay positive (Geyer 1992)."""
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
    """Confidence interval of the median of samples [n]; None for too few (under 6 at 95 %).

    From one of the sorted samples to another, at n/2 +- z * sqrt(n tau)/2 (Campbell and Gardner
    1988, BMJ 296:1454); tau: the autocorrelation time of the signs about the median (Sen 1968).
    """
    x = np.asarray(samples, dtype=np.float64)
    n = len(x)
    if n == 0:
        return None
    tau = autocorrelation_time(np.sign(x - np.median(x)))
    half = NormalDist().inv_cdf(0.5 + confidence / 2) * np.sqrt(n * tau) / 2
    low = round(n / 2 - half)  # 1-based; its mirror image is n + 1 - low
    x = np.sort(x)
    return (float(x[low - 1]), float(x[n - low])) if low >= 1 else None


def relative_ci95(samples: ArrayLike) -> float | None:
    """Half the width of the median's 95 % interval, over the median; None if there is none."""
    interval = median_interval(samples)
    if interval is None:
        return None
    return (interval[1] - interval[0]) / 2 / max(float(np.median(np.asarray(samples))), 1e-12)


def difference(a: ArrayLike, b: ArrayLike, rounds: Sequence[int]) -> tuple[float, Interval | None]:
    """How much longer `a` takes than `b`, timed in the same rounds, with its 95 % interval.

    The median over the rounds of median(a) - median(b) within each, so that a drift of the machine
    cancels. a, b: [n]; rounds: the iterations of each. No interval under 6 rounds.
    """
    ends = np.cumsum(rounds)[:-1]
    pairs = zip(np.split(np.asarray(a), ends), np.split(np.asarray(b), ends), strict=True)
    gaps = [float(np.median(x) - np.median(y)) for x, y in pairs]
    return float(np.median(gaps)), median_interval(gaps)


def straggler(samples: ArrayLike, margin: float = 0.05) -> tuple[int, float] | None:
    """(row, factor) of the rank that is slower than the others beyond noise. samples: [ranks, n].

    Feed it local compute: in a synchronised step all ranks look equally slow. The median of
    x[rank] / median(x[others]) must lie above 1 + margin with 95 % confidence, shared among the
    ranks (Bonferroni). Of an even number of others the upper median: one fast rank slows nobody.
    """
    x = np.asarray(samples, dtype=np.float64)
    if len(x) < 2 or x.shape[1] == 0:
        return None
    # the upper median of the others without sorting them for each rank: it is the value at
    # `middle` of all, or the next one where the rank's own is at or below that
    middle, ordered = (len(x) - 1) // 2, np.sort(x, axis=0)
    ratios = x / np.where(x <= ordered[middle], ordered[middle + 1], ordered[middle])
    worst = None
    for row, factor in enumerate(np.median(ratios, axis=1)):
        interval = median_interval(ratios[row], confidence=1 - 0.05 / len(x))
        if interval and interval[0] > 1 + margin and (worst is None or factor > worst[1]):
            worst = (row, float(factor))
    return worst


def own_pace(
    samples: ArrayLike, rounds: Sequence[int], prefix: str
) -> tuple[dict[str, float], list[float]]:
    """Of workers [workers, n] that do not wait for each other within a block: percentiles of the
    slowest, and the seconds of each block until its last worker is done."""
    x = np.asarray(samples)
    each = [percentiles(row, prefix) for row in x]
    blocks = np.split(x, np.cumsum(rounds)[:-1], axis=1)
    slowest = {name: max(worker[name] for worker in each) for name in each[0]}
    return slowest, [float(block.sum(axis=1).max()) for block in blocks]


def step_metrics(step: ArrayLike, samples_per_step: float) -> dict[str, Any]:
    """Of a training step [ranks, n] with so many samples on all ranks; the slowest rank counts."""
    slowest = np.asarray(step).max(axis=0)
    return {
        **percentiles(slowest, "step_time"),
        "step_time_mean_s": float(slowest.mean()),
        "step_time_ci95_s": median_interval(slowest),
        "step_time_ci95_rel": relative_ci95(slowest),
        "samples_per_s": samples_per_step / float(np.median(slowest)),
    }


def breakdown_metrics(
    step: ArrayLike, local: ArrayLike, alone: ArrayLike | None, rounds: Sequence[int]
) -> dict[str, Any]:
    """Where a step's time goes: docs/measuring.md. All [ranks, n], timed in the same rounds.

    exposed = step - local compute, the slowest rank on both sides: a late rank cancels out.
    """
    step, local = np.asarray(step), np.asarray(local)
    exposed, interval = difference(step.max(axis=0), local.max(axis=0), rounds)
    found: dict[str, Any] = {
        "local_compute_p50_s": float(np.median(local.max(axis=0))),
        "exposed_communication_s": exposed,
        "exposed_communication_ci95_s": interval,
        "late_s": float(np.median(local.max(axis=0) - np.median(local, axis=0))),
    }
    if alone is not None:
        p50 = float(np.median(np.asarray(alone).max(axis=0)))
        found["communication_p50_s"] = p50
        found["overlap"] = 1 - exposed / p50 if p50 > 0 else None
    if slow := straggler(local):
        found["straggler_rank"], found["straggler_factor"] = slow
    return found
