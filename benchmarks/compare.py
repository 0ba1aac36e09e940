#!/usr/bin/env python3
"""Is TEST slower than BASE, faster, the same, or can these reports not tell?

    time      of a run: the median over its iterations of the slowest rank; of several runs a side
              the geometric mean
    ratio     time of TEST / time of BASE, over 1 is slower; `1.04x faster` is a ratio of 1/1.04
    interval  95 %, by Student's t on the logarithms of the runs' times. The run is the unit, since
              runs differ by more than their iterations tell
    slower    the interval excludes 1 (with a false discovery rate of 5 % over all cases) and the
              ratio is beyond --margin; `faster` likewise
    same      the interval lies within --margin
    undecided neither: measure more runs. With one run a side always, unless --single-run

Cases are joined by their keys. Reports of this project, and of PyTorch's own DDP benchmark.
With --history a folder of reports over time is searched for changes instead, and its newest run
is compared with the ones before it.

    python benchmarks/compare.py base.json --test test.json
    python benchmarks/compare.py old/ --test new/ --margin 3% --fail-on slower --format markdown
    python benchmarks/compare.py --history reports/

Exit status: 0, also where nothing could be decided; 1 on what --fail-on names; 2 bad usage.
Written for this project. BSD-3-Clause.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import bandwidth, cli

FAILURES = ("slower", "faster", "undecided", "missing")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = cli.Parser(description=__doc__)
    add = parser.add_argument
    add("base", nargs="*", metavar="BASE", help="reports, folders of reports, or patterns")
    add("--test", nargs="+", metavar="TEST", help="the same, of what is compared with BASE")
    add("--history", metavar="DIR", help="a folder of reports over time, instead of BASE and TEST")
    add(
        "--margin",
        type=cli.percentage,
        default=0.02,
        metavar="P",
        help="the smallest change that matters (default: 2%%)",
    )
    add(
        "--paired",
        action="store_true",
        help="the first run of BASE and the first of TEST were neighbours in time, and so on: "
        "the pair is the unit, and a drift of the machine cancels",
    )
    add(
        "--interleaved",
        action="store_true",
        help="as --paired, of runs that ab.py --interleave has made: their blocks are compared",
    )
    add(
        "--single-run",
        action="store_true",
        help="with one run a side decide by its iterations, as if runs differed in nothing else",
    )
    add(
        "--measure",
        metavar="NAME",
        help="compare other samples of the cases, e.g. 'local compute' or out_of_place, or a "
        "metric in seconds, e.g. first_iteration_s (default: the step, call, update or link)",
    )
    add(
        "--ignore-key",
        type=cli.list_of(str),
        default=[],
        metavar="NAME",
        help="join cases that differ in these fields of their keys, e.g. comm_hook where BASE was "
        "measured with one and TEST with another; a list (default: none)",
    )
    add(
        "--fail-on",
        type=cli.list_of(str, FAILURES),
        default=[],
        metavar="VERDICT",
        help=f"exit with 1 where a case, or the mean, is one of {', '.join(FAILURES)} (not, or no "
        "longer, measured in TEST); a list (default: none)",
    )
    add("--format", choices=("table", "markdown", "json"), default="table", help="(default: table)")
    add(
        "--max-size",
        type=cli.as_type(bandwidth.parse_size),
        default=2**29,
        metavar="SIZE",
        help="refuse larger reports (default: 512M)",
    )
    args = parser.parse_args(argv)
    usage = "e.g. compare.py base.json --test test.json"
    if args.history is not None:
        given = {"BASE": args.base, "--test": args.test, "--single-run": args.single_run}
        given |= {"--paired": args.paired, "--interleaved": args.interleaved}
        for name, value in given.items():
            if value:
                cli.refuse(f"{name} has no effect with --history, which compares over time")
    elif not args.base:
        cli.refuse(f"expected reports before --test, got none; {usage}")
    elif not args.test:
        cli.refuse(f"expected --test and the reports to compare with BASE, got none; {usage}")
    args.paired |= args.interleaved
    if args.single_run and args.paired:
        name = "--interleaved" if args.interleaved else "--paired"
        cli.refuse(f"--single-run has no effect with {name}; give one of them")
    if args.max_size < 1:
        cli.refuse("--max-size must be at least one byte; e.g. --max-size 1G")
    return args


if __name__ == "__main__":
    ARGS = parse_args()  # before the imports below, so that --help need not wait for them

import gc
import json
from typing import Any

from common import compare_text, history_text
from common.compare import compare, missing_in_test
from common.history import find_all, load_all, parse_time, study
from common.runs import Run, find_reports, identity, load_run, load_runs
from common.text import printable


def one_side(found: list[Run]) -> list[Run]:
    """The runs of one side in the order of their start; a run that is there twice counts once."""
    runs: dict[str, Run] = {}
    for run in found:
        if run.digest in runs:
            same = (
                f"warning: {run.path} is left out: it holds the same run as {runs[run.digest].path}"
            )
            print(printable(same, 500), file=sys.stderr)
        runs.setdefault(run.digest, run)
    return sorted(runs.values(), key=lambda run: parse_time(run.started_at) or 0.0)


def find_sides(args: argparse.Namespace) -> list[list[str]]:
    """The paths of both sides; no file may be there twice, by whatever name."""
    sides = [find_reports(args.base), find_reports(args.test)]
    seen: dict[tuple[int, int], str] = {}
    for paths in sides:
        for path in paths:
            file = identity(path)
            if file in seen:
                raise ValueError(f"{path} is the same file as {seen[file]}; give every report once")
            seen[file] = path
    return sides


def compare_sides(args: argparse.Namespace) -> tuple[str, set[str]]:
    """The text to print, and the verdicts in it."""
    base, test = find_sides(args)
    runs = load_runs([*base, *test], args.measure, args.max_size, args.ignore_key)
    sides = [one_side(runs[: len(base)]), one_side(runs[len(base) :])]
    counts = (len(sides[0]), len(sides[1]))
    if args.single_run and counts != (1, 1):
        raise ValueError(
            f"--single-run has no effect with {counts[0]} and {counts[1]} runs, which tell how "
            "much runs differ; leave it out"
        )
    found = compare(*sides, args.margin, args.single_run, args.paired, interleaved=args.interleaved)
    verdicts = {case.verdict for case in [*found.cases, *([found.mean] if found.mean else [])]}
    if missing_in_test(found):
        verdicts.add("missing")
    if args.format == "json":
        paths = ([run.path for run in sides[0]], [run.path for run in sides[1]])
        return dump(compare_text.as_json(found, paths, args.margin)), verdicts
    show = compare_text.as_table if args.format == "table" else compare_text.as_markdown
    return show(found, counts, args.margin, args.single_run), verdicts


def look_back(args: argparse.Namespace) -> tuple[str, set[str]]:
    """The same for a folder of reports over time."""
    folder = args.history
    if not os.path.isdir(folder):
        raise ValueError(f"--history {folder}: expected a folder of reports")
    files, closed = find_all(folder)
    runs, unread = load_all(
        files, lambda path: load_run(path, args.measure, args.max_size, args.ignore_key)
    )
    unread = [*closed, *unread]
    if not runs:
        why = f"; {unread[0]}" if unread else ""
        raise ValueError(f"--history {folder}: there is no report in it that can be used{why}")
    found = study(runs, unread, args.margin)
    verdicts = {series.newest.verdict if series.newest else "missing" for series in found.series}
    if args.format == "json":
        return dump(history_text.as_json(found, folder, args.margin)), verdicts
    show = history_text.as_table if args.format == "table" else history_text.as_markdown
    return show(found, folder), verdicts


def dump(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=1, allow_nan=False)


def main(args: argparse.Namespace) -> int:
    try:
        text, verdicts = look_back(args) if args.history is not None else compare_sides(args)
    except ValueError as error:
        cli.refuse(printable(str(error), 1000))
    except MemoryError:
        cli.refuse("there is not enough memory for these reports; give fewer at a time")
    return compare_text.conclude("compare.py", text, verdicts, args.fail_on)


if __name__ == "__main__":
    gc.disable()  # a report is millions of numbers without a cycle among them
    sys.exit(main(ARGS))
