#!/usr/bin/env python3
"""Is TEST slower than BASE, faster, the same, or can these reports not tell?

The run is the unit: its time is the median over its iterations of the slowest rank. The interval is
that of the ratio TEST / BASE, 95 %, by Student's t on the logarithms of the runs' times. slower and
faster: it excludes 1, with a false discovery rate of 5 % over all cases, and the ratio is beyond
--margin. same: it lies within --margin. undecided: neither; measure more runs. One run a side is
always undecided. Cases are joined by their keys.

Reads reports of this project, of PyTorch's DDP benchmark and of nccl-tests (-J): files, folders or
patterns. With --history the newest run of a folder is compared with those before it.

    python analysis/compare.py base.jsonl --test test.jsonl
    python analysis/compare.py old/ --test new/ --margin 3% --fail-on slower --format markdown
    python analysis/compare.py --history reports/ --plot history.svg

Exit status: 0, also where nothing could be decided; 1 on what --fail-on names; 2 bad usage.
docs/compare.md derives the numbers. BSD-3-Clause.
"""

import argparse
import gc
import json
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict
from math import exp, log
from pathlib import Path
from statistics import fmean

import tabulate

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.load import Run, find, load
from analysis.show import clean, emit, markdown, markdown_table, show_time
from analysis.verdicts import HARDWARE, Comparison, Design, Result, compare, fields
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
    if args.history is not None and (args.base or args.test or args.paired or args.interleaved):
        refuse("--history compares over time; leave out BASE, --test, --paired and --interleaved")
    if args.history is None and args.plot:
        refuse("--plot draws a history; add --history DIR, or make a page with analysis/report.py")
    if args.history is None and not (args.base and args.test):
        refuse("expected reports and --test reports, e.g. compare.py base.jsonl --test test.jsonl")
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
    for d in found.environment:
        base, test = (clean("; ".join(d[side]), 150) for side in ("base", "test"))
        kind = "THE HARDWARE DIFFERS" if d["hardware"] else "environment"
        notes.append((kind, f"{d['field']}: {base} in BASE, {test} in TEST"))
    header = ["case", "BASE", "TEST", "TEST is", "95 % interval", "verdict"]
    rows = [cells(case) for case in found.cases]
    if found.mean:  # of different cases, which have no time together
        label, _, _, *rest = cells(found.mean)
        rows.append([label, "", "", *rest])
    verdicts = [case.verdict for case in found.cases]
    counts = ", ".join(f"{verdicts.count(v)} {v}" for v in VERDICTS if v in verdicts)
    if style == "markdown":
        lines = [f"**{counts}**", "", markdown(heading(found), 1000), ""]
        lines += [f"- **{kind}**: {markdown(text, 500)}" for kind, text in notes]
        lines += ["", markdown_table(header, rows, right=(1, 2)), ""]
        return "\n".join([*lines, *(f"- {markdown(line, 500)}" for line in remarks(found))])
    lines = [f"# torchrun-bench compare {heading(found)}"]
    lines += [f"# {kind}: {text}" for kind, text in notes]
    tabulate.MIN_PADDING = 0
    align = ("left", "right", "right", "left", "left", "left")
    text = tabulate.tabulate(rows, header, "simple", colalign=align, disable_numparse=True)
    body = [line.rstrip() for line in text.splitlines()]
    if found.mean:
        body.insert(-1, body[1])
    ends = [f"# {line}" for line in (counts, *remarks(found))]
    return "\n".join([*(clean(line, 500) for line in lines), "", *body, "", *ends])


def heading(found: Comparison) -> str:
    names = ", ".join(dict.fromkeys(case.benchmark for case in found.cases))
    measures = ", ".join(dict.fromkeys(case.measure for case in found.cases if case.measure))
    m, n, design = len(found.base), len(found.test), found.design
    margin = f"margin {design.margin * 100:g} %"
    how = "the run is the unit" if m + n > 2 else "one run a side"
    if design.paired:
        how = "the pair of runs is the unit" + ", their blocks took turns" * design.interleaved
    return f"{names} ({measures}): {m} of BASE, {n} of TEST; {margin}; {how}"


def cells(case: Result) -> list[str]:
    times = [show_time(exp(fmean(map(log, s)))) if s else "-" for s in (case.base_s, case.test_s)]
    interval = "-" if case.ci95 is None else " to ".join(f"{end:.4g}" for end in case.ci95)
    return [case.label, *times, show_ratio(case.ratio), interval, case.verdict]


def show_ratio(ratio: float | None) -> str:
    """`1.04x slower`, `1.04x faster`, or `1.00x`."""
    if ratio is None:
        return "-"
    factor = max(ratio, 1 / ratio)
    shown = f"{factor:.2f}x" if factor < 99.5 else f"{factor:.3g}x"
    return shown if shown == "1.00x" else f"{shown} {'slower' if ratio > 1 else 'faster'}"


def remarks(found: Comparison) -> list[str]:
    """Why cases are undecided, and how many runs might decide them; other remarks by case."""
    groups: dict[str, list[str]] = {}
    for case in found.cases:
        if case.reason:
            groups.setdefault(f"{case.verdict}: {clean(case.reason)}", []).append(case.label)
    lines = [
        f"{labels[0] if len(labels) == 1 else f'{len(labels)} cases'}, {reason}"
        for reason, labels in groups.items()
    ]
    undecided = [case for case in found.cases if case.verdict == "undecided"]
    known = sorted(case.runs_needed for case in undecided if case.runs_needed)
    if any(case.ci95 is None for case in undecided):
        lines.append("measure several runs a side: 3 at the least, better 6")
    elif known:
        half, most = str(known[(len(known) - 1) // 2]), str(known[-1])
        most = most if len(known) == len(undecided) else "over 1000"
        shown = half if half == most else f"{half} (half of them) to {most}"
        margin = f"+-{found.design.margin * 100:g} %"
        lines.append(f"about {shown} runs a side would narrow the intervals to {margin}")
    return lines


def conclude(text: str, verdicts: Collection[str], fail_on: Sequence[str]) -> int:
    """Print the result; the exit status: 1 for a verdict that `fail_on` names."""
    emit(text)
    if failures := [name for name in fail_on if name in verdicts]:
        refuse(f"failed: {', '.join(failures)} (--fail-on)", status=1)
    if fail_on and "undecided" in verdicts:
        print("# some cases are undecided, which --fail-on does not name", file=sys.stderr)
    return 0


# -- the sides -------------------------------------------------------------------------------------


def two_sides(args: argparse.Namespace) -> Comparison:
    count = len(find(args.base))
    runs = load([*args.base, *args.test], args.measure, args.ignore_key)
    paired = args.paired or args.interleaved
    design = Design(args.margin, paired, args.interleaved)
    return compare(in_order(runs[:count]), in_order(runs[count:]), design)


def in_order(runs: Sequence[Run]) -> list[Run]:
    """In the order of their start."""
    return sorted(runs, key=lambda run: run.report.started_at)


def over_time(args: argparse.Namespace) -> list[Comparison]:
    """The newest run of each benchmark on each machine, against those before it."""
    groups: dict[str, list[Run]] = {}
    for run in in_order(load([args.history], args.measure, args.ignore_key)):
        machine = {name: value for name, value in fields(run).items() if name in HARDWARE}
        groups.setdefault(f"{run.report.benchmark} {machine}", []).append(run)
    if args.plot:
        from analysis.figures import plot_history  # matplotlib takes a second to import

        plot_history(list(groups.values()), args.plot)
    several = [runs for runs in groups.values() if len(runs) > 1]
    if not several:
        raise ValueError(f"--history {args.history}: no benchmark has two reports of one machine")
    design = Design(args.margin)
    return [compare(runs[:-1][-args.last :], runs[-1:], design) for runs in several]


def main() -> int:
    args = parse_args()
    gc.disable()  # a report is millions of numbers without a cycle among them
    try:
        found = over_time(args) if args.history is not None else [two_sides(args)]
    except (ValueError, OSError) as error:
        refuse(clean(error, 1000))
    except MemoryError:
        refuse("there is not enough memory for these reports; give fewer at a time")
    shown = [show(comparison, args.format) for comparison in found]
    text = "\n\n".join(shown)
    if args.format == "json" and len(shown) > 1:
        text = f"[{','.join(shown)}]"
    return conclude(text, {v for comparison in found for v in comparison.verdicts}, args.fail_on)


if __name__ == "__main__":
    sys.exit(main())
