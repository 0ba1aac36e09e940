"""Kinds of models that people measure, each as a small copy, under DDP on one rank."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from benchmarks import ddp_sweep
from benchmarks.ddp_sweep import Setting
from benchmarks.workloads import own_model, process_settings
from benchmarks.workloads.own_groups import default_group
from benchmarks.workloads.own_model import try_own
from common.groups import Group, GroupCache, Job, abort_group

CPU = torch.device("cpu")
Made = Any


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    for name in ("SIZES", "IMPORTED"):
        monkeypatch.setattr(own_model, name, {})
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    world: Any = dist.group.WORLD
    yield Job(0, 0, 1, 1, CPU, "gloo", store, world)
    process_settings.OF_CASE.clear()
    dist.destroy_process_group()


def square(y: Tensor) -> Tensor:
    return y.square().mean()


def mlp(*middle: nn.Module, width: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, width), *middle, nn.Linear(width, 2))


def batch_norm(device: torch.device) -> Made:
    return mlp(nn.BatchNorm1d(4)), torch.randn(3, 4), square


def channels_last(device: torch.device) -> Made:
    model = nn.Conv2d(3, 2, 3).to(memory_format=torch.channels_last)
    return model, torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), square


def lstm(device: torch.device) -> Made:
    return nn.LSTM(4, 3), torch.randn(5, 2, 4), lambda output: square(output[0])


def tied(device: torch.device) -> Made:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    model[1].weight = model[0].weight
    return model, torch.arange(6), lambda y: cross_entropy(y, torch.arange(6))


class Heads(nn.Sequential):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = super().forward(x)
        return {"loss": square(y), "auxiliary": y.abs().mean(), "logits": y}


def several_losses(device: torch.device) -> Made:
    return (
        Heads(nn.Linear(4, 2)),
        torch.randn(3, 4),
        lambda out: out["loss"] + 0.1 * out["auxiliary"],
    )


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        parts = self.layer(x).split(cu_seqlens.diff().tolist())
        return torch.stack([part.mean(0) for part in parts])


def packed(device: torch.device) -> Made:
    inputs = {"x": torch.randn(9, 4), "cu_seqlens": torch.tensor([0, 2, 6, 9])}
    return Packed(), inputs, square


def scaled_loss(device: torch.device) -> Made:
    return mlp(), torch.randn(3, 4), lambda y: square(y) * 65536


def dropout(device: torch.device) -> Made:
    return mlp(nn.Dropout(0.5)), torch.randn(3, 4), square


def eval_mode(device: torch.device) -> Made:
    return mlp(nn.BatchNorm1d(4)).eval(), torch.randn(3, 4), square


def muon(device: torch.device) -> Made:
    made = {"model": nn.Linear(4, 2, bias=False), "args": (torch.randn(3, 4),), "loss": square}
    return made | {"optimizer": torch.optim.Muon}


def compiled(device: torch.device) -> Made:
    return torch.compile(mlp(), backend="aot_eager"), torch.randn(3, 4), square


class Reentrant(nn.Sequential):
    def forward(self, x: Tensor) -> Any:
        return checkpoint(super().forward, x.requires_grad_(), use_reentrant=True)


def reentrant_checkpoint(device: torch.device) -> Made:
    return Reentrant(*mlp()), torch.randn(3, 4), square


def of_dtype(dtype: torch.dtype) -> Made:
    return nn.Linear(4, 2).to(dtype), torch.randn(3, 4, dtype=dtype), lambda y: square(y.abs())


def bf16(device: torch.device) -> Made:
    return of_dtype(torch.bfloat16)


def float64(device: torch.device) -> Made:
    return of_dtype(torch.float64)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 2, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def complex64(device: torch.device) -> Made:
    return Complex(), torch.randn(3, 4, dtype=torch.complex64), lambda y: square(y.abs())


class Routed(nn.ModuleList):
    """The second expert gets no token."""

    def forward(self, x: Tensor) -> Any:
        return self[0](x)


def idle_expert(device: torch.device) -> Made:
    return Routed([nn.Linear(4, 2), nn.Linear(4, 2)]), torch.randn(3, 4), square


def lora(device: torch.device) -> Made:
    """A frozen layer, and an optimizer of the others only."""
    model = mlp(width=8)
    model[0].requires_grad_(False)

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in parameters if p.requires_grad])

    made = {"model": model, "args": (torch.randn(3, 4),), "loss": square}
    return made | {"optimizer": adamw}


def sparse(device: torch.device, own: bool = True) -> Made:
    made = {"model": nn.EmbeddingBag(8, 4, sparse=True), "args": (torch.arange(6).view(2, 3),)}
    optimizer = {"optimizer": torch.optim.SparseAdam} if own else {}
    return made | {"loss": square} | optimizer


def all_frozen(device: torch.device) -> Made:
    return mlp().requires_grad_(False), torch.randn(3, 4), square


def sync_batch_norm(device: torch.device) -> Made:
    return mlp(nn.SyncBatchNorm(4)), torch.randn(3, 4), square


def lazy(device: torch.device) -> Made:
    return nn.LazyLinear(2), torch.randn(3, 4), square


def replica_of(kind: str, job: Job, group: Group, **options: bool) -> ddp_sweep.Replica:
    key: dict[str, Any] = dict.fromkeys(ddp_sweep.DDP_OPTIONS, False) | options
    key |= {"model": f"{__name__}:{kind}", "dtype": "default", "accumulate": 1}
    return ddp_sweep.make_replica(key, group, job, Setting("default", "none"))


MEASURED = [
    *(batch_norm, channels_last, lstm, tied, several_losses, packed, scaled_loss, dropout),
    *(eval_mode, muon, compiled, reentrant_checkpoint, bf16, float64, complex64, lora, sparse),
    idle_expert,
]


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("kind", [function.__name__ for function in MEASURED])
def test_it_is_measured(kind: str, job: Job) -> None:
    """Its gradients are those that DDP has averaged, here over one rank."""
    options = {"find_unused_parameters": kind == "idle_expert"}
    trial = try_own(f"{__name__}:{kind}", CPU, idle_allowed=kind == "idle_expert")
    assert (trial.communication, trial.fits) == ((), True)
    group = GroupCache(job).acquire((0,))
    assert group
    with default_group(group, job, own=False):
        replica = replica_of(kind, job, group, **options)
        facts = ddp_sweep.facts_of([replica], {}, group)
    # GradScaler's factor is too large for the learning rate of the steps before the timing
    expected = "skipped: the loss diverges" if kind == "scaled_loss" else "passed"
    assert ddp_sweep.check([facts], [0]).startswith(expected)


def measure(kind: str, job: Job, group: Group) -> None:
    try_own(f"{__name__}:{kind}", CPU, idle_allowed=False)
    replica_of(kind, job, group)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("all_frozen", "element 0 of tensors does not require grad and does not have a grad_fn"),
        ("sync_batch_norm", "SyncBatchNorm expected input tensor to be on GPU"),
        ("sparse?own=false", "is sparse, which the default optimizer, SGD with weight decay, do"),
        ("lazy", "Modules with uninitialized parameters can't be used"),
        ("idle_expert", "1.weight receives no gradient; try --find-unused-parameters or --static"),
    ],
)
def test_it_is_refused_in_one_line(kind: str, words: str, job: Job) -> None:
    group = GroupCache(job).acquire((0,))
    assert group
    with pytest.raises((ValueError, RuntimeError)) as refused:
        measure(kind, job, group)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value).strip()


def test_the_default_group_of_a_users_code(job: Job) -> None:
    """It is that of the case, or an own one. Groups that the code creates are closed with the case,
    and aborted while it runs."""
    group = GroupCache(job).acquire((0,))
    assert group
    workload = group.workload
    with default_group(group, job, own=True):
        [own] = group.extra
        assert dist.group.WORLD is own is not workload
        created = dist.new_group([0])
        abort_group(group)
        assert group.aborted == [workload, own, created]
    assert dist.group.WORLD is job.control
    assert group.extra == [own, created]
    with pytest.raises(KeyError), default_group(group, job, own=False):
        raise KeyError(dist.group.WORLD is workload)
    assert dist.group.WORLD is job.control
    other = replace(group, ranks=(1, 0))
    with pytest.raises(ValueError, match=r"expected ranks 0, 1, ... .*, got \(1, 0\)"):
        default_group(other, job, own=False).__enter__()
