"""Signals, dead and stopped ranks, failing cases, a full disk: what must survive each."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import (
    ROOT,
    SWEEP,
    TINY,
    alive,
    children,
    environment,
    free_port,
    launch,
    launch_without_torchrun,
    load,
    run,
    slow,
    torchrun,
)

# long enough that the last case is still running when the signal comes
LONG = [*TINY, "--device", "cpu", "--max-seconds", "30", "--target-ci", "0.01%"]


def sweep(path: Path, *torchrun_options: str, nproc: int = 2) -> list[str]:
    """A sweep whose first two cases come at once and whose last one takes long."""
    driver = str(ROOT / "tests" / "faults" / "driver.py")
    return [*torchrun(nproc, *torchrun_options), driver, *LONG, "--json", str(path)]


def labels(path: Path) -> list[str]:
    return [case["key"]["label"] for case in load(path)["cases"]]


@pytest.mark.parametrize(
    ("target", "number"),
    [
        ("torchrun", signal.SIGINT),
        ("torchrun", signal.SIGTERM),
        ("rank 0", signal.SIGINT),
        pytest.param("rank 0", signal.SIGTERM, marks=slow),
        pytest.param("rank 1", signal.SIGINT, marks=slow),
        ("rank 1", signal.SIGTERM),
    ],
)
def test_interrupted(tmp_path: Path, number: signal.Signals, target: str) -> None:
    path = tmp_path / "report.json"
    with launch(sweep(path)) as started:
        started.wait_for("1M/1G")
        time.sleep(1)
        pids = {"torchrun": started.process.pid}
        pids |= {f"rank {rank}": pid for rank, pid in started.ranks().items()}
        os.kill(pids[target], number)
        assert started.wait() != 0
        report = load(path)
        assert report["status"] == "interrupted", started.output()
        assert labels(path) == ["no ddp", "1M/1G"]
        assert {case["check"] for case in report["cases"]} == {"passed"}
        text = "".join(started.stdout)
        assert "Why: mobilenet_v3_small" in text, started.output()
        assert f"# interrupted ({number.name}" in text
        assert not any(alive(pid) for pid in pids.values())


def test_ranks_end_with_their_agent(tmp_path: Path) -> None:
    """torchrun's agent, killed, can end nobody: the kernel sends its ranks a SIGTERM."""
    path = tmp_path / "report.json"
    with launch(sweep(path)) as started:
        started.wait_for("1M/1G")
        time.sleep(1)
        ranks = started.ranks()
        os.kill(started.process.pid, signal.SIGKILL)
        limit = time.monotonic() + 30
        while any(map(alive, ranks.values())):
            assert time.monotonic() < limit, started.output()
            time.sleep(0.1)
        assert started.wait() == -signal.SIGKILL
    agent = started.process.pid
    assert load(path)["status"] == "interrupted", started.output()
    assert labels(path) == ["no ddp", "1M/1G"]
    assert f", after the process that started it ({agent}) died" in "".join(started.stdout), (
        started.output()
    )


def test_a_rank_whose_parent_dies_without_torchrun_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    script = shlex.join([sys.executable, SWEEP, *TINY, "--device", "cpu", "--iters", "6"])
    assert run(["sh", "-c", f"{script} --json {path} >/dev/null 2>&1 &"]).returncode == 0
    limit = time.monotonic() + 90
    while not (path.exists() and load(path)["status"] == "complete"):
        assert time.monotonic() < limit
        time.sleep(0.2)


def test_exit_status_of_a_signal(tmp_path: Path) -> None:
    """Without torchrun, whose own status hides it."""
    driver = str(ROOT / "tests" / "faults" / "driver.py")
    for number, status in ((signal.SIGTERM, 143), (signal.SIGUSR1, 138)):
        path = tmp_path / f"{status}.json"
        command = [sys.executable, driver, *LONG, "--json", str(path)]
        with launch(command) as started:
            started.wait_for("no ddp")
            started.process.send_signal(number)
            assert started.wait() == status, started.output()
        assert load(path)["status"] == "interrupted"


def test_a_killed_rank_is_restarted_and_the_sweep_resumed(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    with launch([*sweep(path, "--max-restarts", "2"), "--max-seconds", "10"]) as started:
        started.wait_for("1M/1G")
        time.sleep(1)
        first = load(path)
        os.kill(started.ranks()[1], signal.SIGKILL)
        assert started.wait() == 0, started.output()
    report = load(path)
    assert report["status"] == "complete"
    assert labels(path) == ["no ddp", "1M/1G", "1M/2G"]
    assert report["cases"][:2] == first["cases"]  # kept, not measured again
    assert report["started_at"] == first["started_at"]


@pytest.mark.parametrize("rendezvous", [pytest.param("static", marks=slow), "c10d"])
def test_two_agents_restart_together(tmp_path: Path, rendezvous: str) -> None:
    """Although rank 0 waits for the dead rank in the store, for as long as --timeout.

    With c10d one agent restarts for the other one's sake, and does not count that.
    """
    path = tmp_path / "report.json"
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--max-restarts", "2"]
    port = free_port()
    if rendezvous == "static":
        agent += ["--master-addr", "127.0.0.1", "--master-port", str(port), "--node-rank"]
    else:
        agent += [
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            f"127.0.0.1:{port}",
            "--rdzv-id",
            "x",
        ]
        agent += ["--local-addr", "127.0.0.1", "--monitor-interval"]  # in seconds
    driver = str(ROOT / "tests" / "faults" / "driver.py")
    script = [driver, *TINY, "--device", "cpu", "--iters", "6", "--json", str(path)]
    command = ["env", "GLOO_SOCKET_IFNAME=lo", "DIE_ON_RANK=1", *agent]
    last = "0" if rendezvous == "static" else "1"
    with launch([*command, last, *script]) as first, launch([*command, "1", *script]) as second:
        assert first.wait(200) == 0, first.output()  # --timeout is 300
        assert second.wait(200) == 0, second.output()
    assert labels(path) == ["no ddp", "1M/1G", "2M/1G"]
    assert load(path)["status"] == "complete"
    assert not (tmp_path / "report.json.bak").exists()  # it was resumed


def test_a_restart_leaves_the_report_of_another_job_alone(tmp_path: Path) -> None:
    """What an earlier run has measured is not this one's, unless --resume says so."""
    path = tmp_path / "report.json"
    options = ["--device", "cpu", "--iters", "6", "--no-breakdown", "--json", str(path)]
    command = [SWEEP, *TINY, *options]
    # not --standalone: torchrun's default id of a run is the same for all
    agent = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1"]
    assert run([*agent, "--master-port", str(free_port()), *command]).returncode == 0
    first = load(path)
    restarted = ["env", "TORCHELASTIC_RESTART_COUNT=1", "TORCHELASTIC_RUN_ID=none"]
    again = run([*restarted, sys.executable, *command])
    assert again.returncode == 0, again.stderr
    assert load(path)["cases"] != first["cases"]
    assert load(tmp_path / "report.json.bak") == first


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_rank_is_named(tmp_path: Path, stopped: int) -> None:
    path = tmp_path / "report.json"
    with launch([*sweep(path, nproc=3), "--timeout", "15"]) as started:
        started.wait_for("1M/2G")
        time.sleep(1)
        ranks = started.ranks()
        agent = started.process.pid
        assert children(agent)
        os.kill(ranks[stopped], signal.SIGSTOP)
        start = time.monotonic()
        assert started.wait() != 0
        assert time.monotonic() - start < 40  # torchrun alone would wait for 30 minutes
        errors = "".join(started.stderr)
        host = os.uname().nodename
        assert "HANG: no progress for" in errors
        assert f"rank {stopped} on {host} does not answer" in errors
        assert "in case 'mobilenet_v3_small fp32 1M/3G 25MB none', phase '" in errors
        for rank in {0, 1, 2} - {stopped}:
            assert f"[rank {rank} {host}] in case" in errors
            assert f"rank {rank} on {host} waits" in errors
        assert "run_case" in errors  # the stacks
        assert "exitcode  : 3" in errors
        assert not any(alive(pid) for pid in ranks.values())
    cases = load(path)
    assert [case["key"]["label"] for case in cases["cases"]] == ["no ddp", "1M/1G", "1M/2G"]
    assert cases["status"] == ("running" if stopped == 0 else "failed")


def test_a_stopped_rank_that_serves_the_store(tmp_path: Path) -> None:
    """Nobody can ask who else is there; each rank ends by itself, and says what it knows."""
    path = tmp_path / "report.json"
    script = [str(ROOT / "tests" / "faults" / "driver.py"), *LONG, "--json", str(path)]
    with launch_without_torchrun(2, [*script, "--timeout", "10"]) as ranks:
        ranks[0].wait_for("1M/1G")
        time.sleep(1)
        os.kill(ranks[0].process.pid, signal.SIGSTOP)
        assert ranks[1].wait(60) == 3
        text = ranks[1].output()
    assert re.search(r"HANG: no answer for \d+ s: the rendezvous store of rank 0 at 127", text), (
        text
    )
    assert "out of reach; this rank was in case 'mobilenet_v3_small fp32 1M/2G 25MB none'" in text
    assert labels(path) == ["no ddp", "1M/1G"]


def test_a_rank_that_never_arrives_is_named(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    done = run(["env", "LATE_RANK=2", *sweep(path, nproc=3), "--timeout", "12"])
    assert done.returncode != 0
    assert "HANG at the start: rank 2 of 3 did not arrive in 12 s" in done.stderr
    assert "exitcode  : 3" in done.stderr
    assert not path.exists()


@pytest.mark.parametrize("rank", [pytest.param(0, marks=slow), 1])
def test_a_case_that_fails_on_one_rank(tmp_path: Path, rank: int) -> None:
    """Its peers sit in a collective; they must not wait for ever, and the sweep must go on."""
    path = tmp_path / "report.json"
    driver = str(ROOT / "tests" / "faults" / "driver.py")
    options = [*TINY, "--device", "cpu", "--iters", "6", "--json", str(path), "--timeout", "60"]
    command = ["env", f"FAIL_ON_RANK={rank}", *torchrun(3), driver, *options]
    done = run(command, timeout=100)
    assert done.returncode != 0
    report = load(path)
    assert report["status"] == "failed"
    checks = {case["key"]["label"]: case["check"] for case in report["cases"]}
    assert checks["1M/2G"] == f"failed: OutOfMemoryError: no more memory (rank {rank})"
    assert checks["1M/3G"] == "passed"
    assert "exitcode  : 1" in done.stderr


def test_parameters_that_differ_fail_the_case(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    driver = str(ROOT / "tests" / "faults" / "driver.py")
    options = [*TINY, "--device", "cpu", "--iters", "6", "--json", str(path)]
    done = run(["env", "DIVERGE_ON_RANK=1", *torchrun(2), driver, *options])
    assert done.returncode != 0
    checks = {case["key"]["label"]: case["check"] for case in load(path)["cases"]}
    assert checks["1M/1G"] == "passed"
    assert "the parameters of rank 1 differ from rank 0's" in checks["1M/2G"]


@pytest.mark.parametrize("sink", ["> /dev/full", pytest.param("| head -n 1", marks=slow)])
def test_without_a_stdout_the_report_is_still_complete(tmp_path: Path, sink: str) -> None:
    path = tmp_path / "report.json"
    options = [*TINY, "--device", "cpu", "--iters", "6", "--json", str(path)]
    command = f"set -o pipefail; {shlex.join([sys.executable, SWEEP, *options])} {sink}"
    done = run(["bash", "-c", command])
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if "error" in line.lower()]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: cannot print the tables: ")
    assert load(path)["status"] == "complete"
    assert len(load(path)["cases"]) == 2


def test_a_full_disk_leaves_the_last_report(tmp_path: Path) -> None:
    """On a real file system without space; needs root to mount one."""
    room = tmp_path / "small"
    room.mkdir()
    script = f"""
        mount -t tmpfs -o size=24k tmpfs {room} || exit 77
        {sys.executable} {SWEEP} {" ".join(TINY)} --device cpu --iters 40 \
            --bucket-size 1,2,3,4 --json {room}/report.json
        status=$?
        cp {room}/report.json {tmp_path}/copy.json
        ls -A {room} > {tmp_path}/files
        exit $status
    """
    done = subprocess.run(
        ["unshare", "--mount", "bash", "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(),
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("cannot mount a file system here")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "No space left on device; its previous version is intact" in done.stderr
    report = load(tmp_path / "copy.json")
    assert 0 < len(report["cases"]) < 5
    assert (tmp_path / "files").read_text().split() == ["report.json"]
    assert "1M/1G 4MB" in done.stdout  # the sweep went on
