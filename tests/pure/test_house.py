"""The house: which way the arrows point, and what keeps files readable."""

import ast
from pathlib import Path

import pytest

from tests.process import ROOT

FOLDERS = ("benchmarks", "common", "analysis", "examples")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.py"))


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
        "analysis": ("analysis.", "common.report", "common.cli", "common.turns", "common.stats"),
        "examples": (),
    }[folder]
    plots = {"analysis.report"} if folder == "benchmarks" else set()  # --plot, in a function
    assert all(used.startswith(allowed) for used in USES[module] - plots)


def test_common_has_a_map_and_imports_follow_it() -> None:
    """Ground, core, toolkits: each module is in common/__init__.py, below those that it imports."""
    lines = (ROOT / "common" / "__init__.py").read_text().splitlines()
    order = [f"common.{line.split()[0]}" for line in lines if line.startswith("    ")]
    modules = [m for m in USES if m.startswith("common.") and m != "common.__init__"]
    assert sorted(order) == sorted(modules)
    for number, module in enumerate(order):
        assert USES[module] <= {*order[:number], "common"}, module


def test_no_cycles() -> None:
    def reach(module: str, seen: set[str]) -> set[str]:
        for used in USES[module] - seen:
            seen |= {used} | reach(used, seen | {used})
        return seen

    assert [module for module in USES if module in reach(module, set())] == []


def test_a_module_of_common_has_two_users() -> None:
    users = {module: [m for m, used in USES.items() if module in used] for module in USES}
    alone = [m for m in USES if m.startswith("common.") and len(users[m]) < 2]
    core = {"common.__init__", "common.benchmark", "common.join", "common.watchdog"}
    assert set(alone) - core - {"common.environment"} == set()


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
