"""Durations by phase and worker: stamps that do not disturb, summaries, a table of them."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, variance
from time import perf_counter
from typing import Any

import torch

from common.breakdown import bounds
from common.stats import PERCENTILES, median_interval, percentiles
from common.table import Columns, render
from common.timing import LEAD_IN

ALL = "all"  # the workers of a role taken together
SHOWN_WORKERS = 8  # of a role in a table; the report has all of them
# Of each worker and each metric: the durations in seconds.
Seconds = Mapping[str, Mapping[str, Sequence[float]]]


def stamp(device: torch.device) -> Any:
    """Now: perf_counter, or on CUDA an event on the current stream, which nobody waits for."""
    if device.type != "cuda":
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def seconds(start: Any, end: Any) -> float:
    """Between two stamps of one device. On CUDA only after a synchronize."""
    if isinstance(start, float):
        return float(end - start)
    return float(start.elapsed_time(end)) / 1e3


def timed_steps(rounds: Iterable[int], warmup_iters: int) -> list[int]:
    """Which calls of a step `timing.measure` has timed, counted from 0.

    rounds: the iterations of each round, as in its Measurement. The warm-up and the untimed
    iterations that start a block are left out. For a measurement of one step.
    """
    calls: list[int] = []
    first = warmup_iters
    for iterations in rounds:
        first += LEAD_IN
        calls += range(first, first + iterations)
        first += iterations
    return calls


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Count, extremes, mean, sample variance, stdev and percentiles. values: [n], n > 0.

    Of a single value variance and stdev are 0.
    """
    spread = variance(values) if len(values) > 1 else 0.0
    return {
        "count": len(values),
        "min_s": min(values),
        "max_s": max(values),
        "mean_s": fmean(values),
        "variance_s2": spread,
        "stdev_s": spread**0.5,
        **{f"{name}_s": value for name, value in percentiles(values).items()},
        "p50_ci95_s": bounds(median_interval(values)),
    }


def summaries(workers: Seconds) -> dict[str, dict[str, dict[str, Any]]]:
    """{worker: {metric: its summary}}, and the same over all workers under `all`."""
    pooled: dict[str, list[float]] = {}
    for metrics in workers.values():
        for name, durations in metrics.items():
            pooled.setdefault(name, []).extend(durations)
    return {
        worker: {name: summary(values) for name, values in metrics.items() if values}
        for worker, metrics in {**workers, ALL: pooled}.items()
    }


def phase_table(role: str, workers: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """The summaries of a role as a table: a row per metric and worker, `all` last."""
    names = [name for name in workers if name != ALL][:SHOWN_WORKERS]
    rows = [
        {"metrics": workers[worker][metric], "metric": metric, "worker": worker}
        for metric in workers[ALL]
        for worker in ([*names, ALL] if len(names) > 1 else names)
        if metric in workers[worker]
    ]

    def cell(name: str, scale: float = 1e3, digits: int = 3) -> Any:
        return lambda row: f"{row['metrics'][name] * scale:.{digits}f}"

    columns: Columns = {
        role: lambda row: row["metric"],
        "": lambda row: row["worker"],
        "count": lambda row: str(row["metrics"]["count"]),
        "min\nms": cell("min_s"),
        "max\nms": cell("max_s"),
        "mean\nms": cell("mean_s"),
        "variance\nms^2": cell("variance_s2", 1e6),
        "stdev\nms": cell("stdev_s"),
        **{f"p{q}\nms": cell(f"p{q}_s") for q in PERCENTILES},
    }
    table = render(columns, rows)
    left = len(workers) - 1 - len(names)
    return f"{table}\n# {left} more workers are in the report" if left > 0 else table
