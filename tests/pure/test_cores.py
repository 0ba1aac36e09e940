"""The marked cores of the scripts can be pasted: they need torch, and nothing of common/.

A core is everything between `# [core]` and `# [/core]` in a script. Its page links to it.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = re.compile(r"^# \[core\]\n(.*?)^# \[/core\]$", re.MULTILINE | re.DOTALL)
SCRIPTS = sorted((ROOT / "benchmarks").glob("[a-z]*.py"))
SOURCES = {"batch_update_ps", "compile_sweep", "ddp_rpc", "ddp_sweep", "parameter_server"}
OF_A_TUTORIAL = {*sys.stdlib_module_names, "torch", "torchvision", "numpy"}


def pasted(source: str) -> str:
    """The cores of a script below the imports that they use, without those of the project."""
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


def unknown_names(source: str) -> list[str]:
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821"]
    command += ["--output-format", "concise", "-"]
    run = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    assert run.returncode in (0, 1), run.stderr
    return re.findall(r"Undefined name `(\w+)`", run.stdout)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_core_needs_nothing_of_the_project(path: Path) -> None:
    source = path.read_text()
    cores = CORE.findall(source)
    assert source.count("# [core]") == source.count("# [/core]") == len(cores)
    assert cores or path.stem not in SOURCES
    assert not re.search(r"\bkey\[", "\n".join(cores))
    assert unknown_names(pasted(source)) == []
