"""traffic.py beside real ranks: they make the same calls and hold the same bytes."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.report import load
from tests.process import ROOT

MESHES = "ddp4,dp2tp2,dp2ep2"  # together a mesh for each kind of collective


@pytest.mark.smoke
def test_gloo_sends_what_traffic_says(bench: Callable[..., Any]) -> None:
    """Axis, collective, bytes and calls of the last of four ranks."""
    script, variables = "tests/recorded_traffic.py", {"TORCH_FR_BUFFER_SIZE": "20000"}
    run = bench(script, MESHES, ranks=4, json=False, **variables)
    assert run.status == 0, run.out + run.err
    assert run.out.count(" calls: same\n") == 3
    assert " 0 calls" not in run.out


@pytest.mark.oldest
def test_one_process_is_any_rank(tmp_path: Path) -> None:
    report = str(tmp_path / "report.jsonl")
    meshes = "dp2tp4,dp2pp2tp2:1f1b,cp4dp2"
    flags = ["--ranks", "8", "--model", "decoder-nano", "--mesh", meshes, "--json", report]
    command = [sys.executable, str(ROOT / "benchmarks" / "traffic.py"), *flags]
    subprocess.run(command, check=True, timeout=120, stdout=subprocess.DEVNULL)
    assert [case.failed for case in load(report).cases] == [False] * 3
