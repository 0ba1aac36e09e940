"""Formatting of cases, metrics and times, and errors of one line, for all scripts of analysis/."""

import io
import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeGuard

import tabulate

from common.stats import significant
from harness.cli import cut, show_size
from harness.exits import abandon, refuse

SIZES = {  # of units: by the unit that metrics have, those in which they are shown
    "s": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9},
    "GB/s": {"GB/s": 1.0, "MB/s": 1e-3, "kB/s": 1e-6},
    "MB/s": {"GB/s": 1e3, "MB/s": 1.0, "kB/s": 1e-3},
    "1/s": {"G": 1e9, "M": 1e6, "": 1.0},
}
DAMAGE = (TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
# suffix of a metric's name -> its unit; the first match counts
UNITS_BY_END = {
    "_gb_per_s": "GB/s",
    "_mb_per_s": "MB/s",
    "_per_s": "1/s",
    "_s": "s",
    "_gib": "GiB",
    "_bytes": "bytes",
}


def canonical(key: dict[str, Any]) -> str:
    """The key as text. Equal keys have equal texts."""
    return json.dumps(key, sort_keys=True)


def is_number(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and math.isfinite(value)


def join_distinct(texts: Iterable[str]) -> str:
    """`resnet18, resnet50`: the distinct texts, in order of appearance."""
    return ", ".join(dict.fromkeys(texts))


def clean(text: Any, limit: int = 200) -> str:
    """The text on one line, without control characters: a report may contain anything, and a
    terminal must not interpret it."""
    words = "".join(c if c.isprintable() else " " for c in str(text))
    return words if len(words) <= limit else words[: limit - 3] + "..."


def show_table(header: Sequence[Any], rows: Iterable[Sequence[Any]], right: Sequence[int]) -> str:
    """A table for a terminal. right: the columns that are aligned to the right."""
    tabulate.MIN_PADDING = 0  # by default, headers are padded by two blanks
    heads = [clean(cell) for cell in header]
    cells = [list(map(clean, row)) for row in rows]
    align = ["right" if column in right else "left" for column in range(len(header))]
    text = tabulate.tabulate(cells, heads, "simple", colalign=align, disable_numparse=True)
    return "\n".join(line.rstrip() for line in text.splitlines())


def put(text: str) -> None:
    """Print a result. If stdout is closed or full, print one line and exit with status 1."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for terminals that are limited to ASCII
    try:
        print(text, flush=True)
    except OSError as error:
        abandon(sys.stdout)
        refuse(f"stdout: {error.strerror}", status=1)


class Unit(NamedTuple):
    ending: str  # suffix of the metric's name
    name: str


def unit_of(metric: str) -> Unit:
    """The unit given by the suffix of a metric's name; empty if it has none."""
    for ending, name in UNITS_BY_END.items():
        if f"_{metric}".endswith(ending):
            return Unit(ending, name)
    return Unit("", "")


def scaled_unit(unit: str, values: Iterable[float]) -> tuple[str, float]:
    """A unit that suits the largest value, and the factor that converts values to it."""
    sizes = SIZES.get(unit, {unit: 1.0})
    largest = max(map(abs, values), default=1)
    for name, size in sizes.items():
        if largest >= 0.99995 * size:
            return name, 1 / size
    return name, 1 / size


def show_time(seconds: float) -> str:
    """Format a time with four significant digits: `193.0 ms`."""
    unit, factor = scaled_unit("s", [seconds])
    return f"{significant(seconds * factor)} {unit}"


def show_value(name: str, value: Any) -> str:
    """Format an entry of a key: `dtype fp32`, `bucket size 25 MiB`, `ddp: no`."""
    words = name.replace("_", " ")
    if value is None or isinstance(value, bool):
        return f"{words}: {'none' if value is None else 'yes' if value else 'no'}"
    if is_number(value) and name.endswith("_bytes"):
        return f"{words.removesuffix(' bytes')} {show_size(value)}"
    in_mib = name.endswith("_mb")  # as in DDP's bucket_cap_mb
    words = words.removesuffix(" mb")
    if is_number(value):
        return f"{words} {value:.10g}{' MiB' if in_mib else ''}"
    return f"{words} {value}"


@contextmanager
def one_line(paths: Sequence[str]) -> Iterator[None]:
    """Exit with status 2 and a message of one line after a user's mistake, or after any error that
    a damaged report causes. paths: the reports."""
    try:
        yield
    except (ValueError, OSError) as error:
        refuse(clean(error, 1000))
    except MemoryError:
        refuse(f"{clean(cut(paths), 500)}: not enough memory; give smaller files")
    except DAMAGE as error:
        what = f"{type(error).__name__}: {clean(error)}"
        refuse(f"{clean(cut(paths), 500)}: an entry does not have the expected form ({what})")
