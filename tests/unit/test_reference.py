"""common/reference.py, against steps worked by hand."""

import math

import pytest
import torch
from torch import nn

from common.reference import (
    FALL,
    Reference,
    batch_of,
    blind,
    disagreement,
    shares,
    train_alone,
    unflatten,
    verdict,
)

WANTED = Reference(0.5, [[2.0, 4.0], [1.8, 3.6], [1.5, 3.0]])


def test_ranks_share_eight_batches() -> None:
    assert shares(1) == [1.0]
    assert shares(3) == [1 / 3] * 3
    assert shares(10) == [0.2, 0.2, *[0.1] * 6]
    assert [batch_of(rank) for rank in (0, 7, 8, 17)] == [0, 7, 0, 1]


def squared(model: nn.Module, target: torch.Tensor) -> torch.Tensor:
    return (model(torch.ones(1, 1)) - target).square().sum()


def sgd(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def test_steps_by_hand() -> None:
    """w = 0, targets 1 and 3 with weights 3/4 and 1/4: losses 1 and 9, gradient -2*(3/4+3/4)=-3,
    mean loss 3, so lr = 0.1 * 3 / 9 = 1/30 and w = 0.1."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    batches = [(torch.tensor([[1.0]]),), (torch.tensor([[3.0]]),)]
    found = train_alone(model, batches, [0.75, 0.25], squared, sgd, 2)
    assert found.lr == pytest.approx(FALL * 3 / 9)
    assert found.losses[0] == pytest.approx([1.0, 9.0])
    assert found.losses[1] == pytest.approx([0.81, 8.41])
    assert unflatten(found.flat(), 2) == found


def test_no_gradient_gives_no_rate() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    found = train_alone(model, [(torch.ones(1, 1),)], [1.0], squared, sgd, 2)
    assert found.lr == 0
    assert blind(found, 1e-3) is not None


def test_agreement() -> None:
    ranks = [[row[0] for row in WANTED.losses], [row[1] for row in WANTED.losses]]
    assert disagreement(ranks, WANTED, 1e-6) is None
    assert verdict(ranks, WANTED, 1e-3) == "passed"
    off = [ranks[0], [4.0, 3.6, 3.0 + 0.003 * 3.1]]  # the mean of the first losses is 3
    assert disagreement(off, WANTED, 0.004) is None
    message = verdict(off, WANTED, 0.003)
    assert message.startswith("failed: rank 1's loss in step 3 is 3.0093, ")
    assert "3 (0.31% off, tolerance 0.30%)" in message


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_never_agrees(value: float) -> None:
    assert verdict([[2.0, value, 1.5]], WANTED, 1e9).startswith("failed: rank 0's loss in step 2")


def test_losses_that_stand_still_prove_nothing() -> None:
    still = Reference(0.5, [[2.0], [2.0], [2.0 + 1e-4]])
    assert verdict([[2.0, 2.0, 2.0]], still, 1e-3).startswith("skipped: the losses move by 0.01%")
    assert verdict([[2.0, 2.0, 2.1]], still, 1e-3).startswith("failed")
