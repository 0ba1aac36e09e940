#!/usr/bin/env python3
"""Reports in the formats of other tools, on stdout.

    csv         a row a case and metric: key, value, interval, n. pandas, DuckDB, spreadsheets
    bmf         Bencher Metric Format: bencher run --adapter json --file FILE
    gha         github-action-benchmark: customSmallerIsBetter, or customBiggerIsBetter for rates
    records     PyTorch's OSS benchmark database (v3), a value a run
    pytorch     the report of PyTorch's benchmarks/distributed/ddp: for its diff.py
    prometheus  text format: for the textfile collector of node_exporter

    python analysis/export.py report.jsonl --to csv > report.csv
    python analysis/export.py report.jsonl --to gha --metric step_time_p50_s > output.json

gha, bmf and prometheus hold one value of a case: they take one run of each. BSD-3-Clause.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.compare import conclude
from analysis.load import Run, load
from analysis.show import canonical, case_names, clean, flat, interval_of, is_number
from common import report
from common.cli import Parser, list_of, refuse, suggest
from common.report import Case


@dataclass(frozen=True)
class Value:
    """One metric of one case of one run; its interval where there is one. n: iterations."""

    run: Run
    case: str
    key: dict[str, Any]
    metric: str
    value: float
    interval: tuple[float, float] | None
    n: int | None

    @property
    def name(self) -> str:
        return f"{self.run.report.benchmark}/{self.case}"


def values_of(runs: Sequence[Run], metrics: Sequence[str] | None) -> list[Value]:
    """All numbers of the cases that did not fail, or those of these metrics."""
    found, known = [], set()
    for benchmark in dict.fromkeys(run.report.benchmark for run in runs):
        same = [r for r in runs if r.report.benchmark == benchmark]
        names = case_names([row.key for r in same for row in r.rows.values()])
        for run, name, row in [(r, *item) for r in same for item in r.rows.items()]:
            numbers = flat(row.metrics) or {row.measure: row.time_s}
            n = None if row.times_s is None else len(row.times_s)
            for metric, value in numbers.items() if not row.check.startswith("failed") else ():
                known.add(metric)
                if is_number(value) and (not metrics or metric in metrics):
                    ci = interval_of(metric, numbers)
                    found.append(Value(run, names[name], row.key, metric, value, ci, n))
    for metric in metrics or ():
        if metric not in known:
            hint = suggest(metric, known) or f"; there are {', '.join(sorted(known)) or 'none'}"
            raise ValueError(f"--metric: no case has '{metric}'{hint}")
    if not found:
        raise ValueError("there is no case with a number in these reports")
    return found


def once(values: Sequence[Value]) -> Sequence[Value]:
    seen: dict[tuple[str, str], Value] = {}
    for value in values:
        other = seen.setdefault((value.name, value.metric), value)
        if other is not value:
            raise ValueError(
                f"{value.run.path} and {other.run.path} both have {value.name}, and this format "
                "holds one value of it; give one of them, or take --to csv"
            )
    return values


def to_csv(values: Sequence[Value]) -> str:
    rows = []
    for v in values:
        low, high = v.interval or (None, None)
        about = {"run": v.run.path, "started_at": v.run.report.started_at}
        about |= {"benchmark": v.run.report.benchmark, "case": v.case}
        number = {"metric": v.metric, "value": v.value, "ci_low": low, "ci_high": high, "n": v.n}
        rows.append(about | {f"key.{name}": entry for name, entry in v.key.items()} | number)
    last = ["metric", "value", "ci_low", "ci_high", "n"]
    table = pd.DataFrame(rows)
    table = table[[*(name for name in table.columns if name not in last), *last]]
    return table.astype({"n": "Int64"}).to_csv(index=False)


def to_bmf(values: Sequence[Value]) -> str:
    """https://bencher.dev/docs/reference/bencher-metric-format: at most 64 letters a measure."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for v in once(values):
        measure = found.setdefault(v.name[:1024], {})[v.metric[:64]] = {"value": v.value}
        if v.interval:
            measure |= {"lower_value": v.interval[0], "upper_value": v.interval[1]}
    return json.dumps(found, indent=1)


def to_gha(values: Sequence[Value]) -> str:
    """Its src/extract.ts, BenchmarkResult. A file is smaller-is-better or bigger-is-better."""
    rates = {v.metric.endswith("_per_s") for v in values}
    if len(rates) > 1:
        values = [v for v in values if re.search(r"(?<!_per)_s$", v.metric)]
    rows = []
    for v in once(values):
        row = {"name": f"{v.name}/{v.metric}", "unit": unit_of(v.metric), "value": v.value}
        if v.interval:
            row["range"] = f"± {(v.interval[1] - v.interval[0]) / 2:.3g}"
        rows.append(row | {"extra": f"{v.n} iterations"} if v.n else row)
    return json.dumps(rows, indent=1)


def unit_of(metric: str) -> str:
    units = {"gb_per_s": "GB/s", "_per_s": "1/s", "_s": "s", "_gib": "GiB", "_bytes": "bytes"}
    return next((unit for end, unit in units.items() if metric.endswith(end)), "1")


def to_records(values: Sequence[Value]) -> str:
    """pytorch/test-infra, clickhouse_db_schema/oss_ci_benchmark_v3: maps hold strings alone."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for v in values:
        key = {name: str(entry) for name, entry in v.key.items()}
        about = {"name": v.run.report.benchmark, "mode": "", "dtype": key.get("dtype", "")}
        record = {
            "benchmark": about | {"extra_info": key},
            "model": {"name": key.get("model", v.case), "backend": key.get("backend", "")},
            "dependencies": {"torch": {"version": str(v.run.report.environment.get("torch"))}},
            "metric": {"name": v.metric, "benchmark_values": []},
        }
        metric: Any = found.setdefault((v.name, v.metric), record)["metric"]
        metric["benchmark_values"].append(v.value)
    return json.dumps(list(found.values()), indent=1)


def to_prometheus(values: Sequence[Value]) -> str:
    """https://prometheus.io/docs/instrumenting/exposition_formats; base units in the names."""
    groups: dict[str, list[str]] = {}
    for v in once(values):
        name = re.sub(r"_s$", "_seconds", re.sub(r"_per_s$", "_per_second", v.metric))
        labels = {"benchmark": v.run.report.benchmark, "case": v.case}
        labels |= {"host": (v.run.report.environment.get("hosts") or [""])[0]}
        labels |= {f"key_{k}": entry for k, entry in v.key.items() if entry is not None}
        words = ",".join(f'{word(k)}="{escape(str(e))}"' for k, e in labels.items())
        line = f"{word('torchrun_bench_' + name)}{{{words}}} {v.value!r}"
        groups.setdefault(word(name), []).append(line)
    types = {name: f"# TYPE torchrun_bench_{name} gauge" for name in groups}
    return "\n".join(line for name, lines in groups.items() for line in (types[name], *lines))


def word(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)


def escape(label: str) -> str:
    return label.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def to_pytorch(paths: Sequence[str]) -> str:
    """The report of benchmarks/distributed/ddp/benchmark.py: no ddp first, then by ranks.

    Its measurements are the times of the first rank, then of the second, and so on.
    """
    if len(paths) != 1:
        raise ValueError(f"--to pytorch takes one report, got {len(paths)}")
    found = report.load(paths[0])
    cases = [c for c in found.cases if not c.failed and c.samples_s.get("step")]
    wrapped = [case for case in cases if case.key.get("world_size")]
    if found.benchmark != "ddp_sweep" or not wrapped:
        raise ValueError(f"{paths[0]}: --to pytorch needs a report of ddp_sweep.py")
    groups: dict[str, list[Case]] = {}
    for case in wrapped:
        which = {k: v for k, v in case.key.items() if k not in ("label", "world_size")}
        same = [c for c in cases if not c.key["world_size"] and c.key["model"] == which["model"]]
        same = [c for c in same if c.key["dtype"] == which["dtype"]]
        groups.setdefault(canonical(which), same[:1]).append(case)
    results = [
        {
            **{name: group[-1].key[name] for name in ("model", "batch_size")},
            "result": [
                {"ranks": c.ranks, "measurements": list(chain(*c.samples_s["step"]))} for c in group
            ],
        }
        for group in groups.values()
    ]
    about = {"pytorch_version": found.environment.get("torch")}
    about |= {"cuda_version": found.environment.get("cuda")}
    about |= {"distributed_backend": wrapped[0].key["backend"]}
    about |= {"bucket_size": wrapped[0].key["bucket_size_mb"]}
    return json.dumps(about | {"benchmark_results": results})


FORMATS: dict[str, Callable[[Sequence[Value]], str]] = {
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
    add("--metric", type=list_of(str), metavar="NAME", help="these alone; a list (default: all)")
    args: argparse.Namespace = parser.parse_args()
    try:
        if args.to == "pytorch":
            text = to_pytorch(args.reports)
        else:
            text = FORMATS[args.to](values_of(load(args.reports), args.metric))
    except ValueError as error:
        refuse(clean(error, 1000))
    return conclude(text.rstrip("\n"), (), ())


if __name__ == "__main__":
    sys.exit(main())
