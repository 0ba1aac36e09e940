"""Time within a step: timestamps between its phases, and durations by phase and worker."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from benchmarks.workloads.percentiles import percentiles
from common.stats import (
    Estimate,
    Interval,
    autocorrelation_time,
    drop_wide_interval,
    interval_around_middle,
    median,
    median_half_width,
)
from common.table import Columns, metric
from harness.environment import count_of
from harness.report import Case

Stamps = list[tuple[str, Any, Any]]  # phases of a step: name, start and end
Durations = dict[str, list[float]]  # seconds of a step, by phase


class Phases:
    """Timestamps within the steps of this worker: perf_counter on the CPU, CUDA events on CUDA, for
    which the steps do not wait."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.step: Stamps = []  # of the current step
        self.count = 0  # number of steps that have begun

    def now(self) -> Any:
        if self.device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        return torch.cuda.current_stream(self.device).record_event(event)

    def begin(self) -> None:
        """Begin a new step."""
        self.step = []
        self.count += 1
        self.last = self.now()

    def mark(self, name: str) -> None:
        """Name the phase since the last mark. Several phases of a step may have the same name."""
        start, self.last = self.last, self.now()
        self.add(name, start, self.last)

    def add(self, name: str, start: Any, end: Any) -> None:
        """Add a phase to the current step, which may overlap with other phases. Thread-safe."""
        self.step.append((name, start, end))

    def durations(self, steps: Sequence[Stamps]) -> list[Durations]:
        """Seconds of each phase, for every step. steps: `self.step` at the end of each step."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return [durations_of(step) for step in steps]


def durations_of(step: Stamps) -> Durations:
    durations: Durations = defaultdict(list)
    for name, start, end in step:
        seconds = end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3
        durations[name].append(seconds)
    return dict(durations)


def pool(parts: Iterable[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Merge the durations of several steps or workers."""
    pooled: dict[str, list[float]] = defaultdict(list)
    for part in parts:
        for phase, durations in part.items():
            pooled[phase] += durations
    return dict(pooled)


def summary(durations: Sequence[float]) -> dict[str, Any]:
    """Count, times and sample variance of durations [n], n > 0; the variance is 0 for n = 1."""
    x = np.asarray(durations)
    variance = float(x.var(ddof=1)) if len(x) > 1 else 0.0
    times = {"min_s": float(x.min()), "max_s": float(x.max()), "mean_s": float(x.mean())}
    times["stdev_s"] = variance**0.5
    times |= {f"p{q}_s": float(np.percentile(x, q)) for q in (50, 75, 90, 95)}
    return {"count": len(x), **times, "variance_s2": variance}


def summaries(workers: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, dict[str, Any]]:
    """{worker: {phase: summary}}, with an entry `all` for all workers together."""
    summarised = {}
    for worker, phases in {**workers, "all": pool(workers.values())}.items():
        summarised[worker] = {phase: summary(durations) for phase, durations in phases.items()}
    return summarised


def phase_table(
    role: str, cases: Sequence[Case], most: int | None = None
) -> tuple[Columns, list[Case], str]:
    """Return the columns and rows of a table with a row for each case, phase and worker, and for
    all workers together, and the workers left out (`3 trainers`, or "").

    role: plural, the name of the metric with the `summaries`. most: maximum number of workers.
    """
    rows: list[Case] = []
    left_out = 0
    for case in cases:
        name, workers = case.name, case.metrics[role]
        single = [worker for worker in workers if worker != "all"]
        left_out = max(left_out, len(single) - (most or len(single)))
        # with a single worker, `all` would be the same
        shown = [*single[:most], *(["all"] if len(single) > 1 else [])]
        for phase, worker in product(workers["all"], shown):
            if times := workers[worker].get(phase):
                key = {"phase": phase, "worker": worker}
                rows.append(replace(case, key=key, name=name, metrics=times))
                name = ""
    columns: Columns = {role: lambda row: row.name, "phase": lambda row: str(row.key["phase"])}
    columns[""] = lambda row: str(row.key["worker"])
    for time in ("mean", "stdev", "min", "max", "p50", "p75", "p90", "p95"):
        columns[f"{time}\nms"] = metric(f"{time}_s", 1e3, 3)
        if time == "stdev":
            columns["variance\nms^2"] = metric("variance_s2", 1e6, 3)
    columns["count"] = metric("count", digits=0)
    return columns, rows, count_of(left_out, role.removesuffix("s")) if left_out else ""


def interval_of_rounds(values: ArrayLike, confidence: float = 0.95) -> Interval | None:
    """Return the confidence interval of the median of values [n], one per round. Rounds hardly
    depend on each other: up to 8, too few to determine how much, count as independent."""
    x = np.asarray(values, dtype=np.float64)
    signs = np.sign(x - np.median(x)) if len(x) else x
    tau = autocorrelation_time(signs) if len(x) > 8 else 1.0
    return interval_around_middle(x, median_half_width(signs, tau, confidence))


def unaligned_metrics(
    samples: ArrayLike, rounds: Sequence[int], prefix: str
) -> tuple[dict[str, Any], Estimate]:
    """Metrics of workers that do not wait for each other within a block. samples: [workers, n].

    Returns the metrics `{prefix}_s` (the median of the slowest worker), `{prefix}_slowest` (its
    row) and percentiles (each of the worker for which it is largest), followed by the samples per
    second of all workers together: the median of the blocks' rates with its interval. A block lasts
    until its last worker has finished. rounds: iterations per block, n in total.
    """
    x = np.asarray(samples)
    slowest = int(np.argmax(np.median(x, axis=1)))
    metrics: dict[str, Any] = {f"{prefix}_s": median(x[slowest]), f"{prefix}_slowest": slowest}
    by_worker = [percentiles(row, prefix) for row in x]
    for name in by_worker[0]:
        metrics[name] = max(worker[name] for worker in by_worker)
    del metrics[f"{prefix}_p50_s"]  # it is {prefix}_s
    blocks = np.split(x, np.cumsum(rounds)[:-1], axis=1)
    blocks_s = [float(block.sum(axis=1).max()) for block in blocks]
    rates = [block.size / block_s for block, block_s in zip(blocks, blocks_s, strict=True)]
    low, high = interval_of_rounds(rates) or (None, None)
    return metrics, drop_wide_interval(Estimate(float(np.median(rates)), low, high))
