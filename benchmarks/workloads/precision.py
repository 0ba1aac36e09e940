"""The precision of fp32 on CUDA, in matrix products and in convolutions, by the name of a dtype."""

import torch

# how matrix products are computed, and whether convolutions are in TF32. `default` is what torch
# had before anyone set them
PRECISION = {
    "default": (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32),
    "fp32": ("highest", False),
    "tf32": ("high", True),
}


def set_precision(dtype: str) -> None:
    """How fp32 products and convolutions are computed on CUDA. `default` by itself sets nothing."""
    products, convolutions_in_tf32 = PRECISION.get(dtype, PRECISION["fp32"])
    now = (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)
    if now != (products, convolutions_in_tf32):
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions_in_tf32


def name_precision(dtype: str, device: torch.device) -> str:
    """A dtype as the title of a table has it."""
    in_tf32 = device.type == "cuda" and PRECISION["default"][1] and torch.cuda.is_tf32_supported()
    default = "torch's default precision" + (" (TF32 in convolutions)" if in_tf32 else "")
    return default if dtype == "default" else dtype
