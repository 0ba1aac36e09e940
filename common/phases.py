"""Where the time within a step goes: stamps between its parts."""

from itertools import pairwise
from time import perf_counter
from typing import Any

import torch


class Phases:
    """Stamps at the ends of the parts of a step, read when all is over.

    On the CPU readings of perf_counter; on CUDA events on the current stream, which cost no
    synchronize: a part that waits for the host is as long there as on the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._stamps: list[tuple[str, Any]] = []

    def clear(self) -> None:
        self._stamps = []

    def mark(self, name: str) -> None:
        """What came since the mark before was `name`; "" starts a step and counts nowhere."""
        self._stamps.append((name, self._now()))

    def per_step(self) -> dict[str, float]:
        """Seconds of each part since `clear`, over the number of steps; a mark "" starts each."""
        if self._cuda:
            torch.cuda.synchronize()
        totals: dict[str, float] = {}
        for (_, before), (name, after) in pairwise(self._stamps):
            if name:
                totals[name] = totals.get(name, 0.0) + self._seconds(before, after)
        steps = sum(name == "" for name, _ in self._stamps)
        return {name: seconds / steps for name, seconds in totals.items()}

    def _now(self) -> Any:
        if not self._cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _seconds(self, before: Any, after: Any) -> float:
        seconds: float = before.elapsed_time(after) / 1e3 if self._cuda else after - before
        return seconds
