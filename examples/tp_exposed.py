"""How much of a step is the communication of one mesh axis, e.g. of tensor parallelism?

What you will learn: how to build the model again on a mesh in which one axis uses the backend
`fake`, which sends nothing. This twin computes garbage, but its computation takes as long as that
of the real model. exposed = step - step of the twin.

    $ torchrun --nproc-per-node 2 examples/tp_exposed.py
    2 ranks, gloo, ('dp', 'tp') = (1, 2), output correct: True
                    median ms   95% interval
    step                25.66   23.63 to 28.87
    exposed dp           0.83   -3.25 to 3.41
    exposed tp           9.16   6.80 to 12.16

With 2 ranks, the axis dp has one rank, so exposed dp is about 0.

BSD-3-Clause: copy this. Numbers: virtual machine, 2 cores, torch 2.15.
"""

import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as tp
import torch.testing._internal.distributed.fake_pg  # registers the backend `fake`
from torch import nn
from torch.distributed.fsdp import fully_shard

ROUNDS, STEPS = 16, 2  # each round times a block of 2 steps on each mesh


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


# [wrap]
def build_model(width: int, mesh: dist.DeviceMesh | None = None) -> nn.Module:
    torch.manual_seed(0)  # the same weights on all ranks
    sizes = [(width, 3 * width), (3 * width, width)] * 2
    layers = [nn.Sequential(nn.Linear(*size), nn.ReLU()) for size in sizes]
    model = nn.Sequential(*layers)
    if mesh is None:
        return model
    dp_mesh, tp_mesh = (mesh[name] for name in mesh.mesh_dim_names or ())
    styles = [tp.ColwiseParallel(), tp.RowwiseParallel()] * 2
    for layer, style in zip(layers, styles, strict=True):
        tp.parallelize_module(layer, tp_mesh, {"0": style})
        fully_shard(layer, mesh=dp_mesh)
    fully_shard(model, mesh=dp_mesh)
    return model


# [/wrap]
def train(model: nn.Module, x: torch.Tensor) -> None:
    model.zero_grad()
    model(x).square().mean().backward()


def main() -> int:
    torch.set_flush_denormal(True)  # garbage may contain denormals, which are slow on CPUs
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        device = torch.device(device.type, dist.get_node_local_rank())
        torch.accelerator.set_device_index(device.index)
    backend = dist.get_default_backend_for_device(device)
    device_id = None if device.type == "cpu" else device
    timeout = timedelta(seconds=120)  # a hang ends with an error
    dist.init_process_group(backend, timeout=timeout, device_id=device_id)
    ranks = dist.get_world_size()
    width = 128 if device.type == "cpu" else 6144
    # [fake]
    names = ("dp", "tp")
    shape = (1, ranks) if ranks % 2 else (ranks // 2, 2)
    torch.manual_seed(dist.get_rank() // shape[1])  # ranks of a tp group use the same batch
    new_mesh = partial(dist.init_device_mesh, device.type, shape)
    with device:
        x = torch.randn(1024, width)
        plain = build_model(width)
        models = {"step": build_model(width, new_mesh(mesh_dim_names=names))}
        for axis in names:
            # DTensor treats meshes with equal names as the same mesh, and would use its groups
            twin = {name: f"{name} without {axis}" for name in names}
            fake: Any = {twin[axis]: "fake"}
            mesh = new_mesh(mesh_dim_names=tuple(twin.values()), backend_override=fake)
            models[f"exposed {axis}"] = build_model(width, mesh)
    # [/fake]
    same = torch.allclose(models["step"](x), plain(x), rtol=1e-4, atol=1e-5)
    gc.disable()  # a collection on one rank would delay all ranks
    times: dict[str, list[float]] = {name: [] for name in models}
    for i in range(ROUNDS):  # in alternating order, so that a gradual slowdown cancels out
        for name in models if i % 2 == 0 else reversed(models):
            step = partial(train, models[name], x)
            times[name].append(time_block(step, device))
    if dist.get_rank() == 0:
        print(f"{ranks} ranks, {backend}, {names} = {shape}, output correct: {same}")
        print(f"{'':15}{'median ms':>10}   95% interval")
        for name, ms in times.items():
            if name != "step":
                ms = [step - faked for step, faked in zip(times["step"], ms, strict=True)]
            median, low, high = median_ci(ms)
            print(f"{name:15}{median:10.2f}   {low:.2f} to {high:.2f}")
    dist.destroy_process_group()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
