#!/usr/bin/env python3
"""How fast is a parameter server that waits for a batch of gradients before it answers?

The server (the last rank) keeps the model. Each trainer computes gradients on its own batch, sends
them, and waits. Once `--batch-update-size` gradients are there the server averages them, makes one
step of SGD, and answers all who wait with the new parameters.

    step        = compute gradients, send them, wait; latency: of that, from sending to the answer
    gradients/s = of all trainers, by the seconds of each block of steps until its last one is done
    updates/s   = gradients/s / gradients of an update, on average
    MB/s        = gradients/s * 2 * bytes of the parameters: there and back, without pickle's own

    torchrun --nproc-per-node 4 benchmarks/batch_update_ps.py
    torchrun --nproc-per-node 9 benchmarks/batch_update_ps.py --in-features 4096 --out-features 4096
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        benchmarks/batch_update_ps.py --batch-update-size 5 --json report.jsonl

Does what PyTorch's tutorial "Implementing Batch RPC Processing Using Asynchronous Executions" and
its parameter_server_test.py did, written anew. Their settings are `--payload module --iters 4
--rpc-threads 16 --rpc-transports auto --log-updates`. BSD-3-Clause. docs/batch_update_ps.md shows
how to read the table.
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
from common.cli import Parser, add_common_flags, list_of, positive_int, refuse
from common.dist import Group
from common.report import Case
from common.rpc import (
    add_rpc_flags,
    args_of_rank,
    assign_roles,
    host,
    hosted,
    rpc_options,
    rpc_workers,
)
from common.stats import Times, median_interval, own_pace
from common.table import Columns, interval_ends, metric

PAYLOADS = ("module", "tensors")
SIZES = {  # default, help
    "in_features": (100, "columns of the model, a linear layer"),
    "out_features": (30, "its rows"),
    "batch_size": (20, "samples of a trainer's step"),
    "num_batches": (4, "different batches that a trainer takes in turn; --iters is for steps"),
}
CHECKED_STEPS = 20
LOGGED = 300  # updates of a case that the report keeps, the newest ones
TOLERANCE = 1e-4  # of what the updates change; a lost gradient is 1 in 20 * trainers
Key = dict[str, Any]
# its trainers in the order of their gradients, when each came, when the model was new; in seconds
Update = dict[str, Any]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    for name, (default, text) in SIZES.items():
        flag, text = f"--{name.replace('_', '-')}", f"{text} (default: {default})"
        add(flag, type=positive_int, default=default, metavar="N", help=text)
    text = "gradients that make an update (default: one a trainer)"
    add("--batch-update-size", type=positive_int, metavar="N", help=text)
    payload = """module: a list of gradients there and the pickled module back, as the tutorial
        does; tensors: a flat tensor each way (default: both)"""
    add("--payload", type=list_of(str, PAYLOADS), default=[*PAYLOADS], metavar="NAME", help=payload)
    text = "after the table print the server's log: who came when, and each update"
    add("--log-updates", action="store_true", help=text)
    add_rpc_flags(parser, server_device="cpu", stragglers=True)
    add_common_flags(parser)
    args = parser.parse_args(argv)
    args.backend = args.backend or "gloo"  # trainers meet on it; what is timed goes over RPC
    return args


def create_model(key: Key, device: str = "cpu") -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(key["in_features"], key["out_features"]).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)


def create_batches(key: Key, trainer: int) -> torch.Tensor:
    """A trainer's own inputs, [batches, batch, in_features]; the labels are zeros."""
    shape = (key["num_batches"], key["batch_size"], key["in_features"])
    return torch.randn(shape, generator=torch.Generator().manual_seed(trainer))


def gradients_of(model: nn.Module, inputs: torch.Tensor) -> list[Any]:
    model.zero_grad()
    outputs = model(inputs)
    nn.functional.l1_loss(outputs, torch.zeros_like(outputs)).backward()
    return [p.grad for p in model.parameters()]


def flat(tensors: Any) -> torch.Tensor:
    return parameters_to_vector(tensors).detach()


class BatchUpdateServer:
    """Answers all who sent gradients once enough are there; RPC calls it from several threads."""

    def __init__(self, key: Key, device: str) -> None:
        self.key, self.device = key, torch.device(device)
        self.cuda: list[Any] = [self.device] if self.device.type == "cuda" else []
        self.model, self.optimizer = create_model(key, device)
        parameters = list(self.model.parameters())
        self.gradient = torch.zeros_like(flat(parameters))  # the sum of those that are there
        parts = self.gradient.split([p.numel() for p in parameters])
        for p, part in zip(parameters, parts, strict=True):
            p.grad = part.view_as(p)
        self.lock = threading.Lock()
        self.future: Future[Any] = Future(devices=self.cuda)
        self.start_s = perf_counter()
        self.waiting: list[int] = []  # the trainers of the next update
        self.came_s: list[float] = []  # when the gradients of each of them were here
        self.sent = [0] * key["trainers"]  # gradients of each trainer
        self.updates: list[Update] = []  # the log

    def update(self, trainer: int, sent: Any) -> Future[Any]:
        """Add a trainer's gradients. The future has the parameters after the update."""
        sent = sent if self.key["payload"] == "tensors" else flat(sent)
        answer = None
        with self.lock:  # `+=` reads and writes: two threads at once would lose gradients
            future = self.future
            self.gradient += sent.to(self.device)
            self.waiting.append(trainer)
            self.came_s.append(self.now_s())
            self.sent[trainer] += 1
            # fewer are enough where nobody is missing: all may have sent their last ones
            if len(self.waiting) == self.key["batch_update_size"] or not self.missing():
                answer, self.future = self.step(sent.device), Future(devices=self.cuda)
            if self.cuda:  # each request has a stream of its own
                torch.cuda.current_stream(self.device).synchronize()
        if answer is not None:
            future.set_result(answer)  # not under the lock: the next gradients may come meanwhile
        return future

    def now_s(self) -> float:
        """Seconds since this server began, to the microsecond."""
        return round(perf_counter() - self.start_s, 6)

    def missing(self) -> list[int]:
        """Whose gradients are to come: those who have sent less than others and do not wait."""
        most = max(self.sent)
        return [t for t, n in enumerate(self.sent) if n < most and t not in self.waiting]

    def step(self, wire: torch.device) -> Any:
        """Make an update of the gradients that are there. The answer, on `wire`."""
        self.gradient /= len(self.waiting)
        self.optimizer.step()
        self.gradient.zero_()
        log = {"trainers": self.waiting, "came_s": self.came_s, "updated_s": self.now_s()}
        self.updates.append(log)
        self.waiting, self.came_s = [], []
        if self.key["payload"] == "tensors":
            return flat(self.model.parameters()).to(wire)
        return copy.deepcopy(self.model).to(wire)  # ours may change while this is being sent


@rpc.functions.async_execution
def update_and_fetch(trainer: int, gradients: Any) -> Future[Any]:
    return hosted().update(trainer, gradients)


def get_state() -> dict[str, Any]:
    server: BatchUpdateServer = hosted()
    parameters = flat(server.model.parameters()).cpu()
    return {"updates": server.updates, "parameters": parameters, "missing": server.missing()}


def build(bench: Benchmark, server: str, patience_s: float, key: Key, group: Group) -> Workload:
    """What a trainer measures; before that, the check. server: its device."""
    trainer, device = bench.job.rank, str(bench.job.device)
    wire = "cpu" if server == "cpu" else device  # without a device map CUDA cannot travel
    if trainer == 0:
        rpc.rpc_sync("server0", host, args=(BatchUpdateServer, key, server))
    batches = create_batches(key, trainer).to(device)
    model, _ = create_model(key, device)
    gradients_of(model, batches[0])
    # the server has its model, the same as ours. Everyone is ready to send gradients: the first
    # optimizer of a process imports torch._dynamo, which takes over 10 s on a machine that is busy
    dist.barrier(group.control)
    sent = 0

    def send(gradients: Any) -> Any:
        try:
            return rpc.rpc_sync("server0", update_and_fetch, (trainer, gradients), {}, patience_s)
        except RuntimeError as error:
            if "ran for more than" not in str(error):
                raise
            missing = rpc.rpc_sync("server0", get_state)["missing"]
            names = ", ".join(f"trainer{t}" for t in missing) or "nobody"
            text = f"waited {patience_s:g} s (--straggler-timeout); missing: {names}"
            raise TimeoutError(text) from None

    def step() -> float:
        """Seconds from sending the gradients until the new parameters are here."""
        nonlocal model, sent
        gradients = gradients_of(model, batches[sent % len(batches)])
        start = perf_counter()
        if key["payload"] == "tensors":
            vector_to_parameters(send(flat(gradients).to(wire)).to(device), model.parameters())
        else:
            model = send([g.to(wire) for g in gradients]).to(device)
        sent += 1
        return perf_counter() - start

    for _ in range(CHECKED_STEPS):
        step()
    trained: list[Any] | None = [None] * len(group.ranks) if trainer == 0 else None
    dist.gather_object(flat(model.parameters()).cpu(), trained, group_dst=0, group=group.control)
    wrong = differs(key, trained, rpc.rpc_sync("server0", get_state)) if trained else None

    def facts() -> dict[str, Any]:  # all trainers are done: their times are gathered
        updates = rpc.rpc_sync("server0", get_state)["updates"] if trainer == 0 else []
        return {"wrong": wrong, "sent": sent, "updates": updates}

    # the trainers do not wait for each other where an update needs fewer than all of them
    return Workload(step, facts=facts, returned=list, aligned=False)


def differs(key: Key, trained: list[torch.Tensor], server: dict[str, Any]) -> str | None:
    """Whose parameters are not those of one process that replays the server's log; or None."""
    model, optimizer = create_model(key)
    first = flat(model.parameters())
    batches = [itertools.cycle(create_batches(key, t)) for t in range(key["trainers"])]
    models = [copy.deepcopy(model) for _ in batches]  # of each trainer
    for members in (update["trainers"] for update in server["updates"]):
        rows = [gradients_of(models[t], next(batches[t])) for t in members]
        for p, *gradients in zip(model.parameters(), *rows, strict=True):
            p.grad = torch.stack(gradients).mean(dim=0)
        optimizer.step()
        for t in members:
            models[t] = copy.deepcopy(model)
    change = (flat(model.parameters()) - first).abs().max()
    wanted = {f"trainer{t}": m for t, m in enumerate(models)} | {"server0": model}
    both = zip([*trained, server["parameters"]], wanted.items(), strict=True)
    for got, (name, replayed) in both:
        error = float((got - flat(replayed.parameters())).abs().max() / change)
        if not error < TOLERANCE:
            after = f"after {len(server['updates'])} updates the parameters of {name}"
            return f"{after} are {error:.2g} of their change off a replay of the server's log"
    return None


def derive(case: Case, times: Times, facts: list[dict[str, Any]]) -> None:
    """Fill in the metrics and the check."""
    key, m, updates = case.key, case.metrics, facts[0]["updates"]
    slowest, blocks_s = own_pace(times.each(), case.rounds, "step_time")
    m |= slowest | own_pace(times.returned, case.rounds, "latency")[0]
    arrived = sum(len(update["trainers"]) for update in updates)
    m["gradients_per_update"] = size = arrived / len(updates)
    m["gradients_per_s"] = len(facts) * sum(case.rounds) / sum(blocks_s)
    m["updates_per_s"] = m["gradients_per_s"] / size
    rates = [len(facts) * n / s / size for n, s in zip(case.rounds, blocks_s, strict=True)]
    m["updates_per_s_ci95"] = median_interval(rates)
    m["mb_per_s"] = m["gradients_per_s"] * 2 * 4e-6 * (key["in_features"] + 1) * key["out_features"]
    sent = sum(fact["sent"] for fact in facts)
    lost = f"the trainers sent {sent} gradients, the server's log has {arrived}"
    case.check = verdict(facts[0]["wrong"] or (lost if sent != arrived else None))
    m["updates"], m["log"] = len(updates), updates[-LOGGED:]


def log_of(case: Case) -> str:
    """The server's log as lines: who came when, and each update."""
    size, log, total = case.key["batch_update_size"], case.metrics["log"], case.metrics["updates"]
    lines = [f"log of {case.key['payload']}, {len(log)} of {total} updates; seconds of the server"]
    for number, update in enumerate(log, total - len(log) + 1):
        arrivals = zip(update["trainers"], update["came_s"], strict=True)
        for count, (trainer, came_s) in enumerate(arrivals, 1):
            lines.append(f"{came_s:12.6f}  got trainer{trainer}, {count} of {size}")
        lines.append(f"{update['updated_s']:12.6f}  update {number}: the model is new")
    return "\n".join(lines)


COLUMNS: Columns = {
    "payload": lambda case: case.key["payload"],
    "step\np50 (ms)": metric("step_time_p50_s", 1e3, 3),
    "\nupdates/s": metric("updates_per_s", digits=1),
    "95% ci\nof updates/s": interval_ends("updates_per_s_ci95", digits=1),
    "\ngradients/s": metric("gradients_per_s", digits=1),
    "\nMB/s": metric("mb_per_s"),
    **{f"latency\np{q} (ms)": metric(f"latency_p{q}_s", 1e3, 3) for q in (50, 95, 99)},
}
WIDEST = ["tensors", "100.000", "10000.0", "1000.0 to 1000.0", "10000.0", "1000.00"]


def main() -> int:
    args = parse_args()
    roles = assign_roles(args, servers=1)
    trainers = len(roles.trainers)
    size = args.batch_update_size or trainers
    if size > trainers:
        refuse(f"--batch-update-size {size}: there are {trainers} trainers; try {trainers}")
    key: Key = {name: getattr(args, name) for name in SIZES}
    key |= {"server_device": roles.device(trainers), "device": roles.device(0)}
    key |= {"trainers": trainers, "batch_update_size": size}
    logs: list[str] = []
    with Benchmark("batch_update_ps", args_of_rank(args, roles), roles.trainers) as bench:
        options = rpc_options(args, bench)
        model = f"Linear({args.in_features}, {args.out_features}), {trainers} trainers"
        model += f" with batches of {args.batch_size}"
        bench.begin_table(f"{model}, {size} gradients an update\n{options}", COLUMNS, WIDEST)
        with rpc_workers(bench, roles, options) as devices:
            for payload in args.payload:
                case = {"payload": payload} | key | options.key()
                patience_s = args.straggler_timeout or args.timeout / 2
                work = partial(build, bench, devices[trainers], patience_s)
                measured = bench.measure(case, work, derive, roles.trainers)
                if args.log_updates and measured and "log" in measured.metrics:
                    logs.append(log_of(measured))
        for text in logs:  # not between the rows of the table
            bench.print(f"\n{text}")
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
