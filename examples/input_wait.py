"""Does training wait for its input?

What you will learn: how to time a step with the data loader alternately with a step on a resident
batch (one that stays in memory), without letting the loader prefetch in between.

    $ torchrun --nproc-per-node 2 examples/input_wait.py
    2 ranks, gloo, 2 workers per rank
                    median ms   95% interval
    step                33.32   28.16 to 39.28
    resident            18.97   15.09 to 27.52
    wait                12.09   3.71 to 17.88

wait is the median over rounds of step - resident. Here training waits: a worker needs 16 x 4 = 64
ms to load a batch, so 2 workers deliver a batch every 32 ms, but a step on the resident batch takes
only 19 ms.

BSD-3-Clause: copy this. Numbers: virtual machine, 2 cores, torch 2.15.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

ROUNDS, STEPS, WORKERS, BATCH, LATENCY_S = 10, 4, 2, 16, 0.004  # STEPS: a multiple of WORKERS


def load(indices: list[int]) -> Tensor:
    """Runs in a worker. Simulates files that take 4 ms each to read."""
    time.sleep(LATENCY_S * len(indices))
    return torch.rand(len(indices), 1024)


# [feed]
class Feed:
    """Endless batches. While it is paused, the workers are idle and prefetch nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.paused = True
        self.running: Iterator[Tensor] = iter(())
        samples: Any = range(10_000)
        feed: Any = self
        workers: Any = {"num_workers": WORKERS, "persistent_workers": True}
        self.loader = DataLoader(samples, batch_sampler=feed, collate_fn=load, **workers)

    def __iter__(self) -> Iterator[list[int]]:
        # yields the indices of a batch; when it ends, the workers become idle
        while not self.paused:
            yield torch.randint(10_000, [BATCH]).tolist()

    def next(self) -> Tensor:
        if self.paused:
            self.paused = False
            self.running = iter(self.loader)
        batch = next(self.running)
        return batch.to(self.device, non_blocking=True)

    def pause(self) -> None:
        self.paused = True
        list(self.running)  # drain the prefetched batches


# [/feed]
def time_burst(step: Callable[[], object], device: torch.device) -> float:
    """The step time in ms: the mean over STEPS, on the slowest rank. All ranks must call it."""
    dist.barrier()
    for _ in range(WORKERS):  # untimed: each worker delivers its first batch, or becomes idle
        step()
    start = time.perf_counter()
    for _ in range(STEPS):  # batches arrive in bursts, so a median over steps would hide the wait
        step()
    torch.get_device_module(device).synchronize()  # no-op on the CPU
    seconds = (time.perf_counter() - start) / STEPS
    ms = torch.tensor(seconds * 1e3, device=device)
    dist.all_reduce(ms, op=dist.ReduceOp.MAX)
    return ms.item()


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
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        device = torch.device(device.type, dist.get_node_local_rank())
        torch.accelerator.set_device_index(device.index)
    backend = dist.get_default_backend_for_device(device)
    device_id = None if device.type == "cpu" else device
    timeout = timedelta(seconds=120)  # a hang ends with an error
    dist.init_process_group(backend, timeout=timeout, device_id=device_id)
    feed = Feed(device)
    batch = feed.next()  # the resident batch
    model = DistributedDataParallel(nn.Linear(1024, 1024).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(batch: Tensor | None = None) -> None:
        optimizer.zero_grad()
        model(feed.next() if batch is None else batch).square().mean().backward()
        optimizer.step()

    def resident() -> None:
        feed.pause()  # only has an effect in the first step of a block
        step(batch)

    gc.disable()  # a collection on one rank would delay all ranks
    times: dict[Callable[[], None], list[float]] = {step: [], resident: []}
    for i in range(ROUNDS):  # in alternating order, so that a gradual slowdown cancels out
        for step_fn in (step, resident) if i % 2 == 0 else (resident, step):
            times[step_fn].append(time_burst(step_fn, device))
    wait = [a - b for a, b in zip(times[step], times[resident], strict=True)]
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, {backend}, {WORKERS} workers per rank")
        print(f"{'':15}{'median ms':>10}   95% interval")
        rows = {"step": times[step], "resident": times[resident], "wait": wait}
        for name, samples in rows.items():
            median, low, high = median_ci(samples)
            print(f"{name:15}{median:10.2f}   {low:.2f} to {high:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
