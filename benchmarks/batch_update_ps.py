#!/usr/bin/env python3
"""How fast is a parameter server that waits for a batch of gradients before it answers?

The server (the last rank) keeps the model. Each trainer (the other ranks) computes gradients on
its own batch, sends them, and waits. Once `--batch-update-size` gradients are there the server
averages them, makes one step of SGD, and answers all who wait with the new parameters.

    step        = compute gradients, send them, wait for the new parameters; on the slowest trainer
    gradients/s = gradients of all trainers / seconds from the common start of each block of steps
                  until the last trainer is done with it
    updates/s   = gradients/s / gradients of an update, on average
    latency     = from sending gradients to having the answer, on the slowest trainer
    MB/s        = gradients/s * 2 * bytes of the parameters: there and back, without pickle's own

Where fewer gradients make an update than there are trainers, one is also made of fewer once every
trainer that has sent less than another waits: the others may have nothing more to send.

Payloads: `module` sends a list of gradients and receives the pickled module, as the tutorial does;
`tensors` sends and receives one flat tensor. Before the timing the server's log of the first 20
steps is computed again by one process, and must come to the same parameters.

    torchrun --nproc-per-node 4 benchmarks/batch_update_ps.py
    torchrun --nproc-per-node 9 benchmarks/batch_update_ps.py --in-features 4096 --out-features 4096
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        benchmarks/batch_update_ps.py --batch-update-size 5 --json report.jsonl

Does what PyTorch's tutorial "Implementing Batch RPC Processing Using Asynchronous Executions" and
its parameter_server_test.py did, written anew: `--payload module --rpc-threads 16 --rpc-transports
auto` are their settings. BSD-3-Clause. docs/batch_update_ps.md shows how to read the table.
"""

import argparse
import copy
import sys
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.futures import Future
from torch.nn.utils import parameters_to_vector, vector_to_parameters

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.benchmark import Benchmark, Workload
from common.check import verdict
from common.cli import Parser, add_common_flags, list_of, positive_float, positive_int, refuse
from common.dist import Group, share
from common.join import world
from common.report import Case
from common.rpc import (
    add_rpc_flags,
    hosted,
    make,
    place,
    rpc_options,
    rpc_workers,
    split_roles,
    wants_cuda,
)
from common.stats import median_interval, percentiles
from common.table import Columns, metric

PAYLOADS = ("module", "tensors")
CHECKED_STEPS = 20
TOLERANCE = 1e-4  # of what the updates change; a lost gradient is 1 in 20 * trainers


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    for name, default, text in (
        ("--in-features", 100, "of nn.Linear"),
        ("--out-features", 30, "of nn.Linear"),
        ("--batch-size", 20, "a trainer's"),
        ("--num-batches", 4, "a trainer's, again and again"),
    ):
        add(name, type=positive_int, default=default, help=f"{text} (default: {default})")
    text = "gradients of an update (default: as many as trainers)"
    add("--batch-update-size", type=positive_int, metavar="N", help=text)
    add(
        "--payload",
        type=list_of(str, PAYLOADS),
        default=list(PAYLOADS),
        metavar="NAME",
        help="of module, tensors (default: both)",
    )
    add(
        "--straggler-timeout",
        type=positive_float,
        default=10.0,
        metavar="S",
        help="a step that waits S seconds fails its case, and names who is missing (default: 10)",
    )
    text = "where the server keeps the model (default: cpu)"
    add("--server-device", choices=("cpu", "cuda"), default="cpu", help=text)
    add_rpc_flags(parser)
    add_common_flags(parser)
    args = parser.parse_args(argv)
    args.backend = args.backend or "gloo"  # trainers meet on it; what is timed goes over RPC
    return args


# -- the model, and what travels -------------------------------------------------------------------


def create_model(key: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(key["in_features"], key["out_features"])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)


def create_batches(key: dict[str, Any], trainer: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A trainer's own data: inputs [batch, in_features] and labels [batch, out_features]."""
    generator = torch.Generator().manual_seed(trainer)
    shape, zeros = (key["batch_size"], key["in_features"]), (key["batch_size"], key["out_features"])
    inputs = [torch.randn(shape, generator=generator) for _ in range(key["num_batches"])]
    return [(x, torch.zeros(zeros)) for x in inputs]


def compute_gradients(
    model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor
) -> list[torch.Tensor]:
    model.zero_grad()
    nn.functional.l1_loss(model(inputs), labels).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def flat(tensors: Any) -> torch.Tensor:
    return parameters_to_vector(tensors).detach()


# -- the server ------------------------------------------------------------------------------------


class BatchUpdateServer:
    """Collects gradients, steps once enough are there, and answers all who sent them.

    Its methods are called by RPC, from several threads at once. device: of the model; wire: where
    tensors are that it sends.
    """

    def __init__(self, key: dict[str, Any], device: str, wire: str) -> None:
        self.key, self.device, self.wire = key, torch.device(device), wire
        self.model = create_model(key).to(device)
        self.optimizer = sgd(self.model)
        for p in self.model.parameters():
            p.grad = torch.zeros_like(p)
        self.lock = threading.Lock()
        self.future = self.new_future()
        self.members: list[int] = []  # trainers of the next update
        self.versions = [0] * key["trainers"]  # of the parameters that each trainer has
        self.sent = [0] * key["trainers"]  # gradients of each trainer
        self.updates: list[list[tuple[int, int]]] = []  # (trainer, version that it had)

    def new_future(self) -> Future[Any]:
        return Future(devices=[self.device] if self.wire != "cpu" else [])

    def update(self, trainer: int, gradients: Any) -> Future[Any]:
        """Add a trainer's gradients. The future has the parameters after the update."""
        answer = None
        with self.lock:  # `+=` reads and writes: two threads at once would lose gradients
            if self.key["payload"] == "tensors":
                like = list(self.model.parameters())
                parts = gradients.split([p.numel() for p in like])
                gradients = [part.view_as(p) for part, p in zip(parts, like, strict=True)]
            for p, g in zip(self.model.parameters(), gradients, strict=True):
                assert p.grad is not None
                p.grad += g.to(p.device)
            self.members.append(trainer)
            self.sent[trainer] += 1
            future = self.future
            if len(self.members) >= self.key["batch_update_size"] or not self.missing():
                answer = self.step()
                self.future = self.new_future()
            if self.device.type == "cuda":  # each request has a stream of its own
                torch.cuda.current_stream(self.device).synchronize()
        if answer is not None:
            future.set_result(answer)  # not under the lock: the next gradients may come meanwhile
        return future

    def missing(self) -> list[int]:
        """Trainers that are behind the foremost and do not wait: their gradients are to come."""
        most = max(self.sent)
        behind = [t for t, sent in enumerate(self.sent) if sent < most]
        return [t for t in behind if t not in self.members]

    def step(self) -> Any:
        """Make an update of the gradients that are there. What those who wait are sent."""
        for p in self.model.parameters():
            assert p.grad is not None
            p.grad /= len(self.members)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        self.updates.append([(t, self.versions[t]) for t in self.members])
        for trainer in self.members:
            self.versions[trainer] = len(self.updates)
        self.members = []
        if self.key["payload"] == "tensors":
            return flat(self.model.parameters()).to(self.wire)
        alone = self.key["batch_update_size"] == self.key["trainers"]
        same = next(self.model.parameters()).device == torch.device(self.wire)
        # others may update the model while it is being sent, unless all wait for it
        return self.model if alone and same else copy.deepcopy(self.model).to(self.wire)


@rpc.functions.async_execution
def update_and_fetch(trainer: int, gradients: Any) -> Future[Any]:
    return hosted().update(trainer, gradients)


def get_log() -> tuple[list[list[tuple[int, int]]], torch.Tensor]:
    """The trainers of each update, with the version they had; and the parameters."""
    return hosted().updates, flat(hosted().model.parameters()).cpu()


def get_missing() -> list[int]:
    return hosted().missing()


# -- a trainer -------------------------------------------------------------------------------------


def build(
    key: dict[str, Any], args: argparse.Namespace, bench: Benchmark, server: str, group: Group
) -> Workload:
    """What a trainer measures; before that, the check. server: the device of the server."""
    trainer, device = bench.job.rank, bench.job.device
    both = device.type == "cuda" and server != "cpu"  # then tensors travel from GPU to GPU
    if trainer == 0:
        make("server0", BatchUpdateServer, key, server, server if both else "cpu")
    dist.barrier(group.control)  # the server has its model, the same as ours
    wire = device if both else torch.device("cpu")
    batches = [(x.to(device), y.to(device)) for x, y in create_batches(key, trainer)]
    model = create_model(key).to(device)
    latencies: list[float] = []

    def step() -> None:
        nonlocal model
        gradients: Any = compute_gradients(model, *batches[len(latencies) % len(batches)])
        start = perf_counter()
        if key["payload"] == "tensors":
            answer = send(flat(gradients).to(wire))
            vector_to_parameters(answer.to(device), model.parameters())
        else:
            model = send([g.to(wire) for g in gradients]).to(device)
        latencies.append(perf_counter() - start)

    def send(gradients: Any) -> Any:
        patience = args.straggler_timeout
        try:
            return rpc.rpc_sync("server0", update_and_fetch, (trainer, gradients), timeout=patience)
        except RuntimeError as error:
            if "ran for more than" not in str(error):
                raise
            late = ", ".join(f"trainer{t}" for t in rpc.rpc_sync("server0", get_missing))
            text = f"trainer{trainer} waited {patience:g} s (--straggler-timeout) for an update"
            raise TimeoutError(f"{text}; missing: {late or 'nobody, the server is slow'}") from None

    for _ in range(CHECKED_STEPS):
        step()
    dist.barrier(group.control)
    problem = compare_with_replay(key, *rpc.rpc_sync("server0", get_log)) if trainer == 0 else None
    problem = share(problem, group.control)
    if problem:
        raise ValueError(problem)
    latencies.clear()

    def facts() -> dict[str, Any]:  # all trainers are done: their times are gathered
        updates = rpc.rpc_sync("server0", get_log)[0] if trainer == 0 else []
        members = [len(members) for members in updates]
        return {
            "latency": percentiles(latencies[args.warmup_iters :], "latency"),
            "sent": len(latencies) + CHECKED_STEPS,
            "received": sum(members),
            "updates": len(members),
        }

    return Workload({"step": step}, facts=facts)


def compare_with_replay(
    key: dict[str, Any], updates: list[list[tuple[int, int]]], parameters: torch.Tensor
) -> str | None:
    """What is wrong with the server's parameters after these updates; None if nothing is.

    One process alone computes every gradient of the log again, one after the other.
    """
    model, worker = create_model(key), create_model(key)
    optimizer = sgd(model)
    batches = [create_batches(key, trainer) for trainer in range(key["trainers"])]
    sent = [0] * key["trainers"]
    versions = [flat(model.parameters())]
    for members in updates:
        optimizer.zero_grad()
        for trainer, version in members:
            vector_to_parameters(versions[version], worker.parameters())
            batch = batches[trainer][sent[trainer] % key["num_batches"]]
            for p, g in zip(model.parameters(), compute_gradients(worker, *batch), strict=True):
                p.grad = g / len(members) + (0 if p.grad is None else p.grad)
            sent[trainer] += 1
        optimizer.step()
        versions.append(flat(model.parameters()))
    change = float((versions[-1] - versions[0]).abs().max())
    error = float((parameters - versions[-1]).abs().max()) / change
    if error < TOLERANCE:
        return None
    return (
        f"after {len(updates)} updates the server's parameters are {error:.2g} of their change "
        f"away from what one process makes of its log (at most {TOLERANCE:g})"
    )


# -- what rank 0 makes of it -----------------------------------------------------------------------


def derive(case: Case, facts: list[dict[str, Any]]) -> None:
    """Fill in the metrics and the check."""
    key, steps = case.key, np.array(case.samples_s["step"])
    m = case.metrics
    m |= step_metrics(steps, case.rounds, facts[0]["received"] / facts[0]["updates"])
    parameters = (key["in_features"] + 1) * key["out_features"]
    m["mb_per_s"] = m["gradients_per_s"] * 2 * parameters * 4 / 1e6
    for name in facts[0]["latency"]:
        m[name] = max(fact["latency"][name] for fact in facts)
    sent, received = sum(fact["sent"] for fact in facts), facts[0]["received"]
    lost = f"the trainers sent {sent} gradients, the server's log has {received}"
    case.check = verdict(lost if sent != received else None)


def step_metrics(steps: Any, rounds: Sequence[int], gradients_per_update: float) -> dict[str, Any]:
    """Of the steps of all trainers [trainers, n], seconds; rounds: steps of each block."""
    blocks = np.split(steps, np.cumsum(rounds)[:-1], axis=1)
    seconds = [float(block.sum(axis=1).max()) for block in blocks]
    rates = [b.size / gradients_per_update / s for b, s in zip(blocks, seconds, strict=True)]
    each = [percentiles(row, "step_time") for row in steps]
    return {
        **{name: max(trainer[name] for trainer in each) for name in each[0]},
        "gradients_per_update": gradients_per_update,
        "gradients_per_s": steps.size / sum(seconds),
        "updates_per_s": steps.size / sum(seconds) / gradients_per_update,
        "updates_per_s_ci95": median_interval(rates),
    }


def interval(case: Case) -> str:
    ci = case.metrics["updates_per_s_ci95"]
    return f"{ci[0]:.0f} to {ci[1]:.0f}" if ci else "-"


COLUMNS: Columns = {
    "payload": lambda case: case.key["payload"],
    "step\np50 (ms)": metric("step_time_p50_s", 1e3, 3),
    "updates/s": metric("updates_per_s", digits=1),
    "95% ci": interval,
    "gradients/s": metric("gradients_per_s", digits=1),
    "MB/s": metric("mb_per_s"),
    **{f"latency\np{q} (ms)": metric(f"latency_p{q}_s", 1e3, 3) for q in (50, 90, 95, 99)},
}
WIDEST = ["tensors", "100.000", "10000.0", "10000 to 10000", "10000.0", "1000.00"]


# -- the run ---------------------------------------------------------------------------------------


def main() -> int:
    args = parse_args()
    world_size = world()[2]
    cuda = wants_cuda(args.device)
    roles = split_roles(world_size, servers=1)
    roles = roles.on_cuda(cuda * world_size, int(args.server_device == "cuda"))
    trainers = len(roles.trainers)
    size = args.batch_update_size or trainers
    if size > trainers:
        refuse(f"--batch-update-size {size}: there are {trainers} trainers; try {trainers}")
    place(args, roles)
    with Benchmark("batch_update_ps", args, tested=roles.trainers) as bench:
        options = rpc_options(args, bench)
        names = ("in_features", "out_features", "batch_size", "num_batches", "server_device")
        fixed = {"trainers": trainers, "batch_update_size": size}
        fixed |= {name: getattr(args, name) for name in names}
        fixed |= {"device": "cuda" if cuda else "cpu"} | options.key()
        settings = ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in options.key().items())
        bench.begin_table(
            f"Linear({args.in_features}, {args.out_features}), {trainers} trainers, "
            f"{size} gradients an update, {settings}",
            COLUMNS,
            WIDEST,
        )
        with rpc_workers(bench, roles, options) as devices:
            for payload in args.payload:
                key = {"payload": payload} | fixed
                work = partial(build, key, args, bench, devices[roles.servers[0]])
                bench.measure(key, work, derive, roles.trainers)
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
