"""What a collective sends and what must arrive: values computed from rank and position.

All values are whole numbers that every dtype holds exactly, also after the reduction, so that the
comparison is exact. They repeat with a prime period: a chunk that ends up at another place is seen,
whatever power of two it is off by.
"""

import torch

PERIOD = 1021
MODULUS = 127  # values that are moved are under it
SENTINEL = 127  # in every buffer before the call; no rank sends it
CHUNK = PERIOD * 1024  # elements compared at once

# So many ranks bring more than the neutral element to one position. By that the sum stays within
# the 8 bits of a bfloat16 (32 * 7 = 224), the product within an int8 (2**6), and the average sharp.
# With up to PERIOD times as many ranks every rank has its turn within a period.
CONTRIBUTORS = {"sum": 32, "prod": 6, "avg": 4}


def tile(rank: int | None, redop: str = "none", ranks: int = 1) -> torch.Tensor:
    """One period of what `rank` of `ranks` sends, or, for None, of their reduction. int64.

    redop: `none` where data is only moved.
    """
    if rank is None:
        return reduced_tile(redop, ranks)
    i = torch.arange(PERIOD)
    moved = (31 * (rank + 1) + i * (1 + rank // MODULUS) + i // MODULUS) % MODULUS
    if redop == "none":
        return moved
    if redop in ("min", "max"):  # the ranks take turns in being beyond all others
        turn = i % ranks == rank % PERIOD
        low, high = moved % 63, 63 + moved % 64
        return torch.where(turn, low, high) if redop == "min" else torch.where(turn, high, low)
    contributes = (rank + i) % -(-ranks // CONTRIBUTORS[redop]) == 0
    if redop == "prod":
        return torch.where(contributes, 2, 1)
    return torch.where(contributes, 1 + moved % 7, 0)


def reduced_tile(redop: str, ranks: int) -> torch.Tensor:
    """One period of the reduction over all ranks; float64 for avg, else int64."""
    rows = torch.stack([tile(rank, redop, ranks) for rank in range(ranks)])
    if redop in ("min", "max"):
        return rows.amin(0) if redop == "min" else rows.amax(0)
    if redop == "prod":
        return rows.prod(0)
    return rows.sum(0) if redop == "sum" else rows.sum(0) / ranks


def tolerance(redop: str, dtype: torch.dtype) -> float:
    """How far a value may be off, relative to it: 0 for all reductions but the average.

    A backend may divide before it adds: then every contributor and every addition is rounded.
    """
    return (CONTRIBUTORS["avg"] + 2) * torch.finfo(dtype).eps if redop == "avg" else 0.0


def blank(buffer: torch.Tensor) -> None:
    """Fill with what no rank sends."""
    buffer.fill_(SENTINEL)


def fill(buffer: torch.Tensor, period: torch.Tensor) -> None:
    """Write a period's values again and again. buffer: [n]."""
    chunk = repeat(period.to(buffer.dtype), 0, buffer)
    for part in buffer.split(CHUNK):  # whole periods: all parts begin alike
        part.copy_(chunk[: len(part)])


def count_wrong(
    got: torch.Tensor, period: torch.Tensor, start: int = 0, relative: float = 0.0
) -> int:
    """How many values of `got` differ from the period's at start, start + 1, ... got: [n].

    Integers wrap around in `period` as they do in the reduction.
    """
    wrong = 0
    want = repeat(period.to(got.dtype) if relative == 0 else period.double(), start, got)
    for part in got.split(CHUNK):
        here = want[: len(part)]
        near = part == here if relative == 0 else (part - here).abs() <= relative * here.abs()
        wrong += int((~near).sum())  # NaN is near to nothing
    return wrong


def repeat(period: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    """The period from `start` on, as long as `like` but a CHUNK at most, on its device."""
    length = min(len(like), CHUNK)
    return period.to(like.device).roll(-(start % PERIOD)).repeat(-(-length // PERIOD))[:length]
