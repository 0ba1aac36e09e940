"""The same times give the same numbers: tests/golden.py says how. It goes when the house stands.

Names may change on the way. So each number of before must be among those of today, to the last
digit: in the metrics of the same case, and in what was shown.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import golden

# What changed on purpose: metrics that are no more among the recorded times (efficiency and eager
# are timed in turns now), and numbers that are shown no more, or with other digits.
# In parallel_sweep idle is a ratio within rounds, stages are not rounded, and no mesh is called the
# fastest.
GONE = {
    "compile_sweep": {"vs_eager", "vs_none"},
    "ddp_sweep": {"efficiency"},
    "parallel_sweep": {"pipeline_idle", "stage_idle", "stage_compute_s"},
}
CHANGED: dict[str, set[str]] = {
    "compile_sweep": {
        *("0.05", "0.25", "0.26", "0.85", "0.86", "0.90", "0.92", "0.96", "0.99", "1.08"),
    },
    "ddp_sweep": {
        "75.1",
        "78.3",
        "58.0",
        "57.4",
        "32.9",
        "34.0",
        "1.02",
        "0.85",
        "1.14",
        "24",
        "7",
    },
    "parallel_sweep": {"33", "28", "1.46", "1.14", "1.90"},
    "rpc_latency": {"1.65"},  # the interval in the sentence has its own two ends
    "collectives": {"0.006895", "0.007014", "0.0093"},  # with three digits now, as 0.00930
    "ddp_rpc": {"2.15"},  # the longest phase: a mean without an interval, which the table shows
    "parameter_server": {"0.94", "0.62", "1.59"},  # a ratio of cases that took no turns
}


def numbers_in(value: Any) -> Iterator[float]:
    """All numbers in nested lists and objects. An estimate also tells how wide its interval is."""
    if isinstance(value, dict):
        if value.keys() == {"value", "low", "high"} and value["low"] is not None:
            middle, low, high = value["value"], value["low"], value["high"]
            yield max(high - middle, middle - low) / max(abs(middle), 1e-12)
        for entry in value.values():
            yield from numbers_in(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from numbers_in(entry)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


def words_in(lines: list[str]) -> set[str]:
    """The numbers that were shown, as they were written."""
    return set(re.findall(r"(?<![\w.])-?\d[\d.,]*(?<![.,])", "\n".join(lines)))


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
    assert len(made["cases"]) == len(expected["cases"])
    for case, before in zip(made["cases"], expected["cases"], strict=True):
        assert case["check"] == before["check"]
        old = {k: v for k, v in before["metrics"].items() if k not in GONE.get(script, ())}
        lost = set(numbers_in(old)) - set(numbers_in(case["metrics"]))
        assert not lost, before["key"]
    lost_words = words_in(expected["shown"]) - words_in(made["shown"])
    assert lost_words <= CHANGED.get(script, set())
    assert made["status"] == expected["status"]


def test_what_counts_as_the_same() -> None:
    assert sorted(numbers_in({"a": {"value": 2, "low": 1, "high": 4}, "b": [True, None, 0.5]})) == [
        0.5,
        1.0,
        1.0,
        2.0,
        4.0,
    ]
    assert words_in(["p50 2.50 ms (1.0 to -3)", "1M/2G 25MB, 1,024"]) == {
        "2.50",
        "1.0",
        "-3",
        "1",
        "2",
        "25",
        "1,024",
    }
