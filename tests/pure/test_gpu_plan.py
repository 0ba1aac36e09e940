"""tests/gpu without a GPU: its flags are valid, and the plan judges its tasks correctly."""

import importlib
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.gpu.test_gpu import ON_GPU
from tests.process import ROOT

# A stand-in for the Python interpreter of the tasks.
PYTHON = """#!/bin/sh
case "$*" in
    *pp_bubble*) exit 0;;
    *input_wait*|*who_is_slow*) mkdir "$OUT/one" || exit 7; sleep 0.3; rmdir "$OUT/one"; exit 0;;
    *tp_exposed*) echo "ValueError: 3 is not even"; exit 1;;
    *step-raises*) echo "injected: no kernel for this step"; exit 1;;
    *inject.py*) exit 1;;
    *) trap 'sleep 0.5; exit 1' TERM; sleep 600 & echo $$ >"$OUT/pid"; wait;;
esac
"""


def run_plan(folder: Path, **variables: str) -> tuple[int, str]:
    """Run the plan with its files in a folder. Returns exit status and output."""
    plan = str(ROOT / "tests" / "gpu" / "plan.sh")
    env = os.environ | {"OUT": str(folder), "PYTHON": sys.executable} | variables
    done = subprocess.run(["bash", plan], env=env, capture_output=True, text=True, timeout=500)
    return done.returncode, done.stdout + done.stderr


def verdicts_of(folder: Path) -> dict[str, str]:
    """Verdict and exit status by task."""
    lines = (folder / "verdicts.txt").read_text().splitlines()
    words = [line.replace("left out", "left-out").split() for line in lines]
    return {row[4]: f"{row[0]} {row[1]}" for row in words}


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], None]:
    """Parses the flags of a script as on a GPU; an unknown flag raises SystemExit."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def parse(command: list[str]) -> None:
        monkeypatch.setattr(sys, "argv", command)
        importlib.import_module(f"benchmarks.{Path(command[0]).stem}").parse_args()

    return parse


def test_the_flags_of_the_tests_are_valid(parse: Callable[[list[str]], None]) -> None:
    for row in ON_GPU:
        if not row.name.startswith("refused"):
            parse(row.command[row.command.index("benchmarks/") :].split())


def test_the_plan_has_all_scripts_and_valid_flags(
    parse: Callable[[list[str]], None], tmp_path: Path
) -> None:
    parts = [run_plan(tmp_path, DRY_RUN="1", PART=part)[1].splitlines() for part in ("1", "2")]
    assert not set(parts[0]) & set(parts[1])
    # record_and_replay is one command of the plan
    seen = {"benchmarks/replay.py", "examples/record_collectives.py"}
    for line in parts[0] + parts[1]:
        words = shlex.split(line)
        for place, word in enumerate(words):
            if word.startswith(("benchmarks/", "examples/")):
                seen.add(word)
            if word.startswith("benchmarks/"):
                parse(words[place:])
    wanted = {"benchmarks/replay.py", *(f"examples/{x.name}" for x in ROOT.glob("examples/*.py"))}
    for row in ON_GPU:
        wanted |= {word for word in row.command.split() if word.startswith("benchmarks/")}
    assert seen == wanted


def test_the_plan_judges_tasks_and_enforces_time_limits(tmp_path: Path) -> None:
    """Tasks of several NCCL ranks, whose kernels spin, do not run at the same time."""
    folder, python = tmp_path / "an out", tmp_path / "a python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    names = "^(pp_bubble|tp_exposed|two_fail|stops|plain|input_wait|who_is_slow)$"
    variables = {"DEVICE": "cpu", "PYTHON": str(python), "ONLY": names, "SECONDS_PER_TASK": "1"}
    status, out = run_plan(folder, **variables)
    assert verdicts_of(folder) == {
        **dict.fromkeys(("pp_bubble", "input_wait", "who_is_slow"), "ok 0"),
        **{"tp_exposed": "WRONG 1", "two_fail": "ok 1"},
        # the log lacks the reason; time limit exceeded
        **{"stops": "WRONG 1", "plain": "WRONG 124"},
    }
    assert "ValueError: 3 is not even" in out
    assert "4 of 7 tasks are ok" in out
    assert status == 1
    assert not Path(f"/proc/{(folder / 'pid').read_text().strip()}").exists()
    status, _ = run_plan(tmp_path, DEVICE="cpu", ONLY="pp_bubble", SECONDS_IN_ALL="60")
    assert (status, verdicts_of(tmp_path)) == (1, {"pp_bubble": "left-out -"})
