"""benchmarks/workloads/memory.py."""

import pytest
import torch

from benchmarks.workloads import memory


def test_a_peak_is_relative_to_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "status_bytes", {"VmHWM": 3 * 2**30}.get)
    cpu = torch.device("cpu")
    assert memory.peak(cpu, start=2**30) == {"memory_gib": 2.0}
    assert memory.peak(cpu, start=4 * 2**30) == {"memory_gib": 0.0}
