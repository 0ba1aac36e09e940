"""Repeated runs as a job array, as docs/launch.md shows it: a report each, for compare.py."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.lab import Lab

pytestmark = [pytest.mark.launch, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
SMALL = "--collective all_reduce -b 64 -e 64 --cache-warm --device cpu --iters 6"


def test_a_report_for_each_run(lab: Lab, tmp_path: Path) -> None:
    checkout = tmp_path / "a checkout"
    for name in ("benchmarks", "common", "launch"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    (checkout / "runs").mkdir()
    script = f"benchmarks/collectives.py {SMALL} --json runs/$SLURM_ARRAY_TASK_ID.jsonl"
    options = ["-N1", "--ntasks-per-node=1", "--exclusive", "--array=1-2%1", "--output=out-%a"]
    job = lab.sbatch(*options, "--wrap", f"launch/slurm_srun.sbatch {script}", cwd=checkout)
    for task in ("1", "2"):
        text = checkout / f"out-{task}"
        state = lab.until_over(f"{job}_{task}", 120, text.read_text)
        assert state == "COMPLETED", text.read_text()
    done = subprocess.run(
        [sys.executable, "analysis/compare.py", "--history", str(checkout / "runs")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "1 undecided" in done.stdout
