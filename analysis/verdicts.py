"""Runs of a base against runs of a test, case by case: ratio, interval, verdict.

The run is the unit: what counts of a run is its median, on a log scale. Iterations within a run
say nothing about how much two runs differ that differ in nothing. docs/compare.md derives it.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log1p, sqrt
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy.special import stdtr, stdtrit  # Student's t; scipy.stats takes 0.7 s to import

from analysis.load import Row, Run

ALPHA = 0.05
SURE = 1 - ALPHA / 2  # two-sided
MIN_BLOCKS = 6  # of a pair of runs that took turns; with fewer their medians count
NEAR = 40  # cases a side that are looked at for what keeps them from meeting
MAX_RUNS = 1000  # that are said to be needed
# Where these differ another machine was measured, whatever else was changed.
HARDWARE = ("devices", "topologies", "num_nodes", "local_world_size", "world_size", "cores")
GPU_HARDWARE = ("power.limit", "clocks.max.sm", "ecc.mode.current", "mig.mode.current")
# not of interest by themselves: rows for each rank and device, and lines derived from them
IGNORED = ("ranks", "gpus", "differences", "variables")
TIMES = ("base_s", "test_s", "pair_ratios")  # of a result


@dataclass(frozen=True)
class Design:
    """How runs are compared."""

    margin: float = 0.02  # the smallest relative change that matters
    paired: bool = False  # base[i] and test[i] were neighbours in time: their ratio is the unit
    interleaved: bool = False  # their blocks took turns, and make pairs as well
    looks: int = 1  # at the growing data, to stop once decided; they share the error rate


@dataclass
class Result:
    """One case on both sides. Times in seconds, one a run; ratio = test / base, over 1 is slower.

    verdict: slower, faster, same, undecided; missing where TEST has no time, new where BASE has
    none, else not compared.
    """

    benchmark: str
    key: dict[str, Any]
    label: str = ""
    verdict: str = "not compared"
    reason: str = ""
    measure: str = ""
    base_s: list[float] = field(default_factory=list)
    test_s: list[float] = field(default_factory=list)
    ratio: float | None = None
    ci95: tuple[float, float] | None = None  # None where nothing tells how runs scatter
    p: float | None = None  # of no difference
    runs_needed: int | None = None  # a side, about, to narrow the interval to +-margin
    pair_ratios: list[float] = field(default_factory=list)  # of runs that are compared in pairs


@dataclass(frozen=True)
class Comparison:
    cases: list[Result]
    mean: Result | None  # the geometric mean over the cases that every run has
    environment: list[dict[str, Any]]  # what differs, with all values of each side; hardware first
    warnings: list[str]
    base: list[str]  # paths
    test: list[str]
    design: Design


def compare(base: Sequence[Run], test: Sequence[Run], design: Design) -> Comparison:
    """Compare every case that either side has. Raises ValueError where none is on both."""
    sides = base, test
    has = [dict.fromkeys((run.benchmark, form) for run in s for form in run.rows) for s in sides]
    if not has[0].keys() & has[1].keys():
        a_case, b_case = (" ".join(next(iter(side), ["none"])) for side in has)
        examples = f"BASE has e.g. {a_case}; TEST {b_case}"
        raise ValueError(f"no case is on both sides{nearest(base, test)}: {examples}")
    cases = []
    for name, form in has[0] | has[1]:
        rows = [[run.rows.get(form) for run in side if run.benchmark == name] for side in sides]
        cases.append(compare_case(name, rows, design))
    for case in cases if len({case.benchmark for case in cases}) > 1 else ():
        case.label = f"{case.benchmark}, {case.label}"
    cases.sort(key=lambda case: not case.measure)
    compared = [case for case in cases if case.measure]
    whole = [c for c in compared if (len(c.base_s), len(c.test_s)) == (len(base), len(test))]
    mean = None
    if len(whole) > 1:  # what hits one case of a run hits others
        mean = Result(whole[0].benchmark, {}, f"geometric mean of {len(whole)} cases")
        for name in TIMES:
            logs = np.log([getattr(case, name) for case in whole])
            setattr(mean, name, np.exp(logs.mean(axis=0)).tolist())
    estimate([*compared, *([mean] if mean else [])], design)
    ended = [run for run in (*base, *test) if run.status != "complete"]
    warnings = [f"{run.label} is not complete: its status is {run.status}" for run in ended]
    a, b = ([run.label for run in side] for side in sides)
    return Comparison(cases, mean, differences(base, test), warnings, a, b, design)


def nearest(base: Sequence[Run], test: Sequence[Run]) -> str:
    """`; the nearest differ in dtype (fp32 in BASE, bf16 in TEST)`, or nothing."""
    bases = [(run.benchmark, row.key) for run in base for row in run.rows.values()]
    tests = [(run.benchmark, row.key) for run in test for row in run.rows.values()]
    found = []
    for (a, x), (b, y) in itertools.product(bases[:NEAR], tests[:NEAR]):
        if a == b:
            names = [name for name in x | y if x.get(name) != y.get(name)]
            found.append([f"{n} ({x.get(n)} in BASE, {y.get(n)} in TEST)" for n in names])
    words = min(found, key=len, default=[])
    return f"; the nearest differ in {', '.join(words)}" if words else ""


def compare_case(benchmark: str, sides: list[list[Row | None]], design: Design) -> Result:
    """The times of a case, or why they cannot be compared."""
    m, n = map(len, sides)
    if design.paired and m != n:
        raise ValueError(f"pairs need as many runs a side, got {m} and {n}")
    first = next(row for side in sides for row in side if row)
    result = Result(benchmark, first.key, first.name)
    notes = []
    for side, rows in zip(("BASE", "TEST"), sides, strict=True):
        bad = [row.check if row else "not measured" for row in rows if not row or not row.time_s]
        why = bad[0] if bad and bad[0] != "passed" else "it has none above 0"
        notes += [f"{side}: no time in {len(bad)} of {len(rows)} runs: {why}"] if bad else []
    result.reason = "; ".join(notes)
    timed = [[row for row in side if row and row.time_s] for side in sides]
    measures = sorted({row.measure for side in timed for row in side})
    pairs = [(a, b) for a, b in zip(*sides, strict=False) if a and b and a.time_s and b.time_s]
    if not all(timed):
        result.verdict = "new" if timed[1] or not any(sides[0]) else "missing"
    elif len(measures) > 1:
        result.reason = f"different times were kept: {', '.join(measures)}"
    elif pairs or not design.paired:
        result.measure = measures[0]
        if design.paired:
            timed = [[a for a, _ in pairs], [b for _, b in pairs]]
            result.pair_ratios = [ratio_of(a, b, design.interleaved) for a, b in pairs]
        result.base_s, result.test_s = ([row.time_s for row in side] for side in timed)
    return result


def ratio_of(a: Row, b: Row, interleaved: bool) -> float:
    """b / a of a pair of runs: of their medians or, where they took turns, the median over blocks
    that were neighbours in time. A slow moment hits both of those, or is an outlier.
    """

    def medians(row: Row) -> list[Any]:
        return [np.median(block) for block in np.split(row.times_s, np.cumsum(row.rounds)[:-1])]

    if interleaved and all(0 < sum(row.rounds) == len(row.times_s) for row in (a, b)):
        blocks = np.array(list(zip(medians(a), medians(b), strict=False)))
        if len(blocks) >= MIN_BLOCKS and blocks.min() > 0:
            return float(np.exp(np.median(np.log(blocks[:, 1] / blocks[:, 0]))))
    return b.time_s / a.time_s


def estimate(cases: list[Result], design: Design) -> None:
    """Fill in ratio, interval, p and verdict.

    Student's t with one variance for both sides. With unequal numbers a side that is not safe:
    there Welch's t (Biometrika 34, 1947) replaces it where that is wider. A side of one value has
    no scatter of its own: the other side's counts for it.
    """
    times = ([dict(enumerate(getattr(case, name))) for case in cases] for name in TIMES)
    x, y, d = (np.log(pd.DataFrame(rows)) for rows in times)  # a row a case, shorter ones padded
    m, n = x.count(axis=1), y.count(axis=1)
    value, error, df, share = d.mean(axis=1), d.sem(axis=1), m - 1.0, 1 / m
    if not design.paired:
        a, b = x.var(axis=1, ddof=0) * m, y.var(axis=1, ddof=0) * n  # sums of squares
        value, df, share = y.mean(axis=1) - x.mean(axis=1), m + n - 2.0, 1 / m + 1 / n
        error = np.sqrt((a + b) / df * share)
        s, t = a / (m - 1) / m, b / (n - 1) / n  # squared errors of the means
        welch = (s + t) ** 2 / (s**2 / (m - 1) + t**2 / (n - 1))
        wider = (m != n) & (stdtrit(welch, SURE) * np.sqrt(s + t) > stdtrit(df, SURE) * error)
        error, df = error.mask(wider, np.sqrt(s + t)), df.mask(wider, welch)
    p = (2 * stdtr(df, -value.abs() / error)).mask((value == 0) & (error == 0), 1.0)
    real = p <= largest_discovery(p[df > 0], ALPHA / design.looks)
    half = stdtrit(df, 1 - ALPHA / design.looks / 2) * error
    ends = (np.exp(np.clip(v, -700, 700)) for v in (value - half, value, value + half))
    runs = np.arange(2, MAX_RUNS)
    parts = 1 if design.paired else 2
    widths = stdtrit(parts * (runs - 1), SURE) * np.sqrt(parts / runs)  # if runs scatter by 1
    least, most = 1 / (1 + design.margin), 1 + design.margin
    for i, (case, low, ratio, high) in enumerate(zip(cases, *ends, strict=True)):
        case.ratio, case.verdict = ratio, "undecided"
        why = "one run a side: how much runs differ is unknown; measure several, better 6"
        if df[i] > 0:
            case.ci95, case.p = (low, high), p[i]
            enough = runs[widths * error[i] / sqrt(share[i]) <= log1p(design.margin)]
            case.runs_needed = int(enough[0]) if len(enough) else None
            why = "a change, but not certain to be beyond the margin"
            if low <= 1 <= high:
                why = "the interval is too wide"
            if least <= low and high <= most:
                case.verdict, why = "same", ""
            elif real[i] and not least <= ratio <= most:
                case.verdict, why = "slower" if ratio > 1 else "faster", ""
        case.reason = "; ".join(filter(None, (why, case.reason)))


def largest_discovery(p_values: ArrayLike, rate: float) -> float:
    """The largest p that counts, so that of those up to it at most `rate` are false on average.

    -1 where none does. Benjamini and Hochberg, J. R. Statist. Soc. B 57, 1995.
    """
    p = np.sort(p_values)
    return float(p[p <= rate * np.arange(1, len(p) + 1) / max(1, len(p))].max(initial=-1))


def fields(run: Run) -> dict[str, str]:
    """The environment as one text a field; so are each variable and the ranks' cores."""
    e = run.environment
    found = {name: value for name, value in e.items() if name not in IGNORED}
    found |= {f"variables.{name}": value for name, value in (e.get("variables") or {}).items()}
    found |= {f"key.{name}": values for name, values in run.left_out.items()}
    found["cores"] = [rank.get("cores") for rank in e.get("ranks") or []]
    gpus = [gpu for node in e.get("gpus") or [] for gpu in node]
    found |= {f"GPU {name}": [gpu.get(name) for gpu in gpus] for name in GPU_HARDWARE}
    lists = {name: value if isinstance(value, list) else [value] for name, value in found.items()}
    texts = {name: ", ".join(dict.fromkeys(map(str, values))) for name, values in lists.items()}
    return {name: text for name, text in texts.items() if text not in ("None", "")}


def differences(base: Sequence[Run], test: Sequence[Run]) -> list[dict[str, Any]]:
    """The fields of the environment whose values differ between the sides; hardware first."""
    table = pd.DataFrame([fields(run) for run in (*base, *test)]).fillna("unset")
    found = []
    for name in table:
        a, b = (part[name].unique().tolist() for part in (table[: len(base)], table[len(base) :]))
        if set(a) != set(b):
            hardware = name in HARDWARE or name.startswith("GPU ")
            found.append({"field": name, "base": a, "test": b, "hardware": hardware})
    return sorted(found, key=lambda difference: not difference["hardware"])
