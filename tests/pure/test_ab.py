"""analysis/ab.py with small python commands that write reports, in turn or taking turns."""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from analysis.ab import planned_looks
from common.report import load
from tests.pure.reports import ROOT, run

# writes a report of 24 blocks to --json; takes its turns where there are any
COMMAND = """
import json, os, sys, time
seconds, mode = float(sys.argv[1]), sys.argv[2]
path = sys.argv[sys.argv.index("--json") + 1]
number = int(os.path.basename(path)[:2])
lines = [
    {"schema": "torchrun-bench/2", "benchmark": "fake", "argv": sys.argv,
     "started_at": f"2026-01-01T{number:02}:00:00+00:00",
     "environment": {"variables": {"FAKE": os.environ.get("FAKE", "unset")}}}]
if mode == "hang":
    time.sleep(1000)
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
case = {"key": {"label": "x"}, "ranks": [0], "samples_s": {"step": [times]}, "rounds": rounds}
lines += [case, {"status": "complete", "finished_at": "2026-01-01"}]
with open(path, "w") as file:
    file.write("".join(json.dumps(line) + "\\n" for line in lines))
"""


@pytest.fixture
def sides(tmp_path: Path) -> Path:
    (tmp_path / "fake.py").write_text(COMMAND)
    return tmp_path


def words(folder: Path, a: str, b: str, *more: str) -> list[str]:
    command = shlex.join([sys.executable, f"{folder}/fake.py"])
    return ["--a", f"{command} {a}", "--b", f"{command} {b}", "--out", str(folder / "out"), *more]


def test_abba_and_resume(sides: Path) -> None:
    more = ("--runs", "3", "--b-env", "FAKE=B")
    done = run("ab.py", *words(sides, "0.1 x", "0.11 x", *more))
    assert done.returncode == 0, done.stderr
    assert "1.10x slower" in done.stdout
    assert "# environment: variables.FAKE: unset in BASE, B in TEST" in done.stdout
    order = (sides / "out" / "order").read_text().split()[0::2]
    assert order == [*["0.1"] * 48, *["0.11"] * 96, *["0.1"] * 96, *["0.11"] * 48]  # AB BA AB
    (sides / "out" / "b" / "02.jsonl").unlink()
    again = run("ab.py", *words(sides, "0.1 x", "0.11 x", *more))
    assert again.stdout == done.stdout
    assert "pair 1 of 3 is there already" in again.stderr
    assert "pair 2 of 3 took" in again.stderr
    assert len((sides / "out" / "order").read_text().split()[0::2]) == 288 + 48
    other = run("ab.py", *words(sides, "0.1 x", "0.12 x", *more))
    assert other.returncode == 2
    assert "is of another comparison; give another --out" in other.stderr


def test_control(sides: Path) -> None:
    """A against A: what so many runs can show. The variables of A are those of both."""
    flags = words(sides, "0.1 x", "", "--runs", "4", "--a-env", "FAKE=A")
    place = flags.index("--b")
    del flags[place : place + 2]
    done = run("ab.py", *flags)
    assert done.returncode == 0, done.stderr
    assert "FAKE" not in done.stdout
    assert re.search(
        r"^case +A +A is +interval +smallest change +runs for 2 %\n", done.stdout, re.M
    )
    assert "# smallest change: 4 runs a side show it in 9 of 10 comparisons" in done.stdout
    document = json.loads(run("ab.py", *flags, "--format", "json").stdout)
    (only,) = document["cases"]
    assert only["base_s"] == only["test_s"]  # the fake times depend on the round alone
    assert (only["smallest_change"], only["runs_to_show"]) == (0, 2)
    compared = [
        "compare.py",
        str(sides / "out/a/01.jsonl"),
        "--test",
        str(sides / "out/b/02.jsonl"),
    ]
    done = run(*compared, "--control", str(sides / "out"))
    assert "4 runs of control a side" in done.stdout, done.stderr


def test_commands_that_take_turns(sides: Path) -> None:
    done = run("ab.py", *words(sides, "0.1 x", "0.11 x", "--runs", "2", "--interleave"))
    assert done.returncode == 0, done.stderr
    assert "their blocks took turns" in done.stdout
    shorter = words(sides, "0.1 x", "0.11 short", "--runs", "2", "--interleave")
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
    done = run("ab.py", *words(sides, "0.1 x", f"0.1 '{mode}'", "--interleave"))
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


def test_an_interrupt_before_the_first_run(sides: Path) -> None:
    """While modules are imported: this one takes a minute."""
    code = f"import pathlib, time\npathlib.Path({str(sides)!r}, 'here').touch()\ntime.sleep(60)\n"
    (sides / "tabulate.py").write_text(code)
    process = start(*words(sides, "0.1 x", "0.1 x"), PYTHONPATH=str(sides))
    wait_for((sides / "here").exists)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (-signal.SIGINT, "")
    assert not (sides / "out").exists()


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_within_a_run_leaves_no_process(sides: Path, name: str) -> None:
    number = signal.Signals[name]
    process = start(*words(sides, "0.1 hang", "0.1 hang", "--interleave"))
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
    flags = words(sides, "0.1 x", "0.11 x", "--runs", "20")
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
    flags = words(sides, "0.1 hang", "0.1 hang")
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


def test_where_nobody_reads_what_it_says(sides: Path) -> None:
    """Its stderr is gone: it goes on. Its folder's name holds the letters of a pattern."""
    flags = words(sides, "0.1 x", "0.11 x", "--runs", "2")
    folder = sides / "ab[1]"
    flags[flags.index("--out") + 1] = str(folder)
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, str(ROOT / "analysis/ab.py"), *flags]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=write_end, text=True, timeout=60, check=False
    )
    os.close(write_end)
    assert done.returncode == 0
    assert "1.10x slower" in done.stdout
    assert load(str(folder / "b" / "02.jsonl")).status == "complete"


def test_until_decided(sides: Path) -> None:
    more = ("--runs", "2", "--until-decided", "--max-runs", "8", "--format", "json")
    done = run("ab.py", *words(sides, "0.1 x", "0.2 x", *more))
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert len(document["base"]) == 2  # decided at the first look
    assert document["design"]["looks"] == len(planned_looks(2, 8))


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
        ({"--a-env": "FAKE"}, "expected NAME=VALUE, got 'FAKE'"),
        ({"--out": str(sides / "fake.py")}, "Not a directory"),
    ):
        folder = str(sides / message[:9])
        flags = {"--a": "python3 x.py", "--b": "python3 x.py", "--out": folder} | change
        done = run("ab.py", *(word for pair in flags.items() for word in pair))
        assert done.returncode == 2, change
        assert message in done.stderr, change
        assert done.stderr.count("\n") == 1, done.stderr
