"""common/join.py: variables of launchers, the rendezvous, network interfaces, memory."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, PrefixStore, TCPStore

from common import join
from common.errors import NotArrived, Refused
from common.groups import local_rank
from tests import process


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The variables of rank 0 of two ranks that are started by hand."""
    for name in set(os.environ) - set(process.environment()):  # of a launcher
        monkeypatch.delenv(name)
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    return monkeypatch


def refused(function: Callable[..., object], *given: Any) -> Refused:
    with pytest.raises(Refused) as error:
        function(*given)
    return error.value


def start() -> None:
    join.world()
    join.meet(0, 2, 20, join.meets_on_loopback(2, 2))


def test_an_invalid_variable_of_the_launcher(by_hand: pytest.MonkeyPatch) -> None:
    """It may be correct on other nodes, so each rank prints the line."""
    for name, value, expected in (
        ("RANK", "", "a whole number from 0 to 1, but it is not set"),
        ("RANK", "5", "a whole number from 0 to 1, got '5'"),
        ("LOCAL_WORLD_SIZE", "0", "a whole number from 1 to 2, got '0'"),
        ("MASTER_ADDR", "no..host", "the name or address of rank 0's host, got 'no..host'"),
        ("MASTER_PORT", "x", "a whole number from 1 to 65535, got 'x'"),
    ):
        with by_hand.context() as patch:
            patch.setenv(name, value)
            if not value:
                patch.delenv(name)
            error = refused(start)
        assert error.here
        line = f"{name} on {socket.gethostname()}: expected {expected}; without torch"
        assert line in str(error)
        assert "e.g. RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 MASTER_ADDR=" in str(error)


def test_a_port_in_use_too_few_files_and_no_loopback(by_hand: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = str(other.getsockname()[1])
        by_hand.setenv("MASTER_PORT", port)
        for on_loopback in (False, True):
            line = str(refused(join.meet, 0, 2, 20, on_loopback))
            assert f"expected a free port (Address already in use), got '{port}'" in line
    # 32 files plus 2 for each of 2 ranks are needed, 64 plus 16 for each are recommended.
    with by_hand.context() as patch:
        patch.setattr(join, "raise_file_limit", lambda needed: 35)
        allowed = f"a rank needs at least 36 open files; {socket.gethostname()} allows 35"
        assert str(refused(join.join, "cpu")) == f"{allowed}; try ulimit -n 96"
    # as under `unshare -n`; torch itself would print C++ frames and wait
    by_hand.setattr(join, "address_towards", lambda host: "")
    line = str(refused(join.join, "cpu"))
    assert "the loopback interface is down; try `ip link set lo up`" in line


def test_interfaces_and_backends_that_cannot_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.net_if_addrs", lambda: {"lo": [], "eth0": []})
    for name, example in (("lo", "eth0"), ("eht0", "eth0, lo")):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
        words = f"expected an interface with an address, e.g. {example}, got '{name}'"
        assert words in str(refused(join.refuse_interface))
    for backend, words in (
        ("nccl2", "backend nccl2 requires CUDA, but this run is on the CPU; try gloo"),
        ("cpu:gloo,", "expected a name such as gloo"),
        ("mpx", "this torch was built without it"),
    ):
        assert words in str(refused(join.check_backend, backend, torch.device("cpu")))


def test_several_hosts_need_local_ranks(by_hand: pytest.MonkeyPatch) -> None:
    store = HashStore()
    for rank, row in enumerate((["a", "10.0.0.1"], ["a", "10.0.0.1"], ["b", "10.0.0.2"])):
        store.set(f"here/{rank}", json.dumps(row))
    assert join.missing_or_apart(store, 3, 0, 1) == ([], "")
    by_hand.delenv("LOCAL_RANK")
    by_hand.delenv("LOCAL_WORLD_SIZE")
    assert join.missing_or_apart(store, 2, 0, 1) == ([], "")
    missing, told = join.missing_or_apart(store, 3, 0, 1)
    assert missing == []
    assert told.startswith("only RANK and WORLD_SIZE are set, but ranks are on a (10.0.0.1), b (10")


@pytest.fixture
def server(by_hand: pytest.MonkeyPatch) -> TCPStore:
    """The store of torchrun's agent. Rank 2 arrived in an earlier attempt, rank 1 in this one."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    row = json.dumps(["vm", "127.0.0.1"])
    PrefixStore("torchrun-bench/0", store).set("here/2", row)
    PrefixStore("torchrun-bench/1", store).set("here/1", row)
    by_hand.setenv("MASTER_PORT", str(store.port))
    by_hand.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    by_hand.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    return store


def test_a_rank_that_does_not_arrive_is_named(server: TCPStore) -> None:
    here = socket.gethostname()
    with pytest.raises(NotArrived) as error:
        join.meet(0, 3, 0.2)
    hosts = ", ".join(sorted({here, "vm"}))
    assert str(error.value) == f"rank 2 did not arrive within 0.2 s; ranks on {hosts} did"
    assert error.value.missing == [2]


def test_the_numbers_of_ranks(by_hand: pytest.MonkeyPatch) -> None:
    """(rank, local rank, world size, local world size)."""

    def given(**values: int) -> tuple[int, ...]:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"):
            by_hand.delenv(name, raising=False)
        for name, value in values.items():
            by_hand.setenv(name, str(value))
        return join.world()

    assert given() == (0, 0, 1, 1)
    torchrun = {"WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2, "GROUP_WORLD_SIZE": 2}
    assert given(RANK=3, LOCAL_RANK=1, **torchrun) == (3, 1, 4, 2)
    assert given(RANK=3, LOCAL_RANK=0, **torchrun) == (3, 1, 4, 2)  # --virtual-local-rank
    # nodes with 1 and 3 ranks: the last rank is not the first of its node
    assert given(RANK=3, LOCAL_RANK=2, **torchrun | {"LOCAL_WORLD_SIZE": 3}) == (3, 2, 4, 3)
    # ranks of srun, which may be cyclic over nodes
    assert given(RANK=2, LOCAL_RANK=1, WORLD_SIZE=4, LOCAL_WORLD_SIZE=2) == (2, 1, 4, 2)
    # with RANK and WORLD_SIZE only, all ranks are on one node
    assert given(RANK=2, WORLD_SIZE=4) == (2, 2, 4, 4)
    assert local_rank() == 2


def test_the_second_connection_does_not_wait_for_the_first(server: TCPStore) -> None:
    """Hang detection polls the store while the main thread waits in it."""
    stores: Any = join.meet(0, 2, 20)
    first, second = stores
    assert first.underlying_store is not second.underlying_store  # each serves one call at a time
    waits = threading.Thread(target=first.get, args=["a late rank"])
    waits.start()
    second.set("seen meanwhile", "yes")
    assert waits.is_alive()
    second.set("a late rank", "here")
    waits.join(500)
    assert not waits.is_alive()
    # As in older versions of torch.
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    old: Any = SimpleNamespace(host="127.0.0.1", port=server.port)
    client = join.second_client(old, 20)
    server.set("a", "b")
    assert client.get("a") == b"b"
    assert join.second_client(server, 20).get("a") == b"b"


JOINS = """
import os
from common.join import join
def resident(): return int(open("/proc/self/statm").read().split()[1]) * 4096
join("cpu")
blocks = [bytearray(2**20) for _ in range(64)]
before = resident()
del blocks
print(os.environ["GLOO_SOCKET_IFNAME"], os.environ["TP_SOCKET_IFNAME"], before - resident() < 2**24)
"""


def test_gloo_uses_loopback_and_freed_memory_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is the default. Variables that the user has set are kept."""
    users = {name: text for name, text in process.environment().items() if "MALLOC_" not in name}
    users = {name: text for name, text in users.items() if "IFNAME" not in name}
    users["TP_SOCKET_IFNAME"] = "lo,lo"
    command = [sys.executable, "-c", JOINS]
    run = subprocess.run(command, env=users, cwd=process.ROOT, capture_output=True, text=True)
    assert run.stdout == "lo lo,lo True\n", run.stderr
    monkeypatch.setenv("MALLOC_TOP_PAD_", "0")
    assert not join.keep_freed_memory()
