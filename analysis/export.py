#!/usr/bin/env python3
# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy>=1.26", "pandas>=2.1", "tabulate>=0.9"]
# ///
"""Reports in the formats of other tools, on stdout.

    csv         a row a case and metric: key, value, interval, n. pandas, DuckDB, spreadsheets
    bmf         Bencher Metric Format: bencher run --adapter json --file FILE
    gha         github-action-benchmark: customSmallerIsBetter, or customBiggerIsBetter for rates
    records     PyTorch's OSS benchmark database (v3)
    pytorch     the report of PyTorch's benchmarks/distributed/ddp: for its diff.py
    prometheus  text format: for the textfile collector of node_exporter

    python analysis/export.py report.jsonl --to csv > report.csv
    python analysis/export.py report.jsonl --to gha --metric step_time_p50_s > output.json

gha, bmf and prometheus hold one value of a case, that of the newest run. BSD-3-Clause.
"""

import json
import re
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.load import load, numbers, open_report
from analysis.show import canonical, clean, put, unit_of
from common import report
from common.cli import Parser, list_of, refuse

Rows = list[dict[str, Any]]
PYTORCH_NEEDS = ("model", "dtype", "world_size", "batch_size", "backend", "bucket_size_mb")


def by_metric(rows: Rows) -> dict[tuple[str, str], dict[str, Any]]:
    """The last row of each `benchmark/case` and metric, of which these formats hold one value."""
    return {(f"{row['benchmark']}/{row['case']}", row["metric"]): row for row in rows}


def to_csv(rows: Rows) -> str:
    table = pd.json_normalize(rows).astype({"n": "Int64"})  # the key as columns key.*
    last = ["metric", "value", "ci_low", "ci_high", "n"]
    return table[[*table.columns.difference(last, sort=False), *last]].to_csv(index=False)


def to_bmf(rows: Rows) -> str:
    """https://bencher.dev/docs/reference/bencher-metric-format: at most 64 letters a measure."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for (name, metric), row in by_metric(rows).items():
        names = {"value": "value", "ci_low": "lower_value", "ci_high": "upper_value"}
        values = {names[key]: row[key] for key in names if row[key] is not None}
        found.setdefault(name[:1024], {})[metric[:64]] = values
    return json.dumps(found, indent=1)


def to_gha(rows: Rows) -> str:
    """Its src/extract.ts, BenchmarkResult. A file is smaller-is-better or bigger-is-better."""
    if len({row["metric"].endswith("_per_s") for row in rows}) > 1:
        rows = [row for row in rows if re.search(r"(?<!_per)_s$", row["metric"])]
    found = []
    for (name, metric), row in by_metric(rows).items():
        unit = unit_of(metric).name or "1"
        entry = {"name": f"{name}/{metric}", "unit": unit, "value": row["value"]}
        if row["ci_low"] is not None:
            entry["range"] = f"± {(row['ci_high'] - row['ci_low']) / 2:.3g}"
        found.append(entry | ({"extra": f"{row['n']} iterations"} if row["n"] else {}))
    return json.dumps(found, indent=1)


def to_records(rows: Rows) -> str:
    """pytorch/test-infra, clickhouse_db_schema/oss_ci_benchmark_v3: maps hold strings alone."""
    records = []
    for row in rows:
        key = {name: str(entry) for name, entry in row["key"].items()}
        about = {"name": row["benchmark"], "mode": "", "dtype": key.get("dtype", "")}
        record = {
            "benchmark": about | {"extra_info": key},
            "model": {"name": key.get("model", row["case"]), "backend": key.get("backend", "")},
            "dependencies": {"torch": {"version": str(row["torch"])}},
            "metric": {"name": row["metric"], "benchmark_values": [row["value"]]},
        }
        records.append(record)
    return json.dumps(records, indent=1)


def to_prometheus(rows: Rows) -> str:
    """https://prometheus.io/docs/instrumenting/exposition_formats; base units in the names."""
    groups: dict[str, list[str]] = {}
    for (_, metric), row in by_metric(rows).items():
        metric = re.sub(r"_s$", "_seconds", re.sub(r"_per_s$", "_per_second", metric))
        name = word(f"torchrun_bench_{metric}")
        labels = {label: row[label] for label in ("benchmark", "case", "host")}
        labels |= {f"key_{k}": entry for k, entry in row["key"].items() if entry is not None}
        # JSON escapes \ and " as this format does
        pairs = [f"{word(k)}={json.dumps(clean(e), ensure_ascii=False)}" for k, e in labels.items()]
        samples = groups.setdefault(name, [f"# TYPE {name} gauge"])
        samples.append(f"{name}{{{','.join(pairs)}}} {row['value']!r}")
    return "\n".join(chain(*groups.values()))


def word(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)


def model_of(case: report.Case) -> str:
    """What a case without DDP has in common with those that it belongs to."""
    return canonical({name: case.key[name] for name in ("model", "dtype")})


def to_pytorch(paths: list[str]) -> str:
    """The report of benchmarks/distributed/ddp/benchmark.py: no ddp first, then by ranks.

    Its measurements are the times of the first rank, then of the second, and so on.
    """
    with open_report(paths[0]) as file:
        found = report.load(paths[0], lines=file)
    cases = [case for case in found.cases if not case.failed and case.samples_s.get("step")]
    cases = [case for case in cases if case.key.keys() >= set(PYTORCH_NEEDS)]
    wrapped = [case for case in cases if case.key["world_size"]]
    if len(paths) != 1 or found.benchmark != "ddp_sweep" or not wrapped:
        raise ValueError(f"{paths[0]}: --to pytorch takes one report, of ddp_sweep.py")
    bare = {model_of(case): [case] for case in cases if not case.key["world_size"]}
    groups: dict[str, list[report.Case]] = {}  # an entry for each bucket size and hook
    for case in wrapped:
        which = {k: v for k, v in case.key.items() if k not in ("label", "world_size")}
        first = bare.get(model_of(case), [])
        groups.setdefault(canonical(which), [*first]).append(case)
    results = []
    for group in groups.values():
        rows = [{"ranks": c.ranks, "measurements": [*chain(*c.samples_s["step"])]} for c in group]
        entry = {name: group[-1].key[name] for name in ("model", "batch_size")}
        results.append(entry | {"result": rows})
    e, key = found.environment, wrapped[0].key
    document = {"pytorch_version": e.get("torch"), "cuda_version": e.get("cuda")}
    document |= {"distributed_backend": key["backend"], "bucket_size": key["bucket_size_mb"]}
    return json.dumps(document | {"benchmark_results": results})


FORMATS = {"csv": to_csv, "bmf": to_bmf, "gha": to_gha, "records": to_records}
FORMATS["prometheus"] = to_prometheus


def main() -> int:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("reports", nargs="+", metavar="REPORT", help="reports, folders of reports, or patterns")
    add("--to", required=True, choices=(*FORMATS, "pytorch"), help="the format")
    add("--metric", type=list_of(str), metavar="NAME", help="these alone; a list (default: all)")
    args = parser.parse_args()
    try:
        if args.to == "pytorch":
            text = to_pytorch(args.reports)
        else:
            rows = numbers(load(args.reports))
            chosen = [row for row in rows if not args.metric or row["metric"] in args.metric]
            if not chosen:
                names = ", ".join(sorted({row["metric"] for row in rows}))
                raise ValueError(f"no case has such a number; there are {names or 'none'}")
            text = FORMATS[args.to](chosen)
    except (ValueError, OSError) as error:
        refuse(clean(error, 1000))
    put(text.rstrip("\n"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
