"""parameter_server: what fails is named, nobody waits for ever, and the sweep goes on."""

import os
import signal
import time
from pathlib import Path

import pytest
from harness import ROOT, alive, launch, load, run, torchrun

DRIVER = str(ROOT / "tests" / "faults" / "parameter_server_driver.py")
SMALL = "--num-embeddings 32 --embedding-dim 16 --dense-layers 3 --dense-size 16 --classes 8"
FEW = "--sample-count 20 --batch-size 4 --bucket-size 0.001"
TINY = f"{SMALL} {FEW}".split()
UV = ["--rpc-transports", "uv"]  # shm polls, and here many processes share few cores


def test_planted_faults(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    options = ["--ntrainer", "3", "--nserver", "2", "--iters", "12", "--json", str(path)]
    options += ["--rpc-timeout", "3", "--timeout", "60", *UV]
    done = run([*torchrun(6), DRIVER, *TINY, *options], timeout=200)
    assert done.returncode != 0
    report = load(path)
    assert report["status"] == "failed"
    checks = {case["label"]: case["check"] for case in report["cases"]}
    wrong = [label for label, check in checks.items() if check != "passed"]
    own = "failed: ValueError: a trainer's own mistake (rank 1)"
    assert checks.pop("hybrid") == own, done.stderr
    assert checks.pop("rpc running grouped") == own
    check = checks.pop("rpc running sharded")
    assert ": RuntimeError: server0: OutOfMemoryError: no more memory (rank " in check, check
    check = checks.pop("rpc batch grouped")
    assert check.startswith("failed: the gradient of "), check
    assert "is off plain DDP's by 1" in check  # twice as large, and so off by once
    assert "is off plain DDP's by" in checks.pop("rpc batch sharded")
    check = checks.pop("sparse_rpc running grouped")
    # alone with its server, its embedding is compared with nobody's
    assert check == ("failed: dense: after the steps the parameters of rank 2 differ from rank 0's")
    check = checks.pop("sparse_rpc running sharded")
    assert "server0: RPCErr:1:RPC ran for more than set timeout (3000 ms)" in check, check
    assert set(checks) == {"allreduce", "sparse_rpc batch grouped", "sparse_rpc batch sharded"}
    assert set(checks.values()) == {"passed"}
    for label in wrong:
        assert sum(line.startswith(f"{label}  failed: ") for line in done.stdout.splitlines()) == 1


LONG = ["--max-seconds", "60", "--target-ci", "0.01%", "--routes", "hybrid,rpc", "--servers"]


@pytest.mark.parametrize("rank", [1, 2])
def test_a_killed_rank_ends_the_run(tmp_path: Path, rank: int) -> None:
    """Rank 1 is a trainer, rank 2 the server."""
    path = tmp_path / "report.json"
    options = ["--ntrainer", "2", "--json", str(path), *LONG, "running"]
    with launch(["env", "LONG=1", *torchrun(4), DRIVER, *TINY, *UV, *options]) as started:
        started.wait_for("measuring rpc running grouped")
        ranks = started.ranks()
        os.kill(ranks[rank], signal.SIGKILL)
        start = time.monotonic()
        assert started.wait() != 0
        assert time.monotonic() - start < 40
        assert not any(alive(pid) for pid in ranks.values())
        text = started.output()
    assert [case["label"] for case in load(path)["cases"]] == ["hybrid"]
    assert load(path)["status"] in ("interrupted", "failed")
    assert f"rank {rank} on {os.uname().nodename} d" in text  # died, or does not answer
    assert "rpc running grouped" in text


def test_a_stopped_server_is_named(tmp_path: Path) -> None:
    rank = 2
    path = tmp_path / "report.json"
    options = ["--ntrainer", "2", "--json", str(path), *LONG, "running", "--timeout", "15"]
    with launch(["env", "LONG=1", *torchrun(4), DRIVER, *TINY, *UV, *options]) as started:
        started.wait_for("measuring rpc running grouped")
        time.sleep(1)
        ranks = started.ranks()
        os.kill(ranks[rank], signal.SIGSTOP)
        start = time.monotonic()
        assert started.wait() != 0
        assert time.monotonic() - start < 60
        errors = "".join(started.stderr)
        host = os.uname().nodename
        assert "HANG: no progress for" in errors
        assert f"rank {rank} on {host} does not answer" in errors
        assert "in case 'serves rpc running grouped'" in errors
        assert f"[rank 0 {host}] in case 'rpc running grouped', phase 'step, block" in errors
        assert "exitcode  : 3" in errors
        assert not any(alive(pid) for pid in ranks.values())
    assert [case["label"] for case in load(path)["cases"]] == ["hybrid"]
