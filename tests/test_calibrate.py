"""calibrate.py as its user runs it, and its formulas by hand."""

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import calibrate
from common.report import Case
from common.stats import Times

SCRIPT = "benchmarks/calibrate.py"


@pytest.mark.smoke
def test_every_mode(bench: Callable[..., Any]) -> None:
    flags = ("--pairs", "6", "--step-ms", "0.5", "--seconds", "1")
    run = bench(SCRIPT, *flags, ranks=2)
    assert run.status == 0, run.out + run.err
    barrier, perturbation, resolution = run.report.cases
    assert [case.key["mode"] for case in run.report.cases] == list(calibrate.MODES)
    for case in run.report.cases:
        assert case.check == "passed"
        assert (case.key["world_size"], case.key["backend"], case.key["device"]) == (
            2,
            "gloo",
            "cpu",
        )
    assert 0 < barrier.metrics["spread_p50_s"] <= barrier.metrics["spread_p95_s"]
    ratios = perturbation.metrics["ratios"]
    assert len(ratios) == 6
    assert sorted(ratios)[2] <= perturbation.metrics["ratio"] <= sorted(ratios)[3]
    ends = perturbation.metrics["ratio_ci95"]
    assert ends is None or ends[0] <= ends[1]  # six ratios that hang together have none
    assert resolution.key["seconds"] == 1
    assert "by a step of at least 0.5 ms" in run.out
    assert "reported / bare loop = " in run.out


def times_of(case: Case) -> Times:
    return Times(case.samples_s, case.rounds)


def test_another_number_of_pairs_is_another_case() -> None:
    """Older reports do not name the number: it was the default."""
    modes = ["--modes", "barrier,perturbation"]
    barrier, usual = calibrate.plan(calibrate.parse_args(modes))
    assert "pairs" not in usual
    same, fewer = calibrate.plan(calibrate.parse_args([*modes, "--pairs", "9"]))
    assert same == barrier
    assert fewer == usual | {"pairs": 9}


def test_a_few_pairs_have_no_interval() -> None:
    case = Case({"mode": "perturbation"}, [0], {"step": [[0.001, 0.002, 0.003]]})
    calibrate.derive_perturbation(case, times_of(case), [[1.02]])
    assert calibrate.finding(case) == (
        "reported / bare loop = 1.0200 (too few --pairs for an interval), a step of 2.00 ms"
    )


def test_perturbation_by_hand() -> None:
    """The first rank's ratios count: of nine the interval goes from the 2nd to the 8th."""
    ratios = [1.00, 0.98, 1.03, 1.01, 0.99, 1.02, 0.97, 1.04, 1.005]
    case = Case({"mode": "perturbation"}, [0, 1], {"step": [[0.001] * 4, [0.009] * 4]})
    calibrate.derive_perturbation(case, times_of(case), [ratios, [7.0] * 9])
    assert case.metrics["ratio"] == 1.005
    assert case.metrics["ratio_ci95"] == (0.98, 1.03)
    assert case.metrics["step_time_p50_s"] == 0.001
    assert "1.0050 (95 % 0.9800 to 1.0300), a step of 1.00 ms" in calibrate.finding(case)


def test_barrier_by_hand() -> None:
    """Two hosts: on one the ranks leave 10, 20, 30 us apart, on the other 100 us. That counts."""
    near = [0.0, 1.0, 2.0], [10e-6, 1.0 + 20e-6, 2.0 + 30e-6]
    far = [5.0, 6.0, 7.0], [5.0 - 100e-6, 6.0 - 100e-6, 7.0 - 100e-6]
    case = Case({"mode": "barrier"}, [0, 1])
    calibrate.derive_barrier(case, Times({}, [3], near), ["a", "a"])
    assert case.metrics["spread_p50_s"] == pytest.approx(20e-6)
    assert case.metrics["spread_p95_s"] == pytest.approx(29e-6)  # 20 + 0.9 * (30 - 20)
    case = Case({"mode": "barrier"}, [0, 1, 2, 3])
    left = [near[0], far[0], near[1], far[1]]
    calibrate.derive_barrier(case, Times({}, [3], left), ["a", "b", "a", "b"])
    assert case.metrics["spread_p50_s"] == pytest.approx(100e-6)


def test_resolution_by_hand() -> None:
    """Nine rounds of one step of 10 ms; the part takes up to 4 ms less, or as much more."""
    gaps = [0.0, 1.0, -1.0, 2.0, -2.0, 3.0, -3.0, 4.0, -4.0]
    b = [(10 - gap) / 1e3 for gap in gaps]
    case = Case({"mode": "resolution"}, [0], {"step": [[0.010] * 9], "the same": [b]}, [1] * 9)
    calibrate.derive_resolution(case, times_of(case), [None])
    assert case.metrics["step_time_p50_s"] == 0.010
    assert case.metrics["difference_rel"] == pytest.approx(0, abs=1e-9)
    assert case.metrics["resolution_rel"] == pytest.approx(0.3)  # -3 to 3 ms: half of 6, over 10
    assert calibrate.finding(case) == "+-30.00% of a step of 10.00 ms, after 9 steps"
    few = Case({"mode": "resolution"}, [0], {"step": [[0.010] * 3], "the same": [b[:3]]}, [1] * 3)
    calibrate.derive_resolution(few, times_of(few), [None])
    assert "resolution_rel" not in few.metrics
    assert calibrate.finding(few) == "too few rounds to say of a step of 10.00 ms, after 3 steps"
