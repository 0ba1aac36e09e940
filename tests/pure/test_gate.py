"""Gates: git bisect with the script of docs/compare.md, the step times of one's own training loop,
and the workflow to copy."""

import json
import os
import re
import subprocess
import sys
import textwrap
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from tests.pure.reports import ROOT
from tests.pure.reports import run as run_script

PAGE = (ROOT / "docs" / "compare.md").read_text()
# What a commit of the toy repository measures: the file `seconds` tells how long a step takes, and
# how much runs scatter.
BENCH = """
import json, sys
seconds, scatter = map(float, open("seconds").read().split())
path = sys.argv[sys.argv.index("--json") + 1]
run = int(path[-7]) if path.endswith(".jsonl") else 0
seconds *= 1 + (0.002 + scatter) * (run - 2)
lines = [
    {"schema": "torchrun-bench/3", "benchmark": "toy", "argv": sys.argv, "environment": {},
     "started_at": f"2026-01-01T{run:02}:00:00"},
    {"key": {"n": 1}, "name": "x", "ranks": [0], "samples_s": {"step": [[seconds]]}, "rounds": [1]},
    {"status": "complete", "finished_at": "2026-01-01"},
]
open(path, "w").write("".join(json.dumps(line) + "\\n" for line in lines))
"""


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    done = subprocess.run(
        ["git", *identity, *words], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def block(first: str) -> str:
    """The indented block of the page that begins with a line."""
    lines = PAGE[PAGE.index(f"    {first}\n") :].split("\n\n")[0]
    return textwrap.dedent(lines) + "\n"


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """6 commits. The 5th is 30 % slower. The runs of the 3rd scatter, so nobody can tell."""
    repository = tmp_path / "a repository"
    repository.mkdir()
    git(repository, "init", "-q")
    (repository / "bench.py").write_text(BENCH)
    for number in range(1, 7):
        seconds = 0.13 if number >= 5 else 0.1
        scatter = 0.5 if number == 3 else number / 1e6
        (repository / "seconds").write_text(f"{seconds} {scatter}\n")
        git(repository, "add", ".")
        git(repository, "commit", "-qm", f"commit {number}")
    return repository


def program(folder: Path, name: str, text: str) -> None:
    """A program for PATH. (The interpreter's own path may hold blanks, and $MEASURE may not.)"""
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_git_bisect_finds_the_slow_commit(tmp_path: Path, toy: Path) -> None:
    """git tries the 3rd commit first, and skips it."""
    commits = git(toy, "rev-list", "--reverse", "HEAD").splitlines()
    script, out, good = tmp_path / "bisect.sh", tmp_path / "out", tmp_path / "good one"
    script.write_text(block("#!/usr/bin/env bash"))
    git(toy, "worktree", "add", "-q", "--detach", str(good), commits[0])
    git(toy, "bisect", "start", commits[5], commits[0])
    program(tmp_path, "python", f"exec '{sys.executable}' \"$@\"")
    variables = {"MEASURE": "python bench.py", "TOOLS": str(ROOT), "OUT": str(out), "RUNS": "3"}
    variables["GOOD"] = str(good)
    variables |= {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["git", "bisect", "run", "bash", str(script)],
        cwd=toy,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert f"{commits[4]} is the first bad commit" in done.stdout, done.stdout + done.stderr
    assert f"git bisect skip {commits[2]}" in git(toy, "bisect", "log")


def test_eight_lines_write_a_report_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = block('head = {"schema": "torchrun-bench/3", "benchmark": "my_training"}')
    assert len(lines.splitlines()) == 8
    names = {"json": json, "os": os, "sys": sys, "datetime": datetime, "UTC": UTC}
    names["torch"] = SimpleNamespace(__version__="2.15.0")

    def train(path: Path, seconds: float, rank: str) -> None:
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setattr(sys, "argv", ["train.py", "--json", str(path)])
        exec(lines, names | {"step_times": [seconds, 1.01 * seconds, 0.99 * seconds]})

    for number in range(6):
        for side, seconds in (("a", 0.1), ("b", 0.12)):
            (tmp_path / side).mkdir(exist_ok=True)
            train(tmp_path / side / f"{number}.jsonl", seconds * (1 + number / 1000), "0")
    train(tmp_path / "rank1.jsonl", 0.1, "1")
    assert not (tmp_path / "rank1.jsonl").exists()
    words = [str(tmp_path / "a"), "--test", str(tmp_path / "b"), "--fail-on", "slower"]
    done = run_script("compare.py", *words)
    assert done.returncode == 1, done.stderr
    assert re.search(r"my_training \(step\): 6 of BASE, 6 of TEST", done.stdout)
    assert re.search(r"^step +100.* ms +120.* ms +1.20x slower", done.stdout, re.M)
    assert "warning" not in done.stdout


def compare_step() -> str:
    workflow = yaml.safe_load((ROOT / ".github/workflows/gate.yml").read_text())
    (step,) = [s for s in workflow["jobs"]["gate"]["steps"] if s.get("name") == "compare"]
    return str(step["run"])


@pytest.mark.parametrize(("status", "ends_with", "is_neutral"), [(0, 0, 0), (1, 1, 0), (4, 0, 1)])
def test_the_workflow_shows_no_verdict_as_neutral(
    tmp_path: Path, status: int, ends_with: int, is_neutral: bool
) -> None:
    """Its script with a `python` that ends with a status, and a `gh` that writes down its words."""
    program(tmp_path, "python", f'echo "$@"; exit {status}')
    program(tmp_path, "gh", 'printf "%s\\n" "$@" >"$RUNNER_TEMP/calls"')
    variables = {"MEASURE": "x.py -b 8", "HEAD": "abc", "GITHUB_REPOSITORY": "me/mine"}
    variables |= {"RUNNER_TEMP": str(tmp_path), "GITHUB_STEP_SUMMARY": str(tmp_path / "summary")}
    variables |= {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", compare_step()],
        env=os.environ | variables,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == ends_with, done.stderr
    words = (tmp_path / "summary").read_text()
    assert re.search(r"ab\.py .* --fail-on slower .*--a .*base/x\.py -b 8 --b .*head/x\.py", words)
    calls = tmp_path / "calls"
    assert calls.exists() == bool(is_neutral)
    if is_neutral:
        assert "conclusion=neutral\n" in calls.read_text()
        assert "repos/me/mine/check-runs\n" in calls.read_text()
