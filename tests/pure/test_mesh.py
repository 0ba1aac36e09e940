"""The arithmetic of parallel_sweep.py, by hand: meshes, places, pipelines, the verdict."""

import argparse
from typing import Any

import pytest

from benchmarks.parallel_sweep import (
    best,
    coordinates,
    default_meshes,
    faster,
    idle_in_theory,
    misfit,
    parse_mesh,
    stages_of,
)
from common.report import Case


@pytest.mark.parametrize(
    ("name", "size", "axes", "what"),
    [
        ("dp8", 8, ["dp"], {"dp": 8, "replicas": 1}),
        ("dp2x4", 8, ["dp"], {"dp": 8, "replicas": 2}),
        ("ddp8", 8, ["dp"], {"dp": 8, "ddp": True}),
        ("dp4tp2", 8, ["dp", "tp"], {"dp": 4, "tp": 2}),
        ("dp2pp4:1f1b", 8, ["pp", "dp"], {"schedule": "1f1b", "stages": 4}),
        ("pp4:interleaved", 4, ["pp"], {"stages": 8}),
        ("pp4:zbv", 4, ["pp"], {"stages": 8}),
        # ranks of cp and ep share gradients: they are ranks of dp as well
        ("cp8", 8, ["dp", "cp"], {"data": 8, "ring": False}),
        ("cp4:ring", 4, ["dp", "cp"], {"ring": True}),
        ("dp2ep4", 8, ["dp", "ep"], {"data": 8}),
        ("cp2pp2:gpipe:ring", 4, ["pp", "dp", "cp"], {"ring": True, "schedule": "gpipe"}),
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
        ("dp2dp4", "each axis once"),
        ("dp2ddp4", "each axis once"),
        ("tp2x4", "NxM for dp alone"),
        ("pp4", "after a pipeline"),  # which schedule?
        ("dp4:1f1b", "after a pipeline"),
        ("pp4:2f2b", "after a pipeline"),
        ("dp4:ring", "ring after cp"),
        ("ddp4tp2", "ddp by itself"),
    ],
)
def test_what_is_no_mesh(name: str, says: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as error:
        parse_mesh(name)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("name", "numbers", "says"),
    [
        # ranks, sequence, batch, microbatches, experts; decoder-tiny: 8 layers, 8 heads, 256 words
        ("dp8", (8, 128, 16, 1, 0), None),
        ("dp8", (4, 128, 16, 1, 0), "has 8 ranks, this job 4; e.g. dp4"),
        ("tp16", (16, 128, 16, 1, 0), "tp = 16 does not divide 8, heads of decoder-tiny"),
        ("dp8", (8, 128, 12, 1, 0), "dp * ep * microbatches = 8 does not divide 12"),
        ("dp2pp4:1f1b", (8, 128, 8, 8, 0), "dp * ep * microbatches = 16 does not divide 8"),
        ("pp3:1f1b", (3, 128, 12, 6, 0), "stages = 3 does not divide 8, layers"),
        ("pp4:1f1b", (4, 128, 16, 2, 0), "--microbatches 2 for 4 stages"),
        ("pp2:interleaved", (2, 128, 10, 5, 0), "pp = 2 does not divide --microbatches 5"),
        ("cp4tp2", (8, 100, 16, 1, 0), "cp * tp = 8 does not divide 100, --sequence-length"),
        ("cp4:ring", (4, 132, 16, 1, 0), "cp * tp = 8 does not divide 132"),  # two pieces a rank
        ("ep4", (4, 128, 16, 1, 6), "ep = 4 does not divide 6, --experts"),
        ("tp4", (4, 128, 16, 1, 8), "tp does not split experts"),
    ],
)
def test_the_number_that_does_not_fit(
    name: str, numbers: tuple[int, int, int, int, int], says: str | None
) -> None:
    ranks, sequence, batch, microbatches, experts = numbers
    mesh = parse_mesh(name)
    problem = misfit(mesh, ranks, "decoder-tiny", sequence, batch, microbatches, experts)
    assert (problem is None) if says is None else (problem and says in problem)


def test_places_pp_outermost_tp_innermost() -> None:
    mesh = parse_mesh("dp2tp2pp2:1f1b")
    places = [coordinates(mesh, rank) for rank in range(8)]
    assert [place["tp"] for place in places] == [0, 1] * 4
    assert [place["dp"] for place in places] == [0, 0, 1, 1] * 2
    assert [place["pp"] for place in places] == [0] * 4 + [1] * 4


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


def test_ratio_of_two_cases() -> None:
    # 3 % and 4 % of half width add up to 5 %, on a logarithmic scale
    a, b = case("a", 1.0, 1 / 1.03, 1.03), case("b", 1.2, 1.2 / 1.04, 1.2 * 1.04)
    ratio, interval = faster(a, b)
    assert ratio == pytest.approx(1.2)
    assert interval == pytest.approx((1.2 / 1.05, 1.2 * 1.05), rel=1e-3)


def test_verdict() -> None:
    cases = [
        case("dp8", 0.112, 0.111, 0.113),
        case("dp4tp2", 0.100, 0.099, 0.101),
        case("pp8:1f1b", 0.150, 0.140, 0.160),
        case("pp8:zbv", 0.152, 0.140, 0.160),
        case("cp8", 0, 0, 0, "failed: why"),
    ]
    # 1.00 % and 0.89 % add up to 1.34 %: 1.12 times 0.987 and 1.013
    assert best(cases) == (
        "# best: dp4tp2, 1.12x dp8 (95 % 1.11 to 1.14); pp8:1f1b and pp8:zbv cannot be told apart"
    )
    assert best(cases[:1]) is None
