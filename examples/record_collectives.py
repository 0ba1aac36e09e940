"""Which collectives does a training step call? Record them for replay.py.

What you will learn: how to read torch's flight recorder, which keeps the last 2,000 collectives of
a process with group, sizes and time. If you pass a folder, each rank writes fr_RANK.json into it,
for benchmarks/replay.py. `--ddp` uses DDP instead of FSDP2 and tensor parallelism.

    $ torchrun --nproc-per-node 4 examples/record_collectives.py
    4 ranks, gloo, dp x tp = (2, 2), 3 steps recorded
    step   111.36 ms   95% interval 91.68 to 131.46
    op             group            MiB  per step
    all_gather     mesh_dp        0.501         4
    all_gather     mesh_dp        0.502         4
    all_reduce     mesh_dp        0.501         2
    all_reduce     mesh_dp        0.502         2
    all_reduce     mesh_tp        0.031         3

MiB: output of one call on one rank. per step: number of such calls in a step. The all_reduce on
mesh_dp is FSDP2's reduce-scatter, which gloo implements as an all-reduce.

BSD-3-Clause: copy this. Numbers: virtual machine, 2 cores, torch 2.15.
"""

import contextlib
import itertools
import json
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as tp
from torch import nn
from torch.distributed.fsdp import fully_shard

STEPS, RECORDED = 10, 3


# [record]
def record(folder: str, started_ns: int, steps: int) -> Any:
    """Call it on all ranks after `steps` steps, the first of which began at `started_ns`."""
    c10d: Any = torch._C._distributed_c10d
    texts = []  # each backend has its own recorder
    with contextlib.suppress(TypeError):  # no such argument in torch 2.14 and older
        texts.append(c10d._dump_fr_trace_json(backend="nccl2"))
    if hasattr(c10d, "_dump_nccl_trace_json"):  # the older NCCL backend
        texts.append(c10d._dump_nccl_trace_json())
    texts.append(c10d._dump_fr_trace_json())  # gloo
    traces = [json.loads(text) for text in texts]
    recorded = [trace for trace in traces if trace.get("entries")]
    trace = recorded[0] if recorded else {"entries": []}
    trace |= {"started_ns": started_ns, "ended_ns": time.time_ns(), "steps": steps}
    rank = dist.get_rank()
    trace |= {"rank": rank, "world_size": dist.get_world_size()}
    groups = dist.distributed_c10d._world.pg_map
    trace["groups"] = {g.group_name: dist.get_process_group_ranks(g) for g in groups}
    if folder:
        Path(folder).mkdir(exist_ok=True)
        Path(folder, f"fr_{rank}.json").write_text(json.dumps(trace))
    return trace


# [/record]
def build(mesh: dist.DeviceMesh, ddp: bool) -> nn.Module:
    torch.manual_seed(0)  # the same weights on all ranks
    sizes = [(256, 1024), (1024, 256)] * 2
    layers = [nn.Sequential(nn.Linear(*size), nn.ReLU()) for size in sizes]
    model = nn.Sequential(*layers)
    if ddp:
        return nn.parallel.DistributedDataParallel(model)
    styles = [tp.ColwiseParallel(), tp.RowwiseParallel()] * 2
    for layer, style in zip(layers, styles, strict=True):
        tp.parallelize_module(layer, mesh["tp"], {"0": style})
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def median_ci(samples: Sequence[float]) -> tuple[float, float, float]:
    """The median and its 95% interval, from the k-th smallest to the k-th largest sample."""
    x = sorted(samples)
    n = len(x)
    assert n >= 6, "a 95% interval requires at least 6 samples"
    k = 1  # the largest k with P(fewer than k of n samples are below the median) <= 2.5%
    while sum(math.comb(n, i) for i in range(k + 1)) <= 0.025 * 2**n:
        k += 1
    return statistics.median(x), x[k - 1], x[-k]


def main() -> None:
    ddp = "--ddp" in sys.argv
    folder = "".join(word for word in sys.argv[1:] if word != "--ddp")
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        device = torch.device(device.type, dist.get_node_local_rank())
        torch.accelerator.set_device_index(device.index)
    backend = dist.get_default_backend_for_device(device)
    device_id = None if device.type == "cpu" else device
    timeout = timedelta(seconds=120)  # a hang ends with an error
    dist.init_process_group(backend, timeout=timeout, device_id=device_id)
    ranks = dist.get_world_size()
    shape = (ranks, 1) if ranks % 2 else (ranks // 2, 2)
    kind = "DDP" if ddp else f"dp x tp = {shape}"
    mesh = dist.init_device_mesh(device.type, shape, mesh_dim_names=("dp", "tp"))
    with device:
        model = build(mesh, ddp)
        x = torch.ones(32, 256)
    stamps = [time.time_ns()]  # the recorder's clock
    for _ in range(2 + STEPS):
        model.zero_grad()
        model(x).square().mean().backward()
        torch.get_device_module(device).synchronize()  # no-op on the CPU
        stamps.append(time.time_ns())
    times_ms = [(b - a) / 1e6 for a, b in itertools.pairwise(stamps[2:])]
    started_ns = stamps[-1 - RECORDED]
    trace = record(folder, started_ns, RECORDED)
    calls = Counter[tuple[str, str, float]]()
    for entry in trace["entries"]:
        if entry["time_created_ns"] >= started_ns:
            numbers = sum(math.prod(shape) for shape in entry["output_sizes"])
            mib = numbers * 4 / 2**20  # fp32: 4 bytes each
            op = entry["profiling_name"].split(":")[1]
            group = entry["process_group"][1]
            calls[op, group, mib] += 1
    if dist.get_rank() == 0:
        median, low, high = median_ci(times_ms)
        print(f"{ranks} ranks, {backend}, {kind}, {RECORDED} steps recorded")
        print(f"step {median:8.2f} ms   95% interval {low:.2f} to {high:.2f}")
        print(f"{'op':15}{'group':12}{'MiB':>8}  per step")
        for (op, group, mib), count in sorted(calls.items()):
            print(f"{op:15}{group:12}{mib:8.3f}{count / RECORDED:10.4g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
