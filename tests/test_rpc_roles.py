"""common/rpc.py: who does what, and what its four scripts refuse before they meet anybody."""

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from benchmarks import batch_update_ps, ddp_rpc, parameter_server, rpc_latency
from common.rpc import split_roles


@pytest.mark.parametrize(
    ("script", "size", "flags", "message"),
    [
        (rpc_latency, 1, "", "are 2 processes, and there are 1; e.g. torchrun"),
        (rpc_latency, 2, "--rpc-transports smh", "did you mean shm"),
        (batch_update_ps, 3, "--batch-update-size 3", "there are 2 trainers; try 2"),
        (ddp_rpc, 2, "", "1 trainers, 1 servers and a master are 3 processes, and there are 2"),
        (ddp_rpc, 4, "--number-trainers 4", "are 6 processes"),
        (ddp_rpc, 6, "--number_ps 1 --number-trainers 2", "are 4 processes, and there are 6"),
        (ddp_rpc, 4, "--server-device cuda", "torch sees no CUDA device"),
        (parameter_server, 4, "--ntrainer 4 --nserver 2", "are 7 processes, and there are 4"),
        (parameter_server, 5, "--ncudaserver 1", "torch sees no CUDA device"),
        (parameter_server, 5, "--dense-embedding --routes hybrid_hook", "no bucket is sparse"),
    ],
)
def test_refused(
    script: ModuleType,
    size: int,
    flags: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    """In one line, by rank 0 of a world of `size`."""
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    for name, value in {**world, "CUDA_VISIBLE_DEVICES": ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", [script.__file__, *flags.split()])
    with pytest.raises(SystemExit) as refused:
        script.main()
    assert refused.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert message in line


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


def test_who_averages_with_whom() -> None:
    """5 trainers on 2 servers: runs of 3 and 2, or all of them on either."""
    roles = split_roles(8, 5, 2, master=True)
    assert parameter_server.trainers_of("grouped", roles) == {5: [0, 1, 2], 6: [3, 4]}
    assert parameter_server.trainers_of("sharded", roles) == {s: [0, 1, 2, 3, 4] for s in (5, 6)}
    assert parameter_server.trainers_of(None, roles) == {}
