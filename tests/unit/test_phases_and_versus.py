"""common/phases.py, common/versus.py and common/parts.py."""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from common import durations
from common.parts import Part, run_parts
from common.phases import Phases
from common.versus import ratio_metrics, ratio_text

ROOT = Path(__file__).resolve().parents[2]


def test_phases_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps; what lies between a step's end and the next one's start counts nowhere."""
    times = iter([100.0, 0.0, 1.0, 3.0, 4.0, 10.0, 12.0, 15.0, 15.5, 20.0, 21.0, 22.0, 23.0])
    monkeypatch.setattr(durations, "perf_counter", lambda: next(times))
    watch = Phases(torch.device("cpu"))
    watch.mark("before")
    watch.clear()
    for _ in range(3):
        for name in ("", "lookup", "backward", "lookup"):
            watch.mark(name)
    assert watch.per_step([0, 1]) == {"lookup": (1 + 1 + 2 + 0.5) / 2, "backward": (2 + 3) / 2}
    assert watch.per_step([2]) == {"lookup": 2, "backward": 1}


def test_ratio() -> None:
    metrics = ratio_metrics([10.0, 20.0, 10.0], [30.0, 40.0, 10.0])
    assert metrics["ratios"] == [3, 2, 1]
    assert metrics["ratio"] == 2
    assert metrics["ratio_ci95"] is None  # of three rounds there is none
    text = ratio_text(metrics, "updates/s")
    assert text == "30.0 to 10.0 updates/s, 2.00 times as many (3 rounds from 1.00 to 3.00)"
    many = ratio_metrics([1.0] * 8, [4.0, 1, 8, 2, 7, 3, 6, 5])
    assert many["ratio"] == 4.5
    assert many["ratio_ci95"] == [1, 8]


def arguments(path: str | None = None) -> argparse.Namespace:
    return argparse.Namespace(json=path, resume=False)


def test_parts_run_one_after_the_other_in_processes_of_their_own(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def run(part: Part) -> int:
        with out.open("a") as file:
            file.write(f"{part.number} {part.last} {os.getpid()}\n")
        return 0

    assert run_parts([run] * 3, arguments("report.json")) == 0
    lines = [line.split() for line in out.read_text().splitlines()]
    assert [line[:2] for line in lines] == [["0", "False"], ["1", "False"], ["2", "True"]]
    assert len({line[2] for line in lines} | {str(os.getpid())}) == 4


@pytest.mark.parametrize(
    ("statuses", "expected", "ran"), [([0, 1, 0], 1, 3), ([0, 3, 0], 3, 2), ([2, 0], 2, 1)]
)
def test_status_of_parts(tmp_path: Path, statuses: list[int], expected: int, ran: int) -> None:
    def run(part: Part) -> int:
        (tmp_path / str(part.number)).touch()
        return statuses[part.number]

    assert run_parts([run] * len(statuses), arguments("x")) == expected
    assert len(list(tmp_path.iterdir())) == ran


def test_a_part_that_raises_or_exits(capfd: pytest.CaptureFixture[str]) -> None:
    def fails(part: Part) -> int:
        raise ValueError("what went wrong")

    def leaves(part: Part) -> int:
        sys.exit(2)

    assert run_parts([fails], arguments("x")) == 1
    assert "ValueError: what went wrong" in capfd.readouterr().err
    assert run_parts([leaves], arguments("x")) == 2


def test_without_a_report_the_parts_share_one_that_is_gone_afterwards() -> None:
    args = arguments()

    def run(part: Part) -> int:
        path = Path(args.json)
        if part.number == 0:
            path.write_text("kept")
        return 0 if path.read_text() == "kept" else 1

    assert run_parts([run, run], args) == 0
    assert not Path(args.json).parent.exists()
    assert args.temporary_report


PARENT = """
import argparse, os, signal, sys, time
sys.path.insert(0, sys.argv[1])
from common.parts import run_parts
def run(part):
    print(os.getpid(), flush=True)
    if sys.argv[2] == "handled":
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(143))
    time.sleep(60)
    return 0
sys.exit(run_parts([run, run], argparse.Namespace(json="x", resume=False)))
"""


@pytest.mark.parametrize("how", ["handled", "not handled"])
def test_a_signal_goes_to_the_part(how: str) -> None:
    command = [sys.executable, "-c", PARENT, str(ROOT), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        time.sleep(0.2)
        parent.send_signal(signal.SIGTERM)
        assert parent.wait(20) == 143
        assert not Path(f"/proc/{child}").exists()


def test_a_part_dies_with_its_parent() -> None:
    command = [sys.executable, "-c", PARENT, str(ROOT), "handled"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
        parent.wait(20)
        limit = time.monotonic() + 10
        while Path(f"/proc/{child}").exists() and time.monotonic() < limit:
            time.sleep(0.05)
        assert not Path(f"/proc/{child}").exists()
