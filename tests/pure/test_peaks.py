"""Peaks for MFU: known devices only, and only whole ones."""

from typing import Any

import pytest
import torch

from common.workloads.peaks import LINKS, PEAKS, find_link, find_peak, peak_flops


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


def node(name: str, mark: str, gpus: int = 8, mig: str = "Disabled") -> dict[str, Any]:
    """The environment of a run on one node whose GPUs are linked like this."""
    row = ["GPU0", *[mark] * (gpus - 1), "0-51", "0"]  # of `nvidia-smi topo -m`; X is left out
    return {
        "ranks": [{"device": name}] * gpus,
        "gpus": [[{"mig.mode.current": mig}] * gpus],
        "topologies": ["\n".join([" ".join(row)] * gpus)],
    }


@pytest.mark.parametrize(
    ("environment", "ranks", "limit"),
    [
        (node("NVIDIA H100 80GB HBM3", "NV18"), 8, 450),
        (node("NVIDIA A100-SXM4-80GB", "NV12"), 8, 300),
        (node("NVIDIA B200", "NV18"), 8, 900),
        (node("NVIDIA H100 80GB HBM3", "NV18"), 4, None),  # half of the node
        (node("NVIDIA H100 80GB HBM3", "NV18", gpus=4), 4, None),
        (node("NVIDIA H100 80GB HBM3", "NV18", mig="Enabled"), 8, None),
        (node("NVIDIA H100 80GB HBM3", "SYS"), 8, None),  # without NVLink
        (node("NVIDIA H100 80GB HBM3", "NV6"), 8, None),  # with a third of the links
        (node("NVIDIA H100 PCIe", "NV18"), 8, None),
        (node("AMD EPYC", ""), 8, None),
    ],
)
def test_the_links_of_a_whole_node(
    environment: dict[str, Any], ranks: int, limit: float | None
) -> None:
    link = find_link(environment, ranks)
    assert (link.gb_per_s if link else None) == limit


def test_links_that_differ_are_not_known() -> None:
    mixed = node("NVIDIA H100 80GB HBM3", "NV18")
    mixed["ranks"] = [{"device": "NVIDIA H100 80GB HBM3"}] * 7 + [{"device": "NVIDIA H200"}]
    assert find_link(mixed, 8) is None
    names = [name for link in LINKS for name in link.names]
    assert len(names) == len(set(names))
    assert all("https://" in link.source for link in LINKS)
