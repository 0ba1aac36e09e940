"""One way of doing something over RPC against another, measured in turns in one run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.breakdown import bounds
from common.dist import CaseGroup
from common.parts import Part
from common.rpc import Layout, RpcOptions, workers
from common.stats import median_interval
from common.sweep import Outcome, Sweep


@dataclass(frozen=True)
class Variant:
    """One way: its name, its RPC settings, and its work, which brings back a `rate` on rank 0."""

    name: str
    options: RpcOptions
    work: Callable[[CaseGroup], Outcome]


def measure_part(
    variants: tuple[Variant, Variant],
    rounds: int,
    part: Part,
    what: str,
    key: dict[str, Any],
    layout: Layout,
    sweep: Sweep,
) -> None:
    """The variant and round whose turn it is, in the order ABBA; after the last part the ratio.

    A round is two parts, each a process of its own, since RPC starts only once in one.

    what: the unit of the rates, as `epochs/s`. key: of the case with the ratio, how many times
    faster the second variant is than the first; those of the rounds have more entries.
    """
    number = part.number // 2
    variant = variants[(part.number + number) % 2]
    own = _key(key, variant, number)
    (known, *_) = sweep.plan([own, key] if part.last else [own])
    if not known:
        with workers(layout, variant.options, sweep) as broken:
            sweep.case(
                own,
                f"{variant.name}, round {number + 1}",
                layout.trainer_ranks,
                variant.work,
                lambda measured, facts: ({"rate": facts[0]["rate"]}, "passed"),
                broken=broken,
            )
    case = sweep.find(own)
    if case is not None:
        sweep.say(f"{case['label']:<30} {case['metrics']['rate']:10.1f} {what}")
    if part.last and sweep.report is not None:
        _keep_ratio(variants, rounds, what, key, layout, sweep)


def _key(key: dict[str, Any], variant: Variant, number: int) -> dict[str, Any]:
    return key | {"variant": variant.name, "round": number}


def _keep_ratio(
    variants: tuple[Variant, Variant],
    rounds: int,
    what: str,
    key: dict[str, Any],
    layout: Layout,
    sweep: Sweep,
) -> None:
    rates: list[list[float]] = []
    for variant in variants:
        cases = [sweep.find(_key(key, variant, number)) for number in range(rounds)]
        rates.append([case["metrics"]["rate"] for case in cases if case is not None])
    label = f"{variants[1].name} over {variants[0].name}"
    if not len(rates[0]) == len(rates[1]) == rounds:
        sweep.keep(key, label, layout.trainer_ranks, None, {}, "failed: a round is missing")
        return
    metrics = ratio_metrics(*rates)
    sweep.keep(key, label, layout.trainer_ranks, None, metrics, "passed")
    sweep.say(f"\n{label}: {ratio_text(metrics, what)}")


def ratio_metrics(first: list[float], second: list[float]) -> dict[str, Any]:
    """How many times faster the second is: the median of the ratios of the rounds, with its
    interval. first, second: a rate a round."""
    ratios = [b / a for a, b in zip(first, second, strict=True)]
    return {
        "first": first,
        "second": second,
        "ratios": ratios,
        "ratio": float(np.median(ratios)),
        "ratio_ci95": bounds(median_interval(ratios)),
    }


def ratio_text(metrics: dict[str, Any], what: str) -> str:
    """The metrics above in words."""
    first, second = (float(np.median(metrics[name])) for name in ("first", "second"))
    ci = metrics["ratio_ci95"]
    interval = f"95 % interval {ci[0]:.2f} to {ci[1]:.2f}, " if ci else ""
    return (
        f"{second:.1f} to {first:.1f} {what}, {metrics['ratio']:.2f} times as many ({interval}"
        f"{len(metrics['ratios'])} rounds from {min(metrics['ratios']):.2f} to "
        f"{max(metrics['ratios']):.2f})"
    )
