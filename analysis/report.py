#!/usr/bin/env python3
# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "numpy>=1.26", "pandas>=2.1", "tabulate>=0.9", "matplotlib>=3.8", "jinja2>=3.1"
# ]
# ///
"""One page from any reports: summary, environment, figures, tables.

A single HTML file that needs no network and runs no script, light or dark as the reader has it.
Reports of the same benchmark are drawn over each other. A script that this one does not know is
shown as well: its metrics as tables, and the time of each case with its interval.

    python analysis/report.py report.jsonl -o report.html
    python analysis/report.py before.jsonl after.jsonl -o report.html
    python analysis/report.py report.jsonl --markdown

Everything in a report is shown as text; nothing of it is executed. BSD-3-Clause.
"""

import math
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis import show
from analysis.differences import describe_environment, differences
from analysis.figures import draw, svg
from analysis.figures import link_heatmap as link_heatmap  # benchmarks/p2p_matrix.py --plot
from analysis.load import Row, Run, by_benchmark, find, load, rows_of
from common.cli import Parser, refuse, show_size
from common.stats import median_interval

FRACTIONS = ("_rel", "efficiency", "overlap", "mfu")


class Table(NamedTuple):
    """marks: rows that stand out, and why; words: columns of them, before those of numbers."""

    title: str
    header: Sequence[Any]
    rows: Sequence[Sequence[Any]]
    marks: dict[int, str]
    words: int = 100


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """What each report holds, and why cases of it failed."""
    rows, failed, bad = [], [], {}
    for i, run in enumerate(runs):
        e, cases = run.environment, run.rows.values()
        counts = Counter(re.split("[:,]", case.check)[0] for case in cases)
        words = ", ".join(f"{n} {check}" for check, n in counts.items()) or "no case"
        where = f"ranks: {e.get('world_size', '?')}, nodes: {e.get('num_nodes', '?')}"
        where += f", {describe_environment(run).get('devices', '')}"
        started = run.started_at[:16].replace("T", " ")
        rows.append([run.label, run.benchmark, run.status, words, where, e.get("torch"), started])
        failed += [[run.label, case.name, case.check] for case in cases if case.failed]
        if run.status != "complete" or counts["failed"]:
            bad[i] = "failed"
    heads = ("report", "benchmark", "status", "cases", "where", "PyTorch", "started")
    tables = [Table("Reports", heads, rows, bad)]
    if failed:
        tables.append(Table("Failed cases", ("report", "case", "reason"), failed, {}))
    return {"title": "Summary", "tables": tables}


def environment(runs: Sequence[Run]) -> dict[str, Any]:
    """What the reports were measured on, and what differs."""
    columns = [
        {"command": " ".join(map(str, run.argv))} | describe_environment(run) for run in runs
    ]
    names = dict.fromkeys(name for column in columns for name in column if name != "topologies")
    rows = [[name, *(column.get(name, "-") for column in columns)] for name in names]
    differ = {i: "differs" for i, row in enumerate(rows) if len(set(row[1:])) > 1}
    title = f"Environment of each report: {len(differ)} of {len(rows)} fields differ"
    table = Table(title, ["field", *(run.label for run in runs)], rows, differ)
    loud = []
    for name, same in by_benchmark(runs).items():
        found = differences(same[:1], same[1:]) if len(same) > 1 else []
        if hardware := ", ".join(d.field for d in found if d.hardware):
            what = f"The hardware of the {name} reports differs ({hardware})"
            loud.append(f"{what}: they do not compare one program with another.")
    for run in runs:
        lines = run.environment.get("differences") or []
        loud += [f"Nodes differ, {run.label}: {line}" for line in lines]
    return {"title": "Environment", "loud": loud, "tables": [table]}


def own_time(row: Row) -> dict[str, Any]:
    """The median of a case's step with its interval, where none of its metrics is about it."""
    step = row.measure.replace(" ", "_")
    numbers = [value for value in row.metrics.values() if show.is_number(value)]
    told = any(name.startswith(step) for name in row.metrics)
    if not row.times_s or told or any(math.isclose(number, row.time_s) for number in numbers):
        return {}
    ends = median_interval(row.times_s)
    return {f"{step}_time_p50_s": row.time_s, f"{step}_time_ci95_s": ends}


def benchmark(runs: Sequence[Run]) -> dict[str, Any]:
    """Every number of every case. New metrics, and new scripts, get columns."""
    cases = rows_of(runs)
    metrics = [show.plain(row.metrics) for row in cases]
    every = dict.fromkeys(name for numbers in metrics for name in numbers)
    names = [n for n in every if not any(show.is_interval(m.get(n)) for m in metrics)]
    left = [("case", [row.name for row in cases])]
    if len(runs) > 1:
        left.append(("report", [run.label for run in runs for _ in run.rows]))
    header, cells = zip(*left, *(column(name, metrics) for name in names), strict=True)
    failed = {i: "failed" for i, row in enumerate(cases) if row.failed}
    table = Table("Metrics", header, [*zip(*cells, strict=True)], failed, len(left))
    keys = [row.key for row in cases] or [{}]
    alike = [(k, v) for k, v in keys[0].items() if all(key.get(k) == v for key in keys)]
    words = ", ".join(show.show_value(name, value) for name, value in alike)
    quiet = [f"In all cases: {words or 'nothing'}."]
    return {"title": runs[0].benchmark, "quiet": quiet, "runs": runs, "tables": [table]}


def column(name: str, metrics: Sequence[dict[str, Any]]) -> tuple[str, list[str]]:
    """A metric's head, with its unit by the end of its name, and its cells, with intervals."""
    end, unit = show.unit_of(name)
    scale = 1.0
    if name.endswith(FRACTIONS):
        unit, scale = "%", 100.0
    elif unit == "s":
        numbers = [abs(m[name]) for m in metrics if show.is_number(m.get(name))]
        unit = show.time_unit(max(numbers, default=1))
        scale = 1 / show.UNITS[unit]

    def cell(m: dict[str, Any]) -> str:
        value, ends = m.get(name, "-"), show.interval_of(name, m)
        if not show.is_number(value):
            return str(value)
        if unit == "bytes":
            return show_size(value)
        text = f"{value * scale:.4g}" if isinstance(value, float) else f"{value:,}"
        return f"{text} ({ends[0] * scale:.4g} to {ends[1] * scale:.4g})" if ends else text

    head = name.removesuffix(end).replace("_", " ")
    head = f"{head} ({unit})" if unit not in ("", "bytes") else name.replace("_", " ")
    return head, [cell(m) for m in metrics]


def as_markdown(section: dict[str, Any]) -> str:
    lines = (*section.get("loud", ()), *section.get("quiet", ()))
    blocks = [f"## {show.markdown(section['title'])}", *(show.markdown(s, 1000) for s in lines)]
    for table in section["tables"]:
        right = range(table.words, len(table.header))
        text = show.show_table(table.header, table.rows, right, "markdown")
        blocks += [f"### {table.title}", text]
    return "\n\n".join(blocks)


def as_page(sections: Sequence[dict[str, Any]]) -> str:
    """The document; every string of a report is cleaned and escaped where it is put in."""
    jinja = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else show.clean(value, 500),
    )
    jinja.globals["draw"] = draw
    jinja.filters["svg"] = lambda figure: Markup(svg(figure))  # matplotlib escapes its texts
    return jinja.get_template("report.html.j2").render(sections=sections)


def main() -> int:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("reports", nargs="+", metavar="REPORT", help="reports, folders of reports, or patterns")
    add("-o", "--output", metavar="PAGE.html", help="the page to write")
    add("--markdown", action="store_true", help="print the tables as Markdown")
    args = parser.parse_args()
    wanted = args.markdown if args.output is None else args.output.endswith(".html")
    if not wanted:
        refuse("expected a page to write, e.g. -o report.html, or --markdown")
    try:
        if args.output is not None:
            show.check_output(args.output, (".html",), find(args.reports))
        runs = load(args.reports)
        names = [Path(run.label).stem for run in runs]
        for run, name in zip(runs, names, strict=True):
            run.label = show.clean(name if names.count(name) == 1 else run.label, 60)
        for row in rows_of(runs):
            row.metrics = own_time(row) | row.metrics
        parts = map(benchmark, by_benchmark(runs).values())
        sections = [summary(runs), environment(runs), *parts]
        if args.output is not None:
            Path(args.output).write_text(as_page(sections), encoding="utf-8")
    except (ValueError, OSError) as error:
        refuse(show.clean(error, 1000))
    if args.markdown:
        show.put("\n\n".join(map(as_markdown, sections)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
