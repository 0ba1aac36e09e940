"""analysis/ab.py with small Python commands that write reports, alternating or interleaved."""

import itertools
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from analysis import ab
from analysis.ab import (
    Plan,
    order_of,
    planned_looks,
    run_rounds,
    show_race,
    time_left,
    total_time,
)
from analysis.runs.commands import Command
from analysis.runs.evidence import UNEQUAL_LOAD
from analysis.runs.race import Race, sentence
from analysis.runs.verdicts import Comparison, Design, Result, is_autocorrelated
from harness.report import load
from tests.pure.reports import ROOT, SIGNALS, run
from tests.pure.tables import check_pair

# writes a report of 24 blocks to --json; waits for its turn before each block if there are pipes
COMMAND = """
import json, os, subprocess, sys, time
seconds, mode = float(sys.argv[1]), sys.argv[2]
path = sys.argv[sys.argv.index("--json") + 1]
number, out = int(os.path.basename(path)[:2]), os.path.dirname(os.path.dirname(path))
while mode == "hang" and number == 2 and not os.path.exists(out + "/go on"):
    time.sleep(0.1)
if mode == "leave":
    code = "import os, time; os.fork() and os._exit(0); time.sleep(1000)"
    subprocess.run([sys.executable, "-c", code, out], start_new_session=True)
pipes = os.environ.get("TORCHRUN_BENCH_TURN") if mode != "no turns" else None
if pipes:
    grant, release = (os.open(p, f) for p, f in zip(pipes.split(":"), (os.O_RDONLY, os.O_WRONLY)))
    os.read(grant, 1)
log = open(out + "/order", "a")
times = []
for block in range(12 if mode == "short" else 24):
    print(sys.argv[1], "begins", file=log, flush=True)
    times += [seconds * (1 + 0.001 * ((7 * number + block) % 5))] * 2
    print(sys.argv[1], "ends", file=log, flush=True)
    if mode == "fail" and block == 3:
        sys.exit("a reason to fail")
    if pipes:
        os.write(release, b".")
        os.read(grant, 1)
head = {"schema": "torchrun-bench/3", "benchmark": "fake", "argv": sys.argv}
head |= {"started_at": f"2026-01-01T{number:02}:00:00+00:00"}
head |= {"environment": {"variables": {"FAKE": os.environ.get("FAKE", "unset")},
                         "torch": "3" if os.path.exists(out + "/upgraded") else "2"}}
case = {"key": {"n": 1}, "name": "x", "ranks": [0], "rounds": [2] * (len(times) // 2)}
case["samples_s"] = {"step": [times]}
with open(path, "w") as file:
    for line in (head, case, {"status": "complete", "finished_at": "2026-01-01"}):
        file.write(json.dumps(line) + "\\n")
"""


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "fake.py").write_text(COMMAND)
    return tmp_path / "out"


def fake(out: Path, words: str) -> str:
    return f"{shlex.join([sys.executable, str(out.parent / 'fake.py')])} {words}"


def flags_of(out: Path, a: str, b: str, *more: str) -> list[str]:
    return ["--a", fake(out, a), "--b", fake(out, b), "--out", str(out), *more]


def without_load(printed: str) -> list[str]:
    """The printed lines, without those that depend on other processes."""
    lines = [line for line in printed.splitlines() if "other processes used" not in line]
    return [re.sub(r" \[disturbed runs allowed\]|-{5,}", "", line).rstrip() for line in lines]


def test_abba_and_resume(out: Path) -> None:
    more = ("--runs", "3", "--allow-disturbed", "--b-env", "FAKE=B", "HF_TOKEN=hunter2")
    done = run("ab.py", *flags_of(out, "0.1 x", "0.11 x", *more))
    assert done.returncode == 0, done.stderr
    assert "1.10x slower" in done.stdout
    assert "# environment: variables.FAKE: unset in BASE, B in TEST" in done.stdout
    order = (out / "order").read_text().split()[0::2]
    (seed,) = map(int, re.findall(r"^seed: (\d+)$", (out / "plan.txt").read_text(), re.MULTILINE))
    names = [name for n in (1, 2, 3) for name in order_of(["0.1", "0.11"], n, seed)]
    assert order == [name for name in names for _ in range(48)]
    assert "hunter2" not in (out / "plan.txt").read_text()
    (out / "b" / "02.jsonl").unlink()
    again = run("ab.py", *flags_of(out, "0.1 x", "0.11 x", *more))
    assert without_load(again.stdout) == without_load(done.stdout)
    assert "round 1 of 3, 2 commands, is already complete" in again.stderr
    assert "round 2 of 3, 2 commands, took" in again.stderr
    assert "rounds take" not in again.stderr  # round 3 is complete
    assert len((out / "order").read_text().split()[0::2]) == 288 + 48
    as_json = run("ab.py", *flags_of(out, "0.1 x", "0.11 x", *more), "--format", "json")
    (pair,) = json.loads(as_json.stdout)["pairs"]
    assert (pair["base"], pair["test"]) == ("a", "b")
    check_pair(pair, again.stdout)
    other = run("ab.py", *flags_of(out, "0.1 x", "0.12 x", *more))
    assert (other.returncode, other.stderr.count("\n")) == (2, 1)
    assert "fake.py 0.12 x; choose another --out" in other.stderr
    (out / "upgraded").touch()  # torch is upgraded
    (out / "a" / "01.jsonl").unlink()
    other = run("ab.py", *flags_of(out, "0.1 x", "0.11 x", *more))
    assert other.returncode == 1
    assert "a/02.jsonl has torch 2, this run 3, so the environments differ" in other.stderr


def test_an_edited_program_is_refused(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands are the same, but the file, an imported module or a variable has changed."""
    script = out.parent / "fake.py"
    script.write_text(f"import helper\n{COMMAND}")
    helper = out.parent / "helper.py"
    helper.write_text("")
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    flags = flags_of(out, "0.1 x", "0.1 y", "--runs", "2")
    assert run("ab.py", *flags).returncode == 0
    assert "hunter2" not in (out / "plan.txt").read_text()
    assert run("ab.py", *flags).returncode == 0  # nothing was edited

    def refused() -> str:
        done = run("ab.py", *flags)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        assert "belongs to a different call: " in done.stderr
        return done.stderr

    for path in (script, helper):
        before = path.read_text()
        path.write_text(f"{before}\n# edited\n")
        assert f"{path.name} has changed; choose another --out" in refused()
        path.write_text(before)
    monkeypatch.setenv("F", "2")
    assert ": F was unset, is 2 now; choose another --out" in refused()
    monkeypatch.delenv("F")
    monkeypatch.setenv("HF_TOKEN", "hunter3")
    assert re.search(r": HF_TOKEN was \(not shown; hash \w+\), is \(not shown; hash", refused())
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    monkeypatch.setenv("SSH_TTY", "/dev/pts/7")  # another shell
    assert run("ab.py", *flags).returncode == 0


def test_a_program_that_is_edited_between_two_runs(out: Path) -> None:
    """The edited program is not measured."""
    edits = "open(sys.argv[0], 'a').write('#')"
    (out.parent / "fake.py").write_text(f"{COMMAND}\n{edits}\n")
    done = run("ab.py", *flags_of(out, "0.1 x", "0.1 y", "--runs", "2"))
    assert done.returncode == 1
    assert "fake.py changed since the first run; restore it, or choose another --out" in done.stderr
    assert len(list(out.rglob("*.jsonl"))) == 1


def test_a_folder_with_foreign_files_is_refused(out: Path) -> None:
    (out / "a").mkdir(parents=True)
    notes = out / "a" / "01.jsonl"
    notes.write_text("my notes")
    done = run("ab.py", *flags_of(out, "0.1 x", "0.1 x"))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert (
        "a contains 01.jsonl, but ab.py has no plan for this folder; choose another --out"
        in done.stderr
    )
    assert notes.read_text() == "my notes"
    assert [path.name for path in sorted(out.rglob("*"))] == ["a", "01.jsonl"]  # nothing is added


def test_processes_that_a_command_leaves_behind_are_ended(out: Path) -> None:
    """They run in another session, and their parent has ended."""
    mine = psutil.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    try:
        done = run("ab.py", *flags_of(out, "0.1 leave", "0.1 x", "--runs", "2"))
        assert done.returncode == 0, done.stderr
        alive = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]
        assert not any(str(out) in str(words) for words in alive)
        assert mine.is_running()  # started before ab.py
    finally:
        mine.kill()
        mine.wait(10)


def test_a_command_against_itself(out: Path) -> None:
    """The report of the smallest change that this number of runs can show."""
    words: tuple[str, ...] = ("--runs", "4", "--allow-disturbed")
    done = run("ab.py", "--a", fake(out, "0.1 x"), "--out", str(out), *words)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^case +BASE .* interval +smallest change\n", done.stdout, re.M)
    # the times of fake.py depend only on the round
    assert re.search(r"^x +100.2 ms +100.2 ms +1.00x +1.000 to 1.000 +0%$", done.stdout, re.M)
    assert "# smallest change: 4 runs per side detect it in 9 of 10 comparisons" in done.stdout
    words = (*words, "--format", "json")
    as_json = run("ab.py", "--a", fake(out, "0.1 x"), "--out", str(out), *words)
    check_pair(json.loads(as_json.stdout)["pairs"][0], done.stdout, is_like_with_like=True)


def test_several_interleaved_commands(out: Path) -> None:
    """One of three commands is 10% slower and has fewer blocks. The other two are equal."""
    flags = ["--a", f"quick={fake(out, '0.1 x')}", "--b", f"slow={fake(out, '0.11 short')}"]
    flags += [f"equal={fake(out, '0.100 x')}", "--runs", "2", "--max-runs", "4", "--interleave"]
    flags += ["--allow-disturbed"]
    done = run("ab.py", *flags, "--out", str(out))
    assert done.returncode == 0, done.stderr
    for name in ("equal", "slow"):
        assert f"# BASE: quick. TEST: {name}.\n" in done.stdout
    looks = "6 looks at pairs of commands share the error rate of 5%"
    assert f"with interleaved blocks; {looks}" in done.stdout
    assert done.stdout.splitlines()[-1] == (
        "# no clear best; smallest mean time: quick; equal is the same within 2%; "
        "slow is 1.10x slower (1.10 to 1.10) [disturbed runs allowed]"
    )
    words = (out / "order").read_text().split()
    assert words[1::2] == ["begins", "ends"] * (2 * (24 + 12 + 24))  # one runs at a time, 2 rounds
    first_turns = words[0:144:4]  # the first round, until the command with fewer blocks has ended
    for place in range(0, 36, 3):
        assert set(first_turns[place : place + 3]) == {"0.1", "0.11", "0.100"}
    again = run("ab.py", *flags, "--out", str(out))
    assert again.stdout == done.stdout
    assert "round 2 of 4, 3 commands, is already complete" in again.stderr
    content = json.loads(run("ab.py", *flags, "--out", str(out), "--format", "json").stdout)
    pairs = content["pairs"]
    assert [(pair["base"], pair["test"]) for pair in pairs] == [
        ("quick", "equal"),
        ("quick", "slow"),
    ]
    for pair in pairs:
        _, table = done.stdout.split(f"# BASE: quick. TEST: {pair['test']}.\n")
        check_pair(pair, re.split(r"\n\n# (?=BASE: |no clear best)", table)[0])
    race = content["race"]
    assert done.stdout.endswith(f"\n# {race['sentence']}\n")
    assert (race["best"], race["is_clear"], race["lost_to"]) == ("quick", False, {"slow": "quick"})
    assert race["rounds"] == {"quick": 2, "slow": 2, "equal": 2}


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("fail", r"b 1: exit status 1; no report was written; .*:\n    a reason to fail\n"),
        ("no turns", "it was not interleaved; --interleave requires scripts of this project"),
    ],
)
def test_a_command_that_fails_ends_the_round(out: Path, mode: str, message: str) -> None:
    done = run("ab.py", *flags_of(out, "0.1 x", f"0.1 '{mode}'", "--interleave"))
    assert done.returncode == 1
    assert re.search(message, done.stderr)
    assert f"finished runs are kept in {out}; repeat the same command to continue\n" in done.stderr


@pytest.mark.parametrize(
    ("number", "more"),
    [*((number, ["--interleave"]) for number in SIGNALS), (signal.SIGINT, [])],
)
def test_a_signal_keeps_the_finished_runs_and_the_same_call_continues(
    out: Path, number: signal.Signals, more: list[str]
) -> None:
    flags = flags_of(out, "0.1 hang", "0.1 hang", "--runs", "3", *more)
    command = [sys.executable, str(ROOT / "analysis/ab.py"), *flags]
    process = psutil.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ)
    assert process.stderr.readline().startswith("round 1 of 3, 2 commands, took")
    while len(started := process.children()) < (2 if more else 1):
        assert process.is_running()
    second = run("ab.py", *flags)
    assert (second.returncode, second.stderr.count("\n")) == (2, 1)
    assert second.stderr.startswith("ab.py: error: another run is writing ")
    process.send_signal(number)
    assert process.stderr.readline() == "ab.py: interrupted\n"
    process.send_signal(number)  # a second one changes nothing
    assert process.wait(30) == SIGNALS[number]
    with process.stderr as errors:
        kept = f"finished runs are kept in {out}; repeat the same command to continue\n"
        assert errors.read() == kept
    assert not any(child.is_running() for child in started)
    assert load(str(out / "a" / "01.jsonl")).status == "complete"
    (out / "go on").touch()
    again = run("ab.py", *flags, "--allow-disturbed")
    assert again.returncode == 0, again.stderr
    rounds = [line.partition("; ")[0] for line in again.stderr.splitlines()]
    assert rounds[0] == "round 1 of 3, 2 commands, is already complete"
    assert [line[:28] for line in rounds[1:]] == [f"round {n} of 3, 2 commands, to" for n in (2, 3)]
    assert "; 2 rounds take about " in again.stderr  # the rounds that this call has to run


def test_a_command_ends_with_ab_that_is_killed(out: Path) -> None:
    command = [sys.executable, str(ROOT / "analysis/ab.py"), *flags_of(out, "0.1 hang", "0.1 hang")]
    with psutil.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ) as process:
        assert process.stderr.readline().startswith("round 1 of 6, 2 commands, took")
        while not (started := process.children()):
            assert process.is_running()
        process.kill()
    _, alive = psutil.wait_procs(started, timeout=500)
    assert alive == []


def test_each_command_is_first_in_two_of_four_rounds_at_random() -> None:
    seen = set()
    for seed in range(40):
        order = [order_of(["a", "b"], n, seed)[0] for n in range(1, 13)]
        assert [sorted(order[i : i + 4]) for i in (0, 4, 8)] == [["a", "a", "b", "b"]] * 3
        assert order == [order_of(["a", "b"], n, seed)[0] for n in range(1, 13)]
        seen.add("".join(order[:4]))
    assert len(seen) == 6  # every order of two `a` and two `b`
    assert {tuple(order_of(["a", "b", "c"], n, 7)) for n in range(1, 60)} == set(
        itertools.permutations("abc")
    )


def test_which_flags_may_differ_when_a_call_continues(out: Path) -> None:
    """How runs are judged may change. The commands and the planned number of runs may not. A
    command may have several lines."""
    flags = flags_of(out, "0.1 x", "0.1\n x", "--allow-disturbed", "--runs", "2")
    assert run("ab.py", *flags).returncode == 0
    for more in ("--margin 5%", "--max-runs 9", "--fail-on slower", "--format json"):
        assert run("ab.py", *flags, *more.split()).returncode == 0
    for more in ("--runs 3", "--interleave", "--b-env X=1"):
        done = run("ab.py", *flags, *more.split())
        assert (done.returncode, done.stdout) == (2, ""), more
        assert "belongs to a different call: its plan does not contain" in done.stderr


def test_a_command_may_change_the_working_directory(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OUT is a relative path, and `env -C` starts the command in another folder."""
    monkeypatch.chdir(out.parent)
    (out.parent / "elsewhere").mkdir()
    command = f"env -C elsewhere {fake(out, '0.1 x')}"
    done = run("ab.py", "--a", command, "--out", "out", "--runs", "2", "--allow-disturbed")
    assert done.returncode == 0, done.stderr
    assert (out / "a" / "02.jsonl").exists()


def test_estimates_of_the_remaining_time() -> None:
    """A round takes 40 s: 6 rounds take 4 min, 12 take 8 min and 24 take 16 min."""
    assert total_time(40, 6, 6, None) == (
        "; 6 rounds take about 4 min, or up to 8 min if disturbed pairs are replaced"
    )
    assert total_time(40, 6, 0, None) == "; 6 rounds take about 4 min"
    assert total_time(40, 24, 0, 6) == (
        "; at most 24 rounds take about 16 min; the first look is after round 6"
    )
    assert total_time(40, 1, 6, None) == ""
    assert time_left([40, 50, 30], 3, False) == "; about 2 min left"
    assert time_left([300], 22, True) == "; at most 1 h 50 min left"
    assert time_left([300], 0, True) == ""


def test_each_round_prints_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each round takes 40 s. One of 2 pairs is disturbed, so a third is added, out of at most 4."""
    monkeypatch.setattr(ab, "run_round", lambda commands, number, interleave: 40.0)
    commands = {name: Command(name, "x", {}, tmp_path / name) for name in "ab"}
    disturbed = Result("x", {"n": 1}, left_out={"a/01 and b/01": UNEQUAL_LOAD})
    comparison = Comparison([disturbed], None, [], [], [], [], Design(paired=True))
    _, rounds = run_rounds(commands, [2], 4, Plan(1, False), lambda base, test, n: comparison)
    assert rounds == 3
    assert capsys.readouterr().err.splitlines() == [
        "round 1 of 2, 2 commands, took 40 s; 2 rounds take about 80 s, "
        "or up to 3 min if disturbed pairs are replaced",
        "round 2 of 2, 2 commands, took 40 s",
        "round 3 of 3, 2 commands, replacing a disturbed pair, took 40 s",
    ]


def test_looks_are_even_and_grow_by_a_third() -> None:
    assert planned_looks(6, 24) == [6, 8, 12, 16, 24]
    assert planned_looks(6, 6) == [6]


def test_a_level_that_persists_over_rounds_by_hand() -> None:
    """r at lag 1 of 1, 1, 1, -1, -1, -1 is 3 / 6. The limit is 1.645 / sqrt(6) - 1 / 6 = 0.505,
    and 0.457 for 8 values."""
    for logs, expected in (
        ([1, 1, 1, 1, -1, -1, -1, -1], True),  # 5 / 8
        ([1, 1, 1, -1, -1, -1], False),
        ([0.1] * 8, False),
        ([1, -1, 1, -1], False),
    ):
        assert is_autocorrelated([math.exp(x) for x in logs]) == expected


def test_the_result_of_a_race(capsys: pytest.CaptureFixture[str]) -> None:
    """A command is called the best only if all others are slower. A warning follows if a level
    persists over rounds."""
    level = [math.exp(x) for x in (1, 1, 1, 1, -1, -1, -1, -1)]
    results = {
        "a": Result("", {}, ratio=1.123, interval=(1.0801, 1.171), base_s=[1.0] * 8, test_s=level),
        "c": Result("", {}, ratio=1.01, interval=(0.98, 1.04)),
        "e": Result("", {}, ratio=1.05, interval=(0.99, 1.1)),
        "f": Result("", {}),
    }

    def compared(base: str, test: str, rounds: int) -> Comparison:
        return Comparison([results[test]], None, [], [], [], [], Design())

    race = Race(["b", "a"])
    assert sentence(race, {"a": results["a"]}, 0.02) == "best: b; a is 1.12x slower (1.08 to 1.17)"
    wide = Result("", {}, ratio=10.0, interval=(1.5, 60.0))  # the table prints no interval either
    assert sentence(race, {"a": wide}, 0.02) == "best: b; a is 10.00x slower (no interval)"
    wide.caveats = ["load not recorded"]
    assert sentence(race, {"a": wide}, 0.02).endswith("x slower (no interval) [load not recorded]")
    race = Race(["b", *results])
    race.lost_to = {"e": "d"}
    show_race(race, compared, 0.02)
    *_, said, warning = capsys.readouterr().out.splitlines()
    assert said == (
        "# no clear best; smallest mean time: b; f has no time to compare; c does not differ "
        "significantly: 1.01 times (0.98 to 1.04); e was slower than d; "
        "a is 1.12x slower (1.08 to 1.17)"
    )
    assert warning.startswith("# warning: a against b: the ratio is correlated from round to round")
