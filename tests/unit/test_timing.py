"""common/timing.py: the arithmetic of the loop, and the loop itself in a world of one."""

import functools
import gc
import itertools
from time import sleep
from typing import Any

import pytest
import torch

from common.dist import CaseGroup
from common.timing import LEAD_IN, Step, StopRule, _block_length, _decide, measure, time_block

CPU = torch.device("cpu")


def rule(iters: int | None = None, **changes: Any) -> StopRule:
    defaults = {"warmup_iters": 2, "min_iters": 20, "target_ci": 0.02, "max_seconds": 5.0}
    return StopRule(iters=iters, **(defaults | changes))


@pytest.mark.parametrize(
    ("iters", "block"), [(1, 1), (12, 1), (13, 2), (24, 2), (120, 10), (121, 11)]
)
def test_block_length_of_a_fixed_count(iters: int, block: int) -> None:
    assert _block_length(0.01, rule(iters)) == block  # a twelfth, rounded up


@pytest.mark.parametrize(
    ("seconds_a_round", "min_iters", "block"),
    [
        (0.01, 20, 40),  # 5 s / 12 rounds / 10 ms = 41.67, less one to lead in: 40.67
        (10.0, 20, 2),  # not even one is affordable; 20 / 12 = 1.67
        (10.0, 1, 1),
        (0.1, 60, 5),  # affordable: 3.17; the minimum needs 60 / 12
        (1e-6, 20, 1000),  # at most
        (0.0, 20, 1000),
        (0.0, 24_000, 2000),  # but the minimum is reached
    ],
)
def test_block_length_within_the_budget(seconds_a_round: float, min_iters: int, block: int) -> None:
    assert _block_length(seconds_a_round, rule(min_iters=min_iters)) == block


TIGHT = [1.0] * 20
WIDE = [1.0, 2.0] * 10  # interval [1, 2], median 1.5: 33 %


@pytest.mark.parametrize(
    ("slowest", "rounds", "elapsed", "stop_rule", "reached"),
    [
        (TIGHT, 12, 9.0, rule(20), "iters"),
        (TIGHT, 12, 9.0, rule(21), ""),  # the other rules are out of use
        (TIGHT, 6, 0.1, rule(), "target-ci"),
        (TIGHT, 6, 9.0, rule(), "target-ci"),
        (TIGHT, 5, 9.0, rule(), ""),  # fewer than MIN_ROUNDS
        (TIGHT[:19], 6, 9.0, rule(), ""),  # fewer than --min-iters
        (WIDE, 6, 4.9, rule(), ""),
        (WIDE, 6, 5.0, rule(), "max-seconds"),
        (WIDE, 6, 0.1, rule(target_ci=0.34), "target-ci"),
        ([1.0] * 5, 6, 0.1, rule(min_iters=5), ""),  # no interval of so few
        ([1.0] * 5, 6, 5.1, rule(min_iters=5), "max-seconds"),
    ],
)
def test_decide(
    slowest: list[float], rounds: int, elapsed: float, stop_rule: StopRule, reached: str
) -> None:
    stop = _decide(slowest, rounds, elapsed, stop_rule)
    assert stop["rule"] == reached
    assert stop["iterations"] == len(slowest)


def test_decide_tells_the_width() -> None:
    assert _decide(WIDE, 6, 0, rule())["ci95_rel"] == pytest.approx(1 / 3)
    assert _decide(WIDE[:5], 6, 0, rule())["ci95_rel"] is None


def test_time_block_times_each_call() -> None:
    naps = itertools.cycle([0.002, 0.02])
    times = time_block(lambda: sleep(next(naps)), 4, CPU)
    assert len(times) == 4
    assert min(times) >= 0.002
    assert min(times[1], times[3]) >= 0.02  # each call has its own time
    assert time_block(lambda: None, 0, CPU) == []


def events(group: CaseGroup, stop_rule: StopRule, names: str = "abc") -> tuple[Any, list[str]]:
    """Measure steps of these names: the measurement, and every call in its order."""
    log: list[str] = []
    steps: dict[str, Step] = {name: functools.partial(log.append, name) for name in names}
    found = measure(steps, group, CPU, stop_rule, lambda phase: log.append(f"[{phase}]"))
    return found, log


@pytest.mark.parametrize("iters", [1, 7, 12, 13, 30])
def test_a_fixed_count(group: CaseGroup, iters: int) -> None:
    found, log = events(group, rule(iters))
    assert found.stop["rule"] == "iters"
    assert found.stop["iterations"] == sum(found.rounds) == iters
    assert {name: rows.shape for name, rows in found.samples.items()} == dict.fromkeys(
        "abc", (1, iters)
    )
    assert {name: len(times) for name, times in found.warmup.items()} == dict.fromkeys("abc", 2)
    calls = 2 + iters + LEAD_IN * len(found.rounds)  # warm-up, timed, untimed before each block
    assert [log.count(name) for name in "abc"] == [calls] * 3


def test_order_alternates_and_nothing_comes_between(group: CaseGroup) -> None:
    # 25 iterations: blocks of 3, the ninth has the one that is left
    found, log = events(group, rule(25))
    assert found.rounds == [3] * 8 + [1]
    want = [call for name in "abc" for i in (1, 2) for call in (f"[{name}, warm-up {i}]", name)]
    for i, block in enumerate(found.rounds):
        for name in "abc" if i % 2 == 0 else "cba":
            want += [f"[{name}, block {i + 1}]", *[name] * (LEAD_IN + block)]
    assert log == [*want, "[gather]"]


def test_the_stop_rule_in_the_loop(group: CaseGroup) -> None:
    """With every width good enough it stops at the first round that has the minimum."""
    loose = rule(min_iters=48, target_ci=1e9, max_seconds=1e-9)  # blocks of 48 / 12 = 4
    found, _ = events(group, loose)
    assert found.rounds == [4] * 12
    assert found.stop["rule"] == "target-ci"
    found, _ = events(group, rule(min_iters=1, target_ci=1e9, max_seconds=1e-9))
    assert found.rounds == [1] * 6  # MIN_ROUNDS, and six samples have an interval


def test_it_stops_when_the_time_is_up(group: CaseGroup) -> None:
    """No iteration is like the one before it: never within 2 %."""
    naps = itertools.cycle([0.0, 0.001, 0.002, 0.003, 0.004])
    found = measure(
        {"a": lambda: sleep(next(naps))}, group, CPU, rule(min_iters=24, max_seconds=0.1)
    )
    assert found.stop["rule"] == "max-seconds"
    assert found.stop["ci95_rel"] > 0.02
    assert found.stop["iterations"] >= 24


def test_samples_are_the_times_of_their_step(group: CaseGroup) -> None:
    naps = {"a": 0.0, "b": 0.005, "c": 0.01}
    steps: dict[str, Step] = {name: functools.partial(sleep, nap) for name, nap in naps.items()}
    found = measure(steps, group, CPU, rule(12))
    assert found.samples["a"].min() < 0.005 <= found.samples["b"].min() < 0.01
    assert found.samples["c"].min() >= 0.01


def test_no_garbage_collection_in_the_loop(group: CaseGroup) -> None:
    seen = []
    measure({"a": lambda: seen.append(gc.isenabled())}, group, CPU, rule(12, warmup_iters=1))
    assert seen == [True] + [False] * 24
    assert gc.isenabled()
