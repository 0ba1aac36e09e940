"""The timed loop of all scripts: alternating blocks of a step and its parts, and when to stop."""

import argparse
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from common.dist import Group, agree
from common.stats import median_interval, relative_ci95

Step = Callable[[], object]
STEP = "step"  # the name of a case's own step, beside those of its parts

ROUNDS = 12  # that a case's budget is planned for
TURN_ROUNDS = 24  # of a case that takes turns with those of another command
MIN_ROUNDS = 6  # fewer give no 95 % interval of a difference between steps
AHEAD_S = 5e-3  # a full queue, of some 1,000 launches, is that much work for the device at least
LEAD_IN = 1  # untimed iterations that start a block: caches and queues as the step leaves them


@dataclass(frozen=True)
class Workload:
    """What a rank does in a case: a step, and parts of it, timed in alternating blocks."""

    step: Step  # what the case is about: the case ends when its interval is narrow enough
    parts: Mapping[str, Step] = field(default_factory=dict)  # timed in turns with the step
    compared: Sequence[str] = ()  # the parts whose difference from the step shows an interval
    calls: int = 1  # of a step in one sample, for steps shorter than the clock
    facts: Callable[[], Any] = lambda: None  # after the timing, untimed; gathered for `derive`
    # makes, of what the timed calls of the step returned, what `derive` gets as times.returned
    returned: Callable[[list[Any]], Any] | None = None
    aligned: bool = True  # False: ranks do not wait for each other within an iteration
    launches: bool = False  # the host only launches kernels in a step: say where that limits it


@dataclass(frozen=True)
class Measured:
    """A case that has timed itself on this rank, where the timed loop does not fit."""

    samples_s: dict[str, list[float]]  # "step" and its parts, in seconds, [iterations] each
    rounds: list[int]
    stop: str
    facts: Any
    aligned: bool = True


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

    samples_s: dict[str, list[float]]  # of the step and of each part
    rounds: list[int]  # the iterations of each
    stop: str = ""  # the rule that ended it: iters, rounds, target-ci or max-seconds
    # of each step on CUDA, what the host took to launch all samples
    launching_s: dict[str, float] = field(default_factory=dict)
    returned: Any = field(default_factory=list)  # by the step's timed calls, if work wants that
    aligned: bool = True


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
    work: Workload,
    group: Group,
    device: torch.device,
    rule: StopRule,
    progress: Callable[[str], None] = lambda phase: None,
) -> Timing:
    """Time the step and its parts in alternating blocks, until the rule says that it is enough.

    All members of the group call it together. progress is called before each block, never within
    one; it gets the name of the step and the number of the block.
    """
    return TimedLoop(work, group, device, rule, progress).run()


class TimedLoop:
    """Rounds of blocks: a block of the step and of each part, in turns. On each rank of a group."""

    def __init__(
        self,
        work: Workload,
        group: Group,
        device: torch.device,
        rule: StopRule,
        progress: Callable[[str], None],
    ) -> None:
        self.work, self.group, self.device = work, group, device
        self.rule, self.progress = rule, progress
        self.steps: dict[str, Step] = {STEP: work.step, **work.parts}
        if work.returned:
            self.steps[STEP] = self.call_and_keep
        self.kept: list[Any] = []  # what the step has returned since the block began
        self.spent_s = 0.0
        # the slowest rank's, on the group's first rank; elsewhere only the lengths are right
        self.slowest_s: list[float] = []  # of the step, in each iteration
        self.gaps_s: dict[str, list[float]] = {name: [] for name in work.compared}  # step - part

    def run(self) -> Timing:
        round_s = sum(self.warm_up(name) for name in self.steps)
        block = agree(iterations_per_block(round_s, self.rule), self.group)
        timing = Timing({name: [] for name in self.steps}, [], aligned=self.work.aligned)
        gc.collect()
        gc.disable()  # a collection within one rank's block would stop all ranks
        try:
            while not timing.stop:
                self.time_round(timing, block)
                timing.stop = self.judge(timing, block)
                if self.rule.iters:  # the last block may be shorter
                    block = max(1, min(block, self.rule.iters - len(self.slowest_s)))
        finally:
            gc.enable()
        return timing

    def call_and_keep(self) -> None:
        self.kept.append(self.work.step())

    def warm_up(self, name: str) -> float:
        """Seconds of a warm sample. All of a step's warm-up takes a quarter of the budget at most,
        unless the user has said how many iterations it has."""
        limited = not (self.rule.iters or self.rule.full_warmup)
        times: list[float] = []
        start, more = perf_counter(), True
        while more:
            self.progress(f"{name}, warm-up {len(times) + 1}")
            dist.barrier(self.group.control)
            times += time_block(self.steps[name], 1, self.device, self.work.calls)[0]
            over = limited and perf_counter() - start > self.rule.max_seconds / 4
            more = agree(len(times) < self.rule.warmup_iters and not over, self.group)
        warm = times[1:] or times  # the first one may have set up something
        return min(warm) * self.work.calls

    def time_round(self, timing: Timing, block: int) -> None:
        """A block of each step. Every other round goes backwards: a drift hits all steps alike."""
        names = list(self.steps)
        if len(timing.rounds) % 2 == 1:
            names.reverse()
        for name in names:
            self.progress(f"{name}, block {len(timing.rounds) + 1}")
            start = perf_counter()
            dist.barrier(self.group.control)
            for _ in range(LEAD_IN * self.work.calls):
                self.steps[name]()
            self.kept.clear()
            times, launching = time_block(self.steps[name], block, self.device, self.work.calls)
            self.spent_s += perf_counter() - start
            timing.samples_s[name] += times
            timing.launching_s[name] = timing.launching_s.get(name, 0.0) + launching
            timing.returned += self.kept
        timing.rounds.append(block)

    def judge(self, timing: Timing, block: int) -> str:
        """The rule that ends the case, or nothing. The group's first rank decides for all."""
        names = (STEP, *self.work.compared)
        samples_s = [timing.samples_s[name][-block:] for name in names]
        newest = torch.tensor(samples_s, dtype=torch.float64)
        dist.reduce(newest, group_dst=0, op=dist.ReduceOp.MAX, group=self.group.control)
        self.slowest_s += newest[0].tolist()
        step_s, *parts_s = newest.quantile(0.5, dim=1).tolist()
        for name, part_s in zip(self.work.compared, parts_s, strict=True):
            self.gaps_s[name].append(step_s - part_s)
        gaps_s = list(self.gaps_s.values())
        rounds = len(timing.rounds)
        reached = rule_reached(self.slowest_s, rounds, self.spent_s, self.rule, gaps_s)
        return agree(reached, self.group)


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


def iterations_per_block(round_s: float, rule: StopRule) -> int:
    """Iterations a block, so that the planned rounds fill the budget. round_s: one of each step."""
    rounds = rule.rounds or ROUNDS
    round_s = max(round_s, 1e-9)
    longest = max(1, int(rule.longest_block_s / round_s))
    if rule.iters:
        return min(longest, -(-rule.iters // rounds))
    affordable = max(1, min(int(rule.max_seconds / rounds / round_s) - LEAD_IN, 1000))
    return min(longest, affordable)  # --max-seconds comes before --min-iters


def rule_reached(
    slowest: list[float],
    rounds: int,
    spent_s: float,
    rule: StopRule,
    gaps: Sequence[Sequence[float]] = (),
) -> str:
    """The rule that the step has reached; nothing to go on.

    slowest: the samples of the step so far. gaps: its differences from parts, one a round each. The
    case goes on while one of these has no interval, as far as the rule's patience.
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
