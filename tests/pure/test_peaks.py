"""Peaks for MFU: known devices only, and only whole ones."""

import pytest
import torch

from common.workloads.peaks import PEAKS, find_peak, peak_flops


@pytest.mark.parametrize(
    ("name", "dtype", "processors", "flops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 108, 312e12),
        ("A100-SXM4-80GB", "tf32", 108, 156e12),  # an old driver leaves "NVIDIA" out
        ("NVIDIA H100 80GB HBM3", "bf16", 132, 989.4e12),
        ("NVIDIA L4", "bf16", 58, 121e12),  # 242 with sparsity
        ("AMD Instinct MI300X", "bf16", 304, 1307.4e12),
        ("AMD Instinct MI300X", "bf16", 38, None),  # a partition has the whole device's name
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", 16, None),
        ("Tesla V100-SXM2-16GB", "bf16", 80, None),  # has no such units
        ("Some GPU of next year", "fp32", 100, None),
    ],
)
def test_peak(name: str, dtype: str, processors: int, flops: float | None) -> None:
    assert find_peak(name, dtype, processors) == (pytest.approx(flops) if flops else None)


def test_every_row_has_a_source_and_no_name_is_in_two() -> None:
    names = [name for peak in PEAKS for name in peak.names]
    assert len(names) == len(set(names))
    assert all("datasheet" in peak.source or "whitepaper" in peak.source for peak in PEAKS)


def test_a_cpu_has_no_peak() -> None:
    assert peak_flops(torch.device("cpu"), "fp32") is None
