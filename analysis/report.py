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
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.compare import conclude
from analysis.figures import draw
from analysis.figures import link_heatmap as link_heatmap  # benchmarks/p2p_matrix.py --plot
from analysis.load import Run, load
from analysis.show import (
    UNITS,
    case_names,
    clean,
    flat,
    interval_of,
    is_interval,
    is_number,
    markdown,
    markdown_table,
    show_time,
    show_value,
)
from analysis.verdicts import HARDWARE, fields
from common.cli import Parser, list_of, refuse, show_size

MARK = '<meta name="generator" content="torchrun-bench report">'
MAX_ROWS, MAX_COLUMNS = 200, 12
# what a metric's name ends in: its unit, and what its value is multiplied by
SUFFIXES = (
    *(("_gb_per_s", "GB/s", 1.0), ("_gbps", "GB/s", 1.0), ("_mb_per_s", "MB/s", 1.0)),
    *(("_per_s", "1/s", 1.0), ("_gib", "GiB", 1.0), ("_rel", "%", 100.0)),
)
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
    header: list[str]
    rows: list[list[str]]
    right: set[int] = field(default_factory=set)
    marked: set[int] = field(default_factory=set)
    mark: str = "failed"
    note: str = ""

    def __post_init__(self) -> None:
        self.header = [clean(cell, 100) for cell in self.header]
        self.rows = [[clean(cell, 500) for cell in row] for row in self.rows]

    def markdown(self) -> str:
        return f"### {self.title}\n\n{markdown_table(self.header, self.rows, len(self.right))}"


# -- what stands above the benchmarks --------------------------------------------------------------


def summary(runs: dict[str, Run]) -> Table:
    rows, bad = [], set()
    for i, (label, run) in enumerate(runs.items()):
        checks = [row.check.partition(":")[0].partition(",")[0] for row in run.rows.values()]
        counts = [f"{checks.count(c)} {c}" for c in ("passed", "failed", "skipped") if c in checks]
        if "failed" in checks or run.report.status != "complete":
            bad.add(i)
        e = run.report.environment
        where = f"ranks: {e.get('world_size', '?')}, nodes: {e.get('num_nodes', '?')}"
        devices = clean(fields(run).get("devices", ""), 80)
        about = [run.report.benchmark, run.report.status, ", ".join(counts) or "no case"]
        started = run.report.started_at[:16].replace("T", " ")
        rest = [f"{where}, {devices}", e.get("torch", "-"), started, took(run)]
        rows.append([label, *(clean(cell, 100) for cell in (*about, *rest))])
    header = ["report", "benchmark", "status", "cases", "where", "PyTorch", "started", "took"]
    return Table("Reports", header, rows, marked=bad)


def took(run: Run) -> str:
    try:
        start, end = run.report.started_at, run.report.finished_at or ""
        seconds = (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds()
    except (ValueError, TypeError):
        return "-"
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.0f} s"


def failures(runs: dict[str, Run]) -> Table:
    rows = []
    for label, run in runs.items():
        names = case_names([row.key for row in run.rows.values()])
        for name, row in run.rows.items():
            if row.check.startswith("failed"):
                rows.append([label, names[name], clean(row.check.removeprefix("failed: "), 500)])
    note = f"{MAX_ROWS} of {len(rows)} are listed." if len(rows) > MAX_ROWS else ""
    header = ["report", "case", "reason"]
    return Table("Failed cases", header, rows[:MAX_ROWS], marked=set(range(MAX_ROWS)), note=note)


def environment(runs: dict[str, Run]) -> Table:
    columns = [fields(run) for run in runs.values()]
    names = [n for n in dict.fromkeys(n for column in columns for n in column) if n != "topologies"]
    rows = [[name, *(clean(column.get(name, "-")) for column in columns)] for name in names]
    marked = {i for i, row in enumerate(rows) if len(set(row[1:])) > 1}
    note = f"{len(marked)} of {len(rows)} fields differ between the reports." if marked else ""
    header = ["field", *runs]
    return Table("Environment of each report", header, rows, set(), marked, "differs", note)


def differing_hardware(group: dict[str, Run]) -> str:
    columns = [fields(run) for run in group.values()]
    return ", ".join(n for n in HARDWARE if len({column.get(n) for column in columns}) > 1)


# -- the tables of a benchmark ---------------------------------------------------------------------


def tables(group: dict[str, Run]) -> list[Table]:
    """Every number of every case; new metrics, and new scripts, get columns by themselves."""
    entries = [(label, *item) for label, run in group.items() for item in run.rows.items()]
    names = case_names([row.key for _, _, row in entries])
    left = [[names[name], *([label] if len(group) > 1 else [])] for label, name, _ in entries]
    found = [flat(row.metrics) for _, _, row in entries]
    if not any(found):
        found = [{row.measure or "time_s": row.time_s} for _, _, row in entries]
    columns = [n for n in dict.fromkeys(n for metrics in found for n in metrics)]
    columns = [n for n in columns if not all(is_interval(m[n]) for m in found if n in m)]
    header = ["case", *(["report"] if len(group) > 1 else [])]
    failed = {i for i, (_, _, row) in enumerate(entries) if row.check.startswith("failed")}
    note = f"{MAX_ROWS} of {len(left)} rows are shown." if len(left) > MAX_ROWS else ""
    made = []
    for i in range(0, len(columns), MAX_COLUMNS):
        some = [column(name, found) for name in columns[i : i + MAX_COLUMNS]]
        rows = [[*left[j], *(cells[j] for _, cells in some)] for j in range(len(left))][:MAX_ROWS]
        heads = [*header, *(head for head, _ in some)]
        right = set(range(len(header), len(heads)))
        made.append(Table("Metrics", heads, rows, right, failed, note=note))
    return made


def column(name: str, metrics: Sequence[dict[str, Any]]) -> tuple[str, list[str]]:
    """A metric's head, with its unit by the end of its name, and its cells, with intervals."""
    numbers = [abs(m[name]) for m in metrics if is_number(m.get(name))]
    words = name.replace("_", " ")
    end, unit, scale = next((s for s in SUFFIXES if name.endswith(s[0])), ("", "", 1.0))
    if not unit and name.endswith("_s") and numbers:
        end, unit = "_s", show_time(max(numbers)).rpartition(" ")[2]
        scale = 1 / dict((u, f) for f, u in UNITS)[unit]
    elif name in FRACTIONS:
        unit, scale = "%", 100.0
    cells = []
    for m in metrics:
        value, ci = m.get(name), interval_of(name, m)
        if value is None or not is_number(value):
            cells.append("-" if value is None else clean(value, 60))
        elif name.endswith("_bytes"):
            cells.append(show_size(value))
        else:
            cell = f"{value * scale:.4g}" if isinstance(value, float) else f"{value:,}"
            half = f" ±{(ci[1] - ci[0]) / 2 * scale:.2g}" if ci else ""
            cells.append(cell + half)
    return f"{words[: len(words) - len(end)]} ({unit})" if unit else words, cells


def constants(group: dict[str, Run]) -> str:
    """What is alike in the keys of all cases."""
    keys = [row.key for run in group.values() for row in run.rows.values()]
    alike = (
        {k: v for k, v in keys[0].items() if all(key.get(k) == v for key in keys)} if keys else {}
    )
    return ", ".join(clean(show_value(name, value), 60) for name, value in alike.items())


# -- the page --------------------------------------------------------------------------------------


def page(runs: dict[str, Run], title: str | None) -> str:
    groups = by_benchmark(runs)
    sections, count = [], 0
    for name, group in groups.items():
        figures = []
        for drawing in draw(
            list(group.values()), {run.path: label for label, run in group.items()}
        ):
            count += 1
            figures.append((drawing, Markup(drawing.svg(count))))  # matplotlib escapes its texts
        section = {"name": clean(name, 80), "figures": figures, "tables": tables(group)}
        sections.append(section | {"constants": constants(group)})
    names = ", ".join(clean(name, 60) for name in groups)
    hardware = [(name, differing_hardware(group)) for name, group in groups.items()]
    environments = {label: run.report.environment for label, run in runs.items()}
    cases = sum(len(run.rows) for run in runs.values())
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    made = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    return made.get_template("report.html.j2").render(
        title=clean(title) if title else f"torchrun-bench: {names}",
        subtitle=f"{len(runs)} report{'s' * (len(runs) != 1)}, {cases} case{'s' * (cases != 1)}",
        summary=summary(runs),
        failures=failures(runs),
        commands=[
            (label, clean(" ".join(map(str, run.report.argv)), 500), clean(run.path))
            for label, run in runs.items()
        ],
        environment=environment(runs),
        hardware=[(clean(name, 80), words) for name, words in hardware if words],
        node_differences=[
            f"{label}: {clean(line, 300)}"
            for label, e in environments.items()
            for line in listed(e.get("differences"))[:20]
        ],
        topologies=[
            (label, "\n".join(clean(line) for line in text[:8000].splitlines()))
            for label, e in environments.items()
            for text in dict.fromkeys(map(str, listed(e.get("topologies"))[:4]))
        ],
        sections=sections,
    )


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def by_benchmark(runs: dict[str, Run]) -> dict[str, dict[str, Run]]:
    groups: dict[str, dict[str, Run]] = {}
    for label, run in runs.items():
        groups.setdefault(run.report.benchmark, {})[label] = run
    return groups


def labels_of(runs: Sequence[Run], given: Sequence[str] | None) -> list[str]:
    """A name a report: what was given, else file names, with folders where they are alike."""
    if given and len(given) != len(runs):
        raise ValueError(f"--labels has {len(given)} names for {len(runs)} reports; give one each")
    names = list(given or [Path(run.path).stem for run in runs])
    if len(set(names)) < len(names):
        names = [run.path for run in runs]
    return [clean(name, 60) for name in names]


def write(path: str, document: str) -> None:
    """Write the page; another kind of file that is there already is left alone."""
    target = Path(path)
    try:
        if target.exists() and target.stat().st_size:
            with target.open(encoding="utf-8", errors="replace") as file:
                if MARK not in file.read(500):
                    refuse(f"-o would overwrite {path}, which is no page of this script")
        part = target.with_name(f".{target.name}.{os.getpid()}")
        part.write_text(document, encoding="utf-8")
        part.replace(target)
    except OSError as error:
        refuse(f"-o {path} cannot be written: {error.strerror}")


def main() -> int:
    args = parse_args()
    try:
        found = load(args.reports)
        runs = dict(zip(labels_of(found, args.labels), found, strict=True))
    except ValueError as error:
        refuse(clean(error, 1000))
    if args.output:
        write(args.output, page(runs, args.title))
        print(f"# {args.output}: {len(runs)} reports", file=sys.stderr)
    if not args.markdown:
        return 0
    blocks = [summary(runs).markdown()]
    blocks += [failures(runs).markdown()] if failures(runs).rows else []
    for name, group in by_benchmark(runs).items():
        blocks += [f"## {markdown(name)}", f"In all cases: {markdown(constants(group), 1000)}."]
        blocks += [table.markdown() for table in tables(group)]
    return conclude("\n\n".join(blocks), (), ())


if __name__ == "__main__":
    sys.exit(main())
