"""--dtype: the precision of float32 matrix products and convolutions on CUDA, and its name."""

import torch

# The precision of matrix products, and whether convolutions use TF32. `default` is what torch had
# before any script changed it.
PRECISION = {
    "default": (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32),
    "fp32": ("highest", False),
    "tf32": ("high", True),
}
DTYPE_HELP = (
    "default (torch's own setting: TF32 in convolutions, not in matrix products), fp32, tf32, or "
    "bf16 with autocast (default: default)"
)


def set_precision(dtype: str) -> None:
    """Set the precision of float32 matrix products and convolutions on CUDA for a --dtype: of
    `default`, torch's own; of bf16, which uses autocast, that of fp32."""
    products, convolutions_in_tf32 = PRECISION.get(dtype, PRECISION["fp32"])
    now = (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)
    if now != (products, convolutions_in_tf32):
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions_in_tf32


def name_precision(dtype: str, device: torch.device) -> str:
    """Return the name of a --dtype in titles and sentences."""
    in_tf32 = device.type == "cuda" and PRECISION["default"][1] and torch.cuda.is_tf32_supported()
    default = "torch's default precision" + (" (TF32 in convolutions)" if in_tf32 else "")
    return default if dtype == "default" else dtype
