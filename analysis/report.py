#!/usr/bin/env python3
# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "numpy>=1.26", "pandas>=2.1", "tabulate>=0.9", "matplotlib>=3.8", "jinja2>=3.1"
# ]
# ///
"""One page from any reports: summary, figures, tables, environment.

The page is a single HTML file. It loads nothing from the network and runs no script. Light or dark
follows the browser's setting. It begins with each script's answer, and with what disturbed the run.
Reports of the same benchmark share figures and tables. A new script needs no change here: the page
has its metrics as tables, and the time of each case with its interval.

    python analysis/report.py report.jsonl -o report.html
    python analysis/report.py before.jsonl after.jsonl -o report.html

Everything in a report is shown as text, and nothing of it is executed. BSD-3-Clause.
"""

import math
import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis import show
from analysis.differences import (
    describe_environment,
    differences,
    parts_of,
    resumed_text,
)
from analysis.evidence import is_disturbed, load_of_others, load_text, unfit
from analysis.figures import draw, svg
from analysis.load import Row, Run, Value, by_benchmark, find, load, number_of, rows_of, values_of
from common.cli import Parser, refuse, refuse_foreign, show_size
from common.report import Estimate, digits_of
from common.stats import median

FRACTIONS = (
    *("_rel", "efficiency", "overlap", "mfu", "spread"),
    *("cost", "share", "_idle", "_idle_theory"),
)
DETAILS = ("_p75_s", "_p90_s", "_p95_s", "_p99_s", "_mean_s")  # the last columns
SPREAD = 1000  # a column whose numbers differ by more has a unit in each cell


class Table(NamedTuple):
    title: str
    header: Sequence[Any]
    rows: list[Any]  # lists of cells
    marks: dict[int, str]  # rows that stand out, by number, and why: failed or differs
    words: int = 100  # so many columns of words stand before those of numbers


@dataclass
class Section:
    """A part of the page."""

    title: str
    tables: list[Table]
    answers: list[str] = field(default_factory=list)  # come first
    loud: list[str] = field(default_factory=list)  # warnings above the tables
    quiet: list[str] = field(default_factory=list)  # notes above the tables
    runs: Sequence[Run] = ()  # whose figures are drawn
    folded: bool = False  # whether the page shows its title alone, until it is opened


def summary(runs: Sequence[Run]) -> Section:
    """What the scripts say, what disturbed them, what each report holds, and why cases failed."""
    heads = ("report", "benchmark", "status", "cases", "where", "PyTorch", "started")
    reports = Table("Reports", heads, [], {})
    failures = Table("Failed cases", ("report", "case", "reason"), [], {})
    section = Section("Summary", [reports])
    for i, run in enumerate(runs):
        name = f"{run.label}: " if len(runs) > 1 else ""
        section.answers += [f"{name}{sentence}" for sentence in run.end.get("answer") or []]
        if load_of_others(run):
            line = f"{name}Other processes used {load_text(run)} of a node"
            if is_disturbed(run):
                section.loud.append(f"{line}: the run was disturbed, its times may be too long.")
            else:
                section.quiet.append(f"{line}.")
        counts = Counter(re.split("[:,]", case.check)[0] for case in run.rows.values())
        cases = ", ".join(f"{n} {check}" for check, n in counts.items()) or "no case"
        torch = run.environment.get("torch") or "-"
        started = run.started_at[:16].replace("T", " ")
        row = [run.label, run.benchmark, run.status, cases, where(run), torch, started]
        reports.rows.append(row)
        failed = [case for case in run.rows.values() if case.failed]
        failures.rows.extend([run.label, case.label, case.check] for case in failed)
        if run.status != "complete" or failed:
            reports.marks[i] = "failed"
    if failures.rows:
        section.tables.append(failures)
    for label, why in unfit(runs).items():
        section.loud.append(f"{label} is no evidence in a comparison: {why}.")
    section.loud += warnings(runs)
    return section


def title_of(runs: Sequence[Run]) -> str:
    """`ddp_sweep on H100 (2 ranks), 2026-01-01`: the benchmarks, the machines and the days."""
    benchmarks = show.list_once(run.benchmark for run in runs)
    machines = show.list_once(machine_of(run) for run in runs)
    days = show.list_once(run.started_at[:10] for run in runs if run.started_at)
    parts = [show.clean(f"{benchmarks} on {machines}", 120), show.clean(days, 120)]
    return ", ".join(part for part in parts if part)


def machine_of(run: Run) -> str:
    described = describe_environment(run)
    hosts, devices = described.get("hosts"), described.get("devices")
    return " with ".join(part for part in (hosts, devices) if part) or "an unknown machine"


def where(run: Run) -> str:
    """`ranks: 8, nodes: 1, NVIDIA H100`"""
    described = describe_environment(run)
    names = {"world_size": "ranks: ", "num_nodes": "nodes: ", "devices": ""}
    words = [f"{word}{described[name]}" for name, word in names.items() if name in described]
    return ", ".join(words)


def environment(runs: Sequence[Run]) -> Section:
    """What the reports were measured on. A field has a row for each of its values."""
    columns = []
    for run in runs:
        commands = [run.argv, *(run.part_entry(part, "argv") or () for part in parts_of(run))]
        command = show.list_once(" ".join(str(word) for word in words) for words in commands)
        columns.append({"command": command} | describe_environment(run))
    names = dict.fromkeys(name for column in columns for name in column)
    names.pop("topologies", None)  # a page of text for each node
    rows, differ = [], {}
    differing = 0
    for name in names:
        if name.startswith("variables.TORCHELASTIC_"):  # torchrun sets them for itself
            continue
        reports: dict[str, list[str]] = {}  # value -> those that have it
        for run, column in zip(runs, columns, strict=True):
            reports.setdefault(column.get(name, "-"), []).append(run.label)
        if len(reports) == 1:
            rows.append([name, *reports, "all"])
            continue
        differing += 1
        for value, labels in reports.items():
            differ[len(rows)] = "differs"
            rows.append([name, value, ", ".join(labels)])
    title = f"{differing} of {differing + len(rows) - len(differ)} fields differ"
    table = Table(title, ("field", "value", "reports"), rows, differ)
    return Section("Environment", [table], folded=True)


def warnings(runs: Sequence[Run]) -> list[str]:
    """Where the hardware of a benchmark's reports, or of a report's nodes, differs."""
    lines = []
    for name, same in by_benchmark(runs).items():
        differing = differences(same[:1], same[1:]) if len(same) > 1 else []
        fields = [difference.field for difference in differing if difference.hardware]
        if fields:
            what = f"The hardware of the {name} reports differs ({', '.join(fields)})"
            lines.append(f"{what}: they do not compare one program with another.")
    for run in runs:
        if resumed := resumed_text(run):
            lines.append(f"{run.label} was resumed: {resumed}.")
        for line in run.environment.get("differences") or []:
            lines.append(f"Nodes differ, {run.label}: {line}")
    return lines


def time_of_step(row: Row) -> dict[str, Any]:
    """The median of a case's step with its interval, where none of its metrics is about it."""
    step = row.measure.replace(" ", "_")
    has_name = any(name.startswith(step) for name in row.metrics)
    if not len(row.times_s) or has_name:
        return {}
    time = median(row.times_s)
    numbers = [number_of(value) for value in row.metrics.values()]
    has_value = any(math.isclose(x, time.value) for x in numbers if x is not None)
    return {} if has_value else {f"{step}_s": time}


def benchmark(runs: Sequence[Run]) -> Section:
    """Every number of every case, a table for each title. New metrics, and new scripts, get
    columns."""
    cases: dict[str, list[tuple[Run, Row]]] = {}
    for run in runs:
        for row in run.rows.values():
            cases.setdefault(row.table, []).append((run, row))
    tables = [table_of(title, of_title, len(runs) > 1) for title, of_title in cases.items()]
    quiet = [f"In all cases: {alike_in_all(rows_of(runs)) or 'nothing'}."]
    if any("step_p50_s" in row.metrics for row in rows_of(runs)):
        what = "geometric means over rounds of block medians"
        quiet.append(f"Times are {what}, and ratios their quotients; p50 to p99 are percentiles.")
    return Section(runs[0].benchmark, tables, quiet=quiet, runs=runs)


def table_of(title: str, cases: Sequence[tuple[Run, Row]], has_reports: bool) -> Table:
    """The metrics of cases; a row a metric where these are far more than the cases."""
    names = []
    for run, row in cases:
        failed = " (failed)" if row.failed else ""
        place = f" ({run.when_and_where(row.part)})" if resumed_text(run) else ""
        names.append(f"{row.name}{failed}{place}" + (f", {run.label}" if has_reports else ""))
    metrics = [values_of({} if row.failed else row.metrics) for _, row in cases]
    columns = [column(name, metrics) for name in names_of_metrics(metrics)]
    title = title.removeprefix("# ") or "Metrics"  # as collectives.py prints it
    rows = [[head, *cells] for head, cells in columns]
    if len(columns) > 2 * len(cases):
        return Table(title, ["", *names], rows, {}, 1)
    heads, *by_case = zip(["case", *names], *rows, strict=True)
    failed_rows = {i: "failed" for i, (_, row) in enumerate(cases) if row.failed}
    return Table(title, heads, by_case, failed_rows, 1)


def names_of_metrics(metrics: Sequence[dict[str, Value]]) -> list[str]:
    """The metrics that get a column: estimates first, details last."""
    names = dict.fromkeys(name for of_case in metrics for name in of_case)
    estimated = {n for of_case in metrics for n, x in of_case.items() if isinstance(x, Estimate)}
    return sorted(names, key=lambda name: (name.endswith(DETAILS), name not in estimated))


def alike_in_all(cases: Sequence[Row]) -> str:
    """The entries of the keys that all cases share."""
    if not cases:
        return ""
    words = []
    for name, value in cases[0].key.items():
        if all(case.key.get(name) == value for case in cases):
            words.append(show.show_value(name, value))
    return ", ".join(words)


def column(name: str, metrics: Sequence[dict[str, Value]]) -> tuple[str, list[str]]:
    """A metric's head and its cells, with their intervals. The unit stands in the head; in each
    cell where a column has small and large numbers, as of messages from 8 bytes to 1 GiB."""
    ending, unit = show.unit_of(name)
    head = f"_{name}".removesuffix(ending).replace("_per_s_", "/s_").replace("_", " ").strip()
    values = [of_case.get(name, "-") for of_case in metrics]
    numbers = [abs(number) for value in values if (number := number_of(value))]
    shown, factor = show.scaled_unit(unit, numbers)
    if name.endswith(FRACTIONS):
        shown, factor = "%", 100
    has_units = ending in ("_s", "_gb_per_s", "_mb_per_s")
    if has_units and max(numbers, default=1) > SPREAD * min(numbers, default=1):
        scales = [show.scaled_unit(unit, [number_of(value) or 1]) for value in values]
        pairs = zip(values, scales, strict=True)
        return head or unit, [cell(value, unit, *scale) for value, scale in pairs]
    cells = [cell(value, unit, "", factor) for value in values]
    if unit == "bytes":
        return name.replace("_", " "), cells
    if unit == "1/s":  # `samples/s`, `copy Gbytes/s`
        first, blank, last = head.rpartition(" ")
        return f"{first}{blank}{shown}{last}/s", cells
    return f"{head} ({shown})".strip() if shown else head, cells


def cell(value: Value, unit: str, shown_unit: str, factor: float) -> str:
    """A value, and the ends of its interval if it was estimated, all times `factor`."""
    if isinstance(value, str):
        return value
    if unit == "bytes":
        return show_size(number_of(value) or 0)
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, Estimate):
        return f"{show.show_number(value * factor)} {shown_unit}".strip()
    ends = [abs(x) for x in (value.value, value.low, value.high) if x]
    return value.text(shown_unit, factor, digits_of(factor * max(ends)) if ends else 0)


def as_page(title: str, sections: Sequence[Section]) -> str:
    """The document. Every string of a report is cleaned and escaped where it is put in."""
    import jinja2  # here: if it is missing, analysis/ has said so
    from markupsafe import Markup

    jinja = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else show.clean(value, 500),
    )
    jinja.globals["draw"] = draw
    jinja.filters["svg"] = lambda figure: Markup(svg(figure))  # matplotlib escapes its texts
    return jinja.get_template("report.html.j2").render(title=title, sections=sections)


def name_reports(runs: Sequence[Run]) -> None:
    """A report is called after its file; by its path where two files have the same name."""
    names = [Path(run.label).stem for run in runs]
    for run, name in zip(runs, names, strict=True):
        run.label = show.clean(name if names.count(name) == 1 else run.label, 60)


def sections_of(paths: Sequence[str]) -> tuple[str, list[Section]]:
    """The title of a page about these reports, and its parts."""
    runs = load(paths)
    name_reports(runs)
    for row in rows_of(runs):
        row.metrics = time_of_step(row) | row.metrics
    middle = [benchmark(same) for same in by_benchmark(runs).values()]
    return title_of(runs), [summary(runs), *middle, environment(runs)]


def main() -> int:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("reports", nargs="+", metavar="REPORT", help="reports, folders of reports, or patterns")
    add("-o", "--output", metavar="PAGE.html", help="the page to write")
    args = parser.parse_args()
    if args.output is None:
        refuse("expected a page to write, e.g. -o report.html")
    with show.one_line(args.reports):
        if not args.output.lower().endswith(".html"):
            raise ValueError(f"expected a file that ends in .html, got {args.output!r}")
        if os.path.realpath(args.output) in map(os.path.realpath, find(args.reports)):
            raise ValueError(f"{args.output} is one of the reports, which it would overwrite")
        refuse_foreign(args.output)
        page = as_page(*sections_of(args.reports))
        Path(args.output).write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
