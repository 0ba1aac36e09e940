#!/usr/bin/env python3
"""How fast does a model train whose embeddings live on servers and whose dense part is under DDP?

Each server holds an EmbeddingBag (sum). A trainer looks a batch (20 to 50 indices in bags of 1 to
10) up on all servers by RPC, joins the answers, runs them through a dense stack
(512-256-128-ReLU-64-32-8) that DistributedDataParallel keeps alike on all trainers, and brings
the gradients back to the tables. Timed is an epoch of 10 batches, which are made before.

    sec/epoch   of a trainer; `All`: of the slowest trainer, epoch by epoch
    samples/s = bags of its epoch / sec/epoch; `All`: bags of all trainers / that

    --lookup parallel | sequential    ask all servers at once, or one after the other
    --autograd distributed            distributed autograd and DistributedOptimizer
               manual                 the gradients of what was looked up are sent to the servers,
                                      which apply them; the dense part has its own optimizer

A batch is split into lookup, forward, backward (without the exchange), exchange (the all-reduce of
the last dense bucket) and step (the optimizer, on the servers too).

    torchrun --nproc-per-node 4 benchmarks/ddp_rpc.py
    torchrun --nproc-per-node 17 benchmarks/ddp_rpc.py --number-trainers 8 --number-ps 8
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        benchmarks/ddp_rpc.py --number-embeddings 1000000 --sparse --json report.jsonl

Ranks: trainers, then servers, last the master, which sets the servers up.

Does what PyTorch's torch/distributed/benchmarks/benchmark_ddp_rpc.py did, written anew; with
`--lookup sequential --autograd distributed --rpc-threads 16 --rpc-transports auto` it works as that
did. BSD-3-Clause. docs/ddp_rpc.md shows how to read the tables.
"""

import argparse
import itertools
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.optim import DistributedOptimizer
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.benchmark import Benchmark, Workload
from common.check import compare_replicas, digest, relative_error, verdict
from common.cli import Parser, add_common_flags, list_of, number, positive_int
from common.dist import Group, Job
from common.phases import Phases, pool, timed
from common.report import Case
from common.rpc import add_rpc_flags, assign_roles, host, hosted, rpc_options, rpc_workers
from common.stats import percentiles, relative_ci95
from common.table import Columns, metric, percentile_columns, relative, render

LOOKUPS = ("parallel", "sequential")
AUTOGRADS = ("distributed", "manual")
DENSE_INPUT = 512
CLASSES = 8
BATCHES = 10  # of an epoch
LR = 0.05
PHASES = ("lookup", "forward", "backward", "exchange", "step")
CHECKED_STEPS = 3  # on small tables, against a single process
CHECKED_EMBEDDINGS = 50
TOLERANCE = 1e-6  # of what these steps change; in float64, where rounding does not hide an error

Key = dict[str, Any]
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # indices [n], offsets [bags], targets
Turn = Callable[[], AbstractContextManager[None]]  # around a trainer's update of the tables


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    size = positive_int
    add("--number-trainers", type=size, metavar="N", help="(default: half of the ranks)")
    add("--number-ps", type=size, metavar="N", help="parameter servers (default: the other half)")
    add("--number-embeddings", type=size, default=300, metavar="N", help="rows of a table (300)")
    add("--embedding-dim", type=size, default=64, metavar="N", help="of a table (default: 64)")
    add("--sparse", action="store_true", help="tables with sparse gradients")
    how = list_of(str, LOOKUPS)
    add("--lookup", type=how, default=["parallel"], metavar="HOW", help="(default: parallel)")
    how = list_of(str, AUTOGRADS)
    add("--autograd", type=how, default=[*AUTOGRADS], metavar="HOW", help="(default: both)")
    add_rpc_flags(parser, server_device="cpu")
    add_common_flags(parser)
    for name, other in (("--epochs", "iters"), ("--warmup-cycles", "warmup_iters")):
        text = f"as --{other.replace('_', '-')}"
        add(name, type=number(int), dest=other, default=argparse.SUPPRESS, metavar="N", help=text)
    return parser.parse_args(argv)


# -- the model, and its data -----------------------------------------------------------------------


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


def parameter_rrefs() -> list[rpc.RRef[torch.Tensor]]:
    return [rpc.RRef(p) for p in hosted().parameters()]


def get_weight() -> torch.Tensor:
    weight: torch.Tensor = hosted().weight
    return weight.detach().cpu()


def set_up_servers(key: Key, devices: list[str]) -> None:
    for server, device in enumerate(devices):
        rpc.rpc_sync(f"server{server}", host, args=(create_table, key, server, device))


# -- on a trainer ----------------------------------------------------------------------------------


def ask(key: Key, batch: Batch) -> list[torch.Tensor]:
    """What each server has looked up for the batch: [bags, embedding_dim]."""
    names = [f"server{server}" for server in range(key["servers"])]
    words = (*batch[:2], key["device"] == "cuda", key["autograd"] == "distributed")
    if key["lookup"] == "sequential":
        return [rpc.rpc_sync(name, look_up, args=words) for name in names]
    return torch.futures.wait_all([rpc.rpc_async(name, look_up, args=words) for name in names])


def distributed_step(
    key: Key, ddp: nn.Module, phases: Phases, turn: Turn
) -> Callable[[Batch], None]:
    """The step by torch's own: gradients and the optimizer find their way over RPC."""
    rrefs = [rpc.RRef(p) for p in ddp.parameters()]
    for server in range(key["servers"]):
        rrefs += rpc.rpc_sync(f"server{server}", parameter_rrefs)
    optimizer = DistributedOptimizer(torch.optim.SGD, rrefs, lr=LR)

    def step(batch: Batch) -> None:
        with dist_autograd.context() as context:
            looked_up = ask(key, batch)
            phases.mark("lookup")
            loss = loss_of(ddp, looked_up, batch[2])
            phases.mark("forward")
            dist_autograd.backward(context, [loss])
            phases.mark("backward")
            with turn():
                optimizer.step(context)
        phases.mark("step")

    return step


def manual_step(key: Key, ddp: nn.Module, phases: Phases, turn: Turn) -> Callable[[Batch], None]:
    """The same without distributed autograd: a call with the gradient to each server."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LR)

    def step(batch: Batch) -> None:
        indices, offsets, targets = batch
        looked_up = [part.requires_grad_() for part in ask(key, batch)]
        phases.mark("lookup")
        optimizer.zero_grad()
        loss = loss_of(ddp, looked_up, targets)
        phases.mark("forward")
        loss.backward()
        phases.mark("backward")
        with turn():
            applied = [
                rpc.rpc_async(f"server{i}", apply_gradient, args=(indices, offsets, part.grad))
                for i, part in enumerate(looked_up)
            ]
            optimizer.step()
            torch.futures.wait_all(applied)
        phases.mark("step")

    return step


def stamp_exchange(ddp: DistributedDataParallel, phases: Phases) -> None:
    """DDP's own all-reduce, with stamps around that of the last bucket."""

    def hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        future = allreduce_hook(group, bucket)
        if not bucket.is_last():
            return future
        phases.mark("backward")

        def arrived(future: Future[torch.Tensor]) -> torch.Tensor:
            # nothing here refers to the group: the last reference to it must not be gloo's own
            # thread, which would wait for itself
            phases.mark("exchange")
            return future.value()

        return future.then(arrived)

    ddp.register_comm_hook(ddp.process_group, hook)


@contextmanager
def one_by_one(group: dist.ProcessGroup) -> Iterator[None]:
    """So that no trainer changes a table while another does, or looks it up."""
    for rank in range(group.size()):
        if rank == group.rank():
            yield
        dist.barrier(group)


def start(
    key: Key, devices: list[str], job: Job, group: Group, turn: Turn
) -> tuple[nn.Module, Phases, Callable[[], None]]:
    """New tables on all servers, a new dense part here, and what trains an epoch."""
    if job.rank == 0:
        rpc.rpc_sync("master", set_up_servers, args=(key, devices))
    dist.barrier(group.control)
    dense, phases = create_dense(key).to(job.device), Phases(job.device)
    ddp = DistributedDataParallel(dense, process_group=group.test)
    stamp_exchange(ddp, phases)
    create_step = distributed_step if key["autograd"] == "distributed" else manual_step
    step = create_step(key, ddp, phases, turn)
    # targets where the loss is computed; indices and offsets stay on the CPU to travel
    batches = [(i, offsets, t.to(job.device)) for i, offsets, t in create_epoch(key, job.rank)]

    def epoch() -> None:
        phases.begin()
        for batch in batches:
            step(batch)

    return dense, phases, epoch


def build(key: Key, devices: list[str], job: Job, group: Group) -> Workload:
    """devices: of the servers."""
    small = {"number_embeddings": CHECKED_EMBEDDINGS, "batches": CHECKED_STEPS, "dtype": "float64"}
    alone = partial(one_by_one, group.control)
    dense, _, epoch = start(key | small, devices, job, group, alone)
    epoch()
    facts: dict[str, Any] = {"dense": digest(dense)}
    facts["samples"] = sum(len(targets) for _, _, targets in create_epoch(key, job.rank))
    if job.rank == 0:
        tables = [rpc.rpc_sync(f"server{i}", get_weight) for i in range(key["servers"])]
        facts["errors"] = errors(
            key | small, tables, [p.detach().cpu() for p in dense.parameters()]
        )
    _, phases, epoch = start(key, devices, job, group, nullcontext)
    return Workload({"epoch": epoch}, facts=lambda: facts | {"phases": phases.durations()})


# -- what rank 0 makes of it -----------------------------------------------------------------------


def errors(key: Key, tables: list[torch.Tensor], dense: list[torch.Tensor]) -> dict[str, float]:
    """How far `tables` and `dense` are from what a single process learns in the checked steps.

    Relative to the largest change that it makes. It takes every trainer's batch in turn: each
    trainer's gradient is applied to the tables, those of the dense part are averaged.
    """
    epochs = [create_epoch(key, trainer) for trainer in range(key["trainers"])]
    bags = [create_table(key, server) for server in range(key["servers"])]
    model = create_dense(key)
    rates: dict[torch.Tensor, float] = {bag.weight: LR for bag in bags}
    for p in model.parameters():
        rates[p] = LR / key["trainers"]
    before = [p.detach().clone() for p in rates]
    for batches in zip(*epochs, strict=True):
        for indices, offsets, targets in batches:
            loss_of(model, [bag(indices, offsets) for bag in bags], targets).backward()
        with torch.no_grad():
            for weight, rate in rates.items():
                assert weight.grad is not None
                weight -= rate * weight.grad.to_dense()
                weight.grad = None
    trained = zip([*tables, *dense], rates, before, strict=True)
    off = [relative_error(got - old, want - old) for got, want, old in trained]
    return {"tables": max(off[: len(bags)]), "dense weights": max(off[len(bags) :])}


def derive(case: Case, facts: list[dict[str, Any]]) -> None:
    """Fill in the metrics and the check."""
    m, samples = case.metrics, np.array(case.samples_s["epoch"])
    slowest = samples.max(axis=0)
    m |= percentiles(slowest, "epoch_time")
    m["epoch_time_ci95_rel"] = relative_ci95(slowest)
    m["samples"] = sum(fact["samples"] for fact in facts)
    m["samples_per_s"] = m["samples"] / m["epoch_time_p50_s"]
    m["trainers"] = [
        percentiles(row, "epoch_time") | {"samples": fact["samples"]}
        for row, fact in zip(samples, facts, strict=True)
    ]
    spent = pool([step for fact in facts for step in timed(fact["phases"], case.rounds)])
    m |= {f"{name}_s": sum(spent[name]) / (samples.size * BATCHES) for name in PHASES}
    wrong = compare_replicas([fact["dense"] for fact in facts], case.ranks)
    off = facts[0]["errors"]
    if max(off.values()) > TOLERANCE:
        parts = " and ".join(f"the {part} {error:.2g}" for part, error in off.items())
        wrong = wrong or (
            f"after {CHECKED_STEPS} steps {parts} of their change away from a single process "
            f"(at most {TOLERANCE:g})"
        )
    case.check = verdict(wrong)


ROWS: Columns = {  # for each trainer, and `All`
    "": lambda row: row.key["name"],
    "95% ci\nof p50": relative("epoch_time_ci95_rel"),
    **percentile_columns("epoch_time", "sec/epoch", "samples/s", lambda r: r.metrics["samples"]),
}
SPLIT: Columns = {
    "ms a batch": lambda case: label_of(case.key),
    **{name: metric(f"{name}_s", 1e3, 3) for name in PHASES},
}


def label_of(key: Key) -> str:
    return f"lookup {key['lookup']}, autograd {key['autograd']}"


def show(case: Case) -> str:
    if case.failed:
        return case.check
    found = {f"Trainer{i}": trainer for i, trainer in enumerate(case.metrics["trainers"])}
    found["All"] = case.metrics
    return render(ROWS, [Case({"name": n}, case.ranks, metrics=m) for n, m in found.items()])


def main() -> int:
    args = parse_args()
    roles = assign_roles(args, trainers=args.number_trainers, servers=args.number_ps, master=True)
    fixed: Key = {"trainers": len(roles.trainers), "servers": len(roles.servers)}
    for name in ("number_embeddings", "embedding_dim", "sparse"):
        fixed[name] = getattr(args, name)
    fixed |= {"device": roles.device(0), "server_device": roles.device(roles.servers[0])}
    fixed |= {"dtype": "float32", "batches": BATCHES}
    # torch 2.15 warns of its own use in DistributedOptimizer, with a filter that shows it always
    logging.captureWarnings(True)
    captured = logging.getLogger("py.warnings")
    captured.addFilter(lambda record: "for functional optimizers" not in record.getMessage())
    with Benchmark("ddp_rpc", args, tested=roles.trainers) as bench:
        options = rpc_options(args, bench)
        fixed |= options.key() | {"backend": bench.share(bench.job.backend)}
        bench.print(
            f"\n{fixed['trainers']} trainers, {fixed['servers']} servers with a table of "
            f"{args.number_embeddings} x {args.embedding_dim} each; {options}"
        )
        cases = []
        with rpc_workers(bench, roles, options) as devices:
            places = [devices[rank] for rank in roles.servers]
            for lookup, autograd in itertools.product(args.lookup, args.autograd):
                key = {"lookup": lookup, "autograd": autograd} | fixed
                work = partial(build, key, places, bench.job)
                if case := bench.measure(key, work, derive, roles.trainers):
                    bench.print(f"\n{label_of(key)}\n\n{show(case)}")
                    cases += [] if case.failed else [case]
        if cases:
            table = render(SPLIT, cases)
            bench.print(f"\nWhere the time goes: means over all batches and trainers\n\n{table}")
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
