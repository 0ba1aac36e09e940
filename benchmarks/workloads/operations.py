"""All collectives in one table: the call in torch, the expected output, and the factor of busbw.

A rank sends either one part or one part for each rank, and receives either one part or one part
from each rank. patterns.py defines the values that are sent and expected.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from benchmarks.workloads import patterns

# from torch 2.14 on, each call by the older name prints a warning
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

OPS = dist.ReduceOp
REDOPS = {"sum": OPS.SUM, "avg": OPS.AVG, "min": OPS.MIN, "max": OPS.MAX, "prod": OPS.PRODUCT}
VARIANTS = ("out_of_place", "in_place")
IN_PLACE_FIRST = ("in_place", "out_of_place")
OUT_OF_PLACE = ("out_of_place",)


class Member(NamedTuple):
    """A rank that calls a collective. rank and root are ranks within the group."""

    group: dist.ProcessGroup
    rank: int
    n: int  # size of the group
    part: int  # in elements
    redop: str = "none"  # a key of REDOPS for a reduction
    root: int = 0

    @property
    def is_root(self) -> bool:
        return self.rank == self.root

    @property
    def op(self) -> Any:
        return REDOPS[self.redop]


class Piece(NamedTuple):
    """A contiguous range of the expected output."""

    sender: int | None  # None for a reduction
    first: int  # position of the first value within the sender's input
    length: int


class Operation(NamedTuple):
    call: Callable[..., Any]  # (input, output, member); with async_op=True it returns torch's Work
    expected: Callable[[Member], list[Piece]]  # in the order of the output
    bus: Callable[[int], float]  # busbw / algbw of n ranks: nccl-tests' doc/PERFORMANCE.md
    scatters: bool = False  # the input has a part for each rank
    gathers: bool = False  # the output has a part from each rank
    variants: tuple[str, ...] = VARIANTS  # the first is the one that torch implements
    reduces: bool = False
    has_root: bool = False

    def parts(self, n: int) -> tuple[int, int]:
        """Number of parts in the input and in the output of a rank, in a group of n ranks."""
        return n if self.scatters else 1, n if self.gathers else 1


def copied(src: Tensor, dst: Tensor, has_input: bool = True) -> Tensor:
    """Copy the input to the output, for operations that torch implements in place only. Their
    out-of-place time includes this copy. A rank without an input copies nothing."""
    if src is dst or not has_input:
        return dst
    return dst.copy_(src)


def parts_of_root(buffer: Tensor, at: Member) -> list[Tensor] | None:
    return list(buffer.chunk(at.n)) if at.is_root else None


def ring(src: Tensor, dst: Tensor, at: Member) -> None:
    """Send to the next rank and receive from the previous one."""
    following = (at.rank + 1) % at.n
    previous = (at.rank - 1) % at.n
    send = dist.P2POp(dist.isend, src, group=at.group, group_peer=following)
    recv = dist.P2POp(dist.irecv, dst, group=at.group, group_peer=previous)
    for work in dist.batch_isend_irecv([send, recv]):
        work.wait()


def the_reduction(at: Member) -> list[Piece]:
    return [Piece(None, 0, at.part)]


def all_of_each(at: Member) -> list[Piece]:
    return [Piece(sender, 0, at.part) for sender in range(at.n)]


def without_own_part(n: int) -> float:
    """(n - 1) / n: a rank does not send its own part of n."""
    return (n - 1) / n


OPERATIONS = {
    "all_reduce": Operation(
        call=lambda src, dst, at, **more: dist.all_reduce(
            copied(src, dst), at.op, at.group, **more
        ),
        expected=the_reduction,
        bus=lambda n: 2 * without_own_part(n),
        variants=IN_PLACE_FIRST,
        reduces=True,
    ),
    "all_gather": Operation(
        call=lambda src, dst, at, **more: all_gather(dst, src, at.group, **more),
        expected=all_of_each,
        bus=without_own_part,
        gathers=True,
    ),
    "reduce_scatter": Operation(
        call=lambda src, dst, at, **more: reduce_scatter(dst, src, at.op, at.group, **more),
        expected=lambda at: [Piece(None, at.rank * at.part, at.part)],
        bus=without_own_part,
        scatters=True,
        reduces=True,
    ),
    "all_to_all": Operation(
        call=lambda src, dst, at, **more: dist.all_to_all_single(dst, src, group=at.group, **more),
        expected=lambda at: [Piece(sender, at.rank * at.part, at.part) for sender in range(at.n)],
        bus=without_own_part,
        scatters=True,
        gathers=True,
        variants=OUT_OF_PLACE,
    ),
    "broadcast": Operation(
        call=lambda src, dst, at, **more: dist.broadcast(
            copied(src, dst, at.is_root), group=at.group, group_src=at.root, **more
        ),
        expected=lambda at: [Piece(at.root, 0, at.part)],
        bus=lambda n: 1,
        variants=IN_PLACE_FIRST,
        has_root=True,
    ),
    "reduce": Operation(
        call=lambda src, dst, at, **more: dist.reduce(
            copied(src, dst), op=at.op, group=at.group, group_dst=at.root, **more
        ),
        expected=lambda at: the_reduction(at) if at.is_root else [],
        bus=lambda n: 1,
        variants=IN_PLACE_FIRST,
        reduces=True,
        has_root=True,
    ),
    "gather": Operation(
        call=lambda src, dst, at, **more: dist.gather(
            src, parts_of_root(dst, at), group=at.group, group_dst=at.root, **more
        ),
        expected=lambda at: all_of_each(at) if at.is_root else [],
        bus=without_own_part,
        gathers=True,
        has_root=True,
    ),
    "scatter": Operation(
        call=lambda src, dst, at, **more: dist.scatter(
            dst, parts_of_root(src, at), group=at.group, group_src=at.root, **more
        ),
        expected=lambda at: [Piece(at.root, at.rank * at.part, at.part)],
        bus=without_own_part,
        scatters=True,
        has_root=True,
    ),
    "sendrecv": Operation(
        call=ring,
        expected=lambda at: [Piece((at.rank - 1) % at.n, 0, at.part)],
        bus=lambda n: 1,
        variants=OUT_OF_PLACE,
    ),
}


def fill(src: Tensor, dst: Tensor, at: Member) -> None:
    """Fill the input with the values of this rank, and the output with a value no rank sends."""
    patterns.blank(dst)
    patterns.fill(src, patterns.tile(at.rank, at.redop, at.n))


def count_wrong(operation: Operation, dst: Tensor, at: Member) -> int:
    """Number of values of an output that differ from the expected ones."""
    tolerance = patterns.tolerance(at.redop, dst.dtype)
    wrong = begin = 0
    for piece in operation.expected(at):
        values = dst[begin : begin + piece.length]
        period = patterns.tile(piece.sender, at.redop, at.n)
        wrong += patterns.count_wrong(values, period, piece.first, tolerance)
        begin += piece.length
    return wrong
