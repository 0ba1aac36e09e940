"""Process groups: who this process is, the control group, and the group under test.

The default group is the control group: gloo, over all ranks, for metadata and decisions. The
group under test is made for one case, over exactly its ranks, and carries only the workload.
"""

import contextlib
import fcntl
import json
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)
from torch.distributed.rendezvous import rendezvous

# Waits on the control group have no useful limit: ranks outside a case wait for all of it. A
# hang is the watchdog's business, and it comes long before this.
FOREVER: Final = timedelta(days=30)
SIOCGIFADDR: Final = 0x8915  # of Linux: an interface's IPv4 address


class PeerLost(RuntimeError):
    """The control group broke: a process of the job has died."""


@dataclass(frozen=True)
class RankContext:
    """Who this process is. Ranks are global; `device` is this rank's own."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    num_nodes: int
    device: torch.device
    backend: str  # of the groups under test
    store: Store  # the rendezvous store, for the watchdog
    attempt: str  # of torchrun, which restarts the workers but keeps its store


@dataclass(frozen=True)
class CaseGroup:
    """The process groups of one case. The first two span the same ranks."""

    ranks: tuple[int, ...]
    test: dist.ProcessGroup  # carries the workload, nothing else
    control: dist.ProcessGroup  # gloo: barriers and decisions between timed blocks
    together: dist.ProcessGroup  # gloo: likewise, of all the groups that run at the same time


def world_from_environment() -> tuple[int, int, int, int]:
    """(rank, world size, local rank, local world size) as the launcher set them.

    Without a launcher this is a world of one. Raises ValueError for half an environment.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return 0, 1, 0, 1
    values = []
    for name in names:
        try:
            values.append(int(os.environ[name]))
        except (KeyError, ValueError):
            raise ValueError(
                f"expected the variables {', '.join(names)} from the launcher, "
                f"got {name}={os.environ.get(name)!r}; start with torchrun"
            ) from None
    return values[0], values[1], values[2], values[3]


def choose_device(name: str, backend: str | None) -> tuple[torch.device, str]:
    """This rank's device and the backend under test. Touches neither: it only decides.

    The device is cuda:LOCAL_RANK, by what is visible: a launcher that shows every rank one
    device of its own gets cuda:0. Ranks share a device only over gloo.

    Raises ValueError, with what was expected and an example, where the two do not go together.
    """
    _, _, local_rank, local_world_size = world_from_environment()
    count = torch.cuda.device_count()
    if name == "cuda" and count == 0:
        raise ValueError("--device cuda: torch sees no CUDA device here; try --device cpu")
    cuda = name == "cuda" or (name == "auto" and count > 0)
    backend = backend or ("nccl" if cuda else "gloo")
    if backend == "nccl" and not cuda:
        raise ValueError(
            "--distributed-backend nccl needs CUDA devices, and this run is on the CPU; "
            "try --distributed-backend gloo"
        )
    if not dist.is_backend_available(backend):
        raise ValueError(f"this torch has no backend '{backend}'; try --distributed-backend gloo")
    if not cuda:
        return torch.device("cpu"), backend
    if backend == "nccl" and 1 < count < local_world_size:
        raise ValueError(
            f"nccl needs a device for every rank: {local_world_size} ranks on this node, {count} "
            f"devices; try --nproc-per-node {count}, or --distributed-backend gloo to share them"
        )
    return torch.device("cuda", local_rank % count), backend


def init(device: torch.device, backend: str, timeout: float = 300.0, part: int = 0) -> RankContext:
    """Take the device, join the job, and make the control group the default one.

    part: of a run in several processes, which meet in the same store (see common/parts.py).

    Raises TimeoutError, naming the ranks that are missing, when not all arrive in `timeout` s.
    """
    rank, world_size, local_rank, local_world_size = world_from_environment()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # On one node nothing has to listen on an outside interface; on several both listen where the
    # master is reached, and not where the host's own name happens to lead.
    several = local_world_size < world_size
    interface = interface_towards(os.environ.get("MASTER_ADDR", "")) if several else "lo"
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("TP_SOCKET_IFNAME", interface)
    if part and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        # rank 0 serves the store itself, and the part before may not have closed its port yet
        os.environ["MASTER_PORT"] = str(int(os.environ.get("MASTER_PORT", "29500")) + part)
    if world_size == 1:
        store: Store = HashStore()
    else:
        store, _, _ = next(iter(rendezvous("env://", timeout=timedelta(seconds=timeout))))
    # torchrun's store outlives a restart of the workers: without keys of their own the new ones
    # would dial the ports of the dead (pytorch issue 135712)
    attempt = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}.{part}"
    _await_all(PrefixStore(f"arrival/{attempt}", store), rank, world_size, timeout)
    dist.init_process_group(
        "gloo",
        store=PrefixStore(f"control/{attempt}", store),
        rank=rank,
        world_size=world_size,
        timeout=FOREVER,
    )
    num_nodes = int(os.environ.get("GROUP_WORLD_SIZE", -(-world_size // local_world_size)))
    return RankContext(
        rank, local_rank, world_size, local_world_size, num_nodes, device, backend, store, attempt
    )


def interface_towards(address: str) -> str | None:
    """The network interface whose IPv4 address the kernel sends from to reach `address`.

    None where there is no such route, or the address is not known.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing: it only chooses the route
            own = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                request = struct.pack("256s", name.encode())
                with contextlib.suppress(OSError):  # an interface without an address
                    answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
                    if socket.inet_ntoa(answer[20:24]) == own:
                        return name
    except OSError:
        return None
    return "lo" if own.startswith("127.") else None


def connect_store(ctx: RankContext, prefix: str) -> Store:
    """A connection of its own to the rendezvous store: a blocked one takes no second call.

    What a restart by torchrun finds there of the attempt before is under another prefix.
    """
    store = ctx.store
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        store = TCPStore(store.host, store.port, is_master=False, timeout=timedelta(seconds=60))
    return PrefixStore(f"{prefix}/{ctx.attempt}", store)


def _await_all(store: Store, rank: int, world_size: int, timeout: float) -> None:
    store.set(str(rank), "here")
    if store.add("count", 1) == world_size:
        store.set("all", "here")
    try:
        store.wait(["all"], timedelta(seconds=timeout))
    except RuntimeError:
        missing = [other for other in range(world_size) if not store.check([str(other)])]
        names = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
        raise TimeoutError(
            f"HANG at the start: rank {names} of {world_size} did not arrive in {timeout:g} s"
        ) from None


def shutdown() -> None:
    """Wait for all ranks, then leave the job."""
    with _peers():
        dist.barrier()
    dist.destroy_process_group()


def open_groups(groups: Sequence[tuple[int, ...]], ctx: RankContext) -> CaseGroup | None:
    """Make the groups of a case that runs on disjoint sets of ranks at the same time.

    This rank's own; None on a rank outside them. All ranks of the job must call it together.
    """
    mine: Any = None
    with _peers():
        for ranks in groups:
            control = dist.new_group(list(ranks), backend="gloo", timeout=FOREVER)
            test = dist.new_group(list(ranks), backend=ctx.backend, timeout=FOREVER)
            if ctx.rank in ranks:
                mine = (ranks, test, control)
        together = mine and mine[2]
        if len(groups) > 1:  # never the default one: there the ranks outside wait for the others
            everyone = [rank for ranks in groups for rank in ranks]
            together = dist.new_group(everyone, backend="gloo", timeout=FOREVER)
    return CaseGroup(mine[0], mine[1], mine[2], together) if mine else None


def close_groups(group: CaseGroup | None) -> None:
    """Destroy what `open_groups` made; their members alone call it, each for itself."""
    if group is None:
        return
    for part in {id(g): g for g in (group.test, group.control, group.together)}.values():
        dist.destroy_process_group(part)


@contextlib.contextmanager
def case_group(ranks: tuple[int, ...], ctx: RankContext) -> Iterator[CaseGroup | None]:
    """The groups of one case, destroyed after it; None on a rank outside it.

    All ranks of the job must enter it together.
    """
    group = open_groups([ranks], ctx)
    try:
        yield group
    finally:
        close_groups(group)


def all_agree(yes: bool) -> bool:
    """Whether it is so on every rank of the job; all must ask. Raises PeerLost."""
    votes = torch.tensor([int(yes)])
    with _peers():
        if dist.get_world_size() > 1:
            dist.all_reduce(votes, op=dist.ReduceOp.MIN)
    return bool(votes)


def reduce_max(values: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The elementwise maximum over the group, on its first rank. values: [n], on the CPU."""
    if dist.get_world_size(group) > 1:
        dist.reduce(values, group_dst=0, op=dist.ReduceOp.MAX, group=group)
    return values


def broadcast_int(value: int, group: dist.ProcessGroup | None = None) -> int:
    """The value of the group's first rank, on all its ranks."""
    tensor = torch.tensor([value])
    if dist.get_world_size(group) > 1:
        dist.broadcast(tensor, group_src=0, group=group)
    return int(tensor)


def gather_rows(
    values: torch.Tensor, group: dist.ProcessGroup | None = None
) -> torch.Tensor | None:
    """[ranks, *values.shape] on the group's first rank, None elsewhere. All shapes alike.

    Costs O(ranks) on the first rank and nothing on the others.
    """
    if dist.get_world_size(group) == 1:
        return values[None]
    rows = None
    if dist.get_rank(group) == 0:
        rows = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.gather(values, rows, group_dst=0, group=group)
    return None if rows is None else torch.stack(rows)


def gather_json(value: Any) -> list[Any] | None:
    """Every rank's `value` on rank 0 of the job, None elsewhere; as JSON, never as pickle.

    Raises PeerLost when a rank of the job has died.
    """
    text = json.dumps(value).encode()
    with _peers():
        length = torch.tensor([len(text)])
        if dist.get_world_size() > 1:
            dist.all_reduce(length, op=dist.ReduceOp.MAX)
        padded = torch.zeros(int(length), dtype=torch.uint8)
        padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        rows = gather_rows(padded)
    if rows is None:
        return None
    return [json.loads(bytes(row.tolist()).rstrip(b"\0")) for row in rows]


def broadcast_json(value: Any) -> Any:
    """Rank 0's `value` on all ranks of the job, as JSON. Raises PeerLost as gather_json does."""
    text = json.dumps(value).encode()
    with _peers():
        size = broadcast_int(len(text))
        tensor = torch.zeros(size, dtype=torch.uint8)
        if dist.get_rank() == 0:
            tensor = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        if dist.get_world_size() > 1:
            dist.broadcast(tensor, src=0)
    return json.loads(bytes(tensor.tolist()))


@contextlib.contextmanager
def _peers() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(str(error).splitlines()[0]) from error
