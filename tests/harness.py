"""Start the scripts as a user does, with a time limit, and look at what they leave behind."""

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
SWEEP = str(ROOT / "benchmarks" / "ddp_sweep.py")
CALIBRATE = str(ROOT / "benchmarks" / "calibrate.py")
COLLECTIVES = str(ROOT / "benchmarks" / "collectives.py")
P2P_MATRIX = str(ROOT / "benchmarks" / "p2p_matrix.py")
SCRIPTS = sorted((ROOT / "benchmarks").glob("*.py"))
READERS = ("ab", "compare", "report")  # those that torchrun does not start: they measure nothing
SLOW = "SLOW_TESTS" in os.environ
slow = pytest.mark.skipif(not SLOW, reason="set SLOW_TESTS=1")  # what others nearly show
# the smallest sweep that still trains a real model
TINY = ["--model", "mobilenet_v3_small", "--image-size", "32", "--batch-size", "2"]


def environment() -> dict[str, str]:
    """This process's environment less everything that a launcher sets."""
    prefixes = ("TORCHELASTIC", "SLURM_", "GROUP_", "ROLE_")
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    # a unit test in this process may have chosen these, for itself alone
    names += ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in names and not name.startswith(prefixes)
    }
    return kept | {"OMP_NUM_THREADS": "1"}


def torchrun(nproc: int, *options: str) -> list[str]:
    """The start of a torchrun command on a free port."""
    runner = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*runner, "--nproc-per-node", str(nproc), *options]


def run(
    command: Sequence[str], timeout: float = 120, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, cwd=cwd, env=environment()
    )


def load(path: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(path.read_text())
    return report


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Launch:
    """A command in the background: wait for what it prints, find its ranks, signal them."""

    def __init__(self, command: Sequence[str]) -> None:
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            start_new_session=True,
        )
        self.stdout: list[str] = []
        self.stderr: list[str] = []
        self._readers = [
            threading.Thread(target=lines.extend, args=(stream,))
            for stream, lines in (
                (self.process.stdout, self.stdout),
                (self.process.stderr, self.stderr),
            )
        ]
        for reader in self._readers:
            reader.start()

    def wait_for(self, text: str, timeout: float = 60, times: int = 1) -> None:
        """Until so many lines on stdout start with `text`."""
        limit = time.monotonic() + timeout
        while sum(line.startswith(text) for line in list(self.stdout)) < times:
            assert self.process.poll() is None, f"ended before {text!r}:\n{self.output()}"
            assert time.monotonic() < limit, f"never printed {text!r}:\n{self.output()}"
            time.sleep(0.05)

    def ranks(self) -> dict[int, int]:
        """The pid of each local rank."""
        found = {}
        for pid in children(self.process.pid):
            with contextlib.suppress(OSError):
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                for variable in variables:
                    if variable.startswith(b"LOCAL_RANK="):
                        found[int(variable.partition(b"=")[2])] = pid
        return found

    def wait(self, timeout: float = 90) -> int:
        """Its exit status."""
        status = self.process.wait(timeout)
        for reader in self._readers:
            reader.join(timeout=10)
        return status

    def output(self) -> str:
        return "".join(self.stdout) + "\n-- stderr\n" + "".join(self.stderr)


def children(pid: int) -> list[int]:
    """All descendants of a process."""
    found = []
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            found += [int(child), *children(int(child))]
    return found


@contextlib.contextmanager
def launch(command: Sequence[str]) -> Iterator[Launch]:
    """A Launch whose processes are all gone afterwards, however the test ends."""
    started = Launch(command)
    try:
        yield started
    finally:
        for pid in [started.process.pid, *children(started.process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        started.wait(10)


def alive(pid: int) -> bool:
    """Whether the process runs; one that waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def load_script(name: str) -> ModuleType:
    """A script of benchmarks/ as a module."""
    path = ROOT / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{name}_in_tests", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def launch_without_torchrun(
    nproc: int, command: Sequence[str], variables: dict[str, str] | None = None
) -> Iterator[list[Launch]]:
    """Every rank by itself, as srun starts them: no launcher ends the others when one dies."""
    port = str(free_port())
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                launch(
                    [
                        "env",
                        *(f"{name}={value}" for name, value in (variables or {}).items()),
                        f"RANK={rank}",
                        f"LOCAL_RANK={rank}",
                        f"WORLD_SIZE={nproc}",
                        f"LOCAL_WORLD_SIZE={nproc}",
                        "MASTER_ADDR=127.0.0.1",
                        f"MASTER_PORT={port}",
                        sys.executable,
                        *command,
                    ]
                )
            )
            for rank in range(nproc)
        ]
