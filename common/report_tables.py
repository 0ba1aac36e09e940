"""The tables of a set of reports: for each benchmark a list of columns.

A benchmark that is not listed gets a table of everything.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from common.bandwidth import show_size
from common.figures import Table
from common.report_runs import Case, Run, number, pair, significant, text

MAX_ROWS = 200  # of a table
MAX_METRICS = 24  # columns of a benchmark that is not known here
Column = tuple[str, Callable[[Case], str]]


def value(name: str, scale: float = 1, digits: int = 4) -> Callable[[Case], str]:
    """A cell with one metric times `scale`."""

    def cell(case: Case) -> str:
        found = number(case.metrics.get(name))
        return "-" if found is None else significant(found * scale, digits)

    return cell


def interval(name: str, scale: float = 1) -> Callable[[Case], str]:
    """A cell with an interval, as `from to to`."""

    def cell(case: Case) -> str:
        found = pair(case.metrics.get(name))
        return "-" if found is None else " to ".join(significant(x * scale, 4) for x in found)

    return cell


def width(case: Case) -> str:
    """Half the median's 95 % interval."""
    if case.interval is None:
        return "-"
    return f"±{case.interval:.1%}" if case.interval < 1 else ">100%"


def slowest(case: Case) -> str:
    rank, factor = case.metrics.get("straggler_rank"), number(case.metrics.get("straggler_factor"))
    if rank is None or factor is None:
        return "-"
    return f"{text(rank, 20)} ({text(case.metrics.get('straggler_host'), 40)}) {factor:.2f}x"


def times(name: str, unit: str, scale: float) -> list[Column]:
    """p50 to p99 of a time."""
    return [(f"p{q} ({unit})", value(f"{name}_p{q}_s", scale)) for q in (50, 75, 90, 95, 99)]


STEP: list[Column] = [
    *times("step_time", "ms", 1e3)[:1],
    ("95% ci of p50", width),
    *times("step_time", "ms", 1e3)[1:],
    ("samples/s", value("samples_per_s")),
    ("samples/s/device", value("samples_per_s_per_device")),
]
WHY: list[Column] = [
    ("efficiency (%)", value("efficiency", 100, 3)),
    ("step (ms)", value("step_time_p50_s", 1e3)),
    ("local compute (ms)", value("local_compute_p50_s", 1e3)),
    ("communication alone (ms)", value("communication_p50_s", 1e3)),
    ("exposed communication (ms)", value("exposed_communication_s", 1e3)),
    ("95% ci (ms)", interval("exposed_communication_ci95_s", 1e3)),
    ("overlap (%)", value("overlap", 100, 3)),
    ("slowest rank", slowest),
    ("first iteration (ms)", value("first_iteration_s", 1e3)),
    ("memory (GiB)", value("memory_gib")),
]


def breaks(case: Case) -> str:
    """How many graph breaks."""
    found = case.metrics.get("graph_breaks")
    counts = [number(n) or 0 for n in found.values()] if isinstance(found, dict) else None
    return "-" if counts is None else significant(sum(counts))


COMPILING: list[Column] = [
    ("times as fast as eager", value("vs_eager")),
    ("bounds", interval("vs_eager_bounds")),
    ("times as fast as none", value("vs_none")),
    ("first step (s)", value("first_step_s")),
    ("start of backend (s)", value("start_s")),
    ("recompiles", value("recompiles")),
    ("recompiling (s)", value("recompile_s")),
    ("cost (s)", value("compile_cost_s")),
    ("paid back after (steps)", value("payback_steps", 1, 7)),
    ("graphs", value("graphs")),
    ("graph breaks", breaks),
    ("tflops", value("tflops")),
    ("mfu (%)", value("mfu", 100, 3)),
    ("memory (GiB)", value("memory_gib")),
]
RATIO: list[Column] = [
    ("ratio", value("ratio")),
    ("95% ci of ratio", interval("ratio_ci95")),
]


def _busbw(variant: str) -> list[Column]:
    head = variant.replace("_", "-")
    return [
        (f"{head} time (us)", value(f"{variant}_time_s", 1e6)),
        (f"{head} algbw (GB/s)", value(f"{variant}_algbw_gb_per_s")),
        (f"{head} busbw (GB/s)", value(f"{variant}_busbw_gb_per_s")),
        (f"{head} #wrong", value(f"{variant}_wrong")),
    ]


def _calls(variant: str) -> list[Column]:
    head = variant.replace("_", " ")
    return [
        *((f"{head} {name}", cell) for name, cell in times(variant, "us", 1e6)),
        (f"{head} calls/s", value(f"{variant}_calls_per_s")),
        (f"{head} GB/s", value(f"{variant}_gb_per_s")),
    ]


# The tables of each benchmark, by title. What a case is called comes from its key.
TABLES: dict[str, dict[str, list[Column]]] = {
    "ddp_sweep": {"Step time": STEP, "Where the time goes": WHY},
    "compile_sweep": {
        "Step time": [*STEP, ("tokens/s", value("tokens_per_s"))],
        "What compiling brings and costs": COMPILING,
    },
    "collectives": {"Bandwidth": [*_busbw("out_of_place"), *_busbw("in_place")]},
    "rpc_latency": {"Round trips": _calls("round_trip"), "One way": _calls("one_way")},
    "ddp_rpc": {
        "Epochs": [
            *times("epoch_time", "ms", 1e3),
            ("95% ci of p50", width),
            ("samples/s", value("samples_per_s")),
        ],
        "Phases of a batch (means)": [
            (f"{name} (ms)", value(f"{name}_s", 1e3))
            for name in ("lookup", "forward", "backward", "exchange", "step")
        ],
        "Against the original": RATIO,
    },
    "parameter_server": {
        "Step time": [
            *STEP,
            ("hook p50 (ms)", value("hook_p50_s", 1e3)),
            ("MB a step", value("bytes_per_step", 1e-6)),
            ("GB/s", value("gb_per_s")),
        ],
        "Against the original": RATIO,
    },
    "batch_update_ps": {
        "Updates": [
            ("updates/s", value("updates_per_s")),
            ("95% ci of updates/s", interval("updates_per_s_ci95")),
            ("gradients/s", value("gradients_per_s")),
            ("MB/s", value("mb_per_s")),
            *((f"latency {name}", cell) for name, cell in times("latency", "ms", 1e3)),
        ],
        "Against the original": RATIO,
    },
}
# the key says it twice, or it numbers what has a name
HIDDEN_KEYS = {
    "ddp_sweep": ("world_size",),
    "collectives": ("count",),
    "p2p_matrix": ("round", "rounds"),
}


def joined(runs: Sequence[Run]) -> list[tuple[Run, Case]]:
    """All cases, the same case of each report side by side, in the order of the first report."""
    order: dict[str, list[tuple[Run, Case]]] = {}
    for run in runs:
        for case in run.cases:
            order.setdefault(case.identity, []).append((run, case))
    return [entry for entries in order.values() for entry in entries]


def varying(cases: Iterable[Case], hidden: Sequence[str] = ()) -> tuple[list[str], dict[str, str]]:
    """The key's fields that tell cases apart, and those (with their value) that do not."""
    seen: dict[str, list[str]] = {}
    count: dict[str, int] = {}
    total = 0
    for case in cases:
        total += 1
        for name, found in case.key.items():
            count[name] = count.get(name, 0) + 1
            values = seen.setdefault(name, [])
            shown = text(found, 60)
            if found is not None and shown not in values and len(values) < 2:
                values.append(shown)
    different = [name for name, values in seen.items() if len(values) > 1 and name not in hidden]
    everywhere = [name for name in seen if count[name] == total and len(seen[name]) == 1]
    alike = {name: seen[name][0] for name in everywhere}
    return different, alike


def key_text(name: str, found: Any) -> str:
    count = number(found)
    if "bytes" in name and count is not None and count == int(count) and count >= 0:
        return show_size(int(count))
    return text(found, 60)


def case_table(
    title: str,
    entries: Sequence[tuple[Run, Case]],
    columns: Sequence[Column],
    hidden: Sequence[str],
) -> Table | None:
    """A row a case; columns that are empty everywhere are left out. None where all are."""
    rows = [[cell(case) for _, cell in columns] for _, case in entries]
    bad = [case.check.startswith("failed") for _, case in entries]
    kept = [i for i in range(len(columns)) if any(row[i] != "-" for row in rows)]
    useful = [i for i, row in enumerate(rows) if bad[i] or any(row[k] != "-" for k in kept)]
    if not kept or not useful:
        return None
    fields, _ = varying((entries[i][1] for i in useful), hidden)
    several = len({run.label for run, _ in entries}) > 1
    checks = any(entries[i][1].check != "passed" for i in useful)
    header = [text(name, 40).replace("_", " ") for name in fields] or ["case"]
    header = [*header, *(["report"] if several else []), *(columns[i][0] for i in kept)]
    out = []
    for i in useful[:MAX_ROWS]:
        run, case = entries[i]
        names = [key_text(name, case.key.get(name)) for name in fields] or [case.label]
        cells = [*names, *([run.label] if several else []), *(rows[i][k] for k in kept)]
        out.append([*cells, *([case.check] if checks else [])])
    note = "" if len(useful) <= MAX_ROWS else f"The first {MAX_ROWS} of {len(useful):,} rows."
    failed = frozenset(row for row, i in enumerate(useful[:MAX_ROWS]) if bad[i])
    return Table(title, [*header, *(["check"] if checks else [])], out, failed, note)


def all_metrics(entries: Sequence[tuple[Run, Case]]) -> list[Column]:
    """A column for each metric that is a number, text or interval; of an unknown benchmark."""
    names: dict[str, None] = {}
    for _, case in entries:
        for name, found in case.metrics.items():
            if not isinstance(found, dict) and (not isinstance(found, list) or pair(found)):
                names[name] = None

    def cell(case: Case, name: str) -> str:
        found = case.metrics.get(name)
        if isinstance(found, list):
            return interval(name)(case)
        count = number(found)
        return text(found, 60) if count is None else significant(count)

    columns: list[Column] = [("95% ci of p50", width)]
    for name in names:
        columns.append((text(name, 40), lambda case, name=name: cell(case, name)))  # type: ignore[misc]
    return columns


def tables_of(runs: Sequence[Run]) -> list[Table]:
    """The tables of one benchmark. runs: all of the same benchmark."""
    entries = joined(runs)
    benchmark = runs[0].benchmark
    hidden = HIDDEN_KEYS.get(benchmark, ())
    known = TABLES.get(benchmark, {})
    tables = [case_table(title, entries, columns, hidden) for title, columns in known.items()]
    found = [table for table in tables if table is not None]
    if found or benchmark == "p2p_matrix":
        return found
    columns = all_metrics(entries)
    everything = case_table("Metrics", entries, columns[: MAX_METRICS + 1], hidden)
    if everything and len(columns) > MAX_METRICS + 1:
        note = f"The first {MAX_METRICS} of {len(columns) - 1:,} metrics. {everything.note}"
        everything = dataclasses.replace(everything, note=note.strip())
    return [everything] if everything else []


def constants(runs: Sequence[Run]) -> str:
    """What all cases of a benchmark have in common, in one line."""
    _, alike = varying(case for run in runs for case in run.cases)
    return ", ".join(f"{text(name, 40).replace('_', ' ')} {shown}" for name, shown in alike.items())
