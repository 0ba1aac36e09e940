"""RPC over TensorPipe: names, device maps, settings, start and shutdown.

Servers and the master answer calls while they wait in `Benchmark.measure` for the end of a case.
"""

import argparse
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch.distributed.rendezvous import register_rendezvous_handler

from common.groups import lost_peer
from common.join import raise_file_limit
from harness.benchmark import Benchmark
from harness.cli import checked, list_of, refuse
from harness.environment import count_of

# at import, because scripts use rpc.functions as decorators, and these are missing then as well
if not hasattr(rpc, "TensorPipeAgent"):
    refuse("this torch was built without TensorPipe, which torch.distributed.rpc requires")

SCHEME = "torchrun-bench"  # the scheme of an init_method that uses the store of the job
TRANSPORTS = ("auto", "shm", "uv", "ibv")
CHANNELS = ("auto", "basic", "cma", "mpt_uv", "cuda_basic", "cuda_ipc", "cuda_gdr", "cuda_xth")
SECONDS = "a number of seconds from 0.001 to 1e8"  # torch stores milliseconds in an int64
time_limit = checked(float, lambda s: 0.001 <= s <= 1e8, SECONDS, "e.g. 60")
threads = checked(int, lambda n: 1 <= n <= 1024, "a whole number from 1 to 1024", "e.g. 16")


@dataclass(frozen=True)
class Roles:
    """Global ranks by role: trainers first, then servers, then the master if there is one."""

    trainers: range
    servers: range
    master: int | None = None
    cuda: frozenset[int] = frozenset()  # the ranks on CUDA; the others are on the CPU
    cuda_wire: bool = True  # tensors travel by device maps between ranks on CUDA, not by the CPU
    backend: str = "gloo"  # of the trainers' process groups

    def __str__(self) -> str:
        servers = count_of(len(self.servers), "server")
        return f"{count_of(len(self.trainers), 'trainer')}, {servers}"

    def wire(self, a: int, b: int) -> str:
        """Return the kind of device of tensors sent between two ranks: `cuda` or `cpu`."""
        return "cuda" if self.cuda_wire and {a, b} <= self.cuda else "cpu"

    def device(self, rank: int) -> str:
        """Return the kind of device of a rank: `cuda` or `cpu`."""
        return "cuda" if rank in self.cuda else "cpu"

    def name(self, rank: int) -> str:
        """Return the RPC name: `trainer0`, `server0` (numbered within the role) or `master`."""
        if rank in self.trainers:
            return f"trainer{rank}"
        return "master" if rank == self.master else f"server{rank - self.servers[0]}"

    def device_maps(self, rank: int, devices: list[str]) -> dict[str, Any]:
        """Return the device maps of a rank: {callee: {device of this rank: device of the callee}}.

        Servers need them as well, because distributed autograd calls back. devices: of each rank.
        """
        peers = self.servers if rank in self.trainers else self.trainers
        mapped = [peer for peer in peers if self.wire(rank, peer) == "cuda"]
        return {self.name(peer): {devices[rank]: devices[peer]} for peer in mapped}


@dataclass(frozen=True)
class RpcOptions:
    """The settings of TensorPipe. `auto` permits all transports and channels that are available."""

    threads: int
    timeout_s: float
    transports: list[str]
    channels: list[str]

    def key(self) -> dict[str, Any]:
        """Return the settings that are part of a case's key."""
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
    """Add the flags of TensorPipe, and --server-device if it has a default.

    stragglers: add --straggler-timeout, the limit on calls that send gradients.
    """
    add = parser.add_argument_group("RPC").add_argument
    text = "worker threads per process (default: its share of the cores, 2 to 16)"
    add("--rpc-threads", type=threads, metavar="N", help=text)
    calls = "calls, except those that send gradients," if stragglers else "calls"
    text = f"{calls} fail after S seconds (default: twice --timeout, so the watchdog acts first)"
    add("--rpc-timeout", type=time_limit, metavar="S", help=text)
    text = """transports that TensorPipe may use: shm (one host, its thread polls), uv (TCP), ibv
        (InfiniBand); default: auto, which is all of them, or uv if there are more ranks than
        cores"""
    add("--rpc-transports", type=list_of(str, TRANSPORTS), metavar="NAME", help=text)
    text = """channels that it may use for tensors: basic (always available), cma (one host,
        requires ptrace), mpt_uv (TCP); on CUDA cuda_basic (always available), cuda_ipc (one host,
        peer access, no expandable segments), cuda_gdr (InfiniBand), cuda_xth (one process). Include
        basic and cuda_basic: TensorPipe aborts a process that finds no channel (default: auto,
        which is all of them)"""
    add("--rpc-channels", type=list_of(str, CHANNELS), metavar="NAME", help=text)
    if stragglers:
        text = """the case fails if a trainer waits S seconds for the reply to its gradients,
            because another trainer's gradients are missing or the server is stuck (default: half
            of --timeout; after --timeout the whole run would end)"""
        add("--straggler-timeout", type=time_limit, metavar="S", help=text)
    if server_device:
        text = f"device of the servers; auto: that of --device (default: {server_device})"
        add("--server-device", choices=("auto", "cpu", "cuda"), default=server_device, help=text)


def rpc_options(args: argparse.Namespace, bench: Benchmark) -> RpcOptions:
    """Return the settings by the flags and the cores of rank 0's node, the same on all ranks.

    TensorPipe's own default is 16 threads on any machine. With 1 thread a function that makes an
    RPC would wait for itself. shm polls, so with more ranks than cores it would slow the ranks.
    """
    cores, ranks = len(os.sched_getaffinity(0)), bench.job.local_world_size
    threads = args.rpc_threads or min(16, max(2, cores // ranks))
    transports = args.rpc_transports or (["uv"] if ranks > cores else ["auto"])
    timeout_s = args.rpc_timeout or 2 * args.timeout
    channels = args.rpc_channels or ["auto"]
    return bench.job.broadcast(RpcOptions(threads, timeout_s, transports, channels))


def need_files(world_size: int, options: RpcOptions) -> None:
    """Raise the limit on open files to the number that TensorPipe may need with all ranks as peers.

    Counted with torch 2.15 on the CPU (sockets, pipes, shared memory): 205 files for one peer and
    56 for each additional one; with uv only, 158 and 8. Raises ValueError if the hard limit is too
    low, because TensorPipe would abort the process.
    """
    needed = 150 + world_size * (10 if options.transports == ["uv"] else 60)
    limit = raise_file_limit(needed)
    if limit < needed:
        needs = f"RPC may need {needed} open files per process"
        raise ValueError(f"{needs}, but the limit is {limit}; try ulimit -n {needed}")


def start_rpc(
    bench: Benchmark, name: str, options: RpcOptions, device_maps: dict[str, Any]
) -> None:
    """Start this process as the RPC worker of this name. Refuses settings with which that fails."""
    job = bench.job

    def handler(url: str, **kwargs: Any) -> Iterator[tuple[dist.Store, int, int]]:
        yield job.store.clone(), job.rank, job.world_size  # opens no other port

    register_rendezvous_handler(SCHEME, handler)
    settings = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=options.threads,
        rpc_timeout=options.timeout_s,
        init_method=f"{SCHEME}://",
        device_maps=device_maps,
        devices=[job.device] if job.device.type == "cuda" else [],  # of tensors in futures
        _transports=None if "auto" in options.transports else options.transports,
        _channels=None if "auto" in options.channels else options.channels,
    )
    warnings.filterwarnings("ignore", message="You are using a Backend")  # torch itself uses it
    bench.begin("RPC")
    bench.phase("init_rpc")
    try:
        rpc.init_rpc(name, None, job.rank, job.world_size, settings)
    except (RuntimeError, ValueError) as error:
        # torch's logging of errors fails for RPC's own group, and raises another error instead
        first: BaseException = error
        while first.__context__:
            first = first.__context__
        reason = str(first)
        if "not in use by this listener" in reason:
            names = ",".join(options.transports)
            bench.refuse(f"--rpc-transports {names}: not available on this host; try uv", 1)
        if "timed out" in reason.lower() or "timeout" in reason:
            given = f"--rpc-timeout {options.timeout_s:g}"
            bench.refuse(f"starting RPC took longer than {given}; try --rpc-timeout 60")
        if isinstance(error, ValueError) and isinstance(first, RuntimeError):
            with lost_peer():
                raise first from None
        raise


@contextmanager
def rpc_workers(bench: Benchmark, roles: Roles, options: RpcOptions) -> Iterator[list[str]]:
    """Run all ranks as RPC workers, named by their roles, until all leave. Yields their devices."""
    job = bench.job
    devices: list[str] = job.broadcast(job.gather(str(job.device)))
    bench.prepare("ulimit -n", partial(need_files, job.world_size, options))
    start_rpc(bench, roles.name(job.rank), options, roles.device_maps(job.rank, devices))
    graceful = False
    try:
        yield devices
        bench.begin("RPC")
        bench.phase("shutdown")
        # after a failed case there may be calls that are never answered, so do not wait for them
        graceful = not job.broadcast(any(case.failed for case in bench.report.cases))
    finally:
        rpc.shutdown(graceful)
