"""Data that collectives send, and the expected results: values computed from rank and position.

All values are integers that every dtype represents exactly, before and after the reduction, so that
results are compared exactly. They repeat with a prime period, so that a chunk in an incorrect
position is detected, even if its offset is a power of two.
"""

import torch

PERIOD = 1021
MODULUS = 127  # values that are only moved are smaller
SENTINEL = 127  # fills every buffer before the call; no rank sends it
CHUNK = PERIOD * 1024  # elements compared at once

# Number of ranks that contribute more than the neutral element at a position. It limits the sum to
# the 8 bits of a bfloat16 (32 * 7 = 224) and the product to an int8 (2**6), and the rounding error
# of the average. With up to PERIOD times as many ranks, every rank contributes within a period.
CONTRIBUTORS = {"sum": 32, "prod": 6, "avg": 4}


def tile(rank: int | None, redop: str = "none", ranks: int = 1) -> torch.Tensor:
    """Return one period of the values that `rank` of `ranks` sends; of their reduction for None.
    int64. redop: `none` for a collective that only moves data."""
    if rank is None:
        return reduced_tile(redop, ranks)
    i = torch.arange(PERIOD)
    moved = (31 * (rank + 1) + i * (1 + rank // MODULUS) + i // MODULUS) % MODULUS
    if redop == "none":
        return moved
    if redop in ("min", "max"):  # at each position another rank has the extreme value
        turn = i % ranks == rank % PERIOD
        low, high = moved % 63, 63 + moved % 64
        return torch.where(turn, low, high) if redop == "min" else torch.where(turn, high, low)
    contributes = (rank + i) % -(-ranks // CONTRIBUTORS[redop]) == 0
    if redop == "prod":
        return torch.where(contributes, 2, 1)
    return torch.where(contributes, 1 + moved % 7, 0)


def reduced_tile(redop: str, ranks: int) -> torch.Tensor:
    """Return one period of the reduction over all ranks; float64 for avg, else int64."""
    rows = torch.stack([tile(rank, redop, ranks) for rank in range(ranks)])
    if redop in ("min", "max"):
        return rows.amin(0) if redop == "min" else rows.amax(0)
    if redop == "prod":
        return rows.prod(0)
    return rows.sum(0) if redop == "sum" else rows.sum(0) / ranks


def tolerance(redop: str, dtype: torch.dtype) -> float:
    """Return the maximum relative error of a result: 0 except for the average. A backend may divide
    before it adds, which rounds every contribution and every sum."""
    return (CONTRIBUTORS["avg"] + 2) * torch.finfo(dtype).eps if redop == "avg" else 0.0


def blank(buffer: torch.Tensor) -> None:
    """Fill with SENTINEL, which no rank sends."""
    buffer.fill_(SENTINEL)


def fill(buffer: torch.Tensor, period: torch.Tensor) -> None:
    """Fill a buffer [n] with repetitions of a period."""
    chunk = repeat(period.to(buffer.dtype), 0, buffer)
    for part in buffer.split(CHUNK):  # whole periods, so that all parts start equally
        part.copy_(chunk[: len(part)])


def count_wrong(
    got: torch.Tensor, period: torch.Tensor, start: int = 0, relative: float = 0.0
) -> int:
    """Return how many values of `got` [n] differ from the period's values at start, start + 1, ...
    Integers overflow in `period` as in the reduction. relative: maximum relative error."""
    wrong = 0
    want = repeat(period.to(got.dtype) if relative == 0 else period.double(), start, got)
    for part in got.split(CHUNK):
        here = want[: len(part)]
        near = part == here if relative == 0 else (part - here).abs() <= relative * here.abs()
        wrong += int((~near).sum())  # NaN compares unequal
    return wrong


def repeat(period: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    """The repeated period from `start` on, on the device of `like` and of its length, but at most a
    CHUNK long."""
    length = min(len(like), CHUNK)
    return period.to(like.device).roll(-(start % PERIOD)).repeat(-(-length // PERIOD))[:length]
