"""analysis/race.py: who is dropped, what is said, and small commands that write reports."""

import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

from analysis.race import Race, run_race, sentence
from analysis.verdicts import Design, Result
from tests.pure.reports import run
from tests.pure.test_ab import COMMAND
from tests.simulate_compare import compared, simulate, simulate_races

TIMES = {"a": 1.2, "b": 1.0, "c": 1.02, "d": 1.0}


def result_of(base: str, test: str, rounds: int) -> Result:
    """The true ratio, and an interval that becomes narrower from round to round."""
    ratio = TIMES[test] / TIMES[base]
    half = 1 + 0.2 / rounds
    low, high = ratio / half, ratio * half
    verdict = "same" if low > 0.98 and high < 1.02 else "undecided"
    return Result("x", {}, ratio=ratio, interval=(low, high), verdict=verdict)


def test_slower_arms_are_dropped_and_the_race_ends_early() -> None:
    runs: list[tuple[str, int]] = []

    def run_rounds(racing: list[str], rounds: range) -> None:
        runs.extend((name, number) for number in rounds for name in racing)

    race = run_race(list(TIMES), [2, 6, 12, 48], run_rounds, result_of)
    # a: 1.2 / 1.1 > 1 after 2 rounds; c: 1.02 / 1.0167 > 1 after 12, when b and d are the same
    assert race.rounds == {"a": 2, "b": 12, "c": 12, "d": 12}
    assert (race.best, race.dropped) == ("b", {"a": "b", "c": "b"})
    assert len(runs) == len(set(runs)) == sum(race.rounds.values())


def test_a_race_that_nobody_wins_ends_with_its_looks() -> None:
    race = run_race(["b", "c"], [2, 4], lambda racing, rounds: None, result_of)
    assert (race.rounds, race.dropped) == ({"b": 4, "c": 4}, {})


def test_the_sentence() -> None:
    race = Race("b", {}, dropped={"e": "d"})
    results = {
        "a": Result("", {}, ratio=1.123, interval=(1.0801, 1.171), verdict="slower"),
        "c": Result("", {}, ratio=1.01, interval=(0.98, 1.04), verdict="undecided"),
        "d": Result("", {}, ratio=1.001, interval=(0.99, 1.01), verdict="same"),
        "e": Result("", {}, ratio=1.05, interval=(0.99, 1.1), verdict="undecided"),
        "f": Result("", {}),
    }
    assert sentence(race, "b", results, 0.02) == (
        "best: b; f has no time to compare; d is the same within 2 %; "
        "c cannot be told apart from it; e was slower than d; "
        "a is 1.12 (1.08 to 1.17) times slower"
    )


@pytest.fixture
def arms(tmp_path: Path) -> list[str]:
    """One of three arms is 10 % slower; two have the same times."""
    (tmp_path / "fake.py").write_text(COMMAND)
    command = shlex.join([sys.executable, f"{tmp_path}/fake.py"])
    times = {"quick": 0.1, "slow": 0.11, "equal": 0.1}
    return [f"{name}={command} {seconds} x" for name, seconds in times.items()]


def test_a_race_of_commands(tmp_path: Path, arms: list[str]) -> None:
    flags = ["--arm", *arms, "--out", str(tmp_path / "out"), "--runs", "2", "--max-runs", "4"]
    done = run("race.py", *flags)
    assert done.returncode == 0, done.stderr
    assert "3 arms, 6 runs where 12 were allowed" in done.stdout
    said = done.stdout.splitlines()[-1]
    assert said == (
        "# best: quick; equal is the same within 2 %; slow is 1.1 (1.1 to 1.1) times slower"
    )
    assert re.search(r"^slow +2 +1\.1 +1\.1 to 1\.1$", done.stdout, re.M)
    (tmp_path / "out" / "slow" / "02.jsonl").unlink()
    again = run("race.py", *flags)
    assert again.stdout == done.stdout
    assert "round 1 of 4, 3 arms, is there already" in again.stderr
    assert "round 2 of 4, 3 arms, took" in again.stderr


def test_an_arm_whose_cases_fail(tmp_path: Path, arms: list[str]) -> None:
    """It has no time, so nothing is said of it but that."""
    code = COMMAND.replace('case = {"key"', 'case = {"check": "failed: no memory", "key"')
    (tmp_path / "fails.py").write_text(code)
    command = shlex.join([sys.executable, f"{tmp_path}/fails.py"])
    flags = ["--arm", arms[0], f"fails={command} 0.1 x", "--runs", "2", "--max-runs", "2"]
    done = run("race.py", *flags, "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("# best: quick; fails has no time to compare\n")
    assert re.search(r"^fails +2 +-$", done.stdout, re.M)


def test_arms_that_take_turns(tmp_path: Path, arms: list[str]) -> None:
    flags = ["--arm", *arms, "--out", str(tmp_path / "out"), "--runs", "2", "--max-runs", "2"]
    done = run("race.py", *flags, "--interleave")
    assert done.returncode == 0, done.stderr
    assert "their blocks took turns" in done.stdout
    order = (tmp_path / "out" / "order").read_text().split()[1::2]
    assert order == ["begins", "ends"] * (3 * 2 * 24)  # one works at a time


def test_arms_that_differ_in_variables(tmp_path: Path, arms: list[str]) -> None:
    command = arms[0].partition("=")[2]
    flags = ["--command", command, "--arm-env", "x=FAKE=1", "y=FAKE=2", "--runs", "2"]
    done = run("race.py", *flags, "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("# best: x; y is the same within 2 %\n")
    log = (tmp_path / "out" / "y" / "01.jsonl").read_text()
    assert '"FAKE": "2"' in log


def test_refusals(tmp_path: Path, arms: list[str]) -> None:
    out = ("--out", str(tmp_path / "out"))
    for words, message in (
        (["--arm", arms[0]], "expected two arms or more, got 1; e.g. --arm 1MB="),
        (["--arm", arms[0], arms[0]], "two arms are called quick"),
        (["--arm", "x y=z"], "expected NAME=COMMAND, the name without blanks, got 'x y=z'"),
        (["--arm", "x="], "expected NAME=COMMAND"),
        (["--arm-env", "x=y"], "expected NAME=VARIABLE=VALUE, got 'x=y'"),
        (["--arm-env", "x=FAKE=1"], "there is no --arm of this name, and no --command"),
        (["--arm", *arms, "-k", "other"], "-k: no case has 'other' in its name or key"),
    ):
        done = run("race.py", *words, *out)
        assert done.returncode == 2, words
        assert message in done.stderr, words
        assert done.stderr.count("error") == 1, done.stderr


@pytest.mark.parametrize("ratios", [(1.0, 1.0, 1.0, 1.1), (1.0, 1.0, 1.0, 1.0)])
def test_simulated_races(ratios: tuple[float, ...]) -> None:
    """tests/simulate_compare.py has more of them. At most 5 % of 100 races may err."""
    races = simulate_races(ratios, 100, np.random.default_rng(1))
    best = {f"arm {i}" for i, ratio in enumerate(ratios) if ratio == 1.0}
    assert sum(bool(best & race.dropped.keys()) for race in races) <= 5
    if ratios[-1] > 1:
        assert sum("arm 3" in race.dropped for race in races) >= 90
        assert all(race.best in best for race in races)


def test_simulated_comparisons() -> None:
    """What simulate_compare.py makes up are runs that compare() takes; 20 % slower shows."""
    rng = np.random.default_rng(1)
    base, test = simulate(2, 6, rng), 1.2 * simulate(2, 6, rng)
    comparison = compared(base, test, Design())
    assert [case.verdict for case in comparison.cases] == ["slower", "slower"]
