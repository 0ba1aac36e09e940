"""What a device could compute at most, and what a training step has to: the two sides of MFU.

MFU is the model's FLOPs in a step / the step time / the device's peak (PaLM, arXiv 2204.02311,
appendix B). A peak that is not known for sure is None: no MFU, never a guess.
"""

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

DTYPES = ("fp32", "tf32", "bf16", "fp16")


@dataclass(frozen=True)
class Peak:
    """TFLOPS of one torch device: dense (no sparsity), matrix products accumulated in fp32."""

    fp32: float
    tf32: float | None  # None: the device has no such units
    bf16: float | None
    fp16: float
    source: str
    processors: int | None = None  # of the whole device, where a part of it has the same name


def _halved(fp32: float, tf32: float, half: float, source: str) -> Peak:
    """From a datasheet that gives its tensor core numbers with sparsity: twice the dense ones."""
    return Peak(fp32, tf32 / 2, half / 2, half / 2, f"{source}, with sparsity and halved here")


_V100_SXM2 = Peak(15.7, None, None, 125, "NVIDIA V100 datasheet")
_V100_PCIE = Peak(14, None, None, 112, "NVIDIA V100 datasheet")
_A100 = Peak(19.5, 156, 312, 312, "NVIDIA A100 datasheet")
_L4, _HOPPER = "NVIDIA L4 datasheet", "NVIDIA H100 Tensor Core GPU architecture whitepaper"
_H100, _H200 = "NVIDIA H100 datasheet", "NVIDIA H200 datasheet"
_BLACKWELL = "NVIDIA Blackwell datasheet (GB200 NVL72, HGX B200), numbers of one GPU"

# The key is all of torch.cuda.get_device_name() but a leading "NVIDIA ", which old drivers leave
# out. A name with more in it is another thing: a MIG slice (`H100 80GB HBM3 MIG 1g.10gb`), a
# virtual GPU, a variant with other clocks or processors (`A100-SXM-64GB`, `RTX 4090 D`).
PEAKS = {
    "Tesla V100-SXM2-16GB": _V100_SXM2,
    "Tesla V100-SXM2-32GB": _V100_SXM2,
    "Tesla V100-PCIE-16GB": _V100_PCIE,
    "Tesla V100-PCIE-32GB": _V100_PCIE,
    "Tesla V100S-PCIE-32GB": Peak(16.4, None, None, 130, "NVIDIA V100 datasheet"),
    "Tesla T4": Peak(8.1, None, None, 65, "NVIDIA T4 datasheet"),
    "A100-SXM4-40GB": _A100,
    "A100-SXM4-80GB": _A100,
    "A100-PCIE-40GB": _A100,
    "A100 80GB PCIe": _A100,
    "A10": Peak(31.2, 62.5, 125, 125, "NVIDIA A10 datasheet"),
    "A30": Peak(10.3, 82, 165, 165, "NVIDIA A30 datasheet"),
    "A40": Peak(37.4, 74.8, 149.7, 149.7, "NVIDIA A40 datasheet"),
    "L4": _halved(30.3, 120, 242, _L4),
    "L40": Peak(90.5, 90.5, 181.05, 181.05, "NVIDIA L40 datasheet"),
    "L40S": Peak(91.6, 183, 362.05, 362.05, "NVIDIA L40S datasheet"),
    "H100 80GB HBM3": Peak(66.9, 494.7, 989.4, 989.4, f"{_HOPPER}, H100 SXM5"),
    "H100 PCIe": Peak(51.2, 378, 756, 756, f"{_HOPPER}, H100 PCIe"),
    "H100 NVL": _halved(60, 835, 1671, _H100),
    "H200": _halved(67, 989, 1979, _H200),
    "H200 NVL": _halved(60, 835, 1671, _H200),
    "B200": _halved(75, 2200, 4500, _BLACKWELL),
    "GB200": _halved(80, 2500, 5000, _BLACKWELL),
    "GeForce RTX 3090": Peak(35.6, 35.6, 71, 71, "NVIDIA Ampere GA102 whitepaper"),
    "GeForce RTX 4090": Peak(82.6, 82.6, 165.2, 165.2, "NVIDIA Ada GPU architecture whitepaper"),
    # one of its two dies: torch shows each as a device
    "AMD Instinct MI250X": Peak(95.7 / 2, None, 383 / 2, 383 / 2, "AMD Instinct MI250X page"),
    "AMD Instinct MI300X": Peak(163.4, 653.7, 1307.4, 1307.4, "AMD MI300X datasheet", 304),
}


def peak_flops(device_name: str, dtype: str, processors: int | None = None) -> float | None:
    """FLOP/s of a device in a dtype of DTYPES; None where that is not known for sure.

    device_name: torch.cuda.get_device_name(). processors: its multi_processor_count, without
    which a device that may be a partition of one is not known.
    """
    assert dtype in DTYPES
    peak = PEAKS.get(device_name.removeprefix("NVIDIA "))
    if peak is None or (peak.processors is not None and peak.processors != processors):
        return None
    tflops: float | None = getattr(peak, dtype)
    return None if tflops is None else tflops * 1e12


def fp32_on_cuda(model: nn.Module, device_name: str) -> str:
    """What fp32 layers compute in on a CUDA device: `fp32`, or `tf32` where torch may round.

    Convolutions may by default, other layers may not. Of a model with both it is the faster one,
    so that its MFU is never too high. V100, T4 and AMD's devices stay with fp32.
    """
    peak = PEAKS.get(device_name.removeprefix("NVIDIA "))
    if (peak is not None and peak.tf32 is None) or device_name.startswith("AMD"):
        return "fp32"
    forced = os.environ.get("NVIDIA_TF32_OVERRIDE")  # of cuBLAS and cuDNN
    if forced in ("0", "1"):
        return "tf32" if forced == "1" else "fp32"
    convolves = any(isinstance(module, _ConvNd) for module in model.modules())
    rounds = torch.get_float32_matmul_precision() != "highest" or (
        convolves and torch.backends.cudnn.allow_tf32
    )
    return "tf32" if rounds else "fp32"


def count_flops(
    model: nn.Module, batch: Sequence[Any], loss_of: Callable[..., torch.Tensor]
) -> int:
    """FLOPs of one rank's forward and backward: `loss_of(model, *batch)` and its `backward()`.

    A multiply-add is two, and elementwise work counts as none. Counted on a copy without data
    ("meta" device), whatever the size. To be called before the model is wrapped or compiled, and
    without activation checkpointing: what is computed twice is no work of the model.

    Attention counts as its two matrix products in full, also where it is causal, and without
    what flash attention computes again, as in PaLM's appendix B.

    Raises what a model raises that needs its data to know its way.
    """
    # parameters and buffers by their identity, so that the copy never holds a second set
    tensors = [*model.parameters(), *model.buffers()]
    memo: dict[int, Any] = {id(tensor): _without_data(tensor) for tensor in tensors}
    shadow = copy.deepcopy(model, memo)
    shadow_batch = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), list(batch))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss_of(shadow, *shadow_batch).backward()  # type: ignore[no-untyped-call]
    return int(counter.get_total_flops())


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    empty = tensor.detach().to("meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty
