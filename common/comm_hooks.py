"""DDP's communication hooks as torch ships them, alone and checked."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    powerSGD_hook,
    quantization_hooks,
)
from torch.nn.parallel import DistributedDataParallel

from common.check import gradient_error
from common.dist import CaseGroup
from common.sweep import Outcome, Sweep

# These hooks wait for one collective inside the callback of another. gloo runs callbacks on the
# threads that would have to finish it: https://github.com/pytorch/pytorch/issues/48478
INLINE_WAITS = ("powersgd", "batched_powersgd", "quantize_per_tensor", "quantize_per_channel")

# How far an averaged gradient may be off, relative to the largest one, by the hook's precision:
# fp16 rounds to 11 bits and bf16 to 8, each rank's share and then the sum; the quantised ones have
# 255 levels over the range; PowerSGD projects on one direction, which loses nothing of the check's
# gradients (they have rank one), batched on a direction of the whole bucket, which never adds.
TOLERANCES = {
    "none": 1e-5,
    "allreduce": 1e-5,
    "fp16": 2**-9,
    "bf16": 2**-6,
    "powersgd": 1e-3,
    "batched_powersgd": 1.0,
    "quantize_per_tensor": 2 / 255,
    "quantize_per_channel": 2 / 255,
    "noop": math.inf,  # it does not average
}

# DDP rebuilds its buckets in the second step (the third with static_graph), and logs their sizes
# in the one after that.
SETTLING_STEPS = 4

Wrap = Callable[[nn.Module, dist.ProcessGroup], DistributedDataParallel]
Autocast = Callable[[], contextlib.AbstractContextManager[object]]


def hook_and_state(name: str, group: dist.ProcessGroup) -> tuple[Any, Any]:
    """The hook and the state that register_comm_hook takes. Raises where it cannot work."""
    if name in INLINE_WAITS and dist.get_backend(group) == "gloo":
        raise RuntimeError(
            f"the {name} hook waits inside a future's callback, which deadlocks gloo "
            "(pytorch issue 48478); it needs nccl"
        )
    if name in ("powersgd", "batched_powersgd"):
        state = powerSGD_hook.PowerSGDState(group, 1, start_powerSGD_iter=2)
        batched = name == "batched_powersgd"
        return (
            powerSGD_hook.batched_powerSGD_hook if batched else powerSGD_hook.powerSGD_hook,
            state,
        )
    return {
        "allreduce": default_hooks.allreduce_hook,
        "fp16": default_hooks.fp16_compress_hook,
        "bf16": default_hooks.bf16_compress_hook,
        "quantize_per_tensor": quantization_hooks.quantization_pertensor_hook,
        "quantize_per_channel": quantization_hooks.quantization_perchannel_hook,
        "noop": debugging_hooks.noop_hook,
    }[name], group


def register(name: str, ddp: DistributedDataParallel) -> Callable[[], None]:
    """Register the hook on the model (`none`: leave DDP its own all-reduce, in C++).

    Returns a function that averages the model's gradient buckets alone, by the same hook and all
    at once, as the backward pass does. Call it after SETTLING_STEPS.
    """
    if name == "none":
        return _all_reduce_alone(ddp)
    hook, state = hook_and_state(name, ddp.process_group)
    buckets: dict[int, GradBucket] = {}

    def remember(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 0:
            buckets.clear()  # the buckets of the first steps were others
        buckets[bucket.index()] = bucket
        future: torch.futures.Future[torch.Tensor] = hook(state, bucket)
        return future

    ddp.register_comm_hook(state, remember)

    def alone() -> None:
        for future in [hook(state, bucket) for _, bucket in sorted(buckets.items())]:
            future.wait()

    return alone


def _all_reduce_alone(ddp: DistributedDataParallel) -> Callable[[], None]:
    tensors: list[torch.Tensor] = []

    def alone() -> None:
        if not tensors:
            device = next(ddp.parameters()).device
            for size in bucket_bytes(ddp):
                tensors.append(torch.zeros(size // 4, device=device))
        works = [dist.all_reduce(t, group=ddp.process_group, async_op=True) for t in tensors]
        for work in works:
            assert work is not None
            work.wait()

    return alone


def bucket_bytes(ddp: DistributedDataParallel) -> list[int]:
    """The sizes of the model's gradient buckets, in the order in which they are reduced."""
    logged = ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    sizes = logged.get("rebuilt_bucket_sizes") or logged["bucket_sizes"]
    return [int(size) for size in str(sizes).split(", ")]


def check(name: str, wrap: Wrap, autocast: Autocast, sweep: Sweep) -> str | None:
    """What is wrong with the gradients that this hook averages over all ranks, or None.

    On all ranks of the job. wrap: the model and a group -> the model under DDP, without a hook;
    small buckets make it several.
    """

    def work(group: CaseGroup) -> Outcome:
        def wrap_and_register(model: nn.Module) -> DistributedDataParallel:
            ddp = wrap(model, group.test)
            register(name, ddp)
            return ddp

        device = sweep.ctx.device
        return Outcome(
            {"wrong": wrong_averages(name, wrap_and_register, autocast, device, group.test)}
        )

    everyone = tuple(range(sweep.ctx.world_size))
    outcome = sweep.attempt(f"check of hook {name}", [everyone], work)
    reason = None
    if outcome is not None:
        facts, _, error = outcome
        reason = error or next((fact["wrong"] for fact in facts if fact["wrong"]), None)
    verdict: str | None = sweep.share(reason)
    return verdict


def wrong_averages(
    name: str,
    wrap: Callable[[nn.Module], DistributedDataParallel],
    autocast: Autocast,
    device: torch.device,
    group: dist.ProcessGroup,
) -> str | None:
    """What is wrong with the gradients that `wrap` averages by this hook, or None."""
    error = math.inf
    for loss_scale in (65536.0, 1024.0, 16.0, 1.0):  # backing off, as a GradScaler does
        error = gradient_error(wrap, autocast, device, group, loss_scale)
        if math.isfinite(error):
            break
    if error <= TOLERANCES[name]:
        return None
    return (
        f"averaged gradients are off by {error:.2g} of the largest; "
        f"the precision of hook {name} explains {TOLERANCES[name]:.2g}"
    )
