"""The same times give the same numbers, computed and printed; tests/golden.py replays the times.

Names may change. Each recorded number must be among the present ones, to the last digit: in the
metrics of the same case, and in the output. If a formula is changed on purpose, `python
tests/golden.py refresh` records the new numbers for the same times.
"""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import golden, quotients
from tests.process import Start


def numbers_in(value: Any) -> Iterator[float]:
    """All numbers in nested lists and objects; of an estimate also the width of its interval."""
    if isinstance(value, dict):
        if value.keys() == {"value", "low", "high"} and value["low"] is not None:
            middle, low, high = value["value"], value["low"], value["high"]
            yield max(high - middle, middle - low) / max(abs(middle), 1e-12)
        value = list(value.values())
    if isinstance(value, list):
        for entry in value:
            yield from numbers_in(entry)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


def lost(before: Any, now: Any) -> list[float]:
    """The numbers of `before` that `now` lacks. numpy's logarithm rounds the last of 16 digits
    differently on different processors, so 13 digits are compared."""
    new = list(numbers_in(now))
    return [
        x for x in numbers_in(before) if not any(math.isclose(x, y, rel_tol=1e-13) for y in new)
    ]


def words_in(lines: list[str]) -> set[str]:
    """The numbers in the output, as printed."""
    return set(re.findall(r"(?<![\w.])-?\d[\d.,]*(?<![.,])", "\n".join(lines)))


@pytest.mark.smoke
@pytest.mark.parametrize("script", golden.SCRIPTS)
def test_the_same_times_give_the_same_numbers(script: str, start: Start, tmp_path: Path) -> None:
    report = tmp_path / "report.jsonl"
    process = start("tests/golden.py", "play", script, str(report), ranks=0)
    assert process.wait() == 0, process.err
    made = golden.what_came_out(process.out, report)
    expected = json.loads((golden.FOLDER / f"{script}.json").read_text())["made"]
    for case, before in zip(made["cases"], expected["cases"], strict=True):
        assert case["check"] == before["check"]
        assert lost(before["metrics"], case["metrics"]) == [], before["key"]
    assert quotients.problems(script, process.out) == []
    assert words_in(expected["shown"]) <= words_in(made["shown"])
    assert made["status"] == expected["status"]
