"""Models for `--model tests.communicating_models:NAME` whose step communicates in torch's default
group, as models of the field do."""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

Made = tuple[nn.Module, Any, Any]


def made(model: nn.Module, device: torch.device, rows: int = 8) -> Made:
    """With a batch of 8 columns."""
    return model.to(device), torch.randn(rows, 8, device=device), lambda y: y.square().mean()


class Sum(torch.autograd.Function):
    """The sum over the ranks of a group, of gradients too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return Sum.apply(gradient, ctx.group), None


class Exchange(torch.autograd.Function):
    """An equal share of the rows to each rank, of gradients too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        dist.all_to_all_single(y, x.contiguous())
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return Exchange.apply(gradient)


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(32, 16), nn.Linear(32, 16)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return normalize(self.left(x)), normalize(self.right(y))


def contrast(output: tuple[Tensor, Tensor]) -> Tensor:
    """Compare each row with the rows of all ranks."""
    left, right = output
    rank, rows = dist.get_rank(), len(left)
    every = [torch.empty_like(right) for _ in range(dist.get_world_size())]
    dist.all_gather(every, right.detach())
    every[rank] = right  # with its gradient
    targets = torch.arange(rank * rows, (rank + 1) * rows, device=left.device)
    return cross_entropy(10 * left @ torch.cat(every).T, targets)


def towers(device: torch.device, batch: int = 8) -> Made:
    inputs = (torch.randn(batch, 32, device=device), torch.randn(batch, 32, device=device))
    return TwoTowers().to(device), inputs, contrast


class SharedNorm(nn.Module):
    """Normalize by mean and variance over the batches of all ranks. nn.SyncBatchNorm does the same,
    but not on the CPU."""

    def forward(self, x: Tensor) -> Tensor:
        sums = Sum.apply(torch.stack([x.mean(0), x.square().mean(0)]), None)
        mean, square = sums / dist.get_world_size()
        return (x - mean) / (square - mean.square() + 1e-5).sqrt()


def norm(device: torch.device) -> Made:
    return made(nn.Sequential(nn.Linear(8, 16), SharedNorm(), nn.Linear(16, 4)), device)


def sync_batch_norm(device: torch.device) -> Made:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    return made(nn.SyncBatchNorm.convert_sync_batchnorm(model), device)


class InGroup(nn.Linear):
    """Averages its output over a group of its own, of which the last rank is no member."""

    def __init__(self) -> None:
        super().__init__(8, 4)
        ranks = list(range(max(1, dist.get_world_size() - 1)))
        # ranks outside the case do not see these groups; with local synchronization, neither does
        # the last rank of the case
        dist.new_group(ranks)
        self.group = dist.new_group(ranks, use_local_synchronization=True)
        self.is_member = dist.get_rank() in ranks

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return Sum.apply(y, self.group) if self.is_member else y


def own_group(device: torch.device) -> Made:
    return made(InGroup(), device)


class Experts(nn.Module):
    """An expert on each rank. A rank sends an equal share of its rows to each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 8)
        torch.manual_seed(dist.get_rank())
        self.expert = nn.Linear(8, 8)  # differs between ranks
        self._ddp_params_and_buffers_to_ignore = ["expert.weight", "expert.bias"]

    def forward(self, x: Tensor) -> Tensor:
        return Exchange.apply(self.expert(Exchange.apply(self.router(x))))


def experts(device: torch.device) -> Made:
    return made(Experts(), device, 12)


def plain(device: torch.device) -> Made:
    return made(nn.Linear(8, 4), device)


class Leaves(nn.Linear):
    """The last rank leaves in one of its forward passes, while the others wait for it."""

    def __init__(self, passes: int) -> None:
        super().__init__(8, 4)
        self.left = passes

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left == 0 and dist.get_rank() == dist.get_world_size() - 1:
            sys.exit(f"the last of {dist.get_world_size()} ranks left")
        return Sum.apply(super().forward(x), None)


def leaves(device: torch.device, passes: int = 8) -> Made:
    return made(Leaves(passes), device)


def fails_before_group(device: torch.device) -> Made:
    """The last rank fails before it creates a group with the others."""
    if dist.get_rank() == dist.get_world_size() - 1:
        raise RuntimeError("no expert here")
    dist.new_group()
    return towers(device)
