"""Is it slower? Runs of a base against runs of a test, case by case; docs/numbers.md derives it.

The run is the unit: what counts of a run is its median, on a log scale. Iterations within a run
say nothing about how much two runs differ that differ in nothing.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, exp, log, log1p, sqrt
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.runs import Run as Run  # part of this module's interface
from common.runs import RunCase as RunCase
from common.runs import load_run as load_run
from common.stats import (
    Estimate,
    difference_of_means,
    discoveries,
    mean_of,
    median_interval,
    t_quantile,
)

ALPHA = 0.05
MIN_BLOCKS = 6  # of a pair of runs that took turns; with fewer their medians count
VERDICTS = ("slower", "faster", "same", "undecided")
# Where these differ another machine was measured, whatever else was changed.
HARDWARE = ("devices", "cpus", "topologies", "num_nodes", "local_world_size", "world_size", "cores")
# Not of interest by themselves: rows for each rank, and a warning derived from them.
IGNORED = ("ranks", "differences")


@dataclass(frozen=True)
class CaseResult:
    """One case on both sides. Times in seconds, one a run; ratio = test / base, over 1 is slower.

    ci95 is None where the runs say nothing about the scatter between runs; within_run_ci95 is
    what the iterations of one run a side say, and is no evidence about anything but these runs.
    p: of no difference. runs_needed: about how many a side would narrow the interval to +-margin.
    pair_ratios: of runs that are compared pair by pair; ratio is then their geometric mean.
    """

    benchmark: str
    key: dict[str, Any]
    label: str
    measure: str
    base_s: tuple[float, ...]
    test_s: tuple[float, ...]
    ratio: float
    ci95: tuple[float, float] | None
    within_run_ci95: tuple[float, float] | None
    p: float | None
    verdict: str
    reason: str
    runs_needed: int | None = None
    pair_ratios: tuple[float, ...] = ()


@dataclass(frozen=True)
class Unpaired:
    """A case that cannot be compared, and why."""

    benchmark: str
    key: dict[str, Any]
    label: str
    reason: str
    in_test: bool  # whether TEST has a time of it


@dataclass(frozen=True)
class Difference:
    """A field of the environment with all its values on each side."""

    field: str
    base: tuple[str, ...]
    test: tuple[str, ...]
    hardware: bool


@dataclass(frozen=True)
class Comparison:
    cases: list[CaseResult]
    only_base: list[Unpaired]
    only_test: list[Unpaired]
    not_compared: list[Unpaired]  # on both sides, but without a time on one
    differences: list[Difference]
    mean: CaseResult | None  # the geometric mean over the cases that every run has
    warnings: list[str]
    paired: bool = False
    interleaved: bool = False


def compare(
    base: Sequence[Run],
    test: Sequence[Run],
    margin: float = 0.02,
    single_run: bool = False,
    paired: bool = False,
    looks: int = 1,
    interleaved: bool = False,
) -> Comparison:
    """Compare every case that both sides have.

    margin: the smallest relative change that matters. single_run: where there is one run a side,
    decide by its iterations, as if two runs differed in nothing else. paired: base[i] and test[i]
    were measured one after the other, and their ratio is the unit, so that a drift cancels.
    interleaved: the runs of a pair took turns, so that their blocks make pairs as well.
    looks: how often the data is looked at as it grows, to stop once decided: the error rate is
    shared among the looks. Raises ValueError where no case is on both sides.
    """
    if paired and len(base) != len(test):
        raise ValueError(f"pairs need as many runs a side, got {len(base)} and {len(test)}")
    sides = [_by_case(base), _by_case(test)]
    both = [name for name in sides[0] if name in sides[1]]
    if not both:
        raise ValueError(_nothing_in_common(base, test))
    results = [
        _compare_case(
            name[0], [side[name] for side in sides], single_run, paired, interleaved, looks, margin
        )
        for name in both
    ]
    compared = _labelled([result for result in results if isinstance(result, CaseResult)])
    mean = _geometric_mean(base, test, compared, single_run, paired, looks, margin)
    decided = _decide([*compared, mean] if mean else compared, margin, looks)
    return Comparison(
        cases=decided[: len(compared)],
        only_base=_alone(sides[0], sides[1], in_test=False),
        only_test=_alone(sides[1], sides[0], in_test=True),
        not_compared=[result for result in results if isinstance(result, Unpaired)],
        differences=differences(base, test),
        mean=decided[-1] if mean else None,
        warnings=_warnings(base, test),
        paired=paired,
        interleaved=interleaved,
    )


def _nothing_in_common(base: Sequence[Run], test: Sequence[Run]) -> str:
    names = [sorted({run.benchmark for run in side}) for side in (base, test)]
    if names[0] != names[1]:
        return (
            f"no case is on both sides: BASE has reports of {', '.join(names[0])}, "
            f"TEST of {', '.join(names[1])}; give reports of one benchmark"
        )
    for side, runs in (("BASE", base), ("TEST", test)):
        if not any(run.cases for run in runs):
            return f"no case is on both sides: the reports of {side} have none"
    keys = [next(case.key for run in side for case in run.cases.values()) for side in (base, test)]
    fields = [name for name in {**keys[0], **keys[1]} if keys[0].get(name) != keys[1].get(name)]
    return (
        "no case is on both sides: cases are joined by their keys, and the first ones differ in "
        f"{', '.join(f'{name} ({keys[0].get(name)}, {keys[1].get(name)})' for name in fields)}"
    )


Name = tuple[str, str]  # the benchmark and the canonical key


def _exp(x: float) -> float:
    """Within what a float can hold."""
    return exp(max(-700.0, min(700.0, x)))


def _by_case(runs: Sequence[Run]) -> dict[Name, list[RunCase | None]]:
    """For each case, what each run of its benchmark has of it."""
    names = dict.fromkeys((run.benchmark, name) for run in runs for name in run.cases)
    return {
        (benchmark, name): [run.cases.get(name) for run in runs if run.benchmark == benchmark]
        for benchmark, name in names
    }


def missing_in_test(found: Comparison) -> bool:
    """Whether TEST lacks the time of a case."""
    lost = (*found.only_base, *found.not_compared)
    return any(not case.in_test for case in lost)


def _alone(
    mine: dict[Name, list[RunCase | None]], others: dict[Name, list[RunCase | None]], in_test: bool
) -> list[Unpaired]:
    found = []
    for name, row in mine.items():
        if name not in others:
            case = next(case for case in row if case is not None)
            found.append(Unpaired(name[0], case.key, case.label, case.check, in_test))
    return found


def _compare_case(
    benchmark: str,
    rows: list[list[RunCase | None]],
    single_run: bool,
    paired: bool,
    interleaved: bool,
    looks: int,
    margin: float,
) -> CaseResult | Unpaired:
    """Ratio, interval and p-value; the verdict comes later, when those of all cases are known."""
    first = next(case for case in itertools.chain(*rows) if case is not None)
    timed = [[case for case in row if case and case.value_s is not None] for row in rows]
    notes = []
    for side, row, good in zip(("BASE", "TEST"), rows, timed, strict=True):
        without = [case for case in row if case and case.value_s is None]
        if not good:
            reason = f"{side}: {without[0].check}"
            return Unpaired(benchmark, first.key, first.label, reason, bool(timed[1]))
        if without:
            notes.append(f"{side}: {len(without)} of {len(row)} runs: {without[0].check}")
        if None in row:
            notes.append(f"{side}: {row.count(None)} of {len(row)} runs lack it")
    measures = {case.measure for case in itertools.chain(*timed)}
    if len(measures) > 1:
        reason = f"different times were kept: {', '.join(sorted(measures))}"
        return Unpaired(benchmark, first.key, first.label, reason, True)
    if paired:
        pairs = [(a, b) for a, b in zip(*rows, strict=False) if a and b]
        pairs = [(a, b) for a, b in pairs if a.value_s is not None and b.value_s is not None]
        if not pairs or len(rows[0]) != len(rows[1]):
            reason = "there is no pair with both"
            return Unpaired(benchmark, first.key, first.label, reason, True)
        timed = [[a for a, _ in pairs], [b for _, b in pairs]]
        ratios = np.array([_log_ratio(a, b, interleaved) for a, b in pairs])
    values = [np.log([float(case.value_s or 0) for case in side]) for side in timed]
    if paired:
        estimate, value = mean_of(ratios), float(ratios.mean())
    else:
        estimate, value = difference_of_means(*values), float(values[1].mean() - values[0].mean())
    within = _within_run(timed, looks) if len(values[0]) == len(values[1]) == 1 else None
    reason = "; ".join(notes)
    interval = p = None
    if estimate is not None:
        low_high = estimate.interval(1 - ALPHA / looks)
        interval, p = (_exp(low_high.low), _exp(low_high.high)), estimate.p
    elif single_run and within is not None:
        interval, p = within[0], within[1]
    return CaseResult(
        benchmark,
        first.key,
        first.label,
        first.measure if first.measure else next(iter(measures)),
        tuple(float(case.value_s or 0) for case in timed[0]),
        tuple(float(case.value_s or 0) for case in timed[1]),
        _exp(value),
        interval,
        within[0] if within else None,
        p,
        "",
        reason,
        _runs_needed(estimate, len(values[0]), len(values[1]), paired, margin),
        tuple(map(_exp, ratios)) if paired else (),
    )


def _log_ratio(a: RunCase, b: RunCase, interleaved: bool) -> float:
    """log(b / a) of a pair of runs: of their medians or, where they took turns, the median over
    blocks that were neighbours in time. A slow moment hits both of those, or is an outlier.
    """
    assert a.value_s is not None
    assert b.value_s is not None
    if interleaved and a.times_s is not None and b.times_s is not None:
        blocks = [_block_medians(case.times_s, case.rounds) for case in (a, b)]
        common = min(map(len, blocks))
        if common >= MIN_BLOCKS and min(block.min() for block in blocks) > 0:
            return float(np.median(np.log(blocks[1][:common]) - np.log(blocks[0][:common])))
    return log(b.value_s) - log(a.value_s)


def _block_medians(times: NDArray[np.float64] | None, rounds: Sequence[int]) -> NDArray[np.float64]:
    if times is None or not rounds:
        return np.empty(0)
    return np.array([np.median(block) for block in np.split(times, np.cumsum(rounds)[:-1])])


def _within_run(timed: list[list[RunCase]], looks: int) -> tuple[tuple[float, float], float] | None:
    """Interval of the ratio of two runs' medians, by their iterations alone; and its p-value.

    Each median's own interval, put together (Zou and Donner 2008, Statist. Med. 27:1693, "MOVER").
    """
    ends = []
    confidence = 1 - ALPHA / looks
    for case in (timed[0][0], timed[1][0]):
        if case.times_s is None:
            return None
        own = median_interval(case.times_s, confidence)
        if own is None or own.low <= 0:
            return None
        middle = log(float(np.median(case.times_s)))
        ends.append((middle - log(own.low), middle, log(own.high) - middle))
    (below_a, a, above_a), (below_b, b, above_b) = ends
    low, high = sqrt(below_b**2 + above_a**2), sqrt(above_b**2 + below_a**2)
    value = b - a
    toward = low if value > 0 else high  # the side on which 0 lies
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    p = 2 * (1 - NormalDist().cdf(abs(value) / toward * z)) if toward > 0 else float(value == 0)
    return (_exp(value - low), _exp(value + high)), p


def _runs_needed(
    estimate: Estimate | None, m: int, n: int, paired: bool, margin: float
) -> int | None:
    """Runs a side with which the interval would be about +-margin wide, if runs scatter alike."""
    if estimate is None:
        return None
    share = 1 / m if paired else 1 / m + 1 / n
    scatter = estimate.error / sqrt(share)  # of a run, or of a pair
    parts = 1 if paired else 2
    # as if the normal distribution held; Student's t needs a few more
    at_least = ceil(parts * (1.959 * scatter / log1p(margin)) ** 2) if scatter < 1 else 1000
    for count in range(max(2, at_least), 1000):
        error = scatter * sqrt(parts / count)
        df = parts * (count - 1)
        if t_quantile(float(df)) * error <= log1p(margin):
            return count
    return None


def _labelled(cases: list[CaseResult]) -> list[CaseResult]:
    """The cases with labels that tell them apart: where two are alike, with what differs."""
    groups: dict[tuple[str, str], list[CaseResult]] = {}
    for case in cases:
        groups.setdefault((case.benchmark, case.label), []).append(case)
    mixed = len({case.benchmark for case in cases}) > 1
    labelled = []
    for case in cases:
        alike = groups[case.benchmark, case.label]
        label = f"{case.benchmark} {case.label}" if mixed else case.label
        if len(alike) > 1:
            differing = [
                name
                for name in case.key
                if any(other.key.get(name) != case.key[name] for other in alike)
            ]
            label += "".join(f", {name} {case.key[name]}" for name in differing)
        labelled.append(replace(case, label=label))
    return labelled


# -- all cases together ----------------------------------------------------------------------------


def _geometric_mean(
    base: Sequence[Run],
    test: Sequence[Run],
    cases: list[CaseResult],
    single_run: bool,
    paired: bool,
    looks: int,
    margin: float,
) -> CaseResult | None:
    """The mean of the log ratios. Its unit is the run as well: what hits one case hits others.

    None where the cases are of several benchmarks, or fewer than two are in every run.
    """
    benchmarks = {case.benchmark for case in cases}
    base, test = ([run for run in side if run.benchmark in benchmarks] for side in (base, test))
    if len(benchmarks) != 1:
        return None
    complete = [c for c in cases if (len(c.base_s), len(c.test_s)) == (len(base), len(test))]
    if len(complete) < 2:
        return None
    values = [np.log([c.base_s for c in complete]), np.log([c.test_s for c in complete])]
    means = [side.mean(axis=0) for side in values]  # of each run
    ratios = np.log([c.pair_ratios for c in complete]).mean(axis=0) if paired else np.empty(0)
    if paired:
        estimate, value = mean_of(ratios), float(ratios.mean())
    else:
        estimate, value = difference_of_means(*means), float(means[1].mean() - means[0].mean())
    interval = p = None
    within = _mean_within_run(complete, value) if len(base) == len(test) == 1 else None
    if estimate is not None:
        low_high = estimate.interval(1 - ALPHA / looks)
        interval, p = (_exp(low_high.low), _exp(low_high.high)), estimate.p
    elif single_run and within is not None:
        interval, p = within
    return CaseResult(
        complete[0].benchmark,
        {},
        f"geometric mean of {len(complete)} cases",
        "",
        tuple(float(x) for x in np.exp(means[0])),
        tuple(float(x) for x in np.exp(means[1])),
        _exp(value),
        interval,
        within[0] if within else None,
        p,
        "",
        "",
        _runs_needed(estimate, len(base), len(test), paired, margin),
        tuple(map(_exp, ratios)),
    )


def _mean_within_run(
    cases: list[CaseResult], value: float
) -> tuple[tuple[float, float], float] | None:
    """As if the cases of a run were independent, each with its own interval."""
    squares = [0.0, 0.0]
    for case in cases:
        if case.within_run_ci95 is None:
            return None
        low, high = (log(end / case.ratio) for end in case.within_run_ci95)
        squares = [squares[0] + low**2, squares[1] + high**2]
    low, high = (sqrt(square) / len(cases) for square in squares)
    toward = low if value > 0 else high
    p = 2 * (1 - NormalDist().cdf(abs(value) / toward * 1.96)) if toward > 0 else float(value == 0)
    return (_exp(value - low), _exp(value + high)), p


def _decide(cases: list[CaseResult], margin: float, looks: int) -> list[CaseResult]:
    """The verdicts. The false discovery rate is held over all cases with an interval."""
    tested = [case for case in cases if case.p is not None]
    counts = discoveries([case.p or 0.0 for case in tested], ALPHA / looks).tolist()
    found = {id(case) for case, counted in zip(tested, counts, strict=True) if counted}
    decided = []
    for case in cases:
        verdict, why = _verdict(case, margin, id(case) in found, len(tested))
        reason = "; ".join(text for text in (why, case.reason) if text)
        decided.append(replace(case, verdict=verdict, reason=reason))
    return decided


def _verdict(case: CaseResult, margin: float, found: bool, tests: int) -> tuple[str, str]:
    if case.ci95 is None:
        runs = len(case.base_s), len(case.test_s)
        if runs == (1, 1):
            return "undecided", "one run a side: how much runs differ is unknown"
        return "undecided", "too few runs"
    low, high = case.ci95
    if 1 / (1 + margin) <= low and high <= 1 + margin:
        return "same", ""
    beyond = not 1 / (1 + margin) <= case.ratio <= 1 + margin
    if found and beyond:
        return ("slower" if case.ratio > 1 else "faster"), ""
    if not low <= 1 <= high and beyond:
        return "undecided", f"not certain enough for one of {tests} comparisons"
    if not low <= 1 <= high:
        return "undecided", "a change, but perhaps within the margin"
    return "undecided", "the interval is too wide"


# -- environments ----------------------------------------------------------------------------------


def fields(run: Run) -> dict[str, str]:
    """The environment as one text a field; so are each variable and the ranks' cores."""
    found: dict[str, str] = {}
    environment = dict(run.environment)
    variables = environment.pop("variables", None)
    for name, value in environment.items():
        if name not in IGNORED:
            found[name] = _text(value)
    if isinstance(variables, dict):
        found |= {f"variables.{name}": _text(value) for name, value in variables.items()}
    ranks = run.environment.get("ranks")
    if isinstance(ranks, list):
        cores = [row.get("cores") for row in ranks if isinstance(row, dict)]
        found["cores"] = ", ".join(dict.fromkeys(map(str, cores)))
    return found


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(str(item) for item in dict.fromkeys(map(str, value))) or "none"
    return "none" if value is None else str(value)


def differences(base: Sequence[Run], test: Sequence[Run]) -> list[Difference]:
    """The fields of the environment whose values differ between the sides; hardware first."""
    sides = [[fields(run) for run in side] for side in (base, test)]
    names = dict.fromkeys(name for side in sides for row in side for name in row)
    found = []
    for name in names:
        a, b = (tuple(dict.fromkeys(row.get(name, "unset") for row in side)) for side in sides)
        if set(a) != set(b):
            found.append(Difference(name, a, b, name in HARDWARE))
    return sorted(found, key=lambda difference: not difference.hardware)


def _warnings(base: Sequence[Run], test: Sequence[Run]) -> list[str]:
    lines = []
    for run in (*base, *test):
        if run.status != "complete":
            lines.append(f"{run.path} is not complete: its status is {run.status}")
    for a, b in itertools.combinations((*base, *test), 2):
        if a.digest == b.digest:
            lines.append(f"{a.path} and {b.path} hold the same run: that is one run's evidence")
    for side, runs, other in (("BASE", base, "TEST"), ("TEST", test, "BASE")):
        if len(runs) == 1 and len(base) + len(test) > 2:
            lines.append(f"{side} is one run: it is taken to scatter as those of {other} do")
        rows = [fields(run) for run in runs]
        names = [name for name in rows[0] if any(row.get(name) != rows[0][name] for row in rows)]
        if names:
            lines.append(f"the runs of {side} differ among themselves in {', '.join(names)}")
    return lines
