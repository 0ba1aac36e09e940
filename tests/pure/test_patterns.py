"""Values that tell rank and position, for each type and operation of collectives.py."""

import functools
import math

import pytest
import torch

from benchmarks import collectives
from common.workloads import patterns

RANKS = [1, 2, 3, 8, 130, 512]


REDUCE = {
    **{"sum": lambda rows: rows.sum(0), "prod": lambda rows: rows.prod(0)},
    **{"min": lambda rows: rows.amin(0), "max": lambda rows: rows.amax(0)},
    "avg": lambda rows: rows.sum(0) / len(rows),
}


@functools.cache
def tiles(redop: str, ranks: int) -> torch.Tensor:
    return torch.stack([patterns.tile(rank, redop, ranks) for rank in range(ranks)])


@pytest.mark.parametrize("name", collectives.TYPES)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("redop", ["sum", "prod", "min", "max"])
def test_reductions_are_exact(redop: str, ranks: int, name: str) -> None:
    """Reduced one rank after the other in the dtype itself, as a backend may do."""
    rows = tiles(redop, ranks).to(getattr(torch, name))
    total = rows[0]
    for row in rows[1:]:
        total = REDUCE[redop](torch.stack([total, row])).to(row.dtype)
    assert patterns.count_wrong(total, patterns.reduced_tile(redop, ranks)) == 0


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("ranks", RANKS)
def test_average_divided_first_or_last(ranks: int, name: str) -> None:
    dtype = getattr(torch, name)
    rows = [patterns.tile(rank, "avg", ranks).to(dtype) for rank in range(ranks)]
    first = last = torch.zeros(patterns.PERIOD, dtype=dtype)
    for row in rows:
        first, last = first + row / ranks, last + row
    want, near = patterns.reduced_tile("avg", ranks), patterns.tolerance("avg", dtype)
    assert patterns.count_wrong(first, want, relative=near) == 0
    assert patterns.count_wrong(last / ranks, want, relative=near) == 0
    if ranks > 1:
        assert patterns.count_wrong(last, want, relative=near) > 0


@pytest.mark.parametrize("redop", list(REDUCE))
@pytest.mark.parametrize("ranks", [2, 3, 8, 512])
def test_a_rank_that_is_left_out_is_seen(redop: str, ranks: int) -> None:
    want, near = patterns.reduced_tile(redop, ranks), patterns.tolerance(redop, torch.float32)
    for missing in {0, 1, ranks - 1}:
        some = [patterns.tile(r, redop, ranks) for r in range(ranks) if r != missing]
        rows = torch.stack(some).double()
        got = REDUCE[redop](rows) * (1 if redop != "avg" else (ranks - 1) / ranks)
        assert patterns.count_wrong(got.float(), want, relative=near) > 0


def test_moved_values_tell_ranks_and_places_apart() -> None:
    tiles = [tuple(patterns.tile(rank).tolist()) for rank in range(512)]
    assert len(set(tiles)) == 512
    assert all(0 <= value < patterns.SENTINEL for tile in tiles for value in tile)
    for shift in (2**k for k in range(20)):  # a chunk at another place
        assert torch.tensor(tiles[0]).roll(shift).tolist() != list(tiles[0])


def test_fill_and_count_wrong() -> None:
    period, length = patterns.tile(1), patterns.CHUNK + 1000
    buffer = torch.empty(length, dtype=torch.int32)
    patterns.fill(buffer, period)
    assert int(buffer[-1]) == int(period[(length - 1) % patterns.PERIOD])
    assert patterns.count_wrong(buffer[5:], period, start=5) == 0
    assert patterns.count_wrong(buffer, period, start=1) == length
    buffer[[0, 17, length - 1]] += 1
    assert patterns.count_wrong(buffer, period) == 3
    got = period.float()
    got[3] = math.nan
    assert patterns.count_wrong(got, period, relative=1e-3) == 1
