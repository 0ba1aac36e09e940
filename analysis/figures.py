"""The figures of a page, by matplotlib. What is black in them takes the colour of the page's text.

FIGURES says what a benchmark has; one without an entry gets the time of each case.
"""

import io
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import matplotlib as mpl
import numpy as np
import pandas as pd
from cycler import cycler
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from analysis.load import Run, frame, links_of, numbers
from analysis.show import UNITS, case_names, clean, show_time, time_unit, unit_of
from common.cli import show_size
from common.report import Report

# each with a contrast of 3 to white and to a dark page
SERIES = ("#1f83c4", "#d55e00", "#009371", "#c46a9b", "#8a7a00", "#8c6bc8", "#7f7f7f", "#a0522d")
MAX_FIGURES, MAX_BARS = 12, 40

mpl.rcParams |= {
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # names may hold a $
    **{"axes.prop_cycle": cycler(color=SERIES), "axes.grid": True, "axes.axisbelow": True},
    **{"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False},
    **{"grid.alpha": 0.4, "font.size": 9, "legend.fontsize": 8},
}


def svg(figure: Figure) -> str:
    """The figure as an element of a page."""
    file = io.StringIO()
    plain = dict.fromkeys(("Creator", "Date", "Format", "Type"))  # no metadata, with its addresses
    figure.savefig(file, format="svg", transparent=True, bbox_inches="tight", metadata=plain)
    text = file.getvalue()[file.getvalue().index("<svg") :].replace("#000000", "currentColor")
    return re.sub(r'(<(?:g|image)\b[^>]*?) id="[^"]*"', r"\1", text)  # alike in all figures


def curves(rows: pd.DataFrame, title: str, name: str, x: str) -> Figure | None:
    """Values over x, a curve for whatever tells cases apart; what the case of 0 would scale to."""
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
        ax.plot(part["x"], part["value"], "o-", ms=4, label=label)
    if x == "world_size" and len(bare):
        one, ends = bare.iloc[0], np.array([1, rows["x"].max()])
        ax.plot(ends, ends * one["value"], "k--", lw=1, label=f"{one['case']} times ranks")
    if x.endswith("_bytes"):
        ax.set(xscale="log", yscale="log")
        ax.xaxis.set_major_formatter(lambda value, _: show_size(value))
        ax.xaxis.set_minor_locator(NullLocator())
    seconds = unit_of(rows["metric"].iloc[0]).name == "s"
    ax.yaxis.set_major_formatter(lambda value, _: show_time(value) if seconds else f"{value:g}")
    ticks = sorted(set(rows["x"]))
    ax.set_xticks(ticks[:: 1 + len(ticks) // 8])
    if any(ax.get_legend_handles_labels()[1]):
        ax.legend()
    return figure


def bars(rows: pd.DataFrame, title: str, name: str, stacked: bool = False) -> Figure:
    """Seconds of each case, series upon series, or side by side with their intervals."""
    several = rows["run"].nunique() > 1
    rows = rows.assign(bar=rows["case"].str[:60] + (", " + rows["run"] if several else ""))
    unit = time_unit(rows["value"].max())
    wide = rows.pivot_table(["value", "below", "above"], "bar", "series", sort=False)[:MAX_BARS]
    wide = wide.clip(lower=0) / UNITS[unit]
    figure = Figure((5.6, 1.2 + 0.3 * len(wide)), label=name)
    ax = figure.add_subplot()
    ends = None if stacked else [[wide["below"][s], wide["above"][s]] for s in wide["value"]]
    wide["value"].plot.barh(ax=ax, stacked=stacked, xerr=ends, width=0.7, xlabel=unit, ylabel="")
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


over_size, stacked = partial(curves, x="size_bytes"), partial(bars, stacked=True)
AXES = [f"exposed_{axis}_s" for axis in ("pp", "dp", "cp", "ep", "tp")]
PLACES = [f"{place}_busbw_gb_per_s" for place in ("out_of_place", "in_place")]
BUSBW = ("busbw (GB/s)", PLACES, over_size)
# by benchmark: title, metrics, and how they are drawn
FIGURES: dict[str, list[tuple[str, list[str], Callable[..., Figure | None]]]] = {
    "ddp_sweep": [
        ("samples/s", ["samples_per_s"], partial(curves, x="world_size")),
        ("Where a step's time goes", ["local_compute_p50_s", "exposed_communication_s"], stacked),
    ],
    "collectives": [BUSBW],
    "nccl-tests": [BUSBW],
    "rpc_latency": [("round trip", ["round_trip_p50_s"], over_size)],
    "parallel_sweep": [("Where a step's time goes", ["compute_s", *AXES], stacked)],
    "checkpoint_sweep": [
        ("A save", ["blocked_s", "stall_s", "upload_s"], bars),
        ("A load", ["load_cold_s", "load_warm_s"], bars),
    ],
}
PANELS = ("model", "dtype", "collective", "operation")  # a figure for each value of them


def draw(runs: Sequence[Run]) -> list[Figure]:
    """The figures of the reports of one benchmark."""
    if runs[0].benchmark == "p2p_matrix":
        return [figure for run in runs for figure in heat(run, run.label)]
    table = pd.DataFrame(numbers(runs))
    if table.empty:
        return []
    table["below"] = (table["value"] - table["ci_low"].astype(float)).fillna(0)
    table["above"] = (table["ci_high"].astype(float) - table["value"]).fillna(0)
    names = [metric.removesuffix(unit_of(metric).ending) for metric in table["metric"]]
    table["series"] = [name.removesuffix("_p50").replace("_", " ") for name in names]
    table["panel"] = [" ".join(clean(k[n], 40) for n in PANELS if n in k) for k in table["key"]]
    times = table["metric"][table["metric"].str.endswith(("_p50_s", "time_s"))]
    often = times.value_counts(sort=False).nlargest(1)  # what most cases have
    figures: list[Figure] = []
    for plan in FIGURES.get(runs[0].benchmark, []), [("Time", [*often.index], bars)]:
        for title, metrics, kind in plan if not figures else ():
            for name, part in table[table["metric"].isin(metrics)].groupby("panel", sort=False):
                figures += filter(None, [kind(part, title, f"{title}, {name}".strip(", "))])
    return figures[:MAX_FIGURES]


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
