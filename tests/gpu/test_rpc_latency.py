"""rpc_latency with CUDA payloads between processes that share a device."""

from pathlib import Path

import pytest
import torch
from harness import ROOT, load, run, torchrun

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

LATENCY = str(ROOT / "benchmarks" / "rpc_latency.py")


@pytest.mark.parametrize(
    ("device", "server"), [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda"), ("auto", "auto")]
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_cuda_payloads(tmp_path: Path, device: str, server: str, ranks: int) -> None:
    path = tmp_path / "report.json"
    options = ["--device", device, "--server-device", server, "--sizes", "4,64K,4M"]
    options += ["--iters", "12", "--rpc-threads", "4,16", "--json", str(path)]
    done = run([*torchrun(ranks), LATENCY, *options], timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    cases = load(path)["cases"]
    assert {case["check"] for case in cases} == {"passed"}
    assert {case["key"]["device"] for case in cases} == {device.replace("auto", "cuda")}
    assert {case["key"]["server_device"] for case in cases} == {server.replace("auto", "cuda")}


@pytest.mark.parametrize("channels", ["basic+cuda_basic", "basic+cuda_ipc+cuda_basic"])
def test_channels_for_cuda(tmp_path: Path, channels: str) -> None:
    path = tmp_path / "report.json"
    options = ["--device", "cuda", "--sizes", "1M", "--iters", "6", "--rpc-threads", "4"]
    options += ["--rpc-channels", channels, "--ops", "rpc_sync", "--json", str(path)]
    done = run([*torchrun(2), LATENCY, *options], timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_channel_for_the_cpu_only_fails_its_cases(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    options = ["--device", "cuda", "--sizes", "4", "--iters", "6", "--rpc-threads", "4"]
    options += ["--rpc-channels", "basic", "--ops", "rpc_sync", "--json", str(path)]
    done = run([*torchrun(2), LATENCY, *options], timeout=280)
    assert done.returncode == 1, done.stdout + done.stderr
    (case,) = load(path)["cases"]
    assert "no channel of basic carries tensors" in case["check"]
