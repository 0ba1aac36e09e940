"""The marked cores of the scripts: what a tutorial pastes needs torch, and nothing of common/.

Pages have them between ```python core and ```, below the imports that they need.

    python tests/pure/test_cores.py refresh    # the cores of today into the pages with such fences
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = re.compile(r"^# \[core\]\n(.*?)^# \[/core\]$", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"(?<=^```python core\n).*?(?=^```$)", re.MULTILINE | re.DOTALL)
SCRIPTS = sorted((ROOT / "benchmarks").glob("[a-z]*.py"))
PAGES = [page for page in sorted((ROOT / "docs").glob("*.md")) if FENCE.search(page.read_text())]
# each of the source programs has a script with a core, and a page that shows it
SOURCES = {"batch_update_ps", "compile_sweep", "ddp_rpc", "ddp_sweep", "parameter_server"}
OF_A_TUTORIAL = {*sys.stdlib_module_names, "torch", "torchvision", "numpy"}


def pasted(path: Path) -> str:
    """The cores of a script, below those of its imports that they use and that a tutorial has."""
    source = path.read_text()
    cores = "\n\n\n".join(core.strip("\n") for core in CORE.findall(source))
    words = set(re.findall(r"\w+", cores))
    imports = []
    for node in ast.parse(source).body:
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        module = node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name
        node.names = [n for n in node.names if (n.asname or n.name).split(".")[0] in words]
        if node.names and module.split(".")[0] in OF_A_TUTORIAL:
            imports.append(ast.unparse(node))
    return "\n".join([*imports, "", cores, ""])


def with_core(page: Path) -> str:
    """The page's text, with the core of its script in its fence."""
    core = pasted(ROOT / "benchmarks" / f"{page.stem}.py")
    return FENCE.sub(lambda match: core, page.read_text())


def unknown_names(source: str) -> list[str]:
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821"]
    command += ["--output-format", "concise", "-"]
    run = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    assert run.returncode in (0, 1), run.stderr
    return re.findall(r"Undefined name `(\w+)`", run.stdout)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_core_needs_nothing_of_the_project(path: Path) -> None:
    source = path.read_text()
    assert source.count("# [core]") == source.count("# [/core]") == len(CORE.findall(source))
    assert not re.search(r"\bkey\[", "\n".join(CORE.findall(source)))
    assert unknown_names(pasted(path)) == []


def test_a_page_shows_the_core_of_today() -> None:
    assert {page.stem for page in PAGES} >= SOURCES
    for page in PAGES:
        assert page.read_text() == with_core(page), "python tests/pure/test_cores.py refresh"


if __name__ == "__main__" and sys.argv[1:] == ["refresh"]:
    for page in PAGES:
        page.write_text(with_core(page))
