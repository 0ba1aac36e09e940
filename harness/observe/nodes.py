"""Differences between nodes and ranks that make results doubtful, and GPUs that are in use."""

import json
import re
from collections.abc import Mapping, Sequence
from statistics import mode
from typing import Any

from harness.benchmark import Benchmark, Observer
from harness.cli import cut
from harness.environment import (
    bounded,
    memory_in_use,
    node_names,
    node_of_each,
    other_variables,
    shared_gpu,
)
from harness.report import shown

OF_NODES = ("device", "cpu", "kernel", "cores", "topology")  # expected to be equal on all nodes
LISTS = {"cpu": "cpus", "kernel": "kernels", "topology": "topologies", "gpus": "gpus"}
OF_GPUS = (  # expected to be equal for all GPUs
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
    """Return a line for each host whose ranks have other variables, and each node that differs."""
    variables, ranks = environment["variables"], environment["ranks"]
    of_ranks = [variables] * len(ranks)
    for row in environment["other_variables"]:
        both = variables | row["variables"]
        for rank in row["ranks"]:
            of_ranks[rank] = {name: value for name, value in both.items() if value is not None}
    of_node = dict(zip(reversed(node_of_each(environment)), reversed(ranks), strict=True))
    nodes = [
        of_node[number] | {name: environment[listed][number] for name, listed in LISTS.items()}
        for number in range(len(of_node))
    ]
    lines = variable_lines(of_ranks, [rank["host"] for rank in ranks])
    return lines + node_lines(nodes, ranks)


def warnings_of(environment: dict[str, Any]) -> list[str]:
    """Return a line for each condition that makes results doubtful."""
    warnings = list(environment["differences"])
    if shared := shared_gpu(environment):
        warnings.append(f"{shared}: each one's times include the other's work")
    names = node_names(environment)
    held = [f"{names[node]}: {why}" for node, why in memory_in_use(environment).items()]
    return warnings + bounded(held, "nodes with memory in use")


def variable_lines(of_ranks: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> list[str]:
    """Return a line per host and set of variables that is not the most common one, with both
    values."""
    texts = [json.dumps(dict(variables), sort_keys=True) for variables in of_ranks]
    first = texts.index(mode(texts))  # a rank with the most common set
    lines = []
    for row in other_variables(of_ranks, first):
        parts = [
            f"{name} {shown(value)} (rank {first}: {shown(of_ranks[first].get(name))})"
            for name, value in row["variables"].items()
        ]
        for host in dict.fromkeys(hosts[rank] for rank in row["ranks"]):
            ranks = cut([rank for rank in row["ranks"] if hosts[rank] == host])
            lines.append(f"variables of rank {ranks} on {host} differ: {cut(parts, 16)}")
    return bounded(lines, "hosts with other variables")


def node_lines(nodes: list[dict[str, Any]], ranks: list[dict[str, Any]]) -> list[str]:
    """Return a line for each node that differs from most nodes, with both values of each property.
    nodes: of each node, its `host`, its OF_NODES, and its `gpus`."""
    lines = []
    usual_threads = mode(row["threads"] for row in ranks)
    other_threads: dict[int, list[dict[str, Any]]] = {}  # by node: ranks with another number
    for row, number in zip(ranks, node_of_each({"ranks": ranks}), strict=True):
        if row["threads"] != usual_threads:
            other_threads.setdefault(number, []).append(row)
    usual_of = {name: mode(node[name] for node in nodes) for name in OF_NODES}
    gpus = [gpu for node in nodes for gpu in node["gpus"]]
    usual_gpu = {name: mode(gpu[name] for gpu in gpus) for name in OF_GPUS} if gpus else {}
    for number, node in enumerate(nodes):
        parts = []
        for name, usual in usual_of.items():
            if node[name] != usual:
                values = "" if name == "topology" else f" {node[name]} ({usual} elsewhere)"
                parts.append(f"{name}{values}")
        for name, usual in usual_gpu.items():
            if odd := [gpu for gpu in node["gpus"] if gpu[name] != usual]:
                got = cut(list(dict.fromkeys(gpu[name] for gpu in odd)))
                where = f"GPU {cut([gpu['index'] for gpu in odd])}"
                where = "its GPUs" if len(odd) == len(node["gpus"]) else where
                parts.append(f"{re.sub('[_.]', ' ', name)} of {where} {got} ({usual} elsewhere)")
        if odd_ranks := other_threads.get(number):
            numbers = cut([row["rank"] for row in odd_ranks])
            got = cut(list(dict.fromkeys(row["threads"] for row in odd_ranks)))
            parts.append(f"threads of rank {numbers}: {got} ({usual_threads} elsewhere)")
        if parts:
            lines.append(f"{node['host']} differs: {'; '.join(parts)}")
    return bounded(lines, "nodes that differ")
