"""Start torchrun with torch already imported: reads requests, prints PIDs and exit statuses.

Importing torch in the agent and in every rank takes longer than most tests. This process imports it
once and forks each command of a request; torchrun's --start-method then forks the ranks. Tests with
`cold=True` start commands as a user does.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.launcher import api as launcher

USED = (  # by the scripts; a missing module is reported by the script that needs it
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.rpc",
    "torch.distributed.tensor.parallel",
    "torchvision.models",
)


def run_script(script: str, *flags: str) -> None:
    """Like `python script flags`, but an exit status of 0 is a return, as the agent expects."""
    sys.argv = [script, *flags]
    sys.path[0] = str(Path(script).parent)
    if "RANK" in os.environ:  # /proc shows only the environment at the start of this file
        Path("/proc/self/comm").write_text(f"rank {os.environ['RANK']}")
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    finally:
        if exits := sys.modules.get("harness.exits"):
            atexit.unregister(exits.fast_exit)  # the agent waits for this function to return
        atexit._run_exitfuncs()  # children of multiprocessing skip them
        if sys.stdout:
            sys.stdout.flush()


def status_of(work: Callable[[], None]) -> int:
    """The exit status that python would have."""
    try:
        work()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def start(number: int, request: dict[str, Any]) -> int:
    """Run the number-th command of a request in a new session. Returns its PID."""
    if pid := os.fork():
        return pid
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environments"][number])
    tempfile.tempdir = None  # TMPDIR is that of the request
    for place, name in enumerate((os.devnull, *request["files"][number])):
        # NOCTTY: a closed terminal must not send SIGHUP to this session
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOCTTY), place)
    _, *words = request["commands"][number]
    work = partial(run_script, *words)
    if words[:2] == ["-m", "torch.distributed.run"]:
        work = partial(torchrun.main, ["--run-path", "--start-method=fork", *words[2:]])
    os._exit(status_of(work))


def without_gpus(function: Callable[..., None]) -> Callable[..., None]:
    """The function, during which torch sees no accelerator."""

    def call(*args: Any) -> None:
        real, torch.accelerator.is_available = torch.accelerator.is_available, lambda: False
        function(*args)
        torch.accelerator.is_available = real

    return call


def main() -> None:
    for name in USED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # torch's own function ends with SystemExit, and the agent would wait for its result
    torchrun.run_script_path = run_script  # type: ignore[assignment]
    # the agent would count GPUs, after which CUDA cannot be used in forked processes
    config: Any = launcher.LaunchConfig
    config.__post_init__ = without_gpus(config.__post_init__)
    api.logger.exception = api.logger.error  # type: ignore[method-assign]  # like for a subprocess
    # so that collections in the scripts need not visit imported objects
    gc.freeze()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        request = json.loads(line)
        pids = [start(number, request) for number in range(len(request["commands"]))]
        print(*pids, file=answers)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(next((status for status in statuses if status), 0), file=answers)
    gc.unfreeze()  # otherwise nanobind reports leaks


if __name__ == "__main__":
    main()
