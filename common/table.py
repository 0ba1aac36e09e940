"""Tables, printed row by row as the cases come, and a progress line on a terminal."""

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import tabulate
from tqdm import tqdm

from common.report import Case

Columns = dict[str, Callable[[Case], str]]  # a column's header -> a case's cell
LAUNCH_BOUND = 0.9  # a case is launch-bound if launching takes more of the device's time
LAUNCH_HINT = """
# launch-bound: the host takes over 90 % of the time to launch the kernels, so this measures
# Python; try a larger --batch-size, CUDA graphs (-G) or compile"""


def render(columns: Columns, cases: Sequence[Case]) -> str:
    """The cases as a table, a row each."""
    return layout(columns, [cells_of(columns, case) for case in cases])


def cells_of(columns: Columns, case: Case) -> list[str]:
    return [cell(case) for cell in columns.values()]


class Table:
    """A table that is printed row by row: each column is as wide as its header and `widest`."""

    def __init__(self, columns: Columns, widest: Sequence[str] = ()) -> None:
        """widest: a wide cell for each of the first columns; the others have room for `0.0000`."""
        self.columns, self.rows = columns, 0
        self.widest = [*widest, *["0.0000"] * (len(columns) - len(widest))]

    def row(self, case: Case) -> str:
        """The lines for one more case, with the header before the first."""
        cells = cells_of(self.columns, case)
        if case.failed:
            cells = [cells[0]] + [""] * (len(cells) - 1)
        # The row of `widest` only sets the widths. It is laid out with each case and left out.
        *header, _, line = layout(self.columns, [self.widest, cells]).splitlines()
        line = f"{cells[0]}  {case.check}" if case.failed else line.rstrip()
        self.rows += 1
        return "\n".join([*header, line]) if self.rows == 1 else line


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
    return cell(name, lambda value: f"{value * scale:.{digits}f}")


def interval_ends(name: str, scale: float = 1, digits: int = 2) -> Callable[[Case], str]:
    """A cell that shows the two ends of an interval of the case, such as `-5.8 to 93.4`."""
    return cell(name, lambda ends: " to ".join(f"{end * scale:.{digits}f}" for end in ends))


def relative(name: str) -> Callable[[Case], str]:
    """A cell that shows how far an interval reaches from its median, as +-percent."""
    return cell(name, lambda width: f"+-{width:.1%}" if width < 1 else ">100%")


def percentile_columns(
    prefix: str, unit: str, rate_unit: str, amount: Callable[[Case], float]
) -> Columns:
    """p50, p75, p90 and p95 of a time in seconds, each with the rate that follows from it.

    prefix: the metrics are `{prefix}_p50_s` and so on, as stats.percentiles makes them. amount:
    what is done in that time, such as the samples of a step; the rate is amount / time.
    """

    def rate(name: str, case: Case) -> str:
        return f"{amount(case) / case.metrics[name]:.1f}" if case.metrics.get(name) else "-"

    columns: Columns = {}
    for q in (50, 75, 90, 95):
        name = f"{prefix}_p{q}_s"
        columns |= {f"p{q}\n{unit}": metric(name, digits=4)}
        columns |= {f"p{q}\n{rate_unit}": partial(rate, name)}
    return columns


def launch_bound(case: Case) -> bool:
    """Whether the host takes too long to launch the kernels of one of the case's steps."""
    return largest_launch_share(case) > LAUNCH_BOUND


def launch_mark(case: Case) -> str:
    """What stands behind the row of a launch-bound case; "" for any other case."""
    return f"  launch-bound {largest_launch_share(case):.0%}" if launch_bound(case) else ""


def largest_launch_share(case: Case) -> float:
    """Launching over the device's time, where this is largest among the steps; 0 if unknown."""
    by_step = case.metrics.get("launch_share", {})
    return max(by_step.values(), default=0.0)


class ProgressLine(tqdm):
    """tqdm without the thread that it would start beside those that are timed."""

    monitor_interval = 0


def progress_line(enabled: bool) -> ProgressLine:
    """A line on stderr with the case that is being measured. It shows only on a terminal."""
    shown = enabled and sys.stderr.isatty()
    return ProgressLine(bar_format="{desc} [{elapsed}]", disable=not shown, leave=False)
