"""How much training time does a checkpoint cost: only the call, or also the steps after it?

What you will learn: how to measure the cost of an asynchronous save, which returns early, but slows
down the steps during its upload. stall = time of the call (`blocked`) + extra time of the steps
until the upload has finished.

    $ torchrun --nproc-per-node 2 examples/dcp_stall.py
    2 ranks, gloo, medians of 7 saves
               blocked s   stall s   95% interval
    save           0.095     0.095   0.081 to 0.117
    async_save     0.024     0.102   0.037 to 0.123

Here, async_save blocks for a quarter of the time, but the intervals of the two stalls overlap.

The checkpoints are written to TMPDIR, which all nodes must share.

BSD-3-Clause: copy this. Numbers: virtual machine, 2 cores, torch 2.15.
"""

import gc
import math
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

SAVES, IDLE = 8, 5  # saves of each kind (the first is a warm-up); steps before each save


def median_ci(samples: Sequence[float]) -> tuple[float, float, float]:
    """The median and its 95% interval, from the k-th smallest to the k-th largest sample."""
    x = sorted(samples)
    n = len(x)
    assert n >= 6, "a 95% interval requires at least 6 samples"
    k = 1  # the largest k with P(fewer than k of n samples are below the median) <= 2.5%
    while sum(math.comb(n, i) for i in range(k + 1)) <= 0.025 * 2**n:
        k += 1
    return statistics.median(x), x[k - 1], x[-k]


def join_with_gloo() -> tuple[torch.device, str]:
    """Join the process group. Returns the device of this rank, and the backend."""
    gc.disable()  # a collection on one rank would delay all ranks
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    backend = "gloo"
    if device.type != "cpu":  # saving also needs a backend for the CPU
        device = torch.device(device.type, dist.get_node_local_rank())
        torch.accelerator.set_device_index(device.index)
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    device_id = None if device.type == "cpu" else device
    timeout = timedelta(seconds=120)  # a hang ends with an error
    dist.init_process_group(backend, timeout=timeout, device_id=device_id)
    return device, backend


def shared_folder() -> str:
    """A folder created by rank 0, for all ranks."""
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(box)
    return box[0]


def print_saves(rounds: list[list[float]], backend: str) -> None:
    """Print a row for each kind of save: median times, and the interval of the stall."""
    print(f"{dist.get_world_size()} ranks, {backend}, medians of {SAVES - 1} saves")
    print("           blocked s   stall s   95% interval")
    for name, times in (("save", rounds[2::2]), ("async_save", rounds[3::2])):
        blocked = statistics.median([blocked for blocked, _ in times])
        stall, low, high = median_ci([stall for _, stall in times])
        print(f"{name:10}{blocked:10.3f}{stall:10.3f}   {low:.3f} to {high:.3f}")


def main() -> str | None:
    device, backend = join_with_gloo()
    uploads: Any = dist.new_group(backend="gloo")  # separate from the collectives of the steps
    rank = dist.get_rank()
    width = 512 if device.type == "cpu" else 8192
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(8)]).to(device)
    fully_shard(model, mesh=dist.init_device_mesh(device.type, (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = torch.randn(2, 32, width, device=device)
    saved: dict[str, torch.Tensor] = {}  # this rank's weights at the last save

    def train(more: Callable[[int], bool]) -> list[float]:
        """Train while `more` is true on any rank. Returns the time of each step in seconds."""
        times: list[float] = []
        keep_going = torch.ones((), device=device)
        while keep_going:
            start = time.perf_counter()
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            keep_going.fill_(more(len(times) + 1))
            dist.all_reduce(keep_going, op=dist.ReduceOp.MAX)
            torch.get_device_module(device).synchronize()  # no-op on the CPU
            times.append(time.perf_counter() - start)
        return times

    # [save]
    def save(path: str, overlap: bool) -> list[float]:
        """Returns `blocked` and `stall` in seconds; each is the maximum over ranks."""
        idle = statistics.median(train(lambda steps: steps < IDLE))
        saved.update({k: v.to_local().clone() for k, v in model.state_dict().items()})
        start = time.perf_counter()
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments}
        if overlap:
            response: Any = dcp.async_save(state, checkpoint_id=path, process_group=uploads)
        else:
            dcp.save(state, checkpoint_id=path)
        blocked = time.perf_counter() - start
        stall = blocked
        if overlap:
            upload = getattr(response, "upload_completion", response)
            during_upload = train(lambda steps: not upload.done())
            stall += sum(seconds - idle for seconds in during_upload)
            upload.result()  # raises the exception of a failed upload
        times = torch.tensor([blocked, stall], device=device)
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        return times.tolist()

    # [/save]
    folder = shared_folder()
    rounds = [save(f"{folder}/{i}", overlap=i % 2 == 1) for i in range(2 * SAVES)]  # alternately
    dcp.load({"model": model.state_dict()}, checkpoint_id=f"{folder}/{2 * SAVES - 1}")
    same = all(torch.equal(v.to_local(), saved[k]) for k, v in model.state_dict().items())
    dist.barrier()  # all ranks have loaded it
    if rank == 0:
        shutil.rmtree(folder)
        print_saves(rounds, backend)
    dist.destroy_process_group()
    return None if same else f"rank {rank}: the loaded checkpoint differs from the saved weights"


if __name__ == "__main__":
    sys.exit(main())
