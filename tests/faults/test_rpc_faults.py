"""Trainers and servers that fail, die or stop: who, where, within the timeout."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from harness import (
    ROOT,
    alive,
    launch,
    launch_without_torchrun,
    load,
    run,
    torchrun,
)

DDP_RPC = str(ROOT / "benchmarks" / "ddp_rpc.py")
BATCH_UPDATE = str(ROOT / "benchmarks" / "batch_update_ps.py")
BATCH_DRIVER = str(ROOT / "tests" / "faults" / "batch_update_driver.py")
HOST = os.uname().nodename
LONG = ["--device", "cpu", "--max-seconds", "60", "--target-ci", "0.0001%"]
# of each script the command, and the ranks of a trainer that is not rank 0 and of a server
SCRIPTS = {
    "ddp_rpc": ([DDP_RPC, "--autograd", "manual,distributed", *LONG], 1, 2),
    "batch_update_ps": ([BATCH_UPDATE, "--payload", "tensors", *LONG], 1, 3),
}


def wait_for_the_timed_run(seconds: float = 6) -> None:
    """Its start is not printed. Long enough for any machine, and the runs last a minute."""
    time.sleep(seconds)


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("role", ["trainer", "server"])
def test_a_killed_process_is_named(tmp_path: Path, name: str, role: str) -> None:
    command, trainer, server = SCRIPTS[name]
    rank = trainer if role == "trainer" else server
    path = tmp_path / "report.json"
    with launch([*torchrun(4), *command, "--json", str(path)]) as started:
        started.wait_for("# topology")
        wait_for_the_timed_run()
        pids = started.ranks()
        start = time.monotonic()
        os.kill(pids[rank], signal.SIGKILL)
        assert started.wait(60) != 0
        assert time.monotonic() - start < 40
        report = load(path)
        assert report["status"] == "interrupted", started.output()
        serves = "serves " if role == "server" else ""
        assert f"rank {rank} on {HOST} died in case '{serves}" in report["reason"], report["reason"]
        assert f"# interrupted ({report['reason']})" in "".join(started.stdout)
        assert not any(alive(pid) for pid in pids.values())


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_stopped_server_is_named(tmp_path: Path, name: str) -> None:
    command, _, server = SCRIPTS[name]
    path = tmp_path / "report.json"
    options = ["--timeout", "8", "--json", str(path)]
    with launch([*torchrun(4), *command, *options]) as started:
        started.wait_for("# topology")
        wait_for_the_timed_run()
        pids = started.ranks()
        start = time.monotonic()
        os.kill(pids[server], signal.SIGSTOP)
        assert started.wait(60) != 0
        assert time.monotonic() - start < 40
        errors = "".join(started.stderr)
        assert "HANG: no progress for" in errors, errors
        assert f"rank {server} on {HOST} does not answer" in errors
        assert not any(alive(pid) for pid in pids.values())
        assert load(path)["status"] == "failed"


def test_the_others_finish_without_a_trainer_that_died(tmp_path: Path) -> None:
    """Without a launcher that ends them. Their numbers are in the report, and who is missing."""
    path = tmp_path / "report.json"
    command = [BATCH_DRIVER, "--payload", "tensors", "--device", "cpu", "--json", str(path)]
    command += ["--max-seconds", "10", "--target-ci", "0.0001%", "--straggler-timeout", "2"]
    with launch_without_torchrun(4, command) as ranks:
        ranks[0].wait_for("# a run starts", times=2)
        time.sleep(2)
        ranks[1].process.kill()
        statuses = [rank.wait(80) for rank in ranks]
        assert statuses[1] == -signal.SIGKILL
        assert statuses[0] == 1, ranks[0].output()
        assert all(statuses)
    report = load(path)
    assert report["status"] == "failed"
    assert f"rank 1 on {HOST} does not answer" in report["reason"]
    (case,) = report["cases"]
    assert case["check"].startswith(f"failed: trainer1 on {HOST} was left out after ")
    assert "the others went on to" in case["check"]
    assert case["metrics"]["updates"] > 0
    assert case["metrics"]["updates_per_s"] > 0


def test_the_others_finish_without_a_trainer_that_fails(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    options = ["--device", "cpu", "--iters", "300", "--straggler-timeout", "1", "--json", str(path)]
    done = run(["env", "FAIL_ON_RANK=1", *torchrun(4), BATCH_DRIVER, *options], timeout=100)
    assert done.returncode != 0
    first, second = load(path)["cases"]
    assert "trainer1: MemoryError: no room for the gradients" in first["check"], first["check"]
    assert f"trainer1 on {HOST} was left out after" in first["check"]
    assert first["metrics"]["updates"] == 300
    assert second["check"] == "passed"  # the 60th gradient is over


@pytest.mark.parametrize(
    ("script", "nproc", "options", "expected"),
    [
        (DDP_RPC, 2, [], ["make 3 processes", "there are 2", "torchrun --nproc-per-node 3"]),
        (DDP_RPC, 4, ["--number-trainers", "4"], ["make 6 processes", "--nproc-per-node 6"]),
        (DDP_RPC, 6, ["--number-ps", "1", "--number-trainers", "2"], ["make 4 processes"]),
        (DDP_RPC, 1, ["--number-ps", "0"], ["--number-ps", "at least 1", "'0'"]),
        (DDP_RPC, 1, ["--number-trainers", "-1"], ["--number-trainers", "'-1'"]),
        (DDP_RPC, 1, ["--embedding-dim", "x"], ["--embedding-dim", "'x'"]),
        (DDP_RPC, 1, ["--lookup", "paralel"], ["unknown 'paralel'", "parallel"]),
        (DDP_RPC, 1, ["--autograd", "auto"], ["unknown 'auto'", "manual"]),
        (DDP_RPC, 1, ["--epochs", "3", "--min-iters", "2"], ["no effect with --iters"]),
        (DDP_RPC, 1, ["--rpc-transports", "tcp"], ["unknown 'tcp'", "shm, uv"]),
        (DDP_RPC, 1, ["--rpc-channels", "basics"], ["unknown 'basics'", "basic"]),
        (DDP_RPC, 1, ["--rpc-threads", "0"], ["--rpc-threads", "'0'"]),
        (DDP_RPC, 1, ["--rpc-threads", "99999"], ["at most 1024 threads"]),
        (DDP_RPC, 1, ["--rpc-timeout", "-1"], ["--rpc-timeout", "'-1'"]),
        (DDP_RPC, 1, ["--compare-original", "--lookup", "parallel"], ["--lookup has no effect"]),
        (DDP_RPC, 4, ["--server-device", "cuda", "--device", "cpu"], ["no CUDA device"]),
        (DDP_RPC, 4, ["--backend", "nccl", "--device", "cpu"], ["nccl", "--backend gloo"]),
        (BATCH_UPDATE, 1, [], ["make 2 processes", "there is 1", "--nproc-per-node 2"]),
        (BATCH_UPDATE, 3, ["--batch-update-size", "3"], ["wait for ever", "--batch-update-size 2"]),
        (BATCH_UPDATE, 2, ["--compare-original", "--resume"], ["--resume", "--json PATH"]),
        (BATCH_UPDATE, 2, ["--in-features", "10000000000"], ["needs about", "--in-features 1000"]),
        (DDP_RPC, 4, ["--number-embeddings", "100000000000"], ["needs 25600000000000 bytes"]),
        (BATCH_UPDATE, 1, ["--rounds", "3"], ["--rounds has no effect"]),
        (BATCH_UPDATE, 1, ["--payload", "modul"], ["unknown 'modul'", "module"]),
        (BATCH_UPDATE, 1, ["--in-features", "0"], ["--in-features", "'0'"]),
        (BATCH_UPDATE, 1, ["--straggler-timeout", "0"], ["--straggler-timeout", "'0'"]),
        (BATCH_UPDATE, 1, ["--compare-original", "--payload", "module"], ["no effect"]),
        (BATCH_UPDATE, 1, ["--ntrainers", "3"], ["unknown argument '--ntrainers'"]),
        (BATCH_UPDATE, 2, ["--device", "cuda"], ["no CUDA device"]),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
def test_refused(
    tmp_path: Path, script: str, nproc: int, options: list[str], expected: list[str]
) -> None:
    """Rank 0 of a world of `nproc` refuses before it meets anybody."""
    world = [f"WORLD_SIZE={nproc}", f"LOCAL_WORLD_SIZE={nproc}", "RANK=0", "LOCAL_RANK=0"]
    done = run(["env", *world, sys.executable, script, *options], cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    for text in expected:
        assert text in lines[0]


def test_a_report_of_another_benchmark_is_not_resumed(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    document = {"schema": "torchrun-bench/1", "benchmark": "ddp_rpc", "status": "complete"}
    document |= {"argv": [], "started_at": "", "environment": {}, "cases": []}
    path.write_text(json.dumps(document))
    world = ["WORLD_SIZE=2", "LOCAL_WORLD_SIZE=2", "RANK=0", "LOCAL_RANK=0"]
    command = ["env", *world, sys.executable, BATCH_UPDATE, "--json", str(path), "--resume"]
    done = run(command, cwd=tmp_path)
    assert done.returncode == 2
    assert "is a report of ddp_rpc, not of batch_update_ps" in done.stderr
