"""RPC in the scripts: the flags of TensorPipe, and the start and shutdown of the workers.

Servers and the master answer calls while they wait in `Benchmark.measure` for the end of a case.
"""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch.distributed.rpc as rpc

from common.errors import LostPeer
from common.rpc import Roles, RpcOptions, need_files, start, stop
from harness.benchmark import Benchmark
from harness.cli import checked, list_of
from harness.exits import refuse

# at import, because scripts use rpc.functions as decorators, and these are missing then as well
if not hasattr(rpc, "TensorPipeAgent"):
    refuse("this torch was built without TensorPipe, which torch.distributed.rpc requires")

TRANSPORTS = ("auto", "shm", "uv", "ibv")
CHANNELS = ("auto", "basic", "cma", "mpt_uv", "cuda_basic", "cuda_ipc", "cuda_gdr", "cuda_xth")
SECONDS = "a number of seconds from 0.001 to 1e8"  # torch stores milliseconds in an int64
time_limit = checked(float, lambda s: 0.001 <= s <= 1e8, SECONDS, "e.g. 60")
threads = checked(int, lambda n: 1 <= n <= 1024, "a whole number from 1 to 1024", "e.g. 16")


def add_rpc_flags(
    parser: argparse.ArgumentParser, server_device: str | None = None, stragglers: bool = False
) -> None:
    """Add the flags of TensorPipe, and --server-device if it has a default.

    stragglers: add --straggler-timeout, the limit on calls that send gradients.
    """
    add = parser.add_argument_group("RPC").add_argument
    add(
        "--rpc-threads",
        type=threads,
        metavar="N",
        help="worker threads per process (default: its share of the cores, 2 to 16)",
    )
    of_gradients = "--straggler-timeout"
    gradients = f"; gradients have {of_gradients}" if stragglers else ""
    add(
        "--rpc-timeout",
        type=time_limit,
        metavar="S",
        help="timeout of RPC calls (default: twice --timeout, so hang detection acts first)"
        + gradients,
    )
    add(
        "--rpc-transports",
        type=list_of(str, TRANSPORTS),
        metavar="NAME",
        help="transports that TensorPipe may use: shm (one host, its thread polls), uv (TCP), ibv "
        "(InfiniBand); default: auto, which is all of them, or uv if there are more ranks than "
        "cores",
    )
    add(
        "--rpc-channels",
        type=list_of(str, CHANNELS),
        metavar="NAME",
        help="channels that it may use for tensors: basic (always available), cma (one host, "
        "requires ptrace), mpt_uv (TCP); on CUDA cuda_basic (always available), cuda_ipc (one "
        "host, peer access, no expandable segments), cuda_gdr (InfiniBand), cuda_xth (one "
        "process). Include basic and cuda_basic: TensorPipe aborts a process that finds no channel "
        "(default: auto, which is all of them)",
    )
    if stragglers:
        add(
            of_gradients,
            type=time_limit,
            metavar="S",
            help="the case fails if a trainer waits longer than S seconds for the reply to its "
            "gradients: another trainer's are missing, or the server is stuck (default: half of "
            "--timeout; after --timeout the whole run would end)",
        )
    if server_device:
        add(
            "--server-device",
            choices=("auto", "cpu", "cuda"),
            default=server_device,
            help=f"device of the servers (default: {server_device}; auto: as --device)",
        )


def rpc_options(args: argparse.Namespace, bench: Benchmark) -> RpcOptions:
    """Return the settings by the flags and the cores of rank 0's node, the same on all ranks.

    TensorPipe's own default is 16 threads on any machine. With 1 thread a function that makes an
    RPC would wait for itself. shm polls, so with more ranks than cores it would slow the ranks.
    """
    cores, ranks = len(os.sched_getaffinity(0)), bench.job.local_world_size
    options = RpcOptions(
        threads=args.rpc_threads or min(16, max(2, cores // ranks)),
        timeout_s=args.rpc_timeout or 2 * args.timeout,
        transports=args.rpc_transports or (["uv"] if ranks > cores else ["auto"]),
        channels=args.rpc_channels or ["auto"],
    )
    return bench.job.broadcast(options)


@contextmanager
def rpc_workers(bench: Benchmark, roles: Roles, options: RpcOptions) -> Iterator[list[str]]:
    """Run all ranks as RPC workers, named by their roles, until all leave. Yields their devices."""
    bench.prepare("ulimit -n", partial(need_files, bench.job.world_size, options))
    bench.begin("RPC")
    bench.phase("init_rpc")
    try:
        devices = start(bench.job, roles, options)
    except TimeoutError:
        given = f"--rpc-timeout {options.timeout_s:g}"
        bench.refuse(f"starting RPC took longer than {given}; try --rpc-timeout 60")
    try:
        yield devices
        bench.begin("RPC")
        bench.phase("shutdown")
        # after a failed case there may be calls that are never answered, so do not wait for them
        failed = any(case.failed for case in bench.report.cases)
        graceful = not bench.job.broadcast(failed)
    except LostPeer:  # a function that waits for the lost rank would block even this shutdown
        raise
    except BaseException:
        stop(graceful=False)
        raise
    stop(graceful)
