"""The architecture: which modules may import which, private names, and what belongs to a script."""

import ast
import re
import subprocess
import sys
from pathlib import Path

from tests.process import ROOT

FOLDERS = ("benchmarks", "common", "harness", "readers", "analysis", "examples")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in FILES}
# What analysis/ may import besides its own modules, because it runs without torch
MODULES = ("report", "cli", "contents", "cpu_load", "exits", "files")
SHARED = [
    *(f"harness.{name}" for name in MODULES),
    "common.stats",
    *(f"readers.{name}" for name in ("files", "isolated", "traces")),
]
ALLOWED = {
    "benchmarks": ("common.", "harness.", "readers", "benchmarks.workloads."),
    "common": ("common.",),
    "harness": ("common.", "harness."),
    "readers": ("common.stats", "harness.cli", "harness.files", "harness.report"),
    "analysis": ("analysis.", "harness", "readers", *SHARED),
    "examples": (),
}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def imports_of(path: Path) -> set[str]:
    """The project's modules that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & {name_of(path) for path in FILES}


USES = {name_of(path): imports_of(path) for path in FILES}


def test_imports_point_one_way_and_in_no_circle() -> None:
    """benchmarks -> harness -> common, and scripts do not import each other. Nothing else imports
    harness/observe/, so that it can be deleted."""
    for module, used in USES.items():
        allowed = ALLOWED[module.split(".")[0]]
        assert all(name.startswith(allowed) for name in used), module
        if not module.startswith("harness.observe."):
            assert not [name for name in used if name.startswith("harness.observe")], module

    def reach(module: str, seen: set[str]) -> set[str]:
        for used in USES[module] - seen:
            seen |= {used} | reach(used, seen | {used})
        return seen

    assert [module for module in USES if module in reach(module, set())] == []


def test_modules_that_analysis_imports_run_without_torch() -> None:
    code = f"import sys, {', '.join(SHARED)}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_no_code_depends_on_the_version_of_torch() -> None:
    """Code tests for features: torch 2.14 has the names of 2.15 and some of the behavior of
    2.11."""
    for path in [path for path in FILES if path.parent.name != "analysis"]:
        for node in ast.walk(TREES[path]):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not re.fullmatch(r"[1-9]\.\d+(\.\d+)*", node.value), (path, node.lineno)
            elif isinstance(node, ast.Compare):
                words = ast.unparse(node)
                assert not re.search(r"__version__|\['torch'\]", words), (path, node.lineno)


def test_commands_in_messages_are_those_of_the_archive_if_it_runs() -> None:
    """Outside of docstrings, which the parser converts, and file names: see `as_started`."""
    for path, tree in TREES.items():
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        converted = [call for call in calls if ast.unparse(call.func).endswith("as_started")]
        allowed = {id(part) for call in converted for part in ast.walk(call)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                allowed.add(id(node.value))  # a docstring
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                names = re.search(r"\b(benchmarks|analysis)/\w+\.py", node.value)
                assert not names or id(node) in allowed, (path, node.lineno)


def test_docstrings_licenses_and_private_names() -> None:
    for path, tree in TREES.items():
        told = ast.get_docstring(tree) or ""
        assert told or path.name == "__init__.py", path
        if path.parent.name in ("benchmarks", "examples") and path.name != "__init__.py":
            assert "BSD-3-Clause" in told, path
            assert "torchrun --n" in told, path
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module in USES:
                assert not [name for name in node.names if name.name.startswith("_")], path


def test_a_script_has_a_page_a_test_and_a_link_in_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    for path in ROOT.glob("benchmarks/[a-z]*.py"):
        name = path.stem
        missing = []
        if not (ROOT / "docs" / f"{name}.md").exists():
            missing.append(f"docs/{name}.md")
        if not list((ROOT / "tests").rglob(f"test_{name}.py")):
            missing.append(f"tests/test_{name}.py")
        if f"](docs/{name}.md)" not in readme:
            missing.append(f"a row of README.md that links to docs/{name}.md")
        assert not missing, f"{path.name} needs {', '.join(missing)}"
