"""How much slower is a DDP step with embeddings on a server than with a copy on every rank?

What you will learn: how to look up embeddings over RPC while the dense layers are under DDP.
Distributed autograd sends the gradients of the embeddings to the server, where a distributed
optimizer updates the table.

    $ torchrun --nproc-per-node 3 examples/ddp_rpc.py
                    median ms   95% interval
    server              51.30   47.32 to 56.12
    copies               3.13   2.89 to 6.37
    difference          47.22   41.84 to 52.39
    3 ranks, gloo, the last is the server, parameters correct: True

difference is the median of the differences per round, not the difference of the medians. Here, 3
processes share 2 cores, and their RPC threads poll, which slows the steps with the server down.

BSD-3-Clause: copy this. Numbers: virtual machine, 2 cores, torch 2.15.
"""

import copy
import gc
import logging
import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch import Tensor, nn
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer
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


TABLES: list[nn.EmbeddingBag] = []  # used on the server only


def look_up(indices: Tensor) -> Tensor:
    return TABLES[0](indices)  # for each row of indices, the sum of its embeddings


def get_weight() -> Tensor:
    return TABLES[0].weight


def main() -> int:
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    trainers = ranks - 1  # the last rank is the server
    if trainers == 0:
        raise SystemExit("expected 2 ranks or more: torchrun --nproc-per-node 3 ...")
    logging.captureWarnings(True)  # rpc and optim of torch 2.11 to 2.15 warn about their own calls
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=1)  # so that updates do not race
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        device = torch.device(device.type, dist.get_node_local_rank())
        torch.accelerator.set_device_index(device.index)
        # the server uses the last device of its node; replies use the reverse map
        options.set_device_map("server", {device: int(os.environ["LOCAL_WORLD_SIZE"]) - 1})
    torch.manual_seed(0)  # the same weights everywhere
    table = nn.EmbeddingBag(1000, 64, mode="sum").to(device)
    dense = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)).to(device)
    TABLES.append(table)  # before RPC starts, so that the first call finds it
    name = f"trainer{rank}" if rank < trainers else "server"
    rpc.init_rpc(name, rank=rank, world_size=ranks, rpc_backend_options=options)
    if rank == trainers:
        rpc.shutdown()  # serves requests until all ranks have called it
        return 0
    backend = dist.get_default_backend_for_device(device)
    device_id = None if device.type == "cpu" else device
    timeout = timedelta(seconds=120)  # a hang ends with an error
    dist.init_process_group(
        backend, timeout=timeout, rank=rank, world_size=trainers, device_id=device_id
    )
    torch.manual_seed(rank)  # different data on each trainer
    indices, targets = torch.randint(1000, (64, 4)).to(device), torch.randint(8, (64,)).to(device)
    # [wrap]
    model = DistributedDataParallel(copy.deepcopy(dense))
    references = [rpc.remote("server", get_weight), *map(rpc.RRef, model.parameters())]
    optimizer = DistributedOptimizer(torch.optim.SGD, references, lr=0.05)

    def step() -> None:
        with dist_autograd.context() as context:  # stores the gradients of this step
            rows = rpc.rpc_sync("server", look_up, args=(indices,))
            dist_autograd.backward(context, [nn.functional.cross_entropy(model(rows), targets)])
            optimizer.step(context)

    # [/wrap]
    ddp = DistributedDataParallel(nn.Sequential(table, dense))
    ddp_optimizer = torch.optim.SGD(dense.parameters(), lr=0.05)
    # DDP averages the gradients of the table, the server sums them; hence the factor
    ddp_optimizer.add_param_group({"params": table.parameters(), "lr": 0.05 * trainers})

    def ddp_step() -> None:
        ddp_optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(indices), targets).backward()
        ddp_optimizer.step()

    for _ in range(3):
        step()
        ddp_step()
        dist.barrier()  # wait until all trainers have updated the table
    got = [rpc.rpc_sync("server", get_weight), *model.parameters()]
    same = all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, ddp.parameters(), strict=True))
    compare({"server": step, "copies": ddp_step}, device)
    if rank == 0:
        print(f"{ranks} ranks, {backend}, the last is the server, parameters correct: {same}")
    dist.destroy_process_group()
    rpc.shutdown()
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
