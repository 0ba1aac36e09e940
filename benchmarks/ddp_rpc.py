#!/usr/bin/env python3
"""How fast does a model train whose embeddings live on servers and whose dense part is under DDP?

Each server holds an EmbeddingBag (sum). A trainer asks all servers by RPC to look up a batch (20 to
50 indices in bags of 1 to 10), joins the answers, runs them through a dense stack
(512-256-128-ReLU-64-32-8) under DistributedDataParallel, and brings the gradients back to the
tables. If the tables do not join to 512 columns, a linear layer before the stack makes 512 of them.
The script times an epoch of 10 batches, and the phases of a batch within it. The batches are made
before the timing, and are the same in each epoch.

    sec/epoch   of a trainer; `All`: of the slowest trainer, epoch by epoch
    samples/s = bags of its epoch / sec/epoch; `All`: bags of all trainers / that

    torchrun --nproc-per-node 4 benchmarks/ddp_rpc.py
    torchrun --nproc-per-node 17 benchmarks/ddp_rpc.py --number-trainers 8 --number-ps 8
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        benchmarks/ddp_rpc.py --number-embeddings 1000000 --sparse --json report.jsonl

The first ranks are trainers, then come servers, and the last rank is the master, which sets up the
servers. The script does what PyTorch's benchmark_ddp_rpc.py did, written anew. The settings of that
script are `--lookup sequential --autograd distributed --reducer ddp --backend gloo --epochs 100
--rpc-threads 16 --rpc-transports auto`. BSD-3-Clause. How to read the tables: docs/ddp_rpc.md.
"""

import argparse
import itertools
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.optim
import torch.distributed.rpc as rpc
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.elastic.multiprocessing.errors import record
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.answers import Estimate, differs, fastest, ranked, series, show_seconds
from common.check import compare_replicas, digest, relative_error, verdict
from common.cli import Parser, add_common_flags, list_of, number, positive_int
from common.groups import Group, Job
from common.old import Benchmark, Workload
from common.report import Case
from common.rpc import (
    Roles,
    RpcOptions,
    add_rpc_flags,
    args_of_rank,
    assign_roles,
    host,
    hosted,
    rpc_options,
    rpc_workers,
)
from common.stats import Times, percentiles, relative_ci95
from common.table import Columns, metric, percentile_columns, relative, render
from common.workloads.phases import Phases, Stamps, pool

DENSE_INPUT = 512
CLASSES = 8
LR = 0.05
PHASES = ("lookup", "forward", "backward", "exchange", "step")
# the check against one process trains this, in float64: rounding does not hide an error there
CHECKED = {"number_embeddings": 50, "batches": 3, "dtype": "float64"}
TOLERANCE = 1e-6  # relative to the largest change in these steps

Key = dict[str, Any]
Batch = tuple[Tensor, Tensor, Tensor]  # indices [n], offsets [bags], targets


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    text = "trainers (default: half of the ranks)"
    add("--number-trainers", type=positive_int, metavar="N", help=text)
    text = "parameter servers (default: the other half)"
    add("--number-ps", type=positive_int, metavar="N", help=text)
    text = "rows of a table (default: 300)"
    add("--number-embeddings", type=positive_int, default=300, metavar="N", help=text)
    text = "columns of a table (default: 64)"
    add("--embedding-dim", type=positive_int, default=64, metavar="N", help=text)
    add("--sparse", action="store_true", help="tables with sparse gradients")
    how = list_of(str, ["parallel", "sequential"])
    text = "ask all servers at once or one after the other (default: parallel)"
    add("--lookup", type=how, default="parallel", metavar="HOW", help=text)
    how = list_of(str, ["distributed", "manual"])
    text = """distributed: torch's distributed autograd and DistributedOptimizer; manual: a call
        brings the gradient to each server, which applies it (default: both)"""
    add("--autograd", type=how, default="all", metavar="HOW", help=text)
    text = """who averages the dense gradients: hook, which is DDP's all-reduce as a hook in Python,
        whose stamps tell the exchange from the backward pass; ddp, which is DDP's own reducer in
        C++, without stamps (default: hook)"""
    add("--reducer", choices=("hook", "ddp"), default="hook", help=text)
    add_rpc_flags(parser, server_device="cpu")
    add_common_flags(parser)
    text = "the same as --iters: N timed epochs of 10 batches, the same batches in each epoch"
    add("--epochs", type=positive_int, dest="iters", metavar="N", help=text)
    text = "the same as --warmup-iters"
    add("--warmup-cycles", type=number(int), dest="warmup_iters", help=text)
    return parser.parse_args(argv)


def create_dense(key: Key) -> nn.Module:
    """Input [bags, servers * embedding_dim], output [bags, CLASSES]."""
    torch.manual_seed(0)
    width = key["servers"] * key["embedding_dim"]
    layers = [
        nn.Linear(DENSE_INPUT, 256),
        nn.Linear(256, 128),
        nn.ReLU(),
        nn.Linear(128, 64),
        nn.Linear(64, 32),
        nn.Linear(32, CLASSES),
    ]
    if width != DENSE_INPUT:  # eight tables of 64 columns join to DENSE_INPUT
        layers.insert(0, nn.Linear(width, DENSE_INPUT, bias=False))
    dtype = getattr(torch, key["dtype"])
    return nn.Sequential(*layers).to(dtype)


def create_table(key: Key, server: int, device: str = "cpu") -> nn.EmbeddingBag:
    torch.manual_seed(1 + server)
    rows = key["number_embeddings"]
    columns = key["embedding_dim"]
    table = nn.EmbeddingBag(rows, columns, mode="sum", sparse=key["sparse"])
    return table.to(device, getattr(torch, key["dtype"]))


def create_epoch(key: Key, trainer: int) -> list[Batch]:
    """The batches of a trainer, drawn from its number: 20 to 50 indices in bags of 1 to 10."""
    rng = np.random.default_rng(trainer)
    epoch = []
    for _ in range(key["batches"]):
        count = int(rng.integers(20, 50, endpoint=True))
        # for at least as many bags as are needed
        bag_sizes = rng.integers(1, 10, size=count, endpoint=True)
        starts = np.concatenate([[0], np.cumsum(bag_sizes)])
        offsets = torch.tensor(starts[starts < count])
        indices = rng.integers(0, key["number_embeddings"], size=count)
        targets = rng.integers(0, CLASSES, size=len(offsets))
        epoch.append((torch.tensor(indices), offsets, torch.tensor(targets)))
    return epoch


def loss_of(dense: nn.Module, looked_up: list[Tensor], targets: Tensor) -> Tensor:
    parts = [part.to(targets.device) for part in looked_up]
    joined = torch.cat(parts, dim=1)
    return nn.functional.cross_entropy(dense(joined), targets)


# -- servers, which host a table, and the master, which sets them up -------------------------------

TABLE_LOCK = threading.Lock()  # several threads of RPC run calls at once


def look_up(indices: Tensor, offsets: Tensor, stays: bool, graph: bool) -> Tensor:
    """[bags, embedding_dim]; on the CPU, or on the table's device if it `stays` there.

    graph: whether autograd follows.
    """
    device = hosted().weight.device
    with torch.set_grad_enabled(graph):
        looked_up: Tensor = hosted()(indices.to(device), offsets.to(device))
        return looked_up if stays else looked_up.cpu()


def apply_gradient(indices: Tensor, offsets: Tensor, gradient: Tensor) -> None:
    """One step of SGD. gradient: of what `look_up` returned for these indices."""
    looked_up = look_up(indices, offsets, stays=True, graph=True)
    device = looked_up.device
    gradient = gradient.to(device)
    (table_gradient,) = torch.autograd.grad(looked_up, hosted().weight, gradient)
    with TABLE_LOCK, torch.no_grad():
        hosted().weight.add_(table_gradient, alpha=-LR)
        if looked_up.is_cuda:  # each call has its own streams, which the lock does not order
            torch.cuda.current_stream(device).synchronize()


def get_weight() -> Tensor:
    return hosted().weight


def set_up_servers(key: Key, devices: list[str]) -> None:
    for server, device in enumerate(devices):
        rpc.rpc_sync(f"server{server}", host, args=(create_table, key, server, device))


# -- trainers --------------------------------------------------------------------------------------


def ask(key: Key, indices: Tensor, offsets: Tensor) -> list[Tensor]:
    """The rows that each server looks up: [bags, embedding_dim]."""
    names = [f"server{server}" for server in range(key["servers"])]
    on_gpu = key["device"] == "cuda"
    is_distributed = key["autograd"] == "distributed"
    asked = (indices, offsets, on_gpu, is_distributed)
    if key["lookup"] == "sequential":
        return [rpc.rpc_sync(name, look_up, args=asked) for name in names]
    calls = [rpc.rpc_async(name, look_up, args=asked) for name in names]
    return torch.futures.wait_all(calls)


def distributed_step(key: Key, ddp: nn.Module, optimizer: Any, batch: Batch) -> Iterator[str]:
    """Torch brings the gradients to the servers, and runs an optimizer there. Yields each phase."""
    indices, offsets, targets = batch
    with dist_autograd.context() as context:
        looked_up = ask(key, indices, offsets)
        yield "lookup"
        loss = loss_of(ddp, looked_up, targets)
        yield "forward"
        dist_autograd.backward(context, [loss])
        yield "backward"
        optimizer.step(context)
    yield "step"


def manual_step(key: Key, ddp: nn.Module, optimizer: Any, batch: Batch) -> Iterator[str]:
    """The same without distributed autograd: a call brings the gradient to each server."""
    indices, offsets, targets = batch
    looked_up = [part.requires_grad_() for part in ask(key, indices, offsets)]
    yield "lookup"
    optimizer.zero_grad()
    loss = loss_of(ddp, looked_up, targets)
    yield "forward"
    loss.backward()
    yield "backward"
    calls = []
    for server, part in enumerate(looked_up):
        gradient = (indices, offsets, part.grad)
        calls.append(rpc.rpc_async(f"server{server}", apply_gradient, args=gradient))
    optimizer.step()
    torch.futures.wait_all(calls)
    yield "step"


def stamp_exchange(ddp: DistributedDataParallel, phases: Phases) -> None:
    """DDP's own all-reduce as a hook, with stamps around the last bucket."""

    def on_average(future: Future[Tensor]) -> Tensor:
        # refers to no group: gloo's own thread must not hold the last reference to one
        phases.mark("exchange")
        return future.value()

    def hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> Future[Tensor]:
        future = allreduce_hook(group, bucket)
        if bucket.is_last():
            phases.mark("backward")
            future = future.then(on_average)
        return future

    ddp.register_comm_hook(ddp.process_group, hook)


class Training(NamedTuple):
    """What `start_training` has set up on this trainer."""

    dense: nn.Module
    phases: Phases
    epoch: Callable[..., Stamps]  # trains an epoch; `after` is called with the name of each phase


def start_training(job: Job, key: Key, group: Group, devices: list[str]) -> Training:
    """New tables on all servers and a new dense part here. devices: of the servers."""
    if job.rank == 0:
        rpc.rpc_sync("master", set_up_servers, args=(key, devices))
    dist.barrier(group.control)  # the servers have their tables
    dense = create_dense(key).to(job.device)
    phases = Phases(job.device)
    ddp = DistributedDataParallel(dense, process_group=group.test)
    if key.get("reducer") != "ddp":
        stamp_exchange(ddp, phases)
    optimizer: Any
    if key["autograd"] == "distributed":
        servers = [f"server{server}" for server in range(key["servers"])]
        rrefs = [rpc.remote(server, get_weight) for server in servers]
        rrefs += [rpc.RRef(parameter) for parameter in ddp.parameters()]
        step = distributed_step
        optimizer = torch.distributed.optim.DistributedOptimizer(torch.optim.SGD, rrefs, lr=LR)
    else:
        step = manual_step
        optimizer = torch.optim.SGD(ddp.parameters(), lr=LR)
    batches = []
    for indices, offsets, targets in create_epoch(key, job.rank):
        # the targets go where the loss is computed; the rest stays on the CPU, to travel
        batches.append((indices, offsets, targets.to(job.device)))

    def epoch(after: Callable[[str], None] = phases.mark) -> Stamps:
        phases.begin()
        for batch in batches:
            for phase in step(key, ddp, optimizer, batch):
                after(phase)
        return phases.step

    return Training(dense, phases, epoch)


def train_in_turn(job: Job, key: Key, group: Group, devices: list[str]) -> dict[str, Any]:
    """The check: train a small case one trainer at a time. What `derive` compares.

    No trainer changes a table while another one changes it or looks it up.
    """
    training = start_training(job, key, group, devices)
    barriers = {"backward": job.rank, "step": key["trainers"] - job.rank}

    def wait_for_turn(phase: str) -> None:
        for _ in range(barriers.get(phase, 0)):
            dist.barrier(group.control)

    training.epoch(wait_for_turn)
    facts: dict[str, Any] = {"dense": digest(training.dense)}
    if job.rank == 0:
        rows = torch.arange(key["number_embeddings"])  # every row is a bag of its own
        tables = ask(key | {"autograd": "manual"}, rows, rows)
        trained = [*tables, *training.dense.parameters()]
        facts["error"] = error_of(key, trained)
    return facts


def build(job: Job, key: Key, group: Group, *, devices: list[str]) -> Workload:
    """What a trainer measures; before that, the check. devices: of the servers."""
    facts = train_in_turn(job, key | CHECKED, group, devices)
    training = start_training(job, key, group, devices)
    return Workload(training.epoch, facts=lambda: facts, returned=training.phases.durations)


def error_of(key: Key, trained: list[Tensor]) -> float:
    """How far tables and dense weights are off a single process's, relative to their change in it.

    That process applies each trainer's gradient to the tables, and the average to the dense part.
    """
    bags = [create_table(key, server) for server in range(key["servers"])]
    model = create_dense(key)
    tables = [bag.weight for bag in bags]
    weights = [*tables, *model.parameters()]
    average = {"params": model.parameters(), "lr": LR / key["trainers"]}
    optimizer = torch.optim.SGD([{"params": tables}, average], lr=LR)
    before = [weight.detach().clone() for weight in weights]
    epochs = [create_epoch(key, trainer) for trainer in range(key["trainers"])]
    for batches in zip(*epochs, strict=True):
        optimizer.zero_grad()
        for indices, offsets, targets in batches:
            looked_up = [bag(indices, offsets) for bag in bags]
            loss_of(model, looked_up, targets).backward()
        optimizer.step()
    errors = []
    for got, wanted, old in zip(trained, weights, before, strict=True):
        changed = got.cpu() - old
        errors.append(relative_error(changed, wanted - old))
    return max(errors)


def bags_of(key: Key, trainer: int) -> int:
    """The bags of a trainer's epoch, which are its samples."""
    return sum(len(targets) for _, _, targets in create_epoch(key, trainer))


def derive(case: Case, times: Times, facts: list[dict[str, Any]]) -> None:
    """Fill in the metrics and the check. facts: of each trainer."""
    metrics = case.metrics
    epochs = times.each()
    slowest = times.slowest()
    metrics |= percentiles(slowest, "epoch_time")
    metrics["epoch_time_ci95_rel"] = relative_ci95(slowest)
    bags = [bags_of(case.key, trainer) for trainer in case.ranks]
    metrics["samples"] = sum(bags)
    metrics["samples_per_s"] = sum(bags) / metrics["epoch_time_p50_s"]
    metrics["trainers"] = []
    for epochs_of_trainer, samples in zip(epochs, bags, strict=True):
        row = percentiles(epochs_of_trainer, "epoch_time") | {"samples": samples}
        metrics["trainers"].append(row)
    seconds = pool(itertools.chain(*times.returned))  # in the epochs of all trainers
    batches = epochs.size * case.key["batches"]
    for phase in PHASES:
        if phase in seconds:
            metrics[f"{phase}_s"] = sum(seconds[phase]) / batches
    case.check = verdict(problem_of(case, facts))


def problem_of(case: Case, facts: list[dict[str, Any]]) -> str | None:
    """What the check before the timing saw, or None."""
    problem = compare_replicas([fact["dense"] for fact in facts], case.ranks)
    error = facts[0]["error"]
    if problem or error <= TOLERANCE:
        return problem
    after = f"after {CHECKED['batches']} steps the parameters are {error:.2g} of their change"
    return f"{after} away from a single process (at most {TOLERANCE:g})"


ROWS: Columns = {  # `All`, and each trainer
    "": lambda row: row.key.get("name", "All"),
    "95% ci\nof p50": relative("epoch_time_ci95_rel"),
    **percentile_columns("epoch_time", "sec/epoch", "samples/s", lambda r: r.metrics["samples"]),
}
SPLIT: Columns = {
    "ms a batch": lambda c: f"lookup {c.key['lookup']}, autograd {c.key['autograd']}",
    **{name: metric(f"{name}_s", 1e3, 3) for name in PHASES},
}


def answer(cases: list[Case]) -> list[str]:
    """Which way of lookup and autograd is the fastest, its rate, and its longest phase."""
    sentences: list[str] = []
    for name, same in series(cases, ("lookup", "autograd")).items():
        epochs = ranked(same, "epoch_time")
        if not epochs:
            continue
        best, _ = epochs[0]
        sentences.append(name + fastest(ways_of(epochs)))
        phases = {phase: best.metrics.get(f"{phase}_s", 0.0) for phase in PHASES}
        longest = max(phases, key=lambda phase: phases[phase])
        sentence = f"the fastest way trains {best.metrics['samples_per_s']:,.0f} samples/s"
        if phases[longest]:
            sentence += f"; its longest phase is {longest}, {show_seconds(phases[longest])} a batch"
        sentences.append(name + sentence)
    return sentences


def ways_of(epochs: list[tuple[Case, Estimate]]) -> dict[str, Estimate]:
    """The epochs by their ways, as far as these differ."""
    names = ("lookup", "autograd")
    keys = [case.key for case, _ in epochs]
    differing = [name for name in names if differs(name, keys)]
    ways: dict[str, Estimate] = {}
    for case, epoch in epochs:
        words = [f"{name} {case.key[name]}" for name in differing or names]
        ways[", ".join(words)] = epoch
    return ways


def plan(args: argparse.Namespace, roles: Roles, options: RpcOptions) -> list[Key]:
    """The key of each case: every way of lookup with every way of autograd."""
    fixed: Key = {
        "number_embeddings": args.number_embeddings,
        "embedding_dim": args.embedding_dim,
        "sparse": args.sparse,
        "trainers": len(roles.trainers),
        "servers": len(roles.servers),
        "dtype": "float32",
        "batches": 10,
        "device": roles.device(roles.trainers[0]),
        "server_device": roles.device(roles.servers[0]),
    }
    if args.reducer != "hook":  # the default, which older reports do not name
        fixed["reducer"] = args.reducer
    fixed |= options.key()
    ways = itertools.product(args.lookup, args.autograd)
    return [{"lookup": lookup, "autograd": autograd} | fixed for lookup, autograd in ways]


def title_of(args: argparse.Namespace, roles: Roles, options: RpcOptions) -> str:
    """What all cases share."""
    kind = "sparse table" if args.sparse else "table"
    tables = f"a {kind} of {args.number_embeddings} x {args.embedding_dim} each"
    counts = f"{len(roles.trainers)} trainers, {len(roles.servers)} servers with {tables}"
    return f"{counts}; reducer {args.reducer}\n{options}"


def main() -> int:
    args = parse_args()
    roles = assign_roles(args, trainers=args.number_trainers, servers=args.number_ps, master=True)
    # torch 2.15 warns of its own functional optimizers, whatever the filters: not on stderr
    logging.captureWarnings(True)
    torch.optim.SGD([torch.zeros(1)])  # the first optimizer imports torch._dynamo: for seconds
    with Benchmark("ddp_rpc", args_of_rank(args, roles), roles.trainers, answer) as bench:
        options = rpc_options(args, bench)
        keys = plan(args, roles, options)
        bench.announce(keys)
        bench.print(f"\n{title_of(args, roles, options)}")
        with rpc_workers(bench, roles, options) as devices:
            servers = [devices[rank] for rank in roles.servers]
            build_case = partial(build, bench.job, devices=servers)
            for key in keys:
                title = f"lookup {key['lookup']}, autograd {key['autograd']}"
                bench.begin_table(title, ROWS, ["Trainer0"])
                case = bench.measure(key, build_case, derive, roles.trainers)
                trainers = case.metrics.get("trainers", []) if case else []
                for number, metrics in enumerate(trainers):
                    bench.show(Case({"name": f"Trainer{number}"}, [], metrics=metrics))
        if bench.report.cases:
            table = render(SPLIT, bench.report.cases)
            bench.print(f"\nWhere the time goes: means over all batches and trainers\n\n{table}")
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
