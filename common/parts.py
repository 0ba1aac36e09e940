"""A run in several parts, each in a process of its own, one after the other.

For benchmarks that start RPC more than once: torch keeps one RRef context for the life of a
process, with the agent of the first start, so that remote references break after a second one
(torch/csrc/distributed/rpc/rref_context.cpp, RRefContext::getInstance; seen with 2.15). The parts
share the report, which each resumes.
"""

import argparse
import ctypes
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from common import cli

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


@dataclass(frozen=True)
class Part:
    """Which part of a run this process is."""

    number: int = 0
    last: bool = True


WHOLE = Part()  # a run in one process


def run_parts(runs: Sequence[Callable[[Part], int]], args: argparse.Namespace) -> int:
    """Fork a child for each run, and wait for it; returns the exit status of them all.

    To be called before this process has started a thread, used a device or joined a group. Signals
    go to the child; it dies with this process. A run that ends with more than 1 (a failed case)
    is the last one.
    """
    status = 0
    cli.check_report_path(args)
    with tempfile.TemporaryDirectory() as folder:
        args.temporary_report = not args.json
        args.json = args.json or str(Path(folder) / "report.json")
        for i, run in enumerate(runs):
            of_this = _in_child(lambda run=run, i=i: run(Part(i, i == len(runs) - 1)))  # type: ignore[misc]
            status = max(status, of_this)
            if of_this > 1:
                break
    return status


def _in_child(work: Callable[[], int]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    # one that comes between the fork and the handlers waits for the handlers
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        ctypes.CDLL(None).prctl(cli.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        _work_and_exit(work)

    def forward(number: int, frame: FrameType | None) -> None:
        os.kill(pid, number)

    before: dict[Any, Any] = {
        number: signal.signal(number, forward)
        for number in FORWARDED
        if signal.getsignal(number) != signal.SIG_IGN
    }
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    _, status = os.waitpid(pid, 0)
    for number, handler in before.items():
        signal.signal(number, handler)
    return os.waitstatus_to_exitcode(status) % 256 if os.WIFEXITED(status) else 128 + status % 128


def _work_and_exit(work: Callable[[], int]) -> NoReturn:
    status = 1
    try:
        status = work()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException as error:
        get_error_handler().record_exception(error)
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
