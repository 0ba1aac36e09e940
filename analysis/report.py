#!/usr/bin/env python3
"""One page from any reports: summary, environment, figures, tables.

A single HTML file that needs no network and runs no script, light or dark as the reader has it.
Reports of the same benchmark are drawn over each other. A script that this one does not know is
shown as well: its metrics as tables, and the time of each case with its interval.

    python analysis/report.py report.jsonl -o report.html
    python analysis/report.py before.jsonl after.jsonl -o report.html
    python analysis/report.py report.jsonl --markdown

Everything in a report is shown as text; nothing of it is executed. BSD-3-Clause.
"""

import itertools
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis import show
from analysis.figures import draw, svg
from analysis.figures import link_heatmap as link_heatmap  # benchmarks/p2p_matrix.py --plot
from analysis.load import Run, by_benchmark, load, rows_of
from analysis.verdicts import differences, fields
from common.cli import Parser, refuse, show_size

MAX_ROWS = 200
FRACTIONS = ("_rel", "efficiency", "overlap", "mfu")


@dataclass
class Table:
    """left: columns of words, before those of numbers; marked: rows that stand out, as `mark`."""

    title: str
    header: Sequence[Any]
    rows: Sequence[Sequence[Any]]
    left: int = 100
    marked: Sequence[int] = ()
    mark: str = "failed"

    def __post_init__(self) -> None:
        self.title += f" ({MAX_ROWS} of {len(self.rows)} rows)" * (len(self.rows) > MAX_ROWS)
        cells = (self.header, *self.rows[:MAX_ROWS])
        self.header, *self.rows = [[show.clean(cell, 300) for cell in row] for row in cells]

    def markdown(self) -> str:
        right = range(self.left, len(self.header))
        return f"### {self.title}\n\n{show.show_table(self.header, self.rows, right, 'markdown')}"


def summary(runs: Sequence[Run]) -> list[Table]:
    rows: list[list[Any]] = []
    failed: list[list[str]] = []
    for run in runs:
        e, cases = run.environment, run.rows.values()
        counts = Counter(case.check.split(":")[0].split(",")[0] for case in cases)
        words = ", ".join(f"{n} {check}" for check, n in counts.items()) or "no case"
        where = f"ranks: {e.get('world_size', '?')}, nodes: {e.get('num_nodes', '?')}"
        where += f", {show.clean(fields(run).get('devices', ''), 80)}"
        started = run.started_at[:16].replace("T", " ")
        rows.append([run.label, run.benchmark, run.status, words, where, e.get("torch"), started])
        failed += [[run.label, case.name, case.check] for case in cases if case.failed]
    bad = [i for i, run in enumerate(runs) if run.status != "complete" or "failed" in rows[i][3]]
    names = ("report", "benchmark", "status", "cases", "where", "PyTorch", "started")
    tables = [Table("Reports", names, rows, marked=bad)]
    if failed:
        heads = ("report", "case", "reason")
        tables.append(Table("Failed cases", heads, failed, marked=range(len(failed))))
    return tables


def environment(runs: Sequence[Run]) -> dict[str, Any]:
    """A section: what the reports were measured on, and what differs."""
    columns = [{"command": " ".join(map(str, run.argv))} | fields(run) for run in runs]
    names = [n for n in dict.fromkeys(n for column in columns for n in column) if n != "topologies"]
    rows = [[name, *(column.get(name, "-") for column in columns)] for name in names]
    differ = [i for i, row in enumerate(rows) if len(set(row[1:])) > 1]
    title = f"Environment of each report: {len(differ)} of {len(rows)} fields differ"
    table = Table(title, ["field", *(run.label for run in runs)], rows, 100, differ, "differs")
    loud = []
    for name, same in by_benchmark(runs).items():
        found = differences(same[:1], same[1:]) if len(same) > 1 else []
        if hardware := ", ".join(d["field"] for d in found if d["hardware"]):
            what = f"The hardware of the {show.clean(name)} reports differs ({hardware})"
            loud.append(f"{what}: they do not compare one program with another.")
    for run in runs:
        lines = run.environment.get("differences") or []
        loud += [f"Nodes differ, {run.label}: {show.clean(line, 300)}" for line in lines]
    return {"title": "Environment", "tables": [table], "loud": loud}


def benchmark(runs: Sequence[Run]) -> dict[str, Any]:
    """A section: every number of every case. New metrics, and new scripts, get columns."""
    cases = rows_of(runs)
    metrics = [show.plain(row.metrics) for row in cases]
    if not any(metrics):
        metrics = [{row.measure or "time_s": row.time_s} for row in cases]
    names = list(dict.fromkeys(name for numbers in metrics for name in numbers))
    names = [n for n in names if not any(show.is_interval(m.get(n)) for m in metrics)]
    columns = [column(name, metrics) for name in names]
    left = [("case", [row.name for row in cases])]
    if len(runs) > 1:
        left.append(("report", [run.label for run in runs for _ in run.rows]))
    failed = [i for i, row in enumerate(cases) if row.failed]
    header, cells = zip(*left, *columns, strict=True)
    table = Table("Metrics", header, [*zip(*cells, strict=True)], len(left), failed)
    keys = [row.key for row in cases] or [{}]
    alike = [(k, v) for k, v in keys[0].items() if all(key.get(k) == v for key in keys)]
    words = ", ".join(show.clean(show.show_value(name, value), 60) for name, value in alike)
    name = show.clean(runs[0].benchmark, 80)
    return {"title": name, "tables": [table], "quiet": f"In all cases: {words or 'nothing'}."}


def column(name: str, metrics: Sequence[dict[str, Any]]) -> tuple[str, list[str]]:
    """A metric's head, with its unit by the end of its name, and its cells, with intervals."""
    numbers = [abs(m[name]) for m in metrics if show.is_number(m.get(name))]
    end, unit = show.unit_of(name)
    if unit == "s" and numbers:
        unit = show.time_unit(max(numbers))
    unit = "%" if name.endswith(FRACTIONS) else unit
    scale = 100.0 if unit == "%" else 1 / show.UNITS.get(unit, 1.0)
    cells = []
    for m in metrics:
        value, ci = m.get(name, "-"), show.interval_of(name, m)
        if not show.is_number(value):
            cells.append(show.clean(value, 60))
        elif unit == "bytes":
            cells.append(show_size(value))
        else:
            cell = f"{value * scale:.4g}" if isinstance(value, float) else f"{value:,}"
            cells.append(cell + (f" ±{(ci[1] - ci[0]) / 2 * scale:.2g}" if ci else ""))
    head = name.removesuffix(end).replace("_", " ")
    return f"{head} ({unit})" if unit not in ("", "bytes") else name.replace("_", " "), cells


def page(runs: Sequence[Run]) -> str:
    groups, numbers = by_benchmark(runs), itertools.count()
    sections = [{"title": "Summary", "tables": summary(runs)}, environment(runs)]
    for same in groups.values():
        # matplotlib escapes its texts
        figures = [(figure, Markup(svg(figure, next(numbers)))) for figure in draw(same)]
        sections.append(benchmark(same) | {"figures": figures})
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    title = show.clean(f"torchrun-bench: {', '.join(groups)}")
    template = jinja2.Environment(loader=loader, autoescape=True).get_template("report.html.j2")
    return template.render(title=title, sections=sections)


def main() -> int:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("reports", nargs="+", metavar="REPORT", help="reports, folders of reports, or patterns")
    add("-o", "--output", metavar="PAGE.html", help="the page to write")
    add("--markdown", action="store_true", help="print the tables as Markdown")
    args = parser.parse_args()
    if not (args.output or "no.html" * args.markdown).endswith(".html"):
        refuse("expected a page to write, e.g. -o report.html, or --markdown")
    try:
        runs = load(args.reports)
        names = [Path(run.label).stem for run in runs]
        for run, name in zip(runs, names, strict=True):
            run.label = show.clean(name if names.count(name) == 1 else run.label, 60)
        if args.output:
            Path(args.output).write_text(page(runs), encoding="utf-8")
    except ValueError as error:
        refuse(show.clean(error, 1000))
    except OSError as error:
        refuse(f"-o {args.output} cannot be written: {error.strerror}")
    if args.markdown:
        blocks = [table.markdown() for table in summary(runs)]
        for section in map(benchmark, by_benchmark(runs).values()):
            blocks += [
                f"## {show.markdown(section['title'])}",
                show.markdown(section["quiet"], 1000),
            ]
            blocks += [table.markdown() for table in section["tables"]]
        print("\n\n".join(blocks))
    return 0


if __name__ == "__main__":
    sys.exit(main())
