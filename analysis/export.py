#!/usr/bin/env python3
# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy>=1.26", "pandas>=2.1", "tabulate>=0.9"]
# ///
"""Convert reports to the formats of other tools, and print the result.

    csv      for pandas, DuckDB and spreadsheets: one row per case and metric, with key and interval
    gha      for github-action-benchmark: customSmallerIsBetter, or customBiggerIsBetter for rates
    pytorch  for diff.py of PyTorch's benchmarks/distributed/ddp: the format of its benchmark.py

    python analysis/export.py report.jsonl --to csv > report.csv
    python analysis/export.py report.jsonl --to gha --metric step_s > output.json
    python analysis/export.py run_*.log --step 'took ([\\d.]+) ms' --to csv > steps.csv

With gha, there is one value per case and metric, from the newest run. BSD-3-Clause.
"""

import json
import re
import sys
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.logs import step_logs
from analysis.logs.suggestions import suggested
from analysis.runs.load import find, load, numbers
from analysis.show import canonical, one_line, put, unit_of
from harness import report
from harness.cli import Parser, list_of, suggest

Rows = list[dict[str, Any]]
SETTING = ("dtype", "bucket_size_mb", "comm_hook")  # PyTorch's format stores one per report


def to_csv(rows: Rows) -> str:
    import pandas as pd  # not above, so that analysis/ can report a missing package

    table = pd.json_normalize(rows).astype({"n": "Int64"})  # columns key.* for the key
    table = table.map(as_text).rename(columns=as_text)
    last = ["metric", "value", "low", "high", "n"]
    first = table.columns.difference(last, sort=False)
    return table[[*first, *last]].to_csv(index=False)


def as_text(cell: Any) -> Any:
    """A cell, with a leading ' before text that a spreadsheet would interpret as a formula.

    Names in a report may come from an untrusted source, and formulas can call programs. Numbers
    are left unchanged.
    """
    try:
        float(cell)
    except (TypeError, ValueError):
        return f"'{cell}" if str(cell).startswith(("=", "+", "-", "@", "\t", "\r")) else cell
    return cell


def to_gha(rows: Rows) -> str:
    """A list of `BenchmarkResult`, defined in src/extract.ts of github-action-benchmark.

    The action compares all values of a file in the same direction, so rates are left out if there
    are also times.
    """
    has_rates = {row["metric"].endswith("_per_s") for row in rows}
    if len(has_rates) > 1:
        rows = [row for row in rows if re.search(r"(?<!_per)_s$", row["metric"])]
    newest = {(row["benchmark"], row["case"], row["metric"]): row for row in rows}
    entries = []
    for names, row in newest.items():
        unit = unit_of(row["metric"]).name or "1"
        entry = {"name": "/".join(names), "unit": unit, "value": row["value"]}
        if row["low"] is not None:
            half = (row["high"] - row["low"]) / 2
            entry["range"] = f"± {half:.3g}"
        if row["n"] is not None:
            entry["extra"] = f"{row['n']} iterations"
        entries.append(entry)
    return json.dumps(entries, indent=1)


def to_pytorch(paths: list[str]) -> str:
    """The format of PyTorch's benchmarks/distributed/ddp/benchmark.py.

    The cases are sorted: first the one without DDP, then by number of ranks. `measurements` lists
    the times of the first rank, then those of the second, and so on. Raises ValueError unless there
    is a single report of ddp_sweep.py with a single setting.
    """
    run = report.load(paths[0])
    cases = [case for case in run.cases if not case.failed and case.samples_s.get("step")]
    wrapped = [case.key for case in cases if case.key.get("ddp")]
    if len(paths) != 1 or run.benchmark != "ddp_sweep" or not wrapped:
        raise ValueError(f"{paths[0]}: --to pytorch requires a single report of ddp_sweep.py")
    if any(case.bounded for case in cases):
        got = "this report contains only those of the slowest rank"
        raise ValueError(f"{paths[0]}: --to pytorch requires the times of each rank; {got}")
    if turns := [key["settings"] for key in wrapped if "settings" in key]:
        got = f"{turns[0]} of --interleave"
        raise ValueError(f"{paths[0]}: --to pytorch can store only one setting, got {got}")
    settings = {canonical({name: key[name] for name in SETTING}) for key in wrapped}
    if len(settings) > 1:
        got = ", ".join(settings)
        raise ValueError(f"{paths[0]}: --to pytorch can store only one setting, got {got}")
    entries: dict[str, dict[str, Any]] = {}
    for case in sorted(cases, key=lambda case: (case.key["ddp"], case.key["ranks"])):
        about = {name: case.key[name] for name in ("model", "batch_size")}
        entry = entries.setdefault(canonical(about), about | {"result": []})
        measurements = list(chain(*case.samples_s["step"]))
        entry["result"].append({"ranks": case.ranks, "measurements": measurements})
    document = {
        "pytorch_version": run.environment.get("torch"),
        "cuda_version": run.environment.get("cuda"),
        "distributed_backend": wrapped[0]["backend"],
        "bucket_size": wrapped[0]["bucket_size_mb"],
        "benchmark_results": list(entries.values()),
    }
    return json.dumps(document)


FORMATS = {"csv": to_csv, "gha": to_gha}


def main() -> int:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("reports", nargs="+", metavar="REPORT", help="reports, folders of reports, or patterns")
    add("--to", required=True, choices=(*FORMATS, "pytorch"), help="output format")
    metric = "comma-separated metrics to export (default: all)"
    add("--metric", type=list_of(str), metavar="NAME", help=metric)
    step_logs.add_step_flags(parser, "the files, which are logs of any program")
    args = parser.parse_args()
    with one_line(args.reports), suggested():
        steps = step_logs.steps_of(args, {"--to pytorch": args.to == "pytorch"})
        if args.to == "pytorch":
            text = to_pytorch(find(args.reports))
        else:
            runs = step_logs.load_logs(args.reports, steps) if steps else load(args.reports)
            rows = chosen(numbers(runs), args.metric)
            text = FORMATS[args.to](rows)
    put(text.rstrip("\n"))
    return 0


def chosen(rows: Rows, metrics: list[str] | None) -> Rows:
    """The rows of these metrics. Raises ValueError if a metric has no row."""
    known = sorted({row["metric"] for row in rows})
    if not known:
        raise ValueError("no case has a metric that is a number")
    for name in metrics or known:
        if name not in known:
            why = f"no case has a metric '{name}'; the metrics are {', '.join(known)}"
            raise ValueError(why + suggest(name, known))
    return [row for row in rows if not metrics or row["metric"] in metrics]


if __name__ == "__main__":
    sys.exit(main())
