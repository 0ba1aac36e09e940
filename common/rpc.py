"""RPC over TensorPipe: who does what, device maps, settings, an orderly start and end.

Servers and the master answer calls while they wait for the end of a case in `Benchmark.measure`.
"""

import argparse
import os
import resource
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch.distributed.rendezvous import register_rendezvous_handler

from common.benchmark import Benchmark
from common.cli import checked, list_of, refuse
from common.dist import gather, share
from common.join import world

if not hasattr(rpc, "TensorPipeAgent"):  # at once: the scripts define functions of rpc.functions
    refuse("this torch was built without TensorPipe, which torch.distributed.rpc needs")

SCHEME = "torchrun-bench"  # of the init_method that leads to the job's own store
TRANSPORTS = ("auto", "shm", "uv", "ibv")
CHANNELS = ("auto", "basic", "cma", "mpt_uv", "cuda_basic", "cuda_ipc", "cuda_gdr", "cuda_xth")
LIMIT_S = 1e8  # torch counts time limits in milliseconds of an int64, and fails beyond
time_limit = checked(
    float, lambda s: 0.001 <= s <= LIMIT_S, "a number of seconds from 0.001 to 1e8", "e.g. 60"
)
threads = checked(int, lambda n: 1 <= n <= 1024, "a whole number from 1 to 1024", "e.g. 16")


@dataclass(frozen=True)
class Roles:
    """Global ranks by role: trainers first, then servers, then the master if there is one."""

    trainers: range
    servers: range
    master: int | None = None
    cuda: frozenset[int] = frozenset()  # the ranks on CUDA; the others are on the CPU
    cuda_wire: bool = True  # tensors between two ranks on CUDA go by device maps, not by the CPU

    def wire(self, a: int, b: int) -> str:
        """Where a tensor is that travels between two ranks: `cuda` or `cpu`."""
        return "cuda" if self.cuda_wire and {a, b} <= self.cuda else "cpu"

    def device(self, rank: int) -> str:
        return "cuda" if rank in self.cuda else "cpu"

    def name(self, rank: int) -> str:
        """`trainer0`, `server0` (numbered within the role) or `master`."""
        if rank in self.trainers:
            return f"trainer{rank}"
        return "master" if rank == self.master else f"server{rank - self.servers[0]}"

    def device_maps(self, rank: int, devices: list[str]) -> dict[str, Any]:
        """Where tensors that this rank sends arrive: {callee: {own device: the callee's}}.

        devices: of every rank. Servers need maps as well: distributed autograd calls back.
        """
        peers = self.servers if rank in self.trainers else self.trainers
        mapped = [peer for peer in peers if self.wire(rank, peer) == "cuda"]
        return {self.name(peer): {devices[rank]: devices[peer]} for peer in mapped}


def split_roles(
    world_size: int,
    trainers: int | None = None,
    servers: int | None = None,
    master: bool = False,
    per_server: int = 2,
) -> Roles:
    """The roles of a world, all on the CPU: as given, or a server for so many ranks. Or refuses."""
    rest = world_size - master
    if servers is None:
        servers = max(1, rest - trainers if trainers else rest // per_server)
    trainers = trainers or max(1, rest - servers)
    last = trainers + servers
    if (total := last + master) != world_size:
        parts = f"{trainers} trainers, {servers} servers" + " and a master" * master
        more = f"e.g. torchrun --nproc-per-node {total} {sys.argv[0]}"
        refuse(f"{parts} are {total} processes, and there are {world_size}; {more}")
    return Roles(range(trainers), range(trainers, last), last if master else None)


def assign_roles(
    args: argparse.Namespace,
    cuda_trainers: int | None = None,
    cuda_servers: int | None = None,
    **counts: Any,
) -> Roles:
    """The roles of this job, with the last so many trainers and servers on CUDA.

    By default as --device and --server-device say. args.device and .backend become this rank's own.
    """
    rank, _, world_size, _ = world()
    roles = split_roles(world_size, **counts)
    cuda = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    if cuda_trainers is None:
        cuda_trainers = len(roles.trainers) * cuda
    if cuda_servers is None:
        server_cuda = cuda if args.server_device == "auto" else args.server_device == "cuda"
        cuda_servers = len(roles.servers) * server_cuda
    ranks = [*roles.trainers[::-1][:cuda_trainers], *roles.servers[::-1][:cuda_servers]]
    roles = replace(roles, cuda=frozenset(ranks))
    if roles.cuda and not torch.cuda.is_available():
        refuse("trainers or servers on CUDA: torch sees no CUDA device here; try --device cpu")
    if not roles.cuda and all(name.startswith("cuda_") for name in args.rpc_channels or [""]):
        names = ",".join(args.rpc_channels)
        refuse(f"--rpc-channels {names} are for CUDA alone, and no rank is on it; try basic")
    backend = args.backend or ("nccl" if roles.cuda.issuperset(roles.trainers) else "gloo")
    args.device, args.backend = roles.device(rank), backend if rank in roles.trainers else "gloo"
    return roles


@dataclass(frozen=True)
class RpcOptions:
    """TensorPipe's settings. `auto` transports and channels are all that it finds."""

    threads: int
    timeout_s: float
    transports: list[str]
    channels: list[str]

    def key(self) -> dict[str, Any]:
        """What of them identifies a case."""
        transports, channels = "+".join(self.transports), "+".join(self.channels)
        threads = {"rpc_threads": self.threads}
        return threads | {"rpc_transports": transports, "rpc_channels": channels}

    def __str__(self) -> str:
        return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in self.key().items())


def add_rpc_flags(
    parser: argparse.ArgumentParser, server_device: str | None = None, stragglers: bool = False
) -> None:
    """TensorPipe's settings, --server-device where it has a default.

    stragglers: calls that bring gradients have a limit of their own, --straggler-timeout.
    """
    count = "worker threads a process (default: its share of the cores, 2 to 16)"
    limit = "a call fails after S seconds (default: twice --timeout: the watchdog comes first)"
    if stragglers:
        limit += "; calls that bring gradients have --straggler-timeout instead"
    transports = """TensorPipe may choose among shm (one host; its thread polls), uv (TCP), ibv
        (InfiniBand) (default: auto, all; but uv where ranks outnumber cores)"""
    channels = """and for tensors among basic (any), cma (one host, needs ptrace), mpt_uv (TCP), on
        CUDA cuda_basic (any), cuda_ipc (one host, peer access, no expandable segments), cuda_gdr
        (InfiniBand), cuda_xth (one process). TensorPipe ends a process that finds none: keep
        basic and cuda_basic (default: auto, all)"""
    add = parser.add_argument_group("RPC").add_argument
    add("--rpc-threads", type=threads, metavar="N", help=count)
    add("--rpc-timeout", type=time_limit, metavar="S", help=limit)
    add("--rpc-transports", type=list_of(str, TRANSPORTS), metavar="NAME", help=transports)
    add("--rpc-channels", type=list_of(str, CHANNELS), metavar="NAME", help=channels)
    if stragglers:
        patience = """a trainer that waits S seconds for the answer to its gradients fails the case:
            the other trainers' are missing, or the server is stuck (default: half of --timeout,
            which ends the run)"""
        add("--straggler-timeout", type=time_limit, metavar="S", help=patience)
    if server_device:
        where = f"auto: as --device (default: {server_device})"
        add("--server-device", choices=("auto", "cpu", "cuda"), default=server_device, help=where)


def rpc_options(args: argparse.Namespace, bench: Benchmark) -> RpcOptions:
    """The settings of the flags, by the cores of rank 0's node; alike on all ranks.

    TensorPipe itself takes 16 threads whatever the machine; with 1 a function that makes a call of
    its own would wait for itself. shm polls: where ranks outnumber the cores it takes them away.
    """
    cores, ranks = len(os.sched_getaffinity(0)), bench.job.local_world_size
    threads = args.rpc_threads or min(16, max(2, cores // ranks))
    transports = args.rpc_transports or (["uv"] if ranks > cores else ["auto"])
    timeout_s = args.rpc_timeout or 2 * args.timeout
    return share(RpcOptions(threads, timeout_s, transports, args.rpc_channels or ["auto"]))


def files_needed(world_size: int, options: RpcOptions) -> int:
    """How many files (sockets, pipes, shared memory) TensorPipe may open in a process.

    Counted with torch 2.15 on the CPU: 205 for one peer, 56 more for each other one; over uv alone
    158, and 8 more. A rank may have all others as peers.
    """
    each = 10 if options.transports == ["uv"] else 60
    return 150 + each * world_size


def raise_file_limit(needed: int) -> int:
    """Let this process open so many files, or as many as the hard limit has. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return needed
    limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


@contextmanager
def rpc_workers(bench: Benchmark, roles: Roles, options: RpcOptions) -> Iterator[list[str]]:
    """All ranks are RPC workers, named by their roles, until all leave. Yields their devices."""
    job = bench.job
    devices: list[str] = share(gather(str(job.device)))
    allocator = [os.environ.get(f"PYTORCH_{name}ALLOC_CONF", "") for name in ("", "CUDA_")]
    mapped = any(roles.device_maps(rank, devices) for rank in roles.trainers)
    if mapped and "expandable_segments:True" in ",".join(allocator):
        bench.print("# warning: CUDA IPC fails on expandable segments; unset PYTORCH_ALLOC_CONF")

    def handler(url: str, **kwargs: Any) -> Iterator[tuple[dist.Store, int, int]]:
        yield job.store.clone(), job.rank, job.world_size  # no ports of our own

    needed = files_needed(job.world_size, options)
    lowest = share(min(gather(raise_file_limit(needed)) or [0]))
    if lowest < needed:  # TensorPipe would abort the process
        more = f"try ulimit -n {needed}"
        bench.refuse(f"RPC opens up to {needed} files a process, ulimit -n allows {lowest}; {more}")
    with suppress(RuntimeError):  # registered by an earlier start in this process
        register_rendezvous_handler(SCHEME, handler)
    settings = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=options.threads,
        rpc_timeout=options.timeout_s,
        init_method=f"{SCHEME}://",
        device_maps=roles.device_maps(job.rank, devices),
        _transports=None if "auto" in options.transports else options.transports,
        _channels=None if "auto" in options.channels else options.channels,
    )
    warnings.filterwarnings("ignore", message="You are using a Backend")  # torch's own use of it
    bench.watchdog.begin("RPC start")
    try:
        rpc.init_rpc(roles.name(job.rank), None, job.rank, job.world_size, settings)
    except RuntimeError as error:
        if "not in use by this listener" in str(error):
            names = ",".join(options.transports)
            bench.refuse(f"--rpc-transports {names}: there is none here", 1)
        if "timed out" in str(error) or "timeout" in str(error):
            bench.refuse(f"--rpc-timeout {options.timeout_s:g}: RPC takes longer to start; try 60")
        raise
    graceful = False
    try:
        yield devices
        bench.watchdog.begin("RPC end")
        # a failed case may have left calls that nobody answers: they are not waited for
        graceful = not share(any(case.failed for case in bench.report.cases))
    finally:
        rpc.shutdown(graceful)


_hosted: list[Any] = []


def host(factory: Callable[..., Any], *args: Any) -> None:
    """Called by RPC: this worker keeps `factory(*args)`, in the place of an older one."""
    _hosted[:] = [factory(*args)]


def hosted() -> Any:
    """What this worker keeps. Raises IndexError where that is nothing."""
    return _hosted[0]
