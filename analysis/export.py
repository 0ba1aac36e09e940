#!/usr/bin/env python3
# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy>=1.26", "pandas>=2.1", "tabulate>=0.9"]
# ///
"""Reports in the formats of other tools, on stdout.

    csv      a row a case and metric: key, value, interval, n. pandas, DuckDB, spreadsheets;
             a text that a spreadsheet would run gets a ' before it
    gha      github-action-benchmark: customSmallerIsBetter, or customBiggerIsBetter for rates
    pytorch  the report of PyTorch's benchmarks/distributed/ddp: for its diff.py

    python analysis/export.py report.jsonl --to csv > report.csv
    python analysis/export.py report.jsonl --to gha --metric step_s > output.json

gha holds one value of each case, that of the newest run. BSD-3-Clause.
"""

import json
import re
import sys
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.load import load, numbers
from analysis.show import canonical, one_line, put, unit_of
from common import report
from common.cli import Parser, list_of

Row = dict[str, Any]
Rows = list[Row]
PYTORCH_NEEDS = ("model", "dtype", "ranks", "ddp", "batch_size", "backend", "bucket_size_mb")


def to_csv(rows: Rows) -> str:
    import pandas as pd  # here: if it is missing, analysis/ has said so

    table = pd.json_normalize(rows)  # the key as columns key.*
    table = table.map(harmless).astype({"n": "Int64"})
    last = ["metric", "value", "low", "high", "n"]
    first = table.columns.difference(last, sort=False)
    table = table[[*first, *last]]
    return table.to_csv(index=False)


def harmless(cell: Any) -> Any:
    """A cell that no spreadsheet runs: =1+1 becomes '=1+1. A number as text stays, e.g. -1."""
    if not isinstance(cell, str) or not cell.lstrip().startswith(("=", "+", "-", "@")):
        return cell
    return cell if re.fullmatch(r"[+-]\d+(\.\d*)?", cell) else f"'{cell}"


def to_gha(rows: Rows) -> str:
    """Its src/extract.ts, BenchmarkResult. In a file either smaller or bigger values are better."""
    has_rates = {row["metric"].endswith("_per_s") for row in rows}
    if len(has_rates) > 1:  # both: the times alone
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


def model_of(case: report.Case) -> str:
    """What the cases with DDP share with the one without."""
    key = case.key
    return canonical({"model": key["model"], "dtype": key["dtype"]})


def to_pytorch(paths: list[str]) -> str:
    """The report of benchmarks/distributed/ddp/benchmark.py: no ddp first, then by ranks."""
    run = report.load(paths[0])
    cases = [case for case in run.cases if fits_pytorch(case)]
    wrapped = [case for case in cases if case.key["ddp"]]
    if len(paths) != 1 or run.benchmark != "ddp_sweep" or not wrapped:
        raise ValueError(f"{paths[0]}: --to pytorch takes one report, of ddp_sweep.py")
    first = wrapped[0]
    document = {
        "pytorch_version": run.environment.get("torch"),
        "cuda_version": run.environment.get("cuda"),
        "distributed_backend": first.key["backend"],
        "bucket_size": first.key["bucket_size_mb"],
        "benchmark_results": [pytorch_result(group) for group in settings_of(cases)],
    }
    return json.dumps(document)


def settings_of(cases: list[report.Case]) -> list[list[report.Case]]:
    """For each bucket size and hook the case without DDP, if there is one, and those with it."""
    without_ddp = {}
    for case in cases:
        if not case.key["ddp"]:
            without_ddp[model_of(case)] = case
    groups: dict[str, list[report.Case]] = {}
    for case in cases:
        if not case.key["ddp"]:
            continue
        setting = case.key | {"ranks": 0}
        group = groups.setdefault(canonical(setting), [])
        model = model_of(case)
        if not group and model in without_ddp:
            group.append(without_ddp[model])
        group.append(case)
    return list(groups.values())


def fits_pytorch(case: report.Case) -> bool:
    """Whether a case has the times and the key that the report needs."""
    has_times = not case.failed and case.samples_s.get("step")
    return bool(has_times) and case.key.keys() >= set(PYTORCH_NEEDS)


def pytorch_result(cases: list[report.Case]) -> dict[str, Any]:
    """The measurements are the times of the first rank, then those of the second, and so on."""
    results = []
    for case in cases:
        measurements = list(chain(*case.samples_s["step"]))
        results.append({"ranks": case.ranks, "measurements": measurements})
    key = cases[-1].key
    return {"model": key["model"], "batch_size": key["batch_size"], "result": results}


FORMATS = {"csv": to_csv, "gha": to_gha}


def main() -> int:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("reports", nargs="+", metavar="REPORT", help="reports, folders of reports, or patterns")
    add("--to", required=True, choices=(*FORMATS, "pytorch"), help="the format")
    metric = "export only these metrics; a list (default: all)"
    add("--metric", type=list_of(str), metavar="NAME", help=metric)
    args = parser.parse_args()
    with one_line(args.reports):
        if args.to == "pytorch":
            text = to_pytorch(args.reports)
        else:
            rows = chosen(numbers(load(args.reports)), args.metric)
            text = FORMATS[args.to](rows)
    put(text.rstrip("\n"))
    return 0


def chosen(rows: Rows, metrics: list[str] | None) -> Rows:
    """The rows of these metrics. Raises ValueError where there is none."""
    kept = [row for row in rows if not metrics or row["metric"] in metrics]
    if not kept:
        names = sorted({row["metric"] for row in rows})
        known = ", ".join(names) or "none"
        raise ValueError(f"no case has such a number; there are {known}")
    return kept


if __name__ == "__main__":
    sys.exit(main())
