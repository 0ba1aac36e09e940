"""How fast is an all-reduce, and what do algbw and busbw mean?

What you will learn: how to time a collective for small and large messages, how to convert the time
into the bandwidth of a link, and how to check the result.

    $ torchrun --nproc-per-node 2 examples/allreduce_busbw.py
    2 ranks, gloo: all_reduce of float32, in place
         bytes  median us   95% interval     algbw GB/s  busbw GB/s   wrong
          4096      469.3   399.8 to 544.2        0.009       0.009       0
         65536      502.2   433.9 to 3231.0       0.131       0.131       0
       1048576     1255.6   1028.7 to 3664.1      0.835       0.835       0
      16777216    16765.5   13991.6 to 22239.8    1.001       1.001       0

algbw = bytes / time. With a ring algorithm, each rank sends 2 (n - 1) / n times the bytes over its
link. Therefore busbw = algbw * 2 (n - 1) / n can be compared with the bandwidth of the link, for
any number of ranks n. With 2 ranks, both are equal; with 8, busbw is 1.75 times algbw. `wrong` is
the number of incorrect values in the result.

BSD-3-Clause: copy this. Numbers: virtual machine, 2 cores, torch 2.15.
"""

import gc
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

ROUNDS = 15
SIZES = [2**12, 2**16, 2**20, 2**24]  # bytes


# [measure]
def time_calls(step: Callable[[], object], calls: int, device: torch.device) -> float:
    """The time per call in seconds, on the slowest rank. All ranks must call it."""
    dist.barrier()  # all ranks start their clocks together
    step()  # untimed warm-up of connections and caches
    torch.get_device_module(device).synchronize()  # no-op on the CPU
    start = time.perf_counter()
    for _ in range(calls):
        step()
    torch.get_device_module(device).synchronize()  # an accelerator may still have work queued
    elapsed = torch.tensor((time.perf_counter() - start) / calls, device=device)
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    return elapsed.item()


def median_ci(samples: Sequence[float]) -> tuple[float, float, float]:
    """The median and its 95% interval, from the k-th smallest to the k-th largest sample."""
    x = sorted(samples)
    n = len(x)
    assert n >= 6, "a 95% interval requires at least 6 samples"
    k = 1  # the largest k with P(fewer than k of n samples are below the median) <= 2.5%
    while sum(math.comb(n, i) for i in range(k + 1)) <= 0.025 * 2**n:
        k += 1
    return statistics.median(x), x[k - 1], x[-k]


# [/measure]
# [check]
def count_wrong(buffer: torch.Tensor) -> int:
    """The number of incorrect elements after an all-reduce, added up over all ranks."""
    n = dist.get_world_size()
    pattern = torch.arange(len(buffer), device=buffer.device) % 251  # prime, so that blocks differ
    buffer.copy_(pattern + dist.get_rank())
    dist.all_reduce(buffer)
    wrong = (buffer != n * pattern + n * (n - 1) // 2).sum()  # exact in float32, up to 2**24
    dist.all_reduce(wrong)
    return int(wrong)


# [/check]
def main() -> int:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks < 2:
        command = "torchrun --nproc-per-node 2 examples/allreduce_busbw.py"
        sys.exit(f"expected 2 ranks or more: {command}")
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        device = torch.device(device.type, dist.get_node_local_rank())
        torch.accelerator.set_device_index(device.index)
    backend = dist.get_default_backend_for_device(device)
    device_id = None if device.type == "cpu" else device
    timeout = timedelta(seconds=120)  # a hang ends with an error
    dist.init_process_group(backend, timeout=timeout, device_id=device_id)
    sizes = SIZES if device.type == "cpu" else [*SIZES, 2**28]
    # zeros, because any other sum would grow with each call until it overflows
    buffers = [torch.zeros(size // 4, device=device) for size in sizes]
    steps = [partial(dist.all_reduce, buffer) for buffer in buffers]
    gc.disable()  # a collection on one rank would delay all ranks
    # on a GPU calls are queued, so time 20 together; on a CPU each call blocks, and a mean over
    # several calls would hide their variation
    calls = 1 if device.type == "cpu" else 20
    samples: list[list[float]] = [[] for _ in sizes]
    for _ in range(ROUNDS):  # all sizes in each round, so that a slow period affects them all
        for i, step in enumerate(steps):
            samples[i].append(time_calls(step, calls, device))
    wrong = [count_wrong(buffer) for buffer in buffers]
    if dist.get_rank() == 0:
        print(f"{ranks} ranks, {backend}: all_reduce of float32, in place")
        print("     bytes  median us   95% interval     algbw GB/s  busbw GB/s   wrong")
        for i, size in enumerate(sizes):
            median, low, high = median_ci(samples[i])
            interval = f"{low * 1e6:.1f} to {high * 1e6:.1f}"
            algbw = size / median / 1e9
            busbw = algbw * 2 * (ranks - 1) / ranks
            row = f"{size:10}{median * 1e6:11.1f}   {interval:18}{algbw:9.3f}{busbw:12.3f}"
            print(f"{row}{wrong[i]:8}")
    dist.destroy_process_group()
    return 1 if any(wrong) else 0


if __name__ == "__main__":
    sys.exit(main())
