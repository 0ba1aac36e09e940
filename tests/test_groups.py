"""What is left of a run's process groups when it ends."""

import subprocess
import sys

import pytest

from tests.process import ROOT, environment

SAY_THREADS = """
import atexit, pathlib, runpy, sys
def say():
    names = [task.read_text().strip() for task in pathlib.Path("/proc/self/task").glob("*/comm")]
    print("threads at exit:", *sorted(names))
atexit.register(say)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.smoke
def test_no_thread_of_gloo_outlives_the_run() -> None:
    """One that did crashed now and then as the interpreter ended: status 1.

    The first optimizer imports what may keep a group. A process of its own: which modules are
    imported before the groups are made matters.
    """
    script = str(ROOT / "benchmarks" / "ddp_sweep.py")
    start = f"import sys; sys.argv = [{script!r}, *sys.argv[1:]]; {SAY_THREADS}"
    flags = ["--model", "mobilenet_v3_small", "--image-size", "32", "--iters", "2"]
    command = [sys.executable, "-c", start, *flags]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment())
    assert run.returncode == 0, run.stdout + run.stderr
    *_, threads = run.stdout.splitlines()
    assert threads.startswith("threads at exit: ")
    assert "gloo" not in threads
