"""Kinds of models that people measure, each as a small copy, under DDP on one rank."""

from collections.abc import Callable, Iterator
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


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    model[1].weight = model[0].weight
    return model


class Heads(nn.Sequential):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = super().forward(x)
        return {"loss": square(y), "auxiliary": y.abs().mean(), "logits": y}


class Packed(nn.ModuleList):
    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Any:
        parts = self[0](x).split(cu_seqlens.diff().tolist())
        return torch.stack([part.mean(0) for part in parts])


class Reentrant(nn.Sequential):
    def forward(self, x: Tensor) -> Any:
        return checkpoint(super().forward, x.requires_grad_(), use_reentrant=True)


class Routed(nn.ModuleList):
    """The second expert gets no token."""

    def forward(self, x: Tensor) -> Any:
        return self[0](x)


class Complex(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.T).abs()


def lora() -> nn.Module:
    model = mlp(width=8)
    model[0].requires_grad_(False)
    return model


def trained_only(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in parameters if p.requires_grad])


def of(model: Any, *shape: int, loss: Any = square, dtype: Any = None, **more: Any) -> Made:
    """A model with a random batch of this shape."""
    batch = torch.randn(*shape or (3, 4), dtype=dtype)
    return {"model": model, "args": (batch,), "loss": loss} | more


INDICES = torch.arange(6)
LAST = torch.channels_last
PACKED = {"x": torch.randn(9, 4), "cu_seqlens": torch.tensor([0, 2, 6, 9])}
BAG = {"args": (INDICES.view(2, 3),)}
MEASURED: dict[str, Callable[[], Made]] = {
    "batch_norm": lambda: of(mlp(nn.BatchNorm1d(4))),
    "channels_last": lambda: of(
        nn.Conv2d(3, 2, 3).to(memory_format=LAST),
        args=(torch.randn(2, 3, 4, 4).to(memory_format=LAST),),
    ),
    "lstm": lambda: of(nn.LSTM(4, 3), 5, 2, 4, loss=lambda output: square(output[0])),
    "tied": lambda: (tied(), INDICES, lambda y: cross_entropy(y, INDICES)),
    "several_losses": lambda: of(
        Heads(nn.Linear(4, 2)), loss=lambda out: out["loss"] + 0.1 * out["auxiliary"]
    ),
    "packed": lambda: (Packed([nn.Linear(4, 2)]), PACKED, square),
    "scaled_loss": lambda: of(mlp(), loss=lambda y: square(y) * 65536),
    "dropout": lambda: of(mlp(nn.Dropout(0.5))),
    "eval_mode": lambda: of(mlp(nn.BatchNorm1d(4)).eval()),
    "muon": lambda: of(nn.Linear(4, 2, bias=False), optimizer=torch.optim.Muon),
    "compiled": lambda: of(torch.compile(mlp(), backend="aot_eager")),
    "reentrant_checkpoint": lambda: of(Reentrant(*mlp())),
    "bf16": lambda: of(nn.Linear(4, 2).bfloat16(), dtype=torch.bfloat16),
    "float64": lambda: of(nn.Linear(4, 2).double(), dtype=torch.float64),
    "complex64": lambda: of(
        Complex(4, 2, bias=False, dtype=torch.complex64), dtype=torch.complex64
    ),
    "lora": lambda: of(lora(), optimizer=trained_only),  # a frozen layer
    "sparse": lambda: of(
        nn.EmbeddingBag(8, 4, sparse=True), optimizer=torch.optim.SparseAdam, **BAG
    ),
    "idle_expert": lambda: of(Routed([nn.Linear(4, 2), nn.Linear(4, 2)])),
}
REFUSED: dict[str, Callable[[], Made]] = {
    "all_frozen": lambda: of(mlp().requires_grad_(False)),
    "sync_batch_norm": lambda: of(mlp(nn.SyncBatchNorm(4))),
    "sparse_sgd": lambda: of(nn.EmbeddingBag(8, 4, sparse=True), **BAG),
    "lazy": lambda: of(nn.LazyLinear(2)),
    "without_flag": MEASURED["idle_expert"],
}
WHY = {
    "all_frozen": "element 0 of tensors does not require grad and does not have a grad_fn",
    "sync_batch_norm": "SyncBatchNorm expected input tensor to be on GPU",
    "sparse_sgd": "is sparse, which the default optimizer, SGD with weight decay, do",
    "lazy": "Modules with uninitialized parameters can't be used",
    "without_flag": "1.weight receives no gradient; try --find-unused-parameters or --stat",
}


def make(device: torch.device, kind: str) -> Made:
    return (MEASURED | REFUSED)[kind]()


def replica_of(kind: str, job: Job, group: Group) -> tuple[own_model.Trial, ddp_sweep.Replica]:
    idle = {"find_unused_parameters": kind == "idle_expert"}
    name = f"{__name__}:make?kind={kind}"
    trial = own_model.try_own(name, CPU, idle_allowed=kind == "idle_expert")
    key: dict[str, Any] = dict.fromkeys(ddp_sweep.DDP_OPTIONS, False) | idle
    key |= {"model": name, "dtype": "default", "accumulate": 1}
    return trial, ddp_sweep.make_replica(key, group, job, Setting("default", "none"))


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("kind", MEASURED)
def test_it_is_measured(kind: str, job: Job) -> None:
    """Its gradients are those that DDP has averaged, here over one rank."""
    group = GroupCache(job).acquire((0,))
    assert group
    with default_group(group, job, own=False):
        trial, replica = replica_of(kind, job, group)
        assert (trial.communication, trial.fits) == ((), True)
        facts = ddp_sweep.facts_of([replica], {}, group)
    # GradScaler's factor is too large for the learning rate of the steps before the timing
    expected = "skipped: the " if kind == "scaled_loss" else "passed"
    assert ddp_sweep.check([facts], [0]).startswith(expected)


@pytest.mark.parametrize("kind", REFUSED)
def test_it_is_refused_in_one_line(kind: str, job: Job) -> None:
    group = GroupCache(job).acquire((0,))
    assert group
    with pytest.raises((ValueError, RuntimeError)) as refused:
        replica_of(kind, job, group)
    assert WHY[kind] in str(refused.value)
    assert "\n" not in str(refused.value).strip()


def test_the_default_group_of_a_users_code(job: Job) -> None:
    """It is that of the case or its own. Groups that the code creates end with the case."""
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
