"""Commands that tests start: torchrun as a user types it, or with torch imported already."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from common.report import Report, load

ROOT = Path(__file__).resolve().parents[1]
INJECT = str(ROOT / "tests" / "inject.py")


@dataclass
class Run:
    """What a command left: exit status, output, and its report if it wrote one."""

    status: int
    out: str
    err: str
    path: Path

    @property
    def report(self) -> Report:
        return load(str(self.path))

    @property
    def reason(self) -> str:
        """What torchrun has printed last: why the rank failed that it takes for the root cause."""
        return self.err.rpartition("traceback : ")[2].rstrip("=\n")


class Process:
    """A command that runs; `stop` ends it and all that it started."""

    def __init__(self, commands: list[list[str]], folder: Path, env: dict[str, str]) -> None:
        self.folder = folder
        self.files = [
            ((folder / f"out{i}").open("wb"), (folder / f"err{i}").open("wb"))
            for i in range(len(commands))
        ]
        self.parts = [
            psutil.Popen(command, stdout=out, stderr=err, env=env, start_new_session=True)
            for command, (out, err) in zip(commands, self.files, strict=True)
        ]

    @property
    def out(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("out*")))

    @property
    def err(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("err*")))

    def tree(self) -> list[psutil.Process]:
        """All processes of the command that are alive, itself first."""
        found = []
        for part in self.parts:
            try:
                found += [part, *part.children(recursive=True)]
            except psutil.NoSuchProcess:
                continue
        return [p for p in found if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    def ranks(self) -> dict[int, psutil.Process]:
        """The rank processes, by RANK."""
        found: dict[int, psutil.Process] = {}
        for process in self.tree():
            try:
                variables, name = process.environ(), process.name()
            except psutil.Error:
                continue
            named = name[5:] if name.startswith("rank ") else None  # by tests/warm.py
            if rank := variables.get("RANK", named):
                found.setdefault(int(rank), process)
        return found

    def until(self, what: Callable[[], Any], seconds: float = 60) -> Any:
        """Wait until `what` returns something true; fails the test where that does not come."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if found := what():
                return found
            time.sleep(0.1)
        pytest.fail(f"waited {seconds} s in vain; stdout:\n{self.out}\nstderr:\n{self.err}")

    def wait(self, seconds: float) -> int:
        """The exit status: of the first command that failed, else 0."""
        end = time.monotonic() + seconds
        try:
            statuses = [part.wait(max(0.1, end - time.monotonic())) for part in self.parts]
        except psutil.TimeoutExpired:
            pytest.fail(f"no end after {seconds} s; stdout:\n{self.out}\nstderr:\n{self.err}")
        return next((status for status in statuses if status), 0)

    def stop(self) -> None:
        for process in reversed(self.tree()):
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        for part in self.parts:
            part.wait(10)
        for files in self.files:
            for file in files:
                file.close()


class Warm(Process):
    """Commands that tests/warm.py starts, which spares every process the import of torch."""

    server: subprocess.Popen[bytes] | None = None

    def __init__(self, commands: list[list[str]], folder: Path, env: dict[str, str]) -> None:
        self.folder, self.files, self.over = folder, [], False
        if Warm.server is None:
            Warm.server = subprocess.Popen(
                [sys.executable, str(ROOT / "tests" / "warm.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                env=environment(),
                start_new_session=True,
            )
        request = {"commands": commands, "environment": env, "folder": os.getcwd()}
        request["files"] = [
            [str(folder / f"{name}{i}") for name in ("out", "err")] for i in range(len(commands))
        ]
        assert Warm.server.stdin is not None
        Warm.server.stdin.write(json.dumps(request).encode() + b"\n")
        self.parts = []
        for pid in self.answer(60):
            with contextlib.suppress(psutil.NoSuchProcess):  # over already
                self.parts.append(psutil.Process(pid))

    def answer(self, seconds: float) -> list[int]:
        assert Warm.server is not None
        assert Warm.server.stdout is not None
        if not select.select([Warm.server.stdout], [], [], max(0, seconds))[0]:
            pytest.fail(f"no end after {seconds} s; stdout:\n{self.out}\nstderr:\n{self.err}")
        return [int(word) for word in Warm.server.stdout.readline().split()]

    def wait(self, seconds: float) -> int:
        (status,) = self.answer(seconds)
        self.over = True
        return status

    def stop(self) -> None:
        super().stop()
        if not self.over:
            self.answer(10)


def environment(**extra: str) -> dict[str, str]:
    """This process's variables without a launcher's; one thread a rank, also to compile."""
    foreign = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC", "SLURM_", "GROUP_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    lean = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    lean["TORCHINDUCTOR_VEC_ISA_OK"] = "1"  # without a program that tries what the processor can
    return kept | lean | {"PYTHONUNBUFFERED": "1"} | extra


def command_of(
    script: str, *flags: str, ranks: int = 2, nodes: int = 1, inject: str | None = None
) -> list[list[str]]:
    """The torchrun commands that start a script: one for each node, all on this host.

    ranks: of a node; 0 is plain python. inject: a fault of tests/inject.py.
    """
    path = script if os.path.isabs(script) else str(ROOT / script)
    words = [*([INJECT, inject] if inject else []), path, *flags]
    if ranks == 0:
        return [[sys.executable, *words]]
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    if nodes == 1:
        return [[*torchrun, "--standalone", *words]]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meet = [f"--nnodes={nodes}", "--master-addr=127.0.0.1", f"--master-port={port}"]
    return [[*torchrun, *meet, f"--node-rank={node}", *words] for node in range(nodes)]
