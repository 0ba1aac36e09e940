"""How cases, metrics and times are named and shown, alike in compare, export and report."""

import json
import math
import re
from collections.abc import Sequence
from typing import Any

from common.cli import show_size

UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


def canonical(key: dict[str, Any]) -> str:
    """The key as text, equal for equal keys."""
    return json.dumps(key, sort_keys=True)


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def is_interval(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(map(is_number, value))


def markdown(text: Any, limit: int = 200) -> str:
    """Text as a cell of a Markdown table, whatever it holds."""
    words = re.sub(r"([\\`*_\[\]|#~])", r"\\\1", clean(text, limit))
    return words.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 0) -> str:
    """numbers: so many columns after the first are aligned to the right."""
    marks = ["--:" if 0 < i <= numbers else "---" for i in range(len(header))]
    lines = [[markdown(cell) for cell in header], marks]
    lines += [[markdown(cell) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def show_time(seconds: float) -> str:
    """In a unit that suits."""
    value = float(f"{seconds:.4g}")
    scale, unit = next((u for u in UNITS if abs(value) >= u[0]), UNITS[-1])
    return f"{value / scale:.4g} {unit}"


def clean(text: Any, limit: int = 200) -> str:
    """Printable text on one line: a report may hold anything, a terminal should not see it."""
    words = "".join(c if c.isprintable() else " " for c in str(text))
    return words if len(words) <= limit else words[: limit - 3] + "..."


def show_value(name: str, value: Any) -> str:
    """An entry of a key in a few words."""
    words = name.replace("_", " ")
    if isinstance(value, bool) or value is None:
        return words if value else f"no {words}"
    if isinstance(value, str):
        return value
    if name.endswith("_bytes"):
        return f"{show_size(value)}"
    if name.endswith("_mb"):
        return f"{words.removesuffix(' mb')} {value:g} MB"
    return f"{words} {value:g}" if is_number(value) else f"{words} {value}"


def case_names(keys: Sequence[dict[str, Any]]) -> dict[str, str]:
    """A name for each key, by its canonical form: its label, and the entries that tell it apart."""
    unique = {canonical(key): key for key in keys}
    parts = {
        name: [clean(key["label"], 60)] if key.get("label") else [] for name, key in unique.items()
    }
    entries = dict.fromkeys(entry for key in unique.values() for entry in key if entry != "label")
    for entry in entries:
        groups: dict[tuple[str, ...], list[str]] = {}
        for name, words in parts.items():
            groups.setdefault(tuple(words), []).append(name)
        for group in groups.values():
            values = {canonical({"": unique[name].get(entry)}) for name in group}
            if len(values) > 1:
                for name in group:
                    parts[name] = [
                        *parts[name],
                        clean(show_value(entry, unique[name].get(entry)), 60),
                    ]
    for name, key in unique.items():
        first = [clean(v, 60) for v in key.values() if isinstance(v, str)][:2]
        parts[name] = parts[name] or first or ["the case"]
    return {name: ", ".join(words) for name, words in parts.items()}


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

    def words(text: str) -> list[str]:
        return [word for word in text.split("_") if word not in ("ci95", "p50", "bounds")]

    for other, value in metrics.items():
        if other != name and is_interval(value) and words(other) == words(name):
            return value[0], value[1]
    return None
