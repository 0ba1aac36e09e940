"""`--format json` of compare.py and ab.py has every number of the table, and the runs behind it."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from analysis.compare import as_pair
from analysis.runs import as_json
from analysis.runs.verdicts import Comparison, Design, Result
from tests.pure.reports import ROOT, alike, case, run, runs, start, write
from tests.pure.tables import check_pair


def document(*words: str) -> tuple[dict[str, Any], str]:
    """The JSON document that compare.py prints for two folders, and the table, which agrees."""
    done, table = run("compare.py", *words, "--format", "json"), run("compare.py", *words)
    content = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (content["status"], "")
    assert table.returncode == done.returncode
    assert content["schema"] == as_json.SCHEMA
    check_pair(content["pairs"][0], table.stdout)
    return content, table.stdout


def two_sides(folder: Path) -> tuple[str, ...]:
    """Six runs a side of three cases: one is equal, one 10% slower, one fails or is missing.
    BASE 5 is a copy of BASE 4, BASE 6 was disturbed, and TEST 6 was interrupted."""
    failed: dict[str, Any] = {"check": "failed: out of memory", "samples_s": {}, "rounds": []}
    for side, factor, torch in (("a", 1.0, "2.14"), ("b", 1.1, "2.15")):
        equal, changed = alike(6, 0.1, 1 + (side == "b"), 0.002), alike(6, 2e-4, 3, 0.01)
        for i in range(6):
            cases = [case("equal", [equal[i]] * 5), case("slower", [changed[i] * factor] * 5)]
            if side == "a" or i < 4:
                cases.append(case("fails", [1.0] * 5, **(failed if side == "b" else {})))
            about: dict[str, Any] = {"environment": {"torch": torch, "hosts": ["vm"]}}
            about |= {"others": [[1.5, 2]]} if (side, i) == ("a", 4) else {}
            about |= {"status": None} if (side, i) == ("b", 5) else {}
            write(folder / side / f"{i}.jsonl", *cases, started_at=start(i), **about)
    (folder / "a" / "5.jsonl").write_bytes((folder / "a" / "3.jsonl").read_bytes())
    return str(folder / "a"), "--test", str(folder / "b"), "--margin", "3%"


def test_some_runs_of_both_sides_do_not_count(tmp_path: Path) -> None:
    words = two_sides(tmp_path)
    content, table = document(*words, "--fail-on", "slower,faster")
    (pair,) = content["pairs"]
    assert (pair["base"], pair["test"]) == ("BASE", "TEST")
    verdicts = {row["case"]: row["verdict"] for row in pair["cases"]}
    assert verdicts == {"equal": "same", "slower": "slower", "fails": "failed"}
    equal, _, fails = pair["cases"]
    whys = {Path(one["run"]).stem + one["side"][0]: one["why"] for one in equal["runs"]}
    assert {name: why for name, why in whys.items() if why} == {
        "4b": "other processes used more than a tenth of the cores: 1.5 of 2 cores",
        "5b": f"a copy of {tmp_path}/a/3.jsonl",
        "5t": "interrupted",
    }
    of_test = [one["why"] for one in fails["runs"] if one["side"] == "test"]
    assert of_test == ["failed: out of memory"] * 4 + ["not measured", "interrupted"]
    outcome = {"outcome": "failed", "why": "1 slower, 1 failed"}
    assert content["gate"] == {"fail_on": ["slower", "faster"], **outcome}
    assert content["status"] == 1
    assert [one["load"] for one in pair["runs"]["base"]].count([1.5, 2]) == 1
    content, table = document(*words)  # without a gate
    assert (content["gate"], content["status"]) == (None, 0)
    assert "--fail-on" not in table


def test_too_few_runs_and_pairs(tmp_path: Path) -> None:
    """Few or scattered runs have no interval. Pairs with different loads do not count."""
    a, b = runs(tmp_path / "a", [0.1, 0.4]), runs(tmp_path / "b", [0.3])
    write(tmp_path / "b" / "1.jsonl", case("no ddp"), others=[[1.0, 2]], started_at=start(1))
    content, _ = document(f"{a}/00.jsonl", "--test", f"{b}/00.jsonl")
    assert content["pairs"][0]["cases"][0]["interval"] is None
    content, table = document(a, "--test", b, "--allow-disturbed")
    assert "no interval" in table
    (row,) = content["pairs"][0]["cases"]
    assert (row["interval"], row["caveats"]) == (None, ["disturbed runs allowed"])
    content, _ = document(a, "--test", b, "--paired", "--fail-on", "slower")
    (row,) = content["pairs"][0]["cases"]
    why = "other processes loaded the two runs of a pair differently: "
    why += "0 of 2 cores and 1 of 2 cores"
    counts = [(one["counts"], one["why"]) for one in row["runs"]]
    assert counts == [(True, None), (False, why)] * 2
    assert all(one["time_s"] for one in row["runs"])  # too few count, so all are shown
    assert (content["status"], content["gate"]["outcome"]) == (4, "no verdict")


def test_a_run_whose_pair_does_not_count(tmp_path: Path) -> None:
    for side, i in itertools.product("ab", range(3)):
        failed = {"check": "failed: x", "samples_s": {}} if (side, i) == ("b", 1) else {}
        lines = [case("x", [0.1 + 0.001 * i] * 5, **failed), case("y", [0.1] * 5)]
        write(tmp_path / side / f"{i}.jsonl", *lines, started_at=start(i))
    content, _ = document(f"{tmp_path}/a", "--test", f"{tmp_path}/b", "--paired")
    runs = content["pairs"][0]["cases"][0]["runs"]
    other = f"the other run of its pair, {tmp_path}/b/1.jsonl, does not count"
    assert [one["why"] for one in runs] == [None, other, None, None, "failed: x", None]


def test_a_case_has_the_runs_of_its_benchmark(tmp_path: Path) -> None:
    """Reports of two benchmarks alternate in time. The first run of `y` in TEST was interrupted."""
    for side, i in itertools.product("ab", range(6)):
        about: dict[str, Any] = {"benchmark": "xy"[i % 2], "started_at": start(i)}
        about |= {"status": None} if (side, i) == ("b", 1) else {}
        write(tmp_path / side / f"{i}.jsonl", case("step", [0.1 * (1 + i % 2)] * 5), **about)
    done = run("compare.py", f"{tmp_path}/a", "--test", f"{tmp_path}/b", "--format", "json")
    (pair,) = json.loads(done.stdout)["pairs"]
    assert [one["benchmark"] for one in pair["cases"]] == ["x", "y"]
    for row, seconds, numbers in zip(pair["cases"], (0.1, 0.2), ("024", "135"), strict=True):
        paths = [str(tmp_path / side / f"{i}.jsonl") for side in "ab" for i in numbers]
        assert [one["run"] for one in row["runs"]] == paths
        counted = [one["time_s"] for one in row["runs"] if one["counts"]]
        assert counted == pytest.approx([seconds] * len(counted))
    whys = [one["why"] for one in pair["cases"][1]["runs"]]
    assert whys == [None] * 3 + ["interrupted", None, None]


def test_nan_is_null() -> None:
    result = Result("x", {"n": 1}, "x", p=float("nan"), ratio=1.0, interval=(1.0, 1.0))
    comparison = Comparison([result], None, [], [], [], [], Design())
    text = as_json.document([as_pair(comparison, "a", "b")], status=0)
    (row,) = json.loads(text, parse_constant=pytest.fail)["pairs"][0]["cases"]
    assert (row["p"], row["interval"], row["base_s"]) == (None, [1.0, 1.0], None)


def test_the_page_describes_every_entry(tmp_path: Path) -> None:
    """And no entry that does not exist."""
    page = (ROOT / "docs" / "ci.md").read_text()
    tables = re.findall(r"^\| entry \| content \|\n\|---\|---\|\n((?:\|.*\n)+)", page, re.MULTILINE)
    first_cells = re.findall(r"^\| (.*?) \|", "".join(tables), re.MULTILINE)
    named = set(re.findall(r"`(\w+)`", "".join(first_cells)))
    content, _ = document(*two_sides(tmp_path), "--fail-on", "slower")
    (pair,) = content["pairs"]
    case = pair["cases"][0]
    assert named == {*content, *pair, *case}
    assert pair["mean"].keys() == case.keys() - {"runs"}
    inner = [content["gate"], pair["design"], pair["runs"]["base"][0], case["runs"][0]]
    for entries in (*inner, pair["environment"][0]):
        assert [name for name in entries if f"`{name}`" not in page] == []
