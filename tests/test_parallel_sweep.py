"""parallel_sweep.py in full runs: every kind of mesh, the check, a planted delay."""

import gzip
import json
from pathlib import Path

import pytest

from tests.process import Bench

SCRIPT = "benchmarks/parallel_sweep.py"
SMALL = ("--sequence-length", "32", "--global-batch", "8", "--warmup-iters", "0")


@pytest.mark.smoke
def test_meshes_pass_their_check(bench: Bench) -> None:
    """Meshes of one axis are in the next tests."""
    meshes = ["dp2x2", "dp2tp2", "cp2tp2", "pp4:gpipe", "dp2pp2:izb", "dp2pp2:zbv"]
    meshes.append("pp2tp2:interleaved")
    flags = ("--iters", "1", "--no-breakdown", "--mesh", ",".join(meshes))
    run = bench(SCRIPT, *SMALL, *flags, ranks=4)
    assert [case.key["mesh"] for case in run.report.cases] == meshes
    assert {case.check for case in run.report.cases} == {"passed"}


@pytest.mark.smoke
def test_a_mesh_with_experts(bench: Bench) -> None:
    run = bench(SCRIPT, *SMALL, "--iters", "1", "--mesh", "dp2ep2", ranks=4)
    (case,) = run.report.cases
    assert case.check == "passed"
    # the ranks of ep also are ranks of dp, because they share the other weights
    assert {"compute_s", "exposed_dp_s", "exposed_ep_s"} <= set(case.metrics)


@pytest.mark.faults
def test_a_wrong_average_fails_only_its_mesh(bench: Bench) -> None:
    flags = (*SMALL, "--iters", "1", "--mesh", "dp2,ddp2,tp2,pp2:1f1b")
    run = bench(SCRIPT, *flags, inject="wrong-axis", status=1)
    dp, *right = run.report.cases
    assert dp.check.startswith("failed: the gradient's norm in step 1 is ")
    assert [case.check for case in right] == ["passed"] * 3
    for case, axis in zip(right, ("dp", "tp", "pp"), strict=True):
        exposed = {f"exposed_{each}_s" for each in ("dp", "tp", "pp", "cp", "ep")}
        assert exposed & set(case.metrics) == {f"exposed_{axis}_s"}
    assert "\n# pp2:1f1b, pp rank 1 computes for " in run.out


@pytest.mark.faults
def test_a_rank_that_raises_fails_only_its_case(bench: Bench) -> None:
    """The other rank waits for it in the groups of the mesh, which are aborted."""
    flags = (*SMALL, "--iters", "5", "--no-breakdown", "--mesh", "cp2,dp2")
    run = bench(SCRIPT, *flags, inject="step-raises", status=1)
    first, second = run.report.cases
    assert first.check == "failed: RuntimeError: injected: no kernel for this step (rank 1)"
    assert second.check == "passed"


@pytest.mark.faults
def test_a_planted_delay_is_found_on_its_axis(bench: Bench, tmp_path: Path) -> None:
    """10 ms for each collective of one axis, by a clock that counts only these delays."""
    calls, flags = tmp_path / "calls", (*SMALL, "--iters", "2", "--mesh", "cp2")
    planting = {"SLOW": "dp of cp2", "DELAY": "0.01", "CALLS": str(calls)}
    run = bench(SCRIPT, *flags, inject="planted-time,slow-axis", **planting)
    found = run.report.cases[0].metrics
    wanted = json.loads(calls.read_text())["dp of cp2"] * 0.01
    assert wanted >= 0.1
    assert found["exposed_dp_s"].value == pytest.approx(wanted, rel=0.01)
    assert abs(found["exposed_cp_s"].value) < 0.01 * wanted


def communication_by_range(file: Path) -> dict[str, list[int]]:
    """How many operations of gloo began in each range of a trace, by the range's name."""
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    begun = [event["ts"] for event in complete if event["name"].startswith("gloo:")]
    counts: dict[str, list[int]] = {}
    for event in complete:
        if event["name"] in ("step", "without dp", "compute"):
            start, end = event["ts"], event["ts"] + event["dur"]
            within = [time for time in begun if start <= time <= end]
            counts.setdefault(event["name"], []).append(len(within))
    return counts


@pytest.mark.smoke
def test_a_trace_without_an_axis_communicating(bench: Bench, tmp_path: Path) -> None:
    """Only rank 1 writes a trace. The samples are as without the flag."""
    folder = tmp_path / "tr aces"
    flags = ("--iters", "2", "--mesh", "dp2", "--profile", str(folder), "--profile-ranks", "1")
    run = bench(SCRIPT, *SMALL, *flags)
    (case,) = run.report.cases
    assert case.check == "passed"
    assert [len(times) for times in case.samples_s["step"]] == [2, 2]
    assert list(case.metrics["traces"]) == ["1"]
    summary = case.metrics["traces"]["1"]
    (file,) = folder.iterdir()
    assert summary["file"] == str(file)
    assert file.name.endswith("-rank1.json.gz")
    assert set(summary) == {"file", "slowdown", "step_s"}
    assert summary["slowdown"] > 0
    assert f"\n# trace of rank 1: {str(file).replace('rank1', 'rank*')}" in run.out
    counts = communication_by_range(file)
    assert [len(counts[name]) for name in counts] == [5] * len(case.samples_s)
    assert min(counts.pop("step")) > 0
    assert set(map(max, counts.values())) == {0}
