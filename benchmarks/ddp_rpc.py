#!/usr/bin/env python3
"""How fast does a model train whose embeddings live on servers and whose dense part is under DDP?

Each server holds an EmbeddingBag (sum). A trainer looks a batch (20 to 50 indices in bags of 1 to
10) up on all servers by RPC, joins the answers, runs them through a dense stack
(512-256-128-ReLU-64-32-8) under DistributedDataParallel, and brings the gradients back to the
tables. Where the tables do not join to 512 columns, a linear layer before the stack makes 512 of
them. Timed is an epoch of 10 batches, and within it the phases of a batch. The batches are made
before, and are the same in each epoch.

    sec/epoch   of a trainer; `All`: of the slowest trainer, epoch by epoch
    samples/s = bags of its epoch / sec/epoch; `All`: bags of all trainers / that

    torchrun --nproc-per-node 4 benchmarks/ddp_rpc.py
    torchrun --nproc-per-node 17 benchmarks/ddp_rpc.py --number-trainers 8 --number-ps 8
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        benchmarks/ddp_rpc.py --number-embeddings 1000000 --sparse --json report.jsonl

Ranks: trainers, then servers, last the master, which sets the servers up. Does what PyTorch's
benchmark_ddp_rpc.py did, written anew. Its settings are `--lookup sequential --autograd distributed
--reducer ddp --backend gloo --epochs 100 --rpc-threads 16 --rpc-transports auto`. BSD-3-Clause.
How to read the tables: docs/ddp_rpc.md.
"""

import argparse
import itertools
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.optim
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.elastic.multiprocessing.errors import record
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.benchmark import Benchmark, Workload
from common.check import compare_replicas, digest, relative_error, verdict
from common.cli import Parser, add_common_flags, list_of, number, positive_int
from common.dist import Group, Job
from common.phases import Phases, Stamps, pool
from common.report import Case
from common.rpc import (
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

DENSE_INPUT = 512
CLASSES = 8
LR = 0.05
PHASES = ("lookup", "forward", "backward", "exchange", "step")
# what is checked against one process: in float64, where rounding does not hide an error
CHECKED = {"number_embeddings": 50, "batches": 3, "dtype": "float64"}
TOLERANCE = 1e-6  # of what these steps change

Key = dict[str, Any]
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # indices [n], offsets [bags], targets


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add, count = parser.add_argument, positive_int
    add("--number-trainers", type=count, metavar="N", help="(default: half of the ranks)")
    add("--number-ps", type=count, metavar="N", help="parameter servers (default: the other half)")
    add("--number-embeddings", type=count, default=300, metavar="N", help="rows of a table (300)")
    add("--embedding-dim", type=count, default=64, metavar="N", help="its columns (default: 64)")
    add("--sparse", action="store_true", help="tables with sparse gradients")
    how = list_of(str, ["parallel", "sequential"])
    text = "ask all servers at once or one after the other (default: parallel)"
    add("--lookup", type=how, default="parallel", metavar="HOW", help=text)
    how = list_of(str, ["distributed", "manual"])
    text = """distributed: torch's distributed autograd and DistributedOptimizer; manual: a call to
        each server with the gradient, which it applies (default: both)"""
    add("--autograd", type=how, default="all", metavar="HOW", help=text)
    text = """who averages the dense gradients: hook, DDP's all-reduce as a hook in Python, whose
        stamps tell the exchange from the backward pass; ddp, its own reducer in C++ without stamps
        (default: hook)"""
    add("--reducer", choices=("hook", "ddp"), default="hook", help=text)
    add_rpc_flags(parser, server_device="cpu")
    add_common_flags(parser)
    text = "as --iters: N timed epochs of 10 batches, the same ones in each epoch"
    add("--epochs", type=count, dest="iters", metavar="N", help=text)
    add("--warmup-cycles", type=number(int), dest="warmup_iters", help="as --warmup-iters")
    return parser.parse_args(argv)


def create_dense(key: Key) -> nn.Module:
    """Input [bags, servers * embedding_dim], output [bags, CLASSES]."""
    torch.manual_seed(0)
    width = key["servers"] * key["embedding_dim"]
    layers = [nn.Linear(DENSE_INPUT, 256), nn.Linear(256, 128), nn.ReLU()]
    layers += [nn.Linear(128, 64), nn.Linear(64, 32), nn.Linear(32, CLASSES)]
    if width != DENSE_INPUT:  # which eight tables of 64 columns join to
        layers.insert(0, nn.Linear(width, DENSE_INPUT, bias=False))
    return nn.Sequential(*layers).to(getattr(torch, key["dtype"]))


def create_table(key: Key, server: int, device: str = "cpu") -> nn.EmbeddingBag:
    torch.manual_seed(1 + server)
    size = (key["number_embeddings"], key["embedding_dim"])
    table = nn.EmbeddingBag(*size, mode="sum", sparse=key["sparse"])
    return table.to(device, getattr(torch, key["dtype"]))


def create_epoch(key: Key, trainer: int) -> list[Batch]:
    """A trainer's own batches, from its number: 20 to 50 indices in bags of 1 to 10."""
    rng = np.random.default_rng(trainer)
    epoch = []
    for _ in range(key["batches"]):
        count = int(rng.integers(20, 51))
        starts = np.concatenate([[0], np.cumsum(rng.integers(1, 11, size=count))])
        offsets = torch.tensor(starts[starts < count])
        indices = torch.tensor(rng.integers(0, key["number_embeddings"], size=count))
        epoch.append((indices, offsets, torch.tensor(rng.integers(0, CLASSES, size=len(offsets)))))
    return epoch


def loss_of(dense: nn.Module, looked_up: list[torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    joined = torch.cat([part.to(targets.device) for part in looked_up], dim=1)
    return nn.functional.cross_entropy(dense(joined), targets)


# -- what servers do, which host a table, and the master, which sets them up -----------------------

TABLE_LOCK = threading.Lock()  # calls come on several threads at once


def look_up(indices: torch.Tensor, offsets: torch.Tensor, stays: bool, graph: bool) -> torch.Tensor:
    """[bags, embedding_dim], on the CPU unless it stays where the table is. graph: for autograd."""
    device = hosted().weight.device
    with torch.set_grad_enabled(graph):
        found: torch.Tensor = hosted()(indices.to(device), offsets.to(device))
        return found if stays else found.cpu()


def apply_gradient(indices: torch.Tensor, offsets: torch.Tensor, gradient: torch.Tensor) -> None:
    """One step of SGD with the gradient of what `look_up` gave for these indices."""
    found = look_up(indices, offsets, stays=True, graph=True)
    (g,) = torch.autograd.grad(found, hosted().weight, gradient.to(found.device))
    with TABLE_LOCK, torch.no_grad():
        hosted().weight.add_(g, alpha=-LR)
        if found.is_cuda:  # each call has streams of its own, which the lock does not order
            torch.cuda.current_stream(found.device).synchronize()


def get_weight() -> torch.Tensor:
    return hosted().weight


def set_up_servers(key: Key, devices: list[str]) -> None:
    for i, device in enumerate(devices):
        rpc.rpc_sync(f"server{i}", host, args=(create_table, key, i, device))


def ask(key: Key, indices: torch.Tensor, offsets: torch.Tensor) -> list[torch.Tensor]:
    """What each server has looked up: [bags, embedding_dim]."""
    names = [f"server{i}" for i in range(key["servers"])]
    words = (indices, offsets, key["device"] == "cuda", key["autograd"] == "distributed")
    if key["lookup"] == "sequential":
        return [rpc.rpc_sync(name, look_up, args=words) for name in names]
    return torch.futures.wait_all([rpc.rpc_async(name, look_up, args=words) for name in names])


def distributed_step(key: Key, ddp: nn.Module, optimizer: Any, batch: Batch) -> Iterator[str]:
    """By torch's own: gradients and the optimizer find their way over RPC. Yields each phase."""
    with dist_autograd.context() as context:
        looked_up = ask(key, *batch[:2])
        yield "lookup"
        loss = loss_of(ddp, looked_up, batch[2])
        yield "forward"
        dist_autograd.backward(context, [loss])
        yield "backward"
        optimizer.step(context)
    yield "step"


def manual_step(key: Key, ddp: nn.Module, optimizer: Any, batch: Batch) -> Iterator[str]:
    """The same without distributed autograd: a call with the gradient to each server."""
    indices, offsets, targets = batch
    looked_up = [part.requires_grad_() for part in ask(key, indices, offsets)]
    yield "lookup"
    optimizer.zero_grad()
    loss = loss_of(ddp, looked_up, targets)
    yield "forward"
    loss.backward()
    yield "backward"
    calls = [
        rpc.rpc_async(f"server{i}", apply_gradient, args=(indices, offsets, part.grad))
        for i, part in enumerate(looked_up)
    ]
    optimizer.step()
    torch.futures.wait_all(calls)
    yield "step"


def stamp_exchange(ddp: DistributedDataParallel, phases: Phases) -> None:
    """DDP's own all-reduce, with stamps around that of the last bucket."""

    def arrived(future: Future[torch.Tensor]) -> torch.Tensor:
        # refers to no group: gloo's own thread must not hold the last reference to one
        phases.mark("exchange")
        return future.value()

    def hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        future = allreduce_hook(group, bucket)
        if bucket.is_last():
            phases.mark("backward")
            future = future.then(arrived)
        return future

    ddp.register_comm_hook(ddp.process_group, hook)


def build(devices: list[str], job: Job, key: Key, group: Group) -> Workload:
    """devices: of the servers."""

    def start(key: Key) -> tuple[nn.Module, Phases, Callable[..., Stamps]]:
        """New tables on all servers, a new dense part here, and what trains an epoch."""
        if job.rank == 0:
            rpc.rpc_sync("master", set_up_servers, args=(key, devices))
        dist.barrier(group.control)
        dense, phases = create_dense(key).to(job.device), Phases(job.device)
        ddp = DistributedDataParallel(dense, process_group=group.test)
        if key.get("reducer") != "ddp":
            stamp_exchange(ddp, phases)
        optimizer: Any
        if key["autograd"] == "distributed":
            rrefs = [rpc.remote(f"server{i}", get_weight) for i in range(key["servers"])]
            rrefs += [rpc.RRef(p) for p in ddp.parameters()]
            kind = torch.distributed.optim.DistributedOptimizer
            step, optimizer = distributed_step, kind(torch.optim.SGD, rrefs, lr=LR)
        else:
            step, optimizer = manual_step, torch.optim.SGD(ddp.parameters(), lr=LR)
        # targets where the loss is computed; indices and offsets stay on the CPU to travel
        batches = [(i, offsets, t.to(job.device)) for i, offsets, t in create_epoch(key, job.rank)]

        def epoch(after: Callable[[str], None] = phases.mark) -> Stamps:
            phases.begin()
            for batch in batches:
                for phase in step(key, ddp, optimizer, batch):
                    after(phase)
            return phases.step

        return dense, phases, epoch

    waits = {"backward": job.rank, "step": key["trainers"] - job.rank}

    def in_turn(phase: str) -> None:
        """No trainer changes a table while another one does, or looks it up."""
        for _ in range(waits.get(phase, 0)):
            dist.barrier(group.control)

    checked = key | CHECKED
    dense, _, epoch = start(checked)
    epoch(in_turn)
    facts: dict[str, Any] = {"dense": digest(dense)}
    if job.rank == 0:
        each = torch.arange(checked["number_embeddings"])  # every row as a bag of its own
        tables = ask(checked | {"autograd": "manual"}, each, each)
        facts["error"] = error_of(checked, [*tables, *dense.parameters()])
    _, phases, epoch = start(key)
    return Workload(epoch, facts=lambda: facts, returned=phases.durations)


def error_of(key: Key, trained: list[torch.Tensor]) -> float:
    """How far tables and dense weights are off a single process's, relative to their change in it.

    It applies each trainer's gradient to the tables, and the average to the dense part.
    """
    bags = [create_table(key, server) for server in range(key["servers"])]
    model = create_dense(key)
    weights = [*(bag.weight for bag in bags), *model.parameters()]
    average = {"params": model.parameters(), "lr": LR / key["trainers"]}
    optimizer = torch.optim.SGD([{"params": weights[: len(bags)]}, average], lr=LR)
    before = [weight.detach().clone() for weight in weights]
    epochs = [create_epoch(key, trainer) for trainer in range(key["trainers"])]
    for batches in zip(*epochs, strict=True):
        optimizer.zero_grad()
        for indices, offsets, targets in batches:
            loss_of(model, [bag(indices, offsets) for bag in bags], targets).backward()
        optimizer.step()
    both = zip(trained, weights, before, strict=True)
    return max(relative_error(got.cpu() - old, want - old) for got, want, old in both)


def derive(case: Case, times: Times, facts: list[dict[str, Any]]) -> None:
    """Fill in the metrics and the check."""
    m, samples, slowest = case.metrics, times.each(), times.slowest()
    m |= percentiles(slowest, "epoch_time")
    m["epoch_time_ci95_rel"] = relative_ci95(slowest)
    bags = [sum(len(batch[2]) for batch in create_epoch(case.key, t)) for t in case.ranks]
    m |= {"samples": sum(bags), "samples_per_s": sum(bags) / m["epoch_time_p50_s"]}
    rows = zip(samples, bags, strict=True)
    m["trainers"] = [percentiles(row, "epoch_time") | {"samples": n} for row, n in rows]
    spent = pool(itertools.chain(*times.returned))  # the epochs of all trainers
    batches = samples.size * case.key["batches"]
    m |= {f"{name}_s": sum(spent[name]) / batches for name in PHASES if name in spent}
    wrong, error = compare_replicas([f["dense"] for f in facts], case.ranks), facts[0]["error"]
    if not wrong and error > TOLERANCE:
        wrong = f"after {CHECKED['batches']} steps the parameters are {error:.2g} of their change "
        wrong += f"away from a single process (at most {TOLERANCE:g})"
    case.check = verdict(wrong)


ROWS: Columns = {  # `All`, and each trainer
    "": lambda row: row.key.get("name", "All"),
    "95% ci\nof p50": relative("epoch_time_ci95_rel"),
    **percentile_columns("epoch_time", "sec/epoch", "samples/s", lambda r: r.metrics["samples"]),
}
SPLIT: Columns = {
    "ms a batch": lambda c: f"lookup {c.key['lookup']}, autograd {c.key['autograd']}",
    **{name: metric(f"{name}_s", 1e3, 3) for name in PHASES},
}


def main() -> int:
    args = parse_args()
    roles = assign_roles(args, trainers=args.number_trainers, servers=args.number_ps, master=True)
    trainers, servers = len(roles.trainers), len(roles.servers)
    names = ("number_embeddings", "embedding_dim", "sparse")
    fixed: Key = {name: getattr(args, name) for name in names}
    fixed |= {"trainers": trainers, "servers": servers, "dtype": "float32", "batches": 10}
    fixed |= {"device": roles.device(0), "server_device": roles.device(trainers)}
    if args.reducer != "hook":  # the default, which older reports do not name
        fixed["reducer"] = args.reducer
    # torch 2.15 warns of its own functional optimizers, whatever the filters: not on stderr
    logging.captureWarnings(True)
    with Benchmark("ddp_rpc", args_of_rank(args, roles), roles.trainers) as bench:
        options = rpc_options(args, bench)
        fixed |= options.key()
        kind = "sparse table" if args.sparse else "table"
        tables = f"a {kind} of {args.number_embeddings} x {args.embedding_dim} each"
        roles_text = f"{trainers} trainers, {servers} servers with {tables}"
        bench.print(f"\n{roles_text}; reducer {args.reducer}\n{options}")
        with rpc_workers(bench, roles, options) as devices:
            for lookup, autograd in itertools.product(args.lookup, args.autograd):
                key = {"lookup": lookup, "autograd": autograd} | fixed
                work = partial(build, devices[trainers:-1], bench.job)
                bench.begin_table(f"lookup {lookup}, autograd {autograd}", ROWS, ["Trainer0"])
                if case := bench.measure(key, work, derive, roles.trainers):
                    for i, trainer in enumerate(case.metrics.get("trainers", [])):
                        bench.show(Case({"name": f"Trainer{i}"}, [], metrics=trainer))
        if bench.report.cases:
            table = render(SPLIT, bench.report.cases)
            bench.print(f"\nWhere the time goes: means over all batches and trainers\n\n{table}")
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
