"""parallel_sweep.py: meshes, the breakdown, the check and the answer."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks import parallel_sweep
from benchmarks.workloads.axes import ring_attention
from benchmarks.workloads.meshes import default_meshes, misfit, parse_mesh
from benchmarks.workloads.reference import Reference
from common.stats import Estimate, Times
from harness.report import Case


@pytest.mark.parametrize(
    ("name", "axes", "fields"),
    [
        ("dp2x4", ["dp"], {"dp": 8, "replicas": 2, "ddp": False}),
        ("dp2pp4:1f1b", ["pp", "dp"], {"schedule": "1f1b", "stages": 4}),
        # ranks of cp and ep average gradients, so they are ranks of dp as well
        ("cp4:ring", ["dp", "cp"], {"data": 4, "ring": True}),
        ("dp2x2ep2pp2:zbv", ["pp", "dp", "ep"], {"data": 8, "replicas": 2, "stages": 4}),
    ],
)
def test_mesh_by_name(name: str, axes: list[str], fields: dict[str, Any]) -> None:
    mesh = parse_mesh(name)
    assert mesh.axes == axes
    assert {field: getattr(mesh, field) for field in fields} == fields


def key_of(mesh: str, sequence: int, batch: int, microbatches: int, experts: int) -> dict[str, Any]:
    numbers = {"sequence_length": sequence, "global_batch": batch, "microbatches": microbatches}
    parsed, place = parse_mesh(mesh), {"device": "cpu", "backend": "gloo"}
    ranks = parsed.pp * parsed.data * parsed.tp
    fixed = {"mesh": mesh, "model": "decoder-tiny", "experts": experts, "world_size": ranks}
    return fixed | numbers | place


MISFITS = {  # sequence, batch, microbatches, experts; decoder-tiny has 8 layers and 8 heads
    ("cp4tp2", 100, 16, 1, 0): "--sequence-length 100 is not divisible by cp * tp = 8; e.g.",
    ("ep3", 128, 15, 1, 8): "8 experts are not divisible by ep = 3",
    ("tp4", 128, 16, 1, 8): "tp does not shard experts",
    ("pp2:zbv", 128, 16, 2, 0): "zbv with 4 stages requires 4 microbatches",
    ("pp2:interleaved", 128, 20, 5, 0): "got 5; e.g. --microbatches 4",
}


def test_misfits_of_a_mesh() -> None:
    for given, says in MISFITS.items():
        assert says in (misfit(key_of(*given)) or "")


def test_numbers_that_fit_a_mesh() -> None:
    assert misfit(key_of("pp4:interleaved", 128, 20, 10, 0)) is None  # two rounds of five
    gpipe = key_of("pp2:gpipe", 128, 16, 1, 0)
    assert misfit(gpipe) is None
    said = "mesh pp2:gpipe: gloo sends no CUDA tensors between stages; e.g. dp2"
    assert misfit(gpipe | {"device": "cuda"}) == said
    assert default_meshes(2) == ["dp2", "tp2", "pp2:1f1b"]
    assert default_meshes(8) == ["dp8", "dp2tp4", "dp4tp2", "dp2pp4:1f1b"]
    for ranks in range(1, 65):
        for name in default_meshes(ranks):
            parts = 2 * parse_mesh(name).pp if "pp" in name else 1
            assert misfit(key_of(name, 128, 4 * ranks, parts, 0)) is None


def test_a_failed_ring_restores_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """context_parallel of torch 2.11 replaces it and does not restore it after an error."""
    attend = F.scaled_dot_product_attention

    @contextmanager
    def as_in_2_11(mesh: Any, **cut: Any) -> Iterator[None]:
        monkeypatch.setattr(F, "scaled_dot_product_attention", None)
        yield

    monkeypatch.setattr("benchmarks.workloads.axes.context_parallel", as_in_2_11)
    mesh: Any = None
    in_ring = ring_attention(torch.nn.Module(), mesh, [torch.ones(1, 2)])
    with pytest.raises(RuntimeError, match="planted"), in_ring():
        raise RuntimeError("planted")
    assert F.scaled_dot_product_attention is attend


def test_breakdown_by_hand() -> None:
    """dp2pp2: ranks 0 and 1 are the first stage. Six equal rounds of one iteration."""
    seconds = {
        "step": [1.0, 0.9, 1.0, 1.0],
        "without pp": [0.6, 0.5, 0.8, 0.7],
        "without dp": [0.9, 0.9, 0.9, 0.9],
        "compute": [0.4, 0.5, 0.7, 0.7],
    }
    samples = {name: [[s] * 6 for s in ranks] for name, ranks in seconds.items()}
    found = parallel_sweep.breakdown(parse_mesh("dp2pp2:1f1b"), 4, Times(samples, [1] * 6))
    assert found["compute_s"].value == pytest.approx(0.7)
    assert found["exposed_pp_s"].value == pytest.approx(1.0 - 0.8)
    assert vars(found["exposed_dp_s"]) == pytest.approx({"value": 0.1, "low": 0.1, "high": 0.1})
    assert [place.value for place in found["stage_compute_s"]] == pytest.approx([0.5, 0.7])
    assert [place.value for place in found["stage_idle"]] == pytest.approx([0.4, 0.2])  # 1 - 0.6
    assert found["pipeline_idle"].value == pytest.approx(0.3)
    assert found["pipeline_idle_theory"] == pytest.approx(1 / 5)  # 2 stages: 1 of 4 + 1 slots
    # of the ranks with the first stage; the second one is slower, because it has another stage
    assert (found["late_ranks"], found["late_wait_s"].value) == ([1], pytest.approx(0.1))
    # two stages per rank halve each slot: 3 of 2 * 8 + 3
    alone = {"step": samples["step"], "compute": samples["compute"]}  # the parts of a single axis
    found = parallel_sweep.breakdown(parse_mesh("pp4:interleaved"), 8, Times(alone, [1] * 6))
    assert found["pipeline_idle_theory"] == pytest.approx(3 / 19)


def test_training_is_compared_with_one_process() -> None:
    """Norms of 3 and 4 on two ranks are 5 together. Only the last stage has losses."""
    reference = Reference(0.1, [[1.0, 3.0]] * 3, [5.0] * 3)
    facts: list[Any] = [
        {"norms": [9.0] * 3, "losses": [[], [], []]},
        {"norms": [16.0] * 3, "losses": [[2.0, 2.0]] * 3},
    ]
    assert parallel_sweep.check(reference, facts, 2e-3) == "passed"
    assert parallel_sweep.check("no room", facts, 2e-3) == "skipped: no room"
    facts[1]["losses"] = [[2.0, 2.1]] * 3
    wrong = parallel_sweep.check(reference, facts, 2e-3)
    assert wrong.startswith("failed: the loss in step 1 is 2.05, ")
    facts[0]["norms"] = [9.0, 9.0, 9.5]
    wrong = parallel_sweep.check(reference, facts, 2e-3)
    assert wrong.startswith("failed: the gradient's norm in step 3 is ")


def test_peak_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(["A100-SXM4-80GB", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: next(names))
    cuda = torch.device("cuda")
    assert parallel_sweep.peak_flops(cuda, "bf16") == 312e12  # an old driver omits "NVIDIA"
    assert parallel_sweep.peak_flops(cuda, "bf16") is None  # a MIG instance
    assert parallel_sweep.peak_flops(torch.device("cpu"), "bf16") is None


def case_of(mesh: str, ms: Estimate, **metrics: Any) -> Case:
    return Case(key={"mesh": mesh}, ranks=[0], name=mesh, metrics={"step_s": ms * 1e-3, **metrics})


def test_the_answer_does_not_rank_meshes() -> None:
    exposed: dict[str, Any] = {"exposed_dp_s": Estimate(0.0162, 0.011, 0.022)}
    exposed |= {"exposed_tp_s": Estimate(0.002, -0.001, 0.004), "compute_s": Estimate(0.08)}
    exposed |= {"late_ranks": [0], "late_wait_s": Estimate(0.02, 0.018, 0.022)}
    cases = [
        case_of("dp8", Estimate(112, 111, 113)),
        case_of("dp4tp2", Estimate(100, 99, 101), **exposed),
    ]
    assert parallel_sweep.answer(cases, ["rank 0 on vm"]) == [
        "a step takes 100 ms (99 to 101) under dp4tp2, 112 ms (111 to 113) under dp8; "
        "these were timed one after the other; use analysis/ab.py to compare them",
        "under dp4tp2, the communication of dp adds 16 ms (11 to 22) and that of tp adds "
        "nothing measurable (-1 to 4 ms) to a step, which takes 100 ms",
        "under dp4tp2, rank 0 on vm makes the other ranks wait 20 ms (18 to 22) of 100 ms",
    ]
