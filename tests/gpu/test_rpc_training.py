"""ddp_rpc and batch_update_ps on a machine with CUDA: device maps between ranks of one device."""

from pathlib import Path

import pytest
import torch
from harness import ROOT, load, run, torchrun

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
DDP_RPC = str(ROOT / "benchmarks" / "ddp_rpc.py")
BATCH_UPDATE = str(ROOT / "benchmarks" / "batch_update_ps.py")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("server_device", ["cpu", "cuda"])
@pytest.mark.parametrize("sparse", [[], ["--sparse"]])
def test_ddp_rpc(tmp_path: Path, device: str, server_device: str, sparse: list[str]) -> None:
    path = tmp_path / "report.json"
    options = ["--device", device, "--server-device", server_device, "--backend", "gloo", *sparse]
    options += ["--epochs", "6", "--json", str(path)]
    done = run([*torchrun(5), DDP_RPC, *options], timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [case["check"] for case in load(path)["cases"]] == ["passed"] * 2


def test_ddp_rpc_over_nccl(tmp_path: Path) -> None:
    """One trainer has the device to itself; the server may share it."""
    path = tmp_path / "report.json"
    options = ["--device", "cuda", "--server-device", "cuda", "--backend", "nccl"]
    options += ["--number-trainers", "1", "--epochs", "6", "--json", str(path)]
    done = run([*torchrun(3), DDP_RPC, *options], timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [case["check"] for case in load(path)["cases"]] == ["passed"] * 2


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("server_device", ["cpu", "cuda"])
def test_batch_update_ps(tmp_path: Path, device: str, server_device: str) -> None:
    path = tmp_path / "report.json"
    options = ["--device", device, "--server-device", server_device, "--iters", "50"]
    done = run([*torchrun(4), BATCH_UPDATE, *options, "--json", str(path)], timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [case["check"] for case in load(path)["cases"]] == ["passed"] * 2
