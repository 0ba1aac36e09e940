"""The timed loop: warm-up, interleaved blocks, and the rule that ends them.

A case is timed in rounds. A round has one block of each step to be compared (say: the training
step, the same without communication, the communication alone), forwards in one round and
backwards in the next, so that a drift of the machine hits all of them alike.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from common.dist import CaseGroup, broadcast_int, gather_rows, reduce_max
from common.stats import relative_ci95

ROUNDS = 12  # planned within the budget, if the rule has no other number
MIN_ROUNDS = 6  # fewer give no 95 % interval of the differences between the steps
LEAD_IN = 1  # untimed iterations that start a block: caches and queues as the step leaves them

Step = Callable[[], object]


@dataclass(frozen=True)
class StopRule:
    """When a case has been timed for long enough."""

    warmup_iters: int
    iters: int | None  # exactly so many; the other three are then unused
    min_iters: int
    target_ci: float  # half the 95 % interval of the median over the median
    max_seconds: float
    max_block_s: float = 75.0  # longer blocks are cut, so that the watchdog sees progress
    rounds: int = ROUNDS  # planned within the budget, or for `iters`


@dataclass(frozen=True)
class Measurement:
    """What a group measured, in seconds. Samples and stop are empty but on its first rank."""

    samples: dict[str, NDArray[np.float64]]  # per step: [ranks, iterations]
    own: dict[str, list[float]]  # per step: this rank's iterations
    rounds: list[int]  # iterations of each round, alike for all steps and ranks
    warmup: dict[str, list[float]]  # per step: this rank's iterations before the timed ones
    stop: dict[str, Any]  # rule, iterations, ci95_rel


def time_block(step: Step, iters: int, device: torch.device) -> list[float]:
    """Seconds of each of `iters` successive calls of `step`.

    On CUDA: the time between events on the current stream, with one synchronize at the end, so
    that launches stay as asynchronous as in training. On the CPU: perf_counter.
    """
    if device.type == "cuda":
        events = [torch.cuda.Event(enable_timing=True) for _ in range(iters + 1)]  # type: ignore[no-untyped-call]
        events[0].record()
        for event in events[1:]:
            step()
            event.record()
        torch.cuda.synchronize(device)
        return [a.elapsed_time(b) / 1e3 for a, b in pairwise(events)]
    stamps = [perf_counter()]
    for _ in range(iters):
        step()
        stamps.append(perf_counter())
    return [b - a for a, b in pairwise(stamps)]


def measure(
    steps: dict[str, Step],
    group: CaseGroup,
    device: torch.device,
    rule: StopRule,
    progress: Callable[[str], None] = lambda phase: None,
) -> Measurement:
    """Time the steps in interleaved blocks; the first of them decides when to stop.

    Its time per iteration is the maximum over the group's ranks. The group's first rank decides
    after every round and tells the others, so that all ranks run the same count. `progress` is
    called between blocks, never within one.
    """
    warmup = {
        name: _warm_up(name, step, rule.warmup_iters, group, device, progress)
        for name, step in steps.items()
    }
    seconds_a_round = sum(min(times[1:] or times) for times in warmup.values())
    block = broadcast_int(_block_length(seconds_a_round, rule), group.control)
    samples: dict[str, list[float]] = {name: [] for name in steps}
    slowest: list[float] = []  # of the first step: the maximum over ranks
    rounds: list[int] = []
    primary = next(iter(steps))
    stop: dict[str, Any] = {}
    spent = 0.0  # not in `progress`, which may wait for other commands
    with without_garbage_collection():
        while block:
            order = list(steps) if len(rounds) % 2 == 0 else list(reversed(steps))
            for name in order:
                progress(f"{name}, block {len(rounds) + 1}")
                begin = perf_counter()
                dist.barrier(group.control)
                for _ in range(LEAD_IN):
                    steps[name]()
                samples[name] += time_block(steps[name], block, device)
                spent += perf_counter() - begin
            rounds.append(block)
            newest = torch.tensor(samples[primary][-block:], dtype=torch.float64)
            slowest += reduce_max(newest, group.control).tolist()
            stop = _decide(slowest, len(rounds), spent, rule)
            left = rule.iters - len(slowest) if rule.iters else block
            block = broadcast_int(0 if stop["rule"] else min(block, left), group.control)
    progress("gather")
    rows = gather_rows(torch.tensor(list(samples.values()), dtype=torch.float64), group.control)
    if rows is None:
        return Measurement({}, samples, rounds, warmup, {})
    gathered = {name: rows[:, i].numpy() for i, name in enumerate(samples)}
    return Measurement(gathered, samples, rounds, warmup, stop)


def _warm_up(
    name: str,
    step: Step,
    iters: int,
    group: CaseGroup,
    device: torch.device,
    progress: Callable[[str], None],
) -> list[float]:
    times = []
    for i in range(iters):
        progress(f"{name}, warm-up {i + 1}")
        dist.barrier(group.control)  # `progress` may wait on one rank for all
        times += time_block(step, 1, device)
    return times


def _block_length(seconds_a_round: float, rule: StopRule) -> int:
    """Iterations a block, so that the planned rounds fill the budget and reach the minimum."""
    longest = max(1, int(rule.max_block_s / max(seconds_a_round, 1e-9)))
    if rule.iters:
        return min(longest, -(-rule.iters // rule.rounds))
    affordable = rule.max_seconds / rule.rounds / max(seconds_a_round, 1e-9) - LEAD_IN
    return min(longest, max(-(-rule.min_iters // rule.rounds), min(int(affordable), 1000)))


def _decide(slowest: list[float], rounds: int, elapsed: float, rule: StopRule) -> dict[str, Any]:
    ci = relative_ci95(slowest)
    reached = ""
    if rule.iters:
        reached = "iters" if len(slowest) >= rule.iters else ""
    elif len(slowest) >= rule.min_iters and rounds >= MIN_ROUNDS:
        if ci is not None and ci <= rule.target_ci:
            reached = "target-ci"
        elif elapsed >= rule.max_seconds:
            reached = "max-seconds"
    return {"rule": reached, "iterations": len(slowest), "ci95_rel": ci}


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """A collection inside one rank's timed block would stop all ranks."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
