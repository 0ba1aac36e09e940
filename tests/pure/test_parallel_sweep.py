"""The arithmetic of parallel_sweep.py, by hand: meshes, the breakdown."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks.parallel_sweep import (
    breakdown,
    parse_args,
    plan,
    scatter_noise,
    title_of,
)
from common.stats import Times
from common.workloads.axes import ring_attention
from common.workloads.meshes import default_meshes, misfit, parse_mesh

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
        ("dp0", "a mesh"),
        ("tp2x4", "a mesh"),
        ("dp4x1", "a mesh"),  # one shard is no HSDP
        ("ddp4tp2", "ddp8 by itself"),
        ("dp2dp4", "a mesh"),
        ("pp4", "after a pipeline"),  # which schedule?
        ("dp4:1f1b", "after a pipeline"),
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
        (
            "pp2:interleaved",
            (2, 128, 20, 5, 0),
            "that 2 rounds share equally, got 5; e.g. --microbatches 4",
        ),
        (
            "pp2:izb",
            (2, 128, 20, 5, 0),
            "izb needs microbatches that 2 rounds share equally, got 5",
        ),
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
    key |= {"global_batch": 16, "microbatches": 4, "experts": 0, **CPU}
    assert misfit(key) is None
    assert misfit(key | {"device": "cuda", "backend": "nccl"}) is None
    refused = "mesh pp2:1f1b: gloo sends no CUDA tensors between stages; e.g. dp2"
    assert misfit(key | {"device": "cuda"}) == refused
    assert misfit(key | {"device": "cuda", "mesh": "dp2"}) is None


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


def test_a_case_without_a_breakdown_has_another_key() -> None:
    """The default is in no key: cases of older reports are met by it."""
    for flags, fields in (([], {}), (["--no-breakdown"], {"breakdown": False})):
        args = parse_args(["--mesh", "dp2", *flags])
        (key,) = plan(args, [parse_mesh("dp2")], False, {"world_size": 2, **CPU})
        assert {name: key[name] for name in key if name == "breakdown"} == fields


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
    assert found["compute_s"] == pytest.approx(0.7)
    assert found["exposed_pp_s"] == pytest.approx(1.0 - 0.8)
    assert found["exposed_dp_s"] == pytest.approx(1.0 - 0.9)
    assert found["exposed_dp_ci95_s"] == pytest.approx([0.1, 0.1])
    assert found["stage_compute_s"] == pytest.approx([0.5, 0.7])
    assert found["stage_idle"] == pytest.approx([0.4, 0.2])  # 1 - 0.6 / 1, 1 - 0.8 / 1
    assert found["pipeline_idle"] == pytest.approx(0.3)
    assert found["pipeline_idle_theory"] == pytest.approx(1 / 5)  # 2 stages: 1 of 4 + 1 slots
    # two stages on a rank halve each slot: 3 of 2 * 8 + 3
    alone = {"step": samples["step"], "compute": samples["compute"]}  # as of a single axis
    found = breakdown(parse_mesh("pp4:interleaved"), 8, Times(alone, [1] * 6))
    assert found["pipeline_idle_theory"] == pytest.approx(3 / 19)
