"""Is the result right? Replicas are compared bit by bit, and values with what they should be.

The losses of n ranks are compared with those of one process that trains on the same batches.
"""

import hashlib
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


def digest(model: nn.Module) -> str:
    """A hash of all parameters, bit by bit; `not finite` if a value is infinite or NaN."""
    hasher = hashlib.blake2b(digest_size=16)
    for parameter in model.parameters():
        if not bool(parameter.isfinite().all()):
            return "not finite"
        flat = parameter.detach().cpu().contiguous().flatten()
        hasher.update(flat.view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def compare_replicas(digests: Sequence[str], ranks: Sequence[int]) -> str | None:
    """What is wrong with the digests, one for each of the ranks; None if they are alike."""
    if "not finite" in digests:
        return f"parameters of rank {ranks[list(digests).index('not finite')]} are not finite"
    pairs = zip(ranks, digests, strict=True)
    different = [str(rank) for rank, hashed in pairs if hashed != digests[0]]
    if not different:
        return None
    names = ", ".join(different[:8])
    if len(different) > 8:
        names += ", ..."
    return f"after the steps the parameters of rank {names} differ from rank {ranks[0]}'s"


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference / the largest value in `want`; infinite if a value is not finite.

    Both have the same shape. Each may be dense or sparse.
    """
    wanted = dense(want)
    error = float((dense(got) - wanted).abs().max())
    if error == 0:
        return 0.0
    largest = float(wanted.abs().max())
    return error / largest if largest > 0 and math.isfinite(error) else math.inf


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """In float64, without its gradient."""
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    return tensor.double()


def verdict(problem: str | None) -> str:
    """The `check` of a case: passed, or failed with the reason."""
    return f"failed: {problem}" if problem else "passed"


# -- do n ranks train as one process does? ---------------------------------------------------------


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
) -> Reference:
    """Train on all batches with `sgd`. The loss is the weighted sum of the batches' losses.

    lr = FALL * |loss| / |gradient|^2 in the first step: to first order the loss falls by FALL.
    """
    optimizer = sgd(model, 0.0)
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
        if step == 0 and 0 < norms[0] < math.inf:
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
