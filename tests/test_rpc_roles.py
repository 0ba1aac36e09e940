"""common/rpc.py: who does what, and what its four scripts refuse before they meet anybody."""

import runpy
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.optim

from benchmarks import parameter_server
from common.join import raise_file_limit
from common.rpc import RpcOptions, need_files, rpc_options, split_roles
from tests.process import ROOT


@pytest.mark.parametrize(
    "script", ["parameter_server", "ddp_rpc", "batch_update_ps", "rpc_latency"]
)
def test_a_torch_without_tensorpipe(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """In one line, before the script's own functions need torch.distributed.rpc."""
    for name in ("TensorPipeAgent", "functions"):
        monkeypatch.delattr(torch.distributed.rpc, name)
    monkeypatch.delattr(torch.distributed.optim, "DistributedOptimizer")
    monkeypatch.delitem(sys.modules, "common.rpc")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as refused:
        runpy.run_path(str(ROOT / "benchmarks" / f"{script}.py"))
    assert refused.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "this torch was built without TensorPipe" in line


@pytest.mark.parametrize(
    ("size", "flags", "roles"),
    [
        (3, "--ntrainer 3 --nserver 0 --routes allreduce", (range(3), range(3, 3), None)),
        (4, "--ntrainer 3 --nserver 0 --routes allreduce", (range(3), range(3, 3), 3)),
        (5, "--routes hybrid,allreduce", (range(3), range(3, 4), 4)),  # as with all routes
        (5, "--ntrainer 3 --routes rpc", (range(3), range(3, 4), 4)),
    ],
)
def test_no_server_where_no_route_needs_one(
    size: int, flags: str, roles: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    for name, value in {**world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    args = parameter_server.parse_args(["--device", "cpu", *flags.split()])
    assigned = parameter_server.choose_roles(args)
    assert (assigned.trainers, assigned.servers, assigned.master) == roles
    # the key says what there is, not which flags have led to it
    ((_, ranks, key), *_) = parameter_server.plan(args, assigned, {})
    assert (ranks, key["servers"]) == (len(assigned.trainers), len(assigned.servers))


def test_servers_by_pytorchs_names() -> None:
    names = "AverageBatchParameterServer,AverageParameterServer"
    args = parameter_server.parse_args(["--server", names])
    assert args.servers == ["batch", "running"]


@pytest.mark.parametrize(
    ("cores", "ranks", "threads", "transports"),
    [
        (8, 2, 4, ["auto"]),  # its part of the cores
        (2, 2, 2, ["auto"]),  # with 1 a function that makes an RPC would wait for itself
        (2, 4, 2, ["uv"]),  # shm would take cores from the ranks
        (64, 1, 16, ["auto"]),
    ],
)
def test_threads_and_transports_that_are_not_asked_for(
    cores: int, ranks: int, threads: int, transports: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.rpc.share", lambda value: value)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(cores)))
    bench: Any = SimpleNamespace(job=SimpleNamespace(local_world_size=ranks))
    flags: Any = dict.fromkeys(("rpc_threads", "rpc_transports", "rpc_timeout", "rpc_channels"))
    args: Any = SimpleNamespace(timeout=300.0, **flags)
    assert rpc_options(args, bench) == RpcOptions(threads, 600.0, transports, ["auto"])
    args = SimpleNamespace(**vars(args) | {"rpc_threads": 1, "rpc_transports": ["shm"]})
    assert rpc_options(args, bench) == RpcOptions(1, 600.0, ["shm"], ["auto"])


def test_files_that_rpc_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The soft limit is raised as far as needed; more than the hard limit cannot be had. 17 ranks
    need 150 + 17 * 60 files, over uv 150 + 17 * 10."""
    auto = RpcOptions(2, 60, ["auto"], ["auto"])
    with monkeypatch.context() as patch:
        patch.setattr("common.rpc.raise_file_limit", lambda needed: min(needed, 1024))
        need_files(14, auto)
        need_files(17, replace(auto, transports=["uv"]))
        with pytest.raises(ValueError, match="up to 1170 files a process, and 1024 are allowed"):
            need_files(17, auto)
    limits, calls = [(64, 64), (64, -1), (1024, 4096), (-1, -1)], []
    monkeypatch.setattr("resource.getrlimit", lambda kind: limits.pop(0))
    monkeypatch.setattr("resource.setrlimit", lambda kind, limit: calls.append(limit))
    assert [raise_file_limit(1170) for _ in range(4)] == [64, 1170, 1170, 1170]
    assert calls == [(1170, -1), (1170, 4096)]


def test_roles_and_device_maps() -> None:
    """Both ways, by the index that a device has on its node; the master needs none."""
    roles = replace(split_roles(6, trainers=3, master=True), cuda=frozenset({2, 3, 4}))
    names = ["trainer0", "trainer1", "trainer2", "server0", "server1", "master"]
    assert [roles.name(rank) for rank in range(6)] == names
    devices = ["cpu", "cpu", "cuda:2", "cuda:0", "cuda:1", "cpu"]
    maps = [roles.device_maps(rank, devices) for rank in range(6)]
    assert maps[:2] == [{}, {}]
    assert maps[2] == {"server0": {"cuda:2": "cuda:0"}, "server1": {"cuda:2": "cuda:1"}}
    assert maps[3:] == [{"trainer2": {f"cuda:{i}": "cuda:2"}} for i in (0, 1)] + [{}]


def test_tensors_between_gpus_go_by_the_cpu_on_demand() -> None:
    """A trainer and a server on CUDA, one of each on the CPU: one pair has a device map."""
    roles = replace(split_roles(4, trainers=2, servers=2), cuda=frozenset({1, 3}))
    devices = ["cpu", "cuda:0", "cpu", "cuda:1"]
    assert [roles.wire(1, server) for server in (2, 3)] == ["cpu", "cuda"]
    assert [roles.wire(0, server) for server in (2, 3)] == ["cpu", "cpu"]
    assert roles.device_maps(1, devices) == {"server1": {"cuda:0": "cuda:1"}}
    copied = replace(roles, cuda_wire=False)
    assert copied.wire(1, 3) == "cpu"
    assert [copied.device_maps(rank, devices) for rank in range(4)] == [{}] * 4


@pytest.mark.parametrize(
    ("backend", "flags", "dense"),
    [
        ("gloo", "", []),
        ("nccl", "", ["allreduce"]),
        ("nccl", "--dense-embedding --routes allreduce,rpc", ["allreduce", "rpc batch"]),
    ],
)
def test_nccl_has_no_sparse_all_reduce(backend: str, flags: str, dense: list[str]) -> None:
    roles = replace(split_roles(4, 2, 1, master=True), backend=backend)
    args = parameter_server.parse_args(["--servers", "batch", *flags.split()])
    cases = parameter_server.plan(args, roles, {})
    assert [name for name, _, key in cases if key["dense_embedding"]] == dense


def test_cases_of_a_run() -> None:
    """Those without servers come first; how tensors travel is in the key."""
    roles = replace(split_roles(6, 3, 2, master=True), cuda=frozenset(range(5)))
    args = parameter_server.parse_args(["--routes", "rpc,allreduce"])
    for copied, wire in ((True, "cpu"), (False, "cuda")):
        roles = replace(roles, cuda_wire=not copied)
        cases = parameter_server.plan(args, roles, {"rpc_threads": 2})
        assert [name for name, _, _ in cases] == ["allreduce", "rpc running", "rpc batch"]
        assert [key["rpc_threads"] for _, _, key in cases] == [None, 2, 2]
        assert [key["wire"] for _, _, key in cases] == [None, wire, wire]
