"""Step times from the logs of any program: `--step` of compare.py and ab.py.

A regular expression finds a number, a time or a rate, in each line that reports a step; in JSON, a
field has it. A log is a run, and its time is the median of these numbers.
"""

import argparse
import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from analysis.logs.numbers import (
    RATE,
    SECONDS,
    UNITS,
    WINDOW,
    Neighbor,
    Unit,
    counted_by,
    decimal_mark,
    form_of,
    groups_in,
    joined,
    neighbor_of,
    read_number,
    rest_of,
    shown,
    suspect,
    unit_after,
    unit_in_pattern,
    unit_named,
    unit_near,
    words_near,
)
from analysis.logs.patterns import NEW_LINE, Read, lines_in, text_of
from analysis.logs.series import after_skip, only_grow, restarts, slow_start
from analysis.runs.load import (
    LAST_DIGIT,
    LATER,
    LEADING,
    MAX_FOREIGN_BYTES,
    MEAN,
    STEP,
    Run,
    check_times,
    find,
    index,
    loads_from_file,
    remove_fields,
    timed,
)
from analysis.show import clean, is_number
from common.stats import median
from harness.cli import cut, number, raise_invalid, suggest
from harness.report import Case, Estimate, Report

EXAMPLE = r"e.g. --step 'elapsed time per iteration \(ms\): ([\d.]+)'"
BENCHMARK = "log"
ENDINGS = (".log", ".txt", ".out", ".err", ".jsonl")  # suffixes of logs in a folder
IN_JSON = (*ENDINGS, ".json")  # the same if --step is a field
MOST_CHARACTERS = 1_000_000  # of a line
# A name, which matches no number: `tps`, `perf.step_ms`, `time_metrics/end_to_end(s)`
FIELD = re.compile(r"[\w./ :%@-]*\w(?: ?\(\w+\))?")
# Integers of a line that may count steps: neither times nor the number of an attempt
NO_COUNTER = re.compile(
    r"\d{2,4}[-/.]\d\d[-/.]\d{2,4}|\d+:\d\d(?::\d\d)?(?:[.,]\d+)?|"
    r"(?i:attempt|restart|retry|retries|requeue)\w*\W{0,3}\d+"
)
DATE = re.compile(r"\d{4}[-/]\d\d[-/]\d\d[ T]\d\d:\d\d:\d\d")
PER_SEVERAL = re.compile(r" ?[A-Za-z]+(?: ?/ ?| per )\d+ ?[A-Za-z]+")  # s/100it
IS_UNIT = re.compile(r"(?i)(?:.*[_./ -])?units?")
HAS_DIGIT = re.compile(r"\d")
INTEGER = re.compile(r"(?<![\w.-])\d{1,12}(?!\w|[.,]\d)")


@dataclass(frozen=True)
class Steps:
    """How to find the times of steps in a log."""

    pattern: re.Pattern[str]  # or the name of a field
    unit: str  # ms, s, us, ns or 1/s; "" if the pattern states the unit of each group
    skip: int = 0  # number of matches to ignore at the beginning of each attempt

    @property
    def is_field(self) -> bool:
        """Whether the pattern is the name of a field: it cannot match a number."""
        return bool(FIELD.fullmatch(self.text))

    @property
    def endings(self) -> tuple[str, ...]:
        """Suffixes of logs in a folder."""
        return IN_JSON if self.is_field else ENDINGS

    @property
    def text(self) -> str:
        return self.pattern.pattern

    @cached_property
    def around(self) -> list[tuple[str, str, str]]:
        """For each group, the text of the pattern before it, in it and after it."""
        return groups_in(self.text)

    @cached_property
    def units(self) -> list[Unit | None]:
        """The unit of each group, or that of a field."""
        names = {number: name for name, number in self.pattern.groupindex.items()}
        known = self.stated
        if self.unit:
            unit = UNITS[self.unit]
            known = [one if one and one.is_rate and unit.is_rate else unit for one in known]
        return [UNITS.get(names.get(i, ""), unit) for i, unit in enumerate(known, 1)]

    @cached_property
    def stated(self) -> list[Unit | None]:
        """The units that the pattern states next to its groups."""
        if self.is_field:
            return [unit_of_field(self.text)]
        return [unit_in_pattern(before, after) for before, _, after in self.around]

    @property
    def measure(self) -> str:
        """`step`, `1 / rate` if all numbers are rates, or `time per token`."""
        units = [unit for unit in self.units if unit]
        if units and all(unit.is_rate for unit in units):
            return "1 / rate"
        others = [of for unit in units if not unit.is_rate and (of := counted_by(unit)) != STEP]
        return f"time per {others[0]}" if others else STEP

    @property
    def settings(self) -> dict[str, Any]:
        """The settings as entries of a plan."""
        return {"step": shown(self.text), "unit": self.unit, "skip": self.skip}


def unit_of_field(name: str) -> Unit | None:
    """The unit at the end of a field's name: `step_ms`, `end_to_end(s)`, `tokens_per_second`."""
    return unit_in_pattern(name.removesuffix(")").replace("(", " ") + ": ", "")


class Match(NamedTuple):
    """A match of --step."""

    where: str
    line: str
    start: int  # of the number in the line
    end: int
    group: int
    integers: Sequence[int]  # others in the line, among them the step


class Found(NamedTuple):
    """The times in a log, in seconds, and the resolution with which they were printed."""

    times_s: list[float]
    last_digit: float  # one unit in the last digit / the median number
    leading: int = 0  # slow steps at the beginning, which were left out
    later: int = 0  # the same after restarts
    mark: str = "."  # the decimal mark
    span: tuple[str, str] | None = None  # the times of day of the first and of the last match
    counts: str = ""  # what the numbers count, such as steps


class NoMatchError(ValueError):
    """A log has no match of --step."""


class UndecidedError(ValueError):
    """A log does not show its decimal mark."""


# -- flags -----------------------------------------------------------------------------------------


def add_step_flags(parser: argparse.ArgumentParser, where: str) -> None:
    """Add --step, --skip and --unit. where: the source of the numbers, for the help text."""
    add = parser.add_argument
    step = (
        "regular expression with a group that finds step times or rates, or the name of a field "
        f"in JSON lines, in {where}"
    )
    add("--step", type=pattern, metavar="PATTERN", help=step)
    skip = "ignore the first N matches in each log, and after each restart in it (default: 0)"
    add("--skip", type=number(int, 0), metavar="N", help=skip)
    unit = "unit of the numbers; 1/s for rates (default: the unit next to the group of the pattern)"
    add("--unit", choices=(*SECONDS, RATE), help=unit)


def pattern(text: str) -> re.Pattern[str]:
    """The type of --step."""
    try:
        compiled = re.compile(text)
    except re.error as error:
        raise_invalid(f"a regular expression ({error})", shown(text), EXAMPLE)
    if not compiled.groups and not FIELD.fullmatch(text):
        raise_invalid("a regular expression with a group around the number", shown(text), EXAMPLE)
    return compiled


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
    steps = Steps(args.step, args.unit or "", args.skip or 0)
    named = set(args.step.groupindex) & set(UNITS)
    if args.unit and args.step.groups and len(named) == args.step.groups:
        what = f"--unit {args.unit} cannot be used with {shown(steps.text)}"
        raise ValueError(f"{what}, whose groups are named after their units")
    for stated in steps.stated if args.unit else ():
        unit = UNITS[args.unit]
        if stated and not stated.is_guess and differs(stated, unit):
            what = f"--unit {args.unit} contradicts the unit in {shown(steps.text)}"
            name = f"{stated.of}/s" if stated.is_rate else stated.name
            raise ValueError(f"{what}, which is {name}; leave --unit out")
    if None in steps.units:
        what = f"--unit: expected the unit of the numbers in {shown(steps.text)}"
        example = r"a unit next to the group also states it, as in 'took ([\d.]+) ms'"
        raise ValueError(f"{what}, ms, s, us, ns or 1/s (a rate); {example}")
    return steps


# -- matches in a text -----------------------------------------------------------------------------


def matches_in(read: Read, steps: Steps, path: str) -> list[Match]:
    """The matches in a log. Raises ValueError with a message of one line if a line is too long, or
    if it has two matches, or if there are none."""
    if steps.is_field:
        content = read(MAX_FOREIGN_BYTES + 1)
        if len(content) > MAX_FOREIGN_BYTES:
            what = f"{path} has more than {MAX_FOREIGN_BYTES:,} bytes"
            raise ValueError(f"{what}; a pattern for --step instead of a field has no such limit")
        text = text_of(content)
        fields = list(fields_in(text, steps, path))
        if not fields:
            raise NoMatchError(why_no_field(text, steps.text, path))
        return fields
    found = []
    line_number, with_digits = 0, ""
    for line_number, line in enumerate(lines_in(read, MOST_CHARACTERS), 1):
        where = f"{path}, line {line_number}"
        if len(line) > MOST_CHARACTERS:
            what = f"{where}: expected at most {MOST_CHARACTERS:,} characters in a line"
            raise ValueError(f"{what}, got more; e.g. one line per step")
        match = only_match(list(steps.pattern.finditer(line)), steps, where)
        if match:
            group = only_group(match, where)
            start, end = match.span(group)
            found.append(Match(where, line, start, end, group, integers_in(line, start, end)))
        else:
            refuse_loss(line, steps, where)
            with_digits = line if not found and HAS_DIGIT.search(line) else with_digits
    if not found:
        what = f"{path}: expected lines with {shown(steps.text)}, got none in {line_number:,}"
        last = f"; e.g. its last line is {shown(with_digits.strip())}" if with_digits else ""
        raise NoMatchError(what + last)
    return found


def integers_in(line: str, start: int, end: int) -> Sequence[int]:
    """The integers near a match that may count steps."""
    near = f"{line[max(0, start - 300) : start]} {line[end : end + 100]}"
    return [*map(int, INTEGER.findall(NO_COUNTER.sub(" ", near)))]


def only_match(matches: Sequence[re.Match[str]], steps: Steps, where: str) -> re.Match[str] | None:
    """The match in a line. Of several, the only one that begins a word: `time: 1, data_time: 2`."""
    if len(matches) > 1:
        begins = [one for one in matches if not one.string[: one.start()][-1:].isalnum()]
        begins = [one for one in begins if one.string[: one.start()][-1:] != "_"]
        if len(begins) != 1:
            what = f"{where}: expected one match of --step in a line, got {len(matches):,}"
            got = f"{shown(matches[0][0])} and {shown(matches[1][0])}"
            raise ValueError(f"{what}, e.g. {got}{pattern_that_matches_once(matches[0], steps)}")
        return begins[0]
    return matches[0] if matches else None


def pattern_that_matches_once(match: re.Match[str], steps: Steps) -> str:
    """`; e.g. --step 'forward time: ...'`: the pattern after the words before its first match."""
    line, start = match.string, match.start()
    before = re.search(r"[^\W\d]+\W{1,3}$", line[max(0, start - WINDOW) : start])
    if before:
        inner = f"(?:{steps.text})" if "|" in steps.text else steps.text
        longer = re.escape(before[0]).replace(r"\ ", " ") + inner
        if len(re.findall(longer, line)) == 1:
            return f"; e.g. --step '{longer}'"
    return "; begin it with the word before the number"


def only_group(match: re.Match[str], where: str) -> int:
    """The only group that matched. Raises ValueError if there is not exactly one."""
    taken = [group for group in range(1, match.re.groups + 1) if match[group] is not None]
    if len(taken) != 1:
        what = f"{where}: expected one group of --step to match, got {len(taken)}"
        raise ValueError(f"{what} in {clean(match[0])!r}; e.g. (?:...) for the other groups")
    return taken[0]


def refuse_loss(line: str, steps: Steps, where: str) -> None:
    """Raise ValueError if a line has no match only because of a separator of thousands."""
    plain = joined(line) if len(line) < 1000 else line
    if plain == line or not (match := steps.pattern.search(plain)):
        return
    got = match[only_group(match, where)]
    if got not in line and form_of(got):
        what = f"{where}: expected no separator of thousands where --step has its number"
        raise ValueError(f"{what}, got {shown(line.strip())}; e.g. ([\\d.,' ]+)")


# -- fields of JSON --------------------------------------------------------------------------------


class Literal(str):
    """A number of a JSON document as it was written."""


def objects_in(text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a document that is one list or has a list of objects (trainer_state.json), or
    those in the lines of a text, each with its number."""
    decoder = json.JSONDecoder(parse_float=Literal, parse_int=Literal)
    try:
        document = decoder.decode(text)
    except (ValueError, RecursionError):
        for line_number, line in enumerate(NEW_LINE.split(text), 1):
            begin = line.find("{")
            try:
                one = decoder.raw_decode(line, begin)[0] if begin >= 0 else None
            except (ValueError, RecursionError):
                continue
            if isinstance(one, dict):
                yield line_number, one
        return
    lists = [document] if isinstance(document, list) else []
    if isinstance(document, dict):
        lists = [value for value in document.values() if isinstance(value, list)]
        yield 1, document
    entries = [entry for rows in lists for entry in rows if isinstance(entry, dict)]
    yield from enumerate(entries, 1)


def fields_in(text: str, steps: Steps, path: str) -> Iterator[Match]:
    """The values of the field that --step names, as matches. Objects without it, and null, are
    ignored."""
    for position, entry in objects_in(text):
        value = field_of(entry, steps.text)
        if value is None:
            continue
        where = f"{path}, line {position}"
        if not isinstance(value, str):
            got = f"got a {type(value).__name__}"
            raise ValueError(f"{where}: expected a number in {shown(steps.text)}, {got}")
        integers = [int(one) for one in entry.values() if str(one).isdecimal() and len(one) < 13]
        refuse_other_unit(entry, steps, where)
        yield Match(where, value, 0, len(value), 1, integers)


def refuse_other_unit(entry: dict[str, Any], steps: Steps, where: str) -> None:
    """Raise ValueError if a field such as `unit` beside the number names another unit."""
    (unit,) = steps.units
    for name, value in entry.items():
        named = isinstance(value, str) and IS_UNIT.fullmatch(name) and unit_named(value)
        if named and unit and differs(named, unit):
            what = f"{where}: expected numbers in {unit.name}, got {shown(f'{name}: {value}')}"
            raise ValueError(f"{what}; e.g. --unit {RATE if named.is_rate else named.name}")


def field_of(entry: dict[str, Any], name: str) -> Any:
    """The value of a field; `a.b` is field b of object a."""
    if name in entry:
        return entry[name]
    head, _, rest = name.partition(".")
    inner = entry.get(head)
    return field_of(inner, rest) if rest and isinstance(inner, dict) else None


def why_no_field(text: str, name: str, path: str) -> str:
    names = dict.fromkeys(key for _, entry in objects_in(text) for key in entry)
    if not names:
        what = f"{path}: expected JSON with a field {shown(name)}, or a pattern with a group"
        return f"{what}, as --step; {EXAMPLE}"
    known = clean(", ".join(names), 300)
    return f"{path}: expected a field {shown(name)}{suggest(name, names)}; its fields are {known}"


# -- numbers ---------------------------------------------------------------------------------------


def times_of(matches: Sequence[Match], steps: Steps, path: str, mark: str = "") -> Found:
    """The times in a log. Raises ValueError with a message of one line if a match is not a number
    above 0.

    mark: the decimal mark if the log does not show it; "" to refuse such a log.
    """
    starts = restarts([match.integers for match in matches])
    kept = after_skip(len(matches), starts, steps.skip)
    if not kept:
        noun = "match" if len(matches) == 1 else "matches"
        what = f"{path} has {len(matches)} {noun} of --step, and --skip {steps.skip} leaves none"
        raise ValueError(f"{what}; e.g. --skip {len(matches) // 2 // (1 + len(starts))}")
    matches = [matches[i] for i in kept]
    starts = [n for n, i in enumerate(kept) if n and any(kept[n - 1] < s <= i for s in starts)]
    texts = [taken_from(match, steps) for match in matches]
    refuse_columns(matches, steps)
    mark = mark_of(matches, texts, steps, path, mark)
    times_s: list[float] = []
    counts: dict[str, Match] = {}  # the first match of each
    numbers: dict[tuple[bool, float], list[float]] = defaultdict(list)  # by unit
    last_digits: dict[tuple[bool, float], list[float]] = defaultdict(list)
    for match, text in zip(matches, texts, strict=True):
        value, last_digit = read_number(text, mark)
        if not (is_number(value) and value > 0):
            what = f"{match.where}: expected a number above 0, got {shown(text)}"
            raise ValueError(f"{what}; {EXAMPLE}")
        unit = unit_of_match(match, steps)
        counts.setdefault(counted_by(unit), match)
        times_s.append(1 / (value * unit.factor) if unit.is_rate else value * unit.factor)
        numbers[unit.is_rate, unit.factor].append(value)
        last_digits[unit.is_rate, unit.factor].append(last_digit)
    check_times(times_s, path, steps.measure)
    refuse_clock(times_s, texts, path, steps)
    shares = [share_of_last_digit(numbers[unit], last_digits[unit]) for unit in numbers]
    slow = set(slow_start(times_s, starts))
    leading = len([i for i in slow if i < (starts or [len(times_s)])[0]])
    steady = [time_s for i, time_s in enumerate(times_s) if i not in slow]
    of = one_of(counts, steps)
    later = len(slow) - leading
    return Found(steady, max(shares), leading, later, mark, span_of(matches), of)


def refuse_clock(times_s: Sequence[float], texts: Sequence[str], path: str, steps: Steps) -> None:
    """Raise ValueError if the times are those of a clock."""
    if not any(unit and unit.is_rate for unit in steps.units) and only_grow(times_s):
        got = cut([*dict.fromkeys(texts)], 3)
        what = f"{path}: expected the time of each step, got numbers that grow from step to step"
        raise ValueError(f"{what}, like the time since the start: {got}; {EXAMPLE}")


def share_of_last_digit(numbers: Sequence[float], last_digits: Sequence[float]) -> float:
    """One unit in the last digit / the median.

    0.4 may stand for 0.40: the number with the most digits shows the resolution. But 0.099 beside
    0.1 and 0.11 has no more significant digits: numbers of the median's power of ten count.
    """
    middle = float(np.median(numbers))
    powers = np.floor(np.log10([middle, *numbers]))
    alike = [
        unit for unit, power in zip(last_digits, powers[1:], strict=True) if power == powers[0]
    ]
    return min(alike or last_digits) / middle


def one_of(counts: dict[str, Match], steps: Steps) -> str:
    """What the numbers of a log count. Raises ValueError if they count several things."""
    if len(counts) > 1:
        counts.pop("", None)
    (of, first), *others = counts.items()
    if others:
        other, match = others[0]
        what = f"{match.where}: expected numbers per {of}, as in {first.where.rsplit(', ', 1)[-1]}"
        raise ValueError(
            f"{what}, got a number per {other}; e.g. a longer pattern than {shown(steps.text)}"
        )
    return of


def span_of(matches: Sequence[Match]) -> tuple[str, str] | None:
    """The first and the last date and time of the lines with matches; None without them."""
    ends = [DATE.search(match.line) for match in (matches[0], matches[-1])]
    first, last = ends
    return (first[0], last[0]) if first and last else None


def taken_from(match: Match, steps: Steps) -> str:
    """The text of a number. Raises ValueError if it is only a part of a number: `6` of `6,123`,
    `1.2` of `1.2e-05`."""
    taken = match.line[match.start : match.end].strip().rstrip(".,;:")  # punctuation
    start = match.start + match.line[match.start : match.end].find(taken)
    before, _, after = around(match, steps)
    whole = rest_of(match.line, start, start + len(taken), before, after)
    if whole:
        refuse_part(match, taken, whole)
    return taken


def around(match: Match, steps: Steps) -> tuple[str, str, str]:
    """The text of the pattern before, in and after the group of a match; empty for a field."""
    return ("", "", "") if steps.is_field else steps.around[match.group - 1]


def refuse_part(match: Match, got: str, whole: str) -> None:
    what = f"{match.where}: expected a group around the whole number {shown(whole)}"
    hint = r"e.g. ([\d.,e+-]+)" if form_of(whole) else "numbers such as 1234.5 and 1.2e3 are read"
    raise ValueError(f"{what}, got {shown(got)}; {hint}")


def refuse_columns(matches: Sequence[Match], steps: Steps) -> None:
    """Raise ValueError if a number follows a space that may separate its thousands."""
    neighbors: list[Neighbor | None] = []
    for match in matches:
        before, _, after = around(match, steps)
        neighbors.append(neighbor_of(match.line, match.start, match.end, before, after))
    at = suspect(neighbors)
    one = neighbors[at] if at is not None else None
    if at is None or one is None:
        return
    match = matches[at]
    taken = match.line[match.start : match.end]
    is_before = match.line[: match.start].endswith(f"{one.number} ")
    whole = (
        f"{one.number} {taken}" if is_before else f"{taken} {match.line[match.end :].split()[0]}"
    )
    what = f"{match.where}: {shown(whole)} may be one number or two, got {shown(taken)}"
    raise ValueError(rf"{what}; e.g. ([\d. ]+) for one, \d+ ([\d.]+) for two")


def mark_of(
    matches: Sequence[Match], texts: Sequence[str], steps: Steps, path: str, default: str
) -> str:
    """The decimal mark of a log."""
    if steps.is_field and not any("," in text for text in texts):
        return "."  # JSON
    try:
        mark = decimal_mark(texts, (match.line for match in matches))
    except ValueError as error:
        what = f"{path}: expected numbers of one form, got {error}"
        commas = [text for text in texts if "," in text]
        points = [text for text in texts if "," not in text and "." in text]
        both = f"{shown(commas[0])} and {shown((points or commas[1:])[0])}"
        raise ValueError(f"{what}, {both}; e.g. one log per program") from None
    if mark:
        return mark
    sign, other = (",", ".") if any("," in text for text in texts) else (".", ",")
    literal = sign if sign == "," else r"\."  # in a pattern
    inside = {around(match, steps)[1] for match in matches}
    if all(rf"{literal}\d{{3}}" in text for text in inside):
        return other
    if all(re.search(rf"{re.escape(literal)}\\d(?!\{{)", text) for text in inside):
        return sign
    if default:
        return default
    text = next(text for text in texts if form_of(text) == ("comma" if sign == "," else "point"))
    readings = f"{text.replace(sign, '')} or {text.replace(',', '.')}"
    what = f"{path}: {shown(text)} may be {readings}"
    hint = rf"(\d+{literal}\d+) for a decimal mark, (\d+(?:{literal}\d{{3}})*) for thousands"
    raise UndecidedError(f"{what}, and no number of the log shows which; e.g. {hint}")


def unit_of_match(match: Match, steps: Steps) -> Unit:
    """The unit of a number. Raises ValueError if the line states another one: `1.2 s` if the unit
    is ms."""
    unit = steps.units[match.group - 1]
    assert unit
    if several := PER_SEVERAL.match(match.line, match.end):
        got = clean(match.line[match.start : several.end()])
        what = f"{match.where}: expected the time or rate of one step, got {shown(got)}"
        raise ValueError(f"{what}; compare logs with one step per number")
    stated = unit_near(match.line, match.start, match.end, unit)
    if not stated:
        words = words_near(match.line, match.start, match.end)
        return unit._replace(of=words) if words else unit
    if differs(stated, unit):
        if stated.is_guess:
            return unit
        is_after = unit_after(match.line, match.end)
        first = match.start if is_after else max(0, match.start - WINDOW // 2)
        got = clean(match.line[first : match.end + 8].strip())
        what = f"{match.where}: expected numbers in {unit.name}, got {shown(got)}"
        raise ValueError(rf"{what}; e.g. --step '(?P<ms>[\d.]+) ?ms|(?P<s>[\d.]+) ?s'")
    return stated if stated.of or stated.factor != unit.factor else unit


def differs(a: Unit, b: Unit) -> bool:
    """Whether one is a time and the other a rate, or a time in another unit. Rates of any factor
    are converted."""
    return (a.is_rate, a.is_rate or a.name) != (b.is_rate, b.is_rate or b.name)


# -- runs and reports ------------------------------------------------------------------------------


def case_of(found: Found, steps: Steps) -> Case:
    """A log as a case of a report."""
    key = {"step": steps.text, "counts": found.counts or "not stated"}
    name = steps.measure
    case = Case(key=key, name=name, ranks=[0], samples_s={steps.measure: [found.times_s]})
    metric = "step_s" if name == STEP else "median_time_s"
    case.metrics = {metric: median(found.times_s), LAST_DIGIT: found.last_digit}
    case.metrics[MEAN] = Estimate(float(np.mean(found.times_s)))
    if found.leading:
        case.metrics[LEADING] = found.leading
    if found.later:
        case.metrics[LATER] = found.later
    case.stop = "log"
    return case


def load_logs(words: Sequence[str], steps: Steps, ignore: Sequence[str] = ()) -> list[Run]:
    """One run per log that the paths, folders and patterns name, in this order. Logs of a folder
    without a match are left out. ignore: fields to remove from the keys.

    Raises ValueError with a message of one line.
    """
    find(words, steps.endings)  # raises if a file is named twice, before large files are read
    runs: list[Run] = []
    for word in words:
        runs += logs_of(word, find([word], steps.endings), steps)
    counts = sorted({len(row.times_s) for run in runs for row in run.rows.values()})
    noun = "match" if counts[-1:] == [1] else "matches"
    many = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
    remove_fields(runs, ignore)
    if not steps.unit and any(unit and unit.is_guess for unit in steps.units):
        what = f"{shown(steps.text)} was read as a time because of its name"
        runs[0].remarks.append(f"{what}; if it is a rate, --unit 1/s turns the verdict around")
    for run in runs:
        for row in run.rows.values():
            row.time_is = f"median of {many} {noun} of --step"
            row.label = row.name
    return runs


def logs_of(word: str, paths: Sequence[str], steps: Steps) -> list[Run]:
    """The logs that a path, a folder or a pattern names. One that does not show its decimal mark
    has that of the others if it is a comma."""
    found: dict[str, Found] = {}
    undecided: dict[str, UndecidedError] = {}
    empty: dict[str, NoMatchError] = {}
    matches: dict[str, list[Match]] = {}
    digests: dict[str, str] = {}
    for path in paths:
        try:
            matches[path], digests[path] = read(path, steps)
            found[path] = times_of(matches[path], steps, path)
            del matches[path]
        except UndecidedError as error:
            undecided[path] = error
        except NoMatchError as error:
            empty[path] = error
    if undecided and {one.mark for one in found.values()} != {","}:
        raise next(iter(undecided.values()))
    for path in undecided:
        found[path] = times_of(matches[path], steps, path, ",")
    if empty and (word in empty or not found):
        raise next(iter(empty.values()))
    runs = [run_of(path, digests[path], found[path], steps) for path in paths if path in found]
    if empty:
        noun = "file" if len(empty) == 1 else "files"
        what = f"{len(empty)} {noun} without a match of --step"
        runs[0].remarks.append(f"left out: {what}: {cut([*empty], 4)}")
    return runs


def read(path: str, steps: Steps) -> tuple[list[Match], str]:
    """The matches in a file, and a hash of its bytes."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:

            def hashed(size: int) -> bytes:
                data = file.read(size)
                digest.update(data)
                return data

            return matches_in(hashed, steps, path), digest.hexdigest()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None


def run_of(path: str, digest: str, found: Found, steps: Steps) -> Run:
    run = Run(BENCHMARK, {}, path, argv=[], started_at="", status="complete", label=path)
    run.digest = digest
    run.loads = loads_from_file(path)
    run.span = found.span
    index(run, [timed(case_of(found, steps), None)], "")
    return run


def write_report(
    path: str, log: str, steps: Steps, argv: Sequence[str], started_at: str | None
) -> None:
    """Write a report from the log of a command.

    Raises ValueError with a message of one line if the log has no step times, and OSError if the
    disk is full.
    """
    with open(log, "rb") as file:
        case = case_of(times_of(matches_in(file.read, steps, log), steps, log), steps)
    report = Report(BENCHMARK, {}, path, argv=list(argv))
    report.started_at = started_at or report.started_at
    report.start()
    try:
        report.add(case)
        report.finish("complete")
    finally:
        for opened in report.files:
            opened.close()
