"""Is the result right? Replicas are compared bit by bit, averaged gradients with a reference."""

import hashlib
import math
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn

FEATURES = 96
CLASSES = 16
ROWS = 4  # a rank's batch


def digest(model: nn.Module) -> str:
    """A hash of all parameters, bit by bit; `not finite` where one is infinite or NaN."""
    hasher = hashlib.blake2b(digest_size=16)
    for parameter in model.parameters():
        if not bool(parameter.isfinite().all()):
            return "not finite"
        flat = parameter.detach().cpu().contiguous().flatten()
        hasher.update(flat.view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def compare_replicas(digests: list[str], ranks: list[int]) -> str | None:
    """What is wrong with the ranks' digests, or None. Digests are in the order of the ranks."""
    if "not finite" in digests:
        return f"parameters of rank {ranks[digests.index('not finite')]} are not finite"
    differing = [rank for rank, d in zip(ranks, digests, strict=True) if d != digests[0]]
    if not differing:
        return None
    names = ", ".join(map(str, differing[:8])) + (", ..." if len(differing) > 8 else "")
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


def gradient_error(
    wrap: Callable[[nn.Module], nn.Module],
    forward_context: Callable[[], object],
    device: torch.device,
    group: dist.ProcessGroup,
    loss_scale: float = 1.0,
) -> float:
    """How far the gradients that `wrap` averages over the group are from a reference.

    The reference is made by this process alone: the gradients of every rank's batch, one after
    the other, averaged in float64. Returned is the largest absolute difference, relative to the
    largest gradient of any rank; infinite where a gradient is not finite.

    All rows of a batch have the same input and other targets, so every weight's gradient is an
    outer product: a matrix of rank one, which PowerSGD of rank one must reproduce exactly.
    """
    torch.manual_seed(0)
    reference = _perceptron().to(device)
    # four steps: DDP rebuilds its buckets in the second, PowerSGD compresses from the third on
    model = wrap(_clone(reference))
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    for _ in range(4):
        model.zero_grad()
        _backward(model, rank, device, forward_context, loss_scale)
    total: list[torch.Tensor] = []
    peak = 0.0
    for other in range(world_size):
        reference.zero_grad()
        _backward(reference, other, device, forward_context, loss_scale)
        gradients = [g.double() for g in _gradients(reference)]
        total = [a + b for a, b in zip(total, gradients, strict=True)] if total else gradients
        peak = max(peak, *(g.abs().max().item() for g in gradients))
    errors = [
        (got.double() - want / world_size).abs().max().item() / peak
        for got, want in zip(_gradients(model), total, strict=True)
    ]
    return max(error if math.isfinite(error) else math.inf for error in errors)


def _perceptron() -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(FEATURES, FEATURES), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(FEATURES, CLASSES))


def _clone(model: nn.Sequential) -> nn.Sequential:
    clone = _perceptron().to(next(model.parameters()).device)
    clone.load_state_dict(model.state_dict())
    return clone


def _gradients(model: nn.Module) -> Iterator[torch.Tensor]:
    for parameter in model.parameters():
        assert parameter.grad is not None
        yield parameter.grad


def _backward(
    model: nn.Module,
    rank: int,
    device: torch.device,
    forward_context: Callable[[], object],
    loss_scale: float,
) -> None:
    inputs = torch.linspace(-1, 1, FEATURES).repeat(ROWS, 1).to(device)
    targets = (torch.arange(ROWS) * 5 + rank * 3).remainder(CLASSES).to(device)
    with forward_context():  # type: ignore[attr-defined]
        loss = nn.functional.cross_entropy(model(inputs), targets)
    (loss * loss_scale).backward()  # type: ignore[no-untyped-call]
