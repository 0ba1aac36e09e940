"""The script of CONTRIBUTING.md, which newcomers copy, works as it stands there."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.report import Case, Estimate
from common.stats import Times
from tests.process import ROOT


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


@pytest.mark.smoke
def test_the_example_runs(bench: Callable[..., Any], tmp_path: Path) -> None:
    script = tmp_path / "benchmarks" / "x.py"
    script.parent.mkdir()
    script.write_text(example())
    (tmp_path / "common").symlink_to(ROOT / "common")
    run = bench(str(script), "--sizes", "2,64K", "--iters", "6", ranks=2)
    assert run.status == 1, run.err
    too_small, measured = run.report.cases
    assert too_small.check.startswith("failed: ValueError: 2 bytes hold no float32")
    assert measured.check == "passed"
    assert measured.metrics["time_s"].value > 0
    assert "64K bytes expose most: " in run.out
