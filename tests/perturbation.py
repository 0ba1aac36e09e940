"""Does the harness change what it measures? Each step by the harness / by a bare loop, in turns.

    torchrun --nproc-per-node 2 tests/perturbation.py
    torchrun --nproc-per-node 2 tests/perturbation.py --steps all_reduce-64,train --pairs 300

A pair is a block of the harness (common.timing.time_steps) and a block of a plain loop around the
same call, every other pair in reverse order. Each block gives a median and a mean of its calls on
rank 0. A ratio is the median over the pairs, with its 95 % interval: 1 is a harness that costs
nothing. It is run by hand, on a machine where nothing else runs; docs/measuring.md has the results.
"""

import argparse
import gc
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean, median
from time import perf_counter

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.groups import Group, Groups, Job
from common.join import join
from common.stats import median_interval
from common.timing import Step, StopRule, Workload, time_steps

BLOCK_S = 5 / 12 / 3  # of a case with three steps, 12 rounds and a budget of 5 seconds
STATISTICS: dict[str, Callable[[list[float]], float]] = {"median": median, "mean": fmean}


def all_reduce(size: int, job: Job, group: Group) -> Step:
    """size: bytes."""
    tensor = torch.ones(size // 4, device=job.device)
    return lambda: dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group.test)


def send_and_receive(size: int, job: Job, group: Group) -> Step:
    """To the next rank, and from the one before. size: bytes."""
    ranks = dist.get_world_size(group.test)
    sent, received = torch.ones(2, size, dtype=torch.uint8, device=job.device)
    operations = [
        dist.P2POp(dist.isend, sent, group=group.test, group_peer=(job.rank + 1) % ranks),
        dist.P2POp(dist.irecv, received, group=group.test, group_peer=(job.rank - 1) % ranks),
    ]

    def step() -> None:
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return step


def train(layers: int, job: Job, group: Group) -> Step:
    """A step under DistributedDataParallel of so many linear layers."""
    model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(layers)]).to(job.device)
    ddp = nn.parallel.DistributedDataParallel(model, process_group=group.test)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    inputs = torch.randn(32, 128, device=job.device)

    def step() -> None:
        optimizer.zero_grad()
        ddp(inputs).square().mean().backward()
        optimizer.step()

    return step


STEPS: dict[str, Callable[[Job, Group], Step]] = {
    "all_reduce-64": partial(all_reduce, 64),
    "all_reduce-64K": partial(all_reduce, 2**16),
    "all_reduce-16M": partial(all_reduce, 2**24),
    "send-64K": partial(send_and_receive, 2**16),
    "train": partial(train, 4),
    "train-long": partial(train, 64),
}


def harness_block(step: Step, job: Job, group: Group) -> list[float]:
    """Seconds of each call, as a case would report them."""
    rule = StopRule(warmup_iters=1, min_iters=1, max_seconds=BLOCK_S, rounds=1)
    samples: list[float] = time_steps(Workload(step), group, job.device, rule).samples_s["step"]
    return samples


def bare_block(step: Step, iters: int, job: Job, group: Group) -> list[float]:
    """Seconds of each call, as anybody would time it by hand."""
    # a case collects once before its first block, and each pair here has a first block
    gc.collect()
    dist.barrier(group.control)  # all ranks begin together, as they do in the harness
    times = []
    for _ in range(iters):
        start = perf_counter()
        step()
        if job.device.type == "cuda":
            torch.cuda.synchronize(job.device)
        times.append(perf_counter() - start)
    return times


def compare(step: Step, pairs: int, job: Job, group: Group) -> list[str]:
    """The cells of a row: the bare loop's median, and the ratio of each statistic."""
    bare_medians: list[float] = []
    ratios: dict[str, list[float]] = {name: [] for name in STATISTICS}
    iters = len(harness_block(step, job, group))
    for pair in range(pairs):
        if pair % 2 == 0:
            reported_s = harness_block(step, job, group)
            bare_s = bare_block(step, iters, job, group)
        else:
            bare_s = bare_block(step, iters, job, group)
            reported_s = harness_block(step, job, group)
        bare_medians.append(median(bare_s))
        for name, statistic in STATISTICS.items():
            ratios[name].append(statistic(reported_s) / statistic(bare_s))
    cells = [f"{median(bare_medians) * 1e6:.0f}"]
    for values in ratios.values():
        interval = median_interval(values)
        ends = "no interval" if interval is None else f"{interval[0]:.3f} to {interval[1]:.3f}"
        cells.append(f"{median(values):.3f} ({ends})")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", default=",".join(STEPS), help="(default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=60, help="of a step (default: %(default)s)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args()
    job = join(args.device, None, 300)
    group, _ = Groups(job).take(tuple(range(job.world_size)), None)
    assert group is not None
    rows = []
    for name in args.steps.split(","):
        cells = compare(STEPS[name](job, group), args.pairs, job, group)
        rows.append([name, *cells])
    if job.rank == 0:
        heads = ["step", "bare loop (us)", *(f"harness / bare, {name}s" for name in STATISTICS)]
        print(f"{job.world_size} ranks, {args.pairs} pairs, {job.device.type}, {job.backend}\n")
        print(tabulate(rows, heads, disable_numparse=True))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
