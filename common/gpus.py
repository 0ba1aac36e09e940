"""GPUs: what nvidia-smi and NCCL say about them, what is wrong with them, and CUDA graphs."""

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from common.cli import cut, nccl_warnings
from common.groups import Job, gather

GPU_STATE = (
    *("index", "uuid", "pci.bus_id", "name", "driver_version", "mig.mode.current"),
    *("ecc.mode.current", "ecc.errors.uncorrected.volatile.total", "power.limit"),
    *("clocks.current.sm", "clocks.max.sm", "clocks.current.memory", "temperature.gpu"),
    "clocks_event_reasons.active",
)
# The bits of clocks_event_reasons.active that slow a GPU down: NVML's nvmlClocksEventReasons.
THROTTLED = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}
# How long a GPU was slowed down since its driver was loaded, `7 us`. Older drivers lack them.
POWER_CAP = "clocks_event_reasons_counters.sw_power_cap"
SLOWED = {
    POWER_CAP: "power cap",
    "clocks_event_reasons_counters.sw_thermal_slowdown": "software thermal",
    "clocks_event_reasons_counters.hw_thermal_slowdown": "hardware thermal",
    "clocks_event_reasons_counters.hw_power_brake_slowdown": "power brake",
}
LEAST_SLOWED_S = 0.1  # shorter slowdowns within a run are not worth a line
MOST_LINES = 16  # of a kind, at the end of a run

Nodes = list[list[dict[str, str]]]  # the state of each GPU, by node


def run(command: list[str]) -> str:
    """The output of a command; "" where the command is missing, slow or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def gpu_state() -> list[dict[str, str]]:
    """What nvidia-smi says about each GPU of this node; [] where it says nothing."""
    for fields in ((*GPU_STATE, *SLOWED), GPU_STATE):
        text = run(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"])
        rows = [line.split(", ") for line in text.splitlines()]
        gpus = [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]
        if gpus:
            return gpus
    return []


def at_the_end(job: Job, environment: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The state of all GPUs after the last case, and what NCCL says: entries for the report's last
    line, and lines to print. All ranks call it. Empty on the CPU, and on all ranks but rank 0.

    environment: that of the report.
    """
    row = None  # only the first rank of a node speaks for its GPUs
    if job.local_rank == 0 and environment["cuda"]:
        log = Path(os.environ.get("NCCL_DEBUG_FILE", ""))  # join.py sets it
        text = log.read_text(errors="replace") if log.is_file() else ""
        row = gpu_state(), nccl_choices(text), nccl_warnings(text)
    nodes = [row for row in gather(row) or [] if row]
    if not nodes:
        return {}, []
    gpus = [state for state, _, _ in nodes]
    nccl = [choices for _, choices, _ in nodes]
    hosts = environment["hosts"]
    slowed = slowed_down(hosts, environment["gpus"], gpus)
    lines = slowed[:MOST_LINES]
    if more := len(slowed[MOST_LINES:]):
        lines.append(f"... and {more} more GPUs")
    if lacking_counters := without_counters(hosts, gpus):
        lines.append(lacking_counters)
    warned: dict[str, list[str]] = {}  # by which hosts
    for host, (_, _, warnings) in zip(hosts, nodes, strict=True):
        for warning in warnings:
            warned.setdefault(warning, []).append(host)
    for warning, where in list(warned.items())[:MOST_LINES]:
        lines.append(f"warning: NCCL on {cut(where)}: {warning}")
    chosen = [f"{name} {', '.join(values)}" for name, values in nccl[0].items() if values]
    if chosen:
        lines.append(f"NCCL chose {'; '.join(chosen)}")
    return {"gpus": gpus, "nccl": nccl}, lines


def nccl_choices(log: str) -> dict[str, list[str]]:
    """The networks and transports in a log of NCCL_DEBUG=INFO, and whether it set up NVLS."""
    mentioned = {
        "network": re.findall(r"Using network (\S+)", log),
        "transport": re.findall(r"Channel \S+ : \S+ -> \S+(?: \[\w+\])? via (\S+)", log),
        "nvls": re.findall(r"NVLS multicast support is ((?:not )?available)", log),
    }
    return {name: sorted(set(values)) for name, values in mentioned.items()}


def throttled(hosts: list[str], gpus: Nodes) -> list[str]:
    """A line for each GPU that runs slower than it could right now, with the reason."""
    lines = []
    for host, node in zip(hosts, gpus, strict=False):
        for gpu in node:
            text = gpu["clocks_event_reasons.active"]
            bits = int(text, 16) if text.startswith("0x") else 0  # other texts mean: not known
            reasons = [name for bit, name in THROTTLED.items() if bits & bit]
            if reasons:
                lines.append(f"GPU {gpu['index']} of {host} is throttled: {', '.join(reasons)}")
    return lines


def slowed_down(hosts: list[str], before: Nodes, after: Nodes) -> list[str]:
    """A line for each GPU that was slowed down between two states, with the seconds of each reason.

    A power cap alone is a note: it is normal under large products. Heat and a power brake are not,
    so they are a warning, and their GPUs come first. before, after: what `gpu_state` said on each
    node. One moment tells little: after the last case the GPUs are idle.
    """
    warnings, notes = list[str](), list[str]()
    for host, *states in zip(hosts, before, after, strict=False):
        for gpu, now in zip(*states, strict=False):
            slowed_s = dict[str, float]()
            for counter in SLOWED:
                start_s, end_s = seconds_of(gpu, counter), seconds_of(now, counter)
                if start_s is not None and end_s is not None and end_s - start_s >= LEAST_SLOWED_S:
                    slowed_s[counter] = end_s - start_s
            reasons = ", ".join(f"{SLOWED[name]} for {s:.1f} s" for name, s in slowed_s.items())
            name = f"GPU {gpu['index']} of {host}"
            if slowed_s.keys() - {POWER_CAP}:
                warnings.append(f"warning: {name} was throttled: {reasons}")
            elif slowed_s:
                notes.append(f"note: {name} was limited by its power: {reasons}")
    return warnings + notes


def without_counters(hosts: list[str], gpus: Nodes) -> str | None:
    """A line that names the hosts whose driver does not count how long it slowed GPUs down; None if
    all do."""
    drivers: dict[str, list[str]] = {}  # the hosts with each driver that lacks them
    for host, node in zip(hosts, gpus, strict=False):
        for gpu in node[:1]:
            if all(seconds_of(gpu, counter) is None for counter in SLOWED):
                drivers.setdefault(gpu["driver_version"], []).append(host)
    if not drivers:
        return None
    where = "; ".join(f"{version} on {cut(names)}" for version, names in drivers.items())
    return f"note: this driver has no throttle counters ({where}): GPUs may have been slowed down"


def seconds_of(gpu: dict[str, str], counter: str) -> float | None:
    """A counter of `gpu_state`, from `1500000 us`; None if it is not known."""
    number = gpu.get(counter, "").removesuffix(" us")
    return int(number) / 1e6 if number.isdigit() else None


def lost(device: torch.device) -> bool:
    """Whether this process can no longer use its GPU, e.g. after an assertion failed in a kernel:
    then every call fails."""
    try:
        if device.type == "cuda":
            torch.cuda.current_stream(device).query()  # does not wait: peers may never answer
    except RuntimeError:
        return True
    return False


def lacking(environment: dict[str, Any], wanted: int | None = None) -> dict[int, str]:
    """The nodes with broken memory or with too few GPUs -> why.

    wanted: how many GPUs a node should have; by default as many as the node with the most.
    """
    wanted = wanted or max(map(len, environment["gpus"]))
    why = {}
    for node, gpus in enumerate(environment["gpus"]):
        for i, gpu in enumerate(gpus):
            errors = gpu["ecc.errors.uncorrected.volatile.total"]
            if errors.isdigit() and int(errors):
                why[node] = f"GPU {i} has uncorrected errors of its memory"
        if len(gpus) < wanted:
            why[node] = f"it has {len(gpus)} of {wanted} GPUs"
    return why


def sharing(environment: dict[str, Any], tested: range | None = None) -> str | None:
    """`ranks 0 and 1 share a GPU on host`; None where each rank has a GPU of its own.

    tested: look only at these ranks.
    """
    owners: dict[tuple[str, str], int] = {}
    for row in environment["ranks"]:
        if row["uuid"] and (tested is None or row["rank"] in tested):
            other = owners.setdefault((row["host"], row["uuid"]), row["rank"])
            if other != row["rank"]:
                return f"ranks {other} and {row['rank']} share a GPU on {row['host']}"
    return None


def sharers(environment: dict[str, Any], rank: int) -> int:
    """How many ranks use the GPU of this rank, itself included; 1 where it is on the CPU.

    The UUIDs tell: torch's device count is 1 on all ranks where each sees only its own GPU.
    """
    places = [(row["host"], row["uuid"]) for row in environment["ranks"]]
    return places.count(places[rank]) if places[rank][1] else 1


def cuda_graph(step: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """The kernels that `step` launches as one CUDA graph, which costs one launch to replay."""
    step()  # connects NCCL, which a capture must not
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    # "thread_local": a call of NCCL's watchdog thread must not break this thread's capture
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph.replay
