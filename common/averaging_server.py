"""A parameter server for gradients: averages each bucket over its trainers and answers them all.

`Server` lives on a server's process, made there by `rpc.make` as "server"; the functions at the
end are what trainers and the master call by RPC.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch.futures import Future

from common.rpc import hosted

RECORDED = ("straggler", "batch", "averaging")

Parts = list[torch.Tensor]  # a gradient as it travels: [dense], or [indices, values, size]


def pack(gradient: torch.Tensor, device: torch.device) -> Parts:
    if not gradient.is_sparse:
        return [gradient.to(device)]
    gradient = gradient.coalesce()
    size = torch.tensor(gradient.shape)
    return [gradient.indices().to(device), gradient.values().to(device), size]


def unpack(parts: Parts, device: torch.device) -> torch.Tensor:
    if len(parts) == 1:
        return parts[0].to(device)
    indices, values, size = parts
    return torch.sparse_coo_tensor(
        indices.to(device),
        values.to(device),
        size.tolist(),
        check_invariants=False,  # they come from a tensor
        is_coalesced=True,
    )


def part_bytes(parts: Parts) -> int:
    return sum(part.numel() * part.element_size() for part in parts)


def running(kept: list[torch.Tensor], gradient: torch.Tensor) -> list[torch.Tensor]:
    """Add the gradients up as they arrive."""
    return [kept[0].add_(gradient)] if kept else [gradient]


def batch(kept: list[torch.Tensor], gradient: torch.Tensor) -> list[torch.Tensor]:
    """Keep all of them, to be reduced when the last one is in."""
    return [*kept, gradient]


SERVERS = {"running": running, "batch": batch}


@dataclass
class Bucket:
    """A bucket of one step whose gradients are coming in."""

    answer: Future[Parts | str]  # the average, or why there is none
    first_s: float  # when the first gradient was there
    kept: list[torch.Tensor] = field(default_factory=list)
    arrived: int = 0
    averaging_s: float = 0.0


@dataclass
class Server:
    """Averages each bucket over `trainers` and answers all of them when the last gradient is in.

    Its methods run on the threads of RPC, for several buckets and steps at once.
    """

    kind: str
    trainers: int
    device: torch.device
    name: str
    records: list[list[float]] = field(default_factory=list)  # step, then RECORDED in seconds
    failed: str = ""
    buckets: dict[tuple[int, int], Bucket] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.Lock)

    def add(self, step: int, index: int, parts: Parts) -> "Future[Parts | str]":
        """Take a trainer's gradient of a bucket; the answer comes as the same kind of parts."""
        try:
            gradient = unpack(parts, self.device)
            self._finish()  # what counts is when it is here; and then any stream may use it
            with self.lock:
                now = perf_counter()
                if self.failed:
                    return self._answer(self.failed)
                bucket = self.buckets.get((step, index)) or Bucket(self._answer(), now)
                self.buckets[step, index] = bucket
                bucket.kept = SERVERS[self.kind](bucket.kept, gradient)
                self._finish()
                bucket.arrived += 1
                bucket.averaging_s += perf_counter() - now
                last = bucket.arrived == self.trainers
            if last:
                self._average(step, index, bucket, now)
        except Exception as error:  # or the other trainers would wait for this one
            self.give_up(f"{self.name}: {type(error).__name__}: {error}")
            return self._answer(self.failed)
        if parts[0].device == self.device:
            return bucket.answer
        return bucket.answer.then(functools.partial(on_device, parts[0].device))

    def _average(self, step: int, index: int, bucket: Bucket, last_s: float) -> None:
        start = perf_counter()
        average = functools.reduce(torch.add, bucket.kept) / self.trainers
        parts = pack(average, self.device)
        self._finish()
        done = perf_counter()
        with self.lock:
            if self.buckets.pop((step, index), None) is None:
                return  # given up meanwhile, and answered
            averaging_s = bucket.averaging_s + done - start
            times = (last_s - bucket.first_s, done - bucket.first_s, averaging_s)
            self.records.append([step, *times])
        bucket.answer.set_result(parts)

    def give_up(self, reason: str) -> None:
        """Answer every trainer that waits, or that comes later, with the reason."""
        with self.lock:
            self.failed = self.failed or reason
            waiting, self.buckets = list(self.buckets.values()), {}
        for bucket in waiting:
            bucket.answer.set_result(self.failed)

    def reset(self) -> None:
        with self.lock:
            assert not self.buckets
            self.records = []

    def _answer(self, reason: str = "") -> "Future[Parts | str]":
        answer: Future[Parts | str] = Future(
            devices=[self.device] if self.device.type == "cuda" else None
        )
        if reason:
            answer.set_result(reason)
        return answer

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def on_device(device: torch.device, answer: "Future[Parts | str]") -> Parts | str:
    parts = answer.value()
    return parts if isinstance(parts, str) else [part.to(device) for part in parts]


# the thread is free while the other gradients come
@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def add_gradient(step: int, index: int, parts: Parts) -> "Future[Parts | str]":
    answer: Future[Parts | str] = hosted("server").add(step, index, parts)
    return answer


def give_up(reason: str) -> None:
    hosted("server").give_up(reason)


def reset() -> None:
    hosted("server").reset()


def records() -> list[list[float]]:
    kept: list[list[float]] = hosted("server").records
    return kept


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def on_every_server(names: Sequence[str], function: Callable[[], Any]) -> "Future[list[Any]]":
    """What the master does: call all servers at once, and answer with what they answered."""
    calls = torch.futures.collect_all([rpc.rpc_async(name, function) for name in names])
    return calls.then(lambda calls: [call.value() for call in calls.value()])
