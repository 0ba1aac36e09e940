"""Runs of a base against runs of a test, case by case: ratio, interval, verdict.

The run is the unit: what counts of a run is its median, on a log scale. Iterations within a run
say nothing about how much two runs differ that differ in nothing. docs/compare.md derives it.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import exp, log, log1p, sqrt
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtr, stdtrit  # Student's t; scipy.stats takes 0.7 s to import

from analysis.load import Row, Run
from analysis.show import canonical, case_names, clean

ALPHA = 0.05
MIN_BLOCKS = 6  # of a pair of runs that took turns; with fewer their medians count
MAX_RUNS = 1000  # that are said to be needed
# Where these differ another machine was measured, whatever else was changed.
HARDWARE = ("devices", "topologies", "num_nodes", "local_world_size", "world_size", "cores")
# not of interest by themselves: rows for each rank and device, and lines derived from them
IGNORED = ("ranks", "gpus", "differences")
Ratio = tuple[float, float, float]  # a log ratio, its standard error, its degrees of freedom
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Design:
    """How runs are compared.

    margin: the smallest relative change that matters. paired: base[i] and test[i] were measured
    one after the other, and their ratio is the unit, so that a drift cancels. interleaved: they
    took turns, so that their blocks make pairs as well. looks: how often the data is looked at as
    it grows, to stop once decided: the error rate is shared among the looks.
    """

    margin: float = 0.02
    paired: bool = False
    interleaved: bool = False
    looks: int = 1


@dataclass(frozen=True)
class Result:
    """One case on both sides. Times in seconds, one a run; ratio = test / base, over 1 is slower.

    verdict: slower, faster, same, undecided; missing where TEST has no time, new where BASE has
    none, else not compared. ci95 is None where the runs do not tell how runs scatter; p: of no
    difference. runs_needed: about how many a side would narrow the interval to +-margin.
    pair_ratios: of runs that are compared pair by pair; ratio is then their geometric mean.
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
    ci95: tuple[float, float] | None = None
    p: float | None = None
    runs_needed: int | None = None
    pair_ratios: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Difference:
    """A field of the environment with all its values on each side."""

    field: str
    base: list[str]
    test: list[str]
    hardware: bool


@dataclass(frozen=True)
class Comparison:
    """cases: all; mean: the geometric mean over those that every run has."""

    cases: list[Result]
    mean: Result | None
    environment: list[Difference]
    warnings: list[str]
    base: list[str]  # paths
    test: list[str]
    design: Design

    @property
    def compared(self) -> list[Result]:
        return [case for case in self.cases if case.ratio is not None]

    @property
    def verdicts(self) -> set[str]:
        return {case.verdict for case in [*self.cases, *([self.mean] if self.mean else [])]}


def compare(base: Sequence[Run], test: Sequence[Run], design: Design) -> Comparison:
    """Compare every case that both sides have. Raises ValueError where there is none."""
    if design.paired and len(base) != len(test):
        raise ValueError(f"pairs need as many runs a side, got {len(base)} and {len(test)}")
    sides = [by_case(base), by_case(test)]
    if not sides[0].keys() & sides[1].keys():
        raise ValueError(nothing_in_common(base, test))
    cases = [
        compare_case(name[0], sides[0].get(name, []), sides[1].get(name, []), design)
        for name in dict.fromkeys([*sides[0], *sides[1]])
    ]
    cases = labelled(cases)
    compared = [case for case in cases if case.ratio is not None]
    mean = geometric_mean(base, test, compared, design)
    decided = decide([*compared, *([mean] if mean else [])], design)
    return Comparison(
        [*decided[: len(compared)], *(case for case in cases if case.ratio is None)],
        decided[-1] if mean else None,
        differences(base, test),
        warnings(base, test),
        [run.path for run in base],
        [run.path for run in test],
        design,
    )


def by_case(runs: Sequence[Run]) -> dict[tuple[str, str], list[Row | None]]:
    """For each benchmark and key what each run of that benchmark has of it."""
    names = dict.fromkeys((run.report.benchmark, name) for run in runs for name in run.rows)
    return {
        (benchmark, name): [r.rows.get(name) for r in runs if r.report.benchmark == benchmark]
        for benchmark, name in names
    }


def labelled(cases: list[Result]) -> list[Result]:
    """With names that tell them apart."""
    names = {
        benchmark: case_names([case.key for case in cases if case.benchmark == benchmark])
        for benchmark in dict.fromkeys(case.benchmark for case in cases)
    }
    found = []
    for case in cases:
        label = names[case.benchmark][canonical(case.key)]
        label = f"{clean(case.benchmark, 40)}: {label}" if len(names) > 1 else label
        found.append(replace(case, label=label))
    return found


def nothing_in_common(base: Sequence[Run], test: Sequence[Run]) -> str:
    names = [", ".join(sorted({run.report.benchmark for run in side})) for side in (base, test)]
    if names[0] != names[1]:
        return f"no case is on both sides: BASE has reports of {names[0]}, TEST of {names[1]}"
    for side, runs in (("BASE", base), ("TEST", test)):
        if not any(run.rows for run in runs):
            return f"no case is on both sides: the reports of {side} have none"
    a, b = (next(r.key for run in side for r in run.rows.values()) for side in (base, test))
    fields = [name for name in {**a, **b} if a.get(name) != b.get(name)]
    return (
        "no case is on both sides: cases are joined by their keys, and the first ones differ in "
        + ", ".join(f"{name} ({a.get(name)}, {b.get(name)})" for name in fields)
    )


def compare_case(
    benchmark: str, base: list[Row | None], test: list[Row | None], design: Design
) -> Result:
    """Ratio, interval and p; the verdict comes later, when those of all cases are known."""
    first = next(row for row in [*base, *test] if row is not None)
    result = Result(benchmark, first.key)
    notes, timed = [], []
    for side, rows in (("BASE", base), ("TEST", test)):
        good = [row for row in rows if row and row.time_s]
        bad = [row.check for row in rows if row and not row.time_s]
        if bad:
            notes.append(f"{side}: {len(bad)} of {len(rows)} runs: {bad[0]}")
        if None in rows:
            notes.append(f"{side}: {rows.count(None)} of {len(rows)} runs lack it")
        timed.append(good)
    if not timed[0] or not timed[1]:
        verdict = "missing" if timed[0] or (not timed[1] and base) else "new"
        return replace(result, verdict=verdict, reason="; ".join(notes) or "not measured")
    measures = sorted({row.measure for row in [*timed[0], *timed[1]]})
    if len(measures) > 1:
        return replace(result, reason=f"different times were kept: {', '.join(measures)}")
    ratios = np.empty(0)
    if design.paired:
        pairs = [(a, b) for a, b in zip(base, test, strict=False) if a and b]
        pairs = [(a, b) for a, b in pairs if a.time_s and b.time_s]
        if not pairs or len(base) != len(test):
            return replace(result, reason="there is no pair with both")
        timed = [[a for a, _ in pairs], [b for _, b in pairs]]
        ratios = np.array([log_ratio(a, b, design.interleaved) for a, b in pairs])
    logs = [np.log([row.time_s for row in side if row.time_s]) for side in timed]
    result = replace(result, measure=measures[0], reason="; ".join(notes))
    return estimate(result, logs[0], logs[1], ratios, design)


def estimate(result: Result, base: Array, test: Array, ratios: Array, design: Design) -> Result:
    """The result with ratio, interval and p. base, test: logarithms of the runs' times; ratios:
    those of the pairs."""
    value = float(ratios.mean() if design.paired else test.mean() - base.mean())
    found = mean_of(ratios) if design.paired else difference_of_means(base, test)
    interval = p = needed = None
    if found is not None:
        _, error, df = found
        half = float(t_quantile(df, 1 - ALPHA / design.looks)) * error
        interval = limited_exp(value - half), limited_exp(value + half)
        p = 2 * float(stdtr(df, -abs(value) / error)) if error else float(value == 0)
        share = 1 / len(base) if design.paired else 1 / len(base) + 1 / len(test)
        needed = runs_needed(error / sqrt(share), design.paired, design.margin)
    return replace(
        result,
        base_s=np.exp(base).tolist(),
        test_s=np.exp(test).tolist(),
        ratio=limited_exp(value),
        ci95=interval,
        p=p,
        runs_needed=needed,
        pair_ratios=[limited_exp(ratio) for ratio in ratios],
    )


def log_ratio(a: Row, b: Row, interleaved: bool) -> float:
    """log(b / a) of a pair of runs: of their medians or, where they took turns, the median over
    blocks that were neighbours in time. A slow moment hits both of those, or is an outlier.
    """
    blocks = [block_medians(a), block_medians(b)]
    common = min(map(len, blocks))
    if interleaved and common >= MIN_BLOCKS and min(block.min() for block in blocks) > 0:
        return float(np.median(np.log(blocks[1][:common]) - np.log(blocks[0][:common])))
    return log((b.time_s or 1) / (a.time_s or 1))


def block_medians(row: Row) -> NDArray[np.float64]:
    if row.times_s is None or not row.rounds:
        return np.empty(0)
    blocks = np.split(row.times_s, np.cumsum(row.rounds)[:-1])
    return np.array([np.median(block) for block in blocks])


def geometric_mean(
    base: Sequence[Run], test: Sequence[Run], cases: list[Result], design: Design
) -> Result | None:
    """The mean of the log ratios. Its unit is the run as well: what hits one case hits others.

    None where the cases are of several benchmarks, or fewer than two are in every run.
    """
    benchmarks = {case.benchmark for case in cases}
    m, n = (sum(run.report.benchmark in benchmarks for run in side) for side in (base, test))
    whole = [case for case in cases if (len(case.base_s), len(case.test_s)) == (m, n)]
    if len(benchmarks) != 1 or len(whole) < 2:
        return None
    logs = [
        np.log(rows).mean(axis=0) for rows in ([c.base_s for c in whole], [c.test_s for c in whole])
    ]
    ratios = np.log([case.pair_ratios for case in whole]).mean(axis=0)
    mean = Result(whole[0].benchmark, {}, f"geometric mean of {len(whole)} cases")
    return estimate(mean, logs[0], logs[1], ratios, design)


def decide(cases: list[Result], design: Design) -> list[Result]:
    """The verdicts. The false discovery rate is held over all cases with an interval."""
    tested = [case for case in cases if case.p is not None]
    counts = discoveries([case.p or 0.0 for case in tested], ALPHA / design.looks)
    found = {id(case) for case, counted in zip(tested, counts, strict=True) if counted}
    decided = []
    for case in cases:
        verdict, why = verdict_of(case, design.margin, id(case) in found, len(tested))
        reason = "; ".join(text for text in (why, case.reason) if text)
        decided.append(replace(case, verdict=verdict, reason=reason))
    return decided


def verdict_of(case: Result, margin: float, found: bool, tests: int) -> tuple[str, str]:
    if case.ci95 is None:
        if len(case.base_s) == len(case.test_s) == 1 and not case.pair_ratios:
            return "undecided", "one run a side: how much runs differ is unknown"
        return "undecided", "too few runs"
    low, high = case.ci95
    if 1 / (1 + margin) <= low and high <= 1 + margin:
        return "same", ""
    ratio = case.ratio or 1.0
    beyond = not 1 / (1 + margin) <= ratio <= 1 + margin
    if found and beyond:
        return ("slower" if ratio > 1 else "faster"), ""
    if low <= 1 <= high:
        return "undecided", "the interval is too wide"
    if beyond:
        return "undecided", f"not certain enough for one of {tests} comparisons"
    return "undecided", "a change, but perhaps within the margin"


# -- statistics ------------------------------------------------------------------------------------


def t_quantile(df: ArrayLike, confidence: float = 1 - ALPHA) -> Any:
    return stdtrit(df, (1 + confidence) / 2)


def difference_of_means(a: NDArray[np.float64], b: NDArray[np.float64]) -> Ratio | None:
    """mean(b) - mean(a), both of a few independent values; None with one of each.

    Student's t with one variance for both sides. With unequal numbers a side that is not safe:
    there Welch's t (Biometrika 34, 1947) replaces it where that is wider. A side of one value has
    no scatter of its own: the other side's counts for it. a: [m], b: [n].
    """
    m, n = len(a), len(b)
    if m + n < 3:
        return None
    value = float(b.mean() - a.mean())
    squares = [float(np.square(x - x.mean()).sum()) for x in (a, b)]
    pooled = (value, sqrt(sum(squares) / (m + n - 2) * (1 / m + 1 / n)), float(m + n - 2))
    if m == n or min(m, n) == 1 or sum(squares) == 0:
        return pooled
    shares = [squares[0] / (m - 1) / m, squares[1] / (n - 1) / n]
    df = sum(shares) ** 2 / (shares[0] ** 2 / (m - 1) + shares[1] ** 2 / (n - 1))
    welch = (value, sqrt(sum(shares)), df)
    return max(pooled, welch, key=lambda ratio: t_quantile(ratio[2]) * ratio[1])


def mean_of(values: NDArray[np.float64]) -> Ratio | None:
    """The mean of a few independent values; None with one. values: [n]."""
    n = len(values)
    if n < 2:
        return None
    return float(values.mean()), float(values.std(ddof=1)) / sqrt(n), float(n - 1)


def discoveries(p_values: Sequence[float], rate: float) -> list[bool]:
    """Which tests count, so that of those at most `rate` are false on average.

    Benjamini and Hochberg, J. R. Statist. Soc. B 57, 1995.
    """
    p = np.sort(p_values)
    passed = p[p <= rate * np.arange(1, len(p) + 1) / max(1, len(p))]
    return [value <= (passed[-1] if len(passed) else -1) for value in p_values]


@functools.cache
def quantiles(parts: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Numbers of runs, and t * sqrt(parts / runs) of each."""
    runs = np.arange(2, MAX_RUNS, dtype=np.float64)
    return runs, t_quantile(parts * (runs - 1)) * np.sqrt(parts / runs)


def runs_needed(scatter: float, paired: bool, margin: float) -> int | None:
    """Runs a side with which the interval would be about +-margin wide, if runs scatter alike."""
    runs, widths = quantiles(1 if paired else 2)
    enough = runs[widths * scatter <= log1p(margin)]
    return int(enough[0]) if len(enough) else None


def limited_exp(x: float) -> float:
    return exp(max(-700.0, min(700.0, x)))  # within what a float can hold


# -- environments ----------------------------------------------------------------------------------


def fields(run: Run) -> dict[str, str]:
    """The environment as one text a field; so are each variable and the ranks' cores."""
    found = {k: v for k, v in run.report.environment.items() if k not in IGNORED}
    variables = found.pop("variables", None)
    if isinstance(variables, dict):
        found |= {f"variables.{name}": value for name, value in variables.items()}
    rows = run.report.environment.get("ranks")
    if isinstance(rows, list):
        found["cores"] = [row.get("cores") for row in rows if isinstance(row, dict)]
    return {name: field_text(value) for name, value in found.items()}


def field_text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(dict.fromkeys(map(str, value))) or "none"
    return "none" if value is None else str(value)


def differences(base: Sequence[Run], test: Sequence[Run]) -> list[Difference]:
    """The fields of the environment whose values differ between the sides; hardware first."""
    sides = [[fields(run) for run in side] for side in (base, test)]
    found = []
    for name in dict.fromkeys(name for side in sides for row in side for name in row):
        a, b = (list(dict.fromkeys(row.get(name, "unset") for row in side)) for side in sides)
        if set(a) != set(b):
            found.append(Difference(name, a, b, name in HARDWARE))
    return sorted(found, key=lambda difference: not difference.hardware)


def warnings(base: Sequence[Run], test: Sequence[Run]) -> list[str]:
    lines: list[str] = []
    seen: dict[str, str] = {}
    for run in (*base, *test):
        if run.report.status != "complete":
            lines.append(f"{run.path} is not complete: its status is {run.report.status}")
        other = seen.setdefault(run.identity, run.path)
        if other != run.path:
            lines.append(f"{run.path} and {other} hold the same run: that is one run's evidence")
    for side, runs, other in (("BASE", base, "TEST"), ("TEST", test, "BASE")):
        if len(runs) == 1 and len(base) + len(test) > 2:
            lines.append(f"{side} is one run: it is taken to scatter as those of {other} do")
        rows = [fields(run) for run in runs]
        names = [name for name in rows[0] if any(row.get(name) != rows[0][name] for row in rows)]
        if names:
            lines.append(f"the runs of {side} differ among themselves in {', '.join(names)}")
    return lines
