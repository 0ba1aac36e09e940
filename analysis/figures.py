"""The figures of a page, by matplotlib: light and dark by the style sheet of the page around them.

FIGURES says what a benchmark has; one without an entry gets the time of each case.
"""

import io
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from cycler import cycler
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from analysis.load import Run, frame, links_of, numbers
from analysis.show import UNITS, case_names, clean, show_time, time_unit
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


def curves(
    rows: pd.DataFrame, name: str, title: str, x: str, show: Callable[[float], str]
) -> Figure | None:
    """Values over x, a curve for whatever else tells the cases apart.

    Over world_size also what the case of 0 would scale to.
    """
    rows = rows.assign(x=pd.to_numeric(rows["key"].str.get(x), "coerce"))
    bare, rows = rows[rows["x"] == 0], rows[rows["x"] > 0].sort_values("x", kind="stable")
    if rows.empty:
        return None
    figure = Figure(figsize=(5.6, 3.4), label=name)
    ax = figure.add_subplot(xlabel=x.replace("_", " "), ylabel=title)
    own = (x, "label", "count")
    names = case_names([{k: v for k, v in key.items() if k not in own} for key in rows["key"]])
    words = [part for part in (rows["series"], names, rows["run"]) if len(set(part)) > 1]
    rows["curve"] = [", ".join(curve) for curve in zip(*words, strict=True)] if words else ""
    for label, part in rows.groupby("curve", sort=False):
        ends = [part["value"] - part["low"], part["high"] - part["value"]]
        ax.errorbar(part["x"], part["value"], ends, fmt="o-", ms=4, label=label)
    if x == "world_size" and len(bare):
        most, one = rows["x"].max(), bare["value"].iloc[0]
        label = f"{bare['case'].iloc[0]} times ranks"
        ax.plot([1, most], [one, one * most], "--", color=INK, lw=1, label=label)
    if x.endswith("_bytes"):
        ax.set(xscale="log", yscale="log")
        ax.xaxis.set_major_formatter(lambda value, _: show_size(value))
        ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(lambda value, _: show(value))
    ticks = sorted(set(rows["x"]))
    ax.set_xticks(ticks[:: 1 + len(ticks) // 8])
    if any(ax.get_legend_handles_labels()[1]):
        ax.legend()
    return figure


def bars(rows: pd.DataFrame, name: str, title: str, stacked: bool) -> Figure:
    """Seconds of each case, series upon series, or side by side with their intervals."""
    several = rows["run"].nunique() > 1
    rows = rows.assign(bar=rows["case"].str[:60] + (", " + rows["run"] if several else ""))
    unit = time_unit(rows["value"].max())
    wide = rows.pivot_table(["low", "value", "high"], "bar", "series", sort=False)[:MAX_BARS]
    wide = wide.clip(lower=0) / UNITS[unit]
    low, value, high = (wide[end].to_numpy().T for end in ("low", "value", "high"))
    figure = Figure((5.6, 1.2 + 0.3 * len(wide)), label=", ".join(filter(None, (title, name))))
    ax = figure.add_subplot()
    style: Any = {"width": 0.7, "legend": False, "xlabel": unit, "ylabel": "", "ecolor": INK}
    ends = {} if stacked else {"xerr": np.stack([value - low, high - value], axis=1)}
    wide["value"].plot.barh(ax=ax, stacked=stacked, **style, **ends)
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=4)
    return figure


def heat(report: Report, label: str = "") -> Iterator[Figure]:
    """The links of a report of p2p_matrix, if it has any; yellow is good."""
    rows = []
    for case in report.cases:
        for a, b, latency, there, back, both in links_of(case.metrics):
            rows += [(a, b, latency, there, both), (b, a, latency, back, both)]
    if not rows:
        return
    names = ("latency (us)", "bandwidth (GB/s)", "both ways (GB/s)")
    table = pd.DataFrame(rows, columns=["sends", "receives", *names])
    figure = Figure(figsize=(12, 4.2), layout="constrained", label=f"Links {label}".strip())
    for ax, name in zip(figure.subplots(1, 3), names, strict=True):
        values = table.pivot_table(name, "sends", "receives")
        image = ax.imshow(values, cmap="viridis_r" if name == "latency (us)" else "viridis")
        ticks = range(0, len(values), 1 + len(values) // 16)
        ax.set(title=name, xlabel="receives", ylabel="sends", xticks=ticks, yticks=ticks)
        ax.grid(visible=False)
        figure.colorbar(image, ax=ax, shrink=0.7)
    yield figure


MODEL, STORAGE = ("model", "dtype"), ("path", "strategy")
STEP = {"local compute": "local_compute_p50_s", "exposed communication": "exposed_communication_s"}
EXPOSED = {f"exposed {axis}": f"exposed_{axis}_s" for axis in ("pp", "dp", "cp", "ep", "tp")}
SAVE = {"blocked": "blocked_s", "stall": "stall_s", "upload": "upload_s"}
LOAD = {"cold": "load_cold_s", "warm": "load_warm_s"}
BUSBW = {"out of place": "out_of_place_busbw_gb_per_s", "in place": "in_place_busbw_gb_per_s"}
RATE, TRIP = {"": "samples_per_s"}, {"": "round_trip_p50_s"}
BANDWIDTH = (["collective"], BUSBW, curves, "busbw (GB/s)", "size_bytes", "{:g}".format)
# a figure for each value of these entries of the key; the columns in it; how it is drawn
FIGURES: dict[str, list[Any]] = {
    "ddp_sweep": [
        (MODEL, RATE, curves, "samples/s", "world_size", "{:g}".format),
        (MODEL, STEP, bars, "Where a step's time goes", True),
    ],
    "collectives": [BANDWIDTH],
    "nccl-tests": [BANDWIDTH],
    "rpc_latency": [(["operation"], TRIP, curves, "round trip", "size_bytes", show_time)],
    "parallel_sweep": [(MODEL, {"compute": "compute_s"} | EXPOSED, bars, "Step", True)],
    "checkpoint_sweep": [
        (STORAGE, SAVE, bars, "A save", False),
        (STORAGE, LOAD, bars, "A load", False),
    ],
}


def draw(runs: Sequence[Run]) -> list[Figure]:
    """The figures of the reports of one benchmark."""
    if runs[0].benchmark == "p2p_matrix":
        return [figure for run in runs for figure in heat(run, run.label)]
    rows = numbers(runs)
    spread = {id(row["key"]): row["value"] for row in rows if row["metric"] == "step_time_ci95_rel"}
    for row in rows:  # a rate is as uncertain as its time
        if row["metric"] == "samples_per_s" and (rel := spread.get(id(row["key"]), 1.0)) < 1:
            row["ci_low"], row["ci_high"] = row["value"] / (1 + rel), row["value"] / (1 - rel)
    table = pd.DataFrame(rows)
    if table.empty:
        return []
    figures = [f for entry in FIGURES.get(runs[0].benchmark, []) for f in plot(table, *entry)]
    times = table["metric"][table["metric"].str.endswith(("_p50_s", "time_s"))]
    if not figures and len(times):
        often, _ = Counter(times).most_common()[0]  # what most cases have
        title = often.removesuffix("_s").replace("_", " ")
        figures = plot(table, (), {title: often}, bars, title, False)
    return figures[:MAX_FIGURES]


def plot(
    table: pd.DataFrame, panel: Sequence[str], series: dict[str, str], kind: Any, *options: Any
) -> list[Figure]:
    """A figure of these metrics, by their names in it, for each value of the entries `panel`."""
    named = (table[table["metric"] == series[name]].assign(series=name) for name in series)
    rows = pd.concat(named)
    values = rows[["value", "ci_low", "ci_high"]].astype(float)
    rows["low"], rows["high"] = values.min(axis=1), values.max(axis=1)
    rows["panel"] = [" ".join(clean(k[n], 40) for n in panel if n in k) for k in rows["key"]]
    figures = [kind(part, name, *options) for name, part in rows.groupby("panel", sort=False)]
    return [figure for figure in figures if figure]


def link_heatmap(report: Report, path: str) -> None:
    """Draw the links of a report of p2p_matrix to a file, .png, .svg or .pdf."""
    for figure in heat(report):
        figure.savefig(path, dpi=150)


def plot_history(groups: Sequence[Sequence[Run]], path: str) -> None:
    """Draw each case over time, relative to its first run: an axes a benchmark."""
    figure = Figure(figsize=(9, 3.6 * len(groups)), layout="constrained")
    for ax, runs in zip(np.ravel(figure.subplots(len(groups), 1)), groups, strict=True):
        table = frame(runs)
        table["started"] = pd.to_datetime(table["started_at"], utc=True, format="ISO8601")
        wide = table.pivot_table("time_s", "started", "case", sort=False).iloc[:, :20]
        (wide / wide.bfill().iloc[0]).plot(ax=ax, marker="o", ms=3, xlabel="")
        ax.set(title=clean(runs[0].benchmark, 60), ylabel="time / first run's")
        ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=120)
