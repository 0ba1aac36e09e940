"""Reports over time: what changed, when, and whether the newest run is as the ones before it."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.compare import ALPHA, Difference, differences
from common.results import SAME_ENVIRONMENT
from common.runs import Run, RunCase, canonical, is_report_name
from common.stats import difference_of_means, discoveries, shift

# What else must agree for a report to be resumed may change over time: that is what is looked for.
SOFTWARE = ("torch", "cuda", "nccl", "python")
MACHINE = tuple(name for name in SAME_ENVIRONMENT if name not in SOFTWARE)
SHORTEST = 2  # runs between two changes: one run alone is an outlier, or the newest run
FEWEST = 3  # earlier runs that the newest one is compared with


@dataclass(frozen=True)
class Change:
    """A case whose time changed between two successive runs that have it."""

    before: Run
    after: Run
    when: tuple[str, str]
    ratio: float  # of the runs up to the next change, to those since the last
    ci95: tuple[float, float] | None
    fields: list[Difference]  # of the environment, between the two runs


@dataclass(frozen=True)
class Newest:
    """The newest run against those since the last change. expected: 95 % of such runs."""

    ratio: float
    expected: tuple[float, float] | None
    p: float | None
    past: int
    verdict: str  # slower, faster, as before, or undecided


@dataclass(frozen=True)
class Series:
    """One case on one machine, in the order in which its runs started."""

    benchmark: str
    machine: dict[str, Any]
    key: dict[str, Any]
    label: str
    measure: str
    runs: list[Run]
    times_s: list[float]
    changes: list[Change]
    newest: Newest | None  # None where the group's newest run has no time of the case ..
    missing: str  # .. and why
    last: Run  # that run


@dataclass(frozen=True)
class History:
    series: list[Series]
    unread: list[str]  # why; each starts with its path


def find_all(folder: str) -> tuple[list[str], list[str]]:
    """Every *.json in the folder and those below it; and why others of these cannot be read."""
    found: list[Path] = []
    closed: list[OSError] = []
    for place, _, names in os.walk(folder, onerror=closed.append):
        found += [Path(place) / name for name in names if is_report_name(name)]
    unread = [f"{error.filename}: {error.strerror}" for error in closed]
    return sorted(str(path) for path in found if os.path.isfile(path)), unread


def load_all(paths: Iterable[str], load: Callable[[str], Run]) -> tuple[list[Run], list[str]]:
    """The runs in the order of their start, and why others cannot be used."""
    timed: list[tuple[float, Run]] = []
    unread = []
    seen: dict[str, str] = {}
    for path in paths:
        try:
            run = load(path)
            started = parse_time(run.started_at)
        except ValueError as error:
            unread.append(str(error))
            continue
        if started is None:
            unread.append(f"{path}, which does not say when it was started")
        elif run.digest in seen:
            unread.append(f"{path}, which holds the same run as {seen[run.digest]}")
        else:
            seen[run.digest] = path
            # of the samples only their median is of use here, and there may be many reports
            cases = {name: replace(case, times_s=None) for name, case in run.cases.items()}
            timed.append((started, replace(run, cases=cases)))
    return [run for _, run in sorted(timed, key=lambda pair: (pair[0], pair[1].path))], unread


def parse_time(text: str) -> float | None:
    """Seconds since 1970 of an ISO 8601 time; UTC where it names no zone; None if it is none."""
    try:
        moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=timezone.utc)
        return moment.timestamp()
    except (ValueError, OverflowError):
        return None


def study(runs: Sequence[Run], unread: list[str], margin: float, seed: int = 0) -> History:
    """Changes and the newest run of every case. runs: in order of time."""
    rng = np.random.default_rng(seed)
    series = [found for group in _groups(runs) for found in _series(group)]
    logs = [np.log(found.times_s) for found in series]
    first = [split(values, rng) for values in logs]
    counts = discoveries([p for _, p in first], ALPHA)
    # what p a first change needed is asked of the further ones of its series as well
    threshold = ALPHA * int(counts.sum()) / max(1, len(series))
    result = []
    for found, values, one in zip(series, logs, first, strict=True):
        at = change_points(values, threshold, rng, one)
        changes = [
            change
            for change in _changes(found, values, at)
            if not 1 / (1 + margin) <= change.ratio <= 1 + margin
        ]
        newest = None if found.missing else _against_past(values, at)
        result.append(replace(found, changes=changes, newest=newest))
    return History(_flag(result, margin), unread)


def _groups(runs: Sequence[Run]) -> list[list[Run]]:
    """The runs by benchmark and machine."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        machine = {name: run.environment.get(name) for name in MACHINE}
        groups.setdefault(f"{run.benchmark} {canonical(machine)}", []).append(run)
    return list(groups.values())


def _series(runs: Sequence[Run]) -> list[Series]:
    """The cases of one group."""
    machine = {name: runs[0].environment.get(name) for name in MACHINE}
    found: dict[tuple[str, str], tuple[RunCase, list[Run], list[float]]] = {}
    for run in runs:
        for name, case in run.cases.items():
            if case.value_s is not None:
                entry = found.setdefault((name, case.measure), (case, [], []))
                entry[1].append(run)
                entry[2].append(case.value_s)
    series = []
    for (name, measure), (case, own, times) in found.items():
        missing = ""
        if own[-1] is not runs[-1]:
            last = runs[-1].cases.get(name)
            missing = "not measured" if last is None else last.check
            if last is not None and last.value_s is not None:
                missing = f"measured as {last.measure}"
        key, label = case.key, case.label
        series.append(
            Series(
                runs[0].benchmark,
                machine,
                key,
                label,
                measure,
                own,
                times,
                [],
                None,
                missing,
                runs[-1],
            )
        )
    return series


# -- change points ---------------------------------------------------------------------------------


def split(values: NDArray[np.float64], rng: np.random.Generator) -> tuple[int, float]:
    """The most likely place of one change, and its p-value. values: [n], in order of time.

    The statistic is the largest contrast of the mean ranks on both sides of a place (a standardised
    form of Pettitt's, Appl. Statist. 28, 1979: ranks, so that a single outlier is no change); its
    p-value is that of a permutation test, drawn until 20 orders are as extreme or there were
    20,000 (Besag and Clifford, Biometrika 78, 1991).
    """
    n = len(values)
    if n < 2 * SHORTEST:
        return 0, 1.0
    ranks = _ranks(values)
    observed = _contrasts(ranks[None])[0]
    place = int(np.argmax(observed)) + SHORTEST
    largest = float(observed.max()) * (1 - 1e-9)
    extreme = drawn = 0
    while extreme < 20 and drawn < 20_000:
        count = min(max(100, drawn), 2000)
        orders = rng.permuted(np.tile(ranks, (count, 1)), axis=1)
        extreme += int(np.sum(_contrasts(orders).max(axis=1) >= largest))
        drawn += count
    return place, (extreme + 1) / (drawn + 1)


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ranks about 0; equal values share theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    middle = np.cumsum(counts) - (counts - 1) / 2
    return np.asarray(middle[inverse] - (len(values) + 1) / 2, dtype=np.float64)


def _contrasts(orders: NDArray[np.float64]) -> NDArray[np.float64]:
    """For each order and place the squared contrast of the means. orders: [m, n]."""
    n = orders.shape[1]
    places = np.arange(SHORTEST, n - SHORTEST + 1)
    sums = np.cumsum(orders, axis=1)[:, places - 1]
    return np.asarray(np.square(sums) / (places * (n - places)), dtype=np.float64)


def change_points(
    values: NDArray[np.float64],
    threshold: float,
    rng: np.random.Generator,
    first: tuple[int, float] | None = None,
) -> list[int]:
    """Where a new level starts: binary segmentation, as long as a split has p <= threshold.

    first: the split of all values, where it is known.
    """
    place, p = first or split(values, rng)
    if p > threshold:
        return []
    left = change_points(values[:place], threshold, rng)
    right = change_points(values[place:], threshold, rng)
    return [*left, place, *(place + at for at in right)]


def _changes(series: Series, values: NDArray[np.float64], at: list[int]) -> list[Change]:
    ends = [0, *at, len(values)]
    found = []
    for i, place in enumerate(at):
        before, after = values[ends[i] : place], values[place : ends[i + 2]]
        value, interval = shift(before, after)
        last, first = series.runs[place - 1], series.runs[place]
        found.append(
            Change(
                last,
                first,
                (last.started_at, first.started_at),
                exp(value),
                (exp(interval.low), exp(interval.high)) if interval else None,
                differences([last], [first]),
            )
        )
    return found


# -- the newest run --------------------------------------------------------------------------------


def _against_past(values: NDArray[np.float64], at: list[int]) -> Newest:
    """Against the runs since the last change; a prediction interval by Student's t."""
    past = values[max(at, default=0) : -1]
    if len(past) < FEWEST:
        ratio = exp(values[-1] - past.mean()) if len(past) else 1.0
        return Newest(ratio, None, None, len(past), "undecided")
    estimate = difference_of_means(past, values[-1:])
    assert estimate is not None
    half = estimate.interval().half_width
    return Newest(exp(estimate.value), (exp(-half), exp(half)), estimate.p, len(past), "")


def _flag(series: list[Series], margin: float) -> list[Series]:
    """The verdicts on the newest runs; the false discovery rate is held over all of them."""
    tested = [s.newest for s in series if s.newest and s.newest.p is not None]
    counts = discoveries([newest.p or 0.0 for newest in tested], ALPHA).tolist()
    found = {id(newest) for newest, counted in zip(tested, counts, strict=True) if counted}
    flagged = []
    for s in series:
        newest = s.newest
        if newest is not None and newest.p is not None:
            verdict = "as before"
            if id(newest) in found and abs(log(newest.ratio)) > log(1 + margin):
                verdict = "slower" if newest.ratio > 1 else "faster"
            newest = replace(newest, verdict=verdict)
        flagged.append(replace(s, newest=newest))
    return flagged
