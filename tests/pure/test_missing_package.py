"""A package that is not installed is one line of every program."""

import ast
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process import ROOT, environment

PROGRAMS = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "analysis").glob("*.py")]
PROGRAMS = [path for path in PROGRAMS if "sys.path.insert" in path.read_text()]
THE_FOUR = {"torch", "torchvision", "numpy", "tabulate", "PIL"}  # torchvision brings PIL
# As Python finds no package of these names, whether it is installed or not
HIDE = """
import os, sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in os.environ["HIDDEN"].split():
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
"""


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_common_comes_before_packages(path: Path) -> None:
    """common/ says which package is missing, so nothing but the four is imported before it."""
    first: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            first |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            first.add(str(node.module).split(".")[0])
        if first & {"common", "analysis"}:
            break
    else:
        pytest.fail("it imports nothing of the project")
    allowed = THE_FOUR if path.parent.name == "benchmarks" else set()
    assert first - sys.stdlib_module_names <= {"common", "analysis", *allowed}


@pytest.mark.parametrize(
    ("program", "missing"),
    [
        ("benchmarks/ddp_sweep.py", "psutil tqdm"),
        ("benchmarks/checkpoint_sweep.py", "tqdm"),
        ("analysis/compare.py", "pandas"),
        ("analysis/compare.py", "scipy"),
        ("analysis/report.py", "jinja2"),
        ("analysis/export.py", "numpy"),
        ("analysis/ab.py", "psutil"),
    ],
)
def test_it_is_one_line(program: str, missing: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDE)
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    results = str(ROOT / "tests" / "golden" / "small.jsonl")
    words = [results, "-o", str(tmp_path / "page.html")] if "report.py" in program else []
    done = subprocess.run(
        [sys.executable, str(ROOT / program), *words],
        env=environment(PYTHONPATH=path, HIDDEN=missing),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    folder = ROOT / "analysis" if program.startswith("analysis") else ROOT
    name = Path(program).name
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{name}: error: {missing.split()[0]} is not installed; try pip install")
    assert line.endswith(f" -r {shlex.quote(str(folder / 'requirements.txt'))}")
