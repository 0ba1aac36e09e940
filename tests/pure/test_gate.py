"""Gates: git bisect with the script of docs/compare.md, the step times of one's own training loop,
and the workflow to copy. `python` is a stub here: test_ab.py runs ab.py."""

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

from analysis.ab import add_flags
from common.cli import Parser
from common.cpu_load import CpuLoad
from common.report import load
from tests.process import ROOT

PAGE = (ROOT / "docs" / "compare.md").read_text()
# The 5th of 6 commits is slow, and of the 3rd nobody can tell. It is tried first, and skipped.
BISECT = """
git init -q . && git config user.name x && git config user.email x@example.org
for number in 1 2 3 4 5 6; do echo $number >number; git add . && git commit -qm $number; done
git bisect start HEAD HEAD~5 && git bisect run bash ../bisect.sh && git bisect log
"""
AB = """
printf "%s\\n" "$@" >"$OUT"
read -r number <number
case $number in 3) exit 4 ;; 5 | 6) exit 1 ;; esac
"""


def block(first: str) -> str:
    """The indented block of the page that begins with a line."""
    lines = PAGE[PAGE.index(f"    {first}\n") :].split("\n\n")[0]
    return textwrap.dedent(lines) + "\n"


def program(folder: Path, name: str, text: str) -> None:
    """A program for PATH."""
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def bash(folder: Path, script: str, cwd: Path, **variables: str) -> tuple[int, str]:
    """The exit status and stdout of a script that finds its programs in `folder`."""
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | variables | {"PATH": path, "TMPDIR": str(folder)}
    command = ["bash", "-eo", "pipefail", "-c", script]
    done = subprocess.run(command, cwd=cwd, env=environment, stdout=subprocess.PIPE, timeout=60)
    return done.returncode, done.stdout.decode()


def test_git_bisect_finds_the_slow_commit(tmp_path: Path) -> None:
    repository = tmp_path / "a repository"
    repository.mkdir()
    (tmp_path / "bisect.sh").write_text(block("#!/usr/bin/env bash"))
    program(tmp_path, "measure", "")
    program(tmp_path, "python", AB)
    out = tmp_path / "words"
    variables = {"MEASURE": "measure -b 8", "TOOLS": "/t", "GOOD": "a good one", "OUT": str(out)}
    status, printed = bash(tmp_path, BISECT, repository, **variables)
    assert status == 0, printed
    assert re.search(r"\n# skip: \[\w+\] 3\n(.*\n)*# first bad commit: \[\w+\] 5\n$", printed)
    script, *flags = out.read_text().splitlines()
    parser = Parser(None)
    add_flags(parser)
    args = parser.parse_args(flags)
    assert (script, args.runs, args.fail_on) == ("/t/analysis/ab.py", 6, ["slower"])
    assert (args.a, args.b) == (("", "env -C 'a good one' measure -b 8"), [("", "measure -b 8")])


def test_eight_lines_write_a_report_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = block('head = {"schema": "torchrun-bench/3", "benchmark": "my_training"}')
    assert len(lines.splitlines()) == 8
    names = {"json": json, "os": os, "sys": sys, "datetime": datetime, "UTC": UTC}
    names |= {"torch": SimpleNamespace(__version__="2.15.0"), "step_times": [0.1, 0.3, 0.2]}
    names["load"] = CpuLoad()
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setattr(sys, "argv", ["train.py", "--json", str(tmp_path / rank)])
        exec(lines, names)
    report = load(str(tmp_path / "0"))
    assert (report.benchmark, report.status) == ("my_training", "complete")
    assert report.cases[0].samples_s == {"step": [[0.1, 0.3, 0.2]]}
    ((busy, cores),) = report.end["others"]
    assert 0 <= busy <= cores
    assert not (tmp_path / "1").exists()


@pytest.mark.parametrize(("status", "ends_with"), [(0, 0), (1, 1), (4, 0)])
def test_the_workflow_shows_no_verdict_as_neutral(
    tmp_path: Path, status: int, ends_with: int
) -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/gate.yml").read_text())
    (step,) = [s for s in workflow["jobs"]["gate"]["steps"] if s.get("name") == "compare"]
    program(tmp_path, "python", f'echo "$@"; exit {status}')
    program(tmp_path, "gh", 'echo "$@" >"$RUNNER_TEMP/calls"')
    variables = {"MEASURE": "x.py -b 8", "HEAD": "abc", "GITHUB_REPOSITORY": "me/mine"}
    variables |= {"RUNNER_TEMP": str(tmp_path), "GITHUB_STEP_SUMMARY": str(tmp_path / "summary")}
    assert bash(tmp_path, step["run"], tmp_path, **variables)[0] == ends_with
    summary = (tmp_path / "summary").read_text()
    assert "../base/x.py -b 8 --b torchrun --standalone --nproc-per-node 2 ../head/x.py" in summary
    calls = [path.read_text() for path in tmp_path.glob("calls")]
    assert len(calls) == (status == 4)
    assert all("api repos/me/mine/check-runs" in c and "conclusion=neutral" in c for c in calls)
