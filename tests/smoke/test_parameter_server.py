"""parameter_server through the real torchrun on gloo, and its report."""

from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, load, run, torchrun

from common import results

SCRIPT = str(ROOT / "benchmarks" / "parameter_server.py")
SMALL = "--num-embeddings 32 --embedding-dim 16 --dense-layers 3 --dense-size 16 --classes 8"
# buckets of a layer each, and 5 batches that no number of trainers but 1 and 5 shares out evenly
FEW = "--sample-count 20 --batch-size 4 --bucket-size 0.001"
TINY = f"{SMALL} {FEW}".split()
DEVICE = ["--device", "cpu"]
UV = ["--rpc-transports", "uv"]  # shm polls, and here many processes share few cores
THROUGH = [f"{route} {kind}" for route in ("rpc", "sparse_rpc") for kind in ("running", "batch")]


def bytes_of(report: dict[str, Any]) -> dict[str, float]:
    return {case["label"]: case["metrics"]["bytes_per_step"] for case in report["cases"]}


def passed(path: Path) -> dict[str, Any]:
    report = results.load(str(path))
    assert report["status"] == "complete"
    assert {case["label"]: case["check"] for case in report["cases"]} == {
        case["label"]: "passed" for case in report["cases"]
    }
    return report


def test_four_processes(tmp_path: Path) -> None:
    """2 trainers, 1 server, the master: every route, in a folder and to a path with a space."""
    path = tmp_path / "a report.json"
    command = [*torchrun(4), SCRIPT, *TINY, *DEVICE, "--json", str(path)]
    done = run([*command, "--epochs", "3"], cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# 5 batches of 4: an epoch is 3 steps; 1 trainer with a batch less" in done.stdout
    report = passed(path)
    labels = ["allreduce", "hybrid", *(f"{case} grouped" for case in THROUGH)]
    assert [case["label"] for case in report["cases"]] == labels
    for case in report["cases"]:
        metrics = case["metrics"]
        assert case["ranks"] == [0, 1]
        assert [len(row) for row in case["samples_s"]] == [9, 9]
        assert list(metrics["trainers"]) == ["trainer0", "trainer1", "all"]
        for phases in metrics["trainers"].values():
            assert list(phases) == ["forward", "backward", "batch", "hook dense", "hook sparse"]
        assert metrics["trainers"]["trainer1"]["forward"]["count"] == 9
        assert metrics["trainers"]["all"]["hook sparse"]["count"] == 18
        assert metrics["hook_p50_s"] > 0
        assert ("servers" in metrics) == (case["key"]["server"] is not None)
        line = next(text for text in done.stdout.splitlines() if text.startswith(case["label"]))
        assert line.count("%") <= 1
    through = [case["metrics"]["servers"] for case in report["cases"][2:]]
    for servers in through:
        assert list(servers) == ["server0", "all"]
        assert list(servers["server0"]) == ["straggler", "batch", "averaging"]
    # a record for each bucket of each of the 9 steps; of sparse_rpc, for the sparse one
    assert [servers["all"]["batch"]["count"] for servers in through[2:]] == [9, 9]
    assert {servers["all"]["batch"]["count"] % 9 for servers in through} == {0}
    assert through[0]["all"]["batch"]["count"] > 9
    # what is averaged in all is the same: 2 trainers, dense 2/2 both ways, by either route
    moved = bytes_of(report)
    dense = 4 * (2 * (16 * 16 + 16) + 16 * 8 + 8)
    assert moved["rpc running grouped"] - moved["sparse_rpc running grouped"] == pytest.approx(0)
    assert moved["allreduce"] == moved["hybrid"] > 2 * dense
    # --resume measures only what is missing
    again = run([*command, "--epochs", "3", "--resume"], cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert load(path)["cases"] == report["cases"]


def test_five_processes(tmp_path: Path) -> None:
    """2 trainers with a server each: every placement; and settings of RPC."""
    path = tmp_path / "report.json"
    options = ["--iters", "6", "--json", str(path), "--ntrainer", "2", "--nserver", "2"]
    options += ["--rpc-threads", "1", "--rpc_transports", "uv", "--rpc_timeout", "20"]
    done = run([*torchrun(5), SCRIPT, *TINY, *options])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "drift apart" in done.stdout
    report = passed(path)
    placed = [f"{case} {placement}" for case in THROUGH for placement in ("grouped", "sharded")]
    assert [case["label"] for case in report["cases"]] == ["allreduce", "hybrid", *placed]
    for case in report["cases"][2:]:
        key, servers = case["key"], case["metrics"]["servers"]
        assert (key["rpc_threads"], key["rpc_transports"]) == (1, "uv")
        if key["route"] == "rpc":  # buckets are spread over both
            counts = [servers[name]["batch"]["count"] for name in ("server0", "server1")]
            assert sum(counts) == servers["all"]["batch"]["count"]


def test_six_processes(tmp_path: Path) -> None:
    """3 trainers on 2 servers, 2 and 1; then one server and a dense embedding."""
    path = tmp_path / "report.json"
    options = ["--iters", "6", "--json", str(path), "--nserver", "2"]
    done = run([*torchrun(6), SCRIPT, *TINY, *DEVICE, *UV, *options], timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(passed(path)["cases"]) == 2 + 4 * 2
    options = ["--iters", "6", "--json", str(path), "--dense-embedding"]
    done = run([*torchrun(6), SCRIPT, *TINY, *DEVICE, *UV, *options])
    assert done.returncode == 0, done.stdout + done.stderr
    report = passed(path)
    labels = ["allreduce", "rpc running grouped", "rpc batch grouped"]
    assert [case["label"] for case in report["cases"]] == labels
    # everything is dense: through a server S both ways, by an all-reduce of 4 three quarters more
    size = 4 * (32 * 16 + 2 * (16 * 16 + 16) + 16 * 8 + 8)
    assert bytes_of(report) == {label: 2 * size for label in labels[1:]} | {
        "allreduce": pytest.approx(3 * size)
    }
    assert "hook sparse" not in report["cases"][0]["metrics"]["trainers"]["all"]
