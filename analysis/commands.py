"""Commands that are measured in rounds, and what all of them wrote: behind ab.py and race.py.

A command is run once a round, with `--json` added to it. plan.txt holds what the commands are, and
a digest of each report that they wrote. A round whose reports are there already is not run again:
so the same call goes on where it was interrupted. No file is ever replaced or removed: what is in
the way gets another name.
"""

import contextlib
import ctypes
import hashlib
import itertools
import json
import math
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
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

import psutil

from analysis.load import Run, load
from analysis.show import clean
from common import report
from common.cli import ask_git, complain, cut, refuse, wrong
from common.turns import TURN

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# What a command inherits can change its result where the variable begins with one of these.
INHERITED = (*report.FAMILIES, "PET_", "PYTHON", "LD_")
PLAN = "# the plan of torchrun-bench: what the commands are, then the reports that they wrote\n"
REPORTS = "reports:\n"  # the line between the two
LARGE = 2**26  # a file of more bytes is known by its size and date
SET_CHILD_SUBREAPER = 36  # of prctl (linux/prctl.h)
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
    plan: "Plan" = field(init=False)  # set by `open_folder`

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
            complain(f"{path} is now {move_aside(path)}: {clean(why, 500)}")
        for left in (path, self.log(number)):
            if os.path.lexists(left):
                move_aside(left)

    def start(self, number: int, turns: dict[str, str]) -> subprocess.Popen[bytes]:
        """Start a run. turns: the variable that names the pipes, where runs take turns."""
        self.clear(number)
        path = self.report(number)
        variables = dict(variable.split("=", 1) for variable in self.variables)
        with self.log(number).open("xb") as log:
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
        problem = problem or self.other_environment(number) or self.plan.changed()
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
                other = report.identity(environment_of(path))
                differing = report.differences(other, report.identity(environment_of(mine)))
                return f"{path} has {differing}: not of one kind" if differing else None
        return None


@dataclass
class Plan:
    """OUT/plan.txt: what the commands are, and a digest of each report that they wrote."""

    file: IO[bytes]  # locked as long as it is open
    commands: Sequence[Command]
    files: dict[str, str]  # of the commands, as `files_of` tells them
    reports: set[str]

    def changed(self) -> str | None:
        """Which program or module is another one than when this process began."""
        now = files_of(self.commands)
        known = {name: now.get(name) for name in self.files}
        differing = report.differences(self.files, known)
        return f"{differing}: changed while it was measured" if differing else None

    def holds(self, path: Path) -> bool:
        return path.is_file() and entry_of(path) in self.reports

    def add(self, path: Path) -> None:
        self.reports.add(entry_of(path))
        self.write(f"{entry_of(path)}\n")

    def write(self, text: str) -> None:
        try:
            report.write_through(self.file, text.encode())
        except OSError as error:
            raise OSError(error.errno, error.strerror, self.file.name) from None


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


def run_round(
    commands: Sequence[Command], number: int, interleave: bool, name: str = "round"
) -> None:
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


def load_rounds(
    commands: Sequence[Command], rounds: Sequence[int], ignore: Sequence[str]
) -> dict[str, list[Run]]:
    """The runs of each command, by its name. rounds: how many each has; they count from 1."""
    paths_of_command: dict[str, list[str]] = {}
    for command, count in zip(commands, rounds, strict=True):
        paths = [command.report(number) for number in range(1, count + 1)]
        for path in paths:
            if not command.plan.holds(path):
                raise ValueError(f"{path} has changed since its run; move it away to measure again")
        paths_of_command[command.name] = list(map(str, paths))
    every_path = list(itertools.chain(*paths_of_command.values()))
    run_of_path = {run.label: run for run in load(every_path, ignore=ignore)}
    runs_of_command = {}  # in the order of the rounds; `load` sorts by the start
    for name, paths_of_runs in paths_of_command.items():
        runs_of_command[name] = [run_of_path[path] for path in paths_of_runs]
    return runs_of_command


@contextlib.contextmanager
def open_folder(
    out: Path, commands: Sequence[Command], plan: dict[str, Any], anew: bool = False
) -> Iterator[None]:
    """Keep OUT/plan.txt open, and locked. anew: begin anew where another plan was followed.

    Raises ValueError where the folder holds another plan or files of somebody else, or where
    another process is at work in it.
    """
    plan = plan | {"variables": inherited(), "files": files_of(commands)}
    out.mkdir(parents=True, exist_ok=True)
    path = out / "plan.txt"
    file = report.open_alone(str(path))
    text = path.read_text(errors="replace")
    if anew and text.startswith(PLAN):
        complain(f"the runs of before are now in {move_runs(out, commands)}")
        file.close()
        file, text = report.open_alone(str(path)), ""
    with file:
        told, is_whole, reports = text.removeprefix(PLAN).partition(REPORTS)
        if is_whole:
            refuse_another(path, read_plan(path, told), plan)
        elif text and not PLAN.startswith(text) and not text.startswith(PLAN):
            raise ValueError(f"{path} is no plan of this program; give another --out")
        else:  # there is none, or it was cut short before the first run
            refuse_files(commands)
            file.truncate(0)
        opened = Plan(file, commands, plan["files"], set(reports.splitlines()))
        if not is_whole:
            lines = [f"{name}: {json.dumps(value)}\n" for name, value in plan.items()]
            opened.write(PLAN + "".join(lines) + REPORTS)
        elif not text.endswith("\n"):  # a crash has cut it short
            opened.write("\n")
        for command in commands:
            command.plan = opened
            command.folder.mkdir(exist_ok=True)
        yield


def read_plan(path: Path, text: str) -> dict[str, Any]:
    plan = {}
    for line in text.splitlines():
        name, _, value = line.partition(": ")
        try:
            plan[name] = json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError(f"{path}: {clean(line)!r} is no line of a plan") from None
    return plan


def refuse_another(path: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise ValueError where the commands, their files or their variables are not as before."""
    if isinstance(files := before.get("files"), dict):  # others may be what the commands write
        now = now | {"files": {name: now["files"].get(name) for name in files}}
    if differing := report.differences(flat(before), flat(now)):
        raise ValueError(
            f"{path} has {differing}: runs that do not belong together; give another --out, "
            "or --anew to begin anew and keep the old runs elsewhere"
        )


def flat(plan: dict[str, Any]) -> dict[str, Any]:
    """The plan with the entries of its dictionaries beside the others."""
    entries: dict[str, Any] = {}
    for name, value in plan.items():
        if isinstance(value, dict):
            entries |= {f"{name} {inner}": content for inner, content in value.items()}
        else:
            entries[name] = json.loads(json.dumps(value))  # a tuple is a list, as in the file
    return entries


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


def move_aside(path: Path) -> str:
    backup = report.unused(f"{path}.bak")
    path.rename(backup)
    return backup


def inherited() -> dict[str, str]:
    """The variables of this process that can change what its commands measure."""
    found = {}
    for name in sorted(os.environ):
        if name.startswith(INHERITED) and not name.endswith(report.OF_A_PLACE):
            found[name] = os.environ[name]
    return report.without_secrets(found)


def files_of(commands: Sequence[Command]) -> dict[str, str]:
    """The programs and scripts that the commands name: where each is, and its digest.

    Beside a Python script, the modules are told that lie in its checkout, or else in its folder;
    beside a program, the torch that is installed with it.
    """
    files = {}
    for command in commands:
        variables = dict(variable.split("=", 1) for variable in command.variables)
        search = variables.get("PATH", os.environ.get("PATH"))
        # also the words of a command within a word, as in bash -c 'x.py --plan=y.json'
        words = {*shlex.split(command.text), *re.findall(r"[^\s=;&|()'\"]+", command.text)}
        for word in sorted(words):
            program = shutil.which(word, path=search)
            module = word.replace(".", "/")  # of python -m
            names = (
                program or word,
                f"{word}/__main__.py",
                f"{module}.py",
                f"{module}/__main__.py",
            )
            for name in filter(is_program, names):
                path = os.path.realpath(name)
                files[f"{word} of {command.name}"] = f"{path} ({digest([path])})"
                if path.endswith(".py"):
                    files |= modules_beside(Path(path))
            if program:
                place = Path(os.path.abspath(program)).parent.parent
                torch = place.glob("lib*/python*/*-packages/torch-*.dist-info")
                files[f"torch in {place}"] = ", ".join(sorted({path.name for path in torch}))
    return files


def is_program(name: str) -> bool:
    """Whether it is a file that can be run. Others may be what the commands write."""
    is_script = name.endswith((".py", ".sh")) or os.access(name, os.X_OK)
    return is_script and os.path.isfile(name)


def modules_beside(script: Path) -> dict[str, str]:
    """A digest of all Python files of the checkout that a script is in, or else of its folder."""
    folder = script.parent
    listed = ask_git(folder, "ls-files", "-z", "-c", "-o", "--exclude-standard", "--", ":/*.py")
    names = listed.split("\0") if listed else sorted(path.name for path in folder.glob("*.py"))
    return {f"modules beside {script}": digest(folder / name for name in names if name)}


def digest(paths: Iterable[str | Path]) -> str:
    """Of the names and contents of files; of size and date where one is large or not readable."""
    seen = hashlib.sha256()
    for path in map(Path, paths):
        seen.update(os.fsencode(path))
        with contextlib.suppress(OSError):  # there is none, or its folder cannot be read
            about = path.stat()
            content = f"{about.st_size} {about.st_mtime_ns}".encode()
            if about.st_size <= LARGE and os.access(path, os.R_OK):
                content = path.read_bytes()
            seen.update(content)
    return seen.hexdigest()[:16]


def entry_of(path: Path) -> str:
    """A report in plan.txt: `a/01.jsonl 0123...`."""
    content = hashlib.sha256(path.read_bytes()).hexdigest()
    return f"{path.parent.name}/{path.name} {content}"


def environment_of(path: Path) -> dict[str, Any]:
    """The environment that a report tells in its first line."""
    with path.open("rb") as file:
        return report.load(str(path), lines=[file.readline()]).environment


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

    Exits with 2 for a mistake of the user, with 1 where a run or the disk fails, with 130 after
    Ctrl-C.
    """
    script = Path(sys.argv[0]).name
    before = psutil.Process().children(recursive=True)
    adopt_orphans(True)
    handle_signals(interrupt)
    try:
        result = measure()
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
    return result
