"""Peak memory of a case on one rank."""

import contextlib
import ctypes
import gc
import re
from pathlib import Path

import torch

GIB = 2**30


def start_peak(device: torch.device) -> int:
    """Reset the peak. Returns the bytes in use now, which `peak` subtracts; 0 on CUDA, where the
    peak includes memory that torch already has at the start."""
    reset_peak(device)
    return 0 if device.type == "cuda" else status_bytes("VmRSS")


def reset_peak(device: torch.device) -> None:
    """Reset the peak. The return value of an earlier `start_peak` remains valid."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError, AttributeError):  # glibc only
        # Return memory freed by earlier cases to the system. Otherwise this case would reuse it,
        # and its own use would not show.
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    with contextlib.suppress(OSError):  # some containers forbid it, so VmHWM covers the run
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, see proc(5)


def peak(device: torch.device, start: int) -> dict[str, float]:
    """Return the peak since then in GiB, as metrics. On CUDA: what torch reserved and allocated,
    without NCCL's buffers. On the CPU: growth of the resident set over `start`."""
    if device.type == "cuda":
        return {
            "memory_gib": torch.cuda.max_memory_reserved(device) / GIB,
            "memory_allocated_gib": torch.cuda.max_memory_allocated(device) / GIB,
        }
    return {"memory_gib": max(0, status_bytes("VmHWM") - start) / GIB}


def status_bytes(name: str) -> int:
    """Return a field of /proc/self/status in bytes; 0 if it is missing."""
    text = Path("/proc/self/status").read_text()
    field = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return int(field[1]) * 1024 if field else 0
