"""What tests/budget.py runs, and the budgets that it counts."""

import os
import re
import sys
from pathlib import Path

import pytest

from common.report import Case
from tests import budget
from tests.process import ROOT


def test_every_script_is_run() -> None:
    """But traffic.py, which times nothing."""
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    assert sorted(budget.RUNS) == sorted(scripts - {"traffic"})


def test_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cases of 0.2 s; of 1 s and 10 s; a run of 60 s."""
    monkeypatch.setattr("sys.argv", [])
    cases = [Case({"seconds": 1.0}, [0]), Case({"seconds": 10.0}, [0])]
    assert budget.budget_of("collectives", [], [Case({}, [0])] * 2) == pytest.approx(0.4)
    assert budget.budget_of("calibrate", [], cases) == 11
    assert budget.budget_of("node_check", [], cases) == 60
    os.fstat(1)  # what swallows a script's first lines leaves stdout open


def test_a_row_says_whether_the_budget_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A case without samples was not timed and has no budget. 0.3 / 0.2 = 1.5."""
    monkeypatch.setattr("sys.argv", [])
    cases = [Case({}, [0], {"step": [[1.0]]}), Case({}, [0])]
    shown = [
        budget.show("collectives", "2", [], budget.Seconds(4.0, in_cases, 9.0), cases)
        for in_cases in (0.299, 0.31)
    ]
    assert shown == [True, False]
    first = capsys.readouterr().out.splitlines()[0]
    assert first.split() == ["collectives.py", "2", "1", "0.2", "4.0", "0.3", "9.0", "1.49"]


def test_the_start_and_the_end_are_no_part_of_the_cases() -> None:
    """A program that writes a line after 0.1 s and another after 0.2 s, and ends after 0.3 s."""
    program = "import time\nfor _ in range(2): time.sleep(.1); print(flush=True)\ntime.sleep(.1)"
    seconds = budget.run([sys.executable, "-c", program])
    assert seconds.start >= 0.1
    assert seconds.start + seconds.cases >= 0.2
    assert seconds.start + seconds.cases + seconds.end >= 0.3


SCRIPTS = sorted((ROOT / "benchmarks").glob("*.py"))
MAKE = re.compile(r"optim\.\w+\(.*with Benchmark\(", re.DOTALL)
MAKE_OPTIMIZERS = [path for path in SCRIPTS if MAKE.search(path.read_text())]


@pytest.mark.parametrize("script", MAKE_OPTIMIZERS, ids=lambda path: path.stem)
def test_the_first_optimizer_is_made_before_the_cases(script: Path) -> None:
    """It imports torch._dynamo, which takes seconds. torchvision imports it as well."""
    text = script.read_text()
    _, main = text.split("def main() -> int:")
    before_the_cases, _ = main.split("with Benchmark(")
    assert "import torchvision" in text or "torch.optim.SGD([" in before_the_cases
