"""benchmarks/workloads/precision.py: settings of `--dtype`, and its name in titles."""

from unittest.mock import Mock

import pytest
import torch

from benchmarks.workloads.precision import PRECISION, name_precision, set_precision


def test_the_default_touches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default of torch uses TF32 in convolutions."""
    now = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    set_products = Mock(wraps=torch.set_float32_matmul_precision)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", set_products)
    set_precision("default")
    assert set_products.call_count == 0
    seen = []
    for dtype in ("tf32", "fp32", "bf16", "default"):
        set_precision(dtype)
        seen.append((torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32))
    fp32 = ("highest", False)
    assert seen == [("high", True), fp32, fp32, now]
    assert now == PRECISION["default"]
    assert set_products.call_count == 3


def test_the_title_mentions_tf32_if_it_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_tf32_supported", lambda: True)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert name_precision("bf16", cuda) == "bf16"
    assert name_precision("default", cpu) == "torch's default precision"
    assert name_precision("default", cuda) == "torch's default precision (TF32 in convolutions)"
