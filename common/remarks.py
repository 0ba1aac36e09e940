"""The lines around the tables: what is going to be measured, how long that may take, what was
uncertain and what helps, where the report is. Pure functions.
"""

import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from os.path import relpath
from typing import Any

from common.cli import ROOT
from common.environment import Others
from common.report import Case
from common.stats import autocorrelation_time
from common.timing import MIN_SAMPLES

Key = dict[str, Any]
WIDE = 0.1  # an interval that reaches farther from its median, as a share of it, gets a hint


# -- before: what is going to be measured ----------------------------------------------------------


def label_of(key: Key) -> str:
    """A case in the line that shows the progress, and in a message about it."""
    return " ".join(str(value) for value in key.values() if not isinstance(value, bool | None))


def duration(seconds: float) -> str:
    """`0.4 s`, `45 s`, `3 min`, `2 h 05 min`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02} min"


def planned_lines(keys: Sequence[Key]) -> str:
    """What --dry-run prints: a line for each case that the run would measure."""
    cases = [f"# {label_of(key)}" for key in keys]
    return "\n".join(
        ["", *cases, f"# {len(keys)} case{'s' * (len(keys) != 1)}, nothing was measured"]
    )


# -- while: how long still -------------------------------------------------------------------------


@dataclass
class Pace:
    """How far a run is. now: seconds of a clock that only runs forwards."""

    cases: int = 0  # that the run is going to measure; 0 if nobody knows
    longest_s: float | None = None  # the most for all cases; None if no time limits them
    taken_s: list[float] = field(default_factory=list)  # by each case that is over
    begun_s: float = 0.0  # when the case began

    def begin(self, now: float) -> None:
        self.begun_s = now

    def end(self, now: float) -> None:
        self.taken_s.append(now - self.begun_s)

    def text(self, now: float) -> str:
        """`case 3 of 12, about 2 min left`: cases to come take as long as those before them."""
        number = len(self.taken_s) + 1
        if number > self.cases:
            return f"case {number}"
        text = f"case {number} of {self.cases}"
        if self.taken_s:
            mean_s = sum(self.taken_s) / len(self.taken_s)
            this_s = max(0.0, mean_s - (now - self.begun_s))
            left_s = mean_s * (self.cases - number) + this_s
            return f"{text}, about {duration(max(1.0, left_s))} left"
        return f"{text}, {duration(self.longest_s)} at most" if self.longest_s else text


# -- after: what was uncertain, and what helps -----------------------------------------------------


@dataclass(frozen=True)
class Conditions:
    """What may have widened the intervals of a run, and which flags it had."""

    iters: int | None
    min_iters: int
    max_seconds: float
    others: str  # `other programs took 0.9 of 2 cores of vm`, or ""
    crowded: str  # `4 ranks share 2 cores of vm`, or ""


def crowded_text(rows: Iterable[dict[str, Any]], loads: Sequence[Others], nodes: list[int]) -> str:
    """Where more ranks than cores are; "" if nowhere. rows: of the ranks. nodes: of each rank."""
    for node, load in enumerate(loads):
        ranks = nodes.count(node)
        if ranks > load.cores:
            host = [row["host"] for row in rows][nodes.index(node)]
            return f"{ranks} ranks share {load.cores} cores of {host}"
    return ""


def without_interval(case: Case) -> set[str]:
    """The names of the times that should have a 95 % interval in this case and have none."""
    lacking = [name for name, value in case.metrics.items() if "_ci95" in name and value is None]
    return {in_words(name) for name in lacking}


def with_wide_interval(case: Case) -> set[str]:
    """The names of the times whose 95 % interval reaches farther than WIDE from the median."""
    wide = set()
    for name, value in case.metrics.items():
        if name.endswith("_ci95_rel") and value is not None and value > WIDE:
            wide.add(in_words(name))
    return wide


def in_words(metric: str) -> str:
    """step_time_ci95_rel -> `step time`."""
    return metric.partition("_ci95")[0].replace("_", " ")


def slowest_s(case: Case) -> list[float]:
    """The samples of the step, the slowest rank's in each iteration."""
    if case.bounded:
        return case.slowest_s.get("step", [])
    return [max(times) for times in zip(*case.samples_s.get("step", []), strict=True)]


def timed_s(case: Case) -> float:
    """The seconds of all samples of the first rank, the step's and the parts' together. Of the
    slowest rank where the case has only a part of the others' samples."""
    if case.bounded:
        return sum(sum(times) for times in case.slowest_s.values())
    return sum(sum(rows[0]) for rows in case.samples_s.values() if rows)


def drifts(case: Case) -> bool:
    """Whether samples in a row are so alike that all count as fewer than MIN_SAMPLES."""
    samples = slowest_s(case)
    if len(samples) < MIN_SAMPLES:
        return False
    return len(samples) / autocorrelation_time(samples) < MIN_SAMPLES


def hints(cases: Sequence[Case], conditions: Conditions) -> list[str]:
    """If intervals are missing or wide: which, and a line for each cause that can be seen, with
    the flag that helps. cases: those that did not fail."""
    lacking = [case for case in cases if without_interval(case)]
    wide = [case for case in cases if with_wide_interval(case) and case not in lacking]
    doubtful = [*lacking, *wide]
    if not doubtful:
        return []
    names: set[str] = set()
    for case in doubtful:
        names |= without_interval(case) | with_wide_interval(case)
    how = []
    if lacking:
        how.append(f"missing (-) in {len(lacking)}")
    if wide:
        how.append(f"wider than +-{WIDE:.0%} in {len(wide)}")
    first = f"95 % interval of {', '.join(sorted(names))}: {', '.join(how)} of {len(cases)} cases"
    return [first, *(f"  {cause}" for cause in causes(doubtful, conditions))]


def causes(doubtful: Sequence[Case], conditions: Conditions) -> list[str]:
    """A line for each cause that can be seen, with what helps against it; else what helps often."""
    lines = []
    if conditions.crowded:
        lines.append(f"{conditions.crowded}: start fewer ranks")
    if conditions.others:
        cure = "wait for their end, or compare by analysis/ab.py --interleave"
        lines.append(f"{conditions.others}: {cure}")
    counts = [len(slowest_s(case)) for case in doubtful]
    drifting = sum(drifts(case) for case in doubtful)
    longer = flag_for_more(doubtful, conditions)
    if drifting:
        lines.append(f"the samples of {drifting} drift, so they count as fewer: {longer}")
    elif min(counts) < conditions.min_iters:
        lines.append(f"few samples, {min(counts)} in one of them: {longer}")
    if not lines:
        lines.append(f"no cause is seen; what helps often: {longer}")
    return lines


def flag_for_more(doubtful: Sequence[Case], conditions: Conditions) -> str:
    """The flag that gives such cases more samples: twice as many, or twice as long.

    A case took up to twice the time of its samples: each block starts with an untimed iteration.
    """
    if conditions.iters:
        return f"--iters {2 * conditions.iters}"
    seconds = 4 * max(conditions.max_seconds, *(timed_s(case) for case in doubtful))
    return f"--max-seconds {math.ceil(seconds)}"


# -- the end: where the report is ------------------------------------------------------------------


def short(path: str) -> str:
    """The path from the current folder; the same path if that folder has been removed."""
    try:
        return relpath(path)
    except FileNotFoundError:
        return path


def report_lines(path: str | None, replaced: str | None) -> list[str]:
    """Where the report is, and the next commands. replaced: where an older report is now."""
    if not path or path == "-":
        return []

    def command(script: str, *words: str) -> str:
        file = str(ROOT / "analysis" / script)
        return shlex.join(["python", min(short(file), file, key=len), *words])

    lines = [f"report {path}; {command('report.py', path, '-o', 'page.html')}"]
    if replaced:
        before = short(replaced)
        lines.append(f"before {before}; {command('compare.py', before, '--test', path)}")
    return lines
