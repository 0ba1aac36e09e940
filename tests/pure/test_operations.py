"""The table of collectives, worked out by hand: factors, and what must arrive where."""

from typing import Any

import pytest
import torch
from torch import Tensor

from common.workloads import operations, patterns
from common.workloads.operations import OPERATIONS, Member


@pytest.mark.parametrize(
    ("name", "ranks", "factor"),
    [
        *(("all_reduce", 1, 0), ("all_reduce", 2, 1), ("all_reduce", 4, 1.5)),
        *(("all_gather", 4, 0.75), ("reduce_scatter", 8, 0.875), ("all_to_all", 2, 0.5)),
        *(("gather", 5, 0.8), ("scatter", 5, 0.8), ("broadcast", 8, 1), ("reduce", 8, 1)),
        ("sendrecv", 8, 1),
    ],
)
def test_bus_factor(name: str, ranks: int, factor: float) -> None:
    assert OPERATIONS[name].bus(ranks) == pytest.approx(factor)


PART, RANKS, ROOT = 5, 3, 1
ARRIVES = {  # on rank 1 of 3, what is in the inputs of all, [rank, elements]
    "all_reduce": lambda rows: rows.sum(0),
    "all_gather": lambda rows: rows.flatten(),
    "reduce_scatter": lambda rows: rows.sum(0)[PART : 2 * PART],
    "all_to_all": lambda rows: rows[:, PART : 2 * PART].flatten(),
    "broadcast": lambda rows: rows[ROOT],
    "reduce": lambda rows: rows.sum(0),
    "gather": lambda rows: rows.flatten(),
    "scatter": lambda rows: rows[ROOT, PART : 2 * PART],
    "sendrecv": lambda rows: rows[0],
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_must_arrive(name: str) -> None:
    """All of it, at its place: each single value that differs is counted."""
    operation = OPERATIONS[name]
    group: Any = None
    sent, received = (parts * PART for parts in operation.parts(RANKS))
    redop = "sum" if operation.reduces else "none"
    rows = torch.empty(RANKS, sent, dtype=torch.int64)
    output = torch.empty(received, dtype=torch.int64)
    for rank, row in enumerate(rows):
        operations.fill(row, output, Member(group, rank, RANKS, PART, redop, ROOT))
    assert output.tolist() == [patterns.SENTINEL] * received
    member = Member(group, 1, RANKS, PART, redop, ROOT)
    assert operations.count_wrong(operation, output, member) == received
    arrived: Tensor = ARRIVES[name](rows)
    assert operations.count_wrong(operation, arrived, member) == 0
    for position in range(received):
        damaged = arrived.clone()
        damaged[position] += 1
        assert operations.count_wrong(operation, damaged, member) == 1


def test_only_the_root_receives() -> None:
    for name in ("reduce", "gather"):
        group: Any = None
        assert OPERATIONS[name].expected(Member(group, 0, RANKS, PART, "sum", ROOT)) == []
