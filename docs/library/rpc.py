"""The median time of an RPC call of each trainer: see docs/library.md."""

from time import perf_counter

import torch
from torch.distributed.rpc import rpc_sync

from common.join import join, leave
from common.rpc import Roles, start, stop
from common.stats import median
from common.table import render

COLUMNS = {
    "caller": lambda row: row[0],
    "wire": lambda row: row[1],
    "median": lambda row: str(row[2]),
}

job = join()
server = job.world_size - 1
on_cuda = frozenset(range(job.world_size) if job.device.type == "cuda" else ())
roles = Roles(trainers=range(server), servers=range(server, job.world_size), cuda=on_cuda)
start(job, roles)
row = None
if job.rank in roles.trainers:
    x = torch.ones(2**18, device=job.device)
    samples = []
    for _ in range(60):
        began = perf_counter()
        result = rpc_sync(roles.name(server), torch.add, args=(x, x))
        result.sum().item()  # waits for the device
        samples.append(perf_counter() - began)
    assert result.device == x.device
    row = roles.name(job.rank), roles.wire(job.rank, server), median(samples[10:])
if rows := job.gather(row):  # on rank 0
    print(render(COLUMNS, [row for row in rows if row]))
stop()
leave(job)
