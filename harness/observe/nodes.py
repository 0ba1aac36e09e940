"""Differences between nodes, GPUs and ranks that make results doubtful, and GPUs in use."""

import re
from collections.abc import Sequence
from statistics import mode
from typing import Any

from harness.benchmark import Benchmark, Observer
from harness.cli import cut
from harness.environment import (
    bounded,
    memory_in_use,
    node_names,
    rank_names,
    shared_gpu,
)
from harness.report import shown

# What is compared: lists of the environment with an entry per node, and entries of ranks and GPUs
OF_NODES = {"CPU": "cpus", "kernel": "kernels", "topology": "topologies"}
OF_RANKS = ("cores", "threads")
OF_GPUS = (
    *("name", "driver_version", "power.limit", "clocks.max.sm"),
    *("ecc.mode.current", "mig.mode.current"),
)


class Nodes(Observer):
    """Prints warnings at the start, and adds `differences` to the environment."""

    def __init__(self, bench: Benchmark) -> None:
        super().__init__(bench)
        if bench.is_first:
            environment = bench.report.environment
            environment["differences"] = differences_of(environment)
            for warning in warnings_of(environment):
                bench.print(f"# warning: {warning}")


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
