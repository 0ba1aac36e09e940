"""ddp_rpc and batch_update_ps through the real torchrun, and their reports."""

from pathlib import Path

import pytest
from harness import ROOT, load, run, slow, torchrun

from common import results

DDP_RPC = str(ROOT / "benchmarks" / "ddp_rpc.py")
BATCH_UPDATE = str(ROOT / "benchmarks" / "batch_update_ps.py")
TINY_TABLES = ["--number-embeddings", "40", "--embedding-dim", "8", "--warmup-cycles", "1"]


def test_ddp_rpc_in_every_way(tmp_path: Path) -> None:
    path = tmp_path / "a report.json"
    options = ["--lookup", "parallel,sequential", "--autograd", "distributed,manual"]
    options += [*TINY_TABLES, "--epochs", "6", "--device", "cpu", "--json", str(path)]
    done = run([*torchrun(5), DDP_RPC, *options], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = results.load(str(path))
    assert report["status"] == "complete"
    assert len(report["cases"]) == 4
    for case in report["cases"]:
        assert case["check"] == "passed"
        assert case["ranks"] == [0, 1]  # 2 trainers, 2 servers, the master
        assert [len(row) for row in case["samples_s"]] == [6, 6]
        metrics = case["metrics"]
        assert metrics["samples"] == sum(row["samples"] for row in metrics["trainers"])
        split = ("lookup_s", "forward_s", "backward_s", "exchange_s", "step_s")
        assert all(metrics[name] > 0 for name in split)
    for row in ("Trainer0", "Trainer1", "All"):
        assert sum(line.startswith(row) for line in done.stdout.splitlines()) == 4, done.stdout
    assert "for functional optimizers" not in done.stderr
    again = run([*torchrun(5), DDP_RPC, *options, "--resume"], cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert load(path)["cases"] == report["cases"]


@pytest.mark.parametrize(
    ("nproc", "trainers", "servers"),
    [(6, 3, 2), pytest.param(3, 1, 1, marks=slow), pytest.param(6, 1, 4, marks=slow)],
)
def test_ddp_rpc_in_any_ratio(tmp_path: Path, nproc: int, trainers: int, servers: int) -> None:
    path = tmp_path / "report.json"
    options = ["--number_trainers", str(trainers), "--number-ps", str(servers), "--sparse"]
    options += [*TINY_TABLES, "--epochs", "2", "--device", "cpu", "--json", str(path)]
    done = run([*torchrun(nproc), DDP_RPC, *options], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [case["check"] for case in load(path)["cases"]] == ["passed"] * 2


@pytest.mark.parametrize(("nproc", "size"), [pytest.param(4, 3, marks=slow), (5, 2), (2, 1)])
def test_batch_update_ps(tmp_path: Path, nproc: int, size: int) -> None:
    path = tmp_path / "a report.json"
    options = ["--batch-update-size", str(size), "--iters", "40", "--device", "cpu"]
    done = run([*torchrun(nproc), BATCH_UPDATE, *options, "--json", str(path)], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = results.load(str(path))
    assert [case["key"]["payload"] for case in report["cases"]] == ["module", "tensors"]
    for case in report["cases"]:
        assert case["check"] == "passed"
        metrics = case["metrics"]
        assert metrics["updates"] == 40
        assert metrics["gradients_per_s"] == pytest.approx(size * metrics["updates_per_s"])
        assert len(case["other_samples_s"]["update"][0]) == 40
        assert len(case["samples_s"]) == nproc - 1


@pytest.mark.parametrize("script", [DDP_RPC, BATCH_UPDATE])
def test_compare_original(tmp_path: Path, script: str) -> None:
    """Four starts of RPC in one run, each in processes of its own."""
    path = tmp_path / "report.json"
    options = ["--compare-original", "--rounds", "2", "--device", "cpu"]
    options += ["--iters", "2", "--warmup-iters", "1"]
    command = [*torchrun(3), script, *options, "--json", str(path)]
    done = run(command, timeout=280, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = results.load(str(path))
    assert report["status"] == "complete"
    rates = [case["metrics"]["rate"] for case in report["cases"][:-1]]
    assert len(rates) == 4
    ratio = report["cases"][-1]["metrics"]
    assert sorted(ratio["first"] + ratio["second"]) == sorted(rates)
    assert ratio["ratios"] == [b / a for a, b in zip(ratio["first"], ratio["second"], strict=True)]
    assert done.stdout.count("# torchrun-bench") == 1
    assert "times as many" in done.stdout


def test_without_a_report_the_rounds_are_still_compared(tmp_path: Path) -> None:
    options = ["--compare-original", "--rounds", "1", "--device", "cpu"]
    options += ["--iters", "2", "--warmup-iters", "1"]
    done = run([*torchrun(2), BATCH_UPDATE, *options], timeout=280, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "times as many" in done.stdout
    assert not list(tmp_path.iterdir())
