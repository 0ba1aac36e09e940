#!/usr/bin/env python3
"""What does a call through PyTorch's RPC (TensorPipe) cost here?

Every rank but the last is a caller; the last one is the callee, called by all of them at once: with
2 ranks that is the plain latency, with more the fan-in that a parameter server sees. A run measures
one setting of --rpc-threads, --rpc-transports and --rpc-channels, with these operations:

    rpc_sync         one call after the other
    rpc_async        N calls started, then all waited for (--in-flight); times are batch / N
    remote           rpc.remote and to_here: two requests, one that makes the result on the callee
                     and one that fetches it. What frees it there afterwards is not timed
    async_execution  the callee returns a Future at once, which another thread of its completes

Of each two things are timed, in alternating blocks:

    round trip       a float32 tensor there and the same back (an echo)
    one way          the tensor there, None back: until the caller knows that it has arrived
    p50 .. p99       of the slowest caller: callers do not wait for each other within a block, so
                     the i-th calls of two of them have nothing in common
    calls/s          all calls of all callers / seconds from the common start of each block until
                     the last caller is done with it; a lower bound where callers differ in speed
    GB/s             calls/s * payload, and twice that for the round trip: bytes in both
                     directions, which pass one after the other

A caller on CUDA with a callee on the CPU copies before it sends and after it receives, within the
timed region; a callee on CUDA copies likewise. Every echo is compared with what was sent.

    torchrun --nproc-per-node 2 benchmarks/rpc_latency.py
    torchrun --nproc-per-node 8 benchmarks/rpc_latency.py --device cuda --json report.jsonl
    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        benchmarks/rpc_latency.py --rpc-threads 4 --rpc-channels basic,mpt_uv

RPC executes what its peers send: run this only on a network that you trust. Written for this
project. BSD-3-Clause. docs/rpc_latency.md shows how to compare settings.
"""

import argparse
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch.distributed.elastic.multiprocessing.errors import record
from torch.futures import Future

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.benchmark import Benchmark, Workload
from common.check import verdict
from common.cli import Parser, add_common_flags, list_of, positive_int, show_size, size
from common.dist import Group
from common.join import world
from common.memory import available_bytes
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
from common.stats import percentiles, relative_ci95
from common.table import Columns, metric, relative

OPERATIONS = ("rpc_sync", "rpc_async", "remote", "async_execution")
SIZES = [4, 2**12, 2**16, 2**20, 2**23, 2**26]
BATCH_BYTES = 2**27  # rpc_async has no more in flight


def payload_size(text: str) -> int:
    """A size of whole float32s."""
    count = size(text)
    if count < 4 or count % 4:
        raise argparse.ArgumentTypeError(f"expected a multiple of 4 bytes (float32), got '{text}'")
    return count


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    kinds, ops = list_of(str, OPERATIONS), f"of {', '.join(OPERATIONS)} (default: all)"
    add("--ops", type=kinds, default=list(OPERATIONS), metavar="OP", help=ops)
    sizes = "of the payload (default: 4,4K,64K,1M,8M,64M)"
    add("--sizes", type=list_of(payload_size), default=SIZES, metavar="BYTES", help=sizes)
    many = "calls that rpc_async starts at once, or as many as make 128M (default: 8)"
    add("--in-flight", type=list_of(positive_int), default=[8], metavar="N", help=many)
    place = "the callee's (default: as the callers')"
    add("--server-device", choices=("auto", "cpu", "cuda"), default="auto", help=place)
    add_rpc_flags(parser)
    add_common_flags(parser, min_iters=6, max_seconds=0.4)
    args = parser.parse_args(argv)
    args.backend = args.backend or "gloo"  # callers meet on it; what is timed goes over RPC
    return args


# -- on the callee: functions that its RPC threads run ---------------------------------------------


class Tally:
    """What has arrived at the callee in one case; and the thread that completes Futures."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.calls = self.bytes = 0
        self.lock = threading.Lock()  # the RPC threads run at the same time
        self.completer = ThreadPoolExecutor(1)

    def add(self, payload: torch.Tensor) -> None:
        if payload.to(self.device).is_cuda:  # it has arrived when it is there
            torch.cuda.current_stream(self.device).synchronize()
        with self.lock:
            self.calls += 1
            self.bytes += payload.nbytes


def echo(payload: torch.Tensor) -> torch.Tensor:
    return payload.to(hosted().device).to(payload.device)  # no copies where it is there already


def sink(payload: torch.Tensor) -> None:
    hosted().add(payload)


@rpc.functions.async_execution
def echo_later(payload: torch.Tensor) -> Future[torch.Tensor]:
    return completed_later(lambda: echo(payload))


@rpc.functions.async_execution
def sink_later(payload: torch.Tensor) -> Future[None]:
    return completed_later(lambda: sink(payload))


def completed_later(work: Callable[[], Any]) -> Future[Any]:
    """A Future that another thread completes, as one does that has waited for more requests."""
    device = hosted().device
    cuda = device.type == "cuda"
    stream = torch.cuda.current_stream(device) if cuda else None  # the payload arrives on it
    future: Future[Any] = Future(devices=[device] if cuda else [])

    def complete() -> None:
        try:
            with torch.cuda.stream(stream):
                future.set_result(work())
        except Exception as error:  # the caller's to see
            future.set_exception(error)

    hosted().completer.submit(complete)
    return future


def received() -> tuple[int, int]:
    return hosted().calls, hosted().bytes


# -- on the callers: each operation in plain torch; payload [size / 4] -----------------------------


def call(
    key: dict[str, Any], function: Callable[..., Any], payload: torch.Tensor
) -> list[torch.Tensor]:
    """The results of one batch of calls: `in_flight` of rpc_async, else one."""
    if key["operation"] == "rpc_async":
        n = key["in_flight"]
        futures = [rpc.rpc_async("server0", function, args=(payload,)) for _ in range(n)]
        return list(torch.futures.wait_all(futures))
    if key["operation"] == "remote":
        return [rpc.remote("server0", function, args=(payload,)).to_here()]
    return [rpc.rpc_sync("server0", function, args=(payload,))]


def build(key: dict[str, Any], bench: Benchmark, callee_device: str, group: Group) -> Workload:
    """What a caller measures in a case."""
    device, rank = bench.job.device, bench.job.rank
    # of each call: what the callee got, what the caller got, and the caller's result before that
    needed = bench.job.local_world_size * key["size_bytes"] * (1 + 3 * key["in_flight"])
    if needed > (there := available_bytes(torch.device("cpu"))):
        raise MemoryError(f"the calls need {needed / 2**30:.1f} GiB, {there / 2**30:.1f} are free")
    if rank == group.ranks[0]:
        make("server0", Tally, callee_device)
    seed = key["size_bytes"] + 7919 * (10 * rank + OPERATIONS.index(key["operation"]))
    generator = torch.Generator().manual_seed(seed)
    payload = torch.rand(key["size_bytes"] // 4, generator=generator).to(device)
    later = key["operation"] == "async_execution"
    echo_there, sink_there = (echo_later, sink_later) if later else (echo, sink)
    copies = device.type == "cuda" and callee_device == "cpu"
    echoed: list[torch.Tensor] = []  # of the last round trip
    sunk = 0

    def round_trip() -> None:
        sent = payload.cpu() if copies else payload
        echoed[:] = [result.to(device) for result in call(key, echo_there, sent)]

    def one_way() -> None:
        nonlocal sunk
        sunk += len(call(key, sink_there, payload.cpu() if copies else payload))

    def facts() -> dict[str, Any]:  # all callers are done: their times are gathered
        return {
            "sunk": sunk,
            "received": rpc.rpc_sync("server0", received) if rank == group.ranks[0] else None,
            "wrong": sum(not torch.equal(result, payload) for result in echoed),
        }

    dist.barrier(group.control)  # the tally is there
    return Workload({"round trip": round_trip, "one way": one_way}, facts=facts)


# -- what rank 0 makes of it -----------------------------------------------------------------------


def derive(case: Case, facts: list[dict[str, Any]]) -> None:
    """Fill in the metrics and the check."""
    key = case.key
    for step, directions in (("round trip", 2), ("one way", 1)):
        prefix = step.replace(" ", "_")
        samples = np.array(case.samples_s[step])
        case.metrics |= call_metrics(samples, case.rounds, key["in_flight"], prefix)
        rate = case.metrics[f"{prefix}_calls_per_s"]
        case.metrics[f"{prefix}_gb_per_s"] = rate * key["size_bytes"] * directions / 1e9
    case.check = verdict(problem(key["size_bytes"], facts))


def call_metrics(batches: Any, rounds: list[int], in_flight: int, prefix: str) -> dict[str, Any]:
    """Percentiles of a call's seconds, of the slowest caller; calls/s of all together.

    batches: [callers, iterations], seconds of `in_flight` calls each; rounds: iterations of each
    block, which the callers start together.
    """
    each = [percentiles(row / in_flight, prefix) for row in batches]
    slowest = int(np.argmax(np.median(batches, axis=1)))
    blocks = np.split(batches, np.cumsum(rounds)[:-1], axis=1)
    seconds = sum(float(block.sum(axis=1).max()) for block in blocks)
    return {
        **{name: max(caller[name] for caller in each) for name in each[0]},
        f"{prefix}_p50_ci95_rel": relative_ci95(batches[slowest]),
        f"{prefix}_slowest_caller": slowest,
        f"{prefix}_calls_per_s": batches.size * in_flight / seconds,
    }


def problem(size_bytes: int, facts: list[dict[str, Any]]) -> str | None:
    """What is wrong with what arrived; None if nothing is. facts: of each caller."""
    for caller, fact in enumerate(facts):
        if fact["wrong"]:
            return f"{fact['wrong']} of the last echoes to caller {caller} are not what it sent"
    calls, total = facts[0]["received"]
    sent = sum(fact["sunk"] for fact in facts)
    arrived = f"the callee received {calls} calls with {total} bytes one way"
    return None if (calls, total) == (sent, sent * size_bytes) else f"{arrived}, of {sent} sent"


def name_of(case: Case) -> str:
    key = case.key
    many = f" x{key['in_flight']}" if key["in_flight"] > 1 else ""
    return f"{key['operation']}{many} {show_size(key['size_bytes'])}"


COLUMNS: Columns = {
    "": name_of,
    "p50\n(us)": metric("round_trip_p50_s", 1e6, 1),
    "95% ci\nof p50": relative("round_trip_p50_ci95_rel"),
    "p95\n(us)": metric("round_trip_p95_s", 1e6, 1),
    "p99\n(us)": metric("round_trip_p99_s", 1e6, 1),
    "\ncalls/s": metric("round_trip_calls_per_s", 1, 1),
    "\nGB/s": metric("round_trip_gb_per_s", 1, 3),
    "one way\np50 (us)": metric("one_way_p50_s", 1e6, 1),
    "one way\ncalls/s": metric("one_way_calls_per_s", 1, 1),
    "one way\nGB/s": metric("one_way_gb_per_s", 1, 3),
}
WIDEST = ["async_execution 64K", "000000.0", "+-10.0%", "000000.0", "000000.0", "00000.0"]


# -- the run ---------------------------------------------------------------------------------------


def plan(args: argparse.Namespace, fixed: dict[str, Any]) -> list[dict[str, Any]]:
    """The key of each case: operation, calls in flight, size."""
    found = []
    for name in args.ops:
        for in_flight in args.in_flight if name == "rpc_async" else [1]:
            for count in sorted(args.sizes):
                n = max(1, min(in_flight, BATCH_BYTES // count))
                key = {"operation": name, "in_flight": n, "size_bytes": count} | fixed
                found += [key] if key not in found else []  # two N may be alike in large sizes
    return found


def main() -> int:
    args = parse_args()
    cuda = wants_cuda(args.device)
    server_cuda = cuda if args.server_device == "auto" else args.server_device == "cuda"
    roles = split_roles(world()[2], servers=1)
    callers = len(roles.trainers)
    roles = roles.on_cuda(callers * cuda, int(server_cuda))
    place(args, roles)
    with Benchmark("rpc_latency", args, tested=roles.trainers) as bench:
        options = rpc_options(args, bench)
        fixed = options.key() | {"callers": callers, "device": "cuda" if cuda else "cpu"}
        fixed["server_device"] = "cuda" if server_cuda else "cpu"
        title = f"Callers: {callers}, callee: rank {callers}; {options}"
        bench.begin_table(title, COLUMNS, WIDEST)
        with rpc_workers(bench, roles, options) as devices:
            for key in plan(args, fixed):
                work = partial(build, key, bench, devices[callers])
                bench.measure(key, work, derive, roles.trainers)
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
