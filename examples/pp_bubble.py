"""How long does a pipeline wait, and is it as long as theory says?

What you will learn: to run a 1F1B schedule, and to time each stage's own computing by the same
schedule over a group that sends nothing (the backend `fake`): idle = 1 - computing / step. In
theory p equal stages and m microbatches are idle for (p - 1) / (m + p - 1) of the step.

    $ torchrun --nproc-per-node 2 examples/pp_bubble.py
    2 stages, gloo; medians
    microbatches   step ms   idle %   95 % interval   in theory %
               2      9.72     51.5   35.9 to 66.1           33.3
               4     17.93     54.3   23.3 to 72.1           20.0
               8     37.76     51.6   35.0 to 67.8           11.1

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

ROUNDS, BATCH = 16, 32  # the batch of a microbatch


def time_stage(step: Callable[[], object], device: torch.device) -> torch.Tensor:
    """Milliseconds of a step, on this rank. All ranks call it together."""
    dist.barrier()  # no clock starts while another rank is still busy with something else
    step()  # untimed: it finds the caches as the block before has left them
    torch.get_device_module(device).synchronize()  # does nothing on the CPU
    start = time.perf_counter()
    step()
    torch.get_device_module(device).synchronize()  # an accelerator may only have queued the work
    return torch.tensor((time.perf_counter() - start) * 1e3, device=device)


def median_ci(samples: Sequence[float]) -> tuple[float, float, float]:
    """The median and its 95 % interval: the k-th sample from either end."""
    x = sorted(samples)
    n = len(x)
    assert n >= 6, "fewer samples have no interval of 95 %"
    k = 1  # the true median is below the k-th sample as rarely as n coins show fewer than k heads
    while sum(math.comb(n, i) for i in range(k + 1)) <= 0.025 * 2**n:
        k += 1
    return statistics.median(x), x[k - 1], x[-k]


def join() -> tuple[torch.device, str]:
    """Join the job. The device of this rank, and the backend."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        device = torch.device(device.type, dist.get_node_local_rank())
        torch.accelerator.set_device_index(device.index)
    backend = dist.get_default_backend_for_device(device)
    device_id = None if device.type == "cpu" else device
    limit = timedelta(seconds=120)  # a hang ends with an error
    dist.init_process_group(backend, timeout=limit, device_id=device_id)
    return device, backend


def print_row(count: int, ranks: int, step_ms: list[float], idle: list[float]) -> None:
    """The row of this many microbatches."""
    median_ms = statistics.median(step_ms)
    percent, low, high = median_ci(idle)
    interval = f"{low:.1f} to {high:.1f}"
    theory = 100 * (ranks - 1) / (count + ranks - 1)
    print(f"{count:12}{median_ms:10.2f}{percent:9.1f}   {interval:16}{theory:11.1f}")


def main() -> str | None:
    torch.set_flush_denormal(True)  # what `fake` receives may hold denormals, slow on CPUs
    device, backend = join()
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    width = 512 if device.type == "cpu" else 8192
    counts = [ranks, 2 * ranks, 4 * ranks]
    silent: Any = dist.new_group(backend="fake")
    torch.manual_seed(0)  # all ranks make all stages, to check the gradients; a job would not
    with device:
        stages = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(ranks)]
        x, y = torch.randn(2, counts[-1] * BATCH, width)

    # [wrap]
    def build(count: int, group: dist.ProcessGroup | None = None) -> Callable[[], object]:
        """A step of this many microbatches. It adds to the gradients."""
        # with examples of what a stage receives and sends, they need not ask each other for shapes
        sent = torch.empty(BATCH, width, device=device, requires_grad=True)
        received = x[:BATCH] if rank == 0 else sent
        stage = PipelineStage(stages[rank], rank, ranks, device, received, sent, group=group)
        schedule = Schedule1F1B(stage, count, nn.functional.mse_loss)
        inputs = [x[: count * BATCH]] if rank == 0 else []  # of the first stage
        target = y[: count * BATCH] if rank == ranks - 1 else None  # of the last one
        return partial(schedule.step, *inputs, target=target)

    # [/wrap]
    parameters = list(stages[rank].parameters())
    whole = nn.Sequential(*stages)
    loss = nn.functional.mse_loss(whole(x), y)
    want = torch.autograd.grad(loss, parameters)
    steps = [build(count) for count in counts]
    silent_steps = [build(count, silent) for count in counts]
    steps[-1]()  # the whole batch, before anything else leaves its gradients
    got = [p.new_zeros(()) if p.grad is None else p.grad for p in parameters]
    same = all(torch.allclose(a, b, rtol=1e-3, atol=1e-7) for a, b in zip(got, want, strict=True))
    gc.disable()  # a collection on one rank would stop them all
    step_ms: list[list[float]] = [[] for _ in counts]
    idle: list[list[float]] = [[] for _ in counts]  # percent
    for turn in range(ROUNDS):  # forwards, then backwards: a drift of the machine cancels
        for i in range(len(counts)):
            if turn % 2 == 0:
                step = time_stage(steps[i], device)
                computing = time_stage(silent_steps[i], device)
            else:
                computing = time_stage(silent_steps[i], device)
                step = time_stage(steps[i], device)
            dist.all_reduce(step, op=dist.ReduceOp.MAX)
            dist.all_reduce(computing)
            busy = computing.item() / ranks / step.item()  # of all stages, on average
            step_ms[i].append(step.item())
            idle[i].append(100 - 100 * busy)
    if rank == 0:
        print(f"{ranks} stages, {backend}; medians")
        print("microbatches   step ms   idle %   95 % interval   in theory %")
        for i, count in enumerate(counts):
            print_row(count, ranks, step_ms[i], idle[i])
    dist.destroy_process_group()
    return None if same else f"rank {rank}: these are not the gradients of one process"


if __name__ == "__main__":
    sys.exit(main())
