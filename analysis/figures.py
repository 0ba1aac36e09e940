"""The figures of a page, by matplotlib: light and dark by the style sheet of the page around them.

A benchmark without figures of its own gets the time of each case with its interval.
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

from analysis.load import Run, frame
from analysis.show import (
    canonical,
    case_names,
    clean,
    interval_of,
    is_interval,
    is_number,
    show_time,
)
from common.cli import show_size
from common.report import Report

SERIES = ("#0072b2", "#c2500a", "#007a5a", "#a8447f", "#8a6d00", "#3b7fa6", "#6b4fa0", "#4a4f55")
INK, LINE = "#1b1f24", "#d5d9de"
VARIABLES = {color: f"var(--s{i})" for i, color in enumerate(SERIES)}
VARIABLES |= {INK: "var(--ink)", LINE: "var(--line)"}
MAX_FIGURES, MAX_BARS, LARGEST_MATRIX = 12, 40, 1024
# of a row of p2p_matrix's links: a, b, latency (us), a -> b, b -> a, both at once (GB/s)
LINKS = (("latency (us)", 2, 2), ("bandwidth (GB/s)", 3, 4), ("both ways (GB/s)", 5, 5))

mpl.rcParams |= {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "torchrun-bench",
    "text.parse_math": False,  # names may hold a $
    "font.family": ["sans-serif"],
    **{name: INK for name in ("text.color", "axes.labelcolor", "xtick.color", "ytick.color")},
    **{"axes.edgecolor": LINE, "grid.color": LINE, "axes.grid": True, "axes.axisbelow": True},
    **{"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False},
    "axes.prop_cycle": cycler(color=SERIES),
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
        text = text[text.index("<svg") :]
        text = re.sub(r'<g id="[^"]*"', "<g", text)
        # an id is a hash of the content: definitions that are there twice are alike
        for name in set(re.findall(r' id="([^"]+)"', text)):
            first, mark, rest = text.partition(f' id="{name}"')
            text = first + mark + rest.replace(mark, "")
        text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>f{number}-", text)
        for name in ("width", "height"):  # as wide as the page has room
            text = re.sub(rf'(<svg[^>]*?) {name}="[^"]*"', r"\1", text, count=1)
        return re.sub("|".join(VARIABLES), lambda match: VARIABLES[match[0]], text)


def axes(title: str, height: float = 3.4, **labels: str) -> tuple[Drawing, Axes]:
    figure = Figure(figsize=(5.6, height))
    found = figure.add_subplot()
    found.set(**labels)  # type: ignore[arg-type]
    return Drawing(title, figure), found


def present(table: pd.DataFrame, name: str) -> pd.DataFrame:
    """The rows that have a number of this name."""
    if name not in table:
        return table.iloc[:0]
    return table[[is_number(value) for value in table[name]]]


def bounds(rows: pd.DataFrame, name: str, scale: float) -> Any:
    """How far the intervals reach below and above the values, [2, n]."""
    found = []
    for row in rows.to_dict("records"):
        ci = interval_of(name, row) or (row[name], row[name])
        found.append([max(0.0, row[name] - ci[0]) * scale, max(0.0, ci[1] - row[name]) * scale])
    return np.array(found).T


def panels(table: pd.DataFrame, names: Sequence[str]) -> Iterator[tuple[str, pd.DataFrame]]:
    names = [name for name in names if name in table]
    if not names:
        yield "", table
        return
    for values, rows in table.groupby(names, sort=False, dropna=False):
        yield " ".join(clean(value, 40) for value in values), rows


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
    for title, rows in panels(present(table, x), panel):
        drawing, ax = axes(title or label, xlabel=x.replace("_", " "), ylabel=label)
        own = (x, "label", "count")
        keys = [{k: v for k, v in key.items() if k not in own} for key in rows["key"]]
        names = case_names([key for key, size in zip(keys, rows[x], strict=True) if size > 0])
        curve = [names.get(canonical(key), "") for key in keys]
        for suffix, column in ys.items():
            found = present(rows.assign(curve=curve), column)
            for (report, name), part in found.groupby(["report", "curve"], sort=False):
                part = part[part[x] > 0].sort_values(x)
                words = [suffix] if suffix else []
                words += [str(name)] if len(set(names.values())) > 1 else []
                words += [str(report)] if rows["report"].nunique() > 1 else []
                low_high = bounds(part, column, scale) if len(part) else None
                xs, values = part[x].tolist(), (part[column] * scale).tolist()
                ax.errorbar(xs, values, low_high, fmt="o-", ms=4, capsize=2, label=", ".join(words))
        zero = present(rows[rows[x] == 0], next(iter(ys.values())))
        if ideal and len(zero):
            most, one = rows[x].max(), zero[next(iter(ys.values()))].iloc[0] * scale
            ax.plot([1, most], [one, one * most], "--", color=INK, lw=1, label="no ddp times ranks")
        if x.endswith("_bytes"):
            ax.set(xscale="log", yscale="log")
            ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            ticks = sorted(set(rows[x]))
            ax.set_xticks(ticks[:: -(-len(ticks) // 8)])
            ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: show_size(value)))
            ax.xaxis.set_minor_locator(NullLocator())
        elif x == "world_size":
            ax.set_xticks(sorted({int(value) for value in rows[x] if value > 0}))
        if any(ax.get_legend_handles_labels()[1]):
            ax.legend(fontsize=8)
        if ax.lines or ax.containers:
            some = any(bounds(present(rows, y), y, 1).any() for y in ys.values())
            drawing.note = "Bars are 95 % intervals." if some else ""
            yield drawing


def bars(
    table: pd.DataFrame,
    title: str,
    parts: dict[str, str],
    panel: Sequence[str] = (),
    stacked: bool = True,
) -> Iterator[Drawing]:
    """Seconds of each case, its parts stacked or side by side. parts: names and columns."""
    for name, group in panels(table, panel):
        have = {label: c for label, c in parts.items() if len(present(group, c))}
        if not have:
            continue
        rows = group[group[list(have.values())].notna().any(axis=1)][:MAX_BARS]
        drawing, ax = axes(f"{title}, {name}" if name else title, 1.2 + 0.3 * len(rows))
        scale, unit = unit_of(rows[list(have.values())].to_numpy(float, na_value=0).max())
        left = np.zeros(len(rows))
        for i, (label, column) in enumerate(have.items()):
            widths = rows[column].fillna(0).clip(lower=0).to_numpy(float) / scale
            height = 0.7 if stacked else 0.7 / len(have)
            at = np.arange(len(rows)) + (0 if stacked else (i - (len(have) - 1) / 2) * height)
            ax.barh(at, widths, height, left if stacked else None, label=label)
            left += widths
        finish_rows(ax, rows, unit)
        ax.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=4)
        yield drawing


def dots(table: pd.DataFrame, column: str, panel: Sequence[str] = ()) -> Iterator[Drawing]:
    """A value of each case with its interval."""
    for name, group in panels(present(table, column), panel):
        rows = group[:MAX_BARS]
        words = column.removesuffix("_s").replace("_", " ")
        drawing, ax = axes(f"{words}, {name}" if name else words, 1.0 + 0.28 * len(rows))
        scale, unit = unit_of(rows[column].max()) if column.endswith("_s") else (1.0, "")
        values, low_high = rows[column] / scale, bounds(rows, column, 1 / scale)
        ax.errorbar(values, range(len(rows)), xerr=low_high, fmt="o", ms=5, capsize=3)
        finish_rows(ax, rows, unit)
        drawing.note = f"Bars are 95 % intervals. {len(rows)} of {len(group)} cases are drawn."
        yield drawing


def unit_of(seconds: float) -> tuple[float, str]:
    unit = show_time(float(seconds)).rpartition(" ")[2]
    return {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}[unit], unit


def finish_rows(ax: Axes, rows: pd.DataFrame, unit: str) -> None:
    several = rows["report"].nunique() > 1
    names = [
        f"{r['case']}, {r['report']}" if several else r["case"] for r in rows.to_dict("records")
    ]
    ax.set_yticks(range(len(rows)), [clean(name, 60) for name in names], fontsize=8)
    ax.set(xlabel=unit, ylim=(len(rows) - 0.4, -0.6))
    ax.set_xlim(left=0)
    ax.grid(axis="y", visible=False)


def exposed(table: pd.DataFrame) -> Iterator[Drawing]:
    """parallel_sweep: computing, and what communication of each axis adds."""
    columns = [name for name in table if re.fullmatch(r"exposed_\w+_s", str(name))]
    parts = {"compute": "compute_s"} | {f"exposed {c[8:-2]}": c for c in columns if "ci95" not in c}
    return bars(table, "Step", parts, ("model", "dtype"))


def default(table: pd.DataFrame) -> Iterator[Drawing]:
    """The first median, else the time, of each case."""
    medians = [name for name in table if str(name).endswith("_p50_s") and len(present(table, name))]
    return dots(table, medians[0] if medians else "time_s")


MODEL = ("model", "dtype")


def scaling(table: pd.DataFrame) -> Iterator[Drawing]:
    """ddp_sweep: samples/s over ranks; the rates at both ends of the step's interval."""
    rows = present(table, "samples_per_s")
    if "step_time_ci95_s" in rows:
        work = rows["samples_per_s"] * rows["step_time_p50_s"]
        ends = zip(work, rows["step_time_ci95_s"], strict=True)
        rates = [
            [w / ci[1], w / ci[0]] if is_interval(ci) and ci[0] > 0 else None for w, ci in ends
        ]
        rows = rows.assign(samples_per_s_ci95=rates)
    return curves(rows, "world_size", {"": "samples_per_s"}, "samples/s", MODEL, ideal=True)


BUSBW = {
    "out of place": "out_of_place_busbw_gb_per_s",
    "in place": "in_place_busbw_gb_per_s",
}
STEP = {
    "local compute": "local_compute_p50_s",
    "exposed communication": "exposed_communication_s",
}
SAVE = {"blocked": "blocked_s", "stall": "stall_s"}
ROUND_TRIP = {"": "round_trip_p50_s"}
Figures = Callable[[pd.DataFrame], Iterator[Drawing]]
FIGURES: dict[str, list[Figures]] = {
    "ddp_sweep": [scaling, lambda t: bars(t, "Where a step's time goes", STEP, MODEL)],
    "collectives": [lambda t: curves(t, "size_bytes", BUSBW, "busbw (GB/s)", ("collective",))],
    "nccl-tests": [lambda t: curves(t, "size_bytes", BUSBW, "busbw (GB/s)", ("collective",))],
    "compile_sweep": [lambda t: dots(t, "step_time_p50_s", MODEL)],
    "rpc_latency": [
        lambda t: curves(t, "size_bytes", ROUND_TRIP, "round trip (us)", ("operation",), 1e6)
    ],
    "parallel_sweep": [exposed],
    "checkpoint_sweep": [lambda t: bars(t, "A save", SAVE, stacked=False)],
}


def draw(runs: Sequence[Run], labels: dict[str, str]) -> list[Drawing]:
    """The figures of the reports of one benchmark. labels: of the reports, by path."""
    if runs[0].report.benchmark == "p2p_matrix":
        found = [link_figure(run.report, labels[run.path]) for run in runs]
        return [drawing for drawing in found if drawing]
    table = frame(runs)
    if table.empty:
        return []
    table["key"] = [row.key for run in runs for row in run.rows.values()]
    table["report"] = [labels[path] for path in table["report"]]
    table = table[[not check.startswith("failed") for check in table["check"]]]
    own = FIGURES.get(runs[0].report.benchmark, [])
    drawings = [drawing for make in own for drawing in make(table)]
    return (drawings or list(default(table)))[:MAX_FIGURES]


def link_figure(report: Report, label: str = "") -> Drawing | None:
    """Heat maps of a report of p2p_matrix; None where it has no links."""
    links = [link for case in report.cases for link in case.metrics.get("links") or ()]
    links = [
        x for x in links if len(x) == 6 and all(map(is_number, x)) and max(x[:2]) < LARGEST_MATRIX
    ]
    if not links:
        return None
    n = 1 + max(max(link[:2]) for link in links)
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    for ax, (name, there, back) in zip(figure.subplots(1, 3), LINKS, strict=True):
        values = np.full((n, n), np.nan)
        for link in links:
            values[link[0], link[1]], values[link[1], link[0]] = link[there], link[back]
        colors = "viridis_r" if there == 2 else "viridis"  # yellow is good
        mesh = ax.pcolormesh(values, cmap=colors, rasterized=n > 64)
        ax.set(title=name, xlabel="receives", ylabel="sends", aspect="equal", ylim=(n, 0))
        ax.set_xticks(np.arange(n)[:: -(-n // 16)] + 0.5, range(0, n, -(-n // 16)))
        ax.set_yticks(np.arange(n)[:: -(-n // 16)] + 0.5, range(0, n, -(-n // 16)))
        ax.grid(visible=False)
        for (a, b), value in np.ndenumerate(values) if n <= 8 else ():
            if not np.isnan(value):
                shade = mesh.norm(value) if there > 2 else 1 - mesh.norm(value)
                color = "black" if shade > 0.5 else "white"
                ax.text(
                    b + 0.5, a + 0.5, f"{value:.3g}", ha="center", va="center", color=color, size=8
                )
        figure.colorbar(mesh, ax=ax, shrink=0.7)
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
        table = table[table["time_s"].notna()]
        for name, rows in list(table.groupby("case", sort=False))[:20]:
            times = pd.to_datetime(rows["started_at"], utc=True, format="ISO8601", errors="coerce")
            ax.plot(
                times, rows["time_s"] / rows["time_s"].iloc[0], "o-", ms=3, label=clean(name, 60)
            )
        ax.set(title=clean(runs[0].report.benchmark, 60), ylabel="time / first run's")
        ax.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=120)
