"""The PEP 723 header, which `uv run analysis/compare.py` installs, lists what the script
imports."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

from tests.process import ROOT

BUNDLED_WITH = {"markupsafe": "jinja2", "cycler": "matplotlib", "mpl_toolkits": "matplotlib"}


def imports_of(script: str) -> set[str]:
    """The packages that a script imports, directly or through modules of the project."""
    packages, seen, modules = set[str](), set[Path](), [f"analysis.{script}"]
    while modules:
        module = modules.pop()
        path, first = ROOT / f"{module.replace('.', '/')}.py", module.split(".")[0]
        if not path.exists() and not (ROOT / first).is_dir():
            packages.add(BUNDLED_WITH.get(first, first))
        if not path.exists() or path in seen:
            continue
        seen.add(path)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return packages - sys.stdlib_module_names


@pytest.mark.parametrize("script", ["ab", "compare", "export", "report"])
def test_the_header_lists_the_imported_packages(script: str) -> None:
    text = (ROOT / "analysis" / f"{script}.py").read_text()
    block = re.search(r"^# /// script\n((?:#.*\n)+?)# ///$", text, re.M)
    assert block, f"{script} has no header"
    header = tomllib.loads(re.sub(r"^# ?", "", block[1], flags=re.M))
    names = {line.split(">=")[0] for line in header["dependencies"]}
    assert names == imports_of(script)
    requirements = (ROOT / "analysis" / "requirements.txt").read_text().splitlines()
    assert set(header["dependencies"]) <= set(requirements)
    assert header["requires-python"] == ">=3.11"
