"""The times of an all-reduce and of a copy, by size: see docs/library.md."""

import torch
import torch.distributed as dist

from common.groups import GroupCache
from common.join import join, leave
from common.stats import Times
from common.table import render
from common.timing import StopRule, TimedLoop, Workload

COLUMNS = {
    "bytes": lambda row: f"{row[0]:,}",
    "all-reduce": lambda row: str(row[1].mean()),
    "copy": lambda row: str(row[1].mean("copy")),
    "all-reduce / copy": lambda row: row[1].ratio("step", "copy").as_factor(),
}

job = join()
ranks = tuple(range(job.world_size))
groups = GroupCache(job)
group = groups.acquire(ranks)


def measure(size):
    """Return the times of both on all ranks, on rank 0; None elsewhere."""
    x = torch.ones(size // 4, device=job.device)
    y = torch.empty_like(x)
    work = Workload(
        step=lambda: dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group.workload),
        parts={"copy": lambda: y.copy_(x)},
        compared=["copy"],
    )
    mine = TimedLoop(work, group, job.device, StopRule(max_seconds=1)).run()
    times = job.gather(mine)
    return Times.merge(times) if times else None


rows = [(size, measure(size)) for size in (2**14, 2**20)]
if job.rank == 0:
    print(render(COLUMNS, rows))
groups.close_all()
leave(job)
