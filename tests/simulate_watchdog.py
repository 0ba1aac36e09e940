"""What the watchdogs of many ranks ask of the store, and how soon they name a stopped rank.

    python tests/simulate_watchdog.py 1024

The ranks are threads of forked processes, each with a Watchdog and a connection to a TCPStore of
its own, on loopback. Nothing is measured in between: the ranks only say which phase they are in.
"""

import argparse
import os
import resource
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import psutil
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import watchdog
from common.groups import Job
from common.report import Report

# torch looks up the name of each address that connects. Without a name server that takes 0.2 s.
os.environ.setdefault("RES_OPTIONS", "attempts:0")
RANKS_A_PROCESS = 128
PHASES = 20


class Counted:
    """A store that counts what is asked of it."""

    def __init__(self, store: dist.Store, counts: Counter[str]) -> None:
        self.store, self.counts = store, counts

    def __getattr__(self, name: str) -> Any:
        self.counts[name] += 1
        return getattr(self.store, name)


def leave(status: int, reason: str = "", say: bool = True) -> NoReturn:
    """End the watching thread of one rank, not the process of all."""
    raise SystemExit


def say(text: str) -> None:
    if text.startswith("HANG"):
        print(f"said at {time.time():.1f}:\n{text}", flush=True)


def wait_for_all(store: dist.Store, name: str, processes: int) -> None:
    store.add(name, 1)
    while store.add(name, 0) < processes:
        time.sleep(0.05)


def be_ranks(ranks: range, args: argparse.Namespace, port: int, processes: int) -> None:
    """Be some of the ranks: idle for --seconds, say phases in a row, then let a rank stop."""
    counts: Counter[str] = Counter()
    cpu, report = torch.device("cpu"), Report("simulation", {}, None)
    dogs: list[watchdog.Watchdog] = []
    store = dist.TCPStore("127.0.0.1", port)
    for rank in ranks:
        own = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
        job = Job(rank, rank, args.ranks, args.ranks, cpu, "gloo", own)
        dogs.append(watchdog.Watchdog(job, args.timeout, report))
        dogs[-1].watched = Counted(dogs[-1].watched, counts)  # type: ignore[assignment]
    wait_for_all(store, "ready", processes)
    time.sleep(dogs[0].poll_s * 2)
    counts.clear()
    time.sleep(args.seconds)
    store.set(f"looks/{ranks.start}", str(sum(counts.values()) / args.seconds))
    wait_for_all(store, "idle", processes)
    start = time.monotonic()
    for number in range(PHASES):
        for dog in dogs:
            dog.phase(f"step, block {number}")
    store.set(f"phases/{ranks.start}", str(time.monotonic() - start))
    stopped = args.ranks // 2
    for dog in dogs:
        if dog.job.rank == stopped:
            dog.over.set()  # its thread looks no more
    wait_for_all(store, "stopped", processes)
    for dog in dogs:
        if dog.job.rank != stopped:
            dog.phase("step, block 99")
    store.set(f"last/{ranks.start}", str(time.time()))
    for dog in dogs:
        dog.thread.join(args.timeout + 60)


def simulate(args: argparse.Namespace) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    firsts = range(0, args.ranks, RANKS_A_PROCESS)
    parts = [range(first, min(first + RANKS_A_PROCESS, args.ranks)) for first in firsts]
    port_reader, port_writer = os.pipe()
    parent = os.getpid()
    server = os.fork()
    if server == 0:
        master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(port_writer, str(master.port).encode())
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(0)
    port = int(os.read(port_reader, 16))
    children: list[int] = []
    for ranks in parts:
        children.append(os.fork())
        if children[-1] == 0:
            watchdog.faulthandler = mock.Mock()  # its timer is one for all ranks of the process
            watchdog.end = leave
            watchdog.write = say  # type: ignore[assignment]
            watchdog.print_stacks_and_kill = lambda pid: None  # the rank is only a thread
            be_ranks(ranks, args, port, len(parts))
            sys.stdout.flush()
            os._exit(0)
    store = dist.TCPStore("127.0.0.1", port)

    def values(name: str) -> list[float]:
        names = [f"{name}/{ranks.start}" for ranks in parts]
        return [float(value) for value in store.multi_get(names)]

    looks, used = values("looks"), psutil.Process(server).cpu_times()
    print(
        f"{args.ranks} ranks look into the store {sum(looks):,.0f} times a second while idle",
        flush=True,
    )
    phases = args.ranks * PHASES / max(values("phases"))
    after = psutil.Process(server).cpu_times()
    busy_s = after.user + after.system - used.user - used.system
    print(f"{phases:,.0f} phases a second can be said by all; the store's CPU time: ", end="")
    print(f"{busy_s / args.ranks / PHASES * 1e6:.0f} us a phase", flush=True)
    print(f"last progress at {max(values('last')):.1f}", flush=True)
    for child in children:
        os.waitpid(child, 0)
    os.kill(server, signal.SIGKILL)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("ranks", type=int, nargs="?", default=1024)
    parser.add_argument("--timeout", type=float, default=20, metavar="S")
    parser.add_argument("--seconds", type=float, default=10, metavar="S", help="of idling")
    simulate(parser.parse_args())
