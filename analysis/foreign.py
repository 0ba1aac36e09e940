"""Reports of other programs, as people have them.

- PyTorch's benchmarks/distributed/ddp/benchmark.py: JSON
- nccl-tests: `-J` (its src/util.cu, versions 1 to 3)
- rccl-tests: `-x FILE -Z json`, an object a line or a list of them
- both of these: the table on the terminal

Launchers put names, times and colours before each line of a log, and NCCL writes lines of its own
between them, or into them. So a line is known by what stands in it, wherever that begins.
"""

import contextlib
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from analysis.show import canonical, is_number
from common.cli import show_size
from common.report import Case, Estimate, Report
from common.stats import median

PYTORCH = "PyTorch's DDP benchmark"
NOT_IN_PYTORCH = ("world_size", "breakdown")  # fields of ddp_sweep.py's keys
# What its cases are in the words of ddp_sweep.py's keys.
PYTORCH_KEY = {
    "dtype": "default",  # it sets no precision, so it has torch's own
    "device": "cuda",
    "image_size": 224,
    "find_unused_parameters": False,
    "global_batch": None,
    "gradient_as_bucket_view": False,
    "static_graph": False,
}

Result = dict[str, Any]  # a row of a table in the words of -J
NCCL_TESTS = "nccl-tests"
PLACES = ("out_of_place", "in_place")
TIME = "out_of_place_time_s"  # the metric that a case is about
KNOWN = (  # a name that another one holds comes after it
    *("all_reduce", "all_gather", "reduce_scatter", "alltoallv", "alltoall", "broadcast"),
    *("reduce", "gather", "scatter", "sendrecv", "hypercube"),
)
BY_LETTERS = {name.replace("_", ""): name for name in KNOWN}  # AllReduce, all_reduce: allreduce
TYPES = {"float16": "half", "float32": "float", "float64": "double"}  # ours -> theirs
COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
HEADER = re.compile(r"\bsize\s+count\s+type\s+redop\s+root\s.*time\b.*\bbusbw\b.*")
# Size, count and type. Rows of 0 bytes measure nothing.
ROW = re.compile(
    r"(?<![\w.+/-])([1-9]\d{0,17}\s+[1-9]\d*\s+(?:u?int|u?char|half|b?float|double|fp?8)\w*\s.*)"
)
RANK = re.compile(r"\bRank\s+(\d+)\s.*\bon\s+(\S+)\s+device\s+\d+(?:\s+\[\S+\]\s+(.+))?")
END = "Avg bus bandwidth"
# all_reduce_perf, all_reduce_perf_mpi; no folder of that name
PROGRAM = re.compile(r"\b([a-z_]+)_perf(?![a-z]|[\w.-]*/)")
# Fields of the environment, and the lines that tell them.
VERSIONS = {
    "nccl": re.compile(r"(?:\b[NR]CCL version |nccl-library=)[: ]*(\d\S*)"),
    "nccl_tests": re.compile(r"\b(?:nccl-tests version|rccl-tests: Version) (\S+)"),
}


def read(content: bytes, path: str) -> list[Report]:
    """The reports of another program in `content`, of the file at `path`; none if it is no such."""
    text = content.decode(errors="replace")
    tables = table_reports(text, path)
    if tables:
        return tables
    try:
        return json_reports(parse_json(text), path)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        what = f"{path} looks like a report of another program, but does not fit"
        raise ValueError(f"{what}: {type(error).__name__} {str(error)[:80]}") from None


def parse_json(text: str) -> Any:
    """A JSON document, or the list of those that stand one a line; None if it is neither."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError):
        return None


def json_reports(document: Any, path: str) -> list[Report]:
    """As `read`; raises errors of any kind where a field is missing or of another type."""
    if isinstance(document, dict) and "benchmark_results" in document:
        return [pytorch_report(document, path)]
    if isinstance(document, dict) and "results" in document:
        return [nccl_report(document, path)]
    entries = document if isinstance(document, list) else [document]
    if entries and all(isinstance(e, dict) and {"inPlace", "busBw"} <= e.keys() for e in entries):
        return [rccl_report(entries, path)]
    return []


def foreign_report(benchmark: str, environment: dict[str, Any], path: str) -> Report:
    """A report that tells neither its command nor its start."""
    report = Report(benchmark, environment, path, argv=[], started_at="")
    report.status = "complete"
    return report


def pytorch_report(document: dict[str, Any], path: str) -> Report:
    """A report of PyTorch's DDP benchmark. It measures one rank twice: first without DDP.

    Its measurements are the times of the first rank, then those of the second, and so on.
    """
    report = foreign_report(PYTORCH, {}, path)
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
    size = case.key["bucket_size"]  # in whole MB, where ours is a float
    return ours | {"bucket_size_mb": float(size) if is_number(size) else size, "comm_hook": "none"}


def collective_of(name: str) -> str:
    """`AllReduce`, `all_reduce` -> `all_reduce`; a name that is not known as it is."""
    return BY_LETTERS.get(name.replace("_", "").lower(), name)


def key_of_nccl_tests(key: dict[str, Any]) -> dict[str, Any]:
    """The key of nccl-tests for a case of collectives.py."""
    theirs = {name: key.get(name) for name in ("size_bytes", "redop", "ranks")}
    theirs["collective"] = collective_of(str(key.get("collective")))
    theirs["dtype"] = TYPES.get(str(key.get("dtype")), key.get("dtype"))
    return theirs | {"root": str(key.get("root"))}


def nccl_report(document: dict[str, Any], path: str) -> Report:
    """A report of nccl-tests' -J: microseconds and GB/s, out of place and in place."""
    argv = [str(word) for word in document["args"]]
    config = document["config"]
    devices = config["devices"]  # the first of each process
    ranks = len(devices) * config["nthreads"] * config["ngpus"]
    variables = [variable for variable in document["env"] if variable.startswith("NCCL_")]
    environment = {
        "nccl": document["nccl_version"],
        "world_size": ranks,
        "hosts": sorted({device["hostname"] for device in devices}),
        "devices": sorted({device["device_info"] for device in devices}),
        "variables": dict(variable.split("=", 1) for variable in variables),
    }
    report = Report(NCCL_TESTS, environment, path, argv, str(document["start_time"]))
    report.status = "complete" if "end_time" in document else "interrupted"
    collective = collective_in(argv[:1], Path(argv[0]).name)
    report.cases = merge_repeated(
        case_of(result, collective, ranks) for result in document["results"]
    )
    return report


def rccl_report(entries: Sequence[dict[str, Any]], path: str) -> Report:
    """A report of rccl-tests: an entry for each size, out of place or in place."""
    results: dict[tuple[Any, ...], Result] = {}
    for entry in entries:
        collective = collective_of(entry["name"])
        # with MPI it counts processes and their GPUs
        ranks = entry["ranks"] * entry["gpusPerRank"] if "ranks" in entry else entry["gpus"]
        about = {name: entry[name] for name in ("size", "type", "redop")}
        row = (collective, ranks, entry.get("numCycle"), *about.values())
        result = results.setdefault(row, about | {"root": entry.get("root", -1)})
        result[PLACES[entry["inPlace"]]] = {
            "time": entry["time"],
            "alg_bw": entry["algBw"],
            "bus_bw": entry["busBw"],
            "nwrong": number_of(str(entry.get("wrong", entry.get("#wrong")))),
        }
    cases = [case_of(result, row[0], row[1]) for row, result in results.items()]
    world_size = max(len(case.ranks) for case in cases)
    report = foreign_report(NCCL_TESTS, {"world_size": world_size}, path)
    report.cases = merge_repeated(cases)
    return report


def case_of(result: Result, collective: str, ranks: int | None) -> Case:
    """A row of a table. ranks: None where the table does not tell."""
    key = {
        "collective": collective,
        "size_bytes": result["size"],
        "dtype": result["type"],
        "redop": result["redop"],
        "root": str(result["root"]).strip(),
        "ranks": ranks,
    }
    table = " ".join(str(word) for word in (collective, key["dtype"], key["redop"]) if word)
    if key["root"] != "-1":
        table += f" root {key['root']}"
    if ranks:
        table += f" ({ranks} ranks)"
    name = show_size(key["size_bytes"])
    case = Case(key=key, name=name, table=table, ranks=list(range(ranks or 0)))
    for place in PLACES:
        numbers = result.get(place) or {}
        time_us = numbers.get("time", numbers.get("cpu_time"))
        if is_number(time_us):
            case.metrics[f"{place}_time_s"] = Estimate(time_us / 1e6)
            case.metrics[f"{place}_algbw_gb_per_s"] = Estimate(numbers["alg_bw"])
            case.metrics[f"{place}_busbw_gb_per_s"] = Estimate(numbers["bus_bw"])
        each = result.get(f"{place}_per_iter")  # of -I 1: the slowest process in each iteration
        if each:
            times_us = each["times_us"][each["skipped_iterations"] :]
            case.samples_s[f"{place}_time_s"] = [[time_us / 1e6 for time_us in times_us]]
        wrong = numbers.get("nwrong")
        if is_number(wrong) and wrong > 0:
            case.check = f"failed: {wrong:g} wrong values {place.replace('_', ' ')}"
    return case


def merge_repeated(cases: Iterable[Case]) -> list[Case]:
    """Each case once. Rows that repeat, as by -N, are its samples."""
    rows_of_case: dict[str, list[Case]] = {}
    for case in cases:
        rows_of_case.setdefault(canonical(case.key), []).append(case)
    return [merge(rows) if len(rows) > 1 else rows[0] for rows in rows_of_case.values()]


def merge(rows: Sequence[Case]) -> Case:
    """Rows of one case as a case: medians, and the times of all. It fails if one of them does."""
    first = rows[0]
    case = Case(key=first.key, name=first.name, table=first.table, ranks=first.ranks)
    for name in first.metrics:
        case.metrics[name] = median([row.metrics[name].value for row in rows])
        if name.endswith("_time_s"):
            times_s = [row.samples_s.get(name, [[row.metrics[name].value]])[0] for row in rows]
            case.samples_s[name] = [list(itertools.chain(*times_s))]  # of the slowest rank alone
    case.check = next((row.check for row in rows if row.failed), "passed")
    return case


def table_reports(text: str, path: str) -> list[Report]:
    """The tables in a log as a report; a table that is there already begins another run.

    The collective is named above its table or by a command; else by the file's name.
    Raises ValueError where several programs have written at once.
    """
    lines = COLOUR.sub("", text).splitlines()
    heads = [number for number, line in enumerate(lines) if HEADER.search(line)]
    environment = environment_of(lines)
    collective = next((name for name in KNOWN if name in Path(path).name), "unknown")
    reports: list[Report] = []
    known: set[str] = set()  # the cases of the last report
    begin = 0
    for head, end in itertools.pairwise([*heads, len(lines)]):
        above = lines[begin:head]
        refuse_worlds(above, path)
        collective = collective_in(above, collective)
        environment = environment | environment_of(above)
        cases = cases_of(lines[head:end], above, collective, environment.get("world_size"))
        if not cases:  # the header stands twice, or nothing was measured
            continue
        begin = head
        forms = {canonical(case.key) for case in cases}
        if not reports or known & forms:
            reports.append(foreign_report(NCCL_TESTS, environment, path))
            known = set()
        known |= forms
        reports[-1].cases += cases
        if not any(END in line for line in lines[head:end]):
            reports[-1].status = "interrupted"
    return reports


def refuse_worlds(above: Sequence[str], path: str) -> None:
    """Raises ValueError where several programs have written at once. above: lines before a table,
    which name each rank of its program."""
    hosts = {match[0]: match[2] for match in matches_in(above, RANK) if match[1] == "0"}
    if len(hosts) > 1:
        names = " and on ".join(dict.fromkeys(hosts.values()))
        raise ValueError(
            f"{path}: Rank 0 stands on {names}: {len(hosts)} jobs have written at once; nccl-tests "
            "was built without MPI=1, or srun has no --mpi"
        )


def cases_of(
    lines: Sequence[str], above: Sequence[str], collective: str, ranks: int | None
) -> list[Case]:
    """The cases of a table. lines: its header and what follows; above: the lines before it.

    A row into which NCCL has written a line is none: its case is missing then.
    """
    columns = HEADER.findall(lines[0])[0].split()
    in_place_only = not any("out-of-place" in line for line in above)
    cases = []
    for match in matches_in(lines, ROW):
        with contextlib.suppress(ValueError):
            result = result_of(match[1].split(), columns, in_place_only)
            cases.append(case_of(result, collective, ranks))
    return merge_repeated(cases)


def collective_in(lines: Iterable[str], default: str) -> str:
    """The last collective whose program the lines name; `default` where they name none."""
    programs = matches_in(lines, PROGRAM)
    return collective_of(programs[-1][1]) if programs else default


def matches_in(lines: Iterable[str], pattern: re.Pattern[str]) -> list[re.Match[str]]:
    """The first match of each line that has one."""
    matches = [pattern.search(line) for line in lines]
    return [match for match in matches if match]


def environment_of(lines: Sequence[str]) -> dict[str, Any]:
    """What the lines tell of versions, ranks, hosts and devices."""
    environment: dict[str, Any] = {}
    for name, pattern in VERSIONS.items():
        matches = matches_in(lines, pattern)
        if matches:
            environment[name] = matches[0][1]
    ranks = matches_in(lines, RANK)
    if ranks:
        environment["world_size"] = 1 + max(int(match[1]) for match in ranks)
        environment["hosts"] = sorted({match[2] for match in ranks})
        environment["devices"] = sorted({match[3].strip() for match in ranks if match[3]})
    return environment


def result_of(words: Sequence[str], columns: Sequence[str], in_place_only: bool) -> Result:
    """A row of a table. Raises ValueError where it is damaged.

    columns: the words of the header.
    """
    size, count = int(words[0]), int(words[1])
    if size % count:
        raise ValueError("its size has lost digits")
    result: Result = {"size": size, "type": words[2], "redop": words[3], "root": words[4]}
    starts = [i for i, name in enumerate(columns) if name in ("time", "cputime")]
    places = PLACES[1:] if in_place_only and len(starts) == 1 else PLACES
    for place, start in zip(places, starts, strict=False):
        time, algbw, busbw, wrong = (number_of(word) for word in words[start : start + 4])
        result[place] = {"time": time, "alg_bw": algbw, "bus_bw": busbw, "nwrong": wrong}
    return result


def number_of(word: str) -> float | None:
    """A number of a table; None for N/A."""
    return None if word == "N/A" else float(word)
