"""Where the time within a step goes: stamps between its phases, durations by phase and worker."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from time import perf_counter
from typing import Any

import numpy as np
import torch

from common.table import layout

Stamps = list[tuple[str, Any, Any]]  # of a step: name, start and end of each phase
Durations = dict[str, list[float]]  # of a step: the seconds of each phase
TIMES = ("min", "max", "mean", "stdev", "p50", "p75", "p90", "p95")


class Phases:
    """Stamps within this worker's steps: perf_counter's, on CUDA events, which nobody waits for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.step: Stamps = []  # the current one
        self.count = 0  # of steps so far

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
        """What came since the mark before was `name`. A step may have several of one name."""
        before, self.last = self.last, self.now()
        self.add(name, before, self.last)

    def add(self, name: str, start: Any, end: Any) -> None:
        """A phase of the current step that overlaps with others; from any thread."""
        self.step.append((name, start, end))

    def durations(self, steps: Sequence[Stamps]) -> list[Durations]:
        """The seconds of each phase, step by step. steps: what `step` was at the end of each."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return [pool({name: [seconds(a, b)]} for name, a, b in step) for step in steps]


def seconds(start: Any, end: Any) -> float:
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3


def pool(parts: Iterable[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """The durations of several steps or workers as those of one."""
    found: dict[str, list[float]] = defaultdict(list)
    for part in parts:
        for name, times in part.items():
            found[name] += times
    return dict(found)


def summary(durations: Sequence[float]) -> dict[str, Any]:
    """Of durations [n], n > 0. Of a single one the sample variance is 0."""
    x = np.asarray(durations)
    spread = float(x.var(ddof=1)) if len(x) > 1 else 0.0
    times = (x.min(), x.max(), x.mean(), spread**0.5, *np.percentile(x, (50, 75, 90, 95)))
    found = {f"{name}_s": float(value) for name, value in zip(TIMES, times, strict=True)}
    return {"count": len(x), **found, "variance_s2": spread}


def summaries(workers: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, dict[str, Any]]:
    """{worker: {phase: its summary}}, and the same over all workers under `all`."""
    everyone = {**workers, "all": pool(workers.values())}
    return {name: {phase: summary(x) for phase, x in w.items()} for name, w in everyone.items()}


def phase_table(role: str, workers: Mapping[str, Mapping[str, Any]]) -> str:
    """The summaries of a role: a row for each phase and worker, the first 8, and `all` last."""
    names = list(workers)[:-1][:8] + ["all"] * (len(workers) > 2)
    rows = []
    for phase, name in product(workers["all"], names):
        if own := workers[name].get(phase):
            numbers = [own[f"{t}_s"] * 1e3 for t in TIMES] + [own["variance_s2"] * 1e6]
            rows.append([phase, name, str(own["count"]), *(f"{x:.3f}" for x in numbers)])
    return layout([role, "", "count", *(f"{t}\nms" for t in TIMES), "variance\nms^2"], rows)
