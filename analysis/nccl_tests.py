"""What nccl-tests and rccl-tests write: JSON, JSON lines, and the table that everybody keeps.

json_report     `-J` of nccl-tests (its src/util.cu, versions 1 and 2)
lines_report    `-x FILE -Z json` of rccl-tests: an object a line, or a list of them
table_report    the text on the terminal, of both, and of this project's collectives.py
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from analysis.show import is_number
from common.report import Case, Report

Result = dict[str, Any]  # a row of a table in the words of -J
BENCHMARK = "nccl-tests"
PLACES = ("out_of_place", "in_place")
# A name that another one holds comes after it.
COLLECTIVES = "all_reduce all_gather reduce_scatter alltoallv alltoall broadcast reduce gather"
KNOWN = (*COLLECTIVES.split(), "scatter", "sendrecv", "hypercube")
BY_LETTERS = {name.replace("_", ""): name for name in KNOWN}  # AllReduce, all_reduce: allreduce
TYPES = {"float16": "half", "float32": "float", "float64": "double"}  # ours -> theirs
# What mpirun --tag-output and srun --label put before each line.
LABEL = re.compile(r"^(\[\d+,\d+\]<std\w+>: ?|\d+: )")
HEADER = re.compile(r"^#\s+size\s+count\s+type\s.*\btime\b.*\bbusbw\b")
RANK = re.compile(r"^#\s+Rank\s+(\d+).*\bon\s+(\S+)\s+device\s+\d+(?:\s+\[\S+\]\s+(.+))?")
OUR_TITLE = re.compile(r"^# (\w+) \w+ .*\((\d+) ranks?\)")  # above a table of collectives.py
PROGRAM = re.compile(r"\b([a-z_]+)_perf\b")
# Fields of the environment, and the lines that tell them.
VERSIONS = {
    "nccl": re.compile(r"(?:NCCL version |nccl-library=)(\d\S*)"),
    "nccl_tests": re.compile(r"^# nccl-tests version (\S+)"),
    "rccl": re.compile(r"^#? ?RCCL version *: *(\S+)"),
    "rccl_tests": re.compile(r"^#? ?rccl-tests: Version (\S+)"),
    "hip": re.compile(r"^#? ?HIP version *: *(\S+)"),
    "rocm": re.compile(r"^#? ?ROCm version *: *(\S+)"),
}


def collective_of(name: str) -> str:
    """`AllReduce`, `all_reduce` -> `all_reduce`; a name that is not known as it is."""
    return BY_LETTERS.get(name.replace("_", "").lower(), name)


def json_report(document: dict[str, Any], path: str) -> Report:
    """A report of nccl-tests' -J: microseconds and GB/s, out of place and in place."""
    argv = [str(word) for word in document["args"]]
    config = document["config"]
    devices = config["devices"]  # the first of each process
    ranks = len(devices) * config["nthreads"] * config["ngpus"]
    variables = {}
    for variable in document["env"]:
        if variable.startswith("NCCL_"):  # not the secrets
            name, value = variable.split("=", 1)
            variables[name] = value
    environment = {
        "nccl": document["nccl_version"],
        "world_size": ranks,
        "hosts": sorted({device["hostname"] for device in devices}),
        "devices": sorted({device["device_info"] for device in devices}),
        "variables": variables,
    }
    report = Report(BENCHMARK, environment, path, argv, str(document["start_time"]))
    report.status = "complete" if "end_time" in document else "interrupted"
    collective = Path(argv[0]).name.removesuffix("_perf")
    report.cases = [case_of(result, collective, ranks) for result in document["results"]]
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
    case = Case(key, list(range(ranks or 0)))
    for place in PLACES:
        numbers = result.get(place) or {}
        time_us = numbers.get("time", numbers.get("cpu_time"))
        if is_number(time_us):
            case.metrics[f"{place}_time_s"] = time_us / 1e6
            case.metrics[f"{place}_algbw_gb_per_s"] = numbers["alg_bw"]
            case.metrics[f"{place}_busbw_gb_per_s"] = numbers["bus_bw"]
        wrong = numbers.get("nwrong")
        if is_number(wrong) and wrong > 0:
            case.check = f"failed: {wrong:g} wrong values {place.replace('_', ' ')}"
    return case


def lines_report(entries: Sequence[dict[str, Any]], path: str) -> Report:
    """A report of rccl-tests: an entry for each size, out of place or in place."""
    report = Report(BENCHMARK, {}, path, [], "", status="complete")
    results: dict[tuple[Any, ...], Result] = {}
    for entry in entries:
        collective = collective_of(entry["name"])
        ranks = ranks_of_line(entry)
        size, dtype, redop = entry["size"], entry["type"], entry["redop"]
        key = (collective, ranks, entry.get("numCycle"), size, dtype, redop)
        if key not in results:
            root = entry.get("root", -1)
            results[key] = {"size": size, "type": dtype, "redop": redop, "root": root}
        place = PLACES[entry["inPlace"]]
        wrong = entry.get("wrong", entry.get("#wrong"))
        results[key][place] = {
            "time": entry["time"],
            "alg_bw": entry["algBw"],
            "bus_bw": entry["busBw"],
            "nwrong": number_of(str(wrong)),
        }
    for (collective, ranks, *_), result in results.items():
        report.cases.append(case_of(result, collective, ranks))
    report.environment["world_size"] = max(len(case.ranks) for case in report.cases)
    return report


def ranks_of_line(entry: dict[str, Any]) -> int:
    """How many ranks a line of rccl-tests is of. With MPI it counts processes and their GPUs."""
    has_mpi = "ranks" in entry
    ranks: int = entry["ranks"] * entry["gpusPerRank"] if has_mpi else entry["gpus"]
    return ranks


def number_of(word: str) -> float | None:
    """A number of a table; None for N/A. What exceeds a limit is followed by a star."""
    try:
        return float(word.rstrip("*"))
    except ValueError:
        return None


def lines_of(text: str) -> list[str]:
    return [LABEL.sub("", line).strip() for line in text.splitlines()]


def has_table(text: str) -> bool:
    return any(HEADER.search(line) for line in lines_of(text))


def table_report(text: str, path: str) -> Report:
    """A report of the tables in a log, each of a collective of its own.

    The collective is named above its table, by a command or a title; else in the file's name.
    """
    lines = lines_of(text)
    ranks = ranks_of(lines)
    report = Report(BENCHMARK, environment_of(lines), path, [], "")
    ended = any(line.startswith("# Avg bus bandwidth") for line in lines)
    report.status = "complete" if ended else "interrupted"
    collective = collective_of_file(path)
    begin = 0
    columns: list[str] = []
    for number, line in enumerate(lines):
        if HEADER.search(line):
            columns = line.split()[1:]
            collective = collective_in(lines[begin:number], collective)
            ranks = ranks_of(lines[begin:number]) or ranks
            in_place_only = "out-of-place" not in lines[number - 1]
            begin = number
        result = result_of(line.split(), columns, in_place_only) if columns else None
        if result is not None:
            report.cases.append(case_of(result, collective, ranks))
    return report


def collective_of_file(path: str) -> str:
    """The collective that the name of a log holds."""
    for name in KNOWN:
        if name in Path(path).name:
            return name
    return "unknown"


def collective_in(lines: Iterable[str], default: str) -> str:
    """The last collective that the lines name; `default` where they name none."""
    name = default
    for line in lines:
        match = PROGRAM.search(line) or OUR_TITLE.search(line)
        if match:
            name = collective_of(match[1])
    return name


def matches_in(lines: Iterable[str], pattern: re.Pattern[str]) -> list[re.Match[str]]:
    matches = []
    for line in lines:
        match = pattern.search(line)
        if match:
            matches.append(match)
    return matches


def ranks_of(lines: Sequence[str]) -> int | None:
    """How many ranks the lines tell of; None where they tell nothing."""
    ranks = [int(match[1]) for match in matches_in(lines, RANK)]
    if ranks:
        return 1 + max(ranks)
    titles = matches_in(lines, OUR_TITLE)
    return int(titles[-1][2]) if titles else None


def environment_of(lines: Sequence[str]) -> dict[str, Any]:
    """What the lines tell of ranks, versions, hosts and devices."""
    environment: dict[str, Any] = {"world_size": ranks_of(lines)}
    for name, pattern in VERSIONS.items():
        matches = matches_in(lines, pattern)
        if matches:
            environment[name] = matches[0][1]
    ranks = matches_in(lines, RANK)
    if ranks:
        devices = {str(match[3]).strip() for match in ranks}
        environment["hosts"] = sorted({match[2] for match in ranks})
        environment["devices"] = sorted(devices - {"None"})
    return environment


def result_of(words: Sequence[str], columns: Sequence[str], in_place_only: bool) -> Result | None:
    """A row of a table. None if it is no row, or of 0 bytes.

    columns: the words of the header. Rows of 0 bytes measure nothing, and there are several.
    """
    begins_with_numbers = all(word.isdecimal() for word in words[:2])
    if len(words) < len(columns) or not begins_with_numbers:
        return None
    size = int(words[0])
    if size == 0:
        return None
    about = dict(zip(columns, words, strict=False))
    result: Result = {
        "size": size,
        "type": TYPES.get(about["type"], about["type"]),
        "redop": about.get("redop", "none"),
        "root": about.get("root", "-1"),
    }
    starts = [i for i, name in enumerate(columns) if name in ("time", "cputime")]
    places = PLACES[1:] if in_place_only and len(starts) == 1 else PLACES
    for place, start in zip(places, starts, strict=False):
        numbers = [number_of(word) for word in words[start : start + 4]]
        time, algbw, busbw, wrong = numbers
        counts = columns[start + 3] == "#wrong"  # where it is `error`, it is a difference
        result[place] = {
            "time": time,
            "alg_bw": algbw,
            "bus_bw": busbw,
            "nwrong": wrong if counts else None,
        }
    return result
