"""How long does a step wait for a parameter server that updates the model once for all trainers?

What you will learn: how to write a parameter server with RPC. With `async_execution`, its function
returns a future, so no thread blocks. When the last gradient arrives, the server updates the model
and replies to all trainers.

    $ torchrun --nproc-per-node 3 examples/batch_update_ps.py
                    median ms   95% interval
    step                 4.51   1.94 to 7.74
    gradient alone       0.12   0.10 to 0.15
    difference           4.37   1.82 to 7.57
    3 ranks, the last is the server, parameters correct: True

difference is the median over rounds of step - gradient alone: the time to send the gradient, to
wait for the gradients of the other trainers and the update, and to receive the parameters.

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

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import rpc
from torch.futures import Future
from torch.nn.utils import parameters_to_vector, vector_to_parameters


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
class Server:
    """The parameters as one vector, and the gradients received since the last update."""

    def __init__(self, model: nn.Module, trainers: int) -> None:
        self.trainers, self.lock = trainers, threading.Lock()
        self.parameters = nn.Parameter(parameters_to_vector(model.parameters()).detach().cpu())
        self.optimizer = torch.optim.SGD([self.parameters], lr=0.1, momentum=0.9)
        self.gradients: list[Tensor] = []
        self.updated: Future[Tensor] = Future()


SERVER: list[Server] = []  # used on the server only


@rpc.functions.async_execution  # RPC replies when the future has a result
def update(gradient: Tensor) -> Future[Tensor]:
    server = SERVER[0]
    with server.lock:  # RPC runs this function in several threads
        updated = server.updated
        server.gradients.append(gradient)
        if len(server.gradients) == server.trainers:
            server.parameters.grad = torch.stack(server.gradients).mean(0)
            server.optimizer.step()
            server.gradients, server.updated = [], Future()
            updated.set_result(server.parameters.detach().clone())
    return updated


# [/server]
def main() -> int:
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    trainers = ranks - 1  # the last rank is the server
    if trainers == 0:
        raise SystemExit("expected 2 ranks or more: torchrun --nproc-per-node 3 ...")
    warnings.filterwarnings("ignore", "You are using a Backend")  # from init_rpc in torch 2.11-2.15
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        device = torch.device(device.type, dist.get_node_local_rank())
        torch.accelerator.set_device_index(device.index)
    torch.manual_seed(0)  # the same weights everywhere
    model = nn.Linear(100, 30).to(device)
    in_one_process = copy.deepcopy(model)  # trained without the server, as a reference
    batches = torch.randn(trainers, 20, 100).to(device)  # one per trainer
    SERVER.append(Server(model, trainers))  # before RPC starts, so that the first call finds it
    rpc.init_rpc(f"trainer{rank}" if rank < trainers else "server", rank=rank, world_size=ranks)
    if rank == trainers:
        rpc.shutdown()  # serves requests until all ranks have called it
        return 0
    timeout = timedelta(seconds=120)  # a hang ends with an error
    # only used by `compare`
    dist.init_process_group("gloo", timeout=timeout, rank=rank, world_size=trainers)

    def gradient() -> Tensor:
        loss = model(batches[rank]).square().mean()
        return parameters_to_vector(torch.autograd.grad(loss, list(model.parameters())))

    def step() -> None:
        parameters = rpc.rpc_sync("server", update, args=(gradient().cpu(),))
        vector_to_parameters(parameters.to(device), model.parameters())

    compare({"step": step, "gradient alone": gradient}, device)
    optimizer = torch.optim.SGD(in_one_process.parameters(), lr=0.1, momentum=0.9)
    for _ in range(16 * 5):  # the number of steps in `compare`
        optimizer.zero_grad()
        in_one_process(batches).square().mean().backward()
        optimizer.step()
    got, expected = (parameters_to_vector(m.parameters()) for m in (model, in_one_process))
    same = torch.allclose(got, expected, rtol=1e-3, atol=1e-5)
    if rank == 0:
        print(f"{ranks} ranks, the last is the server, parameters correct: {same}")
    dist.destroy_process_group()
    rpc.shutdown()
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
