"""A comparison as a table, as Markdown, and as JSON."""

import os
import sys
from collections.abc import Collection, Sequence
from math import exp, log
from statistics import fmean
from typing import Any

import tabulate

from common.compare import ALPHA, CaseResult, Comparison, Difference, Unpaired
from common.text import markdown, printable

SCHEMA = "torchrun-bench-compare/1"
UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


def show_ratio(ratio: float) -> str:
    """`1.04x slower`, `1.04x faster`, or `1.00x`."""
    factor = max(ratio, 1 / ratio)
    shown = f"{factor:.2f}x" if factor < 99.5 else f"{factor:.3g}x"
    return shown if shown == "1.00x" else f"{shown} {'slower' if ratio > 1 else 'faster'}"


def show_interval(interval: tuple[float, float] | None) -> str:
    """An interval of the ratio itself: over 1 is slower."""
    if interval is None:
        return "-"
    return " to ".join(f"{end:.3f}" if end < 1000 else f"{end:.3g}" for end in interval)


def show_time(seconds: Sequence[float]) -> str:
    """The geometric mean of the runs' times, in a unit that suits."""
    mean = float(f"{exp(fmean(map(log, seconds))):.4g}")
    scale, unit = next((u for u in UNITS if mean >= u[0]), UNITS[-1])
    return f"{mean / scale:.4g} {unit}"


def counted(cases: Sequence[CaseResult]) -> str:
    """`2 slower, 3 same`: how many cases have which verdict."""
    names = ("slower", "faster", "same", "undecided")
    numbers = [(sum(case.verdict == name for case in cases), name) for name in names]
    return ", ".join(f"{number} {name}" for number, name in numbers if number)


def _rows(found: Comparison) -> tuple[list[str], list[list[str]]]:
    """The header and the cells of the table, not yet escaped."""
    within = any(case.ci95 is None and case.within_run_ci95 for case in found.cases)
    header = ["case", "BASE", "TEST", "TEST is", "95 % interval", "verdict"]
    if within:
        header.insert(5, "within these runs")
    rows = []
    for case in [*found.cases, *([found.mean] if found.mean else [])]:
        cells = [case.label, show_time(case.base_s), show_time(case.test_s)]
        if case is found.mean:
            cells[1:] = ["", ""]
        cells += [show_ratio(case.ratio), show_interval(case.ci95), case.verdict]
        if within:
            cells.insert(5, show_interval(case.within_run_ci95))
        rows.append(cells)
    return header, rows


def _reasons(found: Comparison) -> list[str]:
    """Why cases are undecided, and how many runs might decide them; other remarks by case."""
    lines = []
    groups: dict[str, list[CaseResult]] = {}
    for case in found.cases:
        if case.verdict == "undecided":
            groups.setdefault(case.reason, []).append(case)
        elif case.reason:
            lines.append(f"{case.label}: {case.reason}")
    for reason, cases in groups.items():
        some = f"{len(cases)} cases" if len(cases) != 1 else cases[0].label
        lines.append(f"undecided, {some}: {reason}")
    return lines


def _needed(found: Comparison, margin: float) -> list[str]:
    undecided = [case for case in found.cases if case.verdict == "undecided"]
    known = sorted(case.runs_needed for case in undecided if case.runs_needed)
    if not undecided:
        return []
    if not known:
        several = all(case.ci95 is not None for case in undecided)
        return [] if several else ["measure several runs a side: 3 at the least, better 6"]
    middle, most = known[(len(known) - 1) // 2], known[-1]
    shown = f"{middle}" if middle == most else f"{middle} (half of the cases) to {most} (all)"
    if any(case.ci95 is not None and case.runs_needed is None for case in undecided):
        shown = f"{middle}, and for some cases over 1000,"
    return [f"about {shown} runs a side would narrow the intervals to +-{margin * 100:g} %"]


def _unpaired(found: Comparison) -> list[tuple[str, list[Unpaired]]]:
    return [
        ("only in BASE", found.only_base),
        ("only in TEST", found.only_test),
        ("in both, but not compared", found.not_compared),
    ]


def _show_difference(difference: Difference) -> str:
    base, test = (
        " | ".join(printable(value, 100) for value in values)
        for values in (difference.base, difference.test)
    )
    return f"{difference.field}: {base} in BASE, {test} in TEST"


def heading(found: Comparison, runs: tuple[int, int], margin: float, single_run: bool) -> str:
    names = ", ".join(dict.fromkeys(case.benchmark for case in found.cases)) or "nothing"
    measures = dict.fromkeys(case.measure for case in found.cases)
    special = [name for name in measures if name not in ("samples", "measurements")]
    names += f" ({', '.join(special)})" * bool(special)
    if runs == (1, 1):
        unit = "within-run evidence only" if single_run else "one run a side"
    else:
        unit = "the pair of runs is the unit" if found.paired else "the run is the unit"
        unit += ", their blocks took turns" * found.interleaved
    return f"{names}: {runs[0]} of BASE, {runs[1]} of TEST; margin {margin * 100:g} %; {unit}"


def as_table(found: Comparison, runs: tuple[int, int], margin: float, single_run: bool) -> str:
    """For a terminal."""
    lines = [f"# torchrun-bench compare {heading(found, runs, margin, single_run)}"]
    lines += [f"# warning: {line}" for line in found.warnings]
    hardware = [d for d in found.differences if d.hardware]
    if hardware:
        lines.append("# WARNING: THE HARDWARE DIFFERS; a verdict is about the machines as well:")
    lines += [f"#   {_show_difference(d)}" for d in hardware]
    if len(hardware) < len(found.differences):
        lines.append("# the environment differs:")
    lines += [f"#   {_show_difference(d)}" for d in found.differences if not d.hardware]
    lines = [printable(line, 1000) for line in lines]
    if found.cases:
        header, rows = _rows(found)
        rows = [[printable(cell, 100) for cell in row] for row in rows]
        tabulate.MIN_PADDING = 0
        align = ("left", "right", "right", "left", *("left",) * (len(header) - 4))
        table = tabulate.tabulate(
            rows, header, tablefmt="simple", colalign=align, disable_numparse=True
        ).splitlines()
        if found.mean:
            table.insert(-1, table[1])
        lines += ["", *(line.rstrip() for line in table), ""]
    for title, cases in _unpaired(found):
        if cases:
            lines.append(f"{title} ({len(cases)}):")
            lines += [printable(f"  {case.label}: {case.reason}", 300) for case in cases]
            lines.append("")
    lines.append(f"# {counted(found.cases) or 'nothing compared'}")
    lines += [printable(f"# {line}", 300) for line in _reasons(found) + _needed(found, margin)]
    return "\n".join(lines)


def as_markdown(found: Comparison, runs: tuple[int, int], margin: float, single_run: bool) -> str:
    """For a pull request."""
    lines = [f"**{counted(found.cases) or 'nothing compared'}**", ""]
    lines += [markdown(heading(found, runs, margin, single_run), 1000), ""]
    lines += [f"- warning: {markdown(line, 1000)}" for line in found.warnings]
    for difference in found.differences:
        what = "**THE HARDWARE DIFFERS**" if difference.hardware else "environment"
        lines.append(f"- {what}: {markdown(_show_difference(difference), 1000)}")
    if found.cases:
        header, rows = _rows(found)
        lines += [
            "",
            f"| {' | '.join(header)} |",
            "|---|--:|--:" + "|---" * (len(header) - 3) + "|",
        ]
        lines += [f"| {' | '.join(markdown(cell, 100) for cell in row)} |" for row in rows]
    for title, cases in _unpaired(found):
        if cases:
            lines += ["", f"{title} ({len(cases)}):", ""]
            lines += [f"- {markdown(f'{case.label}: {case.reason}', 300)}" for case in cases]
    reasons = _reasons(found) + _needed(found, margin)
    lines += [""] * bool(reasons) + [f"- {markdown(line, 300)}" for line in reasons]
    return "\n".join(lines)


def as_json(found: Comparison, runs: tuple[list[str], list[str]], margin: float) -> dict[str, Any]:
    """For a program. Ratios are test / base; times in seconds, one a run."""
    return {
        "schema": SCHEMA,
        "base": runs[0],
        "test": runs[1],
        "margin": margin,
        "false_discovery_rate": ALPHA,
        "warnings": found.warnings,
        "environment": [
            {"field": d.field, "base": d.base, "test": d.test, "hardware": d.hardware}
            for d in found.differences
        ],
        "cases": [_case(case) for case in found.cases],
        "geometric_mean": _case(found.mean) if found.mean else None,
        "only_base": [_unpaired_case(case) for case in found.only_base],
        "only_test": [_unpaired_case(case) for case in found.only_test],
        "not_compared": [_unpaired_case(case) for case in found.not_compared],
    }


def _case(case: CaseResult) -> dict[str, Any]:
    return {
        "benchmark": case.benchmark,
        "key": case.key,
        "label": case.label,
        "measure": case.measure,
        "ratio": case.ratio,
        "ci95": case.ci95,
        "within_run_ci95": case.within_run_ci95,
        "p": case.p,
        "verdict": case.verdict,
        "reason": case.reason,
        "runs_needed": case.runs_needed,
        "base_s": case.base_s,
        "test_s": case.test_s,
        "pair_ratios": case.pair_ratios,
    }


def _unpaired_case(case: Unpaired) -> dict[str, Any]:
    return {
        "benchmark": case.benchmark,
        "key": case.key,
        "label": case.label,
        "reason": case.reason,
    }


def conclude(script: str, text: str, verdicts: Collection[str], fail_on: Sequence[str]) -> int:
    """Print the result of a script; the exit status: 1 for a verdict that `fail_on` names.

    Also 1 where it cannot be printed. An undecided case that is no failure is said on stderr.
    """
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        print(text, flush=True)
    except OSError as error:  # closed, as by `| head`, or a full disk
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"{script}: error: cannot print: {error.strerror}", file=sys.stderr)
        return 1
    failures = [name for name in fail_on if name in verdicts]
    if failures:
        print(f"{script}: failed: {', '.join(failures)} (--fail-on)", file=sys.stderr)
    elif fail_on and "undecided" in verdicts:
        print(f"{script}: some cases are undecided, which --fail-on does not name", file=sys.stderr)
    return 1 if failures else 0
