"""The figures of an HTML page, drawn by matplotlib.

FIGURES lists the figures of each benchmark. A benchmark without an entry gets the time of each
case. Black is replaced by the text color of the page.
"""

import io
import re
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import PurePath
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
import pandas as pd
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

from analysis.runs.evidence import is_disturbed, is_timed
from analysis.runs.load import Run, number_of, numbers
from analysis.runs.verdicts import WIDEST, Comparison, Result, geometric_mean
from analysis.show import (
    canonical,
    clean,
    scaled_unit,
    show_time,
    show_value,
    unit_of,
)
from common.stats import significant
from harness.cli import show_size

# Colors with a contrast ratio of at least 3 on white and on a dark page
SERIES = ("#1f83c4", "#d55e00", "#009371", "#c46a9b", "#8a7a00", "#8c6bc8", "#7f7f7f", "#a0522d")
MAX_FIGURES, MAX_BARS, MAX_REPORTS = 12, 40, 4
LINE = 0.25  # inches of figure height for each line of a label; the axes cover 77% of the height
LEGEND_WIDTH = 70  # characters of a legend that fit side by side in a figure
MAX_RANKS = 64  # maximum number of rows in a heat map; with more members, a row is a host
MAX_LABELS, MAX_NUMBERS = 16, 8  # maximum number of rows with a label each, and with numbers
IDEAL = "ideal: one rank (timed alternately) x ranks"
MOST_MEMBERS = 100_000  # a report with a larger number is damaged

Members = tuple[int, ...]
Corner = tuple[float, float]

mpl.rcParams |= {
    "svg.fonttype": "none",  # keep text as text
    "text.parse_math": False,  # names may contain a $
    "axes.prop_cycle": cycler(color=SERIES),
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.4,
    "font.size": 10.5,
    "legend.fontsize": 9.5,
    "legend.frameon": False,
}


def svg(figure: Figure) -> str:
    """The figure as an SVG element."""
    file = io.StringIO()
    none = dict.fromkeys(("Creator", "Date", "Format", "Type"))  # no metadata, which contain URLs
    # dpi applies to heat maps, which are images
    figure.savefig(
        file, format="svg", transparent=True, bbox_inches="tight", metadata=none, dpi=200
    )
    document = file.getvalue()
    element = document[document.index("<svg") :].replace("#000000", "currentColor")
    return re.sub(r'(<(?:g|image)\b[^>]*?) id="[^"]*"', r"\1", element)  # would not be unique


def curves(rows: pd.DataFrame, title: str, name: str, x: str) -> list[Figure]:
    """Values over x: one figure per setting, with a curve for each report and series.

    Settings with a single x become bars. Nothing is drawn if no case has an x above 0. If rows have
    a column `ideal`, its value is drawn as a dash at each point.
    """
    rows = rows.assign(x=pd.to_numeric(rows["key"].str.get(x), "coerce"))
    rows = rows[rows["x"] > 0].sort_values("x", kind="stable")
    if rows.empty:
        return []
    rows["setting"] = names_of_settings(rows, x)
    is_curve = rows.groupby("setting")["x"].transform("nunique") > 1
    if not is_curve.any() and rows["setting"].nunique() == 1:
        is_curve |= True  # a single point
    figures = [
        curves_of_setting(part, title, ", ".join(filter(None, [name, str(setting)])), x)
        for setting, part in rows[is_curve].groupby("setting", sort=False)
    ]
    others = rows[~is_curve].sort_index()
    return figures + (bars(others, title, name) if len(others) else [])


def without_zeros(text: str) -> str:
    """A label of an axis without trailing zeros after the decimal point: `50.00 ms` is `50 ms`."""
    return re.sub(r"\.0+(?=e| |$)|(\.\d*[1-9])0+(?=e| |$)", r"\1", text)


def curves_of_setting(rows: pd.DataFrame, title: str, name: str, x: str) -> Figure:
    """The figure of one setting."""
    figure = Figure(figsize=(5.6, 3.4), label=name)
    ax = figure.add_subplot(xlabel=x.replace("_", " "), ylabel=title)
    rows = rows.assign(group=groups_of_runs(rows["run"]))
    has_series, has_groups = rows["series"].nunique() > 1, rows["group"].nunique() > 1
    colors: dict[str, str] = {}
    ideal: str | None = IDEAL
    for (series, group, _), part in rows.groupby(["series", "group", "run"], sort=False):
        label = ", ".join([series] * has_series + [group] * has_groups)
        is_first = label not in colors
        color = colors.setdefault(label, SERIES[len(colors) % len(SERIES)])
        reach = [part["value"] - part["low"], part["high"] - part["value"]]  # NaN draws nothing
        style: dict[str, Any] = {"fmt": "o-", "ms": 4, "capsize": 2, "color": color}
        style["label"] = label if is_first and label else None
        ax.errorbar(part["x"], part["value"], yerr=reach, **style)
        if "ideal" in part and part["ideal"].notna().any():
            ax.plot(part["x"], part["ideal"], "_", ms=22, mew=2, color=color, label=ideal)
            ideal = None  # one entry in the legend is enough
    if x.endswith("_bytes"):
        ax.set(xscale="log", yscale="log")
        ax.xaxis.set_major_formatter(lambda value, _: show_size(value))
        ax.xaxis.set_minor_locator(NullLocator())
        low, high = ax.get_ylim()
        decades = np.log10(high / low)
        steps = (1,) if decades > 2 else (1, 2, 5) if decades > 0.5 else tuple(range(1, 10))
        ax.yaxis.set_major_locator(LogLocator(subs=steps))
        ax.yaxis.set_minor_formatter(NullFormatter())
    else:
        ax.set_ylim(bottom=0)
    in_seconds = unit_of(rows["metric"].iloc[0]).name == "s"
    show = show_time if in_seconds else significant
    ax.yaxis.set_major_formatter(lambda value, _: without_zeros(show(value)))
    ticks = sorted(set(rows["x"]))
    ax.set_xticks(ticks[:: 1 + len(ticks) // 8])
    put_legend(ax)
    return figure


def scaling(rows: pd.DataFrame, title: str, name: str) -> list[Figure]:
    """samples/s over ranks. The dash of a point is ranks x samples/s of a single rank, which was
    timed alternately with it: samples/s / efficiency.

    rows: samples/s and efficiencies. A case without DDP is not drawn.
    """
    settings, keys = [], []
    for metric, key in zip(rows["metric"], rows["key"], strict=True):
        # `25MB bf16 samples_per_s`; the metrics of the first setting have no prefix
        settings.append(
            metric.rpartition(" ")[0] or str(key.get("settings", "")).partition(", ")[0]
        )
        # with strong scaling, the batch size per rank follows from the number of ranks
        keys.append(key | {"batch_size": None} if key.get("global_batch") else key)
    rows = rows.assign(series=settings, key=keys)
    is_share, place = rows["metric"].str.endswith("efficiency"), ["run", "case", "series"]
    shares = rows[is_share].drop_duplicates(place).rename(columns={"value": "share"})
    points = rows[~is_share & rows["key"].str.get("ddp").ne(False)]
    points = points.merge(shares[[*place, "share"]], "left", place)
    return curves(points.assign(ideal=points["value"] / points["share"]), title, name, "ranks")


def names_of_settings(rows: pd.DataFrame, x: str) -> list[str]:
    """The name of each row's setting: those entries of its key in which rows differ, without x and
    the entries that follow from x; "" if all rows have the same setting."""
    follow = (x, "count", "calls")  # count and calls follow from the size
    columns = []
    for name in dict.fromkeys(name for key in rows["key"] for name in key):
        if name not in (*follow, *PANELS):
            columns.append([clean(show_value(name, key.get(name)), 60) for key in rows["key"]])
    differing = [column for column in columns if len(set(column)) > 1]
    if not differing:
        return [""] * len(rows)
    return [", ".join(words) for words in zip(*differing, strict=True)]


def groups_of_runs(labels: pd.Series) -> list[str]:
    """The group of each report. The reports of a group have the same color.

    With more than MAX_REPORTS reports, those in the same folder are a group; otherwise each report
    is a separate one.
    """
    if labels.nunique() <= MAX_REPORTS:
        return list(labels)
    return [str(PurePath(label).parent) if "/" in label else "reports" for label in labels]


def put_legend(ax: Axes, columns: int = 4) -> None:
    """Put a legend above the axes, where it covers no point, if anything has a label."""
    _, labels = ax.get_legend_handles_labels()
    if not labels:
        return
    widths = [len(label) + 6 for label in labels]  # a handle is as wide as 6 characters
    fitting = len(labels) if sum(widths) <= LEGEND_WIDTH else max(1, LEGEND_WIDTH // max(widths))
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=min(columns, fitting))


def bars(rows: pd.DataFrame, title: str, name: str) -> list[Figure]:
    """A figure of the times or rates of each case with their intervals, and a bar per series."""
    names = zip(rows["table"], rows["case"], strict=True)
    rows = rows.assign(bar=[case.removeprefix(f"{table}: ") for table, case in names])
    rows["series"] = rows["series"].where(rows["series"] != "", title)
    if rows.duplicated(["bar", "run", "series"]).any():  # cases of several tables
        rows["bar"] = rows["case"]
    if rows["run"].nunique() > 1:
        rows["bar"] += ", " + rows["run"]
    rows["bar"] = [textwrap.fill(clean(bar, 400), 30) for bar in rows["bar"]]
    unit, factor = scaled_unit(unit_of(rows["metric"].iloc[0]).name, [rows["value"].max()])
    columns = ["value", "low", "high"]
    table = rows.pivot_table(columns, "bar", "series", sort=False, dropna=False)
    if len(table) > MAX_BARS:
        name += f" ({MAX_BARS} of {len(table)} rows)"
    table = table[:MAX_BARS] * factor
    values = table["value"].clip(lower=0)
    below = (values - table["low"]).clip(lower=0)
    above = (table["high"] - values).clip(lower=0)
    reach = [[below[series], above[series]] for series in values]  # NaN draws nothing
    bar_height = 0.3 if len(reach) == 1 else 0.15
    lines = max(bar.count("\n") + 1 for bar in values.index)
    row_height = max(bar_height * len(reach), LINE * lines)
    figure = Figure((5.6, 1.2 + row_height * len(values)), label=name)
    ax = figure.add_subplot()
    values.plot.barh(ax=ax, xerr=reach, capsize=2, width=0.7, ylabel="")
    ax.set_xlim(left=0)
    has_intervals = bool(above.notna().any(axis=None))
    label = title if unit in ("", "k", "M", "G") else unit
    ax.set_xlabel(f"{label}; the thin lines are 95% intervals" if has_intervals else label)
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    put_legend(ax)
    return [figure]


def all_runs(
    comparison: Comparison, names: tuple[str, str], has_verdicts: bool = True
) -> list[Figure]:
    """Plot the time of every run relative to the mean of BASE, and the ratio with its interval.

    names: the names of BASE and TEST. Crosses are runs that are left out, and hollow points are
    disturbed runs. Lines connect the runs of a pair.
    """
    rows = [(case, *points_of(comparison, case)) for case in comparison.cases]
    rows = [row for row in rows if row[1] or row[2]]
    if not rows:
        return []
    prefix = common_words([case.label for case, *_ in rows])
    labels = [case.label.removeprefix(prefix) for case, *_ in rows]
    labels = [textwrap.fill(clean(label, 200), 26) for label in labels]
    lines = max(label.count("\n") for label in labels) + 1
    height = max(0.52 if len(rows) <= 12 else 0.36, LINE * lines)
    name = f"All runs: {clean(prefix, 100)}".strip(" ,:")
    figure = Figure((4.8, 0.9 + height * len(rows)), label=name)
    ax = figure.add_subplot()
    most = 1 + comparison.design.margin
    ax.axvspan(1 / most, most, color="#888888", alpha=0.18, lw=0)
    ax.axvline(1, color="#888888", lw=1)
    size = 4.5 if len(rows) <= 12 else 3.5
    right_of_axes: Any = {"transform": ax.get_yaxis_transform(), "va": "center", "fontsize": 9.5}
    for number, (case, base, test) in enumerate(rows):
        draw_pairs(ax, comparison, base, test, number)
        for side, points in enumerate((base, test)):
            for point in points:
                face = "none" if point.is_disturbed else SERIES[side]
                style: dict[str, Any] = {"ms": size, "color": SERIES[side], "mfc": face}
                style |= {"marker": "o"} if point.counts else {"marker": "x", "mew": 1.5}
                ax.plot([point.ratio], [number + LANES[side]], ls="", alpha=0.8, **style)
        if case.ratio is not None:
            draw_ratio(ax, case, number + LANES[2])
        if has_verdicts:
            ax.text(1.02, number, case.verdict, **right_of_axes)
    ax.set_yticks(range(len(rows)), labels)
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.grid(axis="y", visible=False)
    set_ratios(ax, [point.ratio for _, base, test in rows for point in (*base, *test)])
    margin = f"{100 * comparison.design.margin:.3g}%"
    ax.set_xlabel(f"time / mean of {clean(names[0], 30)}; shaded: the margin of {margin}")
    add_legend(ax, rows, names)
    return [figure]


def draw_ratio(ax: Axes, result: Result, height: float) -> None:
    """Draw a ratio, and its interval if it is narrow enough to be informative."""
    ends = result.interval if result.is_informative and result.interval else ()
    ax.plot(ends, [height] * len(ends), "k-", lw=1.5, solid_capstyle="butt")
    ax.plot([result.ratio or 1], [height], "kD", ms=4)


def set_ratios(ax: Axes, ratios: Sequence[float]) -> None:
    """Scale an axis of ratios: logarithmically if they are far apart."""
    if max(ratios) > WIDEST * min(ratios):
        ax.set_xscale("log")
        is_wide = max(ratios) > 100 * min(ratios)
        ax.xaxis.set_major_locator(LogLocator(subs=(1,) if is_wide else (1, 2, 5)))
        ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:.4g}")


def common_words(labels: Sequence[str]) -> str:
    """The words with which all labels begin, but never a whole label; "" for a single label."""
    words = [label.split(" ") for label in labels]
    count = 0
    while len(labels) > 1 and all(
        len(w) > count + 1 and w[count] == words[0][count] for w in words
    ):
        count += 1
    return " ".join([*words[0][:count], ""]) if count else ""


class Point(NamedTuple):
    """A run of a case in the plot of all runs."""

    run: int  # position on its side
    ratio: float  # time / mean of BASE
    counts: bool
    is_disturbed: bool


LANES = (-0.24, 0.0, 0.24)  # vertical offsets within a row: BASE, TEST, ratio


def points_of(comparison: Comparison, case: Result) -> tuple[list[Point], list[Point]]:
    """The runs of a case that have a time, of BASE and of TEST.

    They are relative to the mean in the table. If the case has none, they are relative to the mean
    of all runs of BASE, or else of TEST.
    """
    form = canonical(case.key)
    base, test = comparison.runs_of(case.benchmark)
    sides: list[tuple[Sequence[Run], dict[int, float]]] = []
    for same, shown, shown_s in (
        (base, case.base_runs, case.base_s),
        (test, case.test_runs, case.test_s),
    ):
        rows = [run.rows.get(form) for run in same]
        times = {i: row.time_s for i, row in enumerate(rows) if is_timed(row)}
        sides.append((same, times | dict(zip(shown, shown_s, strict=False))))
    mean = (
        geometric_mean(case.base_units_s or [*sides[0][1].values()] or [*sides[1][1].values()]) or 1
    )
    points = []
    for (runs, times), whys in zip(sides, (case.base_why, case.test_why), strict=True):
        points.append(
            [Point(i, t / mean, i not in whys, is_disturbed(runs[i])) for i, t in times.items()]
        )
    return points[0], points[1]


def draw_pairs(
    ax: Axes, comparison: Comparison, base: Sequence[Point], test: Sequence[Point], number: int
) -> None:
    """Draw a line between the two runs of each pair that counts."""
    partner = {point.run: point for point in test if point.counts}
    for point in base if comparison.design.paired else ():
        if point.counts and point.run in partner:
            ends = [point.ratio, partner[point.run].ratio]
            ax.plot(ends, [number + LANES[0], number + LANES[1]], color="#888888", lw=0.7, zorder=1)


def add_legend(
    ax: Axes, rows: Sequence[tuple[Result, list[Point], list[Point]]], names: Sequence[str]
) -> None:
    """Add the legend of the plot of all runs, with the kinds of points that occur in it."""
    points = [point for _, base, test in rows for point in (*base, *test)]
    style: dict[str, Any] = {"ls": "", "ms": 5}
    for side, name in enumerate(names):
        if any(row[1 + side] for row in rows):
            ax.plot([], [], "o", color=SERIES[side], label=clean(name, 30), **style)
    if any(case.ratio is not None for case, *_ in rows):
        ax.plot([], [], "kD-", ms=4, lw=1.5, label="ratio, interval")
    if any(point.is_disturbed for point in points):
        ax.plot([], [], "o", color="#888888", mfc="none", label="disturbed", **style)
    if not all(point.counts for point in points):
        ax.plot([], [], "x", color="#888888", label="left out", **style)
    put_legend(ax, 5)


over_size = partial(curves, x="size_bytes")
AXES = [f"exposed_{axis}_s" for axis in ("pp", "dp", "cp", "ep", "tp")]
PLACES = [f"{place}_busbw_gb_per_s" for place in ("out_of_place", "in_place")]
BUSBW = ("busbw (GB/s)", PLACES, over_size)
Plot = tuple[str, list[str], Callable[..., list[Figure]]]  # title, metrics, drawing function
FIGURES: dict[str, list[Plot]] = {  # by benchmark
    "ddp_sweep": [
        ("samples/s", ["samples_per_s", "efficiency"], scaling),
        ("Where a step's time goes", ["local_compute_s", "exposed_s"], bars),
    ],
    "collectives": [BUSBW],
    "nccl-tests": [BUSBW],
    "rpc_latency": [("round trip", ["round_trip_s"], over_size)],
    "parallel_sweep": [("Where a step's time goes", ["compute_s", *AXES], bars)],
    "checkpoint_sweep": [("A checkpoint", ["blocked_s", "stall_s", "upload_s"], bars)],
}
PANELS = ("model", "dtype", "collective", "operation")  # each of their values has its own figure


class Matrix(NamedTuple):
    """A metric of links between members, which are ranks or nodes.

    way: the arrow between the two members in the name of a link.
    """

    title: str
    way: str
    metric: str
    scale: float
    less_is_better: bool
    name: str  # the beginning of its entries in the list of slow links


MATRICES = (
    Matrix("latency (us)", "-", "latency_s", 1e6, True, "latency"),
    Matrix("bandwidth (GB/s)", "->", "bandwidth_gb_per_s", 1, False, "bandwidth"),
    Matrix("both directions (GB/s)", "<->", "bandwidth_gb_per_s", 1, False, "bidirectional"),
)


def heat_maps(run: Run, name: str) -> list[Figure]:
    """A heat map for each metric in a report of p2p_matrix.py. name: of the report, if needed.

    Rows are senders and columns are receivers. With more than MAX_RANKS members, a cell is the
    slowest link between two hosts.
    """
    figures = []
    hosts = hosts_of_members(run)
    for matrix in MATRICES:
        values, slow = links_of(run, matrix), slow_of(run, matrix.name, len(hosts))
        labels = [f"{host} {number}" for number, host in enumerate(hosts)]
        if len(set(hosts)) <= 1:
            labels = [str(number) for number in range(len(hosts))]
        if is_by_node(run):
            labels = hosts
        groups = hosts
        if len(hosts) > MAX_RANKS:
            labels = groups = list(dict.fromkeys(hosts))
            values = by_host(values, hosts, matrix.less_is_better)
            place = [groups.index(host) for host in hosts]
            slow = {tuple(place[member] for member in members) for members in slow}
        if values:
            figures.append(heat_map(matrix, values, labels, groups, slow))
            figures[-1].set_label(", ".join(word for word in (matrix.title, name) if word))
    return figures


def is_by_node(run: Run) -> bool:
    return any(row.key.get("by") == "node" for row in run.rows.values())


def hosts_of_members(run: Run) -> list[str]:
    """The host of each rank or node; `?` if the report does not name it."""
    environment = run.environment
    hosts = environment.get("hosts") or []
    if not is_by_node(run):
        hosts = [row.get("host") for row in environment.get("ranks") or []]
    ends = [member for matrix in MATRICES for pair in links_of(run, matrix) for member in pair]
    count = max([len(hosts) - 1, *ends], default=-1) + 1
    named = [clean(host or "?", 40) for host in hosts]
    return named + ["?"] * (count - len(named))


def links_of(run: Run, matrix: Matrix) -> dict[Members, float]:
    """(sender, receiver) -> value. A link without a direction has two entries."""
    values: dict[Members, float] = {}
    for row in run.rows.values():
        words = str(row.key.get("link", "")).split()
        number = number_of(row.metrics.get(matrix.metric))
        ends = words[:1] + words[2:3]
        if row.failed or number is None or len(ends) < 2 or words[1] != matrix.way:
            continue
        if not all(end.isdecimal() and int(end) < MOST_MEMBERS for end in ends):
            continue
        a, b = map(int, ends)
        values[a, b] = number * matrix.scale
        if matrix.way != "->":
            values[b, a] = values[a, b]
    return values


def slow_of(run: Run, name: str, count: int) -> set[Members]:
    """The slow links and members that the report names: two numbers for a link, one for a rank or
    node.

    count: number of members. Entries with larger numbers are ignored.
    """
    found: set[Members] = set()
    for entry in run.end.get("slow") or []:
        if str(entry["what"]).startswith(name):
            found |= {(member,) for member in entry.get("members", [])}
            found |= {tuple(entry["link"])} if "link" in entry else set()
    return {members for members in found if set(members) <= set(range(count))}


def by_host(
    values: dict[Members, float], hosts: Sequence[str], less_is_better: bool
) -> dict[Members, float]:
    """The slowest link between each pair of hosts, which are given by their numbers."""
    names = list(dict.fromkeys(hosts))
    worst: dict[Members, float] = {}
    for (a, b), value in values.items():
        pair = (names.index(hosts[a]), names.index(hosts[b]))
        pick = max if less_is_better else min
        worst[pair] = pick(value, worst.get(pair, value))
    return worst


def heat_map(
    matrix: Matrix,
    values: dict[Members, float],
    labels: Sequence[str],
    groups: Sequence[str],
    slow: set[Members],
) -> Figure:
    """Draw a heat map. labels: names of the members. groups: the host of each member. slow: members
    whose cells are outlined."""
    n = len(labels)
    cells = np.full((n, n), np.nan)
    for (a, b), value in values.items():
        cells[a, b] = value
    figure = Figure(figsize=(5.6, 4.8))
    ax = figure.add_subplot(xlabel="receiver", ylabel="sender")
    ax.grid(visible=False)
    colors = "viridis_r" if matrix.less_is_better else "viridis"
    image = ax.imshow(cells, cmap=colors, interpolation="nearest")
    figure.colorbar(image, ax=ax, shrink=0.8)
    starts = [i for i in range(n) if i == 0 or groups[i] != groups[i - 1]]
    ticks = list(range(n)) if n <= MAX_LABELS else starts[:: 1 + len(starts) // MAX_LABELS]
    turned = 90 if max(len(labels[i]) for i in ticks) > 3 else 0
    ax.set_xticks(ticks, [labels[i] for i in ticks], rotation=turned)
    ax.set_yticks(ticks, [labels[i] for i in ticks])
    if len(starts) < n:
        for start in starts[1:]:  # between hosts
            ax.axhline(start - 0.5, color="white", lw=1)
            ax.axvline(start - 0.5, color="white", lw=1)
    if n <= MAX_NUMBERS:
        middle = (np.nanmin(cells) + np.nanmax(cells)) / 2
        for (a, b), value in values.items():
            is_dark = value < middle
            ax.text(
                *(b, a, significant(value)),
                ha="center",
                va="center",
                fontsize=8,
                color="white" if is_dark != matrix.less_is_better else "#111111",
            )
    for members in slow:
        for corner, width, height in outlines(members, n, both=matrix.way != "->"):
            edge = Rectangle(corner, width, height, fill=False, edgecolor="#ff3b30", linewidth=2)
            edge.set(clip_on=False, zorder=3)  # above the lines between hosts
            ax.add_patch(edge)
    if slow:
        ax.set_title("outlined: slow or possibly slow, according to the answer", fontsize=8)
    return figure


def outlines(members: Members, n: int, both: bool) -> list[tuple[Corner, float, float]]:
    """Corner, width and height of each outline: the cell of a link, or the row and the column of a
    rank or node. both: a link has no direction, and therefore two cells."""
    if len(members) == 1 or members[0] == members[1]:
        place = members[0] - 0.5
        return [((-0.5, place), n, 1), ((place, -0.5), 1, n)]
    a, b = members[:2]
    corners = [(b - 0.5, a - 0.5)] + [(a - 0.5, b - 0.5)] * both
    return [(corner, 1, 1) for corner in corners]


def draw(runs: Sequence[Run]) -> list[Figure]:
    """The figures for the reports of one benchmark."""
    if runs[0].benchmark == "p2p_matrix":
        maps = [
            figure for run in runs for figure in heat_maps(run, run.label if len(runs) > 1 else "")
        ]
        return maps[:MAX_FIGURES]
    rows = pd.DataFrame(numbers(runs))
    if rows.empty:
        return []
    rows = rows.astype({"low": float, "high": float})
    rows["series"] = names_of_series(rows)
    rows["panel"] = [name_of_panel(key) for key in rows["key"]]
    figures = draw_plots(rows, FIGURES.get(runs[0].benchmark, []))
    if not figures:
        is_time = [unit_of(metric).name == "s" for metric in rows["metric"]]
        times = rows["metric"][is_time]
        most_frequent = times.value_counts(sort=False).nlargest(1)  # the metric of most cases
        figures = draw_plots(rows, [("Time", list(most_frequent.index), bars)])
    if len(figures) > MAX_FIGURES:
        last = figures[MAX_FIGURES - 1]
        last.set_label(
            f"{last.get_label()} (figure {MAX_FIGURES} of {len(figures)}: no more shown)"
        )
    return figures[:MAX_FIGURES]


def names_of_series(rows: pd.DataFrame) -> list[str]:
    """The name of each metric. If several settings were timed in one case, the name of the first
    setting is added to its metrics; those of other settings already have it."""
    names = []
    of_settings = {metric.rpartition(" ")[2] for metric in rows["metric"] if " " in metric}
    for metric, key in zip(rows["metric"], rows["key"], strict=True):
        name = metric.removesuffix(unit_of(metric).ending).replace("_", " ")
        first = str(key.get("settings", "")).partition(", ")[0]
        names.append(f"{first} {name}" if first and metric in of_settings else name)
    return names


def draw_plots(rows: pd.DataFrame, plots: Sequence[Plot]) -> list[Figure]:
    """The figures of each plot, with at least one per panel."""
    figures = []
    for title, metrics, kind in plots:
        # `25MB bf16 step_s` is the metric step_s of one setting
        chosen = rows[rows["metric"].str.rpartition(" ")[2].isin(metrics)]
        for name, part in chosen.groupby("panel", sort=False):
            figures += kind(part, title, f"{title}, {name}".strip(", "))
    return figures


def name_of_panel(key: dict[str, Any]) -> str:
    return " ".join(clean(key[name], 40) for name in PANELS if name in key)
