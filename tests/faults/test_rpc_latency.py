"""rpc_latency: bad input, wrong echoes, lost calls, dead and stopped callers and callees."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from harness import ROOT, alive, launch, load, run, torchrun

LATENCY = str(ROOT / "benchmarks" / "rpc_latency.py")
DRIVER = str(ROOT / "tests" / "faults" / "rpc_driver.py")
WORLD = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--ops", "rpc_snyc"], ["unknown 'rpc_snyc'", "did you mean rpc_sync"]),
        (["--sizes", "6"], ["--sizes", "multiple of 4", "'6'", "try 8"]),
        (["--sizes", "4,big"], ["--sizes", "like 4, 64K or 16M", "'big'"]),
        (["--sizes", "0"], ["--sizes", "'0'"]),
        (["--sizes", "1024G"], ["--sizes 1024G", "GiB are free", "try --sizes 128G"]),
        (["--in-flight", "0"], ["--in-flight", "at least 1", "'0'"]),
        (["--in-flight", "4", "--ops", "rpc_sync"], ["--in-flight has no effect"]),
        (["--rpc-threads", "2,x"], ["--rpc-threads", "'x'"]),
        (["--rpc-transports", "smh"], ["--rpc-transports", "unknown 'smh'", "did you mean shm"]),
        (["--rpc-channels", "basic,auto+cma"], ["--rpc-channels", "unknown 'auto'"]),
        (["--rpc-thread", "2"], ["unknown argument '--rpc-thread'", "--rpc-threads"]),
        (["--iters", "5", "--max-seconds", "3"], ["--max-seconds has no effect with --iters"]),
        (["--resume"], ["--json PATH"]),
        (["--json", "."], ["is a directory"]),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
def test_refused(tmp_path: Path, options: list[str], expected: list[str]) -> None:
    world = [f"{name}={value}" for name, value in WORLD.items()]
    command = ["env", *world, sys.executable, LATENCY, "--device", "cpu", *options]
    done = run(command, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    for text in ["rpc_latency.py: error: ", *expected]:
        assert text in done.stderr


def test_alone() -> None:
    done = run([sys.executable, LATENCY])
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "rpc_latency.py: error: expected at least 2 ranks, a caller and a callee, got 1; "
        f"start 2: torchrun --nproc-per-node 2 {LATENCY}"
    ]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("CORRUPT", "failed: 1 of the last 1 echoes to caller 0 are not what it sent"),
        ("LOSE", "failed: the callers sent "),
    ],
)
def test_what_goes_wrong_on_the_way_fails_the_case(
    tmp_path: Path, fault: str, expected: str
) -> None:
    path = tmp_path / "report.json"
    options = ["--device", "cpu", "--sizes", "8", "--iters", "6", "--rpc-threads", "2"]
    options += ["--ops", "rpc_sync", "--json", str(path)]
    done = run(["env", f"{fault}=1", *torchrun(2), DRIVER, *options])
    assert done.returncode == 1, done.stderr
    assert [case["check"][: len(expected)] for case in load(path)["cases"]] == [expected]
    assert "rpc_sync 8  failed: " in done.stdout


LONG = ["--device", "cpu", "--sizes", "4,64K", "--ops", "rpc_sync", "--rpc-threads", "2"]
LONG += ["--max-seconds", "60", "--target-ci", "0.0001%"]


@pytest.mark.parametrize(("role", "rank"), [("caller", 1), ("callee", 2)])
def test_a_killed_rank_is_named(tmp_path: Path, role: str, rank: int) -> None:
    path = tmp_path / "report.json"
    command = [*torchrun(3), LATENCY, *LONG, "--timeout", "20", "--json", str(path)]
    with launch(command) as started:
        started.wait_for("2 threads")
        time.sleep(2)
        pids = started.ranks()
        os.kill(pids[rank], signal.SIGKILL)
        start = time.monotonic()
        assert started.wait() != 0
        assert time.monotonic() - start < 40
        host = os.uname().nodename
        text = started.output()
        assert f"rank {rank} on {host}" in text, text
        assert "rpc_sync 4 --rpc-threads 2" in text, text
        assert not any(alive(pid) for pid in pids.values())
    assert load(path)["status"] in ("failed", "interrupted")


def test_a_stopped_callee_is_named(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    command = [*torchrun(2), LATENCY, *LONG, "--timeout", "8", "--json", str(path)]
    with launch(command) as started:
        started.wait_for("2 threads")
        time.sleep(2)
        pids = started.ranks()
        os.kill(pids[1], signal.SIGSTOP)
        start = time.monotonic()
        assert started.wait() != 0
        assert time.monotonic() - start < 40
        errors = "".join(started.stderr)
        host = os.uname().nodename
        assert "HANG: no progress for" in errors, errors
        assert f"rank 1 on {host} does not answer" in errors
        case = "rpc_sync 4 --rpc-threads 2 --rpc-transports auto"
        assert f"rank 0 on {host} waits in case '{case}'" in errors
        assert not any(alive(pid) for pid in pids.values())
    assert load(path)["status"] == "failed"
