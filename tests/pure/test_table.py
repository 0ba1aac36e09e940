"""common/table.py: cells and rows, by hand."""

from typing import Any

from common.report import Case, Estimate
from common.table import Table, ends, layout, metric


def case(samples: list[float] | None = None, **metrics: Any) -> Case:
    return Case(
        key={"name": "a"}, ranks=[0], samples_s={"step": [samples or [0.1]]}, metrics=metrics
    )


def test_an_interval_is_shown_by_its_ends() -> None:
    show = ends("exposed_s", 1e3, 1)
    assert show(case(exposed_s=Estimate(0.01, -0.0058, 0.0934))) == "-5.8 to 93.4"
    assert show(case(exposed_s=Estimate(0.01))) == "-"
    assert show(case()) == "-"


def test_a_row_keeps_its_columns_with_an_interval() -> None:
    columns = {"name": metric("step_s"), "95% ci\n(ms)": ends("step_s", 1e3, 1)}
    table = Table(columns, ["0.00", "-10.0 to 100.0"])
    first = table.row(case(step_s=Estimate(1.0, 0.001, 0.002))).splitlines()
    second = table.row(case(step_s=Estimate(1.0, -0.01, 0.1))).splitlines()
    assert len(first[-1]) == len(second[-1])


def test_a_column_is_as_wide_as_its_header() -> None:
    """By itself tabulate gives each header two blanks more."""
    lines = layout(["case", "time"], [["a", "1"]]).splitlines()
    assert lines == ["case  time", "----  ----", "a        1"]
