"""benchmarks/workloads/network.py: lines of NCCL's log, interfaces of gloo, --expect-network."""

import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from benchmarks.workloads import network

PREFIX = "node-7:4711:4802 [3] NCCL INFO "
OOB = "; OOB bond0:10.1.2.3<0>"


def log(*lines: str) -> str:
    return "".join(f"{PREFIX}{line}\n" for line in lines)


def gdr(net: str, *states: str) -> list[str]:
    line = f"NET/{net} : GPU Direct RDMA %s for HCA %d 'mlx5_%d'"
    return [line % (state, n, n) for n, state in enumerate(states)]


IB = "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]" + OOB
ROCE = "NET/IB : Using [0]mlx5_4:1/RoCE [1]mlx5_5:1/RoCE [2]rocep1:1/RoCE " + OOB


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        # 2.18 and 2.21: no plugin, and the older form of the line about NVLS
        (
            [
                "NET/Plugin : No plugin found, using internal implementation",
                *(IB, "Using network IB", *gdr("IB", "Enabled", "Enabled")),
                "NVLS multicast support is available on dev 3",
            ],
            "IB (2 devices, GPUDirect RDMA), NVLS",
        ),
        # 2.24: a plugin that wraps InfiniBand
        (
            [
                "NET/Plugin: Failed to find ncclNetPlugin_v9 symbol.",
                "NET/Plugin: Loaded net plugin NCCL RDMA Plugin v8 (v8)",
                "NET/Plugin: Loaded collnet plugin SHARP (v8)",
                "NET/IB : Using [0]ibp0:1/IB/SHARP [1]ibp1:1/IB/SHARP [RO]" + OOB,
                *("Using network IBext_v8", *gdr("IBext_v8", "Enabled", "Disabled")),
                "NVLS multicast support is not available on dev 3",
            ],
            "IBext_v8 (2 devices, GPUDirect RDMA on 1 of 2), plugin v8",
        ),
        # 2.27: the number of channels of NVLS
        (
            [
                *(ROCE, "Using network IB", *gdr("IB", "Disabled", "Disabled", "Disabled")),
                "NVLS multicast support is available on dev 0 (NVLS_NCHANNELS 16)",
            ],
            "IB (3 devices, RoCE, no GPUDirect RDMA), NVLS",
        ),
        # a plugin was loaded, but NCCL uses sockets
        (
            [
                *("NET/Plugin: Loaded net plugin Libfabric (v10)", "NET/IB : No device found."),
                "NET/Socket : Using [0]eth0:10.0.0.5<0> [1]eth1:10.0.1.5<0>",
                "Using network Socket",
            ],
            "Socket (eth0, eth1)",
        ),
        # 2.30, on EFA: the name of the plugin has two words
        (
            [
                "NET/Plugin: Loaded net plugin AWS Libfabric (v10)",
                *("Initialized NET plugin AWS Libfabric", "Using network AWS Libfabric"),
                *gdr("AWS Libfabric", "Enabled"),
            ],
            "AWS Libfabric (GPUDirect RDMA), plugin v10",
        ),
        (["Bootstrap: Using eth0:10.0.0.5<0>", "cudaDriverVersion 12080"], ""),
        ([], ""),
    ],
)
def test_what_nccl_logs(lines: list[str], text: str) -> None:
    """The forms of NCCL 2.18 to 2.30. The last group that was created counts."""
    assert network.describe(log(*lines)) == text
    assert network.describe("2026-11-29 07:00:00 " + log(*lines).replace("\n", "\r\n")) == text


def test_the_log_is_a_file_in_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """NCCL opens it by its path, and truncates it. Afterwards nothing is left of it."""
    names = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(network, "CONFIGURATIONS", [tmp_path / "nccl.conf"])
    assert not network.user_logs()
    network.start_log()
    assert os.environ["NCCL_DEBUG_SUBSYS"] == "INIT,NET"
    path = os.environ["NCCL_DEBUG_FILE"]
    assert network.read_log() == ""
    with open(path, "w") as file:
        file.write(log("Using network IB"))
        file.flush()
        assert network.read_log() == "IB"
    assert not set(names) & set(os.environ)
    assert network.read_log() == ""
    (tmp_path / "nccl.conf").write_text("NCCL_DEBUG=WARN\n")
    assert network.user_logs()
    (tmp_path / "nccl.conf").unlink()
    monkeypatch.setenv("NCCL_DEBUG_FILE", "/tmp/mine")
    assert network.user_logs()


def test_without_proc_nccl_does_not_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_DEBUG_FILE", raising=False)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    before = os.listdir("/proc/self/fd")
    network.start_log()
    assert "NCCL_DEBUG_FILE" not in os.environ
    assert len(os.listdir("/proc/self/fd")) == len(before)
    assert network.read_log() == ""


def observed(seen: list[str], nodes: int) -> tuple[list[str], dict[str, Any]]:
    """The lines below the first case, and the last line of the report."""
    environment = {"num_nodes": nodes}
    bench = Mock(report=Mock(environment=environment), job=Mock(backend="nccl"))
    observer, last_line = network.Network(bench), dict[str, Any]()
    lines = observer.row(Mock(), seen)
    observer.end(last_line)
    return lines, last_line


def test_sockets_between_nodes_get_a_warning() -> None:
    socket, ib = "Socket (eth0)", "IB (8 devices)"
    assert observed([socket] * 2, 1) == ([f"network: {socket}"], {"network": socket})
    assert observed([ib] * 2, 2) == ([f"network: {ib}"], {"network": ib})
    lines, last_line = observed([ib, socket, ib], 2)
    assert last_line == {"network": "IB (8 devices) on rank 0, 2; Socket (eth0) on rank 1"}
    assert lines[1].startswith("warning: NCCL uses TCP sockets between nodes")
    assert observed(["", ""], 2) == ([], {})


def test_the_interface_of_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {"eth0": Mock(speed=25_000), "lo": Mock(speed=0)}
    monkeypatch.setattr(psutil, "net_if_stats", lambda: stats)
    for name, text in (("eth0", "eth0 (25 Gbit/s)"), ("lo", "lo"), ("ib0", "ib0")):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
        assert network.gloo_network() == text


@pytest.mark.parametrize(
    ("networks", "expected", "why"),
    [
        (["IB (8 devices), NVLS", "IB"], "ib", ""),
        (["AWS Libfabric (GPUDirect RDMA), plugin v10"], "AWS Libfabric", ""),
        (["eth0 (25 Gbit/s)"], "eth0", ""),
        (["IB", "Socket (eth0)"], "IB", "got Socket (eth0) on rank 1"),
        (["IBext_v8", "IB"], "IB", "got IBext_v8 on rank 0"),
        (["IB", ""], "IB", "got an unknown one on rank 1"),
        ([], "IB", "but the network is unknown: NCCL_DEBUG must not be set"),
    ],
)
def test_the_expected_network(networks: list[str], expected: str, why: str) -> None:
    begin = f"expected --expect-network {expected}, "
    assert network.mismatch(networks, expected) == (begin + why if why else "")
