"""On a machine with CUDA: NCCL, and ranks that share a device over gloo."""

from pathlib import Path

import pytest
import torch
from harness import CALIBRATE, COLLECTIVES, P2P_MATRIX, SWEEP, TINY, load, run, torchrun

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


@pytest.mark.parametrize(
    ("ranks", "backend"), [(max(1, torch.cuda.device_count()), "nccl"), (2, "gloo")]
)
def test_sweep(tmp_path: Path, ranks: int, backend: str) -> None:
    path = tmp_path / "report.json"
    options = ["--iters", "12", "--json", str(path), "--distributed-backend", backend]
    options += ["--dtype", "fp32,bf16,fp16", "--comm-hook", "none,fp16,bf16", "--channels-last"]
    done = run([*torchrun(ranks), SWEEP, *TINY, *options], timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    report = load(path)
    assert {case["check"] for case in report["cases"]} == {"passed"}
    assert report["environment"]["cuda"] is not None
    assert all(case["metrics"]["memory_gib"] > 0 for case in report["cases"])


def test_powersgd_and_quantisation_over_nccl(tmp_path: Path) -> None:
    ranks = max(1, torch.cuda.device_count())
    hooks = "powersgd,batched_powersgd,quantize_per_tensor"
    options = ["--iters", "6", "--json", str(tmp_path / "r.json"), "--comm-hook", hooks]
    done = run([*torchrun(ranks), SWEEP, *TINY, *options, "--world-sizes", str(ranks)], timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr


def test_more_ranks_than_devices_over_nccl_is_refused(tmp_path: Path) -> None:
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip("with one visible device a launcher may have given each rank its own")
    done = run([*torchrun(count + 1), SWEEP, *TINY], cwd=tmp_path)
    assert "nccl needs a device for every rank" in done.stderr


def test_calibrate(tmp_path: Path) -> None:
    options = ["--rounds", "6", "--seconds", "1", "--json", str(tmp_path / "c.json")]
    done = run([*torchrun(1), CALIBRATE, *options])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("mode", [[], ["-z", "1"], ["--in-flight", "3"], ["-G", "3"], ["--skew"]])
def test_collectives(tmp_path: Path, mode: list[str]) -> None:
    """Over NCCL on every device, one if there is no more; with CUDA graphs too."""
    path = tmp_path / "r.json"
    ranks = max(1, torch.cuda.device_count())
    options = ["--collective", "all", "-b", "64", "-e", "64K", "-f", "32", "-n", "4", *mode]
    options += ["-d", "float32,bfloat16,int8", "-o", "sum,avg,max", "--max-seconds", "0.01"]
    done = run([*torchrun(ranks), COLLECTIVES, *options, "--json", str(path)], timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    checks = {case["check"] for case in load(path)["cases"]}
    assert "passed" in checks
    assert all(check == "passed" or check.startswith("skipped: n/a: ") for check in checks), checks


def test_coalesced_collectives(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    options = ["--collective", "all_reduce,all_gather,reduce_scatter", "--coalesce", "4"]
    options += ["-b", "64", "-e", "64K", "-f", "32", "--json", str(path)]
    ranks = max(1, torch.cuda.device_count())
    done = run([*torchrun(ranks), COLLECTIVES, *options], timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {case["check"] for case in load(path)["cases"]} == {"passed"}


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_p2p_matrix(tmp_path: Path, backend: str) -> None:
    ranks = torch.cuda.device_count() if backend == "nccl" else 2
    if ranks < 2:
        pytest.skip("a link over nccl needs two devices")
    path = tmp_path / "r.json"
    options = ["--size", "64K", "--distributed-backend", backend, "--json", str(path)]
    done = run([*torchrun(ranks), P2P_MATRIX, *options], timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {case["check"] for case in load(path)["cases"]} == {"passed"}
