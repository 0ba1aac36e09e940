"""Process groups of a user's code: its default group is that of the case, so that its collectives
never meet those of the control group. Private API; works in torch 2.6, 2.11, 2.14 and 2.15."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.workloads import process_settings
from common.groups import Group, Job, barrier_before_new_group, connect, lost_peer, silenced
from harness.benchmark import Benchmark, Key


def guard_cases(bench: Benchmark, communicates: Callable[[Key], bool]) -> None:
    """Let each case run in a default group of its own, and restore the process's settings after it.
    communicates: whether the user's code in a case communicates."""

    @contextmanager
    def around(key: Key, group: Group) -> Iterator[None]:
        own = default_group(group, bench.job, own=communicates(key))
        with own, process_settings.around_case(bench):
            yield

    bench.around_case = around
    bench.after_case = partial(align_group_names, bench.job)


@contextmanager
def default_group(group: Group, job: Job, own: bool) -> Iterator[None]:
    """Make the group under test torch's default group, or another one of the same backend and ranks
    if `own`. Groups that the code creates are closed with the case, and aborted if it fails. Raises
    ValueError if the ranks of the case are not 0, 1, ..., since the default group defines ranks."""
    if group.ranks != tuple(range(len(group.ranks))):
        raise ValueError(f"expected ranks 0, 1, ... for the default group, got {group.ranks}")
    tested = group.workload
    if own:
        barrier_before_new_group(group)
        outside = job.world_size > len(group.ranks)  # ranks that do not call this
        with silenced(job.backend):
            made: Any = dist.new_group(
                [*group.ranks], backend=job.backend, use_local_synchronization=outside
            )
        group.extra.append(tested := made)
        connect(tested, job)
    c10d = dist.distributed_c10d
    before, create, earlier = dist.group.WORLD, c10d._new_group_with_tag, {*c10d._world.pg_map}

    def create_together(*args: Any, **options: Any) -> Any:
        if not options.get("use_local_synchronization"):
            barrier_before_new_group(group)
        created = create(*args, **options)
        if isinstance(created, dist.ProcessGroup):  # otherwise this rank is not a member
            group.extra.append(created)
        return created

    c10d._update_default_pg(tested)
    c10d._new_group_with_tag = create_together  # which most functions that create groups call
    try:
        yield
    finally:
        c10d._new_group_with_tag = create
        c10d._update_default_pg(before)
        known = {*earlier, *group.extra}
        group.extra.extend(split for split in [*c10d._world.pg_map] if split not in known)


def align_group_names(job: Job) -> None:
    """Set torch's counter of groups, which names them, to its maximum over ranks. All ranks call it
    after a case whose ranks have created groups on their own: with different names on its members
    the next group would wait forever."""
    world = dist.distributed_c10d._world
    count = torch.tensor(world.group_count)
    with lost_peer():
        dist.all_reduce(count, dist.ReduceOp.MAX, group=job.control)
    world.group_count = int(count)
