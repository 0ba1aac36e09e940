"""How much slower is a DDP step whose gradients are averaged by servers over RPC?

What you will learn: how to write a communication hook for DistributedDataParallel that returns a
future, and a server that replies as soon as it has received a bucket from all trainers. These
servers store no parameters; the server of batch_update_ps.py does.

    $ torchrun --nproc-per-node 3 examples/parameter_server.py
                    median ms   95% interval
    servers             59.63   45.59 to 73.04
    all-reduce          27.81   23.09 to 34.10
    difference          28.58   19.60 to 39.04
    3 ranks, gloo, servers: 1, gradients correct: True

difference is the median over rounds of servers - all-reduce, not the difference of the medians.

BSD-3-Clause: copy this. Numbers: virtual machine, 2 cores, torch 2.15.
"""

import copy
import gc
import os
import statistics
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import rpc
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel


def compare(kinds: dict[str, Callable[[], object]], device: torch.device) -> None:
    """Time two kinds of steps alternately and print the difference. All trainers must call it."""
    gc.disable()  # a collection on one rank would delay all ranks
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for i in range(16):  # in alternating order, so that a gradual slowdown cancels out
        for name in kinds if i % 2 == 0 else reversed(kinds):
            dist.barrier()  # all trainers start their clocks together
            stamps = []
            for _ in range(5):  # the first one is an untimed warm-up
                kinds[name]()
                torch.get_device_module(device).synchronize()  # no-op on the CPU
                stamps.append(time.perf_counter() * 1e3)
            slowest = torch.tensor(stamps, dtype=torch.float64, device=device).diff()
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)  # the slowest trainer of each step
            times[name].append(statistics.median(slowest.tolist()))
    times["difference"] = [a - b for a, b in zip(*times.values(), strict=True)]
    if dist.get_rank() == 0:
        print(f"{'':15}{'median ms':>10}   95% interval")
        for name in times:
            x = sorted(times[name])  # the 4th to the 13th contain the median in 98 of 100 runs
            print(f"{name:15}{statistics.median(x):10.2f}   {x[3]:.2f} to {x[12]:.2f}")


# [server]
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
TRAINERS = max(1, RANKS * 2 // 3)  # the first ranks; the remaining ranks are servers
SERVERS = RANKS - TRAINERS
BUCKETS: dict[int, tuple[list[Tensor], Future[Tensor]]] = {}  # on a server: received so far
LOCK = threading.Lock()  # RPC runs `average` in several threads


@rpc.functions.async_execution  # RPC replies when the future has a result; no thread blocks
def average(index: int, gradient: Tensor) -> Future[Tensor]:
    with LOCK:
        gradients, mean = BUCKETS.setdefault(index, ([], Future()))
        gradients.append(gradient)
        if is_last := len(gradients) == TRAINERS:
            del BUCKETS[index]
    if is_last:
        mean.set_result(torch.stack(gradients).mean(0))
    return mean


# [/server]
# [hook]
def server_hook(state: None, bucket: dist.GradBucket) -> Future[Tensor]:
    """Average the gradient of a bucket on a server. It is copied through CPU memory."""
    gradient, index = bucket.buffer(), bucket.index()
    future = rpc.rpc_async(f"server{index % SERVERS}", average, args=(index, gradient.cpu()))
    return future.then(lambda future: future.wait().to(gradient.device))


# [/hook]


def main() -> int:
    if SERVERS == 0:
        raise SystemExit("expected 2 ranks or more: torchrun --nproc-per-node 3 ...")
    warnings.filterwarnings("ignore", "You are using a Backend")  # from init_rpc in torch 2.11-2.15
    rank = int(os.environ["RANK"])
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        device = torch.device(device.type, dist.get_node_local_rank())
        torch.accelerator.set_device_index(device.index)
    options = rpc.TensorPipeRpcBackendOptions(devices=[] if device.type == "cpu" else [device])
    name = f"trainer{rank}" if rank < TRAINERS else f"server{rank - TRAINERS}"
    rpc.init_rpc(name, rank=rank, world_size=RANKS, rpc_backend_options=options)
    if rank >= TRAINERS:
        rpc.shutdown()  # serves requests until all ranks have called it
        return 0
    backend = dist.get_default_backend_for_device(device)
    device_id = None if device.type == "cpu" else device
    timeout = timedelta(seconds=120)  # a hang ends with an error
    dist.init_process_group(
        backend, timeout=timeout, rank=rank, world_size=TRAINERS, device_id=device_id
    )
    torch.manual_seed(rank)  # different data on each trainer; DDP sends rank 0's weights
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]).to(device)
    x = torch.randn(64, 512, device=device)
    models = [DistributedDataParallel(m, bucket_cap_mb=1) for m in (model, copy.deepcopy(model))]
    models[0].register_comm_hook(None, server_hook)

    def train(model: nn.Module) -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    servers, all_reduce = (partial(train, model) for model in models)
    compare({"servers": servers, "all-reduce": all_reduce}, device)
    pairs: Any = zip(*(model.parameters() for model in models), strict=True)
    same = all(torch.allclose(a.grad, b.grad, atol=1e-7) for a, b in pairs)
    if rank == 0:
        print(f"{RANKS} ranks, {backend}, servers: {SERVERS}, gradients correct: {same}")
    dist.destroy_process_group()
    rpc.shutdown()
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
