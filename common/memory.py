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
    """GiB since `start_peak`, as metrics: on CUDA what torch reserved and allocated at most, which
    leaves out NCCL's own buffers; on the CPU by how much the resident set grew."""
    if device.type == "cuda":
        return {
            "memory_gib": torch.cuda.max_memory_reserved(device) / GIB,
            "memory_allocated_gib": torch.cuda.max_memory_allocated(device) / GIB,
        }
    return {"memory_gib": max(0, status_bytes("VmHWM") - start) / GIB}


def too_much(needed: int, job: Job, flag: str) -> str | None:
    """Why the ranks of a device or host cannot have `needed` bytes each; None if they can."""
    if job.device.type == "cuda":
        what, free = "device", torch.cuda.mem_get_info(job.device)[0]
        needed *= max(1, -(-job.local_world_size // torch.cuda.device_count()))
    else:
        what, free = "host", psutil.virtual_memory().available
        needed *= job.local_world_size
        with contextlib.suppress(OSError, ValueError):  # no cgroup of ours, or no limit: `max`
            files = (Path(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
            limit, used = (int(file.read_text()) for file in files)
            free = min(free, max(0, limit - used))
    if needed <= free:
        return None
    return f"the buffers need {needed:,} bytes of this {what}, {free:,} are free; lower {flag}"


def status_bytes(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0
