"""Tables through tabulate, printed by rank 0; progress on a terminal."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import tabulate
from tqdm import tqdm

from common.stats import PERCENTILES

# A table's columns: each header with the function that makes its cell from a case of the report.
Columns = dict[str, Callable[[dict[str, Any]], str]]


def render(columns: Columns, cases: Sequence[dict[str, Any]]) -> str:
    """The cases as a table, one row each."""
    return _render(columns, [_cells(columns, case) for case in cases])


class StreamedTable:
    """A table whose rows are printed as they come.

    `widest` is a row as wide as any will be; it sets the width of the columns.
    """

    def __init__(self, columns: Columns, widest: Sequence[str]) -> None:
        self._columns = columns
        self._widest = widest
        self._started = False

    def row(self, case: dict[str, Any]) -> str:
        """The lines to print for one more case: with the header if it is the first."""
        lines = _render(self._columns, [self._widest, _cells(self._columns, case)]).splitlines()
        header = [] if self._started else lines[:-2]
        self._started = True
        return "\n".join([*header, lines[-1]]).rstrip()


def _cells(columns: Columns, case: dict[str, Any]) -> list[str]:
    return [cell(case) for cell in columns.values()]


def _render(columns: Columns, rows: Sequence[Sequence[str]]) -> str:
    tabulate.MIN_PADDING = 0  # or every header gets two blanks
    align = ("left",) + ("right",) * (len(columns) - 1)
    return tabulate.tabulate(
        rows, list(columns), tablefmt="simple", colalign=align, disable_numparse=True
    )


def percentile_columns(time: str, time_unit: str, rate_unit: str, work: str) -> Columns:
    """The seeds' columns: p50 p75 p90 p95 of a time, each with the rate that follows from it.

    time: the name of the metric, `{time}_p50_s`; work: the key entry that the rate counts.
    """
    columns: Columns = {}
    for q in PERCENTILES:
        name = f"{time}_p{q}_s"

        def rate(case: dict[str, Any], name: str = name) -> str:
            seconds = case["metrics"].get(name)
            return f"{case['key'][work] / seconds:.1f}" if seconds else "-"

        columns[f"p{q}\n{time_unit}"] = metric(name, digits=4)
        columns[f"p{q}\n{rate_unit}"] = rate
    return columns


def metric(name: str, scale: float = 1, digits: int = 2) -> Callable[[dict[str, Any]], str]:
    """A cell with one of the case's metrics times `scale`; `-` where the case has none."""

    def cell(case: dict[str, Any]) -> str:
        value = case["metrics"].get(name)
        return "-" if value is None else f"{value * scale:.{digits}f}"

    return cell


def half_width(name: str, scale: float = 1, digits: int = 2) -> Callable[[dict[str, Any]], str]:
    """A cell with half the width of one of the case's intervals."""

    def cell(case: dict[str, Any]) -> str:
        interval = case["metrics"].get(name)
        return "-" if interval is None else f"{(interval[1] - interval[0]) / 2 * scale:.{digits}f}"

    return cell


def interval_width(case: dict[str, Any]) -> str:
    """A cell with the 95 % interval of the median that a case reached, as +-percent."""
    width = case["stop"].get("ci95_rel")
    if width is None or width >= 1:
        return "-" if width is None else ">100%"
    return f"+-{width * 100:.1f}%"


class Progress:
    """A bar over the cases on stderr, with the time left, if that is a terminal; else nothing."""

    def __init__(self, enabled: bool) -> None:
        shown = enabled and sys.stderr.isatty()
        self._bar = tqdm(unit="case", file=sys.stderr, disable=not shown, leave=False)

    def expect(self, cases: int) -> None:
        """So many cases are to be measured."""
        self._bar.reset(total=cases)

    def say(self, text: str) -> None:
        """Print to stdout without breaking the bar."""
        with tqdm.external_write_mode(file=sys.stdout):
            print(text, flush=True)

    def now(self, text: str) -> None:
        """What is being done, beside the bar."""
        self._bar.set_postfix_str(text, refresh=True)

    def done(self) -> None:
        """One more case is measured."""
        self._bar.update()

    def close(self) -> None:
        self._bar.close()
