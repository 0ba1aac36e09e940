"""Processes of this machine, told apart by pid and start time: a pid alone is used again."""

import contextlib
import os
import signal
import time
from pathlib import Path


def dump_and_kill(pid: int, started: str) -> None:
    """Have a silent process of this host dump its stacks, then end it."""
    if not started or start_time(pid) != started:  # ended meanwhile: the pid may be another's
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR2)  # faulthandler's
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.5)
        os.kill(pid, signal.SIGKILL)


def start_time(pid: int) -> str:
    """The kernel's start time of a process, which with the pid names it for good."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]


def alive(pid: int, started: str) -> bool:
    """Whether it runs; one that waits to be reaped does not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[19] == started and fields[0] != "Z"
