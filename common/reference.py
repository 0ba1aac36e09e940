"""Training steps of one process against those of several: do their losses agree?

The learning rate is chosen so that the losses fall by about a tenth a step: with a smaller one a
gradient that is wrong, or not averaged, would leave them as they are, and nothing could be told.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

FALL = 0.1  # of the loss in the first step, as the gradient predicts it
MAX_BATCHES = 8  # different ones; more ranks share them, so that the reference costs no more

Batch = tuple[Any, ...]


@dataclass(frozen=True)
class Reference:
    """What one process has seen: the learning rate, and its losses, [steps][batches]."""

    lr: float
    losses: list[list[float]]

    def flat(self) -> list[float]:
        return [self.lr, *(loss for row in self.losses for loss in row)]


def unflatten(values: Sequence[float], steps: int) -> Reference:
    """The reverse of Reference.flat."""
    width = (len(values) - 1) // steps
    rows = [list(values[1 + i * width : 1 + (i + 1) * width]) for i in range(steps)]
    return Reference(values[0], rows)


def batch_of(rank: int) -> int:
    """Which batch a rank trains on."""
    return rank % MAX_BATCHES


def shares(ranks: int) -> list[float]:
    """Which share of the ranks train on each batch."""
    counts = [0] * min(ranks, MAX_BATCHES)
    for rank in range(ranks):
        counts[batch_of(rank)] += 1
    return [count / ranks for count in counts]


def train_alone(
    model: nn.Module,
    batches: Sequence[Batch],
    weights: Sequence[float],
    loss_of: Callable[..., torch.Tensor],
    optimizer_of: Callable[[nn.Module, float], torch.optim.Optimizer],
    steps: int,
) -> Reference:
    """Train on all batches in turn, their gradients added up with these weights.

    With the weights of `shares` that is what averaging over the ranks must give. The learning
    rate is FALL * loss / |gradient|^2, the step that lets the loss fall by FALL to first order
    (Polyak 1987, "Introduction to Optimization", section 5.3, with FALL of the distance to 0).
    """
    optimizer = None
    rate = 0.0
    losses: list[list[float]] = []
    for _ in range(steps):
        row = []
        for batch, weight in zip(batches, weights, strict=True):
            loss = loss_of(model, *batch)
            (loss * weight).backward()  # type: ignore[no-untyped-call]
            row.append(float(loss.detach()))
        losses.append(row)
        if optimizer is None:
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            square = float(sum(g.detach().double().square().sum() for g in gradients))
            mean = abs(sum(x * w for x, w in zip(row, weights, strict=True)))
            rate = FALL * mean / square if square > 0 and math.isfinite(mean / square) else 0.0
            optimizer = optimizer_of(model, rate)
        optimizer.step()
        optimizer.zero_grad()
    return Reference(rate, losses)


def disagreement(
    got: Sequence[Sequence[float]], reference: Reference, tolerance: float
) -> str | None:
    """What is wrong with the losses of the ranks, or None. got: [ranks][steps].

    tolerance: of the difference over the mean of the first losses of the reference. One that is
    not a number is never within it.
    """
    scale = _scale(reference)
    worst: tuple[float, str] | None = None
    for rank, row in enumerate(got):
        for step, (loss, wanted) in enumerate(zip(row, reference.losses, strict=True)):
            want = wanted[batch_of(rank)]
            error = abs(loss - want) / scale
            error = math.inf if math.isnan(error) else error
            if error > tolerance and (worst is None or error > worst[0]):
                worst = (
                    error,
                    f"rank {rank}'s loss in step {step + 1} is {loss:.6g}, with one eager "
                    f"process {want:.6g} ({error:.2%} off, tolerance {tolerance:.2%})",
                )
    return None if worst is None else worst[1]


def blind(reference: Reference, tolerance: float) -> str | None:
    """Why the losses could not have shown that the updates are missing, or None."""
    first, last = (sum(row) / len(row) for row in (reference.losses[0], reference.losses[-1]))
    moved = abs(last - first) / _scale(reference)
    if moved > tolerance:
        return None
    return f"the losses move by {moved:.2%} only, too little to show a wrong update"


def verdict(got: Sequence[Sequence[float]], reference: Reference, tolerance: float) -> str:
    """A case's check: passed, failed, or skipped where it could not have failed."""
    wrong = disagreement(got, reference, tolerance)
    unseen = blind(reference, tolerance)
    return f"failed: {wrong}" if wrong else f"skipped: {unseen}" if unseen else "passed"


def _scale(reference: Reference) -> float:
    first = reference.losses[0]
    return max(sum(abs(loss) for loss in first) / len(first), 1e-12)
