"""Command lines: how a script reads its flags and says no. Needs the standard library only."""

import argparse
import atexit
import contextlib
import difflib
import functools
import json
import math
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NoReturn, TextIO

TURN = "TORCHRUN_BENCH_TURN"  # names the two pipes of ab.py --interleave: MINE:THE_OTHERS
TOKEN = b"."  # what goes round in them
VERSION = "0.1.0"  # of CHANGELOG.md
HANG = 3  # the exit status of a run that hung
NO_VERDICT = 4  # of one that cannot tell what it was asked
MOST = 1e9  # the largest number that a flag takes: more is a slip, and overflows somewhere
ROOT = Path(__file__).resolve().parents[1]  # the folder of all these scripts
GENERATOR = "torchrun-bench"  # of a page or a picture, in its metadata
AT_AN_END = 2**14  # bytes of a file in which GENERATOR is looked for
BEFORE = "torchrun's flags go before the script"
# flags that all scripts of PyTorch and older launchers have, and what replaces them
OF_LAUNCHERS = {
    **dict.fromkeys(("--nnodes", "--node-rank", "--nproc-per-node", "--standalone"), BEFORE),
    "--rank": "torchrun sets RANK; by hand set RANK and WORLD_SIZE",
    "--local-rank": "torchrun sets LOCAL_RANK; start the script with torchrun",
    "--master-addr": f"{BEFORE}; by hand set MASTER_ADDR",
    "--master-port": f"{BEFORE}; by hand set MASTER_PORT",
    "--world-size": "the launcher sets it, e.g. torchrun --nproc-per-node 8",
    "--filestore": "the ranks meet in the store of torchrun",
}
OUTPUTS = ("--json", "--plot", "--exclude-file")  # flags that name a file which rank 0 writes
LONGEST_LINE, LONGEST_VALUE = 2000, 200  # characters of a message, and of a value in it
LAUNCHERS = (  # a variable of each launcher that gives all ranks one command line
    *("TORCHELASTIC_RUN_ID", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"),
    *("PMIX_RANK", "PALS_RANKID", "FLUX_TASK_RANK", "MV2_COMM_WORLD_RANK", "JSM_NAMESPACE_RANK"),
)
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def refuse(message: str, status: int = 2, speaks: bool | None = None) -> NoReturn:
    """End the run because of a user's mistake: one line on stderr from rank 0, exit status 2.

    speaks: whether this process prints the line; by default rank 0 does.
    """
    line = f"{Path(sys.argv[0]).name}: error: {shortened(' '.join(message.split()), LONGEST_LINE)}"
    tell_torchrun(line)
    if is_rank_0() if speaks is None else speaks:
        complain(line)
    else:
        # If this rank ended first, the launcher would kill rank 0 before it spoke: there is no
        # store yet to wait in. The launcher ends this rank as soon as rank 0 has spoken.
        time.sleep(10)
        if not any(name in os.environ for name in LAUNCHERS):  # by hand: each rank has its command
            complain(line)
    sys.exit(status)


def shortened(text: str, most: int) -> str:
    """The text; of more than `most` characters the first ones, their number, and the last ones."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]} ... ({len(text):,} characters) ... {text[-most // 4 :]}"


def is_rank_0() -> bool:
    """Whether this process speaks for the job. One whose RANK is no number speaks, too."""
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    return not rank.isdigit() or int(rank) == 0


def tell_torchrun(reason: str, error_file: str | None = None) -> None:
    """Let torchrun print why this rank ends with a status other than 0. Its traceback follows what
    the ranks have printed, and the reason stands below it.

    error_file: of another rank. The format is that of torch.distributed.elastic's error handler.
    """
    error_file = error_file or os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        message = {"message": reason, "extraInfo": {"timestamp": str(int(time.time()))}}
        try:
            Path(error_file).write_text(json.dumps({"message": message}))
        except OSError:  # torchrun itself would fail at half a file
            with contextlib.suppress(OSError):
                Path(error_file).unlink()


def name_missing_package(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """sys.excepthook: a package of requirements.txt that is not installed is one line."""
    script = Path(sys.argv[0]).resolve()
    path = (ROOT / "analysis" if script.parent.name == "analysis" else ROOT) / "requirements.txt"
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        if re.search(rf"^{re.escape(package)}\b", path.read_text(), re.MULTILINE):
            refuse(f"{package} is not installed; try pip install -r {shlex.quote(str(path))}")
    sys.__excepthook__(kind, error, trace)


def complain(line: str) -> None:
    """Print a line on stderr, if stderr still takes it."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        abandon(sys.stderr)


def abandon(stream: TextIO) -> None:
    """Let /dev/null take the place of stdout or stderr after an error on it. Python flushes both
    when it ends, and if that failed again, the exit status would be 120."""
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), stream.fileno())


def fill_streams() -> None:
    """Where stdin, stdout or stderr is closed (`>&-`), keep other files from taking its number.

    Writing to it then fails as it does on a full disk.
    """
    while (number := os.open(os.devnull, os.O_RDONLY)) <= 2:
        pass
    os.close(number)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


def take_stdout() -> IO[bytes]:
    """stdout, for a report alone. What is printed from now on goes to stderr."""
    stream = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return stream


def end(status: int, reason: str, say: bool = True) -> NoReturn:
    """End this process at once, from any thread, whatever the main thread does. say: print why."""
    tell_torchrun(reason)
    write(reason if say else "")
    os._exit(status)


def leave(status: int) -> None:
    """End this process at its exit, when all else has been done, without freeing what it holds.

    To take torch's thousands of modules apart, Python needs a second of a core, and 10 s where
    other programs take the cores too. torchrun waits for that.
    """
    if hasattr(sys, "last_type"):  # an exception ends the process; it has been printed
        return
    atexit.unregister(leave)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)


def write(text: str) -> None:
    """Write to stderr in one call, so that the lines of several ranks do not mix."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode() if text else b"")


OUT_OF_MEMORY = re.compile(  # torch 2.11 to 2.15: 500 characters, with advice and a link
    r"CUDA out of memory\. Tried to allocate (\S+ \w+)[^.]*\. (GPU \d+) has a total capacity of "
    r"(\S+ \w+) of which (\S+ \w+) is free\.(?:.*?(\S+ \w+) allowed;)?.*?(?='\)|$)",
    re.MULTILINE,
)


def short_of_memory(match: re.Match[str]) -> str:
    """A match of OUT_OF_MEMORY in few words. The limit that a process may have been given, and
    reaches while the GPU still has free memory, is a part of it."""
    wanted, gpu, capacity, free, allowed = match.groups()
    limit = f"; {allowed} allowed" if allowed else ""
    return f"{gpu} has {free} of {capacity} free, {wanted} needed{limit}"


def describe(error: BaseException) -> str:
    """An error in one line."""
    text = OUT_OF_MEMORY.sub(short_of_memory, str(error))
    lines = text.strip().splitlines() or ["no message"]
    if "On WorkerInfo(" in lines[0] and len(lines) > 1:  # RPC adds this line
        return lines[1]
    text = f"{type(error).__name__}: {lines[0].strip()}"
    # NCCL's own reason stands below, in a line after "Last error:" or after "NCCL Last Error: "
    reason = re.search(r"\bLast error:\s+(\S.*)", str(error), re.IGNORECASE)
    return f"{text}: {reason[1].strip()}" if reason else text


def suggest(word: str, known: Iterable[str]) -> str:
    """`; did you mean a, b?` for the names in `known` that look like `word`; "" if none does."""
    near = difflib.get_close_matches(word, list(known), n=3)
    return f"; did you mean {', '.join(near)}?" if near else ""


@functools.cache
def version(folder: Path = ROOT) -> str:
    """The version of the scripts in a folder as git names it; `unknown` where git cannot say.

    `-dirty` at its end means that a file differs from that commit.
    """
    commit = ask_git(folder, "describe", "--always").strip()
    # `describe --dirty` would lock the index, and leave the lock if it is killed
    changed = ask_git(folder, "status", "--porcelain", "--untracked-files=no")
    return (f"{commit}-dirty" if changed else commit) or "unknown"


def ask_git(folder: Path, *words: str) -> str:
    """What git says about the checkout that a folder is in; "" where it cannot say."""
    # without git's variables: GIT_DIR, as in a hook, names another repository
    variables = {name: os.environ[name] for name in os.environ if not name.startswith("GIT_")}
    # without the optional locks: another program may be using the checkout
    command = ["git", "--no-optional-locks", "-C", str(folder), *words]
    try:
        told = subprocess.run(command, capture_output=True, timeout=5, env=variables)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return os.fsdecode(told.stdout)


class ShowVersion(argparse.Action):
    """--version: rank 0 prints the version, and the script ends."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        if is_rank_0():
            print(f"torchrun-bench {VERSION}, commit {version()}")
        parser.exit()


@dataclass(frozen=True)
class By:
    """A default of a flag that depends on the device. `parse_args` settles it after --device."""

    cuda: Any
    cpu: Any

    def __str__(self) -> str:
        """As the help shows it."""
        words = [",".join(map(str, x)) if isinstance(x, list) else x for x in (self.cuda, self.cpu)]
        return f"{words[0]} on CUDA, {words[1]} on the CPU"


def on_cuda(device: str) -> bool:
    """Whether a script with this --device runs on CUDA."""
    torch: Any = sys.modules["torch"]  # measuring scripts import it; analysis/ runs without it
    return device != "cpu" and bool(torch.cuda.is_available())


class Parser(argparse.ArgumentParser):
    """Takes --batch_size for --batch-size, no abbreviations; an error is one line for the job."""

    def __init__(self, doc: str | None, gone: Mapping[str, str] | None = None) -> None:
        """gone: flags of the program that this one replaces, and what to use instead; both go into
        the line that refuses such a flag."""
        fill_streams()
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(description=doc, formatter_class=raw, allow_abbrev=False)
        self.gone = OF_LAUNCHERS | dict(gone or {})
        self.measures = False  # it has the flags of the scripts that measure
        text = "print the version of these scripts and exit"
        self.add_argument("--version", action=ShowVersion, nargs=0, help=text)

    def print_help(self, file: Any = None) -> None:
        """Rank 0 prints the help of a job."""
        if is_rank_0():
            super().print_help(file)

    def error(self, message: str) -> NoReturn:
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
            tell_torchrun(message)
            sys.exit(2)  # torchrun has started the ranks again, and the first ones have spoken
        refuse(message)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> argparse.Namespace:
        words = [with_hyphens(word) for word in (sys.argv[1:] if args is None else args)]
        flags = [flag for action in self._actions for flag in action.option_strings]
        for name in (word.partition("=")[0] for word in words):
            if name in self.gone and name not in flags:
                self.error(f"unknown argument '{name}': {self.gone[name]}")
        parsed, unknown = self.parse_known_args(words, namespace)
        if unknown:
            name = unknown[0].partition("=")[0]
            self.error(f"unknown argument '{name}'{suggest(name, flags)}")
        for name, value in vars(parsed).items():
            if isinstance(value, By):
                setattr(parsed, name, value.cuda if on_cuda(parsed.device) else value.cpu)
        if self.measures and args is None:  # the command line of this process
            for flag in () if parsed.dry_run else OUTPUTS:
                name = flag.removeprefix("--").replace("-", "_")
                check_output(flag, getattr(parsed, name, None))
            begin_output(sys.stderr if parsed.json == "-" else sys.stdout)
        return parsed


def first_lines() -> str:
    """The script's name and version, and the command."""
    name = Path(sys.argv[0]).stem
    return f"# torchrun-bench {name}, version {version()}\n# command: {shlex.join(sys.argv)}"


def begin_output(stream: TextIO) -> None:
    """Print the first lines, on rank 0, before slow imports and before the ranks meet."""
    # where the terminal is ASCII, another letter is shown as \xe9 and is no error
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    if is_rank_0():
        with contextlib.suppress(OSError):  # Benchmark.print meets the error again, and says so
            print(first_lines(), file=stream, flush=True)


def with_hyphens(word: str) -> str:
    """--batch_size=a_b -> --batch-size=a_b."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word


def list_of(item: Callable[[str], Any], choices: Sequence[Any] | None = None) -> Any:
    """The type of a flag for `a,b,c`; `all` stands for every choice. A repeated entry counts once.

    item: the type of one entry, such as str or `size`. choices: the values that are allowed.
    """

    def parse(text: str) -> list[Any]:
        if text == "all" and choices:
            return list(choices)
        values: list[Any] = []
        for word in text.split(","):
            value = item(word.strip())
            if choices and value not in choices:
                names = ", ".join(map(str, choices))
                near = suggest(str(value), map(str, choices))
                wrong(f"some of {names}", repr(word), near.removeprefix("; "))
            if value not in values:
                values.append(value)
        return values

    return parse


def checked(
    convert: Callable[[str], Any], valid: Callable[[Any], bool], expected: str, example: str = ""
) -> Any:
    """The type of a flag: what `convert` makes of its text, if that is `valid`.

    expected, example: words for the message that refuses any other text.
    """

    def parse(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if valid(value := convert(text)):
                return value
        wrong(expected, repr(text), example)

    return parse


def number(kind: type[int] | type[float], minimum: float = 0, above: bool = False) -> Any:
    """The type of a flag for a number of at least `minimum`, or `above` it, and at most MOST."""
    noun = "a whole number" if kind is int else "a number"
    limit = f"above {minimum:g}" if above else f"of at least {minimum:g}"
    lowest = math.nextafter(minimum, math.inf) if above else minimum
    return checked(kind, lambda x: lowest <= x <= MOST, f"{noun} {limit}", f"at most {MOST:,.0f}")


def to_bytes(text: str) -> int:
    """8, 64K, 4M or 1G in powers of 1024; -1 if it is not a whole number of bytes."""
    unit = UNITS.get(text[-1:].upper(), 1)
    value = float(text[:-1] if unit > 1 else text) * unit
    return int(value) if value.is_integer() else -1


def to_fraction(text: str) -> float:
    """`5%` or 0.05 -> 0.05."""
    return float(text[:-1]) / 100 if text.endswith("%") else float(text)


positive_int = number(int, 1)
positive_float = number(float, 0, above=True)
size = checked(to_bytes, lambda n: n >= 0, "a size in bytes", "e.g. 8, 64K, 4M or 1G")
positive_size = checked(to_bytes, lambda n: n > 0, "a size above 0", "e.g. 8, 64K, 4M or 1G")
fraction = checked(to_fraction, lambda x: 0 < x < 1, "a share between 0 and 1", "e.g. 5% or 0.05")


def cut(words: Sequence[object], most: int = 8) -> str:
    """`0, 1, 2`; for a long list the first entries and the number of the others."""
    shown = ", ".join(map(str, words[:most]))
    return shown if len(words) <= most else f"{shown} and {len(words) - most:,} more"


def show_size(count: float) -> str:
    """4194304 -> `4M`, as `size` reads it."""
    for unit, factor in reversed(UNITS.items()):
        if count >= factor:
            return f"{count / factor:.4g}{unit}"
    return f"{count:g}"


def age_s() -> float:
    """Seconds since this process started. A change of the wall clock does not affect it."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(fields[19])  # the 22nd entry, starttime, in clock ticks since the boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def duration(seconds: float) -> str:
    """`0.4 s`, `45 s`, `3 min`, `2 h 05 min`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02} min"


def wrong(expected: str, got: str, example: str = "") -> NoReturn:
    """Refuse the value of a flag, from within its type."""
    message = f"expected {expected}, got {shortened(got, LONGEST_VALUE)}"
    raise argparse.ArgumentTypeError(f"{message}; {example}" if example else message)


def add_common_flags(
    parser: Parser,
    min_iters: int = 20,
    max_seconds: float = 5,
    timeout: float = 300,
    backends: str = "gloo, nccl, ucc or mpi",
) -> None:
    """Add the flags of all measuring scripts. -w, -J, --output-file and -T are as in nccl-tests."""
    parser.measures = True
    add = parser.add_argument_group("flags of all scripts").add_argument
    devices = "what to run on (default: auto, CUDA where torch sees it)"
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help=devices)
    backends = f"{backends} (default: nccl on CUDA, gloo on the CPU)"
    names = ("--distributed-backend", "--backend")
    add(*names, dest="backend", type=str.lower, metavar="NAME", help=backends)
    warm = "warm up each step with N untimed iterations, at least 1 (default: 5 or more, until its "
    warm += "times are steady, within a quarter of --max-seconds)"
    add("-w", "--warmup-iters", type=number(int, 0), metavar="N", help=warm)
    exactly = "time exactly N iterations; overrides the three limits below"
    add("--iters", type=positive_int, metavar="N", help=exactly)
    least = f"time at least N iterations within --max-seconds (default: {min_iters})"
    add("--min-iters", type=positive_int, default=min_iters, metavar="N", help=least)
    target = "end a case when the 95%% interval of the step's median is within +-P (default: 2%%)"
    add("--target-ci", type=fraction, default=0.02, metavar="P", help=target)
    most = "end a case after S seconds, or 1.25 S while an interval is missing, but not before 6 "
    most += f"rounds (default: {max_seconds:g})"
    add("--max-seconds", type=positive_float, default=max_seconds, metavar="S", help=most)
    add("--wide", action="store_true", help="print all columns of each table in a terminal, too")
    add("--dry-run", action="store_true", help="list the cases and exit")
    report = """append each finished case to this report; an existing one is moved to PATH.bak,
        .bak.1, ...; - writes it to stdout, and everything else to stderr"""
    add("-J", "--json", "--output-file", metavar="PATH", help=report)
    add("--resume", action="store_true", help="skip the cases that the report already has")
    traces = "then profile 5 more iterations of each step; write traces into DIR, or without DIR "
    traces += "into traces/ (docs/profile.md)"
    folder = checked(str, bool, "a folder", "e.g. traces")
    add("--profile", type=folder, nargs="?", const="traces", metavar="DIR", help=traces)
    ranks = "ranks that write traces, e.g. 0,1 (default: the first of each node, and the slowest)"
    rank_list = list_of(number(int, 0))
    add("--profile-ranks", type=lambda text: {*rank_list(text)}, metavar="RANK", help=ranks)
    hang = f"end the run after S seconds without progress; name who hangs (default: {timeout:g})"
    add("-T", "--timeout", type=positive_float, default=timeout, metavar="S", help=hang)


def check_output(flag: str, path: str | None) -> None:
    """Refuse the path of an output file that rank 0 could not write, before the ranks meet: its
    folder is missing or read-only, or it is a folder itself.

    The ranks of another node than rank 0's check nothing, since they may lack the folder.
    """
    world_size = os.environ.get("WORLD_SIZE", "1")
    is_on_one_node = os.environ.get("LOCAL_WORLD_SIZE", world_size) == world_size
    if path in (None, "", "-") or not (is_rank_0() or is_on_one_node):
        return
    if os.path.isdir(path):
        refuse(f"{flag}: expected the path of a file, got the folder {path}; e.g. {path}/1.jsonl")
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        refuse(f"{flag} {path}: the folder {folder} is missing; try mkdir -p {shlex.quote(folder)}")
    if not os.path.exists(path) and not os.access(folder, os.W_OK):
        refuse(f"{flag} {path}: the folder {folder} is read-only for this user; give another path")


def refuse_foreign(path: str) -> None:
    """Raise ValueError if a page or picture would replace a file that these programs have not
    written. Theirs have GENERATOR near the beginning or the end."""
    if not os.path.isfile(path):  # nothing is there, or a device
        return
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        ends = bytearray()
        for start in (0, max(0, size - AT_AN_END)):
            file.seek(start)
            ends += file.read(AT_AN_END)
    if size and GENERATOR.encode() not in ends:
        raise ValueError(f"{path} is there already, and is no output of {GENERATOR}; give another")
