"""What the README says about uv, with PyPI's uv and caches that are deleted."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.lab import PATH, need

pytestmark = [pytest.mark.launch, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
REPORT = ROOT / "tests" / "golden" / "small.jsonl"
SMALL = "--collective all_reduce -b 64 -e 64 --cache-warm --device cpu --iters 6"


@pytest.fixture
def env(tmp_path: Path) -> Iterator[dict[str, str]]:
    need("uv")
    cache = tmp_path / "cache"
    variables = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    yield variables | {"PATH": PATH, "UV_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    shutil.rmtree(cache, ignore_errors=True)


def test_reports_without_torch(env: dict[str, str], tmp_path: Path) -> None:
    """A laptop that has uv and two reports."""
    report = REPORT.read_text()
    (tmp_path / "a.jsonl").write_text(report)
    another_run = re.sub(r'"started_at": "\d{4}', '"started_at": "2031', report, count=1)
    (tmp_path / "b.jsonl").write_text(another_run)  # a copy would be refused
    command = ["uv", "run", str(ROOT / "analysis/compare.py"), "a.jsonl", "--test", "b.jsonl"]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200
    )
    if "Failed to fetch" in done.stderr and os.environ.get("CI") != "true":
        pytest.skip("needs PyPI")
    assert done.returncode == 0, done.stderr
    assert "3 undecided" in done.stdout
    installed = {path.name.split("-")[0] for path in (tmp_path / "cache").rglob("*.dist-info")}
    assert {"numpy", "pandas", "scipy", "tabulate"} <= installed
    assert "torch" not in installed


def test_torchrun(env: dict[str, str], tmp_path: Path) -> None:
    """The README's command, with an environment that has it all: nothing is downloaded."""
    words = ["uv", "run", "--offline", "--python", sys.executable, "--no-project"]
    words += ["--with-requirements", str(ROOT / "requirements.txt")]
    words += ["torchrun", "--nproc-per-node", "2", "benchmarks/collectives.py", *SMALL.split()]
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "# 2 ranks on 1 node" in done.stdout
