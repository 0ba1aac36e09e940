"""Reports of other programs, as people have them.

- PyTorch's benchmarks/distributed/ddp/benchmark.py: JSON
- nccl-tests: `-J` (its src/util.cu, versions 1 to 3)
- rccl-tests: `-x FILE -Z json`, an object a line or a list of them
- both of these, and this project's collectives.py: the table on the terminal

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
# A name that another one holds comes after it.
COLLECTIVES = "all_reduce all_gather reduce_scatter alltoallv alltoall broadcast reduce gather"
KNOWN = (*COLLECTIVES.split(), "scatter", "sendrecv", "hypercube")
BY_LETTERS = {name.replace("_", ""): name for name in KNOWN}  # AllReduce, all_reduce: allreduce
TYPES = {"float16": "half", "float32": "float", "float64": "double"}  # ours -> theirs
# also what `tput sgr0` writes, and titles and links of a terminal
COLOUR = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z]|\(B|\][^\x07\x1b]*(?:\x07|\x1b\\))")
DOCKER = re.compile(r'\\n","stream":.*')  # {"log":"the line\n","stream":"stdout","time":...}
HEADER = re.compile(r"\bsize\s+count\s+type\s.*time\b.*\bbusbw\b.*")
# Size, count and type. Rows of 0 bytes measure nothing.
ROW = re.compile(
    r"(?<![\w.+/-])([1-9]\d{0,17}\s+\d+\s+(?:u?int|u?char|half|b?float|double|fp?8)\w*\s.*)"
)
RANK = re.compile(r"\bRank\s+(\d+)\s.*\bon\s+(\S+)\s+device\s+\d+(?:\s+\[\S+\]\s+(.+))?")
END = "Avg bus bandwidth"
OUR_TITLE = re.compile(r"\b(\w+) \w+(?: \w+)?, \S+ \((\d+) ranks?\)")  # above our own tables
# all_reduce_perf, all_reduce_perf_mpi; no folder of that name
PROGRAM = re.compile(r"\b([a-z_]+)_perf(?![a-z]|[\w.-]*/)")
# Fields of the environment, and the lines that tell them.
VERSIONS = {
    "nccl": re.compile(r"(?:NCCL version |nccl-library=)(\d\S*)"),
    "nccl_tests": re.compile(r"\bnccl-tests version (\S+)"),
    "rccl": re.compile(r"\bRCCL version *: *(\S+)"),
    "rccl_tests": re.compile(r"\brccl-tests: Version (\S+)"),
    "hip": re.compile(r"\bHIP version *: *(\S+)"),
    "rocm": re.compile(r"\bROCm version *: *(\S+)"),
}


def read(content: bytes, path: str) -> list[Report]:
    """The reports of another program in `content`, of the file at `path`; none if it is no such."""
    text = content.decode(errors="replace")
    tables = table_reports(text, path)
    if tables:
        return tables
    try:
        return parse_foreign(text, path)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        what = f"{path} looks like a report of another program, but does not fit"
        raise ValueError(f"{what}: {type(error).__name__} {str(error)[:80]}") from None


def parse_foreign(text: str, path: str) -> list[Report]:
    """As `read`; raises errors of any kind where a field is missing or of another type."""
    document = parse_json(text)
    if isinstance(document, list):
        is_rccl = bool(document) and all(is_rccl_line(entry) for entry in document)
        return [lines_report(document, path)] if is_rccl else []
    if isinstance(document, dict) and "benchmark_results" in document:
        return [pytorch_report(document, path)]
    if isinstance(document, dict) and "results" in document:
        return [json_report(document, path)]
    return []


def parse_json(text: str) -> Any:
    """A JSON document, or the list of those that stand one a line; None if it is neither."""
    try:
        document = json.loads(text)
        return [document] if is_rccl_line(document) else document
    except (ValueError, RecursionError):
        pass
    try:
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError):
        return None


def is_rccl_line(entry: Any) -> bool:
    return isinstance(entry, dict) and {"inPlace", "busBw"} <= entry.keys()


def foreign_report(benchmark: str, environment: dict[str, Any], path: str) -> Report:
    """A report that tells neither its command nor its start."""
    report = Report(benchmark, environment, path, argv=[], started_at="")
    report.status = "complete"
    return report


def pytorch_report(document: dict[str, Any], path: str) -> Report:
    """A report of PyTorch's DDP benchmark."""
    report = foreign_report(PYTORCH, {}, path)
    fixed = {name: document.get(name) for name in ("distributed_backend", "bucket_size")}
    for entry in document["benchmark_results"]:
        for i, result in enumerate(entry["result"]):
            # it measures one rank twice: first without DDP, then with it
            is_wrapped = i > 0 or len(result["ranks"]) > 1
            report.cases.append(pytorch_case(entry, result, is_wrapped, fixed))
    report.environment = {
        "torch": document.get("pytorch_version"),
        "cuda": document.get("cuda_version"),
        "world_size": max(len(case.ranks) for case in report.cases),
    }
    return report


def pytorch_case(
    entry: dict[str, Any], result: dict[str, Any], is_wrapped: bool, fixed: dict[str, Any]
) -> Case:
    """The measurements are the times of the first rank, then those of the second, and so on."""
    ranks = result["ranks"]
    key = {"model": entry["model"], "batch_size": entry["batch_size"]}
    table = f"{key['model']}, batch size {key['batch_size']}"
    key |= {"ranks": len(ranks), "ddp": is_wrapped}
    name = f"{len(ranks)} rank{'s' if len(ranks) > 1 else ''}" if is_wrapped else "no ddp"
    samples = np.reshape(result["measurements"], (len(ranks), -1))
    case = Case(key=key | fixed, name=name, table=table, ranks=ranks)
    case.samples_s = {"step": samples.tolist()}
    case.metrics = {"step_s": median(samples.max(axis=0))}
    return case


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
    theirs = {
        name: key.get(name) for name in ("collective", "size_bytes", "dtype", "redop", "root")
    }
    theirs["collective"] = collective_of(str(key.get("collective")))
    theirs["dtype"] = TYPES.get(str(key.get("dtype")), key.get("dtype"))
    return theirs | {"root": str(key.get("root")), "ranks": key.get("ranks")}


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
    report = Report(NCCL_TESTS, environment, path, argv, str(document["start_time"]))
    report.status = "complete" if "end_time" in document else "interrupted"
    collective = collective_in(argv[:1], Path(argv[0]).name)
    cases = [case_of(result, collective, ranks) for result in document["results"]]
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
    size, table = name_of_case(key)
    case = Case(key=key, name=size, table=table, ranks=list(range(ranks or 0)))
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


def name_of_case(key: dict[str, Any]) -> tuple[str, str]:
    """The name of a case and the title of its table: `1K` of `all_reduce float sum (8 ranks)`."""
    words = [str(key[name]) for name in ("collective", "dtype", "redop") if key.get(name)]
    if key.get("root", "-1") != "-1":
        words.append(f"root {key['root']}")
    if key["ranks"]:
        words.append(f"({key['ranks']} ranks)")
    return show_size(key["size_bytes"]), " ".join(words)


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
    for name in rows[0].metrics:
        values = [row.metrics[name].value for row in rows]
        case.metrics[name] = median(values)
        if name.endswith("_time_s"):
            times_s = [row.samples_s.get(name, [[row.metrics[name].value]])[0] for row in rows]
            case.samples_s[name] = [list(itertools.chain(*times_s))]  # of the slowest rank alone
    case.check = next((row.check for row in rows if row.failed), "passed")
    return case


def lines_report(entries: Sequence[dict[str, Any]], path: str) -> Report:
    """A report of rccl-tests: an entry for each size, out of place or in place."""
    report = foreign_report(NCCL_TESTS, {}, path)
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
    report.cases = merge_repeated(report.cases)
    report.environment["world_size"] = max(len(case.ranks) for case in report.cases)
    return report


def ranks_of_line(entry: dict[str, Any]) -> int:
    """How many ranks a line of rccl-tests is of. With MPI it counts processes and their GPUs."""
    has_mpi = "ranks" in entry
    ranks: int = entry["ranks"] * entry["gpusPerRank"] if has_mpi else entry["gpus"]
    return ranks


def number_of(word: str) -> float | None:
    """A number of a table; None for N/A. What exceeds a limit is followed by a star."""
    return None if word.lower() in ("n/a", "nan", "-nan") else float(word.rstrip("*"))


def lines_of(text: str) -> list[str]:
    """The lines without colours and tabs, and without what Ansible, Docker, Markdown and Python's
    lists put behind them."""
    plain = DOCKER.sub("", COLOUR.sub("", text)).translate({ord("\t"): " ", ord("\xa0"): " "})
    return [line.rstrip("\"'`, |") for line in plain.splitlines()]


def table_reports(text: str, path: str) -> list[Report]:
    """The tables in a log as a report; as several where tables repeat, since each is a run.

    The collective is named above its table, by a command or a title; else in the file's name.
    Raises ValueError where several programs have written at once.
    """
    if "busbw" not in text:
        return []
    lines = lines_of(text)
    heads = [number for number, line in enumerate(lines) if HEADER.search(line)]
    environment = environment_of(lines)
    collective, ranks = collective_of_file(path), environment["world_size"]
    reports: list[Report] = []
    next_report: dict[str, int] = {}  # where a case goes when it stands there again
    begin = 0
    for head, end in itertools.pairwise([*heads, len(lines)]):
        above = lines[begin:head]
        refuse_worlds(above, path)
        columns = HEADER.findall(lines[head])[0].split()
        in_place_only = not any("out-of-place" in line for line in above)
        new_collective = collective_in(above, collective)
        new_ranks = ranks_of(above) or ranks
        cases = cases_of(lines[head + 1 : end], columns, in_place_only, new_collective, new_ranks)
        if not cases and end < len(lines):  # nothing was measured, or the header stands twice
            continue
        begin, collective, ranks = head, new_collective, new_ranks
        cases = merge_repeated(cases)
        forms = [canonical(case.key) for case in cases]
        number = max((next_report.get(form, 0) for form in forms), default=0)
        next_report |= dict.fromkeys(forms, number + 1)
        if number == len(reports):
            about = environment | environment_of(above) | {"world_size": ranks}
            reports.append(foreign_report(NCCL_TESTS, about, path))
        report = reports[number]
        report.cases += cases
        below = (lines[at] for at in range(head, len(lines)))
        if END not in next((line for line in below if END in line or RANK.search(line)), ""):
            report.status = "interrupted"
    return reports


def refuse_worlds(above: Sequence[str], path: str) -> None:
    """Raises ValueError where several programs have written at once. above: lines before a table,
    which name each rank of its program."""
    zeros = {match[0]: match[2] for match in matches_in(above, RANK) if match[1] == "0"}
    if len(zeros) > 1:
        hosts = " and on ".join(dict.fromkeys(zeros.values()))
        raise ValueError(
            f"{path}: Rank 0 stands on {hosts}: {len(zeros)} jobs have written at once; nccl-tests "
            "was built without MPI=1, or srun has no --mpi"
        )


def cases_of(
    lines: Iterable[str],
    columns: Sequence[str],
    in_place_only: bool,
    collective: str,
    ranks: int | None,
) -> list[Case]:
    """The rows of a table as cases. columns: the words of its header.

    A row into which NCCL has written a line is none: its case is missing then.
    """
    cases = []
    for match in matches_in(lines, ROW):
        with contextlib.suppress(ValueError):
            result = result_of(match[1].split(), columns, in_place_only)
            cases.append(case_of(result, collective, ranks))
    return cases


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


def result_of(words: Sequence[str], columns: Sequence[str], in_place_only: bool) -> Result:
    """A row of a table. Raises ValueError where it is damaged.

    columns: the words of the header.
    """
    about = dict(zip(columns, words, strict=False))
    result: Result = {
        "size": int(words[0]),
        "type": TYPES.get(words[2], words[2]),
        "redop": about.get("redop", "none"),
        "root": about.get("root", "-1"),
    }
    starts = [i for i, name in enumerate(columns) if name in ("time", "cputime")]
    places = PLACES[1:] if in_place_only and len(starts) == 1 else PLACES
    for place, start in zip(places, starts, strict=False):
        time, algbw, busbw, wrong = (number_of(word) for word in words[start : start + 4])
        refuse_other_size(result["size"], int(words[1]), time, algbw)
        counts = columns[start + 3].endswith("wrong")  # where it is `error`, it is a difference
        result[place] = {
            "time": time,
            "alg_bw": algbw,
            "bus_bw": busbw,
            "nwrong": wrong if counts else None,
        }
    return result


def refuse_other_size(size: int, count: int, time_us: float | None, algbw: float | None) -> None:
    """Raises ValueError where a size lost its first digits: its row does not agree with itself."""
    if time_us and algbw:
        rounding = 0.006 + 0.02 * algbw
        if size % count and abs(size / time_us / 1e3 - algbw) > rounding:
            raise ValueError("its size is not that of its bandwidth")
