"""How often do compare.py and ab.py err beside other programs? Real comparisons of programs that
take a second, on this machine. docs/measuring.md has the simulated table beside it.

    python tests/measure_verdicts.py idle busy period:2 period:10 period:120 steady:5 steady:30
    python tests/measure_verdicts.py --comparisons 3 --change 10 idle      # a try

idle         nothing beside the programs: on a quiet machine
busy         a busy loop throughout
period:S     a busy loop that is on for S / 2 seconds, then off for as long, again and again
steady:P     a process that uses P % of all cores, as on a CI runner

Each comparison is a call of ab.py --runs 6; TEST does --change percent more work. It takes 12 to 24
runs of 1.2 s, so 100 comparisons take 25 to 50 minutes a condition. Prints for each condition how
many verdicts were wrong, right and missing, with the upper bound of the share of wrong ones (95 %,
Clopper and Pearson 1934).
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from scipy import stats

ROOT = Path(__file__).resolve().parents[1]
STEPS = 10
# 10 steps of a fixed amount of work, about a second in all, and the report of one's own loop
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
# on for `on` seconds, off for `off` seconds, until its parent is gone
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
    """Seconds on and off of each process that runs beside the programs."""
    name, _, number = condition.partition(":")
    cores = len(os.sched_getaffinity(0))
    if name == "idle":
        return []
    if name == "busy":
        return [(1.0, 0.0)]
    if name == "period":
        return [(float(number) / 2, float(number) / 2)]
    if name == "steady":
        share = float(number) / 100 * cores  # of one core, or more than one process
        count = max(1, round(share + 0.499))
        on = 0.02 * share / count
        return [(on, 0.02 - on)] * count
    raise SystemExit(f"expected idle, busy, period:S or steady:P, got {condition!r}")


@contextlib.contextmanager
def beside(condition: str) -> Iterator[None]:
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


def work_of_a_second() -> int:
    """How much work a step of a tenth of a second has, here and now."""
    begin, total, work = time.perf_counter(), 0, 200_000
    for i in range(work):
        total += i * i
    return int(work * 0.1 / (time.perf_counter() - begin))


def compared(folder: Path, work: int, change: float) -> str:
    """The verdict of one comparison."""
    (folder / "program.py").write_text(PROGRAM)
    program = shlex.join([sys.executable, str(folder / "program.py")])
    command = [sys.executable, str(ROOT / "analysis" / "ab.py"), "--runs", "6"]
    command += ["--out", str(folder / "out"), "--a", f"{program} {work}"]
    command += ["--b", f"{program} {round(work * (1 + change / 100))}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    row = re.search(r"^step .* (slower|faster|same|undecided)( \[.*\])?$", done.stdout, re.M)
    if not row:
        raise SystemExit(f"ab.py printed no verdict:\n{done.stdout}{done.stderr}")
    return row[1]


def upper_bound(wrong: int, count: int) -> float:
    return float(stats.beta.ppf(0.95, wrong + 1, count - wrong)) if wrong < count else 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("conditions", nargs="+", metavar="CONDITION")
    parser.add_argument("--comparisons", type=int, default=100, metavar="N")
    parser.add_argument("--change", type=float, default=0.0, metavar="PERCENT")
    args = parser.parse_args()
    work = work_of_a_second()
    for condition in args.conditions:
        verdicts: Counter[str] = Counter()
        begin = time.monotonic()
        with beside(condition), tempfile.TemporaryDirectory() as folder:
            for number in range(args.comparisons):
                place = Path(folder) / str(number)
                place.mkdir()
                verdicts[compared(place, work, args.change)] += 1
        wrong = verdicts["faster"] + (verdicts["slower"] if not args.change else 0)
        result = {"condition": condition, "change": args.change, **verdicts}
        result |= {"wrong": wrong, "at most": round(upper_bound(wrong, args.comparisons), 3)}
        result["minutes"] = round((time.monotonic() - begin) / 60, 1)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
