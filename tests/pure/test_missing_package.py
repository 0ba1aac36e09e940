"""Every program reports a missing package in one line."""

import ast
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process import ROOT, environment

PROGRAMS = [*ROOT.glob("benchmarks/[a-z]*.py"), *ROOT.glob("analysis/*.py")]
PROJECT = {"common", "harness", "readers", "analysis", "benchmarks"}


def test_missing_packages_are_reported_before_the_first_import_of_one() -> None:
    """Scripts of benchmarks/ call report_missing_packages(); the package analysis sets its hook."""
    for path in [path for path in PROGRAMS if "sys.path.insert" in path.read_text()]:
        first: set[str] = set()
        sets_hook = path.parent.name == "analysis"
        for node in ast.parse(path.read_text()).body:
            sets_hook |= "report_missing_packages()" in ast.unparse(node)
            if isinstance(node, ast.Import):
                first |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                first.add(str(node.module).split(".")[0])
            if first & PROJECT and sets_hook:
                break
        assert sets_hook, path
        assert first - sys.stdlib_module_names <= PROJECT, path


SIDES = "docs/results/tutorial/change/a --test docs/results/tutorial/change/b"


@pytest.mark.parametrize(
    ("program", "missing", "folder"),
    [
        ("benchmarks/ddp_sweep.py", "torch", "."),
        ("benchmarks/collectives.py", "numpy", "."),
        (f"analysis/compare.py {SIDES} --ignore-key bucket_size_mb,comm_hook", "scipy", "analysis"),
    ],
)
def test_a_package_is_missing(program: str, missing: str, folder: str, tmp_path: Path) -> None:
    """A None in sys.modules has the effect of a missing package."""
    program, *words = program.split()
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules['{missing}'] = None\n")
    env = environment(PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    command = [sys.executable, str(ROOT / program), *words]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=500)
    path = shlex.quote(str((ROOT / folder / "requirements.txt").resolve()))
    told = f"error: {missing} is not installed; try pip install -r {path}\n"
    assert (done.returncode, done.stderr) == (2, f"{Path(program).name}: {told}")
