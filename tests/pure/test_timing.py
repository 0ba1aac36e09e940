"""common/timing.py: the stop rule, and the timed loop with a single rank."""

import gc
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from common import timing
from common.groups import Group
from common.stats import Times
from common.timing import StopRule, TimedLoop, Workload

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
RULE = StopRule()  # 5 s
SHORT, FIXED = StopRule(max_seconds=0.3), StopRule(iters=20)
FULL = StopRule(warmup_iters=7, full_warmup=True)  # --warmup-iters 7


@pytest.mark.parametrize(
    ("round_s", "rule", "differences", "expected"),
    [
        (1e-3, RULE, True, 415),  # 5 s / 12 rounds / 1 ms - the mean lead-in of 1.5
        (1e-6, RULE, True, 1000),  # the maximum
        (0.1, StopRule(min_iters=60), True, 2),  # 4.17 - 1.5: --min-iters comes second
        (1e-3, StopRule(rounds=24), True, 206),
        (2.0, StopRule(iters=600, longest_block_s=6), True, 3),
        (0.026, SHORT, True, 1),
        (0.026, SHORT, False, 3),  # two rounds of 4.5 instead of six of 2.5
    ],
)
def test_block_length(round_s: float, rule: StopRule, differences: bool, expected: int) -> None:
    assert timing.iterations_per_block(round_s, rule, differences) == expected


ALIKE, LOWER = [1e-3, 3e-3, 2e-3, 4e-3], [0.6e-3] * 4


@pytest.mark.parametrize(
    ("windows", "spent_s", "rule", "expected"),
    [
        ([[0.01]], 0.01, RULE, 4),  # each of two steps has 0.625 s of 5 s
        ([[0.7]], 0.7, RULE, 1),  # a second iteration, which may be faster
        ([[1.3]], 1.3, RULE, 0),  # not if the first took longer than the whole quarter
        ([[0.01], ALIKE], 0.02, RULE, 62),  # a quarter of 0.625 s / 2.5 ms
        ([[0.01], ALIKE, ALIKE], 0.03, RULE, 0),
        ([[0.01], ALIKE, LOWER], 0.622, RULE, 5),  # the rest of the quarter
        ([[9.0]], 9, FULL, 6),  # as many as requested
        ([[50.0]], 50, FULL, 1),  # the longest block that the watchdog allows is 75 s
    ],
)
def test_when_warm_up_ends(windows: Any, spent_s: float, rule: StopRule, expected: int) -> None:
    assert timing.next_window(windows, spent_s, 2, rule) == expected


SAME, SWING = [1.0] * 20, [1.0, 1.2] * 10  # the interval is 1.0 to 1.2
DRIFT = [1.0] * 3 + [2.0] * 3  # signs around the median are correlated: no interval from 6 samples


@pytest.mark.parametrize(
    ("expected", "given"),  # samples of the slowest rank, rounds, seconds since the first, ...
    [
        ("target-ci", (SAME, 6, 0, RULE)),
        ("", (SAME, 7, 0, RULE)),  # the interval is checked after 6, 12, 18, ... rounds
        ("", (SAME[:19], 6, 0, RULE)),  # --min-iters
        ("target-ci", (SWING, 6, 0, StopRule(target_ci=0.1))),  # 0.1 / 1.1
        ("", (SWING, 6, 4.9, StopRule(target_ci=0.09))),
        ("max-seconds", (SWING, 6, 5, RULE)),
        ("max-seconds", (SAME[:6], 2, 5, RULE)),  # then 6 samples are enough
        ("", (SAME[:5], 2, 5, RULE)),
        ("", (SWING, 5, 9, RULE, True)),  # a difference needs 6 rounds
        ("", (DRIFT, 6, 6.2, RULE)),  # up to 1.25 times --max-seconds if an interval is missing
        ("max-seconds", (DRIFT, 6, 6.25, RULE)),
        ("max-seconds", (DRIFT, 6, 5, StopRule(patience=1))),
        ("target-ci", (SAME, 6, 0, RULE, True)),
        ("iters", (SWING, 1, 0, FIXED)),
        ("", (SAME[:19], 9, 99, FIXED)),
        ("", (SAME, 23, 99, StopRule(rounds=24))),
        ("rounds", (SAME, 24, 0, StopRule(rounds=24))),
    ],
)
def test_when_a_case_is_done(expected: str, given: Any) -> None:
    assert timing.rule_reached(*given) == expected


class Event:
    """Stands for a CUDA event. A step with a launch takes 2 ms on the device, an empty one none."""

    launches = 0

    def __init__(self, enable_timing: bool) -> None:
        self.at = 0

    def record(self) -> None:
        self.at = Event.launches

    def elapsed_time(self, later: "Event") -> float:
        return 2.0 * (later.at - self.at)


def launch() -> None:
    Event.launches += 1


@pytest.mark.parametrize(
    ("device", "step", "clock", "expected"),
    [
        # two samples of 4 calls take 8 s and 4 s; the first reading starts the block
        (CPU, launch, [10, 10, 18, 22, 22], ([2.0, 1.0], 0)),
        # on CUDA the host launches them in 1 s and then waits for the device
        (CUDA, launch, [10, 11, 11.004], ([2e-3, 2e-3], 0.25)),
        (CUDA, launch, [10, 11, 11.006], ([2e-3, 2e-3], 0)),  # the device never waited for the host
        # at least half a microsecond, the resolution of events, so that rates are finite
        (CUDA, lambda: None, [10, 11, 11.006], ([1.25e-7, 1.25e-7], 0)),
    ],
)
def test_a_block(
    device: Any, step: Any, clock: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = iter(clock)
    monkeypatch.setattr(timing, "perf_counter", lambda: next(readings))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert timing.time_block(step, 2, device, calls_per_sample=4) == expected


def test_launch_share_is_that_of_the_highest_rank() -> None:
    slow = Times.of_rank({"a": [1.0, 3.0]}, [2], "iters", {"a": 1.0})
    fast = Times.of_rank({"a": [0.5, 0.5]}, [2], "iters", {"a": 0.9})
    assert Times.merge([slow, fast]).launch_share == {"a": 0.9}
    late = Times.of_rank({"a": [0.5, 0.5]}, [2], "iters", {"a": 1.32})
    assert Times.merge([slow, late]).launch_share == {"a": 1.0}


@pytest.fixture
def group() -> Iterator[Group]:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=9))
    world: Any = dist.group.WORLD
    yield Group((0,), world, world)
    dist.destroy_process_group()


def test_blocks_alternate_after_barriers(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """This rank takes no part in c and waits meanwhile. The step returns its number of calls."""
    order: list[str] = []
    monkeypatch.setattr(timing.dist, "barrier", lambda control: order.append("|"))
    monkeypatch.setattr(timing, "new_seed", lambda: 86)

    def step() -> int:
        order.append("a")
        return order.count("a")

    work = Workload(step, {"b": partial(order.append, "b"), "c": None}, returned=list)
    times = TimedLoop(work, group, CPU, StopRule(warmup_iters=1, iters=13)).run()
    assert (times.stop, times.rounds) == ("iters", [2] * 6 + [1])
    assert list(times.samples_s) == ["step", "b"]
    assert times.each().shape == times.each("b").shape == (1, 13)
    # one warm-up call each; then 1 or 2 untimed and two timed calls, forwards and then backwards
    assert "".join(order).startswith("|a|b||aaa|bbbb|||bbbb|aaaa|aaa|bbb")
    assert times.returned[0][:4] == [3, 4, 7, 8]  # of timed calls only


@pytest.mark.parametrize("shares", [False, True])  # whether the part advances the counter as well
@pytest.mark.parametrize(("block", "period"), [(1, 2), (1, 3), (1, 4), (3, 2), (3, 4)])
def test_what_recurs_is_timed_in_proportion(
    monkeypatch: pytest.MonkeyPatch, block: int, period: int, shares: bool
) -> None:
    """With one untimed call before each block, a step that takes long in every second or fourth
    call would always or never be timed in blocks of 1 or 3. The share of a run of 12 rounds has a
    standard deviation of up to 14 points: that of 100 runs, 1.4."""
    monkeypatch.setattr(timing.dist, "barrier", lambda control: None)
    assert timing.new_seed() != timing.new_seed()
    counts = np.zeros(period)
    for seed in range(100):
        count = iter(range(1000)).__next__
        work = Workload(count, {"part": count if shares else lambda: None}, returned=list)
        loop = TimedLoop(work, Mock(), CPU, RULE)
        loop.random.seed(seed)
        for _ in range(12):
            loop.time_round(block)
        counts += np.bincount(np.array(loop.values) % period, minlength=period)
    assert counts / counts.sum() == pytest.approx(np.full(period, 1 / period), abs=0.06)


def test_early_blocks_and_continued_loops(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """12 rounds of 1 ms fill 1.464 s with blocks of 120, a quarter of which is 30. With 98 instead,
    a quarter, 24, is too short for an early block. The second loop continues the first one, without
    warming up. Its planned rounds, 6, fill 1.2 s with blocks of 198."""
    monkeypatch.setattr(timing, "time_block", lambda step, iters, *_: ([1e-3] * iters, 0.0))
    seen = Mock(side_effect=[""] * 7 + ["max-seconds"] + ["target-ci"])
    monkeypatch.setattr(timing, "rule_reached", seen)
    collected = timing.Collected()
    work = Workload(lambda: None, collected=collected)
    rule = replace(FULL, max_seconds=12 * 0.122, early=0.25)
    assert list(TimedLoop(work, group, CPU, rule).run().rounds) == [30] * 6 + [120] * 2
    monkeypatch.setattr(TimedLoop, "warm_up", Mock(side_effect=AssertionError))
    again = replace(rule, max_seconds=12 * 0.1, planned_rounds=6)
    times = TimedLoop(work, group, CPU, again).run()
    assert list(times.rounds) == [30] * 6 + [120] * 2 + [198]
    assert times.each().shape == (1, 618)
    assert len(seen.call_args.args[0]) == 618  # the stop rule sees all samples
    assert seen.call_args.args[1] == 9
    monkeypatch.setattr(TimedLoop, "warm_up", Mock(return_value=1e-3))
    short = replace(rule, max_seconds=12 * 0.1)
    seen.side_effect = ["iters"]
    assert list(TimedLoop(Workload(lambda: None), group, CPU, short).run().rounds) == [98]


def test_samples_of_windows_and_blocks(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample of 10 calls of 10 ms takes 0.1 s: 28 of them and 1.5 untimed ones fit into 3.05 s.
    With gloo the host waits for the device in each step, which would look like launching and is not
    counted."""
    block = Mock(side_effect=lambda step, iters, *_: ([0.01] * iters, 0.01 * iters))
    monkeypatch.setattr(timing, "time_block", block)
    rule = replace(FULL, rounds=1, max_seconds=3.05)
    work = Workload(lambda: None, calls_per_sample=10, launches=True)
    times = TimedLoop(work, group, CUDA, rule).run()
    assert times.launch_share == {}
    assert [call.args[1] for call in block.call_args_list] == [1, 6, 28]


def test_the_slowest_rank_decides(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank takes 4 s and 1 s for two steps."""
    other = torch.tensor([4.0, 1.0], dtype=torch.float64)

    def reduce(newest: torch.Tensor, group_dst: int, op: Any, group: Any) -> None:
        both = torch.stack([newest, other])
        newest.copy_(both.amax(0) if op == dist.ReduceOp.MAX else both.amin(0))

    monkeypatch.setattr(timing.dist, "reduce", reduce)
    work = Workload(lambda: None, {"part": lambda: None, "other": None}, compared=["part"])
    loop = TimedLoop(work, group, CPU, RULE)
    loop.samples_s = {"step": [9.0, 2.0, 3.0], "part": [9.0, 0.5, 2.0]}
    loop.rounds = [1, 2]
    monkeypatch.setattr(timing, "rule_reached", reached := Mock(return_value=""))
    assert loop.check_stop_rule(2, 0.0) == ""
    assert reached.call_args.args[0] == [4.0, 3.0]


def test_the_stop_rule_of_unaligned_ranks(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank takes 3 s for each of three steps, so it has the larger median. The maximum over
    ranks of each sample would be 9, 3 and 3 s, which no rank has measured."""

    def gather(mine: torch.Tensor, rows: list[torch.Tensor], group_dst: int, group: Any) -> None:
        rows[0].copy_(mine)
        rows[1].fill_(3.0)

    monkeypatch.setattr(timing.dist, "gather", gather)
    monkeypatch.setattr(timing, "rule_reached", reached := Mock(return_value=""))
    work = Workload(lambda: None, aligned=False)
    loop = TimedLoop(work, replace(group, ranks=(0, 1)), CPU, RULE)
    loop.samples_s, loop.rounds = {"step": [9.0, 1.0, 1.0]}, [3]
    assert loop.check_stop_rule(3, 0.0) == ""
    assert reached.call_args.args[0] == [3.0, 3.0, 3.0]
    loop.samples_s, loop.rounds = {"step": [9.0, 1.0, 1.0, 2.0]}, [3, 1]
    assert loop.check_stop_rule(1, 0.0) == ""
    assert reached.call_args.args[0] == [3.0, 3.0, 3.0, 3.0]


@pytest.mark.parametrize("before", [True, False])
def test_garbage_collection_is_off_within_blocks(group: Group, before: bool) -> None:
    """A model may have disabled it."""
    collects = iter([before] + [False] * 8)

    def step() -> None:
        assert gc.isenabled() == next(collects)  # after 9 calls StopIteration ends the loop

    try:
        (gc.enable if before else gc.disable)()  # whatever an earlier test has left
        with pytest.raises(StopIteration):
            TimedLoop(Workload(step), group, CPU, StopRule(iters=20, warmup_iters=1)).run()
        assert gc.isenabled() == before
    finally:
        gc.enable()
