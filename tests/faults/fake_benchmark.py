"""Writes a report at once, with times as the variables say: for tests of what runs benchmarks.

FAKE_SCALE: times every time. FAKE_SLEEP: seconds before the report. FAKE_FAIL_ONCE: a path; where
there is no such file it makes one, prints a few lines, and ends with status 7. FAKE_HALF: leaves
half a report. FAKE_STATUS: the report's, instead of complete; FAKE_CHECK: that of its cases, and
status 1; FAKE_BENCHMARK: whose report it is. FAKE_STUBBORN_FROM: the run with this
report ignores SIGINT and SIGTERM, starts a child in a session of its own, and sleeps.
FAKE_LOG: a file to which each run adds a line. FAKE_TURNS: takes so many turns with other commands,
each a line of its own in FAKE_LOG.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common import turns

parser = argparse.ArgumentParser()
parser.add_argument("--json")
parser.add_argument("--cases", type=int, default=2)
parser.add_argument("--noise", type=float, default=0.001)
args = parser.parse_args()
variables = os.environ
turn = turns.join(lambda: None, 60) if "FAKE_TURNS" in variables else None
for _ in range(int(variables.get("FAKE_TURNS", "0")) if turn else 0):
    with Path(variables["FAKE_LOG"]).open("a") as log:
        log.write(f"{Path(args.json).stem} turn\n")
    time.sleep(0.05)
    turn.pass_on()
if "FAKE_LOG" in variables and not turn:
    with Path(variables["FAKE_LOG"]).open("a") as log:
        log.write(f"{Path(args.json).stem} {sys.executable}\n")
child = None
if variables.get("FAKE_STUBBORN_FROM") == args.json:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    print(f"child {child.pid}", flush=True)
print("started", flush=True)
time.sleep(600 if child else float(variables.get("FAKE_SLEEP", "0")))
if "FAKE_FAIL_ONCE" in variables and not Path(variables["FAKE_FAIL_ONCE"]).exists():
    Path(variables["FAKE_FAIL_ONCE"]).touch()
    print("the last words")
    sys.exit(7)
# differs by run and case, the same in every test
random.seed(Path(args.json).stem)
scale = float(variables.get("FAKE_SCALE", "1"))


def case(number: int) -> dict[str, object]:
    time_s = 0.01 * (number + 1) * scale * random.lognormvariate(0, args.noise)
    return {
        "key": {"number": number},
        "label": f"case {number}",
        "ranks": [0],
        "samples_s": [[time_s] * 12],
        "stop": {},
        "metrics": {
            "step_time_p50_s": time_s,
            "busy_wait_s": time_s * (1 - 1 / scale),
            "plain_step_s": time_s / scale,
        },
        "check": variables.get("FAKE_CHECK", "passed"),
    }


report = {
    "schema": "torchrun-bench/1",
    "benchmark": variables.get("FAKE_BENCHMARK", "fake"),
    "status": variables.get("FAKE_STATUS", "complete"),
    "argv": sys.argv,
    "started_at": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
    "environment": {"python": "3", "world_size": 1},
    "cases": [case(number) for number in range(args.cases)],
}
text = json.dumps(report)
Path(args.json).write_text(text[: len(text) // 2] if "FAKE_HALF" in variables else text)
sys.exit(1 if "FAKE_CHECK" in variables else 0)
