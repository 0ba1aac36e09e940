"""Flags: what is accepted, and the one line that says no."""

import argparse
import importlib
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from common import benchmark, cli
from tests.process import ROOT


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (cli.size, "8", 8),
        (cli.size, "64K", 65536),
        (cli.size, "1.5M", 1572864),
        (cli.size, "1g", 2**30),
        (cli.fraction, "5%", 0.05),
        (cli.fraction, "0.05", 0.05),
        (cli.positive_int, "3", 3),
        (cli.positive_float, "0.5", 0.5),
        (cli.number(int, 0), "0", 0),
        (cli.list_of(str, ("a", "b")), "all", ["a", "b"]),
        (cli.list_of(cli.positive_int), "4, 2,4", [4, 2]),
    ],
)
def test_types(kind: Any, text: str, value: Any) -> None:
    assert kind(text) == value


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        (cli.size, "8Q", "expected a size in bytes, got '8Q'; e.g. 8, 64K"),
        (cli.size, "0.5", "expected a size"),
        (cli.size, "-1", "expected a size"),
        (cli.size, "", "expected a size"),
        (cli.size, "inf", "expected a size"),
        (cli.fraction, "5", "between 0 and 1, got '5'; e.g. 5% or 0.05"),
        (cli.positive_int, "0", "a whole number of at least 1, got '0'"),
        (cli.positive_int, "2.5", "a whole number"),
        (cli.positive_float, "0", "a number above 0"),
        (cli.positive_float, "nan", "a number above 0"),
        (cli.positive_float, "inf", "a number above 0"),
        (cli.positive_float, "1e10", "a number above 0, got '1e10'; at most 1,000,000,000"),
        (cli.positive_int, "99999999999", "got '99999999999'; at most 1,000,000,000"),
        (cli.list_of(str, ("fp32", "bf16")), "fp23", "some of fp32, bf16, got 'fp23'; did you"),
        (cli.list_of(cli.positive_int), "1,x", "a whole number"),
    ],
)
def test_types_refuse(kind: Any, text: str, words: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        kind(text)
    assert words in str(caught.value)


@pytest.mark.parametrize("count", [1, 1000, 1024, 65536, 3 * 2**20, 2**34])
def test_show_size_is_what_size_reads(count: int) -> None:
    assert cli.size(cli.show_size(count)) == pytest.approx(count, rel=1e-3)


def parse(*words: str) -> argparse.Namespace:
    parser = cli.Parser("A script.")
    parser.add_argument("--batch-size", type=cli.positive_int)
    cli.add_common_flags(parser)
    return parser.parse_args(words)


def test_underscores_and_values_with_equals() -> None:
    assert parse("--batch_size", "3").batch_size == 3
    assert parse("--batch_size=4").batch_size == 4
    assert parse("--json=a_b.jsonl").json == "a_b.jsonl"
    assert parse("--distributed_backend", "gloo").backend == "gloo"
    assert parse("--backend", "NCCL").backend == "nccl"
    assert parse("--backend", "cpu:gloo,cuda:nccl").backend == "cpu:gloo,cuda:nccl"


@pytest.mark.parametrize("restarts", ["0", "1"])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_torchrun_is_told_the_reason(
    rank: str, restarts: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """Every rank writes it, since torchrun takes any of them for the root cause. torchrun's own
    code reads it here. Rank 0 alone says it, and not again when torchrun starts the ranks anew."""
    path = str(tmp_path / "error.json")
    monkeypatch.setattr("common.cli.time.sleep", lambda seconds: None)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", path)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit):
        parse("--batch-siez", "3")
    assert bool(capsys.readouterr().err) == (rank == restarts == "0")
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=path)
    assert failure.timestamp == pytest.approx(time.time(), abs=60)
    summary = ChildFailedError("x.py", {0: failure}).format_msg()
    reason = summary.rpartition("traceback : ")[2].rstrip("=\n")
    assert reason.endswith("unknown argument '--batch-siez'; did you mean --batch-size?")


LEAVE = """
import atexit, sys
from common import cli
class Held:
    def __del__(self): print("freed")
held = Held()
atexit.register(print, "done")
atexit.register(cli.leave, 3)
"""


@pytest.mark.parametrize(
    ("then", "status", "out"),
    [("sys.exit(3)", 3, "done\n"), ("1 / 0", 1, "done\nfreed\n"), ("", 3, "done\n")],
)
def test_leaving_frees_nothing(then: str, status: int, out: str) -> None:
    """All that was registered is called, and an exception is not hidden."""
    command = [sys.executable, "-c", LEAVE + then]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=cli.ROOT)
    assert (run.returncode, run.stdout) == (status, out)
    assert ("ZeroDivisionError" in run.stderr) == (status == 1)


GONE = [(script, flag) for script, flags in cli.GONE.items() for flag in flags]


@pytest.mark.parametrize(("script", "flag"), GONE)
def test_a_flag_that_is_gone_is_answered(
    script: str, flag: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """Also behind another flag whose value is missing, and where the answer names flags: by such
    that there are."""
    module = importlib.import_module(f"benchmarks.{script or 'ddp_sweep'}")
    monkeypatch.setattr(sys, "argv", [str(module.__file__), "--profile", flag, "x"])
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit) as end:
        module.parse_args()
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    answer = cli.GONE[script][flag]
    assert line.endswith(f"error: unknown argument '{flag}': {answer}")
    monkeypatch.setattr(sys, "argv", [str(module.__file__), "--help"])
    with pytest.raises(SystemExit):
        module.parse_args()
    torchruns = {"--nproc-per-node", "--numa-binding"}
    named = set(re.findall(r"--[a-z-]+", answer)) - torchruns
    assert named <= set(re.findall(r"--[a-z-]+", capsys.readouterr().out))


@pytest.mark.parametrize(("rank", "speaks"), [("00", True), ("x", True), ("", True), ("01", False)])
def test_who_speaks(
    rank: str, speaks: bool, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """Rank 0, however it is written, and whoever does not know its rank."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(SystemExit):
        parse("--nope")
    assert ("unknown argument '--nope'" in capsys.readouterr().err) is speaks


def test_a_restart_is_told_by_the_age_of_torchrun() -> None:
    """Not by that of a wrapper, which torchrun has started for a rank and its attempt."""
    code = "from common.benchmark import restarted_after; print(restarted_after())"
    wrapper = f"{shlex.join([sys.executable, '-c', code])}; true"  # without exec
    variables = {"TORCHELASTIC_RUN_ID": "a job", "TORCHELASTIC_RESTART_COUNT": "1"}
    done = subprocess.run(
        ["bash", "-c", f"{shlex.join(['bash', '-c', wrapper])}; true"],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    this = psutil.Process()  # stands for torchrun: the first without the ranks' variables
    assert float(done.stdout) == pytest.approx(this.create_time() - 1, abs=0.001), done.stderr


@pytest.mark.parametrize(
    "names", ["", "/nope", "/nope:/nope2", "a:b", "pipe:b", "a:pipe", "pipe:.", "pipe:/dev/null"]
)
def test_a_wrong_turn_is_one_line_and_overwrites_no_file(
    names: str, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        Path(name).write_text("precious")
    os.mkfifo("pipe")
    pipe = os.open("pipe", os.O_RDWR)
    os.write(pipe, b".")  # so that nobody would wait for a turn
    with pytest.raises(SystemExit, match="2"):
        benchmark.turn_taker(names)
    os.close(pipe)
    (line,) = capsys.readouterr().err.splitlines()
    assert "TORCHRUN_BENCH_TURN: expected two named pipes such as /tmp/a:/tmp/b, got '" in line
    assert [Path(name).read_text() for name in ("a", "b")] == ["precious"] * 2


def test_no_flag_is_an_ambiguous_prefix_of_torchruns(capsys: Any, monkeypatch: Any) -> None:
    """Before Python 3.12 argparse takes flags after the script for abbreviations of its own."""
    from torch.distributed.run import get_args_parser

    theirs = {s for a in get_args_parser()._actions for s in a.option_strings}
    for path in sorted((ROOT / "benchmarks").glob("*.py")):
        script = importlib.import_module(f"benchmarks.{path.stem}")
        monkeypatch.setattr(sys, "argv", [str(path), "--help"])
        with pytest.raises(SystemExit) as caught:
            script.parse_args()
        assert caught.value.code == 0
        words = capsys.readouterr().out.split()
        for flag in {w.strip("[],") for w in words if w.strip("[").startswith("--")}:
            found = {name.replace("_", "-") for name in theirs if name.startswith(flag)}
            assert len(found) < 2 or flag in theirs, flag


# as torch 2.11 and, with nccl2, torch 2.15 write it
LEGACY = """\
NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3780, unhandled system \
error (run with NCCL_DEBUG=INFO for details), NCCL version 2.28.9
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device \
error.\x20
Last error:
Call to ibv_create_cq failed with error Cannot allocate memory"""
NCCL2 = """\
Failed to initialize NCCL communicator: invalid usage (run with NCCL_DEBUG=WARN for details)\x20
NCCL Last Error: Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000"""


def test_why_nccl_failed_is_part_of_the_line() -> None:
    legacy, nccl2 = (cli.describe(RuntimeError(text)) for text in (LEGACY, NCCL2))
    why = "Call to ibv_create_cq failed with error Cannot allocate memory"
    assert legacy.endswith(f"details), NCCL version 2.28.9: {why}")
    assert nccl2 == (
        "RuntimeError: Failed to initialize NCCL communicator: invalid usage (run with "
        "NCCL_DEBUG=WARN for details): Duplicate GPU detected : rank 0 and rank 1 both on CUDA "
        "device 1000"
    )
    # nothing was recorded
    assert cli.describe(RuntimeError("a\nLast error:\n")) == "RuntimeError: a"
    assert cli.describe(RuntimeError("a\nNCCL Last Error: ")) == "RuntimeError: a"


def test_the_version_is_what_git_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a folder without git, one with a commit, a file that was changed since."""
    cli.version.cache_clear()
    assert cli.version(tmp_path) == "unknown"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "a"]):
        subprocess.run([*git, *words], check=True, timeout=60)
    (tmp_path / "a.py").write_text("1")
    subprocess.run([*git, "add", "a.py"], check=True, timeout=60)
    cli.version.cache_clear()
    dirty = cli.version(tmp_path)
    assert re.fullmatch(r"[0-9a-f]{7,}-dirty", dirty)
    os.utime(tmp_path / "a.py", (0, 0))
    index = (tmp_path / ".git" / "index").read_bytes()
    cli.version.cache_clear()
    assert cli.version(tmp_path) == dirty
    assert (tmp_path / ".git" / "index").read_bytes() == index  # nothing was locked or written
    subprocess.run([*git, "commit", "-q", "-m", "b"], check=True, timeout=60)
    cli.version.cache_clear()
    clean = cli.version(tmp_path)
    assert re.fullmatch(r"[0-9a-f]{7,}", clean)
    assert not dirty.startswith(clean)
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY"):
        monkeypatch.setenv(name, str(tmp_path / "of another repository"))
        cli.version.cache_clear()
        assert cli.version(tmp_path) == clean
    monkeypatch.setenv("PATH", "")  # no git at all
    cli.version.cache_clear()
    assert cli.version(tmp_path) == "unknown"
    cli.version.cache_clear()


@pytest.mark.parametrize("rank", ["0", "1"])
def test_version_is_a_flag_of_every_script(
    rank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 prints it, and no mandatory flag is missed."""
    monkeypatch.setenv("RANK", rank)
    parser = cli.Parser("doc")
    parser.add_argument("--ranks", required=True)
    with pytest.raises(SystemExit) as end:
        parser.parse_args(["--version"])
    assert end.value.code == 0
    said = f"torchrun-bench 0.1.0, commit {cli.version()}\n" if rank == "0" else ""
    assert capsys.readouterr().out == said


def test_the_first_lines_have_the_version_and_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 prints them as soon as the flags are read; the command as it was typed."""
    monkeypatch.setattr(sys, "argv", ["benchmarks/x.py", "--json", "my report"])
    lines = f"# torchrun-bench x, version {cli.version()}\n"
    lines += "# command: benchmarks/x.py --json 'my report'\n"
    parse("--json", "my report")  # of another program's making
    assert capsys.readouterr() == ("", "")
    parser = cli.Parser("doc")
    cli.add_common_flags(parser)
    parser.parse_args()
    assert capsys.readouterr() == (lines, "")
    monkeypatch.setattr(sys, "argv", ["benchmarks/x.py", "--json", "-"])  # the report alone
    parser.parse_args()
    assert capsys.readouterr() == ("", lines.replace("'my report'", "-"))
    monkeypatch.setenv("RANK", "1")
    parser.parse_args()
    assert capsys.readouterr() == ("", "")


GONE_STDOUT = """
import sys
from common.cli import abandon
print("a line")
try:
    sys.stdout.flush()
except OSError:
    abandon(sys.stdout)
"""


def test_a_stream_that_is_given_up_fails_no_more_when_python_ends() -> None:
    """Python flushes it again then, and would end with status 120."""
    buffered = {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", GONE_STDOUT]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            command, cwd=ROOT, env=buffered, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (0, "")
