#!/usr/bin/env python3
"""How fast does a model train whose embeddings live on servers and whose dense part is under DDP?

Each server holds an EmbeddingBag (sum). A trainer looks a batch (20 to 50 indices in bags of 1 to
10) up on all servers over RPC, joins the answers, runs them through a dense stack
(512-256-128-ReLU-64-32-8) that DistributedDataParallel keeps alike on all trainers, and brings
the gradients back to the tables. Timed is an epoch of 10 batches, made before.

    sec/epoch  of a trainer; `All`: of the slowest trainer, epoch by epoch
    samples/s  = bags of the epoch / sec/epoch; `All`: bags of all trainers / that

    --lookup parallel | sequential      ask all servers at once, or one after the other
    --autograd distributed              distributed autograd and DistributedOptimizer
               manual                   the gradients of what was looked up are sent to the servers,
                                        which apply them; the dense part has its own optimizer

A step is split into lookup, forward, backward (without the exchange), exchange (the all-reduce of
the last dense bucket), step (the optimizer, on the servers too).

    torchrun --nproc-per-node 4 benchmarks/ddp_rpc.py
    torchrun --nproc-per-node 17 benchmarks/ddp_rpc.py --number-trainers 8 --number-ps 8
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        benchmarks/ddp_rpc.py --number-embeddings 1000000 --sparse --json report.json

Does what PyTorch's torch/distributed/benchmarks/benchmark_ddp_rpc.py did, written anew.
BSD-3-Clause.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cli

LOOKUP_NAMES = ("parallel", "sequential")
AUTOGRAD_NAMES = ("distributed", "manual")
DENSE_INPUT = 512
CLASSES = 8
BATCHES = 10  # an epoch
LR = 0.05
CHECKED_STEPS = 3  # on small tables, against a single process
CHECKED_EMBEDDINGS = 50
TOLERANCE = 1e-6  # of what these steps change; in float64, where rounding does not hide an error
ORIGINAL_THREADS = 16  # TensorPipe's default


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = cli.Parser(description=__doc__)
    add = parser.add_argument
    size = cli.positive_int
    add("--number-trainers", type=size, metavar="N", help="(default: half of the ranks)")
    add("--number-ps", type=size, metavar="N", help="parameter servers (default: the other half)")
    add("--number-embeddings", type=size, default=300, metavar="N", help="rows of a table")
    add("--embedding-dim", type=size, default=64, metavar="N", help="of a table (default: 64)")
    add("--sparse", action="store_true", help="tables with sparse gradients")
    add(
        "--lookup",
        type=cli.list_of(str, LOOKUP_NAMES),
        metavar="HOW",
        help=f"of {', '.join(LOOKUP_NAMES)}; a list (default: parallel)",
    )
    add(
        "--autograd",
        type=cli.list_of(str, AUTOGRAD_NAMES),
        metavar="HOW",
        help=f"of {', '.join(AUTOGRAD_NAMES)}; a list (default: both)",
    )
    add("--backend", "--distributed-backend", choices=cli.BACKENDS, help="among trainers")
    add("--server-device", choices=("cpu", "cuda"), default="cpu", help="(default: cpu)")
    add(
        "--compare-original",
        action="store_true",
        help="instead: epochs/s of parallel lookups, manual autograd and these settings over "
        f"those of sequential ones, distributed autograd and {ORIGINAL_THREADS} RPC threads, "
        "measured in turns",
    )
    names = {"--warmup-iters": "--warmup-cycles", "--iters": "--epochs"}
    text = "of --compare-original, two starts each; 6 or more have an interval (default: 8)"
    add("--rounds", type=size, metavar="N", help=text)
    cli.add_measurement_flags(parser, other_names=names)
    cli.add_rpc_flags(parser)
    cli.add_report_flags(parser)
    args = parser.parse_args(argv)
    cli.check_measurement_flags(args)
    if args.rounds and not args.compare_original:
        cli.refuse("--rounds has no effect without --compare-original")
    args.rounds = args.rounds or 8
    for flag, value in (("--lookup", args.lookup), ("--autograd", args.autograd)):
        if args.compare_original and value:
            cli.refuse(f"{flag} has no effect with --compare-original, which compares the two")
    args.lookup = args.lookup or ["parallel"]
    args.autograd = args.autograd or list(AUTOGRAD_NAMES)
    return args


if __name__ == "__main__":
    ARGS = parse_args()  # before the imports below, so that --help need not wait for them

import dataclasses
import functools
import itertools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
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

from common.breakdown import bounds
from common.check import compare_replicas, digest
from common.dist import CaseGroup, world_from_environment
from common.durations import timed_steps
from common.memory import available_bytes
from common.parts import Part, run_parts
from common.phases import Phases
from common.rpc import (
    Layout,
    RpcOptions,
    hosted,
    make,
    options_from,
    place,
    split,
    wants_cuda,
    workers,
)
from common.stats import median_interval, percentiles
from common.sweep import Outcome, Sweep, check_report_flags, stop_rule
from common.table import Columns, interval_width, metric, percentile_columns, render
from common.timing import Measurement, measure
from common.versus import Variant, measure_part

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # indices [n], offsets [bags], targets


@dataclass(frozen=True)
class Config:
    """What is trained, and how; the same on all ranks."""

    trainers: int
    servers: int
    number_embeddings: int
    embedding_dim: int
    sparse: bool
    lookup: str
    autograd: str
    dtype: torch.dtype = torch.float32

    @property
    def label(self) -> str:
        return f"lookup {self.lookup}, autograd {self.autograd}"


# -- the model, and its data ----------------------------------------------------------------------


def create_dense(config: Config) -> nn.Module:
    """Input [bags, servers * embedding_dim], output [bags, 8]."""
    torch.manual_seed(0)
    width = config.servers * config.embedding_dim
    # the original's tables join to 512 columns; others are brought to that by a projection
    front = [] if width == DENSE_INPUT else [nn.Linear(width, DENSE_INPUT, bias=False)]
    dense = nn.Sequential(
        *front,
        nn.Linear(DENSE_INPUT, 256),
        nn.Linear(256, 128),
        nn.ReLU(),
        nn.Linear(128, 64),
        nn.Linear(64, 32),
        nn.Linear(32, CLASSES),
    )
    return dense.to(config.dtype)


def create_table(config: Config, server: int) -> nn.EmbeddingBag:
    torch.manual_seed(1 + server)
    size = (config.number_embeddings, config.embedding_dim)
    return nn.EmbeddingBag(*size, mode="sum", sparse=config.sparse).to(config.dtype)


def create_epoch(config: Config, trainer: int) -> list[Batch]:
    """A trainer's own batches, drawn as the original draws them."""
    rng = np.random.default_rng(trainer)
    epoch = []
    for _ in range(BATCHES):
        count = int(rng.integers(20, 51))
        starts = np.concatenate([[0], np.cumsum(rng.integers(1, 11, size=count))])
        offsets = torch.tensor(starts[starts < count])
        indices = torch.tensor(rng.integers(0, config.number_embeddings, size=count))
        epoch.append((indices, offsets, torch.tensor(rng.integers(0, CLASSES, size=len(offsets)))))
    return epoch


def bags(epoch: list[Batch]) -> int:
    return sum(len(targets) for _, _, targets in epoch)


# -- on a server ----------------------------------------------------------------------------------


class TableServer:
    """A table and its device; called from several threads at once."""

    def __init__(self, config: Config, server: int, device: str, wire: str) -> None:
        self.table = create_table(config, server).to(device)
        self.device, self.wire = device, wire
        self.lock = threading.Lock()

    def look_up(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.table(indices.to(self.device), offsets.to(self.device)).to(self.wire)  # type: ignore[no-any-return]

    def apply(self, indices: torch.Tensor, offsets: torch.Tensor, gradient: torch.Tensor) -> None:
        """One step of SGD with the gradient of what `look_up` gave for these indices."""
        out = self.table(indices.to(self.device), offsets.to(self.device))
        (g,) = torch.autograd.grad(out, self.table.weight, gradient.to(self.device))
        with self.lock, torch.no_grad():
            self.table.weight.add_(g, alpha=-LR)


def look_up(indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return hosted("table").look_up(indices, offsets)  # type: ignore[no-any-return]


def look_up_values(indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return look_up(indices, offsets)


def apply_gradient(indices: torch.Tensor, offsets: torch.Tensor, gradient: torch.Tensor) -> None:
    hosted("table").apply(indices, offsets, gradient)


def parameter_rrefs() -> list[rpc.RRef[torch.Tensor]]:
    return [rpc.RRef(p) for p in hosted("table").table.parameters()]


def get_weight() -> torch.Tensor:
    weight: torch.Tensor = hosted("table").table.weight
    return weight.detach().cpu()


# -- on the master: it sets the servers up, and collects what they have learned -------------------


def set_up_servers(config: Config, devices: list[str], cuda_trainers: bool) -> None:
    """devices: of the servers. What they answer stays on CUDA if it arrives on CUDA."""
    for server, device in enumerate(devices):
        wire = device if cuda_trainers else "cpu"
        make(f"server{server}", "table", TableServer, config, server, device, wire)


def collect_tables(config: Config) -> list[torch.Tensor]:
    return [rpc.rpc_sync(f"server{server}", get_weight) for server in range(config.servers)]


# -- on a trainer ---------------------------------------------------------------------------------


def ask_at_once(servers: list[str], function: Callable[..., Any], args: Any) -> list[torch.Tensor]:
    futures = [rpc.rpc_async(server, function, args=args) for server in servers]
    return torch.futures.wait_all(futures)


def ask_in_turn(servers: list[str], function: Callable[..., Any], args: Any) -> list[torch.Tensor]:
    return [rpc.rpc_sync(server, function, args=args) for server in servers]


LOOKUPS = {"parallel": ask_at_once, "sequential": ask_in_turn}


class Trainer:
    """The dense part under DDP, and the two ways of training it with the tables."""

    def __init__(self, config: Config, device: torch.device, group: dist.ProcessGroup) -> None:
        self.servers = [f"server{i}" for i in range(config.servers)]
        self.device = device
        self.ask = LOOKUPS[config.lookup]
        self.phases = Phases(device)
        self.take_turns: Callable[[Callable[[], None]], None] = lambda apply: apply()
        self.ddp = DistributedDataParallel(create_dense(config).to(device), process_group=group)
        self.ddp.register_comm_hook(group, self.exchange)
        self.step = getattr(self, f"step_{config.autograd}")
        if config.autograd == "distributed":
            rrefs = [rpc.RRef(p) for p in self.ddp.parameters()]
            for server in self.servers:
                rrefs += rpc.rpc_sync(server, parameter_rrefs)
            self.remote_sgd = DistributedOptimizer(torch.optim.SGD, rrefs, lr=LR)
        else:
            self.sgd = torch.optim.SGD(self.ddp.parameters(), lr=LR)

    def exchange(
        self, group: dist.ProcessGroup, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        """DDP's own all-reduce, with stamps around that of the last bucket."""
        future = allreduce_hook(group, bucket)
        if not bucket.is_last():
            return future
        mark = self.phases.mark
        mark("backward")

        def arrived(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            # nothing here refers to the group: the last reference to it must not be gloo's own
            # thread, which would wait for itself
            mark("exchange")
            return future.value()

        return future.then(arrived)

    def forward(self, looked_up: list[torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
        """The loss."""
        joined = torch.cat([part.to(self.device) for part in looked_up], dim=1)
        return nn.functional.cross_entropy(self.ddp(joined), targets)

    def step_distributed(self, batch: Batch) -> None:
        indices, offsets, targets = batch
        mark = self.phases.mark
        mark("")
        with dist_autograd.context() as context:
            looked_up = self.ask(self.servers, look_up, (indices, offsets))
            mark("lookup")
            loss = self.forward(looked_up, targets)
            mark("forward")
            dist_autograd.backward(context, [loss])
            mark("backward")
            self.take_turns(lambda: self.remote_sgd.step(context))
        mark("step")

    def step_manual(self, batch: Batch) -> None:
        indices, offsets, targets = batch
        mark = self.phases.mark
        mark("")
        looked_up = self.ask(self.servers, look_up_values, (indices, offsets))
        for part in looked_up:
            part.requires_grad_()
        mark("lookup")
        self.sgd.zero_grad()
        loss = self.forward(looked_up, targets)
        mark("forward")
        loss.backward()
        mark("backward")

        def apply() -> None:
            applied = [
                rpc.rpc_async(server, apply_gradient, args=(indices, offsets, part.grad))
                for server, part in zip(self.servers, looked_up, strict=True)
            ]
            self.sgd.step()
            torch.futures.wait_all(applied)

        self.take_turns(apply)
        mark("step")


# -- one case -------------------------------------------------------------------------------------


def start(
    config: Config, layout: Layout, devices: list[str], sweep: Sweep, group: CaseGroup
) -> Trainer:
    """New tables on all servers, by the master, and a new trainer here."""
    if sweep.ctx.rank == 0:
        rpc.rpc_sync("master", set_up_servers, args=(config, devices, layout.cuda_trainers > 0))
    dist.barrier(group.control)
    return Trainer(config, sweep.ctx.device, group.test)


def on_device(epoch: list[Batch], device: torch.device) -> list[Batch]:
    """Targets where the loss is computed; indices and offsets stay on the CPU to travel."""
    return [(indices, offsets, targets.to(device)) for indices, offsets, targets in epoch]


def check(
    config: Config, layout: Layout, devices: list[str], sweep: Sweep, group: CaseGroup
) -> dict[str, Any]:
    """A few steps on small tables; on rank 0 how far they end from a single process."""
    small = {"number_embeddings": CHECKED_EMBEDDINGS, "dtype": torch.float64}
    config = dataclasses.replace(config, **small)
    trainer = start(config, layout, devices, sweep, group)

    def take_turns(apply: Callable[[], None]) -> None:
        """So that no trainer changes a table at the same time as another, or looks it up."""
        for rank in group.ranks:
            if rank == sweep.ctx.rank:
                apply()
            dist.barrier(group.control)

    trainer.take_turns = take_turns
    for batch in on_device(create_epoch(config, sweep.ctx.rank), sweep.ctx.device)[:CHECKED_STEPS]:
        trainer.step(batch)
    facts: dict[str, Any] = {"dense": digest(trainer.ddp)}
    if sweep.ctx.rank == 0:
        tables = rpc.rpc_sync("master", collect_tables, args=(config,))
        dense = [p.detach().cpu() for p in trainer.ddp.parameters()]
        facts["errors"] = errors_against_reference(config, tables, dense)
    return facts


def errors_against_reference(
    config: Config, tables: list[torch.Tensor], dense: list[torch.Tensor]
) -> dict[str, float]:
    """The largest difference from a single process, relative to the largest change it makes."""
    epochs = [create_epoch(config, trainer) for trainer in range(config.trainers)]
    expected_tables = [create_table(config, server) for server in range(config.servers)]
    model = create_dense(config)
    parts = {
        # every trainer's gradient is applied to the tables; DDP averages those of the dense part
        "tables": ([table.weight for table in expected_tables], tables, LR),
        "dense": (list(model.parameters()), dense, LR / config.trainers),
    }
    before = {
        name: [p.detach().clone() for p in parameters] for name, (parameters, _, _) in parts.items()
    }
    for i in range(CHECKED_STEPS):
        for epoch in epochs:
            indices, offsets, targets = epoch[i]
            joined = torch.cat([table(indices, offsets) for table in expected_tables], dim=1)
            nn.functional.cross_entropy(model(joined), targets).backward()
        with torch.no_grad():
            for parameters, _, rate in parts.values():
                for p in parameters:
                    p -= rate * p.grad.to_dense()
                    p.grad = None

    def largest_difference(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
        return max(float((x - y).detach().abs().max()) for x, y in zip(a, b, strict=True))

    return {
        name: largest_difference(parameters, got) / largest_difference(parameters, before[name])
        for name, (parameters, got, _) in parts.items()
    }


def time_epochs(
    config: Config,
    args: argparse.Namespace,
    layout: Layout,
    devices: list[str],
    sweep: Sweep,
    group: CaseGroup,
) -> tuple[Measurement, Trainer]:
    """Warm up, then time epochs."""
    trainer = start(config, layout, devices, sweep, group)
    epoch = on_device(create_epoch(config, sweep.ctx.rank), sweep.ctx.device)

    def run_epoch() -> None:
        for batch in epoch:
            trainer.step(batch)

    for i in range(args.warmup_iters):
        sweep.watch.phase(f"warm-up {i + 1}")
        run_epoch()
    trainer.phases.clear()
    rule = dataclasses.replace(stop_rule(args), warmup_iters=1)
    measured = measure({"epoch": run_epoch}, group, sweep.ctx.device, rule, sweep.next_block)
    return measured, trainer


def run_case(
    config: Config,
    args: argparse.Namespace,
    layout: Layout,
    devices: list[str],
    sweep: Sweep,
    group: CaseGroup,
) -> Outcome:
    sweep.watch.phase("check")
    facts = check(config, layout, devices, sweep, group)
    measured, trainer = time_epochs(config, args, layout, devices, sweep, group)
    # the timed epochs only: not measure's own warm-up, nor the one that starts a block
    steps = [
        BATCHES * epoch + i for epoch in timed_steps(measured.rounds, 1) for i in range(BATCHES)
    ]
    return Outcome(facts | {"split_s": trainer.phases.per_step(steps)}, measured)


def derive(config: Config, measured: Measurement, facts: list[Any]) -> tuple[dict[str, Any], str]:
    """A case's metrics (see docs/numbers.md) and the verdict on its result. On rank 0."""
    samples = measured.samples["epoch"]
    counts = [bags(create_epoch(config, trainer)) for trainer in range(config.trainers)]
    slowest = samples.max(axis=0)
    metrics: dict[str, Any] = {
        **{f"epoch_time_{name}_s": value for name, value in percentiles(slowest).items()},
        "epoch_time_ci95_s": bounds(median_interval(slowest)),
        "samples": sum(counts),
        "samples_per_s": sum(counts) / float(np.median(slowest)),
        "trainers": [
            {"samples": count}
            | {f"epoch_time_{name}_s": value for name, value in percentiles(row).items()}
            for count, row in zip(counts, samples, strict=True)
        ],
    }
    for name in facts[0]["split_s"]:
        metrics[f"{name}_s"] = float(np.mean([fact["split_s"][name] for fact in facts]))
    wrong = compare_replicas([fact["dense"] for fact in facts], list(range(config.trainers)))
    for name, error in facts[0]["errors"].items():
        if not error < TOLERANCE:
            wrong = wrong or (
                f"after {CHECKED_STEPS} steps the {name} are {error:.2g} of their change away from "
                f"a single process (at most {TOLERANCE:g})"
            )
    return metrics, f"failed: {wrong}" if wrong else "passed"


# -- tables ---------------------------------------------------------------------------------------


def epoch_table(case: dict[str, Any]) -> str:
    """A row for each trainer, and `All`."""
    metrics = case["metrics"]
    rows = [
        {"key": {"name": f"Trainer{i}", "samples": row["samples"]}, "metrics": row, "stop": {}}
        for i, row in enumerate(metrics["trainers"])
    ]
    everyone = {"name": "All", "samples": metrics["samples"]}
    rows.append({"key": everyone, "metrics": metrics, "stop": case["stop"]})
    columns: Columns = {
        "": lambda row: str(row["key"]["name"]),
        "95% ci\nof p50": interval_width,
        **percentile_columns("epoch_time", "sec/epoch", "samples/s", work="samples"),
    }
    return render(columns, rows)


def split_columns() -> Columns:
    return {
        "ms a batch": lambda case: f"{case['key']['lookup']}, {case['key']['autograd']}",
        **{
            name: metric(f"{name}_s", 1e3, 3)
            for name in ("lookup", "forward", "backward", "exchange", "step")
        },
    }


def print_split(keys: list[dict[str, Any]], sweep: Sweep) -> None:
    cases = [case for case in map(sweep.find, keys) if case is not None]
    if cases:
        table = render(split_columns(), cases)
        sweep.say(f"\nWhere the time goes: means over all batches and trainers\n\n{table}")


def title(config: Config, options: RpcOptions) -> str:
    width = config.servers * config.embedding_dim
    joined = f"{width} columns" + ("" if width == DENSE_INPUT else f" projected to {DENSE_INPUT}")
    settings = ", ".join(f"{name} {value}" for name, value in options.key().items())
    return (
        f"trainers {config.trainers}, servers {config.servers}, tables of "
        f"{config.number_embeddings} x {config.embedding_dim}{' sparse' if config.sparse else ''}, "
        f"joined to {joined}, {settings.replace('_', ' ')}"
    )


# -- the run --------------------------------------------------------------------------------------


def check_args(args: argparse.Namespace) -> tuple[Layout, torch.device, str, RpcOptions]:
    """The roles, this rank's device and backend, and the RPC settings; refuse what cannot run."""
    try:
        _, world_size, _, local_world_size = world_from_environment()
        layout = split(world_size, args.number_trainers, args.number_ps, master=True, share=2)
        layout = dataclasses.replace(
            layout,
            cuda_trainers=layout.trainers if wants_cuda(args.device) else 0,
            cuda_servers=layout.servers if args.server_device == "cuda" else 0,
        )
        device, backend = place(layout, args.backend)
        table = args.number_embeddings * args.embedding_dim * 4
        there = available_bytes(torch.device("cpu"))
        if layout.cuda_servers == 0 and table > there:
            raise ValueError(
                f"a table of {args.number_embeddings} x {args.embedding_dim} needs {table} bytes, "
                f"and this host has {there}; try --number-embeddings 300"
            )
    except ValueError as error:
        cli.refuse(str(error))
    check_report_flags(args, "ddp_rpc")
    return layout, device, backend, options_from(args, local_world_size)


def create_configs(args: argparse.Namespace, layout: Layout) -> list[Config]:
    fixed = (args.number_embeddings, args.embedding_dim, args.sparse)
    return [
        Config(layout.trainers, layout.servers, *fixed, lookup, autograd)
        for lookup, autograd in itertools.product(args.lookup, args.autograd)
    ]


def case_key(config: Config, layout: Layout, backend: str, options: RpcOptions) -> dict[str, Any]:
    fields = dataclasses.asdict(config)
    return (
        {name: value for name, value in fields.items() if name != "dtype"}
        | options.key()
        | {
            "device": "cuda" if layout.cuda_trainers else "cpu",
            "server_device": "cuda" if layout.cuda_servers else "cpu",
            "backend": backend,
        }
    )


def compare_with_original(args: argparse.Namespace, part: Part) -> int:
    """Epochs/s of parallel lookups, manual autograd and these settings over the original's."""
    layout, device, backend, options = check_args(args)
    base = create_configs(args, layout)[0]
    original = dataclasses.replace(base, lookup="sequential", autograd="distributed")
    ours = dataclasses.replace(base, lookup="parallel", autograd="manual")
    tested = layout.trainer_ranks
    with Sweep("ddp_rpc", args, device, backend, tested=tested, part=part) as sweep:
        devices = [sweep.devices()[rank] for rank in layout.server_ranks]

        def work(config: Config, group: CaseGroup) -> Outcome:
            measured, _ = time_epochs(config, args, layout, devices, sweep, group)
            if not measured.samples:
                return Outcome({})
            return Outcome({"rate": 1 / float(np.median(measured.samples["epoch"].max(axis=0)))})

        threads = RpcOptions(ORIGINAL_THREADS, options.timeout_s)
        variants = (
            Variant("original", threads, functools.partial(work, original)),
            Variant("parallel and manual", options, functools.partial(work, ours)),
        )
        if part.number == 0:
            sweep.say(f"\n{title(ours, options)}\n")
        key = case_key(ours, layout, backend, options) | {"compare_original": True}
        measure_part(variants, args.rounds, part, "epochs/s", key, layout, sweep)
    return sweep.status


def measure_all(
    configs: list[Config],
    args: argparse.Namespace,
    layout: Layout,
    options: RpcOptions,
    sweep: Sweep,
) -> None:
    """A case and a table for each way of lookup and autograd."""
    devices = [sweep.devices()[rank] for rank in layout.server_ranks]
    keys = [case_key(config, layout, sweep.ctx.backend, options) for config in configs]
    known = sweep.plan(keys, summary=functools.partial(print_split, keys, sweep))
    with workers(layout, options, sweep) as broken:
        for config, key, done in zip(configs, keys, known, strict=True):
            if done:
                case = sweep.find(key)
            else:
                case = sweep.case(
                    key,
                    config.label,
                    layout.trainer_ranks,
                    functools.partial(run_case, config, args, layout, devices, sweep),
                    functools.partial(derive, config),
                    broken=broken,
                )
            if case is not None:
                failed = case["check"].startswith("failed")
                sweep.say(f"\n{config.label}\n\n{case['check'] if failed else epoch_table(case)}")


def main(args: argparse.Namespace) -> int:
    # torch 2.15 warns of its own use in DistributedOptimizer, with a filter that shows it always
    logging.captureWarnings(True)
    captured = logging.getLogger("py.warnings")
    captured.addFilter(lambda record: "for functional optimizers" not in record.getMessage())
    if args.compare_original:
        parts = [functools.partial(compare_with_original, args)] * (2 * args.rounds)
        return run_parts(parts, args)
    layout, device, backend, options = check_args(args)
    with Sweep("ddp_rpc", args, device, backend, tested=layout.trainer_ranks) as sweep:
        configs = create_configs(args, layout)
        sweep.say(f"\n{title(configs[0], options)}")
        measure_all(configs, args, layout, options, sweep)
    return sweep.status


if __name__ == "__main__":
    sys.exit(record(main)(ARGS))
