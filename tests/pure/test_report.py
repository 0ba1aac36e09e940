"""The report: what a crash leaves, what is refused, what --resume takes over."""

import contextlib
import io
import json
import math
import os
import re
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.report import SCHEMA, Case, Report, load, not_json

ENVIRONMENT = {"torch": "2.15.0", "world_size": 2, "devices": ["cpu"], "backend": "gloo"}


RANK = {"rank": 0, "device": "cpu", "cores": 2, "threads": 1}


def report_at(path: Path, cases: int = 2, **environment: Any) -> Report:
    report = Report("ddp_sweep", ENVIRONMENT | environment, str(path))
    report.start()
    for n in range(cases):
        report.add(
            Case(
                key={"model": "m", "n": n},
                ranks=[0, 1],
                samples_s={"step": [[0.1, 0.2], [0.3, 0.4]]},
            )
        )
    return report


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a report.jsonl"


def test_a_report_on_a_stream() -> None:
    """`-` is no file: nothing is synced, locked or moved."""
    stream = io.BytesIO()
    report = Report("ddp_sweep", ENVIRONMENT, "-", files=[stream])
    assert report.start() is None
    report.add(Case(key={"model": "m"}, ranks=[0]))
    report.finish("complete")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [lines[0]["schema"], lines[1]["key"], lines[2]["status"]] == [
        SCHEMA,
        {"model": "m"},
        "complete",
    ]


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
    report.add(Case(key={"n": 0, "model": "m"}, ranks=[0], check="failed: out of memory"))
    (case,) = load(str(path)).cases
    assert case.failed
    assert report.find(case.key) is None


def test_older_reports_are_never_erased(path: Path) -> None:
    texts = []
    for count in (1, 2, 3):
        report_at(path, count)
        texts.append(path.read_text())
    report = Report("ddp_sweep", ENVIRONMENT, str(path))
    assert report.start() == f"{path}.bak.2"
    kept = [Path(f"{path}{ending}").read_text() for ending in (".bak", ".bak.1", ".bak.2")]
    assert kept == texts
    assert not load(str(path)).cases


def test_a_restart_goes_on_with_the_report_of_the_attempt_before(path: Path) -> None:
    report_at(path, 2)
    again = Report("ddp_sweep", ENVIRONMENT, str(path))
    assert again.start(since=time.time() - 60) is None
    assert len(again.cases) == 2
    del again
    later = Report("ddp_sweep", ENVIRONMENT, str(path))
    assert later.start(since=time.time() + 60) == f"{path}.bak"  # of an earlier run
    assert not later.cases


def test_a_link_is_followed(path: Path, tmp_path: Path) -> None:
    disk = tmp_path / "shared"
    disk.mkdir()
    path.symlink_to(disk / "r.jsonl")
    for count in (1, 2):
        report_at(path, count)
        assert path.is_symlink()
        assert len(load(str(disk / "r.jsonl")).cases) == count
    assert len(load(str(disk / "r.jsonl.bak")).cases) == 1


@pytest.mark.parametrize("resume", [False, True])
def test_two_runs_cannot_write_one_report(path: Path, tmp_path: Path, resume: bool) -> None:
    first = report_at(path, 1)
    link = tmp_path / "link"
    link.symlink_to(path)
    for name in (path, link):
        with pytest.raises(ValueError, match="another run is writing"):
            Report("ddp_sweep", ENVIRONMENT, str(name)).start(resume)
    first.add(Case(key={"n": 7}, ranks=[0]))
    assert [case.key["n"] for case in load(str(path)).cases] == [0, 7]
    assert not os.path.exists(f"{path}.bak")
    del first  # as where its process ends
    Report("ddp_sweep", ENVIRONMENT, str(path)).start(resume)


def test_only_regular_files(path: Path) -> None:
    os.mkfifo(path)
    for name in (str(path), str(path.parent), "/dev/null", "/dev/full"):
        with pytest.raises(ValueError, match=f"{name} is no regular file"):
            Report("ddp_sweep", ENVIRONMENT, name).start()


@contextlib.contextmanager
def as_a_user() -> Iterator[None]:
    """Without root's rights to write everywhere."""
    uid = os.geteuid()
    os.seteuid(uid or 65534)
    try:
        yield
    finally:
        os.seteuid(uid)


@pytest.mark.parametrize("resume", [False, True])
def test_a_read_only_report_is_said_at_once(resume: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "r.jsonl")
        report_at(path)
        path.chmod(0o444)
        Path(folder).chmod(0o755)
        with as_a_user(), pytest.raises(PermissionError):
            Report("ddp_sweep", ENVIRONMENT, str(path)).start(resume)
        assert os.listdir(folder) == ["r.jsonl"]


@pytest.mark.parametrize("text", ['{"schema": "mine/1"}\n', '{"schema": 3', "my thesis"])
def test_a_line_that_is_not_ours_stays(path: Path, text: str) -> None:
    path.write_text(text)
    for resume in (False, True):
        with pytest.raises(ValueError, match="it would replace what is there"):
            Report("ddp_sweep", ENVIRONMENT, str(path)).start(resume)
    assert path.read_text() == text


@pytest.mark.parametrize("tail", [b"\n", b'{"key": {"model": ', b'{"key": {}, "ranks": []}'])
def test_resume_takes_over_and_cuts_the_line_that_a_crash_left(path: Path, tail: bytes) -> None:
    report_at(path, 2)
    with path.open("ab") as file:
        file.write(tail)
    assert len(load(str(path)).cases) == 2
    resumed = Report("ddp_sweep", ENVIRONMENT, str(path))
    resumed.start(resume=True)
    resumed.add(Case(key={"n": 9}, ranks=[0]))
    resumed.finish("complete")
    assert [case.key["n"] for case in load(str(path)).cases] == [0, 1, 9]


def test_a_status_in_the_middle_is_of_an_earlier_run(path: Path) -> None:
    report_at(path, 1).finish("failed")
    again = Report("ddp_sweep", ENVIRONMENT, str(path))
    again.start(resume=True)
    again.add(Case(key={"n": 5}, ranks=[0]))
    assert load(str(path)).status == "interrupted"


@pytest.mark.parametrize(
    ("benchmark", "environment", "words"),
    [
        ("collectives", {}, "has benchmark ddp_sweep, this run collectives"),
        ("ddp_sweep", {"torch": "2.11.0"}, "has torch 2.15.0, this run 2.11.0"),
        ("ddp_sweep", {"world_size": 4}, "has world_size 2, this run 4"),
        ("ddp_sweep", {"version": "b"}, "has version a, this run b"),
        ("ddp_sweep", {"nccl": "2.30"}, "has nccl unset, this run 2.30"),
        ("ddp_sweep", {"devices": ["H200", "B200"]}, "has devices cpu, this run H200, B200"),
        ("ddp_sweep", {"ranks": [RANK | {"threads": 2}]}, "has threads (rank 0) 1, this run 2"),
        ("ddp_sweep", {"ranks": [RANK | {"cores": 64}]}, "has cores (rank 0) 2, this run 64"),
        ("ddp_sweep", {"variables": {"NCCL_ALGO": "Ring"}}, "has NCCL_ALGO unset, this run Ring"),
        ("ddp_sweep", {"version": "\33[2J\n#"}, r"version a, this run '\x1b[2J\n#'"),
        ("x", {"torch": "2", "nccl": "3", "python": "4"}, "; and 1 more: numbers that do not"),
    ],
)
def test_resume_refuses_another_run(
    path: Path, benchmark: str, environment: dict[str, Any], words: str
) -> None:
    report_at(path, version="a", ranks=[RANK], variables={})
    environment = {"version": "a", "ranks": [RANK], "variables": {}} | environment
    with pytest.raises(ValueError, match=re.escape(words)):
        Report(benchmark, ENVIRONMENT | environment, str(path)).start(resume=True)
    assert len(load(str(path)).cases) == 2


@pytest.mark.parametrize(
    "name",
    [
        "SLURM_JOB_ID",
        "TORCHELASTIC_RESTART_COUNT",
        "CUDA_VISIBLE_DEVICES",
        "TRITON_CACHE_DIR",
        "CUDA_MPS_PIPE_DIRECTORY",
    ],
)
def test_a_requeued_job_goes_on_whatever_its_number_is(path: Path, name: str) -> None:
    report_at(path, variables={name: "1"})
    Report("ddp_sweep", ENVIRONMENT | {"variables": {name: "2"}}, str(path)).start(resume=True)


def test_other_hosts_stand_in_the_report(path: Path) -> None:
    report_at(path, hosts=["node1"])
    for host in ("node2", "node2", "node3"):
        resumed = Report("ddp_sweep", ENVIRONMENT | {"hosts": [host]}, str(path))
        resumed.start(resume=True)
        resumed.add(Case(key={"host": host}, ranks=[0]))
    assert resumed.remarks == ["3 cases were measured on node2, not on node3"]
    resumed.finish("complete")
    read = load(str(path))
    assert [(line["hosts"], line["cases_before"]) for line in read.resumed] == [
        (["node2"], 2),
        (["node3"], 3),
    ]
    assert (len(read.cases), read.status) == (4, "complete")


@contextlib.contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file can grow beyond `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [0, 10, 100])
def test_a_disk_that_is_full_at_the_first_line(path: Path, size: int) -> None:
    """An older report stays where it is; without one the file is empty, and the next run takes
    it."""
    for cases in (0, 2):
        if cases:
            report_at(path, cases)
        content = path.read_bytes() if cases else b""
        report = Report("ddp_sweep", ENVIRONMENT, str(path))
        with full_disk(size), pytest.raises(OSError, match="nothing was measured, and what was"):
            report.start()
        del report
        assert path.read_bytes() == content
        assert os.listdir(path.parent) == [path.name]


HEAD = json.dumps({"schema": SCHEMA, "benchmark": "x", "argv": [], "environment": {}})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty or cut short; a report is what a script writes"),
        (HEAD, "is empty or cut short; a report is what a script writes"),
        ("not json\n", ":1 is no line of a report"),
        ("[1]\n", ":1 is no line of a report"),
        ('{"schema": "torchrun-bench/2"}\n', "its schema is torchrun-bench/2; this version reads"),
        (f'{{"schema": "{SCHEMA}"}}\n', "missing 2 required positional arguments: 'benchmark'"),
        (f"{HEAD}\n{HEAD}\n", ":2 is no line of a report: another report begins here"),
        (HEAD + '\n{"key": {}}\n', "missing 1 required keyword-only argument: 'ranks'"),
        (HEAD + "\n\xff\n", ":2 is no line of a report"),
        (HEAD + '\nhalf\n{"key": {}, "ranks": []}\n', ":2 is no line of a report"),
    ],
)
def test_what_is_no_report_is_one_clear_line(path: Path, text: str, words: str) -> None:
    path.write_text(text)
    with pytest.raises(ValueError, match="report") as caught:
        load(str(path))
    assert words in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_written_is_named() -> None:
    assert not_json("key", {"a": 1, "b": None}) is None
    assert not_json("key", {"a": 1, "b": {2}}) == "key 'b' is not JSON: '{2}'"
    assert not_json("metric", {"x_s": math.nan}) == "metric 'x_s' is not JSON: 'nan'"
