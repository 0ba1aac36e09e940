"""analysis/runs/rounding.py: the resolution of printed numbers, worked out by hand."""

from collections.abc import Sequence

import numpy as np
import pytest

from analysis.logs.step_logs import share_of_last_digit
from analysis.runs import rounding
from analysis.runs.load import LAST_DIGIT, Row

NOISE = np.random.default_rng(0).normal(0, 0.003, 60)


def row_of(numbers: Sequence[float], unit: float) -> Row:
    """A log with one number per step."""
    row = Row(key={}, name="step", ranks=[0], measure="step", times_s=numbers)
    row.metrics = {LAST_DIGIT: unit / float(np.median(numbers))}
    return row


@pytest.mark.parametrize(
    ("numbers", "unit", "expected"),
    [
        ([2000.0] * 30 + [3000.0] * 20, 1.0, 1000.0),  # date +%s, times 1000
        ([1000.0] * 30 + [2000.0] * 20, 1.0, 1000.0),  # also if they are far apart
        ([400.0] * 30, 1.0, 100.0),
        ([2048.0] * 30, 1.0, 2048.0),  # steps are never so equal; nothing shows the step
        ([0.34375] * 30 + [0.359375] * 20 + [0.375], 1e-6, 0.015625),  # ticks of 1/64 s
        ([344.0] * 30 + [359.0] * 20 + [375.0], 1.0, 15.0),  # the same in ms
        ([1843.0] * 20 + [2048.0] * 20 + [2253.0] * 9, 1.0, 205.0),  # 0.1 it/s of 2048 tokens
        ([float(np.float32(x)) for x in [0.4] * 30 + [0.5] * 20], 1e-16, 0.1),
        # the printed digits are right
        ([0.33] * 30, 0.01, 0.01),
        ([0.330] * 30, 0.001, 0.001),  # one number in ten ends in 0
        ([0.40] * 20 + [0.41] * 20 + [0.80] * 20, 0.01, 0.01),  # steps that stall
        ([0.33, 0.35, 0.41, 0.42], 0.01, 0.01),
        ([round(0.355 * (1 + x), 3) for x in NOISE], 0.001, 0.001),
        ([round(35.5 * (1 + x), 4) for x in NOISE], 0.0001, 0.0001),
    ],
)
def test_the_resolution_of_a_log(numbers: list[float], unit: float, expected: float) -> None:
    """Their times count in the same way if the numbers are rates."""
    (step,) = rounding.resolutions([row_of(numbers, unit)])
    assert step * np.median(numbers) == pytest.approx(expected)
    rates = row_of([1 / x for x in numbers], unit)
    rates.measure, rates.metrics = "1 / rate", {LAST_DIGIT: unit / float(np.median(numbers))}
    assert rounding.resolutions([rates]) == pytest.approx([step])


def test_the_resolution_of_several_logs() -> None:
    """The error of a mean is the mean of the errors: one precise log of three proves little. A log
    of equal numbers has the resolution of the others, and 0.40 that of its digits."""
    fine = [0.35 * (1 + x) for x in NOISE]
    mixed = [row_of([0.35] * 30, 0.01), row_of([0.35] * 30, 0.01), row_of(fine, 1e-6)]
    middle = float(np.median(fine))
    expected = (2 * 0.01 / 0.35 + 1e-6 / middle) / 3 / 2
    assert rounding.rounding_of(mixed) == pytest.approx(expected)
    ticks = [row_of([0.34375] * 30, 1e-6), row_of([0.34375] * 30 + [0.359375] * 20, 1e-6)]
    assert rounding.resolutions(ticks) == pytest.approx([0.015625 / 0.34375] * 2)
    quiet = [row_of([0.4] * 30, 0.01), row_of([0.4, 0.41, 0.42] * 9, 0.01)]
    assert rounding.resolutions(quiet) == pytest.approx([0.01 / 0.4, 0.01 / 0.41])
    single = [row_of([number], 0.1) for number in (350.1, 349.8, 350.0, 350.4, 350.3, 350.2)]
    assert rounding.resolutions(single) == pytest.approx([0.1 / 350] * 6, rel=0.01)
    assert rounding.resolutions([row_of([2000.0], 1.0)] * 6) == pytest.approx([0.5] * 6)


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["0.1"] * 8 + ["0.099", "0.11"], 0.01 / 0.1),  # %.2g: 0.099 has no more digits than 0.11
        (["0.4"] * 8 + ["0.41"], 0.01 / 0.4),  # 0.4 may stand for 0.40
        (["0.1"] * 8 + ["0.099"], 0.1 / 0.1),  # may be 0.10, but nothing shows it
    ],
)
def test_the_last_digit_of_a_log(texts: list[str], expected: float) -> None:
    units = [10.0 ** -len(text.partition(".")[2]) for text in texts]
    assert share_of_last_digit([*map(float, texts)], units) == pytest.approx(expected)
