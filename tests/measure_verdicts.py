"""How often are compare.py and ab.py wrong while other processes run?

Really compares two programs, each of which takes a second, on this machine. docs/evidence.md shows
the results next to those of the simulation.

    python tests/measure_verdicts.py idle busy period:2 period:10 period:120 steady:5 steady:30
    python tests/measure_verdicts.py --comparisons 3 --change 10 --out try.jsonl idle
    python tests/measure_verdicts.py --summary    # the table of all comparisons in --out

    idle         no other process; requires a quiet machine
    busy         one busy loop throughout
    period:S     a busy loop that repeatedly runs for S / 2 seconds and pauses for S / 2 seconds
    steady:P     a process that uses P % of all cores, as on a CI runner

A comparison runs `ab.py --runs 6`, then compare.py on the first 6 runs of each side. TEST does
--change percent more work than BASE. A comparison takes 12 to 24 runs of 1.2 s, so 100 comparisons
of a condition take 25 to 50 minutes. Each comparison is appended to --out when it ends, and a later
call adds to the file.
"""

import argparse
import contextlib
import json
import math
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scipy import stats

ROOT = Path(__file__).resolve().parents[1]
CONDITIONS = ("idle", "busy", "period", "steady")
STEPS = 10
# 10 steps of a fixed amount of work, about a second in total, and a report like that of an own loop
PROGRAM = """
import json, sys, time
from datetime import UTC, datetime
work = int(sys.argv[1])
def step():
    total = 0
    for i in range(work):
        total += i * i
times, started = [], datetime.now(UTC).isoformat()
for _ in range(STEPS):
    begin = time.perf_counter()
    step()
    times.append(time.perf_counter() - begin)
head = {"schema": "torchrun-bench/3", "benchmark": "work", "environment": {}, "argv": sys.argv}
case = {"key": {"n": 1}, "name": "step", "ranks": [0], "samples_s": {"step": [times]}}
with open(sys.argv[sys.argv.index("--json") + 1], "w") as file:
    for line in (head | {"started_at": started}, case, {"status": "complete"}):
        file.write(json.dumps(line) + "\\n")
""".replace("STEPS", str(STEPS))
# uses a core for `on` seconds and sleeps for `off` seconds, until its parent has ended
NEIGHBOUR = """
import os, sys, time
on, off, parent = float(sys.argv[1]), float(sys.argv[2]), os.getppid()
while os.getppid() == parent:
    end = time.monotonic() + on
    while time.monotonic() < end:
        pass
    time.sleep(off)
"""


def neighbours(condition: str) -> list[tuple[float, float]]:
    """For each process that runs next to the programs: seconds of a busy loop, seconds of sleep."""
    name, _, number = condition.partition(":")
    if name == "idle":
        return []
    if name == "busy":
        return [(1.0, 0.0)]
    if name == "period":
        return [(float(number) / 2, float(number) / 2)]
    if name == "steady":
        share = float(number) / 100 * len(os.sched_getaffinity(0))  # of one core
        count = max(1, round(share + 0.499))
        return [(0.02 * share / count, 0.02 * (1 - share / count))] * count
    raise SystemExit(f"expected idle, busy, period:S or steady:P, got {condition!r}")


@contextlib.contextmanager
def other_processes(condition: str) -> Iterator[None]:
    started = [
        subprocess.Popen([sys.executable, "-c", NEIGHBOUR, str(on), str(off)])
        for on, off in neighbours(condition)
    ]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def work_of_a_step() -> int:
    """Number of iterations of PROGRAM's loop in a tenth of a second, on this machine."""
    begin, total, work = time.perf_counter(), 0, 200_000
    for i in range(work):
        total += i * i
    return int(work * 0.1 / (time.perf_counter() - begin))


def verdict_in(stdout: str) -> str | None:
    row = re.search(r"^ *step .* (slower|faster|same|undecided)( \[.*\])?$", stdout, re.M)
    return row[1] if row else None


def compared(folder: Path, work: int, change: float) -> dict[str, Any]:
    """The verdicts of one comparison. Of each run: the time of a step in ms, and the load, which is
    the share of all cores that other processes used. `load` is its mean over runs."""
    (folder / "program.py").write_text(PROGRAM)
    program, out = shlex.join([sys.executable, str(folder / "program.py")]), folder / "out"
    first = {side: [str(out / side / f"{n:02}.jsonl") for n in range(1, 7)] for side in "ab"}
    flags = {"ab": ["--runs", "6", "--out", str(out), "--a", f"{program} {work}"]}
    flags["ab"] += ["--b", f"{program} {round(work * (1 + change / 100))}"]
    flags["compare"] = [*first["a"], "--test", *first["b"]]
    result: dict[str, Any] = {}
    for name in flags:
        command = [sys.executable, str(ROOT / "analysis" / f"{name}.py"), *flags[name]]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        result[name] = verdict_in(run.stdout)
        if not result[name]:
            raise SystemExit(f"{name}.py printed no verdict:\n{run.stdout}{run.stderr}")
    for side in "ab":  # of each run: the time of its median step, and the load
        result[f"{side}_ms"], result[f"{side}_load"] = [], []
        for path in sorted(out.glob(f"{side}/*.jsonl")):
            (times,) = json.loads(path.read_text().splitlines()[1])["samples_s"]["step"]
            result[f"{side}_ms"].append(round(1e3 * statistics.median(times), 2))
            busy, cores = json.loads(path.with_suffix(".load").read_text())["others"][0]
            result[f"{side}_load"].append(round(busy / cores, 3))
    every_load = result["a_load"] + result["b_load"]
    return result | {"load": round(statistics.fmean(every_load), 4)}


def upper_bound(wrong: int, count: int) -> float:
    """Upper 95% confidence bound of a share (Clopper and Pearson 1934, Biometrika 26:404)."""
    return float(stats.beta.ppf(0.95, wrong + 1, count - wrong)) if wrong < count else 1.0


def order(condition: str) -> tuple[int, float]:
    """The place of a condition in the table."""
    name, _, number = condition.partition(":")
    return CONDITIONS.index(name), float(number or 0)


def summary(comparisons: list[dict[str, Any]]) -> str:
    """A row for each change and condition, and one for all periods together. Of ab.py and
    compare.py: the share of wrong verdicts, its upper bound, and the shares of missing and of
    correct verdicts."""
    groups: dict[tuple[float, tuple[int, float]], list[dict[str, Any]]] = defaultdict(list)
    for line in comparisons:
        groups[line["change"], order(line["condition"])].append(line)
        if line["condition"].startswith("period"):
            groups[line["change"], order("period:inf")].append(line)
    rows: list[list[str]] = []
    for (change, place), lines in sorted(groups.items()):
        condition = "all periods" if math.inf in place else lines[0]["condition"]
        loads = [line["load"] for line in lines]
        row = [condition, f"{change:g}%", str(len(lines)), f"{statistics.fmean(loads):.1%}"]
        for tool in ("ab", "compare"):
            count = Counter(line[tool] for line in lines)
            wrong = count["faster"] + (count["same"] if change else count["slower"])
            correct = count["slower"] if change else count["same"]
            row += [f"{wrong / len(lines):.1%}", f"{upper_bound(wrong, len(lines)):.1%}"]
            row += [f"{count['undecided'] / len(lines):.1%}", f"{correct / len(lines):.1%}"]
        rows.append(row)
    header = ["other processes", "change", "comparisons", "mean load"]
    for tool in ("ab.py", "compare.py"):
        header += [f"{tool}: wrong", "at most", "no verdict", "correct"]
    table = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("conditions", nargs="*", metavar="CONDITION")
    parser.add_argument("--comparisons", type=int, default=100, metavar="N")
    parser.add_argument("--change", type=float, default=0.0, metavar="PERCENT")
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "measured_verdicts.jsonl")
    parser.add_argument("--summary", action="store_true")
    args = parser.parse_args()
    if args.summary:
        print(summary([json.loads(line) for line in args.out.read_text().splitlines()]))
        return
    work = work_of_a_step()
    for condition in args.conditions:
        with other_processes(condition), tempfile.TemporaryDirectory() as folder:
            for number in range(args.comparisons):
                place = Path(folder) / str(number)
                place.mkdir()
                line = {"condition": condition, "change": args.change}
                line |= compared(place, work, args.change)
                with args.out.open("a") as file:
                    file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
