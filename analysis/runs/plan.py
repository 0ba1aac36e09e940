"""The plan of a call of ab.py: its commands, the files that they name, and inherited variables.

OUT/plan.txt stores the plan. A later call in the same folder continues only if its plan is the
same. OUT/verdict.txt stores flags that may differ between calls, as given in the last call.
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

from analysis.runs.verdicts import Design
from harness import files
from harness.cli import cut
from harness.contents import harness, is_installed, modules, of_file, python_program
from harness.report import shown, without_secrets

PLAN, VERDICT = "plan.txt", "verdict.txt"  # files in OUT
ADDRESS = ("tcp://", "udp://")  # addresses of services, in variables that Kubernetes sets
MAX_HASHED = 2**28  # bytes; of a larger file, the size and the time of modification are compared
PYTHONPATH = "PYTHONPATH="  # sets the variable in a command
FILE = "file of "
INHERITED = "inherited variable "
MOST_NAMED = 6  # maximum number of differences in a message
# Inherited variables that change between shells or jobs, and are ignored: those of terminals,
# sessions, jobs and CI runs, and of temporary folders
TRANSIENT = re.compile(
    r"_|SHLVL|PWD|OLDPWD|PS\d|.*PROMPT.*|HOSTNAME|MAIL|HIST.*|LESS.*|LS_COLORS"
    r"|(TERM|TMUX|KITTY|VTE|KONSOLE|GNOME|ITERM|LC_TERMINAL|VSCODE|WT|ALACRITTY|ZELLIJ)(_.*)?"
    r"|(TERMINAL|GHOSTTY|WEZTERM)_.*|COLORTERM|COLORFGBG|INSIDE_EMACS"
    r"|COLUMNS|LINES|WINDOW(ID)?|STY|DISPLAY|WAYLAND_DISPLAY|XAUTHORITY"
    r"|(SSH|DBUS|GPG|SUDO|SYSTEMD)_.*|SESSION_MANAGER|DESKTOP_SESSION|GDMSESSION|KRB5CCNAME"
    r"|XDG_(SESSION|RUNTIME|SEAT|VTNR|CURRENT|DATA_DIRS|MENU|GREETER).*"
    r"|INVOCATION_ID|JOURNAL_STREAM|PYTEST_.*"
    r"|(SLURM|SRUN|PBS|PALS|LSB|FLUX|COBALT|OAR|SGE|TORCHELASTIC)_.*|JOB_ID|TASK_ID|MASTER_PORT"
    r"|(GITHUB|RUNNER|ACTIONS|CI|GITLAB|BUILD|BUILDKITE|JENKINS|HUDSON|KUBERNETES)_.*"
    r"|.*_SERVICE_(HOST|PORT).*|.*_PORT_\d+_(TCP|UDP).*"
    r"|TMP|TEMP|TEMPDIR|(.*_)?TMPDIR"
)


class Verdict(NamedTuple):
    """The flags of ab.py that affect verdicts, but not what is run."""

    margin: float
    ignore_key: list[str]
    allow_disturbed: bool
    is_like_with_like: bool  # A was compared with itself

    def design(self, runs: int, interleave: bool) -> Design:
        """Return how pairs of runs are compared. runs: number of pairs that a verdict requires."""
        return Design(self.margin, True, interleave, runs, self.allow_disturbed)

    def write(self, out: Path) -> None:
        """Write them to the folder of the call, where report.py reads them."""
        files.check_regular(out / VERDICT)
        (out / VERDICT).write_text(json.dumps(self._asdict()) + "\n")


def lines_of_files(name: str, text: str, variables: Mapping[str, str]) -> list[str]:
    """One line per file that a command names, with a hash of its content.

    name: the name of the command. text: the command, as written in a shell. variables: the
    environment variables that are set for it.
    """
    files = files_of(text, os.environ | variables)
    return [f"{FILE}{name}: {state_of(file)} {shown(label)}" for label, file in files.items()]


def lines_of_variables(environ: Mapping[str, str]) -> list[str]:
    """One line per inherited variable that may affect a command.

    Repeated entries of PATH are dropped; the order of its entries matters.
    """
    kept = {
        name: environ[name]
        for name in sorted(environ)
        if not TRANSIENT.fullmatch(name) and not environ[name].startswith(ADDRESS)
    }
    if "PATH" in kept:
        kept["PATH"] = os.pathsep.join(dict.fromkeys(kept["PATH"].split(os.pathsep)))
    texts = without_secrets(kept)
    return [
        f"{INHERITED}{name}={text if text.isprintable() else ascii(text)}"
        for name, text in texts.items()
    ]


def files_of(text: str, environ: Mapping[str, str]) -> dict[str, Path]:
    """The files that a command names, by the name that is used in messages.

    These are files among its arguments, programs on PATH, interpreters of scripts, and the local
    modules of Python scripts, of `-m MODULE` and of MODULE:FUNCTION. The command may begin with
    `env -C FOLDER PYTHONPATH=FOLDERS`, or be a script for a shell's -c.
    """
    words = list(split(text))
    before = ["", *words]
    folders = [word for last, word in zip(before, words, strict=False) if last in ("-C", "cd")]
    bases = [*filter(os.path.isdir, folders), ""]
    given = [word.removeprefix(PYTHONPATH) for word in words if word.startswith(PYTHONPATH)]
    entries = os.pathsep.join(given or [environ.get("PYTHONPATH", "")]).split(os.pathsep)
    python_path = [os.path.join(base, entry) for entry in filter(None, entries) for base in bases]
    files: dict[str, Path] = {}
    for last, word in zip(before, words, strict=False):
        _, _, value = word.partition("=")
        for candidate in filter(None, (word, value)):
            for label, path in paths_of(candidate, bases, environ.get("PATH")).items():
                files |= files_behind(label, path, python_path, environ.get("PATH"))
        module, colon, _ = word.partition(":")
        if last == "-m" or (colon and re.fullmatch(r"[A-Za-z_][\w.]*", module)):
            files |= modules([module if colon else word], [*bases, *python_path])
    return files


def split(text: str) -> Iterator[str]:
    """The words of a command, including those of a shell's -c '...'."""
    for word in shlex.split(text):
        yield word
        if any(letter.isspace() for letter in word):
            with contextlib.suppress(ValueError):  # an unmatched quote: it is not a command
                yield from shlex.split(word)


def paths_of(word: str, bases: Sequence[str], path: str | None) -> dict[str, Path]:
    """The regular files that a word names in these folders, or the program on PATH.

    The last folder, which is the working directory, counts only if no other folder has the file.
    """
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
    """A file, the interpreters in its first line, and the local modules of a Python script."""
    files = {label: path}
    words = shebang(path)
    for word in words:
        if interpreter := shutil.which(word, path=search):
            files[word] = Path(interpreter)
    if path.suffix == ".py" or any("python" in word for word in words):
        folder = path.resolve().parent
        entries = [str(folder), *python_path]
        imported = {} if is_installed(str(folder)) else python_program(path, entries)
        files |= {name: file for name, file in imported.items() if file != path}
        if folder.name == "benchmarks" and (folder.parent / "common").is_dir():  # a checkout
            root = folder.parent
            files |= {f"{root}/{name}": file for name, file in harness(root).items()}
    return files


def shebang(path: Path) -> list[str]:
    """The words after #! in the first line of a script; [] for any other file."""
    try:
        with path.open("rb") as file:
            first = file.readline(200)
    except OSError:
        return []
    return first[2:].decode(errors="replace").split() if first.startswith(b"#!") else []


def state_of(path: Path) -> str:
    """A text that changes with the content: a hash; for a very large file, size and time."""
    try:
        state = path.stat()
    except OSError:
        return "gone"
    if state.st_size > MAX_HASHED:
        return f"{state.st_size}@{state.st_mtime_ns}"
    return of_file(path) or "unreadable"


def is_code(path: Path) -> bool:
    """Whether a file is a program, as opposed to data that the command may write."""
    return path.suffix in (".py", ".sh") or os.access(path, os.X_OK) or bool(shebang(path))


def edited_programs(plan: Path, name: str, text: str, variables: Mapping[str, str]) -> list[str]:
    """The programs of a command that have changed since the plan was written."""
    before = states_of_files(read_lines(plan))
    files = files_of(text, os.environ | variables)
    return [
        label
        for label, file in files.items()
        if is_code(file) and before.get((name, shown(label)), "") not in ("", state_of(file))
    ]


def read_lines(plan: Path) -> list[str]:
    return plan.read_text(errors="surrogateescape").splitlines()


def split_lines(lines: Iterable[str]) -> list[str]:
    """The lines as `read_lines` returns them: a command may contain line breaks."""
    return "\n".join(lines).splitlines()


def states_of_files(lines: Iterable[str]) -> dict[tuple[str, str], str]:
    """The files of a plan: (name of the command, name of the file) -> state of the file."""
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


def why_different(before: Sequence[str], now: Sequence[str]) -> str:
    """How a call differs from the plan of its folder; "" if it is the same call.

    A file that is not in the plan is ignored, because a command may have created it.
    """
    had = [line for line in before if not line.startswith((FILE, INHERITED))]
    has = [line for line in now if not line.startswith((FILE, INHERITED))]
    lacking = [line for line in has if line not in had]
    if lacking:
        return f"its plan does not contain {'; '.join(lacking)}"
    if had != has:
        return "its plan has more commands"
    then, today = states_of_files(before), states_of_files(now)
    parts = [
        f"{file[1]} {'has changed' if file in today else 'no longer exists'}"
        for file, state in then.items()
        if today.get(file) != state
    ]
    old, new = variables_in(before), variables_in(now)
    for name in sorted(old | new):
        if old.get(name) != new.get(name):
            parts.append(f"{name} was {shown(old.get(name))}, is {shown(new.get(name))} now")
    return cut(list(dict.fromkeys(parts)), MOST_NAMED)
