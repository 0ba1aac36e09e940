"""Reports as rows: what compare, export and report.py read, and a notebook can use as well.

    from analysis.load import frame, load
    table = frame(load(["results/", "more/*.jsonl"]))       # a row a case
    table.pivot_table("time_s", "case", "report")

Reads this project's reports, those of PyTorch's benchmarks/distributed/ddp/benchmark.py, and what
nccl-tests write with `-J` (its src/util.cu, versions 1 and 2).
"""

import glob
import itertools
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pandas.io.json import ujson_loads  # half the time of json's

from analysis.show import canonical, case_names, choices, flat, is_number
from common import report as report_file
from common.report import Case, Report

# Rows of these are callers or links that go their own way: their i-th samples are not at the same
# time, and the slowest row counts instead of the slowest of each iteration.
UNALIGNED = ("rpc_latency", "batch_update_ps", "p2p_matrix")
LARGE_BYTES = 2**24  # reading so much JSON takes half a second
PLAN = "ab.json"  # of analysis/ab.py


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

    @property
    def failed(self) -> bool:
        return self.check.startswith("failed")

    @property
    def n(self) -> int | None:
        """How many iterations were timed."""
        return None if self.times_s is None else len(self.times_s)


@dataclass
class Run:
    """One report; its cases as rows, by their canonical keys. label: what a page calls it."""

    report: Report
    rows: dict[str, Row] = field(default_factory=dict)
    label: str = ""

    @property
    def path(self) -> str:
        return self.report.path or ""


def load(words: Sequence[str], measure: str | None = None, ignore: Sequence[str] = ()) -> list[Run]:
    """The reports that paths, folders and patterns name, as runs.

    measure: the step, or the metric in seconds, to take instead of the first step. ignore: fields
    of the keys by which cases are not told apart. Raises ValueError with one line.
    """
    paths = find(words)
    read_one = partial(read, measure=measure, ignore=ignore)
    if sum(os.path.isfile(path) and os.path.getsize(path) > LARGE_BYTES for path in paths) < 2:
        return [read_one(path) for path in paths]
    try:  # reading JSON fills one core
        with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
            return list(pool.map(read_one, paths))
    except BrokenProcessPool:
        raise ValueError("reading was killed, as happens where memory is short") from None


def find(words: Sequence[str]) -> list[str]:
    """The files that the words name, each once. Raises ValueError where a word names none."""
    found: dict[str, str] = {}
    for word in words:
        paths = [word]
        if os.path.isdir(word):
            inside = (p for p in Path(word).rglob("[!.]*") if p.suffix in (".jsonl", ".json"))
            paths = sorted(str(p) for p in inside if p.is_file() and p.name != PLAN)
        elif not os.path.lexists(word) and glob.has_magic(word):
            paths = sorted(glob.glob(word))
        if not paths:
            raise ValueError(f"there is no report (*.jsonl) in {word}")
        for path in paths:
            other = found.get(os.path.realpath(path))
            if other is not None:
                raise ValueError(f"{path} is the same file as {other}; give every report once")
            found[os.path.realpath(path)] = path
    return list(found.values())


def read(path: str, measure: str | None, ignore: Sequence[str]) -> Run:
    """The report at a path as a run; see `load`."""
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
        raise ValueError(f"{path}: no case has the time '{measure}'{choices(measure, times)}")
    run = Run(report)
    for part in itertools.chain(*map(split_links, rows.values())):
        for name in ignore:
            if name not in part.key:
                hint = choices(name, part.key)
                raise ValueError(f"{path}: a case has no '{name}' in its key{hint}")
        key = {name: value for name, value in part.key.items() if name not in ignore}
        if canonical(key) in run.rows:
            raise ValueError(
                f"{path}: several cases differ in {', '.join(ignore) or 'nothing'} alone, e.g. "
                f"{canonical(key)}; leave that out of --ignore-key, or measure one of them a report"
            )
        run.rows[canonical(key)] = replace(part, key=key)
    return run


def by_benchmark(runs: Sequence[Run]) -> dict[str, list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.report.benchmark, []).append(run)
    return groups


def named(runs: Sequence[Run]) -> Iterator[tuple[Run, str, Row]]:
    """Every case of the runs, with a name that tells it apart from others of its benchmark."""
    for same in by_benchmark(runs).values():
        names = case_names(row.key for run in same for row in run.rows.values())
        yield from ((run, names[name], row) for run in same for name, row in run.rows.items())


def frame(runs: Sequence[Run]) -> pd.DataFrame:
    """A row a case: of which report, its name, check and time, the key, and the metrics."""
    rows = []
    for run, name, row in named(runs):
        about = {"report": run.path, "benchmark": run.report.benchmark}
        about |= {"started_at": run.report.started_at, "case": name, "check": row.check}
        time = {"measure": row.measure, "time_s": row.time_s, "n": row.n}
        rows.append(flat(row.metrics) | row.key | about | time)
    return pd.DataFrame(rows)


# -- one case --------------------------------------------------------------------------------------


def reduce(case: Case, benchmark: str, measure: str | None) -> Row:
    """A case without its samples. Its time: median over i of max over ranks of samples_s[r][i]."""
    row = Row(case.key, case.check, case.metrics)
    if case.failed:
        return row
    steps = {name.replace(" ", "_"): name for name in case.samples_s}
    name = steps.get(measure.replace(" ", "_"), "") if measure else next(iter(case.samples_s), "")
    rows = np.asarray(case.samples_s.get(name, []), dtype=np.float64)
    times: NDArray[np.float64] | None = None
    if rows.size:
        own = benchmark in UNALIGNED
        times = rows[np.argmax(np.median(rows, axis=1))].copy() if own else rows.max(axis=0)
        value = float(np.median(times))
    else:
        name, value = time_metric(case.metrics, measure)
    if not value:
        what = f"the time '{measure}'" if measure else "a time"
        return replace(row, check=f"passed, but without {what}") if row.check == "passed" else row
    whole = times is not None and sum(case.rounds) == len(times)
    rounds = tuple(case.rounds) if whole else ()
    return replace(row, measure=name, time_s=value, times_s=times, rounds=rounds)


def is_time(name: str) -> bool:
    """Whether a metric of this name is in seconds, or so many a second."""
    return name == "rate" or name.endswith("_s")


def time_metric(metrics: dict[str, Any], wanted: str | None) -> tuple[str, float]:
    """The metric that says how long a case took: a name, and seconds; 0 where there is none.

    Of several the first median, else the first other time; of a rate the time of one.
    """
    times = {n: float(v) for n, v in metrics.items() if is_time(n) and is_number(v) and v > 0}
    rates = [n for n in times if n.endswith(("_per_s", "rate"))]
    names = [n for n in times if wanted in (None, n)]
    names.sort(key=lambda n: (n in rates, not n.endswith("_p50_s"), not n.endswith("time_s")))
    if not names:
        return "", 0.0
    name = names[0]
    return (f"1 / {name}", 1 / times[name]) if name in rates else (name, times[name])


def links_of(metrics: dict[str, Any]) -> list[list[Any]]:
    """Of p2p_matrix: [a, b, latency (us), and GB/s from a to b, from b to a, both at once]."""
    links = metrics.get("links")
    return [x for x in links if is_link(x)] if isinstance(links, list) else []


def is_link(x: Any) -> bool:
    whole = isinstance(x, (list, tuple)) and len(x) == 6 and all(map(is_number, x))
    return whole and min(x[3:]) > 0 and all(type(end) is int for end in x[:2])


def split_links(row: Row) -> list[Row]:
    """A round of p2p_matrix as four cases a link; another case as it is.

    A link has its latency, and the seconds that 1 GB takes: either way, and both at once.
    """
    own = {name: value for name, value in row.key.items() if name != "round"}
    parts = []
    for a, b, latency_us, *rates in links_of(row.metrics):
        ways = zip((f"{a} -> {b}", f"{b} -> {a}", f"{a} <-> {b}"), rates, strict=True)
        costs = [(f"{a} - {b} latency", "latency_s", latency_us / 1e6)]
        costs += [(way, "gigabyte_s", 1 / rate) for way, rate in ways]
        for name, unit, cost in costs:
            parts.append(Row({"link": name} | own, row.check, {unit: cost}, unit, cost))
    return [row] if row.failed or not parts else parts


# -- reports of other programs ---------------------------------------------------------------------


def read_foreign(path: str) -> Report | None:
    """The report of another program at `path`; None where it is not one of those."""
    try:
        with open(path, "rb") as file:
            start = file.readline(4096)
            if b'"schema"' in start:
                return None
            document = report_file.strict_json((start + file.read()).decode())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(document, dict):
        return None
    if "schema" in document:  # a document of many lines, as the first version's
        raise ValueError(
            f"{path} is of another version of torchrun-bench; this one reads {report_file.SCHEMA}"
        )
    for name, program, convert in (
        ("benchmark_results", "PyTorch's DDP benchmark", pytorch_cases),
        ("results", "nccl-tests", nccl_cases),
    ):
        if isinstance(document.get(name), list):
            report = Report(program, {}, path, [], str(document.get("start_time", "")))
            try:
                convert(document, report)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise ValueError(
                    f"{path} looks like a report of {program}, but does not fit: "
                    f"{type(error).__name__} {str(error)[:80]}"
                ) from None
            return report
    return None


def pytorch_cases(document: dict[str, Any], report: Report) -> None:
    """Of PyTorch's DDP benchmark: times of the first rank, then of the second, ..."""
    fixed = {name: document.get(name) for name in ("distributed_backend", "bucket_size")}
    most = 0
    for entry in document["benchmark_results"]:
        seen: list[int] = []
        for result in entry["result"]:
            ranks, times = result["ranks"], result["measurements"]
            count = len(ranks)
            if len(times) % count:
                raise ValueError(f"{len(times)} measurements of {count} ranks")
            # it measures one rank twice: first without DDP, then with it
            bare = count == 1 and 1 not in seen
            label = "no ddp" if bare else f"{count} rank{'s' * (count > 1)}"
            key = {"model": entry["model"], "batch_size": entry["batch_size"], "label": label}
            rows = np.array(times).reshape(count, -1).tolist()
            number = {"number": seen.count(count)}
            report.cases.append(Case(key | number | fixed, ranks, {"step": rows}))
            seen.append(count)
        most = max([most, *seen])
    versions = {"torch": document.get("pytorch_version"), "cuda": document.get("cuda_version")}
    report.environment |= versions | {"world_size": most}
    report.status = "complete"


def nccl_cases(document: dict[str, Any], report: Report) -> None:
    """Of nccl-tests' -J: microseconds and GB/s, out of place and in place."""
    version, config = int(document.get("nccl_version") or 0), document["config"]
    devices = config.get("devices") or []
    ranks = max(len(devices), config.get("nthreads", 1) * config.get("ngpus", 1))
    variables = [v for v in document.get("env") or [] if v.startswith("NCCL_")]  # not the secrets
    report.environment |= {
        "nccl": f"{version // 10000}.{version // 100 % 100}.{version % 100}",
        "world_size": ranks,
        "hosts": sorted({d["hostname"] for d in devices}),
        "devices": sorted({d["device_info"] for d in devices}),
        "variables": dict(v.split("=", 1) for v in variables),
    }
    report.status = "complete" if "end_time" in document else "interrupted"
    report.argv = [str(word) for word in document.get("args") or ["nccl-tests"]]
    for result in document["results"]:
        key = {"collective": Path(report.argv[0]).name.removesuffix("_perf")}
        key |= {"size_bytes": result["size"], "dtype": result["type"]}
        key |= {"redop": result["redop"], "root": str(result["root"]).strip(), "ranks": ranks}
        case = Case(key, list(range(ranks)))
        for place in ("out_of_place", "in_place"):
            found = result.get(place) or {}
            time_us = found.get("time", found.get("cpu_time"))
            if time_us is not None and is_number(time_us):
                case.metrics[f"{place}_time_s"] = time_us / 1e6
                case.metrics[f"{place}_algbw_gb_per_s"] = found["alg_bw"]
                case.metrics[f"{place}_busbw_gb_per_s"] = found["bus_bw"]
            if is_number(found.get("nwrong")) and found["nwrong"] > 0:
                case.check = f"failed: {found['nwrong']:g} wrong values {place.replace('_', ' ')}"
        report.cases.append(case)
