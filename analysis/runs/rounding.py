"""How far the times of runs may be off because the numbers in logs and foreign reports are rounded.

The printed digits are a lower limit of the resolution: `date +%s` times 1000, a clock that ticks
every 15.6 ms, and a rounded rate times 2048 print more digits than they have. But then numbers
repeat, and so their differences show the resolution.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from analysis.runs.load import LAST_DIGIT, Row

Numbers = NDArray[np.float64]

MIN_NUMBERS = 6  # fewer show no resolution beyond the printed digits
LARGEST_STEP = 0.5  # of the median: numbers that are farther apart are steps of two kinds
MIN_ZEROS = 2  # at the end of all distinct numbers together: chance has as many in 1 of 100 logs
LEAST_SCATTER = 5e-4  # of the steps of any program, relative: equal numbers with more digits are
# rounded, and nothing shows how much


def rounding_of(rows: Sequence[Row]) -> float:
    """The relative rounding error of a mean of runs: the mean of their errors, each of which is
    half of the run's resolution. 0 for reports of this project, which have nanoseconds."""
    return float(np.mean([step / 2 for step in resolutions(rows)])) if rows else 0.0


def resolutions(rows: Sequence[Row]) -> list[float]:
    """The resolution of the numbers of each run of a side, relative to their median.

    Runs with few numbers are looked at together. The equal numbers of a run show nothing if those
    of other runs differ: then it has the resolution of the others.
    """
    numbers = [numbers_of(row) for row in rows]
    every = np.concatenate(numbers) if numbers else np.array([])
    digits = last_digits_of(rows)
    if len(distinct(every)) == 1:
        return [
            max(digit, resolution(every, digit) if LAST_DIGIT in row.metrics else 0.0)
            for row, digit in zip(rows, digits, strict=True)
        ]
    steps: list[float | None] = []
    for own, digit in zip(numbers, digits, strict=True):
        few = len(own) < MIN_NUMBERS
        steps.append(
            resolution(every if few else own, digit) if few or len(distinct(own)) > 1 else None
        )
    known = [step for step in steps if step is not None]
    of_others = float(np.mean(known)) if known else 0.0
    return [
        max(digit, of_others if step is None else step)
        for digit, step in zip(digits, steps, strict=True)
    ]


def last_digits_of(rows: Sequence[Row]) -> list[float]:
    """One unit in the last digit of the numbers of each run, relative to the median: as a log
    prints it. In JSON, 0.4 may stand for 0.40, so the run with the most digits shows it."""
    least = min((row.last_digit for row in rows), default=0.0)
    return [row.last_digit if LAST_DIGIT in row.metrics else least for row in rows]


def resolution(numbers: Numbers, last_digit: float) -> float:
    """The resolution of numbers [n] that repeat, relative to their median: three quarters of the
    distinct ones are at least so far apart. 0 if they do not repeat.

    last_digit: one unit of the last digit / the median.
    """
    if len(numbers) < MIN_NUMBERS:
        return 0.0
    middle = float(np.median(numbers))
    values = distinct(numbers / middle)
    if len(values) > len(numbers) / 2:
        return 0.0
    if len(values) == 1 and last_digit < LEAST_SCATTER:
        return 1.0
    gaps = np.sort(np.diff(values))
    step = float(gaps[len(gaps) // 4]) if len(gaps) else 0.0
    zeros = zeros_of(values * middle, last_digit * middle)
    of_zeros = last_digit * 10.0**zeros if zeros * len(values) >= MIN_ZEROS else 0.0
    return max(of_zeros, step if step <= LARGEST_STEP else 0.0)


def zeros_of(values: Numbers, unit: float) -> int:
    """The number of zeros with which all numbers end, in units of their last digit."""
    if not unit:
        return 0
    cells = np.round(values / 10.0 ** round(np.log10(unit)))
    return max((n for n in range(1, 16) if not (cells % 10.0**n).any()), default=0)


def distinct(numbers: Numbers) -> Numbers:
    """The distinct numbers, in order of size, to 9 digits: they may have been converted."""
    scale = float(np.median(numbers)) if len(numbers) else 1.0
    return np.unique(np.round(numbers / scale, 9)) * scale


def numbers_of(row: Row) -> Numbers:
    """The numbers from which the times of a log or of one's own loop were read; none for reports
    of this project, whose times are precise and may be shared by the steps of a block."""
    times = np.asarray([] if row.rounds else row.times_s, dtype=np.float64)
    return 1 / times if LAST_DIGIT in row.metrics and row.measure.startswith("1 /") else times
