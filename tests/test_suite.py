"""launch/suite.sh with the real torchrun; pure/test_suite.py has the rest."""

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.report import load
from tests.process import ROOT, Process, environment

FLAGS = "--device cpu --cache-warm --target-ci 0.01% --max-seconds 1"


@pytest.fixture
def suite(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """suite(*words) -> Process, in the order of the calls."""
    started: list[Process] = []
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    def begin(*words: str) -> Process:
        folder = tmp_path / f"run{len(started)}"
        folder.mkdir()
        command = ["bash", str(ROOT / "launch" / "suite.sh"), *words]
        started.append(Process([command], folder, environment(PATH=path)))
        return started[-1]

    yield begin
    for process in started:
        process.stop()


@pytest.mark.smoke
def test_the_same_command_goes_on_after_ctrl_c(
    suite: Callable[..., Process], tmp_path: Path
) -> None:
    out = tmp_path / "my suite"
    report = out / "collectives.jsonl"
    words = ["--nproc-per-node", "2", "--out", str(out), "--flags", FLAGS]
    words.append("collectives -b 64 -e 512")  # 4 cases of a second
    first = suite(*words)
    first.until(lambda: report.exists() and report.read_bytes().count(b"\n") > 2)
    os.killpg(first.parts[0].pid, signal.SIGINT)  # as a terminal does
    assert first.wait(60) == 130, first.err
    assert "SIGTERM: 2 cases are measured" in first.err
    assert "suite.sh: interrupted; " in first.err.splitlines()[-1]
    assert first.tree() == []
    before = report.read_text().splitlines()
    assert not (out / "report.html").exists()
    again = suite(*words)
    assert again.wait(120) == 0, again.err
    after = report.read_text().splitlines()
    assert after[: len(before)] == before  # not measured again
    assert len(load(str(report)).cases) == 4
    assert again.out.splitlines()[-1] == "# suite.sh: status 0"
    assert re.search("<title>.*collectives", (out / "report.html").read_text())
