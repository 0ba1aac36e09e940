"""The timed loop of nccl-tests: blocks of n calls, and the mean of a block.

The clock is read around a block, not around each call, which at 8 bytes would be seen in the
result. Where calls are long it is read at some points within as well, at least READ_EVERY_S apart.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from common.dist import broadcast_int
from common.timing import time_block, without_garbage_collection

READ_EVERY_S = 0.005

Call = Callable[[], Any]
# From a stream of calls and a number: what makes so many of them, and has them done at its end.
Runner = Callable[[Iterator[Call], int], Call]


@dataclass(frozen=True)
class BlockRule:
    """How many blocks, and how long."""

    warmup: int
    calls: int  # a block
    max_blocks: int
    max_seconds: float  # no further block after that; at least one is timed
    max_block_s: float  # longer ones are cut, so that the watchdog sees progress
    each: bool = False  # read the clock around every call
    whole: bool = False  # never read it within a block
    replays: int = 1  # of a block that is a CUDA graph


@dataclass(frozen=True)
class Timed:
    """One way to make a call: how it is run, and the calls, on successive buffers."""

    runner: Runner
    calls: Sequence[Call]
    lead_in: int = 1  # untimed calls that start a block


# -- runners: the modes in which calls are made ----------------------------------------------------


def plain(calls: Iterator[Call], n: int) -> Call:
    """One after the other. On a stream they are only launched."""

    def run() -> None:
        for call in islice(calls, n):
            call()

    return run


def waiting(device: torch.device) -> Runner:
    """One after the other, the host waiting for each."""

    def runner(calls: Iterator[Call], n: int) -> Call:
        def run() -> None:
            for call in islice(calls, n):
                call()
                torch.cuda.synchronize(device)

        return run

    return runner


def in_flight(depth: int) -> Runner:
    """Up to `depth` at a time: calls with async_op, whose works are waited for in order."""

    def runner(calls: Iterator[Call], n: int) -> Call:
        def run() -> None:
            works: deque[Any] = deque()
            for call in islice(calls, n):
                if len(works) == depth:
                    works.popleft().wait()
                works.append(call())
            for work in works:
                work.wait()

        return run

    return runner


def coalesced(size: int, group: dist.ProcessGroup, device: torch.device) -> Runner:
    """`size` at a time, which the backend takes as one; a smaller rest at the end."""
    # without a device torch collects the calls itself, for backends that cannot start a group
    where = device if device.type == "cuda" else None

    def runner(calls: Iterator[Call], n: int) -> Call:
        def run() -> None:
            for done in range(0, n, size):
                with distributed_c10d._coalescing_manager(group, device=where):
                    for call in islice(calls, min(size, n - done)):
                        call()

        return run

    return runner


def cuda_graph(calls: Iterator[Call], n: int) -> Call:
    """All of them captured once in a CUDA graph, which is then replayed."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    # nccl's own watchdog thread must not break the capture: only this thread's calls may
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        plain(calls, n)()
    return graph.replay


# -- the loop --------------------------------------------------------------------------------------


def time_blocks(
    variants: dict[str, Timed],
    together: dist.ProcessGroup | None,
    device: torch.device,
    rule: BlockRule,
    progress: Callable[[str], None] = lambda phase: None,
) -> tuple[dict[str, list[list[float]]], str]:
    """Time the variants in alternating blocks: per variant and block its seconds per call.

    A block gives one number, or several where the clock is read within it: means of equally many
    calls, so that the mean of the block is the mean of its numbers. `together`: all the ranks
    that measure at the same time; its first one decides. Also returns the rule that stopped it.
    """
    feeds = {name: cycle(timed.calls) for name, timed in variants.items()}
    leads: dict[str, Call] = {}
    seconds: dict[str, float] = {}
    for name, timed in variants.items():
        progress(f"{name}, warm-up")
        dist.barrier(together)  # `progress` may wait on one rank for all
        if rule.warmup:
            timed.runner(feeds[name], rule.warmup)()
        leads[name] = timed.runner(feeds[name], timed.lead_in)
        seconds[name] = min(time_block(leads[name], 2, device)) / timed.lead_in
    slowest = max(seconds.values())
    calls = min(rule.calls, max(1, int(rule.max_block_s / slowest)))
    calls = broadcast_int(calls, together)
    chunk = broadcast_int(_chunk(calls, slowest, rule), together)
    times: dict[str, list[list[float]]] = {name: [] for name in variants}
    parts = {name: timed.runner(feeds[name], chunk) for name, timed in variants.items()}
    spent, blocks = 0.0, 0
    stop = ""
    with without_garbage_collection():
        while not stop:
            order = list(variants) if blocks % 2 == 0 else list(reversed(variants))
            for name in order:
                progress(f"{name}, block {blocks + 1}")
                dist.barrier(together)
                leads[name]()
                block = time_block(parts[name], calls // chunk * rule.replays, device)
                times[name].append([part / chunk for part in block])
                spent += sum(block)
            blocks += 1
            out_of_time = broadcast_int(spent >= rule.max_seconds, together)
            stop = "blocks" if blocks >= rule.max_blocks else "max-seconds" if out_of_time else ""
    return times, stop


def _chunk(calls: int, seconds: float, rule: BlockRule) -> int:
    """Calls between two readings of the clock: the fewest that divide the block evenly."""
    if rule.each:
        return 1
    divisors = [c for c in range(1, calls + 1) if calls % c == 0 and c * seconds >= READ_EVERY_S]
    return divisors[0] if divisors and not rule.whole else calls
