"""How much of a node's cores other programs take, so that a run can say who disturbed it."""

import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

import psutil

from common.cli import cut

SHELLS = ("bash", "dash", "sh", "zsh")  # a wrapper of each rank, such as launch/mpi_env.sh, is one
LEAST_S = 0.1  # Linux counts CPU time in hundredths of a second
BUSY = 0.1  # others that take more of a node's cores are named: a time may scatter by as much


class Others(NamedTuple):
    """What other programs took from a node, on average over some time."""

    busy: float  # cores
    cores: int  # that the job may use on this node

    @property
    def fraction(self) -> float:
        """Of the cores."""
        return self.busy / self.cores


class CpuLoad:
    """Counts from the moment that it is made. Make it on a node's first rank, before cores are
    bound: the cores of the launcher are those that the job may use.

    Linux counts the busy time of each core, and of each process. The job's processes are those
    that its launcher has started on this node. What they did not use, others did.
    """

    def __init__(self) -> None:
        # started by python, a run is one process, and its parent is the user's shell
        launched = "RANK" in os.environ
        self.job = launcher_of(psutil.Process()) if launched else psutil.Process()
        self.cores = psutil.Process().cpu_affinity()
        with suppress(psutil.Error):
            self.cores = self.job.cpu_affinity()
        self.start_s = time.monotonic()
        self.busy_s, self.job_s = busy_seconds(self.cores), job_seconds(self.job)

    def of_others(self) -> Others:
        """What others took since this was made. Waits until that is LEAST_S ago."""
        time.sleep(max(0.0, self.start_s + LEAST_S - time.monotonic()))
        wall_s = time.monotonic() - self.start_s
        busy_s = busy_seconds(self.cores) - self.busy_s
        job_s = job_seconds(self.job) - self.job_s
        busy = max(0.0, busy_s - job_s) / wall_s
        return Others(round(busy, 2), len(self.cores))


def launcher_of(process: psutil.Process) -> psutil.Process:
    """What has started the ranks of this node: the first ancestor that is no shell, or the last."""
    parent = process.parent()
    while parent and parent.name() in SHELLS and (above := parent.parent()):
        parent = above
    return parent or process


def busy_seconds(cores: Iterable[int]) -> float:
    """How long these cores have been busy since the machine started. What a hypervisor has taken
    for other machines (steal) counts. Interrupts do not: many serve the job's own messages."""
    times = psutil.cpu_times(percpu=True)
    busy_s = 0.0
    for core in cores:
        spent = times[core]
        busy_s += spent.user + spent.nice + spent.system + spent.steal
    return busy_s


def job_seconds(root: psutil.Process) -> float:
    """The CPU time of a process and of all that it has started, also of those that have ended."""
    seconds = 0.0
    with suppress(psutil.Error):
        for process in [root, *root.children(recursive=True)]:
            with suppress(psutil.Error):  # it has ended meanwhile
                used = process.cpu_times()
                seconds += used.user + used.system + used.children_user + used.children_system
    return seconds


def others_text(hosts: Sequence[str], loads: Sequence[Others]) -> str:
    """Which nodes other programs kept busy; "" if none. loads: of each node."""
    busy = [
        f"{load.busy:.1f} of {load.cores} cores of {host}"
        for host, load in zip(hosts, loads, strict=False)  # a dry run has no loads
        if load.fraction > BUSY
    ]
    return f"other programs take {cut(busy, 3)}" if busy else ""
