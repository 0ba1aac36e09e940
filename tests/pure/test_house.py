"""The house: which way the arrows point, and what each file says of itself."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process import ROOT

FOLDERS = ("benchmarks", "common", "analysis", "examples")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def imports_of(path: Path) -> set[str]:
    """The project's modules that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & {name_of(path) for path in FILES}


USES = {name_of(path): imports_of(path) for path in FILES}


@pytest.mark.parametrize("module", sorted(USES))
def test_arrows_point_one_way(module: str) -> None:
    folder = module.split(".")[0]
    allowed = {
        "benchmarks": ("common.",),
        "common": ("common.",),
        "analysis": ("analysis.", "common.report", "common.cli", "common.stats"),
        "examples": (),
    }[folder]
    assert all(used.startswith(allowed) for used in USES[module])


WITH_TORCH = [path for path in FILES if path.parent.name != "analysis"]


@pytest.mark.parametrize("path", WITH_TORCH, ids=lambda path: path.stem)
def test_no_switch_by_the_number_of_torchs_version(path: Path) -> None:
    """Ask for the feature: torch 2.14 has the names of 2.15 and some of 2.11's behaviour."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant):
            number = re.fullmatch(r"[1-9]\.\d+(\.\d+)*", str(node.value))
            assert not (isinstance(node.value, str) and number), f"line {node.lineno}"
        elif isinstance(node, ast.Compare):
            words = ast.unparse(node)
            assert not re.search(r"__version__|\['torch'\]", words), f"line {node.lineno}: {words}"


def test_common_has_a_map_and_imports_follow_it() -> None:
    """Ground and core: each module is in common/__init__.py, below those that it imports."""
    lines = (ROOT / "common" / "__init__.py").read_text().splitlines()
    order = [f"common.{line.split()[0]}" for line in lines if line.startswith("    ")]
    modules = [m for m in USES if re.fullmatch(r"common\.[a-z]\w*", m)]
    assert sorted(order) == sorted(modules)
    for number, module in enumerate(order):
        assert USES[module] <= {*order[:number], "common"}, module


@pytest.mark.parametrize("module", sorted(USES))
def test_what_looks_on_can_be_deleted(module: str) -> None:
    """Nothing but common/observe/ itself imports it. Nor does the core import common/workloads/."""
    if re.fullmatch(r"common\.\w+", module):
        assert not [used for used in USES[module] if used.startswith("common.workloads")]
    if not module.startswith("common.observe."):
        assert not [used for used in USES[module] if used.startswith("common.observe")]


def test_a_report_is_read_without_torch_and_numpy() -> None:
    """--resume rebuilds it before torch is there, and analysis/ runs where torch is not."""
    code = "import sys, common.report; print({'torch', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


def test_no_cycles() -> None:
    def reach(module: str, seen: set[str]) -> set[str]:
        for used in USES[module] - seen:
            seen |= {used} | reach(used, seen | {used})
        return seen

    assert [module for module in USES if module in reach(module, set())] == []


def test_a_module_of_common_has_two_users() -> None:
    users = {module: [m for m, used in USES.items() if module in used] for module in USES}
    alone = [m for m in USES if m.startswith("common.") and len(users[m]) < 2]
    core = {
        "common.__init__",
        "common.workloads.__init__",
        "common.benchmark",
        "common.join",
        "common.watchdog",
    }
    lookers_on = {module for module in alone if module.startswith("common.observe.")}
    assert set(alone) - core - lookers_on == set()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_private_names_do_not_cross_files(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module in USES:
            assert not any(alias.name.startswith("_") for alias in node.names), path


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_says_what_it_is(path: Path) -> None:
    tree = ast.parse(path.read_text())
    if path.name != "__init__.py":
        assert ast.get_docstring(tree), path
    if path.parent.name in ("benchmarks", "examples"):
        assert "BSD-3-Clause" in (ast.get_docstring(tree) or ""), path
        assert "torchrun --n" in (ast.get_docstring(tree) or ""), path


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.py")), ids=name_of)
def test_a_script_has_its_page_its_test_and_its_row(path: Path) -> None:
    """docs/x.md, a file test_x.py or more, and a row in the table of README.md."""
    name = path.stem
    assert (ROOT / "docs" / f"{name}.md").exists()
    assert list((ROOT / "tests").rglob(f"test_{name}.py"))
    assert f"\n| [{name}.py](docs/{name}.md) | " in (ROOT / "README.md").read_text()
