"""Does torch.compile make a DDP step faster, and how long does compilation take?

What you will learn: how to time an eager and a compiled step alternately, with the same parameters,
and how to time the first compiled step separately.

    $ torchrun --nproc-per-node 2 examples/compiled_ddp.py
                    median ms   95% interval
    eager               41.28   33.67 to 50.84
    compiled            42.94   34.29 to 49.55
    saved               -0.48   -10.70 to 7.81
    2 ranks, gloo, inductor, first compiled step 10.2 s, gradients correct: True

saved is the median over rounds of eager - compiled, not the difference of the medians. Here
compilation saves no measurable time: the interval contains 0. The optional argument is the backend
of torch.compile, `inductor` by default.

BSD-3-Clause: copy this. Numbers: virtual machine, 2 cores, torch 2.15.
"""

# [measure]
import gc
import math
import statistics
import sys
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
    # [wrap]
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        device = torch.device(device.type, dist.get_node_local_rank())
        torch.accelerator.set_device_index(device.index)
    backend = dist.get_default_backend_for_device(device)
    device_id = None if device.type == "cpu" else device
    timeout = timedelta(seconds=120)  # a hang ends with an error
    dist.init_process_group(backend, timeout=timeout, device_id=device_id)
    torch.manual_seed(dist.get_rank())  # different data on each rank; DDP sends rank 0's weights
    compiler = sys.argv[1] if len(sys.argv) > 1 else "inductor"
    dim = 512 if device.type == "cpu" else 8192
    layers = [nn.Sequential(nn.Linear(dim, dim), nn.LayerNorm(dim), nn.GELU()) for _ in range(4)]
    net = nn.Sequential(*layers).to(device)
    # compiled during the first forward pass under DDP, so that dynamo splits the graph at DDP's
    # buckets, and communication can start before backward has ended
    model = DistributedDataParallel(torch.compile(net, backend=compiler))
    x = torch.randn(256, dim, device=device)
    # a learning rate of 0, so that the gradients of both kinds of steps can be compared
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def compiled() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    def eager() -> None:  # the same model without compilation, so it needs no extra memory
        with torch.compiler.set_stance("force_eager"):
            compiled()

    # [/wrap]
    eager()
    expected: list[Any] = [p.grad for p in model.parameters()]
    start = time.perf_counter()
    compiled()
    torch.get_device_module(device).synchronize()
    first_s = time.perf_counter() - start  # includes waiting for the slowest compilation
    pairs: Any = zip([p.grad for p in model.parameters()], expected, strict=True)
    same = all(torch.allclose(a, b, rtol=1e-3, atol=1e-7) for a, b in pairs)
    gc.disable()  # a collection on one rank would delay all ranks
    times: dict[Callable[[], object], list[float]] = {eager: [], compiled: []}
    for i in range(ROUNDS):  # in alternating order, so that a gradual slowdown cancels out
        for step_fn in (eager, compiled) if i % 2 == 0 else (compiled, eager):
            times[step_fn].append(time_block(step_fn, device))
    saved = [a - b for a, b in zip(times[eager], times[compiled], strict=True)]
    if dist.get_rank() == 0:
        print_rows({"eager": times[eager], "compiled": times[compiled], "saved": saved})
        about = f"{backend}, {compiler}, first compiled step {first_s:.1f} s"
        print(f"{dist.get_world_size()} ranks, {about}, gradients correct: {same}")
    dist.destroy_process_group()
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
