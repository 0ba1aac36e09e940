"""The timed loop of all scripts: alternating blocks of the steps to compare, and when to stop."""

import argparse
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from common.dist import Group
from common.stats import median_interval, relative_ci95

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
    full_warmup: bool = False  # all warm-up iterations, however long they take
    patience: float = 2.0  # a case without its intervals goes on, to so many times max_seconds

    @classmethod
    def by_flags(cls, args: argparse.Namespace, turns: bool) -> "StopRule":
        """turns: whether the case takes turns with another command's."""
        asked = args.warmup_iters is not None
        warmup_iters = args.warmup_iters if asked else cls.warmup_iters
        flags = (warmup_iters, args.iters, args.min_iters, args.target_ci, args.max_seconds)
        return cls(*flags, TURN_ROUNDS if turns else None, args.timeout / 4, full_warmup=asked)


@dataclass
class Timing:
    """What one case took on this rank."""

    samples_s: dict[str, list[float]]  # of each step
    launching_s: dict[str, float]  # of each step on CUDA, what the host took to launch all samples
    rounds: list[int]  # the iterations of each
    stop: str  # the rule that ended it: iters, rounds, target-ci or max-seconds


def time_block(
    step: Step, iters: int, device: torch.device, calls: int = 1
) -> tuple[list[float], float]:
    """Time a block of `iters` samples, each of `calls` calls of the step.

    Seconds of a call in each sample, and those that the host took to launch the block, divided by
    `calls` as well; 0 on the CPU, and where the device had work for AHEAD_S more: it never waited.
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
    launched = perf_counter()
    if not cuda:
        return [(b - a) / calls for a, b in pairwise(stamps)], 0.0
    torch.cuda.synchronize(device)
    behind = perf_counter() - launched > AHEAD_S
    # events resolve half a microsecond: what launches nothing may take none
    times = [max(a.elapsed_time(b), 5e-4) / 1e3 / calls for a, b in pairwise(stamps)]
    return times, 0.0 if behind else (launched - start) / calls


def time_steps(
    steps: dict[str, Step],
    group: Group,
    device: torch.device,
    rule: StopRule,
    calls: int = 1,
    progress: Callable[[str], None] = lambda phase: None,
    compared: Sequence[str] = (),
) -> Timing:
    """Time the steps in alternating blocks; the first one's slowest rank decides when to stop.

    Forwards in one round and backwards in the next: a drift of the machine hits all steps alike.
    compared: the steps whose difference from the first one shall have an interval, too.
    The group's members call it together; `progress` is called before each block, never within one.
    """

    def warm_up(name: str) -> float:
        """Seconds of a warm sample. By default slow steps get fewer: a quarter of the budget."""
        times: list[float] = []
        start, more = perf_counter(), True
        while more:
            progress(f"{name}, warm-up {len(times) + 1}")
            dist.barrier(group.control)
            times += time_block(steps[name], 1, device, calls)[0]
            over = perf_counter() - start > rule.max_seconds / 4 and not rule.iters
            over = over and not rule.full_warmup
            more = agree(len(times) < rule.warmup_iters and not over, group)
        return min(times[1:] or times) * calls

    block = agree(block_length(sum(map(warm_up, steps)), rule), group)
    samples: dict[str, list[float]] = {name: [] for name in steps}
    launching_s = dict.fromkeys(steps, 0.0)
    slowest: list[float] = []  # of the first step; on ranks but the first one only its length
    gaps: list[list[float]] = [[] for _ in compared]  # of each round: first step - this one
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
                times, launching = time_block(steps[name], block, device, calls)
                samples[name] += times
                launching_s[name] += launching
                spent += perf_counter() - start
            rounds.append(block)
            judged = (next(iter(steps)), *compared)
            newest = of_slowest_rank([samples[name][-block:] for name in judged], group)
            slowest += newest[0].tolist()
            first, *others = newest.quantile(0.5, dim=1).tolist()
            for gap, other in zip(gaps, others, strict=True):
                gap.append(first - other)
            stop = agree(decide(slowest, len(rounds), spent, rule, gaps), group)
            if rule.iters:
                block = max(1, min(block, rule.iters - len(slowest)))
    finally:
        gc.enable()
    return Timing(samples, launching_s, rounds, stop)


def of_slowest_rank(blocks: list[list[float]], group: Group) -> torch.Tensor:
    """[steps, iterations], each on its slowest rank. For the group's first rank alone."""
    newest = torch.tensor(blocks, dtype=torch.float64)
    dist.reduce(newest, group_dst=0, op=dist.ReduceOp.MAX, group=group.control)
    return newest


def samples_of(timings: Sequence[Timing]) -> dict[str, list[list[float]]]:
    """Of each step [ranks][iterations], to the nanosecond."""
    steps = timings[0].samples_s
    return {name: [[round(s, 9) for s in t.samples_s[name]] for t in timings] for name in steps}


def launch_share(timings: Sequence[Timing]) -> dict[str, float]:
    """How much of the device's time launching took, of each step on the rank with the most."""
    return {
        name: round(max(t.launching_s[name] / sum(t.samples_s[name]) for t in timings), 3)
        for name in timings[0].launching_s
    }


def block_length(round_s: float, rule: StopRule) -> int:
    """Iterations a block, so that the planned rounds fill the budget. round_s: one of each step."""
    rounds = rule.rounds or ROUNDS
    round_s = max(round_s, 1e-9)
    longest = max(1, int(rule.longest_block_s / round_s))
    if rule.iters:
        return min(longest, -(-rule.iters // rounds))
    affordable = max(1, min(int(rule.max_seconds / rounds / round_s) - LEAD_IN, 1000))
    return min(longest, affordable)  # --max-seconds comes before --min-iters


def decide(
    slowest: list[float],
    rounds: int,
    spent_s: float,
    rule: StopRule,
    gaps: Sequence[Sequence[float]] = (),
) -> str:
    """The rule that the first step has reached; nothing to go on.

    slowest: the samples of the first step so far. gaps: its differences from other steps, one a
    round each. The case goes on while one of these has no interval, as far as the rule's patience.
    """
    if rule.iters:
        return "iters" if len(slowest) >= rule.iters else ""
    if rule.rounds:
        return "rounds" if rounds >= rule.rounds else ""
    if rounds < MIN_ROUNDS:
        return ""
    ci = relative_ci95(slowest)
    unsure = ci is None or any(median_interval(differences) is None for differences in gaps)
    if unsure and spent_s < rule.patience * rule.max_seconds:
        return ""
    if len(slowest) >= rule.min_iters and ci is not None and ci <= rule.target_ci:
        return "target-ci"
    return "max-seconds" if spent_s >= rule.max_seconds else ""


def agree(value: Any, group: Group) -> Any:
    """The value of the group's first rank, on all of them. Here an error belongs to the case."""
    box = [value]
    dist.broadcast_object_list(box, group_src=0, group=group.control)
    return box[0]
