#!/usr/bin/env python3
"""What does it cost to average gradients through parameter servers instead of an all-reduce?

The script times training steps (zero_grad, forward, loss, backward, optimizer step) of an embedding
and dense layers under DistributedDataParallel. A route says how the gradient buckets are averaged:

    allreduce    every bucket by all-reduce; over nccl the embedding's gradient is dense
    hybrid       sparse buckets by all-reduce over gloo, dense ones over nccl (CPU: a second gloo)
    rpc          every bucket through a parameter server, by RPC
    sparse_rpc   sparse buckets through a server, dense ones by all-reduce

A `running` server adds up gradients as they arrive. A `batch` server keeps all of them and then
reduces. Both answer when the last gradient of a bucket is in. With `grouped`, each server averages
over trainers of its own, and the replicas of different servers drift apart. With `sharded`, bucket
i goes to server i modulo the number of servers, which averages it over all trainers.

    step   the slowest trainer counts in each iteration;  samples/s = trainers * batch size / step
    hook   from a step's first bucket launched to its last one averaged, slowest trainer

    torchrun --nproc-per-node 5 benchmarks/parameter_server.py --nserver 2
    torchrun --nproc-per-node 11 benchmarks/parameter_server.py --ncudatrainer 8 --nserver 2
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        benchmarks/parameter_server.py --routes allreduce,rpc --placement sharded

The first ranks are trainers, then come servers, and the last rank is the master, which sets up the
servers. Within a role, ranks on the CPU come before ranks on CUDA. The script does what PyTorch's
benchmarks/distributed/rpc/parameter_server did, written anew. BSD-3-Clause.
docs/parameter_server.md shows how to read the tables.
"""

import argparse
import itertools
import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.elastic.multiprocessing.errors import record
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cli
from common.answers import fastest, ranked, series, show_seconds
from common.check import compare_replicas, digest, relative_error, verdict
from common.cli import (
    Parser,
    add_common_flags,
    checked,
    list_of,
    number,
    positive_float,
    positive_int,
    refuse,
)
from common.groups import Group, Job, share
from common.join import world
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
from common.stats import Times, step_metrics
from common.table import Columns, metric, percentile_columns, relative
from common.workloads.phases import Durations, Phases, Stamps, phase_table, pool, summaries

ROUTES = ("allreduce", "hybrid", "rpc", "sparse_rpc")
SERVERS = ("running", "batch")
PYTORCH_SERVERS = {"AverageParameterServer": "running", "AverageBatchParameterServer": "batch"}


def whole_number(low: int, high: int) -> Any:
    """The type of a flag: a whole number within these, both included."""
    return checked(int, lambda n: low <= n <= high, f"a whole number from {low} to {high}")


class Setting(NamedTuple):
    """A flag whose default depends on the device of the trainers."""

    kind: Any
    on_cuda: float
    on_cpu: float
    help: str


role_count = number(int)
seed_number = whole_number(0, 2**32 - 1)
SETTINGS = {
    "ntrainer": Setting(role_count, 0, 0, "trainers on the CPU"),
    "ncudatrainer": Setting(role_count, 0, 0, "trainers on CUDA"),
    "nserver": Setting(
        role_count, 0, 0, "servers on the CPU; without any, one rank in four is one"
    ),
    "ncudaserver": Setting(role_count, 0, 0, "servers on CUDA"),
    "num_embeddings": Setting(positive_int, 1024, 256, "rows of the embedding"),
    "embedding_dim": Setting(positive_int, 1024, 256, "columns of the embedding"),
    "dense_layers": Setting(whole_number(1, 10_000), 8, 4, "linear layers after the embedding"),
    "dense_size": Setting(
        positive_int, 1024, 256, "features of each linear layer; the last one's are the classes"
    ),
    "sample_count": Setting(whole_number(1, 10_000_000), 1024, 1024, "samples of an epoch"),
    "sample_length": Setting(positive_int, 1024, 16, "rows that a sample looks up"),
    "sparsity_percentage": Setting(
        whole_number(0, 100), 20, 20, "percentage of the rows that no sample looks up"
    ),
    "batch_size": Setting(positive_int, 32, 8, "samples of a trainer's step"),
    "bucket_size": Setting(positive_float, 25, 0.25, "DDP's bucket_cap_mb"),
    "torch_seed": Setting(seed_number, 0, 0, "seed of the model, and of a CPU trainer's data"),
    "cuda_seed": Setting(seed_number, 0, 0, "seed of a CUDA trainer's data"),
}
CHECK_STEPS = 4  # DDP rebuilds its buckets after the first step
# relative to the largest value of a tensor: the routes add fp32 in different orders
TOLERANCE = 1e-4

Key = dict[str, Any]
Batch = tuple[torch.Tensor, torch.Tensor]
Packed = list[torch.Tensor]  # a gradient as it travels: [dense], or [indices, values, size]
BucketTimes = dict[int, list[dict[str, list[float]]]]  # a server's phases by step, bucket by bucket


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    names = [*ROUTES, *(f"{name}_hook" for name in ROUTES)]  # PyTorch's names
    routes = list_of(lambda name: name.removesuffix("_hook"), names)
    text = f"some of {', '.join(ROUTES)} (default: all)"
    add("--routes", "--ddp-hook", type=routes, default=[*ROUTES], metavar="NAME", help=text)
    kinds = list_of(lambda name: PYTORCH_SERVERS.get(name, name), SERVERS)
    text = """running, batch or both (default: both). --server takes PyTorch's names as well:
        AverageParameterServer is running, AverageBatchParameterServer is batch"""
    add("--servers", "--server", type=kinds, default="all", metavar="NAME", help=text)
    text = "grouped, sharded or both (default: both)"
    placements = list_of(str, ("grouped", "sharded"))
    add("--placement", type=placements, default="all", metavar="NAME", help=text)
    text = """how tensors travel between a trainer and a server that are both on CUDA: from GPU to
        GPU by device maps (cuda), or as copies on the CPU (cpu) (default: cuda)"""
    add("--wire", choices=("cpu", "cuda"), help=text)
    for name, setting in SETTINGS.items():
        flag = f"--{name.replace('_', '-')}"
        text = f"{setting.help} (default: {setting.on_cuda}, CPU {setting.on_cpu})"
        if setting.kind is role_count:  # 0 stands for what the other roles leave
            text = setting.help
        # the roles decide between two defaults, in set_up
        default = setting.on_cuda if setting.on_cuda == setting.on_cpu else None
        add(flag, type=setting.kind, default=default, metavar="N", help=text)
    text = "a dense gradient of the embedding: EmbeddingBag's sparse=False"
    add("--dense-embedding", action="store_true", help=text)
    text = "time N passes through the data; --iters counts steps instead"
    add("--epochs", type=positive_int, metavar="N", help=text)
    add_rpc_flags(parser, stragglers=True)
    multi = "multi (nccl, and gloo for the sparse buckets of hybrid; nccl means the same)"
    backends = f"gloo, nccl, {multi}, ucc or mpi"
    add_common_flags(parser, backends=backends)
    args = parser.parse_args(argv)
    args.backend = "nccl" if args.backend == "multi" else args.backend
    return args


def create_model(key: Key, device: torch.device) -> nn.Module:
    """Embedding, linear layers, softmax. Input: [batch, sample length] row numbers."""
    torch.manual_seed(key["torch_seed"])
    model = nn.Sequential()
    sparse = not key["dense_embedding"]
    model.embedding = nn.EmbeddingBag(key["num_embeddings"], key["embedding_dim"], sparse=sparse)
    sizes = [key["embedding_dim"]] + [key["dense_size"]] * key["dense_layers"]
    layers = [nn.Linear(inputs, outputs) for inputs, outputs in itertools.pairwise(sizes)]
    model.dense = nn.Sequential(*layers, nn.Softmax(dim=1))
    return model.to(device)


def create_batches(key: Key, trainer: int, device: torch.device) -> list[Batch]:
    """A trainer's part of an epoch: row numbers [batch, sample length] and classes [batch].

    All trainers on a kind of device look up the same rows. What each draws depends on its number.
    """
    seed = key["cuda_seed"] if device.type == "cuda" else key["torch_seed"]
    generator = torch.Generator(device).manual_seed(seed)
    row_count = key["num_embeddings"]
    looked_up = max(1, row_count * (100 - key["sparsity_percentage"]) // 100)
    rows = torch.randperm(row_count, generator=generator, device=device)[:looked_up]
    generator.manual_seed((seed + 1) * 1_000_003 + trainer)
    draw = partial(torch.randint, generator=generator, device=device)
    size = (key["batch_size"], key["sample_length"])
    batches = []
    for _ in range(steps_of_epoch(key)):
        inputs = rows[draw(looked_up, size)]
        batches.append((inputs, draw(key["dense_size"], size[:1])))
    return batches


def steps_of_epoch(key: Key) -> int:
    """The same number of steps for each trainer: DDP hangs where one stops early."""
    return math.ceil(key["sample_count"] / key["samples_per_step"])


def training_step(ddp: nn.Module, batches: Iterator[Batch], phases: Phases) -> Callable[[], Stamps]:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)

    def step() -> Stamps:
        inputs, targets = next(batches)
        phases.begin()
        start = phases.last
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(inputs), targets)
        phases.mark("forward")
        loss.backward()
        phases.mark("backward")
        optimizer.step()
        phases.add("batch", start, phases.now())
        return phases.step

    return step


# -- a server --------------------------------------------------------------------------------------


def pack(gradient: torch.Tensor, device: torch.device) -> Packed:
    if not gradient.is_sparse:
        return [gradient.to(device)]
    gradient = gradient.coalesce()
    size = torch.tensor(gradient.shape)
    return [gradient.indices().to(device), gradient.values().to(device), size]


def unpack(packed: Packed, device: torch.device) -> torch.Tensor:
    if len(packed) == 1:
        return packed[0].to(device)
    indices, values, size = packed
    return torch.sparse_coo_tensor(
        indices.to(device), values.to(device), size.tolist(), is_coalesced=True
    )


def new_future(device: torch.device) -> Future[Any]:
    return Future(devices=[device] if device.type == "cuda" else None)


@dataclass
class Bucket:
    """A bucket of one step whose gradients are coming in."""

    answer: Future[Packed]
    first_s: float  # when the first gradient arrived
    kept: list[torch.Tensor] = field(default_factory=list)
    arrived: int = 0  # how many gradients have arrived
    averaging_s: float = 0.0


class Server:
    """Averages each bucket over its trainers, and answers all of them after the last gradient."""

    def __init__(self, kind: str, trainers: int, device: str) -> None:
        """trainers: how many gradients make an average."""
        self.kind = kind
        self.trainers = trainers
        self.device = torch.device(device)
        self.buckets: dict[tuple[int, int], Bucket] = {}  # by step and index
        self.times: BucketTimes = {}
        self.lock = threading.Lock()

    def add(self, step: int, index: int, packed: Packed) -> Future[Packed]:
        """Take a trainer's gradient of a bucket, and promise the average. RPC's threads call it."""
        gradient = unpack(packed, self.device)
        self.finish()  # a gradient has arrived once it is on this device
        with self.lock:
            start = perf_counter()
            bucket = self.buckets.setdefault((step, index), Bucket(new_future(self.device), start))
            if self.kind == "running" and bucket.kept:
                bucket.kept[0].add_(gradient)
            else:
                bucket.kept.append(gradient)
            bucket.arrived += 1
            is_last = bucket.arrived == self.trainers
            if is_last:
                average = pack(reduce(torch.add, bucket.kept) / self.trainers, self.device)
                del self.buckets[step, index]
            self.finish()
            end = perf_counter()
            bucket.averaging_s += end - start
        if is_last:
            times = {
                "straggler": [start - bucket.first_s],
                "batch": [end - bucket.first_s],
                "averaging": [bucket.averaging_s],
            }
            self.times.setdefault(step, []).append(times)
            bucket.answer.set_result(average)
        wire = packed[0].device
        return bucket.answer.then(lambda answer: [part.to(wire) for part in answer.value()])

    def finish(self) -> None:
        """Wait for the device: each call has CUDA streams of its own, which no lock orders."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


@rpc.functions.async_execution  # the thread is free while the other gradients come
def add_gradient(step: int, index: int, packed: Packed) -> Future[Packed]:
    return hosted().add(step, index, packed)


def bucket_times() -> BucketTimes:
    return hosted().times


def start_servers(kind: str, servers: list[tuple[str, int, str]]) -> None:
    """The master runs this. servers: the name, the number of trainers and the device of each."""
    for name, trainers, device in servers:
        rpc.rpc_sync(name, host, args=(Server, kind, trainers, device))


# -- a trainer -------------------------------------------------------------------------------------


def send(
    server: str, step: int, bucket: dist.GradBucket, *, wire: torch.device, patience_s: float
) -> Future[torch.Tensor]:
    """Send a bucket's gradient. The future has the average over the server's trainers.

    wire: where the gradient is while it travels. The average is on the bucket's device.
    """
    device = bucket.buffer().device
    words = (step, bucket.index(), pack(bucket.buffer(), wire))
    call = rpc.rpc_async(server, add_gradient, args=words, timeout=patience_s)
    # not call.then(): where the server is on the CPU, that future may hold no CUDA tensor
    average = new_future(device)

    def on_answer(call: Future[Packed]) -> None:
        try:  # value() would take a server's exception for an answer
            average.set_result(unpack(call.wait(), device))
        except Exception as error:
            average.set_exception(RuntimeError(f"{server}: {cli.describe(error)}"))

    call.add_done_callback(on_answer)
    return average


def register_route(
    ddp: DistributedDataParallel,
    route: str,
    group: Group,
    *,
    ask: Callable[[dist.GradBucket], Future[torch.Tensor]],
    phases: Phases,
) -> None:
    """From now on DDP's buckets go by this route, with stamps around each.

    ask: has a server average a bucket.
    """
    # the one workload that a control group carries: it is over gloo, and idle within a block
    sparse_group = group.control if route == "hybrid" else group.test
    first = None  # when the first bucket of a step was launched

    def hook(state: None, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        nonlocal first
        start = phases.now()
        sparse = bucket.buffer().is_sparse
        if bucket.index() == 0:
            first = start
        if route == "rpc" or (route == "sparse_rpc" and sparse):
            average = ask(bucket)
        else:
            average = allreduce_hook(sparse_group if sparse else group.test, bucket)

        def on_average(average: Future[torch.Tensor]) -> torch.Tensor:
            # refers to no group: gloo's own thread must not hold the last reference to one
            gradient = average.wait()
            end = phases.now()
            phases.add("hook sparse" if sparse else "hook dense", start, end)
            phases.add("hook", first, end)
            return gradient

        return average.then(on_average)

    ddp.register_comm_hook(None, hook)


class Timed(NamedTuple):
    """A trainer's timed steps."""

    numbers: list[int]  # by which the servers know these steps
    durations: list[Durations]


def build(
    job: Job, key: Key, group: Group, *, roles: Roles, devices: list[str], patience_s: float
) -> Workload:
    """What a trainer measures.

    devices: of all ranks. patience_s: how long it waits for the answer to a gradient.
    """
    trainers_by_server = trainers_of(key["placement"], roles)
    if job.rank == 0 and trainers_by_server:
        servers = [
            (roles.name(server), len(trainers), devices[server])
            for server, trainers in trainers_by_server.items()
        ]
        rpc.rpc_sync("master", start_servers, args=(key["server"], servers))
    dist.barrier(group.control)  # the servers have started
    my_servers = [server for server, ranks in trainers_by_server.items() if job.rank in ranks]
    phases = Phases(job.device)

    def ask(bucket: dist.GradBucket) -> Future[torch.Tensor]:
        server = my_servers[bucket.index() % len(my_servers)]
        wire = job.device if roles.wire(job.rank, server) == "cuda" else torch.device("cpu")
        return send(roles.name(server), phases.count, bucket, wire=wire, patience_s=patience_s)

    model = create_model(key, job.device)
    bucket_mb = key["bucket_size"]
    ddp = DistributedDataParallel(model, process_group=group.test, bucket_cap_mb=bucket_mb)
    register_route(ddp, key["route"], group, ask=ask, phases=phases)
    batches = itertools.cycle(create_batches(key, job.rank, job.device))
    averaged_over = averaging_ranks(key["route"], job.rank, roles, trainers_by_server)
    plain = reference(create_model(key, job.device), averaged_over, group.control)
    wrong = train_beside_plain(ddp, plain, batches, phases)
    train = training_step(ddp, batches, phases)

    def step() -> tuple[int, Stamps]:
        stamps = train()
        return phases.count, stamps

    def timed(steps: list[tuple[int, Stamps]]) -> Timed:
        numbers = [number for number, _ in steps]
        return Timed(numbers, phases.durations([stamps for _, stamps in steps]))

    def facts() -> dict[str, Any]:
        times_of_servers: dict[str, BucketTimes] = {}
        if job.rank == 0:
            names = [roles.name(server) for server in trainers_by_server]
            times_of_servers = {name: rpc.rpc_sync(name, bucket_times) for name in names}
        return {
            "wrong": f"{wrong} (rank {job.rank})" if wrong else None,
            "digests": {name: digest(child) for name, child in model.named_children()},
            "averaged_over": averaged_over,
            "device": job.device.type,
            "servers": times_of_servers,
        }

    return Workload(step, facts=facts, returned=timed)


def trainers_of(placement: str | None, roles: Roles) -> dict[int, list[int]]:
    """The trainers that each server averages over; no servers where there is no placement.

    `grouped`: where both kinds of device have trainers and servers, trainers on CUDA have servers
    on CUDA, and those on the CPU have servers on the CPU. Servers of a kind differ by one trainer
    at most.
    """
    if placement is None:
        return {}
    if placement == "sharded":
        return {server: list(roles.trainers) for server in roles.servers}
    everyone = {*roles.trainers, *roles.servers}
    kinds = [everyone - roles.cuda, everyone & roles.cuda]
    for role in (roles.trainers, roles.servers):
        if any(kind.isdisjoint(role) for kind in kinds):
            kinds = [everyone]
    trainers_by_server: dict[int, list[int]] = {}
    for kind in kinds:
        trainers = [rank for rank in roles.trainers if rank in kind]
        servers = [rank for rank in roles.servers if rank in kind]
        trainers_by_server |= {server: [] for server in servers}
        for place, trainer in enumerate(trainers):
            server = servers[place * len(servers) // len(trainers)]
            trainers_by_server[server].append(trainer)
    return trainers_by_server


# -- the check beside plain DDP --------------------------------------------------------------------


def averaging_ranks(
    route: str, rank: int, roles: Roles, trainers_by_server: dict[int, list[int]]
) -> dict[str, list[int]]:
    """The trainers over which this rank's embedding and dense layers are averaged."""
    everyone = list(roles.trainers)
    mine = everyone
    for trainers in trainers_by_server.values():
        if rank in trainers:
            mine = trainers
            break
    return {"embedding": mine, "dense": mine if route == "rpc" else everyone}


def reference(
    model: nn.Module, averaged_over: dict[str, list[int]], group: dist.ProcessGroup
) -> nn.Module:
    """Plain DDP over gloo. Where a server has only some of the trainers, the mean of theirs."""
    if len(averaged_over["embedding"]) == group.size():
        return DistributedDataParallel(model, process_group=group)

    def average(ranks: list[int], parameter: Any) -> None:
        gradient = parameter.grad.to_dense()
        gathered = [torch.empty_like(gradient) for _ in range(group.size())]
        dist.all_gather(gathered, gradient, group=group)
        parameter.grad = torch.stack([gathered[rank] for rank in ranks]).mean(0)

    for name, child in model.named_children():
        for parameter in child.parameters():
            parameter.register_post_accumulate_grad_hook(partial(average, averaged_over[name]))
    return model


def train_beside_plain(
    ddp: DistributedDataParallel, plain: nn.Module, batches: Iterator[Batch], phases: Phases
) -> str | None:
    """Train both with the same batches. The first difference, or None.

    Every rank does all steps, whatever differs: the steps hold collectives.
    """
    wrong = None
    for _ in range(CHECK_STEPS):
        same_batch = itertools.repeat(next(batches))
        training_step(plain, same_batch, Phases(phases.device))()
        training_step(ddp, same_batch, phases)()
        wrong = wrong or difference(ddp.module, plain)
    return wrong


def difference(model: nn.Module, plain: nn.Module) -> str | None:
    """The first gradient or value that differs by more than TOLERANCE, or None."""
    pairs: Any = zip(model.named_parameters(), plain.parameters(), strict=True)
    for (name, parameter), wanted in pairs:
        for what, a, b in (
            ("gradient", parameter.grad, wanted.grad),
            ("value", parameter, wanted),
        ):
            error = relative_error(a, b)
            if not error <= TOLERANCE:  # NaN is an error, too
                return f"the {what} of {name} is off plain DDP's by {error:.2g}"
    return None


# -- what rank 0 makes of it -----------------------------------------------------------------------


def derive(case: Case, times: Times, facts: list[dict[str, Any]]) -> None:
    """Fill in the metrics and the check. facts: of each trainer."""
    metrics = case.metrics
    metrics |= step_metrics(times.each(), case.key["samples_per_step"])
    hooks = [hook_times(timed.durations) for timed in times.returned]
    metrics["hook_p50_s"] = float(np.median(np.max(hooks, axis=0)))
    trainers = {}
    for trainer, timed in enumerate(times.returned):
        trainers[f"trainer{trainer}"] = trainer_phases(timed.durations)
    metrics["trainers"] = summaries(trainers)
    if facts[0]["servers"]:
        numbers = times.returned[0].numbers
        servers = {}
        for name, bucket_times_s in facts[0]["servers"].items():
            servers[name] = server_phases(bucket_times_s, numbers)
        metrics["servers"] = summaries(servers)
    wrong = [fact["wrong"] for fact in facts if fact["wrong"]]
    wrong += replicas_that_differ(facts)
    case.check = verdict(wrong[0] if wrong else None)


def hook_times(steps: list[Durations]) -> list[float]:
    """From the first bucket launched to the last one averaged, step by step."""
    return [max(step["hook"]) for step in steps]


def trainer_phases(steps: list[Durations]) -> Durations:
    """The phases of all steps. `hook` is left out: its durations within a step overlap."""
    phases = pool(steps)
    del phases["hook"]
    return phases


def server_phases(times: BucketTimes, numbers: list[int]) -> Durations:
    """A server's phases over the buckets of the steps with these numbers."""
    buckets = [bucket for number in numbers for bucket in times.get(number, [])]
    return pool(buckets)


def replicas_that_differ(facts: list[dict[str, Any]]) -> list[str]:
    """Replicas that are averaged together must be equal bit by bit.

    Only those on the same kind of device: a CPU and a GPU round differently.
    """
    problems = []
    for fact in facts:
        for part, ranks in fact["averaged_over"].items():
            alike = [rank for rank in ranks if facts[rank]["device"] == fact["device"]]
            problem = compare_replicas([facts[rank]["digests"][part] for rank in alike], alike)
            if problem:
                problems.append(f"{part}: {problem}")
    return problems


def carriers(route: str, backend: str, dense_embedding: bool) -> Key:
    """What a case's key says about its process groups and its embedding.

    backend: of the trainers' group. `multi` is nccl, with gloo for sparse buckets: nccl has no
    sparse all-reduce. So over nccl `allreduce` trains a dense embedding, as PyTorch's runs did.
    """
    dense = dense_embedding or (backend == "nccl" and route == "allreduce")
    multi = backend == "nccl" and not dense
    return {"dense_embedding": dense, "backend": "multi" if multi else backend}


def label_of(key: Key) -> str:
    """A route and what carries it, e.g. `allreduce (nccl)`, `hybrid (gloo + nccl)`, `rpc batch`."""
    dense = "nccl" if key["backend"] == "multi" else key["backend"]
    groups = {"rpc": "", "hybrid": f" (gloo + {dense})"}.get(key["route"], f" ({dense})")
    ways = [key[name] for name in ("server", "placement", "wire") if key.get(name)]
    return " ".join([key["route"] + groups, *ways])


COLUMNS: Columns = {
    "": lambda case: label_of(case.key),
    "95% ci\nof p50": relative("step_time_ci95_rel"),
    **percentile_columns("step_time", "sec/step", "samples/s", lambda c: c.key["samples_per_step"]),
    "hook\n(ms)": metric("hook_p50_s", 1e3),
}


# what the routes of one run do not share
OF_A_ROUTE = ["route", "server", "placement", "wire", "backend", "dense_embedding"]
OF_A_ROUTE += ["rpc_threads", "rpc_transports", "rpc_channels"]


def answer(cases: list[Case]) -> list[str]:
    """How much longer a step takes through a server than by an all-reduce."""
    sentences: list[str] = []
    for name, same in series(cases, OF_A_ROUTE).items():
        steps = ranked(same)
        through_server = [pair for pair in steps if pair[0].key["server"]]
        without = [pair for pair in steps if not pair[0].key["server"]]
        if not through_server or not without:
            if steps:
                labels = {label_of(case.key): step for case, step in steps}
                sentences.append(name + fastest(labels))
            continue
        (server, server_step), (other, step) = through_server[0], without[0]
        ratio = server_step.over(step)
        what = "a step through a server and one by all-reduce cannot be told apart:"
        if not ratio.may_be(1):
            what = "a step through a server takes"
        times = f"{show_seconds(server_step.value)} ({label_of(server.key)})"
        times += f" against {show_seconds(step.value)} ({label_of(other.key)})"
        long = "as long" if ratio.may_be(1) else "as long as by all-reduce"
        sentences.append(f"{name}{what} {ratio.times()} {long}: {times}")
    return sentences


def role_counts(roles: Roles) -> Key:
    """How many trainers and servers there are on which device, by the names of their flags."""
    cuda_trainers = len(roles.cuda.intersection(roles.trainers))
    cuda_servers = len(roles.cuda.intersection(roles.servers))
    return {
        "ntrainer": len(roles.trainers) - cuda_trainers,
        "ncudatrainer": cuda_trainers,
        "nserver": len(roles.servers) - cuda_servers,
        "ncudaserver": cuda_servers,
    }


def set_up(args: argparse.Namespace) -> tuple[Roles, Key]:
    """The roles of the ranks, and what the keys of all cases share. Refuses what cannot run."""
    roles = choose_roles(args)
    if args.dense_embedding and {"hybrid", "sparse_rpc"} & set(args.routes):
        refuse("--dense-embedding: no bucket is sparse; try --routes allreduce,rpc")
    on_cpu = roles.cuda.isdisjoint(roles.trainers)
    settings: Key = {}
    for name, setting in SETTINGS.items():
        value = getattr(args, name)
        default = setting.on_cpu if on_cpu else setting.on_cuda
        settings[name] = default if value is None else value
    settings |= role_counts(roles)  # as they are, whichever flags have led to them
    settings |= {"trainers": len(roles.trainers), "server_count": len(roles.servers)}
    settings["samples_per_step"] = len(roles.trainers) * settings["batch_size"]
    return roles, settings


def choose_roles(args: argparse.Namespace) -> Roles:
    """The roles that the flags ask for. By default one rank in four is a server."""
    trainers = args.ntrainer + args.ncudatrainer
    servers = args.nserver + args.ncudaserver
    counts = {"trainers": trainers or None, "servers": servers or None, "master": True}
    if trainers and not servers and not through_servers(args):
        _, _, world_size, _ = world()
        # the trainers by themselves, or with the master that torchrun lines often have
        if world_size in (trainers, trainers + 1):
            counts |= {"servers": 0, "master": world_size > trainers}
    cuda_trainers = args.ncudatrainer if trainers else None
    roles = assign_roles(args, cuda_trainers, args.ncudaserver, per_server=4, **counts)
    if args.wire == "cuda" and not pairs_on_cuda(roles):
        refuse(
            "--wire cuda needs trainers and servers on CUDA, e.g. --ncudatrainer 2 --ncudaserver 1"
        )
    return replace(roles, cuda_wire=args.wire != "cpu")


def pairs_on_cuda(roles: Roles) -> bool:
    """Whether a trainer and a server are both on CUDA, so that --wire makes a difference."""
    return not any(roles.cuda.isdisjoint(role) for role in (roles.trainers, roles.servers))


def through_servers(args: argparse.Namespace) -> list[str]:
    """The routes that need servers."""
    return [route for route in args.routes if "rpc" in route]


def plan(
    args: argparse.Namespace, roles: Roles, settings: Key, *, backend: str, options: RpcOptions
) -> list[Key]:
    """The key of each case: first those without servers. backend: of the trainers' group."""
    keys: list[Key] = []
    for route in args.routes:
        if route not in through_servers(args):
            key = {"route": route, "server": None, "placement": None} | settings
            keys.append(key | carriers(route, backend, args.dense_embedding))
    placements = args.placement
    if len(roles.servers) == 1:  # then both are the same
        placements = placements[:1]
    for route, kind, placement in itertools.product(
        through_servers(args), args.servers, placements
    ):
        key = {"route": route, "server": kind, "placement": placement} | settings
        key |= carriers(route, backend, args.dense_embedding) | options.key()
        if pairs_on_cuda(roles) and not roles.cuda_wire:
            key["wire"] = "cpu"
        keys.append(key)
    return keys


def title_of(key: Key, cuda: int, options: RpcOptions | None) -> str:
    """What all cases share. cuda: how many ranks are on CUDA. options: None without RPC."""
    counts = f"{key['trainers']} trainers, {key['server_count']} servers"
    epoch = f"an epoch is {steps_of_epoch(key)} steps of {key['batch_size']} samples"
    table = f"embedding {key['num_embeddings']} x {key['embedding_dim']}"
    rows = f"{key['sample_length']} rows a sample, {key['sparsity_percentage']} % never looked up"
    dense = f"{key['dense_layers']} dense layers of {key['dense_size']}"
    buckets = f"buckets of {key['bucket_size']:g} MB"
    lines = [f"{counts}, {cuda} of them on CUDA; {epoch}", f"{table}, {rows}; {dense}; {buckets}"]
    if options:
        lines.append(str(options))
    return "\n".join(lines)


def print_phases(bench: Benchmark) -> None:
    """A table for each case and role, with a row for each phase and worker."""
    for case in bench.report.cases:
        for role in ("trainers", "servers"):
            if role in case.metrics:
                table = phase_table(role, case.metrics[role])
                bench.print(f"\n{label_of(case.key)}\n\n{table}")


def main() -> int:
    args = parse_args()
    roles, settings = set_up(args)
    iters = args.epochs * steps_of_epoch(settings) if args.epochs else args.iters
    rank_args = args_of_rank(args, roles, iters=iters)
    torch.sparse.check_sparse_tensor_invariants.disable()  # the default; said, it does not warn
    devices: list[str] = []
    torch.optim.SGD([torch.zeros(1)])  # the first optimizer imports torch._dynamo: for seconds
    with (
        Benchmark("parameter_server", rank_args, roles.trainers, answer) as bench,
        ExitStack() as stack,
    ):
        options = rpc_options(args, bench)
        title = title_of(settings, len(roles.cuda), options if through_servers(args) else None)
        backend = share(bench.job.backend)
        keys = plan(args, roles, settings, backend=backend, options=options)
        bench.announce(keys)
        bench.begin_table(title, COLUMNS, ["sparse_rpc (gloo) running grouped", "+-10.0%"])
        patience_s = args.straggler_timeout or args.timeout / 2
        for key in keys:
            if key["server"] and not devices:  # not before: the threads of RPC may poll
                devices = stack.enter_context(rpc_workers(bench, roles, options))
            build_case = partial(
                build, bench.job, roles=roles, devices=devices, patience_s=patience_s
            )
            bench.measure(key, build_case, derive, roles.trainers)
        print_phases(bench)
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
