"""compare.py --history: changes over time, and the newest run against its own past."""

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import load_script

from common.history import change_points, find_all, load_all, parse_time, split, study
from common.runs import Run, RunCase, load_run

simulation: Any = importlib.import_module("unit.simulate_compare")
ENVIRONMENT: dict[str, Any] = {"torch": "2.14", "devices": ["H100"], "world_size": 8}


def history(times: dict[str, list[float | None]], **changes: Any) -> list[Run]:
    """A run for each place of the lists, a day apart; None: the case has failed there."""
    found = []
    for day in range(len(next(iter(times.values())))):
        cases = {}
        for name, values in times.items():
            value = values[day]
            check = "failed: out of memory" if value is None else "passed"
            cases[name] = RunCase({"model": name}, name, "samples", value, None, check)
        at = f"2025-01-{day + 1:02}T00:00:00+00:00"
        run = Run(f"r{day}", "ddp_sweep", "complete", ENVIRONMENT, at, cases, f"r{day}")
        found.append(replace(run, **changes))
    return found


def noisy(levels: list[float], seed: int = 0, scatter: float = 0.005) -> list[float | None]:
    rng = np.random.default_rng(seed)
    return [level * float(np.exp(rng.normal(0, scatter))) for level in levels]


def test_a_change_has_a_time_a_size_and_what_changed_with_it() -> None:
    times = {"a": noisy([1.0] * 8 + [1.1] * 7), "b": noisy([1.0] * 15, seed=1)}
    runs = [
        replace(run, environment=ENVIRONMENT | {"torch": "2.15" if day >= 8 else "2.14"})
        for day, run in enumerate(history(times))
    ]
    a, b = study(runs, [], 0.02).series
    (change,) = a.changes
    assert change.when == ("2025-01-08T00:00:00+00:00", "2025-01-09T00:00:00+00:00")
    assert change.ratio == pytest.approx(1.1, rel=0.01)
    assert change.ci95 is not None
    assert 1.08 < change.ci95[0] < change.ratio < change.ci95[1] < 1.12
    (field,) = change.fields
    assert (field.field, field.base, field.test) == ("torch", ("2.14",), ("2.15",))
    assert b.changes == []
    for series in (a, b):
        assert series.newest is not None
        assert series.newest.verdict == "as before"
    assert a.newest is not None
    assert a.newest.past == 6  # those since the change


def test_two_changes_and_a_small_one() -> None:
    found = study(history({"a": noisy([1.0] * 12 + [1.2] * 12 + [0.9] * 12)}), [], 0.02).series[0]
    assert [round(c.ratio, 1) for c in found.changes] == [1.2, 0.8]  # 0.9 / 1.2 = 0.75
    small = history({"a": noisy([1.0] * 20 + [1.015] * 20, scatter=0.001)})
    assert study(small, [], 0.02).series[0].changes == []
    assert len(study(small, [], 0.01).series[0].changes) == 1


def test_an_outlier_is_no_change() -> None:
    levels = [1.0] * 20
    levels[9] = 2.0
    (found,) = study(history({"a": noisy(levels)}), [], 0.02).series
    assert found.changes == []


def test_split_by_hand() -> None:
    """Of the 70 ways to choose 4 of 8 two are as clear as this; other places hardly ever are."""
    values = np.array([1.0, 2, 3, 4, 11, 12, 13, 14])
    place, p = split(values, np.random.default_rng(0))
    assert place == 4
    assert 2 / 70 * 0.6 < p < 2 / 70 * 1.6
    assert split(values[:3], np.random.default_rng(0)) == (0, 1.0)
    assert change_points(values, 0.05, np.random.default_rng(0)) == [4]
    assert change_points(values, 0.01, np.random.default_rng(0)) == []
    assert split(np.ones(10), np.random.default_rng(0))[1] == 1.0


@pytest.mark.parametrize(
    ("last", "verdict"),
    [(1.1, "slower"), (0.9, "faster"), (1.0, "as before"), (1.008, "as before")],
)
def test_the_newest_run(last: float, verdict: str) -> None:
    (found,) = study(history({"a": noisy([1.0] * 9 + [last])}), [], 0.02).series
    assert found.newest is not None
    assert found.newest.verdict == verdict
    assert found.newest.past == 9
    low, high = found.newest.expected or (0, 0)
    assert 0.97 < low < 1 < high < 1.03


def test_prediction_interval_by_hand() -> None:
    """Logs -0.01, 0, 0.01: s = 0.01, t(2) = 4.3027, times sqrt(1 + 1/3)."""
    runs = history({"a": [float(np.exp(x)) for x in (-0.01, 0.0, 0.01, 0.1)]})
    newest = study(runs, [], 0.02).series[0].newest
    assert newest is not None
    half = 4.302653 * 0.01 * np.sqrt(4 / 3)
    assert newest.expected == pytest.approx((np.exp(-half), np.exp(half)))
    assert newest.verdict == "slower"


def test_too_few_and_failed_runs() -> None:
    times: dict[str, list[float | None]] = {"a": [1.0, 1.0, 5.0], "b": [1.0, 1.0, None]}
    a, b = study(history(times), [], 0.02).series
    assert a.newest is not None
    assert a.newest.verdict == "undecided"
    assert b.newest is None
    assert b.missing == "failed: out of memory"
    runs = history({"a": [1.0, 1.0], "b": [1.0, 1.0]})
    runs[1].cases.pop("b")
    assert [s.missing for s in study(runs, [], 0.02).series] == ["", "not measured"]


def test_another_machine_is_another_history() -> None:
    slow = history({"a": noisy([2.0] * 10)}, environment=ENVIRONMENT | {"devices": ["A100"]})
    fast = history({"a": noisy([1.0] * 10)})
    mixed = [run for pair in zip(fast, slow, strict=True) for run in pair]
    found = study(mixed, [], 0.02).series
    assert [s.machine["devices"] for s in found] == [["H100"], ["A100"]]
    assert [s.changes for s in found] == [[], []]


def test_rates_on_simulated_histories() -> None:
    """At most 5 % of unchanged series have a change; a clear one is found in most."""
    rng = np.random.default_rng(3)
    counts = []
    for step in (1.0, 1.05):
        found = 0
        for _ in range(15):
            times = simulation.simulate(simulation.NORMAL | {"scatter": 0.01}, 4, 20, rng)
            times[:, 10:] *= step
            runs = [
                replace(run, started_at=f"2025-01-{day + 1:02}")
                for day, run in enumerate(simulation.as_runs(times))
            ]
            found += sum(bool(s.changes) for s in study(runs, [], 0.02).series)
        counts.append(found / 60)
    assert counts[0] <= 0.05
    assert counts[1] >= 0.9


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1970-01-02T00:00:00+00:00", 86400),
        ("1970-01-02T00:00:00Z", 86400),
        ("1970-01-02T01:00:00+01:00", 86400),
        ("1970-01-02", 86400),
        ("yesterday", None),
        ("", None),
    ],
)
def test_parse_time(text: str, seconds: float | None) -> None:
    assert parse_time(text) == seconds


# -- the script ------------------------------------------------------------------------------------


def write_folder(folder: Path, days: int = 12) -> None:
    """`a` is 20 % slower from the seventh day on, with another torch; and files of other kinds."""
    (folder / "sub").mkdir()
    for day in range(days):
        slow = day >= 6
        spread = [1.0, 0.99, 1.01, 1.0, 1.002 + day / 1000]
        cases = [
            {
                "key": {"model": name},
                "label": name,
                "ranks": [0],
                "samples_s": [[x * (1.2 if slow and name == "a" else 1.0) for x in spread]],
                "stop": {},
                "metrics": {},
                "check": "passed",
            }
            for name in ("a", "b")
        ]
        report = {
            "schema": "torchrun-bench/1",
            "benchmark": "ddp_sweep",
            "status": "complete",
            "argv": [],
            # the names are in another order than the times
            "started_at": f"2025-01-{day + 1:02}T00:00:00+00:00",
            "environment": ENVIRONMENT | {"torch": "2.15" if slow else "2.14"},
            "cases": cases,
        }
        place = folder / ("sub" if day % 2 else ".")
        (place / f"r{99 - day}.json").write_text(json.dumps(report))
    (folder / "copy.json").write_text(json.dumps(report) + " ")
    (folder / "cut.json").write_text('{"schema": ')
    (folder / "notes.txt").write_text("not a report")
    (folder / "undated.json").write_text(json.dumps(report | {"started_at": "once"}))
    (folder / "newer.json").write_text(json.dumps(report | {"schema": "torchrun-bench/7"}))


def main(*words: str) -> int:
    script: Any = load_script("compare")
    status: int = script.main(script.parse_args(list(words)))
    return status


def test_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(tmp_path)
    runs, unread = load_all(find_all(str(tmp_path))[0], load_run)
    assert [run.started_at[8:10] for run in runs] == [f"{day + 1:02}" for day in range(12)]
    assert len(unread) == 4
    assert main("--history", str(tmp_path)) == 0
    out = capsys.readouterr().out
    assert "2025-01-07T00:00:00+00:00  a     1.20x slower" in out
    assert "torch 2.14 -> 2.15" in out
    assert "# 1 change; newest runs: 2 as before" in out
    assert "# not used (4):" in out
    for name, why in (
        ("copy", "which holds the same run as"),
        ("cut", "which is not JSON"),
        ("undated", "which does not say when it was started"),
        ("newer", "update torchrun-bench"),
    ):
        assert any(f"{name}.json" in line and why in line for line in out.splitlines()) or (
            name == "copy" and why in out  # of two copies the first in the folder counts
        )
    assert main("--history", str(tmp_path), "--format", "markdown") == 0
    assert "| a | 1.20x slower |" in capsys.readouterr().out
    assert main("--history", str(tmp_path), "--format", "json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [len(series["runs"]) for series in found["series"]] == [12, 12]
    (change,) = found["series"][0]["changes"]
    assert change["at"] == "2025-01-07T00:00:00+00:00"
    assert change["fields"] == [{"field": "torch", "before": "2.14", "after": "2.15"}]
    assert found["series"][0]["newest"]["verdict"] == "as before"


def test_fail_on_slower(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(tmp_path, days=7)  # the newest run is the first slow one
    assert main("--history", str(tmp_path)) == 0
    assert main("--history", str(tmp_path), "--fail-on", "slower") == 1
    assert "1 slower, 1 as before" in capsys.readouterr().out
    assert main("--history", str(tmp_path), "--fail-on", "faster") == 0
