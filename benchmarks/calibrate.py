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
import math
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

from common.benchmark import Benchmark, Build, Derive, Workload
from common.cli import Parser, add_common_flags, list_of, positive_float, positive_int
from common.dist import Group
from common.report import Case
from common.stats import difference, median_interval, percentiles
from common.table import Columns
from common.timing import ROUNDS, Step, StopRule, time_block, time_steps

MODES = ("barrier", "perturbation", "resolution")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--modes", type=list_of(str, MODES), default=list(MODES), help="a list (default: all)")
    add(
        "--seconds",
        type=list_of(positive_float),
        default=[1.0, 2.0, 5.0, 10.0],
        metavar="S",
        help="time for each `resolution`; a list (default: 1,2,5,10)",
    )
    add(
        "--step-ms",
        type=positive_float,
        default=1.0,
        metavar="MS",
        help="the step takes at least this (default: 1)",
    )
    add(
        "--pairs",
        type=positive_int,
        default=60,
        metavar="N",
        help="of harness and bare loop, for `perturbation` (default: 60)",
    )
    add_common_flags(parser)
    return parser.parse_args(argv)


def training_step(device: torch.device, seconds: float) -> tuple[Step, int]:
    """A training step (forward, backward, SGD) deep enough to take `seconds`; and its depth."""
    depth = 2
    while True:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(depth)]).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        inputs = torch.randn(32, 128, device=device)
        step = partial(train, model, optimizer, inputs)
        time_block(step, 5, device)
        if np.median(time_block(step, 20, device)[0]) >= seconds:
            return step, depth
        depth += max(1, depth // 4)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()


def bare_loop(step: Step, iters: int, device: torch.device) -> float:
    """Seconds an iteration, as anybody would time it by hand."""
    start = perf_counter()
    for _ in range(iters):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (perf_counter() - start) / iters


# -- the modes: each builds a workload, and derives metrics from it on rank 0 ----------------------


def build_barrier(group: Group) -> Workload:
    stamps: list[float] = []

    def leave() -> None:
        dist.barrier(group.control)
        stamps.append(perf_counter())  # CLOCK_MONOTONIC: one clock for all processes of a host

    return Workload({"barrier": leave}, facts=lambda: (socket.gethostname(), stamps[-200:]))


def derive_barrier(case: Case, facts: list[tuple[str, list[float]]]) -> None:
    hosts = {host for host, _ in facts}
    left = {host: np.array([stamps for h, stamps in facts if h == host]) for host in hosts}
    spreads = {host: np.ptp(stamps, axis=0) for host, stamps in left.items()}  # [200]
    worst = max(spreads.values(), key=lambda spread: float(np.median(spread)))
    case.metrics |= percentiles(worst, "spread")


def build_perturbation(args: argparse.Namespace, bench: Benchmark, group: Group) -> Workload:
    """The pairs are timed here; the case's own loop times the step once more."""
    device = bench.job.device
    step, depth = training_step(device, args.step_ms / 1e3)
    # a pair is a block each, as long as those of a case with three steps and a budget of 5 seconds
    block_s = 5 / ROUNDS / 3
    iters = max(10, int(block_s / (args.step_ms / 1e3)))
    rule = StopRule(warmup_iters=1, min_iters=1, max_seconds=block_s, rounds=1)

    def harness() -> float:
        timing = time_steps({"step": step}, group, device, rule)
        return float(np.mean(timing.samples_s["step"][0])) if timing.samples_s else 1.0

    def by_hand() -> float:
        dist.barrier(group.control)  # all ranks load the machine at the same time, as there
        return bare_loop(step, iters, device)

    ratios = []
    for pair in range(args.pairs):
        bench.watchdog.phase("perturbation", f"pair {pair + 1}")
        if pair % 2 == 0:
            reported, bare = harness(), by_hand()
        else:
            bare, reported = by_hand(), harness()
        ratios.append(reported / bare)
    return Workload({"step": step}, facts=lambda: {"ratios": ratios, "depth": depth})


def derive_perturbation(case: Case, facts: list[dict[str, Any]]) -> None:
    """Of the first rank, where the harness gathers what it reports."""
    ratios = facts[0]["ratios"]
    case.metrics |= {"ratio": float(np.median(ratios)), "ratio_ci95": median_interval(ratios)}
    case.metrics |= percentiles(case.samples_s["step"][0], "step_time") | facts[0]


def build_resolution(args: argparse.Namespace, bench: Benchmark, group: Group) -> Workload:
    step, depth = training_step(bench.job.device, args.step_ms / 1e3)
    return Workload({"a": step, "b": step}, facts=lambda: depth)


def derive_resolution(case: Case, depths: list[int]) -> None:
    a, b = (np.max(case.samples_s[name], axis=0) for name in "ab")
    p50 = float(np.median(a))
    shift, interval = difference(a, b, case.rounds)
    case.metrics |= {"step_time_p50_s": p50, "depth": depths[0], "difference_rel": shift / p50}
    if interval:
        case.metrics["resolution_rel"] = (interval[1] - interval[0]) / 2 / p50


def describe(case: Case) -> str:
    """What a case says, as a cell."""
    m = case.metrics
    if case.key["mode"] == "barrier":
        text = f"{m['spread_p50_s'] * 1e6:.1f} us apart, 95 % under {m['spread_p95_s'] * 1e6:.1f}"
        return f"ranks of a host leave a barrier {text} us"
    if case.key["mode"] == "perturbation":
        low, high = m["ratio_ci95"] or (math.nan, math.nan)
        step = f"a step of {m['step_time_p50_s'] * 1e3:.2f} ms"
        return f"reported / bare loop = {m['ratio']:.4f} (95 % {low:.4f} to {high:.4f}), {step}"
    seen = m.get("resolution_rel")
    found = f"+-{seen:.2%} of a step" if seen else "too few rounds to say"
    return f"{found} of {m['step_time_p50_s'] * 1e3:.2f} ms, after {sum(case.rounds)} steps"


def main() -> int:
    args = parse_args()
    with Benchmark("calibrate", args) as bench:
        columns: Columns = {"": lambda case: case.key["name"], "found": describe}
        bench.begin_table("What can be told apart", columns, ["resolution, 10 s", ""])
        fixed = {"device": bench.job.device.type, "step_ms": args.step_ms}
        rule = bench.rule
        for mode in args.modes:
            for seconds in args.seconds if mode == "resolution" else [None]:
                name = f"{mode}, {seconds:g} s" if seconds else mode
                key = {"mode": mode, "name": name, "seconds": seconds} | fixed
                build: Build = partial(build_resolution, args, bench)
                derive: Derive = derive_resolution
                bench.rule = replace(rule, iters=None, target_ci=1e-9, max_seconds=seconds or 1)
                if mode == "barrier":
                    build, derive, bench.rule = (
                        build_barrier,
                        derive_barrier,
                        replace(rule, iters=240),
                    )
                elif mode == "perturbation":
                    build, derive = partial(build_perturbation, args, bench), derive_perturbation
                bench.measure(key, build, derive)
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
