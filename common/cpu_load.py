"""CPU use by other processes, from the counters of the kernel.

It needs psutil and nothing else: copy this file beside a training loop of your own, to record the
load in its report (docs/compare.md).
"""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import psutil

SHELLS = ("bash", "dash", "sh", "zsh")  # a wrapper of each rank, such as launch/mpi_env.sh, is one
LEAST_S = 0.1  # Linux counts CPU time in hundredths of a second
BUSY = 0.1  # share of a node's cores: more used by other processes disturbs a run


class Others(NamedTuple):
    """What other processes used of a node, on average over some time."""

    busy: float  # cores
    cores: int  # that the job may use on this node

    @property
    def fraction(self) -> float:
        return self.busy / self.cores


class Counters(NamedTuple):
    """What the counters show at one moment."""

    at_s: float
    busy_s: float  # of the cores, since the machine started
    job_s: float  # of the job's processes, since they started


class CpuLoad:
    """CPU use by other processes, from the moment that it is made.

    Make it on a node's first rank. Linux counts the busy time of each core, and of each process.
    The job's processes are those that its launcher has started on this node, and its cores are the
    launcher's. What the job did not use, others did.
    """

    def __init__(self, job: psutil.Process | None = None) -> None:
        """job: its processes are this one and all that it has started; None for the launcher."""
        # started by python, a run is one process, and its parent is the user's shell
        launched = "RANK" in os.environ
        this = psutil.Process()
        self.job = job or (launcher_of(this) if launched else this)
        self.cores = self.job.cpu_affinity()
        self.start = self.read()

    def read(self) -> Counters:
        return Counters(time.monotonic(), busy_seconds(self.cores), job_seconds(self.job))

    def of_others(self) -> Others:
        """The mean since this was made. Waits until that is LEAST_S ago."""
        time.sleep(max(0.0, self.start.at_s + LEAST_S - time.monotonic()))
        return self.mean(*spent(self.start, self.read()))

    def mean(self, wall_s: float, others_s: float) -> Others:
        """The mean over the wall-clock time in which other processes used this CPU time. At most
        all cores: the clock and the counters are not read at the same moment."""
        busy = min(max(0.0, others_s) / wall_s, len(self.cores))
        return Others(round(busy, 2), len(self.cores))


def spent(start: Counters, end: Counters) -> tuple[float, float]:
    """Wall-clock seconds, and CPU seconds of other processes, between two readings."""
    others_s = end.busy_s - start.busy_s - (end.job_s - start.job_s)
    return end.at_s - start.at_s, others_s


def launcher_of(process: psutil.Process) -> psutil.Process:
    """What has started the ranks of this node: the first ancestor that is no shell, or the last."""
    parent = process.parent()
    while parent and parent.name() in SHELLS and (above := parent.parent()):
        parent = above
    return parent or process


def busy_seconds(cores: Sequence[int]) -> float:
    """How long these cores have been busy since the machine started. What a hypervisor has taken
    for other machines (steal) counts. Interrupts do not: many serve the job's own messages."""
    times = psutil.cpu_times(percpu=True)
    spent = [times[core] for core in cores]
    return sum(core.user + core.nice + core.system + core.steal for core in spent)


def job_seconds(root: psutil.Process) -> float:
    """The CPU time of a process and of all that it has started, also of those that have ended."""
    seconds = 0.0
    with suppress(psutil.Error):
        for process in [root, *root.children(recursive=True)]:
            with suppress(psutil.Error):  # it has ended meanwhile
                used = process.cpu_times()
                seconds += used.user + used.system + used.children_user + used.children_system
    return seconds
