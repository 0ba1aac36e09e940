"""The timed loop of all scripts: alternating blocks of a step and its parts, and the stop rule.

A sample is the time of one call of the step or of a part, or the mean of several consecutive calls.
A block consists of consecutive samples. A round consists of a block of the step and one of each
part.
"""

import gc
import math
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from common.groups import Group
from common.stats import MIN_ROUNDS, Times, iteration_times, median, same_distribution

Step = Callable[[], object]
STEP = "step"  # the name of the step that a case measures; parts have names of their own

ROUNDS = 12  # default number of rounds for which the time budget of a case is planned
MIN_SAMPLES = 6  # fewer give no 95% interval of a median
LARGEST_BLOCK = 1000  # limit on the iterations of a block, and of a warm-up window
SLOW_BLOCK = 3  # iterations of a block if MIN_ROUNDS do not fit into the budget
HOST_AHEAD_S = 5e-3  # a full launch queue (about 1,000 kernels) keeps the device busy for this long
EARLY_BLOCK = 25  # minimum iterations of an early block: see StopRule.early
# Untimed iterations at the start of a block: caches and queues as the step leaves them. One of
# these numbers is drawn for each block: with a constant one, blocks of 1 or 3 iterations would
# always or never contain what recurs in every second or fourth call.
LEAD_INS = (1, 2)
LEAD_IN = sum(LEAD_INS) / len(LEAD_INS)  # the mean


@dataclass
class Collected:
    """The samples of a case on this rank, to which each loop over its workload adds."""

    # seconds of each step that this rank takes part in
    samples_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    launching_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    rounds: list[int] = field(default_factory=list)  # iterations of each round
    # Times of the step, [rows][iterations], for the stop rule. Valid on the group's first rank.
    step_s: list[list[float]] = field(default_factory=list)


@dataclass(frozen=True)
class Workload:
    """The work of a rank in a case: a step and parts of it, timed in alternating blocks."""

    step: Step  # the case ends when the interval of the step's median is narrow enough
    # Timed alternately with the step. None on a rank that waits meanwhile, which is not permitted
    # for compared parts.
    parts: Mapping[str, Step | None] = field(default_factory=dict)
    compared: Sequence[str] = ()  # parts whose difference from the step is shown with an interval
    calls_per_sample: int = 1  # of the step; more than one if it is too short to be timed alone
    facts: Callable[[], Any] = lambda: None  # called after timing; `derive` gets those of all ranks
    # Reduces the list of values that the timed calls of the step returned. The result is this
    # rank's entry of times.returned in `derive`.
    returned: Callable[[list[Any]], Any] | None = None
    aligned: bool = True  # False: ranks do not wait for each other within an iteration
    launches: bool = False  # True: a step only launches kernels, and may be launch-bound
    # Steps that --profile runs instead of the step and its parts.
    profiled: Mapping[str, Step] = field(default_factory=dict)
    timed: Times | None = None  # the times of a case that times itself, without the loop
    # Given by a script that measures a case again, so that its earlier samples count as well
    collected: Collected = field(default_factory=Collected)


@dataclass(frozen=True)
class StopRule:
    """Decides when a case has been timed for long enough."""

    warmup_iters: int = 5
    iters: int | None = None
    min_iters: int = 20
    target_ci: float = 0.02
    max_seconds: float = 5.0
    rounds: int | None = None  # a fixed number of rounds, unless iters is given
    planned_rounds: int = ROUNDS  # number of rounds that fill max_seconds
    # nothing is heard of a rank within a block, so a long one could look like a hang
    longest_block_s: float = 75.0
    full_warmup: bool = False  # True: run all warm-up iterations, however long they take
    # Size of the first MIN_ROUNDS blocks as a fraction of the others, so that a narrow interval is
    # noticed early. Fewer than EARLY_BLOCK samples would show too little of their autocorrelation.
    early: float = 1.0
    patience: float = 1.25  # limit of a case that lacks an interval, as a multiple of max_seconds


def time_block(
    step: Step, iters: int, device: torch.device, calls_per_sample: int = 1
) -> tuple[list[float], float]:
    """Time a block of `iters` samples of `calls_per_sample` calls. On CUDA a sample is the time
    between two events, and the block is synchronized once at its end: launches stay asynchronous.

    Returns the seconds per call of each sample, and the host's seconds to launch the block, also
    divided by `calls_per_sample`: 0 on the CPU, and if the host was ahead, because at least
    HOST_AHEAD_S of work was queued at the end, so that the device never waited.
    """
    cuda = device.type == "cuda"

    def stamp() -> Any:
        if not cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    stamps = [stamp()]
    start = perf_counter()
    for _ in range(iters):
        for _ in range(calls_per_sample):
            step()
        stamps.append(stamp())
    launched = perf_counter()
    if not cuda:
        return [(b - a) / calls_per_sample for a, b in pairwise(stamps)], 0.0
    torch.cuda.synchronize(device)
    host_ahead = perf_counter() - launched > HOST_AHEAD_S
    # Events have a resolution of 0.5 us: a step that launches nothing may appear to take no time.
    times = [max(a.elapsed_time(b), 5e-4) / 1e3 / calls_per_sample for a, b in pairwise(stamps)]
    return times, 0.0 if host_ahead else (launched - start) / calls_per_sample


def new_seed() -> int:
    """Return another number in each case and run, whatever seeds the model sets."""
    return random.SystemRandom().getrandbits(32)


class TimedLoop:
    """The rounds of a case on this rank. before_block: called before each block, never within one,
    with the name of the step and the number of the block."""

    def __init__(
        self,
        workload: Workload,
        group: Group,
        device: torch.device,
        rule: StopRule,
        before_block: Callable[[str], None] = lambda phase: None,
    ) -> None:
        self.workload, self.group, self.device = workload, group, device
        self.rule, self.before_block = rule, before_block
        self.steps: dict[str, Step | None] = {STEP: workload.step, **workload.parts}
        if workload.returned:
            self.steps[STEP] = lambda: self.returned.append(workload.step())
        self.returned: list[Any] = []  # values of the step since the block began
        self.lead_ins: Sequence[int] = LEAD_INS
        self.random = random.Random()  # run() seeds it: the same numbers on all ranks
        self.collected = workload.collected
        self.samples_s, self.rounds = self.collected.samples_s, self.collected.rounds
        self.launching_s = self.collected.launching_s
        self.values: list[Any] = []  # that the timed calls of the step returned

    def run(self) -> Times:
        """Warm up, and time rounds until the stop rule is reached. All members of the group call
        it. Raises whatever a step raises."""
        if self.rounds:  # an earlier loop has warmed up; each block has its lead-in
            calls = self.workload.calls_per_sample
            round_s = sum(fmean(samples_s) * calls for samples_s in self.samples_s.values())
        else:
            round_s = sum([self.warm_up(name) for name in self.steps])
        differences = bool(self.workload.compared)
        block = iterations_per_block(round_s, self.rule, differences)
        # with two untimed iterations, a block of a slow step could look like a hang
        lead_ins = LEAD_INS if round_s <= self.rule.longest_block_s else LEAD_INS[:1]
        block, self.lead_ins, seed = self.group.broadcast((block, lead_ins, new_seed()))
        self.random.seed(seed)
        stop = ""
        gc.collect()
        collects = gc.isenabled()  # a model may have disabled it
        gc.disable()  # a collection on one rank would delay all ranks
        start = perf_counter()
        try:
            while not stop:
                length = int(block * self.rule.early)
                if len(self.rounds) >= MIN_ROUNDS or length < EARLY_BLOCK:
                    length = block
                self.time_round(length)
                stop = self.check_stop_rule(length, perf_counter() - start)
                if self.rule.iters:  # the last block may be shorter
                    block = max(1, min(block, self.rule.iters - len(self.samples_s[STEP])))
        finally:
            if collects:
                gc.enable()
        returned = self.workload.returned(self.values) if self.workload.returned else None
        # with gloo the host waits for the device in each step
        waits = self.device.type != "cuda" or dist.get_backend(self.group.workload) == "gloo"
        launching_s = {} if waits or not self.workload.launches else self.launching_s
        aligned = self.workload.aligned
        return Times.of_rank(self.samples_s, self.rounds, stop, launching_s, returned, aligned)

    def warm_up(self, name: str) -> float:
        """Warm up a step. Returns the seconds of a warm sample on the slowest rank; valid on the
        group's first rank."""
        windows: list[list[float]] = []
        start, size = perf_counter(), 1
        while size:
            self.before_block(f"{name}, warm-up {len(windows) + 1}")
            dist.barrier(self.group.control)
            step, times = self.steps[name], [0.0] * size
            if step:
                times, _ = time_block(step, size, self.device, self.workload.calls_per_sample)
            slowest = self.slowest_rank(times)
            windows.append([second * self.workload.calls_per_sample for second in slowest])
            spent_s = perf_counter() - start
            size = self.group.broadcast(next_window(windows, spent_s, len(self.steps), self.rule))
        return fmean(windows[-1])

    def slowest_rank(self, samples_s: list[float]) -> list[float]:
        """Return the maximum over ranks of each sample; valid on the group's first rank."""
        largest = torch.tensor(samples_s, dtype=torch.float64)
        dist.reduce(largest, group_dst=0, op=dist.ReduceOp.MAX, group=self.group.control)
        return list(largest.tolist())

    def each_rank(self, samples_s: list[float]) -> list[list[float]]:
        """Return the samples of each rank on the group's first rank, and its own on any other."""
        mine = torch.tensor(samples_s, dtype=torch.float64)
        is_first = dist.get_rank(self.group.control) == 0
        rows = [torch.empty_like(mine) for _ in self.group.ranks] if is_first else None
        dist.gather(mine, rows, group_dst=0, group=self.group.control)
        return [list(row.tolist()) for row in rows or [mine]]

    def time_round(self, block: int) -> None:
        """Time a block of each step, `block` samples after its lead-in. Every other round runs in
        reverse order, so that a drift of the machine slows all steps alike."""
        names, calls = list(self.steps), self.workload.calls_per_sample
        if len(self.rounds) % 2 == 1:
            names.reverse()
        for name in names:
            self.before_block(f"{name}, block {len(self.rounds) + 1}")
            dist.barrier(self.group.control)
            step, lead_in = self.steps[name], self.random.choice(self.lead_ins)
            if not step:  # this rank sleeps in the next barrier
                continue
            for _ in range(lead_in * calls):
                step()
            self.returned.clear()
            samples_s, launching_s = time_block(step, block, self.device, calls)
            self.samples_s[name] += samples_s
            self.launching_s[name] += launching_s
            self.values += self.returned
        self.rounds.append(block)

    def check_stop_rule(self, block: int, spent_s: float) -> str:
        """Return the rule that ends the case, or "". The group's first rank decides for all, by the
        `iteration_times` that are reported later."""
        newest, aligned = self.samples_s[STEP][-block:], self.workload.aligned
        rows = [self.slowest_rank(newest)] if aligned else self.each_rank(newest)
        step_s = self.collected.step_s = self.collected.step_s or [[] for _ in rows]
        for row, new in zip(step_s, rows, strict=True):
            row += new
        slowest_s = step_s[0] if aligned else iteration_times(step_s, aligned).tolist()
        rounds, compared = len(self.rounds), bool(self.workload.compared)
        reached = rule_reached(slowest_s, rounds, spent_s, self.rule, compared)
        return self.group.broadcast(reached)


def next_window(
    windows: Sequence[Sequence[float]], spent_s: float, steps: int, rule: StopRule
) -> int:
    """Return the number of iterations of the next window of a step's warm-up; 0 to end it.

    A step is warm if two consecutive windows do not differ. The first window is one iteration,
    which may include set-up. All steps together have a quarter of the budget, in equal shares,
    unless the user has set the number of iterations. There is a second iteration unless the first
    took longer than that quarter. windows: the seconds of the samples of each window so far.
    spent_s: seconds since the warm-up of this step began. steps: of the case.
    """
    done = sum(map(len, windows))
    sample_s = max(fmean(windows[-1]), 1e-9)
    longest = max(1, min(int(rule.longest_block_s / sample_s), LARGEST_BLOCK))
    if rule.iters or rule.full_warmup:
        return max(0, min(longest, rule.warmup_iters - done))
    quarter_s = rule.max_seconds / 4
    share_s = quarter_s / steps
    if done == 1:
        affordable = int((share_s - spent_s) / sample_s)
        return 0 if spent_s > quarter_s else max(1, min(affordable, rule.warmup_iters - 1))
    if len(windows) > 2 and done >= rule.warmup_iters and same_distribution(*windows[-2:]):
        return 0
    usual = max(rule.warmup_iters, int(share_s / 4 / sample_s))
    return max(0, min(longest, usual, int((share_s - spent_s) / sample_s)))


def iterations_per_block(round_s: float, rule: StopRule, differences: bool = True) -> int:
    """Return the number of iterations of a block for which the planned rounds fill the budget.
    round_s: of one iteration of all steps. differences: whether the case shows the interval of a
    difference, which requires MIN_ROUNDS."""
    rounds = rule.rounds or rule.planned_rounds
    round_s = max(round_s, 1e-9)
    longest = max(1, int(rule.longest_block_s / round_s))
    if rule.iters:
        return min(longest, math.ceil(rule.iters / rounds))
    if not (differences or rule.rounds) and MIN_ROUNDS * (1 + LEAD_IN) * round_s > rule.max_seconds:
        return min(longest, SLOW_BLOCK)  # fewer rounds, so fewer lead-ins
    affordable = max(1, min(int(rule.max_seconds / rounds / round_s - LEAD_IN), LARGEST_BLOCK))
    return min(longest, affordable)  # --max-seconds overrides --min-iters


def rule_reached(
    slowest: list[float], rounds: int, spent_s: float, rule: StopRule, compared: bool = False
) -> str:
    """Return the rule that ends the case now: iters, rounds, target-ci or max-seconds; "" if none.

    A case that compares parts with the step has at least MIN_ROUNDS, however long they take. Others
    end with MIN_SAMPLES once their budget is spent. Without an interval of the step, a case goes on
    for `patience` times its budget. slowest: seconds of each iteration of the step so far, on the
    slowest rank. spent_s: seconds since the first block.
    """
    if rule.iters:
        return "iters" if len(slowest) >= rule.iters else ""
    if rule.rounds:
        return "rounds" if rounds >= rule.rounds else ""
    short = not compared and spent_s >= rule.max_seconds and len(slowest) >= MIN_SAMPLES
    if rounds < MIN_ROUNDS and not short:
        return ""
    ci = median(slowest).relative
    if ci is None and spent_s < rule.patience * rule.max_seconds:
        return ""
    # checked only after 6, 12, 18, ... rounds: frequent checks would stop at a lucky moment
    looks = rounds % MIN_ROUNDS == 0
    if looks and len(slowest) >= rule.min_iters and ci is not None and ci <= rule.target_ci:
        return "target-ci"
    return "max-seconds" if spent_s >= rule.max_seconds else ""
