"""Overhead of the harness by number of ranks, with forked ranks over loopback and gloo.

    python tests/scale.py 2 8 32             prints a table, a few minutes

The ranks are forked from one process that has imported torch, so that many of them fit into memory.
With more ranks than cores they wait for the CPU; read the ratios to a bare new_group rather than
the milliseconds. In each round four things are timed one after the other, until all ranks are done:

new_group       torch creates a gloo group over all ranks, and they close it
first case      a case that creates its groups; its step does nothing and is timed once
next case       another case over the same ranks, which uses the same groups
nothing timed   a case over the same ranks that times nothing: the minimum cost of a case

Each time is the median over rounds. `join` is the time from the start of the last rank until all
ranks have joined.
"""

import gc
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.groups import Group
from common.stats import Times
from common.timing import Workload
from harness import cli
from harness.benchmark import Benchmark, Key

NAMES = ("new_group", "first case", "next case", "nothing timed")
ROUNDS = 8  # the first is a warm-up
FLAGS = ["--device", "cpu", "--iters", "1", "--warmup-iters", "1"]


def time_step_once(key: Key, group: Group) -> Workload:
    return Workload(lambda: None)


def time_nothing(key: Key, group: Group) -> Workload:
    return Workload(lambda: None, timed=Times.of_rank({"step": []}, []))


def make_and_close_group() -> None:
    group: Any = dist.new_group(backend="gloo")
    dist.barrier()  # a rank that closed it at once would disconnect ranks that still connect
    dist.destroy_process_group(group)


def time_round(bench: Benchmark, number: int) -> dict[str, float]:
    """Time each of NAMES once, on all ranks. Returns the seconds on this rank."""

    def case(name: str, build: Any) -> Callable[[], object]:
        key = {"name": name, "round": number}
        return lambda: bench.measure(key, f"{name} {number}", build, lambda *_: None)

    work = {
        "new_group": make_and_close_group,
        "first case": case("first case", time_step_once),
        "next case": case("next case", time_step_once),
        "nothing timed": case("nothing timed", time_nothing),
    }
    bench.groups.close_all()  # so that the first case creates new ones
    seconds = {}
    for name in NAMES:
        dist.barrier()
        start = time.perf_counter()
        work[name]()
        dist.barrier()  # each rank closes its group separately
        seconds[name] = time.perf_counter() - start
    return seconds


def run_rank(rank: int, ranks: int, port: int, results: Any) -> None:
    """Run a rank in its own process. Rank 0 sends the times in seconds."""
    started = time.time()
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    place |= {"MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    parser = cli.Parser(None)
    cli.add_common_flags(parser)
    with Benchmark("scale", parser.parse_args(FLAGS)) as bench:
        joined = time.time()
        last_start = torch.tensor(started, dtype=torch.float64)
        dist.all_reduce(last_start, dist.ReduceOp.MAX)
        bench.announce({})
        seconds = [time_round(bench, number) for number in range(ROUNDS)]
        if rank == 0:
            times = {name: [row[name] for row in seconds[1:]] for name in NAMES}
            results.put(times | {"join": [joined - last_start.item()]})
    sys.exit(bench.status)


def row_of(ranks: int, seconds: dict[str, list[float]]) -> dict[str, str]:
    """The medians in milliseconds, and their ratios to a bare new_group."""
    bare = median(seconds["new_group"])
    row = {"ranks": str(ranks)}
    for name in NAMES:
        typical = median(seconds[name])
        row[f"{name} (ms)"] = f"{typical * 1e3:.0f}"
        if name != "new_group":
            row[f"/ new_group{' ' * len(row)}"] = f"{typical / bare:.2f}"
    row["join (s)"] = f"{seconds['join'][0]:.1f}"
    return row


def main() -> int:
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # a socket for each pair
    torch.set_num_threads(1)
    gc.freeze()  # a collection would write to memory that the ranks share
    rows = []
    for ranks in map(int, sys.argv[1:]):
        # in this process, like that of torchrun's agent
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        results = multiprocessing.get_context("fork").SimpleQueue()
        given = (ranks, store.port, results)
        torch.multiprocessing.start_processes(run_rank, given, ranks, start_method="fork")
        rows.append(row_of(ranks, results.get()))
        print(f"{ranks} ranks are measured", file=sys.stderr)
    print(tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
