"""Compare runs that are series of steps, logs and reports of one's own loop: also by their means.

The median of a series does not see steps that wait, e.g. every fourth for the loader, but the
training takes as long as all its steps. If their share differs between runs, the means are compared
as well, and the two looks share the error rate. If half of the steps take longer than the others,
the median is one of the two or lies between them, by chance: then only the means are compared.

For logs, the files of one job count as one run.
"""

import re
from collections.abc import Container, Sequence
from dataclasses import replace
from itertools import combinations, product
from math import ceil, floor, sqrt

import numpy as np

from analysis.logs import series
from analysis.runs import rounding
from analysis.runs.duplicates import duplicates
from analysis.runs.evidence import is_timed
from analysis.runs.load import LATER, LEADING, MEAN, STEP, Row, Run
from analysis.runs.verdicts import Comparison, Design, Result
from analysis.runs.verdicts import compare as compare_once
from analysis.show import canonical, show_time
from common.stats import median
from harness.cli import cut

LONG_S = 10.0  # a longer step may be a rate that was read as a time
MIN_STEPS = 20  # of fewer, a gap between the middle ones is no evidence of two kinds
NORMAL_95 = 1.96
SEVERAL_DIGITS = 1.5  # times the resolution: neighboring numbers are not two kinds of steps
LARGEST = 10.0  # a larger factor between the sides is rather another unit than another speed
# The rank in a path: torchrun's attempt_0/3/, rank3, rank-3, rank_3
RANK = re.compile(r"(?<=attempt_)(\d+)/\d+(?=/)|(?<![A-Za-z])((?:local_)?rank[-_\[]?)\d+")

BY_MEAN = {"statistic": "mean"}  # in the key of a case whose means are compared
Name = tuple[str, str]  # a case: its benchmark, and its key as text


def compare(base: Sequence[Run], test: Sequence[Run], design: Design) -> Comparison:
    """`verdicts.compare`, with looks at the means of steps that stall or are of two kinds."""
    are_logs = all(is_log(run) for run in [*base, *test])
    lines: list[str] = []
    for side, runs in {"BASE": base, "TEST": test}.items() if are_logs else ():
        refuse_mixture(runs, side)
        lines += remarks_of(runs, side)
    if are_logs and not design.paired:
        base, test, of_jobs = one_run_per_job(base, test)
        lines += of_jobs
    series_of = {name: (series_in(base, name), series_in(test, name)) for name in names_in(base)}
    series_of = {name: sides for name, sides in series_of.items() if all(sides)}
    halved: list[Name] = []  # half of the steps take longer
    unsteady: list[Name] = []
    for name, sides in series_of.items():
        label = "" if len(series_of) == 1 else f", {sides[0][0].label}"
        if two_kinds := lines_of_two_kinds(*sides, label, design.margin, are_logs):
            halved.append(name)
            lines += two_kinds
        elif not is_steady([*sides[0], *sides[1]], design.margin):
            unsteady.append(name)
            lines += stall_lines(*sides, label, are_logs)
    if unsteady:
        design = replace(design, alpha=design.alpha / 2)
    base, test = (with_means(runs, halved) for runs in (base, test))
    comparison = compare_once(base, test, design)
    if unsteady:
        by_mean = compare_once(with_means(base, unsteady), with_means(test, unsteady), design)
        found = {name_of(case): case for case in by_mean.cases}
        for case in [one for one in comparison.cases if name_of(one) in unsteady]:
            other = found[case.benchmark, canonical(case.key | BY_MEAN)]
            comparison.cases.append(other)
            decide_contradiction([case, other])
    if are_logs:
        decide_implausible(comparison.cases)
    comparison.warnings.extend(lines)
    return comparison


def is_log(run: Run) -> bool:
    """Whether the run is a log, or the report that ab.py wrote of one."""
    return bool(run.rows) and all(MEAN in row.metrics for row in run.rows.values())


def row_of(run: Run) -> Row:
    return next(iter(run.rows.values()))


def name_of(case: Result) -> Name:
    return case.benchmark, canonical(case.key)


def names_in(runs: Sequence[Run]) -> list[Name]:
    """The cases of the runs."""
    return [*dict.fromkeys((run.benchmark, form) for run in runs for form in run.rows)]


def series_in(runs: Sequence[Run], name: Name) -> list[Row]:
    """The rows of a case; none if those with a time are no series of steps. Reports of this project
    have rounds, whose medians are averaged."""
    rows = [row for run in runs if run.benchmark == name[0] and (row := run.rows.get(name[1]))]
    rows = [row for row in rows if is_timed(row)]
    return [] if any(row.rounds or not len(row.times_s) for row in rows) else rows


def is_steady(rows: Sequence[Row], margin: float) -> bool:
    """Whether the mean says what the median says: in all runs it exceeds the median alike."""
    excesses = [series.excess(row.times_s) for row in rows]
    return max(excesses) - min(excesses) <= margin / 2


def with_means(runs: Sequence[Run], names: Container[Name]) -> list[Run]:
    """The runs, with the mean over steps as the time of these cases."""
    return [
        replace(
            run,
            rows=dict(
                mean_of(row) if (run.benchmark, form) in names else (form, row)
                for form, row in run.rows.items()
            ),
        )
        for run in runs
    ]


def mean_of(row: Row) -> tuple[str, Row]:
    """The row of a series with the mean over steps as its time, and its key as text."""
    key = row.key | BY_MEAN
    kind = row.time_is.replace("median", "mean", 1)
    mean_s = float(np.mean(row.times_s)) if is_timed(row) else 0.0
    return canonical(key), replace(
        row, key=key, label=f"{row.label}, mean", time_s=mean_s, time_is=kind
    )


def decide_contradiction(cases: Sequence[Result]) -> None:
    """A case whose median is slower and whose mean is faster, or the reverse, is undecided."""
    if {"slower", "faster"} <= {case.verdict for case in cases}:
        for case in cases:
            case.verdict = "undecided"
            case.reason = "median and mean contradict each other; what do the slow steps wait for?"


def decide_implausible(cases: Sequence[Result]) -> None:
    """A case whose sides differ by a factor above LARGEST is undecided: no list of units and of
    separators of thousands is complete."""
    for case in cases:
        factor = max(case.ratio, 1 / case.ratio) if case.ratio else 1.0
        if case.verdict in ("slower", "faster") and factor > LARGEST:
            case.verdict = "undecided"
            case.reason = (
                f"the sides differ by a factor of {factor:.3g}, as if one had another unit or "
                "separator of thousands; look at a line of each log"
            )


# -- lines -----------------------------------------------------------------------------------------


def refuse_mixture(runs: Sequence[Run], side: str) -> None:
    """Raise ValueError if some logs of a side count other things, such as tokens, than the rest."""
    one_of = {str(row_of(run).key.get("counts")): run for run in runs}
    if len(one_of) > 1:
        which = " and ".join(f"{of} ({run.label})" for of, run in list(one_of.items())[:2])
        what = f"the numbers of {side} count different things: {which}"
        raise ValueError(f"{what}; --ignore-key counts joins them")


def remarks_of(runs: Sequence[Run], side: str) -> list[str]:
    """Lines about files, slow starts and implausible units."""
    lines = [remark for run in runs for remark in run.remarks]
    slow = []
    for name, form in ((LEADING, "the first {} {}"), (LATER, "{} {} after restarts")):
        counts = [row_of(run).metrics.get(name) or 0 for run in runs]
        low, high = min(counts), max(counts)
        many = f"{low}" if low == high else f"up to {high}"
        slow += [form.format(many, "step" if high == 1 else "steps")] if high else []
    if slow:
        what = f"{' and '.join(slow)} of the logs of {side} took more than"
        lines.append(f"{what} {series.SLOW_START:g} medians: left out; --skip N sets the number")
    middle = median([row_of(run).time_s for run in runs]).value
    if middle > LONG_S and row_of(runs[0]).measure != STEP:
        lines.append(f"1 / rate is {show_time(middle)} in {side}; are the numbers times?")
    elif middle > LONG_S:
        lines.append(f"a step takes {show_time(middle)} in {side}; is its unit right?")
    return lines


def stall_lines(base: Sequence[Row], test: Sequence[Row], label: str, are_logs: bool) -> list[str]:
    """`TEST: 1 of 4 steps takes 2.9 times as long, and the mean is 1.48 times the median`. label:
    of the case, if there are several."""
    lines = []
    for side, rows in {"BASE": base, "TEST": test}.items():
        times_s = [row.times_s for row in rows]
        if text := series.stall_text(times_s):
            factor = float(np.mean(np.concatenate([np.divide(x, np.median(x)) for x in times_s])))
            shown = text if are_logs else text.replace(f", {series.AS_AFTER_RESTARTS}", "")
            lines.append(f"{side}{label}: {shown}; the mean is {factor:.2f} times the median")
            if series.AS_AFTER_RESTARTS in text:
                low, high = map(show_time, series.levels(np.concatenate(times_s).tolist()))
                lines.append(f"{side}{label} has steps of two kinds: about {low} and about {high}")
    return lines


def lines_of_two_kinds(
    base: Sequence[Row], test: Sequence[Row], label: str, margin: float, are_logs: bool
) -> list[str]:
    """A line for each side on which the medians of half of the runs lie between two kinds of steps:
    `TEST: 93 of 180 steps take about 100 ms, and the others about 140 ms; ...`."""
    lines = []
    for side, rows in {"BASE": base, "TEST": test}.items():
        limits = [max(margin, SEVERAL_DIGITS * step) for step in rounding.resolutions(rows)]
        times_s = [row.times_s for row in rows]
        kinds = [two_kinds(*one) for one in zip(times_s, limits, strict=True)]
        found = [(np.asarray(x) < y, x) for x, y in zip(times_s, kinds, strict=True) if y]
        if 2 * len(found) < len(rows):
            continue
        is_fast = np.concatenate([fast for fast, _ in found])
        times = np.concatenate([x for _, x in found])
        low, high = (show_time(float(np.median(times[of]))) for of in (is_fast, ~is_fast))
        blocks = sum(int(fast[0]) + int((np.diff(fast.astype(int)) > 0).sum()) for fast, _ in found)
        count, size = int(is_fast.sum()), len(is_fast)
        is_long = min(count, size - count) >= series.LONG_BLOCK * blocks
        which = f"{count} of {size} steps"
        which += f", in blocks of about {round(count / blocks)}," if is_long else ""
        what = f"{which} take about {low}, and the others about {high}"
        what += f", {series.AS_AFTER_RESTARTS}" if is_long and are_logs else ""
        lines.append(
            f"{side}{label}: {what}; the median could be either, so the means are compared"
        )
    return lines


def two_kinds(times_s: Sequence[float], least: float) -> float | None:
    """A time between the faster and the slower half of the steps, if there are two kinds of steps;
    None otherwise.

    This is so if the 95% interval of the median, of independent steps, has a gap between two times
    that is at least half as wide as the difference between the medians of the two parts. least: a
    smaller gap does not count, relative to the time below.
    """
    n = len(times_s)
    if n < MIN_STEPS:
        return None
    times = np.sort(times_s)
    half = NORMAL_95 * sqrt(n) / 2
    first, last = floor((n - 1) / 2 - half), ceil((n - 1) / 2 + half)
    gaps = np.diff(times[first : last + 1])
    i = first + int(np.argmax(gaps))
    gap = float(gaps.max())
    apart = float(np.median(times[i + 1 :]) - np.median(times[: i + 1]))
    is_clear = gap >= apart / 2 and gap > least * times[i]
    return float(times[i : i + 2].mean()) if is_clear else None


# -- ranks of one job ------------------------------------------------------------------------------


def one_run_per_job(
    base: Sequence[Run], test: Sequence[Run]
) -> tuple[Sequence[Run], Sequence[Run], list[str]]:
    """The sides with one run for the ranks of each job, and lines that say so.

    Two files are of one job if their steps go together, and those of no file of the other side do.
    If all do, as in runs with the same data, the paths or overlapping times decide. Runs with a
    start, which ab.py made, are never ranks of one job.
    """
    if any(run.started_at for run in [*base, *test]):
        return base, test, []
    copied = duplicates([(run, row_of(run)) for run in [*base, *test]])
    ours = [run for i, run in enumerate(base) if i not in copied]
    theirs = [run for i, run in enumerate(test, len(base)) if i not in copied]
    across = [together(a, b) for a, b in product(ours, theirs)]
    others = max((x for x in across if x is not None), default=0.0)
    lines: list[str] = []
    sides = []
    for side, runs in {"BASE": base, "TEST": test}.items():
        copies = duplicates([(run, row_of(run)) for run in runs])
        pairs, doubtful, alike = pairs_of(runs, others, copies)
        ranks = {i for pair in pairs for i in pair}
        # a copy of a rank belongs to its job; any other copy does not count anyway
        pairs += [(i, j) for i, originals in copies.items() for j in originals if j in ranks]
        jobs = series.groups(len(runs), pairs)
        sides.append([merged([runs[i] for i in job]) for job in jobs])
        for job in jobs:
            if len(job) > 1:
                names = cut([runs[i].label for i in job], 3)
                what = f"{len(job)} files of {side} are ranks of one job, whose steps go together"
                lines.append(f"{what}: {names}; they count as one run, by the slowest rank")
        if doubtful:
            what = f"the steps of {cut(doubtful, 3)} go together, as those of the ranks of one job"
            lines.append(f"{what} or of runs with the same data; give one file per job")
        for why, labels in alike.items():
            what = f"{why} {cut(labels, 3)} of {side} are those of the ranks of one job"
            lines.append(f"{what}, but not their steps: they count as runs; give one file per job")
    return sides[0], sides[1], lines


def pairs_of(
    runs: Sequence[Run], others: float, copies: Container[int]
) -> tuple[list[tuple[int, int]], list[str], dict[str, list[str]]]:
    """The pairs of a side that are ranks of one job, the labels of those that may be, and of those
    that only have the names or the times of such ranks.

    others: the highest correlation of two files of different sides. copies: positions of runs that
    are copies of others.
    """
    pairs, weak = [], []
    doubtful: dict[str, None] = {}
    alike: dict[str, set[int]] = {}
    for i, j in combinations(range(len(runs)), 2):
        a, b = runs[i], runs[j]
        if i in copies or j in copies or apart(a, b):
            continue
        in_job = same_job(a.label, b.label)
        marked = in_job or overlap(a, b)
        found = together(a, b)
        if found is None or found <= series.LEVEL:
            is_pair = found is None and in_job
        elif found <= series.TOGETHER:
            is_chance = series.is_chance(found, row_of(a).times_s, row_of(b).times_s)
            is_weak = found > others + series.ABOVE_OTHERS and not is_chance
            is_pair = is_weak and marked
            if is_weak and not is_pair and not stall_alike(a, b):
                weak.append((i, j))
        else:
            is_pair = marked or found > others + series.ABOVE_OTHERS
            if not is_pair and not stall_alike(a, b):
                doubtful |= {a.label: None, b.label: None}
        if is_pair:
            pairs.append((i, j))
        elif marked:
            why = "the paths of" if in_job else "the times of day in"
            alike.setdefault(why, set()).update((i, j))
    # noise between the ranks of a job: some pairs are clear, others are not
    clear = {i for pair in pairs for i in pair}
    for pair in weak:
        if clear & set(pair):
            pairs.append(pair)
        else:
            doubtful |= {runs[i].label: None for i in pair}
    ranks = {i for pair in pairs for i in pair}
    named = {why: [runs[i].label for i in sorted(of - ranks)] for why, of in alike.items()}
    return pairs, [*doubtful], {why: labels for why, labels in named.items() if len(labels) > 1}


def stall_alike(a: Run, b: Run) -> bool:
    """Whether steps go together only because the same ones stall, as in runs of one program."""
    times_s = [row_of(run).times_s for run in (a, b)]
    count = min(map(len, times_s))
    found = [series.stalls(x[:count]) for x in times_s]
    if not all(found):
        return False
    stalled = np.concatenate([where for where, _ in filter(None, found)])
    rest = [np.delete(x[:count], stalled).tolist() for x in times_s]
    return (series.correlation(*rest) or 0.0) <= series.LEVEL


def together(a: Run, b: Run) -> float | None:
    return series.together(row_of(a).times_s, row_of(b).times_s)


def same_job(a: str, b: str) -> bool:
    """Whether two paths differ only in a rank."""
    first, second = (RANK.sub(lambda match: match[2] or match[1], path) for path in (a, b))
    return a != b and first == second


def overlap(a: Run, b: Run) -> bool:
    """Whether the times of day in two logs overlap."""
    return bool(a.span and b.span) and not apart(a, b)


def apart(a: Run, b: Run) -> bool:
    """Whether one log ends before the other begins."""
    return bool(a.span and b.span and (a.span[1] < b.span[0] or b.span[1] < a.span[0]))


def merged(runs: Sequence[Run]) -> Run:
    """The ranks of a job as one run: the slowest rank in each step that all have."""
    first = runs[0]
    if len(runs) == 1:
        return first
    rows = [row_of(run) for run in runs]
    count = min(len(row.times_s) for row in rows)
    times_s = np.max([row.times_s[:count] for row in rows], axis=0)
    row = replace(rows[0], times_s=times_s.tolist(), time_s=float(np.median(times_s)))
    label = f"{first.label} and {len(runs) - 1} others"
    form = next(iter(first.rows))
    return replace(first, rows={form: row}, label=label, digest=" ".join(r.digest for r in runs))
