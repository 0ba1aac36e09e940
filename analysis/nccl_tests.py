"""Reports of nccl-tests and rccl-tests.

- nccl-tests: `-J` (its src/util.cu, versions 1 to 3)
- rccl-tests: `-x FILE -Z json`, an object a line or a list of them
- both: the table on the terminal, with the columns of nccl-tests before 2.11, too

Launchers put names, times and colours before each line of a log, and NCCL writes lines of its own
between them, or into them. So a line is recognised by its contents, wherever they begin.
"""

import contextlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from analysis.show import canonical, is_number
from common.cli import show_size
from common.report import Case, Estimate, Report
from common.stats import median

Result = dict[str, Any]  # a row of a table, with the names of -J
NCCL_TESTS = "nccl-tests"
PLACES = ("out_of_place", "in_place")
TIME = "out_of_place_time_s"  # the metric that a case is about
KNOWN = (  # a name that contains another one comes before it
    *("all_reduce", "all_gather", "reduce_scatter", "alltoallv", "alltoall", "broadcast"),
    *("reduce", "gather", "scatter", "sendrecv", "hypercube"),
)
BY_LETTERS = {name.replace("_", ""): name for name in KNOWN}  # AllReduce, all_reduce: allreduce
REDUCING = ("all_reduce", "reduce_scatter", "reduce")  # the others have no redop
TYPES = {"float16": "half", "float32": "float", "float64": "double"}  # ours -> theirs
COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
LONGEST_LINE = 4096  # characters; no table is wider, and patterns are not linear in the length
HEADER = re.compile(r"\bsize\s+count\s+type\s+(?:redop\s+)?(?:root\s+)?(?:cpu)?time\b.*\bbusbw\b.*")
UNITS = re.compile(r"\((\w+)\)\s+\(elements\)(.*)")
TIME_UNITS = {"us": 1.0, "ns": 1e-3, "ms": 1e3, "s": 1e6}  # in microseconds
RATE_UNITS = {"GB/s": 1.0, "MB/s": 1e-3, "TB/s": 1e3}  # in GB/s
NCCOM_TEST = re.compile(r"\bsize\(B\)\s+count\(elems\)\s+type\b.*\bbusbw\(")
# Size, count and type. Rows of 0 bytes measure nothing.
ROW = re.compile(
    r"(?<![\w.+/-])([1-9]\d{0,17}\s+[1-9]\d*\s+(?:u?int|u?char|half|b?float|double|fp?8)\w*\s.*)"
)
RANK = re.compile(
    r"\bRank\s+(\d+)\s+(?:Group\s+(\d+)\s)?.*\bon\s+(\S+)\s+device\s+\d+(?:\s+\[\S+\]\s+(.+))?"
)
END = "Avg bus bandwidth"
OUT_OF_BOUNDS = re.compile(r"Out of bounds values\s*:\s*(\d+)\s*FAILED")
# all_reduce_perf, all_reduce_perf_mpi; no folder of that name
PROGRAM = re.compile(r"\b([a-z_]+)_perf(?![a-z]|[\w.-]*/)(\S*)(.*)")
CONCLUDED = re.compile(r"Collective test concluded: (\S+)")
# Fields of the environment, and the lines that contain them.
VERSIONS = {
    "nccl": re.compile(r"(?:\b[NR]CCL version |nccl-library=)[: ]*(\d\S*)"),
    "nccl_tests": re.compile(r"\b(?:nccl-tests version|rccl-tests: Version) (\S+)"),
}
# How a row was measured. A setting that is not the default is a field of the key: rows that were
# measured in different ways are never runs of one case.
DEFAULTS: dict[str, int] = {
    "cudagraph": 0,
    "agg_iters": 1,
    "unalign": 0,
    "blocking": 0,
    "local_register": 0,
    "device_implementation": 0,
    "device_cta_count": 16,
    "cta_policy": -1,
    "report_cputime": 0,
    "stream_null": 0,
    "average": 1,
    "groups": 1,
}
FLAGS = {  # of both programs; -u and -x have other meanings in rccl-tests
    "G": "cudagraph",
    "m": "agg_iters",
    "z": "blocking",
    "R": "local_register",
    "D": "device_implementation",
    "V": "device_cta_count",
    "C": "report_cputime",
    "y": "stream_null",
    "a": "average",
}
NCCL_FLAGS = FLAGS | {"u": "unalign", "x": "cta_policy"}
PARAMETERS = {  # in the line `# nThread 1 nGpus 1 ...`
    "cudagraph": re.compile(r"\bgraph: (\d+)"),
    "agg_iters": re.compile(r"\bagg iters: (\d+)"),
    "unalign": re.compile(r"\bunalign: (\d+)"),
    "iterations": re.compile(r"(?<!warmup )(?<!agg )\biters: (\d+)"),
    "warmup_iterations": re.compile(r"\bwarmup iters: (\d+)"),
    "validation": re.compile(r"\bvalidation: (\d+)"),
}
OF_ENVIRONMENT = ("iterations", "warmup_iterations", "validation")  # runs that differ may be joined
PARAMETER_LINE = re.compile(r"\bnThread \d+ .*\bminBytes\b.*")
BLOCKING = (  # -z of nccl-tests, then the wording of rccl-tests
    (re.compile(r"Blocking Enabled: wait and barrier after each inner"), 1),
    (re.compile(r"Blocking Enabled: wait after each inner"), 2),
    (re.compile(r"Blocking Enabled: wait and barrier after each outer"), 3),
    (re.compile(r"Blocking Enabled: wait for completion and barrier"), 1),
)


def json_reports(document: Any, path: str) -> list[Report]:
    """The reports in a JSON document; an empty list if it is from another program.

    Raises errors of many kinds if a field is missing or has another type.
    """
    if isinstance(document, dict) and {"args", "config", "results"} <= document.keys():
        return [nccl_report(document, path)]
    entries = document if isinstance(document, list) else [document]
    if entries and all(isinstance(e, dict) and {"inPlace", "busBw"} <= e.keys() for e in entries):
        return [rccl_report(entries, path)]
    return []


def incomplete_report(environment: dict[str, Any], path: str) -> Report:
    """A report without a command and a start."""
    return Report(NCCL_TESTS, environment, path, argv=[], started_at="", status="complete")


def collective_of(name: str) -> str:
    """`AllReduce`, `all_reduce` -> `all_reduce`; an unknown name is returned unchanged."""
    return BY_LETTERS.get(name.replace("_", "").lower(), name)


def key_of_nccl_tests(key: dict[str, Any]) -> dict[str, Any]:
    """The key of nccl-tests for a case of collectives.py."""
    theirs = {name: key.get(name) for name in ("size_bytes", "redop", "ranks")}
    theirs["collective"] = collective_of(str(key.get("collective")))
    theirs["dtype"] = TYPES.get(str(key.get("dtype")), key.get("dtype"))
    theirs["root"] = str(key.get("root"))
    return theirs | not_default({"cudagraph": key.get("cudagraph") or 0})


def not_default(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a table that belong into the keys of its cases."""
    return {name: value for name, value in settings.items() if DEFAULTS.get(name) != value}


def settings_of_flags(words: Iterable[str], flags: dict[str, str] = NCCL_FLAGS) -> dict[str, int]:
    """The settings in a command line: `-G 1`, `-G1`, `--cudagraph 1` and `--cudagraph=1` are equal.

    words: the arguments; what follows an operator of a shell is ignored, and so are values that are
    not numbers. The last value of a flag counts.
    """
    settings: dict[str, int] = {}
    name: str | None = None
    for word in itertools.takewhile(lambda word: word[:1] not in ("|", ">", "<", "&", ";"), words):
        value = word
        if match := re.fullmatch(r"-([A-Za-z])(.*)", word):
            name, value = flags.get(match[1]), match[2]
        elif match := re.fullmatch(r"--(\w+)=?(.*)", word):
            name, value = match[1] if match[1] in flags.values() else None, match[2]
        if name and re.fullmatch(r"-?\d{1,9}", value):
            settings[name] = int(value)
    return settings


def nccl_report(document: dict[str, Any], path: str) -> Report:
    """A report of nccl-tests' -J: microseconds and GB/s, out of place and in place."""
    argv = [str(word) for word in document["args"]]
    config = document["config"]
    devices = config["devices"]  # the first of each process
    a_process = config["nthreads"] * config["ngpus"]
    sizes = Counter(device.get("group", 0) for device in devices)
    ranks = sizes[devices[0].get("group", 0)] * a_process
    variables = [variable for variable in document["env"] if variable.startswith("NCCL_")]
    environment = {
        "nccl": document["nccl_version"],
        "world_size": len(devices) * a_process,
        **layout_of([device["hostname"] for device in devices for _ in range(a_process)]),
        "devices": sorted({device["device_info"] for device in devices}),
        "variables": dict(variable.split("=", 1) for variable in variables),
    }
    for name in OF_ENVIRONMENT:
        if name in config:
            environment[name] = config[name]
    settings = settings_of_flags(argv[1:]) | {"groups": len(sizes)}
    for name, theirs in {"cudagraph": "graph", "agg_iters": "aggregated_iterations"}.items():
        if theirs in config:
            settings[name] = config[theirs]
    if config.get("blocking_collectives") == "true":
        settings.setdefault("blocking", 1)
    report = Report(NCCL_TESTS, environment, path, argv, str(document["start_time"]))
    report.status = "complete" if "end_time" in document else "interrupted"
    collective = collective_in(argv[:1], Path(argv[0]).name)
    cases = [case_of(result, collective, ranks, settings) for result in document["results"]]
    fail_all(cases, (document.get("out_of_bounds") or {}).get("count", 0))
    report.cases = merge_repeated(cases)
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
    report = incomplete_report({"world_size": world_size}, path)
    report.cases = merge_repeated(cases)
    return report


def case_of(
    result: Result, collective: str, ranks: int | None, settings: dict[str, Any] | None = None
) -> Case:
    """A row of a table as a case. ranks: None if unknown."""
    different = not_default(settings or {})
    key = {
        "collective": collective,
        "size_bytes": result["size"],
        "dtype": result["type"],
        "redop": result["redop"],
        "root": str(result["root"]).strip(),
        "ranks": ranks,
        **different,
    }
    table = " ".join(str(word) for word in (collective, key["dtype"], key["redop"]) if word)
    if key["root"] != "-1":
        table += f" root {key['root']}"
    if ranks:
        table += f" ({ranks} ranks)"
    if different:
        table += "; " + ", ".join(f"{name} {value}" for name, value in different.items())
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


def fail_all(cases: Sequence[Case], out_of_bounds: int) -> None:
    """Fail all cases of a table whose footer counts wrong values that none of its rows shows."""
    if out_of_bounds and not any(case.failed for case in cases):
        for case in cases:
            case.check = f"failed: {out_of_bounds} values out of bounds in this table"


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
    """The tables in a log as reports. A table whose cases are there already begins another run.

    Raises ValueError if there is a header without rows, if several programs have written at once,
    and for a table of nccom-test.
    """
    lines = [line[:LONGEST_LINE] for line in COLOUR.sub("", text).splitlines()]
    heads = [number for number, line in enumerate(lines) if HEADER.search(line)]
    if not heads and any(NCCOM_TEST.search(line) for line in lines):
        raise ValueError(
            f"{path} has a table of nccom-test, which cannot be read; expected one of nccl-tests "
            "or rccl-tests, whose header is `size count type redop root time algbw busbw`"
        )
    environment = environment_of(lines)
    collective = next((name for name in KNOWN if name in Path(path).name), "unknown")
    reports: list[Report] = []
    known: set[str] = set()  # the cases of the last report
    begin = 0
    for head, end in itertools.pairwise([*heads, len(lines)]):
        above, below = lines[begin:head], lines[head:end]
        refuse_worlds(above, path)
        environment = environment | environment_of(above)
        cases = cases_of(below, above, collective, environment.get("world_size"), path)
        if not cases:  # the header is printed twice, or nothing was measured
            continue
        collective, ranks = cases[0].key["collective"], cases[0].key["ranks"]
        footer = [END in line or bool(CONCLUDED.search(line)) for line in below]
        begin = head + 1 + max((i for i, is_footer in enumerate(footer) if is_footer), default=0)
        forms = {canonical(case.key) for case in cases}
        if not reports or known & forms:
            told = {} if matches_in(above, RANK) or not ranks else {"world_size": ranks}
            reports.append(incomplete_report(environment | told, path))
            known = set()
        known |= forms
        reports[-1].cases += cases
        if not any(END in line for line in below):
            reports[-1].status = "interrupted"
    if heads and not reports:
        raise ValueError(
            f"{path} has the header of a table of nccl-tests and no rows: the log is cut off, or "
            "nothing was measured"
        )
    return reports


def refuse_worlds(above: Sequence[str], path: str) -> None:
    """Raises ValueError if several programs have written at once. above: lines before a table,
    which name each rank of its program."""
    hosts = {match[0]: match[3] for match in matches_in(above, RANK) if match[1] == "0"}
    if len(hosts) > 1:
        names = " and on ".join(dict.fromkeys(hosts.values()))
        raise ValueError(
            f"{path}: Rank 0 is on {names}: {len(hosts)} jobs have written at once; nccl-tests "
            "was built without MPI=1, or srun has no --mpi"
        )


def cases_of(
    below: Sequence[str], above: Sequence[str], default: str, world_size: int | None, path: str
) -> list[Case]:
    """The cases of a table.

    below: its header and the lines after it. above: the lines before it. default: the collective of
    the table before, or of the file's name. world_size: the number of ranks if the table does not
    tell. A row that NCCL has split by a line of its own is damaged, and its case is missing then.
    """
    columns = HEADER.findall(below[0])[0].split()
    factors = factors_of(below[:4], columns, path)
    in_place_only = not any("out-of-place" in line for line in above)
    results = []
    for match in matches_in(below, ROW):
        with contextlib.suppress(ValueError):
            results.append(result_of(match[1].split(), columns, in_place_only, factors))
    if not results:
        return []
    concluded = matches_in(below, CONCLUDED)
    collective = collective_in([concluded[0][1]] if concluded else above, "")
    if not collective:
        fits = all((result["redop"] == "none") != (default in REDUCING) for result in results)
        collective = default if fits else "unknown"
    settings = settings_of(above)
    if "cputime" in columns:
        settings["report_cputime"] = 1
    number = ranks_from(results, collective) or world_size
    if ranks := ranks_in(above):
        sizes = Counter(match[2] for match in ranks)  # of the groups of NCCL_TESTS_SPLIT
        settings["groups"] = len(sizes)
        number = sizes[ranks[0][2]] if len(sizes) > 1 else 1 + max(int(rank[1]) for rank in ranks)
    cases = [case_of(result, collective, number, settings) for result in results]
    footer = matches_in(below, OUT_OF_BOUNDS)
    fail_all(cases, int(footer[0][1]) if footer else 0)
    return merge_repeated(cases)


def factors_of(lines: Sequence[str], columns: Sequence[str], path: str) -> list[float]:
    """What the numbers of each column are multiplied by to become microseconds or GB/s.

    lines: the header and the line of units below it. Raises ValueError for an unknown unit.
    """
    factors = dict.fromkeys(range(len(columns)), 1.0)
    of_column = {
        "time": TIME_UNITS,
        "cputime": TIME_UNITS,
        "algbw": RATE_UNITS,
        "busbw": RATE_UNITS,
    }
    with_unit = [i for i, name in enumerate(columns) if name in of_column or name[:2] == "i_"]
    found = matches_in(lines, UNITS)
    if not found:
        return [*factors.values()]
    units = re.findall(r"\(([^()]*)\)", found[0][2])
    for i, unit in zip(with_unit, units, strict=False):
        known = of_column.get(columns[i])
        if known and unit not in known:
            raise ValueError(
                f"{path}: the column {columns[i]} of the table is in {unit}; expected one of "
                f"{', '.join(known)}"
            )
        factors[i] = known[unit] if known else 1.0
    if found[0][1] != "B":
        raise ValueError(f"{path}: the sizes of the table are in {found[0][1]}; expected B (bytes)")
    return [*factors.values()]


def collective_in(lines: Iterable[str], default: str) -> str:
    """The last collective whose program the lines name; `default` if they name none."""
    programs = matches_in(lines, PROGRAM)
    return collective_of(programs[-1][1]) if programs else default


def matches_in(lines: Iterable[str], pattern: re.Pattern[str]) -> list[re.Match[str]]:
    """The first match of each line that has one."""
    matches = [pattern.search(line) for line in lines]
    return [match for match in matches if match]


def ranks_in(lines: Sequence[str]) -> list[re.Match[str]]:
    """The lines of the ranks of the last program: groups rank, group, host, device."""
    ranks = matches_in(lines, RANK)
    first = max((i for i, match in enumerate(ranks) if match[1] == "0"), default=0)
    return ranks[first:]


def layout_of(hosts: Sequence[str]) -> dict[str, Any]:
    """Nodes and ranks per node. hosts: the host of each rank."""
    sizes = sorted(set(Counter(hosts).values()))
    return {
        "hosts": sorted(set(hosts)),
        "num_nodes": len(set(hosts)),
        "local_world_size": sizes[0] if len(sizes) == 1 else sizes,
    }


def environment_of(lines: Sequence[str]) -> dict[str, Any]:
    """Versions, ranks, hosts, devices and parameters that the lines contain."""
    environment: dict[str, Any] = {}
    for name, pattern in VERSIONS.items():
        matches = matches_in(lines, pattern)
        if matches:
            environment[name] = matches[0][1]
    if ranks := ranks_in(lines):
        environment["world_size"] = 1 + max(int(match[1]) for match in ranks)
        environment |= layout_of([match[3] for match in ranks])
        environment["devices"] = sorted({match[4].strip() for match in ranks if match[4]})
    parameters = parameters_in(lines)
    return environment | {name: parameters[name] for name in OF_ENVIRONMENT if name in parameters}


def parameters_in(lines: Sequence[str]) -> dict[str, int]:
    """The numbers in the last line `# nThread 1 nGpus 1 ...`."""
    found = matches_in(lines, PARAMETER_LINE)
    matches = {name: pattern.search(found[-1][0]) for name, pattern in PARAMETERS.items() if found}
    return {name: int(match[1]) for name, match in matches.items() if match}


def settings_of(above: Sequence[str]) -> dict[str, Any]:
    """How the rows of a table were measured: its command, its parameters, its remarks."""
    commands = [match[3].split() for match in matches_in(above, PROGRAM)]
    settings: dict[str, Any] = {}
    for words in commands:
        settings = settings_of_flags(words, FLAGS) or settings
    parameters = parameters_in(above)
    settings |= {name: parameters[name] for name in parameters if name not in OF_ENVIRONMENT}
    for pattern, value in BLOCKING:
        if matches_in(above, pattern):
            settings["blocking"] = value
    return settings


def result_of(
    words: Sequence[str], columns: Sequence[str], in_place_only: bool, factors: Sequence[float]
) -> Result:
    """A row of a table. Raises ValueError if it is damaged.

    columns: the words of the header. factors: of each column, to microseconds and GB/s.
    """
    size, count = int(words[0]), int(words[1])
    if size % count:
        raise ValueError("its size has lost digits")
    result: Result = {"size": size, "count": count, "type": words[2], "bandwidths": []}
    for name, default in {"redop": "none", "root": "-1"}.items():
        result[name] = words[columns.index(name)] if name in columns else default
    starts = [i for i, name in enumerate(columns) if name in ("time", "cputime")]
    places = PLACES[1:] if in_place_only and len(starts) == 1 else PLACES
    for place, start in zip(places, starts, strict=False):
        time, algbw, busbw, wrong = (number_of(word) for word in words[start : start + 4])
        if time is None or algbw is None or busbw is None:
            raise ValueError("a row without a time")
        if columns[start + 3] == "error":  # before 2.13: the largest relative deviation
            wrong = None
        result["bandwidths"].append((words[start + 1], words[start + 2]))
        result[place] = {
            "time": time * factors[start],
            "alg_bw": algbw * factors[start + 1],
            "bus_bw": busbw * factors[start + 2],
            "nwrong": wrong,
        }
    return result


def number_of(word: str) -> float | None:
    """A number of a table; None for N/A."""
    return None if word == "N/A" else float(word)


ITEM_SIZES = {"half": 2, "bfloat16": 2, "int32": 4, "uint32": 4, "float": 4}
ITEM_SIZES |= {"int64": 8, "uint64": 8, "double": 8}  # all others have one byte


def ranks_from(results: Sequence[Result], collective: str) -> int | None:
    """The number of ranks that a table implies; None if it cannot be told.

    A gathering collective counts the elements of one rank and the bytes of all. Of an all-reduce,
    busbw / algbw = 2(n-1)/n (nccl-tests' doc/PERFORMANCE.md): n is the only integer that fits all
    rows within their rounding.
    """
    ratios = {r["size"] / (r["count"] * ITEM_SIZES.get(r["type"], 1)) for r in results}
    if len(ratios) == 1 and (ratio := ratios.pop()) > 1 and ratio.is_integer():
        return int(ratio)
    if collective != "all_reduce":
        return None
    low, high = 1.0, math.inf
    for algbw, busbw in itertools.chain(*(result["bandwidths"] for result in results)):
        alg, bus = float(algbw), float(busbw)
        alg_off, bus_off = rounding_of(algbw), rounding_of(busbw)
        if alg > alg_off:
            low = max(low, 2 / (2 - min((bus - bus_off) / (alg + alg_off), 1.999999)))
            most = (bus + bus_off) / (alg - alg_off)
            high = min(high, 2 / (2 - most) if most < 2 else math.inf)
    fitting = range(math.ceil(low), math.floor(high) + 1) if high < math.inf else range(0)
    return fitting[0] if len(fitting) == 1 and fitting[0] > 1 else None


def rounding_of(word: str) -> float:
    """How far a printed number may be off: half of its last digit."""
    return 0.5 * 10.0 ** -len(word.partition(".")[2])
