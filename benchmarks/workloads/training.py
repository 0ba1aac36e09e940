"""Metrics of a training step: its time, where the time goes, and the rank that is slower."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from common.stats import (
    MIN_ROUNDS,
    Estimate,
    Times,
    autocorrelation_time,
    by_round,
    interval_around_middle,
    mean_half_width,
    median_half_width,
    percentiles,
)

LATE = 0.05  # share of the step: late ranks are named if the others wait longer for them


def straggler(samples: ArrayLike, margin: float = 0.05) -> tuple[int, float] | None:
    """Return (row, factor) of the slowest rank if it is significantly slower than the others.

    Pass local compute: in a synchronized step all ranks look equally slow. The median of
    x[rank] / median(x[others]) must exceed 1 + margin at a confidence of 95%, shared among the
    ranks (Bonferroni). For an even number of others, their upper median is used: with a lower value
    a single fast rank would make the others look slow. samples: seconds [ranks, n].
    """
    x = np.asarray(samples, dtype=np.float64)
    if len(x) < 2 or x.shape[1] == 0:
        return None
    # The upper median of the others, without sorting them for each rank: it is the value at
    # `middle` of all ranks, or the next one if the rank itself is at or below that value.
    middle, ordered = (len(x) - 1) // 2, np.sort(x, axis=0)
    median_of_others = np.where(x <= ordered[middle], ordered[middle + 1], ordered[middle])
    ratios = x / median_of_others
    factors = np.median(ratios, axis=1)
    for row in np.argsort(-factors, kind="stable"):  # the slowest first
        if factors[row] <= 1 + margin:  # its interval begins below the factor
            return None
        signs = np.sign(ratios[row] - factors[row])
        half = median_half_width(signs, autocorrelation_time(signs), 1 - 0.05 / len(x))
        interval = interval_around_middle(ratios[row], half)
        if interval and interval[0] > 1 + margin:
            return int(row), float(factors[row])
    return None


def late_ranks(samples: ArrayLike, rounds: Sequence[int]) -> tuple[list[int], Estimate]:
    """Return the rows of the ranks for which all others wait, and how long: the slowest of them
    minus the slowest of the others, in each iteration. This is what mending them would gain.

    They are the slowest rank, or the fewest of the slowest ones that make the others wait at least
    half as long as the slower half of all ranks does: two ranks that are equally late are named
    together. samples: local compute in seconds, [ranks, n], of at least 2 ranks. rounds: iterations
    of each round, n in total.
    """
    x = np.asarray(samples, dtype=np.float64)
    order = np.argsort(-np.median(x, axis=1), kind="stable")  # the slowest first
    slowest = np.maximum.accumulate(x[order], axis=0)  # of the first 1, 2, ... of them
    of_others = np.maximum.accumulate(x[order][::-1], axis=0)[::-1]
    waits = (slowest[:-1] - of_others[1:])[: len(x) // 2]
    medians = np.median(waits, axis=1)
    first = int(np.argmax(medians >= medians[-1] / 2))
    return sorted(order[: first + 1].tolist()), mean_of_differences(waits[first], rounds)


def mean_of_differences(samples: ArrayLike, rounds: Sequence[int]) -> Estimate:
    """Return the mean over rounds of block medians of differences of times, with its 95% interval.

    There is no interval with fewer than 6 rounds. samples: seconds [n]; rounds: iterations of each
    round, n in total.
    """
    medians = np.array([np.median(block) for block in by_round(samples, rounds)])
    value = float(np.mean(medians))
    if len(rounds) < MIN_ROUNDS:
        return Estimate(value)
    half = mean_half_width(medians)
    return Estimate(value, value - half, value + half)


def training_metrics(times: Times, samples_per_step: float) -> dict[str, Any]:
    """Return the metrics of a training step, by the slowest rank of each iteration.

    step_s is `Times.mean`, on which ratios are based; step_p50_s is the median over iterations.
    samples_per_step: the number of samples on which all ranks together train in a step.
    """
    slowest = times.slowest()
    metrics: dict[str, Any] = {"step_s": times.mean()}
    metrics |= percentiles(slowest, "step")
    metrics["step_p50_s"] = times.median()
    metrics["step_mean_s"] = float(slowest.mean())
    metrics["samples_per_s"] = samples_per_step / metrics["step_s"]
    return metrics


def breakdown(times: Times, local: str, alone: str | None = None) -> dict[str, Any]:
    """Return how the time of a data-parallel training step divides (docs/measuring.md).

    - exposed = step - local compute, the slowest rank on both sides, so a late rank cancels out
    - overlap = 1 - exposed / alone. It is negative if exposed exceeds alone; None if alone is 0.
    - late = local compute of the slowest rank - the median of the other ranks, in each iteration
    - late_ranks, late_wait: see `late_ranks`, if the wait is certainly more than LATE of the step

    local: the name of the part that is the step without communication. alone: the name of the part
    that is the communication by itself, if it was timed.
    """
    by_rank = times.each(local)
    metrics: dict[str, Any] = {
        "local_compute_s": times.mean(local),
        "exposed_s": times.excess_over(local),
    }
    if len(by_rank) > 1:
        others = np.median(np.sort(by_rank, axis=0)[:-1], axis=0)
        metrics["late_s"] = mean_of_differences(times.slowest(local) - others, times.rounds)
        rows, wait = late_ranks(by_rank, times.rounds)
        if wait.above(LATE * times.mean().value):
            metrics |= {"late_ranks": rows, "late_wait_s": wait}
    if alone is not None:
        metrics["communication_s"] = times.mean(alone)
        sends = metrics["communication_s"].value > 0
        metrics["overlap"] = 1 - times.excess_ratio(local, alone) if sends else None
    if slow := straggler(by_rank):
        metrics["straggler_rank"], metrics["straggler_factor"] = slow
    return metrics
