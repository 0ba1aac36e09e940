"""Runs of a base against runs of a test, case by case: ratio, interval, verdict.

The run is the unit: what counts of a run is its median, on a log scale. Iterations within a run
say nothing about how much two runs differ that differ in nothing. docs/compare.md derives it.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, log, log1p, sqrt
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtr, stdtrit  # Student's t; scipy.stats takes 0.7 s to import

from analysis.load import Row, Run
from analysis.show import canonical, case_names

ALPHA = 0.05
MIN_BLOCKS = 6  # of a pair of runs that took turns; with fewer their medians count
MAX_RUNS = 1000  # that are said to be needed
# Where these differ another machine was measured, whatever else was changed.
HARDWARE = ("devices", "topologies", "num_nodes", "local_world_size", "world_size", "cores")
GPU_HARDWARE = ("power.limit", "clocks.max.sm", "ecc.mode.current", "mig.mode.current")
# not of interest by themselves: rows for each rank and device, and lines derived from them
IGNORED = ("ranks", "gpus", "differences")
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


@dataclass
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
class Comparison:
    """cases: all; mean: the geometric mean over those that every run has; base, test: paths.

    environment: fields that differ, each with all its values on either side; hardware first.
    """

    cases: list[Result]
    mean: Result | None
    environment: list[dict[str, Any]]
    warnings: list[str]
    base: list[str]
    test: list[str]
    design: Design

    @property
    def verdicts(self) -> set[str]:
        return {case.verdict for case in [*self.cases, *([self.mean] if self.mean else [])]}


def compare(base: Sequence[Run], test: Sequence[Run], design: Design) -> Comparison:
    """Compare every case that both sides have. Raises ValueError where there is none."""
    if design.paired and len(base) != len(test):
        raise ValueError(f"pairs need as many runs a side, got {len(base)} and {len(test)}")
    a, b = rows_by_case(base), rows_by_case(test)
    if not a.keys() & b.keys():
        raise ValueError(nothing_in_common(base, test))
    cases = [
        compare_case(name[0], a.get(name, []), b.get(name, []), design)
        for name in dict.fromkeys([*a, *b])
    ]
    several = len({case.benchmark for case in cases}) > 1
    keys = [({"benchmark": c.benchmark} if several else {}) | c.key for c in cases]
    names = case_names(keys)
    for case, key in zip(cases, keys, strict=True):
        case.label = names[canonical(key)]
    cases.sort(key=lambda case: case.ratio is None)
    compared = [case for case in cases if case.ratio is not None]
    mean = geometric_mean(base, test, compared, design)
    decide([*compared, *([mean] if mean else [])], design)
    about = (differences(base, test), warnings(base, test))
    paths = ([run.path for run in base], [run.path for run in test])
    return Comparison(cases, mean, *about, *paths, design)


def rows_by_case(runs: Sequence[Run]) -> dict[tuple[str, str], list[Row | None]]:
    """For each benchmark and key what each run of that benchmark has of it."""
    names = dict.fromkeys((run.report.benchmark, name) for run in runs for name in run.rows)
    return {
        (benchmark, name): [r.rows.get(name) for r in runs if r.report.benchmark == benchmark]
        for benchmark, name in names
    }


def nothing_in_common(base: Sequence[Run], test: Sequence[Run]) -> str:
    start = "no case is on both sides:"
    names = [", ".join(sorted({run.report.benchmark for run in side})) for side in (base, test)]
    if names[0] != names[1]:
        return f"{start} BASE has reports of {names[0]}, TEST of {names[1]}"
    for side, runs in (("BASE", base), ("TEST", test)):
        if not any(run.rows for run in runs):
            return f"{start} the reports of {side} have none"
    a, b = (next(row.key for run in side for row in run.rows.values()) for side in (base, test))
    fields = [f"{n} ({a.get(n)}, {b.get(n)})" for n in {**a, **b} if a.get(n) != b.get(n)]
    return f"{start} cases are joined by their keys; of the first ones differ {', '.join(fields)}"


def compare_case(
    benchmark: str, base: list[Row | None], test: list[Row | None], design: Design
) -> Result:
    """Ratio, interval and p; the verdict comes later, when those of all cases are known."""
    result = Result(benchmark, next(row for row in [*base, *test] if row).key)
    notes, timed = [], []
    for side, rows in (("BASE", base), ("TEST", test)):
        bad = [row.check for row in rows if row and not row.time_s]
        if bad:
            notes.append(f"{side}: {len(bad)} of {len(rows)} runs: {bad[0]}")
        if None in rows:
            notes.append(f"{side}: {rows.count(None)} of {len(rows)} runs lack it")
        timed.append([row for row in rows if row and row.time_s])
    result.reason = "; ".join(notes)
    measures = sorted({row.measure for row in [*timed[0], *timed[1]]})
    if not timed[0] or not timed[1]:
        result.verdict = "missing" if timed[0] or (not timed[1] and base) else "new"
        result.reason = result.reason or "not measured"
    elif len(measures) > 1:
        result.reason = f"different times were kept: {', '.join(measures)}"
    else:
        result.measure = measures[0]
        pairs = [(a, b) for a, b in zip(base, test, strict=False) if a and b]
        pairs = [(a, b) for a, b in pairs if a.time_s and b.time_s]
        if design.paired and (not pairs or len(base) != len(test)):
            result.reason = "there is no pair with both"
            return result
        if design.paired:
            timed = [[a for a, _ in pairs], [b for _, b in pairs]]
        logs = [np.log([row.time_s or 0.0 for row in side]) for side in timed]
        ratios = [log_ratio(a, b, design.interleaved) for a, b in pairs if design.paired]
        estimate(result, logs[0], logs[1], np.array(ratios), design)
    return result


def log_ratio(a: Row, b: Row, interleaved: bool) -> float:
    """log(b / a) of a pair of runs: of their medians or, where they took turns, the median over
    blocks that were neighbours in time. A slow moment hits both of those, or is an outlier.
    """
    blocks = [block_medians(a), block_medians(b)]
    common = min(map(len, blocks))
    if interleaved and common >= MIN_BLOCKS and min(block.min() for block in blocks) > 0:
        return float(np.median(np.log(blocks[1][:common] / blocks[0][:common])))
    return log((b.time_s or 1) / (a.time_s or 1))


def block_medians(row: Row) -> Array:
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
    columns = zip(*((c.base_s, c.test_s, c.pair_ratios) for c in whole), strict=True)
    logs = [np.log(rows).mean(axis=0) for rows in columns]
    mean = Result(whole[0].benchmark, {}, f"geometric mean of {len(whole)} cases")
    estimate(mean, logs[0], logs[1], logs[2], design)
    return mean


def estimate(result: Result, base: Array, test: Array, ratios: Array, design: Design) -> None:
    """Fill in ratio, interval and p. base, test: logarithms of the runs' times; ratios: those of
    the pairs."""
    value = float(ratios.mean() if design.paired else test.mean() - base.mean())
    result.base_s, result.test_s = np.exp(base).tolist(), np.exp(test).tolist()
    result.pair_ratios = [limited_exp(ratio) for ratio in ratios]
    result.ratio = limited_exp(value)
    found = uncertainty(base, test, ratios, design.paired)
    if found is None:
        return
    error, df = found
    half = float(t_quantile(df, 1 - ALPHA / design.looks)) * error
    result.ci95 = limited_exp(value - half), limited_exp(value + half)
    result.p = 2 * float(stdtr(df, -abs(value) / error)) if error else float(value == 0)
    share = 1 / len(base) if design.paired else 1 / len(base) + 1 / len(test)
    runs, widths = quantiles(1 if design.paired else 2)
    enough = runs[widths * error / sqrt(share) <= log1p(design.margin)]
    result.runs_needed = int(enough[0]) if len(enough) else None


def decide(cases: list[Result], design: Design) -> None:
    """The verdicts. The false discovery rate is held over all cases with an interval."""
    p_values = [case.p for case in cases if case.p is not None]
    counts = iter(discoveries(p_values, ALPHA / design.looks))
    for case in cases:
        counted = case.p is not None and next(counts)
        case.verdict, why = verdict_of(case, design.margin, counted, len(p_values))
        case.reason = "; ".join(text for text in (why, case.reason) if text)


def verdict_of(case: Result, margin: float, counts: bool, tests: int) -> tuple[str, str]:
    if case.ci95 is None:
        if len(case.base_s) == len(case.test_s) == 1 and not case.pair_ratios:
            return "undecided", "one run a side: how much runs differ is unknown"
        return "undecided", "too few runs"
    low, high = case.ci95
    if 1 / (1 + margin) <= low and high <= 1 + margin:
        return "same", ""
    ratio = case.ratio or 1.0
    beyond = not 1 / (1 + margin) <= ratio <= 1 + margin
    if counts and beyond:
        return ("slower" if ratio > 1 else "faster"), ""
    if low <= 1 <= high:
        return "undecided", "the interval is too wide"
    if beyond:
        return "undecided", f"not certain enough for one of {tests} comparisons"
    return "undecided", "a change, but perhaps within the margin"


# -- statistics ------------------------------------------------------------------------------------


def t_quantile(df: ArrayLike, confidence: float = 1 - ALPHA) -> Any:
    return stdtrit(df, (1 + confidence) / 2)


def uncertainty(a: Array, b: Array, ratios: Array, paired: bool) -> tuple[float, float] | None:
    """Standard error and degrees of freedom of mean(b) - mean(a), or of the pairs' mean.

    None where there is one value, or one of each. Student's t with one variance for both sides.
    With unequal numbers a side that is not safe: there Welch's t (Biometrika 34, 1947) replaces it
    where that is wider. A side of one value has no scatter of its own: the other side's counts for
    it. a: [m], b: [n].
    """
    m, n = len(a), len(b)
    if paired:
        return (float(ratios.std(ddof=1)) / sqrt(n), n - 1.0) if n > 1 else None
    if m + n < 3:
        return None
    squares = [float(np.square(x - x.mean()).sum()) for x in (a, b)]
    pooled = (sqrt(sum(squares) / (m + n - 2) * (1 / m + 1 / n)), m + n - 2.0)
    if m == n or min(m, n) == 1 or sum(squares) == 0:
        return pooled
    shares = [squares[0] / (m - 1) / m, squares[1] / (n - 1) / n]
    df = sum(shares) ** 2 / (shares[0] ** 2 / (m - 1) + shares[1] ** 2 / (n - 1))
    return max(pooled, (sqrt(sum(shares)), df), key=lambda found: t_quantile(found[1]) * found[0])


def discoveries(p_values: Sequence[float], rate: float) -> list[bool]:
    """Which tests count, so that of those at most `rate` are false on average.

    Benjamini and Hochberg, J. R. Statist. Soc. B 57, 1995.
    """
    p = np.sort(p_values)
    passed = p[p <= rate * np.arange(1, len(p) + 1) / max(1, len(p))]
    return [value <= (passed[-1] if len(passed) else -1) for value in p_values]


@functools.cache
def quantiles(parts: int) -> tuple[Array, Array]:
    """Numbers of runs, and t * sqrt(parts / runs) of each: half widths if runs scatter by 1."""
    runs = np.arange(2, MAX_RUNS, dtype=np.float64)
    return runs, t_quantile(parts * (runs - 1)) * np.sqrt(parts / runs)


def limited_exp(x: float) -> float:
    return exp(max(-700.0, min(700.0, x)))  # within what a float can hold


# -- environments ----------------------------------------------------------------------------------


def fields(run: Run) -> dict[str, str]:
    """The environment as one text a field; so are each variable and the ranks' cores."""
    found = {k: v for k, v in run.report.environment.items() if k not in IGNORED}
    variables = found.pop("variables", None)
    if isinstance(variables, dict):
        found |= {f"variables.{name}": value for name, value in variables.items()}
    ranks = run.report.environment.get("ranks")
    if isinstance(ranks, list):
        found["cores"] = [row.get("cores") for row in ranks if isinstance(row, dict)]
    nodes = run.report.environment.get("gpus")
    lists_of = [node for node in nodes if isinstance(node, list)] if isinstance(nodes, list) else []
    gpus = [gpu for node in lists_of for gpu in node if isinstance(gpu, dict)]
    found |= {f"GPU {name}": [gpu.get(name) for gpu in gpus] for name in GPU_HARDWARE if gpus}
    lists = {
        k: v if isinstance(v, list) else ["none" if v is None else v] for k, v in found.items()
    }
    return {name: ", ".join(dict.fromkeys(map(str, v))) or "none" for name, v in lists.items()}


def differences(base: Sequence[Run], test: Sequence[Run]) -> list[dict[str, Any]]:
    """The fields of the environment whose values differ between the sides; hardware first."""
    sides = [[fields(run) for run in side] for side in (base, test)]
    known = (*HARDWARE, *(f"GPU {name}" for name in GPU_HARDWARE))
    found = []
    for name in dict.fromkeys(name for side in sides for row in side for name in row):
        a, b = (list(dict.fromkeys(row.get(name, "unset") for row in side)) for side in sides)
        if set(a) != set(b):
            found.append({"field": name, "base": a, "test": b, "hardware": name in known})
    return sorted(found, key=lambda difference: not difference["hardware"])


def warnings(base: Sequence[Run], test: Sequence[Run]) -> list[str]:
    lines: list[str] = []
    seen: dict[str, str] = {}
    for run in (*base, *test):
        if run.report.status != "complete":
            lines.append(f"{run.path} is not complete: its status is {run.report.status}")
        times = sorted((name, row.time_s, row.check) for name, row in run.rows.items())
        identity = repr((run.report.benchmark, run.report.started_at, times))
        other = seen.setdefault(identity, run.path)
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
