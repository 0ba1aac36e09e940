"""The marked cores of the scripts: what a tutorial pastes needs torch, and nothing of common/."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process import ROOT

CORE = re.compile(r"^# \[core\]\n(.*?)^# \[/core\]$", re.MULTILINE | re.DOTALL)
SCRIPTS = sorted((ROOT / "benchmarks").glob("*.py"))
# each of the source programs has a script with a core
SOURCES = ("batch_update_ps", "ddp_rpc", "parameter_server")
OF_A_TUTORIAL = {*sys.stdlib_module_names, "torch", "torchvision", "numpy"}


def pasted(path: Path) -> str:
    """The cores of a script, below those of its imports that a tutorial has, too."""
    source = path.read_text()
    imports = []
    for node in ast.parse(source).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        if names and names[0].split(".")[0] in OF_A_TUTORIAL:
            imports.append(ast.unparse(node))
    return "\n".join([*imports, "", *CORE.findall(source)])


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
    assert CORE.search(source) or path.stem not in SOURCES
    assert unknown_names(pasted(path)) == []
    assert not re.search(r"\bkey\[", "\n".join(CORE.findall(source)))


def test_an_unknown_name_is_found() -> None:
    assert unknown_names("import torch\n\ndef f(x: Job) -> None:\n    torch.sum(x, hosted())") == [
        "Job",
        "hosted",
    ]
