"""analysis/runs/evidence.py: copied, failed, interrupted and disturbed runs are no evidence.

The gate, the table and the page agree about them."""

import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from analysis.compare import show
from analysis.runs.load import load
from analysis.runs.verdicts import Design, compare
from tests.pure.reports import case, run, runs, write
from tests.pure.tables import UNITS

FAILED = case("no ddp", check="failed: wrong average", samples_s={}, rounds=[])
BUSY: dict[str, Any] = {"others": [[1.9, 2]]}


def gate(base: str, test: str, *more: str) -> tuple[int, str]:
    """The exit status and the output of `--fail-on slower`."""
    done = run("compare.py", base, "--test", test, "--fail-on", "slower", *more)
    return done.returncode, done.stdout


def judged(folder: Path, base: list[float], test: list[float], *more: str, **about: Any) -> Any:
    """The same for runs of these seconds."""
    sides = runs(folder / "a", base, **about), runs(folder / "b", test, **about)
    return gate(*sides, *more)


def test_a_copied_run_does_not_count_twice(tmp_path: Path) -> None:
    """With two copies of each of two runs a side the interval would be 1.002 to 1.066."""
    for side, times in (("old", [1.0, 1.02]), ("new", [1.04, 1.06])):
        runs(tmp_path / side, times)
        for copy in ("1", "2"):
            shutil.copytree(tmp_path / side, tmp_path / copy)
            shutil.move(tmp_path / copy, tmp_path / side / copy)
    status, printed = gate(str(tmp_path / "old"), str(tmp_path / "new"))
    assert status == 4
    # two runs a side: exp(0.0389 +- 4.303 * 0.0137)
    row = r"no ddp +1.010 s +1.050 s +1.04x slower +0.97\d+ to 1.10\d+ +undecided"
    assert re.search(row, printed)
    assert re.search(r"# warning: left out: a copy of \S+old/00.jsonl: \S+/00.jsonl, \S+", printed)
    shutil.copytree(tmp_path / "old", tmp_path / "old again")
    assert gate(str(tmp_path / "old"), str(tmp_path / "old again"))[0] == 4


def test_a_copy_from_before_the_end_of_the_run(tmp_path: Path) -> None:
    """Copies without the last line come first, but the runs themselves count."""
    for side, number in itertools.product("ab", range(2)):
        path = Path(runs(tmp_path / side / f"{number} z", [1.0 + 0.001 * number])) / "00.jsonl"
        whole = path.read_text().splitlines(keepends=True)
        (tmp_path / side / f"{number} a.jsonl").write_text("".join(whole[:-1]))
    status, printed = gate(str(tmp_path / "a"), str(tmp_path / "b"))
    assert status == 0
    run_0, copy_0 = f"{tmp_path}/a/0 z/00.jsonl", f"{tmp_path}/a/0 a.jsonl"
    assert f"# warning: left out: a copy of {run_0}: {copy_0}" in printed


def test_pairs_of_copies_count_once(tmp_path: Path) -> None:
    begin = {"started_at": "2026-01-01T00:00:00+00:00"}
    base, test = (
        load([runs(tmp_path / f"{seconds}{i}", [seconds], **begin) for i in range(3)])
        for seconds in (1.0, 1.1)
    )
    text = show(compare(base, test, Design(paired=True, runs=3, allow_disturbed=True)))
    assert "3 usable pairs are needed, but there are 1" in text
    assert "left out: a copy of " in text


def test_runs_of_the_same_second_with_different_samples_are_two_runs(tmp_path: Path) -> None:
    sides = [1.0, 1.001, 1.002], [1.0005, 1.0015, 1.0025]
    assert judged(tmp_path, *sides, started_at="2026-01-01T00:00:00")[0] == 0


def test_runs_of_test_in_which_the_case_failed_or_is_missing(tmp_path: Path) -> None:
    base, test = runs(tmp_path / "a", [1.0, 1.001, 0.999, 1.0, 1.001, 0.999]), tmp_path / "b"
    for bad, count, fail_on, status, verdict in (
        # a case that failed in at least half of the runs of TEST fails every gate
        (FAILED, 4, "slower", 1, "failed"),
        (FAILED, 3, "faster", 1, "failed"),
        (FAILED, 2, "slower", 0, "same"),
        (case("another"), 4, "slower,missing", 1, "missing"),
        (case("another"), 4, "slower", 4, "missing"),
        (case("another"), 2, "slower", 0, "same"),  # `another` is new and does not count
    ):
        for i in range(6):
            write(test / f"{i}.jsonl", bad if i < count else case("no ddp", [1.000001]))
        done = run("compare.py", base, "--test", str(test), "--fail-on", fail_on)
        assert done.returncode == status, done.stdout
        assert re.search(rf"^no ddp .*\b{verdict}(?: \[one session\])?$", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("status", ["failed", None])
def test_a_run_that_did_not_end_normally_does_not_count(tmp_path: Path, status: str | None) -> None:
    """status: None for an interrupted run."""
    base = runs(tmp_path / "a", [1.0, 1.001, 0.999])
    test = runs(tmp_path / "b", [1.0, 1.001, 0.999], status=status)
    gave, printed = gate(base, test)
    assert gave == 4
    why = "the run failed" if status else "interrupted"
    assert f"# warning: left out: {why}: {test}/00.jsonl, {test}/01.jsonl" in printed
    page = tmp_path / "page.html"
    assert run("report.py", test, "-o", str(page)).returncode == 0
    assert f"Not used in comparisons: {why}: 00, 01, 02<" in page.read_text()


def test_an_interval_without_information_is_not_printed(tmp_path: Path) -> None:
    """104 and 832 ms compared with four runs of 100 ms: the interval is 2.3e-06 to 5.5e+05."""
    status, printed = judged(tmp_path, [0.1, 0.101, 0.099, 0.1], [0.104, 0.832])
    assert status == 4
    assert re.search(r"2.94x slower +no interval +undecided", printed)
    assert "more than 100 runs per side would be needed for +-2%; look for the cause" in printed
    assert "about half of the time" not in printed


def test_disturbed_runs_are_left_out(tmp_path: Path) -> None:
    """12 reports while another process uses 1.9 of 2 cores. TEST takes 1.12 times as long."""
    times = [1.0, 1.01, 0.99, 1.0, 1.01, 0.99]
    sides = tmp_path, times, [1.12 * time for time in times]
    status, printed = judged(*sides, **BUSY)
    assert status == 4
    assert "2 usable runs per side are needed, but there are 0 of BASE and 0 of TEST" in printed
    assert "\n# measure on an idle machine, or in pairs with ab.py; --allow-disturbed" in printed
    busy = r"# warning: left out: other processes used more than a tenth of the cores: \S+/00.jsonl"
    assert re.search(rf"{busy} \(1.9 of 2 cores\), \S+", printed)
    status, printed = judged(*sides, "--allow-disturbed", **BUSY)
    assert status == 1
    assert re.search(r"^no ddp .* slower \[disturbed runs allowed\]$", printed, re.MULTILINE)
    assert "used up to 1.9 of 2 cores in 12 of 12 runs: disturbed runs allowed" in printed
    status, printed = judged(tmp_path / "x", [1.0, 1.01, 0.99], [22.0, 22.2, 21.8], **BUSY)
    assert status == 1
    assert "slower: a change by a factor of more than 5, which load does not explain" in printed


def test_two_quiet_runs_a_side_are_enough(tmp_path: Path) -> None:
    """Runs are left out because of their load, never because of their time."""
    for side, times in (("a", [1.0, 1.001, 1.3]), ("b", [1.2, 1.201, 1.5])):
        for seconds in times:
            busy = 1.0 if seconds in (1.3, 1.5) else 0.2
            write(tmp_path / side / f"{seconds}.jsonl", case("x", [seconds]), others=[[busy, 2]])
    status, printed = gate(str(tmp_path / "a"), str(tmp_path / "b"))
    assert status == 1
    assert re.search(r"^x +1.000 s +1.200 s +1.20x slower .* slower$", printed, re.MULTILINE)


def test_a_pair_counts_if_both_runs_had_the_same_load(tmp_path: Path) -> None:
    for a, b, status in (
        ([[1.9, 2]], [[1.75, 2]], 1),  # disturbed, but similarly: they differ by 0.075 of the cores
        ([[0.0, 2]], [[0.2, 2]], 1),
        ([[0.0, 2]], [[0.21, 2]], 4),
        ([[1.0, 2], [0.0, 2]], [[0.0, 2], [1.0, 2]], 4),  # each node is compared with itself
        ([[1.0, 2], [0.0, 2]], [[1.0, 2], [0.0, 2]], 1),
        (None, [[1.0, 2]], 1),  # the verdict mentions that the load was not recorded
    ):
        times = [1.0, 1.01, 0.99, 1.0]
        base = runs(tmp_path / "a", times, others=a)
        test = runs(tmp_path / "b", [1.1 * time for time in times], others=b)
        for flag in ("--paired", "--interleaved"):
            gave, printed = gate(base, test, flag)
            assert gave == status
            if status == 4:
                assert "2 usable pairs are needed, but there are 0" in printed
                assert "\n# measure on an idle machine; --allow-disturbed keeps" in printed
                assert "loaded the two runs of a pair differently: " in printed
            else:
                assert ("slower [load not recorded" in printed) == (a is None)


def test_what_qualifies_the_smallest_change(tmp_path: Path) -> None:
    """Of a command and itself, if the two runs of each pair had different loads."""
    sides = [runs(tmp_path / "a", [1.0, 1.0]), runs(tmp_path / "b", [1.0, 2.0], others=[[1.0, 2]])]
    base, test = (load([side]) for side in sides)
    text = show(compare(base, test, Design(paired=True)), is_like_with_like=True)
    assert "\n# 1 case: 2 usable pairs are needed, but there are 0\n" in f"{text}\n"
    assert re.search(r"^no ddp .* no interval +>200%$", text, re.MULTILINE)
    allowed = Design(paired=True, allow_disturbed=True)
    text = show(compare(base, test, allowed), is_like_with_like=True)
    assert "detect it in 9 of 10 comparisons [disturbed runs allowed, 2 pairs]" in text
    assert "usable pairs" not in text


def test_loads_of_other_nodes_and_in_a_file_next_to_the_report(tmp_path: Path) -> None:
    """--interleave measures only the load of this machine."""
    about: dict[str, Any] = {"environment": {"torch": "2", "num_nodes": 2, "hosts": ["a", "b"]}}
    _, printed = judged(tmp_path, [1.0, 1.001, 0.999], [1.1, 1.101, 1.099], **about)
    assert "slower [load of other nodes not measured]" in printed
    path = Path(write(tmp_path / "01.jsonl", case("x"), others=None))
    assert load([str(path)])[0].loads == []
    (tmp_path / "01.load").write_text(json.dumps({"others": [[0.5, 2]]}))
    assert load([str(path)])[0].loads == [(0.5, 2)]
    write(path, case("x"), others=[[0.25, 2]])  # the report itself has precedence
    assert load([str(path)])[0].loads == [(0.25, 2)]
    for damaged in ("x", [["x", 2]], [[1, 0]], [[1]], 3):
        write(path, case("x"), others=damaged)
        assert load([str(path)])[0].loads == [(0.5, 2)]


def test_the_load_of_a_resumed_report(tmp_path: Path) -> None:
    """An interrupted run has no load, and the busiest run counts if any of its cases is left."""
    later = {"measured_at": "2026-01-02T03:04:05+00:00"}
    x, y, busy = case("x"), case("y", **later), {"status": "failed", "others": [[1.9, 2]]}
    for lines, others, loads in (
        ((x, y), [[0.0, 2]], []),
        ((x, busy, y), [[0.1, 2]], [(1.9, 2)]),
        ((x, busy, x | later), [[0.1, 2]], [(0.1, 2)]),  # nothing of the first run is left
        ((x, busy), None, [(1.9, 2)]),
        ((), None, []),
    ):
        (run,) = load([write(tmp_path / "01.jsonl", *lines, others=others)])
        assert run.loads == loads
    sides = []
    for side in "ab":
        for number in range(3):
            path = tmp_path / side / f"{number}.jsonl"
            write(path, case("x", [1.0 + 0.001 * number]), y)
        sides.append(str(tmp_path / side))
    assert re.search(r"^x .* same \[load not recorded\]$", gate(*sides)[1], re.MULTILINE)


ROW = re.compile(r"^(\S.*?) {2,}([\d.]+) (\w+) +([\d.]+) (\w+) +([\d.]+)x( slower| faster)?")


def test_a_printed_ratio_is_the_quotient_of_the_printed_times(tmp_path: Path) -> None:
    """Runs of 8 rounds of 3 on a machine that drifts and stutters. TEST has one round more."""
    for side, i in itertools.product("ab", range(5)):
        factor, count = (1.07, 9) if side == "b" else (1.0, 8)
        stutters = [2.5 if (7 * i + 3 * j) % 11 == 0 else 1.0 for j in range(3 * count)]
        drift = [1 + 0.2 * i + 0.03 * ((5 * j + i) % 7) for j in range(3 * count)]
        times = [17e-3 * factor * x * y for x, y in zip(stutters, drift, strict=True)]
        long, short = case("x", times, rounds=[3] * count), case("y", [9e-4 * factor * (1 + i / 9)])
        write(tmp_path / side / f"{i}.jsonl", long, short)
    base, test = (load([str(tmp_path / side)]) for side in "ab")
    for design in (Design(), Design(paired=True), Design(paired=True, interleaved=True)):
        text = show(compare(base, test, design))
        rows = [match for line in text.splitlines() if (match := ROW.match(line))]
        assert len(rows) == 2
        for row in rows:
            b, t = (float(row[i]) * UNITS[row[i + 1]] for i in (2, 4))
            quotient = t / b if row[7] == " slower" else b / t
            assert float(row[6]) == pytest.approx(quotient, abs=0.0051 + quotient * 1e-3)
            assert (t > b) == (row[7] == " slower")
        estimator = "# BASE and TEST: geometric means over runs; time of a run: "
        assert f"{estimator}geometric mean over rounds of block medians or median over" in text
