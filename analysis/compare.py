#!/usr/bin/env python3
# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "numpy>=1.26", "pandas>=2.1", "scipy>=1.11", "tabulate>=0.9", "matplotlib>=3.8"
# ]
# ///
"""Is TEST slower than BASE, faster, the same, or can these reports not tell?

The run is the unit: its time is the median over its iterations of the slowest rank. The interval is
that of the ratio TEST / BASE, 95 %, by Student's t on the logarithms of the runs' times. slower and
faster: it excludes 1, with a false discovery rate of 5 % over all cases, and the ratio is beyond
--margin. same: it lies within --margin. undecided: neither; measure more runs. One run a side is
always undecided. Cases are joined by their keys.

Reads files, folders or patterns: reports of this project, of PyTorch's DDP benchmark, of nccl-tests
(-J). With --history the newest run of a folder is compared with those before it.

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
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from math import exp, log
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.load import by_benchmark, find, load, rows_of
from analysis.show import check_output, clean, markdown, put, show_table, show_time
from analysis.verdicts import MAX_RUNS, Comparison, Design, Result, compare
from common.cli import Parser, checked, fraction, list_of, positive_int, refuse

FAILURES = ("slower", "faster", "undecided", "missing")


def add_verdict_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that ab.py has as well."""
    add = parser.add_argument
    margin = "the smallest change that matters (default: 2%%)"
    add("--margin", type=fraction, default=0.02, metavar="P", help=margin)
    key = "join cases that differ in these fields of their keys; a list"
    add("--ignore-key", type=list_of(str), default=[], metavar="NAME", help=key)
    fail = f"exit with 1 where a case, or the mean, is one of {', '.join(FAILURES)}; a list"
    add("--fail-on", type=list_of(str, FAILURES), default=[], metavar="VERDICT", help=fail)
    add("--format", choices=("table", "markdown", "json"), default="table", help="(default: table)")


def show(found: Comparison, style: str) -> str:
    """A comparison as text; style: table or markdown."""
    above = [heading(found), *(f"warning: {line}" for line in found.warnings)]
    for field in found.environment:
        base, test = clean("; ".join(field.base), 150), clean("; ".join(field.test), 150)
        kind = "THE HARDWARE DIFFERS" if field.hardware else "environment"
        above.append(f"{kind}: {field.field}: {base} in BASE, {test} in TEST")
    header = ["case", "BASE", "TEST", "TEST is", "95 % interval", "verdict"]
    rows = [cells(case) for case in (*found.cases, found.mean) if case]
    body = show_table(header, rows, (1, 2), style).splitlines()
    if found.mean and style == "table":
        body.insert(-1, body[1])
    mark, escape = ("-", markdown) if style == "markdown" else ("#", clean)
    notes = [[f"{mark} {escape(line, 500)}" for line in side] for side in (above, below(found))]
    return "\n".join([*notes[0], "", *body, "", *notes[1]])


def heading(found: Comparison) -> str:
    names = ", ".join(dict.fromkeys(case.benchmark for case in found.cases))
    measures = ", ".join(dict.fromkeys(case.measure for case in found.cases if case.measure))
    m, n, design = len(found.base), len(found.test), found.design
    how = "the run is the unit" if m + n > 2 else "one run a side"
    how = "the pair of runs is the unit" if design.paired else how
    how += ", their blocks took turns" * design.interleaved
    how += f"; {design.looks} looks share the 5 % of error" * (design.looks > 1)
    sides = f"{m} of BASE, {n} of TEST; margin {design.margin * 100:g} %"
    return f"torchrun-bench compare {names} ({measures}): {sides}; {how}"


def cells(case: Result) -> list[str]:
    times = [show_time(exp(fmean(map(log, s)))) if s else "-" for s in (case.base_s, case.test_s)]
    times = times if case.key else ["", ""]  # a mean of different cases has no time of its own
    interval = "-" if case.ci95 is None else " to ".join(f"{end:.4g}" for end in case.ci95)
    words = "-"
    if case.ratio is not None:
        words = f"{max(case.ratio, 1 / case.ratio):.2f}x"
        words += "" if words == "1.00x" else " slower" if case.ratio > 1 else " faster"
    return [case.label, *times, words, interval, case.verdict]


def below(found: Comparison) -> list[str]:
    """How many cases have each verdict, why no better one, and how many runs might decide them."""
    counts = Counter(case.verdict for case in found.cases)
    reasons = Counter(f"{case.verdict}: {case.reason}" for case in found.cases if case.reason)
    lines = [", ".join(f"{n} {verdict}" for verdict, n in counts.items())]
    lines += [f"{n} case{'s' * (n > 1)}, {reason}" for reason, n in reasons.items()]
    wide = [case for case in found.cases if case.verdict == "undecided" and case.ci95]
    most = max((case.runs_needed or MAX_RUNS for case in wide), default=0)
    if most > len(found.base):
        margin = f"+-{found.design.margin * 100:g} %"
        lines.append(f"up to {most} runs a side would narrow the intervals to {margin}")
    return lines


def conclude(found: Sequence[Comparison], style: str, fail_on: Sequence[str]) -> int:
    """Print the results; the exit status: 1 for a verdict that `fail_on` names."""
    if style == "json":
        documents = [{"schema": "torchrun-bench-compare/2"} | asdict(one) for one in found]
        put(json.dumps(documents if len(found) > 1 else documents[0], indent=1))
    else:
        put("\n\n".join(show(comparison, style) for comparison in found))
    verdicts = {case.verdict for one in found for case in (*one.cases, one.mean) if case}
    if failures := [name for name in fail_on if name in verdicts]:
        refuse(f"failed: {', '.join(failures)} (--fail-on)", status=1)
    return 0


def two_sides(args: argparse.Namespace) -> Comparison:
    runs = load([*args.base, *args.test], args.measure, args.ignore_key, join_pytorch=True)
    paths = find(args.base)
    base, test = ([run for run in runs if (run.label in paths) is side] for side in (True, False))
    paired = args.paired or args.interleaved
    return compare(base, test, Design(args.margin, paired, args.interleaved))


def over_time(args: argparse.Namespace) -> list[Comparison]:
    """The newest run of each benchmark against those before it."""
    if args.plot is not None:
        check_output(args.plot, (".svg", ".png", ".pdf"), find([args.history]))
    groups = by_benchmark(load([args.history], args.measure, args.ignore_key)).values()
    timed = [runs for runs in groups if any(row.time_s for row in rows_of(runs))]
    several = [runs for runs in timed if len(runs) > 1]
    found = [compare(runs[-1 - args.last : -1], runs[-1:], Design(args.margin)) for runs in several]
    if not found:
        raise ValueError(f"--history {args.history}: no benchmark has two reports with times")
    if args.plot is not None:
        from analysis.figures import plot_history  # matplotlib takes a second to import

        plot_history(several, args.plot)
    return found


def main() -> int:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("base", nargs="*", metavar="BASE", help="reports, folders of reports, or patterns")
    add("--test", nargs="+", metavar="TEST", help="the same, of what is compared with BASE")
    add("--history", metavar="DIR", help="a folder of reports over time, instead of BASE and TEST")
    add("--last", type=positive_int, default=10, metavar="N", help="of its runs (default: 10)")
    add(
        "--plot",
        metavar="PATH",
        help="with --history: draw each case over time, .svg, .png or .pdf",
    )
    add("--paired", action="store_true", help="run i of BASE and of TEST were neighbours in time")
    add("--interleaved", action="store_true", help="so were their blocks: ab.py --interleave")
    measure = "another step of the cases, or a time or rate of theirs"
    add("--measure", type=checked(str, bool, "a name"), metavar="NAME", help=measure)
    add_verdict_flags(parser)
    args = parser.parse_args()
    given = bool(args.base), bool(args.test), bool(args.history)
    if given not in ((True, True, False), (False, False, True)):
        what = "compare.py base.jsonl --test test.jsonl, or compare.py --history reports/"
        refuse(f"expected reports of two sides, or a history; e.g. {what}")
    if args.plot is not None and not args.history:
        refuse("--plot draws runs over time: it needs --history, e.g. --history reports/")
    if args.history and (args.paired or args.interleaved):
        refuse("--paired and --interleaved are about BASE and --test: a history has no pairs")
    gc.disable()  # a report is millions of numbers without a cycle among them
    try:
        found = over_time(args) if args.history else [two_sides(args)]
    except (ValueError, OSError) as error:
        refuse(clean(error, 1000))
    return conclude(found, args.format, args.fail_on)


if __name__ == "__main__":
    sys.exit(main())
