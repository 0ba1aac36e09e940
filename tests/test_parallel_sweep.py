"""parallel_sweep.py as its user runs it: every kind of mesh, its check, and a planted delay."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = "benchmarks/parallel_sweep.py"
SMALL = ("--sequence-length", "32", "--global-batch", "8", "--warmup-iters", "0")
ONCE = (*SMALL, "--iters", "1")
RUNS = [
    (4, "dp4,ddp4,dp2x2,tp4,cp4,pp4:gpipe,pp4:1f1b,dp2pp2:interleaved,dp2pp2:zbv,dp2tp2"),
    (8, "dp8,ddp8,dp2x4,tp8,cp8,dp4tp2,cp2tp4,dp2pp4:gpipe,dp2pp4:1f1b,pp2tp4:interleaved"),
    (8, "dp4pp2:izb,dp4pp2:zbv,ep8,dp2ep4,cp2ep4"),
]


@pytest.mark.smoke
@pytest.mark.parametrize(("ranks", "meshes"), RUNS if "ALL" in os.environ else RUNS[:1])
def test_meshes_pass_their_check(bench: Callable[..., Any], ranks: int, meshes: str) -> None:
    """Those of 8 ranks take minutes: they run with ALL=1 in the environment."""
    flags = (*ONCE, "--no-breakdown", "--global-batch", str(2 * ranks), "--mesh", meshes)
    run = bench(SCRIPT, *flags, ranks=ranks, timeout=550)
    assert run.status == 0, run.out + run.err
    assert [case.key["mesh"] for case in run.report.cases] == meshes.split(",")
    for case in run.report.cases:
        m = case.metrics
        assert case.check == "passed"
        assert m["tokens_per_s"].value == pytest.approx(2 * ranks * 32 / m["step_s"].value)
        assert m["memory_gib"] >= m["memory_min_gib"]
        assert "compute_s" not in m
    assert f"\n# {run.report.end['answer'][0]}\n" in run.out


@pytest.mark.smoke
def test_experts_and_their_twins(bench: Callable[..., Any]) -> None:
    run = bench(SCRIPT, *ONCE, "--mesh", "ep4,dp2ep2", ranks=4, timeout=300)
    assert run.status == 0, run.out + run.err
    for case in run.report.cases:
        assert case.check == "passed"
        # the ranks of ep share the other weights: they are ranks of dp, too
        assert {"compute_s", "exposed_dp_s", "exposed_ep_s"} <= set(case.metrics)


@pytest.mark.faults
def test_a_wrong_average_fails_its_mesh_and_no_other(bench: Callable[..., Any]) -> None:
    flags = (*ONCE, "--mesh", "dp2,ddp2,tp2,pp2:1f1b")
    run = bench(SCRIPT, *flags, inject="wrong-axis", timeout=200)
    assert run.status == 1
    dp, *right = run.report.cases
    assert dp.check.startswith("failed: the gradient's norm in step 1 is ")
    assert [case.check for case in right] == ["passed"] * 3
    for case, axis in zip(right, ("dp", "tp", "pp"), strict=True):
        exposed = {f"exposed_{each}_s" for each in ("dp", "tp", "pp", "cp", "ep")}
        assert exposed & set(case.metrics) == {f"exposed_{axis}_s"}
        assert case.metrics["compute_s"].value > 0
    assert "\n# pp2:1f1b, place 2: computes for " in run.out


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--mesh", "dp1,tp4"), "error: mesh tp4 has 4 ranks, this job 1; e.g. dp1"),
        (("--sequence-length", "999999999"), "; lower --sequence-length or --global-batch"),
        (("--global-batch", "999999999"), "; lower --sequence-length or --global-batch"),
    ],
)
def test_what_cannot_be_is_refused(
    bench: Callable[..., Any], flags: tuple[str, ...], line: str
) -> None:
    run = bench(SCRIPT, *flags, ranks=0, json=False)
    assert run.status == 2
    assert line in run.err
    assert run.err.count("\n") == 1


@pytest.mark.faults
def test_a_rank_that_raises_fails_its_case_and_no_other(bench: Callable[..., Any]) -> None:
    """The other one waits for it in the groups of the mesh, which are aborted."""
    flags = (*SMALL, "--iters", "5", "--no-breakdown", "--mesh", "cp2,dp2")
    run = bench(SCRIPT, *flags, inject="step-raises", timeout=120)
    assert run.status == 1
    first, second = run.report.cases
    assert first.check == "failed: RuntimeError: injected: no kernel for this step (rank 1)"
    assert second.check == "passed"


@pytest.mark.faults
def test_a_planted_delay_is_found_on_its_axis(bench: Callable[..., Any], tmp_path: Path) -> None:
    """100 ms more for each collective of one axis, of which a step has more than a second.

    So much, since on a machine that runs other tests a step of 0.3 s swings by 0.2 s.
    """
    calls, flags = tmp_path / "calls", (*SMALL, "--iters", "3", "--mesh", "cp2")
    planting = {"SLOW": "dp of cp2", "DELAY": "0.1", "CALLS": str(calls)}
    run = bench(SCRIPT, *flags, inject="slow-axis", timeout=300, **planting)
    assert run.status == 0, run.out + run.err
    found = run.report.cases[0].metrics
    wanted = json.loads(calls.read_text())["dp of cp2"] * 0.1
    assert wanted > 1
    assert found["exposed_dp_s"].value == pytest.approx(wanted, rel=0.35)
    assert abs(found["exposed_cp_s"].value) < 0.35 * wanted
