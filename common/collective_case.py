"""One case of collectives.py: an operation at one size, timed and checked."""

import argparse
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from common import bandwidth, blocks
from common.collective_ops import DTYPES, Prepared, Room, Setting, prepare
from common.dist import CaseGroup
from common.memory import cache_bytes
from common.patterns import average_overflows
from common.skew import Offset, arrivals, clock_offsets, split
from common.stats import relative_ci95
from common.sweep import Outcome, Sweep
from common.timing import Measurement

MAX_BLOCKS = 12  # a size; at least one
# what a backend says that lacks an operation, a dtype or a reduction
LACKING = re.compile(
    r"unsupported|n[o']t (yet )?support|not implemented|can't be cast|cannot use"
    r"|invalid (scalar|data|input tensor data) ?type",
    re.IGNORECASE,
)
COALESCED_ON_GLOO = ("all_reduce", "all_gather", "reduce_scatter")
ACROSS: dict[str, Callable[..., Any]] = {
    "max": np.max,
    "min": np.min,
    "avg": np.mean,
    "rank0": lambda times, axis: times[0],
}


@dataclass(frozen=True)
class Scan:
    """One row set: an operation on one dtype, over all sizes."""

    collective: str
    dtype: str  # `object` for Python objects, `none` for a barrier
    redop: str  # `none` where nothing is reduced
    root: int  # within the group; -1 where there is none

    def __str__(self) -> str:
        return f"{self.collective} {self.dtype} {self.redop}"

    @property
    def element_bytes(self) -> int:
        return DTYPES[self.dtype].itemsize if self.dtype in DTYPES else 1

    @property
    def variants(self) -> tuple[str, ...]:
        """Names of metrics; first the one whose samples come first in the report."""
        if self.collective in ("all_reduce", "broadcast", "reduce"):
            return ("in_place", "out_of_place")  # torch's own is the first
        both = ("all_gather", "reduce_scatter", "gather", "scatter")
        return ("out_of_place", "in_place") if self.collective in both else ("out_of_place",)


def scans(args: argparse.Namespace) -> list[Scan]:
    found = []
    for name in args.collective:
        rooted = name.removesuffix("_object") in bandwidth.ROOTED
        tensors = name != "barrier" and name not in bandwidth.OBJECTS
        types = args.datatype if tensors else ["none" if name == "barrier" else "object"]
        redops = args.op if name in bandwidth.REDUCING else ["none"]
        for dtype, redop in itertools.product(types, redops):
            found.append(Scan(name, dtype, redop, args.root if rooted else -1))
    return found


def lacking(scan: Scan, args: argparse.Namespace, ranks: int, backend: str) -> str | None:
    """Why it is known, without a try, that this cannot be measured; None where it can."""
    name = scan.collective
    if name == "sendrecv" and ranks == 1 and backend == "gloo":
        return "a ring needs 2 ranks, gloo does not send to itself"
    if scan.redop == "avg" and scan.dtype in DTYPES:
        if backend == "gloo" and not DTYPES[scan.dtype].is_floating_point:
            return "gloo averages floating-point numbers only"
        if average_overflows(ranks, DTYPES[scan.dtype]):
            return f"the sum behind an average of {scan.dtype} over {ranks} ranks would overflow"
    if name in bandwidth.OBJECTS and (args.in_flight or args.coalesce or args.cudagraph):
        return "object collectives are neither asynchronous nor coalesced nor captured"
    if name == "barrier" and (args.coalesce or args.cudagraph):
        return "a barrier is neither coalesced nor captured"
    if args.coalesce and backend == "gloo" and name not in COALESCED_ON_GLOO:
        return f"on gloo torch coalesces {', '.join(COALESCED_ON_GLOO)} only"
    return None


# -- one size --------------------------------------------------------------------------------------


def run_case(
    scan: Scan,
    size: int,
    args: argparse.Namespace,
    sweep: Sweep,
    group: CaseGroup,
) -> Outcome:
    """Time and check one size on this rank.

    args.memory: each variant's buffers, which live from case to case, because to map memory anew
    costs more than the measurement.
    """
    device = sweep.ctx.device
    rank, ranks = dist.get_rank(group.test), len(group.ranks)
    _, count = sized(scan, size, ranks)
    name = scan.collective
    unique = f"{sweep.ctx.attempt}/{scan}/{group.ranks}"
    setting = Setting(
        group.test,
        rank,
        ranks,
        device,
        DTYPES.get(scan.dtype, torch.uint8),
        None if scan.redop == "none" else scan.redop,
        max(0, scan.root),
        async_op=bool(args.in_flight),
        store=PrefixStore(f"barrier/{unique}", sweep.ctx.store),
    )
    width = args.in_flight or args.coalesce or 1
    wanted = args.warmup_iters + MAX_BLOCKS * (args.iters + 2 * width)
    cold = 0 if args.cache_warm else 2 * cache_bytes(device)
    runner = {
        bool(args.in_flight): blocks.in_flight(width),
        bool(args.coalesce): blocks.coalesced(width, group.test, device),
        bool(args.cudagraph): blocks.cuda_graph,
        args.blocking == "1": blocks.waiting(device),
    }.get(True, blocks.plain)
    prepared = {
        variant: prepare(
            name,
            count,
            variant == "in_place",
            setting,
            Room(cold, wanted, width, args.memory[variant]),
        )
        for variant in scan.variants
    }
    if args.cudagraph:
        prepared[scan.variants[0]].calls[0]()  # connects, which a capture must not
    rule = blocks.BlockRule(
        args.warmup_iters,
        args.iters,
        MAX_BLOCKS,
        args.max_seconds,
        args.timeout / 4,
        each=args.per_iteration,
        whole=runner is not blocks.plain,
        replays=max(1, args.cudagraph),
    )
    timed = {v: blocks.Timed(runner, p.calls, width) for v, p in prepared.items()}
    times, stop = blocks.time_blocks(timed, group.together, device, rule, sweep.next_block)
    facts: dict[str, Any] = {"times": times, "stop": stop, "skew": {}, "wrong": {}}
    if args.skew:
        sweep.watch.phase("clock offsets")
        facts["offsets"] = [(o.seconds, o.error) for o in clock_offsets(group.control)]
    for variant, p in prepared.items():
        if args.skew:
            sweep.watch.phase(f"{variant}, skew")
            once = runner(itertools.cycle(p.calls), 1)
            facts["skew"][variant] = arrivals(once, args.iters, group.together, device)
        if args.check:
            sweep.watch.phase(f"{variant}, data check")
            facts["wrong"][variant] = count_wrong(p, runner, width, args.check, group, device)
    return Outcome(facts)


def count_wrong(
    prepared: Prepared,
    runner: blocks.Runner,
    width: int,
    calls: int,
    group: CaseGroup,
    device: torch.device,
) -> int:
    """Make at least `calls` calls on fresh data, in the mode that was timed; the wrong values."""
    slots = min(len(prepared.calls), max(calls, width))
    run = runner(itertools.cycle(prepared.calls[:slots]), slots)
    wrong = 0
    for _ in range(-(-calls // slots)):
        for k in range(slots):
            prepared.fill(k)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        dist.barrier(group.control)
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        wrong += sum(prepared.wrong(k) for k in range(slots))
    return wrong


def sized(scan: Scan, size: int, ranks: int) -> tuple[int, int]:
    """The (size, count) measured for the size asked for."""
    if scan.collective == "barrier":
        return 0, 0
    return bandwidth.counts(scan.collective, [size], scan.element_bytes, ranks)[0]


# -- what rank 0 makes of it -----------------------------------------------------------------------


def derive(
    key: dict[str, Any], args: argparse.Namespace, ranks: tuple[int, ...], facts: list[Any]
) -> tuple[Measurement, dict[str, Any], str]:
    """A group's samples, its metrics (see docs/numbers.md), and the verdict on its data."""
    samples: dict[str, Any] = {}
    metrics: dict[str, Any] = {}
    rounds: list[int] = []
    first_ci = None
    for variant in facts[0]["times"]:
        times = np.array([fact["times"][variant] for fact in facts])  # [ranks, blocks, parts]
        samples[variant] = times.reshape(len(facts), -1)
        rounds = rounds or [times.shape[2]] * times.shape[1]
        block_s = ACROSS[args.average](times.mean(axis=2), axis=0)
        first_ci = first_ci or relative_ci95(block_s)
        seconds = float(np.median(block_s))
        alg, bus = bandwidth.bandwidths(key["collective"], len(ranks), key["size_bytes"], seconds)
        found: dict[str, Any] = {"time_s": seconds}
        if key["collective"] != "barrier":
            found |= {"algbw_gb_per_s": alg, "busbw_gb_per_s": bus}
            if args.limit:
                found["efficiency"] = bus / args.limit
        if args.per_iteration:
            calls = ACROSS[args.average](samples[variant], axis=0)
            found |= {"min_s": float(calls.min()), "max_s": float(calls.max())}
            found["cv"] = float(calls.std() / calls.mean())
            if len(calls) >= 100:
                found["p99_s"] = float(np.percentile(calls, 99))
        if args.skew:
            came, done = zip(*[fact["skew"][variant] for fact in facts], strict=True)
            offsets = [Offset(*pair) for pair in facts[0]["offsets"]]
            parts = split(came, done, offsets)
            found |= {"waiting_s": parts.waiting, "transfer_s": parts.transfer}
            found |= {"late_s": parts.late, "latest_rank": ranks[int(np.argmax(parts.late))]}
            found["clock_error_s"] = max(offset.error for offset in offsets)
        if args.check:
            found["wrong"] = sum(fact["wrong"][variant] for fact in facts)
        metrics |= {f"{variant}_{name}": value for name, value in found.items()}
    wrong = sum(metrics.get(f"{variant}_wrong", 0) for variant in samples)
    stop = {
        "rule": facts[0]["stop"],
        "iterations": len(rounds) * args.iters,
        "ci95_rel": first_ci,
    }
    check = "passed" if args.check else "skipped: -c 0"
    check = f"failed: {wrong} wrong values" if wrong else check
    return Measurement(samples, {}, rounds, {}, stop), metrics, check


def case_key(
    scan: Scan, size: int, label: str, ranks: int, args: argparse.Namespace, sweep: Sweep
) -> dict[str, Any]:
    size_bytes, count = sized(scan, size, ranks)
    modes = ("iters", "blocking", "in_flight", "coalesce", "cudagraph", "cache_warm")
    return (
        {name: getattr(scan, name) for name in ("collective", "dtype", "redop", "root")}
        | {"size_bytes": size_bytes, "count": count, "group": label, "group_ranks": ranks}
        | {name: getattr(args, name) for name in (*modes, "per_iteration", "skew")}
        | {"device": sweep.ctx.device.type, "backend": sweep.ctx.backend}
    )
