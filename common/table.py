"""Tables of cases, printed row by row while the run goes on."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tabulate

from common.stats import Estimate

# header of a column -> function from a case to a cell
Columns = dict[str, Callable[[Any], str]]


def render(columns: Columns, cases: Sequence[Any], max_width: int | None = None) -> str:
    """Return the cases as a table, a row per case, with as many of the first columns as fit into
    `max_width` characters; None for no limit."""
    return fitted(columns, cases, max_width)[0]


def fitted(columns: Columns, cases: Sequence[Any], max_width: int | None) -> tuple[str, int]:
    """Return what `render` does, and the number of columns that do not fit."""
    rows = [[cell(case) for cell in columns.values()] for case in cases]
    count = columns_that_fit(list(columns), rows, max_width)
    return layout(list(columns)[:count], [row[:count] for row in rows]), len(columns) - count


def columns_that_fit(headers: list[str], rows: Sequence[Sequence[str]], width: int | None) -> int:
    """Return how many of the first columns fit into `width` characters, at least 1."""
    count = len(headers)
    while width is not None and count > 1:
        lines = layout(headers[:count], [row[:count] for row in rows]).splitlines()
        if max(map(len, lines)) <= width:
            break
        count -= 1
    return count


class Table:
    """A table that is printed row by row. Columns may become wider with later rows."""

    def __init__(self, columns: Columns, widest: Sequence[str] = ()) -> None:
        """widest: cells that set the initial width of the first columns. That of the others is the
        width of `Cell.usual`, or of `0.0000`."""
        self.columns = columns
        self.cases: list[Any] = []
        usual = [getattr(column, "usual", "0.0000") for column in columns.values()]
        self.widest = [*widest, *usual[len(widest) :]]
        self.max_width: int | None = None  # maximum line width in characters; None for no limit
        self.count = len(columns)  # number of columns shown

    def reserve_width(self, names: Iterable[str]) -> None:
        """Make the first column wide enough for these names."""
        if self.widest:
            self.widest[0] = max([self.widest[0], *names], key=len)

    @property
    def passed(self) -> list[Any]:
        """Return the cases so far that did not fail."""
        return [case for case in self.cases if not case.failed]

    def rows_of(self, case: Any) -> list[Any]:
        """Return the rows of a case, which are passed to `row`. Subclasses may return several."""
        return [case]

    def row(self, case: Any) -> str:
        """Return the lines for another case, preceded by the header if it is the first. If the
        last columns no longer fit, because a cell is wide, the header is repeated without them."""
        cells, headers = [cell(case) for cell in self.columns.values()], list(self.columns)
        if case.failed:
            cells = [cells[0]] + [""] * (len(cells) - 1)
        self.widest = [max(pair, key=len) for pair in zip(self.widest, cells, strict=True)]
        count = columns_that_fit(headers[: self.count], [self.widest[: self.count]], self.max_width)
        above = [""] if self.cases else []
        # The row `widest` sets the column widths. It is laid out with each case and not printed.
        rows = [self.widest[:count], cells[:count]]
        *header, _, line = layout(headers[:count], rows).splitlines()
        line = f"{cells[0]}  {case.check}" if case.failed else line.rstrip()
        lines = [line] if self.cases and count == self.count else [*above, *header, line]
        self.count = count
        self.cases.append(case)
        return "\n".join(lines)


def layout(headers: Iterable[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out cells as a table. The first column is left-aligned, the others are right-aligned."""
    tabulate.MIN_PADDING = 0  # otherwise tabulate pads each header with two spaces
    headers = list(headers)
    align = ("left",) + ("right",) * (len(headers) - 1)
    return tabulate.tabulate(rows, headers, "simple", colalign=align, disable_numparse=True)


@dataclass(frozen=True)
class Cell:
    """A column function that shows a metric of a case, or `-` if the case does not have it."""

    name: str
    show: Callable[[Any], str]
    usual: str = "0.0000"  # as wide as most cells, to reserve space for later rows

    def __call__(self, case: Any) -> str:
        value = case.metrics.get(self.name)
        return "-" if value is None else self.show(value)


def metric(name: str, scale: float = 1, digits: int = 2) -> Callable[[Any], str]:
    """Return a column that shows a metric, multiplied by `scale`."""
    return Cell(name, lambda value: f"{number_of(value) * scale:z.{digits}f}")


def number_of(value: Any) -> float:
    """Return the value of a metric, without its interval."""
    return float(value.value if isinstance(value, Estimate) else value)


def ends(name: str, scale: float = 1, digits: int = 2) -> Callable[[Any], str]:
    """Return a column that shows the interval of an Estimate: `-5.8 to 93.4`."""

    def text(estimate: Estimate) -> str:
        if estimate.low is None or estimate.high is None:
            return "-"
        return f"{estimate.low * scale:z.{digits}f} to {estimate.high * scale:z.{digits}f}"

    return Cell(name, text, usual=f"{10:.{digits}f} to {10:.{digits}f}")


def relative(name: str) -> Callable[[Any], str]:
    """Return a column that shows the relative width of an Estimate's interval as +-percent. The
    metric may also be such a width itself."""

    def text(value: Any) -> str:
        width = value.relative if isinstance(value, Estimate) else value
        return "-" if width is None else percent(width)

    return Cell(name, text, usual="+-00.0%")


def percent(width: float) -> str:
    """Format the relative width of an interval: `+-2.5%`, or `>100%`."""
    return f"+-{width:.1%}" if width < 1 else ">100%"
