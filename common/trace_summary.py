"""Where the time of a step goes, from the events of a Chrome trace of torch's profiler. Pure.

From the trace and not from the profiler's classes, because its format is the steadier of the two.
"""

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from common.intervals import Interval, difference, intersection, length, union

RANGES = ("Forward", "Backward", "Optimizer")  # record_function(name), set by the step itself
COMMUNICATION = re.compile(r"(gloo|nccl|ucc|mpi|xccl):")  # what c10d records of each collective
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH = ("cuda_runtime", "cuda_driver")
# Operators that compute nothing: they enqueue, wait, or run hooks.
NO_COMPUTE = re.compile(r"_?c10d|autograd::|torch::autograd::|profiler::")
WAIT = re.compile(r"_?c10d_functional::wait_tensor")
Event = dict[str, Any]


def read_events(path: Path) -> list[Event]:
    """The timed events of a Chrome trace. Raises ValueError where it is not whole."""
    text = path.read_text(encoding="utf-8", errors="replace")
    events = json.loads(text, strict=False)["traceEvents"]
    return [event for event in events if event.get("ph") == "X" and "cat" in event]


def summarize(events: list[Event], steps: int, device_type: str) -> dict[str, Any]:
    """Seconds a step: compute, communication, both at once (overlapped), neither (idle).

    On CUDA compute is a kernel or copy on any stream, communication an NCCL kernel; on the CPU
    compute is an operator on any thread, communication what c10d records, from the collective's
    start to its end. Communication holds the wait for slower ranks.
    step = compute + communication - overlapped + idle.

    ranges_s: the host's seconds in the ranges of the step; on CUDA also ranges_device_s, when a
    kernel ran that was launched there. Raises ValueError where the trace has no steps.
    """
    on_host = [e for e in events if e["cat"] in ("cpu_op", "user_annotation")]
    marks = [_interval(e) for e in on_host if e["name"].startswith("ProfilerStep#")]
    if not marks:
        raise ValueError("the trace holds no ProfilerStep")
    window = [(min(start for start, _ in marks), max(end for _, end in marks))]
    ranges = {
        name: intersection([_interval(e) for e in on_host if e["name"] == name], window)
        for name in RANGES
    }
    carried = [e for e in on_host if COMMUNICATION.match(e["name"])]
    result: dict[str, Any] = {}
    if device_type == "cuda":
        kernels = [e for e in events if e["cat"] in DEVICE_WORK]
        nccl = [e for e in kernels if "nccl" in e["name"].lower()]
        compute = [_interval(e) for e in kernels if "nccl" not in e["name"].lower()]
        # what c10d records of NCCL on the host ends with enqueueing: its kernels count instead
        carried = [e for e in carried if not e["name"].startswith("nccl:")] + nccl
        result["ranges_device_s"] = {
            name: length(intersection(busy, window)) / 1e6 / steps
            for name, busy in _launched_in(ranges, events, kernels).items()
        }
    else:
        compute = _computing_on_cpu(on_host)
    compute = intersection(compute, window)
    communication = intersection([_interval(e) for e in carried], window)
    seconds = {
        "step_s": length(window),
        "compute_s": length(compute),
        "communication_s": length(communication),
        "overlapped_s": length(intersection(compute, communication)),
        "idle_s": length(difference(window, compute + communication)),
    }
    result |= {name: value / 1e6 / steps for name, value in seconds.items()}
    result["ranges_s"] = {name: length(spans) / 1e6 / steps for name, spans in ranges.items()}
    return result


def _computing_on_cpu(on_host: list[Event]) -> list[Interval]:
    """When operators compute, on any thread but those of a backend, which copies there."""
    training = {e["tid"] for e in on_host if e["name"].startswith(("ProfilerStep#", "autograd::"))}
    backends = {e["tid"] for e in on_host if COMMUNICATION.match(e["name"])} - training
    operators, waits = defaultdict(list), defaultdict(list)
    for event in on_host:
        name, thread = event["name"], event["tid"]
        if WAIT.match(name):
            waits[thread].append(_interval(event))
        elif thread not in backends and event["cat"] == "cpu_op" and _computes(name):
            operators[thread].append(_interval(event))
    return union(
        interval
        for thread, intervals in operators.items()
        for interval in difference(intervals, waits[thread])
    )


def _computes(name: str) -> bool:
    """`aten::mm` and the like, and what inductor has compiled, which has no operators within."""
    return "CompiledFxGraph" in name or ("::" in name and not NO_COMPUTE.match(name))


def _launched_in(
    ranges: dict[str, list[Interval]], events: list[Event], kernels: list[Event]
) -> dict[str, list[Interval]]:
    """The kernels that any thread launched during each range: backward has one of its own."""
    launches = {
        e["args"]["correlation"]: float(e["ts"])
        for e in events
        if e["cat"] in LAUNCH and "correlation" in e.get("args", {})
    }
    found: dict[str, list[Interval]] = {name: [] for name in ranges}
    for kernel in kernels:
        at = launches.get(kernel.get("args", {}).get("correlation"))
        for name, spans in ranges.items():
            if at is not None and any(start <= at < end for start, end in spans):
                found[name].append(_interval(kernel))
    return found


def _interval(event: Event) -> Interval:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])
