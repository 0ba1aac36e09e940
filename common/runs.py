"""Reports as runs: what a comparison needs of each, and nothing more.

Reads this project's reports, and those of PyTorch's own benchmarks/distributed/ddp/benchmark.py.
"""

import ctypes
import functools
import glob
import hashlib
import json
import multiprocessing
import os
import signal
import stat
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common import cli
from common.results import are_seconds, check_document, read_json

MAX_BYTES = 2**29  # 6.4 million samples, as of 1,000 cases on 64 ranks, have 75 MB
LARGE_BYTES = 2**24  # reading so much JSON takes half a second
SHORTEST_S = 1e-12  # what takes less was not timed
TORCH_DDP = "PyTorch's DDP benchmark"
# Which of a case's samples are compared, where it is not the first kind.
MEASURES = {"batch_update_ps": "update"}
# Rows of these are callers or links that go their own way: their i-th samples are not at the same
# time, and the slowest row counts instead of the slowest of each iteration.
UNALIGNED = ("rpc_latency", "batch_update_ps", "p2p_matrix")
CAMPAIGN = "campaign.json"  # in a folder of ab.py's: how its reports came about
MAX_LINKS = 5000  # of one case: 100 ranks have so many pairs; beyond, a kind has its median


@dataclass(frozen=True)
class RunCase:
    """One case of one run."""

    key: dict[str, Any]
    label: str
    measure: str  # what was timed: the name of the samples, or of the metric
    value_s: float | None  # the run's time: its median; None where there is none
    times_s: NDArray[np.float64] | None  # [iterations], where samples were kept
    check: str  # passed, failed: ... or skipped: ...; or why there is no time
    rounds: tuple[int, ...] = ()  # how many of times_s each block has, where that is known


@dataclass(frozen=True)
class Run:
    """One report."""

    path: str
    benchmark: str
    status: str
    environment: dict[str, Any]
    started_at: str
    cases: dict[str, RunCase]  # by the canonical JSON of the key
    digest: str  # equal for two copies of one run


def canonical(key: dict[str, Any]) -> str:
    """The key as text, equal for equal keys."""
    return json.dumps(key, sort_keys=True)


def find_reports(words: Sequence[str]) -> list[str]:
    """The files that paths, folders and patterns name; each once, a folder's *.json sorted.

    Raises ValueError where a word names none.
    """
    paths: list[str] = []
    for word in words:
        if os.path.isdir(word):
            try:
                inside = [path for path in Path(word).iterdir() if is_report_name(path.name)]
            except OSError as error:
                raise ValueError(f"{word}: {error.strerror}") from None
            found = sorted(str(path) for path in inside if os.path.isfile(path))
            if not found:
                raise ValueError(f"there is no *.json in the folder {word}")
        elif not os.path.lexists(word) and glob.has_magic(word):
            found = sorted(glob.glob(word))  # noqa: PTH207 - Path.glob refuses absolute patterns
            if not found:
                raise ValueError(f"no file matches {word}")
        else:
            found = [word]
        paths += found
    return list(dict.fromkeys(paths))


def is_report_name(name: str) -> bool:
    """Whether a file of this name in a folder is taken for a report."""
    return name.endswith(".json") and not name.startswith(".") and name != CAMPAIGN


def identity(path: str) -> tuple[int, int]:
    """What two names of one file have in common. Raises ValueError where there is no file."""
    about = _stat(path)
    return about.st_dev, about.st_ino


def _stat(path: str) -> os.stat_result:
    try:
        return Path(path).stat()
    except (OSError, ValueError) as error:  # ValueError: a zero byte
        raise ValueError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def load_run(
    path: str,
    measure: str | None = None,
    max_bytes: int = MAX_BYTES,
    ignore: Sequence[str] = (),
) -> Run:
    """The report at `path` as a run.

    measure: the samples or the metric to take instead of the first. ignore: fields of the cases'
    keys by which they are not told apart. Raises ValueError with one line that starts with the
    path.
    """
    _check_size(path, max_bytes)
    document = read_json(path, max_bytes)
    if isinstance(document, dict) and "schema" not in document and "benchmark_results" in document:
        if measure is not None:
            raise ValueError(f"{path}, which as a report of {TORCH_DDP} has no '{measure}'")
        return _without(_torch_run(document, path), ignore)
    report = check_document(document, path)
    if measure is not None:
        _check_measure(measure, report["cases"], path)
    cases: dict[str, RunCase] = {}
    for case in report["cases"]:
        for part in _split_links(case) if report["benchmark"] == "p2p_matrix" else [case]:
            name = canonical(part["key"])
            if name in cases:
                raise ValueError(f"{path}, which has two cases of the key {name[:200]}")
            cases[name] = _reduce(part, report["benchmark"], measure)
    return _without(_finish(path, report, cases), ignore)


def load_runs(
    paths: Sequence[str],
    measure: str | None = None,
    max_bytes: int = MAX_BYTES,
    ignore: Sequence[str] = (),
) -> list[Run]:
    """load_run of each; where there are large ones, two at a time: reading JSON fills one core."""
    load = functools.partial(load_run, measure=measure, max_bytes=max_bytes, ignore=ignore)
    files = [path for path in paths if os.path.isfile(path)]
    large = [path for path in files if _stat(path).st_size > LARGE_BYTES]
    if len(large) < 2:
        return [load(path) for path in paths]
    fork = multiprocessing.get_context("fork")
    try:
        with ProcessPoolExecutor(2, fork, _start_reader, (os.getpid(),)) as pool:
            return list(pool.map(load, paths))
    except BrokenProcessPool:
        raise ValueError(
            f"{large[0]}, or a report after it: the process that read it was killed, as happens "
            "where memory is short"
        ) from None


def _start_reader(parent: int) -> None:
    """In a process that reads for `parent`: Ctrl-C is for that one, and both end together."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(cli.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _without(run: Run, ignore: Sequence[str]) -> Run:
    """The run with these fields left out of the keys of its cases."""
    if not ignore:
        return run
    names = dict.fromkeys(name for case in run.cases.values() for name in case.key)
    for name in ignore:
        if run.cases and name not in names:
            hint = cli.suggest(name, names) or f"; they have {', '.join(names)}"
            raise ValueError(f"{run.path}, whose cases have no '{name}' in their keys{hint}")
    cases: dict[str, RunCase] = {}
    for case in run.cases.values():
        key = {name: value for name, value in case.key.items() if name not in ignore}
        if canonical(key) in cases:
            raise ValueError(
                f"{run.path}, in which several cases differ in {', '.join(ignore)} alone, e.g. "
                f"{case.label}; leave that out of --ignore-key, or measure one of them a report"
            )
        cases[canonical(key)] = replace(case, key=key)
    return replace(run, cases=cases)


def _check_measure(measure: str, cases: list[dict[str, Any]], path: str) -> None:
    names: dict[str, None] = {}
    for case in cases:
        others = case.get("other_samples_s")
        names |= dict.fromkeys(others if isinstance(others, dict) else [])
        names |= dict.fromkeys(filter(_is_time, case["metrics"]))
    if measure not in names:
        hint = cli.suggest(measure, names) or f"; it has {', '.join(names) or 'none'}"
        raise ValueError(f"{path}, in which no case has the time '{measure}'{hint}")


def _is_time(name: str) -> bool:
    """Whether a metric of this name is in seconds, or so many a second."""
    return name == "rate" or name.endswith("_s")


def _check_size(path: str, max_bytes: int) -> None:
    about = _stat(path)
    if stat.S_ISDIR(about.st_mode):
        raise ValueError(f"{path}, which is a folder; give its reports, e.g. {path}/*.json")
    if not (stat.S_ISREG(about.st_mode) or stat.S_ISFIFO(about.st_mode)):
        raise ValueError(f"{path}, which is not a file")
    if about.st_size > max_bytes:
        raise ValueError(
            f"{path}, which has {about.st_size / 1e6:.3g} MB, over the limit of "
            f"{max_bytes / 1e6:.3g} MB, and may need six times as much memory; read it all the "
            f"same with --max-size {-(-about.st_size // 2**30)}G"
        )


def _finish(path: str, report: dict[str, Any], cases: dict[str, RunCase]) -> Run:
    content = [
        report["benchmark"],
        report["started_at"],
        *((name, case.value_s, case.check) for name, case in sorted(cases.items())),
    ]
    return Run(
        path,
        report["benchmark"],
        report["status"],
        report["environment"],
        report["started_at"],
        cases,
        hashlib.blake2b(repr(content).encode(errors="replace"), digest_size=16).hexdigest(),
    )


# -- one case --------------------------------------------------------------------------------------


def _reduce(case: dict[str, Any], benchmark: str, measure: str | None) -> RunCase:
    label = case.get("label")
    if not isinstance(label, str) or not label:
        label = ", ".join(f"{name} {value}" for name, value in case["key"].items())
    check: str = case["check"]
    if check.startswith("failed"):
        return RunCase(case["key"], label, "", None, None, check)
    name, rows = _samples(case, measure or MEASURES.get(benchmark), measure is not None)
    value: float | None
    if rows is not None:
        value, times = _slowest(rows, benchmark in UNALIGNED)
    else:
        times = None
        name, value = _time_metric(case["metrics"], measure)
    if value is not None and value >= SHORTEST_S:
        return RunCase(case["key"], label, name, value, times, check, _rounds(case, times))
    if check == "passed":
        check = f"passed, but without {f'the time {measure!r}' if measure else 'a time'}"
    return RunCase(case["key"], label, name, None, None, check)


def _rounds(case: dict[str, Any], times: NDArray[np.float64] | None) -> tuple[int, ...]:
    rounds = case.get("rounds")
    if not isinstance(rounds, list) or not all(type(n) is int and n > 0 for n in rounds):
        return ()
    return tuple(rounds) if times is not None and sum(rounds) == len(times) else ()


def _samples(
    case: dict[str, Any], name: str | None, strict: bool
) -> tuple[str, NDArray[np.float64] | None]:
    """The samples of this name as [rows, iterations], else the case's first kind of samples."""
    others = case.get("other_samples_s")
    if name is not None and isinstance(others, dict) and name in others:
        return name, _rows(others[name])
    if strict:
        return "", None
    return "samples", _rows(case["samples_s"])


def _rows(rows: Any) -> NDArray[np.float64] | None:
    try:
        x = np.asarray(rows, dtype=np.float64)
    except (ValueError, TypeError, OverflowError):
        return None
    good = x.ndim == 2 and x.size > 0 and bool(np.all((x >= 0) & (x < 1e9)))
    return x if good else None


def _slowest(rows: NDArray[np.float64], unaligned: bool) -> tuple[float, NDArray[np.float64]]:
    """A run's median, and the times that it is the median of. rows: [ranks, iterations]."""
    if unaligned:
        medians = np.median(rows, axis=1)
        worst = int(np.argmax(medians))
        return float(medians[worst]), rows[worst].copy()
    times = rows.max(axis=0)
    return float(np.median(times)), times


def _time_metric(metrics: dict[str, Any], wanted: str | None) -> tuple[str, float | None]:
    """The metric that says how long the case took: a name, and seconds.

    Of several the first median counts, else the first other time. A rate counts as the time of
    one. wanted: this one instead.
    """
    numbers = {
        name: float(value)
        for name, value in metrics.items()
        if _is_time(name) and type(value) in (int, float) and 0 < value < 1e12
    }
    if wanted is not None:
        names = [name for name in numbers if name == wanted]
    else:
        names = [
            name
            for end in ("_p50_s", "time_s", "_s", "rate")
            for name in numbers
            if name.endswith(end)
        ]
        names.sort(key=_is_rate)
    if not names:
        return "", None
    name = names[0]
    return (f"1 / {name}", 1 / numbers[name]) if _is_rate(name) else (name, numbers[name])


def _is_rate(name: str) -> bool:
    return name == "rate" or name.endswith("_per_s")


def _split_links(case: dict[str, Any]) -> list[dict[str, Any]]:
    """A round of p2p_matrix as four cases a link, or four of their medians where too many.

    A link has its latency, and the seconds that 1 GB takes: either way, and both at once.
    """
    links = case["metrics"].get("links")
    if not isinstance(links, list) or case["check"] != "passed":
        return [case]
    found: dict[tuple[str, str], list[float]] = {}
    for link in links:
        if not isinstance(link, list) or len(link) != 6:
            return [case]
        a, b, latency_us, *rates = link
        if not all(type(x) in (int, float) and 0 < x < 1e12 for x in (latency_us, *rates)):
            continue
        alone = len(links) <= MAX_LINKS
        names = [f"{a} - {b} latency", f"{a} -> {b}", f"{b} -> {a}", f"{a} <-> {b}"]
        kinds = ["latency", "there", "back", "both"]
        times = [latency_us / 1e6, *(1 / rate for rate in rates)]
        for name, kind, seconds in zip(names, kinds, times, strict=True):
            found.setdefault((name if alone else f"links, {kind}", kind), []).append(seconds)
    together = {} if len(links) <= MAX_LINKS else {"round": case["key"].get("round")}
    own = {name: value for name, value in case["key"].items() if name != "round"} | together
    return [
        {
            "key": own | {"link": name},
            "label": name if kind == "latency" else f"{name}, 1 GB",
            "samples_s": [],
            "metrics": {
                "latency_s" if kind == "latency" else "gigabyte_s": float(np.median(seconds))
            },
            "check": case["check"],
        }
        for (name, kind), seconds in found.items()
    ]


# -- PyTorch's own ---------------------------------------------------------------------------------


def _torch_run(document: dict[str, Any], path: str) -> Run:
    """A report of PyTorch's benchmarks/distributed/ddp/benchmark.py."""

    def expect(good: bool, at: str, expected: str, got: Any) -> None:
        if not good:
            raise ValueError(
                f"{path}, which is not a report of PyTorch's DDP benchmark: at {at}: expected "
                f"{expected}, got {str(got)[:80]!r}"
            )

    cases: dict[str, RunCase] = {}
    world_size = 0
    models = document["benchmark_results"]
    expect(isinstance(models, list), "benchmark_results", "a list", models)
    for i, entry in enumerate(models):
        at = f"benchmark_results[{i}]"
        good = isinstance(entry, dict) and isinstance(entry.get("result"), list)
        expect(good, at, "model, batch_size and result", entry)
        seen: list[list[int]] = []
        for j, result in enumerate(entry["result"]):
            place = f"{at}.result[{j}]"
            ranks = result.get("ranks") if isinstance(result, dict) else None
            good = isinstance(ranks, list) and all(type(rank) is int for rank in ranks)
            expect(good and bool(ranks), f"{place}.ranks", "ranks", ranks)
            times = result.get("measurements")
            good = isinstance(times, list) and are_seconds(times)
            expect(good, f"{place}.measurements", "seconds", times)
            assert isinstance(ranks, list)
            assert isinstance(times, list)
            even = len(times) % len(ranks) == 0
            expect(even, f"{place}.measurements", f"as many for each of {len(ranks)}", len(times))
            # that program measures one rank twice: first without DDP, then with it
            case = _torch_case(document, entry, ranks, seen.count(ranks), times)
            expect(canonical(case.key) not in cases, place, "a model once", entry.get("model"))
            cases[canonical(case.key)] = case
            seen.append(ranks)
            world_size = max(world_size, len(ranks))
    report = {
        "benchmark": TORCH_DDP,
        "status": "complete",
        "started_at": "",
        "environment": {
            "torch": document.get("pytorch_version"),
            "cuda": document.get("cuda_version"),
            "world_size": world_size,
        },
    }
    return _finish(path, report, cases)


def _torch_case(
    document: dict[str, Any],
    entry: dict[str, Any],
    ranks: list[int],
    earlier: int,
    times: list[float],
) -> RunCase:
    """One result. times: those of the first rank, then those of the second, ...; earlier: how many
    results of the same ranks there were before."""
    key = {"model": entry.get("model"), "batch_size": entry.get("batch_size"), "ranks": ranks}
    key |= {"number": earlier, "distributed_backend": document.get("distributed_backend")}
    key |= {"bucket_size": document.get("bucket_size")}
    name = f"{len(ranks)} rank{'s' if len(ranks) > 1 else ''}"
    if len(ranks) == 1 and earlier == 0:
        name = "no ddp"
    label = f"{key['model']} {name}, batch size {key['batch_size']}"
    if not times:
        return RunCase(key, label, "measurements", None, None, "passed, but without a time")
    value, slowest = _slowest(np.asarray(times, np.float64).reshape(len(ranks), -1), False)
    if value < SHORTEST_S:
        return RunCase(key, label, "measurements", None, None, "passed, but its time is 0")
    return RunCase(key, label, "measurements", value, slowest, "passed")
