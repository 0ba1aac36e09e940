"""Read reports of nccl-tests and rccl-tests.

- nccl-tests: `-J` (src/util.cu, versions 1 to 3)
- rccl-tests: `-x FILE -Z json`, as JSON lines or as a list
- both: the table on the terminal, also without the columns that nccl-tests added in 2.11

In a log, launchers prefix lines with names, timestamps and color codes, and NCCL inserts its own
lines between the lines of a table, or into them. Therefore a line is recognized by its contents,
wherever they begin.
"""

import contextlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from analysis.logs.numbers import form_of, read_number
from analysis.show import canonical, is_number
from common.stats import Estimate, median
from harness.cli import show_size
from harness.report import Case, Report, without_secrets

Result = dict[str, Any]  # a row of a table, with the field names of -J
NCCL_TESTS = "nccl-tests"
PLACES = ("out_of_place", "in_place")
TIME = "out_of_place_time_s"  # the main metric of a case
KNOWN = (  # a name precedes the names that it contains
    *("all_reduce", "all_gather", "reduce_scatter", "alltoallv", "alltoall", "broadcast"),
    *("reduce", "gather", "scatter", "sendrecv", "hypercube"),
)
PRINTED = ("time_s", "algbw_gb_per_s", "busbw_gb_per_s")  # metrics of a place, in this order
BY_LETTERS = {name.replace("_", ""): name for name in KNOWN}  # AllReduce, all_reduce: allreduce
REDUCING = ("all_reduce", "reduce_scatter", "reduce")  # only these have a redop
TYPES = {"float16": "half", "float32": "float", "float64": "double"}  # torch -> nccl-tests
COLOR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
LONGEST_LINE = 4096  # characters; tables are narrower, and matching long lines would be slow
HEADER = re.compile(r"\bsize\s+count\s+type\s+(?:redop\s+)?(?:root\s+)?(?:cpu)?time\b.*\bbusbw\b.*")
UNITS = re.compile(r"\((\w+)\)\s+\(elements\)(.*)")
TIME_UNITS = {"us": 1.0, "ns": 1e-3, "ms": 1e3, "s": 1e6}  # in microseconds
RATE_UNITS = {"GB/s": 1.0, "MB/s": 1e-3, "TB/s": 1e3}  # in GB/s
NCCOM_TEST = re.compile(r"\bsize\(B\)\s+count\(elems\)\s+type\b.*\bbusbw\(")
# Size, count and type. Rows of 0 bytes are ignored, since they measure nothing.
ROW = re.compile(
    r"(?<![\w.+/-])([1-9]\d{0,17}\s+[1-9]\d*\s+(?:u?int|u?char|half|b?float|double|fp?8)\w*\s.*)"
)
RANK = re.compile(
    r"\bRank\s+(\d+)\s+(?:Group\s+(\d+)\s)?.*\bon\s+(\S+)\s+device\s+\d+(?:\s+\[\S+\]\s+(.+))?"
)
END = "Avg bus bandwidth"
OUT_OF_BOUNDS = re.compile(r"Out of bounds values\s*:\s*(\d+)\s*FAILED")
# all_reduce_perf, all_reduce_perf_mpi; not a directory of that name
PROGRAM = re.compile(r"\b([a-z_]+)_perf(?![a-z]|[\w.-]*/)(\S*)(.*)")
CONCLUDED = re.compile(r"Collective test concluded: (\S+)")
# Fields of the environment, and patterns for the lines that contain them
VERSIONS = {
    "nccl": re.compile(r"(?:\b[NR]CCL version |nccl-library=)[: ]*(\d\S*)"),
    "nccl_tests": re.compile(r"\b(?:nccl-tests version|rccl-tests: Version) (\S+)"),
}
# What NCCL_DEBUG=INFO says about the network
NETWORK = {
    "network": re.compile(r"\bUsing network ([\w-]+)"),
    "network_plugin": re.compile(
        r"\bLoaded net plugin (.+? \(v\d+\))|\bNET/OFI .*(aws-ofi-nccl \d\S*)"
    ),
}
# a variable that the user has set; those that differ from run to run are of no interest
VARIABLE = re.compile(
    r"\b((?!NCCL_(?:COMM_ID|HOSTID|DEBUG_FILE)\b)[NR]CCL_\w+) set by environment to (\S+?)\.?\s*$"
)
# Settings that affect a measurement, with their defaults. Other values are part of the key, so that
# rows that were measured with different settings are never runs of the same case.
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
FLAGS = {  # of both programs, except that -u and -x have other meanings in rccl-tests
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
OF_ENVIRONMENT = ("iterations", "warmup_iterations", "validation")  # may differ between runs
PARAMETER_LINE = re.compile(r"\bnThread \d+ .*\bminBytes\b.*")
BLOCKING = (  # -z in the wording of nccl-tests, then of rccl-tests
    (re.compile(r"Blocking Enabled: wait and barrier after each inner"), 1),
    (re.compile(r"Blocking Enabled: wait after each inner"), 2),
    (re.compile(r"Blocking Enabled: wait and barrier after each outer"), 3),
    (re.compile(r"Blocking Enabled: wait for completion and barrier"), 1),
)


@dataclass
class PrintedCase(Case):
    """A case whose numbers were printed with few digits. last_digits: by metric, one unit in the
    last digit / the number."""

    last_digits: dict[str, float] = field(default_factory=dict)


def json_reports(document: Any, path: str) -> list[Report]:
    """The reports in a JSON document; an empty list for the format of another program.

    Raises various exceptions if a field is missing or has the wrong type.
    """
    if isinstance(document, dict) and {"args", "config", "results"} <= document.keys():
        return [nccl_report(document, path)]
    entries = document if isinstance(document, list) else [document]
    if entries and all(isinstance(e, dict) and {"inPlace", "busBw"} <= e.keys() for e in entries):
        return [rccl_report(entries, path)]
    return []


def incomplete_report(environment: dict[str, Any], path: str) -> Report:
    """A report without a command and without a start time."""
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
    """The settings that differ from the defaults, and are therefore part of the key."""
    return {name: value for name, value in settings.items() if DEFAULTS.get(name) != value}


def settings_of_flags(words: Iterable[str], flags: dict[str, str] = NCCL_FLAGS) -> dict[str, int]:
    """The settings in a command line: `-G 1`, `-G1`, `--cudagraph 1` and `--cudagraph=1` are equal.

    words: the arguments. Values that are not numbers are ignored, and so is everything after a
    shell operator. If a flag is repeated, its last value counts.
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
    """A report of nccl-tests with -J: microseconds and GB/s, out of place and in place."""
    argv = [str(word) for word in document["args"]]
    config = document["config"]
    devices = config["devices"]  # the first device of each process
    a_process = config["nthreads"] * config["ngpus"]
    sizes = Counter(device.get("group", 0) for device in devices)
    ranks = sizes[devices[0].get("group", 0)] * a_process
    variables = [variable for variable in document["env"] if variable.startswith("NCCL_")]
    environment = {
        "nccl": document["nccl_version"],
        "world_size": len(devices) * a_process,
        **layout_of([device["hostname"] for device in devices for _ in range(a_process)]),
        "devices": sorted({device["device_info"] for device in devices}),
        "variables": without_secrets(dict(variable.split("=", 1) for variable in variables)),
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
    add_last_digits(document["results"])
    cases = [case_of(result, collective, ranks, settings) for result in document["results"]]
    fail_all(cases, (document.get("out_of_bounds") or {}).get("count", 0))
    report.cases = merge_repeated(cases)
    return report


def rccl_report(entries: Sequence[dict[str, Any]], path: str) -> Report:
    """A report of rccl-tests: one entry per size, out of place or in place."""
    results: dict[tuple[Any, ...], Result] = {}
    for entry in entries:
        collective = collective_of(entry["name"])
        # with MPI, the report contains the number of processes and the number of GPUs of each
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
    add_last_digits([*results.values()])
    cases = [case_of(result, row[0], row[1]) for row, result in results.items()]
    world_size = max(len(case.ranks) for case in cases)
    report = incomplete_report({"world_size": world_size}, path)
    report.cases = merge_repeated(cases)
    return report


def add_last_digits(results: Sequence[Result]) -> None:
    """Add one unit in the last digit / the number to the numbers of a JSON document.

    12.5 may stand for 12.50: of all rows, the number with the most digits shows the resolution.
    """
    for place in PLACES:
        rows = [result[place] for result in results if isinstance(result.get(place), dict)]
        for row in rows:
            row["last_digits"] = {}
        for name, field_name in zip(PRINTED, ("time", "alg_bw", "bus_bw"), strict=True):
            printed = [row for row in rows if is_number(row.get(field_name)) and row[field_name]]
            texts = [repr(float(row[field_name])).removesuffix(".0") for row in printed]
            decimals = max((len(text.partition(".")[2]) for text in texts), default=0)
            for row in printed:
                row["last_digits"][name] = 10.0**-decimals / row[field_name]


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
    case = PrintedCase(key=key, name=name, table=table, ranks=list(range(ranks or 0)))
    for place in PLACES:
        numbers = result.get(place) or {}
        time_us = numbers.get("time", numbers.get("cpu_time"))
        if is_number(time_us):
            printed = {"time_s": time_us / 1e6}
            printed |= {
                f"{rate}_gb_per_s": numbers[rate[:3] + "_bw"] for rate in ("algbw", "busbw")
            }
            case.metrics |= {f"{place}_{name}": Estimate(x) for name, x in printed.items()}
            shares = numbers.get("last_digits") or {}
            case.last_digits |= {f"{place}_{name}": share for name, share in shares.items()}
        each = result.get(f"{place}_per_iter")  # with -I 1: the slowest process in each iteration
        if each:
            times_us = each["times_us"][each["skipped_iterations"] :]
            case.samples_s[f"{place}_time_s"] = [[time_us / 1e6 for time_us in times_us]]
        wrong = numbers.get("nwrong")
        if is_number(wrong) and wrong > 0:
            case.check = f"failed: {wrong:g} wrong values {place.replace('_', ' ')}"
    return case


def fail_all(cases: Sequence[Case], out_of_bounds: int) -> None:
    """Fail all cases of a table if its footer counts wrong values but no row does."""
    if out_of_bounds and not any(case.failed for case in cases):
        for case in cases:
            case.check = f"failed: {out_of_bounds} values out of bounds in this table"


def merge_repeated(cases: Iterable[Case]) -> list[Case]:
    """Merge repeated rows, which -N causes: each case occurs once, and its rows are its samples."""
    rows_of_case: dict[str, list[Case]] = {}
    for case in cases:
        rows_of_case.setdefault(canonical(case.key), []).append(case)
    return [merge(rows) if len(rows) > 1 else rows[0] for rows in rows_of_case.values()]


def merge(rows: Sequence[Case]) -> Case:
    """Merge rows of one case: medians, and all times. The case fails if any row failed."""
    first = rows[0]
    case = PrintedCase(key=first.key, name=first.name, table=first.table, ranks=first.ranks)
    case.last_digits = dict(vars(first).get("last_digits", {}))
    for name in first.metrics:
        case.metrics[name] = median([row.metrics[name].value for row in rows])
        if name.endswith("_time_s"):
            times_s = [row.samples_s.get(name, [[row.metrics[name].value]])[0] for row in rows]
        case.samples_s[name] = [list(itertools.chain(*times_s))]  # of the slowest rank
    case.check = next((row.check for row in rows if row.failed), "passed")
    return case


def table_reports(text: str, path: str) -> list[Report]:
    """The tables in a log as reports. A table that repeats a case begins another report.

    Raises ValueError if there is a header without rows, if several jobs wrote to the log at once,
    and for a table of nccom-test.
    """
    lines = [line[:LONGEST_LINE] for line in COLOR.sub("", text).splitlines()]
    heads = [number for number, line in enumerate(lines) if HEADER.search(line)]
    if not heads and any(NCCOM_TEST.search(line) for line in lines):
        raise ValueError(
            f"{path} has a table of nccom-test, which is not supported; expected one of nccl-tests "
            "or rccl-tests, whose header is `size count type redop root time algbw busbw`"
        )
    environment = environment_of(lines)
    collective = next((name for name in KNOWN if name in Path(path).name), "unknown")
    reports: list[Report] = []
    known: set[str] = set()  # cases of the last report
    begin = 0
    for head, end in itertools.pairwise([*heads, len(lines)]):
        above, below = lines[begin:head], lines[head:end]
        refuse_several_jobs(above, path)
        environment = environment | environment_of(above)
        cases = cases_of(below, above, collective, environment.get("world_size"), path)
        if not cases:  # a repeated header, or nothing was measured
            continue
        collective, ranks = cases[0].key["collective"], cases[0].key["ranks"]
        footer = [END in line or bool(CONCLUDED.search(line)) for line in below]
        begin = head + 1 + max((i for i, is_footer in enumerate(footer) if is_footer), default=0)
        forms = {canonical(case.key) for case in cases}
        if not reports or known & forms:
            size = {} if matches_in(above, RANK) or not ranks else {"world_size": ranks}
            reports.append(incomplete_report(environment | size, path))
            known = set()
        known |= forms
        reports[-1].cases += cases
        if not any(END in line for line in below):
            reports[-1].status = "interrupted"
    if heads and not reports:
        raise ValueError(
            f"{path} has the header of a table of nccl-tests, but no rows: it is truncated, or "
            "nothing was measured"
        )
    return reports


def refuse_several_jobs(above: Sequence[str], path: str) -> None:
    """Raise ValueError if several jobs wrote to the log at once. above: the lines before a table,
    which name each rank."""
    hosts = {match[0]: match[3] for match in matches_in(above, RANK) if match[1] == "0"}
    if len(hosts) > 1:
        names = " and on ".join(dict.fromkeys(hosts.values()))
        raise ValueError(
            f"{path}: Rank 0 is on {names}: {len(hosts)} jobs wrote to it at once; nccl-tests "
            "was built without MPI=1, or srun was called without --mpi"
        )


def cases_of(
    below: Sequence[str], above: Sequence[str], default: str, world_size: int | None, path: str
) -> list[Case]:
    """The cases of a table.

    below: the header and the lines after it. above: the lines before it. default: the collective of
    the previous table, or in the file's name. world_size: the number of ranks, which is used if the
    lines do not contain it. A row into which NCCL has printed a line is damaged, and its case is
    missing.
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
        sizes = Counter(match[2] for match in ranks)  # groups of NCCL_TESTS_SPLIT
        settings["groups"] = len(sizes)
        number = sizes[ranks[0][2]] if len(sizes) > 1 else 1 + max(int(rank[1]) for rank in ranks)
    cases = [case_of(result, collective, number, settings) for result in results]
    footer = matches_in(below, OUT_OF_BOUNDS)
    fail_all(cases, int(footer[0][1]) if footer else 0)
    return merge_repeated(cases)


def factors_of(lines: Sequence[str], columns: Sequence[str], path: str) -> list[float]:
    """The factor of each column that converts its numbers to microseconds or GB/s.

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
    """The last collective whose program appears in the lines, or `default`."""
    programs = matches_in(lines, PROGRAM)
    return collective_of(programs[-1][1]) if programs else default


def matches_in(lines: Iterable[str], pattern: re.Pattern[str]) -> list[re.Match[str]]:
    """The first match in each line that has one."""
    matches = [pattern.search(line) for line in lines]
    return [match for match in matches if match]


def ranks_in(lines: Sequence[str]) -> list[re.Match[str]]:
    """The lines of the ranks of the last program. Match groups: rank, group, host, device."""
    ranks = matches_in(lines, RANK)
    first = max((i for i, match in enumerate(ranks) if match[1] == "0"), default=0)
    return ranks[first:]


def layout_of(hosts: Sequence[str]) -> dict[str, Any]:
    """Number of nodes and ranks per node. hosts: the host of each rank."""
    sizes = sorted(set(Counter(hosts).values()))
    return {
        "hosts": sorted(set(hosts)),
        "num_nodes": len(set(hosts)),
        "local_world_size": sizes[0] if len(sizes) == 1 else sizes,
    }


def environment_of(lines: Sequence[str]) -> dict[str, Any]:
    """Versions, network, variables, ranks, hosts, devices and parameters in the lines."""
    environment: dict[str, Any] = {}
    for name, pattern in VERSIONS.items():
        matches = matches_in(lines, pattern)
        if matches:
            environment[name] = matches[0][1]
    if ranks := ranks_in(lines):
        environment["world_size"] = 1 + max(int(match[1]) for match in ranks)
        environment |= layout_of([match[3] for match in ranks])
        environment["devices"] = sorted({match[4].strip() for match in ranks if match[4]})
    for name, pattern in NETWORK.items():
        if found := {match[1] or match[2] for match in matches_in(lines, pattern)}:
            environment[name] = sorted(found)
    if variables := matches_in(lines, VARIABLE):
        environment["variables"] = without_secrets({match[1]: match[2] for match in variables})
    parameters = parameters_in(lines)
    return environment | {name: parameters[name] for name in OF_ENVIRONMENT if name in parameters}


def parameters_in(lines: Sequence[str]) -> dict[str, int]:
    """The numbers in the last line `# nThread 1 nGpus 1 ...`."""
    found = matches_in(lines, PARAMETER_LINE)
    matches = {name: pattern.search(found[-1][0]) for name, pattern in PARAMETERS.items() if found}
    return {name: int(match[1]) for name, match in matches.items() if match}


def settings_of(above: Sequence[str]) -> dict[str, Any]:
    """How the rows of a table were measured, from its command, parameters and remarks."""
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
    """Parse a row of a table. Raises ValueError if it is damaged.

    columns: the words of the header. factors: converts each column to microseconds or GB/s.
    """
    size, count = int(words[0]), int(words[1])
    if size % count:
        raise ValueError("the size has lost digits")
    result: Result = {"size": size, "count": count, "type": words[2], "bandwidths": []}
    for name, default in {"redop": "none", "root": "-1"}.items():
        result[name] = words[columns.index(name)] if name in columns else default
    starts = [i for i, name in enumerate(columns) if name in ("time", "cputime")]
    places = PLACES[1:] if in_place_only and len(starts) == 1 else PLACES
    for place, start in zip(places, starts, strict=False):
        printed = [number_of(word) for word in words[start : start + 3]]
        time, algbw, busbw = printed
        if time is None or algbw is None or busbw is None:
            raise ValueError("a row without a time")
        # before 2.13: `error`, the largest relative error; or none of both
        has_wrong = columns[start + 3 : start + 4] == ["#wrong"]
        result["bandwidths"].append((words[start + 1], words[start + 2]))
        result[place] = {
            "time": time * factors[start],
            "alg_bw": algbw * factors[start + 1],
            "bus_bw": busbw * factors[start + 2],
            "nwrong": number_of(words[start + 3]) if has_wrong else None,
            "last_digits": dict(zip(PRINTED, map(share_of, words[start : start + 3]), strict=True)),
        }
    return result


def number_of(word: str) -> float | None:
    """A number in a table; None for N/A. Raises ValueError if it is damaged."""
    if word == "N/A":
        return None
    if form_of(word) not in ("whole", "point", "decimal_point"):
        raise ValueError("not a number")
    return read_number(word)[0]


def share_of(word: str) -> float:
    """One unit in the last digit of a number / the number."""
    value, last_digit = read_number(word)
    return last_digit / value if value else 0.0


ITEM_SIZES = {"half": 2, "bfloat16": 2, "int32": 4, "uint32": 4, "float": 4}
ITEM_SIZES |= {"int64": 8, "uint64": 8, "double": 8}  # all other types have one byte


def ranks_from(results: Sequence[Result], collective: str) -> int | None:
    """The number of ranks that follows from the numbers of a table; None if it is unknown.

    A gathering collective counts the elements of one rank and the bytes of all ranks. For an
    all-reduce, busbw / algbw = 2(n-1)/n (nccl-tests' doc/PERFORMANCE.md), where n is the only
    integer that agrees with all rows within their rounding.
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
    """The rounding error of a printed number: half a unit of its last digit."""
    return 0.5 * 10.0 ** -len(word.partition(".")[2])
