"""Comparison of settings: timed alternately within one case, or in cases one after the other."""

from collections.abc import Mapping
from typing import Any

from common.cli import cut
from common.report import Estimate
from common.stats import Times


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
    """Return the confidence of each ratio between `count` steps that were timed alternately, such
    that all ratios to one step hold simultaneously at 95 %: 1 - 0.05 / (count - 1) (Bonferroni).

    This also covers `fastest`. A step can be called the fastest by mistake only if it wins against
    the actual fastest one, and there are count - 1 such pairs.
    """
    return 1 - 0.05 / (count - 1)


def fastest(name: str, leads: Mapping[str, Estimate]) -> str:
    """Say whether a setting is the fastest, which requires that it wins against every other one.

    leads: how many times as fast as each other setting it is, all 1 or more, with intervals of
    confidence `simultaneous`.
    """
    alike = {other: lead for other, lead in leads.items() if lead.may_be(1)}
    if alike:
        several = cut([f"{other}: {lead.times()}" for other, lead in alike.items()], 3)
        return f"no setting is the fastest, {name} does not differ significantly from {several}"
    following = min(leads, key=lambda other: leads[other].value)
    words = f"{leads[following].times()} as fast as {following}, the next"
    return f"{name} is the fastest of {len(leads) + 1} settings, {words}"


def side_by_side(estimates: Mapping[str, Estimate], unit: str = "") -> str:
    """List estimates by the names of their cases: `10.0 ms (9.0 to 11.0) by a, 12.0 ms (11.0 to
    13.0) by b`. The cases were timed one after the other, so they are not ranked.

    unit: of estimates that are not times.
    """
    shown = []
    for name, estimate in estimates.items():
        shown.append(f"{estimate.text(unit) if unit else estimate} by {name}")
    advice = "; these were timed one after the other; use analysis/ab.py to compare them in turns"
    return ", ".join(shown) + (advice if len(shown) > 1 else "")
