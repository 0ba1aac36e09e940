"""Reports for the tests of analysis/, and a way to run its scripts in this process."""

import gc
import io
import itertools
import json
import random
import runpy
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from harness import cpu_load

ROOT = Path(__file__).resolve().parents[2]
SIGNALS = {signal.SIGHUP: 129, signal.SIGINT: 130, signal.SIGTERM: 143}  # ab.py's exit status


# writes a report of 24 blocks to --json; waits for its turn before each block if there are pipes
FAKE = """
import json, os, random, subprocess, sys, time
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
for block in range(24):
    print(sys.argv[1], "begins", file=log, flush=True)
    noise = random.gauss(0, 1e-5)  # equal samples would be copies of one run
    times += [seconds * (1 + 0.001 * ((7 * number + block) % 5) + noise)] * 2
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


def fake(folder: Path, words: str) -> str:
    """A command for ab.py that writes such a report: `0.1 x` has steps of 0.1 s. The second word
    may be hang, leave, no turns or fail."""
    script = folder / "fake.py"
    if not script.exists():
        script.write_text(FAKE)
    return f"{shlex.join([sys.executable, str(script)])} {words}"


def estimate(value: Any, low: Any = None, high: Any = None) -> dict[str, Any]:
    """An estimate in the form that a report stores."""
    return {"value": value, "low": low, "high": high}


def case(name: str, times: Sequence[Any] = (0.1,), **changes: Any) -> dict[str, Any]:
    """A case of one rank. times: the seconds of each step."""
    line = {
        "key": {"setting": name, "model": "resnet18", "batch_size": 8},
        "name": name,
        "table": "resnet18, batch size 8",
        "ranks": [0],
        "samples_s": {"step": [list(times)]},
        "rounds": [len(times)],
        "stop": "iters",
        "metrics": {"step_s": estimate(sorted(times)[len(times) // 2])},
        "check": "passed",
    }
    return line | changes


STARTS = itertools.count()  # so that no two reports are copies of one run


def start(hour: int = 0) -> str:
    """A different time within this hour of 2026-01-01 for each call."""
    minute, second = divmod(next(STARTS) % 3600, 60)
    return f"2026-01-01T{hour:02}:{minute:02}:{second:02}+00:00"


def write(path: Path, *cases: dict[str, Any], **changes: Any) -> str:
    """Write a complete report of ddp_sweep.py and return its path.

    changes: entries of the first line; `status` of the last line, None for no last line; `others`,
    the cores that other processes used on each node, None if that was not recorded.
    """
    status, others = changes.pop("status", "complete"), changes.pop("others", [[0.0, 2]])
    about = {"torch": "2.15.0", "world_size": 2, "devices": ["a CPU"], "hosts": ["vm"]}
    head = {"schema": "torchrun-bench/3", "benchmark": "ddp_sweep", "environment": about}
    head |= {"argv": ["benchmarks/ddp_sweep.py"], "started_at": start()}
    lines = [head | changes, *cases]
    if status:
        last = {"status": status, "finished_at": "2026-01-01T00:01:00+00:00"}
        lines.append(last if others is None else last | {"others": others})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def runs(folder: Path, times: Sequence[float], name: str = "no ddp", **changes: Any) -> str:
    """A folder of reports, one for each time in seconds, started an hour apart. 1e-6 of it is
    added, since few digits would widen intervals."""
    for i, seconds in enumerate(times):
        head = {"started_at": start(i)} | changes
        write(folder / f"{i:02}.jsonl", case(name, [seconds * 1.000001] * 5), **head)
    return str(folder)


def alike(count: int, seconds: float, seed: int, scatter: float = 0.01) -> list[float]:
    """Times of equal runs, with a relative standard deviation of `scatter`."""
    rng = random.Random(seed)
    return [seconds * (1 + rng.gauss(0, scatter)) for _ in range(count)]


def run(script: str, *words: str) -> CompletedProcess[str]:
    """Run a script of analysis/ in this process, which has already imported its packages. For the
    script, the machine is idle."""
    path = str(ROOT / "analysis" / script)
    out, err = io.StringIO(), io.StringIO()
    status: Any = 0
    try:
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.setattr(sys, "argv", [path, *words])
            patch.setattr(cpu_load, "busy_seconds", lambda cores: 0.0)
            runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        status = end.code
    finally:
        gc.enable()  # compare.py has disabled it
    return CompletedProcess([path, *words], status, out.getvalue(), err.getvalue())


def refusal(script: str, *words: str) -> str:
    """The line with which a script of analysis/ refuses its input."""
    done = run(script, *words)
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    return line


def refused(call: Callable[..., Any], *given: Any, **more: Any) -> str:
    """The line of the ValueError that a call raises."""
    with pytest.raises(ValueError, match=r".") as error:
        call(*given, **more)
    (line,) = str(error.value).splitlines()
    del error  # its frames would keep e.g. a report open
    return line
