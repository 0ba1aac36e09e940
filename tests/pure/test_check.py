"""common/check.py by hand: replicas, relative errors, n ranks against one process."""

import math

import pytest
import torch
from torch import Tensor, nn

from common.check import compare_replicas, digest, relative_error, verdict
from common.workloads.reference import compare_training, train_alone


def weight(*values: float) -> nn.Module:
    model = nn.Module()
    model.register_parameter("weight", nn.Parameter(torch.tensor(values, dtype=torch.float32)))
    return model


def test_a_digest_sees_the_last_bit_and_what_is_not_finite() -> None:
    one, next_up = 1.0, float(torch.nextafter(torch.tensor(1.0), torch.tensor(2.0)))
    assert digest(weight(one, 2)) == digest(weight(one, 2)) != digest(weight(next_up, 2))
    assert digest(weight(1, 2)) != digest(weight(2, 1))
    assert digest(weight(math.nan, 1)) == digest(weight(1, -math.inf)) == "not finite"


def test_replicas() -> None:
    assert compare_replicas(["x", "x", "x"], [4, 5, 6]) is None
    differ = "after the steps the parameters of rank {} differ from rank 4's"
    assert compare_replicas(["x", "y", "x"], [4, 5, 6]) == differ.format("5")
    eight = ", ".join(str(rank) for rank in range(5, 13))
    assert compare_replicas(["x", *"y" * 8], range(4, 13)) == differ.format(eight)
    assert compare_replicas(["x", *"y" * 9], range(4, 14)) == differ.format(f"{eight}, ...")
    found = compare_replicas(["x", "x", "not finite"], [4, 5, 6])
    assert found == "parameters of rank 6 are not finite"
    assert verdict(found) == f"failed: {found}"
    assert verdict(None) == "passed"


@pytest.mark.parametrize(
    ("got", "want", "error"),
    [
        ([1.0, 2.5], [1.0, 2.0], 0.25),  # 0.5 / 2
        ([-4.0, 1.0], [-4.0, 2.0], 0.25),  # 1 / 4
        ([0.0, 0.0], [0.0, 0.0], 0),
        ([0.0, 1e-30], [0.0, 0.0], math.inf),
        ([0.0, 0.5], [0.0, 0.5], 0),
        ([0.0, 0.25], [0.0, 0.5], 0.5),
        ([math.inf, 1.0], [1.0, 1.0], math.inf),
        ([math.nan, 1.0], [1.0, 1.0], math.inf),
    ],
)
def test_relative_error(got: list[float], want: list[float], error: float) -> None:
    x, y = torch.tensor(got), torch.tensor(want)
    assert relative_error(x, y) == error
    assert relative_error(x.to_sparse(), y) == relative_error(x, y.to_sparse()) == error


def product(model: nn.Module, batch: float) -> Tensor:
    parameter = model.weight
    assert isinstance(parameter, Tensor)
    return parameter.sum() * batch


def test_training_by_hand() -> None:
    """The loss is the weight times 1 and 3, half of each: 2 w, whose gradient is 2.

    lr = 0.1 * 4 / 2^2. Momentum: steps of 0.1 * 2, then 0.1 * (0.9 * 2 + 2): 2, 1.8, 1.42.
    """
    found = train_alone(weight(2.0), [1.0, 3.0], product, [0.5, 0.5])
    assert found.lr == pytest.approx(0.1)
    assert found.norms == [2, 2, 2]
    assert torch.tensor(found.losses).allclose(torch.tensor([[2, 6], [1.8, 5.4], [1.42, 4.26]]))


@pytest.mark.parametrize(
    ("values", "batch", "lr"),
    [
        ((-2.0,), 1.0, 0.2),  # of a loss below 0, too: 0.1 * 2 / 1
        ((3.0, 1.0), 1.0, 0.2),  # 0.1 * 4 / (1 + 1)
        ((2.0,), 0.5, 0.4),  # 0.1 * 1 / 0.25
        ((2.0,), 0.0, 0),  # no gradient, no step
        ((2.0,), math.inf, 0),
    ],
)
def test_learning_rate(values: tuple[float, ...], batch: float, lr: float) -> None:
    assert train_alone(weight(*values), [batch], product).lr == pytest.approx(lr)


def test_losses_against_one_process() -> None:
    """Of the first loss, 8: half of one is 6.25 %."""
    assert compare_training("the loss", [8.0, 4.5], [8.0, 4.0], 0.0625) is None
    found = compare_training("the loss", [8.0, 4.5], [8.0, 4.0], 0.06)
    expected = "the loss in step 2 is 4.5, in one eager process 4 (6.25% off, tolerance 6.00%)"
    assert found == expected
    assert compare_training("the loss", [8.0, 3.5], [8.0, 4.0], 0.06) is not None
    assert compare_training("the loss", [-8.0, -4.5], [-8.0, -4.0], 0.07) is None
    assert compare_training("the loss", [8.0, math.nan], [8.0, 4.0], 0.5) is not None
    assert compare_training("the loss", [1e-13], [0.0], 0.2) is None  # of 1e-12 at least
    assert compare_training("the loss", [1e-13], [0.0], 0.05) is not None
    with pytest.raises(ValueError, match="zip"):
        compare_training("the loss", [8.0], [8.0, 4.0], 1)
