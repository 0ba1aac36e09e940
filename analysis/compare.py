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
    undecided neither: measure more runs. With one run a side always

Cases are joined by their keys. Reads reports of this project, of PyTorch's own DDP benchmark, and
of nccl-tests (-J). With --history the newest run of a folder is compared with those before it.

    python analysis/compare.py base.jsonl --test test.jsonl
    python analysis/compare.py old/ --test new/ --margin 3% --fail-on slower --format markdown
    python analysis/compare.py --history reports/ --plot history.svg

Exit status: 0, also where nothing could be decided; 1 on what --fail-on names; 2 bad usage.
docs/compare.md derives the numbers. BSD-3-Clause.
"""

import argparse
import gc
import json
import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict
from math import exp, log
from pathlib import Path
from statistics import fmean

import tabulate

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.load import Run, find, load
from analysis.show import clean, markdown, markdown_table, show_time
from analysis.verdicts import HARDWARE, Comparison, Design, Difference, Result, compare, fields
from common.cli import Parser, fraction, list_of, positive_int, refuse

VERDICTS = ("slower", "faster", "same", "undecided", "missing", "new", "not compared")
FAILURES = ("slower", "faster", "undecided", "missing")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("base", nargs="*", metavar="BASE", help="reports, folders of reports, or patterns")
    add("--test", nargs="+", metavar="TEST", help="the same, of what is compared with BASE")
    add("--history", metavar="DIR", help="a folder of reports over time, instead of BASE and TEST")
    last = "with --history: runs before the newest one that count (default: 10)"
    add("--last", type=positive_int, default=10, metavar="N", help=last)
    add("--plot", metavar="PATH", help="with --history: draw each case over time, .svg or .png")
    paired = "the first runs of BASE and TEST were neighbours in time, and so on: a drift cancels"
    add("--paired", action="store_true", help=paired)
    turns = "as --paired, of runs that ab.py --interleave has made: block by block"
    add("--interleaved", action="store_true", help=turns)
    add_verdict_flags(parser)
    add("--measure", metavar="NAME", help="another step of the cases, or a metric in seconds")
    args = parser.parse_args(argv)
    sides = bool(args.base or args.test)
    if args.history is not None and (sides or args.paired or args.interleaved):
        refuse("--history compares over time; leave out BASE, --test, --paired and --interleaved")
    if args.history is None and args.plot:
        refuse("--plot draws a history; add --history DIR, or make a page with analysis/report.py")
    if args.history is None and not (args.base and args.test):
        refuse("expected reports and --test reports, e.g. compare.py base.jsonl --test test.jsonl")
    args.paired |= args.interleaved
    return args


def add_verdict_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that ab.py has as well."""
    add = parser.add_argument
    margin = "the smallest change that matters (default: 2%%)"
    add("--margin", type=fraction, default=0.02, metavar="P", help=margin)
    key = "join cases that differ in these fields of their keys, e.g. comm_hook; a list"
    add("--ignore-key", type=list_of(str), default=[], metavar="NAME", help=key)
    fail = f"exit with 1 where a case, or the mean, is one of {', '.join(FAILURES)}; a list"
    add("--fail-on", type=list_of(str, FAILURES), default=[], metavar="VERDICT", help=fail)
    add("--format", choices=("table", "markdown", "json"), default="table", help="(default: table)")


# -- as text ---------------------------------------------------------------------------------------


def show(found: Comparison, style: str) -> str:
    if style == "json":
        return json.dumps({"schema": "torchrun-bench-compare/2"} | asdict(found), indent=1)
    notes = [("warning", line) for line in found.warnings]
    for difference in found.environment:
        kind = "THE HARDWARE DIFFERS" if difference.hardware else "environment"
        notes.append((kind, show_difference(difference)))
    if style == "markdown":
        lines = [f"**{counted(found.cases)}**", "", markdown(heading(found), 1000), ""]
        lines += [f"- **{kind}**: {markdown(text, 500)}" for kind, text in notes]
        lines += ["", markdown_table(*table(found), numbers=2), ""]
        return "\n".join([*lines, *(f"- {markdown(line, 500)}" for line in remarks(found))])
    lines = [f"# torchrun-bench compare {heading(found)}"]
    lines += [f"# {kind}: {text}" for kind, text in notes]
    header, rows = table(found)
    tabulate.MIN_PADDING = 0
    align = ("left", "right", "right", *("left",) * (len(header) - 3))
    text = tabulate.tabulate(rows, header, "simple", colalign=align, disable_numparse=True)
    body = [line.rstrip() for line in text.splitlines()]
    if found.mean:
        body.insert(-1, body[1])
    ends = [f"# {counted(found.cases)}", *(f"# {line}" for line in remarks(found))]
    return "\n".join([*(clean(line, 500) for line in lines), "", *body, "", *ends])


def heading(found: Comparison) -> str:
    names = ", ".join(dict.fromkeys(case.benchmark for case in found.cases))
    measures = ", ".join(dict.fromkeys(case.measure for case in found.compared))
    m, n = len(found.base), len(found.test)
    how = "the run is the unit" if m + n > 2 else "one run a side"
    if found.design.paired:
        how = "the pair of runs is the unit"
        how += ", their blocks took turns" * found.design.interleaved
    margin = f"margin {found.design.margin * 100:g} %"
    return f"{names} ({measures}): {m} of BASE, {n} of TEST; {margin}; {how}"


def table(found: Comparison) -> tuple[list[str], list[list[str]]]:
    rows = []
    for case in found.cases:
        times = [show_mean(side) for side in (case.base_s, case.test_s)]
        rows.append([case.label, *times, *last_cells(case)])
    if found.mean:
        rows.append([found.mean.label, "", "", *last_cells(found.mean)])
    return ["case", "BASE", "TEST", "TEST is", "95 % interval", "verdict"], rows


def last_cells(case: Result) -> list[str]:
    interval = "-" if case.ci95 is None else " to ".join(f"{end:.4g}" for end in case.ci95)
    return [show_ratio(case.ratio), interval, case.verdict]


def show_ratio(ratio: float | None) -> str:
    """`1.04x slower`, `1.04x faster`, or `1.00x`."""
    if ratio is None:
        return "-"
    factor = max(ratio, 1 / ratio)
    shown = f"{factor:.2f}x" if factor < 99.5 else f"{factor:.3g}x"
    return shown if shown == "1.00x" else f"{shown} {'slower' if ratio > 1 else 'faster'}"


def show_mean(times: Sequence[float]) -> str:
    return show_time(exp(fmean(map(log, times)))) if times else "-"


def show_difference(difference: Difference) -> str:
    base, test = ("; ".join(side) for side in (difference.base, difference.test))
    return f"{difference.field}: {clean(base, 150)} in BASE, {clean(test, 150)} in TEST"


def counted(cases: Sequence[Result]) -> str:
    numbers = [(sum(case.verdict == name for case in cases), name) for name in VERDICTS]
    return ", ".join(f"{number} {name}" for number, name in numbers if number)


def remarks(found: Comparison) -> list[str]:
    """Why cases are undecided, and how many runs might decide them; other remarks by case."""
    groups: dict[str, list[Result]] = {}
    for case in found.cases:
        if case.reason:
            groups.setdefault(f"{case.verdict}: {clean(case.reason)}", []).append(case)
    lines = [
        f"{group[0].label if len(group) == 1 else f'{len(group)} cases'}, {reason}"
        for reason, group in groups.items()
    ]
    undecided = [case for case in found.compared if case.verdict == "undecided"]
    known = sorted(case.runs_needed for case in undecided if case.runs_needed)
    if any(case.ci95 is None for case in undecided):
        lines.append("measure several runs a side: 3 at the least, better 6")
    elif known:
        middle, most = known[(len(known) - 1) // 2], f"{known[-1]} (all)"
        most = most if len(known) == len(undecided) else "over 1000 (some)"
        shown = f"{middle}" if most == f"{middle} (all)" else f"{middle} (half of them) to {most}"
        margin = f"+-{found.design.margin * 100:g} %"
        lines.append(f"about {shown} runs a side would narrow the intervals to {margin}")
    return lines


def conclude(text: str, verdicts: Collection[str], fail_on: Sequence[str]) -> int:
    """Print the result; the exit status: 1 for a verdict that `fail_on` names, or a full disk."""
    try:
        print(text.encode("utf-8", "replace").decode(), flush=True)
    except OSError as error:  # closed, as by `| head`, or a full disk
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        refuse(f"cannot print: {error.strerror}", status=1)
    if failures := [name for name in fail_on if name in verdicts]:
        refuse(f"failed: {', '.join(failures)} (--fail-on)", status=1)
    if fail_on and "undecided" in verdicts:
        print("# some cases are undecided, which --fail-on does not name", file=sys.stderr)
    return 0


# -- the sides -------------------------------------------------------------------------------------


def two_sides(args: argparse.Namespace) -> Comparison:
    count = len(find(args.base))
    runs = load([*args.base, *args.test], args.measure, args.ignore_key)
    sides = [in_order(side) for side in (runs[:count], runs[count:])]
    return compare(sides[0], sides[1], Design(args.margin, args.paired, args.interleaved))


def in_order(runs: Sequence[Run]) -> list[Run]:
    """In the order of their start; a run that is there twice counts once."""
    unique: dict[str, Run] = {}
    for run in runs:
        other = unique.setdefault(run.identity, run)
        if other is not run:
            line = f"warning: {run.path} is left out: it holds the same run as {other.path}"
            print(clean(line, 500), file=sys.stderr)
    return sorted(unique.values(), key=lambda run: run.report.started_at)


def over_time(args: argparse.Namespace) -> list[Comparison]:
    """The newest run of each benchmark on each machine, against those before it."""
    groups: dict[str, list[Run]] = {}
    for run in in_order(load([args.history], args.measure, args.ignore_key)):
        machine = {name: value for name, value in fields(run).items() if name in HARDWARE}
        groups.setdefault(f"{run.report.benchmark} {machine}", []).append(run)
    if args.plot:
        from analysis.figures import plot_history  # matplotlib takes a second to import

        plot_history(list(groups.values()), args.plot)
    groups = {name: runs for name, runs in groups.items() if len(runs) > 1}
    if not groups:
        raise ValueError(f"--history {args.history}: no benchmark has two reports of one machine")
    design = Design(args.margin)
    return [compare(runs[:-1][-args.last :], runs[-1:], design) for runs in groups.values()]


def main() -> int:
    args = parse_args()
    gc.disable()  # a report is millions of numbers without a cycle among them
    try:
        found = over_time(args) if args.history is not None else [two_sides(args)]
    except ValueError as error:
        refuse(clean(error, 1000))
    except MemoryError:
        refuse("there is not enough memory for these reports; give fewer at a time")
    text = "\n\n".join(show(comparison, args.format) for comparison in found)
    if args.format == "json" and len(found) > 1:
        text = json.dumps([json.loads(show(comparison, "json")) for comparison in found], indent=1)
    return conclude(text, {v for comparison in found for v in comparison.verdicts}, args.fail_on)


if __name__ == "__main__":
    sys.exit(main())
