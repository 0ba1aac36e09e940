#!/usr/bin/env python3
"""One page from any reports: summary, environment, plots, tables. Reads what --json wrote.

Writes a single HTML file that needs no network and runs no script, light or dark as the reader
has it. Reports of the same benchmark are drawn over each other. What it shows:

    scaling        samples/s over ranks, the ideal line, 95 % intervals
    step time      local compute and exposed communication, or the phases of a step
    distributions  the samples of each rank
    busbw          over the size, with the link's limit (--limit)
    links          a heat map of p2p_matrix.py
    RPC            the time of a call over the size
    break-even     after how many steps compiling pays

    python benchmarks/report.py report.json -o report.html
    python benchmarks/report.py before.json after.json --labels before,after -o report.html
    python benchmarks/report.py collectives.json --limit 450 -o report.html
    python benchmarks/report.py report.json --markdown

It needs no GPU, no torchrun and no torch. Everything in a report is shown as text; nothing of it
is executed.

Written for this project. BSD-3-Clause.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cli

MARK = '<meta name="generator" content="torchrun-bench report">'
MAX_FAILURES = 50  # lines
MAX_FIGURES = 80  # of a page


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = cli.Parser(description=__doc__)
    add = parser.add_argument
    add("reports", nargs="+", metavar="REPORT", help="a file that a script wrote with --json")
    add("-o", "--output", metavar="PATH", help="the page to write, e.g. report.html")
    add("--markdown", action="store_true", help="print the tables as Markdown to stdout")
    add(
        "--labels",
        type=cli.list_of(str),
        metavar="NAME",
        help="what to call the reports; a list, one name each (default: their file names)",
    )
    add(
        "--limit",
        type=cli.positive_float,
        metavar="GBPS",
        help="bandwidth of a link in GB/s: a line in the busbw plots (default: the report's own)",
    )
    add("--title", metavar="TEXT", help="the page's heading (default: the benchmarks' names)")
    args = parser.parse_args(argv)
    if args.output is None and not args.markdown:
        cli.refuse("nothing to do; give a page to write, -o report.html, or --markdown")
    for flag, value in {"--title": args.title, "--limit": args.limit}.items():
        if value is not None and args.output is None:
            cli.refuse(f"{flag} has no effect without a page; add -o report.html, or leave it out")
    if args.labels is not None and len(args.labels) != len(args.reports):
        cli.refuse(
            f"--labels has {len(args.labels)} names for {len(args.reports)} reports; "
            "give one each, e.g. --labels before,after"
        )
    if args.labels is not None and len(set(args.labels)) < len(args.labels):
        cli.refuse("--labels has a name twice; give each report its own")
    return args


if __name__ == "__main__":
    ARGS = parse_args()  # before the imports below, so that --help need not wait for them

import contextlib
import errno
import importlib.util
import os
import re
from collections.abc import Sequence
from typing import Any

from common import markdown
from common.figures import Figure, Section, Table
from common.report_content import sections_of
from common.report_figures import Options, shortened
from common.report_runs import (
    HARDWARE,
    Run,
    environments,
    labels_of,
    load,
    significant,
    text,
    unique,
)
from common.report_tables import constants, tables_of
from common.results import replace_file
from common.runs import identity

TONES = {"complete": "good", "running": "note", "interrupted": "note", "failed": "bad"}


# -- reading ---------------------------------------------------------------------------------------


def check_output(path: str) -> Path:
    """Where to write. Refuses a place that cannot be written, or a file that is no page of ours."""
    try:
        target = Path(os.path.realpath(path))
        there = target.exists()
    except (OSError, ValueError) as error:
        cli.refuse(f"-o {path} cannot be written: {getattr(error, 'strerror', None) or error}")
    if not path or target.is_dir():
        cli.refuse(f"-o needs a file, got '{path}'; e.g. -o report.html")
    if not target.parent.is_dir():
        cli.refuse(f"-o {path}: there is no directory {target.parent}; make it first")
    if there and not target.is_file():
        cli.refuse(f"-o {path} is not a regular file; give one, e.g. -o report.html")
    if there and target.stat().st_size:
        try:
            with open(target, encoding="utf-8", errors="replace") as file:
                start = file.read(500)
        except OSError as error:
            cli.refuse(f"-o {path} is there already and cannot be read: {error.strerror}")
        if MARK not in start:
            cli.refuse(f"-o would overwrite {path}, which is no page of this script; give another")
    if not os.access(target.parent, os.W_OK):
        cli.refuse(f"-o {path} cannot be written: {os.strerror(errno.EACCES)}")
    return target


def read(args: argparse.Namespace) -> list[Run]:
    """The reports, each once."""
    seen: dict[tuple[int, int], str] = {}
    try:
        for path in args.reports:
            file = identity(path)
            if file in seen:
                cli.refuse(f"{text(path)} and {text(seen[file])} are the same report; give it once")
            seen[file] = path
        names = unique(args.labels) if args.labels else labels_of(args.reports)
        return [load(path, name) for path, name in zip(args.reports, names, strict=True)]
    except ValueError as error:
        cli.refuse(text(str(error), 1000))
    except MemoryError:
        cli.refuse("there is not enough memory for these reports; give fewer at a time")


def by_benchmark(runs: Sequence[Run]) -> list[list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.benchmark, []).append(run)
    return list(groups.values())


# -- what stands above the benchmarks --------------------------------------------------------------


def plural(count: Any, noun: str) -> str:
    return f"{text(count, 20)} {noun}" + ("" if count == 1 else "s")


def where(run: Run) -> str:
    env = run.environment
    place = f"{plural(env.get('world_size'), 'rank')} on {plural(env.get('num_nodes'), 'node')}"
    return f"{place}, {text(env.get('devices') or env.get('cpus'), 80)}"


def took(run: Run) -> str:
    if run.seconds is None or run.seconds < 0:
        return "-"
    minutes, seconds = divmod(round(run.seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours} h {minutes} min"
        if hours
        else f"{minutes} min {seconds} s"
        if minutes
        else (f"{seconds} s")
    )


def started(run: Run) -> str:
    """The date as it came, to the minute."""
    found = re.fullmatch(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d)\S*?(\+00:00|Z)?", run.started)
    return f"{found[1]} {found[2]}{' UTC' if found[3] else ''}" if found else run.started


def counts(run: Run) -> str:
    """`4 passed, 1 failed`."""
    found = [(verdict, run.count(verdict)) for verdict in ("passed", "failed", "skipped")]
    return ", ".join(f"{count} {verdict}" for verdict, count in found if count) or "none"


def summary(runs: Sequence[Run]) -> tuple[list[dict[str, Any]], list[str]]:
    """A row a report, and remarks on those that are not complete."""
    rows, remarks = [], []
    for run in runs:
        failed = run.count("failed")
        rows.append(
            {
                "label": run.label,
                "benchmark": run.benchmark,
                "status": run.status,
                "tone": TONES[run.status],
                "bad": failed > 0 or run.status == "failed",
                "cases": counts(run),
                "where": where(run),
                "torch": text(run.environment.get("torch"), 40),
                "started": started(run),
                "took": took(run),
                "command": run.command,
                "path": run.path,
            }
        )
        said = f" It says: {run.reason}." if run.reason else ""
        if run.status == "running":
            remarks.append(f"{run.label} was not finished: it still runs, or was killed.{said}")
        elif run.status != "complete":
            remarks.append(f"{run.label} is {run.status}: cases may be missing.{said}")
        if not run.cases:
            remarks.append(f"{run.label} holds no case.")
    return rows, remarks


def other_hardware(group: Sequence[Run]) -> list[str]:
    """In what the hardware differs between reports of the same benchmark."""
    differing = {field.name for field in environments(group) if field.differs}
    return [name.replace("_", " ") for name in HARDWARE if name in differing]


def failures(runs: Sequence[Run]) -> Table | None:
    bad = [(run, case) for run in runs for case in run.cases if case.check.startswith("failed")]
    rows = [[run.label, case.label, case.check.removeprefix("failed: ")] for run, case in bad][
        :MAX_FAILURES
    ]
    note = shortened(MAX_FAILURES, len(bad), "failed cases").replace("drawn", "listed")
    header = ["report", "case", "reason"]
    every = frozenset(range(len(rows)))
    return Table("Failed cases", header, rows, every, note) if rows else None


def topologies(runs: Sequence[Run]) -> list[dict[str, str]]:
    """Each different one, once a report; four at most."""
    blocks = []
    for run in runs:
        found = run.environment.get("topologies")
        texts = dict.fromkeys(map(str, found)) if isinstance(found, list) else {}
        for words in list(texts)[:4]:
            if "\n" in words:
                blocks.append({"label": run.label, "text": text(words, 8000, lines=True)})
    return blocks


def node_differences(runs: Sequence[Run]) -> list[str]:
    lines = []
    for run in runs:
        found = run.environment.get("differences")
        for line in found[:20] if isinstance(found, list) else []:
            lines.append(f"{run.label}: {text(line, 300)}")
    return lines


# -- HTML ------------------------------------------------------------------------------------------


def page(runs: Sequence[Run], args: argparse.Namespace) -> str:
    """The whole document."""
    import jinja2
    from markupsafe import Markup

    from common.plots import draw

    drawn = 0

    def show(figure: Figure) -> dict[str, Any]:
        nonlocal drawn
        drawn += 1
        drawing = draw(figure, drawn)
        # what plots.py returns is markup, made of escaped text
        legend = [(Markup(swatch), words) for swatch, words in drawing.legend]
        return {"title": figure.title, "note": figure.note, "svg": Markup(drawing.svg)} | {
            "legend": legend
        }

    def arrange(section: Section) -> dict[str, Any]:
        room = max(0, MAX_FIGURES - drawn)
        left_out = len(section.figures) - room
        notes = list(section.notes)
        if left_out > 0:
            notes.append(f"{left_out} figures are left out: a page has at most {MAX_FIGURES}.")
        return {
            "title": section.title,
            "notes": notes,
            "figures": [show(figure) for figure in section.figures[:room]],
            "tables": [aligned(table) for table in section.tables],
        }

    benchmarks = []
    for group in by_benchmark(runs):
        sections = [arrange(s) for s in sections_of(group, Options(limit=args.limit))]
        names = ", ".join(run.label for run in group)
        benchmarks.append(
            {
                "name": group[0].benchmark,
                "reports": f"From {names}.",
                "constants": constants(group),
                "sections": sections,
            }
        )
    fields = environments(runs)
    differing = [field.name for field in fields if field.differs]
    hardware = [(group[0].benchmark, other_hardware(group)) for group in by_benchmark(runs)]
    rows, remarks = summary(runs)
    failed = failures(runs)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).resolve().parents[1] / "common/templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    cases = sum(len(run.cases) for run in runs)
    return environment.get_template("report.html.j2").render(
        title=text(args.title, 200) if args.title else title(runs),
        subtitle=f"{plural(len(runs), 'report')}, {plural(cases, 'case')}",
        benchmarks=benchmarks,
        runs=rows,
        remarks=remarks,
        failures=aligned(failed) if failed else None,
        fields=fields,
        hardware=[(name, ", ".join(fields)) for name, fields in hardware if fields],
        differing=f"{plural(len(differing), 'field')} of {len(fields)} differ"
        + ("s" if len(differing) == 1 else "")
        + " between the reports.",
        node_differences=node_differences(runs),
        topologies=topologies(runs),
        footer="Made by torchrun-bench's report.py. docs/numbers.md in its repository derives "
        "every number.",
    )


def title(runs: Sequence[Run]) -> str:
    names = list(dict.fromkeys(run.benchmark for run in runs))
    return f"torchrun-bench: {', '.join(names) if len(names) < 4 else f'{len(names)} benchmarks'}"


def numeric(table: Table) -> list[bool]:
    """Which columns hold nothing but numbers: these are aligned to the right."""

    def is_number(cell: str) -> bool:
        return cell == "-" or (cell[:1] in "0123456789.±>-" and cell.count(" ") in (0, 2))

    columns = list(zip(*table.rows, strict=True)) or [()] * len(table.header)
    found = [bool(column) and all(map(is_number, column)) for column in columns]
    return [i > 0 and right for i, right in enumerate(found)]


def aligned(table: Table) -> dict[str, Any]:
    return {
        "title": table.title,
        "header": table.header,
        "rows": table.rows,
        "failed": table.failed,
        "note": table.note,
        "right": numeric(table),
    }


# -- Markdown --------------------------------------------------------------------------------------


def markdown_of(runs: Sequence[Run]) -> str:
    """The summary and the tables, for a README or a pull request."""
    blocks = []
    rows, remarks = summary(runs)
    columns = ("label", "benchmark", "status", "cases", "where", "torch", "started")
    header = ["report", *columns[1:5], "PyTorch", "started"]
    blocks.append(_markdown(Table("Reports", header, [[str(r[c]) for c in columns] for r in rows])))
    blocks += [markdown.escape(line) for line in remarks]
    failed = failures(runs)
    if failed:
        blocks.append(_markdown(failed))
    for group in by_benchmark(runs):
        blocks.append(f"## {markdown.escape(group[0].benchmark)}")
        shared = constants(group)
        if shared:
            blocks.append(f"In all cases: {markdown.escape(shared)}.")
        blocks += [_markdown(table) for table in markdown_tables(group)]
    return "\n\n".join(blocks) + "\n"


def markdown_tables(group: Sequence[Run]) -> list[Table]:
    """A benchmark's tables; where it has none, those that stand under its figures."""
    tables = tables_of(group)
    return tables or [t for s in sections_of(group, Options()) for t in s.tables]


def _markdown(table: Table) -> str:
    note = f"\n\n{markdown.escape(table.note)}" if table.note else ""
    body = markdown.table(table.header, table.rows, numeric(table))
    return f"### {markdown.escape(table.title)}\n\n{body}{note}"


# -- the run ---------------------------------------------------------------------------------------


def main(args: argparse.Namespace) -> int:
    target = None
    if args.output is not None:
        target = check_output(args.output)
        for package in ("jinja2", "matplotlib"):
            if importlib.util.find_spec(package) is None:
                cli.refuse(f"a page needs {package}; pip install {package}, or use --markdown")
    runs = read(args)
    if args.limit is not None and all(run.benchmark != "collectives" for run in runs):
        cli.refuse("--limit has no effect without a report of collectives.py; leave it out")
    if target is not None:
        document = page(runs, args)
        try:
            replace_file(target, document)
        except OSError as error:
            print(
                f"report.py: error: cannot write {text(args.output)}: {error.strerror}; "
                "what was there is as it was",
                file=sys.stderr,
            )
            return 1
        size = significant(len(document.encode()) / 1e3, 3)
        if not args.markdown:
            print(f"{text(args.output)}: {plural(len(runs), 'report')}, {size} kB")
    if args.markdown:
        return say(markdown_of(runs))
    return 0


def say(words: str) -> int:
    """Print; whoever reads may stop reading."""
    try:
        sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
        sys.stdout.write(words)
        sys.stdout.flush()
    except OSError as error:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            print(f"report.py: error: cannot print: {error.strerror}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(ARGS))
