"""What tests/budget.py runs, and the budgets that it counts."""

import pytest

from common.report import Case
from tests import budget
from tests.process import ROOT


def test_every_script_is_run() -> None:
    """But traffic.py, which times nothing."""
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    assert sorted(budget.RUNS) == sorted(scripts - {"traffic"})


def test_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cases of 0.3 s; of 1 s and 10 s; a run of 60 s."""
    monkeypatch.setattr("sys.argv", [])
    cases = [Case({"seconds": 1.0}, [0]), Case({"seconds": 10.0}, [0])]
    assert budget.budget_of("collectives", [], [Case({}, [0])] * 2) == pytest.approx(0.6)
    assert budget.budget_of("calibrate", [], cases) == 11
    assert budget.budget_of("node_check", [], cases) == 60


def test_a_row_says_whether_the_budget_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A case without samples was not timed and has no budget. 0.45 / 0.3 = 1.5."""
    monkeypatch.setattr("sys.argv", [])
    cases = [Case({}, [0], {"step": [[1.0]]}), Case({}, [0])]
    shown = [
        budget.show("collectives", "2", [], budget.Seconds(4.0, rest), cases)
        for rest in (0.449, 0.46)
    ]
    assert shown == [True, False]
    first = capsys.readouterr().out.splitlines()[0]
    assert first.split() == ["collectives.py", "2", "1", "0.3", "4.0", "0.4", "1.50"]
