"""parallel_sweep.py as its user runs it: every kind of mesh, its check, and a planted delay."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = "benchmarks/parallel_sweep.py"
SMALL = ("--sequence-length", "32", "--global-batch", "8", "--warmup-iters", "0")


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("ranks", "meshes"),
    [
        (2, ("dp2", "ddp2", "tp2", "cp2")),
        (4, ("dp2x2", "dp2tp2", "dp2pp2:1f1b", "cp2tp2")),
        (4, ("ep4", "dp2ep2", "pp2ep2:gpipe")),
    ],
    ids=["axes", "products", "experts"],
)
def test_meshes_pass_their_check(
    bench: Callable[..., Any], ranks: int, meshes: tuple[str, ...]
) -> None:
    run = bench(
        SCRIPT, *SMALL, "--iters", "2", "--mesh", ",".join(meshes), ranks=ranks, timeout=400
    )
    assert run.status == 0, run.out + run.err
    assert run.report.status == "complete"
    assert [case.key["mesh"] for case in run.report.cases] == list(meshes)
    for case in run.report.cases:
        m, axes = case.metrics, {"dp", "tp", "pp", "cp", "ep"}
        assert case.check == "passed"
        found = {axis for axis in axes if f"exposed_{axis}_s" in m}
        # what shares weights is a rank of dp: those of cp and ep too
        wanted = {axis for axis in axes if axis in case.key["mesh"]}
        assert found == wanted | ({"dp"} if {"cp", "ep"} & wanted else set())
        assert m["tokens_per_s"] == pytest.approx(8 * 32 / m["step_time_p50_s"])
        assert m["compute_s"] > 0
        assert ("pipeline_idle" in m) == ("pp" in found)
        assert m["memory_gib"] >= m["memory_min_gib"]
    assert "# best: " in run.out


@pytest.mark.smoke
def test_every_schedule(bench: Callable[..., Any]) -> None:
    schedules = ("gpipe", "1f1b", "interleaved", "bfs", "izb", "zbv", "dualpipev")
    meshes = ",".join(f"pp2:{schedule}" for schedule in schedules)
    run = bench(SCRIPT, *SMALL, "--iters", "2", "--mesh", meshes, timeout=400)
    assert run.status == 0, run.out + run.err
    cases = run.report.cases
    assert [case.check for case in cases] == ["passed"] * len(schedules)
    assert cases[1].metrics["pipeline_idle_theory"] == pytest.approx(1 / 5)  # 2 stages, 4 parts
    assert "# pp2:1f1b: stages compute " in run.out


@pytest.mark.smoke
def test_what_a_backend_lacks_is_a_row_and_what_does_not_fit_is_refused(
    bench: Callable[..., Any],
) -> None:
    flags = (*SMALL, "--iters", "2", "--no-breakdown")
    run = bench(SCRIPT, *flags, "--mesh", "cp2:ring,dp2", timeout=120)
    assert run.status == 1
    ring, dp = run.report.cases
    assert ring.check.startswith("failed: ValueError: ring attention (context_parallel) needs CUDA")
    assert dp.check == "passed"
    assert "exposed_dp_s" not in dp.metrics
    refused = bench(SCRIPT, "--mesh", "dp2,tp4", json=False)
    assert refused.status != 0
    assert "error: mesh tp4 has 4 ranks, this job 2; e.g. dp2" in refused.err


@pytest.mark.faults
def test_a_wrong_average_fails_its_mesh_and_no_other(bench: Callable[..., Any]) -> None:
    flags = (*SMALL, "--iters", "2", "--no-breakdown", "--mesh", "dp2,tp2")
    run = bench(SCRIPT, *flags, inject="wrong-axis", timeout=120)
    assert run.status == 1
    dp, tp = run.report.cases
    assert dp.check.startswith("failed: the gradient's norm in step 1 is ")
    assert tp.check == "passed"


@pytest.mark.faults
def test_a_rank_that_raises_fails_its_case_and_no_other(bench: Callable[..., Any]) -> None:
    """The other ranks wait for it in the groups of the mesh, which are aborted."""
    flags = (*SMALL, "--iters", "12", "--no-breakdown", "--mesh", "dp2tp2,dp4")
    run = bench(SCRIPT, *flags, inject="step-raises", ranks=4, timeout=120)
    assert run.status == 1
    first, second = run.report.cases
    assert first.check == "failed: RuntimeError: injected: no kernel for this step (rank 1)"
    assert second.check == "passed"


@pytest.mark.faults
def test_a_planted_delay_is_found_on_its_axis(bench: Callable[..., Any], tmp_path: Path) -> None:
    """100 ms more for each collective of one axis; the same mesh by three names, in one run.

    So much, since on a machine that runs other tests a step of 0.3 s swings by 0.2 s.
    """
    calls, flags = tmp_path / "calls", (*SMALL, "--iters", "6", "--mesh", "cp2,cp2dp1,dp1cp2")
    slow = {"cp": "cp of cp2dp1", "dp": "dp of dp1cp2"}
    planting = {"SLOW": ",".join(slow.values()), "DELAY": "0.1", "CALLS": str(calls)}
    run = bench(SCRIPT, *flags, inject="slow-axis", timeout=480, **planting)
    assert run.status == 0, run.out + run.err
    usual, *planted = (case.metrics for case in run.report.cases)
    for (axis, name), found in zip(slow.items(), planted, strict=True):
        wanted = json.loads(calls.read_text())[name] * 0.1
        more = {a: found[f"exposed_{a}_s"] - usual[f"exposed_{a}_s"] for a in slow}
        assert more.pop(axis) == pytest.approx(wanted, rel=0.35)
        assert abs(more.popitem()[1]) < 0.35 * wanted
