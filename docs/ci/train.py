"""A training loop that writes a report of its step times: see docs/ci.md."""

import argparse
import json
import sys
import time
from datetime import UTC, datetime

import torch
import torch.distributed as dist
from cpu_load import CpuLoad

parser = argparse.ArgumentParser()
parser.add_argument("--json", metavar="PATH", help="report of the step times")
args, remaining = parser.parse_known_args()  # remaining: the flags of your own parser

dist.init_process_group()
started_at, load = datetime.now(UTC).isoformat(), CpuLoad()

# your model, optimizer and data
model = torch.nn.Linear(512, 512)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batch = torch.randn(32, 512)

step_times = []  # seconds
for _ in range(50):
    start = time.perf_counter()
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    step_times.append(time.perf_counter() - start)

slowest = torch.tensor(step_times)  # with a process group of NCCL alone: device="cuda"
dist.all_reduce(slowest, dist.ReduceOp.MAX)
if args.json and dist.get_rank() == 0:
    run = {"schema": "torchrun-bench/3", "benchmark": "my_training", "started_at": started_at}
    run |= {"environment": {"torch": torch.__version__}, "argv": sys.argv}
    case = {"name": "step", "key": {"batch_size": 32}, "ranks": [0]}
    case["samples_s"] = {"step": [slowest.tolist()]}
    end = {"status": "complete", "others": [load.of_others()]}
    with open(args.json, "w") as file:
        for line in (run, case, end):
            file.write(json.dumps(line) + "\n")
dist.destroy_process_group()
