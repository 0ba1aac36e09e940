"""`--dtype`: what it sets of torch's precision, and what a title says of it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks import compile_sweep, ddp_sweep
from common.workloads.precision import PRECISION, name_precision


@pytest.fixture(autouse=True)
def precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


@pytest.mark.parametrize("script", [ddp_sweep, compile_sweep])
def test_the_default_touches_nothing(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert script.parse_args(["--device", "cpu"]).dtype == ["default"]
    calls: list[str] = []
    real = torch.set_float32_matmul_precision

    def watch(name: str) -> None:
        calls.append(name)
        real(name)

    monkeypatch.setattr(torch, "set_float32_matmul_precision", watch)
    script.set_precision("default")
    assert calls == []
    seen = []
    for dtype in ("tf32", "fp32", "bf16", "default"):
        script.set_precision(dtype)
        seen.append((torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32))
    fp32 = ("highest", False)
    assert seen == [("high", True), fp32, fp32, PRECISION["default"]]
    assert calls == ["high", "highest", "highest"]  # torch's default is TF32 in convolutions


def test_the_title_says_where_the_default_is_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_tf32_supported", lambda: True)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert name_precision("bf16", cuda) == "bf16"
    assert name_precision("default", cpu) == "torch's default precision"
    assert name_precision("default", cuda) == "torch's default precision (TF32 in convolutions)"
