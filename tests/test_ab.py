"""analysis/ab.py --interleave with real runs: its pipes and common/benchmark.py's turns."""

import subprocess
import sys
from pathlib import Path

import pytest

from common.report import load
from tests.conftest import ROOT, environment

SWEEP = "benchmarks/ddp_sweep.py --model mobilenet_v3_small --image-size 32 --batch-size 2"
SWEEP += " --device cpu --no-breakdown --iters 24 --warmup-iters 1"


@pytest.mark.smoke
def test_two_sweeps_take_turns(tmp_path: Path) -> None:
    """One of two ranks and one of a single process, which has a case less."""
    torchrun = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2"
    command = [sys.executable, "analysis/ab.py", "--interleave", "--runs", "2"]
    command += ["--a", f"{torchrun} {SWEEP}", "--b", f"{sys.executable} {SWEEP}"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(),  # a thread a rank: on a full machine two threads wait for each other
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "their blocks took turns" in done.stdout
    for side, labels in (("a", ["no ddp", "1M/1G", "1M/2G"]), ("b", ["no ddp", "1M/1G"])):
        report = load(str(tmp_path / side / "01.jsonl"))
        assert [case.key["label"] for case in report.cases] == labels
        assert all(len(case.rounds) == 24 for case in report.cases)
