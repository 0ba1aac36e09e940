"""What a figure shows, without how it is drawn: common/plots.py draws these.

Colours are numbers: a series has the same colour, marker and dash in each figure of a benchmark.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

SERIES = 8  # at most in one figure: more colours cannot be told apart


@dataclass(frozen=True)
class Line:
    """A curve. low, high: an interval at each x, or empty."""

    label: str
    style: int
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    ideal: bool = False  # a reference: thin, dashed, without markers
    formula: bool = False  # computed at many x, and not measured there: without markers


@dataclass(frozen=True)
class Curves:
    """Lines over one x."""

    title: str
    summary: str  # for who cannot see it
    x_label: str
    y_label: str
    lines: Sequence[Line]
    bytes_x: bool = False  # ticks as 4K, 1M
    log_x: bool = True
    log_y: bool = True
    x_ticks: Sequence[float] = ()  # otherwise at the x of the lines
    levels: Sequence[tuple[str, float]] = ()  # horizontal lines, as the link's limit
    marks: Sequence[tuple[str, float]] = ()  # vertical lines, as a break-even
    note: str = ""


@dataclass(frozen=True)
class Part:
    """One part of each bar."""

    label: str
    style: int
    values: Sequence[float]


@dataclass(frozen=True)
class Bars:
    """Horizontal bars, each a sum of parts. A name may have a second line."""

    title: str
    summary: str
    x_label: str
    names: Sequence[str]
    parts: Sequence[Part]
    note: str = ""


@dataclass(frozen=True)
class Dots:
    """Values with intervals, one a line. groups: (label, style) of each dot."""

    title: str
    summary: str
    x_label: str
    names: Sequence[str]
    values: Sequence[float]
    intervals: Sequence[tuple[float, float] | None]
    groups: Sequence[tuple[str, int]]
    reference: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Box:
    """The samples of one rank. quartiles: at 5, 25, 50, 75 and 95 %."""

    name: str
    group: tuple[str, int]
    quartiles: Sequence[float]
    points: Sequence[float]


@dataclass(frozen=True)
class Spreads:
    """A box a rank, with some of its samples."""

    title: str
    summary: str
    x_label: str
    y_label: str
    boxes: Sequence[Box]
    note: str = ""


@dataclass(frozen=True)
class Heat:
    """A matrix of colours. values: [n][n], NaN where there is none; low, high: of the scale."""

    title: str
    summary: str
    x_label: str
    y_label: str
    unit: str
    values: Sequence[Sequence[float]]
    low: float
    high: float
    less_is_better: bool
    note: str = ""


Figure = Curves | Bars | Dots | Spreads | Heat


@dataclass(frozen=True)
class Table:
    """Cells as text. failed: the rows that show a failed case."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    failed: frozenset[int] = frozenset()
    note: str = ""


@dataclass(frozen=True)
class Section:
    """What a page says about one thing."""

    title: str
    notes: Sequence[str] = ()
    figures: Sequence[Figure] = field(default_factory=tuple)
    tables: Sequence[Table] = field(default_factory=tuple)
