#!/usr/bin/env python3
"""What does a call through PyTorch's RPC framework (TensorPipe) cost?

The last rank is the server, and all other ranks call it concurrently. With 2 ranks the script
measures the latency of a single call, with more ranks the fan-in that a parameter server sees. Each
run measures one setting of --rpc-threads, --rpc-transports and --rpc-channels. The operations are:

    rpc_sync         one call after the other
    rpc_async        N calls are started, then all of them are awaited (--in-flight N). The time of
                     a call is the time of this batch / N
    remote           rpc.remote and to_here: the first request creates the result on the server, the
                     second one fetches it
    async_execution  the server returns a Future immediately and completes it on another thread

Each operation is timed in two forms, in alternating blocks. The times include the copies between
host and device that are necessary if only one side is on CUDA:

    round trip       the server sends the payload back (an echo)
    one way          the server returns None; the call ends when the caller knows that the payload
                     has arrived
    p50 .. p99       percentiles of the slowest caller (callers do not wait for each other within a
                     block)
    calls/s          median over blocks of (calls of all callers) / (seconds from the common start
                     until the last caller has finished)
    GB/s             calls/s * payload for one way, twice that for a round trip

    torchrun --nproc-per-node 2 benchmarks/rpc_latency.py
    torchrun --nproc-per-node 8 benchmarks/rpc_latency.py --device cuda --json report.jsonl
    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        benchmarks/rpc_latency.py --rpc-threads 4 --rpc-channels basic,mpt_uv

RPC executes what its peers send, so use it only on a trusted network. docs/rpc_latency.md explains
the table and how to compare settings. Written for this project, BSD-3-Clause.
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

from harness import exits
from harness.cli import Parser, add_common_flags, list_of, positive_int, show_size, size

exits.report_missing_packages()

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record
from torch.futures import Future

from benchmarks.workloads import patterns
from benchmarks.workloads.check import verdict
from benchmarks.workloads.phases import unaligned_metrics
from benchmarks.workloads.roles import args_of_rank, assign_roles
from benchmarks.workloads.rpc_flags import add_rpc_flags, rpc_options, rpc_workers
from benchmarks.workloads.settings import side_by_side
from common.groups import Group, Job
from common.rpc import Roles
from common.stats import Estimate, Times, significant
from common.table import Cell, Columns, Table, metric, number_of, relative
from common.timing import Workload
from harness.benchmark import Benchmark, Key, Planned
from harness.report import Case

OPERATIONS = ("rpc_sync", "rpc_async", "remote", "async_execution")
SIZES = [4, 2**12, 2**16, 2**20, 2**26]  # bytes
MAX_BYTES_IN_FLIGHT = 2**26  # per caller of rpc_async


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    kinds = list_of(str, OPERATIONS)
    add(
        "--ops",
        type=kinds,
        default=list(OPERATIONS),
        metavar="OP",
        help=f"operations to measure: {', '.join(OPERATIONS)} (default: all)",
    )
    add(
        "--sizes",
        type=list_of(size),
        default=SIZES,
        metavar="BYTES",
        help="payload sizes (default: 4,4K,64K,1M,64M)",
    )
    add(
        "--in-flight",
        type=positive_int,
        default=8,
        metavar="N",
        help="number of concurrent calls of rpc_async; fewer if they would exceed 64M in flight "
        "per caller (default: 8)",
    )
    add_rpc_flags(parser, server_device="auto")
    add_common_flags(parser, min_iters=6, max_seconds=1.0)
    parser.set_defaults(backend="gloo")  # for barriers only: the timed calls use RPC
    return parser.parse_args(argv)


# [core]
class Server:
    """Counts the one-way calls of a case and completes Futures on a thread.

    device: where payloads are received, `cpu` or `cuda:0`.
    """

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.calls = 0
        self.bytes = 0
        self.lock = threading.Lock()  # RPC threads run concurrently
        self.completer = ThreadPoolExecutor(1)


SERVER: list[Server] = []  # the server, if this process is one


def start_server(device: str) -> None:
    SERVER[:] = [Server(device)]


def echo(payload: Tensor) -> Tensor:
    """The payload, copied to the server's device and back if it arrives on another one."""
    return payload.to(SERVER[0].device).to(payload.device)


def sink(payload: Tensor) -> None:
    server = SERVER[0]
    if payload.to(server.device).is_cuda:  # the payload has arrived when the copy is complete
        torch.cuda.current_stream(server.device).synchronize()
    with server.lock:
        server.calls += 1
        server.bytes += payload.nbytes


@rpc.functions.async_execution
def complete_later(function: Callable[[Tensor], Any], payload: Tensor) -> Future[Any]:
    """A Future that another thread completes, as in a server that waits for further requests."""
    device = SERVER[0].device
    cuda = device.type == "cuda"
    stream = torch.cuda.current_stream(device) if cuda else None  # the one that receives payload
    future: Future[Any] = Future(devices=[device] if cuda else [])

    def complete() -> None:
        try:
            with torch.cuda.stream(stream):
                future.set_result(function(payload))
        except Exception as error:  # raised in the caller
            future.set_exception(error)

    SERVER[0].completer.submit(complete)
    return future


def get_received() -> tuple[int, int]:
    """The number of one-way calls and their bytes."""
    return SERVER[0].calls, SERVER[0].bytes


def call(
    operation: str, function: Callable[[Tensor], Any], payload: Tensor, in_flight: int
) -> list[Any]:
    """The results of `in_flight` calls with rpc_async, of one call with any other operation."""
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
            return [rpc.rpc_sync("server0", complete_later, args=(function, payload))]


# [/core]
# -- a case ----------------------------------------------------------------------------------------


def build(job: Job, key: Key, group: Group, *, server_device: str) -> Workload:
    """The workload of a caller: round trips, and one-way calls as the part."""
    device, rank = job.device, job.rank
    if rank == 0:
        rpc.rpc_sync("server0", start_server, args=(server_device,))
    payload = torch.empty(key["size_bytes"], dtype=torch.uint8, device=device)
    patterns.fill(payload, patterns.tile(rank))
    # RPC sends CUDA tensors only over a device map, which requires both sides to be on CUDA
    wire = torch.device("cpu") if server_device == "cpu" else device
    echoes: list[Tensor] = []  # of the most recent round trip
    sent = 0  # one-way calls

    def round_trip() -> None:
        results = call(key["operation"], echo, payload.to(wire), key["in_flight"])
        echoes[:] = [result.to(device) for result in results]

    def one_way() -> None:
        nonlocal sent
        sent += len(call(key["operation"], sink, payload.to(wire), key["in_flight"]))

    def facts() -> dict[str, Any]:  # all callers have finished: their times were gathered
        return {
            "sent": sent,
            "received": rpc.rpc_sync("server0", get_received) if rank == 0 else None,
            "wrong": sum(not torch.equal(result, payload) for result in echoes),
        }

    dist.barrier(group.control)  # the server's counters are reset before the first call
    # not aligned: callers do not wait for each other within a block
    return Workload(round_trip, {"one way": one_way}, facts=facts, aligned=False)


def derive(case: Case, times: Times, facts: list[dict[str, Any]]) -> None:
    """Compute the metrics and check the payloads. facts: one entry per caller."""
    key, metrics = case.key, case.metrics
    for step, name, directions in (("step", "round_trip", 2), ("one way", "one_way", 1)):
        calls = times.each(step) / key["in_flight"]  # [callers, n]
        slowest, calls_per_s = unaligned_metrics(calls, case.rounds, name)
        metrics |= slowest
        metrics[f"{name}_calls_per_s"] = calls_per_s
        metrics[f"{name}_gb_per_s"] = calls_per_s * key["size_bytes"] * directions / 1e9
    sent, received = sum(fact["sent"] for fact in facts), facts[0]["received"]
    problem = None
    if received != (sent, sent * key["size_bytes"]):
        calls_and_bytes = f"{received[0]} one-way calls with {received[1]} bytes"
        problem = f"the server received {calls_and_bytes}, but the callers sent {sent} calls"
    for caller, fact in enumerate(facts):
        if wrong := fact["wrong"]:
            problem = f"{wrong} of the last echoes to caller {caller} differ from its payload"
            break
    case.check = verdict(problem)


# -- output ----------------------------------------------------------------------------------------


def rate(gb_per_s: Any) -> str:
    """Format with three significant digits: rates differ by orders of magnitude between sizes."""
    return significant(number_of(gb_per_s), 3)


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
    """The latency of a round trip of the smallest payload, by operation."""
    smallest = min(case.key["size_bytes"] for case in cases)
    of_smallest = [case for case in cases if case.key["size_bytes"] == smallest]
    # a batch in flight measures throughput, not latency
    single = [case for case in of_smallest if case.key["in_flight"] == 1] or of_smallest
    times: dict[str, Estimate] = {}
    for case in single:
        times[case.key["operation"]] = case.metrics["round_trip_s"]
    return f"a round trip of {show_size(smallest)} bytes takes {side_by_side(times)}"


# -- the cases -------------------------------------------------------------------------------------


def plan(args: argparse.Namespace, roles: Roles, rpc_settings: Key) -> list[Planned]:
    """A case for each operation and size, from the smallest payload to the largest."""
    fixed = rpc_settings | {"server_device": roles.device(roles.servers[0])}
    cases: list[Planned] = []
    for operation, size_bytes in itertools.product(args.ops, sorted(args.sizes)):
        in_flight = 1
        if operation == "rpc_async":
            in_flight = max(1, min(args.in_flight, MAX_BYTES_IN_FLIGHT // max(1, size_bytes)))
        key = {"operation": operation, "in_flight": in_flight, "size_bytes": size_bytes}
        batch = f" x{in_flight}" if in_flight > 1 else ""
        name = f"{operation}{batch} {show_size(size_bytes)}"
        cases.append(Planned(name, len(roles.trainers), key | fixed))
    return cases


def main() -> int:
    args = parse_args()
    roles = assign_roles(args, servers=1)
    server = roles.servers[0]
    with Benchmark("rpc_latency", args_of_rank(args, roles), roles.trainers) as bench:
        options = rpc_options(args, bench)
        cases = plan(args, roles, options.by_name())
        title = f"Callers: {len(roles.trainers)}, server: rank {server}; {options}"
        bench.announce({title: cases})
        with rpc_workers(bench, roles, options) as devices:
            make = partial(build, bench.job, server_device=devices[server])
            layout, on = Table(COLUMNS, WIDEST), roles.trainers
            bench.run(title, cases, COLUMNS, make, derive, answer, layout=layout, ranks=on)
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
