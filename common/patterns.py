"""What a collective sends and what must arrive: values computed from rank and position.

All values are whole numbers that every dtype holds exactly, also after the reduction, so that
the comparison is exact. They repeat with a prime period: a chunk that ends up at another place
is seen, whatever power of two it is off by.
"""

from typing import Final

import torch

PERIOD: Final = 1021
MODULUS: Final = 127  # values moved are under it
SENTINEL: Final = 127  # in every buffer before the call; no rank sends it
CHUNK: Final = PERIOD * 1024  # elements compared at once

# how many ranks bring more than the neutral element to one position: so the sum stays within the
# 8 bits of a bfloat16 (32 * 7 = 224), the product within an int8 (2**6), the average sharp.
# Up to PERIOD times as many ranks every rank has its turn within a period.
CONTRIBUTORS: Final = {"sum": 32, "prod": 6, "avg": 4}


def tile(rank: int, redop: str | None, ranks: int, dtype: torch.dtype) -> torch.Tensor:
    """One period of what `rank` of `ranks` sends. redop: None where data is only moved. int64."""
    i = torch.arange(PERIOD)
    moved = (31 * (rank + 1) + i * (1 + rank // MODULUS) + i // MODULUS) % MODULUS
    if redop is None:
        return moved
    if redop in ("min", "max"):  # by turns one rank alone is beyond all others
        turn = i % ranks == rank % PERIOD
        low, high = moved % 63, 63 + moved % 64
        return torch.where(turn, low, high) if redop == "min" else torch.where(turn, high, low)
    contributes = (rank + i) % -(-ranks // CONTRIBUTORS[redop]) == 0
    if redop == "prod":
        return torch.where(contributes, 2, 1)
    values = torch.where(contributes, 1 + moved % 7, 0)
    # an integer average is exact when the sum is a multiple of the number of ranks
    return values * ranks if redop == "avg" and not dtype.is_floating_point else values


def expected_tile(redop: str, ranks: int, dtype: torch.dtype) -> torch.Tensor:
    """One period of the reduction over all ranks; float64 for avg, else int64."""
    rows = torch.stack([tile(rank, redop, ranks, dtype) for rank in range(ranks)])
    if redop in ("min", "max"):
        return rows.amin(0) if redop == "min" else rows.amax(0)
    if redop == "prod":
        return rows.prod(0)
    return rows.sum(0) if redop == "sum" else rows.sum(0) / ranks


def average_overflows(ranks: int, dtype: torch.dtype) -> bool:
    """Whether the sum behind an integer average could leave the dtype."""
    contributors = min(ranks, CONTRIBUTORS["avg"])
    return not dtype.is_floating_point and 7 * contributors * ranks > torch.iinfo(dtype).max


def tolerance(redop: str | None, dtype: torch.dtype) -> float:
    """How far a value may be off, relative to it: 0 but for the average of floating-point values.

    A backend may divide before it adds: one rounding for every contributor and addition.
    """
    if redop != "avg" or not dtype.is_floating_point:
        return 0.0
    return (CONTRIBUTORS["avg"] + 2) * torch.finfo(dtype).eps


def blank(buffer: torch.Tensor) -> None:
    """Fill with what no rank sends."""
    buffer.fill_(SENTINEL)


def fill(buffer: torch.Tensor, period: torch.Tensor, start: int = 0) -> None:
    """Write a period's values at positions start, start + 1, ... buffer: [n]."""
    chunk = _at(period.to(buffer.dtype).to(buffer.device), start, min(len(buffer), CHUNK))
    for part in buffer.split(CHUNK):  # type: ignore[no-untyped-call]  # CHUNK is whole periods: all parts begin alike
        part.copy_(chunk[: len(part)])


def count_wrong(
    got: torch.Tensor, period: torch.Tensor, start: int = 0, relative: float = 0.0
) -> int:
    """How many values of `got` differ from the period's at start, start + 1, ... got: [n].

    Integers wrap around in `period` as they do in the reduction.
    """
    wrong = 0
    exact = period.to(got.dtype) if relative == 0 else period.double()
    chunk = _at(exact.to(got.device), start, min(len(got), CHUNK))
    for part in got.split(CHUNK):  # type: ignore[no-untyped-call]
        want = chunk[: len(part)]
        if relative == 0:
            wrong += int((part != want).sum())
        else:  # NaN is wrong too
            wrong += int((~((part.double() - want).abs() <= relative * want.abs())).sum())
    return wrong


def _at(period: torch.Tensor, start: int, length: int) -> torch.Tensor:
    return period.roll(-(start % PERIOD)).repeat(-(-length // PERIOD))[:length]
