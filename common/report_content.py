"""What report.py says about a set of reports: tables and figures, as data.

Each benchmark has a function that makes its figures, and a list of the columns of its tables.
A benchmark that is not listed gets the table of everything, and the distributions.
"""

import argparse
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.bandwidth import show_size
from common.figures import (
    SERIES,
    Bars,
    Box,
    Curves,
    Dots,
    Figure,
    Heat,
    Line,
    Part,
    Section,
    Spreads,
    Table,
)
from common.link_report import KINDS, Link, verdicts
from common.report_runs import Case, Run, Spread, number, pair, significant, text

MAX_ROWS = 200  # of a table
MAX_METRICS = 24  # columns of a benchmark that is not known here
MAX_BARS = 24  # of a figure, and dots
MAX_FIGURES = 12  # of one sort for one benchmark
MAX_BOXES = 32  # of a figure
MAX_SPREADS = 6  # figures of distributions for one benchmark
LARGEST_MATRIX = 1024  # members of a heat map
LARGEST_VERDICT = 256
SIGMAS = 5.0  # as p2p_matrix.py has by default

Column = tuple[str, Callable[[Case], str]]
Group = dict[Any, list[tuple[Run, Case]]]


@dataclass(frozen=True)
class Options:
    """What the user asked for. limit: bandwidth of a link in GB/s."""

    limit: float | None = None


# -- cells -----------------------------------------------------------------------------------------


def value(name: str, scale: float = 1, digits: int = 4) -> Callable[[Case], str]:
    """A cell with one metric times `scale`."""

    def cell(case: Case) -> str:
        found = number(case.metrics.get(name))
        return "-" if found is None else significant(found * scale, digits)

    return cell


def interval(name: str, scale: float = 1) -> Callable[[Case], str]:
    """A cell with an interval, as `from to to`."""

    def cell(case: Case) -> str:
        found = pair(case.metrics.get(name))
        return "-" if found is None else " to ".join(significant(x * scale, 4) for x in found)

    return cell


def words(name: str) -> Callable[[Case], str]:
    return lambda case: text(case.metrics.get(name), 60)


def width(case: Case) -> str:
    """Half the median's 95 % interval."""
    if case.interval is None:
        return "-"
    return f"±{case.interval:.1%}" if case.interval < 1 else ">100%"


def slowest(case: Case) -> str:
    rank, factor = case.metrics.get("straggler_rank"), number(case.metrics.get("straggler_factor"))
    if rank is None or factor is None:
        return "-"
    return f"{text(rank, 20)} ({text(case.metrics.get('straggler_host'), 40)}) {factor:.2f}x"


def times(name: str, unit: str, scale: float) -> list[Column]:
    """p50 to p99 of a time."""
    return [(f"p{q} ({unit})", value(f"{name}_p{q}_s", scale)) for q in (50, 75, 90, 95, 99)]


STEP: list[Column] = [
    *times("step_time", "ms", 1e3)[:1],
    ("95% ci of p50", width),
    *times("step_time", "ms", 1e3)[1:],
    ("samples/s", value("samples_per_s")),
    ("samples/s/device", value("samples_per_s_per_device")),
]
WHY: list[Column] = [
    ("efficiency (%)", value("efficiency", 100, 3)),
    ("step (ms)", value("step_time_p50_s", 1e3)),
    ("local compute (ms)", value("local_compute_p50_s", 1e3)),
    ("communication alone (ms)", value("communication_p50_s", 1e3)),
    ("exposed communication (ms)", value("exposed_communication_s", 1e3)),
    ("95% ci (ms)", interval("exposed_communication_ci95_s", 1e3)),
    ("overlap (%)", value("overlap", 100, 3)),
    ("slowest rank", slowest),
    ("first iteration (ms)", value("first_iteration_s", 1e3)),
    ("memory (GiB)", value("memory_gib")),
]


def breaks(case: Case) -> str:
    """How many graph breaks."""
    found = case.metrics.get("graph_breaks")
    counts = [number(n) or 0 for n in found.values()] if isinstance(found, dict) else None
    return "-" if counts is None else significant(sum(counts))


COMPILING: list[Column] = [
    ("times as fast as eager", value("vs_eager")),
    ("bounds", interval("vs_eager_bounds")),
    ("times as fast as none", value("vs_none")),
    ("first step (s)", value("first_step_s")),
    ("start of backend (s)", value("start_s")),
    ("recompiles", value("recompiles")),
    ("recompiling (s)", value("recompile_s")),
    ("cost (s)", value("compile_cost_s")),
    ("paid back after (steps)", value("payback_steps", 1, 7)),
    ("graphs", value("graphs")),
    ("graph breaks", breaks),
    ("tflops", value("tflops")),
    ("mfu (%)", value("mfu", 100, 3)),
    ("memory (GiB)", value("memory_gib")),
]
RATIO: list[Column] = [
    ("ratio", value("ratio")),
    ("95% ci of ratio", interval("ratio_ci95")),
]


def _busbw(variant: str) -> list[Column]:
    head = variant.replace("_", "-")
    return [
        (f"{head} time (us)", value(f"{variant}_time_s", 1e6)),
        (f"{head} algbw (GB/s)", value(f"{variant}_algbw_gb_per_s")),
        (f"{head} busbw (GB/s)", value(f"{variant}_busbw_gb_per_s")),
        (f"{head} #wrong", value(f"{variant}_wrong")),
    ]


def _calls(variant: str) -> list[Column]:
    head = variant.replace("_", " ")
    return [
        *((f"{head} {name}", cell) for name, cell in times(variant, "us", 1e6)),
        (f"{head} calls/s", value(f"{variant}_calls_per_s")),
        (f"{head} GB/s", value(f"{variant}_gb_per_s")),
    ]


# The tables of each benchmark, by title. What a case is called comes from its key.
TABLES: dict[str, dict[str, list[Column]]] = {
    "ddp_sweep": {"Step time": STEP, "Where the time goes": WHY},
    "compile_sweep": {
        "Step time": [*STEP, ("tokens/s", value("tokens_per_s"))],
        "What compiling brings and costs": COMPILING,
    },
    "collectives": {"Bandwidth": [*_busbw("out_of_place"), *_busbw("in_place")]},
    "rpc_latency": {"Round trips": _calls("round_trip"), "One way": _calls("one_way")},
    "ddp_rpc": {
        "Epochs": [
            *times("epoch_time", "ms", 1e3),
            ("95% ci of p50", width),
            ("samples/s", value("samples_per_s")),
        ],
        "Phases of a batch (means)": [
            (f"{name} (ms)", value(f"{name}_s", 1e3))
            for name in ("lookup", "forward", "backward", "exchange", "step")
        ],
        "Against the original": RATIO,
    },
    "parameter_server": {
        "Step time": [
            *STEP,
            ("hook p50 (ms)", value("hook_p50_s", 1e3)),
            ("MB a step", value("bytes_per_step", 1e-6)),
            ("GB/s", value("gb_per_s")),
        ],
        "Against the original": RATIO,
    },
    "batch_update_ps": {
        "Updates": [
            ("updates/s", value("updates_per_s")),
            ("95% ci of updates/s", interval("updates_per_s_ci95")),
            ("gradients/s", value("gradients_per_s")),
            ("MB/s", value("mb_per_s")),
            *((f"latency {name}", cell) for name, cell in times("latency", "ms", 1e3)),
        ],
        "Against the original": RATIO,
    },
}
# the key says it twice, or it numbers what has a name
HIDDEN_KEYS = {
    "ddp_sweep": ("world_size",),
    "collectives": ("count",),
    "p2p_matrix": ("round", "rounds"),
}
# whose samples are shown otherwise
NO_SPREADS = ("p2p_matrix",)
# what these are, where it is not said by the name of the benchmark
SAMPLES = {
    "ddp_sweep": "Whole steps.",
    "collectives": "In place, of the collectives that are measured so.",
    "rpc_latency": "Round trips.",
}
SPEED_UP = "With bounds that are wider than a 95 % interval."
PANEL = ("model", "dtype")  # each has a figure of its own in ddp_sweep


# -- tables ----------------------------------------------------------------------------------------


def joined(runs: Sequence[Run]) -> list[tuple[Run, Case]]:
    """All cases, the same case of each report side by side, in the order of the first report."""
    order: dict[str, list[tuple[Run, Case]]] = {}
    for run in runs:
        for case in run.cases:
            order.setdefault(case.identity, []).append((run, case))
    return [entry for entries in order.values() for entry in entries]


def varying(cases: Iterable[Case], hidden: Sequence[str] = ()) -> tuple[list[str], dict[str, str]]:
    """The key's fields that tell cases apart, and those (with their value) that do not."""
    seen: dict[str, list[str]] = {}
    count: dict[str, int] = {}
    total = 0
    for case in cases:
        total += 1
        for name, found in case.key.items():
            count[name] = count.get(name, 0) + 1
            values = seen.setdefault(name, [])
            shown = text(found, 60)
            if found is not None and shown not in values and len(values) < 2:
                values.append(shown)
    different = [name for name, values in seen.items() if len(values) > 1 and name not in hidden]
    everywhere = [name for name in seen if count[name] == total and len(seen[name]) == 1]
    alike = {name: seen[name][0] for name in everywhere}
    return different, alike


def key_text(name: str, found: Any) -> str:
    count = number(found)
    if "bytes" in name and count is not None and count == int(count) and count >= 0:
        return show_size(int(count))
    return text(found, 60)


def case_table(
    title: str,
    entries: Sequence[tuple[Run, Case]],
    columns: Sequence[Column],
    hidden: Sequence[str],
) -> Table | None:
    """A row a case; columns that are empty everywhere are left out. None where all are."""
    rows = [[cell(case) for _, cell in columns] for _, case in entries]
    bad = [case.check.startswith("failed") for _, case in entries]
    kept = [i for i in range(len(columns)) if any(row[i] != "-" for row in rows)]
    useful = [i for i, row in enumerate(rows) if bad[i] or any(row[k] != "-" for k in kept)]
    if not kept or not useful:
        return None
    fields, _ = varying((entries[i][1] for i in useful), hidden)
    several = len({run.label for run, _ in entries}) > 1
    checks = any(entries[i][1].check != "passed" for i in useful)
    header = [text(name, 40).replace("_", " ") for name in fields] or ["case"]
    header = [*header, *(["report"] if several else []), *(columns[i][0] for i in kept)]
    out = []
    for i in useful[:MAX_ROWS]:
        run, case = entries[i]
        names = [key_text(name, case.key.get(name)) for name in fields] or [case.label]
        cells = [*names, *([run.label] if several else []), *(rows[i][k] for k in kept)]
        out.append([*cells, *([case.check] if checks else [])])
    note = "" if len(useful) <= MAX_ROWS else f"The first {MAX_ROWS} of {len(useful):,} rows."
    failed = frozenset(row for row, i in enumerate(useful[:MAX_ROWS]) if bad[i])
    return Table(title, [*header, *(["check"] if checks else [])], out, failed, note)


def all_metrics(entries: Sequence[tuple[Run, Case]]) -> list[Column]:
    """A column for each metric that is a number, text or interval; of an unknown benchmark."""
    names: dict[str, None] = {}
    for _, case in entries:
        for name, found in case.metrics.items():
            if not isinstance(found, dict) and (not isinstance(found, list) or pair(found)):
                names[name] = None

    def cell(case: Case, name: str) -> str:
        found = case.metrics.get(name)
        if isinstance(found, list):
            return interval(name)(case)
        count = number(found)
        return text(found, 60) if count is None else significant(count)

    columns: list[Column] = [("95% ci of p50", width)]
    for name in names:
        columns.append((text(name, 40), lambda case, name=name: cell(case, name)))  # type: ignore[misc]
    return columns


# -- figures ---------------------------------------------------------------------------------------


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


def _curves(
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


def _summary(title: str, lines: Sequence[Line], unit: str) -> str:
    """A curve in words."""
    found = [
        f"{line.label}: {significant(line.y[0])} to {significant(line.y[-1])} {unit}"
        for line in lines
        if not line.ideal
    ]
    return f"{title}. {'; '.join(found[:SERIES])}."


def scaling(runs: Sequence[Run], _: Options) -> list[Section]:
    """ddp_sweep: samples/s over the ranks, with the ideal line; and where a step's time goes."""
    baselines: dict[Any, float] = {}
    setup = ("label", "world_size", "bucket_size_mb", "comm_hook")

    def rate(case: Case) -> tuple[float, float | None, float | None] | None:
        y, p50 = (number(case.metrics.get(n)) for n in ("samples_per_s", "step_time_p50_s"))
        if y is None or y <= 0:
            return None
        bounds = pair(case.metrics.get("step_time_ci95_s"))
        if bounds is None or p50 is None or bounds[0] <= 0:
            return y, None, None
        return y, y * p50 / bounds[1], y * p50 / bounds[0]

    for run in runs:
        for case in run.cases:
            found = rate(case)
            if case.key.get("world_size") == 0 and found:
                baselines[(run.label, rest(case, *setup))] = found[0]

    by_label = {run.label: run for run in runs}

    def trained(case: Case) -> bool:
        ranks = number(case.key.get("world_size"))
        return ranks is not None and ranks >= 1

    figures: list[Figure] = []
    panels = grouped(runs, lambda c: tuple(text(c.key.get(n), 40) for n in PANEL), trained)
    for shown, entries in list(panels.items())[:MAX_FIGURES]:
        lines = _curves(entries, "world_size", ["label", *PANEL], rate)
        if not lines:
            continue
        ranks = sorted({x for line in lines for x in line.x})
        bases = dict.fromkeys((run.label, rest(case, *setup)) for run, case in entries)
        known = [which for which in bases if which in baselines][:SERIES]
        names = series_labels([(by_label[label], constant) for label, constant in known])
        ideals = []
        for style, (which, name) in enumerate(zip(known, names, strict=True)):
            label = "ideal: no ddp times ranks" + (f", {name}" if len(known) > 1 else "")
            points = [baselines[which] * n for n in ranks]
            ideals.append(Line(label, style, ranks, points, ideal=True))
        title = " ".join(word for word in shown if word != "-")
        figures.append(
            Curves(
                title,
                _summary(f"Scaling of {title}", lines[:SERIES], "samples/s"),
                "ranks",
                "samples/s",
                [*ideals, *lines[:SERIES]],
                note=shortened(SERIES, len(lines), "curves"),
            )
        )
    sections = []
    if figures:
        notes = ["Bars are 95 % intervals of the median."]
        notes += [shortened(MAX_FIGURES, len(panels), "settings")]
        sections.append(Section("Scaling", [n for n in notes if n], figures))
    parts = [
        ("local compute", ("local_compute_p50_s",)),
        ("exposed communication", ("exposed_communication_s",)),
    ]
    split = _stacked(runs, "Step time", parts)
    if split:
        note = (
            "Medians. Exposed communication is the step less local compute, both timed in turns: "
            "it may be a little under 0 (drawn as 0), and the parts need not add up exactly."
        )
        sections.append(Section("Where a step's time goes", [note], split))
    return sections


def _stacked(
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


def busbw(runs: Sequence[Run], options: Options) -> list[Section]:
    """collectives: bus bandwidth over size."""
    figures: list[Figure] = []
    panels = grouped(runs, lambda case: text(case.key.get("collective"), 40))
    for name, entries in list(panels.items())[:MAX_FIGURES]:
        lines: list[Line] = []
        limits: dict[str, float] = {"--limit": options.limit} if options.limit else {}
        for variant in ("out_of_place", "in_place"):

            def rate(case: Case, variant: str = variant) -> Any:
                if not number(case.key.get("size_bytes")):
                    return None  # a barrier
                y = number(case.metrics.get(f"{variant}_busbw_gb_per_s"))
                return (y, None, None) if y is not None and y > 0 else None

            lines += _curves(
                entries, "size_bytes", ["count", "collective"], rate, variant.replace("_", "-")
            )
            for _, case in entries if not options.limit else []:
                share = number(case.metrics.get(f"{variant}_efficiency"))
                y = number(case.metrics.get(f"{variant}_busbw_gb_per_s"))
                if share and y and share > 0 and y > 0:
                    limits[f"limit {significant(y / share, 3)} GB/s"] = float(f"{y / share:.3g}")
        if lines:
            named = [Line(line.label, i, line.x, line.y) for i, line in enumerate(lines[:SERIES])]
            levels = [
                (f"limit {significant(v, 3)} GB/s" if k == "--limit" else k, v)
                for k, v in list(limits.items())[:4]
            ]
            figures.append(
                Curves(
                    name,
                    _summary(f"Bus bandwidth of {name}", named, "GB/s"),
                    "size (bytes)",
                    "busbw (GB/s)",
                    named,
                    bytes_x=True,
                    levels=levels,
                    note=shortened(SERIES, len(lines), "curves"),
                )
            )
    note = shortened(MAX_FIGURES, len(panels), "collectives")
    return [Section("Bus bandwidth", [note] if note else [], figures)] if figures else []


def link_maps(runs: Sequence[Run], _: Options) -> list[Section]:
    """p2p_matrix: a heat map for each thing measured and each report, on one scale."""
    found = [(run, [x for case in run.cases for x in _links(case)]) for run in runs]
    figures: list[Figure] = []
    tables: list[Table] = []
    for kind, (columns, unit, less) in KINDS.items():
        good = [float(link[c]) for _, all_of in found for link in all_of for c in set(columns)]
        if not good:
            continue
        low, high = min(good), max(good)
        for run, all_of in found[: MAX_FIGURES // len(KINDS)]:
            if not all_of:
                continue
            n = 1 + max(max(link[0], link[1]) for link in all_of)
            if n > LARGEST_MATRIX:
                continue
            values = np.full((n, n), np.nan)
            for link in all_of:
                values[link[0], link[1]] = link[columns[0]]
                values[link[1], link[0]] = link[columns[1]]
            what = _member(run)
            name = kind.partition(",")[0]
            title = f"{name} ({unit})" + (f", {run.label}" if len(runs) > 1 else "")
            own = [float(link[c]) for link in all_of for c in set(columns)]
            pairs = sorted(
                ((a, b, v) for (a, b), v in np.ndenumerate(values) if not math.isnan(v)),
                key=lambda link: -link[2] if less else link[2],
            )
            a, b, worst = pairs[0]
            summary = (
                f"{title} between {n} {what}s, from {significant(min(own))} to "
                f"{significant(max(own))} {unit}; worst: {a} to {b}, {significant(worst)} {unit}."
            )
            figures.append(
                Heat(
                    title,
                    summary,
                    f"{what} that receives",
                    f"{what} that sends",
                    unit,
                    values.tolist(),
                    low,
                    high,
                    less,
                )
            )
            rows = [
                [f"{a} → {b}" if columns[0] != columns[1] else f"{a} ↔ {b}", significant(v)]
                for a, b, v in pairs
                if columns[0] != columns[1] or a < b
            ][:10]
            tables.append(Table(f"Worst links: {title}", ["link", f"{name} ({unit})"], rows))
    if not figures:
        return []
    notes = ["Yellow is good, dark is bad; the reports have one scale."]
    notes += [shortened(MAX_FIGURES // len(KINDS), len(found), "reports")]
    slow = [[run.label, line] for run, all_of in found for line in _slow(run, all_of)]
    if slow:
        note = shortened(MAX_ROWS, len(slow), "lines").replace("drawn", "shown")
        tables.insert(0, Table("What is slow", ["report", "what"], slow[:MAX_ROWS], note=note))
    else:
        notes.append("No link, rank or node is slow beyond noise.")
    return [Section("Links", [note for note in notes if note], figures, tables)]


def _slow(run: Run, all_of: list[list[Any]]) -> list[str]:
    """p2p_matrix.py's own verdicts; none of many members, which would take minutes."""
    n = 1 + max((max(link[0], link[1]) for link in all_of), default=0)
    if n > LARGEST_VERDICT:
        return [f"not looked for: more than {LARGEST_VERDICT} members"]
    by = _member(run)
    nodes = list(range(n)) if by == "node" else [0] * n
    rows = run.environment.get("ranks")
    for row in rows if by == "rank" and isinstance(rows, list) else []:
        rank, node = (row.get("rank"), row.get("node")) if isinstance(row, dict) else (None, None)
        if type(rank) is int and 0 <= rank < n and type(node) is int:
            nodes[rank] = node
    links: list[Link] = [tuple(link) for link in all_of]
    return verdicts(links, nodes, argparse.Namespace(by=by, sigmas=SIGMAS))


def _links(case: Case) -> list[list[Any]]:
    """The links that are well formed: two members, and four numbers over 0."""
    found = case.metrics.get("links")
    good = []
    for link in found if isinstance(found, list) else []:
        if not isinstance(link, list) or len(link) != 6:
            continue
        ends, values = link[:2], [number(x) for x in link[2:]]
        members = all(type(x) is int and 0 <= x < LARGEST_MATRIX for x in ends)
        if members and ends[0] != ends[1] and all(v is not None and v > 0 for v in values):
            good.append([*ends, *values])
    return good


def _member(run: Run) -> str:
    return "node" if any(case.key.get("by") == "node" for case in run.cases) else "rank"


def calls(runs: Sequence[Run], _: Options) -> list[Section]:
    """rpc_latency: the time of a call over the size, for each operation."""
    sections = []
    for variant in ("round_trip", "one_way"):

        def median(case: Case, variant: str = variant) -> Any:
            y = number(case.metrics.get(f"{variant}_p50_s"))
            if y is None or y <= 0:
                return None
            bounds = pair(case.metrics.get(f"{variant}_p50_ci95_s")) or (y, y)
            return y * 1e6, max(bounds[0], y / 100) * 1e6, bounds[1] * 1e6

        figures: list[Figure] = []
        panels = grouped(runs, lambda case: text(case.key.get("operation"), 40))
        for name, entries in list(panels.items())[:MAX_FIGURES]:
            # large sizes have fewer calls in flight: one curve all the same
            lines = _curves(entries, "size_bytes", ["operation", "in_flight"], median)
            if lines:
                figures.append(
                    Curves(
                        name,
                        _summary(f"{variant.replace('_', ' ')} of {name}", lines, "us"),
                        "size (bytes)",
                        "p50 (us)",
                        lines[:SERIES],
                        bytes_x=True,
                        note=shortened(SERIES, len(lines), "curves"),
                    )
                )
        if figures:
            title = f"Latency, {variant.replace('_', ' ')}"
            note = "Medians of the slowest caller, with 95 % intervals."
            sections.append(Section(title, [note], figures))
    return sections


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


def embeddings(runs: Sequence[Run], _: Options) -> list[Section]:
    """ddp_rpc: epochs, and the phases of a batch."""
    sections = []
    found = dots(runs, "Epoch", "p50 (ms)", "epoch_time_p50_s", "epoch_time_ci95_s", 1e3)
    if found:
        sections.append(Section("Time of an epoch", ["With 95 % intervals."], found))
    names = ("lookup", "forward", "backward", "exchange", "step")
    stacked = _stacked(runs, "A batch", [(name, (f"{name}_s",)) for name in names])
    if stacked:
        note = "Means over trainers and batches, so that they add up."
        sections.append(Section("Where a batch's time goes", [note], stacked))
    return sections + ratios(runs, "Against the original")


def servers(runs: Sequence[Run], _: Options) -> list[Section]:
    """parameter_server: step time by route, and forward and backward of all trainers."""
    sections = []
    found = dots(runs, "Step time", "p50 (ms)", "step_time_p50_s", "step_time_ci95_s", 1e3)
    if found:
        sections.append(Section("Step time by route", ["With 95 % intervals."], found))
    parts = [(name, ("trainers", "all", name, "p50_s")) for name in ("forward", "backward")]
    stacked = _stacked(runs, "Forward and backward", parts)
    if stacked:
        note = "Medians over all trainers. Gradients are exchanged within the backward pass."
        sections.append(Section("Where a step's time goes", [note], stacked))
    return sections + ratios(runs, "Against the original")


def updates(runs: Sequence[Run], _: Options) -> list[Section]:
    """batch_update_ps: updates a second."""
    found = dots(runs, "Updates a second", "updates/s", "updates_per_s", "updates_per_s_ci95")
    section = [Section("Throughput", ["With 95 % intervals."], found)] if found else []
    return section + ratios(runs, "Against the original")


def break_even(runs: Sequence[Run], _: Options) -> list[Section]:
    """compile_sweep: seconds over steps, eager and compiled; where they cross compiling pays."""
    sections = []
    found = dots(
        runs, "Speed-up", "times as fast as eager", "vs_eager", "vs_eager_bounds", reference=1.0
    )
    if found:
        sections.append(Section("Against eager of the same strategy", [SPEED_UP], found))
    panel = ("model", "dtype", "strategy")
    panels = grouped(
        runs,
        lambda case: tuple(text(case.key.get(name), 40) for name in panel),
        lambda case: _costs(case) is not None,
    )
    figures: list[Figure] = []
    for shown, entries in list(panels.items())[:MAX_FIGURES]:
        known = [(run, case, costs) for run, case in entries if (costs := _costs(case))][:SERIES]
        paid = [cost / (eager - step) for _, _, (cost, eager, step) in known if eager > step]
        last = 10.0 ** math.ceil(math.log10(max(100.0, 3 * min(max(paid, default=1000), 1e6))))
        steps = [float(x) for x in np.geomspace(1, last, 60)]
        names = series_labels([(run, rest(case, *panel, "optimize_ddp")) for run, case, _ in known])
        lines: list[Line] = []
        marks = []
        eagers: dict[str, float] = {}
        for i, ((run, case, (cost, eager, step)), name) in enumerate(
            zip(known, names, strict=True)
        ):
            if len(known) == 1:
                name = text(case.key.get("compile_backend"), 40)
            eagers.setdefault(run.label, eager)
            after = [max(cost, 0.0) + n * step for n in steps]
            lines.append(Line(name, i, steps, after, formula=True))
            if eager > step:
                crossing = max(1.0, cost / (eager - step))
                if crossing <= last:
                    marks.append(
                        (f"{name}: paid back after {math.ceil(crossing):,} steps", crossing)
                    )
        for i, (label, eager) in enumerate(eagers.items()):
            name = f"eager, {label}" if len(eagers) > 1 else "eager"
            lines.append(Line(name, len(known) + i, steps, [n * eager for n in steps], ideal=True))
        title = " ".join(word for word in shown if word != "-")
        said = "; ".join(label for label, _ in marks) or "compiling never pays here"
        figures.append(
            Curves(
                title,
                f"Break-even of {title}: {said}.",
                "steps",
                "seconds",
                lines,
                x_ticks=[10.0**k for k in range(round(math.log10(last)) + 1)],
                marks=marks,
                note="" if marks else "Compiling never pays here: its steps are not faster.",
            )
        )
    if figures:
        note = (
            "Seconds after so many steps: compiling first, or not at all. A dashed line down "
            "is where compiling has paid for itself."
        )
        sections.append(Section("Break-even of compiling", [note], figures))
    reasons = [
        [run.label, case.label, text(reason, 300), text(count, 20)]
        for run, case in joined(runs)
        if isinstance(case.metrics.get("graph_breaks"), dict)
        for reason, count in case.metrics["graph_breaks"].items()
    ]
    if reasons:
        note = shortened(MAX_ROWS, len(reasons), "reasons").replace("drawn", "shown")
        header = ["report", "case", "reason", "times"]
        table = Table("Graph breaks", header, reasons[:MAX_ROWS], note=note)
        sections.append(Section("Why graphs break", [], [], [table]))
    return sections


def _costs(case: Case) -> tuple[float, float, float] | None:
    """(seconds that compiling costs, eager step, compiled step) of a compiled case."""
    names = ("compile_cost_s", "vs_eager", "step_time_p50_s")
    cost, ratio, step = (number(case.metrics.get(name)) for name in names)
    if cost is None or ratio is None or step is None or ratio <= 0 or step <= 0:
        return None
    return cost, ratio * step, step


def harness(runs: Sequence[Run], _: Options) -> list[Section]:
    """calibrate: ratios that should be 1, and what a run of so many seconds can tell apart."""
    sections = ratios(runs, "Reported against a bare loop")

    def percent(case: Case) -> Any:
        y = number(case.metrics.get("resolution"))
        return (y * 100, None, None) if y is not None and y > 0 else None

    entries = [entry for entries in grouped(runs, lambda _: 0).values() for entry in entries]
    lines = _curves(entries, "seconds", ["mode"], percent)
    if lines:
        title = "Smallest difference that one run shows"
        figure = Curves(
            title, _summary(title, lines, "%"), "seconds", "difference (%)", lines[:SERIES]
        )
        sections.append(Section("Resolution", [], [figure]))
    return sections


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


FIGURES: dict[str, Callable[[Sequence[Run], Options], list[Section]]] = {
    "ddp_sweep": scaling,
    "compile_sweep": break_even,
    "collectives": busbw,
    "p2p_matrix": link_maps,
    "rpc_latency": calls,
    "ddp_rpc": embeddings,
    "parameter_server": servers,
    "batch_update_ps": updates,
    "calibrate": harness,
}


# -- all of it -------------------------------------------------------------------------------------


def tables_of(runs: Sequence[Run]) -> list[Table]:
    """The tables of one benchmark. runs: all of the same benchmark."""
    entries = joined(runs)
    benchmark = runs[0].benchmark
    hidden = HIDDEN_KEYS.get(benchmark, ())
    known = TABLES.get(benchmark, {})
    tables = [case_table(title, entries, columns, hidden) for title, columns in known.items()]
    found = [table for table in tables if table is not None]
    if found or benchmark == "p2p_matrix":
        return found
    columns = all_metrics(entries)
    everything = case_table("Metrics", entries, columns[: MAX_METRICS + 1], hidden)
    if everything and len(columns) > MAX_METRICS + 1:
        note = f"The first {MAX_METRICS} of {len(columns) - 1:,} metrics. {everything.note}"
        everything = dataclasses.replace(everything, note=note.strip())
    return [everything] if everything else []


def constants(runs: Sequence[Run]) -> str:
    """What all cases of a benchmark have in common, in one line."""
    _, alike = varying(case for run in runs for case in run.cases)
    return ", ".join(f"{text(name, 40).replace('_', ' ')} {shown}" for name, shown in alike.items())


def sections_of(runs: Sequence[Run], options: Options) -> list[Section]:
    """Everything about one benchmark. runs: all of the same benchmark."""
    benchmark = runs[0].benchmark
    draw = FIGURES.get(benchmark)
    sections = draw(runs, options) if draw else []
    if benchmark not in NO_SPREADS:
        sections += spreads(runs)
        # a synchronised step makes all ranks look alike; this does not
        sections += spreads(runs, "Local compute by rank", lambda case: case.local, least=2)
    tables = tables_of(runs)
    return [*sections, Section("Tables", [], [], tables)] if tables else sections
