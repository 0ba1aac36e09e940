"""Commands that are measured in rounds, and what all of them wrote: behind ab.py.

A command is run once a round, with `--json` added to it. OUT/plan.txt holds what the commands are,
and a digest of each report that they wrote. A round whose reports are there already is not run
again: so the same call goes on where it was interrupted. No file of others is ever replaced or
removed: what is in the way gets another name.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import re
import select
import shlex
import shutil
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

from analysis.show import clean
from common import report
from common.cli import TOKEN, TURN, ask_git, complain, cut, refuse

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# What a command inherits can change its result where the variable begins with one of these.
INHERITED = (*report.FAMILIES, "PET_", "PYTHON", "LD_")
SCHEMA = "torchrun-bench-plan/1"
FILES = "files "  # how entries of the plan begin that are about files
LARGE = 2**26  # a file of more bytes is known by its size and date
SET_CHILD_SUBREAPER = 36  # of prctl (linux/prctl.h)
GOES_ON = "the finished runs are kept; the same command goes on"


@dataclass
class Command:
    """One of the commands; its reports and logs are in `folder`."""

    name: str
    text: str  # as a shell would take it
    variables: dict[str, str]
    folder: Path
    plan: "Plan" = field(init=False)  # set by `open_plan`

    def report(self, number: int) -> Path:
        return self.folder / f"{number:02d}.jsonl"

    def log(self, number: int) -> Path:
        return self.folder / f"{number:02d}.log"

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

    def is_done(self, number: int) -> bool:
        """Whether a run of this plan has written the report, and it is complete."""
        return not self.why_no_report(number) and self.plan.holds(self.report(number))

    def clear(self, number: int) -> None:
        """Give other names to what an earlier attempt has left, or somebody else has put there."""
        path = self.report(number)
        if path.exists():
            report.open_alone(str(path)).close()  # refuses one that a process still writes
            why = self.why_no_report(number) or "it is measured again"
            if not self.plan.holds(path):
                why = "no finished run of this plan wrote it"
            complain(f"{path} is now {report.unused(f'{path}.bak')}: {clean(why, 500)}")
        for left in (path, self.log(number)):
            if os.path.lexists(left):
                left.rename(report.unused(f"{left}.bak"))

    def start(self, number: int, turns: dict[str, str]) -> subprocess.Popen[bytes]:
        """Start a run. turns: the variable that names the pipes, where runs take turns."""
        self.clear(number)
        with self.log(number).open("xb") as log:
            return subprocess.Popen(
                [*shlex.split(self.text), "--json", str(self.report(number))],
                env=os.environ | self.variables | turns,
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
        problem = problem or self.other_environment(number) or self.plan.changed_files()
        if status == 0 and problem is None:
            self.plan.add(self.report(number))
            return
        log = self.log(number)
        lines = log.read_text(errors="replace").splitlines()[-15:]
        tail = "".join(f"\n    {clean(line)}" for line in lines)
        what = f"exit status {status}; {clean(problem or 'its report is complete', 500)}"
        raise RuntimeError(f"{self.name} {number}: {what}; the end of {log}:{tail}")

    def other_environment(self, number: int) -> str | None:
        """In what this run differs from another one of the command, such as another torch."""
        mine = self.report(number)
        for path in sorted(self.folder.glob("*.jsonl")):
            if path != mine and self.plan.holds(path):
                differing = report.differences(identity_of(path), identity_of(mine))
                return f"{path} has {differing}: not of one kind" if differing else None
        return None


def identity_of(path: Path) -> dict[str, Any]:
    """What the first line of a report tells of the environment, as far as it must be the same."""
    with path.open("rb") as file:
        return report.identity(report.load(str(path), lines=[file.readline()]).environment)


@dataclass
class Plan:
    """OUT/plan.txt. It is replaced as a whole, so that a crash or a full disk leaves no half."""

    path: Path
    commands: Sequence[Command]
    content: dict[str, Any]  # what must be the same whenever the folder is used
    reports: dict[str, str]  # those that the commands wrote, and their digests

    def holds(self, path: Path) -> bool:
        return path.is_file() and self.reports.get(self.name_of(path)) == digest(path)

    def add(self, path: Path) -> None:
        self.reports[self.name_of(path)] = digest(path)
        self.save()

    def name_of(self, path: Path) -> str:
        return str(path.relative_to(self.path.parent))

    def changed_files(self) -> str | None:
        """Which program or module is another one than when this process began."""
        others = {n: value for n, value in self.content.items() if not n.startswith(FILES)}
        differing = differing_entries(self.content, others | files_of(self.commands))
        return f"{differing}: changed while it was measured" if differing else None

    def save(self) -> None:
        document = {"schema": SCHEMA, "plan": self.content, "reports": self.reports}
        new = Path(report.unused(f"{self.path}.new"))
        try:
            with new.open("xb") as file:
                file.write(json.dumps(document, indent=1).encode())
                file.flush()
                os.fsync(file.fileno())
            new.replace(self.path)
        except OSError as error:
            new.unlink(missing_ok=True)
            raise OSError(error.errno, error.strerror, str(self.path)) from None


@contextlib.contextmanager
def open_plan(
    out: Path, commands: Sequence[Command], settings: dict[str, Any], anew: bool = False
) -> Iterator[None]:
    """Follow the plan in a folder, which is locked meanwhile, or begin one.

    anew: where another plan was followed, keep its runs elsewhere. Raises ValueError where the
    folder holds another plan or files of somebody else, or where another process is at work in it.
    """
    out.mkdir(parents=True, exist_ok=True)
    path = out / "plan.txt"
    with locked(out):
        content = settings | inherited() | files_of(commands)
        for command in commands:
            content[f"command {command.name}"] = command.text
            for name, value in report.without_secrets(command.variables).items():
                content[f"{command.name}_env {name}"] = value
        plan = Plan(path, commands, content, {})
        if path.exists():
            before = read_plan(path)
            if anew:
                complain(f"the runs of before are now in {move_runs(out, commands)}")
            else:
                refuse_another(path, before["plan"], content)
                plan.content, plan.reports = before["plan"], before["reports"]
        if not path.exists():
            refuse_files(commands)
        plan.save()
        for command in commands:
            command.plan = plan
            command.folder.mkdir(exist_ok=True)
        yield


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    number = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(number)
        raise ValueError(f"another run is writing {folder}; give another --out") from None
    except OSError:  # a file system without locks
        pass
    try:
        yield
    finally:
        os.close(number)


def read_plan(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
        if document["schema"] == SCHEMA:
            return {name: dict(document[name]) for name in ("plan", "reports")}
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise ValueError(f"{path} is no plan of this program; give another --out")


def refuse_another(path: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise ValueError where the commands, their files or their variables are not as before."""
    if differing := differing_entries(before, now):
        raise ValueError(
            f"{path} has {differing}: runs that do not belong together; give another --out, "
            "or --anew to begin anew and keep the old runs elsewhere"
        )


def differing_entries(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Files that are new do not count: they may be what the commands write."""
    known = {n: value for n, value in now.items() if n in before or not n.startswith(FILES)}
    return report.differences(before, known)


def refuse_files(commands: Sequence[Command]) -> None:
    """Raise ValueError where a folder for reports holds files already."""
    for command in commands:
        if command.folder.exists() and (files := sorted(os.listdir(command.folder))):
            raise ValueError(
                f"{command.folder} holds {clean(cut(files, 3))}, which no plan.txt of this program "
                "tells of; give another --out"
            )


def move_runs(out: Path, commands: Sequence[Command]) -> Path:
    """Move plan, reports and logs out of a folder, beside it. Returns where they are."""
    out = Path(os.path.realpath(out))
    backup = Path(report.unused(f"{out}.bak"))
    backup.mkdir()
    for name in (*(command.folder.name for command in commands), "plan.txt"):  # the plan last
        if (out / name).exists():
            (out / name).rename(backup / name)
    return backup


def inherited() -> dict[str, str]:
    """The variables of this process that can change what its commands measure."""
    variables = {}
    for name in sorted(os.environ):
        if name.startswith(INHERITED) and not name.endswith(report.OF_A_PLACE):
            variables[name] = os.environ[name]
    return {f"variables {n}": value for n, value in report.without_secrets(variables).items()}


def files_of(commands: Sequence[Command]) -> dict[str, str]:
    """The programs and scripts that the commands name: where each is, and its digest.

    Beside a Python script, the modules are told that lie in its checkout, or else in its folder;
    beside a program, the torch that is installed with it.
    """
    files = {}
    for command in commands:
        search = command.variables.get("PATH", os.environ.get("PATH"))
        # also the words of a command within a word, as in bash -c 'x.py --plan=y.json'
        words = {*shlex.split(command.text), *re.findall(r"[^\s=;&|()'\"]+", command.text)}
        for word in sorted(words):
            program = shutil.which(word, path=search)
            module = word.replace(".", "/")  # of python -m
            scripts = (f"{word}/__main__.py", f"{module}.py", f"{module}/__main__.py")
            for name in filter(is_program, (program or word, *scripts)):
                path = Path(os.path.realpath(name))
                files[f"{FILES}{word} of {command.name}"] = f"{path} ({digest(path)})"
                if path.suffix == ".py":
                    files[f"{FILES}modules beside {path}"] = digest(*modules_beside(path))
            if program:
                place = Path(os.path.abspath(program)).parent.parent
                torch = place.glob("lib*/python*/*-packages/torch-*.dist-info")
                files[f"{FILES}torch in {place}"] = ", ".join(sorted({path.name for path in torch}))
    return files


def is_program(name: str) -> bool:
    """Whether it is a file that can be run. Others may be what the commands write."""
    is_script = name.endswith((".py", ".sh")) or os.access(name, os.X_OK)
    return is_script and os.path.isfile(name)


def modules_beside(script: Path) -> list[Path]:
    """All Python files of the checkout that a script is in, or else of its folder."""
    folder = script.parent
    listed = ask_git(folder, "ls-files", "-z", "-c", "-o", "--exclude-standard", "--", ":/*.py")
    if not listed:
        return sorted(folder.glob("*.py"))
    return [folder / name for name in listed.split("\0") if name]


def digest(*paths: Path) -> str:
    """Of the names and contents of files; of size and date where one is large or not readable."""
    seen = hashlib.sha256()
    for path in paths:
        seen.update(os.fsencode(path.name))
        with contextlib.suppress(OSError):  # there is none, or its folder cannot be read
            about = path.stat()
            content = f"{about.st_size} {about.st_mtime_ns}".encode()
            if about.st_size <= LARGE and os.access(path, os.R_OK):
                content = path.read_bytes()
            seen.update(content)
    return seen.hexdigest()[:16]


# -- a round, and runs that take turns in it -------------------------------------------------------


def run_round(commands: Sequence[Command], number: int, interleave: bool, name: str) -> None:
    """Run the commands in this order, but not those whose report is complete already.

    name: what the round is called where it is reported, such as `pair 3 of 6`. Raises RuntimeError
    where a command fails.
    """
    todo = [command for command in commands if not command.is_done(number)]
    if not todo:
        complain(f"{name} is there already")
        return
    began = time.monotonic()
    before = psutil.Process().children(recursive=True)
    if interleave:
        take_turns(commands, number)
        end_left(before, " and ".join(f"{command.name} {number}" for command in commands))
    else:
        for command in todo:
            command.finish(number, command.start(number, {}))
            end_left(before, f"{command.name} {number}")
    complain(f"{name} took {time.monotonic() - began:.1f} s")


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
    """Run commands at once of which only one measures. Raises RuntimeError where one fails."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as files:
        if ":" in folder:  # it stands between the names of the pipes
            raise ValueError(f"--interleave: expected a TMPDIR without a colon, got {folder!r}")
        running = [start_turns(command, number, folder, files) for command in commands]
        while running:
            for run in running.copy():
                if not run.take():  # it has ended; the others go on
                    has_left_turn = is_readable(run.turn, 0)
                    took_turns = run.has_answered and not has_left_turn
                    run.command.finish(number, run.process, took_turns)
                    running.remove(run)


# -- the end of what was started -------------------------------------------------------------------


@contextlib.contextmanager
def ending_all() -> Iterator[None]:
    """However the block ends, the commands that it has started end as well.

    Exits with 2 for a mistake of the user, with 1 where a run or the disk fails, with 130 after
    Ctrl-C.
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
        complain(GOES_ON)
        sys.exit(1)
    except KeyboardInterrupt as interruption:
        complain(f"{script}: interrupted")
        complain(GOES_ON)
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
    with contextlib.suppress(AttributeError):  # no Linux
        ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, ctypes.c_ulong(adopt), 0, 0, 0)


def started_since(before: Collection[psutil.Process]) -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if p not in before]


def end_started(before: Collection[psutil.Process], patience_s: float) -> None:
    """End what this process and its commands have started, first politely. before: what was there
    already."""
    for _ in range(5):
        started = started_since(before)
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if child in started:
                    child.terminate()
        _, alive = psutil.wait_procs(started, patience_s)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, 5)
        patience_s = 0  # who was started meanwhile ends at once


def end_left(before: Collection[psutil.Process], who: str) -> None:
    """End what a command has left, and say so: it would disturb the next ones."""
    _, left = psutil.wait_procs(started_since(before), 1)  # some are about to end
    names = []
    for process in left:
        with contextlib.suppress(psutil.Error):
            names.append(f"{process.name()} ({process.pid})")
            process.terminate()
    if names:
        count = "1 process" if len(names) == 1 else f"{len(names)} processes"
        complain(f"{who} left {count}, ended now: {clean(cut(names), 500)}")
    end_started(before, 10)
