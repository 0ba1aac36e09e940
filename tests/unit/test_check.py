"""common/check.py: replicas bit by bit, and averaged gradients against a reference."""

import functools
import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.check import compare_replicas, digest, gradient_error
from common.dist import CaseGroup

CPU = torch.device("cpu")


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def test_equal_models_have_equal_digests() -> None:
    assert digest(linear()) == digest(linear())
    assert digest(linear()) != digest(nn.Linear(3, 2))


def test_a_digest_sees_one_bit() -> None:
    changed = linear()
    with torch.no_grad():
        changed.weight[1, 2] = torch.nextafter(changed.weight[1, 2], torch.tensor(math.inf))
    assert digest(changed) != digest(linear())


def test_a_digest_knows_values_not_layouts() -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3)
    assert digest(model) == digest(model.to(memory_format=torch.channels_last))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_digest_of_what_is_not_finite(value: float, dtype: torch.dtype) -> None:
    model = linear().to(dtype)
    assert len(digest(model)) == 32
    with torch.no_grad():
        model.bias[1] = value
    assert digest(model) == "not finite"


TEN = [0, 2, 4, 6, 8, 10, 12, 14, 16, 18]


@pytest.mark.parametrize(
    ("digests", "ranks", "message"),
    [
        (["a"], [0], None),
        (["a", "a", "a"], [0, 1, 2], None),
        (["a", "b"], [0, 1], "after the steps the parameters of rank 1 differ from rank 0's"),
        (
            ["a", "b", "a", "c"],
            [4, 5, 6, 7],
            "after the steps the parameters of rank 5, 7 differ from rank 4's",
        ),
        (["a", "not finite", "b"], [4, 5, 6], "parameters of rank 5 are not finite"),
        (["not finite", "not finite"], [4, 5], "parameters of rank 4 are not finite"),
        (
            ["a", *"b" * 8, "a"],
            TEN,
            "after the steps the parameters of rank 2, 4, 6, 8, 10, 12, 14, 16 "
            "differ from rank 0's",
        ),
        (
            ["a", *"b" * 9],
            TEN,
            "after the steps the parameters of rank 2, 4, 6, 8, 10, 12, 14, 16, ... "
            "differ from rank 0's",
        ),
    ],
)
def test_compare_replicas(digests: list[str], ranks: list[int], message: str | None) -> None:
    assert compare_replicas(digests, ranks) == message


# -- gradients -------------------------------------------------------------------------------------


def scaled(factor: float, layers: slice, model: nn.Module) -> nn.Module:
    """The model, with the gradients of some of its parameters multiplied."""

    def scale(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(factor)

    for parameter in list(model.parameters())[layers]:
        parameter.register_post_accumulate_grad_hook(scale)
    return model


@pytest.mark.parametrize("loss_scale", [1.0, 16.0, 65536.0])
@pytest.mark.parametrize("bucket_cap_mb", [25, 0.05])
def test_ddp_averages_well(group: CaseGroup, bucket_cap_mb: float, loss_scale: float) -> None:
    wrap = functools.partial(
        DistributedDataParallel, process_group=group.test, bucket_cap_mb=bucket_cap_mb
    )
    assert gradient_error(wrap, nullcontext, CPU, group.test, loss_scale) <= 1e-6


@pytest.mark.parametrize("loss_scale", [1.0, 1024.0])
@pytest.mark.parametrize(
    ("factor", "error"),
    [(2.0, 1.0), (0.5, 0.5), (0.0, 1.0), (math.inf, math.inf), (math.nan, math.inf)],
)
def test_wrong_gradients_are_caught(
    group: CaseGroup, factor: float, error: float, loss_scale: float
) -> None:
    """The error is relative to the largest gradient, so twice too large is an error of 1."""
    wrap = functools.partial(scaled, factor, slice(None))
    found = gradient_error(wrap, nullcontext, CPU, group.test, loss_scale)
    assert found == pytest.approx(error)


@pytest.mark.parametrize("index", range(10))
def test_one_wrong_gradient_is_caught(group: CaseGroup, index: int) -> None:
    """Also where the gradients are small: the first layer's, far from the loss."""
    wrap = functools.partial(scaled, 2.0, slice(index, index + 1))
    assert gradient_error(wrap, nullcontext, CPU, group.test) > 0.01


def test_a_single_gradient_that_is_not_finite(group: CaseGroup) -> None:
    wrap = functools.partial(scaled, math.nan, slice(4, 5))
    assert gradient_error(wrap, nullcontext, CPU, group.test) == math.inf
