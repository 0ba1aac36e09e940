"""The collectives that can be timed: the call as a user writes it, its buffers, its check.

`prepare` gives the calls of one operation at one size on this rank, each on buffers of its own
out of one arena, so that successive calls touch other memory.

Where torch has an operation in place only (all_reduce, broadcast, reduce), out of place is what a
user writes for it: the input is copied to the output and the call made there. The copy is timed.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from common import patterns
from common.bandwidth import shares

Call = Callable[[], Any]

DTYPES: Final = {
    name: getattr(torch, name)
    for name in (*("float32", "float16", "bfloat16", "float64", "int8", "uint8", "int32", "int64"),)
}
REDOPS: Final = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "prod": dist.ReduceOp.PRODUCT,
}
MAX_SLOTS: Final = 4096  # buffers that calls rotate through, at most


@dataclass(frozen=True)
class Setting:
    """Who calls, and how. Ranks and root are those within the group."""

    group: dist.ProcessGroup | None
    rank: int
    ranks: int
    device: torch.device
    dtype: torch.dtype = torch.uint8
    redop: str | None = None
    root: int = 0
    async_op: bool = False
    store: Store | None = None  # for the barrier's check, with keys of this case alone


@dataclass(frozen=True)
class Room:
    """The memory that the buffers of successive calls are spread over."""

    arena_bytes: int  # or as much as `least` buffers need
    calls: int  # as many buffers are of use
    least: int = 1  # so many are used at the same time
    kept: dict[str, torch.Tensor] = field(default_factory=dict)  # from one case to the next

    def slots(self, need: int, element_bytes: int) -> tuple[int, int]:
        """How many buffers of `need` elements there are, and the elements from one to the next."""
        aligned = -(-need // 64) * 64
        fit = self.arena_bytes // (aligned * element_bytes)
        slots = max(self.least, min(fit, self.calls, MAX_SLOTS))
        spread = self.arena_bytes // (slots * element_bytes) // 64 * 64
        return slots, max(aligned, spread)

    def arena(self, elements: int, at: "Setting") -> torch.Tensor:
        """That many ones. All are written, which also drives what was there out of the cache."""
        size = elements * at.dtype.itemsize
        if "arena" not in self.kept or len(self.kept["arena"]) < size:
            self.kept.clear()
            self.kept["arena"] = torch.empty(size, dtype=torch.uint8, device=at.device)
        return self.kept["arena"][:size].view(at.dtype).fill_(1)


@dataclass(frozen=True)
class Prepared:
    """Calls on successive buffers; `fill(k)` sets the k-th one's up, `wrong(k)` counts after it."""

    calls: list[Call]
    fill: Callable[[int], None]
    wrong: Callable[[int], int]


def prepare(name: str, count: int, in_place: bool, at: Setting, room: Room) -> Prepared:
    """The operation with `count` elements of this rank, ready to be called."""
    if name == "barrier":
        return _prepare_barrier(at)
    if name.endswith("_object"):
        return _prepare_objects(name, count, at, room)
    send, recv = lengths(name, count, at.ranks)
    need = max(send, recv) if in_place else send + recv
    slots, step = room.slots(need, at.dtype.itemsize)
    arena = room.arena(step * slots, at)
    places = []
    for k in range(slots):
        memory = arena[k * step : k * step + need]
        if in_place:
            places.append(in_place_views(name, memory, count, at))
        else:
            places.append((memory[:send], memory[send:]))
    period = patterns.tile(at.rank, at.redop, at.ranks, at.dtype)

    def fill(k: int) -> None:
        src, dst = places[k]
        patterns.blank(dst)
        patterns.fill(src, period)

    def wrong(k: int) -> int:
        dst, found, done = places[k][1], 0, 0
        for values, start, length in expected(name, count, at):
            part = dst[done : done + length]
            found += patterns.count_wrong(
                part, values, start, patterns.tolerance(at.redop, at.dtype)
            )
            done += length
        assert done in (0, len(dst))
        return found

    return Prepared([OPERATIONS[name](src, dst, at) for src, dst in places], fill, wrong)


def lengths(name: str, count: int, ranks: int) -> tuple[int, int]:
    """Elements that a rank sends and receives."""
    every = count * shares(name, ranks)
    send = count if name in ("all_gather", "gather") else every
    recv = count if name in ("reduce_scatter", "scatter") else every
    return send, recv


def in_place_views(
    name: str, memory: torch.Tensor, count: int, at: Setting
) -> tuple[torch.Tensor, torch.Tensor]:
    """(input, output) where one is a part of the other, as nccl-tests lays them."""
    here = slice(at.rank * count, (at.rank + 1) * count)
    if name in ("all_gather", "gather"):
        return memory[here], memory
    if name in ("reduce_scatter", "scatter"):
        return memory, memory[here]
    return memory, memory


def uneven_splits(count: int, at_rank: int, ranks: int) -> list[int]:
    """Elements that rank r exchanges with each rank d: part (r + d) mod n of n growing parts.

    The parts are in the ratio 1 : 2 : ... : n, rounded, and are count * n in all.
    """
    total, whole = count * ranks, ranks * (ranks + 1)
    bounds = [total * k * (k + 1) // whole for k in range(ranks + 1)]
    return [bounds[(at_rank + d) % ranks + 1] - bounds[(at_rank + d) % ranks] for d in range(ranks)]


# -- what must be in the output --------------------------------------------------------------------


def expected(name: str, count: int, at: Setting) -> list[tuple[torch.Tensor, int, int]]:
    """The output in pieces: (period of values, first position in it, elements). [] for none."""
    n, r, everyone = at.ranks, at.rank, range(at.ranks)

    def sent(rank: int) -> torch.Tensor:
        return patterns.tile(rank, None, n, at.dtype)

    if name in ("all_reduce", "reduce", "reduce_scatter"):
        if name == "reduce" and r != at.root:
            return []
        assert at.redop is not None
        start = r * count if name == "reduce_scatter" else 0
        return [(patterns.expected_tile(at.redop, n, at.dtype), start, count)]
    if name in ("all_gather", "gather"):
        if name == "gather" and r != at.root:
            return []
        return [(sent(s), 0, count) for s in everyone]
    if name == "all_to_all":
        return [(sent(s), r * count, count) for s in everyone]
    if name == "all_to_all_uneven":
        splits = [uneven_splits(count, s, n) for s in everyone]
        return [(sent(s), sum(splits[s][:r]), splits[s][r]) for s in everyone]
    if name == "sendrecv":
        return [(sent((r - 1) % n), 0, count)]
    assert name in ("broadcast", "scatter")
    return [(sent(at.root), r * count if name == "scatter" else 0, count)]


# -- the calls: each (input, output, setting) to what a loop calls ---------------------------------


def _copied(src: torch.Tensor, dst: torch.Tensor, call: Call) -> Call:
    if src is dst:
        return call

    def copy_and_call() -> Any:
        dst.copy_(src)
        return call()

    return copy_and_call


def _all_reduce(src: torch.Tensor, dst: torch.Tensor, at: Setting) -> Call:
    op = REDOPS[at.redop or "sum"]
    call = partial(dist.all_reduce, dst, op=op, group=at.group, async_op=at.async_op)
    return _copied(src, dst, call)


def _reduce(src: torch.Tensor, dst: torch.Tensor, at: Setting) -> Call:
    options: dict[str, Any] = {"group": at.group, "async_op": at.async_op, "group_dst": at.root}
    return _copied(src, dst, partial(dist.reduce, dst, op=REDOPS[at.redop or "sum"], **options))


def _broadcast(src: torch.Tensor, dst: torch.Tensor, at: Setting) -> Call:
    options: dict[str, Any] = {"group": at.group, "async_op": at.async_op, "group_src": at.root}
    call = partial(dist.broadcast, dst, **options)
    return _copied(src, dst, call) if at.rank == at.root else call


def _all_gather(src: torch.Tensor, dst: torch.Tensor, at: Setting) -> Call:
    return partial(dist.all_gather_into_tensor, dst, src, group=at.group, async_op=at.async_op)


def _reduce_scatter(src: torch.Tensor, dst: torch.Tensor, at: Setting) -> Call:
    op = REDOPS[at.redop or "sum"]
    options: dict[str, Any] = {"group": at.group, "async_op": at.async_op}
    return partial(dist.reduce_scatter_tensor, dst, src, op=op, **options)


def _all_to_all(src: torch.Tensor, dst: torch.Tensor, at: Setting) -> Call:
    return partial(dist.all_to_all_single, dst, src, group=at.group, async_op=at.async_op)


def _all_to_all_uneven(src: torch.Tensor, dst: torch.Tensor, at: Setting) -> Call:
    splits = uneven_splits(len(src) // at.ranks, at.rank, at.ranks)  # to and from: alike
    options: dict[str, Any] = {"group": at.group, "async_op": at.async_op}
    return partial(dist.all_to_all_single, dst, src, splits, splits, **options)


def _gather(src: torch.Tensor, dst: torch.Tensor, at: Setting) -> Call:
    parts = list(dst.chunk(at.ranks)) if at.rank == at.root else None
    options: dict[str, Any] = {"group": at.group, "async_op": at.async_op, "group_dst": at.root}
    return partial(dist.gather, src, parts, **options)


def _scatter(src: torch.Tensor, dst: torch.Tensor, at: Setting) -> Call:
    parts = list(src.chunk(at.ranks)) if at.rank == at.root else None
    options: dict[str, Any] = {"group": at.group, "async_op": at.async_op, "group_src": at.root}
    return partial(dist.scatter, dst, parts, **options)


class _All:
    """The works of one call that makes several."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _sendrecv(src: torch.Tensor, dst: torch.Tensor, at: Setting) -> Call:
    """A ring: to the next rank, from the one before."""
    to, source = (at.rank + 1) % at.ranks, (at.rank - 1) % at.ranks
    ops = [
        dist.P2POp(dist.isend, src, group=at.group, group_peer=to),
        dist.P2POp(dist.irecv, dst, group=at.group, group_peer=source),
    ]

    def call() -> Any:
        works = _All(dist.batch_isend_irecv(ops))
        return works if at.async_op else works.wait()

    return call


OPERATIONS: Final[dict[str, Callable[[torch.Tensor, torch.Tensor, Setting], Call]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "all_to_all_uneven": _all_to_all_uneven,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "sendrecv": _sendrecv,
}


# -- without buffers -------------------------------------------------------------------------------


def _prepare_barrier(at: Setting) -> Prepared:
    """Checked by a count in the store: no rank may leave before all have come."""
    checked = itertools.count(1)
    keys: list[str] = []  # of the call to be checked

    options: dict[str, Any] = {"device_ids": [at.device.index]} if at.device.type == "cuda" else {}
    barrier = partial(dist.barrier, at.group, async_op=at.async_op, **options)

    def call() -> Any:
        if keys:
            assert at.store is not None
            if at.rank == int(keys[0]) % at.ranks:
                time.sleep(0.02)  # one comes late, so that a barrier that does nothing is seen
            at.store.add(keys[0], 1)
        return barrier()

    def fill(k: int) -> None:
        keys[:] = [str(next(checked))]

    def wrong(k: int) -> int:
        assert at.store is not None
        return at.ranks - int(at.store.add(keys.pop(), 0))

    return Prepared([call], fill, wrong)


def _payload(rank: int, start: int, length: int) -> bytes:
    period = bytes(patterns.tile(rank, None, 1, torch.uint8).tolist())
    start %= patterns.PERIOD
    return (period * (-(-(start + length) // patterns.PERIOD)))[start : start + length]


def _prepare_objects(name: str, count: int, at: Setting, room: Room) -> Prepared:
    """Python objects (bytes) through pickle. Every call brings objects of its own."""
    n, r, group = at.ranks, at.rank, at.group
    slots, _ = room.slots(count * shares(name, n), 1)
    outs: list[list[Any]] = [[None] * n for _ in range(slots)]

    def wrong_objects(got: list[Any], want: list[bytes]) -> int:
        return sum(a != b for a, b in zip(got, want, strict=True))

    def call_of(k: int) -> Call:
        out = outs[k]
        mine = _payload(r, 0, count)
        if name == "all_gather_object":
            return lambda: dist.all_gather_object(out, mine, group=group)
        if name == "gather_object":
            into = out if r == at.root else None
            return lambda: dist.gather_object(mine, into, group=group, group_dst=at.root)
        if name == "broadcast_object":
            return lambda: dist.broadcast_object_list(
                _put(out, mine if r == at.root else None), group=group, group_src=at.root
            )
        parts = [_payload(r, d * count, count) for d in range(n)] if r == at.root else None
        return lambda: dist.scatter_object_list(out, parts, group=group, group_src=at.root)

    def fill(k: int) -> None:
        outs[k][:] = [None] * (n if name in ("all_gather_object", "gather_object") else 1)

    def wrong(k: int) -> int:
        if name == "gather_object" and r != at.root:
            return 0
        if name in ("all_gather_object", "gather_object"):
            return wrong_objects(outs[k], [_payload(s, 0, count) for s in range(n)])
        start = r * count if name == "scatter_object" else 0
        return wrong_objects(outs[k][:1], [_payload(at.root, start, count)])

    return Prepared([call_of(k) for k in range(slots)], fill, wrong)


def _put(out: list[Any], value: Any) -> list[Any]:
    out[:] = [value]
    return out
