"""What of torch is private stands in this list, and does what its users need of it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import compile_sweep, ddp_sweep
from common.groups import abort_process_group
from common.watchdog import recorded_collectives
from common.workloads import meshes
from tests.process import ROOT

# The private names of a file. Those of a comment or docstring beside them were seen to work with
# torch 2.11, 2.14 and 2.15; where a new torch breaks one, look here for who else uses it.
PRIVATE: dict[str, set[str]] = {
    "benchmarks/checkpoint_sweep.py": {"_pytree"},
    "benchmarks/compile_sweep.py": {"_dynamo", "_inductor"},
    "benchmarks/ddp_sweep.py": {"_get_ddp_logging_data"},
    "benchmarks/parallel_sweep.py": {"torch.testing._internal.distributed.fake_pg"},
    "benchmarks/traffic.py": {
        *("_base", "_chunk_with_empty", "_fsdp_param", "_fully_shard", "_internal"),
        *("_python_dispatch", "_pytree", "_schema", "_subclasses"),
    },
    "common/groups.py": {"_abort_process_group"},
    "common/watchdog.py": {
        *("_C", "_distributed_c10d", "_dump_fr_trace_json", "_dump_nccl_trace_json"),
    },
    "common/rpc.py": {"_channels", "_transports"},
    "common/workloads/axes.py": {"_functional_collectives"},
    "common/workloads/meshes.py": {"_pg_registry"},
    "examples/fsdp_exposed.py": {"_internal"},
    "examples/pp_bubble.py": {"_internal"},
    "examples/record_collectives.py": {
        *("_C", "_distributed_c10d", "_dump_fr_trace_json", "_dump_nccl_trace_json", "_world"),
    },
    "examples/tp_exposed.py": {"_internal"},
}
OF_PYTHON = {"_actions", "_asdict", "_current_frames", "_exit", "_replace", "_run_exitfuncs"}
FOLDERS = ("benchmarks", "common", "examples")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def private_names(source: str) -> set[str]:
    """Names with a leading underscore: imported, of an attribute but self's, of an argument."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            names.update((node.module or "").split("."))
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                names.update(alias.name.split("."))
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) != "self":
            names.add(node.attr)
        elif isinstance(node, ast.keyword) and node.arg:
            names.add(node.arg)
    return {name for name in names if re.match(r"_[A-Za-z]", name)} - OF_PYTHON


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_list_has_the_private_names_of_each_file(path: Path) -> None:
    source = path.read_text()
    listed = PRIVATE.get(path.relative_to(ROOT).as_posix(), set())
    assert private_names(source) <= listed
    assert all(name in source for name in listed)  # some of them are strings


def test_the_list_has_no_other_files() -> None:
    assert set(PRIVATE) <= {path.relative_to(ROOT).as_posix() for path in FILES}


# -- what they do ----------------------------------------------------------------------------------


@pytest.fixture
def world() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_the_sizes_of_ddps_buckets_are_those_of_the_weights(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ddp = DistributedDataParallel(nn.Linear(10, 20))
    ddp(torch.ones(1, 10)).sum().backward()
    sent: list[int] = []

    def all_reduce(bucket: torch.Tensor, **_: Any) -> Any:
        sent.append(bucket.numel())
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    ddp_sweep.average_alone(ddp, "none")()
    assert sum(sent) == 10 * 20 + 20


def test_a_mesh_lets_go_of_its_groups(world: Any) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    assert mesh._pg_registry
    meshes.forget_groups(mesh)
    assert not mesh._pg_registry


def test_an_aborted_group_is_no_group_any_more(world: Any) -> None:
    group: Any = dist.new_group([0])
    abort_process_group(group)
    with pytest.raises(ValueError, match="not initialized"):
        dist.get_backend(group)


def test_recorded_collectives_are_dictionaries() -> None:
    assert all("time_created_ns" in entry for entry in recorded_collectives())


def test_what_compiling_counts_and_its_cache() -> None:
    counters = compile_sweep.dynamo_counters()
    counters.clear()
    with compile_sweep.fresh_compile_cache():
        torch.compile(torch.square, backend="eager")(torch.ones(2))
    assert counters["stats"]["unique_graphs"] == 1
    torch.compiler.reset()
