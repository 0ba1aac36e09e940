#!/usr/bin/env python3
# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "numpy>=1.26", "pandas>=2.1", "tabulate>=0.9", "matplotlib>=3.8", "jinja2>=3.1"
# ]
# ///
"""One page from any reports: summary, figures, tables, environment.

The page is a single HTML file. It needs no network and runs no script, and it is light or dark as
the reader has it. It begins with the sentences in which each script has answered its question.
Reports of the same benchmark are drawn over each other. A script that this one does not know is
shown as well: its metrics as tables, and the time of each case with its interval.

    python analysis/report.py report.jsonl -o report.html
    python analysis/report.py before.jsonl after.jsonl -o report.html
    python analysis/report.py report.jsonl --markdown

Everything in a report is shown as text, and nothing of it is executed. BSD-3-Clause.
"""

import math
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis import show
from analysis.differences import describe_environment, differences
from analysis.figures import draw, svg
from analysis.load import Metric, Row, Run, by_benchmark, find, load, metrics_of, rows_of
from common.cli import Parser, refuse, show_size
from common.stats import median_interval

OURS = b'<meta name="generator" content="torchrun-bench">'  # at the begin of a page
FRACTIONS = ("_rel", "efficiency", "overlap", "mfu")
DETAILS = ("_p75_s", "_p90_s", "_p95_s", "_p99_s", "_mean_s", "_ci95_rel")  # the last columns
# In pixels, with the widest of the usual fonts: what the page has for a table in a window of 1,300,
# the space beside a cell, a letter, a bold one, and a column of names at its narrowest and widest.
PAGE_PX, CELL_PX, LETTER_PX, BOLD_PX, NAME_PX, MOST_NAME_PX = 1240, 24, 9, 10, 176, 360


class Table(NamedTuple):
    title: str
    header: Sequence[Any]
    rows: Sequence[Sequence[Any]]
    marks: dict[int, str]  # rows that stand out, by number, and why: failed or differs
    words: int = 100  # so many columns of words stand before those of numbers
    folded: str = ""  # the line to open it with, where the page does not show it at once


@dataclass
class Section:
    """A part of the page."""

    title: str
    tables: list[Table]
    loud: list[str] = field(default_factory=list)  # warnings above the tables
    quiet: list[str] = field(default_factory=list)  # notes above the tables
    runs: Sequence[Run] = ()  # whose figures are drawn
    folded: bool = False  # whether the page shows its title alone, until it is opened


def summary(runs: Sequence[Run]) -> Section:
    """What the scripts say, what each report holds, and why cases of it failed."""
    tables = []
    answers = [[run.label, sentence] for run in runs for sentence in answer_of(run)]
    if answers:
        tables.append(Table("Answers", ("report", "what it says"), answers, {}))
    rows, failed_reports = [], {}
    for i, run in enumerate(runs):
        counts = Counter(re.split("[:,]", case.check)[0] for case in run.rows.values())
        cases = ", ".join(f"{n} {check}" for check, n in counts.items()) or "no case"
        started = run.started_at[:16].replace("T", " ")
        torch = run.environment.get("torch")
        rows.append([run.label, run.benchmark, run.status, cases, where(run), torch, started])
        if run.status != "complete" or counts["failed"]:
            failed_reports[i] = "failed"
    heads = ("report", "benchmark", "status", "cases", "where", "PyTorch", "started")
    tables.append(Table("Reports", heads, rows, failed_reports))
    failed_cases = []
    for run in runs:
        failed = [case for case in run.rows.values() if case.failed]
        failed_cases += [[run.label, case.name, case.check] for case in failed]
    if failed_cases:
        tables.append(Table("Failed cases", ("report", "case", "reason"), failed_cases, {}))
    return Section("Summary", tables, loud=warnings(runs))


def answer_of(run: Run) -> list[str]:
    """The sentences in the last line of a report. Older reports have none."""
    sentences = run.end.get("answer")
    if not isinstance(sentences, list):
        return []
    return [sentence for sentence in sentences if isinstance(sentence, str)]


def where(run: Run) -> str:
    """`ranks: 8, nodes: 1, NVIDIA H100`"""
    ranks = run.environment.get("world_size", "?")
    nodes = run.environment.get("num_nodes", "?")
    devices = describe_environment(run).get("devices", "no device")
    return f"ranks: {ranks}, nodes: {nodes}, {devices}"


def environment(runs: Sequence[Run]) -> Section:
    """What the reports were measured on. A field has a row for each of its values."""
    columns = []
    for run in runs:
        command = " ".join(str(word) for word in run.argv)
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
        for line in run.environment.get("differences") or []:
            lines.append(f"Nodes differ, {run.label}: {line}")
    return lines


def time_of_step(row: Row) -> dict[str, Any]:
    """The median of a case's step with its interval, where none of its metrics is about it."""
    step = row.measure.replace(" ", "_")
    numbers = [value for value in row.metrics.values() if show.is_number(value)]
    has_name = any(name.startswith(step) for name in row.metrics)
    has_value = any(math.isclose(number, row.time_s) for number in numbers)
    if not row.times_s or has_name or has_value:
        return {}
    interval = median_interval(row.times_s)
    return {f"{step}_time_p50_s": row.time_s, f"{step}_time_ci95_s": interval}


def benchmark(runs: Sequence[Run]) -> Section:
    """Every number of every case. New metrics, and new scripts, get columns."""
    cases = rows_of(runs)
    metrics = [metrics_by_name(row) for row in cases]
    header = ["case"]
    columns = [[row.name for row in cases]]
    if len(runs) > 1:
        header.append("report")
        columns.append([run.label for run in runs for _ in run.rows])
    words = len(columns)
    ratios = to_best(cases)
    if ratios:
        header.append("time / best")
        columns.append(ratios)
    for name in names_of_metrics(metrics):
        head, cells = column(name, metrics)
        header.append(head)
        columns.append(cells)
    rows = list(zip(*columns, strict=True))
    failed = {i: "failed" for i, row in enumerate(cases) if row.failed}
    table = Table("Metrics", header, rows, failed, words)
    quiet = [f"In all cases: {alike_in_all(cases) or 'nothing'}."]
    return Section(runs[0].benchmark, [table], quiet=quiet, runs=runs)


def to_best(cases: Sequence[Row]) -> list[str]:
    """The time of each case by the smallest one, such as `1.31`; empty where they tell nothing.

    That is where the cases are of several sizes: a larger one takes longer, and is no worse.
    """
    measures = {row.measure for row in cases if row.time_s}
    sizes = {row.key.get("size_bytes") for row in cases}
    times_s = [row.time_s for row in cases if row.time_s]
    if len(times_s) < 2 or len(measures) > 1 or len(sizes) > 1:
        return []
    best_s = min(times_s)
    return [f"{row.time_s / best_s:.2f}" if row.time_s else "-" for row in cases]


def metrics_by_name(row: Row) -> dict[str, Metric]:
    return {metric.name: metric for metric in metrics_of(row.metrics)}


def names_of_metrics(metrics: Sequence[dict[str, Metric]]) -> list[str]:
    """The metrics that get a column, details last."""
    names = dict.fromkeys(name for of_case in metrics for name in of_case)
    return sorted(names, key=lambda name: name.endswith(DETAILS))


def alike_in_all(cases: Sequence[Row]) -> str:
    """The entries of the keys that all cases share."""
    if not cases:
        return ""
    words = []
    for name, value in cases[0].key.items():
        if all(case.key.get(name) == value for case in cases):
            words.append(show.show_value(name, value))
    return ", ".join(words)


def column(name: str, metrics: Sequence[dict[str, Metric]]) -> tuple[str, list[str]]:
    """A metric's head, with its unit by the end of its name, and its cells, with intervals."""
    ending, unit = show.unit_of(name)
    scale = 1.0
    if name.endswith(FRACTIONS):
        unit, scale = "%", 100.0
    elif unit == "s":
        values = [of_case[name].value for of_case in metrics if name in of_case]
        times_s = [abs(value) for value in values if show.is_number(value)]
        unit = show.time_unit(max(times_s, default=1))
        scale = 1 / show.UNITS[unit]
    head = name.replace("_", " ")
    if unit not in ("", "bytes"):
        head = f"{name.removesuffix(ending).replace('_', ' ')} ({unit})"
    cells = []
    for of_case in metrics:
        metric = of_case.get(name, Metric(name, "-", None))
        cells.append(cell(metric.value, metric.interval, unit, scale))
    return head, cells


def cell(value: Any, interval: Any, unit: str, scale: float) -> str:
    """A value, and the ends of its interval if it has one, both times `scale`."""
    if not show.is_number(value):
        return str(value)
    if unit == "bytes":
        return show_size(value)
    text = f"{value * scale:.4g}" if isinstance(value, float) else f"{value:,}"
    if interval is None:
        return text
    low, high = interval
    return f"{text} ({low * scale:.4g} to {high * scale:.4g})"


def as_markdown(section: Section) -> str:
    blocks = [f"## {show.markdown(section.title)}"]
    for line in section.loud + section.quiet:
        blocks.append(show.markdown(line, 1000))
    for table in section.tables:
        right = range(table.words, len(table.header))
        text = show.show_table(table.header, table.rows, right, "markdown")
        blocks += [f"### {table.title}", text]
    return "\n\n".join(blocks)


def fit(table: Table) -> list[Table]:
    """The table, cut where the page would be too narrow for more columns of numbers.

    The other parts are folded. They repeat the columns of words, and the line that is seen of each
    names its columns.
    """
    columns = [list(map(str, cells)) for cells in zip(table.header, *table.rows, strict=True)]
    room = PAGE_PX - sum(width_of_names(cells) for cells in columns[: table.words])
    parts: list[list[int]] = [[]]  # the columns of numbers of each part
    used = 0
    for i in range(table.words, len(columns)):
        width = width_of_numbers(columns[i])
        if parts[-1] and used + width > room:
            parts.append([])
            used = 0
        parts[-1].append(i)
        used += width
    return [part_of(table, part, is_first=part is parts[0]) for part in parts]


def width_of_numbers(column: Sequence[str]) -> int:
    """Pixels of a column of numbers, head first. The head is cut between words, a cell nowhere."""
    head, *values = column
    longest_word = max(map(len, head.split()), default=0)
    longest_value = max(map(len, values), default=0)
    return CELL_PX + max(64, BOLD_PX * longest_word, LETTER_PX * longest_value)


def width_of_names(column: Sequence[str]) -> int:
    """Pixels of a column of words, where its cells are not cut into more lines than need be."""
    longest = LETTER_PX * max(map(len, column))
    return CELL_PX + min(max(NAME_PX, longest), MOST_NAME_PX)


def part_of(table: Table, numbers: Sequence[int], is_first: bool) -> Table:
    """The columns of words of a table, and some of those of numbers."""
    chosen = [*range(table.words), *numbers] if numbers else range(len(table.header))
    header = [table.header[i] for i in chosen]
    rows = [[row[i] for i in chosen] for row in table.rows]
    part = table._replace(header=header, rows=rows)
    if is_first:
        return part
    heads = [str(table.header[i]) for i in numbers]
    return part._replace(folded=f"{len(heads)} more columns: {', '.join(heads)}")


def as_page(sections: Sequence[Section]) -> str:
    """The document. Every string of a report is cleaned and escaped where it is put in."""
    import jinja2  # here: if it is missing, analysis/ has said so
    from markupsafe import Markup

    jinja = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else show.clean(value, 500),
    )
    jinja.globals |= {"draw": draw, "fit": fit}
    jinja.filters["svg"] = lambda figure: Markup(svg(figure))  # matplotlib escapes its texts
    return jinja.get_template("report.html.j2").render(sections=sections)


def name_reports(runs: Sequence[Run]) -> None:
    """A report is called after its file; by its path where two files have the same name."""
    names = [Path(run.label).stem for run in runs]
    for run, name in zip(runs, names, strict=True):
        run.label = show.clean(name if names.count(name) == 1 else run.label, 60)


def main() -> int:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("reports", nargs="+", metavar="REPORT", help="reports, folders of reports, or patterns")
    add("-o", "--output", metavar="PAGE.html", help="the page to write, or to replace")
    add("--markdown", action="store_true", help="print the tables as Markdown")
    args = parser.parse_args()
    wanted = args.markdown if args.output is None else args.output.endswith(".html")
    if not wanted:
        refuse("expected a page to write, e.g. -o report.html, or --markdown")
    try:
        if args.output is not None:
            show.check_output(args.output, (".html",), find(args.reports), OURS)
        runs = load(args.reports)
        name_reports(runs)
        for row in rows_of(runs):
            row.metrics = time_of_step(row) | row.metrics
        sections = [summary(runs)]
        for same in by_benchmark(runs).values():
            sections.append(benchmark(same))
        sections.append(environment(runs))
        if args.output is not None:
            Path(args.output).write_text(as_page(sections), encoding="utf-8")
    except (ValueError, OSError) as error:
        refuse(show.clean(error, 1000))
    if args.markdown:
        show.put("\n\n".join(as_markdown(section) for section in sections))
    return 0


if __name__ == "__main__":
    sys.exit(main())
