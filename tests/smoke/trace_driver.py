"""Profiles a decoder under DDP and under FSDP2: trace_driver.py PATH, where {rank} and {case}."""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

from common.decoder import Decoder, decoder_config
from common.trace import profile_steps, trace_path

dist.init_process_group("gloo")
for case in ("ddp", "fsdp2"):
    torch.manual_seed(0)
    model = Decoder(decoder_config("10m", layers=2, width=96))
    if case == "fsdp2":
        for layer in model.blocks:
            fully_shard(layer)
        fully_shard(model)
    net = DistributedDataParallel(model) if case == "ddp" else model
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    tokens = torch.randint(256, (2, 64))

    def step(net=net, optimizer=optimizer, tokens=tokens) -> None:
        optimizer.zero_grad()
        with record_function("Forward"):
            loss = net(tokens).float().square().mean()
        with record_function("Backward"):
            loss.backward()
        with record_function("Optimizer"):
            optimizer.step()

    step()
    path = trace_path(sys.argv[1], dist.get_rank(), case)
    summary = profile_steps(step, 3, torch.device("cpu"), path)
    line = json.dumps({"case": case, "rank": dist.get_rank(), **summary}) + "\n"
    os.write(1, line.encode())  # at once: ranks do not interleave
dist.destroy_process_group()
