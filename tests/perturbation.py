"""Does the harness change what it measures? Compares each step in the harness and in a bare loop.

    torchrun --nproc-per-node 2 tests/perturbation.py                              10 minutes
    torchrun --nproc-per-node 4 tests/perturbation.py --kinds all_reduce,train     some of it
    torchrun --nproc-per-node 4 tests/perturbation.py --kinds sources              10 minutes

A pair is a case of the harness (common.timing.TimedLoop) and a bare loop with as many calls; every
other pair runs in reverse order. Each has a median and a mean of the calls on rank 0. Printed are
ratios harness / bare loop: the median over the pairs with its 95% interval. 1 means no overhead.
Run this by hand on a machine where nothing else runs. docs/evidence.md has the results.
"""

import argparse
import gc
import json
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn
from torch.distributed import rpc
from torch.futures import Future

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import batch_update_ps, compile_sweep, ddp_rpc, ddp_sweep, parameter_server
from benchmarks.workloads.phases import interval_of_rounds
from benchmarks.workloads.roles import split_roles
from common.groups import Group, GroupCache, Job
from common.join import join, leave
from common.rpc import Roles
from common.stats import Estimate
from common.timing import Step, StopRule, TimedLoop, Workload
from harness import cli
from tests import cudalab_values, plain_loops

ROUNDS = 6
STATISTICS: dict[str, Callable[[list[float]], float]] = {"median": median, "mean": fmean}


def all_reduce(size: int, job: Job, group: Group) -> Step:
    """size: bytes."""
    tensor = torch.ones(size // 4, device=job.device)
    return lambda: dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group.workload)


def send_and_receive(size: int, job: Job, group: Group) -> Step:
    """Send to the next rank and receive from the previous one. size: bytes."""
    ranks = dist.get_world_size(group.workload)
    sent, received = torch.ones(2, size, dtype=torch.uint8, device=job.device)
    operations = [
        dist.P2POp(dist.isend, sent, group=group.workload, group_peer=(job.rank + 1) % ranks),
        dist.P2POp(dist.irecv, received, group=group.workload, group_peer=(job.rank - 1) % ranks),
    ]

    def step() -> None:
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return step


PARAMETERS: list[torch.Tensor] = []  # of the server
LOCK = threading.Lock()


def echo(payload: torch.Tensor) -> torch.Tensor:
    return payload


@rpc.functions.async_execution
def update(gradient: torch.Tensor) -> Future[Any]:
    updated: Future[Any] = Future()
    with LOCK:
        PARAMETERS[0] -= 1e-3 * gradient
        updated.set_result(PARAMETERS[0])
    return updated


def rpc_call(function: Callable[..., Any], size: int, job: Job, group: Group) -> Step:
    """The first rank calls the last with a payload and gets one of the same size. size: bytes."""
    payload = torch.ones(size // 4)
    PARAMETERS[:] = [payload.clone()]
    call = partial(rpc.rpc_sync, job.world_size - 1, function, (payload,))
    return call if job.rank == 0 else lambda: None


def train(layers: int, job: Job, group: Group) -> Step:
    """A training step under DistributedDataParallel. layers: number of linear layers."""
    model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(layers)]).to(job.device)
    replica = nn.parallel.DistributedDataParallel(model, process_group=group.workload)
    optimizer = torch.optim.SGD(replica.parameters(), lr=1e-3)
    batch = torch.randn(32, 128, device=job.device)

    def step() -> None:
        optimizer.zero_grad()
        replica(batch).square().mean().backward()
        optimizer.step()

    return step


# kind -> function that makes a step, and sizes of short to long steps
KINDS: dict[str, tuple[Callable[[int, Job, Group], Step], tuple[int, ...]]] = {
    "all_reduce": (all_reduce, (64, 2**16, 2**24)),
    "send": (send_and_receive, (64, 2**16, 2**24)),
    "rpc_sync": (partial(rpc_call, echo), (4, 2**20)),
    "batch_update": (partial(rpc_call, update), (2**12, 2**22)),
    "train": (train, (4, 64)),
}


# -- the five scripts that replace programs of PyTorch ---------------------------------------------

# functions that make the step of the script and the plain step
Pair = tuple[Callable[[], Step], Callable[[], Step]]


def key_of(script: ModuleType, flags: str, job: Job, group: Group, *given: Any) -> dict[str, Any]:
    """The key of the last case that a script plans with these flags, completed as `Benchmark`
    does. given: to `plan` besides the flags."""
    args = script.parse_args(f"--device {job.device.type} {flags}".split())
    cases = script.plan(args, *given)
    if isinstance(cases, dict):  # by table
        (cases,) = cases.values()
    *_, (_, _, key) = cases
    place = {"device": job.device.type, "backend": job.backend, "world_size": job.world_size}
    return place | {"ranks": len(group.ranks)} | key


def pair_of_ddp_sweep(job: Job, group: Group, roles: Roles) -> Pair:
    flags = "--model mobilenet_v3_small --batch-size 8 --image-size 64 --no-breakdown"
    key = key_of(ddp_sweep, flags, job, group, job, [len(group.ranks)], {})
    bench: Any = SimpleNamespace(job=job, print=print, phase=lambda *_: None)
    of_rank = (group.workload, job.rank, job.device)
    plain = partial(plain_loops.ddp_sweep, *of_rank, "mobilenet_v3_small", 8, 64)
    return lambda: ddp_sweep.build(bench, key, group).step, plain


def pair_of_compile_sweep(job: Job, group: Group, roles: Roles) -> Pair:
    """Forward and backward only, because the source program has no optimizer."""
    flags = "--model toy-small --batch-size 20 --ddp --dynamo eager"
    key = key_of(compile_sweep, flags, job, group, job, {}) | {"ranks": len(group.ranks)}
    bench: Any = SimpleNamespace(job=job, print=print, phase=lambda *_: None)
    widths = [10, *[1000] * 3, *[100] * 8]
    plain = partial(plain_loops.compile_sweep, group.workload, job.rank, job.device, widths, 20)

    def script() -> Step:
        step = compile_sweep.build(bench, {"eager": 0.0}, key, group).parts["forward+backward"]
        assert step is not None
        return step

    return script, plain


def pair_of_ddp_rpc(job: Job, group: Group, roles: Roles) -> Pair:
    flags = "--embedding-dim 512 --lookup sequential --autograd distributed"
    key = key_of(ddp_rpc, flags, job, group, roles, {})
    of_rank = (group.workload, job.rank, job.device)
    epoch = ddp_rpc.epoch_of(key, job.rank)
    plain = partial(plain_loops.ddp_rpc, *of_rank, key["number_embeddings"], epoch)
    return lambda: ddp_rpc.build(job, key, group, devices=["cpu"]).step, plain


def pair_of_parameter_server(job: Job, group: Group, roles: Roles) -> Pair:
    key = key_of(parameter_server, "--routes rpc --servers running", job, group, roles, {})
    names = ("num_embeddings", "embedding_dim", "dense_layers", "dense_size")
    batches = parameter_server.batches_of(key, job.rank, job.device)
    sizes: Any = {"sizes": [key[name] for name in names], "bucket_mb": key["bucket_size"]}
    plain = partial(plain_loops.parameter_server, group.workload, job.device, batches, **sizes)
    devices = ["cpu"] * roles.servers.stop
    build = partial(parameter_server.build, roles=roles, devices=devices, timeout_s=60)
    return lambda: build(job, key, group).step, plain


def pair_of_batch_update_ps(job: Job, group: Group, roles: Roles) -> Pair:
    key = key_of(batch_update_ps, "--payload module", job, group, roles)
    batches = batch_update_ps.batches_of(key, job.rank)
    plain = partial(plain_loops.batch_update_ps, group.workload, job.rank, job.device, batches)
    build = partial(batch_update_ps.build, server_device="cpu", timeout_s=60)
    return lambda: build(job, key, group).step, plain


SOURCES: dict[str, Callable[[Job, Group, Roles], Pair]] = {
    "ddp_rpc": pair_of_ddp_rpc,
    "ddp_sweep": pair_of_ddp_sweep,
    "parameter_server": pair_of_parameter_server,
    "batch_update_ps": pair_of_batch_update_ps,
    "compile_sweep": pair_of_compile_sweep,
}


def print_losses(name: str, pair: Pair, steps: int, job: Job, group: Group) -> None:
    """Print a line of JSON from each trainer: the losses and norms during set-up and the given
    number of steps."""
    found: dict[str, Any] = {"source": name, "rank": job.rank}
    values: list[tuple[str, float]] = []
    cudalab_values.record(lambda *value: values.append(value))
    for way, make in zip(("script", "plain"), pair, strict=True):
        values.clear()
        step = make()
        for _ in range(steps):
            step()
        losses, *norms = (
            [value for of, value in values if of == kind]
            for kind in ("loss", "gradients", "parameters")
        )
        found |= {way: losses, f"{way} norms": [*zip(*norms, strict=True)]}
        dist.barrier(group.control)
    sys.stdout.write(json.dumps(found) + "\n")  # in one call, because the ranks share stdout
    sys.stdout.flush()


def harness(step: Step, seconds: float, job: Job, group: Group) -> list[float]:
    """Seconds of each call in a case: warm-up, then ROUNDS blocks."""
    rule = StopRule(max_seconds=seconds, rounds=ROUNDS)
    times = TimedLoop(Workload(step), group, job.device, rule).run()
    return list(times.slowest())


def bare_loop(step: Step, calls: int, job: Job, group: Group) -> list[float]:
    """Seconds of each call in a plain loop, after five warm-up calls."""
    gc.collect()  # like a case before its first block
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


def compare(
    step: Step, args: argparse.Namespace, job: Job, group: Group, plain: Step | None = None
) -> list[str]:
    """The cells of a row: the bare loop's median, and the ratio of each statistic.

    plain: what the bare loop calls, if not the same step.
    """
    calls = len(harness(step, args.seconds, job, group))
    ways = {
        "harness": partial(harness, step, args.seconds, job, group),
        "bare": partial(bare_loop, plain or step, calls, job, group),
    }
    medians_s: list[float] = []
    ratios: dict[str, list[float]] = {name: [] for name in STATISTICS}
    for pair in range(args.pairs):
        times = {name: ways[name]() for name in (reversed(ways) if pair % 2 else ways)}
        medians_s.append(median(times["bare"]))
        for name, statistic in STATISTICS.items():
            ratios[name].append(statistic(times["harness"]) / statistic(times["bare"]))
    shown = []
    for values in ratios.values():
        ends = interval_of_rounds(values) or (None, None)
        shown.append(Estimate(median(values), *ends).text(digits=3))
    return [f"{median(medians_s) * 1e6:.0f}", str(calls), *shown]


def main() -> None:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    kinds = cli.list_of(str, (*KINDS, *SOURCES, "sources"))
    text = f"also sources, or some of {', '.join(SOURCES)} (default: all others)"
    add("--kinds", type=kinds, default=list(KINDS), help=text)
    add("--losses", type=int, metavar="N", help="of sources: print the losses of N steps")
    add("--pairs", type=int, default=30, help="of a step (default: %(default)s)")
    add("--seconds", type=float, default=0.5, help="of a case (default: %(default)s)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args()
    job = join(args.device)
    groups = GroupCache(job)
    ranks = tuple(range(job.world_size))
    group = groups.acquire(ranks, (ranks,))
    assert group is not None
    sources = [name for name in SOURCES if {name, "sources"} & {*args.kinds}]
    args.kinds = [kind for kind in args.kinds if kind in KINDS]
    roles, name = None, f"rank{job.rank}"
    if sources:  # all ranks but a server and the master are trainers
        roles = split_roles(job.world_size, servers=1, master=True)
        name = roles.name(job.rank)
    kinds_of_rpc = {"rpc_sync", "batch_update", "ddp_rpc", "parameter_server", "batch_update_ps"}
    over_rpc = bool(kinds_of_rpc & {*args.kinds, *sources})
    if over_rpc:  # only if needed: its idle threads would run during other steps
        warnings.filterwarnings("ignore", message="You are using a Backend")  # torch itself uses it
        few_cores = job.world_size > len(os.sched_getaffinity(0))
        transports = ["uv"] if few_cores else None  # like rpc_options, because shm polls
        options = rpc.TensorPipeRpcBackendOptions(_transports=transports)
        rpc.init_rpc(name, rank=job.rank, world_size=job.world_size, rpc_backend_options=options)
    rows = []
    for kind in args.kinds:
        make, sizes = KINDS[kind]
        for size in sizes:
            step = make(size, job, group)
            rows.append([f"{kind} {cli.show_size(size)}", *compare(step, args, job, group)])
    if roles:
        logging.captureWarnings(True)  # functional optimizers of torch emit warnings
        trainers = groups.acquire(tuple(roles.trainers), (tuple(roles.trainers),))
        of_case = replace(job, world_size=len(roles.trainers), local_world_size=len(roles.trainers))
        for source in sources if trainers else []:
            assert trainers is not None
            pair = SOURCES[source](of_case, trainers, roles)
            if args.losses:
                print_losses(source, pair, args.losses, job, trainers)
                continue
            script, plain = (make() for make in pair)
            rows.append([source, *compare(script, args, job, trainers, plain)])
    if job.rank == 0 and rows:
        print(f"{job.world_size} ranks, {args.pairs} pairs, {job.device.type}, {job.backend}\n")
        heads = ["step", "bare loop\n(us)", "calls"]
        heads += [f"harness / bare\n{name}s" for name in STATISTICS]
        print(tabulate(rows, heads, disable_numparse=True), flush=True)
    if over_rpc:
        rpc.shutdown()
    leave(job)


if __name__ == "__main__":
    main()
