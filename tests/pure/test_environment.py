"""What environment.py reads out of other programs' words, and what it refuses."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from common.environment import differences, preamble, problem
from common.gpus import gpu_state, nccl_choices, throttled
from common.join import bind

LOG = """\
node1:71:71 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.1<0>
node1:71:82 [0] NCCL INFO Using network IB
node1:71:82 [0] NCCL INFO NVLS multicast support is available on dev 0 (NVLS_NCHANNELS 16)
node1:71:82 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
node1:71:82 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM
node1:71:82 [0] NCCL INFO Channel 00/0 : 7[7] -> 8[0] [receive] via NET/IB/0/GDRDMA
node1:71:82 [0] NCCL INFO Connected all rings
"""


def test_what_nccl_chose() -> None:
    assert nccl_choices(LOG) == {
        "network": ["IB"],
        "transport": ["NET/IB/0/GDRDMA", "P2P/CUMEM"],
        "nvls": ["available"],
    }
    assert nccl_choices("") == {"network": [], "transport": [], "nvls": []}
    without = "node1:71:82 [0] NCCL INFO NVLS multicast support is not available on dev 0"
    assert nccl_choices(without)["nvls"] == ["not available"]


ROW = """\
{}, GPU-5e9f2c, 00000000:{}:00.0, NVIDIA H100 80GB HBM3, 580.65.06, Disabled, Enabled, 0, \
700.00 W, 1980 MHz, 1980 MHz, 2619 MHz, 34, 0x0000000000000001
"""


def test_the_state_of_gpus_is_what_nvidia_smi_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{ROW.format(0, '1B')}{ROW.format(1, '43')}END\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    first, second = gpu_state()
    assert (first["index"], second["pci.bus_id"]) == ("0", "00000000:43:00.0")
    assert (first["power.limit"], first["clocks.max.sm"]) == ("700.00 W", "1980 MHz")
    assert throttled(["a"], [[first, second]]) == []
    # of an old driver
    tool.write_text('#!/bin/sh\necho "Field "x" is not a valid field to query."\nexit 2\n')
    assert gpu_state() == []


def test_a_throttled_gpu_is_named_with_its_reasons() -> None:
    idle = {"index": "0", "clocks_event_reasons.active": "0x0000000000000001"}  # bit 0: idle
    hot = {"index": "3", "clocks_event_reasons.active": "0x0000000000000044"}
    unknown = {"index": "1", "clocks_event_reasons.active": "[N/A]"}
    assert throttled(["a", "b"], [[idle, unknown], [idle, hot]]) == [
        "GPU 3 of b is throttled: power cap, hardware thermal"
    ]


def rank(number: int, **more: str) -> dict[str, Any]:
    return {"rank": number, "host": "a", "uuid": f"G{number}", "torch": "2", "nccl": "2"} | more


def test_what_must_not_be_measured() -> None:
    """Ranks under test that share a GPU under NCCL; a node with another torch."""
    shared = {"backend": "nccl", "ranks": [rank(0), rank(1, uuid="G0")]}
    assert (problem(shared) or "").startswith("ranks 0 and 1 share a GPU on a, which nccl cannot")
    assert problem(shared, tested=range(1)) is None  # rank 1 is a server
    assert problem(shared | {"backend": "gloo"}) is None
    assert problem(shared | {"ranks": [rank(0), rank(1, uuid="G0", host="b")]}) is None
    assert problem({"backend": "gloo", "ranks": [rank(0), rank(1, nccl="", uuid="")]}) is None
    mixed = {"backend": "gloo", "ranks": [rank(0), rank(1), rank(2, host="b", torch="1")]}
    assert problem(mixed) == "torch is 1 on b, 2 elsewhere"


def test_a_node_that_differs_is_named() -> None:
    nodes = [{"host": h, "device": "D", "cores": 8, "topology": "t"} for h in "abc"]
    assert differences(nodes) == []
    nodes[1] |= {"cores": 4}
    assert differences(nodes) == ["cores of b is not that of other nodes"]


def test_what_gpus_the_first_lines_warn_of() -> None:
    """Planted: two ranks on one GPU, which gets hot, has broken memory, and one core for rank 1."""
    gpu = {"index": "0", "clocks_event_reasons.active": "0x0000000000000040"}
    gpu["ecc.errors.uncorrected.volatile.total"] = "2"
    ranks = [
        rank(i, uuid="G0") | {"device": "H100", "cores": 8 - 7 * i, "threads": 1} for i in (0, 1)
    ]
    found: dict[str, Any] = {"torch": "2.11", "cuda": "13.0", "nccl": "2.28.9", "python": "3"}
    found |= {"backend": "gloo", "launcher": "torchrun", "world_size": 2}
    found |= {"num_nodes": 1, "hosts": ["a"]}
    found |= {"ranks": ranks, "topologies": [], "gpus": [[gpu]], "differences": []}
    lines = preamble("x", found).splitlines()
    assert lines[1] == "# PyTorch 2.11, CUDA 13.0, NCCL 2.28.9, Python 3, backend gloo"
    assert lines[-4:] == [
        "# warning: GPU 0 of a is throttled: hardware thermal",
        "# warning: a: GPU 0 has uncorrected errors of its memory",
        "# warning: ranks 0 and 1 share a GPU on a: their times include each other's turns",
        "# warning: rank 1 has 1 core for its GPU; see srun --cpus-per-task",
    ]


def test_each_rank_is_bound_to_cores_of_its_own() -> None:
    every = os.sched_getaffinity(0)
    n, got = len(every), list[int]()
    try:
        for local_rank in range(n):
            os.sched_setaffinity(0, every)
            bind(local_rank, n, torch.device("cpu"))
            got += os.sched_getaffinity(0)
        os.sched_setaffinity(0, every)
        with pytest.raises(SystemExit):
            bind(0, n + 1, torch.device("cpu"))
    finally:
        os.sched_setaffinity(0, every)
    assert got == sorted(every)
