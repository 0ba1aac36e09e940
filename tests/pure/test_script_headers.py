"""What `uv run analysis/compare.py` installs, its PEP 723 header, is what the script imports."""

import ast
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ["ab", "compare", "export", "report"]
COME_ALONG = {"markupsafe": "jinja2", "cycler": "matplotlib", "mpl_toolkits": "matplotlib"}


def header(path: Path) -> dict[str, Any]:
    block = re.search(r"^# /// script\n((?:#.*\n)+?)# ///$", path.read_text(), re.M)
    assert block, f"{path.name} has no header"
    return tomllib.loads(re.sub(r"^# ?", "", block[1], flags=re.M))


def imports(path: Path, seen: set[Path]) -> set[str]:
    """The packages that a script and the project's modules behind it import."""
    seen.add(path)
    packages = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for module in modules:
            file = ROOT / (module.replace(".", "/") + ".py")
            if file.exists() and file not in seen:
                packages |= imports(file, seen)
            first = module.split(".")[0]
            if not (ROOT / first).is_dir() and first not in sys.stdlib_module_names:
                packages.add(COME_ALONG.get(first, first))
    return packages


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_header_lists_what_is_imported(script: str) -> None:
    path = ROOT / "analysis" / f"{script}.py"
    listed = header(path)["dependencies"]
    assert {line.split(">=")[0] for line in listed} == imports(path, set())
    # the versions of its requirements.txt
    assert set(listed) <= set((ROOT / "analysis/requirements.txt").read_text().splitlines())
    assert header(path)["requires-python"] == ">=3.11"
