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


def cache_bytes(device: torch.device) -> int:
    """The last-level cache that a rank's data passes: L2 on CUDA, on the CPU as Linux tells."""
    if device.type == "cuda":
        return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 2**26))
    sizes = [2**25]  # where nothing is told: no less than most have
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        found = re.fullmatch(r"(\d+)([KMG])", path.read_text().strip())
        if found:
            sizes.append(int(found[1]) * {"K": 2**10, "M": 2**20, "G": 2**30}[found[2]])
    return max(sizes)


def available_bytes(device: torch.device) -> int:
    """Memory that this host (for all its ranks) or this CUDA device can still give."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    available = int(found[1]) * 1024 if found else 2**62
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        with contextlib.suppress(OSError, ValueError):  # no such limit, or `max`
            free = int(Path(limit).read_text()) - int(Path(used).read_text())
            available = min(available, max(0, free))
    return available


def _status_bytes(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0
