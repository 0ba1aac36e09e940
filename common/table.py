"""Tables, printed row by row as the cases come."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import tabulate

from common.report import Case, Estimate

Columns = dict[str, Callable[[Case], str]]  # a column's header -> a case's cell


def render(
    columns: Columns, cases: Sequence[Case], room: int | None = None, omitted_rows: str = ""
) -> str:
    """The cases as a table, one row per case, with the first columns that fit; below it a line
    that says what is not shown.

    room: maximum line width in characters; None for no limit. omitted_rows: rows that the caller
    has left out, such as `3 trainers`.
    """
    text, omitted_columns = fitted(columns, cases, room)
    return "\n".join([text, *omitted(omitted_columns, omitted_rows)])


def fitted(columns: Columns, cases: Sequence[Case], room: int | None) -> tuple[str, int]:
    """The same without the line below it, and the number of columns that do not fit."""
    rows = [cells_of(columns, case) for case in cases]
    count = columns_that_fit(list(columns), rows, room)
    return layout(list(columns)[:count], [row[:count] for row in rows]), len(columns) - count


def omitted(columns: int, rows: str = "") -> list[str]:
    """[`# not shown: 3 columns; --wide prints all`]; [] if nothing was left out."""
    parts = [f"{columns} column{'s' if columns > 1 else ''}"] if columns else []
    parts += [rows] if rows else []
    return [f"# not shown: {', '.join(parts)}; --wide prints all"] if parts else []


def columns_that_fit(headers: list[str], rows: Sequence[Sequence[str]], room: int | None) -> int:
    """Number of columns, counted from the first, that fit into `room` characters; at least 1."""
    count = len(headers)
    while room is not None and count > 1:
        lines = layout(headers[:count], [row[:count] for row in rows]).splitlines()
        if max(map(len, lines)) <= room:
            break
        count -= 1
    return count


def cells_of(columns: Columns, case: Case) -> list[str]:
    return [cell(case) for cell in columns.values()]


class Table:
    """A table that is printed row by row. Its columns may become wider with later rows."""

    def __init__(self, columns: Columns, widest: Sequence[str] = ()) -> None:
        """widest: a wide cell for each of the first columns; the width of the others is at first
        that of `Cell.usual`, or of `0.0000`."""
        self.columns = columns
        self.cases: list[Case] = []
        usual = [getattr(column, "usual", "0.0000") for column in columns.values()]
        self.widest = [*widest, *usual[len(widest) :]]
        self.room: int | None = None  # maximum line width in characters; None for no limit
        self.count = len(columns)  # number of columns that are shown

    def make_room(self, names: Iterable[str]) -> None:
        """Make the first column wide enough for the rows of these names."""
        if self.widest:
            self.widest[0] = max([self.widest[0], *names], key=len)

    @property
    def passed(self) -> list[Case]:
        """The cases so far that did not fail, those of a resumed report among them."""
        return [case for case in self.cases if not case.failed]

    def rows_of(self, case: Case) -> list[Case]:
        """The rows of a case that was measured, as `row` is called with them: a table may have
        several for it."""
        return [case]

    def row(self, case: Case) -> str:
        """The lines for one more case, with the header before the first.

        A cell that is wider than expected may leave no room for the last columns. Then the header
        is repeated without them.
        """
        cells, headers = cells_of(self.columns, case), list(self.columns)
        if case.failed:
            cells = [cells[0]] + [""] * (len(cells) - 1)
        self.widest = [max(pair, key=len) for pair in zip(self.widest, cells, strict=True)]
        count = columns_that_fit(headers[: self.count], [self.widest[: self.count]], self.room)
        above = [""] if self.cases else []
        # The row of `widest` only sets the widths. It is laid out with each case and left out.
        rows = [self.widest[:count], cells[:count]]
        *header, _, line = layout(headers[:count], rows).splitlines()
        line = f"{cells[0]}  {case.check}" if case.failed else line.rstrip()
        lines = [line] if self.cases and count == self.count else [*above, *header, line]
        self.count = count
        self.cases.append(case)
        return "\n".join(lines)


def layout(headers: Iterable[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of cells. The first column is aligned to the left, the others to the right."""
    tabulate.MIN_PADDING = 0  # otherwise each header gets two blanks
    headers = list(headers)
    align = ("left",) + ("right",) * (len(headers) - 1)
    return tabulate.tabulate(rows, headers, "simple", colalign=align, disable_numparse=True)


@dataclass(frozen=True)
class Cell:
    """A column's function from a case to its cell: a metric, or `-` if the case lacks it."""

    name: str
    show: Callable[[Any], str]
    usual: str = "0.0000"  # as wide as most cells: room for the rows to come

    def __call__(self, case: Case) -> str:
        value = case.metrics.get(self.name)
        return "-" if value is None else self.show(value)


def metric(name: str, scale: float = 1, digits: int = 2) -> Callable[[Case], str]:
    """A cell that shows a metric of the case, times `scale`."""
    return Cell(name, lambda value: f"{number_of(value) * scale:.{digits}f}")


def number_of(value: Any) -> float:
    return float(value.value if isinstance(value, Estimate) else value)


def ends(name: str, scale: float = 1, digits: int = 2) -> Callable[[Case], str]:
    """A cell that shows the two ends of an estimate's interval, such as `-5.8 to 93.4`."""

    def text(estimate: Estimate) -> str:
        if estimate.low is None or estimate.high is None:
            return "-"
        return f"{estimate.low * scale:.{digits}f} to {estimate.high * scale:.{digits}f}"

    return Cell(name, text, usual=f"{10:.{digits}f} to {10:.{digits}f}")


def relative(name: str) -> Callable[[Case], str]:
    """A cell that shows how far an estimate's interval reaches from its value, or a metric that is
    such a share itself, as +-percent."""

    def text(value: Any) -> str:
        width = value.relative if isinstance(value, Estimate) else value
        return "-" if width is None else percent(width)

    return Cell(name, text, usual="+-00.0%")


def percent(width: float) -> str:
    """How far an interval reaches from its value, as a share of it."""
    return f"+-{width:.1%}" if width < 1 else ">100%"


def percentile_columns(
    prefix: str, unit: str, rate_unit: str, amount: Callable[[Case], float]
) -> Columns:
    """p50, p75, p90 and p95 of a time in seconds, each with the rate that follows from it.

    prefix: the metrics are `{prefix}_p50_s`, or `{prefix}_s` if that is the median,
    `{prefix}_p75_s` and so on. amount: what is done in that time, such as the samples of a step;
    the rate is amount / time.
    """

    def value_of(name: str, case: Case) -> Any:
        is_median = name.endswith("_p50_s") and name not in case.metrics
        return case.metrics.get(f"{prefix}_s" if is_median else name)

    def time(name: str, case: Case) -> str:
        value = value_of(name, case)
        digits = digits_beside(case.metrics.get(f"{prefix}_s"))
        return "-" if value is None else f"{number_of(value):.{digits}f}"

    def rate(name: str, case: Case) -> str:
        value = value_of(name, case)
        return f"{amount(case) / number_of(value):.1f}" if value else "-"

    columns: Columns = {}
    for q in (50, 75, 90, 95):
        name = f"{prefix}_p{q}_s"
        columns |= {f"p{q}\n{unit}": partial(time, name)}
        columns |= {f"p{q}\n{rate_unit}": partial(rate, name)}
    return columns


def digits_beside(value: Any) -> int:
    """Digits after the point: two or three count; three if the uncertainty leaves room for it."""
    size = abs(number_of(value)) if value else 1.0
    uncertainty = size * ((value.relative if isinstance(value, Estimate) else None) or 0.0)
    for digits in range(9):
        last = 10.0**-digits  # what the last digit stands for
        if size >= 100 * last or (size >= 10 * last and last <= uncertainty / 2):
            return digits
    return 9
