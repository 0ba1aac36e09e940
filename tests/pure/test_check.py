"""benchmarks/workloads/check.py: replicas, relative errors, training compared with one process."""

import math

import pytest
import torch
from torch import Tensor, nn

from benchmarks.workloads.check import compare_replicas, digest, relative_error, verdict
from benchmarks.workloads.reference import compare_training, train_alone


def weight(*values: float) -> nn.Module:
    model = nn.Module()
    model.register_parameter("weight", nn.Parameter(torch.tensor(values, dtype=torch.float32)))
    return model


def test_digests_and_replicas() -> None:
    next_up = float(torch.nextafter(torch.tensor(1.0), torch.tensor(2.0)))
    assert digest(weight(1, 2)) == digest(weight(1, 2)) != digest(weight(next_up, 2))
    assert digest(weight(1, 2)) != digest(weight(2, 1))
    assert digest(weight(math.nan, 1)) == digest(weight(1, -math.inf)) == "not finite"
    assert compare_replicas(["x", "x", "x"], [4, 5, 6]) is None
    differ = "after the steps the parameters of rank {} differ from rank 4's"
    assert compare_replicas(["x", "y", "x"], [4, 5, 6]) == differ.format("5")
    eight = "5, 6, 7, 8, 9, 10, 11, 12 and 1 more"
    assert compare_replicas(["x", *"y" * 9], range(4, 14)) == differ.format(eight)
    found = compare_replicas(["x", "x", "not finite"], [4, 5, 6])
    assert found == "parameters of rank 6 are not finite"
    assert verdict(found) == f"failed: {found}"
    assert verdict(None) == "passed"


def test_relative_error() -> None:
    inf = math.inf
    for got, want, error in (
        ([-4.0, 1.0], [-4.0, 2.0], 0.25),  # 1 / 4
        ([0.0, 0.5], [0.0, 0.5], 0),
        *(([0.0, 1e-30], [0.0, 0.0], inf), ([inf, 1.0], [1.0, 1.0], inf)),
        ([math.nan, 1.0], [1.0, 1.0], inf),
    ):
        x, y = torch.tensor(got), torch.tensor(want)
        assert relative_error(x, y) == error
        assert relative_error(x.to_sparse(), y) == relative_error(x, y.to_sparse()) == error


def product(model: nn.Module, batch: float) -> Tensor:
    parameter = model.weight
    assert isinstance(parameter, Tensor)
    return parameter.sum() * batch


def test_training_by_hand() -> None:
    """The loss is the mean of the weight times 1 and times 3: 2 w, with a gradient of 2.

    lr = 0.1 * 4 / 2^2. With momentum the steps are 0.1 * 2 and 0.1 * (0.9 * 2 + 2), so the weight
    is 2, 1.8, 1.42.
    """
    found = train_alone(weight(2.0), [1.0, 3.0], product, [0.5, 0.5])
    assert found.lr == pytest.approx(0.1)
    assert found.norms == [2, 2, 2]
    assert torch.tensor(found.losses).allclose(torch.tensor([[2, 6], [1.8, 5.4], [1.42, 4.26]]))
    assert train_alone(weight(-2.0), [1.0], product).lr == pytest.approx(0.2)  # a loss below 0
    assert train_alone(weight(2.0), [math.inf], product).lr == 0


OFF = "but 4 in the eager reference"


def test_losses_against_one_process() -> None:
    for got, want, tolerance, off in (
        ([8.0, 4.5], [8.0, 4.0], 0.0625, None),  # relative to the first loss: 0.5 / 8 is 6.25%
        ([8.0, 4.5], [8.0, 4.0], 0.06, f"2 is 4.5, {OFF} (6.25% off, tolerance 6"),
        ([-8.0, -4.5], [-8.0, -4.0], 0.07, None),
        ([8.0, math.nan], [8.0, 4.0], 0.5, f"2 is nan, {OFF} (nan% off"),
        ([1e-13], [0.0], 0.2, None),  # relative to at least 1e-12
        ([1e-13], [0.0], 0.05, "1 is 1e-13, but 0 in the eager reference (10.00% off"),
    ):
        found = compare_training("the loss", got, want, tolerance) or ""
        assert found.startswith(f"the loss in step {off}") if off else not found
