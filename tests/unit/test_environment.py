"""common/environment.py: what is said about the machine."""

import json
from typing import Any

import pytest

from common.dist import RankContext
from common.environment import (
    _differences,
    _runs,
    collect,
    launcher,
    preamble,
    refuse_shared_devices,
)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], ""),
        ([0], "0"),
        ([0, 1], "0-1"),
        ([0, 1, 2, 3, 7], "0-3,7"),
        ([0, 2, 4], "0,2,4"),
        ([5, 6, 8, 9, 10], "5-6,8-10"),
    ],
)
def test_runs(numbers: list[int], text: str) -> None:
    assert _runs(numbers) == text


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({}, "python"),
        ({"SLURM_PROCID": "0"}, "python"),  # inside sbatch, by hand
        ({"RANK": "0", "WORLD_SIZE": "1"}, "python"),
        ({"SLURM_PROCID": "0", "RANK": "0"}, "srun"),
        ({"TORCHELASTIC_RUN_ID": "x", "RANK": "0"}, "torchrun"),
        ({"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "SLURM_PROCID": "0"}, "torchrun"),
    ],
)
def test_launcher(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], name: str) -> None:
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    assert launcher() == name


# -- nodes that differ -----------------------------------------------------------------------------


def leaders(*changes: dict[str, Any]) -> list[dict[str, Any]]:
    """What the first rank of each node reports."""
    node = {"device": "H200", "cpu": {"cores": 8}, "torch": "2.15", "nccl": "2.30"}
    return [
        node | {"topology": "ring\nof eight", "host": f"n{i}"} | change
        for i, change in enumerate(changes)
    ]


def test_no_differences() -> None:
    assert _differences(leaders({})) == []
    assert _differences(leaders({}, {}, {})) == []


@pytest.mark.parametrize("odd", range(3))
@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("device", "A100", "A100, others have H200"),
        ("torch", "2.14", "2.14, others have 2.15"),
        ("nccl", None, "None, others have 2.30"),
        ("cpu", {"cores": 4}, "{'cores': 4}, others have {'cores': 8}"),
    ],
)
def test_the_odd_node_of_three_is_named(odd: int, field: str, value: Any, text: str) -> None:
    nodes = leaders(*({field: value} if i == odd else {} for i in range(3)))
    assert _differences(nodes) == [f"node {odd} (n{odd}): {field} differs: {text}"]


def test_a_long_difference_is_told_by_its_digest() -> None:
    (line,) = _differences(leaders({}, {}, {"topology": "ring\nof four"}))
    assert line.startswith("node 2 (n2): topology differs: text with digest ")
    assert ", others have text with digest " in line
    assert len({word for word in line.replace(",", "").split() if len(word) == 8}) == 2 + 2


def test_every_difference_has_its_line() -> None:
    lines = _differences(leaders({"torch": "2.14"}, {}, {"nccl": "2.1", "torch": "2.13"}, {}))
    assert [line.split(" differs")[0] for line in lines] == [
        "node 0 (n0): torch",
        "node 2 (n2): torch",
        "node 2 (n2): nccl",
    ]


# -- the preamble ----------------------------------------------------------------------------------


def environment(ranks: int, topologies: list[str], **changes: Any) -> dict[str, Any]:
    per_node = ranks // len(topologies)
    rows = [
        {"rank": r, "host": f"n{r // per_node}", "device": "CPU", "cores": 1, "threads": 2}
        for r in range(ranks)
    ]
    versions = {"torch": "2.15.0", "cuda": None, "nccl": None, "driver": None, "python": "3.11.7"}
    counts = {"world_size": ranks, "num_nodes": len(topologies), "launcher": "torchrun"}
    return versions | counts | {"ranks": rows, "topologies": topologies} | changes


def test_preamble() -> None:
    text = preamble("ddp_sweep", environment(2, ["one\ntwo"]), "gloo")
    assert text.splitlines() == [
        "# torchrun-bench ddp_sweep",
        "# PyTorch 2.15.0, Python 3.11.7, backend gloo",
        "# 2 ranks on 1 node, started by torchrun",
        "# rank 0: n0, CPU, 1 core, 2 threads",
        "# rank 1: n0, CPU, 1 core, 2 threads",
        "# topology of node 0:",
        "# one",
        "# two",
    ]


def test_preamble_with_cuda() -> None:
    gpu = environment(1, ["x"], cuda="13.0", nccl="2.30", driver="580")
    line = "# PyTorch 2.15.0, CUDA 13.0, NCCL 2.30, driver 580, Python 3.11.7, backend nccl"
    assert preamble("ddp_sweep", gpu, "nccl").splitlines()[1] == line


@pytest.mark.parametrize(
    ("ranks", "shown", "more"), [(64, 64, []), (65, 64, ["# ... and 1"]), (70, 64, ["# ... and 6"])]
)
def test_preamble_names_64_ranks(ranks: int, shown: int, more: list[str]) -> None:
    lines = preamble("ddp_sweep", environment(ranks, ["x"]), "gloo").splitlines()
    assert [line.split(":")[0] for line in lines if line.startswith("# rank ")] == [
        f"# rank {rank}" for rank in range(shown)
    ]
    assert [line.split(" more rank")[0] for line in lines if " more " in line] == more


def test_preamble_prints_each_topology_once() -> None:
    lines = preamble("ddp_sweep", environment(5, ["a", "a", "b", "a", "b"]), "gloo").splitlines()
    assert lines[-5].startswith("# rank 4: ")
    assert lines[-4:] == ["# topology of node 0-1,3:", "# a", "# topology of node 2,4:", "# b"]


def test_collect_in_a_world_of_one(world: RankContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_TEST", "1")
    found = collect(world)
    assert found is not None
    assert found == json.loads(json.dumps(found))
    assert (found["world_size"], found["local_world_size"], found["num_nodes"]) == (1, 1, 1)
    assert (found["cuda"], found["nccl"], found["driver"]) == (None, None, None)
    assert found["variables"]["GLOO_TEST"] == "1"
    (row,) = found["ranks"]
    assert (row["rank"], row["local_rank"], row["node"]) == (0, 0, 0)
    assert found["hosts"] == [row["host"]]
    assert found["devices"] == [row["device"]] == found["cpus"]
    assert found["differences"] == []
    assert len(found["topologies"]) == 1
    assert preamble("ddp_sweep", found, "gloo").startswith("# torchrun-bench ddp_sweep\n")


def test_ranks_that_share_a_device_are_refused_for_nccl() -> None:
    def rank(number: int, node: int, uuid: str) -> dict[str, Any]:
        return {"rank": number, "node": node, "host": f"n{node}", "uuid": uuid}

    apart = {"ranks": [rank(0, 0, "a"), rank(1, 0, "b"), rank(2, 1, "a")]}
    shared = {"ranks": [rank(0, 0, "a"), rank(1, 1, "b"), rank(2, 1, "b")]}
    refuse_shared_devices(apart, "nccl")
    refuse_shared_devices(shared, "gloo")
    refuse_shared_devices({"ranks": [rank(0, 0, ""), rank(1, 0, "")]}, "nccl")  # not known
    with pytest.raises(ValueError, match="ranks 1 and 2 share a device on n1"):
        refuse_shared_devices(shared, "nccl")
