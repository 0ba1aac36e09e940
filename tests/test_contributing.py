"""The script in CONTRIBUTING.md works when it is copied."""

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

(EXAMPLE,) = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
ROW = "| [x.py](docs/x.md) | Does an all-reduce overlap with a matmul? |"
COMMAND = "    torchrun --nproc-per-node 2 benchmarks/x.py --sizes 64K,4M"


def test_the_example_by_hand() -> None:
    """Six rounds of one iteration: both take 3 s, and the matmul alone takes 2 s."""
    names: dict[str, Any] = {"__name__": "x", "__file__": str(ROOT / "benchmarks" / "x.py")}
    exec(compile(EXAMPLE, "CONTRIBUTING.md", "exec"), names)
    seconds = {"step": [[3.0] * 6, [2.5] * 6], "compute": [[1.0] * 6, [2.0] * 6]}
    case = Case(key={"size_bytes": 4}, ranks=[0, 1], name="4")
    names["derive"](case, Times(seconds, [1] * 6), [[1.0], [1.0]])
    assert case.metrics == {"time_s": Estimate(3, 3, 3), "exposed_s": Estimate(1, 1, 1)}
    assert case.check == "passed"
    assert names["answer"]([case]) == "exposed: 1.00 s (1.00 to 1.00) at 4 bytes"
    names["derive"](case, Times(seconds, [1] * 6), [[1.0], [0.0]])
    assert case.failed


@pytest.mark.smoke
def test_the_example_runs_and_breaks_no_other_test(
    bench: Callable[..., Any], tmp_path: Path
) -> None:
    """In a copy of the project, with the other files that CONTRIBUTING.md requires for a script."""
    checkout = tmp_path / "a checkout"
    ignored = shutil.ignore_patterns(".git", ".*_cache", "__pycache__")
    shutil.copytree(ROOT, checkout, ignore=ignored)
    (checkout / "benchmarks" / "x.py").write_text(EXAMPLE)
    (checkout / "docs" / "x.md").write_text(f"# x.py\n\n{COMMAND}\n")
    (checkout / "tests" / "test_x.py").touch()
    readme = checkout / "README.md"
    readme.write_text(readme.read_text().replace("\n| [", f"\n{ROW}\n| [", 1))

    script = str(checkout / "benchmarks" / "x.py")
    run = bench(script, "--sizes", "2,64K", "--iters", "6", ranks=2)
    assert run.status == 1, run.err
    too_small, measured = run.report.cases
    assert too_small.check.startswith("failed: ValueError: 2 bytes are too few for a float32")
    assert measured.check == "passed"
    assert "# exposed: " in run.out

    sources = {path: path.read_text() for path in checkout.glob("tests/pure/*.py")}
    files = [
        str(path) for path, text in sources.items() if "benchmarks" in text and "glob(" in text
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    # x.py has no row in test_refusals.py
    command += ["-k", "not every_command and not mistake"]
    quick = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=500)
    assert quick.returncode == 0, quick.stdout
