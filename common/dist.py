"""Who this process is, and its process groups.

The default group is the job's control group: gloo over all ranks, for metadata and decisions. The
group under test is made for each case, over exactly its ranks, for nothing but the workload.
"""

import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

# Ranks outside a case wait for all of it, so a wait has no useful limit; hangs are the watchdog's.
FOREVER = timedelta(days=30)


@dataclass(frozen=True)
class Job:
    """This process within the job that torchrun (or srun) started."""

    rank: int
    local_rank: int
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


def open_group(
    ranks: tuple[int, ...], job: Job, teams: Sequence[Sequence[int]] | None = None
) -> Group | None:
    """The groups of a case; None on a rank outside it. All ranks of the job call it together.

    teams: parts of the ranks, each of which has a group under test of its own. They are connected
    here: NCCL connects in its first collective, and what fails before that could not be aborted.
    """
    control: Any
    test: Any = None
    with peers():
        control = dist.new_group(list(ranks), backend="gloo", timeout=FOREVER)
    for team in teams or [ranks]:
        new = dist.new_group(list(team), backend=job.backend, timeout=FOREVER)
        test = new if job.rank in team else test
    if job.rank not in ranks:
        return None
    group = Group(ranks, test, control)
    try:
        dist.all_reduce(torch.ones(1, device=job.device), group=test)
        if job.device.type == "cuda":
            torch.cuda.synchronize(job.device)
    except RuntimeError:
        close_group(group, failed=True)
        raise
    return group


def abort_group(group: Group) -> None:
    """End what is in flight on the groups under test; safe from another thread, and twice."""
    for each in (group.test, *group.more):
        with suppress(RuntimeError):
            each.abort()


def close_group(group: Group, failed: bool = False) -> None:
    """Its members call it, each for itself. failed: with work in flight."""
    gc.collect()  # what is left of the workload; NCCL would wait for its CUDA graphs
    # destroying an NCCL group would wait for its work, for ever (pytorch/pytorch#141510)
    drop = dist.distributed_c10d._abort_process_group if failed else dist.destroy_process_group
    for each in (*group.more, group.test):
        drop(each)
    dist.destroy_process_group(group.control)
    if failed:
        with suppress(RuntimeError):  # of a CUDA context that is lost
            torch.cuda.empty_cache()


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any] | None:
    """Each rank's value on the group's first rank; None elsewhere."""
    with peers():
        rows = [None] * dist.get_world_size(group) if dist.get_rank(group) == 0 else None
        dist.gather_object(value, rows, group_dst=0, group=group)
        return rows


def share(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """The value of the group's first rank, on all its ranks."""
    with peers():
        box = [value]
        dist.broadcast_object_list(box, group_src=0, group=group)
        return box[0]


@contextmanager
def peers() -> Iterator[None]:
    """Around the control group's collectives and calls of the store: their errors mean that a
    process has died. Its launcher knows which, and ends the others; where not, they end here."""
    try:
        yield
    except RuntimeError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            line = f"rank {dist.get_rank()} lost a peer: {str(error).splitlines()[0]}"
            print(line, file=sys.stderr, flush=True)
        time.sleep(10)
        os._exit(1)


def node_of_each(environment: dict[str, Any]) -> list[int]:
    """The node of each rank, from 0. A host may run several: there local ranks start anew."""
    seen: Counter[tuple[str, int]] = Counter()
    nodes: list[tuple[str, int]] = []
    for row in environment["ranks"]:
        seen[row["host"], row["local_rank"]] += 1
        nodes.append((row["host"], seen[row["host"], row["local_rank"]]))
    numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
    return [numbers[node] for node in nodes]


def partition(spec: str, nodes: list[int]) -> list[list[int]]:
    """Groups of ranks, of one size and disjoint. nodes: of each rank.

    `world`, `rank` (each by itself), `node`, `cross` (the first ranks of all nodes, the second
    ones, ...), or ranks as `0,1/2,3` and `0-3/4-7`. Raises ValueError.
    """

    def span(word: str) -> range:
        first, _, last = word.partition("-")
        return range(int(first), int(last or first) + 1)

    everyone = list(range(len(nodes)))
    members = [[r for r in everyone if nodes[r] == node] for node in range(max(nodes) + 1)]
    cross = [list(ranks) for ranks in zip_longest(*members)]  # uneven nodes: with None
    named = {"world": [everyone], "rank": [[r] for r in everyone], "node": members, "cross": cross}
    groups = named.get(spec, [])
    with suppress(ValueError):  # what is wrong is found below
        for part in spec.split("/") if spec not in named else []:
            groups.append(sorted(r for word in part.split(",") for r in span(word)))
    ranks = [rank for group in groups for rank in group]
    one_size = len({len(group) for group in groups}) == 1
    if not (ranks and one_size) or len(set(ranks)) < len(ranks) or not set(ranks) <= set(everyone):
        what = f"world, node, cross or disjoint groups of one size among ranks 0 to {everyone[-1]}"
        got = f"got {spec} on {len(members)} nodes"
        raise ValueError(f"expected {what}, e.g. 0,1/2,3 or 0-3/4-7, {got}")
    return groups
