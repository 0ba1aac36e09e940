"""common/results.py: what counts as a report, and how one is written without losing the last."""

import copy
import errno
import json
import math
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from common.results import (
    SAME_ENVIRONMENT,
    SCHEMA,
    STATUSES,
    Report,
    are_seconds,
    check_path,
    load,
    same_key,
    validate,
)

ROOT = Path(__file__).resolve().parents[2]
MISSING = object()
ENVIRONMENT: dict[str, Any] = {name: f"{name} here" for name in SAME_ENVIRONMENT} | {"hosts": ["a"]}


def case(size: int = 1, check: str = "passed", **changes: Any) -> dict[str, Any]:
    defaults = {
        "key": {"size": size},
        "ranks": [0, 1],
        "samples_s": [[0.1, 0.2], [0.1, 0]],
        "stop": {},
        "metrics": {},
    }
    return defaults | {"check": check} | changes


def document(*cases: dict[str, Any], **changes: Any) -> dict[str, Any]:
    defaults = {
        "schema": SCHEMA,
        "benchmark": "bench",
        "status": "complete",
        "argv": ["bench.py"],
        "started_at": "2025-01-01T00:00:00+00:00",
        "finished_at": None,
        "environment": ENVIRONMENT,
        "cases": list(cases) or [case(1), case(2)],
    }
    return defaults | changes


def edited(original: dict[str, Any], field: str, value: Any) -> dict[str, Any]:
    """A copy with one field set, or taken away."""
    changed = copy.deepcopy(original)
    if value is MISSING:
        del changed[field]
    else:
        changed[field] = value
    return changed


def write(path: Path, content: Any) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def new_report(path: str | Path | None, **changes: Any) -> Report:
    options: dict[str, Any] = {
        "benchmark": "bench",
        "environment": ENVIRONMENT,
        "extras": lambda cases: {},
    }
    return Report(None if path is None else str(path), **(options | changes))


def sizes(path: str | Path) -> list[tuple[int, str]]:
    """The cases in a file, as size and verdict."""
    return [(found["key"]["size"], found["check"]) for found in load(str(path))["cases"]]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -- validate --------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("check", ["passed", "failed: why", "skipped: why"])
def test_a_report_is_valid(status: str, check: str) -> None:
    validate(document(case(check=check), case(2, samples_s=[]), status=status))
    validate(document() | {"cases": [], "benchmark_results": []})


@pytest.mark.parametrize("value", [MISSING, None, 7, True])
@pytest.mark.parametrize(
    "field", ["schema", "benchmark", "status", "argv", "started_at", "environment", "cases"]
)
def test_a_bad_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^at {field}: expected "):
        validate(edited(document(), field, value))


@pytest.mark.parametrize("value", [MISSING, None, 7, True])
@pytest.mark.parametrize("field", ["key", "ranks", "samples_s", "stop", "metrics", "check"])
def test_a_bad_field_of_a_case_is_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^at cases\[1\]\.{field}: expected "):
        validate(document(case(1), edited(case(2), field, value)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("ranks", ranks) for ranks in ([0, -1], [0, 1.0], [0, True], [0, "1"], [0, None])),
        ("samples_s", [[0.1]]),  # two ranks
        ("samples_s", [[0.1], [0.1], [0.1]]),
        ("samples_s", [[0.1], 0.1]),
        *(
            ("samples_s", [[0.1], [x]])
            for x in (-1e-9, math.nan, math.inf, True, "0.1", None, [0.1])
        ),
        *(("check", text) for text in ("", "ok", "failed", "failed:", "skipped")),
    ],
)
def test_a_bad_value_of_a_case_is_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^at cases\[0\]\.{field}: expected "):
        validate(document(case() | {field: value}))


def test_a_number_too_large_for_a_float_is_no_time() -> None:
    with pytest.raises(ValueError, match=r"^at cases\[0\]\.samples_s: expected "):
        validate(document(case(samples_s=[[0.1], [10**400]])))


def test_all_ranks_have_the_same_iterations() -> None:
    with pytest.raises(ValueError, match=r"^at cases\[0\]\.samples_s: expected "):
        validate(document(case(samples_s=[[0.1, 0.2], [0.1]])))


def test_passed_is_a_word() -> None:
    with pytest.raises(ValueError, match=r"^at cases\[0\]\.check: expected "):
        validate(document(case(check="passed not at all")))


@pytest.mark.parametrize("value", [None, 7, "report", [], [document()]])
def test_not_an_object(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^at \$: expected an object, got "):
        validate(value)
    with pytest.raises(ValueError, match=r"^at cases\[1\]: expected an object, got "):
        validate(document() | {"cases": [case(), value]})


@pytest.mark.parametrize("schema", ["torchrun-bench/2", "", {}])
def test_another_schema(schema: Any) -> None:
    with pytest.raises(ValueError, match=r"^at schema: expected 'torchrun-bench/1', got "):
        validate(document(schema=schema))


def test_the_message_is_short() -> None:
    with pytest.raises(ValueError, match="at status") as refused:
        validate(document(status="x" * 10_000))
    assert len(str(refused.value)) < 250


# -- load ------------------------------------------------------------------------------------------


def test_load(tmp_path: Path) -> None:
    assert load(write(tmp_path / "r.json", document())) == document()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "which is not JSON"),
        (b'{"schema": ', "which is not JSON"),
        (b"hello", "which is not JSON"),
        (b"\xff\xfe{}", "which is not JSON"),
        (b"[" * 100_000, "which is nested too deeply for a report"),
        (b'{"a":' * 100_000, "which is nested too deeply for a report"),
        (b"{}", "which is not a torchrun-bench report: at schema: "),
        (b"[]", "which is not a torchrun-bench report: at \\$: "),
        (b"1" * 10_000, "which is not JSON"),
    ],
    ids=["empty", "cut", "text", "binary", "lists", "objects", "no report", "list", "digits"],
)
def test_load_refuses(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"^{path}, {message}"):
        load(str(path))


def test_load_of_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file or directory"):
        load(str(tmp_path / "r.json"))


def test_nesting_near_the_limit_never_breaks_out(tmp_path: Path) -> None:
    """Loading, refusing and taking over each use up another depth of the stack."""
    shallow, deep = 1, 100_000  # the deepest that json reads, and one that it does not
    while deep - shallow > 1:
        depth = (shallow + deep) // 2
        try:
            json.loads("[" * depth + "]" * depth)
            shallow = depth
        except RecursionError:
            deep = depth
    outcomes = set()
    for depth in range(shallow - 70, deep):
        nested = '{"a":' * depth + "1" + "}" * depth
        for original in (document(case(metrics={"x": "?"})), document(status="?")):
            path = write(tmp_path / "r.json", json.dumps(original).replace('"?"', nested))
            try:
                new_report(path).open(resume=True)
                outcomes.add("taken over")
            except ValueError:
                outcomes.add("refused")
    assert outcomes == {"taken over", "refused"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("samples_s", [[math.nan], [0.1]]),
        ("metrics", {"x": math.nan}),
        ("metrics", {"x": math.inf}),
        ("stop", {"x": math.nan}),
        ("key", {"x": math.nan}),
    ],
)
def test_nan_in_a_file_is_refused_with_its_name(tmp_path: Path, field: str, value: Any) -> None:
    """Python's json reads it, though it is no JSON; what is taken over is written again."""
    path = write(tmp_path / "r.json", document(case() | {field: value}))
    with pytest.raises(ValueError, match=r"r\.json"):
        new_report(path).open(resume=True)


# -- check_path ------------------------------------------------------------------------------------


@pytest.mark.parametrize("resume", [False, True])
def test_paths_that_can_take_a_report(tmp_path: Path, resume: bool) -> None:
    (tmp_path / "empty.json").touch()
    write(tmp_path / "report.json", document())
    for name in ("new.json", "empty.json", "report.json"):
        check_path(str(tmp_path / name), resume)
    assert names(tmp_path) == ["empty.json", "report.json"]


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", r"is a directory; give a file, e\.g\. .*/report\.json"),
        ("missing/r.json", "there is no directory .*/missing; make it first"),
        ("/dev/null", "is not a regular file|cannot be written"),
        ("null-link", "is not a regular file|cannot be written"),
        ("fifo", "is not a regular file"),
        ("/proc/r.json", "cannot be written: "),
        ("x" * 300, "cannot be written: File name too long"),
    ],
)
def test_paths_that_cannot(tmp_path: Path, resume: bool, name: str, message: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "null-link").symlink_to("/dev/null")
    before = names(tmp_path)
    with pytest.raises(ValueError, match=rf"^--json .*{message}"):
        check_path(str(tmp_path / name), resume)
    assert names(tmp_path) == before
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


@pytest.mark.parametrize("content", ["my notes", '{"my": "data"}', "[]", "\0"])
def test_a_foreign_file_is_not_overwritten(tmp_path: Path, content: str) -> None:
    path = write(tmp_path / "notes.txt", content)
    with pytest.raises(ValueError, match=r"would overwrite .*notes\.txt.*; give another path"):
        check_path(path, resume=False)
    assert Path(path).read_text() == content


# -- one run's report ------------------------------------------------------------------------------


def test_a_report_from_start_to_end(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    report = new_report(path, extras=lambda cases: {"count": len(cases)})
    report.open(resume=False)
    first = load(str(path))
    assert (first["status"], first["cases"], first["count"]) == ("running", [], 0)
    assert first["environment"] == ENVIRONMENT
    report.add(case(1))
    report.add(case(2, check="failed: why", samples_s=[]))
    assert load(str(path))["status"] == "running"
    assert sizes(path) == [(1, "passed"), (2, "failed: why")]
    assert report.finish("failed", "a case failed")
    last = load(str(path))
    assert (last["status"], last["reason"], last["count"]) == ("failed", "a case failed", 2)
    assert last["finished_at"] >= last["started_at"] == first["started_at"]
    assert last["cases"] == report.cases
    assert names(tmp_path) == ["r.json"]


def test_finish_twice(tmp_path: Path) -> None:
    report = new_report(tmp_path / "r.json")
    report.open(resume=False)
    assert report.finish("interrupted", "SIGTERM")
    before = (tmp_path / "r.json").read_bytes()
    assert report.finish("complete")
    assert (tmp_path / "r.json").read_bytes() == before
    assert load(report.path or "")["status"] == "interrupted"


def test_without_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    report = new_report(None)
    report.open(resume=False)
    report.add(case(1))
    assert report.finish("complete")
    assert report.cases == [case(1)]
    assert report.find({"size": 1}) == case(1)
    assert names(tmp_path) == []


def test_an_earlier_report_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    earlier = write(path, document())
    new_report(path).open(resume=False)
    assert load(earlier + ".bak") == document()
    assert sizes(path) == []


def test_an_empty_file_is_not_worth_keeping(tmp_path: Path) -> None:
    (tmp_path / "r.json").touch()
    for resume in (True, False):
        new_report(tmp_path / "r.json").open(resume)
        assert sizes(tmp_path / "r.json") == []
        (tmp_path / "r.json").write_text("")
    assert names(tmp_path) == ["r.json"]


def test_a_symlink_stays_one(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    link = tmp_path / "r.json"
    link.symlink_to("disk/real.json")
    for _ in range(2):  # before the target is there, and after
        check_path(str(link), resume=False)
        report = new_report(link)
        report.open(resume=False)
        report.add(case(1))
        report.finish("complete")
        assert link.is_symlink()
        assert sizes(tmp_path / "disk" / "real.json") == [(1, "passed")]
    assert names(tmp_path / "disk") == ["real.json", "real.json.bak"]


def test_a_bad_case_is_ours_to_notice(tmp_path: Path) -> None:
    report = new_report(tmp_path / "r.json")
    report.open(resume=False)
    for bad in (case(metrics={"x": math.nan}), case(ranks=[0]), case(check="fine")):
        with pytest.raises(ValueError, match=r"at case|JSON compliant"):
            report.add(bad)
    assert sizes(tmp_path / "r.json") == []


def test_same_key() -> None:
    one, other = {"a": 1, "b": None}, {"b": None, "a": 1}
    assert same_key(one, other)
    assert same_key(other, one)
    assert not same_key({"a": 1}, {"a": 2})
    assert not same_key({"a": 1}, {"a": 1, "b": None})


# -- resume ----------------------------------------------------------------------------------------


def test_resume_takes_over(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    old = document(case(1), case(2, check="failed: out of memory"), status="interrupted")
    write(path, old)
    report = new_report(path)
    report.open(resume=True)
    assert load(str(path))["status"] == "running"
    assert load(str(path))["started_at"] == old["started_at"]
    assert sizes(path) == [(1, "passed"), (2, "failed: out of memory")]
    assert names(tmp_path) == ["r.json"]


@pytest.mark.parametrize(
    ("check", "done"), [("passed", True), ("skipped: noop", True), ("failed: why", False)]
)
def test_find(check: str, done: bool) -> None:
    report = new_report(None)
    report.add(case(1, check))
    report.add(case(2))
    assert (report.find({"size": 1}) == case(1, check)) == done
    assert report.find({"size": 3}) is None


def test_a_failed_case_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    write(path, document(case(1, check="failed: why", samples_s=[]), case(2)))
    report = new_report(path)
    report.open(resume=True)
    report.add(case(1, check="failed: again", samples_s=[]))
    report.add(case(1))
    assert sorted(sizes(path)) == [(1, "passed"), (2, "passed")]


def test_resume_refuses_another_benchmark(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    before = write(path, document(benchmark="other")) and path.read_bytes()
    with pytest.raises(ValueError, match=r"r\.json is a report of other, not of bench"):
        new_report(path).open(resume=True)
    assert path.read_bytes() == before


@pytest.mark.parametrize("field", SAME_ENVIRONMENT)
def test_resume_refuses_another_environment(tmp_path: Path, field: str) -> None:
    path = tmp_path / "r.json"
    before = write(path, document()) and path.read_bytes()
    elsewhere = ENVIRONMENT | {field: "other"}
    with pytest.raises(ValueError, match=rf"in {field} \({field}: {field} here there, other here"):
        new_report(path, environment=elsewhere).open(resume=True)
    assert path.read_bytes() == before


def test_resume_names_all_that_differs(tmp_path: Path) -> None:
    path = write(tmp_path / "r.json", document())
    elsewhere = ENVIRONMENT | {"nccl": None, "torch": "2.11.0", "world_size": 16}
    with pytest.raises(ValueError, match=r" in torch, nccl, world_size \(torch: torch here there"):
        new_report(path, environment=elsewhere).open(resume=True)


def test_resume_elsewhere_on_the_same_kind_of_machine(tmp_path: Path) -> None:
    path = write(tmp_path / "r.json", document())
    new_report(path, environment=ENVIRONMENT | {"hosts": ["b"]}).open(resume=True)
    assert len(sizes(path)) == 2


@pytest.mark.parametrize("content", ["{", '{"schema": "torchrun-bench/1"}', "my notes"])
def test_resume_refuses_a_damaged_report(tmp_path: Path, content: str) -> None:
    path = write(tmp_path / "r.json", content)
    with pytest.raises(ValueError, match=r"r\.json, which is not "):
        new_report(path).open(resume=True)
    assert Path(path).read_text() == content


# -- writes that fail ------------------------------------------------------------------------------


def refuse_sync(monkeypatch: pytest.MonkeyPatch, kind: Any, number: int) -> None:
    """Have fsync fail on files of a kind (stat.S_ISREG, ..)."""

    def fsync(fd: int, real: Any = os.fsync) -> None:
        if kind(os.fstat(fd).st_mode):
            raise OSError(number, os.strerror(number))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)


def test_a_failed_write_leaves_the_last_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.json"
    report = new_report(path)
    report.open(resume=False)
    report.add(case(1))
    before = path.read_bytes()
    with monkeypatch.context() as full:
        refuse_sync(full, stat.S_ISREG, errno.ENOSPC)
        report.add(case(2))
        assert path.read_bytes() == before
        assert names(tmp_path) == ["r.json"]
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert f"cannot write {path}: No space left on device" in lines[0]
    report.add(case(3))  # there is space again
    assert sizes(path) == [(1, "passed"), (2, "passed"), (3, "passed")]
    assert report.finish("complete")


def test_a_failed_first_write_leaves_the_earlier_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.json"
    write(path, document())
    refuse_sync(monkeypatch, stat.S_ISREG, errno.ENOSPC)
    new_report(path).open(resume=False)
    assert load(str(path)) == document()
    assert set(names(tmp_path)) == {"r.json", "r.json.bak"}


def test_finish_says_when_it_could_not_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = new_report(tmp_path / "r.json")
    report.open(resume=False)
    refuse_sync(monkeypatch, stat.S_ISREG, errno.EIO)
    assert not report.finish("complete")
    assert not report.finish("complete")
    assert load(report.path or "")["status"] == "running"


def test_a_failed_write_never_lies_about_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Some network file systems cannot sync a directory: by then the file is replaced."""
    path = tmp_path / "r.json"
    report = new_report(path)
    report.open(resume=False)
    refuse_sync(monkeypatch, stat.S_ISDIR, errno.EINVAL)
    report.add(case(1))
    says_old = "previous version is intact" in capsys.readouterr().err
    assert sizes(path) == ([] if says_old else [(1, "passed")])


FULL = """
import json, resource, sys
from common.results import Report
report = Report(sys.argv[1], "bench", {}, lambda cases: {})
small, large = json.loads(sys.argv[2])
report.open(resume=False)
report.add(small)
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.RLIM_INFINITY))
report.add(large)
print(report.finish("complete"))
"""


def test_a_full_disk(tmp_path: Path) -> None:
    """The kernel refuses the rest of a write, when half of the temporary file is there."""
    path = tmp_path / "r.json"
    cases = json.dumps([case(1), case(2, metrics={"x": "y" * 4000})])
    command = [sys.executable, "-c", FULL, str(path), cases]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
    assert done.stderr.count("File too large") == 2
    assert sizes(path) == [(1, "passed")]
    assert names(tmp_path) == ["r.json"]


@pytest.mark.parametrize(
    ("row", "good"),
    [
        ([], True),
        ([0, 0.5, 999_999_999], True),
        ([0.1, math.nan], False),
        ([math.nan, 0.1], False),
        ([0.1, -math.nan, -0.1], False),
        ([0.1, math.inf], False),
        ([0.1, -1e-9], False),
        ([0.1, 1e9], False),
        ([10**400], False),
        ([True], False),
        (["0.1"], False),
        ([0.1, None], False),
        ([[0.1]], False),
    ],
)
def test_are_seconds(row: list[Any], good: bool) -> None:
    assert are_seconds(row) is good
