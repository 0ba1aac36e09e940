"""How a run ends: refusals and other lines on stderr, exit statuses, torchrun's error file, and the
standard streams. Requires only the standard library.
"""

import atexit
import contextlib
import json
import os
import re
import shlex
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NoReturn, TextIO

from common.errors import Refused
from harness.contents import is_installed

STARTED_S = time.monotonic()  # cli.py, which scripts import first, imports this module first
HANG = 3  # exit status of a run that hung
NO_VERDICT = 4  # exit status of a run that lacks the evidence for a verdict
ROOT = Path(__file__).resolve().parents[1]  # the checkout, or the archive of launch/archive
STAMP = "version.txt"  # in the archive: the version of the checkout
# A quoted value, or a word, of more than 200 characters
LONG = re.compile(r"""(?<!\w)'(?:[^'\\]|\\.){200,}'(?!\w)|"(?:[^"\\]|\\.){200,}"|\S{200,}""")


def refuse(message: str, status: int = 2, prints: bool | None = None) -> NoReturn:
    """End the run because of a user's mistake. By default, only rank 0 prints the line."""
    line = f"{Path(sys.argv[0]).name}: error: {shorten(' '.join(message.split()))}"
    write_error_file(line)
    if is_rank_0() if prints is None else prints:
        print_error(line)
    else:
        # If this rank ended first, the launcher would kill rank 0 before rank 0 has printed the
        # line. There is no store yet to wait in. Once rank 0 ends, the launcher ends this rank.
        time.sleep(10)
        ranks = [rank for rank, _ in read_launchers()]
        if not {"TORCHELASTIC_RUN_ID", "SLURM_PROCID", "PMIX_RANK", *ranks} & {*os.environ}:
            print_error(line)  # started by hand: each rank has its own command line
    sys.exit(status)


def shorten(message: str) -> str:
    """Cut the values in a message that are longer than 200 characters."""
    return LONG.sub(lambda value: f"{value[0][:60]}... ({len(value[0]):,} characters)", message)


def read_text(name: str) -> str:
    """Return the contents of a file of the checkout or of the archive. Raises OSError."""
    loader: Any = __spec__.loader
    return str(loader.get_data(str(ROOT / name)), "utf-8")


def words_of(script: str) -> list[str]:
    """Return the words that start a script, after `python` or torchrun: its path or, in an archive,
    the path of the archive and the name of the script."""
    if not ROOT.is_file():
        return [script]
    return [shortest(str(ROOT)), *([Path(script).stem] if script else [])]


def as_started(text: str) -> str:
    """Return a text in which `benchmarks/ddp_sweep.py` is what starts this script here."""
    return re.sub(
        r"\b(?:benchmarks|analysis)/\w+\.py\b", lambda path: shlex.join(words_of(path[0])), text
    )


def shortest(path: str) -> str:
    """Return a path relative to the working directory, if that is shorter and the directory still
    exists."""
    with contextlib.suppress(FileNotFoundError):
        return min(os.path.relpath(path), path, key=len)
    return path


def read_launchers() -> list[tuple[str, str]]:
    """Return the variables of the rank and of the number of tasks, for each known launcher."""
    try:
        lines = read_text("launch/launchers.txt").splitlines()
    except OSError:  # launch/ was not copied along with the scripts
        return []
    rows = [line.split() for line in lines if line.strip() and not line.startswith("#")]
    return [(rank, size) for _, _, rank, size, *_ in rows]


def refuse_worlds_of_one() -> None:
    """Refuse N processes without torchrun or a wrapper of launch/, each a world of one."""
    if "RANK" in os.environ and os.environ.get("GROUP_WORLD_SIZE") != "1":
        return
    of_torchrun = [os.environ.get(name, "1") for name in ("PET_NNODES", "PET_NPROC_PER_NODE")]
    if "RANK" not in os.environ and of_torchrun != ["1", "1"]:
        # Kubeflow Trainer sets them in each pod (kubeflow/trainer#3930), which has its own log
        sets = "PET_NNODES={} and PET_NPROC_PER_NODE={} configure torchrun".format(*of_torchrun)
        refuse(f"{sets}, but python was started; start torchrun with this script", prints=True)
    if cloud := cloud_nodes():
        name, nodes = cloud
        refuse(
            f"{name} lists {nodes} nodes, but each would run as a world of its own; start torchrun "
            f"on each node, with --nnodes {nodes}, or measure a node alone with env -u {name}",
            prints=True,  # each node has its own log
        )
    launchers = read_launchers()
    ranks = ["RANK", *(rank for rank, _ in launchers)]
    for _, size in launchers:
        if (tasks := os.environ.get(size, "1")) != "1":
            refuse(
                f"{size}={tasks}, but each task would run as a world of one; start them with "
                "launch/slurm_torchrun.sbatch (torchrun on each node), launch/slurm_srun.sbatch "
                "(a task per rank) or launch/mpi_env.sh (mpirun, mpiexec, flux)"
                + (f"; {shlex.join(words_of('launch'))} prints them" if ROOT.is_file() else ""),
                prints=all(os.environ.get(rank, "0") == "0" for rank in ranks),
            )


def cloud_nodes() -> tuple[str, int] | None:
    """Return the variable in which SkyPilot, SageMaker or Vertex AI lists several nodes, and their
    number. These services start the same command on each node."""
    for name in ("SKYPILOT_NUM_NODES", "SM_HOSTS", "CLUSTER_SPEC"):
        with contextlib.suppress(ValueError, TypeError, AttributeError, KeyError):
            value = json.loads(os.environ.get(name, ""))
            if name == "CLUSTER_SPEC":  # {"cluster": {"workerpool0": ["host:port"], ...}, ...}
                value = [host for pool in value["cluster"].values() for host in pool]
            nodes = len(value) if isinstance(value, list) else int(value)
            if nodes > 1:
                return name, nodes
    return None


def is_on_one_node() -> bool:
    """Return whether all ranks are on this node, according to the launcher's variables."""
    world_size = os.environ.get("WORLD_SIZE", "1")
    return os.environ.get("LOCAL_WORLD_SIZE", world_size) == world_size


def is_rank_0() -> bool:
    """Return whether this process prints for the job. A RANK that is not a number prints, too."""
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    return not rank.isdigit() or int(rank) == 0


def write_error_file(reason: str, error_file: str | None = None) -> None:
    """Make torchrun's summary name the reason. The format is that of the error handler of
    torch.distributed.elastic. error_file: of another rank; by default this rank's."""
    error_file = error_file or os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        message = {"message": reason, "extraInfo": {"timestamp": str(int(time.time()))}}
        try:
            Path(error_file).write_text(json.dumps({"message": message}))
        except OSError:  # torchrun would fail to read an incomplete file
            with contextlib.suppress(OSError):
                Path(error_file).unlink()


def report_missing_packages() -> None:
    """Scripts call it before they import packages of requirements.txt."""
    sys.excepthook = name_missing_package


def name_missing_package(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Report a missing package in one line, and any other error as Python does."""
    script = Path(sys.argv[0]).resolve()
    name = f"{'analysis/' * (script.parent.name == 'analysis')}requirements.txt"
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        lines = [line for line in read_text(name).splitlines() if not line.startswith("#")]
        if any(re.match(rf"{re.escape(package)}\b", line) for line in lines):
            words = lines if ROOT.is_file() else ["-r", str(ROOT / name)]
            refuse(f"{package} is not installed; try pip install {shlex.join(words)}")
    sys.__excepthook__(kind, error, trace)


def print_error(line: str) -> None:
    """Print a line on stderr, unless stderr can no longer be written."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        abandon(sys.stderr)


def abandon(stream: TextIO) -> None:
    """Redirect stdout or stderr to /dev/null after an error on it. Otherwise Python would fail to
    flush it on exit, with status 120."""
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), stream.fileno())


def reserve_streams() -> None:
    """Reserve the numbers of closed standard streams (`>&-`), so that no report is opened as 2."""
    while (number := os.open(os.devnull, os.O_RDONLY)) <= 2:
        pass
    os.close(number)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


def take_stdout() -> IO[bytes]:
    """Return stdout, for the report. From now on, `print` writes to stderr."""
    stream = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return stream


def exit_now(status: int, reason: str, prints: bool = True) -> NoReturn:
    """End this process immediately, from any thread."""
    write_error_file(reason)
    write_stderr(reason if prints else "")
    os._exit(status)


def fast_exit(status: int) -> None:
    """End this process, after the other atexit functions, without deallocating its objects: torch's
    modules take Python a second of CPU time, and 10 s on busy cores, while torchrun waits."""
    if hasattr(sys, "last_type"):  # an exception, already printed, ends the process
        return
    atexit.unregister(fast_exit)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)


def write_stderr(text: str, end: str = "\n") -> None:
    """Write to stderr in a single call, so that lines of different ranks are not interleaved."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}{end}".encode() if text else b"")


def place_of(error: BaseException) -> str:
    """Return ` (my_model.py:12)`, the innermost line in a traceback that is neither this project's
    nor of the standard library or an installed package; "" if there is none."""
    own = [ROOT / folder for folder in ("benchmarks", "common", "harness", "readers")]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        is_own = any(path.is_relative_to(folder) for folder in own)
        if path.is_file() and not (is_own or is_installed(frame.filename)):
            return f" ({path.name}:{frame.lineno})"
    return ""


# Matches the advice that follows the numbers in CUDA's out-of-memory error; torch 2.11 to 2.15
ADVICE = re.compile(r"(CUDA out of memory\..*? is free\.)(?:.*?( \S+ \w+ allowed);)?.*")


def describe(error: BaseException) -> str:
    """Return an error in one line."""
    if isinstance(error, Refused):
        return str(error)
    text = ADVICE.sub(r"\1\2", str(error))
    lines = text.strip().splitlines() or ["no message"]
    if "On WorkerInfo(" in lines[0] and len(lines) > 1:  # a line that RPC adds
        return lines[1]
    text = f"{type(error).__name__}: {lines[0].strip()}"
    # NCCL's reason follows, on the line after "Last error:" or after "NCCL Last Error: "
    reason = re.search(r"\bLast error:\s+(\S.*)", str(error), re.IGNORECASE)
    return f"{text}: {reason[1].strip()}" if reason else text
