"""A slowdown of known size: ddp_sweep whose training step ends in a busy-wait.

What a comparison must be able to find; see `calibrate.py --ab`.
"""

import dataclasses
from collections.abc import Callable
from time import perf_counter
from types import ModuleType
from typing import Any

import numpy as np
import torch.distributed as dist

from common.comm_hooks import SETTLING_STEPS
from common.dist import broadcast_int

TIMED_STEPS = 10

Step = Callable[[], None]


class BusyWait:
    """Waits at the end of a step, for `share` of what the step takes without.

    That is measured once, in the last of the case's settling steps, which nobody times; by the
    group's first rank, for all, so that every rank waits alike.
    """

    def __init__(self, share: float, group: dist.ProcessGroup) -> None:
        self._share = share
        self._group = group
        self._calls = 0
        self.seconds = 0.0
        self.plain_step_s = 0.0

    def add_to(self, step: Step) -> Step:
        """The step with the wait at its end. The first one given is the one that is measured."""
        measured = self._calls == 0 and self.seconds == 0.0

        def slowed() -> None:
            if self.seconds == 0.0 and measured:
                self._calls += 1
                if self._calls == SETTLING_STEPS:
                    self._measure(step)
            step()
            spin(self.seconds)

        return slowed

    def _measure(self, step: Step) -> None:
        times = []
        for _ in range(TIMED_STEPS):
            start = perf_counter()
            step()
            times.append(perf_counter() - start)
        median_ns = broadcast_int(round(float(np.median(times)) * 1e9), self._group)
        self.plain_step_s = median_ns / 1e9
        self.seconds = self._share * self.plain_step_s


def spin(seconds: float) -> None:
    """Keep this core busy for so long."""
    end = perf_counter() + seconds
    while perf_counter() < end:
        pass


def slow_down(ddp_sweep: ModuleType, share: float) -> None:
    """Slow the training step of the module ddp_sweep by `share` of itself, from now on.

    The step without synchronisation waits as long. The reports' metrics say how long, and for
    which step: `busy_wait_s`, `plain_step_s`.
    """
    create_step, run_case, derive = ddp_sweep.create_step, ddp_sweep.run_case, ddp_sweep.derive

    def slowed_case(config: Any, args: Any, sweep: Any, group: Any) -> Any:
        wait = BusyWait(share, group.control)
        ddp_sweep.create_step = lambda *a: wait.add_to(create_step(*a))  # type: ignore[attr-defined]
        outcome = run_case(config, args, sweep, group)
        facts = {"busy_wait_s": wait.seconds, "plain_step_s": wait.plain_step_s}
        return dataclasses.replace(outcome, facts=outcome.facts | facts)

    def slowed_derive(config: Any, args: Any, sweep: Any, measured: Any, facts: list[Any]) -> Any:
        metrics, check = derive(config, args, sweep, measured, facts)
        return metrics | {name: facts[0][name] for name in ("busy_wait_s", "plain_step_s")}, check

    ddp_sweep.run_case = slowed_case  # type: ignore[attr-defined]
    ddp_sweep.derive = slowed_derive  # type: ignore[attr-defined]
