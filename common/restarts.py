"""What torchrun starts again (`--max-restarts`): which attempt this is, and the end of the others.

The store of torchrun's agent outlives an attempt. Each attempt has its own prefixes there.
"""

import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from common import hang, job

_FIRST_PID = os.getpid()  # of what the launcher started: the parts of a run are forked from it


def count_restarts(rank: int, store: Store) -> int:
    """How often torchrun has started the ranks before, by what they left in its store.

    Alike on all nodes, which torchrun's own count is not: an agent that restarts its ranks because
    those of another node failed does not count that.
    """
    mine = f"start/{rank}/{socket.gethostname()}/{_FIRST_PID}"  # one start, though a run has parts
    if store.check([mine]):
        return int(store.get(mine))
    newest = int(store.get("restarts")) if store.check(["restarts"]) else 0
    restarts = max(store.add(f"starts/{rank}", 1) - 1, newest)
    store.set("restarts", str(restarts))
    store.set(mine, str(restarts))
    return restarts


def end_attempt(restarts: int, store: Store) -> None:
    """End the ranks of other nodes which do not know yet that this node's were started again.

    They may wait in the store for a rank that died, which no connection tells them.
    """
    if store.check([f"part/{restarts}"]):
        attempt = f"{restarts}.{store.get(f'part/{restarts}').decode()}"
        before = PrefixStore(f"watchdog/{attempt}", store)
        rank, _, local_rank, local_world_size = job.world(os.environ)
        first = rank - local_rank
        lost = [
            hang.silence(hang.state_of(before, number))
            for number in range(first, first + local_world_size)
            if not before.check([f"ended/{number}"])
        ]
        again = f"torchrun has started the ranks of {socket.gethostname()} again"
        post_event(before, {"kind": "failed", "reason": "; ".join([again, *lost])})


@contextlib.contextmanager
def unless_started_again(attempt: str, store: Store) -> Iterator[None]:
    """Within it this process ends as soon as `end_attempt` wants it to; later the watchdog sees it.

    For ranks that wait for others which will not come, since they belong to the next attempt.
    """
    rank, world_size, _, _ = job.world(os.environ)
    over = threading.Event()

    def watch(own: Store) -> None:
        while not over.wait(max(0.5, world_size / 500)):  # 500 looks a second, of all ranks
            with contextlib.suppress(RuntimeError):
                if own.check(["event/1"]):
                    reason = json.loads(own.get("event/1")).get("reason", "the others end")
                    os.write(2, f"[rank {rank} {socket.gethostname()}] {reason}\n".encode())
                    os._exit(1)

    thread = None
    if job.may_restart(os.environ) and world_size > 1:
        own = PrefixStore(f"watchdog/{attempt}", connection(store))
        thread = threading.Thread(target=watch, args=(own,), daemon=True)
        thread.start()
    try:
        yield
    finally:
        over.set()
        if thread:
            thread.join(1)


def post_event(store: Store, event: dict[str, Any]) -> None:
    """Tell all ranks' watchdogs. store: as they have it. Raises RuntimeError where it is gone."""
    store.set(f"event/{store.add('events', 1)}", json.dumps(event))


def connection(store: Store) -> Store:
    """Another one to the same store: a blocked one takes no second call."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        store = TCPStore(store.host, store.port, is_master=False, timeout=timedelta(seconds=60))
    return store
