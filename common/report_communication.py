"""The figures of the benchmarks that only communicate: as data, see common/figures.py."""

import argparse
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from common.figures import SERIES, Curves, Figure, Heat, Line, Section, Table
from common.link_report import KINDS, Link, verdicts
from common.report_figures import MAX_FIGURES, Options, curves_of, grouped, shortened, summary_of
from common.report_runs import Case, Run, number, pair, significant, text
from common.report_tables import MAX_ROWS

LARGEST_MATRIX = 1024  # members of a heat map
LARGEST_VERDICT = 256
SIGMAS = 5.0  # as p2p_matrix.py has by default


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

            lines += curves_of(
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
                    summary_of(f"Bus bandwidth of {name}", named, "GB/s"),
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
            lines = curves_of(entries, "size_bytes", ["operation", "in_flight"], median)
            if lines:
                figures.append(
                    Curves(
                        name,
                        summary_of(f"{variant.replace('_', ' ')} of {name}", lines, "us"),
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
