"""harness/cli.py: values of flags, and which rank reports a mistake.

tests/pure/test_refusals.py has the messages.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from harness import cli, exits


def test_values_of_flags() -> None:
    kinds: Any = (
        *((cli.size, "8", 8), (cli.size, "64K", 65536), (cli.size, "1.5M", 1572864)),
        *((cli.size, "1g", 2**30), (cli.fraction, "5%", 0.05), (cli.fraction, "0.05", 0.05)),
        *((cli.positive_float, "0.5", 0.5), (cli.number(int, 0), "0", 0)),
        (cli.list_of(str, ("a", "b")), "all", ["a", "b"]),
        (cli.list_of(cli.positive_int), "4, 2,4", [4, 2]),
    )
    for kind, text, value in kinds:
        assert kind(text) == value
    for text in ("8Q", "0.5", "-1", "", "inf"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected a size in bytes, got '"):
            cli.size(text)
    for count in (1, 1000, 1024, 3 * 2**20, 2**34):
        assert cli.size(cli.show_size(count)) == pytest.approx(count, rel=1e-3)
    assert parse("--batch_size=4").batch_size == 4
    assert parse("--json=a_b.jsonl").json == "a_b.jsonl"
    assert parse("--distributed_backend", "NCCL").backend == "nccl"


def parse(*words: str) -> argparse.Namespace:
    parser = cli.Parser("A script.")
    parser.add_argument("--batch-size", type=cli.positive_int)
    cli.add_common_flags(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(("rank", "speaks"), [("00", True), ("x", True), ("1", False)])
def test_torchrun_reports_the_reason(
    rank: str, speaks: bool, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """Every rank writes it to its file, since torchrun may pick any as the root cause. Only rank 0,
    or a rank that does not know its number, prints it, and not again after a restart."""
    path = str(tmp_path / "error.json")
    monkeypatch.setattr("harness.exits.time.sleep", lambda seconds: None)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a run")
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit):
        parse("--batch-siez", "3")
    assert bool(capsys.readouterr().err) is speaks
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=path)
    assert failure.timestamp == pytest.approx(time.time(), abs=60)
    summary = ChildFailedError("x.py", {0: failure}).format_msg()
    reason = summary.rpartition("traceback : ")[2].rstrip("=\n")
    assert reason.endswith("unknown argument '--batch-siez'; did you mean --batch-size?")


LEAVE = """
import atexit, sys
from harness import exits
class Held:
    def __del__(self): print("freed")
held = Held()
atexit.register(print, "done")
atexit.register(exits.fast_exit, 3)
"""


def test_leave_skips_deallocation() -> None:
    """Functions registered with atexit are called, and an exception is not hidden."""
    for then, status, out in (("sys.exit(3)", 3, "done\n"), ("1 / 0", 1, "done\nfreed\n")):
        command = [sys.executable, "-c", LEAVE + then]
        run = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=exits.ROOT)
        assert (run.returncode, run.stdout) == (status, out)
        assert ("ZeroDivisionError" in run.stderr) == (status == 1)
    # Python flushes stderr at exit, and would end with status 120.
    command = [sys.executable, "-c", "from harness import exits; exits.refuse('a mistake')"]
    buffered = {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "wb") as full:
        assert subprocess.run(command, cwd=exits.ROOT, env=buffered, stderr=full).returncode == 2


# the message of torch 2.11, and of torch 2.15 with nccl2
LEGACY = """\
NCCL error in: ProcessGroupNCCL.cpp:3780, unhandled system error, NCCL version 2.28.9
ncclSystemError: System call or external library call failed or device error.\x20
Last error:
Call to ibv_create_cq failed with error Cannot allocate memory"""
NCCL2 = """\
Failed to initialize NCCL communicator: invalid usage\x20
NCCL Last Error: Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000"""


# the message of torch 2.14 for a full GPU, and for a process with a memory limit
FULL = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 1 has a total capacity of 79.11 GiB "
FULL += "of which 11.68 MiB is free. "
ADVICE = "Of the allocated memory 62.56 MiB is allocated by PyTorch, and 9.44 MiB is reserved by "
ADVICE += "PyTorch but unallocated.  See documentation for Memory Management  (https://pytorch.org)"


def test_errors_of_torch_are_shortened_to_one_line() -> None:
    short = FULL.strip()
    process = "Including non-PyTorch memory, this process has 77.16 GiB memory in use. "
    for text in (FULL + process + ADVICE, FULL + "Process 7 has 78 GiB memory in use. " + ADVICE):
        error = torch.OutOfMemoryError(text)
        assert exits.describe(error) == f"OutOfMemoryError: {short}"
        # as RPC returns it from a server
        remote = f"On WorkerInfo(id=2, name=server0):\nOutOfMemoryError({text!r})\nTraceback (most"
        assert exits.describe(RuntimeError(remote)) == f"OutOfMemoryError('{short}"
    limited = torch.OutOfMemoryError(f"{FULL}{process}11.87 GiB allowed; {ADVICE}")
    assert exits.describe(limited) == f"OutOfMemoryError: {short} 11.87 GiB allowed"
    wrapped = RuntimeError(f"rank 1: {FULL}{ADVICE}\nsecond line")
    assert exits.describe(wrapped) == f"RuntimeError: rank 1: {short}"
    legacy, nccl2 = (exits.describe(RuntimeError(text)) for text in (LEGACY, NCCL2))
    assert legacy.endswith("2.28.9: Call to ibv_create_cq failed with error Cannot allocate memory")
    assert nccl2.startswith("RuntimeError: Failed to initialize NCCL communicator: invalid usage: ")
    assert nccl2.endswith(": Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000")
    assert exits.describe(RuntimeError("a\nLast error:\n")) == "RuntimeError: a"  # no last error


def test_the_version_comes_from_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without git, with a file changed since the commit, and with the variables of a hook."""
    version = cli.version.__wrapped__  # without its cache
    assert version(tmp_path) == "unknown"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "a.py").write_text("1")
    for words in (["init", "-q"], ["add", "a.py"], ["commit", "-q", "-m", "a"]):
        subprocess.run([*git, *words], check=True, timeout=500)
    clean = version(tmp_path)
    assert re.fullmatch(r"[0-9a-f]{7,}", clean)
    os.utime(tmp_path / "a.py", (0, 0))  # git status would update its index
    index = (tmp_path / ".git" / "index").read_bytes()
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "of another repository"))
    assert version(tmp_path) == clean
    assert (tmp_path / ".git" / "index").read_bytes() == index  # it was not written
    (tmp_path / "a.py").write_text("2")
    assert version(tmp_path) == f"{clean}-dirty"
    monkeypatch.setenv("PATH", "")  # git is not installed
    assert version(tmp_path) == "unknown"


@pytest.mark.parametrize("rank", ["0", "1"])
def test_the_version_and_the_first_lines(rank: str, monkeypatch: Any, capsys: Any) -> None:
    """Rank 0 prints version and command as soon as the flags are parsed."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(sys, "argv", ["benchmarks/x.py", "--ranks", "2 3", "--json", "-"])
    lines = f"# torchrun-bench x, version {cli.version()}\n"
    lines += "# command: benchmarks/x.py --ranks '2 3' --json -\n"
    parser = cli.Parser("doc")
    parser.add_argument("--ranks", required=True)
    cli.add_common_flags(parser)
    parser.parse_args()
    assert capsys.readouterr() == ("", lines if rank == "0" else "")  # stdout is for the report
    told = {
        "--version": f"torchrun-bench 0.1.0, commit {cli.version()}\n",
        "--help": "usage: x.py ",
    }
    for flag, words in told.items():
        with pytest.raises(SystemExit, match="0"):
            parser.parse_args([flag])  # the required flag may be missing
        out = capsys.readouterr().out
        assert out.startswith(words) if rank == "0" else out == ""


@pytest.mark.parametrize(("launcher", "speaks"), [("TORCHELASTIC_RUN_ID", False), (None, True)])
def test_a_rank_started_by_hand_prints_its_own_mistake(
    launcher: str | None, speaks: bool, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """It has its own command line. Under a launcher all ranks have the same one."""
    for name in ("TORCHELASTIC_RUN_ID", *(rank for rank, _ in exits.read_launchers())):
        monkeypatch.delenv(name, raising=False)
    if launcher:
        monkeypatch.setenv(launcher, "1")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(SystemExit, match="2"):
        exits.refuse("a typo")
    assert ("error: a typo" in capsys.readouterr().err) == speaks
