"""benchmarks/workloads/patterns.py: values that identify rank and position, for each dtype and
reduction."""

import functools
import math
from typing import Any

import pytest
import torch

from benchmarks import collectives
from benchmarks.workloads import patterns

OF_TWO: dict[str, Any] = {"sum": torch.add, "prod": torch.mul}
OF_TWO |= {"min": torch.minimum, "max": torch.maximum}


@functools.cache
def tiles(redop: str, ranks: int) -> torch.Tensor:
    return torch.stack([patterns.tile(rank, redop, ranks) for rank in range(ranks)])


@pytest.mark.parametrize("name", collectives.TYPES)
@pytest.mark.parametrize("ranks", [1, 3, 512])
def test_reductions_are_exact(ranks: int, name: str) -> None:
    """Also if the ranks are reduced one by one in the dtype itself, as a backend may do."""
    for redop, of_two in OF_TWO.items():
        total = functools.reduce(of_two, tiles(redop, ranks).to(getattr(torch, name)).unbind())
        assert patterns.count_wrong(total, patterns.reduced_tile(redop, ranks)) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ranks", [2, 3, 512])
def test_averages_may_divide_first_or_last(ranks: int, dtype: torch.dtype) -> None:
    first = last = torch.zeros(patterns.PERIOD, dtype=dtype)
    for row in tiles("avg", ranks).to(dtype):
        first, last = first + row / ranks, last + row
    want, near = patterns.reduced_tile("avg", ranks), patterns.tolerance("avg", dtype)
    assert patterns.count_wrong(first, want, relative=near) == 0
    assert patterns.count_wrong(last / ranks, want, relative=near) == 0
    assert patterns.count_wrong(last, want, relative=near) > 0


@pytest.mark.parametrize("redop", [*OF_TWO, "avg"])
@pytest.mark.parametrize("ranks", [2, 3, 512])
def test_a_missing_rank_is_detected(redop: str, ranks: int) -> None:
    want, near = patterns.reduced_tile(redop, ranks), patterns.tolerance(redop, torch.float32)
    for missing in {0, 1, ranks - 1}:
        others = [rank for rank in range(ranks) if rank != missing]
        rows = tiles(redop, ranks)[others].double().unbind()
        got = functools.reduce(OF_TWO.get(redop, torch.add), rows)
        if redop == "avg":
            got = got / ranks
        assert patterns.count_wrong(got.float(), want, relative=near) > 0


def test_values_identify_rank_and_position() -> None:
    tiles = [tuple(patterns.tile(rank).tolist()) for rank in range(512)]
    assert len(set(tiles)) == 512
    assert all(0 <= value < patterns.SENTINEL for tile in tiles for value in tile)
    for shift in (2**k for k in range(20)):  # a chunk at another position
        assert torch.tensor(tiles[0]).roll(shift).tolist() != list(tiles[0])


def test_fill_and_count_wrong() -> None:
    period, length = patterns.tile(1), patterns.CHUNK + 1000
    buffer = torch.empty(length, dtype=torch.int32)
    patterns.fill(buffer, period)
    assert patterns.count_wrong(buffer[5:], period, start=5) == 0
    assert patterns.count_wrong(buffer, period, start=1) == length
    buffer[[0, 17, length - 1]] += 1
    assert patterns.count_wrong(buffer, period) == 3
    assert patterns.count_wrong(period.float().fill_(math.nan), period, relative=1e-3) == 1021
