#!/usr/bin/env python3
"""What does it cost to average gradients through parameter servers instead of an all-reduce?

The script times training steps (zero_grad, forward, loss, backward, optimizer step) of an embedding
and dense layers under DistributedDataParallel. The route determines how gradient buckets are
averaged:

    allreduce    all buckets by all-reduce; with nccl the embedding's gradient is dense
    hybrid       dense buckets by all-reduce over nccl (on the CPU: gloo), sparse ones by all-reduce
                 over another gloo group
    rpc          all buckets through a parameter server, by RPC
    sparse_rpc   sparse buckets through a parameter server, dense ones by all-reduce

Bucket i is sent to server i modulo the number of servers, which averages it over all trainers. With
`--placement grouped`, as in the original, each server averages all buckets of an equal share of the
trainers: all servers have the same load, but the models of trainers that use different servers
drift apart. A `running` server adds gradients as they arrive; a `batch` server collects all of them
first. Both reply when the last gradient of a bucket has arrived.

    step       time of an iteration on its slowest trainer. With rpc and --placement grouped,
               trainers of different servers do not wait for each other; the step is then the median
               over blocks of (seconds until the last trainer has finished) / (steps in the block)
    samples/s  trainers * batch size / step
    hook       from the launch of a step's first bucket until its last bucket is averaged, on the
               slowest trainer

    torchrun --nproc-per-node 5 benchmarks/parameter_server.py
    torchrun --nproc-per-node 11 benchmarks/parameter_server.py --ncudatrainer 8 --nserver 2
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        benchmarks/parameter_server.py --routes allreduce,rpc --nserver 4

The first ranks are trainers, the next ones servers, and the last rank is the master, which sets up
the servers. The script is a new implementation of the original, PyTorch's
benchmarks/distributed/rpc/parameter_server. docs/parameter_server.md explains the tables.
BSD-3-Clause.
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
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import exits
from harness.cli import Parser, PerDevice, add_common_flags, checked, cut, list_of, number
from harness.exits import refuse

exits.report_missing_packages()

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.elastic.multiprocessing.errors import record
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from benchmarks.workloads.check import compare_replicas, digest, relative_error, verdict
from benchmarks.workloads.percentiles import percentile_columns
from benchmarks.workloads.phases import (
    Durations,
    Phases,
    Stamps,
    phase_table,
    pool,
    summaries,
    unaligned_metrics,
)
from benchmarks.workloads.roles import args_of_rank, assign_roles
from benchmarks.workloads.rpc_flags import add_rpc_flags, rpc_options, rpc_workers
from benchmarks.workloads.settings import side_by_side
from benchmarks.workloads.training import training_metrics
from common.groups import Group, Job
from common.rpc import Roles
from common.stats import Times, iteration_times, median
from common.table import Columns, metric, relative
from common.timing import Workload
from harness.benchmark import Benchmark, Key, Planned, find_world
from harness.environment import count_of
from harness.report import Case

ROUTES = ("allreduce", "hybrid", "rpc", "sparse_rpc")
SERVERS = ("running", "batch")
PLACEMENTS = ("buckets", "grouped")
PYTORCH_SERVERS = {"AverageParameterServer": "running", "AverageBatchParameterServer": "batch"}
ROLES = {
    "ntrainer": "trainers on the CPU",
    "ncudatrainer": "trainers on CUDA",
    "nserver": "servers on the CPU (default: one rank in four, if there are no servers on CUDA)",
    "ncudaserver": "servers on CUDA",
}
MAX_WORKERS = 8  # number of workers whose phases are printed on a terminal
CHECK_STEPS = 4  # more than one, because DDP rebuilds its buckets after the first step
# relative to the largest value of a gradient: routes add float32 numbers in different orders
TOLERANCE = 1e-4
COUNT, SEED = number(int, 1), number(int)
PERCENTAGE = checked(int, lambda n: 0 <= n <= 100, "a whole number from 0 to 100")
SETTINGS = {  # by flag: type, default, help
    "num_embeddings": (COUNT, PerDevice(1024, 256), "rows of the embedding"),
    "embedding_dim": (COUNT, PerDevice(1024, 256), "columns of the embedding"),
    "dense_layers": (COUNT, PerDevice(8, 4), "number of linear layers after the embedding"),
    "dense_size": (
        COUNT,
        PerDevice(1024, 256),
        "features of each linear layer, and number of classes",
    ),
    "sample_count": (COUNT, 1024, "samples per epoch"),
    "sample_length": (COUNT, PerDevice(1024, 16), "rows looked up per sample"),
    "sparsity_percentage": (PERCENTAGE, 20, "percentage of rows that are never looked up"),
    "batch_size": (COUNT, PerDevice(32, 8), "samples per trainer and step"),
    "bucket_size": (
        number(float, 0, above=True),
        PerDevice(25, 0.25),
        "bucket_cap_mb of DDP, in MiB",
    ),
    "torch_seed": (SEED, 0, "seed of the model, and of the data of CPU trainers"),
    "cuda_seed": (SEED, 0, "seed of the data of CUDA trainers"),
}

GONE = {  # flags of the original, and what replaces them
    "--trainer": "DdpTrainer is the only trainer",
    "--model": "DummyModel is the only model; --num-embeddings and --dense-layers set its size",
    "--data": "DummyData is the only data set; --sample-count and --sample-length set its size",
    "--data-config-path": "its entries are flags, e.g. --sample-count 1024",
    "--model-config-path": "its entries are flags, e.g. --num-embeddings 1024",
    "--server-config-path": "its entries are flags, e.g. --wire cpu",
    "--trainer-config-path": "its entries are flags, e.g. --epochs 10",
    "--preprocess-data": "batches are generated on the trainer's device",
    "--create-criterion": "the loss is cross-entropy",
    "--create-ddp-model": "the model is always wrapped by DDP; --bucket-size sets its bucket size",
    "--hook-state": "the hooks of --ddp-hook need no state",
    "--iteration-step": "each step consists of forward, backward and SGD",
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__, GONE)
    add = parser.add_argument
    routes = list_of(lambda name: name.removesuffix("_hook"), ROUTES)  # PyTorch's names
    add(
        "--routes",
        "--ddp-hook",
        type=routes,
        default=[*ROUTES],
        metavar="NAME",
        help=f"how buckets are averaged: {', '.join(ROUTES)} (default: all)",
    )
    servers = list_of(lambda name: PYTORCH_SERVERS.get(name, name), SERVERS)
    add(
        "--servers",
        "--server",
        type=servers,
        default="all",
        metavar="NAME",
        help="list of running, batch (default: both). PyTorch's names are accepted, too: "
        "AverageParameterServer for running, AverageBatchParameterServer for batch",
    )
    placements = list_of(str, PLACEMENTS)
    add(
        "--placement",
        type=placements,
        default=["buckets"],
        metavar="NAME",
        help="buckets: buckets are distributed over the servers, and each server averages over "
        "all trainers; grouped: trainers are distributed over the servers, and each server "
        "averages all buckets of its trainers (default: buckets)",
    )
    add(
        "--wire",
        choices=("cpu", "cuda"),
        default="cuda",
        help="transfer between trainers and servers that are both on CUDA: from GPU to GPU by "
        "device maps (cuda), or through copies on the CPU (cpu) (default: cuda)",
    )
    for name, text in ROLES.items():
        add(f"--{name}", type=number(int), default=0, metavar="N", help=text)
    for name, (kind, default, text) in SETTINGS.items():
        flag, text = f"--{name.replace('_', '-')}", f"{text} (default: %(default)s)"
        add(flag, type=kind, default=default, metavar="N", help=text)
    add(
        "--dense-embedding",
        action="store_true",
        help="use dense gradients for the embedding (EmbeddingBag with sparse=False)",
    )
    add(
        "--epochs",
        type=COUNT,
        metavar="N",
        help="time exactly N epochs; --iters counts steps instead",
    )
    add_rpc_flags(parser, stragglers=True)
    multi = "multi (an alias of nccl; with both, hybrid uses gloo for sparse buckets)"
    add_common_flags(parser, backends=f"gloo, nccl, {multi}, ucc, mpi")
    args = parser.parse_args(argv)
    if args.dense_embedding and {"hybrid", "sparse_rpc"} & set(args.routes):
        text = "no bucket is sparse, but hybrid and sparse_rpc require one"
        parser.error(f"--dense-embedding: {text}; try --routes allreduce,rpc")
    if (args.ntrainer and args.ncudatrainer) or (args.nserver and args.ncudaserver):
        example = "e.g. --ncudatrainer 8 --nserver 2"
        parser.error(f"trainers (or servers) must all be on one kind of device, {example}")
    args.backend = "nccl" if args.backend == "multi" else args.backend
    return args


# [core]
Batch = tuple[Tensor, Tensor]  # row numbers [batch, sample length], classes [batch]
# [gradient], or [indices, values] if it is sparse; and the size of the gradient
Message = tuple[list[Tensor], tuple[int, ...]]
# for each step, a list of buckets; for each bucket, its times in seconds by phase
BucketTimes = dict[int, list[dict[str, list[float]]]]
LR = 0.01


def create_model(
    rows: int, columns: int, layers: int, width: int, *, sparse: bool, seed: int
) -> nn.Sequential:
    """An embedding of `rows` x `columns`, `layers` linear layers of `width` features, softmax.

    The softmax before cross_entropy is that of the original. For real training, remove it.
    """
    torch.manual_seed(seed)
    model = nn.Sequential()
    model.embedding = nn.EmbeddingBag(rows, columns, sparse=sparse)
    sizes = [columns] + [width] * layers
    linear = [nn.Linear(inputs, outputs) for inputs, outputs in itertools.pairwise(sizes)]
    model.dense = nn.Sequential(*linear, nn.Softmax(dim=1))
    return model


def create_batches(
    count: int, size: tuple[int, int], rows: Tensor, classes: int, generator: torch.Generator
) -> list[Batch]:
    """Random batches. size: (batch size, sample length). rows: row numbers to draw from, [n]."""
    draw = partial(torch.randint, generator=generator, device=rows.device)
    batches = []
    for _ in range(count):
        inputs = rows[draw(len(rows), size)]
        batches.append((inputs, draw(classes, size[:1])))
    return batches


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, mark: Callable[[str], None]
) -> None:
    """A training step. mark: called with the name of a phase when that phase ends."""
    inputs, targets = batch
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), targets)
    mark("forward")
    loss.backward()
    mark("backward")
    optimizer.step()


def pack(gradient: Tensor) -> Message:
    """The gradient as dense tensors: RPC cannot send sparse tensors over a device map."""
    if not gradient.is_sparse:
        return [gradient], tuple(gradient.size())
    gradient = gradient.coalesce()  # merge entries of the same row
    return [gradient.indices(), gradient.values()], tuple(gradient.size())


def unpack(message: Message) -> Tensor:
    """The gradient of a message. A sparse one is coalesced, as a future on CUDA requires."""
    parts, size = message
    if len(parts) == 1:
        return parts[0]
    indices, values = parts
    return torch.sparse_coo_tensor(indices, values, size, is_coalesced=True, check_invariants=False)


def copy_to(device: torch.device, message: Message) -> Message:
    """The message with its tensors on a device; tensors on that device are not copied."""
    parts, size = message
    return [part.to(device) for part in parts], size


@dataclass
class Bucket:
    """A bucket of one step on its server, until the gradients of all trainers have arrived."""

    average: Future[Message]
    first_s: float  # arrival of the first gradient
    gradients: list[Tensor] = field(default_factory=list)  # of a `running` server: their sum
    arrived: int = 0  # number of gradients
    averaging_s: float = 0.0  # seconds spent adding and dividing


class Server:
    """Averages buckets over its trainers and replies to all of them after the last gradient."""

    def __init__(self, kind: str, trainers: int, device: str) -> None:
        """kind: `running` or `batch`. trainers: number of trainers that send to this server."""
        self.kind, self.trainers, self.device = kind, trainers, torch.device(device)
        self.cuda: list[Any] = [self.device] if self.device.type == "cuda" else []
        self.buckets: dict[tuple[int, int], Bucket] = {}  # by step and index
        self.times: BucketTimes = {}
        self.lock = threading.Lock()

    def add(self, step: int, index: int, message: Message) -> Future[Message]:
        """Add a trainer's gradient of a bucket; the future holds the average. Thread-safe."""
        wire, gradient = message[0][0].device, unpack(copy_to(self.device, message))
        self.synchronize()  # the gradient counts as arrived once it is on this device
        with self.lock:
            start = perf_counter()
            new = Bucket(Future(devices=self.cuda), start)
            bucket = self.buckets.setdefault((step, index), new)
            if self.kind == "running" and bucket.gradients:
                bucket.gradients[0].add_(gradient)
            else:
                bucket.gradients.append(gradient)
            bucket.arrived += 1
            is_last = bucket.arrived == self.trainers
            if is_last:
                average = pack(reduce(torch.add, bucket.gradients) / self.trainers)
                del self.buckets[step, index]
            self.synchronize()
            end = perf_counter()
            bucket.averaging_s += end - start
        if is_last:
            waited_s = {"straggler": start - bucket.first_s, "batch": end - bucket.first_s}
            times = waited_s | {"averaging": bucket.averaging_s}
            self.times.setdefault(step, []).append({name: [s] for name, s in times.items()})
            bucket.average.set_result(average)
        if wire == self.device:
            return bucket.average
        return bucket.average.then(lambda average: copy_to(wire, average.value()))

    def synchronize(self) -> None:
        """Wait for this call's CUDA stream: calls run on different streams, which the lock does not
        order."""
        if self.cuda:
            torch.cuda.current_stream(self.device).synchronize()


SERVER: list[Server] = []  # the server, if this process is one


def start_server(kind: str, trainers: int, device: str) -> None:
    SERVER[:] = [Server(kind, trainers, device)]


def start_servers(kind: str, trainers: int, devices: dict[str, str]) -> None:
    """Start a new server on each of its ranks; runs on the master. devices: by server name."""
    for name, device in devices.items():
        rpc.rpc_sync(name, start_server, args=(kind, trainers, device))


@rpc.functions.async_execution  # no RPC thread blocks while the server waits for gradients
def add_gradient(step: int, index: int, message: Message) -> Future[Message]:
    return SERVER[0].add(step, index, message)


def bucket_times() -> BucketTimes:
    return SERVER[0].times


def send_bucket(
    server: str, step: int, bucket: dist.GradBucket, wire: torch.device, timeout_s: float
) -> Future[Tensor]:
    """Send a bucket's gradient to a server. The future holds the average, on the bucket's device.

    wire: device from which the gradient is sent. timeout_s: limit on the wait for the reply.
    """
    device, message = bucket.buffer().device, copy_to(wire, pack(bucket.buffer()))
    arguments = (step, bucket.index(), message)
    call = rpc.rpc_async(server, add_gradient, args=arguments, timeout=timeout_s)
    return call.then(lambda call: unpack(copy_to(device, call.wait())))


Hook = Callable[[None, dist.GradBucket], Future[Tensor]]


def uses_server(route: str, sparse: bool) -> bool:
    """Whether a route sends sparse (or dense) buckets to a server."""
    return route == "rpc" or (route == "sparse_rpc" and sparse)


def make_hook(
    route: str,
    send: Callable[[dist.GradBucket], Future[Tensor]],
    group: dist.ProcessGroup,
    sparse_group: dist.ProcessGroup,
) -> Hook:
    """A communication hook for DDP.

    send: averages a bucket through a server. group, sparse_group: for the all-reduce of dense and
    of sparse buckets.
    """

    def hook(state: None, bucket: dist.GradBucket) -> Future[Tensor]:
        sparse = bucket.buffer().is_sparse
        if uses_server(route, sparse):
            return send(bucket)
        return allreduce_hook(sparse_group if sparse else group, bucket)

    return hook


def wrap(
    model: nn.Module, group: dist.ProcessGroup, bucket_mb: float, hook: Hook
) -> DistributedDataParallel:
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=bucket_mb)
    ddp.register_comm_hook(None, hook)
    return ddp


# [/core]
# -- a case ----------------------------------------------------------------------------------------


def steps_of_epoch(samples: int, trainers: int, batch_size: int) -> int:
    """Steps per epoch, the same for each trainer: DDP hangs if one of them stops early."""
    return math.ceil(samples / (trainers * batch_size))


def batches_of(key: Key, trainer: int, device: torch.device) -> Iterator[Batch]:
    """The batches of a trainer, repeated every epoch. All trainers look up the same set of rows."""
    seed = key["cuda_seed"] if device.type == "cuda" else key["torch_seed"]
    generator = torch.Generator(device).manual_seed(seed)
    row_count = key["num_embeddings"]
    used_count = max(1, row_count * (100 - key["sparsity_percentage"]) // 100)
    rows = torch.randperm(row_count, generator=generator, device=device)[:used_count]
    generator.manual_seed((seed + 1) * 1_000_003 + trainer)
    size = (key["batch_size"], key["sample_length"])
    steps = steps_of_epoch(key["sample_count"], key["ranks"], key["batch_size"])
    return itertools.cycle(create_batches(steps, size, rows, key["dense_size"], generator))


def stamped(hook: Hook, phases: Phases) -> Hook:
    """The hook, with time stamps around each bucket."""
    first = None  # launch of the first bucket of the current step

    def stamped_hook(state: None, bucket: dist.GradBucket) -> Future[Tensor]:
        nonlocal first
        start = phases.now()
        if bucket.index() == 0:
            first = start
        name = "hook sparse" if bucket.buffer().is_sparse else "hook dense"

        def on_average(average: Future[Tensor]) -> Tensor:
            # keeps no reference to a process group: a thread of gloo must not drop the last one
            gradient = average.wait()
            end = phases.now()
            phases.add(name, start, end)
            phases.add("hook", first, end)
            return gradient

        return hook(state, bucket).then(on_average)

    return stamped_hook


def build(
    job: Job, key: Key, group: Group, *, roles: Roles, devices: list[str], timeout_s: float
) -> Workload:
    """Start the servers, check the averages, and build the workload of a trainer.

    devices: one per rank of the job. timeout_s: limit on the wait for the average of a bucket.
    """
    servers = [roles.name(rank) for rank in roles.servers] if key["server"] else []
    trainers = trainers_of_a_server(key)
    if job.rank == 0 and servers:
        of_servers = {roles.name(rank): devices[rank] for rank in roles.servers}
        rpc.rpc_sync("master", start_servers, args=(key["server"], trainers, of_servers))
    phases = Phases(job.device)
    wire = job.device if key["wire"] == "cuda" else torch.device("cpu")

    def send(bucket: dist.GradBucket) -> Future[Tensor]:
        grouped = key["placement"] == "grouped"
        server = servers[job.rank // trainers if grouped else bucket.index() % len(servers)]
        return send_bucket(server, phases.count, bucket, wire, timeout_s)

    # an exception: this workload uses the control group, which is gloo and idle within a block
    sparse_group = group.control if key["route"] == "hybrid" else group.workload
    hook = make_hook(key["route"], send, group.workload, sparse_group)
    sizes = (key["num_embeddings"], key["embedding_dim"], key["dense_layers"], key["dense_size"])
    sparse, seed = not key["dense_embedding"], key["torch_seed"]
    model = create_model(*sizes, sparse=sparse, seed=seed).to(job.device)
    ddp = wrap(model, group.workload, key["bucket_size"], stamped(hook, phases))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LR)
    batches = batches_of(key, job.rank, job.device)
    dist.barrier(group.control)  # all servers have started and all trainers are ready
    members = {  # number of trainers in the average of a sparse (True) and of a dense gradient
        sparse: trainers if uses_server(key["route"], sparse) else key["ranks"]
        for sparse in (True, False)
    }
    wrong = compare_with_mean(ddp, optimizer, batches, phases, group.control, members)

    def step() -> tuple[int, Stamps]:
        batch = next(batches)
        phases.begin()
        start = phases.last
        train(ddp, optimizer, batch, phases.mark)
        phases.add("batch", start, phases.now())
        return phases.count, phases.step

    def durations_by_step(steps: list[tuple[int, Stamps]]) -> dict[int, Durations]:
        """The phases of each timed step, by the number under which it was sent to servers."""
        numbers, stamps = zip(*steps, strict=True)
        return dict(zip(numbers, phases.durations(stamps), strict=True))

    def facts() -> dict[str, Any]:
        asked = servers if job.rank == 0 else []
        return {
            "wrong": f"{wrong} (rank {job.rank})" if wrong else None,
            "digest": digest(model),
            "servers": {name: rpc.rpc_sync(name, bucket_times) for name in asked},
        }

    # trainers of different servers do not wait for each other, except in an all-reduce
    aligned = key["ranks"] in members.values()
    return Workload(step, facts=facts, returned=durations_by_step, aligned=aligned)


def trainers_of_a_server(key: Key) -> int:
    """Number of trainers whose gradients one server averages."""
    return int(key["ranks"]) // (key["servers"] if key["placement"] == "grouped" else 1)


def compare_with_mean(
    ddp: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Batch],
    phases: Phases,
    group: dist.ProcessGroup,
    members: dict[bool, int],
) -> str | None:
    """Train CHECK_STEPS steps and compare each averaged gradient with the mean over trainers.

    Returns a description of the first difference, or None. members: number of trainers in the mean
    of a sparse gradient (True) and of a dense one (False); ranks 0 to members - 1 of the group
    belong together, then the next ones. All ranks complete all steps, because they contain
    collectives.
    """
    wrong = None
    frozen = torch.optim.SGD(ddp.parameters(), lr=0.0)
    for batch in itertools.islice(batches, CHECK_STEPS):
        phases.begin()
        with ddp.no_sync():  # local gradients
            train(ddp, frozen, batch, phases.mark)
        gradients: Any = [parameter.grad for parameter in ddp.parameters()]
        own = [(gradient.to_dense(), members[gradient.is_sparse]) for gradient in gradients]
        phases.begin()
        train(ddp, optimizer, batch, phases.mark)
        for (name, parameter), (gradient, count) in zip(
            ddp.module.named_parameters(), own, strict=True
        ):
            sums = gradient.new_zeros(group.size() // count, *gradient.shape)  # [sets, ...]
            own_sum = sums[group.rank() // count]
            own_sum.copy_(gradient)
            dist.all_reduce(sums, group=group)
            error = relative_error(parameter.grad, own_sum / count)
            if not error <= TOLERANCE and not wrong:  # also if it is NaN
                wrong = f"the gradient of {name} differs from the trainers' mean by {error:.2g}"
                wrong += " of its largest value"
    return wrong


def derive(case: Case, times: Times, facts: list[dict[str, Any]]) -> None:
    """Compute the metrics and the verdict of the check. facts: one entry per trainer."""
    metrics = case.metrics
    metrics["samples"] = len(case.ranks) * case.key["batch_size"]  # per step
    if case.aligned:
        metrics |= training_metrics(times, metrics["samples"])
    else:
        of_step, steps_per_s = unaligned_metrics(times.each(), case.rounds, "step")
        # trainers do not wait for each other, so a block ends when its last trainer has finished
        metrics |= of_step | {"step_p50_s": of_step["step_s"]}
        metrics["step_s"] = len(case.ranks) / steps_per_s
        metrics["samples_per_s"] = metrics["samples"] / metrics["step_s"]
    trainers, hooks = {}, []
    for trainer, durations in enumerate(times.returned):
        hooks.append([max(step["hook"]) for step in durations.values()])
        phases = pool(durations.values())
        del phases["hook"]  # these durations overlap within a step
        trainers[f"trainer{trainer}"] = phases
    metrics["hook_s"] = median(iteration_times(hooks, case.aligned))
    metrics["trainers"] = summaries(trainers)
    servers = {}
    for name, times_by_step in facts[0]["servers"].items():
        timed_steps = [times_by_step.get(number, []) for number in times.returned[0]]
        servers[name] = pool(itertools.chain(*timed_steps))
    if servers:
        metrics["servers"] = summaries(servers)
    wrong = [fact["wrong"] for fact in facts if fact["wrong"]]
    share = trainers_of_a_server(case.key)
    for first in range(0, len(facts), share):  # replicas of different servers drift apart
        digests = [fact["digest"] for fact in facts[first : first + share]]
        differ = compare_replicas(digests, case.ranks[first : first + share])
        wrong += [differ] if differ else []
    case.check = verdict(wrong[0] if wrong else None)


def idle_servers(case: Case) -> str | None:
    """A line that names the servers to which no bucket was sent; None if there are none."""
    of_servers = case.metrics.get("servers", {})
    idle = [name for name, phases in of_servers.items() if name != "all" and not phases]
    if not idle:
        return None
    advice = "--placement grouped assigns each server its own trainers"
    return f"# {case.name}: no bucket was sent to {cut(idle)}; {advice}"


# -- output ----------------------------------------------------------------------------------------

COLUMNS: Columns = {
    "": lambda case: case.name,
    "step\ngmean (ms)": metric("step_s", 1e3),
    "95% ci\nof step": relative("step_s"),
    "\nsamples/s": metric("samples_per_s", digits=1),
    "hook\n(ms)": metric("hook_s", 1e3),
    "95% ci\nof hook": relative("hook_s"),
    **percentile_columns("step", "sec/step", "samples/s", lambda case: case.metrics["samples"]),
}


def answer(cases: list[Case]) -> str:
    """The time of a step by route; routes through a server are marked."""
    times = {}
    for case in cases:
        marked = f"{case.name} (through a server)" if case.key["server"] else case.name
        times[marked] = case.metrics["step_s"]
    return f"a step takes {side_by_side(times)}"


def title_of(args: argparse.Namespace, roles: Roles, steps: int) -> str:
    """The settings that all cases have in common. steps: per epoch."""
    epoch = f"an epoch is {count_of(steps, 'step')} of {count_of(args.batch_size, 'sample')}"
    table = f"embedding {args.num_embeddings} x {args.embedding_dim}"
    rows = f"{args.sample_length} rows per sample, {args.sparsity_percentage}% never looked up"
    dense = f"{args.dense_layers} dense layers of {args.dense_size}"
    title = f"{roles}, {len(roles.cuda)} of them on CUDA; {epoch}\n"
    return title + f"{table}, {rows}; {dense}; buckets of {args.bucket_size:g} MiB"


# -- the cases -------------------------------------------------------------------------------------


def through_servers(args: argparse.Namespace) -> list[str]:
    """The routes that need servers."""
    return [route for route in args.routes if "rpc" in route]


def choose_roles(args: argparse.Namespace) -> Roles:
    """The roles that the flags request. By default one rank in four is a server."""
    trainers, servers = args.ntrainer + args.ncudatrainer, args.nserver + args.ncudaserver
    counts = {"trainers": trainers or None, "servers": servers or None, "master": True}
    if trainers and not servers and not through_servers(args):
        # no servers, and a master only if there is a rank for it, so that both world sizes work
        counts |= {"servers": 0, "master": find_world()[2] > trainers}
    cuda_trainers = args.ncudatrainer if trainers else None
    roles = assign_roles(args, cuda_trainers, args.ncudaserver, per_server=4, **counts)
    server_count = max(1, len(roles.servers))
    if "grouped" in args.placement and len(roles.trainers) % server_count:
        counts_text = f"{len(roles.trainers)} trainers are not divisible by {server_count} servers"
        example = f"--ntrainer {server_count * 2} --nserver {server_count}"
        refuse(f"--placement grouped: {counts_text}; e.g. {example}")
    return replace(roles, cuda_wire=args.wire == "cuda")


def plan(args: argparse.Namespace, roles: Roles, rpc_settings: Key) -> list[Planned]:
    """The cases; those without servers come first."""
    by_rpc = through_servers(args)
    settings: list[Any] = [(route, None, None) for route in args.routes if route not in by_rpc]
    settings += itertools.product(by_rpc, args.servers, args.placement)
    fixed: Key = {name: getattr(args, name) for name in SETTINGS}
    fixed["servers"] = len(roles.servers)
    cases: list[Planned] = []
    for route, server, placement in settings:
        key = {"route": route, "server": server, "placement": placement} | fixed
        # nccl has no sparse all-reduce, so allreduce uses dense gradients, as in PyTorch's runs
        dense = route == "allreduce" and roles.backend == "nccl"
        key["dense_embedding"] = args.dense_embedding or dense
        key["server_device"] = roles.device(roles.servers[0]) if server else None
        key["wire"] = roles.wire(0, roles.servers[0]) if server else None
        key |= rpc_settings if server else dict.fromkeys(rpc_settings)
        name = f"{route} {server}" if server else route
        name += " grouped" if placement == "grouped" else ""
        cases.append(Planned(name, len(roles.trainers), key))
    return cases


def main() -> int:
    # torch 2.11 warns about this default in every call, even with check_invariants=False
    torch.sparse.check_sparse_tensor_invariants.disable()
    args = parse_args()
    roles = choose_roles(args)
    steps = steps_of_epoch(args.sample_count, len(roles.trainers), args.batch_size)
    rank_args = args_of_rank(args, roles, iters=args.epochs * steps if args.epochs else args.iters)
    timeout_s = args.straggler_timeout or args.timeout / 2
    devices: list[str] = []
    with Benchmark("parameter_server", rank_args, roles.trainers) as bench, ExitStack() as stack:
        options = rpc_options(args, bench)
        cases = plan(args, roles, options.by_name())
        title = title_of(args, roles, steps)
        if through_servers(args):
            title += f"\n{options}, wire {roles.wire(0, roles.servers[0])}"
        bench.announce({title: cases})
        with bench.begin_table(title, COLUMNS, answer) as table:
            for name, _, key in cases:
                if key["server"] and not devices:  # not earlier: RPC threads may poll
                    devices = stack.enter_context(rpc_workers(bench, roles, options))
                build_case = partial(
                    build, bench.job, roles=roles, devices=devices, timeout_s=timeout_s
                )
                case = bench.measure(key, name, build_case, derive, ranks=roles.trainers)
                if case and (line := idle_servers(case)):
                    bench.print(line)
        for role in ("trainers", "servers"):
            cases_of_role = [case for case in table.passed if role in case.metrics]
            if cases_of_role:
                most = None if bench.max_width is None else MAX_WORKERS
                columns, shown, left_out = phase_table(role, cases_of_role, most)
                bench.print_table(columns, shown)
                if left_out:
                    bench.print(f"# not shown: {left_out}; --wide prints all")
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
