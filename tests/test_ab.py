"""analysis/ab.py --interleave with real runs: its pipes, and turns in harness/benchmark.py."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from harness.report import load
from tests.process import ROOT, environment

# groups of one rank each, so that the cases do not depend on the number of ranks
SWEEP = "benchmarks/collectives.py -b 64 -e 64 -n 4 --cache-warm --iters 24 --device cpu"
SWEEP += " --groups cross --collective"


@pytest.mark.smoke
def test_two_runs_are_interleaved(tmp_path: Path) -> None:
    """A run of two ranks and one of a single process with another world size and a case less."""
    python = shlex.quote(sys.executable)
    torchrun = f"{python} -m torch.distributed.run --standalone --nproc-per-node 2"
    command = [sys.executable, "analysis/ab.py", "--interleave", "--runs", "2", "--max-runs", "2"]
    command += ["--ignore-key", "world_size,ranks", "--out", str(tmp_path)]
    command += ["--a", f"{torchrun} {SWEEP} all_reduce,broadcast"]
    command += ["--b", f"{python} {SWEEP} all_reduce"]
    # one thread per rank: on a busy machine two threads wait for each other
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment(), timeout=500
    )
    assert done.returncode == 0, done.stderr
    assert "with interleaved blocks" in done.stdout
    for side, names in (("a", ["all_reduce", "broadcast"]), ("b", ["all_reduce"])):
        report = load(str(tmp_path / side / "01.jsonl"))
        assert [case.key["collective"] for case in report.cases] == names
        assert all(len(case.rounds) == 24 for case in report.cases)
