"""Do n ranks train as one process does? Their losses are compared on the same batches."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

CHECKED_STEPS = 3


# The learning rate lets the loss fall by this fraction in the first step, as the gradient predicts.
# With a fall so large a wrong gradient shows.
FALL = 0.1


@dataclass(frozen=True)
class Reference:
    """Training in one process: losses [steps][batches], norms of the gradient [steps]."""

    lr: float
    losses: list[list[float]]
    norms: list[float]


def sgd(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def train_alone(
    model: nn.Module,
    batches: Sequence[Any],
    loss_of: Callable[[nn.Module, Any], torch.Tensor],
    weights: Sequence[float] = (1.0,),
    optimize: Callable[[Any], torch.optim.Optimizer] | None = None,
) -> Reference:
    """Train on all batches. The loss is the weighted sum of the batches' losses.

    optimize: makes the optimizer from the parameters; by default `sgd`, with the rate lr = FALL *
    |loss| / |gradient|^2 of the first step: to first order the loss falls by FALL.
    """
    optimizer = optimize(model.parameters()) if optimize else sgd(model, 0.0)
    lr = 0.0
    losses: list[list[float]] = []
    norms: list[float] = []
    for step in range(CHECKED_STEPS):
        optimizer.zero_grad()
        losses.append([])
        total = 0.0
        for batch, weight in zip(batches, weights, strict=True):
            loss = loss_of(model, batch)
            (loss * weight).backward()
            losses[step].append(float(loss.detach()))
            total += losses[step][-1] * weight
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norms.append(float(torch.nn.utils.get_total_norm(gradients)))
        if step == 0 and 0 < norms[0] < math.inf and not optimize:
            lr = FALL * abs(total) / norms[0] ** 2
            optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
    return Reference(lr, losses, norms)


def compare_training(
    what: str, got: Sequence[float], want: Sequence[float], tolerance: float
) -> str | None:
    """The first step whose loss or norm differs from that of one process; None if there is none.

    got, want: [steps], of n ranks and of one process. tolerance: relative to the first one wanted.
    """
    scale = max(abs(want[0]), 1e-12)
    for step, (value, wanted) in enumerate(zip(got, want, strict=True), 1):
        error = abs(value - wanted) / scale
        if not error <= tolerance:  # NaN is not, either
            problem = f"{what} in step {step} is {value:.6g}, in one eager process {wanted:.6g}"
            return f"{problem} ({error:.2%} off, tolerance {tolerance:.2%})"
    return None
