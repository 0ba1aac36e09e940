"""What runs were measured on, and in what the two sides of a comparison differ."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from analysis.load import Run

# Where one of these differs, another machine was measured, whatever else was changed.
HARDWARE = ("devices", "topologies", "num_nodes", "local_world_size", "world_size", "cores")
GPU_HARDWARE = ("power.limit", "clocks.max.sm", "ecc.mode.current", "mig.mode.current")
# Not of interest by themselves: rows for each rank and device, and lines derived from them.
IGNORED = ("ranks", "gpus", "differences", "variables", "others")


@dataclass(frozen=True)
class Difference:
    """A field of the environment whose values differ between BASE and TEST."""

    field: str
    base: list[str]  # each value of the side once
    test: list[str]
    hardware: bool


def as_text(value: Any) -> str:
    """A field in a few words. Entries of a list that are alike stand once."""
    entries = value if isinstance(value, list) else [value]
    return ", ".join(dict.fromkeys(str(entry) for entry in entries))


def describe_environment(run: Run) -> dict[str, str]:
    """Each field of the environment as one text.

    A variable, a field that was left out of the keys, and a setting of the GPUs are fields, too.
    """
    environment = run.environment
    fields = {name: value for name, value in environment.items() if name not in IGNORED}
    for name, value in (environment.get("variables") or {}).items():
        fields[f"variables.{name}"] = value
    for name, values in run.left_out.items():
        fields[f"key.{name}"] = values
    fields["cores"] = [rank.get("cores") for rank in environment.get("ranks") or []]
    gpus = [gpu for node in environment.get("gpus") or [] for gpu in node]
    for setting in GPU_HARDWARE:
        fields[f"GPU {setting}"] = [gpu.get(setting) for gpu in gpus]
    texts = {name: as_text(value) for name, value in fields.items()}
    return {name: text for name, text in texts.items() if text not in ("None", "")}


def differences(base: Sequence[Run], test: Sequence[Run]) -> list[Difference]:
    """The fields of the environment whose values differ between the sides; hardware first."""
    environments = [describe_environment(run) for run in (*base, *test)]
    table = pd.DataFrame(environments).fillna("unset")
    differing = []
    for name in table:
        base_values = table[name][: len(base)].unique().tolist()
        test_values = table[name][len(base) :].unique().tolist()
        if set(base_values) != set(test_values):
            is_hardware = name in HARDWARE or name.startswith("GPU ")
            differing.append(Difference(name, base_values, test_values, is_hardware))
    return sorted(differing, key=lambda difference: not difference.hardware)
