"""Settings of the five scripts that match the programs that they replace: docs/sources.md."""

import inspect
from argparse import Namespace
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from benchmarks import batch_update_ps, compile_sweep, ddp_rpc, ddp_sweep, parameter_server

CPU = torch.device("cpu")


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags have the defaults of a machine with CUDA."""
    monkeypatch.setattr("harness.cli.on_cuda", lambda device: device != "cpu")


@pytest.mark.usefixtures("on_cuda")
def test_ddp_sweep_on_cuda() -> None:
    args = ddp_sweep.parse_args(["--bucket-size", "25"])  # DDP's own buckets are the default
    assert args.models == ["resnet50", "resnet101", "resnext50_32x4d", "resnext101_32x8d"]
    assert (args.batch_size, args.image_size, args.bucket_size) == (32, 224, [25.0])
    (images,), *_ = ddp_sweep.make_batch(args.batch_size, args.image_size, CPU)
    assert images.shape == (32, 3, 224, 224)


def test_ddp_sends_no_buffers_and_has_the_bucket_size(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    spy = Mock(side_effect=lambda model, **settings: seen.update(settings))
    spy.__signature__ = inspect.signature(nn.parallel.DistributedDataParallel)
    monkeypatch.setattr(ddp_sweep, "DistributedDataParallel", spy)
    group: Any = object()
    for bucket_mb in (7.0, None):
        ddp_sweep.wrap(nn.Linear(1, 1), group, bucket_mb, "none")
        buffers = seen.get("forward_sync_buffers", seen.get("broadcast_buffers"))
        assert (seen["process_group"], seen["bucket_cap_mb"], buffers) == (group, bucket_mb, False)


def test_backends_of_parameter_server() -> None:
    for flag, backend in {"gloo": "gloo", "nccl": "nccl", "multi": "nccl"}.items():
        assert parameter_server.parse_args(["--backend", flag]).backend == backend


def test_data_of_parameter_server() -> None:
    """20% of 10 rows are never looked up by any trainer. Classes are those of the last layer."""
    key = {"cuda_seed": 0, "num_embeddings": 10, "sparsity_percentage": 20, "batch_size": 50}
    key |= {"sample_length": 7, "sample_count": 200, "ranks": 2, "dense_size": 4}
    looked_up: set[int] = set()
    first: dict[int, torch.Tensor] = {}
    for seed, trainer in ((3, 0), (3, 1), (4, 0)):
        batches = parameter_server.batches_of(key | {"torch_seed": seed}, trainer, CPU)
        drawn = [next(batches) for _ in range(3)]
        assert drawn[2][0] is drawn[0][0]  # an epoch is ceil(200 / (2 * 50)) = 2 steps
        for inputs, classes in drawn:
            assert inputs.shape == (50, 7)
            assert set(classes.tolist()) == {0, 1, 2, 3}
            if seed == 3:
                looked_up |= set(inputs.flatten().tolist())
        first[10 * seed + trainer] = drawn[0][0]
    assert len(looked_up) == 8
    assert max(looked_up) < 10
    assert not torch.equal(first[30], first[31])  # each trainer has its own data
    assert not torch.equal(first[30], first[40])  # which depends on the seed
    create = partial(parameter_server.create_model, 4, 3, 1, 2, sparse=True)
    weights = [next(create(seed=seed).parameters()) for seed in (0, 0, 1)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_batches_of_batch_update_ps() -> None:
    args = batch_update_ps.parse_args([])
    assert (args.in_features, args.out_features) == (100, 30)
    assert (args.batch_size, args.num_batches) == (20, 4)
    key = {"num_batches": 4, "batch_size": 20, "in_features": 100}
    batches = batch_update_ps.batches_of(key, 0)
    assert batches.shape == (4, 20, 100)
    assert len({batch.sum().item() for batch in batches}) == 4  # all batches differ


def test_epochs_of_ddp_rpc() -> None:
    args = ddp_rpc.parse_args(["--epochs", "100", "--warmup_cycles", "5", "--backend", "gloo"])
    assert (args.iters, args.warmup_iters, args.backend) == (100, 5, "gloo")
    assert (args.number_embeddings, args.embedding_dim) == (300, 64)
    epoch = ddp_rpc.create_epoch(500, 300, 0)
    assert {len(indices) for indices, _, _ in epoch} == set(range(20, 51))
    sizes = {int(size) for _, offsets, _ in epoch for size in offsets.diff()}
    assert sizes == set(range(1, 11))


def test_cases_of_compile_sweep() -> None:
    """`none` is the first rank alone. The default is all strategies, eager and with inductor."""
    args = compile_sweep.parse_args(["--device", "cpu", "--dynamo_no_optimize_ddp"])
    job: Any = Namespace(world_size=2, device=CPU)
    ((title, cases),) = compile_sweep.plan(args, job, {}).items()
    assert title.endswith(", one graph under DDP")
    assert {name: ranks for name, ranks, _ in cases} == {
        **dict.fromkeys(("none eager", "none inductor"), 1),
        **dict.fromkeys(("ddp eager", "ddp inductor", "fsdp2 eager", "fsdp2 inductor"), 2),
    }
    one_graph = [name for name, _, key in cases if key["dynamo_no_optimize_ddp"]]
    assert one_graph == ["ddp inductor"]  # the only case that it affects
    args = compile_sweep.parse_args(["--toy-model", "--batch-size", "20", "--repeat", "10"])
    assert (args.models, args.batch_size, args.iters) == (["toy"], 20, 10)


def test_the_toy_and_the_names_of_backends() -> None:
    with torch.device("meta"):
        toy = compile_sweep.Toy(*compile_sweep.TOYS["toy"])
    widths = [10, 10000, 10000, 10000, *[1000] * 8, 5]
    found = [layer.in_features for layer in toy.modules() if isinstance(layer, nn.Linear)]
    assert found == widths[:-1]
    assert len(compile_sweep.layers_of(toy)) == 11  # all but the head
    model = nn.Linear(1, 1)
    assert compile_sweep.compile_by("eager", model) is model
    compiled = compile_sweep.compile_by("dynamo_eager", model)
    assert isinstance(compiled, torch._dynamo.eval_frame.OptimizedModule)
