"""Do the communication hooks of ddp_sweep.py average gradients over all ranks? Over gloo.

    torchrun --nproc-per-node 2 tests/average_by_hooks.py

Each rank computes the reference from the batches of all ranks. Prints a line for each hook and one
for local compute: the error relative to the largest gradient.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import ddp_sweep

ACCUMULATE = 3  # passes over the same batch, whose mean is the gradient of one pass


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(96, 96) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(96, 16))


def batch_of(rank: int) -> ddp_sweep.Batch:
    targets = (torch.arange(4) * 5 + rank * 3) % 16
    loss_of = partial(nn.functional.cross_entropy, target=targets)
    return (torch.linspace(-1, 1, 96).repeat(4, 1),), {}, loss_of


def gradients_of(model: Any, rank: int, local: bool = False) -> torch.Tensor:
    """All gradients of a step on the batch of a rank, as one vector."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = ddp_sweep.training_step(model, batch_of(rank), optimizer, "fp32", ACCUMULATE, not local)
    for _ in range(ddp_sweep.SETTLING_STEPS):
        step()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.group.WORLD
    assert world is not None
    alone = [gradients_of(make_model(), each) for each in range(dist.get_world_size())]
    average = torch.stack(alone).mean(0)
    exact = [name for name in ddp_sweep.HOOKS if name != "powersgd"]
    for name in [*exact, "local"]:
        local = name == "local"
        # small enough for several buckets
        ddp = ddp_sweep.wrap(make_model(), world, 0.05, "none" if local else name)
        expected = alone[rank] if local else average
        error = (gradients_of(ddp, rank, local) - expected).abs().max() / expected.abs().max()
        if rank == 0:
            print(f"{name} {float(error):.3g}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
