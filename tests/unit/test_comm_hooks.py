"""common/comm_hooks.py in a world of one on gloo."""

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from common.check import gradient_error
from common.comm_hooks import (
    INLINE_WAITS,
    SETTLING_STEPS,
    TOLERANCES,
    bucket_bytes,
    hook_and_state,
    register,
    wrong_averages,
)
from common.dist import CaseGroup

pytestmark = pytest.mark.timeout(60)  # a hook that waits in a callback deadlocks gloo

CPU = torch.device("cpu")
WORKING = [name for name in TOLERANCES if name not in INLINE_WAITS]
# 64 * 64 + 64 = 4160 parameters a layer, 16640 bytes
LAYERS = 4
LAYER_BYTES = 16640
BUCKET_MB = 0.02  # 20971 bytes: a bucket is full after the second layer, from the last one on


def wrapped(group: CaseGroup, cap: float = BUCKET_MB, **options: Any) -> DistributedDataParallel:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(LAYERS)])
    return DistributedDataParallel(model, process_group=group.test, bucket_cap_mb=cap, **options)


def train(ddp: DistributedDataParallel, steps: int) -> None:
    for _ in range(steps):
        ddp.zero_grad()
        ddp(torch.ones(2, 64)).sum().backward()


def with_hook(name: str, group: CaseGroup, cap: float, model: nn.Module) -> DistributedDataParallel:
    ddp = DistributedDataParallel(model, process_group=group.test, bucket_cap_mb=cap)
    register(name, ddp)
    return ddp


# -- hooks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", INLINE_WAITS)
def test_hooks_that_deadlock_gloo_are_refused(group: CaseGroup, name: str) -> None:
    with pytest.raises(RuntimeError, match=rf"^the {name} hook .*needs nccl$"):
        hook_and_state(name, group.test)
    with pytest.raises(RuntimeError, match="needs nccl"):
        register(name, wrapped(group))


@pytest.mark.parametrize("name", [name for name in WORKING if name != "none"])
def test_hooks_that_gloo_can_run(group: CaseGroup, name: str) -> None:
    hook, state = hook_and_state(name, group.test)
    assert callable(hook)
    assert state is group.test


@pytest.mark.parametrize("cap", [25, 0.05])
@pytest.mark.parametrize("name", WORKING)
def test_averages_are_right(group: CaseGroup, name: str, cap: float) -> None:
    wrap = functools.partial(with_hook, name, group, cap)
    assert wrong_averages(name, wrap, contextlib.nullcontext, CPU, group.test) is None


def test_a_hook_rounds_as_its_type_does(group: CaseGroup) -> None:
    """So the tolerances are neither idle nor too tight: fp16 has 11 bits, bf16 has 8."""
    errors = {
        name: gradient_error(
            functools.partial(with_hook, name, group, 25), contextlib.nullcontext, CPU, group.test
        )
        for name in ("none", "fp16", "bf16")
    }
    assert errors["none"] <= 1e-6
    assert 2**-15 < errors["fp16"] <= 2**-11
    assert 2**-12 < errors["bf16"] <= 2**-8


@pytest.mark.parametrize("name", ["none", "fp16", "bf16"])
def test_wrong_averages_are_reported(group: CaseGroup, name: str) -> None:
    def doubled(model: nn.Module) -> DistributedDataParallel:
        ddp = with_hook(name, group, 25, model)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(double)
        return ddp

    def double(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(2)

    message = wrong_averages(name, doubled, contextlib.nullcontext, CPU, group.test)
    assert message is not None
    assert message.startswith("averaged gradients are off by 1 of the largest; ")
    assert message.endswith(f"hook {name} explains {TOLERANCES[name]:.2g}")


def test_the_loss_scale_backs_off(group: CaseGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GradScaler's does: an infinite gradient is an error only at the smallest scale."""
    scales: list[float] = []

    def error(*args: object) -> float:
        scales.append(float(str(args[-1])))
        return math.inf if scales[-1] > limit else 0.0

    monkeypatch.setattr("common.comm_hooks.gradient_error", error)
    check = functools.partial(wrong_averages, "none", DistributedDataParallel)
    limit = 100.0
    assert check(contextlib.nullcontext, CPU, group.test) is None
    assert scales == [65536, 1024, 16]
    scales.clear()
    limit = 1.0
    assert check(contextlib.nullcontext, CPU, group.test) is None
    assert scales == [65536, 1024, 16, 1]
    limit = 0.0
    message = check(contextlib.nullcontext, CPU, group.test)
    assert message is not None
    assert message.startswith("averaged gradients are off by inf of the largest")


@pytest.mark.parametrize("seed", range(3))
def test_powersgd_of_rank_one_reproduces_the_gradients(group: CaseGroup, seed: int) -> None:
    """The check's gradients have rank one. One bucket only: more deadlock gloo."""

    def wrap(model: nn.Module) -> DistributedDataParallel:
        ddp = DistributedDataParallel(model, process_group=group.test, bucket_cap_mb=25)
        state = powerSGD_hook.PowerSGDState(
            group.test, 1, start_powerSGD_iter=2, random_seed=seed, min_compression_rate=1
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        states.append(state)
        return ddp

    states: list[powerSGD_hook.PowerSGDState] = []
    error = gradient_error(wrap, contextlib.nullcontext, CPU, group.test)
    assert error <= TOLERANCES["powersgd"] / 100
    assert states[0].compression_stats()[2] > 0  # it did compress


# -- buckets and their communication alone ---------------------------------------------------------


@pytest.mark.parametrize("steps", range(5))
@pytest.mark.parametrize("cap", [25, BUCKET_MB])
def test_bucket_bytes_add_up(group: CaseGroup, cap: float, steps: int) -> None:
    ddp = wrapped(group, cap)
    train(ddp, steps)
    assert sum(bucket_bytes(ddp)) == LAYERS * LAYER_BYTES


@pytest.mark.parametrize("static_graph", [False, True])
@pytest.mark.parametrize("steps", [SETTLING_STEPS, SETTLING_STEPS + 1])
def test_bucket_bytes_of_settled_buckets(group: CaseGroup, steps: int, static_graph: bool) -> None:
    ddp = wrapped(group, static_graph=static_graph)
    train(ddp, steps)
    assert bucket_bytes(ddp) == [2 * LAYER_BYTES] * 2


class Sent:
    """The bytes of each all-reduce that Python starts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes: list[int] = []
        all_reduce = dist.all_reduce

        def count(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.bytes.append(tensor.nbytes)
            return all_reduce(tensor, *args, **kwargs)

        monkeypatch.setattr(dist, "all_reduce", count)

    def by(self, work: Callable[[], object]) -> list[int]:
        self.bytes.clear()
        work()
        return list(self.bytes)


@pytest.mark.parametrize("static_graph", [False, True])
@pytest.mark.parametrize("name", WORKING)
def test_communication_alone(
    group: CaseGroup, name: str, static_graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It averages the buckets of a step: as many bytes, in the hook's type."""
    ddp = wrapped(group, static_graph=static_graph)
    alone = register(name, ddp)
    train(ddp, SETTLING_STEPS)
    full, half = [2 * LAYER_BYTES] * 2, [LAYER_BYTES] * 2
    want = {"fp16": half, "bf16": half, "noop": []}.get(name, full)
    sent = Sent(monkeypatch)
    assert [sent.by(alone), sent.by(alone)] == [want, want]


@pytest.mark.parametrize("name", WORKING)
def test_communication_alone_leaves_training_as_it_is(group: CaseGroup, name: str) -> None:
    ddp = wrapped(group)
    alone = register(name, ddp)
    train(ddp, SETTLING_STEPS)
    before = [
        parameter.grad.clone() for parameter in ddp.parameters() if parameter.grad is not None
    ]
    alone()
    train(ddp, 1)
    after = [parameter.grad for parameter in ddp.parameters()]
    assert len(before) == 2 * LAYERS
    torch.testing.assert_close(after, before)
