"""Reports as rows: what compare, export and report.py read, and a notebook can use as well.

    from analysis.load import frame, load
    table = frame(load(["results/", "more/*.jsonl"]))       # a row a case
    table.pivot_table("time_s", "case", "report")

Reads this project's reports, those of PyTorch's benchmarks/distributed/ddp/benchmark.py, and what
nccl-tests write with `-J` (its src/util.cu, versions 1 and 2).
"""

import glob
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pandas.io.json import ujson_loads  # half the time of json's

from analysis.show import canonical, case_names, flat, is_number
from common import report as report_file
from common.cli import suggest
from common.report import Case, Report

PYTORCH, NCCL = "PyTorch's DDP benchmark", "nccl-tests"
# Rows of these are callers or links that go their own way: their i-th samples are not at the same
# time, and the slowest row counts instead of the slowest of each iteration.
UNALIGNED = ("rpc_latency", "batch_update_ps", "p2p_matrix")
LARGE_BYTES = 2**24  # reading so much JSON takes half a second
SHORTEST_S = 1e-12  # what takes less was not timed
MAX_LINKS = 5000  # of one case: 100 ranks have so many pairs; beyond, a kind has its median
PLAN = "ab.json"  # of analysis/ab.py
SUFFIXES = (".jsonl", ".json")


@dataclass(frozen=True)
class Row:
    """One case of one run, without its samples.

    time_s: the run's time, None where there is none; measure: the step or metric that it is of.
    times_s: of each iteration the slowest rank; rounds: how many of them each block has.
    """

    key: dict[str, Any]
    check: str
    metrics: dict[str, Any]
    measure: str = ""
    time_s: float | None = None
    times_s: NDArray[np.float64] | None = None
    rounds: tuple[int, ...] = ()


@dataclass
class Run:
    """One report, its cases without their samples, and those as rows, by their canonical keys."""

    report: Report
    rows: dict[str, Row] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return self.report.path or ""

    @property
    def identity(self) -> str:
        """Equal for two copies of one run."""
        times = sorted((name, row.time_s, row.check) for name, row in self.rows.items())
        return repr((self.report.benchmark, self.report.started_at, times))


def load(words: Sequence[str], measure: str | None = None, ignore: Sequence[str] = ()) -> list[Run]:
    """The reports that paths, folders and patterns name, as runs.

    measure: the step, or the metric in seconds, to take instead of the first step. ignore: fields
    of the keys by which cases are not told apart. Raises ValueError with one line.
    """
    paths = find(words)
    large = [path for path in paths if os.path.isfile(path) and os.path.getsize(path) > LARGE_BYTES]
    tasks = [(path, measure, tuple(ignore)) for path in paths]
    if len(large) < 2:
        return [read(task) for task in tasks]
    try:  # reading JSON fills one core
        with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
            return list(pool.map(read, tasks))
    except BrokenProcessPool:
        raise ValueError(
            f"{large[0]}, or a report after it: the process that read it was killed, as happens "
            "where memory is short"
        ) from None


def find(words: Sequence[str]) -> list[str]:
    """The files that the words name, each once. Raises ValueError where a word names none."""
    found: list[str] = []
    for word in words:
        if os.path.isdir(word):
            inside = sorted(p for p in Path(word).rglob("[!.]*") if p.suffix in SUFFIXES)
            paths = [str(p) for p in inside if p.is_file() and p.name != PLAN]
            if not paths:
                raise ValueError(f"there is no report (*.jsonl) in the folder {word}")
        elif not os.path.lexists(word) and glob.has_magic(word):
            paths = sorted(glob.glob(word))
            if not paths:
                raise ValueError(f"no file matches {word}")
        else:
            paths = [word]
        found += paths
    for i, path in enumerate(found):
        for other in found[:i]:
            if os.path.exists(path) and os.path.exists(other) and os.path.samefile(path, other):
                raise ValueError(f"{path} is the same file as {other}; give every report once")
    return found


def read(task: tuple[str, str | None, tuple[str, ...]]) -> Run:
    """The report at a path as a run; see `load`."""
    path, measure, ignore = task
    rows: dict[str, Row] = {}
    times: dict[str, None] = {}  # that there are

    def keep(report: Report, case: Case) -> None:
        times.update(dict.fromkeys([*case.samples_s, *filter(is_time, case.metrics)]))
        rows[canonical(case.key)] = reduce(case, report.benchmark, measure)
        case.samples_s = {}

    if report := read_foreign(path):
        for case in report.cases:
            keep(report, case)
    else:
        report = report_file.load(path, keep, partial(ujson_loads, precise_float=True))
    if measure and rows and not any(row.measure for row in rows.values()):
        hint = suggest(measure, times) or f"; it has {', '.join(times) or 'none'}"
        raise ValueError(f"{path}: no case has the time '{measure}'{hint}")
    run = Run(report)
    for row in rows.values():
        for part in split_links(row):
            add(run, part, ignore)
    return run


def add(run: Run, row: Row, ignore: Sequence[str]) -> None:
    """Add a row under its key without the ignored fields."""
    for name in ignore:
        if name not in row.key:
            hint = suggest(name, row.key) or f"; it has {', '.join(row.key)}"
            raise ValueError(f"{run.path}: a case has no '{name}' in its key{hint}")
    key = {name: value for name, value in row.key.items() if name not in ignore}
    if canonical(key) in run.rows:
        raise ValueError(
            f"{run.path}: several cases differ in {', '.join(ignore) or 'nothing'} alone, e.g. "
            f"{canonical(key)}; leave that out of --ignore-key, or measure one of them a report"
        )
    run.rows[canonical(key)] = Row(key, *list(vars(row).values())[1:])


# -- one case --------------------------------------------------------------------------------------


def reduce(case: Case, benchmark: str, measure: str | None) -> Row:
    """A case without its samples. Its time: median over i of max over ranks of samples_s[r][i]."""
    if case.failed:
        return Row(case.key, case.check, case.metrics)
    steps = {name.replace(" ", "_"): name for name in case.samples_s}
    name = steps.get(measure.replace(" ", "_"), "") if measure else next(iter(case.samples_s), "")
    rows = np.asarray(case.samples_s.get(name, []), dtype=np.float64)
    times: NDArray[np.float64] | None = None
    value: float | None = None
    if rows.ndim == 2 and rows.size:
        times = rows.max(axis=0)
        if benchmark in UNALIGNED:
            times = rows[int(np.argmax(np.median(rows, axis=1)))].copy()
        value = float(np.median(times))
    else:
        name, value = time_metric(case.metrics, measure)
    if value is None or value < SHORTEST_S:
        what = f"the time '{measure}'" if measure else "a time"
        check = f"passed, but without {what}" if case.check == "passed" else case.check
        return Row(case.key, check, case.metrics)
    whole = times is not None and sum(case.rounds) == len(times)
    rounds = tuple(case.rounds) if whole else ()
    return Row(case.key, case.check, case.metrics, name, value, times, rounds)


def is_time(name: str) -> bool:
    """Whether a metric of this name is in seconds, or so many a second."""
    return name == "rate" or name.endswith("_s")


def time_metric(metrics: dict[str, Any], wanted: str | None) -> tuple[str, float | None]:
    """The metric that says how long a case took: a name, and seconds.

    Of several the first median, else the first other time; of a rate the time of one.
    """
    names = [n for n, v in metrics.items() if is_time(n) and is_number(v) and 0 < v < 1e12]
    if wanted:
        names = [name for name in names if name == wanted]
    order = ("_p50_s", "time_s", "_s", "rate")
    names.sort(
        key=lambda n: (is_rate(n), next(i for i, end in enumerate(order) if n.endswith(end)))
    )
    if not names:
        return "", None
    value = float(metrics[names[0]])
    return (f"1 / {names[0]}", 1 / value) if is_rate(names[0]) else (names[0], value)


def is_rate(name: str) -> bool:
    return name == "rate" or name.endswith("_per_s")


def split_links(row: Row) -> list[Row]:
    """A round of p2p_matrix as four cases a link, or four of their medians where too many.

    A link has its latency, and the seconds that 1 GB takes: either way, and both at once.
    """
    links = row.metrics.get("links")
    if not isinstance(links, list) or row.check.startswith("failed"):
        return [row]
    found: dict[str, list[float]] = {}
    for link in links:
        if not isinstance(link, list) or len(link) != 6 or not all(map(is_number, link[2:])):
            return [row]
        a, b, latency_us, *rates = link
        ways = (f"{a} - {b} latency", f"{a} -> {b}", f"{b} -> {a}", f"{a} <-> {b}")
        kinds = ("links, latency", "links, there", "links, back", "links, both")
        names = ways if len(links) <= MAX_LINKS else kinds
        for name, cost in zip(names, (latency_us / 1e6, *(1 / r for r in rates)), strict=True):
            found.setdefault(name, []).append(cost)
    own = {k: v for k, v in row.key.items() if k != "round" or len(links) > MAX_LINKS}
    parts = []
    for name, costs in found.items():
        unit = "latency_s" if name.endswith("latency") else "gigabyte_s"
        median = float(np.median(costs))
        parts.append(Row({"link": name} | own, row.check, {unit: median}, unit, median))
    return parts


# -- reports of other programs ---------------------------------------------------------------------


def read_foreign(path: str) -> Report | None:
    """The report of another program at `path`; None where it is not one of those."""
    try:
        with open(path, "rb") as file:
            start = file.readline(4096)
            if b'"schema"' in start or len(start) < 1:
                return None
            document = report_file.strict_json((start + file.read()).decode())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(document, dict):
        return None
    makers = {"benchmark_results": pytorch_report, "results": nccl_report}
    for name, make in makers.items():
        if isinstance(document.get(name), list) and "schema" not in document:
            try:
                return make(document, path)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                what = PYTORCH if make is pytorch_report else NCCL
                raise ValueError(
                    f"{path} looks like a report of {what}, but does not fit: "
                    f"{type(error).__name__} {str(error)[:80]}"
                ) from None
    if "schema" in document:
        version = f"this version reads {report_file.SCHEMA}"
        raise ValueError(f"{path} is of another version of torchrun-bench; {version}")
    return None


def pytorch_report(document: dict[str, Any], path: str) -> Report:
    """Of PyTorch's DDP benchmark: times of the first rank, then of the second, ..."""
    environment: dict[str, Any] = {"torch": document.get("pytorch_version")}
    environment["cuda"] = document.get("cuda_version")
    report = Report(PYTORCH, environment, path, [], "", status="complete")
    for entry in document["benchmark_results"]:
        seen: list[int] = []
        for result in entry["result"]:
            ranks, times = result["ranks"], result["measurements"]
            if len(times) % len(ranks):
                raise ValueError(f"{len(times)} measurements of {len(ranks)} ranks")
            n = len(times) // len(ranks)
            # it measures one rank twice: first without DDP, then with it
            bare = len(ranks) == 1 and 1 not in seen
            key = {
                **{name: entry[name] for name in ("model", "batch_size")},
                "label": "no ddp" if bare else f"{len(ranks)} rank{'s' * (len(ranks) > 1)}",
                "number": seen.count(len(ranks)),
                **{name: document.get(name) for name in ("distributed_backend", "bucket_size")},
            }
            rows = [times[i * n : (i + 1) * n] for i in range(len(ranks))]
            report.cases.append(Case(key, ranks, {"step": rows}))
            seen.append(len(ranks))
        environment["world_size"] = max([environment.get("world_size") or 0, *seen])
    return report


def nccl_report(document: dict[str, Any], path: str) -> Report:
    """Of nccl-tests' -J: microseconds and GB/s, out of place and in place."""
    version, config = int(document.get("nccl_version") or 0), document["config"]
    devices = config.get("devices") or []
    variables = [
        v for v in document.get("env") or [] if v.startswith("NCCL_")
    ]  # the rest is private
    ranks = max(len(devices), config.get("nthreads", 1) * config.get("ngpus", 1))
    environment = {
        "nccl": f"{version // 10000}.{version // 100 % 100}.{version % 100}",
        "world_size": ranks,
        "hosts": sorted({d["hostname"] for d in devices}),
        "devices": sorted({d["device_info"] for d in devices}),
        "variables": dict(v.split("=", 1) for v in variables),
    }
    status = "complete" if "end_time" in document else "interrupted"
    argv = [str(word) for word in document.get("args") or ["nccl-tests"]]
    started = str(document.get("start_time", ""))
    report = Report(NCCL, environment, path, argv, started, status=status)
    for result in document["results"]:
        key = {"collective": Path(argv[0]).name.removesuffix("_perf")}
        key |= {"size_bytes": result["size"], "dtype": result["type"]}
        key |= {"redop": result["redop"], "root": str(result["root"]).strip(), "ranks": ranks}
        case = Case(key, list(range(ranks)))
        for place in ("out_of_place", "in_place"):
            found = result.get(place) or {}
            time_us = found.get("time", found.get("cpu_time"))
            if time_us is not None and is_number(time_us):
                case.metrics[f"{place}_time_s"] = float(time_us) / 1e6
                case.metrics[f"{place}_algbw_gb_per_s"] = found["alg_bw"]
                case.metrics[f"{place}_busbw_gb_per_s"] = found["bus_bw"]
            if is_number(found.get("nwrong")) and found["nwrong"] > 0:
                case.check = f"failed: {found['nwrong']:g} wrong values {place.replace('_', ' ')}"
        report.cases.append(case)
    return report


def frame(runs: Sequence[Run]) -> pd.DataFrame:
    """A row a case: of which report, its name, check and time, the key, and the metrics."""
    names: dict[str, dict[str, str]] = {}
    for benchmark in {run.report.benchmark for run in runs}:
        same = [r for run in runs if run.report.benchmark == benchmark for r in run.rows.values()]
        names[benchmark] = case_names([row.key for row in same])
    rows = []
    for run in runs:
        about = {
            "report": run.path,
            "benchmark": run.report.benchmark,
            "started_at": run.report.started_at,
        }
        for name, row in run.rows.items():
            n = None if row.times_s is None else len(row.times_s)
            told: dict[str, Any] = {"case": names[run.report.benchmark][name], "check": row.check}
            told |= {"measure": row.measure, "time_s": row.time_s, "n": n}
            rows.append(flat(row.metrics) | row.key | about | told)
    return pd.DataFrame(rows)
