"""Read a number from the text around it, with its unit and its resolution, or refuse it.

The text may use either decimal mark and any separator of thousands. What a single number does not
show (`1,234`) is decided by the other numbers of its log, and is refused if they do not show it
either.
"""

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from analysis.show import clean

SEPARATORS = " '\u2019\u00a0\u2007\u2009\u202f_"  # of thousands, besides comma and point
WINDOW = 40  # characters before and after a number that are searched for the rest of it
GROUPED = re.compile(rf"[1-9]\d{{0,2}}([{SEPARATORS}])\d{{3}}(?:\1\d{{3}})*(?=[.,]|$)")
# Forms of a number without sign, exponent and the separators above; `comma` and `point` may be
# either a decimal mark or a separator of thousands
FORMS = re.compile(
    r"(?P<whole>\d+)|(?P<point>[1-9]\d{0,2}\.\d{3})|(?P<comma>[1-9]\d{0,2},\d{3})|"
    r"(?P<decimal_point>\d*\.\d+|\d+\.|\d{1,3}(?:,\d{3})+\.\d*|[1-9]\d{0,2}(?:,\d{3}){2,})|"
    r"(?P<decimal_comma>\d*,\d+|\d{1,3}(?:\.\d{3})+,\d*|[1-9]\d{0,2}(?:\.\d{3}){2,})"
)
EXPONENT = re.compile(r"[eE]([+-]?\d+)$")
MARKS = {"decimal_point": ".", "decimal_comma": ","}
# The rest of a number directly after a group that ends within it, and its beginning before a group
# that begins within it. After a space, only the other lines show whether it is a column.
REST = re.compile(
    rf"\d+|\.\d+|[eE][+-]?\d+|,\d+|[{SEPARATORS[1:]}]\d{{3}}(?!\d)|:[0-5]\d(?!\d)|"
    r"[dhm] ?\d+|%"  # 1m02s, 95%
)
LONG = "d|h|m|days?|hrs?|hours?|mins?|minutes?"  # units of time above a second
# 1m 02s, 1 min 2 s, 5-6, 5.1 +- 0.2: the second number is no time
SECOND = re.compile(rf"(?:\d ?(?:{LONG})[., ]{{0,2}}(?:and )?|\d[-\u2013]|\d ?(?:\u00b1|\+/?-) ?)$")
MINUTES = re.compile(r"[mh](?![\w/])")
CLOCK = re.compile(r"\d+:[0-5]?\d:$")  # hours and minutes before seconds
BEGINNING = re.compile(rf"(?:\d[\d.,]*[.,]|\d+|\d[{SEPARATORS[1:]}]|\d:)$")
NUMBER_BEFORE = re.compile(r"(?<![\w.,:/-])(\d+) $")
NUMBER_AFTER = re.compile(r" (\d+)(?![\w:/-])")
THREE_DIGITS = re.compile(r"\d{3}(?!\d)")
# a decimal number that is not part of a version, a date or a list
WITH_POINT = re.compile(r"(?<![\w.,:/-])\d+\.\d+(?![\w:/-]|[.,]\d)")
NO_THOUSANDS = re.compile(r"0\.\d+|\d+\.(?!\d{3}$)\d+|\d{4,}\.\d+")


class Unit(NamedTuple):
    """`ms`, or `k` times 1/s. of: what a rate counts, or what a time is spent for."""

    name: str
    is_rate: bool
    factor: float  # of seconds, or of 1/s
    of: str = ""


SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
LENGTHS = {**SECONDS, "min": 60.0, "h": 3600.0, "day": 86400.0}
RATE = "1/s"
UNITS = {name: Unit(name, False, seconds) for name, seconds in SECONDS.items()}
UNITS |= {RATE: Unit(RATE, True, 1.0), "rate": Unit(RATE, True, 1.0)}
SPELLINGS = {
    **{"µs": "us", "μs": "us", "usec": "us", "msec": "ms", "msecs": "ms", "sec": "s", "secs": "s"},
    **{"nanoseconds": "ns", "microseconds": "us", "milliseconds": "ms"},
    **{"second": "s", "seconds": "s", "millisecond": "ms"},
    **{"mins": "min", "minute": "min", "minutes": "min", "days": "day"},
    **{"hr": "h", "hrs": "h", "hour": "h", "hours": "h"},
}
PREFIXES = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9}
COUNTED = re.compile(
    r"([kKMG]?)(it|iters?|iterations?|steps?|batch(?:es)?|tok|toks|tokens?|samples?|img|imgs|"
    r"images?|seqs?|sequences?|examples?|frames?)"
)
STEP_WORDS = re.compile(
    r"|it|iters?|iterations?|steps?|batch(es)?|updates?"
)  # what a step is called
# A unit directly after a number, maybe as its inverse, and not a part of another one: `kg s`, `s*m`
WORD = re.compile(
    r"([A-Za-zµμ]+(?:/[A-Za-z]+)*)(?!\w)(\^?[({]?-1[)}]?(?!\d)|\u207b\u00b9)?"
    r"(?![\^*\u00b7\u22c5\u207b]|-\w)"
)
PER = re.compile(r" ?/ ?(?=[A-Za-z])| per (?=[A-Za-z])")
# Words of the name of a time. A name without them that ends in `s` may be that of a rate: tok_s
OF_TIME = re.compile(
    r"(?i)times?|timing|timer|took|takes|elapsed|dur(?:ation)?|latency|dt|wall|delay"
)
OF_STEP = re.compile(r"(?i)step|iter|iteration|epoch|batch")  # if it is the last word
NAME = re.compile(r"[\w /()\[\]-]*$")
# A unit directly before a group: `(ms): `, `_s=`, `in s `, `it/s: `
BEFORE = re.compile(
    r"(?:(per[ _])|(?<![A-Za-z/.]))([A-Za-zµμ]+(?:/[A-Za-z]+)*)[)\]]?[\"']?\s?[:=]?\s?[\"'(\[]?$"
)
SKIPPED = re.compile(r"\\s[*+?]?|\s[*+?]?")  # white space in a pattern
CLASS = re.compile(r"\[([:=]+)\]")


def counted_by(unit: Unit) -> str:
    """What a rate counts: `step`, `token`; "" if its unit does not say so."""
    of = {"tok": "token", "img": "image", "seq": "sequence"}.get(unit.of.rstrip("s"), unit.of)
    return "step" if of and STEP_WORDS.fullmatch(of) else of.rstrip("s")


def unit_named(word: str) -> Unit | None:
    """The unit that a word states: `ms`, `s/it`, `kit/s`, `TFLOP/s`, `it/min`; None if it is
    none."""
    head, _, rest = word.partition("/")
    name, per = SPELLINGS.get(head, head), rest.partition("/")[0]
    per = SPELLINGS.get(per, per)
    if name in LENGTHS and per not in LENGTHS:
        return Unit(name, False, LENGTHS[name], rest)
    if head.endswith("Hz") and head[:-2] in ("", *PREFIXES):
        return Unit(RATE, True, PREFIXES.get(head[:-2], 1.0))
    if per in LENGTHS and head:
        counted = COUNTED.fullmatch(head)
        prefix, of = (counted[1], counted[2]) if counted else ("", head)
        return Unit(RATE, True, PREFIXES.get(prefix, 1.0) / LENGTHS[per], of)
    return None


def unit_at(text: str) -> Unit | None:
    """The unit with which a text begins; None if it begins with another word."""
    match = WORD.match(text)
    unit = unit_named(match[1]) if match else None
    if match and match[2]:  # s^-1
        return None if not unit or unit.is_rate else Unit(RATE, True, 1 / unit.factor)
    return unit


def unit_after(line: str, end: int) -> Unit | None:
    """The unit that a line states directly after a number, and not before another one."""
    match = re.match(r" ?\[?", line[end : end + WINDOW])
    rest = PER.sub("/", line[end + (match.end() if match else 0) : end + WINDOW])
    if prefix := re.match(r"([kKMG])(?![\w/])", rest):
        return Unit(RATE, True, PREFIXES[prefix[1]])
    if MINUTES.match(line[end : end + WINDOW]):
        return Unit("min", False, 60.0)
    word = WORD.match(rest)
    if not word or re.match(r"\s?[:=(]", rest[word.end() :]):
        return None
    return unit_at(rest)


def unit_in_pattern(before: str, after: str) -> Unit | None:
    """The unit that a pattern states next to a group; None if it states none, or two.

    before, after: the text of the pattern before and after the group.
    """
    found = set()
    plain = PER.sub("/", re.sub(r"\\(\W)", r"\1", SKIPPED.sub(" ", after)))
    plain = plain.removeprefix(" ").removeprefix("[")
    if word := WORD.match(plain):
        follows = plain[word.end() : word.end() + 1]
        if follows not in ("?", "*", "{", "[", ".", "(", "\\"):
            found.add(unit_at(plain))
    plain = CLASS.sub(lambda match: match[1][0], re.sub(r"[\"']\?$", "", before))
    plain = re.sub(r"\\(\W)", r"\1", SKIPPED.sub(" ", plain))[-WINDOW:]
    if stated := BEFORE.search(plain):
        named = unit_named(stated[2])
        if named and stated[1] and not named.is_rate:  # per second
            named = Unit(RATE, True, 1 / named.factor)
        elif named and not named.is_rate and not is_time_named(plain[: stated.start()], named):
            named = None
        found.add(named)
    found.discard(None)
    return found.pop() if len(found) == 1 else None


def is_time_named(text: str, unit: Unit) -> bool:
    """Whether the number after a unit of time is a time: `step_time_s`, not `toks_per_gpu_s`.
    text: before the unit."""
    name = NAME.search(text)
    words = re.findall(r"[A-Za-z]+", name[0] if name else "")
    of_time = [i for i, word in enumerate(words) if OF_TIME.fullmatch(word)]
    of_time += [len(words) - 1] if words and OF_STEP.fullmatch(words[-1]) else []
    per = [i for i, word in enumerate(words) if word.lower() == "per"]
    if per:
        return bool(of_time) and of_time[0] < per[0]
    return bool(of_time) or unit.factor < 1


def groups_in(pattern: str) -> list[tuple[str, str, str]]:
    """For each capturing group of a regular expression: the text before it, in it and after it."""
    spans: list[list[int]] = []
    stack: list[int | None] = []
    i = 0
    while i < len(pattern):
        char = pattern[i]
        if char == "\\":
            i += 1
        elif char == "[":  # a class ends at the first ] that is not its first character
            i = pattern.find("]", i + 2 + (pattern[i + 1 : i + 2] == "^"))
            while pattern[i - 1] == "\\" and pattern[i - 2] != "\\":
                i = pattern.find("]", i + 1)
        elif char == "(":
            captures = pattern[i + 1 : i + 2] != "?" or pattern[i + 1 : i + 4] == "?P<"
            stack.append(len(spans) if captures else None)
            if captures:
                spans.append([i, len(pattern)])
        elif char == ")" and stack and (opened := stack.pop()) is not None:
            spans[opened][1] = i
        i += 1
    return [(pattern[:a], pattern[a + 1 : b], pattern[b + 1 :]) for a, b in spans]


# -- one number ------------------------------------------------------------------------------------


def form_of(text: str) -> str:
    """The name of the form in FORMS; "" for text that is not a number."""
    mantissa = EXPONENT.sub("", text.lstrip("+-"))
    separated = GROUPED.match(mantissa)
    match = FORMS.fullmatch(ungrouped(mantissa))
    if not match or not match.lastgroup:
        return ""
    if separated and match.lastgroup in ("point", "comma"):  # thousands are separated otherwise
        return f"decimal_{match.lastgroup}"
    return match.lastgroup


def ungrouped(mantissa: str) -> str:
    """Without the separators in SEPARATORS."""
    match = GROUPED.match(mantissa)
    return mantissa.replace(match[1], "") if match else mantissa


def decimal_mark(texts: Sequence[str], lines: Iterable[str]) -> str:
    """The decimal mark of a log; "" if its numbers do not show which it is: 1,234, or 1.013 beside
    998, which may be 1013.

    texts: its numbers. lines: the lines that contain them, whose other numbers decide if no number
    does. Raises ValueError if the numbers contradict each other.
    """
    forms = [form_of(text) for text in texts]
    seen = set(forms)
    shown = {MARKS[form] for form in seen if form in MARKS}
    if len(shown) > 1:
        raise ValueError("both decimal points and decimal commas")
    if shown:
        return shown.pop()
    if "comma" not in seen:
        whole = [text for text, form in zip(texts, forms, strict=True) if form == "whole"]
        may_be_thousands = "point" in seen and whole and max(map(len, whole)) < 4
        if may_be_thousands and not any(
            NO_THOUSANDS.fullmatch(one) for line in lines for one in WITH_POINT.findall(line)
        ):
            return ""
        return "."
    if "point" not in seen and any(WITH_POINT.search(line) for line in lines):
        return "."
    return ""


def read_number(text: str, mark: str = ".") -> tuple[float, float]:
    """A number and one unit in its last digit. mark: the decimal mark. (nan, nan) for other text,
    such as a number of seconds above all floats."""
    digits = text.lstrip("+-")
    exponent = EXPONENT.search(digits)
    mantissa = ungrouped(EXPONENT.sub("", digits))
    other = "," if mark == "." else "."
    plain = mantissa.replace(other, "").replace(mark, ".")
    power = int(exponent[1]) if exponent and len(exponent[1]) < 6 else 0
    if not form_of(text) or plain.count(".") > 1 or (exponent and len(exponent[1]) >= 6):
        return math.nan, math.nan
    sign = "-" if text.startswith("-") else ""
    try:
        last_digit = 10.0 ** (power - len(plain.partition(".")[2]))
    except OverflowError:
        return math.nan, math.nan
    return float(f"{sign}{plain}e{power}"), last_digit


# -- its context -----------------------------------------------------------------------------------


class Neighbor(NamedTuple):
    """A number that a space separates from the one in a group."""

    number: int
    may_be_one: bool  # both may be one number with a separator of thousands


def rest_of(line: str, start: int, end: int, before: str, after: str) -> str:
    """The whole number of which line[start:end] is only a part; "" if it is not.

    before, after: the text of the pattern before and after its group. If it contains the character
    that continues the number, the pattern separates the two on purpose.
    """
    taken = line[start:end]
    right = REST.match(line[end : end + WINDOW])
    if taken[-1:].isdigit() and right and not separates(after, right[0][0]):
        is_list = right[0][0] == "," and re.search(r"[.,]\d", taken)  # 1.5,125: two numbers
        if not is_list or re.fullmatch(r"\d{1,3}(,\d{3})+", taken + right[0]):
            return taken + right[0]
    clock = CLOCK.search(line[max(0, start - WINDOW) : start])
    if clock and re.match(r"[0-5]\d(?!\d)", taken):
        return clock[0] + taken
    second = SECOND.search(line[max(0, start - WINDOW) : start])
    if taken[:1].isdigit() and second and not separates(before[::-1], second[0][-1]):
        return second[0] + taken
    left = BEGINNING.search(line[max(0, start - WINDOW) : start])
    if taken[:1].isdigit() and left and not separates(before[::-1], left[0][-1]):
        char, in_threes = left[0][-1], bool(THREE_DIGITS.match(taken))
        if char == ",":  # 1.5,2.5: two numbers
            is_part = in_threes or "." not in left[0] + taken
        elif char == ":" or (char in "'\u2019" and not in_threes):  # 1'02: minutes
            is_part = bool(re.match(r"[0-5]\d(?!\d)", taken))
        else:
            is_part = in_threes or char not in SEPARATORS
        if is_part:
            return left[0] + taken
    return ""


def separates(text: str, char: str) -> bool:
    """Whether the text of a pattern begins with this character literally, and it is not a digit.
    The text before a group is passed reversed."""
    literal = ("\\.", ".\\") if char == "." else (char, f"\\{char}")
    return not char.isdigit() and text.startswith(literal)


def neighbor_of(line: str, start: int, end: int, before: str, after: str) -> Neighbor | None:
    """The number next to the one in a group, on either side; None if there is none, or if the
    pattern names it."""
    taken = line[start:end]
    if not re.search(r"(?:\\d|\]|\d)[+*?]*(?:\{[^}]*\})?(?: |\\s)[+*]?$", before):
        match = NUMBER_BEFORE.search(line[max(0, start - WINDOW) : start])
        if match:
            fits = len(match[1]) <= 3 and match[1][0] != "0" and bool(THREE_DIGITS.match(taken))
            return Neighbor(int(match[1]), fits)
    if not re.match(r"(?: |\\s)[+*]?(?:\(|\\d|\[|\d)", after):
        match = NUMBER_AFTER.match(line[end : end + WINDOW])
        if match:
            fits = bool(re.fullmatch(r"[1-9]\d{0,2}", taken)) and len(match[1]) == 3
            return Neighbor(int(match[1]), fits)
    return None


def suspect(neighbors: list[Neighbor | None]) -> int | None:
    """The position of a match that may be a part of a number such as `1 013.0`; None if the numbers
    next to the matches are a column of their own: every match has one, and they count up, or with
    some of them both cannot be one number."""
    doubtful = next((i for i, one in enumerate(neighbors) if one and one.may_be_one), None)
    if doubtful is None:
        return None
    numbers = [one.number for one in neighbors if one]
    if len(numbers) < len(neighbors):
        return doubtful
    if any(one and not one.may_be_one for one in neighbors):
        return None
    counts_up = len(numbers) > 2 and all(a < b for a, b in itertools.pairwise(numbers))
    return None if counts_up else doubtful


def joined(line: str) -> str:
    """The line without separators of thousands within its numbers."""
    return re.sub(rf"(?<=\d)[{SEPARATORS},](?=\d{{3}}(?!\d))", "", line)


def shown(text: str) -> str:
    return f"'{clean(text)}'"
