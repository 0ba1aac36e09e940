"""Percentiles of a time, and columns with them and the rates that follow from them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from common.stats import Estimate
from common.table import Columns, number_of
from harness.report import Case


def percentiles(samples: ArrayLike, prefix: str) -> dict[str, float]:
    """Return `{prefix}_p50_s`, p75, p90, p95 and, from 100 samples on, p99 of samples [n], in
    seconds."""
    x = np.asarray(samples, dtype=np.float64)
    wanted = [50, 75, 90, 95, *([99] if len(x) >= 100 else [])]
    return {f"{prefix}_p{q}_s": float(np.percentile(x, q)) for q in wanted}


def percentile_columns(
    prefix: str, unit: str, rate_unit: str, amount: Callable[[Case], float | None]
) -> Columns:
    """Return columns for `{prefix}_p50_s` (or `{prefix}_s`, if that is the median), p75, p90 and
    p95, each followed by the rate: amount / time, e.g. of the samples in a step; an amount
    of None is unknown."""

    def value_of(name: str, case: Case) -> Any:
        is_median = name.endswith("_p50_s") and name not in case.metrics
        return case.metrics.get(f"{prefix}_s" if is_median else name)

    def time(name: str, case: Case) -> str:
        value = value_of(name, case)
        digits = digits_beside(case.metrics.get(f"{prefix}_s"))
        return "-" if value is None else f"{number_of(value):.{digits}f}"

    def rate(name: str, case: Case) -> str:
        value = value_of(name, case)
        count = amount(case) if value else None  # a failed case has no metrics
        return f"{count / number_of(value):.1f}" if value and count else "-"

    columns: Columns = {}
    for q in (50, 75, 90, 95):
        name = f"{prefix}_p{q}_s"
        columns |= {f"p{q}\n{unit}": partial(time, name)}
        columns |= {f"p{q}\n{rate_unit}": partial(rate, name)}
    return columns


def digits_beside(value: Any) -> int:
    """Return the number of decimals for two significant digits, or three if they are certain."""
    size = abs(number_of(value)) if value else 1.0
    uncertainty = size * ((value.relative if isinstance(value, Estimate) else None) or 0.0)
    for digits in range(9):
        last = 10.0**-digits  # one unit of the last digit
        if size >= 100 * last or (size >= 10 * last and last <= uncertainty / 2):
            return digits
    return 9
