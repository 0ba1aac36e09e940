"""harness/report.py: reports after a crash, refusals, and which cases --resume keeps."""

import json
import math
import os
import re
import resource
import tempfile
from pathlib import Path
from typing import Any

import pytest

from harness.report import SCHEMA, Case, Report, load, not_json, without_secrets

ENVIRONMENT = {"torch": "2.15.0", "world_size": 2, "devices": ["cpu"], "version": "a"}
ENVIRONMENT |= {"contents": {"common/": "0"}}
ENVIRONMENT |= {"variables": {}, "ranks": [{"rank": 0, "threads": 1}]}


def begin(path: Path, benchmark: str = "ddp_sweep", **environment: Any) -> Report:
    return Report(benchmark, ENVIRONMENT | environment, str(path))


def report_at(path: Path, cases: int = 2, **environment: Any) -> Report:
    report = begin(path, **environment)
    report.start()
    for n in range(cases):
        samples = {"step": [[0.1, 0.2], [0.3, 0.4]]}
        report.add(Case(key={"model": "m", "n": n}, ranks=[0, 1], samples_s=samples))
    return report


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a report.jsonl"


def test_a_report_is_read_as_it_was_written(path: Path) -> None:
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


def test_older_reports_are_never_erased(path: Path, tmp_path: Path) -> None:
    """A symbolic link is followed."""
    path.symlink_to(tmp_path / "disk")
    texts = []
    for count in (1, 2):
        report_at(path, count)
        texts.append(path.read_text())
    assert begin(path).start() == str(tmp_path / "disk.bak.1")
    assert [(tmp_path / f"disk{end}").read_text() for end in (".bak", ".bak.1")] == texts
    assert path.is_symlink()
    assert not load(str(path)).cases


def test_two_runs_cannot_write_one_report(path: Path, tmp_path: Path) -> None:
    first = report_at(path, 1)
    (tmp_path / "link").symlink_to(path)
    for resume in (False, True):
        with pytest.raises(ValueError, match="another run is writing"):
            begin(tmp_path / "link").start(resume)
    first.add(Case(key={"n": 7}, ranks=[0]))
    assert [case.key["n"] for case in load(str(path)).cases] == [0, 7]
    del first  # as at the end of its process
    begin(path).start(resume=True)


def test_only_regular_files(path: Path) -> None:
    os.mkfifo(path)
    for name in (path, path.parent, Path("/dev/null")):
        with pytest.raises(ValueError, match=f"{name} is not a regular file"):
            begin(name).start()


def test_a_read_only_report_is_noticed_at_the_start() -> None:
    uid = os.geteuid()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "r.jsonl")
        report_at(path)
        path.chmod(0o444)
        Path(folder).chmod(0o755)
        os.seteuid(uid or 65534)  # root may write anywhere
        try:
            with pytest.raises(PermissionError):
                begin(path).start()
        finally:
            os.seteuid(uid)
        assert os.listdir(folder) == ["r.jsonl"]


@pytest.mark.parametrize("text", ['{"schema": 3', "my thesis\n"])
def test_other_files_are_not_overwritten(path: Path, text: str) -> None:
    path.write_text(text)
    for resume in (False, True):
        with pytest.raises(ValueError, match="will not overwrite the file"):
            begin(path).start(resume)
    assert path.read_text() == text


@pytest.mark.parametrize("tail", [b'{"key": {"model": ', b'{"key": {}, "ranks": []}'])
def test_resume_keeps_cases_and_cuts_an_incomplete_line(path: Path, tail: bytes) -> None:
    """The status of the earlier run is no longer valid."""
    report_at(path, 2).finish("failed")
    with path.open("ab") as file:
        file.write(tail)
    resumed = begin(path)
    resumed.start(resume=True)
    resumed.add(Case(key={"n": 9}, ranks=[0]))
    assert [case.key["n"] for case in load(str(path)).cases] == [0, 1, 9]
    assert load(str(path)).status == "interrupted"


@pytest.mark.parametrize(
    ("benchmark", "environment", "words"),
    [
        ("collectives", {}, "has benchmark ddp_sweep, this run collectives"),
        ("ddp_sweep", {"nccl": "2.30"}, "has nccl unset, this run 2.30"),
        ("ddp_sweep", {"devices": ["H200", "B200"]}, "has devices cpu, this run H200, B200"),
        ("ddp_sweep", {"ranks": [{"rank": 0, "threads": 2}]}, "has threads (rank 0) 1, this run 2"),
        ("ddp_sweep", {"variables": {"NCCL_ALGO": "Ring"}}, "has NCCL_ALGO unset, this run Ring"),
        ("ddp_sweep", {"torch": "\33[2J\n#"}, r"torch 2.15.0, this run '\x1b[2J\n#'"),
        ("ddp_sweep", {"contents": {"common/": "1"}}, "has contents of common/ 0, this run 1"),
        (
            "ddp_sweep",
            {"other_variables": [{"ranks": [1, 2], "variables": {"FI_X": "1"}}]},
            "has FI_X (rank 1) unset, this run 1; ranks with other variables unset, this run 1, 2:",
        ),
        (  # a variable that rank 2 lacks now
            "ddp_sweep",
            {"other_variables": [{"ranks": [2], "variables": {"FI_X": None}}]},
            "has ranks with other variables unset, this run 2:",
        ),
        (
            "x",
            {"torch": "2", "nccl": "3", "python": "4"},
            "; and 1 more: the results are not comparable",
        ),
    ],
)
def test_resume_refuses_another_run(
    path: Path, benchmark: str, environment: dict[str, Any], words: str
) -> None:
    report_at(path)
    with pytest.raises(ValueError, match=re.escape(words)):
        begin(path, benchmark, **environment).start(resume=True)
    assert len(load(str(path)).cases) == 2


def test_secrets_are_compared_by_hash() -> None:
    """Reports contain no values of secrets, and different values have different hashes."""
    hidden = ("HF_TOKEN", "NCCL_KEY_X", "A_Secret", "TORCH_PASS", "NCCL_PASSWD", "FI_AUTH", "CREDS")
    told = without_secrets(dict.fromkeys(hidden, "hunter2") | {"NCCL_ALGO": "Ring"})
    assert told.pop("NCCL_ALGO") == "Ring"
    assert "hunter2" not in str(told)
    assert all(re.fullmatch(r"\(not shown; hash [0-9a-f]{6}\)", text) for text in told.values())
    assert len(set(told.values())) == len(hidden)  # the name is part of the hash
    for name in hidden:
        assert without_secrets({name: "hunter2"})[name] == told[name]
        assert without_secrets({name: "hunter3"})[name] != told[name]


def test_a_requeued_job_continues_on_other_hosts(path: Path) -> None:
    """With another job number. The report lists the hosts."""
    report_at(path, hosts=["node1"], variables={"SLURM_JOB_ID": "1", "TRITON_CACHE_DIR": "/1"})
    for host in ("node2", "node2", "node3"):
        variables = {"SLURM_JOB_ID": "2", "TRITON_CACHE_DIR": "/2"}
        resumed = begin(path, hosts=[host], variables=variables)
        resumed.start(resume=True)
        resumed.add(Case(key={"host": host}, ranks=[0]))
    told = [(line["hosts"], line["cases_before"]) for line in load(str(path)).resumed]
    assert told == [(["node2"], 2), (["node2"], 3), (["node3"], 3)]
    first, second = resumed.remarks
    assert re.fullmatch("2 cases were measured earlier, 20.* UTC on node1, by .*", first)
    assert re.fullmatch("1 case was measured earlier, 20.* UTC on node2, by .*", second)


def test_the_load_belongs_to_the_part_that_measured(path: Path) -> None:
    """Part 0 ends normally, part 1 is interrupted, and a later run measures nothing."""
    first = report_at(path, 1)
    first.finish("failed", others=[[1.9, 2]])
    first.files[-1].close()
    for n in (1, 2):
        resumed = begin(path)
        resumed.start(resume=True)
        resumed.add(Case(key={"n": n}, ranks=[0]))
        if n == 2:
            resumed.finish("complete", others=[[0.1, 2]])
        resumed.files[-1].close()
    again = begin(path)
    again.start(resume=True)
    again.finish("complete", answer=["it measured nothing"])
    loaded = load(str(path))
    assert loaded.others == {0: [[1.9, 2]], 2: [[0.1, 2]]}
    assert loaded.end == {"answer": ["it measured nothing"]}


def test_each_case_belongs_to_a_part_of_a_resumed_report(path: Path) -> None:
    """A part has its start time, hosts and arguments. A run that measures nothing adds no part."""
    first = begin(path, hosts=["node1"])
    first.argv = ["x.py", "--iters", "3", "--json", "r.jsonl"]
    first.started_at = "2026-11-28T03:12:05+00:00"
    first.start()
    first.add(Case(key={"n": 0}, ranks=[0]))
    first.files[-1].close()
    begin(path, hosts=["node2"]).start(resume=True)
    resumed = begin(path, hosts=["node2", "node3", "node4"])
    resumed.argv = ["x.py", "--iters", "50", "--json", "r.jsonl", "--resume"]
    resumed.start(resume=True)
    assert resumed.remarks == [
        "1 case was measured earlier, 2026-11-28 03:12 UTC on node1, "
        "by x.py --iters 3 --json r.jsonl"
    ]
    resumed.add(Case(key={"n": 1}, ranks=[0]))
    assert [resumed.is_earlier(case) for case in resumed.cases] == [True, False]
    lines = path.read_text().splitlines()
    assert len(lines) == 4
    assert '"part"' not in lines[1] + lines[3]
    resumed.files[-1].close()
    done = load(str(path))
    assert [case.part for case in done.cases] == [0, 1]
    assert done.part_entry(0, "argv") == first.argv
    assert done.part_entry(1, "argv") == resumed.argv
    assert done.when_and_where(0) == "2026-11-28 03:12 UTC on node1"
    assert done.when_and_where(1).endswith(" UTC on node2, node3 and 1 more")
    again = begin(path, hosts=["node2"])
    again.start(resume=True)
    again.add(Case(key={"n": 0}, ranks=[0]))  # it replaces the earlier one
    assert [case.part for case in load(str(path)).cases] == [1, 2]


def test_a_disk_that_is_full_at_the_first_line(path: Path) -> None:
    """An older report is not moved. Without one the file is empty."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for cases in (0, 2):
        if cases:
            report_at(path, cases)
        content = path.read_bytes() if cases else b""
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        try:
            with pytest.raises(OSError, match="nothing was measured, and an existing"):
                begin(path).start()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert path.read_bytes() == content
        assert os.listdir(path.parent) == [path.name]


HEAD = json.dumps({"schema": SCHEMA, "benchmark": "x", "argv": [], "environment": {}})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (HEAD, "is empty or cut short; expected a report written by a script"),
        ('{"schema": "torchrun-bench/2"}\n', f"expected schema {SCHEMA}, got torchrun-bench/2"),
        (f'{{"schema": "{SCHEMA}"}}\n', "missing 2 required positional arguments: 'benchmark'"),
        (f"{HEAD}\n{HEAD}\n", ":2 is not a line of a report: another report starts here"),
        (HEAD + '\n{"key": {}}\n', "missing 1 required keyword-only argument: 'ranks'"),
        (HEAD + '\nhalf\n{"key": {}, "ranks": []}\n', ":2 is not a line of a report"),
    ],
)
def test_damaged_reports_are_refused_in_one_line(path: Path, text: str, words: str) -> None:
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
        load(str(path))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_values_that_are_not_json_are_named() -> None:
    assert not_json({"a": 1, "b": None}) is None
    assert not_json({"a": 1, "b": {2}}) == "metric 'b' cannot be written as JSON: '{2}'"
    assert not_json({"x_s": math.nan}) == "metric 'x_s' cannot be written as JSON: 'nan'"
