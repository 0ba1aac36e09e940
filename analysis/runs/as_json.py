"""The output of compare.py and ab.py with `--format json`. docs/ci.md describes the fields.

The numbers are those of the table with all digits: seconds, ratios of TEST / BASE, and fractions. A
number that the table shows as `-` or as `no interval` is null.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from analysis.runs.evidence import busiest_load
from analysis.runs.load import Run
from analysis.runs.verdicts import Comparison, Design, Result, geometric_mean
from harness.cli import VERSION

SCHEMA = "torchrun-bench-verdicts/1"


def document(pairs: Sequence[dict[str, Any]], **about: Any) -> str:
    """The document as text. pairs: results of `pair_of`. about: gate and status."""
    content = {"schema": SCHEMA, "version": VERSION, "pairs": pairs, **about}
    return json.dumps(finite(content), indent=1, allow_nan=False)


def finite(content: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, by None, at any depth."""
    if isinstance(content, Mapping):
        return {name: finite(value) for name, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def pair_of(comparison: Comparison, notes: Sequence[str], base: str, test: str) -> dict[str, Any]:
    """A comparison of two sides. base, test: their names. notes: the lines below the table."""
    mean = comparison.mean
    cases = [row_of(case) | {"runs": runs_of_case(case, comparison)} for case in comparison.cases]
    return {
        "base": base,
        "test": test,
        "design": design_of(comparison.design) | {"unit": comparison.unit},
        "cases": cases,
        # a mean over different cases has no meaningful time
        "mean": row_of(mean) | {"base_s": None, "test_s": None} if mean else None,
        "runs": {"base": runs_of(comparison.base), "test": runs_of(comparison.test)},
        "environment": [vars(difference) for difference in comparison.environment],
        "warnings": comparison.warnings,
        "notes": notes,
    }


def design_of(design: Design) -> dict[str, Any]:
    """How the sides are compared."""
    return {
        "interleaved": design.interleaved,
        "margin": design.margin,
        "confidence": 1 - design.alpha,
        "needed": design.runs,
        "allow_disturbed": design.allow_disturbed,
    }


def row_of(case: Result) -> dict[str, Any]:
    """A row of the table."""
    return {
        "benchmark": case.benchmark,
        "case": case.label,
        "key": case.key,
        "measure": case.measure,
        "verdict": case.verdict,
        "caveats": case.caveats,
        "reason": case.reason,
        "base_s": geometric_mean(case.base_units_s),
        "test_s": geometric_mean(case.test_units_s),
        "ratio": case.ratio,
        "interval": case.interval if case.is_informative else None,
        "p": case.p,
        "sign_flip_p": case.sign_flip_p,
        "smallest_change": case.smallest_change,
        # number of sessions per side, if they are the units of observation
        "sessions": [len(case.base_sessions), len(case.test_sessions)]
        if case.base_sessions
        else None,
        "runs_needed": case.runs_needed,
    }


def runs_of_case(case: Result, comparison: Comparison) -> list[dict[str, Any]]:
    """One entry per run of both sides: its time if that is part of the printed mean, whether the
    run counts, and the reason if it does not."""
    base, test = comparison.runs_of(case.benchmark)
    sides = (
        ("base", base, case.base_runs, case.base_s, case.base_why),
        ("test", test, case.test_runs, case.test_s, case.test_why),
    )
    rows = []
    for side, runs, positions, times_s, whys in sides:
        time_of = dict(zip(positions, times_s, strict=False))  # no times if it was not compared
        for i, run in enumerate(runs):
            why = whys.get(i) or (None if i in time_of else f"the case is {case.verdict}")
            row = {"side": side, "run": run.label, "counts": not why, "time_s": time_of.get(i)}
            rows.append(row | {"why": why})
    return rows


def runs_of(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The reports of a side. load: cores used by other processes on the busiest node, and number of
    its cores; null if not recorded."""
    return [
        {
            "run": run.label,
            "path": run.path,
            "started_at": run.started_at,
            "status": run.status,
            "load": busiest_load(run),
        }
        for run in runs
    ]
