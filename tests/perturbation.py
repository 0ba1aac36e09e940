"""Does the harness change what it measures? Each step by the harness / by a bare loop, in turns.

    python tests/perturbation.py                                 all of it, on 2 ranks: 10 minutes
    python tests/perturbation.py --kinds all_reduce,rpc_sync     some of it
    torchrun --nproc-per-node 4 tests/perturbation.py --kinds train    on other ranks

A pair is a case of the harness (common.timing.TimedLoop) and a bare loop of as many calls, every
other pair in reverse order. Both give a median and a mean of the calls of rank 0. A ratio is the
median over the pairs, with its 95 % interval: 1 is a harness that costs nothing.
`first` is another question: a training step as the first case of a process / the same as its last
case, in processes of its own, started by python only. It is run by hand, on a machine where nothing
else runs; docs/measuring.md has the results.
"""

import argparse
import gc
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn
from torch.distributed import rpc
from torch.futures import Future

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.groups import Group, Groups, Job
from common.join import join
from common.stats import median_of_rounds
from common.timing import Step, StopRule, TimedLoop, Workload

ROUNDS = 6
FIRST = "first"  # against the last case
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


def answer(payload: torch.Tensor) -> torch.Tensor:
    return payload


def rpc_sync(size: int, job: Job, group: Group) -> Step:
    """The first rank calls the last one, which sends the payload back. size: bytes."""
    payload = torch.ones(size // 4)
    server = f"rank{job.world_size - 1}"
    return (lambda: rpc.rpc_sync(server, answer, (payload,))) if job.rank == 0 else idle


class Server:
    """Parameters, and the lock that its updates take in turn."""

    parameters = torch.zeros(0)
    lock = threading.Lock()


@rpc.functions.async_execution
def update(gradient: torch.Tensor) -> Future[Any]:
    updated: Future[Any] = Future()
    with Server.lock:
        Server.parameters -= 1e-3 * gradient
        updated.set_result(Server.parameters)
    return updated


def batch_update(size: int, job: Job, group: Group) -> Step:
    """The first rank sends a gradient to the last one, and gets the parameters. size: bytes."""
    Server.parameters = torch.zeros(size // 4)
    gradient = torch.ones(size // 4)
    server = f"rank{job.world_size - 1}"
    return (lambda: rpc.rpc_sync(server, update, (gradient,))) if job.rank == 0 else idle


def idle() -> None:
    pass


def train(layers: int, job: Job, group: Group) -> Step:
    """A step under DistributedDataParallel of so many linear layers."""
    model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(layers)])
    return train_step(model, torch.randn(32, 128), job, group)


def train_step(model: nn.Module, inputs: torch.Tensor, job: Job, group: Group) -> Step:
    replica = nn.parallel.DistributedDataParallel(model.to(job.device), process_group=group.test)
    optimizer = torch.optim.SGD(replica.parameters(), lr=1e-3)
    batch = inputs.to(job.device)

    def step() -> None:
        optimizer.zero_grad()
        replica(batch).square().mean().backward()
        optimizer.step()

    return step


# kind -> what is measured of it, a short, a middle and a long step where there are such
KINDS: dict[str, dict[str, Callable[[Job, Group], Step]]] = {
    "all_reduce": {
        "all_reduce 64": partial(all_reduce, 64),
        "all_reduce 64K": partial(all_reduce, 2**16),
        "all_reduce 16M": partial(all_reduce, 2**24),
    },
    "send": {
        "send, receive 64": partial(send_and_receive, 64),
        "send, receive 64K": partial(send_and_receive, 2**16),
        "send, receive 16M": partial(send_and_receive, 2**24),
    },
    "rpc_sync": {
        "rpc_sync 4": partial(rpc_sync, 4),
        "rpc_sync 1M": partial(rpc_sync, 2**20),
    },
    "batch_update": {
        "batch update 4K": partial(batch_update, 2**12),
        "batch update 4M": partial(batch_update, 2**22),
    },
    "train": {
        "train, 4 layers": partial(train, 4),
        "train, 64 layers": partial(train, 64),
    },
}


def harness(step: Step, seconds: float, job: Job, group: Group) -> list[float]:
    """Seconds of each call, as a case would report them: warm-up, then ROUNDS blocks."""
    rule = StopRule(max_seconds=seconds, rounds=ROUNDS)
    times = TimedLoop(Workload(step), group, job.device, rule).run()
    return list(times.samples_s["step"])


def bare_loop(step: Step, calls: int, job: Job, group: Group) -> list[float]:
    """Seconds of each call, as anybody would time it by hand, after five calls."""
    gc.collect()  # as a case does before its first block
    dist.barrier(group.control)
    times = []
    for _ in range(5 + calls):
        start = perf_counter()
        step()
        if job.device.type == "cuda":
            torch.cuda.synchronize(job.device)
        times.append(perf_counter() - start)
    dist.barrier(group.control)
    return times[5:]


def compare(step: Step, args: argparse.Namespace, job: Job, group: Group) -> list[str]:
    """The cells of a row: the bare loop's median, and the ratio of each statistic."""
    medians_s: list[float] = []
    ratios: dict[str, list[float]] = {name: [] for name in STATISTICS}
    calls = len(harness(step, args.seconds, job, group))
    for pair in range(args.pairs):
        if pair % 2 == 0:
            reported_s = harness(step, args.seconds, job, group)
            bare_s = bare_loop(step, calls, job, group)
        else:
            bare_s = bare_loop(step, calls, job, group)
            reported_s = harness(step, args.seconds, job, group)
        medians_s.append(median(bare_s))
        for name, statistic in STATISTICS.items():
            ratios[name].append(statistic(reported_s) / statistic(bare_s))
    shown = [median_of_rounds(values).text(digits=3) for values in ratios.values()]
    return [f"{median(medians_s) * 1e6:.0f}", str(calls), *shown]


def first_and_last(seconds: float, job: Job, group: Group) -> float:
    """How many times as long a step takes as the first case of this process as as its last one. It
    is one of ddp_sweep's: small activations, many allocations."""
    import torchvision

    def case() -> float:
        torch.manual_seed(0)
        model = torchvision.models.mobilenet_v3_small(num_classes=10)
        step = train_step(model, torch.randn(8, 3, 32, 32), job, group)
        return median(harness(step, 4 * seconds, job, group))

    first_s = case()
    for layers in (4, 64, 16):
        harness(train(layers, job, group), seconds, job, group)
    return first_s / case()


def rank_main(args: argparse.Namespace) -> None:
    job = join(args.device, None, 300)
    group, _ = Groups(job).take(tuple(range(job.world_size)), None)
    assert group is not None
    if args.kinds == [FIRST]:
        ratio = first_and_last(args.seconds, job, group)
        if job.rank == 0:
            print(f"first / last {ratio:.4f}", flush=True)
    else:
        warnings.filterwarnings("ignore", message="You are using a Backend")  # torch itself uses it
        rpc.init_rpc(f"rank{job.rank}", rank=job.rank, world_size=job.world_size)
        rows = []
        for kind in args.kinds:
            for name, make in KINDS.get(kind, {}).items():
                rows.append([name, *compare(make(job, group), args, job, group)])
        if job.rank == 0:
            ratio_heads = [f"harness / bare\n{name}s" for name in STATISTICS]
            print(f"{job.world_size} ranks, {args.pairs} pairs, {job.device.type}, {job.backend}\n")
            heads = ["step", "bare loop\n(us)", "calls", *ratio_heads]
            print(tabulate(rows, heads, disable_numparse=True), flush=True)
        rpc.shutdown()
    dist.barrier()
    dist.destroy_process_group()


def launch(kinds: list[str], args: argparse.Namespace) -> str:
    """What this file prints under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(args.ranks), __file__, "--kinds", ",".join(kinds)]
    command += ["--pairs", str(args.pairs), "--seconds", str(args.seconds)]
    command += ["--device", args.device]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    kinds = [*KINDS, FIRST]
    add("--kinds", default=",".join(kinds), help="(default: %(default)s)")
    add("--pairs", type=int, default=30, help="of a step (default: %(default)s)")
    add("--seconds", type=float, default=0.5, help="of a case (default: %(default)s)")
    add("--processes", type=int, default=8, help="of first (default: %(default)s)")
    add("--ranks", type=int, default=2, help="where python starts it (default: %(default)s)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args()
    args.kinds = args.kinds.split(",")
    if unknown := set(args.kinds) - set(kinds):
        parser.error(f"expected --kinds of {', '.join(kinds)}, got {', '.join(sorted(unknown))}")
    if "RANK" in os.environ:
        rank_main(args)
        return
    if in_turns := [kind for kind in args.kinds if kind != FIRST]:
        print(launch(in_turns, args), flush=True)
    if FIRST in args.kinds:
        ratios = [float(launch([FIRST], args).split()[-1]) for _ in range(args.processes)]
        ratio = median_of_rounds(ratios).text(digits=3)
        print(f"first case / last case, {args.processes} processes: {ratio}")


if __name__ == "__main__":
    main()
