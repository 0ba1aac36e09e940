"""RPC over TensorPipe: names, device maps, settings, start and shutdown. All ranks of a job are
RPC workers."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch.distributed.rendezvous import register_rendezvous_handler

from common.errors import Refused
from common.groups import Job, lost_peer, silenced
from common.join import raise_file_limit

SCHEME = "torchrun-bench"  # the scheme of an init_method that uses the store of the job


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
        counts = {"trainer": len(self.trainers), "server": len(self.servers)}
        return ", ".join(f"{n} {role}{'s' * (n != 1)}" for role, n in counts.items())

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
        Servers need them, too: distributed autograd calls back. devices: of each rank."""
        peers = self.servers if rank in self.trainers else self.trainers
        mapped = [peer for peer in peers if self.wire(rank, peer) == "cuda"]
        return {self.name(peer): {devices[rank]: devices[peer]} for peer in mapped}


@dataclass(frozen=True)
class RpcOptions:
    """The settings of TensorPipe. `auto` permits all transports and channels that are available."""

    threads: int = 16  # with 1 thread a function that makes an RPC would wait for itself
    timeout_s: float = 60
    transports: list[str] = field(default_factory=lambda: ["auto"])
    channels: list[str] = field(default_factory=lambda: ["auto"])

    def by_name(self) -> dict[str, Any]:
        """Return the settings that affect times."""
        return {
            "rpc_threads": self.threads,
            "rpc_transports": "+".join(self.transports),
            "rpc_channels": "+".join(self.channels),
        }

    def __str__(self) -> str:
        settings = self.by_name().items()
        return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in settings)


def need_files(world_size: int, options: RpcOptions) -> None:
    """Raise the limit on open files to what TensorPipe may need with all ranks as peers: with torch
    2.15 on the CPU 205 for one peer and 56 for each other one; with uv only, 158 and 8. Raises
    Refused if the hard limit is too low, because TensorPipe would abort the process."""
    needed = 150 + world_size * (10 if options.transports == ["uv"] else 60)
    limit = raise_file_limit(needed)
    if limit < needed:
        raise Refused(
            f"RPC may need {needed} open files per process, but the limit is {limit}; "
            f"try ulimit -n {needed}",
            here=True,
        )


def start(job: Job, roles: Roles, options: RpcOptions | None = None) -> list[str]:
    """Start this process as an RPC worker, named by its role, and return the devices of all ranks,
    which all call it. Raises Refused if a transport is not available here, TimeoutError after
    `timeout_s`, and LostPeer."""
    options = options or RpcOptions()
    need_files(job.world_size, options)
    devices: list[str] = job.broadcast(job.gather(str(job.device)))

    def handler(url: str, **kwargs: Any) -> Iterator[tuple[dist.Store, int, int]]:
        store = job.store.clone() if hasattr(job.store, "clone") else job.store
        yield store, job.rank, job.world_size  # opens no other port

    register_rendezvous_handler(SCHEME, handler)
    settings = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=options.threads,
        rpc_timeout=options.timeout_s,
        init_method=f"{SCHEME}://",
        device_maps=roles.device_maps(job.rank, devices),
        devices=[job.device] if job.device.type == "cuda" else [],  # of tensors in futures
        _transports=None if "auto" in options.transports else options.transports,
        _channels=None if "auto" in options.channels else options.channels,
    )
    warnings.filterwarnings("ignore", message="You are using a Backend")  # torch itself uses it
    try:
        with silenced("gloo"):
            rpc.init_rpc(roles.name(job.rank), None, job.rank, job.world_size, settings)
    except (RuntimeError, ValueError) as error:
        # torch's logging of errors fails for RPC's own group, and raises another error instead
        first: BaseException = error
        while first.__context__:
            first = first.__context__
        reason = str(first)
        if "not in use by this listener" in reason:
            names = ",".join(options.transports)
            raise Refused(f"RPC transports {names}: not available on this host; try uv") from None
        if "timed out" in reason.lower() or "timeout" in reason:
            raise TimeoutError(f"starting RPC took longer than {options.timeout_s:g} s") from None
        if isinstance(error, ValueError) and isinstance(first, RuntimeError):
            with lost_peer():
                raise first from None
        raise
    return devices


def stop(graceful: bool = True) -> None:
    """Stop RPC. All ranks call it. graceful: wait until all calls are answered; False after a
    failure, when a call may never be answered."""
    rpc.shutdown(graceful)
