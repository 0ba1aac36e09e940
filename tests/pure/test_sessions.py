"""analysis/runs/sessions.py: runs less than an hour apart are one session, and one session against
a baseline of nights is one observation."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from analysis.runs.load import load
from analysis.runs.sessions import sessions_of
from analysis.runs.verdicts import Design, compare
from tests.pure.reports import case, run, write

# 14 nights with a mean of ln(100 ms) and a standard deviation of 0.03: 0.03 * sqrt(13 / 14)
NIGHTS = [math.exp((-1) ** night * 0.028909) for night in range(14)]
STEP = ("--step", r"took ([\d.]+) ms")


def written(folder: Path, times: Sequence[tuple[str, float]], is_log: bool) -> str:
    """A run of 5 steps for each start and factor: a log, or a report. All samples differ."""
    for number, (start, factor) in enumerate(times):
        steps = [0.1 * factor * (1 + 1e-5 * (number + 1) * i) for i in range(-2, 3)]
        name = f"{number:02}"
        if is_log:
            folder.mkdir(parents=True, exist_ok=True)
            text = "".join(f"took {1000 * step:.6f} ms\n" for step in steps)
            (folder / f"{name}.log").write_text(text)
        else:
            write(folder / f"{name}.jsonl", case("step", steps), started_at=start)
    return str(folder)


def at(day: int, minute: int = 0) -> str:
    return f"2026-01-{day + 1:02}T03:{minute:02}:00+00:00"


@pytest.mark.parametrize("is_log", [False, True])
@pytest.mark.parametrize(
    ("tonight", "status", "verdict", "ends"),
    [
        # t(13) = 2.1604 at 97.5%, so exp(ln 1.12 +- 2.1604 * 0.03 * sqrt(1 + 1 / 14))
        ([1.12], 1, "slower", "1.047 to 1.198"),
        # three runs of one night are one observation: their geometric mean is 1.12
        ([1.117, 1.12, 1.12**2 / 1.117], 1, "slower", "1.047 to 1.198"),
        # the runs of an ordinary night agree to 0.1%, and differ by 5% from the mean of nights
        ([1.05, 1.051, 1.05**2 / 1.051], 4, "undecided", "0.9819 to 1.123"),
        ([0.88], 0, "faster", "0.8229 to 0.9411"),
    ],
)
def test_one_night_against_14(
    tmp_path: Path, is_log: bool, tonight: list[float], status: int, verdict: str, ends: str
) -> None:
    base = [(at(night), factor) for night, factor in enumerate(NIGHTS)]
    test = [(at(14, 9 * number), factor) for number, factor in enumerate(tonight)]
    sides = [written(tmp_path / name, times, is_log) for name, times in (("a", base), ("b", test))]
    words = ("compare.py", sides[0], "--test", sides[1], *STEP * is_log, "--fail-on", "slower")
    done = run(*words)
    assert (done.returncode, done.stderr) == (status, "")
    row = next(line for line in done.stdout.splitlines() if line.startswith("step "))
    about = "one session, starts unknown, load not recorded" if is_log else "one session"
    is_called = verdict != "undecided"
    assert row.endswith(f"  {ends}  {verdict}" + f" [{about}]" * is_called)
    assert "unit of observation: the session\n" in done.stdout
    assert ("the starts of the runs are unknown" in done.stdout) == is_log
    assert "started before all of the other" not in done.stdout
    swapped = run("compare.py", sides[1], "--test", sides[0], *words[4:])
    assert swapped.returncode == {1: 0, 0: 1, 4: 4}[status]


def test_fewer_than_six_sessions(tmp_path: Path) -> None:
    """The unit is the run, and a line says what is missing. With one run beside five nights there
    is no verdict, and its interval is in brackets: the nights' mean is 0.0057818, their standard
    deviation 0.031668, so exp(ln 1.5 - 0.0057818 +- 2.7764 * 0.031668 * sqrt(1.2))."""
    nights = written(tmp_path / "a", [(at(night), f) for night, f in enumerate(NIGHTS[:5])], False)
    one = written(tmp_path / "b", [(at(9), 1.5)], False)
    two = written(tmp_path / "c", [(at(9, 1), 1.51), (at(9, 30), 1.52)], False)
    lacks = "the intervals do not include the scatter between sessions; this requires 6 sessions of"
    shown = run("compare.py", nights, "--test", one).stdout
    need = "a verdict requires 6 sessions of BASE, at different times, but there are 5"
    assert f"# 1 case, undecided: TEST has one usable run, and {need}\n" in shown
    assert "  (1.354 to 1.642)  undecided\n" in shown
    assert lacks not in shown  # the reason says so
    shown = run("compare.py", two, "--test", one).stdout
    need = "a verdict requires 6 sessions of BASE, at different times, but there is 1"
    assert f"TEST has one usable run, and {need}\n" in shown
    shown = run("compare.py", nights, "--test", two).stdout
    assert "unit of observation: the run\n" in shown
    have = "# BASE is 5 sessions, and TEST 1 (runs of one host less than an hour apart)"
    assert f"{have}: {lacks}" in shown
    assert lacks not in run("compare.py", one, "--test", two, "--paired").stdout


def test_two_sessions_of_test_are_two_observations(tmp_path: Path) -> None:
    """Also for BASE: 8 runs of 6 nights are 6 observations. BASE's sessions are 0, 0, 0, 0, 0 and
    0.06 (the mean of 0.03, 0.06 and 0.09); TEST's are 0.2 and 0.24."""
    base = [(at(night), 1.0) for night in range(5)]
    base += [(at(5, m), math.exp(x)) for m, x in ((0, 0.03), (20, 0.06), (59, 0.09))]
    test = [(at(8), math.exp(0.19)), (at(8, 30), math.exp(0.21)), (at(9), math.exp(0.24))]
    before, after = (
        load([written(tmp_path / name, side, False)]) for name, side in (("a", base), ("b", test))
    )
    (found,) = compare(before, after, Design()).cases
    assert (found.unit, found.caveats) == ("session", [])
    assert found.base_units_s == pytest.approx([0.1] * 5 + [0.1 * math.exp(0.06)])
    assert found.ratio == pytest.approx(math.exp(0.22 - 0.01))
    # Welch: a = 0.0006 / 6, b = 0.0008 / 2; (a + b)^2 / (a^2 / 5 + b^2) = 1.543 degrees of freedom
    error = math.sqrt(0.0005)
    assert found.p == pytest.approx(0.02406, abs=2e-5)
    assert found.interval is not None
    low, high = found.interval
    assert low * high == pytest.approx(math.exp(2 * 0.21))
    assert math.log(high / low) / 2 == pytest.approx(5.7863 * error, rel=1e-3)


@pytest.mark.parametrize(
    ("runs", "groups", "is_known"),
    [
        ([("03:00", {}), ("03:59", {}), ("04:58", {})], [[0, 1, 2]], True),  # each gap counts
        ([("03:00", {}), ("04:00", {})], [[0], [1]], True),
        # the gap begins with the end of a run
        ([("03:00", {"end": "03:30"}), ("04:29", {})], [[0, 1]], True),
        ([("03:00", {"end": "02:00"}), ("04:00", {})], [[0], [1]], True),
        ([("03:00", {"host": "a"}), ("03:01", {"host": "b"})], [[0], [1]], True),
        ([("03:00", {}), ("05:30+02:00", {})], [[0, 1]], True),
        ([("03:00", {}), ("", {}), ("09:00", {})], [[0], [1], [2]], False),
    ],
)
def test_sessions(tmp_path: Path, runs: list[tuple[str, Any]], groups: Any, is_known: bool) -> None:
    side = []
    for number, (start, about) in enumerate(runs):
        text = start and f"2026-01-01T{start}" + (":00+00:00" if len(start) == 5 else "")
        hosts = {"hosts": [about.get("host", "vm")]}
        path = tmp_path / f"{number}.jsonl"
        (one,) = load([write(path, case("x"), started_at=text, environment=hosts)])
        end = f"2026-01-01T{about['end']}:00+00:00" if "end" in about else None
        one.ends = {one.started_at: {"finished_at": end}}
        side.append((one, next(iter(one.rows.values()))))
    assert sessions_of(side, range(len(side))) == (groups, is_known)
