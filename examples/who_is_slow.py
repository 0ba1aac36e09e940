"""Which rank is slow, if all ranks report the same step time?

What you will learn: how to find a slow rank. In a synchronized step, fast ranks wait for the slow
rank, so all step times are nearly equal. Instead, time a step without communication on all ranks at
the same time, and compare the ranks. Here, `--slow 1` gives rank 1 a batch of twice the size, so
that there is a slow rank to find.

    $ torchrun --nproc-per-node 2 examples/who_is_slow.py --slow 1
    2 ranks, gloo; medians
    rank   step ms   local ms   vs. other ranks   95% interval
       0     19.96       7.06              0.60   0.48 to 0.71
       1     19.16      12.04              1.67   1.42 to 2.10   slow

vs. other ranks is the median over rounds of local time / median local time of the other ranks, not
the quotient of the medians.

BSD-3-Clause: copy this. Numbers: virtual machine, 2 cores, torch 2.15.
"""

import argparse
import gc
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

ROUNDS, STEPS = 15, 4  # each round times a block of 4 steps of each kind
MARGIN = 1.05  # a rank that is less than 5% slower than the other ranks is not reported


# [measure]
def time_each_rank(step: Callable[[], object], device: torch.device) -> list[float]:
    """The time of a step in ms, for each rank. All ranks must call it."""
    dist.barrier()  # all ranks compute at the same time, as in a training job
    step()  # untimed: the previous block evicted this step's data from the caches
    torch.get_device_module(device).synchronize()  # no-op on the CPU
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    torch.get_device_module(device).synchronize()  # an accelerator may still have work queued
    mine = torch.tensor([(time.perf_counter() - start) * 1e3 / STEPS], device=device)
    each = mine.new_empty(dist.get_world_size())
    dist.all_gather(list(each.split(1)), mine)
    return each.tolist()


def median_interval(samples: Sequence[float], miss: float) -> tuple[float, float, float]:
    """The median, and an interval that misses the true median with probability <= `miss`."""
    x = sorted(samples)
    n = len(x)
    rare = miss / 2 * 2**n  # out of 2**n outcomes of n coin flips
    assert rare >= 1, f"{n} samples are too few for this interval"
    k = 1  # the largest k with P(fewer than k of n samples are below the median) <= miss / 2
    while sum(math.comb(n, i) for i in range(k + 1)) <= rare:
        k += 1
    return statistics.median(x), x[k - 1], x[-k]


# [/measure]
def main() -> int:
    parser = argparse.ArgumentParser(description="Which rank is slow?")
    parser.add_argument("--slow", type=int, metavar="RANK", help="give this rank twice the batch")
    slow = parser.parse_args().slow
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks < 2:
        sys.exit("expected 2 ranks or more: torchrun --nproc-per-node 2 examples/who_is_slow.py")
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        device = torch.device(device.type, dist.get_node_local_rank())
        torch.accelerator.set_device_index(device.index)
    backend = dist.get_default_backend_for_device(device)
    device_id = None if device.type == "cpu" else device
    timeout = timedelta(seconds=120)  # a hang ends with an error
    dist.init_process_group(backend, timeout=timeout, device_id=device_id)
    width, batch = (512, 64) if device.type == "cpu" else (8192, 1024)
    # [wrap]
    layers = [nn.Linear(width, width) for _ in range(4)]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers).to(device))
    x = torch.randn(batch * (2 if dist.get_rank() == slow else 1), width, device=device)

    def step() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    def local_compute() -> None:
        with model.no_sync():  # no communication, so no rank waits for another
            step()

    # [/wrap]
    for _ in range(4):
        step()  # DDP rebuilds its buckets in the second step
    gc.disable()  # a collection on one rank would delay all ranks
    steps_ms, locals_ms = [], []  # for each round, the times of all ranks
    for _ in range(ROUNDS):
        steps_ms.append(time_each_rank(step, device))
        locals_ms.append(time_each_rank(local_compute, device))
    if dist.get_rank() == 0:
        print(f"{ranks} ranks, {backend}; medians")
        print("rank   step ms   local ms   vs. other ranks   95% interval")
        for rank in range(ranks):
            step_ms = statistics.median([times[rank] for times in steps_ms])
            local_ms = statistics.median([times[rank] for times in locals_ms])
            ratios = []
            for times in locals_ms:
                others = times[:rank] + times[rank + 1 :]
                # the upper median, so that a single fast rank does not make the others look slow
                ratios.append(times[rank] / statistics.median_high(others))
            # the 5% risk of reporting a healthy rank is divided among the ranks (Bonferroni)
            ratio, low, high = median_interval(ratios, miss=0.05 / ranks)
            verdict = "   slow" if low > MARGIN else ""
            row = f"{rank:4}{step_ms:10.2f}{local_ms:11.2f}{ratio:18.2f}"
            print(f"{row}   {low:.2f} to {high:.2f}{verdict}")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
