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
from analysis.load import Row, Run, Value, by_benchmark, find, load, number_of, rows_of, values_of
from common.cli import Parser, refuse, show_size
from common.report import Estimate
from common.stats import median

OURS = b'<meta name="generator" content="torchrun-bench">'  # at the begin of a page
FRACTIONS = ("_rel", "efficiency", "overlap", "mfu")
DETAILS = ("_p75_s", "_p90_s", "_p95_s", "_p99_s", "_mean_s")  # the last columns
SPREAD = 1000  # a column whose numbers differ by more has a unit in each cell
BUSY = 0.1  # other programs disturb a run where they use more of a node's cores
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
    answers: list[str] = field(default_factory=list)  # come first
    loud: list[str] = field(default_factory=list)  # warnings above the tables
    quiet: list[str] = field(default_factory=list)  # notes above the tables
    runs: Sequence[Run] = ()  # whose figures are drawn
    folded: bool = False  # whether the page shows its title alone, until it is opened


def summary(runs: Sequence[Run]) -> Section:
    """What the scripts say, what each report holds, and why cases of it failed."""
    tables = []
    answers: list[str] = []
    loud: list[str] = []
    quiet: list[str] = []
    for run in runs:
        where_said = f"{run.label}: " if len(runs) > 1 else ""
        answers += [f"{where_said}{sentence}" for sentence in answer_of(run)]
        line, is_disturbed = load_of_others(run)
        if line:
            (loud if is_disturbed else quiet).append(f"{where_said}{line}")
    rows, failed_reports = [], {}
    for i, run in enumerate(runs):
        counts = Counter(re.split("[:,]", case.check)[0] for case in run.rows.values())
        cases = ", ".join(f"{n} {check}" for check, n in counts.items()) or "no case"
        started = run.started_at[:16].replace("T", " ")
        torch = run.environment.get("torch") or "-"
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
    return Section("Summary", tables, answers, loud + warnings(runs), quiet)


def answer_of(run: Run) -> list[str]:
    """The sentences in the last line of a report. A run that was interrupted has none."""
    sentences = run.end.get("answer")
    if not isinstance(sentences, list):
        return []
    return [sentence for sentence in sentences if isinstance(sentence, str)]


def load_of_others(run: Run) -> tuple[str, bool]:
    """What other programs used of the cores of the busiest node, and whether it disturbs."""
    loads = run.end.get("others") or []
    if not loads:
        return "", False
    busy, cores = max(loads, key=lambda load: load[0] / load[1])
    line = f"Other programs used {busy:g} of {cores} cores of a node during the run"
    if busy <= BUSY * cores:
        return f"{line}.", False
    return f"{line}: they disturbed it, and its times may be too long.", True


def title_of(runs: Sequence[Run]) -> str:
    """`ddp_sweep on H100 (2 ranks), 2026-01-01`: the benchmarks, the machines and the days."""
    benchmarks = show.list_once(run.benchmark for run in runs)
    machines = show.list_once(machine_of(run) for run in runs)
    days = show.list_once(run.started_at[:10] for run in runs if run.started_at)
    return ", ".join(
        show.clean(part, 120) for part in (f"{benchmarks} on {machines}", days) if part
    )


def machine_of(run: Run) -> str:
    described = describe_environment(run)
    hosts, devices = described.get("hosts"), described.get("devices")
    return " with ".join(part for part in (hosts, devices) if part) or "an unknown machine"


def where(run: Run) -> str:
    """`ranks: 8, nodes: 1, NVIDIA H100`"""
    described = describe_environment(run)
    words = {"ranks: ": "world_size", "nodes: ": "num_nodes", "": "devices"}
    return ", ".join(
        f"{word}{described[name]}" for word, name in words.items() if name in described
    )


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
    numbers = [number_of(value) for value in row.metrics.values()]
    has_name = any(name.startswith(step) for name in row.metrics)
    has_value = any(math.isclose(x, row.time_s) for x in numbers if x is not None)
    if not len(row.times_s) or has_name or has_value:
        return {}
    return {f"{step}_s": median(row.times_s)}


def benchmark(runs: Sequence[Run]) -> Section:
    """Every number of every case. New metrics, and new scripts, get columns."""
    cases = rows_of(runs)
    metrics = [values_of({} if row.failed else row.metrics) for row in cases]
    header = ["case"]
    columns = [[f"{row.name} (failed)" if row.failed else row.name for row in cases]]
    if len(runs) > 1:
        header.append("report")
        columns.append([run.label for run in runs for _ in run.rows])
    words = len(columns)
    for name in names_of_metrics(metrics):
        head, cells = column(name, metrics)
        header.append(head)
        columns.append(cells)
    rows = list(zip(*columns, strict=True))
    failed = {i: "failed" for i, row in enumerate(cases) if row.failed}
    table = Table("Metrics", header, rows, failed, words)
    quiet = [f"In all cases: {alike_in_all(cases) or 'nothing'}."]
    return Section(runs[0].benchmark, [table], quiet=quiet, runs=runs)


def names_of_metrics(metrics: Sequence[dict[str, Value]]) -> list[str]:
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


def column(name: str, metrics: Sequence[dict[str, Value]]) -> tuple[str, list[str]]:
    """A metric's head and its cells, with their intervals. The unit stands in the head; in each
    cell where a column has small and large numbers, as of messages from 8 bytes to 1 GiB."""
    ending, unit = show.unit_of(name)
    values = [of_case.get(name, "-") for of_case in metrics]
    numbers = [abs(number) for value in values if (number := number_of(value))]
    factor = 1.0
    in_cells = unit in show.SIZES and max(numbers, default=1) > SPREAD * min(numbers, default=1)
    if name.endswith(FRACTIONS):
        unit, factor = "%", 100.0
    elif unit in show.SIZES and not in_cells:
        unit, factor = show.scaled_unit(unit, numbers)
    if in_cells:
        cells = [
            cell(value, unit, *show.scaled_unit(unit, [number_of(value) or 1])) for value in values
        ]
    else:
        cells = [cell(value, unit, "", factor) for value in values]
    head = f"_{name}".removesuffix(ending).replace("_", " ").strip()
    if unit in ("", "bytes"):
        return name.replace("_", " "), cells
    if unit == "1/s":
        return f"{head}/s".strip(), cells
    return (head if in_cells else f"{head} ({unit})".strip()), cells


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
    text = f"{show.show_number(value.value * factor)} {shown_unit}".strip()
    if value.low is None or value.high is None:
        return f"{text} (no interval)"
    low, high = show.show_number(value.low * factor), show.show_number(value.high * factor)
    return f"{text} ({low} to {high})"


def as_markdown(section: Section) -> str:
    blocks = [f"## {show.markdown(section.title)}"]
    for line in section.answers + section.loud + section.quiet:
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


def as_page(title: str, sections: Sequence[Section]) -> str:
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
    return jinja.get_template("report.html.j2").render(title=title, sections=sections)


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
    with show.one_line(args.reports):
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
            Path(args.output).write_text(as_page(title_of(runs), sections), encoding="utf-8")
        if args.markdown:
            texts = [as_markdown(section) for section in sections]
            show.put("\n\n".join([f"# {show.markdown(title_of(runs))}", *texts]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
