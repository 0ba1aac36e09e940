#!/usr/bin/env python3
"""What does a call through PyTorch's RPC (TensorPipe) cost here, and which settings make it cheap?

Every rank but the last is a caller; the last one is the callee, called by all of them at once: with
2 ranks that is the plain latency, with more the fan-in that a parameter server sees.

    rpc_sync         one call after the other
    rpc_async        N calls started, then all waited for (--in-flight); one iteration is the batch,
                     and the times are those of a call: batch / N
    remote           rpc.remote and to_here: two requests, one that makes the result on the callee
                     and one that fetches it. Under the first setting only: PyTorch frees such
                     results in the first RPC session of a process alone
    async_execution  the callee returns a Future at once, which another thread of its completes

Of each two things are timed, in alternating blocks:

    round trip       a float32 tensor there and the same back (an echo)
    one way          the tensor there, None back: until the caller knows that it has arrived
    calls/s          all calls of all callers / seconds from the common start of each block until
                     the last caller is done with it, summed over the blocks
    GB/s             calls/s * payload, and twice that for the round trip: bytes in both
                     directions, which pass one after the other

Callers start a block together and do not wait for each other within it, so the i-th calls of two
callers have nothing in common: percentiles are taken for each caller alone, and the slowest one is
shown. A caller that is done early leaves the rest to less company: then calls/s is a lower bound.
Not timed: making tensors, connecting, and freeing what `remote` leaves on the callee, which goes on
in the background of the next call. A caller on CUDA with a callee on the CPU copies before it
sends and after it receives, within the timed region; a callee on CUDA copies likewise.

    torchrun --nproc-per-node 2 benchmarks/rpc_latency.py
    torchrun --nproc-per-node 8 benchmarks/rpc_latency.py --device cuda --json report.json
    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        benchmarks/rpc_latency.py --rpc-threads 4,16 --rpc-transports uv --rpc-channels basic,mpt_uv

RPC executes what its peers send: run this only on a network that you trust.

Written for this project. BSD-3-Clause.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cli

OPERATIONS = ("rpc_sync", "rpc_async", "remote", "async_execution")
SIZES = [4, 2**12, 2**16, 2**20, 2**23, 2**26]
SMALL, LARGE = 2**12, 2**20  # bytes: what counts as small at most, and as large at least
BATCH_BYTES = 2**27  # rpc_async has no more in flight
TENSORPIPE_THREADS = 16  # its own default
MARGIN = 0.05  # settings that differ by less are called alike
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def payload_size(text: str) -> int:
    """argparse type: bytes, also as 4K or 64M; a whole number of float32."""
    word = text.upper().removesuffix("B").removesuffix("I")
    unit = UNITS.get(word[-1:], 1)
    digits = word[:-1] if unit > 1 else word
    if not (digits.isascii() and digits.isdigit()) or int(digits) == 0:
        raise argparse.ArgumentTypeError(f"expected a size like 4, 64K or 16M, got '{text}'")
    size = int(digits) * unit
    if size % 4:
        raise argparse.ArgumentTypeError(
            f"expected a multiple of 4 bytes (float32), got '{text}'; try {size - size % 4 + 4}"
        )
    return size


def alternatives(known: Sequence[str]) -> Callable[[str], tuple[str, ...] | None]:
    """argparse type: `auto` (None), one of the known names, or several to choose from: `shm+uv`."""

    def parse(text: str) -> tuple[str, ...] | None:
        if text == "auto":
            return None
        names = tuple(text.split("+"))
        for name in names:
            if name not in known:
                words = ("auto", *known)
                hint = cli.suggest(name, words) or f"; choose from {', '.join(words)}"
                raise argparse.ArgumentTypeError(f"unknown '{name}'{hint}")
        if len(set(names)) < len(names):
            raise argparse.ArgumentTypeError(f"expected each name once, got '{text}'")
        return names

    return parse


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = cli.Parser(description=__doc__)
    add = parser.add_argument
    add(
        "--ops",
        type=cli.list_of(str, OPERATIONS),
        default=list(OPERATIONS),
        metavar="OP",
        help=f"of {', '.join(OPERATIONS)}; a list (default: all)",
    )
    add(
        "--sizes",
        type=cli.list_of(payload_size),
        default=SIZES,
        metavar="BYTES",
        help="of the payload; a list (default: 4,4K,64K,1M,8M,64M)",
    )
    add(
        "--in-flight",
        type=cli.list_of(cli.positive_int),
        metavar="N",
        help="calls that rpc_async starts at once, or as many as make 128M; a list (default: 8)",
    )
    add(
        "--server-device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="the callee's; auto: as the callers' (default: auto)",
    )
    settings = parser.add_argument_group(
        "RPC",
        "Settings to sweep: all combinations of what is listed. With none listed: TensorPipe's "
        "own, and fewer threads with auto, with transport uv, and with channel basic.",
    )
    settings.add_argument(
        "--rpc-threads",
        type=cli.list_of(cli.rpc_threads),
        metavar="N",
        help="worker threads a process; a list (default: its share of the cores, and 16)",
    )
    for flag, known in (("transports", cli.TRANSPORTS), ("channels", cli.CHANNELS)):
        settings.add_argument(
            f"--rpc-{flag}",
            type=cli.list_of(alternatives(known)),
            metavar="NAME",
            help=f"auto or of {', '.join(known)}; a list, where a+b lets TensorPipe choose",
        )
    settings.add_argument(
        "--rpc-timeout",
        type=cli.positive_float,
        metavar="S",
        help="a call fails after S seconds (default: twice that of --timeout)",
    )
    cli.add_measurement_flags(parser, min_iters=6, max_seconds=0.4, warmup_iters=2)
    cli.add_report_flags(parser)
    args = parser.parse_args(argv)
    cli.check_measurement_flags(args)
    if args.in_flight and "rpc_async" not in args.ops:
        cli.refuse("--in-flight has no effect without --ops rpc_async")
    args.in_flight = args.in_flight or [8]
    return args


if __name__ == "__main__":
    ARGS = parse_args()  # before the imports below, so that --help need not wait for them

import contextlib
import functools
import itertools
import math
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch.distributed.elastic.multiprocessing.errors import record

from common.breakdown import bounds
from common.dist import CaseGroup, world_from_environment
from common.parts import Part, run_parts
from common.results import Case
from common.rpc import (
    Layout,
    RpcOptions,
    default_threads,
    hosted,
    make,
    place,
    torchrun_command,
    workers,
)
from common.stats import median_interval, percentiles
from common.sweep import Outcome, Sweep, check_report_flags, stop_rule
from common.table import Columns, StreamedTable, metric
from common.timing import measure


@dataclass(frozen=True)
class Config:
    """What is measured in one case."""

    options: RpcOptions
    operation: str
    in_flight: int
    size_bytes: int
    repeat: bool = False  # of the first setting, at the end: what two alike runs differ by

    def __str__(self) -> str:
        return f"{self.operation} {size_text(self.size_bytes)} {flags(self.options)}"


# -- on the callee: functions that its RPC threads run ---------------------------------------------


class Tally:
    """What has arrived at the callee in one case; and the thread that completes Futures."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.calls = self.bytes = 0
        self.lock = threading.Lock()  # the RPC threads run at the same time
        self.completer = ThreadPoolExecutor(1)

    def add(self, payload: torch.Tensor) -> None:
        if payload.to(self.device).is_cuda:
            torch.cuda.current_stream().synchronize()  # it has arrived when it is there
        with self.lock:
            self.calls += 1
            self.bytes += payload.nbytes


def echo(payload: torch.Tensor) -> torch.Tensor:
    device = hosted("tally").device
    return payload.to(device).to(payload.device)  # no copies where the payload is there already


def sink(payload: torch.Tensor) -> None:
    hosted("tally").add(payload)


@rpc.functions.async_execution
def echo_later(payload: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    return completed_later(lambda: echo(payload))


@rpc.functions.async_execution
def sink_later(payload: torch.Tensor) -> torch.futures.Future[None]:
    return completed_later(lambda: sink(payload))


def completed_later(work: Callable[[], Any]) -> torch.futures.Future[Any]:
    """A Future that another thread completes, as one does that has waited for more requests."""
    tally = hosted("tally")
    cuda = tally.device != "cpu"
    stream = torch.cuda.current_stream(tally.device) if cuda else None  # the payload arrives on it
    future: torch.futures.Future[Any] = torch.futures.Future(devices=[tally.device] * cuda)

    def complete() -> None:
        try:
            with torch.cuda.stream(stream):
                future.set_result(work())
        except Exception as error:  # the caller's to see
            future.set_exception(error)

    tally.completer.submit(complete)
    return future


def received() -> tuple[int, int]:
    tally = hosted("tally")
    return tally.calls, tally.bytes


# -- on the callers: each operation in plain torch; payload [size / 4] -----------------------------

Call = Callable[[str, Callable[..., Any], torch.Tensor], list[Any]]


def call_sync(callee: str, function: Callable[..., Any], payload: torch.Tensor) -> list[Any]:
    return [rpc.rpc_sync(callee, function, args=(payload,))]


def call_async(
    callee: str, function: Callable[..., Any], payload: torch.Tensor, in_flight: int
) -> list[Any]:
    futures = [rpc.rpc_async(callee, function, args=(payload,)) for _ in range(in_flight)]
    return list(torch.futures.wait_all(futures))


def call_remote(callee: str, function: Callable[..., Any], payload: torch.Tensor) -> list[Any]:
    return [rpc.remote(callee, function, args=(payload,)).to_here()]


def operation(config: Config) -> tuple[Call, Callable[..., Any], Callable[..., Any]]:
    """How it calls, and the functions that it calls for the round trip and for one way."""
    operations: dict[str, tuple[Call, Callable[..., Any], Callable[..., Any]]] = {
        "rpc_sync": (call_sync, echo, sink),
        "rpc_async": (functools.partial(call_async, in_flight=config.in_flight), echo, sink),
        "remote": (call_remote, echo, sink),
        "async_execution": (call_sync, echo_later, sink_later),
    }
    return operations[config.operation]


def create_payload(config: Config, rank: int) -> torch.Tensor:
    """Random numbers that differ by caller, size and operation: [size / 4]."""
    where = OPERATIONS.index(config.operation) + 10 * rank
    generator = torch.Generator().manual_seed(config.size_bytes + 7919 * where)
    return torch.rand(config.size_bytes // 4, generator=generator)


# -- one case --------------------------------------------------------------------------------------


def run_case(
    config: Config,
    layout: Layout,
    devices: list[str],
    args: argparse.Namespace,
    sweep: Sweep,
    group: CaseGroup,
) -> Outcome:
    """Time one case on this caller."""
    callee_rank, device = layout.server_ranks[0], sweep.ctx.device
    callee = layout.name(callee_rank)
    if sweep.ctx.rank == 0:
        make(callee, "tally", Tally, devices[callee_rank])
    payload = create_payload(config, sweep.ctx.rank).to(device)
    direct = layout.on_cuda(callee_rank) or device.type == "cpu"
    call, echo_there, sink_there = operation(config)
    echoed: list[torch.Tensor] = []  # of the last round trip
    sunk = 0

    def round_trip() -> None:
        sent = payload if direct else payload.cpu()
        echoed[:] = [result.to(device) for result in call(callee, echo_there, sent)]

    def one_way() -> None:
        nonlocal sunk
        sunk += len(call(callee, sink_there, payload if direct else payload.cpu()))

    steps = {"round trip": round_trip, "one way": one_way}
    dist.barrier(group.control)  # the tally is there
    measured = measure(steps, group, device, stop_rule(args), sweep.next_block)
    dist.barrier(group.control)  # all calls are counted
    sweep.watch.phase("check")
    facts = {
        "sunk": sunk,
        "received": rpc.rpc_sync(callee, received) if sweep.ctx.rank == 0 else None,
        "echoes": len(echoed),
        "wrong_echoes": sum(not torch.equal(result, payload) for result in echoed),
    }
    return Outcome(facts, measured)


def derive(config: Config, measured: Any, facts: list[Any]) -> tuple[dict[str, Any], str]:
    """A case's metrics (see docs/numbers.md) and the verdict on what arrived. On rank 0."""
    metrics: dict[str, Any] = {}
    for name, directions in (("round trip", 2), ("one way", 1)):
        prefix = name.replace(" ", "_")
        batches = measured.samples[name]
        for metric_name, value in call_metrics(batches, measured.rounds, config.in_flight).items():
            metrics[f"{prefix}_{metric_name}"] = value
        rate = metrics[f"{prefix}_calls_per_s"]
        metrics[f"{prefix}_gb_per_s"] = rate * config.size_bytes * directions / 1e9
    return metrics, verdict(config, facts)


def call_metrics(batches: Any, rounds: Sequence[int], in_flight: int) -> dict[str, Any]:
    """Percentiles of a call's seconds, of the slowest caller; calls/s of all together.

    batches: [callers, iterations], seconds of `in_flight` calls each; rounds: iterations of each
    block, which the callers start together.
    """
    each = [percentiles(row / in_flight) for row in batches]
    slowest = max(range(len(each)), key=lambda caller: each[caller]["p50"])
    blocks = np.split(batches, np.cumsum(rounds)[:-1], axis=1)
    seconds = sum(float(block.sum(axis=1).max()) for block in blocks)
    return {
        **{f"{name}_s": max(caller[name] for caller in each) for name in each[0]},
        "p50_ci95_s": bounds(median_interval(batches[slowest] / in_flight)),
        "slowest_caller": slowest,
        "calls_per_s": batches.size * in_flight / seconds,
    }


def verdict(config: Config, facts: list[Any]) -> str:
    """Whether every echo is what was sent, and the callee has seen every call that was made."""
    for caller, fact in enumerate(facts):
        if fact["wrong_echoes"]:
            return (
                f"failed: {fact['wrong_echoes']} of the last {fact['echoes']} echoes to caller "
                f"{caller} are not what it sent"
            )
    calls, size = facts[0]["received"]
    sent = sum(fact["sunk"] for fact in facts)
    if (calls, size) != (sent, sent * config.size_bytes):
        return (
            f"failed: the callers sent {sent} calls of {config.size_bytes} bytes, and {calls} "
            f"calls with {size} bytes arrived"
        )
    return "passed"


# -- the sweep -------------------------------------------------------------------------------------


def settings(args: argparse.Namespace, threads: int) -> list[RpcOptions]:
    """What to sweep. threads: what this machine's cores suggest."""
    listed = (args.rpc_threads, args.rpc_transports, args.rpc_channels)
    some = [threads, TENSORPIPE_THREADS]
    if any(listed):
        chosen = itertools.product(
            args.rpc_threads or some, args.rpc_transports or [None], args.rpc_channels or [None]
        )
    else:
        pairs = [(None, None), (("uv",), None), (None, ("basic",))]
        chosen = iter([(TENSORPIPE_THREADS, None, None), *[(threads, *pair) for pair in pairs]])
    timeout = args.rpc_timeout or 2 * args.timeout  # the watchdog comes first, with a better word
    return list(dict.fromkeys(RpcOptions(n, timeout, t, c) for n, t, c in chosen))


def plan(args: argparse.Namespace, threads: int) -> list[tuple[RpcOptions, list[Config]]]:
    """The sessions, each with its cases. The first setting comes again at the end."""
    chosen = settings(args, threads)
    sessions = [(options, False) for options in chosen]
    if len(chosen) > 1:
        sessions.append((chosen[0], True))
    planned = [
        (options, [Config(options, *case, repeat) for case in cases(args, repeat)])
        for options, repeat in sessions
    ]
    return [(options, configs) for options, configs in planned if configs]


def cases(args: argparse.Namespace, repeat: bool) -> list[tuple[str, int, int]]:
    """Operation, calls in flight, and size of every case of a setting."""
    found = []
    for name in args.ops:
        for in_flight in args.in_flight if name == "rpc_async" else [1]:
            for size in sorted(args.sizes):
                if not (repeat and SMALL < size < LARGE):  # compared are small and large ones
                    found.append((name, max(1, min(in_flight, BATCH_BYTES // size)), size))
    return list(dict.fromkeys(found))  # two lists of N may come to the same in large sizes


def case_key(config: Config, layout: Layout) -> dict[str, Any]:
    return {
        "operation": config.operation,
        "in_flight": config.in_flight,
        "size_bytes": config.size_bytes,
        **config.options.key(),
        "callers": layout.trainers,
        "device": "cuda" if layout.cuda_trainers else "cpu",
        "server_device": "cuda" if layout.cuda_servers else "cpu",
        "repeat": config.repeat,
    }


def check_args(args: argparse.Namespace) -> tuple[Layout, torch.device, str]:
    """The roles, and this rank's device; refuse what cannot run."""
    try:
        _, world_size, _, local_world_size = world_from_environment()
        if world_size < 2:
            raise ValueError(
                "expected at least 2 ranks, a caller and a callee, got 1; start 2: "
                f"{torchrun_command(2)}"
            )
        count, callers = torch.cuda.device_count(), world_size - 1
        for flag, name in (("--device", args.device), ("--server-device", args.server_device)):
            if name == "cuda" and count == 0:
                raise ValueError(f"{flag} cuda: torch sees no CUDA device here; try {flag} cpu")
        cuda = args.device == "cuda" or (args.device == "auto" and count > 0)
        server_cuda = args.server_device == "cuda" or (args.server_device == "auto" and cuda)
        layout = Layout(callers, 1, False, callers if cuda else 0, int(server_cuda))
        refuse_memory(args, layout, local_world_size)
        device, backend = place(layout, "gloo")
    except ValueError as error:
        cli.refuse(str(error))
    check_report_flags(args, "rpc_latency")
    return layout, device, backend


def refuse_memory(args: argparse.Namespace, layout: Layout, local_world_size: int) -> None:
    """Raise ValueError where the largest batch has no room on this host."""
    callers = min(layout.trainers, local_world_size)
    _, in_flight, size = max(cases(args, False), key=lambda case: case[1] * case[2])
    # of each call: what the callee got, what the caller got, and the caller's result before that
    needed = callers * (size + 3 * in_flight * size)
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    there = int(found[1]) * 1024 if found else needed
    if needed > there:
        raise ValueError(
            f"--sizes {size_text(size)} with {in_flight} in flight from {callers} "
            f"caller{'s' if callers > 1 else ''} needs about {needed / 2**30:.1f} GiB, and "
            f"{there / 2**30:.1f} GiB are free; try --sizes {size_text(max(4, size // 8))}"
        )


# -- which setting is fastest ----------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """One setting against another over the same cases."""

    ratio: float  # geometric mean of the p50s' ratios; over 1: the other is slower
    noise: float  # ratios up to this are not told from 1


def compare(mine: list[dict[str, Any]], others: list[dict[str, Any]], floor: float) -> Comparison:
    """How many times slower the others are. Cases in the same order; floor: the least noise.

    The noise is what the spread of the log ratios and the cases' own intervals make of the mean
    (2 standard errors each), and no less than the floor.
    """
    logs, widths = [], []
    for a, b in zip(mine, others, strict=True):
        logs.append(math.log(b["round_trip_p50_s"] / a["round_trip_p50_s"]))
        for case in (a, b):
            low, high = case["round_trip_p50_ci95_s"] or (0, 2 * case["round_trip_p50_s"])
            widths.append((high - low) / 2 / case["round_trip_p50_s"])
    n = len(logs)
    spread = 2 * float(np.std(logs, ddof=1)) / math.sqrt(n) if n > 1 else 0.0
    own = math.sqrt(sum(width**2 for width in widths)) / n
    return Comparison(math.exp(float(np.mean(logs))), max(floor, math.exp(max(spread, own))))


def noise_floor(first: list[dict[str, Any]], again: list[dict[str, Any]]) -> float:
    """The ratio that the first setting shows against itself, at the end of the run."""
    if not first or len(first) != len(again):
        return 1 + MARGIN
    ratio = compare(first, again, 1.0).ratio
    return max(1 + MARGIN, ratio, 1 / ratio)


def fastest(
    metrics: dict[RpcOptions, list[dict[str, Any]]], floor: float
) -> tuple[list[RpcOptions], dict[RpcOptions, Comparison]]:
    """The settings that are not told from the fastest, it first; and all others against it.

    metrics: of each setting the same cases in the same order.
    """

    def score(options: RpcOptions) -> float:
        return float(np.mean([math.log(case["round_trip_p50_s"]) for case in metrics[options]]))

    ranked = sorted(metrics, key=score)
    against = {o: compare(metrics[ranked[0]], metrics[o], floor) for o in ranked[1:]}
    alike = [o for o, found in against.items() if found.ratio <= found.noise]
    return [ranked[0], *alike], against


def flags(options: RpcOptions) -> str:
    """The setting as flags of the other scripts."""
    words = [f"--rpc-threads {options.threads}"]
    words += [f"--rpc-transports {','.join(options.transports or ('auto',))}"]
    words += [f"--rpc-channels {','.join(options.channels)}"] if options.channels else []
    return " ".join(words)


def recommendation(
    sessions: list[tuple[RpcOptions, list[Config]]],
    wanted: Callable[[int], bool],
    find: Callable[[Config], dict[str, Any] | None],
) -> list[str]:
    """What to say about the sizes that are wanted; nothing where there is nothing to compare."""
    found: dict[tuple[RpcOptions, bool], list[dict[str, Any]]] = {}
    for options, configs in sessions:
        measured = [find(config) for config in configs if wanted(config.size_bytes)]
        if measured and all(measured):  # a setting counts only with all its cases
            repeat = configs[0].repeat
            found[options, repeat] = [case["metrics"] for case in measured if case]
    by_setting = {options: cases for (options, repeat), cases in found.items() if not repeat}
    if len(by_setting) < 2:
        return []
    first = sessions[0][0]
    floor = noise_floor(by_setting.get(first, []), found.get((first, True), []))
    best, against = fastest(by_setting, floor)
    default = next((o for o in by_setting if is_tensorpipes_own(o)), None)
    lines = [f"  {flags(options)}" for options in best]
    if len(best) > 1:
        noise = max(against[options].noise for options in best[1:])
        lines.insert(0, f"  no clear difference (noise: {noise:.2f}x) between")

    def faster(than: RpcOptions, name: str) -> str:
        found = against[than]
        return f"  {found.ratio:.2f}x faster than {name} (noise: {found.noise:.2f}x)"

    if default in best:
        lines.append("  TensorPipe's default is among them" if len(best) > 1 else "")
        lines[-1] = lines[-1] or "  which is TensorPipe's default"
    elif default is not None:
        lines.append(faster(default, "TensorPipe's default"))
    slower = [options for options in against if options not in best]
    if slower and slower[0] != default:
        lines.append(faster(slower[0], f"the next, {flags(slower[0])}"))
    return lines


def is_tensorpipes_own(options: RpcOptions) -> bool:
    return options.threads == TENSORPIPE_THREADS and not (options.transports or options.channels)


# -- tables ----------------------------------------------------------------------------------------


def size_text(size: int) -> str:
    """4, 64K, 16M: as --sizes takes it."""
    for unit, factor in reversed(UNITS.items()):
        if size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


def operation_text(key: dict[str, Any]) -> str:
    return f"{key['operation']}{' x' + str(key['in_flight']) if key['in_flight'] > 1 else ''}"


def half_interval(case: dict[str, Any]) -> str:
    interval, p50 = case["metrics"]["round_trip_p50_ci95_s"], case["metrics"]["round_trip_p50_s"]
    return "-" if interval is None else f"+-{(interval[1] - interval[0]) / 2 / p50:.1%}"


COLUMNS: Columns = {
    "": lambda case: operation_text(case["key"]),
    "size": lambda case: size_text(case["key"]["size_bytes"]),
    "p50\n(us)": metric("round_trip_p50_s", 1e6, 1),
    "95% ci\nof p50": half_interval,
    "p95\n(us)": metric("round_trip_p95_s", 1e6, 1),
    "p99\n(us)": metric("round_trip_p99_s", 1e6, 1),
    "\ncalls/s": metric("round_trip_calls_per_s", 1, 1),
    "\nGB/s": metric("round_trip_gb_per_s", 1, 3),
    "one way\np50 (us)": metric("one_way_p50_s", 1e6, 1),
    "one way\ncalls/s": metric("one_way_calls_per_s", 1, 1),
    "one way\nGB/s": metric("one_way_gb_per_s", 1, 3),
}
WIDEST = ["async_execution", "64M", *["000000.0", "+-10.0%", "000000.0", "000000.0"]]
WIDEST += ["00000.0", "00.000", "000000.0", "00000.0", "00.000"]


def title(options: RpcOptions, repeat: bool) -> str:
    key = options.key()
    own = ", TensorPipe's own default" if is_tensorpipes_own(options) else ""
    again = "; again, for what two runs of one setting differ by" if repeat else ""
    return (
        f"{options.threads} thread{'s' if options.threads > 1 else ''}, transport "
        f"{key['rpc_transports']}, channel {key['rpc_channels']}{own}{again}"
    )


def print_fastest(
    sessions: list[tuple[RpcOptions, list[Config]]], layout: Layout, sweep: Sweep
) -> None:
    """Print the fastest setting for small and for large payloads."""

    def find(config: Config) -> Case | None:
        return sweep.find(case_key(config, layout))

    ranges = {
        f"up to {size_text(SMALL)}": lambda size: size <= SMALL,
        f"of {size_text(LARGE)} and more": lambda size: size >= LARGE,
    }
    for text, wanted in ranges.items():
        lines = recommendation(sessions, wanted, find)
        if lines:
            sweep.say("\n".join([f"\nFastest round trips, payloads {text}:", *lines]))


def run_session(args: argparse.Namespace, part: Part) -> int:
    """Measure one setting, or, after the last one, what the settings come to."""
    layout, device, backend = check_args(args)
    tested = layout.trainer_ranks
    with Sweep("rpc_latency", args, device, backend, tested=tested, part=part) as sweep:
        devices = sweep.devices()
        sessions = plan(args, sweep.share(threads_here()))
        options, configs = session_of(sessions, part)
        keys = [case_key(config, layout) for config in configs]
        summary = functools.partial(print_fastest, sessions, layout, sweep)
        known = sweep.plan(keys, summary=summary)
        if part.number == 0:
            callers = f"0-{layout.trainers - 1}" if layout.trainers > 1 else "0"
            sweep.say(
                f"# callers: rank {callers}; callee: rank {layout.server_ranks[0]}; times of round "
                "trips, but for the last three columns\n"
                "# rpc_async xN: N calls in flight, times of a call: batch / N"
            )
        if configs:
            sweep.say(f"\n{title(options, configs[0].repeat)}\n")
        table = StreamedTable(COLUMNS, WIDEST)
        with contextlib.ExitStack() as stack:
            broken = None
            if not all(known):
                broken = stack.enter_context(workers(layout, options, sweep))
            if broken:
                sweep.say(f"failed: {broken}")
            for config, key, done in zip(configs, keys, known, strict=True):
                case = sweep.find(key)
                if not done:
                    work = functools.partial(run_case, config, layout, devices, args, sweep)
                    judge = functools.partial(derive, config)
                    case = sweep.case(key, str(config), tested, work, judge, broken)
                if case is not None and (done or not broken):
                    failed = case["check"].startswith("failed")
                    name = f"{operation_text(key)} {size_text(config.size_bytes)}"
                    sweep.say(f"{name}  {case['check']}" if failed else table.row(case))
    return sweep.status


def session_of(
    sessions: list[tuple[RpcOptions, list[Config]]], part: Part
) -> tuple[RpcOptions, list[Config]]:
    """Some parts may have none: where two settings turn out to be the same."""
    return sessions[part.number] if part.number < len(sessions) else (sessions[0][0], [])


def threads_here() -> int:
    _, _, _, local_world_size = world_from_environment()
    return default_threads(len(os.sched_getaffinity(0)), local_world_size)


def main(args: argparse.Namespace) -> int:
    # as many parts on all ranks, whatever each takes for the threads of this machine: 0 is unlike
    # any number that is listed, so no rank counts fewer sessions than there are
    sessions = len(plan(args, 0))
    return run_parts([functools.partial(run_session, args)] * sessions, args)


if __name__ == "__main__":
    sys.exit(record(main)(ARGS))
