#!/usr/bin/env python3
"""What can this machine, and this harness, tell apart? Run it before you trust a number.

    barrier       how far apart the ranks of a host leave a barrier: each block starts so uneven
    perturbation  a step of about 1 ms as the harness reports it / the same step in a bare loop, in
                  blocks that alternate in one process: 1 is a harness that costs nothing
    resolution    a step against itself for so many seconds: half the 95 % interval of the
                  difference, over the step. A smaller difference cannot be seen in one run

    python benchmarks/calibrate.py
    torchrun --nproc-per-node 8 benchmarks/calibrate.py --json calibration.jsonl
    torchrun --nproc-per-node 2 benchmarks/calibrate.py --modes resolution --seconds 1,10,60

How often comparisons of whole runs err: tests/simulate_compare.py. BSD-3-Clause.
"""

import argparse
import socket
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cli
from common.benchmark import Benchmark, Key, Workload
from common.dist import Group
from common.report import Case
from common.stats import Times, median_interval, percentiles
from common.table import Columns
from common.timing import ROUNDS, Step, StopRule, time_block, time_steps


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = cli.Parser(__doc__)
    add, positive = parser.add_argument, cli.positive_float
    modes = cli.list_of(str, tuple(MODES))
    add("--modes", type=modes, default=list(MODES), metavar="M", help=f"{', '.join(MODES)} (all)")
    seconds, text = cli.list_of(positive), "time for each `resolution` (default: 1,2,5,10)"
    add("--seconds", type=seconds, default=[1.0, 2.0, 5.0, 10.0], metavar="S", help=text)
    text = "the step takes at least this (default: 1)"
    add("--step-ms", type=positive, default=1.0, metavar="MS", help=text)
    text = "of harness and bare loop, for `perturbation` (default: 60)"
    add("--pairs", type=cli.positive_int, default=60, metavar="N", help=text)
    cli.add_common_flags(parser)
    return parser.parse_args(argv)


def step_of(ms: float, device: torch.device) -> Step:
    """A training step (forward, backward, SGD) with as many layers as it takes to last so long."""
    model, inputs = nn.Sequential(), torch.randn(32, 128, device=device)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    while True:
        for _ in range(1 + len(model) // 4):
            model.append(nn.Linear(128, 128, device=device))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        time_block(step, 5, device)
        if np.median(time_block(step, 20, device)[0]) >= ms / 1e3:
            return step


def build_barrier(args: argparse.Namespace, bench: Benchmark, key: Key, group: Group) -> Workload:
    def leave() -> float:
        dist.barrier(group.control)
        return perf_counter()  # CLOCK_MONOTONIC: one clock for all processes of a host

    return Workload(leave, facts=socket.gethostname, returned=list)


def derive_barrier(case: Case, times: Times, hosts: list[str]) -> None:
    """The worst host counts. hosts: of each rank; times.returned: when it left, [n]."""
    spreads = []
    for host in dict.fromkeys(hosts):
        left = [stamps for h, stamps in zip(hosts, times.returned, strict=True) if h == host]
        spreads.append(np.ptp(left, axis=0))
    case.metrics |= percentiles(max(spreads, key=np.median), "spread")


def build_perturbation(
    args: argparse.Namespace, bench: Benchmark, key: Key, group: Group
) -> Workload:
    """The pairs are timed here; the case's own loop times the step once more."""
    device = bench.job.device
    step = step_of(args.step_ms, device)
    # a pair is a block each, as long as those of a case with three steps and a budget of 5 seconds
    block_s = 5 / ROUNDS / 3
    iters = max(10, int(block_s / (args.step_ms / 1e3)))
    rule = StopRule(warmup_iters=1, min_iters=1, max_seconds=block_s, rounds=1)

    def harness() -> float:
        timing = time_steps(Workload(step), group, device, rule)
        return float(np.mean(timing.samples_s["step"]))

    def bare_loop() -> float:
        """Seconds an iteration, as anybody would time it by hand."""
        dist.barrier(group.control)  # all ranks load the machine at the same time, as there
        start = perf_counter()
        for _ in range(iters):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (perf_counter() - start) / iters

    ratios = []
    for pair in range(args.pairs):
        bench.watchdog.phase(f"pair {pair + 1}")
        took = {each: each() for each in [harness, bare_loop][:: 1 if pair % 2 == 0 else -1]}
        ratios.append(took[harness] / took[bare_loop])
    return Workload(step, facts=lambda: ratios)


def derive_perturbation(case: Case, times: Times, facts: list[list[float]]) -> None:
    """Of the first rank."""
    ratios, interval = facts[0], median_interval(facts[0])
    case.metrics |= {"ratio": float(np.median(ratios)), "ratio_ci95": interval, "ratios": ratios}
    case.metrics |= percentiles(times.each()[0], "step_time")


def build_resolution(
    args: argparse.Namespace, bench: Benchmark, key: Key, group: Group
) -> Workload:
    step = step_of(args.step_ms, bench.job.device)
    return Workload(step, {"the same": step})


def derive_resolution(case: Case, times: Times, facts: list[None]) -> None:
    p50 = float(np.median(times.slowest()))
    shift, interval = times.exposed("the same")
    case.metrics |= {"step_time_p50_s": p50, "difference_rel": shift / p50}
    if interval:
        case.metrics["resolution_rel"] = (interval[1] - interval[0]) / 2 / p50


MODES: dict[str, tuple[Any, Any]] = {
    "barrier": (build_barrier, derive_barrier),
    "perturbation": (build_perturbation, derive_perturbation),
    "resolution": (build_resolution, derive_resolution),
}


def found(case: Case) -> str:
    """What a case says, as a cell."""
    mode, m = case.key["mode"], case.metrics
    if mode == "barrier":
        p50, p95 = m["spread_p50_s"] * 1e6, m["spread_p95_s"] * 1e6
        return f"ranks of a host leave a barrier {p50:.1f} us apart, 95 % under {p95:.1f} us"
    step = f"a step of {m['step_time_p50_s'] * 1e3:.2f} ms"
    if mode == "perturbation":
        within = "too few --pairs for an interval"
        if m["ratio_ci95"]:
            low, high = m["ratio_ci95"]
            within = f"95 % {low:.4f} to {high:.4f}"
        return f"reported / bare loop = {m['ratio']:.4f} ({within}), {step}"
    seen = f"+-{m['resolution_rel']:.2%}" if "resolution_rel" in m else "too few rounds to say"
    return f"{seen} of {step}, after {sum(case.rounds)} steps"


def main() -> int:
    args = parse_args()
    with Benchmark("calibrate", args) as bench:
        columns: Columns = {"": lambda case: case.key["name"], "found": found}
        title = f"What can be told apart, by a step of at least {args.step_ms:g} ms"
        bench.begin_table(title, columns, ["resolution, 10 s", ""])
        rule = replace(bench.rule, target_ci=1e-9, patience=1)  # which no step reaches
        for mode in args.modes:
            build, derive = MODES[mode]
            iters = 240 if mode == "barrier" else None
            for seconds in args.seconds if mode == "resolution" else [None]:
                bench.rule = replace(rule, iters=iters, max_seconds=seconds or 1)
                name = f"{mode}, {seconds:g} s" if seconds else mode
                key = {"mode": mode, "name": name, "seconds": seconds, "step_ms": args.step_ms}
                bench.measure(key, partial(build, args, bench), derive)
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
