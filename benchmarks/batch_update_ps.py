#!/usr/bin/env python3
"""How fast is a parameter server that waits for a batch of gradients before it replies?

The server, the last rank, stores the model. Each trainer computes gradients on its own batch, sends
them to the server, and waits for the reply. When `--batch-update-size` gradients have arrived, the
server averages them, takes one SGD step, and sends the new parameters to all waiting trainers.

    step          compute gradients, send them, wait for the reply
    latency       the part of a step from sending the gradients until the trainer has installed the
                  new parameters
    gradients/s = median over blocks of (gradients of all trainers) / (seconds until the last
                  trainer has finished)
    updates/s   = gradients/s / mean number of gradients per update
    MB/s        = gradients/s * 2 * bytes of the parameters (request and reply, without the overhead
                  of pickle)

    torchrun --nproc-per-node 4 benchmarks/batch_update_ps.py
    torchrun --nproc-per-node 9 benchmarks/batch_update_ps.py --in-features 4096 --out-features 4096
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        benchmarks/batch_update_ps.py --batch-update-size 5 --json report.jsonl

The script is a new implementation of parameter_server_test.py, the code of PyTorch's tutorial
"Implementing Batch RPC Processing Using Asynchronous Executions". The settings of the tutorial are
`--payload module --iters 4 --rpc-threads 16 --rpc-transports auto --log-updates`.
docs/batch_update_ps.md explains the table. BSD-3-Clause.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import exits
from harness.cli import Parser, add_common_flags, list_of, positive_int
from harness.exits import refuse

exits.report_missing_packages()

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.futures import Future
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from benchmarks.workloads.check import verdict
from benchmarks.workloads.phases import unaligned_metrics
from benchmarks.workloads.roles import args_of_rank, assign_roles
from benchmarks.workloads.rpc_flags import add_rpc_flags, rpc_options, rpc_workers
from benchmarks.workloads.settings import side_by_side
from common.groups import Group, Job
from common.rpc import Roles
from common.stats import Times
from common.table import Columns, Table, ends, metric, relative
from common.timing import Workload
from harness.benchmark import Benchmark, Key, Planned
from harness.environment import count_of
from harness.report import Case

PAYLOADS = ("module", "tensors")
SIZES = {  # by flag: default, help
    "in_features": (100, "input features of the model, a linear layer"),
    "out_features": (30, "output features of the model"),
    "batch_size": (20, "samples per trainer and step"),
    "num_batches": (4, "number of different batches per trainer, used cyclically"),
}
CHECKED_STEPS = 20
MAX_LOGGED = 300  # number of most recent updates of a case that the report keeps
# relative to the largest change of a parameter, of which a lost gradient is 1 / (20 * trainers)
TOLERANCE = 1e-4


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    for name, (default, text) in SIZES.items():
        flag, text = f"--{name.replace('_', '-')}", f"{text} (default: {default})"
        add(flag, type=positive_int, default=default, metavar="N", help=text)
    add(
        "--batch-update-size",
        type=positive_int,
        metavar="N",
        help="number of gradients per update (default: one per trainer)",
    )
    add(
        "--payload",
        type=list_of(str, PAYLOADS),
        default=[*PAYLOADS],
        metavar="NAME",
        help="module: send a list of gradients and receive the pickled module, as in the "
        "tutorial; tensors: send and receive one flat tensor (default: both)",
    )
    add(
        "--log-updates",
        action="store_true",
        help="after the table, print the server's log of arriving gradients and updates",
    )
    add_rpc_flags(parser, server_device="cpu", stragglers=True)
    add_common_flags(parser)
    parser.set_defaults(backend="gloo")  # for barriers and the check only: the timed calls use RPC
    return parser.parse_args(argv)


# [core]
# An update in the server's log. trainers: in the order in which their gradients arrived; came_s:
# times of these arrivals; updated_s: time of the update. In seconds since the server started.
Update = dict[str, Any]


def create_model(inputs: int, outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs)


def create_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)


def create_batches(count: int, size: int, inputs: int, trainer: int) -> Tensor:
    """The inputs of a trainer, [count, size, inputs]. All labels are zero.

    trainer: its number, which seeds the generator.
    """
    generator = torch.Generator().manual_seed(trainer)
    return torch.randn((count, size, inputs), generator=generator)


def gradients_of(model: nn.Module, inputs: Tensor) -> list[Any]:
    """The gradient of each parameter. inputs: [size, inputs]."""
    model.zero_grad()
    outputs = model(inputs)
    nn.functional.l1_loss(outputs, torch.zeros_like(outputs)).backward()
    return [parameter.grad for parameter in model.parameters()]


def flat(tensors: Any) -> Tensor:
    return parameters_to_vector(tensors).detach()


class BatchUpdateServer:
    """Updates the model once enough gradients have arrived, then replies to their trainers."""

    def __init__(self, model: nn.Module, trainers: int, update_size: int, device: str) -> None:
        """trainers: number of trainers. update_size: number of gradients per update."""
        self.update_size = update_size
        self.device = torch.device(device)
        self.cuda: list[Any] = [self.device] if self.device.type == "cuda" else []
        self.model = model.to(device)
        self.optimizer = create_optimizer(model)
        parameters = list(model.parameters())
        self.gradient = torch.zeros_like(flat(parameters))  # sum for the next update
        parts = self.gradient.split([parameter.numel() for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        self.synchronize()
        self.lock = threading.Lock()
        self.updated: Future[Any] = Future(devices=self.cuda)  # completed by the next update
        self.start_s = perf_counter()
        self.waiting: list[int] = []  # trainers whose gradients are in the sum
        self.came_s: list[float] = []  # time of arrival of each of these gradients
        self.sent = [0] * trainers  # number of gradients received from each trainer
        self.updates: list[Update] = []  # the log

    def update(self, trainer: int, gradients: Any) -> Future[Any]:
        """Add a trainer's gradients; the future holds the parameters after the update. Thread-safe.

        gradients: a flat tensor, to which the reply is a flat tensor, or a list of tensors, to
        which the reply is the module.
        """
        is_flat = isinstance(gradients, Tensor)
        gradient = gradients if is_flat else flat(gradients)
        parameters = None
        with self.lock:  # `+=` is not atomic: concurrent calls would lose gradients
            updated = self.updated
            self.gradient += gradient.to(self.device)
            self.waiting.append(trainer)
            self.came_s.append(self.now_s())
            self.sent[trainer] += 1
            # fewer gradients suffice if no trainer is behind: no further ones may arrive
            if len(self.waiting) == self.update_size or not self.missing():
                # no copy needed if all trainers wait: gradients arrive only after the reply
                in_place = len(self.waiting) == len(self.sent) and self.device == gradient.device
                self.step()
                if is_flat:
                    reply: Any = flat(self.model.parameters())
                else:
                    reply = self.model if in_place else copy.deepcopy(self.model)
                parameters = reply if in_place else reply.to(gradient.device)
                self.updated = Future(devices=self.cuda)
            self.synchronize()
        if parameters is not None:  # outside the lock, so that gradients can arrive meanwhile
            updated.set_result(parameters)
        return updated

    def synchronize(self) -> None:
        """Wait for this call's CUDA stream: calls run on different streams, which the lock does not
        order."""
        if self.cuda:
            torch.cuda.current_stream(self.device).synchronize()

    def now_s(self) -> float:
        """Seconds since this server started, rounded to microseconds."""
        return round(perf_counter() - self.start_s, 6)

    def missing(self) -> list[int]:
        """The trainers that have sent fewer gradients than other trainers and are not waiting."""
        most = max(self.sent)
        late = [trainer for trainer, count in enumerate(self.sent) if count < most]
        return [trainer for trainer in late if trainer not in self.waiting]

    def step(self) -> None:
        """Update the model with the mean of the gradients that have arrived."""
        self.gradient /= len(self.waiting)
        self.optimizer.step()
        self.gradient.zero_()
        log = {"trainers": self.waiting, "came_s": self.came_s, "updated_s": self.now_s()}
        self.updates.append(log)
        self.waiting, self.came_s = [], []


SERVER: list[BatchUpdateServer] = []  # the server, if this process is one


def start_server(inputs: int, outputs: int, trainers: int, update_size: int, device: str) -> None:
    model = create_model(inputs, outputs)
    SERVER[:] = [BatchUpdateServer(model, trainers, update_size, device)]


@rpc.functions.async_execution
def update_and_fetch(trainer: int, gradients: Any) -> Future[Any]:
    return SERVER[0].update(trainer, gradients)


def get_state() -> dict[str, Any]:
    server = SERVER[0]
    parameters = flat(server.model.parameters()).cpu()
    return {"updates": server.updates, "parameters": parameters, "missing": server.missing()}


def send_gradients(trainer: int, gradients: Any, timeout_s: float) -> Any:
    """Send gradients to the server and return its reply.

    Raises TimeoutError with the names of the trainers that have not sent their gradients.
    """
    try:
        return rpc.rpc_sync("server0", update_and_fetch, (trainer, gradients), {}, timeout_s)
    except RuntimeError as error:
        if "ran for more than" not in str(error):
            raise
        missing = rpc.rpc_sync("server0", get_state)["missing"]
        names = ", ".join(f"trainer{number}" for number in missing) or "none"
        raise TimeoutError(f"no reply within {timeout_s:g} s; gradients missing: {names}") from None


# [/core]
# -- a case ----------------------------------------------------------------------------------------


def model_of(key: Key) -> nn.Module:
    return create_model(key["in_features"], key["out_features"])


def batches_of(key: Key, trainer: int) -> Tensor:
    return create_batches(key["num_batches"], key["batch_size"], key["in_features"], trainer)


def build(job: Job, key: Key, group: Group, *, server_device: str, timeout_s: float) -> Workload:
    """Check the first steps, then build the workload of a trainer.

    timeout_s: limit on the wait for a reply.
    """
    trainer, device = job.rank, str(job.device)
    # RPC sends CUDA tensors only over a device map, which requires both sides to be on CUDA
    wire = "cpu" if server_device == "cpu" else device
    if trainer == 0:
        names = ("in_features", "out_features", "ranks", "batch_update_size")
        sizes = [key[name] for name in names]
        rpc.rpc_sync("server0", start_server, args=(*sizes, server_device))
    batches = batches_of(key, trainer).to(device)
    model = model_of(key).to(device)
    create_optimizer(model)  # imports parts of torch; the first step must not include that
    gradients_of(model, batches[0])
    # After this barrier the server has the same model and all trainers are ready to send gradients.
    # Without it, trainers would time out while another one is still setting up.
    dist.barrier(group.control)
    sent = 0

    def step() -> float:
        """Train on a batch. Returns the latency in seconds, until the new parameters are set."""
        nonlocal model, sent
        gradients = gradients_of(model, batches[sent % len(batches)])
        start = perf_counter()
        if key["payload"] == "tensors":
            parameters = send_gradients(trainer, flat(gradients).to(wire), timeout_s).to(device)
            vector_to_parameters(parameters, model.parameters())
        else:
            on_wire = [gradient.to(wire) for gradient in gradients]
            reply = send_gradients(trainer, on_wire, timeout_s)
            model = reply if wire == device else reply.to(device)
        sent += 1
        return perf_counter() - start

    for _ in range(CHECKED_STEPS):
        step()
    wrong = compare_with_replay(key, group, flat(model.parameters()).cpu())

    def facts() -> dict[str, Any]:  # all trainers have finished: their times were gathered
        updates = rpc.rpc_sync("server0", get_state)["updates"] if trainer == 0 else []
        return {"wrong": wrong, "sent": sent, "updates": updates}

    # not aligned: with a smaller --batch-update-size trainers do not wait for each other
    return Workload(step, facts=facts, returned=list, aligned=False)


def compare_with_replay(key: Key, group: Group, parameters: Tensor) -> str | None:
    """Compare the parameters of all trainers and of the server with a replay of the server's log.

    parameters: of this trainer, [n]. Returns a description of the first difference on trainer 0;
    None on other trainers, and if there is no difference.
    """
    is_first = dist.get_rank(group.control) == 0
    trained: list[Any] | None = [None] * len(group.ranks) if is_first else None
    dist.gather_object(parameters, trained, group_dst=0, group=group.control)
    if trained is None:
        return None
    state = rpc.rpc_sync("server0", get_state)
    replayed = replay_updates(key, state["updates"])
    change = (replayed[-1] - flat(model_of(key).parameters())).abs().max()
    names = [*(f"trainer{trainer}" for trainer in range(len(trained))), "server0"]
    for name, got, expected in zip(names, [*trained, state["parameters"]], replayed, strict=True):
        error = float((got - expected).abs().max() / change)
        if not error < TOLERANCE:  # also if it is NaN
            after = f"after {len(state['updates'])} updates the parameters of {name}"
            return f"{after} differ from a replay of its log by {error:.2g} of their change"
    return None


def replay_updates(key: Key, updates: list[Update]) -> list[Tensor]:
    """Apply the updates of a log in one process.

    Returns the parameters of each trainer, then those of the server, [n] each.
    """
    model = model_of(key)
    optimizer = create_optimizer(model)
    trainers = range(key["ranks"])
    batches = [itertools.cycle(batches_of(key, trainer)) for trainer in trainers]
    models = [copy.deepcopy(model) for _ in trainers]
    for update in updates:
        members = update["trainers"]
        rows = [gradients_of(models[trainer], next(batches[trainer])) for trainer in members]
        for parameter, *gradients in zip(model.parameters(), *rows, strict=True):
            parameter.grad = torch.stack(gradients).mean(dim=0)
        optimizer.step()
        for trainer in members:
            models[trainer] = copy.deepcopy(model)
    return [flat(trained.parameters()) for trained in (*models, model)]


def derive(case: Case, times: Times, facts: list[dict[str, Any]]) -> None:
    """Compute the metrics and the verdict of the check. facts: one entry per trainer."""
    key, metrics = case.key, case.metrics
    step_times, gradients_per_s = unaligned_metrics(times.each(), case.rounds, "step")
    latencies, _ = unaligned_metrics(times.returned, case.rounds, "latency")
    metrics |= step_times | latencies
    updates = facts[0]["updates"]
    arrived = sum(len(update["trainers"]) for update in updates)
    metrics["gradients_per_update"] = arrived / len(updates)
    metrics["gradients_per_s"] = gradients_per_s
    metrics["updates_per_s"] = gradients_per_s / metrics["gradients_per_update"]
    parameters = (key["in_features"] + 1) * key["out_features"]
    metrics["mb_per_s"] = gradients_per_s * 2 * 4e-6 * parameters
    problem = facts[0]["wrong"]
    sent = sum(fact["sent"] for fact in facts)
    if not problem and sent != arrived:
        problem = f"the trainers sent {sent} gradients, but the server's log contains {arrived}"
    case.check = verdict(problem)
    metrics["updates"] = len(updates)
    metrics["log"] = updates[-MAX_LOGGED:]


# -- output ----------------------------------------------------------------------------------------

COLUMNS: Columns = {
    "payload": lambda case: case.name,
    "step\np50 (ms)": metric("step_s", 1e3, 3),
    "95% ci\nof p50": relative("step_s"),
    "\nupdates/s": metric("updates_per_s", digits=1),
    "95% ci\nof updates/s": ends("updates_per_s", digits=1),
    "latency\np50 (ms)": metric("latency_s", 1e3, 3),
    "95% ci\n(ms)": ends("latency_s", 1e3, 3),
    "\ngradients/s": metric("gradients_per_s", digits=1),
    "gradients\n/update": metric("gradients_per_update", digits=3),
    "\nMB/s": metric("mb_per_s"),
    "latency\np95 (ms)": metric("latency_p95_s", 1e3, 3),
    "latency\np99 (ms)": metric("latency_p99_s", 1e3, 3),
}
WIDEST = ["", "100.000", "+-10.0%", "10000.0", "1000.0 to 1000.0", "100.000"]


def log_of(case: Case) -> str:
    """The server's log: a line for each gradient and for each update, with its time."""
    size = case.key["batch_update_size"]
    log = case.metrics["log"]
    total = case.metrics["updates"]
    shown = f"{len(log)} of {total} updates"
    lines = [f"log of {case.key['payload']}, {shown}; seconds since the server started"]
    for number, update in enumerate(log, total - len(log) + 1):
        arrivals = zip(update["trainers"], update["came_s"], strict=True)
        for count, (trainer, came_s) in enumerate(arrivals, 1):
            lines.append(f"{came_s:12.6f}  gradients of trainer{trainer}, {count} of {size}")
        lines.append(f"{update['updated_s']:12.6f}  update {number}: model updated")
    return "\n".join(lines)


def answer(cases: list[Case]) -> str:
    """The update rate with each payload."""
    rates = {f"payload {case.name}": case.metrics["updates_per_s"] for case in cases}
    return f"the server performs {side_by_side(rates, 'updates/s')}"


# -- the cases -------------------------------------------------------------------------------------


def plan(args: argparse.Namespace, roles: Roles) -> list[Planned]:
    """A case for each payload."""
    trainers = len(roles.trainers)
    size = args.batch_update_size or trainers
    if size > trainers:  # it would never be complete: a trainer sends one gradient, then waits
        limit = f"expected at most the number of trainers ({trainers})"
        refuse(f"--batch-update-size: {limit}, got {size}; try {trainers}")
    fixed: Key = {name: getattr(args, name) for name in SIZES}
    fixed |= {"server_device": roles.device(roles.servers[0]), "batch_update_size": size}
    return [Planned(name, trainers, {"payload": name} | fixed) for name in args.payload]


def main() -> int:
    args = parse_args()
    roles = assign_roles(args, servers=1)
    cases = plan(args, roles)
    timeout_s = args.straggler_timeout or args.timeout / 2
    with Benchmark("batch_update_ps", args_of_rank(args, roles), roles.trainers) as bench:
        options = rpc_options(args, bench)
        cases = [case._replace(key=case.key | options.by_name()) for case in cases]
        update = f"{count_of(cases[0].key['batch_update_size'], 'gradient')} per update"
        title = f"Linear({args.in_features}, {args.out_features}), "
        title += f"{count_of(len(roles.trainers), 'trainer')} with batches of {args.batch_size}, "
        title += f"{update}\n{options}"
        bench.announce({title: cases})
        with rpc_workers(bench, roles, options) as devices:
            device = devices[roles.servers[0]]
            make = partial(build, bench.job, server_device=device, timeout_s=timeout_s)
            layout, on = Table(COLUMNS, WIDEST), roles.trainers
            table = bench.run(title, cases, COLUMNS, make, derive, answer, layout=layout, ranks=on)
        if args.log_updates:
            for case in table.passed:
                bench.print(f"\n{log_of(case)}")
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
