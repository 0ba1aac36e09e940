"""The values that ranks send: told apart by rank and position, exact in every dtype."""

import pytest
import torch

from common import patterns
from common.collective_ops import DTYPES

RANKS = [1, 2, 3, 8, 130, 512]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("redop", ["sum", "prod", "min", "max"])
def test_reductions_are_exact(redop: str, ranks: int, dtype: torch.dtype) -> None:
    """Added up one rank after the other in the dtype itself, as a backend may do."""
    total = patterns.tile(0, redop, ranks, dtype).to(dtype)
    for rank in range(1, ranks):
        mine = patterns.tile(rank, redop, ranks, dtype).to(dtype)
        if redop in ("min", "max"):
            total = torch.minimum(total, mine) if redop == "min" else torch.maximum(total, mine)
        else:
            total = total + mine if redop == "sum" else total * mine
    assert patterns.count_wrong(total, patterns.expected_tile(redop, ranks, dtype)) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("ranks", RANKS)
def test_average_divided_first_or_last(ranks: int, dtype: torch.dtype) -> None:
    rows = [patterns.tile(r, "avg", ranks, dtype).to(dtype) for r in range(ranks)]
    first = last = torch.zeros(patterns.PERIOD, dtype=dtype)
    for row in rows:
        first = first + row / ranks
        last = last + row
    want = patterns.expected_tile("avg", ranks, dtype)
    relative = patterns.tolerance("avg", dtype)
    for total in (first, last / ranks):
        assert patterns.count_wrong(total, want, relative=relative) == 0
    if ranks > 1:  # without one rank, or undivided
        assert patterns.count_wrong(first - rows[1] / ranks, want, relative=relative) > 0
        assert patterns.count_wrong(last, want, relative=relative) > 0


@pytest.mark.parametrize("redop", ["sum", "prod", "avg", "min", "max"])
@pytest.mark.parametrize("ranks", [2, 3, 8, 512])
def test_a_rank_that_is_left_out_is_seen(redop: str, ranks: int) -> None:
    """Somewhere in the period it matters."""
    dtype = torch.float32
    want = patterns.expected_tile(redop, ranks, dtype)
    relative = patterns.tolerance(redop, dtype)
    for missing in {0, 1, ranks - 1}:
        rows = torch.stack(
            [patterns.tile(r, redop, ranks, dtype) for r in range(ranks) if r != missing]
        ).double()
        got = {
            "sum": rows.sum(0),
            "avg": rows.sum(0) / ranks,
            "prod": rows.prod(0),
            "min": rows.amin(0),
            "max": rows.amax(0),
        }[redop].to(dtype)
        assert patterns.count_wrong(got, want, relative=relative) > 0


def test_integer_averages() -> None:
    for ranks in (2, 4):
        rows = [patterns.tile(r, "avg", ranks, torch.int8) for r in range(ranks)]
        total = torch.stack(rows).sum(0)
        assert int(total.max()) <= 127
        assert bool((total % ranks == 0).all())
    assert not patterns.average_overflows(4, torch.int8)
    assert patterns.average_overflows(5, torch.int8)
    assert not patterns.average_overflows(4096, torch.int32)
    assert not patterns.average_overflows(4096, torch.float16)


def test_moved_values_tell_ranks_and_places_apart() -> None:
    tiles = [tuple(patterns.tile(r, None, 512, torch.int8).tolist()) for r in range(512)]
    assert len(set(tiles)) == 512
    assert all(0 <= value < patterns.SENTINEL for tile in tiles for value in tile)
    for shift in [2**k for k in range(20)]:  # a chunk at another place
        assert torch.tensor(tiles[0]).roll(shift).tolist() != list(tiles[0])


def test_fill_and_count_wrong() -> None:
    period = patterns.tile(1, None, 2, torch.int32)
    length = patterns.CHUNK + 1000
    buffer = torch.empty(length, dtype=torch.int32)
    patterns.fill(buffer, period, start=5)
    assert buffer[:3].tolist() == period[5:8].tolist()
    assert int(buffer[-1]) == int(period[(5 + length - 1) % patterns.PERIOD])
    assert patterns.count_wrong(buffer, period, start=5) == 0
    assert patterns.count_wrong(buffer, period, start=6) == length
    buffer[[0, 17, length - 1]] += 1
    assert patterns.count_wrong(buffer, period, start=5) == 3


def test_nan_is_wrong() -> None:
    period = patterns.expected_tile("avg", 2, torch.float32)
    got = period.to(torch.float32)
    got[3] = torch.nan
    assert patterns.count_wrong(got, period, relative=1e-3) == 1
    assert patterns.count_wrong(got, period) == 1
