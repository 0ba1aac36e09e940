"""The figures of a page, by matplotlib: light and dark by the style sheet of the page around them.

FIGURES says what a benchmark has; one without an entry gets the time of each case.
"""

import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from analysis.load import Run, frame, links_of, named
from analysis.show import (
    UNITS,
    canonical,
    case_names,
    clean,
    interval_of,
    is_interval,
    is_number,
    time_unit,
)
from common.cli import show_size
from common.report import Report

SERIES = ("#0072b2", "#c2500a", "#007a5a", "#a8447f", "#8a6d00", "#3b7fa6", "#6b4fa0", "#4a4f55")
INK, LINE = "#1b1f24", "#d5d9de"
VARIABLES = {color: f"var(--s{i})" for i, color in enumerate(SERIES)}
VARIABLES |= {INK: "var(--ink)", LINE: "var(--line)"}
MAX_FIGURES, MAX_BARS, LARGEST_MATRIX = 12, 40, 1024

mpl.rcParams |= {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "torchrun-bench",
    "text.parse_math": False,  # names may hold a $
    "font.family": ["sans-serif"],
    **{name: INK for name in ("text.color", "axes.labelcolor", "xtick.color", "ytick.color")},
    **{"axes.edgecolor": LINE, "grid.color": LINE, "axes.grid": True, "axes.axisbelow": True},
    **{"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False},
    **{"axes.prop_cycle": cycler(color=SERIES), "font.size": 9, "legend.fontsize": 8},
}


@dataclass
class Drawing:
    title: str
    figure: Figure
    note: str = ""
    wide: bool = False  # the whole width of the page

    def svg(self, number: int) -> str:
        """The figure as an element of a page; its ids, unlike those of others, start with f7-."""
        file = io.StringIO()
        self.figure.savefig(file, format="svg", transparent=True, bbox_inches="tight")
        text = re.sub(r"<metadata>.*?</metadata>", "", file.getvalue(), flags=re.DOTALL)
        text = re.sub(r'<g id="[^"]*"', "<g", text[text.index("<svg") :])
        # an id is a hash of the content: definitions that are there twice are alike
        for name in set(re.findall(r' id="([^"]+)"', text)):
            first, mark, rest = text.partition(f' id="{name}"')
            text = first + mark + rest.replace(mark, "")
        text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>f{number}-", text)
        for name in ("width", "height"):  # as wide as the page has room
            text = re.sub(rf'(<svg[^>]*?) {name}="[^"]*"', r"\1", text, count=1)
        return re.sub("|".join(VARIABLES), lambda match: VARIABLES[match[0]], text)


# -- kinds of figures ------------------------------------------------------------------------------


def axes(title: str, height: float = 3.4, **labels: str) -> tuple[Drawing, Axes]:
    figure = Figure(figsize=(5.6, height))
    found = figure.add_subplot()
    found.set(**labels)  # type: ignore[arg-type]
    return Drawing(title, figure), found


def present(table: pd.DataFrame, name: str) -> pd.DataFrame:
    """The rows that have a number of this name."""
    if name not in table:
        return table.iloc[:0]
    return table[np.array([is_number(value) for value in table[name]], dtype=bool)]


def panels(table: pd.DataFrame, names: Sequence[str]) -> Iterator[tuple[str, pd.DataFrame]]:
    """The rows of each figure, and what it is called: one for each value of the key's `names`."""
    names = [name for name in names if name in table]
    if not names:
        yield "", table
        return
    for values, rows in table.groupby(names, sort=False, dropna=False):
        yield " ".join(clean(value, 40) for value in values), rows


def whiskers(rows: pd.DataFrame, name: str, scale: float) -> Any:
    """How far the intervals reach below and above the values, [2, n]."""
    found = []
    for row in rows.to_dict("records"):
        value = row[name] if is_number(row[name]) else 0.0
        low, high = interval_of(name, row) or (value, value)
        found.append([max(0.0, value - low) * scale, max(0.0, high - value) * scale])
    return np.array(found).T


def curves(
    table: pd.DataFrame,
    x: str,
    ys: dict[str, str],
    label: str,
    panel: Sequence[str] = (),
    scale: float = 1,
    ideal: bool = False,
) -> Iterator[Drawing]:
    """y over x with intervals, a curve for whatever else tells the cases of a panel apart.

    ys: names of curves and their columns. ideal: a line from the case of x = 0 on.
    """
    for title, cases in panels(present(table, x), panel):
        rows, zero = cases[cases[x] > 0].sort_values(x), cases[cases[x] == 0]
        drawing, ax = axes(title or label, xlabel=x.replace("_", " "), ylabel=label)
        own = (x, "label", "count")
        keys = [{k: v for k, v in key.items() if k not in own} for key in rows["key"]]
        names = case_names(keys)
        rows = rows.assign(curve=[names[canonical(key)] for key in keys])
        for suffix, column in ys.items():
            for (report, name), part in present(rows, column).groupby(
                ["report", "curve"], sort=False
            ):
                words = [suffix, name * (len(names) > 1), report * (rows["report"].nunique() > 1)]
                low_high = whiskers(part, column, scale)
                drawing.note = "Lines are 95 % intervals." if low_high.any() else drawing.note
                style: dict[str, Any] = {
                    "label": ", ".join(filter(None, words)),
                    "ms": 4,
                    "capsize": 2,
                }
                values = [value * scale for value in part[column]]
                ax.errorbar(part[x].tolist(), values, low_high, fmt="o-", **style)
        first = next(iter(ys.values()))
        if ideal and len(base := present(zero, first)):
            most, one = rows[x].max(), base[first].iloc[0]
            ax.plot([1, most], [one, one * most], "--", color=INK, lw=1, label="no ddp times ranks")
        if x.endswith("_bytes"):
            ax.set(xscale="log", yscale="log")
            ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: show_size(value)))
            ax.xaxis.set_minor_locator(NullLocator())
        ticks = sorted({int(value) for value in rows[x]})
        ax.set_xticks(ticks[:: -(-len(ticks) // 8) or 1])
        if any(ax.get_legend_handles_labels()[1]):
            ax.legend()
        if ax.containers:
            yield drawing


def bars(
    table: pd.DataFrame,
    title: str,
    parts: dict[str, str],
    panel: Sequence[str] = (),
    stacked: bool = True,
) -> Iterator[Drawing]:
    """Seconds of each case: its parts stacked, or side by side with their intervals.

    parts: their names and columns.
    """
    for name, group in panels(table, panel):
        have = {label: c for label, c in parts.items() if len(present(group, c))}
        if not have:
            continue
        numbers = group[list(have.values())].apply(pd.to_numeric, errors="coerce")
        group = group[numbers.notna().any(axis=1)]
        rows = group[:MAX_BARS]
        drawing, ax = axes(f"{title}, {name}" if name else title, 1.2 + 0.3 * len(rows))
        unit = time_unit(numbers.max(axis=None))
        values = numbers.loc[rows.index].fillna(0).clip(lower=0) / UNITS[unit]
        left, height = np.zeros(len(rows)), 0.7 if stacked else 0.7 / len(have)
        for i, (label, column) in enumerate(have.items()):
            at = np.arange(len(rows)) + (0 if stacked else (i - (len(have) - 1) / 2) * height)
            ends = None if stacked else whiskers(rows, column, 1 / UNITS[unit])  # 95 % intervals
            ax.barh(at, values[column], height, left, label=label, xerr=ends, ecolor=INK)
            left = left + values[column] if stacked else left
        names = rows["case"] + (", " + rows["report"] if rows["report"].nunique() > 1 else "")
        ax.set_yticks(range(len(rows)), [clean(name, 60) for name in names])
        ax.set(xlabel=unit, ylim=(len(rows) - 0.4, -0.6))
        ax.grid(axis="y", visible=False)
        if any(have):
            ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=4)
        if len(rows) < len(group):
            drawing.note = f"{len(rows)} of {len(group)} cases are drawn."
        yield drawing


def times(table: pd.DataFrame, column: str, panel: Sequence[str] = ()) -> Iterator[Drawing]:
    """Seconds of each case with their interval."""
    title = column.removesuffix("_s").replace("_", " ")
    return bars(table, title, {"": column}, panel, stacked=False)


# -- the figures of each benchmark -----------------------------------------------------------------

MODEL = ("model", "dtype")


def scaling(table: pd.DataFrame) -> Iterator[Drawing]:
    """ddp_sweep: samples/s over ranks; the rates at both ends of the step's interval."""
    rows = present(table, "samples_per_s")
    if {"step_time_p50_s", "step_time_ci95_s"} <= set(rows):
        work = rows["samples_per_s"] * rows["step_time_p50_s"]
        ends = zip(work, rows["step_time_ci95_s"], strict=True)
        rates = [
            [w / ci[1], w / ci[0]] if is_interval(ci) and ci[0] > 0 else None for w, ci in ends
        ]
        rows = rows.assign(samples_per_s_ci95=rates)
    return curves(rows, "world_size", {"": "samples_per_s"}, "samples/s", MODEL, ideal=True)


def exposed(table: pd.DataFrame) -> Iterator[Drawing]:
    """parallel_sweep: computing, and what communication of each axis adds."""
    columns = [name for name in table if re.fullmatch(r"exposed_\w+_s", str(name))]
    parts = {"compute": "compute_s"} | {f"exposed {c[8:-2]}": c for c in columns if "ci95" not in c}
    return bars(table, "Step", parts, MODEL)


BUSBW = {
    "out of place": "out_of_place_busbw_gb_per_s",
    "in place": "in_place_busbw_gb_per_s",
}
STEP = {
    "local compute": "local_compute_p50_s",
    "exposed communication": "exposed_communication_s",
}
SAVE = {"blocked": "blocked_s", "stall": "stall_s", "upload": "upload_s"}
LOAD = {"cold": "load_cold_s", "warm": "load_warm_s"}
STORAGE = ("path", "strategy")
ROUND_TRIP = {"": "round_trip_p50_s"}
Figures = Callable[[pd.DataFrame], Iterator[Drawing]]
FIGURES: dict[str, list[Figures]] = {
    "ddp_sweep": [scaling, lambda t: bars(t, "Where a step's time goes", STEP, MODEL)],
    "collectives": [lambda t: curves(t, "size_bytes", BUSBW, "busbw (GB/s)", ("collective",))],
    "nccl-tests": [lambda t: curves(t, "size_bytes", BUSBW, "busbw (GB/s)", ("collective",))],
    "compile_sweep": [lambda t: times(t, "step_time_p50_s", MODEL)],
    "rpc_latency": [
        lambda t: curves(t, "size_bytes", ROUND_TRIP, "round trip (us)", ("operation",), 1e6)
    ],
    "parallel_sweep": [exposed],
    "checkpoint_sweep": [
        lambda t: bars(t, "A save", SAVE, STORAGE, stacked=False),
        lambda t: bars(t, "A load", LOAD, STORAGE, stacked=False),
    ],
}


def draw(runs: Sequence[Run]) -> list[Drawing]:
    """The figures of the reports of one benchmark."""
    if runs[0].report.benchmark == "p2p_matrix":
        found = [link_figure(run.report, run.label) for run in runs]
        return [drawing for drawing in found if drawing]
    table = frame(runs)
    if table.empty:
        return []
    cases = list(named(runs))
    table["key"] = [row.key for _, _, row in cases]
    table["report"] = [run.label for run, _, _ in cases]
    table = table[[not row.failed for _, _, row in cases]]
    own = FIGURES.get(runs[0].report.benchmark, [])
    drawings = [drawing for make in own for drawing in make(table)]
    if not drawings:
        count = {n: len(present(table, n)) for n in table if str(n).endswith(("_p50_s", "time_s"))}
        drawings = list(times(table, max(count, key=lambda name: count[name])))
    return drawings[:MAX_FIGURES]


def link_figure(report: Report, label: str = "") -> Drawing | None:
    """Heat maps of a report of p2p_matrix; None where it has no links."""
    links = [link for case in report.cases for link in links_of(case.metrics)]
    links = [link for link in links if max(link[:2]) < LARGEST_MATRIX]
    if not links:
        return None
    n = int(1 + max(max(link[:2]) for link in links))
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    kinds = (("latency (us)", 2, 2), ("bandwidth (GB/s)", 3, 4), ("both ways (GB/s)", 5, 5))
    for ax, (name, there, back) in zip(figure.subplots(1, 3), kinds, strict=True):
        values = np.full((n, n), np.nan)
        for a, b, *costs in links:
            values[a, b], values[b, a] = costs[there - 2], costs[back - 2]
        image = ax.imshow(values, cmap="viridis_r" if there == 2 else "viridis")  # yellow is good
        ax.set(title=name, xlabel="receives", ylabel="sends")
        ax.set_xticks(range(0, n, -(-n // 16)))
        ax.set_yticks(range(0, n, -(-n // 16)))
        ax.grid(visible=False)
        for (a, b), value in np.ndenumerate(values) if n <= 8 else ():
            if not np.isnan(value):
                shade = image.norm(value) if there > 2 else 1 - image.norm(value)
                color = "black" if shade > 0.5 else "white"
                ax.text(b, a, f"{value:.3g}", ha="center", va="center", color=color, size=8)
        figure.colorbar(image, ax=ax, shrink=0.7)
    title = f"Links, {label}" if label else "Links"
    return Drawing(title, figure, "Yellow is good, dark is bad.", True)


def link_heatmap(report: Report, path: str) -> None:
    """Draw the links of a report of p2p_matrix to a file, .png, .svg or .pdf."""
    drawing = link_figure(report)
    if drawing is None:
        raise ValueError("there are no links to draw")
    drawing.figure.savefig(path, dpi=150)


def plot_history(groups: Sequence[Sequence[Run]], path: str) -> None:
    """Draw each case over time to a file: an axes a benchmark and machine, each case relative to
    its first run."""
    groups = [runs for runs in groups if any(run.rows for run in runs)]
    figure = Figure(figsize=(9, 3.6 * max(1, len(groups))), layout="constrained")
    for ax, runs in zip(np.ravel(figure.subplots(len(groups), 1)), groups, strict=True):
        table = frame(runs)
        times = pd.to_datetime(table["started_at"], utc=True, format="ISO8601", errors="coerce")
        table = table.assign(started_at=times).dropna(subset="time_s")
        for name, rows in list(table.groupby("case", sort=False))[:20]:
            relative = rows["time_s"] / rows["time_s"].iloc[0]
            ax.plot(rows["started_at"], relative, "o-", ms=3, label=clean(name, 60))
        ax.set(title=clean(runs[0].report.benchmark, 60), ylabel="time / first run's")
        ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=120)
