"""Comparison of settings: timed alternately within one case, or in cases one after the other.

In an interleaved case (--interleave), the step of the first setting is the step of the case, and
its metrics have plain names. The step of every other setting is a part named by the setting's
label, and its metrics start with that label, as in `25MB bf16 step_s`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from common.stats import Estimate, Times, mean_time
from common.table import Columns, Table
from harness.cli import cut
from harness.exits import as_started
from harness.report import Case

# Ends an answer that lists the times of several cases
SEQUENTIAL = "these were timed one after the other; "
SEQUENTIAL += f"use {as_started('analysis/ab.py')} to compare them"
NOT_COMPARED = "cannot be compared, because their ratio has no interval"
NEAR = 1.05  # a ratio of means this close to an interval does not contradict it


def compare_settings(times: Times, labels: list[str]) -> dict[str, Any]:
    """Return the ratios of settings that were timed alternately. The first one is the step.

    - `{label} speed`: how many times as fast as the first setting it is
    - `{label} lead_of_fastest`: how many times as fast as it the setting with the shortest step is
    """
    steps = {label: "step" if label == labels[0] else label for label in labels}
    best = min(labels, key=lambda label: times.mean(steps[label]).value)
    confidence = simultaneous(len(labels))
    metrics = {}
    for label, step in steps.items():
        if label != labels[0]:
            metrics[f"{label} speed"] = times.ratio("step", step, confidence)
        if label != best:
            metrics[f"{label} lead_of_fastest"] = times.ratio(step, steps[best], confidence)
    return metrics


def simultaneous(count: int) -> float:
    """Return the confidence of each ratio to one of `count` steps such that all hold at 95%: 1 -
    0.05 / (count - 1) (Bonferroni). It covers `fastest`, too: a step is called the fastest by
    mistake only if it wins against the actual fastest one, and there are count - 1 such pairs."""
    return 1 - 0.05 / (count - 1)


def fastest(name: str, leads: Mapping[str, Estimate]) -> str:
    """Say whether a setting is the fastest, which requires that it wins against every other one.
    leads: how many times as fast as each other it is, with intervals of confidence `simultaneous`.
    """
    if unknown := [other for other, lead in leads.items() if lead.low is None]:
        return (
            f"which setting is the fastest is unknown: {name} and {cut(unknown, 3)} {NOT_COMPARED}"
        )
    alike = {other: lead for other, lead in leads.items() if lead.may_be(1)}
    if alike:
        several = cut([f"{other}: {lead.as_factor()}" for other, lead in alike.items()], 3)
        return f"no setting is the fastest: {name} does not differ significantly from {several}"
    following = min(leads, key=lambda other: leads[other].value)
    words = f"{leads[following].as_factor()} as fast as {following}, the next"
    return f"{name} is the fastest of {len(leads) + 1} settings, {words}"


def split_case(case: Case, labels: Sequence[str], shared: Sequence[str] = ()) -> list[Case]:
    """Return a row per setting; the case itself if it failed or has one setting. shared: metrics
    that were measured once and hold for every setting."""
    if case.failed or len(labels) < 2:
        return [case]
    rows = []
    for label in labels:
        if label == labels[0]:
            metrics = {name: value for name, value in case.metrics.items() if " " not in name}
        else:
            metrics = {name: case.metrics[name] for name in shared if name in case.metrics}
        own = {"step": case.samples_s[label]} if label in case.samples_s else {}
        prefix = f"{label} "
        for name, value in case.metrics.items():
            if name.startswith(prefix):
                metrics[name.removeprefix(prefix)] = value
        rows.append(replace(case, name=label, metrics=metrics, samples_s=case.samples_s | own))
    return rows


def of_all(speed: Estimate, first: Case, row: Case, part: str = "step", scale: float = 1) -> str:
    """Return ` by medians, and 1.26 times by means` if the ratio of mean times is not near the
    interval of the ratio of medians, because some iterations stall; "" if it is.

    The ratio of means is that of a part of the first row to the step of the other, times scale.
    """
    ours, theirs = row.samples_s.get("step"), first.samples_s.get(part)
    if speed.low is None or speed.high is None or not ours or not theirs:
        return ""
    quotient = mean_time(theirs) / mean_time(ours) * scale
    if speed.low / NEAR <= quotient <= speed.high * NEAR:
        return ""
    return f" by medians, and {quotient:.2f} times by means"


def compare_rows(rows: Sequence[Case], name_of: Callable[[Case], str]) -> list[str]:
    """Return `ddp eager is 1.12 times (1.08 to 1.17) as fast as fsdp2 eager` for each setting but
    the first; for three or more settings also whether one of them is the fastest."""
    first, *names = map(name_of, rows)
    sentences, by_medians = [], ""
    for name, row in zip(names, rows[1:], strict=True):
        speed = row.metrics["speed"]
        stalls = of_all(speed, rows[0], row)
        by_medians = "by medians, " if stalls else by_medians
        if speed.low is None:
            sentences.append(f"{name} and {first} {NOT_COMPARED}")
        elif speed.may_be(1):
            difference = f"{name} and {first} do not differ significantly"
            sentences.append(f"{difference}: {speed.as_factor()} as fast{stalls}")
        else:
            sentences.append(f"{name} is {speed.as_factor()} as fast as {first}{stalls}")
    leads = {name_of(row): row.metrics.get("lead_of_fastest") for row in rows}
    if len(leads) > 2:
        [best] = [name for name, lead in leads.items() if lead is None]
        of_others = {name: lead for name, lead in leads.items() if lead}
        sentences.append(by_medians + fastest(best, of_others))
    return sentences


class SettingsTable(Table):
    """A table with one row per setting of a case."""

    def __init__(
        self, columns: Columns, split: Callable[[Case], list[Case]], labels: Iterable[str]
    ) -> None:
        """split: makes the rows of a case. labels: of all rows to come."""
        super().__init__(columns, [max(labels, key=len)])
        self.split = split

    def reserve_width(self, names: Iterable[str]) -> None:
        """The first column is as wide as the longest label; a case's own name has no row."""

    def rows_of(self, case: Case) -> list[Case]:
        return self.split(case)


def side_by_side(estimates: Mapping[str, Estimate], unit: str = "") -> str:
    """List estimates of cases that were timed one after the other, so that they are not ranked:
    `10.0 ms (9.0 to 11.0) with a, 12.0 ms (11.0 to 13.0) with b`. unit: if they are not times."""
    shown = [f"{x.text(unit) if unit else x} with {name}" for name, x in estimates.items()]
    return ", ".join(shown) + (f"; {SEQUENTIAL}" if len(shown) > 1 else "")
