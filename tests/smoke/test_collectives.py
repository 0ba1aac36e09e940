"""collectives.py through the real torchrun on gloo: every operation, mode and group."""

from pathlib import Path
from typing import Any

import pytest
from harness import COLLECTIVES, load, run, slow, torchrun

from common import results
from common.bandwidth import COLLECTIVES as NAMES

# two sizes, one block each, in little memory
QUICK = ["--device", "cpu", "-b", "64", "-e", "6400", "-f", "100", "-n", "4", "-w", "1"]
QUICK += ["--max-seconds", "0.001", "--cache-warm"]


def scan(path: Path, nproc: int, *options: str) -> tuple[str, list[dict[str, Any]]]:
    done = run([*torchrun(nproc), COLLECTIVES, *QUICK, "--json", str(path), *options])
    assert done.returncode == 0, done.stdout + done.stderr
    report = results.load(str(path))
    assert report["status"] == "complete"
    return done.stdout, report["cases"]


@pytest.mark.parametrize("nproc", [1, 2, 3, pytest.param(4, marks=slow)])
def test_every_operation(tmp_path: Path, nproc: int) -> None:
    options = ["--collective", "all", "-r", str(nproc - 1)]
    stdout, cases = scan(tmp_path / "a report.json", nproc, *options)
    by_name = {name: [c for c in cases if c["key"]["collective"] == name] for name in NAMES}
    for name, found in by_name.items():
        assert len(found) == (1 if name == "barrier" else 2), name
        for case in found:
            if name == "sendrecv" and nproc == 1:
                assert case["check"].startswith("skipped: n/a: a ring needs 2 ranks")
                assert case["metrics"] == {}
                continue
            assert case["check"] == "passed", case
            assert case["metrics"]["out_of_place_wrong"] == 0
            assert [len(row) > 0 for row in case["samples_s"]] == [True] * nproc
            assert case["metrics"]["out_of_place_time_s"] > 0
            shared = name in ("all_gather", "all_to_all", "gather", "all_gather_object")
            if shared:
                assert case["key"]["size_bytes"] % nproc == 0
    for name in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "gather", "scatter"):
        assert {case["metrics"]["in_place_wrong"] for case in by_name[name]} == {0}
        assert len(by_name[name][0]["other_samples_s"]) == 1
    assert "in_place_time_s" not in by_name["all_to_all"][0]["metrics"]
    lines = stdout.splitlines()
    assert "# Out of bounds values : 0 OK" in lines
    assert any(line.startswith("# Avg bus bandwidth    : ") for line in lines)


def test_types_and_reductions(tmp_path: Path) -> None:
    options = ["-d", "all", "-o", "all", "--collective", "all_reduce,all_to_all_uneven"]
    stdout, cases = scan(tmp_path / "r.json", 2, *options)
    assert len(cases) == (8 * 5 + 8) * 2
    absent = [case for case in cases if case["check"] != "passed"]
    assert {(c["key"]["redop"], c["key"]["dtype"]) for c in absent} == {
        ("avg", dtype) for dtype in ("int8", "uint8", "int32", "int64")
    }
    assert {case["check"] for case in absent} == {
        "skipped: n/a: gloo averages floating-point numbers only"
    }
    assert stdout.count("n/a: gloo averages floating-point numbers only") == 4  # a row each


@pytest.mark.parametrize("mode", [["--in-flight", "3"], ["--coalesce", "3"]])
def test_modes(tmp_path: Path, mode: list[str]) -> None:
    _, cases = scan(tmp_path / "r.json", 2, "--collective", "all", "-c", "5", *mode)
    for case in cases:
        name = case["key"]["collective"]
        coalesced = name in ("all_reduce", "all_gather", "reduce_scatter")
        objects = name.endswith("_object")
        lacks = (mode[0] == "--coalesce" and not coalesced) or (
            mode[0] == "--in-flight" and objects
        )
        assert case["check"].startswith("skipped: n/a: " if lacks else "passed"), case


def test_per_iteration_skew_and_limit(tmp_path: Path) -> None:
    options = ["--per-iteration", "-n", "100", "--skew", "--limit", "5", "-a", "1"]
    stdout, cases = scan(tmp_path / "r.json", 2, *options)
    for case in cases:
        assert len(case["samples_s"][0]) % 100 == 0
        m = case["metrics"]
        for variant in ("out_of_place", "in_place"):
            assert m[f"{variant}_min_s"] <= m[f"{variant}_p99_s"] <= m[f"{variant}_max_s"]
            assert m[f"{variant}_efficiency"] == pytest.approx(m[f"{variant}_busbw_gb_per_s"] / 5)
            assert m[f"{variant}_waiting_s"] >= 0
            assert m[f"{variant}_transfer_s"] > -m[f"{variant}_clock_error_s"]
            assert m[f"{variant}_latest_rank"] in (0, 1)
    header = next(line for line in stdout.splitlines() if "#wrong" in line)
    for name in ("eff", "min", "max", "p99", "cv", "wait", "transfer", "clock+-", "latest"):
        assert header.split().count(name) == 2


def test_groups_at_once(tmp_path: Path) -> None:
    options = ["--groups", "0,3/1,2", "--collective", "all_reduce,broadcast", "-r", "1"]
    stdout, cases = scan(tmp_path / "r.json", 4, *options)
    assert len(cases) == 2 * 2 * 2
    assert [case["ranks"] for case in cases[:2]] == [[0, 3], [1, 2]]
    assert {case["key"]["group"] for case in cases} == {"ranks 0,3", "ranks 1,2"}
    assert stdout.count("# all_reduce float32 sum, ranks 0,3 (2 ranks)\n") == 1
    assert {case["check"] for case in cases} == {"passed"}


def test_a_group_without_rank_0(tmp_path: Path) -> None:
    _, cases = scan(tmp_path / "r.json", 3, "--groups", "1,2")
    assert [case["ranks"] for case in cases] == [[1, 2], [1, 2]]
    assert {case["check"] for case in cases} == {"passed"}


def test_resume_measures_only_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    _, first = scan(path, 2, "-e", "64")
    stdout, cases = scan(path, 2, "--resume", "--collective", "all_reduce,barrier")
    assert cases[0] == first[0]
    assert len(cases) == 3
    assert sum(line.split()[:1] == ["64"] for line in stdout.splitlines()) == 1  # shown again


def test_min_busbw_fails_the_run(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    command = [*torchrun(2), COLLECTIVES, *QUICK, "--json", str(path)]
    done = run([*command, "--min-busbw", "1e9"])
    assert done.returncode == 1
    assert "under 0.9 of --min-busbw 1e+09" in done.stderr
    report = load(path)
    assert report["status"] == "failed"
    assert {case["check"] for case in report["cases"]} == {"passed"}
    assert run([*command, "--min-busbw", "1e-9"]).returncode == 0


def test_check_off_and_cold_buffers(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    command = [option for option in QUICK if option != "--cache-warm"]
    done = run([*torchrun(2), COLLECTIVES, *command, "--json", str(path), "-c", "0"])
    assert done.returncode == 0, done.stderr
    stdout, cases = done.stdout, load(path)["cases"]
    assert {case["check"] for case in cases} == {"skipped: -c 0"}
    assert "in_place_wrong" not in cases[0]["metrics"]
    row = next(line for line in stdout.splitlines() if line.split()[:1] == ["64"])
    assert row.split()[8] == "N/A"
