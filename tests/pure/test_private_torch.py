"""common/private_torch.py: what torch does not promise is still there, and stands in one place."""

import ast
import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common import private_torch
from tests.process import ROOT

FILES = sorted(path for folder in ("benchmarks", "common") for path in (ROOT / folder).glob("*.py"))
ROOTS = ("torch", "dist", "dcp", "rpc")


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_versions_compare_by_number() -> None:
    assert torch.torch_version.TorchVersion("2.9") < "2.15"
    assert isinstance(private_torch.TORCH_2_15, bool)


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
    private_torch.abort_process_group(group)
    with pytest.raises(ValueError, match="not initialized"):
        dist.get_backend(group)


def test_recorded_collectives_are_dictionaries() -> None:
    assert all("time_created_ns" in entry for entry in private_torch.recorded_collectives())


def test_the_fake_backend_is_there_once_it_is_registered() -> None:
    private_torch.register_fake_backend()
    assert dist.is_backend_available("fake")


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
        elif isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr):
            source = ast.unparse(node)
            assert source.split(".")[0] not in ROOTS, f"line {node.lineno}: {source}"


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
