"""common/dist.py: who this process is and which device is its own, before any group."""

import os

import pytest
import torch

from common.dist import (
    CaseGroup,
    bind_cores,
    broadcast_int,
    broadcast_json,
    choose_device,
    gather_json,
    gather_rows,
    reduce_max,
    world_from_environment,
)
from common.network import interface_towards


def start(
    monkeypatch: pytest.MonkeyPatch, devices: int = 0, local_rank: int = 0, local: int = 8
) -> None:
    """As torchrun starts a rank on the second of two nodes, where it sees so many devices."""
    values = {"RANK": local + local_rank, "WORLD_SIZE": 2 * local}
    values |= {"LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)


def test_world_from_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert world_from_environment() == (0, 1, 0, 1)
    start(monkeypatch, local_rank=3)
    assert world_from_environment() == (11, 16, 3, 8)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
def test_half_an_environment(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    start(monkeypatch)
    for value in (None, "", "two"):
        monkeypatch.delenv(name)
        if value is not None:
            monkeypatch.setenv(name, value)
        with pytest.raises(ValueError, match=rf"got {name}={value!r}; start with torchrun"):
            world_from_environment()
        monkeypatch.setenv(name, "0")


@pytest.mark.parametrize(
    ("devices", "local_rank", "local", "flags", "want"),
    [
        (0, 3, 8, ("auto", None), ("cpu", "gloo")),
        (8, 3, 8, ("auto", None), ("cuda:3", "nccl")),
        (8, 3, 8, ("cuda", "gloo"), ("cuda:3", "gloo")),
        (8, 3, 8, ("cpu", None), ("cpu", "gloo")),
        (1, 3, 8, ("auto", None), ("cuda:0", "nccl")),  # each rank is shown its own
        (2, 3, 8, ("auto", "gloo"), ("cuda:1", "gloo")),  # shared
    ],
)
def test_choose_device(
    monkeypatch: pytest.MonkeyPatch,
    devices: int,
    local_rank: int,
    local: int,
    flags: tuple[str, str | None],
    want: tuple[str, str],
) -> None:
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: True)
    start(monkeypatch, devices, local_rank, local)
    assert choose_device(*flags) == (torch.device(want[0]), want[1])


@pytest.mark.parametrize(
    ("devices", "flags", "message"),
    [
        (0, ("cuda", None), "--device cuda: torch sees no CUDA device here"),
        (0, ("auto", "nccl"), "--distributed-backend nccl needs CUDA devices"),
        (8, ("cpu", "nccl"), "--distributed-backend nccl needs CUDA devices"),
        (2, ("auto", None), "8 ranks on this node, 2 devices; try --nproc-per-node 2"),
        (0, ("auto", "mpi"), "this torch has no backend 'mpi'"),
    ],
)
def test_devices_and_backends_that_do_not_go_together(
    monkeypatch: pytest.MonkeyPatch, devices: int, flags: tuple[str, str | None], message: str
) -> None:
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: name != "mpi")
    start(monkeypatch, devices)
    with pytest.raises(ValueError, match=message):
        choose_device(*flags)


def test_exchanges_in_a_world_of_one(group: CaseGroup) -> None:
    assert group.ranks == (0,)
    assert group.test is not group.control
    values = torch.tensor([1.0, 2.0])
    assert reduce_max(values, group.control).tolist() == [1.0, 2.0]
    assert broadcast_int(7, group.control) == 7
    rows = gather_rows(values, group.control)
    assert rows is not None
    assert rows.tolist() == [[1.0, 2.0]]
    message = {"text": "\u00e4\u2028", "list": [1, None, 0.5]}
    assert broadcast_json(message) == message
    assert gather_json(message) == [message]


def test_interface_towards() -> None:
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_towards("127.0.0.53") == "lo"
    assert interface_towards("no such host.invalid") is None


def test_ranks_are_bound_to_cores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[list[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2, 3, 5, 8})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: bound.append(cores))
    for local_rank in range(2):
        start(monkeypatch, local_rank=local_rank, local=2)
        bind_cores()
    assert bound == [[0, 2], [3, 5]]
    start(monkeypatch, local=6)
    with pytest.raises(ValueError, match="a core for each rank of a node; here are 5 for 6 ranks"):
        bind_cores()
