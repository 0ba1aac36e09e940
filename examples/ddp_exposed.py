"""How much of a training step is communication that does not overlap with computation?

What you will learn: how to time a step under DistributedDataParallel alternately with the same step
without averaging gradients (`no_sync`), and how to compute an interval for the difference.

    $ torchrun --nproc-per-node 2 examples/ddp_exposed.py
                    median ms   95% interval
    step                92.66   78.78 to 99.68
    local compute       60.22   52.15 to 69.91
    exposed             29.16   20.63 to 35.51
    2 ranks, gloo, 4.2 M parameters, replicas equal: True

exposed is the median of the differences per round, not the difference of the medians.

BSD-3-Clause: copy this. Numbers: virtual machine, 2 cores, torch 2.15.
"""

# [measure]
import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ROUNDS, STEPS = 16, 4  # each round times a block of 4 steps of each kind


def time_block(step: Callable[[], object], device: torch.device) -> float:
    """The step time in ms: the median over STEPS, on the slowest rank. All ranks must call it."""
    cpu = device.type == "cpu"

    def stamp() -> Any:  # an accelerator runs asynchronously, so record an event
        if cpu:
            return time.perf_counter() * 1e3
        event = torch.get_device_module(device).Event(enable_timing=True)
        event.record()
        return event

    dist.barrier()  # all ranks start their clocks together
    step()  # untimed: the previous block evicted this step's data from the caches
    stamps = [stamp()]
    for _ in range(STEPS):
        step()
        stamps.append(stamp())
    torch.get_device_module(device).synchronize()  # no-op on the CPU
    times = [b - a if cpu else a.elapsed_time(b) for a, b in pairwise(stamps)]
    slowest = torch.tensor(times, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)  # the slowest rank of each step
    return statistics.median(slowest.tolist())


def median_ci(samples: Sequence[float]) -> tuple[float, float, float]:
    """The median and its 95% interval, from the k-th smallest to the k-th largest sample."""
    x = sorted(samples)
    n = len(x)
    assert n >= 6, "a 95% interval requires at least 6 samples"
    k = 1  # the largest k with P(fewer than k of n samples are below the median) <= 2.5%
    while sum(math.comb(n, i) for i in range(k + 1)) <= 0.025 * 2**n:
        k += 1
    return statistics.median(x), x[k - 1], x[-k]


def print_rows(rows: dict[str, list[float]]) -> None:
    print(f"{'':15}{'median ms':>10}   95% interval")
    for name, samples in rows.items():
        median, low, high = median_ci(samples)
        print(f"{name:15}{median:10.2f}   {low:.2f} to {high:.2f}")


# [/measure]


def main() -> int:
    # [setup]
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        device = torch.device(device.type, dist.get_node_local_rank())
        torch.accelerator.set_device_index(device.index)
    backend = dist.get_default_backend_for_device(device)
    device_id = None if device.type == "cpu" else device
    timeout = timedelta(seconds=120)  # a hang ends with an error
    dist.init_process_group(backend, timeout=timeout, device_id=device_id)
    # [/setup]
    # [wrap]
    torch.manual_seed(dist.get_rank())  # different data on each rank; DDP sends rank 0's weights
    width = 1024 if device.type == "cpu" else 8192
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(4)]
    model = DistributedDataParallel(nn.Sequential(*layers).to(device))
    x = torch.randn(64, width, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # with a learning rate of 0 a step takes as long, and the replicas stay equal. With Adam, a
    # second optimizer would need memory for its own moments
    frozen = torch.optim.SGD(model.parameters(), lr=0.0)

    def step(optimizer: torch.optim.Optimizer = optimizer) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    def local_compute() -> None:
        with model.no_sync():  # must include the forward pass, in which DDP prepares the averaging
            step(frozen)

    # [/wrap]
    # [turns]
    for _ in range(4):
        step()  # DDP rebuilds its buckets in the second step
    gc.disable()  # a collection on one rank would delay all ranks
    times: dict[Callable[[], object], list[float]] = {step: [], local_compute: []}
    for i in range(ROUNDS):  # in alternating order, so that a gradual slowdown cancels out
        for step_fn in (step, local_compute) if i % 2 == 0 else (local_compute, step):
            times[step_fn].append(time_block(step_fn, device))
    exposed = [a - b for a, b in zip(times[step], times[local_compute], strict=True)]
    if dist.get_rank() == 0:
        print_rows({"step": times[step], "local compute": times[local_compute], "exposed": exposed})
    # [/turns]
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    extremes = torch.stack([flat, -flat])  # max(-x) = -min(x)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    equal = torch.equal(extremes[0], -extremes[1])
    if dist.get_rank() == 0:
        size = f"{len(flat) / 1e6:.1f} M parameters"
        print(f"{dist.get_world_size()} ranks, {backend}, {size}, replicas equal: {equal}")
    dist.destroy_process_group()
    return 0 if equal else 1


if __name__ == "__main__":
    raise SystemExit(main())
