"""RPC over TensorPipe: who does what, device maps, settings, an orderly start and end.

Servers and the master answer calls while they wait in `Benchmark.measure` for the end of a case.
"""

import argparse
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch.distributed.rendezvous import register_rendezvous_handler

from common.benchmark import Benchmark
from common.cli import checked, list_of, refuse
from common.environment import count_of
from common.groups import gather, peers, share
from common.join import raise_file_limit, world

# at import: the scripts decorate functions with rpc.functions, which is missing then, too
if not hasattr(rpc, "TensorPipeAgent"):
    refuse("this torch was built without TensorPipe, which torch.distributed.rpc needs")

SCHEME = "torchrun-bench"  # an init_method of this scheme leads to the store of the job
TRANSPORTS = ("auto", "shm", "uv", "ibv")
CHANNELS = ("auto", "basic", "cma", "mpt_uv", "cuda_basic", "cuda_ipc", "cuda_gdr", "cuda_xth")
SECONDS = "a number of seconds from 0.001 to 1e8"  # torch has milliseconds in an int64
time_limit = checked(float, lambda s: 0.001 <= s <= 1e8, SECONDS, "e.g. 60")
threads = checked(int, lambda n: 1 <= n <= 1024, "a whole number from 1 to 1024", "e.g. 16")


@dataclass(frozen=True)
class Roles:
    """Global ranks by role: trainers first, then servers, then the master if there is one."""

    trainers: range
    servers: range
    master: int | None = None
    cuda: frozenset[int] = frozenset()  # the ranks on CUDA; the others are on the CPU
    cuda_wire: bool = True  # device maps carry tensors between two ranks on CUDA, not the CPU
    backend: str = "gloo"  # of the trainers' process groups

    def __str__(self) -> str:
        servers = count_of(len(self.servers), "server")
        return f"{count_of(len(self.trainers), 'trainer')}, {servers}"

    def wire(self, a: int, b: int) -> str:
        """Where a tensor is while it travels between two ranks: `cuda` or `cpu`."""
        return "cuda" if self.cuda_wire and {a, b} <= self.cuda else "cpu"

    def device(self, rank: int) -> str:
        return "cuda" if rank in self.cuda else "cpu"

    def name(self, rank: int) -> str:
        """`trainer0`, `server0` (numbered within the role) or `master`."""
        if rank in self.trainers:
            return f"trainer{rank}"
        return "master" if rank == self.master else f"server{rank - self.servers[0]}"

    def device_maps(self, rank: int, devices: list[str]) -> dict[str, Any]:
        """Where tensors that this rank sends arrive: {callee: {this rank's device: the callee's}}.

        devices: of every rank. Servers need maps as well: distributed autograd calls back.
        """
        peers = self.servers if rank in self.trainers else self.trainers
        mapped = [peer for peer in peers if self.wire(rank, peer) == "cuda"]
        return {self.name(peer): {devices[rank]: devices[peer]} for peer in mapped}


def split_roles(
    world_size: int,
    trainers: int | None = None,
    servers: int | None = None,
    *,
    master: bool = False,
    per_server: int = 2,
) -> Roles:
    """The roles of a world, all on the CPU. Refuses counts that do not add up to its size.

    Without a count of servers, trainers decide it; without either, one rank in `per_server` serves.
    """
    workers = world_size - 1 if master else world_size
    if servers is None:
        servers = max(1, workers - trainers if trainers else workers // per_server)
    trainers = trainers or max(1, workers - servers)
    last = trainers + servers
    roles = Roles(range(trainers), range(trainers, last), last if master else None)
    total = last + 1 if master else last
    if total != world_size:
        parts = f"{roles} and a master" if master else str(roles)
        more = f"e.g. torchrun --nproc-per-node {total} {sys.argv[0]}"
        refuse(f"{parts} are {total} processes, and there are {world_size}; {more}")
    return roles


def assign_roles(
    args: argparse.Namespace,
    cuda_trainers: int | None = None,
    cuda_servers: int | None = None,
    **counts: Any,
) -> Roles:
    """The roles of this job, with so many trainers and servers on CUDA: the last ones of the role.

    By default --device and --server-device decide. counts: those of `split_roles`.
    """
    _, _, world_size, _ = world()
    roles = split_roles(world_size, **counts)
    cuda = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    if cuda_trainers is None:
        cuda_trainers = len(roles.trainers) if cuda else 0
    if cuda_servers is None:
        server_cuda = cuda if args.server_device == "auto" else args.server_device == "cuda"
        cuda_servers = len(roles.servers) if server_cuda else 0
    on_cuda = frozenset(roles.trainers[::-1][:cuda_trainers])
    on_cuda |= frozenset(roles.servers[::-1][:cuda_servers])
    if on_cuda and not torch.cuda.is_available():
        refuse("trainers or servers on CUDA: torch sees no CUDA device here; try --device cpu")
    channels = ",".join(args.rpc_channels or ["auto"])
    if not on_cuda and all(name.startswith("cuda_") for name in channels.split(",")):
        refuse(f"--rpc-channels {channels} are for CUDA alone, and no rank is on it; try basic")
    default = "nccl" if on_cuda.issuperset(roles.trainers) else "gloo"
    return replace(roles, cuda=on_cuda, backend=args.backend or default)


def args_of_rank(args: argparse.Namespace, roles: Roles, **changes: Any) -> argparse.Namespace:
    """A copy of the flags for `Benchmark`: with the device and the backend of this rank.

    Servers and the master join no group of the trainers, and meet them over gloo. changes: other
    flags that get another value.
    """
    rank, _, _, _ = world()
    backend = roles.backend if rank in roles.trainers else "gloo"
    of_rank = {"device": roles.device(rank), "backend": backend}
    return argparse.Namespace(**vars(args) | of_rank | changes)


@dataclass(frozen=True)
class RpcOptions:
    """TensorPipe's settings. With `auto` it may use all transports and channels that it finds."""

    threads: int
    timeout_s: float
    transports: list[str]
    channels: list[str]

    def key(self) -> dict[str, Any]:
        """The settings that identify a case."""
        return {
            "rpc_threads": self.threads,
            "rpc_transports": "+".join(self.transports),
            "rpc_channels": "+".join(self.channels),
        }

    def __str__(self) -> str:
        return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in self.key().items())


def add_rpc_flags(
    parser: argparse.ArgumentParser, server_device: str | None = None, stragglers: bool = False
) -> None:
    """TensorPipe's settings, and --server-device if it has a default.

    stragglers: --straggler-timeout limits the calls that bring gradients.
    """
    add = parser.add_argument_group("RPC").add_argument
    text = "worker threads per process (default: its share of the cores, 2 to 16)"
    add("--rpc-threads", type=threads, metavar="N", help=text)
    calls = "a call other than one that brings gradients" if stragglers else "a call"
    text = f"{calls} fails after S seconds (default: twice --timeout, so the watchdog is first)"
    add("--rpc-timeout", type=time_limit, metavar="S", help=text)
    text = """what TensorPipe may use: shm (one host; its thread polls), uv (TCP), ibv (InfiniBand)
        (default: auto: all of them, or uv alone if ranks outnumber cores)"""
    add("--rpc-transports", type=list_of(str, TRANSPORTS), metavar="NAME", help=text)
    text = """and for tensors: basic (any), cma (one host, needs ptrace), mpt_uv (TCP); on CUDA
        cuda_basic (any), cuda_ipc (one host, peer access, no expandable segments), cuda_gdr
        (InfiniBand), cuda_xth (one process). Keep basic and cuda_basic: TensorPipe ends a process
        that finds none (default: auto: all of them)"""
    add("--rpc-channels", type=list_of(str, CHANNELS), metavar="NAME", help=text)
    if stragglers:
        text = """a trainer that waits S seconds for the answer to its gradients fails the case:
            another trainer's gradients are missing, or the server is stuck (default: half of
            --timeout, which ends the run)"""
        add("--straggler-timeout", type=time_limit, metavar="S", help=text)
    if server_device:
        text = f"where servers compute; auto: as --device says (default: {server_device})"
        add("--server-device", choices=("auto", "cpu", "cuda"), default=server_device, help=text)


def rpc_options(args: argparse.Namespace, bench: Benchmark) -> RpcOptions:
    """The settings that the flags ask for, the same on all ranks. Rank 0's node has the cores.

    TensorPipe's own default is 16 threads on any machine. With 1 thread a function that makes an
    RPC would wait for itself. shm polls: where ranks outnumber the cores, it takes cores from them.
    """
    cores, ranks = len(os.sched_getaffinity(0)), bench.job.local_world_size
    threads = args.rpc_threads or min(16, max(2, cores // ranks))
    transports = args.rpc_transports or (["uv"] if ranks > cores else ["auto"])
    timeout_s = args.rpc_timeout or 2 * args.timeout
    return share(RpcOptions(threads, timeout_s, transports, args.rpc_channels or ["auto"]))


def need_files(world_size: int, options: RpcOptions) -> None:
    """Raise the limit on open files (sockets, pipes, shared memory) as far as TensorPipe may need.

    Raises ValueError where that is not allowed: TensorPipe would abort the process. Counted with
    torch 2.15 on the CPU: 205 files for one peer and 56 more for each further one. Over uv only:
    158, and 8 more. A rank may have all others as peers.
    """
    needed = 150 + world_size * (10 if options.transports == ["uv"] else 60)
    limit = raise_file_limit(needed)
    if limit < needed:
        opens = f"RPC opens up to {needed} files a process"
        raise ValueError(f"{opens}, and {limit} are allowed; try ulimit -n {needed}")


def start_rpc(
    bench: Benchmark, name: str, options: RpcOptions, device_maps: dict[str, Any]
) -> None:
    """Become the RPC worker of this name. Refuses settings with which RPC does not start."""
    job = bench.job

    def handler(url: str, **kwargs: Any) -> Iterator[tuple[dist.Store, int, int]]:
        yield job.store.clone(), job.rank, job.world_size  # no further port is opened

    register_rendezvous_handler(SCHEME, handler)
    settings = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=options.threads,
        rpc_timeout=options.timeout_s,
        init_method=f"{SCHEME}://",
        device_maps=device_maps,
        devices=[job.device] if job.device.type == "cuda" else [],  # what futures may hold
        _transports=None if "auto" in options.transports else options.transports,
        _channels=None if "auto" in options.channels else options.channels,
    )
    warnings.filterwarnings("ignore", message="You are using a Backend")  # torch itself uses it
    bench.watchdog.begin("RPC")
    bench.phase("start")
    try:
        rpc.init_rpc(name, None, job.rank, job.world_size, settings)
    except (RuntimeError, ValueError) as error:
        # what logs torch's errors stumbles over RPC's own group, and raises another in its place
        first: BaseException = error
        while first.__context__:
            first = first.__context__
        reason = str(first)
        if "not in use by this listener" in reason:
            bench.refuse(f"--rpc-transports {','.join(options.transports)}: there is none here", 1)
        if "timed out" in reason.lower() or "timeout" in reason:
            bench.refuse(f"--rpc-timeout {options.timeout_s:g}: RPC takes longer to start; try 60")
        if isinstance(error, ValueError) and isinstance(first, RuntimeError):
            with peers():
                raise first from None
        raise


@contextmanager
def rpc_workers(bench: Benchmark, roles: Roles, options: RpcOptions) -> Iterator[list[str]]:
    """All ranks are RPC workers, named by their roles, until all leave. Yields their devices."""
    job = bench.job
    devices: list[str] = share(gather(str(job.device)))
    bench.prepare("ulimit -n", partial(need_files, job.world_size, options))
    start_rpc(bench, roles.name(job.rank), options, roles.device_maps(job.rank, devices))
    graceful = False
    try:
        yield devices
        bench.watchdog.begin("RPC")
        bench.phase("end")
        # a failed case may have left calls that nobody answers: nobody waits for them
        graceful = not share(any(case.failed for case in bench.report.cases))
    finally:
        rpc.shutdown(graceful)
