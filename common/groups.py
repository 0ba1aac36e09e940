"""Who this process is, and its process groups.

The default group is the job's control group: gloo over all ranks, for metadata and decisions. The
group under test is over exactly the ranks of a case, for nothing but the workload. Cases over the
same ranks share their groups.
"""

import gc
import os
import pickle
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# Functions of this module have a default argument: the default group at the time of the import.
# The first optimizer imports it, when there is a group already, and that group would then outlive
# destroy_process_group (torch 2.15). So it is imported here, before there is one.
import torch.distributed.nn.functional

from common.cli import describe, end, write

# Ranks outside a case wait until it is over, so no limit would be useful. The watchdog ends hangs.
FOREVER = timedelta(days=30)
SMALL_MESSAGE = 1024  # bytes of a message that `broadcast` always sends
MOST_KEPT = 4  # sets of groups that live on: those of 1, 2, 4 and 8 ranks

Teams = Sequence[Sequence[int]]

one_at_a_time = threading.Lock()  # for aborts: the main thread and the watchdog's abort the same


@dataclass(frozen=True)
class Job:
    """This process within the job that torchrun (or srun) started."""

    rank: int
    local_rank: int  # on its node, from 0
    world_size: int
    local_world_size: int
    device: torch.device
    backend: str  # of the groups under test
    store: dist.Store  # the store in which the ranks met
    second_store: dist.Store | None = None  # the same by another connection, for the watchdog
    timeout: timedelta = FOREVER  # of the groups under test: torch's own, behind the watchdog
    keeps_memory: bool = False  # glibc keeps what is freed: see `keep_freed_memory` in join.py
    rendezvous_s: float = 0.0  # until all ranks had met


@dataclass(frozen=True)
class Group:
    """The ranks of a case, and their groups."""

    ranks: tuple[int, ...]
    test: dist.ProcessGroup  # under test; where a case has several teams, that of this rank's team
    control: dist.ProcessGroup  # gloo, for barriers and decisions between timed blocks
    # Groups that the workload makes itself, e.g. those of a DeviceMesh. They end with the case.
    more: list[dist.ProcessGroup] = field(default_factory=list)
    aborted: list[dist.ProcessGroup] = field(default_factory=list)  # of all of these
    # The seconds of this rank to make `test` ("group") and of its first collective
    # ("first_collective"). Empty in later cases that take the same groups.
    start_up_s: dict[str, float] = field(default_factory=dict)


def local_rank() -> int:
    """This rank's number on its node, from 0: LOCAL_RANK.

    `torchrun --virtual-local-rank` sets 0 for all ranks. But torchrun numbers the ranks node by
    node, so RANK tells the number, too. Where nodes have different numbers of ranks it does not:
    there LOCAL_RANK is taken as it is. Without LOCAL_RANK all ranks are on one node.
    """

    names = ("RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE")
    rank, world_size, nodes, ranks_of_node = (int(os.environ.get(name, "0")) for name in names)
    if nodes > 0 and world_size == nodes * ranks_of_node:  # torchrun's, evenly
        return rank % ranks_of_node
    return int(os.environ.get("LOCAL_RANK", rank))


def open_group(ranks: tuple[int, ...], job: Job, teams: Teams | None = None) -> Group | None:
    """The groups of a case; None on a rank outside it. All ranks of the job call it together.

    teams: parts of the ranks. Each part gets a group under test of its own.
    """
    with peers():
        control: Any = dist.new_group(list(ranks), backend="gloo", timeout=FOREVER)
    parts = [list(team) for team in teams or [ranks]]
    start = time.perf_counter()
    test: Any = dist.new_subgroups_by_enumeration(parts, backend=job.backend)[0]
    took = {"group": time.perf_counter() - start}
    return Group(ranks, test, control, start_up_s=took) if job.rank in ranks else None


def rendezvous(group: Group) -> None:
    """Wait for the other ranks of the case. Call it before each group that a workload makes.

    Nothing ends the wait in a constructor of torch for a rank that has failed meanwhile. That rank
    has closed its control group, so here the others fail, too.
    """
    dist.barrier(group.control)


def connect(group: dist.ProcessGroup, job: Job) -> float:
    """Connect a group under test: NCCL does so in the first collective. A group that is not
    connected could not be aborted if the case fails. Returns the seconds of that collective."""
    with suppress(RuntimeError):  # mpi has no timeout, and in torch 2.11 fake has none
        group.set_timeout(job.timeout)
    start = time.perf_counter()
    dist.all_reduce(torch.ones(1, device=job.device), group=group)
    if job.device.type == "cuda":
        torch.cuda.synchronize(job.device)
    return time.perf_counter() - start


def abort_process_group(group: dist.ProcessGroup) -> None:
    """End a group with work in flight. To destroy it would be to wait for that work for ever
    (pytorch/pytorch#141510). Private; seen to work with torch 2.11, 2.14 and 2.15."""
    dist.distributed_c10d._abort_process_group(group)


def abort_group(group: Group) -> None:
    """End the work in flight on the groups of a case. Another thread may call it, and again for
    groups that the workload has made since.

    All groups are aborted at once: NCCL's abort waits for the kernels of the other groups, which
    end only when those are aborted, too (NVIDIA/nccl#1013).
    """

    def abort(tested: dist.ProcessGroup) -> None:
        with suppress(RuntimeError):
            tested.abort()

    with one_at_a_time:
        new = [tested for tested in (group.test, *group.more) if tested not in group.aborted]
        group.aborted.extend(new)
        with ThreadPoolExecutor(len(new) or 1) as threads:
            threads.map(abort, new)


def destroy(group: dist.ProcessGroup) -> None:
    """Destroy an idle group. Its case is over: what NCCL reports only now is said, and no more."""
    try:
        dist.destroy_process_group(group)
    except RuntimeError as error:
        write(f"rank {dist.get_rank()}, closing a group: {describe(error)}")


def close_more(group: Group) -> None:
    """Close the groups that the workload made itself. Each member calls this on its own."""
    gc.collect()  # frees what is left of the workload: NCCL would wait for its CUDA graphs
    for tested in group.more:
        destroy(tested)
    group.more.clear()


def close_group(group: Group, failed: bool = False) -> None:
    """Close the groups of a case. Each member calls this on its own.

    failed: work may still be in flight. Peers on gloo notice a closed socket, and gloo closes it
    when the last reference to the group is gone.
    """
    if not failed:
        close_more(group)
        destroy(group.test)
        destroy(group.control)
        return
    gc.collect()  # first: NCCL's abort waits for CUDA graphs, also for those in reference cycles
    abort_group(group)
    with suppress(RuntimeError):  # the CUDA context may be lost
        torch.cuda.empty_cache()
    for tested in (*group.more, group.test):
        # NCCL's abort may raise, and torch then forgets the group later; or it has done so already
        with suppress(RuntimeError, ValueError):
            abort_process_group(tested)
    destroy(group.control)


class Groups:
    """The groups of the last cases. The next case over the same ranks takes them again.

    Connecting costs more than a short case. All ranks of the job call `take` and `give_back` with
    the same arguments, so all keep the same sets. A rank keeps None for a set that it is not in.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.kept: dict[Any, Group | None] = {}  # by ranks and teams; the last used one is last

    def take(self, ranks: tuple[int, ...], teams: Teams | None) -> tuple[Group | None, bool]:
        """The groups of a case, and whether they are new. All ranks of the job call it together."""
        name = name_of_set(ranks, teams)
        if name in self.kept:
            group = self.kept[name] = self.kept.pop(name)
            if group:
                group.start_up_s.clear()
            return group, False
        while len(self.kept) >= MOST_KEPT:
            self.close(next(iter(self.kept)))
        self.kept[name] = open_group(ranks, self.job, teams)
        return self.kept[name], True

    def give_back(self, ranks: tuple[int, ...], teams: Teams | None, failed: bool) -> None:
        """End a case. Its groups live on if it passed on all ranks."""
        name = name_of_set(ranks, teams)
        if failed:
            self.close(name, failed)
        elif group := self.kept[name]:
            close_more(group)

    def close(self, name: Any, failed: bool = False) -> None:
        """Close a set. A rank on which a case failed has done so before the others."""
        if group := self.kept.pop(name, None):
            close_group(group, failed)

    def close_all(self) -> None:
        for name in list(self.kept):
            self.close(name)


def name_of_set(ranks: tuple[int, ...], teams: Teams | None) -> tuple[Any, ...]:
    """What tells one set of groups from another: the ranks, and how they form teams."""
    return ranks, tuple(tuple(team) for team in teams or [ranks])


def gather(value: Any) -> list[Any] | None:
    """On rank 0 the values of all ranks of the job, by rank; None on the others.

    torch's gather_object sends the lengths around a ring, in as many steps as there are ranks. With
    it and broadcast_object_list a case whose step does nothing took 0.54 to 0.62 of the time that a
    gloo group takes on 8 and 32 ranks; with `gather` and `broadcast` 0.30 to 0.43 (tests/scale.py).
    """
    pickled = pickle.dumps(value)
    with peers():
        # In `gather_rows` only rank 0 waits. Without this barrier a late rank would let the others
        # go on, and the watchdog would take rank 0 for late as well.
        dist.barrier()
        lengths = gather_rows(torch.tensor(len(pickled)))
        longest = int(share(max(lengths) if lengths else None))
        # pickle ignores what follows the end of a value
        rows = gather_rows(as_tensor(bytearray(pickled.ljust(longest))))
    return [pickle.loads(row.numpy().tobytes()) for row in rows] if rows else None


def gather_rows(row: torch.Tensor) -> list[torch.Tensor] | None:
    """On rank 0 the rows of all ranks of the job, all of one shape; None on the others."""
    rows = None
    if dist.get_rank() == 0:
        rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.gather(row, rows)
    return rows


def share(value: Any) -> Any:
    """The value that rank 0 of the job has, on all ranks."""
    with peers():
        return broadcast(value, dist.group.WORLD)


def agree(value: Any, group: Group) -> Any:
    """The value that the group's first rank has, on all members.

    If `share` fails, the job has lost a process. If this fails, only the case fails.
    """
    return broadcast(value, group.control)


def broadcast(value: Any, group: Any) -> Any:
    """The value of the group's first rank. A small one is one message; torch's
    broadcast_object_list always sends two, the length and the value."""
    is_first = dist.get_rank(group) == 0
    pickled = pickle.dumps(value) if is_first else b""
    begin = len(pickled).to_bytes(8) + pickled[: SMALL_MESSAGE - 8]
    message = bytearray(begin.ljust(SMALL_MESSAGE))
    dist.broadcast(as_tensor(message), group_src=0, group=group)
    length, content = int.from_bytes(message[:8]), message[8:]
    if length > len(content):
        content = bytearray(pickled or length)
        dist.broadcast(as_tensor(content), group_src=0, group=group)
    return value if is_first else pickle.loads(content)


def as_tensor(content: bytearray) -> torch.Tensor:
    """A tensor that shares the memory of these bytes."""
    return torch.frombuffer(content, dtype=torch.uint8)


@contextmanager
def peers() -> Iterator[None]:
    """For collectives of the job's control group and calls of the store. An error in them means
    that a process has died. The launcher knows which one and ends the others; if it does not, they
    end here."""
    try:
        yield
    except RuntimeError as error:
        reason = f"rank {dist.get_rank()} lost a peer: {str(error).splitlines()[0]}"
        if local_rank() == 0:
            write(reason)
        time.sleep(10)
        end(1, reason, say=False)
