"""How cases, metrics and times are named and printed, alike in all of analysis/."""

import io
import json
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeGuard

import tabulate

from common.cli import abandon, refuse, show_size

UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
# what the name of a metric ends in -> its unit; the first end that fits counts
UNITS_BY_END = {
    "_gb_per_s": "GB/s",
    "_mb_per_s": "MB/s",
    "_per_s": "1/s",
    "_s": "s",
    "_gib": "GiB",
    "_bytes": "bytes",
}


def canonical(key: dict[str, Any]) -> str:
    """The key as text, equal for equal keys."""
    return json.dumps(key, sort_keys=True)


def is_number(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and math.isfinite(value)


def list_once(texts: Iterable[str]) -> str:
    """`resnet18, resnet50`: each text once, in the order in which they come."""
    return ", ".join(dict.fromkeys(texts))


def clean(text: Any, limit: int = 200) -> str:
    """Printable text on one line. A report may hold anything, and a terminal should not see it."""
    letters = [c if c.isprintable() else " " for c in str(text)]
    words = "".join(letters)
    if len(words) > limit:
        return words[: limit - 3] + "..."
    return words


def markdown(text: Any, limit: int = 200) -> str:
    """Text, whatever it holds, as a part of a Markdown document."""
    words = re.sub(r"([\\`*_\[\]|#~])", r"\\\1", clean(text, limit))
    return words.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def show_table(
    header: Sequence[Any], rows: Iterable[Sequence[Any]], right: Sequence[int], style: str
) -> str:
    """A table for a terminal, or in Markdown. right: columns of numbers, aligned to the right."""
    tabulate.MIN_PADDING = 0  # or each header gets two blanks
    is_markdown = style == "markdown"
    form = "pipe" if is_markdown else "simple"
    escape = markdown if is_markdown else clean
    heads = [escape(cell) for cell in header]
    cells = []
    for row in rows:
        cells.append([escape(cell) for cell in row])
    align = ["right" if column in right else "left" for column in range(len(header))]
    text = tabulate.tabulate(cells, heads, form, colalign=align, disable_numparse=True)
    lines = [line.rstrip() for line in text.splitlines()]
    return "\n".join(lines)


def put(text: str) -> None:
    """Print a result. Where stdout is gone or full, say so in one line and end with status 1."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # what a terminal of ASCII cannot show
    try:
        print(text, flush=True)
    except OSError as error:
        abandon(sys.stdout)
        refuse(f"stdout: {error.strerror}", status=1)


def check_output(
    path: str, endings: tuple[str, ...], inputs: Iterable[str], mark: bytes = b""
) -> None:
    """Raises ValueError or OSError where a page or a figure cannot be written there.

    mark: what the begin of a file must hold to be replaced, if it is not empty.
    """
    if not path.lower().endswith(endings):
        raise ValueError(f"expected a file that ends in {' or '.join(endings)}, got {path!r}")
    is_new = not os.path.exists(path)
    reports = [report for report in inputs if os.path.exists(report)]
    if not is_new and any(os.path.samefile(report, path) for report in reports):
        raise ValueError(f"{path} is one of the reports, which it would overwrite")
    target = os.path.realpath(path)
    if not is_new and not os.path.isfile(target):
        raise ValueError(f"{path} is no regular file")
    if not is_new:
        with open(target, "rb") as file:
            head = file.read(1024)
        if head and mark not in head:
            raise ValueError(f"{path} is no page of report.py, which could be replaced")
    with open(target, "ab"):  # raises OSError where it cannot be written
        pass
    if is_new:
        os.remove(target)


class Unit(NamedTuple):
    ending: str  # of the names of its metrics
    name: str


def unit_of(metric: str) -> Unit:
    """The unit that the end of a metric's name tells; empty where it tells none."""
    for ending, name in UNITS_BY_END.items():
        if metric.endswith(ending):
            return Unit(ending, name)
    return Unit("", "")


def time_unit(seconds: float) -> str:
    """The unit in which four digits show a time best."""
    for unit, size in UNITS.items():
        if abs(seconds) >= 0.99995 * size:
            return unit
    return "ns"


def show_time(seconds: float) -> str:
    unit = time_unit(seconds)
    return f"{seconds / UNITS[unit]:.4g} {unit}"


def show_value(name: str, value: Any) -> str:
    """An entry of a key in a few words."""
    words = name.replace("_", " ")
    if isinstance(value, bool) or value is None:
        return words if value else f"no {words}"
    if not is_number(value):
        return str(value)
    if name.endswith("_bytes"):
        return show_size(value)
    return f"{words.removesuffix(' mb')} {value:.10g}{' MB' if name.endswith('_mb') else ''}"


def case_names(keys: Sequence[dict[str, Any]]) -> list[str]:
    """A name for each key: its label, and the entries that tell it apart from others."""
    names = [clean(key.get("label") or "", 60) for key in keys]
    entries: dict[str, None] = {}
    for key in keys:
        entries |= dict.fromkeys(key)
    entries.pop("label", None)
    for entry in entries:
        values = [show_value(entry, key.get(entry)) for key in keys]
        words = [clean(value, 60) for value in values]
        names = tell_apart(names, words)
    return [name or name_of(key) for name, key in zip(names, keys, strict=True)]


def tell_apart(names: Sequence[str], words: Sequence[str]) -> list[str]:
    """The names, each with its word where cases of the same name have different words."""
    different = set(zip(names, words, strict=True))
    words_of_name = Counter(name for name, _ in different)
    longer = []
    for name, word in zip(names, words, strict=True):
        if words_of_name[name] > 1:
            longer.append(f"{name}, {word}" if name else word)
        else:
            longer.append(name)
    return longer


def name_of(key: dict[str, Any]) -> str:
    """The name of a case that nothing tells apart: the first two texts of its key."""
    texts = [clean(value, 60) for value in key.values() if isinstance(value, str)]
    return ", ".join(texts[:2]) or "the case"
