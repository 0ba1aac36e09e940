"""The figures of a page, by matplotlib: light and dark by the style sheet of the page around them.

FIGURES says what a benchmark has; one without an entry gets the time of each case.
"""

import io
import re
from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from cycler import cycler
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from analysis.load import Run, frame, links_of, rows_of
from analysis.show import UNITS, case_names, clean, interval_of, is_number, time_unit
from common.cli import show_size
from common.report import Report

SERIES = ("#0072b2", "#c2500a", "#007a5a", "#a8447f", "#8a6d00", "#3b7fa6", "#6b4fa0", "#4a4f55")
INK, LINE = "#1b1f24", "#d5d9de"
VARIABLES = {color: f"var(--s{i})" for i, color in enumerate(SERIES)}
VARIABLES |= {INK: "var(--ink)", LINE: "var(--line)"}
MAX_FIGURES, MAX_BARS = 12, 40

mpl.rcParams |= {
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # names may hold a $
    "font.family": ["sans-serif"],
    **{name: INK for name in ("text.color", "axes.labelcolor", "xtick.color", "ytick.color")},
    **{"axes.edgecolor": LINE, "grid.color": LINE, "axes.grid": True, "axes.axisbelow": True},
    **{"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False},
    **{"axes.prop_cycle": cycler(color=SERIES), "font.size": 9, "legend.fontsize": 8},
}


def svg(figure: Figure, number: int) -> str:
    """The figure as an element of a page; number: makes its ids unlike those of others."""
    file = io.StringIO()
    style: Any = {"format": "svg", "transparent": True, "bbox_inches": "tight"}
    with mpl.rc_context({"svg.hashsalt": f"figure {number}"}):
        figure.savefig(file, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")), **style)
    text = file.getvalue()[file.getvalue().index("<svg") :]
    text = re.sub(r'(<(?:g|image)\b[^>]*?) id="[^"]*"', r"\1", text)  # alike in all figures
    return re.sub("|".join(VARIABLES), lambda match: VARIABLES[match[0]], text)


def present(table: pd.DataFrame, name: str) -> pd.DataFrame:
    """The rows that have a number of this name."""
    return table.loc[[is_number(value) for value in table[name]]] if name in table else table[:0]


def panels(table: pd.DataFrame, names: Sequence[str]) -> Iterator[tuple[str, pd.DataFrame]]:
    """The rows of each figure, and what it is called: one for each value of the key's `names`."""
    names = [name for name in names if name in table] or ["benchmark"]
    for values, rows in table.groupby(names, sort=False, dropna=False):
        yield " ".join(clean(value, 40) for value in values), rows


def whiskers(rows: pd.DataFrame, name: str, scale: float) -> Any:
    """How far the 95 % intervals reach below and above the values, [2, n]."""
    found = []
    for row in rows.to_dict("records"):
        value = row[name] if is_number(row[name]) else 0.0
        low, high = interval_of(name, row) or (value, value)
        found.append([max(0.0, value - low) * scale, max(0.0, high - value) * scale])
    return np.array(found).T


def curves(
    table: pd.DataFrame, title: str, panel: Sequence[str], columns: dict[str, str], x: str
) -> Iterator[Figure]:
    """Columns over x, a curve for whatever else tells the cases of a panel apart.

    Over world_size also what the case of 0 would scale to. Times are in microseconds.
    """
    for name, cases in panels(present(table, x), panel):
        rows = cases[cases[x] > 0].sort_values(x)
        figure = Figure(figsize=(5.6, 3.4), label=name)
        ax = figure.add_subplot(xlabel=x.replace("_", " "), ylabel=title)
        own = (x, "label", "count")
        names = case_names([{k: v for k, v in key.items() if k not in own} for key in rows["key"]])
        rows["curve"] = names if len(set(names)) > 1 else ""
        for label, column in columns.items():
            scale = 1e6 if column.endswith("_p50_s") else 1.0
            for words, part in present(rows, column).groupby(["curve", "report"], sort=False):
                words = [label, *words[: 1 + (rows["report"].nunique() > 1)]]
                style: Any = {"fmt": "o-", "ms": 4, "label": ", ".join(filter(None, words))}
                ends = whiskers(part, column, scale)
                ax.errorbar(part[x].tolist(), part[column].astype(float) * scale, ends, **style)
            zero = present(cases[cases[x] == 0], column)
            if x == "world_size" and len(zero) and len(rows):
                most, one = rows[x].max(), zero[column].iloc[0]
                label = f"{zero['case'].iloc[0]} times ranks"
                ax.plot([1, most], [one, one * most], "--", color=INK, lw=1, label=label)
        if x.endswith("_bytes"):
            ax.set(xscale="log", yscale="log")
            ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: show_size(value)))
            ax.xaxis.set_minor_locator(NullLocator())
        ticks = sorted(set(rows[x]))
        ax.set_xticks(ticks[:: 1 + len(ticks) // 8])
        if any(ax.get_legend_handles_labels()[1]):
            ax.legend()
        if ax.containers:
            yield figure


def bars(
    table: pd.DataFrame, title: str, panel: Sequence[str], columns: dict[str, str], stacked: bool
) -> Iterator[Figure]:
    """Seconds of each case, column upon column, or side by side with their intervals."""
    for name, group in panels(table, panel):
        have = {label: column for label, column in columns.items() if len(present(group, column))}
        if not have:
            continue
        rows = group[group[list(have.values())].notna().any(axis=1)][:MAX_BARS]
        names = rows["case"] + (", " + rows["report"] if rows["report"].nunique() > 1 else "")
        seconds = {label: pd.to_numeric(rows[column], "coerce") for label, column in have.items()}
        values = pd.DataFrame(seconds).clip(lower=0).set_index(names.str[:60])
        unit = time_unit(values.max(axis=None))
        ends = [whiskers(rows, column, 1 / UNITS[unit]) for column in have.values()]
        figure = Figure((5.6, 1.2 + 0.3 * len(rows)), label=f"{title}, {name}" if panel else title)
        ax = figure.add_subplot()
        style: Any = {"width": 0.7, "legend": False, "xlabel": unit, "ylabel": "", "ecolor": INK}
        style |= {"stacked": True} if stacked else {"xerr": ends}
        (values / UNITS[unit]).plot.barh(ax=ax, **style)
        ax.invert_yaxis()
        ax.grid(axis="y", visible=False)
        if any(have):
            ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=4)
        yield figure


def heat(report: Report, label: str = "") -> Iterator[Figure]:
    """The links of a report of p2p_matrix, if it has any; yellow is good."""
    links = [link for case in report.cases for link in links_of(case.metrics)]
    if not links:
        return
    names = ["sends", "receives", "latency (us)", "bandwidth (GB/s)", "back", "both ways (GB/s)"]
    there = pd.DataFrame(links, columns=names)
    turned = dict(zip(names, [names[i] for i in (1, 0, 2, 4, 3, 5)], strict=True))
    table = pd.concat([there, there.rename(columns=turned)])
    figure = Figure(figsize=(12, 4.2), layout="constrained", label=f"Links {label}".strip())
    for ax, name in zip(figure.subplots(1, 3), (names[2], names[3], names[5]), strict=True):
        values = table.pivot_table(name, "sends", "receives")
        image = ax.imshow(values, cmap="viridis_r" if name == "latency (us)" else "viridis")
        ticks = range(0, len(values), 1 + len(values) // 16)
        ax.set(title=name, xlabel="receives", ylabel="sends", xticks=ticks, yticks=ticks)
        ax.grid(visible=False)
        figure.colorbar(image, ax=ax, shrink=0.7)
    yield figure


MODEL, STORAGE = ("model", "dtype"), ("path", "strategy")
STEP = {"local compute": "local_compute_p50_s", "exposed communication": "exposed_communication_s"}
SAVE = {"blocked": "blocked_s", "stall": "stall_s", "upload": "upload_s"}
EXPOSED = {f"exposed {axis}": f"exposed_{axis}_s" for axis in ("pp", "dp", "cp", "ep", "tp")}
LOAD = {"cold": "load_cold_s", "warm": "load_warm_s"}
BUSBW = {"out of place": "out_of_place_busbw_gb_per_s", "in place": "in_place_busbw_gb_per_s"}
BANDWIDTH = (curves, "busbw (GB/s)", ["collective"], BUSBW, "size_bytes")
ROUND_TRIP = {"": "round_trip_p50_s"}
FIGURES: dict[str, list[Any]] = {
    "ddp_sweep": [
        (curves, "samples/s", MODEL, {"": "samples_per_s"}, "world_size"),
        (bars, "Where a step's time goes", MODEL, STEP, True),
    ],
    "collectives": [BANDWIDTH],
    "nccl-tests": [BANDWIDTH],
    "compile_sweep": [(bars, "step time", MODEL, {"": "step_time_p50_s"}, False)],
    "rpc_latency": [(curves, "round trip (us)", ["operation"], ROUND_TRIP, "size_bytes")],
    "parallel_sweep": [(bars, "Step", MODEL, {"compute": "compute_s"} | EXPOSED, True)],
    "checkpoint_sweep": [
        (bars, "A save", STORAGE, SAVE, False),
        (bars, "A load", STORAGE, LOAD, False),
    ],
}


def draw(runs: Sequence[Run]) -> list[Figure]:
    """The figures of the reports of one benchmark."""
    if runs[0].benchmark == "p2p_matrix":
        return [figure for run in runs for figure in heat(run, run.label)]
    table = frame(runs)
    table["key"] = [row.key for row in rows_of(runs)]
    table = table.loc[[not row.failed for row in rows_of(runs)]]
    if table.empty:
        return []
    if "samples_per_s" in table and "step_time_ci95_rel" in table:
        rate, rel = table["samples_per_s"].astype(float), table["step_time_ci95_rel"].astype(float)
        table["samples_per_s_ci95"] = list(zip(rate / (1 + rel), rate / (1 - rel), strict=True))
    own = FIGURES.get(runs[0].benchmark, [])
    figures = [figure for kind, *rest in own for figure in kind(table, *rest)]
    if not figures:
        count = {n: len(present(table, n)) for n in table if str(n).endswith(("_p50_s", "time_s"))}
        column = max(count, key=lambda name: count[name])
        title = column.removesuffix("_s").replace("_", " ")
        figures = list(bars(table, title, (), {"": column}, False))
    return figures[:MAX_FIGURES]


def link_heatmap(report: Report, path: str) -> None:
    """Draw the links of a report of p2p_matrix to a file, .png, .svg or .pdf."""
    for figure in heat(report):
        figure.savefig(path, dpi=150)


def plot_history(groups: Sequence[Sequence[Run]], path: str) -> None:
    """Draw each case over time, relative to its first run: an axes a benchmark and machine."""
    figure = Figure(figsize=(9, 3.6 * len(groups)), layout="constrained")
    for ax, runs in zip(np.ravel(figure.subplots(len(groups), 1)), groups, strict=True):
        table = frame(runs)
        table["started"] = pd.to_datetime(table["started_at"], utc=True, format="ISO8601")
        wide = table.pivot_table("time_s", "started", "case", sort=False).iloc[:, :20]
        (wide / wide.bfill().iloc[0]).plot(ax=ax, marker="o", ms=3, xlabel="")
        ax.set(title=clean(runs[0].benchmark, 60), ylabel="time / first run's")
        ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=120)
