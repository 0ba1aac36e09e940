"""A list of all private names of torch that the code uses."""

import ast
import re
from typing import Any

from tests.process import ROOT

RECORDER = {"_C", "_distributed_c10d", "_dump_fr_trace_json", "_dump_nccl_trace_json"}
# The private names in each file. They were tried with torch 2.11, 2.14 and 2.15. If a new version
# of torch breaks one, this list shows the other files that use it.
PRIVATE: dict[str, set[str]] = {
    "benchmarks/workloads/own_model.py": {"_python_dispatch"},
    "benchmarks/checkpoint_sweep.py": {"_pytree"},
    "benchmarks/compile_sweep.py": {"_checkpoint", "_dynamo", "_inductor"},
    "benchmarks/ddp_sweep.py": {"_get_ddp_logging_data"},
    "benchmarks/parallel_sweep.py": {"torch.testing._internal.distributed.fake_pg"},
    "benchmarks/traffic.py": {
        *("_base", "_chunk_with_empty", "_fsdp_param", "_fully_shard", "_internal"),
        *("_python_dispatch", "_pytree", "_schema", "_subclasses"),
    },
    "common/groups.py": {"_abort_process_group"},
    "harness/observe/watchdog.py": RECORDER,
    "common/rpc.py": {"_channels", "_transports"},
    "benchmarks/workloads/axes.py": {"_functional_collectives"},
    "benchmarks/workloads/meshes.py": {"_pg_registry"},
    "examples/fsdp_exposed.py": {"_internal"},
    "examples/pp_bubble.py": {"_internal"},
    "examples/record_collectives.py": RECORDER | {"_world"},
    "examples/tp_exposed.py": {"_internal"},
}
OF_PYTHON = {"_actions", "_asdict", "_current_frames", "_exit", "_replace", "_run_exitfuncs"}


def names_of(node: Any) -> list[str]:
    """The names that a node of the syntax tree imports, reads as an attribute, or passes."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
        return ".".join(names).split(".")
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) != "self":
        return [node.attr]
    return [node.arg] if isinstance(node, ast.keyword) and node.arg else []


def test_the_list_of_private_names_is_complete() -> None:
    files = [
        *ROOT.glob("benchmarks/**/*.py"),
        *ROOT.glob("common/**/*.py"),
        *ROOT.glob("harness/**/*.py"),
        *ROOT.glob("examples/*.py"),
    ]
    sources = {path.relative_to(ROOT).as_posix(): path.read_text() for path in files}
    assert set(PRIVATE) <= set(sources)
    for file, source in sources.items():
        names = {name for node in ast.walk(ast.parse(source)) for name in names_of(node)}
        private = {name for name in names if re.match(r"_[A-Za-z]", name)} - OF_PYTHON
        listed = PRIVATE.get(file, set())
        assert private <= listed, file
        assert [name for name in listed if name not in source] == [], file  # some are strings
