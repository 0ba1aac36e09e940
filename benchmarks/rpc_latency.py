#!/usr/bin/env python3
"""What does a call through PyTorch's RPC (TensorPipe) cost here?

The last rank is the server. All other ranks call it at the same time: with 2 ranks the script
measures the plain latency, with more the fan-in that a parameter server sees. A run measures one
setting of --rpc-threads, --rpc-transports and --rpc-channels. The operations are:

    rpc_sync         one call after the other
    rpc_async        N calls started, then all waited for (--in-flight N); a call's time is 1 / N of
                     the time of all of them
    remote           rpc.remote and to_here: one request makes the result there, one fetches it
    async_execution  the server returns a Future at once, and completes it on another thread

Two things are timed for each operation, in alternating blocks. The times include the copies that
are needed if only one side is on CUDA:

    round trip       a payload there and the same back (an echo)
    one way          the payload there, None back: until the caller knows that it has arrived
    p50 .. p99       of the slowest caller: callers do not wait for each other within a block
    calls/s          calls of all callers / seconds from the common start of each block until the
                     last caller is done with it
    GB/s             calls/s * payload, and twice that for the round trip

    torchrun --nproc-per-node 2 benchmarks/rpc_latency.py
    torchrun --nproc-per-node 8 benchmarks/rpc_latency.py --device cuda --json report.jsonl
    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        benchmarks/rpc_latency.py --rpc-threads 4 --rpc-channels basic,mpt_uv

RPC executes what its peers send: run this only on a network that you trust. Written for this
project. BSD-3-Clause. docs/rpc_latency.md shows how to compare settings.
"""

import argparse
import itertools
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# first: it names a package that is missing
from common.cli import Parser, add_common_flags, list_of, positive_int, show_size, size

# isort: split
import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record
from torch.futures import Future

from benchmarks.workloads import patterns
from benchmarks.workloads.phases import own_pace
from benchmarks.workloads.roles import args_of_rank, assign_roles
from benchmarks.workloads.settings import side_by_side
from common.benchmark import Benchmark, Key, Planned
from common.check import verdict
from common.groups import Group, Job
from common.report import Case, Estimate
from common.rpc import Roles, add_rpc_flags, rpc_options, rpc_workers
from common.stats import Times
from common.table import Cell, Columns, Table, metric, number_of, relative
from common.timing import Workload

OPERATIONS = ("rpc_sync", "rpc_async", "remote", "async_execution")
SIZES = [4, 2**12, 2**16, 2**20, 2**26]
BATCH_BYTES = 2**26  # rpc_async has at most so many bytes in flight


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    kinds = list_of(str, OPERATIONS)
    text = f"some of {', '.join(OPERATIONS)} (default: all)"
    add("--ops", type=kinds, default=list(OPERATIONS), metavar="OP", help=text)
    text = "sizes of the payload (default: 4,4K,64K,1M,64M)"
    add("--sizes", type=list_of(size), default=SIZES, metavar="BYTES", help=text)
    text = "concurrent calls of rpc_async; fewer beyond 64M in total (default: 8)"
    add("--in-flight", type=positive_int, default=8, metavar="N", help=text)
    add_rpc_flags(parser, server_device="auto")
    add_common_flags(parser, min_iters=6, max_seconds=1.0)
    parser.set_defaults(backend="gloo")  # callers meet on it; what is timed goes over RPC
    return parser.parse_args(argv)


# [core]
class Server:
    """Counts what arrives in a case, and has the thread that completes Futures."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.calls = 0
        self.bytes = 0
        self.lock = threading.Lock()  # the RPC threads run at the same time
        self.completer = ThreadPoolExecutor(1)


SERVER: list[Server] = []  # of this process


def start_server(device: str) -> None:
    SERVER[:] = [Server(device)]


def echo(payload: Tensor) -> Tensor:
    # a tensor that is on the device already is not copied
    return payload.to(SERVER[0].device).to(payload.device)


def sink(payload: Tensor) -> None:
    server = SERVER[0]
    if payload.to(server.device).is_cuda:  # it has arrived when the copy is done
        torch.cuda.current_stream(server.device).synchronize()
    with server.lock:
        server.calls += 1
        server.bytes += payload.nbytes


@rpc.functions.async_execution
def later(function: Callable[[Tensor], Any], payload: Tensor) -> Future[Any]:
    """A Future that another thread completes, as in a server that waits for more requests."""
    device = SERVER[0].device
    cuda = device.type == "cuda"
    stream = torch.cuda.current_stream(device) if cuda else None  # the payload arrives on it
    future: Future[Any] = Future(devices=[device] if cuda else [])

    def complete() -> None:
        try:
            with torch.cuda.stream(stream):
                future.set_result(function(payload))
        except Exception as error:  # the caller gets it
            future.set_exception(error)

    SERVER[0].completer.submit(complete)
    return future


def received() -> tuple[int, int]:
    return SERVER[0].calls, SERVER[0].bytes


def call(
    operation: str, function: Callable[[Tensor], Any], payload: Tensor, in_flight: int
) -> list[Any]:
    """The results of one batch of calls: `in_flight` calls of rpc_async, else one."""
    match operation:
        case "rpc_sync":
            return [rpc.rpc_sync("server0", function, args=(payload,))]
        case "rpc_async":
            batch = range(in_flight)
            calls = [rpc.rpc_async("server0", function, args=(payload,)) for _ in batch]
            return list(torch.futures.wait_all(calls))
        case "remote":
            return [rpc.remote("server0", function, args=(payload,)).to_here()]
        case _:
            return [rpc.rpc_sync("server0", later, args=(function, payload))]


# [/core]
# -- a case ----------------------------------------------------------------------------------------


def build(job: Job, key: Key, group: Group, *, server_device: str) -> Workload:
    """What a caller measures in a case."""
    device, rank = job.device, job.rank
    if rank == 0:
        rpc.rpc_sync("server0", start_server, args=(server_device,))
    payload = torch.empty(key["size_bytes"], dtype=torch.uint8, device=device)
    patterns.fill(payload, patterns.tile(rank))
    # without a device map CUDA cannot travel
    wire = torch.device("cpu") if server_device == "cpu" else device
    echoed: list[Tensor] = []  # of the last round trip
    sunk = 0

    def round_trip() -> None:
        results = call(key["operation"], echo, payload.to(wire), key["in_flight"])
        echoed[:] = [result.to(device) for result in results]

    def one_way() -> None:
        nonlocal sunk
        sunk += len(call(key["operation"], sink, payload.to(wire), key["in_flight"]))

    def facts() -> dict[str, Any]:  # all callers are done: their times are gathered
        return {
            "sunk": sunk,
            "received": rpc.rpc_sync("server0", received) if rank == 0 else None,
            "wrong": sum(not torch.equal(result, payload) for result in echoed),
        }

    dist.barrier(group.control)  # the server counts for this case
    # callers do not wait for each other
    return Workload(round_trip, {"one way": one_way}, facts=facts, aligned=False)


def derive(case: Case, times: Times, facts: list[dict[str, Any]]) -> None:
    """Fill in the metrics and the check. facts: of each caller."""
    key, metrics = case.key, case.metrics
    for step, name, directions in (("step", "round_trip", 2), ("one way", "one_way", 1)):
        calls = times.each(step) / key["in_flight"]  # [callers, n]
        slowest, calls_per_s = own_pace(calls, case.rounds, name)
        metrics |= slowest
        metrics[f"{name}_calls_per_s"] = calls_per_s
        metrics[f"{name}_gb_per_s"] = calls_per_s * key["size_bytes"] * directions / 1e9
    sent, came = sum(fact["sunk"] for fact in facts), facts[0]["received"]
    problem = None
    if came != (sent, sent * key["size_bytes"]):
        what = f"{came[0]} calls with {came[1]} bytes"
        problem = f"the server received {what} one way, of {sent} sent"
    for caller, fact in enumerate(facts):
        if wrong := fact["wrong"]:
            problem = f"{wrong} of the last echoes to caller {caller} are not what it sent"
            break
    case.check = verdict(problem)


# -- what is printed -------------------------------------------------------------------------------


def rate(gb_per_s: Any) -> str:
    """Three digits: from 4 bytes to the largest it has many sizes."""
    return f"{number_of(gb_per_s):.3g}"


COLUMNS: Columns = {
    "": lambda case: case.name,
    "p50\n(us)": metric("round_trip_s", 1e6, 1),
    "95% ci\nof p50": relative("round_trip_s"),
    "\ncalls/s": metric("round_trip_calls_per_s", 1, 1),
    "95% ci\nof calls/s": relative("round_trip_calls_per_s"),
    "\nGB/s": Cell("round_trip_gb_per_s", rate),
    "p95\n(us)": metric("round_trip_p95_s", 1e6, 1),
    "p99\n(us)": metric("round_trip_p99_s", 1e6, 1),
    "one way\np50 (us)": metric("one_way_s", 1e6, 1),
    "one way\nci of p50": relative("one_way_s"),
    "one way\ncalls/s": metric("one_way_calls_per_s", 1, 1),
    "one way\nci of rate": relative("one_way_calls_per_s"),
    "one way\nGB/s": Cell("one_way_gb_per_s", rate),
}
WIDEST = ["", "000000.0", "+-10.0%", "00000.0", "+-10.0%", "0.000", "000000.0"]


def answer(cases: list[Case]) -> str:
    """The times of the smallest round trip."""
    smallest = min(case.key["size_bytes"] for case in cases)
    of_smallest = [case for case in cases if case.key["size_bytes"] == smallest]
    # a batch of calls has no latency of its own
    single = [case for case in of_smallest if case.key["in_flight"] == 1] or of_smallest
    times: dict[str, Estimate] = {}
    for case in single:
        times[case.key["operation"]] = case.metrics["round_trip_s"]
    return f"{show_size(smallest)} bytes there and back take {side_by_side(times)}"


# -- which cases -----------------------------------------------------------------------------------


def plan(args: argparse.Namespace, roles: Roles, rpc_settings: Key) -> list[Planned]:
    """Every operation with every size, small payloads first."""
    fixed = rpc_settings | {"server_device": roles.device(roles.servers[0])}
    cases: list[Planned] = []
    for operation, size_bytes in itertools.product(args.ops, sorted(args.sizes)):
        in_flight = 1
        if operation == "rpc_async":
            in_flight = max(1, min(args.in_flight, BATCH_BYTES // max(1, size_bytes)))
        key = {"operation": operation, "in_flight": in_flight, "size_bytes": size_bytes}
        many = f" x{in_flight}" if in_flight > 1 else ""
        name = f"{operation}{many} {show_size(size_bytes)}"
        cases.append((name, len(roles.trainers), key | fixed))
    return cases


def main() -> int:
    args = parse_args()
    roles = assign_roles(args, servers=1)
    server = roles.servers[0]
    with Benchmark("rpc_latency", args_of_rank(args, roles), roles.trainers) as bench:
        options = rpc_options(args, bench)
        cases = plan(args, roles, options.key())
        title = f"Callers: {len(roles.trainers)}, server: rank {server}; {options}"
        bench.announce({title: cases})
        with (
            rpc_workers(bench, roles, options) as devices,
            bench.begin_table(title, COLUMNS, answer, Table(COLUMNS, WIDEST)),
        ):
            build_case = partial(build, bench.job, server_device=devices[server])
            for name, _, key in cases:
                bench.measure(key, name, build_case, derive, ranks=roles.trainers)
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
