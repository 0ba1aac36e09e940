"""common/table.py: fixed input against exact text."""

from textwrap import dedent
from typing import Any

import pytest

from common.table import (
    Columns,
    StreamedTable,
    half_width,
    interval_width,
    metric,
    percentile_columns,
    render,
)

COLUMNS: Columns = {
    "": lambda case: case["name"],
    "step\n(ms)": lambda case: case["step"],
    "slowest\nrank": lambda case: case["slowest"],
}
CASES = [
    {"name": "no ddp", "step": "9.50", "slowest": "-"},
    {"name": "2M/8G", "step": "1234.50", "slowest": "3 (node-7) 1.50x"},
]


def text(block: str) -> str:
    return dedent(block).strip("\n")


def test_render() -> None:
    assert render(COLUMNS, CASES) == text("""
                   step           slowest
                   (ms)              rank
        ------  -------  ----------------
        no ddp     9.50                 -
        2M/8G   1234.50  3 (node-7) 1.50x
    """)


def test_render_keeps_numbers_as_they_are_written() -> None:
    columns: Columns = {"name": lambda case: case["n"], "x": lambda case: case["x"]}
    table = render(columns, [{"n": "007", "x": "1.50"}, {"n": "1e3", "x": "10.0"}])
    assert table.splitlines() == ["name     x", "----  ----", "007   1.50", "1e3   10.0"]


def test_streamed_rows_are_as_wide_as_the_widest() -> None:
    table = StreamedTable(COLUMNS, widest=["2M/16G in all", "10000.00", "3 (n) 1.50x"])
    narrow = CASES[0] | {"name": "2M/8G"}
    # a row wider than any was said to be is whole, and moves no other
    assert "\n".join(table.row(case) for case in (CASES[0], CASES[1], narrow)) == text("""
                           step      slowest
                           (ms)         rank
        -------------  --------  -----------
        no ddp             9.50            -
        2M/8G           1234.50  3 (node-7) 1.50x
        2M/8G              9.50            -
    """)


def test_streamed_rows_equal_a_rendered_table() -> None:
    """With the widest row as announced the text is the same as of all rows at once."""
    widest = max(CASES, key=lambda case: len(case["step"]))
    table = StreamedTable(COLUMNS, widest=["no ddp", widest["step"], widest["slowest"]])
    assert "\n".join(table.row(case) for case in CASES) == render(COLUMNS, CASES)


# -- cells -----------------------------------------------------------------------------------------

CASE: dict[str, Any] = {
    "key": {"batch_size": 8},
    "metrics": {
        "step_time_p50_s": 0.025,
        "step_time_p75_s": 0.032,
        "step_time_p90_s": 0.04,
        "step_time_p95_s": 1.6,
        "none": None,
        "interval_s": [0.010, 0.013],
    },
    "stop": {"ci95_rel": 0.0123},
}


@pytest.mark.parametrize(
    ("cell", "want"),
    [
        (metric("step_time_p50_s"), "0.03"),
        (metric("step_time_p50_s", 1e3), "25.00"),
        (metric("step_time_p50_s", 1e3, 0), "25"),
        (metric("none"), "-"),
        (metric("absent"), "-"),
        (half_width("interval_s", 1e3), "1.50"),
        (half_width("absent"), "-"),
        (half_width("none"), "-"),
        (interval_width, "+-1.2%"),
    ],
)
def test_cells(cell: Any, want: str) -> None:
    assert cell(CASE) == want


def test_no_interval() -> None:
    assert interval_width({"stop": {"ci95_rel": None}}) == "-"


def test_percentile_columns() -> None:
    columns = percentile_columns("step_time", "sec/iter", "ex/sec", work="batch_size")
    # 8 / 0.025 = 320, 8 / 0.032 = 250, 8 / 0.04 = 200, 8 / 1.6 = 5
    assert {header: cell(CASE) for header, cell in columns.items()} == {
        "p50\nsec/iter": "0.0250",
        "p50\nex/sec": "320.0",
        "p75\nsec/iter": "0.0320",
        "p75\nex/sec": "250.0",
        "p90\nsec/iter": "0.0400",
        "p90\nex/sec": "200.0",
        "p95\nsec/iter": "1.6000",
        "p95\nex/sec": "5.0",
    }
