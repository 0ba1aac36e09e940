"""GPUs: what nvidia-smi and NCCL say of them, what is wrong with a node's, and CUDA graphs."""

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from common.dist import Job, gather

GPU_STATE = (
    *("index", "uuid", "pci.bus_id", "name", "driver_version", "mig.mode.current"),
    *("ecc.mode.current", "ecc.errors.uncorrected.volatile.total", "power.limit"),
    *("clocks.current.sm", "clocks.max.sm", "clocks.current.memory", "temperature.gpu"),
    "clocks_event_reasons.active",
)
# bits of clocks_event_reasons.active that slow a GPU down: NVML's nvmlClocksEventReasons
THROTTLED = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}


def run(command: list[str]) -> str:
    """A command's output; nothing where it is absent, slow or failing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def gpu_state() -> list[dict[str, str]]:
    """What nvidia-smi says of each GPU of this node; empty where it says nothing."""
    text = run(["nvidia-smi", f"--query-gpu={','.join(GPU_STATE)}", "--format=csv,noheader"])
    rows = [line.split(", ") for line in text.splitlines()]
    return [dict(zip(GPU_STATE, row, strict=True)) for row in rows if len(row) == len(GPU_STATE)]


def at_the_end(job: Job, hosts: list[str]) -> tuple[dict[str, Any], list[str]]:
    """What each node says after the last case, on rank 0: for the report, and lines to print.
    Empty on the CPU and elsewhere. All ranks call it."""
    log = Path(os.environ.get("NCCL_DEBUG_FILE", ""))  # of the node's first rank; join.py sets it
    text = log.read_text(errors="replace") if log.is_file() else ""
    first = job.local_rank == 0 and job.device.type == "cuda"
    rows = gather((gpu_state(), nccl_choices(text)) if first else None) or []
    if not any(rows):
        return {}, []
    gpus, nccl = map(list, zip(*filter(None, rows), strict=True))
    lines = [f"warning: {line} at the end of the run" for line in throttled(hosts, gpus)]
    chosen = [f"{name} {', '.join(names)}" for name, names in nccl[0].items() if names]
    lines += [f"NCCL chose {'; '.join(chosen)}"] if chosen else []
    return {"gpus": gpus, "nccl": nccl}, lines


def nccl_choices(log: str) -> dict[str, list[str]]:
    """The networks and transports in a log of NCCL_DEBUG=INFO, and whether it set up NVLS."""
    found = {
        "network": re.findall(r"Using network (\S+)", log),
        "transport": re.findall(r"Channel \S+ : \S+ -> \S+(?: \[\w+\])? via (\S+)", log),
        "nvls": re.findall(r"NVLS multicast support is ((?:not )?available)", log),
    }
    return {name: sorted(set(values)) for name, values in found.items()}


def throttled(hosts: list[str], gpus: list[list[dict[str, str]]]) -> list[str]:
    """A line for each GPU that runs slower than it could, with the reason. gpus: by node."""
    lines = []
    for host, gpu in [(host, gpu) for host, node in zip(hosts, gpus, strict=False) for gpu in node]:
        text = gpu["clocks_event_reasons.active"]
        bits = int(text, 16) if text.startswith("0x") else 0  # else it is not known
        if reasons := [name for bit, name in THROTTLED.items() if bits & bit]:
            lines.append(f"GPU {gpu['index']} of {host} is throttled: {', '.join(reasons)}")
    return lines


def lost(device: torch.device) -> bool:
    """Whether an error lasts on the GPU, e.g. a failed assertion: then every call there fails."""
    try:
        if device.type == "cuda":
            torch.cuda.current_stream(device).query()  # does not wait, as peers may never answer
    except RuntimeError:
        return True
    return False


def lacking(found: dict[str, Any], wanted: int | None = None) -> dict[int, str]:
    """Nodes with fewer GPUs than `wanted`, by default than others, or with broken memory -> why."""
    wanted = wanted or max(map(len, found["gpus"]))
    why = {}
    for node, gpus in enumerate(found["gpus"]):
        for i, gpu in enumerate(gpus):
            errors = gpu["ecc.errors.uncorrected.volatile.total"]
            if errors.isdigit() and int(errors):
                why[node] = f"GPU {i} has uncorrected errors of its memory"
        if len(gpus) < wanted:
            why[node] = f"it has {len(gpus)} of {wanted} GPUs"
    return why


def sharing(found: dict[str, Any], tested: range | None = None) -> str | None:
    """`ranks 0 and 1 share a GPU on host`; None where each has its own."""
    owners: dict[tuple[str, str], int] = {}
    for row in found["ranks"]:
        if row["uuid"] and (tested is None or row["rank"] in tested):
            other = owners.setdefault((row["host"], row["uuid"]), row["rank"])
            if other != row["rank"]:
                return f"ranks {other} and {row['rank']} share a GPU on {row['host']}"
    return None


def cuda_graph(step: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """The kernels that `step` launches as one CUDA graph, which costs one launch to replay."""
    step()  # connects NCCL, which a capture must not
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    # NCCL's own watchdog thread must not break the capture: only this thread's calls may
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph.replay
