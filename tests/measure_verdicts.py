"""How often are compare.py and ab.py wrong while other processes run? Real comparisons of two
programs that take a second each, on this machine. docs/measuring.md shows the results next to those
of the simulation.

    python tests/measure_verdicts.py idle busy period:2 period:10 period:120 steady:5 steady:30
    python tests/measure_verdicts.py --comparisons 3 --change 10 --out try.jsonl idle

idle         no other process: requires a quiet machine
busy         one busy loop throughout
period:S     a busy loop that runs for S / 2 seconds, then pauses for S / 2 seconds, repeatedly
steady:P     a process that uses P % of all cores, as on a CI runner

A comparison runs `ab.py --runs 6`, then compare.py on its first 6 runs of each side. TEST does
--change percent more work. A comparison takes 12 to 24 runs of 1.2 s, and 100 comparisons take 25
to 50 minutes for each condition. Each one is appended to --out as it finishes, so that a later
call adds to it.

    python tests/measure_verdicts.py --summary    # the table of all comparisons in --out

counts wrong, right and missing verdicts, with the upper bound of the share of wrong ones (95 %,
Clopper and Pearson 1934).
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


def verdict_in(stdout: str) -> str | None:
    row = re.search(r"^ *step .* (slower|faster|same|undecided)( \[.*\])?$", stdout, re.M)
    return row[1] if row else None


def compared(folder: Path, work: int, change: float) -> dict[str, Any]:
    """The verdicts of one comparison. Of each run: the time of a step in ms, and the load, which is
    the share of all cores that other processes used. `load` is its mean over runs."""
    (folder / "program.py").write_text(PROGRAM)
    program = shlex.join([sys.executable, str(folder / "program.py")])
    out = folder / "out"
    command = [sys.executable, str(ROOT / "analysis" / "ab.py"), "--runs", "6"]
    command += ["--out", str(out), "--a", f"{program} {work}"]
    command += ["--b", f"{program} {round(work * (1 + change / 100))}"]
    ab = subprocess.run(command, capture_output=True, text=True, check=False)
    first = {
        side: [str(out / side / f"{number:02}.jsonl") for number in range(1, 7)] for side in "ab"
    }
    command = [sys.executable, str(ROOT / "analysis" / "compare.py"), *first["a"]]
    apart = subprocess.run(
        [*command, "--test", *first["b"]], capture_output=True, text=True, check=False
    )
    verdicts = {"ab": verdict_in(ab.stdout), "compare": verdict_in(apart.stdout)}
    for name, run in (("ab", ab), ("compare", apart)):
        if not verdicts[name]:
            raise SystemExit(f"{name}.py printed no verdict:\n{run.stdout}{run.stderr}")
    result: dict[str, Any] = dict(verdicts)
    for side in "ab":  # of each run: the time of its median step, and the load
        reports = sorted(out.glob(f"{side}/*.jsonl"))
        steps = [
            json.loads(path.read_text().splitlines()[1])["samples_s"]["step"] for path in reports
        ]
        result[f"{side}_ms"] = [round(1e3 * statistics.median(times), 2) for (times,) in steps]
        loads = [json.loads(path.with_suffix(".load").read_text())["others"][0] for path in reports]
        result[f"{side}_load"] = [round(busy / cores, 3) for busy, cores in loads]
    every_load = result["a_load"] + result["b_load"]
    return result | {"load": round(statistics.fmean(every_load), 4)}


def upper_bound(wrong: int, count: int) -> float:
    return float(stats.beta.ppf(0.95, wrong + 1, count - wrong)) if wrong < count else 1.0


def summary(comparisons: list[dict[str, Any]]) -> str:
    """A row for each condition and change: share of wrong verdicts, its upper bound, of missing
    and of correct ones, of ab.py and of compare.py."""
    groups: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for line in comparisons:
        groups.setdefault((line["condition"], line["change"]), []).append(line)
    rows: list[list[str]] = []
    for (condition, change), lines in groups.items():
        loads = [line["load"] for line in lines]
        row = [condition, f"{change:g} %", str(len(lines)), f"{statistics.fmean(loads):.1%}"]
        for tool in ("ab", "compare"):
            count = Counter(line[tool] for line in lines)
            wrong = count["faster"] + (count["same"] if change else count["slower"])
            right = count["slower"] if change else count["same"]
            row += [f"{wrong / len(lines):.1%}", f"{upper_bound(wrong, len(lines)):.1%}"]
            row += [f"{count['undecided'] / len(lines):.1%}", f"{right / len(lines):.1%}"]
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
    work = work_of_a_second()
    for condition in args.conditions:
        with beside(condition), tempfile.TemporaryDirectory() as folder:
            for number in range(args.comparisons):
                place = Path(folder) / str(number)
                place.mkdir()
                line = {"condition": condition, "change": args.change}
                line |= compared(place, work, args.change)
                with args.out.open("a") as file:
                    file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
