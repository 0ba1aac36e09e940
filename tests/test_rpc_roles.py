"""common/rpc.py and rpc_flags.py: roles, settings, and refusals before the ranks connect."""

import contextlib
import runpy
import sys
from dataclasses import replace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
import torch.distributed.optim

from benchmarks import parameter_server
from benchmarks.workloads import rpc_flags
from benchmarks.workloads.roles import split_roles
from benchmarks.workloads.rpc_flags import rpc_options
from common.errors import LostPeer
from common.join import raise_file_limit
from common.rpc import RpcOptions, need_files
from tests.process import ROOT


def test_a_torch_without_tensorpipe(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Refused in one line, before the script's functions need torch.distributed.rpc."""
    for name in ("TensorPipeAgent", "functions"):
        monkeypatch.delattr(torch.distributed.rpc, name)
    monkeypatch.delattr(torch.distributed.optim, "DistributedOptimizer")
    monkeypatch.delitem(sys.modules, "benchmarks.workloads.rpc_flags")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as refused:
        runpy.run_path(str(ROOT / "benchmarks" / "ddp_rpc.py"))
    assert refused.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "this torch was built without TensorPipe" in line


def test_no_server_where_no_route_needs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    world = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for size, flags, roles in (
        ("3", "--ntrainer 3 --routes allreduce", (range(3), range(3, 3), None)),
        ("4", "--ntrainer 3 --routes allreduce", (range(3), range(3, 3), 3)),
        ("5", "--routes hybrid,allreduce", (range(3), range(3, 4), 4)),  # some routes need a server
    ):
        for name, value in (world | {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}).items():
            monkeypatch.setenv(name, value)
        args = parameter_server.parse_args(["--device", "cpu", *flags.split()])
        found = parameter_server.choose_roles(args)
        assert (found.trainers, found.servers, found.master) == roles


@pytest.mark.parametrize(
    ("cores", "ranks", "threads", "transports"),
    [
        (8, 2, 4, ["auto"]),  # its share of the cores
        (2, 4, 2, ["uv"]),  # shm would take cores from the ranks' work
        (64, 1, 16, ["auto"]),
    ],
)
def test_default_threads_and_transports_of_rpc(
    cores: int, ranks: int, threads: int, transports: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At least 2 threads: with 1 a function that makes an RPC would wait for itself."""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(cores)))
    bench = Mock(job=Mock(local_world_size=ranks, broadcast=lambda value: value))
    flags: Any = dict.fromkeys(("rpc_threads", "rpc_transports", "rpc_timeout", "rpc_channels"))
    found = rpc_options(Mock(timeout=300.0, **flags), bench)
    assert found == RpcOptions(threads, 600.0, transports, ["auto"])


def test_the_limit_of_open_files_is_raised_for_rpc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the hard limit. 17 ranks need 150 + 17 * 60 files, with uv 150 + 17 * 10."""
    limits, calls = [(64, 1024), (64, 1024), (64, -1), (-1, -1)], []
    monkeypatch.setattr("resource.getrlimit", lambda kind: limits.pop(0))
    monkeypatch.setattr("resource.setrlimit", lambda kind, limit: calls.append(limit))
    auto = RpcOptions(2, 60, ["auto"], ["auto"])
    need_files(17, replace(auto, transports=["uv"]))
    with pytest.raises(ValueError, match="1170 open files per process, but the limit is 1024"):
        need_files(17, auto)
    assert [raise_file_limit(1170) for _ in range(2)] == [1170, 1170]
    assert calls == [(320, 1024), (1024, 1024), (1170, -1)]


def test_roles_and_device_maps() -> None:
    """In both directions, by the index of a device on its node, unless one side is on the CPU."""
    roles = replace(split_roles(6, trainers=3, master=True), cuda=frozenset({2, 3}))
    names = ["trainer0", "trainer1", "trainer2", "server0", "server1", "master"]
    assert [roles.name(rank) for rank in range(6)] == names
    devices = ["cpu", "cpu", "cuda:2", "cuda:0", "cpu", "cpu"]
    maps = [roles.device_maps(rank, devices) for rank in range(6)]
    expected = {2: {"server0": {"cuda:2": "cuda:0"}}, 3: {"trainer2": {"cuda:0": "cuda:2"}}}
    assert maps == [expected.get(rank, {}) for rank in range(6)]
    assert [roles.wire(2, server) for server in (3, 4)] == ["cuda", "cpu"]
    copied = replace(roles, cuda_wire=False)
    assert copied.wire(2, 3) == "cpu"
    assert copied.device_maps(2, devices) == {}


def test_cases_of_parameter_server() -> None:
    """Cases without servers come first. NCCL has no sparse all-reduce: its embedding is dense."""
    args = parameter_server.parse_args(["--servers", "batch", "--routes", "rpc,allreduce"])
    roles = split_roles(4, 2, 1, master=True)
    for backend in ("gloo", "nccl"):
        cases = parameter_server.plan(args, replace(roles, backend=backend), {"rpc_threads": 2})
        assert [name for name, _, _ in cases] == ["allreduce", "rpc batch"]
        of_keys = [(key["rpc_threads"], key["wire"], key["dense_embedding"]) for _, _, key in cases]
        assert of_keys == [(None, None, backend == "nccl"), (2, "cpu", False)]
    args = parameter_server.parse_args(["--servers", "batch", "--placement", "all"])
    names = [name for name, _, _ in parameter_server.plan(args, roles, {})]
    through = ["rpc batch", "rpc batch grouped", "sparse_rpc batch", "sparse_rpc batch grouped"]
    assert names == ["allreduce", "hybrid", *through]


def test_how_many_trainers_a_server_averages() -> None:
    """6 trainers and 3 servers: 2 for each server, or all 6 for every bucket."""
    for placement, count in (("grouped", 2), ("buckets", 6), (None, 6)):
        key = {"ranks": 6, "servers": 3, "placement": placement}
        assert parameter_server.trainers_of_a_server(key) == count


@pytest.mark.parametrize(
    ("error", "calls"),
    [
        (None, [call(True)]),
        (RuntimeError("a bug"), [call(graceful=False)]),
        (SystemExit(2), [call(graceful=False)]),
        (LostPeer("lost a peer"), []),
    ],
)
def test_rpc_is_not_shut_down_after_a_lost_peer(
    error: Any, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even rpc.shutdown(False) waits for functions of this rank that may wait for the lost one."""
    monkeypatch.setattr(rpc_flags, "start", lambda *given: ["cpu"])
    monkeypatch.setattr(rpc_flags, "stop", stop := Mock())
    bench: Any = Mock(report=Mock(cases=[]), job=Mock(broadcast=lambda value: value))
    workers = rpc_flags.rpc_workers(bench, split_roles(2), RpcOptions())
    with contextlib.suppress(type(error)), workers as devices:
        assert devices == ["cpu"]
        if error:
            raise error
    assert stop.call_args_list == calls
