#!/usr/bin/env python3
"""How fast is a parameter server that waits for a batch of gradients before it answers?

The server (the last rank) keeps the model. Each trainer computes gradients on its own batch, sends
them, and waits. When `--batch-update-size` gradients have arrived, the server averages them, makes
one step of SGD, and answers all waiting trainers with the new parameters.

    step        = compute gradients, send them, wait; latency: the part from sending to the answer
    gradients/s = of all trainers, by the seconds of each block of steps until its last one is done
    updates/s   = gradients/s / gradients of an update, on average
    MB/s        = gradients/s * 2 * bytes of the parameters: there and back, without pickle's own

    torchrun --nproc-per-node 4 benchmarks/batch_update_ps.py
    torchrun --nproc-per-node 9 benchmarks/batch_update_ps.py --in-features 4096 --out-features 4096
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        benchmarks/batch_update_ps.py --batch-update-size 5 --json report.jsonl

The script does what PyTorch's tutorial "Implementing Batch RPC Processing Using Asynchronous
Executions" and its parameter_server_test.py did, written anew. Their settings are `--payload module
--iters 4 --rpc-threads 16 --rpc-transports auto --log-updates`. BSD-3-Clause.
docs/batch_update_ps.md shows how to read the table.
"""

import argparse
import copy
import itertools
import sys
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.futures import Future
from torch.nn.utils import parameters_to_vector, vector_to_parameters

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.answers import estimate_of, fastest, series
from common.check import verdict
from common.cli import Parser, add_common_flags, list_of, positive_int, refuse
from common.groups import Group, Job
from common.old import Benchmark, Workload
from common.report import Case
from common.rpc import (
    Roles,
    RpcOptions,
    add_rpc_flags,
    args_of_rank,
    assign_roles,
    host,
    hosted,
    rpc_options,
    rpc_workers,
)
from common.stats import Times, median_interval
from common.table import Columns, interval_ends, metric
from common.timing import LEAD_IN
from common.workloads.phases import own_pace

PAYLOADS = ("module", "tensors")


class Size(NamedTuple):
    default: int
    help: str


SIZES = {
    "in_features": Size(100, "columns of the model, which is a linear layer"),
    "out_features": Size(30, "rows of the model"),
    "batch_size": Size(20, "samples of a trainer's step"),
    "num_batches": Size(4, "different batches that a trainer takes in turn; --iters counts steps"),
}
CHECKED_STEPS = 20
LOGGED = 300  # the report keeps so many updates of a case, the newest ones
TOLERANCE = 1e-4  # relative to what the updates change; a lost gradient is 1 in 20 * trainers
Key = dict[str, Any]
# `trainers` in the order of their gradients, `came_s` of each, `updated_s` of the model; later
# `kind`, which is `check`, `warm-up` or `timed`
Update = dict[str, Any]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    for name, size in SIZES.items():
        flag = f"--{name.replace('_', '-')}"
        text = f"{size.help} (default: {size.default})"
        add(flag, type=positive_int, default=size.default, metavar="N", help=text)
    text = "gradients that make an update (default: one of each trainer)"
    add("--batch-update-size", type=positive_int, metavar="N", help=text)
    payload = """module: a list of gradients there and the pickled module back, as the tutorial
        does; tensors: a flat tensor each way (default: both)"""
    add("--payload", type=list_of(str, PAYLOADS), default=[*PAYLOADS], metavar="NAME", help=payload)
    text = "after the table print the server's log: which gradients came when, and each update"
    add("--log-updates", action="store_true", help=text)
    add_rpc_flags(parser, server_device="cpu", stragglers=True)
    add_common_flags(parser)
    parser.set_defaults(backend="gloo")  # trainers meet on it; what is timed goes over RPC
    return parser.parse_args(argv)


def create_model(key: Key, device: str = "cpu") -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(key["in_features"], key["out_features"]).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    return model, optimizer


def create_batches(key: Key, trainer: int) -> torch.Tensor:
    """The inputs of a trainer: [batches, batch, in_features]. All labels are zeros."""
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
    """Answers all who sent gradients, once enough have arrived. RPC's threads call `update`."""

    def __init__(self, key: Key, device: str) -> None:
        self.key = key
        self.device = torch.device(device)
        self.cuda: list[Any] = [self.device] if self.device.type == "cuda" else []
        self.model, self.optimizer = create_model(key, device)
        parameters = list(self.model.parameters())
        self.gradient = torch.zeros_like(flat(parameters))  # the sum of those that have arrived
        parts = self.gradient.split([parameter.numel() for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        self.lock = threading.Lock()
        self.future: Future[Any] = Future(devices=self.cuda)
        self.start_s = perf_counter()
        self.waiting: list[int] = []  # the trainers of the next update
        self.came_s: list[float] = []  # when the gradients of each of them arrived
        self.sent = [0] * key["trainers"]  # how many gradients each trainer has sent
        self.updates: list[Update] = []  # the log

    def update(self, trainer: int, sent: Any) -> Future[Any]:
        """Add a trainer's gradients. The future has the parameters after the update."""
        gradient = sent if self.key["payload"] == "tensors" else flat(sent)
        answer = None
        with self.lock:  # `+=` reads and writes: two threads at once would lose gradients
            future = self.future
            self.gradient += gradient.to(self.device)
            self.waiting.append(trainer)
            self.came_s.append(self.now_s())
            self.sent[trainer] += 1
            # fewer are enough where nobody is missing: all may have sent their last ones
            if len(self.waiting) == self.key["batch_update_size"] or not self.missing():
                answer = self.step(gradient.device)
                self.future = Future(devices=self.cuda)
            if self.cuda:  # each request has a stream of its own
                torch.cuda.current_stream(self.device).synchronize()
        if answer is not None:
            future.set_result(answer)  # not under the lock: the next gradients may come meanwhile
        return future

    def now_s(self) -> float:
        """Seconds since this server began, to the microsecond."""
        return round(perf_counter() - self.start_s, 6)

    def missing(self) -> list[int]:
        """The trainers that have sent fewer gradients than another one, and do not wait."""
        most = max(self.sent)
        late = [trainer for trainer, count in enumerate(self.sent) if count < most]
        return [trainer for trainer in late if trainer not in self.waiting]

    def step(self, wire: torch.device) -> Any:
        """Update the model by the gradients that have arrived. The answer, on `wire`."""
        self.gradient /= len(self.waiting)
        self.optimizer.step()
        self.gradient.zero_()
        log = {"trainers": self.waiting, "came_s": self.came_s, "updated_s": self.now_s()}
        self.updates.append(log)
        self.waiting, self.came_s = [], []
        if self.key["payload"] == "tensors":
            return flat(self.model.parameters()).to(wire)
        return copy.deepcopy(self.model).to(wire)  # the model may change while its copy is sent


@rpc.functions.async_execution
def update_and_fetch(trainer: int, gradients: Any) -> Future[Any]:
    return hosted().update(trainer, gradients)


def get_state() -> dict[str, Any]:
    server: BatchUpdateServer = hosted()
    parameters = flat(server.model.parameters()).cpu()
    return {"updates": server.updates, "parameters": parameters, "missing": server.missing()}


# -- a trainer -------------------------------------------------------------------------------------


def send(trainer: int, gradients: Any, patience_s: float) -> Any:
    """Send gradients to the server. Its answer, or TimeoutError with who has not sent."""
    try:
        return rpc.rpc_sync("server0", update_and_fetch, (trainer, gradients), {}, patience_s)
    except RuntimeError as error:
        if "ran for more than" not in str(error):
            raise
        missing = rpc.rpc_sync("server0", get_state)["missing"]
        names = ", ".join(f"trainer{number}" for number in missing) or "nobody"
        text = f"waited {patience_s:g} s (--straggler-timeout); missing: {names}"
        raise TimeoutError(text) from None


def build(job: Job, key: Key, group: Group, *, server_device: str, patience_s: float) -> Workload:
    """What a trainer measures; before that, the check."""
    trainer, device = job.rank, str(job.device)
    wire = "cpu" if server_device == "cpu" else device  # without a device map CUDA cannot travel
    if trainer == 0:
        rpc.rpc_sync("server0", host, args=(BatchUpdateServer, key, server_device))
    batches = create_batches(key, trainer).to(device)
    model, _ = create_model(key, device)
    gradients_of(model, batches[0])
    # From here on the server has the same model, and every trainer is ready to send gradients.
    # Without the barrier the others would time out while one is still setting up.
    dist.barrier(group.control)
    sent = 0

    def step() -> float:
        """Seconds from sending the gradients until the new parameters are here."""
        nonlocal model, sent
        gradients = gradients_of(model, batches[sent % len(batches)])
        start = perf_counter()
        if key["payload"] == "tensors":
            parameters = send(trainer, flat(gradients).to(wire), patience_s).to(device)
            vector_to_parameters(parameters, model.parameters())
        else:
            on_wire = [gradient.to(wire) for gradient in gradients]
            model = send(trainer, on_wire, patience_s).to(device)
        sent += 1
        return perf_counter() - start

    for _ in range(CHECKED_STEPS):
        step()
    wrong = compare_with_replay(key, group, flat(model.parameters()).cpu())

    def facts() -> dict[str, Any]:  # all trainers are done: their times are gathered
        updates = rpc.rpc_sync("server0", get_state)["updates"] if trainer == 0 else []
        return {"wrong": wrong, "sent": sent, "updates": updates}

    # the trainers do not wait for each other where an update needs fewer than all of them
    return Workload(step, facts=facts, returned=list, aligned=False)


# -- the check: one process replays the server's log -----------------------------------------------


def compare_with_replay(key: Key, group: Group, parameters: torch.Tensor) -> str | None:
    """What is wrong with the parameters of the trainers or the server; trainer 0 knows it."""
    is_first = dist.get_rank(group.control) == 0
    trained: list[Any] | None = [None] * len(group.ranks) if is_first else None
    dist.gather_object(parameters, trained, group_dst=0, group=group.control)
    if trained is None:
        return None
    state = rpc.rpc_sync("server0", get_state)
    parameters_by_name = {f"trainer{trainer}": x for trainer, x in enumerate(trained)}
    parameters_by_name["server0"] = state["parameters"]
    return difference(key, parameters_by_name, state["updates"])


def difference(
    key: Key, parameters_by_name: dict[str, torch.Tensor], updates: list[Update]
) -> str | None:
    """Whose parameters are not those of one process that replays the updates; or None."""
    model, _ = create_model(key)
    first = flat(model.parameters())
    replayed = replay(key, updates)
    change = (replayed["server0"] - first).abs().max()
    for name, wanted in replayed.items():
        error = float((parameters_by_name[name] - wanted).abs().max() / change)
        if not error < TOLERANCE:  # NaN is wrong, too
            after = f"after {len(updates)} updates the parameters of {name}"
            return f"{after} are {error:.2g} of their change off a replay of the server's log"
    return None


def replay(key: Key, updates: list[Update]) -> dict[str, torch.Tensor]:
    """The parameters of each trainer and of the server after these updates, in one process."""
    model, optimizer = create_model(key)
    trainers = range(key["trainers"])
    batches = [itertools.cycle(create_batches(key, trainer)) for trainer in trainers]
    models = [copy.deepcopy(model) for _ in trainers]
    for update in updates:
        members = update["trainers"]
        rows = []
        for trainer in members:
            batch = next(batches[trainer])
            rows.append(gradients_of(models[trainer], batch))
        for parameter, *gradients in zip(model.parameters(), *rows, strict=True):
            parameter.grad = torch.stack(gradients).mean(dim=0)
        optimizer.step()
        for trainer in members:
            models[trainer] = copy.deepcopy(model)
    parameters = {}
    for trainer in trainers:
        parameters[f"trainer{trainer}"] = flat(models[trainer].parameters())
    parameters["server0"] = flat(model.parameters())
    return parameters


# -- what rank 0 makes of it -----------------------------------------------------------------------


def derive(case: Case, times: Times, facts: list[dict[str, Any]]) -> None:
    """Fill in the metrics and the check. facts: of each trainer."""
    key, metrics = case.key, case.metrics
    trainers = len(facts)
    step_times, blocks_s = own_pace(times.each(), case.rounds, "step_time")
    latencies, _ = own_pace(times.returned, case.rounds, "latency")
    metrics |= step_times | latencies
    updates = facts[0]["updates"]
    arrived = sum(len(update["trainers"]) for update in updates)
    size = arrived / len(updates)
    metrics["gradients_per_update"] = size
    metrics["gradients_per_s"] = trainers * sum(case.rounds) / sum(blocks_s)
    metrics["updates_per_s"] = metrics["gradients_per_s"] / size
    rates = []
    for steps, block_s in zip(case.rounds, blocks_s, strict=True):
        rates.append(trainers * steps / block_s / size)
    metrics["updates_per_s_ci95"] = median_interval(rates)
    parameters = (key["in_features"] + 1) * key["out_features"]
    metrics["mb_per_s"] = metrics["gradients_per_s"] * 2 * 4e-6 * parameters
    problem = facts[0]["wrong"]
    sent = sum(fact["sent"] for fact in facts)
    if not problem and sent != arrived:
        problem = f"the trainers sent {sent} gradients, the server's log has {arrived}"
    case.check = verdict(problem)
    name_updates(updates, case.rounds)
    metrics["updates"] = len(updates)
    metrics["updates_by_kind"] = Counter(update["kind"] for update in updates)
    metrics["log"] = updates[-LOGGED:]


def name_updates(updates: list[Update], rounds: list[int]) -> None:
    """Say of each update what it was for; with a gradient of a timed step it is `timed`.

    rounds: the timed steps of each block.
    """
    members = [trainer for update in updates for trainer in update["trainers"]]
    steps = max(Counter(members).values())  # of a trainer: all make as many
    blocks: list[str] = []
    for timed in rounds:
        blocks += ["warm-up"] * LEAD_IN + ["timed"] * timed
    kinds = ["check"] * CHECKED_STEPS
    kinds += ["warm-up"] * (steps - len(kinds) - len(blocks)) + blocks
    sent: Counter[int] = Counter()  # by trainer
    for update in updates:
        of_gradients = [kinds[sent[trainer]] for trainer in update["trainers"]]
        sent.update(update["trainers"])
        update["kind"] = "timed" if "timed" in of_gradients else of_gradients[0]


def log_of(case: Case) -> str:
    """The server's log as lines: which gradients came when, and each update."""
    size = case.key["batch_update_size"]
    log = case.metrics["log"]
    total = case.metrics["updates"]
    by_kind = [f"{count} {kind}" for kind, count in case.metrics["updates_by_kind"].items()]
    lines = [f"log of {case.key['payload']}, {len(log)} of {total} updates; seconds of the server"]
    lines.append(f"all updates: {', '.join(by_kind)}")
    for number, update in enumerate(log, total - len(log) + 1):
        arrivals = zip(update["trainers"], update["came_s"], strict=True)
        for count, (trainer, came_s) in enumerate(arrivals, 1):
            lines.append(f"{came_s:12.6f}  got trainer{trainer}, {count} of {size}")
        name = f"update {number}, {update['kind']}"
        lines.append(f"{update['updated_s']:12.6f}  {name}: the model is new")
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


def answer(cases: list[Case]) -> list[str]:
    """How many updates a second, and which payload makes more of them."""
    sentences: list[str] = []
    for name, same in series(cases, ("payload",)).items():
        rates = {}
        for case in same:
            if rate := estimate_of(case, "updates_per_s", "updates_per_s_ci95"):
                rates[case.key["payload"]] = rate
        if not rates:
            continue
        best = max(rates, key=lambda payload: rates[payload].value)
        sentence = f"{name}payload {best} makes {rates[best].text('updates/s')}"
        if len(rates) > 1:
            seconds = {payload: rate.inverse() for payload, rate in rates.items()}
            sentence += f"; {fastest(seconds)}"
        sentences.append(sentence)
    return sentences


def refuse_large_updates(args: argparse.Namespace, trainers: int) -> None:
    """Refuse updates of more gradients than there are trainers: each sends one and waits."""
    size = args.batch_update_size or trainers
    if size > trainers:
        refuse(f"--batch-update-size {size}: there are {trainers} trainers; try {trainers}")


def plan(args: argparse.Namespace, roles: Roles, options: RpcOptions) -> list[Key]:
    """The key of each case, one a payload."""
    trainers = len(roles.trainers)
    fixed: Key = {name: getattr(args, name) for name in SIZES}
    fixed["server_device"] = roles.device(roles.servers[0])
    fixed["device"] = roles.device(roles.trainers[0])
    fixed |= {"trainers": trainers, "batch_update_size": args.batch_update_size or trainers}
    return [{"payload": payload} | fixed | options.key() for payload in args.payload]


def title_of(key: Key, options: RpcOptions) -> str:
    """What all cases share."""
    model = f"Linear({key['in_features']}, {key['out_features']}), {key['trainers']} trainers"
    batches = f"batches of {key['batch_size']}"
    return f"{model} with {batches}, {key['batch_update_size']} gradients an update\n{options}"


def main() -> int:
    args = parse_args()
    roles = assign_roles(args, servers=1)
    refuse_large_updates(args, len(roles.trainers))
    logs: list[str] = []
    torch.optim.SGD([torch.zeros(1)])  # the first optimizer imports torch._dynamo: for seconds
    with Benchmark("batch_update_ps", args_of_rank(args, roles), roles.trainers, answer) as bench:
        options = rpc_options(args, bench)
        keys = plan(args, roles, options)
        bench.announce(keys)
        bench.begin_table(title_of(keys[0], options), COLUMNS, WIDEST)
        with rpc_workers(bench, roles, options) as devices:
            build_case = partial(
                build,
                bench.job,
                server_device=devices[roles.servers[0]],
                patience_s=args.straggler_timeout or args.timeout / 2,
            )
            for key in keys:
                case = bench.measure(key, build_case, derive, roles.trainers)
                if args.log_updates and case and "log" in case.metrics:
                    logs.append(log_of(case))
        for log in logs:  # not between the rows of the table
            bench.print(f"\n{log}")
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
