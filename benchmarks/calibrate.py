#!/usr/bin/env python3
"""What can this machine, and this harness, tell apart? Run it before you trust a number.

    barrier       how far apart the ranks of a host leave a barrier. Each block starts this unevenly
    perturbation  a step of about 1 ms as the harness reports it / the same step in a bare loop, in
                  blocks that alternate in one process. 1 is a harness that costs nothing
    resolution    a step is timed against itself for --seconds: half the 95 % interval of the
                  difference / the step. One run cannot show a smaller difference

    python benchmarks/calibrate.py
    torchrun --nproc-per-node 8 benchmarks/calibrate.py --json calibration.jsonl
    torchrun --nproc-per-node 2 benchmarks/calibrate.py --modes resolution --seconds 1,10,60

tests/simulate_compare.py says how often comparisons of whole runs err. BSD-3-Clause.
"""

import argparse
import gc
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
from common.answers import Estimate, estimate_of, series
from common.groups import Group
from common.old import Benchmark, Key, Workload
from common.report import Case
from common.stats import Times, median_interval, percentiles
from common.table import Columns
from common.timing import ROUNDS, Step, StopRule, time_block, time_steps

PAIRS = 60  # by default; a key without this field has it, as in older reports


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    modes = cli.list_of(str, tuple(MODES))
    add("--modes", type=modes, default=list(MODES), metavar="M", help=f"{', '.join(MODES)} (all)")
    seconds = cli.list_of(cli.positive_float)
    text = "time for each `resolution` (default: 1,2,5,10)"
    add("--seconds", type=seconds, default=[1.0, 2.0, 5.0, 10.0], metavar="S", help=text)
    text = "the step takes at least this (default: 1)"
    add("--step-ms", type=cli.positive_float, default=1.0, metavar="MS", help=text)
    text = f"of harness and bare loop, for `perturbation` (default: {PAIRS})"
    add("--pairs", type=cli.positive_int, default=PAIRS, metavar="N", help=text)
    cli.add_common_flags(parser)
    return parser.parse_args(argv)


def step_of(ms: float, device: torch.device) -> Step:
    """A training step (forward, backward, SGD) with enough layers to take at least `ms`."""
    model = nn.Sequential()
    inputs = torch.randn(32, 128, device=device)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    while True:
        for _ in range(1 + len(model) // 4):
            model.append(nn.Linear(128, 128, device=device))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        time_block(step, 5, device)
        times_s, _ = time_block(step, 20, device)
        if np.median(times_s) >= ms / 1e3:
            return step


def build_barrier(bench: Benchmark, key: Key, group: Group) -> Workload:
    def leave() -> float:
        dist.barrier(group.control)
        return perf_counter()  # CLOCK_MONOTONIC: one clock for all processes of a host

    return Workload(leave, facts=socket.gethostname, returned=list)


def derive_barrier(case: Case, times: Times, hosts: list[str]) -> None:
    """The worst host counts. hosts: of each rank. times.returned: when it left, [ranks, n]."""
    stamps_by_host: dict[str, list[Any]] = {host: [] for host in hosts}
    for host, stamps in zip(hosts, times.returned, strict=True):
        stamps_by_host[host].append(stamps)
    spreads = [np.ptp(stamps, axis=0) for stamps in stamps_by_host.values()]
    worst = max(spreads, key=np.median)
    case.metrics |= percentiles(worst, "spread")


def build_perturbation(bench: Benchmark, key: Key, group: Group) -> Workload:
    """The pairs are timed here. The case's own loop times the step once more."""
    device, step_ms = bench.job.device, key["step_ms"]
    step = step_of(step_ms, device)
    # harness and bare loop each time a block, as long as those of a case with three steps and a
    # budget of 5 seconds
    block_s = 5 / ROUNDS / 3
    iters = max(10, int(block_s / (step_ms / 1e3)))
    rule = StopRule(warmup_iters=1, min_iters=1, max_seconds=block_s, rounds=1)

    def harness() -> float:
        """Seconds of an iteration, as a case would report it."""
        timing = time_steps(Workload(step), group, device, rule)
        return float(np.mean(timing.samples_s["step"]))

    def bare_loop() -> float:
        """Seconds of an iteration, as anybody would time it by hand."""
        # time_steps collects before its first block, and the caches are cold then. A case does so
        # once, the harness here in each pair: so the bare loop starts like that too.
        gc.collect()
        dist.barrier(group.control)  # all ranks load the machine at the same time, as in harness()
        start = perf_counter()
        for _ in range(iters):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (perf_counter() - start) / iters

    ratios = []
    for pair in range(key.get("pairs", PAIRS)):
        bench.watchdog.phase(f"pair {pair + 1}")
        if pair % 2 == 0:
            reported_s = harness()
            bare_s = bare_loop()
        else:
            bare_s = bare_loop()
            reported_s = harness()
        ratios.append(reported_s / bare_s)
    return Workload(step, facts=lambda: ratios)


def derive_perturbation(case: Case, times: Times, facts: list[list[float]]) -> None:
    """The first rank counts. facts: the ratios of each rank."""
    ratios = facts[0]
    case.metrics["ratio"] = float(np.median(ratios))
    case.metrics["ratio_ci95"] = median_interval(ratios)
    case.metrics["ratios"] = ratios
    case.metrics |= percentiles(times.each()[0], "step_time")


def build_resolution(bench: Benchmark, key: Key, group: Group) -> Workload:
    step = step_of(key["step_ms"], bench.job.device)
    return Workload(step, {"the same": step})


def derive_resolution(case: Case, times: Times, facts: list[None]) -> None:
    p50 = times.p50()
    difference, interval = times.exposed("the same")
    case.metrics["step_time_p50_s"] = p50
    case.metrics["difference_rel"] = difference / p50
    if interval:
        low, high = interval
        case.metrics["resolution_rel"] = (high - low) / 2 / p50


MODES: dict[str, tuple[Any, Any]] = {  # build and derive
    "barrier": (build_barrier, derive_barrier),
    "perturbation": (build_perturbation, derive_perturbation),
    "resolution": (build_resolution, derive_resolution),
}


def finding(case: Case) -> str:
    """What a case has found, as a cell."""
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
    resolution = "too few rounds to say"
    if "resolution_rel" in m:
        resolution = f"+-{m['resolution_rel']:.2%}"
    return f"{resolution} of {step}, after {sum(case.rounds)} steps"


def answer(cases: list[Case]) -> list[str]:
    """Which differences a run can show, and whether the harness costs anything."""
    sentences: list[str] = []
    for name, same in series(cases, ("mode", "name", "seconds", "pairs")).items():
        resolved = [case for case in same if "resolution_rel" in case.metrics]
        if resolved:
            longest = max(resolved, key=lambda case: case.key["seconds"])
            best = min(resolved, key=lambda case: case.metrics["resolution_rel"])
            sentence = f"{name}after {seconds_and_difference(longest)} cannot be told apart"
            if best is not longest:
                sentence += f"; best was, after {seconds_and_difference(best)}"
            sentences.append(sentence)
        elif any(case.key["mode"] == "resolution" for case in same):
            sentences.append(f"{name}too few rounds to say what can be told apart")
        for case in same:
            if ratio := estimate_of(case, "ratio", "ratio_ci95"):
                sentences.append(name + cost_of_harness(ratio))
    return sentences


def cost_of_harness(ratio: Estimate) -> str:
    """ratio: a step as the harness reports it / the same step in a bare loop."""
    cost = "changes what it measures"
    if ratio.may_be(1):
        cost = "may cost nothing"
    elif ratio.interval is None:
        cost = "cannot be judged"
    return f"the harness {cost}: it reports {ratio.text('times', digits=3)} a bare loop's time"


def seconds_and_difference(case: Case) -> str:
    return f"{case.key['seconds']:g} s, differences under {case.metrics['resolution_rel']:.1%}"


def plan(args: argparse.Namespace) -> list[Key]:
    """The key of each case. seconds: only `resolution` is measured for several times."""
    keys = []
    for mode in args.modes:
        for seconds in args.seconds if mode == "resolution" else [None]:
            name = f"{mode}, {seconds:g} s" if seconds else mode
            key = {"mode": mode, "name": name, "seconds": seconds, "step_ms": args.step_ms}
            if mode == "perturbation" and args.pairs != PAIRS:
                key["pairs"] = args.pairs
            keys.append(key)
    return keys


def rule_of(key: Key, rule: StopRule) -> StopRule:
    """When a case ends: a barrier after 240 iterations, the others after their time."""
    return replace(
        rule,
        iters=240 if key["mode"] == "barrier" else None,
        max_seconds=key["seconds"] or 1,
        target_ci=1e-9,  # no step reaches it
        patience=1,
    )


def main() -> int:
    args = parse_args()
    torch.optim.SGD([torch.zeros(1)])  # the first optimizer imports torch._dynamo: for seconds
    with Benchmark("calibrate", args, answer=answer) as bench:
        columns: Columns = {"": lambda case: case.key["name"], "found": finding}
        title = f"What can be told apart, by a step of at least {args.step_ms:g} ms"
        rule, keys = bench.rule, plan(args)
        bench.announce(keys, lambda key: rule_of(key, rule).longest_s if key["seconds"] else None)
        bench.begin_table(title, columns, ["resolution, 10 s", ""])
        for key in keys:
            build, derive = MODES[key["mode"]]
            bench.rule = rule_of(key, rule)
            bench.measure(key, partial(build, bench), derive)
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
