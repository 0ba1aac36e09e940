"""Tables, printed row by row as the cases come."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import tabulate

from common.report import Case, Estimate

Columns = dict[str, Callable[[Case], str]]  # a column's header -> a case's cell


def render(columns: Columns, cases: Sequence[Case]) -> str:
    """The cases as a table, a row each."""
    return layout(columns, [cells_of(columns, case) for case in cases])


def cells_of(columns: Columns, case: Case) -> list[str]:
    return [cell(case) for cell in columns.values()]


class Table:
    """A table that is printed row by row. Its columns may get wider on the way."""

    def __init__(self, columns: Columns, widest: Sequence[str] = ()) -> None:
        """widest: a wide cell for each of the first columns; the others have room for `0.0000`, or
        for `+-00.0%`."""
        self.columns = columns
        self.cases: list[Case] = []
        usual = ["+-00.0%" if "95% ci" in header else "0.0000" for header in columns]
        self.widest = [*widest, *usual[len(widest) :]]

    @property
    def passed(self) -> list[Case]:
        """The cases so far that did not fail, those of a resumed report among them."""
        return [case for case in self.cases if not case.failed]

    def row(self, case: Case) -> str:
        """The lines for one more case, with the header before the first."""
        cells = cells_of(self.columns, case)
        if case.failed:
            cells = [cells[0]] + [""] * (len(cells) - 1)
        self.widest = [max(pair, key=len) for pair in zip(self.widest, cells, strict=True)]
        # The row of `widest` only sets the widths. It is laid out with each case and left out.
        *header, _, line = layout(self.columns, [self.widest, cells]).splitlines()
        line = f"{cells[0]}  {case.check}" if case.failed else line.rstrip()
        self.cases.append(case)
        return "\n".join([*header, line]) if len(self.cases) == 1 else line


def layout(headers: Iterable[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of cells. The first column is aligned to the left, the others to the right."""
    tabulate.MIN_PADDING = 0  # otherwise each header gets two blanks
    headers = list(headers)
    align = ("left",) + ("right",) * (len(headers) - 1)
    return tabulate.tabulate(rows, headers, "simple", colalign=align, disable_numparse=True)


def cell(name: str, show: Callable[[Any], str]) -> Callable[[Case], str]:
    """A cell that shows a metric of the case; `-` where it has none."""

    def text(case: Case) -> str:
        value = case.metrics.get(name)
        return "-" if value is None else show(value)

    return text


def metric(name: str, scale: float = 1, digits: int = 2) -> Callable[[Case], str]:
    """A cell that shows a metric of the case, times `scale`."""
    return cell(name, lambda value: f"{number_of(value) * scale:.{digits}f}")


def number_of(value: Any) -> float:
    return float(value.value if isinstance(value, Estimate) else value)


def ends(name: str, scale: float = 1, digits: int = 2) -> Callable[[Case], str]:
    """A cell that shows the two ends of an estimate's interval, such as `-5.8 to 93.4`."""

    def text(estimate: Estimate) -> str:
        if estimate.low is None or estimate.high is None:
            return "-"
        return f"{estimate.low * scale:.{digits}f} to {estimate.high * scale:.{digits}f}"

    return cell(name, text)


def relative(name: str) -> Callable[[Case], str]:
    """A cell that shows how far an estimate's interval reaches from its value, or a metric that is
    such a share itself, as +-percent."""

    def text(value: Any) -> str:
        width = value.relative if isinstance(value, Estimate) else value
        if width is None:
            return "-"
        return f"+-{width:.1%}" if width < 1 else ">100%"

    return cell(name, text)


def percentile_columns(
    prefix: str, unit: str, rate_unit: str, amount: Callable[[Case], float]
) -> Columns:
    """p50, p75, p90 and p95 of a time in seconds, each with the rate that follows from it.

    prefix: the metrics are `{prefix}_s`, `{prefix}_p75_s` and so on. amount:
    what is done in that time, such as the samples of a step; the rate is amount / time.
    """

    def rate(name: str, case: Case) -> str:
        value = case.metrics.get(name)
        return f"{amount(case) / number_of(value):.1f}" if value else "-"

    columns: Columns = {}
    for q in (50, 75, 90, 95):
        name = f"{prefix}_s" if q == 50 else f"{prefix}_p{q}_s"
        columns |= {f"p{q}\n{unit}": metric(name, digits=4)}
        columns |= {f"p{q}\n{rate_unit}": partial(rate, name)}
    return columns
