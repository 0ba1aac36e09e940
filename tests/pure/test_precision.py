"""benchmarks/workloads/precision.py: settings of `--dtype`, and its name in titles."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from benchmarks.workloads.precision import name_precision, set_precision
from benchmarks.workloads.process_settings import around_case

backends: Any = torch.backends


def precision() -> list[Any]:
    """Of matrix products and of convolutions, in torch's older and newer API."""
    older = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    newer = backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision
    return [*older, *newer]


def test_the_default_touches_nothing() -> None:
    """The default of torch uses TF32 in convolutions. A model may use the newer API, after which
    torch refuses to read the older one."""
    own = ["highest", True, "none", "tf32"]
    assert precision() == own
    for dtype, expected in {
        "tf32": ["high", True, "tf32", "tf32"],
        "fp32": ["highest", False, "ieee", "none"],
        "bf16": ["highest", False, "ieee", "none"],
        "default": own,
    }.items():
        with around_case(Mock()):
            set_precision(dtype)
            assert precision() == expected
            backends.cuda.matmul.fp32_precision = "ieee"
            backends.fp32_precision = "tf32"
        assert precision() == own


def test_the_title_mentions_tf32_if_it_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_tf32_supported", lambda: True)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert name_precision("bf16", cuda) == "bf16"
    assert name_precision("default", cpu) == "torch's default precision"
    assert name_precision("default", cuda) == "torch's default precision (TF32 in convolutions)"
