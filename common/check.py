"""Is the result right? Replicas are compared bit by bit, values with what they should be, and the
losses of n ranks with those of one process that trains on the same batches.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

CHECKED_STEPS = 3
FALL = 0.1  # of the loss in the first step, as its gradient predicts: a wrong gradient then shows


def digest(model: nn.Module) -> str:
    """A hash of all parameters, bit by bit; `not finite` where one is infinite or NaN."""
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
    odd = [str(rank) for rank, d in zip(ranks, digests, strict=True) if d != digests[0]]
    if not odd:
        return None
    names = ", ".join(odd[:8]) + (", ..." if odd[8:] else "")
    return f"after the steps the parameters of rank {names} differ from rank {ranks[0]}'s"


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference over the largest value wanted; infinite where one is not finite.

    Shapes alike, dense or sparse.
    """
    got, want = (x.detach().to_dense() if x.is_sparse else x.detach() for x in (got, want))
    error = float((got.double() - want.double()).abs().max())
    if error == 0:
        return 0.0
    peak = float(want.double().abs().max())
    return error / peak if peak > 0 and math.isfinite(error) else math.inf


def verdict(problem: str | None) -> str:
    """The `check` of a case: passed, or failed with the reason."""
    return f"failed: {problem}" if problem else "passed"


# -- do n ranks train as one process does? ---------------------------------------------------------


@dataclass(frozen=True)
class Reference:
    """Training in one process: losses [steps][batches], the gradient's norm [steps]."""

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
    """Train on all batches with `sgd`; the loss is the sum of theirs with these weights.

    lr = FALL * loss / |gradient|^2 in the first step: to first order the loss falls by FALL.
    """
    optimizer, rows, norms = sgd(model, 0.0), [], []
    for step in range(CHECKED_STEPS):
        optimizer.zero_grad()
        losses = []
        for batch, weight in zip(batches, weights, strict=True):
            loss = loss_of(model, batch)
            (loss * weight).backward()
            losses.append(float(loss.detach()))
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norms.append(float(torch.nn.utils.get_total_norm(gradients)))
        mean = abs(sum(x * w for x, w in zip(losses, weights, strict=True)))
        if step == 0 and 0 < norms[0] < math.inf:
            optimizer.param_groups[0]["lr"] = FALL * mean / norms[0] ** 2
        optimizer.step()
        rows.append(losses)
    return Reference(optimizer.param_groups[0]["lr"], rows, norms)


def compare_training(
    what: str, got: Sequence[float], want: Sequence[float], tolerance: float
) -> str | None:
    """The first step in which a loss or a norm is not that of one process; None if all are."""
    for step, (x, y) in enumerate(zip(got, want, strict=True), 1):
        off = abs(x - y) / max(abs(want[0]), 1e-12)
        if not off <= tolerance:  # nor is NaN
            problem = f"{what} in step {step} is {x:.6g}, in one eager process {y:.6g}"
            return f"{problem} ({off:.2%} off, tolerance {tolerance:.2%})"
    return None
