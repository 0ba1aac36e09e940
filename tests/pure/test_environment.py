"""What environment.py reads out of other programs' words, and what it refuses."""

from typing import Any

from common.environment import differences, problem
from common.gpus import nccl_choices, throttled

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
    mixed = {"backend": "gloo", "ranks": [rank(0), rank(1), rank(2, host="b", torch="1")]}
    assert problem(mixed) == "torch is 1 on b, 2 elsewhere"


def test_a_node_that_differs_is_named() -> None:
    nodes = [{"host": h, "device": "D", "cores": 8, "topology": "t"} for h in "abc"]
    assert differences(nodes) == []
    nodes[1] |= {"cores": 4}
    assert differences(nodes) == ["cores of b is not that of other nodes"]
