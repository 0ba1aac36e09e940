"""The same times give the same numbers: tests/golden.py says how. It goes when the house stands."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import golden


@pytest.mark.smoke
@pytest.mark.parametrize("script", golden.COMMANDS)
def test_the_same_times_give_the_same_numbers(
    script: str, start: Callable[..., Any], tmp_path: Path
) -> None:
    report = tmp_path / "report.jsonl"
    process = start("tests/golden.py", "play", script, str(report), ranks=0)
    assert process.wait(120) == 0, process.err
    made = golden.what_came_out(process.out, report)
    expected = json.loads((golden.FOLDER / f"{script}.json").read_text())["made"]
    assert made["cases"] == expected["cases"]
    assert made["shown"] == expected["shown"]
    assert made["status"] == expected["status"]
