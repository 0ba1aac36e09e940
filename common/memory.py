"""Peak memory of a case on one rank."""

import contextlib
import ctypes
import gc
import re
from pathlib import Path

import torch

GIB = 2**30


def start_peak(device: torch.device) -> int:
    """Start a new peak; returns the bytes in use now, which `peak_gib` takes off on the CPU."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return 0
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc only
        # hand the memory of the case before back, or this one would grow into it unseen
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    with contextlib.suppress(OSError):  # some containers forbid it: then the peak is the run's
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, see proc(5)
    return _status_bytes("VmRSS")


def peak_gib(device: torch.device, start: int) -> float:
    """GiB reserved by torch on CUDA (max_reserved); on the CPU how far the resident set grew."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / GIB
    return max(0, _status_bytes("VmHWM") - start) / GIB


def _status_bytes(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0
