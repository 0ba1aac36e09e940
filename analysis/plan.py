"""What a call of ab.py measures: its commands, the files that they name, inherited variables.

OUT/plan.txt holds them as lines. A later call in the same folder goes on only if they are the same.
OUT/verdict.txt holds what may change from call to call: how the runs were last compared.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from common.cli import cut
from common.contents import harness, is_installed, modules, of_file, python_program
from common.report import shown, without_secrets

PLAN, VERDICT = "plan.txt", "verdict.txt"  # files of OUT
ADDRESS = ("tcp://", "udp://")  # of a service, which Kubernetes sets
HASHED = 2**28  # bytes; of a larger file the size and the time of its last change are compared
FILE = "file of "
INHERITED = "inherited variable "
MOST_NAMED = 6  # differences in a message
# Inherited variables that change from shell to shell or from job to job: of terminals, sessions,
# jobs and CI runs, temporary folders
PASSING = re.compile(
    r"_|SHLVL|PWD|OLDPWD|PS\d|.*PROMPT.*|HOSTNAME|MAIL|HIST.*|LESS.*|LS_COLORS"
    r"|(TERM|TMUX|KITTY|VTE|KONSOLE|GNOME|ITERM|LC_TERMINAL|VSCODE|WT|ALACRITTY|ZELLIJ)(_.*)?"
    r"|COLORTERM|COLUMNS|LINES|WINDOW(ID)?|STY|DISPLAY|WAYLAND_DISPLAY|XAUTHORITY"
    r"|(SSH|DBUS|GPG|SUDO|SYSTEMD)_.*|SESSION_MANAGER|DESKTOP_SESSION|GDMSESSION|KRB5CCNAME"
    r"|XDG_(SESSION|RUNTIME|SEAT|VTNR|CURRENT|DATA_DIRS|MENU|GREETER).*"
    r"|INVOCATION_ID|JOURNAL_STREAM|PYTEST_.*"
    r"|(SLURM|SRUN|PBS|PALS|LSB|FLUX|COBALT|OAR|SGE|TORCHELASTIC)_.*|JOB_ID|TASK_ID|MASTER_PORT"
    r"|(GITHUB|RUNNER|ACTIONS|CI|GITLAB|BUILD|BUILDKITE|JENKINS|HUDSON|KUBERNETES)_.*"
    r"|.*_SERVICE_(HOST|PORT).*|.*_PORT_\d+_(TCP|UDP).*"
    r"|TMP|TEMP|TEMPDIR|(.*_)?TMPDIR"
)


class Verdict(NamedTuple):
    """The flags of a call of ab.py that change its verdicts, but not what is run."""

    margin: float
    ignore_key: list[str]
    allow_disturbed: bool
    is_like_with_like: bool  # A was compared with itself

    def write(self, out: Path) -> None:
        """Into the folder of the call, for report.py."""
        (out / VERDICT).write_text(json.dumps(self._asdict()) + "\n")


def lines_of_files(name: str, text: str, variables: Mapping[str, str]) -> list[str]:
    """A line for each file that a command names, with a hash of its content.

    name: of the command. text: the command, as a shell takes it. variables: that are set for it.
    """
    files = files_of(text, os.environ | variables)
    return [f"{FILE}{name}: {state_of(file)} {shown(label)}" for label, file in files.items()]


def lines_of_variables(environ: Mapping[str, str]) -> list[str]:
    """A line for each inherited variable that may change what a command does.

    Repeated entries of PATH are dropped; the order of the others counts.
    """
    kept = {
        name: environ[name]
        for name in sorted(environ)
        if not PASSING.fullmatch(name) and not environ[name].startswith(ADDRESS)
    }
    if "PATH" in kept:
        kept["PATH"] = os.pathsep.join(dict.fromkeys(kept["PATH"].split(os.pathsep)))
    texts = without_secrets(kept)
    return [
        f"{INHERITED}{name}={text if text.isprintable() else ascii(text)}"
        for name, text in texts.items()
    ]


def files_of(text: str, environ: Mapping[str, str]) -> dict[str, Path]:
    """The files that a command names: those among its words, programs on PATH, interpreters of
    scripts, and the local modules of Python scripts, of `-m MODULE` and of MODULE:FUNCTION.

    A file's name in messages -> the file. The command may be `env -C FOLDER ...` or a shell's -c.
    """
    words = list(split(text))
    before = ["", *words]
    folders = [word for last, word in zip(before, words, strict=False) if last in ("-C", "cd")]
    bases = [*filter(os.path.isdir, folders), ""]
    python_path = [folder for folder in environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    local = [entry for entry in [*bases, *python_path] if not is_installed(entry)]
    files: dict[str, Path] = {}
    for last, word in zip(before, words, strict=False):
        _, _, value = word.partition("=")
        for candidate in filter(None, (word, value)):
            for label, path in paths_of(candidate, bases, environ.get("PATH")).items():
                files |= files_behind(label, path, python_path, environ.get("PATH"))
        module, colon, _ = word.partition(":")
        if last == "-m" or (colon and re.fullmatch(r"[A-Za-z_][\w.]*", module)):
            files |= modules([module if colon else word], local)
    return files


def split(text: str) -> Iterator[str]:
    """The words of a command; those of a shell's -c '...' as well."""
    for word in shlex.split(text):
        yield word
        if any(letter.isspace() for letter in word):
            with contextlib.suppress(ValueError):  # an unmatched quote: it is no command
                yield from shlex.split(word)


def paths_of(word: str, bases: Sequence[str], path: str | None) -> dict[str, Path]:
    """The regular files that a word names in these folders, the last of which counts only if no
    other one has the file; else the program on PATH."""
    if word.startswith("-"):
        return {}
    *inner, here = [os.path.join(base, word) for base in bases]
    found = [name for name in inner if os.path.isfile(name)]
    if not found and os.path.isfile(here):
        found = [here]
    if found:
        return {name: Path(name) for name in found}
    program = shutil.which(word, path=path) if os.sep not in word else None
    return {word: Path(program)} if program else {}


def files_behind(
    label: str, path: Path, python_path: Sequence[str], search: str | None
) -> dict[str, Path]:
    """A file, the interpreters that its first line names, and a Python script's local modules."""
    files = {label: path}
    words = shebang(path)
    for word in words:
        if interpreter := shutil.which(word, path=search):
            files[word] = Path(interpreter)
    if path.suffix == ".py" or any("python" in word for word in words):
        folder = path.resolve().parent
        entries = [str(folder), *python_path]
        local = [entry for entry in entries if not is_installed(entry)]
        imported = {} if is_installed(str(folder)) else python_program(path, local)
        files |= {name: file for name, file in imported.items() if file != path}
        if folder.name == "benchmarks" and (folder.parent / "common").is_dir():  # a checkout
            root = folder.parent
            files |= {f"{root}/{name}": file for name, file in harness(root).items()}
    return files


def shebang(path: Path) -> list[str]:
    """The words of a script's first line behind #!; [] for another file."""
    try:
        with path.open("rb") as file:
            first = file.readline(200)
    except OSError:
        return []
    return first[2:].decode(errors="replace").split() if first.startswith(b"#!") else []


def state_of(path: Path) -> str:
    """What changes with a file's content: a hash, of a very large file its size and time."""
    try:
        state = path.stat()
    except OSError:
        return "gone"
    if state.st_size > HASHED:
        return f"{state.st_size}@{state.st_mtime_ns}"
    return of_file(path) or "unreadable"


def is_code(path: Path) -> bool:
    """Whether a file is a program, and no data that the command may write."""
    return path.suffix in (".py", ".sh") or os.access(path, os.X_OK) or bool(shebang(path))


def edited(plan: Path, name: str, text: str, variables: Mapping[str, str]) -> list[str]:
    """The programs of a command that have changed since its plan was written."""
    before = states_of_files(read_lines(plan))
    files = files_of(text, os.environ | variables)
    return [
        label
        for label, file in files.items()
        if is_code(file) and before.get((name, shown(label)), "") not in ("", state_of(file))
    ]


def read_lines(plan: Path) -> list[str]:
    return plan.read_text(errors="surrogateescape").splitlines()


def states_of_files(lines: Iterable[str]) -> dict[tuple[str, str], str]:
    """The files of a plan: the name of the command and that of the file -> its state."""
    states = {}
    for line in lines:
        if line.startswith(FILE):
            name, _, rest = line.removeprefix(FILE).partition(": ")
            state, _, label = rest.partition(" ")
            states[name, label] = state
    return states


def variables_in(lines: Iterable[str]) -> dict[str, str]:
    pairs = [line.removeprefix(INHERITED) for line in lines if line.startswith(INHERITED)]
    return {name: value for name, _, value in (pair.partition("=") for pair in pairs)}


def misfit(before: Sequence[str], now: Sequence[str]) -> str:
    """In what a call differs from the plan of its folder; "" if it is the same call.

    A file that was not there when the plan was written does not count: a command may have made it.
    """
    had = [line for line in before if not line.startswith((FILE, INHERITED))]
    has = [line for line in now if not line.startswith((FILE, INHERITED))]
    lacking = [line for line in has if line not in had]
    if lacking:
        return f"it lacks {'; '.join(lacking)}"
    if had != has:
        return "it has more commands"
    then, today = states_of_files(before), states_of_files(now)
    parts = [
        f"{file[1]} {'has changed' if file in today else 'is gone'}"
        for file, state in then.items()
        if today.get(file) != state
    ]
    old, new = variables_in(before), variables_in(now)
    for name in sorted(old | new):
        if old.get(name) != new.get(name):
            parts.append(f"{name} was {shown(old.get(name))}, is {shown(new.get(name))} now")
    return cut(list(dict.fromkeys(parts)), MOST_NAMED)
