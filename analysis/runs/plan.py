"""The plan of a call of ab.py: its commands, the files that they name, and inherited variables.

OUT/plan.txt stores the plan. A later call in the same folder continues only if its plan is the
same. What a command imports or calls is in the plan once reports have recorded it (`contents`), as
those of this project's scripts do; otherwise `unchecked` describes it. OUT/verdict.txt stores flags
that may differ between calls, as given in the last call.
"""

import contextlib
import hashlib
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
from harness.contents import differing
from harness.report import FAMILIES, masked, shown, without_secrets

PLAN, VERDICT = "plan.txt", "verdict.txt"  # files in OUT
MAX_HASHED = 2**28  # bytes; of a larger file, the size and the time of modification are compared
FILE = "file of "
CONTENTS = "contents of "  # modules that the reports of a command record
INHERITED = "inherited variable "
MOST_NAMED = 6  # maximum number of differences in a message
# Inherited variables that are not compared, because they differ between shells, sessions and jobs.
# These are whole names: a prefix may belong to a program of the user.
IGNORED = (
    *("_", "SHLVL", "PWD", "OLDPWD", "COLUMNS", "LINES", "HOSTNAME", "TMPDIR"),
    *("TERM", "TERM_PROGRAM", "TERM_PROGRAM_VERSION", "TERM_SESSION_ID", "COLORTERM", "WINDOWID"),
    *("TMUX", "TMUX_PANE", "STY", "WINDOW", "DISPLAY", "WAYLAND_DISPLAY", "XAUTHORITY"),
    *("SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY", "SSH_AUTH_SOCK", "XDG_SESSION_ID"),
    *("XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS", "INVOCATION_ID", "JOURNAL_STREAM"),
    *("KRB5CCNAME", "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_STEP_ID", "SLURM_STEPID"),
    *("SLURM_TASK_PID", "SLURM_JOB_START_TIME", "SLURM_JOB_END_TIME"),
)


class Verdict(NamedTuple):
    """The flags of ab.py that affect verdicts, but not what is run."""

    margin: float
    ignore_key: list[str]
    allow_disturbed: bool
    is_like_with_like: bool  # A was compared with itself
    unchecked: Sequence[str] = ()  # not a flag: what may have changed unnoticed; see `unchecked`

    def design(self, runs: int, interleave: bool) -> Design:
        """Return how pairs of runs are compared. runs: number of pairs that a verdict requires."""
        return Design(self.margin, True, interleave, runs, self.allow_disturbed)

    def write(self, out: Path) -> None:
        """Write them to the folder of the call, where report.py reads them."""
        files.check_regular(out / VERDICT)
        (out / VERDICT).write_text(json.dumps(self._asdict()) + "\n")


def lines_of_files(name: str, files: Mapping[str, Path]) -> list[str]:
    """Return one line per file of a command, with a hash of its content."""
    return [f"{FILE}{name}: {state_of(file)} {shown(label)}" for label, file in files.items()]


def lines_of_variables(environ: Mapping[str, str]) -> list[str]:
    """Return one line per inherited variable that is compared. Only those that can affect a
    measurement have their values: any other may be a secret, whatever its name.

    Repeated entries of PATH are dropped; the order of its entries matters.
    """
    kept = {name: environ[name] for name in sorted(environ) if name not in IGNORED}
    if "PATH" in kept:
        kept["PATH"] = os.pathsep.join(dict.fromkeys(kept["PATH"].split(os.pathsep)))
    shows = ("PATH", *FAMILIES)
    texts = without_secrets(kept)
    texts = {x: text if x.startswith(shows) else masked(text) for x, text in texts.items()}
    return [
        f"{INHERITED}{name}={text if text.isprintable() else ascii(text)}"
        for name, text in texts.items()
    ]


def files_of(text: str, environ: Mapping[str, str]) -> dict[str, Path]:
    """Return the files that a command names, by the name that is used in messages.

    These are its arguments and the values of its flags, programs on PATH, and the modules of
    `-m MODULE` and MODULE:FUNCTION. They are looked up in the working directory, and in every
    folder that the command names, such as that of `env -C FOLDER`, or that PYTHONPATH contains.
    """
    words = list(split(text))
    parts = [part for word in words for part in parts_of(word)]
    named = [entry for part in parts for entry in part.split(os.pathsep) if os.path.isdir(entry)]
    python_path = environ.get("PYTHONPATH", "").split(os.pathsep)
    bases = list(dict.fromkeys(["", *named, *python_path]))
    names = [name for part in parts for name in (part, os.path.join(part, "__main__.py"))]
    for last, word in zip(["", *words], [*words, ""], strict=True):
        module, _, _ = word.partition(":")
        if flag := re.fullmatch(r"-[A-Za-z]*m(.*)", last):  # -m MODULE, -um MODULE, -mMODULE
            module = flag[1] or word
        elif ":" not in word:
            continue
        if re.fullmatch(r"[A-Za-z_][\w.]*", module):
            path = module.replace(".", os.sep)
            names += [f"{path}.py", os.path.join(path, "__main__.py")]
            names += [str(folder / "__init__.py") for folder in [Path(path), *Path(path).parents]]
    files: dict[str, Path] = {}
    for name in names:
        found = [path for base in bases if os.path.isfile(path := os.path.join(base, name))]
        files |= {path: Path(path) for path in found}
        if not found and os.sep not in name:
            program = shutil.which(name, path=environ.get("PATH"))
            files |= {name: Path(program)} if program else {}
    return files


def split(text: str) -> Iterator[str]:
    """Yield the words of a command, including those of a shell's -c '...'."""
    for word in shlex.split(text):
        yield word
        if any(letter.isspace() for letter in word):
            with contextlib.suppress(ValueError):  # an unmatched quote: it is not a command
                yield from shlex.split(word)


def parts_of(word: str) -> list[str]:
    """Return the parts of a word that may be a path: x of `x`, `--flag=x`, `-fx` and `@x`."""
    _, _, value = word.partition("=")
    if word.startswith("-"):
        found = [value, "" if word.startswith("--") else word[2:]]
    else:
        found = [word, value, word[1:] if word.startswith("@") else ""]
    return list(filter(None, found))


def unchecked(text: str, environ: Mapping[str, str]) -> str:
    """Return what a command runs that its plan does not contain: `what run.sh calls`."""
    paths = [path for label, path in files_of(text, environ).items() if path == Path(label)]
    scripts = [path for path in paths if is_script(path) and path.name != "__init__.py"]
    names = [*dict.fromkeys(path.name if path.is_absolute() else str(path) for path in scripts)]
    if not names:
        return f"what `{' '.join(text.split())[:80]}` runs"
    return f"what {cut(names)} {'call or import' if len(names) > 1 else 'calls or imports'}"


def remarks_on(unchecked: Sequence[str]) -> list[str]:
    """Return a remark for the verdict; none if all that ran was checked."""
    return [f"not checked for changes: {'; '.join(unchecked)}"] if unchecked else []


def is_script(path: Path) -> bool:
    """Return whether a file is a script, by its suffix or its first two characters."""
    if path.suffix in (".py", ".sh"):
        return True
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(2) == b"#!"
    return False


def watched_files(words: Sequence[str]) -> dict[str, Path]:
    """Return the files of --watch, and all files below its folders, except hidden ones.

    Raises ValueError if there is no such file or folder.
    """
    files: dict[str, Path] = {}
    for word in words:
        path = Path(word)
        if not path.exists():
            raise ValueError(f"--watch: expected a file or a folder, but there is no {word}")
        found = sorted(path.rglob("*")) if path.is_dir() else [path]
        for each in found:
            inner = each.relative_to(path).parts
            if each.is_file() and not any(part.startswith((".", "__pycache__")) for part in inner):
                files[str(each)] = each
    return files


def state_of(path: Path) -> str:
    """Return a text that changes with the content: a hash; for a very large file, size and time."""
    try:
        state = path.stat()
    except OSError:
        return "gone"
    if state.st_size > MAX_HASHED:
        return f"{state.st_size}@{state.st_mtime_ns}"
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:12]
    except OSError:
        return "unreadable"


def is_code(path: Path) -> bool:
    """Return whether a file is a program, as opposed to data that the command may write."""
    return is_script(path) or os.access(path, os.X_OK)


def edited(plan: Path, name: str, files: Mapping[str, Path]) -> list[str]:
    """Return the files of a command that have changed since the plan was written."""
    before = states_of_files(read_lines(plan))
    return [
        label
        for label, file in files.items()
        if before.get((name, shown(label)), "") not in ("", state_of(file))
    ]


def record_contents(plan: Path, name: str, now: Mapping[str, str]) -> list[str]:
    """Return the modules of a report of a command that differ from those in the plan. If none does,
    add those that the plan lacks."""
    known = contents_in(plan, name)
    new = "".join(f"\n{CONTENTS}{name}: {now[x]} {x}" for x in now if x not in known)
    other = differing(known, now)
    if new and not other:
        with plan.open("a") as file:
            file.write(new)
    return other


def contents_in(plan: Path, name: str) -> dict[str, str]:
    """Return the hashes of the modules of a command, by name; {} without a plan."""
    start = f"{CONTENTS}{name}: "
    lines = read_lines(plan) if plan.exists() else []
    pairs = [line.removeprefix(start).partition(" ") for line in lines if line.startswith(start)]
    return {module: digest for digest, _, module in pairs}


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
    had = [line for line in before if not line.startswith((FILE, INHERITED, CONTENTS))]
    has = [line for line in now if not line.startswith((FILE, INHERITED))]
    lacking = [line for line in has if line not in had]
    if lacking:
        return f"its plan does not contain {'; '.join(lacking)}"
    if had != has:
        return "the earlier call had more commands"
    then, today = states_of_files(before), states_of_files(now)
    parts = [
        f"{file[1]} {'has changed' if file in today else 'no longer exists'}"
        for file, state in then.items()
        if today.get(file) != state
    ]
    old, new = variables_in(before), variables_in(now)
    for name in sorted(old | new):
        if old.get(name) != new.get(name):
            was, now_is = (shown(variables.get(name)) for variables in (old, new))
            is_hidden = was.startswith("(set") and now_is.startswith("(set")
            told = "has changed" if is_hidden else f"was {was}, is {now_is} now"
            parts.append(f"{name} {told}")
    return cut(list(dict.fromkeys(parts)), MOST_NAMED)
