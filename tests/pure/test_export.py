"""analysis/export.py: the formats that it writes."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from harness.report import load
from tests.pure.reports import ROOT, case, estimate, run, write


def ddp(name: str, ranks: int, bucket: float | None = 25.0, **metrics: Any) -> dict[str, Any]:
    key = {"model": "resnet18", "dtype": "fp32", "ranks": ranks, "ddp": bucket is not None}
    key |= {"batch_size": 8, "backend": "gloo", "bucket_size_mb": bucket, "comm_hook": "none"}
    rows = [[0.1 + rank, 0.2 + rank] for rank in range(ranks)]
    about: dict[str, Any] = {"ranks": [*range(ranks)], "rounds": [2], "metrics": metrics}
    return case(name, key=key, samples_s={"step": rows}, **about)


@pytest.fixture
def report(tmp_path: Path) -> str:
    """A report of ddp_sweep.py. `no ddp` is last."""
    numbers = {"step_s": estimate(0.15, 0.1, 0.2), "samples_per_s": estimate(53.3)}
    failed = ddp("1M/4G", 4, step_s=estimate(9.0)) | {"check": "failed: out of memory"}
    cases = [ddp('1M/2G "quoted"\n', 2, step_s=estimate(1.15)), failed]
    return write(tmp_path / "ddp.jsonl", *cases, ddp("no ddp", 1, None, **numbers))


def export(*words: str) -> str:
    done = run("export.py", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_csv_and_github_action_benchmark(report: str) -> None:
    rows = list(csv.DictReader(io.StringIO(export(report, "--to", "csv"))))
    assert len(rows) == 3  # two metrics of one case and one of another; the failed case has none
    names = ("case", "key.model", "metric", "value", "low", "high", "n")
    expected = ["no ddp", "resnet18", "step_s", "0.15", "0.1", "0.2", "2"]
    assert [rows[1][name] for name in names] == expected
    # Entries that its extract.ts reads: name, unit, value, and optionally range and extra.
    rows = json.loads(export(report, "--to", "gha"))
    about = {"name": "ddp_sweep/no ddp/step_s", "unit": "s", "value": 0.15}
    assert rows[1] == about | {"range": "± 0.05", "extra": "2 iterations"}
    assert {row["unit"] for row in rows} == {"s"}
    rates = json.loads(export(report, "--to", "gha", "--metric", "samples_per_s"))
    assert [row["unit"] for row in rates] == ["1/s"]


def test_pytorchs_own_report(report: str, tmp_path: Path) -> None:
    """The format that its diff.py reads. load.py reads the same times from it."""
    back = tmp_path / "torch.json"
    back.write_text(export(str(Path(report).parent), "--to", "pytorch"))
    document = json.loads(back.read_text())
    (entry,) = document["benchmark_results"]
    assert (entry["model"], entry["batch_size"], document["bucket_size"]) == ("resnet18", 8, 25.0)
    assert [result["ranks"] for result in entry["result"]] == [[0], [0, 1]]
    assert entry["result"][1]["measurements"] == [0.1, 0.2, 1.1, 1.2]  # one rank after the other
    rows = list(csv.DictReader(io.StringIO(export(str(back), "--to", "csv"))))
    assert [float(row["value"]) for row in rows] == pytest.approx([0.15, 1.15])


def test_reports_that_do_not_fit_pytorchs_format(tmp_path: Path) -> None:
    """Two bucket sizes, interleaved settings, and only the times of the slowest rank."""
    turns = ddp("x", 2)
    turns["key"] |= {"bucket_size_mb": None, "settings": "1MB none, 25MB none"}
    slowest = {"bounded": True, "samples_s": {"step": [[1.1, 1.2]]}}
    for cases, told in (
        ([ddp("x", 2), ddp("y", 2, 1.0)], "--to pytorch can store only one setting, got {"),
        ([turns], "can store only one setting, got 1MB none, 25MB none of --interleave"),
        ([ddp("x", 2) | slowest], "requires the times of each rank"),
    ):
        path = write(tmp_path / "x.jsonl", *cases)
        assert told in run("export.py", path, "--to", "pytorch").stderr


def test_exported_numbers_are_those_of_the_report() -> None:
    """In both formats. tests/quotients.py checks how the report's numbers divide."""
    path = str(ROOT / "tests" / "golden" / "small.jsonl")
    metrics = {(case.table, case.name): case.metrics for case in load(path).cases}
    rows = list(csv.DictReader(io.StringIO(export(path, "--to", "csv"))))
    for row in rows:
        number = metrics[row["table"], row["case"]][row["metric"]]
        assert float(row["value"]) == getattr(number, "value", number)
    for metric in ("step_s", "samples_per_s", "exposed_s", "efficiency"):
        values = [float(row["value"]) for row in rows if row["metric"] == metric]
        assert values
        entries = json.loads(export(path, "--to", "gha", "--metric", metric))
        assert [entry["value"] for entry in entries] == values


def test_no_cell_of_csv_is_a_formula(tmp_path: Path) -> None:
    """A spreadsheet would execute it. Numbers stay, even negative ones in strings."""
    key = {"=1+1": "@SUM(1)", "size": "-2+3", "root": "-1", "shift": -4}
    about: dict[str, Any] = {"key": key, "table": "=HYPERLINK(1)"}
    about["metrics"] = {"late_s": estimate(-0.5, -1, 0.25)}
    path = write(tmp_path / "a.jsonl", case("+1+1", **about), hosts=["=cmd"])
    header, row = list(csv.reader(io.StringIO(export(path, "--to", "csv", "--metric", "late_s"))))
    cells = dict(zip(header, row, strict=True))
    assert cells["case"] == "'+1+1"
    assert cells["table"] == "'=HYPERLINK(1)"
    assert cells["key.=1+1"] == "'@SUM(1)"
    assert cells["key.size"] == "'-2+3"
    assert (cells["key.root"], cells["key.shift"], cells["low"]) == ("-1", "-4", "-1")
