"""A slowdown of known size: ddp_sweep whose training step ends in a busy-wait.

What a comparison must be able to find; see `calibrate.py --ab`.
"""

import dataclasses
from collections.abc import Callable
from time import perf_counter
from types import ModuleType
from typing import Any

Step = Callable[[], None]


class BusyWait:
    """Waits at the end of each step, for `share` of what this very step took without.

    So it is the same share at a slow moment of the machine as at a fast one. Ranks that end a step
    together wait alike.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._steps = 0
        self._step_s = 0.0
        self._wait_s = 0.0

    def add_to(self, step: Step) -> Step:
        """The step with the wait at its end."""

        def slowed() -> None:
            start = perf_counter()
            step()
            middle = perf_counter()
            spin(self._share * (middle - start))
            self._steps += 1
            self._step_s += middle - start
            self._wait_s += perf_counter() - middle

        return slowed

    def facts(self) -> dict[str, float]:
        """The means over all steps so far: of the wait, and of the step without it. In seconds."""
        steps = max(1, self._steps)
        return {"busy_wait_s": self._wait_s / steps, "plain_step_s": self._step_s / steps}


def spin(seconds: float) -> None:
    """Keep this core busy for so long."""
    end = perf_counter() + seconds
    while perf_counter() < end:
        pass


def slow_down(ddp_sweep: ModuleType, share: float) -> None:
    """Slow the training step of the module ddp_sweep by `share` of itself, from now on.

    The step without synchronisation waits as well. The reports' metrics say how long, and for how
    long a step, on the mean of rank 0: `busy_wait_s`, `plain_step_s`. For the CPU: a step that
    only queues its work, as on CUDA, ends before it has run.
    """
    create_step, run_case, derive = ddp_sweep.create_step, ddp_sweep.run_case, ddp_sweep.derive

    def slowed_case(config: Any, args: Any, sweep: Any, group: Any) -> Any:
        wait = BusyWait(share)
        ddp_sweep.create_step = lambda *a: wait.add_to(create_step(*a))  # type: ignore[attr-defined]
        outcome = run_case(config, args, sweep, group)
        return dataclasses.replace(outcome, facts=outcome.facts | wait.facts())

    def slowed_derive(config: Any, args: Any, sweep: Any, measured: Any, facts: list[Any]) -> Any:
        metrics, check = derive(config, args, sweep, measured, facts)
        return metrics | {name: facts[0][name] for name in ("busy_wait_s", "plain_step_s")}, check

    ddp_sweep.run_case = slowed_case  # type: ignore[attr-defined]
    ddp_sweep.derive = slowed_derive  # type: ignore[attr-defined]
