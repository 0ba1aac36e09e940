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
from tests.pure.reports import refused

ENVIRONMENT = {"torch": "2.15.0", "world_size": 2, "devices": ["cpu"], "version": "a"}
ENVIRONMENT |= {"contents": {"mine": "0", "late": "1", "common": "2"}}
ENVIRONMENT |= {"variables": {}, "ranks": [{"rank": 0, "threads": 1}]}


def begin(path: Path, benchmark: str = "ddp_sweep", **environment: Any) -> Report:
    return Report(benchmark, ENVIRONMENT | environment, str(path))


def resumed(path: Path, started_at: str = "", **environment: Any) -> Report:
    report = begin(path, **environment)
    report.started_at = started_at or report.started_at
    report.start(resume=True)
    return report


def add(report: Report, n: int, **imported: str) -> None:
    report.add(Case(key={"n": n}, ranks=[0]), imported)


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
        assert "another run is writing" in refused(begin(tmp_path / "link").start, resume)
    add(first, 7)
    assert [case.key["n"] for case in load(str(path)).cases] == [0, 7]
    del first  # as at the end of its process
    resumed(path)


def test_only_regular_files(path: Path) -> None:
    os.mkfifo(path)
    for name in (path, path.parent, Path("/dev/null")):
        assert f"{name}: expected a regular file, got a " in refused(begin(name).start)


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
        assert "will not overwrite the file" in refused(begin(path).start, resume)
    assert path.read_text() == text


@pytest.mark.parametrize("tail", [b'{"key": {"model": ', b'{"key": {}, "ranks": []}'])
def test_resume_keeps_cases_and_cuts_an_incomplete_line(path: Path, tail: bytes) -> None:
    """The status of the earlier run is no longer valid."""
    report_at(path, 2).finish("failed")
    with path.open("ab") as file:
        file.write(tail)
    add(resumed(path), 9)
    assert [case.key["n"] for case in load(str(path)).cases] == [0, 1, 9]
    assert load(str(path)).status == "interrupted"


FI_X = {"ranks": [1, 2], "variables": {"FI_X": "1"}}
LACKS = {"ranks": [2], "variables": {"FI_X": None}}  # a variable that rank 2 lacks now


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"benchmark": "collectives"}, "has benchmark ddp_sweep, this run collectives"),
        ({"nccl": "2.30"}, "has nccl unset, this run 2.30"),
        ({"devices": ["H200", "B200"]}, "has devices cpu, this run H200, B200"),
        ({"ranks": [{"rank": 0, "threads": 2}]}, "has threads (rank 0) 1, this run 2"),
        ({"variables": {"NCCL_ALGO": "Ring"}}, "has NCCL_ALGO unset, this run Ring"),
        ({"torch": "\33[2J\n#"}, r"torch 2.15.0, this run '\x1b[2J\n#'"),
        ({"contents": {"mine": "1", "x": "1"}}, "has other contents of mine: the re"),
        ({"contents": {"a": "1"}, "torch": "2"}, "0, this run 2: the results"),
        ({"other_variables": [FI_X]}, "has FI_X (rank 1) unset, this run 1; ranks with other vari"),
        ({"other_variables": [FI_X]}, "ranks with other variables unset, this run 1, 2:"),
        ({"other_variables": [LACKS]}, "has ranks with other variables unset, this run 2:"),
        ({"benchmark": "x", "torch": "2", "nccl": "3", "python": "4"}, "; and 1 more: the results"),
    ],
)
def test_not_resumed(path: Path, environment: dict[str, Any], words: str) -> None:
    report_at(path)
    assert words in refused(begin(path, **environment).start, resume=True)
    assert len(load(str(path)).cases) == 2


def test_secrets_are_not_in_reports() -> None:
    """Nor is a hash of them, except for 12 bits of a part that looks random."""
    hidden = "HF_TOKEN NCCL_KEY_X A_Secret TORCH_PASS NCCL_PASSWD FI_AUTH CREDS NCCL_TOK FI_PWD"
    hidden += " NCCL_BEARER NCCL_PW TORCH_JWT FI_COOKIES UCX_SIG TORCH_SAS_URL"
    told = without_secrets(dict.fromkeys(hidden.split(), "hunter2"))
    assert told == dict.fromkeys(hidden.split(), "(set)")
    shown = {"NCCL_ALGO": "Ring", "TOKENIZERS_PARALLELISM": "0", "NCCL_NET": "a@b"}
    shown |= {"UCX_SIGNALS": "1", "NCCL_X": "http://host/a@b"}
    shown |= {"CUDA_VISIBLE_DEVICES": "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"}
    shown |= {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:128"}
    assert without_secrets(shown) == shown
    urls = {
        "https://user:hunter2@host/x, https://": "https://(set)@host/x, https://",
        "https://u:p@hunter2@host": "https://(set)@host",
        "http://host/a?token=hunter2&x=1 b": "http://host/a?(set) b",
        "postgres://user:hunter/2@host/db": "postgres://(set)@host/db",
        "Authorization: Bearer hunter2": "Authorization: Bearer (set)",
    }
    assert {url: without_secrets({"NCCL_X": url})["NCCL_X"] for url in urls} == urls
    paths = [f"/nix/{'0c7c96gikmzv87i7lv3v' + end}/lib" for end in "ab"]
    hashed = [without_secrets({"LD_X": path})["LD_X"] for path in paths]
    assert all(re.fullmatch(r"/nix/\(set, \w{3}\)/lib", one) for one in hashed)
    assert hashed[0] != hashed[1]  # --resume compares them


def test_a_requeued_job_continues_on_other_hosts(path: Path) -> None:
    """With another job number. Each case has the start of its run and, unless they are those of the
    first line, its hosts. A run that measures nothing leaves no trace."""
    for number, hosts in enumerate((["node1"], ["node2", "node3", "node4"], ["n"], ["node1"])):
        variables = {"SLURM_JOB_ID": str(number), "TRITON_CACHE_DIR": f"/{number}"}
        when = f"2026-11-28T0{number}:12:05+00:00"
        report = resumed(path, when, hosts=hosts, variables=variables)
        earlier = len(report.cases)
        if number != 2:
            add(report, number)
        marks = [report.is_earlier(case) for case in report.cases]
        assert marks == [True] * earlier + [False] * (number != 2)
        report.files[-1].close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line.get("hosts") for line in lines[1:]] == [None, ["node2", "node3", "node4"], None]
    cases = load(str(path)).cases
    assert [case.hosts for case in cases] == [["node1"], ["node2", "node3", "node4"], ["node1"]]
    assert [case.measured for case in cases] == [
        "2026-11-28 00:12 UTC on node1",
        "2026-11-28 01:12 UTC on node2, node3 and 1 more",
        "2026-11-28 03:12 UTC on node1",
    ]


def test_the_load_belongs_to_the_run_that_measured(path: Path) -> None:
    """Run 0 ends normally, run 1 is interrupted, and run 3 measures nothing."""
    for number in range(4):
        report = resumed(path, str(number))
        if number < 3:
            add(report, number)
        if number in (0, 2):
            report.finish("complete", others=[[number, 2]])
        report.files[-1].close()
    resumed(path).finish("complete", answer=["it measured nothing"])
    loaded = load(str(path))
    loads = {start: end["others"] for start, end in loaded.ends.items()}
    assert loads == {"0": [[0, 2]], "2": [[2, 2]]}
    assert loaded.end == {"answer": ["it measured nothing"]}


def test_modules_of_each_case_are_compared(path: Path) -> None:
    """Also if the run was killed before its last line, and the module is imported by a later case
    of the resumed run, or is imported by that run at its start."""
    first = report_at(path, 0, contents={"x.py": "1"})
    add(first, 1)
    add(first, 2, late="2")
    add(first, 3, late="9", later="3")  # late was edited after it was imported
    first.files[-1].close()  # killed
    lines = [json.loads(line).get("contents") for line in path.read_text().splitlines()]
    assert lines == [None, None, {"late": "2"}, {"later": "3"}]
    assert load(str(path)).contents == {"x.py": "1", "late": "2", "later": "3"}
    told = refused(resumed, path, contents={"x.py": "1", "late": "3"})
    assert "has other contents of late: the results" in told
    second = resumed(path, contents={"x.py": "1", "at_start": "4"})
    add(second, 4)
    before = path.read_bytes()
    told = refused(add, second, 5, late="2", later="0")
    assert f"{path}: later is not, or no longer, the file that earl" in told
    assert path.read_bytes() == before
    add(second, 5, late="2")
    add(second, 6, late="9")  # edited after this run has imported it
    second.files[-1].close()
    told = refused(resumed, path, contents={"x.py": "1", "at_start": "5"})
    assert "has other contents of at_start: the results" in told
    resumed(path, contents={"x.py": "1", "at_start": "4", "late": "2"})


def test_modules_of_the_last_line(path: Path) -> None:
    """A file that changed during the run ends the report."""
    first = report_at(path, 1, contents={"x.py": "1"})
    assert first.new_contents({"x.py": "1"}) == {}
    first.finish("complete", **first.new_contents({"x.py": "1", "late": "2"}))
    first.files[-1].close()
    told = refused(resumed, path, contents={"late": "3"})
    assert "has other contents of late: the results" in told
    second = resumed(path, contents={})
    second.finish("complete", changed=["late", "x.py"])
    second.files[-1].close()
    told = refused(resumed, path, contents={})
    assert "late, x.py is not, or no longer, the file " in told


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
        (HEAD, "is not a complete report; expected a file written by a script"),
        ('{"schema": "torchrun-bench/2"}\n', f"expected schema {SCHEMA}, got torchrun-bench/2"),
        (f'{{"schema": "{SCHEMA}"}}\n', "missing 2 required positional arguments: 'benchmark'"),
        (f"{HEAD}\n{HEAD}\n", ":2 is not a line of a report: another report starts here"),
        (HEAD + '\n{"key": {}}\n', "missing 1 required keyword-only argument: 'ranks'"),
        (HEAD + '\nhalf\n{"key": {}, "ranks": []}\n', ":2 is not a line of a report"),
    ],
)
def test_damaged_reports_are_refused_in_one_line(path: Path, text: str, words: str) -> None:
    path.write_text(text)
    line = refused(load, str(path))
    assert str(path) in line
    assert words in line


def test_values_that_are_not_json_are_named() -> None:
    assert not_json({"a": 1, "b": None}) is None
    assert not_json({"a": 1, "b": {2}}) == "metric 'b' cannot be written as JSON: '{2}'"
    assert not_json({"x_s": math.nan}) == "metric 'x_s' cannot be written as JSON: 'nan'"
