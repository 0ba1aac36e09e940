#!/usr/bin/env python3
"""What does it cost to average gradients through parameter servers instead of an all-reduce?

Times whole training steps (zero_grad, forward, loss, backward with gradient averaging, optimizer
step) of an embedding and dense layers under DistributedDataParallel, whose gradient buckets go
one of four routes:

    allreduce    every bucket by all-reduce
    hybrid       sparse buckets by all-reduce over gloo, dense ones over nccl (CPU: a second gloo)
    rpc          every bucket through a parameter server, by RPC
    sparse_rpc   sparse buckets through a server, dense ones by all-reduce

Servers: `running` adds gradients up as they arrive, `batch` keeps all and then reduces. Each
answers all its trainers when the last gradient of a bucket is in. Placement: `grouped`, a server
averages over its own share of the trainers; `sharded`, bucket i goes to server i modulo their
number and is averaged over all trainers. Not timed: making the data (from a seed, where it is
used), start-up, warm-up, and the check against plain DDP.

    step        per iteration the slowest trainer counts;  samples/s = trainers * batch size / step
    hook        from a step's first bucket launched to its last one averaged, slowest trainer
    MB/step     what a trainer sends and receives in a step, mean over trainers; of a bucket of S
                bytes and n trainers: server S + answer; all-reduce 2 * 2(n-1)/n * S; a sparse
                all-reduce, which gathers, 2(n-1) * S
    GB/s        MB/step over the hook's time

Ranks: trainers, then servers (of each the CPU's first, then CUDA's), and last the master.

    torchrun --nproc-per-node 5 benchmarks/parameter_server.py --nserver 2
    torchrun --nproc-per-node 11 benchmarks/parameter_server.py --ncudatrainer 8 --nserver 2
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        benchmarks/parameter_server.py --routes allreduce,rpc --placement sharded

Does what PyTorch's benchmarks/distributed/rpc/parameter_server did, written anew. BSD-3-Clause.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cli

ROUTE_NAMES = ("allreduce", "hybrid", "rpc", "sparse_rpc")
SERVER_KINDS = ("running", "batch")
PLACEMENTS = ("grouped", "sharded")
# flag: (the original's value, used on CUDA; the CPU's; help)
SIZES = {
    "--num-embeddings": (1024, 256, "rows of the embedding"),
    "--embedding-dim": (1024, 256, "its columns"),
    "--dense-layers": (8, 4, "linear layers after it"),
    "--dense-size": (1024, 256, "features between them"),
    "--classes": (1024, 256, "features of the last one"),
    "--sample-count": (1024, 1024, "samples of an epoch; batches that are not full are left out"),
    "--sample-length": (1024, 16, "rows that a sample looks up"),
    "--batch-size": (32, 8, "samples of a trainer's step"),
}


def up_to(most: int) -> Callable[[str], int]:
    """argparse type: a whole number from 0 to `most`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) > most:
            message = f"expected a whole number from 0 to {most}, got '{text}'"
            raise argparse.ArgumentTypeError(message)
        return int(text)

    return parse


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = cli.Parser(description=__doc__)
    add = parser.add_argument
    hooks = [*ROUTE_NAMES, *(f"{name}_hook" for name in ROUTE_NAMES)]  # the original's names
    routes = cli.list_of(lambda name: name.removesuffix("_hook"), hooks)
    add("--routes", "--ddp-hook", type=routes, metavar="NAME", help="a list (default: all)")
    kinds = {"--servers": SERVER_KINDS, "--placement": PLACEMENTS}
    for flag, names in kinds.items():
        words = cli.list_of(str, names)
        add(flag, type=words, metavar="NAME", help=f"{', '.join(names)}; a list (default: both)")
    for flag, role in {
        "--ntrainer": "trainers on the CPU",
        "--ncudatrainer": "trainers on CUDA",
        "--nserver": "servers on the CPU (default: one in four of the ranks besides the master)",
        "--ncudaserver": "servers on CUDA",
    }.items():
        add(flag, type=cli.positive_int, metavar="N", help=role)
    backend = "of the trainers; multi: nccl, and gloo for what is sparse (default: by device)"
    add("--backend", choices=("gloo", "nccl", "multi"), help=backend)
    for flag, (cuda, cpu, text) in SIZES.items():
        default = f"{cuda}, CPU {cpu}" if cuda != cpu else f"{cpu}"
        add(flag, type=cli.positive_int, metavar="N", help=f"{text} (default: {default})")
    add("--max-val", type=cli.positive_int, metavar="N", help="(default: --num-embeddings)")
    text = "share of the rows under --max-val that no sample looks up (default: 20)"
    add("--sparsity-percentage", type=up_to(99), default=20, metavar="P", help=text)
    add("--dense-embedding", action="store_true", help="EmbeddingBag's sparse=False")
    text = "DDP's bucket_cap_mb (default: 25, CPU 0.25)"
    add("--bucket-size", type=cli.positive_float, metavar="MB", help=text)
    text = "of the model, and of a CPU trainer's data (default: 0)"
    add("--torch-seed", type=up_to(2**40), default=0, metavar="N", help=text)
    text = "of a CUDA trainer's data (default: 0)"
    add("--cuda-seed", type=up_to(2**40), metavar="N", help=text)
    text = "time exactly N epochs: as --iters, in passes through the data"
    add("--epochs", type=cli.positive_int, metavar="N", help=text)
    cli.add_measurement_flags(parser)
    cli.add_rpc_flags(parser)
    cli.add_report_flags(parser)
    args = parser.parse_args(argv)
    for flag in ("--iters", "--min-iters", "--target-ci", "--max-seconds"):
        if args.epochs and getattr(args, flag[2:].replace("-", "_")) is not None:
            cli.refuse(f"{flag} has no effect with --epochs, which fixes the count; give one")
    cli.check_measurement_flags(args)
    refuse_without_effect(args)
    return args


def refuse_without_effect(args: argparse.Namespace) -> None:
    """Refuse flags that another flag leaves without effect, and sizes that do not fit."""
    no_sparse = [name for name in args.routes or () if name in ("hybrid", "sparse_rpc")]
    if args.dense_embedding and no_sparse:
        cli.refuse(
            f"--routes {no_sparse[0]} has no effect with --dense-embedding: no bucket is "
            "sparse; try --routes allreduce,rpc"
        )
    if args.dense_embedding and args.backend == "multi":
        cli.refuse("--backend multi has no effect with --dense-embedding; try --backend nccl")
    args.routes = args.routes or (
        ["allreduce", "rpc"] if args.dense_embedding else list(ROUTE_NAMES)
    )
    if not set(args.routes) & {"rpc", "sparse_rpc"}:
        given = [f"--rpc-{name}" for name in ("threads", "timeout", "transports", "channels")]
        for flag in ("--servers", "--placement", *given):
            if getattr(args, flag[2:].replace("-", "_")) is not None:
                cli.refuse(
                    f"{flag} has no effect without a route through the servers; "
                    "add --routes rpc or sparse_rpc"
                )
    if args.device != "auto" and (args.ntrainer or args.ncudatrainer):
        cli.refuse("--device has no effect where trainers are counted; leave it out")


if __name__ == "__main__":
    ARGS = parse_args()  # before the imports below, so that --help need not wait for them

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from common.averaging_server import (
    RECORDED,
    Parts,
    Server,
    add_gradient,
    give_up,
    on_every_server,
    pack,
    part_bytes,
    records,
    reset,
    unpack,
)
from common.breakdown import step_metrics
from common.check import compare_replicas, digest, relative_error
from common.dist import FOREVER, CaseGroup, world_from_environment
from common.durations import phase_table, seconds, stamp, summaries, timed_steps
from common.rpc import Layout, make, options_from, place, split, workers
from common.sweep import Outcome, Sweep, check_report_flags, stop_rule
from common.table import StreamedTable, interval_width, metric, percentile_columns
from common.timing import Measurement, measure, time_block

CHECK_STEPS = 4  # DDP rebuilds its buckets after the first
TOLERANCE = 1e-4  # fp32 sums in another order, relative to the largest value of a tensor
SHORT_WARMUP = 2  # measure's own, after ours; it tells how long a step takes


# -- the workload: plain torch ---------------------------------------------------------------------


class Model(nn.Module):
    """Embedding, linear layers, softmax. Input: [batch, sample length] row numbers."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(
            args.num_embeddings, args.embedding_dim, sparse=not args.dense_embedding
        )
        sizes = [args.embedding_dim, *[args.dense_size] * (args.dense_layers - 1), args.classes]
        self.dense = nn.Sequential(*[nn.Linear(a, b) for a, b in itertools.pairwise(sizes)])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.dense(self.embedding(rows)), dim=1)


Batch = tuple[torch.Tensor, torch.Tensor]


def shard(batches: int, trainers: int, trainer: int) -> range:
    """Which batches of an epoch a trainer gets: every `trainers`-th."""
    return range(trainer, batches, trainers)


def epoch_steps(batches: int, trainers: int) -> int:
    """Steps of an epoch, for all trainers alike: as many as the longest shard has batches.

    Trainers with a shorter one start it again, since DDP hangs where one of them stops early.
    """
    return len(shard(batches, trainers, 0))


def create_batches(
    args: argparse.Namespace, trainers: int, trainer: int, device: torch.device
) -> list[Batch]:
    """A trainer's shard of the data. Each batch follows from the seed and its number alone."""
    generator = torch.Generator(device)
    first = (args.cuda_seed if device.type == "cuda" else args.torch_seed) or 0
    draw = functools.partial(torch.randint, generator=generator, device=device)
    generator.manual_seed(first)
    looked_up = max(1, args.max_val * (100 - args.sparsity_percentage) // 100)
    rows = torch.randperm(args.max_val, generator=generator, device=device)[:looked_up]
    batches = []
    for number in shard(args.sample_count // args.batch_size, trainers, trainer):
        generator.manual_seed((first + 1) * 1_000_003 + number)
        inputs = rows[draw(looked_up, (args.batch_size, args.sample_length))]
        batches.append((inputs, draw(args.classes, (args.batch_size,))))
    return batches


def create_step(
    ddp: nn.Module, batches: Iterator[Batch], device: torch.device, log: list[list[Any]]
) -> Callable[[], None]:
    """One training step; the stamps of its phases go to `log`."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    loss_fn = nn.CrossEntropyLoss()

    def step() -> None:
        inputs, targets = next(batches)
        stamps = [stamp(device)]
        optimizer.zero_grad()
        loss = loss_fn(ddp(inputs), targets)
        stamps.append(stamp(device))
        loss.backward()
        stamps.append(stamp(device))
        optimizer.step()
        stamps.append(stamp(device))
        log.append(stamps)

    return step


# -- the routes: DDP communication hooks -----------------------------------------------------------


@dataclass
class Sent:
    """A bucket on its way: stamps, and the bytes that this trainer sends and receives for it.

    It refers to no group: where a callback held the last reference to one, gloo's own thread would
    destroy the group, and with it itself ("Resource deadlock avoided").
    """

    step: int
    sparse: bool
    device: torch.device
    start: Any
    end: Any = None
    moved: float = 0.0
    error: str = ""

    def back(self, gradient_of: Callable[[Any], torch.Tensor], future: Any) -> torch.Tensor:
        """What a future's callback is: take the averaged gradient out of it, and stamp."""
        try:
            gradient = gradient_of(future)
        except Exception as error:  # wrapped into a longer text by every future it passes
            self.error = reason_of(error)
            raise
        self.end = stamp(self.device)
        return gradient


@dataclass
class Exchange:
    """The state of the hooks: with whom this trainer exchanges gradients."""

    device: torch.device
    group: dist.ProcessGroup
    sparse_group: dist.ProcessGroup
    servers: list[tuple[str, torch.device]]  # of bucket i the i-th, counted round; how it travels
    log: list[Sent] = field(default_factory=list)
    steps: dict[int, int] = field(default_factory=dict)  # of each bucket, since the last reset

    def launch(self, bucket: dist.GradBucket) -> Sent:
        index = bucket.index()
        self.steps[index] = self.steps.get(index, -1) + 1
        sparse = bucket.buffer().is_sparse
        self.log.append(Sent(self.steps[index], sparse, self.device, stamp(self.device)))
        return self.log[-1]

    def reset(self) -> None:
        self.log, self.steps = [], {}


def ring_bytes(size: int, trainers: int) -> float:
    """Sent and received by each for an all-reduce (nccl-tests, doc/PERFORMANCE.md), both ways."""
    return 2 * 2 * (trainers - 1) / trainers * size


def gather_bytes(size: int, trainers: int) -> float:
    """Sent and received by each, on average, where everyone gets all the others' gradients."""
    return 2 * (trainers - 1) * size


def reason_of(error: BaseException) -> str:
    """What is behind the text that a future's callback makes of an error."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rpartition("running the callback: ")[2].removeprefix("RuntimeError: ")


def by_collective(
    state: Exchange, bucket: dist.GradBucket, group: dist.ProcessGroup
) -> Future[torch.Tensor]:
    sent = state.launch(bucket)
    gradient, trainers = bucket.buffer(), group.size()
    if gradient.is_sparse:
        gradient = gradient.coalesce()  # as gloo would
        size = part_bytes([gradient.indices(), gradient.values()])
        sent.moved = gather_bytes(size, trainers)
    else:
        sent.moved = ring_bytes(part_bytes([gradient]), trainers)
    work = dist.all_reduce(gradient.div_(trainers), group=group, async_op=True)
    return work.get_future().then(functools.partial(sent.back, lambda done: done.value()[0]))


def by_server(state: Exchange, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    sent, home = state.launch(bucket), state.device
    name, device = state.servers[bucket.index() % len(state.servers)]
    parts = pack(bucket.buffer(), device)
    sent.moved = part_bytes(parts)
    call = rpc.rpc_async(name, add_gradient, args=(sent.step, bucket.index(), parts))

    def average(call: Future[Parts | str]) -> torch.Tensor:
        try:
            answer = call.value()
        except RuntimeError as error:  # it took too long, or the server is gone
            raise RuntimeError(f"{name}: {reason_of(error)}") from error
        if isinstance(answer, str):
            raise RuntimeError(answer)
        sent.moved += part_bytes(answer)
        return unpack(answer, home)

    if state.device.type == "cpu":
        return call.then(functools.partial(sent.back, average))
    # the call's own future may hold no CUDA tensor where the server is on the CPU
    placed: Future[torch.Tensor] = Future(devices=[state.device])

    def place_on_device(call: Future[Parts | str]) -> None:
        try:
            placed.set_result(average(call))
        except Exception as error:
            placed.set_exception(error)

    call.add_done_callback(place_on_device)
    # wait() raises what DDP would take for a tensor
    return placed.then(functools.partial(sent.back, lambda placed: placed.wait()))


def allreduce(state: Exchange, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    return by_collective(state, bucket, state.group)


def hybrid(state: Exchange, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    sparse = bucket.buffer().is_sparse
    return by_collective(state, bucket, state.sparse_group if sparse else state.group)


def through_server(state: Exchange, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    return by_server(state, bucket)


def sparse_rpc(state: Exchange, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    if bucket.buffer().is_sparse:
        return by_server(state, bucket)
    return by_collective(state, bucket, state.group)


Hook = Callable[[Exchange, dist.GradBucket], Future[torch.Tensor]]
ROUTES: dict[str, Hook] = {
    "allreduce": allreduce,
    "hybrid": hybrid,
    "rpc": through_server,
    "sparse_rpc": sparse_rpc,
}


# -- one case --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """What is measured in one case. A route without a server has no kind and no placement."""

    route: str
    server: str | None = None
    placement: str | None = None

    def __str__(self) -> str:
        return " ".join(filter(None, (self.route, self.server, self.placement)))


def averaged_over(config: Config, layout: Layout, trainer: int) -> dict[str, tuple[int, ...]]:
    """With which trainers this one's gradients are averaged, of the embedding and of the rest."""
    everyone = layout.trainer_ranks
    if config.placement != "grouped":
        return {"embedding": everyone, "dense": everyone}
    own = layout.trainers_of(layout.server_of(trainer))
    return {"embedding": own, "dense": own if config.route == "rpc" else everyone}


def servers_of(config: Config, layout: Layout, trainer: int) -> tuple[int, ...]:
    """The ranks of the servers of a trainer's buckets, in turn; none where the route has none."""
    if config.server is None:
        return ()
    return (layout.server_of(trainer),) if config.placement == "grouped" else layout.server_ranks


def start_servers(config: Config, layout: Layout, devices: list[str]) -> None:
    for rank in layout.server_ranks if config.server else ():
        trainers = layout.trainers_of(rank) if config.placement == "grouped" else ()
        count = len(trainers) or layout.trainers
        name = layout.name(rank)
        make(name, "server", Server, config.server, count, torch.device(devices[rank]), name)


def ask_master(layout: Layout, function: Callable[[], Any]) -> dict[str, Any]:
    """Have the master call all servers; their answers by name."""
    names = [layout.name(rank) for rank in layout.server_ranks]
    answers = rpc.rpc_sync("master", on_every_server, args=(names, function))
    return dict(zip(names, answers, strict=True))


def gloo_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    group = dist.new_group(
        list(ranks), timeout=FOREVER, backend="gloo", use_local_synchronization=True
    )
    assert isinstance(group, dist.ProcessGroup)
    return group


def run_case(
    config: Config,
    args: argparse.Namespace,
    layout: Layout,
    devices: list[str],
    sweep: Sweep,
    group: CaseGroup,
) -> Outcome:
    """Time one case on this trainer."""
    rank, device = sweep.ctx.rank, sweep.ctx.device
    if rank == 0:
        start_servers(config, layout, devices)
    dist.barrier(group.control)
    gloo = gloo_group(group.ranks)
    sparse_over_nccl = sweep.ctx.backend == "nccl" and not args.dense_embedding
    one_for_all = gloo if config.route == "allreduce" and sparse_over_nccl else group.test
    servers = [
        (layout.name(server), device if layout.on_cuda(server) else torch.device("cpu"))
        for server in servers_of(config, layout, rank)
    ]
    state = Exchange(device, one_for_all, gloo, servers)
    try:
        return train(config, args, layout, state, sweep, group)
    except Exception as error:
        with contextlib.suppress(RuntimeError):  # as where RPC itself has failed
            for name, _ in servers:  # whose other trainers wait for this one
                reason = f"aborted, since {layout.name(rank)} has failed"
                rpc.rpc_async(name, give_up, args=(reason,))
        for sent in state.log:
            if sent.error:
                raise RuntimeError(sent.error) from error
        raise
    finally:
        dist.destroy_process_group(gloo)


def train(
    config: Config,
    args: argparse.Namespace,
    layout: Layout,
    state: Exchange,
    sweep: Sweep,
    group: CaseGroup,
) -> Outcome:
    rank, device = sweep.ctx.rank, sweep.ctx.device
    torch.backends.cudnn.benchmark = torch.backends.cudnn.deterministic = True
    data = create_batches(args, layout.trainers, rank, device)
    model = create_model(args, device)
    ddp = wrap(args, model, group.test)
    ddp.register_comm_hook(state, ROUTES[config.route])
    log: list[list[Any]] = []
    batches = itertools.cycle(data)

    sweep.watch.phase("check against plain DDP")
    wrong = check(config, args, layout, ddp, batches, sweep, state)
    step = create_step(ddp, batches, device, log)
    for i in range(args.warmup_iters):
        sweep.watch.phase(f"warm-up {i + 1}")
        time_block(step, 1, device)

    sweep.watch.phase("reset")
    dist.barrier(group.control)  # nobody is in a step any more
    if rank == 0 and config.server:
        ask_master(layout, reset)
    dist.barrier(group.control)  # and nobody starts one before the servers are reset
    state.reset()
    log.clear()
    rule = dataclasses.replace(stop_rule(args), warmup_iters=SHORT_WARMUP)
    measurement = measure({"step": step}, group, device, rule, sweep.next_block)

    timed = timed_steps(measurement.rounds, SHORT_WARMUP)
    facts = {
        "wrong": wrong,
        "digests": {name: digest(child) for name, child in model.named_children()},
        **trainer_times(log, state.log, timed),
    }
    if rank == 0 and config.server:
        facts["servers"] = {
            name: server_times(rows, timed) for name, rows in ask_master(layout, records).items()
        }
    return Outcome(facts, measurement)


def create_model(args: argparse.Namespace, device: torch.device) -> Model:
    torch.manual_seed(args.torch_seed)
    return Model(args).to(device)


def wrap(
    args: argparse.Namespace, model: nn.Module, group: dist.ProcessGroup
) -> DistributedDataParallel:
    return DistributedDataParallel(model, process_group=group, bucket_cap_mb=args.bucket_size)


def check(
    config: Config,
    args: argparse.Namespace,
    layout: Layout,
    ddp: DistributedDataParallel,
    batches: Iterator[Batch],
    sweep: Sweep,
    state: Exchange,
) -> str | None:
    """Take a few steps beside plain DDP; what differs by more than TOLERANCE, or None.

    Plain DDP spans the trainers that the gradients are averaged over. Where these differ for the
    embedding (sparse_rpc with several groups) it takes the hybrid route over the two groups.
    """
    over = averaged_over(config, layout, sweep.ctx.rank)
    whole, part = gloo_group(over["dense"]), gloo_group(over["embedding"])
    plain = wrap(args, create_model(args, state.device), whole)
    if over["dense"] != over["embedding"]:
        plain.register_comm_hook(Exchange(state.device, whole, part, []), hybrid)
    wrong = None
    for _ in range(CHECK_STEPS):
        same = itertools.repeat(next(batches))
        for model in (plain, ddp):
            create_step(model, same, state.device, [])()
        for (name, got), want in zip(
            ddp.module.named_parameters(), plain.module.parameters(), strict=True
        ):
            for what, a, b in (("gradient", got.grad, want.grad), ("value", got, want)):
                error = relative_error(a, b)
                if not error <= TOLERANCE:
                    wrong = wrong or f"the {what} of {name} is off plain DDP's by {error:.2g}"
    dist.destroy_process_group(whole)
    dist.destroy_process_group(part)
    return wrong


def trainer_times(log: list[list[Any]], sent: list[Sent], timed: Sequence[int]) -> dict[str, Any]:
    """The seconds of each phase and of each bucket on its way, of the timed steps only."""
    phases: dict[str, list[float]] = {}
    for number in timed:
        for name, (first, last) in {"forward": (0, 1), "backward": (1, 2), "batch": (0, 3)}.items():
            phases.setdefault(name, []).append(seconds(log[number][first], log[number][last]))
    by_step: dict[int, list[Sent]] = {number: [] for number in timed}
    for bucket in sent:
        if bucket.step in by_step:
            by_step[bucket.step].append(bucket)
            name = f"hook {'sparse' if bucket.sparse else 'dense'}"
            phases.setdefault(name, []).append(seconds(bucket.start, bucket.end))
    return {
        "phases": {name: rounded(values) for name, values in phases.items()},
        "hook_s": rounded(
            max(seconds(b[0].start, each.end) for each in b) for b in by_step.values()
        ),
        "moved": [sum(each.moved for each in buckets) for buckets in by_step.values()],
    }


def server_times(rows: list[list[float]], timed: Sequence[int]) -> dict[str, list[float]]:
    steps = set(timed)
    chosen = [row for row in rows if row[0] in steps]
    return {name: rounded(row[i] for row in chosen) for i, name in enumerate(RECORDED, 1)}


def rounded(values: Any) -> list[float]:
    """To 10 ns, which halves what travels and is kept."""
    return [round(value, 8) for value in values]


def derive(
    config: Config,
    args: argparse.Namespace,
    layout: Layout,
    measured: Measurement,
    facts: list[Any],
) -> tuple[dict[str, Any], str]:
    """A case's metrics (see docs/numbers.md) and the verdict on its result. On rank 0."""
    metrics = step_metrics(measured.samples["step"], layout.trainers * args.batch_size)
    hook = np.array([fact["hook_s"] for fact in facts]).max(axis=0)
    metrics["hook_p50_s"] = float(np.median(hook))
    metrics["bytes_per_step"] = float(np.mean([fact["moved"] for fact in facts]))
    metrics["gb_per_s"] = metrics["bytes_per_step"] / metrics["hook_p50_s"] / 1e9
    names = [layout.name(rank) for rank in layout.trainer_ranks]
    phases = [fact["phases"] for fact in facts]
    metrics["trainers"] = summaries(dict(zip(names, phases, strict=True)))
    if config.server:
        metrics["servers"] = summaries(facts[0]["servers"])
    wrong = next(
        (f"{fact['wrong']} (rank {rank})" for rank, fact in enumerate(facts) if fact["wrong"]), None
    ) or compare_all(config, layout, [fact["digests"] for fact in facts])
    return metrics, f"failed: {wrong}" if wrong else "passed"


def compare_all(config: Config, layout: Layout, digests: list[dict[str, str]]) -> str | None:
    """What is wrong with the trainers' digests, or None.

    Bit for bit, wherever gradients are averaged together on one kind of device: a CPU and a GPU
    round the same step differently.
    """
    for part in digests[0]:
        groups = {
            tuple(r for r in over if layout.on_cuda(r) == layout.on_cuda(rank))
            for rank in layout.trainer_ranks
            for over in [averaged_over(config, layout, rank)[part]]
        }
        for ranks in sorted(groups):
            wrong = compare_replicas([digests[rank][part] for rank in ranks], list(ranks))
            if wrong:
                return f"{part}: {wrong}"
    return None


# -- the sweep -------------------------------------------------------------------------------------


def plan(args: argparse.Namespace, layout: Layout) -> list[Config]:
    """Every case. With one server `sharded` is `grouped`: one case."""
    configs = []
    placements = args.placement if layout.servers > 1 else args.placement[:1]
    for route in args.routes:
        if route in ("rpc", "sparse_rpc"):
            pairs = itertools.product(args.servers, placements)
            configs += [Config(route, server, placement) for server, placement in pairs]
        else:
            configs.append(Config(route))
    return configs


def roles(args: argparse.Namespace, world_size: int, cuda: bool) -> Layout:
    """The ranks' roles by the flags. cuda: whether trainers that no flag counts are on CUDA.

    Raises ValueError, with what would do, where they do not fit the world or each other.
    """
    counted = args.ntrainer or args.ncudatrainer
    trainers = (args.ntrainer or 0) + (args.ncudatrainer or 0) if counted else None
    counted = args.nserver or args.ncudaserver
    servers = (args.nserver or 0) + (args.ncudaserver or 0) if counted else None
    layout = split(world_size, trainers, servers, master=True, share=4)
    cuda_trainers = layout.trainers if trainers is None and cuda else args.ncudatrainer or 0
    layout = dataclasses.replace(
        layout, cuda_trainers=cuda_trainers, cuda_servers=args.ncudaserver or 0
    )
    for server in layout.server_ranks:
        if "grouped" in args.placement and not layout.trainers_of(server):
            kind = "CUDA" if layout.on_cuda(server) else "CPU"
            raise ValueError(
                f"{layout.name(server)} ({kind}) would have no trainer to serve among "
                f"{describe(layout)}; start fewer such servers, or try --placement sharded"
            )
    return layout


def describe(layout: Layout) -> str:
    """`3 trainers and 1 server`, and how many of them are on CUDA."""
    texts = []
    for count, cuda, role in (
        (layout.trainers, layout.cuda_trainers, "trainer"),
        (layout.servers, layout.cuda_servers, "server"),
    ):
        on_cuda = f" ({cuda} on CUDA)" if cuda else ""
        texts.append(f"{count} {role}{'s' if count > 1 else ''}{on_cuda}")
    return " and ".join(texts)


def check_args(args: argparse.Namespace) -> tuple[Layout, torch.device, str]:
    """Fill in the defaults that depend on the roles; refuse what cannot run."""
    args.servers = args.servers or list(SERVER_KINDS)
    args.placement = args.placement or list(PLACEMENTS)
    try:
        if args.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda: torch sees no CUDA device here; try --device cpu")
        if (args.ncudatrainer or args.ncudaserver) and not torch.cuda.is_available():
            raise ValueError("CUDA trainers or servers: torch sees no CUDA device here")
        use_cuda = args.device != "cpu" and torch.cuda.is_available()
        layout = roles(args, world_from_environment()[1], use_cuda)
        all_cuda = layout.cuda_trainers == layout.trainers
        args.backend = args.backend or (
            "gloo" if not all_cuda else "nccl" if args.dense_embedding else "multi"
        )
        if args.backend == "multi" and not all_cuda:
            raise ValueError("backend multi needs every trainer on CUDA; try --backend gloo")
        device, backend = place(layout, "nccl" if args.backend == "multi" else args.backend)
    except ValueError as error:
        cli.refuse(str(error))
    by_nccl = [name for name in args.routes if name in ("allreduce", "hybrid")]
    if args.backend == "nccl" and by_nccl and not args.dense_embedding:
        cli.refuse(
            f"--routes {by_nccl[0]} all-reduces sparse gradients, which nccl cannot; "
            "try --backend multi, or --dense-embedding"
        )
    if args.cuda_seed is not None and not layout.cuda_trainers:
        cli.refuse("--cuda-seed has no effect without CUDA trainers; try --torch-seed")
    for flag, (cuda, cpu, _) in SIZES.items():
        name = flag[2:].replace("-", "_")
        value = getattr(args, name) or (cuda if layout.cuda_trainers else cpu)
        setattr(args, name, value)
    args.bucket_size = args.bucket_size or (25.0 if layout.cuda_trainers else 0.25)
    args.max_val = args.max_val or args.num_embeddings
    if args.max_val > args.num_embeddings:
        cli.refuse(
            f"--max-val {args.max_val} is more than the {args.num_embeddings} rows of the "
            f"embedding; try --num-embeddings {args.max_val}"
        )
    batches = args.sample_count // args.batch_size
    if batches < layout.trainers:
        cli.refuse(
            f"--sample-count {args.sample_count} makes {batches} batches of "
            f"{args.batch_size}, fewer than the {layout.trainers} trainers; give at least "
            f"--sample-count {args.batch_size * layout.trainers}"
        )
    if args.epochs:
        args.iters = args.epochs * epoch_steps(batches, layout.trainers)
    check_report_flags(args, "parameter_server")
    return layout, device, backend


def case_key(
    config: Config, args: argparse.Namespace, layout: Layout, rpc_options: dict[str, Any]
) -> dict[str, Any]:
    names = [flag[2:].replace("-", "_") for flag in SIZES]
    names += ["max_val", "sparsity_percentage", "dense_embedding", "bucket_size", "backend"]
    return (
        dataclasses.asdict(config)
        | dataclasses.asdict(layout)
        | {"samples_per_step": layout.trainers * args.batch_size}
        | {name: getattr(args, name) for name in (*names, "torch_seed", "cuda_seed")}
        | (rpc_options if config.server else {})
    )


# -- tables ----------------------------------------------------------------------------------------


def heading(args: argparse.Namespace, layout: Layout) -> str:
    batches = args.sample_count // args.batch_size
    steps = epoch_steps(batches, layout.trainers)
    kind = "dense" if args.dense_embedding else "sparse"
    lines = [
        f"# {describe(layout)}, backend {args.backend}",
        f"# embedding {args.num_embeddings} x {args.embedding_dim} ({kind}), {args.dense_layers} "
        f"linear layers of {args.dense_size}, {args.classes} classes, "
        f"buckets of {args.bucket_size:g} MB",
        f"# {batches} batches of {args.batch_size}: an epoch is {steps} steps",
    ]
    short = layout.trainers * steps - batches
    if short:
        lines[-1] += (
            f"; {short} trainer{'s' if short > 1 else ''} with a batch less start "
            f"{'their' if short > 1 else 'its'} shard again"
        )
    if layout.servers > 1 and any(config.placement == "grouped" for config in plan(args, layout)):
        lines.append(
            "# grouped: a server averages over its own trainers only, so that replicas "
            "of different servers drift apart"
        )
    return "\n".join(lines)


def case_name(case: dict[str, Any]) -> str:
    return str(Config(*(case["key"][name] for name in ("route", "server", "placement"))))


COLUMNS = {
    "": case_name,
    "95% ci\nof p50": interval_width,
    **percentile_columns("step_time", "sec/step", "samples/s", work="samples_per_step"),
    "hook\n(ms)": metric("hook_p50_s", 1e3),
    "MB/step": metric("bytes_per_step", 1e-6),
    "GB/s": metric("gb_per_s", digits=3),
}


def print_phases(keys: list[dict[str, Any]], sweep: Sweep) -> None:
    """Print what each role's time went to, case by case."""
    for case in map(sweep.find, keys):
        if case is not None and "trainers" in case["metrics"]:
            found = [role for role in ("trainers", "servers") if role in case["metrics"]]
            tables = [phase_table(role, case["metrics"][role]) for role in found]
            sweep.say("\n\n".join([f"\n{case_name(case)}", *tables]))


def main(args: argparse.Namespace) -> int:
    layout, device, backend = check_args(args)
    options = options_from(args, world_from_environment()[3])
    configs = plan(args, layout)
    keys = [case_key(config, args, layout, options.key()) for config in configs]
    with Sweep("parameter_server", args, device, backend, tested=layout.trainer_ranks) as sweep:
        devices = sweep.devices()
        known = sweep.plan(keys, lambda: print_phases(keys, sweep))
        sweep.say(f"{heading(args, layout)}\n")
        widest = [max(map(str, configs), key=len), "+-10.0%", *["0.0000", "10000.0"] * 4]
        table = StreamedTable(COLUMNS, [*widest, "100.00", "1000.00", "100.000"])
        for config, key, done in zip(configs, keys, known, strict=True):
            if done:
                case = sweep.find(key)
            else:
                # an all-reduce is timed without RPC beside it, whose threads may poll
                serving = workers(layout, options, sweep) if config.server else None
                with serving or contextlib.nullcontext() as broken:
                    case = sweep.case(
                        key,
                        str(config),
                        layout.trainer_ranks,
                        functools.partial(run_case, config, args, layout, devices, sweep),
                        functools.partial(derive, config, args, layout),
                        broken=broken,
                    )
            if case is not None:
                failed = case["check"].startswith("failed")
                sweep.say(f"{case_name(case)}  {case['check']}" if failed else table.row(case))
    return sweep.status


if __name__ == "__main__":
    sys.exit(record(main)(ARGS))
