"""Commands that are measured in rounds: how each is run, resumed and ended. Behind ab.py.

A command is run once a round, with `--json` added to it. If it writes no report, one is made of the
step times in its log. A round whose reports are complete is not run again, so repeating the call
continues an interrupted one. OUT/plan.txt holds what the call was.
"""

import contextlib
import ctypes
import json
import os
import random
import re
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

from analysis import plan
from analysis.load import LOAD_ENDING
from analysis.show import clean
from analysis.step_logs import Steps, write_report
from common import report
from common.cli import TOKEN, TURN, complain, cut, refuse
from common.cpu_load import Counters, CpuLoad, spent

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PR_SET_PDEATHSIG = 1
PRCTL = getattr(ctypes.CDLL(None), "prctl", None)  # None: no Linux
SET_CHILD_SUBREAPER = 36  # of prctl (linux/prctl.h)
KEPT = "finished runs are kept in {}; repeat the same command to continue"


@dataclass(frozen=True)
class Command:
    """One of the commands; its reports and logs are in `folder`."""

    name: str
    text: str  # as a shell would take it
    variables: dict[str, str]
    folder: Path
    steps: Steps | None = None  # in the log of a command that writes no report
    started_at: dict[int, str] = field(default_factory=dict, compare=False)  # by number of the run

    def report(self, number: int) -> Path:
        return self.folder / f"{number:02d}.jsonl"

    def reports(self, rounds: int) -> list[str]:
        """Those of the first rounds, which count from 1."""
        return [str(self.report(number)) for number in range(1, rounds + 1)]

    def log(self, number: int) -> Path:
        return self.folder / f"{number:02d}.log"

    def write_load(self, number: int, load: CpuLoad, wall_s: float, others_s: float) -> None:
        """Write what other processes used of this machine's cores during a run, beside its report;
        analysis/load.py reads it where the report itself does not say."""
        others = {"others": [load.mean(wall_s, others_s)]}
        path = self.report(number).with_suffix(LOAD_ENDING)
        path.write_text(json.dumps(others) + "\n")

    def why_no_report(self, number: int) -> str | None:
        """Why a run's report is of no use; None where it is complete."""
        if not self.report(number).is_file():  # a FIFO would be waited for
            return "it has written no report"
        try:
            run = report.load(str(self.report(number)))
        except ValueError as error:
            return str(error)
        if run.status == "complete" and run.cases:
            return None
        return f"its report is {run.status}, with {len(run.cases)} cases"

    def start(self, number: int, turns: dict[str, str]) -> subprocess.Popen[bytes]:
        """Start a run. turns: the variable that names the pipes, if runs take turns. Raises
        RuntimeError if a program of the command has changed since the plan was written.

        The log has the lines of earlier attempts as well. If step times are read from it, it is
        that of this attempt alone; an earlier one becomes 01.log.bak.
        """
        if edited := plan.edited(
            self.folder.parent / plan.PLAN, self.name, self.text, self.variables
        ):
            what = f"{cut(edited)} changed since the first run"
            raise RuntimeError(f"{self.name} {number}: {what}; restore it, or give another --out")
        words, own_pid = shlex.split(self.text), os.getpid()

        def end_with_parent() -> None:
            """Between fork and exec: let the command end if this process is killed."""
            if PRCTL:
                PRCTL(PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != own_pid:  # it has ended already
                os._exit(1)

        # absolute, because a command may change its folder, as `env -C` does
        flags = [] if self.steps else ["--json", str(self.report(number).absolute())]
        if self.steps and self.log(number).exists():
            self.log(number).rename(report.unused(f"{self.log(number)}.bak"))
        self.started_at[number] = report.now()
        with self.log(number).open("ab") as log:  # an earlier attempt's lines stay
            try:
                return subprocess.Popen(
                    [*words, *flags],
                    env=os.environ | self.variables | turns,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C is for this process, which ends the commands
                    preexec_fn=end_with_parent,
                )
            except FileNotFoundError as error:
                what = f"{error.strerror}: {words[0]!r}"
                ending = f"={self.text}"  # without --b the second side has the same text
                if given := [word for word in sys.argv if word.endswith(ending)]:
                    name = given[0].removesuffix(ending).rpartition("=")[2]
                    example = f"e.g. env {name}={self.text}"
                    what += f"; {name}=... names a command, variables need `env`, {example}"
                raise ValueError(what) from None

    def finish(
        self, number: int, process: subprocess.Popen[bytes], took_turns: bool = True
    ) -> None:
        """Wait for the end of a run. Raises RuntimeError where it failed, or took no turns."""
        status = process.wait()
        problem = self.make_report(number) if self.steps and status == 0 else None
        problem = problem or self.why_no_report(number)
        if not problem and not took_turns:
            problem = "it took no turns; only this project's scripts can, where rank 0 times steps"
        problem = problem or self.other_environment(number)
        if status == 0 and not problem:
            return
        log = self.log(number)
        lines = log.read_text(errors="replace").splitlines()[-15:]
        tail = "".join(f"\n    {clean(line)}" for line in lines)
        what = f"exit status {status}; {clean(problem or 'its report is complete', 500)}"
        raise RuntimeError(f"{self.name} {number}: {what}; the end of {log}:{tail}")

    def make_report(self, number: int) -> str | None:
        """Write the report of a run that has only written a log; why that is impossible, or None.
        Raises OSError if the disk is full."""
        path, log, words = self.report(number), self.log(number), shlex.split(self.text)
        assert self.steps
        try:
            write_report(str(path), str(log), self.steps, words, self.started_at[number])
        except ValueError as error:
            return str(error)
        return None

    def other_environment(self, number: int) -> str | None:
        """In what this run differs from an earlier one of the command, such as another torch."""
        mine = self.report(number)
        for path in sorted(self.folder.glob("*.jsonl")):
            if path != mine:
                differing = report.differences(identity_of(path), identity_of(mine))
                if differing:
                    return f"{path} has {differing}: not of one kind; move one of them away"
        return None


def identity_of(path: Path) -> dict[str, Any]:
    """What the first line of a report tells of the environment, as far as it must be the same."""
    with path.open("rb") as file:
        return report.identity(report.load(str(path), lines=[file.readline()]).environment)


@contextlib.contextmanager
def open_plan(out: Path, commands: Sequence[Command], settings: dict[str, Any]) -> Iterator[None]:
    """Begin a plan in a folder, or follow the one that is there; it is locked meanwhile.

    Raises ValueError if the folder holds another plan or files that no plan names, if a file that
    a command names or an inherited variable has changed, or if another process uses the folder.
    """
    lines = [f"{name}: {value}" for name, value in settings.items()]
    for command in commands:
        lines.append(f"command {command.name}: {command.text}")
        for name, value in report.without_secrets(command.variables).items():
            lines.append(f"variable of {command.name}: {name}={value}")
        lines += plan.lines_of_files(command.name, command.text, command.variables)
    lines += plan.lines_of_variables(os.environ)
    path = out / plan.PLAN
    if not path.exists():
        refuse_files(commands)  # before anything is written
    for command in commands:
        command.folder.mkdir(parents=True, exist_ok=True)
    with report.open_alone(str(path)) as file:
        if not path.stat().st_size:
            refuse_files(commands)
            file.write("\n".join(lines).encode(errors="surrogateescape"))
        elif why := plan.misfit(plan.read_lines(path), lines):
            raise ValueError(f"{path} is the plan of another call: {why}; give another --out")
        yield


def seed_of(out: Path) -> int:
    """The seed in the plan of a folder; a new one if there is no plan yet."""
    with contextlib.suppress(OSError):
        if match := re.search(
            r"^seed: (\d+)$", (out / plan.PLAN).read_text(errors="surrogateescape"), re.MULTILINE
        ):
            return int(match[1])
    return random.SystemRandom().randrange(2**32)


def refuse_files(commands: Sequence[Command]) -> None:
    """Raise ValueError where a folder for reports holds files that no plan tells of."""
    for command in commands:
        for name in sorted(os.listdir(command.folder) if command.folder.is_dir() else ()):
            what = f"{command.folder} holds {clean(name)}, of no plan of this program"
            raise ValueError(f"{what}; give another --out")


# -- a round, and runs that take turns in it -------------------------------------------------------


def run_round(commands: Sequence[Command], number: int, interleave: bool) -> float | None:
    """Run the commands in this order, except those whose report is already complete. Returns the
    seconds that it took, or None if all reports were complete. Raises RuntimeError if a run fails.
    """
    todo = [command for command in commands if command.why_no_report(number)]
    if not todo:
        return None
    began = time.monotonic()
    before = psutil.Process().children(recursive=True)
    if interleave:
        take_turns(commands, number)
        end_started(before, 10)
    else:
        for command in todo:
            load = CpuLoad(psutil.Process())  # this process, and the commands that it has started
            command.finish(number, command.start(number, {}))
            command.write_load(number, load, *spent(load.start, load.read()))
            end_started(before, 10)
    return time.monotonic() - began


@dataclass
class Turns:
    """A run that measures only in its turns.

    A token in `turn` is its turn. By a token in `back` it gives the turn back.
    """

    command: Command
    process: subprocess.Popen[bytes]
    turn: IO[bytes]
    back: IO[bytes]
    has_answered: bool = False
    wall_s: float = 0.0  # of its turns
    others_s: float = 0.0  # CPU time of other processes in its turns

    def count(self, start: Counters, end: Counters) -> None:
        """Add a turn, from one reading of the counters to the other."""
        wall_s, others_s = spent(start, end)
        self.wall_s += wall_s
        self.others_s += others_s

    def take(self) -> bool:
        """Give the run its turn and wait until it gives it back; False where it ends instead."""
        self.turn.write(TOKEN)
        while self.process.poll() is None:
            if is_readable(self.back, 0.1):
                self.back.read(len(TOKEN))
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
    """Run commands at once of which only one measures. Raises RuntimeError if one fails.

    The load of a run is that of its turns: CPU use by processes that none of the commands started.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as files:
        if ":" in folder:  # it stands between the names of the pipes
            raise ValueError(f"--interleave: expected a TMPDIR without a colon, got {folder!r}")
        load = CpuLoad(psutil.Process())
        running = [start_turns(command, number, folder, files) for command in commands]
        start = load.start
        while running:
            for run in running.copy():
                is_running = run.take()
                end = load.read()  # between two turns, so that it disturbs neither
                run.count(start, end)
                start = end
                if not is_running:  # it has ended; the others go on
                    has_left_turn = is_readable(run.turn, 0)
                    took_turns = run.has_answered and not has_left_turn
                    run.command.finish(number, run.process, took_turns)
                    run.command.write_load(number, load, run.wall_s, run.others_s)
                    running.remove(run)


# -- the end of what was started -------------------------------------------------------------------


@contextlib.contextmanager
def ending_all(out: str) -> Iterator[None]:
    """However the block ends, the commands that it has started end as well.

    out: the folder of the runs. Exits with 2 for a mistake of the user, with 1 if a run or the disk
    fails, with 130 after Ctrl-C.
    """
    script = Path(sys.argv[0]).name
    before = psutil.Process().children(recursive=True)
    adopt_orphans(True)
    handle_signals(interrupt)
    try:
        yield
    except (ValueError, OSError) as error:
        has_no_disk = isinstance(error, OSError) and error.errno in report.DISK_FAILED
        refuse(clean(error, 1000), 1 if has_no_disk else 2)
    except RuntimeError as error:
        complain(f"{script}: {error}")
        complain(KEPT.format(out))
        sys.exit(1)
    except KeyboardInterrupt as interruption:
        complain(f"{script}: interrupted")
        complain(KEPT.format(out))
        sys.exit(int(interruption.args[0]))
    finally:
        handle_signals(signal.SIG_IGN)  # a program that ends now stays deaf to a second signal
        end_started(before, 40)
        adopt_orphans(False)
    handle_signals(signal.SIG_DFL)


def handle_signals(handler: Any) -> None:
    for name in SIGNALS:
        signal.signal(name, handler)


def interrupt(number: int, frame: Any) -> None:
    handle_signals(signal.SIG_IGN)  # once is enough: the commands are being ended
    raise KeyboardInterrupt(128 + number)


def adopt_orphans(adopt: bool) -> None:
    """Let this process become the parent of what the commands leave, so that it can be found."""
    if PRCTL:
        PRCTL(SET_CHILD_SUBREAPER, ctypes.c_ulong(adopt), 0, 0, 0)


def end_started(before: Collection[psutil.Process], patience_s: float) -> None:
    """End what this process and its commands have started, first politely. before: what was there
    already."""
    for _ in range(5):
        started = [p for p in psutil.Process().children(recursive=True) if p not in before]
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.ppid() == os.getpid():
                    process.terminate()
        _, alive = psutil.wait_procs(started, patience_s)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, 5)
        patience_s = 0  # who was started meanwhile ends at once
