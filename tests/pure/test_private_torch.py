"""common/private_torch.py: what torch does not promise is still there, and stands in one place."""

import ast
import contextlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.nn.parallel import DistributedDataParallel

from benchmarks.collectives import all_gather, reduce_scatter
from common import private_torch
from common.groups import abort_process_group
from common.watchdog import recorded_collectives
from tests.process import ROOT

FILES = sorted(path for folder in ("benchmarks", "common") for path in (ROOT / folder).glob("*.py"))
ROOTS = ("torch", "dist", "dcp", "rpc")
# What stands in other files, where it is used
ELSEWHERE = {
    "groups": {"dist.distributed_c10d._abort_process_group"},
    "watchdog": {"torch._C", "torch._C._distributed_c10d"},
}


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_leaves() -> None:
    assert private_torch.leaves({"a": [1, (2, 3)], "b": 4}) == [1, 2, 3, 4]


def test_only_nccl_says_what_it_expects(world: None, monkeypatch: pytest.MonkeyPatch) -> None:
    group: Any = dist.group.WORLD
    cpu = torch.device("cpu")
    called = list[int]()
    assert private_torch.expected_s(lambda: called.append(1), group, cpu) is None
    assert called == []  # gloo cannot, so nothing is run

    @contextlib.contextmanager
    def nccl(*_: object) -> Iterator[Any]:
        estimator = SimpleNamespace(estimated_time=None)
        yield estimator
        estimator.estimated_time = 33.1  # microseconds

    monkeypatch.setattr(dist, "_time_estimator", nccl)
    assert private_torch.expected_s(lambda: called.append(1), group, cpu) == pytest.approx(33.1e-6)
    monkeypatch.delattr(dist, "_time_estimator")  # an older torch
    assert private_torch.expected_s(lambda: None, group, cpu) is None


def test_the_sizes_of_ddps_buckets_are_those_of_the_weights(world: None) -> None:
    ddp = DistributedDataParallel(nn.Linear(10, 20))
    ddp(torch.ones(1, 10)).sum().backward()
    assert sum(private_torch.bucket_sizes(ddp)) == 4 * (10 * 20 + 20)


def test_a_mesh_lets_go_of_its_groups(world: None) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    assert mesh._pg_registry
    private_torch.forget_groups(mesh)
    assert not mesh._pg_registry


def test_an_aborted_group_is_no_group_any_more(world: None) -> None:
    group: Any = dist.new_group([0])
    abort_process_group(group)
    with pytest.raises(ValueError, match="not initialized"):
        dist.get_backend(group)


def test_recorded_collectives_are_dictionaries() -> None:
    assert all("time_created_ns" in entry for entry in recorded_collectives())


def test_the_fake_backend_is_there_once_it_is_registered() -> None:
    private_torch.register_fake_backend()
    assert dist.is_backend_available("fake")


RANKS = 1000  # of the world that does not exist


@pytest.fixture
def fake_world() -> Iterator[dist.Store]:
    yield private_torch.join_fake_world(5, RANKS)
    dist.destroy_process_group()


def test_one_process_is_a_rank_of_a_world_that_does_not_exist(fake_world: dist.Store) -> None:
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (5, RANKS, "fake")
    group: Any = dist.new_group([4, 5, 9])
    assert dist.get_process_group_ranks(group) == [4, 5, 9]
    assert dist.get_rank(group) == 1
    tensor = torch.ones(2)
    dist.all_reduce(tensor)  # nobody else comes to it
    assert tensor.tolist() == [1, 1]


def test_with_shapes_only_floats_have_no_memory_and_whole_numbers_are_real() -> None:
    with private_torch.ShapesOnly(lambda *told: None):
        matrix = torch.ones(2**24, 2**20)  # 64 TiB
        product = matrix @ matrix.T
        numbers = torch.arange(5)
        assert numbers[numbers > 1].tolist() == [2, 3, 4]
    assert product.shape == (2**24, 2**24)
    for tensor in (matrix, product):
        assert isinstance(tensor, private_torch.FakeTensor)
    assert type(numbers) is torch.Tensor


def test_after_shapes_only_everything_is_as_before() -> None:
    of_torch = _fsdp_param._chunk_with_empty
    with private_torch.ShapesOnly(lambda *told: None):
        assert _fsdp_param._chunk_with_empty is private_torch.chunks_alike
    assert _fsdp_param._chunk_with_empty is of_torch
    with pytest.raises(RuntimeError), private_torch.ShapesOnly(lambda *told: None):
        torch.ones(2) @ torch.ones(3)
    assert _fsdp_param._chunk_with_empty is of_torch
    assert torch.ones(2).sum().item() == 2


def world_group() -> Any:
    return dist.group.WORLD


COLLECTIVES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "c10d::_allgather_base_": lambda part, whole: all_gather(whole, part),
    "c10d::allgather_": lambda part, whole: dist.all_gather(list(whole.chunk(RANKS)), part),
    "c10d::_reduce_scatter_base_": lambda part, whole: reduce_scatter(part, whole),
    "c10d::alltoall_base_": lambda part, whole: dist.all_to_all_single(whole, whole.clone()),
    "c10d::allreduce_": lambda part, whole: dist.all_reduce(whole),
    "c10d::broadcast_": lambda part, whole: dist.broadcast(whole, 0),
    "c10d::send": lambda part, whole: dist.send(whole, 6),
    "c10d::recv_": lambda part, whole: dist.recv(whole, 4),
    "_c10d_functional::all_reduce": lambda part, whole: all_reduce(whole, "sum", world_group()),
}


@pytest.mark.parametrize("operation", COLLECTIVES)
def test_shapes_only_tells_the_larger_side_of_a_collective(
    operation: str, fake_world: dist.Store
) -> None:
    """Three elements of bfloat16 a rank. Waiting for the result is not told."""
    told = list[tuple[str, str, int]]()
    with private_torch.ShapesOnly(lambda *values: told.append(values)):
        part = torch.ones(3, dtype=torch.bfloat16)
        whole = torch.ones(3 * RANKS, dtype=torch.bfloat16)
        COLLECTIVES[operation](part, whole)
    assert told == [(operation, world_group().group_name, 2 * 3 * RANKS)]


def test_shapes_only_tells_which_group_it_was(fake_world: dist.Store) -> None:
    told = list[tuple[str, str, int]]()
    with private_torch.ShapesOnly(lambda *values: told.append(values)):
        groups: list[Any] = [dist.new_group([4, 5]), dist.new_group([5, 6])]
        for group in groups:
            dist.all_reduce(torch.ones(1), group=group)
    assert [name for _, name, _ in told] == [group.group_name for group in groups]
    assert len(set(told)) == 2


def test_a_weight_is_cut_as_torch_cuts_it() -> None:
    """Where rows are fewer than chunks, the last chunks are empty."""
    for rows in range(12):
        weight = torch.empty(3, rows)
        for count in range(1, 8):
            chunks = private_torch.chunks_alike(weight, count, 1)
            lengths = [chunk.shape[1] for chunk in chunks]
            expected = [chunk.shape[1] for chunk in weight.chunk(count, dim=1)]
            expected += [0] * (count - len(expected))
            assert lengths == expected
            assert {chunk.shape[0] for chunk in chunks} == {3}


def test_chunks_of_a_length_are_one_tensor() -> None:
    """A thousand of them take no time."""
    chunks = private_torch.chunks_alike(torch.empty(2 * RANKS - 1, 2), RANKS, 0)
    assert len(chunks) == RANKS
    assert len({id(chunk) for chunk in chunks}) == 2  # of two rows, and the last one


def test_a_checkpointed_module_computes_the_same() -> None:
    model, inputs = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), torch.rand(2, 3)
    before = model(inputs)
    private_torch.recompute(model, [model[0]])
    assert [private_torch.is_recomputed(layer) for layer in model] == [True, False]
    assert torch.equal(model(inputs), before)


def test_dynamo_is_told_whether_to_split_for_ddp() -> None:
    for split in (False, True):
        private_torch.configure_compile(split, verbose=False)
        assert torch._dynamo.config.optimize_ddp is split


def test_what_compiling_counts_and_its_cache() -> None:
    counters = private_torch.dynamo_counters()
    counters.clear()
    with private_torch.fresh_compile_cache():
        torch.compile(torch.square, backend="eager")(torch.ones(2))
    assert counters["stats"]["unique_graphs"] == 1
    torch.compiler.reset()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_nothing_else_reaches_for_private_names_of_torch(path: Path) -> None:
    if path.stem == "private_torch":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            private = [name for name in names if re.match(r"_[a-z]", name)]
            assert names[0] != "torch" or not private, f"line {node.lineno}: {private}"
        elif isinstance(node, ast.Attribute) and re.match(r"_[A-Za-z]", node.attr):
            source = ast.unparse(node)
            known = source in ELSEWHERE.get(path.stem, set())
            assert known or source.split(".")[0] not in ROOTS, f"line {node.lineno}: {source}"


def test_a_script_without_fsdp_does_not_wait_for_its_import() -> None:
    program = (
        "import sys, torch.distributed\n"
        "before = set(sys.modules)\n"
        "import common.benchmark\n"
        "late = [name for name in sys.modules if name not in before]\n"
        "print([name for name in late if name.startswith('torch.distributed.fsdp')])\n"
    )
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout.strip()) == (0, "[]"), run.stderr
