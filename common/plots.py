"""Draws common/figures.py's figures as inline SVG. matplotlib is imported when one is drawn.

Colours are not in the SVG: whatever is drawn in a placeholder colour gets a CSS variable, so that
one drawing reads on a light and on a dark page. Text stays text, without mathtext: `$` is a letter.
"""

import logging
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import Any
from xml.etree import ElementTree

import numpy as np

from common.bandwidth import show_size
from common.figures import SERIES, Bars, Curves, Dots, Figure, Heat, Spreads
from common.report_runs import significant, text

WIDTH = 4.0  # inches: about as wide as a phone shows it, and letters grow with a desktop
LETTERS = 30  # beside a bar
INK, MUTED, PAPER = "#010101", "#010102", "#010103"
MARKERS = "osD^vPX*"
DASHES = ("-", "--", "-.", ":")
SVG = "http://www.w3.org/2000/svg"
LINK = "http://www.w3.org/1999/xlink"

_VARIABLES = {INK: "ink", MUTED: "muted", PAPER: "paper"} | {
    f"#0102{k:02x}": f"s{k}" for k in range(SERIES)
}
_PLACEHOLDER = re.compile("|".join(_VARIABLES))


@dataclass(frozen=True)
class Drawing:
    """svg: markup that holds nothing but drawing. legend: (svg of the swatch, words)."""

    svg: str
    legend: list[tuple[str, str]]


def colour(style: int) -> str:
    return f"#0102{style % SERIES:02x}"


def draw(figure: Figure, number: int) -> Drawing:
    """The figure as SVG; its ids start with the number, so that a page can hold many."""
    with _matplotlib() as new:
        match figure:
            case Curves():
                return _curves(figure, new, number)
            case Bars():
                return _bars(figure, new, number)
            case Dots():
                return _dots(figure, new, number)
            case Spreads():
                return _spreads(figure, new, number)
            case Heat():
                return _heat(figure, new, number)


@contextmanager
def _matplotlib() -> Iterator[Callable[[float], tuple[Any, Any]]]:
    """A function that makes (figure, axes) of a height, whatever the user's matplotlibrc says."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure as Canvas

    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # a letter that a font lacks

    def new(height: float) -> tuple[Any, Any]:
        canvas = Canvas(figsize=(WIDTH, height), layout="constrained")
        FigureCanvasSVG(canvas)
        axes = canvas.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        return canvas, axes

    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            {
                "svg.fonttype": "none",
                "svg.hashsalt": "torchrun-bench",
                "text.parse_math": False,
                "text.color": INK,
                "axes.labelcolor": INK,
                "axes.edgecolor": MUTED,
                "axes.unicode_minus": False,
                "xtick.color": MUTED,
                "ytick.color": MUTED,
                "xtick.labelcolor": INK,
                "ytick.labelcolor": INK,
                "grid.color": MUTED,
                "grid.alpha": 0.3,
                "grid.linewidth": 0.6,
                "font.size": 9,
                "axes.grid": True,
                "axes.axisbelow": True,
                "lines.linewidth": 1.6,
                "lines.markersize": 4.5,
            }
        )
        yield new


def _curves(figure: Curves, new: Callable[[float], Any], number: int) -> Drawing:
    canvas, axes = new(2.6)
    legend = []
    xs = sorted({x for line in figure.lines for x in line.x})
    if figure.log_x:
        axes.set_xscale("log", base=2)
    if figure.log_y:
        axes.set_yscale("log", base=10)
    for line in figure.lines:
        tint = colour(line.style)
        if line.ideal:
            alone = "_" if len(line.x) == 1 else None  # a line of one point is nothing
            axes.plot(
                line.x, line.y, color=tint, linestyle=(0, (1, 2)), linewidth=1.1, marker=alone
            )
            legend.append((_swatch(tint, None, "1 2"), line.label))
            continue
        marker = None if line.formula else MARKERS[line.style % len(MARKERS)]
        dash = DASHES[line.style // 4 % len(DASHES)]
        axes.plot(line.x, line.y, color=tint, linestyle=dash, marker=marker)
        if len(line.low) and any(a != b for a, b in zip(line.low, line.high, strict=True)):
            below = np.subtract(line.y, line.low)
            above = np.subtract(line.high, line.y)
            bars = {"fmt": "none", "ecolor": tint, "elinewidth": 1, "capsize": 2.5}
            axes.errorbar(line.x, line.y, yerr=[below, above], **bars)
        legend.append(
            (_swatch(tint, marker, {"--": "5 2", "-.": "5 2 1 2"}.get(dash, "")), line.label)
        )
    for label, level in figure.levels:
        axes.axhline(level, color=INK, linewidth=1.2, linestyle=(0, (6, 3)))
        legend.append((_swatch(INK, None, "6 3"), label))
    for label, at in figure.marks:
        axes.axvline(at, color=INK, linewidth=1, linestyle=(0, (2, 2)))
        legend.append((_swatch(INK, None, "2 2"), label))
    _ticks(
        axes.xaxis,
        figure.x_ticks or (xs if figure.log_x else None),
        show_size if figure.bytes_x else None,
    )
    _ticks(axes.yaxis, _decades(*axes.get_ylim()) if figure.log_y else None, None)
    axes.set_xlabel(text(figure.x_label, 60))
    axes.set_ylabel(text(figure.y_label, 60))
    return Drawing(_svg(canvas, number, figure.summary), legend)


def _bars(figure: Bars, new: Callable[[float], Any], number: int) -> Drawing:
    canvas, axes = new(_height(figure.names))
    left = np.zeros(len(figure.names))
    places = np.arange(len(figure.names))
    legend = []
    for part in figure.parts:
        tint = colour(part.style)
        axes.barh(places, part.values, 0.7, left=left, color=tint, edgecolor=PAPER, linewidth=0.8)
        left = left + np.asarray(part.values)
        legend.append((_swatch(tint, "block", ""), part.label))
    _names(axes, figure.names)
    axes.set_xlim(left=0)
    _ticks(axes.xaxis, None, None)
    axes.set_xlabel(text(figure.x_label, 60))
    return Drawing(_svg(canvas, number, figure.summary), legend)


def _dots(figure: Dots, new: Callable[[float], Any], number: int) -> Drawing:
    canvas, axes = new(_height(figure.names))
    legend: dict[str, str] = {}
    for place, (y, limits, group) in enumerate(
        zip(figure.values, figure.intervals, figure.groups, strict=True)
    ):
        label, style = group
        tint, marker = colour(style), MARKERS[style % len(MARKERS)]
        if limits is not None:
            axes.plot(limits, [place, place], color=tint, linewidth=1.6, solid_capstyle="butt")
        axes.plot([y], [place], color=tint, marker=marker, linestyle="none", markersize=5.5)
        legend[label] = _swatch(tint, marker, "")
    if figure.reference is not None:
        axes.axvline(figure.reference, color=INK, linewidth=1, linestyle=(0, (2, 2)))
    _names(axes, figure.names)
    _ticks(axes.xaxis, None, None)
    axes.set_xlabel(text(figure.x_label, 60))
    several = [(swatch, label) for label, swatch in legend.items()] if len(legend) > 1 else []
    return Drawing(_svg(canvas, number, figure.summary), several)


def _spreads(figure: Spreads, new: Callable[[float], Any], number: int) -> Drawing:
    canvas, axes = new(2.4)
    legend: dict[str, str] = {}
    names: dict[str, list[int]] = {}
    for place, box in enumerate(figure.boxes):
        label, style = box.group
        tint = colour(style)
        p5, p25, p50, p75, p95 = box.quartiles
        axes.bar(place, p75 - p25, 0.66, bottom=p25, color=tint, alpha=0.25, linewidth=0)
        axes.vlines(place, p5, p25, color=tint, linewidth=1.1)
        axes.vlines(place, p75, p95, color=tint, linewidth=1.1)
        axes.hlines(p50, place - 0.33, place + 0.33, color=tint, linewidth=2.2)
        # the golden ratio spreads any number of points without a pattern
        jitter = [((i * 0.618) % 1 - 0.5) * 0.5 for i in range(len(box.points))]
        axes.plot(
            np.add(place, jitter),
            box.points,
            linestyle="none",
            marker="o",
            markersize=1.8,
            color=tint,
            alpha=0.6,
            markeredgewidth=0,
        )
        legend[label] = _swatch(tint, "block", "")
        names.setdefault(box.name, []).append(place)
    middles = [sum(places) / len(places) for places in names.values()]
    step = math.ceil(len(middles) / 12)
    axes.set_xticks(middles[::step], [text(name, 8) for name in names][::step])
    middle, half = (len(figure.boxes) - 1) / 2, max(2.0, len(figure.boxes) / 2)
    axes.set_xlim(middle - half, middle + half)  # or a lonely box is as wide as the figure
    axes.grid(visible=False, axis="x")
    _ticks(axes.yaxis, None, None)
    axes.set_xlabel(text(figure.x_label, 60))
    axes.set_ylabel(text(figure.y_label, 60))
    several = [(swatch, label) for label, swatch in legend.items()] if len(legend) > 1 else []
    return Drawing(_svg(canvas, number, figure.summary), several)


def _heat(figure: Heat, new: Callable[[float], Any], number: int) -> Drawing:
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap, Normalize

    canvas, axes = new(3.1)
    values = np.asarray(figure.values)
    n = len(values)
    high = figure.high if figure.high > figure.low else figure.low * 1.01
    scale = Normalize(figure.low, high)
    # Yellow is good everywhere. cividis looks alike to all kinds of colour vision; its darkest
    # fifth would not be seen on a dark page.
    colours = colormaps["cividis"](np.linspace(0.2, 1, 256))
    scheme = ListedColormap(colours[::-1] if figure.less_is_better else colours)
    image = axes.imshow(values, cmap=scheme, norm=scale, interpolation="nearest")
    if n <= 8:
        for (row, column), found in np.ndenumerate(values):
            if not np.isnan(found):
                bright = (scale(found) > 0.4) != figure.less_is_better
                tint = "#000000" if bright else "#ffffff"
                where = {"ha": "center", "va": "center", "color": tint, "fontsize": 7.5}
                axes.text(column, row, significant(float(found), 3), **where)
    axes.grid(visible=False)
    step = max(1, math.ceil(n / 12))
    axes.set_xticks(range(0, n, step), [str(i) for i in range(0, n, step)])
    axes.set_yticks(range(0, n, step), [str(i) for i in range(0, n, step)])
    axes.set_xlabel(text(figure.x_label, 60))
    axes.set_ylabel(text(figure.y_label, 60))
    bar = canvas.colorbar(image, ax=axes, shrink=0.85)
    bar.outline.set_visible(False)
    _ticks(bar.ax.yaxis, None, None)
    bar.set_label(text(figure.unit, 20))
    return Drawing(_svg(canvas, number, figure.summary), [])


# -- axes ------------------------------------------------------------------------------------------


def _height(names: Sequence[str]) -> float:
    lines = max(name.count("\n") + 1 for name in names)
    return 0.65 + (0.22 if lines == 1 else 0.34) * max(2, len(names))


def _names(axes: Any, names: Sequence[str]) -> None:
    """Names at the left of horizontal lines, the first on top."""
    shown = ["\n".join(text(part, LETTERS) for part in name.split("\n", 1)) for name in names]
    axes.set_yticks(range(len(names)), shown)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)


def _ticks(axis: Any, places: Sequence[float] | None, show: Callable[[int], str] | None) -> None:
    """Ticks at the places, or where matplotlib has them; with plain numbers, never mathtext."""
    from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

    def plain(at: float, _: Any = None) -> str:
        return show(round(at)) if show else _short(at)

    if places:
        step = math.ceil(len(places) / 7)
        axis.set_ticks(list(places)[::step])
        axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(plain))
    axis.set_minor_formatter(NullFormatter())


def _short(at: float) -> str:
    """`20K` for 20,000: a tick has little room."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "K")):
        if abs(at) >= size:
            return f"{at / (1e3 if letter == 'K' else size):g}{letter}"
    return f"{at:.6g}"


def _decades(low: float, high: float) -> list[float]:
    """Ticks of a logarithmic axis: 1, 10, 100, or with 2 and 5 between where there is room."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps: tuple[float, ...] = (1, 2, 5)
    if len(powers) > 4:
        steps = (1,)
    places = [m * 10.0**p for p in powers for m in steps if low <= m * 10.0**p <= high]
    if len(places) >= 2:
        return places
    from matplotlib.ticker import MaxNLocator

    handy = MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
    return [float(x) for x in handy if low <= x <= high]


# -- SVG -------------------------------------------------------------------------------------------


def _swatch(tint: str, marker: str | None, dashes: str) -> str:
    """What stands before a name in the legend, as SVG."""
    shapes = {
        "o": '<circle cx="14" cy="6" r="3.4"/>',
        "s": '<rect x="10.8" y="2.8" width="6.4" height="6.4"/>',
        "D": '<path d="M14 1.6 18.4 6 14 10.4 9.6 6z"/>',
        "^": '<path d="M14 2 18 9.5H10z"/>',
        "v": '<path d="M14 10 10 2.5H18z"/>',
        "P": '<path d="M12.6 2h2.8v2.6H18v2.8h-2.6V10h-2.8V7.4H10V4.6h2.6z"/>',
        "X": '<path d="M11 2 14 4.6 17 2 18.2 3.4 15.4 6 18.2 8.6 17 10 14 7.4 11 10 9.8 8.6 '
        '12.6 6 9.8 3.4z"/>',
        "*": '<path d="M14 1 15.4 4.8H19L16.2 7 17.2 11 14 8.6 10.8 11 11.8 7 9 4.8H12.6z"/>',
        "block": '<rect x="4" y="1" width="20" height="10"/>',
    }
    name = f"var(--{_VARIABLES[tint]})"
    line = (
        ""
        if marker == "block"
        else (
            f'<path d="M1 6H27" fill="none" stroke="{name}" stroke-width="1.8"'
            + (f' stroke-dasharray="{dashes}"' if dashes else "")
            + "/>"
        )
    )
    return (
        '<svg class="swatch" viewBox="0 0 28 12" width="28" height="12" aria-hidden="true">'
        f'{line}<g fill="{name}">{shapes.get(marker or "", "")}</g></svg>'
    )


def _svg(canvas: Any, number: int, summary: str) -> str:
    """The drawing as an element of a page. summary: read out in its place."""
    buffer = BytesIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    canvas.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    root = ElementTree.fromstring(_valid(buffer.getvalue().decode("utf-8")))
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{SVG}}}metadata", f"{{{SVG}}}style"):
                parent.remove(child)
    prefix = f"f{number}-"
    for element in root.iter():
        for name, found in list(element.attrib.items()):
            if name == "id":
                element.set(name, prefix + found)
            elif name in ("href", f"{{{LINK}}}href") and found.startswith("#"):
                element.set(name, f"#{prefix}{found[1:]}")
            elif name in ("style", "clip-path", "fill", "stroke"):
                value = found.replace("url(#", f"url(#{prefix}")
                value = _PLACEHOLDER.sub(lambda m: f"var(--{_VARIABLES[m[0]]})", value)
                element.set(name, _FONT.sub(r"font: \1 var(--font)", value))
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.set("class", "plot")
    root.set("role", "img")
    root.set("aria-label", text(summary, 700))
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", LINK)
    return ElementTree.tostring(root, encoding="unicode")


_FONT = re.compile(r"font: ([\d.]+px) [^;]+")


def _valid(svg: str) -> str:
    """Without the document type, which a page has already."""
    return svg[svg.index("<svg") :]
