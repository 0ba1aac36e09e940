"""parameter_server on a machine with CUDA: device maps, and CPU and CUDA roles in any mix."""

from pathlib import Path

import pytest
import torch
from harness import ROOT, load, run, torchrun

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
SCRIPT = str(ROOT / "benchmarks" / "parameter_server.py")
SMALL = "--num-embeddings 32 --embedding-dim 16 --dense-layers 3 --dense-size 16 --classes 8"
FEW = "--sample-count 20 --batch-size 4 --sample-length 8 --bucket-size 0.001 --iters 6"
TINY = f"{SMALL} {FEW}".split()


@pytest.mark.parametrize(
    ("processes", "roles"),
    [
        (4, "--ncudatrainer 2 --nserver 1"),
        (4, "--ncudatrainer 2 --ncudaserver 1"),
        (5, "--ncudatrainer 2 --ncudaserver 2"),
        (4, "--ntrainer 2 --ncudaserver 1"),
        (4, "--ntrainer 1 --ncudatrainer 1 --ncudaserver 1"),
        (4, "--ntrainer 1 --ncudatrainer 1 --nserver 1"),
        (6, "--ntrainer 1 --ncudatrainer 2 --nserver 1 --ncudaserver 1"),
    ],
)
def test_mixes_over_gloo(tmp_path: Path, processes: int, roles: str) -> None:
    """Ranks may share a device: a trainer with a trainer, and with its server."""
    path = tmp_path / "report.json"
    options = [*roles.split(), "--backend", "gloo", "--json", str(path)]
    done = run([*torchrun(processes), SCRIPT, *TINY, *options], timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    cases = load(path)["cases"]
    assert {case["check"] for case in cases} == {"passed"}
    assert {case["key"]["route"] for case in cases} == {"allreduce", "hybrid", "rpc", "sparse_rpc"}
    for case in cases:
        for phases in case["metrics"]["trainers"].values():
            assert all(summary["min_s"] >= 0 for summary in phases.values())


@pytest.mark.parametrize("options", [[], ["--dense-embedding"], ["--ncudaserver", "1"]])
def test_a_trainer_on_every_device(tmp_path: Path, options: list[str]) -> None:
    """The default backend: nccl, beside gloo for what is sparse."""
    path = tmp_path / "report.json"
    trainers = ["--ncudatrainer", str(torch.cuda.device_count()), "--json", str(path)]
    command = [*torchrun(torch.cuda.device_count() + 2), SCRIPT, *TINY, *trainers, *options]
    done = run(command, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    report = load(path)
    assert {case["check"] for case in report["cases"]} == {"passed"}
    backend = "nccl" if options == ["--dense-embedding"] else "multi"
    assert {case["key"]["backend"] for case in report["cases"]} == {backend}
