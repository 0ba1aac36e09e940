"""common/table.py: cells and the lines under a table, by hand."""

from typing import Any

import pytest

from common.report import Case
from common.table import Table, interval_ends, metric, no_interval_hint, without_interval


def case(samples: list[float] | None = None, **metrics: Any) -> Case:
    return Case({"name": "a"}, [0], {"step": [samples or [0.1]]}, metrics=metrics)


def test_an_interval_is_shown_by_its_ends() -> None:
    show = interval_ends("exposed_ci95_s", 1e3, 1)
    assert show(case(exposed_ci95_s=[-0.0058, 0.0934])) == "-5.8 to 93.4"
    assert show(case(exposed_ci95_s=None)) == "-"
    assert show(case()) == "-"


def test_a_row_keeps_its_columns_with_an_interval() -> None:
    columns = {"name": metric("step_s"), "95% ci\n(ms)": interval_ends("step_ci95_s", 1e3, 1)}
    table = Table(columns, ["0.00", "-10.0 to 100.0"])
    first = table.row(case(step_s=1.0, step_ci95_s=[0.001, 0.002])).splitlines()
    second = table.row(case(step_s=1.0, step_ci95_s=[-0.01, 0.1])).splitlines()
    assert len(first[-1]) == len(second[-1])


def test_a_missing_interval_is_named_with_the_flag_that_helps() -> None:
    none = case([2.0] * 6, step_time_ci95_s=None, step_time_ci95_rel=None, exposed_ci95_s=(1, 2))
    full = case(step_time_ci95_s=(1, 2), step_time_ci95_rel=0.1)
    bare = case(samples_per_s=1.0)  # nothing of which an interval is shown
    assert without_interval(none) == {"step time"}
    assert without_interval(full) == without_interval(bare) == set()
    assert no_interval_hint([full, bare], None, 5) == ""
    hint = no_interval_hint([full, none], None, 5)
    assert "# step time: no 95 % interval (-) in 1 of 2 cases" in hint
    # 12 s of samples, with the untimed iterations up to 24 s: twice that
    assert "--max-seconds 48 gives" in hint
    assert "--max-seconds 80 gives" in no_interval_hint([none], None, 20)
    assert "--iters 12 gives" in no_interval_hint([none], 6, 5)
    assert max(map(len, hint.splitlines())) <= 100


@pytest.mark.parametrize("iters", [None, 6])
def test_the_names_of_several_metrics_are_joined(iters: int | None) -> None:
    both = case(step_time_ci95_s=None, exposed_communication_ci95_s=None)
    assert "# exposed communication, step time: no" in no_interval_hint([both], iters, 5)
