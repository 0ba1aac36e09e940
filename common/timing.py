"""The timed loop of all scripts: alternating blocks of the steps to compare, and when to stop."""

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from common.dist import Group
from common.stats import relative_ci95
from common.table import LAUNCH_BOUND

Step = Callable[[], object]

ROUNDS = 12  # that a case's budget is planned for
TURN_ROUNDS = 24  # of a case that takes turns with those of another command
MIN_ROUNDS = 6  # fewer give no 95 % interval of a difference between steps
AHEAD_S = 5e-3  # a full queue, of some 1,000 launches, is that much work for the device at least
LEAD_IN = 1  # untimed iterations that start a block: caches and queues as the step leaves them


@dataclass(frozen=True)
class StopRule:
    """When a case has been timed for long enough; see the flags of common/cli.py."""

    warmup_iters: int = 5
    iters: int | None = None
    min_iters: int = 20
    target_ci: float = 0.02
    max_seconds: float = 5.0
    rounds: int | None = None  # if given, exactly so many
    longest_block_s: float = 75.0  # a block is one phase to the watchdog


@dataclass
class Timing:
    """What one case took."""

    samples_s: dict[str, NDArray[np.float64]]  # [ranks, iterations], on the group's first rank
    rounds: list[int]
    stop: str
    # on CUDA `launch_share`: of each step, how much of the device's time the host took to launch it
    metrics: dict[str, Any] = field(default_factory=dict)


def time_block(
    step: Step, iters: int, device: torch.device, calls: int = 1
) -> tuple[list[float], float]:
    """Seconds of each of `iters` samples of `calls` calls, and of the host until all were launched.

    On CUDA a sample is the time between two events on the current stream, with one synchronize at
    the end, so that launches stay asynchronous.
    """
    cuda = device.type == "cuda"

    def stamp() -> Any:
        if not cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    start = perf_counter()
    stamps = [stamp()]
    for _ in range(iters):
        for _ in range(calls):
            step()
        stamps.append(stamp())
    host_s = perf_counter() - start
    if cuda:
        torch.cuda.synchronize(device)
        # events resolve half a microsecond: what launches nothing may take none
        times = [max(a.elapsed_time(b), 5e-4) / 1e3 / calls for a, b in pairwise(stamps)]
        if perf_counter() - start - host_s > AHEAD_S:
            # so far ahead it may have waited for room in the queue, and held nothing up
            host_s = min(host_s, LAUNCH_BOUND * sum(times) * calls)
        return times, host_s
    return [(b - a) / calls for a, b in pairwise(stamps)], host_s


def time_steps(
    steps: dict[str, Step],
    group: Group,
    device: torch.device,
    rule: StopRule,
    calls: int = 1,
    progress: Callable[[str], None] = lambda phase: None,
) -> Timing:
    """Time the steps in alternating blocks; the first one's slowest rank decides when to stop.

    Forwards in one round and backwards in the next: a drift of the machine hits all steps alike.
    The group's members call it together; `progress` is called before each block, never within one.
    """

    def warm_up(name: str) -> float:
        """Seconds of a warm sample. Slow steps get fewer iterations: a quarter of the budget."""
        times: list[float] = []
        start, more = perf_counter(), 1
        while more:
            progress(f"{name}, warm-up {len(times) + 1}")
            dist.barrier(group.control)
            times += time_block(steps[name], 1, device, calls)[0]
            over = perf_counter() - start > rule.max_seconds / 4 and not rule.iters
            more = agree(int(len(times) < rule.warmup_iters and not over), group)
        return min(times[1:] or times) * calls

    block = agree(block_length(sum(map(warm_up, steps)), rule), group)
    samples: dict[str, list[float]] = {name: [] for name in steps}
    host_s = dict.fromkeys(steps, 0.0)
    slowest: list[float] = []  # of the first step
    rounds: list[int] = []
    spent, stop = 0.0, ""
    gc.collect()
    gc.disable()  # a collection within one rank's block would stop all ranks
    try:
        while not stop:
            for name in list(steps)[:: 1 if len(rounds) % 2 == 0 else -1]:
                progress(f"{name}, block {len(rounds) + 1}")
                start = perf_counter()
                dist.barrier(group.control)
                for _ in range(LEAD_IN * calls):
                    steps[name]()
                times, host = time_block(steps[name], block, device, calls)
                samples[name] += times
                host_s[name] += host
                spent += perf_counter() - start
            rounds.append(block)
            newest = torch.tensor(samples[next(iter(steps))][-block:], dtype=torch.float64)
            dist.reduce(newest, group_dst=0, op=dist.ReduceOp.MAX, group=group.control)
            slowest += newest.tolist()
            stop = STOPS[agree(decide(slowest, len(rounds), spent, rule), group)]
            if rule.iters:
                block = max(1, min(block, rule.iters - len(slowest)))
    finally:
        gc.enable()
    progress("gather")
    mine = torch.tensor([[*samples[n], host_s[n]] for n in steps], dtype=torch.float64)
    first = dist.get_rank(group.control) == 0
    rows = [torch.empty_like(mine) for _ in group.ranks] if first else None
    dist.gather(mine, rows, group_dst=0, group=group.control)
    if rows is None:
        return Timing({}, rounds, stop)
    table = torch.stack(rows).numpy()  # [ranks, steps, iterations + 1]
    times_s = {name: table[:, i, :-1] for i, name in enumerate(steps)}
    metrics = {}
    if device.type == "cuda":
        device_s = table[:, :, :-1].sum(axis=2) * calls
        ratios = (table[:, :, -1] / np.maximum(device_s, 1e-9)).max(axis=0)
        shares = {name: round(float(ratios[i]), 3) for i, name in enumerate(steps)}
        metrics["launch_share"] = shares
    return Timing(times_s, rounds, stop, metrics)


STOPS = ("", "iters", "rounds", "target-ci", "max-seconds")


def block_length(round_s: float, rule: StopRule) -> int:
    """Iterations a block, so that the planned rounds fill the budget. round_s: one of each step."""
    rounds = rule.rounds or ROUNDS
    round_s = max(round_s, 1e-9)
    longest = max(1, int(rule.longest_block_s / round_s))
    if rule.iters:
        return min(longest, -(-rule.iters // rounds))
    affordable = max(1, min(int(rule.max_seconds / rounds / round_s - LEAD_IN), 1000))
    if affordable == 1:  # --max-seconds comes before --min-iters
        return 1
    return min(longest, max(-(-rule.min_iters // rounds), affordable))


def decide(slowest: list[float], rounds: int, spent_s: float, rule: StopRule) -> int:
    """0 to go on, else the index in STOPS of the rule that the first step has reached."""
    if rule.iters:
        return 1 if len(slowest) >= rule.iters else 0
    if rule.rounds:
        return 2 if rounds >= rule.rounds else 0
    if rounds < MIN_ROUNDS:
        return 0
    ci = relative_ci95(slowest)
    if len(slowest) >= rule.min_iters and ci is not None and ci <= rule.target_ci:
        return 3
    return 4 if spent_s >= rule.max_seconds else 0


def agree(value: int, group: Group) -> int:
    """The value of the group's first rank, on all of them."""
    tensor = torch.tensor([value])
    dist.broadcast(tensor, group_src=0, group=group.control)
    return int(tensor)
