#!/usr/bin/env python3
"""What can this machine, and this harness, tell apart? Run it before you trust a number.

    clock         the smallest step of the clock, and what reading it costs
    barrier       how far apart the ranks of a host leave a barrier: every block starts so uneven
    perturbation  a step of about 1 ms as the harness reports it / the same in a bare loop; blocks
                  alternate in one process. 1 is a harness that costs nothing
    resolution    a step against itself: half the 95 % interval of the difference, over the step,
                  after so many seconds. A smaller difference cannot be seen in one run
    all_reduce    what collectives.py prints for all_reduce / the same calls in a bare loop; blocks
                  alternate in one process
    metadata      gathering the samples of a case on rank 0 and writing the report

`--ab` asks the same of ab.py and compare.py: how often do they err? It starts real runs of
ddp_sweep.py, of kinds that take turns: `a`, `b`, which is no different, and slower ones whose step
ends in a busy-wait. Each of --campaigns compares --runs runs of `a` with as many of every other
kind, as ab.py does. Printed is how often a case was called slower or faster; the same command goes
on where an interrupted one was. `--slow-sweep` is such a slower ddp_sweep.py by itself.

    python benchmarks/calibrate.py
    torchrun --nproc-per-node 8 benchmarks/calibrate.py --json calibration.json
    torchrun --nproc-per-node 32 benchmarks/calibrate.py --modes metadata --device cpu
    python benchmarks/calibrate.py --ab --campaigns 40 --slowed-campaigns 10 --out rates
    python benchmarks/calibrate.py --ab --runs 4 --out rates -- --model resnet18 --max-seconds 1
    torchrun --nproc-per-node 2 benchmarks/calibrate.py --slow-sweep 5% -- --json slow.json

Written for this project. BSD-3-Clause.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import bandwidth, cli

MODES = ("clock", "barrier", "perturbation", "resolution", "all_reduce", "metadata")
SIZES = [8, 2**16, 2**20, 2**24]  # bytes, of `all_reduce`
SWEEP = ["--device", "cpu", "--model", "mobilenet_v3_small", "--no-breakdown", "--iters", "24"]
SWEEP += ["--bind-cores"]
CALLS = 20  # a block of `all_reduce`, as collectives.py has by default


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = cli.Parser(description=__doc__)
    add = parser.add_argument
    add("--modes", type=cli.list_of(str, MODES), default=list(MODES), help="a list (default: all)")
    add(
        "--seconds",
        type=cli.list_of(cli.positive_float),
        default=[1.0, 2.0, 5.0, 10.0],
        metavar="S",
        help="time for `resolution`; a list (default: 1,2,5,10)",
    )
    add(
        "--step-ms",
        type=cli.positive_float,
        default=1.0,
        metavar="MS",
        help="the step of `perturbation` and `resolution` takes at least this (default: 1)",
    )
    add(
        "--rounds",
        type=cli.positive_int,
        default=12,
        metavar="N",
        help="pairs of `perturbation` and `all_reduce`, repeats of `metadata` (default: 12)",
    )
    add(
        "--sizes",
        type=cli.list_of(cli.as_type(bandwidth.parse_size)),
        default=SIZES,
        metavar="SIZE",
        help="of `all_reduce`; a list (default: 8,64K,1M,16M)",
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: auto)")
    cli.add_report_flags(parser)
    add_ab_flags(parser)
    parser.set_defaults(timeout=None)
    args = parser.parse_args(argv)
    check_ab_flags(parser, args)
    if not args.ab:  # there it is the limit of a whole run, and none by default
        args.timeout = args.timeout or cli.TIMEOUT_S
    if args.seconds != [1.0, 2.0, 5.0, 10.0] and "resolution" not in args.modes:
        cli.refuse("--seconds has no effect without --modes resolution")
    if args.step_ms != 1.0 and not {"perturbation", "resolution"} & set(args.modes):
        cli.refuse("--step-ms has no effect without --modes perturbation or resolution")
    if args.sizes != SIZES and "all_reduce" not in args.modes:
        cli.refuse("--sizes has no effect without --modes all_reduce")
    if min(args.sizes) < 4:
        cli.refuse("--sizes must be at least 4 bytes, one float32; e.g. --sizes 8,64K")
    if args.rounds != 12 and not {"perturbation", "all_reduce", "metadata"} & set(args.modes):
        cli.refuse("--rounds has no effect without --modes perturbation, all_reduce or metadata")
    return args


def add_ab_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("comparisons of runs").add_argument
    about_ab = (
        "how often do comparisons of real runs err? (--timeout: of a whole run; default: none)"
    )
    add("--ab", action="store_true", help=about_ab)
    add("--out", metavar="DIR", help="keep the runs here, with --ab")
    add("--campaigns", type=cli.positive_int, metavar="N", help="(default: 40)")
    add("--runs", type=cli.positive_int, metavar="N", help="of a kind, a campaign (default: 6)")
    add(
        "--slowdowns",
        type=slowdowns,
        metavar="P",
        help="slower kinds, by how much; a list, or none (default: 5%%,3%%)",
    )
    add(
        "--slowed-campaigns",
        type=cli.positive_int,
        metavar="N",
        help="only so many have the slower kinds, evenly spread (default: all)",
    )
    add("--interleave", action="store_true", help="as of ab.py: the kinds take turns, by blocks")
    add("--ranks", type=cli.positive_int, metavar="N", help="of a run (default: 2)")
    add("--margin", type=cli.percentage, metavar="P", help="as of ab.py (default: 2%%)")
    add("--slow-sweep", type=cli.percentage, metavar="P", help="ddp_sweep.py, slower by P")
    parser.add_argument(
        "sweep",
        nargs="*",
        metavar="-- FLAGS",
        help=f"of ddp_sweep.py, with --ab (default: {' '.join(SWEEP)}) or --slow-sweep",
    )


def slowdowns(text: str) -> list[float]:
    """argparse type: `5%,3%`, or none."""
    values: list[float] = [] if text == "none" else cli.list_of(cli.percentage)(text)
    return values


def check_ab_flags(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Fill in the defaults of --ab; refuse what has no effect beside, or without it."""
    only_ab = ("out", "campaigns", "runs", "slowdowns", "slowed_campaigns", "interleave", "ranks")
    only_ab += ("margin",)
    others = ("modes", "seconds", "step_ms", "rounds", "sizes", "device", "resume")
    given = [
        name
        for name in (*others, *only_ab, "json", "timeout")
        if getattr(args, name) != parser.get_default(name)
    ]

    def refuse_given(names: tuple[str, ...], why: str) -> None:
        for name in [name for name in given if name in names]:
            cli.refuse(f"--{name.replace('_', '-')} has no effect {why}")

    if args.slow_sweep is not None:
        if args.ab:
            cli.refuse("--slow-sweep has no effect with --ab, which has --slowdowns")
        refuse_given(tuple(given), "with --slow-sweep; flags of ddp_sweep.py follow after --")
        return
    if not args.ab:
        refuse_given(only_ab, "without --ab")
        if args.sweep:
            cli.refuse(f"'{args.sweep[0]}' has no effect without --ab or --slow-sweep")
        return
    refuse_given(others, "with --ab")
    if args.out is None:
        cli.refuse("--ab needs a folder to keep its runs in; add --out DIR")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        cli.refuse("--ab starts torchrun itself; start it with python, not with torchrun")
    args.campaigns = args.campaigns or 40
    args.runs = args.runs or 6
    args.ranks = args.ranks or 2
    args.margin = args.margin or 0.02
    args.slowdowns = [0.05, 0.03] if args.slowdowns is None else args.slowdowns
    if args.slowed_campaigns and not args.slowdowns:
        cli.refuse("--slowed-campaigns has no effect with --slowdowns none")
    args.slowed_campaigns = args.slowed_campaigns or args.campaigns
    if args.slowed_campaigns > args.campaigns:
        cli.refuse(f"--slowed-campaigns is more than the {args.campaigns} of --campaigns")
    if args.runs < 2:
        cli.refuse("--runs must be at least 2: one run a kind cannot show how much runs differ")
    if any(word.split("=")[0] == "--json" for word in args.sweep):
        cli.refuse("--json has no effect after --: every run gets a report of its own")
    args.sweep = args.sweep or SWEEP


if __name__ == "__main__":
    ARGS = parse_args()  # before the imports below, so that --help need not wait for them
    if ARGS.ab:
        from common.commands import signals_blocked

        with signals_blocked():
            from common import error_rates

        sys.exit(error_rates.main(ARGS))

import functools
import tempfile
from collections.abc import Callable, Iterator
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record

from common import blocks
from common.breakdown import bounds
from common.collective_ops import Room, Setting, prepare
from common.dist import CaseGroup, choose_device, gather_json, gather_rows
from common.memory import cache_bytes
from common.results import Report
from common.stats import difference, median_interval
from common.sweep import Outcome, Sweep, check_report_flags
from common.timing import ROUNDS, StopRule, measure, time_block

Step = Callable[[], None]


def create_step(device: torch.device, seconds: float) -> tuple[Step, int]:
    """A training step (forward, backward, SGD) deep enough to take `seconds`; and its depth."""
    depth = 2
    while True:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(depth)]).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        inputs = torch.randn(32, 128, device=device)

        def step(
            model: nn.Module = model, optimizer: Any = optimizer, inputs: torch.Tensor = inputs
        ) -> None:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()

        time_block(step, 5, device)
        if np.median(time_block(step, 20, device)) >= seconds:
            return step, depth
        depth += max(1, depth // 4)


def bare_loop(step: Step, iters: int, device: torch.device) -> float:
    """Seconds per iteration, as anybody would time it by hand."""
    start = perf_counter()
    for _ in range(iters):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (perf_counter() - start) / iters


# -- the modes: each runs on every rank and brings back facts -------------------------------------


def run_clock(args: argparse.Namespace, device: torch.device, group: CaseGroup) -> Outcome:
    stamps = [perf_counter() for _ in range(100_000)]
    steps = [b - a for a, b in pairwise(stamps)]
    facts = {
        "smallest_step_s": min(step for step in steps if step > 0),
        "read_cost_s": float(np.median(steps)),
    }
    if device.type == "cuda":
        empty = time_block(lambda: None, 1000, device)
        facts["event_pair_s"] = float(np.median(empty))
    return Outcome(facts)


def run_barrier(args: argparse.Namespace, device: torch.device, group: CaseGroup) -> Outcome:
    """perf_counter is CLOCK_MONOTONIC on Linux: one clock for all the processes of a host."""
    stamps = []
    for _ in range(200):
        dist.barrier(group.control)
        stamps.append(perf_counter())
    return Outcome({"left_at_s": stamps})


def run_perturbation(args: argparse.Namespace, device: torch.device, group: CaseGroup) -> Outcome:
    step, depth = create_step(device, args.step_ms / 1e3)
    # blocks as long as those of a case of three steps and 5 seconds
    iters = ROUNDS * max(10, int(5 / ROUNDS / 3 / (args.step_ms / 1e3)))
    rule = StopRule(warmup_iters=1, iters=iters, min_iters=1, target_ci=1.0, max_seconds=1.0)

    def harness() -> float:
        measurement = measure({"step": step}, group, device, rule, args.progress)
        return float(np.mean(measurement.own["step"]))

    def bare() -> float:
        dist.barrier(group.control)  # all ranks load the machine at the same time, as there
        return bare_loop(step, iters, device)

    ratios = []
    for i in range(args.rounds):
        if i % 2 == 0:
            reported, by_hand = harness(), bare()
        else:
            by_hand, reported = bare(), harness()
        ratios.append(reported / by_hand)
    return Outcome({"ratios": ratios, "step_s": bare(), "depth": depth})


def run_resolution(
    seconds: float, args: argparse.Namespace, device: torch.device, group: CaseGroup
) -> Outcome:
    step, depth = create_step(device, args.step_ms / 1e3)
    # a target that is never reached: the time decides
    rule = StopRule(warmup_iters=5, iters=None, min_iters=20, target_ci=1e-9, max_seconds=seconds)
    return Outcome(
        {"depth": depth}, measure({"a": step, "b": step}, group, device, rule, args.progress)
    )


def run_all_reduce(
    size: int, args: argparse.Namespace, device: torch.device, group: CaseGroup
) -> Outcome:
    """Blocks as collectives.py has them, and of a loop as anybody writes it."""
    ranks = len(group.ranks)
    setting = Setting(group.test, dist.get_rank(group.test), ranks, device, torch.float32, "sum")
    room = Room(2 * cache_bytes(device), 10 * CALLS)
    # both go round the same buffers, since where memory lies makes a difference of several percent;
    # half a round apart, so that neither finds in the cache what the other has just used
    calls = prepare("all_reduce", size // 4, True, setting, room).calls
    others = [*calls[len(calls) // 2 :], *calls[: len(calls) // 2]]

    def by_hand(calls: Iterator[Any], n: int) -> Step:
        def run() -> None:
            for _ in range(n):
                dist.all_reduce(next(calls).args[0], group=group.test)

        return run

    timed = {"printed": blocks.Timed(blocks.plain, calls), "bare": blocks.Timed(by_hand, others)}
    rule = blocks.BlockRule(5, CALLS, args.rounds, 1e9, args.timeout / 4)
    times, _ = blocks.time_blocks(timed, group.together, device, rule, args.progress)
    return Outcome({name: [float(np.mean(b)) for b in found] for name, found in times.items()})


def run_metadata(args: argparse.Namespace, device: torch.device, group: CaseGroup) -> Outcome:
    """What a case costs beside its timed blocks, in the size of a typical ddp_sweep case."""
    samples = torch.full((3, 100), 0.123456789, dtype=torch.float64)
    key = {"mode": "metadata"}
    times = []
    with tempfile.TemporaryDirectory() as folder:
        report = Report(f"{folder}/report.json", "calibrate", {}, lambda cases: {})
        for _ in range(args.rounds):
            dist.barrier(group.control)
            start = perf_counter()
            rows = gather_rows(samples, group.control)
            gather_json({"error": None, "parameters": "0" * 32, "memory_gib": 1.0})
            if rows is not None:
                step, *others = rows.transpose(0, 1).tolist()
                report.add(
                    {
                        "key": key,
                        "ranks": list(group.ranks),
                        "samples_s": step,
                        "other_samples_s": others,
                        "stop": {},
                        "metrics": {},
                        "check": "passed",
                    }
                )
            times.append(perf_counter() - start)
    return Outcome({"seconds": times})


# -- what rank 0 makes of it ----------------------------------------------------------------------


def derive(
    mode: str, hosts: list[str], measured: Any, facts: list[dict[str, Any]]
) -> tuple[dict[str, Any], str]:
    """The metrics of a mode: the worst rank counts."""
    if mode == "clock":
        return {name: max(fact[name] for fact in facts) for name in facts[0]}, "passed"
    if mode == "barrier":
        spreads = [
            np.ptp([f["left_at_s"] for f, h in zip(facts, hosts, strict=True) if h == host], axis=0)
            for host in dict.fromkeys(hosts)
        ]
        skew = np.max(spreads, axis=0)
        return {f"skew_p{q}_s": float(np.percentile(skew, q)) for q in (50, 95)}, "passed"
    if mode == "perturbation":
        worst = max(facts, key=lambda fact: abs(np.median(fact["ratios"]) - 1))
        metrics = {
            "ratio": float(np.median(worst["ratios"])),
            "ratio_ci95": bounds(median_interval(worst["ratios"])),
            "step_s": worst["step_s"],
        }
        return metrics, "passed"
    if mode == "resolution":
        a, b = (measured.samples[name].max(axis=0) for name in ("a", "b"))
        gap, interval = difference(a, b, measured.rounds)
        step = float(np.median(a))
        metrics = {
            "step_s": step,
            "difference": gap / step,
            "resolution": interval.half_width / step if interval else None,
        }
        return metrics, "passed"
    if mode == "all_reduce":
        # the slowest rank counts, as in the table
        printed, bare = (np.max([fact[name] for fact in facts], axis=0) for name in facts[0])
        ratios = printed / bare
        metrics = {
            "ratio": float(np.median(ratios)),
            "ratio_ci95": bounds(median_interval(ratios)),
            "step_s": float(np.median(bare)),
        }
        return metrics, "passed"
    assert mode == "metadata"
    seconds = facts[0]["seconds"]
    return {f"seconds_p{q}_s": float(np.percentile(seconds, q)) for q in (50, 95)}, "passed"


def describe(case: dict[str, Any]) -> str:
    """A case's result in words."""
    if case["check"].startswith("failed"):
        return str(case["check"])
    m = case["metrics"]
    mode = case["key"]["mode"]
    if mode == "clock":
        event = m.get("event_pair_s")
        return (
            f"perf_counter steps by {m['smallest_step_s'] * 1e9:.0f} ns and costs "
            f"{m['read_cost_s'] * 1e9:.0f} ns"
            + (f"; an empty pair of CUDA events reads {event * 1e6:.2f} us" if event else "")
        )
    if mode == "barrier":
        return (
            f"ranks of a host leave within {m['skew_p50_s'] * 1e6:.0f} us "
            f"(p50), {m['skew_p95_s'] * 1e6:.0f} us (p95)"
        )
    if mode in ("perturbation", "all_reduce"):
        ci = m["ratio_ci95"]
        interval = f", 95 % interval {ci[0]:.4f} to {ci[1]:.4f}" if ci else ""
        what = "a step" if mode == "perturbation" else "a call"
        return (
            f"reported / bare loop = {m['ratio']:.4f}{interval}, "
            f"at {what} of {m['step_s'] * 1e3:.{2 if m['step_s'] > 1e-3 else 3}f} ms"
        )
    if mode == "resolution":
        if m["resolution"] is None:
            return "too few rounds for an interval"
        return (
            f"differences from {m['resolution'] * 100:.2f} % on, at a step of "
            f"{m['step_s'] * 1e3:.2f} ms (a step against itself: {m['difference'] * 100:+.2f} %)"
        )
    return f"gather and report: {m['seconds_p50_s'] * 1e3:.1f} ms (p50), " + (
        f"{m['seconds_p95_s'] * 1e3:.1f} ms (p95), {len(case['ranks'])} ranks"
    )


def main(args: argparse.Namespace) -> int:
    try:
        # gloo: nothing here is about the backend
        device, backend = choose_device(args.device, "gloo")
    except ValueError as error:
        cli.refuse(str(error))
    check_report_flags(args, "calibrate")
    runs: dict[str, Callable[[argparse.Namespace, torch.device, CaseGroup], Outcome]] = {
        "clock": run_clock,
        "barrier": run_barrier,
        "perturbation": run_perturbation,
        "metadata": run_metadata,
    }
    plan = []
    for mode in args.modes:
        if mode == "resolution":
            plan += [
                (
                    {"mode": mode, "seconds": s, "step_ms": args.step_ms},
                    f"{mode}, {s:g} s",
                    functools.partial(run_resolution, s),
                )
                for s in args.seconds
            ]
        elif mode == "all_reduce":
            plan += [
                (
                    {"mode": mode, "size_bytes": size, "rounds": args.rounds},
                    f"{mode}, {bandwidth.show_size(size)}",
                    functools.partial(run_all_reduce, size),
                )
                for size in args.sizes
            ]
        else:
            key = {"mode": mode, "step_ms": args.step_ms, "rounds": args.rounds}
            plan.append((key, mode, runs[mode]))
    with Sweep("calibrate", args, device, backend) as sweep:
        args.progress = sweep.next_block
        known = sweep.plan([key for key, _, _ in plan])
        everyone = tuple(range(sweep.ctx.world_size))
        hosts = sweep.share([sweep.host_of(rank) for rank in everyone] if sweep.report else None)
        sweep.say("")
        for (key, label, run), done in zip(plan, known, strict=True):
            if done:
                case = sweep.find(key)
            else:
                work = functools.partial(run, args, device)
                case = sweep.case(
                    key, label, everyone, work, functools.partial(derive, key["mode"], hosts)
                )
            if case is not None:
                sweep.say(f"{label:<17} {describe(case)}")
    return sweep.status


def run_slow_sweep(args: argparse.Namespace) -> int:
    """ddp_sweep.py with a busy-wait in its step."""
    import ddp_sweep  # this script's neighbour

    from common.busy_wait import slow_down

    flags = ddp_sweep.parse_args(args.sweep)
    if ddp_sweep.check_args(flags)[0].type != "cpu":
        cli.refuse("--slow-sweep slows the CPU only; add -- --device cpu")
    slow_down(ddp_sweep, args.slow_sweep)
    status: int = ddp_sweep.main(ddp_sweep.parse_args(args.sweep))
    return status


if __name__ == "__main__":
    sys.exit(record(main if ARGS.slow_sweep is None else run_slow_sweep)(ARGS))
