#!/usr/bin/env python3
"""One page from any reports: summary, environment, figures, tables. Reads what --json wrote.

Writes a single HTML file that needs no network and runs no script, light or dark as the reader
has it. Reports of the same benchmark are drawn over each other. A script that this one does not
know is shown as well: its metrics as tables, and the time of each case with its interval.

    python analysis/report.py report.jsonl -o report.html
    python analysis/report.py before.jsonl after.jsonl --labels before,after -o report.html
    python analysis/report.py report.jsonl --markdown

Needs no GPU, no torchrun and no torch. Everything in a report is shown as text; nothing of it is
executed. BSD-3-Clause.
"""

import argparse
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.figures import draw
from analysis.figures import link_heatmap as link_heatmap  # benchmarks/p2p_matrix.py --plot
from analysis.load import Run, by_benchmark, load, named
from analysis.show import (
    UNITS,
    clean,
    emit,
    flat,
    interval_of,
    is_interval,
    is_number,
    markdown,
    markdown_table,
    show_value,
    time_unit,
    unit_of,
)
from analysis.verdicts import HARDWARE, fields
from common.cli import Parser, list_of, refuse, show_size
from common.report import Report

MARK = '<meta name="generator" content="torchrun-bench report">'
MAX_ROWS, MAX_COLUMNS = 200, 12
FRACTIONS = ("efficiency", "overlap", "mfu")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("reports", nargs="+", metavar="REPORT", help="reports, folders of reports, or patterns")
    add("-o", "--output", metavar="PATH", help="the page to write, e.g. report.html")
    add("--markdown", action="store_true", help="print the tables as Markdown")
    names = "what to call the reports; a list, one name each (default: their file names)"
    add("--labels", type=list_of(str), metavar="NAME", help=names)
    add("--title", metavar="TEXT", help="the page's heading (default: the benchmarks' names)")
    args = parser.parse_args(argv)
    if not args.output and not args.markdown:
        refuse("nothing to do; give a page to write, -o report.html, or --markdown")
    return args


@dataclass
class Table:
    """right: columns of numbers; marked: rows that stand out, as `failed` or `differs`."""

    title: str
    header: Sequence[Any]
    rows: Sequence[Sequence[Any]]
    right: Sequence[int] = ()
    marked: Sequence[int] = ()
    mark: str = "failed"

    def __post_init__(self) -> None:
        self.note = f"{MAX_ROWS} of {len(self.rows)} are shown." * (len(self.rows) > MAX_ROWS)
        self.header = [clean(cell, 100) for cell in self.header]
        self.rows = [[clean(cell, 300) for cell in row] for row in self.rows[:MAX_ROWS]]

    def markdown(self) -> str:
        return f"### {self.title}\n\n{markdown_table(self.header, self.rows, self.right)}"


# -- what stands above the benchmarks --------------------------------------------------------------


def summary(runs: Sequence[Run]) -> Table:
    rows, bad = [], []
    for i, run in enumerate(runs):
        report, e = run.report, run.report.environment
        checks = [row.check.partition(":")[0].partition(",")[0] for row in run.rows.values()]
        counts = [f"{checks.count(c)} {c}" for c in ("passed", "failed", "skipped") if c in checks]
        bad += [i] if "failed" in checks or report.status != "complete" else []
        where = f"ranks: {e.get('world_size', '?')}, nodes: {e.get('num_nodes', '?')}"
        where += f", {clean(fields(run).get('devices', ''), 80)}"
        about = [report.benchmark, report.status, ", ".join(counts) or "no case", where]
        started = report.started_at[:16].replace("T", " ")
        rows.append([run.label, *about, e.get("torch", "-"), started, took(report)])
    header = ["report", "benchmark", "status", "cases", "where", "PyTorch", "started", "took"]
    return Table("Reports", header, rows, marked=bad)


def took(report: Report) -> str:
    texts = [report.started_at, report.finished_at]
    ends = pd.to_datetime(texts, format="ISO8601", errors="coerce", utc=True)
    seconds = (ends[1] - ends[0]).total_seconds()
    if isnan(seconds):
        return "-"
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.0f} s"


def failures(runs: Sequence[Run]) -> Table:
    failed = [(run, name, row.check) for run, name, row in named(runs) if row.failed]
    rows = [[run.label, name, check.removeprefix("failed: ")] for run, name, check in failed]
    return Table("Failed cases", ["report", "case", "reason"], rows, marked=range(len(rows)))


def environment(runs: Sequence[Run]) -> Table:
    columns = [fields(run) for run in runs]
    names = [n for n in dict.fromkeys(n for column in columns for n in column) if n != "topologies"]
    rows = [[name, *(column.get(name, "-") for column in columns)] for name in names]
    differ = [i for i, row in enumerate(rows) if len(set(row[1:])) > 1]
    title = "Environment of each report"
    title += f": {len(differ)} of {len(rows)} fields differ" if differ else ""
    return Table(title, ["field", *(run.label for run in runs)], rows, (), differ, "differs")


def differing_hardware(runs: Sequence[Run]) -> str:
    columns = [fields(run) for run in runs]
    return ", ".join(n for n in HARDWARE if len({column.get(n) for column in columns}) > 1)


# -- the tables of a benchmark ---------------------------------------------------------------------


def tables(runs: Sequence[Run]) -> list[Table]:
    """Every number of every case; new metrics, and new scripts, get columns by themselves."""
    cases = list(named(runs))
    keys = 1 + (len(runs) > 1)  # columns before the metrics
    metrics = [flat(row.metrics) for _, _, row in cases]
    if not any(metrics):
        metrics = [{row.measure or "time_s": row.time_s} for _, _, row in cases]
    columns = [
        column(name, metrics)
        for name in dict.fromkeys(name for numbers in metrics for name in numbers)
        if not all(is_interval(numbers[name]) for numbers in metrics if name in numbers)
    ]
    failed = [i for i, (_, _, row) in enumerate(cases) if row.failed]
    made = []
    for i in range(0, len(columns), MAX_COLUMNS):
        heads, cells = zip(*columns[i : i + MAX_COLUMNS], strict=True)
        header = [*["case", "report"][:keys], *heads]
        left = [[name, run.label][:keys] for run, name, _ in cases]
        rows = [
            [*words, *numbers]
            for words, numbers in zip(left, zip(*cells, strict=True), strict=True)
        ]
        made.append(Table("Metrics", header, rows, range(keys, len(header)), failed))
    return made


def column(name: str, metrics: Sequence[dict[str, Any]]) -> tuple[str, list[str]]:
    """A metric's head, with its unit by the end of its name, and its cells, with intervals."""
    numbers = [abs(m[name]) for m in metrics if is_number(m.get(name))]
    end, unit = unit_of(name)
    if unit == "s" and numbers:
        unit = time_unit(max(numbers))
    unit = "%" if name in FRACTIONS else unit
    scale = 100.0 if unit == "%" else 1 / UNITS.get(unit, 1.0)
    cells = []
    for m in metrics:
        value, ci = m.get(name), interval_of(name, m)
        if value is None or not is_number(value):
            cells.append("-" if value is None else clean(value, 60))
        elif unit == "bytes":
            cells.append(show_size(value))
        else:
            cell = f"{value * scale:.4g}" if isinstance(value, float) else f"{value:,}"
            cells.append(cell + (f" ±{(ci[1] - ci[0]) / 2 * scale:.2g}" if ci else ""))
    head = name.removesuffix(end).replace("_", " ")
    return f"{head} ({unit})" if unit not in ("", "bytes") else name.replace("_", " "), cells


def constants(runs: Sequence[Run]) -> str:
    """What is alike in the keys of all cases."""
    keys = [row.key for run in runs for row in run.rows.values()] or [{}]
    alike = [(k, v) for k, v in keys[0].items() if all(key.get(k) == v for key in keys)]
    return ", ".join(clean(show_value(name, value), 60) for name, value in alike)


# -- the page --------------------------------------------------------------------------------------


def page(runs: Sequence[Run], title: str | None) -> str:
    sections, numbers = [], itertools.count()
    groups = by_benchmark(runs)
    for name, group in groups.items():
        section = {"name": clean(name, 80), "tables": tables(group)}
        section |= {"constants": constants(group), "hardware": differing_hardware(group)}
        # matplotlib escapes its texts
        figures = [(drawing, Markup(drawing.svg(next(numbers)))) for drawing in draw(group)]
        sections.append(section | {"figures": figures})
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    made = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    made.filters |= {"clean": clean, "listed": lambda v: v if isinstance(v, list) else []}
    return made.get_template("report.html.j2").render(
        title=title or f"torchrun-bench: {', '.join(groups)}",
        cases=sum(len(run.rows) for run in runs),
        runs=runs,
        summary=summary(runs),
        failures=failures(runs),
        environment=environment(runs),
        sections=sections,
    )


def set_labels(runs: Sequence[Run], given: Sequence[str] | None) -> None:
    """A name a report: what was given, else file names, with folders where they are alike."""
    if given and len(given) != len(runs):
        raise ValueError(f"--labels has {len(given)} names for {len(runs)} reports; give one each")
    names = list(given or [Path(run.path).stem for run in runs])
    for run, name in zip(runs, names, strict=True):
        run.label = clean(name if names.count(name) == 1 else run.path, 60)


def write(path: str, document: str) -> None:
    """Write the page; another kind of file that is there already is left alone."""
    target = Path(path)
    try:
        old = target.read_text(errors="replace") if target.exists() else ""
        if old and MARK not in old[:500]:
            refuse(f"-o would overwrite {path}, which is no page of this script")
        target.write_text(document, encoding="utf-8")
    except OSError as error:
        refuse(f"-o {path} cannot be written: {error.strerror}")


def main() -> int:
    args = parse_args()
    try:
        runs = load(args.reports)
        set_labels(runs, args.labels)
    except ValueError as error:
        refuse(clean(error, 1000))
    if args.output:
        write(args.output, page(runs, args.title))
        print(f"# {args.output}: {len(runs)} reports", file=sys.stderr)
    if args.markdown:
        blocks = [table.markdown() for table in (summary(runs), failures(runs)) if table.rows]
        for name, group in by_benchmark(runs).items():
            words = f"In all cases: {markdown(constants(group), 1000)}."
            blocks += [f"## {markdown(name)}", words, *(t.markdown() for t in tables(group))]
        emit("\n\n".join(blocks))
    return 0


if __name__ == "__main__":
    sys.exit(main())
