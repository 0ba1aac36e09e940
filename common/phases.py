"""Where the time within a step goes: stamps between its parts."""

from itertools import pairwise
from typing import Any

import torch

from common.durations import seconds, stamp


class Phases:
    """Stamps at the ends of the parts of a step, read when all is over.

    On the CPU readings of perf_counter; on CUDA events on the current stream, which cost no
    synchronize: a part that waits for the host is as long there as on the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stamps: list[tuple[str, Any]] = []

    def clear(self) -> None:
        self._stamps = []

    def mark(self, name: str) -> None:
        """What came since the mark before was `name`; "" starts a step and counts nowhere."""
        self._stamps.append((name, stamp(self._device)))

    def per_step(self) -> dict[str, float]:
        """Seconds of each part since `clear`, over the number of steps; a mark "" starts each."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        totals: dict[str, float] = {}
        for (_, before), (name, after) in pairwise(self._stamps):
            if name:
                totals[name] = totals.get(name, 0.0) + seconds(before, after)
        steps = sum(name == "" for name, _ in self._stamps)
        return {name: total / steps for name, total in totals.items()}
