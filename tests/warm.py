"""Starts torchrun with torch imported already: a request in, an exit status out, a line each.

Importing torch takes longer than what most tests measure, in the agent and in every rank. This
process does it once and forks: an agent for each request and, by torchrun's own --start-method,
its ranks. So the tests of a script can be many; those marked `oldest`, those of test_faults.py,
and those that change the environment, start it as a user does.
"""

import atexit
import contextlib
import importlib
import json
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import api

USED = (  # by the scripts; what a torch lacks is left to the script that asks for it
    "psutil",
    "tabulate",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.rpc",
    "torch.distributed.tensor.parallel",
    "torchvision.models",
    "tqdm",
)


def run_script(script: str, *flags: str) -> None:
    """As `python script flags`; an exit status of 0 is a return, as the agent wants it."""
    sys.argv = [script, *flags]
    sys.path[0] = str(Path(script).parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    finally:
        atexit._run_exitfuncs()  # multiprocessing's children leave them out
        sys.stdout.flush()


def status_of(work: Callable[[], None]) -> int:
    """The exit status that python would leave with."""
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


def child(request: dict[str, Any]) -> None:
    """The agent, in a session of its own; without ranks the script itself."""
    os.setsid()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for number, name in enumerate((os.devnull, request["out"], request["err"])):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND), number)
    words, ranks = request["words"], request["ranks"]
    flags = ["--standalone", f"--nproc-per-node={ranks}", "--run-path", "--start-method=fork"]

    def work() -> None:
        if ranks == 0:
            run_script(*words)
        else:
            torchrun.main([*flags, *words])

    os._exit(status_of(work))


def main() -> None:
    for name in USED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # torch's own leaves by SystemExit, and the agent would wait for its answer
    torchrun.run_script_path = run_script  # type: ignore[assignment]
    api.logger.exception = api.logger.error  # type: ignore[method-assign]  # as of a subprocess
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        if (pid := os.fork()) == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            child(json.loads(line))
        print(pid, file=answers)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), file=answers)


if __name__ == "__main__":
    main()
