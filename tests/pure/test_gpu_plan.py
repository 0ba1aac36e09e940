"""tests/gpu without a GPU: which tests there are, whether flags are known, how the plan runs."""

import importlib
import os
import shlex
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.gpu import test_one_gpu
from tests.process import ROOT

PLAN = ROOT / "tests" / "gpu" / "plan.sh"
SCRIPTS = test_one_gpu.SCRIPTS
EXAMPLES = {path.stem for path in ROOT.glob("examples/*.py")}


def start_plan(folder: Path, **variables: str) -> "subprocess.Popen[str]":
    """Start the plan. It writes its files into `folder`."""
    own = {"OUT": str(folder), "PYTHON": sys.executable} | variables
    return subprocess.Popen(
        ["bash", str(PLAN)],
        env=os.environ | own,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def run_plan(folder: Path, **variables: str) -> tuple[int, str]:
    """Run the plan. Its exit status and its output."""
    process = start_plan(folder, **variables)
    out, _ = process.communicate(timeout=60)
    return process.returncode, out


def parse(script: str, flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the script parse the flags. An unknown one ends the process."""
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *flags])
    importlib.import_module(f"benchmarks.{script}").parse_args()


def test_every_script_runs_with_one_and_two_nccl_ranks() -> None:
    """What `python -m pytest -m gpu tests/gpu --collect-only` lists."""
    decorators = getattr(test_one_gpu.test_each_script, "pytestmark")  # noqa: B009
    marks = {mark.args[0]: mark.args[1] for mark in decorators}
    assert marks == {"script": SCRIPTS, "nccl_ranks": [1, 2]}


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_flags_of_the_tests_are_known(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    processes, flags = test_one_gpu.processes_and_flags(script, 2)
    assert processes >= 2
    parse(script, ["trace", *flags] if script == "replay" else flags, monkeypatch)


def test_the_plan_has_every_script_and_its_flags_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # tf32 is refused on the CPU
    status, out = run_plan(tmp_path, DRY_RUN="1")
    assert status == 0, out
    scripts = set()
    for line in out.splitlines():
        words = shlex.split(line)
        for number, word in enumerate(words):
            if word.startswith(("benchmarks/", "examples/")):
                scripts.add(word)
                if word.startswith("benchmarks/"):
                    parse(Path(word).stem, words[number + 1 :], monkeypatch)
    # record_and_replay is one command of the plan
    scripts |= {"benchmarks/replay.py", "examples/record_collectives.py"}
    expected = {f"benchmarks/{name}.py" for name in test_one_gpu.COMMANDS}
    assert scripts == expected | {f"examples/{name}.py" for name in EXAMPLES}


def test_the_plan_has_two_parts(tmp_path: Path) -> None:
    """Each task is in one of them."""
    tasks: dict[str, list[str]] = {}
    for part in ("1", "2", ""):
        _, out = run_plan(tmp_path, DRY_RUN="1", PART=part)
        tasks[part] = out.splitlines()
    first, second = tasks["1"], tasks["2"]
    assert sorted(first + second) == sorted(tasks[""])
    assert len(set(first + second)) == len(first + second)
    assert min(len(first), len(second)) > 15


# It stands for the interpreter that runs the tasks. ddp_sweep.py takes a moment to end.
STAND_IN = """#!/bin/sh
case "$*" in
    *pp_bubble*) exit 0;;
    *input_wait*|*who_is_slow*) mkdir "$OUT/one" || exit 7; sleep 0.3; rmdir "$OUT/one"; exit 0;;
    *tp_exposed*) echo "ValueError: 3 is not even"; exit 1;;
    *step-raises*) echo "injected: no kernel for this step"; exit 1;;
    *inject.py*) exit 1;;
    *) trap 'sleep 0.5; exit 1' TERM; sleep 600 & echo $$ >"$OUT/pid"; wait;;
esac
"""


def verdicts_of(folder: Path) -> dict[str, list[str]]:
    """The lines of verdicts.txt, by task: the verdict and the exit status."""
    lines = (folder / "verdicts.txt").read_text().splitlines()
    words = [line.replace("left out", "left-out").split() for line in lines]
    return {row[4]: row[:2] for row in words}


def stand_in(folder: Path) -> str:
    """The path of an executable file with STAND_IN."""
    python = folder / "a python"
    python.write_text(STAND_IN)
    python.chmod(python.stat().st_mode | stat.S_IEXEC)
    return str(python)


def is_alive(pid_file: Path) -> bool:
    return Path(f"/proc/{pid_file.read_text().strip()}").exists()


def test_the_plan_judges_each_task_and_ends_what_takes_too_long(tmp_path: Path) -> None:
    """A task must pass, or fail for the reason that it plants."""
    folder = tmp_path / "an out"
    names = "^(pp_bubble|tp_exposed|two_fail|stops|plain)$"
    settings = {"DEVICE": "cpu", "PYTHON": stand_in(tmp_path), "ONLY": names}
    status, out = run_plan(folder, SECONDS_PER_TASK="1", **settings)
    assert verdicts_of(folder) == {
        "pp_bubble": ["ok", "0"],
        "tp_exposed": ["WRONG", "1"],
        "two_fail": ["ok", "1"],
        "stops": ["WRONG", "1"],  # its log lacks the reason
        "plain": ["WRONG", "124"],
    }
    assert "ValueError: 3 is not even" in out
    assert "2 of 5 tasks are ok" in out
    assert status == 1
    assert not is_alive(folder / "pid")


def test_tasks_of_several_nccl_ranks_run_one_at_a_time(tmp_path: Path) -> None:
    """Their kernels spin: side by side they would take each other's time on the GPU."""
    settings = {"DEVICE": "cpu", "PYTHON": stand_in(tmp_path), "ONLY": "^(input_wait|who_is_slow)$"}
    status, out = run_plan(tmp_path, **settings)
    assert verdicts_of(tmp_path) == {"input_wait": ["ok", "0"], "who_is_slow": ["ok", "0"]}, out
    assert status == 0


def test_a_plan_that_is_ended_ends_its_tasks(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    settings = {"DEVICE": "cpu", "PYTHON": stand_in(tmp_path), "ONLY": "^plain$"}
    process = start_plan(tmp_path, **settings)
    try:
        end = time.monotonic() + 30
        while not (pid_file.exists() and pid_file.read_text()):
            assert time.monotonic() < end
            time.sleep(0.05)
    finally:
        process.terminate()
        process.communicate(timeout=30)
    assert process.returncode == 130
    assert not is_alive(pid_file)


def test_tasks_that_would_be_late_are_left_out(tmp_path: Path) -> None:
    status, _ = run_plan(tmp_path, DEVICE="cpu", ONLY="pp_bubble", SECONDS_IN_ALL="60")
    assert verdicts_of(tmp_path) == {"pp_bubble": ["left-out", "-"]}
    assert status == 1
