"""Who comes late to a collective: clock offsets between ranks, and a call's time split by them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.distributed as dist

ROUND_TRIPS = 50

Exchange = Callable[[], tuple[float, float, float]]


@dataclass(frozen=True)
class Offset:
    """How far a rank's clock is ahead of the first rank's, and how far that may be off. Seconds."""

    seconds: float
    error: float


@dataclass(frozen=True)
class Split:
    """The mean call, from the first arrival to the last completion. Seconds.

    waiting + transfer = total. `late[r]`: how long after the first arrival rank r came, on average.
    """

    waiting: float  # from the first rank's arrival to the last one's
    transfer: float  # from the last arrival to the last completion
    late: list[float]

    @property
    def total(self) -> float:
        return self.waiting + self.transfer


def offset_of(trips: Sequence[tuple[float, float, float]]) -> Offset:
    """From round trips (sent, the peer's clock, back): the one that took least (Cristian 1989).

    "Probabilistic clock synchronization", Distributed Computing 3: the peer read its clock
    somewhere within the trip, so half the trip bounds the error.
    """
    sent, there, back = min(trips, key=lambda trip: trip[2] - trip[0])
    return Offset(there - (sent + back) / 2, (back - sent) / 2)


def clock_offsets(group: dist.ProcessGroup, trips: int = ROUND_TRIPS) -> list[Offset]:
    """Every rank's clock against the first rank's, by ping-pong over a gloo group.

    On the first rank; [] elsewhere. One rank after the other: 2 * trips messages each.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    stamp = torch.zeros(1, dtype=torch.float64)
    if rank != 0:
        for _ in range(trips):
            dist.recv(stamp, group=group, group_src=0)
            stamp[0] = perf_counter()
            dist.send(stamp, group=group, group_dst=0)
        return []
    offsets = [Offset(0.0, 0.0)]
    for peer in range(1, ranks):
        seen = []
        for _ in range(trips):
            sent = perf_counter()
            dist.send(stamp, group=group, group_dst=peer)
            dist.recv(stamp, group=group, group_src=peer)
            seen.append((sent, float(stamp), perf_counter()))
        offsets.append(offset_of(seen))
    return offsets


def arrivals(
    call: Callable[[], object], n: int, control: dist.ProcessGroup, device: torch.device
) -> tuple[list[float], list[float]]:
    """When this rank came to each of n calls, and when it was done, by its own clock.

    A barrier on the control group precedes each call, so that the ranks start aligned; the host
    waits for the device before it and after it.
    """
    came, done = [], []
    for _ in range(n):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        dist.barrier(control)
        came.append(perf_counter())
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        done.append(perf_counter())
    return came, done


def split(
    came: Sequence[Sequence[float]], done: Sequence[Sequence[float]], offsets: Sequence[Offset]
) -> Split:
    """Split the calls' time into waiting for the last rank and transfer. came, done: [ranks, n].

    Both are put on the first rank's clock. A rank may be done before the last one has come (the
    root of a broadcast), so it is the last completion that ends the transfer.
    """
    n = len(came[0])
    waiting = transfer = 0.0
    late = [0.0] * len(came)
    for i in range(n):
        arrived = [times[i] - o.seconds for times, o in zip(came, offsets, strict=True)]
        ended = [times[i] - o.seconds for times, o in zip(done, offsets, strict=True)]
        first, last = min(arrived), max(arrived)
        waiting += (last - first) / n
        transfer += (max(ended) - last) / n
        late = [mean + (a - first) / n for mean, a in zip(late, arrived, strict=True)]
    return Split(waiting, transfer, late)
