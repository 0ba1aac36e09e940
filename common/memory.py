"""The memory of a case on one rank: how much it used at most, and whether there is enough."""

import contextlib
import ctypes
import gc
import re
from pathlib import Path

import torch

GIB = 2**30


def start_peak(device: torch.device) -> int:
    """Start a new peak. Returns the bytes in use now; on the CPU `peak` subtracts them.

    On CUDA this is 0: `peak` counts what torch has in use at the start as well.
    """
    reset_peak(device)
    return 0 if device.type == "cuda" else status_bytes("VmRSS")


def reset_peak(device: torch.device) -> None:
    """Forget the largest memory so far. What `start_peak` has returned is still the start."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError, AttributeError):  # glibc only
        # Memory that the case before has freed may still belong to the process. Give it back, or
        # this case would use it and its growth would not show.
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    with contextlib.suppress(OSError):  # some containers forbid it: then VmHWM is the whole run's
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, see proc(5)


def peak(device: torch.device, start: int) -> dict[str, float]:
    """The largest memory since `start_peak` or `reset_peak`, in GiB, as metrics.

    On CUDA: what torch reserved and what it allocated at most, without NCCL's own buffers. On the
    CPU: by how much the resident set grew over `start`, which `start_peak` has returned.
    """
    if device.type == "cuda":
        return {
            "memory_gib": torch.cuda.max_memory_reserved(device) / GIB,
            "memory_allocated_gib": torch.cuda.max_memory_allocated(device) / GIB,
        }
    return {"memory_gib": max(0, status_bytes("VmHWM") - start) / GIB}


def status_bytes(name: str) -> int:
    """A field of /proc/self/status in bytes; 0 if it is not there."""
    text = Path("/proc/self/status").read_text()
    field = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return int(field[1]) * 1024 if field else 0
