"""Compare the runs of a base with those of a test, case by case: ratio, interval, verdict.

A run is the unit of observation, or a session of runs: only its time counts, on a log scale. The
iterations within a run do not show how much two runs of the same program differ. The logarithm of
a run's time is one observation, or the mean of the logarithms of a session. BASE has m of them (x),
and TEST has n (y):

    ratio = exp(mean(y) - mean(x))
    e^2   = var(x) / m + var(y) / n
    interval = exp(mean(y) - mean(x) -+ t * e)   t: Student's, with Welch's degrees of freedom
    --paired:       d[i] = y[i] - x[i],  interval = exp(mean(d) -+ t * sd(d) / sqrt(n)),  n - 1
                    degrees of freedom
    --interleaved:  the same; the time of a run uses as many blocks as both runs of the pair have
    same            1 / (1 + M) <= interval <= 1 + M                 M: the margin
    slower          interval > 1, p is significant, ratio > 1 + M
    faster          interval < 1, p is significant, ratio < 1 / (1 + M)
                    (Benjamini and Hochberg 1995 at 5%, over all cases and the mean)
    --paired:       from 6 pairs on, slower and faster also require that at most 5% of all choices
                    of the signs of d have a mean at least as far from 0 (of 8192 random ones for
                    more than 13 pairs)
    runs needed     the smallest n with t * s * sqrt(2 / n) <= ln(1 + M), 2 (n - 1) degrees of
                    freedom; s = e / sqrt(1/m + 1/n) of the runs at hand
    --paired:       the smallest n with t * s / sqrt(n) <= ln(1 + M), n - 1 degrees of freedom;
                    s = sd(d)
    smallest change exp(c * e) - 1    e: the standard error of ln(ratio), f: its degrees of freedom
                    c = t + z * sqrt(1 + (c^2 + t^2) / (2 f))    z: 1.28, a normal number's 90%
                    quantile; for 6 and 7 pairs, c is 1.28 and 1.08 times as large, because of the
                    sign-flip test (simulated)

If a side has a single observation, its scatter s is assumed to be the same as on the other side, so
e = s * sqrt(1 + 1/m) with m - 1 degrees of freedom: a prediction interval.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from math import exp, log, log1p, sqrt
from statistics import NormalDist, fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.runs.differences import Difference, differences
from analysis.runs.evidence import (
    ALLOWED,
    Evidence,
    Side,
    busiest_load,
    by_reason,
    evidence,
    is_disturbed,
    is_timed,
    why_no_time,
    with_cases,
)
from analysis.runs.load import Row, Run, by_benchmark, instant, rows_of, time_of_blocks
from analysis.runs.rounding import rounding_of
from analysis.runs.sessions import ENOUGH, Groups, sessions_of
from analysis.show import join_distinct
from harness.cli import cut

Rows = Sequence[Row | None]  # the rows of a case, one per run; None if the run lacks the case

ALPHA = 0.05  # error rate, two-sided
POWER = 0.9  # probability with which the smallest change is detected
MAX_RUNS = 100  # a larger number of runs is never recommended
MOST_SEARCHED = 100  # cases of each side that are searched for the two most similar ones
WIDEST = 3.0  # an interval that extends beyond its ratio by a larger factor is not printed
UNEXPLAINED = 5.0  # a change by a larger factor is reported even if the runs were disturbed
MIN_FOR_SIGN_FLIP = 6  # pairs; of fewer, even equal signs are not significant at ALPHA
# The smallest change is larger by this factor if the sign-flip test needs more than the t interval:
# simulated, so that changes of this size are detected in 9 of 10 comparisons
SIGN_FLIP_COST = {6: 1.28, 7: 1.08}
SIGN_FLIPS = 2**13  # choices of signs that are tried: all of them for 13 pairs
MIN_FOR_OUTLIERS = 5  # outliers are reported on a side with at least this number of runs
# An outlier differs from the median by more than this number of standard deviations, and by more
# than this factor
OUTLIER_SIGMAS = 5.0
OUTLIER_FACTOR = 1.2
ONE_SESSION = "one session"  # a side that is one observation
STARTS_UNKNOWN = "starts unknown"  # it may be several, and those of the other side may be one


@dataclass(frozen=True)
class Design:
    """How runs are compared."""

    margin: float = 0.02  # the smallest relative change that matters
    paired: bool = False  # base[i] and test[i] ran next to each other: the unit is their ratio
    interleaved: bool = False  # the runs alternated block by block: use equally many blocks of both
    runs: int = 2  # number of runs per side that must be evidence for a verdict
    allow_disturbed: bool = False  # keep runs whatever their load
    alpha: float = ALPHA  # error rate, smaller if several looks share it; see looks.compare


@dataclass
class Result:
    """One case on both sides. Times are in seconds, one per run; ratio = test / base, so that a
    ratio above 1 means slower.

    verdict: slower, faster, same or undecided; failed if the case failed in at least half of TEST's
    runs; missing if TEST has no time in at least half of its runs; new if BASE has no time;
    otherwise not compared.
    """

    benchmark: str
    key: dict[str, Any]
    label: str = ""
    verdict: str = "not compared"
    reason: str = ""
    caveats: list[str] = field(default_factory=list)  # remarks that belong to the verdict
    measure: str = ""  # the step or metric whose times are compared; empty if there are none
    times_are: list[str] = field(default_factory=list)  # the estimators; see load.timed
    base_runs: list[int] = field(default_factory=list)  # positions of the runs that count
    test_runs: list[int] = field(default_factory=list)
    base_s: list[float] = field(default_factory=list)
    test_s: list[float] = field(default_factory=list)
    # the sessions, as indices into base_s and test_s, if they are the units of observation
    base_sessions: Groups = field(default_factory=list)
    test_sessions: Groups = field(default_factory=list)
    scatter: str = ""  # a line about the scatter between sessions
    enough: bool = True  # whether there are enough runs for a verdict
    disturbed: bool = False  # whether too few runs count, and only because of the load
    left_out: dict[str, str] = field(default_factory=dict)  # label of a run -> reason
    # relative rounding error of the numbers of BASE and of TEST
    rounding: tuple[float, float] = (0.0, 0.0)
    # position of each run that does not count for this case -> reason
    base_why: dict[int, str] = field(default_factory=dict)
    test_why: dict[int, str] = field(default_factory=dict)
    cases: int = 1  # if more, this is their geometric mean, which has no meaningful time
    ratio: float | None = None
    # of the ratio, with confidence 1 - Design.alpha; None if the scatter of runs is unknown
    interval: tuple[float, float] | None = None
    p: float | None = None  # probability of a ratio at least this far from 1 if nothing changed
    sign_flip_p: float | None = None  # of a sign-flip test of the pairs; see `sign_flip_test`
    runs_needed: int | None = None  # runs per side that narrow the interval to about +-margin
    # the smallest change, as a fraction, that this number of runs detects in 9 of 10 comparisons
    smallest_change: float | None = None

    @property
    def base_units_s(self) -> list[float]:
        """The times of the units of observation of BASE: of its runs, or of its sessions."""
        return means_of_groups(self.base_s, self.base_sessions)

    @property
    def test_units_s(self) -> list[float]:
        return means_of_groups(self.test_s, self.test_sessions)

    @property
    def unit(self) -> str:
        """The unit of observation, unless runs are compared in pairs."""
        return "session" if self.base_sessions else "run"

    @property
    def pair_ratios(self) -> list[float]:
        """test / base of each pair, if runs are compared in pairs."""
        return [test / base for base, test in zip(self.base_s, self.test_s, strict=True)]

    @property
    def is_informative(self) -> bool:
        """Whether the interval is narrow enough to print: at most a factor WIDEST either way."""
        if self.interval is None or self.ratio is None:
            return False
        low, high = self.interval
        return self.ratio / WIDEST <= low and high <= self.ratio * WIDEST


@dataclass(frozen=True)
class Comparison:
    """The comparison of two sides."""

    cases: list[Result]
    mean: Result | None  # the geometric mean over the cases that have all runs that count
    environment: list[Difference]  # hardware first
    warnings: list[str]
    base: Sequence[Run]
    test: Sequence[Run]
    design: Design
    remarks: list[str] = field(default_factory=list)  # printed below the table

    @property
    def left_out(self) -> dict[str, str]:
        """Runs, or pairs, that are not evidence -> reason; see Evidence.left_out. The cases are
        named if a run is a copy for some of its cases only."""
        cases: dict[tuple[str, str], list[str]] = {}  # by run and reason
        for case in self.cases:
            for one in case.left_out.items():
                cases.setdefault(one, []).append(case.label)
        counts = {
            run.label: sum(map(is_timed, run.rows.values())) for run in [*self.base, *self.test]
        }
        return {
            with_cases(label, names, counts[label]) if "a copy of" in why else label: why
            for (label, why), names in cases.items()
        }

    @property
    def unit(self) -> str:
        """The unit of observation: a pair, or a session if it is that of any case, or a run."""
        if self.design.paired:
            return "pair"
        return "session" if any(case.unit == "session" for case in self.cases) else "run"

    def runs_of(self, benchmark: str) -> tuple[list[Run], list[Run]]:
        """The runs of a benchmark in BASE and in TEST. Results refer to them by position."""
        base = [run for run in self.base if run.benchmark == benchmark]
        return base, [run for run in self.test if run.benchmark == benchmark]


def compare(base: Sequence[Run], test: Sequence[Run], design: Design) -> Comparison:
    """Compare every case of either side. Raises ValueError if no case is on both sides."""
    cases = results_of_cases(base, test, design)
    mean = mean_of(cases)
    judge_all([*cases, mean] if mean else cases, design)
    environment = differences(base, test)
    comparison = Comparison(cases, mean, environment, [], base, test, design)
    comparison.warnings.extend(warnings_of(comparison))
    return comparison


def outliers_of(
    runs: Sequence[Run], times: Sequence[tuple[list[int], list[float]]]
) -> dict[str, float]:
    """The outliers among the runs of a side: label -> time / median, where it is most extreme.

    times: for each case, the positions of the runs and their seconds. The standard deviation is
    estimated as the median absolute deviation of the logarithms, times 1.4826 (Hampel 1974).
    """
    found: dict[str, float] = {}
    for positions, seconds in times:
        if len(seconds) < MIN_FOR_OUTLIERS:
            continue
        logs = np.log(seconds)
        off = logs - np.median(logs)
        limit = max(OUTLIER_SIGMAS * 1.4826 * float(np.median(np.abs(off))), np.log(OUTLIER_FACTOR))
        for position, distance in zip(positions, off, strict=True):
            if abs(distance) > limit:
                label, factor = runs[position].label, float(np.exp(distance))
                found[label] = max(found.get(label, factor), factor, key=lambda x: abs(np.log(x)))
    return found


def warnings_of(comparison: Comparison) -> list[str]:
    """Runs that are left out, outliers, disturbed runs that count, and remarks on single runs."""
    lines = [f"left out: {line}" for line in by_reason(comparison.left_out)]
    design = comparison.design
    for side, all_runs in (("base", comparison.base), ("test", comparison.test)):
        far: dict[str, float] = {}
        for name, same in by_benchmark(all_runs).items():  # positions are those among them
            cases = [case for case in comparison.cases if case.benchmark == name]
            times = [(getattr(case, f"{side}_runs"), getattr(case, f"{side}_s")) for case in cases]
            far |= outliers_of(same, times)
        if far:
            names = cut([f"{name} ({x:.2f} times the median)" for name, x in far.items()], 4)
            what = f"outliers among the runs of {side.upper()}: {names}"
            lines.append(f"{what}; they count, and widen the intervals; look for the cause")
    runs = [*comparison.base, *comparison.test]
    disturbed = [load for run in runs if is_disturbed(run) and (load := busiest_load(run))]
    if disturbed and (design.paired or design.allow_disturbed):
        busy, cores = max(disturbed)
        what = f"other processes used up to {busy:.3g} of {cores} cores"
        which = f"{len(disturbed)} of {len(runs)} runs"
        rule = ALLOWED if design.allow_disturbed else "pairs count if the load of both was alike"
        lines.append(f"{what} in {which}: {rule}")
    for run in runs:
        if run.resumed:
            lines.append(f"{run.label} was resumed: {run.resumed}")
        if run.synchronized:
            what = "PyTorch's script waits for the device in every iteration, ddp_sweep.py once per"
            effect = "which alone may make the steps of ddp_sweep.py shorter"
            lines.append(f"{run.label}: {what} block, {effect}")
    return lines


def warning_of_order(base: Sequence[Run], test: Sequence[Run]) -> list[str]:
    """A warning if one side ran before the other, because a drift then looks like a change."""
    base_starts = [start for run in base if (start := instant(run.started_at))]
    test_starts = [start for run in test if (start := instant(run.started_at))]
    if len(base) + len(test) == 2 or not base_starts or not test_starts:
        return []  # there is no verdict, or the report is from another program
    if max(base_starts) < min(test_starts) or max(test_starts) < min(base_starts):
        return [
            "all runs of one side started before all of the other: the ratio includes any drift of "
            "the machine, and the interval does not; ab.py runs the sides alternately"
        ]
    return []


def why_no_common_case(base: Sequence[Run], test: Sequence[Run]) -> str:
    """How the sides differ: in their benchmarks, or in the keys of the two most similar cases among
    the first MOST_SEARCHED of each side."""
    benchmarks = [join_distinct(run.benchmark for run in runs) for runs in (base, test)]
    if benchmarks[0] != benchmarks[1]:
        return f"BASE has {benchmarks[0]}, TEST has {benchmarks[1]}"
    ours, theirs = rows_of(base)[:MOST_SEARCHED], rows_of(test)[:MOST_SEARCHED]
    if not ours or not theirs:
        return "BASE has no case" if theirs else "TEST has no case"
    keys = ((a.key, b.key) for a, b in product(ours, theirs))
    mine, other = min(keys, key=lambda pair: len(differing_fields(*pair)))
    names = differing_fields(mine, other)  # not empty, since no case is on both sides
    shown = ", ".join(f"{name} ({of_both(mine, other, name)})" for name in names[:3])
    return f"the keys differ in {shown}; --ignore-key {','.join(names)} joins these cases"


def of_both(mine: dict[str, Any], other: dict[str, Any], name: str) -> str:
    """`25 in BASE, default in TEST`; texts are quoted if the two would look equal."""
    texts = [str(key.get(name)) for key in (mine, other)]
    if texts[0] == texts[1]:
        texts = [text_of(key, name) for key in (mine, other)]
    return f"{texts[0]} in BASE, {texts[1]} in TEST"


def text_of(key: dict[str, Any], name: str) -> str:
    """A field of a key as JSON, so that 1, 1.0, "1" and true differ."""
    return json.dumps(key[name]) if name in key else "absent"


def differing_fields(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """The fields in which two keys differ, also if only by type, as 1, 1.0 and true do."""
    return [name for name in a | b if text_of(a, name) != text_of(b, name)]


def results_of_cases(base: Sequence[Run], test: Sequence[Run], design: Design) -> list[Result]:
    """The times of every case. Cases that cannot be compared come last."""
    base_cases = cases_of(base)
    test_cases = cases_of(test)
    if not base_cases.keys() & test_cases.keys():
        raise ValueError(f"no case is on both sides: {why_no_common_case(base, test)}")
    results = []
    for benchmark, form in base_cases | test_cases:
        base_side = [(run, run.rows.get(form)) for run in base if run.benchmark == benchmark]
        test_side = [(run, run.rows.get(form)) for run in test if run.benchmark == benchmark]
        if not all(is_empty(row) for _, row in base_side + test_side):
            results.append(result_of_case(benchmark, base_side, test_side, design))
    if not results:
        raise ValueError("no case in BASE or TEST has a time or a metric")
    if len({result.benchmark for result in results}) > 1:
        for result in results:
            result.label = f"{result.benchmark}, {result.label}"
    return sorted(results, key=lambda result: not result.measure)


def cases_of(runs: Sequence[Run]) -> dict[tuple[str, str], Row]:
    """The cases of any of the runs, in the order of the reports."""
    cases: dict[tuple[str, str], Row] = {}
    for run in runs:
        for form, row in run.rows.items():
            cases.setdefault((run.benchmark, form), row)
    return cases


def is_empty(row: Row | None) -> bool:
    """Whether a case passed without any sample or metric, such as a probe of the whole job."""
    return row is None or (row.check, row.metrics, len(row.times_s)) == ("passed", {}, 0)


def why_untimed(side: str, rows: Rows) -> str:
    """`BASE: no time in 2 of 6 runs: failed: ...`; empty if every run has a time."""
    whys = [why for row in rows if (why := why_no_time(row))]
    return f"{side}: no time in {len(whys)} of {len(rows)} runs: {whys[0]}" if whys else ""


def result_of_case(benchmark: str, base: Side, test: Side, design: Design) -> Result:
    """The times of a case on both sides, or the reason why they cannot be compared."""
    if design.paired and len(base) != len(test):
        got = f"{len(base)} and {len(test)}"
        raise ValueError(f"pairs require the same number of runs on both sides, got {got}")
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
        result.reason = f"the runs have different measures: {', '.join(measures)}"
        return result
    result.left_out, result.caveats = found.left_out, found.caveats
    if not design.paired:
        choose_sessions(result, found, base, test)
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
        times = [interleaved_times(a, b) for a, b in zip(kept_base, kept_test, strict=True)]
        result.base_s, result.test_s = [a for a, _ in times], [b for _, b in times]
    return result


def choose_sessions(result: Result, found: Evidence, base: Side, test: Side) -> None:
    """Make the session the unit of observation if a side has ENOUGH of them.

    If starts are unknown, the runs of a side with fewer than ENOUGH are one observation beside a
    side with ENOUGH.
    """
    if not found.base or not found.test:
        return
    found_sessions = sessions_of(base, found.base), sessions_of(test, found.test)
    is_known = all(known for _, known in found_sessions)
    names, runs = ("BASE", "TEST"), (len(found.base), len(found.test))
    counts = [len(groups) for groups, _ in found_sessions]
    if max(counts) < ENOUGH:
        if min(runs) == 1 < max(runs):
            why = reason_of_one_run(names if runs[0] == 1 else names[::-1], max(counts))
            result.reason = "; ".join(filter(None, [why, result.reason]))
        elif max(runs) > 1:
            result.scatter = scatter_line(counts, is_known)
        return
    sides: list[Groups] = []
    for (groups, known), count in zip(found_sessions, runs, strict=True):
        sides.append(groups if known or len(groups) >= ENOUGH else [[*range(count)]])
    alone = [name for name, side in zip(names, sides, strict=True) if len(side) == 1]
    if not alone and (len(sides[0]), len(sides[1])) == runs:  # each run is a session, if known
        result.scatter = "" if is_known else scatter_line(counts, is_known)
        return
    result.base_sessions, result.test_sessions = sides
    if not alone:
        return
    result.caveats = [ONE_SESSION, *result.caveats]
    i = names.index(alone[0])
    run = f"{runs[i]} run{'s' * (runs[i] > 1)}"
    of_other = f"the {len(sides[1 - i])} sessions of {names[1 - i]}"
    result.scatter = f"{alone[0]}, {run} of one session, is judged by the scatter of {of_other}"
    if not is_known:
        result.caveats.insert(1, STARTS_UNKNOWN)
        result.scatter = (
            f"{alone[0]}, {run}, counts as one session, and each run of {names[1 - i]} as another, "
            "because the starts of the runs are unknown: this is correct if the runs of "
            f"{names[1 - i]} were made at different times"
        )


def scatter_line(counts: Sequence[int], is_known: bool) -> str:
    """The line below a comparison whose intervals may lack the scatter between sessions. counts: of
    the sessions of BASE and TEST."""
    lack = "the intervals do not include the scatter between sessions"
    if not is_known:
        return (
            f"{STARTS_UNKNOWN}: {lack}, unless the runs of each side were made at different times"
        )
    have = f"BASE is {counts[0]} session{'s' * (counts[0] > 1)}, and TEST {counts[1]}"
    have += " (runs of one host less than an hour apart)"
    return f"{have}: {lack}; this requires {ENOUGH} sessions of BASE, at different times"


def reason_of_one_run(names: Sequence[str], sessions: int) -> str:
    """Why one run has no verdict. names: of its side and of the other one, which has few
    sessions."""
    need = f"a verdict requires {ENOUGH} sessions of {names[1]}, at different times"
    have = f"there {'is' if sessions == 1 else 'are'} {sessions}"
    return f"{names[0]} has one usable run, and {need}, but {have}"


def choose_runs(result: Result, found: Evidence, design: Design) -> None:
    """Choose the runs whose times are shown: those that are evidence for a verdict or, if these are
    too few, also those that are left out only because of the load."""
    result.base_runs, result.test_runs = found.base, found.test
    counts = len(found.base), len(found.test)
    if result.base_sessions or min(counts) >= design.runs:
        return
    result.enough = False
    result.disturbed = min(len(found.base_timed), len(found.test_timed)) >= design.runs
    result.base_runs, result.test_runs = found.base_timed, found.test_timed
    if not design.paired and min(counts) == 1 < max(counts):
        return  # `choose_sessions` says what one run requires
    if counts == (1, 1) and not found.left_out:
        return  # `judge` explains that one run per side is not enough
    noun = "pairs" if design.paired else "runs per side"
    have = f"{counts[0]}" if design.paired else f"{counts[0]} of BASE and {counts[1]} of TEST"
    why = f"{design.runs} usable {noun} are needed, but there are {have}"
    result.reason = "; ".join(filter(None, [why, result.reason]))


def interleaved_times(base: Row, test: Row) -> tuple[float, float]:
    """The times of two interleaved runs, from the same number of blocks of each: one run may have
    more blocks than the other."""
    blocks = min(len(base.rounds), len(test.rounds))
    times = [time_of_blocks(row.times_s, row.rounds, blocks) for row in (base, test)]
    return times[0], times[1]


def mean_of(cases: Sequence[Result]) -> Result | None:
    """The geometric mean over cases, computed per run, because a disturbance affects all cases of a
    run.

    It covers the cases that have all the runs that count for any case; None for fewer than two.
    """
    compared = [case for case in cases if case.measure]
    base_runs = sorted({i for case in compared for i in case.base_runs})
    test_runs = sorted({i for case in compared for i in case.test_runs})
    full = [c for c in compared if (c.base_runs, c.test_runs) == (base_runs, test_runs)]
    if len(full) < 2:
        return None
    mean = Result(full[0].benchmark, {}, f"geometric mean of {len(full)} cases", cases=len(full))
    mean.base_s = geometric_means([case.base_s for case in full])
    mean.test_s = geometric_means([case.test_s for case in full])
    mean.rounding = (
        fmean(case.rounding[0] for case in full),
        fmean(case.rounding[1] for case in full),
    )
    mean.base_sessions, mean.test_sessions = full[0].base_sessions, full[0].test_sessions
    mean.enough = all(case.enough for case in full)
    mean.disturbed = not mean.enough and all(case.enough or case.disturbed for case in full)
    mean.caveats = full[0].caveats
    return mean


def geometric_mean(times_s: Sequence[float]) -> float | None:
    """The geometric mean of the times of runs; None without any."""
    return exp(fmean(map(log, times_s))) if times_s else None


def means_of_groups(times_s: Sequence[float], groups: Groups) -> list[float]:
    """The geometric mean of the times in each group; the times themselves without groups."""
    if not groups:
        return list(times_s)
    logs = np.log(times_s)
    return [float(np.exp(logs[group].mean())) for group in groups]


def geometric_means(rows: Sequence[Sequence[float]]) -> list[float]:
    """The geometric mean of each column."""
    logs = np.log(rows).mean(axis=0)
    means: list[float] = np.exp(logs).tolist()
    return means


def judge_all(cases: Sequence[Result], design: Design) -> None:
    """Fill in everything that follows from the times. The mean, if there is one, is the last case.

    The false discovery rate is limited to alpha: this is the expected share of equal cases
    among those that are significant (Benjamini and Hochberg, J. R. Statist. Soc. B 57, 1995). The
    limit is proven for independent cases; tests/simulate_verdicts.py simulates such cases.
    """
    compared = [case for case in cases if case.base_s and case.test_s]
    for case in compared:
        estimate(case, design)
    counted = [case for case in compared if case.p is not None and case.enough]
    p_values = adjusted([case.p or 0.0 for case in counted])
    found = {id(c) for c, p in zip(counted, p_values, strict=True) if p <= design.alpha}
    for case in compared:
        case.verdict, why = judge(case, id(case) in found, design.margin)
        case.reason = "; ".join(filter(None, [why, case.reason]))


def adjusted(p_values: Sequence[float]) -> list[float]:
    """The p-values of Benjamini and Hochberg: of the i-th smallest of n, the minimum of p n / i
    over it and all larger ones."""
    n, least = len(p_values), 1.0
    found = [1.0] * n
    for place, i in enumerate(sorted(range(n), key=lambda i: -p_values[i])):
        least = min(least, p_values[i] * n / (n - place))
        found[i] = least
    return found


def estimate(case: Result, design: Design) -> None:
    """Set ratio, interval, p, runs_needed and smallest_change, by Student's t on logarithms.

    In a paired design, the unit is the ratio of a pair. Otherwise it is a run or a session, and
    Welch's t-test is used (Biometrika 34, 1947). If a side has only one unit, its scatter is
    assumed to be that of the other side: the interval is then a prediction interval.
    """
    from scipy.special import stdtr  # not above, because it takes longer than to print --help

    base, test = np.log(case.base_units_s), np.log(case.test_units_s)
    log_ratio = float(test.mean() - base.mean())
    case.ratio = finite_exp(log_ratio)
    m, n = len(base), len(test)
    if (n if design.paired else m + n - 1) < 2:
        return
    # weight: the variance of the log ratio if units have unit variance
    if design.paired:
        weight, freedom = 1 / n, n - 1.0
        error = float(np.std(test - base, ddof=1)) * sqrt(weight)
    else:
        weight = 1 / m + 1 / n
        squares = [float(np.sum((x - x.mean()) ** 2)) for x in (base, test)]
        if min(m, n) == 1:
            freedom = m + n - 2.0
            error = sqrt(sum(squares) / freedom * weight)
        else:
            of_base, of_test = squares[0] / (m - 1) / m, squares[1] / (n - 1) / n
            error = sqrt(of_base + of_test)
            each = of_base**2 / (m - 1) + of_test**2 / (n - 1)
            freedom = error**4 / each if each else 1.0  # without any scatter, it does not matter
    t = quantile(freedom, design.alpha)
    certain = (1 - case.rounding[0]) * (1 - case.rounding[1])
    low, high = finite_exp(log_ratio - t * error), finite_exp(log_ratio + t * error)
    case.interval = low * certain, high / certain
    case.p = 1.0 if log_ratio == 0 else 0.0
    if error and log_ratio:
        case.p = float(2 * stdtr(freedom, -abs(log_ratio) / error))
    errors = detectable_errors(t, freedom)
    if design.paired and not design.interleaved:
        if n >= MIN_FOR_SIGN_FLIP:
            case.sign_flip_p = sign_flip_test(test - base)
            errors *= SIGN_FLIP_COST.get(n, 1)
        else:
            case.caveats = [*case.caveats, f"{n} pairs"]
    case.smallest_change = finite_exp(error * errors) - 1
    case.runs_needed = runs_needed(error / sqrt(weight), design)


def quantile(freedom: Any, alpha: float = ALPHA) -> Any:
    """Student's t of an interval with a confidence of 1 - alpha."""
    from scipy.special import stdtrit

    return stdtrit(freedom, 1 - alpha / 2)


def sign_flip_test(log_ratios: NDArray[np.float64]) -> float:
    """Return the p-value of a sign-flip test: the share of all choices of signs for which the mean
    is at least as far from 0 (Fisher, The Design of Experiments, 1935).

    If a coin decides which run of a pair comes first, and the commands are equal, each log ratio is
    as likely as its negative. The test is then exact, whatever the disturbances are, whereas
    Student's t is wrong if a periodic disturbance leaves only few different ratios. If there are
    too many choices, SIGN_FLIPS random ones are tried.
    """
    n = len(log_ratios)
    is_exact = 2**n <= SIGN_FLIPS
    if is_exact:
        flips = np.arange(2**n)[:, np.newaxis] >> np.arange(n) & 1
    else:
        flips = np.random.default_rng(0).integers(0, 2, (SIGN_FLIPS, n), dtype=np.int8)
    sums = np.abs((1 - 2 * flips) @ log_ratios)
    as_far = np.count_nonzero(sums >= abs(log_ratios.sum()) - 1e-9 * np.abs(log_ratios).sum())
    return float(as_far / 2**n if is_exact else (as_far + 1) / (SIGN_FLIPS + 1))


def finite_exp(log_ratio: float) -> float:
    """exp, limited to e^-700 to e^700: JSON has no infinity, and a ratio is never 0."""
    return float(np.exp(np.clip(log_ratio, -700, 700)))


def detectable_errors(t: float, freedom: float) -> float:
    """The smallest change that is detected with a probability of POWER.

    It is in units of the estimated standard error. "Detected" refers to another set of runs of the
    same size, which detects a change c if c * s + x > t * s'. Here x is a standard normal number,
    and s and s' are the standard errors estimated from the runs at hand and from the other set,
    relative to the true one. With a normal approximation of s and s',
    c = t + z * sqrt(1 + (c^2 + t^2) / (2 * freedom)), where z is the quantile of the normal
    distribution at POWER. This is a quadratic equation in c.
    """
    z2 = NormalDist().inv_cdf(POWER) ** 2
    a = 1 - z2 / (2 * freedom)
    b = z2 * (1 + t**2 / (2 * freedom)) - t**2
    return float((t + sqrt(t**2 + a * b)) / a)


def runs_needed(scatter: float, design: Design) -> int | None:
    """The smallest number of runs per side with an interval of +-margin; None above MAX_RUNS.

    scatter: standard deviation of the logarithm of a run's time, or of a pair's ratio.
    """
    sides = 1 if design.paired else 2
    runs = np.arange(2, MAX_RUNS + 1)
    t = quantile(sides * (runs - 1), design.alpha)
    enough = runs[t * scatter * np.sqrt(sides / runs) <= log1p(design.margin)]
    return int(enough[0]) if len(enough) else None


def judge(case: Result, is_discovery: bool, margin: float) -> tuple[str, str]:
    """The verdict on a case that has a ratio, and the reason if it is undecided.

    is_discovery: whether p is significant, taking the number of cases into account.
    """
    if case.ratio is None or case.interval is None:
        why = "one run per side does not show how much runs vary; measure several, preferably 6, "
        why += "at different times"
        return "undecided", why
    low, high = case.interval
    if not case.enough:
        if case.disturbed and (low > UNEXPLAINED or high < 1 / UNEXPLAINED):
            what = f"a change by a factor of more than {UNEXPLAINED:g}, which load does not explain"
            return "slower" if low > 1 else "faster", what
        return "undecided", ""
    most = 1 + margin
    least = 1 / most
    if least <= low and high <= most:
        return "same", ""
    certain = (1 - case.rounding[0]) * (1 - case.rounding[1])  # as for the ends of the interval
    is_beyond = (low > 1 and case.ratio * certain > most) or (
        high < 1 and case.ratio / certain < least
    )
    if is_discovery and is_beyond:
        if case.sign_flip_p is None or case.sign_flip_p <= ALPHA:
            return "slower" if low > 1 else "faster", ""
        why = f"a sign-flip test of the pairs does not (p = {case.sign_flip_p:.2g})"
        return "undecided", f"the interval excludes 1, but {why}"
    if max(case.rounding) > margin / 4:
        off = f"{100 * max(case.rounding):.2g}%"
        return "undecided", f"numbers are so coarse that they may be off by {off}"
    if low <= 1 <= high:
        return "undecided", "the interval contains 1, but extends beyond the margin"
    if case.ratio < least or case.ratio > most:
        why = "beyond the margin, but not significant if the number of cases is taken into account"
        return "undecided", why
    return "undecided", "the ratio is within the margin, but its interval extends beyond it"
