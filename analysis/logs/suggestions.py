"""Suggest --step for a log: patterns and fields that read its lines without an error."""

import io
import itertools
import re
import shlex
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from analysis.logs.patterns import NEW_LINE, PATTERNS, text_of
from analysis.logs.series import MIN_GROWING, only_grow
from analysis.logs.step_logs import FIELD, matches_in, objects_in, pattern, steps_of, times_of
from analysis.runs.load import NotAReportError

MOST_BYTES = 2**17  # of a log that are searched: each candidate reads all of them
MOST_CHARACTERS = 2000  # of a line
MOST = 3  # suggestions
MOST_FIELDS = 10  # that are tried
# one or two words before a number with a unit
TIMED = re.compile(
    r"(?<![\w/])((?:[A-Za-z_]\w* )?)([A-Za-z_][\w/]*(?:[:=] ?| ))\d+(?:\.\d+)?"
    r"( ?(?:ms|s/it|it/s|s)(?![\w/]))"
)
LINE_END = re.compile(rb"[\r\n]")
RATE_FIELD = re.compile(r"tps|per_s|throughput|/s$")
TIME_FIELD = re.compile(rf"time|sec|_ms|\(s\)|{RATE_FIELD.pattern}")


@contextmanager
def suggested() -> Iterator[None]:
    """Add a suggestion to the error for a file that is not a report."""
    try:
        yield
    except NotAReportError as error:
        raise ValueError(f"{error}{suggestion(error.content)}") from None


def suggestion(content: bytes) -> str:
    """`; its lines are read by --step '...' (Megatron-LM)`: flags that read a log, or several
    to choose from; an example if there are none."""
    text = text_of(part_of(content))
    lines = [line[:MOST_CHARACTERS] for line in NEW_LINE.split(text)]
    short = "\n".join(lines)
    found: dict[tuple[float, ...], str] = {}  # flags that read equal times are suggested once
    for flags, program, log in itertools.chain(
        ((flags, f" ({program})", short) for program, flags in PATTERNS.items()),
        ((flags, "", text) for flags in of_fields(text)),
        ((flags, "", short) for flags in of_words(lines)),
    ):
        if len(found) < MOST and (times_s := times_read(flags, log)):
            found.setdefault(times_s, flags + program)
    if not found:
        return r"; step times of a log are read by --step, e.g. --step 'took ([\d.]+) ms'"
    if len(found) == 1:
        return f"; its lines are read by {found.popitem()[1]}"
    *others, last = found.values()
    which = "use the one that is the time or rate of a whole step, or write another"
    return f"; its lines are read by {', '.join(others)} or {last}; {which}"


def part_of(content: bytes) -> bytes:
    """The first and the last lines of a log, MOST_BYTES in all. Steps may follow a long preamble,
    and a number that is cut may contradict the others."""
    half = MOST_BYTES // 2
    if len(content) <= MOST_BYTES:
        return content
    begin, end = content[:half], content[-half:]
    last = max(begin.rfind(b"\n"), begin.rfind(b"\r"))  # progress bars end lines by a return
    first = LINE_END.search(end)
    return begin[: last + 1 or half] + end[first.end() if first else 0 :]


def times_read(flags: str, text: str) -> tuple[float, ...]:
    """The times that --step reads in a log; none if it would refuse the log, or if they may be
    those of a clock."""
    _, step, *unit = shlex.split(flags)
    try:
        args = Namespace(step=pattern(step), unit=unit[-1] if unit else None, skip=None)
        steps = steps_of(args, {})
        assert steps
        matches = matches_in(io.BytesIO(text.encode()).read, steps, "")
        times_s = times_of(matches, steps, "").times_s
        clocks = (times_s, times_s[::-1])  # of the time since the start, and of that which remains
        return () if any(only_grow(one, MIN_GROWING) for one in clocks) else tuple(times_s)
    except ValueError:
        return ()


def of_fields(text: str) -> Iterator[str]:
    """Flags for the fields of JSON whose names are those of times or rates."""
    entries = itertools.islice(objects_in(text), 100)

    def is_time(name: str) -> bool:
        return bool(FIELD.fullmatch(name) and TIME_FIELD.search(name))

    names = dict.fromkeys(name for _, entry in entries for name in entry if is_time(name))
    for name in [*names][:MOST_FIELDS]:
        yield f"--step '{name}'"
        yield f"--step '{name}' --unit {'1/s' if RATE_FIELD.search(name) else 's'}"


def of_words(lines: Sequence[str]) -> Iterator[str]:
    """Flags for numbers with a unit after the same word in several lines; after two words where
    the line has this one twice."""
    counts: Counter[tuple[str, str]] = Counter()
    for line in lines:
        for more, word, unit in TIMED.findall(line):
            counts[more + word if line.count(word) > 1 else word, unit] += 1
    for (words, unit), count in counts.most_common(10):
        if count > 2:
            yield rf"--step '{words}([\d.]+){unit}'"
