"""traffic.py beside real ranks: they make the same calls and hold the same bytes."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.report import load
from tests.process import ROOT

# together a mesh for each kind of collective; the others run with ALL=1
SOME = "ddp4,dp2tp2,dp2ep2"
OTHERS = "dp2x2,dp2cp2,dp2pp2:zbv,pp2tp2:1f1b,dp4,tp4,cp4,ep4,dp2pp2:interleaved,dp2pp2:izb"


@pytest.mark.smoke
@pytest.mark.parametrize("meshes", [SOME, OTHERS] if "ALL" in os.environ else [SOME])
def test_gloo_sends_what_traffic_says(bench: Callable[..., Any], meshes: str) -> None:
    """Every rank looks at itself: axis, collective, bytes and calls."""
    script, variables = "tests/recorded_traffic.py", {"TORCH_FR_BUFFER_SIZE": "20000"}
    run = bench(script, meshes, ranks=4, timeout=300, json=False, **variables)
    assert run.status == 0, run.out + run.err
    lines = run.out.splitlines()
    assert len(lines) == 4 * len(meshes.split(","))
    assert all(line.endswith(" calls: same") for line in lines)
    assert not any(" 0 calls" in line for line in lines)


@pytest.mark.oldest
def test_one_process_is_any_rank(tmp_path: Path) -> None:
    report = str(tmp_path / "report.jsonl")
    meshes = "dp8,dp2tp4,dp2pp2tp2:1f1b,cp4dp2"
    flags = ["--ranks", "8", "--model", "decoder-tiny", "--mesh", meshes, "--json", report]
    command = [sys.executable, str(ROOT / "benchmarks" / "traffic.py"), *flags]
    subprocess.run(command, check=True, timeout=120, stdout=subprocess.DEVNULL)
    assert [case.failed for case in load(report).cases] == [False] * 4
