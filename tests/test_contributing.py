"""The script of CONTRIBUTING.md, which newcomers copy, works as it stands there."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.report import Case, Estimate
from common.stats import Times
from tests.process import ROOT

ROW = "| [x.py](docs/x.md) | does an all-reduce hide behind a matmul? |"
LISTS = re.compile(r"benchmarks.*glob\(|glob\(.*benchmarks|test_one_gpu|FOLDERS")
COMMAND = "    torchrun --nproc-per-node 2 benchmarks/x.py --sizes 64K,4M"


def example() -> str:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (script,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return str(script)


def test_the_example_by_hand() -> None:
    """Six rounds of one iteration: 3 s together, of which the matmul alone takes 2 s."""
    names: dict[str, Any] = {"__name__": "x", "__file__": str(ROOT / "benchmarks" / "x.py")}
    exec(compile(example(), "CONTRIBUTING.md", "exec"), names)
    seconds = {"step": [[3.0] * 6, [2.5] * 6], "compute": [[1.0] * 6, [2.0] * 6]}
    case = Case(key={"size_bytes": 4}, ranks=[0, 1])
    names["derive"](case, Times(seconds, [1] * 6), [[1.0], [1.0]])
    assert case.metrics == {"time_s": Estimate(3, 3, 3), "exposed_s": Estimate(1, 1, 1)}
    assert case.check == "passed"
    names["derive"](case, Times(seconds, [1] * 6), [[1.0], [0.0]])
    assert case.failed


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with the script in it, and what CONTRIBUTING.md says comes with it."""
    path = tmp_path_factory.mktemp("home") / "a checkout"
    shutil.copytree(ROOT, path, ignore=shutil.ignore_patterns(".*", "__pycache__"))
    (path / "benchmarks" / "x.py").write_text(example())
    (path / "docs" / "x.md").write_text(f"# x.py\n\n{COMMAND}\n")
    (path / "tests" / "test_x.py").touch()
    readme = (path / "README.md").read_text()
    (path / "README.md").write_text(readme.replace("\n| [", f"\n{ROW}\n| [", 1))
    return path


@pytest.mark.smoke
def test_the_example_breaks_no_other_test(checkout: Path) -> None:
    """What the quick tests that list the scripts of the folder say of it, its page and README."""
    files = [path for path in checkout.glob("tests/pure/*.py") if LISTS.search(path.read_text())]
    assert len(files) > 5
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-k", "x.py or x.md or benchmarks.x or README.md", *map(str, files)]
    run = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stdout
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed
    assert int(passed[1]) > 5


@pytest.mark.smoke
def test_the_example_runs(bench: Callable[..., Any], checkout: Path) -> None:
    script = checkout / "benchmarks" / "x.py"
    run = bench(str(script), "--sizes", "2,64K", "--iters", "6", ranks=2)
    assert run.status == 1, run.err
    too_small, measured = run.report.cases
    assert too_small.check.startswith("failed: ValueError: 2 bytes hold no float32")
    assert measured.check == "passed"
    assert measured.metrics["time_s"].value > 0
    assert "64K bytes expose most: " in run.out
