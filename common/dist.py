"""Process groups: who this process is, the control group, and the group under test.

The default group is the control group: gloo, over all ranks, for metadata and decisions. The
group under test is made for one case, over exactly its ranks, and carries only the workload.
"""

import contextlib
import json
import os
import sys
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

from common import cli, job, preflight
from common.network import interface_towards
from common.restarts import connection, count_restarts, end_attempt, unless_started_again

# Waits on the control group have no useful limit: ranks outside a case wait for all of it. A
# hang is the watchdog's business, and it comes long before this.
FOREVER: Final = timedelta(days=30)


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

    Without a launcher this is a world of one. Ends the program where the launcher started it
    wrongly, such as N worlds of one. Raises ValueError for half an environment.
    """
    preflight.refuse_misfit()
    return job.world(os.environ)


def bind_cores() -> None:
    """Bind this process to its share of the cores that it may use, and what it starts as well.

    Each rank of a node has equally many, side by side, and none of another's; a rest stays idle.
    Call it before anything starts threads. Raises ValueError where there are more ranks than cores.
    """
    _, _, local_rank, local_world_size = world_from_environment()
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // local_world_size
    if not share:
        raise ValueError(
            f"--bind-cores needs a core for each rank of a node; here are {len(cores)} for "
            f"{local_world_size} ranks, e.g. start with --nproc-per-node {len(cores)}"
        )
    os.sched_setaffinity(0, cores[local_rank * share : (local_rank + 1) * share])


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

    Ends the program where the nodes do not fit together (see common/preflight.py). Raises
    ValueError for half an environment; TimeoutError, naming the ranks that are missing, when not
    all arrive in `timeout` s.
    """
    rank, world_size, local_rank, local_world_size = world_from_environment()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    shared = job.agent_serves_store(os.environ)
    if part and not shared:
        # rank 0 serves the store itself, and the part before may not have closed its port yet
        os.environ["MASTER_PORT"] = str(int(os.environ.get("MASTER_PORT", "29500")) + part)
    store: Store = HashStore()
    attempt = f"0.{part}"
    if world_size > 1:
        preflight.check_master(timeout)
        store = _open_store(rank, timeout)
    if world_size > 1 and shared:
        # torchrun's store outlives a restart of the workers: without keys of their own the new
        # ones would dial the ports of the dead (pytorch issue 135712). One of rank 0's is new.
        restarts = count_restarts(rank, store)
        attempt = f"{restarts}.{part}"
        store.set(f"part/{restarts}", str(part))
        if restarts and local_rank == 0:
            end_attempt(restarts - 1, store)
    with unless_started_again(attempt, store):
        num_nodes = _join(attempt, store, backend, timeout)
    return RankContext(
        rank, local_rank, world_size, local_world_size, num_nodes, device, backend, store, attempt
    )


def _join(attempt: str, store: Store, backend: str, timeout: float) -> int:
    """Compare the nodes, and make the control group; how many nodes there are."""
    rank, world_size, local_rank, local_world_size = world_from_environment()
    peer, num_nodes = None, 1
    if world_size > 1:
        row = preflight.describe_node(backend) if local_rank == 0 else None
        arrivals = PrefixStore(f"arrival/{attempt}", store)
        verdict = preflight.meet(arrivals, row, rank, world_size, timeout)
        off = job.switched_off(os.environ)
        refused = verdict["problem"] or (None if off else verdict["difference"])
        if refused:
            cli.refuse(refused, known_to_all=True)
        if verdict["warning"] and rank == 0 and attempt.endswith(".0"):
            print(f"warning: {verdict['warning']}", file=sys.stderr, flush=True)
        peer, num_nodes = verdict["peer"], verdict["nodes"]
    # On one node nothing has to listen on an outside interface; on several both listen where the
    # master is reached, and not where the host's own name happens to lead. To the master itself
    # its name may be a loopback address (Debian's 127.0.1.1), so it takes the way to a peer.
    interface: str | None = "lo"
    if local_world_size < world_size:
        interface = interface_towards(os.environ.get("MASTER_ADDR", ""))
        interface = interface_towards(peer) if interface == "lo" and peer else interface
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("TP_SOCKET_IFNAME", interface)
    with preflight.connecting(timeout):
        dist.init_process_group(
            "gloo",
            store=PrefixStore(f"control/{attempt}", store),
            rank=rank,
            world_size=world_size,
            timeout=FOREVER,
        )
    return num_nodes


def _open_store(rank: int, timeout: float) -> Store:
    """The store at MASTER_ADDR, as `env://` opens it, but without waiting for all ranks in it."""
    address, port = job.master(os.environ)
    try:
        return TCPStore(
            address,
            port,
            is_master=rank == 0 and not job.agent_serves_store(os.environ),
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        preflight.explain_no_store(error, timeout)


def connect_store(ctx: RankContext, prefix: str) -> Store:
    """A connection of its own to the rendezvous store: a blocked one takes no second call.

    What a restart by torchrun finds there of the attempt before is under another prefix.
    """
    return PrefixStore(f"{prefix}/{ctx.attempt}", connection(ctx.store))


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

    All are sent at the length of the longest but rank 0's, which stays where it is and may grow
    with the ranks. Raises PeerLost when a rank of the job has died.
    """
    text = json.dumps(value).encode()
    with _peers():
        sent = b"null" if dist.get_rank() == 0 else text
        length = torch.tensor([len(sent)])
        if dist.get_world_size() > 1:
            dist.all_reduce(length, op=dist.ReduceOp.MAX)
        padded = torch.zeros(int(length), dtype=torch.uint8)
        padded[: len(sent)] = torch.frombuffer(bytearray(sent), dtype=torch.uint8)
        rows = gather_rows(padded)
    if rows is None:
        return None
    texts = [text, *(row.numpy().tobytes().rstrip(b"\0") for row in rows[1:])]
    return [json.loads(text) for text in texts]


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
    return json.loads(tensor.numpy().tobytes())


@contextlib.contextmanager
def _peers() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(str(error).splitlines()[0]) from error
