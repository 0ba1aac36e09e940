"""benchmarks/workloads/operations.py: bus factors and expected results of collectives."""

from typing import Any

import pytest
import torch

from benchmarks.workloads import operations, patterns
from benchmarks.workloads.operations import OPERATIONS, Member

PART, RANKS, ROOT = 5, 3, 1
OWN = slice(PART, 2 * PART)  # the part of rank 1 in a tensor with a part for each rank
TABLE = {  # busbw / algbw for 8 ranks; the result on rank 1 of 3 from inputs [rank, elements]
    "all_reduce": (1.75, lambda rows: rows.sum(0)),
    "all_gather": (0.875, lambda rows: rows.flatten()),
    "reduce_scatter": (0.875, lambda rows: rows.sum(0)[OWN]),
    "all_to_all": (0.875, lambda rows: rows[:, OWN].flatten()),
    "broadcast": (1, lambda rows: rows[ROOT]),
    "reduce": (1, lambda rows: rows.sum(0)),
    "gather": (0.875, lambda rows: rows.flatten()),
    "scatter": (0.875, lambda rows: rows[ROOT, OWN]),
    "sendrecv": (1, lambda rows: rows[0]),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_expected_results(name: str) -> None:
    """Each single wrong value is counted, at any position."""
    operation, (bus, arrives) = OPERATIONS[name], TABLE[name]
    group: Any = None
    assert operation.bus(8) == bus
    sent, received = (parts * PART for parts in operation.parts(RANKS))
    redop = "sum" if operation.reduces else "none"
    rows = torch.empty(RANKS, sent, dtype=torch.int64)
    output = torch.empty(received, dtype=torch.int64)
    for rank, row in enumerate(rows):
        operations.fill(row, output, Member(group, rank, RANKS, PART, redop, ROOT))
    assert output.tolist() == [patterns.SENTINEL] * received
    member = Member(group, 1, RANKS, PART, redop, ROOT)
    assert operations.count_wrong(operation, output, member) == received
    arrived = arrives(rows)
    assert operations.count_wrong(operation, arrived, member) == 0
    for position in range(received):
        damaged = arrived.clone()
        damaged[position] += 1
        assert operations.count_wrong(operation, damaged, member) == 1
    if name in ("reduce", "gather"):  # only the root receives
        assert operation.expected(member._replace(rank=0)) == []
