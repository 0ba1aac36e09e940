"""Is the result right? Replicas are compared bit by bit, and values with what they should be."""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import nn


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
