#!/usr/bin/env python3
"""How fast does a model train with embeddings on parameter servers and a dense part under DDP?

Each server stores an EmbeddingBag (mode sum). For each batch, of 20 to 50 indices in bags of 1 to
10, a trainer looks up the embeddings on all servers by RPC, concatenates the results, trains a
dense stack (512-256-128-ReLU-64-32-8) under DistributedDataParallel, and returns the gradients to
the servers' tables. If the concatenated embeddings do not have 512 columns, a linear layer before
the stack projects them to 512. The script times epochs of 10 batches, and within them the phases of
a batch. The batches are generated before the timing and are the same in each epoch.

    sec/epoch   of each trainer; `All`: of the slowest trainer in each epoch
    samples/s = bags per epoch / sec/epoch; `All`: bags of all trainers / sec/epoch of `All`

    torchrun --nproc-per-node 4 benchmarks/ddp_rpc.py
    torchrun --nproc-per-node 17 benchmarks/ddp_rpc.py --number-trainers 8 --number-ps 8
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        benchmarks/ddp_rpc.py --number-embeddings 1000000 --sparse --json report.jsonl

The first ranks are trainers, the next ones servers, and the last rank is the master, which sets up
the servers. The script is a new implementation of PyTorch's benchmark_ddp_rpc.py, whose settings
are `--lookup sequential --autograd distributed --backend gloo --epochs 100 --rpc-threads 16
--rpc-transports auto`. docs/ddp_rpc.md explains the tables. BSD-3-Clause.
"""

import argparse
import itertools
import logging
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import exits
from harness.cli import Parser, add_common_flags, list_of, number, positive_int

exits.report_missing_packages()

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.optim
import torch.distributed.rpc as rpc
from numpy.typing import ArrayLike
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

from benchmarks.workloads.check import compare_replicas, digest, relative_error, verdict
from benchmarks.workloads.percentiles import percentile_columns, percentiles
from benchmarks.workloads.phases import Phases, Stamps, pool
from benchmarks.workloads.roles import args_of_rank, assign_roles
from benchmarks.workloads.rpc_flags import add_rpc_flags, rpc_options, rpc_workers
from benchmarks.workloads.settings import side_by_side
from common.groups import Group, Job
from common.rpc import Roles
from common.stats import Times, median
from common.table import Columns, Table, fitted, metric, relative
from common.timing import Workload
from harness.benchmark import Benchmark, Key, Planned
from harness.report import Case

PHASES = ("lookup", "forward", "backward", "step")
# settings of the check against a single process; rounding in float32 could hide a lost gradient
CHECKED = {"number_embeddings": 50, "batches": 3, "dtype": "float64"}
TOLERANCE = 1e-6  # relative to the largest change of a parameter in these steps


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add(
        "--number-trainers",
        type=positive_int,
        metavar="N",
        help="number of trainers (default: half of the ranks)",
    )
    add(
        "--number-ps",
        type=positive_int,
        metavar="N",
        help="number of parameter servers (default: the other half)",
    )
    add(
        "--number-embeddings",
        type=positive_int,
        default=300,
        metavar="N",
        help="rows of each server's table (default: 300)",
    )
    add(
        "--embedding-dim",
        type=positive_int,
        default=64,
        metavar="N",
        help="columns of each server's table (default: 64)",
    )
    add("--sparse", action="store_true", help="use sparse gradients for the tables")
    modes = list_of(str, ["parallel", "sequential"])
    add(
        "--lookup",
        type=modes,
        default="parallel",
        metavar="MODE",
        help="query the servers concurrently (parallel) or one after the other (sequential) "
        "(default: parallel)",
    )
    modes = list_of(str, ["distributed", "manual"])
    add(
        "--autograd",
        type=modes,
        default="all",
        metavar="MODE",
        help="distributed: torch's distributed autograd and DistributedOptimizer; manual: one "
        "call per server sends the gradient, which the server applies (default: both)",
    )
    add_rpc_flags(parser, server_device="cpu")
    add_common_flags(parser)
    add(
        "--epochs",
        type=positive_int,
        dest="iters",
        metavar="N",
        help="alias of --iters: time N epochs, each of the same 10 batches",
    )
    add(
        "--warmup-cycles",
        type=number(int),
        dest="warmup_iters",
        metavar="N",
        help="alias of --warmup-iters, in epochs",
    )
    return parser.parse_args(argv)


# [core]
Batch = tuple[Tensor, Tensor, Tensor]  # indices [n], offsets [bags], targets [bags]
DENSE_INPUT = 512
CLASSES = 8
LR = 0.05


def create_dense(width: int, dtype: torch.dtype) -> nn.Module:
    """The dense stack: input [bags, width], output [bags, CLASSES]."""
    torch.manual_seed(0)
    layers = [
        nn.Linear(DENSE_INPUT, 256),
        nn.Linear(256, 128),
        nn.ReLU(),
        nn.Linear(128, 64),
        nn.Linear(64, 32),
        nn.Linear(32, CLASSES),
    ]
    if width != DENSE_INPUT:  # 8 tables of 64 columns need no projection
        layers.insert(0, nn.Linear(width, DENSE_INPUT, bias=False))
    return nn.Sequential(*layers).to(dtype)


def create_table(rows: int, columns: int, sparse: bool, dtype: Any, seed: int) -> nn.EmbeddingBag:
    torch.manual_seed(seed)
    return nn.EmbeddingBag(rows, columns, mode="sum", sparse=sparse).to(dtype)


def create_epoch(batches: int, rows: int, trainer: int) -> list[Batch]:
    """The batches of a trainer: 20 to 50 indices in bags of 1 to 10.

    trainer: its number, which seeds the generator.
    """
    rng = np.random.default_rng(trainer)
    epoch = []
    for _ in range(batches):
        count = int(rng.integers(20, 50, endpoint=True))
        # as many bags as there are indices, of which the first ones are used
        bag_sizes = rng.integers(1, 10, size=count, endpoint=True)
        starts = np.concatenate([[0], np.cumsum(bag_sizes)])
        offsets = torch.tensor(starts[starts < count])
        indices = rng.integers(0, rows, size=count)
        targets = rng.integers(0, CLASSES, size=len(offsets))
        epoch.append((torch.tensor(indices), offsets, torch.tensor(targets)))
    return epoch


def loss_of(dense: nn.Module, embeddings: list[Tensor], targets: Tensor) -> Tensor:
    """Cross-entropy of the dense part. embeddings: [bags, columns] per server; targets: [bags]."""
    inputs = torch.cat([part.to(targets.device) for part in embeddings], dim=1)
    return nn.functional.cross_entropy(dense(inputs), targets)


SERVER: list[nn.EmbeddingBag] = []  # the table of this process, if it is a server
TABLE_LOCK = threading.Lock()  # RPC threads run concurrently


def start_server(device: str, *table: Any) -> None:
    """Create the table on a server. table: the arguments of `create_table`."""
    SERVER[:] = [create_table(*table).to(device)]


def look_up(indices: Tensor, offsets: Tensor, to_cpu: bool, track_gradient: bool) -> Tensor:
    """The sums of a server's rows, [bags, columns], on the table's device or on the CPU."""
    table = SERVER[0]
    device = table.weight.device
    with torch.set_grad_enabled(track_gradient):
        embeddings: Tensor = table(indices.to(device), offsets.to(device))
        return embeddings.cpu() if to_cpu else embeddings


def apply_gradient(indices: Tensor, offsets: Tensor, gradient: Tensor) -> None:
    """Apply a step of SGD to the table. gradient: with respect to the result of `look_up`."""
    embeddings = look_up(indices, offsets, to_cpu=False, track_gradient=True)
    weight, device = SERVER[0].weight, embeddings.device
    (table_gradient,) = torch.autograd.grad(embeddings, weight, gradient.to(device))
    with TABLE_LOCK, torch.no_grad():
        weight.add_(table_gradient, alpha=-LR)
        if embeddings.is_cuda:  # calls run on different streams, which the lock does not order
            torch.cuda.current_stream(device).synchronize()


def get_weight() -> Tensor:
    return SERVER[0].weight


@dataclass(frozen=True)
class Tables:
    """The settings for queries of the servers' tables by a trainer."""

    servers: list[str]  # names of RPC workers
    parallel: bool  # query all servers concurrently
    to_cpu: bool  # receive embeddings on the CPU, not on the servers' device
    track_gradient: bool  # record the lookup for distributed autograd

    def look_up(self, indices: Tensor, offsets: Tensor) -> list[Tensor]:
        """The embeddings of a batch, one tensor [bags, columns] per server."""
        batch = (indices, offsets, self.to_cpu, self.track_gradient)
        if not self.parallel:
            return [rpc.rpc_sync(server, look_up, args=batch) for server in self.servers]
        calls = [rpc.rpc_async(server, look_up, args=batch) for server in self.servers]
        return torch.futures.wait_all(calls)


def distributed_optimizer(servers: list[str], ddp: nn.Module) -> Any:
    parameters = [rpc.remote(server, get_weight) for server in servers]
    parameters += [rpc.RRef(parameter) for parameter in ddp.parameters()]
    return torch.distributed.optim.DistributedOptimizer(torch.optim.SGD, parameters, lr=LR)


Mark = Callable[[str], None]  # called with the name of a phase when that phase ends


def distributed_step(
    ddp: nn.Module, optimizer: Any, tables: Tables, batch: Batch, mark: Mark
) -> None:
    """Train a batch: torch sends the gradients to the servers and runs an optimizer there."""
    indices, offsets, targets = batch
    with dist_autograd.context() as context:
        embeddings = tables.look_up(indices, offsets)
        mark("lookup")
        loss = loss_of(ddp, embeddings, targets)
        mark("forward")
        dist_autograd.backward(context, [loss])
        mark("backward")
        optimizer.step(context)
    mark("step")


def manual_step(ddp: nn.Module, optimizer: Any, tables: Tables, batch: Batch, mark: Mark) -> None:
    """Train a batch without distributed autograd: one call per server sends the gradient."""
    indices, offsets, targets = batch
    embeddings = [part.requires_grad_() for part in tables.look_up(indices, offsets)]
    mark("lookup")
    optimizer.zero_grad()
    loss = loss_of(ddp, embeddings, targets)
    mark("forward")
    loss.backward()
    mark("backward")
    calls = []
    for server, part in zip(tables.servers, embeddings, strict=True):
        gradient = (indices, offsets, part.grad)
        calls.append(rpc.rpc_async(server, apply_gradient, args=gradient))
    optimizer.step()
    torch.futures.wait_all(calls)
    mark("step")


# [/core]
# -- a case ----------------------------------------------------------------------------------------


def table_of(key: Key, server: int) -> tuple[Any, ...]:
    """The arguments of `create_table` for a server, counted from 0."""
    sizes = (key["number_embeddings"], key["embedding_dim"])
    return (*sizes, key["sparse"], getattr(torch, key["dtype"]), 1 + server)


def dense_of(key: Key) -> nn.Module:
    return create_dense(key["servers"] * key["embedding_dim"], getattr(torch, key["dtype"]))


def epoch_of(key: Key, trainer: int) -> list[Batch]:
    return create_epoch(key["batches"], key["number_embeddings"], trainer)


def start_servers(key: Key, devices: list[str]) -> None:
    """Create the tables of a case; runs on the master. devices: one per server."""
    for server, device in enumerate(devices):
        rpc.rpc_sync(f"server{server}", start_server, args=(device, *table_of(key, server)))


class Training(NamedTuple):
    """A model in training, on one trainer."""

    dense: nn.Module
    phases: Phases
    epoch: Callable[..., Stamps]  # epoch(mark=...) trains an epoch
    weights: Callable[[], list[Tensor]]  # fetches the servers' tables, [rows, columns] each


def start_training(job: Job, key: Key, group: Group, devices: list[str]) -> Training:
    """Create new tables on all servers and a new dense part on this trainer.

    devices: one per server.
    """
    if job.rank == 0:
        rpc.rpc_sync("master", start_servers, args=(key, devices))
    dist.barrier(group.control)  # all tables exist
    dense = dense_of(key).to(job.device)
    phases = Phases(job.device)
    ddp = DistributedDataParallel(dense, process_group=group.workload)
    servers = [f"server{server}" for server in range(key["servers"])]
    tables = Tables(
        servers,
        parallel=key["lookup"] == "parallel",
        to_cpu=key["device"] != "cuda",  # of the trainers
        track_gradient=key["autograd"] == "distributed",
    )
    if key["autograd"] == "distributed":
        step = partial(distributed_step, ddp, distributed_optimizer(servers, ddp), tables)
    else:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=LR)
        step = partial(manual_step, ddp, optimizer, tables)
    batches = []
    for indices, offsets, targets in epoch_of(key, job.rank):
        # the loss is computed on this device; indices and offsets are sent from the CPU
        batches.append((indices, offsets, targets.to(job.device)))

    def epoch(mark: Mark = phases.mark) -> Stamps:
        phases.begin()
        for batch in batches:
            step(batch, mark)
        return phases.step

    def weights() -> list[Tensor]:
        rows = torch.arange(key["number_embeddings"])  # a bag for each row
        return replace(tables, to_cpu=True, track_gradient=False).look_up(rows, rows)

    return Training(dense, phases, epoch, weights)


def train_serially(job: Job, key: Key, group: Group, devices: list[str]) -> dict[str, Any]:
    """Train a small model for the check, with updates by one trainer at a time.

    Barriers keep a trainer from updating a table while another one updates or reads it. Returns
    this trainer's facts for `derive`.
    """
    training = start_training(job, key, group, devices)
    # trainer n updates the tables after n barriers, and all trainers pass the same number of them
    barriers = {"backward": job.rank, "step": key["ranks"] - job.rank}

    def wait_for_turn(phase: str) -> None:
        for _ in range(barriers.get(phase, 0)):
            dist.barrier(group.control)

    training.epoch(wait_for_turn)
    facts: dict[str, Any] = {"dense": digest(training.dense)}
    if job.rank == 0:
        facts["error"] = error_of(key, [*training.weights(), *training.dense.parameters()])
    return facts


def build(job: Job, key: Key, group: Group, *, devices: list[str]) -> Workload:
    """Check a small model, then build the workload of a trainer. devices: one per server."""
    facts = train_serially(job, key | CHECKED, group, devices)
    training = start_training(job, key, group, devices)
    return Workload(training.epoch, facts=lambda: facts, returned=training.phases.durations)


def error_of(key: Key, trained: list[Tensor]) -> float:
    """The largest difference from a model that one process trains, relative to its change there.

    That process applies the gradient of each trainer to the tables, and the average over trainers
    to the dense part. trained: the tables, then the dense parameters, after the trainers' steps.
    """
    bags = [create_table(*table_of(key, server)) for server in range(key["servers"])]
    model = dense_of(key)
    tables = [bag.weight for bag in bags]
    weights = [*tables, *model.parameters()]
    average = {"params": model.parameters(), "lr": LR / key["ranks"]}
    optimizer = torch.optim.SGD([{"params": tables}, average], lr=LR)
    before = [weight.detach().clone() for weight in weights]
    epochs = [epoch_of(key, trainer) for trainer in range(key["ranks"])]
    for batches in zip(*epochs, strict=True):
        optimizer.zero_grad()
        for indices, offsets, targets in batches:
            embeddings = [bag(indices, offsets) for bag in bags]
            loss_of(model, embeddings, targets).backward()
        optimizer.step()
    errors = []
    for got, expected, old in zip(trained, weights, before, strict=True):
        errors.append(relative_error(got.cpu() - old, expected - old))
    return max(errors)


def derive(case: Case, times: Times, facts: list[dict[str, Any]]) -> None:
    """Compute the metrics and the verdict of the check. facts: one entry per trainer."""
    metrics = case.metrics
    by_trainer: list[dict[str, Any]] = []
    for trainer, epochs_s in zip(case.ranks, times.each(), strict=True):
        samples = sum(len(targets) for _, _, targets in epoch_of(case.key, trainer))
        by_trainer.append(epoch_metrics(epochs_s, samples))
    metrics |= epoch_metrics(times.slowest(), sum(row["samples"] for row in by_trainer))
    metrics["trainers"] = by_trainer
    seconds = pool(itertools.chain(*times.returned))  # over the epochs of all trainers
    batches = times.each().size * case.key["batches"]
    for phase in PHASES:
        metrics[f"{phase}_s"] = sum(seconds[phase]) / batches
    problem = compare_replicas([fact["dense"] for fact in facts], case.ranks)
    error = facts[0]["error"]
    if not problem and not error <= TOLERANCE:  # also if it is NaN
        steps = CHECKED["batches"]
        problem = f"after {steps} steps the parameters differ from those of a single process by "
        problem += f"{error:.2g} of their change (limit {TOLERANCE:g})"
    case.check = verdict(problem)


def epoch_metrics(epochs_s: ArrayLike, samples: int) -> dict[str, Any]:
    """Times and rates of epochs [n]. samples: number of samples per epoch."""
    metrics: dict[str, Any] = {"epoch_s": median(epochs_s), **percentiles(epochs_s, "epoch")}
    del metrics["epoch_p50_s"]  # the same as epoch_s
    return metrics | {"samples": samples, "samples_per_s": samples / metrics["epoch_s"]}


# -- output ----------------------------------------------------------------------------------------

ROWS: Columns = {  # of `All` and of each trainer
    "": lambda row: row.name,
    "95% ci\nof p50": relative("epoch_s"),
    **percentile_columns("epoch", "sec/epoch", "samples/s", lambda row: row.metrics["samples"]),
    "samples\n/epoch": metric("samples", digits=0),
}
SPLIT: Columns = {
    "ms per batch": lambda case: case.name,
    **{name: metric(f"{name}_s", 1e3, 3) for name in PHASES},
}


class TrainersTable(Table):
    """A small table per case: a row for all trainers together, then one for each trainer."""

    def row(self, case: Case) -> str:
        self.cases.append(case)
        if case.failed:
            return f"{case.name}  {case.check}\n"
        rows = [Case(key={}, ranks=[], name="All", metrics=case.metrics)]
        for trainer, metrics in enumerate(case.metrics["trainers"]):
            rows.append(Case(key={}, ranks=[], name=f"Trainer{trainer}", metrics=metrics))
        text, omitted_columns = fitted(ROWS, rows, self.max_width)
        self.count = min(self.count, len(ROWS) - omitted_columns)
        return f"{case.name}\n\n{text}\n"


def answer(cases: list[Case]) -> str:
    """The throughput with each combination of lookup and autograd."""
    rates = {case.name.replace(", ", " and "): case.metrics["samples_per_s"] for case in cases}
    return f"the trainers process {side_by_side(rates, 'samples/s')}"


# -- the cases -------------------------------------------------------------------------------------


def plan(args: argparse.Namespace, roles: Roles, rpc_settings: Key) -> list[Planned]:
    """A case for each combination of lookup and autograd."""
    fixed: Key = {
        "number_embeddings": args.number_embeddings,
        "embedding_dim": args.embedding_dim,
        "sparse": args.sparse,
        "servers": len(roles.servers),
        "dtype": "float32",
        "batches": 10,
        "server_device": roles.device(roles.servers[0]),
    }
    cases: list[Planned] = []
    for lookup, autograd in itertools.product(args.lookup, args.autograd):
        key = {"lookup": lookup, "autograd": autograd} | fixed | rpc_settings
        cases.append(Planned(f"lookup {lookup}, autograd {autograd}", len(roles.trainers), key))
    return cases


def main() -> int:
    args = parse_args()
    roles = assign_roles(args, trainers=args.number_trainers, servers=args.number_ps, master=True)
    # torch 2.15 warns about its own functional optimizers, regardless of warning filters
    logging.captureWarnings(True)
    with Benchmark("ddp_rpc", args_of_rank(args, roles), roles.trainers) as bench:
        options = rpc_options(args, bench)
        kind = "sparse table" if args.sparse else "table"
        title = f"{roles} with a {kind} of {args.number_embeddings} x {args.embedding_dim} each"
        title += f"\n{options}"
        cases = plan(args, roles, options.by_name())
        bench.announce({title: cases})
        with rpc_workers(bench, roles, options) as devices:
            make = partial(build, bench.job, devices=[devices[r] for r in roles.servers])
            layout, on = TrainersTable(ROWS), roles.trainers
            table = bench.run(title, cases, ROWS, make, derive, answer, layout=layout, ranks=on)
        if table.passed:
            title = "Time per phase: means over all batches and trainers"
            bench.print_table(SPLIT, table.passed, title)
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
