#!/usr/bin/env python3
"""How many updates a second does a parameter server make that waits for a batch of gradients?

The server (the last rank) keeps the model. Each trainer (the other ranks) computes gradients on
its own batch, sends them, and waits. Once `--batch-update-size` gradients are there the server
averages them, makes one step of SGD, and answers all who wait with the new parameters.

    update time = time between two steps of the server
    updates/s   = measured updates / time from the first to the last of them
    gradients/s = gradients in these updates / that time
    latency     = from sending gradients to having the new parameters, on a trainer; per
                  percentile the slowest trainer
    MB/s        = gradients/s * 2 * bytes of the parameters: there and back, without pickle's own

Data and gradients are a part of updates/s, not of the latency. The first --warmup-iters updates
are not counted. Payloads: `module` sends a list of gradients and receives the pickled module, as
the tutorial does; `tensors` sends and receives one flat tensor.

    torchrun --nproc-per-node 4 benchmarks/batch_update_ps.py
    torchrun --nproc-per-node 9 benchmarks/batch_update_ps.py --in-features 4096 --out-features 4096
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        benchmarks/batch_update_ps.py --batch-update-size 8 --json report.json

Does what PyTorch's tutorial "Implementing Batch RPC Processing Using Asynchronous Executions" and
its parameter_server_test.py did, written anew. BSD-3-Clause.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cli

PAYLOAD_NAMES = ("module", "tensors")
CHECKED_UPDATES = 20  # before the timed ones, against a sequential reference
TOLERANCE = 1e-4  # of what these updates change; a lost gradient is 1 in 20 * trainers
ORIGINAL_THREADS = 16  # TensorPipe's default


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = cli.Parser(description=__doc__)
    add = parser.add_argument
    size = cli.positive_int
    add("--in-features", type=size, default=100, metavar="N", help="of nn.Linear (default: 100)")
    add("--out-features", type=size, default=30, metavar="N", help="of nn.Linear (default: 30)")
    add("--batch-size", type=size, default=20, metavar="N", help="a trainer's (default: 20)")
    add("--num-batches", type=size, default=4, metavar="N", help="a trainer's, again and again")
    add("--batch-update-size", type=size, metavar="N", help="(default: the number of trainers)")
    add(
        "--payload",
        type=cli.list_of(str, PAYLOAD_NAMES),
        metavar="NAME",
        help=f"of {', '.join(PAYLOAD_NAMES)}; a list (default: both)",
    )
    add(
        "--straggler-timeout",
        type=cli.positive_float,
        default=10.0,
        metavar="S",
        help="after S seconds without a gradient go on without those that are missing "
        "(default: 10)",
    )
    add(
        "--server-device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where the server keeps the model (default: cpu)",
    )
    add(
        "--compare-original",
        action="store_true",
        help=f"instead: updates/s of `tensors` and these settings over those of `module` and "
        f"{ORIGINAL_THREADS} RPC threads, measured in turns",
    )
    text = "of --compare-original, two starts each; 6 or more have an interval (default: 8)"
    add("--rounds", type=size, metavar="N", help=text)
    cli.add_measurement_flags(parser, min_iters=200)
    cli.add_rpc_flags(parser)
    cli.add_report_flags(parser)
    args = parser.parse_args(argv)
    cli.check_measurement_flags(args)
    if args.rounds and not args.compare_original:
        cli.refuse("--rounds has no effect without --compare-original")
    args.rounds = args.rounds or 8
    if args.compare_original and args.payload:
        cli.refuse("--payload has no effect with --compare-original, which compares the two")
    args.payload = args.payload or list(PAYLOAD_NAMES)
    return args


if __name__ == "__main__":
    ARGS = parse_args()  # before the imports below, so that --help need not wait for them

import copy
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
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

from common.breakdown import bounds
from common.dist import CaseGroup, world_from_environment
from common.memory import available_bytes
from common.parts import Part, run_parts
from common.rpc import (
    Layout,
    RpcOptions,
    hosted,
    make,
    options_from,
    place,
    refuse_mismatch,
    wants_cuda,
    workers,
)
from common.stats import PERCENTILES, median_interval, percentiles, relative_ci95
from common.sweep import Outcome, Sweep, check_report_flags, describe, stop_rule
from common.table import Columns, StreamedTable, metric
from common.timing import Measurement, StopRule
from common.versus import Variant, measure_part


@dataclass(frozen=True)
class Config:
    """What is trained, and how; the same on the server and on all trainers."""

    in_features: int
    out_features: int
    batch_size: int
    num_batches: int
    trainers: int
    batch_update_size: int
    payload: str
    straggler_timeout_s: float
    device: str  # of the trainers: cpu or cuda
    server_device: str

    @property
    def wire(self) -> str:
        """Where tensors are that travel: on CUDA, by device maps, if both sides are."""
        both = self.device == "cuda" and self.server_device.startswith("cuda")
        return "cuda" if both else "cpu"


# -- the model, and what travels ------------------------------------------------------------------


def create_model(config: Config) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(config.in_features, config.out_features)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)


def create_batches(config: Config, trainer: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A trainer's own data: inputs [batch, in_features] and labels [batch, out_features]."""
    generator = torch.Generator().manual_seed(trainer)
    inputs = [
        torch.randn(config.batch_size, config.in_features, generator=generator)
        for _ in range(config.num_batches)
    ]
    return [(x, torch.zeros(config.batch_size, config.out_features)) for x in inputs]


def compute_gradients(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> None:
    model.zero_grad()
    nn.functional.l1_loss(model(inputs), labels).backward()


def gradient_list(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def flat_gradients(model: nn.Module) -> torch.Tensor:
    return parameters_to_vector(gradient_list(model))


def flat_parameters(model: nn.Module) -> torch.Tensor:
    return parameters_to_vector(model.parameters()).detach()


def split_vector(model: nn.Module, vector: torch.Tensor) -> Iterable[torch.Tensor]:
    shapes = [p.shape for p in model.parameters()]
    parts = vector.split([shape.numel() for shape in shapes])
    return (part.view(shape) for part, shape in zip(parts, shapes, strict=True))


def load_vector(model: nn.Module, vector: torch.Tensor, device: torch.device) -> nn.Module:
    vector_to_parameters(vector.to(device), model.parameters())
    return model


def whole_module(model: nn.Module, wire: str) -> nn.Module:
    on_the_wire = next(model.parameters()).device.type == wire
    return model if on_the_wire else copy.deepcopy(model).to(wire)


@dataclass(frozen=True)
class Payload:
    """What a trainer sends, what the server adds up and answers, what the trainer makes of it."""

    gradients: Callable[[nn.Module, str], Any]
    split: Callable[[nn.Module, Any], Iterable[torch.Tensor]]
    parameters: Callable[[nn.Module, str], Any]
    load: Callable[[nn.Module, Any, torch.device], nn.Module]


PAYLOADS = {
    "module": Payload(
        gradients=lambda model, wire: [g.to(wire) for g in gradient_list(model)],
        split=lambda model, gradients: gradients,
        parameters=whole_module,
        load=lambda model, received, device: received.to(device),
    ),
    "tensors": Payload(
        gradients=lambda model, wire: flat_gradients(model).to(wire),
        split=split_vector,
        parameters=lambda model, wire: flat_parameters(model).to(wire),
        load=load_vector,
    ),
}


# -- the server -----------------------------------------------------------------------------------


class BatchUpdateServer:
    """Collects gradients, steps once enough are there, and answers all who sent them.

    Its methods are called by RPC, from several threads at once. Trainers of which nothing is
    heard while others wait are left out until they come back.
    """

    def __init__(self, config: Config, rule: StopRule) -> None:
        self.config, self.rule = config, rule
        self.payload = PAYLOADS[config.payload]
        self.model = create_model(config).to(config.server_device)
        self.optimizer = sgd(self.model)
        for p in self.model.parameters():
            p.grad = torch.zeros_like(p)
        self.lock = threading.Lock()
        self.future: Future[Any] = Future()
        self.members: list[tuple[int, int]] = []  # of the next update: (trainer, version it had)
        self.updates: list[list[tuple[int, int]]] = []
        self.stamps: list[float] = []
        self.versions: dict[int, int] = {}  # what each trainer was last sent
        self.sent = dict.fromkeys(range(config.trainers), 0)  # gradients of each trainer
        self.lost: dict[int, int] = {}  # trainers left out, and the gradients that they had sent
        self.latencies: dict[int, list[float]] = {}  # of the trainers that have finished
        self.finished: Future[None] = Future()
        self.done = False
        self.next_look = 0
        self.last_heard = perf_counter()
        threading.Thread(target=self._watch, daemon=True).start()

    def fetch(self, trainer: int) -> tuple[Any, bool]:
        """The parameters now, and whether to go on."""
        with self.lock:
            self._heard(trainer)
            self.versions[trainer] = len(self.updates)
            return self._answer(), not self.done

    def update(self, trainer: int, gradients: Any) -> Future[Any]:
        """Add a trainer's gradients; the future has what `fetch` returns, after the update."""
        answer_all = None
        with self.lock:  # `+=` reads and writes: two threads at once would lose gradients
            self._heard(trainer)
            if self.done:
                return completed((self._answer(), False))
            self.sent[trainer] += 1
            parts = self.payload.split(self.model, gradients)
            for p, g in zip(self.model.parameters(), parts, strict=True):
                assert p.grad is not None
                p.grad += g.to(p.device)
            self.members.append((trainer, self.versions[trainer]))
            future = self.future
            if len(self.members) >= self._needed():
                answer_all = self._step()
        if answer_all is not None:
            answer_all()  # not under the lock: the next gradients may come in meanwhile
        return future

    def finish(self, trainer: int, latencies: list[float]) -> None:
        """The last word of a trainer."""
        with self.lock:
            self._heard(trainer)
            self.latencies[trainer] = latencies
            self._end_if_all_have()

    def log(self) -> dict[str, Any]:
        """What happened; to be asked for once `finished` is."""
        with self.lock:
            return {
                "updates": self.updates,
                "stamps_s": self.stamps,
                "latencies_s": self.latencies,
                "lost": self.lost,
                "parameters": flat_parameters(self.model).cpu(),
            }

    # all of the following with the lock held

    def _heard(self, trainer: int) -> None:
        self.last_heard = perf_counter()
        self.lost.pop(trainer, None)

    def _needed(self) -> int:
        return min(self.config.batch_update_size, self.config.trainers - len(self.lost))

    def _answer(self) -> Any:
        answer = self.payload.parameters(self.model, self.config.wire)
        if answer is self.model and self._needed() < self.config.trainers:
            answer = copy.deepcopy(answer)  # others may update the model while it is being sent
        return answer

    def _step(self) -> Callable[[], None]:
        for p in self.model.parameters():
            assert p.grad is not None
            p.grad /= len(self.members)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        self.stamps.append(perf_counter())
        self.updates.append(self.members)
        self.versions |= {trainer: len(self.updates) for trainer, _ in self.members}
        self.members = []
        self.done = self._enough()
        future, self.future = self.future, Future()
        return functools.partial(future.set_result, (self._answer(), not self.done))

    def _enough(self) -> bool:
        n = len(self.stamps) - self.rule.warmup_iters
        if self.rule.iters:
            return n >= self.rule.iters
        if n < max(self.rule.min_iters, self.next_look):
            return False
        times = np.diff(self.stamps[-n - 1 :])
        if times.sum() >= self.rule.max_seconds:
            return True
        self.next_look = n + n // 10  # to look costs time
        width = relative_ci95(times)
        return width is not None and width <= self.rule.target_ci

    def _end_if_all_have(self) -> None:
        all_have = len(self.latencies) + len(self.lost) == self.config.trainers
        if all_have and not self.finished.done():
            self.finished.set_result(None)

    def _watch(self) -> None:
        """In a thread of its own: leaves out the trainers that keep others waiting."""
        patience = self.config.straggler_timeout_s
        while not self.finished.done():
            time.sleep(patience / 10)
            answer_all = None
            with self.lock:
                waiting = {trainer for trainer, _ in self.members} | set(self.latencies)
                if not waiting or perf_counter() - self.last_heard < patience:
                    continue
                self.lost |= {t: sent for t, sent in self.sent.items() if t not in waiting}
                if self.members and len(self.members) >= self._needed():
                    answer_all = self._step()
                self._end_if_all_have()
            if answer_all is not None:
                answer_all()


def completed(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


# -- what trainers call on the server -------------------------------------------------------------


def fetch(trainer: int) -> Any:
    return hosted("server").fetch(trainer)


@rpc.functions.async_execution
def update_and_fetch(trainer: int, gradients: Any) -> Future[Any]:
    future: Future[Any] = hosted("server").update(trainer, gradients)
    return future


def finish(trainer: int, latencies: list[float]) -> None:
    hosted("server").finish(trainer, latencies)


@rpc.functions.async_execution
def wait_for_all() -> Future[None]:
    future: Future[None] = hosted("server").finished
    return future


def get_log() -> dict[str, Any]:
    log: dict[str, Any] = hosted("server").log()
    return log


# -- a trainer ------------------------------------------------------------------------------------


def train(
    config: Config, trainer: int, device: torch.device, say: Callable[[str], None], every_s: float
) -> None:
    """Until the server says that it is enough. Says how far it is every `every_s` seconds."""
    payload = PAYLOADS[config.payload]
    batches = [(x.to(device), y.to(device)) for x, y in create_batches(config, trainer)]
    model = create_model(config).to(device)
    latencies: list[float] = []
    received, more = rpc.rpc_sync("server0", fetch, args=(trainer,))
    said = perf_counter()
    while more:
        model = payload.load(model, received, device)
        compute_gradients(model, *batches[len(latencies) % len(batches)])
        gradients = payload.gradients(model, config.wire)
        start = perf_counter()
        received, more = rpc.rpc_sync("server0", update_and_fetch, args=(trainer, gradients))
        latencies.append(perf_counter() - start)
        if start - said > every_s:
            said = start
            say(f"gradients {len(latencies)}")
    rpc.rpc_sync("server0", finish, args=(trainer, latencies))


def run(
    config: Config, rule: StopRule, args: argparse.Namespace, sweep: Sweep, group: CaseGroup
) -> tuple[dict[str, Any], str | None]:
    """The server's log (on rank 0, else empty), and why this trainer did not come to its end."""
    rank, error = sweep.ctx.rank, None
    if rank == 0:
        make("server0", "server", BatchUpdateServer, config, rule)
    dist.barrier(group.control)
    try:
        train(config, rank, sweep.ctx.device, sweep.watch.phase, args.timeout / 4)
    except Exception as caught:  # the others go on
        error = describe(caught)
    if rank != 0:
        return {}, error
    rpc.rpc_sync("server0", wait_for_all)
    return rpc.rpc_sync("server0", get_log), error


def replay(config: Config, updates: list[list[tuple[int, int]]]) -> torch.Tensor:
    """The parameters after these updates, by one process alone, one gradient after the other.

    updates: the members of each, as (trainer, version of the parameters that it had).
    """
    model, worker = create_model(config), create_model(config)
    optimizer = sgd(model)
    batches = [create_batches(config, trainer) for trainer in range(config.trainers)]
    sent = [0] * config.trainers
    versions = [flat_parameters(model)]
    for members in updates:
        total = torch.zeros_like(versions[0])
        for trainer, version in members:
            load_vector(worker, versions[version], torch.device("cpu"))
            compute_gradients(worker, *batches[trainer][sent[trainer] % config.num_batches])
            total += flat_gradients(worker)
            sent[trainer] += 1
        for p, g in zip(model.parameters(), split_vector(model, total), strict=True):
            p.grad = g / len(members)
        optimizer.step()
        versions.append(flat_parameters(model))
    return versions[-1]


def compare_with_replay(config: Config, log: dict[str, Any]) -> str | None:
    """What is wrong with the server's parameters, or None."""
    start = flat_parameters(create_model(config))
    expected = replay(config, log["updates"])
    error = float((log["parameters"] - expected).abs().max() / (expected - start).abs().max())
    if error < TOLERANCE:
        return None
    return (
        f"after {len(log['updates'])} updates the parameters are {error:.2g} of their change away "
        f"from a sequential reference (at most {TOLERANCE:g})"
    )


def run_case(config: Config, args: argparse.Namespace, sweep: Sweep, group: CaseGroup) -> Outcome:
    """A checked run of a few updates, then the timed one."""
    short = dataclasses.replace(stop_rule(args), warmup_iters=1, iters=CHECKED_UPDATES - 1)
    sweep.watch.phase("check")
    log, error = run(config, short, args, sweep, group)
    if error:
        raise RuntimeError(error)
    wrong = compare_with_replay(config, log) if log else None
    sweep.watch.phase("timed run")
    log, error = run(config, stop_rule(args), args, sweep, group)
    if not log:
        return Outcome({"error": error})
    log.pop("parameters")
    samples = samples_of(log, args.warmup_iters)
    return Outcome({"error": error, "wrong": wrong, "log": log}, samples)


# -- what rank 0 makes of it ----------------------------------------------------------------------


def samples_of(log: dict[str, Any], warmup: int) -> Measurement:
    """After warm-up: latencies by trainer, cut to the shortest, and the server's update times."""
    updates = np.diff(log["stamps_s"][warmup - 1 :])
    samples = {}
    if not log["lost"]:  # the report has a row a trainer, or none
        rows = [row[warmup:] for _, row in sorted(log["latencies_s"].items())]
        shortest = min(map(len, rows))
        samples = {"latency": np.array([row[:shortest] for row in rows]), "update": updates[None]}
    stop = {"rule": "server", "iterations": len(updates), "ci95_rel": relative_ci95(updates)}
    return Measurement(samples, {}, [], {}, stop)


def rates(log: dict[str, Any], warmup: int) -> dict[str, Any]:
    """Updates and gradients a second, and the update times, after `warmup` updates."""
    stamps = log["stamps_s"][warmup - 1 :]
    times = np.diff(stamps)
    elapsed = stamps[-1] - stamps[0]
    # the rate over each of 12 stretches: their median has an interval
    stretches = [len(part) / part.sum() for part in np.array_split(times, 12) if len(part)]
    return {
        **{f"update_time_{name}_s": value for name, value in percentiles(times).items()},
        "updates": len(times),
        "updates_per_s": len(times) / elapsed,
        "updates_per_s_ci95": bounds(median_interval(stretches)),
        "gradients_per_s": sum(map(len, log["updates"][warmup:])) / elapsed,
        "warmup_s": stamps[0] - log["stamps_s"][0],
    }


def derive(
    config: Config, args: argparse.Namespace, sweep: Sweep, measured: object, facts: list[Any]
) -> tuple[dict[str, Any], str]:
    """A case's metrics (see docs/numbers.md) and the verdict on its result. On rank 0."""
    log = facts[0]["log"]
    metrics = rates(log, args.warmup_iters)
    parameters = (config.in_features + 1) * config.out_features
    metrics["mb_per_s"] = metrics["gradients_per_s"] * 2 * parameters * 4 / 1e6
    rows = [row[args.warmup_iters :] for row in log["latencies_s"].values()]
    latencies = [percentiles(row) for row in rows if row]
    for name in latencies[0] if latencies else ():
        metrics[f"latency_{name}_s"] = max(one[name] for one in latencies if name in one)
    problems = [f"trainer{i}: {fact['error']}" for i, fact in enumerate(facts) if fact["error"]]
    problems += [
        f"trainer{i} on {sweep.host_of(int(i))} was left out after {sent} gradients"
        for i, sent in log["lost"].items()
    ]
    if problems:
        updates = len(log["updates"])
        return metrics, f"failed: {'; '.join(problems)}; the others went on to {updates} updates"
    wrong = facts[0]["wrong"]
    return metrics, f"failed: {wrong}" if wrong else "passed"


def columns() -> Columns:
    def interval(case: dict[str, Any]) -> str:
        ci = case["metrics"].get("updates_per_s_ci95")
        return f"{ci[0]:.0f} to {ci[1]:.0f}" if ci else "-"

    return {
        "payload": lambda case: str(case["key"]["payload"]),
        "updates/s": metric("updates_per_s", digits=1),
        "95% ci": interval,
        "gradients/s": metric("gradients_per_s", digits=1),
        "MB/s": metric("mb_per_s"),
        **{f"latency\np{q} (ms)": metric(f"latency_p{q}_s", 1e3, 3) for q in (*PERCENTILES, 99)},
    }


def title(config: Config, options: RpcOptions) -> str:
    settings = ", ".join(f"{name} {value}" for name, value in options.key().items())
    return (
        f"Linear({config.in_features}, {config.out_features}), trainers {config.trainers}, "
        f"{config.batch_update_size} gradients an update, {settings.replace('_', ' ')}"
    )


# -- the run --------------------------------------------------------------------------------------


def roles(trainers: int, cuda_trainers: bool, cuda_server: bool) -> Layout:
    on_cuda = trainers if cuda_trainers else 0
    return Layout(trainers, 1, master=False, cuda_trainers=on_cuda, cuda_servers=int(cuda_server))


def check_args(args: argparse.Namespace) -> tuple[Layout, torch.device, RpcOptions]:
    """The roles, this rank's device, and the RPC settings; refuse what cannot run."""
    try:
        _, world_size, _, local_world_size = world_from_environment()
        on_cuda = wants_cuda(args.device), args.server_device == "cuda"
        layout = roles(max(1, world_size - 1), *on_cuda)
        refuse_mismatch(layout, world_size)
        device, _ = place(layout, "gloo")
        # of each process: parameters, gradients, and both on their way
        needed = (args.in_features + 1) * args.out_features * 4 * 4 * world_size
        there = available_bytes(torch.device("cpu"))
        if needed > there:
            raise ValueError(
                f"Linear({args.in_features}, {args.out_features}) on {world_size} ranks needs "
                f"about {needed} bytes, and this host has {there}; try --in-features 1000"
            )
    except ValueError as error:
        cli.refuse(str(error))
    args.batch_update_size = args.batch_update_size or layout.trainers
    if args.batch_update_size > layout.trainers:
        cli.refuse(
            f"--batch-update-size {args.batch_update_size} is more than the trainers there are "
            f"and would wait for ever; try --batch-update-size {layout.trainers}"
        )
    check_report_flags(args, "batch_update_ps")
    return layout, device, options_from(args, local_world_size)


def case_key(config: Config, options: RpcOptions) -> dict[str, Any]:
    key = dataclasses.asdict(config) | options.key()
    return {name: value for name, value in key.items() if name != "straggler_timeout_s"}


def measure_payloads(
    configs: list[Config],
    args: argparse.Namespace,
    layout: Layout,
    options: RpcOptions,
    sweep: Sweep,
) -> None:
    """A case and a row for each payload."""
    keys = [case_key(config, options) for config in configs]
    known = sweep.plan(keys)
    widest = ["tensors", "10000.0", "10000 to 10000", *["10000.0"] * 2, *["100.000"] * 5]
    table = StreamedTable(columns(), widest)
    for config, key, done in zip(configs, keys, known, strict=True):
        derived = functools.partial(derive, config, args, sweep)
        if done:
            case = sweep.find(key)
        else:
            with workers(layout, options, sweep) as broken:
                case = sweep.case(
                    key,
                    f"payload {config.payload}",
                    layout.trainer_ranks,
                    functools.partial(run_case, config, args, sweep),
                    derived,
                    broken=broken,
                    salvage=lambda mine, derived=derived: derived(None, [mine.facts]),
                )
        if case is not None:
            failed = case["check"].startswith("failed")
            sweep.say(f"{config.payload}  {case['check']}" if failed else table.row(case))


def compare_with_original(args: argparse.Namespace, part: Part) -> int:
    """Updates/s of one flat tensor and these settings over those of the original's way."""
    layout, device, options = check_args(args)
    with Sweep("batch_update_ps", args, device, "gloo", part=part) as sweep:
        module, tensors = create_configs(args, layout, sweep)

        def work(config: Config, group: CaseGroup) -> Outcome:
            log, error = run(config, stop_rule(args), args, sweep, group)
            if error:
                raise RuntimeError(error)
            return Outcome({"rate": rates(log, args.warmup_iters)["updates_per_s"]} if log else {})

        original = RpcOptions(ORIGINAL_THREADS, options.timeout_s)
        variants = (
            Variant("original", original, functools.partial(work, module)),
            Variant("tensors", options, functools.partial(work, tensors)),
        )
        if part.number == 0:
            sweep.say(f"\n{title(tensors, options)}\n")
        key = case_key(tensors, options) | {"compare_original": True}
        measure_part(variants, args.rounds, part, "updates/s", key, layout, sweep)
    return sweep.status


def create_configs(args: argparse.Namespace, layout: Layout, sweep: Sweep) -> list[Config]:
    """One for each payload."""
    server_device = sweep.devices()[layout.server_ranks[0]]
    return [
        Config(
            in_features=args.in_features,
            out_features=args.out_features,
            batch_size=args.batch_size,
            num_batches=args.num_batches,
            trainers=layout.trainers,
            batch_update_size=args.batch_update_size,
            payload=payload,
            straggler_timeout_s=args.straggler_timeout,
            device="cuda" if layout.cuda_trainers else "cpu",
            server_device=server_device,
        )
        for payload in args.payload
    ]


def main(args: argparse.Namespace) -> int:
    if args.compare_original:
        parts = [functools.partial(compare_with_original, args)] * (2 * args.rounds)
        return run_parts(parts, args)
    layout, device, options = check_args(args)
    # gloo: the trainers meet on it before a run; what is timed goes over RPC
    with Sweep("batch_update_ps", args, device, "gloo") as sweep:
        configs = create_configs(args, layout, sweep)
        sweep.say(f"\n{title(configs[0], options)}\n")
        measure_payloads(configs, args, layout, options, sweep)
    return sweep.status


if __name__ == "__main__":
    sys.exit(record(main)(ARGS))
