"""common/preflight.py and common/network.py: what nodes must have alike; names, ports, routes."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from common import job, network, preflight
from common.preflight import judge


def row(first: int, ranks: int = 8, **changes: Any) -> dict[str, Any]:
    host = f"n{first // 8}"
    node = {"host": host, "first": first, "ranks": ranks, "address": f"10.0.0.{first // 8 + 1}"}
    versions = {"torch": "2.15.0+cu130", "nccl": "2.30.1", "commit": "abc", "sources": "01"}
    return node | versions | {"interface": None} | changes


def test_nodes_that_fit() -> None:
    assert judge([row(0), row(8), row(16)], 24) == {
        "problem": None,
        "difference": None,
        "warning": None,
        "nodes": 3,
        "peer": "10.0.0.2",
    }
    assert judge([row(0, 3)], 3)["peer"] is None
    # builds and patches may differ: the preamble warns of them
    assert judge([row(0), row(8, torch="2.15.1+cpu")], 16)["difference"] is None
    # two agents on one host, as in a test
    alone = {"host": "vm", "address": "127.0.0.1", "interface": "lo"}
    assert judge([row(0, **alone), row(8, **alone)], 16)["peer"] is None
    assert judge([row(0, **alone), row(8, **alone)], 16)["problem"] is None


@pytest.mark.parametrize(
    ("rows", "world_size", "parts"),
    [
        (
            [row(0), row(8)],
            12,
            ["count 16 ranks (LOCAL_WORLD_SIZE: n0 8, n1 8)", "WORLD_SIZE is 1"],
        ),
        (
            [row(0, 2), row(1, 2, host="n1")],
            4,
            ["ranks of n0 are not consecutive", "--distribution=block"],
        ),
        (
            [row(0), row(8, torch="2.14.0"), row(16)],
            24,
            ["another torch on n1 (2.14.0) than on n0 (2.15.0+cu130)", "install torch==2.15.0 "],
        ),
        ([row(0, nccl="2.29.1"), row(8), row(16)], 24, ["another NCCL on n0 (2.29.1) than on n1"]),
        (
            [row(0), row(8, sources="02", commit=None), row(16)],
            24,
            ["n1 (commit ?, digest 02) than on n0 (commit abc, digest 01)", "rsync -a --delete"],
        ),
        ([row(0), row(8, interface="lo")], 16, ["GLOO_SOCKET_IFNAME=lo on n1"]),
    ],
)
def test_nodes_that_do_not_fit(
    rows: list[dict[str, Any]], world_size: int, parts: list[str]
) -> None:
    verdict = judge(rows, world_size)
    line = verdict["problem"] or verdict["difference"]
    assert "\n" not in line
    for part in parts:
        assert part in line
    assert (job.MEANT in line) == (verdict["problem"] is None)  # says so where it may be meant


def test_uneven_nodes_are_a_warning() -> None:
    verdict = judge([row(0, 8), row(8, 4)], 12)
    assert verdict["problem"] is None
    assert "unlike numbers of ranks (n0 8, n1 4)" in verdict["warning"]


def test_the_odd_nodes_of_many_are_named_shortly() -> None:
    rows = [row(8 * i, sources="02" if i < 9 else "01") for i in range(20)]
    assert "on n0, n1, n2, n3, ... (commit" in judge(rows, 160)["difference"]


def test_sources(tmp_path: Path) -> None:
    for folder in ("common", "benchmarks"):
        (tmp_path / folder).mkdir()
    (tmp_path / "common" / "a.py").write_text("a")
    seen = [preflight.sources(tmp_path)]
    (tmp_path / "common" / "a.py").write_text("b")
    seen.append(preflight.sources(tmp_path))
    (tmp_path / "common" / "a.py").rename(tmp_path / "benchmarks" / "a.py")
    seen.append(preflight.sources(tmp_path))
    assert len(set(seen)) == 3
    (tmp_path / "common" / "notes.txt").write_text("not run")
    assert preflight.sources(tmp_path) == seen[-1]


def test_the_layout_of_many_ranks_has_a_row_a_node() -> None:
    rows = [
        {"rank": r, "local_rank": r % 8, "host": f"n{r // 8}", "device": "cpu", "interface": "eth0"}
        | {"address": None, "torch": "2.15", "checkout": "abc"}
        for r in range(72)
    ]
    assert len(preflight.layout(rows[:64]).splitlines()) == 3 + 64
    lines = preflight.layout(rows).splitlines()
    assert len(lines) == 3 + 9
    assert lines[3].split()[:3] == ["0-7", "0-7", "n0"]
    assert lines[-1].split()[:6] == ["64-71", "0-7", "n8", "cpu", "eth0", "-"]


# -- the master ------------------------------------------------------------------------------------


def test_a_master_outside_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"n1": ["10.0.0.1"], "n2": ["10.0.0.2"], "login": ["10.9.9.9"]}

    def addresses_of(name: str) -> list[str]:
        if name not in known:
            raise OSError("unknown")
        return known[name]

    monkeypatch.setattr(network, "addresses_of", addresses_of)
    monkeypatch.setattr(network, "is_own", lambda address: address == "10.0.0.77")
    outside = preflight._is_outside
    assert outside("login", ["10.9.9.9"], ["n1", "n2"])
    assert outside("login", ["10.9.9.9"], ["n1", "nX"])  # as far as names are known
    assert not outside("login", ["10.9.9.9"], [])  # not in Slurm
    assert not outside("n2.cluster", ["10.0.0.2"], ["n1", "n2"])
    assert not outside("10.0.0.2", ["10.0.0.2"], ["n1", "n2"])
    assert not outside("alias", ["10.0.0.77"], ["n1", "n2"])  # this host's own
    assert not outside("login", ["10.9.9.9"], ["nX", "nY"])  # nothing is known of them


def test_addresses() -> None:
    assert all(map(network.is_loopback, network.addresses_of("localhost")))
    with pytest.raises(OSError, match=r".+"):
        network.addresses_of("no such host.invalid")
    assert network.is_loopback("127.0.1.1")
    assert network.is_loopback("::1")
    assert not network.is_loopback("10.0.0.1")
    assert not network.is_loopback("fe80::1%eth0")
    assert network.is_own("127.0.0.1")
    assert not network.is_own("198.51.100.7")  # of no host: for documentation (RFC 5737)
    assert network.address_of("lo") == "127.0.0.1"
    assert network.address_of("no such interface") is None


def test_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert network.unreachable(["127.0.0.1"], port, 5, 0) is None
        assert network.unreachable(["127.0.0.9", "127.0.0.1"], port, 5, 0) is None  # either
        assert network.listener_on(port).startswith(f"process {os.getpid()} (")
    assert network.unreachable(["127.0.0.1"], port, 5, 0) == "Connection refused"
    assert network.listener_on(network.free_port()) == "a process of another user"


def test_what_torch_says_of_a_store_that_does_not_open(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "0", "MASTER_ADDR": "n1", "MASTER_PORT": "80"}.items():
        monkeypatch.setenv(name, value)
    for text, line in (
        ("code: -13, name: EACCES, message: no", "MASTER_PORT=80 is not for users on "),
        ("Ping failed\nframe #0", "MASTER_ADDR=n1 port 80: Ping failed; if another program"),
    ):
        with pytest.raises(SystemExit) as ended:
            preflight.explain_no_store(RuntimeError(text), 5)
        assert ended.value.code == 2
        assert line in capsys.readouterr().err
    with pytest.raises(TimeoutError, match="had no answer in 5 s from MASTER_ADDR=n1"):
        preflight.explain_no_store(RuntimeError("The client socket has timed out after 5ms"), 5)


def test_help_needs_no_torch() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "common.preflight", "--help"]
    done = subprocess.run(
        command, cwd=preflight.ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert not imported & {"torch", "numpy"}
    assert "--timeout" in done.stdout
