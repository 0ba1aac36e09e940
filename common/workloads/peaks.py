"""FLOP/s that a GPU reaches at most.

MFU = FLOPs of the model / time / peak (arXiv 2204.02311, appendix B).
The peaks are those of dense matrix products, accumulated in fp32. A peak that is not known for sure
is None, and a case then has no MFU.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Peak:
    """TFLOPS by dtype; None if the device has no units for it.

    names: what torch.cuda.get_device_name() returns, without a leading "NVIDIA ". They must agree
    in full: a longer name is another device, e.g. a part of a GPU (`H100 80GB HBM3 MIG 1g.10gb`).
    """

    names: tuple[str, ...]
    fp32: float
    tf32: float | None
    bf16: float | None
    source: str
    processors: int | None = None  # multiprocessors, if parts of the device have the same name


_V100 = ("Tesla V100-SXM2-16GB", "Tesla V100-SXM2-32GB")
_A100 = ("A100-SXM4-40GB", "A100-SXM4-80GB", "A100-PCIE-40GB", "A100 80GB PCIe")
_H100 = "NVIDIA H100 Tensor Core GPU architecture whitepaper"
# "halved": the datasheet has the number with sparsity, which is twice the dense one
PEAKS = (  # names, fp32, tf32, bf16, source, processors
    Peak(_V100, 15.7, None, None, "NVIDIA V100 datasheet"),
    Peak(_A100, 19.5, 156, 312, "NVIDIA A100 datasheet"),
    Peak(("A10",), 31.2, 62.5, 125, "NVIDIA A10 datasheet"),
    Peak(("L4",), 30.3, 60, 121, "NVIDIA L4 datasheet, halved"),
    Peak(("L40S",), 91.6, 183, 362.05, "NVIDIA L40S datasheet"),
    Peak(("H100 80GB HBM3",), 66.9, 494.7, 989.4, _H100),
    Peak(("H100 PCIe",), 51.2, 378, 756, _H100),
    Peak(("H100 NVL",), 60, 417.5, 835.5, "NVIDIA H100 datasheet, halved"),
    Peak(("H200",), 67, 494.5, 989.5, "NVIDIA H200 datasheet, halved"),
    Peak(("B200",), 75, 1100, 2250, "NVIDIA Blackwell datasheet, one GPU of HGX B200, halved"),
    Peak(("GB200",), 80, 1250, 2500, "NVIDIA Blackwell datasheet, one GPU of NVL72, halved"),
    Peak(("AMD Instinct MI300X",), 163.4, 653.7, 1307.4, "AMD MI300X datasheet", 304),
)


def find_peak(name: str, dtype: str, processors: int) -> float | None:
    """FLOP/s of a device by its name and number of multiprocessors. dtype: fp32, tf32 or bf16."""
    for peak in PEAKS:
        if name.removeprefix("NVIDIA ") in peak.names and peak.processors in (None, processors):
            tflops: float | None = getattr(peak, dtype)
            return None if tflops is None else tflops * 1e12
    return None


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """FLOP/s of a device; `default` is what torch now has for matrix products. None on the CPU, and
    where the number is not known."""
    if device.type != "cuda":
        return None
    if dtype == "default":
        dtype = "fp32" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    properties = torch.cuda.get_device_properties(device)
    return find_peak(properties.name, dtype, properties.multi_processor_count)
