"""common/table.py: cells, rows and widths."""

from typing import Any

import pytest

from benchmarks.workloads.percentiles import digits_beside, percentile_columns
from common.stats import Estimate
from common.table import Table, ends, fitted, layout, metric
from harness.benchmark import omitted
from harness.report import Case


def case(**metrics: Any) -> Case:
    return Case(key={"name": "a"}, ranks=[0], metrics=metrics)


def test_a_column_is_as_wide_as_its_header() -> None:
    """By default tabulate adds two blanks to each header."""
    lines = layout(["case", "time"], [["a", "1"]]).splitlines()
    assert lines == ["case  time", "----  ----", "a        1"]


COLUMNS: Any = {name: metric(name) for name in ("a", "bb", "ccc", "d", "e", "f", "g")}
NUMBERS: dict[str, Any] = dict.fromkeys(COLUMNS, 1.0)


@pytest.mark.parametrize(
    ("room", "count", "below"),
    [
        (None, 7, []),
        (40, 7, []),
        (39, 6, ["# not shown: 1 column; --wide prints all"]),
        (21, 3, ["# not shown: 4 columns; --wide prints all"]),
        (3, 1, ["# not shown: 6 columns; --wide prints all"]),
    ],
)
def test_columns_that_fit_a_terminal(room: int | None, count: int, below: list[str]) -> None:
    """`1.00` has 4 characters, with 2 between columns: 3 columns need 16, 4 need 22, 7 need 40."""
    text, hidden = fitted(COLUMNS, [case(**NUMBERS)], room)
    assert text.splitlines()[0].split() == list(COLUMNS)[:count]
    assert omitted(hidden) == below


def test_all_rows_are_aligned_with_the_header() -> None:
    """Also in a pipe, if a later row has the longest name."""
    names = ["no ddp", "1M/2G 25MB none"]
    columns: Any = {"": lambda case: case.name, "a": metric("a")}
    table = Table(columns)
    table.reserve_width(names)
    lines = []
    for name in names:
        row = Case(key={}, ranks=[0], name=name, metrics={"a": 1.0})
        lines += table.row(row).splitlines()
    header, *rows = lines
    assert {line.rstrip()[-1] for line in (header, *rows[1:])} == {"a", "0"}
    assert len({len(line) for line in (header, *rows)}) == 1


def test_a_row_without_room_repeats_the_header_with_fewer_columns() -> None:
    """Cells are assumed to be 6 wide: four columns need 30. With a cell of 10 they need 34."""
    table = Table(COLUMNS)
    table.max_width = 30
    table.row(case(**NUMBERS))
    assert table.count == 4
    blank, header, _, row = table.row(case(**NUMBERS | {"bb": 1e6})).splitlines()
    assert (blank, header.split()) == ("", ["a", "bb", "ccc"])
    assert row.split() == ["1.00", "1000000.00", "1.00"]
    row = table.row(case(**NUMBERS))
    assert (row.split(), len(row)) == (["1.00"] * 3, 26)
    assert table.count == 3


def test_an_interval_is_shown_by_its_ends() -> None:
    """Its column is wide enough from the first row on."""
    columns = {"time": metric("step_s"), "95% ci\n(ms)": ends("step_s", 1e3, 1)}
    table = Table(columns, ["0.00", "-10.0 to 100.0"])
    first = table.row(case(step_s=Estimate(1.0))).splitlines()[-1]
    second = table.row(case(step_s=Estimate(1.0, -0.0058, 0.0934)))
    assert (first.split(), second) == (["1.00", "-"], "1.00    -5.8 to 93.4")
    assert len(first) == len(second)
    assert columns["95% ci\n(ms)"](case(step_s=Estimate(-0.001, -0.002, -0.00004))) == "-2.0 to 0.0"


def test_digits_depend_on_the_uncertainty() -> None:
    assert digits_beside(Estimate(0.00103, 0.00101, 0.00105)) == 5
    assert digits_beside(Estimate(0.00103, 0.0005, 0.0015)) == 4
    assert digits_beside(Estimate(41.2, 30, 50)) == 0
    columns = percentile_columns("step", "sec/step", "samples/s", lambda case: 8)
    row = case(step_s=Estimate(0.00103, 0.00101, 0.00105), step_p75_s=0.00112)
    shown = [text(row) for text in columns.values()]
    assert shown[:4] == ["0.00103", "7767.0", "0.00112", "7142.9"]
