"""common/rpc.py: hand-worked layouts over one, two and three nodes; no RPC is started."""

import argparse

import pytest
import torch

from common import cli, rpc
from common.rpc import Layout, RpcOptions, default_threads, may_abort, place, refuse_mismatch, split


def test_names_by_rank() -> None:
    layout = Layout(trainers=3, servers=2)
    assert [layout.name(rank) for rank in range(6)] == [
        "trainer0",
        "trainer1",
        "trainer2",
        "server0",
        "server1",
        "master",
    ]
    assert layout.world_size == 6
    assert layout.trainer_ranks == (0, 1, 2)
    assert layout.server_ranks == (3, 4)
    assert Layout(3, 2, master=False).world_size == 5


@pytest.mark.parametrize(
    ("trainers", "servers", "want"),
    [
        (1, 1, [1]),
        (3, 1, [3, 3, 3]),
        (4, 2, [4, 4, 5, 5]),
        (5, 2, [5, 5, 5, 6, 6]),  # 0, 2, 4, 6, 8 over 5
        (7, 3, [7, 7, 7, 8, 8, 9, 9]),  # 0, 3, 6, 9, 12, 15, 18 over 7
        (1, 3, [1]),  # the second and third serve nobody
        (2, 3, [2, 3]),
    ],
)
def test_servers_of_trainers(trainers: int, servers: int, want: list[int]) -> None:
    layout = Layout(trainers, servers)
    assert [layout.server_of(trainer) for trainer in layout.trainer_ranks] == want
    shares = {server: layout.trainers_of(server) for server in layout.server_ranks}
    assert [len(share) for share in shares.values()] == [want.count(s) for s in shares]
    assert sorted(sum(shares.values(), ())) == list(layout.trainer_ranks)


def test_the_last_of_each_role_are_on_cuda() -> None:
    layout = Layout(3, 2, cuda_trainers=2, cuda_servers=1)
    assert [layout.on_cuda(rank) for rank in range(6)] == [False, True, True, False, True, False]
    assert not any(Layout(3, 2).on_cuda(rank) for rank in range(6))


def test_cuda_trainers_go_to_cuda_servers() -> None:
    layout = Layout(3, 2, cuda_trainers=1, cuda_servers=1)
    assert [layout.server_of(trainer) for trainer in range(3)] == [3, 3, 4]
    assert layout.trainers_of(3) == (0, 1)
    assert layout.trainers_of(4) == (2,)
    # two servers on the CPU for two trainers, one on CUDA for three
    layout = Layout(5, 3, cuda_trainers=3, cuda_servers=1)
    assert [layout.server_of(trainer) for trainer in range(5)] == [5, 6, 7, 7, 7]
    # one kind of servers serves both kinds of trainers
    layout = Layout(4, 2, cuda_trainers=2, cuda_servers=2)
    assert [layout.server_of(trainer) for trainer in range(4)] == [4, 4, 5, 5]


def test_device_maps_on_one_node_with_a_shared_gpu() -> None:
    """Two GPUs: trainers on 0 and 1, the server on 0 again, the master on the CPU."""
    layout = Layout(2, 1, cuda_trainers=2, cuda_servers=1)
    devices = ["cuda:0", "cuda:1", "cuda:0", "cpu"]
    assert layout.device_maps(0, devices) == {"server0": {"cuda:0": "cuda:0"}}
    assert layout.device_maps(1, devices) == {"server0": {"cuda:1": "cuda:0"}}
    assert layout.device_maps(2, devices) == {
        "trainer0": {"cuda:0": "cuda:0"},
        "trainer1": {"cuda:0": "cuda:1"},
    }
    assert layout.device_maps(3, devices) == {}


def test_device_maps_over_two_nodes() -> None:
    """Two ranks a node; the indices are those of each node: rank 2 is the second one's cuda:0."""
    layout = Layout(3, 1, master=False, cuda_trainers=3, cuda_servers=1)
    devices = ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    assert layout.device_maps(1, devices) == {"server0": {"cuda:1": "cuda:1"}}
    assert layout.device_maps(2, devices) == {"server0": {"cuda:0": "cuda:1"}}
    assert layout.device_maps(3, devices) == {
        "trainer0": {"cuda:1": "cuda:0"},
        "trainer1": {"cuda:1": "cuda:1"},
        "trainer2": {"cuda:1": "cuda:0"},
    }


def test_device_maps_over_three_nodes_with_mixed_devices() -> None:
    """Three ranks a node: 6 trainers, the last 2 on CUDA; 2 servers, the last on CUDA; a master."""
    layout = Layout(6, 2, cuda_trainers=2, cuda_servers=1)
    devices = ["cpu"] * 4 + ["cuda:1", "cuda:2", "cpu", "cuda:1", "cpu"]
    assert layout.device_maps(0, devices) == {}
    assert layout.device_maps(4, devices) == {"server1": {"cuda:1": "cuda:1"}}
    assert layout.device_maps(5, devices) == {"server1": {"cuda:2": "cuda:1"}}
    assert layout.device_maps(6, devices) == {}
    assert layout.device_maps(7, devices) == {
        "trainer4": {"cuda:1": "cuda:1"},
        "trainer5": {"cuda:1": "cuda:2"},
    }


@pytest.mark.parametrize(
    ("world_size", "trainers", "servers", "master", "want"),
    [
        (5, None, None, True, (3, 1)),  # 4 // 4 servers
        (10, None, None, True, (7, 2)),
        (2, None, None, False, (1, 1)),
        (5, 2, None, True, (2, 2)),
        (5, None, 3, True, (1, 3)),
        (5, 3, 1, True, (3, 1)),
    ],
)
def test_split(
    world_size: int,
    trainers: int | None,
    servers: int | None,
    master: bool,
    want: tuple[int, int],
) -> None:
    assert split(world_size, trainers, servers, master, share=4) == Layout(*want, master)


@pytest.mark.parametrize(
    ("world_size", "trainers", "servers", "expected"),
    [
        (5, 3, 2, "trainers 3 + servers 2 + master 1 make 6 processes, and there are 5"),
        (1, None, None, "trainers 1 + servers 1 + master 1 make 3 processes, and there is 1"),
        (4, 4, None, "torchrun --nproc-per-node 6 "),
        (8, 3, 1, "torchrun --nproc-per-node 5 "),
    ],
)
def test_split_that_does_not_come_out(
    world_size: int, trainers: int | None, servers: int | None, expected: str
) -> None:
    with pytest.raises(ValueError, match=expected.replace("+", r"\+")):
        split(world_size, trainers, servers, True, share=4)


@pytest.mark.parametrize(("trainers", "servers"), [(0, 3), (4, -1), (-1, 4), (3, 0)])
def test_no_role_is_empty_or_negative(trainers: int, servers: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        refuse_mismatch(Layout(trainers, servers, master=False), 3)


@pytest.mark.parametrize(
    ("cores", "ranks", "want"),
    [(2, 1, 2), (2, 5, 2), (8, 2, 4), (64, 2, 16), (64, 8, 8), (7, 2, 3)],
)
def test_default_threads(cores: int, ranks: int, want: int) -> None:
    assert default_threads(cores, ranks) == want


def start(monkeypatch: pytest.MonkeyPatch, rank: int, local: int, devices: int) -> None:
    """A world of two nodes with so many ranks each, where each sees so many devices."""
    values = {"RANK": rank, "WORLD_SIZE": 2 * local}
    values |= {"LOCAL_RANK": rank % local, "LOCAL_WORLD_SIZE": local}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: name != "mpi")


ALL_CUDA = Layout(6, 1, cuda_trainers=6, cuda_servers=1)


@pytest.mark.parametrize(
    ("layout", "rank", "devices", "backend", "want"),
    [
        (Layout(6, 1), 0, 0, None, ("cpu", "gloo")),
        (ALL_CUDA, 5, 4, None, ("cuda:1", "nccl")),
        (ALL_CUDA, 6, 4, None, ("cuda:2", "nccl")),
        (ALL_CUDA, 7, 4, None, ("cpu", "nccl")),  # the master
        (ALL_CUDA, 5, 1, None, ("cuda:0", "nccl")),  # each is shown its own
        (ALL_CUDA, 3, 2, "gloo", ("cuda:1", "gloo")),  # shared
        (Layout(6, 1, cuda_servers=1), 6, 4, None, ("cuda:2", "gloo")),
        (Layout(6, 1, cuda_servers=1), 2, 4, None, ("cpu", "gloo")),
    ],
)
def test_place(
    monkeypatch: pytest.MonkeyPatch,
    layout: Layout,
    rank: int,
    devices: int,
    backend: str | None,
    want: tuple[str, str],
) -> None:
    start(monkeypatch, rank, 4, devices)
    assert place(layout, backend) == (torch.device(want[0]), want[1])


@pytest.mark.parametrize(
    ("layout", "devices", "backend", "expected"),
    [
        (ALL_CUDA, 0, None, "no CUDA device here"),
        (Layout(6, 1), 4, "nccl", "every trainer on CUDA"),
        (Layout(6, 1), 4, "mpi", "no backend 'mpi'"),
        (ALL_CUDA, 2, None, "4 trainers on this node, 2 devices"),
    ],
)
def test_places_that_cannot_be(
    monkeypatch: pytest.MonkeyPatch,
    layout: Layout,
    devices: int,
    backend: str | None,
    expected: str,
) -> None:
    start(monkeypatch, 0, 4, devices)
    with pytest.raises(ValueError, match=expected):
        place(layout, backend)


def test_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc.os, "sched_getaffinity", lambda pid: set(range(8)))
    given = argparse.Namespace(
        rpc_threads=None, rpc_timeout=None, rpc_transports=["shm", "uv"], rpc_channels=None
    )
    given.timeout = 30.0
    options = rpc.options_from(given, 2)
    assert options == RpcOptions(4, 60.0, ("shm", "uv"), None)
    assert options.key() == {
        "rpc_threads": 4,
        "rpc_transports": "shm+uv",
        "rpc_channels": "auto",
    }


@pytest.mark.parametrize(
    ("channels", "cuda", "want"),
    [
        (None, False, False),
        (("basic",), False, False),
        (("cma", "basic"), False, False),
        (("cma",), False, True),
        (("basic",), True, True),
        (("basic", "cuda_basic"), True, False),
        (("cuda_basic",), True, True),
    ],
)
def test_which_channels_are_tried_first(
    channels: tuple[str, ...] | None, cuda: bool, want: bool
) -> None:
    layout = Layout(1, 1, cuda_trainers=int(cuda), cuda_servers=int(cuda))
    assert may_abort(layout, RpcOptions(2, 60.0, channels=channels)) == want


@pytest.mark.parametrize(
    ("cores", "ranks", "given", "want"),
    [
        (2, 4, [], ("uv",)),  # more ranks than cores: shm would poll
        (8, 8, [], None),
        (2, 4, ["--rpc-transports", "auto"], None),
        (8, 8, ["--rpc-transports", "uv,shm"], ("uv", "shm")),
    ],
)
def test_transports(
    monkeypatch: pytest.MonkeyPatch,
    cores: int,
    ranks: int,
    given: list[str],
    want: tuple[str, ...] | None,
) -> None:
    monkeypatch.setattr(rpc.os, "sched_getaffinity", lambda pid: set(range(cores)))
    parser = cli.Parser()
    cli.add_rpc_flags(parser)
    cli.add_report_flags(parser)
    options = rpc.options_from(parser.parse_args(given), ranks)
    assert options.transports == want
    assert options.channels is None
    assert options.timeout_s == 600  # twice --timeout
    assert options.key()["rpc_transports"] == "+".join(want or ("auto",))
