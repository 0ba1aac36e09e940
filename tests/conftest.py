"""Fixtures that run a script under torchrun, as a user does. Each script has a test file.

`python -m pytest` runs the tests that need no torchrun. Each mark below is a target of `make`.
"""

import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import process, quotients
from tests.process import ROOT, Bench, Process, Run, Start, Warm

MARKS = {
    "smoke": "starts torchrun: a script as its user runs it",
    "faults": "kills, stops and starves ranks",
    "launch": "starts a cluster: Slurm, ssh, Kubernetes",
    "gpu": "needs CUDA",
    "oldest": "each script once, for the oldest torch that is claimed",
    "cudalab": "runs CUDA and NCCL code on the emulation in tests/cudalab",
}


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell ignores it in background jobs, and bash cannot trap a signal that is ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for name, meaning in MARKS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    if not config.option.markexpr:
        config.option.markexpr = " and ".join(f"not {name}" for name in MARKS)
    config.addinivalue_line("markers", "ci: a row of test_cudalab.py that .ci/run runs")
    if not re.search(r"(?<!not )\b(gpu|cudalab)\b", config.option.markexpr):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # tests on the CPU are the same on every machine


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """All cores for the whole quick part; a file is faster in one process."""
    is_whole = not config.option.file_or_dir and not config.option.markexpr
    return min(os.cpu_count() or 1, 4) if is_whole else 0


@pytest.fixture(scope="session")
def lab_folder() -> Path:
    """tests/cudalab, built for this torch. It is built again only if its sources or torch change.

    Skips the test if torch is not built for CUDA 13 or there is no C++ compiler; in CI both fail.
    """
    source = ROOT / "tests" / "cudalab"
    spec = importlib.util.find_spec("torch")
    assert spec
    assert spec.origin
    version = Path(spec.origin).with_name("version.py").read_text()
    digest = hashlib.sha256(f"{spec.origin} {version}".encode())
    for path in sorted(source.glob("*.sh")) + sorted(source.glob("src/**/*")):
        if path.is_file() and path.suffix != ".pyc":
            digest.update(path.read_bytes())
    folder = source / ".build" / digest.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # workers of pytest-xdist need it at the same time
        if (folder / "env.sh").exists():
            return folder
        if not shutil.which("g++"):
            (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("requires g++")
        command = [str(source / "build.sh"), str(folder)]
        env = os.environ | {"PYTHON": sys.executable}
        built = subprocess.run(command, env=env, capture_output=True, text=True)
    if built.returncode == 77:  # in CI a skip would hide that nothing was tested
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(built.stderr.strip())
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.fixture
def lab(lab_folder: Path, tmp_path: Path) -> dict[str, str]:
    """The variables of a process that uses cudalab: `bench(..., **lab)`."""
    script = f"source {str(lab_folder / 'env.sh')!r} && env -0"
    names = ("CUDALAB", "CUDALAB_COVER", "PATH", "PYTHONPATH", "TRITON_LIBCUDA_PATH")
    text = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
    variables = dict(line.split("=", 1) for line in text.split("\0") if "=" in line)
    kept = {name: variables[name] for name in names if name in variables}
    # of each GPU: some scripts use a share of it, and this machine has less memory than 8 GPUs
    return kept | {"CUDALAB_STATE": str(tmp_path / "gpus"), "CUDALAB_MEMORY_GIB": "3"}


@pytest.fixture(autouse=True)
def signal_handlers_are_restored() -> Iterator[None]:
    """ab.py ignores signals when it ends, but this process continues."""
    changed = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in changed}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.option.markexpr.startswith("not smoke and"):
        terminalreporter.write_line(f"left out: make {' '.join(MARKS)} (see CONTRIBUTING.md)")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def start(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Start]:
    """start("benchmarks/x.py", *flags, ranks=2, nodes=1, inject=None, **variables) -> Process.

    columns: stdout (terminal="err": stderr) is a terminal of this width. torch is already imported
    (tests/warm.py). With `cold=True`, and in tests marked `gpu`, torchrun starts as for a user.
    Only one process runs at a time: earlier ones have ended or are waited for.
    """
    started: list[Process] = []

    def begin(
        script: str,
        *flags: str,
        ranks: int = 2,
        nodes: int = 1,
        inject: str | None = None,
        cold: bool = False,
        columns: int | None = None,
        terminal: str = "out",
        **variables: str,
    ) -> Process:
        folder = tmp_path / f"run{len(started)}"
        folder.mkdir()
        commands = process.command_of(script, *flags, ranks=ranks, nodes=nodes, inject=inject)
        kind = Process if cold or request.node.get_closest_marker("gpu") else Warm
        envs = [process.environment(**variables)] * len(commands)
        if columns:
            started.append(Warm(commands, folder, envs, columns, terminal))
        else:
            started.append(kind(commands, folder, envs))
        return started[-1]

    yield begin
    for each in started:
        each.stop()
    if request.node.get_closest_marker("faults") or request.config.option.markexpr == "oldest":
        return  # Python may warn about what a killed process leaves behind; old torch of itself
    # a warning of Python or torch would interrupt a table
    lines = [line for each in started for line in (each.out + each.err).splitlines()]
    assert [line for line in lines if "Warning" in line] == []


@pytest.fixture
def by_hand(tmp_path: Path) -> Iterator[Callable[..., Warm]]:
    """by_hand(command of rank 0, of rank 1, ..., last={}, NAME="value") -> Warm: without torchrun.

    last: further variables of the last rank.
    """
    started: list[Warm] = []

    def begin(*commands: str, last: dict[str, str] | None = None, **variables: str) -> Warm:
        of_job = {"WORLD_SIZE": str(len(commands)), "MASTER_PORT": str(process.free_port())}
        job = process.environment(**of_job)
        job = {name: value for name, value in job.items() if not name.startswith("NCCL_")}
        job |= {"MASTER_ADDR": "127.0.0.1"} | variables
        envs = [job | {"RANK": str(rank)} for rank in range(len(commands))]
        if of_node := int(variables.get("LOCAL_WORLD_SIZE", "0")):
            envs = [env | {"LOCAL_RANK": str(rank % of_node)} for rank, env in enumerate(envs)]
        envs[-1] |= last or {}
        words = [command.split() for command in commands]
        ranks = [[sys.executable, str(ROOT / script), *flags] for script, *flags in words]
        started.append(Warm(ranks, tmp_path, envs))
        return started[-1]

    yield begin
    for each in started:
        each.stop()


@pytest.fixture
def bench(start: Start, tmp_path: Path) -> Bench:
    """bench("benchmarks/x.py", *flags, status=0, timeout=500, json=True, ...) -> Run; other options
    as `start`.

    status: the expected one; None: any. json: add --json to the flags. tests/quotients.py checks
    each ratio that a script prints.
    """

    def run(
        script: str,
        *flags: str,
        status: int | None = 0,
        timeout: float = 500,
        json: bool = True,
        **options: Any,
    ) -> Run:
        path = tmp_path / "a folder" / "report.jsonl"
        path.parent.mkdir(exist_ok=True)
        words = [*flags, *(["--json", str(path)] if json else [])]
        run = start(script, *words, **options)
        ended = run.wait(timeout)
        assert status in (None, ended), run.out + run.err
        if Path(script).parent == Path("benchmarks"):
            assert quotients.problems(Path(script).stem, run.out) == []
        return Run(ended, run.out, run.err, path)

    return run
