"""RPC over TensorPipe: who does what, device maps, and an orderly start and end.

Trainers run in their main thread; servers and the master only answer calls. What a server keeps
between calls is made there by `make` and found by the functions that are called there by `hosted`.
"""

import argparse
import contextlib
import dataclasses
import datetime
import itertools
import json
import os
import shlex
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import register_rendezvous_handler

from common.dist import FOREVER, RankContext, connect_store, world_from_environment
from common.sweep import Sweep

SCHEME = "torchrun-bench"  # of the init_method that leads to the job's own store
SHUTDOWN_S = 60
REHEARSAL_S = 60


@dataclass(frozen=True)
class Layout:
    """Roles by global rank: trainers, then servers, then the master, if there is one.

    The last `cuda_trainers` of the trainers and the last `cuda_servers` of the servers are on CUDA.
    """

    trainers: int
    servers: int
    master: bool = True
    cuda_trainers: int = 0
    cuda_servers: int = 0

    @property
    def world_size(self) -> int:
        return self.trainers + self.servers + self.master

    @property
    def trainer_ranks(self) -> tuple[int, ...]:
        return tuple(range(self.trainers))

    @property
    def server_ranks(self) -> tuple[int, ...]:
        return tuple(range(self.trainers, self.trainers + self.servers))

    def name(self, rank: int) -> str:
        """`trainer0`, `server0` (numbered within the role), `master`."""
        if rank < self.trainers:
            return f"trainer{rank}"
        server = rank - self.trainers
        return f"server{server}" if server < self.servers else "master"

    def on_cuda(self, rank: int) -> bool:
        if rank < self.trainers:
            return rank >= self.trainers - self.cuda_trainers
        server = rank - self.trainers
        return self.servers - self.cuda_servers <= server < self.servers

    def server_of(self, trainer: int) -> int:
        """The rank of the server that serves this trainer.

        CUDA trainers go to the CUDA servers and the others to the others, if there are both kinds
        of servers. Each server gets a run of trainers; the runs differ by one at most.
        """
        servers, trainers = self.server_ranks, self.trainer_ranks
        if 0 < self.cuda_servers < self.servers:
            kind = self.on_cuda(trainer)
            servers = tuple(rank for rank in servers if self.on_cuda(rank) == kind)
            trainers = tuple(rank for rank in trainers if self.on_cuda(rank) == kind)
        return servers[trainers.index(trainer) * len(servers) // len(trainers)]

    def trainers_of(self, server: int) -> tuple[int, ...]:
        """The ranks of the trainers that this server serves; may be none."""
        return tuple(rank for rank in self.trainer_ranks if self.server_of(rank) == server)

    def device_maps(self, rank: int, devices: Sequence[str]) -> dict[str, dict[str, str]]:
        """Where the tensors that this rank sends arrive: {callee: {own device: its device}}.

        devices: every rank's own, by the index that it has on its node. Both directions need a
        map, since a server sends gradients back in calls of its own (distributed autograd).
        """
        if not self.on_cuda(rank):
            return {}
        peers = self.server_ranks if rank in self.trainer_ranks else self.trainer_ranks
        return {
            self.name(peer): {devices[rank]: devices[peer]} for peer in peers if self.on_cuda(peer)
        }


def split(
    world_size: int, trainers: int | None, servers: int | None, master: bool, share: int
) -> Layout:
    """The roles of a world: what is given, and the rest by default one server in `share`.

    Raises ValueError, with the number of processes that would do, where it does not come out.
    """
    rest = world_size - master
    if servers is None:
        servers = max(1, rest // share) if trainers is None else max(1, rest - trainers)
    if trainers is None:
        trainers = max(1, rest - servers)
    layout = Layout(trainers, servers, master)
    refuse_mismatch(layout, world_size)
    return layout


def refuse_mismatch(layout: Layout, world_size: int) -> None:
    """Raise ValueError unless the roles make up the world, and none is empty."""
    for role, count in (("trainers", layout.trainers), ("servers", layout.servers)):
        if count < 1:
            raise ValueError(f"expected at least 1 of the {role}, got {count}")
    if layout.world_size != world_size:
        parts = [f"trainers {layout.trainers}", f"servers {layout.servers}"]
        parts += ["master 1"] if layout.master else []
        raise ValueError(
            f"{' + '.join(parts)} make {layout.world_size} processes, and there "
            f"{'is' if world_size == 1 else 'are'} {world_size}; start {layout.world_size}: "
            f"{torchrun_command(layout.world_size)}"
        )


def torchrun_command(processes: int) -> str:
    """How to start this script again with so many processes."""
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    if nodes > 1 and processes % nodes == 0:
        return f"torchrun --nnodes {nodes} --nproc-per-node {processes // nodes} ..."
    return f"torchrun --nproc-per-node {processes} {shlex.join(sys.argv)}"


def wants_cuda(name: str) -> bool:
    """Whether `--device NAME` means CUDA here."""
    return name == "cuda" or (name == "auto" and torch.cuda.is_available())


def place(layout: Layout, backend: str | None) -> tuple[torch.device, str]:
    """This rank's device, by its role, and the backend of the groups among trainers.

    A role on CUDA takes cuda:LOCAL_RANK, counted round what is visible: a server may share its
    device with a trainer. The backend is by default nccl if all trainers are on CUDA, else gloo.
    Raises ValueError where it cannot be.
    """
    rank, _, local_rank, local_world_size = world_from_environment()
    count = torch.cuda.device_count()
    all_cuda = layout.cuda_trainers == layout.trainers
    backend = backend or ("nccl" if all_cuda else "gloo")
    if (layout.cuda_trainers or layout.cuda_servers) and count == 0:
        raise ValueError("CUDA trainers or servers: torch sees no CUDA device here; try the CPU")
    if backend == "nccl" and not all_cuda:
        raise ValueError("backend nccl needs every trainer on CUDA; try --backend gloo")
    if not dist.is_backend_available(backend):
        raise ValueError(f"this torch has no backend '{backend}'; try --backend gloo")
    first = rank - local_rank
    local = [r for r in range(first, first + local_world_size) if r < layout.trainers]
    if backend == "nccl" and 1 < count < len(local):
        raise ValueError(
            f"nccl needs a device for every trainer: {len(local)} trainers on this node, {count} "
            f"devices; start fewer trainers, or try --backend gloo"
        )
    on_cuda = layout.on_cuda(rank)
    return torch.device("cuda", local_rank % count) if on_cuda else torch.device("cpu"), backend


@dataclass(frozen=True)
class RpcOptions:
    """TensorPipe's settings. Transports and channels: None for all that TensorPipe finds."""

    threads: int
    timeout_s: float
    transports: tuple[str, ...] | None = None
    channels: tuple[str, ...] | None = None

    def key(self) -> dict[str, Any]:
        """What of them identifies a case."""
        return {
            "rpc_threads": self.threads,
            "rpc_transports": "+".join(self.transports or ("auto",)),
            "rpc_channels": "+".join(self.channels or ("auto",)),
        }


def default_threads(cores: int, ranks: int) -> int:
    """Worker threads for each of `ranks` processes that share `cores`.

    TensorPipe's own default is 16, whatever the machine: where processes share few cores a
    request then waits for threads that take turns. At least 2, or a function that makes a call
    of its own would wait for the only thread there is, its own.
    """
    return min(16, max(2, cores // ranks))


def default_transports(cores: int, ranks: int) -> tuple[str, ...] | None:
    """The transports for `ranks` processes that share `cores`; None leaves it to TensorPipe.

    Between processes of a host TensorPipe takes shm, whose thread polls as long as it runs. Where
    there are more ranks than cores it takes the cores from the ranks that have something to do.
    """
    return ("uv",) if ranks > cores else None


def options_from(args: argparse.Namespace, local_world_size: int) -> RpcOptions:
    """The settings of the flags of `cli.add_rpc_flags`."""
    cores = len(os.sched_getaffinity(0))
    transports = _named(args.rpc_transports)
    if args.rpc_transports is None:
        transports = default_transports(cores, local_world_size)
    return RpcOptions(
        args.rpc_threads or default_threads(cores, local_world_size),
        # twice, so that the watchdog comes first: it names who hangs, a call knows only its own end
        min(args.rpc_timeout or 2 * args.timeout, FOREVER.total_seconds()),
        transports,
        _named(args.rpc_channels),
    )


def _named(names: list[str] | None) -> tuple[str, ...] | None:
    return None if names in (None, ["auto"]) else tuple(names or ())


# -- start and end --------------------------------------------------------------------------------


@contextlib.contextmanager
def workers(layout: Layout, options: RpcOptions, sweep: Sweep) -> Iterator[str | None]:
    """All ranks of the job are RPC workers, named by their roles, until all leave together.

    Yields None, or why RPC could not be started on some rank; the same on all ranks. Where a case
    failed meanwhile each rank leaves by itself, since its peers may not answer any more.
    """
    devices = sweep.devices()

    def rehearse() -> None:
        _rehearse(layout, options, sweep.ctx, devices)

    def connect() -> None:
        _connect(layout, options, sweep.ctx, devices)

    broken = sweep.everywhere("RPC rehearsal", rehearse) if may_abort(layout, options) else None
    broken = broken or sweep.everywhere("RPC start", connect)
    before, sweep.outside = sweep.outside, "serves"
    try:
        yield broken
    except BaseException:
        _disconnect(graceful=False)
        raise
    sweep.outside = before
    failed = sweep.share(sweep.last_failed)
    # not contained: nothing is measured any more, and a failed end must not cost a good case
    sweep.everywhere("RPC end", lambda: _disconnect(graceful=not (broken or failed)))


def _connect(layout: Layout, options: RpcOptions, ctx: RankContext, devices: list[str]) -> None:
    def handler(url: str, **kwargs: Any) -> Iterator[tuple[Store, int, int]]:
        yield connect_store(ctx, "rpc"), ctx.rank, ctx.world_size  # no ports of our own

    with contextlib.suppress(RuntimeError):  # registered by an earlier start in this process
        register_rendezvous_handler(SCHEME, handler)  # type: ignore[no-untyped-call]
    maps: Any = layout.device_maps(ctx.rank, devices)
    backend_options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=options.threads,
        rpc_timeout=options.timeout_s,
        init_method=f"{SCHEME}://",
        device_maps=maps,
        _transports=list(options.transports) if options.transports else None,
        _channels=list(options.channels) if options.channels else None,
    )
    with warnings.catch_warnings():
        # torch's own use of a group that it deprecates
        warnings.filterwarnings("ignore", message="You are using a Backend")
        try:
            rpc.init_rpc(  # type: ignore[no-untyped-call]
                layout.name(ctx.rank),
                rank=ctx.rank,
                world_size=ctx.world_size,
                rpc_backend_options=backend_options,
            )
        except RuntimeError as error:
            if options.transports and "not in use by this listener" in str(error):
                names = ", ".join(options.transports)
                raise RuntimeError(f"TensorPipe finds no transport of {names} here") from error
            if "timeout" in str(error):
                limit = f"{options.timeout_s:g} s (--rpc-timeout)"
                raise TimeoutError(f"RPC did not start within {limit}") from error
            raise


def _disconnect(graceful: bool) -> None:
    _objects.clear()
    with contextlib.nullcontext() if graceful else contextlib.suppress(RuntimeError):
        rpc.shutdown(graceful=graceful, timeout=SHUTDOWN_S)


_rehearsals = itertools.count()  # the same on all ranks


def may_abort(layout: Layout, options: RpcOptions) -> bool:
    """Whether these channels may all be out of service between two of the processes.

    cma needs permission and a common host, cuda_ipc peer access, and so on. The two basic ones
    always work; a process that finds no channel for a tensor ends by std::terminate (torch 2.15).
    """
    if options.channels is None:
        return False
    needed = {"basic"} | ({"cuda_basic"} if layout.cuda_trainers and layout.cuda_servers else set())
    return not needed <= set(options.channels)


def _rehearse(layout: Layout, options: RpcOptions, ctx: RankContext, devices: list[str]) -> None:
    """Send a tensor between trainers and servers in child processes, which may end for it."""
    prefix = f"rehearsal/{next(_rehearsals)}"
    store = connect_store(ctx, prefix)
    host, port = _address(store)
    spec = {
        "layout": dataclasses.asdict(layout),
        "options": dataclasses.asdict(options) | {"timeout_s": min(options.timeout_s, REHEARSAL_S)},
        "rank": ctx.rank,
        "world": [ctx.local_rank, ctx.world_size, ctx.local_world_size, ctx.num_nodes],
        "store": [host, port, f"{prefix}/{ctx.attempt}"],
        "devices": devices,
    }
    code = "from common.rpc import rehearsal; rehearsal()"
    with subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(spec)],
        cwd=Path(__file__).resolve().parents[1],
        env={name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            _, errors = child.communicate(timeout=REHEARSAL_S)
        except subprocess.TimeoutExpired:
            errors = f"no answer in {REHEARSAL_S} s"
        finally:
            child.kill()
        if child.wait() != 0:
            store.set("over", "")  # the other children wait for this one
            lines = errors.strip().splitlines() or ["no message"]
            why = next((line for line in lines if "what():" in line), lines[-1])
            names = ", ".join(options.channels or ())
            raise RuntimeError(
                f"no channel of {names} carries tensors between these processes: "
                f"{why.replace('what():', '').strip()}"
            )


def rehearsal() -> None:
    """The child process of `_rehearse`: one call with a tensor to every server, and back."""
    spec = json.loads(sys.argv[1])
    host, port, prefix = spec["store"]
    patience = datetime.timedelta(seconds=REHEARSAL_S)
    server = TCPStore(host, port, is_master=False, timeout=patience)
    store = PrefixStore(prefix, server)
    layout, rank = Layout(**spec["layout"]), spec["rank"]
    device = torch.device(spec["devices"][rank])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    local_rank, world_size, local_world_size, num_nodes = spec["world"]
    ctx = RankContext(
        rank, local_rank, world_size, local_world_size, num_nodes, device, "gloo", server, prefix
    )
    _connect(layout, RpcOptions(**spec["options"]), ctx, spec["devices"])
    for callee in layout.server_ranks if rank in layout.trainer_ranks else ():
        tensor = torch.ones(1, device=device if layout.on_cuda(callee) else "cpu")
        rpc.rpc_sync(layout.name(callee), torch.neg, args=(tensor,))
    if store.add("sent", 1) == layout.world_size:
        store.set("over", "")
    store.wait(["over"])
    os._exit(0)


def _address(store: Store) -> tuple[str, int]:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    assert isinstance(store, TCPStore)
    return store.host, store.port


# -- what lives on a worker -----------------------------------------------------------------------

_objects: dict[str, Any] = {}


def make(worker: str, name: str, factory: Callable[..., Any], *args: Any) -> None:
    """Have a worker make `factory(*args)` and keep it as `name`, in the place of an older one."""
    rpc.rpc_sync(worker, _make, args=(name, factory, args))


def _make(name: str, factory: Callable[..., Any], args: tuple[Any, ...]) -> None:
    _objects[name] = factory(*args)


def hosted(name: str) -> Any:
    """What `make` has made on this worker. Raises KeyError."""
    return _objects[name]
