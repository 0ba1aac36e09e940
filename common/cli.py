"""Command line: the flags that all scripts share, and how they say no.

This module needs nothing beyond the standard library, so that `--help` answers at once.
"""

import argparse
import ctypes
import difflib
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from common import job

USAGE_ERROR = 2
TIMEOUT_S = 300.0  # --timeout
PR_SET_PDEATHSIG = 1  # of Linux
BACKENDS = ("gloo", "nccl", "ucc", "mpi")


def refuse(message: str, speaks: bool | None = None, known_to_all: bool = False) -> NoReturn:
    """End the program because of a user's mistake: one line on stderr, exit status 2.

    Rank 0 speaks, or who `speaks`. The other ranks wait for the launcher to end them: one that
    exited first would have torchrun kill rank 0 before it has said why. Where nobody ends them
    rank 0 had no reason to, and they speak themselves, unless it is `known_to_all`.
    """
    rank = os.environ.get("RANK", "0")
    speaks = job.speaks(os.environ) if speaks is None else speaks
    if not speaks:
        time.sleep(10)
    if speaks or not known_to_all:
        where = "" if rank == "0" else f"[rank {rank}] "
        line = " ".join(message.split())
        print(f"{where}{Path(sys.argv[0]).name}: error: {line}", file=sys.stderr, flush=True)
    sys.exit(USAGE_ERROR)


def suggest(word: str, known: Iterable[str]) -> str:
    """`; did you mean a, b?` for the names in `known` that look like `word`, else nothing."""
    near = difflib.get_close_matches(word, list(known), n=3)
    return f"; did you mean {', '.join(near)}?" if near else ""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, from rank 0 only, and name near flags.

    `--batch_size` is accepted for `--batch-size`; abbreviations are not, because a later flag
    would change what they mean.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(
            allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs
        )

    def error(self, message: str) -> NoReturn:
        refuse(message)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> argparse.Namespace:
        words = [_hyphenated(word) for word in (sys.argv[1:] if args is None else args)]
        # Until the report is open there is nothing to save: Ctrl-C ends at once, no traceback.
        if args is None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            end_with_torchrun()
        parsed, unknown = self.parse_known_args(words, namespace)
        if unknown:
            flags = [flag for action in self._actions for flag in action.option_strings]
            name = unknown[0].split("=")[0]
            self.error(f"unknown argument '{name}'{suggest(name, flags)}")
        result: argparse.Namespace = parsed
        return result


def end_with_torchrun() -> None:
    """Have the kernel send SIGTERM when torchrun's agent, which started this process, has died.

    The ranks of a killed agent would go on as orphans, and hold the devices. Linux sends it when
    the thread ends that started this one; the agent's main thread does (torch 2.15). Without
    torchrun this does nothing: a shell may end before what it has started.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died meanwhile
        os.kill(os.getpid(), signal.SIGTERM)


def _hyphenated(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word


def positive_int(text: str) -> int:
    """argparse type: a whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got '{text}'")
    return value


def whole_number(text: str) -> int:
    """argparse type: a whole number, 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number, 0 or more, got '{text}'")
    return int(text)


def positive_float(text: str) -> float:
    """argparse type: a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got '{text}'")
    return value


def percentage(text: str) -> float:
    """argparse type: `2%`, or the same as a share of one, `0.02`."""
    try:
        value = positive_float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except argparse.ArgumentTypeError:
        value = 1.0
    if value >= 1:
        raise argparse.ArgumentTypeError(
            f"expected more than 0 and less than 100%, e.g. 2%, got '{text}'"
        )
    return value


def as_type(read: Callable[[str], Any]) -> Any:
    """argparse type: what `read` makes of the text; its ValueError is the message."""

    def parse(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def list_of(item: Callable[[str], Any], choices: Sequence[str] | None = None) -> Any:
    """argparse type: `a,b,c`, each item read by `item`, named in `choices`, and given once."""

    def parse(text: str) -> list[Any]:
        words = [word.strip() for word in text.split(",")]
        for word in words:
            if not word:
                raise argparse.ArgumentTypeError(f"expected a list like a,b,c, got '{text}'")
            if choices is not None and word not in choices:
                hint = suggest(word, choices) or f"; choose from {', '.join(choices)}"
                raise argparse.ArgumentTypeError(f"unknown '{word}'{hint}")
        values = [item(word) for word in words]
        if len(set(values)) < len(values):
            raise argparse.ArgumentTypeError(f"expected each item once, got '{text}'")
        return values

    return parse


def names(choices: Sequence[str], aliases: dict[str, str] | None = None) -> Any:
    """argparse type: a list of `choices`, or `all` of them; aliases: other names for some."""

    def parse(text: str) -> list[str]:
        given = [word.strip() for word in text.lower().split(",")]
        words = [(aliases or {}).get(word, word) for word in given]
        values: list[str] = list_of(str, choices)(",".join(words if words != ["all"] else choices))
        return values

    return parse


def add_measurement_flags(
    parser: argparse.ArgumentParser,
    min_iters: int = 20,
    max_seconds: float = 5.0,
    other_names: dict[str, str] | None = None,
    warmup_iters: int = 5,
) -> None:
    """Add the flags that say how long a case is measured, and on which device.

    other_names: what users of the original program call one of them, as {"--iters": "--epochs"}.
    """
    also = {flag: [name] for flag, name in (other_names or {}).items()}
    group = parser.add_argument_group("measurement")
    group.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto takes CUDA where there is one (default: auto)",
    )
    group.add_argument(
        "--warmup-iters",
        *also.get("--warmup-iters", []),
        type=positive_int,
        default=warmup_iters,
        metavar="N",
        help=f"untimed iterations before a case (default: {warmup_iters})",
    )
    group.add_argument(
        "--iters",
        *also.get("--iters", []),
        type=positive_int,
        metavar="N",
        help="time exactly N iterations a case, instead of the stop rule below",
    )
    group.add_argument(
        "--min-iters",
        type=positive_int,
        metavar="N",
        help=f"time at least N iterations a case (default: {min_iters})",
    )
    group.add_argument(
        "--target-ci",
        type=percentage,
        metavar="P",
        help="stop once the 95 %% interval of the median is within +-P (default: 2%%)",
    )
    group.add_argument(
        "--max-seconds",
        type=positive_float,
        metavar="S",
        help=f"or once S seconds are spent on a case (default: {max_seconds:g})",
    )
    parser.set_defaults(measurement_defaults=(min_iters, max_seconds))


def check_measurement_flags(args: argparse.Namespace) -> None:
    """Fill in the stop rule's defaults; refuse a flag that `--iters` leaves without effect."""
    flags = {
        "--min-iters": args.min_iters,
        "--target-ci": args.target_ci,
        "--max-seconds": args.max_seconds,
    }
    given = [flag for flag, value in flags.items() if value is not None]
    if args.iters is not None and given:
        refuse(f"{given[0]} has no effect with --iters, which fixes the count; give one of them")
    min_iters, max_seconds = args.measurement_defaults
    args.min_iters = args.min_iters or min_iters
    args.target_ci = args.target_ci or 0.02
    args.max_seconds = args.max_seconds or max_seconds


def set_of(names: Sequence[str]) -> Any:
    """argparse type: `auto`, or `a,b` of the names; each once."""
    parse_names = list_of(str, ("auto", *names))

    def parse(text: str) -> list[str]:
        words: list[str] = parse_names(text)
        if "auto" in words and len(words) > 1:
            raise argparse.ArgumentTypeError(f"expected auto or names without it, got '{text}'")
        return words

    return parse


TRANSPORTS = ("shm", "uv", "ibv")
CHANNELS = ("basic", "cma", "mpt_uv", "cuda_basic", "cuda_ipc", "cuda_gdr", "cuda_xth")


def rpc_threads(text: str) -> int:
    """argparse type: worker threads of one process. Thousands would starve the whole host."""
    value = positive_int(text)
    if value > 1024:
        raise argparse.ArgumentTypeError(f"expected at most 1024 threads, got '{text}'")
    return value


def add_rpc_flags(parser: argparse.ArgumentParser) -> None:
    """Add TensorPipe's settings."""
    group = parser.add_argument_group("RPC")
    group.add_argument(
        "--rpc-threads",
        type=rpc_threads,
        metavar="N",
        help="worker threads a process (default: its share of the cores, 2 to 16)",
    )
    group.add_argument(
        "--rpc-timeout",
        type=positive_float,
        metavar="S",
        help="a call fails after S seconds (default: twice --timeout)",
    )
    group.add_argument(
        "--rpc-transports",
        type=set_of(TRANSPORTS),
        metavar="NAME",
        help=f"let TensorPipe choose among these of {', '.join(TRANSPORTS)}; or auto, all of them "
        "(default: auto, but uv where there are more ranks than cores)",
    )
    group.add_argument(
        "--rpc-channels",
        type=set_of(CHANNELS),
        metavar="NAME",
        help=f"and among these of {', '.join(CHANNELS)}; or auto (default: auto)",
    )


def add_report_flags(
    parser: argparse.ArgumentParser,
    json: Sequence[str] = ("--json",),
    timeout: Sequence[str] = ("--timeout",),
) -> None:
    """Add the flags for the report, resuming, and hangs. json, timeout: how these are spelled."""
    group = parser.add_argument_group("report")
    group.add_argument(
        *json, dest="json", metavar="PATH", help="write the report here after every case"
    )
    group.add_argument(
        "--resume", action="store_true", help="skip the cases that the report already holds"
    )
    group.add_argument(
        *timeout,
        dest="timeout",
        type=positive_float,
        default=TIMEOUT_S,
        metavar="S",
        help="after S seconds without progress name who hangs, and end (default: 300)",
    )


def check_report_path(args: argparse.Namespace) -> None:
    """Refuse an empty path, and resuming without one."""
    if args.json == "":
        refuse("--json needs a path, got ''; e.g. --json report.json")
    if args.resume and not args.json:
        refuse("--resume needs the report to resume; add --json PATH")
