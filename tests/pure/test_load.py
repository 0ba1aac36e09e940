"""analysis/runs/load.py: reports as rows, for the programs of analysis/ and for notebooks."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from analysis.report import sections_of
from analysis.runs.differences import describe_environment
from analysis.runs.load import frame, load
from analysis.runs.verdicts import Design, compare
from tests.pure.reports import ROOT, case, estimate, refusal, refused, write


def test_a_row_for_each_case(tmp_path: Path) -> None:
    samples = {"step": [[0.1, 0.3, 0.2], [0.2, 0.1, 0.1]]}
    two = case("2 ranks", samples_s=samples, ranks=[0, 1], rounds=[3])
    path = write(tmp_path / "a.jsonl", case("no ddp", [1, 3, 2]), two)
    table = frame(load([path]))
    assert table["case"].tolist() == ["no ddp", "2 ranks"]
    assert table["run"].tolist() == [path] * 2
    # the slowest rank of each iteration: 0.2, 0.3, 0.2
    assert table["time_s"].tolist() == [2, 0.2]
    assert table["n"].tolist() == [3, 3]
    assert table["model"].tolist() == ["resnet18"] * 2


def test_intervals_are_columns(tmp_path: Path) -> None:
    metrics = {"step_s": estimate(0.2, 0.1, 0.3), "rows": [1], "note": "warm"}
    other = case("y", metrics={"n": 3}, samples_s={}, rounds=[])
    path = write(tmp_path / "a.jsonl", case("x", metrics=metrics), other)
    table = frame(load([path]))
    names = ["step_s", "step_s_low", "step_s_high", "note"]
    assert table.loc[0, names].tolist() == [0.2, 0.1, 0.3, "warm"]
    assert table.loc[1, names].isna().all()
    assert "rows" not in table


def test_names_that_occur_in_several_tables_are_prefixed(tmp_path: Path) -> None:
    lines = [case("x"), case("x", key={"n": 1}, table="fp16"), case("y", table="fp16")]
    one = write(tmp_path / "a.jsonl", *lines)
    # tables of two runs are not compared: their buckets may differ
    two = write(tmp_path / "b.jsonl", case("y", key={"n": 2}, table="fp8"))
    names = ["resnet18, batch size 8: x", "fp16: x", "y", "y"]
    assert frame(load([one, two]))["case"].tolist() == names


@pytest.mark.parametrize(
    ("metrics", "measure", "seconds"),
    [
        ({"calls_per_s": 4.0, "stall_s": -1.0, "first_s": 9.0, "call_s": 2.0}, "first_s", 9.0),
        ({"calls_per_s": estimate(4.0), "note": "warm"}, "1 / calls_per_s", 0.25),
        ({"memory_gib": 4.0, "note": "warm"}, "", 0.0),
    ],
)
def test_a_case_without_samples(tmp_path: Path, metrics: Any, measure: str, seconds: float) -> None:
    path = write(tmp_path / "a.jsonl", case("x", samples_s={}, metrics=metrics, rounds=[]))
    (row,) = load([path])[0].rows.values()
    assert (row.measure, row.time_s) == (measure, seconds)


def test_selecting_a_measure(tmp_path: Path) -> None:
    """A negative time, a share, and a time of a failed case cannot be selected."""
    samples = {"step": [[1.0]], "local compute": [[0.5]]}
    numbers = {"updates_per_s": 8, "exposed_s": -0.25, "overlap": 0.5}
    good = case("x", samples_s=samples, rounds=[1], metrics=numbers)
    bad = case("z", metrics={"broken_s": 1.0}, check="failed: out of memory")
    path = write(tmp_path / "a.jsonl", good, bad)
    row, _ = load([path], "local compute")[0].rows.values()
    assert row.time_s == 0.5
    row, _ = load([path], "updates_per_s")[0].rows.values()
    assert (row.measure, row.time_s) == ("1 / updates_per_s", 0.125)
    for measure in ("exposed_s", "overlap", "broken_s"):
        words = f"named '{measure}'; the names are step, local compute, updates_per_s"
        assert re.search(f"{words}($|; did you)", refused(load, [path], measure))


def test_fields_that_are_ignored(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", case("x"), case("y"))
    row, _ = load([path], ignore=["model"])[0].rows.values()
    assert row.key == {"setting": "x", "batch_size": 8}
    assert "several cases differ only in setting" in refused(load, [path], ignore=["setting"])


def test_links_are_separate_cases(tmp_path: Path) -> None:
    links: dict[str, Any] = {"links": [[0, 1, 100.0, 2.0, 4.0, 5.0]], "links_spread": [0.1]}
    line = case("", key={"round": 1, "by": "rank"}, samples_s={}, metrics=links, rounds=[])
    table = frame(load([write(tmp_path / "a.jsonl", line, benchmark="p2p_matrix")]))
    seconds = {"0 - 1 latency": 1e-4, "0 -> 1": 0.5, "1 -> 0": 0.25, "0 <-> 1": 0.2}
    assert dict(zip(table["link"], table["time_s"], strict=True)) == pytest.approx(seconds)
    assert table["spread"].tolist() == [0.1] * 4


def test_folders_and_patterns(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write(tmp_path / f"{name}.jsonl", case("x"), started_at="2026-01-01T00:00:00+00:00")
    (tmp_path / "notes.txt").write_text("no report")
    assert [Path(run.label).name for run in load([str(tmp_path)])] == ["a.jsonl", "b.jsonl"]
    assert len(load([f"{tmp_path}/*.jsonl"])) == 2
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "a.jsonl")
    assert "is the same file as" in refused(load, [str(tmp_path)])
    (tmp_path / "empty").mkdir()
    assert "No such file" in refused(load, [f"{tmp_path}/none*.jsonl"])
    assert "there is no report" in refused(load, [f"{tmp_path}/empty"])


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.write(write_end, Path(write(tmp_path / "a.jsonl", case("x"), case("y"))).read_bytes())
    os.close(write_end)
    (found,) = load([f"/dev/fd/{read_end}"])  # the form of <(zcat a.jsonl.gz) in a shell
    os.close(read_end)
    assert len(found.rows) == 2


def test_torch_is_never_imported() -> None:
    """Nor are packages that take longer to import than --help takes to print."""
    modules = [f"analysis.{path.stem}" for path in (ROOT / "analysis").glob("[a-z]*.py")]
    slow = {"torch", "pandas", "scipy", "matplotlib", "jinja2"}
    code = f"import sys, {', '.join(modules)}; assert not {slow} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=500)


def test_only_regular_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a named pipe or a device would block. An open pipe, as above, is read."""
    report, pipe = write(tmp_path / "a.jsonl", case("x")), tmp_path / "b.jsonl"
    os.mkfifo(pipe)
    (tmp_path / "c.jsonl").mkdir()
    os.symlink(report, tmp_path / "of another suffix")
    assert [run.label for run in load([str(tmp_path)])] == [report]
    page = str(tmp_path / "p.html")
    for path, kind in ((str(pipe), "a pipe"), ("/dev/zero", "a device")):
        told = f"error: {path}: expected a report or a log, got {kind}"
        assert refusal("compare.py", report, "--test", path).endswith(told)
        assert refusal("report.py", report, "-o", page, "--test", path).endswith(told)
    os.mkfifo(tmp_path / "o.html")
    (tmp_path / "plan.txt").write_text("command a: x\ncommand b: y\n")
    os.mkfifo(tmp_path / "verdict.txt")
    for words in ((report, "-o", f"{tmp_path}/o.html"), (str(tmp_path), "-o", page)):
        line = refusal("report.py", *words)
        assert re.search(r"(o.html|verdict.txt): expected a regular file, got a pipe$", line)
    monkeypatch.setattr("readers.files.MAX_FILES", 2)
    for number in range(2):
        write(tmp_path / "more" / f"{number}.jsonl", case("x"))
    told = "has more than 2 reports or logs; name those to read"
    assert refused(load, [str(tmp_path)]).endswith(told)
    monkeypatch.setattr("analysis.runs.load.MAX_SEEN", 4)
    assert refused(load, [str(tmp_path)]).endswith("has more than 4 files; name those to read")
    monkeypatch.setattr("analysis.runs.load.MAX_FOREIGN_BYTES", 100)
    Path(report).write_text("{" + " " * 200 + "}")
    assert "is not a report, and has more than 100 bytes" in refused(load, [report])


@pytest.mark.parametrize(("samples", "kind"), [('[["1", 2]]', "str"), ("[[1, true]]", "bool")])
def test_samples_are_numbers(tmp_path: Path, samples: str, kind: str) -> None:
    line = case("x", [1.0]) | {"samples_s": {"step": json.loads(samples)}, "rounds": []}
    path = write(tmp_path / "a.jsonl", line)
    why = f"{path}: expected seconds as numbers in the samples of case 'x', got {kind}; e.g. 0.125"
    assert why in refused(load, [path])


@pytest.mark.parametrize("seconds", ["Infinity", "NaN", "1e300", "-0.1", "1e-300"])
@pytest.mark.parametrize("from_samples", [True, False])
def test_an_impossible_time_is_refused(tmp_path: Path, seconds: str, from_samples: bool) -> None:
    """Ratios would have 300 digits, and statistics fail for infinite times."""
    if from_samples:
        line = case("x", [0.1, 77, 0.1])
    else:
        line = case("x", samples_s={}, metrics={"step_s": 77}, rounds=[])
    path = Path(write(tmp_path / "a.jsonl", line))
    path.write_text(path.read_text().replace(" 77", f" {seconds}"))
    if not from_samples and seconds in ("NaN", "-0.1"):
        (row,) = load([str(path)])[0].rows.values()
        assert row.time_s == 0  # ignored
        return
    why = "a.jsonl: case 'x' has a time outside of 1e-12 to 1e+09 s"
    assert why in refused(load, [str(path)])


def test_each_case_of_a_resumed_report_has_the_host_that_measured_it(tmp_path: Path) -> None:
    """So do links. Table, comparison and page show it."""
    later = {"measured_at": "2026-01-02T03:04:05+00:00", "hosts": ["node2"]}
    link = case("round 1", samples_s={}, metrics={"links": [[0, 1, 5.0, 1.0, 1.0, 1.0]]})
    cases = (case("no ddp", [1]), case("2 ranks", [2]) | later, link | later)
    path = write(tmp_path / "a.jsonl", *cases, started_at="2026-01-01T00:00:00+00:00")
    (run,) = load([path])
    table = frame([run])
    assert table["host"].tolist() == ["vm"] + ["node2"] * 5
    assert table["started_at"].tolist()[:2] == ["2026-01-01T00:00:00+00:00", later["measured_at"]]
    told = "1 case was measured 2026-01-01 00:00 UTC on vm, 5 2026-01-02 03:04 UTC on node2"
    assert run.resumed == told
    assert describe_environment(run)["hosts"] == "vm, node2"
    other = write(tmp_path / "b.jsonl", case("no ddp", [1]))
    (plain,) = load([other])
    assert f"{path} was resumed: {told}" in compare([run], [plain], Design()).warnings
    _, sections = sections_of([path])
    assert f"a was resumed: {told}." in sections[0].warnings
    cells = str(sections[1].tables)
    assert "no ddp (2026-01-01 00:00 UTC on vm)" in cells
    assert "2 ranks (2026-01-02 03:04 UTC on node2)" in cells


def test_runs_are_sorted_by_time_and_not_by_text(tmp_path: Path) -> None:
    """10:10, 12:10 and 14:10 in UTC. A run without a start comes first."""
    starts = ["2026-01-01T14:10:00+00:00", "2026-01-01T19:10:00+09:00", "2026-01-01T03:10:00-09:00"]
    for number, start in enumerate([*starts, ""]):
        write(tmp_path / f"{number}.jsonl", case("x", [1.0 + number]), started_at=start)
    runs = load([str(tmp_path)])
    assert [run.started_at for run in runs] == ["", starts[1], starts[2], starts[0]]
