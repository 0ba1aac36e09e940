"""A host's side of ssh_torchrun.sh: runs torchrun here, and ends it when nobody watches any more.

    ssh_agent.py FIRST_ADDRESS PORT NODE_RANK COMMAND...

sshd lets a command go on when its connection breaks. So stdin is a life line: ssh_torchrun.sh
sends a byte every few seconds, and the end of file, or silence, ends all that was started here,
also the ranks of a torchrun that was killed.
"""

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.network import interface_towards

SILENCE_S = 30.0  # ssh_torchrun.sh sends a byte every 5 s
TERM_S = 20.0  # from SIGTERM to SIGKILL: meanwhile a sweep writes its report and its tables
START_S = 300.0  # until the first host listens: torch may have to come from a network disk
UNREACHABLE_S = 20.0  # for one that does not even refuse
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def main(first: str, port: int, node_rank: int, command: list[str]) -> int:
    """Run this host's torchrun; its exit status, 128 + N after signal N."""
    # on the first host this is the interface that has the address, not the loopback
    interface = interface_towards(first)
    if interface is not None:
        for name in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
            os.environ.setdefault(name, interface)  # a site may know better
        # NCCL's own are prefixes, but behind a =
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    if "VIRTUAL_ENV" in os.environ:
        os.environ["PATH"] = f"{os.environ['VIRTUAL_ENV']}/bin:{os.environ['PATH']}"
    # who loses its parent becomes a child of this process, and is not out of sight
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    watch = Watch()
    if node_rank and not await_first(first, port, watch):
        return 1
    process = subprocess.Popen(  # kept: a Popen without a name would reap its child
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGTERM),  # there are no threads here
    )
    agent = process.pid
    statuses: dict[int, int] = {}

    def agent_ended() -> bool:
        reap(statuses)
        return agent in statuses

    def all_ended() -> bool:
        reap(statuses)
        return not descendants()

    while not agent_ended() and watch.reason is None:
        watch.wait(SILENCE_S)
    if not agent_ended():
        signal_all([agent], signal.SIGTERM)  # it passes this on, and waits for its ranks
        wait_until(agent_ended, TERM_S)
    elif descendants():  # torchrun was killed itself: its ranks would go on without it
        signal_all(descendants(), signal.SIGTERM)
        wait_until(all_ended, TERM_S)
    while not all_ended():
        signal_all(descendants(), signal.SIGKILL)
        time.sleep(0.1)
    code = os.waitstatus_to_exitcode(statuses[agent])
    return code if code >= 0 else 128 - code


class Watch:
    """Waits for what can happen: a child ends, a signal comes, stdin ends or falls silent.

    `reason` says why it is time to end; None before that.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._heard: float | None = None  # nothing yet: a command pasted from --dry-run
        self._wake, woken = os.pipe()
        os.set_blocking(woken, False)
        signal.set_wakeup_fd(woken)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, frame: None)  # the pipe has it

    def wait(self, timeout: float) -> None:
        """Until something happens, or for so many seconds."""
        if self._heard is not None:
            timeout = min(timeout, max(0.0, self._heard + SILENCE_S - time.monotonic()))
        ready, _, _ = select.select([0, self._wake], [], [], timeout)
        if self._wake in ready:
            others = set(os.read(self._wake, 512)) - {signal.SIGCHLD}
            if others:
                self.reason = signal.Signals(others.pop()).name
        if 0 in ready:
            self._heard = time.monotonic()
            if not os.read(0, 512):
                self.reason = "ssh_torchrun.sh ended, or the connection to it broke"
        elif self._heard is not None and time.monotonic() - self._heard >= SILENCE_S:
            self.reason = f"nothing heard from ssh_torchrun.sh for {SILENCE_S:.0f} s"


def await_first(first: str, port: int, watch: Watch) -> bool:
    """Wait until the first host's torchrun listens; False, and a line, where it never does.

    torchrun itself would wait for minutes and then show a traceback.
    """
    began = time.monotonic()
    while watch.reason is None:
        try:
            with socket.create_connection((first, port), timeout=5):
                return True
        except OSError as error:
            refused = isinstance(error, ConnectionRefusedError)
            if time.monotonic() - began > (START_S if refused else UNREACHABLE_S):
                print(
                    f"cannot reach the first host at {first} port {port}: {error}; a firewall, or "
                    "an address of another network: try --port N, --first-address ADDRESS",
                    file=sys.stderr,
                )
                return False
        watch.wait(0.5)
    return False


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def reap(statuses: dict[int, int]) -> None:
    """Collect the children that have ended, adopted ones too, and their wait statuses."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            statuses[pid] = status


def descendants() -> list[int]:
    """All processes below this one."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # ended meanwhile
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found: list[int] = []
    below = {os.getpid()}
    while below:
        below = {pid for pid, parent in parents.items() if parent in below}
        found += below
    return found


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    limit = time.monotonic() + seconds
    while not condition() and time.monotonic() < limit:
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]))
