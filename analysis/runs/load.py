"""Read reports as rows, for the scripts in this folder and for notebooks.

    from analysis.runs.load import frame, load
    table = frame(load(["results/", "more/*.jsonl"]))       # a pandas DataFrame, one row per case
    table.pivot_table("step_s", "case", "run")              # its interval: step_s_low, step_s_high

Besides reports of this project, it reads those of PyTorch's DDP benchmark and, through
nccl_tests.py, those of nccl-tests and rccl-tests.
"""

import glob
import hashlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from analysis.logs import nccl_tests
from analysis.show import DAMAGE, canonical, clean, is_number, unit_of
from common.stats import MIN_ROUNDS, Estimate, iteration_times, mean_of_blocks, median
from harness import report as report_file
from harness.cli import suggest
from harness.report import Case, Report
from readers import files

if TYPE_CHECKING:
    import pandas as pd

# Estimators of the time of a run
BY_ROUNDS = "geometric mean over rounds of block medians"
BY_ITERATIONS, BY_SCRIPT = "median over iterations", "the metric in the report"
STEP = "step"  # the name of the main step among the samples of a case
RATES = ("1/s", "GB/s", "MB/s")
ENDINGS = (".json", ".jsonl")  # reports in a folder
LAST_DIGIT = "last_digit_share"  # a metric of logs: one unit in the last digit / the number
MEAN = "step_mean_s"  # a metric of logs: the mean time of a step
LEADING = "leading_steps"  # a metric of logs: slow steps at the beginning, which were left out,
LATER = "slow_steps_after_restarts"  # and those after restarts
LOAD_ENDING = ".load"  # file with the load during a run, next to its report
MAX_SEEN = 200_000  # files of any kind in a folder with reports or logs
MAX_FOREIGN_BYTES = 2**28  # of a report of another program, which is read as a whole
NEVER = datetime.min.replace(tzinfo=UTC)  # the start of a run without one
DECIMALS = 9  # of seconds, in reports that store all digits
SHORTEST_S, LONGEST_S = 1e-12, 1e9  # plausible times of a case
Value = str | float | Estimate  # an estimated number has an interval
PYTORCH = "PyTorch's DDP benchmark"
# The settings of PyTorch's DDP benchmark, as ddp_sweep.py writes them in its keys. Fields that only
# ddp_sweep.py has in its keys are ignored.
PYTORCH_KEY = {
    "dtype": "default",  # the benchmark sets no precision, so torch's defaults apply
    "device": "cuda",
    "image_size": 224,
    "find_unused_parameters": False,
    "global_batch": None,
    "accumulate": 1,
    "gradient_as_bucket_view": False,
    "static_graph": False,
}
OF_CASES = ("model", "batch_size", "ranks", "ddp", "backend", "bucket_size_mb", "comm_hook")
IN_PYTORCH = {*PYTORCH_KEY, *OF_CASES}


@dataclass(kw_only=True)
class Row(Case):
    """One case of one run, without its samples.

    label: the name of the case, or `table: name` if several tables of a run have a case of that
    name. measure: the step or metric from which the time is taken. time_s: the time of the case in
    this run; 0 if there is none. time_is: the estimator. times_s: seconds of each iteration.
    last_digits: for numbers that were printed with few digits, by metric, one unit in the last
    digit / the number. last_digit: that of the time; 0 if all digits are known.
    """

    label: str = ""
    measure: str = ""
    time_s: float = 0.0
    time_is: str = ""
    times_s: Sequence[float] = ()
    last_digits: dict[str, float] = field(default_factory=dict)

    @property
    def last_digit(self) -> float:
        share = self.metrics.get(LAST_DIGIT)
        if is_number(share):
            return share
        return self.last_digits.get(self.measure.removeprefix("1 / "), 0.0)


@dataclass
class Run(Report):
    """One report.

    rows: its cases by canonical key. label: its path, or its name on a page. left_out: removed
    fields of the keys -> their values. digest: a hash of the file's bytes, with the position of the
    report in the file. loads: for each node, the cores used by other processes and the number of
    cores; empty if not recorded. synchronized: the program waits for the device in each iteration.
    remarks: lines about the file, for the user. span: the first and the last date and time in the
    lines of a log, as text.
    """

    rows: dict[str, Row] = field(default_factory=dict)
    label: str = ""
    left_out: dict[str, list[Any]] = field(default_factory=dict)
    digest: str = ""
    loads: list[tuple[float, int]] = field(default_factory=list)
    synchronized: bool = False
    remarks: list[str] = field(default_factory=list)
    span: tuple[str, str] | None = None

    @property
    def resumed(self) -> str:
        """Which runs measured the cases, if several did: `2 cases were measured 2026-11-28 03:12
        UTC on node1, 3 2026-11-28 07:30 UTC on node2`; "" if one did."""
        runs: dict[str, list[Row]] = {}
        for row in self.rows.values():
            runs.setdefault(row.measured_at, []).append(row)
        if len(runs) < 2:
            return ""
        first, *others = (runs[start] for start in sorted(runs))
        text = f"{len(first)} {'case was' if len(first) == 1 else 'cases were'} measured"
        return ", ".join(
            [f"{text} {first[0].measured}", *(f"{len(run)} {run[0].measured}" for run in others)]
        )


class NotAReportError(ValueError):
    """A file of another program. content: its bytes."""

    def __init__(self, message: str, content: bytes) -> None:
        super().__init__(message)
        self.content = content


def load(
    words: Sequence[str],
    measure: str | None = None,
    ignore: Sequence[str] = (),
    join_foreign: bool = False,
) -> list[Run]:
    """Load reports from files, folders and glob patterns, sorted by start time.

    measure: the step, time or rate to use instead of the main step of each case. ignore: fields to
    remove from the keys. join_foreign: join cases of PyTorch's DDP benchmark with those of
    ddp_sweep.py, and cases of nccl-tests with those of collectives.py. Raises ValueError with a
    message of one line.
    """
    runs = [run for path in find(words) for run in read(path, measure)]
    arrange(runs, ignore, join_foreign)
    return runs


def arrange(runs: list[Run], ignore: Sequence[str] = (), join_foreign: bool = False) -> None:
    """Sort runs by start time, and set the keys and labels of their cases; see `load`."""
    runs.sort(key=lambda run: (instant(run.started_at) or NEVER, run.started_at))
    if join_foreign:
        join_programs(runs)
    remove_fields(runs, ignore)
    for same in by_benchmark(runs).values():
        set_labels(same)


def instant(text: object) -> datetime | None:
    """Return an instant in ISO 8601, in UTC unless it states another zone; None if it is not."""
    try:
        found = datetime.fromisoformat(text if isinstance(text, str) else "")
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def copies(runs: Sequence[Run]) -> list[Run]:
    """Copies of the runs, which `arrange` can change without affecting the originals. The samples
    are shared."""
    return [
        replace(run, rows={form: replace(row) for form, row in run.rows.items()}) for run in runs
    ]


def set_labels(runs: Sequence[Run]) -> None:
    """Set the label of each case."""
    shared = set()
    for run in runs:
        tables: dict[str, set[str]] = {}
        for row in run.rows.values():
            tables.setdefault(row.name, set()).add(row.table)
        shared |= {name for name, its_tables in tables.items() if len(its_tables) > 1}
    for row in rows_of(runs):
        row.label = f"{row.table}: {row.name}" if row.name in shared else row.name


def find(words: Sequence[str], endings: Sequence[str] = ENDINGS) -> list[str]:
    """The files that the words name. endings: suffixes of the files to read from a folder.

    Raises ValueError if a file is named twice.
    """
    paths = [path for word in words for path in paths_of(word, endings)]
    path_of_file: dict[str, str] = {}
    for path in paths:
        check_kind(path)
        file = os.path.realpath(path)
        if file in path_of_file:
            raise ValueError(f"{path} is the same file as {path_of_file[file]}; give it once")
        path_of_file[file] = path
    return paths


def paths_of(word: str, endings: Sequence[str]) -> list[str]:
    """A file, the reports or logs in a folder and its subfolders, or the matches of a pattern."""
    if os.path.isdir(word):
        paths = files_below(word, endings)
        if not paths:
            kind = "report (*.jsonl)" if endings == ENDINGS else f"file *{', *'.join(endings)}"
            raise ValueError(f"there is no {kind} in {word}")
        return sorted(paths)
    if os.path.lexists(word):  # a name may contain the characters of a pattern, e.g. ab[1]
        return [word]
    return sorted(glob.glob(word)) or [word]


def files_below(folder: str, endings: Sequence[str]) -> list[str]:
    """The regular files with these suffixes in a folder and its subfolders. Raises ValueError if
    there are so many files that the folder cannot be meant."""
    paths, count = list[str](), 0
    for place, _, names in os.walk(folder):
        found = [os.path.join(place, name) for name in names if Path(name).suffix in endings]
        paths += filter(os.path.isfile, found)
        count += len(names)
        for limit, number in ((files.MAX_FILES, len(paths)), (MAX_SEEN, count)):
            if number > limit:
                what = "reports or logs" if limit == files.MAX_FILES else "files"
                raise ValueError(f"{folder} has more than {limit:,} {what}; name those to read")
    files.check_total(folder, [*map(Path, paths)])
    return paths


def check_kind(path: str) -> None:
    """Raise ValueError if a path is a device, or a pipe that this process did not inherit: opening
    it could block. `<(...)` of a shell is an open pipe."""
    kind = files.kind_of(path)
    is_inherited = kind == "a pipe" and path.startswith(("/dev/fd/", "/dev/stdin", "/proc/"))
    if kind and not is_inherited:
        raise ValueError(f"{path}: expected a report or a log, got {kind}")


def remove_fields(runs: Sequence[Run], names: Sequence[str]) -> None:
    """Remove these fields from all keys. Raises ValueError if no case has such a field."""
    known: dict[str, None] = {}
    for row in rows_of(runs):
        known |= dict.fromkeys(row.key)
    for name in names:
        if known and name not in known:
            what = f"no case has a key field '{name}'; the fields are {', '.join(known)}"
            raise ValueError(what + suggest(name, known))
    for run in runs if names else ():
        rows = list(run.rows.values())
        for name in names:
            values = [str(row.key[name]) for row in rows if name in row.key]
            run.left_out[name] = list(dict.fromkeys(values))
        for row in rows:
            row.key = without(row.key, names)
        index(run, rows, f"several cases differ only in {', '.join(names)}")


def without(key: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in key.items() if name not in names}


def index(run: Run, rows: Sequence[Row], problem: str) -> None:
    """Store the rows of a run by their keys. Raises ValueError if two rows have the same key."""
    run.rows = {}
    for row in rows:
        form = canonical(row.key)
        if form in run.rows:
            raise ValueError(f"{run.label}: {problem}, e.g. {form}; use one report for each")
        run.rows[form] = row


def join_programs(runs: Sequence[Run]) -> None:
    """Give equal cases of different programs the same key and the same kind of time.

    Nothing changes unless the reports of both programs are among the runs.
    """
    benchmarks = {run.benchmark for run in runs}
    for run in runs:
        rows = list(run.rows.values())
        if {PYTORCH, "ddp_sweep"} <= benchmarks:
            if run.benchmark == PYTORCH:
                run.benchmark, run.synchronized = "ddp_sweep", True
                for row in rows:
                    row.key = key_of_ddp_sweep(row)
            elif run.benchmark == "ddp_sweep":
                for row in rows:
                    row.key = {name: row.key[name] for name in row.key if name in IN_PYTORCH}
        if {nccl_tests.NCCL_TESTS, "collectives"} <= benchmarks and run.benchmark == "collectives":
            run.benchmark = nccl_tests.NCCL_TESTS
            for row in rows:
                row.key = nccl_tests.key_of_nccl_tests(row.key)
                if row.measure == STEP and is_time(nccl_tests.TIME, row.metrics):
                    row.measure, row.times_s = nccl_tests.TIME, ()  # both tables show it
                    row.time_is = BY_SCRIPT
                    row.time_s = number_of(row.metrics[nccl_tests.TIME]) or 0
        index(run, rows, f"several cases have the same key as cases of {run.benchmark}")


def read(path: str, measure: str | None) -> list[Run]:
    """The reports in a file as runs; see `load`. A log may contain several."""
    times: dict[str, None] = {}  # valid names for --measure

    def shrink(report: Report, case: Case) -> None:
        """Of all samples, keep only the time of each iteration of one step."""
        times.update(dict.fromkeys(case.samples_s))
        its_own = STEP if STEP in case.samples_s else next(iter(case.samples_s), "")
        step = measure or its_own
        rows = case.samples_s.get(step, [])  # [ranks, iterations]
        kinds = {type(sample) for row in rows for sample in row}
        if not kinds <= {int, float}:
            names = ", ".join(sorted(kind.__name__ for kind in kinds - {int, float}))
            what = f"expected seconds as numbers in the samples of case {clean(case.name)!r}"
            raise ValueError(f"{path}: {what}, got {names}; e.g. 0.125")
        samples = np.asarray(rows, dtype=np.float64)
        check_times(samples, path, case.name)
        case.samples_s = {}
        if samples.size:
            case.samples_s[step] = [iteration_times(samples, case.aligned).tolist()]

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
        run.loads = loads_of(report, path)
        runs.append(run)
        cases = itertools.chain(*map(split_links, report.cases))
        index(run, [timed(case, measure) for case in cases], "several cases have the same key")
        for row in run.rows.values():
            check_times(row.time_s, path, row.name)
    rows = rows_of(runs)
    if measure and rows and not any(row.measure for row in rows):
        for row in rows:
            if not row.failed:
                times |= dict.fromkeys(name for name in row.metrics if is_time(name, row.metrics))
        why = f"{path}: no case has a step, a time or a rate above 0 named '{measure}'"
        why += f"; the names are {', '.join(times) or 'none'}{suggest(measure, times)}"
        raise ValueError(why)
    return runs


def check_times(times_s: Any, path: str, name: str) -> None:
    """Raise ValueError for an impossible time, because ratios of such times mean nothing.

    times_s: a number or an array, in seconds; 0 for a missing time.
    """
    times_s = np.asarray(times_s)
    if not ((times_s == 0) | ((times_s >= SHORTEST_S) & (times_s <= LONGEST_S))).all():
        limits = f"{SHORTEST_S:g} to {LONGEST_S:g} s"
        raise ValueError(f"{path}: case {clean(name)!r} has a time outside of {limits}")


def parse(
    path: str, file: IO[bytes], each: Callable[[Report, Case], None], content: Any
) -> list[Report]:
    """The reports in an open file. The file is read once, since it may be a pipe.

    each: called with every case as soon as it is read. content: a hash, updated with all bytes of
    the file.
    """

    def hashed(lines: Iterable[bytes]) -> Iterator[bytes]:
        for line in lines:
            content.update(line)
            yield line

    first = file.readline(MAX_FOREIGN_BYTES)
    if not first or b'"schema"' in first[:4096]:
        lines = hashed(itertools.chain([first], file))
        return [report_file.load(path, each, lines=lines)]
    text = first + file.read(MAX_FOREIGN_BYTES)
    if len(text) >= MAX_FOREIGN_BYTES:
        what = f"{path} is not a report, and has more than {MAX_FOREIGN_BYTES:,} bytes"
        raise NotAReportError(what, text)
    content.update(text)
    reports = foreign_reports(text, path)
    if not reports:
        what = f"{path} is neither a report nor a log with a table of nccl-tests"
        raise NotAReportError(what, text)
    for report in reports:
        for case in report.cases:
            each(report, case)
    return reports


def loads_of(report: Report, path: str) -> list[tuple[float, int]]:
    """For each node, the cores used by other processes and the number of cores.

    The list is empty if the load was not recorded. In a resumed report, the load is that of the
    run with the busiest node, and is unknown if that of any run is: a run without a last line was
    interrupted.
    """
    starts = {case.measured_at or report.started_at for case in report.cases}
    if starts <= {report.started_at}:  # it was not resumed
        return loads_of_run(report, report.started_at) or loads_from_file(path)
    loads = [loads_of_run(report, start) for start in sorted(starts)]
    if not all(loads):
        return []
    return max(loads, key=lambda nodes: max(busy / cores for busy, cores in nodes), default=[])


def loads_of_run(report: Report, start: str) -> list[tuple[float, int]]:
    """The load of each node during one of the runs that measured a report; [] if unknown."""
    return loads_in(report.ends.get(start, {}).get("others"))


def loads_in(others: Any) -> list[tuple[float, int]]:
    """The load of each node from an entry `others` of a report; [] if it is missing or damaged."""
    rows = others if isinstance(others, list) else []
    pairs = [row for row in rows if isinstance(row, list) and len(row) == 2]
    return [(busy, cores) for busy, cores in pairs if is_number(busy) and cores and cores > 0]


def loads_from_file(path: str) -> list[tuple[float, int]]:
    """The load of each node from the file that ab.py writes next to a report: 01.load for
    01.jsonl."""
    load_path = os.path.splitext(path)[0] + LOAD_ENDING
    if not os.path.isfile(load_path):
        return []
    with open(load_path, "rb") as file:
        try:
            content = json.load(file)
        except ValueError:  # truncated: the load is unknown
            return []
    return loads_in(content.get("others")) if isinstance(content, dict) else []


def is_time(name: str, metrics: dict[str, Any]) -> bool:
    """Whether a metric is a time, or a rate from which a time can be computed."""
    known_unit = unit_of(name).name in ("s", *RATES)
    return known_unit and (number_of(metrics.get(name)) or 0) > 0


def number_of(value: Any) -> float | None:
    """A number, or the value of an estimate; None for anything else."""
    value = value.value if isinstance(value, Estimate) else value
    return value if is_number(value) else None


def timed(case: Case, measure: str | None) -> Row:
    """A case with its time.

    The time is `time_of_blocks`. Without samples, it is the metric named by `measure`, or else the
    first metric in seconds, or else the first rate r, which counts as the time 1 / r.
    """
    row = Row(**vars(case) | {"samples_s": {}, "name": case.name or canonical(case.key)})
    if row.failed:
        return row
    if case.samples_s:
        row.measure, (row.times_s,) = case.samples_s.popitem()  # `shrink` has kept only one
        row.time_s = time_of_blocks(row.times_s, row.rounds)
        has_blocks = has_rounds(row.times_s, row.rounds) and len(row.rounds) >= MIN_ROUNDS
        row.time_is = BY_ROUNDS if has_blocks else BY_ITERATIONS
        if row.time_s > 0:
            row.last_digits.setdefault(row.measure, resolution(row.times_s) / row.time_s)
        return row
    times_first = sorted(row.metrics, key=lambda name: unit_of(name).name != "s")
    for name in [measure] if measure else times_first:
        given = row.metrics.get(name)
        given = given.value if isinstance(given, Estimate) else given
        if isinstance(given, float) and math.isinf(given) and unit_of(name).name in ("s", *RATES):
            row.time_s = math.inf  # `check_times` refuses it
            break
        value = number_of(given)
        if value and is_time(name, row.metrics):
            is_rate = unit_of(name).name in RATES
            row.measure, row.time_is = f"1 / {name}" if is_rate else name, BY_SCRIPT
            row.time_s = 1 / value if is_rate else value
            row.last_digits.setdefault(name, resolution([value]) / value)
            break
    return row


def resolution(times_s: Sequence[float]) -> float:
    """One unit in the last digit of times in seconds; 0 if they have nanoseconds, as in reports of
    this project."""
    times = np.asarray(times_s)
    for decimals in range(DECIMALS):
        scaled = times * 10.0**decimals
        if np.all(np.abs(scaled - np.round(scaled)) <= np.minimum(1e-3, 1e-7 * scaled)):
            return 10.0**-decimals
    return 0.0


def time_of_blocks(
    times_s: Sequence[float], rounds: Sequence[int], blocks: int | None = None
) -> float:
    """The time of a run in seconds, from the times of its n iterations.

    It is `stats.mean_of_blocks`, or the median over iterations if the rounds are unknown (their sum
    is not n). blocks: use only this number of rounds, from the first one; None for all.
    """
    if not has_rounds(times_s, rounds):
        return float(np.median(times_s))
    kept = rounds[:blocks]
    return mean_of_blocks(times_s[: sum(kept)], kept)


def has_rounds(times_s: Sequence[float], rounds: Sequence[int]) -> bool:
    return 0 < sum(rounds) == len(times_s)


def by_benchmark(runs: Sequence[Run]) -> dict[str, list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.benchmark, []).append(run)
    return groups


def rows_of(runs: Sequence[Run]) -> list[Row]:
    return [row for run in runs for row in run.rows.values()]


def about(run: Run, row: Row) -> dict[str, Any]:
    """The columns that describe a case in a table. `n` is the number of iterations."""
    return {
        "run": run.label,
        "started_at": row.measured_at or run.started_at,
        "torch": run.environment.get("torch"),
        "host": ", ".join(map(str, row.hosts or run.environment.get("hosts") or [])),
        "benchmark": run.benchmark,
        "table": row.table,
        "case": row.label,
        "n": len(row.times_s) or None,
    }


def frame(runs: Sequence[Run]) -> "pd.DataFrame":
    """One row per case: its run, name, check and time, the fields of its key, and its metrics.

    An estimated metric `step_s` has its 95% interval in the columns `step_s_low` and
    `step_s_high`.
    """
    import pandas as pd  # not above: verdicts do not need it

    rows = []
    for run in runs:
        for row in run.rows.values():
            values: dict[str, Any] = {}
            for name, value in values_of(with_step_time(row)).items():
                values[name] = value
                if isinstance(value, Estimate):
                    ends = {f"{name}_low": value.low, f"{name}_high": value.high}
                    values |= {name: value.value} | ends
            time = {"check": row.check, "measure": row.measure, "time_s": row.time_s or None}
            rows.append(values | row.key | about(run, row) | time)
    return pd.DataFrame(rows)


def numbers(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One row per number of each case that did not fail, with its 95% interval."""
    rows = []
    for run in runs:
        for case in run.rows.values():
            for name, value in values_of({} if case.failed else with_step_time(case)).items():
                if not isinstance(value, str):
                    number = value if isinstance(value, Estimate) else Estimate(value)
                    values = {"metric": name} | vars(number)
                    rows.append(about(run, case) | {"key": case.key} | values)
    return rows


def with_step_time(row: Row) -> dict[str, Any]:
    """The metrics of a case, with the median of its step and the interval if none of them has it,
    as in the report of one's own training loop."""
    step = row.measure.replace(" ", "_")
    if row.failed or not len(row.times_s) or any(name.startswith(step) for name in row.metrics):
        return row.metrics
    time = median(row.times_s)
    numbers = [number_of(value) for value in row.metrics.values()]
    has_value = any(math.isclose(x, time.value) for x in numbers if x is not None)
    return row.metrics if has_value else {f"{step}_s": time} | row.metrics


def values_of(metrics: dict[str, Any]) -> dict[str, Value]:
    """The numbers, estimates and texts of a case, without lists and objects."""
    shown = {}
    for name, value in metrics.items():
        if name == LAST_DIGIT:  # it is in the interval of a comparison
            continue
        if isinstance(value, str) or number_of(value) is not None:
            shown[name] = value
    return shown


def split_links(case: Case) -> list[Case]:
    """A round of p2p_matrix.py as up to four cases per link; any other case unchanged.

    `spread` is the relative uncertainty of the median sample of a link.
    """
    links = case.metrics.get("links", [])
    if case.failed or not links:
        return [case]
    key = without(case.key, ["round"])
    cases = []
    spreads = case.metrics.get("links_spread") or [None] * len(links)
    for link, spread in zip(links, spreads, strict=True):
        for way, cost in costs_of_link(*link).items():
            metrics = cost | {"spread": spread}
            of_link: dict[str, Any] = {"ranks": [], "metrics": metrics}
            of_link |= {"measured_at": case.measured_at, "hosts": case.hosts}
            cases.append(Case(key={"link": way} | key, name=way, **of_link))
    return cases


def costs_of_link(
    a: int, b: int, latency_us: float, there: float | None, back: float | None, both: float
) -> dict[str, dict[str, float]]:
    """The metrics of the link between ranks a and b, by the name of their case.

    there, back: GB/s from a to b and from b to a; None if only both directions at once were
    measured. both: GB/s in both directions at once.
    """
    costs = {f"{a} - {b} latency": {"latency_s": latency_us * 1e-6}}
    for way, rate in {f"{a} -> {b}": there, f"{b} -> {a}": back, f"{a} <-> {b}": both}.items():
        if rate is not None:
            costs[way] = {"bandwidth_gb_per_s": rate}
    return costs


# -- reports of other programs ---------------------------------------------------------------------


def foreign_reports(content: bytes, path: str) -> list[Report]:
    """The reports of another program in the bytes of a file; an empty list for an unknown format.

    Raises ValueError with a message of one line if the file is damaged.
    """
    text = content.decode(errors="replace")
    tables = nccl_tests.table_reports(text, path)
    if tables:
        return tables
    try:
        document = parse_json(text)
        if isinstance(document, dict) and "benchmark_results" in document:
            return [pytorch_report(document, path)]
        return nccl_tests.json_reports(document, path)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        what = f"{path} looks like a report of another program, but does not have its format"
        raise ValueError(f"{what}: {type(error).__name__} {str(error)[:80]}") from None


def parse_json(text: str) -> Any:
    """A JSON document, or the list of documents in JSON lines; None if the text is neither."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError):
        return None


def pytorch_report(document: dict[str, Any], path: str) -> Report:
    """A report of PyTorch's benchmarks/distributed/ddp/benchmark.py.

    The benchmark measures one rank twice, first without DDP. `measurements` lists the times of the
    first rank, then those of the second, and so on.
    """
    report = Report(PYTORCH, {}, path, argv=[], started_at="", status="complete")
    fixed = {name: document.get(name) for name in ("distributed_backend", "bucket_size")}
    for entry in document["benchmark_results"]:
        about = {"model": entry["model"], "batch_size": entry["batch_size"]}
        table = f"{about['model']}, batch size {about['batch_size']}"
        for i, result in enumerate(entry["result"]):
            ranks = result["ranks"]
            count, is_wrapped = len(ranks), i > 0 or len(ranks) > 1
            key = about | {"ranks": count, "ddp": is_wrapped} | fixed
            name = f"{count} rank{'s' if count > 1 else ''}" if is_wrapped else "no ddp"
            samples = np.reshape(result["measurements"], (count, -1))
            case = Case(key=key, name=name, table=table, ranks=ranks)
            case.samples_s = {"step": samples.tolist()}
            case.metrics = {"step_s": median(samples.max(axis=0))}
            report.cases.append(case)
    report.environment = {
        "torch": document.get("pytorch_version"),
        "cuda": document.get("cuda_version"),
        "world_size": max(len(case.ranks) for case in report.cases),
    }
    return report


def key_of_ddp_sweep(case: Case) -> dict[str, Any]:
    """The key of ddp_sweep.py for a case of PyTorch's DDP benchmark."""
    ours = {name: case.key[name] for name in ("model", "batch_size", "ranks", "ddp")}
    ours |= PYTORCH_KEY | {"backend": case.key["distributed_backend"]}
    if not case.key["ddp"]:
        return ours | {"bucket_size_mb": None, "comm_hook": None}
    size = case.key["bucket_size"]  # an integer in MiB, where ddp_sweep.py writes a float
    return ours | {"bucket_size_mb": float(size) if is_number(size) else size, "comm_hook": "none"}
