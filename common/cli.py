"""Command lines: how a script reads its flags and says no. Needs the standard library only."""

import argparse
import contextlib
import difflib
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

HANG = 3  # exit status
MOST = 1e9  # of seconds and counts: more is a slip, and overflows somewhere
MOST_CASES = 10_000  # of a run, by its lists of values
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def refuse(message: str, status: int = 2) -> NoReturn:
    """End the run for a user's mistake: one line on stderr from rank 0, exit status 2."""
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) != "0":
        time.sleep(10)  # if this one ended first, the launcher would kill rank 0 before it spoke
    else:
        line = " ".join(message.split())
        complain(f"{Path(sys.argv[0]).name}: error: {line}")
    sys.exit(status)


def complain(line: str) -> None:
    """On stderr, where there is one."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        abandon(sys.stderr)


def abandon(stream: TextIO) -> None:
    """After an error on stdout or stderr /dev/null takes its place: when Python ends it flushes
    both, and if that failed again, the exit status would be 120."""
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), stream.fileno())


def fill_streams() -> None:
    """Where stdin, stdout or stderr is closed (`>&-`), keep other files from taking its number.

    To write there fails as it does on a full disk.
    """
    while (number := os.open(os.devnull, os.O_RDONLY)) <= 2:
        pass
    os.close(number)
    sys.stdout, sys.stderr = sys.stdout or os.fdopen(1, "w"), sys.stderr or os.fdopen(2, "w")


def end(status: int, text: str = "") -> NoReturn:
    """Leave at once, from any thread, whatever the main one does."""
    write(text)
    os._exit(status)


def write(text: str) -> None:
    """On stderr, in one call: the ranks' lines do not mix."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode() if text else b"")


def describe(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines() or ["no message"]
    if "On WorkerInfo(" in lines[0] and len(lines) > 1:  # what RPC adds
        return lines[1]
    return f"{type(error).__name__}: {lines[0]}"


def suggest(word: str, known: Iterable[str]) -> str:
    """`; did you mean a, b?` for the names in `known` that look like `word`, else nothing."""
    near = difflib.get_close_matches(word, list(known), n=3)
    return f"; did you mean {', '.join(near)}?" if near else ""


class Parser(argparse.ArgumentParser):
    """Takes --batch_size for --batch-size, no abbreviations; an error is one line for the job."""

    def __init__(self, doc: str | None) -> None:
        fill_streams()
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(description=doc, formatter_class=raw, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
            sys.exit(2)  # torchrun has started the ranks again, and the first ones have said it
        refuse(message)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> argparse.Namespace:
        words = []
        for word in sys.argv[1:] if args is None else args:
            name, equals, value = word.partition("=")
            words.append(name.replace("_", "-") + equals + value if name[:2] == "--" else word)
        parsed, unknown = self.parse_known_args(words, namespace)
        if unknown:
            flags = [flag for action in self._actions for flag in action.option_strings]
            name = unknown[0].partition("=")[0]
            self.error(f"unknown argument '{name}'{suggest(name, flags)}")
        single = [getattr(parsed, a.dest, None) for a in self._actions if a.nargs is None]
        cases = math.prod(len(values) for values in single if isinstance(values, list) and values)
        if cases > MOST_CASES:
            self.error(f"expected lists for at most {MOST_CASES:,} cases, got {cases:,} cases")
        return parsed


def list_of(item: Callable[[str], Any], choices: Sequence[Any] | None = None) -> Any:
    """`a,b,c`, each once; `all` stands for every choice."""

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
    """The type of a flag: what `convert` makes of its text, where that is `valid`."""

    def parse(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if valid(value := convert(text)):
                return value
        wrong(expected, repr(text), example)

    return parse


def number(kind: type[int] | type[float], minimum: float = 0, above: bool = False) -> Any:
    """A finite number from `minimum` on, or `above` it; at most MOST."""
    noun = "a whole number" if kind is int else "a number"
    limit = f"above {minimum:g}" if above else f"of at least {minimum:g}"
    low = math.nextafter(minimum, math.inf) if above else minimum
    from_low = checked(kind, lambda value: low <= value < math.inf, f"{noun} {limit}")

    def parse(text: str) -> Any:
        if (value := from_low(text)) > MOST:
            wrong(f"{noun} of at most {MOST:,.0f}", repr(text))
        return value

    return parse


def to_bytes(text: str) -> int:
    """8, 64K, 4M or 1G, in powers of 1024; -1 for a part of a byte."""
    unit = UNITS.get(text[-1:].upper(), 1)
    value = float(text[:-1] if unit > 1 else text) * unit
    return int(value) if value.is_integer() else -1


def to_share(text: str) -> float:
    """`5%` or 0.05."""
    return float(text[:-1]) / 100 if text.endswith("%") else float(text)


positive_int = number(int, 1)
positive_float = number(float, 0, above=True)
size = checked(to_bytes, lambda n: n >= 0, "a size in bytes", "e.g. 8, 64K, 4M or 1G")
positive_size = checked(to_bytes, lambda n: n > 0, "a size above 0", "e.g. 8, 64K, 4M or 1G")
fraction = checked(to_share, lambda x: 0 < x < 1, "a share between 0 and 1", "e.g. 5% or 0.05")


def cut(words: Sequence[object], most: int = 8) -> str:
    """`0, 1, 2`; of a long list the first ones and the number of the others."""
    shown = ", ".join(map(str, words[:most]))
    return shown if len(words) <= most else f"{shown} and {len(words) - most:,} more"


def show_size(count: float) -> str:
    """4194304 -> `4M`, as `size` reads it."""
    for unit, factor in reversed(UNITS.items()):
        if count >= factor:
            return f"{count / factor:.4g}{unit}"
    return f"{count:g}"


def wrong(expected: str, got: str, example: str = "") -> NoReturn:
    raise argparse.ArgumentTypeError(
        f"expected {expected}, got {got}" + (f"; {example}" if example else "")
    )


def add_common_flags(
    parser: argparse.ArgumentParser,
    min_iters: int = 20,
    max_seconds: float = 5,
    timeout: float = 300,
    backends: str = "gloo, nccl, ucc or mpi",
) -> None:
    """Those of all measuring scripts. -w, -J, --output-file and -T are nccl-tests' names."""
    add = parser.add_argument_group("flags of all scripts").add_argument
    devices = "CUDA and CPUs are measured today (default: auto)"
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help=devices)
    backend = f"{backends} (default: nccl on CUDA, gloo on the CPU)"
    names = ("--distributed-backend", "--backend")
    name = checked(str.lower, bool, "the name of a backend", "e.g. gloo")  # as torch takes it
    add(*names, dest="backend", type=name, metavar="NAME", help=backend)
    warm = "untimed iterations of each step (default: 5, fewer if they take --max-seconds / 4)"
    add("-w", "--warmup-iters", type=number(int, 0), metavar="N", help=warm)
    exactly = "time exactly N iterations, whatever the next three say"
    add("--iters", type=positive_int, metavar="N", help=exactly)
    least = f"time at least N, as far as --max-seconds lets (default: {min_iters})"
    add("--min-iters", type=positive_int, default=min_iters, metavar="N", help=least)
    target = "stop once all of the 95%% interval of the step's median is within +-P (default: 2%%)"
    add("--target-ci", type=fraction, default=0.02, metavar="P", help=target)
    most = f"or after S seconds of a case, 2 S if it lacks an interval (default: {max_seconds:g})"
    add("--max-seconds", type=positive_float, default=max_seconds, metavar="S", help=most)
    report = "append every finished case to this report; an older one becomes PATH.bak, .bak.1, ..."
    add("-J", "--json", "--output-file", metavar="PATH", help=report)
    add("--resume", action="store_true", help="skip the cases that the report holds already")
    hang = f"after S seconds without progress name who hangs, and end (default: {timeout:g})"
    add("-T", "--timeout", type=positive_float, default=timeout, metavar="S", help=hang)
