"""Reports as rows: what compare, export and report.py read, and a notebook can use as well.

    from analysis.load import frame, load
    table = frame(load(["results/", "more/*.jsonl"]))       # a row a case
    table.pivot_table("time_s", "case", "run")

Reads this project's reports, and by foreign.py those of PyTorch's DDP benchmark and nccl-tests.
"""

import glob
import gzip
import io
import itertools
import multiprocessing
import os
import signal
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import pandas as pd
from pandas.io.json import ujson_loads  # half the time of json's

from analysis.foreign import PYTORCH, label_of, our_key, read_foreign
from analysis.show import canonical, case_names, interval_of, is_number, plain, unit_of
from common import report as report_file
from common.cli import suggest
from common.report import Case, Report

STEP = "step"  # what a case is about, among its samples
RATES = ("1/s", "GB/s", "MB/s")
ENDINGS = (".json", ".jsonl", ".json.gz", ".jsonl.gz")  # of the reports in a folder
GZIP = b"\x1f\x8b"  # how its files begin
LARGE_BYTES = 2**24  # reading so much JSON takes half a second


@dataclass
class Row(Case):
    """One case of one run, without its samples."""

    measure: str = ""  # the step or metric that its time is of
    time_s: float = 0.0  # of the run; 0 where there is none
    times_s: Sequence[float] = ()  # of each iteration
    name: str = ""  # what tells the case apart


@dataclass
class Run(Report):
    """One report."""

    rows: dict[str, Row] = field(default_factory=dict)  # its cases by their canonical keys
    label: str = ""  # its path, or a page's name
    left_out: dict[str, list[Any]] = field(default_factory=dict)  # of the keys, and their values


def load(
    words: Sequence[str],
    measure: str | None = None,
    ignore: Sequence[str] = (),
    join_pytorch: bool = False,
) -> list[Run]:
    """The reports that paths, folders and patterns name, as runs, in the order of their start.

    measure: the step, time or rate to take instead of the first step. ignore: fields of the keys
    by which cases are not told apart. join_pytorch: let cases of PyTorch's DDP benchmark meet those
    of ddp_sweep.py. Raises ValueError with one line.
    """
    paths = find(words)
    read_one = partial(read, measure=measure)
    sizes = [os.path.getsize(path) if os.path.isfile(path) else 0 for path in paths]
    if (
        min(sizes, default=0) == 0 or sum(size > LARGE_BYTES for size in sizes) < 2
    ):  # 0: perhaps a pipe
        runs = list(map(read_one, paths))
    else:  # reading JSON fills one core
        with multiprocessing.get_context("fork").Pool(2, leave_signals) as pool:
            runs = pool.map(read_one, paths)
    runs.sort(key=lambda run: run.started_at)
    refuse_copies(runs)
    if join_pytorch:
        give_pytorch_our_keys(runs)
    leave_out(runs, ignore)
    for same in by_benchmark(runs).values():
        rows = rows_of(same)
        for row, name in zip(rows, case_names([row.key for row in rows]), strict=True):
            row.name = name
    return runs


def leave_signals() -> None:
    """In a process that reads: Ctrl-C is for the one that waits, which ends this one by SIGTERM."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def find(words: Sequence[str]) -> list[str]:
    """The files that the words name, each once. Raises ValueError where a folder has none."""
    found: dict[str, str] = {}
    for word in words:
        if os.path.isdir(word):
            inside = Path(word).rglob("*")
            paths = sorted(str(path) for path in inside if path.name.endswith(ENDINGS))
        elif os.path.lexists(word):  # a name may hold the letters of a pattern, e.g. ab[1]
            paths = [word]
        else:
            paths = sorted(glob.glob(word)) or [word]
        if not paths:
            raise ValueError(f"there is no report (*.jsonl) in {word}")
        for path in paths:
            real = os.path.realpath(path)
            if real in found:
                raise ValueError(f"{path} is the same file as {found[real]}; give each report once")
            found[real] = path
    return list(found.values())


def refuse_copies(runs: Sequence[Run]) -> None:
    """Raises ValueError where two reports are of the same run, which would count twice."""
    starts: dict[Any, list[Run]] = {}
    for run in runs:
        alike = starts.setdefault((run.benchmark, run.started_at, str(run.argv)), [])
        for other in alike:
            if run.rows and run.rows == other.rows:
                what = f"{run.label} is a copy of {other.label}: a run counts once"
                raise ValueError(f"{what}; leave one of them out")
        alike.append(run)


def leave_out(runs: Sequence[Run], names: Sequence[str]) -> None:
    """Take these fields out of all keys. Raises ValueError where no case has such a field."""
    known = dict.fromkeys(name for row in rows_of(runs) for name in row.key)
    for name in names:
        if known and name not in known:
            what = f"no case has a field '{name}' to ignore; there are {', '.join(known)}"
            raise ValueError(what + suggest(name, known))
    for run in runs if names else ():
        rows = list(run.rows.values())
        for name in names:
            values = [str(row.key[name]) for row in rows if name in row.key]
            run.left_out[name] = list(dict.fromkeys(values))
        for row in rows:
            row.key = {name: value for name, value in row.key.items() if name not in names}
        index(run, rows, f"several cases differ in {', '.join(names)} alone")


def index(run: Run, rows: Sequence[Row], problem: str) -> None:
    """Put the rows of a run under their keys. Raises ValueError where two have the same."""
    run.rows = {}
    for row in rows:
        form = canonical(row.key)
        if form in run.rows:
            raise ValueError(f"{run.label}: {problem}, e.g. {form}; measure one of them a report")
        run.rows[form] = row


def give_pytorch_our_keys(runs: Sequence[Run]) -> None:
    """Where reports of PyTorch's DDP benchmark and of ddp_sweep.py are both there, let cases meet
    that measured the same. Their labels are PyTorch's, which knows no number of nodes."""
    if not {PYTORCH, "ddp_sweep"} <= {run.benchmark for run in runs}:
        return
    for run in runs:
        rows = list(run.rows.values())
        for row in rows:
            if run.benchmark == PYTORCH:
                row.key = our_key(row.key, 0 if row.key["label"] == "no ddp" else len(row.ranks))
            elif run.benchmark == "ddp_sweep":
                row.key = row.key | {"label": label_of(row.key.get("world_size"))}
        index(run, rows, "several cases have the same key")
        run.benchmark = "ddp_sweep" if run.benchmark == PYTORCH else run.benchmark


def read(path: str, measure: str | None) -> Run:
    """The report at a path as a run; see `load`."""
    steps: dict[str, None] = {}  # those of any case

    def shrink(report: Report, case: Case) -> None:
        """Keep the times of one step alone: those of the slowest rank in each iteration."""
        steps.update(dict.fromkeys(case.samples_s))
        # version 2.0 wrote the case's own step first, under any name
        first = STEP if STEP in case.samples_s else next(iter(case.samples_s), "")
        samples = np.asarray(case.samples_s.get(measure or first, []), dtype=np.float64)
        case.samples_s = {}
        if samples.size:
            # ranks that go at their own pace have no common iterations: the slowest one counts
            slowest = np.median(samples, axis=1).argmax()
            times = samples.max(axis=0) if case.aligned else samples[slowest]
            case.samples_s = {measure or STEP: [times.tolist()]}

    with open_report(path) as file:
        report = parse(path, file, shrink)
    run = Run(**vars(report), label=path)
    parts = [part for whole in report.cases for part in split_links(whole)]
    index(run, [timed(case, measure) for case in parts], "several cases have the same key")
    if measure and run.rows and not any(row.measure for row in run.rows.values()):
        raise ValueError(f"{path}: {why_no_time(measure, list(run.rows.values()), list(steps))}")
    return run


@contextmanager
def open_report(path: str) -> Iterator[IO[bytes]]:
    """The file at a path, unpacked if it is gzip. Raises ValueError where it cannot be read."""
    try:
        with open(path, "rb") as file:
            packed = file.peek(2).startswith(GZIP)
            yield io.BytesIO(gzip.decompress(file.read())) if packed else file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is damaged gzip: {error}") from None
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None


def parse(path: str, file: IO[bytes], each: Callable[[Report, Case], None]) -> Report:
    """The report in an open file, which is read once: it may be a pipe. each: see `load`."""
    first = file.readline()
    lines: Iterator[bytes] = itertools.chain([first], file)
    if b'"schema"' not in first[:4096]:
        content = first + file.read()
        if report := read_foreign(content, path):
            for case in report.cases:
                each(report, case)
            return report
        lines = io.BytesIO(content)
    return report_file.load(path, each, partial(ujson_loads, precise_float=True), lines)


def why_no_time(measure: str, rows: Sequence[Row], steps: Sequence[str]) -> str:
    """Why `--measure` finds no time in any of the cases, and which names would do."""
    metrics = [row.metrics for row in rows if not row.failed]
    if not metrics:
        return f"all of its {len(rows)} cases failed, so none has a time"
    values = [numbers[measure] for numbers in metrics if measure in numbers]
    why = f"no case has a step, a time or a rate named '{measure}'"
    if values:
        texts = [f"{value:.4g}" if is_number(value) else str(value)[:40] for value in values[:3]]
        more = ", ..." if len(values) > 3 else ""
        why = f"'{measure}' is {', '.join(texts)}{more}: neither a time nor a rate above 0"
    names = [*steps, *(name for numbers in metrics for name in numbers if is_time(name, numbers))]
    known = list(dict.fromkeys(names))
    return f"{why}; there are {', '.join(known) or 'none'}{suggest(measure, known)}"


def is_time(name: str, metrics: dict[str, Any]) -> bool:
    """Whether a metric is a time, or a rate from which a time follows."""
    value = metrics.get(name)
    known_unit = unit_of(name).name in ("s", *RATES)
    return known_unit and is_number(value) and value > 0


def timed(case: Case, measure: str | None) -> Row:
    """A case and its time: the median of its iterations, else the first metric in seconds; of a
    rate that `measure` names the time that follows from it."""
    row = Row(**vars(case) | {"samples_s": {}})
    if row.failed:
        return row
    if case.samples_s:
        row.measure, (row.times_s,) = case.samples_s.popitem()
        row.time_s = float(np.median(row.times_s))
        return row
    names = [measure] if measure else [name for name in row.metrics if unit_of(name).name == "s"]
    for name in names:
        if is_time(name, row.metrics):
            value, rate = row.metrics[name], unit_of(name).name in RATES
            row.measure, row.time_s = (f"1 / {name}", 1 / value) if rate else (name, value)
            break
    return row


def by_benchmark(runs: Sequence[Run]) -> dict[str, list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.benchmark, []).append(run)
    return groups


def rows_of(runs: Sequence[Run]) -> list[Row]:
    return [row for run in runs for row in run.rows.values()]


def every_row(runs: Sequence[Run]) -> Iterator[tuple[Row, dict[str, Any]]]:
    """Each case, and what a table says of it; n: iterations."""
    for run in runs:
        e = run.environment
        about = {"run": run.label, "started_at": run.started_at, "torch": e.get("torch")}
        about |= {"host": ", ".join(map(str, e.get("hosts") or [])), "benchmark": run.benchmark}
        for row in run.rows.values():
            yield row, about | {"case": row.name, "n": len(row.times_s) or None}


def frame(runs: Sequence[Run]) -> pd.DataFrame:
    """A row a case: of which run, its name, check and time, the key, and the metrics."""
    rows = []
    for row, about in every_row(runs):
        own = {"check": row.check, "measure": row.measure, "time_s": row.time_s or None}
        rows.append(plain(row.metrics) | row.key | about | own)
    return pd.DataFrame(rows)


def numbers(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A row a number of a case that did not fail, with its 95 % interval."""
    found = []
    for row, about in every_row(runs):
        for metric, value in row.metrics.items():
            if is_number(value) and not row.failed:
                low, high = interval_of(metric, row.metrics) or (None, None)
                values = {"metric": metric, "value": value, "ci_low": low, "ci_high": high}
                found.append(about | {"key": row.key} | values)
    return found


def links_of(metrics: dict[str, Any]) -> list[list[Any]]:
    """Of p2p_matrix: [a, b, latency (us), and GB/s from a to b, from b to a, both at once]."""
    links = metrics.get("links")
    rows = [x for x in links if isinstance(x, list)] if isinstance(links, list) else []
    return [x for x in rows if len(x) == 6 and all(map(is_number, x)) and min(x[3:]) > 0]


def split_links(case: Case) -> list[Case]:
    """A round of p2p_matrix as four cases a link; another case as it is.

    A link has its latency, and the seconds that 1 GB takes: either way, and both at once.
    """
    costs: dict[str, dict[str, Any]] = {}
    for a, b, latency_us, there, back, both in [] if case.failed else links_of(case.metrics):
        costs[f"{a} - {b} latency"] = {"latency_s": latency_us / 1e6}
        for way, rate in ((f"{a} -> {b}", there), (f"{b} -> {a}", back), (f"{a} <-> {b}", both)):
            costs[way] = {"gigabyte_s": 1 / rate}
    own = {name: value for name, value in case.key.items() if name != "round"}
    return [Case({"link": way} | own, [], metrics=costs[way]) for way in costs] or [case]
