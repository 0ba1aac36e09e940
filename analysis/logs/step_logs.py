"""Step times from the logs of any program: `--step PATTERN` of compare.py and ab.py.

A regular expression finds a number, a time or a rate, in each line that reports a step. A log is a
run, and its time is the median of these numbers.
"""

import argparse
import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from analysis.runs.load import (
    LAST_DIGIT,
    STEP,
    Run,
    check_times,
    find,
    index,
    loads_from_file,
    timed,
)
from analysis.show import clean, is_number
from common.stats import median
from harness.cli import number, raise_invalid
from harness.report import Case, Report

EXAMPLE = r"e.g. --step 'elapsed time per iteration \(ms\): ([\d.]+)'"
BENCHMARK = "log"
ENDINGS = (".log", ".txt", ".out", ".err")  # suffixes of logs in a folder
RATE = "1/s"
SECONDS = {"ms": 1e-3, "s": 1.0}
BY_GROUP = {"ms": "ms", "s": "s", "rate": RATE}  # name of a group -> its unit
# terminal control sequences: colors, cursor movements, window titles
CODES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
# A progress bar is redrawn after a carriage return
NEW_LINE = re.compile(r"\r\n|\r|\n")
GROUPED = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d*)?(?:[eE][+-]?\d+)?")  # 12,345.6
# The rest of a number directly after a group that ends within it, and its beginning before a group
CONTINUATION = re.compile(r"\d+|\.\d+|[eE][+-]?\d+|,\d{3}(?!\d)")
BEGINNING = re.compile(r"(?:\d[\d,]*\.|\d+|\d,)$")


@dataclass(frozen=True)
class Steps:
    """How to find the times of steps in a log."""

    pattern: re.Pattern[str]
    unit: str  # ms, s or 1/s; unit of the groups that are not named as in BY_GROUP
    skip: int = 0  # number of matches to ignore at the beginning of a log

    @property
    def measure(self) -> str:
        """`step`, or `1 / rate` if all numbers are rates."""
        return "1 / rate" if set(units_of(self.pattern, self.unit)) == {RATE} else STEP

    @property
    def settings(self) -> dict[str, Any]:
        """The settings as entries of a plan."""
        return {"step": repr(self.pattern.pattern), "unit": self.unit, "skip": self.skip}


class Found(NamedTuple):
    """The times in a log, in seconds, and the resolution with which they were printed."""

    times_s: list[float]
    last_digit: float  # one unit in the last digit / the median number


# -- flags -----------------------------------------------------------------------------------------


def add_step_flags(parser: argparse.ArgumentParser, where: str) -> None:
    """Add --step, --skip and --unit. where: the source of the numbers, for the help text."""
    add = parser.add_argument
    step = f"regular expression with one group, which finds step times or rates in {where}"
    add("--step", type=pattern, metavar="PATTERN", help=step)
    skip = "ignore the first N matches in each log (default: 0)"
    add("--skip", type=number(int, 0), metavar="N", help=skip)
    unit = "unit of the numbers; 1/s for rates (default: ms if the pattern contains the word ms)"
    add("--unit", choices=(*SECONDS, RATE), help=unit)


def pattern(text: str) -> re.Pattern[str]:
    """The type of --step."""
    try:
        compiled = re.compile(text)
    except re.error as error:
        raise_invalid(f"a regular expression ({error})", repr(text), EXAMPLE)
    if not compiled.groups:
        raise_invalid("a regular expression with a group around the number", repr(text), EXAMPLE)
    return compiled


def units_of(compiled: re.Pattern[str], unit: str) -> list[str]:
    """The unit of each group."""
    names = {number: name for name, number in compiled.groupindex.items()}
    groups = range(1, compiled.groups + 1)
    return [BY_GROUP.get(names.get(group, ""), unit) for group in groups]


def steps_of(args: argparse.Namespace, others: Mapping[str, Any]) -> Steps | None:
    """The settings given by the flags; None without --step. Raises ValueError if they conflict.

    others: flags that cannot be used with --step, and their values.
    """
    if args.step is None:
        for flag, value in (("--skip", args.skip), ("--unit", args.unit)):
            if value is not None:
                raise ValueError(f"{flag} requires --step; {EXAMPLE}")
        return None
    for flag, value in others.items():
        if value:
            raise ValueError(f"{flag} applies to reports, and cannot be used with --step")
    text = args.step.pattern
    lacks_unit = "" in units_of(args.step, "")
    if args.unit and not lacks_unit:
        what = f"--unit {args.unit} cannot be used with {text!r}"
        raise ValueError(f"{what}, whose groups are named after their units")
    unit = args.unit or ("ms" if re.search(r"\bms\b", text) else "")
    if lacks_unit and not unit:
        what = f"--unit: expected the unit of the numbers in {text!r}, ms, s or 1/s (a rate)"
        raise ValueError(f"{what}; e.g. --unit 1/s")
    return Steps(args.step, unit, args.skip or 0)


# -- numbers in a text -----------------------------------------------------------------------------


def times_of(content: bytes, steps: Steps, path: str) -> Found:
    """The times in a log. Raises ValueError with a message of one line if a match is not a number
    above 0, or if there are no matches."""
    units = units_of(steps.pattern, steps.unit)
    text = CODES.sub("", content.decode(errors="replace"))
    lines = NEW_LINE.split(text)
    times_s: list[float] = []
    numbers: dict[str, list[float]] = defaultdict(list)  # by unit
    last_digits: dict[str, list[float]] = defaultdict(list)
    count = 0
    for line_number, line in enumerate(lines, 1):
        for match in steps.pattern.finditer(line):
            count += 1
            if count <= steps.skip:
                continue
            where = f"{path}, line {line_number}"
            group = only_group(match, where)
            value, last_digit = number_in(match, group, where)
            unit = units[group - 1]
            times_s.append(1 / value if unit == RATE else value * SECONDS[unit])
            numbers[unit].append(value)
            last_digits[unit].append(last_digit)
    if not times_s:
        raise ValueError(why_empty(steps, path, lines, count))
    check_times(times_s, path, steps.measure)
    # 0.4 may stand for 0.40: the number with the most digits shows the resolution
    shares = [min(last_digits[unit]) / float(np.median(numbers[unit])) for unit in numbers]
    return Found(times_s, max(shares))


def why_empty(steps: Steps, path: str, lines: Sequence[str], count: int) -> str:
    if count:
        noun = "match" if count == 1 else "matches"
        what = f"{path} has {count} {noun} of --step, and --skip {steps.skip} leaves none"
        return f"{what}; e.g. --skip {count // 2}"
    what = f"{path}: expected lines with {steps.pattern.pattern!r}, got none in {len(lines):,}"
    with_digits = [line.strip() for line in lines if re.search(r"\d", line)]
    return f"{what}; e.g. its last line is {clean(with_digits[-1])!r}" if with_digits else what


def only_group(match: re.Match[str], where: str) -> int:
    """The only group that matched. Raises ValueError if there is not exactly one."""
    taken = [group for group in range(1, match.re.groups + 1) if match[group] is not None]
    if len(taken) != 1:
        what = f"{where}: expected one group of --step to match, got {len(taken)}"
        raise ValueError(f"{what} in {clean(match[0])!r}; e.g. (?:...) for the other groups")
    return taken[0]


def number_in(match: re.Match[str], group: int, where: str) -> tuple[float, float]:
    """The number in a group, and one unit in its last digit.

    Raises ValueError if it is not a number above 0, or if it is only a part of a number: `6` of
    `6,123`, `1.2` of `1.2e-05`.
    """
    taken = match[group].strip().rstrip(".,;:")  # punctuation
    start, end = match.span(group)
    line = match.string
    if taken[-1:].isdigit() and match.end() == end:
        more = CONTINUATION.match(line, end)
        # 1.5,125 is a list of numbers, and 1,234,567 is one number
        has_more = more and (more[0][0] != "," or re.fullmatch(r"\d{1,3}(,\d{3})*", taken))
        if more and has_more:
            refuse_part(where, taken, match[group] + more[0])
    if taken[:1].isdigit() and match.start() == start:
        before = BEGINNING.search(line, 0, start)
        if before and (before[0][-1] != "," or re.match(r"\d{3}(?!\d)", taken)):
            refuse_part(where, taken, before[0] + match[group])
    digits = taken.replace(",", "") if GROUPED.fullmatch(taken) else taken
    try:
        value = float(digits)
    except ValueError:
        value = math.nan
    if not (is_number(value) and value > 0):
        raise ValueError(f"{where}: expected a number above 0, got {clean(taken)!r}; {EXAMPLE}")
    mantissa, _, exponent = digits.lower().partition("e")
    decimals = len(mantissa.partition(".")[2])
    return value, 10.0 ** (int(exponent or 0) - decimals)


def refuse_part(where: str, got: str, whole: str) -> None:
    what = f"{where}: expected a group around the whole number {clean(whole)!r}, got {got!r}"
    raise ValueError(rf"{what}; e.g. ([\d.,e+-]+)")


# -- runs and reports ------------------------------------------------------------------------------


def case_of(found: Found, steps: Steps) -> Case:
    """A log as a case of a report."""
    key = {"step": steps.pattern.pattern}
    case = Case(key=key, name=STEP, ranks=[0], samples_s={steps.measure: [found.times_s]})
    case.metrics = {"step_s": median(found.times_s), LAST_DIGIT: found.last_digit}
    case.stop = "log"
    return case


def load_logs(words: Sequence[str], steps: Steps) -> list[Run]:
    """One run per log that the paths, folders and patterns name, in this order.

    Raises ValueError with a message of one line.
    """
    runs = [read_log(path, steps) for path in find(words, ENDINGS)]
    counts = sorted({len(row.times_s) for run in runs for row in run.rows.values()})
    noun = "match" if counts[-1:] == [1] else "matches"
    many = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
    for run in runs:
        for row in run.rows.values():
            row.time_is = f"median of {many} {noun} of --step"
            row.label = row.name
    return runs


def read_log(path: str, steps: Steps) -> Run:
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    case = case_of(times_of(content, steps, path), steps)
    run = Run(BENCHMARK, {}, path, argv=[], started_at="", status="complete", label=path)
    run.digest = hashlib.sha256(content).hexdigest()
    run.loads = loads_from_file(path)
    index(run, [timed(case, None)], "")
    return run


def write_report(
    path: str, log: str, steps: Steps, argv: Sequence[str], started_at: str | None
) -> None:
    """Write a report from the log of a command.

    Raises ValueError with a message of one line if the log has no step times, and OSError if the
    disk is full.
    """
    with open(log, "rb") as file:
        case = case_of(times_of(file.read(), steps, log), steps)
    report = Report(BENCHMARK, {}, path, argv=list(argv))
    report.started_at = started_at or report.started_at
    report.start()
    try:
        report.add(case)
        report.finish("complete")
    finally:
        for opened in report.files:
            opened.close()
