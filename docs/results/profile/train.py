"""The program whose traces are here: torchrun --nproc-per-node 2 train.py (docs/profile.md)"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile, schedule

dist.init_process_group("gloo")
rank = dist.get_rank()
layers = [nn.Sequential(nn.Linear(512, 512, bias=False), nn.ReLU()) for _ in range(4)]
model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batch = torch.randn(1024 if rank == 1 else 256, 512)  # rank 1 has a larger batch


def save(profiler):
    profiler.export_chrome_trace(f"rank{rank}.json.gz")


plan = schedule(wait=2, warmup=1, active=3, repeat=1)
with profile(schedule=plan, on_trace_ready=save, record_shapes=True) as profiler:
    for _ in range(6):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        profiler.step()
dist.destroy_process_group()
