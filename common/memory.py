"""Memory of a case on one rank: its peak, and how much there is."""

import contextlib
import ctypes
import gc
import re
from pathlib import Path

import psutil
import torch

from common.dist import Job

GIB = 2**30


def start_peak(device: torch.device) -> int:
    """Start a new peak. Returns the bytes in use, which `peak` takes off on the CPU."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return 0
    with contextlib.suppress(OSError, AttributeError):  # glibc only
        # give back what the case before has freed, or this one would grow into it unseen
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    with contextlib.suppress(OSError):  # some containers forbid it: then the peak is the run's
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, see proc(5)
    return status_bytes("VmRSS")


def peak(device: torch.device, start: int) -> dict[str, float]:
    """GiB since `start_peak`, as metrics.

    On CUDA what torch reserved and allocated at most; NCCL's own buffers are in neither. On the
    CPU by how much the resident set grew.
    """
    if device.type == "cuda":
        return {
            "memory_gib": torch.cuda.max_memory_reserved(device) / GIB,
            "memory_allocated_gib": torch.cuda.max_memory_allocated(device) / GIB,
        }
    return {"memory_gib": max(0, status_bytes("VmHWM") - start) / GIB}


def too_much(needed: int, job: Job, flag: str) -> str | None:
    """Why a rank cannot have buffers of `needed` bytes, whose size `flag` gives; None if it can."""
    cuda = job.device.type == "cuda"
    sharing = job.local_world_size / (torch.cuda.device_count() if cuda else 1)
    needed = int(needed * max(1, sharing))
    if needed <= (available := available_bytes(job.device)):
        return None
    whose = "device" if cuda else "host"
    return (
        f"the buffers need {needed:,} bytes of this {whose}, {available:,} are free; lower {flag}"
    )


def available_bytes(device: torch.device) -> int:
    """What this host can still give to all its ranks, or this CUDA device to all that share it."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = int(psutil.virtual_memory().available)
    with contextlib.suppress(OSError, ValueError):  # no cgroup of ours, or no limit: `max`
        limit, used = (
            int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current")
        )
        available = min(available, max(0, limit - used))
    return available


def status_bytes(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0
