"""Refuse a case whose buffers do not fit into the memory of a device or host."""

import contextlib
from pathlib import Path
from typing import Any

import psutil
import torch

from common.groups import Job


def check_room(needed: int, job: Job, environment: dict[str, Any], flag: str) -> None:
    """Raise ValueError if the ranks of a device (or host) cannot allocate `needed` bytes each.
    flag: determines the size, for the message."""
    if job.device.type == "cuda":
        place = "device"
        ranks = sharers(environment, job.rank)
        free, _ = torch.cuda.mem_get_info(job.device)
    else:
        place = "host"
        ranks = job.local_world_size
        free = free_on_host()
    total = needed * ranks
    if total > free:
        raise ValueError(
            f"the buffers need {total:,} bytes of this {place}, but only {free:,} are free; lower "
            f"{flag}"
        )


def sharers(environment: dict[str, Any], rank: int) -> int:
    """Return the number of ranks that use the GPU of this rank, with itself; 1 on the CPU. UUIDs
    are compared, because torch's device count is 1 if each rank sees only its own GPU."""
    places = [(row["host"], row["uuid"]) for row in environment["ranks"]]
    return places.count(places[rank]) if places[rank][1] else 1


def free_on_host() -> int:
    """Return the free bytes on the host, or within the limit of this process's cgroup."""
    free = psutil.virtual_memory().available
    cgroup = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # no cgroup, or no limit: `max`
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        free = min(free, max(0, limit - used))
    return free
