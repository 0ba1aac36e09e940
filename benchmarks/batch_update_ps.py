#!/usr/bin/env python3
"""How fast is a parameter server that waits for a batch of gradients before it answers?

The server (the last rank) keeps the model. Each trainer (the other ranks) computes gradients on
its own batch, sends them, and waits. Once `--batch-update-size` gradients are there the server
averages them, makes one step of SGD, and answers all who wait with the new parameters.

    step        = compute gradients, send them, wait for the new parameters
    latency     = of that, from sending to having the answer; both of the slowest trainer
    gradients/s = gradients of all trainers / seconds from the common start of each block of steps
                  until the last trainer is done with it
    updates/s   = gradients/s / gradients of an update, on average
    MB/s        = gradients/s * 2 * bytes of the parameters: there and back, without pickle's own

Where an update takes fewer gradients than there are trainers it is also made of fewer still, once
all trainers that have sent less than another one wait: the others may have nothing more to send.

    torchrun --nproc-per-node 4 benchmarks/batch_update_ps.py
    torchrun --nproc-per-node 9 benchmarks/batch_update_ps.py --in-features 4096 --out-features 4096
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        benchmarks/batch_update_ps.py --batch-update-size 5 --json report.jsonl

Does what PyTorch's tutorial "Implementing Batch RPC Processing Using Asynchronous Executions" and
its parameter_server_test.py did, written anew. `--payload module --rpc-threads 16 --rpc-transports
auto` are their settings. BSD-3-Clause. docs/batch_update_ps.md shows how to read the table.
"""

import argparse
import copy
import itertools
import sys
import threading
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

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
from common.dist import Group, gather
from common.phases import timed
from common.report import Case
from common.rpc import add_rpc_flags, assign_roles, host, hosted, rpc_options, rpc_workers
from common.stats import median_interval, own_pace
from common.table import Columns, half_width, metric

PAYLOADS = ("module", "tensors")
CHECKED_STEPS = 20
TOLERANCE = 1e-4  # of what the updates change; a lost gradient is 1 in 20 * trainers
Key = dict[str, Any]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    for name, default in (("--in-features", 100), ("--out-features", 30)):
        add(name, type=positive_int, default=default, help=f"of nn.Linear (default: {default})")
    add("--batch-size", type=positive_int, default=20, help="a trainer's (default: 20)")
    add("--num-batches", type=positive_int, default=4, help="a trainer's, in turn (default: 4)")
    size = "gradients of an update (default: as many as trainers)"
    add("--batch-update-size", type=positive_int, metavar="N", help=size)
    payload = """module: a list of gradients there and the pickled module back, as the tutorial
        does; tensors: a flat tensor each way (default: both)"""
    kinds = list_of(str, PAYLOADS)
    add("--payload", type=kinds, default=list(PAYLOADS), metavar="NAME", help=payload)
    patience = "a step that waits S seconds fails, and names who is missing (default: 10)"
    add("--straggler-timeout", type=positive_float, default=10.0, metavar="S", help=patience)
    add_rpc_flags(parser, server_device="cpu")
    add_common_flags(parser)
    args = parser.parse_args(argv)
    args.backend = args.backend or "gloo"  # trainers meet on it; what is timed goes over RPC
    return args


# -- the model -------------------------------------------------------------------------------------


def create_model(key: Key) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(key["in_features"], key["out_features"])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)


def create_batches(key: Key, trainer: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A trainer's own data: inputs [batch, in_features] and labels [batch, out_features]."""
    rows, generator = key["batch_size"], torch.Generator().manual_seed(trainer)
    shape, labels = (rows, key["in_features"]), torch.zeros(rows, key["out_features"])
    return [(torch.randn(shape, generator=generator), labels) for _ in range(key["num_batches"])]


def gradients_of(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> list[Any]:
    model.zero_grad()
    nn.functional.l1_loss(model(inputs), labels).backward()
    return [p.grad for p in model.parameters()]


def flat(tensors: Any) -> torch.Tensor:
    return parameters_to_vector(tensors).detach()


def split(vector: torch.Tensor, like: list[Any]) -> list[torch.Tensor]:
    parts = vector.split([x.numel() for x in like])
    return [part.view_as(x) for part, x in zip(parts, like, strict=True)]


# -- the server ------------------------------------------------------------------------------------


class BatchUpdateServer:
    """Collects gradients, steps once enough are there, and answers all who sent them.

    RPC calls its methods from several threads at once. device: of the model; wire: of what it
    sends.
    """

    def __init__(self, key: Key, device: str, wire: str) -> None:
        self.key, self.device, self.wire = key, torch.device(device), torch.device(wire)
        self.model = create_model(key).to(device)
        self.optimizer = sgd(self.model)
        for p in self.model.parameters():
            p.grad = torch.zeros_like(p)
        self.gradients: list[Any] = [p.grad for p in self.model.parameters()]
        self.lock = threading.Lock()
        self.future = self.new_future()
        self.waiting: list[int] = []  # the trainers of the next update
        self.sent = [0] * key["trainers"]  # gradients of each trainer
        self.updates: list[list[int]] = []  # the log: the trainers of each update

    def new_future(self) -> Future[Any]:
        return Future(devices=[self.device] if self.wire.type == "cuda" else [])

    def update(self, trainer: int, sent: Any) -> Future[Any]:
        """Add a trainer's gradients. The future has the parameters after the update."""
        answer = None
        with self.lock:  # `+=` reads and writes: two threads at once would lose gradients
            future = self.future
            if self.key["payload"] == "tensors":
                sent = split(sent, self.gradients)
            for mine, theirs in zip(self.gradients, sent, strict=True):
                mine += theirs.to(self.device)
            self.waiting.append(trainer)
            self.sent[trainer] += 1
            if len(self.waiting) == self.key["batch_update_size"] or not self.missing():
                answer, self.future = self.step(), self.new_future()
            if self.device.type == "cuda":  # each request has a stream of its own
                torch.cuda.current_stream(self.device).synchronize()
        if answer is not None:
            future.set_result(answer)  # not under the lock: the next gradients may come meanwhile
        return future

    def missing(self) -> list[int]:
        """Trainers that are behind the foremost and do not wait: their gradients are to come."""
        behind = [t for t, sent in enumerate(self.sent) if sent < max(self.sent)]
        return [t for t in behind if t not in self.waiting]

    def step(self) -> Any:
        """Make an update of the gradients that are there. The answer to those who wait."""
        for g in self.gradients:
            g /= len(self.waiting)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        self.updates.append(self.waiting)
        everybody = len(self.waiting) == self.key["trainers"]
        self.waiting = []
        if self.key["payload"] == "tensors":
            return flat(self.model.parameters()).to(self.wire)
        if everybody and self.device == self.wire:
            return self.model  # as the tutorial does: nobody updates it while it is being sent
        return copy.deepcopy(self.model).to(self.wire)


@rpc.functions.async_execution
def update_and_fetch(trainer: int, gradients: Any) -> Future[Any]:
    return hosted().update(trainer, gradients)


def get_log() -> tuple[list[list[int]], torch.Tensor]:
    """The trainers of each update, and the parameters."""
    return hosted().updates, flat(hosted().model.parameters()).cpu()


def get_missing() -> list[int]:
    return hosted().missing()


# -- a trainer -------------------------------------------------------------------------------------


def build(key: Key, bench: Benchmark, server: str, patience_s: float, group: Group) -> Workload:
    """What a trainer measures; before that, the check. server: its device."""
    trainer, device = bench.job.rank, bench.job.device
    both = device.type == "cuda" and server != "cpu"  # else there is no device map
    wire = device if both else torch.device("cpu")
    if trainer == 0:
        words = (BatchUpdateServer, key, server, server if both else "cpu")
        rpc.rpc_sync("server0", host, args=words)
    dist.barrier(group.control)  # the server has its model, the same as ours
    batches = [(x.to(device), y.to(device)) for x, y in create_batches(key, trainer)]
    model = create_model(key).to(device)
    latencies: list[float] = []

    def step() -> None:
        nonlocal model
        gradients = gradients_of(model, *batches[len(latencies) % len(batches)])
        start = perf_counter()
        if key["payload"] == "tensors":
            answer = send(trainer, flat(gradients).to(wire), patience_s)
            vector_to_parameters(answer.to(device), model.parameters())
        else:
            model = send(trainer, [g.to(wire) for g in gradients], patience_s).to(device)
        latencies.append(perf_counter() - start)

    for _ in range(CHECKED_STEPS):
        step()
    theirs = gather(flat(model.parameters()).cpu(), group.control)
    wrong = None
    if theirs:  # on trainer 0
        wrong = compare_with_replay(key, theirs, *rpc.rpc_sync("server0", get_log))

    def facts() -> dict[str, Any]:  # all trainers are done: their times are gathered
        log = rpc.rpc_sync("server0", get_log)[0] if trainer == 0 else []
        return {"wrong": wrong, "latencies": latencies, "updates": [len(who) for who in log]}

    return Workload({"step": step}, facts=facts)


def send(trainer: int, gradients: Any, patience_s: float) -> Any:
    """The new parameters. Raises TimeoutError, with those who are missing, where none come."""
    try:
        return rpc.rpc_sync("server0", update_and_fetch, (trainer, gradients), timeout=patience_s)
    except RuntimeError as error:
        if "ran for more than" not in str(error):
            raise
        missing = ", ".join(f"trainer{t}" for t in rpc.rpc_sync("server0", get_missing))
        raise TimeoutError(
            f"trainer{trainer} waited {patience_s:g} s for an update (--straggler-timeout); "
            f"missing: {missing or 'nobody, the server is slow'}"
        ) from None


def compare_with_replay(
    key: Key, trainers: list[torch.Tensor], updates: list[list[int]], server: torch.Tensor
) -> str | None:
    """What is wrong with the parameters after these updates; None if nothing is.

    One process computes every gradient of the server's log again, one after the other. trainers,
    server: the parameters that each of them has.
    """
    model, worker = create_model(key), create_model(key)
    optimizer, parameters = sgd(model), list(model.parameters())
    batches = [itertools.cycle(create_batches(key, t)) for t in range(key["trainers"])]
    first = flat(parameters)
    has = [first] * key["trainers"]
    for members in updates:
        total = torch.zeros_like(first)
        for trainer in members:
            vector_to_parameters(has[trainer], worker.parameters())
            total += flat(gradients_of(worker, *next(batches[trainer])))
        for p, g in zip(parameters, split(total / len(members), parameters), strict=True):
            p.grad = g
        optimizer.step()
        for trainer in members:
            has[trainer] = flat(parameters)
    change = (flat(parameters) - first).abs().max()
    names = ["server0", *(f"trainer{t}" for t in range(key["trainers"]))]
    wanted = [flat(parameters), *has]
    for name, got, want in zip(names, [server, *trainers], wanted, strict=True):
        error = float((got - want).abs().max() / change)
        if not error < TOLERANCE:
            return (
                f"after {len(updates)} updates the parameters of {name} are {error:.2g} of their "
                f"change away from what one process makes of the log (at most {TOLERANCE:g})"
            )
    return None


# -- what rank 0 makes of it -----------------------------------------------------------------------


def derive(case: Case, facts: list[dict[str, Any]]) -> None:
    """Fill in the metrics and the check."""
    key, m, updates = case.key, case.metrics, facts[0]["updates"]
    slowest, blocks_s = own_pace(case.samples_s["step"], case.rounds, "step_time")
    trainers = len(case.ranks)
    latencies = [timed(fact["latencies"], case.rounds) for fact in facts]
    m |= slowest | own_pace(latencies, case.rounds, "latency")[0]
    size = sum(updates) / len(updates)
    m["gradients_per_update"] = size
    m["gradients_per_s"] = trainers * sum(case.rounds) / sum(blocks_s)
    m["updates_per_s"] = m["gradients_per_s"] / size
    rates = [trainers * n / s / size for n, s in zip(case.rounds, blocks_s, strict=True)]
    m["updates_per_s_ci95"] = median_interval(rates)
    parameters = (key["in_features"] + 1) * key["out_features"]
    m["mb_per_s"] = m["gradients_per_s"] * 2 * parameters * 4 / 1e6
    sent = sum(len(fact["latencies"]) for fact in facts)
    lost = f"the trainers sent {sent} gradients, the server's log has {sum(updates)}"
    case.check = verdict(facts[0]["wrong"] or (lost if sent != sum(updates) else None))


COLUMNS: Columns = {
    "payload": lambda case: case.key["payload"],
    "step\np50 (ms)": metric("step_time_p50_s", 1e3, 3),
    "\nupdates/s": metric("updates_per_s", digits=1),
    "+-\n(95% ci)": half_width("updates_per_s_ci95", digits=1),
    "\ngradients/s": metric("gradients_per_s", digits=1),
    "\nMB/s": metric("mb_per_s"),
    **{f"latency\np{q} (ms)": metric(f"latency_p{q}_s", 1e3, 3) for q in (50, 95, 99)},
}
WIDEST = ["tensors", "100.000", "10000.0", "1000.0", "10000.0", "1000.00"]


def main() -> int:
    args = parse_args()
    roles = assign_roles(args, servers=1)
    trainers = len(roles.trainers)
    size = args.batch_update_size or trainers
    if size > trainers:
        refuse(f"--batch-update-size {size}: there are {trainers} trainers; try {trainers}")
    names = ("in_features", "out_features", "batch_size", "num_batches")
    key: Key = {name: getattr(args, name) for name in names}
    key |= {"server_device": roles.device(trainers), "device": roles.device(0)}
    key |= {"trainers": trainers, "batch_update_size": size}
    with Benchmark("batch_update_ps", args, tested=roles.trainers) as bench:
        options = rpc_options(args, bench)
        model = f"Linear({args.in_features}, {args.out_features})"
        title = f"{model}, {trainers} trainers, {size} gradients an update; {options}"
        bench.begin_table(title, COLUMNS, WIDEST)
        with rpc_workers(bench, roles, options) as devices:
            for payload in args.payload:
                case = {"payload": payload} | key | options.key()
                work = partial(build, case, bench, devices[trainers], args.straggler_timeout)
                bench.measure(case, work, derive, roles.trainers)
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
