"""common/memory.py by hand."""

import pytest
import torch

from common import memory


def test_a_peak_is_what_was_grown_in_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "status_bytes", {"VmHWM": 3 * 2**30}.get)
    cpu = torch.device("cpu")
    assert memory.peak(cpu, start=2**30) == {"memory_gib": 2.0}
    assert memory.peak(cpu, start=4 * 2**30) == {"memory_gib": 0.0}
