"""Buffers, splits and expected values of the operations, on one process."""

from typing import Any

import pytest
import torch

from common import patterns
from common.bandwidth import COLLECTIVES, OBJECTS
from common.collective_ops import (
    OPERATIONS,
    Room,
    Setting,
    expected,
    in_place_views,
    lengths,
    prepare,
    uneven_splits,
)
from common.dist import CaseGroup

CPU = torch.device("cpu")


def setting(rank: int, ranks: int, **more: Any) -> Setting:
    return Setting(None, rank, ranks, CPU, torch.int32, **more)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("count", [1, 2, 5, 100])
def test_uneven_splits_fit_together(ranks: int, count: int) -> None:
    splits = [uneven_splits(count, rank, ranks) for rank in range(ranks)]
    for r in range(ranks):
        assert sum(splits[r]) == count * ranks
        assert [splits[s][r] for s in range(ranks)] == splits[r]  # what it gets from each
    if ranks > 1 and count >= 5:
        assert len(set(splits[0])) > 1


def test_uneven_splits_by_hand() -> None:
    assert uneven_splits(10, 0, 4) == [4, 8, 12, 16]
    assert uneven_splits(10, 1, 4) == [8, 12, 16, 4]


def test_lengths() -> None:
    assert lengths("all_reduce", 6, 4) == (6, 6)
    assert lengths("all_gather", 6, 4) == (6, 24)
    assert lengths("reduce_scatter", 6, 4) == (24, 6)
    assert lengths("all_to_all", 6, 4) == (24, 24)
    assert lengths("gather", 6, 4) == (6, 24)
    assert lengths("scatter", 6, 4) == (24, 6)


def test_in_place_views_are_parts_of_each_other() -> None:
    memory = torch.arange(12)
    src, dst = in_place_views("all_gather", memory, 3, setting(2, 4))
    assert src.tolist() == [6, 7, 8]
    assert dst is memory
    src, dst = in_place_views("reduce_scatter", memory, 3, setting(1, 4))
    assert dst.tolist() == [3, 4, 5]
    src, dst = in_place_views("all_reduce", memory, 12, setting(1, 4))
    assert src is dst


def simulate(name: str, sent: list[torch.Tensor], count: int, rank: int) -> torch.Tensor:
    """What the operation leaves with `rank`, worked out from what all send. Root 1."""
    ranks = len(sent)
    stacked = torch.stack(sent)
    if name in ("all_reduce", "reduce"):
        return stacked.sum(0)
    if name == "reduce_scatter":
        return stacked.sum(0)[rank * count : (rank + 1) * count]
    if name in ("all_gather", "gather"):
        return stacked.flatten()
    if name == "broadcast":
        return sent[1]
    if name == "scatter":
        return sent[1][rank * count : (rank + 1) * count]
    if name == "sendrecv":
        return sent[(rank - 1) % ranks]
    splits = [
        [count] * ranks if name == "all_to_all" else uneven_splits(count, s, ranks)
        for s in range(ranks)
    ]
    return torch.cat([sent[s].split(splits[s])[rank] for s in range(ranks)])


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_expected_is_what_the_operation_does(name: str, ranks: int) -> None:
    count, redop = 50, "sum" if "reduce" in name else None
    sent = []
    for rank in range(ranks):
        buffer = torch.empty(lengths(name, count, ranks)[0], dtype=torch.int32)
        patterns.fill(buffer, patterns.tile(rank, redop, ranks, torch.int32))
        sent.append(buffer)
    for rank in range(ranks):
        pieces = expected(name, count, setting(rank, ranks, redop=redop, root=1))
        if name in ("reduce", "gather") and rank != 1:
            assert pieces == []
            continue
        want = torch.cat([torch.empty(0), *[p.roll(-s).repeat(9)[:n] for p, s, n in pieces]])
        assert want.tolist() == simulate(name, sent, count, rank).tolist()


def test_room_for_cold_buffers() -> None:
    """1 MiB among 10 calls of 4 KiB: ten places, spread over all of it."""
    slots, step = Room(2**20, calls=10).slots(1024, 4)
    assert slots == 10
    assert step * 4 * slots > 0.99 * 2**20
    # larger buffers: as many as fit, then they come round again
    assert Room(2**20, calls=100).slots(2**16, 4) == (4, 2**16)
    # at least one, and as many as are in flight
    assert Room(2**20, calls=100).slots(2**20, 4) == (1, 2**20)
    assert Room(0, calls=1, least=8).slots(100, 4) == (8, 128)
    assert Room(2**30, calls=10**9).slots(1, 1)[0] == 4096


def test_buffers_do_not_overlap() -> None:
    slots, step = Room(0, 5, 5).slots(100, 4)
    assert step >= 100
    assert slots == 5


@pytest.mark.parametrize("name", [name for name in COLLECTIVES if name != "sendrecv"])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_world_of_one(group: CaseGroup, name: str, in_place: bool) -> None:
    """Prepared, called and checked for real; and wrong before the call."""
    from torch.distributed import HashStore

    if in_place and (name in OBJECTS or name == "barrier"):
        pytest.skip("has no buffers")
    redop = "sum" if "reduce" in name else None
    at = Setting(group.test, 0, 1, CPU, torch.float32, redop, store=HashStore())
    prepared = prepare(name, 300, in_place, at, Room(2**16, 3))
    assert len(prepared.calls) == (1 if name == "barrier" else 3)
    for k, call in enumerate(prepared.calls):
        prepared.fill(k)
        if not in_place and name != "barrier":  # in place with one rank there is nothing to do
            assert prepared.wrong(k) > 0
        call()
        assert prepared.wrong(k) == 0
