"""Is the result right? Replicas are compared bit by bit, values with what they should be."""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import nn


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
