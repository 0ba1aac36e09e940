"""How much of an FSDP2 step is communication that does not overlap with computation?

What you will learn: how to shard a model with `fully_shard`, and how to time its step alternately
with a twin: a copy of the model whose collectives send nothing. exposed = step - step of the twin.

    $ torchrun --nproc-per-node 2 examples/fsdp_exposed.py
                    median ms   95% interval
    step               162.96   127.11 to 183.22
    local compute       68.05   64.32 to 85.12
    exposed             74.22   45.77 to 120.91
    2 ranks, gloo, output correct: True

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
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend `fake`
from torch import nn
from torch.distributed.fsdp import fully_shard

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
    # [wrap]
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        device = torch.device(device.type, dist.get_node_local_rank())
        torch.accelerator.set_device_index(device.index)
    backend = dist.get_default_backend_for_device(device)
    device_id = None if device.type == "cpu" else device
    timeout = timedelta(seconds=120)  # a hang ends with an error
    dist.init_process_group(backend, timeout=timeout, device_id=device_id)
    torch.set_flush_denormal(True)  # the twin computes with garbage; denormals would be slow
    width = 1024 if device.type == "cpu" else 8192

    def build(mesh: dist.DeviceMesh | None = None) -> nn.Module:
        torch.manual_seed(0)  # the same weights on all ranks
        layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(4)]
        model = nn.Sequential(*layers)
        if mesh:  # without a mesh the model is not sharded, to check the output
            for unit in (*model, model):  # the weights of a unit are gathered when they are used
                fully_shard(unit, mesh=mesh)
        return model

    # DTensor treats meshes with equal names as the same mesh, so the twin's dimension is renamed.
    new_mesh = partial(dist.init_device_mesh, device.type, (dist.get_world_size(),))
    with device:
        x = torch.randn(64, width)  # before `build` sets the seed: different data on each rank
        expected = build()(x)
        model = build(new_mesh(mesh_dim_names=("dp",)))
        twin = build(new_mesh(mesh_dim_names=("dp fake",), backend_override={"dp fake": "fake"}))
    same = torch.allclose(model(x), expected, rtol=1e-4, atol=1e-5)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    step = partial(train, model, torch.optim.SGD(model.parameters(), lr=0.1))
    local_compute = partial(train, twin, torch.optim.SGD(twin.parameters(), lr=0.0))
    # [/wrap]
    gc.disable()  # a collection on one rank would delay all ranks
    times: dict[Callable[[], object], list[float]] = {step: [], local_compute: []}
    for i in range(ROUNDS):  # in alternating order, so that a gradual slowdown cancels out
        for step_fn in (step, local_compute) if i % 2 == 0 else (local_compute, step):
            times[step_fn].append(time_block(step_fn, device))
    exposed = [a - b for a, b in zip(times[step], times[local_compute], strict=True)]
    if dist.get_rank() == 0:
        print_rows({"step": times[step], "local compute": times[local_compute], "exposed": exposed})
        print(f"{dist.get_world_size()} ranks, {backend}, output correct: {same}")
    dist.destroy_process_group()
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
