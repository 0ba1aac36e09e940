"""The table of a scan, laid out as nccl-tests prints it, since other tools read that."""

from collections.abc import Callable, Sequence
from typing import Any

# of a variant: header, unit, width, and the cell from (metrics, the variant's prefix)
Column = tuple[str, str, int, Callable[[dict[str, Any], str], str]]


def scaled(name: str, scale: float, digits: int) -> Callable[[dict[str, Any], str], str]:
    """A cell with the variant's metric of this name times `scale`."""

    def cell(metrics: dict[str, Any], prefix: str) -> str:
        value = metrics.get(f"{prefix}_{name}")
        return "N/A" if value is None else f"{value * scale:.{digits}f}"

    return cell


def time_cell(metrics: dict[str, Any], prefix: str) -> str:
    """Microseconds with about four digits, as there is room."""
    value = metrics.get(f"{prefix}_time_s")
    if value is None:
        return "N/A"
    digits = 2 if value < 1e-3 else 1 if value < 1e-2 else 0
    return f"{value * 1e6:.{digits}f}"


def wrong_cell(metrics: dict[str, Any], prefix: str) -> str:
    return str(metrics.get(f"{prefix}_wrong", "N/A"))


BASE: tuple[Column, ...] = (
    ("time", "(us)", 8, time_cell),
    ("algbw", "(GB/s)", 7, scaled("algbw_gb_per_s", 1, 2)),
    ("busbw", "(GB/s)", 7, scaled("busbw_gb_per_s", 1, 2)),
)
EFFICIENCY: Column = ("eff", "(%)", 6, scaled("efficiency", 100, 1))
SPREAD: tuple[Column, ...] = (
    ("min", "(us)", 8, scaled("min_s", 1e6, 2)),
    ("max", "(us)", 9, scaled("max_s", 1e6, 2)),
    ("p99", "(us)", 9, scaled("p99_s", 1e6, 2)),
    ("cv", "(%)", 6, scaled("cv", 100, 1)),
)
SKEW: tuple[Column, ...] = (
    ("wait", "(us)", 8, scaled("waiting_s", 1e6, 2)),
    ("transfer", "(us)", 9, scaled("transfer_s", 1e6, 2)),
    ("clock+-", "(us)", 8, scaled("clock_error_s", 1e6, 2)),
    ("latest", "(rank)", 6, lambda m, prefix: str(m.get(f"{prefix}_latest_rank", "N/A"))),
)
WRONG: Column = ("#wrong", "", 6, wrong_cell)
FIXED = (("size", "(B)", 12), ("count", "(elements)", 12), ("type", "", 8), ("redop", "", 6))
PREFIXES = ("out_of_place", "in_place")


class ScanTable:
    """Lines of the table; header() once, then row() or absent() as cases come."""

    def __init__(self, per_iteration: bool, limit: bool, skew: bool) -> None:
        extra = ((EFFICIENCY,) if limit else ()) + (SPREAD if per_iteration else ())
        self._columns: Sequence[Column] = (*BASE, *extra, *(SKEW if skew else ()), WRONG)

    def header(self) -> str:
        """Three lines: the variants, the names, the units."""
        width = sum(column[2] + 1 for column in self._columns)
        names, units = [
            self._fixed([f[i] for f in FIXED] + ["root", ""][i : i + 1]) for i in (0, 1)
        ]
        lead = " " * len(names)
        variants = "out-of-place".center(width) + "in-place".center(width)
        names += "".join(f" {column[0]:>{column[2]}}" for column in self._columns) * 2
        units += "".join(f" {column[1]:>{column[2]}}" for column in self._columns) * 2
        return "\n".join("#" + line[1:].rstrip() for line in (lead + variants, names, units))

    def row(self, case: dict[str, Any]) -> str:
        """One line."""
        line = self._fixed(self._key(case))
        for prefix in PREFIXES:
            for _, _, width, cell in self._columns:
                line += f" {cell(case['metrics'], prefix):>{width}}"
        return line

    def absent(self, case: dict[str, Any], reason: str) -> str:
        """The line of what could not be measured."""
        return f"{self._fixed(self._key(case))}  {reason}"

    @staticmethod
    def _key(case: dict[str, Any]) -> list[Any]:
        return [case["key"][name] for name in ("size_bytes", "count", "dtype", "redop", "root")]

    @staticmethod
    def _fixed(cells: Sequence[Any]) -> str:
        widths = [width for _, _, width in FIXED] + [6]
        return " ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
