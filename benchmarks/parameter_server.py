#!/usr/bin/env python3
"""What does it cost to average gradients through parameter servers instead of an all-reduce?

Timed are training steps (zero_grad, forward, loss, backward, optimizer step) of an embedding and
dense layers under DistributedDataParallel, whose gradient buckets are averaged by a route:

    allreduce    every bucket by all-reduce; over nccl the embedding's gradient is dense
    hybrid       sparse buckets by all-reduce over gloo, dense ones over nccl (CPU: a second gloo)
    rpc          every bucket through a parameter server, by RPC
    sparse_rpc   sparse buckets through a server, dense ones by all-reduce

A `running` server adds gradients up as they arrive, a `batch` one keeps all and then reduces; the
answer comes when the last gradient of a bucket is in. `grouped`: a server averages over its own
share of the trainers, whose replicas drift from the others'; `sharded`: bucket i goes to server i
modulo their number and is averaged over all trainers.

    step   per iteration the slowest trainer counts;  samples/s = trainers * batch size / step
    hook   from a step's first bucket launched to its last one averaged, slowest trainer

    torchrun --nproc-per-node 5 benchmarks/parameter_server.py --nserver 2
    torchrun --nproc-per-node 11 benchmarks/parameter_server.py --ncudatrainer 8 --nserver 2
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        benchmarks/parameter_server.py --routes allreduce,rpc --placement sharded

Ranks: trainers, then servers (of each the CPU's first, then CUDA's), last the master, which sets
the servers up. Does what PyTorch's benchmarks/distributed/rpc/parameter_server did, written anew.
BSD-3-Clause. docs/parameter_server.md shows how to read the tables.
"""

import argparse
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from pathlib import Path
from time import perf_counter
from typing import Any

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
from common.benchmark import Benchmark, Workload
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
from common.dist import Group, Job, share
from common.join import world
from common.phases import Durations, Phases, Stamps, phase_table, pool, summaries
from common.report import Case
from common.rpc import (
    Roles,
    RpcOptions,
    add_rpc_flags,
    assign_roles,
    host,
    hosted,
    rpc_options,
    rpc_workers,
)
from common.stats import Times, step_metrics
from common.table import Columns, metric, percentile_columns, relative

ROUTES = ("allreduce", "hybrid", "rpc", "sparse_rpc")
SERVERS = ("running", "batch")
PYTORCH_SERVERS = {"AverageParameterServer": "running", "AverageBatchParameterServer": "batch"}


def whole(low: int, high: int) -> Any:
    """The type of a flag: a whole number within these, both included."""
    return checked(int, lambda n: low <= n <= high, f"a whole number from {low} to {high}")


role_count = number(int)
SETTINGS: dict[str, tuple[Any, float, float, str]] = {  # type, default on CUDA, on the CPU, help
    "ntrainer": (role_count, 0, 0, "trainers on the CPU"),
    "ncudatrainer": (role_count, 0, 0, "trainers on CUDA"),
    "nserver": (role_count, 0, 0, "servers on the CPU; without any one rank in four is one"),
    "ncudaserver": (role_count, 0, 0, "servers on CUDA"),
    "num_embeddings": (positive_int, 1024, 256, "rows of the embedding"),
    "embedding_dim": (positive_int, 1024, 256, "its columns"),
    "dense_layers": (whole(1, 10_000), 8, 4, "linear layers after it"),
    "dense_size": (positive_int, 1024, 256, "features of each, of the last one the classes"),
    "sample_count": (whole(1, 10_000_000), 1024, 1024, "samples of an epoch"),
    "sample_length": (positive_int, 1024, 16, "rows that a sample looks up"),
    "sparsity_percentage": (whole(0, 100), 20, 20, "of the rows so many %% are never looked up"),
    "batch_size": (positive_int, 32, 8, "samples of a trainer's step"),
    "bucket_size": (positive_float, 25, 0.25, "DDP's bucket_cap_mb"),
    "torch_seed": (whole(0, 2**32 - 1), 0, 0, "of the model, and of a CPU trainer's data"),
    "cuda_seed": (whole(0, 2**32 - 1), 0, 0, "of a CUDA trainer's data"),
}
CHECK_STEPS = 4  # DDP rebuilds its buckets after the first
TOLERANCE = 1e-4  # fp32 sums in another order, relative to the largest value of a tensor

Key = dict[str, Any]
Batch = tuple[torch.Tensor, torch.Tensor]
Parts = list[torch.Tensor]  # a gradient as it travels: [dense], or [indices, values, size]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    names = [*ROUTES, *(f"{name}_hook" for name in ROUTES)]  # PyTorch's names
    routes = list_of(lambda name: name.removesuffix("_hook"), names)
    text = f"some of {', '.join(ROUTES)} (default: all)"
    add("--routes", "--ddp-hook", type=routes, default=[*ROUTES], metavar="NAME", help=text)
    kinds = list_of(lambda name: PYTORCH_SERVERS.get(name, name), SERVERS)
    text = """running, batch or both (default: both); also by PyTorch's names: --server
        AverageParameterServer is running, AverageBatchParameterServer is batch"""
    add("--servers", "--server", type=kinds, default="all", metavar="NAME", help=text)
    text = "grouped, sharded or both (default: both)"
    placements = list_of(str, ("grouped", "sharded"))
    add("--placement", type=placements, default="all", metavar="NAME", help=text)
    text = """tensors between a trainer and a server that are both on CUDA go from GPU to GPU by
        device maps (cuda) or as copies on the CPU (cpu) (default: cuda)"""
    add("--wire", choices=("cpu", "cuda"), help=text)
    for name, (kind, cuda, cpu, text) in SETTINGS.items():
        text += f" (default: {cuda}, CPU {cpu})"
        default = cuda if cuda == cpu else None  # else main knows
        add(f"--{name.replace('_', '-')}", type=kind, default=default, metavar="N", help=text)
    add("--dense-embedding", action="store_true", help="EmbeddingBag's sparse=False")
    add("--epochs", type=positive_int, metavar="N", help="as --iters, in passes of the data")
    add_rpc_flags(parser, stragglers=True)
    multi = "multi (nccl, and gloo for the sparse buckets of hybrid; nccl means the same)"
    backends = f"gloo, nccl, {multi}, ucc or mpi"
    add_common_flags(parser, backends=backends)
    return parser.parse_args(argv)


def create_model(key: Key, device: torch.device) -> nn.Module:
    """Embedding, linear layers, softmax. Input: [batch, sample length] row numbers."""
    torch.manual_seed(key["torch_seed"])
    model, size = nn.Sequential(), (key["num_embeddings"], key["embedding_dim"])
    model.embedding = nn.EmbeddingBag(*size, sparse=not key["dense_embedding"])
    sizes = [key["embedding_dim"], *[key["dense_size"]] * key["dense_layers"]]
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    model.dense = nn.Sequential(*layers, nn.Softmax(dim=1))
    return model.to(device)


def create_batches(args: argparse.Namespace, trainer: int, device: torch.device) -> list[Batch]:
    """A trainer's shard, from the seed and its number: rows [batch, sample length], classes."""
    seed = args.cuda_seed if device.type == "cuda" else args.torch_seed
    generator = torch.Generator(device).manual_seed(seed)
    looked_up = max(1, args.num_embeddings * (100 - args.sparsity_percentage) // 100)
    rows = torch.randperm(args.num_embeddings, generator=generator, device=device)[:looked_up]
    generator.manual_seed((seed + 1) * 1_000_003 + trainer)
    draw = partial(torch.randint, generator=generator, device=device)
    size, steps = (args.batch_size, args.sample_length), range(args.epoch_steps)
    return [(rows[draw(looked_up, size)], draw(args.dense_size, size[:1])) for _ in steps]


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
    """Averages each bucket over `trainers` and answers all of them when the last gradient is in."""

    def __init__(self, kind: str, trainers: int, device: str) -> None:
        self.kind, self.trainers, self.device = kind, trainers, torch.device(device)
        self.buckets: dict[tuple[int, int], Bucket] = {}  # by step and index
        self.times: dict[int, list[dict[str, list[float]]]] = {}  # of each step, by bucket
        self.lock = threading.Lock()

    def add(self, step: int, index: int, parts: Parts) -> Future[Parts]:
        """Take a trainer's gradient of a bucket; the answer is the average. On threads of RPC."""
        gradient = unpack(parts, self.device)
        self.finish()  # what counts is when it is here
        with self.lock:
            now = perf_counter()
            bucket = self.buckets.setdefault((step, index), Bucket(new_future(self.device), now))
            if self.kind == "running" and bucket.kept:
                bucket.kept[0].add_(gradient)
            else:
                bucket.kept.append(gradient)
            bucket.arrived += 1
            if last := bucket.arrived == self.trainers:
                average = pack(reduce(torch.add, bucket.kept) / self.trainers, self.device)
                del self.buckets[step, index]
            self.finish()
            end = perf_counter()
            bucket.averaging_s += end - now
        if last:
            took = {"straggler": [now - bucket.first_s], "batch": [end - bucket.first_s]}
            took["averaging"] = [bucket.averaging_s]
            self.times.setdefault(step, []).append(took)
            bucket.answer.set_result(average)
        there = parts[0].device
        return bucket.answer.then(lambda answer: [part.to(there) for part in answer.value()])

    def finish(self) -> None:
        """Each call has CUDA streams of its own, which the lock does not order."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


@rpc.functions.async_execution  # the thread is free while the other gradients come
def add_gradient(step: int, index: int, parts: Parts) -> Future[Parts]:
    return hosted().add(step, index, parts)


def bucket_times() -> dict[int, list[dict[str, list[float]]]]:
    return hosted().times


def start_servers(kind: str, servers: list[tuple[str, int, str]]) -> None:
    """What the master does. servers: name, number of trainers, and device of each."""
    for name, trainers, device in servers:
        rpc.rpc_sync(name, host, args=(Server, kind, trainers, device))


# -- a trainer -------------------------------------------------------------------------------------


def send(
    server: str, step: int, bucket: dist.GradBucket, wire: torch.device, patience_s: float
) -> Future[torch.Tensor]:
    """A bucket's average over the server's trainers, on the bucket's device.

    wire: where the gradient is while it travels.
    """
    device = bucket.buffer().device
    words = (step, bucket.index(), pack(bucket.buffer(), wire))
    call = rpc.rpc_async(server, add_gradient, args=words, timeout=patience_s)
    # not call.then(): where the server is on the CPU that future may hold no CUDA tensor
    average = new_future(device)

    def on_answer(call: Future[Parts]) -> None:
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
    ask: Callable[[dist.GradBucket], Future[torch.Tensor]],
    phases: Phases,
) -> None:
    """From now on DDP's buckets go by this route, with stamps around each.

    ask: has a server average a bucket.
    """
    # gloo; the control group is idle within a block
    sparse_group = group.control if route == "hybrid" else group.test
    first = None  # when the first bucket of a step was launched

    def hook(state: None, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        nonlocal first
        start, sparse = phases.now(), bucket.buffer().is_sparse
        first = first if bucket.index() else start
        if route == "rpc" or (route == "sparse_rpc" and sparse):
            average = ask(bucket)
        else:
            average = allreduce_hook(sparse_group if sparse else group.test, bucket)

        def arrived(average: Future[torch.Tensor]) -> torch.Tensor:
            # refers to no group: gloo's own thread must not hold the last reference to one
            gradient, end = average.wait(), phases.now()
            phases.add("hook sparse" if sparse else "hook dense", start, end)
            phases.add("hook", first, end)
            return gradient

        return average.then(arrived)

    ddp.register_comm_hook(None, hook)


def build(
    args: argparse.Namespace, roles: Roles, devices: list[str], job: Job, key: Key, group: Group
) -> Workload:
    """devices: of all ranks."""
    rank, device, route = job.rank, job.device, key["route"]
    torch.backends.cudnn.benchmark = torch.backends.cudnn.deterministic = True
    shares = trainers_of(key["placement"], roles)
    if rank == 0 and shares:
        new = [(roles.name(home), len(own), devices[home]) for home, own in shares.items()]
        rpc.rpc_sync("master", start_servers, args=(key["server"], new))
    dist.barrier(group.control)
    servers = [home for home, own in shares.items() if rank in own]
    phases, patience_s = Phases(device), args.straggler_timeout or args.timeout / 2

    def ask(bucket: dist.GradBucket) -> Future[torch.Tensor]:
        home = servers[bucket.index() % len(servers)]
        wire = device if roles.wire(rank, home) == "cuda" else torch.device("cpu")
        return send(roles.name(home), phases.count, bucket, wire, patience_s)

    model = create_model(key, device)
    ddp = DistributedDataParallel(model, process_group=group.test, bucket_cap_mb=key["bucket_size"])
    register_route(ddp, route, group, ask, phases)
    batches = itertools.cycle(create_batches(args, rank, device))
    everyone = [*roles.trainers]
    own = next((share for share in shares.values() if rank in share), everyone)
    over = {"embedding": own, "dense": own if route == "rpc" else everyone}
    plain = reference(create_model(key, device), over, group.control)
    wrong = None
    for _ in range(CHECK_STEPS):
        same = itertools.repeat(next(batches))
        training_step(plain, same, Phases(device))()
        training_step(ddp, same, phases)()
        wrong = wrong or difference(model, plain)

    def facts() -> dict[str, Any]:
        names = [roles.name(home) for home in shares if rank == 0]
        return {
            "wrong": wrong and f"{wrong} (rank {rank})",
            "digests": {part: digest(child) for part, child in model.named_children()},
            "over": over,
            "device": device.type,
            "servers": {name: rpc.rpc_sync(name, bucket_times) for name in names},
        }

    train = training_step(ddp, batches, phases)

    def step() -> tuple[int, Stamps]:
        stamps = train()
        return phases.count, stamps

    def numbered(steps: list[tuple[int, Stamps]]) -> tuple[list[int], list[Durations]]:
        """The numbers of the timed steps, by which servers know them, and their phases."""
        numbers = [number for number, _ in steps]
        return numbers, phases.durations([stamps for _, stamps in steps])

    return Workload(step, facts=facts, returned=numbered)


def trainers_of(placement: str | None, roles: Roles) -> dict[int, list[int]]:
    """The trainers that each server averages over; no servers where there is no placement.

    `grouped`: where both kinds of device have trainers and servers, trainers on CUDA have servers
    on CUDA, and those on the CPU have servers on the CPU. Shares of a kind differ by one at most.
    """
    if placement != "grouped":
        return {server: list(roles.trainers) for server in roles.servers if placement}
    everyone = set(range(roles.servers.stop))
    kinds = [everyone - roles.cuda, everyone & roles.cuda]
    for role in (roles.trainers, roles.servers):
        if any(kind.isdisjoint(role) for kind in kinds):
            kinds = [everyone]
    shares: dict[int, list[int]] = {}
    for kind in kinds:
        trainers = [rank for rank in roles.trainers if rank in kind]
        servers = [rank for rank in roles.servers if rank in kind]
        homes = [servers[i * len(servers) // len(trainers)] for i in range(len(trainers))]
        for server in servers:
            shares[server] = [t for t, home in zip(trainers, homes, strict=True) if home == server]
    return shares


def reference(model: nn.Module, over: dict[str, list[int]], group: dist.ProcessGroup) -> nn.Module:
    """Plain DDP, over gloo; where servers average over some trainers each, the mean of those."""
    if len(over["embedding"]) == group.size():
        return DistributedDataParallel(model, process_group=group)

    def average(ranks: list[int], parameter: Any) -> None:
        mine = parameter.grad.to_dense()
        rows = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(rows, mine, group=group)
        parameter.grad = torch.stack([rows[rank] for rank in ranks]).mean(0)

    for part, child in model.named_children():
        for parameter in child.parameters():
            parameter.register_post_accumulate_grad_hook(partial(average, over[part]))
    return model


def difference(model: nn.Module, plain: nn.Module) -> str | None:
    """The first gradient or value that differs by more than TOLERANCE, or None."""
    pairs: Any = zip(model.named_parameters(), plain.parameters(), strict=True)
    for (name, got), want in pairs:
        for what, a, b in (("gradient", got.grad, want.grad), ("value", got, want)):
            if not (error := relative_error(a, b)) <= TOLERANCE:
                return f"the {what} of {name} is off plain DDP's by {error:.2g}"
    return None


def derive(case: Case, times: Times, facts: list[dict[str, Any]]) -> None:
    """Fill in the metrics and the check."""
    m = case.metrics
    m |= step_metrics(times.each(), case.key["samples_per_step"])
    numbers, _ = times.returned[0]
    phases = [durations for _, durations in times.returned]
    hooks = [[max(step.pop("hook")) for step in steps] for steps in phases]
    m["hook_p50_s"] = float(np.median(np.max(hooks, axis=0)))
    m["trainers"] = summaries({f"trainer{i}": pool(steps) for i, steps in enumerate(phases)})
    if servers := facts[0]["servers"]:
        m["servers"] = summaries(
            {
                name: pool(itertools.chain(*(steps.get(number, []) for number in numbers)))
                for name, steps in servers.items()
            }
        )
    wrong = [fact["wrong"] for fact in facts if fact["wrong"]]
    for fact in facts:
        for part, over in fact["over"].items():  # bit for bit; a CPU and a GPU round differently
            alike = [rank for rank in over if facts[rank]["device"] == fact["device"]]
            odd = compare_replicas([facts[rank]["digests"][part] for rank in alike], alike)
            wrong += [f"{part}: {odd}"] if odd else []
    case.check = verdict(wrong[0] if wrong else None)


def carriers(route: str, backend: str, dense_embedding: bool) -> dict[str, Any]:
    """What a case's key says of its process groups and its embedding.

    backend: of the trainers' group. `multi` is nccl, and gloo for sparse buckets: nccl has no
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


def set_up(args: argparse.Namespace) -> Roles:
    """The ranks' roles; fill in the defaults that depend on them, and refuse what cannot run."""
    trainers, servers = args.ntrainer + args.ncudatrainer, args.nserver + args.ncudaserver
    counts = {"trainers": trainers or None, "servers": servers or None, "master": True}
    if not servers and trainers and not through_servers(args):
        ranks = world()[2]  # the trainers alone, or with the master that torchrun lines often have
        if ranks in (trainers, trainers + 1):
            counts |= {"servers": 0, "master": ranks > trainers}
    args.backend = "nccl" if args.backend == "multi" else args.backend
    cuda_trainers = args.ncudatrainer if trainers else None
    roles = assign_roles(args, cuda_trainers, args.ncudaserver, per_server=4, **counts)
    roles = replace(roles, cuda_wire=args.wire != "cpu")
    if args.wire == "cuda" and not pairs_on_cuda(roles):
        refuse(
            "--wire cuda needs trainers and servers on CUDA, e.g. --ncudatrainer 2 --ncudaserver 1"
        )
    cpu = roles.cuda.isdisjoint(roles.trainers)
    for name, (_, *defaults, _) in SETTINGS.items():
        if getattr(args, name) is None:
            setattr(args, name, defaults[cpu])
    # as many for each trainer: DDP hangs where one stops early
    args.epoch_steps = -(-args.sample_count // (args.batch_size * len(roles.trainers)))
    if args.epochs:
        args.iters = args.epochs * args.epoch_steps
    if args.dense_embedding and {"hybrid", "sparse_rpc"} & set(args.routes):
        refuse("--dense-embedding: no bucket is sparse; try --routes allreduce,rpc")
    return roles


def pairs_on_cuda(roles: Roles) -> bool:
    """Whether a trainer and a server are both on CUDA, so that --wire makes a difference."""
    return not any(roles.cuda.isdisjoint(role) for role in (roles.trainers, roles.servers))


def through_servers(args: argparse.Namespace) -> list[str]:
    """The routes that need servers."""
    return [route for route in args.routes if "rpc" in route]


def title_of(args: argparse.Namespace, roles: Roles, options: RpcOptions) -> str:
    """What all cases share."""
    counts = f"{len(roles.trainers)} trainers, {len(roles.servers)} servers"
    where = f"{len(roles.cuda)} of them on CUDA"
    epoch = f"an epoch is {args.epoch_steps} steps of {args.batch_size} samples"
    table = f"embedding {args.num_embeddings} x {args.embedding_dim}"
    rows = f"{args.sample_length} rows a sample, {args.sparsity_percentage} % never looked up"
    dense = f"{args.dense_layers} dense layers of {args.dense_size}"
    buckets = f"buckets of {args.bucket_size:g} MB"
    lines = [f"{counts}, {where}; {epoch}", f"{table}, {rows}; {dense}; {buckets}"]
    return "\n".join(lines + [str(options)] * bool(through_servers(args)))


def main() -> int:
    args = parse_args()
    roles = set_up(args)
    trainers, servers = len(roles.trainers), len(roles.servers)
    through = through_servers(args)
    ways = [(route, None, None) for route in args.routes if route not in through]
    ways += itertools.product(through, args.servers, args.placement[:servers])  # of 1 all are alike
    fixed = {name: getattr(args, name) for name in SETTINGS}
    fixed |= {"trainers": trainers, "server_count": servers}
    fixed["samples_per_step"] = trainers * args.batch_size
    by_cpu = args.wire == "cpu" and pairs_on_cuda(roles)
    torch.sparse.check_sparse_tensor_invariants.disable()  # the default; said, it does not warn
    devices: list[str] = []
    with Benchmark("parameter_server", args, tested=roles.trainers) as bench, ExitStack() as stack:
        options, backend = rpc_options(args, bench), share(bench.job.backend)
        title = title_of(args, roles, options)
        bench.begin_table(title, COLUMNS, ["sparse_rpc (gloo) running grouped", "+-10.0%"])
        for route, kind, placement in ways:
            if kind and not devices:  # not before: the threads of RPC may poll
                devices = stack.enter_context(rpc_workers(bench, roles, options))
            key = {"route": route, "server": kind, "placement": placement} | fixed
            key |= carriers(route, backend, args.dense_embedding)
            if kind:
                key |= options.key() | ({"wire": "cpu"} if by_cpu else {})
            work = partial(build, args, roles, devices, bench.job)
            bench.measure(key, work, derive, roles.trainers)
        for case in bench.report.cases:
            for role in ("trainers", "servers"):
                if role in case.metrics:
                    table = phase_table(role, case.metrics[role])
                    bench.print(f"\n{label_of(case.key)}\n\n{table}")
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
