"""Reports as rows: what compare, export and report.py read, and a notebook can use as well.

    from analysis.load import frame, load
    table = frame(load(["results/", "more/*.jsonl"]))       # a pandas DataFrame, a row a case
    table.pivot_table("step_s", "case", "run")              # its interval: step_s_low, step_s_high

Reads this project's reports, and by foreign.py and nccl_tests.py those of PyTorch's DDP benchmark,
nccl-tests and rccl-tests. What metrics and their intervals are is said here alone.
"""

import glob
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import pandas as pd
from pandas.io.json import ujson_loads  # half the time of json's

from analysis import foreign, nccl_tests
from analysis.show import DAMAGE, canonical, clean, is_number, unit_of
from common import report as report_file
from common.cli import suggest
from common.report import Case, Estimate, Report
from common.stats import MIN_ROUNDS, time_of_iterations, time_of_rounds

BY_ROUNDS = "geometric mean over rounds of block medians"  # what the time of a run is
BY_ITERATIONS, BY_SCRIPT = "median over iterations", "the metric in the report"
STEP = "step"  # what a case is about, among its samples
RATES = ("1/s", "GB/s", "MB/s")
ENDINGS = (".json", ".jsonl")  # of reports in a folder
LAST_DIGIT = "last_digit_share"  # a metric of logs: one unit of the last digit / the number
LOAD_ENDING = ".load"  # of a file with the load during a run, beside its report
SHORTEST_S, LONGEST_S = 1e-12, 1e9  # of the times of a case
Value = str | float | Estimate  # a number that was estimated has its interval


@dataclass(kw_only=True)
class Row(Case):
    """One case of one run, without its samples."""

    label: str = ""  # its name; `table: name` where several tables of a run have that name
    measure: str = ""  # the step or the metric that its time is taken from
    time_s: float = 0.0  # the case's time in this run; 0 where there is none
    time_is: str = ""  # by which estimator
    times_s: Sequence[float] = ()  # of each iteration


@dataclass
class Run(Report):
    """One report."""

    rows: dict[str, Row] = field(default_factory=dict)  # its cases by their canonical keys
    label: str = ""  # its path, or its name on a page
    left_out: dict[str, list[Any]] = field(default_factory=dict)  # field of the keys -> its values
    digest: str = ""  # of the report's bytes, and of its place in the file
    # of each node: the cores that other processes used, and of how many; empty: not recorded
    loads: list[tuple[float, int]] = field(default_factory=list)
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
    runs = [run for path in find(words) for run in read(path, measure)]
    arrange(runs, ignore, join_foreign)
    return runs


def arrange(runs: list[Run], ignore: Sequence[str] = (), join_foreign: bool = False) -> None:
    """Put runs into the order of their start and give their cases keys and labels; see `load`."""
    runs.sort(key=lambda run: run.started_at)
    if join_foreign:
        let_meet(runs)
    leave_out(runs, ignore)
    for same in by_benchmark(runs).values():
        tell_apart(same)


def copies(runs: Sequence[Run]) -> list[Run]:
    """Runs that can be arranged anew without a change of these. Their numbers are shared."""
    return [
        replace(run, rows={form: replace(row) for form, row in run.rows.items()}) for run in runs
    ]


def tell_apart(runs: Sequence[Run]) -> None:
    """Give each case its label."""
    shared = set()
    for run in runs:
        tables: dict[str, set[str]] = {}
        for row in run.rows.values():
            tables.setdefault(row.name, set()).add(row.table)
        shared |= {name for name, its_tables in tables.items() if len(its_tables) > 1}
    for row in rows_of(runs):
        row.label = f"{row.table}: {row.name}" if row.name in shared else row.name


def find(words: Sequence[str], endings: Sequence[str] = ENDINGS) -> list[str]:
    """The files that the words name. Raises ValueError where one is named twice. endings: of the
    names of files that count in a folder."""
    paths = [path for word in words for path in paths_of(word, endings)]
    path_of_file: dict[str, str] = {}
    for path in paths:
        file = os.path.realpath(path)
        if file in path_of_file:
            raise ValueError(f"{path} is the same file as {path_of_file[file]}; give it once")
        path_of_file[file] = path
    return paths


def paths_of(word: str, endings: Sequence[str]) -> list[str]:
    """A file, the reports or logs below a folder, or the files that fit a pattern."""
    if os.path.isdir(word):
        inside = [path for path in Path(word).rglob("*") if path.suffix in endings]
        paths = [str(path) for path in inside if path.is_file()]  # a FIFO would be waited for
        if not paths:
            kind = "report (*.jsonl)" if endings == ENDINGS else f"file *{', *'.join(endings)}"
            raise ValueError(f"there is no {kind} in {word}")
        return sorted(paths)
    if os.path.lexists(word):  # a name may hold the letters of a pattern, e.g. ab[1]
        return [word]
    return sorted(glob.glob(word)) or [word]


def leave_out(runs: Sequence[Run], names: Sequence[str]) -> None:
    """Take these fields out of all keys. Raises ValueError where no case has such a field."""
    known: dict[str, None] = {}
    for row in rows_of(runs):
        known |= dict.fromkeys(row.key)
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
            row.key = without(row.key, names)
        index(run, rows, f"several cases differ in {', '.join(names)} alone")


def without(key: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in key.items() if name not in names}


def index(run: Run, rows: Sequence[Row], problem: str) -> None:
    """Put the rows of a run under their keys. Raises ValueError where two have the same."""
    run.rows = {}
    for row in rows:
        form = canonical(row.key)
        if form in run.rows:
            raise ValueError(f"{run.label}: {problem}, e.g. {form}; measure one of them a report")
        run.rows[form] = row


def let_meet(runs: Sequence[Run]) -> None:
    """Give cases that measured the same in another program the same key and time.

    Nothing changes unless reports of both programs were read.
    """
    benchmarks = {run.benchmark for run in runs}
    for run in runs:
        rows = list(run.rows.values())
        if {foreign.PYTORCH, "ddp_sweep"} <= benchmarks:
            if run.benchmark == foreign.PYTORCH:
                run.benchmark, run.synchronized = "ddp_sweep", True
                for row in rows:
                    row.key = foreign.key_of_ddp_sweep(row)
            elif run.benchmark == "ddp_sweep":
                for row in rows:
                    row.key = without(row.key, foreign.NOT_IN_PYTORCH)
        if {nccl_tests.NCCL_TESTS, "collectives"} <= benchmarks and run.benchmark == "collectives":
            run.benchmark = nccl_tests.NCCL_TESTS
            for row in rows:
                row.key = nccl_tests.key_of_nccl_tests(row.key)
                if row.measure == STEP and is_time(nccl_tests.TIME, row.metrics):
                    row.measure, row.times_s = nccl_tests.TIME, ()  # what tables of both show
                    row.time_is = BY_SCRIPT
                    row.time_s = number_of(row.metrics[nccl_tests.TIME]) or 0
        index(run, rows, f"several cases are one for {run.benchmark}")


def read(path: str, measure: str | None) -> list[Run]:
    """The report at a path as a run; see `load`. A log may hold several."""
    times: dict[str, None] = {}  # the names that --measure may have

    def shrink(report: Report, case: Case) -> None:
        """Keep the times of one step alone, those that count of each iteration."""
        times.update(dict.fromkeys(case.samples_s))
        its_own = STEP if STEP in case.samples_s else next(iter(case.samples_s), "")
        step = measure or its_own
        samples = np.asarray(case.samples_s.get(step, []), dtype=np.float64)  # [ranks, iterations]
        refuse_impossible(samples, path, case.name)
        case.samples_s = {}
        if samples.size:
            case.samples_s[step] = [time_of_iterations(samples, case.aligned).tolist()]

    content = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            reports = parse(path, file, shrink, content)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except DAMAGE as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from None
    runs = []
    for number, report in enumerate(reports, 1):
        run = Run(**vars(report), label=path if number == 1 else f"run {number} of {path}")
        run.digest = f"{content.hexdigest()} {number}"
        run.loads = loads_in(report.end) or loads_beside(path)
        runs.append(run)
        cases = itertools.chain(*map(split_links, report.cases))
        index(run, [timed(case, measure) for case in cases], "several cases have the same key")
        for row in run.rows.values():
            refuse_impossible(row.time_s, path, row.name)
    rows = rows_of(runs)
    if measure and rows and not any(row.measure for row in rows):
        for row in rows:
            if not row.failed:
                times |= dict.fromkeys(name for name in row.metrics if is_time(name, row.metrics))
        why = f"{path}: no case has a step, a time or a rate above 0 named '{measure}'"
        raise ValueError(f"{why}; there are {', '.join(times) or 'none'}{suggest(measure, times)}")
    return runs


def refuse_impossible(times_s: Any, path: str, name: str) -> None:
    """Raise ValueError if a time of a case cannot be one: ratios of such times mean nothing.

    times_s: a number or an array, in seconds; 0 for a time that is missing.
    """
    times_s = np.asarray(times_s)
    if not ((times_s == 0) | ((times_s >= SHORTEST_S) & (times_s <= LONGEST_S))).all():
        limits = f"from {SHORTEST_S:g} to {LONGEST_S:g} s"
        raise ValueError(f"{path}: case {clean(name)!r} has a time that is not {limits}")


def parse(
    path: str, file: IO[bytes], each: Callable[[Report, Case], None], content: Any
) -> list[Report]:
    """The reports in an open file, which is read once: it may be a pipe.

    each: called with every case as soon as it is read. content: a hash that is updated with all
    bytes of the file.
    """

    def hashed(lines: Iterable[bytes]) -> Iterator[bytes]:
        for line in lines:
            content.update(line)
            yield line

    first = file.readline()
    if not first or b'"schema"' in first[:4096]:
        lines = hashed(itertools.chain([first], file))
        return [report_file.load(path, each, partial(ujson_loads, precise_float=True), lines)]
    text = first + file.read()
    content.update(text)
    reports = foreign.read(text, path)
    if not reports:
        raise ValueError(f"{path} is neither a report nor a log with a table of nccl-tests")
    for report in reports:
        for case in report.cases:
            each(report, case)
    return reports


def loads_in(end: dict[str, Any]) -> list[tuple[float, int]]:
    """What other processes used of each node, from the last line of a report; [] if it does not
    say."""
    others = end.get("others")
    rows = others if isinstance(others, list) else []
    pairs = [row for row in rows if isinstance(row, list) and len(row) == 2]
    return [(busy, cores) for busy, cores in pairs if is_number(busy) and cores and cores > 0]


def loads_beside(path: str) -> list[tuple[float, int]]:
    """The same from the file that ab.py writes beside a report: 01.load beside 01.jsonl."""
    beside = os.path.splitext(path)[0] + LOAD_ENDING
    if not os.path.isfile(beside):
        return []
    with open(beside, "rb") as file:
        try:
            content = json.load(file)
        except ValueError:  # cut short: the load is not known
            return []
    return loads_in(content) if isinstance(content, dict) else []


def is_time(name: str, metrics: dict[str, Any]) -> bool:
    """Whether a metric is a time, or a rate from which a time follows."""
    known_unit = unit_of(name).name in ("s", *RATES)
    return known_unit and (number_of(metrics.get(name)) or 0) > 0


def number_of(value: Any) -> float | None:
    """A number, or that of an estimate; None for anything else."""
    value = value.value if isinstance(value, Estimate) else value
    return value if is_number(value) else None


def timed(case: Case, measure: str | None) -> Row:
    """A case and its time.

    The time is `time_of_blocks`; of a case without samples it is the first metric in seconds, else
    the first rate, or the one that `measure` names. A time follows from a rate.
    """
    row = Row(**vars(case) | {"samples_s": {}, "name": case.name or canonical(case.key)})
    if row.failed:
        return row
    if case.samples_s:
        row.measure, (row.times_s,) = case.samples_s.popitem()  # the only one that was kept
        row.time_s = time_of_blocks(row.times_s, row.rounds)
        has_blocks = is_in_rounds(row.times_s, row.rounds) and len(row.rounds) >= MIN_ROUNDS
        row.time_is = BY_ROUNDS if has_blocks else BY_ITERATIONS
        return row
    times_first = sorted(row.metrics, key=lambda name: unit_of(name).name != "s")
    for name in [measure] if measure else times_first:
        value = number_of(row.metrics.get(name))
        if value and is_time(name, row.metrics):
            is_rate = unit_of(name).name in RATES
            row.measure, row.time_is = f"1 / {name}" if is_rate else name, BY_SCRIPT
            row.time_s = 1 / value if is_rate else value
            break
    return row


def time_of_blocks(
    times_s: Sequence[float], rounds: Sequence[int], blocks: int | None = None
) -> float:
    """The time of a run from the seconds of its iterations [n]: `stats.time_of_rounds`, or their
    median if the rounds are not known (n is not their sum).

    blocks: the number of rounds that count, from the first one on; None for all.
    """
    if not is_in_rounds(times_s, rounds):
        return float(np.median(times_s))
    kept = rounds[:blocks]
    return time_of_rounds(times_s[: sum(kept)], kept)


def is_in_rounds(times_s: Sequence[float], rounds: Sequence[int]) -> bool:
    return 0 < sum(rounds) == len(times_s)


def by_benchmark(runs: Sequence[Run]) -> dict[str, list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.benchmark, []).append(run)
    return groups


def rows_of(runs: Sequence[Run]) -> list[Row]:
    return [row for run in runs for row in run.rows.values()]


def about(run: Run, row: Row) -> dict[str, Any]:
    """What a table says about a case. n: the number of its iterations."""
    return {
        "run": run.label,
        "started_at": run.part_entry(row.part or 0, "at"),
        "torch": run.environment.get("torch"),
        "host": ", ".join(str(host) for host in run.part_entry(row.part or 0, "hosts") or []),
        "benchmark": run.benchmark,
        "table": row.table,
        "case": row.label,
        "n": len(row.times_s) or None,
    }


def frame(runs: Sequence[Run]) -> pd.DataFrame:
    """A row a case: its run, name, check and time, the key, and the metrics.

    An estimated metric `step_s` has the ends of its 95 % interval in `step_s_low`, `step_s_high`.
    """
    rows = []
    for run in runs:
        for row in run.rows.values():
            values: dict[str, Any] = {}
            for name, value in values_of(row.metrics).items():
                values[name] = value
                if isinstance(value, Estimate):
                    ends = {f"{name}_low": value.low, f"{name}_high": value.high}
                    values |= {name: value.value} | ends
            time = {"check": row.check, "measure": row.measure, "time_s": row.time_s or None}
            rows.append(values | row.key | about(run, row) | time)
    return pd.DataFrame(rows)


def numbers(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A row for each number of a case that did not fail, with its 95 % interval."""
    rows = []
    for run in runs:
        for case in run.rows.values():
            for name, value in values_of({} if case.failed else case.metrics).items():
                if not isinstance(value, str):
                    number = value if isinstance(value, Estimate) else Estimate(value)
                    values = {"metric": name} | vars(number)
                    rows.append(about(run, case) | {"key": case.key} | values)
    return rows


def values_of(metrics: dict[str, Any]) -> dict[str, Value]:
    """The numbers, estimates and words of a case; nothing that is a list or an object."""
    shown = {}
    for name, value in metrics.items():
        if isinstance(value, str) or number_of(value) is not None:
            shown[name] = value
    return shown


class Link(NamedTuple):
    """What p2p_matrix.py measured between two ranks."""

    a: int
    b: int
    latency_us: float
    there: float | None  # GB/s from a to b; None if only both ways at once were measured
    back: float | None  # GB/s from b to a
    both: float  # GB/s, both ways at once


def links_of(metrics: dict[str, Any]) -> list[Link]:
    """The links of a case of p2p_matrix.py; none of another case."""
    return [Link(*row) for row in metrics.get("links", [])]


def split_links(case: Case) -> list[Case]:
    """A round of p2p_matrix.py as four cases a link; another case as it is.

    A link has its latency, and its bandwidth there, back, and both ways at once; and how far its
    median sample may be off.
    """
    links = links_of(case.metrics)
    if case.failed or not links:
        return [case]
    key = without(case.key, ["round"])
    cases = []
    spreads = case.metrics.get("links_spread") or [None] * len(links)
    for link, spread in zip(links, spreads, strict=True):
        bandwidths = {
            f"{link.a} -> {link.b}": link.there,
            f"{link.b} -> {link.a}": link.back,
            f"{link.a} <-> {link.b}": link.both,
        }
        costs = {f"{link.a} - {link.b} latency": {"latency_s": link.latency_us * 1e-6}}
        for way, rate in bandwidths.items():
            if rate is not None:
                costs[way] = {"bandwidth_gb_per_s": rate}
        for way, cost in costs.items():
            metrics = cost | {"spread": spread}
            of_link: dict[str, Any] = {"ranks": [], "metrics": metrics, "part": case.part}
            cases.append(Case(key={"link": way} | key, name=way, **of_link))
    return cases
