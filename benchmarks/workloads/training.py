"""Metrics of a training step: its time, where the time goes, and the ranks that are late."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from benchmarks.workloads.percentiles import percentiles
from common.stats import (
    MIN_ROUNDS,
    Estimate,
    Times,
    block_medians,
    by_round,
    mean_half_width,
    mean_of_blocks,
    show_seconds,
)
from harness.cli import cut
from harness.report import Case

LATE = 0.05  # share of the step: late ranks are named if the others wait longer for them


def late_ranks(
    samples: ArrayLike, rounds: Sequence[int], least_s: float
) -> tuple[list[int], Estimate] | None:
    """Return the rows of the ranks for which all others wait, and how long: the slowest of them
    minus the slowest of the others, in each iteration. This is what mending them would gain.

    It is the slowest rank or, if others are about as late, the fewest of the slowest ones for which
    the others certainly wait longer than least_s, and each of which certainly takes longer by as
    much than the median of the others; None if there are none among half of the ranks.
    Pass local compute: in a synchronized step all ranks look equally slow. samples: seconds
    [ranks, n]. rounds: iterations of each round, n in total.
    """
    x = np.asarray(samples, dtype=np.float64)
    order = np.argsort(-np.median(x, axis=1), kind="stable")  # the slowest first
    slowest = np.maximum.accumulate(x[order], axis=0)  # of the first 1, 2, ... of them
    of_others = np.maximum.accumulate(x[order][::-1], axis=0)[::-1]
    waits = (slowest[:-1] - of_others[1:])[: len(x) // 2]
    for row in np.flatnonzero(np.median(waits, axis=1) > least_s):
        wait = mean_of_differences(waits[row], rounds)
        named, others = order[: row + 1], np.median(x[order[row + 1 :]], axis=0)
        each = (mean_of_differences(x[rank] - others, rounds) for rank in named)
        if wait.above(least_s) and all(one.above(least_s) for one in each):
            return sorted(named.tolist()), wait
    return None


def slowest_ranks(case: Case) -> str:
    """Show the late ranks as the cell of a column: `1,3`, or `-` without any."""
    rows = case.metrics.get("late_ranks", [])
    return cut([str(case.ranks[row]) for row in rows], 3).replace(", ", ",") or "-"


def late_text(case: Case, names: Sequence[str] = ()) -> str | None:
    """Return `rank 1 on vm makes the other ranks wait 400 ms (390 to 410) of 595 ms`; None if no
    rank is late. names: of all ranks, with their hosts, if known."""
    if "late_ranks" not in case.metrics:
        return None
    step_s, wait_s = case.metrics["step_s"].value, case.metrics["late_wait_s"]
    late = [case.ranks[row] for row in case.metrics["late_ranks"]]
    who = cut([names[rank] if names else f"rank {rank}" for rank in late])
    make = "makes" if len(late) == 1 else "make"
    others = "other rank" if len(case.ranks) - len(late) == 1 else "other ranks"
    if wait_s.value > step_s:  # its mean is arithmetic, that of the step geometric
        return f"{who} {make} the {others} wait for nearly all of a step of {show_seconds(step_s)}"
    return f"{who} {make} the {others} wait {wait_s.part_of(step_s)} of {show_seconds(step_s)}"


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


def excess_ratio(times: Times, part: str, divisor: str) -> Estimate:
    """Return r = (S - L) / A: `Times.excess_over` the part / `mean` of the divisor, above 0.

    The interval is over rounds, to first order (delta method): a round whose blocks take s, l and a
    contributes (S log s - L log l) / A - r log a. Beyond 1 on either side it is dropped as
    uninformative.
    """
    rows = [times.slowest(name) for name in ("step", part, divisor)]
    step, other, unit = (mean_of_blocks(row, times.rounds) for row in rows)
    value = (step - other) / unit
    blocks = [block_medians(row, times.rounds) for row in rows]
    logs = [np.log(medians) for medians in blocks if medians is not None]
    if len(logs) < len(rows):
        return Estimate(value)
    half = mean_half_width((step * logs[0] - other * logs[1]) / unit - value * logs[2])
    return Estimate(value, value - half, value + half) if half <= 1 else Estimate(value)


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
    - late_ranks, late_wait: see `late_ranks`, if the others wait longer than LATE of the step

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
        if late := late_ranks(by_rank, times.rounds, LATE * times.mean().value):
            metrics["late_ranks"], metrics["late_wait_s"] = late
    if alone is not None:
        metrics["communication_s"] = times.mean(alone)
        sends = metrics["communication_s"].value > 0
        metrics["overlap"] = 1 - excess_ratio(times, local, alone) if sends else None
    return metrics
