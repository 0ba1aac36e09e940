"""The training steps of the five source programs as plain loops, without harness, phases or checks.

Each function makes a step for this trainer with the model, batches, optimizer and processes of the
script of the same name. tests/perturbation.py compares their times with those of the scripts, and
tests/test_plain_loops.py the losses. Servers only need this module.
"""

import inspect
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.optim
import torchvision
from torch import Tensor, nn
from torch.distributed import rpc
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

Step = Callable[[], object]
Device = torch.device  # of the trainers; servers are on the CPU


def ddp_sweep(
    group: dist.ProcessGroup, rank: int, device: Device, name: str, samples: int, pixels: int
) -> Step:
    """A torchvision model under DDP, one batch, SGD."""
    torch.manual_seed(rank)
    model = torchvision.models.get_model(name).to(device)
    target = torch.randint(1000, (samples,), device=device)
    images = torch.rand(samples, 3, pixels, pixels, device=device)
    known = inspect.signature(DistributedDataParallel).parameters  # an older torch has another name
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    settings: dict[str, Any] = {"process_group": group, buffers: False}
    replica = DistributedDataParallel(model, **settings)
    optimizer = torch.optim.SGD(replica.parameters(), 1e-3, momentum=0.9, weight_decay=1e-4)
    criterion = nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad()
        criterion(replica(images), target).backward()
        optimizer.step()

    return step


def compile_sweep(
    group: dist.ProcessGroup, rank: int, device: Device, widths: Sequence[int], samples: int
) -> Step:
    """Forward and backward of linear layers with ReLU under DDP.

    widths: from the input to the last hidden layer. Rank n uses the n-th random batch.
    """
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(widths[-1], 5))
    for _ in range(rank + 1):
        x, target = torch.rand(samples, widths[0]), torch.randint(5, (samples,))
    x, target = x.to(device), target.to(device)
    replica = DistributedDataParallel(model.to(device), process_group=group)

    def step() -> None:
        nn.functional.cross_entropy(replica(x), target).backward()
        replica.zero_grad()

    return step


TABLE: list[nn.EmbeddingBag] = []  # of the server


def make_table(rows: int, columns: int) -> None:
    torch.manual_seed(1)
    TABLE[:] = [nn.EmbeddingBag(rows, columns, mode="sum")]


def look_up(indices: Tensor, offsets: Tensor) -> Tensor:
    return TABLE[0](indices, offsets)


def table_weight() -> Tensor:
    return TABLE[0].weight


def ddp_rpc(
    group: dist.ProcessGroup,
    rank: int,
    device: Device,
    rows: int,
    epoch: list[tuple[Tensor, Tensor, Tensor]],
) -> Step:
    """An epoch with lookups in a table of 512 columns on a server, dense layers under DDP,
    distributed autograd and a distributed optimizer. epoch: indices, offsets and targets of each
    batch."""
    if rank == 0:
        rpc.rpc_sync("server0", make_table, args=(rows, 512))
    dist.barrier(group)
    torch.manual_seed(0)
    linear = [nn.Linear(a, b) for a, b in ((512, 256), (256, 128), (128, 64), (64, 32), (32, 8))]
    model = nn.Sequential(*linear[:2], nn.ReLU(), *linear[2:]).to(device)
    replica = DistributedDataParallel(model, process_group=group)
    parameters = [rpc.remote("server0", table_weight)]
    parameters += [rpc.RRef(parameter) for parameter in replica.parameters()]
    optimizer = torch.distributed.optim.DistributedOptimizer(torch.optim.SGD, parameters, lr=0.05)

    def step() -> None:
        for indices, offsets, target in epoch:
            with dist_autograd.context() as context:
                looked_up = rpc.rpc_sync("server0", look_up, args=(indices, offsets))
                scores = replica(looked_up.to(device))
                loss = nn.functional.cross_entropy(scores, target.to(device))
                dist_autograd.backward(context, [loss])
                optimizer.step(context)

    return step


LOCK = threading.Lock()
SUMS: dict[tuple[int, int], list[Any]] = {}  # on the server, by step and bucket: future, sum, count


def as_sparse(parts: list[Tensor], size: tuple[int, ...]) -> Tensor:
    indices, values = parts
    settings: Any = {"is_coalesced": True, "check_invariants": False}
    return torch.sparse_coo_tensor(indices, values, size, **settings)


@rpc.functions.async_execution
def average(
    trainers: int, key: tuple[int, int], parts: list[Tensor], size: tuple[int, ...]
) -> Future[Any]:
    gradient = parts[0] if len(parts) == 1 else as_sparse(parts, size)
    with LOCK:
        if key not in SUMS:
            SUMS[key] = [Future(), gradient, 1]
        else:
            SUMS[key][1].add_(gradient)
            SUMS[key][2] += 1
        future, total, count = SUMS[key]
        if count == trainers:
            del SUMS[key]
    if count == trainers:
        mean = total / trainers
        if mean.is_sparse:
            mean = mean.coalesce()
        future.set_result([mean.indices(), mean.values()] if mean.is_sparse else [mean])
    return future


def parameter_server(
    group: dist.ProcessGroup, device: Device, batches: Any, *, sizes: Any, bucket_mb: float
) -> Step:
    """An embedding and linear layers under DDP, with every bucket averaged by a server.

    batches: iterator over row indices and classes. sizes: rows and columns of the embedding, number
    of linear layers and their width.
    """
    rows, columns, layers, width = sizes
    torch.manual_seed(0)
    embedding = nn.EmbeddingBag(rows, columns, sparse=True)
    widths = [columns] + [width] * layers
    linear = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    model = nn.Sequential(embedding, *linear, nn.Softmax(dim=1)).to(device)
    replica = DistributedDataParallel(model, process_group=group, bucket_cap_mb=bucket_mb)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.01)
    steps = 0

    def hook(state: None, bucket: dist.GradBucket) -> Future[Tensor]:
        gradient = bucket.buffer()
        if gradient.is_sparse:
            gradient = gradient.coalesce()
            parts = [gradient.indices(), gradient.values()]
        else:
            parts = [gradient]
        sent = [part.cpu() for part in parts]
        arguments = (group.size(), (steps, bucket.index()), sent, tuple(gradient.size()))

        def received(call: Future[Any]) -> Tensor:
            parts = [part.to(device) for part in call.value()]
            return parts[0] if len(parts) == 1 else as_sparse(parts, tuple(gradient.size()))

        return rpc.rpc_async("server0", average, args=arguments).then(received)

    replica.register_comm_hook(None, hook)

    def step() -> None:
        nonlocal steps
        steps += 1
        inputs, target = next(batches)
        optimizer.zero_grad()
        nn.functional.cross_entropy(replica(inputs), target).backward()
        optimizer.step()

    return step


class BatchUpdate:
    """A server that steps when it has a gradient of every trainer, and then answers all of them."""

    def __init__(self, model: nn.Module, trainers: int) -> None:
        self.model, self.trainers, self.count = model, trainers, 0
        self.future: Future[Any] = Future()
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)

    def update(self, gradients: list[Tensor]) -> Future[Any]:
        with LOCK:
            for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                total = gradient if parameter.grad is None else parameter.grad + gradient
                parameter.grad = total
            self.count += 1
            future = self.future
            if self.count == self.trainers:
                for parameter in self.model.parameters():
                    assert parameter.grad is not None
                    parameter.grad /= self.trainers
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.count, self.future = 0, Future()
                future.set_result(self.model)
        return future


SERVER: list[BatchUpdate] = []  # of the server


def first_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(100, 30)


def start_batch_update(trainers: int) -> None:
    SERVER[:] = [BatchUpdate(first_model(), trainers)]


@rpc.functions.async_execution
def update(gradients: list[Tensor]) -> Future[Any]:
    return SERVER[0].update(gradients)


def batch_update_ps(group: dist.ProcessGroup, rank: int, device: Device, batches: Tensor) -> Step:
    """Send gradients to the server, and receive its module. batches: [count, samples, 100]."""
    if rank == 0:
        rpc.rpc_sync("server0", start_batch_update, args=(group.size(),))
    dist.barrier(group)
    model, steps = first_model().to(device), 0
    zeros = torch.zeros(batches.shape[1], 30, device=device)

    def step() -> None:
        nonlocal model, steps
        model.zero_grad()
        nn.functional.l1_loss(model(batches[steps % len(batches)].to(device)), zeros).backward()
        steps += 1
        gradients = [p.grad.cpu() for p in model.parameters() if p.grad is not None]
        model = rpc.rpc_sync("server0", update, args=(gradients,)).to(device)

    return step
