"""examples/: each file runs by the command in its docstring, prints that output, and needs no
other."""

import ast
import re
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from examples import ddp_exposed
from tests.process import ROOT, Bench
from tests.pure.test_cores import unknown_names
from tests.smaller import with_fewer_rounds

EXAMPLES = ROOT / "examples"
FILES = sorted(EXAMPLES.glob("*.py"))
REGION = re.compile(r"^ *# \[(\w+)\]\n(.*?)^ *# \[/\1\]$", re.MULTILINE | re.DOTALL)


def shown(path: Path) -> tuple[list[str], list[str]]:
    """The command in the docstring of a file, as words, and the lines of its output."""
    doc = ast.get_docstring(ast.parse(path.read_text())) or ""
    command, *lines = doc.split("    $ ", 1)[1].split("\n\n")[0].splitlines()
    return command.split(), lines


def shape(lines: list[str]) -> list[str]:
    """The lines with `#` for each number, and without the mark of a slow rank."""
    masked = [re.sub(r"-?\d+(\.\d+)?", "#", line).removesuffix("   slow") for line in lines]
    return [" ".join(line.split()) for line in masked if line.strip()]


def test_imports_and_shared_functions() -> None:
    """One file can be copied. Functions with the same name in two files are identical."""
    texts: dict[str, set[str]] = {}
    for path in FILES:
        source = path.read_text()
        for node in ast.parse(source).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name != "main":
                texts.setdefault(node.name, set()).add(ast.get_source_segment(source, node) or "")
        modules = set(re.findall(r"^ *(?:import|from) (\w+)", source, re.MULTILINE))
        assert modules <= {"torch", *sys.stdlib_module_names}, path
    assert [name for name, versions in texts.items() if len(versions) > 1] == []


def test_regions_can_be_pasted() -> None:
    """The regions of ddp_exposed.py together use no undefined name."""
    page = (ROOT / "docs" / "examples.md").read_text()
    for path in FILES:
        source = path.read_text()
        regions = dict(REGION.findall(source))
        assert len(regions) == len(re.findall(r"^ *# \[", source, re.MULTILINE)) / 2 > 0, path
        pasted = [textwrap.dedent(text) for text in regions.values()]
        assert all(ast.parse(text) for text in pasted)
        if path.stem == "ddp_exposed":
            assert unknown_names("\n".join(pasted)) == []
            assert set(re.findall(r":start-after: \[(\w+)\]", page)) <= regions.keys()
        assert f"(../examples/{path.name})" in page


def test_a_step_takes_as_long_as_on_its_slowest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 takes 1, 2, 6, 3 ms, and another rank 5, 1, 4, 2 ms: the steps 5, 2, 6 and 3 ms."""
    clock = iter([0, 0.001, 0.003, 0.009, 0.012])
    monkeypatch.setattr(ddp_exposed, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(dist, "barrier", lambda: None)

    def all_reduce(mine: torch.Tensor, op: Any) -> None:
        assert op == dist.ReduceOp.MAX
        torch.maximum(mine, mine.new_tensor([5, 1, 4, 2]), out=mine)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    assert ddp_exposed.time_block(lambda: None, torch.device("cpu")) == pytest.approx(4)


def edited(name: str, folder: Path, old: str = "", new: str = "") -> str:
    """The path of a copy with fewer rounds, in which `old` is replaced by `new`."""
    text = with_fewer_rounds((EXAMPLES / f"{name}.py").read_text())
    assert not old or text.count(old) == 1, f"{name}: {old}"
    copy = folder / f"{name}.py"
    copy.write_text(text.replace(old, new) if old else text)
    return str(copy)


@pytest.mark.smoke
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_example_prints_its_docstring(path: Path, bench: Bench, tmp_path: Path) -> None:
    """On 3 ranks instead of 2, unless it prints a row for each rank or axis."""
    command, lines = shown(path)
    flags, rows = command[4:], path.stem in ("record_collectives", "who_is_slow")
    ranks = int(command[2]) if rows else 3
    if path.stem == "compiled_ddp":  # inductor would run a C++ compiler on each rank
        flags, lines = ["aot_eager"], [line.replace("inductor", "aot_eager") for line in lines]
    run = bench(edited(path.stem, tmp_path), *flags, ranks=ranks, json=False)
    assert any("95% interval" in line for line in lines)
    assert shape(run.out.splitlines()) == shape(lines)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("name", "ranks", "old", "new"),
    [
        ("batch_update_ps", 3, "server.gradients).mean", "server.gradients[:1]).mean"),
        ("compiled_ddp", 2, "    start = time", "    x.mul_(2)\n    start = time"),
        ("ddp_rpc", 3, "TABLES[0](indices)", "2 * TABLES[0](indices)"),
        ("fsdp_exposed", 2, '("dp",))', '("dp",), backend_override={"dp": "fake"})'),
        ("parameter_server", 3, "torch.stack(gradients)", "torch.stack(gradients[:1])"),
    ],
)
def test_a_wrong_result_ends_with_status_1(
    name: str, ranks: int, old: str, new: str, bench: Bench, tmp_path: Path
) -> None:
    """For example, a server loses the gradients of all trainers but one."""
    flags = ["aot_eager"] if name == "compiled_ddp" else []
    run = bench(edited(name, tmp_path, old, new), *flags, ranks=ranks, json=False, status=1)
    assert "correct: False" in run.out


OF_TP = "step: mesh_dp mesh_tp|exposed dp: mesh_tp without dp|exposed tp: mesh_dp without tp"


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("name", "kinds", "expected"),
    [
        ("tp_exposed", "{name: partial(train, model, x) for name, model in models.items()}", OF_TP),
        ("fsdp_exposed", '{"step": step, "twin": local_compute}', "step: default_pg|twin:"),
    ],
)
def test_a_twin_does_not_communicate_over_its_axis(
    name: str, kinds: str, expected: str, bench: Bench, tmp_path: Path
) -> None:
    """According to the flight recorder. DTensor treats meshes with equal names as one mesh."""
    spy = f"""    import json
    def groups():
        trace = json.loads(torch._C._distributed_c10d._dump_fr_trace_json())
        return [entry["process_group"][1] for entry in trace["entries"]]
    for kind, run in {kinds}.items():
        begin = len(groups())
        run()
        if dist.get_rank() == 0:
            print(f"{{kind}}:", *sorted(set(groups()[begin:])))
    dist.destroy_process_group()
    return 0
    gc.disable()"""
    run = bench(edited(name, tmp_path, "    gc.disable()", spy), ranks=4, json=False)
    assert run.out.splitlines() == expected.split("|")


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["batch_update_ps", "ddp_rpc", "parameter_server", "who_is_slow"])
def test_a_single_rank_is_refused(name: str, bench: Bench) -> None:
    run = bench(f"examples/{name}.py", ranks=0, json=False, status=1)
    assert "expected 2 ranks or more: torchrun --nproc-per-node " in run.err
