"""examples/: each runs as its docstring says, prints what it shows there, and stands by itself."""

import ast
import importlib
import random
import re
import statistics
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.pure.test_cores import unknown_names

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "examples").glob("*.py"))
each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)


def shown(path: Path) -> tuple[list[str], list[str]]:
    """The command in a file's docstring, as words, and the lines that it prints there."""
    doc = ast.get_docstring(ast.parse(path.read_text())) or ""
    command, *lines = re.split(r"\n\n", doc.split("    $ ", 1)[1])[0].splitlines()
    return command.split(), [line.strip() for line in lines]


def shape(lines: list[str]) -> list[str]:
    """The lines with `#` for each number, without the mark that a slow rank may get or not."""
    masked = [re.sub(r"-?\d+(\.\d+)?", "#", line).removesuffix("   slow") for line in lines]
    return [" ".join(line.split()) for line in masked if line.strip()]


def regions(path: Path) -> list[tuple[str, str]]:
    """(name, text) of the marked regions. Fails where one is not closed, or within another."""
    found, name, begin = [], "", 0
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines):
        if not (mark := re.fullmatch(r"\s*# \[(/?)(\w+)\]", line)):
            continue
        if mark[1]:
            assert mark[2] == name, f"{path.name}:{number + 1}: [/{mark[2]}] ends [{name}]"
            found.append((name, "\n".join(lines[begin + 1 : number])))
            name = ""
        else:
            assert not name, f"{path.name}:{number + 1}: [{mark[2]}] begins within [{name}]"
            name, begin = mark[2], number
    assert not name, f"{path.name}: [{name}] has no end"
    return found


@each_file
def test_stands_by_itself(path: Path) -> None:
    """Nothing but torch and the standard library is imported: one file is all that is copied."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names.append(node.module or "")
    ours = {p.stem for p in ROOT.iterdir() if p.is_dir()} | {p.stem for p in FILES}
    assert {name.split(".")[0] for name in names} & ours == set()
    assert {"numpy", "scipy", "torchvision"}.isdisjoint(names)


def test_what_files_share_is_the_same() -> None:
    """Functions and classes of the same name: who pastes two files has one of them twice."""
    texts: dict[str, dict[str, list[str]]] = {}
    for path in FILES:
        source = path.read_text()
        for node in ast.parse(source).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name != "main":
                text = ast.get_source_segment(source, node) or ""
                texts.setdefault(node.name, {}).setdefault(text, []).append(path.name)
    differ = {name: list(files.values()) for name, files in texts.items() if len(files) > 1}
    assert differ == {}


@each_file
def test_regions_are_whole_statements(path: Path) -> None:
    found = regions(path)
    assert found
    assert len({name for name, _ in found}) == len(found)
    for _, text in found:
        indent = min(len(line) - len(line.lstrip()) for line in text.splitlines() if line)
        ast.parse("\n".join(line[indent:] for line in text.splitlines()))


def test_regions_of_ddp_exposed_need_nothing_else() -> None:
    """Pasted one after the other, they use no name that they do not make."""
    pasted = [textwrap.dedent(text) for _, text in regions(ROOT / "examples" / "ddp_exposed.py")]
    assert unknown_names("\n".join(pasted)) == []


def test_page_names_every_file_and_region_that_it_includes() -> None:
    page = (ROOT / "docs" / "examples.md").read_text()
    for path in FILES:
        assert f"(../examples/{path.name})" in page
        assert " ".join(shown(path)[0]) in page
    quoted = re.findall(r"literalinclude:: \S*/(\w+\.py)\n.*:start-after: \[(\w+)\]", page)
    for file, name in quoted:
        assert name in [region for region, _ in regions(ROOT / "examples" / file)]
    assert quoted


class Cluster:
    """Ranks that compute for 30 ms and up to three times 10 % more, as rank 0 would see them.

    In a step that communicates, which takes 10 ms more, all wait for the slowest rank.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks, self.now_s, self.random = ranks, 0.0, random.Random(ranks)
        self.block: list[list[float]] = []  # of each step since the barrier, each rank's ms

    def run(self, communication_ms: float) -> None:
        each = [30 + min(9.0, self.random.expovariate(1 / 3)) for _ in range(self.ranks)]
        if communication_ms:
            each = [max(each) + communication_ms] * self.ranks
        self.block.append(each)
        self.now_s += each[0] / 1e3

    def barrier(self) -> None:
        self.block.clear()

    def all_reduce(self, mine: torch.Tensor, op: Any) -> None:
        """What rank 0 has measured becomes the largest of all ranks: of each step, or of means."""
        assert op == dist.ReduceOp.MAX
        rows = torch.tensor(self.block[1:], dtype=mine.dtype)  # the first one is not timed
        seen = rows if mine.dim() else rows.mean(dim=0, keepdim=True)
        assert torch.allclose(mine, seen[:, 0] if mine.dim() else seen[0, 0])
        mine.copy_(seen.max(dim=1).values.reshape(mine.shape))


@pytest.mark.parametrize("name", ["ddp_exposed", "tp_exposed"])
@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_what_is_exposed_comes_out_of_a_simulation(
    name: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting for whoever is late in a step is not communication: it is in both times."""
    module, cluster = importlib.import_module(f"examples.{name}"), Cluster(ranks)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: cluster.now_s))
    monkeypatch.setattr(dist, "barrier", cluster.barrier)
    monkeypatch.setattr(dist, "all_reduce", cluster.all_reduce)
    differences = []
    for _ in range(max(200, 1500 // ranks)):
        step = module.time_block(lambda: cluster.run(10), torch.device("cpu"))
        differences.append(step - module.time_block(lambda: cluster.run(0), torch.device("cpu")))
    assert statistics.median(differences) == pytest.approx(10, abs=0.3)


@pytest.mark.smoke
@each_file
def test_prints_what_its_docstring_shows(path: Path, bench: Callable[..., Any]) -> None:
    command, lines = shown(path)
    assert command[:2] == ["torchrun", "--nproc-per-node"]
    assert any("95 % interval" in line for line in lines)
    run = bench(command[3], *command[4:], ranks=int(command[2]), json=False)
    assert run.status == 0, run.err
    assert shape(run.out.splitlines()) == shape(lines)


FAULTS = {  # what stands there, and what is put in its place
    "batch_update_ps": ("torch.stack(server.gradients)", "torch.stack(server.gradients[:1])"),
    "compiled_ddp": ("    start = time", "    x.mul_(2)\n    start = time"),
    "ddp_rpc": ("TABLES[0](indices)", "TABLES[0](indices).detach() + 0 * TABLES[0](indices)"),
    "fsdp_exposed": ('("dp",))', '("dp",), backend_override={"dp": "fake"})'),
    "parameter_server": ("torch.stack(gradients)", "torch.stack(gradients[:1])"),
}
COUNTS = [(path, 3) for path in FILES]
COUNTS += [(path, ranks) for path in FILES for ranks in (2, 4) if path.stem in FAULTS]


def flags_of(path: Path) -> list[str]:
    """Inductor calls a C++ compiler on every rank: one of the tests is enough for that."""
    return ["aot_eager"] if path.stem == "compiled_ddp" else []


@pytest.mark.smoke
@pytest.mark.parametrize(("path", "ranks"), COUNTS, ids=lambda value: getattr(value, "stem", value))
def test_any_number_of_ranks(path: Path, ranks: int, bench: Callable[..., Any]) -> None:
    run = bench(f"examples/{path.name}", *flags_of(path), ranks=ranks, json=False)
    assert run.status == 0, run.err
    assert any(line.startswith(f"{ranks} ") for line in run.out.splitlines()), run.out
    assert "Warning" not in run.err


def edited(path: Path, old: str, new: str, folder: Path) -> str:
    """The path of a copy with something else in the place of `old`."""
    text = path.read_text()
    assert text.count(old) == 1, f"{path.name}: {old}"
    copy = folder / path.name
    copy.write_text(text.replace(old, new))
    return str(copy)


@pytest.mark.smoke
@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_result_ends_with_status_1(
    name: str, bench: Callable[..., Any], tmp_path: Path
) -> None:
    """E.g. a server that loses the gradients of all trainers but one."""
    path = ROOT / "examples" / f"{name}.py"
    copy = edited(path, *FAULTS[name], tmp_path)
    run = bench(copy, *flags_of(path), ranks=3, json=False)
    assert run.status == 1
    assert "right: False" in run.out


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("name", "kinds", "expected"),
    [
        (
            "tp_exposed",
            "{name: partial(train, model, x) for name, model in models.items()}",
            [
                "step: mesh_dp mesh_tp",
                "exposed dp: mesh_tp without dp",
                "exposed tp: mesh_dp without tp",
            ],
        ),
        ("fsdp_exposed", '{"step": step, "twin": local_compute}', ["step: default_pg", "twin:"]),
    ],
)
def test_a_twin_sends_nothing_over_the_axis_that_it_fakes(
    name: str, kinds: str, expected: list[str], bench: Callable[..., Any], tmp_path: Path
) -> None:
    """As torch's flight recorder has it: DTensor takes meshes with equal names for one mesh."""
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
    path = ROOT / "examples" / f"{name}.py"
    run = bench(edited(path, "    gc.disable()", spy, tmp_path), ranks=4, json=False)
    assert run.status == 0, run.err
    assert run.out.splitlines() == expected


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["batch_update_ps", "ddp_rpc", "parameter_server", "who_is_slow"])
def test_one_rank_is_too_few(name: str, bench: Callable[..., Any]) -> None:
    run = bench(f"examples/{name}.py", ranks=1, json=False)
    assert run.status == 1
    assert "expected 2 ranks or more: torchrun --nproc-per-node " in run.err
