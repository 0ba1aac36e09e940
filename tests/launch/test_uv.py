"""The commands of the README with uv."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.lab import PATH, SMALL, need
from tests.process import ROOT, environment

pytestmark = pytest.mark.launch


def uv_run(*words: str) -> str:
    need("uv")
    env = environment(PATH=PATH)
    env.pop("VIRTUAL_ENV", None)
    done = subprocess.run(["uv", "run", *words], cwd=ROOT, env=env, capture_output=True, text=True)
    if "Failed to fetch" in done.stderr:
        need("PyPI")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_reports_without_torch(tmp_path: Path) -> None:
    """A laptop with uv and two reports."""
    report = (ROOT / "tests" / "golden" / "small.jsonl").read_text()
    (tmp_path / "a.jsonl").write_text(report)
    lines = [json.loads(line) for line in report.splitlines()]
    lines[0]["started_at"] = lines[0]["started_at"].replace("20", "21", 1)
    for line in lines:  # with equal times it would be a copy
        for rows in line.get("samples_s", {}).values():
            rows[:] = [[1.01 * second for second in row] for row in rows]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    paths = [f"{tmp_path}/a.jsonl", "--test", f"{tmp_path}/b.jsonl"]
    assert "3 undecided" in uv_run("analysis/compare.py", *paths)


def test_torchrun() -> None:
    """The README's command in an environment that has everything, so nothing is downloaded."""
    words = ["--offline", "--python", sys.executable, "--no-project"]
    words += ["--with-requirements", "requirements.txt", "torchrun", "--nproc-per-node", "1"]
    assert "# 1 rank on 1 node" in uv_run(*words, "benchmarks/collectives.py", *SMALL.split())
