"""Tables by tabulate, row by row as the cases come, and what is being done on a terminal."""

import sys
from collections.abc import Callable, Iterable, Sequence

import tabulate
from tqdm import tqdm

from common.report import Case

Columns = dict[str, Callable[[Case], str]]  # a column's header -> a case's cell
tabulate.MIN_PADDING = 0  # or each header gets two blanks
tqdm.monitor_interval = 0  # no thread beside the timed ones


def render(columns: Columns, cases: Sequence[Case]) -> str:
    """The cases as a table, a row each."""
    return layout(columns, [[cell(case) for cell in columns.values()] for case in cases])


class Table:
    """A table that is printed row by row: each column is as wide as its header and `widest`."""

    def __init__(self, columns: Columns, widest: Sequence[str] = ()) -> None:
        self.columns = columns
        self.widest = [*widest, *["0.0000"] * (len(columns) - len(widest))]
        self.rows = 0

    def row(self, case: Case) -> str:
        """The lines for one more case, with the header before the first."""
        cells = [cell(case) for cell in self.columns.values()]
        if case.failed:
            cells = [cells[0], *[""] * (len(cells) - 1)]
        *header, _, line = layout(self.columns, [self.widest, cells]).splitlines()
        if case.failed:
            line = f"{cells[0]}  {case.check}"
        self.rows += 1
        return "\n".join([*(header if self.rows == 1 else []), line.rstrip()])


def layout(headers: Iterable[str], rows: Sequence[Sequence[str]]) -> str:
    headers = list(headers)
    align = ("left",) + ("right",) * (len(headers) - 1)
    return tabulate.tabulate(
        rows, headers, tablefmt="simple", colalign=align, disable_numparse=True
    )


def metric(name: str, scale: float = 1, digits: int = 2) -> Callable[[Case], str]:
    """A cell with a metric of the case times `scale`; `-` where it has none."""

    def cell(case: Case) -> str:
        value = case.metrics.get(name)
        return "-" if value is None else f"{value * scale:.{digits}f}"

    return cell


def half_width(name: str, scale: float = 1, digits: int = 2) -> Callable[[Case], str]:
    """A cell with half the width of an interval of the case."""

    def cell(case: Case) -> str:
        interval = case.metrics.get(name)
        return "-" if interval is None else f"{(interval[1] - interval[0]) / 2 * scale:.{digits}f}"

    return cell


def relative(name: str) -> Callable[[Case], str]:
    """A cell with a relative half width, as +-percent."""

    def cell(case: Case) -> str:
        width = case.metrics.get(name)
        return "-" if width is None else f"+-{width:.1%}" if width < 1 else ">100%"

    return cell


def percentile_columns(
    prefix: str, unit: str, rate_unit: str, work: Callable[[Case], float]
) -> Columns:
    """p50, p75, p90 and p95 of a time in seconds, each with the rate that follows from it."""
    columns: Columns = {}
    for q in (50, 75, 90, 95):

        def rate(case: Case, name: str = f"{prefix}_p{q}_s") -> str:
            seconds = case.metrics.get(name)
            return f"{work(case) / seconds:.1f}" if seconds else "-"

        columns[f"p{q}\n{unit}"] = metric(f"{prefix}_p{q}_s", digits=4)
        columns[f"p{q}\n{rate_unit}"] = rate
    return columns


class Progress:
    """On a terminal, a line on stderr with the case being measured; else nothing."""

    def __init__(self, enabled: bool) -> None:
        shown = enabled and sys.stderr.isatty()
        self.bar = tqdm(bar_format="{desc} [{elapsed}]", disable=not shown, leave=False)

    def now(self, text: str) -> None:
        self.bar.set_description_str(text)

    def print(self, text: str) -> None:
        """Print to stdout without breaking the line. Raises OSError."""
        with tqdm.external_write_mode(file=sys.stdout):
            print(text, flush=True)

    def close(self) -> None:
        self.bar.close()
