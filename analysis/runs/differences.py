"""The environment in which runs were measured, and how it differs between two sides."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from analysis.runs.load import Run
from analysis.show import join_distinct

# If one of these fields differs, the sides were measured on different machines.
HARDWARE = ("devices", "topologies", "num_nodes", "local_world_size", "world_size", "cores")
GPU_HARDWARE = ("power.limit", "clocks.max.sm", "ecc.mode.current", "mig.mode.current")
# Details of each rank and device, and lines derived from them, which are compared in other ways.
IGNORED = (
    *("ranks", "gpus", "gpu_counts", "differences", "variables", "other_variables", "others"),
    "contents",
)


@dataclass(frozen=True)
class Difference:
    """A field of the environment whose values differ between BASE and TEST."""

    field: str
    base: list[str]  # distinct values
    test: list[str]
    hardware: bool


def parts_of(run: Run) -> list[int]:
    """The numbers of the parts of a resumed report that contain cases, counting from 0; [0] if the
    report was never resumed."""
    return sorted({row.part or 0 for row in run.rows.values()})


def resumed_text(run: Run) -> str:
    """`2 cases were measured 2026-11-28 03:12 UTC on node1, 3 ... on node2`; "" if a single run
    measured all cases of the report."""
    parts = [row.part or 0 for row in run.rows.values()]
    numbers = parts_of(run)
    if len(numbers) < 2:
        return ""
    counts = [(parts.count(part), run.when_and_where(part)) for part in numbers]
    (first, when), *others = counts
    noun = "case was" if first == 1 else "cases were"
    texts = [f"{first} {noun} measured {when}", *(f"{count} {place}" for count, place in others)]
    return ", ".join(texts)


def describe_environment(run: Run) -> dict[str, str]:
    """Each field of the environment that has a value, as text."""
    described = {}
    for name, value in fields_of(run).items():
        entries = value if isinstance(value, list) else [value]
        text = join_distinct(str(entry) for entry in entries)
        if text not in ("None", ""):
            described[name] = text
    return described


def fields_of(run: Run) -> dict[str, Any]:
    """The environment, with a field for each variable, each removed field of the keys, and each
    setting of the GPUs."""
    environment = run.environment
    fields = {name: value for name, value in environment.items() if name not in IGNORED}
    variables = environment.get("variables") or {}
    for name, value in variables.items():
        fields[f"variables.{name}"] = value
    for part, digest in (environment.get("contents") or {}).items():
        fields[f"contents of {part}"] = digest
    hosts = [run.part_entry(part, "hosts") or [] for part in parts_of(run)]
    fields["hosts"] = list(itertools.chain(*hosts)) or environment.get("hosts")
    for name, values in run.left_out.items():
        fields[f"key.{name}"] = values
    ranks = environment.get("ranks") or []
    fields["cores"] = [rank.get("cores") for rank in ranks]
    fields["threads"] = [rank.get("threads") for rank in ranks]
    nodes = environment.get("gpus") or []
    gpus = list(itertools.chain(*nodes))
    for setting in GPU_HARDWARE:
        fields[f"GPU {setting}"] = [gpu.get(setting) for gpu in gpus]
    return fields


def differences(base: Sequence[Run], test: Sequence[Run]) -> list[Difference]:
    """The fields of the environment whose values differ between the sides, hardware first."""
    environments = [describe_environment(run) for run in (*base, *test)]
    differing = []
    for name in dict.fromkeys(name for environment in environments for name in environment):
        values = [environment.get(name, "unset") for environment in environments]
        of_base, of_test = dict.fromkeys(values[: len(base)]), dict.fromkeys(values[len(base) :])
        if of_base.keys() != of_test.keys():
            is_hardware = name in HARDWARE or name.startswith("GPU ")
            differing.append(Difference(name, list(of_base), list(of_test), is_hardware))
    return sorted(differing, key=lambda difference: not difference.hardware)
