"""collectives.py: wrong data, a rank that fails or stops, an interruption."""

import os
import signal
import time
from pathlib import Path

import pytest
from harness import COLLECTIVES, P2P_MATRIX, ROOT, launch, load, run, slow, torchrun

from common.bandwidth import COLLECTIVES as NAMES

DRIVER = str(ROOT / "tests" / "faults" / "corrupting.py")
QUICK = ["--device", "cpu", "-n", "4", "-w", "1", "--max-seconds", "0.001", "--cache-warm"]


def test_one_wrong_value_is_counted_in_every_operation(tmp_path: Path) -> None:
    """In place and out of place: 1 wrong each. Rank 1 is the root, so that it receives."""
    path = tmp_path / "r.json"
    options = [*QUICK, "--collective", "all", "-b", "64", "-e", "64", "-r", "1"]
    done = run(["env", "CORRUPT_RANK=1", *torchrun(2), DRIVER, *options, "--json", str(path)])
    assert done.returncode == 1
    report = load(path)
    assert report["status"] == "failed"
    assert [case["key"]["collective"] for case in report["cases"]] == list(NAMES)
    for case in report["cases"]:
        name, metrics = case["key"]["collective"], case["metrics"]
        both = "in_place_time_s" in metrics
        if name == "barrier":  # each rank goes on before the other has come, or one does
            assert metrics["out_of_place_wrong"] in (1, 2)
            continue
        assert metrics["out_of_place_wrong"] == 1, case
        assert metrics.get("in_place_wrong", 1) == 1, case
        assert case["check"] == f"failed: {1 + both} wrong values"
    assert "# Out of bounds values : " in done.stdout
    assert " FAILED\n" in done.stdout
    assert "exitcode  : 1" in done.stderr


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=slow)])
def test_a_size_that_fails_on_one_rank(tmp_path: Path, rank: int) -> None:
    """The groups are made anew, and the scan goes on."""
    path = tmp_path / "r.json"
    options = [*QUICK, "-b", "8", "-e", "64", "--timeout", "60"]
    done = run(["env", f"FAIL_RANK={rank}", *torchrun(3), DRIVER, *options, "--json", str(path)])
    assert done.returncode == 1
    checks = {case["key"]["size_bytes"]: case["check"] for case in load(path)["cases"]}
    assert checks == {
        8: "passed",
        16: "passed",
        32: f"failed: RuntimeError: this rank alone is broken (rank {rank})",
        64: "passed",
    }


# a scan of one size that lasts
LONG = [*QUICK, "-b", "8", "-e", "16M", "-i", "16777208", "-n", "100000"]


def test_a_stopped_rank_is_named(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    command = [*torchrun(3), COLLECTIVES, *LONG, "--json", str(path), "--timeout", "6"]
    with launch(command) as started:
        started.wait_for("#        (B)")
        time.sleep(1)
        os.kill(started.ranks()[1], signal.SIGSTOP)
        start = time.monotonic()
        assert started.wait() != 0
        assert time.monotonic() - start < 40
        errors = "".join(started.stderr)
        host = os.uname().nodename
        assert "HANG: no progress for" in errors
        assert f"rank 1 on {host} does not answer" in errors
        assert "in case 'all_reduce float32 sum " in errors
        assert "exitcode  : 3" in errors


def test_interrupted(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    with launch([*torchrun(2), COLLECTIVES, *LONG, "--json", str(path)]) as started:
        started.wait_for("#        (B)")
        time.sleep(1)
        started.process.send_signal(signal.SIGINT)
        assert started.wait() != 0
        text = "".join(started.stdout)
        assert "# interrupted (SIGINT" in text
        assert "# Out of bounds values : 0 OK" in text
    assert load(path)["status"] == "interrupted"


def test_p2p_matrix_names_a_stopped_rank(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    options = ["--device", "cpu", "--size", "4K", "-n", "100000", "--json", str(path)]
    with launch([*torchrun(3), P2P_MATRIX, *options, "--timeout", "6"]) as started:
        started.wait_for("# 3 rounds")
        time.sleep(1)
        os.kill(started.ranks()[2], signal.SIGSTOP)
        assert started.wait() != 0
        errors = "".join(started.stderr)
        assert f"rank 2 on {os.uname().nodename} does not answer" in errors
        assert "in case 'round 1 of 3'" in errors
        assert "exitcode  : 3" in errors
