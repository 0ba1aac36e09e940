"""The stop rule by hand, and the timed loop in a world of one."""

import argparse
import gc
import itertools
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from time import sleep
from typing import Any

import pytest
import torch
import torch.distributed as dist

from common import cli
from common import timing as timing_module
from common.groups import Group
from common.timing import (
    RankTimes,
    Step,
    StopRule,
    TimedLoop,
    Workload,
    iterations_per_block,
    launch_share,
    next_window,
    rule_reached,
    time_block,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("round_s", "rule", "expected"),
    [
        (1e-3, StopRule(), 415),  # 5 s / 12 rounds / 1 ms - the lead-in of 1
        (1e-6, StopRule(), 1000),  # at most
        (0.1, StopRule(min_iters=60), 3),  # 4.17 - 1: --max-seconds comes before --min-iters
        (1.4, StopRule(), 1),
        (1e-3, StopRule(iters=30), 3),
        (2.0, StopRule(iters=600, longest_block_s=6), 3),
        (1e-3, StopRule(rounds=24), 207),
    ],
)
def test_block_length(round_s: float, rule: StopRule, expected: int) -> None:
    assert iterations_per_block(round_s, rule) == expected


@pytest.mark.parametrize(
    ("round_s", "rule", "expected"),
    [
        (0.024, StopRule(max_seconds=0.3), 1),  # 6 rounds of it and its lead-in fit
        (0.026, StopRule(max_seconds=0.3), 3),  # two rounds of 4 instead of six of 2
        (0.026, StopRule(max_seconds=0.3, longest_block_s=0.06), 2),
        (0.026, StopRule(max_seconds=0.3, rounds=24), 1),  # so many are asked for
        (0.026, StopRule(max_seconds=0.3, iters=12), 1),
    ],
)
def test_slow_steps_have_fewer_rounds(round_s: float, rule: StopRule, expected: int) -> None:
    """Unless the row shows a difference, whose interval needs 6 of them."""
    assert iterations_per_block(round_s, rule, differences=False) == expected
    assert iterations_per_block(round_s, rule, differences=True) <= expected


FIXED = StopRule(warmup_iters=7, full_warmup=True)
ALIKE, LOWER = [1e-3, 3e-3, 2e-3, 4e-3], [0.6e-3] * 4


@pytest.mark.parametrize(
    ("windows", "spent_s", "rule", "expected"),
    [
        ([[0.01]], 0.01, StopRule(), 4),  # two steps: each has 0.625 s of 5 s
        ([[0.2]], 0.2, StopRule(), 2),  # 0.425 / 0.2
        ([[0.7]], 0.7, StopRule(), 1),  # a second one, which may be faster
        ([[1.3]], 1.3, StopRule(), 0),  # not if the first took over the whole quarter
        ([[0.7], [0.6]], 1.3, StopRule(), 0),
        ([[0.01], ALIKE], 0.02, StopRule(), 62),  # a quarter of 0.625 s / 2.5 ms
        ([[0.01], ALIKE, ALIKE], 0.03, StopRule(), 0),
        ([[0.01], ALIKE, LOWER], 0.03, StopRule(), 260),
        ([[0.01], ALIKE, LOWER], 0.622, StopRule(), 5),  # what is left of it
        ([[0.01], ALIKE, LOWER], 0.63, StopRule(), 0),
        ([[0.01], ALIKE, ALIKE], 0.03, StopRule(warmup_iters=10), 62),
        ([[0.01], [1e-6] * 4], 0.02, StopRule(), 1000),
        ([[9.0]], 9, FIXED, 6),  # as many as were asked for
        ([[9.0], [9.0] * 4], 45, FIXED, 2),
        ([[9.0], [9.0] * 6], 63, FIXED, 0),
        ([[50.0]], 50, FIXED, 1),  # the watchdog's longest block is 75 s
        ([[9.0]], 9, StopRule(iters=3), 4),
        ([[9.0]], 9, StopRule(warmup_iters=0, full_warmup=True), 0),
    ],
)
def test_a_step_is_warm_when_windows_agree_or_its_time_is_over(
    windows: list[list[float]], spent_s: float, rule: StopRule, expected: int
) -> None:
    assert next_window(windows, spent_s, 2, rule) == expected


SWING = [1.0, 1.2] * 10  # 20 samples, an interval of 1.0 to 1.2
SAME = [1.0] * 20


@pytest.mark.parametrize(
    ("slowest", "rounds", "spent", "rule", "expected"),
    [
        (SAME, 5, 4.9, StopRule(), ""),  # 6 rounds at least
        (SAME, 2, 5, StopRule(), "max-seconds"),  # or --max-seconds, and 6 samples
        (SAME, 7, 0, StopRule(), ""),  # the interval is looked at after 6, 12, 18, ... rounds
        (SAME, 12, 0, StopRule(), "target-ci"),
        (SAME[:6], 2, 5, StopRule(), "max-seconds"),
        (SAME[:5], 2, 5, StopRule(), ""),
        (SAME, 6, 0, StopRule(), "target-ci"),
        (SAME[:19], 6, 0, StopRule(), ""),  # --min-iters
        (SAME[:6], 6, 5, StopRule(), "max-seconds"),  # which --max-seconds overrules
        (SWING, 6, 4.9, StopRule(), ""),
        (SWING, 6, 5, StopRule(), "max-seconds"),
        (SWING, 6, 0, StopRule(target_ci=0.1), "target-ci"),  # 0.1 / 1.1
        (SWING, 6, 0, StopRule(target_ci=0.09), ""),
        (SWING, 1, 0, StopRule(iters=20), "iters"),
        (SAME, 9, 99, StopRule(iters=21), ""),
        (SAME, 23, 99, StopRule(rounds=24), ""),
        (SAME, 24, 0, StopRule(rounds=24), "rounds"),
    ],
)
def test_decide(
    slowest: list[float], rounds: int, spent: float, rule: StopRule, expected: str
) -> None:
    assert rule_reached(slowest, rounds, spent, rule) == expected


DRIFT = [1.0] * 3 + [2.0] * 3  # its signs about the median stay alike: no interval of 6
LONG_DRIFT = [1.0] * 5 + [2.0] * 5  # of up to 8 rounds the order does not count
SWINGING = [1.0, 2.0] * 3


@pytest.mark.parametrize(
    ("slowest", "gaps", "spent", "expected"),
    [
        (SWINGING, [], 5, "max-seconds"),
        (DRIFT, [], 6.2, ""),  # on to 1.25 times --max-seconds
        (DRIFT, [], 6.25, "max-seconds"),
        (SAME, [LONG_DRIFT], 0, ""),  # the step is narrow enough, but `exposed` has no interval
        (SAME, [LONG_DRIFT], 10, "target-ci"),
        (SAME, [SWINGING], 0, "target-ci"),
        (SWINGING, [SWINGING, LONG_DRIFT], 6.2, ""),
        (SWINGING, [SWINGING, LONG_DRIFT], 6.25, "max-seconds"),
    ],
)
def test_a_case_goes_on_until_it_has_its_intervals(
    slowest: list[float], gaps: list[list[float]], spent: float, expected: str
) -> None:
    assert rule_reached(slowest, 6, spent, StopRule(), gaps) == expected
    assert rule_reached(slowest, 6, max(spent, 5), StopRule(patience=1), gaps) != ""


def flags(*words: str) -> argparse.Namespace:
    parser = cli.Parser(None)
    cli.add_common_flags(parser)
    return parser.parse_args(words)


def test_a_warm_up_that_was_asked_for_is_done_in_full() -> None:
    assert StopRule.by_flags(flags(), False) == StopRule()
    asked = StopRule.by_flags(flags("--warmup-iters", "5"), False)
    assert asked == StopRule(warmup_iters=5, full_warmup=True)
    assert StopRule.by_flags(flags("-w", "0"), False).warmup_iters == 0


def test_a_sample_is_the_mean_of_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two samples of 4 calls, which take 8 s and 4 s, begin at 10 s."""
    calls: list[int] = []
    clock = iter([10.0, 10.0, 18.0, 22.0, 22.0])
    monkeypatch.setattr(timing_module, "perf_counter", lambda: next(clock))
    assert time_block(lambda: calls.append(1), 2, CPU, calls=4) == ([2.0, 1.0], 0)
    assert len(calls) == 8


class Event:
    """Stands for a CUDA event. A step of one launch takes 2 ms on the device, an empty one none."""

    launches = 0

    def __init__(self, enable_timing: bool) -> None:
        self.at = 0

    def record(self) -> None:
        self.at = Event.launches

    def elapsed_time(self, later: "Event") -> float:
        return 2.0 * (later.at - self.at)


def test_on_cuda_events_are_stamps_and_an_empty_step_takes_their_resolution(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half a microsecond: a rate would be infinite otherwise."""

    def launch() -> None:
        Event.launches += 1

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    cuda = torch.device("cuda", 0)
    assert time_block(launch, 2, cuda, calls=4)[0] == [2e-3, 2e-3]
    assert time_block(lambda: None, 2, cuda)[0] == [5e-7, 5e-7]


@pytest.mark.parametrize(("waited_s", "expected"), [(0.006, 0.0), (0.004, 0.5)])
def test_a_device_with_work_queued_never_waited_for_the_host(
    waited_s: float, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host launches a block of two calls a sample in 1 s, and then waits for the device."""
    clock = iter([10.0, 11.0, 11.0 + waited_s])
    monkeypatch.setattr(timing_module, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert time_block(lambda: None, 1, torch.device("cuda", 0), calls=2)[1] == expected


def test_launch_share_is_of_the_rank_with_the_most() -> None:
    slow = RankTimes({"a": [1.0, 3.0]}, [2], "iters", {"a": 1.0})
    fast = RankTimes({"a": [0.5, 0.5]}, [2], "iters", {"a": 0.9})
    assert launch_share([slow, fast]) == {"a": 0.9}
    assert launch_share([slow]) == {"a": 0.25}


@pytest.fixture
def group() -> Any:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=9))
    world: Any = dist.group.WORLD
    yield Group((0,), world, world)
    dist.destroy_process_group()


def test_steps_alternate_and_turn_around_and_ranks_meet_before_each_block(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    real = dist.barrier

    def barrier(*given: Any) -> None:
        order.append("|")
        real(*given)

    monkeypatch.setattr(timing_module.dist, "barrier", barrier)
    phases: list[str] = []
    work = Workload(partial(order.append, "a"), {"b": partial(order.append, "b")})
    rule = StopRule(warmup_iters=1, iters=13)
    times = TimedLoop(work, group, CPU, rule, phases.append).run()
    assert times.stop == "iters"
    assert times.rounds == [2] * 6 + [1]  # the last block is cut to the count
    assert len(times.samples_s["step"]) == 13
    # a warm-up each; then a lead-in and two timed ones, forwards and then backwards
    assert "".join(order).startswith("|a|b|aaa|bbb|bbb|aaa|aaa")
    assert phases[:2] == ["step, warm-up 1", "b, warm-up 1"]
    assert phases[2:6] == ["step, block 1", "b, block 1", "b, block 2", "step, block 2"]


def test_a_window_of_the_warm_up_is_one_block(group: Group) -> None:
    """Seven samples of 10 calls: one, then six at once."""
    calls: list[int] = []
    rule = StopRule(warmup_iters=7, full_warmup=True, rounds=1, max_seconds=1e-9)
    phases: list[str] = []
    TimedLoop(Workload(lambda: calls.append(1), calls=10), group, CPU, rule, phases.append).run()
    assert phases == ["step, warm-up 1", "step, warm-up 2", "step, block 1"]
    assert len(calls) == 70 + 10 * 2  # the block has a lead-in and a sample


def test_the_slowest_rank_decides(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank takes 4 s and 1 s for two steps, and 1 s for each of two parts."""
    other = torch.tensor([[4.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    together: dict[Any, Callable[..., torch.Tensor]] = {
        dist.ReduceOp.MAX: torch.maximum,
        dist.ReduceOp.MIN: torch.minimum,
    }

    def reduce(newest: torch.Tensor, group_dst: int, op: Any, group: Any) -> None:
        newest.copy_(together[op](newest, other))

    monkeypatch.setattr(timing_module.dist, "reduce", reduce)
    work = Workload(lambda: None, {"part": lambda: None, "other": None}, compared=["part"])
    loop = TimedLoop(work, group, CPU, StopRule())
    loop.times = RankTimes({"step": [9.0, 2.0, 3.0], "part": [9.0, 0.5, 2.0]}, [1, 2])
    assert loop.judge(2, 0.0) == ""
    assert loop.slowest_s == [4.0, 3.0]
    assert loop.gaps_s == {"part": [2.0]}  # 3.5 - 1.5, medians over the slowest ranks


def test_a_block_is_planned_by_samples_not_by_calls(group: Group) -> None:
    """0.1 s of samples of at least 10 * 1 ms: no more than 10, and the lead-in is one of them."""
    rule = StopRule(warmup_iters=2, min_iters=1, max_seconds=0.1, rounds=1)
    times = TimedLoop(Workload(lambda: sleep(0.001), calls=10), group, CPU, rule).run()
    assert times.stop == "rounds"
    assert 1 <= times.rounds[0] <= 9


def test_collection_of_garbage_is_off_within_blocks_and_on_after_an_error(group: Group) -> None:
    seen: list[bool] = []

    def step() -> None:
        seen.append(gc.isenabled())
        if len(seen) == 9:
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        TimedLoop(Workload(step), group, CPU, StopRule(iters=20, warmup_iters=1)).run()
    assert seen[0]
    assert not any(seen[1:])
    assert gc.isenabled()


def test_what_timed_calls_return_stays_with_their_samples(group: Group) -> None:
    """2 warm-ups; then each of 6 blocks has a lead-in, which does not count, and one sample."""
    numbers = itertools.count()
    work = Workload(lambda: next(numbers), {"part": lambda: -1}, returned=list)
    times = TimedLoop(work, group, CPU, StopRule(warmup_iters=2, iters=6)).run()
    assert times.rounds == [1] * 6
    assert times.returned == [3, 5, 7, 9, 11, 13]


def test_over_gloo_no_step_is_called_launch_bound(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the host waits for the device in each step, which looks like launching."""
    monkeypatch.setattr(timing_module, "time_block", lambda *given: ([1.0], 0.99))
    rule = StopRule(iters=1, warmup_iters=1)
    for device, backend, kept in (
        ("cuda", "nccl", {"step": 0.99}),
        ("cuda", "gloo", {}),
        ("cuda", "cpu:gloo,cuda:nccl", {"step": 0.99}),
        ("cpu", "gloo", {}),
    ):
        monkeypatch.setattr(dist, "get_backend", lambda group, name=backend: name)
        workload = Workload(lambda: None, launches=True)
        times = TimedLoop(workload, group, torch.device(device), rule).run()
        assert times.launching_s == kept, (device, backend)


def test_a_part_that_this_rank_does_not_do(group: Group) -> None:
    """It waits at the barriers meanwhile, and has no samples of it."""
    phases: list[str] = []
    work: Workload = Workload(lambda: None, dict[str, Step | None](a=None, b=lambda: None))
    rule = StopRule(iters=2, warmup_iters=1)
    times = TimedLoop(work, group, CPU, rule, phases.append).run()
    assert list(times.samples_s) == ["step", "b"]
    assert [phase for phase in phases if phase.startswith("a, ")] == [
        "a, warm-up 1",
        "a, block 1",
        "a, block 2",
    ]
