"""The environment in which runs were measured, and how it differs between two sides."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from analysis.runs.load import Run
from analysis.show import join_distinct
from harness.cli import cut

# If one of these fields differs, the sides were measured on different machines.
HARDWARE = ("devices", "topologies", "num_nodes", "local_world_size", "world_size", "cores")
GPU_HARDWARE = ("power.limit", "clocks.max.sm", "ecc.mode.current", "mig.mode.current")
# Details of each rank and device, and lines derived from them, which are compared in other ways.
IGNORED = (
    *("ranks", "gpus", "gpu_counts", "differences", "variables", "other_variables", "others"),
    "contents",
)
CONTENTS = "contents of "  # and a module: a field with the hash of its source


@dataclass(frozen=True)
class Difference:
    """A field of the environment whose values differ between BASE and TEST."""

    field: str
    base: list[str]  # distinct values
    test: list[str]
    hardware: bool


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
    for module, digest in run.contents.items():
        fields[f"{CONTENTS}{module}"] = digest
    hosts = [row.hosts for row in run.rows.values()]
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
    modules, of_modules = list[str](), (list[str](), list[str]())
    for name in dict.fromkeys(name for environment in environments for name in environment):
        values = [environment.get(name, "unset") for environment in environments]
        of_base, of_test = dict.fromkeys(values[: len(base)]), dict.fromkeys(values[len(base) :])
        if name.startswith(CONTENTS):  # modules may be imported late
            known = [[x for x in side if x != "unset"] for side in (of_base, of_test)]
            if all(known) and set(known[0]) != set(known[1]):
                modules.append(name.removeprefix(CONTENTS))
                for hashes, more in zip(of_modules, known, strict=True):
                    hashes += more
        elif of_base.keys() != of_test.keys():
            is_hardware = name in HARDWARE or name.startswith("GPU ")
            differing.append(Difference(name, list(of_base), list(of_test), is_hardware))
    if modules:
        field = f"{CONTENTS}{cut(modules, 3)}"
        differing.append(Difference(field, of_modules[0][:3], of_modules[1][:3], False))
    return sorted(differing, key=lambda difference: not difference.hardware)
