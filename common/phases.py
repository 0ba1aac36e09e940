"""Where the time within a step goes: stamps between its parts."""

from collections.abc import Collection
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

    def per_step(self, counted: Collection[int]) -> dict[str, float]:
        """Mean seconds of each part over some of the steps since `clear`; a mark "" starts each.

        counted: which of them, counted from 0.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        totals: dict[str, float] = {}
        wanted, step = set(counted), 0
        for (_, before), (name, after) in pairwise(self._stamps):
            if not name:
                step += 1
            elif step in wanted:
                totals[name] = totals.get(name, 0.0) + seconds(before, after)
        return {name: total / len(wanted) for name, total in totals.items()}
