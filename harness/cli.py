"""Command lines: the parser, types of flags, the flags of all scripts, and texts for messages.
Requires only the standard library.
"""

import argparse
import contextlib
import difflib
import functools
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO

from common.errors import cut as cut  # used by messages of all programs
from harness import exits, files
from harness.exits import ROOT, is_on_one_node, is_rank_0, refuse, reserve_streams

TURN = "TORCHRUN_BENCH_TURN"  # set by ab.py --interleave to two named pipes, THIS_COMMAND:OTHER
TOKEN = b"."  # sent through these pipes to pass the turn on
VERSION = "0.1.0"  # as in CHANGELOG.md
MAX_NUMBER = 1e9  # upper limit of numbers in flags: larger ones are typos, and overflow somewhere
# Flags that launchers accept, or that scripts accepted before torchrun existed
LAUNCHER_FLAGS = dict.fromkeys(
    (
        *("--nnodes", "--node-rank", "--nproc-per-node", "--standalone", "--rank", "--local-rank"),
        *("--master-addr", "--master-port", "--world-size", "--filestore"),
    ),
    "torchrun provides it; put torchrun's own flags, such as --nproc-per-node 8, before the script",
)
OUTPUTS = ("--json", "--plot", "--exclude-file")  # flags that name a file written by rank 0
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def suggest(word: str, known: Iterable[str]) -> str:
    """`; did you mean a, b?` with the names in `known` that resemble `word`; "" without any."""
    near = difflib.get_close_matches(word, list(known), n=3)
    return f"; did you mean {', '.join(near)}?" if near else ""


@functools.cache
def version(folder: Path = ROOT) -> str:
    """Return the commit of a checkout, with `-dirty` if files differ; `unknown` without git. An
    archive contains that of the checkout from which it was built."""
    with contextlib.suppress(OSError):
        return exits.read_text(exits.STAMP)
    # without git's own variables: in a hook, GIT_DIR names another repository
    variables = {name: os.environ[name] for name in os.environ if not name.startswith("GIT_")}
    # without locks, which could disturb other programs; `describe --dirty` would take one anyway
    git = ["git", "--no-optional-locks", "-C", str(folder)]
    run = functools.partial(subprocess.run, capture_output=True, timeout=5, env=variables)
    try:
        commit = os.fsdecode(run([*git, "describe", "--always"]).stdout).strip()
        changed = run([*git, "status", "--porcelain", "--untracked-files=no"]).stdout
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return (f"{commit}-dirty" if changed else commit) or "unknown"


class ShowVersion(argparse.Action):
    """--version: print the version on rank 0 and exit."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        if is_rank_0():
            print(f"torchrun-bench {VERSION}, commit {version()}")
        parser.exit()


@dataclass(frozen=True)
class PerDevice:
    """A default that depends on the device. `Parser.parse_args` replaces it with its value."""

    cuda: Any
    cpu: Any

    def __str__(self) -> str:
        words = [",".join(map(str, x)) if isinstance(x, list) else x for x in (self.cuda, self.cpu)]
        return f"{words[0]} on CUDA, {words[1]} on the CPU"


def on_cuda(device: str) -> bool:
    """Return whether a script runs on CUDA. device: the value of --device."""
    torch: Any = sys.modules["torch"]  # imported by measuring scripts, but not by analysis/
    return device != "cpu" and bool(torch.cuda.is_available())


class Parser(argparse.ArgumentParser):
    """An argparse parser that accepts --batch_size for --batch-size, does not accept abbreviations,
    and prints an error as one line per job."""

    def __init__(self, doc: str | None, gone: Mapping[str, str] | None = None) -> None:
        """gone: flags of the program that the script replaces -> what to use instead."""
        reserve_streams()
        raw = argparse.RawDescriptionHelpFormatter
        prog = shlex.join(exits.words_of(os.path.basename(sys.argv[0])))
        doc = exits.as_started(doc or "")
        super().__init__(prog, description=doc, formatter_class=raw, allow_abbrev=False)
        self.gone = LAUNCHER_FLAGS | dict(gone or {})
        self.measures = False  # True once add_common_flags has been called
        self.add_argument("--version", action=ShowVersion, nargs=0, help="print the version")

    def print_help(self, file: Any = None) -> None:
        if is_rank_0():
            super().print_help(file)

    def error(self, message: str) -> NoReturn:
        refuse(message)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> argparse.Namespace:
        """Parse the command line. An invalid one ends the process with one line and status 2."""
        given = sys.argv[1:] if args is None else args
        words = [re.sub("^--[^=]*", lambda flag: flag[0].replace("_", "-"), word) for word in given]
        flags = [flag for action in self._actions for flag in action.option_strings]
        for name in (word.partition("=")[0] for word in words if word.startswith("-")):
            if name in self.gone and name not in flags:
                self.error(f"unknown argument '{name}': {self.gone[name]}")
        parsed, unknown = self.parse_known_args(words, namespace)
        if unknown:
            name = unknown[0].partition("=")[0]
            hint = f": {self.gone[name]}" if name in self.gone else suggest(name, flags)
            self.error(f"unknown argument '{name}'{hint}")
        for name, value in vars(parsed).items():
            if isinstance(value, PerDevice):
                setattr(parsed, name, value.cuda if on_cuda(parsed.device) else value.cpu)
        if self.measures and args is None:  # the command line of this process
            for flag in () if parsed.dry_run else OUTPUTS:
                name = flag.removeprefix("--").replace("-", "_")
                check_output(flag, getattr(parsed, name, None))
            begin_output(sys.stderr if parsed.json == "-" else sys.stdout)
        return parsed


def first_lines() -> str:
    """Return the first lines of the output: the script, its version and the command."""
    name = Path(sys.argv[0]).stem
    command = shlex.join([*exits.words_of(sys.argv[0]), *sys.argv[1:]])
    return f"# torchrun-bench {name}, version {version()}\n# command: {command}"


def begin_output(stream: TextIO) -> None:
    """Print the first lines on rank 0, before slow imports and before the ranks meet."""
    # on an ASCII terminal, other characters are printed as \xe9 instead of raising an error
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    if is_rank_0():
        with contextlib.suppress(OSError):  # Benchmark.print encounters and reports the error again
            print(first_lines(), file=stream, flush=True)


def list_of(item: Callable[[str], Any], choices: Sequence[Any] | None = None) -> Any:
    """Type of a flag with a comma-separated list. `all` means every choice; duplicates are dropped.
    item: type of an entry, such as str or `size`. choices: the allowed values; None for any."""

    def parse(text: str) -> list[Any]:
        if text == "all" and choices:
            return list(choices)
        values: list[Any] = []
        for word in text.split(","):
            value = item(word.strip())
            if choices and value not in choices:
                names = ", ".join(map(str, choices))
                near = suggest(str(value), map(str, choices))
                raise_invalid(f"one or more of {names}", repr(word), near.removeprefix("; "))
            if value not in values:
                values.append(value)
        return values

    return parse


def checked(
    convert: Callable[[str], Any], valid: Callable[[Any], bool], expected: str, example: str = ""
) -> Any:
    """Type of a flag whose text is converted, and refused if the value is not valid."""

    def parse(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if valid(value := convert(text)):
                return value
        raise_invalid(expected, repr(text), example)

    return parse


def number(kind: type[int] | type[float], minimum: float = 0, above: bool = False) -> Any:
    """Type of a flag with a number from `minimum` (exclusive if `above`) to MAX_NUMBER."""
    noun = "a whole number" if kind is int else "a number"
    limit = f"above {minimum:g}" if above else f"of at least {minimum:g}"
    lowest = math.nextafter(minimum, math.inf) if above else minimum
    most = f"at most {MAX_NUMBER:,.0f}"
    return checked(kind, lambda x: lowest <= x <= MAX_NUMBER, f"{noun} {limit}", most)


def to_bytes(text: str) -> int:
    """Parse a size such as 8, 64K, 4M or 1G, in powers of 1024. -1 for a fraction of a byte."""
    unit = UNITS.get(text[-1:].upper(), 1)
    value = float(text[:-1] if unit > 1 else text) * unit
    return int(value) if value.is_integer() else -1


def to_fraction(text: str) -> float:
    """Parse a fraction: `5%` or 0.05 -> 0.05."""
    return float(text[:-1]) / 100 if text.endswith("%") else float(text)


positive_int = number(int, 1)
positive_float = number(float, 0, above=True)
size = checked(to_bytes, lambda n: n >= 0, "a size in bytes", "e.g. 8, 64K, 4M or 1G")
positive_size = checked(to_bytes, lambda n: n > 0, "a size above 0", "e.g. 8, 64K, 4M or 1G")
fraction = checked(to_fraction, lambda x: 0 < x < 1, "a fraction between 0 and 1", "e.g. 5%, 0.05")


def show_size(count: float) -> str:
    """Format a size, the inverse of `size`: 4194304 -> `4M`."""
    for unit, factor in reversed(UNITS.items()):
        if count >= factor:
            return f"{count / factor:.4g}{unit}"
    return f"{count:g}"


def duration(seconds: float) -> str:
    """Format a duration: `0.4 s`, `45 s`, `3 min`, `2 h 05 min`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02} min"


def raise_invalid(expected: str, got: str, example: str = "") -> NoReturn:
    """Raise the error for an invalid value, from within the type of a flag."""
    message = f"expected {expected}, got {got}"
    raise argparse.ArgumentTypeError(f"{message}; {example}" if example else message)


def add_common_flags(
    parser: Parser,
    min_iters: int = 20,
    max_seconds: float = 5,
    timeout: float = 300,
    backends: str = "gloo, nccl, ucc, mpi",
) -> None:
    """Add the flags of all measuring scripts. -w, -J, --output-file and -T are those of nccl-tests.
    backends: those that the help of --backend lists first."""
    parser.measures = True
    add = parser.add_argument_group("flags of all scripts").add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: CUDA if available")
    add(
        *("--distributed-backend", "--backend"),
        dest="backend",
        type=str.lower,
        metavar="NAME",
        help=f"{backends}; with newer versions of torch also nccl-legacy, nccl2, nccl-lazy "
        "(default: nccl on CUDA, gloo on the CPU)",
    )
    add(
        *("-w", "--warmup-iters"),
        type=number(int, 0),
        metavar="N",
        help="untimed iterations of each step (default: at least 5, until its times are steady)",
    )
    add("--iters", type=positive_int, metavar="N", help="time N iterations; overrides limits below")
    add(
        "--min-iters",
        type=positive_int,
        default=min_iters,
        metavar="N",
        help=f"time at least N iterations within --max-seconds (default: {min_iters})",
    )
    add(
        "--target-ci",
        type=fraction,
        default=0.02,
        metavar="P",
        help="end a case when the 95%% interval of its median is within +-P (default: 2%%)",
    )
    add(
        "--max-seconds",
        type=positive_float,
        default=max_seconds,
        metavar="S",
        help=f"time budget of a case, exceeded for a missing interval (default: {max_seconds:g})",
    )
    add("--wide", action="store_true", help="print all tables and columns, also on a terminal")
    add("--dry-run", action="store_true", help="list the cases and exit")
    add(
        *("-J", "--json", "--output-file"),
        type=fill_in_variables,
        metavar="PATH",
        help="append each finished case to this report; an existing report is moved to PATH.bak, "
        "PATH.bak.1, ...; variables in braces are replaced, as in r-{SLURM_ARRAY_TASK_ID}.jsonl; "
        "if PATH is -, write the report to stdout and everything else to stderr",
    )
    add("--resume", action="store_true", help="skip the cases that have passed in the report")
    add(
        "--profile",
        type=checked(str, bool, "a folder", "e.g. traces"),
        nargs="?",
        const="traces",
        metavar="DIR",
        help="after the timing, write traces of 5 more iterations to DIR, or traces/ without DIR",
    )
    add(
        "--profile-ranks",
        type=list_of(number(int, 0)),
        metavar="RANK",
        help="ranks that write traces, e.g. 0,1 (default: the first of each node and the slowest)",
    )
    add(
        *("-T", "--timeout"),
        type=positive_float,
        default=timeout,
        metavar="S",
        help=f"after S seconds without progress, name the hanging ranks (default: {timeout:g})",
    )


def fill_in_variables(path: str) -> str:
    """Type of --json: replace `{NAME}` by the environment variable NAME. It may be unset on ranks
    other than 0, which do not write the file."""

    def value_of(match: re.Match[str]) -> str:
        value = os.environ.get(match[1])
        if value is None and is_rank_0():
            raise_invalid(f"a set variable in {match[0]}, but {match[1]} is not set", repr(path))
        return match[0] if value is None else value

    return re.sub(r"\{(\w+)\}", value_of, path)


def check_output(flag: str, path: str | None) -> None:
    """Refuse an output file that rank 0 cannot write, before the ranks meet. Ranks of other nodes
    check nothing, because the folder need not exist there."""
    if path in (None, "", "-") or not (is_rank_0() or is_on_one_node()):
        return
    if kind := files.kind_of(path):
        refuse(f"{flag} {path}: expected a regular file, got {kind}; e.g. report.jsonl")
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        refuse(f"{flag} {path}: no folder {folder}; try mkdir -p {shlex.quote(folder)}")
    if not os.path.exists(path) and not os.access(folder, os.W_OK):
        refuse(f"{flag} {path}: no permission to write to the folder {folder}; give another path")
