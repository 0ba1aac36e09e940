#!/usr/bin/env python3
# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy>=1.26", "pandas>=2.1", "tabulate>=0.9"]
# ///
"""Reports in the formats of other tools, on stdout.

    csv         a row a case and metric: key, value, interval, n. pandas, DuckDB, spreadsheets;
                a text that a spreadsheet would run gets a ' before it
    bmf         Bencher Metric Format: bencher run --adapter json --file FILE
    gha         github-action-benchmark: customSmallerIsBetter, or customBiggerIsBetter for rates
    records     PyTorch's OSS benchmark database (v3)
    pytorch     the report of PyTorch's benchmarks/distributed/ddp: for its diff.py
    prometheus  text format: for the textfile collector of node_exporter

    python analysis/export.py report.jsonl --to csv > report.csv
    python analysis/export.py report.jsonl --to gha --metric step_time_p50_s > output.json

gha, bmf and prometheus hold one value of each case, that of the newest run. BSD-3-Clause.
"""

import json
import re
import sys
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.load import load, numbers, open_report
from analysis.show import canonical, clean, put, unit_of
from common import report
from common.cli import Parser, list_of, refuse

Row = dict[str, Any]
Rows = list[Row]
PYTORCH_NEEDS = ("model", "dtype", "world_size", "batch_size", "backend", "bucket_size_mb")


def newest_of_each(rows: Rows) -> dict[tuple[str, str], Row]:
    """The last row of each `benchmark/case` and metric: some formats hold one value of them."""
    newest = {}
    for row in rows:
        name = f"{row['benchmark']}/{row['case']}"
        newest[name, row["metric"]] = row
    return newest


def to_csv(rows: Rows) -> str:
    import pandas as pd  # here: if it is missing, analysis/ has said so

    table = pd.json_normalize(rows)  # the key as columns key.*
    table = table.map(harmless).astype({"n": "Int64"})
    last = ["metric", "value", "ci_low", "ci_high", "n"]
    first = table.columns.difference(last, sort=False)
    table = table[[*first, *last]]
    return table.to_csv(index=False)


def harmless(cell: Any) -> Any:
    """A cell that no spreadsheet runs: =1+1 becomes '=1+1. A number as text stays, e.g. -1."""
    if not isinstance(cell, str) or not cell.lstrip().startswith(("=", "+", "-", "@")):
        return cell
    return cell if re.fullmatch(r"[+-]\d+(\.\d*)?", cell) else f"'{cell}"


def to_bmf(rows: Rows) -> str:
    """https://bencher.dev/docs/reference/bencher-metric-format: at most 64 letters a measure."""
    cases: dict[str, dict[str, Any]] = {}
    for (name, metric), row in newest_of_each(rows).items():
        measure = {"value": row["value"]}
        if row["ci_low"] is not None:
            measure["lower_value"] = row["ci_low"]
            measure["upper_value"] = row["ci_high"]
        measures = cases.setdefault(name[:1024], {})
        measures[metric[:64]] = measure
    return json.dumps(cases, indent=1)


def to_gha(rows: Rows) -> str:
    """Its src/extract.ts, BenchmarkResult. In a file either smaller or bigger values are better."""
    has_rates = {row["metric"].endswith("_per_s") for row in rows}
    if len(has_rates) > 1:  # both: the times alone
        rows = [row for row in rows if re.search(r"(?<!_per)_s$", row["metric"])]
    entries = []
    for (name, metric), row in newest_of_each(rows).items():
        unit = unit_of(metric).name or "1"
        entry = {"name": f"{name}/{metric}", "unit": unit, "value": row["value"]}
        if row["ci_low"] is not None:
            half = (row["ci_high"] - row["ci_low"]) / 2
            entry["range"] = f"± {half:.3g}"
        if row["n"] is not None:
            entry["extra"] = f"{row['n']} iterations"
        entries.append(entry)
    return json.dumps(entries, indent=1)


def to_records(rows: Rows) -> str:
    """pytorch/test-infra, clickhouse_db_schema/oss_ci_benchmark_v3: its maps hold only strings."""
    records = []
    for row in rows:
        key = {name: str(entry) for name, entry in row["key"].items()}
        benchmark = {
            "name": row["benchmark"],
            "mode": "",
            "dtype": key.get("dtype", ""),
            "extra_info": key,
        }
        model = {
            "name": key.get("model", row["case"]),
            "backend": key.get("backend", ""),
        }
        record = {
            "benchmark": benchmark,
            "model": model,
            "dependencies": {"torch": {"version": str(row["torch"])}},
            "metric": {"name": row["metric"], "benchmark_values": [row["value"]]},
        }
        records.append(record)
    return json.dumps(records, indent=1)


def to_prometheus(rows: Rows) -> str:
    """https://prometheus.io/docs/instrumenting/exposition_formats; base units in the names."""
    groups: dict[str, list[str]] = {}
    for (_, metric), row in newest_of_each(rows).items():
        in_seconds = re.sub(r"_per_s$", "_per_second", metric)
        in_seconds = re.sub(r"_s$", "_seconds", in_seconds)
        name = word(f"torchrun_bench_{in_seconds}")
        samples = groups.setdefault(name, [f"# TYPE {name} gauge"])
        samples.append(f"{name}{{{labels_of(row)}}} {row['value']!r}")
    return "\n".join(chain(*groups.values()))


def labels_of(row: Row) -> str:
    """`benchmark="ddp_sweep",case="...",host="...",key_model="resnet18"`"""
    labels = {name: row[name] for name in ("benchmark", "case", "host")}
    for name, entry in row["key"].items():
        if entry is not None:
            labels[f"key_{name}"] = entry
    pairs = []
    for name, entry in labels.items():
        text = json.dumps(clean(entry), ensure_ascii=False)  # escapes \ and " as this format does
        pairs.append(f"{word(name)}={text}")
    return ",".join(pairs)


def word(name: str) -> str:
    """A name as Prometheus takes it."""
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)


def model_of(case: report.Case) -> str:
    """What the cases with DDP share with the one without."""
    key = case.key
    return canonical({"model": key["model"], "dtype": key["dtype"]})


def to_pytorch(paths: list[str]) -> str:
    """The report of benchmarks/distributed/ddp/benchmark.py: no ddp first, then by ranks."""
    with open_report(paths[0]) as file:
        run = report.load(paths[0], lines=file)
    cases = [case for case in run.cases if fits_pytorch(case)]
    wrapped = [case for case in cases if case.key["world_size"]]
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
        if not case.key["world_size"]:
            without_ddp[model_of(case)] = case
    groups: dict[str, list[report.Case]] = {}
    for case in cases:
        if not case.key["world_size"]:
            continue
        setting = case.key | {"label": "", "world_size": 0}
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


FORMATS = {
    "csv": to_csv,
    "bmf": to_bmf,
    "gha": to_gha,
    "records": to_records,
    "prometheus": to_prometheus,
}


def main() -> int:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("reports", nargs="+", metavar="REPORT", help="reports, folders of reports, or patterns")
    add("--to", required=True, choices=(*FORMATS, "pytorch"), help="the format")
    metric = "export only these metrics; a list (default: all)"
    add("--metric", type=list_of(str), metavar="NAME", help=metric)
    args = parser.parse_args()
    try:
        if args.to == "pytorch":
            text = to_pytorch(args.reports)
        else:
            rows = chosen(numbers(load(args.reports)), args.metric)
            text = FORMATS[args.to](rows)
    except (ValueError, OSError) as error:
        refuse(clean(error, 1000))
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
