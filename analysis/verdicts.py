"""Runs of a base against runs of a test, case by case: ratio, interval, verdict.

The run is the unit: only its median counts, on a log scale. The iterations within a run do not tell
how much two runs differ that were started alike. docs/compare.md derives the formulas.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, log1p, sqrt
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy.special import fdtri, ndtri, stdtr, stdtrit  # scipy.stats takes 0.7 s to import

from analysis.differences import Difference, differences
from analysis.load import Row, Run
from analysis.show import canonical

Rows = Sequence[Row | None]  # those of a case, one a run; None where a run lacks the case
Cases = dict[tuple[str, str], None]  # the benchmark and the canonical key of each case, once
Key = dict[str, Any]

ALPHA = 0.05  # of error, two-sided
MIN_BLOCKS = 6  # in a pair of runs that took turns; with fewer blocks the runs' medians count
NEAR = 40  # so many cases a side are searched for the nearest two, where none joins
MIN_RUNS = 2  # a side: one run does not tell how much runs scatter
MAX_RUNS = 1000  # a larger number of runs is never recommended
POWER = 0.9  # a change that is shown is shown in so many of all comparisons


@dataclass(frozen=True)
class Design:
    """How runs are compared."""

    margin: float = 0.02  # the smallest relative change that matters
    paired: bool = False  # base[i] and test[i] were neighbours in time: their ratio is the unit
    interleaved: bool = False  # the blocks of both took turns, and make pairs as well
    looks: int = 1  # how often the growing data are looked at; the looks share the error rate

    @property
    def error_rate(self) -> float:
        """The part of ALPHA that a look has. An interval holds the truth with 1 - this."""
        return ALPHA / self.looks


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
    measure: str = ""  # the step or metric whose times are compared; empty: nothing is
    base_s: list[float] = field(default_factory=list)
    test_s: list[float] = field(default_factory=list)
    ratio: float | None = None
    # of the ratio, with 1 - Design.error_rate; None where nothing tells how much runs scatter
    interval: tuple[float, float] | None = None
    p: float | None = None  # how likely such a ratio is without a difference
    runs_needed: int | None = None  # a side, about, to narrow the interval to +-margin
    # the smallest change, as a fraction, that so many runs show in 9 of 10 comparisons
    smallest_change: float | None = None
    runs_to_show: int | None = None  # a side, about, that show a change of the margin so often
    pair_ratios: list[float] = field(default_factory=list)  # where runs are compared in pairs


@dataclass(frozen=True)
class Comparison:
    cases: list[Result]
    mean: Result | None  # the geometric mean over the cases that every run has
    environment: list[Difference]  # hardware first
    warnings: list[str]
    base: list[str]  # paths
    test: list[str]
    design: Design
    control_runs: int = 0  # a side, of the comparison of like with like that tells the noise


def compare(
    base: Sequence[Run],
    test: Sequence[Run],
    design: Design,
    control: "Comparison | None" = None,
) -> Comparison:
    """Compare every case that either side has. Raises ValueError where no case is on both.

    control: a comparison of like with like, of the same design, that tells how much runs scatter.
    """
    cases = results_of_cases(base, test, design)
    compared = [case for case in cases if case.measure]
    in_every_run = [case for case in compared if has_every_run(case, base, test)]
    mean = mean_of(in_every_run)
    estimate([*compared, mean] if mean else compared, design, control)
    return Comparison(
        cases,
        mean,
        differences(base, test),
        warnings_of([*base, *test]),
        [run.label for run in base],
        [run.label for run in test],
        design,
        len(control.base) if control else 0,
    )


def warnings_of(runs: Sequence[Run]) -> list[str]:
    warnings = []
    for run in runs:
        if run.status != "complete":
            warnings.append(f"{run.label} is not complete: its status is {run.status}")
        if run.synchronized:
            what = "PyTorch's script waits for the device in each iteration, ddp_sweep once a block"
            warnings.append(f"{run.label}: {what}; that alone may make ddp_sweep's steps shorter")
    return warnings


def results_of_cases(base: Sequence[Run], test: Sequence[Run], design: Design) -> list[Result]:
    """The times of every case; those that cannot be compared come last."""
    base_cases = cases_of(base)
    test_cases = cases_of(test)
    if not base_cases.keys() & test_cases.keys():
        examples = f"BASE has e.g. {first_of(base_cases)}; TEST {first_of(test_cases)}"
        raise ValueError(f"no case is on both sides{nearest(base, test)}: {examples}")
    results = []
    for benchmark, form in base_cases | test_cases:
        base_rows = rows_of_case(base, benchmark, form)
        test_rows = rows_of_case(test, benchmark, form)
        if all(is_bare(row) for row in base_rows + test_rows):
            continue
        result = times_of_case(benchmark, base_rows, test_rows, design)
        results.append(result)
    if not results:
        raise ValueError("no case has a time or a metric, in BASE or in TEST")
    benchmarks = {result.benchmark for result in results}
    if len(benchmarks) > 1:
        for result in results:
            result.label = f"{result.benchmark}, {result.label}"
    return sorted(results, key=lambda result: not result.measure)


def cases_of(runs: Sequence[Run]) -> Cases:
    """The cases that any of the runs has, in the order of the reports."""
    cases: Cases = {}
    for run in runs:
        for form in run.rows:
            cases[run.benchmark, form] = None
    return cases


def first_of(cases: Cases) -> str:
    for benchmark, form in cases:
        return f"{benchmark} {form}"
    return "none"


def rows_of_case(runs: Sequence[Run], benchmark: str, form: str) -> list[Row | None]:
    """The rows of a case, one for each run of its benchmark. form: its canonical key."""
    return [run.rows.get(form) for run in runs if run.benchmark == benchmark]


def nearest(base: Sequence[Run], test: Sequence[Run]) -> str:
    """`; the nearest differ in dtype (fp32 in BASE, bf16 in TEST)`, or nothing."""
    differing = []
    for ours, theirs in itertools.product(near(base), near(test)):
        if ours.benchmark == theirs.benchmark:
            differing.append(differing_fields(ours.key, theirs.key))
    fewest = min(differing, key=len, default=[])
    return f"; the nearest differ in {', '.join(fewest)}" if fewest else ""


def differing_fields(base: Key, test: Key) -> list[str]:
    """`dtype (fp32 in BASE, bf16 in TEST)` for each field in which two keys differ."""
    texts = []
    for name in base | test:
        ours = base.get(name)
        theirs = test.get(name)
        if ours != theirs:
            texts.append(f"{name} ({ours} in BASE, {theirs} in TEST)")
    return texts


class Near(NamedTuple):
    """A case that may be the nearest to one of the other side."""

    benchmark: str
    key: Key


def near(runs: Sequence[Run]) -> list[Near]:
    """The first cases of the runs."""
    cases = []
    for run in runs:
        cases += [Near(run.benchmark, row.key) for row in run.rows.values()]
    return cases[:NEAR]


def is_timed(row: Row | None) -> TypeGuard[Row]:
    return row is not None and row.time_s > 0


def is_bare(row: Row | None) -> bool:
    """Whether a case says that it passed and nothing else, as of a probe that looks at no rank."""
    return row is None or (row.check, row.metrics, len(row.times_s)) == ("passed", {}, 0)


def timed(rows: Rows) -> list[Row]:
    return [row for row in rows if is_timed(row)]


def why_untimed(side: str, rows: Rows) -> str:
    """`BASE: no time in 2 of 6 runs: failed: ...`, or nothing where every run has a time."""
    untimed = [row for row in rows if not is_timed(row)]
    if not untimed:
        return ""
    first = untimed[0]
    check = first.check if first else "not measured"
    why = "it has none above 0" if check == "passed" else check
    return f"{side}: no time in {len(untimed)} of {len(rows)} runs: {why}"


def times_of_case(benchmark: str, base: Rows, test: Rows, design: Design) -> Result:
    """The times of a case on both sides, or why they cannot be compared."""
    if design.paired and len(base) != len(test):
        raise ValueError(f"pairs need as many runs a side, got {len(base)} and {len(test)}")
    first = next(row for row in (*base, *test) if row)
    result = Result(benchmark, first.key, first.name)
    result.reason = join_texts(why_untimed("BASE", base), why_untimed("TEST", test))
    timed_base = timed(base)
    timed_test = timed(test)
    if not timed_base or not timed_test:
        never_in_base = not any(base)
        result.verdict = "new" if timed_test or never_in_base else "missing"
        return result
    measures = sorted({row.measure for row in timed_base + timed_test})
    if len(measures) > 1:
        result.reason = f"different times were kept: {', '.join(measures)}"
        return result
    if design.paired:
        timed_base, timed_test = timed_pairs(base, test)
        if not timed_base:
            return result
        for a, b in zip(timed_base, timed_test, strict=True):
            ratio = ratio_of(a, b, design.interleaved)
            result.pair_ratios.append(ratio)
    result.measure = measures[0]
    result.base_s = [row.time_s for row in timed_base]
    result.test_s = [row.time_s for row in timed_test]
    return result


def join_texts(*texts: str) -> str:
    """Those that say something."""
    return "; ".join(text for text in texts if text)


def timed_pairs(base: Rows, test: Rows) -> tuple[list[Row], list[Row]]:
    """The rows of both sides, of the pairs in which both have a time."""
    timed_base, timed_test = [], []
    for a, b in zip(base, test, strict=True):
        if is_timed(a) and is_timed(b):
            timed_base.append(a)
            timed_test.append(b)
    return timed_base, timed_test


def ratio_of(base: Row, test: Row, interleaved: bool) -> float:
    """TEST / BASE in a pair of runs.

    It is the ratio of their medians. Where the runs took turns, it is the median over the blocks
    that were neighbours in time: a slow moment hits both blocks of a pair, or is an outlier.
    """
    if interleaved and has_blocks(base) and has_blocks(test):
        base_s = block_medians(base)
        test_s = block_medians(test)
        count = min(len(base_s), len(test_s))  # one run may have had more blocks than the other
        base_s, test_s = base_s[:count], test_s[:count]
        if count >= MIN_BLOCKS and base_s.min() > 0 and test_s.min() > 0:
            logs = np.log(test_s / base_s)
            return float(np.exp(np.median(logs)))
    return test.time_s / base.time_s


def has_blocks(row: Row) -> bool:
    return 0 < sum(row.rounds) == len(row.times_s)


def block_medians(row: Row) -> NDArray[np.float64]:
    """The median of each block of a run that took turns."""
    ends = np.cumsum(row.rounds)
    blocks = np.split(row.times_s, ends[:-1])
    return np.array([np.median(block) for block in blocks])


def has_every_run(case: Result, base: Sequence[Any], test: Sequence[Any]) -> bool:
    """Whether a case has a time in each of these runs."""
    if len(case.base_s) != len(base):
        return False
    return len(case.test_s) == len(test)


def mean_of(cases: Sequence[Result]) -> Result | None:
    """The geometric mean over cases, run by run, since what hits one case of a run hits others.

    None for fewer than two cases.
    """
    if len(cases) < 2:
        return None
    mean = Result(cases[0].benchmark, {}, f"geometric mean of {len(cases)} cases")
    mean.base_s = geometric_means([case.base_s for case in cases])
    mean.test_s = geometric_means([case.test_s for case in cases])
    mean.pair_ratios = geometric_means([case.pair_ratios for case in cases])
    return mean


def geometric_means(rows: Sequence[Sequence[float]]) -> list[float]:
    """The geometric mean of each column."""
    logs = np.log(rows).mean(axis=0)
    means: list[float] = np.exp(logs).tolist()
    return means


def estimate(cases: list[Result], design: Design, control: Comparison | None = None) -> None:
    """Fill in ratio, interval, p and verdict. The mean is the last of the cases, if there is one.

    control: see `compare`.
    """
    if not cases:
        return
    logs = logs_of(cases, design)
    if control:
        like_with_like = control_cases(cases, control)
        use_noise_of(logs, logs_of(like_with_like, design))
    add_estimates(logs, design.error_rate)
    p_values = logs["p"][logs["freedom"] > 0]
    largest_p = largest_discovery(p_values, design.error_rate)
    widths = widths_of_runs(design)
    for case, row in zip(cases, logs.itertuples(), strict=True):
        case.ratio = row.ratio
        if row.freedom > 0:
            case.interval = (row.low, row.high)
            case.p = row.p
            case.smallest_change = row.smallest_change
            margin = inf  # in standard deviations of a run
            if row.error:
                margin = log1p(design.margin) * sqrt(row.weight) / row.error
            case.runs_needed = fewest_runs(widths["interval"], margin)
            case.runs_to_show = fewest_runs(widths["shown"], margin)
        case.verdict, why = judge(case, row.p <= largest_p, design.margin)
        unused = ""
        if control and not row.uses_control:
            unused = "the control is not used: it lacks the case, or scatters less"
        case.reason = join_texts(why, unused, case.reason)


def add_estimates(logs: pd.DataFrame, rate: float) -> None:
    """Ratio, ends of its interval, p and the smallest change, as columns of `logs_of`'s table."""
    log_ratio = logs["log_ratio"]
    error = logs["error"]
    freedom = logs["freedom"]
    alike = (log_ratio == 0) & (error == 0)
    p = 2 * stdtr(freedom, -log_ratio.abs() / error)
    logs["p"] = p.mask(alike, 1.0)
    half = stdtrit(freedom, 1 - rate / 2) * error
    logs["ratio"] = finite_exp(log_ratio)
    logs["low"] = finite_exp(log_ratio - half)
    logs["high"] = finite_exp(log_ratio + half)
    smallest = errors_to_show(freedom, rate) * error
    logs["smallest_change"] = finite_exp(smallest) - 1


def finite_exp(logs: "pd.Series[float]") -> "pd.Series[float]":
    """At most e^700, and no less than e^-700: JSON has no infinity, and a ratio is never 0."""
    return np.exp(logs.clip(-700, 700))


def control_cases(cases: Sequence[Result], control: Comparison) -> list[Result]:
    """The control's result for each case, without times where it has none."""
    known = {}
    for case in control.cases:
        known[case.benchmark, canonical(case.key)] = case
    results = []
    for case in cases:
        lacking = Result(case.benchmark, case.key)
        result = known.get((case.benchmark, canonical(case.key)), lacking)
        results.append(result)
    has_mean = not cases[-1].key
    if has_mean:
        *of_cases, lacking = results
        in_every_run = [r for r in of_cases if has_every_run(r, control.base, control.test)]
        return [*of_cases, mean_of(in_every_run) or lacking]
    return results


def use_noise_of(logs: pd.DataFrame, control: pd.DataFrame) -> None:
    """Take the scatter of runs from both, each weighted by its degrees of freedom.

    Not where the runs scatter more than those of the control, by an F test at 5 %: then the control
    is no example of them. The new column `uses_control` tells.
    """
    weight = logs["weight"]
    freedom = logs["freedom"].clip(lower=0)
    variance = logs["error"] ** 2 / weight
    variance = variance.where(freedom > 0, 0)
    control_freedom = control["freedom"].clip(lower=0)
    control_variance = control["error"] ** 2 / control["weight"]
    largest_ratio = fdtri(freedom.clip(lower=1), control_freedom, 1 - ALPHA)
    scatters_alike = variance <= largest_ratio * control_variance
    uses_control = (control_freedom > 0) & scatters_alike
    both = freedom + control_freedom
    squares = freedom * variance + control_freedom * control_variance
    error = np.sqrt(squares / both * weight)
    logs["error"] = logs["error"].mask(uses_control, error)
    logs["freedom"] = logs["freedom"].mask(uses_control, both)
    logs["uses_control"] = uses_control


def errors_to_show(freedom: Any, rate: float) -> Any:
    """How many standard errors a change must have to be shown with a probability of POWER.

    Shown: c * s > t * s' - z, with s and s' the relative errors of two estimates of the scatter,
    from the runs before and from those that shall show it, and z a standard normal number. About
    normal: c = t + z * sqrt(1 + (c^2 + t^2) / (2 * freedom)), a quadratic equation.
    """
    t = stdtrit(freedom, 1 - rate / 2)
    t2 = t**2
    z2 = ndtri(POWER) ** 2
    a = 1 - z2 / (2 * freedom)
    b = z2 * (1 + t2 / (2 * freedom)) - t2
    root = np.sqrt(t2 + a * b)
    return (t + root) / a


def fewest_runs(widths: NDArray[np.float64], margin: float) -> int | None:
    """The smallest number of runs whose width is within the margin; None where none is."""
    enough = np.flatnonzero(widths <= margin)
    if not len(enough):
        return None
    return MIN_RUNS + int(enough[0])


def logs_of(cases: Sequence[Result], design: Design) -> pd.DataFrame:
    """What Student's t needs, a row a case."""
    if design.paired:
        return logs_in_pairs(cases)
    return logs_of_two_sides(cases, design)


def logs_of_cases(samples: Sequence[Sequence[float]]) -> pd.DataFrame:
    """The logarithms, a row a case; shorter rows are padded with NaN."""
    rows = [dict(enumerate(values)) for values in samples]
    return np.log(pd.DataFrame(rows))


def logs_in_pairs(cases: Sequence[Result]) -> pd.DataFrame:
    """What Student's t needs, a row a case, where the ratio of a pair of runs is the unit.

    log_ratio; error: its standard error; freedom: the degrees of freedom, 0 where nothing tells how
    much runs scatter; weight: the error is the standard deviation of a unit times sqrt(weight).
    """
    d = logs_of_cases([case.pair_ratios for case in cases])
    n = d.count(axis=1)
    columns = {
        "log_ratio": d.mean(axis=1),
        "error": d.sem(axis=1),
        "freedom": n - 1.0,
        "weight": 1 / n,
    }
    return pd.DataFrame(columns)


def logs_of_two_sides(cases: Sequence[Result], design: Design) -> pd.DataFrame:
    """What Student's t needs where the run is the unit; the columns of `logs_in_pairs`.

    Both sides have one variance. This is not safe where their numbers of runs differ: there Welch's
    t (Biometrika 34, 1947) replaces it where it is wider. A side of one run has no scatter that
    could be seen: the other side's scatter counts for it.
    """
    x = logs_of_cases([case.base_s for case in cases])
    y = logs_of_cases([case.test_s for case in cases])
    m = x.count(axis=1)
    n = y.count(axis=1)
    base_squares = x.var(axis=1, ddof=0) * m  # sums of squares about the means
    test_squares = y.var(axis=1, ddof=0) * n
    freedom = m + n - 2.0
    weight = 1 / m + 1 / n
    variance = (base_squares + test_squares) / freedom
    error = np.sqrt(variance * weight)
    s = base_squares / (m - 1) / m  # squared errors of the means
    t = test_squares / (n - 1) / n
    welch_error = np.sqrt(s + t)
    scatter = s**2 / (m - 1) + t**2 / (n - 1)  # of the squared error, by which it is uncertain
    welch_freedom = (s + t) ** 2 / scatter
    level = 1 - design.error_rate / 2
    half = stdtrit(freedom, level) * error
    welch_half = stdtrit(welch_freedom, level) * welch_error
    is_wider = (m != n) & (welch_half > half)
    columns = {
        "log_ratio": y.mean(axis=1) - x.mean(axis=1),
        "error": error.mask(is_wider, welch_error),
        "freedom": freedom.mask(is_wider, welch_freedom),
        "weight": weight,
    }
    return pd.DataFrame(columns)


def widths_of_runs(design: Design) -> dict[str, NDArray[np.float64]]:
    """What MIN_RUNS to MAX_RUNS runs a side can tell, if runs scatter by 1.

    interval: half its width. shown: the smallest change that is seen with a probability of POWER.
    """
    runs = np.arange(MIN_RUNS, MAX_RUNS + 1)
    sides = 1 if design.paired else 2
    freedom = sides * (runs - 1)
    error = np.sqrt(sides / runs)
    rate = design.error_rate
    return {
        "interval": stdtrit(freedom, 1 - rate / 2) * error,
        "shown": errors_to_show(freedom, rate) * error,
    }


def judge(case: Result, is_discovery: bool, margin: float) -> tuple[str, str]:
    """The verdict on a case that has a ratio, and why it is undecided.

    is_discovery: its p counts, given those of all cases.
    """
    if case.ratio is None or case.interval is None:
        why = "one run a side: how much runs differ is unknown; measure several, better 6"
        return "undecided", why
    low, high = case.interval
    most = 1 + margin
    least = 1 / most
    if least <= low and high <= most:
        return "same", ""
    if is_discovery and case.ratio > most:
        return "slower", ""
    if is_discovery and case.ratio < least:
        return "faster", ""
    if low <= 1 <= high:
        return "undecided", "the interval is too wide"
    if case.ratio < least or case.ratio > most:
        return "undecided", "beyond the margin, but of so many cases one may be so by chance"
    return "undecided", "a change, but not certain to be beyond the margin"


def largest_discovery(p_values: ArrayLike, rate: float) -> float:
    """The largest p that counts as a difference; -1 where none does.

    Of the differences up to it at most `rate` are false on average. Benjamini and Hochberg,
    J. R. Statist. Soc. B 57, 1995.
    """
    p = np.sort(p_values)
    count = len(p)
    limits = rate * np.arange(1, count + 1) / max(1, count)
    discoveries = p[p <= limits]
    return float(discoveries.max(initial=-1))
