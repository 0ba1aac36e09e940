"""How large is the bubble of a pipeline, and does it match the theory?

What you will learn: how to run a 1F1B schedule, and how to time the computation of each stage by
running the schedule over a group that sends nothing (backend `fake`). idle = 1 - computation /
step. In theory, p equal stages with m microbatches are idle for (p - 1) / (m + p - 1) of the step.

    $ torchrun --nproc-per-node 2 examples/pp_bubble.py
    2 stages, gloo; medians
    microbatches   step ms   idle %   95% interval    in theory %
               2      9.72     51.5   35.9 to 66.1           33.3
               4     17.93     54.3   23.3 to 72.1           20.0
               8     37.76     51.6   35.0 to 67.8           11.1

Here it does not match. idle also includes the time to send messages, which the theory ignores, and
gloo's threads probably compete with the 2 ranks for the 2 cores.

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
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend `fake`
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

ROUNDS, BATCH = 16, 32  # BATCH: samples per microbatch


def time_stage(step: Callable[[], object], device: torch.device) -> torch.Tensor:
    """The time of a step in ms, on this rank. All ranks must call it."""
    dist.barrier()  # all ranks start their clocks together
    step()  # untimed: the previous block evicted this step's data from the caches
    torch.get_device_module(device).synchronize()  # no-op on the CPU
    start = time.perf_counter()
    step()
    torch.get_device_module(device).synchronize()  # an accelerator may still have work queued
    return torch.tensor((time.perf_counter() - start) * 1e3, device=device)


def median_ci(samples: Sequence[float]) -> tuple[float, float, float]:
    """The median and its 95% interval, from the k-th smallest to the k-th largest sample."""
    x = sorted(samples)
    n = len(x)
    assert n >= 6, "a 95% interval requires at least 6 samples"
    k = 1  # the largest k with P(fewer than k of n samples are below the median) <= 2.5%
    while sum(math.comb(n, i) for i in range(k + 1)) <= 0.025 * 2**n:
        k += 1
    return statistics.median(x), x[k - 1], x[-k]


def join() -> tuple[torch.device, str]:
    """Join the process group. Returns the device of this rank, and the backend."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        device = torch.device(device.type, dist.get_node_local_rank())
        torch.accelerator.set_device_index(device.index)
    backend = dist.get_default_backend_for_device(device)
    device_id = None if device.type == "cpu" else device
    timeout = timedelta(seconds=120)  # a hang ends with an error
    dist.init_process_group(backend, timeout=timeout, device_id=device_id)
    return device, backend


def print_row(count: int, ranks: int, step_ms: list[float], idle: list[float]) -> None:
    """Print the row for this number of microbatches."""
    median_ms = statistics.median(step_ms)
    percent, low, high = median_ci(idle)
    interval = f"{low:.1f} to {high:.1f}"
    theory = 100 * (ranks - 1) / (count + ranks - 1)
    print(f"{count:12}{median_ms:10.2f}{percent:9.1f}   {interval:16}{theory:11.1f}")


def main() -> str | None:
    torch.set_flush_denormal(True)  # `fake` leaves garbage; denormals would be slow on CPUs
    device, backend = join()
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    width = 512 if device.type == "cpu" else 8192
    counts = [ranks, 2 * ranks, 4 * ranks]
    silent: Any = dist.new_group(backend="fake")
    torch.manual_seed(0)  # all ranks create all stages, but only to check the gradients
    with device:
        stages = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(ranks)]
        x, y = torch.randn(2, counts[-1] * BATCH, width)

    # [wrap]
    def build(count: int, group: dist.ProcessGroup | None = None) -> Callable[[], object]:
        """A step with this number of microbatches. It accumulates gradients."""
        # with example inputs and outputs, the stages need not exchange shapes
        sent = torch.empty(BATCH, width, device=device, requires_grad=True)
        received = x[:BATCH] if rank == 0 else sent
        stage = PipelineStage(stages[rank], rank, ranks, device, received, sent, group=group)
        schedule = Schedule1F1B(stage, count, nn.functional.mse_loss)
        inputs = [x[: count * BATCH]] if rank == 0 else []  # for the first stage
        target = y[: count * BATCH] if rank == ranks - 1 else None  # for the last stage
        return partial(schedule.step, *inputs, target=target)

    # [/wrap]
    parameters = list(stages[rank].parameters())
    whole = nn.Sequential(*stages)
    loss = nn.functional.mse_loss(whole(x), y)
    expected = torch.autograd.grad(loss, parameters)
    steps = [build(count) for count in counts]
    silent_steps = [build(count, silent) for count in counts]
    steps[-1]()  # the whole batch, before any other step adds to the gradients
    got = [p.new_zeros(()) if p.grad is None else p.grad for p in parameters]
    same = all(
        torch.allclose(a, b, rtol=1e-3, atol=1e-7) for a, b in zip(got, expected, strict=True)
    )
    gc.disable()  # a collection on one rank would delay all ranks
    step_ms: list[list[float]] = [[] for _ in counts]
    idle: list[list[float]] = [[] for _ in counts]  # percent
    for turn in range(ROUNDS):  # in alternating order, so that a gradual slowdown cancels out
        for i in range(len(counts)):
            if turn % 2 == 0:
                step = time_stage(steps[i], device)
                computing = time_stage(silent_steps[i], device)
            else:
                computing = time_stage(silent_steps[i], device)
                step = time_stage(steps[i], device)
            dist.all_reduce(step, op=dist.ReduceOp.MAX)
            dist.all_reduce(computing)
            busy = computing.item() / ranks / step.item()  # average over the stages
            step_ms[i].append(step.item())
            idle[i].append(100 - 100 * busy)
    if rank == 0:
        print(f"{ranks} stages, {backend}; medians")
        print("microbatches   step ms   idle %   95% interval    in theory %")
        for i, count in enumerate(counts):
            print_row(count, ranks, step_ms[i], idle[i])
    dist.destroy_process_group()
    return None if same else f"rank {rank}: the gradients differ from those of a single process"


if __name__ == "__main__":
    sys.exit(main())
