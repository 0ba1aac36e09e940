"""analysis/runs/duplicates.py: equal samples are one run, whatever the bytes, host or start."""

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.runs.duplicates import Samples, duplicates, pairs_in_common
from analysis.runs.load import load
from tests.process import ROOT
from tests.pure.reports import case, run, start, write

STEP = ("--step", r"took ([\d.]+)", "--unit", "ms")


def log_of(seed: int, level: float, count: int = 50) -> str:
    """A log of steps with three decimals."""
    rng = random.Random(seed)
    times = [level * (1 + rng.gauss(0, 0.01)) for _ in range(count)]
    return "".join(f"step {i} took {time:.3f} ms\n" for i, time in enumerate(times))


FIRST, SECOND = log_of(1, 10.0), log_of(2, 10.2)
LINES = FIRST.splitlines(True)


def with_decimals(text: str, decimals: int) -> str:
    return re.sub(r"took ([\d.]+)", lambda match: f"took {float(match[1]):.{decimals}f}", text)


def cut_off(text: str, decimals: int) -> str:
    return re.sub(rf"(\.\d{{{decimals}}})\d*", r"\1", text)


@pytest.mark.parametrize(
    ("copy", "left_out"),
    [
        ("".join(f"0: {line}\n" for line in FIRST.splitlines()), "a copy of 0.log: 2.log"),
        (FIRST.replace("\n", "\r\n"), "a copy of 0.log: 2.log"),
        ("".join(f"[1,0]<stdout>:{line} x\n" for line in FIRST.splitlines()), "0.log: 2.log"),
        (with_decimals(FIRST, 2), "a copy of 0.log: 2.log"),  # at the coarser resolution
        (with_decimals("".join(LINES[:9] + LINES[13:29] + LINES[35:]), 2), "0.log: 2.log"),
        (cut_off("".join(LINES[3:]), 2), "a copy of 0.log: 2.log"),
        ("".join(LINES[22:]) + log_of(5, 10.0, 20), "a copy of 0.log: 2.log"),  # its second part
        ("".join(LINES[27:]) + log_of(5, 10.0, 27), ""),  # less than half of it
        (FIRST + SECOND, "a copy of 0.log, 1.log: 2.log"),
        ("banner\n" + SECOND + FIRST, "a copy of 0.log, 1.log: 2.log"),
        ("".join(LINES[:40]), "a copy of 0.log: 2.log"),  # before the end
        ("".join(f"{i:6}\t{line}" for i, line in enumerate(LINES, 1)), "0.log: 2.log"),  # cat -n
        ("".join([*LINES[:9], LINES[9][:-6] + " ms\n", *LINES[10:]]), "0.log: 2.log"),  # torn
        ("".join(LINES[:20] + LINES[21:]), "a copy of 0.log: 2.log"),
        ("".join(LINES[:20] + LINES[19:]), "a copy of 2.log: 0.log"),  # it has one line more
        ("".join(LINES[::2]), "a copy of 0.log: 2.log"),
        ("".join(LINES[i ^ 1] for i in range(50)), "a copy of 0.log: 2.log"),  # of two ranks
        ("".join(sorted(LINES, key=lambda line: line.split()[3])), "a copy of 0.log: 2.log"),
        (FIRST + log_of(3, 10.0), "a copy of 2.log: 0.log"),  # 0.log is a part of 2.log
        (log_of(3, 10.0), ""),
        (FIRST.replace("took 10.", "took 10.1"), ""),
        ("".join(LINES[:20]) + log_of(4, 10.0, 30), ""),  # other samples for the most part
    ],
)
def test_a_third_log(
    tmp_path: Path, copy: str, left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("0", FIRST), ("1", SECOND), ("2", copy), ("x", log_of(8, 10.5))):
        Path(f"{name}.log").write_bytes(text.encode())
    Path("y.log").write_text(log_of(9, 10.6))
    words = ("0.log", "1.log", "2.log", "--test", "x.log", "y.log")
    found = re.findall("left out: (.*)", run("compare.py", *words, *STEP).stdout)
    assert (left_out in found[0] and len(found) == 1) if left_out else not found


COARSE = [f"took {random.Random(i).uniform(1.05, 1.45):.2f} ms\n" for i in range(300)]


def test_steps_with_few_digits() -> None:
    """Steps of 110 ms scatter by 0.1 ms: one decimal has about 1.2 bits, in 57 steps in order."""
    rng = np.random.default_rng(0)
    whole = np.round(110 * (1 + rng.uniform(-0.001, 0.001, 60)), 2)
    other = np.round(110 * (1 + rng.uniform(-0.001, 0.001, 60)), 2)
    for copy in (np.round(whole[3:] + 1e-9, 1), np.floor(whole[3:] * 10 + 1e-6) / 10):
        found = pairs_in_common([Samples(whole, 0.01), Samples(copy, 0.1), Samples(other, 0.01)])
        assert found == {frozenset((0, 1))}
    rng = np.random.default_rng(0)
    for _ in range(100):
        for kind, runs in steps_of(rng).items():
            assert not pairs_in_common(runs), kind


def test_equal_times_that_may_be_chance(tmp_path: Path) -> None:
    for text, is_copy in (
        # n different values: at most 4 of n (n - 1) / 2 pairs are equal, so each has 3.49 of 34.9
        # bits for n = 10, and 3.78 of 41.6 for n = 11
        ("".join(f"took {10 + i / 8} ms\n" for i in range(10)), False),
        ("".join(f"took {10 + i / 8} ms\n" for i in range(11)), True),
        # of runs with the same data, whose noise of 0.1% is an 8th of a digit, 85.9% of the samples
        # are equal: 0.219 bits each, 32.9 for 150 and 65.8 for 300
        ("".join(COARSE[:150]), False),
        ("".join(COARSE), True),
        ("took 0.33 ms\n" * 500, False),
        # every 10th step is longer, on an even machine
        (("took 0.33 ms\n" * 9 + "took 0.50 ms\n") * 100, False),
    ):
        for side in ("a0", "a1", "b0", "b1"):
            (tmp_path / f"{side}.log").write_text(f"{side}\n{text}")
        words = [f"{tmp_path}/a*", "--test", f"{tmp_path}/b*"]
        shown = run("compare.py", *words, *STEP).stdout
        assert ("left out: a copy of" in shown) == is_copy
        assert ("usable runs per side are needed" in shown) == is_copy


RNG = random.Random(5)
TIMES = [round(RNG.gauss(0.1, 0.001), 9) for _ in range(30)]


def test_a_report_written_again(tmp_path: Path) -> None:
    elsewhere = {"environment": {"hosts": ["another"]}}
    rows: Any = (
        (TIMES, {"started_at": "2026-03-01T00:00:00+00:00"}),
        (TIMES, elsewhere | {"started_at": "2026-03-01T00:00:00"}),
        (TIMES, {"environment": {}, "argv": ["x"]}),
        ([round(time, 6) for time in TIMES], elsewhere),
        *((TIMES[:7] + TIMES[8:], {}), (sorted(TIMES), {}), ([TIMES[0] + 1e-6, *TIMES[1:]], {})),
        ([time * (1 + 1e-8) for time in TIMES], {}),  # from a 32-bit number
    )
    for times, about in rows:
        write(tmp_path / "1.jsonl", case("x", TIMES))
        write(tmp_path / "2.jsonl", case("x", times), **{"started_at": start(3)} | about)
        write(tmp_path / "3.jsonl", case("x", [time * 1.001 for time in TIMES]))
        loaded = load([str(tmp_path)])
        (copy,) = duplicates([(one, next(iter(one.rows.values()))) for one in loaded])
        assert Path(loaded[copy].label).stem in "12"


def steps_of(rng: np.random.Generator) -> dict[str, list[Samples]]:
    """By kind of program: four runs, two of which are twice as fast."""
    count = int(rng.choice([12, 30, 50, 200]))
    same_data = rng.uniform(0.5, 1.5, count)
    runs: dict[str, list[Samples]] = {}
    for factor in (1.0, 1.0, 0.5, 0.5):
        noise = 1 + rng.normal(0, 0.001, count)
        for kind, times in {
            "constant": noise,
            "few values": rng.choice([0.8, 1.0, 1.03, 3.0], count, p=[0.05, 0.6, 0.25, 0.1]),
            "scattered": 1 + rng.normal(0, 0.05, count),
            "the same data": same_data * noise,
            "every 10th step is longer": np.where(np.arange(count) % 10, 1, 1.7) * noise,
            "slower and slower": np.linspace(1, 1.5, count) * noise,
        }.items():
            samples = Samples(np.round(1.23 * factor * times, 2), 0.01)
            runs.setdefault(kind, []).append(samples)
    return runs


def test_only_the_copied_cases_are_left_out(tmp_path: Path) -> None:
    """A resumed report that has one of three cases in common with the other one."""
    names = ("x", "y", "z")
    cases = [case(name, TIMES, metrics={}) for name in names]
    other = [case(name, [time * 1.01 for time in TIMES], metrics={}) for name in names[1:]]
    old = write(tmp_path / "old.jsonl", *cases)
    new = write(tmp_path / "new.jsonl", cases[0], *other)
    shown = run("compare.py", old, "--test", new).stdout
    assert f"# warning: left out: a copy of {old}: {new} (x)\n" in shown
    assert re.search(r"^y .* 1\.01x slower", shown, re.MULTILINE)
    page = tmp_path / "page.html"
    assert run("report.py", old, new, "-o", str(page)).returncode == 0
    assert "Not used in comparisons: a copy of old: new (x)<" in page.read_text()


def test_logs_of_nccl_tests_have_one_time_per_case(tmp_path: Path) -> None:
    """The 14 times of 7 sizes have 73 bits, and those of 3 sizes 37: too little."""
    text = (ROOT / "tests" / "logs" / "all_reduce_base.log").read_text()
    (row,) = re.findall(r"^ +1024 .*\n", text, re.MULTILINE)
    more = []
    for n in map(str, range(21, 25)):
        larger = row.replace("1024 ", f"{4 * int(n)} ").replace(" 256 ", f" {n} ")
        more.append(larger.replace("20.", f"{n}."))
    paths = [tmp_path / name for name in ("1.log", "2.log")]
    for whole, is_copy in ((text, False), (text.replace(row, "".join([*more, row])), True)):
        paths[0].write_text(whole)
        paths[1].write_text("".join(f"0: {line}\n" for line in whole.splitlines()))
        shown = run("compare.py", str(paths[0]), "--test", str(paths[1])).stdout
        assert (f"left out: a copy of {paths[0]}: {paths[1]}\n" in shown) == is_copy
    for right, wrong, is_copy in (("20.04", "20.05", True), (" 2", " 3", False)):
        paths[1].write_text(whole.replace(right, wrong))
        shown = run("compare.py", str(paths[0]), "--test", str(paths[1])).stdout
        assert ("left out" in shown) == is_copy
