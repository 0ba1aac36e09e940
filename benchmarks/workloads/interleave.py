"""--interleave of ddp_sweep.py and compile_sweep.py: one case that compares several settings.

The settings are timed in alternating blocks. The step of the first setting is the step of the case,
and its metrics have plain names. The step of every other setting is a part named by the setting's
label, and its metrics start with that label, as in `25MB bf16 step_s`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from benchmarks.workloads.settings import fastest
from common.report import Case
from common.table import Columns, Table


def split_case(case: Case, labels: Sequence[str], shared: Sequence[str] = ()) -> list[Case]:
    """One row per setting, named by its label; the case itself if it failed or has one setting.

    shared: names of metrics that were measured once and hold for every setting.
    """
    if case.failed or len(labels) < 2:
        return [case]
    rows = []
    for label in labels:
        if label == labels[0]:
            metrics = {name: value for name, value in case.metrics.items() if " " not in name}
        else:
            metrics = {name: case.metrics[name] for name in shared if name in case.metrics}
        prefix = f"{label} "
        for name, value in case.metrics.items():
            if name.startswith(prefix):
                metrics[name.removeprefix(prefix)] = value
        rows.append(replace(case, name=label, metrics=metrics))
    return rows


def compare_rows(rows: Sequence[Case], name_of: Callable[[Case], str]) -> list[str]:
    """`ddp eager is 1.12 times (1.08 to 1.17) as fast as fsdp2 eager` for each setting but the
    first; for three or more settings also whether one of them is the fastest."""
    first, *names = map(name_of, rows)
    sentences = []
    for name, row in zip(names, rows[1:], strict=True):
        speed = row.metrics["speed"]
        if speed.may_be(1):
            difference = f"{name} and {first} do not differ significantly"
            sentences.append(f"{difference}: {speed.times()} as fast")
        else:
            sentences.append(f"{name} is {speed.times()} as fast as {first}")
    leads = {name_of(row): row.metrics.get("lead_of_fastest") for row in rows}
    if len(leads) > 2:
        [best] = [name for name, lead in leads.items() if lead is None]
        sentences.append(fastest(best, {name: lead for name, lead in leads.items() if lead}))
    return sentences


class SettingsTable(Table):
    """A table with one row per setting of a case."""

    def __init__(
        self, columns: Columns, split: Callable[[Case], list[Case]], labels: Iterable[str]
    ) -> None:
        """split: makes the rows of a case. labels: of all rows to come."""
        super().__init__(columns, [max(labels, key=len)])
        self.split = split

    def make_room(self, names: Iterable[str]) -> None:
        """The first column is as wide as the longest label; a case's own name has no row."""

    def rows_of(self, case: Case) -> list[Case]:
        return self.split(case)
