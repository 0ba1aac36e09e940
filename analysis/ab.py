#!/usr/bin/env python3
# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "numpy>=1.26", "pandas>=2.1", "scipy>=1.11", "tabulate>=0.9", "matplotlib>=3.8", "psutil>=5.9"
# ]
# ///
"""Is B slower than A? Runs two commands in turn and compares their reports.

The order is A B, B A, A B: a drift of the machine hits both alike, and neighbours make a pair.
Every run writes its report to OUT/a or OUT/b (`--json` is added to the command). The same command
goes on where it was interrupted. docs/compare.md says more.

    python analysis/ab.py --runs 6 --out threads --b-env OMP_NUM_THREADS=2 \\
        --a 'torchrun --nproc-per-node 2 benchmarks/ddp_sweep.py' \\
        --b 'torchrun --nproc-per-node 2 benchmarks/ddp_sweep.py'
    python analysis/ab.py --out versions --until-decided --max-runs 24 \\
        --a '/opt/torch-2.14/bin/torchrun --nproc-per-node 8 benchmarks/ddp_sweep.py' \\
        --b '/opt/torch-2.15/bin/torchrun --nproc-per-node 8 benchmarks/ddp_sweep.py'

--interleave, for a machine with neighbours: both runs of a pair take turns, block by block. For
this project's scripts, with rank 0 on this machine. --until-decided looks after --runs runs a side,
then after a third more each time; the looks share the 5 % of error.

Exit status: 0; 1 where a run fails, or for what --fail-on names; 2 bad usage; 130 after Ctrl-C.
BSD-3-Clause.
"""

import argparse
import contextlib
import math
import os
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

if __name__ == "__main__":  # until main(): Ctrl-C while pandas is imported is no traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.compare import add_verdict_flags, conclude
from analysis.load import load
from analysis.show import clean
from analysis.verdicts import Comparison, Design, compare
from common import report
from common.cli import Parser, complain, number, positive_int, refuse, wrong
from common.turns import TURN

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def variable(text: str) -> str:
    if "=" not in text:
        wrong("NAME=VALUE", repr(text))
    return text


def command(text: str) -> str:
    return text if text.strip() else wrong("a command", repr(text), "e.g. --a 'torchrun x.py'")


def folder(text: str) -> Path:
    return Path(text) if text.strip() else wrong("a folder", repr(text), "e.g. --out threads")


@dataclass
class Side:
    """One of the two commands; its reports and logs are in `folder`."""

    name: str
    command: str
    variables: list[str]
    folder: Path

    def report(self, number: int) -> Path:
        return self.folder / f"{number:02d}.jsonl"

    def why_no_report(self, number: int) -> str | None:
        """Why a run's report is of no use; None where it is complete."""
        try:
            found = report.load(str(self.report(number)))
        except ValueError as error:
            return str(error)
        whole = found.status == "complete" and found.cases
        return None if whole else f"its report is {found.status}, with {len(found.cases)} cases"

    def start(self, number: int, turns: dict[str, str]) -> subprocess.Popen[bytes]:
        path = self.report(number)
        path.unlink(missing_ok=True)  # half a one, of an earlier attempt
        with path.with_suffix(".log").open("wb") as log:
            return subprocess.Popen(
                [*shlex.split(self.command), "--json", str(path)],
                env=os.environ | dict(v.split("=", 1) for v in self.variables) | turns,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for this process, which ends the commands
            )

    def finish(self, number: int, process: subprocess.Popen[bytes], untaken: Any = ()) -> None:
        """Wait for the end of a run. Raises RuntimeError where it failed, or left turns untaken."""
        status, problem = process.wait(), self.why_no_report(number)
        if untaken and not problem:
            problem = "it took no turns; only this project's scripts can, where rank 0 times steps"
        if status or problem:
            log = self.report(number).with_suffix(".log")
            lines = log.read_text(errors="replace").splitlines()[-15:]
            tail = "".join(f"\n    {clean(line)}" for line in lines)
            what = f"exit status {status}; {clean(problem or 'its report is complete', 500)}"
            raise RuntimeError(f"{self.name} {number}: {what}; the end of {log}:{tail}")


def take_turns(sides: Sequence[Side], number: int) -> None:
    """Run two commands at once of which only one measures. Raises RuntimeError where one fails.

    A byte in a command's first pipe is its turn; by a byte in its second it gives the turn back.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as files:
        running, passed = [], set()
        for side in sides:
            names = [f"{folder}/{side.name} {end}" for end in ("turn", "back")]
            for name in names:
                os.mkfifo(name)
            # for both ways: opening waits for nobody, here and in the command
            turn, back = (files.enter_context(open(name, "r+b", buffering=0)) for name in names)
            process = side.start(number, {TURN: ":".join(names)})
            running.append((side, process, turn, back))
        while running:
            for run in running.copy():
                side, process, turn, back = run
                turn.write(b".")
                while process.poll() is None:
                    if select.select([back], [], [], 0.1)[0]:
                        back.read(1)
                        passed.add(side.name)
                        break
                else:  # it has ended; the other one goes on alone
                    untaken = select.select([turn], [], [], 0)[0] or side.name not in passed
                    side.finish(number, process, untaken)
                    running.remove(run)


def end_all() -> None:
    """End the commands and all that they started; politely first."""
    commands = psutil.Process().children()
    tree = psutil.Process().children(recursive=True)
    for command in commands:
        with contextlib.suppress(psutil.NoSuchProcess):
            command.terminate()
    for part in psutil.wait_procs(tree, 40)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            part.kill()


def planned_looks(first: int, most: int) -> list[int]:
    """After how many runs a side the result is looked at: by a third more each time, and even.

    Even, since ABBA balances a drift over two pairs. A look right before the last, with 15 % fewer
    runs or less, would not be worth its share of the error rate.
    """
    looks = [first]
    while looks[-1] < most:
        following = 2 * math.ceil(looks[-1] * 2 / 3)
        looks.append(most if following * 1.15 >= most else following)
    return looks


def open_folder(args: argparse.Namespace, looks: list[int]) -> tuple[list[Side], IO[bytes]]:
    """The sides and the plan, which is written and locked while its file is open.

    Raises ValueError where the folder holds another plan, or another ab.py has it open.
    """
    names = ("a", "a_env", "b", "b_env", "interleave")
    plan = {name: getattr(args, name) for name in names} | {"looks after runs": looks}
    sides = [Side(name, plan[name], plan[f"{name}_env"], args.out / name) for name in "ab"]
    for side in sides:
        side.folder.mkdir(parents=True, exist_ok=True)
    path, text = args.out / "plan.txt", "".join(f"{name}: {plan[name]}\n" for name in plan)
    locked = report.open_alone(str(path))
    if path.read_text() not in ("", text):
        raise ValueError(f"{path} is of another comparison; give another --out")
    path.write_text(text)
    return sides, locked


def measure(args: argparse.Namespace, sides: list[Side], looks: list[int]) -> Comparison:
    """Run what is planned, or until every case has a verdict. Raises RuntimeError."""
    design = Design(args.margin, True, args.interleave, len(looks))
    for pair in range(1, looks[-1] + 1):
        order = sides if pair % 2 else sides[::-1]
        todo = [side for side in order if side.why_no_report(pair)]
        began = time.monotonic()
        if todo and args.interleave:
            take_turns(order, pair)
        else:
            for side in todo:
                side.finish(pair, side.start(pair, {}))
        took = f"took {time.monotonic() - began:.1f} s" if todo else "is there already"
        complain(f"pair {pair} of {looks[-1]} {took}")
        if pair in (1, *looks):  # after the first: do keys meet?
            words = [str(side.report(n)) for side in sides for n in range(1, pair + 1)]
            runs = sorted(load(words, ignore=args.ignore_key), key=lambda run: run.label)
            found = compare(runs[:pair], runs[pair:], design)
        if pair in looks and all(case.verdict != "undecided" for case in found.cases):
            break
    return found


def handle_signals(handler: Any) -> None:
    for name in SIGNALS:
        signal.signal(name, handler)


def interrupt(number: int, frame: Any) -> None:
    handle_signals(signal.SIG_IGN)  # once is enough: the commands are being ended
    raise KeyboardInterrupt(128 + number)


def main() -> int:
    parser = Parser(__doc__)
    add = parser.add_argument
    for side, what in (("a", "the base, as one word: quote it"), ("b", "what is compared with it")):
        add(f"--{side}", required=True, type=command, metavar="COMMAND", help=what)
        own = f"NAME=VALUE, variables of {side.upper()}'s runs alone"
        add(f"--{side}-env", type=variable, nargs="+", action="extend", default=[], help=own)
    add("--out", required=True, type=folder, metavar="DIR", help="keep plan, reports and logs here")
    add("--runs", type=number(int, 2), default=6, metavar="N", help="runs a side (default: 6)")
    add("--interleave", action="store_true", help="both runs of a pair at once, block by block")
    add("--until-decided", action="store_true", help="stop once every case has a verdict")
    limit = "at most so many runs a side, with --until-decided (default: 4 times --runs)"
    add("--max-runs", type=positive_int, metavar="N", help=limit)
    add_verdict_flags(parser)
    args = parser.parse_args()
    most = args.max_runs or 4 * args.runs
    looks = planned_looks(args.runs, most) if args.until_decided else [args.runs]
    handle_signals(interrupt)
    try:
        sides, _plan = open_folder(args, looks)  # which stays open, and so locked
        found = measure(args, sides, looks)
    except (ValueError, OSError) as error:
        refuse(clean(error, 1000))
    except (RuntimeError, KeyboardInterrupt) as problem:
        stopped = isinstance(problem, KeyboardInterrupt)
        complain(f"ab.py: {'interrupted' if stopped else problem}")
        complain("the finished runs are kept; the same command goes on")
        return int(problem.args[0]) if stopped else 1
    finally:
        handle_signals(signal.SIG_IGN)
        end_all()
        handle_signals(signal.SIG_DFL)
    return conclude([found], args.format, args.fail_on)


if __name__ == "__main__":
    sys.exit(main())
