"""Checks of results: replicas must be bitwise equal, and values close to their reference."""

import hashlib
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from harness.cli import cut

NOT_FINITE = "not finite"  # returned instead of a digest


def digest(model: nn.Module) -> str:
    """`digest_of` the parameters of a model."""
    return digest_of(model.parameters())


def digest_of(tensors: Iterable[Tensor]) -> str:
    """A hash of the bits of tensors; `not finite` if a value is infinite or NaN."""
    hasher = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        if tensor.is_sparse:  # equal values may be stored in different orders
            tensor = tensor.detach().to_dense()
        if not bool(tensor.isfinite().all()):
            return NOT_FINITE
        flat = tensor.detach().cpu().contiguous().flatten()
        hasher.update(flat.view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def compare_replicas(
    digests: Sequence[str], ranks: Sequence[int], what: str = "parameters"
) -> str | None:
    """Return why replicas on these ranks differ or are not finite; None if they are equal."""
    if NOT_FINITE in digests:
        return f"{what} of rank {ranks[list(digests).index(NOT_FINITE)]} are not finite"
    pairs = zip(ranks, digests, strict=True)
    different = [rank for rank, hashed in pairs if hashed != digests[0]]
    if not different:
        return None
    return f"after the steps the {what} of rank {cut(different)} differ from rank {ranks[0]}'s"


def relative_error(got: Tensor, want: Tensor) -> float:
    """Return the largest absolute difference of two tensors, dense or sparse, divided by the
    largest absolute value in `want`; infinite if a value is not finite."""
    wanted = dense(want)
    error = float((dense(got) - wanted).abs().max())
    if error == 0:
        return 0.0
    largest = float(wanted.abs().max())
    return error / largest if largest > 0 and math.isfinite(error) else math.inf


def dense(tensor: Tensor) -> Tensor:
    """Return a dense copy in float64, detached from the graph."""
    return (tensor.to_dense() if tensor.is_sparse else tensor).detach().double()


def verdict(problem: str | None) -> str:
    """Return the `check` of a case: `passed`, or `failed: problem`."""
    return f"failed: {problem}" if problem else "passed"
