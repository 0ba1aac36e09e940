"""Do DDP's hooks of ddp_sweep.py average the gradients of all ranks? Run by torchrun over gloo.

    torchrun --nproc-per-node 2 tests/average_by_hooks.py

Each rank makes the reference by itself, from the batches of all ranks. Prints a line for each hook:
its name, and the error relative to the largest gradient.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import ddp_sweep


def gradients_of(model: nn.Module, rank: int) -> torch.Tensor:
    """All gradients for the batch of a rank, as one row."""
    model.zero_grad()
    inputs = torch.linspace(-1, 1, 96).repeat(4, 1)
    targets = (torch.arange(4) * 5 + rank * 3) % 16
    nn.functional.cross_entropy(model(inputs), targets).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def error_of(hook: str) -> float:
    torch.manual_seed(0)
    layers = [nn.Linear(96, 96) for _ in range(4)]
    model = nn.Sequential(*layers, nn.Linear(96, 16))
    gradients = torch.stack([gradients_of(model, rank) for rank in range(dist.get_world_size())])
    assert dist.group.WORLD is not None
    # so small that there are several buckets
    ddp = ddp_sweep.wrap(model, dist.group.WORLD, bucket_mb=0.05, hook=hook)
    for _ in range(ddp_sweep.SETTLING_STEPS):
        averaged = gradients_of(ddp, dist.get_rank())
    largest_error = (averaged - gradients.double().mean(0)).abs().max()
    return float(largest_error / gradients.abs().max())


def main() -> None:
    dist.init_process_group("gloo")
    for hook in ddp_sweep.HOOKS:
        error = error_of(hook)
        if dist.get_rank() == 0:
            print(f"{hook} {error:.3g}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
