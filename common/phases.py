"""Where the time within a step goes: stamps between its phases, durations by phase and worker."""

from collections.abc import Mapping, Sequence
from itertools import chain
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
import torch

from common.table import layout
from common.timing import LEAD_IN

T = TypeVar("T")
Durations = Mapping[str, Sequence[float]]  # of each phase, in seconds
SHOWN_WORKERS = 8  # in a table; the report has all of them
QUANTILES = (50, 75, 90, 95)
TIMES = ("min", "max", "mean", "stdev", *(f"p{q}" for q in QUANTILES))
COLUMNS = {  # of a table of summaries: header -> field, its unit, digits
    "count": ("count", 1, 0),
    **{f"{name}\nms": (f"{name}_s", 1e3, 3) for name in TIMES},
    "variance\nms^2": ("variance_s2", 1e6, 3),
}


class Phases:
    """Stamps within the steps of this worker, read when all is over.

    Readings of perf_counter, on CUDA events on the current stream, which nobody waits for.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.steps: list[list[tuple[str, Any, Any]]] = []
        self.last: Any = None

    def now(self) -> Any:
        if self.device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def begin(self) -> Any:
        """A new step; its first stamp."""
        self.steps.append([])
        self.last = self.now()
        return self.last

    def mark(self, name: str) -> None:
        """What came since the mark before was `name`. A step may have several of one name."""
        before, self.last = self.last, self.now()
        self.add(name, before, self.last)

    def add(self, name: str, start: Any, end: Any) -> None:
        """A phase of the current step that overlaps with others; from any thread."""
        self.steps[-1].append((name, start, end))

    def durations(self) -> list[dict[str, list[float]]]:
        """The seconds of each phase, step by step."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        found: list[dict[str, list[float]]] = [{} for _ in self.steps]
        for step, phases in zip(self.steps, found, strict=True):
            for name, start, end in step:
                cpu = isinstance(start, float)
                seconds = end - start if cpu else start.elapsed_time(end) / 1e3
                phases.setdefault(name, []).append(seconds)
        return found


def timed(steps: Sequence[T], rounds: Sequence[int]) -> list[T]:
    """Of all steps that a worker took for a case, those that count. rounds: those of the Case.

    Checks and warm-up come first and LEAD_IN steps start a round, so it counts from the end. For a
    workload of one step and one call a sample.
    """
    at = len(steps) - sum(rounds) - LEAD_IN * len(rounds)
    kept: list[T] = []
    for count in rounds:
        at += LEAD_IN + count
        kept += steps[at - count : at]
    return kept


def pool(parts: Sequence[Durations]) -> dict[str, list[float]]:
    """The durations of several steps or workers as those of one."""
    names = dict.fromkeys(chain(*parts))
    return {name: [x for part in parts for x in part.get(name, ())] for name in names}


def summary(seconds: Sequence[float]) -> dict[str, Any]:
    """Of durations [n], n > 0. Of a single one the sample variance is 0."""
    x = np.asarray(seconds)
    spread = x.var(ddof=1) if len(x) > 1 else 0.0
    found = {"min_s": x.min(), "max_s": x.max(), "mean_s": x.mean(), "stdev_s": spread**0.5}
    found |= {"variance_s2": spread} | {f"p{q}_s": np.percentile(x, q) for q in QUANTILES}
    return {"count": len(x), **{name: float(value) for name, value in found.items()}}


def summaries(workers: Mapping[str, Durations]) -> dict[str, dict[str, dict[str, Any]]]:
    """{worker: {phase: its summary}}, and the same over all workers under `all`."""
    everyone = {**workers, "all": pool(list(workers.values()))}
    return {
        worker: {name: summary(values) for name, values in phases.items() if values}
        for worker, phases in everyone.items()
    }


def phase_table(role: str, workers: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """The summaries of a role: a row for each phase and worker, `all` last."""
    names = [*list(workers)[:-1][:SHOWN_WORKERS], *(["all"] if len(workers) > 2 else [])]
    rows = [
        [phase, name, *(f"{found[field] * unit:.{n}f}" for field, unit, n in COLUMNS.values())]
        for phase in workers["all"]
        for name in names
        if (found := workers[name].get(phase))
    ]
    left = len(workers) - 1 - SHOWN_WORKERS
    more = f"\n# {left} more workers are in the report" if left > 0 else ""
    return layout([role, "", *COLUMNS], rows) + more
