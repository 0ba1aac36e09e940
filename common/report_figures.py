"""What the figures of several benchmarks share: curves, bars, dots and distributions of cases."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.figures import SERIES, Bars, Box, Dots, Figure, Line, Part, Section, Spreads
from common.report_runs import Case, Run, Spread, number, pair, significant, text
from common.report_tables import joined

MAX_BARS = 24  # of a figure, and dots
MAX_FIGURES = 12  # of one sort for one benchmark
MAX_BOXES = 32  # of a figure
MAX_SPREADS = 6  # figures of distributions for one benchmark
# what these are, where it is not said by the name of the benchmark
SAMPLES = {
    "ddp_sweep": "Whole steps.",
    "collectives": "In place, of the collectives that are measured so.",
    "rpc_latency": "Round trips.",
}
Group = dict[Any, list[tuple[Run, Case]]]


@dataclass(frozen=True)
class Options:
    """What the user asked for. limit: bandwidth of a link in GB/s."""

    limit: float | None = None


def grouped(
    runs: Sequence[Run], by: Callable[[Case], Any], wanted: Callable[[Case], bool] = lambda _: True
) -> Group:
    """The cases that did not fail, by what `by` says of them."""
    found: Group = {}
    for run, case in joined(runs):
        if not case.check.startswith("failed") and wanted(case):
            found.setdefault(by(case), []).append((run, case))
    return found


def rest(case: Case, *left_out: str) -> tuple[tuple[str, str], ...]:
    """The key without some of its fields: what a curve has in common."""
    return tuple((name, text(v, 60)) for name, v in case.key.items() if name not in left_out)


def series_labels(curves: Sequence[tuple[Run, tuple[tuple[str, str], ...]]]) -> list[str]:
    """A name for each curve: its report if there are several, and what else it differs in."""
    several = len({run.label for run, _ in curves}) > 1
    fields: dict[str, set[str]] = {}
    for _, constant in curves:
        for name, shown in constant:
            fields.setdefault(name, set()).add(shown)
    names = []
    for run, constant in curves:
        found = [
            text(name, 30).replace("_", " ") + ("" if shown == "yes" else f" {shown}")
            for name, shown in constant
            if len(fields[name] - {"-"}) > 1 and shown not in ("-", "no")
        ]
        names.append(", ".join([*([run.label] if several else []), *found]) or "measured")
    return names


def shortened(kept: int, found: int, what: str) -> str:
    return f"The first {kept} of {found:,} {what} are drawn." if found > kept else ""


def curves_of(
    entries: Sequence[tuple[Run, Case]],
    x: str,
    left_out: Sequence[str],
    point: Callable[[Case], tuple[float, float | None, float | None] | None],
    extra: str = "",
) -> list[Line]:
    """A line for each report and each constant rest of the key. point: y, low, high of a case."""
    lines: dict[Any, list[tuple[float, float, float, float]]] = {}
    owners: dict[Any, tuple[Run, tuple[tuple[str, str], ...]]] = {}
    for run, case in entries:
        at, found = number(case.key.get(x)), point(case)
        if at is None or at <= 0 or found is None:
            continue
        y, low, high = found
        constant = rest(case, x, *left_out)
        which = (id(run), constant)
        owners[which] = (run, constant)
        low, high = (y if low is None else low), (y if high is None else high)
        lines.setdefault(which, []).append((at, y, min(low, y), max(high, y)))
    labels = series_labels(list(owners.values()))
    out = []
    for style, (which, label) in enumerate(zip(owners, labels, strict=True)):
        points = sorted(lines[which])
        columns = [list(column) for column in zip(*points, strict=True)]
        name = label if not extra else f"{label}, {extra}" if len(owners) > 1 else extra
        out.append(Line(name, style, columns[0], columns[1], columns[2], columns[3]))
    return out


def summary_of(title: str, lines: Sequence[Line], unit: str) -> str:
    """A curve in words."""
    found = [
        f"{line.label}: {significant(line.y[0])} to {significant(line.y[-1])} {unit}"
        for line in lines
        if not line.ideal
    ]
    return f"{title}. {'; '.join(found[:SERIES])}."


def stacked_bars(
    runs: Sequence[Run], title: str, parts: Sequence[tuple[str, tuple[str, ...]]]
) -> list[Figure]:
    """Stacked bars of the cases that have all the parts. A part: its name, and where it is."""

    def found(case: Case) -> list[float] | None:
        values = []
        for _, path in parts:
            at: Any = case.metrics
            for name in path:
                at = at.get(name) if isinstance(at, dict) else None
            values.append(number(at))
        if values[0] is None or all(v is None for v in values[1:]):
            return None
        return [max(0.0, v or 0.0) for v in values]

    bars = [(run, case, found(case)) for run, case in joined(runs)]
    kept = [(run, case, v) for run, case, v in bars if v and not case.check.startswith("failed")]
    if not kept:
        return []
    scale, unit = time_unit(max(sum(v) for _, _, v in kept))
    figures: list[Figure] = []
    most = [kept[i : i + MAX_BARS] for i in range(0, len(kept), MAX_BARS)][:2]
    for n, chunk in enumerate(most):
        names = bar_names([(run, case) for run, case, _ in chunk])
        columns = [[v[i] * scale for _, _, v in chunk] for i in range(len(parts))]
        stacked = [Part(label, i, columns[i]) for i, (label, _) in enumerate(parts)]
        longest = max(range(len(chunk)), key=lambda i: sum(chunk[i][2]))
        summary = (
            f"{title} of {len(chunk)} cases by parts. Longest: {chunk[longest][1].label}: "
            + ", ".join(f"{p.label} {significant(p.values[longest])} {unit}" for p in stacked)
        )
        rest_of = shortened(2 * MAX_BARS, len(kept), "cases") if n == len(most) - 1 else ""
        figures.append(Bars(title, summary + ".", unit, names, stacked, rest_of))
    return figures


def bar_names(entries: Sequence[tuple[Run, Case]]) -> list[str]:
    """What to write beside a bar: the case's name without the words that all have."""
    several = len({run.label for run, _ in entries}) > 1
    words = [case.label.split() for _, case in entries]
    shared = (
        set.intersection(*map(set, words))
        if len({case.label for _, case in entries}) > 1
        else set()
    )
    names = [" ".join(word for word in row if word not in shared) for row in words]
    return [
        f"{name or case.label}\n{run.label}" if several else name or case.label
        for name, (run, case) in zip(names, entries, strict=True)
    ]


def time_unit(seconds: float) -> tuple[float, str]:
    """The factor and unit in which so many seconds are a handy number."""
    for scale, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * scale >= 1:
            return scale, unit
    return 1e9, "ns"


def dots(
    runs: Sequence[Run],
    title: str,
    x_label: str,
    name: str,
    bounds: str,
    scale: float = 1,
    reference: float | None = None,
) -> list[Figure]:
    """One metric of each case, with its interval."""
    found = []
    for run, case in joined(runs):
        y = number(case.metrics.get(name))
        if y is not None and not case.check.startswith("failed"):
            found.append((run, case, y))
    if not found:
        return []
    kept = found[:MAX_BARS]
    numbers = {run.label: i for i, run in enumerate(runs)}
    intervals = []
    for _, case, y in kept:
        limits = pair(case.metrics.get(bounds))
        intervals.append((min(limits[0], y) * scale, max(limits[1], y) * scale) if limits else None)
    names = bar_names([(runs[0], case) for _, case, _ in kept])
    values = [y * scale for _, _, y in kept]
    summary = f"{title}: " + "; ".join(
        f"{n} ({run.label}) {significant(v)}"
        for n, (run, _, _), v in zip(names, kept, values, strict=True)
    )
    groups = [(run.label, numbers[run.label] % SERIES) for run, _, _ in kept]
    note = shortened(MAX_BARS, len(found), "cases")
    return [Dots(title, summary[:600], x_label, names, values, intervals, groups, reference, note)]


def ratios(runs: Sequence[Run], title: str) -> list[Section]:
    found = dots(runs, title, "ratio", "ratio", "ratio_ci95", reference=1.0)
    return [Section(title, ["With 95 % intervals."], found)] if found else []


def spreads(
    runs: Sequence[Run],
    title: str = "Distribution by rank",
    of: Callable[[Case], Spread | None] = lambda case: case.spread,
    least: int = 1,
) -> list[Section]:
    """The samples of each rank, for the cases with the most ranks. least: so many ranks."""
    cases: dict[str, list[tuple[Run, Case, Spread]]] = {}
    for run, case in joined(runs):
        spread = of(case)
        if spread is not None and spread.iterations >= 5 and len(spread.quartiles) >= least:
            cases.setdefault(case.identity, []).append((run, case, spread))
    if not cases:
        return []
    most = sorted(cases.values(), key=lambda entries: -len(entries[0][1].ranks))[:MAX_SPREADS]
    numbers = {id(run): i for i, run in enumerate(runs)}
    figures = []
    for entries in most:
        kept = entries[:SERIES]
        label = kept[0][1].label
        scale, unit = time_unit(float(np.median([s.quartiles[:, 2].max() for _, _, s in kept])))
        boxes = []
        cut = False
        for run, case, spread in kept:
            rows = _rows(spread, max(1, MAX_BOXES // len(kept)))
            cut |= len(rows) < len(spread.quartiles)
            for row in rows:
                boxes.append(
                    Box(
                        str(case.ranks[row] if len(case.ranks) == len(spread.quartiles) else row),
                        (run.label, numbers[id(run)] % SERIES),
                        (spread.quartiles[row] * scale).tolist(),
                        _thinned(spread, row, len(rows) * len(kept), scale),
                    )
                )
        boxes.sort(key=lambda box: (int(box.name), box.group[1]))
        medians = [box.quartiles[2] for box in boxes]
        ranks = len(kept[0][2].quartiles)
        summary = (
            f"{title}: {label}, {ranks} ranks: medians from "
            f"{significant(min(medians))} to {significant(max(medians))} {unit}."
        )
        note = f"{kept[0][2].iterations} samples a rank"
        note += f"; the fastest, the slowest and others of {ranks} ranks." if cut else "."
        note += " " + shortened(SERIES, len(entries), "reports") if len(entries) > SERIES else ""
        figures.append(Spreads(label, summary, "rank", unit, boxes, note))
    notes = ["Boxes hold the middle half, whiskers 5 to 95 %; dots are some of the samples."]
    notes += [SAMPLES[runs[0].benchmark]] if runs[0].benchmark in SAMPLES and least == 1 else []
    if len(cases) > MAX_SPREADS:
        notes.append(f"{MAX_SPREADS} of {len(cases):,} cases: those with the most ranks.")
    return [Section(title, notes, figures)]


def _rows(spread: Spread, most: int) -> list[int]:
    """At most so many ranks: evenly from the fastest to the slowest, both included."""
    order = np.argsort(spread.quartiles[:, 2], kind="stable")
    if len(order) <= most:
        return sorted(order.tolist())
    picked = np.unique(np.linspace(0, len(order) - 1, most).astype(int)) if most > 1 else [-1]
    return sorted(order[picked].tolist())


def _thinned(spread: Spread, row: int, boxes: int, scale: float) -> list[float]:
    """Some of a rank's samples: 400 in a figure are enough."""
    points = spread.points[row]
    step = max(1, math.ceil(len(points) * boxes / 400))
    return [float(x) for x in points[::step] * scale]
