"""What do embeddings on a server cost a DDP step, beside a copy of them on every rank?

What you will learn: to look embeddings up over RPC while the dense part is under DDP. Distributed
autograd brings the gradients to the server, and a distributed optimizer updates the table there.

    $ torchrun --nproc-per-node 3 examples/ddp_rpc.py
                    median ms   95 % interval
    server              51.30   47.32 to 56.12
    copies               3.13   2.89 to 6.37
    difference          47.22   41.84 to 52.39
    3 ranks, gloo, the last is the server, parameters right: True

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
    """Time two kinds of steps in turns and print their difference. All trainers call it."""
    gc.disable()  # a collection on one rank would stop them all
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for i in range(16):  # forwards, then backwards: a drift of the machine cancels
        for name in kinds if i % 2 == 0 else reversed(kinds):
            dist.barrier()  # no clock starts while another trainer is still busy
            stamps = []
            for _ in range(4):  # the first one finds cold caches: its end starts the clock
                kinds[name]()
                torch.get_device_module(device).synchronize()  # does nothing on the CPU
                stamps.append(time.perf_counter() * 1e3)
            slowest = torch.tensor(stamps, dtype=torch.float64, device=device).diff()
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)  # of each step: the others wait for it
            times[name].append(statistics.median(slowest.tolist()))
    times["difference"] = [a - b for a, b in zip(*times.values(), strict=True)]
    if dist.get_rank() == 0:
        print(f"{'':15}{'median ms':>10}   95 % interval")
        for name in times:
            x = sorted(times[name])  # in 98 of 100 runs the 4th to the 13th hold the median
            print(f"{name:15}{statistics.median(x):10.2f}   {x[3]:.2f} to {x[12]:.2f}")


TABLES: list[nn.EmbeddingBag] = []  # that of the last rank is used


def look_up(indices: Tensor) -> Tensor:
    return TABLES[0](indices)  # the sum of the rows in each line of indices


def get_weight() -> Tensor:
    return TABLES[0].weight


def main() -> int:
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    trainers = ranks - 1  # the last rank is the server
    if trainers == 0:
        raise SystemExit("expected 2 ranks or more: torchrun --nproc-per-node 3 ...")
    logging.captureWarnings(True)  # torch 2.11 to 2.15 warn of what their own rpc and optim do
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=1)  # so updates do not race
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        device = torch.device(device.type, dist.get_node_local_rank())
        torch.accelerator.set_device_index(device.index)
        # to the last device of the server's node; answers take the same way back
        options.set_device_map("server", {device: int(os.environ["LOCAL_WORLD_SIZE"]) - 1})
    torch.manual_seed(0)  # the same weights everywhere
    table = nn.EmbeddingBag(1000, 64, mode="sum").to(device)
    dense = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)).to(device)
    TABLES.append(table)  # before RPC starts, so that every call finds it
    name = f"trainer{rank}" if rank < trainers else "server"
    rpc.init_rpc(name, rank=rank, world_size=ranks, rpc_backend_options=options)
    if rank == trainers:
        rpc.shutdown()  # when all ranks call it: until then this one answers
        return 0
    backend = dist.get_default_backend_for_device(device)
    device_id = None if device.type == "cpu" else device
    limit = timedelta(seconds=120)  # a hang ends with an error
    dist.init_process_group(
        backend, timeout=limit, rank=rank, world_size=trainers, device_id=device_id
    )
    torch.manual_seed(rank)  # each trainer has data of its own
    indices, targets = torch.randint(1000, (64, 4)).to(device), torch.randint(8, (64,)).to(device)
    # [wrap]
    model = DistributedDataParallel(copy.deepcopy(dense))
    references = [rpc.remote("server", get_weight), *map(rpc.RRef, model.parameters())]
    optimizer = DistributedOptimizer(torch.optim.SGD, references, lr=0.05)

    def step() -> None:
        with dist_autograd.context() as context:  # it has the gradients, not the parameters
            rows = rpc.rpc_sync("server", look_up, args=(indices,))
            dist_autograd.backward(context, [nn.functional.cross_entropy(model(rows), targets)])
            optimizer.step(context)

    # [/wrap]
    ddp = DistributedDataParallel(nn.Sequential(table, dense))
    ddp_optimizer = torch.optim.SGD(dense.parameters(), lr=0.05)  # DDP averages, a server adds up:
    ddp_optimizer.add_param_group({"params": table.parameters(), "lr": 0.05 * trainers})

    def ddp_step() -> None:
        ddp_optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(indices), targets).backward()
        ddp_optimizer.step()

    for _ in range(3):
        step()
        ddp_step()
        dist.barrier()  # all trainers have updated the table
    got = [rpc.rpc_sync("server", get_weight), *model.parameters()]
    right = all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, ddp.parameters(), strict=True))
    compare({"server": step, "copies": ddp_step}, device)
    if rank == 0:
        print(f"{ranks} ranks, {backend}, the last is the server, parameters right: {right}")
    dist.destroy_process_group()
    rpc.shutdown()
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main())
