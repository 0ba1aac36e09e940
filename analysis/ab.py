#!/usr/bin/env python3
# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "numpy>=1.26", "pandas>=2.1", "scipy>=1.11", "tabulate>=0.9", "matplotlib>=3.8", "psutil>=5.9"
# ]
# ///
"""Is B slower than A? Runs two commands in turn and compares their reports.

The order is A B, B A, A B: a drift of the machine hits both alike, and neighbours make a pair.
Every run writes its report to OUT/a or OUT/b: `--json` is added to the command. The same call goes
on where it was interrupted. docs/compare.md says more.

    python analysis/ab.py --runs 6 --out threads --b-env OMP_NUM_THREADS=2 \\
        --a 'torchrun --nproc-per-node 2 benchmarks/ddp_sweep.py' \\
        --b 'torchrun --nproc-per-node 2 benchmarks/ddp_sweep.py'
    python analysis/ab.py --out versions --until-decided --max-runs 24 \\
        --a '/opt/torch-2.14/bin/torchrun --nproc-per-node 8 benchmarks/ddp_sweep.py' \\
        --b '/opt/torch-2.15/bin/torchrun --nproc-per-node 8 benchmarks/ddp_sweep.py'

--interleave is for a machine with neighbours: both runs of a pair take turns, block by block. It
needs this project's scripts, and rank 0 on this machine. --until-decided looks after --runs runs a
side, then after a third more each time; the looks share the 5 % of error.

Exit status: 0; 1 where a run fails, or for what --fail-on names; 2 bad usage; 4 no verdict, with
--fail-on; 130 after Ctrl-C. BSD-3-Clause.
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
GOES_ON = "the finished runs are kept; the same command goes on"


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

    def log(self, number: int) -> Path:
        return self.folder / f"{number:02d}.log"

    def why_no_report(self, number: int) -> str | None:
        """Why a run's report is of no use; None where it is complete."""
        try:
            run = report.load(str(self.report(number)))
        except ValueError as error:
            return str(error)
        if run.status == "complete" and run.cases:
            return None
        return f"its report is {run.status}, with {len(run.cases)} cases"

    def start(self, number: int, turns: dict[str, str]) -> subprocess.Popen[bytes]:
        """Start a run. turns: the variable that names the pipes, where runs take turns."""
        path = self.report(number)
        path.unlink(missing_ok=True)  # an earlier attempt may have left a part of a report
        variables = dict(variable.split("=", 1) for variable in self.variables)
        with self.log(number).open("wb") as log:
            return subprocess.Popen(
                [*shlex.split(self.command), "--json", str(path)],
                env=os.environ | variables | turns,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for this process, which ends the commands
            )

    def finish(
        self, number: int, process: subprocess.Popen[bytes], took_turns: bool = True
    ) -> None:
        """Wait for the end of a run. Raises RuntimeError where it failed, or took no turns."""
        status = process.wait()
        problem = self.why_no_report(number)
        if problem is None and not took_turns:
            problem = "it took no turns; only this project's scripts can, where rank 0 times steps"
        if status == 0 and problem is None:
            return
        log = self.log(number)
        lines = log.read_text(errors="replace").splitlines()[-15:]
        tail = "".join(f"\n    {clean(line)}" for line in lines)
        what = f"exit status {status}; {clean(problem or 'its report is complete', 500)}"
        raise RuntimeError(f"{self.name} {number}: {what}; the end of {log}:{tail}")


@dataclass
class Turns:
    """A run that measures only in its turns.

    A byte in `turn` is its turn. By a byte in `back` it gives the turn back.
    """

    side: Side
    process: subprocess.Popen[bytes]
    turn: IO[bytes]
    back: IO[bytes]
    has_answered: bool = False

    def take(self) -> bool:
        """Give the run its turn and wait until it gives it back; False where it ends instead."""
        self.turn.write(b".")
        while self.process.poll() is None:
            if is_readable(self.back, 0.1):
                self.back.read(1)
                self.has_answered = True
                return True
        return False


def is_readable(file: IO[bytes], patience_s: float) -> bool:
    ready, _, _ = select.select([file], [], [], patience_s)
    return bool(ready)


def start_turns(side: Side, number: int, folder: str, files: contextlib.ExitStack) -> Turns:
    """Start a run with two pipes in a folder, which `files` closes."""
    names = [f"{folder}/{side.name} {end}" for end in ("turn", "back")]
    pipes = []
    for name in names:
        os.mkfifo(name)
        # for both ways: opening waits for nobody, here and in the command
        pipe = open(name, "r+b", buffering=0)  # noqa: SIM115 (`files` closes it)
        pipes.append(files.enter_context(pipe))
    turn, back = pipes
    process = side.start(number, {TURN: ":".join(names)})
    return Turns(side, process, turn, back)


def take_turns(sides: Sequence[Side], number: int) -> None:
    """Run two commands at once of which only one measures. Raises RuntimeError where one fails."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as files:
        running = [start_turns(side, number, folder, files) for side in sides]
        while running:
            for run in running.copy():
                if not run.take():  # it has ended; the other one goes on alone
                    has_left_turn = is_readable(run.turn, 0)
                    took_turns = run.has_answered and not has_left_turn
                    run.side.finish(number, run.process, took_turns)
                    running.remove(run)


def end_all() -> None:
    """End the commands and all that they started, first politely."""
    commands = psutil.Process().children()
    tree = psutil.Process().children(recursive=True)
    for command in commands:
        with contextlib.suppress(psutil.NoSuchProcess):
            command.terminate()
    _, alive = psutil.wait_procs(tree, 40)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def planned_looks(first: int, most: int) -> list[int]:
    """After how many runs a side the result is looked at: by a third more each time, and even.

    The numbers are even, since ABBA balances a drift over two pairs. A look right before the last,
    with 15 % fewer runs or less, would not be worth its share of the error rate.
    """
    looks = [first]
    while looks[-1] < most:
        following = 2 * math.ceil(looks[-1] * 2 / 3)
        looks.append(most if following * 1.15 >= most else following)
    return looks


def open_folder(args: argparse.Namespace, looks: list[int]) -> tuple[list[Side], IO[bytes]]:
    """The sides, and the file of the plan, which is written, and locked as long as it is open.

    Raises ValueError where the folder holds another plan, or another ab.py has it open.
    """
    sides = [
        Side("a", args.a, args.a_env, args.out / "a"),
        Side("b", args.b, args.b_env, args.out / "b"),
    ]
    for side in sides:
        side.folder.mkdir(parents=True, exist_ok=True)
    names = ("a", "a_env", "b", "b_env", "interleave")
    plan = {name: getattr(args, name) for name in names} | {"looks after runs": looks}
    text = "".join(f"{name}: {value}\n" for name, value in plan.items())
    path = args.out / "plan.txt"
    locked = report.open_alone(str(path))
    if path.read_text() not in ("", text):
        raise ValueError(f"{path} is of another comparison; give another --out")
    path.write_text(text)
    return sides, locked


def measure(args: argparse.Namespace, sides: list[Side], looks: list[int]) -> Comparison:
    """Run what is planned, or until every case has a verdict. Raises RuntimeError."""
    design = Design(args.margin, True, args.interleave, len(looks))
    for pair in range(1, looks[-1] + 1):
        run_pair(sides, pair, looks[-1], args.interleave)
        if pair in (1, *looks):  # after the first: do keys meet?
            comparison = compare_runs(sides, pair, args.ignore_key, design)
        if pair in looks and all(case.verdict != "undecided" for case in comparison.cases):
            break
    return comparison


def run_pair(sides: list[Side], pair: int, last: int, interleave: bool) -> None:
    """Run both commands, except where the report of a run is complete already."""
    order = sides if pair % 2 else sides[::-1]
    todo = [side for side in order if side.why_no_report(pair)]
    if not todo:
        complain(f"pair {pair} of {last} is there already")
        return
    began = time.monotonic()
    if interleave:
        take_turns(order, pair)
    else:
        for side in todo:
            side.finish(pair, side.start(pair, {}))
    complain(f"pair {pair} of {last} took {time.monotonic() - began:.1f} s")


def compare_runs(sides: list[Side], pairs: int, ignore: list[str], design: Design) -> Comparison:
    """The first runs of a against those of b."""
    base_side, test_side = sides
    base_paths = [str(base_side.report(number)) for number in range(1, pairs + 1)]
    test_paths = [str(test_side.report(number)) for number in range(1, pairs + 1)]
    runs = load(base_paths + test_paths, ignore=ignore)  # in the order of their start
    run_of_path = {run.label: run for run in runs}
    base = [run_of_path[path] for path in base_paths]
    test = [run_of_path[path] for path in test_paths]
    return compare(base, test, design)


def handle_signals(handler: Any) -> None:
    for name in SIGNALS:
        signal.signal(name, handler)


def interrupt(number: int, frame: Any) -> None:
    handle_signals(signal.SIG_IGN)  # once is enough: the commands are being ended
    raise KeyboardInterrupt(128 + number)


def add_flags(parser: Parser) -> None:
    add = parser.add_argument
    lists: dict[str, Any] = {"type": variable, "nargs": "+", "action": "extend", "default": []}
    add(
        "--a",
        required=True,
        type=command,
        metavar="COMMAND",
        help="the base, as one word: quote it",
    )
    add("--a-env", help="NAME=VALUE, variables of A's runs alone", **lists)
    add("--b", required=True, type=command, metavar="COMMAND", help="what is compared with it")
    add("--b-env", help="NAME=VALUE, variables of B's runs alone", **lists)
    add("--out", required=True, type=folder, metavar="DIR", help="keep plan, reports and logs here")
    add("--runs", type=number(int, 2), default=6, metavar="N", help="runs a side (default: 6)")
    add("--interleave", action="store_true", help="both runs of a pair at once, block by block")
    add("--until-decided", action="store_true", help="stop once every case has a verdict")
    limit = "at most so many runs a side, with --until-decided (default: 4 times --runs)"
    add("--max-runs", type=positive_int, metavar="N", help=limit)
    add_verdict_flags(parser)


def main() -> int:
    parser = Parser(__doc__)
    add_flags(parser)
    args = parser.parse_args()
    most = args.max_runs or 4 * args.runs
    looks = planned_looks(args.runs, most) if args.until_decided else [args.runs]
    handle_signals(interrupt)
    try:
        sides, _plan = open_folder(args, looks)  # which stays open, and so locked
        comparison = measure(args, sides, looks)
    except (ValueError, OSError) as error:
        refuse(clean(error, 1000))
    except RuntimeError as error:
        complain(f"ab.py: {error}")
        complain(GOES_ON)
        return 1
    except KeyboardInterrupt as interruption:
        complain("ab.py: interrupted")
        complain(GOES_ON)
        return int(interruption.args[0])
    finally:
        handle_signals(signal.SIG_IGN)
        end_all()
        handle_signals(signal.SIG_DFL)
    return conclude([comparison], args.format, args.fail_on)


if __name__ == "__main__":
    sys.exit(main())
