#!/usr/bin/env python3
# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "numpy>=1.26", "pandas>=2.1", "scipy>=1.11", "tabulate>=0.9"
# ]
# ///
"""Is TEST slower than BASE, faster, or the same? Or is there too little data to decide?

A run is the unit of observation, or a session if a side has 6 of them: runs of one host with gaps
below an hour. One session, such as tonight's run, is judged by the scatter of the others. The time
of an iteration is the maximum over ranks. The time of a run is the geometric mean over rounds of
block medians, or the median over iterations if the report has no rounds. BASE and TEST are
geometric means over runs or sessions, and the ratio is TEST / BASE. Its 95% confidence interval is
computed by Student's t on the logarithms of these times. Verdicts:

    slower, faster  the interval excludes 1, also at a false discovery rate of 5% over all cases,
                    and the ratio is beyond --margin
    same            the interval lies within --margin
    undecided       none of these, or fewer than two runs per side (or one beside 6 sessions) count
    failed          the case failed in at least half of TEST's runs

Interrupted runs, copies of a run, and runs during which other processes used more than a tenth of
the cores are left out, and listed with the reason. --allow-disturbed keeps the last kind.

Cases are joined by their keys. The input is files, folders or patterns: reports of this project or
of PyTorch's DDP benchmark, or JSON and logs of nccl-tests and rccl-tests. With --step, the input is
the logs of any program, in which a regular expression finds step times or rates.

    python analysis/compare.py base.jsonl --test test.jsonl
    python analysis/compare.py old/ --test new/ --margin 3% --fail-on slower
    python analysis/compare.py old_*.log --test new_*.log --skip 10 --unit ms \\
        --step 'elapsed time per iteration \\(ms\\): ([\\d.]+)'

Exit status: 0 success, 2 incorrect usage, 130 after Ctrl-C. With --fail-on: 1 if a case failed, or
if a case or the mean has one of the given verdicts; otherwise 4 if a case is undecided, missing or
cannot be compared; otherwise 0. docs/compare.md derives the numbers. BSD-3-Clause.
"""

import argparse
import gc
import html
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.logs import step_logs
from analysis.logs.suggestions import suggested
from analysis.runs import as_json
from analysis.runs.load import ENDINGS, Run, find, load
from analysis.runs.looks import compare
from analysis.runs.verdicts import (
    ALPHA,
    MAX_RUNS,
    ONE_SESSION,
    WIDEST,
    Comparison,
    Design,
    Result,
    differing_fields,
    geometric_mean,
    warning_of_order,
)
from analysis.show import clean, join_distinct, one_line, put, show_table, show_time
from common.stats import significant
from harness.cli import Parser, checked, fraction, list_of
from harness.exits import refuse

FAILURES = ("slower", "faster", "undecided", "missing")
NO_VERDICT = ("undecided", "missing", "not compared")
STATUSES = {"pass": 0, "failed": 1, "no verdict": 4}  # exit status of each outcome


def add_design_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that change verdicts. compare.py, ab.py and report.py share them."""
    add = parser.add_argument
    margin = "smallest change that matters (default: 2%%)"
    add("--margin", type=fraction, default=0.02, metavar="P", help=margin)
    key = "comma-separated fields of the keys; join cases that differ only in these"
    add("--ignore-key", type=list_of(str), default=[], metavar="NAME", help=key)
    allow = "keep runs that were disturbed by other processes; all verdicts are then marked"
    add("--allow-disturbed", action="store_true", help=allow)


def add_verdict_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for verdicts, gates and output. compare.py and ab.py share them."""
    add_design_flags(parser)
    fail = (
        "exit with 1 if a case failed, or if a case or the mean has one of these verdicts: "
        f"{', '.join(FAILURES)} (comma-separated); otherwise exit with 4 if a case has no verdict"
    )
    fail_on = list_of(str, FAILURES)
    parser.add_argument("--fail-on", type=fail_on, default=[], metavar="VERDICT", help=fail)
    form = "print a table, Markdown for a pull request, or JSON with all digits (default: table)"
    forms = ("table", "markdown", "json")
    parser.add_argument("--format", choices=forms, default="table", help=form)


def add_side_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for comparing two sides of existing reports, shared with report.py."""
    add = parser.add_argument
    test = "reports, folders or patterns to compare with BASE"
    add("--test", nargs="+", default=[], metavar="TEST", help=test)
    paired = "compare in pairs: run i of BASE and run i of TEST ran next to each other in time"
    add("--paired", action="store_true", help=paired)
    interleaved = "compare block by block: the runs of a pair were interleaved (ab.py --interleave)"
    add("--interleaved", action="store_true", help=interleaved)
    measure = "compare this step, time or rate, such as exposed_s, instead of the step time"
    add("--measure", type=checked(str, bool, "a name"), metavar="NAME", help=measure)


def outcome_of(comparison: Comparison, fail_on: Sequence[str]) -> tuple[str, str]:
    """`failed`, `no verdict` or `pass`, with the reason: `2 slower`. fail_on: verdicts that fail.

    `pass` requires a verdict for every case, because a gate without evidence has not passed. A case
    that failed makes the outcome `failed`, whatever `fail_on` contains.
    """
    failing = [*fail_on, "failed"]
    failed = [case for case in comparison.cases if case.verdict in failing]
    if failed:
        return "failed", count_verdicts(failed)
    if comparison.mean and comparison.mean.verdict in fail_on:
        return "failed", f"the mean is {comparison.mean.verdict}"
    unknown = [case for case in comparison.cases if case.verdict in NO_VERDICT]
    if unknown:
        return "no verdict", count_verdicts(unknown)
    return "pass", ""


def count_verdicts(results: Sequence[Result]) -> str:
    """`2 slower, 1 missing`, with the caveats of the verdicts."""
    counts = Counter(verdict_text(result) for result in results)
    return ", ".join(f"{n} {verdict}" for verdict, n in counts.items())


def verdict_text(result: Result) -> str:
    """`slower [load not recorded]`"""
    is_qualified = result.verdict in ("slower", "faster", "same") and result.caveats
    return f"{result.verdict} [{', '.join(result.caveats)}]" if is_qualified else result.verdict


def show(
    comparison: Comparison, fail_on: Sequence[str] = (), is_like_with_like: bool = False
) -> str:
    """Format a comparison as lines of text.

    is_like_with_like: TEST is BASE run again (an A/A test), so show the smallest change that would
    be detected instead of verdicts.
    """
    header, rows = table_of(comparison, is_like_with_like)
    table = show_table(header, rows, (1, 2)).splitlines()
    if comparison.mean:
        rule = table[1]
        table.insert(-1, rule)  # above the mean
    heads = [f"# {clean(line, 500)}" for line in lines_above(comparison)]
    notes = [*notes_of(comparison, is_like_with_like), *gate_lines(comparison, fail_on)]
    ends = [f"# {clean(line, 500)}" for line in notes]
    return "\n".join([*heads, "", *table, "", *ends])


def gate_lines(comparison: Comparison, fail_on: Sequence[str]) -> list[str]:
    """`--fail-on slower: failed (2 slower)`; nothing without --fail-on."""
    if not fail_on:
        return []
    outcome, why = outcome_of(comparison, fail_on)
    return [f"--fail-on {','.join(fail_on)}: {outcome}{f' ({why})' if why else ''}"]


def as_markdown(
    comparison: Comparison, fail_on: Sequence[str] = (), is_like_with_like: bool = False
) -> str:
    """The same as Markdown, for a comment on a pull request: gate and verdicts, table, lines."""
    header, rows = table_of(comparison, is_like_with_like)
    headline, *notes = notes_of(comparison, is_like_with_like)
    gate = [f"**{in_markdown(line)}**" for line in gate_lines(comparison, fail_on)]
    first, *others = lines_above(comparison)
    return "\n".join(
        [
            *gate,
            *([""] if gate else []),
            f"**{in_markdown(headline)}**",
            "",
            "| " + " | ".join(map(in_markdown, header)) + " |",
            "| --- | --: | --: | --- | --- | --- |",
            *("| " + " | ".join(map(in_markdown, row)) + " |" for row in rows),
            "",
            *(f"- {in_markdown(line)}" for line in (*notes, first, *others)),
        ]
    )


def in_markdown(text: str) -> str:
    """A text without any meaning in Markdown or HTML, and without mentions of users: names in
    reports may come from anywhere."""
    escaped = re.sub(r"[\\`*_{}\[\]#|~!$]", r"\\\g<0>", html.escape(clean(text, 500), quote=False))
    return escaped.replace("@", "@<!-- -->")


def table_of(
    comparison: Comparison, is_like_with_like: bool = False
) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of the table: the cases, then their mean if there is one."""
    confidence = f"{100 * (1 - comparison.design.alpha):g}%"
    last = "smallest change" if is_like_with_like else "verdict"
    header = ["case", "BASE", "TEST", "TEST is", f"{confidence} interval", last]
    rows = []
    mean = comparison.mean
    for result in [*comparison.cases, mean] if mean else comparison.cases:
        row = cells(result)
        if is_like_with_like:
            row[-1] = show_change(result.smallest_change)
        rows.append(row)
    return header, rows


def notes_of(comparison: Comparison, is_like_with_like: bool = False) -> list[str]:
    """The conclusions, which are printed below the table."""
    below = notes_like_with_like if is_like_with_like else lines_below
    verdicts, *more = below(comparison)
    return [verdicts, *comparison.remarks, *more]


def lines_above(comparison: Comparison) -> list[str]:
    """The lines above the table: heading, warnings, and differences of the environment."""
    lines = [heading(comparison), estimator(comparison)]
    for warning in comparison.warnings:
        lines.append(f"warning: {warning}")
    for difference in comparison.environment:
        base = clean("; ".join(difference.base), 150)
        test = clean("; ".join(difference.test), 150)
        kind = "THE HARDWARE DIFFERS" if difference.hardware else "environment"
        lines.append(f"{kind}: {difference.field}: {base} in BASE, {test} in TEST")
    return lines


def heading(comparison: Comparison) -> str:
    names = join_distinct(case.benchmark for case in comparison.cases)
    measures = join_distinct(case.measure for case in comparison.cases if case.measure)
    m = len(comparison.base)
    n = len(comparison.test)
    design = comparison.design
    if design.paired:
        how = "unit of observation: the pair of runs"
    elif m + n > 2:
        how = f"unit of observation: the {comparison.unit}"
    else:
        how = "one run per side"
    if design.interleaved:
        how += ", with interleaved blocks"
    if design.alpha < ALPHA:
        how += f"; {round(ALPHA / design.alpha)} looks share the error rate of {ALPHA * 100:g}%"
    sides = f"{m} of BASE, {n} of TEST; margin {design.margin * 100:g}%"
    return f"torchrun-bench compare {names} ({measures}): {sides}; {how}"


def estimator(comparison: Comparison) -> str:
    """How the times in the table were computed. Their quotient is the ratio."""
    kinds = join_distinct(kind for case in comparison.cases for kind in case.times_are)
    of_a_run = kinds.replace(", ", " or ") or "none"
    units = "sessions" if comparison.unit == "session" else "runs"
    return f"BASE and TEST: geometric means over {units}; time of a run: {of_a_run}"


def cells(result: Result) -> list[str]:
    """A row of the table."""
    base, test = show_mean(result.base_units_s), show_mean(result.test_units_s)
    if result.cases > 1:
        base, test = "", ""
    ratio, ends = show_ratio(result.ratio), show_ends(result)
    return [result.label, base, test, ratio, ends, verdict_text(result)]


def show_ends(result: Result) -> str:
    """`0.9686 to 1.037`; in brackets if the runs are not sufficient evidence; `no interval` if it
    is too wide to be informative."""
    if result.interval is None:
        return "-"
    if not result.is_informative:
        return "no interval"
    ends = " to ".join(map(significant, result.interval))
    return ends if result.enough or result.verdict != "undecided" else f"({ends})"


def show_mean(times_s: Sequence[float]) -> str:
    """The geometric mean of the times of runs or sessions."""
    mean = geometric_mean(times_s)
    return "-" if mean is None else show_time(mean)


def show_ratio(ratio: float | None) -> str:
    """`1.21x faster`"""
    if ratio is None:
        return "-"
    factor = f"{max(ratio, 1 / ratio):.2f}x"
    if factor == "1.00x":
        return factor
    return f"{factor} slower" if ratio > 1 else f"{factor} faster"


def show_change(change: float | None) -> str:
    """`3.1%`; `>200%` for a change by more than the factor beyond which no interval is shown."""
    if change is None:
        return "-"
    most = WIDEST - 1
    return f">{100 * most:g}%" if change > most else f"{significant(100 * change, 2)}%"


def lines_below(comparison: Comparison) -> list[str]:
    """The lines below the table: verdicts, reasons, and the number of runs that may decide."""
    cases = comparison.cases
    lines = [count_verdicts(cases)]
    if all(case.benchmark == step_logs.BENCHMARK for case in cases):
        are_rates = any(case.measure.startswith("1 /") for case in cases)
        read_as = "rates: the higher, the faster" if are_rates else "times: the lower, the faster"
        lines.append(f"the numbers of the logs were read as {read_as}")
    reasons = Counter(f"{case.verdict}: {case.reason}" for case in cases if case.reason)
    for reason, n in reasons.items():
        noun = "case" if n == 1 else "cases"
        lines.append(f"{n} {noun}, {reason}")
    if fields := ",".join(fields_that_join(cases)):
        lines.append(
            f"cases with the same name have different keys; --ignore-key {fields} joins them"
        )
    if any(case.disturbed for case in cases):
        in_pairs = "" if comparison.design.paired else ", or in pairs with ab.py"
        remedy = f"measure on an idle machine{in_pairs}"
        lines.append(f"{remedy}; --allow-disturbed keeps disturbed runs")
    lines += list(dict.fromkeys(case.scatter for case in cases if case.scatter))[:2]
    return lines + runs_that_decide(comparison)


def runs_that_decide(comparison: Comparison) -> list[str]:
    """The number of runs that may decide the cases whose intervals are too wide.

    `runs_needed` follows from the scatter of the runs at hand. In another sample of that size, the
    scatter is smaller about half of the time, and so is the interval. A verdict also requires that
    the interval lies within the margin or excludes 1, which tests/simulate_verdicts.py simulates.
    """
    wide = [c for c in comparison.cases if c.verdict == "undecided" and c.enough and c.interval]
    margin = f"+-{comparison.design.margin * 100:g}%"
    units = "sessions" if any(case.unit == "session" for case in wide) else "runs"
    if any(case.runs_needed is None or not case.is_informative for case in wide):
        more = f"more than {MAX_RUNS} {units} per side would be needed for {margin}"
        remedy = "look for the cause"
        if can_interleave(comparison):
            remedy += ", or use ab.py --interleave"
        return [f"the {units} vary too much: {more}; {remedy}"]
    most = max((case.runs_needed or 0 for case in wide), default=0)
    if most <= max((len(case.base_units_s) for case in wide), default=0):
        return []
    half = f"{most} {units} per side narrow the intervals to {margin} about half of the time"
    nearly_all = f"{3 * most} give one in about 9 of 10 comparisons of equal programs"
    return [f"{half}, and give a verdict less often; {nearly_all}"]


def can_interleave(comparison: Comparison) -> bool:
    """Return whether ab.py --interleave could improve the comparison: each run has a case that was
    measured in rounds, which own loops and logs lack."""
    runs = [*comparison.base, *comparison.test]
    has_rounds = all(any(row.rounds for row in run.rows.values()) for run in runs)
    return has_rounds and not comparison.design.interleaved


def fields_that_join(cases: Sequence[Result]) -> list[str]:
    """The fields in which missing cases differ from new cases with the same name."""
    missing = {case.label: case.key for case in cases if case.verdict == "missing"}
    fields: dict[str, None] = {}
    for case in cases:
        if case.verdict == "new" and case.label in missing:
            fields |= dict.fromkeys(differing_fields(missing[case.label], case.key))
    return list(fields)


def notes_like_with_like(comparison: Comparison) -> list[str]:
    """The meaning of the smallest change, and a warning if A differs from itself."""
    cases = comparison.cases
    count = max((len(case.base_s) for case in cases), default=0)
    what = f"smallest change: {count} runs per side detect it in 9 of 10 comparisons"
    caveats = dict.fromkeys(caveat for case in cases for caveat in case.caveats)
    lines = [f"{what} [{', '.join(caveats)}]" if caveats else what]
    reasons = Counter(case.reason for case in cases if case.reason and not case.enough)
    lines += [f"{n} case{'s' * (n > 1)}: {reason}" for reason, n in reasons.items()]
    differing = [case for case in cases if case.verdict in ("slower", "faster")]
    if differing:
        several = f"{len(differing)} case{'s' * (len(differing) > 1)}"
        what = f"A differs significantly from itself in {several}"
        lines.append(f"warning: {what}, so the runs may not be independent; is the machine shared?")
    return lines


def format_comparison(
    name: str,
    comparison: Comparison,
    fail_on: Sequence[str],
    is_like_with_like: bool = False,
    sides: tuple[str, str] = ("BASE", "TEST"),
) -> str:
    """Format a comparison. name: the value of --format. sides: the names in a JSON document."""
    if name == "table":
        return show(comparison, fail_on, is_like_with_like)
    if name == "markdown":
        return as_markdown(comparison, fail_on, is_like_with_like)
    gate = None
    if fail_on:
        outcome, why = outcome_of(comparison, fail_on)
        gate = {"fail_on": fail_on, "outcome": outcome, "why": why}
    pair = as_pair(comparison, *sides, is_like_with_like)
    status = exit_status(comparison, fail_on)
    return as_json.document([pair], gate=gate, status=status)


def as_pair(
    comparison: Comparison, base: str, test: str, is_like_with_like: bool = False
) -> dict[str, Any]:
    """A comparison for a JSON document. base, test: the names of the sides."""
    return as_json.pair_of(comparison, notes_of(comparison, is_like_with_like), base, test)


def exit_status(comparison: Comparison, fail_on: Sequence[str]) -> int:
    """The exit status; 0 without --fail-on. The last line of the table gives the reason."""
    return STATUSES[outcome_of(comparison, fail_on)[0]] if fail_on else 0


def two_sides(
    args: argparse.Namespace, runs: Sequence[Run], endings: Sequence[str] = ENDINGS
) -> Comparison:
    """Compare the runs of args.base with all other runs, which are those of args.test.

    endings: suffixes of the files to read from a folder.
    """
    base_paths = find(args.base, endings)
    base = [run for run in runs if run.path in base_paths]
    test = [run for run in runs if run.path not in base_paths]
    paired = args.paired or args.interleaved
    allow = args.allow_disturbed
    design = Design(args.margin, paired, args.interleaved, allow_disturbed=allow)
    comparison = compare(base, test, design)
    if not paired and not all(ONE_SESSION in case.caveats for case in comparison.cases):
        comparison.warnings.extend(warning_of_order(base, test))
    return comparison


def main() -> int:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("base", nargs="*", metavar="BASE", help="reports, folders of reports, or patterns")
    add_side_flags(parser)
    step_logs.add_step_flags(parser, "the files, which are logs of any program")
    add_verdict_flags(parser)
    args = parser.parse_args()
    if not args.base or not args.test:
        example = "e.g. compare.py base.jsonl --test test.jsonl"
        refuse(f"expected reports of two sides, BASE and --test TEST; {example}")
    gc.disable()  # a report is millions of numbers without reference cycles
    paths = [*args.base, *args.test]
    with one_line(paths), suggested():
        of_reports = {"--measure": args.measure, "--interleaved": args.interleaved}
        steps = step_logs.steps_of(args, of_reports)
        if steps:
            runs = step_logs.load_logs(paths, steps, args.ignore_key)
            comparison = two_sides(args, runs, steps.endings)
        else:
            runs = load(paths, args.measure, args.ignore_key, join_foreign=True)
            comparison = two_sides(args, runs)
        put(format_comparison(args.format, comparison, args.fail_on))
        return exit_status(comparison, args.fail_on)


if __name__ == "__main__":
    sys.exit(main())
