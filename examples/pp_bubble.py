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
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend `fake`
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

ROUNDS, BATCH = 16, 32  # the batch of a microbatch


def time_block(step: Callable[[], object], device: torch.device) -> torch.Tensor:
    """Milliseconds of a step, on this rank. All ranks call it together."""
    dist.barrier()  # no clock starts while another rank is still busy with something else
    step()  # untimed: it finds the caches as the block before has left them
    torch.get_device_module(device).synchronize()  # does nothing on the CPU
    start = time.perf_counter()
    step()
    torch.get_device_module(device).synchronize()  # an accelerator may only have queued the work
    return torch.tensor((time.perf_counter() - start) * 1e3, device=device)


def median_ci(samples: Sequence[float]) -> tuple[float, float, float]:
    x, n = sorted(samples), len(samples)  # the interval: the k-th sample from either end
    # the true median is below the k-th sample as rarely as n coins show fewer than k heads
    k = max(k for k in range(1, n) if sum(math.comb(n, i) for i in range(k)) <= 0.025 * 2**n)
    return statistics.median(x), x[k - 1], x[-k]


def main() -> str | None:
    torch.set_flush_denormal(True)  # what `fake` receives may hold denormals, slow on CPUs
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        device = torch.device(device.type, dist.get_node_local_rank())
        torch.accelerator.set_device_index(device.index)
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, device_id=None if device.type == "cpu" else device)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    width = 512 if device.type == "cpu" else 8192
    counts = [ranks, 2 * ranks, 4 * ranks]
    silent: Any = dist.new_group(backend="fake")
    torch.manual_seed(0)  # all ranks make all stages, to check the gradients; a job would not
    with device:
        stages = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(ranks)]
        x, y = torch.randn(2, counts[-1] * BATCH, width)

    # [wrap]
    def build(count: int, group: dist.ProcessGroup | None = None) -> Callable[[], object]:
        data = [x[: count * BATCH]] if rank == 0 else []
        target = y[: count * BATCH] if rank == ranks - 1 else None
        # with examples of what comes and goes, stages need not ask each other for shapes
        goes = torch.empty(BATCH, width, device=device, requires_grad=True)
        comes = goes if rank else x[:BATCH]
        stage = PipelineStage(stages[rank], rank, ranks, device, comes, goes, group=group)
        schedule = Schedule1F1B(stage, count, nn.functional.mse_loss)
        return partial(schedule.step, *data, target=target)  # it adds to the gradients

    # [/wrap]
    parameters = list(stages[rank].parameters())
    want = torch.autograd.grad(nn.functional.mse_loss(nn.Sequential(*stages)(x), y), parameters)
    pairs = [(build(count), build(count, silent)) for count in counts]
    pairs[-1][0]()  # the whole batch, before anything else leaves its gradients
    got = [p.new_zeros(()) if p.grad is None else p.grad for p in parameters]
    same = all(torch.allclose(a, b, rtol=1e-3, atol=1e-7) for a, b in zip(got, want, strict=True))
    gc.disable()  # a collection on one rank would stop them all
    rounds: list[list[tuple[float, float]]] = [[] for _ in counts]
    for i in range(ROUNDS):
        turn = 1 if i % 2 == 0 else -1  # forwards, then backwards: a drift of the machine cancels
        for samples, pair in zip(rounds, pairs, strict=True):
            step, computing = [time_block(run, device) for run in pair[::turn]][::turn]
            dist.all_reduce(step, op=dist.ReduceOp.MAX)
            dist.all_reduce(computing)
            samples.append((step.item(), 100 - 100 * computing.item() / ranks / step.item()))
    if rank == 0:
        print(f"{ranks} stages, {backend}; medians")
        print("microbatches   step ms   idle %   95 % interval   in theory %")
        for count, samples in zip(counts, rounds, strict=True):
            step_ms = statistics.median(ms for ms, _ in samples)
            idle, low, high = median_ci([share for _, share in samples])
            theory, interval = (ranks - 1) / (count + ranks - 1), f"{low:.1f} to {high:.1f}"
            print(f"{count:12}{step_ms:10.2f}{idle:9.1f}   {interval:16}{100 * theory:11.1f}")
    dist.destroy_process_group()
    return None if same else f"rank {rank}: these are not the gradients of one process"


if __name__ == "__main__":
    sys.exit(main())
