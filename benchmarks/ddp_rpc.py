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
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.benchmark import Benchmark, Workload
from common.check import compare_replicas, digest, relative_error, verdict
from common.cli import Parser, add_common_flags, list_of, number, positive_int
from common.dist import Group, Job
from common.join import world
from common.phases import Phases, pool, timed
from common.report import Case
from common.rpc import (
    add_rpc_flags,
    hosted,
    make,
    place,
    rpc_options,
    rpc_workers,
    split_roles,
    wants_cuda,
)
from common.stats import median_interval, percentiles, relative_ci95
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

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # indices [n], offsets [bags], targets


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
    add("--server-device", choices=("cpu", "cuda"), default="cpu", help="(default: cpu)")
    add_rpc_flags(parser)
    add_common_flags(parser)
    for name, other in (("--epochs", "iters"), ("--warmup-cycles", "warmup_iters")):
        text = f"as --{other.replace('_', '-')}"
        add(name, type=number(int), dest=other, default=argparse.SUPPRESS, metavar="N", help=text)
    return parser.parse_args(argv)


# -- the model, and its data -----------------------------------------------------------------------


def create_dense(key: dict[str, Any]) -> nn.Module:
    """Input [bags, servers * embedding_dim], output [bags, CLASSES]."""
    torch.manual_seed(0)
    width = key["servers"] * key["embedding_dim"]
    # eight tables of 64 columns join to 512; others are brought to that by a projection
    front: list[nn.Module] = (
        [] if width == DENSE_INPUT else [nn.Linear(width, DENSE_INPUT, bias=False)]
    )
    layers = [*front, nn.Linear(DENSE_INPUT, 256), nn.Linear(256, 128), nn.ReLU()]
    layers += [nn.Linear(128, 64), nn.Linear(64, 32), nn.Linear(32, CLASSES)]
    return nn.Sequential(*layers).to(getattr(torch, key["dtype"]))


def create_table(key: dict[str, Any], server: int, device: str = "cpu") -> nn.EmbeddingBag:
    torch.manual_seed(1 + server)
    size = (key["number_embeddings"], key["embedding_dim"])
    table = nn.EmbeddingBag(*size, mode="sum", sparse=key["sparse"])
    return table.to(device, getattr(torch, key["dtype"]))


def create_epoch(rows: int, trainer: int) -> list[Batch]:
    """A trainer's own batches, from its number: indices under `rows`, bags of 1 to 10 of them."""
    rng = np.random.default_rng(trainer)
    epoch = []
    for _ in range(BATCHES):
        count = int(rng.integers(20, 51))
        starts = np.concatenate([[0], np.cumsum(rng.integers(1, 11, size=count))])
        offsets = torch.tensor(starts[starts < count])
        indices = torch.tensor(rng.integers(0, rows, size=count))
        epoch.append((indices, offsets, torch.tensor(rng.integers(0, CLASSES, size=len(offsets)))))
    return epoch


# -- what servers do, which host a table, and the master, which calls them ------------------------

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


def set_up_servers(key: dict[str, Any], devices: list[str]) -> None:
    """A new table on each server."""
    for server, device in enumerate(devices):
        make(f"server{server}", create_table, key, server, device)


# -- on a trainer ----------------------------------------------------------------------------------

Turn = Callable[[], AbstractContextManager[None]]  # around a trainer's update of the tables


@contextmanager
def one_by_one(group: dist.ProcessGroup) -> Iterator[None]:
    """So that no trainer changes a table while another does, or looks it up."""
    for rank in range(group.size()):
        if rank == group.rank():
            yield
        dist.barrier(group)


def ask(key: dict[str, Any], batch: Batch) -> list[torch.Tensor]:
    """What each server has looked up for the batch: [bags, embedding_dim]."""
    names = [f"server{server}" for server in range(key["servers"])]
    words = (*batch[:2], key["device"] == "cuda", key["autograd"] == "distributed")
    if key["lookup"] == "sequential":
        return [rpc.rpc_sync(name, look_up, args=words) for name in names]
    return torch.futures.wait_all([rpc.rpc_async(name, look_up, args=words) for name in names])


def loss_of(ddp: nn.Module, looked_up: list[torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    joined = torch.cat([part.to(targets.device) for part in looked_up], dim=1)
    return nn.functional.cross_entropy(ddp(joined), targets)


def distributed_step(
    key: dict[str, Any], ddp: nn.Module, phases: Phases, turn: Turn
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


def manual_step(
    key: dict[str, Any], ddp: nn.Module, phases: Phases, turn: Turn
) -> Callable[[Batch], None]:
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

    def hook(
        group: dist.ProcessGroup, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        future = allreduce_hook(group, bucket)
        if not bucket.is_last():
            return future
        phases.mark("backward")

        def arrived(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            # nothing here refers to the group: the last reference to it must not be gloo's own
            # thread, which would wait for itself
            phases.mark("exchange")
            return future.value()

        return future.then(arrived)

    ddp.register_comm_hook(ddp.process_group, hook)


def build(key: dict[str, Any], devices: list[str], job: Job, group: Group) -> Workload:
    """devices: of the servers."""

    def start(
        key: dict[str, Any], turn: Turn
    ) -> tuple[nn.Module, Phases, Callable[[Batch], None], list[Batch]]:
        """New tables on all servers, a new dense part here, and this trainer's batches."""
        if job.rank == 0:
            rpc.rpc_sync("master", set_up_servers, args=(key, devices))
        dist.barrier(group.control)
        dense = create_dense(key).to(job.device)
        ddp = DistributedDataParallel(dense, process_group=group.test)
        phases = Phases(job.device)
        stamp_exchange(ddp, phases)
        create_step = distributed_step if key["autograd"] == "distributed" else manual_step
        # targets where the loss is computed; indices and offsets stay on the CPU to travel
        epoch = create_epoch(key["number_embeddings"], job.rank)
        batches = [(indices, offsets, t.to(job.device)) for indices, offsets, t in epoch]
        return dense, phases, create_step(key, ddp, phases, turn), batches

    small = key | {"number_embeddings": CHECKED_EMBEDDINGS, "dtype": "float64"}
    dense, phases, step, batches = start(small, partial(one_by_one, group.control))
    phases.begin()
    for batch in batches[:CHECKED_STEPS]:
        step(batch)
    facts: dict[str, Any] = {"dense": digest(dense)}
    if job.rank == 0:
        tables = [rpc.rpc_sync(f"server{i}", get_weight) for i in range(key["servers"])]
        facts["errors"] = errors(small, tables, [p.detach().cpu() for p in dense.parameters()])
    _, phases, step, batches = start(key, nullcontext)

    def epoch() -> None:
        phases.begin()
        for batch in batches:
            step(batch)

    return Workload({"epoch": epoch}, facts=lambda: facts | {"phases": phases.durations()})


# -- what rank 0 makes of it -----------------------------------------------------------------------


def errors(
    key: dict[str, Any], tables: list[torch.Tensor], dense: list[torch.Tensor]
) -> dict[str, float]:
    """How far `tables` and `dense` are from what a single process learns in the checked steps.

    Relative to the largest change that it makes. It takes every trainer's batch in turn: each
    trainer's gradient is applied to the tables, those of the dense part are averaged.
    """
    epochs = [create_epoch(key["number_embeddings"], trainer) for trainer in range(key["trainers"])]
    bags = [create_table(key, server) for server in range(key["servers"])]
    model = create_dense(key)
    parts: dict[str, tuple[list[torch.Tensor], list[torch.Tensor], float]] = {
        "tables": ([bag.weight for bag in bags], tables, LR),
        "dense": (list(model.parameters()), dense, LR / key["trainers"]),
    }
    before = {name: [p.detach().clone() for p in mine] for name, (mine, _, _) in parts.items()}
    for i in range(CHECKED_STEPS):
        for epoch in epochs:
            indices, offsets, targets = epoch[i]
            loss_of(model, [bag(indices, offsets) for bag in bags], targets).backward()
        with torch.no_grad():
            for mine, _, rate in parts.values():
                for p in mine:
                    assert p.grad is not None
                    p -= rate * p.grad.to_dense()
                    p.grad = None
    return {
        name: max(
            relative_error(a - c, b - c) for a, b, c in zip(got, mine, before[name], strict=True)
        )
        for name, (mine, got, _) in parts.items()
    }


def derive(key: dict[str, Any], case: Case, facts: list[dict[str, Any]]) -> None:
    """Fill in the metrics and the check."""
    samples = np.array(case.samples_s["epoch"])
    slowest = samples.max(axis=0)
    epochs = [create_epoch(key["number_embeddings"], trainer) for trainer in range(key["trainers"])]
    counts = [sum(len(targets) for _, _, targets in epoch) for epoch in epochs]
    case.metrics |= percentiles(slowest, "epoch_time") | {
        "epoch_time_ci95_s": median_interval(slowest),
        "epoch_time_ci95_rel": relative_ci95(slowest),
        "samples": sum(counts),
        "samples_per_s": sum(counts) / float(np.median(slowest)),
        "trainers": [
            percentiles(row, "epoch_time") | {"samples": count}
            for count, row in zip(counts, samples, strict=True)
        ],
    }
    spent = pool([step for fact in facts for step in timed(fact["phases"], case.rounds)])
    for name in PHASES:
        case.metrics[f"{name}_s"] = sum(spent[name]) / (samples.size * BATCHES)
    wrong = compare_replicas([fact["dense"] for fact in facts], case.ranks)
    for name, error in facts[0]["errors"].items():
        if error > TOLERANCE:
            wrong = wrong or (
                f"after {CHECKED_STEPS} steps the {name} are {error:.2g} of their change away from "
                f"a single process (at most {TOLERANCE:g})"
            )
    case.check = verdict(wrong)


def epoch_table(case: Case) -> str:
    """A row for each trainer, and `All`."""
    columns: Columns = {
        "": lambda row: row.key["name"],
        "95% ci\nof p50": relative("epoch_time_ci95_rel"),
        **percentile_columns(
            "epoch_time", "sec/epoch", "samples/s", lambda r: r.metrics["samples"]
        ),
    }
    rows = [
        Case({"name": f"Trainer{i}"}, [i], metrics=metrics)
        for i, metrics in enumerate(case.metrics["trainers"])
    ]
    return render(columns, [*rows, Case({"name": "All"}, case.ranks, metrics=case.metrics)])


SPLIT: Columns = {
    "ms a batch": lambda case: label_of(case.key),
    **{name: metric(f"{name}_s", 1e3, 3) for name in PHASES},
}


def label_of(key: dict[str, Any]) -> str:
    return f"lookup {key['lookup']}, autograd {key['autograd']}"


def title(key: dict[str, Any]) -> str:
    width = key["servers"] * key["embedding_dim"]
    joined = f"{width}" + ("" if width == DENSE_INPUT else f" projected to {DENSE_INPUT}")
    return (
        "trainers {trainers}, servers {servers}, tables of {number_embeddings} x {embedding_dim}, "
        "columns {joined}, rpc threads {rpc_threads}, transports {rpc_transports}"
    ).format(joined=joined, **key)


def main() -> int:
    args = parse_args()
    # torch 2.15 warns of its own use in DistributedOptimizer, with a filter that shows it always
    logging.captureWarnings(True)
    captured = logging.getLogger("py.warnings")
    captured.addFilter(lambda record: "for functional optimizers" not in record.getMessage())
    roles = split_roles(world()[2], args.number_trainers, args.number_ps, master=True)
    on_cuda = wants_cuda(args.device), args.server_device == "cuda"
    roles = roles.on_cuda(on_cuda[0] * len(roles.trainers), on_cuda[1] * len(roles.servers))
    place(args, roles)
    with Benchmark("ddp_rpc", args, tested=roles.trainers) as bench:
        options = rpc_options(args, bench)
        names = ("number_embeddings", "embedding_dim", "sparse", "server_device")
        fixed = {"trainers": len(roles.trainers), "servers": len(roles.servers), "dtype": "float32"}
        fixed |= {name: getattr(args, name) for name in names} | options.key()
        fixed |= bench.share({"device": bench.job.device.type, "backend": bench.job.backend})
        bench.print(f"\n{title(fixed)}")
        cases = []
        with rpc_workers(bench, roles, options) as devices:
            for lookup, autograd in itertools.product(args.lookup, args.autograd):
                key = {"lookup": lookup, "autograd": autograd} | fixed
                work = partial(build, key, [devices[rank] for rank in roles.servers], bench.job)
                case = bench.measure(key, work, partial(derive, key), roles.trainers)
                if case:
                    shown = case.check if case.failed else epoch_table(case)
                    bench.print(f"\n{label_of(key)}\n\n{shown}")
                    cases += [] if case.failed else [case]
        if cases:
            table = render(SPLIT, cases)
            bench.print(f"\nWhere the time goes: means over all batches and trainers\n\n{table}")
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
