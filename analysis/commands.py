"""Commands that are measured in rounds, and what all of them wrote: behind ab.py and race.py.

A command is run once a round, with `--json` added to it. A round whose reports are there already is
not run again: so the same call goes on where it was interrupted.
"""

import contextlib
import itertools
import math
import os
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import psutil

from analysis.load import Run, load
from analysis.show import clean
from common import report
from common.cli import complain, refuse, wrong
from common.turns import TURN

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GOES_ON = "the finished runs are kept; the same command goes on"
T = TypeVar("T")


def variable(text: str) -> str:
    if "=" not in text:
        wrong("NAME=VALUE", repr(text))
    return text


def command_text(text: str) -> str:
    return text if text.strip() else wrong("a command", repr(text), "e.g. --a 'torchrun x.py'")


def folder(text: str) -> Path:
    return Path(text) if text.strip() else wrong("a folder", repr(text), "e.g. --out threads")


@dataclass
class Command:
    """One of the commands; its reports and logs are in `folder`."""

    name: str
    text: str  # as a shell would take it
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
                [*shlex.split(self.text), "--json", str(path)],
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

    command: Command
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


def start_turns(command: Command, number: int, folder: str, files: contextlib.ExitStack) -> Turns:
    """Start a run with two pipes in a folder, which `files` closes."""
    names = [f"{folder}/{command.name} {end}" for end in ("turn", "back")]
    pipes = []
    for name in names:
        os.mkfifo(name)
        # for both ways: opening waits for nobody, here and in the command
        pipe = open(name, "r+b", buffering=0)  # noqa: SIM115 (`files` closes it)
        pipes.append(files.enter_context(pipe))
    turn, back = pipes
    process = command.start(number, {TURN: ":".join(names)})
    return Turns(command, process, turn, back)


def take_turns(commands: Sequence[Command], number: int) -> None:
    """Run commands at once of which only one measures. Raises RuntimeError where one fails."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as files:
        running = [start_turns(command, number, folder, files) for command in commands]
        while running:
            for run in running.copy():
                if not run.take():  # it has ended; the others go on
                    has_left_turn = is_readable(run.turn, 0)
                    took_turns = run.has_answered and not has_left_turn
                    run.command.finish(number, run.process, took_turns)
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


def run_round(
    commands: Sequence[Command], number: int, interleave: bool, name: str = "round"
) -> None:
    """Run the commands in this order, but not those whose report is complete already.

    name: what the round is called where it is reported, such as `pair 3 of 6`. Raises RuntimeError
    where a command fails.
    """
    todo = [command for command in commands if command.why_no_report(number)]
    if not todo:
        complain(f"{name} is there already")
        return
    began = time.monotonic()
    if interleave:
        take_turns(commands, number)
    else:
        for command in todo:
            command.finish(number, command.start(number, {}))
    complain(f"{name} took {time.monotonic() - began:.1f} s")


def load_rounds(
    commands: Sequence[Command], rounds: Sequence[int], ignore: Sequence[str]
) -> dict[str, list[Run]]:
    """The runs of each command, by its name. rounds: how many each has; they count from 1."""
    paths_of_command: dict[str, list[str]] = {}
    for command, count in zip(commands, rounds, strict=True):
        numbers = range(1, count + 1)
        paths_of_command[command.name] = [str(command.report(n)) for n in numbers]
    every_path = list(itertools.chain(*paths_of_command.values()))
    run_of_path = {run.label: run for run in load(every_path, ignore=ignore)}
    runs_of_command = {}
    for name, paths in paths_of_command.items():
        runs_of_command[name] = [run_of_path[path] for path in paths]  # `load` sorts by the start
    return runs_of_command


def open_folder(out: Path, commands: Sequence[Command], plan: dict[str, Any]) -> IO[bytes]:
    """The file of the plan, which is written, and locked as long as it is open.

    Raises ValueError where the folder holds another plan, or another process has it open.
    """
    for command in commands:
        command.folder.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{name}: {value}\n" for name, value in plan.items())
    path = out / "plan.txt"
    locked = report.open_alone(str(path))
    if path.read_text() not in ("", text):
        raise ValueError(f"{path} is of another comparison; give another --out")
    path.write_text(text)
    return locked


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


def handle_signals(handler: Any) -> None:
    for name in SIGNALS:
        signal.signal(name, handler)


def interrupt(number: int, frame: Any) -> None:
    handle_signals(signal.SIG_IGN)  # once is enough: the commands are being ended
    raise KeyboardInterrupt(128 + number)


def run_commands(measure: Callable[[], T]) -> T:
    """What `measure` returns. However it ends, the commands that it has started end as well.

    Exits with 2 for a mistake of the user, with 1 where a run fails, with 130 after Ctrl-C.
    """
    script = Path(sys.argv[0]).name
    handle_signals(interrupt)
    try:
        result = measure()
    except (ValueError, OSError) as error:
        refuse(clean(error, 1000))
    except RuntimeError as error:
        complain(f"{script}: {error}")
        complain(GOES_ON)
        sys.exit(1)
    except KeyboardInterrupt as interruption:
        complain(f"{script}: interrupted")
        complain(GOES_ON)
        sys.exit(int(interruption.args[0]))
    finally:
        handle_signals(signal.SIG_IGN)  # a program that ends now stays deaf to a second signal
        end_all()
    handle_signals(signal.SIG_DFL)
    return result
