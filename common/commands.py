"""Commands that run at once, each to its end: none of their processes is left, however it ends.

Linux only: see prctl(2).
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import BinaryIO

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# How a run is ended, and how long each of these may take. torchrun gives its workers 30 s.
ENDINGS = ((signal.SIGINT, 40.0), (signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0))
LEFTOVER_S = 5.0  # for processes that outlive the command which started them
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of Linux


class Interrupted(Exception):
    """A signal ended the campaign; `status` is the exit status that says so."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.status = 128 + number


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """For the import of numpy: its threads then leave the signals to those who wait for them.

    OpenBLAS starts them at import, and does not block signals in them itself.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*SIGNALS, signal.SIGCHLD})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def defer_signals() -> set[int]:
    """Block SIGNALS and SIGCHLD, and adopt what runs leave behind; the mask of before."""
    wanted = {s for s in SIGNALS if signal.getsignal(s) != signal.SIG_IGN}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, wanted | {signal.SIGCHLD})
    # what a run leaves behind becomes a child of this process, and can be ended
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    return mask


def restore_signals(mask: set[int], drop: bool) -> None:
    """Unblock them again. drop: those that wait are forgotten, they have nothing more to end."""
    if drop:
        while signal.sigtimedwait(SIGNALS, 0):
            pass
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def stop_if_asked() -> None:
    """Raise Interrupted where one of the blocked SIGNALS waits."""
    waiting = signal.sigpending() & set(SIGNALS)
    if waiting:
        raise Interrupted(min(waiting))


@dataclass(frozen=True)
class Command:
    """A command to run, and where its output goes."""

    name: str
    words: Sequence[str]
    environment: dict[str, str]
    log: Path


class Ended(Enum):
    """How a run came to an end that is not its own."""

    LATE = "took too long"
    STOPPED = "another one that ran with it failed"


LATE, STOPPED = Ended.LATE, Ended.STOPPED
Status = int | Ended  # an exit status, -N where signal N ended it


def run_commands(
    commands: Sequence[Command],
    timeout: float | None,
    over: Callable[[str], None] = lambda name: None,
) -> list[Status]:
    """Run commands at once, each to its end with its output in its log.

    After `timeout` seconds all that still run are ended; where one fails, the others are. `over`
    is called with the name of each that has ended. SIGNALS and SIGCHLD are blocked. Raises
    Interrupted on one of SIGNALS. However it ends, none of their processes is left.
    """
    older = set(_children())
    processes: list[subprocess.Popen[bytes]] = []
    ended: dict[int, Ended] = {}
    number = None
    try:
        for command in commands:
            with command.log.open("wb") as output:
                processes.append(_start(command, output))
        limit = None if timeout is None else time.monotonic() + timeout
        running = list(zip(commands, processes, strict=True))
        while running and number is None and not ended:
            number, late = _wait_for_any([process for _, process in running], limit)
            for command, process in running:
                if process.poll() is not None:
                    over(command.name)
            running = [pair for pair in running if pair[1].poll() is None]
            failed = any(process.returncode for process in processes)
            if late or failed:
                ended = {process.pid: LATE if late else STOPPED for _, process in running}
    finally:
        for process in processes:
            if process.poll() is None:
                _end(process)
        _end_leftovers(older)
    if number is not None:
        raise Interrupted(number)
    return [ended.get(process.pid, process.returncode) for process in processes]


def _start(command: Command, output: BinaryIO) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        command.words,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=command.environment,
        start_new_session=True,  # Ctrl-C is for this process, which passes it on once
        preexec_fn=_start_of_child(os.getpid()),
    )


def _start_of_child(parent: int) -> Callable[[], None]:
    libc = ctypes.CDLL(None)

    def start() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {*SIGNALS, signal.SIGCHLD})
        # where this process is killed, no run stays behind to disturb the next one
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    return start


def _wait_for_any(
    processes: Sequence["subprocess.Popen[bytes]"], limit: float | None
) -> tuple[int | None, bool]:
    """Until one of the processes ends, or a signal comes, or it is later than `limit`.

    The signal's number, and whether it is too late. limit: of time.monotonic, in seconds.
    """
    wanted = {s for s in SIGNALS if signal.getsignal(s) != signal.SIG_IGN} | {signal.SIGCHLD}
    while all(process.poll() is None for process in processes):
        left = 60.0 if limit is None else min(60.0, limit - time.monotonic())
        if left <= 0:
            return None, True
        came = signal.sigtimedwait(wanted, left)
        if came is not None and came.si_signo != signal.SIGCHLD:
            return came.si_signo, False
    return None, False


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a command: politely first, and at once on another Ctrl-C."""
    for number, patience in ENDINGS:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        _wait_for_any([process], time.monotonic() + patience)
        if process.poll() is not None:
            return


def _end_leftovers(older: set[int]) -> None:
    """End what a command left running: all that is this process's child now and was not before."""
    limit = time.monotonic() + LEFTOVER_S
    while left := [pid for pid in _children() if pid not in older]:
        for pid in left:
            with contextlib.suppress(OSError):
                if time.monotonic() > limit:
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > limit + LEFTOVER_S:
            return
        time.sleep(0.05)


def _children() -> list[int]:
    found: list[int] = []
    for task in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, task.read_text().split())
    return found
