"""The arithmetic of parallel_sweep.py, by hand: meshes, places, pipelines, the verdict."""

import argparse
from typing import Any

import pytest

from benchmarks.parallel_sweep import (
    best,
    default_meshes,
    idle_in_theory,
    misfit,
    parse_mesh,
    stages_of,
)
from common.report import Case


@pytest.mark.parametrize(
    ("name", "size", "axes", "what"),
    [
        ("dp8", 8, ["dp"], {"dp": 8, "replicas": 1, "how": ""}),
        ("dp2x4", 8, ["dp"], {"dp": 8, "replicas": 2}),
        ("ddp8", 8, ["dp"], {"dp": 8, "how": "ddp"}),
        ("dp4tp2", 8, ["dp", "tp"], {"dp": 4, "tp": 2, "stages": 1}),
        ("dp2pp4:1f1b", 8, ["pp", "dp"], {"how": "1f1b", "stages": 4}),
        ("pp4:interleaved", 4, ["pp"], {"stages": 8}),
        ("pp4:zbv", 4, ["pp"], {"stages": 8}),
        # ranks of cp and ep share gradients: they are ranks of dp as well
        ("cp8", 8, ["dp", "cp"], {"data": 8, "how": ""}),
        ("cp4:ring", 4, ["dp", "cp"], {"how": "ring"}),
        ("dp2ep4", 8, ["dp", "ep"], {"data": 8}),
        ("dp2x2ep2pp2:zbv", 16, ["pp", "dp", "ep"], {"data": 8, "replicas": 2, "stages": 4}),
        ("dp1", 1, [], {"data": 1}),
    ],
)
def test_mesh_by_name(name: str, size: int, axes: list[str], what: dict[str, Any]) -> None:
    mesh = parse_mesh(name)
    assert (mesh.name, mesh.size, mesh.axes) == (name, size, axes)
    assert {field: getattr(mesh, field) for field in what} == what


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("fsdp8", "a mesh, got 'fsdp8'; e.g. dp8"),
        ("dp0", "a mesh"),
        ("tp2x4", "a mesh"),
        ("ddp4tp2", "ddp8 by itself"),
        ("dp2dp4", "each axis once"),
        ("pp4", "after a pipeline"),  # which schedule?
        ("dp4:1f1b", "after a pipeline"),
        ("pp4:2f2b", "after a pipeline"),
        ("dp4:ring", "e.g. pp4:1f1b or cp4:ring"),
        ("pp2cp2:ring", "after a pipeline"),
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
        ("dp8", (4, 128, 16, 1, 0), "has 8 ranks, this job 4; e.g. dp4"),
        ("tp16", (16, 128, 16, 1, 0), "tp = 16 does not divide 8, heads"),
        ("dp8", (8, 128, 12, 1, 0), "dp * ep * microbatches = 8 does not divide 12"),
        ("dp2pp4:1f1b", (8, 128, 8, 8, 0), "dp * ep * microbatches = 16 does not divide 8"),
        ("pp3:1f1b", (3, 128, 12, 6, 0), "stages = 3 does not divide 8, layers"),
        ("pp4:1f1b", (4, 128, 16, 2, 0), "--microbatches 2 for 4 stages"),
        ("cp4tp2", (8, 100, 16, 1, 0), "cp * tp = 8 does not divide 100, --sequence-length"),
        ("ep4", (4, 128, 16, 1, 6), "ep = 4 does not divide 6, --experts"),
        ("tp4", (4, 128, 16, 1, 8), "tp does not split experts"),
    ],
)
def test_the_number_that_does_not_fit(
    name: str, numbers: tuple[int, int, int, int, int], says: str | None
) -> None:
    names = ("world_size", "sequence_length", "global_batch", "microbatches", "experts")
    key = {"mesh": name, "model": "decoder-tiny", **dict(zip(names, numbers, strict=True))}
    problem = misfit(key)
    assert (problem is None) if says is None else (problem and says in problem)


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("pp4:1f1b", [[0], [1], [2], [3]]),
        ("pp4:interleaved", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("pp4:zbv", [[0, 7], [1, 6], [2, 5], [3, 4]]),  # down and up again, as a V
        ("dp4", [[0]]),
    ],
)
def test_stages_of_each_place(name: str, stages: list[list[int]]) -> None:
    mesh = parse_mesh(name)
    assert [stages_of(mesh, place) for place in range(mesh.pp)] == stages


def test_idle_in_theory() -> None:
    # 4 stages, 8 microbatches: 3 of 11 slots; two stages a rank halve each slot: 3 of 19
    assert idle_in_theory(parse_mesh("pp4:1f1b"), 8) == pytest.approx(3 / 11)
    assert idle_in_theory(parse_mesh("pp4:gpipe"), 8) == pytest.approx(3 / 11)
    assert idle_in_theory(parse_mesh("dp2pp4:interleaved"), 8) == pytest.approx(3 / 19)
    assert idle_in_theory(parse_mesh("pp4:zbv"), 8) is None
    assert idle_in_theory(parse_mesh("dp4"), 1) is None


def test_default_meshes_fit_their_ranks() -> None:
    assert default_meshes(4) == ["dp4", "tp4", "dp2tp2", "pp4:1f1b"]
    assert default_meshes(8) == ["dp8", "tp8", "dp4tp2", "dp2pp4:1f1b"]
    assert default_meshes(2) == ["dp2", "tp2", "pp2:1f1b"]
    assert default_meshes(3) == ["dp3", "tp3"]
    for ranks in range(1, 65):
        assert {parse_mesh(name).size for name in default_meshes(ranks)} == {ranks}


def case(mesh: str, p50: float, low: float, high: float, check: str = "passed") -> Case:
    metrics = {"step_time_p50_s": p50, "step_time_ci95_s": [low, high]}
    return Case({"mesh": mesh}, [0], metrics=metrics if check == "passed" else {}, check=check)


def test_verdict() -> None:
    cases = [
        case("dp8", 0.112, 0.111, 0.113),
        case("dp4tp2", 0.100, 0.099, 0.101),
        case("pp8:1f1b", 0.150, 0.140, 0.160),
        case("pp8:zbv", 0.152, 0.140, 0.160),
        case("cp8", 0, 0, 0, "failed: why"),
    ]
    # at worst 0.111 / 0.101 = 1.099, at best 0.113 / 0.099 = 1.141
    assert best(cases) == (
        "# best: dp4tp2, 1.12x dp8 (95 % 1.10 to 1.14); pp8:1f1b and pp8:zbv cannot be told apart"
    )
    assert best(cases[:1]) is None


def test_too_few_samples_give_no_verdict() -> None:
    few = case("dp8", 0.112, 0, 0)
    few.metrics["step_time_ci95_s"] = None
    assert best([few, case("tp8", 0.2, 0.19, 0.21)]) == (
        "# best: dp8, 1.79x tp8 (too few samples); dp8 and tp8 cannot be told apart"
    )
