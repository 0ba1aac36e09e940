"""What nvidia-smi and NCCL say of GPUs."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common.gpus import (
    at_the_end,
    gpu_state,
    lacking,
    nccl_choices,
    slowed_down,
    throttled,
    without_counters,
)
from common.groups import Job

LOG = """\
node1:71:71 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.1<0>
node1:71:82 [0] NCCL INFO Using network IB
node1:71:82 [0] NCCL INFO NVLS multicast support is available on dev 0 (NVLS_NCHANNELS 16)
node1:71:82 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
node1:71:82 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM
node1:71:82 [0] NCCL INFO Channel 00/0 : 7[7] -> 8[0] [receive] via NET/IB/0/GDRDMA
node1:71:82 [0] NCCL INFO Connected all rings
"""
# of NCCL 2.28 and, with a stamp, of 2.30
WARNED = """\
node1:71:90 [0] misc/ibvwrap.cc:143 NCCL WARN Call to ibv_create_cq failed with error Cannot \
allocate memory
[2026-07-23 04:16:01] node1:71:99 [0] misc/ibvwrap.cc:143 (wrap_ibv_create_cq) NCCL WARN Call to \
ibv_create_cq failed with error Cannot allocate memory
node1:71:90 [0] NCCL INFO transport/net_ib.cc:1279 -> 2
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


# One field that an older driver does not know, and it answers nothing.
OLD = """\
#!/bin/sh
case "$1" in *counters*) echo "Field \\"x\\" is not a valid field to query."; exit 2; esac
"""


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """nvidia_smi(rows, before=...): a tool that prints these rows. before: its first lines."""
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def write(rows: str, before: str = "#!/bin/sh\n") -> None:
        tool.write_text(f"{before}cat <<'END'\n{rows}END\n")
        tool.chmod(0o755)

    return write


def test_the_state_of_gpus_is_what_nvidia_smi_says(nvidia_smi: Callable[..., None]) -> None:
    nvidia_smi(ROW.format(0, "1B") + ROW.format(1, "43"), before=OLD)
    first, second = gpu_state()
    assert (first["index"], second["pci.bus_id"]) == ("0", "00000000:43:00.0")
    assert (first["power.limit"], first["clocks.max.sm"]) == ("700.00 W", "1980 MHz")
    assert throttled(["a"], [[first, second]]) == []
    nvidia_smi("", before="#!/bin/sh\nexit 9\n")  # no driver
    assert gpu_state() == []


def counted(index: int, *microseconds: str) -> str:
    """A row with the counters: power cap, software thermal, hardware thermal, power brake."""
    return f"{ROW.format(index, '1B').strip()}, {', '.join(microseconds)}\n"


def test_what_slowed_a_gpu_down_within_the_run(nvidia_smi: Callable[..., None]) -> None:
    """The counters go on from earlier runs, and after the last case the GPUs are idle."""
    zeros = ("0 us",) * 4
    nvidia_smi(counted(0, *zeros) + counted(1, *["6869275397 us"] * 2, "0 us", "0 us"))
    before = [gpu_state()]
    assert throttled(["a"], before) == []
    hot = ("6881625397 us", "6869280000 us", "250000 us", "0 us")
    nvidia_smi(counted(0, "12300000 us", *zeros[1:]) + counted(1, *hot))
    assert slowed_down(["a"], before, [gpu_state()]) == [
        "warning: GPU 1 of a was throttled: power cap for 12.3 s, hardware thermal for 0.2 s",
        "note: GPU 0 of a was limited by its power: power cap for 12.3 s",
    ]
    assert slowed_down(["a"], before, before) == []
    assert without_counters(["a"], before) is None


@pytest.mark.parametrize(
    ("driver", "rows", "before"),
    [
        ("535.113.01", ROW.format(0, "1B"), OLD),  # refuses the whole question
        ("580.65.06", counted(0, *["[N/A]"] * 4), "#!/bin/sh\n"),
    ],
)
def test_a_driver_without_counters_is_named(
    driver: str, rows: str, before: str, nvidia_smi: Callable[..., None]
) -> None:
    """Silence would read as `was not throttled`."""
    nvidia_smi(rows.replace("580.65.06", driver), before=before)
    old = gpu_state()
    nvidia_smi(counted(0, *["0 us"] * 4).replace("580.65.06", "595.45.04"))
    new = gpu_state()
    assert slowed_down(["a"], [old], [old]) == []
    assert without_counters(["a", "b", "c"], [old, new, old]) == (
        f"note: this driver has no throttle counters ({driver} on a, c): "
        "GPUs may have been slowed down"
    )
    assert without_counters(["a", "b"], [new, []]) is None


def test_the_last_lines_say_what_nccl_warned_of_and_chose(
    nvidia_smi: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "nccl.log"
    log.write_text(LOG + WARNED)
    monkeypatch.setenv("NCCL_DEBUG_FILE", str(log))
    nvidia_smi(counted(0, *["0 us"] * 4))
    environment = {"cuda": "13.2", "hosts": ["a", "b"], "gpus": [gpu_state()] * 2}
    nvidia_smi(counted(0, "2000000 us", *["0 us"] * 3))
    monkeypatch.setattr("common.gpus.gather", lambda row: [row, None, row])  # two nodes
    cpu = Job(0, 0, 3, 2, torch.device("cpu"), "nccl", torch.distributed.HashStore())
    last_line, lines = at_the_end(cpu, environment)  # a rank on CUDA is elsewhere on the node
    assert last_line["gpus"] == [gpu_state()] * 2
    assert lines == [
        "note: GPU 0 of a was limited by its power: power cap for 2.0 s",
        "note: GPU 0 of b was limited by its power: power cap for 2.0 s",
        "warning: NCCL on a, b: Call to ibv_create_cq failed with error Cannot allocate memory",
        "NCCL chose network IB; transport NET/IB/0/GDRDMA, P2P/CUMEM; nvls available",
    ]
    monkeypatch.setattr("common.gpus.gather", lambda row: [row])
    assert at_the_end(cpu, environment | {"cuda": None}) == ({}, [])


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
