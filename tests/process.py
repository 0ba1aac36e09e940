"""Start commands in tests: torchrun like a user, or with torch already imported."""

import contextlib
import json
import os
import pty
import random
import re
import select
import shutil
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest

from harness.report import Report, load

ROOT = Path(__file__).resolve().parents[1]
INJECT = str(ROOT / "tests" / "inject.py")
# Torch's own line at a graceful shutdown of RPC on a busy machine: the caller has its answer and
# closes before the callee has noticed that the answer was sent. Both ends are done.
RPC_CLOSED = re.compile(r".*RPC agent for \w+ encountered error when sending response .*\n")
# variables that take effect before torch is imported; see tests/cudalab/README.md
OF_THE_STAND_IN = ("CUDALAB", "CUDALAB_COVER", "PATH", "PYTHONPATH")


@dataclass
class Run:
    """The result of a command: exit status, output, and the path of its report."""

    status: int
    out: str
    err: str
    path: Path

    @property
    def report(self) -> Report:
        return load(str(self.path))

    @property
    def checks(self) -> dict[str, str]:
        """The checks of all cases, by name."""
        return {case.name: case.check for case in self.report.cases}

    @property
    def reason(self) -> str:
        """The reason that torchrun prints last, of the rank that it regards as the root cause."""
        return self.err.rpartition("traceback : ")[2].rstrip("=\n")


class Process:
    """Commands that run concurrently. `stop` ends them and all processes that they started."""

    def __init__(self, commands: list[list[str]], folder: Path, envs: list[dict[str, str]]) -> None:
        """folder: for stdout in out0, out1, ... and stderr in err0, ...; envs: variables of each
        command."""
        self.folder = folder
        self.parts: list[psutil.Process] = []
        for i, (command, env) in enumerate(zip(commands, envs, strict=True)):
            with (folder / f"out{i}").open("wb") as out, (folder / f"err{i}").open("wb") as err:
                options: dict[str, Any] = {"env": env, "start_new_session": True}
                self.parts.append(psutil.Popen(command, stdout=out, stderr=err, **options))

    @property
    def out(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("out*")))

    @property
    def err(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("err*")))

    def tree(self) -> list[psutil.Process]:
        """All living processes of the commands, the commands first."""
        found = []
        for part in self.parts:
            with contextlib.suppress(psutil.NoSuchProcess):
                found += [part, *part.children(recursive=True)]
        return [p for p in found if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    def ranks(self) -> dict[int, psutil.Process]:
        """The rank processes by RANK. tests/warm.py stores it in the process name."""
        found: dict[int, psutil.Process] = {}
        for process in self.tree():
            with contextlib.suppress(psutil.Error):
                _, _, named = process.name().partition("rank ")
                if rank := process.environ().get("RANK", named):
                    found.setdefault(int(rank), process)
        return found

    def until(self, what: Callable[[], Any], seconds: float = 500) -> Any:
        """Wait until `what` returns a true value and return it; otherwise the test fails, at the
        latest 100 s after the commands have ended."""
        start = time.monotonic()
        end = start + seconds
        while time.monotonic() < end:
            if found := what():
                return found
            time.sleep(0.1)
            if not self.tree():
                end = min(end, time.monotonic() + 100)
        self.fail(time.monotonic() - start)

    def fail(self, seconds: float) -> Any:
        pytest.fail(f"waited {seconds:.0f} s in vain; stdout:\n{self.out}\nstderr:\n{self.err}")

    def wait(self, seconds: float = 500) -> int:
        """Wait for all commands. Returns the exit status of the first that failed, else 0."""
        end = time.monotonic() + seconds
        try:
            statuses = [part.wait(max(0.1, end - time.monotonic())) for part in self.parts]
        except psutil.TimeoutExpired:
            self.fail(seconds)
        return next((status for status in statuses if status), 0)

    def stop(self) -> None:
        for process in reversed(self.tree()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.wait()


class Warm(Process):
    """Commands started by tests/warm.py, so that processes need not import torch."""

    servers: ClassVar[dict[str, Any]] = {}  # by the build of cudalab that they have loaded, if any
    status: int | None = None
    copying: threading.Thread | None = None  # copies the output of the terminal

    def __init__(
        self,
        commands: list[list[str]],
        folder: Path,
        envs: list[dict[str, str]],
        columns: int | None = None,
        terminal: str = "out",
    ) -> None:
        """columns: stdout (terminal: "out") or stderr ("err") of the commands is a terminal of this
        width, which is copied to out0 or err0."""
        self.folder, self.parts = folder, []
        name = envs[0].get("CUDALAB", "")
        stand_in = {k: v for k, v in envs[0].items() if name and k in OF_THE_STAND_IN}
        if name not in Warm.servers:
            Warm.servers[name] = subprocess.Popen(
                [sys.executable, str(ROOT / "tests" / "warm.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                env=environment(**stand_in),
                start_new_session=True,
            )
        self.server = Warm.servers[name]
        files = [[str(folder / f"{name}{i}") for name in ("out", "err")] for i in range(len(envs))]
        if columns:
            name = self.open_terminal(columns, folder / f"{terminal}0")
            files = [[name, err] if terminal == "out" else [out, name] for out, err in files]
        request = {"commands": commands, "environments": envs, "files": files}
        self.server.stdin.write(json.dumps(request | {"folder": os.getcwd()}).encode() + b"\n")
        for pid in self.answer(300):  # the first request waits for the import of torch
            with contextlib.suppress(psutil.NoSuchProcess):  # has already ended
                self.parts.append(psutil.Process(pid))

    def open_terminal(self, columns: int, to: Path) -> str:
        """Open a terminal and return its path. `wait` closes it; its output is copied to a file."""
        ours, self.terminal = pty.openpty()
        termios.tcsetwinsize(ours, (50, columns))

        def copy() -> None:
            with to.open("wb") as out, contextlib.suppress(OSError):
                while text := os.read(ours, 4096):  # OSError: the terminal is closed
                    out.write(text)
            os.close(ours)

        self.copying = threading.Thread(target=copy, daemon=True)
        self.copying.start()
        return os.ttyname(self.terminal)

    def answer(self, seconds: float) -> list[int]:
        if not select.select([self.server.stdout], [], [], seconds)[0]:
            self.fail(seconds)
        return [int(word) for word in self.server.stdout.readline().split()]

    def wait(self, seconds: float = 500) -> int:
        if self.status is None:
            (self.status,) = self.answer(seconds)
            if self.copying:
                os.close(self.terminal)
                self.copying.join(seconds)
        return self.status


Start = Callable[..., Process]  # of the fixtures in conftest.py
Bench = Callable[..., Run]


def environment(**extra: str) -> dict[str, str]:
    """Variables of this process without those of launchers and the terminal size. Ranks have one
    thread, also for compiling."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC", "SLURM_", "GROUP_")
    foreign = (*launcher, "COLUMNS", "LINES")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    lean = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    lean["TORCHINDUCTOR_VEC_ISA_OK"] = "1"  # skips a program that tests the processor
    return kept | lean | extra


def python(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program and wait for it. Its status may be any."""
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 500}
    return subprocess.run([sys.executable, *words], env=environment(**variables), **options)


def copy_of_scripts(folder: Path, *without: str) -> Path:
    """Copy benchmarks/ and what it imports, but not files of these names. Returns the folder."""
    ignored = shutil.ignore_patterns("__pycache__", *without)
    for name in ("benchmarks", "common", "harness", "readers"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    return folder


def free_port() -> int:
    """A port below those that the kernel assigns, so that it stays free until the ranks start."""
    while True:
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", random.randrange(10_000, 30_000)))
            return int(probe.getsockname()[1])


def command_of(
    script: str, *flags: str, ranks: int = 2, nodes: int = 1, inject: str | None = None
) -> list[list[str]]:
    """The torchrun commands for a script: one for each node, all on this host.

    ranks: per node; 0 means plain python. inject: faults of tests/inject.py.
    """
    path = script if os.path.isabs(script) else str(ROOT / script)
    words = [*([INJECT, inject] if inject else []), path, *flags]
    if ranks == 0:
        return [[sys.executable, *words]]
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    if nodes == 1:
        return [[*torchrun, "--standalone", *words]]
    meet = [f"--nnodes={nodes}", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    return [[*torchrun, *meet, f"--node-rank={node}", *words] for node in range(nodes)]
