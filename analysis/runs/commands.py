"""The commands of ab.py: how each one is run, resumed and ended.

Each command runs once per round, with `--json` appended. If it writes no report, a report is made
from the step times in its log. Rounds whose reports are complete are skipped, so repeating a call
continues an interrupted one. OUT/plan.txt records the call.
"""

import contextlib
import ctypes
import json
import os
import random
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

from analysis.logs.step_logs import Steps, write_report
from analysis.runs import plan
from analysis.runs.load import LOAD_ENDING
from analysis.show import clean
from harness import report
from harness.cli import TOKEN, TURN, cut
from harness.cpu_load import CpuLoad, spent
from harness.exits import ROOT, print_error, refuse
from harness.files import check_regular

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PR_SET_PDEATHSIG = 1
PRCTL = getattr(ctypes.CDLL(None), "prctl", None)  # None outside of Linux
SET_CHILD_SUBREAPER = 36  # option of prctl (linux/prctl.h)
QUOTED = re.compile(r"""\\.|'[^']*'|"(\\.|[^"\\])*\"""", re.DOTALL)
OPERATOR = re.compile(r"[|<>;]+|&&+|(?:^|\s)(?:&+|\()|&(?:\s|$)")  # of a shell, outside of quotes
KEPT = "finished runs are kept in {}; repeat the same command to continue"


@dataclass(frozen=True)
class Command:
    """One of the commands. Its reports and logs are in `folder`."""

    name: str
    text: str  # as written in a shell
    variables: dict[str, str]
    folder: Path
    steps: Steps | None = None  # step times in the log of a command that writes no report
    watched: Sequence[str] = ()  # files and folders of --watch
    started_at: dict[int, str] = field(default_factory=dict, compare=False)  # by number of run

    def report(self, number: int) -> Path:
        return self.folder / f"{number:02d}.jsonl"

    def reports(self, rounds: int) -> list[str]:
        """The reports of the first rounds, counting from 1."""
        return [str(self.report(number)) for number in range(1, rounds + 1)]

    def log(self, number: int) -> Path:
        return self.folder / f"{number:02d}.log"

    def check_program(self) -> None:
        """Raise ValueError if there is no such program, or if a word is meant for a shell."""
        if found := OPERATOR.search(QUOTED.sub("x", self.text)):
            what = f"expected a command that needs no shell, got {found[0].strip()!r}"
            raise ValueError(f"""{what}; quote the word, or write bash -c '... "$@"' bash""")
        word, path = shlex.split(self.text)[0], (os.environ | self.variables).get("PATH")
        if not shutil.which(word, path=path):
            hint = f"; to set a variable, write env {word} ..." if "=" in word else ""
            raise ValueError(f"expected a program that can be run, got {word!r}{hint}")

    @property
    def files(self) -> dict[str, Path]:
        """The files that the command names, and those of --watch, by their names in messages."""
        named = plan.files_of(self.text, os.environ | self.variables)
        return named | plan.watched_files(self.watched)

    @property
    def unchecked(self) -> str:
        """What may change between runs without being noticed; "" if reports record what ran."""
        done = [path for path in self.folder.glob("*.jsonl") if is_report(path)]
        if done:
            is_recorded = all(first_line(path).environment.get("contents") for path in done)
        else:
            scripts = [path.resolve() for path in self.files.values()]
            is_recorded = any(ROOT in (path, path.parent.parent) for path in scripts)
            is_recorded |= bool(plan.contents_in(self.folder.parent / plan.PLAN, self.name))
        if is_recorded:
            return ""
        return plan.unchecked(self.text, os.environ | self.variables)

    def write_load(self, number: int, load: CpuLoad, wall_s: float, others_s: float) -> None:
        """Write the CPU use of other processes on this machine to a file next to the report of a
        run. analysis/runs/load.py reads it if the report does not record the load."""
        others = {"others": [load.mean(wall_s, others_s)]}
        path = self.report(number).with_suffix(LOAD_ENDING)
        path.write_text(json.dumps(others) + "\n")

    def why_no_report(self, number: int) -> str | None:
        """Why the report of a run is unusable; None if it is complete."""
        if not self.report(number).is_file():  # reading a FIFO would block
            return "no report was written"
        try:
            run = report.load(str(self.report(number)))
        except ValueError as error:
            return str(error)
        if run.status == "complete" and run.cases:
            return None
        return f"its report is {run.status}, with {len(run.cases)} cases"

    def start(self, number: int, turns: dict[str, str]) -> subprocess.Popen[bytes]:
        """Start a run. turns: with --interleave, the environment variable that names the pipes.

        The output is appended to the log of an earlier attempt. If step times are read from the
        log, the earlier log is renamed to 01.log.bak instead. Raises RuntimeError if a program of
        the command has changed since the plan was written.
        """
        named = plan.files_of(self.text, os.environ | self.variables)
        files = {label: path for label, path in named.items() if plan.is_code(path)}
        files |= plan.watched_files(self.watched)
        if edited := plan.edited(self.folder.parent / plan.PLAN, self.name, files):
            what = f"{cut(edited)} changed since the first run"
            raise RuntimeError(f"{self.name} {number}: {what}; restore it, or choose another --out")
        words, own_pid = shlex.split(self.text), os.getpid()

        def end_with_parent() -> None:
            """Runs between fork and exec: the command ends if this process is killed."""
            if PRCTL:
                PRCTL(PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != own_pid:  # this process has already ended
                os._exit(1)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

        # absolute, because the command may change its working directory, as `env -C` does
        flags = [] if self.steps else ["--json", str(self.report(number).absolute())]
        if self.steps and self.log(number).exists():
            self.log(number).rename(report.unused(f"{self.log(number)}.bak"))
        self.started_at[number] = report.now()
        # "ab": append to the log of an earlier attempt
        with blocked_signals() as mask, self.log(number).open("ab") as log:
            return subprocess.Popen(
                [*words, *flags],
                env=os.environ | self.variables | turns,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches only ab.py, which ends the commands
                preexec_fn=end_with_parent,
            )

    def finish(
        self, number: int, process: subprocess.Popen[bytes], was_interleaved: bool = True
    ) -> None:
        """Wait for a run to end. Raises RuntimeError if it failed, or if it should have been
        interleaved but was not."""
        status = process.wait()
        problem = self.make_report(number) if self.steps and status == 0 else None
        problem = problem or self.why_no_report(number)
        if not problem and not was_interleaved:
            problem = "it was not interleaved; --interleave requires scripts of this project, with "
            problem += "rank 0 on this machine"
        problem = problem or self.other_contents(self.report(number))
        problem = problem or self.environment_change(number)
        if status == 0 and not problem:
            return
        log = self.log(number)
        lines = log.read_text(errors="replace").splitlines()[-15:]
        tail = "".join(f"\n    {clean(line)}" for line in lines)
        what = f"exit status {status}; {clean(problem or 'its report is complete', 500)}"
        raise RuntimeError(f"{self.name} {number}: {what}; the end of {log}:{tail}")

    def make_report(self, number: int) -> str | None:
        """Write the report of a run from its log. Returns the reason if that is impossible, else
        None. Raises OSError if the disk is full."""
        path, log, words = self.report(number), self.log(number), shlex.split(self.text)
        assert self.steps
        try:
            write_report(str(path), str(log), self.steps, words, self.started_at[number])
        except ValueError as error:
            return str(error)
        return None

    def other_contents(self, path: Path) -> str | None:
        """Why a report does not belong to this folder: other files of a module than in earlier
        runs, even if their reports were removed. None if it does, or if it is not complete."""
        try:
            run = report.load(str(path), lambda _, case: case.samples_s.clear())
        except ValueError:
            return None
        in_plan = self.folder.parent / plan.PLAN
        if run.status != "complete" or not (
            other := plan.record_contents(in_plan, self.name, run.contents)
        ):
            return None
        what = f"{path} was measured with other contents of {cut(other)} than earlier runs"
        return f"{what}; restore them and remove this report, or choose another --out"

    def environment_change(self, number: int) -> str | None:
        """How the environment of this run differs from that of other runs of the command; None if
        it does not."""
        mine = self.report(number)
        for path in sorted(self.folder.glob("*.jsonl")):
            if path != mine:
                differing = report.why_incomparable(first_line(path), first_line(mine))
                if differing:
                    what = f"{path} has {differing}, so the environments differ"
                    return f"{what}; move one of the reports elsewhere"
        return None


def is_report(path: Path) -> bool:
    """Return whether the first line of a file is that of a report. An interrupted run may leave an
    empty file."""
    with contextlib.suppress(ValueError, OSError):
        return path.is_file() and bool(first_line(path).benchmark)
    return False


def first_line(path: Path) -> report.Report:
    """Return a report without its cases."""
    with path.open("rb") as file:
        return report.load(str(path), lines=[file.readline()])


@contextlib.contextmanager
def open_plan(out: Path, commands: Sequence[Command], settings: dict[str, Any]) -> Iterator[None]:
    """Write the plan of a folder, or check that the call follows the existing plan.

    The plan is locked until the block ends. Raises ValueError if the folder contains the plan of a
    different call or files of unknown origin, if another process uses it, or if a file that a
    command names or an inherited variable has changed.
    """
    lines = [f"{name}: {value}" for name, value in settings.items()]
    for command in commands:
        command.check_program()
        lines.append(f"command {command.name}: {command.text}")
        for name, value in report.without_secrets(command.variables).items():
            lines.append(f"variable of {command.name}: {name}={value}")
        lines += plan.lines_of_files(command.name, command.files)
    lines += plan.lines_of_variables(os.environ)
    path = out / plan.PLAN
    if not path.exists():
        check_no_files(commands)  # before anything is written
    for command in commands:
        command.folder.mkdir(parents=True, exist_ok=True)
    with report.open_alone(str(path)) as file:
        if not path.stat().st_size:
            check_no_files(commands)
            file.write("\n".join(lines).encode(errors="surrogateescape"))
        elif why := plan.why_different(plan.read_lines(path), plan.split_lines(lines)):
            raise ValueError(f"{path} belongs to a different call: {why}; choose another --out")
        for command in commands:
            for done in filter(Path.is_file, sorted(command.folder.glob("*.jsonl"))):
                if other := command.other_contents(done):
                    raise ValueError(other)
        yield


def seed_of(out: Path) -> int:
    """The seed in the plan of a folder, or a new seed if there is no plan yet."""
    check_regular(out / plan.PLAN)
    with contextlib.suppress(OSError):
        if match := re.search(
            r"^seed: (\d+)$", (out / plan.PLAN).read_text(errors="surrogateescape"), re.MULTILINE
        ):
            return int(match[1])
    return random.SystemRandom().randrange(2**32)


def check_no_files(commands: Sequence[Command]) -> None:
    """Raise ValueError if a folder for reports contains files although there is no plan."""
    for command in commands:
        for name in sorted(os.listdir(command.folder) if command.folder.is_dir() else ()):
            what = f"{command.folder} contains {clean(name)}, but ab.py has no plan for this folder"
            raise ValueError(f"{what}; choose another --out")


# -- a round, and interleaved runs in it -----------------------------------------------------------


def run_round(commands: Sequence[Command], number: int, interleave: bool) -> float | None:
    """Run the commands in this order, except those whose report is already complete.

    Returns the duration in seconds, or None if all reports were complete. Raises RuntimeError if a
    run fails.
    """
    todo = [command for command in commands if command.why_no_report(number)]
    if not todo:
        return None
    began = time.monotonic()
    before = psutil.Process().children(recursive=True)
    if interleave:
        run_interleaved(commands, number)
        end_children(before, 10)
    else:
        for command in todo:
            load = CpuLoad(psutil.Process())  # excludes this process and the commands it starts
            command.finish(number, command.start(number, {}))
            command.write_load(number, load, *spent(load.start, load.read()))
            end_children(before, 10)
    return time.monotonic() - began


@dataclass
class InterleavedRun:
    """A run that measures only in its turns.

    A token written to `turn` starts a turn, and the run writes a token to `back` to end it.
    """

    command: Command
    process: subprocess.Popen[bytes]
    turn: IO[bytes]
    back: IO[bytes]
    has_answered: bool = False
    wall_s: float = 0.0  # duration of its turns
    others_s: float = 0.0  # CPU time of other processes during its turns

    def count(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Add a turn, given `CpuLoad.read` at its start and at its end."""
        wall_s, others_s = spent(start, end)
        self.wall_s += wall_s
        self.others_s += others_s

    def take(self) -> bool:
        """Give the run a turn and wait for its end. Returns False if the run ends instead."""
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


def start_interleaved(
    command: Command, number: int, folder: str, files: contextlib.ExitStack
) -> InterleavedRun:
    """Start a run with two pipes in a folder. `files` closes the pipes."""
    names = [f"{folder}/{command.name} {end}" for end in ("turn", "back")]
    pipes = []
    for name in names:
        os.mkfifo(name)
        # for reading and writing, so that opening does not block, here and in the command
        pipe = open(name, "r+b", buffering=0)  # noqa: SIM115 (`files` closes it)
        pipes.append(files.enter_context(pipe))
    turn, back = pipes
    process = command.start(number, {TURN: ":".join(names)})
    return InterleavedRun(command, process, turn, back)


def run_interleaved(commands: Sequence[Command], number: int) -> None:
    """Run all commands concurrently, but let only one of them measure at a time.

    The load of a run is the CPU use during its turns of processes that were not started by any of
    the commands. Raises RuntimeError if a command fails.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as files:
        if ":" in folder:  # the separator between the names of the pipes
            raise ValueError(f"--interleave: expected a TMPDIR without a colon, got {folder!r}")
        load = CpuLoad(psutil.Process())
        running = [start_interleaved(command, number, folder, files) for command in commands]
        start = load.start
        while running:
            for run in running.copy():
                is_running = run.take()
                end = load.read()  # between two turns, so that it affects neither
                run.count(start, end)
                start = end
                if not is_running:  # it has ended; continue with the remaining runs
                    has_left_turn = is_readable(run.turn, 0)
                    was_interleaved = run.has_answered and not has_left_turn
                    run.command.finish(number, run.process, was_interleaved)
                    run.command.write_load(number, load, run.wall_s, run.others_s)
                    running.remove(run)


# -- cleaning up -----------------------------------------------------------------------------------


@contextlib.contextmanager
def ending_children(out: str, at_interrupt: Sequence[Callable[[], None]]) -> Iterator[None]:
    """End all commands that the block has started, however the block ends.

    out: the folder of the runs. at_interrupt: called after Ctrl-C, when the commands have ended.
    Exits with status 2 after a user's mistake, with 1 if a run fails or the disk is full, and with
    128 + number after a signal.
    """
    script = Path(sys.argv[0]).name
    before = psutil.Process().children(recursive=True)
    adopt_orphans(True)
    handle_signals(interrupt)
    try:
        yield
    except (ValueError, OSError) as error:
        is_disk_full = isinstance(error, OSError) and error.errno in report.DISK_FAILED
        refuse(clean(error, 1000), 1 if is_disk_full else 2)
    except RuntimeError as error:
        print_error(f"{script}: {error}")
        print_error(KEPT.format(out))
        sys.exit(1)
    except KeyboardInterrupt as interruption:
        print_error(f"{script}: interrupted")
        end_children(before, 40)
        if interruption.args[0] == 128 + signal.SIGINT:
            for function in at_interrupt:
                function()
        print_error(KEPT.format(out))
        sys.exit(int(interruption.args[0]))
    finally:
        handle_signals(signal.SIG_IGN)  # a second signal does not disturb the cleanup
        end_children(before, 40)
        adopt_orphans(False)
    handle_signals(signal.SIG_DFL)


@contextlib.contextmanager
def blocked_signals() -> Iterator[set[int | signal.Signals]]:
    """Block signals while a command starts. Yields the previous mask, to restore in the command.

    Otherwise this process might forward a signal before the command's exec, and it would be lost.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield mask
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def handle_signals(handler: Any) -> None:
    for name in SIGNALS:
        signal.signal(name, handler)


def interrupt(number: int, frame: Any) -> None:
    handle_signals(signal.SIG_IGN)  # this signal ends the commands; ignore any further ones
    raise KeyboardInterrupt(128 + number)


def adopt_orphans(adopt: bool) -> None:
    """Become a subreaper, so that orphaned processes of the commands can be found."""
    if PRCTL:
        PRCTL(SET_CHILD_SUBREAPER, ctypes.c_ulong(adopt), 0, 0, 0)


def end_children(before: Collection[psutil.Process], patience_s: float) -> None:
    """End the processes that this process and its commands have started: SIGTERM, then SIGKILL.

    before: the processes that existed earlier, which are left alone.
    """
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
        patience_s = 0  # processes that were started in the meantime are killed at once
