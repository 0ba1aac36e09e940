"""Tables by tabulate, row by row as the cases come, and what is being done on a terminal."""

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import tabulate
from tqdm import tqdm

from common.report import Case

Columns = dict[str, Callable[[Case], str]]  # a column's header -> a case's cell
LAUNCH_BOUND = 0.9  # of the device's time is spent launching
LAUNCH_HINT = """
# launch-bound: the host takes over 90 % of the time to launch the kernels, so this measures
# Python; try a larger --batch-size, CUDA graphs (-G) or compile"""
NO_INTERVAL_HINT = """
# {what}: no 95 % interval (-) in {count} of {all} cases, which have
# too few samples, or samples that drift; {flag} gives a case more"""
tabulate.MIN_PADDING = 0  # or each header gets two blanks
tqdm.monitor_interval = 0  # no thread beside the timed ones


def render(columns: Columns, cases: Sequence[Case]) -> str:
    """The cases as a table, a row each."""
    return layout(columns, [[cell(case) for cell in columns.values()] for case in cases])


class Table:
    """A table that is printed row by row: each column is as wide as its header and `widest`."""

    def __init__(self, columns: Columns, widest: Sequence[str] = ()) -> None:
        self.columns, self.rows = columns, 0
        self.widest = [*widest, *["0.0000"] * (len(columns) - len(widest))]

    def row(self, case: Case) -> str:
        """The lines for one more case, with the header before the first."""
        cells = [cell(case) for cell in self.columns.values()]
        if case.failed:
            cells[1:] = [""] * (len(cells) - 1)
        *header, _, line = layout(self.columns, [self.widest, cells]).splitlines()
        line = f"{cells[0]}  {case.check}" if case.failed else line.rstrip()
        self.rows += 1
        return "\n".join([*(header if self.rows == 1 else []), line])


def layout(headers: Iterable[str], rows: Sequence[Sequence[str]]) -> str:
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
    """A cell with a metric of the case times `scale`."""
    return cell(name, lambda value: f"{value * scale:.{digits}f}")


def interval_ends(name: str, scale: float = 1, digits: int = 2) -> Callable[[Case], str]:
    """A cell with the two ends of an interval of the case, as `-5.8 to 93.4`."""
    return cell(name, lambda ends: " to ".join(f"{end * scale:.{digits}f}" for end in ends))


def relative(name: str) -> Callable[[Case], str]:
    """A cell with how far an interval reaches from its median, as +-percent."""
    return cell(name, lambda width: f"+-{width:.1%}" if width < 1 else ">100%")


def percentile_columns(
    prefix: str, unit: str, rate_unit: str, work: Callable[[Case], float]
) -> Columns:
    """p50, p75, p90 and p95 of a time in seconds, each with the rate that follows from it."""

    def rate(name: str, case: Case) -> str:
        return f"{work(case) / case.metrics[name]:.1f}" if case.metrics.get(name) else "-"

    columns: Columns = {}
    for q in (50, 75, 90, 95):
        name = f"{prefix}_p{q}_s"
        columns |= {f"p{q}\n{unit}": metric(name, digits=4)}
        columns |= {f"p{q}\n{rate_unit}": partial(rate, name)}
    return columns


def launch_bound(case: Case) -> str:
    """A mark for the row of a case whose kernels take the host too long to launch, else nothing."""
    share = max(case.metrics.get("launch_share", {"": 0.0}).values())
    return f"  launch-bound {share:.0%}" if share > LAUNCH_BOUND else ""


def without_interval(case: Case) -> set[str]:
    """The names of what should have a 95 % interval in this case and has none."""
    lacking = [name for name, value in case.metrics.items() if "_ci95" in name and value is None]
    return {name.partition("_ci95")[0].replace("_", " ") for name in lacking}


def timed_s(case: Case) -> float:
    """Seconds of all samples of a rank, of all steps."""
    return sum(sum(rows[0]) for rows in case.samples_s.values() if rows)


def no_interval_hint(cases: Sequence[Case], iters: int | None, max_seconds: float) -> str:
    """The lines that say which intervals are not there, and which flag helps; else nothing.

    iters, max_seconds: the flags of the run.
    """
    lacking = [case for case in cases if without_interval(case)]
    if not lacking:
        return ""
    what = ", ".join(sorted(set().union(*map(without_interval, lacking))))
    # a case took up to twice its samples: each block starts with an untimed iteration
    seconds = 4 * max(max_seconds, *map(timed_s, lacking))
    flag = f"--iters {2 * iters}" if iters else f"--max-seconds {math.ceil(seconds)}"
    facts = {"what": what, "count": len(lacking), "all": len(cases), "flag": flag}
    return NO_INTERVAL_HINT.format(**facts)


def progress_line(enabled: bool) -> tqdm:
    """On a terminal, a line on stderr with the case being measured; else nothing."""
    shown = enabled and sys.stderr.isatty()
    return tqdm(bar_format="{desc} [{elapsed}]", disable=not shown, leave=False)
