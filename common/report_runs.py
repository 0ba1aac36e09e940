"""What report.py keeps of a report: checked text, finite numbers, and samples cut down to size.

A report comes from anywhere. Whatever is read here may have any content that JSON can have:
`text` and `number` are the only ways by which it reaches a page.
"""

import json
import math
import stat
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common import results

MAX_BYTES = 2**29  # of a file: 1,000 cases x 64 ranks x 100 samples of three kinds are 0.4 GiB
ESCAPED = ("Cc", "Cf", "Cs", "Zl", "Zp")  # categories of Unicode
LARGEST = 1e30  # of a number; a plot of larger ones would overflow
POINTS = 40  # samples of a rank that are kept to be drawn
QUARTILES = (5, 25, 50, 75, 95)

# a page says loudly that these differ
HARDWARE = ("devices", "cpus", "world_size", "local_world_size", "num_nodes", "topologies")
# shown elsewhere, or too long for a cell
APART = ("ranks", "variables", "topologies", "differences")

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Spread:
    """The samples of one kind. quartiles: [ranks, 5] as in QUARTILES; points: [ranks, <= 40]."""

    quartiles: Floats
    points: Floats
    iterations: int


@dataclass(frozen=True)
class Case:
    """One case; every string in `key` and `metrics` is still as it came."""

    key: dict[str, Any]
    identity: str  # the key as text, to find the same case in another report
    label: str
    ranks: tuple[int, ...]
    metrics: dict[str, Any]
    interval: float | None  # half the 95 % interval of the median, over the median
    check: str
    spread: Spread | None
    local: Spread | None  # of local compute


@dataclass(frozen=True)
class Run:
    """One report."""

    label: str
    path: str
    benchmark: str
    status: str
    reason: str
    command: str
    started: str
    seconds: float | None
    environment: dict[str, Any]
    cases: tuple[Case, ...]

    def count(self, verdict: str) -> int:
        """How many cases are `passed`, `failed` or `skipped`."""
        return sum(case.check.startswith(verdict) for case in self.cases)


# -- what may be shown -----------------------------------------------------------------------------


def text(value: Any, limit: int = 200, lines: bool = False) -> str:
    """Any value as one line (or `lines`) of characters that only show themselves.

    Control characters, half surrogates, marks that turn the direction of the text around, and what
    XML forbids become their escapes: they would end the file, or make a page say what it does not.
    """
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple) and all(isinstance(x, str | int) for x in value):
        value = ", ".join(map(str, value))
    if not isinstance(value, str):
        value = canonical(value)
    cut = value if len(value) <= limit else value[: limit - 1] + "…"
    out = []
    for character in cut:
        if character in "\t\n\r":
            out.append(character if lines and character == "\n" else " ")
        elif unicodedata.category(character) in ESCAPED or character in "\ufffe\uffff":
            out.append(character.encode("unicode_escape").decode("ascii"))
        else:
            out.append(character)
    return "".join(out).strip(None if not lines else "\n")


def canonical(value: Any) -> str:
    """JSON that is the same for the same value."""
    try:
        return json.dumps(value, sort_keys=True)
    except RecursionError:
        return "nested too deeply to be shown"


def number(value: Any) -> float | None:
    """A number of a size that something measured can have, as a float; None for all else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not -LARGEST <= value <= LARGEST:  # NaN as well
        return None
    return float(value) if abs(value) >= 1 / LARGEST else 0.0


def pair(value: Any) -> tuple[float, float] | None:
    """An interval: two finite numbers, the smaller first."""
    if not isinstance(value, list) or len(value) != 2:
        return None
    low, high = number(value[0]), number(value[1])
    return None if low is None or high is None or low > high else (low, high)


def significant(value: float, digits: int = 4) -> str:
    """A number with so many significant digits, without an exponent where that stays short."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e9:
        return f"{value:.{digits - 1}e}"
    if float(value).is_integer() and abs(value) < 1e7:
        return str(int(value))
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{places}f}"


# -- reading ---------------------------------------------------------------------------------------


def load(path: str, label: str, progress: Callable[[str], None] = lambda _: None) -> Run:
    """The report at `path`, cut down. Raises ValueError with one line where it is none."""
    try:
        status = Path(path).stat()
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is not a file; give a report, e.g. report.json")
    if status.st_size == 0:
        raise ValueError(f"{path} is empty; a report is what a script writes with --json PATH")
    if status.st_size > MAX_BYTES:
        raise ValueError(
            f"{path} has {status.st_size / 2**20:,.0f} MiB; a report may have "
            f"{MAX_BYTES // 2**20} MiB: 1,000 cases of 64 ranks with 100 samples fit in"
        )
    progress(path)
    document = results.load(path)
    started, finished = text(document["started_at"]), document.get("finished_at")
    return Run(
        label=label,
        path=text(path),
        benchmark=text(document["benchmark"], 60),
        status=document["status"],
        reason=text(document.get("reason") or "", 400),
        command=text(" ".join(map(str, document["argv"])), 1000),
        started=started,
        seconds=_between(started, finished),
        environment=document["environment"],
        cases=tuple(_case(case) for case in document["cases"]),
    )


def _case(case: dict[str, Any]) -> Case:
    key = case["key"]
    label = case.get("label")
    name = text(label, 80) if isinstance(label, str) and label else ""
    others = case.get("other_samples_s")
    return Case(
        key=key,
        identity=canonical(key),
        label=name or ", ".join(text(value, 30) for value in key.values() if value is not None),
        ranks=tuple(case["ranks"]),
        metrics=case["metrics"],
        interval=number(case["stop"].get("ci95_rel")),
        check=text(case["check"], 400),
        spread=_spread(case["samples_s"]),
        local=_spread(others.get("local compute")) if isinstance(others, dict) else None,
    )


def _spread(rows: Any) -> Spread | None:
    """None where these are no samples: results.validate looks at `samples_s` alone."""
    try:
        samples = np.asarray(rows, dtype=np.float64)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None
    if samples.ndim != 2 or samples.size == 0 or not (abs(samples) < LARGEST).all():
        return None
    n = samples.shape[1]
    kept = np.unique(np.linspace(0, n - 1, min(n, POINTS)).astype(int))
    quartiles = np.percentile(samples, QUARTILES, axis=1).T
    return Spread(quartiles, samples[:, kept].copy(), n)


def _between(started: Any, finished: Any) -> float | None:
    try:
        seconds = datetime.fromisoformat(finished) - datetime.fromisoformat(started)
    except (TypeError, ValueError):
        return None
    return seconds.total_seconds()


def labels_of(paths: Sequence[str]) -> list[str]:
    """A name for each file: its stem, with as much before and after as tells it from the others."""
    files = [Path(path).absolute() for path in paths]
    names = [[file.stem or file.name] for file in files]
    for words, file, alike in zip(names, files, _doubles(names), strict=True):
        if alike and any(file.parent == other.parent for other in files if other != file):
            words[0] = file.name
    for depth in range(2, max(len(file.parts) for file in files) + 1):
        for words, file, alike in zip(names, files, _doubles(names), strict=True):
            if alike and depth <= len(file.parts):
                words.insert(0, file.parts[-depth])
    return unique(["/".join(words) for words in names])


def _doubles(names: Sequence[Sequence[str]]) -> list[bool]:
    return [list(names).count(name) > 1 for name in names]


def unique(names: Sequence[str]) -> list[str]:
    """The names as they may be shown, the end of long ones, each another."""
    shown: list[str] = []
    for name in names:
        clean = text(name, 1000)
        clean = clean if len(clean) <= 50 else "…" + clean[-49:]
        count = 1
        found = clean
        while found in shown:
            count += 1
            found = f"{clean} ({count})"
        shown.append(found)
    return shown


# -- what a set of reports shares ------------------------------------------------------------------


@dataclass(frozen=True)
class Field:
    """One field of the environment. values: by report; differs: not all alike."""

    name: str
    values: tuple[str, ...]
    differs: bool


def environments(runs: Sequence[Run]) -> list[Field]:
    """The environment's fields, with the variables and topologies at the end."""
    fields = []
    for name in _names(run.environment for run in runs):
        if name not in APART:
            fields.append(_field(text(name, 60), [run.environment.get(name) for run in runs]))
    fields.append(_field("topologies", [_topologies(run) for run in runs]))
    tables = [run.environment.get("variables") for run in runs]
    variables = [table if isinstance(table, dict) else {} for table in tables]
    for name in sorted(_names(variables)):
        fields.append(_field(text(name, 60), [table.get(name) for table in variables]))
    return fields


def _names(tables: Iterable[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for table in tables for name in table))


def _field(name: str, values: list[Any]) -> Field:
    shown = tuple(text(value, 300) for value in values)
    alike = len(set(map(canonical, values))) == 1
    return Field(name, shown, not alike)


def _topologies(run: Run) -> Any:
    """The different ones, each once: a large job has as many as nodes."""
    found = run.environment.get("topologies")
    return list(dict.fromkeys(map(str, found))) if isinstance(found, list) else found
