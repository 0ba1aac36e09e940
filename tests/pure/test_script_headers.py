"""What `uv run analysis/compare.py` installs, its PEP 723 header, is what the script imports."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

from tests.process import ROOT

COME_ALONG = {"markupsafe": "jinja2", "cycler": "matplotlib", "mpl_toolkits": "matplotlib"}


def imports_of(script: str) -> set[str]:
    """The packages that a script and the project's modules behind it import."""
    packages, seen, modules = set[str](), set[Path](), [f"analysis.{script}"]
    while modules:
        module = modules.pop()
        path, first = ROOT / f"{module.replace('.', '/')}.py", module.split(".")[0]
        if not path.exists() and not (ROOT / first).is_dir():
            packages.add(COME_ALONG.get(first, first))
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
def test_the_header_lists_what_is_imported(script: str) -> None:
    text = (ROOT / "analysis" / f"{script}.py").read_text()
    block = re.search(r"^# /// script\n((?:#.*\n)+?)# ///$", text, re.M)
    assert block, f"{script} has no header"
    header = tomllib.loads(re.sub(r"^# ?", "", block[1], flags=re.M))
    names = {line.split(">=")[0] for line in header["dependencies"]}
    assert names == imports_of(script)
    requirements = (ROOT / "analysis" / "requirements.txt").read_text().splitlines()
    assert set(header["dependencies"]) <= set(requirements)
    assert header["requires-python"] == ">=3.11"
