"""How cases, metrics and times are named and printed, alike in all of analysis/."""

import io
import json
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard

import tabulate

from common.cli import abandon, refuse, show_size

UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
UNITS_OF = {"_gb_per_s": "GB/s", "_mb_per_s": "MB/s", "_per_s": "1/s", "_s": "s", "_gib": "GiB"}
UNITS_OF |= {"_bytes": "bytes", "": ""}  # by what the name of a metric ends in


def canonical(key: dict[str, Any]) -> str:
    """The key as text, equal for equal keys."""
    return json.dumps(key, sort_keys=True)


def is_number(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and math.isfinite(value)


def is_interval(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(map(is_number, value))


def clean(text: Any, limit: int = 200) -> str:
    """Printable text on one line: a report may hold anything, a terminal should not see it."""
    words = "".join(c if c.isprintable() else " " for c in str(text))
    return words if len(words) <= limit else words[: limit - 3] + "..."


def markdown(text: Any, limit: int = 200) -> str:
    """Text as a part of a Markdown document, whatever it holds."""
    words = re.sub(r"([\\`*_\[\]|#~])", r"\\\1", clean(text, limit))
    return words.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def show_table(
    header: Sequence[Any], rows: Iterable[Sequence[Any]], right: Sequence[int], style: str
) -> str:
    """A table for a terminal, or in Markdown. right: columns of numbers, aligned to the right."""
    tabulate.MIN_PADDING = 0  # or each header gets two blanks
    escape, form = (markdown, "pipe") if style == "markdown" else (clean, "simple")
    cells = [[escape(cell) for cell in row] for row in (header, *rows)]
    align = ["right" if i in right else "left" for i in range(len(header))]
    text = tabulate.tabulate(cells[1:], cells[0], form, colalign=align, disable_numparse=True)
    return "\n".join(line.rstrip() for line in text.splitlines())


def put(text: str) -> None:
    """Print a result. Where stdout is gone or full, say so in one line, and end with status 1."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # what a terminal of ASCII cannot show
    try:
        print(text, flush=True)
    except OSError as error:
        abandon(sys.stdout)
        refuse(f"stdout: {error.strerror}", status=1)


def check_output(path: str, endings: tuple[str, ...], inputs: Iterable[str]) -> None:
    """Raises ValueError or OSError where a page or a figure cannot be written there."""
    if not path.lower().endswith(endings):
        raise ValueError(f"expected a file that ends in {' or '.join(endings)}, got {path!r}")
    present = [one for one in inputs if os.path.exists(one) and os.path.exists(path)]
    if any(os.path.samefile(one, path) for one in present):
        raise ValueError(f"{path} is one of the reports, which it would overwrite")
    target = os.path.realpath(path)
    if os.path.exists(target) and not os.path.isfile(target):
        raise ValueError(f"{path} is no regular file")
    is_new = not os.path.exists(target)
    with open(target, "ab"):
        pass
    if is_new:
        os.remove(target)


def unit_of(metric: str) -> tuple[str, str]:
    """The end of a metric's name, and the unit that it says."""
    return next((end, unit) for end, unit in UNITS_OF.items() if metric.endswith(end))


def time_unit(seconds: float) -> str:
    """The unit that suits a time of four digits."""
    return next((unit for unit, size in UNITS.items() if abs(seconds) >= 0.99995 * size), "ns")


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
    for entry in dict.fromkeys(entry for key in keys for entry in key if entry != "label"):
        words = [clean(show_value(entry, key.get(entry)), 60) for key in keys]
        several = Counter(name for name, _ in set(zip(names, words, strict=True)))
        for i, name in enumerate(names):
            if several[name] > 1:
                names[i] = f"{name}, {words[i]}" if name else words[i]
    for i, key in enumerate(keys):
        texts = [clean(value, 60) for value in key.values() if isinstance(value, str)]
        names[i] = names[i] or ", ".join(texts[:2]) or "the case"
    return names


def plain(metrics: dict[str, Any]) -> dict[str, Any]:
    """The numbers, words and intervals of the metrics."""
    kinds = is_number, is_interval, lambda value: isinstance(value, str)
    return {name: value for name, value in metrics.items() if any(kind(value) for kind in kinds)}


def interval_of(name: str, metrics: dict[str, Any]) -> Any:
    """The 95 % interval of a metric: `step_time_ci95_s` is that of `step_time_p50_s`."""
    stem = name.replace("_p50", "")
    names = (f"{stem.removesuffix('_s')}_ci95_s", f"{stem}_ci95")
    return next((metrics[n] for n in names if is_interval(metrics.get(n))), None)
