"""analysis/ab.py with small Python commands that write reports, alternating or interleaved."""

import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import psutil
import pytest

from analysis import ab
from analysis.ab import Plan, forecast, order_of, run_rounds
from analysis.runs.commands import Command
from analysis.runs.evidence import UNEQUAL_LOAD
from analysis.runs.load import Run
from analysis.runs.verdicts import Comparison, Design, Result, judge_all
from harness.report import load
from tests.pure.reports import FAKE, ROOT, SIGNALS, fake, run
from tests.pure.tables import check_pair


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def flags_of(out: Path, a: str, b: str, *more: str) -> list[str]:
    return ["--a", fake(out.parent, a), "--b", fake(out.parent, b), "--out", str(out), *more]


def compared(out: Path, a: str, b: str, *more: str, status: int = 0) -> CompletedProcess[str]:
    """Run ab.py with these commands, which ends with this status."""
    done = run("ab.py", *flags_of(out, a, b, *more))
    assert done.returncode == status, done.stderr
    assert status != 2 or (done.stdout, done.stderr.count("\n")) == ("", 1)
    return done


def without_load(printed: str) -> list[str]:
    """The printed lines, without those that depend on other processes."""
    lines = [line for line in printed.splitlines() if "other processes used" not in line]
    return [re.sub(r" \[disturbed runs allowed\]|-{5,}", "", line).rstrip() for line in lines]


def test_abba_and_resume(out: Path) -> None:
    more = ("--runs", "3", "--allow-disturbed", "--b-env", "FAKE=B", "HF_TOKEN=hunter2")
    commands = (out, "0.1 x", "0.11 x", *more)
    done = compared(*commands)
    assert "1.10x slower" in done.stdout
    assert "# environment: variables.FAKE: unset in BASE, B in TEST" in done.stdout
    order = (out / "order").read_text().split()[0::2]
    plan = (out / "plan.txt").read_text()
    (seed,) = map(int, re.findall(r"^seed: (\d+)$", plan, re.MULTILINE))
    names = [name for n in (1, 2, 3) for name in order_of(n, seed)]
    assert order == [{"a": "0.1", "b": "0.11"}[name] for name in names for _ in range(48)]
    assert "hunter2" not in plan
    (out / "b" / "02.jsonl").unlink()
    again = compared(*commands)
    assert without_load(again.stdout) == without_load(done.stdout)
    assert "round 1 of 3 is already complete" in again.stderr
    assert "round 2 of 3 took" in again.stderr
    assert "rounds take" not in again.stderr  # round 3 is complete
    assert len((out / "order").read_text().split()[0::2]) == 288 + 48
    (pair,) = json.loads(compared(*commands, "--format", "json").stdout)["pairs"]
    assert (pair["base"], pair["test"]) == ("a", "b")
    check_pair(pair, again.stdout)
    other = compared(out, "0.1 x", "0.12 x", *more, status=2)
    assert "fake.py 0.12 x; choose another --out" in other.stderr
    (out / "upgraded").touch()  # torch is upgraded
    (out / "a" / "01.jsonl").unlink()
    other = compared(*commands, status=1)
    assert "a/02.jsonl has torch 2, this run 3, so the environments differ" in other.stderr


def test_an_edited_program_is_refused(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands are the same, but a program, a watched file or a variable has changed."""
    script, helper = out.parent / "fake.py", out.parent / "helper.py"
    helper.write_text("")
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    commands = (out, "0.1 x", "0.1 y", "--runs", "2", "--watch", str(helper))
    done = compared(*commands)
    assert "hunter2" not in (out / "plan.txt").read_text()
    remark = "not checked for changes: what fake.py calls or imports"
    assert done.stderr.splitlines()[0] == f"{remark}; --watch FILE adds files"
    assert f"\n# 1 same [2 pairs]\n# {remark}\n" in done.stdout
    monkeypatch.setenv("SSH_TTY", "/dev/pts/7")  # another shell
    assert compared(*commands).stdout == done.stdout  # nothing was edited
    for path in (script, helper):
        before = path.read_text()
        path.write_text(f"{before}\n# edited\n")
        told = compared(*commands, status=2).stderr
        assert f"belongs to a different call: {path} has changed; choose another" in told
        path.write_text(before)
    monkeypatch.setenv("CI_F", "2")
    told = compared(*commands, status=2).stderr
    assert re.search(r"call: CI_F was unset, is \(set, \w+\) now; choose another --out", told)


@pytest.mark.parametrize("kept", [["a", "b/01"], ["a"], []], ids=str)
def test_reports_with_other_contents_are_refused(out: Path, kept: list[str]) -> None:
    """Of a command whose reports record what ran, whichever reports were removed."""
    loads = ', "contents": {"late": open(out + "/m").read()}'
    text = FAKE.replace('{"variables":', '{"contents": {"mine": "1"}, "variables":')
    (out.parent / "fake.py").write_text(text.replace('"ranks": [0]', f'"ranks": [0]{loads}'))
    commands = (out, "0.1 x", "0.1 y", "--runs", "2", "--allow-disturbed")
    out.mkdir()
    (out / "m").write_text("1")
    assert "not checked" not in compared(*commands).stdout
    for path in out.rglob("*.jsonl"):
        if not str(path.relative_to(out)).startswith(tuple(kept)):
            path.unlink()
    (out / "m").write_text("2")
    other = "jsonl was measured with other contents of late than earlier runs; restore them and rem"
    for status in (1, 2):  # the second call does not count the report of the first
        assert other in compared(*commands, status=status).stderr
    (out / "m").write_text("1")
    for path in out.rglob("*.jsonl"):
        if '"late": "2"' in path.read_text():
            path.unlink()
    compared(*commands)


def test_a_program_that_is_edited_between_two_runs_is_not_measured(out: Path) -> None:
    edits = "open(sys.argv[0], 'a').write('#')"
    (out.parent / "fake.py").write_text(f"{FAKE}\n{edits}\n")
    done = compared(out, "0.1 x", "0.1 y", "--runs", "2", status=1)
    assert "fake.py changed since the first run; restore it, or choose another --out" in done.stderr
    assert len(list(out.rglob("*.jsonl"))) == 1


def test_a_folder_with_foreign_files_is_refused(out: Path) -> None:
    (out / "a").mkdir(parents=True)
    notes = out / "a" / "01.jsonl"
    notes.write_text("my notes")
    told = "a contains 01.jsonl, but ab.py has no plan for this folder; choose another --out"
    assert told in compared(out, "0.1 x", "0.1 x", status=2).stderr
    assert notes.read_text() == "my notes"
    assert [path.name for path in sorted(out.rglob("*"))] == ["a", "01.jsonl"]  # nothing is added


def test_processes_that_a_command_leaves_behind_are_ended(out: Path) -> None:
    """They run in another session, and their parent has ended."""
    mine = psutil.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    try:
        compared(out, "0.1 leave", "0.1 x", "--runs", "2")
        alive = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]
        assert not any(str(out) in str(words) for words in alive)
        assert mine.is_running()  # started before ab.py
    finally:
        mine.kill()
        mine.wait()


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("fail", r"b 1: exit status 1; no report was written; .*:\n    a reason to fail\n"),
        ("no turns", "it was not interleaved; --interleave requires scripts of this project"),
    ],
)
def test_a_command_that_fails_ends_the_round(out: Path, mode: str, message: str) -> None:
    done = compared(out, "0.1 x", f"0.1 '{mode}'", "--interleave", status=1)
    assert re.search(message, done.stderr)
    assert f"finished runs are kept in {out}; repeat the same command to continue\n" in done.stderr


@pytest.mark.parametrize(
    ("number", "more"), [*((number, ["--interleave"]) for number in SIGNALS), (signal.SIGINT, [])]
)
def test_a_signal_keeps_the_finished_runs_and_the_same_call_continues(
    out: Path, number: signal.Signals, more: list[str]
) -> None:
    commands: Any = (out, "0.1 hang", "0.1 hang", "--runs", "3", *more)
    command = [sys.executable, str(ROOT / "analysis/ab.py"), *flags_of(*commands)]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = psutil.Popen(command, **pipes, text=True, env=os.environ)
    assert process.stderr.readline().startswith("not checked for changes: what fake.py")
    assert process.stderr.readline().startswith("round 1 of 3 took")
    while len(started := process.children()) < (2 if more else 1):
        assert process.is_running()
    second = compared(*commands, status=2)
    assert second.stderr.startswith("ab.py: error: another run is writing ")
    process.send_signal(number)
    assert process.stderr.readline() == "ab.py: interrupted\n"
    process.send_signal(number)  # a second one changes nothing
    assert process.wait(500) == SIGNALS[number]
    with process.stdout as output:  # Ctrl-C shows the complete rounds
        shown = re.match("# torchrun-bench compare fake .*: 1 of BASE, 1 of TEST", output.read())
        assert bool(shown) == (number == signal.SIGINT)
    with process.stderr as errors:
        kept = f"finished runs are kept in {out}; repeat the same command to continue\n"
        assert errors.read() == kept
    assert not any(child.is_running() for child in started)
    assert load(str(out / "a" / "01.jsonl")).status == "complete"
    (out / "go on").touch()
    again = compared(*commands, "--allow-disturbed")
    _, *rounds = [line.partition("; ")[0] for line in again.stderr.splitlines()]
    assert rounds[0] == "round 1 of 3 is already complete"
    assert [line[:18] for line in rounds[1:]] == [f"round {n} of 3 took " for n in (2, 3)]
    assert "; 2 rounds take about " in again.stderr  # the rounds that this call has to run


def test_a_command_ends_with_ab_that_is_killed(out: Path) -> None:
    command = [sys.executable, str(ROOT / "analysis/ab.py"), *flags_of(out, "0.1 hang", "0.1 hang")]
    with psutil.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ) as process:
        assert process.stderr.readline().startswith("not checked for changes: what fake.py")
        assert process.stderr.readline().startswith("round 1 of 6 took")
        while not (started := process.children()):
            assert process.is_running()
        process.kill()
    _, alive = psutil.wait_procs(started, timeout=500)
    assert alive == []


def test_a_coin_decides_the_order_of_each_pair() -> None:
    first = [[order_of(n, seed)[0] for n in range(1, 7)] for seed in range(640)]
    assert first == [[order_of(n, seed)[0] for n in range(1, 7)] for seed in range(640)]
    assert len({"".join(of_seed) for of_seed in first}) == 64  # every order of 6 pairs
    assert 0.46 < sum(of_seed.count("a") for of_seed in first) / 3840 < 0.54


def test_which_flags_may_differ_when_a_call_continues(out: Path) -> None:
    """Those on how runs are judged. One of the commands has two lines."""
    commands = (out, "0.1 x", "0.1\n x", "--allow-disturbed", "--runs", "2")
    for more in ("", "--margin 5%", "--max-runs 9", "--fail-on slower", "--format json"):
        compared(*commands, *more.split())
    for more in ("--runs 3", "--interleave", "--b-env X=1"):
        told = compared(*commands, *more.split(), status=2).stderr
        assert "belongs to a different call: its plan does not contain" in told


def test_quoted_operators_need_no_shell() -> None:
    words = r"""true 'a|b' mine:f?a=1&b=2 "x;\"y" \; f(1)"""
    Command("a", words, {}, Path()).check_program()


def test_a_command_may_change_the_working_directory(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OUT is a relative path, and `env -C` starts the command in another folder."""
    monkeypatch.chdir(out.parent)
    (out.parent / "elsewhere").mkdir()
    command = f"env -C elsewhere {fake(out.parent, '0.1 x')}"
    done = run("ab.py", "--a", command, "--out", "out", "--runs", "2", "--allow-disturbed")
    assert done.returncode == 0, done.stderr
    assert (out / "a" / "02.jsonl").exists()


def test_each_round_prints_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pair is disturbed, so a fourth round is added to three, out of at most 6."""
    monkeypatch.setattr(
        ab, "run_round", lambda commands, n, interleave: [40.0, 50.0, 30.0, 60.0][n - 1]
    )
    commands = [Command(name, "x", {}, tmp_path / name) for name in "ab"]
    disturbed = Result("x", {"n": 1}, left_out={"a/01 and b/01": UNEQUAL_LOAD})
    comparison = Comparison([disturbed], None, [], [], [], [], Design(paired=True))
    assert run_rounds(commands, 3, 6, Plan(1, False), lambda n: comparison) == 4
    assert capsys.readouterr().err.splitlines() == [
        "round 1 of 3 took 40 s; 3 rounds take about 2 min, "
        "or up to 4 min if disturbed pairs are replaced",
        "round 2 of 3 took 50 s; about 45 s left",
        "round 3 of 3 took 30 s",
        "round 4 of 4, replacing a disturbed pair, took 60 s",
    ]


def test_the_forecast_by_hand() -> None:
    for logs, expected in (
        # t(n - 1) * 0.02 / sqrt(n) <= ln 1.02 from 7 pairs on, and <= ln 2 from 2 pairs on
        ([-0.02, 0.0, 0.02], "about 7 pairs, about 5 min, but --runs is 6 (--max-runs 12 only "),
        ([-0.02 + math.log(2), math.log(2), 0.02 + math.log(2)], "about 6 pairs, about 4 min"),
        ([-0.3, 0.0, 0.3], "more than 100 pairs, over 67 min, but --runs is 6 (--max-"),
        ([0.0], ""),
    ):
        case = Result("x", {}, base_s=[1.0] * len(logs), test_s=[math.exp(x) for x in logs])
        design = Design(paired=True, runs=6)
        judge_all([case], design)
        sides: Any = [Run("x", {})] * len(logs)
        comparison = Comparison([case], None, [], [], sides, sides, design)
        line = forecast(comparison, 6, 12, 40, is_terminal=False)
        start = f"after {len(logs)} rounds: with this scatter, verdicts need " if expected else ""
        assert line.startswith(start + expected)
        assert "--interleave" not in line  # these runs have no rounds
        if expected:
            ending = "; Ctrl-C ends with what was measured"
            assert forecast(comparison, 6, 12, 40, is_terminal=True) == line + ending
