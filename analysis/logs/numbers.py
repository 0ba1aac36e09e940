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
# What joins a number to another digit without a space: `*` of `9.8*10^2`, `D+` of `9.8D+02`; not
# what ends a number in logs, its sign, its error and the letter of a unit
JOINT = (
    r"(?:(?!\+-|\+/)[^\w\s/:;|,.%=\u00b1()\[\]{}<>]|_){1,2}|"
    r"(?![dhkmsGKMT])[A-Za-z][+-]?"
)
# The rest of a number directly after a group that ends within it, and its beginning before a group
# that begins within it. After a space, only the other lines show whether it is a column.
REST = re.compile(
    rf"\d+|\.\d+|,\d+|[{SEPARATORS[1:]}]\d{{3}}(?!\d)|:[0-5]\d(?!\d)|(?:{JOINT})\d+|"
    r"(?:[dhm] ?|m?s|us)\d+|%|"  # 1m02s, 12s500ms, 95%
    r"\W{0,2}[xX]?\W{0,2}10(?:\^|\*\*|[\u00b2\u00b3\u00b9\u2070-\u207f])"  # 9.8 x 10^2
)
LONG = "d|h|m|days?|hrs?|hours?|mins?|minutes?"  # units of time above a second
# 1m 02s, 1 min 2 s, 5-6, 5.1 +- 0.2: the second number is no time
SECOND = re.compile(rf"(?:\d ?(?:{LONG})[., ]{{0,2}}(?:and )?|\d[-\u2013]|\d ?(?:\u00b1|\+/?-) ?)$")
MINUTES = re.compile(r"[mh](?![\w/])")
CLOCK = re.compile(r"\d+:[0-5]?\d:$")  # hours and minutes before seconds
BEGINNING = re.compile(
    rf"(?:\d[\d.,]*[.,]|\d+|\d[{SEPARATORS[1:]}]|\d:|\d(?:{JOINT})|(?<![^\s=:(\[])[-\u2212])$"
)
NUMBER_BEFORE = re.compile(r"(?<![\w.,:/-])(\d+) $")
NUMBER_AFTER = re.compile(r" (\d+)(?![\w:/-])")
THREE_DIGITS = re.compile(r"\d{3}(?!\d)")
# a decimal number that is not part of a version, a date or a list
WITH_POINT = re.compile(r"(?<![\w.,:/-])\d+\.\d+(?![\w:/-]|[.,]\d)")
NO_THOUSANDS = re.compile(r"0\.\d+|\d+\.(?!\d{3}$)\d+|\d{4,}\.\d+")


class Unit(NamedTuple):
    """`ms`, or `k` times 1/s. of: what a rate counts, or what a time is spent for. is_guess: only
    the name of a step says that it is a time: `iter_s`."""

    name: str
    is_rate: bool
    factor: float  # of seconds, or of 1/s
    of: str = ""
    is_guess: bool = False


SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
LENGTHS = {**SECONDS, "min": 60.0, "h": 3600.0, "day": 86400.0}
RATE = "1/s"
UNITS = {name: Unit(name, False, seconds) for name, seconds in SECONDS.items()}
UNITS |= {RATE: Unit(RATE, True, 1.0), "rate": Unit(RATE, True, 1.0)}
PARTS = {"": "s", "m": "ms", "milli": "ms", "n": "ns", "nano": "ns"}
PARTS |= dict.fromkeys(("u", "\u00b5", "\u03bc", "micro"), "us")
SPELLINGS = {
    part + second: name
    for part, name in PARTS.items()
    for second in ("s", "sec", "secs", "second", "seconds")
}
SPELLINGS |= {
    **{"min": "min", "mins": "min", "minute": "min", "minutes": "min", "day": "day", "days": "day"},
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), "h"),
}
PREFIXES = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9}
COUNTED = re.compile(
    r"([kKMG]?)((?i:it|iters?|iterations?|steps?|batch(?:es)?|updates?|epochs?|tok|toks|tokens?|"
    r"samples?|img|imgs|images?|seqs?|sequences?|examples?|frames?|requests?|[TP]?flops?)|1|)"
)
STEP_WORDS = re.compile(
    r"|it|iters?|iterations?|steps?|batch(es)?|updates?"
)  # what a step is called
INITIALS = re.compile(r"(?i)[fiqrst]ps")  # frames, iterations, tokens, ... per second
LETTERS = "A-Za-z\u00b5\u03bc"
PER = "\u00f7"  # stands for `per`, and for the power -1
# A unit directly after a number, and not a part of another one: `kg s`, `s*m`
WORD = re.compile(
    rf"((?:1(?=[/{PER}]))?[{LETTERS}]*+(?:[/{PER}][{LETTERS}]++)*)"
    r"(?!\w|[\^*\u00b7\u22c5\u207b]|-\w)"
)
SLASH = re.compile(rf"\s?/\s?(?=[{LETTERS}])")
PER_WORD = re.compile(r"(?i)[\s_]?(?<![A-Za-z])per[\s_](?=[A-Za-z])")
INVERSE = re.compile(  # s^-1, s-1, it s**-1, it\u00b7s\u207b\u00b9
    rf"(?i)(?:(?<=[a-z])[\s\u00b7*\u22c5])?(?<![{LETTERS}])({'|'.join(SPELLINGS)})"
    r"(?:(?:\s?(?:\^|\*\*)\s?)?[({]*[-\u2212]1[)}]*|\u207b\u00b9)(?!\d)"
)
# Between a number and its unit: white space, brackets, a comma, `"unit": `
GAP = re.compile(r"[\s,()\[\]{}\"'_-]{0,4}(?:\"?units?\"?\s?[:=]\s?\"?)?")
IS_NAME = re.compile(r"[\"')\]]{0,2}\s?(?:\([^)]*\)\s?)?[:=]")  # of the next number
# Words of the name of a time. A name without them that ends in `s` may be that of a rate: tok_s
OF_TIME = re.compile(
    r"(?i)times?|timing|timer|took|takes|elapsed|dur(?:ation)?|latency|dt|wall|delay"
)
OF_STEP = re.compile(r"(?i)step|iter|iteration|epoch|batch")  # if it is the last word
NAME = re.compile(r"[\w /()\[\]-]*$")
# A unit directly before a group: `(ms): `, `_s=`, `in s `, `[1/s] `
BEFORE = re.compile(
    rf"(?<![A-Za-z/.{PER}])((?:1(?=[/{PER}]))?(?:[{LETTERS}]+|(?=[/{PER}]))(?:[/{PER}][{LETTERS}]+)*)"
    r"[)\]}]?[\"']?\s?([:=]?)\s?[\"'(\[]?$"
)
SEVERAL = re.compile(r"(?:[A-Za-z]/|[ _]per[ _])(\d+[ _]?[A-Za-z]+)[)\]]?[\"']?\s?[:=]?\s?$")
JOINED = re.compile(r"[^\W\d_]+(?![\w=:])")  # letters of an unknown unit: Kit
OF_ANOTHER = re.compile(r"\d[\s\[(]*[^\s\d:=_]+[)\]]?\s?[(\[]?$")  # `3.2 it/s (`
SKIPPED = re.compile(r"\\s[*+?]?|\s[*+?]?")  # white space in a pattern
CLASS = re.compile(r"\[([:=]+)\]")


def counted_by(unit: Unit) -> str:
    """What a rate counts or a time is spent for: `step`, `token/gpu`; "" if the unit of a rate does
    not say so."""
    first, _, others = unit.of.lower().partition("/")
    first = {"tok": "token", "img": "image", "seq": "sequence"}.get(first.rstrip("s"), first)
    is_step = STEP_WORDS.fullmatch(first) and (first or not unit.is_rate)
    first = "step" if is_step else first.rstrip("s")
    return f"{first}/{others}" if others else first


def unit_named(word: str, by_name: bool = False) -> Unit | None:
    """The unit that a word states: `ms`, `s/it`, `kit/s`, `it/min`, `/s`; None if it is none.

    by_name: `word/unit` may be a quantity and its unit, as in `latency/ms`, so it is a rate only if
    the word is something that is counted.
    """
    head, *parts = re.split(f"[/{PER}]", word)
    name = SPELLINGS.get(head.lower())
    at = next((i for i, part in enumerate(parts) if part.lower() in SPELLINGS), None)
    if at is None:
        if name:
            return Unit(name, False, LENGTHS[name], "/".join(parts))
        if head.endswith("Hz") and head[:-2] in ("", *PREFIXES):
            return Unit(RATE, True, PREFIXES.get(head[:-2], 1.0))
        return Unit(RATE, True, 1.0, head) if INITIALS.fullmatch(word) and not by_name else None
    counted = COUNTED.fullmatch(head)
    if name or (by_name and not counted and PER not in word):
        return None
    prefix, of = (counted[1], counted[2]) if counted else ("", head)
    of = "/".join(["" if of == "1" else of, *parts[:at], *parts[at + 1 :]])
    length = LENGTHS[SPELLINGS[parts[at].lower()]]
    return Unit(RATE, True, PREFIXES.get(prefix, 1.0) / length, of)


def in_one_word(text: str) -> str:
    """A text in which each division is in one word: `it/s` for `it / s`, `it per s`, `it s^-1`."""
    return SLASH.sub("/", PER_WORD.sub(PER, INVERSE.sub(rf"{PER}\1", text)))


def unit_after(line: str, end: int, default: Unit = UNITS[RATE]) -> Unit | None:
    """The unit that a line states next to the end of a number, and not before another number.
    default: the unit of a number that only a prefix follows: 1.5K."""
    text = line[end : end + WINDOW]
    if MINUTES.match(text):
        return Unit("min", False, 60.0)
    if prefix := re.match(r" ?\[?([kKMG])(?![\w/])", text):  # 1.5K tok/s
        unit = unit_in(text[prefix.end() :]) or default
        return unit._replace(factor=unit.factor * PREFIXES[prefix[1]])
    return unit_in(text)


def unit_in(text: str) -> Unit | None:
    """The unit with which a text after a number begins."""
    gap = GAP.match(text)
    skipped = gap[0] if gap else ""
    rest = in_one_word(text[len(skipped) :])
    word = WORD.match(rest)
    if not word or (skipped and IS_NAME.match(rest, word.end())):
        return None
    if skipped.strip() and re.match(r"\s[-.\d]", rest[word.end() :]):
        return None
    return unit_named(word[1])


def unit_before(text: str) -> Unit | None:
    """The unit with which the text before a number ends: `Time (ms): `, `it/s=`."""
    rate = BEFORE.search(in_one_word(text))
    unit = unit_named(rate[1], by_name=True) if rate else None
    if unit and (unit.is_rate or unit.of):
        return unit
    stated = BEFORE.search(text)
    unit = unit_named(stated[1], by_name=True) if stated else None
    if not stated or not unit or unit.is_rate:
        return None
    return named_time(text[: stated.start()], unit)


def unit_near(line: str, start: int, end: int, default: Unit) -> Unit | None:
    """The unit that a line states next to a number: after it, or in the name before it."""
    text = line[max(0, start - WINDOW) : start]
    return unit_after(line, end, default) or (
        None if OF_ANOTHER.search(text) else unit_before(text)
    )


def words_near(line: str, start: int, end: int) -> str:
    """What else a line says of the unit of a number: `8it` of `s/8it: 5`, `Kit` of `5Kit`."""
    several = SEVERAL.search(line[max(0, start - WINDOW) : start])
    joined_to = JOINED.match(line, end)
    return several[1] if several else joined_to[0] if joined_to else ""


def unit_in_pattern(before: str, after: str) -> Unit | None:
    """The unit that a pattern states next to a group; None if it states none, or two.

    before, after: the text of the pattern before and after the group.
    """
    found = set()
    plain = in_one_word(re.sub(r"\\(\W)", r"\1", SKIPPED.sub(" ", after)))
    plain = plain.removeprefix(" ").removeprefix("[")
    if word := WORD.match(plain):
        follows = plain[word.end() : word.end() + 1]
        if follows not in ("?", "*", "{", "[", ".", "(", "\\"):
            found.add(unit_named(word[1], by_name=True))
    plain = CLASS.sub(lambda match: match[1][0], re.sub(r"[\"']\?$", "", before))
    found.add(unit_before(re.sub(r"\\(\W)", r"\1", SKIPPED.sub(" ", plain))[-WINDOW:]))
    found.discard(None)
    return found.pop() if len(found) == 1 else None


def named_time(text: str, unit: Unit) -> Unit | None:
    """The unit of time at the end of a name if the name is that of a time: `step_time_s`, not
    `toks_per_gpu_s`. text: before the unit."""
    name = NAME.search(text)
    words = re.findall(r"[A-Za-z]+", name[0] if name else "")
    of_time = [i for i, word in enumerate(words) if OF_TIME.fullmatch(word)]
    is_guess = not of_time and unit.factor >= 1
    of_time += [len(words) - 1] if words and OF_STEP.fullmatch(words[-1]) else []
    per = [i for i, word in enumerate(words) if word.lower() == "per"]
    is_time = bool(of_time) and of_time[0] < per[0] if per else bool(of_time) or unit.factor < 1
    return unit._replace(is_guess=is_guess) if is_time else None


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
    if taken[-1:].isdigit() and line[end : end + 1].isnumeric():  # also 2\u00bd, 12\u4e07
        return taken + (right[0] if right else line[end])
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
            is_part = in_threes or char == "_" or char not in SEPARATORS
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
