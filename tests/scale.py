"""What does the harness itself cost, by the number of ranks? Forked ranks over loopback, on gloo.

    python tests/scale.py 2 8 32 64          prints the table of docs/scale.md, a few minutes

The ranks are forked from one process that has imported torch: many of them fit into memory. With
more ranks than cores they wait for each other's turns. So read the ratios to a bare new_group, not
the milliseconds. In each round four things are timed until all ranks are done, one after the other:

new_group       torch makes a gloo group over all ranks; when all have it, they close it
first case      a case whose groups are made for it; its step does nothing and is timed once
next case       the same over the same ranks again: the groups are there
nothing timed   a case over the same ranks that times nothing: what each case costs at least

Each is the median of the rounds of all starts. `join` is the median of the starts: from the last
rank's start until all ranks have met. The first round of a start is a warm-up.
"""

import argparse
import gc
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cli
from common.benchmark import Benchmark, Key
from common.groups import Group
from common.timing import RankTimes, Workload

Times = dict[str, list[float]]  # what was timed -> seconds
FORK: Any = multiprocessing.get_context("fork")
NAMES = ("new_group", "first case", "next case", "nothing timed")
FLAGS = ["--device", "cpu", "--iters", "1", "--warmup-iters", "1"]


def parse_args() -> argparse.Namespace:
    parser = cli.Parser(__doc__)
    parser.add_argument("ranks", type=cli.positive_int, nargs="+", help="e.g. 2 8 32 64")
    parser.add_argument("--rounds", type=cli.positive_int, default=7, help="of a start (default 7)")
    parser.add_argument("--starts", type=cli.positive_int, default=3, help="default 3")
    return parser.parse_args()


def time_step_once(key: Key, group: Group) -> Workload:
    return Workload(lambda: None)


def time_nothing(key: Key, group: Group) -> Workload:
    return Workload(lambda: None, timed=RankTimes({"step": []}, []))


def make_and_close_group() -> None:
    group: Any = dist.new_group(backend="gloo")
    dist.barrier()  # a rank that closed it at once would cut off ranks that still connect
    dist.destroy_process_group(group)


def time_round(bench: Benchmark, number: int) -> dict[str, float]:
    """Time each thing once. All ranks call it. Returns the seconds on this rank."""

    def case(name: str, build: Any) -> Callable[[], object]:
        return lambda: bench.measure(
            {"name": name, "round": number}, f"{name} {number}", build, lambda *_: None
        )

    work = {
        "new_group": make_and_close_group,
        "first case": case("first case", time_step_once),
        "next case": case("next case", time_step_once),
        "nothing timed": case("nothing timed", time_nothing),
    }
    bench.groups.close_all()  # so that the first case needs new ones
    seconds = {}
    for name in NAMES:
        dist.barrier()
        start = time.perf_counter()
        work[name]()
        dist.barrier()  # closing a group is each rank's own work
        seconds[name] = time.perf_counter() - start
    return seconds


def run_rank(rank: int, ranks: int, port: int, rounds: int, results: Connection) -> None:
    """A rank, in a process of its own. Rank 0 sends what it has timed."""
    started = time.time()
    place: dict[str, object] = {"RANK": rank, "LOCAL_RANK": rank}
    place |= {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    place["TORCHELASTIC_USE_AGENT_STORE"] = True  # the store is in another process
    os.environ.update({name: str(value) for name, value in place.items()})
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    parser = cli.Parser(None)
    cli.add_common_flags(parser)
    with Benchmark("scale", parser.parse_args(FLAGS)) as bench:
        joined = time.time()
        last_start = torch.tensor(started, dtype=torch.float64)
        dist.all_reduce(last_start, dist.ReduceOp.MAX)
        seconds = [time_round(bench, number) for number in range(rounds + 1)]
        if rank == 0:
            times = {name: [row[name] for row in seconds[1:]] for name in NAMES}
            results.send(times | {"join": [joined - last_start.item()]})
    sys.exit(bench.status)


def serve_store(port: Connection) -> None:
    """The store in which the ranks meet, in a process of its own, as torchrun's agent has it."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    port.send(store.port)
    signal.pause()


def start_once(ranks: int, rounds: int) -> Times:
    """Start that many ranks and wait for them. Ends the program if one of them fails."""
    port_of_store, port = FORK.Pipe(duplex=False)
    results_of_rank, results = FORK.Pipe(duplex=False)
    FORK.Process(target=serve_store, args=[port], daemon=True).start()
    store_port = port_of_store.recv()
    processes = []
    for rank in range(ranks):
        arguments = (rank, ranks, store_port, rounds, results)
        processes.append(FORK.Process(target=run_rank, args=arguments, daemon=True))
        processes[-1].start()
    results.close()  # without a writer, recv() ends
    try:
        times = results_of_rank.recv()
    except EOFError:
        times = None
    for process in processes:
        process.join()
    failed = [rank for rank, process in enumerate(processes) if process.exitcode]
    if failed or times is None:
        cli.refuse(f"{ranks} ranks: rank {cli.cut(failed)} failed, see above", 1)
    return times


def row_of(ranks: int, starts: list[Times]) -> dict[str, str]:
    """The medians of all rounds in milliseconds, and their ratios to a bare new_group."""
    medians = {}
    for name in NAMES:
        medians[name] = median(seconds for start in starts for seconds in start[name])
    row = {"ranks": str(ranks)}
    for name in NAMES:
        row[f"{name} (ms)"] = f"{medians[name] * 1e3:.0f}"
        if name != "new_group":
            row[f"/ new_group{' ' * len(row)}"] = f"{medians[name] / medians['new_group']:.2f}"
    row["join (s)"] = f"{median(start['join'][0] for start in starts):.1f}"
    return row


def main() -> int:
    args = parse_args()
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # a socket for each pair
    torch.set_num_threads(1)
    gc.freeze()  # what the ranks share stays shared: a collection would write to it
    rows = []
    for ranks in args.ranks:
        starts = [start_once(ranks, args.rounds) for _ in range(args.starts)]
        rows.append(row_of(ranks, starts))
        print(f"{ranks} ranks are measured", file=sys.stderr)
    print(tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
