"""The gates of docs/ci.md: git bisect, a training loop, a GitHub workflow, a stored baseline."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from analysis.ab import add_flags
from harness.cli import Parser
from harness.report import load
from tests.process import ROOT, free_port
from tests.pure.reports import case, write

PAGE = (ROOT / "docs" / "ci.md").read_text()
SCRIPT = ROOT / "analysis" / "bisect.sh"
# The 5th of 6 commits is slow. The 3rd has no verdict; git tries it first, and skips it.
BISECT = """
git init -q . && git config user.name x && git config user.email x@example.org
for number in 1 2 3 4 5 6; do echo $number >number; git add . && git commit -qm $number; done
git bisect start HEAD HEAD~5 && git bisect run bash "$SCRIPT" && git bisect log
"""
AB = """
printf "%s\\n" "$@" >"$OUT"
read -r number <number
case $number in
    3) echo "$THIRD"; exit "$THIRD_STATUS" ;;
    5 | 6) echo "# --fail-on slower: failed (1 failed, 2 slower [load not recorded])"; exit 1 ;;
esac
"""


def block(first: str) -> str:
    """The indented block of the page that begins with the line `first`."""
    lines = PAGE[PAGE.index(f"    {first}\n") :].split("\n\n")[0]
    return textwrap.dedent(lines) + "\n"


def stand_in(folder: Path, name: str, text: str) -> None:
    """Write a program into a folder for PATH."""
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def bash(folder: Path, script: str, cwd: Path, **variables: str) -> tuple[int, str]:
    """The exit status and stdout of a script that finds its programs in `folder`."""
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | variables | {"PATH": path, "TMPDIR": str(folder)}
    command = ["bash", "-eo", "pipefail", "-c", script]
    done = subprocess.run(command, cwd=cwd, env=environment, stdout=subprocess.PIPE, timeout=500)
    return done.returncode, done.stdout.decode()


@pytest.mark.parametrize(
    ("third_status", "third"),
    [
        ("4", "# --fail-on slower: no verdict (1 undecided)"),
        ("1", "# --fail-on slower: failed (1 failed)"),  # a case failed
        ("1", ""),  # a run failed, or the disk is full
    ],
)
@pytest.mark.smoke
def test_git_bisect_finds_the_slow_commit(tmp_path: Path, third_status: str, third: str) -> None:
    repository = tmp_path / "a repository"
    repository.mkdir()
    stand_in(tmp_path, "measure", "")
    stand_in(tmp_path, "python", AB)
    out = tmp_path / "words"
    variables = {"MEASURE": "measure -b 8", "GOOD": "a good one", "OUT": str(out)}
    variables["SCRIPT"] = str(SCRIPT)
    variables |= {"THIRD_STATUS": third_status, "THIRD": third}
    status, printed = bash(tmp_path, BISECT, repository, **variables)
    assert status == 0, printed
    assert re.search(r"\n# skip: \[\w+\] 3\n(.*\n)*# first bad commit: \[\w+\] 5\n$", printed)
    script, *flags = out.read_text().splitlines()
    parser = Parser(None)
    add_flags(parser)
    args = parser.parse_args(flags)
    assert (script, args.runs, args.fail_on) == (str(SCRIPT.parent / "ab.py"), 6, ["slower"])
    assert (args.a, args.b) == ("env -C 'a good one' measure -b 8", ["measure -b 8"])


@pytest.mark.parametrize(("status", "expected"), [(2, 255), (130, 255), (0, 0)])
def test_incorrect_usage_ends_the_bisection(tmp_path: Path, status: int, expected: int) -> None:
    stand_in(tmp_path, "measure", "")
    stand_in(tmp_path, "python", f"exit {status}")
    stand_in(tmp_path, "git", "echo abc")
    variables = {"MEASURE": "measure", "GOOD": "/g", "OUT": str(tmp_path / "out")}
    script = f"bash {shlex.quote(str(SCRIPT))}"
    assert bash(tmp_path, script, tmp_path, **variables) == (expected, "")


@pytest.mark.smoke
def test_a_training_loop_can_write_a_report(tmp_path: Path) -> None:
    """docs/ci/train.py, as it is, on two ranks."""
    for path in ("docs/ci/train.py", "harness/cpu_load.py"):
        shutil.copy(ROOT / path, tmp_path)
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "train.py", "--json", "report.jsonl", "--lr", "0.1"]
    ranks = [
        subprocess.Popen(command, cwd=tmp_path, env=os.environ | world | {"RANK": rank})
        for rank in "01"
    ]
    try:
        assert [rank.wait(timeout=500) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    report = load(str(tmp_path / "report.jsonl"))
    assert (report.benchmark, report.status) == ("my_training", "complete")
    assert len(report.cases[0].samples_s["step"][0]) == 50
    ((busy, cores),) = report.end["others"]
    assert 0 <= busy <= cores


# A training script for the scratch repository: 12 steps of the time in the file `seconds`, with the
# noise that the variable NOISE_... lists by run.
TRAIN = """
import json, os, re, sys
seconds = float(open("seconds").read())
path = sys.argv[-1]
number = int(re.sub(r"\\D", "", os.path.basename(path)) or 0)
out = os.path.dirname(os.path.dirname(path))
noise = [float(x) for x in os.environ["NOISE_" + os.path.basename(out)].split(",")]
is_head = os.path.basename(os.path.dirname(path)) == "b"
seconds *= 1 + noise[number % len(noise)] * (1 if is_head else -1)
head = {"schema": "torchrun-bench/3", "benchmark": "train", "environment": {"hosts": [path]}}
head |= {"started_at": f"2026-01-01T00:{number:02}:00+00:00"}
case = {"key": {"n": 1}, "name": "step", "ranks": [0], "samples_s": {"step": [[seconds] * 12]}}
with open(path, "w") as file:
    for line in (head, case, {"status": "complete", "others": [[0.0, 2]]}):
        file.write(json.dumps(line) + "\\n")
"""
PYTHON = f"""
case "$1" in */report.py) [ -n "$PAGE" ] || exit 0 ;; esac  # drawing a page takes seconds
exec {shlex.quote(sys.executable)} "$@"
"""
PRINTS = """
import random
seconds = float(open("seconds").read()) * random.uniform(0.9999, 1.0001)
for _ in range(12):
    print(f"a step took {1000 * seconds:.5f} ms")
"""
QUIET, NOISY = "0.001,-0.001", "0.2,-0.2"
COMMITS = """
git init -q . && git config user.name x && git config user.email x@example.org
echo '*.pyc' >.gitignore && echo torch >requirements.txt
echo 0.1 >seconds && git add . && git commit -qm base
echo "$1" >seconds && git commit -qam head --allow-empty
"""
EXPRESSIONS = {  # stand-ins for what GitHub evaluates
    "github.event.pull_request.head.sha || github.sha": "abc",
    "github.token": "a token",
}


def workflow() -> Any:
    return yaml.safe_load((ROOT / "docs" / "ci" / "speed.yml").read_text())


def evaluated(text: str) -> str:
    """Replace the expressions of GitHub. KeyError for an expression without a stand-in."""
    return re.sub(r"\$\{\{ (.*?) \}\}", lambda match: EXPRESSIONS[match[1]], text)


class Github:
    """A runner: a checkout with two commits, a checkout of this project, and the variables."""

    def __init__(self, folder: Path, seconds: str, program: str = TRAIN, **variables: str) -> None:
        self.folder, jobs = folder, workflow()["jobs"]
        self.job, self.neutral = jobs["speed"], jobs["neutral"]
        self.workspace, self.temp = folder / "work", folder / "a runner temp"
        for path in (self.workspace, self.temp, folder / "bin"):
            path.mkdir()
        (self.workspace / "train.py").write_text(program)
        set_up = ["bash", "-euc", COMMITS, "-", seconds]
        subprocess.run(set_up, cwd=self.workspace, check=True, timeout=500)
        (self.workspace / "torchrun-bench").symlink_to(ROOT)
        stand_in(folder / "bin", "python", PYTHON)
        stand_in(folder / "bin", "pip", 'echo "$@" >>"$LOG"')
        stand_in(folder / "bin", "gh", 'printf "%s\\n" "$*" >>"$LOG"; exit "$GH_STATUS"')
        env: dict[str, str] = {name: evaluated(value) for name, value in self.job["env"].items()}
        self.variables = env | {
            "MEASURE": "python train.py",
            "RUNNER_TEMP": str(self.temp),
            "GITHUB_REPOSITORY": "me/mine",
            "GITHUB_STEP_SUMMARY": str(folder / "summary"),
            "GITHUB_OUTPUT": str(folder / "output"),
            "LOG": str(folder / "calls"),
            "GH_STATUS": "0",
            **variables,
        }

    def run(self) -> tuple[int, str]:
        """Run all `run:` scripts as GitHub does: status and stdout of the last one of each job."""
        assert workflow()["defaults"]["run"]["shell"] == "bash"
        status, printed = 0, ""
        stand_ins, output = self.folder / "bin", self.folder / "output"
        for step in self.job["steps"]:
            if status == 0 and "run" in step:
                assert "env" not in step
                status, printed = bash(stand_ins, step["run"], self.workspace, **self.variables)
        if status == 0 and output.exists() and output.read_text() == "verdict=none\n":
            (step,) = self.neutral["steps"]
            env = {name: evaluated(value) for name, value in step["env"].items()}
            status, more = bash(stand_ins, step["run"], self.temp, **self.variables, **env)
            printed += more
        return status, printed

    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()


def test_what_the_workflow_uses_of_github() -> None:
    """Code of a pull request gets no token that can write: permissions are those of a job."""
    content = workflow()
    speed, neutral = content["jobs"].values()
    first, second, *others = speed["steps"]
    assert [step["uses"] for step in (first, second)] == ["actions/checkout@v4"] * 2
    assert first["with"] == {"fetch-depth": 2, "persist-credentials": False}  # a merge's parents
    assert second["with"]["path"] == "torchrun-bench"
    assert not second["with"]["persist-credentials"]
    assert content["permissions"] == {"contents": "read"}
    assert "permissions" not in speed
    assert "token" not in str(speed)
    assert neutral["permissions"] == {"checks": "write"}
    assert (neutral["needs"], neutral["if"]) == ("speed", "needs.speed.outputs.verdict == 'none'")
    assert speed["outputs"] == {"verdict": "${{ steps.compare.outputs.verdict }}"}
    assert [step["id"] for step in speed["steps"] if "id" in step] == ["compare"]
    assert not any("uses" in step for step in neutral["steps"])  # no checkout
    assert set(content[True]) == {"pull_request", "workflow_dispatch"}  # YAML 1.1: `on` is true
    upload = others[-1]
    assert (upload["if"], upload["with"]["path"]) == ("always()", "${{ runner.temp }}/speed")


@pytest.mark.parametrize(
    ("seconds", "noise", "status", "verdict"),
    [
        ("0.1", [QUIET], 0, "pass"),
        ("0.12", [QUIET], 1, "failed (1 slower)"),
        ("0.09", [QUIET], 0, "pass"),
        ("0.12", [NOISY, QUIET], 1, "failed (1 slower)"),  # at the second attempt
        ("0.1", [NOISY, NOISY], 0, "no verdict (1 undecided)"),
    ],
)
@pytest.mark.smoke
def test_the_workflow_in_a_scratch_repository(
    tmp_path: Path, seconds: str, noise: list[str], status: int, verdict: str
) -> None:
    tries = dict(zip(("NOISE_6", "NOISE_12"), noise, strict=False))
    has_page = seconds == "0.09"
    github = Github(tmp_path, seconds, PAGE="yes" * has_page, **tries)
    assert github.run()[0] == status
    pages = list((github.temp / "speed").glob("*.html"))
    assert [page.name for page in pages] == ["6.html"] * has_page
    installed, *calls = github.calls()
    assert installed == "install -r requirements.txt"
    assert calls[0] == "install -r torchrun-bench/analysis/requirements.txt"
    tables = (tmp_path / "summary").read_text().split("```\n")[1::2]
    assert len(tables) == len(noise)
    assert tables[-1].endswith(f"# --fail-on slower: {verdict}\n")
    for table, runs in zip(tables, (6, 12), strict=False):
        sides = f": {runs} of BASE, {runs} of TEST; margin 5%"
        assert f"{sides}; unit of observation: the pair of runs" in table
        folder = github.temp / "speed" / str(runs)
        assert len(list(folder.glob("a/*.jsonl"))) == len(list(folder.glob("b/*.jsonl"))) == runs
    neutral = [call for call in calls if "conclusion=neutral" in call]
    assert len(neutral) == verdict.startswith("no verdict")
    assert all("api repos/me/mine/check-runs" in call for call in neutral)
    assert all("head_sha=abc" in call for call in neutral)


@pytest.mark.smoke
def test_a_fork_gets_a_notice_instead_of_the_neutral_check(tmp_path: Path) -> None:
    github = Github(tmp_path, "0.1", NOISE_6=NOISY, NOISE_12=NOISY, GH_STATUS="1")
    status, printed = github.run()
    assert status == 0
    assert "::notice title=speed::no verdict" in printed
    assert "the token is read-only: there is no neutral check, only the notice of" in printed


@pytest.mark.smoke
def test_a_self_hosted_runner_keeps_the_checkout_between_jobs(tmp_path: Path) -> None:
    """The temporary folder is emptied: the worktrees are gone, but git still lists them."""
    github = Github(tmp_path, "0.1", NOISE_6=QUIET)
    assert github.run()[0] == 0
    shutil.rmtree(github.temp)
    github.temp.mkdir()
    assert github.run()[0] == 0


@pytest.mark.smoke
def test_a_command_that_only_prints_its_step_times(tmp_path: Path) -> None:
    """The page has the --step. --allow-disturbed, because ab.py measures the real load."""
    example = re.search(r"such as `(--step '[^`]+')`", " ".join(PAGE.split()))
    assert example
    github = Github(tmp_path, "0.12", program=PRINTS)
    for step in github.job["steps"]:
        if step.get("name") == "compare":
            more = f"--margin 5% --allow-disturbed {example[1]}"
            step["run"] = step["run"].replace("--margin 5%", more)
    assert github.run()[0] == 1
    assert " ms  1.20x slower  " in (tmp_path / "summary").read_text()


@pytest.mark.smoke
def test_a_command_that_fails_fails_the_job(tmp_path: Path) -> None:
    github = Github(tmp_path, "0.1", MEASURE="false", PAGE="yes")
    status, printed = github.run()
    assert (status, printed) == (1, "no page\n")
    assert not any("check-runs" in call for call in github.calls())


@pytest.mark.parametrize(
    ("seconds", "status", "verdict"),
    [
        ("0.1000001", 0, "pass"),
        ("0.103", 0, "no verdict (1 undecided)"),  # 1.007 to 1.054
        ("0.12", 1, "failed (1 slower [one session])"),
        ("0.08", 0, "pass"),
    ],
)
def test_the_stored_baseline(tmp_path: Path, seconds: str, status: int, verdict: str) -> None:
    """14 nights that differ by 1% against one: +-2.3%. A night joins them unless it fails."""
    make, measure, compare, keep = block("mkdir -p nights").splitlines()
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "seconds").write_text(seconds)
    (tmp_path / "torchrun-bench").symlink_to(ROOT)
    stand_in(tmp_path, "python", PYTHON)
    assert bash(tmp_path, make, tmp_path) == (0, "")
    for night in range(14):
        step = case("step", [0.1 * (1 + 0.01 * (-1) ** night)] * 12, key={"n": 1})
        about = {"benchmark": "train", "started_at": f"2026-02-{night + 1:02}T03:00:00+00:00"}
        write(tmp_path / "nights" / f"{night}.jsonl", step, **about)
    script = f"{measure}\n{compare}\n{keep}"
    done, printed = bash(tmp_path, script, tmp_path, MEASURE="python train.py", NOISE_="0")
    assert (done, printed.splitlines()[-1]) == (status, f"# --fail-on slower: {verdict}")
    assert ": 14 of BASE, 1 of TEST; margin 5%; unit of observation: the session" in printed
    assert (tmp_path / "tonight.jsonl").exists() == (status != 0)
