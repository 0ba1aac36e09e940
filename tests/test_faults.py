"""What docs/reliability.md promises when something goes wrong, each promise once."""

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.report import load
from tests.process import INJECT, ROOT, Bench, Process, Start, environment, free_port, python

SCRIPT = "benchmarks/ddp_sweep.py"
SMALL = ("--model", "mobilenet_v3_small", "--image-size", "32", "--batch-size", "2")
SHORT = (*SMALL, "--iters", "6", "--warmup-iters", "1", "--world-sizes", "2")
ALONE = (*SHORT[:-1], "1", "--no-breakdown")
IMPATIENT = (*SHORT, "--timeout", "5")
pytestmark = pytest.mark.faults


@pytest.mark.oldest
def test_a_stopped_rank_is_named(bench: Bench, request: pytest.FixtureRequest) -> None:
    run = bench(SCRIPT, *IMPATIENT, inject="stops", status=1)
    hang = run.err[run.err.index("HANG") :]
    _, stopped, waiting = hang.splitlines()[:3]
    assert re.match(r"rank 1 on .*1M/2R.*, block .*does not answer", stopped)
    assert re.match("rank 0 on .*waits", waiting)
    is_old = request.config.option.markexpr == "oldest"  # torch 2.6 to 2.8 record nothing
    last = "(gloo:|unknown: this torch has no record)" if is_old else "gloo:"
    assert re.search(f"last collective {last}", hang)
    assert "in time_round" in hang  # the stacks are below the headline
    # torchrun reports the first rank that ended: rank 0, or rank 1, which rank 0 has killed
    assert re.search(r"exitcode  : (3|-9)", hang)
    assert run.reason == f"HANG: no progress for 5 s; {stopped}"
    assert [case.name for case in run.report.cases] == ["no ddp"]
    assert run.report.status == "interrupted"


def test_a_stopped_rank_0_without_torchrun_is_reported_by_rank_1(tmp_path: Path) -> None:
    """Rank 0 serves the store, so that nothing can be learned from it any more."""
    marker = tmp_path / "marker"
    flags = [INJECT, "waits", str(ROOT / SCRIPT), *IMPATIENT]
    by_hand = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    by_hand |= {"MASTER_PORT": str(free_port()), "MARKER": str(marker)}
    envs = [environment(RANK=rank, LOCAL_RANK=rank, **by_hand) for rank in "01"]
    process = Process([[sys.executable, *flags]] * 2, tmp_path, envs)
    try:
        process.until(marker.exists)
        rank_0, rank_1 = process.parts
        rank_0.suspend()
        assert rank_1.wait(500) == 3
    finally:
        process.stop()
    err = (tmp_path / "err1").read_text()
    assert re.search("HANG: .* served by rank 0, has not answered for .*; rank 1 on .*1M/2R", err)


OUTSIDE = """
import itertools, os, time
import torch

calls = itertools.count(1)

class Model(torch.nn.Linear):
    seconds = 0.0

    def forward(self, x):
        time.sleep(self.seconds)
        return super().forward(x)

def make(device):
    model, x = Model(1, 1), torch.ones(2, 1)
    if next(calls) == 2 and os.environ["RANK"] == "0":  # the second call is for `no ddp`
        model.seconds = 0.2
    return model, (x,), torch.sum
"""


def test_a_rank_outside_a_case_waits_longer_than_its_own_timer(bench: Bench, here: Path) -> None:
    """`no ddp` takes 240 * 0.2 = 48 s on rank 0. Rank 1 only waits. Its timer of 1.5 * 12 + 20 =
    38 s must not end it while rank 0 makes progress."""
    (here / "outside.py").write_text(OUTSIDE)
    flags = ("--model", "outside:make", "--world-sizes", "2", "--no-breakdown")
    times = ("--iters", "240", "--warmup-iters", "1", "--timeout", "12")
    run = bench(SCRIPT, *flags, *times, cold=True)
    assert run.checks == {"no ddp": "passed", "1M/2R": "passed"}


@pytest.mark.parametrize(
    ("flags", "fault", "status", "reason", "cases"),
    [
        ((*SHORT[:-1], "4"), None, 2, "--world-sizes 4 exceeds the 2 ranks of this job", 0),
        (SHORT, "drifting-replica", 1, "the parameters of rank 1 differ from rank", 2),
        (SHORT, "full-disk", 1, "too large; the cases before this one are intact", 1),
        (SHORT, "reader-gone", 1, "error: stdout: Broken pipe; ", 0),
        (IMPATIENT, "never-arrives", 3, "HANG: rank 1 did not arrive within 5 s", 0),
        (IMPATIENT, "stuck-in-build", 3, "for 5 s; rank 1 .* setup: is behind", 1),
        (IMPATIENT, "disk-hangs", 3, r"rank 0 .* writing .*jsonl: is behind", 1),
        (SHORT, "leaves", 1, r"rank 0 lost a peer: rank 1 on .*, case '1M/2R', .*, has ended; ", 1),
        (SHORT, "rank-0-leaves", 1, "rank 1 lost a peer: rank 0 on .*'no ddp', .*, has ended; ", 0),
        (SHORT, "dies", -9, r"Signal 9 \(SIGKILL\) received", 1),
    ],
)
def test_torchrun_ends_with_the_reason(
    bench: Bench, flags: tuple[str, ...], fault: str | None, status: int, reason: str, cases: int
) -> None:
    """Its summary has the reason in one line. The report has the cases measured before."""
    run = bench(SCRIPT, *flags, inject=fault, status=1)  # torchrun's own status
    *_, line, _ = run.err.splitlines()
    assert line.startswith("  traceback : ")
    assert re.search(reason, line)
    assert f"exitcode  : {status} " in run.err
    assert (len(run.report.cases) if run.path.exists() else 0) == cases


def test_a_restart_by_torchrun_resumes(bench: Bench) -> None:
    """Rank 1 is killed in the second case. The first case is not measured again."""
    run = bench(SCRIPT, *SHORT, "--resume", inject="dies", PET_MAX_RESTARTS="1")
    assert "exitcode: -9" in run.err
    assert [case.name for case in run.report.cases] == ["no ddp", "1M/2R"]
    lines = [json.loads(line) for line in run.path.read_text().splitlines()]
    assert ["key" in line for line in lines] == [False, True, True, False]
    assert lines[0]["started_at"] == lines[1]["measured_at"] < lines[2]["measured_at"]
    assert os.listdir(run.path.parent) == ["report.jsonl"]


def test_a_report_that_is_removed_during_the_run(bench: Bench) -> None:
    """Its cases are lost, so the run fails, and no command with the path is suggested."""
    run = bench(SCRIPT, *ALONE, ranks=0, inject="report-removed", status=1)
    assert not run.path.exists()
    assert f"error: --json {run.path}: the report was removed during the run" in run.err
    assert "# report " not in run.out


@pytest.fixture
def waiting(start: Start, tmp_path: Path) -> Any:
    """A run that waits in its second case: its process and the path of its report."""
    marker, path = tmp_path / "marker", tmp_path / "a folder" / "report.jsonl"
    path.parent.mkdir()
    process = start(SCRIPT, *SHORT, "--json", str(path), inject="waits", MARKER=str(marker))
    process.until(marker.exists)
    return process, path


def test_resume_after_all_was_killed(waiting: Any, bench: Bench) -> None:
    """A rank whose torchrun is gone ends by itself; --resume measures the missing case."""
    process, path = waiting
    ranks = process.ranks()
    process.parts[0].kill()
    ranks[0].kill()
    _, alive = psutil.wait_procs(ranks.values(), timeout=500)
    assert not alive
    process.stop()
    with path.open("a") as file:
        file.write('{"key": {"cut": ')  # as after a crash in the middle of a line
    run = bench(SCRIPT, *SHORT, "--resume")
    assert [case.name for case in run.report.cases] == ["no ddp", "1M/2R"]
    assert run.report.status == "complete"


@pytest.mark.parametrize(("number", "to_ranks"), [(signal.SIGTERM, True), (signal.SIGINT, False)])
def test_a_signal(waiting: Any, number: signal.Signals, to_ranks: bool) -> None:
    """To the ranks, or twice to torchrun, as Ctrl-C does. torchrun sends its ranks SIGINT for the
    first signal and SIGTERM for the second, or only SIGTERM if the second comes early enough."""
    process, path = waiting
    ranks = process.ranks()
    for each in ranks.values() if to_ranks else process.parts * 2:
        each.send_signal(number)
    assert process.wait() != 0
    _, alive = psutil.wait_procs(ranks.values(), timeout=500)  # twice: torchrun may end before them
    assert not alive
    named = number.name if to_ranks else "SIG(INT|TERM)"
    assert re.search(f"{named}: ended after 1 case, saved in ", process.err), process.err
    assert not to_ranks or f"exitcode  : {128 + number}" in process.err
    assert load(str(path)).status == "interrupted"


@pytest.mark.oldest
def test_a_case_that_fails_on_one_rank_is_a_failed_case(bench: Bench) -> None:
    """One case fails in build, the next in a step. The case after them, on the same ranks, is
    measured, and its slow rank is named. --resume measures the failed cases."""
    flags = (*SHORT, "--iters", "30", "--comm-hook", "none,allreduce,fp16")
    run = bench(SCRIPT, *flags, inject="build-raises,step-raises,slow-rank", status=1)
    checks = {case.key["comm_hook"]: case.check for case in run.report.cases}
    memory = "failed: OutOfMemoryError: injected: out of memory (rank 1)"
    kernel = "failed: RuntimeError: injected: no kernel for this step (rank 1)"
    assert checks == {None: "passed", "none": memory, "allreduce": kernel, "fp16": "passed"}
    assert f"1M/2R none  {memory}" in run.out
    assert run.reason.startswith("2 of 4 cases failed; 1M/2R none: failed: OutOfMemoryError")
    assert run.reason.endswith(memory)
    assert run.report.status == "failed"
    last = run.report.cases[-1]
    assert last.metrics["late_ranks"] == [1]
    assert re.search(r"2 ranks (train|and) .*; rank 1 on \S+ makes the other rank wait ", run.out)
    lines = len(run.path.read_text().splitlines())
    run = bench(SCRIPT, *flags, "--resume")
    again = [*map(json.loads, run.path.read_text().splitlines()[lines:-1])]
    assert [line["key"]["comm_hook"] for line in again] == ["none", "allreduce"]
    assert {case.check for case in run.report.cases} == {"passed"}


MESHES = ("--mesh", "dp2tp2,dp4", "--global-batch", "8", "--sequence-length", "32")
MODES = ("--model", "decoder-nano", "--modes", "dcp.save,torch.save", "--paths", "{folder}")


@pytest.mark.parametrize(
    ("fault", "script", "flags", "check"),
    [
        ("twin-raises", "parallel_sweep", MESHES, "OutOfMemoryError: injected: no memory for a t"),
        ("folder-missing", "checkpoint_sweep", MODES, "ValueError: {folder}/checkpoint_sweep-"),
    ],
    ids=["twin", "folder"],
)
def test_a_failure_between_two_groups_of_a_case_is_a_failed_case(
    bench: Bench, tmp_path: Path, fault: str, script: str, flags: tuple[str, ...], check: str
) -> None:
    """The other ranks are about to create the next group, and must not wait in it for rank 1."""
    folder = str(tmp_path / "f")
    words = [flag.format(folder=folder) for flag in flags]
    words += ["--iters", "2", "--warmup-iters", "1", "--timeout", "30"]
    run = bench(f"benchmarks/{script}.py", *words, inject=fault, SAVES=folder, ranks=4, status=1)
    failed, passed = run.report.cases[-2:]
    assert failed.check.startswith(f"failed: {check.format(folder=folder)}")
    assert passed.check == "passed"


def test_a_read_only_folder_and_python_with_safe_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "read only"
    folder.mkdir(mode=0o555)
    monkeypatch.chdir(folder)
    done = python("-P", str(ROOT / "benchmarks/collectives.py"), "-b64", "-e64")
    assert done.returncode == 0, done.stderr
    assert "Out of bounds values : 0 OK" in done.stdout
