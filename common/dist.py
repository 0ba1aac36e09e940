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

# Functions of this module have a default argument: the default group at the time of the import.
# The first optimizer imports it, when there is a group already, and that group would then outlive
# destroy_process_group (torch 2.15). So it is imported here, before there is one.
import torch.distributed.nn.functional

from common.cli import end, write
from common.private_torch import abort_process_group

# Ranks outside a case wait until it is over, so no limit would be useful. The watchdog ends hangs.
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
    store: dist.Store  # the store in which the ranks met


@dataclass(frozen=True)
class Group:
    """The ranks of a case."""

    ranks: tuple[int, ...]
    test: dist.ProcessGroup  # under test; where a case has several teams, that of this rank's team
    control: dist.ProcessGroup  # gloo, for barriers and decisions between timed blocks
    # Groups that the workload makes itself, e.g. those of a DeviceMesh. They end with the case.
    more: list[dist.ProcessGroup] = field(default_factory=list)


def local_rank() -> int:
    """This rank's number on its node, from 0: LOCAL_RANK.

    `torchrun --virtual-local-rank` sets 0 for all ranks. But torchrun numbers the ranks node by
    node, so RANK tells the number, too. Where nodes have different numbers of ranks it does not:
    there LOCAL_RANK is taken as it is.
    """

    def value(name: str) -> int:
        return int(os.environ.get(name, "0"))

    nodes = value("GROUP_WORLD_SIZE")
    ranks_of_node = value("LOCAL_WORLD_SIZE")
    by_torchrun_evenly = nodes > 0 and value("WORLD_SIZE") == nodes * ranks_of_node
    return value("RANK") % ranks_of_node if by_torchrun_evenly else value("LOCAL_RANK")


def open_group(
    ranks: tuple[int, ...], job: Job, teams: Sequence[Sequence[int]] | None = None
) -> Group | None:
    """The groups of a case; None on a rank outside it. All ranks of the job call it together.

    teams: parts of the ranks. Each part gets a group under test of its own.
    """
    with peers():
        control: Any = dist.new_group(list(ranks), backend="gloo", timeout=FOREVER)
    parts = [list(team) for team in teams or [ranks]]
    test: Any = dist.new_subgroups_by_enumeration(parts, FOREVER, job.backend)[0]
    return Group(ranks, test, control) if job.rank in ranks else None


def connect(group: Group, device: torch.device) -> None:
    """Connect the group under test: NCCL does so in the first collective. A group that is not
    connected could not be aborted if the case fails."""
    dist.all_reduce(torch.ones(1, device=device), group=group.test)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def abort_group(group: Group) -> None:
    """End the work in flight on the groups under test. Another thread may call it, also twice."""
    for tested in (group.test, *group.more):
        with suppress(RuntimeError):
            tested.abort()


def close_group(group: Group, failed: bool = False) -> None:
    """Close the groups of a case. Each member calls this on its own.

    failed: work may still be in flight. Peers on gloo notice a closed socket, and gloo closes it
    when the last reference to the group is gone.
    """
    gc.collect()  # frees what is left of the workload: NCCL would wait for its CUDA graphs
    close = abort_process_group if failed else dist.destroy_process_group
    for tested in (*group.more, group.test):
        close(tested)
    dist.destroy_process_group(group.control)
    if failed:
        with suppress(RuntimeError):  # the CUDA context may be lost
            torch.cuda.empty_cache()


def gather(value: Any) -> list[Any] | None:
    """On rank 0 the values of all ranks of the job, by rank; None on the others."""
    with peers():
        rows = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(value, rows)
        return rows


def share(value: Any) -> Any:
    """The value that rank 0 of the job has, on all ranks."""
    with peers():
        box = [value]
        dist.broadcast_object_list(box)
        return box[0]


def agree(value: Any, group: Group) -> Any:
    """The value that the group's first rank has, on all members.

    If `share` fails, the job has lost a process. If this fails, only the case fails.
    """
    box = [value]
    dist.broadcast_object_list(box, group_src=0, group=group.control)
    return box[0]


@contextmanager
def peers() -> Iterator[None]:
    """For collectives of the job's control group and calls of the store. An error in them means
    that a process has died. The launcher knows which one and ends the others; if it does not, they
    end here."""
    try:
        yield
    except RuntimeError as error:
        if local_rank() == 0:
            write(f"rank {dist.get_rank()} lost a peer: {str(error).splitlines()[0]}")
        time.sleep(10)
        end(1)
