"""Runs of a base against runs of a test, case by case: ratio, interval, verdict.

The run is the unit: only its median counts, on a log scale. The iterations within a run do not tell
how much two runs differ that were started alike. docs/compare.md derives the formulas.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, log1p, sqrt
from typing import Any, TypeGuard

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy.special import fdtri, ndtri, stdtr, stdtrit  # scipy.stats takes 0.7 s to import

from analysis.differences import Difference, differences
from analysis.load import Row, Run
from analysis.show import canonical

Rows = Sequence[Row | None]  # those of a case, one a run; None where a run lacks the case

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
    base_cases, test_cases = cases_of(base), cases_of(test)
    if not base_cases.keys() & test_cases.keys():
        examples = f"BASE has e.g. {first_of(base_cases)}; TEST {first_of(test_cases)}"
        raise ValueError(f"no case is on both sides{nearest(base, test)}: {examples}")
    cases = []
    for benchmark, form in base_cases | test_cases:
        base_rows = rows_of_case(base, benchmark, form)
        test_rows = rows_of_case(test, benchmark, form)
        if all(is_bare(row) for row in base_rows + test_rows):
            continue
        cases.append(times_of_case(benchmark, base_rows, test_rows, design))
    if not cases:
        raise ValueError("no case has a time or a metric, in BASE or in TEST")
    if len({case.benchmark for case in cases}) > 1:
        for case in cases:
            case.label = f"{case.benchmark}, {case.label}"
    cases.sort(key=lambda case: not case.measure)  # what cannot be compared comes last
    compared = [case for case in cases if case.measure]
    mean = mean_of([case for case in compared if has_every_run(case, base, test)])
    estimate([*compared, mean] if mean else compared, design, control)
    ended = [run for run in (*base, *test) if run.status != "complete"]
    return Comparison(
        cases,
        mean,
        differences(base, test),
        [f"{run.label} is not complete: its status is {run.status}" for run in ended],
        [run.label for run in base],
        [run.label for run in test],
        design,
        len(control.base) if control else 0,
    )


def cases_of(runs: Sequence[Run]) -> dict[tuple[str, str], None]:
    """The benchmark and the canonical key of each case, once, in the order of the reports."""
    return dict.fromkeys((run.benchmark, form) for run in runs for form in run.rows)


def first_of(cases: dict[tuple[str, str], None]) -> str:
    return " ".join(next(iter(cases), ["none"]))


def rows_of_case(runs: Sequence[Run], benchmark: str, form: str) -> list[Row | None]:
    """The rows of a case, one for each run of its benchmark. form: its canonical key."""
    return [run.rows.get(form) for run in runs if run.benchmark == benchmark]


def nearest(base: Sequence[Run], test: Sequence[Run]) -> str:
    """`; the nearest differ in dtype (fp32 in BASE, bf16 in TEST)`, or nothing."""
    differing = []
    for (benchmark, ours), (other, theirs) in itertools.product(near(base), near(test)):
        if benchmark == other:
            names = [name for name in ours | theirs if ours.get(name) != theirs.get(name)]
            words = [f"{n} ({ours.get(n)} in BASE, {theirs.get(n)} in TEST)" for n in names]
            differing.append(words)
    fewest = min(differing, key=len, default=[])
    return f"; the nearest differ in {', '.join(fewest)}" if fewest else ""


def near(runs: Sequence[Run]) -> list[tuple[str, dict[str, Any]]]:
    """The benchmark and the key of the first cases."""
    cases = [(run.benchmark, row.key) for run in runs for row in run.rows.values()]
    return cases[:NEAR]


def is_timed(row: Row | None) -> TypeGuard[Row]:
    return row is not None and row.time_s > 0


def is_bare(row: Row | None) -> bool:
    """Whether a case says that it passed and nothing else, as of a probe that looks at no rank."""
    return row is None or (row.check == "passed" and not row.metrics and not row.times_s)


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
    notes = [why_untimed("BASE", base), why_untimed("TEST", test)]
    result.reason = "; ".join(note for note in notes if note)
    timed_base, timed_test = timed(base), timed(test)
    if not timed_base or not timed_test:
        never_in_base = not any(base)
        result.verdict = "new" if timed_test or never_in_base else "missing"
        return result
    measures = sorted({row.measure for row in timed_base + timed_test})
    if len(measures) > 1:
        result.reason = f"different times were kept: {', '.join(measures)}"
        return result
    if design.paired:
        pairs = [(a, b) for a, b in zip(base, test, strict=True) if is_timed(a) and is_timed(b)]
        if not pairs:
            return result
        timed_base = [a for a, _ in pairs]
        timed_test = [b for _, b in pairs]
        result.pair_ratios = [ratio_of(a, b, design.interleaved) for a, b in pairs]
    result.measure = measures[0]
    result.base_s = [row.time_s for row in timed_base]
    result.test_s = [row.time_s for row in timed_test]
    return result


def ratio_of(base: Row, test: Row, interleaved: bool) -> float:
    """TEST / BASE in a pair of runs.

    It is the ratio of their medians. Where the runs took turns, it is the median over the blocks
    that were neighbours in time: a slow moment hits both blocks of a pair, or is an outlier.
    """
    if interleaved and has_blocks(base) and has_blocks(test):
        # one run may have had more blocks than the other
        blocks = np.array(list(zip(block_medians(base), block_medians(test), strict=False)))
        if len(blocks) >= MIN_BLOCKS and blocks.min() > 0:
            base_s, test_s = blocks.T
            return float(np.exp(np.median(np.log(test_s / base_s))))
    return test.time_s / base.time_s


def has_blocks(row: Row) -> bool:
    return 0 < sum(row.rounds) == len(row.times_s)


def block_medians(row: Row) -> list[Any]:
    """The median of each block of a run that took turns."""
    ends = np.cumsum(row.rounds)
    return [np.median(block) for block in np.split(row.times_s, ends[:-1])]


def has_every_run(case: Result, base: Sequence[Run], test: Sequence[Run]) -> bool:
    return len(case.base_s) == len(base) and len(case.test_s) == len(test)


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
    means: list[float] = np.exp(np.log(rows).mean(axis=0)).tolist()
    return means


def estimate(cases: list[Result], design: Design, control: Comparison | None = None) -> None:
    """Fill in ratio, interval, p and verdict. The mean is the last of the cases, if there is one.

    control: see `compare`.
    """
    if not cases:
        return
    logs = logs_of(cases, design)
    if control:
        use_noise_of(logs, logs_of(control_cases(cases, control), design))
    log_ratio, error, freedom = logs["log_ratio"], logs["error"], logs["freedom"]
    rate = design.error_rate
    alike = (log_ratio == 0) & (error == 0)
    logs["p"] = (2 * stdtr(freedom, -log_ratio.abs() / error)).mask(alike, 1.0)
    largest_p = largest_discovery(logs["p"][freedom > 0], rate)
    half = stdtrit(freedom, 1 - rate / 2) * error
    logs["ratio"] = finite_exp(log_ratio)
    logs["low"] = finite_exp(log_ratio - half)
    logs["high"] = finite_exp(log_ratio + half)
    logs["smallest_change"] = finite_exp(errors_to_show(freedom, rate) * error) - 1
    widths = widths_of_runs(design)
    for case, row in zip(cases, logs.itertuples(), strict=True):
        case.ratio = row.ratio
        if row.freedom > 0:
            case.interval, case.p = (row.low, row.high), row.p
            # in standard deviations of a run
            margin = log1p(design.margin) * sqrt(row.weight) / row.error if row.error else inf
            case.runs_needed = fewest_runs(widths["interval"], margin)
            case.runs_to_show = fewest_runs(widths["shown"], margin)
            case.smallest_change = row.smallest_change
        case.verdict, why = judge(case, row.p <= largest_p, design.margin)
        if control and not row.uses_control:
            why += f"{why and '; '}the control is not used: it lacks the case, or scatters less"
        case.reason = "; ".join(text for text in (why, case.reason) if text)


def finite_exp(logs: "pd.Series[float]") -> "pd.Series[float]":
    """At most e^700, and no less than e^-700: JSON has no infinity, and a ratio is never 0."""
    return np.exp(logs.clip(-700, 700))


def control_cases(cases: Sequence[Result], control: Comparison) -> list[Result]:
    """The control's result for each case, without times where it has none."""
    by_key = {(case.benchmark, canonical(case.key)): case for case in control.cases}
    results = []
    for case in cases:
        lacking = Result(case.benchmark, case.key)
        results.append(by_key.get((case.benchmark, canonical(case.key)), lacking))
    if cases[-1].key:  # no mean
        return results
    runs = len(control.base)
    of_mean = [r for r in results[:-1] if len(r.base_s) == runs and len(r.test_s) == runs]
    return [*results[:-1], mean_of(of_mean) or results[-1]]


def use_noise_of(logs: pd.DataFrame, control: pd.DataFrame) -> None:
    """Take the scatter of runs from both, each weighted by its degrees of freedom.

    Not where the runs scatter more than those of the control, by an F test at 5 %: then the control
    is no example of them. The new column `uses_control` tells.
    """
    freedom = logs["freedom"].clip(lower=0)
    variance = (logs["error"] ** 2 / logs["weight"]).where(freedom > 0, 0)
    control_freedom = control["freedom"].clip(lower=0)
    control_variance = control["error"] ** 2 / control["weight"]
    limit = fdtri(freedom.clip(lower=1), control_freedom, 1 - ALPHA) * control_variance
    logs["uses_control"] = (control_freedom > 0) & (variance <= limit)
    both = freedom + control_freedom
    pooled = (freedom * variance + control_freedom * control_variance) / both
    error = np.sqrt(pooled * logs["weight"])
    logs["error"] = logs["error"].mask(logs["uses_control"], error)
    logs["freedom"] = logs["freedom"].mask(logs["uses_control"], both)


def errors_to_show(freedom: Any, rate: float) -> Any:
    """How many standard errors a change must have to be shown with a probability of POWER.

    Shown: c * s > t * s' - z, with s and s' the relative errors of two estimates of the scatter,
    from the runs before and from those that shall show it, and z a standard normal number. About
    normal: c = t + z * sqrt(1 + (c^2 + t^2) / (2 * freedom)), a quadratic equation.
    """
    t = stdtrit(freedom, 1 - rate / 2)
    z2 = ndtri(POWER) ** 2
    a = 1 - z2 / (2 * freedom)
    b = z2 * (1 + t**2 / (2 * freedom)) - t**2
    return (t + np.sqrt(t**2 + a * b)) / a


def fewest_runs(widths: NDArray[np.float64], margin: float) -> int | None:
    """The smallest number of runs whose width is within the margin; None where none is."""
    enough = np.flatnonzero(widths <= margin)
    return MIN_RUNS + int(enough[0]) if len(enough) else None


def logs_of(cases: Sequence[Result], design: Design) -> pd.DataFrame:
    """What Student's t needs, a row a case."""
    return logs_in_pairs(cases) if design.paired else logs_of_two_sides(cases, design)


def logs_of_cases(samples: Sequence[Sequence[float]]) -> pd.DataFrame:
    """The logarithms, a row a case; shorter rows are padded with NaN."""
    return np.log(pd.DataFrame([dict(enumerate(values)) for values in samples]))


def logs_in_pairs(cases: Sequence[Result]) -> pd.DataFrame:
    """What Student's t needs, a row a case, where the ratio of a pair of runs is the unit.

    log_ratio; error: its standard error; freedom: the degrees of freedom, 0 where nothing tells how
    much runs scatter; weight: the error is the standard deviation of a unit times sqrt(weight).
    """
    d = logs_of_cases([case.pair_ratios for case in cases])
    n = d.count(axis=1)
    columns = {"log_ratio": d.mean(axis=1), "error": d.sem(axis=1)}
    return pd.DataFrame(columns | {"freedom": n - 1.0, "weight": 1 / n})


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
    welch_freedom = (s + t) ** 2 / (s**2 / (m - 1) + t**2 / (n - 1))
    level = 1 - design.error_rate / 2
    half = stdtrit(freedom, level) * error
    welch_half = stdtrit(welch_freedom, level) * welch_error
    is_wider = (m != n) & (welch_half > half)
    columns = {"log_ratio": y.mean(axis=1) - x.mean(axis=1)}
    columns["error"] = error.mask(is_wider, welch_error)
    columns["freedom"] = freedom.mask(is_wider, welch_freedom)
    return pd.DataFrame(columns | {"weight": weight})


def widths_of_runs(design: Design) -> dict[str, NDArray[np.float64]]:
    """What MIN_RUNS to MAX_RUNS runs a side can tell, if runs scatter by 1.

    interval: half its width. shown: the smallest change that is seen with a probability of POWER.
    """
    runs = np.arange(MIN_RUNS, MAX_RUNS + 1)
    sides = 1 if design.paired else 2
    freedom = sides * (runs - 1)
    error = np.sqrt(sides / runs)
    interval = stdtrit(freedom, 1 - design.error_rate / 2) * error
    shown = errors_to_show(freedom, design.error_rate) * error
    return {"interval": interval, "shown": shown}


def judge(case: Result, is_discovery: bool, margin: float) -> tuple[str, str]:
    """The verdict on a case that has a ratio, and why it is undecided.

    is_discovery: its p counts, given those of all cases.
    """
    if case.ratio is None or case.interval is None:
        why = "one run a side: how much runs differ is unknown; measure several, better 6"
        return "undecided", why
    low, high = case.interval
    least, most = 1 / (1 + margin), 1 + margin
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
    limits = rate * np.arange(1, len(p) + 1) / max(1, len(p))
    return float(p[p <= limits].max(initial=-1))
