#!/usr/bin/env python3
# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "numpy>=1.26", "pandas>=2.1", "scipy>=1.11", "tabulate>=0.9", "matplotlib>=3.8",
#     "jinja2>=3.1"
# ]
# ///
"""Write an HTML page about reports: comparison, answers, figures, tables and environment.

For a folder of ab.py, or for BASE and --test TEST, the page begins with the comparison: what was
compared, the verdict on each case with its ratio and interval, a plot of all runs, the differences
between the environments, and the load during each run. Verdicts and numbers are those that ab.py
and compare.py print.

The page is a single HTML file without scripts, and it loads nothing from the network. Light or dark
mode follows the browser's setting. Reports of the same benchmark share figures and tables. New
scripts need no changes here: all their metrics appear in tables, and the time of each case with its
interval.

    python analysis/report.py report.jsonl -o report.html
    python analysis/report.py OUT-OF-AB -o report.html
    python analysis/report.py base/ --test test/ -o report.html
    python analysis/report.py report.jsonl --figure samples/s -o scaling.png

The contents of a report are escaped: they are shown as text and never executed. BSD-3-Clause.
"""

import argparse
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis import show
from analysis.compare import add_design_flags, add_side_flags
from analysis.logs.step_logs import Steps, add_step_flags, load_logs, steps_of
from analysis.logs.suggestions import suggested
from analysis.pages.page import Section, Table, as_page, hide_folders, name_reports
from analysis.pages.versus import compare_folder, compare_sides, is_folder, read_folder
from analysis.runs.differences import (
    CONTENTS,
    describe_environment,
    differences,
)
from analysis.runs.evidence import by_reason, is_disturbed, load_text, unusable
from analysis.runs.load import (
    ENDINGS,
    Row,
    Run,
    Value,
    by_benchmark,
    find,
    load,
    number_of,
    rows_of,
    values_of,
    with_step_time,
)
from common.stats import Estimate, digits_of, significant
from harness.cli import Parser, cut, show_size
from harness.exits import refuse
from readers.files import GENERATOR, refuse_foreign

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FRACTIONS = (
    *("_rel", "efficiency", "overlap", "mfu", "spread"),
    *("cost", "share", "_idle", "_idle_theory"),
)
PICTURES = (".png", ".svg", ".pdf")
DETAILS = ("_p75_s", "_p90_s", "_p95_s", "_p99_s", "_mean_s")  # metrics in the last columns
SPREAD = 1000  # if the numbers of a column differ by a larger factor, each cell has its own unit
NOTHING = argparse.Namespace(  # the flags of a page without --test
    test=[], measure=None, margin=None, ignore_key=[], allow_disturbed=False
)
MAX_TITLE = 60  # maximum number of characters for the benchmarks or machines in a title


def summary(runs: Sequence[Run]) -> Section:
    """The answers of the scripts, disturbances, the contents of each report, and failed cases."""
    heads = ("report", "benchmark", "status", "cases", "where", "PyTorch", "started")
    cpu = "CPU use by other processes"
    reports = Table("What was measured", (*heads, cpu), [], {})
    answers = Table("Answers", ("report", "answer"), [], {})
    failures = Table("Failed cases", ("report", "case", "reason"), [], {})
    section = Section("Reports", [reports])
    for i, run in enumerate(runs):
        lines = run.end.get("answer") or []
        if len(runs) == 1:
            section.answers += lines
        answers.rows.extend([run.label if n == 0 else "", line] for n, line in enumerate(lines))
        counts = Counter(re.split("[:,]", case.check)[0] for case in run.rows.values())
        cases = ", ".join(f"{n} {check}" for check, n in counts.items()) or "no case"
        torch = run.environment.get("torch") or "-"
        started = run.started_at[:16].replace("T", " ")
        about = [run.label, run.benchmark, run.status, cases, where(run), torch, started]
        reports.rows.append([*about, load_text(run)])
        failed = [case for case in run.rows.values() if case.failed]
        failures.rows.extend([run.label, case.label, case.check] for case in failed)
        if run.status != "complete" or failed:
            reports.marks[i] = "failed"
    if len(runs) > 1 and answers.rows:
        section.tables.append(answers)
    if failures.rows:
        section.tables.append(failures)
    if disturbed := [f"{run.label} ({load_text(run)})" for run in runs if is_disturbed(run)]:
        what = "Other processes used more than a tenth of the cores, so times may be too long"
        section.warnings.append(f"{what}: {cut(disturbed)}")
    section.warnings += [f"Not used in comparisons: {why}" for why in by_reason(unusable(runs))]
    section.warnings += warnings(runs)
    return section


def title_of(runs: Sequence[Run]) -> str:
    """`ddp_sweep on H100 (2 ranks), 2026-01-01`: the benchmarks, the machines and the days."""
    benchmarks = names_or_count((run.benchmark for run in runs), "benchmarks")
    known = [machine for run in runs if (machine := machine_of(run))]
    machines = f" on {names_or_count(known, 'machines')}" if known else ""
    days = sorted({run.started_at[:10] for run in runs if run.started_at})
    when = " to ".join(dict.fromkeys([*days[:1], *days[-1:]]))
    return ", ".join(part for part in (f"{benchmarks}{machines}", when) if part)


def names_or_count(names: Iterable[str], noun: str) -> str:
    """`ddp_sweep, collectives`, or `13 benchmarks` if the names are too long for a title."""
    distinct = list(dict.fromkeys(names))
    text = ", ".join(distinct)
    return text if len(distinct) == 1 or len(text) <= MAX_TITLE else f"{len(distinct)} {noun}"


def machine_of(run: Run) -> str:
    described = describe_environment(run)
    hosts, devices = described.get("hosts"), described.get("devices")
    return " with ".join(part for part in (hosts, devices) if part)


def where(run: Run) -> str:
    """`ranks: 8, nodes: 1, NVIDIA H100`"""
    described = describe_environment(run)
    names = {"world_size": "ranks: ", "num_nodes": "nodes: ", "devices": ""}
    words = [f"{word}{described[name]}" for name, word in names.items() if name in described]
    return ", ".join(words)


def environment(runs: Sequence[Run]) -> Section:
    """The environments of the reports. A field has one row for each of its values."""
    columns = []
    for run in runs:
        command = " ".join(map(str, run.argv)) or "-"
        columns.append({"command": command} | describe_environment(run))
    names = dict.fromkeys(name for column in columns for name in column)
    names.pop("topologies", None)  # a page of text per node
    rows, differ = [], {}
    differing = 0
    for name in names:
        if name.startswith("variables.TORCHELASTIC_"):  # internal variables of torchrun
            continue
        values = {column[name] for column in columns if name in column}
        if name.startswith(CONTENTS) and len(values) == 1:  # a module may be imported late
            continue
        reports: dict[str, list[str]] = {}  # value -> labels of the reports that have it
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
    """Warnings: hardware that differs between reports or nodes, and reports that were resumed."""
    lines = []
    for name, same in by_benchmark(runs).items():
        differing = differences(same[:1], same[1:]) if len(same) > 1 else []
        fields = [difference.field for difference in differing if difference.hardware]
        if fields:
            what = f"The hardware of the {name} reports differs ({', '.join(fields)})"
            lines.append(f"{what}, so differences between them are not differences of programs.")
    for run in runs:
        if run.resumed:
            lines.append(f"{run.label} was resumed: {run.resumed}.")
        for line in run.environment.get("differences") or []:
            lines.append(f"Nodes differ, {run.label}: {line}")
    return lines


def benchmark(runs: Sequence[Run]) -> Section:
    """Every number of every case, with one table per title. Columns follow from the metrics, so
    that new metrics and scripts need no changes."""
    cases: dict[str, list[tuple[Run, Row]]] = {}
    for run in runs:
        for row in run.rows.values():
            cases.setdefault(row.table, []).append((run, row))
    tables = [table_of(title, of_title, len(runs) > 1) for title, of_title in cases.items()]
    details = [f"In all cases: {common_entries(rows_of(runs)) or 'nothing'}."]
    if any("step_p50_s" in row.metrics for row in rows_of(runs)):
        what = "geometric means over rounds of block medians"
        details.append(f"Times are {what}, and ratios their quotients; p50 to p99 are percentiles.")

    def figures() -> "list[Figure]":
        from analysis.pages.figures import draw  # not above: it takes longer than --help

        return draw(runs)

    return Section(runs[0].benchmark, tables, details=details, figures=figures)


def table_of(title: str, cases: Sequence[tuple[Run, Row]], has_reports: bool) -> Table:
    """The metrics of cases. If there are far more metrics than cases, a row is a metric."""
    names = []
    for run, row in cases:
        failed = " (failed)" if row.failed else ""
        place = f" ({row.measured})" if run.resumed else ""
        names.append(f"{row.name}{failed}{place}" + (f", {run.label}" if has_reports else ""))
    metrics = [values_of({} if row.failed else row.metrics) for _, row in cases]
    columns = [column(name, metrics) for name in names_of_metrics(metrics)]
    title = title.removeprefix("# ") or "Metrics"  # collectives.py prints titles with `# `
    rows = [[head, *cells] for head, cells in columns]
    if len(columns) > 2 * len(cases):
        return Table(title, ["", *names], rows, {}, 1)
    heads, *by_case = zip(["case", *names], *rows, strict=True)
    failed_rows = {i: "failed" for i, (_, row) in enumerate(cases) if row.failed}
    return Table(title, heads, by_case, failed_rows, 1)


def names_of_metrics(metrics: Sequence[dict[str, Value]]) -> list[str]:
    """The names of all metrics: estimates first, details last."""
    names = dict.fromkeys(name for of_case in metrics for name in of_case)
    estimated = {n for of_case in metrics for n, x in of_case.items() if isinstance(x, Estimate)}
    return sorted(names, key=lambda name: (name.endswith(DETAILS), name not in estimated))


def common_entries(cases: Sequence[Row]) -> str:
    """The entries that the keys of all cases have in common."""
    if not cases:
        return ""
    words = []
    for name, value in cases[0].key.items():
        if all(case.key.get(name) == value for case in cases):
            words.append(show.show_value(name, value))
    return ", ".join(words)


def column(name: str, metrics: Sequence[dict[str, Value]]) -> tuple[str, list[str]]:
    """The header of a metric and its cells, with intervals.

    The unit is in the header, or in each cell if the values differ by a large factor, such as for
    messages from 8 bytes to 1 GiB.
    """
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
    """A value, with its interval if it was estimated. All numbers are multiplied by `factor`."""
    if isinstance(value, str):
        return value
    if unit == "bytes":
        return show_size(number_of(value) or 0)
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, Estimate):
        return f"{significant(value * factor)} {shown_unit}".strip()
    ends = [abs(x) for x in (value.value, value.low, value.high) if x]
    return value.text(shown_unit, factor, digits_of(factor * max(ends)) if ends else 0)


def sections_of(
    paths: Sequence[str], given: argparse.Namespace = NOTHING, steps: Steps | None = None
) -> tuple[str, list[Section]]:
    """The title of a page about these reports, and its sections. Comparisons come first.

    given: flags of the comparison; `given.test` are the reports of the other side. steps: where to
    find step times, if the files are logs.
    """
    folders = (
        [] if given.test or steps else [read_folder(word) for word in paths if is_folder(word)]
    )
    words = [word for word in paths if given.test or steps or not is_folder(word)]
    words += [path for folder in folders for path in folder.reports()]
    if not words:
        raise ValueError(f"there are no reports in {paths[0]} yet")
    words = [*words, *given.test]
    with suggested():
        runs = load_logs(words, steps) if steps else load(words, given.measure)
    names = [f"{folder.path}/{name}" for folder in folders for name in folder.commands]
    texts = [text for folder in folders for text in folder.commands.values()]
    name_reports(runs)
    commands = hide_folders(runs, dict(zip(names, texts, strict=True)))
    first = [compare_sides(paths, given, runs, endings_of(steps))] if given.test else []
    for folder in folders:
        shown = {name: commands[f"{folder.path}/{name}"] for name in folder.commands}
        try:
            first.append(compare_folder(folder, given, runs, shown))
        except ValueError as error:  # a page about the reports is still useful
            why = f"The commands cannot be compared: {error}"
            first.append(Section(folder.path.name, [], warnings=[why]))
    for row in rows_of(runs):
        row.metrics = with_step_time(row)
    middle = [benchmark(same) for same in by_benchmark(runs).values()]
    singles = [summary(runs), *middle]
    for section in singles if first else ():
        section.folded = True
    title = title_of(runs)
    if len(folders) + bool(given.test) == 1:
        about = first[0].title
        title = f"{about}{' ' if about.endswith('?') else ': '}{title}"
    return title, [*first, *singles, environment(runs)]


def endings_of(steps: Steps | None) -> Sequence[str]:
    """The suffixes of the files to read from a folder."""
    return steps.endings if steps else ENDINGS


def save_figure(sections: Sequence[Section], name: str, path: str) -> None:
    """Draw one figure of the page. name: its caption, or a part of it that no other one has."""
    figures = [figure for section in sections for figure in section.figures()]
    captions = [str(figure.get_label()) for figure in figures]
    found = [i for i, caption in enumerate(captions) if caption.lower() == name.lower()]
    found = found or [i for i, caption in enumerate(captions) if name.lower() in caption.lower()]
    if len(found) != 1:
        known = ", ".join(map(repr, captions)) or "none"
        raise ValueError(f"--figure: expected one of the figures {known}, got {name!r}")
    writer = (
        "Software" if path.lower().endswith(".png") else "Creator"
    )  # metadata key of the format
    form: Any = {"metadata": {writer: GENERATOR}, "bbox_inches": "tight", "dpi": 200}
    figures[found[0]].savefig(path, **form)


def parse_args() -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    reports = "reports, folders of reports or of ab.py, or patterns; with --test, these are BASE"
    add("reports", nargs="+", metavar="REPORT", help=reports)
    add("-o", "--output", metavar="PAGE.html", help="path of the page, or of the picture")
    figure = "write only this figure of the page, named by its caption or a part of it, to -o x.png"
    add("--figure", metavar="NAME", help=f"{figure}, .svg or .pdf")
    add_side_flags(parser)
    add_step_flags(parser, "the files, which are logs of any program")
    add_design_flags(parser)
    parser.set_defaults(margin=None)  # folders of ab.py have their own margin
    args = parser.parse_args()
    if args.output is None:
        refuse("expected a page to write, e.g. -o report.html")
    for flag in ("paired", "interleaved", "measure"):
        if getattr(args, flag) and not args.test:
            refuse(f"--{flag} requires --test, e.g. base/ --test test/")
    for flag in ("margin", "ignore-key", "allow-disturbed"):
        value = getattr(args, flag.replace("-", "_"))
        if value and not args.test and not any(map(is_folder, args.reports)):
            refuse(f"--{flag} requires two sides: --test, or a folder of ab.py")
    return args


def main() -> int:
    args = parse_args()
    paths = [*args.reports, *args.test]
    with show.one_line(paths):
        steps = steps_of(args, {"--measure": args.measure, "--interleaved": args.interleaved})
        endings = PICTURES if args.figure else (".html",)
        if not args.output.lower().endswith(endings):
            what = f"expected a file that ends in {' or '.join(endings)}, got {args.output!r}"
            hint = "; a picture requires --figure NAME" if args.output.endswith(PICTURES) else ""
            raise ValueError(what + hint)
        inputs = find(paths, endings_of(steps))
        if os.path.realpath(args.output) in map(os.path.realpath, inputs):
            raise ValueError(f"{args.output} is one of the reports, which it would overwrite")
        refuse_foreign(args.output)
        title, sections = sections_of(args.reports, args, steps)
        if args.figure:
            save_figure(sections, args.figure, args.output)
        else:
            Path(args.output).write_text(as_page(title, sections), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
