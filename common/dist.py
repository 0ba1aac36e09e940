"""Who this process is, and its process groups.

The default group is the job's control group: gloo over all ranks, for metadata and decisions. The
group under test is made for each case, over exactly its ranks, for nothing but the workload.
"""

import gc
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# The default group of the time of this import is a default of these functions. The first optimizer
# imports them: by then there is a group, and it would outlive destroy_process_group (torch 2.15).
import torch.distributed.nn.functional

from common.cli import end, write
from common.private_torch import abort_process_group

# Ranks outside a case wait for all of it, so a wait has no useful limit; hangs are the watchdog's.
FOREVER = timedelta(days=30)


@dataclass(frozen=True)
class Job:
    """This process within the job that torchrun (or srun) started."""

    rank: int
    local_rank: int  # on its node, from 0
    world_size: int
    local_world_size: int
    device: torch.device
    backend: str  # of the groups under test
    store: dist.Store  # where the ranks met


@dataclass(frozen=True)
class Group:
    """The ranks of a case."""

    ranks: tuple[int, ...]
    test: dist.ProcessGroup  # under test; where several work at the same time, this rank's
    control: dist.ProcessGroup  # gloo, for barriers and decisions between timed blocks
    # that the workload makes itself, e.g. a DeviceMesh's; they end with the case's
    more: list[dist.ProcessGroup] = field(default_factory=list)


def local_rank() -> int:
    """This rank's number on its node, from 0: LOCAL_RANK.

    `torchrun --virtual-local-rank` sets 0 for all ranks, but torchrun numbers them node by node.
    That does not help where nodes have different numbers of ranks: there LOCAL_RANK is taken.
    """
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
    rank, number, world_size, here, nodes = (int(os.environ.get(name, "0")) for name in names)
    by_torchrun_evenly = nodes > 0 and world_size == nodes * here
    return rank % here if by_torchrun_evenly else number


def open_group(
    ranks: tuple[int, ...], job: Job, teams: Sequence[Sequence[int]] | None = None
) -> Group | None:
    """The groups of a case; None on a rank outside it. All ranks of the job call it together.

    teams: parts of the ranks, each of which has a group under test of its own.
    """
    with peers():
        control: Any = dist.new_group(list(ranks), backend="gloo", timeout=FOREVER)
    parts = [list(team) for team in teams or [ranks]]
    test: Any = dist.new_subgroups_by_enumeration(parts, FOREVER, job.backend)[0]
    return Group(ranks, test, control) if job.rank in ranks else None


def connect(group: Group, device: torch.device) -> None:
    """NCCL connects in its first collective; what fails before that could not be aborted."""
    dist.all_reduce(torch.ones(1, device=device), group=group.test)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def abort_group(group: Group) -> None:
    """End what is in flight on the groups under test; safe from another thread, and twice."""
    for each in (group.test, *group.more):
        with suppress(RuntimeError):
            each.abort()


def close_group(group: Group, failed: bool = False) -> None:
    """Its members call it, each for itself. failed: with work in flight. Gloo's peers notice that
    once the sockets are closed, which is when nothing refers to the group any more."""
    gc.collect()  # what is left of the workload; NCCL would wait for its CUDA graphs
    drop = abort_process_group if failed else dist.destroy_process_group
    for each in (*group.more, group.test):
        drop(each)
    dist.destroy_process_group(group.control)
    if failed:
        with suppress(RuntimeError):  # of a CUDA context that is lost
            torch.cuda.empty_cache()


def gather(value: Any) -> list[Any] | None:
    """Each rank's value on rank 0 of the job; None elsewhere."""
    with peers():
        rows = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(value, rows)
        return rows


def share(value: Any) -> Any:
    """The value of the job's rank 0, on all ranks."""
    with peers():
        box = [value]
        dist.broadcast_object_list(box)
        return box[0]


def agree(value: Any, group: Group) -> Any:
    """The value of the group's first rank, on all members.

    Where `share` fails, the job has lost a process; where this fails, it is the case that fails.
    """
    box = [value]
    dist.broadcast_object_list(box, group_src=0, group=group.control)
    return box[0]


@contextmanager
def peers() -> Iterator[None]:
    """Around the control group's collectives and calls of the store: their errors mean that a
    process has died. Its launcher knows which, and ends the others; where not, they end here."""
    try:
        yield
    except RuntimeError as error:
        if local_rank() == 0:
            write(f"rank {dist.get_rank()} lost a peer: {str(error).splitlines()[0]}")
        time.sleep(10)
        end(1)
