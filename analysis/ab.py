#!/usr/bin/env python3
"""Is B slower than A? Runs two commands in turn and compares their reports.

The commands alternate as A B, B A, A B: a drift of the machine hits both alike, and neighbours in
time make a pair. Every run writes a report of its own to OUT/a or OUT/b (`--json` is added to the
command), and the run is the unit of evidence: see compare.py. The same command again goes on where
it was interrupted: runs with a complete report are skipped.

    python analysis/ab.py --runs 6 --out threads --b-env OMP_NUM_THREADS=2 \\
        --a 'torchrun --nproc-per-node 2 benchmarks/ddp_sweep.py' \\
        --b 'torchrun --nproc-per-node 2 benchmarks/ddp_sweep.py'
    python analysis/ab.py --out versions --until-decided --max-runs 24 \\
        --a '/opt/torch-2.14/bin/torchrun --nproc-per-node 8 benchmarks/ddp_sweep.py' \\
        --b '/opt/torch-2.15/bin/torchrun --nproc-per-node 8 benchmarks/ddp_sweep.py'

--interleave is for a machine that is not yours alone: both runs of a pair start together and take
turns, block by block, so that both see the same moments of the machine. Only one works at a time;
both need their memory at once. For scripts of this project with rank 0 on this machine.

--until-decided looks at the result after --runs runs a side, then after a third more each time,
and stops once every case has a verdict. Who looks K times at 5 % errs more often, so the 5 % are
shared among the looks, all planned before the first run (Bonferroni; Jennison and Turnbull 1989).

Exit status: 0; 1 where a run fails, or for what --fail-on names; 2 bad usage; 130 after Ctrl-C.
BSD-3-Clause.
"""

import argparse
import contextlib
import json
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.compare import add_verdict_flags, conclude, show
from analysis.load import PLAN, load
from analysis.show import clean
from analysis.verdicts import Comparison, Design, compare
from common import report
from common.cli import Parser, positive_float, positive_int, refuse, wrong

TURN = "TORCHRUN_BENCH_TURN"  # the two named pipes of a command: common/benchmark.py, class Turn


def command(text: str) -> str:
    """A command that can be split into words and whose program is there."""
    words = shlex.split(text)
    if not words or shutil.which(words[0]) is None:
        wrong("a command", repr(text), "there is no such program")
    return text


def variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        wrong("NAME=VALUE", repr(text))
    return name, value


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    for side, what in (("a", "the base, as one word: quote it"), ("b", "what is compared with it")):
        add(f"--{side}", required=True, type=command, metavar="COMMAND", help=what)
        own = f"NAME=VALUE, variables of {side.upper()}'s runs alone"
        add(f"--{side}-env", type=variable, nargs="+", action="extend", default=[], help=own)
    add("--out", required=True, metavar="DIR", help="keep plan, reports and logs here")
    add("--runs", type=positive_int, default=6, metavar="N", help="runs a side (default: 6)")
    add("--interleave", action="store_true", help="both runs of a pair at once, block by block")
    add("--until-decided", action="store_true", help="stop once every case has a verdict")
    most = "at most so many runs a side, with --until-decided (default: 4 times --runs)"
    add("--max-runs", type=positive_int, metavar="N", help=most)
    limit = "end a run that takes longer than S seconds (default: no limit)"
    add("--timeout", type=positive_float, default=1e6, metavar="S", help=limit)
    add_verdict_flags(parser)
    args = parser.parse_args(argv)
    if args.runs < 2:
        refuse("--runs must be at least 2: one run a side does not show how much runs differ")
    if args.max_runs and (not args.until_decided or args.max_runs < args.runs):
        refuse("--max-runs needs --until-decided, and at least --runs: --runs 6 --max-runs 24")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        refuse("this starts the commands itself; start it with python, not with torchrun")
    return args


@dataclass
class Side:
    """One of the two commands; its reports and logs are in `folder`."""

    name: str
    command: str
    variables: list[tuple[str, str]]
    folder: Path

    def report(self, number: int) -> Path:
        return self.folder / f"{number:02d}.jsonl"

    def why_no_report(self, number: int) -> str | None:
        """Why a run's report is of no use; None where it is complete."""
        if not self.report(number).exists():
            return "it wrote no report; does the command know --json?"
        try:
            found = report.load(str(self.report(number)), lambda _, case: case.samples_s.clear())
        except ValueError as error:
            return str(error)
        failed = [case.check for case in found.cases if case.failed]
        return None if found.status == "complete" and found.cases else (failed or [found.status])[0]

    def start(self, number: int, turns: dict[str, str]) -> psutil.Popen:
        path = self.report(number)
        path.unlink(missing_ok=True)  # half a one, of an earlier attempt
        with path.with_suffix(".log").open("wb") as log:
            return psutil.Popen(
                [*shlex.split(self.command), "--json", str(path)],
                env=os.environ | dict(self.variables) | turns,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for this process, which ends the commands
            )

    def judge(self, number: int, status: int) -> str | None:
        """What is wrong with a run that has ended, with the end of its log; None if nothing is."""
        problem = self.why_no_report(number)
        if status:
            problem = f"exit status {status}; {problem or 'its report is complete'}"
        if problem is None:
            return None
        log = self.report(number).with_suffix(".log")
        lines = log.read_text(errors="replace").splitlines()[-15:]
        tail = "".join(f"\n    {clean(line)}" for line in lines)
        return f"{self.name} {number}: {clean(problem, 500)}; the end of {log}:{tail}"


class Turns:
    """The two pipes over which a command gets its turns and passes them on; `count` of them."""

    def __init__(self, folder: str, name: str) -> None:
        self.grant, release = f"{folder}/{name}.grant", f"{folder}/{name}.release"
        for path in (self.grant, release):
            os.mkfifo(path)
        self.variables = {TURN: f"{self.grant}:{release}"}
        self.reader = os.open(release, os.O_RDONLY | os.O_NONBLOCK)
        self.writer, self.count = -1, 0

    def wait_for_start(self, process: psutil.Popen, deadline: float) -> None:
        """Until the command waits for its first turn: a pipe can be written once it is read."""
        while self.writer < 0 and process.poll() is None and time.monotonic() < deadline:
            try:
                self.writer = os.open(self.grant, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:  # ENXIO: nobody reads
                time.sleep(0.02)

    def hand_out(self, process: psutil.Popen, deadline: float) -> bool:
        """Let the command have a turn; False where it ends instead of passing it on."""
        try:
            os.write(self.writer, b".")
        except OSError:  # it never asked for turns, or is gone
            return False
        self.count += 1
        while not select.select([self.reader], [], [], 0.5)[0]:
            if process.poll() is not None or time.monotonic() > deadline:
                return False
        return os.read(self.reader, 1) != b""  # empty: rank 0 is gone

    def close(self) -> None:
        for end in {self.reader, self.writer} - {-1}:
            os.close(end)


def run(sides: Sequence[Side], number: int, timeout: float) -> str | None:
    """Run a command, or several at once that take turns. What went wrong, or None."""
    deadline = time.monotonic() + timeout
    started: list[tuple[Side, psutil.Popen, Turns]] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ends:
        for side in sides:
            turns = Turns(folder, side.name)
            ends.callback(turns.close)
            ends.callback(end_all)  # before the start: an interrupt may come in the middle of it
            process = side.start(number, turns.variables if len(sides) > 1 else {})
            started.append((side, process, turns))
        if len(sides) > 1:
            for _, process, turns in started:  # until all have imported torch and met
                turns.wait_for_start(process, deadline)
            alive = started
            while alive:
                alive = [row for row in alive if row[2].hand_out(row[1], deadline)]
        for side, process, turns in started:
            try:
                status = process.wait(max(1.0, deadline - time.monotonic()))
            except psutil.TimeoutExpired:
                return f"{side.name} {number} took longer than --timeout {timeout:g} s"
            if problem := side.judge(number, status):
                return problem
            if len(sides) > 1 and turns.count < 2:
                return f"{side.name} {number} took no turns; only this project's scripts can"
    return None


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
    psutil.wait_procs(tree, 10)


def planned_looks(first: int, most: int) -> list[int]:
    """After how many runs a side the result is looked at: by a third more each time, and even.

    Even, since ABBA balances a drift over two pairs. The last is `most`; one right before it, with
    15 % fewer runs or less, would not be worth its share of the error rate.
    """
    looks = [first]
    while looks[-1] < most:
        following = 2 * -(-max(4 * looks[-1], 3 * looks[-1] + 3) // 6)
        looks.append(most if following * 1.15 >= most else following)
    return looks


def open_folder(args: argparse.Namespace, looks: list[int]) -> list[Side]:
    """The sides; the plan is written. Raises ValueError where the folder holds another plan."""
    folder = Path(args.out)
    names = ("a", "a_env", "b", "b_env", "interleave")
    plan = {name: getattr(args, name) for name in names} | {"looks after runs": looks}
    plan = json.loads(json.dumps(plan))
    path = folder / PLAN
    try:
        for name in "ab":
            (folder / name).mkdir(parents=True, exist_ok=True)
        old = json.loads(path.read_text()) if path.exists() else plan
        if other := [f"{n} was {old.get(n)}" for n in plan if old.get(n) != plan[n]]:
            what = f"holds another comparison: {', '.join(other)}; give another --out"
            raise ValueError(f"--out {folder} {what}, then compare.py on both folders")
        path.write_text(json.dumps(plan, indent=1) + "\n")
    except (OSError, json.JSONDecodeError, AttributeError) as error:
        raise ValueError(f"--out {folder} cannot be used: {error}") from None
    commands = {"a": (args.a, args.a_env), "b": (args.b, args.b_env)}
    return [Side(name, *commands[name], folder / name) for name in commands]


def measure(args: argparse.Namespace, sides: list[Side], looks: list[int]) -> Comparison:
    """Run what is planned, or until every case has a verdict. Raises RuntimeError."""
    design = Design(args.margin, True, args.interleave, len(looks))
    for number in range(1, looks[-1] + 1):
        order = sides if number % 2 else sides[::-1]
        todo = [side for side in order if side.why_no_report(number)]
        began = time.monotonic()
        for together in [order] if args.interleave and todo else [[side] for side in todo]:
            if problem := run(together, number, args.timeout):
                raise RuntimeError(problem)
        took = f"took {time.monotonic() - began:.1f} s" if todo else "is there already"
        print(f"pair {number} of {looks[-1]} {took}", file=sys.stderr, flush=True)
        if number in (1, *looks):  # after the first: do keys meet?
            words = [str(side.report(n)) for side in sides for n in range(1, number + 1)]
            runs = load(words, ignore=args.ignore_key)
            result = compare(runs[:number], runs[number:], design)
        if number in looks and all(case.verdict != "undecided" for case in result.cases):
            break
    return result


def interrupt(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # once is enough: the commands are being ended
    raise KeyboardInterrupt(128 + number)


def main() -> int:
    args = parse_args()
    most = args.max_runs or 4 * args.runs
    looks = planned_looks(args.runs, most) if args.until_decided else [args.runs]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    try:
        found = measure(args, open_folder(args, looks), looks)
    except ValueError as error:
        refuse(clean(error, 1000))
    except (RuntimeError, KeyboardInterrupt) as problem:
        stopped = isinstance(problem, KeyboardInterrupt)
        print(f"ab.py: {'interrupted' if stopped else problem}", file=sys.stderr)
        print("the finished runs are kept; the same command goes on", file=sys.stderr)
        return int(problem.args[0]) if stopped else 1
    text = show(found, args.format)
    if len(looks) > 1 and args.format != "json":
        look, share = looks.index(len(found.base)) + 1, 100 - 5 / len(looks)
        text += f"\n\nlook {look} of at most {len(looks)}: each interval holds with {share:g} %"
    return conclude(text, found.verdicts, args.fail_on)


if __name__ == "__main__":
    sys.exit(main())
