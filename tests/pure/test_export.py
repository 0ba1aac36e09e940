"""analysis/export.py: each format as its reader wants it."""

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.pure.reports import case, estimate, run, write


@pytest.fixture
def report(tmp_path: Path) -> str:
    def ddp(name: str, ranks: int, **metrics: Any) -> dict[str, Any]:
        is_wrapped = ranks > 1
        key = {"model": "resnet18", "dtype": "fp32", "ranks": ranks, "ddp": is_wrapped}
        key |= {"batch_size": 8, "backend": "gloo", "bucket_size_mb": 25.0 if is_wrapped else None}
        rows = [[0.1 + rank, 0.2 + rank] for rank in range(ranks)]
        about = {"ranks": list(range(len(rows))), "rounds": [2]}
        return case(name, key=key, samples_s={"step": rows}, metrics=metrics, **about)

    first = {"step_s": estimate(0.15, 0.1, 0.2), "samples_per_s": estimate(53.3)}
    cases = ddp("no ddp", 1, **first), ddp('1M/2G "quoted"\n', 2, step_s=estimate(1.15))
    failed = ddp("1M/4G", 4, step_s=estimate(9.0)) | {"check": "failed: out of memory"}
    return write(tmp_path / "ddp.jsonl", *cases, failed)


def export(*words: str) -> str:
    done = run("export.py", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_csv(report: str) -> None:
    rows = list(csv.DictReader(io.StringIO(export(report, "--to", "csv"))))
    assert len(rows) == 3  # two metrics and one; a failed case has none
    row = rows[0]
    assert row["case"] == "no ddp"
    assert row["key.model"] == "resnet18"
    assert [row[n] for n in ("metric", "value", "low", "high", "n")] == [
        *("step_s", "0.15", "0.1", "0.2", "2")
    ]


def test_a_csv_cell_that_a_spreadsheet_would_run_begins_with_a_quote(tmp_path: Path) -> None:
    texts = ['=HYPERLINK("http://x")', "@SUM(1)", "+1+1", "-2+3", "\t=1", "-1", "+2.5", "a=b", "-"]
    cases = [case(text, key={"setting": text, "model": "=m"}) for text in texts]
    path = write(tmp_path / "=a.jsonl", *cases, environment={"hosts": ["=h"], "torch": "=t"})
    rows = list(csv.DictReader(io.StringIO(export(path, "--to", "csv"))))
    quoted = ["'" + text for text in texts[:5]] + ["-1", "+2.5", "a=b", "'-"]
    assert [row["key.setting"] for row in rows] == quoted
    assert {row[name] for name in ("key.model", "torch", "host") for row in rows} == {
        *("'=m", "'=t", "'=h")
    }
    for row in rows:
        cells = [cell for cell in row.values() if cell.lstrip().startswith(("=", "+", "-", "@"))]
        assert all(re.fullmatch(r"[+-][\d.]+", cell) for cell in cells)


def test_github_action_benchmark(report: str) -> None:
    """Its extract.ts: name, unit and value, and perhaps range and extra, all in one direction."""
    rows = json.loads(export(report, "--to", "gha"))
    assert rows[0] == {
        "name": "ddp_sweep/no ddp/step_s",
        "unit": "s",
        "value": 0.15,
        "range": "± 0.05",
        "extra": "2 iterations",
    }
    assert {row["unit"] for row in rows} == {"s"}
    rates = json.loads(export(report, "--to", "gha", "--metric", "samples_per_s"))
    assert [row["unit"] for row in rates] == ["1/s"]


def test_pytorchs_own_report(report: str, tmp_path: Path) -> None:
    """What its diff.py reads; load.py reads it back to the same times."""
    text = export(report, "--to", "pytorch")
    document = json.loads(text)
    (entry,) = document["benchmark_results"]
    assert (entry["model"], entry["batch_size"]) == ("resnet18", 8)
    assert [len(result["ranks"]) for result in entry["result"]] == [1, 2]
    assert entry["result"][1]["measurements"] == [0.1, 0.2, 1.1, 1.2]  # rank after rank
    assert document["bucket_size"] == 25.0
    back = tmp_path / "torch.json"
    back.write_text(text)
    rows = list(csv.DictReader(io.StringIO(export(str(back), "--to", "csv"))))
    assert [float(row["value"]) for row in rows] == pytest.approx([0.15, 1.15])


def test_refusals(report: str, tmp_path: Path) -> None:
    other = write(tmp_path / "other.jsonl", case("no ddp"), benchmark="collectives")
    for words, message in (
        ([report, "--to", "xml"], "invalid choice: 'xml'"),
        ([other, "--to", "pytorch"], "takes one report, of ddp_sweep.py"),
        ([report, other, "--to", "pytorch"], "takes one report, of ddp_sweep.py"),
        ([report, "--to", "csv", "--metric", "step"], "there are samples_per_s, step_s"),
    ):
        done = run("export.py", *words)
        assert (done.returncode, done.stdout) == (2, ""), words
        assert message in done.stderr
        assert done.stderr.count("\n") == 1
