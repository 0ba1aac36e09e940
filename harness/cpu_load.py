"""CPU use by other processes, from the counters of the kernel.

Requires only psutil. To record the load in the report of your own training loop, copy this file
next to it (docs/ci.md).
"""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import psutil

SHELLS = ("bash", "dash", "sh", "zsh")  # run wrappers of a rank, such as launch/mpi_env.sh
LEAST_S = 0.1  # shortest interval: Linux counts CPU time in units of 0.01 s
BUSY = 0.1  # fraction of a node's cores; if other processes use more, a run is disturbed


class Others(NamedTuple):
    """Average CPU use by other processes on a node, over a period of time."""

    busy: float  # number of cores that they used
    cores: int  # number of cores that the job may use

    @property
    def fraction(self) -> float:
        """Return the fraction of the job's cores, 0 to 1."""
        return self.busy / self.cores


class CpuLoad:
    """Measures CPU use by other processes since its construction, on one rank of a node: the busy
    time of the cores that the job's launcher may use, less the CPU time of what it started here."""

    def __init__(self, job: psutil.Process | None = None) -> None:
        """job: the process that started the job's processes; None for the launcher."""
        # without a launcher, a run is a single process whose parent is the user's shell
        this = psutil.Process()
        self.job = job or (launcher_of(this) if "RANK" in os.environ else this)
        self.cores = self.job.cpu_affinity()
        self.start = self.read()

    def read(self) -> tuple[float, float]:
        """Return the time of a monotonic clock and the CPU time of other processes, in seconds."""
        return time.monotonic(), busy_seconds(self.cores) - job_seconds(self.job)

    def of_others(self) -> Others:
        """Return the average since construction. Waits until LEAST_S have passed since then."""
        time.sleep(max(0.0, self.start[0] + LEAST_S - time.monotonic()))
        return self.mean(*spent(self.start, self.read()))

    def mean(self, wall_s: float, others_s: float) -> Others:
        """Return the average over a period of wall-clock time in which other processes used this
        CPU time. At most the number of cores: clock and counters are not read simultaneously."""
        busy = min(max(0.0, others_s) / wall_s, len(self.cores))
        return Others(round(busy, 2), len(self.cores))


def spent(start: tuple[float, float], end: tuple[float, float]) -> tuple[float, float]:
    """Return wall-clock seconds, and CPU seconds of other processes, between two readings."""
    return end[0] - start[0], end[1] - start[1]


def launcher_of(process: psutil.Process) -> psutil.Process:
    """Return the first ancestor that is not a shell: it started the ranks of this node."""
    ancestors = process.parents() or [process]
    return next((each for each in ancestors if each.name() not in SHELLS), ancestors[-1])


def busy_seconds(cores: Sequence[int]) -> float:
    """Return the busy time of these cores since boot, in seconds: with what a hypervisor gave to
    other machines (steal), but without interrupts, many of which serve the job's own messages."""
    times = psutil.cpu_times(percpu=True)
    spent = [times[core] for core in cores]
    return sum(core.user + core.nice + core.system + core.steal for core in spent)


def job_seconds(root: psutil.Process) -> float:
    """Return the CPU time of a process and its descendants, including ended ones, in seconds."""
    seconds = 0.0
    with suppress(psutil.Error):
        for process in [root, *root.children(recursive=True)]:
            with suppress(psutil.Error):  # the process has ended
                used = process.cpu_times()
                seconds += used.user + used.system + used.children_user + used.children_system
    return seconds
