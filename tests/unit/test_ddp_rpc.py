"""benchmarks/ddp_rpc.py: its data, its dense part, and the reference that it is held against."""

from typing import Any

import pytest
import torch
from harness import load_script
from torch import nn

SCRIPT = load_script("ddp_rpc")


def config(**changes: Any) -> Any:
    values: dict[str, Any] = {
        "trainers": 2,
        "servers": 2,
        "number_embeddings": 30,
        "embedding_dim": 8,
        "sparse": False,
        "lookup": "parallel",
        "autograd": "manual",
        "dtype": torch.float64,
    }
    return SCRIPT.Config(**values | changes)


def test_an_epoch_is_drawn_as_the_original_draws_it() -> None:
    for trainer in range(20):
        epoch = SCRIPT.create_epoch(config(), trainer)
        assert len(epoch) == 10
        for indices, offsets, targets in epoch:
            assert 20 <= len(indices) <= 50
            assert int(indices.min()) >= 0
            assert int(indices.max()) < 30
            assert len(offsets) == len(targets)
            ends = [*offsets.tolist()[1:], len(indices)]
            assert offsets[0] == 0
            assert {1 <= b - a <= 10 for a, b in zip(offsets.tolist(), ends, strict=True)} == {True}
            assert int(targets.min()) >= 0
            assert int(targets.max()) < 8
    assert SCRIPT.bags(epoch) == sum(len(targets) for _, _, targets in epoch)
    first = SCRIPT.create_epoch(config(), 0)[0][0]
    assert torch.equal(first, SCRIPT.create_epoch(config(), 0)[0][0])
    assert not torch.equal(first[:20], SCRIPT.create_epoch(config(), 1)[0][0][:20])


@pytest.mark.parametrize(
    ("servers", "dim", "projected"), [(8, 64, False), (16, 64, True), (12, 64, True), (1, 3, True)]
)
def test_tables_of_any_size_fit(servers: int, dim: int, projected: bool) -> None:
    """The original crashed for 12 and 16 servers."""
    dense = SCRIPT.create_dense(config(servers=servers, embedding_dim=dim, dtype=torch.float32))
    first = next(module for module in dense if isinstance(module, nn.Linear))
    assert (first.out_features == 512) == projected
    assert dense(torch.zeros(5, servers * dim)).shape == (5, 8)


def train_here(settings: Any, spoil: str = "") -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The checked steps with gradients taken one by one, and applied by plain arithmetic."""
    tables = [SCRIPT.create_table(settings, server) for server in range(settings.servers)]
    dense = SCRIPT.create_dense(settings)
    epochs = [SCRIPT.create_epoch(settings, trainer) for trainer in range(settings.trainers)]
    for i in range(SCRIPT.CHECKED_STEPS):
        averaged = [torch.zeros_like(p) for p in dense.parameters()]
        pushed = []
        for epoch in epochs:
            indices, offsets, targets = epoch[i]
            looked_up = [table(indices, offsets) for table in tables]
            loss = nn.functional.cross_entropy(dense(torch.cat(looked_up, 1)), targets)
            weights = [table.weight for table in tables]
            gradients = torch.autograd.grad(loss, [*dense.parameters(), *weights])
            for total, gradient in zip(averaged, gradients, strict=False):
                total += gradient / settings.trainers
            pushed.append(gradients[len(averaged) :])
        if spoil == "a push" and i == 1:
            pushed.pop()
        if spoil == "the average" and i == 1:
            averaged = [2 * total for total in averaged]
        with torch.no_grad():
            for p, gradient in zip(dense.parameters(), averaged, strict=True):
                p -= 0.05 * gradient
            for gradients in pushed:
                for table, gradient in zip(tables, gradients, strict=True):
                    table.weight -= 0.05 * gradient.to_dense()
    return [table.weight.detach() for table in tables], [p.detach() for p in dense.parameters()]


@pytest.mark.parametrize("sparse", [False, True])
def test_the_reference(sparse: bool) -> None:
    settings = config(sparse=sparse, trainers=3)
    errors = SCRIPT.errors_against_reference(settings, *train_here(settings))
    assert max(errors.values()) < 1e-9


@pytest.mark.parametrize(("spoil", "what"), [("a push", "tables"), ("the average", "dense")])
def test_the_reference_shows_what_is_wrong(spoil: str, what: str) -> None:
    settings = config(trainers=8)
    errors = SCRIPT.errors_against_reference(settings, *train_here(settings, spoil))
    assert errors[what] > 1000 * SCRIPT.TOLERANCE


def test_a_server_applies_what_a_trainer_sends() -> None:
    settings = config()
    server = SCRIPT.TableServer(settings, 0, "cpu", "cpu")
    before = server.table.weight.detach().clone()
    indices, offsets = torch.tensor([3, 3, 5]), torch.tensor([0, 2])
    gradient = torch.ones(2, 8, dtype=torch.float64)
    server.apply(indices, offsets, gradient)
    moved = before - server.table.weight.detach()
    expected = torch.zeros_like(moved)
    expected[3], expected[5] = 2 * 0.05, 0.05  # row 3 is twice in its bag
    torch.testing.assert_close(moved, expected)
