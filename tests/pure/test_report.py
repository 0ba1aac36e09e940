"""The report: what a crash leaves, what is refused, what --resume takes over."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from common.report import SCHEMA, Case, Report, load

ENVIRONMENT = {"torch": "2.15.0", "world_size": 2, "devices": ["cpu"], "backend": "gloo"}


def report_at(path: Path, cases: int = 2, **environment: Any) -> Report:
    report = Report("ddp_sweep", ENVIRONMENT | environment, str(path))
    report.start()
    for n in range(cases):
        report.add(Case({"model": "m", "n": n}, [0, 1], {"step": [[0.1, 0.2], [0.3, 0.4]]}))
    return report


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a report.jsonl"


def test_what_is_written_is_read(path: Path) -> None:
    report = report_at(path)
    assert load(str(path)).status == "interrupted"
    report.finish("complete", gpus=[])
    loaded = load(str(path))
    assert (loaded.status, loaded.schema, loaded.end) == ("complete", SCHEMA, {"gpus": []})
    assert [case.key["n"] for case in loaded.cases] == [0, 1]
    assert loaded.cases[0].samples_s == {"step": [[0.1, 0.2], [0.3, 0.4]]}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert list(lines[0]) == ["schema", "benchmark", "argv", "started_at", "environment"]
    assert list(lines[-1]) == ["status", "finished_at", "gpus"]


def test_the_last_line_of_a_key_counts(path: Path) -> None:
    report = report_at(path, 1)
    report.add(Case({"n": 0, "model": "m"}, [0], check="failed: out of memory"))
    (case,) = load(str(path)).cases
    assert case.failed
    assert report.find(case.key) is None


def test_another_file_is_kept_as_bak(path: Path) -> None:
    report_at(path, 1)
    before = path.read_text()
    report_at(path, 2)
    assert Path(f"{path}.bak").read_text() == before
    assert len(load(str(path)).cases) == 2


def test_resume_takes_over_and_cuts_the_line_that_a_crash_left(path: Path) -> None:
    report_at(path, 2)
    with path.open("a") as file:
        file.write('{"key": {"model": ')
    assert len(load(str(path)).cases) == 2
    resumed = Report("ddp_sweep", ENVIRONMENT, str(path))
    resumed.start(resume=True)
    resumed.add(Case({"n": 9}, [0]))
    resumed.finish("complete")
    assert [case.key["n"] for case in load(str(path)).cases] == [0, 1, 9]


def test_a_status_in_the_middle_is_of_an_earlier_run(path: Path) -> None:
    report_at(path, 1).finish("failed")
    again = Report("ddp_sweep", ENVIRONMENT, str(path))
    again.start(resume=True)
    again.add(Case({"n": 5}, [0]))
    assert load(str(path)).status == "interrupted"


@pytest.mark.parametrize(
    ("benchmark", "environment", "words"),
    [
        ("collectives", {}, "has benchmark ddp_sweep, this run collectives"),
        ("ddp_sweep", {"torch": "2.11.0"}, "has torch 2.15.0, this run 2.11.0"),
        ("ddp_sweep", {"world_size": 4}, "has world_size 2, this run 4"),
    ],
)
def test_resume_refuses_another_run(
    path: Path, benchmark: str, environment: dict[str, Any], words: str
) -> None:
    report_at(path)
    with pytest.raises(ValueError, match=words):
        Report(benchmark, ENVIRONMENT | environment, str(path)).start(resume=True)
    assert len(load(str(path)).cases) == 2


HEAD = json.dumps(
    {"schema": SCHEMA, "benchmark": "x", "argv": [], "started_at": "", "environment": {}}
)
CASE = '{"key": {"n": 1}, "ranks": [0], "samples_s": {"step": %s}}'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty; a report is what a script writes"),
        ("not json\n", ":1 is no line of a report"),
        ("[1]\n", ":1 is no line of a report: the line: expected an object"),
        ('{"schema": "torchrun-bench/3"}\n', "another version of torchrun-bench"),
        (f'{{"schema": "{SCHEMA}"}}\n', "missing 2 required positional arguments: 'benchmark'"),
        (HEAD + '\n{"key": {}, "ranks": [], "extra": 1}\n', "unexpected keyword argument 'extra'"),
        (HEAD + '\n{"key": [], "ranks": []}\n', "key: expected dict, got '[]'"),
        (HEAD + "\n" + CASE % "[[1e400]]" + "\n", "expected lists of seconds"),
        (HEAD + "\n" + CASE % "[[-1]]" + "\n", "expected lists of seconds"),
        (HEAD + "\n" + CASE % "[[NaN]]" + "\n", "expected lists of seconds"),
        (HEAD + "\n" + CASE % '[["1"]]' + "\n", "expected lists of seconds"),
        (HEAD + "\n" + CASE % "[[1], [2]]" + "\n", "expected a list for each rank"),
        (HEAD + "\nhalf\n" + CASE % "[]" + "\n", ":2 is no line of a report"),
    ],
)
def test_what_is_no_report_is_one_clear_line(path: Path, text: str, words: str) -> None:
    path.write_text(text)
    with pytest.raises(ValueError, match="report") as caught:
        load(str(path))
    assert words in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_lists_of_one_length() -> None:
    with pytest.raises(ValueError, match=r"samples_s.step: expected lists of one length, got '1'"):
        Case({}, [0, 1], {"step": [[1.0, 2.0], [1.0]]})


def test_bytes_and_missing_files(path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        load(str(path))
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(ValueError, match="is UTF-16, not text in UTF-8"):
        load(str(path))


def test_what_is_no_report_is_not_replaced(path: Path) -> None:
    path.write_text("my thesis\n")
    with pytest.raises(ValueError, match="is no line of a report"):
        report_at(path)
    assert path.read_text() == "my thesis\n"
    assert not os.path.exists(f"{path}.bak")
