"""What other programs take from a node: the arithmetic, and who counts as the job."""

import os
import subprocess
import sys
import time
from unittest.mock import Mock

import psutil
import pytest

from common import cpu_load
from common.benchmark import Benchmark
from common.cpu_load import CpuLoad, Others, job_seconds, others_text
from tests.process import ROOT

BURN = "import time\nwhile time.process_time() < 0.3: pass\n"


def test_what_the_job_did_not_use_others_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 10 s the cores were busy for 12 s, of which the job used 7."""
    clock, busy, job = [100.0], [50.0], [20.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(cpu_load, "busy_seconds", lambda cores: busy[0])
    monkeypatch.setattr(cpu_load, "job_seconds", lambda root: job[0])
    load = CpuLoad()
    clock[0], busy[0], job[0] = 110.0, 62.0, 27.0
    assert load.of_others().busy == 0.5
    job[0] = 33.0  # both are counted in ticks: never below 0
    assert load.of_others().busy == 0
    slept = list[float]()
    monkeypatch.setattr(time, "sleep", slept.append)
    clock[0] = 100.0625  # ticks are too coarse for that: it waits until 0.1 s are over
    load.of_others()
    assert slept == [pytest.approx(0.0375)]


def test_children_count_also_after_their_end() -> None:
    """A process that has burnt 0.3 s of CPU, and whose child did the same and ended."""
    code = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BURN!r}])\n{BURN}"
    with subprocess.Popen(
        [sys.executable, "-c", f"{code}\nprint(1, flush=True)\ninput()"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert job_seconds(psutil.Process(process.pid)) >= 0.55  # in ticks of 0.01 s
        process.communicate(b"\n", timeout=60)


def test_a_shell_between_launcher_and_rank_is_passed_over() -> None:
    """The `;` keeps the shell from replacing itself."""
    code = "import psutil; from common.cpu_load import launcher_of\n"
    code += "print(launcher_of(psutil.Process()).pid)"
    for words in ([sys.executable, "-c", code], ["sh", "-c", '"$@"; true', "sh"]):
        command = [*words, *([sys.executable, "-c", code] if words[0] == "sh" else [])]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.stdout == f"{os.getpid()}\n", done.stderr


def test_a_busy_node_is_named() -> None:
    loads = [Others(0.2, 2), Others(0.21, 2), Others(3.0, 64)]
    assert others_text(["a", "b", "c"], loads) == "other programs take 0.2 of 2 cores of b"
    assert others_text(["a"], loads[:1]) == ""
    assert others_text(["a", "b"], []) == ""  # a dry run


@pytest.mark.parametrize(
    ("loads", "taken"),
    [
        ([], None),  # while two commands take turns
        ([Others(0.2, 2), Others(6.0, 64)], None),
        ([Others(0.9, 2), Others(1.6, 2), Others(3.0, 64)], Others(1.6, 2)),
    ],
)
def test_a_run_is_disturbed_from_a_tenth_of_a_node_on(
    loads: list[Others], taken: Others | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node where they took most counts. Rank 0 knows the loads."""
    monkeypatch.setattr("common.benchmark.share", lambda value: value)
    assert Benchmark.disturbed(Mock(load_of_others=lambda: loads)) == taken
