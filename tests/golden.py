"""Recorded runs, replayed without measuring: the same times give the same numbers.

    python -m pytest -m smoke tests/test_golden.py    # replay all recordings: some seconds
    python tests/golden.py refresh [SCRIPT...]        # store the current output as expected output

A recording (tests/golden/SCRIPT.json) has the times and facts that rank 0 received from all ranks
of each case. Replaying it runs the whole script in one process except for the cases themselves:
plan, derive, check, tables and answers use the recorded times.
"""

import contextlib
import dataclasses
import importlib
import json
import operator
import os
import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tests" / "golden"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.json"))
UNSTEADY = re.compile(
    r"^# (elapsed|report |others|other processes|rank \d+: other|.*took)|\d+ s of \d+"
)


def rebuilt(value: Any) -> Any:
    """Decode a value of a recording: classes by name, dicts as pairs, arrays with a dtype."""
    if not isinstance(value, dict):
        return value
    if "class" in value:
        module, name = value["class"]
        owner = sys.modules["__main__"] if module == "__main__" else importlib.import_module(module)
        fields = {key: rebuilt(item) for key, item in value["fields"].items()}
        return operator.attrgetter(name)(owner)(**fields)
    if "items" in value:
        return {rebuilt(key): rebuilt(item) for key, item in value["items"]}
    if "array" in value:
        return np.array(value["array"], dtype=value["dtype"])
    (kind, items) = next(iter(value.items()))
    return {"tuple": tuple, "list": list}[kind](rebuilt(item) for item in items)


def is_same(entry: dict[str, Any], case: Any) -> bool:
    """Whether a recorded case is this case. Fields that only one key has are ignored, so that keys
    may gain fields."""
    key, before = case.key, entry["key"]
    same = all(before[name] == key[name] for name in before.keys() & key.keys())
    return entry["ranks"] == case.ranks and same


@contextlib.contextmanager
def recorded(recording: dict[str, Any]) -> Iterator[None]:
    """A job with the number of ranks of the recording, of which only this one exists. Nothing is
    built, timed or sent."""
    from benchmarks.workloads import links, rpc_flags
    from common import groups
    from harness import benchmark, environment
    from harness.observe import nodes
    from harness.observe.load import Load

    size = recording["world_size"]
    left, gathered = list(recording["cases"]), map(rebuilt, recording["gathered"])
    real_join, real_write = benchmark.join, benchmark.Benchmark.write

    def join(*given: Any, **more: Any) -> Any:
        with patch.dict(os.environ, {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}):
            job = real_join(*given, **more)  # without a rendezvous
        return dataclasses.replace(job, world_size=size, local_world_size=size)

    def write(self: Any, case: Any, derive: Any, results: Any, lines: list[str]) -> Any:
        taken = next(entry for entry in left if is_same(entry, case))
        left.remove(taken)
        seen = [None] * len(self.observers)
        received = rebuilt(taken["results"])
        rows = [row and benchmark.RankResult(row[0], row[1], seen) for row in received]
        return real_write(self, case, derive, rows, lines)

    def gather(self: Any, value: Any) -> list[Any]:
        """Return what a script received, and to the harness only the value of this rank."""
        caller = sys._getframe(1)
        observers = ("harness.", "benchmarks.workloads.network")
        is_ours = caller.f_globals["__name__"].startswith(observers)
        return [value] if is_ours or caller.f_code.co_name == "crowd_of" else next(gathered)

    measured_on = recording["environment"]
    launcher = {"RANK": "0", "WORLD_SIZE": str(size), "LOCAL_RANK": "0"}
    launcher |= {"LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with (
        patch.dict(os.environ, launcher),
        patch.object(benchmark, "join", join),
        patch.object(environment, "collect", return_value=measured_on),
        patch.object(nodes, "differences_of", return_value=measured_on["differences"]),
        patch.object(groups.GroupCache, "acquire", return_value=None),
        patch.object(groups.GroupCache, "release"),
        patch.object(benchmark.Benchmark, "attempt", return_value=None),
        patch.object(benchmark.Benchmark, "write", write),
        patch.object(Load, "of_each_node", return_value=[]),
        patch.object(groups.Job, "gather", gather),
        patch.object(links, "most_crowded", return_value=None),  # recorded before it was asked for
        patch.object(rpc_flags, "rpc_workers", lambda *_: contextlib.nullcontext(["cpu"] * size)),
    ):
        yield
    assert not left, f"{len(left)} recorded cases were not asked for, first {left[0]['key']}"


def play(name: str, path: str) -> None:
    """Run the script with its recording, and write a report to `path`."""
    recording = json.loads((FOLDER / f"{name}.json").read_text())
    flags = [flag.replace("ROOT", str(ROOT)) for flag in recording["flags"]]
    sys.argv = [str(ROOT / "benchmarks" / f"{name}.py"), *flags, "--json", path]
    with recorded(recording), contextlib.suppress(SystemExit):
        runpy.run_path(sys.argv[0], run_name="__main__")


def what_came_out(stdout: str, path: Path) -> dict[str, Any]:
    """The output and the cases of the report, without what differs between runs."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    shown = stdout.partition("\n\n")[2].splitlines()  # without the first lines
    cases = [line for line in lines if "key" in line]
    return {
        "shown": [line.rstrip() for line in shown if not UNSTEADY.search(line)],
        "cases": [{part: case.get(part) for part in ("key", "metrics", "check")} for case in cases],
        "status": lines[-1].get("status"),
    }


def refresh(name: str) -> None:
    """Store the current output of the script as the expected output."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.jsonl"
        command = [sys.executable, __file__, "play", name, str(report)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        path = FOLDER / f"{name}.json"
        recording = json.loads(path.read_text()) | {"made": what_came_out(done.stdout, report)}
        path.write_text(json.dumps(recording, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    if sys.argv[1] == "play":
        play(*sys.argv[2:])
    else:
        for script in sys.argv[2:] or SCRIPTS:
            refresh(script)
