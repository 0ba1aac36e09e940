"""The report: what a crash leaves, what is refused, what --resume takes over."""

import contextlib
import io
import json
import math
import os
import re
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
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


def test_resume_takes_over_and_cuts_the_line_that_a_crash_left(path: Path) -> None:
    report_at(path, 2)
    with path.open("a") as file:
        file.write('{"key": {"model": ')
    assert len(load(str(path)).cases) == 2
    resumed = Report("ddp_sweep", ENVIRONMENT, str(path))
    resumed.start(resume=True)
    resumed.add(Case(key={"n": 9}, ranks=[0]))
    resumed.finish("complete")
    assert [case.key["n"] for case in load(str(path)).cases] == [0, 1, 9]


@pytest.mark.parametrize("cases", [0, 2])
def test_a_last_line_without_its_newline_counts(path: Path, cases: int) -> None:
    report_at(path, cases)
    whole = path.read_bytes()
    path.write_bytes(whole.rstrip())
    assert len(load(str(path)).cases) == cases
    resumed = Report("ddp_sweep", ENVIRONMENT, str(path))
    resumed.start(resume=True)
    assert path.read_bytes() == whole
    resumed.add(Case(key={"n": 9}, ranks=[0]))
    assert len(load(str(path)).cases) == cases + 1


@pytest.mark.parametrize("text", ["{ 1", '{"schema": 3', '{"schema": "mine/1"', "my thesis"])
def test_a_line_that_is_not_ours_stays(path: Path, text: str) -> None:
    path.write_text(text)
    for resume in (False, True):
        with pytest.raises(ValueError, match="it would replace what is there"):
            Report("ddp_sweep", ENVIRONMENT, str(path)).start(resume)
    assert path.read_text() == text


@pytest.mark.parametrize("tail", [b"\n", b"\r\n", b"  ", b"\0\0\0", b"[" * 100_000])
def test_a_tail_that_is_no_line_is_no_damage(path: Path, tail: bytes) -> None:
    report_at(path, 2)
    with path.open("ab") as file:
        file.write(tail)
    assert len(load(str(path)).cases) == 2
    resumed = Report("ddp_sweep", ENVIRONMENT, str(path))
    resumed.start(resume=True)
    resumed.add(Case(key={"n": 9}, ranks=[0]))
    assert len(load(str(path)).cases) == 3


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


def test_cases_that_were_not_checked_are_told(path: Path) -> None:
    report_at(path).add(Case(key={"n": 7}, ranks=[0], check="skipped: -c 0"))
    resumed = Report("ddp_sweep", ENVIRONMENT, str(path))
    resumed.start(resume=True)
    (remark,) = resumed.remarks
    assert remark.startswith("1 of 3 cases were measured unchecked (skipped: -c 0)")


def rewrite(path: Path) -> None:
    """As an editor does: a new file takes the name."""
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    copy.rename(path)


def link_elsewhere(path: Path) -> None:
    other = path.with_name("folder") / "other"
    other.parent.mkdir()
    other.write_text("of somebody else")
    path.unlink()
    path.symlink_to(other)


def append(path: Path) -> None:
    with path.open("a") as file:
        file.write("a note\n")


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (os.unlink, "was removed or replaced"),
        (rewrite, "was removed or replaced"),
        (lambda path: path.rename(f"{path}.old"), "was removed or replaced"),
        (link_elsewhere, "was removed or replaced"),
        (lambda path: os.truncate(path, 0), "was changed"),
        (lambda path: os.truncate(path, 10), "was changed"),
        (append, "was changed"),
    ],
)
def test_a_report_that_is_changed_during_the_run(
    path: Path, change: Callable[[Path], None], words: str, resume: bool
) -> None:
    """The next case tells, and so does the last line. What was measured is in a file beside it."""
    report = report_at(path)
    if resume:
        del report
        report = Report("ddp_sweep", ENVIRONMENT, str(path))
        report.start(resume=True)
    change(path)
    content = path.read_bytes() if path.exists() else None
    said = f"{words} during the run; .*rescued(.1)? has the cases"
    with pytest.raises(OSError, match=said):
        report.add(Case(key={"n": 7}, ranks=[0]))
    rescued = load(f"{path}.rescued")
    assert [case.key["n"] for case in rescued.cases] == [0, 1, 7]
    with pytest.raises(OSError, match=said):
        report.finish("complete")
    assert rescued.status == "interrupted"
    assert (path.read_bytes() if path.exists() else None) == content


def test_a_report_whose_folder_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working folder gets what was measured."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "results"
    folder.mkdir()
    report = report_at(folder / "r.jsonl")
    shutil.rmtree(folder)
    said = "was removed or replaced during the run; r.jsonl.rescued has the cases"
    with pytest.raises(OSError, match=said):
        report.add(Case(key={"n": 7}, ranks=[0]))
    assert len(load("r.jsonl.rescued").cases) == 3


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
def test_an_older_report_stays_where_the_new_first_line_cannot_be_written(
    path: Path, size: int
) -> None:
    report_at(path)
    content = path.read_bytes()
    report = Report("ddp_sweep", ENVIRONMENT, str(path))
    with full_disk(size), pytest.raises(OSError, match="nothing was measured, and what was there"):
        report.start()
    assert path.read_bytes() == content
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("size", [0, 1, 10, 100])
def test_a_first_line_that_was_cut_short_is_replaced(path: Path, size: int, resume: bool) -> None:
    report = Report("ddp_sweep", ENVIRONMENT, str(path))
    with full_disk(size), pytest.raises(OSError, match="nothing was measured"):
        report.start()
    del report
    assert path.stat().st_size == size
    again = Report("ddp_sweep", ENVIRONMENT, str(path))
    assert again.start(resume) == (f"{path}.bak" if size else None)
    again.add(Case(key={"n": 7}, ranks=[0]))
    assert len(load(str(path)).cases) == 1


FIELDS = {"schema": SCHEMA, "benchmark": "x", "argv": [], "environment": {}}
HEAD = json.dumps(FIELDS)
CASE = '{"key": {"n": 1}, "ranks": [0], "samples_s": {"step": %s}}'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty; a report is what a script writes"),
        ("not json\n", ":1 is no line of a report"),
        ("[1]\n", ":1 is no line of a report: the line: expected an object"),
        ('{"schema": "torchrun-bench/2"}\n', "its schema is torchrun-bench/2; this version reads"),
        (f'{{"schema": "{SCHEMA}"}}\n', "expected an entry benchmark"),
        (HEAD + '\n{"key": [], "ranks": []}\n', "key: expected dict, got '[]'"),
        (HEAD + "\n" + CASE % "[[1e400]]" + "\n", "expected lists of seconds"),
        (
            HEAD + "\n" + CASE % f"[[{10**400}]]" + "\n",
            ":2 is no line of a report: a number of 401",
        ),
        (f'{HEAD}\n{{"key": {{}}, "metrics": {{"x": {10**400}}}}}\n', "a number of 401 digits"),
        (HEAD + "\n" + CASE % "[[-1]]" + "\n", "expected lists of seconds"),
        (HEAD + "\n" + CASE % "[[NaN]]" + "\n", "expected lists of seconds"),
        (HEAD + "\n" + CASE % '[["1"]]' + "\n", "expected lists of seconds"),
        (HEAD + "\n" + CASE % "[[1], [2]]" + "\n", "expected at most a list a rank"),
        (HEAD + "\n" + CASE % "[[1], [1, 2]]" + "\n", "expected at most a list a rank"),
        (HEAD + '\n{"key": {}}\n', "missing 1 required keyword-only argument: 'ranks'"),
        (HEAD + "\n\xff\n", ":2 is no line of a report"),
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


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"started_at": 3}, "argument must be str"),
        ({"started_at": "soon"}, "Invalid isoformat string: 'soon'"),
        ({"environment": None}, "environment: expected an object, got 'None'"),
        ({"environment": []}, "environment: expected an object, got '[]'"),
    ],
)
def test_fields_of_another_type_are_named(path: Path, change: dict[str, Any], words: str) -> None:
    path.write_text(json.dumps(FIELDS | change) + "\n")
    with pytest.raises(ValueError, match=":1 is no line of a report") as caught:
        load(str(path))
    assert words in str(caught.value)


def test_what_cannot_be_written_is_named() -> None:
    assert not_json("key", {"a": 1, "b": None}) is None
    assert not_json("key", {"a": 1, "b": {2}}) == "key 'b' is not JSON: '{2}'"
    assert not_json("metric", {"x_s": math.nan}) == "metric 'x_s' is not JSON: 'nan'"


def test_what_is_no_report_is_not_replaced(path: Path) -> None:
    path.write_text("my thesis\n")
    with pytest.raises(ValueError, match="is no line of a report"):
        report_at(path)
    assert path.read_text() == "my thesis\n"
    assert not os.path.exists(f"{path}.bak")


def test_what_is_rescued_begins_with_the_first_line_that_was_resumed(path: Path) -> None:
    """The hosts and the command of the cases are those of the run that measured them."""
    report_at(path, 1)
    before = json.loads(path.read_text().splitlines()[0])
    resumed = Report("ddp_sweep", ENVIRONMENT | {"hosts": ["new"]}, str(path), argv=["again"])
    resumed.start(resume=True)
    path.unlink()
    with pytest.raises(OSError, match="was removed"):
        resumed.add(Case(key={"n": 9}, ranks=[0]))
    rescued = Path(f"{path}.rescued").read_text().splitlines()
    assert json.loads(rescued[0]) == before
    assert json.loads(rescued[1])["hosts"] == ["new"]
