"""analysis/ab.py with small python commands that write reports, in turn or taking turns."""

import contextlib
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from analysis.ab import Race, planned_looks, sentence, show_race
from analysis.verdicts import Comparison, Design, Result, persists
from common.report import load
from tests.pure.reports import ROOT, run

# writes a report of 24 blocks to --json; takes its turns where there are any
COMMAND = """
import json, os, subprocess, sys, time
seconds, mode = float(sys.argv[1]), sys.argv[2]
path = sys.argv[sys.argv.index("--json") + 1]
number = int(os.path.basename(path)[:2])
folder = os.path.dirname(os.path.abspath(sys.argv[0]))
lines = [
    {"schema": "torchrun-bench/3", "benchmark": "fake", "argv": sys.argv,
     "started_at": f"2026-01-01T{number:02}:00:00+00:00",
     "environment": {"variables": {"FAKE": os.environ.get("FAKE", "unset")},
                     "torch": "3" if os.path.exists(f"{folder}/upgraded") else "2"}}]
if mode == "hang":
    time.sleep(1000)
if mode == "leave":
    code = "import os, time; os.fork() and os._exit(0); time.sleep(1000)"
    subprocess.run([sys.executable, "-c", code, folder], start_new_session=True)
if mode == "fail":
    print("a reason to fail")
    sys.exit(7)
pipes = os.environ.get("TORCHRUN_BENCH_TURN", "")
if pipes and mode != "no turns":
    grant, release = (os.open(p, f) for p, f in zip(pipes.split(":"), (os.O_RDONLY, os.O_WRONLY)))
    os.read(grant, 1)
log = open(os.path.dirname(os.path.dirname(path)) + "/order", "a")
times = []
for block in range(12 if mode == "short" else 24):
    print(sys.argv[1], "begins", file=log, flush=True)
    times += [seconds * (1 + 0.001 * ((7 * number + block) % 5))] * 2
    print(sys.argv[1], "ends", file=log, flush=True)
    if mode == "dies" and block == 3:
        os._exit(9)
    if pipes and mode not in ("no turns", "one turn"):
        os.write(release, b".")
        if not os.read(grant, 1):
            sys.exit("nobody hands out turns")
rounds = [2] * (len(times) // 2)
case = {"key": {"n": 1}, "name": "x", "ranks": [0], "rounds": rounds}
case["samples_s"] = {"step": [times]}
lines += [case, {"status": "complete", "finished_at": "2026-01-01"}]
with open(path, "w") as file:
    file.write("".join(json.dumps(line) + "\\n" for line in lines))
"""


@pytest.fixture
def sides(tmp_path: Path) -> Path:
    (tmp_path / "fake.py").write_text(COMMAND)
    return tmp_path


def words_of(folder: Path, a: str, b: str, *more: str) -> list[str]:
    command = shlex.join([sys.executable, f"{folder}/fake.py"])
    return ["--a", f"{command} {a}", "--b", f"{command} {b}", "--out", str(folder / "out"), *more]


def test_abba_and_resume(sides: Path) -> None:
    more = ("--runs", "3", "--b-env", "FAKE=B")
    done = run("ab.py", *words_of(sides, "0.1 x", "0.11 x", *more))
    assert done.returncode == 0, done.stderr
    assert "1.10x slower" in done.stdout
    assert "# environment: variables.FAKE: unset in BASE, B in TEST" in done.stdout
    order = (sides / "out" / "order").read_text().split()[0::2]
    assert order == [*["0.1"] * 48, *["0.11"] * 96, *["0.1"] * 96, *["0.11"] * 48]  # AB BA AB
    (sides / "out" / "b" / "02.jsonl").unlink()
    again = run("ab.py", *words_of(sides, "0.1 x", "0.11 x", *more))
    assert again.stdout == done.stdout
    assert "pair 1 of 3 is there already" in again.stderr
    assert "pair 2 of 3 took" in again.stderr
    assert len((sides / "out" / "order").read_text().split()[0::2]) == 288 + 48
    other = run("ab.py", *words_of(sides, "0.1 x", "0.12 x", *more))
    assert other.returncode == 2
    assert "fake.py 0.11 x, this run " in other.stderr
    assert "give another --out" in other.stderr


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a/01.jsonl", "my notes", "a holds 01.jsonl, of no plan of this program"),
        ("plan.txt", "milk, bread", "plan.txt is no plan of this program"),
        ("plan.txt", "[" * 100_000, "plan.txt is no plan of this program"),
        ("plan.txt", '{"command a": "another"}', "plan.txt has command a another, this run "),
    ],
)
def test_a_folder_with_files_of_others_is_refused(
    sides: Path, name: str, text: str, words: str
) -> None:
    planted = sides / "out" / name
    planted.parent.mkdir(parents=True, exist_ok=True)
    planted.write_text(text)
    done = run("ab.py", *words_of(sides, "0.1 x", "0.1 x", "--runs", "2"))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert words in done.stderr
    assert "give another --out" in done.stderr
    assert planted.read_text() == text


def test_runs_of_a_command_in_another_environment_do_not_count(sides: Path) -> None:
    flags = words_of(sides, "0.1 x", "0.1 x", "--runs", "2")
    assert run("ab.py", *flags).returncode == 0
    (sides / "upgraded").touch()
    for name, other in (("a/01", "a/02"), ("b/02", "b/01")):
        (sides / "out" / f"{name}.jsonl").rename(sides / "kept")
        done = run("ab.py", *flags)
        assert done.returncode == 1
        assert f"{other}.jsonl has torch 2, this run 3: not of one kind" in done.stderr
        (sides / "kept").rename(sides / "out" / f"{name}.jsonl")


def test_secrets_stay_out_of_the_plan(sides: Path) -> None:
    flags = words_of(sides, "0.1 x", "0.1 x", "--runs", "2", "--b-env", "HF_TOKEN=hunter2")
    assert run("ab.py", *flags).returncode == 0
    plan = (sides / "out" / "plan.txt").read_text()
    assert ("HF_TOKEN" in plan, "hunter2" in plan) == (True, False)


def test_processes_that_a_command_leaves_are_ended(sides: Path) -> None:
    """They are in a session of their own, and their parent is gone."""
    mine = psutil.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    try:
        done = run("ab.py", *words_of(sides, "0.1 leave", "0.1 x", "--runs", "2"))
        assert done.returncode == 0, done.stderr
        alive = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]
        assert not any(str(sides) in str(words) for words in alive)
        assert mine.is_running()  # it was there before
    finally:
        mine.kill()
        mine.wait(10)


def test_a_against_a(sides: Path) -> None:
    """What so many runs can show."""
    flags = words_of(sides, "0.1 x", "", "--runs", "4")
    place = flags.index("--b")
    del flags[place : place + 2]
    done = run("ab.py", *flags)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^case +BASE .* interval +smallest change\n", done.stdout, re.M)
    assert "# smallest change: 4 runs a side show it in 9 of 10 comparisons" in done.stdout
    document = json.loads(run("ab.py", *flags, "--format", "json").stdout)
    (only,) = document["cases"]
    assert only["base_s"] == only["test_s"]  # the fake times depend on the round alone
    assert only["smallest_change"] == 0


def several(folder: Path, *more: str) -> list[str]:
    """One of three commands is 10 % slower; two have the same times."""
    command = shlex.join([sys.executable, f"{folder}/fake.py"])
    texts = [f"slow={command} 0.11 x", f"equal={command} 0.1 x"]
    return ["--a", f"quick={command} 0.1 x", "--b", *texts, "--out", str(folder / "out"), *more]


def test_several_commands(sides: Path) -> None:
    flags = several(sides, "--runs", "2", "--max-runs", "4")
    done = run("ab.py", *flags)
    assert done.returncode == 0, done.stderr
    assert "# torchrun-bench ab: 3 commands, 6 runs\n" in done.stdout
    said = done.stdout.splitlines()[-1]
    assert said == (
        "# best: quick; equal is the same within 2 %; slow is 1.1 (1.1 to 1.1) times slower"
    )
    assert re.search(r"^slow +2 +x +1\.1 +1\.1 to 1\.1 +slower$", done.stdout, re.M)
    (sides / "out" / "slow" / "02.jsonl").unlink()
    again = run("ab.py", *flags)
    assert again.stdout == done.stdout
    assert "round 1 of 4, 3 commands, is there already" in again.stderr
    assert "round 2 of 4, 3 commands, took" in again.stderr
    markdown = run("ab.py", *flags, "--format", "markdown").stdout
    assert re.search(r"^\| slow +\| +2 \| x ", markdown, re.M)
    documents = json.loads(run("ab.py", *flags, "--format", "json").stdout)
    assert [document["cases"][0]["verdict"] for document in documents] == ["same", "slower"]


def test_several_commands_that_take_turns(sides: Path) -> None:
    done = run("ab.py", *several(sides, "--runs", "2", "--max-runs", "2", "--interleave"))
    assert done.returncode == 0, done.stderr
    assert "their blocks took turns" in done.stdout
    order = (sides / "out" / "order").read_text().split()[1::2]
    assert order == ["begins", "ends"] * (3 * 2 * 24)  # one works at a time


TIMES = {"a": 1.2, "b": 1.0, "c": 1.02, "d": 1.0}


def narrowing(base: str, test: str, rounds: int) -> Result:
    """The true ratio, and an interval that becomes narrower from round to round."""
    ratio = TIMES[test] / TIMES[base]
    half = 1 + 0.2 / rounds
    low, high = ratio / half, ratio * half
    verdict = "same" if low > 0.98 and high < 1.02 else "undecided"
    return Result("x", {}, ratio=ratio, interval=(low, high), verdict=verdict)


def test_slower_commands_are_dropped_and_the_race_ends_early() -> None:
    race = Race(list(TIMES))
    # a: 1.2 / 1.1 > 1 after 2 rounds; c: 1.02 / 1.0167 > 1 after 12, when b and d are the same
    assert [race.look(rounds, narrowing) for rounds in (2, 6, 12)] == [False, False, True]
    assert race.rounds == {"a": 2, "b": 12, "c": 12, "d": 12}
    assert (race.best, race.lost_to, race.racing) == ("b", {"a": "b", "c": "b"}, ["b", "d"])


def test_a_level_that_persists_over_rounds_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """r at lag 1 of 1, 1, 1, -1, -1, -1 is 3 / 6; 1.645 / sqrt(6) - 1 / 6 = 0.505; of 8: 0.457."""
    level = [math.exp(x) for x in (1, 1, 1, 1, -1, -1, -1, -1)]  # 5 / 8
    assert persists(level)
    assert not persists([math.exp(x) for x in (1, 1, 1, -1, -1, -1)])
    assert not persists([1.1] * 8)
    assert not persists([2, 1, 2, 1])
    results = {"b": Result("x", {}, pair_ratios=level), "c": Result("x", {}, pair_ratios=[1.1] * 8)}
    race = Race(["a", "b", "c"])

    def compared(base: str, test: str, rounds: int) -> Comparison:
        return Comparison([results[test]], None, [], [], [], [], Design())

    show_race(race, compared, Namespace(format="table", interleave=False, margin=0.02))
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("# warning: b against a: a level that persists over rounds; ")


def test_the_sentence() -> None:
    race = Race(["b"])
    race.lost_to = {"e": "d"}
    results = {
        "f": Result("", {}),
        "d": Result("", {}, ratio=1.001, interval=(0.99, 1.01), verdict="same"),
        "c": Result("", {}, ratio=1.01, interval=(0.98, 1.04), verdict="undecided"),
        "e": Result("", {}, ratio=1.05, interval=(0.99, 1.1), verdict="undecided"),
        "a": Result("", {}, ratio=1.123, interval=(1.0801, 1.171), verdict="slower"),
    }
    assert sentence(race, results, 0.02) == (
        "best: b; f has no time to compare; d is the same within 2 %; "
        "c cannot be told apart from it; e was slower than d; "
        "a is 1.12 (1.08 to 1.17) times slower"
    )


def test_commands_that_take_turns(sides: Path) -> None:
    done = run("ab.py", *words_of(sides, "0.1 x", "0.11 x", "--runs", "2", "--interleave"))
    assert done.returncode == 0, done.stderr
    assert "their blocks took turns" in done.stdout
    shorter = words_of(sides, "0.1 x", "0.11 short", "--runs", "2", "--interleave")
    shorter[shorter.index("--out") + 1] += " 2"  # the other one goes on alone
    assert run("ab.py", *shorter).returncode == 0
    lines = (sides / "out" / "order").read_text().splitlines()
    first = lines[: len(lines) // 2]  # of the first pair: one works at a time, in strict turn
    assert first == ["0.1 begins", "0.1 ends", "0.11 begins", "0.11 ends"] * 24


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("dies", "b 1: exit status 9; "),
        ("fail", "a reason to fail"),
        ("no turns", "took no turns; only this project's scripts can"),
        ("one turn", "took no turns; only this project's scripts can, where rank 0 times steps"),
    ],
)
def test_a_command_that_fails_ends_the_pair(sides: Path, mode: str, message: str) -> None:
    done = run("ab.py", *words_of(sides, "0.1 x", f"0.1 '{mode}'", "--interleave"))
    assert done.returncode == 1
    assert message in done.stderr
    assert "the same command goes on" in done.stderr


def start(*flags: str, **variables: str) -> psutil.Popen:
    """ab.py as a process of its own."""
    command = [sys.executable, str(ROOT / "analysis/ab.py"), *flags]
    environment = os.environ | variables
    return psutil.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)


def wait_for(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_within_a_run_leaves_no_process(sides: Path, name: str) -> None:
    number = signal.Signals[name]
    process = start(*words_of(sides, "0.1 hang", "0.1 hang", "--interleave"))
    wait_for(lambda: len(process.children()) == 2)
    started = process.children()
    process.send_signal(number)
    assert process.stderr.readline() == "ab.py: interrupted\n"
    with contextlib.suppress(psutil.NoSuchProcess):  # it may have ended
        process.send_signal(signal.SIGTERM)  # a second one changes nothing
    assert process.wait(30) == 128 + number
    errors = process.stderr.read()
    process.stderr.close()
    assert errors == "the finished runs are kept; the same command goes on\n"
    assert not any(child.is_running() for child in started)


def test_a_signal_between_runs_keeps_the_reports(sides: Path) -> None:
    flags = words_of(sides, "0.1 x", "0.11 x", "--runs", "20")
    process = start(*flags)
    assert process.stderr.readline().startswith("pair 1 of 20 took")
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    *before, said, goes_on = process.stderr.read().splitlines()
    process.stderr.close()
    assert (said, goes_on[:26]) == ("ab.py: interrupted", "the finished runs are kept")
    assert all(line.startswith("pair ") for line in before)
    assert load(str(sides / "out" / "a" / "01.jsonl")).status == "complete"
    again = start(*flags)
    assert again.stderr.readline() == "pair 1 of 20 is there already\n"
    again.send_signal(signal.SIGINT)
    again.communicate(timeout=30)


def test_two_in_one_folder(sides: Path) -> None:
    flags = words_of(sides, "0.1 hang", "0.1 hang")
    first = start(*flags)
    wait_for(first.children)
    second = start(*flags)
    _, errors = second.communicate(timeout=30)
    assert second.returncode == 2
    assert errors.startswith("ab.py: error: another run is writing ")
    assert errors.count("\n") == 1
    assert first.is_running()
    first.send_signal(signal.SIGINT)
    assert first.wait(30) == 130
    first.stderr.close()


def test_looks_are_even_and_grow_by_a_third() -> None:
    assert planned_looks(6, 24) == [6, 8, 12, 16, 24]
    assert planned_looks(6, 6) == [6]
    assert planned_looks(2, 8) == [2, 4, 6, 8]


def test_refusals(sides: Path) -> None:
    for change, message in (
        ({"--a": "no-such-program x"}, "No such file or directory: 'no-such-program'"),
        ({"--a": "python3 'x"}, "No closing quotation"),
        ({"--a": ""}, "argument --a: expected a command, got ''"),
        ({"--out": ""}, "argument --out: expected a folder, got ''"),
        ({"--runs": "1"}, "expected a whole number of at least 2"),
        ({"--b-env": "FAKE"}, "expected NAME=VALUE, got 'FAKE'"),
        ({"--b": "x="}, "argument --b: expected a command, got 'x='"),
        ({"--a": "x=python3 x", "--b": "x=python3 y"}, "two commands are called x; give each a "),
        ({"--out": str(sides / "fake.py")}, "Not a directory"),
    ):
        folder = str(sides / message[:9])
        flags = {"--a": "python3 x.py", "--b": "python3 x.py", "--out": folder} | change
        done = run("ab.py", *(word for pair in flags.items() for word in pair))
        assert done.returncode == 2, change
        assert message in done.stderr, change
        assert done.stderr.count("\n") == 1, done.stderr
    for more, message in (
        (["python3 y.py", "python3 z.py"], "several commands need names, e.g. --b 1MB="),
        (["y=python3 y.py", "z=python3 z.py", "--fail-on", "slower"], "--fail-on is for one --b: "),
    ):
        done = run("ab.py", "--a", "python3 x.py", "--out", str(sides / "x"), "--b", *more)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert message in done.stderr
