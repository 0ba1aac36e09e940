"""What nvidia-smi and NCCL say of GPUs."""

import os
from pathlib import Path

import pytest

from common.gpus import gpu_state, lacking, nccl_choices, throttled

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


def test_lacking() -> None:
    whole = {"ecc.errors.uncorrected.volatile.total": "0"}
    broken = {"ecc.errors.uncorrected.volatile.total": "3"}
    without = {"ecc.errors.uncorrected.volatile.total": "[N/A]"}
    assert lacking({"gpus": [[whole] * 8, [whole] * 7]}) == {1: "it has 7 of 8 GPUs"}
    assert lacking({"gpus": [[whole, broken], [without, whole]]}) == {
        0: "GPU 1 has uncorrected errors of its memory"
    }
    assert lacking({"gpus": [[]]}) == {}
    assert lacking({"gpus": [[]]}, 8) == {0: "it has 0 of 8 GPUs"}
