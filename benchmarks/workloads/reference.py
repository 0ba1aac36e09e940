"""Check parallel training: compare its losses with those of one process on the same batches."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

CHECKED_STEPS = 3
# The learning rate is chosen so that the first step lowers the loss by this fraction, to first
# order: large enough for a wrong gradient to show in the losses.
FALL = 0.1


@dataclass(frozen=True)
class Reference:
    """Training in one process. losses: [steps][batches]. norms: of the gradient, [steps]."""

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
    average: Callable[[torch.Tensor], object] = lambda tensor: None,
) -> Reference:
    """Train for CHECKED_STEPS steps in this process, on all batches in each step.

    weights: the loss of a step is the weighted sum of the losses of the batches.
    optimize: creates the optimizer from the parameters. By default it is `sgd` with the learning
    rate FALL * |loss| / |gradient|^2 of the first step, which lowers the loss by the fraction FALL
    to first order. average: replaces a tensor by its mean over processes. It is applied to the loss
    and to the gradients of all parameters but those that the model makes DDP ignore.
    """
    optimizer = optimize(model.parameters()) if optimize else sgd(model, 0.0)
    lr, ignored = 0.0, getattr(model, "_ddp_params_and_buffers_to_ignore", ())
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
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        for name, gradient in gradients.items():
            if name not in ignored:
                average(gradient)
        norm = torch.nn.utils.get_total_norm(gradients.values())
        average(norm)
        average(mean := torch.tensor(total, dtype=torch.float64))
        norms.append(float(norm))
        if step == 0 and 0 < norms[0] < math.inf and not optimize:
            lr = FALL * abs(float(mean)) / norms[0] ** 2
            optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
    return Reference(lr, losses, norms)


def compare_training(
    what: str, got: Sequence[float], want: Sequence[float], tolerance: float
) -> str | None:
    """Describe the first step in which n ranks (`got`) differ from one process (`want`); None if
    all agree. what: the name of the values. tolerance: as a fraction of the first one."""
    scale = max(abs(want[0]), 1e-12)
    for step, (value, wanted) in enumerate(zip(got, want, strict=True), 1):
        error = abs(value - wanted) / scale
        if not error <= tolerance:  # NaN also fails
            problem = (
                f"{what} in step {step} is {value:.6g}, but {wanted:.6g} in the eager reference"
            )
            return f"{problem} ({error:.2%} off, tolerance {tolerance:.2%})"
    return None
