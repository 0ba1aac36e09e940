"""The same times give the same numbers: tests/golden.py says how.

Names may change. So each number that was recorded must be among those of today, to the last digit:
in the metrics of the same case, and in what was shown. Where a formula changes on purpose,
`python tests/golden.py refresh` records what is made of the same times today.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import golden, quotients


def numbers_in(value: Any) -> Iterator[float]:
    """All numbers in nested lists and objects. An estimate also tells how wide its interval is."""
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


def words_in(lines: list[str]) -> set[str]:
    """The numbers that were shown, as they were written."""
    return set(re.findall(r"(?<![\w.])-?\d[\d.,]*(?<![.,])", "\n".join(lines)))


@pytest.mark.smoke
@pytest.mark.parametrize("script", golden.SCRIPTS)
def test_the_same_times_give_the_same_numbers(
    script: str, start: Callable[..., Any], tmp_path: Path
) -> None:
    report = tmp_path / "report.jsonl"
    process = start("tests/golden.py", "play", script, str(report), ranks=0)
    assert process.wait(120) == 0, process.err
    made = golden.what_came_out(process.out, report)
    expected = json.loads((golden.FOLDER / f"{script}.json").read_text())["made"]
    for case, before in zip(made["cases"], expected["cases"], strict=True):
        assert case["check"] == before["check"]
        lost = set(numbers_in(before["metrics"])) - set(numbers_in(case["metrics"]))
        assert not lost, before["key"]
    assert quotients.problems(script, process.out) == []
    assert words_in(expected["shown"]) <= words_in(made["shown"])
    assert made["status"] == expected["status"]
