"""Runs of a base against runs of a test, case by case: ratio, interval, verdict.

The run is the unit: only its time counts, on a log scale. The iterations within a run do not tell
how much two runs differ that were started alike. docs/compare.md derives the formulas.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, log, log1p, sqrt
from statistics import fmean
from typing import Any

import numpy as np
from scipy import stats

from analysis.differences import Difference, differences, resumed_text
from analysis.evidence import (
    ALLOWED,
    Evidence,
    evidence,
    is_disturbed,
    is_timed,
    load_of_others,
    noteworthy,
    untimed,
)
from analysis.load import LAST_DIGIT, Row, Run, by_benchmark, rows_of, time_of_blocks
from analysis.show import is_number, list_once
from common.cli import cut

Side = Sequence[tuple[Run, Row | None]]  # the runs of a side, and the case in each
Rows = Sequence[Row | None]  # those of a case, one a run; None where a run lacks the case

ALPHA = 0.05  # of error, two-sided
POWER = 0.9  # the smallest change is shown in so many of all comparisons
MAX_RUNS = 100  # a larger number of runs is never recommended
WIDEST = 3.0  # an interval that reaches farther from its ratio, as a factor, says nothing
UNEXPLAINED = 5.0  # a change by a larger factor is reported although the runs were disturbed
FEWEST = 5  # runs of a side among which one can be far off
FAR_SIGMAS, FAR = 5.0, 1.2  # a run is far off by this number of deviations and by this factor


@dataclass(frozen=True)
class Design:
    """How runs are compared."""

    margin: float = 0.02  # the smallest relative change that matters
    paired: bool = False  # base[i] and test[i] were neighbours in time: their ratio is the unit
    interleaved: bool = False  # the blocks of both took turns: as many of each count
    runs: int = 2  # a verdict needs this number of runs a side that are evidence
    allow_disturbed: bool = False  # the load of a run is no reason to leave it out
    looks: int = 1  # how often the growing data are looked at; the looks share the error rate

    @property
    def error_rate(self) -> float:
        """The part of ALPHA that a look has. An interval holds the truth with 1 - this."""
        return ALPHA / self.looks


@dataclass
class Result:
    """One case on both sides. Times in seconds, one a run; ratio = test / base, over 1 is slower.

    verdict: slower, faster, same, undecided; failed if the case failed in at least half of TEST's
    runs; missing if TEST has no time in at least half of them, new if BASE has none; otherwise
    not compared.
    """

    benchmark: str
    key: dict[str, Any]
    label: str = ""
    verdict: str = "not compared"
    reason: str = ""
    caveats: list[str] = field(default_factory=list)  # what the verdict has to say beside itself
    measure: str = ""  # the step or metric whose times are compared; empty: nothing is
    times_are: list[str] = field(default_factory=list)  # by which estimator; see load.timed
    base_runs: list[int] = field(default_factory=list)  # the positions of the runs that count
    test_runs: list[int] = field(default_factory=list)
    base_s: list[float] = field(default_factory=list)
    test_s: list[float] = field(default_factory=list)
    enough: bool = True  # runs for a verdict
    disturbed: bool = False  # there would be enough if their load were no reason to leave them out
    left_out: dict[str, str] = field(default_factory=dict)  # label of a run -> why
    # how far a number in the logs of BASE and of TEST may be off by its last digit, as a share
    rounding: tuple[float, float] = (0.0, 0.0)
    # the position of each run that does not count for this case -> why
    base_why: dict[int, str] = field(default_factory=dict)
    test_why: dict[int, str] = field(default_factory=dict)
    ratio: float | None = None
    # of the ratio, with 1 - Design.error_rate; None where nothing tells how much runs scatter
    interval: tuple[float, float] | None = None
    p: float | None = None  # how likely such a ratio is without a difference
    runs_needed: int | None = None  # a side, about, to narrow the interval to +-margin
    # the smallest change, as a fraction, that so many runs show in 9 of 10 comparisons
    smallest_change: float | None = None

    @property
    def pair_ratios(self) -> list[float]:
        """test / base of each pair, if runs are compared in pairs."""
        return [test / base for base, test in zip(self.base_s, self.test_s, strict=True)]

    @property
    def is_telling(self) -> bool:
        """Whether the interval says anything: it reaches to at most WIDEST times the ratio."""
        if self.interval is None or self.ratio is None:
            return False
        low, high = self.interval
        return self.ratio / WIDEST <= low and high <= self.ratio * WIDEST


@dataclass(frozen=True)
class Comparison:
    cases: list[Result]
    mean: Result | None  # the geometric mean over the cases that all counting runs have
    environment: list[Difference]  # hardware first
    warnings: list[str]
    base: Sequence[Run]
    test: Sequence[Run]
    design: Design

    @property
    def left_out(self) -> dict[str, str]:
        """The runs, or pairs, that are no evidence for any case -> why: see Evidence.left_out."""
        return {label: why for case in self.cases for label, why in case.left_out.items()}


def compare(base: Sequence[Run], test: Sequence[Run], design: Design) -> Comparison:
    """Compare every case that either side has. Raises ValueError where no case is on both."""
    cases = results_of_cases(base, test, design)
    mean = mean_of(cases)
    judge_all([*cases, mean] if mean else cases, design)
    environment = differences(base, test)
    comparison = Comparison(cases, mean, environment, [], base, test, design)
    comparison.warnings.extend(warnings_of(comparison))
    return comparison


def far_off(
    runs: Sequence[Run], times: Sequence[tuple[list[int], list[float]]]
) -> dict[str, float]:
    """The runs of a side whose time is far off those of the others: label -> the largest factor.

    times: for each case the positions of the runs, and their seconds. The deviation is the median
    absolute one of the logarithms, times 1.4826 (Hampel 1974).
    """
    found: dict[str, float] = {}
    for positions, seconds in times:
        if len(seconds) < FEWEST:
            continue
        logs = np.log(seconds)
        off = logs - np.median(logs)
        limit = max(FAR_SIGMAS * 1.4826 * float(np.median(np.abs(off))), np.log(FAR))
        for position, distance in zip(positions, off, strict=True):
            if abs(distance) > limit:
                label, factor = runs[position].label, float(np.exp(distance))
                found[label] = max(found.get(label, factor), factor, key=lambda x: abs(np.log(x)))
    return found


def warnings_of(comparison: Comparison) -> list[str]:
    """Runs that are left out and why, runs that were disturbed and count, and other programs."""
    lines, design = noteworthy(comparison.left_out), comparison.design
    for side, all_runs in (("base", comparison.base), ("test", comparison.test)):
        far: dict[str, float] = {}
        for name, same in by_benchmark(all_runs).items():  # positions are those among them
            cases = [case for case in comparison.cases if case.benchmark == name]
            times = [(getattr(case, f"{side}_runs"), getattr(case, f"{side}_s")) for case in cases]
            far |= far_off(same, times)
        if far:
            names = cut([f"{name} ({factor:.2f} times)" for name, factor in far.items()], 4)
            what = f"far off the other runs of {side.upper()}: {names}"
            lines.append(f"{what}; they count, and widen the intervals: look for the cause")
    runs = [*comparison.base, *comparison.test]
    disturbed = [load for run in runs if is_disturbed(run) and (load := load_of_others(run))]
    if disturbed and (design.paired or design.allow_disturbed):
        busy, cores = max(disturbed)
        what = f"other processes used up to {busy:.3g} of {cores} cores"
        which = f"{len(disturbed)} of {len(runs)} runs"
        rule = ALLOWED if design.allow_disturbed else "pairs count if both sides were loaded alike"
        lines.append(f"{what} in {which}: {rule}")
    for run in runs:
        if resumed := resumed_text(run):
            lines.append(f"{run.label} was resumed: {resumed}")
        if run.synchronized:
            what = "PyTorch's script waits for the device in each iteration, ddp_sweep once a block"
            lines.append(f"{run.label}: {what}; that alone may make ddp_sweep's steps shorter")
    return lines


def warning_of_order(base: Sequence[Run], test: Sequence[Run]) -> list[str]:
    """Where one side ran before the other one, a drift of the machine is a change, too."""
    base_starts = [run.started_at for run in base if run.started_at]
    test_starts = [run.started_at for run in test if run.started_at]
    if len(base) + len(test) == 2 or not base_starts or not test_starts:
        return []  # without a verdict, or a report of another program
    if max(base_starts) < min(test_starts) or max(test_starts) < min(base_starts):
        return [
            "all runs of one side started before all of the other: what changed on the machine "
            "meanwhile is in the ratio, and not in the interval; ab.py runs them in turn"
        ]
    return []


def why_none_joins(base: Sequence[Run], test: Sequence[Run]) -> str:
    """How the sides differ: in their benchmarks, or in the keys of the two most similar cases."""
    benchmarks = [list_once(run.benchmark for run in runs) for runs in (base, test)]
    if benchmarks[0] != benchmarks[1]:
        return f"BASE has {benchmarks[0]}, TEST {benchmarks[1]}"
    ours, theirs = next(iter(rows_of(base)), None), rows_of(test)
    if not ours or not theirs:
        return "BASE has no case" if theirs else "TEST has no case"

    def fields_apart(row: Row) -> dict[str, tuple[Any, Any]]:
        pairs = {name: (ours.key.get(name), row.key.get(name)) for name in ours.key | row.key}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    apart = min(map(fields_apart, theirs), key=len)  # not empty: no case is on both sides
    shown = [f"{name} ({a} in BASE, {b} in TEST)" for name, (a, b) in [*apart.items()][:3]]
    fields = ",".join(apart)
    return f"they differ in {', '.join(shown)}; --ignore-key {fields} joins such cases"


def results_of_cases(base: Sequence[Run], test: Sequence[Run], design: Design) -> list[Result]:
    """The times of every case; those that cannot be compared come last."""
    base_cases = cases_of(base)
    test_cases = cases_of(test)
    if not base_cases.keys() & test_cases.keys():
        raise ValueError(f"no case is on both sides: {why_none_joins(base, test)}")
    results = []
    for benchmark, form in base_cases | test_cases:
        base_side = [(run, run.rows.get(form)) for run in base if run.benchmark == benchmark]
        test_side = [(run, run.rows.get(form)) for run in test if run.benchmark == benchmark]
        if not all(is_bare(row) for _, row in base_side + test_side):
            results.append(result_of_case(benchmark, base_side, test_side, design))
    if not results:
        raise ValueError("no case has a time or a metric, in BASE or in TEST")
    if len({result.benchmark for result in results}) > 1:
        for result in results:
            result.label = f"{result.benchmark}, {result.label}"
    return sorted(results, key=lambda result: not result.measure)


def cases_of(runs: Sequence[Run]) -> dict[tuple[str, str], Row]:
    """The cases that any of the runs has, in the order of the reports."""
    cases: dict[tuple[str, str], Row] = {}
    for run in runs:
        for form, row in run.rows.items():
            cases.setdefault((run.benchmark, form), row)
    return cases


def is_bare(row: Row | None) -> bool:
    """Whether a case says that it passed and nothing else, as of a probe that looks at no rank."""
    return row is None or (row.check, row.metrics, len(row.times_s)) == ("passed", {}, 0)


def why_untimed(side: str, rows: Rows) -> str:
    """`BASE: no time in 2 of 6 runs: failed: ...`, or nothing where every run has a time."""
    whys = [why for row in rows if (why := untimed(row))]
    return f"{side}: no time in {len(whys)} of {len(rows)} runs: {whys[0]}" if whys else ""


def result_of_case(benchmark: str, base: Side, test: Side, design: Design) -> Result:
    """The times of a case on both sides, or why they cannot be compared."""
    if design.paired and len(base) != len(test):
        raise ValueError(f"pairs need as many runs a side, got {len(base)} and {len(test)}")
    base_rows, test_rows = [row for _, row in base], [row for _, row in test]
    first = next(row for row in (*base_rows, *test_rows) if row)
    result = Result(benchmark, first.key, first.label)
    reasons = [why_untimed("BASE", base_rows), why_untimed("TEST", test_rows)]
    result.reason = "; ".join(filter(None, reasons))
    found = evidence(base, test, design.paired, design.allow_disturbed)
    result.base_why, result.test_why = found.base_why, found.test_why
    failed = sum(row is not None and row.failed for row in test_rows)
    timed = sum(is_timed(row) for row in test_rows)
    if failed and 2 * failed >= len(test):
        result.verdict = "failed"
        return result
    if not any(is_timed(row) for row in base_rows):
        result.verdict = "new" if timed or not any(base_rows) else "missing"
        return result
    if 2 * timed <= len(test):
        result.verdict = "missing"
        return result
    measures = sorted({row.measure for row in base_rows + test_rows if is_timed(row)})
    if len(measures) > 1:
        result.reason = f"different times were kept: {', '.join(measures)}"
        return result
    result.left_out, result.caveats = found.left_out, found.caveats
    choose_runs(result, found, design)
    if not result.base_runs or not result.test_runs:
        return result
    result.measure = measures[0]
    result.times_are = sorted({row.time_is for row in base_rows + test_rows if is_timed(row)})
    kept_base = [row for i in result.base_runs if (row := base_rows[i])]
    kept_test = [row for i in result.test_runs if (row := test_rows[i])]
    result.rounding = rounding_of(kept_base), rounding_of(kept_test)
    result.base_s = [row.time_s for row in kept_base]
    result.test_s = [row.time_s for row in kept_test]
    if design.interleaved:
        times = [times_of_turns(a, b) for a, b in zip(kept_base, kept_test, strict=True)]
        result.base_s, result.test_s = [a for a, _ in times], [b for _, b in times]
    return result


def rounding_of(rows: Sequence[Row]) -> float:
    """How far a number in these logs may be off, as a share of it: half a unit of its last digit.
    The most precise log tells: 0.4 may be 0.40. 0 for reports, which have all digits."""
    shares = (row.metrics.get(LAST_DIGIT) for row in rows)
    return min((share / 2 if is_number(share) else 0.0 for share in shares), default=0.0)


def choose_runs(result: Result, found: Evidence, design: Design) -> None:
    """The runs whose times are shown. If too few are evidence for a verdict, these are all that
    have a time and no other fault than their load."""
    result.base_runs, result.test_runs = found.base, found.test
    counts = len(found.base), len(found.test)
    if min(counts) >= design.runs:
        return
    result.enough = False
    result.disturbed = min(len(found.base_timed), len(found.test_timed)) >= design.runs
    result.base_runs, result.test_runs = found.base_timed, found.test_timed
    if counts == (1, 1) and not found.left_out:
        return  # `judge` says that one run a side tells nothing
    noun = "pairs" if design.paired else "runs a side"
    have = f"{counts[0]}" if design.paired else f"{counts[0]} of BASE and {counts[1]} of TEST"
    why = f"{design.runs} usable {noun} are needed, there are {have}"
    result.reason = "; ".join(filter(None, [why, result.reason]))


def times_of_turns(base: Row, test: Row) -> tuple[float, float]:
    """The times of two runs that took turns: from as many blocks of each, since one run may have
    had more of them than the other."""
    blocks = min(len(base.rounds), len(test.rounds))
    times = [time_of_blocks(row.times_s, row.rounds, blocks) for row in (base, test)]
    return times[0], times[1]


def persists(ratios: Sequence[float]) -> bool:
    """Whether the ratios of successive rounds resemble each other more than by chance, 2 to 5 %.

    r > 1.645 / sqrt(n) - 1 / n: r is the autocorrelation of their logarithms at lag 1, which is
    about normal with these moments if they are independent (Bartlett, J. R. Statist. Soc. B 8,
    1946). Under 6 rounds nothing can be told.
    """
    if len(ratios) < 6:
        return False
    x = np.log(ratios)
    x = x - x.mean()
    if not x.any():
        return False
    return bool(x[1:] @ x[:-1] / (x @ x) > 1.645 / sqrt(len(x)) - 1 / len(x))


def mean_of(cases: Sequence[Result]) -> Result | None:
    """The geometric mean over cases, run by run, since what hits one case of a run hits others.

    Over the cases that have all runs that count for any case; None for fewer than two of them.
    """
    compared = [case for case in cases if case.measure]
    base_runs = sorted({i for case in compared for i in case.base_runs})
    test_runs = sorted({i for case in compared for i in case.test_runs})
    full = [c for c in compared if (c.base_runs, c.test_runs) == (base_runs, test_runs)]
    if len(full) < 2:
        return None
    mean = Result(full[0].benchmark, {}, f"geometric mean of {len(full)} cases")
    mean.base_s = geometric_means([case.base_s for case in full])
    mean.test_s = geometric_means([case.test_s for case in full])
    mean.enough = all(case.enough for case in full)
    mean.disturbed = not mean.enough and all(case.enough or case.disturbed for case in full)
    mean.caveats = full[0].caveats
    return mean


def geometric_mean(times_s: Sequence[float]) -> float | None:
    """That of the times of runs; None without any."""
    return exp(fmean(map(log, times_s))) if times_s else None


def geometric_means(rows: Sequence[Sequence[float]]) -> list[float]:
    """The geometric mean of each column."""
    logs = np.log(rows).mean(axis=0)
    means: list[float] = np.exp(logs).tolist()
    return means


def judge_all(cases: Sequence[Result], design: Design) -> None:
    """Fill in all that follows from the times. The mean is the last of the cases, if there is one.

    Of the cases that count as a difference at most error_rate are false on average. (Benjamini and
    Hochberg, J. R. Statist. Soc. B 57, 1995.)
    """
    compared = [case for case in cases if case.base_s and case.test_s]
    for case in compared:
        estimate(case, design)
    p_values = [case.p for case in compared if case.p is not None and case.enough]
    adjusted = iter(stats.false_discovery_control(p_values) if p_values else [])
    for case in compared:
        is_counted = case.p is not None and case.enough
        is_discovery = is_counted and next(adjusted) <= design.error_rate
        case.verdict, why = judge(case, is_discovery, design.margin)
        case.reason = "; ".join(filter(None, [why, case.reason]))


def estimate(case: Result, design: Design) -> None:
    """Ratio, interval, p, the runs that are needed and the smallest change, by Student's t on logs.

    The pair is the unit, or the run: then by Welch's t (Biometrika 34, 1947). A side of one run
    has no scatter that could be seen: the other side's counts for it.
    """
    base, test = np.log(case.base_s), np.log(case.test_s)
    ratios = test - base if design.paired else np.array([])
    log_ratio = test.mean() - base.mean()
    case.ratio = finite_exp(log_ratio)
    units = len(ratios) if design.paired else len(base) + len(test) - 1
    if units < 2:
        return
    with warnings.catch_warnings():  # runs without any scatter are no mistake
        warnings.simplefilter("ignore", RuntimeWarning)
        if design.paired:
            weight = 1 / len(ratios)  # the squared error of the log ratio, if runs scatter by 1
            result = stats.ttest_1samp(ratios, 0)
        else:
            weight = 1 / len(base) + 1 / len(test)
            is_one_alone = min(len(base), len(test)) == 1
            result = stats.ttest_ind(test, base, equal_var=is_one_alone)
        low, high = result.confidence_interval(1 - design.error_rate)
    certain = (1 - case.rounding[0]) * (1 - case.rounding[1])
    case.interval = finite_exp(low) * certain, finite_exp(high) / certain
    case.p = 1.0 if log_ratio == 0 else float(result.pvalue)
    t = stats.t.ppf(1 - design.error_rate / 2, result.df)
    error = (high - low) / 2 / t
    case.smallest_change = finite_exp(error * errors_to_show(t, result.df)) - 1
    case.runs_needed = runs_needed(error / sqrt(weight), design)


def finite_exp(log_ratio: float) -> float:
    """At most e^700, and no less than e^-700: JSON has no infinity, and a ratio is never 0."""
    return float(np.exp(np.clip(log_ratio, -700, 700)))


def errors_to_show(t: float, freedom: float) -> float:
    """How many standard errors a change must have to be shown with a probability of POWER.

    Shown: c * s > t * s' - z, with s and s' the relative errors of two estimates of the scatter,
    from the runs before and from those that shall show it, and z a standard normal number. About
    normal: c = t + z * sqrt(1 + (c^2 + t^2) / (2 * freedom)), a quadratic equation.
    """
    z2 = stats.norm.ppf(POWER) ** 2
    a = 1 - z2 / (2 * freedom)
    b = z2 * (1 + t**2 / (2 * freedom)) - t**2
    return float((t + sqrt(t**2 + a * b)) / a)


def runs_needed(scatter: float, design: Design) -> int | None:
    """The fewest runs a side whose interval reaches to +-margin; None where MAX_RUNS do not."""
    sides = 1 if design.paired else 2
    runs = np.arange(2, MAX_RUNS + 1)
    t = stats.t.ppf(1 - design.error_rate / 2, sides * (runs - 1))
    enough = runs[t * scatter * np.sqrt(sides / runs) <= log1p(design.margin)]
    return int(enough[0]) if len(enough) else None


def judge(case: Result, is_discovery: bool, margin: float) -> tuple[str, str]:
    """The verdict on a case that has a ratio, and why it is undecided.

    is_discovery: its p counts, given those of all cases.
    """
    if case.ratio is None or case.interval is None:
        why = "one run a side: how much runs differ is unknown; measure several, better 6"
        return "undecided", why
    low, high = case.interval
    if not case.enough:
        if case.disturbed and (low > UNEXPLAINED or high < 1 / UNEXPLAINED):
            what = f"over {UNEXPLAINED:g} times, which load does not explain"
            return "slower" if low > 1 else "faster", what
        return "undecided", ""
    most = 1 + margin
    least = 1 / most
    if least <= low and high <= most:
        return "same", ""
    if is_discovery and low > 1 and case.ratio > most:
        return "slower", ""
    if is_discovery and high < 1 and case.ratio < least:
        return "faster", ""
    if max(case.rounding) > margin / 4:
        off = f"{100 * max(case.rounding):.2g} %"
        return "undecided", f"the logs print so few digits that a number may be off by {off}"
    if low <= 1 <= high:
        return "undecided", "the interval is too wide"
    if case.ratio < least or case.ratio > most:
        return "undecided", "beyond the margin, but of so many cases one may be so by chance"
    return "undecided", "a change, but not certain to be beyond the margin"
