"""What is promised when things go wrong (docs/reliability.md), each once."""

import json
import os
import pty
import re
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from common.report import load
from tests.process import ROOT, command_of, environment

SCRIPT = "benchmarks/ddp_sweep.py"
SMALL = ("--model", "mobilenet_v3_small", "--image-size", "32", "--batch-size", "2")
SHORT = (*SMALL, "--iters", "6", "--warmup-iters", "1", "--world-sizes", "2")
pytestmark = pytest.mark.faults


def test_a_stopped_rank_is_named(bench: Callable[..., Any]) -> None:
    run = bench(SCRIPT, *SHORT, "--timeout", "8", inject="stops")
    assert run.status != 0
    _, stopped, waiting = run.err[run.err.index("HANG") :].splitlines()[:3]
    assert stopped.startswith("rank 1 on ")
    assert "does not answer" in stopped
    assert "1M/2G" in stopped
    assert ", block " in stopped
    assert waiting.startswith("rank 0 on ")
    assert "waits" in waiting
    headline, stack = run.err.index("HANG"), run.err.index("in time_round")
    assert headline < stack
    assert "newest collective gloo:" in run.err
    # torchrun's summary has what it sees first: rank 0 that ends, or rank 1 that rank 0 has killed
    assert re.search(r"exitcode  : (3|-9)", run.err)
    assert run.reason == f"HANG: no progress for 8 s; {stopped}"
    assert [case.name for case in run.report.cases] == ["no ddp"]
    assert run.report.status == "interrupted"


@pytest.mark.parametrize(
    ("script", "flags", "fault", "status", "reason", "cases"),
    [
        ("ddp_sweep", ("--modle", "x"), None, 2, "unknown argument '--modle'; did you", 0),
        ("ddp_sweep", (*SHORT[:-1], "4"), None, 2, "--world-sizes 4 is more than 2 ranks; e.g.", 0),
        ("replay", ("/no/where",), None, 2, "FOLDER /no/where/fr_0.json: No such file", 0),
        ("ddp_sweep", SHORT, "drifting-replica", 1, "the parameters of rank 1 differ from rank", 2),
        ("collectives", ("-e", "64", "--min-busbw", "1e6"), None, 1, "of --min-busbw 1e+06", 4),
        ("ddp_sweep", SHORT, "full-disk", 1, "too large; it holds the cases before this one", 1),
        ("ddp_sweep", SHORT, "reader-gone", 1, "error: stdout: Broken pipe; ", 0),
        ("ddp_sweep", SHORT, "never-arrives", 3, "HANG: no sign of rank 1 in 8 s", 0),
        ("ddp_sweep", SHORT, "stuck-in-build", 3, "for 8 s; rank 1 .* set up: did not arrive", 1),
        ("ddp_sweep", SHORT, "disk-hangs", 3, r"rank 0 .* writes .*jsonl: did not arrive", 1),
    ],
)
def test_torchrun_ends_with_the_reason(
    bench: Callable[..., Any],
    script: str,
    flags: tuple[str, ...],
    fault: str | None,
    status: int,
    reason: str,
    cases: int,
) -> None:
    """In one line, behind its traceback: mistakes, failed cases, verdicts, hangs. The report has
    the cases that were measured."""
    run = bench(f"benchmarks/{script}.py", "--timeout", "8", *flags, inject=fault)
    assert run.status == 1  # torchrun's own
    *_, line, _ = run.err.splitlines()
    assert line.startswith("  traceback : ")
    assert re.search(reason.replace("+", r"\+"), line)
    assert f"exitcode  : {status} " in run.err
    assert (len(run.report.cases) if run.path.exists() else 0) == cases


def test_a_restart_by_torchrun_goes_on(bench: Callable[..., Any]) -> None:
    """Rank 1 is killed in the second case; the first one is not measured again."""
    run = bench(SCRIPT, *SHORT, inject="dies-at-first", PET_MAX_RESTARTS="1")
    assert run.status == 0, run.err
    assert "exitcode: -9" in run.err
    assert [case.name for case in run.report.cases] == ["no ddp", "1M/2G"]
    lines = [json.loads(line) for line in run.path.read_text().splitlines()]
    assert ["key" in line for line in lines] == [False, True, True, False]
    assert os.listdir(run.path.parent) == ["report.jsonl"]


def test_a_killed_rank_ends_the_run(bench: Callable[..., Any]) -> None:
    run = bench(SCRIPT, *SHORT, inject="dies", cold=True)
    assert run.status != 0
    assert "rank      : 1" in run.err  # torchrun's summary
    assert [case.name for case in run.report.cases] == ["no ddp"]
    assert run.report.status == "interrupted"


def test_resume_measures_a_failed_case_again(bench: Callable[..., Any]) -> None:
    flags = ("--collective", "all_reduce", "-b", "64", "-e", "128", "--iters", "6")
    first = bench("benchmarks/collectives.py", *flags, ranks=0)
    head, failed, *others = [json.loads(line) for line in first.path.read_text().splitlines()]
    failed |= {"metrics": {}, "check": "failed: RuntimeError: out of luck"}
    lines = [json.dumps(line) + "\n" for line in (head, failed, *others)]
    first.path.write_text("".join(lines))
    assert [case.failed for case in first.report.cases] == [True, False]
    run = bench("benchmarks/collectives.py", *flags, "--resume", ranks=0)
    assert run.status == 0, run.err
    # of the two cases the failed one was measured again
    again = [json.loads(line) for line in run.path.read_text().splitlines()[len(lines) :]]
    assert [line["key"] for line in again[:-1]] == [failed["key"]]
    assert sorted(case.check for case in run.report.cases) == ["passed", "passed"]


def test_everything_is_killed_and_resume_goes_on(
    start: Callable[..., Any], bench: Callable[..., Any], tmp_path: Path
) -> None:
    """Until then nothing listens beyond loopback; a rank whose torchrun is gone ends by itself."""
    marker, path = tmp_path / "marker", tmp_path / "a folder" / "report.jsonl"
    path.parent.mkdir()
    flags = (*SHORT, "--json", str(path))
    process = start(SCRIPT, *flags, inject="waits", cold=True, MARKER=str(marker))
    process.until(marker.exists)
    ranks = process.ranks()
    for connection in [c for rank in ranks.values() for c in rank.net_connections("inet")]:
        if connection.status == psutil.CONN_LISTEN:
            assert connection.laddr.ip in ("127.0.0.1", "::1"), connection
    process.parts[0].kill()
    ranks[0].kill()
    _, alive = psutil.wait_procs(ranks.values(), timeout=20)
    assert not alive
    with path.open("a") as file:
        file.write('{"key": {"cut": ')  # as a crash leaves it in the middle of a line
    run = bench(SCRIPT, *SHORT, "--resume")
    assert run.status == 0, run.err
    assert [case.name for case in run.report.cases] == ["no ddp", "1M/2G"]
    assert run.report.status == "complete"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_ranks(
    start: Callable[..., Any], tmp_path: Path, number: signal.Signals
) -> None:
    marker, path = tmp_path / "marker", tmp_path / "report.jsonl"
    process = start(SCRIPT, *SHORT, "--json", str(path), inject="waits", MARKER=str(marker))
    process.until(marker.exists)
    ranks = process.ranks()
    for rank in ranks.values():
        rank.send_signal(number)
    assert process.wait(45) != 0
    assert f"{number.name}: 1 case is measured and in " in process.err
    assert f"exitcode  : {128 + number}" in process.err
    assert not any(rank.is_running() for rank in ranks.values())
    assert load(str(path)).status == "interrupted"


def test_ctrl_c_in_a_terminal_twice(tmp_path: Path) -> None:
    """The whole foreground group has the signal at once: torchrun and the ranks."""
    marker, path = tmp_path / "marker", tmp_path / "report.jsonl"
    command = command_of(SCRIPT, *SHORT, "--json", str(path), inject="waits")[0]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(command[0], command, environment(MARKER=str(marker)))
    said = b""

    def listen() -> bool:
        nonlocal said
        if not select.select([terminal], [], [], 0.2)[0]:
            return True
        try:
            said += os.read(terminal, 65536)
        except OSError:  # closed: all have ended
            return False
        return True

    while not marker.exists():
        assert listen(), said.decode()
    children = psutil.Process(pid).children(recursive=True)
    os.write(terminal, b"\x03\x03")
    while listen():
        pass
    os.close(terminal)
    assert os.waitpid(pid, 0)[1] != 0
    assert b"SIGINT: 1 case is measured and in " in said
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    assert len(load(str(path)).cases) == 1


def test_a_case_that_fails_on_one_rank_is_a_row(bench: Callable[..., Any]) -> None:
    """In build, then in a step; the next case is measured, and its slow rank is named."""
    flags = (*SHORT, "--iters", "30", "--comm-hook", "none,allreduce,fp16")
    run = bench(SCRIPT, *flags, inject="build-raises,step-raises,slow-rank")
    checks = {case.key["comm_hook"]: case.check for case in run.report.cases}
    memory = "failed: OutOfMemoryError: injected: out of memory (rank 1)"
    kernel = "failed: RuntimeError: injected: no kernel for this step (rank 1)"
    assert checks == {None: "passed", "none": memory, "allreduce": kernel, "fp16": "passed"}
    assert f"1M/2G none  {memory}" in run.out
    assert run.reason.startswith("2 of 4 cases failed; 1M/2G none: failed: OutOfMemoryError")
    assert run.reason.endswith(memory)
    assert run.status != 0
    assert run.report.status == "failed"
    last = run.report.cases[-1]
    assert last.metrics["straggler_rank"] == 1
    assert last.metrics["late_s"].value > 0


def test_the_case_after_a_failed_one_has_new_groups(bench: Callable[..., Any]) -> None:
    """All cases are over the same ranks. The first one's groups live on, the second's do not."""
    flags = ("-b", "1K", "-e", "8K", "-d", "bfloat16", "-n", "1", "--iters", "6", "-w", "1")
    run = bench("benchmarks/collectives.py", *flags, inject="collective-raises")
    reason = "failed: RuntimeError: injected: the link is down (rank 1)"
    assert [case.check for case in run.report.cases] == ["passed", reason, "passed", "passed"]
    assert run.status == 1


MESHES = ("--mesh", "dp2tp2,dp4", "--global-batch", "8", "--sequence-length", "32")
MODES = ("--model", "decoder-nano", "--modes", "dcp.save,torch.save", "--paths", "{folder}")


@pytest.mark.parametrize(
    ("fault", "script", "flags", "check"),
    [
        ("twin-raises", "parallel_sweep", MESHES, "OutOfMemoryError: injected: no memory for a t"),
        ("team-raises", "parallel_sweep", MESHES, "RuntimeError: injected: no memory for a team "),
        ("folder-missing", "checkpoint_sweep", MODES, "ValueError: there is no {folder}"),
    ],
    ids=["twin", "mesh", "folder"],
)
def test_a_failure_between_two_groups_of_a_case_is_a_row(
    bench: Callable[..., Any],
    tmp_path: Path,
    fault: str,
    script: str,
    flags: tuple[str, ...],
    check: str,
) -> None:
    """The other ranks are about to make the next group. They do not wait in it for rank 1."""
    folder = str(tmp_path / "f")
    words = [flag.format(folder=folder) for flag in flags]
    words += ["--iters", "2", "--warmup-iters", "1", "--timeout", "30"]
    run = bench(f"benchmarks/{script}.py", *words, inject=fault, SAVES=folder, ranks=4)
    assert run.status == 1, run.out + run.err
    assert run.report.status == "failed"
    failed, passed = run.report.cases[-2:]
    assert failed.check.startswith(f"failed: {check.format(folder=folder)}")
    assert passed.check == "passed"


def test_a_disk_that_is_full_before_the_first_case(tmp_path: Path) -> None:
    report = tmp_path / "report.jsonl"
    (command,) = command_of(SCRIPT, *SHORT[:-2], "--json", str(report), ranks=0)
    done = subprocess.run(
        command,
        env=environment(),
        preexec_fn=partial(resource.setrlimit, resource.RLIMIT_FSIZE, (100, 100)),
        capture_output=True,
        text=True,
        timeout=240,
    )
    said = f"--json {report}: File too large; nothing was measured, and what was there stays\n"
    assert (done.returncode, done.stderr) == (1, f"ddp_sweep.py: error: {said}")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("log-disk-full", "error: stdout: No space left on device"),
        ("stdout-closed", "error: stdout: Bad file descriptor"),
    ],
)
def test_a_stdout_that_is_gone(bench: Callable[..., Any], fault: str, words: str) -> None:
    """The run ends in order. Without a report the line says less."""
    run = bench(SCRIPT, *SHORT[:-2], ranks=0, inject=fault, json=False)
    assert (run.status, run.err) == (1, f"ddp_sweep.py: {words}\n")


def test_closed_streams_of_a_shell(tmp_path: Path) -> None:
    """No file that the run opens gets the numbers 0 to 2, where it would be written into."""
    flags = (*SHORT[:-2], "--no-breakdown", "--world-sizes", "1", "--json", "report.jsonl")
    for closed, status in (("<&- >&- 2>&-", 1), ("<&- 2>&-", 0)):
        words = ["sh", "-c", f'exec "$@" {closed}', "sh", *command_of(SCRIPT, *flags, ranks=0)[0]]
        done = subprocess.run(words, env=environment(), cwd=tmp_path, timeout=240)
        assert done.returncode == status, closed
    report = load(str(tmp_path / "report.jsonl"))
    assert report.status == "complete"
    assert report.cases


def test_worlds_of_one(bench: Callable[..., Any]) -> None:
    run = bench(SCRIPT, *SHORT, ranks=0, SLURM_STEP_NUM_TASKS="4")
    assert run.status == 2
    assert "SLURM_STEP_NUM_TASKS says 4 tasks, but each would run by itself" in run.err


def test_two_agents_on_one_host(bench: Callable[..., Any]) -> None:
    run = bench(SCRIPT, *SHORT[:-2], "--no-breakdown", ranks=2, nodes=2)
    assert run.status == 0, run.err
    names = [case.name for case in run.report.cases]
    assert names == ["no ddp", "1M/1G", "1M/2G", "2M/2G (4)"]


def test_a_read_only_folder_and_python_without_its_path(tmp_path: Path) -> None:
    folder = tmp_path / "read only"
    folder.mkdir(mode=0o555)
    command = [sys.executable, "-P", str(ROOT / SCRIPT), *SHORT[:-2], "--no-breakdown"]
    done = subprocess.run(
        command, env=environment(), cwd=folder, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert "1M/1G" in done.stdout
