"""How much of a training step is communication that computing does not hide?

What you will learn: to time a step under DistributedDataParallel, in turns with the same step
without averaging gradients (`no_sync`), and to put an interval on the difference.

    $ torchrun --nproc-per-node 2 examples/ddp_exposed.py
    2 ranks, gloo, 4.2 M parameters, replicas equal: True
                    median ms   95 % interval
    step                60.97   57.27 to 65.05
    local compute       33.40   28.50 to 36.36
    exposed             28.89   20.91 to 31.65

BSD-3-Clause: copy this. Numbers: virtual machine, 2 cores, torch 2.15.
"""

import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ROUNDS, STEPS = 15, 3  # each round times a block of 3 steps of each kind


# [measure]
def time_block(step: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of a step, on the slowest rank. All ranks call it together."""
    dist.barrier()  # no clock starts while another rank is still busy with something else
    step()  # untimed: it finds the caches as the block before has left them
    torch.get_device_module(device).synchronize()  # does nothing on the CPU
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    torch.get_device_module(device).synchronize()  # an accelerator may only have queued the work
    elapsed = torch.tensor((time.perf_counter() - start) * 1e3 / STEPS, device=device)
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    return elapsed.item()


def median_ci(samples: Sequence[float]) -> tuple[float, float, float]:
    """The median and its 95 % interval: the k-th sample from either end. Needs 6 samples."""
    x, n = sorted(samples), len(samples)
    # the true median is below the k-th sample as rarely as n coins show fewer than k heads
    k = max(k for k in range(1, n) if sum(math.comb(n, i) for i in range(k)) <= 0.025 * 2**n)
    return statistics.median(x), x[k - 1], x[-k]


# [/measure]
def main() -> int:
    # [setup]
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        device = torch.device(device.type, dist.get_node_local_rank())
        torch.accelerator.set_device_index(device.index)
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, device_id=None if device.type == "cpu" else device)
    # [/setup]
    torch.manual_seed(dist.get_rank())  # each rank has data of its own; DDP sends rank 0's weights
    width = 1024 if device.type == "cpu" else 8192
    # [wrap]
    layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers).to(device))
    optimizer = torch.optim.SGD(model.parameters())
    x = torch.randn(64, width, device=device)

    def step(lr: float = 0.1) -> None:
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    def local_compute() -> None:
        with model.no_sync():  # around the forward pass as well, which prepares the averaging
            step(lr=0.0)  # costs the same, and leaves the replicas equal

    # [/wrap]
    for _ in range(4):
        step()  # DDP arranges its buckets anew in the second one
    gc.disable()  # a collection on one rank would stop them all
    rounds = []
    for _ in range(ROUNDS):
        a, b = time_block(step, device), time_block(local_compute, device)
        rounds.append((a, b, a - b))  # within a round, so that a drift of the machine cancels
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    extremes = torch.stack([flat, -flat])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    equal = torch.equal(extremes[0], -extremes[1])
    if dist.get_rank() == 0:
        size = f"{len(flat) / 1e6:.1f} M parameters, replicas equal: {equal}"
        print(f"{dist.get_world_size()} ranks, {backend}, {size}")
        print(f"{'':15}{'median ms':>10}   95 % interval")
        names = ("step", "local compute", "exposed")
        for name, ms in zip(names, zip(*rounds, strict=True), strict=True):
            print("{:15}{:10.2f}   {:.2f} to {:.2f}".format(name, *median_ci(ms)))
    dist.destroy_process_group()
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
