"""What a run says around its tables, as a user starts it."""

import json
import os
import pty
import re
import select
import subprocess
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.report import load
from tests.process import ROOT, command_of, environment

SCRIPTS: dict[str, list[str]] = {
    "batch_update_ps": [],
    "checkpoint_sweep": ["--paths", "a,b"],
    "collectives": ["-e", "64"],
    "compile_sweep": [],
    "ddp_rpc": [],
    "ddp_sweep": [],
    "input_sweep": [],
    "node_check": [],
    "p2p_matrix": [],
    "parallel_sweep": [],
    "parameter_server": [],
    "replay": ["trace"],
    "rpc_latency": [],
}
# traffic.py plays ranks, and measures nothing
MEASURING = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - {"traffic"}
FEW = ("-b", "64", "-e", "64", "--device", "cpu")  # a case of collectives


@pytest.mark.smoke
@pytest.mark.parametrize("script", sorted(MEASURING))
def test_a_dry_run_lists_the_cases_of_the_job(
    script: str, bench: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks of it end with status 0; it leaves nothing behind."""
    monkeypatch.chdir(tmp_path)
    flags = (*SCRIPTS.get(script, []), "--device", "cpu", "--dry-run")
    run = bench(f"benchmarks/{script}.py", *flags, ranks=4)
    assert run.status == 0, run.err
    assert "\n# 4 ranks on 1 node\n" in run.out
    number = re.search(r"\n# (\d+) cases?; nothing was measured\n$", run.out)
    assert number, run.out
    assert int(number[1]) == len(re.findall(r"^  \S", run.out, re.MULTILINE)) > 0
    assert not run.path.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"a folder", "run0"}


@pytest.mark.smoke
def test_a_report_on_stdout_is_json_alone(bench: Callable[..., Any], tmp_path: Path) -> None:
    run = bench("benchmarks/collectives.py", *FEW, "--json", "-", json=False)
    assert run.status == 0, run.err
    assert [*map(json.loads, run.out.splitlines())][-1]["status"] == "complete"
    assert run.err.startswith("# torchrun-bench collectives, version ")
    assert "Out of bounds values : 0 OK" in run.err
    (tmp_path / "r.jsonl").write_text(run.out)
    assert load(str(tmp_path / "r.jsonl")).cases[0].check == "passed"


@pytest.mark.smoke
def test_the_last_lines_lead_on_and_a_dry_run_resumes(bench: Callable[..., Any]) -> None:
    """The second run moves the report of the first. A dry run says what --resume would measure."""
    run = bench("benchmarks/collectives.py", *FEW)
    assert re.search(r"\n# report .*report\.jsonl; python .*\n# elapsed \d.*\n", run.out)
    assert set(run.report.environment) >= {"version", "others"}
    (load_of_node,) = run.report.end["others"]
    assert load_of_node[1] == len(os.sched_getaffinity(0))
    again = bench("benchmarks/collectives.py", *FEW)
    assert "report.jsonl.bak; python " in again.out
    words = (*FEW, "-e", "128", "--dry-run", "--resume")
    planned = bench("benchmarks/collectives.py", *words)
    assert planned.status == 0, planned.err
    case = "\n  all_reduce float32 sum, 128 bytes\n"
    assert planned.out.endswith(f"{case}\n# 1 case; nothing was measured\n")
    assert planned.report.status == "complete"  # it is as it was


@pytest.mark.smoke
def test_a_terminal_shows_the_case_and_the_time_left() -> None:
    """stderr is a terminal of 200 columns; stdout is a pipe, and has nothing of it."""
    (command,) = command_of("benchmarks/collectives.py", "-b", "64", "-e", "128", ranks=0)
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(ours, (50, 200))
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=theirs, env=environment()
    ) as process:
        os.close(theirs)
        shown, end = b"", time.monotonic() + 120
        while time.monotonic() < end and select.select([ours], [], [], 60)[0]:
            try:
                shown += os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
        out, _ = process.communicate(timeout=60)
    os.close(ours)
    assert process.returncode == 0, out
    assert re.search(rb"case 1 of 2: all_reduce .*64 .*: ", shown)
    assert re.search(rb"case 2 of 2, about \d\.\d s left: all_reduce .*128 .*: ", shown)
    assert b"case 1 of 2" not in out
