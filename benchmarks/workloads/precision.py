"""--dtype: the precision of float32 matrix products and convolutions on CUDA, and its name."""

import torch

# The precision of matrix products, and whether convolutions use TF32; None for torch's own
PRECISION = {"default": None, "fp32": ("highest", False), "tf32": ("high", True)}
TF32_BY_DEFAULT = torch.backends.cudnn.allow_tf32  # in convolutions
DTYPE_HELP = (
    "default (torch's own setting: TF32 in convolutions, not in matrix products), fp32, tf32, or "
    "bf16 with autocast (default: default)"
)


def set_precision(dtype: str) -> None:
    """Set the precision of float32 matrix products and convolutions on CUDA for a --dtype, until
    `around_case` restores it: of bf16, which uses autocast, that of fp32."""
    if precision := PRECISION.get(dtype, PRECISION["fp32"]):
        products, torch.backends.cudnn.allow_tf32 = precision
        torch.set_float32_matmul_precision(products)


def name_precision(dtype: str, device: torch.device) -> str:
    """Return the name of a --dtype in titles and sentences."""
    in_tf32 = device.type == "cuda" and TF32_BY_DEFAULT and torch.cuda.is_tf32_supported()
    default = "torch's default precision" + (" (TF32 in convolutions)" if in_tf32 else "")
    return default if dtype == "default" else dtype
