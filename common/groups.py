"""The identity of this process in the job, and its process groups.

The default process group is the control group of the job: gloo over all ranks, for metadata and
decisions. A group under test spans exactly the ranks of a case and carries only the workload.
Consecutive cases over the same ranks share their groups.
"""

import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# Functions of this module bind the default group of the time of its import as a default argument.
# The first optimizer imports it, and the default group would then outlive destroy_process_group
# (torch 2.15). Importing it here, before there is a group, avoids that.
import torch.distributed.nn.functional

from common.errors import LostPeer

log = logging.getLogger(__name__)
MAX_CACHED = 4  # sets of groups that stay open, e.g. those of 1, 2, 4 and 8 ranks

Subgroups = tuple[tuple[int, ...], ...]  # a partition of the ranks of a case

abort_lock = threading.Lock()  # the main thread and the watchdog abort the same groups


@dataclass(frozen=True)
class Job:
    """This process within the job that torchrun (or srun) started."""

    rank: int
    local_rank: int  # on its node, from 0
    world_size: int
    local_world_size: int
    device: torch.device
    backend: str  # of the groups under test
    store: dist.Store  # the store of the rendezvous
    control: dist.ProcessGroup  # gloo over all ranks, for metadata and decisions
    second_store: dist.Store | None = None  # a second connection to it, for the watchdog
    # torch's own, of groups under test and of control groups; None for torch's default
    timeout: timedelta | None = None
    control_timeout: timedelta | None = None
    keeps_memory: bool = False  # whether glibc keeps freed memory: `keep_freed_memory` in join.py
    rendezvous_s: float = 0.0  # seconds until all ranks had joined

    def gather(self, value: Any) -> list[Any] | None:
        """Return the picklable values of all ranks on rank 0, None on other ranks. All ranks call
        it. Raises LostPeer. No rank returns before all have called it, because gather_object
        all-gathers the sizes first: while rank 0 waits for a late rank, it is not called late."""
        values = [None] * self.world_size if self.rank == 0 else None
        with lost_peer():
            dist.gather_object(value, values, group_dst=0, group=self.control)
        return values

    def broadcast(self, value: Any) -> Any:
        """Return the picklable value of rank 0 on all ranks. All ranks call it. Raises LostPeer."""
        values = [value]
        with lost_peer():
            dist.broadcast_object_list(values, group_src=0, group=self.control)
        return values[0]

    def barrier(self) -> None:
        """Wait until all ranks have called it. Raises LostPeer."""
        with lost_peer():
            dist.barrier(self.control)


@dataclass(frozen=True)
class Group:
    """The ranks of a case and their process groups."""

    ranks: tuple[int, ...]
    workload: dist.ProcessGroup  # the group under test; with subgroups, that of this rank
    control: dist.ProcessGroup  # gloo, for barriers and decisions between timed blocks
    # Groups that the workload creates, e.g. those of a DeviceMesh. They are closed with the case.
    extra: list[dist.ProcessGroup] = field(default_factory=list)
    aborted: list[dist.ProcessGroup] = field(default_factory=list)  # of `workload` and `extra`
    # Seconds of this rank to create `workload` ("group") and for its first collective
    # ("first_collective"). Empty in later cases that reuse the groups.
    start_up_s: dict[str, float] = field(default_factory=dict)

    def broadcast(self, value: Any) -> Any:
        """Return the picklable value of the first rank on all ranks of the case, which all call it.
        Raises RuntimeError if a rank has left the case: then the case has failed."""
        values = [value]
        dist.broadcast_object_list(values, group_src=0, group=self.control)
        return values[0]


@contextmanager
def lost_peer() -> Iterator[None]:
    """Raise LostPeer if a collective of all ranks or a call of the store raises."""
    try:
        yield
    except RuntimeError as error:
        raise LostPeer(f"lost a peer: {str(error).splitlines()[0]}") from error


def local_rank() -> int:
    """Return the index of this rank on its node, from LOCAL_RANK or, under torchrun with equal
    nodes, from RANK: `torchrun --virtual-local-rank` sets LOCAL_RANK to 0 on all ranks."""
    names = ("RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE")
    rank, world_size, nodes, ranks_of_node = (int(os.environ.get(name, "0")) for name in names)
    if nodes > 0 and world_size == nodes * ranks_of_node:  # torchrun, evenly distributed
        return rank % ranks_of_node
    return int(os.environ.get("LOCAL_RANK", rank))


@contextmanager
def silenced(backend: str) -> Iterator[None]:
    """While gloo creates a group, discard what is written to stdout: in torch 2.8 and 2.9 each rank
    writes a line, in the middle of a table (https://github.com/pytorch/gloo/issues/462)."""
    with ExitStack() as stack:
        with suppress(OSError, ValueError, AttributeError):  # stdout is closed, or None
            if backend == "gloo":
                sys.stdout.flush()
                stdout, null = os.dup(1), os.open(os.devnull, os.O_WRONLY)
                stack.callback(os.close, stdout)
                stack.callback(os.dup2, stdout, 1)
                os.dup2(null, 1)
                os.close(null)
        yield


def open_group(ranks: tuple[int, ...], job: Job, subgroups: Subgroups) -> Group | None:
    """Create the groups of a case, with a group under test for each subgroup; None on ranks outside
    the case. All ranks of the job call it."""
    with lost_peer(), silenced("gloo"):
        control: Any = dist.new_group(list(ranks), backend="gloo", timeout=job.control_timeout)
    parts = list(map(list, subgroups))
    start = time.perf_counter()
    with silenced(job.backend):
        workload: Any = dist.new_subgroups_by_enumeration(parts, backend=job.backend)[0]
    took = {"group": time.perf_counter() - start}
    return Group(ranks, workload, control, start_up_s=took) if job.rank in ranks else None


def barrier_before_new_group(group: Group) -> None:
    """Wait for the other ranks of the case, before a workload creates a process group. If a rank
    fails and closes its control group, this barrier fails on the others, which would wait forever
    in torch's constructor of the group."""
    dist.barrier(group.control)


def connect(group: dist.ProcessGroup, job: Job) -> float:
    """Run the first collective of a group under test, and return its time in seconds. The legacy
    NCCL backend connects in it, and a group that is not connected cannot be aborted. Raises
    RuntimeError if the ranks cannot connect."""
    if job.timeout:
        with suppress(RuntimeError):  # mpi has no timeout, nor has fake in torch 2.11
            if hasattr(group, "set_timeout"):
                group.set_timeout(job.timeout)
            else:  # private API of older versions
                dist.distributed_c10d._set_pg_timeout(job.timeout, group)
    start = time.perf_counter()
    dist.all_reduce(torch.ones(1, device=job.device), group=group)
    if job.device.type == "cuda":
        torch.cuda.synchronize(job.device)
    return time.perf_counter() - start


def abort_group(group: Group) -> None:
    """Abort the groups of a case that have not been aborted yet, from any thread, concurrently: an
    abort in NCCL waits for the kernels of the other groups (NVIDIA/nccl#1013). Errors are ignored.
    """
    with abort_lock:
        new = [tested for tested in (group.workload, *group.extra) if tested not in group.aborted]
        group.aborted.extend(new)
        with ThreadPoolExecutor(len(new) or 1) as threads:
            threads.map(lambda tested: tested.abort(), new)


def destroy(group: dist.ProcessGroup) -> None:
    """Destroy an idle group. The case is complete, so an error that NCCL reports now is logged."""
    try:
        dist.destroy_process_group(group)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        log.warning(f"rank {dist.get_rank()}, closing a group: {type(error).__name__}: {reason}")


def close_extra(group: Group) -> None:
    """Close the groups that the workload created. Each member calls this by itself."""
    gc.collect()  # frees the remains of the workload: NCCL would wait for its CUDA graphs
    for tested in group.extra:
        destroy(tested)
    group.extra.clear()


def close_group(group: Group, failed: bool = False) -> None:
    """Close the groups of a case. Each member calls this by itself. failed: work may still be in
    flight. Peers on gloo notice the socket that closes with the last reference to the group."""
    if not failed:
        close_extra(group)
        destroy(group.workload)
        destroy(group.control)
        return
    gc.collect()  # first: an abort in NCCL waits for CUDA graphs, even those in reference cycles
    abort_group(group)
    with suppress(RuntimeError):  # the CUDA context may be lost
        torch.cuda.empty_cache()
    for tested in (*group.extra, group.workload):
        # Destroying the group would wait forever for work in flight (pytorch/pytorch#141510). An
        # abort in NCCL may raise before torch drops the group, or torch has dropped it already.
        # Private API; works in torch 2.11, 2.14 and 2.15 (with NCCL: on tests/cudalab only).
        # Older versions abort only NCCL. There, gloo's threads end with the last reference, once a
        # peer has closed its sockets.
        can_abort = hasattr(tested, "abort") or dist.get_backend(tested) == "nccl"
        drop = dist.distributed_c10d._abort_process_group if can_abort else destroy
        with suppress(RuntimeError, ValueError):
            drop(tested)
    destroy(group.control)


class GroupCache:
    """The groups of the most recent cases, for reuse by cases over the same ranks: connecting takes
    longer than a short case. All ranks of the job call `acquire` and `release` with the same
    arguments, so that all keep the same sets."""

    def __init__(self, job: Job) -> None:
        self.job = job
        # by ranks and subgroups, least recently used first; None for a set without this rank
        self.cached: dict[tuple[tuple[int, ...], Subgroups], Group | None] = {}

    def acquire(self, ranks: tuple[int, ...], subgroups: Subgroups | None = None) -> Group | None:
        """Return the groups of a case; None on ranks outside it. Those that are not new have an
        empty `start_up_s`. subgroups: a partition of the ranks; by default one group."""
        key = ranks, subgroups or (ranks,)
        if key in self.cached:
            group = self.cached.pop(key)
            if group:
                group.start_up_s.clear()
        else:
            while len(self.cached) >= MAX_CACHED:
                self.close(next(iter(self.cached)))
            group = open_group(ranks, self.job, key[1])
        self.cached[key] = group
        return group

    def release(self, ranks: tuple[int, ...], subgroups: Subgroups, failed: bool) -> None:
        """End a case. Its groups stay open if it passed on all ranks. A rank on which it failed has
        already closed them."""
        if failed:
            self.close((ranks, subgroups), failed)
        elif group := self.cached[ranks, subgroups]:
            close_extra(group)

    def close(self, key: Any, failed: bool = False) -> None:
        """Close a set, if it is open on this rank."""
        if group := self.cached.pop(key, None):
            close_group(group, failed)

    def close_all(self) -> None:
        for key in list(self.cached):
            self.close(key)
