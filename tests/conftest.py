"""Fixtures: run a script under torchrun and look at what a user sees. A file a script beside this.

`python -m pytest` runs what needs no torchrun; the marks below are `make smoke faults launch gpu`.
"""

import contextlib
import json as json_module
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from common.report import Report, load

ROOT = Path(__file__).resolve().parents[1]
MARKS = {
    "smoke": "starts torchrun: a script as its user runs it",
    "faults": "kills, stops and starves ranks",
    "launch": "starts a cluster: Slurm, ssh, Kubernetes",
    "gpu": "needs CUDA",
    "oldest": "each script once, for the oldest torch that is claimed",
}
INJECT = str(ROOT / "tests" / "inject.py")


def pytest_configure(config: pytest.Config) -> None:
    for name, meaning in MARKS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    if not config.option.markexpr:
        config.option.markexpr = " and ".join(f"not {name}" for name in MARKS)
    if "gpu" not in config.option.markexpr.replace("not gpu", ""):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # tests of the CPU are the same on every machine


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.option.markexpr.startswith("not smoke and"):
        terminalreporter.write_line(f"left out: make {' '.join(MARKS)} (see CONTRIBUTING.md)")


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
                rank = process.environ().get("RANK")
            except psutil.Error:
                continue
            if rank is not None and "RANK" not in os.environ:
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
    """A run that tests/warm.py starts, which spares every process the import of torch."""

    server: subprocess.Popen[bytes] | None = None

    def __init__(self, folder: Path, words: list[str], ranks: int) -> None:
        self.folder, self.files = folder, []
        if Warm.server is None:
            Warm.server = subprocess.Popen(
                [sys.executable, str(ROOT / "tests" / "warm.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                env=environment(),
                start_new_session=True,
            )
        request = {"words": words, "ranks": ranks, "environment": environment()}
        request["folder"] = os.getcwd()
        request |= {name: str(folder / f"{name}0") for name in ("out", "err")}
        assert Warm.server.stdin is not None
        Warm.server.stdin.write(json_module.dumps(request).encode() + b"\n")
        self.pid, self.parts = self.answer(60), []
        with contextlib.suppress(psutil.NoSuchProcess):  # over already
            self.parts = [psutil.Process(self.pid)]
        self.over = False

    def answer(self, seconds: float) -> int:
        assert Warm.server is not None
        assert Warm.server.stdout is not None
        if not select.select([Warm.server.stdout], [], [], max(0, seconds))[0]:
            pytest.fail(f"no end after {seconds} s; stdout:\n{self.out}\nstderr:\n{self.err}")
        return int(Warm.server.stdout.readline())

    def wait(self, seconds: float) -> int:
        status = self.answer(seconds)
        self.over = True
        return status

    def stop(self) -> None:
        super().stop()
        if not self.over:
            self.answer(10)


def environment(**extra: str) -> dict[str, str]:
    """This process's variables without a launcher's, and with one thread a rank."""
    foreign = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC", "SLURM_", "GROUP_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | extra


def words_of(script: str, *flags: str, inject: str | None = None) -> list[str]:
    """What follows `python` or torchrun's options; inject: a fault of tests/inject.py."""
    path = script if os.path.isabs(script) else str(ROOT / script)
    return [*([INJECT, inject] if inject else []), path, *flags]


def command_of(
    script: str, *flags: str, ranks: int = 2, nodes: int = 1, inject: str | None = None
) -> list[list[str]]:
    """The torchrun commands that start a script: one for each node, all on this host.

    ranks: of a node; 0 is plain python.
    """
    words = words_of(script, *flags, inject=inject)
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


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """start("benchmarks/x.py", *flags, ranks=2, nodes=1, inject=None, **variables) -> Process."""
    started: list[Process] = []

    def begin(
        script: str,
        *flags: str,
        ranks: int = 2,
        nodes: int = 1,
        inject: str | None = None,
        **variables: str,
    ) -> Process:
        folder = tmp_path / f"run{len(started)}"
        folder.mkdir()
        commands = command_of(script, *flags, ranks=ranks, nodes=nodes, inject=inject)
        started.append(Process(commands, folder, environment(**variables)))
        return started[-1]

    yield begin
    for process in started:
        process.stop()


@pytest.fixture
def bench(
    start: Callable[..., Process], tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Run]]:
    """bench("benchmarks/x.py", *flags, ranks=2, timeout=240, ...) -> Run, with --json added.

    torch is imported already (tests/warm.py), but in test_faults.py, in tests marked `oldest` or
    `gpu` and with `start`'s other options: there it is torchrun as a user types it.
    """
    marked = any(request.node.get_closest_marker(name) for name in ("oldest", "gpu"))
    cold = marked or request.node.path.name == "test_faults.py"
    runs: list[Warm] = []

    def run(
        script: str,
        *flags: str,
        timeout: float = 240,
        json: bool = True,
        ranks: int = 2,
        inject: str | None = None,
        **options: Any,
    ) -> Run:
        path = tmp_path / "a folder" / "report.jsonl"
        path.parent.mkdir(exist_ok=True)
        words = [*flags, *(["--json", str(path)] if json else [])]
        if cold or options:
            process = start(script, *words, ranks=ranks, inject=inject, **options)
        else:
            folder = tmp_path / f"warm{len(runs)}"
            folder.mkdir()
            process = Warm(folder, words_of(script, *words, inject=inject), ranks)
            runs.append(process)
        status = process.wait(timeout)
        return Run(status, process.out, process.err, path)

    yield run
    for process in runs:
        process.stop()
