"""Reports as rows: what compare, export and report.py read, and a notebook can use as well.

    from analysis.load import frame, load
    table = frame(load(["results/", "more/*.jsonl"]))       # a row a case
    table.pivot_table("time_s", "case", "run")

Reads this project's reports, and by foreign.py those of PyTorch's DDP benchmark,
nccl-tests and rccl-tests.
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
from typing import IO, Any, NamedTuple

import numpy as np
import pandas as pd
from pandas.io.json import ujson_loads  # half the time of json's

from analysis import nccl_tests
from analysis.foreign import PYTORCH, label_of, our_key, read_foreign
from analysis.show import canonical, case_names, interval_of, is_number, plain, unit_of
from common import report as report_file
from common.cli import suggest
from common.report import Case, Report
from common.samples import time_of_iterations

STEP = "step"  # what a case is about, among its samples
RATES = ("1/s", "GB/s", "MB/s")
ENDINGS = (".json", ".jsonl", ".json.gz", ".jsonl.gz")  # of reports in a folder
GZIP = b"\x1f\x8b"  # how packed files begin
LARGE_BYTES = 2**24  # it takes half a second to read so much JSON


@dataclass
class Row(Case):
    """One case of one run, without its samples."""

    measure: str = ""  # the step or the metric that its time is taken from
    time_s: float = 0.0  # the case's time in this run; 0 where there is none
    times_s: Sequence[float] = ()  # of each iteration
    name: str = ""  # tells the case apart from the others of its benchmark


@dataclass
class Run(Report):
    """One report."""

    rows: dict[str, Row] = field(default_factory=dict)  # its cases by their canonical keys
    label: str = ""  # its path, or its name on a page
    left_out: dict[str, list[Any]] = field(default_factory=dict)  # field of the keys -> its values
    synchronized: bool = False  # of a program that waits for the device in each iteration


def load(
    words: Sequence[str],
    measure: str | None = None,
    ignore: Sequence[str] = (),
    join_foreign: bool = False,
) -> list[Run]:
    """The reports that paths, folders and patterns name, as runs, in the order of their start.

    measure: the step, time or rate to take instead of the case's own step. ignore: fields of the
    keys by which cases are not told apart. join_foreign: let cases of PyTorch's DDP benchmark meet
    those of ddp_sweep.py, and those of nccl-tests collectives.py. Raises ValueError with one line.
    """
    runs = read_all(find(words), measure)
    runs.sort(key=lambda run: run.started_at)
    refuse_copies(runs)
    if join_foreign:
        give_pytorch_our_keys(runs)
        give_collectives_their_keys(runs)
    leave_out(runs, ignore)
    for same in by_benchmark(runs).values():
        rows = rows_of(same)
        names = case_names([row.key for row in rows])
        for row, name in zip(rows, names, strict=True):
            row.name = name
    return runs


def read_all(paths: Sequence[str], measure: str | None) -> list[Run]:
    """Each report, read by two processes where that is faster."""
    read_one = partial(read, measure=measure)
    are_files = all(os.path.isfile(path) for path in paths)  # else one may be a pipe
    large = [path for path in paths if are_files and os.path.getsize(path) > LARGE_BYTES]
    if len(large) < 2:
        return list(itertools.chain(*map(read_one, paths)))
    # reading JSON fills one core
    with multiprocessing.get_context("fork").Pool(2, leave_signals) as pool:
        return list(itertools.chain(*pool.map(read_one, paths)))


def leave_signals() -> None:
    """In a process that reads: Ctrl-C is for the one that waits, which ends this one by SIGTERM."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def find(words: Sequence[str]) -> list[str]:
    """The files that the words name, each once. Raises ValueError where a folder has none."""
    path_of_file: dict[str, str] = {}
    for word in words:
        for path in paths_of(word):
            file = os.path.realpath(path)
            if file in path_of_file:
                other = path_of_file[file]
                raise ValueError(f"{path} is the same file as {other}; give each report once")
            path_of_file[file] = path
    return list(path_of_file.values())


def paths_of(word: str) -> list[str]:
    """A file, the reports below a folder, or the files that fit a pattern."""
    if os.path.isdir(word):
        paths = [str(path) for path in Path(word).rglob("*") if path.name.endswith(ENDINGS)]
        if not paths:
            raise ValueError(f"there is no report (*.jsonl) in {word}")
        return sorted(paths)
    if os.path.lexists(word):  # a name may hold the letters of a pattern, e.g. ab[1]
        return [word]
    return sorted(glob.glob(word)) or [word]


def refuse_copies(runs: Sequence[Run]) -> None:
    """Raises ValueError where two reports are of the same run, which would count twice."""
    starts: dict[Any, list[Run]] = {}
    for run in runs:
        start = (run.benchmark, run.started_at, str(run.argv))
        alike = starts.setdefault(start, [])
        for other in alike:
            if run.path != other.path and run.rows and run.rows == other.rows:
                what = f"{run.label} is a copy of {other.label}: a run counts once"
                raise ValueError(f"{what}; leave one of them out")
        alike.append(run)


def leave_out(runs: Sequence[Run], names: Sequence[str]) -> None:
    """Take these fields out of all keys. Raises ValueError where no case has such a field."""
    if not names:
        return
    known: dict[str, None] = {}
    for row in rows_of(runs):
        known |= dict.fromkeys(row.key)
    unknown = [name for name in names if name not in known]
    if known and unknown:
        what = f"no case has a field '{unknown[0]}' to ignore; there are {', '.join(known)}"
        raise ValueError(what + suggest(unknown[0], known))
    for run in runs:
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
    """Let cases of PyTorch's DDP benchmark and of ddp_sweep.py meet that measured the same.

    Nothing changes unless reports of both were read. The labels become PyTorch's, which do not tell
    the number of nodes.
    """
    if not {PYTORCH, "ddp_sweep"} <= {run.benchmark for run in runs}:
        return
    for run in runs:
        rows = list(run.rows.values())
        for row in rows:
            if run.benchmark == PYTORCH:
                is_wrapped = row.key["label"] != "no ddp"
                row.key = our_key(row.key, len(row.ranks) if is_wrapped else 0)
            elif run.benchmark == "ddp_sweep":
                label = label_of(row.key.get("world_size"))
                row.key = row.key | {"label": label}
        index(run, rows, "several cases have the same key")
        if run.benchmark == PYTORCH:
            run.benchmark, run.synchronized = "ddp_sweep", True


def give_collectives_their_keys(runs: Sequence[Run]) -> None:
    """Let cases of collectives.py meet those of nccl-tests, by the time that tables of both show.

    Nothing changes unless reports of both were read.
    """
    if not {nccl_tests.BENCHMARK, "collectives"} <= {run.benchmark for run in runs}:
        return
    for run in runs:
        if run.benchmark != "collectives":
            continue
        run.benchmark = nccl_tests.BENCHMARK
        rows = list(run.rows.values())
        for row in rows:
            row.key = nccl_tests.their_key(row.key)
            if row.measure == STEP and is_time(nccl_tests.TIME, row.metrics):
                row.measure, row.times_s = nccl_tests.TIME, ()
                row.time_s = row.metrics[nccl_tests.TIME]
        index(run, rows, "several cases are one for nccl-tests")


def read(path: str, measure: str | None) -> list[Run]:
    """The report at a path as a run; see `load`. A log may hold several."""
    steps: dict[str, None] = {}  # of all cases, each once

    def shrink(report: Report, case: Case) -> None:
        """Keep the times of one step alone, those that count of each iteration."""
        steps.update(dict.fromkeys(case.samples_s))
        step = measure or step_of(case)
        times = times_of(case, step)
        name = step if measure or step in case.metrics else STEP  # nccl-tests' are of a metric
        case.samples_s = {name: [times]} if times else {}
        case.slowest_s, case.quartiles_s = {}, {}

    with open_report(path) as file:
        reports = parse(path, file, shrink)
    runs = []
    for number, report in enumerate(reports, 1):
        run = Run(**vars(report), label=path if number == 1 else f"run {number} of {path}")
        runs.append(run)
        cases = []
        for case in report.cases:
            cases += split_links(case)
        index(run, [timed(case, measure) for case in cases], "several cases have the same key")
    rows = rows_of(runs)
    if measure and rows and not any(row.measure for row in rows):
        raise ValueError(f"{path}: {why_no_time(measure, rows, list(steps))}")
    return runs


def step_of(case: Case) -> str:
    """What the case is about, among its samples: version 2.0 wrote it first, under any name."""
    if STEP in case.samples_s:
        return STEP
    return next(iter(case.samples_s), "")


def times_of(case: Case, step: str) -> list[float]:
    """The time of each iteration of a step; see `time_of_iterations`."""
    if case.bounded:
        return case.slowest_s.get(step, [])
    samples = np.asarray(case.samples_s.get(step, []), dtype=np.float64)  # [ranks, iterations]
    if not samples.size:
        return []
    times: list[float] = time_of_iterations(samples, case.aligned).tolist()
    return times


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


def parse(path: str, file: IO[bytes], each: Callable[[Report, Case], None]) -> list[Report]:
    """The reports in an open file, which is read once: it may be a pipe.

    each: called with every case as soon as it is read.
    """
    first = file.readline()
    lines: Iterator[bytes] = itertools.chain([first], file)
    if b'"schema"' not in first[:4096]:
        content = first + file.read()
        reports = read_foreign(content, path)
        for report in reports:
            for case in report.cases:
                each(report, case)
        if reports:
            return reports
        is_text = content.strip() and content[:2] not in report_file.OTHER_FORMATS
        if is_text and b'"schema"' not in content[:4096]:
            raise ValueError(f"{path} is neither a report nor a log with a table of nccl-tests")
        lines = io.BytesIO(content)
    return [report_file.load(path, each, partial(ujson_loads, precise_float=True), lines)]


def why_no_time(measure: str, rows: Sequence[Row], steps: Sequence[str]) -> str:
    """Why `--measure` finds no time in any of the cases, and which names would do."""
    metrics = [row.metrics for row in rows if not row.failed]
    if not metrics:
        return f"all of its {len(rows)} cases failed, so none has a time"
    values = [numbers[measure] for numbers in metrics if measure in numbers]
    why = f"no case has a step, a time or a rate named '{measure}'"
    if values:
        why = f"'{measure}' is {examples_of(values)}: neither a time nor a rate above 0"
    known = dict.fromkeys(steps)
    for numbers in metrics:
        known |= dict.fromkeys(name for name in numbers if is_time(name, numbers))
    return f"{why}; there are {', '.join(known) or 'none'}{suggest(measure, known)}"


def examples_of(values: Sequence[Any]) -> str:
    """The first three values in a few words."""
    texts = [f"{value:.4g}" if is_number(value) else str(value)[:40] for value in values[:3]]
    if len(values) > 3:
        texts.append("...")
    return ", ".join(texts)


def is_time(name: str, metrics: dict[str, Any]) -> bool:
    """Whether a metric is a time, or a rate from which a time follows."""
    value = metrics.get(name)
    known_unit = unit_of(name).name in ("s", *RATES)
    return known_unit and is_number(value) and value > 0


def timed(case: Case, measure: str | None) -> Row:
    """A case and its time.

    The time is the median of its iterations; of a case without samples it is the first metric in
    seconds, or the one that `measure` names. A rate gives the time that follows from it.
    """
    row = Row(**vars(case) | {"samples_s": {}})
    if row.failed:
        return row
    if case.samples_s:
        row.measure, rows = case.samples_s.popitem()  # the only one that was kept
        (row.times_s,) = rows
        row.time_s = float(np.median(row.times_s))
        return row
    in_seconds = [name for name in row.metrics if unit_of(name).name == "s"]
    for name in [measure] if measure else in_seconds:
        if is_time(name, row.metrics):
            value = row.metrics[name]
            is_rate = unit_of(name).name in RATES
            row.measure = f"1 / {name}" if is_rate else name
            row.time_s = 1 / value if is_rate else value
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
    """Each case, and what a table says about it. n: the number of its iterations."""
    for run in runs:
        environment = run.environment
        about = {
            "run": run.label,
            "started_at": run.started_at,
            "torch": environment.get("torch"),
            "host": ", ".join(str(host) for host in environment.get("hosts") or []),
            "benchmark": run.benchmark,
        }
        for row in run.rows.values():
            yield row, about | {"case": row.name, "n": len(row.times_s) or None}


def frame(runs: Sequence[Run]) -> pd.DataFrame:
    """A row a case: its run, name, check and time, the key, and the metrics."""
    rows = []
    for row, about in every_row(runs):
        time = {"check": row.check, "measure": row.measure, "time_s": row.time_s or None}
        rows.append(plain(row.metrics) | row.key | about | time)
    return pd.DataFrame(rows)


def numbers(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A row for each number of a case that did not fail, with its 95 % interval."""
    rows = []
    for case, about in every_row(runs):
        for metric, value in case.metrics.items():
            if is_number(value) and not case.failed:
                low, high = interval_of(metric, case.metrics) or (None, None)
                values = {"metric": metric, "value": value, "ci_low": low, "ci_high": high}
                rows.append(about | {"key": case.key} | values)
    return rows


class Link(NamedTuple):
    """What p2p_matrix.py measured between two ranks."""

    a: int
    b: int
    latency_us: float
    there: float  # GB/s from a to b
    back: float  # GB/s from b to a
    both: float  # GB/s, both ways at once


def links_of(metrics: dict[str, Any]) -> list[Link]:
    """The links of a case of p2p_matrix.py; none where the metrics hold something else."""
    rows = metrics.get("links")
    if not isinstance(rows, list):
        return []
    links = [Link(*row) for row in rows if isinstance(row, list) and len(row) == 6]
    return [link for link in links if is_link(link)]


def is_link(link: Link) -> bool:
    """Whether all are numbers, and the rates are above 0. A report may hold anything."""
    if not all(is_number(value) for value in link):
        return False
    return min(link.there, link.back, link.both) > 0


def split_links(case: Case) -> list[Case]:
    """A round of p2p_matrix.py as four cases a link; another case as it is.

    A link has its latency, and the seconds that 1 GB takes: there, back, and both ways at once.
    """
    links = [] if case.failed else links_of(case.metrics)
    if not links:
        return [case]
    costs: dict[str, dict[str, Any]] = {}
    for link in links:
        costs[f"{link.a} - {link.b} latency"] = {"latency_s": link.latency_us / 1e6}
        costs[f"{link.a} -> {link.b}"] = {"gigabyte_s": 1 / link.there}
        costs[f"{link.b} -> {link.a}"] = {"gigabyte_s": 1 / link.back}
        costs[f"{link.a} <-> {link.b}"] = {"gigabyte_s": 1 / link.both}
    key = case.key.copy()
    key.pop("round", None)
    cases = []
    for way, cost in costs.items():
        cases.append(Case({"link": way} | key, [], metrics=cost))
    return cases
