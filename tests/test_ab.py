"""analysis/ab.py --interleave with real runs: its pipes and common/benchmark.py's turns."""

import subprocess
import sys
from pathlib import Path

import pytest

from common.report import load
from tests.conftest import ROOT, environment

SWEEP = "benchmarks/collectives.py -b 64 -e 64 -n 4 --cache-warm --iters 24 --device cpu"


@pytest.mark.smoke
def test_two_sweeps_take_turns(tmp_path: Path) -> None:
    """One of two cases, and one that has a case less."""
    torchrun = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2 {SWEEP}"
    command = [sys.executable, "analysis/ab.py", "--interleave", "--runs", "1"]
    command += ["--a", f"{torchrun} --collective all_reduce,barrier"]
    command += ["--b", f"{torchrun} --collective all_reduce"]
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
    for side, names in (("a", ["all_reduce", "barrier"]), ("b", ["all_reduce"])):
        report = load(str(tmp_path / side / "01.jsonl"))
        assert [case.key["collective"] for case in report.cases] == names
        assert all(len(case.rounds) == 24 for case in report.cases)
