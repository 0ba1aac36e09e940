"""Where the time within a step goes: stamps between its phases, durations by phase and worker."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from common.environment import count_of
from common.report import Case, Estimate
from common.stats import (
    Interval,
    autocorrelation_time,
    between,
    half_by_signs,
    median,
    percentiles,
    telling,
)
from common.table import Columns, metric

Stamps = list[tuple[str, Any, Any]]  # the phases of a step: name, start and end
Durations = dict[str, list[float]]  # the seconds of a step by phase


class Phases:
    """Stamps within this worker's steps.

    On the CPU they are perf_counter's. On CUDA they are events, which the steps do not wait for.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.step: Stamps = []  # the current step
        self.count = 0  # how many steps have begun

    def now(self) -> Any:
        if self.device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        return torch.cuda.current_stream(self.device).record_event(event)

    def begin(self) -> None:
        """A new step, and its first stamp."""
        self.step = []
        self.count += 1
        self.last = self.now()

    def mark(self, name: str) -> None:
        """The phase since the last mark was `name`. A step may have several phases of one name."""
        start, self.last = self.last, self.now()
        self.add(name, start, self.last)

    def add(self, name: str, start: Any, end: Any) -> None:
        """A phase of the current step that may overlap with others. Any thread may call this."""
        self.step.append((name, start, end))

    def durations(self, steps: Sequence[Stamps]) -> list[Durations]:
        """The seconds of each phase, step by step. steps: `self.step` at the end of each step."""
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
    """The durations of several steps or workers as those of one."""
    pooled: dict[str, list[float]] = defaultdict(list)
    for part in parts:
        for phase, durations in part.items():
            pooled[phase] += durations
    return dict(pooled)


def summary(durations: Sequence[float]) -> dict[str, Any]:
    """Count, times and variance of durations [n], n > 0. A single one has the sample variance 0."""
    x = np.asarray(durations)
    variance = float(x.var(ddof=1)) if len(x) > 1 else 0.0
    times = {"min_s": float(x.min()), "max_s": float(x.max()), "mean_s": float(x.mean())}
    times["stdev_s"] = variance**0.5
    times |= {f"p{q}_s": float(np.percentile(x, q)) for q in (50, 75, 90, 95)}
    return {"count": len(x), **times, "variance_s2": variance}


def summaries(workers: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, dict[str, Any]]:
    """{worker: {phase: its summary}}, and the same over all workers under `all`."""
    summarised = {}
    for worker, phases in {**workers, "all": pool(workers.values())}.items():
        summarised[worker] = {phase: summary(durations) for phase, durations in phases.items()}
    return summarised


def phase_table(
    role: str, cases: Sequence[Case], most: int | None = None
) -> tuple[Columns, list[Case], str]:
    """A row for each case, phase and worker, and for all workers together.

    role: plural, such as `trainers`, and the metric of each case that has its `summaries`. The name
    of a case is shown in its first row. most: workers that have rows, counted from the first; None
    for all of them. Returns columns, rows, and how many workers were left out (`3 trainers`, or
    "").
    """
    rows: list[Case] = []
    left_out = 0
    for case in cases:
        name, workers = case.name, case.metrics[role]
        single = [worker for worker in workers if worker != "all"]
        left_out = max(left_out, len(single) - (most or len(single)))
        # `all` would repeat a single worker
        shown = [*single[:most], *(["all"] if len(single) > 1 else [])]
        for phase, worker in product(workers["all"], shown):
            if times := workers[worker].get(phase):
                key = {"phase": phase, "worker": worker}
                rows.append(Case(key=key, ranks=[], name=name, metrics=times, part=case.part))
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
    """Return the confidence interval of the median of values [n], one per round.

    Rounds hardly depend on each other, and up to 8 of them are too few to determine how much: they
    count as independent. Batches are not considered (see `stats.median_interval`).
    """
    x = np.asarray(values, dtype=np.float64)
    signs = np.sign(x - np.median(x)) if len(x) else x
    tau = autocorrelation_time(signs) if len(x) > 8 else 1.0
    return between(x, half_by_signs(signs, tau, confidence))


def own_pace(
    samples: ArrayLike, rounds: Sequence[int], prefix: str
) -> tuple[dict[str, Any], Estimate]:
    """The times of workers [workers, n] that do not wait for each other within a block.

    Returns the metrics `{prefix}_s`, the median of the slowest worker, `{prefix}_slowest` (its
    row) and percentiles, of the slowest worker for each; then the samples of all workers a second:
    a block lasts until its last worker is done. The rate's interval is that of the blocks' rates.
    rounds: iterations of each block, n in all.
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
    return metrics, telling(Estimate(x.size / sum(blocks_s), low, high))
