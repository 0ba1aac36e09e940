"""Blocks of calls: how many, in which order, how read; the modes."""

from collections import Counter
from itertools import count, cycle
from typing import Any, ClassVar

import pytest
import torch

from common import blocks
from common.blocks import BlockRule, Timed, time_blocks
from common.dist import CaseGroup

CPU = torch.device("cpu")


def rule(**changes: Any) -> BlockRule:
    return BlockRule(
        **(
            {"warmup": 2, "calls": 6, "max_blocks": 3, "max_seconds": 9.0, "max_block_s": 9.0}
            | changes
        )
    )


def counted(calls: Counter[str], name: str, slots: int = 2) -> list[Any]:
    def call(k: int) -> Any:
        def inner() -> None:
            calls[f"{name}{k}"] += 1

        return inner

    return [call(k) for k in range(slots)]


def test_calls_of_a_block(group: CaseGroup) -> None:
    seen: Counter[str] = Counter()
    phases: list[str] = []
    variants = {name: Timed(blocks.plain, counted(seen, name)) for name in ("a", "b")}
    times, stop = time_blocks(variants, group.together, CPU, rule(), phases.append)
    assert stop == "blocks"
    assert [len(block) for block in times["a"]] == [1, 1, 1]  # short calls: one number a block
    # 2 warm-up, 2 to see how long one takes, 3 blocks of 1 + 6; alternately on both buffers
    assert seen == {"a0": 13, "a1": 12, "b0": 13, "b1": 12}
    order = [phase for phase in phases if "block" in phase]
    assert order == [
        "a, block 1",
        "b, block 1",
        "b, block 2",
        "a, block 2",
        "a, block 3",
        "b, block 3",
    ]


def test_each_call_can_have_its_time(group: CaseGroup) -> None:
    variants = {"a": Timed(blocks.plain, counted(Counter(), "a"))}
    times, _ = time_blocks(variants, group.together, CPU, rule(each=True))
    assert [len(block) for block in times["a"]] == [6, 6, 6]


def test_time_decides(group: CaseGroup) -> None:
    variants = {"a": Timed(blocks.plain, counted(Counter(), "a"))}
    times, stop = time_blocks(variants, group.together, CPU, rule(max_seconds=1e-9))
    assert stop == "max-seconds"
    assert len(times["a"]) == 1


def test_a_block_is_cut_for_the_watchdog(group: CaseGroup) -> None:
    seen: Counter[str] = Counter()
    variants = {"a": Timed(blocks.plain, counted(seen, "a", 1))}
    time_blocks(variants, group.together, CPU, rule(max_block_s=1e-12))
    assert seen["a0"] == 2 + 2 + 3 * (1 + 1)


@pytest.mark.parametrize(
    ("calls", "seconds", "changes", "chunk"),
    [
        (20, 1e-6, {}, 20),  # too short to read the clock within
        (20, 1.0, {}, 1),
        (20, 0.0011, {}, 5),  # the fewest above 5 ms that divide 20
        (7, 0.001, {}, 7),
        (20, 1.0, {"whole": True}, 20),
        (20, 1e-6, {"each": True}, 1),
    ],
)
def test_chunk(calls: int, seconds: float, changes: dict[str, Any], chunk: int) -> None:
    assert blocks._chunk(calls, seconds, rule(**changes)) == chunk


def test_a_part_is_divided_by_its_calls(group: CaseGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 2 calls that take 4 ms and more: 6 calls are read three times."""
    monkeypatch.setattr(blocks, "time_block", lambda part, n, device: [0.004] * n)
    variants = {"a": Timed(blocks.plain, [lambda: None])}
    times, _ = time_blocks(variants, group.together, CPU, rule(max_blocks=2))
    assert times == {"a": [[0.002] * 3] * 2}


def test_all_ranks_start_a_block_together(
    group: CaseGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    monkeypatch.setattr(blocks.dist, "barrier", lambda of: order.append("barrier"))
    variants = {"a": Timed(blocks.plain, [lambda: order.append("call")])}
    time_blocks(variants, group.together, CPU, rule(max_blocks=2, warmup=0))
    block = ["barrier", *["call"] * 7]
    assert order == ["barrier", *["call"] * 2, *block, *block]


class Work:
    pending: ClassVar[list[int]] = []
    most = 0

    def __init__(self, number: int) -> None:
        Work.pending.append(number)
        Work.most = max(Work.most, len(Work.pending))
        self.number = number

    def wait(self) -> None:
        assert Work.pending.pop(0) == self.number  # the oldest first


def test_in_flight() -> None:
    Work.pending, Work.most = [], 0
    numbers = count()
    run = blocks.in_flight(3)(cycle([lambda: Work(next(numbers))]), 10)
    run()
    assert Work.most == 3
    assert Work.pending == []
    assert next(numbers) == 10


def test_coalesced_in_a_world_of_one(group: CaseGroup) -> None:
    import torch.distributed as dist

    tensors = [torch.ones(3) for _ in range(7)]
    calls = [lambda t=t: dist.all_reduce(t, group=group.test) for t in tensors]  # type: ignore[misc]
    blocks.coalesced(3, group.test, CPU)(iter(calls), 7)()
    assert all(t.tolist() == [1, 1, 1] for t in tensors)
