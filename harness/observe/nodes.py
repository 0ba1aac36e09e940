"""Nodes, their GPUs and their networks: differences between nodes, GPUs and ranks, and problems at
the start; throttling and network errors during the run."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from statistics import mode
from typing import Any

import psutil

from common.errors import cut
from harness.benchmark import Benchmark, Observer
from harness.environment import (
    bounded,
    gpu_problems,
    gpu_state,
    memory_in_use,
    node_names,
    rank_names,
    shared_gpu,
    used_gpus,
)
from harness.report import shown

# What is compared: lists of the environment with an entry per node, and entries of ranks and GPUs
OF_NODES = {"CPU": "cpus", "kernel": "kernels", "topology": "topologies"}
OF_RANKS = ("cores", "threads")
OF_GPUS = (
    *("name", "driver_version", "power.limit", "clocks.max.sm"),
    *("ecc.mode.current", "mig.mode.current"),
)
# The bits of clocks_event_reasons.active that slow a GPU down: NVML's nvmlClocksEventReasons.
THROTTLED = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}
POWER_CAP = "power cap"
# Fields of nvidia-smi with the time for which the driver slowed down a GPU, such as `7 us`. Older
# drivers lack them.
SLOWED = {
    "clocks_event_reasons_counters.sw_power_cap": POWER_CAP,
    "clocks_event_reasons_counters.sw_thermal_slowdown": "software thermal",
    "clocks_event_reasons_counters.hw_thermal_slowdown": "hardware thermal",
    "clocks_event_reasons_counters.hw_power_brake_slowdown": "power brake",
}
COUNTERS = ",".join(["index", *SLOWED])  # the query of nvidia-smi
LEAST_SLOWED_S = 0.1  # shorter slowdowns within a run are not reported
COUNTED = ("errin", "errout", "dropin", "dropout")  # by psutil, for each network interface

Gpus = list[dict[str, str]]  # the state of each GPU of a node, from `gpu_state`
Slowed = list[dict[str, float]]  # seconds by reason, for each GPU of a node that the job uses
Counters = dict[str, int]  # by name, such as `eth0 dropin`


class Nodes(Observer):
    """Prints warnings at the start, and adds `differences` to the environment. The first rank of
    each node observes its network and the GPUs that ranks use."""

    def __init__(self, bench: Benchmark) -> None:
        super().__init__(bench)
        environment = bench.report.environment
        self.is_first_of_node = bench.job.local_rank == 0
        self.reads_gpus = self.is_first_of_node and bool(environment["cuda"])
        self.slowed_before = gpu_state(COUNTERS) if self.reads_gpus else []
        self.network_before = network_errors() if self.is_first_of_node else {}
        if bench.is_first:
            environment["differences"] = differences_of(environment)
            warnings = [f"warning: {warning}" for warning in warnings_of(environment)]
            for line in warnings + gpu_warnings(environment):
                bench.print(f"# {line}")

    def end(self, last_line: dict[str, Any]) -> list[str]:
        """Add an entry per node to `network`, and on CUDA also to `gpus` and `slowed_s`."""
        environment, row = self.bench.report.environment, None
        if self.is_first_of_node:
            gpus = used_gpus(gpu_state(), environment["ranks"]) if self.reads_gpus else []
            after = gpu_state(COUNTERS) if self.reads_gpus else []
            slowed = slowed_seconds(self.slowed_before, after, [gpu["index"] for gpu in gpus])
            row = gpus, slowed, growth(self.network_before, network_errors())
        rows = [row for row in self.bench.job.gather(row) or [] if row]
        if not rows:
            return []
        hosts = environment["hosts"]
        all_gpus, all_slowed, last_line["network"] = map(list, zip(*rows, strict=True))
        # on a single node the data does not use the network
        lines = network_lines(hosts, last_line["network"]) if len(rows) > 1 else []
        if environment["cuda"]:
            last_line |= {"gpus": all_gpus, "slowed_s": all_slowed}
            lines += slowed_lines(hosts, all_gpus, all_slowed)
        return lines


def differences_of(environment: dict[str, Any]) -> list[str]:
    """Return a line for each value that is not the most common one on all nodes, GPUs or ranks."""
    hosts, rows, lines = node_names(environment), environment["ranks"], list[str]()
    for name, listed in OF_NODES.items():
        lines += unusual(name, environment[listed], hosts)
    gpus = {
        f"GPU {gpu['index']} of {host}": gpu
        for host, of_node in zip(hosts, environment["gpus"], strict=True)
        for gpu in of_node
    }
    for name in OF_GPUS:
        lines += unusual(re.sub("[_.]", " ", name), [x[name] for x in gpus.values()], [*gpus])
    values_of = {name: [row[name] for row in rows] for name in OF_RANKS}
    for other in environment["other_variables"]:  # than those of rank 0
        for name, value in other["variables"].items():
            values = values_of.setdefault(name, [environment["variables"].get(name)] * len(rows))
            for rank in other["ranks"]:
                values[rank] = value
    for name, values in values_of.items():
        lines += unusual(name, values, rank_names(environment))
    return bounded(lines, "differences")


def unusual(what: str, values: Sequence[Any], names: Sequence[str]) -> list[str]:
    """Return `power limit of GPU 1 of vm: 500 W (700 W elsewhere)` for each value but the most
    common one. names: what has the values."""
    usual, names_of = mode(values or [None]), dict[Any, list[str]]()
    for value, name in zip(values, names, strict=True):
        names_of.setdefault(value, []).append(name)
    names_of.pop(usual, None)
    if what == "topology":  # of many lines
        return [f"topology of {cut(some)}: another one" for some in names_of.values()]
    return [
        f"{what} of {cut(some)}: {shown(value)} ({shown(usual)} elsewhere)"
        for value, some in names_of.items()
    ]


def warnings_of(environment: dict[str, Any]) -> list[str]:
    """Return a line for each condition that makes results doubtful."""
    warnings = list(environment["differences"])
    if shared := shared_gpu(environment):
        warnings.append(f"{shared}: each one's times include the other's work")
    names = node_names(environment)
    held = [f"{names[node]}: {why}" for node, why in memory_in_use(environment).items()]
    return warnings + bounded(held, "nodes with memory in use")


def gpu_warnings(environment: dict[str, Any]) -> list[str]:
    """Return a line for each GPU that is throttled or broken, for missing GPUs, and for the first
    rank on CUDA with a single core."""
    hosts, warnings = environment["hosts"], []
    for host, gpus in zip(hosts, environment["gpus"], strict=False):
        for gpu in gpus:
            text = gpu["clocks_event_reasons.active"]
            bits = int(text, 16) if text.startswith("0x") else 0  # any other text: unknown
            if reasons := ", ".join(name for bit, name in THROTTLED.items() if bits & bit):
                warnings.append(f"GPU {gpu['index']} of {host} is throttled: {reasons}")
    warnings += [f"{hosts[node]}: {why}" for node, why in gpu_problems(environment).items()]
    few = [row["rank"] for row in environment["ranks"] if row["uuid"] and row["cores"] == 1]
    warnings += [f"rank {r} has 1 core for its GPU; see srun --cpus-per-task" for r in few[:1]]
    return bounded([f"warning: {warning}" for warning in warnings], "warnings")


def slowed_seconds(before: Gpus, after: Gpus, indices: Sequence[str]) -> Slowed | None:
    """Return how long each of these GPUs was slowed down between two readings of COUNTERS; None if
    the driver has no such counters. (After the last case the current state is that of an idle GPU.)
    """
    starts, ends = ({gpu["index"]: gpu for gpu in gpus} for gpus in (before, after))
    slowed, known = Slowed(), False
    for index in indices:
        start, end = starts.get(index, {}), ends.get(index, {})
        grew_s = {
            reason: seconds_of(end.get(counter, "")) - seconds_of(start.get(counter, ""))
            for counter, reason in SLOWED.items()
        }
        known = known or not all(map(math.isnan, grew_s.values()))
        slowed.append({reason: s for reason, s in grew_s.items() if s >= LEAST_SLOWED_S})
    return slowed if known else None


def seconds_of(text: str) -> float:
    """Return 1.5 for `1500000 us`; nan if unknown."""
    number = text.removesuffix(" us")
    return int(number) / 1e6 if number.isdigit() else math.nan


def slowed_lines(hosts: list[str], gpus: list[Gpus], slowed: list[Slowed | None]) -> list[str]:
    """Return a line for each GPU that was slowed down, with the seconds for each reason, and one
    that names the hosts without counters. A power cap alone is a note, because large matrix
    products reach it normally. Warnings come first."""
    warnings, notes, unknown = list[str](), list[str](), list[str]()
    for host, node, seconds_of_node in zip(hosts, gpus, slowed, strict=True):
        if node and seconds_of_node is None:
            unknown.append(f"{node[0]['driver_version']} of {host}")
        for row, seconds in zip(node, seconds_of_node or [], strict=False):
            gpu = row["index"]
            reasons = ", ".join(f"{reason} for {s:.1f} s" for reason, s in seconds.items())
            if seconds.keys() - {POWER_CAP}:
                warnings.append(f"warning: GPU {gpu} of {host} was throttled: {reasons}")
            elif seconds:
                notes.append(f"note: GPU {gpu} of {host} was limited by its power: {reasons}")
    lines = bounded(warnings + notes, "GPUs")
    if unknown:
        note = f"note: no throttle counters (driver {cut(unknown)}): GPUs may have been slowed down"
        lines.append(note)
    return lines


def network_errors() -> Counters:
    """Return the errors and drops of each network interface of this node, except loopback, since
    its start, including those of other programs."""
    try:
        interfaces = psutil.net_io_counters(pernic=True)
    except OSError:  # a system without them
        return {}
    return {
        f"{name} {what}": getattr(interface, what)
        for name, interface in interfaces.items()
        if name != "lo"
        for what in COUNTED
    }


def growth(before: Counters, after: Counters) -> Counters:
    """Return the increase of each counter that grew between two readings, the largest first."""
    grew = Counter({name: count - before.get(name, count) for name, count in after.items()})
    return dict((+grew).most_common())


def network_lines(hosts: list[str], grew: list[Counters]) -> list[str]:
    """Return a line for each host with counters that grew, the largest sum first."""
    by_host = dict(zip(hosts, grew, strict=True))  # nodes on one host have the same counters
    lines = []
    for host in sorted(by_host, key=lambda host: -sum(by_host[host].values())):
        if counts := [f"{more:,} {name}" for name, more in by_host[host].items()]:
            lines.append(f"warning: {host} counted during the run: {cut(counts)}")
    return bounded(lines, "nodes")
