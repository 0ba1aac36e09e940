"""How cases, metrics and times are named, and how text is printed, alike in all of analysis/."""

import json
import math
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from common.cli import refuse, show_size, suggest

UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
# by what the name of a metric ends in
UNITS_OF = {"_gb_per_s": "GB/s", "_gbps": "GB/s", "_mb_per_s": "MB/s", "_per_s": "1/s", "_s": "s"}
UNITS_OF |= {"_gib": "GiB", "_bytes": "bytes", "_rel": "%", "": ""}


def canonical(key: dict[str, Any]) -> str:
    """The key as text, equal for equal keys."""
    return json.dumps(key, sort_keys=True)


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def is_interval(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(map(is_number, value))


def choices(name: str, known: Iterable[str]) -> str:
    """What to say after a name that is not there."""
    known = list(known)
    return suggest(name, known) or f"; there are {', '.join(known) or 'none'}"


# -- text ------------------------------------------------------------------------------------------


def clean(text: Any, limit: int = 200) -> str:
    """Printable text on one line: a report may hold anything, a terminal should not see it."""
    words = "".join(c if c.isprintable() else " " for c in str(text))
    return words if len(words) <= limit else words[: limit - 3] + "..."


def markdown(text: Any, limit: int = 200) -> str:
    """Text as a cell of a Markdown table, whatever it holds."""
    words = re.sub(r"([\\`*_\[\]|#~])", r"\\\1", clean(text, limit))
    return words.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def markdown_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()
) -> str:
    """right: columns of numbers, aligned to the right."""
    marks = ["--:" if i in right else "---" for i in range(len(header))]
    head, *body = [[markdown(cell) for cell in row] for row in (header, *rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, marks, *body))


def emit(text: str) -> None:
    """Print; one line and status 1 where stdout is closed or its disk is full."""
    try:
        print(text.encode("utf-8", "replace").decode(), flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        refuse(f"cannot print: {error.strerror}", status=1)


# -- numbers and names -----------------------------------------------------------------------------


def unit_of(metric: str) -> tuple[str, str]:
    """The end of a metric's name, and the unit that it says."""
    return next((end, unit) for end, unit in UNITS_OF.items() if metric.endswith(end))


def time_unit(seconds: float) -> str:
    """The unit that suits a time of four digits."""
    rounded = abs(float(f"{seconds:.4g}"))
    return next((unit for unit, length in UNITS.items() if rounded >= length), "ns")


def show_time(seconds: float) -> str:
    unit = time_unit(seconds)
    return f"{seconds / UNITS[unit]:.4g} {unit}"


def show_value(name: str, value: Any) -> str:
    """An entry of a key in a few words."""
    words = name.replace("_", " ")
    if isinstance(value, bool) or value is None:
        return words if value else f"no {words}"
    if isinstance(value, str):
        return value
    if name.endswith("_bytes"):
        return show_size(value)
    return f"{words.removesuffix(' mb')} {value:g}{' MB' if name.endswith('_mb') else ''}"


def case_names(keys: Iterable[dict[str, Any]]) -> dict[str, str]:
    """A name for each key, by its canonical form: its label, and the entries that tell it apart."""
    unique = {canonical(key): key for key in keys}
    words = {
        name: [clean(key["label"], 60)] if key.get("label") else [] for name, key in unique.items()
    }
    for entry in dict.fromkeys(entry for key in unique.values() for entry in key):
        values: dict[str, set[str]] = {}  # by what the cases are called so far
        for name, key in unique.items():
            values.setdefault(str(words[name]), set()).add(repr(key.get(entry)))
        for name, key in unique.items():
            if entry != "label" and len(values[str(words[name])]) > 1:
                words[name] = [*words[name], clean(show_value(entry, key.get(entry)), 60)]
    for name, key in unique.items():
        texts = [clean(value, 60) for value in key.values() if isinstance(value, str)]
        words[name] = words[name] or texts[:2] or ["the case"]
    return {name: ", ".join(parts) for name, parts in words.items()}


def flat(metrics: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Numbers, words and intervals of the metrics; those of dicts as `outer.inner`."""
    found: dict[str, Any] = {}
    for name, value in metrics.items():
        if isinstance(value, dict) and len(value) <= 50 and prefix.count(".") < 3:
            found |= flat(value, f"{prefix}{name}.")
        elif is_number(value) or isinstance(value, str) or is_interval(value):
            found[prefix + name] = value
    return found


def interval_of(name: str, metrics: dict[str, Any]) -> tuple[float, float] | None:
    """The 95 % interval of a metric: `step_time_ci95_s` is that of `step_time_p50_s`."""

    def stem(text: str) -> list[str]:
        return [word for word in text.split("_") if word not in ("ci95", "p50", "bounds")]

    intervals = (
        v for n, v in metrics.items() if n != name and is_interval(v) and stem(n) == stem(name)
    )
    return next(((low, high) for low, high in intervals), None)
