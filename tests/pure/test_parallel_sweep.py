"""The arithmetic of parallel_sweep.py, by hand: meshes, the breakdown."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks.parallel_sweep import (
    answer,
    breakdown,
    check,
    parse_args,
    peak_flops,
    places_lines,
    plan,
    scatter_noise,
    title_of,
)
from common.report import Case, Estimate
from common.stats import Disturbed, Times
from common.workloads.axes import ring_attention
from common.workloads.meshes import default_meshes, misfit, parse_mesh
from common.workloads.reference import Reference

CPU = {"device": "cpu", "backend": "gloo"}


@pytest.mark.parametrize(
    ("name", "axes", "what"),
    [
        ("dp8", ["dp"], {"dp": 8, "replicas": 1, "ddp": False}),
        ("dp2x4", ["dp"], {"dp": 8, "replicas": 2}),
        ("ddp8", ["dp"], {"dp": 8, "ddp": True}),
        ("dp4tp2", ["dp", "tp"], {"dp": 4, "tp": 2, "stages": 1}),
        ("dp2pp4:1f1b", ["pp", "dp"], {"schedule": "1f1b", "stages": 4}),
        ("pp4:zbv", ["pp"], {"stages": 8}),
        # ranks of cp and ep share gradients: they are ranks of dp as well
        ("cp4:ring", ["dp", "cp"], {"data": 4, "ring": True}),
        ("dp2x2ep2pp2:zbv", ["pp", "dp", "ep"], {"data": 8, "replicas": 2, "stages": 4}),
        ("dp1", [], {"data": 1}),
    ],
)
def test_mesh_by_name(name: str, axes: list[str], what: dict[str, Any]) -> None:
    mesh = parse_mesh(name)
    assert mesh.axes == axes
    assert {field: getattr(mesh, field) for field in what} == what


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("fsdp8", "a mesh, got 'fsdp8'; e.g. dp8"),
        ("tp2x4", "a mesh"),
        ("dp4x1", "a mesh"),  # one shard is no HSDP
        ("ddp4tp2", "ddp8 by itself"),
        ("pp4", "after a pipeline"),  # which schedule?
        ("pp4:2f2b", "after a pipeline"),
        ("dp4:ring", "e.g. pp4:1f1b or cp4:ring"),
    ],
)
def test_what_is_no_mesh(name: str, says: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as error:
        parse_mesh(name)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("name", "numbers", "says"),
    [
        # ranks, sequence, batch, microbatches, experts; decoder-tiny: 8 layers, 8 heads
        ("dp8", (8, 128, 16, 1, 0), None),
        ("dp8", (4, 128, 16, 1, 0), "mesh dp8 has 8 ranks, this job 4; e.g. dp4"),
        ("tp16", (16, 128, 16, 1, 0), "tp = 16 does not divide 8, heads"),
        ("dp8", (8, 128, 12, 1, 0), "dp * ep * microbatches = 8 does not divide 12"),
        ("dp2pp4:1f1b", (8, 128, 8, 8, 0), "dp * ep * microbatches = 16 does not divide 8"),
        ("pp3:1f1b", (3, 128, 12, 6, 0), "stages = 3 does not divide 8, layers"),
        ("cp4tp2", (8, 100, 16, 1, 0), "cp * tp = 8 does not divide 100, --sequence-length"),
        ("ep3", (3, 128, 15, 1, 8), "ep = 3 does not divide 8, experts"),
        ("tp4", (4, 128, 16, 1, 8), "tp does not split experts"),
        ("cp2:ring", (2, 128, 16, 1, 0), "ring attention needs CUDA; try cp2 without :ring"),
        ("pp2:1f1b", (2, 128, 16, 1, 0), "1f1b has 2 stages and needs as many microbatches, got 1"),
        ("pp2:zbv", (2, 128, 16, 2, 0), "zbv has 4 stages"),
        ("pp2:zbv", (2, 128, 16, 4, 0), None),
        ("pp2:gpipe", (2, 128, 16, 1, 0), None),
        ("pp2:interleaved", (2, 128, 20, 5, 0), "got 5; e.g. --microbatches 4"),
        ("pp2:izb", (2, 128, 20, 5, 0), "microbatches that 2 rounds share equally, got 5"),
        ("pp4:interleaved", (4, 128, 20, 10, 0), None),  # two rounds of five
    ],
)
def test_the_number_that_does_not_fit(
    name: str, numbers: tuple[int, int, int, int, int], says: str | None
) -> None:
    names = ("world_size", "sequence_length", "global_batch", "microbatches", "experts")
    key = {"mesh": name, "model": "decoder-tiny", **dict(zip(names, numbers, strict=True)), **CPU}
    problem = misfit(key)
    assert (problem is None) if says is None else (problem and says in problem)


def test_pipelines_over_gloo_are_on_the_cpu() -> None:
    key = {"mesh": "pp2:1f1b", "model": "decoder-tiny", "world_size": 2, "sequence_length": 128}
    key |= {"global_batch": 16, "microbatches": 4, "experts": 0, **CPU, "device": "cuda"}
    assert misfit(key) == "mesh pp2:1f1b: gloo sends no CUDA tensors between stages; e.g. dp2"
    assert misfit(key | {"backend": "nccl"}) is None


def test_a_failed_ring_leaves_attention_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11's context_parallel replaces it and, after an error, never puts it back."""
    attend = F.scaled_dot_product_attention

    @contextmanager
    def as_in_2_11(mesh: Any, **cut: Any) -> Iterator[None]:
        F.scaled_dot_product_attention = lambda *tensors: tensors[0]
        yield
        F.scaled_dot_product_attention = attend

    monkeypatch.setattr("common.workloads.axes.context_parallel", as_in_2_11)
    mesh: Any = None
    in_ring = ring_attention(torch.nn.Module(), mesh, [torch.ones(1, 2)])
    with in_ring():
        assert F.scaled_dot_product_attention is not attend
    try:
        with pytest.raises(RuntimeError, match="planted"), in_ring():
            raise RuntimeError("planted")
        assert F.scaled_dot_product_attention is attend
    finally:
        F.scaled_dot_product_attention = attend


def test_the_ranks_of_a_gpu_fill_a_quarter_of_the_free_memory_with_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8_000, 9_000))
    monkeypatch.setattr(torch, "randn", lambda count, **how: made.append((count, how["dtype"])))
    for device, ranks, dtype in [("cuda", 1, "fp32"), ("cuda", 2, "bf16"), ("cpu", 2, "fp32")]:
        scatter_noise({"dtype": dtype}, torch.device(device), ranks)
    assert made == [(500, torch.float32), (500, torch.bfloat16)]


def test_the_title_names_what_all_meshes_share() -> None:
    key = {"model": "decoder-tiny", "sequence_length": 128, "global_batch": 16, "dtype": "fp32"}
    assert title_of(key | {"experts": 0}, None) == (
        "decoder-tiny, 128 tokens, global batch 16, fp32, SGD"
    )
    assert title_of(key | {"experts": 8}, 4).endswith(
        "SGD, 8 experts, 4 microbatches in a pipeline"
    )


def planned(*flags: str) -> list[dict[str, Any]]:
    args = parse_args(["--device", "cpu", *flags])
    job: Any = SimpleNamespace(world_size=4, device=torch.device("cpu"))
    _, cases = plan(args, args.mesh, job)
    assert [(name, ranks) for name, ranks, _ in cases] == [(mesh.name, 4) for mesh in args.mesh]
    return [key for _, _, key in cases]


def test_keys_are_complete_and_differ() -> None:
    dp, pp = planned("--mesh", "dp4,pp4:1f1b", "--microbatches", "12")
    assert dp.keys() == pp.keys()
    assert (dp["microbatches"], pp["microbatches"]) == (1, 12)
    assert (dp["model"], dp["sequence_length"], dp["global_batch"]) == ("decoder-nano", 64, 16)
    assert (dp["experts"], dp["breakdown"]) == (0, True)
    (ep,) = planned("--mesh", "ep4", "--no-breakdown", "--model", "decoder-tiny")
    assert (ep["experts"], ep["breakdown"], ep["sequence_length"]) == (8, False, 128)


def test_default_meshes_fit_their_ranks() -> None:
    assert default_meshes(1) == ["dp1"]
    assert default_meshes(2) == ["dp2", "tp2", "pp2:1f1b"]
    assert default_meshes(3) == ["dp3"]
    assert default_meshes(4) == ["dp4", "tp4", "dp2tp2", "pp4:1f1b"]
    assert default_meshes(8) == ["dp8", "dp2tp4", "dp4tp2", "dp2pp4:1f1b"]
    key = {"model": "decoder-nano", "sequence_length": 64, "experts": 0, **CPU}
    for ranks in range(1, 65):
        key |= {"world_size": ranks, "global_batch": 4 * ranks}
        for name in default_meshes(ranks):
            parts = 2 * parse_mesh(name).pp if "pp" in name else 1
            assert misfit(key | {"mesh": name, "microbatches": parts}) is None


def test_breakdown_by_hand() -> None:
    """dp2pp2: ranks 0 and 1 are the first stage. Six rounds of one iteration, all alike."""
    seconds = {
        "step": [1.0, 0.9, 1.0, 1.0],
        "without pp": [0.6, 0.5, 0.8, 0.7],
        "without dp": [0.9, 0.9, 0.9, 0.9],
        "compute": [0.4, 0.5, 0.7, 0.7],
    }
    samples = {name: [[s] * 6 for s in ranks] for name, ranks in seconds.items()}
    times = Times(samples, [1] * 6)
    found = breakdown(parse_mesh("dp2pp2:1f1b"), 4, times)
    assert found["compute_s"].value == pytest.approx(0.7)
    assert found["exposed_pp_s"].value == pytest.approx(1.0 - 0.8)
    exposed_dp = found["exposed_dp_s"]
    assert [exposed_dp.value, exposed_dp.low, exposed_dp.high] == pytest.approx([0.1] * 3)
    assert [place.value for place in found["stage_compute_s"]] == pytest.approx([0.5, 0.7])
    assert [place.value for place in found["stage_idle"]] == pytest.approx([0.4, 0.2])  # 1 - 0.6
    assert found["pipeline_idle"].value == pytest.approx(0.3)
    assert found["pipeline_idle"].high == pytest.approx(0.3)
    assert found["pipeline_idle_theory"] == pytest.approx(1 / 5)  # 2 stages: 1 of 4 + 1 slots
    # two stages on a rank halve each slot: 3 of 2 * 8 + 3
    alone = {"step": samples["step"], "compute": samples["compute"]}  # as of a single axis
    found = breakdown(parse_mesh("pp4:interleaved"), 8, Times(alone, [1] * 6))
    assert found["pipeline_idle_theory"] == pytest.approx(3 / 19)


def test_training_is_compared_with_one_process() -> None:
    """Two ranks with norms of 3 and 4: 5 together. Only the last stage has losses."""
    reference = Reference(0.1, [[1.0, 3.0]] * 3, [5.0] * 3)
    facts: list[Any] = [
        {"norms": [9.0] * 3, "losses": [[], [], []]},
        {"norms": [16.0] * 3, "losses": [[2.0, 2.0]] * 3},
    ]
    assert check(reference, facts, 2e-3) == "passed"
    assert check("no room", facts, 2e-3) == "skipped: no room"
    facts[0]["norms"] = [9.0, 9.0, 9.5]
    assert check(reference, facts, 2e-3).startswith("failed: the gradient's norm in step 3 is ")
    facts[0]["norms"], facts[1]["losses"] = [9.0] * 3, [[2.0, 2.1]] * 3
    assert check(reference, facts, 2e-3).startswith("failed: the loss in step 1 is 2.05, ")


@pytest.mark.parametrize(
    ("name", "dtype", "flops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("A100-SXM4-80GB", "fp32", 19.5e12),  # an old driver leaves "NVIDIA" out
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),  # a part of one
    ],
)
def test_the_peak_of_a_whole_gpu(
    name: str, dtype: str, flops: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda"), dtype) == flops
    assert peak_flops(torch.device("cpu"), dtype) is None


def case_of(mesh: str, ms: Estimate, **metrics: Any) -> Case:
    return Case(key={"mesh": mesh}, ranks=[0], name=mesh, metrics={"step_s": ms * 1e-3, **metrics})


def test_the_answer_tells_no_order() -> None:
    exposed: dict[str, Any] = {"exposed_dp_s": Estimate(0.0162, 0.011, 0.022)}
    exposed |= {"exposed_tp_s": Estimate(0.002, -0.001, 0.004), "compute_s": Estimate(0.08)}
    cases = [
        case_of("dp8", Estimate(112, 111, 113)),
        case_of("dp4tp2", Estimate(100, 99, 101), **exposed),
    ]
    assert answer(cases) == [
        "a step takes 100 ms (99 to 101) under dp4tp2, 112 ms (111 to 113) under dp8; "
        "these were timed one after the other, analysis/ab.py takes turns",
        "of a step's 100 ms under dp4tp2 dp exposes 16 ms (11 to 22), "
        "tp exposes 2 ms (-1 to 4: maybe none)",
    ]
    cases[1].metrics["exposed_dp_s"] = Estimate(0.12, 0.11, 0.13)  # longer than the step
    assert isinstance(answer(cases)[1], Disturbed)
    assert answer(cases[:1]) == ["a step takes 112 ms (111 to 113) under dp8"]


def test_a_pipeline_is_shown_place_by_place() -> None:
    places = {"stage_compute_s": [Estimate(0.020, 0.019, 0.022), Estimate(0.03)]}
    places |= {"stage_idle": [Estimate(0.33, 0.3, 0.36), Estimate(0.2)]}
    assert places_lines(case_of("pp2:1f1b", Estimate(30), **places)) == [
        "# pp2:1f1b, place 1: computes for 20.0 ms (19.0 to 22.0), idle 33 % (30 to 36)",
        "# pp2:1f1b, place 2: computes for 30.0 ms (no interval), idle 20 % (no interval)",
    ]
    assert places_lines(case_of("dp2", Estimate(30))) == []
