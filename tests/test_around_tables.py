"""The lines before and after the tables of a run, dry runs, and progress on a terminal."""

import json
import os
import re
from pathlib import Path

import pytest

from tests.process import Bench, Start

FEW = ("-b", "64", "-e", "64", "--device", "cpu")  # one case of collectives.py
pytestmark = pytest.mark.smoke


@pytest.mark.parametrize("script", ["checkpoint_sweep", "parallel_sweep", "parameter_server"])
def test_a_dry_run_lists_the_cases_of_the_job(script: str, bench: Bench, here: Path) -> None:
    """All ranks end with status 0, and no file is left."""
    run = bench(f"benchmarks/{script}.py", "--device", "cpu", "--dry-run", ranks=4)
    assert "\n# 4 ranks on 1 node\n" in run.out
    number = re.search(r"\n# (\d+) cases?; nothing was measured\n$", run.out)
    assert number, run.out
    assert int(number[1]) == len(re.findall(r"^  \S", run.out, re.MULTILINE)) > 0
    assert {path.name for path in here.rglob("*")} == {"a folder", "run0", "out0", "err0"}


def test_a_report_on_stdout_is_only_json(bench: Bench) -> None:
    run = bench("benchmarks/collectives.py", *FEW, "--json", "-", json=False)
    _, case, end = map(json.loads, run.out.splitlines())
    assert (case["check"], end["status"]) == ("passed", "complete")
    assert run.err.startswith("# torchrun-bench collectives, version ")
    assert "Out of bounds values : 0 OK" in run.err


def test_the_last_lines_suggest_commands_and_a_dry_run_resumes(bench: Bench) -> None:
    """The second run moves the first one's report. A dry run lists what --resume would measure."""
    bench("benchmarks/collectives.py", *FEW)
    run = bench("benchmarks/collectives.py", *FEW)
    last = r"\n# report .*report\.jsonl; python .*\.bak; to compare: python .*\n# elapsed \d.*\n"
    assert re.search(last, run.out, re.DOTALL)
    assert run.report.environment["version"]
    (load_of_node,) = run.report.end["others"]
    assert load_of_node[1] == len(os.sched_getaffinity(0))
    planned = bench("benchmarks/collectives.py", *FEW, "-e", "128", "--dry-run", "--resume")
    case = "\n  all_reduce float32 sum, 128 bytes\n"
    assert planned.out.endswith(f"{case}\n# 1 case; nothing was measured\n")
    assert planned.report.status == "complete"  # it was not changed


def test_a_terminal_shows_the_case_and_the_remaining_time(start: Start) -> None:
    """stderr is a terminal of 200 columns. stdout is a file without progress lines."""
    command = ("benchmarks/collectives.py", *FEW, "-e", "128")
    process = start(*command, ranks=0, columns=200, terminal="err")
    assert process.wait() == 0, process.out
    assert re.search(r"case 1 of 2: all_reduce .*64 .*: ", process.err)
    last = r"case 2 of 2: all_reduce .*128 .*, \d\S* s; about \d\S* s left"
    assert re.search(last, process.err)
    assert "case 1 of 2" not in process.out
