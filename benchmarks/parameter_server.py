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
number and is averaged over all trainers. Not timed: making the data, warm-up, and the checks.

    step        per iteration the slowest trainer counts;  samples/s = trainers * batch size / step
    hook        from a step's first bucket launched to its last one averaged, slowest trainer
    MB/step     what a trainer sends and receives in a step, mean over trainers

Ranks: trainers, then servers (of each the CPU's first, then CUDA's), and last the master.
`--backend multi`, the default if all trainers are on CUDA: nccl, and gloo for what is sparse.

    torchrun --nproc-per-node 5 benchmarks/parameter_server.py --nserver 2
    torchrun --nproc-per-node 11 benchmarks/parameter_server.py --ncudatrainer 8 --nserver 2
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        benchmarks/parameter_server.py --routes allreduce,rpc --placement sharded

Does what PyTorch's benchmarks/distributed/rpc/parameter_server did, written anew. BSD-3-Clause.
docs/parameter_server.md shows how to read the tables.
"""

import argparse
import itertools
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial, reduce
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.benchmark import Benchmark, Workload, describe
from common.check import compare_replicas, digest, relative_error, verdict
from common.cli import Parser, add_common_flags, list_of, number, positive_float, refuse
from common.dist import Group, Job
from common.phases import Phases, phase_table, pool, summaries, timed
from common.report import Case
from common.rpc import Roles, add_rpc_flags, assign_roles, host, hosted, rpc_options, rpc_workers
from common.stats import step_metrics
from common.table import Columns, metric, percentile_columns, relative

ROUTES = ("allreduce", "hybrid", "rpc", "sparse_rpc")
KINDS = ("running", "batch")
PLACEMENTS = ("grouped", "sharded")
ROLES = {
    "ntrainer": "trainers on the CPU",
    "ncudatrainer": "trainers on CUDA",
    "nserver": "servers on the CPU (default: one for four ranks)",
    "ncudaserver": "servers on CUDA",
}
SIZES = {  # flag: (on CUDA, on the CPU, help)
    "num_embeddings": (1024, 256, "rows of the embedding"),
    "embedding_dim": (1024, 256, "its columns"),
    "dense_layers": (8, 4, "linear layers after it"),
    "dense_size": (1024, 256, "features between them"),
    "classes": (1024, 256, "features of the last one"),
    "sample_count": (1024, 1024, "samples of an epoch; batches that are not full are left out"),
    "sample_length": (1024, 16, "rows that a sample looks up"),
    "batch_size": (32, 8, "samples of a trainer's step"),
}
CHECK_STEPS = 4  # DDP rebuilds its buckets after the first
TOLERANCE = 1e-4  # fp32 sums in another order, relative to the largest value of a tensor

Key = dict[str, Any]
Batch = tuple[torch.Tensor, torch.Tensor]
Parts = list[torch.Tensor]  # a gradient as it travels: [dense], or [indices, values, size]
Times = dict[int, dict[str, list[float]]]  # of each step: {phase: seconds of each bucket}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add, count = parser.add_argument, number(int, 1)
    names = [*ROUTES, *(f"{name}_hook" for name in ROUTES)]  # PyTorch's names
    routes = list_of(lambda name: name.removesuffix("_hook"), names)
    add("--routes", "--ddp-hook", type=routes, metavar="NAME", help="a list (default: all)")
    for flag, choices in (("--servers", KINDS), ("--placement", PLACEMENTS)):
        text = f"some of {', '.join(choices)} (default: both)"
        add(flag, type=list_of(str, choices), default=[*choices], metavar="NAME", help=text)
    for name, text in ROLES.items():
        add(f"--{name}", type=number(int), default=0, metavar="N", help=text)
    for name, (cuda, cpu, text) in SIZES.items():
        text += f" (default: {cuda}, CPU {cpu})"
        add(f"--{name.replace('_', '-')}", type=count, metavar="N", help=text)
    add("--max-val", type=count, metavar="N", help="(default: --num-embeddings)")
    text = "of the rows under --max-val P %% are looked up by no sample (default: 20)"
    add("--sparsity-percentage", type=int, choices=range(100), default=20, metavar="P", help=text)
    add("--dense-embedding", action="store_true", help="EmbeddingBag's sparse=False")
    text = "DDP's bucket_cap_mb (default: 25, CPU 0.25)"
    add("--bucket-size", type=positive_float, metavar="MB", help=text)
    text = "of the model, and of a CPU trainer's data (default: 0)"
    add("--torch-seed", type=number(int), default=0, metavar="N", help=text)
    add("--cuda-seed", type=number(int), default=0, metavar="N", help="of a CUDA trainer's data")
    add("--epochs", type=count, metavar="N", help="as --iters, in passes through the data")
    patience = "a gradient that waits S seconds for the others fails its case (default: 10)"
    add("--straggler-timeout", type=positive_float, default=10.0, metavar="S", help=patience)
    add_rpc_flags(parser)
    add_common_flags(parser)
    return parser.parse_args(argv)


# -- the model, its data, and a step: plain torch --------------------------------------------------


class Model(nn.Module):
    """Embedding, linear layers, softmax. Input: [batch, sample length] row numbers."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        size = (args.num_embeddings, args.embedding_dim)
        self.embedding = nn.EmbeddingBag(*size, sparse=not args.dense_embedding)
        sizes = [args.embedding_dim, *[args.dense_size] * (args.dense_layers - 1), args.classes]
        self.dense = nn.Sequential(*[nn.Linear(a, b) for a, b in itertools.pairwise(sizes)])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.dense(self.embedding(rows)), dim=1)


def create_model(args: argparse.Namespace, device: torch.device) -> Model:
    torch.manual_seed(args.torch_seed)
    return Model(args).to(device)


def create_batches(
    args: argparse.Namespace, trainers: int, trainer: int, device: torch.device
) -> list[Batch]:
    """A trainer's shard, every `trainers`-th batch; each follows from the seed and its number."""
    generator = torch.Generator(device)
    first = args.cuda_seed if device.type == "cuda" else args.torch_seed
    draw = partial(torch.randint, generator=generator, device=device)
    generator.manual_seed(first)
    looked_up = max(1, args.max_val * (100 - args.sparsity_percentage) // 100)
    rows = torch.randperm(args.max_val, generator=generator, device=device)[:looked_up]
    batches = []
    for i in range(trainer, args.sample_count // args.batch_size, trainers):
        generator.manual_seed((first + 1) * 1_000_003 + i)
        inputs = rows[draw(looked_up, (args.batch_size, args.sample_length))]
        batches.append((inputs, draw(args.classes, (args.batch_size,))))
    return batches


def training_step(ddp: nn.Module, batches: Iterator[Batch], phases: Phases) -> Callable[[], None]:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    loss_fn = nn.CrossEntropyLoss()

    def step() -> None:
        inputs, targets = next(batches)
        start = phases.begin()
        optimizer.zero_grad()
        loss = loss_fn(ddp(inputs), targets)
        phases.mark("forward")
        loss.backward()
        phases.mark("backward")
        optimizer.step()
        phases.add("batch", start, phases.now())

    return step


# -- a server --------------------------------------------------------------------------------------


def pack(gradient: torch.Tensor, device: torch.device) -> Parts:
    if not gradient.is_sparse:
        return [gradient.to(device)]
    gradient = gradient.coalesce()
    size = torch.tensor(gradient.shape)
    return [gradient.indices().to(device), gradient.values().to(device), size]


def unpack(parts: Parts, device: torch.device) -> torch.Tensor:
    if len(parts) == 1:
        return parts[0].to(device)
    indices, values, size = parts[0].to(device), parts[1].to(device), parts[2].tolist()
    return torch.sparse_coo_tensor(indices, values, size, is_coalesced=True)


def new_future(device: torch.device) -> Future[Any]:
    return Future(devices=[device] if device.type == "cuda" else None)


@dataclass
class Bucket:
    """A bucket of one step whose gradients are coming in."""

    answer: Future[Parts]
    first_s: float  # when the first gradient was there
    kept: list[torch.Tensor] = field(default_factory=list)
    arrived: int = 0
    averaging_s: float = 0.0


class Server:
    """Averages each bucket over `trainers` and answers all of them when the last gradient is in.

    Its methods run on the threads of RPC, for several buckets and steps at once. On CUDA each call
    has streams of its own, which a lock does not order: it waits for its stream before it lets go.
    """

    def __init__(self, kind: str, trainers: int, device: str) -> None:
        self.kind, self.trainers, self.device = kind, trainers, torch.device(device)
        self.times: Times = {}
        self.buckets: dict[tuple[int, int], Bucket] = {}
        self.lock = threading.Lock()

    def add(self, step: int, index: int, parts: Parts) -> Future[Parts]:
        """Take a trainer's gradient of a bucket; the average comes as the same kind of parts."""
        gradient = unpack(parts, self.device)
        self.finish()  # what counts is when it is here
        with self.lock:
            now, answer = perf_counter(), new_future(self.device)
            bucket = self.buckets.setdefault((step, index), Bucket(answer, now))
            if self.kind == "running" and bucket.kept:
                bucket.kept[0].add_(gradient)
            else:
                bucket.kept.append(gradient)
            bucket.arrived += 1
            last = bucket.arrived == self.trainers
            if last:
                average = pack(reduce(torch.add, bucket.kept) / self.trainers, self.device)
                del self.buckets[step, index]
            self.finish()
            bucket.averaging_s += perf_counter() - now
            if last:
                took = self.times.setdefault(step, {"straggler": [], "batch": [], "averaging": []})
                took["straggler"].append(now - bucket.first_s)
                took["batch"].append(perf_counter() - bucket.first_s)
                took["averaging"].append(bucket.averaging_s)
        if last:
            bucket.answer.set_result(average)
        return bucket.answer.then(partial(on_device, parts[0].device))

    def finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def on_device(device: torch.device, answer: Future[Parts]) -> Parts:
    return [part.to(device) for part in answer.value()]


@rpc.functions.async_execution  # the thread is free while the other gradients come
def add_gradient(step: int, index: int, parts: Parts) -> Future[Parts]:
    answer: Future[Parts] = hosted().add(step, index, parts)
    return answer


def step_times() -> Times:
    times: Times = hosted().times
    return times


# what the master does for trainer 0: it calls all servers


def start_servers(kind: str, servers: list[tuple[str, int, str]]) -> None:
    """servers: name, number of trainers, and device of each."""
    for name, trainers, device in servers:
        rpc.rpc_sync(name, host, args=(Server, kind, trainers, device))


def collect_times(names: list[str]) -> dict[str, Times]:
    return {name: rpc.rpc_sync(name, step_times) for name in names}


# -- the routes, as DDP communication hooks --------------------------------------------------------


class Log:
    """What the buckets of this trainer cost.

    It refers to no group: where a future's callback held the last reference to one, gloo's own
    thread would destroy the group, and with it itself ("Resource deadlock avoided").
    """

    def __init__(self, device: torch.device) -> None:
        self.phases = Phases(device)
        self.moved: dict[int, list[float]] = defaultdict(list)  # bytes sent and received, by step
        self.first: Any = None  # stamp of the step's first bucket

    @property
    def step(self) -> int:
        return len(self.phases.steps) - 1

    def launch(self, bucket: dist.GradBucket) -> Callable[[Callable[[Any], Any], Any], Any]:
        """Stamp now. What it returns takes the averaged gradient out of a future, and stamps."""
        start = self.phases.now()
        self.first = first = self.first if bucket.index() else start
        name = "hook sparse" if bucket.buffer().is_sparse else "hook dense"

        def arrived(take: Callable[[Any], torch.Tensor], future: Any) -> torch.Tensor:
            gradient = take(future)
            end = self.phases.now()
            self.phases.add(name, start, end)
            self.phases.add("hook", first, end)
            return gradient

        return arrived


def by_collective(
    group: dist.ProcessGroup, log: Log, bucket: dist.GradBucket
) -> Future[torch.Tensor]:
    arrived, gradient, n = log.launch(bucket), bucket.buffer(), group.size()
    parts, times = [gradient], 2 * (n - 1) / n  # a ring; nccl-tests, doc/PERFORMANCE.md
    if gradient.is_sparse:
        gradient = gradient.coalesce()  # as gloo would, which gathers
        parts, times = [gradient.indices(), gradient.values()], n - 1
    log.moved[log.step].append(2 * times * sum(part.nbytes for part in parts))
    work = dist.all_reduce(gradient.div_(n), group=group, async_op=True)
    return work.get_future().then(partial(arrived, lambda done: done.value()[0]))


def by_server(
    servers: list[tuple[str, torch.device]], patience_s: float, log: Log, bucket: dist.GradBucket
) -> Future[torch.Tensor]:
    """servers: names, of bucket i the i-th, counted round; and on which device gradients travel."""
    arrived, step, device = log.launch(bucket), log.step, log.phases.device
    name, wire = servers[bucket.index() % len(servers)]
    parts = pack(bucket.buffer(), wire)
    log.moved[step].append(sum(part.nbytes for part in parts))
    words = (step, bucket.index(), parts)
    call = rpc.rpc_async(name, add_gradient, args=words, timeout=patience_s)
    # not call.then(): the call's own future may hold no CUDA tensor where the server is on the CPU
    average = new_future(device)

    def on_answer(call: Future[Parts]) -> None:
        try:
            answer = call.wait()  # value() would take a server's exception for an answer
            log.moved[step].append(sum(part.nbytes for part in answer))
            average.set_result(unpack(answer, device))
        except Exception as error:
            average.set_exception(RuntimeError(f"{name}: {describe(error)}"))

    call.add_done_callback(on_answer)
    return average.then(partial(arrived, lambda average: average.wait()))


# -- what a trainer does ---------------------------------------------------------------------------


def build(
    key: Key, args: argparse.Namespace, roles: Roles, devices: list[str], job: Job, group: Group
) -> Workload:
    """devices: of all ranks."""
    rank, device, route = job.rank, job.device, key["route"]
    torch.backends.cudnn.benchmark = torch.backends.cudnn.deterministic = True
    shares = trainers_of(key["placement"], roles)
    if rank == 0 and shares:
        new = [(roles.name(home), len(own), devices[home]) for home, own in shares.items()]
        rpc.rpc_sync("master", start_servers, args=(key["server"], new))
    dist.barrier(group.control)
    servers = [
        (roles.name(home), device if home in roles.cuda else torch.device("cpu"))
        for home, own in shares.items()
        if rank in own
    ]
    # nccl has no sparse all-reduce; the second group is the control group, idle within a block
    multi = key["backend"] == "multi"
    sparse_group = group.control if multi or route == "hybrid" else group.test
    dense_group = group.control if multi and route == "allreduce" else group.test
    log = Log(device)

    def hook(state: None, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        sparse = bucket.buffer().is_sparse
        if route == "rpc" or (route == "sparse_rpc" and sparse):
            return by_server(servers, args.straggler_timeout, log, bucket)
        return by_collective(sparse_group if sparse else dense_group, log, bucket)

    model, size = create_model(args, device), args.bucket_size
    ddp = DistributedDataParallel(model, process_group=group.test, bucket_cap_mb=size)
    ddp.register_comm_hook(None, hook)
    batches = itertools.cycle(create_batches(args, len(roles.trainers), rank, device))
    over = averaged_over(key, roles, rank)
    plain = plain_ddp(create_model(args, device), over, size, group.control)
    wrong = None
    for _ in range(CHECK_STEPS):
        same = itertools.repeat(next(batches))
        training_step(plain, same, Phases(device))()
        training_step(ddp, same, log.phases)()
        wrong = wrong or difference(model, plain.module)

    def facts() -> dict[str, Any]:
        steps = range(len(log.phases.steps))
        names = [roles.name(home) for home in shares if rank == 0]
        times = rpc.rpc_sync("master", collect_times, args=(names,)) if names else {}
        return {
            "wrong": wrong and f"{wrong} (rank {rank})",
            "digests": {part: digest(child) for part, child in model.named_children()},
            "phases": log.phases.durations(),
            "moved": [sum(log.moved[i]) for i in steps],
            "servers": {name: [rows.get(i, {}) for i in steps] for name, rows in times.items()},
        }

    return Workload({"step": training_step(ddp, batches, log.phases)}, facts=facts)


# -- who averages with whom, and the checks --------------------------------------------------------


def trainers_of(placement: str | None, roles: Roles) -> dict[int, list[int]]:
    """The trainers that each server averages over; no servers where there is no placement.

    `grouped`: runs that differ by one trainer at most.
    """
    trainers, servers = roles.trainers, roles.servers
    if placement != "grouped":
        return {server: list(trainers) for server in servers if placement}
    n, m = len(trainers), len(servers)
    return {servers[i]: [t for t in trainers if t * m // n == i] for i in range(m)}


def averaged_over(key: Key, roles: Roles, trainer: int) -> dict[str, list[int]]:
    """With which trainers this one's gradients are averaged, of the embedding and of the rest."""
    everyone = list(roles.trainers)
    shares = trainers_of(key["placement"], roles).values()
    own = next((share for share in shares if trainer in share), everyone)
    return {"embedding": own, "dense": own if key["route"] == "rpc" else everyone}


def plain_ddp(
    model: nn.Module, over: dict[str, list[int]], size_mb: float, group: dist.ProcessGroup
) -> DistributedDataParallel:
    """The reference: DDP by itself, over gloo.

    Where a server averages over some of the trainers, a hook gathers the gradients of all and
    averages those of the same ones.
    """
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=size_mb)

    def average_of_some(state: None, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        mine = bucket.buffer()
        rows = [torch.empty(mine.shape, device=mine.device) for _ in range(group.size())]
        dist.all_gather(rows, mine.to_dense(), group=group)
        some = over["embedding" if mine.is_sparse else "dense"]
        average = torch.stack([rows[rank] for rank in some]).mean(0)
        done: Future[torch.Tensor] = Future()
        done.set_result(average.to_sparse(1) if mine.is_sparse else average)
        return done

    if len(over["embedding"]) < group.size():
        ddp.register_comm_hook(None, average_of_some)
    return ddp


def difference(model: nn.Module, plain: nn.Module) -> str | None:
    """The first gradient or value that differs by more than TOLERANCE, or None."""
    pairs = zip(model.named_parameters(), plain.parameters(), strict=True)
    for (name, got), want in pairs:
        assert got.grad is not None
        assert want.grad is not None
        for what, a, b in (("gradient", got.grad, want.grad), ("value", got, want)):
            if not (error := relative_error(a, b)) <= TOLERANCE:
                return f"the {what} of {name} is off plain DDP's by {error:.2g}"
    return None


def compare_all(key: Key, roles: Roles, digests: list[dict[str, str]]) -> str | None:
    """What is wrong with the trainers' digests, or None.

    Bit for bit, wherever gradients are averaged together on one kind of device: a CPU and a GPU
    round the same step differently.
    """
    for rank in roles.trainers:
        for part, over in averaged_over(key, roles, rank).items():
            alike = [r for r in over if roles.device(r) == roles.device(rank)]
            if wrong := compare_replicas([digests[r][part] for r in alike], alike):
                return f"{part}: {wrong}"
    return None


# -- what rank 0 makes of it -----------------------------------------------------------------------


def derive(roles: Roles, case: Case, facts: list[dict[str, Any]]) -> None:
    """Fill in the metrics and the check."""
    m = case.metrics
    m |= step_metrics(case.samples_s["step"], case.key["samples_per_step"])
    phases = [timed(fact["phases"], case.rounds) for fact in facts]
    hooks = np.array([[max(step.pop("hook")) for step in steps] for steps in phases])
    m["hook_p50_s"] = float(np.median(hooks.max(axis=0)))
    m["bytes_per_step"] = float(np.mean([timed(fact["moved"], case.rounds) for fact in facts]))
    m["trainers"] = summaries({roles.name(i): pool(steps) for i, steps in enumerate(phases)})
    if servers := facts[0]["servers"]:
        m["servers"] = summaries({n: pool(timed(rows, case.rounds)) for n, rows in servers.items()})
    wrong = next((fact["wrong"] for fact in facts if fact["wrong"]), None)
    digests = [fact["digests"] for fact in facts]
    case.check = verdict(wrong or compare_all(case.key, roles, digests))


def label_of(key: Key) -> str:
    return " ".join(key[name] for name in ("route", "server", "placement") if key[name])


COLUMNS: Columns = {
    "": lambda case: label_of(case.key),
    "95% ci\nof p50": relative("step_time_ci95_rel"),
    **percentile_columns("step_time", "sec/step", "samples/s", lambda c: c.key["samples_per_step"]),
    "hook\n(ms)": metric("hook_p50_s", 1e3),
    "MB/step": metric("bytes_per_step", 1e-6),
}


# -- the run ---------------------------------------------------------------------------------------


def set_up(args: argparse.Namespace) -> Roles:
    """The ranks' roles; fill in the defaults that depend on them, and refuse what cannot run."""
    trainers, servers = args.ntrainer + args.ncudatrainer, args.nserver + args.ncudaserver
    counts = {"trainers": trainers, "servers": servers, "master": True, "per_server": 4}
    given, sparse = args.backend, not args.dense_embedding
    args.backend = "nccl" if given == "multi" else given
    chosen = args.ncudatrainer if trainers else None
    roles = assign_roles(args, chosen, args.ncudaserver, **counts)
    trainers, cuda = len(roles.trainers), len(roles.cuda.intersection(roles.trainers))
    args.multi = given == "multi" or (sparse and not given and cuda == trainers)
    for name, defaults in SIZES.items():
        setattr(args, name, getattr(args, name) or defaults[0 if cuda else 1])
    args.bucket_size = args.bucket_size or (25.0 if cuda else 0.25)
    args.max_val = args.max_val or args.num_embeddings
    args.routes = args.routes or [n for n in ROUTES if sparse or n in ("allreduce", "rpc")]
    batches = args.sample_count // args.batch_size
    # DDP hangs where a trainer stops early: those with a batch less start their shard again
    args.epoch_steps = -(-batches // trainers)
    if args.epochs:
        args.iters = args.epochs * args.epoch_steps
    if not sparse and {"hybrid", "sparse_rpc"} & set(args.routes):
        refuse("--dense-embedding: no bucket is sparse; try --routes allreduce,rpc")
    if args.max_val > args.num_embeddings:
        refuse(f"--max-val: there are {args.num_embeddings} rows; try more --num-embeddings")
    if batches < trainers:
        refuse(
            f"--sample-count {args.sample_count} makes {batches} batches of {args.batch_size} for "
            f"{trainers} trainers; try --sample-count {args.batch_size * trainers}"
        )
    if "grouped" in args.placement and len(roles.servers) > trainers:
        refuse(f"{trainers} trainers leave a server without one; try --placement sharded")
    if given == "nccl" and sparse and {"allreduce", "hybrid"} & set(args.routes):
        refuse("nccl has no sparse all-reduce; try --backend multi, or --dense-embedding")
    return roles


def heading(args: argparse.Namespace, roles: Roles) -> str:
    drift = len(roles.servers) > 1 and "grouped" in args.placement
    return (
        f"# {len(roles.trainers)} trainers, {len(roles.servers)} servers, {len(roles.cuda)} of "
        f"them on CUDA; an epoch is {args.epoch_steps} steps of {args.batch_size} samples\n"
        f"# embedding {args.num_embeddings} x {args.embedding_dim}, {args.dense_layers} linear "
        f"layers of {args.dense_size}, {args.classes} classes, buckets of {args.bucket_size:g} MB"
        + drift
        * "\n# grouped: replicas of different servers drift apart"
    )


def main() -> int:
    args = parse_args()
    roles = set_up(args)
    torch.sparse.check_sparse_tensor_invariants.disable()  # the default; said, it does not warn
    names = [*SIZES, *ROLES, "max_val", "sparsity_percentage", "dense_embedding"]
    names += ["bucket_size", "torch_seed", "cuda_seed"]
    fixed = {name: getattr(args, name) for name in names}
    fixed |= {"trainers": len(roles.trainers), "server_count": len(roles.servers)}
    fixed["samples_per_step"] = len(roles.trainers) * args.batch_size
    with Benchmark("parameter_server", args, tested=roles.trainers) as bench:
        options = rpc_options(args, bench)
        fixed["backend"] = bench.share("multi" if args.multi else bench.job.backend)
        bench.begin_table(heading(args, roles), COLUMNS, ["sparse_rpc running grouped", "+-10.0%"])
        cases = []
        placements = args.placement if len(roles.servers) > 1 else args.placement[:1]
        for route in args.routes:
            through = itertools.product(args.servers, placements)
            for kind, placement in through if "rpc" in route else [(None, None)]:
                key = {"route": route, "server": kind, "placement": placement} | fixed
                key |= options.key() if kind else {}
                # an all-reduce is timed without RPC beside it, whose threads may poll
                serving = kind and key not in bench.done
                none: AbstractContextManager[list[str]] = nullcontext([])
                with rpc_workers(bench, roles, options) if serving else none as devices:
                    work = partial(build, key, args, roles, devices, bench.job)
                    case = bench.measure(key, work, partial(derive, roles), roles.trainers)
                cases += [case] if case and not case.failed else []
        for case in cases:
            found = [role for role in ("trainers", "servers") if role in case.metrics]
            tables = [phase_table(role, case.metrics[role]) for role in found]
            bench.print("\n\n".join([f"\n{label_of(case.key)}", *tables]))
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
